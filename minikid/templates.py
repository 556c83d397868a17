"""Knowledge bases as passages of one sentence each, by templates (RR 4.3, 4.4).

.tsv of entity, relation, start, end behind a header with these names   temporal relations (Wikidata)
.tsv of head, relation, tail                                            triples (WordNet, ConceptNet, or any)
.json, one object {key: [values]} or a list of them                     tables; "title" names what a table is about
.txt, .jsonl, .tsv with a header id, text, title                        passages, which stay as they are
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from minikid.files import lines
from minikid.kgclue import join_subject, read_facts
from minikid.passages import Passage, holds_triples, read_passages

TEMPORAL = ["entity", "relation", "start", "end"]

# The relations of WordNet and ConceptNet in lower case without signs; others are read as a phrase: "capital of".
RELATIONS = {
    "antonym": "{h} is the opposite of {t}",
    "atlocation": "{h} can be found at {t}",
    "capableof": "{h} can {t}",
    "causes": "{h} causes {t}",
    "derivedfrom": "{h} is derived from {t}",
    "hasa": "{h} has {t}",
    "hasprerequisite": "{h} requires {t}",
    "hasproperty": "{h} is {t}",
    "holonym": "{h} is part of {t}",
    "hypernym": "{h} is a kind of {t}",
    "hyponym": "{t} is a kind of {h}",
    "isa": "{h} is a kind of {t}",
    "madeof": "{h} is made of {t}",
    "meronym": "{t} is part of {h}",
    "notcapableof": "{h} cannot {t}",
    "partof": "{h} is part of {t}",
    "receivesaction": "{h} can be {t}",
    "relatedto": "{h} is related to {t}",
    "similarto": "{h} is similar to {t}",
    "synonym": "{h} means the same as {t}",
    "usedfor": "{h} is used for {t}",
}
# Keys of tables whose values do not read well behind "The ... of ... is".
KEYS = {
    "born": "{s} was born {v}",
    "died": "{s} died {v}",
    "founded": "{s} was founded {v}",
    "released": "{s} was released {v}",
}


def read_sentences(path: str | Path) -> Iterator[Passage]:
    """The knowledge of one file as passages, in file order; ValueError names the file and line of a bad one."""
    path = Path(path)
    if path.suffix == ".json":
        return _tables(path)
    if not holds_triples(path):
        return read_passages(path)
    header = next((line for _, line in lines(path) if line.strip()), "")
    return _temporal(path) if _fields(header.lower()) == TEMPORAL else _triples(path)


def temporal_sentence(entity: str, relation: str, start: str, end: str) -> str:
    """A relation that holds from `start` to `end`; either may be "", and the same for both is one moment."""
    if start and start == end:
        when = f" in {start}"
    else:
        when = (f" from {start}" if start else "") + (f" {'to' if start else 'until'} {end}" if end else "")
    return f"{entity} {_phrase(relation)}{when}."


def triple_sentence(head: str, relation: str, tail: str) -> str:
    """A triple by the template of its relation, or read as a phrase: (Tuul, flows through, Ulaanbaatar)."""
    template = RELATIONS.get(re.sub(r"[\W_]+", "", relation).lower())
    head, tail = head.replace("_", " "), tail.replace("_", " ")
    return _sentence(template.format(h=head, t=tail) if template else f"{head} {_phrase(relation)} {tail}")


def table_sentences(table: dict[str, Sequence[str]]) -> list[str]:
    """One sentence for each key of a table about its "title": "The instruments of Ana are guitar and piano." """
    subject = " ".join(table.get("title", ())) or "it"
    found = []
    for key, values in table.items():
        if key != "title" and values:
            listed = ", ".join(values[:-1]) + " and " * (len(values) > 1) + values[-1]
            template = KEYS.get(key.lower(), "The {k} of {s} " + ("are" if len(values) > 1 else "is") + " {v}")
            found.append(_sentence(template.format(k=_phrase(key).lower(), s=subject, v=listed)))
    return found


def _tables(path: Path) -> Iterator[Passage]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"{path}:{line}: expected a table {{key: [values]}} in JSON: {error}") from None
    for number, table in enumerate(content if isinstance(content, list) else [content], start=1):
        place = f"{path}, table {number}"
        if not isinstance(table, dict):
            raise ValueError(f"{place}: expected an object {{key: [values]}}, came {type(table).__name__}")
        rows = {key: values if isinstance(values, list) else [values] for key, values in table.items()}
        for key, values in rows.items():
            if not all(isinstance(value, str | int | float) for value in values):
                raise ValueError(f"{place}: expected a list of texts or numbers as {key!r}, came {values!r}")
        sentences = table_sentences({key: [str(value) for value in values] for key, values in rows.items()})
        for row, sentence in enumerate(sentences, start=1):
            yield Passage(f"{path.name}:{number}.{row}", "", sentence)


def _temporal(path: Path) -> Iterator[Passage]:
    for where, line in lines(path):
        fields = _fields(line)
        if not line.strip() or [field.lower() for field in fields] == TEMPORAL:
            continue
        if len(fields) != 4 or not all(fields[:2]):
            raise ValueError(
                f"{where}: expected entity, relation, start and end (the last two may be empty), came {fields}"
            )
        yield Passage(where, "", temporal_sentence(*fields))


def _triples(path: Path) -> Iterator[Passage]:
    for number, fact in enumerate(read_facts(path), start=1):
        head = join_subject(fact.subject, fact.meaning)
        yield Passage(f"{path.name}:{number}", "", triple_sentence(head, fact.predicate, fact.value))


def _fields(line: str) -> list[str]:
    return [" ".join(field.split()) for field in line.rstrip("\r\n").split("\t")]


def _phrase(relation: str) -> str:
    """ "positionHeld" and "position_held" as "position held"; other text as it is."""
    return re.sub(r"(?<=[a-z])[A-Z](?=[a-z])", lambda capital: " " + capital[0].lower(), relation).replace("_", " ")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "." * (not text.endswith((".", "!", "?")))
