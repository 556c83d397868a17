"""KID's step on the key-value cache: what the released program of KID does in place of Algorithm 1's update of logits.

    V vocabulary · S tokens before the last one · K key-value heads · C head dimension

The variable is a shift of the keys and values of all layers before the last token, p = p(. | shifted cache, last
token); K gradient steps raise the objective J of `kid.objective`. A layer's step is step_size * g / norm^gamma, with g
the gradient in its keys and values and norm the largest norm of g in the steps so far; the step is taken whether J then
rises or not. The shifted keys and values stay in the cache and so act on all later tokens.

Departures from the released program: the last token enters the cache once, not twice, and is itself not shifted; the
reference of the KL penalty is pi on the cache as it is, not pi after bans on n-grams; demonstrations are those of
`KID`; top-p acts (there it takes a softmax of probabilities); where nothing can be moved, p = pi, the cache is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minikid.generation import Generation, OnToken, check_room, log_probabilities
from minikid.kid import Reward, adapt_beta, can_move, kl_divergence, objective
from minikid.model import GPT, Cache
from minikid.policies import KID


def cache_step(
    model: GPT,
    cache: Cache,
    token: int,
    counts: Tensor,
    beta: float = 0.01,
    reward: Reward = "log-sum",
    *,
    steps: int = 3,
    step_size: float = 0.01,
    gamma: float = 1.5,
) -> tuple[Tensor, Tensor, Cache]:
    """log pi, log p, and the cache behind `token`: the given one, or a shifted copy if there was something to move.

    Forwards the token once for pi, and when something moves once more per step and once for p. The weights receive no
    gradient.
    """
    # [V] -> [V], [V]
    log_pi = _read(model, cache, token)
    if steps == 0 or not can_move(log_pi, counts):
        return log_pi, log_pi, cache
    cache.truncate(cache.length - 1)
    past = [torch.stack([k, v])[..., : cache.length, :] for k, v in zip(cache.keys, cache.values, strict=True)]
    norms = [torch.full((), 1e-15).to(layer) for layer in past]  # as there, so that no gradient divides by zero
    for _ in range(steps):
        past = [layer.detach().requires_grad_(True) for layer in past]  # each [2, 1, K, S, C]
        with torch.enable_grad():
            log_p = _read(model, _cache_of(model, past), token)
            J = objective(log_p, log_pi, counts, beta, reward)
        gradients = torch.autograd.grad(J, past)
        norms = [torch.maximum(norm, g.norm()) for norm, g in zip(norms, gradients, strict=True)]
        with torch.no_grad():
            past = [x + step_size * g / norm**gamma for x, g, norm in zip(past, gradients, norms, strict=True)]
    cache = _cache_of(model, past)
    return log_pi, _read(model, cache, token), cache


@torch.no_grad()
def generate_on_cache(
    model: GPT,
    prompt_ids: Sequence[int],
    policy: KID,
    sampler: Callable[[Tensor, torch.Generator | None], int],
    *,
    steps: int = 3,
    step_size: float = 0.01,
    gamma: float = 1.5,
    mix: float = 0.99,
    max_new_tokens: int = 100,
    eos_ids: Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    on_token: OnToken | None = None,
) -> Generation:
    """Continue one prompt as `decode.generate` does, with `cache_step` in place of the policy's update.

    Sampled from is the geometric mean p^mix pi^(1 - mix), normalised. The policy gives demonstrations, reward, beta and
    its rule, "fixed" in the released program or "adapt". ValueError for the rule "solve", for prefix attention,
    and as `generate`.
    """
    # [T] -> generation
    if model.config.attention == "prefix":
        raise ValueError("steps on the cache read a prompt's last token apart, which prefix attention does not allow")
    update = policy.update
    if update.rule == "solve":
        raise ValueError("steps on the cache have no closed form to solve beta for; use the rule 'fixed' or 'adapt'")
    check_room(model, prompt_ids, max_new_tokens)
    eos = frozenset(model.config.eos_ids if eos_ids is None else eos_ids)
    row, state, cache = Generation(), policy.start(prompt_ids), model.new_cache()
    *before, token = prompt_ids
    if before and max_new_tokens:
        model.hidden(torch.tensor([before], device=model.device), cache)
        row.forwarded = len(before)
    like = torch.empty(model.config.vocab_size, device=model.device)
    while len(row.tokens) < max_new_tokens:
        state, counts = policy.demonstrate(row.tokens, state, like)
        log_pi, log_p, cache = cache_step(
            model, cache, token, counts, state.beta, update.reward, steps=steps, step_size=step_size, gamma=gamma
        )
        beta, kl = state.beta, 0.0
        if log_p is not log_pi:
            log_p = (mix * log_p + (1 - mix) * log_pi).log_softmax(0)
            kl = kl_divergence(log_pi, log_p)
            beta = adapt_beta(beta, kl, update.sigma) if update.rule == "adapt" else beta
            row.forwarded += steps + 1
        row.forwarded += 1
        state = replace(state, beta=beta, kl=kl)
        token = sampler(log_p, generator)
        if token in eos:
            row.stop = "eos"
            break
        row.tokens.append(token)
        row.states.append(state)
        row.log_probs.append(float(log_p[token]))
        if on_token is not None:
            on_token(0, token, state)
    return row


def _read(model: GPT, cache: Cache, token: int) -> Tensor:
    """Log-probabilities behind one more token."""
    # -> [V]
    return log_probabilities(model(torch.tensor([[token]], device=model.device), cache)[0, -1])


def _cache_of(model: GPT, past: Sequence[Tensor]) -> Cache:
    """A cache of one row that holds the given keys and values of each layer."""
    # L x [2, 1, K, S, C] -> cache
    cache = model.new_cache()
    cache.keys, cache.values = [layer[0] for layer in past], [layer[1] for layer in past]
    cache.length = past[0].shape[3]
    return cache
