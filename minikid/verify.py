"""Claims of a text, and verifiers that hold them against passages: Ewe's fact-checking feedback (Ewe 3.2).

The paper has VeriScore's two fine-tuned models for this. Here claims are cut out by rule, and a verifier is whatever
maps a claim and passages to a verdict: an entailment scorer (nli.py), or the triples of the passages.
"""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from minikid.grammar import BE, CLAUSE_WORDS, RELATIVES, clauses, find_verb, tokenise
from minikid.nli import NLI
from minikid.passages import Passage
from minikid.text import is_content, sentences, stem, words
from minikid.triples import RELATED, extract_triples


class Verdict(NamedTuple):
    """What passages say of a claim: "supported", "refuted" or "unknown", and the passage that says so."""

    claim: str
    verdict: str
    passage: Passage | None = None


Verifier = Callable[[str, Sequence[Passage]], Verdict]


def claims(text: str) -> list[str]:
    """The statements of a text, in order: its clauses that have a subject and a verb, with all that hangs on them.

    "It lies in Asia, but the capital is small" is two, "It lies in Asia and is small" one. Questions and sentences
    without a verb state nothing. Departure from the paper: pronouns stay, and a list in one clause is one claim.
    """
    found = []
    for sentence in sentences(text):
        starts, stated = [0], False
        for piece in clauses(sentence, tokenise(sentence)):
            lead, verb = piece[0].word in CLAUSE_WORDS, find_verb(piece)
            if verb is not None and verb > lead and piece[0].word not in RELATIVES and stated:
                starts.append(piece[0].start)
            stated |= verb is not None
        parts = [sentence[a:b].strip(" ,;:") for a, b in zip(starts, [*starts[1:], len(sentence)], strict=True)]
        if stated and not sentence.endswith("?"):
            found += [part for part in map(_without_lead, parts) if any(map(is_content, words(part)))]
    return found


def support(verdicts: Sequence[Verdict]) -> float | None:
    """The share of claims that are supported, VeriScore's precision; None where nothing was claimed."""
    return sum(v.verdict == "supported" for v in verdicts) / len(verdicts) if verdicts else None


@dataclass(frozen=True)
class EntailmentVerifier:
    """By the probabilities of an entailment scorer: the passage that entails or contradicts the claim most decides.

    Where one passage entails and another contradicts it, the more probable of the two counts.
    """

    nli: NLI
    supported: float = 0.6  # least probability of entailment
    refuted: float = 0.9  # least probability of contradiction

    def __call__(self, claim: str, passages: Sequence[Passage]) -> Verdict:
        if not passages:
            return Verdict(claim, "unknown")
        scores = self.nli.scores([(f"{passage.title}. {passage.text}".strip(". "), claim) for passage in passages])
        (says, _, denies), (saying, _, denying) = scores.max(0)
        if denies >= self.refuted and denies > says:
            return Verdict(claim, "refuted", passages[int(denying)])
        if says >= self.supported:
            return Verdict(claim, "supported", passages[int(saying)])
        return Verdict(claim, "unknown")


_KEPT = ("first", "last", "only")  # stopwords elsewhere
# What has one holder only ("the capital of Mongolia"), and what happens once, at one time.
_ROLES = """capital currency author first last only largest biggest smallest highest lowest longest shortest oldest
    youngest tallest deepest fastest earliest latest"""
_EVENTS = """born died founded established formed built opened completed published released premiered written wrote
    invented discovered"""
ROLES, EVENTS = (frozenset(map(stem, text.split())) for text in (_ROLES, _EVENTS))
_DOUBT = {"not", "never", "no", "can", "could", "may", "might", "would", "should", "must", "cannot"}
_YEAR = re.compile(r"(?<!\d)\d{4}(?!\d)")


class Fact(NamedTuple):
    key: frozenset[str]  # stems of subject and relation: {"capit", "mongolia"}
    value: str  # "Ulaanbaatar"


class TripleVerifier:
    """By triples, (s, r, o') against (s, r, o), conservatively: no model, and no verdict unless the words say so.

    Subject and relation must have the same content words, or, with "is", subject or object ("Khantak is the capital of
    Mongolia" is about {capital, Mongolia}). Then a claim is supported if its value's words are within a stored value's.
    It is refuted only if the relation has one value: a role or superlative, and no word of any stored value is shared;
    or an event, and both name years but none in common. ("Born in America" is not held against "born in Boston".)

    `triples`: ready-made facts beside those of the passages; one that refutes is shown as a passage of its own.
    """

    def __init__(self, triples: Iterable[tuple[str, str, str]] = ()):
        self.triples = [
            (fact, Passage(f"triple:{i}", "", " ".join(t) + ".")) for i, t in enumerate(triples) for fact in _facts(*t)
        ]

    def __call__(self, claim: str, passages: Sequence[Passage]) -> Verdict:
        known = self.triples + [(fact, passage) for passage in passages for fact in facts(passage.text, passage.title)]
        refuting = None
        for key, value in facts(claim):
            stored = [(fact.value, passage) for fact, passage in known if fact.key == key]
            for said, passage in stored:
                if _stems(value) <= _stems(said):
                    return Verdict(claim, "supported", passage)
            if stored and _conflict(key, value, [said for said, _ in stored]):
                refuting = refuting or stored[0][1]
        return Verdict(claim, "refuted" if refuting else "unknown", refuting)


@functools.lru_cache(maxsize=4096)
def facts(text: str, title: str = "") -> tuple[Fact, ...]:
    """The facts that a text states with a verb."""
    triples = [triple for triple in extract_triples(text, title or None) if triple.relation != RELATED]
    return tuple(dict.fromkeys(fact for triple in triples for fact in _facts(*triple)))


def _facts(subject: str, relation: str, value: str) -> list[Fact]:
    verb, found = set(words(relation)), []
    ways = [(subject, value), (value, subject)] if verb <= BE else [(f"{subject} {relation}", value)]
    for about, holder in ways if not verb & _DOUBT else []:
        both = re.match(r"(.+?) and (.+? of )(.+)", about)  # "capital and largest city of Mongolia"
        keys = [about] if not both else [f"{both[1]} {both[3]}", both[2] + both[3]]
        found += [Fact(_stems(key), holder) for key in keys if _stems(key) and _stems(holder)]
    return found


def _conflict(key: frozenset[str], value: str, stored: Sequence[str]) -> bool:
    if key & EVENTS:
        years, known = set(_YEAR.findall(value)), {year for said in stored for year in _YEAR.findall(said)}
        return bool(years and known) and not years & known
    named = value[:1].isupper() or value[:1].isdigit()
    return bool(key & ROLES) and named and not any(_stems(value) & _stems(said) for said in stored)


def _stems(text: str) -> frozenset[str]:
    return frozenset(stem(word) for word in words(text) if is_content(word) or word.isdigit() or word in _KEPT)


def _without_lead(clause: str) -> str:
    first, _, rest = clause.partition(" ")
    return rest if first.lower() in CLAUSE_WORDS - {"that"} else clause
