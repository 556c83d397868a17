"""Triples as keys of a TokenTrie, as the look-ahead article uses them for KgCLUE.

A triple (S, P, O) is looked up by its subject S and predicate P; its value is the object O. Where several entities have
one name, the base tells them apart by a *meaning* M in brackets at the end of S: "燕子尾（中药（圆叶西番莲的全草））".
A key is the tokens of S, P and M with a separator between two of them; the article puts M last, since it is the hardest
to predict and mostly settled by then.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import tee
from pathlib import Path
from typing import NamedTuple

from minikid.files import json_lines, lines
from minikid.trie import TokenTrie

OPENING, CLOSING = "（(", "）)"
ORDERS = {"SPM": (0, 1, 2), "SMP": (0, 2, 1)}  # where each field of a key stands among (S, P, M)


class Fact(NamedTuple):
    """One triple, the meaning taken out of its subject ("" if it has none)."""

    subject: str
    predicate: str
    meaning: str
    value: str


class Question(NamedTuple):
    """A question and the triple that answers it."""

    id: str
    question: str
    answer: Fact


def split_subject(subject: str) -> tuple[str, str]:
    """(S, M): the subject, white space normalised, without the bracket group at its end, and what stood inside.

    The group is the last one that is balanced, with all that is nested in it; full-width and ASCII brackets count as
    the same, since the base mixes them. M is "" and S whole where no group ends the subject, where the brackets do not
    balance, and where nothing would remain of S or of M. (The released program cuts at the first bracket.)
    """
    subject = " ".join(subject.split())
    if not subject.endswith(tuple(CLOSING)):
        return subject, ""
    depth = 0
    for position in range(len(subject) - 1, -1, -1):
        depth += (subject[position] in CLOSING) - (subject[position] in OPENING)
        if depth == 0:
            name, meaning = subject[:position].strip(), subject[position + 1 : -1].strip()
            return (name, meaning) if name and meaning else (subject, "")
    return subject, ""


def join_subject(subject: str, meaning: str) -> str:
    """The subject as the base writes it, M in full-width brackets."""
    return f"{subject}（{meaning}）" if meaning else subject


def _fact(fields: Sequence[str], where: str) -> Fact:
    fields = [" ".join(field.split()) for field in fields]
    if len(fields) != 3 or not all(fields):
        raise ValueError(f"{where}: expected a subject, a predicate and an object, got {fields}: correct this line")
    subject, meaning = split_subject(fields[0])
    return Fact(subject, fields[1], meaning, fields[2])


def read_facts(path: str | Path) -> Iterator[Fact]:
    """The triples of a file with `S<tab>P<tab>O` on each line (.gz: compressed), read as a stream.

    White space within a field is normalised, blank lines are skipped; ValueError names the file and the first line
    without exactly three fields.
    """
    for where, line in lines(path):
        if line.strip():
            yield _fact(line.split("\t"), where)


def read_questions(path: str | Path) -> Iterator[Question]:
    """Questions {"id", "question", "answer": "S ||| P ||| O"} of a file: JSON lines, or one JSON list (.gz too).

    "id" may be missing: then it is the number of the question. ValueError names the file and the line, or the entry.
    """
    first = next((line.lstrip() for _, line in lines(path) if line.strip()), "")
    entries = _listed(path) if first.startswith("[") else json_lines(path)
    for number, (where, entry) in enumerate(entries):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("question", "answer")):
            raise ValueError(f'{where}: expected {{"id", "question", "answer"}} with text in both, got {entry!r}')
        question = " ".join(entry["question"].split())
        yield Question(str(entry.get("id", number)), question, _fact(entry["answer"].split("|||", 2), where))


def _listed(path: str | Path) -> Iterator[tuple[str, object]]:
    try:
        entries = json.loads("".join(line for _, line in lines(path)))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from error
    return ((f"{path}, entry {i}", entry) for i, entry in enumerate(entries))


def _places(order: str) -> tuple[int, int, int]:
    if order not in ORDERS:
        raise ValueError(f"expected one of the orders {list(ORDERS)}, got {order!r}")
    return ORDERS[order]


def join_key(fact: Fact, encode: Callable[[str], Sequence[int]], separator: int, order: str = "SPM") -> list[int]:
    """The tokens of S, P and M in this order ("SPM" or "SMP"), `separator` between two fields.

    Without a meaning, "SPM" is S separator P: empty fields at the end go with their separators. "SMP" keeps the place,
    S separator separator P, so that P is always the third field. ValueError if `encode` gives the separator.
    """
    fields = (fact.subject, fact.predicate, fact.meaning)
    parts = [list(encode(fields[place])) if fields[place] else [] for place in _places(order)]
    while not parts[-1]:
        parts.pop()
    key: list[int] = []
    for part, place in zip(parts, _places(order), strict=False):
        if separator in part:
            raise ValueError(f"expected a separator that no text has, got {separator}, a token of {fields[place]!r}")
        key += [separator, *part] if place else part  # only S, at place 0, comes first
    return key


def split_key(key: Sequence[int], separator: int, order: str = "SPM") -> tuple[list[int], list[int], list[int]]:
    """The tokens of (S, P, M), whatever the order in the key; what is missing is empty. Undoes `join_key`."""
    parts: list[list[int]] = [[]]
    for token in key:
        if token == separator:
            parts.append([])
        else:
            parts[-1].append(token)
    if len(parts) > 3:
        raise ValueError(f"expected at most two separators ({separator}) in a key, got {list(key)}")
    fields: list[list[int]] = [[], [], []]
    for part, place in zip(parts, _places(order), strict=False):
        fields[place] = part
    return fields[0], fields[1], fields[2]


def build_trie(
    facts: Iterable[Fact], encode: Callable[[str], Sequence[int]], separator: int, order: str = "SPM"
) -> TokenTrie:
    """The trie of all facts, read once as a stream: keys by `join_key`, O as their values."""
    encode = lru_cache(maxsize=1 << 16)(encode)  # subjects come in a row and predicates often
    left, right = tee(facts)  # `build` takes both in step, so that nothing piles up between them
    return TokenTrie.build((join_key(fact, encode, separator, order) for fact in left), (fact.value for fact in right))
