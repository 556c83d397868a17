"""Claims and verifiers on sentences with known verdicts."""

import pytest
import torch

from minikid.passages import Passage
from minikid.verify import EntailmentVerifier, TripleVerifier, Verdict, claims, support

PASSAGES = [
    Passage("0", "Mongolia", "Ulaanbaatar is the capital and largest city of Mongolia. It has an opera house."),
    Passage("1", "Bridge", "The bridge was opened in 1932 by the mayor. It may be the oldest bridge of Japan."),
    Passage("2", "Curie", "Marie Curie was born in Warsaw in 1867. Paris is not the capital of Poland."),
]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It lies in Asia, but the capital is small.", ["It lies in Asia", "the capital is small."]),
        ("It lies in Asia and is small.", ["It lies in Asia and is small."]),
        ("Dr. Smith was born in the U.S. in 1950.", ["Dr. Smith was born in the U.S. in 1950."]),
        ("The river is long; the sea is deep! Is it?", ["The river is long", "the sea is deep!"]),
        ("The bridge, which was opened in 1932, is old.", ["The bridge, which was opened in 1932, is old."]),
        ("When was it built?", []),
        ("Hello! A car.", []),
        ("It is. 3.5", []),
        ("", []),
    ],
)
def test_claims(text, expected):
    assert claims(text) == expected


def test_the_share_of_supported_claims_is_undefined_without_claims():
    verdicts = [Verdict("a", "supported"), Verdict("b", "unknown"), Verdict("c", "refuted"), Verdict("d", "unknown")]
    assert support(verdicts) == 0.25
    assert support([]) is None


@pytest.mark.parametrize(
    ("claim", "verdict", "passage"),
    [
        ("Ulaanbaatar is the capital of Mongolia.", "supported", 0),
        ("The capital of Mongolia is Ulaanbaatar", "supported", 0),
        ("The capital of Mongolia is Khantak.", "refuted", 0),
        ("Khantak is the largest city of Mongolia.", "refuted", 0),
        ("Khantak is a city of Mongolia.", "unknown", None),
        ("Khantak is not the capital of Mongolia.", "unknown", None),
        ("The capital of Mongolia is a large city.", "unknown", None),
        ("The capital of Japan is Tokyo.", "unknown", None),
        ("The bridge was opened in 1932.", "supported", 1),
        ("The bridge was opened in 1950", "refuted", 1),
        ("The bridge was opened by the king.", "unknown", None),
        ("The bridge was closed in 1950.", "unknown", None),
        ("Kintai Bridge is the oldest bridge of Japan.", "unknown", None),  # "may be" states nothing
        ("Marie Curie was born in 1900 in Warsaw.", "refuted", 2),
        ("Marie Curie was born in Paris.", "unknown", None),
        ("The capital of Poland is Warsaw.", "unknown", None),
        ("", "unknown", None),
    ],
)
def test_triples_say_only_what_the_words_say(claim, verdict, passage):
    found = TripleVerifier()(claim, PASSAGES)
    assert found == (claim, verdict, None if passage is None else PASSAGES[passage])


def test_ready_made_triples_refute_as_a_passage():
    verifier = TripleVerifier([("Mongolia", "currency", "tugrik"), ("Mongolia", "language", "Mongolian")])
    verdict = verifier("The currency of Mongolia is the Yen.", [])
    assert (verdict.verdict, verdict.passage.text) == ("refuted", "Mongolia currency tugrik.")
    assert verifier("The currency of Mongolia is the tugrik.", []).verdict == "supported"
    assert verifier("The language of Mongolia is English.", []).verdict == "unknown"  # a country may have several


class Table:
    """An entailment scorer that knows its answers."""

    def __init__(self, *rows):
        self.rows = rows

    def scores(self, pairs):
        self.pairs = pairs
        return torch.tensor(self.rows)


@pytest.mark.parametrize(
    ("rows", "verdict", "passage"),
    [
        (((0.7, 0.2, 0.1), (0.2, 0.7, 0.1)), "supported", 0),
        (((0.1, 0.2, 0.7), (0.02, 0.02, 0.96)), "refuted", 1),
        (((0.97, 0.02, 0.01), (0.02, 0.03, 0.95)), "supported", 0),
        (((0.4, 0.4, 0.2), (0.3, 0.4, 0.3)), "unknown", None),
    ],
)
def test_the_entailment_verifier_takes_the_passage_that_decides(rows, verdict, passage):
    scorer = Table(*rows)
    found = EntailmentVerifier(scorer)("A claim", PASSAGES[:2])
    assert found == ("A claim", verdict, None if passage is None else PASSAGES[passage])
    assert scorer.pairs[1] == ("Bridge. " + PASSAGES[1].text[:-1], "A claim")


def test_no_passages_leave_a_claim_unknown():
    assert EntailmentVerifier(Table())("A claim", []) == ("A claim", "unknown", None)
    assert TripleVerifier()("The capital of Mongolia is Khantak.", []).verdict == "unknown"
