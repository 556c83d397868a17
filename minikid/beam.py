"""Beam search: the best continuations of a prompt under a policy, all hypotheses of all prompts in one batch.

    r running hypotheses of one prompt · R of all prompts · V vocabulary

A hypothesis is *running*, or *finished* by an eos token or by having `max_new_tokens` tokens. One step extends every
running hypothesis of a prompt by every token and sorts these candidates by log-probability, the policy's, summed. Of
the first `beams` candidates those that finish are kept apart, and only the `beams` best by

    score = log-probability / length ** length_penalty        both with the eos token, if one ended the hypothesis

stay. The first `beams` candidates that do not finish run on, except those that cannot reach a score above the worst of
`beams` finished ones; with none left the search ends. That is invisible in the result: all running hypotheses have one
length, so what such a one keeps out could not reach that score either. A log-probability only falls, so the most
that a hypothesis can reach is its log-probability as it is, over the greatest length if the penalty is positive, where
length helps, and else over the next length, the shortest it can end with.

With one beam there is nothing to sort: the search is greedy decoding and ends at the first eos.

The rule is that of transformers' `generate(num_beams=..., early_stopping="never")`. Departures: a candidate of
probability 0 is never taken, so there may be fewer hypotheses than beams, where transformers fills up with ones of log-
probability -1e9; equal scores keep the order of finishing, equal candidates that of their parents, then of token ids;
sums are float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minikid.generation import Generation, Policy, check_room, log_probabilities, read_prompts
from minikid.model import GPT


@dataclass(frozen=True)
class Hypothesis:
    """A running continuation; never changed in place, so that its children may share what it holds."""

    state: Any  # the policy's, for the next step
    tokens: tuple[int, ...] = ()
    states: tuple[Any, ...] = ()  # the policy's state behind each token
    log_probs: tuple[float, ...] = ()
    total: float = 0.0  # their sum


def beam_search(
    model: GPT,
    prompt_ids: Sequence[int],
    policy: Policy,
    beams: int,
    *,
    max_new_tokens: int = 100,
    length_penalty: float = 1.0,
    eos_ids: Sequence[int] | None = None,
) -> list[Generation]:
    """The best continuations of one prompt, best first; `beam_search_batch` says the rest."""
    return beam_search_batch(
        model,
        [prompt_ids],
        [policy],
        beams,
        max_new_tokens=max_new_tokens,
        length_penalty=length_penalty,
        eos_ids=eos_ids,
    )[0]


@torch.no_grad()
def beam_search_batch(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[Policy],
    beams: int,
    *,
    max_new_tokens: int = 100,
    length_penalty: float = 1.0,
    eos_ids: Sequence[int] | None = None,
) -> list[list[Generation]]:
    """At most `beams` finished hypotheses per prompt, best first; one policy a prompt.

    All differ, if only in the eos token, which `tokens` leave out. There are fewer than `beams` where the policy leaves
    fewer sequences, and none where it leaves none. The prompts, of any lengths,
    are searched side by side and apart: each as it is alone, up to rounding. A step forwards one token per running
    hypothesis. `eos_ids` default to the model's; an empty list never stops early. In each list the first generation's
    `forwarded` is that of the whole search. ValueError, before any token, for an empty prompt or one that leaves no
    room for `max_new_tokens`, less than one beam, or a penalty outside -10 ... 10; later for a policy that gives NaN.
    """
    # prompts of [T] -> for each up to `beams` generations
    eos = frozenset(model.config.eos_ids if eos_ids is None else eos_ids)
    if beams < 1:
        raise ValueError(f"expected at least one beam, got {beams}; one is greedy decoding")
    if not -10 <= length_penalty <= 10:
        raise ValueError(
            f"expected a length penalty from -10 to 10, got {length_penalty}; 0 sorts by log-probability, 1 by its mean"
        )
    for prompt in prompts:
        check_room(model, prompt, max_new_tokens)
    running = [[Hypothesis(policy.start(prompt))] for policy, prompt in zip(policies, prompts, strict=True)]
    if not prompts or max_new_tokens == 0:
        return [[Generation(score=0.0)] for _ in prompts]
    finished: list[list[Generation]] = [[] for _ in prompts]
    work = [Generation() for _ in prompts]  # counts what each search forwards
    cache, logits = read_prompts(model, prompts, work)
    since = cache.length  # before it all rows of a prompt are equal
    for length in range(1, max_new_tokens + 1):
        log_pi = iter(log_probabilities(logits))
        parents: list[int] = []  # the row that each new row continues
        first = 0  # row of the prompt's first hypothesis
        sizes = [len(rows) for rows in running]
        for g, rows in enumerate(running):
            if not rows:
                continue
            steps = [policies[g](next(log_pi), row.tokens, row.state) for row in rows]
            log_p = torch.stack([p for p, _ in steps]).double()
            going = []
            for rank, (i, token, log_prob) in enumerate(_best(log_p, rows, beams * (1 + len(eos)))):
                child = _extend(rows[i], token, log_prob, steps[i][1])
                if token not in eos and length < max_new_tokens:
                    going.append((first + i, child))
                elif rank < beams:
                    finished[g].append(_finish(child, token in eos, length_penalty))
            finished[g] = sorted(finished[g], key=lambda done: -done.score)[:beams]  # stable: the earlier before equals
            going = going[:beams]
            if len(finished[g]) == beams:
                reach = max_new_tokens if length_penalty > 0 else length + 1
                going = [(i, h) for i, h in going if h.total / reach**length_penalty > finished[g][-1].score]
            if beams == 1 and finished[g]:
                going = []
            first += len(rows)
            parents += [i for i, _ in going]
            running[g] = [h for _, h in going]
        if not parents:
            break
        if [len(rows) for rows in running] != sizes:
            cache = cache.select(parents)
        elif parents != list(range(first)):
            cache.reorder(parents, since)
        last = torch.tensor([[h.tokens[-1]] for rows in running for h in rows], device=model.device)
        logits = model(last, cache)[:, -1]
        for counter, rows in zip(work, running, strict=True):
            counter.forwarded += len(rows)
    for counter, best in zip(work, finished, strict=True):
        if best:
            best[0].forwarded = counter.forwarded
    return finished


def _best(log_p: Tensor, rows: Sequence[Hypothesis], k: int) -> list[tuple[int, int, float]]:
    """(parent, token, its log p) of the k most probable candidates, best first, none of probability 0."""
    # [r, V] -> at most k triples
    totals = (log_p + log_p.new_tensor([row.total for row in rows])[:, None]).flatten()
    top = totals.topk(min(k, len(totals))).values
    if top[0].isnan():
        raise ValueError("the policy gave NaN; expected log-probabilities, -inf for tokens that are ruled out")
    # topk does not say which of equals it takes: all that reach its last value are sorted again
    index = ((totals >= top[-1]) & (totals > -math.inf)).nonzero()[:, 0]
    index = index[totals[index].sort(descending=True, stable=True).indices[:k]]
    log_probs = log_p.flatten()[index].tolist()
    return [(*divmod(place, log_p.shape[1]), x) for place, x in zip(index.tolist(), log_probs, strict=True)]


def _extend(parent: Hypothesis, token: int, log_prob: float, state: Any) -> Hypothesis:
    return Hypothesis(
        state,
        (*parent.tokens, token),
        (*parent.states, state),
        (*parent.log_probs, log_prob),
        parent.total + log_prob,
    )


def _finish(hypothesis: Hypothesis, by_eos: bool, length_penalty: float) -> Generation:
    length = len(hypothesis.tokens)
    kept = length - by_eos
    return Generation(
        tokens=list(hypothesis.tokens[:kept]),
        states=list(hypothesis.states[:kept]),
        log_probs=list(hypothesis.log_probs[:kept]),
        stop="eos" if by_eos else "length",
        score=hypothesis.total / length**length_penalty,
    )
