"""Decoding: policies change the distribution, samplers pick a token, the loop owns the cache and the position.

    B rows · R rows still running · V vocabulary · T tokens of a prompt

A policy has `start(prompt_ids) -> state` and, called as `policy(log_pi[V], tokens, state) -> (log_p[V], state)`, maps
the model's log-probabilities and the tokens generated so far to the log-probabilities that are sampled from. It is
pure: what it remembers is in the state, which is never changed in place, so that beams and samples may share one. A
sampler, called as `sampler(log_p[V], generator) -> token`, draws with the generator it is given.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minikid.beam import beam_search, beam_search_batch
from minikid.generation import Generation, OnToken, Policy, check_room, log_probabilities, read_prompts
from minikid.kid import BETA_RANGE, adam_policy, adapt_beta, exact_policy, solve_beta
from minikid.kid_cache import generate_on_cache
from minikid.lookahead import Constrained, LookAhead, lookahead_gains
from minikid.model import GPT
from minikid.policies import KID, LittleKID, Update

__all__ = [
    "BETA_RANGE",
    "KID",
    "Constrained",
    "Generation",
    "LittleKID",
    "LookAhead",
    "Sampler",
    "Update",
    "Vanilla",
    "adam_policy",
    "adapt_beta",
    "beam_search",
    "beam_search_batch",
    "exact_policy",
    "generate",
    "generate_batch",
    "generate_on_cache",
    "greedy",
    "lookahead_gains",
    "solve_beta",
]


class Vanilla:
    """The model's own distribution, pi."""

    def start(self, prompt: Sequence[int]) -> None:
        return None

    def __call__(self, log_pi: Tensor, tokens: Sequence[int], state: None) -> tuple[Tensor, None]:
        # [V] -> [V]
        return log_pi, state


def greedy(log_p: Tensor, generator: torch.Generator | None = None) -> int:
    """The most probable token; the lowest id among equals."""
    # [V] -> token
    return int(log_p.argmax())


@dataclass(frozen=True)
class Sampler:
    """Sampling after the usual cuts, in this order: temperature, top-k, top-p over what top-k left."""

    temperature: float = 1.0  # 0 is exactly `greedy`
    top_k: int = 0  # keep the k most probable tokens; 0 or more than V: all
    top_p: float = 1.0  # keep the smallest set of most probable tokens whose mass reaches top_p, never none

    def __post_init__(self):
        warm = self.temperature == 0 or 1e-30 <= self.temperature < math.inf  # below, logits leave float32
        if not (warm and self.top_k >= 0 and 0 < self.top_p <= 1):
            wanted = "expected temperature >= 0, top_k >= 0 and 0 < top_p <= 1"
            raise ValueError(f"{wanted}, got {self}; a temperature is 0 or at least 1e-30")

    def distribution(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities that are drawn from and their tokens, on the CPU; most probable first if any were cut.

        Top-p counts the mass that top-k left, renormalised, as the usual programs do.
        """
        # [V] -> [n], [n]
        scaled = log_p.float() / self.temperature
        if 0 < self.top_k < len(scaled):
            scaled, tokens = scaled.topk(self.top_k)
        elif self.top_p < 1:
            scaled, tokens = scaled.sort(descending=True, stable=True)
        else:
            tokens = torch.arange(len(scaled), device=scaled.device)
        p = scaled.softmax(0)
        if self.top_p < 1:
            kept = 1 + int((p.cumsum(0)[:-1] < self.top_p).sum())  # a token stays if those before do not reach top_p
            p, tokens = p[:kept] / p[:kept].sum(), tokens[:kept]
        return p.cpu(), tokens.cpu()

    def __call__(self, log_p: Tensor, generator: torch.Generator | None = None) -> int:
        # [V] -> token
        if self.temperature == 0:
            return greedy(log_p)
        p, tokens = self.distribution(log_p)
        if len(p) < len(log_p):
            return int(tokens[torch.multinomial(p, 1, generator=generator)])
        sums = p.double().cumsum(0)  # over a whole vocabulary, multinomial's random number for each token takes long
        place = torch.rand(1, dtype=torch.float64, generator=generator) * sums[-1]
        return int(tokens[torch.searchsorted(sums, place, right=True).clamp_max(len(sums) - 1)])


def generate(
    model: GPT,
    prompt_ids: Sequence[int],
    policy: Policy,
    sampler: Callable[[Tensor, torch.Generator | None], int],
    *,
    max_new_tokens: int = 100,
    eos_ids: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    on_token: OnToken | None = None,
) -> Generation:
    """Continue one prompt until an eos token or `max_new_tokens`; `generate_batch` says the rest."""
    return generate_batch(
        model,
        [prompt_ids],
        [policy],
        sampler,
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
        generators=[generator],
        on_token=on_token,
    )[0]


@torch.no_grad()
def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[Policy],
    sampler: Callable[[Tensor, torch.Generator | None], int],
    *,
    max_new_tokens: int = 100,
    eos_ids: Sequence[int] | None = None,
    generators: Sequence[torch.Generator | None] | None = None,
    on_token: OnToken | None = None,
) -> list[Generation]:
    """Continue prompts of any lengths side by side, one policy and one generator a row.

    Each step forwards one token per running row; finished rows leave the batch. Equal prompts are read once. A row in a
    batch sees the same distributions as alone, up to rounding. `eos_ids` default to the model's; an empty list never
    stops early. ValueError, before any token, for an empty prompt or one that leaves no room for `max_new_tokens`.
    """
    # B prompts of [T] -> B generations
    eos = frozenset(model.config.eos_ids if eos_ids is None else eos_ids)
    generators = [None] * len(prompts) if generators is None else generators
    for prompt in prompts:
        check_room(model, prompt, max_new_tokens)
    rows = [Generation() for _ in prompts]
    states = [policy.start(prompt) for policy, prompt in zip(policies, prompts, strict=True)]
    if not prompts or max_new_tokens == 0:
        return rows
    running = list(range(len(prompts)))
    cache, logits = read_prompts(model, prompts, rows)
    while True:
        log_pi, going = log_probabilities(logits), []
        for i, row in enumerate(running):
            log_p, states[row] = policies[row](log_pi[i], rows[row].tokens, states[row])
            token = sampler(log_p, generators[row])
            if token in eos:
                rows[row].stop = "eos"
                continue
            rows[row].tokens.append(token)
            rows[row].states.append(states[row])
            rows[row].log_probs.append(float(log_p[token]))
            if on_token is not None:
                on_token(row, token, states[row])
            if len(rows[row].tokens) < max_new_tokens:
                going.append(i)
        if not going:
            return rows
        if len(going) < len(running):
            cache, running = cache.select(going), [running[i] for i in going]
        last = torch.tensor([[rows[row].tokens[-1]] for row in running], device=model.device)
        with torch.inference_mode():  # without the books that no_grad keeps on views: 4% of a step
            logits = model(last, cache)[:, -1]
        for row in running:
            rows[row].forwarded += 1
