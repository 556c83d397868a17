"""What the loops of decoding share: the policy they ask, the generation they return, the reading of prompts.

    B rows · T tokens of a prompt · A tokens behind it · V vocabulary

Sampling (decode.py) and beam search (beam.py) build on it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from minikid.model import GPT, Cache

OnToken = Callable[[int, int, Any], None]  # row, token, state


class Policy(Protocol):
    """What the loop asks of a policy."""

    def start(self, prompt: Sequence[int]) -> Any: ...

    def __call__(self, log_pi: Tensor, tokens: Sequence[int], state: Any) -> tuple[Tensor, Any]: ...


@dataclass
class Generation:
    """One continuation of a prompt."""

    tokens: list[int] = field(default_factory=list)  # without the eos that ended it
    states: list[Any] = field(default_factory=list)  # the policy's state behind each token
    log_probs: list[float] = field(default_factory=list)  # of each token under the policy, before the sampler's cuts
    stop: str = "length"  # "eos" or "length"
    forwarded: int = 0  # tokens that the model read for this row; a shared prompt counts in the first row only
    score: float | None = None  # beam search alone: what it sorts by


def log_probabilities(logits: Tensor) -> Tensor:
    """log pi, in float32 or, where the logits are float64, in float64."""
    # [B, V] -> [B, V]
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def read_prompts(model: GPT, prompts: Sequence[Sequence[int]], rows: Sequence[Generation]) -> tuple[Cache, Tensor]:
    """A cache with one row per prompt and the logits behind each; equal prompts are forwarded once."""
    # B prompts of [T] -> cache, [B, V]
    distinct = list(dict.fromkeys(tuple(prompt) for prompt in prompts))
    place = {prompt: i for i, prompt in enumerate(distinct)}
    caches, logits = [], []
    for prompt in distinct:
        caches.append(model.new_cache())
        states = model.hidden(torch.tensor([prompt], device=model.device), caches[-1])
        logits.append(model.head(states[:, -1]))
    for prompt in distinct:
        rows[[tuple(p) for p in prompts].index(prompt)].forwarded += len(prompt)
    order = [place[tuple(prompt)] for prompt in prompts]
    cache = caches[0] if len(distinct) == 1 else Cache.stack(caches)
    if order != list(range(cache.batch)):
        cache = cache.select(order)
    return cache, torch.cat(logits)[order]


@torch.no_grad()
def likelihoods(model: GPT, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """log M(token | prompt, tokens before it) in nats, in float64, of each token of the text behind each prompt.

    What all prompts begin with is read once, the rest in one batch. ValueError for an empty prompt or text.
    """
    # B prompts of [T], B texts of [A] -> B tensors [A]
    if not all(prompts) or not all(texts):
        raise ValueError("expected prompts and texts of at least one token each, came an empty one; leave it out")
    two_way = model.config.attention == "prefix"  # there, all of a prompt depends on all of it
    columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
    shared = 0 if two_way else len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    tails = [[*prompt[shared:], *text[:-1]] for prompt, text in zip(prompts, texts, strict=True)]
    tokens = pad(tails).to(model.device)  # padding stands behind a row, where none of its tokens look
    if two_way:
        states = model.hidden(tokens, prefix=torch.tensor([len(prompt) for prompt in prompts], device=model.device))
    else:
        cache = model.new_cache()
        if shared:
            model.hidden(torch.tensor([prompts[0][:shared]], device=model.device), cache)
        states = model.hidden(tokens, cache.expand(len(prompts)))
    found = []
    for row, tail, text in zip(states, tails, texts, strict=True):
        log_p = model.head(row[len(tail) - len(text) : len(tail)]).double().log_softmax(-1)  # [A, V]
        found.append(log_p.gather(1, torch.tensor(text, device=model.device)[:, None])[:, 0])
    return found


def pad(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of any lengths, filled up with zeros on the right."""
    # B rows of [T] -> [B, T]
    return torch.tensor([[*row, *[0] * (max(map(len, rows)) - len(row))] for row in rows])


def check_room(model: GPT, prompt: Sequence[int], max_new_tokens: int) -> None:
    """ValueError unless the prompt is there and fits the model's positions with what is to be generated."""
    if max_new_tokens < 0:
        raise ValueError(f"expected max_new_tokens >= 0, got {max_new_tokens}")
    if len(prompt) == 0:
        raise ValueError("the prompt is empty; expected at least one token to continue")
    room = model.config.max_positions - len(prompt)
    if max_new_tokens > room:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens leaves room for {max(room, 0)} more of this model's "
            f"{model.config.max_positions} positions, but {max_new_tokens} were asked for; "
            "shorten the prompt or ask for fewer"
        )
