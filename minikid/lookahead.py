"""Decoding inside a prefix trie, and the look-ahead that mends its greediness (the Seq2Seq + prefix tree article).

    V vocabulary · S, P, M subject, predicate and meaning of a key, separated by a token · Q the question, as tokens
    P_<t the tokens of P so far · P^(k) the completions of P_<t that the trie allows · LCS longest common subsequence

Allowed after a prefix are its children in the trie, and the end of the key where a key ends, also when longer keys go
on. Probabilities are renormalised over these, in log space. Look-ahead changes them while P is written:

    gain(k) = LCS(P^(k), Q) - LCS(P_<t, Q),      p_k <- p_k^(1 / (gain + 1)), renormalised,

the gain of a token being the largest of the completions that it begins. LCS rows are bit-vectors (Hyyro 2004): a row
extends by one token in a few operations on whole integers, and is shared by all completions through its node.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minikid.trie import TokenTrie


def lookahead_gains(completions: Iterable[Sequence[int]], prefix: Sequence[int], question: Sequence[int]) -> list[int]:
    """gain(k) of each completion, to the letter: whole sequences P^(k) that begin with the prefix P_<t.

    ValueError for one that does not. The policy below finds the same numbers without enumerating.
    """
    completions, prefix, base = [list(c) for c in completions], list(prefix), _lcs(prefix, question)
    for completion in completions:
        if completion[: len(prefix)] != prefix:
            raise ValueError(f"expected completions that begin with the prefix {prefix}, got {completion}")
    return [_lcs(completion, question) - base for completion in completions]


def _lcs(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common subsequence, by the textbook recurrence."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = row
        row = [0]
        for j, y in enumerate(b):
            row.append(before[j] + 1 if x == y else max(before[j + 1], row[j]))
    return row[-1]


class Coverage:
    """LCS lengths against one question, as bit-vectors: bit j of a row is 0 where the length grows at Q[j].

    Where `alike` has a token of the question, Q[j] is met by that other one as well.
    """

    def __init__(self, question: Sequence[int], alike: Mapping[int, int] | None = None):
        self.start = (1 << len(question)) - 1  # the row of the empty sequence
        self._places: dict[int, int] = {}
        for j, token in enumerate(question):
            for match in {token, (alike or {}).get(token, token)}:
                self._places[match] = self._places.get(match, 0) | 1 << j

    def extend(self, row: int, token: int) -> int:
        """The row of a sequence with one token more."""
        matches = row & self._places.get(token, 0)
        return ((row + matches) | (row - matches)) & self.start if matches else row

    def length(self, row: int) -> int:
        """LCS of the row's sequence and the question."""
        return self.start.bit_length() - row.bit_count()


@dataclass(frozen=True)
class Cursor:
    """Where in the trie the generated tokens have come to; never changed in place."""

    node: int
    seen: int = 0  # tokens taken in
    field: int = 0  # 0 while S is written, then one more behind each separator
    row: int = 0  # LCS row of P_<t


class Constrained:
    """pi renormalised over the continuations that the trie allows (policy; its state is a `Cursor`).

    `end_ids` are the model's eos ids; several keep their proportions. ValueError for tokens that left the trie, and
    where pi gives every allowed token -inf.
    """

    def __init__(self, trie: TokenTrie, end_ids: Sequence[int]):
        if not end_ids:
            raise ValueError("expected at least one eos id, by which a key can end; got none")
        self.trie, self.end_ids = trie, list(dict.fromkeys(end_ids))

    def start(self, prompt: Sequence[int]) -> Cursor:
        return Cursor(self.trie.root)

    def __call__(self, log_pi: Tensor, tokens: Sequence[int], state: Cursor) -> tuple[Tensor, Cursor]:
        # [V] -> [V]
        for token in tokens[state.seen :]:
            state = self.advance(state, token)
        if self.trie.vocabulary > len(log_pi):
            raise ValueError(
                f"the trie has tokens up to {self.trie.vocabulary - 1}, but the model's vocabulary has {len(log_pi)}: "
                "it was built with another tokenizer; build it anew"
            )
        allowed = self.trie.children(state.node).tolist()
        if clash := set(allowed).intersection(self.end_ids):
            raise ValueError(
                f"expected keys without the eos ids {self.end_ids}, but one goes on with {clash.pop()} after "
                f"{list(tokens)}: its end could not be told from that token; build the trie without it"
            )
        ends = self.end_ids if self.trie.ends(state.node) else []
        index = torch.tensor([*allowed, *ends], device=log_pi.device)
        total = log_pi[index].logsumexp(0)
        if total == -torch.inf:
            raise ValueError(
                f"all {len(index)} continuations that the trie allows after {list(tokens)} have probability 0; "
                "another policy or mask excludes them"
            )
        inside = log_pi[index] - total
        if len(index) > 1:
            inside = self.adjust(inside, allowed, state)
        return torch.full_like(log_pi, -torch.inf).index_copy(0, index, inside), state

    def advance(self, state: Cursor, token: int) -> Cursor:
        """The cursor behind one token more."""
        return replace(state, node=self.trie.advance(state.node, token), seen=state.seen + 1)

    def adjust(self, log_p: Tensor, children: Sequence[int], state: Cursor) -> Tensor:
        """A hook for look-ahead; the plain constraint changes nothing."""
        # [children, ends] -> [children, ends]
        return log_p


class LookAhead(Constrained):
    """`Constrained` with the article's look-ahead while P is written.

    A key's end, and the separator, bring no gain: P is complete there. `field` is P's place in the keys: 1 in (S, P,
    M), 2 in (S, M, P). `whole` measures LCS over all fields so far instead of P alone, as the released program does.
    `alike` is that of `Coverage`: for tokenizers that write a word at the front of a field by another token than within
    the question, where the article's, of Chinese characters, has one for both.
    """

    def __init__(
        self,
        trie: TokenTrie,
        end_ids: Sequence[int],
        question: Sequence[int],
        separator: int,
        *,
        field: int = 1,
        whole: bool = False,
        alike: Mapping[int, int] | None = None,
    ):
        super().__init__(trie, end_ids)
        self.coverage, self.separator, self.field, self.whole = Coverage(question, alike), separator, field, whole

    def start(self, prompt: Sequence[int]) -> Cursor:
        return Cursor(self.trie.root, row=self.coverage.start)

    def advance(self, state: Cursor, token: int) -> Cursor:
        state = super().advance(state, token)
        if token == self.separator:
            return replace(state, field=state.field + 1, row=state.row if self.whole else self.coverage.start)
        return replace(state, row=self.coverage.extend(state.row, token))

    def adjust(self, log_p: Tensor, children: Sequence[int], state: Cursor) -> Tensor:
        # [children, ends] -> [children, ends]
        if state.field != self.field:
            return log_p
        gains = self.gains(state)
        exponents = [1 / (gains[token] + 1) for token in children] + [1.0] * (len(log_p) - len(children))
        return (log_p * log_p.new_tensor(exponents)).log_softmax(0)

    def gains(self, state: Cursor) -> dict[int, int]:
        """The largest gain of the completions behind each child.

        LCS never falls along a path, so that the largest over all nodes of P below a child is that over its
        completions.
        """
        rows, best, first = [state.row], {}, -1
        base = self.coverage.length(state.row)
        for depth, token, _ in self.trie.walk(state.node, self.separator):
            if depth == 1:
                first = token
                best[first] = 0
            if token == self.separator:
                continue
            del rows[depth:]
            rows.append(self.coverage.extend(rows[-1], token))
            best[first] = max(best[first], self.coverage.length(rows[-1]) - base)
        return best
