"""Variant II of rethinking with retrieval, fact generation (RR 5.3, A.4).

A departure: the paper has a model for each step (questions, answers, statements, a filter of questions); here the
language model itself takes them all, each from a few examples, and E and C alone filter.
"""

import json
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple

from minikid.rethink import T_C, T_E, Fact, Judge, premise_text
from minikid.text import STOPWORDS

Ask = Callable[[Sequence[str]], list[str]]  # prompts to the line that each is completed with

_ENTITY = re.compile(r"(?:[A-Z][\w'’.-]*\w|[A-Z]|\d[\d.,]*\d|\d)(?:[ -]?(?:[A-Z][\w'’.-]*\w|[A-Z]|\d[\d.,]*\d|\d))*")


class Example(NamedTuple):
    """One fact on its way, from which the prompts of all three steps are made."""

    passage: str
    fact: str
    entity: str
    question: str
    answer: str
    statement: str


STEPS = (  # what each step shows, and what it asks for
    (("fact", "entity"), "question"),
    (("passage", "question"), "answer"),
    (("question", "answer"), "statement"),
)


def read_examples() -> list[Example]:
    """The package's."""
    text = (resources.files("minikid") / "restatements.jsonl").read_text(encoding="utf-8")
    return [Example(**json.loads(line)) for line in text.splitlines()]


def entities(fact: str) -> list[str]:
    """The names and numbers of a sentence, in order: runs of words with capitals and of figures.

    A word that opens the sentence counts unless it is a stopword. A departure: the paper takes named entities.
    """
    found = []
    for match in _ENTITY.finditer(fact):
        first, _, rest = match[0].partition(" ")
        name = rest if first.lower() in STOPWORDS else match[0]
        if name and name.lower() not in STOPWORDS:
            found.append(name)
    return list(dict.fromkeys(found))


def _prompts(rows: Sequence[Example], asked: Sequence[str], wanted: str) -> list[str]:
    """Few-shot prompts that show the fields `asked` of each row and end where the field `wanted` is to come."""

    def block(row: Example) -> str:
        return "\n".join(f"{name.capitalize()}: {getattr(row, name)}" for name in asked) + f"\n{wanted.capitalize()}:"

    shown = "".join(f"{block(row)} {getattr(row, wanted)}\n\n" for row in read_examples())
    return [shown + block(row) for row in rows]


def restate(facts: Sequence[Fact], ask: Ask) -> list[tuple[str, str, str, str]]:
    """(fact, question, answer, new statement) for each entity of each fact that has a premise; a batch for each step.

    An entity for which a step gives nothing is dropped.
    """
    with_premise = ((" ".join(premise_text(fact.premise).split()), fact.text) for fact in facts if fact.premise)
    rows = [Example(passage, fact, name, "", "", "") for passage, fact in with_premise for name in entities(fact)]
    for asked, wanted in STEPS:
        lines = ask(_prompts(rows, asked, wanted)) if rows else []
        rows = [row._replace(**{wanted: line}) for row, line in zip(rows, lines, strict=True) if line]
    return [(row.fact, row.question, row.answer, row.statement) for row in rows]


def generate_facts(facts: Sequence[Fact], selected: Sequence[Fact], ask: Ask, judge: Judge) -> list[Fact]:
    """Variant II: facts of the best path, each in the form that the evidence supports best.

    Facts i of `facts` (the best path's) and of `selected` (Variant I's) belong together. A new statement takes their
    place if E >= T_e, C < T_c and E - C is greater than the selected fact's: our reading of "simple rules" (A.4).
    """
    restated = restate(facts, ask)
    judged = judge([statement for *_, statement in restated])
    chosen = []
    for own, fact in zip(facts, selected, strict=True):
        statements = [new for (source, *_), new in zip(restated, judged, strict=True) if source == own.text]
        holding = [new for new in statements if new.entailment >= T_E and new.contradiction < T_C]
        chosen.append(max([fact, *holding], key=lambda fact: fact.entailment - fact.contradiction))
    return chosen
