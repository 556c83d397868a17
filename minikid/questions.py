"""Questions with answers and passages, in the form of DPR and FiD.

A file, gzipped if its name ends in .gz, holds JSON lines, or one JSON array, of objects

    {"id": ..., "question": "...", "answers": ["...", ...], "ctxs": [{"title": "...", "text": "..."}, ...]}

"id" may be anything, and it, "ctxs" and the titles may be missing; further fields are passed over.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from minikid.files import reading
from minikid.passages import Passage

BOM = b"\xef\xbb\xbf"
_GAP, _DECODER = re.compile(r"[ \t\r\n,]*"), json.JSONDecoder()


@dataclass(frozen=True)
class Question:
    """One record."""

    index: int  # its number in the file, from 0
    place: str  # file:line
    id: Any  # as the file has it; the index if it has none
    question: str
    answers: list[str]
    ctxs: list[Passage]  # their ids are their numbers

    @property
    def digest(self) -> str:
        """Of what a decoder and a score may depend on."""
        return digest([self.question, self.answers, self.ctxs])


def digest(value: Any) -> str:
    """16 hexadecimal digits that stand for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def read_questions(path: str | Path, on_bad: Callable[[ValueError], None] | None = None) -> Iterator[Question]:
    """The questions of a file in order, JSON lines one by one.

    A bad record is a ValueError that names file and line and says what was expected; it is raised, or given to `on_bad`
    and the record passed over, which still counts in the index of those behind it. Broken syntax in an array always
    raises, since what comes behind it is lost.
    """
    path = Path(path)
    for index, (line, read) in enumerate(_array(path) if _is_array(path) else _lines(path)):
        place = f"{path}:{line}"
        try:
            question = _question(index, place, read())
        except (ValueError, RecursionError) as error:
            bad = ValueError(f"{place}: {error}")
            if on_bad is None:
                raise bad from None
            on_bad(bad)
        else:
            yield question


def _is_array(path: Path) -> bool:
    with reading(path) as file:
        first = next((stripped for line in file if (stripped := line.removeprefix(BOM).strip())), b"")
    return first.startswith(b"[")


def _lines(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """(line number, a function that parses the line) of each line that is not blank."""
    with reading(path) as file:
        for number, line in enumerate(file, start=1):
            if content := (line.removeprefix(BOM) if number == 1 else line).strip():
                yield number, partial(_parse, content)


def _parse(content: bytes) -> Any:
    try:
        return json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason}); convert the file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"expected an object in JSON on one line: {error}") from None


def _array(path: Path) -> Iterator[tuple[int, Callable[[], Any]]]:
    """(line number, a function that gives the entry) of each entry of an array."""
    try:
        with reading(path) as file:
            text = file.read().removeprefix(BOM).decode()
        entries = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); convert the file") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: broken JSON array: {error.msg}") from None
    place, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
    for entry in entries:
        start = _GAP.match(text, place).end()
        end = _DECODER.raw_decode(text, start)[1]
        line += text.count("\n", place, start)
        yield line, lambda entry=entry: entry
        line, place = line + text.count("\n", start, end), end


def _question(index: int, place: str, entry: Any) -> Question:
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, came {_short(entry)}")
    question, answers, ctxs = entry.get("question"), entry.get("answers"), entry.get("ctxs", [])
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'expected a string "question" with text in it, came {_short(question)}')
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f'expected "answers", a list of strings, came {_short(answers)}')
    if not isinstance(ctxs, list):
        raise ValueError(f'expected "ctxs", a list of objects, came {_short(ctxs)}')
    for ctx in ctxs:
        if not isinstance(ctx, dict) or not isinstance(ctx.get("text"), str):
            raise ValueError(f'expected a string "text" in each of "ctxs", came {_short(ctx)}')
        if not isinstance(ctx.get("title") or "", str):
            raise ValueError(f'expected a string "title" in "ctxs", came {_short(ctx["title"])}')
    passages = [Passage(str(i), ctx.get("title") or "", ctx["text"]) for i, ctx in enumerate(ctxs)]
    record = Question(index, place, entry.get("id", index), question, answers, passages)
    try:
        json.dumps([record.id, question, answers, passages], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected Unicode text, came half a surrogate pair: {error.object[error.start]!r}") from None
    return record


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
