"""KID's step: how the next-token distribution is moved towards the knowledge demonstrations (KID 3.3, Algorithm 1).

    V vocabulary · pi the model's distribution · p the updated one · n[V] demonstration counts, N = sum(n)
    D = {v: n_v > 0}, m0 = pi(D), m = p(D) · beta weight of the KL penalty · sigma target divergence KL(pi || p), nats

Eq. 3 maximises E_{a~pi}[p(a)/pi(a) r] - beta KL(pi || p) with the gain r = sum_v n_v log pi(v). Read to the letter r
does not depend on p and the importance weights average to 1, so that the gradient is zero. The gain has to be taken
under the policy that is updated, and two readings do that:

    "sum-log"   J = sum_v n_v log p(v) - beta KL(pi || p)          Eq. 3 with r under p
                argmax: p = (beta pi + n) / (beta + N)
    "log-sum"   J = log sum_{v in D} p(v) - beta KL(p || pi)       the released program
                argmax: ratios within D and outside D stay, and logit(m) = logit(m0) + 1 / (beta m)

Where D is empty, or pi(D) is 0 or 1 to working precision, there is nothing to move: p = pi. Tokens that pi excludes
(-inf) stay out. All logarithms are natural; everything works on log-probabilities of shape [V].
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Reward = Literal["sum-log", "log-sum"]
ADAM_DECAY, ADAM_EPSILON = (0.9, 0.999), 1e-8  # Adam's usual constants
BETA_RANGE = (1e-3, 1e3)  # an adaptive beta is kept within, so that no run of steps can make it vanish or explode


def kl_divergence(log_a: Tensor, log_b: Tensor) -> float:
    """KL(a || b) = sum_v a_v (log a_v - log b_v), in nats; 0 log 0 = 0."""
    # [V], [V] -> scalar
    terms = log_a.exp() * (log_a - log_b)
    return float(terms.masked_fill(log_a == -torch.inf, 0.0).sum())


def objective(log_p: Tensor, log_pi: Tensor, counts: Tensor, beta: float, reward: Reward) -> Tensor:
    """J of the reading, differentiable in log_p; demonstrations outside pi's support do not count."""
    # [V], [V], [V] -> scalar
    support = log_pi > -torch.inf
    if not support.all():
        log_p, log_pi, counts = log_p[support], log_pi[support], counts[support]
    demonstrated = (counts > 0).nonzero().squeeze(1)
    if _reading(reward) == "sum-log":
        gain = (counts[demonstrated] * log_p[demonstrated]).sum()
        return gain - beta * (log_pi.exp() * (log_pi - log_p)).sum()
    return log_p[demonstrated].logsumexp(0) - beta * (log_p.exp() * (log_p - log_pi)).sum()


def exact_policy(log_pi: Tensor, counts: Tensor, beta: float, reward: Reward) -> Tensor:
    """The maximiser of J in closed form ("log-sum": one scalar root)."""
    # [V], [V] -> [V]
    split = _Split.of(log_pi, counts)
    if split is None:
        return log_pi
    log_p = log_pi.clone()
    if _reading(reward) == "sum-log":
        log_total = math.log(beta + float(split.counts.sum()))
        log_p += math.log(beta) - log_total
        log_p[split.demonstrated] = (torch.logaddexp(split.log_pi + math.log(beta), split.counts.log()) - log_total).to(
            log_p.dtype
        )
        return log_p
    return split.with_mass(log_p, _log_sum_root(split.logit, beta))


def adam_policy(log_pi: Tensor, counts: Tensor, beta: float, reward: Reward, steps: int = 3, lr: float = 0.1) -> Tensor:
    """K steps of Adam on the logits theta of p = softmax(theta), from theta = log pi (KID Algorithm 1; K = 3 in the
    paper).

    The paper names no learning rate. Of the K + 1 iterates the one with the largest J is returned, where the paper
    takes the last: Adam's step does not shrink near the optimum, so that a long run is now and then thrown off it.
    """
    # [V], [V] -> [V]
    if _Split.of(log_pi, counts) is None:
        return log_pi
    support = log_pi > -torch.inf
    inside, counts = log_pi.detach()[support], counts[support]
    # Adam is written out: torch.optim would import torch's compiler, a second's work
    theta, mean, square = inside, torch.zeros_like(inside), torch.zeros_like(inside)  # moments of the gradient
    best, best_log_p = -math.inf, inside
    for step in range(steps + 1):
        theta = theta.detach().requires_grad_(step < steps)
        with torch.set_grad_enabled(step < steps):
            log_p = theta.log_softmax(0)
            J = objective(log_p, inside, counts, beta, reward)
        if J.item() > best:
            best, best_log_p = J.item(), log_p.detach()
        if step < steps:
            (gradient,) = torch.autograd.grad(J, theta)
            mean = ADAM_DECAY[0] * mean + (1 - ADAM_DECAY[0]) * gradient
            square = ADAM_DECAY[1] * square + (1 - ADAM_DECAY[1]) * gradient**2
            unbiased = [m / (1 - decay ** (step + 1)) for m, decay in zip((mean, square), ADAM_DECAY, strict=True)]
            theta = theta.detach() + lr * unbiased[0] / (unbiased[1].sqrt() + ADAM_EPSILON)
    return torch.full_like(log_pi, -torch.inf).masked_scatter(support, best_log_p)


def adapt_beta(beta: float, kl: float, sigma: float) -> float:
    """Algorithm 1's rule for the next step: KL >= 2 sigma doubles beta, KL <= sigma / 2 halves it, else it stays.

    The result is clamped to BETA_RANGE, which the paper does not do.
    """
    if kl >= 2 * sigma:
        beta *= 2
    elif kl <= sigma / 2:
        beta /= 2
    return min(max(beta, BETA_RANGE[0]), BETA_RANGE[1])


def solve_beta(log_pi: Tensor, counts: Tensor, sigma: float, reward: Reward) -> float:
    """The beta at which the exact policy has KL(pi || p) = sigma, by bisection (ours; the paper's rule lags by one
    step).

    The KL falls monotonically in beta. When it stays below sigma however small beta is (D covers what pi may say), the
    smallest normal float is returned, the limit. ValueError unless sigma > 0.
    """
    # [V], [V] -> scalar
    if not sigma > 0:
        raise ValueError(f"expected sigma > 0 (nats of KL per step), got {sigma}; for no infusion use the plain policy")
    split = _Split.of(log_pi, counts)
    if split is None:
        return 1.0
    if _reading(reward) == "sum-log":
        gap = split.counts.log() - split.log_pi  # log n_v / pi_v
        weight, total, m0 = split.log_pi.exp(), float(split.counts.sum()), math.exp(split.log_m0)

        def too_far(log_beta: float) -> bool:
            log_ratio = (torch.logaddexp(gap.new_tensor(log_beta), gap) * weight).sum()
            return math.log(math.exp(log_beta) + total) - float(log_ratio) - (1 - m0) * log_beta > sigma

        return math.exp(_bisect(lambda x: not too_far(x), -700.0, 700.0))

    def too_near(logit: float) -> bool:
        log_m, log_rest = -_softplus(-logit), -_softplus(logit)
        moved = math.exp(split.log_m0) * (split.log_m0 - log_m) + math.exp(split.log_rest) * (split.log_rest - log_rest)
        return moved < sigma

    high = split.logit + 1.0
    while too_near(high):
        high = split.logit + 2 * (high - split.logit)
    logit = _bisect(lambda x: not too_near(x), split.logit, high)
    return (1 + math.exp(-logit)) / (logit - split.logit)


def can_move(log_pi: Tensor, counts: Tensor) -> bool:
    """Whether the demonstrations leave anything to move: D is not empty, pi(D) not 0 or 1 to working precision."""
    # [V], [V] -> bool
    return _Split.of(log_pi, counts) is not None


@dataclass(frozen=True)
class _Split:
    """pi as D and the rest, in float64."""

    demonstrated: Tensor  # [|D|] indices of D within pi's support
    log_pi: Tensor  # [|D|]
    counts: Tensor  # [|D|]
    log_m0: float  # log pi(D)
    log_rest: float  # log (1 - pi(D))

    @classmethod
    def of(cls, log_pi: Tensor, counts: Tensor) -> "_Split | None":
        """None where there is nothing to move. ValueError for shapes that do not match."""
        if log_pi.shape != counts.shape or log_pi.dim() != 1:
            raise ValueError(
                f"expected log_pi and counts of one shape [V], got {list(log_pi.shape)} and {list(counts.shape)}"
            )
        demonstrated = (counts > 0).nonzero().squeeze(1)
        inside = log_pi[demonstrated]
        demonstrated = demonstrated[inside > -torch.inf]
        if len(demonstrated) == 0:
            return None
        inside = log_pi[demonstrated].double()
        log_m0 = float(inside.logsumexp(0))
        log_rest = float(log_pi.index_fill(0, demonstrated, -torch.inf).logsumexp(0))
        precision = math.log(torch.finfo(log_pi.dtype).eps)
        if log_rest < precision or log_m0 < math.log(torch.finfo(log_pi.dtype).tiny):
            return None
        return cls(demonstrated, inside, counts[demonstrated].double(), log_m0, log_rest)

    @property
    def logit(self) -> float:
        return self.log_m0 - self.log_rest

    def with_mass(self, log_p: Tensor, logit: float) -> Tensor:
        """pi with the mass of D moved to m, given as logit(m), and every ratio within D and outside D kept."""
        inside = (self.log_pi - self.log_m0 - _softplus(-logit)).to(log_p.dtype)
        log_p += -_softplus(logit) - self.log_rest
        return log_p.index_copy_(0, self.demonstrated, inside)


def _log_sum_root(logit0: float, beta: float) -> float:
    """x = logit(m) that solves x = logit(m0) + 1 / (beta m), where 1 / m = 1 + exp(-x)."""
    high = max(0.0, logit0) + 2 / beta  # there 1 / m <= 2, so the left side is the larger
    return _bisect(lambda x: x - logit0 >= (1 + math.exp(min(-x, 700.0))) / beta, logit0, high)


def _bisect(above, low: float, high: float) -> float:
    """The point where `above` turns from False to True, to the last bit or 200 halvings."""
    for _ in range(200):
        middle = low + (high - low) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if above(middle) else (middle, high)
    return high


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _reading(reward: str) -> str:
    if reward not in ("sum-log", "log-sum"):
        raise ValueError(f"expected the reward 'sum-log' or 'log-sum', got {reward!r}")
    return reward
