"""Rethinking with Retrieval (He et al. 2022): of several reasoning paths, trust those that the evidence supports.

    N paths · F facts of all paths · D width of the sentence encoder

Sampled paths (`chain.py`) are read into facts and an answer; each fact gets a premise, the most similar of what BM25
finds for it, and three scores against it:

    M  similarity: cosine of the sentence encoder's vectors of premise and fact, from -1 to 1
    E  probability that the premise entails the fact
    C  probability that it contradicts it

A path's faithfulness f is a sum over its facts (A.2); answers are chosen by faithful voting (Eq. 1) or with the single
best path (5.3). `select_facts` is Variant I, `factgen.generate_facts` Variant II.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from minikid.chain import Chain, normalise, parse
from minikid.encoder import Encoder
from minikid.nli import NLI
from minikid.passages import Passage
from minikid.retrieve import Retriever

T_M, T_E, T_C = 0.5, 0.6, 0.99  # A.2's thresholds of M, E and C
ALIKE = 0.7  # cosine from which two facts are on one topic; the paper gives no number


class Fact(NamedTuple):
    """A fact and what the evidence says about it; without a premise all three scores are 0."""

    text: str
    premise: Passage | None
    similarity: float  # M
    entailment: float  # E
    contradiction: float  # C

    @property
    def scores(self) -> tuple[float, float, float]:
        return self.similarity, self.entailment, self.contradiction


Judge = Callable[[Sequence[str]], list[Fact]]


def faithfulness(scores: Iterable[Sequence[float]], form: int = 1) -> float:
    """f of a path, or of a single fact, from one (M, E, C) per fact (RR A.2); 0 without facts.

    f1 = sum [M if M >= T_m else E] - C;  f2 = sum M + E;  f3 = sum E [E >= T_e] - C [C >= T_c]

    The sum is rounded once, so that the order of facts does not matter. ValueError for another form.
    """
    if form == 1:
        terms = [(M if M >= T_M else E) - C for M, E, C in scores]
    elif form == 2:
        terms = [M + E for M, E, _ in scores]
    elif form == 3:
        terms = [E * (E >= T_E) - C * (C >= T_C) for _, E, C in scores]
    else:
        raise ValueError(f"expected a form of 1, 2 or 3 (RR A.2), came {form}")
    return math.fsum(terms)


class Evidence:
    """The judge of facts: premises from a retriever, M from a sentence encoder, E and C from an NLI model (RR 4.2)."""

    def __init__(self, retriever: Retriever, encoder: Encoder, nli: NLI, candidates: int = 10):
        self.retriever, self.encoder, self.nli, self.candidates = retriever, encoder, nli, candidates

    def __call__(self, facts: Sequence[str]) -> list[Fact]:
        """Each fact with its premise and scores, in order; equal facts are judged once. No hit: no premise."""
        # F facts -> F
        judged = {fact: Fact(fact, None, 0.0, 0.0, 0.0) for fact in facts}
        hits = {fact: [h.passage for h in self.retriever.search(fact, self.candidates)] for fact in judged}
        passages = list(dict.fromkeys(passage for found in hits.values() for passage in found))
        row = {passage: i for i, passage in enumerate(passages)}
        vectors = self.encode([(passage.title, passage.text) for passage in passages])
        best = {}
        for fact, vector in zip(judged, self.encode(list(judged)), strict=True):
            if hits[fact]:
                cosines = vectors[[row[passage] for passage in hits[fact]]] @ vector
                best[fact] = hits[fact][int(cosines.argmax())], float(cosines.max())
        pairs = [(premise_text(passage), fact) for fact, (passage, _) in best.items()]
        for (fact, found), (E, _, C) in zip(
            best.items(), self.nli.scores(pairs).tolist() if pairs else [], strict=True
        ):
            judged[fact] = Fact(fact, *found, E, C)
        return [judged[fact] for fact in facts]

    def encode(self, texts: Sequence) -> np.ndarray:
        """Vectors of length 1."""
        # -> [len(texts), D]
        vectors = self.encoder.encode(texts)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)


def premise_text(passage: Passage) -> str:
    """A passage as a premise: its title in front where the text does not name it."""
    named = not passage.title or passage.title.lower() in passage.text.lower()
    return passage.text if named else f"{passage.title}: {passage.text}"


@dataclass(frozen=True)
class Judged:
    """A reasoning path with its facts' evidence and its faithfulness."""

    chain: Chain
    facts: list[Fact]
    score: float  # f

    @property
    def answer(self) -> str | None:
        """As it votes."""
        return None if self.chain.answer is None else normalise(self.chain.answer)


@dataclass(frozen=True)
class Rethought:
    """What `rethink` found; places are places in `paths`."""

    paths: list[Judged]
    votes: dict[str, float]  # sum of f by normalised answer, the best first
    answer: str | None  # faithful voting's (Eq. 1), normalised; None where no path states one
    winner: int | None  # the most faithful path that votes for this answer
    best: int | None  # the most faithful path that gives any (5.3, without voting)


def rethink(paths: Iterable[str], judge: Judge, form: int = 1) -> Rethought:
    """Faithful inference over the texts of reasoning paths (RR 3): evidence for each fact, f of each path, the vote.

    `judge` gives facts their scores, as `Evidence` does. Every choice between equals is made by the texts themselves,
    so the order of the paths does not matter. Paths without an answer do not vote.
    """
    chains = [parse(text) for text in paths]
    facts = iter(judge([fact for chain in chains for fact in chain.facts]))
    judged = []
    for chain in chains:
        found = [next(facts) for _ in chain.facts]
        judged.append(Judged(chain, found, faithfulness((fact.scores for fact in found), form)))
    answers = [path.answer for path in judged]
    votes, counts = vote(answers, [path.score for path in judged]), majority(answers)
    answer = next(iter(votes), None)
    stating = [i for i, path in enumerate(judged) if path.answer is not None]
    stating.sort(key=lambda i: (-judged[i].score, -counts[answers[i]], judged[i].chain.text))
    winners = sorted((i for i in stating if answers[i] == answer), key=lambda i: judged[i].score == 0)
    return Rethought(judged, votes, answer, next(iter(winners), None), next(iter(stating), None))


def vote(answers: Sequence[str | None], scores: Sequence[float]) -> dict[str, float]:
    """The sum of the scores of each answer, the best answer first (Eq. 1); empty where there is no answer.

    A path of score 0, about which the evidence is silent, abstains, so that adding it changes nothing; literally, it
    would win where all others are contradicted. Equal sums: more paths, then alphabetical order. Where all abstain
    they are counted instead, which is self-consistency.
    """
    voters: dict[str, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        if answer is not None and score != 0:
            voters[answer].append(score)
    if not voters:
        return majority(answers)
    sums = {answer: math.fsum(given) for answer, given in voters.items()}
    return {answer: sums[answer] for answer in sorted(sums, key=lambda a: (-sums[a], -len(voters[a]), a))}


def majority(answers: Sequence[str | None]) -> dict[str, float]:
    """How many paths give each answer, the most frequent first, equals by alphabet: self-consistency (Wang et al.)."""
    given = [answer for answer in answers if answer is not None]
    return {answer: float(given.count(answer)) for answer in sorted(set(given), key=lambda a: (-given.count(a), a))}


def most_consistent(texts: Sequence[str]) -> str:
    """Self-consistency: the first of the paths with the most frequent answer; "" where none states one."""
    answers = [None if (answer := parse(text).answer) is None else normalise(answer) for text in texts]
    best = next(iter(majority(answers)), None)
    return "" if best is None else texts[answers.index(best)]


def cluster(vectors: np.ndarray, threshold: float = ALIKE) -> list[int]:
    """Greedy clusters of vectors of length 1: each joins the most similar founder before it, or founds a cluster."""
    # [F, D] -> F numbers
    founders: list[int] = []
    numbers = []
    for i, vector in enumerate(vectors):
        cosines = vectors[founders] @ vector
        if founders and cosines.max() >= threshold:
            numbers.append(int(cosines.argmax()))
        else:
            numbers.append(len(founders))
            founders.append(i)
    return numbers


def select_facts(
    found: Rethought, encode: Callable[[Sequence[str]], np.ndarray], form: int = 1, threshold: float = ALIKE
) -> list[Fact]:
    """Variant I, fact selection (RR A.4): each fact of the best path gives way to the most faithful of its topic.

    Topics are greedy clusters of the facts of all paths, those of the best path first, then by alphabet. One fact for
    each of the best path's, in their order; none where no path states an answer.
    """
    own = [] if found.best is None else found.paths[found.best].facts
    if not own:
        return []
    rest = {fact for path in found.paths for fact in path.facts}.difference(own)
    facts = [*own, *sorted(rest, key=lambda fact: fact.text)]
    topics = cluster(encode([fact.text for fact in facts]), threshold)
    groups = ([fact for fact, number in zip(facts, topics, strict=True) if number == topic] for topic in topics)
    return [
        max(group, key=lambda fact: faithfulness([fact.scores], form)) for group, _ in zip(groups, own, strict=False)
    ]
