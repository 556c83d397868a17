"""Scores against their literal formulas and cases by hand; bootstrap intervals against loops and known means."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sacrebleu.metrics import BLEU

from minikid.metrics import (
    Estimate,
    best,
    bleu1,
    coverage,
    exact_match,
    normal_words,
    provenance_stems,
    resampled_means,
    resamples,
    rouge_l,
    score,
    unigram_f1,
)
from minikid.text import is_content, stem
from minikid.triples import extract_triples

WORDS = st.lists(st.sampled_from("cat dog sat mat blue seven old".split()), max_size=9)
TEXT = st.one_of(
    st.text(max_size=20),
    st.lists(
        st.sampled_from(["The ", "a", "an ", "cat", "Cats.", " ", "東京", "é", "e\u0301", "1,000", "$", "—", "\n"])
    ).map("".join),
)
MEASURES = (bleu1, rouge_l, unigram_f1, exact_match)


# --- literal forms, for words that every tokenizer takes as they are


def literal_bleu1(found, wanted):
    """Clipped precision times brevity penalty (BLEU 2.1 and 2.2, N = 1)."""
    if not found:
        return 0.0
    matches, left = 0, list(wanted)
    for word in found:
        if word in left:
            left.remove(word)
            matches += 1
    penalty = 1.0 if len(found) >= len(wanted) else math.exp(1 - len(wanted) / len(found))
    return 100 * penalty * matches / len(found)


def literal_lcs(a, b):
    if not a or not b:
        return 0
    if a[0] == b[0]:
        return 1 + literal_lcs(a[1:], b[1:])
    return max(literal_lcs(a[1:], b), literal_lcs(a, b[1:]))


def harmonic(matches, found, wanted):
    if not matches:
        return 0.0
    precision, recall = matches / found, matches / wanted
    return 100 * 2 * precision * recall / (precision + recall)


@given(WORDS, WORDS.filter(bool))
@settings(max_examples=150, deadline=None)
def test_scores_equal_their_literal_formulas(found, wanted):
    text, answer = " ".join(found), " ".join(wanted)
    assert bleu1(text, answer) == pytest.approx(literal_bleu1(found, wanted), abs=1e-9)
    assert rouge_l(text, answer) == pytest.approx(
        harmonic(literal_lcs(tuple(found), tuple(wanted)), len(found), len(wanted)), abs=1e-9
    )
    left = list(wanted)
    matches = sum(word in left and (left.remove(word) or True) for word in found)
    assert unigram_f1(text, answer) == pytest.approx(harmonic(matches, len(found), len(wanted)), abs=1e-9)
    assert exact_match(text, answer) == (100 if found == wanted else 0)


@given(WORDS, WORDS.filter(bool), st.sampled_from(["exp", "floor", "add-k", "none"]))
@settings(max_examples=60, deadline=None)
def test_smoothing_and_effective_order_change_nothing_in_bleu1(found, wanted, method):
    other = BLEU(max_ngram_order=1, effective_order=False, smooth_method=method)
    theirs = other.sentence_score(" ".join(found), [" ".join(wanted)]).score
    assert bleu1(" ".join(found), " ".join(wanted)) == pytest.approx(theirs, abs=1e-9)


@given(TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_scores_are_percentages_or_undefined_by_the_answer_alone(text, answer):
    for measure in MEASURES:
        value = measure(text, answer)
        assert value is None or 0 <= value <= 100 + 1e-9
        assert (value is None) == (measure("", answer) is None)
        if measure(answer, answer) is not None:
            assert measure(answer, answer) == pytest.approx(100)
            assert measure("", answer) == 0


@given(TEXT)
@settings(max_examples=100, deadline=None)
def test_the_normal_form_is_its_own_and_does_not_hang_on_case_and_composition(text):
    found = normal_words(text)
    assert normal_words(" ".join(found)) == found
    assert found == normal_words(f" «{text}» !")


def test_normal_words_by_hand():
    assert normal_words("The U.S. — a well-known, 1,000-year-old “case”!") == ["us", "wellknown", "1000yearold", "case"]
    assert normal_words("Theatre, an anthem") == ["theatre", "anthem"]
    assert normal_words("The") == ["the"]
    assert normal_words("A the") == ["a", "the"]
    assert normal_words("東京 is") == ["東", "京", "is"]
    assert normal_words("cafe\u0301") == normal_words("CAFÉ") == ["café"]
    assert normal_words(" ...$ ") == []


def test_f1_is_of_words_and_of_multisets():
    assert unigram_f1("listen", "silent") == 0
    assert unigram_f1("paris paris paris", "Paris, France") == pytest.approx(2 * 1 / (3 + 2) * 100)
    assert unigram_f1("the capital is Paris", "Paris!") == 50
    assert unigram_f1("東京です", "東京") == pytest.approx(2 * 2 / (4 + 2) * 100)


def test_exact_match_by_hand():
    assert exact_match("1990.", "1990") == exact_match("The Beatles", "beatles") == exact_match("A", "a.") == 100
    assert exact_match("1990", "1991") == exact_match("", "The") == exact_match("beatles the b", "b beatles") == 0


@pytest.mark.parametrize(
    ("answer", "defined"), [("", ()), (" \n", ()), ("?!", (bleu1,)), ("東京", (bleu1, unigram_f1, exact_match))]
)
def test_an_answer_without_words_is_undefined_never_0(answer, defined):
    """By each measure's own words: rouge-score knows those of a-z and 0-9, sacrebleu punctuation as well."""
    for measure in MEASURES:
        assert (measure("some text", answer) is not None) == (measure in defined)


def test_of_several_answers_the_best_defined_one_counts():
    scores = score("It was Paris", ["", "London", "Paris", "Paris it was"], frozenset())
    assert scores["F1"] == 100
    assert scores["EM"] == 0
    assert scores["BLEU-1"] == pytest.approx(200 / 3)  # "Paris" and "was"
    assert scores["Cov"] is None
    assert list(scores) == ["BLEU-1", "ROUGE-L", "F1", "EM", "Cov"]
    assert score("Paris", [], frozenset(["pari"])) == dict.fromkeys(scores) | {"Cov": 100}
    assert best(unigram_f1, "x", ["", "?"]) is None


def test_rouge_l_does_not_stem_and_bleu_keeps_case():
    assert rouge_l("driving cars", "Driving CAR") == 50
    assert bleu1("driving cars", "Driving cars") == pytest.approx(50)


# --- Cov


def test_coverage_by_hand():
    provenance = provenance_stems([("driving ability", "is impaired by", "the use of marijuana"), ("it", "is", "1990")])
    assert provenance == {stem(word) for word in ("driving", "ability", "impaired", "use", "marijuana")}
    assert coverage("He drives and uses marijuana, marijuana!", provenance) == 60
    assert coverage("", provenance) == 0
    assert coverage("marijuana", provenance_stems([])) is None
    assert coverage("it is", provenance_stems([("it", "is", "1990")])) is None


@given(st.lists(st.sampled_from(["driving", "drives", "the", "cars", "Car", "is", "1990", "Ulaanbaatar", "."])))
@settings(deadline=None)
def test_coverage_equals_its_literal_form(found):
    triples = extract_triples("A driver drives a car. The capital of Mongolia is Ulaanbaatar since 1911.")
    unigrams = {stem(w) for t in triples for part in t for w in part.lower().split() if is_content(w)}
    hit = [w for w in unigrams if any(stem(f.lower()) == w for f in found)]
    assert coverage(" ".join(found), provenance_stems(triples)) == pytest.approx(100 * len(hit) / len(unigrams))


# --- the bootstrap

VALUES = st.lists(st.one_of(st.none(), st.floats(-100, 100)), min_size=1, max_size=8)


@given(VALUES, st.data())
@settings(max_examples=80, deadline=None)
def test_resampled_means_equal_a_loop_over_drawn_questions(values, data):
    n = len(values)
    per = data.draw(st.one_of(st.none(), st.lists(st.floats(0.1, 9), min_size=n, max_size=n)))
    draws = [list(range(n)), *data.draw(st.lists(st.lists(st.integers(0, n - 1), min_size=n, max_size=n), max_size=5))]
    weights = np.array([[draw.count(i) for i in range(n)] for draw in draws], dtype=float)
    for draw, mean in zip(draws, resampled_means(values, weights, per), strict=True):
        drawn = [i for i in draw if values[i] is not None]
        if not drawn:
            assert math.isnan(mean)
            continue
        size = len(drawn) if per is None else sum(per[i] for i in drawn)
        assert mean == pytest.approx(sum(values[i] for i in drawn) / size, abs=1e-9)


@given(st.integers(1, 20), st.integers(-5, 5))
@settings(max_examples=30, deadline=None)
def test_resamples_draw_n_questions_each_and_begin_with_the_sample(n, seed):
    weights = resamples(n, seed, times=50)
    assert weights.shape == (51, n)
    assert (weights[0] == 1).all()
    assert (weights.sum(1) == n).all()
    assert ((weights >= 0) & (weights == weights.round())).all()
    assert (weights == resamples(n, seed, times=50)).all()
    assert n < 5 or (weights != resamples(n, seed + 1, times=50)).any()


def test_each_question_is_drawn_as_often():
    """A multinomial's mean and variance, 1 and 1 - 1/n, in 20,000 draws."""
    drawn = resamples(5, 0, times=20_000)[1:]
    assert drawn.mean(0) == pytest.approx([1] * 5, abs=0.03)
    assert drawn.var(0) == pytest.approx([0.8] * 5, abs=0.04)


def test_95_percent_intervals_cover_a_known_mean_about_that_often():
    """400 samples of 60 from a skewed distribution of mean 1; percentile intervals are a little short."""
    generator, weights = np.random.default_rng(0), resamples(60, 0, times=400)
    estimates = [Estimate.of(resampled_means(list(generator.exponential(size=60)), weights)) for _ in range(400)]
    assert 0.90 <= np.mean([low <= 1 <= high for _, low, high in estimates]) <= 0.97
    assert all(low <= mean <= high for mean, low, high in estimates)


def test_an_interval_is_as_wide_as_the_normal_one():
    values = list(np.random.default_rng(1).normal(50, 10, size=400))
    mean, low, high = Estimate.of(resampled_means(values, resamples(400, 0)))
    assert mean == pytest.approx(np.mean(values))
    half = 1.96 * np.std(values) / 20
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.06)


def test_differences_are_paired_by_question():
    """Two decoders that differ by a constant differ by it in each resample, however much the questions vary."""
    values = list(np.random.default_rng(2).normal(50, 30, size=40))
    weights = resamples(40, 0, times=500)
    difference = resampled_means([value + 3 for value in values], weights) - resampled_means(values, weights)
    assert Estimate.of(difference) == pytest.approx((3, 3, 3))


def test_undefined_values_are_left_out_of_the_mean():
    weights = resamples(4, 0, times=500)
    assert Estimate.of(resampled_means([None, 10, None, 10], weights)) == pytest.approx((10, 10, 10))
    assert Estimate.of(resampled_means([None] * 4, weights)) is None
    mean, low, high = Estimate.of(resampled_means([6, 6, None, 2], weights, per=[2, 2, 5, 2]))
    assert (mean, low, high) == pytest.approx((14 / 6, 1, 3))
