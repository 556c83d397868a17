"""Ewe's working memory: k passages, each encoded on its own, that every layer attends to beside the context (Ewe 3).

    k units · L tokens a unit at most · P tokens of the shared prefix · M = P + k L slots of the memory
    H heads · K key-value heads · C head dimension · T queries · S keys

Every unit is read behind the same prefix and stands at the same positions, P to P + L - 1; the context begins at P + L
whatever the units' true lengths, so that replacing a unit moves nothing. Ewe 3.4 joins each unit to the context in a
stream of its own, adds a stream of the context alone, and averages the k + 1 results by their softmax normalisers z:

    h = sum_i z_i h_i / sum_i z_i,     h_i = softmax(q [K_i; K_c]) [V_i; V_c],     z_i = sum exp(q [K_i; K_c])

In sum_i z_i h_i each unit's terms occur once and the context's k + 1 times. Hence one attention over all keys with
log(k + 1) added to the context's logits or, the same to a softmax, taken off the units'. `aggregate_attention` is the
first form. The model computes the second: the memory fills the first slots of a cache, and `WorkingMemory.bias` is
added to their logits. The prefix, which the paper does not mention, counts as context, seen in every stream: one unit
without the context's own stream is then the prompt prefix + passage + context, logit for logit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from minikid.model import GPT, Cache

Pair = tuple[Tensor, Tensor]  # keys, values


def aggregate_attention(q: Tensor, units: Sequence[Pair], context: Pair, context_stream: bool = True) -> Tensor:
    """The k + 1 streams of Ewe 3.4, literally; the z_i are kept as logarithms, so that none overflows.

    The T queries stand at the last T positions of the context and look no further than themselves. Without
    `context_stream` only the k joint ones are averaged; with no units, the context's stream is the only one.
    """
    # [H, T, C], k x ([H, S_i, C], [H, S_i, C]), ([H, S, C], [H, S, C]) -> [H, T, C]
    (keys_c, values_c), T = context, q.shape[1]
    future = torch.ones(T, keys_c.shape[1], dtype=torch.bool, device=q.device).triu(keys_c.shape[1] - T + 1)
    nothing = (keys_c[:, :0], values_c[:, :0])
    outputs, log_z = [], []
    for keys, values in [*units, nothing] if context_stream or not units else units:
        logits = q @ torch.cat([keys, keys_c], dim=1).mT / math.sqrt(q.shape[2])
        logits = logits.masked_fill(F.pad(future, (keys.shape[1], 0)), -math.inf)
        outputs.append(logits.softmax(-1) @ torch.cat([values, values_c], dim=1))
        log_z.append(logits.logsumexp(-1))
    share = torch.stack(log_z).softmax(0)  # z_i / sum_j z_j
    return (share[..., None] * torch.stack(outputs)).sum(0)


@dataclass(frozen=True, eq=False)
class Unit:
    """Tokens as keys and values, padded with zeros to the slots that are kept for them."""

    tokens: tuple[int, ...]
    dropped: int  # how many tokens of the passage were cut off
    keys: list[Tensor]  # for each layer [K, slots, C]
    values: list[Tensor]
    weight: float = 1.0  # the unit's part in attention is as if it stood there so many times


class WorkingMemory:
    """At most `units` passages of `unit_length` tokens behind `prefix`; a new one takes the place of the oldest.

    Pass it to the model together with a cache that was empty at the first call. Passages may be added at any time: the
    cache takes over what is new with the next call, while the keys and values of the context stay as they are, computed
    with the memory of their time in view (Ewe 3.3). Several caches, and all rows of a batch, may share one memory.
    With `units` = 0 no positions are kept for a unit, and the logits are the plain model's behind `prefix`.

    `context_weight` (ours) stands for the number of streams, k + 1 or, without `context_stream`, k, where k counts the
    units that are held; `temperature` (ours) divides the units' logits, so that below 1 fewer of their tokens are seen.
    A unit's weight (ours) is added to its logits as a logarithm: with 2 it counts as two equal units, without one more
    stream.
    """

    def __init__(
        self,
        model: GPT,
        units: int,
        unit_length: int,
        prefix: Sequence[int] = (),
        *,
        context_stream: bool = True,
        context_weight: float | None = None,
        temperature: float = 1.0,
    ):
        if units < 0 or unit_length < 1:
            raise ValueError(f"expected units from 0 and a unit_length from 1, got {units} and {unit_length}")
        if not all(0 < x < math.inf for x in (temperature, 1.0 if context_weight is None else context_weight)):
            raise ValueError(f"expected context_weight and temperature above 0, got {context_weight} and {temperature}")
        room = model.config.max_positions - len(prefix) - min(units, 1) * unit_length
        if room < 1:
            raise ValueError(
                f"a prefix of {len(prefix)} tokens and units of {unit_length} leave none of this model's "
                f"{model.config.max_positions} positions to the context; take a shorter prefix or shorter units"
            )
        self.model, self.unit_length = model, unit_length
        self.context_stream, self.context_weight, self.temperature = context_stream, context_weight, temperature
        self.forwarded = 0  # tokens that the model read for this memory
        self.slots = len(prefix) + units * unit_length  # M: the first slots of a cache, used or not
        self.shift = (min(units, 1) - units) * unit_length  # from a slot of the context to its position
        self._prefix = model.new_cache()
        first = self._read(tuple(prefix), self._prefix, slots=len(prefix))
        empty = self._read((), self._prefix, slots=unit_length)
        self.parts = [first, *[empty] * units]  # in the order of their slots: the prefix, then the units
        self._oldest = 1  # index of the part that the next passage replaces
        self.bias = self._bias()

    @property
    def units(self) -> list[Unit]:
        """The passages that are held, oldest first."""
        return [unit for unit in self.parts[self._oldest :] + self.parts[1 : self._oldest] if unit.tokens]

    def add(self, passage: Sequence[int], weight: float = 1.0) -> Unit | None:
        """Encode a passage, given as token ids, in the place of the oldest; no other token is forwarded (Ewe 3.3).

        What does not fit in `unit_length` tokens is cut off, and counted in the unit's `dropped`. None where there are
        no units. ValueError for an empty passage, and for a weight that is not above 0.
        """
        if not 0 < weight < math.inf:
            raise ValueError(f"expected a weight above 0, got {weight}; leave out what should have no part")
        if isinstance(passage, str) or len(passage) == 0:
            raise ValueError(f"expected a passage of at least one token id (Tokenizer.encode), got {passage!r}")
        if len(self.parts) == 1:
            return None
        unit = self._read(tuple(passage), self._prefix.select([0]), slots=self.unit_length)
        unit = replace(unit, keys=[keys / self.temperature for keys in unit.keys], weight=weight)
        self.parts[self._oldest] = unit
        self._oldest = self._oldest % (len(self.parts) - 1) + 1
        self.bias = self._bias()
        return unit

    def write(self, cache: Cache) -> None:
        """Bring the first slots of a cache up to date: all of them if it is empty, else the parts that are new.

        The model calls this; nobody else needs to. ValueError for a cache that does not begin with this memory.
        """
        if cache.length == 0:
            for layer in range(len(cache.keys)):
                keys = torch.cat([part.keys[layer] for part in self.parts], dim=1)
                values = torch.cat([part.values[layer] for part in self.parts], dim=1)
                cache.append(layer, keys.expand(cache.batch, -1, -1, -1), values.expand(cache.batch, -1, -1, -1))
            cache.length, cache.start, cache.front = self.slots, None, list(self.parts)
            return
        if cache.length < self.slots or [p.keys[0].shape for p in cache.front] != [p.keys[0].shape for p in self.parts]:
            raise ValueError(
                "the cache does not begin with this memory: begin with an empty cache, truncate no further"
            )
        rows = [slice(None)] if cache.start is None else range(cache.batch)
        starts = [0] if cache.start is None else cache.start.tolist()
        end = 0
        for old, new in zip(cache.front, self.parts, strict=True):
            first, end = end, end + new.keys[0].shape[1]
            if new is not old:
                for layer in range(len(cache.keys)):
                    for row, start in zip(rows, starts, strict=True):
                        cache.keys[layer][row, :, start + first : start + end] = new.keys[layer]
                        cache.values[layer][row, :, start + first : start + end] = new.values[layer]
        cache.front = list(self.parts)

    @torch.no_grad()
    def _read(self, passage: tuple[int, ...], cache: Cache, slots: int) -> Unit:
        """As much of a passage as the slots hold, read behind what is in the cache."""
        tokens, past = passage[:slots], cache.length
        if tokens:
            self.model.hidden(torch.tensor([tokens], device=self.model.device), cache)
            self.forwarded += len(tokens)
        padding = (0, 0, 0, slots - len(tokens))
        keys = [F.pad(buffer[0, :, past : cache.length], padding) for buffer in cache.keys]
        values = [F.pad(buffer[0, :, past : cache.length], padding) for buffer in cache.values]
        return Unit(tokens, len(passage) - len(tokens), keys, values)

    def _bias(self) -> Tensor:
        """What is added to the logits of the memory's slots, -inf where there is no token."""
        # -> [M]
        streams = self.context_weight or max(len(self.units) + self.context_stream, 1)
        first, *units = self.parts
        bias = [0.0] * len(first.tokens)
        for unit in units:
            share = math.log(unit.weight) - math.log(streams)
            bias += [share] * len(unit.tokens) + [-math.inf] * (self.unit_length - len(unit.tokens))
        return torch.tensor(bias, device=self.model.device, dtype=self.model.dtype)
