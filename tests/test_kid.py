"""KID's step: closed forms against Adam, against random rivals and against each other; beta's two rules."""

import math

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from minikid.kid import BETA_RANGE, adam_policy, adapt_beta, exact_policy, kl_divergence, objective, solve_beta

READINGS = ["sum-log", "log-sum"]
BETAS = st.floats(0.05, 20.0)


@st.composite
def steps(draw, width=6):
    """(log pi, counts) over 2 to 12 tokens in float64; D is neither empty nor everything."""
    size = draw(st.integers(2, 12))
    logits = torch.tensor(draw(st.lists(st.floats(-width, width), min_size=size, max_size=size)), dtype=torch.float64)
    counts = draw(
        st.lists(st.integers(0, 4), min_size=size, max_size=size).filter(lambda n: 0 < sum(map(bool, n)) < len(n))
    )
    return logits.log_softmax(0), torch.tensor(counts, dtype=torch.float64)


@pytest.mark.parametrize("reward", READINGS)
@given(step=steps(width=3), beta=st.floats(1.0, 5.0))  # below, optima near the border take Adam longer than a test has
@settings(deadline=None, max_examples=5, phases=[Phase.explicit, Phase.generate])  # each example takes a second
def test_adam_with_many_steps_reaches_the_exact_policy(reward, step, beta):
    log_pi, counts = step
    exact = exact_policy(log_pi, counts, beta, reward)
    coarse = adam_policy(log_pi, counts, beta, reward, steps=400, lr=0.1)
    fine = adam_policy(log_pi, counts, beta, reward, steps=2500, lr=0.03)
    assert (fine.exp() - exact.exp()).abs().max() < 1e-6
    assert (coarse.exp() - exact.exp()).abs().max() < 1e-2


@pytest.mark.parametrize("reward", READINGS)
@given(step=steps(), beta=BETAS, number=st.integers(1, 8), lr=st.floats(1e-3, 0.5))
@settings(deadline=None, max_examples=30)
def test_the_steps_are_adams(reward, step, beta, number, lr):
    """The best of torch.optim's iterates."""
    log_pi, counts = step
    theta = log_pi.clone().requires_grad_(True)
    optimiser = torch.optim.Adam([theta], lr=lr, maximize=True)
    iterates = []
    for _ in range(number + 1):
        log_p = theta.log_softmax(0)
        J = objective(log_p, log_pi, counts, beta, reward)
        iterates.append((J.item(), log_p.detach()))
        optimiser.zero_grad()
        J.backward()
        optimiser.step()
    got = adam_policy(log_pi, counts, beta, reward, number, lr)
    best = max(J for J, _ in iterates)
    assert objective(got, log_pi, counts, beta, reward).item() == pytest.approx(best, abs=1e-9)
    assert min(float((got - log_p).abs().max()) for J, log_p in iterates if best - J < 1e-9) < 1e-9


@pytest.mark.parametrize("reward", READINGS)
@given(step=steps(), beta=BETAS, seed=st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_the_exact_policy_is_a_distribution_that_nothing_beats(reward, step, beta, seed):
    log_pi, counts = step
    log_p = exact_policy(log_pi, counts, beta, reward)
    assert abs(float(log_p.exp().sum()) - 1) < 1e-9
    best = objective(log_p, log_pi, counts, beta, reward)
    assert best >= objective(log_pi, log_pi, counts, beta, reward) - 1e-9
    noise = torch.randn(20, len(log_p), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for scale in (1e-3, 0.1, 2.0):
        for rival in (log_p + scale * noise).log_softmax(-1):
            assert best >= objective(rival, log_pi, counts, beta, reward) - 1e-9


@given(step=steps(), beta=BETAS)
def test_sum_log_is_the_mixture_of_pi_and_the_counts(step, beta):
    log_pi, counts = step
    expected = (beta * log_pi.exp() + counts) / (beta + counts.sum())
    assert (exact_policy(log_pi, counts, beta, "sum-log").exp() - expected).abs().max() < 1e-9


@given(step=steps(), beta=BETAS)
def test_log_sum_keeps_ratios_and_solves_its_equation(step, beta):
    log_pi, counts = step
    log_p = exact_policy(log_pi, counts, beta, "log-sum")
    inside = counts > 0
    for part in (inside, ~inside):
        shift = (log_p - log_pi)[part]
        assert (shift - shift[0]).abs().max() < 1e-9
    m0, m = float(log_pi.exp()[inside].sum()), float(log_p.exp()[inside].sum())
    assert m0 < m
    gap = float(log_p[inside].logsumexp(0) - log_p[~inside].logsumexp(0)) - (math.log(m0) - math.log1p(-m0))
    assert gap == pytest.approx(1 / (beta * m), rel=1e-6)


@pytest.mark.parametrize("reward", READINGS)
@given(step=steps(), first=BETAS, second=BETAS)
def test_the_divergence_falls_as_beta_grows(reward, step, first, second):
    low, high = sorted((first, second))
    kl = [kl_divergence(step[0], exact_policy(*step, beta, reward)) for beta in (low, high)]
    assert kl[0] >= kl[1] - 1e-9
    assert kl[1] >= -1e-12


@pytest.mark.parametrize("reward", READINGS)
@given(step=steps(), sigma=st.floats(1e-3, 2.0))
@settings(deadline=None)
def test_solve_hits_sigma(reward, step, sigma):
    beta = solve_beta(*step, sigma, reward)
    kl = kl_divergence(step[0], exact_policy(*step, beta, reward))
    if beta > 1e-300:
        assert kl == pytest.approx(sigma, abs=1e-6)
    else:  # D has nearly all of pi's mass: no float is small enough, the limit is taken
        assert kl < sigma


def test_solve_takes_the_limit_where_sigma_is_out_of_reach():
    """D covers all but a grain of pi, and pi over D is already the counts' distribution: no beta gives one nat."""
    pi = torch.tensor([0.5, 0.5 - 1e-6, 1e-6], dtype=torch.float64)
    counts = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    beta = solve_beta(pi.log(), counts, 1.0, "sum-log")
    assert 0 < beta < 1e-300
    assert kl_divergence(pi.log(), exact_policy(pi.log(), counts, beta, "sum-log")) < 1.0
    with pytest.raises(ValueError, match="sigma > 0"):
        solve_beta(pi.log(), counts, 0.0, "sum-log")


def test_the_literal_equation_has_no_gradient():
    """KID Eq. 3 as printed: r = sum n log pi does not depend on p, and E_{a~pi}[p(a) / pi(a)] = 1."""
    log_pi = torch.tensor([0.2, -1.0, 0.7, 0.1], dtype=torch.float64).log_softmax(0)
    r = (torch.tensor([0.0, 2.0, 1.0, 0.0]) * log_pi).sum()
    theta = log_pi.clone().requires_grad_(True)
    p = theta.softmax(0)
    gain = (log_pi.exp() * (p / log_pi.exp()) * r).sum()
    (gradient,) = torch.autograd.grad(gain, theta)
    assert gain.item() == pytest.approx(r.item())
    assert gradient.abs().max() < 1e-15


@pytest.mark.parametrize("reward", READINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_to_move(reward, dtype):
    log_pi = torch.tensor([0.3, 0.7, 0.0], dtype=dtype).log()
    for counts in torch.tensor([[0, 0, 0], [0, 0, 5], [1, 2, 0], [1, 1, 1]], dtype=dtype):
        for policy in (exact_policy, adam_policy):
            assert torch.equal(policy(log_pi, counts, 0.5, reward), log_pi)
        assert solve_beta(log_pi, counts, 0.02, reward) == 1.0


@pytest.mark.parametrize("reward", READINGS)
@pytest.mark.parametrize("policy", [exact_policy, adam_policy])
@given(data=st.data(), beta=st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=60)
def test_excluded_tokens_stay_out_and_nothing_is_nan(policy, reward, data, beta):
    """Extreme logits, -inf among them, in float32."""
    size = data.draw(st.integers(2, 9))
    value = st.one_of(st.floats(-200, 200, width=32), st.just(-math.inf))
    logits = torch.tensor(data.draw(st.lists(value, min_size=size, max_size=size).filter(lambda x: max(x) > -math.inf)))
    counts = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)), dtype=torch.float32)
    log_pi = logits.log_softmax(0)
    log_p = policy(log_pi, counts, beta, reward)
    assert not log_p.isnan().any()
    assert torch.equal(log_p == -math.inf, log_pi == -math.inf) or policy is adam_policy
    assert (log_p[log_pi == -math.inf] == -math.inf).all()
    assert float(log_p.exp().sum()) == pytest.approx(1, abs=1e-4)


@given(st.lists(st.floats(0, 10), max_size=60), st.floats(1e-4, 1.0))
def test_beta_stays_in_its_range(kls, sigma):
    beta = 1.0
    for kl in kls:
        beta = adapt_beta(beta, kl, sigma)
        assert BETA_RANGE[0] <= beta <= BETA_RANGE[1]


def test_beta_doubles_halves_and_holds_at_the_thresholds():
    sigma = 0.02
    assert adapt_beta(1.0, 2 * sigma, sigma) == 2.0
    assert adapt_beta(1.0, sigma / 2, sigma) == 0.5
    for kl in (math.nextafter(2 * sigma, 0), sigma, math.nextafter(sigma / 2, 1)):
        assert adapt_beta(1.0, kl, sigma) == 1.0
    assert adapt_beta(BETA_RANGE[1], 9.0, sigma) == BETA_RANGE[1]
    assert adapt_beta(BETA_RANGE[0], 0.0, sigma) == BETA_RANGE[0]


@pytest.mark.parametrize("policy", [exact_policy, adam_policy])
def test_bad_arguments(policy):
    with pytest.raises(ValueError, match=r"one shape \[V\], got \[3\] and \[4\]"):
        policy(torch.zeros(3), torch.ones(4), 1.0, "sum-log")
    with pytest.raises(ValueError, match="'sum-log' or 'log-sum', got 'sum'"):
        policy(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]), 1.0, "sum")
