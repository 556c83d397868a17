"""KnowledgeTrie, KID's external knowledge G_ext: from the stems of subjects to the objects of their triples (KID A.2).

    key    one stem, such as "drive"             edge   (relation, object) of one triple, below each key of its subject
    value  the object at the end of an edge      link   from a key to the keys that its values mention: the next hop

The keys of a subject are the stems of its head words: its content words before the first preposition other than "of"
("short stay ward", "capital of Mongolia", but "temple | in Jerusalem"); a subject without content words ("The Who",
"1984") has all its words as keys. A key is met by whole words only, so that "car" never finds "cardiologist".
Departure from the paper: the file holds the triples alone, and links and depths are computed again when it is opened,
which takes milliseconds for the few documents of one prompt and leaves nothing in the file that could disagree.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from minikid.files import replacing
from minikid.grammar import PREPOSITIONS
from minikid.text import is_content, stem, words
from minikid.triples import Triple, extract_triples

FILE = "knowledge.json"
FORMAT = "minikid KnowledgeTrie 1"


class KnowledgeTrie:
    """Triples by the stems of their subjects; equal for equal sets of triples, whatever their order."""

    def __init__(self, triples: Iterable[tuple[str, str, str]] = ()):
        """Builds the trie, as `from_triples` does by name. ValueError for an unusable triple."""
        self.triples = tuple(sorted({_checked(triple) for triple in triples}))
        edges: dict[str, list[tuple[str, str]]] = {}
        for subject, relation, value in self.triples:
            for key in head_stems(subject):
                edges.setdefault(key, []).append((relation, value))
        self._edges = {key: tuple(edges[key]) for key in sorted(edges)}
        self._values = {key: _distinct(value for _, value in pairs) for key, pairs in self._edges.items()}
        mentioned = {value: self.mentions(value) for value in {triple.object for triple in self.triples}}
        self._links = {
            key: _distinct(link for value in values for link in mentioned[value] if link != key)
            for key, values in self._values.items()
        }

    @classmethod
    def from_triples(cls, triples: Iterable[tuple[str, str, str]]) -> "KnowledgeTrie":
        """The trie of (subject, relation, object) triples of strings. ValueError for a triple without words."""
        return cls(triples)

    @classmethod
    def from_text(cls, passages: Iterable[Any]) -> "KnowledgeTrie":
        """The trie of passages: plain strings, or objects with `.title` and `.text` (KID 3.2)."""
        if isinstance(passages, str):
            raise ValueError("expected a list of passages, got one string: write [passage]")
        return cls(
            triple
            for passage in passages
            for triple in (
                extract_triples(passage)
                if isinstance(passage, str)
                else extract_triples(passage.text, passage.title or None)
            )
        )

    def query(self, concepts: Iterable[str], hops: int) -> list[list[str]]:
        """Demonstrations by hop: the values of all concepts, then of all keys in these values, and so on (KID A.2.2).

        At most `hops` lists, fewer when no key is left. No key is looked up twice, so cycles end; a value that two keys
        share may stand in two hops, as n_v counts hops (equations of KID 3.3). Concepts are words, phrases or stems.
        """
        if isinstance(concepts, str):
            raise ValueError(f"expected a list of concepts, got one string: write [{concepts!r}]")
        if hops < 0:
            raise ValueError(f"expected hops >= 0, got {hops}: 4 is the paper's choice")
        frontier = _distinct(key for concept in concepts for key in self._lookup(concept))
        visited: set[str] = set()
        demonstrations: list[list[str]] = []
        while frontier and len(demonstrations) < hops:
            visited.update(frontier)
            demonstrations.append(list(_distinct(value for key in frontier for value in self._values[key])))
            frontier = _distinct(link for key in frontier for link in self._links[key] if link not in visited)
        return demonstrations

    def edges(self, concept: str) -> list[tuple[str, str]]:
        """The (relation, object) edges below the keys of a concept."""
        return list(_distinct(edge for key in self._lookup(concept) for edge in self._edges[key]))

    def depth(self, concept: str) -> int:
        """Depth of the deepest key of a concept; 0 if none of its words is a key (KID A.2.1).

        The depth of a key is the number of keys on the longest chain of links that starts there, where chains through a
        cycle are given the number of keys on it; so it bounds the hops of every query from there, and is exact without
        cycles. (The longest chain through a cycle has no known fast solution.)
        """
        return max((self._depths[key] for key in self._lookup(concept)), default=0)

    def mentions(self, text: str) -> list[str]:
        """The keys that the text mentions, each once, in the order of their first mention."""
        return list(_distinct(key for key in map(stem, words(text)) if key in self._edges))

    def keys(self) -> list[str]:
        """All keys, sorted."""
        return list(self._edges)

    def values(self) -> list[str]:
        """All end nodes, subjects and objects, each once, sorted: the demonstrations of Little KID."""
        return sorted({node for subject, _, value in self.triples for node in (subject, value)})

    def __contains__(self, concept: str) -> bool:
        return bool(self._lookup(concept))

    def __len__(self) -> int:
        return len(self._edges)

    def __eq__(self, other: object) -> bool:
        return self.triples == other.triples if isinstance(other, KnowledgeTrie) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.triples)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Writes the triples into a folder, made if need be, in one step: a reader sees the old file or the new one."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "sha256": _digest(self.triples), "triples": self.triples}
        with replacing(folder / FILE) as new, new.open("w", encoding="ascii") as file:
            json.dump(content, file)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "KnowledgeTrie":
        """The trie that `save` wrote into a folder; ValueError for a folder without one, or with a damaged one."""
        path = Path(directory) / FILE
        expected = "expected what KnowledgeTrie.save writes; build the trie again and save it"
        try:
            content = json.loads(path.read_text(encoding="ascii"))
        except OSError as error:
            raise ValueError(f"cannot read {path} ({error.strerror}): {expected}") from error
        except ValueError as error:  # bytes that are no text, text that is no JSON
            raise ValueError(f"{path} is damaged ({error}): {expected}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not in the format {FORMAT!r}: {expected}")
        triples = content.get("triples")
        if not isinstance(triples, list) or _digest(triples) != content.get("sha256"):
            raise ValueError(f"{path} is damaged (its checksum differs): {expected}")
        return cls(triples)

    def _lookup(self, concept: str) -> tuple[str, ...]:
        """The keys of a concept: itself if it is one, and the stems of its words."""
        stems = (key for word in words(concept) for key in (word, stem(word)))
        return _distinct(key for key in (concept, *stems) if key in self._edges)

    @cached_property
    def _depths(self) -> dict[str, int]:
        """Depth of every key, by one depth-first search in linear time.

        Tarjan's algorithm closes the strongly connected components (cycles that share keys) in the order in which they
        are reached from above, deepest first; a component adds its size to the deepest component below it.
        """
        depths: dict[str, int] = {}
        low: dict[str, int] = {}  # number of the earliest open key that a key is known to reach
        place: dict[
            str, tuple[int, int]
        ] = {}  # number of a key by time of discovery, and its place among the open keys
        open_keys: list[str] = []
        for root in self._edges:
            branch = [] if root in place else [(root, iter(self._links[root]))]
            while branch:
                key, links = branch[-1]
                if key not in place:
                    place[key] = len(place), len(open_keys)
                    low[key] = len(low)
                    open_keys.append(key)
                if (link := next((link for link in links if link not in depths), None)) is not None:
                    if link not in place:
                        branch.append((link, iter(self._links[link])))
                    low[key] = min(low[key], low.get(link, low[key]))
                    continue
                branch.pop()
                if branch:
                    low[branch[-1][0]] = min(low[branch[-1][0]], low[key])
                number, start = place[key]
                if low[key] == number:  # nothing earlier is reached: the open keys from here on are one component
                    component = open_keys[start:]
                    del open_keys[start:]
                    below = (depths.get(link, 0) for member in component for link in self._links[member])
                    depths.update(dict.fromkeys(component, len(component) + max(below, default=0)))
        return depths


def head_stems(subject: str) -> tuple[str, ...]:
    """The keys of a subject: the stems of its head words, as the module says. ValueError if it has no word."""
    all_words = words(subject)
    end = next((i for i in range(1, len(all_words)) if all_words[i] in PREPOSITIONS - {"of"}), len(all_words))
    content = [word for word in all_words[:end] if is_content(word)] or list(filter(is_content, all_words))
    return _distinct(stem(word) for word in content or all_words)


def _checked(triple: tuple[str, str, str]) -> Triple:
    if isinstance(triple, str) or len(triple) != 3 or not all(isinstance(part, str) for part in triple):
        raise ValueError(f"expected (subject, relation, object), three strings, got {triple!r}")
    subject, relation, value = (part.strip() for part in triple)
    if not words(subject) or not value:
        raise ValueError(f"expected a subject with a word in it and an object, got {triple!r}: leave the triple out")
    return Triple(subject, relation, value)


def _distinct(items: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(items))


def _digest(triples: Iterable[Iterable[str]]) -> str:
    return hashlib.sha256(json.dumps([list(triple) for triple in triples]).encode()).hexdigest()
