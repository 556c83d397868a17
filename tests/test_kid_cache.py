"""Steps on the key-value cache: J rises, the cache grows by one, nothing else is touched."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer, tiny_model

from minikid.decode import KID, Sampler, Update, Vanilla, generate, generate_on_cache, greedy
from minikid.kid import objective
from minikid.kid_cache import cache_step
from minikid.knowledge import KnowledgeTrie

TOKENIZER = byte_tokenizer()
SIZE = TOKENIZER.vocab_size
PROMPT = TOKENIZER.encode("The capital of Mongolia is")
KNOWLEDGE = KnowledgeTrie.from_triples([("Mongolia", "capital", "Ulaanbaatar"), ("capital", "is", "city")])


def kid(rule="fixed", beta=0.01, reward="log-sum", knowledge=KNOWLEDGE):
    return KID(knowledge, TOKENIZER, Update(reward, rule=rule, beta=beta), demonstrations="bag", hops=1)


def read(tokens, model=None):
    model = tiny_model(SIZE) if model is None else model
    cache = model.new_cache()
    with torch.no_grad():
        model.hidden(torch.tensor([tokens]), cache)
    return cache


def shapes_of(run):
    """What `run` forwards and the length of the cache behind each pass."""
    model, shapes, lengths = tiny_model(SIZE), [], []
    handles = [
        model.embed.register_forward_hook(lambda _, args, out: shapes.append(tuple(args[0].shape))),
        model.register_forward_hook(lambda _, args, out: lengths.append(args[1].length)),
    ]
    result = run(model)
    for handle in handles:
        handle.remove()
    return result, shapes, lengths


@pytest.mark.parametrize("reward", ["log-sum", "sum-log"])
@given(
    prompt=st.lists(st.integers(3, SIZE - 1), min_size=2, max_size=12),
    demonstrated=st.sets(st.integers(0, SIZE - 1), min_size=1, max_size=6),
    beta=st.floats(0.01, 1.0),
)
@settings(deadline=None, max_examples=20)
def test_j_rises(reward, prompt, demonstrated, beta):
    model, counts = tiny_model(SIZE), torch.zeros(SIZE, dtype=torch.float64)
    counts[list(demonstrated)] = 1
    with torch.no_grad():
        log_pi, log_p, _ = cache_step(
            model, read(prompt[:-1]), prompt[-1], counts, beta=beta, reward=reward, step_size=1e-4
        )
    assert abs(float(log_p.exp().sum()) - 1) < 1e-9
    before = objective(log_pi, log_pi, counts, beta, reward)
    assert objective(log_p, log_pi, counts, beta, reward) > before


def test_the_step_equals_one_with_numerical_gradients():
    """A GPT-2, since Llama's norm is taken in float32; each entry of each layer's keys and values moved by itself."""
    model, tokens = tiny_model(SIZE, "gpt2"), PROMPT[:4]
    counts = torch.zeros(SIZE, dtype=torch.float64)
    counts[[5, 77]] = 1.0
    base = read(tokens[:-1], model)
    past = [torch.stack([k, v])[..., :3, :].clone() for k, v in zip(base.keys, base.values, strict=True)]

    @torch.no_grad()
    def forward(past):
        cache = model.new_cache()
        cache.keys, cache.values = [x[0].clone() for x in past], [x[1].clone() for x in past]
        cache.length = 3
        return model(torch.tensor([tokens[-1:]]), cache)[0, -1].log_softmax(-1)

    log_pi, eps = forward(past), 1e-5
    norms = [0.0] * len(past)
    for _ in range(2):
        gradients = []
        for i, layer in enumerate(past):
            gradient = torch.zeros(layer.numel(), dtype=torch.float64)
            for j in range(layer.numel()):
                ends = []
                for sign in (1, -1):
                    moved = [x.clone() for x in past]
                    moved[i].view(-1)[j] += sign * eps
                    ends.append(objective(forward(moved), log_pi, counts, 0.01, "log-sum"))
                gradient[j] = (ends[0] - ends[1]) / (2 * eps)
            norms[i] = max(norms[i], float(gradient.norm()))
            gradients.append(gradient.view_as(layer))
        past = [x + 0.01 * g / n**1.5 for x, g, n in zip(past, gradients, norms, strict=True)]
    got_pi, got, cache = cache_step(model, base, tokens[-1], counts, steps=2)
    assert (got_pi - log_pi).abs().max() < 1e-9
    assert (got - forward(past)).abs().max() < 1e-7
    assert (got - log_pi).abs().max() > 1e-2
    for layer in range(len(past)):
        kept = torch.stack([cache.keys[layer], cache.values[layer]])[..., :3, :]
        assert (kept - past[layer]).abs().max() < 1e-7


@pytest.mark.parametrize("still", [{"steps": 0}, {"step_size": 0.0}])
def test_without_steps_it_is_plain_sampling(still):
    model, sampler = tiny_model(SIZE), Sampler(top_k=20, top_p=0.92)
    for seed in range(3):
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        plain = generate(model, PROMPT, Vanilla(), sampler, max_new_tokens=8, generator=generators[0])
        moved = generate_on_cache(model, PROMPT, kid(), sampler, max_new_tokens=8, generator=generators[1], **still)
        assert moved.tokens == plain.tokens
        assert moved.log_probs == pytest.approx(plain.log_probs, abs=1e-9)
        assert moved.stop == plain.stop


def test_without_knowledge_it_is_plain_and_as_cheap():
    nothing = kid(knowledge=KnowledgeTrie())
    plain, expected, _ = shapes_of(lambda model: generate(model, PROMPT, Vanilla(), greedy, max_new_tokens=6))
    moved, shapes, _ = shapes_of(lambda model: generate_on_cache(model, PROMPT, nothing, greedy, max_new_tokens=6))
    assert (moved.tokens, moved.log_probs) == (plain.tokens, pytest.approx(plain.log_probs, abs=1e-9))
    assert shapes == [(1, len(PROMPT) - 1), *[(1, 1)] * len(shapes[1:])]
    assert sum(b * t for b, t in shapes) == sum(b * t for b, t in expected) == moved.forwarded


def test_the_cache_grows_by_one_per_token():
    """After a prompt of 6 it holds 6, 7, 8, 9: the last token goes in once, in each of the K + 2 passes of its step."""
    prompt = PROMPT[:6]
    policy = KID(KNOWLEDGE, TOKENIZER, Update(rule="fixed", beta=0.01), demonstrations="bag", question="Mongolia")
    row, shapes, lengths = shapes_of(
        lambda model: generate_on_cache(model, prompt, policy, greedy, max_new_tokens=4, eos_ids=(), steps=3)
    )
    assert shapes == [(1, 5), *[(1, 1)] * 20]
    assert lengths == [length for length in (6, 7, 8, 9) for _ in range(5)]
    assert row.forwarded == 25
    assert len(row.tokens) == 4


def test_the_shift_stays_in_the_cache_and_the_last_token_is_not_shifted():
    model, before = tiny_model(SIZE), read(PROMPT[:-1])
    counts = torch.zeros(SIZE)
    counts[[9, 60]] = 1
    length = before.length
    kept = [buffer[:, :, :length].clone() for buffer in (*before.keys, *before.values)]
    log_pi, log_p, after = cache_step(model, before, PROMPT[-1], counts)
    assert after.length == length + 1
    assert all(torch.equal(a, b[:, :, :length]) for a, b in zip(kept, (*before.keys, *before.values), strict=True))
    assert all((a - b[:, :, :length]).abs().max() > 0 for a, b in zip(kept, (*after.keys, *after.values), strict=True))
    again = read(PROMPT)  # the first layer's own key and value do not depend on what stands before
    assert torch.equal(after.keys[0][:, :, length], again.keys[0][:, :, length])
    after.truncate(length)
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([PROMPT[-1:]]), after)[0, -1].log_softmax(-1), log_p)
    assert (log_p - log_pi).abs().max() > 1e-3


def test_nothing_to_move_leaves_the_cache():
    model = tiny_model(SIZE)
    for counts in (torch.zeros(SIZE), torch.ones(SIZE)):  # D is empty, D is everything
        cache = read(PROMPT[:-1])
        log_pi, log_p, after = cache_step(model, cache, PROMPT[-1], counts)
        assert log_p is log_pi
        assert after is cache
        assert after.length == len(PROMPT)


@pytest.mark.parametrize("trainable", [False, True])
def test_no_gradient_is_left(trainable):
    model = tiny_model(SIZE)
    try:
        model.requires_grad_(trainable)
        counts = torch.zeros(SIZE)
        counts[[9, 60]] = 1
        with torch.no_grad():
            log_pi, log_p, cache = cache_step(model, read(PROMPT[:-1]), PROMPT[-1], counts)
        for tensor in (log_pi, log_p, *cache.keys, *cache.values):
            assert not tensor.requires_grad
            assert tensor.grad is None
        row = generate_on_cache(model, PROMPT, kid(), greedy, max_new_tokens=2)
        assert len(row.tokens) == 2
        assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        model.requires_grad_(False)


def test_the_same_seed_gives_the_same_tokens():
    model, sampler = tiny_model(SIZE), Sampler(top_k=20, top_p=0.92)
    runs = [
        generate_on_cache(
            model, PROMPT, kid(), sampler, max_new_tokens=8, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (3, 3, 4)
    ]
    assert runs[0] == runs[1]
    assert runs[0].tokens != runs[2].tokens


def test_mix_is_a_geometric_mean_and_beta_follows_its_rule():
    model, policy = tiny_model(SIZE), kid("adapt", beta=0.5)
    state = policy.start(PROMPT)
    state, counts = policy.demonstrate([], state, torch.zeros(SIZE, dtype=torch.float64))
    log_pi, log_p, _ = cache_step(model, read(PROMPT[:-1]), PROMPT[-1], counts, beta=0.5)
    for mix in (0.0, 0.6, 1.0):
        row = generate_on_cache(model, PROMPT, policy, greedy, max_new_tokens=1, eos_ids=(), mix=mix)
        expected = (mix * log_p + (1 - mix) * log_pi).log_softmax(0)
        assert row.tokens == [int(expected.argmax())]
        assert row.log_probs == [pytest.approx(float(expected.max()), abs=1e-9)]
        assert row.states[0].demonstrations == set(counts.nonzero().flatten().tolist())
        assert row.states[0].kl == pytest.approx(float((log_pi.exp() * (log_pi - expected)).sum()), abs=1e-9)
        assert row.states[0].beta == {True: 1.0, False: 0.25}[row.states[0].kl >= 0.04]
    fixed = generate_on_cache(model, PROMPT, kid("fixed", beta=0.5), greedy, max_new_tokens=2, eos_ids=())
    assert [state.beta for state in fixed.states] == [0.5, 0.5]


def test_stops_errors_and_callbacks():
    model, heard = tiny_model(SIZE), []
    free = generate_on_cache(
        model,
        PROMPT,
        kid(),
        greedy,
        max_new_tokens=5,
        eos_ids=(),
        on_token=lambda *args: heard.append(args),
    )
    assert heard == [(0, token, state) for token, state in zip(free.tokens, free.states, strict=True)]
    stopped = generate_on_cache(model, PROMPT, kid(), greedy, max_new_tokens=5, eos_ids=[free.tokens[3]])
    assert (stopped.tokens, stopped.stop) == (free.tokens[: free.tokens.index(free.tokens[3])], "eos")
    assert generate_on_cache(model, PROMPT, kid(), greedy, max_new_tokens=0).forwarded == 0
    assert len(generate_on_cache(model, PROMPT[:1], kid(), greedy, max_new_tokens=3, eos_ids=()).tokens) == 3
    with pytest.raises(ValueError, match="use the rule 'fixed' or 'adapt'"):
        generate_on_cache(model, PROMPT, kid("solve"), greedy)
    with pytest.raises(ValueError, match="the prompt is empty"):
        generate_on_cache(model, [], kid(), greedy)
    with pytest.raises(ValueError, match="but 60 were asked for"):
        generate_on_cache(model, PROMPT, kid(), greedy, max_new_tokens=60)
