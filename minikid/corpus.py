"""Training data: a text or prompts with completions as token ids, and the batch of each step.

    N examples · B rows of a batch · T tokens of its longest row

Nothing here keeps a position: the batch of a step is a function of the seed and the step alone, so a run goes on, or is
shared by processes, by the number of the step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from minikid.files import json_lines
from minikid.questions import digest
from minikid.tokenizer import Tokenizer

WINDOW = 64  # batches; within so many, rows of similar length come together
PIECE = 100_000  # characters, about; whole lines of a text that are encoded at once


class Row(NamedTuple):
    """Tokens `begin` to `end` of a corpus, of which those from `begin + first` on are scored."""

    begin: int
    end: int
    first: int  # at least 1: a first token has nothing to be predicted from

    @property
    def scored(self) -> int:
        return max(self.end - self.begin - self.first, 0)


@dataclass(frozen=True)
class Corpus:
    """Examples as spans of one long list of tokens."""

    tokens: Tensor  # [all], int32
    spans: Tensor  # [N, 3]: begin, end, first, as in `Row`
    shift: int = 1  # of a text: each epoch moves all spans by a random number below this one
    left_out: int = 0  # examples that were too long

    def row(self, example: int, shift: int = 0) -> Row:
        begin, end, first = self.spans[example].tolist()
        return Row(begin + shift, min(end + shift, len(self.tokens)), max(first, 1))


def read_corpus(
    path: str | Path, tokenizer: Tokenizer, length: int, chat: bool | None, *, whole: bool = False
) -> Corpus:
    """The examples of a file, each of at most `length` tokens and the one that is predicted last.

    JSON lines {"prompt", "completion"} (a name that ends in .jsonl) become one example each, whose completion is scored
    and an eos token behind it; `Tokenizer.example` says where a completion begins. Longer ones are left out, counted.
    Any other file is one text, with an eos token at its end. It is cut into blocks; each epoch moves the cuts, which
    passes over less than two blocks, unless `whole` is given. ValueError names file and line of what is bad.
    """
    path = Path(path)
    if path.suffix == ".jsonl":
        return _pairs(path, tokenizer, length, chat)
    pieces = _pieces(path)
    ids = [i for piece in pieces for i in tokenizer.encode(piece)] + list(tokenizer.eos_ids[:1])
    if len(ids) < 2:
        raise ValueError(f"{path}: expected a text, it is empty")
    begins = range(0, len(ids) - 1, length)
    if len(begins) > 1 and not whole:
        begins = begins[:-1]
    spans = torch.tensor([(begin, min(begin + length + 1, len(ids)), 1) for begin in begins])
    return Corpus(torch.tensor(ids, dtype=torch.int32), spans, length if len(begins) > 1 and not whole else 1)


def read_texts(path: str | Path) -> Iterator[str]:
    """All text of a file of either kind, for training a tokenizer."""
    path = Path(path)
    pairs = path.suffix == ".jsonl"
    return (f"{prompt}{''.join(text)}" for _, prompt, text in read_pairs(path)) if pairs else _pieces(path)


def _pieces(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(PIECE):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason}); convert the file") from None


def read_pairs(path: str | Path) -> Iterator[tuple[str, str, str | list[str]]]:
    """(place, prompt, completion) of each line that is not blank; ValueError names file and line of a bad one."""
    for place, entry in json_lines(path):
        try:
            prompt, completion = entry["prompt"], entry["completion"]
            text = completion if isinstance(completion, str) else "".join(completion)
            (prompt + text).encode()  # half a surrogate pair cannot be encoded
        except (ValueError, KeyError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f'{place}: expected a JSON object with a string "prompt" and a "completion", a string or a list of '
                f"strings ({reason})"
            ) from None
        if not prompt or not text:
            raise ValueError(f"{place}: expected some text in both, prompt {prompt!r} and completion {completion!r}")
        yield place, prompt, completion


def _pairs(path: Path, tokenizer: Tokenizer, length: int, chat: bool | None) -> Corpus:
    tokens, spans, longest, left_out = [], [], 0, 0
    for place, prompt, completion in read_pairs(path):
        try:
            ids, first = tokenizer.example(prompt, completion, chat)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if len(ids) > length + 1:
            longest, left_out = max(longest, len(ids) - 1), left_out + 1
            continue
        spans.append((len(tokens), len(tokens) + len(ids), first))
        tokens += ids
    if not spans:
        reason = f"its {left_out} examples have more than {length} tokens, up to {longest}" if left_out else "none"
        raise ValueError(f'{path}: expected lines of {{"prompt", "completion"}}, found {reason}')
    return Corpus(torch.tensor(tokens, dtype=torch.int32), torch.tensor(spans), left_out=left_out)


class Batches:
    """The rows of each step. Epochs, each in an order of its own, run into one endless list, so every batch is full.

    Within windows of this list rows are sorted by length, so that little is padded, and cut into batches, which come in
    random order.
    """

    def __init__(self, corpus: Corpus, batch_size: int, seed: int):
        self.corpus, self.batch_size, self.seed = corpus, batch_size, seed
        self._epoch: tuple[int, list[int], int] = (-1, [], 0)
        self._window: tuple[int, list[list[Row]]] = (-1, [])

    def __call__(self, step: int) -> list[Row]:
        """The rows of a step, counted from 0, sorted by length."""
        window, place = divmod(step, WINDOW)
        if window != self._window[0]:
            size = WINDOW * self.batch_size
            rows = [self._row(i) for i in range(window * size, (window + 1) * size)]
            rows.sort(key=lambda row: row.end - row.begin)
            batches = [rows[i : i + self.batch_size] for i in range(0, size, self.batch_size)]
            order = torch.randperm(WINDOW, generator=self._generator("window", window))
            self._window = window, [batches[i] for i in order]
        return self._window[1][place]

    def _row(self, place: int) -> Row:
        """The row at a place of the endless list."""
        epoch, i = divmod(place, len(self.corpus.spans))
        if epoch != self._epoch[0]:
            generator = self._generator("epoch", epoch)
            order = torch.randperm(len(self.corpus.spans), generator=generator).tolist()
            shift = int(torch.randint(self.corpus.shift, (), generator=generator))
            self._epoch = epoch, order, shift
        return self.corpus.row(self._epoch[1][i], self._epoch[2])

    def _generator(self, kind: str, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(int(digest([self.seed, kind, number]), 16))


def all_batches(corpus: Corpus, batch_size: int) -> list[list[Row]]:
    """Every example once, sorted by length: for validation."""
    rows = sorted(map(corpus.row, range(len(corpus.spans))), key=lambda row: row.end - row.begin)
    return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]


class Batch(NamedTuple):
    """Rows side by side, padded on the right; what is padded is never scored."""

    inputs: Tensor  # [B, T]
    places: Tensor  # [n] the positions of the B * T whose next token is scored
    targets: Tensor  # [n] these tokens
    prefix: Tensor  # [B] how many tokens of each row are its prompt


def collate(corpus: Corpus, rows: Sequence[Row], device: torch.device | str = "cpu") -> Batch:
    tokens = [corpus.tokens[row.begin : row.end].long() for row in rows]
    inputs = pad_sequence([ids[:-1] for ids in tokens], batch_first=True)
    T = inputs.shape[1]
    places = [torch.arange(row.first - 1, row.end - row.begin - 1) + i * T for i, row in enumerate(rows)]
    targets = [ids[row.first :] for row, ids in zip(rows, tokens, strict=True)]
    prefix = torch.tensor([row.first for row in rows])
    return Batch(*(t.to(device) for t in (inputs, torch.cat(places), torch.cat(targets), prefix)))
