"""FILCO: of the passages that were retrieved, only the sentence that the answer needs (Wang et al. 2023).

    q question · o answer · P passages · t a sentence of P · M the model that answers

Three measures find t where o is known, and a sentence is chosen by one of them (`select`):

    strinc    1 if o occurs in t, token for token                                  the first that has it
    lexical   F1 of the words of t and o, as multisets                             the best, if F1 >= 0.5
    cxmi      log M(o | t, q) - log M(o | q)  in nats, summed over o's tokens      the best, if > 0

If no sentence passes, the whole top passage stays. Where o is unknown, a model M_ctx that was trained on (q, P) -> t
writes t (`filter_by_model`), and M reads what it wrote, never a chosen t: the answer is no argument of this way.

    python -m minikid.filter oracle DATA.jsonl --measure strinc --out SILVER.jsonl
    python -m minikid.filter training DATA.jsonl SILVER.jsonl --context CTX.jsonl --answer GEN.jsonl
"""

import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from minikid import metrics
from minikid.decode import Vanilla, generate_batch, greedy
from minikid.generation import likelihoods
from minikid.model import GPT, Tokenizer
from minikid.passages import UNSPACED, Passage
from minikid.text import sentences, words

MEASURES = ("strinc", "lexical", "cxmi")
F1_BOUND = 0.5
Reader = tuple[GPT, Tokenizer]
MAX_TOKENS = 256  # that M_ctx may write: a passage of 100 words, should no sentence do
_UNSPACED = re.compile(f"[{UNSPACED}][\u3099\u309a]*")


class Selection(NamedTuple):
    """What is left of the passages of one question."""

    passages: list[Passage]  # one, with its title: the sentence, or the whole top passage; [] where there was none
    found: bool  # whether it is a sentence that passed


# --- the measures


def dpr_tokens(text: str) -> list[str]:
    """DPR's normal form: NFD, lower case, runs of letters, digits and marks, every other visible character by itself.

    A departure: in scripts written without spaces, where a whole clause would be one run, each character is a token.
    """
    parts = []
    for character in unicodedata.normalize("NFD", text).lower():
        kind = unicodedata.category(character)[0]
        parts.append(character if kind in "LNM" else " " if kind in "ZC" else f" {character} ")
    return _UNSPACED.sub(r" \g<0> ", "".join(parts)).split()


def string_inclusion(text: str, answers: Sequence[str]) -> bool:
    """StrInc: whether the tokens of an answer follow each other in the text ("art" is not in "party").

    An answer without tokens is in no text.
    """
    padded = f" {' '.join(dpr_tokens(text))} "
    return any(f" {' '.join(tokens)} " in padded for tokens in map(dpr_tokens, answers) if tokens)


def lexical_overlap(text: str, answers: Sequence[str], question: str = "") -> float:
    """F1 of the words as multisets, 0 to 1, of the best answer; with `question` each answer is q and o together.

    Words are SQuAD's (`metrics.normal_words`), never characters: "listen" and "silent" have nothing in common.
    """
    wanted = [f"{question} {answer}" for answer in answers if answer.strip()]
    return (metrics.best(metrics.unigram_f1, text, wanted) or 0.0) / 100


def cxmi(model: GPT, tokenizer: Tokenizer, text: str, question: str, answer: str, chat: bool | None = None) -> float:
    """log M(o | t, q) - log M(o | q): by how many nats the text makes the answer more probable.

    M reads `with_context`, in the chat template if it has one, unless `chat` says otherwise.
    """
    return cxmi_scores((model, tokenizer), [Passage("", "", text)], question, [answer], chat)[0]


def cxmi_scores(
    reader: Reader, candidates: Sequence[Passage], question: str, answers: Sequence[str], chat: bool | None = None
) -> list[float]:
    """CXMI of each candidate, for the answer that gains most; 0 without an answer that has text."""
    model, tokenizer = reader
    targets = [tokenizer.encode(f" {answer.strip()}") for answer in answers if answer.strip()]
    if not targets or not candidates:
        return [0.0] * len(candidates)
    alone = tokenizer.prompt(question, chat)
    within = [tokenizer.prompt(with_context(question, [t]), chat) for t in candidates]
    gains = []
    for ids in targets:
        without = likelihoods(model, [alone], [ids])[0].sum()
        gains.append([float(found.sum() - without) for found in likelihoods(model, within, [ids] * len(within))])
    return [max(column) for column in zip(*gains, strict=True)]


# --- the choice


def candidates_of(passages: Sequence[Passage]) -> list[Passage]:
    """The sentences, each with its passage's id and title."""
    return [passage._replace(text=text) for passage in passages for text in sentences(passage.text)]


def choose(measure: str, scores: Sequence[float]) -> int | None:
    """The number of the sentence that is kept, the first among equals; None if none passes."""
    best = max(range(len(scores)), key=scores.__getitem__, default=None)
    if best is None or not (scores[best] >= F1_BOUND if measure == "lexical" else scores[best] > 0):
        return None
    return best


def select(
    measure: str,
    passages: Sequence[Passage],
    question: str,
    answers: Sequence[str],
    reader: Reader | None = None,
    with_question: bool = False,
    chat: bool | None = None,
) -> Selection:
    """The sentence that a measure chooses, or else the whole top passage. `reader`: M, which only cxmi needs.

    `with_question` lets lexical compare t with q and o together. ValueError for an unknown measure.
    """
    if measure not in MEASURES:
        raise ValueError(f"expected a measure of {', '.join(MEASURES)}, got {measure!r}")
    candidates = candidates_of(passages)
    if measure == "cxmi":
        scores = cxmi_scores(reader, candidates, question, answers, chat)
    elif measure == "lexical":
        scores = [lexical_overlap(t.text, answers, question if with_question else "") for t in candidates]
    else:
        scores = [float(string_inclusion(t.text, answers)) for t in candidates]
    chosen = choose(measure, scores)
    return Selection(list(passages[:1]), False) if chosen is None else Selection([candidates[chosen]], True)


def filter_by_model(
    reader: Reader,
    questions: Sequence[tuple[str, Sequence[Passage]]],
    chat: bool | None = None,
    max_new_tokens: int = MAX_TOKENS,
) -> list[Selection]:
    """What M_ctx writes, greedily, for each (q, P), as a passage; the whole top passage if it writes nothing.

    The text has the title and id of the passage that it stands in, and none if it stands in none.
    """
    model, tokenizer = reader
    asked = [(question, passages) for question, passages in questions if passages]
    prompts = [tokenizer.prompt(context_prompt(question, passages), chat) for question, passages in asked]
    room = max(model.config.max_positions - max(map(len, prompts), default=0), 1)
    length = min(max_new_tokens, room)
    rows = generate_batch(model, prompts, [Vanilla()] * len(asked), greedy, max_new_tokens=length)
    written = iter([tokenizer.decode(row.tokens).strip().split("\n")[0] for row in rows])
    found = []
    for _, passages in questions:
        if not passages or not (text := next(written)):
            found.append(Selection(list(passages[:1]), False))
            continue
        source = next((passage for passage in passages if text in one_line(passage.text)), Passage("", "", ""))
        found.append(Selection([source._replace(text=text)], True))
    return found


def word_counts(passages: Sequence[Passage], selection: Selection) -> tuple[int, int]:
    """|P| and |t|, in words of the texts; titles are read with both and not counted."""
    before, left = (sum(len(words(passage.text)) for passage in some) for some in (passages, selection.passages))
    return before, left


def saving(counts: Sequence[Sequence[int]], found: Sequence[bool]) -> str:
    """|P|/|t| over some questions, and in how many a sentence was found."""
    before, left = map(sum, zip(*counts, strict=True)) if counts else (0, 0)
    ratio = f"|P|/|t| = {before / left:.2f}" if left else "nothing left"
    return f"{before:,} words of passages, {left:,} left, {ratio}; a sentence for {sum(found)} of {len(found)}"


# --- the prompts


def with_context(question: str, passages: Sequence[Passage]) -> str:
    """The prompt of retrieval-augmented generation: the passages, best first, then the question."""
    return _ask("Answer the question using these passages.", question, passages) if passages else question


def context_prompt(question: str, passages: Sequence[Passage]) -> str:
    """What M_ctx answers with t: (q, P)."""
    return _ask("Copy the sentence of these passages that answers the question.", question, passages)


def _ask(task: str, question: str, passages: Sequence[Passage]) -> str:
    blocks = [f"{passage.title}: {passage.text}" if passage.title else passage.text for passage in passages]
    return "\n\n".join([task, *blocks, f"Question: {question}"])


def one_line(text: str) -> str:
    """The text with single spaces: M_ctx's output ends at a line's end."""
    return " ".join(text.split())


if __name__ == "__main__":
    from minikid.silver import main

    sys.exit(main())
