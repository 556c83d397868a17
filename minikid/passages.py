"""Passages: what retrieval finds. Reading them from files as a stream, and keeping many of them on disk.

Formats, each also gzipped (`.gz`), UTF-8 with or without a byte order mark, any line ends:

    .txt     running text, cut into blocks of 100 words (DPR 4.1)
    .jsonl   one object per line: "_id" or "id", "title", "text" (BEIR, DPR); id and title may be missing
    .tsv     a header row that names the columns id, text, title in any order; quoted fields (DPR's psgs_w100.tsv)

A .tsv file without such a header holds triples (subject, relation, object), which `minikid.trie` reads;
`holds_triples` tells the two apart by the first line.
"""

import csv
import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minikid.files import json_lines, lines, replacing_folder

WORDS_PER_PASSAGE = 100
# Scripts written without spaces: a character counts as a word. Han, kana, and their half-width and extended forms.
UNSPACED = (
    r"\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9d"
    r"\U00020000-\U0003ffff"
)
_PIECE = re.compile(rf"\s*(?:[{UNSPACED}]|[^\s{UNSPACED}]+)\s*")


class Passage(NamedTuple):
    """A retrievable piece of text. `title` may be empty; `id` is a string whatever the file had."""

    id: str
    title: str
    text: str


class Hit(NamedTuple):
    """A passage and its score; scores compare within one search only, higher is better."""

    passage: Passage
    score: float


def read_passages(path: str | Path) -> Iterator[Passage]:
    """The passages of one file, streamed in file order holding one line at a time.

    ValueError names file and line for a line that is not a passage; blank lines are passed over.
    Where .jsonl has no id, and always for .txt, the id is `file name:number`, the line or the block from 1.
    """
    path = Path(path)
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".tsv": _read_tsv}
    suffix = _suffix(path)
    if suffix not in readers:
        raise ValueError(
            f"{path}: passages come as .txt, .jsonl or .tsv, each also with .gz; rename or convert the file"
        )
    return readers[suffix](path)


def holds_triples(path: str | Path) -> bool:
    """Whether a file is a .tsv of triples, not of passages: its first line is not a header with id and text."""
    path = Path(path)
    if _suffix(path) != ".tsv":
        return False
    _, first = next(lines(path), ("", ""))
    return _columns(first.replace('"', "").split("\t")) is None


def split_words(chunks: Iterable[str], size: int = WORDS_PER_PASSAGE) -> Iterator[str]:
    """Blocks of `size` words from a text that arrives in chunks of any length; the last block may be shorter.

    DPR's disjoint 100-word blocks. A departure: in scripts written without spaces each character is a word.
    """
    block, rest = [], ""
    for chunk in chunks:
        pieces = _PIECE.findall(rest + chunk)
        rest = pieces.pop() if pieces else ""  # the last word may go on in the next chunk
        for piece in pieces:
            block.append(piece)
            if len(block) == size:
                yield " ".join("".join(block).split())
                block = []
    if text := " ".join("".join([*block, rest]).split()):
        yield text


def _suffix(path: Path) -> str:
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix


def _read_txt(path: Path) -> Iterator[Passage]:
    for number, text in enumerate(split_words(line for _, line in lines(path)), start=1):
        yield Passage(f"{path.name}:{number}", "", text)


def _read_jsonl(path: Path) -> Iterator[Passage]:
    for place, entry in json_lines(path):
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
            raise ValueError(f'{place}: expected an object with a string "text", came {found}')
        title = entry.get("title") or ""
        identity = entry.get("_id", entry.get("id"))
        if not isinstance(title, str) or isinstance(identity, dict | list):
            raise ValueError(f'{place}: expected a string "title" and a string or number "id" or "_id"')
        yield Passage(Path(place).name if identity is None else str(identity), title, entry["text"])


def _columns(row: list[str]) -> dict[str, int] | None:
    names = {name.strip().lower().removeprefix("_"): column for column, name in enumerate(row)}
    return names if {"id", "text"} <= set(names) else None


def _read_tsv(path: Path) -> Iterator[Passage]:
    # strict: a stray quote is an error here, where the lenient reader would swallow lines up to the next quote
    rows = csv.reader((line for _, line in lines(path)), delimiter="\t", strict=True)
    columns, start = None, 1
    while True:
        try:
            row = next(rows, None)
        except csv.Error as error:
            raise ValueError(f"{path}:{start}: badly quoted row ({error}); double the quotes inside a field") from error
        if row is None:
            return
        if columns is None:
            columns, width = _columns(row), len(row)
            if columns is None:
                raise ValueError(
                    f"{path}:{start}: expected a header row with id, text, title, came {row[:4]}; is it triples?"
                )
        elif row and len(row) != width:
            raise ValueError(f"{path}:{start}: expected {width} tab-separated fields as in the header, came {len(row)}")
        elif row:
            title = row[columns["title"]] if "title" in columns else ""
            yield Passage(row[columns["id"]], title, row[columns["text"]])
        start = rows.line_num + 1


class PassageFile(Sequence[Passage]):
    """Passages on disk, read one at a time through a memory map; `save_passages` writes the folder.

    ValueError where the folder is not one, or a file is shorter than it was.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        try:
            self.fingerprint: str = json.loads((folder / "meta.json").read_text())["fingerprint"]
            self._ends = np.load(folder / "ends.npy", mmap_mode="r", allow_pickle=False)
            size = (folder / "passages.jsonl").stat().st_size
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise ValueError(f"{folder}: expected passages saved with an index ({error}); build it again") from error
        if size != self._ends[-1]:
            raise ValueError(f"{folder}: passages.jsonl has {size} bytes, expected {self._ends[-1]}; build it again")
        self._bytes = np.memmap(folder / "passages.jsonl", np.uint8, "r") if size else np.empty(0, np.uint8)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> Passage:
        if not 0 <= number < len(self):
            raise IndexError(number)
        return Passage(*json.loads(self._bytes[self._ends[number] : self._ends[number + 1]].tobytes()))


def save_passages(passages: Iterable[Passage], folder: str | Path) -> PassageFile:
    """Write passages to a folder, one pass, one passage in memory; what the folder held before is replaced."""
    ends, digest = array("q", [0]), hashlib.sha256()
    with replacing_folder(folder) as new:
        with open(new / "passages.jsonl", "wb") as file:
            for passage in passages:
                line = _line(passage)
                file.write(line)
                digest.update(line)
                ends.append(ends[-1] + len(line))
        np.save(new / "ends.npy", np.frombuffer(ends, np.int64), allow_pickle=False)
        (new / "meta.json").write_text(json.dumps({"fingerprint": digest.hexdigest()}))
    return PassageFile(folder)


def keep_passages(passages: Iterable[Passage], folder: str | Path) -> PassageFile:
    """The passages from `folder`/passages, written there unless they are there already; ValueError where others are."""
    folder = Path(folder) / "passages"
    if not folder.exists():
        return save_passages(passages, folder)
    kept = PassageFile(folder)
    if kept.fingerprint != fingerprint(passages):
        raise ValueError(
            f"{folder.parent} holds an index of other passages; build in another folder, or remove this one"
        )
    return kept


def fingerprint(passages: Iterable[Passage]) -> str:
    """SHA-256 over ids, titles and texts in their order; any change of a corpus changes it."""
    if isinstance(passages, PassageFile):
        return passages.fingerprint
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(_line(passage))
    return digest.hexdigest()


def _line(passage: Passage) -> bytes:
    return json.dumps(passage).encode() + b"\n"  # ASCII escapes: a lone surrogate of a .jsonl file survives
