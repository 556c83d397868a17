"""TokenTrie: the keys of a knowledge base as a prefix tree in a few flat arrays, for prefix-constrained decoding.

    N  nodes        B  cursors of a batch        V  vocabulary        M  further children of all cursors together

A node is an integer, and a node with several children has a row of compressed sparse rows, as in STATIC
(arXiv 2602.22647: "Vectorizing the trie"); `flatten` describes the arrays and builds them. They are opened as memory
maps: opening reads one small header, and a walk the few pages on its path.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from minikid.flatten import END, LIMIT, NARROW, SEPARATOR, group_values, lay_out, sort_keys
from minikid.knowledge import KnowledgeTrie  # noqa: F401  # the other trie, under its stable name
from minikid.store import open_arrays, save_arrays
from minikid.triples import Triple, extract_triples  # noqa: F401

if TYPE_CHECKING:
    import torch

MISSING = object()


class TokenTrie:
    """A prefix tree over sequences of token ids, each key with a list of values.

    Tokens are 0 .. 2**31. Keys may begin other keys. Nodes are good for this trie alone: take them from `root`, `find`,
    `advance`, `child_nodes` and `walk`. An off-trie prefix is a ValueError, never an empty answer.
    """

    def __init__(self, arrays: dict[str, np.ndarray], vocabulary: int) -> None:
        """From the arrays of `flatten` by name; users call `build` or `open`. `vocabulary`: the largest token + 1."""
        self._arrays, self.vocabulary = arrays, vocabulary
        # a memoryview gives plain ints, several times faster than an array's scalars
        self._codes, self._ends, self._forks, self._rows, self._branches, self._children = (
            memoryview(arrays[name]) for name in ("codes", "ends", "forks", "rows", "branches", "children")
        )
        self._tensors: dict[torch.device, list[torch.Tensor]] = {}
        self.root = 0

    # --- building

    @classmethod
    def build(cls, keys: Iterable[Sequence[int]], values: Iterable[str | bytes] | None = None) -> TokenTrie:
        """Build from any iterable of token-id sequences and, in step with it, one value (text) per key.

        Both are read once, side by side, into growing arrays: no object per key is kept. A key that comes again adds
        its value to the list, in the order of the input, without repeats. ValueError: no keys, an empty key, a token
        outside 0 .. 2**31, a value that is not UTF-8, more of one than of the other.
        """
        tokens, lengths, text, sizes = array("I"), array("I"), bytearray(), array("I")
        pairs = ((key, MISSING) for key in keys) if values is None else zip_longest(keys, values, fillvalue=MISSING)
        for number, (key, value) in enumerate(pairs):
            if key is MISSING or (values is not None and value is MISSING):
                raise ValueError(f"expected one value per key, but one of the two ends after {number}")
            before = len(tokens)
            try:
                tokens.extend(key)
            except (OverflowError, TypeError) as error:
                raise ValueError(f"key {number}: expected token ids from 0 to 2**31, got {key!r}") from error
            lengths.append(len(tokens) - before)
            if values is not None:
                try:
                    encoded = (value if isinstance(value, str) else str(value, "utf-8")).encode()
                except (UnicodeError, TypeError) as error:
                    raise ValueError(f"value {number}: expected a string or UTF-8 bytes, got {value!r}") from error
                text += encoded
                sizes.append(len(encoded))
        blob = None if values is None else (np.frombuffer(text, np.uint8), np.frombuffer(sizes, np.uint32))
        return cls.from_arrays(np.frombuffer(tokens, np.uint32), np.frombuffer(lengths, np.uint32), blob)

    @classmethod
    def from_arrays(
        cls, tokens: np.ndarray, lengths: np.ndarray, values: tuple[np.ndarray, np.ndarray] | None = None
    ) -> TokenTrie:
        """`build` for keys that are arrays already: all tokens in a row, and the length of each key.

        `values` likewise: the UTF-8 bytes of all values in a row (uint8), and the length of each. Errors as `build`.
        """
        tokens, lengths = np.asarray(tokens), np.asarray(lengths)
        n = len(lengths)
        if not 0 < n <= LIMIT:
            raise ValueError(f"expected between 1 and {LIMIT} keys, got {n}: a trie without keys allows no token")
        if lengths.min() < 1:
            raise ValueError(f"key {int(lengths.argmin())} is empty: a key needs at least one token, leave it out")
        sizes = lengths.astype(np.int32)
        ends = np.cumsum(sizes, dtype=np.int64)
        if tokens.dtype.kind not in "iu" or tokens.ndim != 1 or ends[-1] != len(tokens):
            raise ValueError(f"expected {ends[-1]} integer tokens in one row, got {tokens.dtype} {tokens.shape}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > 2**31:
            raise ValueError(f"expected token ids from 0 to 2**31, got {low if low < 0 else high}")
        codes = tokens.astype("<u2" if high < NARROW else "<u4")
        codes += 1
        begins = ends - sizes
        order, shared = sort_keys(codes, begins, sizes)
        again = shared == sizes[order]
        grouped = {}
        if values is not None:
            text, lengths = (np.asarray(part) for part in values)
            if len(lengths) != n or lengths.sum() != len(text) or text.dtype != np.uint8:
                raise ValueError(f"expected one value for each of {n} keys, as uint8 bytes and their lengths")
            grouped = group_values(order, again, text, lengths.astype(np.int64))
        order, shared = order[~again], shared[~again]
        return cls(lay_out(codes, begins[order], sizes[order], shared) | grouped, high + 1)

    # --- walking

    def _next(self, node: int) -> int:
        """The code of a node's first child, END if a key ends there."""
        if not 0 <= node < len(self._codes) - 1:
            raise ValueError(f"expected a node of this trie, 0 to {len(self._codes) - 2}, got {node}")
        return self._codes[node + 1]

    def _further(self, node: int, lo: int = 0, hi: int | None = None) -> tuple[int, int]:
        """Where the further children of a node stand in the table (forks lo to hi are searched)."""
        fork = bisect_left(self._forks, node, lo, hi)
        if fork < len(self._forks) and self._forks[fork] == node:
            return self._rows[fork], self._rows[fork + 1]
        return 0, 0

    def advance(self, node: int, token: int) -> int:
        """The child of `node` under `token`; ValueError if there is none."""
        code = index(token) + 1
        if self._next(node) == code != END:
            return node + 1
        lo, hi = self._further(node)
        branch = bisect_left(self._branches, code, lo, hi)
        if branch == hi or self._branches[branch] != code:
            raise ValueError(f"no key goes on with token {token} at node {node}: expected one of its children")
        return self._children[branch]

    def children(self, node: int) -> np.ndarray:
        """The tokens that continue `node`, sorted: int64 [number of children]."""
        first = self._next(node)
        lo, hi = self._further(node)
        further = self._arrays["branches"][lo:hi]
        return np.concatenate([[first] if first != END else [], further]).astype(np.int64) - 1

    def child_nodes(self, node: int) -> list[int]:
        """The nodes under `node`, one for each token of `children`, in the same order."""
        lo, hi = self._further(node)
        return [node + 1] * (self._next(node) != END) + self._children[lo:hi].tolist()

    def ends(self, node: int) -> bool:
        """Whether a key ends at `node`."""
        return self._next(node) == END

    def find(self, prefix: Iterable[int]) -> int:
        """The node that `prefix` leads to; ValueError names the first token that leaves the trie."""
        node = self.root
        for position, token in enumerate(prefix):
            try:
                node = self.advance(node, token)
            except ValueError as error:
                raise ValueError(f"no key begins like this, from position {position} of the prefix: {error}") from None
        return node

    def __contains__(self, key: Iterable[int]) -> bool:
        """Whether `key` is a key (a mere prefix is not)."""
        try:
            return self.ends(self.find(key))
        except ValueError:
            return False

    def __len__(self) -> int:
        """The number of distinct keys."""
        return len(self._ends)

    def _last(self, node: int) -> int:
        """The last cell below `node`, which is the END of a key."""
        while True:
            lo, hi = self._further(node)
            if lo < hi:
                node = self._children[hi - 1]
            elif self._next(node) == END:
                return node + 1
            else:
                node += 1

    def count_at(self, node: int) -> int:
        """The number of keys at and below `node`, without listing them."""
        low = bisect_left(self._ends, node)
        return bisect_left(self._ends, self._last(node), low) + 1 - low

    def count(self, prefix: Iterable[int]) -> int:
        """The number of keys that begin with `prefix`."""
        return self.count_at(self.find(prefix))

    def walk(self, node: int, stop: int | None = None) -> Iterator[tuple[int, int, int]]:
        """(depth, token, child) for every node below `node`, depth first, tokens in order; depth counts from 1.

        Nothing is read below a token `stop` (such as a separator of fields), which is itself still given.
        """
        halt = END if stop is None else stop + 1
        lo = bisect_left(self._forks, node)
        hi = bisect_left(self._forks, self._last(node), lo)  # only these can be forks below
        codes, children = self._codes, self._children
        stack = [(0, node)]
        while stack:
            depth, node = stack.pop()
            if depth:
                yield depth, codes[node] - 1, node
                if codes[node] == halt:
                    continue
            a, b = self._further(node, lo, hi)
            stack.extend((depth + 1, child) for child in reversed(children[a:b]))
            if codes[node + 1] != END:
                stack.append((depth + 1, node + 1))

    def completions_at(self, node: int) -> Iterator[list[int]]:
        """What continues `node` to a key, in sorted order: the tokens that follow, [] first if a key ends here."""
        if self.ends(node):
            yield []
        tail: list[int] = []
        for depth, token, child in self.walk(node):
            tail[depth - 1 :] = [token]
            if self.ends(child):
                yield tail.copy()

    def completions(self, prefix: Iterable[int]) -> Iterator[list[int]]:
        """What continues `prefix` to a key: the tokens after it, as `completions_at`."""
        return self.completions_at(self.find(prefix))

    def values_at(self, node: int) -> list[str]:
        """The values of the key that ends at `node`; [] in a trie built without values; ValueError if none ends."""
        if not self.ends(node):
            raise ValueError(f"no key ends at node {node}: values belong to whole keys, go on to one of its children")
        if "offsets" not in self._arrays:
            return []
        key = bisect_left(self._ends, node + 1)
        lo, hi = self._arrays["offsets"][key : key + 2].tolist()
        return [value.decode() for value in self._arrays["values"][lo:hi].tobytes().split(bytes([SEPARATOR]))]

    def values(self, key: Iterable[int]) -> list[str]:
        """The values of `key`, in the order of the input, without repeats; ValueError if it is not a key."""
        return self.values_at(self.find(key))

    # --- batches

    def _on(self, nodes: torch.Tensor) -> list[torch.Tensor]:
        """The arrays that batches need, on the device of `nodes`: on the CPU the map itself, elsewhere one copy."""
        import torch  # here, as a process that only walks the trie does not need torch's 200 MB

        if len(nodes) and not 0 <= int(nodes.min()) <= int(nodes.max()) < len(self._codes) - 1:
            raise ValueError(f"expected nodes of this trie, 0 to {len(self._codes) - 2}, got {nodes.tolist()}")
        if nodes.device not in self._tensors:
            arrays = [torch.from_numpy(self._arrays[name]) for name in ("codes", "forks", "rows", "branches")]
            if nodes.device.type != "cpu":  # where torch does little with unsigned types
                arrays = [a.long().to(nodes.device) for a in arrays]
            self._tensors[nodes.device] = arrays
        return self._tensors[nodes.device]

    def masks(self, nodes: torch.Tensor, size: int | None = None) -> torch.Tensor:
        """For each cursor the tokens that continue it: True where allowed, on the device of `nodes` (int64 [B]).

        `size` is V, the width of the logits; by default the trie's own vocabulary, its largest token + 1. Whether a key
        may end at a cursor is not in the mask, see `ends_all`.
        """
        # [B] -> [B, V]
        import torch

        size = self.vocabulary if size is None else size
        if size < self.vocabulary:
            raise ValueError(f"expected masks of at least {self.vocabulary} tokens, as this trie has them, got {size}")
        codes, forks, rows, branches = self._on(nodes)
        distinct, back = nodes.unique(return_inverse=True)  # beams often share a cursor, at first all do
        shared = len(distinct) < len(nodes)
        nodes = distinct if shared else nodes
        first, begin, count = codes[nodes + 1].long(), [0] * len(nodes), [0] * len(nodes)
        if len(forks):
            fork = torch.searchsorted(forks, nodes.to(forks.dtype)).clamp(max=len(forks) - 1)
            begin = rows[fork].tolist()
            count = ((rows[fork + 1] - rows[fork]).long() * (forks[fork] == nodes)).tolist()
        spans = [slice(lo, lo + n) for lo, n in zip(begin, count, strict=True)]  # of the further children
        if nodes.device.type != "cpu":
            return _scatter(first, branches, spans, size)[back if shared else slice(None), 1:]
        # by numpy, on one thread: on a busy machine torch's threads wait for each other longer than this takes
        mask = np.zeros((len(nodes), size + 1), dtype=bool)  # by code
        mask[np.arange(len(nodes)), first.numpy()] = True
        for row, span in zip(mask, spans, strict=True):
            row[self._arrays["branches"][span]] = True
        return torch.from_numpy(mask[back.numpy()] if shared else mask)[:, 1:]

    def ends_all(self, nodes: torch.Tensor) -> torch.Tensor:
        """For each cursor whether a key ends there, on the device of `nodes` (int64 [B])."""
        # [B] -> [B]
        return self._on(nodes)[0][nodes + 1].long() == END

    # --- files

    def save(self, folder: str | Path, tokenizer: str | None = None) -> None:
        """Write to a folder, made if need be; a trie that is there already is replaced in one step.

        The arrays go to new files, and only then is the header replaced, which names them: a build that is killed
        leaves the old trie as it was. `tokenizer`, a digest, is kept for `open` to compare. ValueError for a folder
        that holds anything else; one writer at a time.
        """
        save_arrays(folder, self._arrays, self.vocabulary, tokenizer)

    @classmethod
    def open(cls, folder: str | Path, tokenizer: str | None = None) -> TokenTrie:
        """Open a saved trie as memory maps; nothing but the header is read.

        ValueError if the folder holds no trie, one of another version, files that are not as the header says, or a trie
        that was saved with the digest of another tokenizer than `tokenizer`.
        """
        return cls(*open_arrays(folder, tokenizer))


def _scatter(first: torch.Tensor, branches: torch.Tensor, spans: Sequence[slice], size: int) -> torch.Tensor:
    """Masks by code, from the first child's code of each cursor and the spans of its further ones in `branches`."""
    # [B] -> [B, V + 1]
    import torch

    mask = torch.zeros(len(first), size + 1, dtype=torch.bool, device=first.device)
    mask.scatter_(1, first[:, None], True)
    further = torch.cat([branches[:0], *(branches[span] for span in spans)]).long()  # [M]
    cursor = torch.arange(len(first)).repeat_interleave(torch.tensor([s.stop - s.start for s in spans]).long())
    mask[cursor.to(first.device), further] = True
    return mask


class DictTrie:
    """The literal form of TokenTrie: a node is a dict from tokens to nodes, and from END to the values of a key."""

    def __init__(self, keys: Iterable[Sequence[int]], values: Iterable[str] | None = None) -> None:
        self.root: dict = {}
        for key, value in zip_longest(keys, values or ()):
            node = self.root
            for token in key:
                node = node.setdefault(token, {})
            found = node.setdefault("end", [])
            found += [value] if value is not None and value not in found else []

    def find(self, prefix: Iterable[int]) -> dict:
        node = self.root
        for token in prefix:
            node = node[token]
        return node

    def children(self, node: dict) -> list[int]:
        return sorted(token for token in node if token != "end")

    def completions(self, node: dict) -> Iterator[list[int]]:
        if "end" in node:
            yield []
        for token in self.children(node):
            yield from ([token, *tail] for tail in self.completions(node[token]))
