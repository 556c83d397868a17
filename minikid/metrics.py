"""Scores of generated texts, 0 to 100, and bootstrap intervals for their means.

    n questions · R resamples

    BLEU-1   sacrebleu on sentences: clipped unigram precision times brevity penalty, 13a tokens, case kept, unsmoothed
    ROUGE-L  rouge-score: F-measure of the longest common subsequence, its own tokens, no stemmer
    F1       of words as multisets, behind SQuAD's normalisation
    EM       equality behind the same normalisation
    Cov      share of the words of the provenance's triples that occur in the text, as stems

Of several answers the best score counts. A score that is undefined, since no answer has words that it could be
measured against or since the provenance has no triples, is None, never 0; a text without words scores 0.
"""

import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from minikid.passages import UNSPACED
from minikid.text import is_content, stem, words

ARTICLES = frozenset(("a", "an", "the"))
RESAMPLES = 10_000
_UNSPACED = re.compile(f"[{UNSPACED}]")


def score(text: str, answers: Iterable[str], provenance: frozenset[str]) -> dict[str, float | None]:
    """All scores of one text, by name; `provenance` is what `provenance_stems` gives."""
    answers = list(answers)
    return {
        "BLEU-1": best(bleu1, text, answers),
        "ROUGE-L": best(rouge_l, text, answers),
        "F1": best(unigram_f1, text, answers),
        "EM": best(exact_match, text, answers),
        "Cov": coverage(text, provenance),
    }


def best(measure: Callable[[str, str], float | None], text: str, answers: Iterable[str]) -> float | None:
    """The greatest score over the answers for which there is one."""
    return max((value for answer in answers if (value := measure(text, answer)) is not None), default=None)


def bleu1(text: str, answer: str) -> float | None:
    """Sentence-level BLEU of unigrams alone. Smoothing and effective order change nothing at this order."""
    return load_scorers()[0].sentence_score(text, [answer]).score if answer.strip() else None


def rouge_l(text: str, answer: str) -> float | None:
    """ROUGE-L's F-measure without stemming, the default of rouge-score; its tokens are runs of a-z and 0-9."""
    _, scorer, tokenizer = load_scorers()
    return 100 * scorer.score(answer, text)["rougeL"].fmeasure if tokenizer.tokenize(answer) else None


def unigram_f1(text: str, answer: str) -> float | None:
    """F1 of the words of text and answer as multisets (SQuAD)."""
    found, wanted = Counter(normal_words(text)), Counter(normal_words(answer))
    if not wanted:
        return None
    return 200 * (found & wanted).total() / (found.total() + wanted.total())


def exact_match(text: str, answer: str) -> float | None:
    """100 if the words of text and answer are the same in the same order, else 0 (SQuAD)."""
    wanted = normal_words(answer)
    return 100.0 * (normal_words(text) == wanted) if wanted else None


def normal_words(text: str) -> list[str]:
    """SQuAD's normal form: lower case, punctuation and articles dropped, divided at white space.

    Departures: punctuation and symbols of every script are dropped, not ASCII's alone; a character of a script written
    without spaces is a word; and where there are only articles they stay, so that an answer "A" is not empty.
    """
    kept = "".join(c for c in unicodedata.normalize("NFC", text).lower() if unicodedata.category(c)[0] not in "PS")
    found = _UNSPACED.sub(r" \g<0> ", kept).split()
    return [word for word in found if word not in ARTICLES] or found


def provenance_stems(triples: Iterable[Sequence[str]]) -> frozenset[str]:
    """The distinct stems of the content words of triples (subject, relation, object)."""
    return frozenset(stem(word) for triple in triples for part in triple for word in words(part) if is_content(word))


def coverage(text: str, provenance: frozenset[str]) -> float | None:
    """Cov: how much of the provenance the text contains (KID 4.3).

    Words are compared as stems, as G_ext is looked up, and stopwords are left out, which any text contains.
    """
    return 100 * len(provenance.intersection(map(stem, words(text)))) / len(provenance) if provenance else None


class Estimate(NamedTuple):
    """A mean and its 95% percentile bootstrap interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Estimate | None":
        """From what `resampled_means` gives, or the difference of two such; None where the mean is undefined."""
        # [1 + R] -> three numbers
        if np.isnan(values[0]):
            return None
        return cls(float(values[0]), *map(float, np.nanquantile(values[1:], [0.025, 0.975])))


def resamples(n: int, seed: int, times: int = RESAMPLES) -> np.ndarray:
    """How often each of n questions stands in a resample; the first row is the sample itself, each question once.

    One set of resamples for all decoders and metrics makes their differences paired by question.
    """
    # -> [1 + R, n]
    drawn = np.random.default_rng(seed % 2**64).multinomial(n, np.full(n, 1 / n), size=times)
    return np.concatenate([np.ones((1, n)), drawn])


def resampled_means(values: Sequence[float | None], weights: np.ndarray, per: Sequence[float] | None = None):
    """Means of the defined values in each resample, NaN where there is none; with `per` sum(values) / sum(per)."""
    # [n], [1 + R, n] -> [1 + R]
    defined = np.array([value is not None for value in values], dtype=float)
    total = weights @ np.array([0.0 if value is None else value for value in values])
    size = weights @ (defined if per is None else defined * np.asarray(per))
    return np.divide(total, size, out=np.full(len(weights), np.nan), where=size > 0)


@functools.cache
def load_scorers() -> tuple[Any, Any, Any]:
    """sacrebleu's BLEU, rouge-score's scorer and its tokenizer. ValueError where one of the two is not installed."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
        from rouge_score.tokenizers import DefaultTokenizer
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ValueError(
            f"scores need sacrebleu and rouge-score ({error}); pip install sacrebleu rouge-score"
        ) from None
    tokenizer = DefaultTokenizer(use_stemmer=False)
    bleu = BLEU(max_ngram_order=1, effective_order=True, smooth_method="none")
    return bleu, RougeScorer(["rougeL"], tokenizer=tokenizer), tokenizer
