"""The loop and the samplers: what is forwarded, what stops, whose seed decides; the default model as transformers."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer, tiny_model
from transformers import AutoModelForCausalLM

from minikid.decode import KID, Generation, Sampler, Update, Vanilla, generate, generate_batch, greedy
from minikid.knowledge import KnowledgeTrie
from minikid.model import load

TOKENIZER = byte_tokenizer()
SIZE = TOKENIZER.vocab_size
PROMPTS = [TOKENIZER.encode(text) for text in ("The capital of", "A car", "The river Tuul lies in the", "日本")]


def seeded(seed):
    return torch.Generator().manual_seed(seed)


class Counted:
    """The tiny model with a note of every shape that its embedding reads and of the cache's length after each step."""

    def __init__(self):
        self.model, self.shapes, self.lengths = tiny_model(SIZE), [], []
        self.handles = [
            self.model.embed.register_forward_hook(lambda _, args, out: self.shapes.append(tuple(args[0].shape))),
            self.model.register_forward_hook(lambda _, args, out: self.lengths.append(args[1].length)),
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


class Recorded:
    """Plain decoding that keeps every distribution it sees."""

    def __init__(self):
        self.seen = []

    def start(self, prompt):
        return None

    def __call__(self, log_pi, tokens, state):
        self.seen.append(log_pi.clone())
        return log_pi, state


# --- the default model


def test_the_default_model_continues_ten_prompts_as_transformers_does(default_folder):
    """Greedy, token by token, plain and chat prompts in one ragged batch, two of them alone as well."""
    model, tokenizer = load(default_folder)
    plain = [
        "The capital of Mongolia is",
        "In 1990, the first",
        "def fibonacci(n):\n",
        "Once upon a time there was a",
        "Der Hund läuft",
        "1, 2, 3, 4,",
    ]
    chat = ["Does marijuana impair driving ability?", "What is the capital of Mongolia?", "Hi!", "日本の首都は? 🙂"]
    prompts = [tokenizer.prompt(text, chat=False) for text in plain]
    prompts += [tokenizer.prompt(text, chat=True) for text in chat]
    ours = generate_batch(model, prompts, [Vanilla()] * 10, greedy, max_new_tokens=16)
    theirs = AutoModelForCausalLM.from_pretrained(default_folder, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = theirs.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False, pad_token_id=0)
    eos = tokenizer.eos_ids[0]
    for row, expected in zip(ours, out[:, longest:].tolist(), strict=True):
        got = [*row.tokens, eos] if row.stop == "eos" else row.tokens
        assert got == expected[: len(got)]
        assert row.stop == "eos" or len(got) == 16
    for i in (0, 7):
        alone = generate(model, prompts[i], Vanilla(), greedy, max_new_tokens=16)
        assert alone.tokens == ours[i].tokens


# --- the loop


@pytest.mark.parametrize("optimiser", ["exact", "adam"])
def test_with_an_empty_trie_kid_is_plain_sampling_seed_for_seed(optimiser):
    model, sampler = tiny_model(SIZE), Sampler(top_k=40, top_p=0.95)
    kid = KID(KnowledgeTrie(), TOKENIZER, Update(optimiser=optimiser))
    for seed in range(5):
        plain = generate(model, PROMPTS[0], Vanilla(), sampler, max_new_tokens=12, generator=seeded(seed))
        infused = generate(model, PROMPTS[0], kid, sampler, max_new_tokens=12, generator=seeded(seed))
        assert infused.tokens == plain.tokens
        assert infused.log_probs == plain.log_probs
        assert (infused.stop, infused.forwarded) == (plain.stop, plain.forwarded)


def test_knowledge_changes_the_tokens():
    """The check above can fail: with a trie the same seeds go elsewhere."""
    knowledge = KnowledgeTrie.from_triples([("capital", "is", "Ulaanbaatar")])
    kid = KID(knowledge, TOKENIZER, Update(sigma=1.0), demonstrations="path")
    model, prompt = tiny_model(SIZE), TOKENIZER.encode("The capital is")
    plain = generate(model, prompt, Vanilla(), greedy, max_new_tokens=6)
    infused = generate(model, prompt, kid, greedy, max_new_tokens=6)
    assert infused.tokens != plain.tokens
    assert infused.tokens[: len(TOKENIZER.encode(" Ulaanbaatar"))] == TOKENIZER.encode(" Ulaanbaatar")
    assert all(state.kl == pytest.approx(1.0, abs=1e-3) for state in infused.states[:3])


def test_one_token_is_forwarded_per_step():
    """After a prompt of 6 the cache holds 7, 8, 9, ... tokens."""
    prompt = PROMPTS[0][:3] * 2
    with Counted() as counted:
        row = generate(counted.model, prompt, Vanilla(), greedy, max_new_tokens=6, eos_ids=())
    assert counted.shapes == [(1, 6), *[(1, 1)] * 5]  # the sixth token is not read any more
    assert counted.lengths == [7, 8, 9, 10, 11]
    assert row.forwarded == 11
    assert len(row.tokens) == len(row.states) == len(row.log_probs) == 6


def test_equal_prompts_are_read_once_and_each_row_forwards_one_token():
    with Counted() as counted:
        prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0], PROMPTS[0]]
        rows = generate_batch(counted.model, prompts, [Vanilla()] * 4, greedy, max_new_tokens=4, eos_ids=())
    lengths = len(PROMPTS[0]), len(PROMPTS[1])
    assert counted.shapes == [(1, lengths[0]), (1, lengths[1]), *[(4, 1)] * 3]
    assert [row.forwarded for row in rows] == [lengths[0] + 3, lengths[1] + 3, 3, 3]
    assert rows[0].tokens == rows[2].tokens == rows[3].tokens != rows[1].tokens


def test_finished_rows_leave_the_batch():
    model = tiny_model(SIZE)
    alone = [generate(model, prompt, Vanilla(), greedy, max_new_tokens=8, eos_ids=()).tokens for prompt in PROMPTS[:3]]
    eos = [alone[0][2], alone[1][5]]  # several ids, each may stop any row
    expected = []
    for tokens in alone:
        stops = [i for i, token in enumerate(tokens) if token in eos]
        expected.append(tokens[: stops[0]] if stops else tokens)
    assert len(set(map(len, expected))) == 3
    with Counted() as counted:
        rows = generate_batch(counted.model, PROMPTS[:3], [Vanilla()] * 3, greedy, max_new_tokens=8, eos_ids=eos)
    assert [row.tokens for row in rows] == expected
    assert [row.stop for row in rows] == ["eos", "eos", "length"]
    running = [sum(len(tokens) > step for tokens in expected) for step in range(7)]
    assert counted.shapes[3:] == [(rows, 1) for rows in running]
    single = generate(model, PROMPTS[1], Vanilla(), greedy, max_new_tokens=8, eos_ids=eos)
    assert (single.tokens, single.stop) == (expected[1], "eos")


def test_the_models_eos_stops_and_an_empty_list_never_does():
    """The config's id is the default; a row that begins with eos is empty."""
    model = tiny_model(SIZE)
    assert model.config.eos_ids == (2,)

    def always_eos(log_p, generator):
        return 2

    assert generate(model, PROMPTS[0], Vanilla(), always_eos, max_new_tokens=5) == Generation(
        stop="eos", forwarded=len(PROMPTS[0])
    )
    endless = generate(model, PROMPTS[0], Vanilla(), always_eos, max_new_tokens=5, eos_ids=())
    assert (endless.tokens, endless.stop) == ([2] * 5, "length")


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 10**6))
@settings(deadline=None, max_examples=25)
def test_a_row_alone_and_among_others_is_the_same(which, seed):
    """Ragged prompts, equal prompts, rows that stop early: every distribution to 1e-5, and every token."""
    model, sampler = tiny_model(SIZE), Sampler(top_p=0.95)
    prompts, eos = [PROMPTS[i] for i in which], range(30)
    together = [Recorded() for _ in which]
    rows = generate_batch(
        model,
        prompts,
        together,
        sampler,
        max_new_tokens=8,
        eos_ids=eos,
        generators=[seeded(seed + i) for i in range(len(which))],
    )
    for i, prompt in enumerate(prompts):
        recorded = Recorded()
        alone = generate(model, prompt, recorded, sampler, max_new_tokens=8, eos_ids=eos, generator=seeded(seed + i))
        assert (rows[i].tokens, rows[i].stop) == (alone.tokens, alone.stop)
        assert len(recorded.seen) == len(together[i].seen)
        for a, b in zip(recorded.seen, together[i].seen, strict=True):
            assert (a - b).abs().max() < 1e-5
        assert rows[i].log_probs == pytest.approx(alone.log_probs, abs=1e-5)


def test_the_same_seed_gives_the_same_tokens_and_another_seed_others():
    model, sampler = tiny_model(SIZE), Sampler(0.9, 50, 0.95)
    runs = [
        generate(model, PROMPTS[0], Vanilla(), sampler, max_new_tokens=20, eos_ids=(), generator=seeded(seed))
        for seed in (7, 7, 8)
    ]
    assert runs[0] == runs[1]
    assert runs[0].tokens != runs[2].tokens


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([[]], 4, "the prompt is empty"),
        ([[5, 6], []], 4, "the prompt is empty"),
        ([[5] * 60], 5, "60 tokens leaves room for 4 more of this model's 64 positions, but 5 were asked for"),
        ([[5], [5] * 70], 1, "70 tokens leaves room for 0 more"),
        ([[5]], -1, "max_new_tokens >= 0, got -1"),
    ],
)
def test_errors_come_before_any_token(prompts, new, message):
    with Counted() as counted:
        written = []
        with pytest.raises(ValueError, match=message):
            generate_batch(
                counted.model,
                prompts,
                [Vanilla()] * len(prompts),
                greedy,
                max_new_tokens=new,
                on_token=lambda *args: written.append(args),
            )
        assert counted.shapes == written == []


def test_to_the_last_position_and_nothing_at_all():
    model = tiny_model(SIZE)
    full = generate(model, [5] * 60, Vanilla(), greedy, max_new_tokens=4, eos_ids=())
    assert len(full.tokens) == 4
    assert generate(model, [5], Vanilla(), greedy, max_new_tokens=0) == Generation()
    assert generate_batch(model, [], [], greedy) == []


def test_on_token_hears_every_token_in_turn():
    heard = []
    kid = KID(KnowledgeTrie(), TOKENIZER)
    rows = generate_batch(
        tiny_model(SIZE),
        PROMPTS[:2],
        [kid, kid],
        greedy,
        max_new_tokens=3,
        eos_ids=(),
        on_token=lambda row, token, state: heard.append((row, token, state)),
    )
    assert heard == [(row, rows[row].tokens[i], rows[row].states[i]) for i in range(3) for row in range(2)]


def test_log_probs_are_those_of_the_policy_before_the_cuts():
    model, recorded = tiny_model(SIZE), Recorded()
    row = generate(model, PROMPTS[0], recorded, Sampler(0.5, 3), max_new_tokens=5, eos_ids=(), generator=seeded(1))
    expected = [float(log_pi[token]) for log_pi, token in zip(recorded.seen, row.tokens, strict=True)]
    assert row.log_probs == expected
    tokens = torch.tensor([PROMPTS[0] + row.tokens])
    whole = model(tokens)[0].log_softmax(-1)
    at = len(PROMPTS[0]) - 1
    again = [float(whole[at + i, token]) for i, token in enumerate(row.tokens)]
    assert row.log_probs == pytest.approx(again, abs=1e-5)


# --- samplers

LOGITS = st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12)


def literal_distribution(p, top_k, top_p):
    """Top-k, renormalise, top-p, renormalise, in plain Python on a list of probabilities: token -> probability."""
    order = sorted(range(len(p)), key=lambda token: -p[token])
    if 0 < top_k < len(p):
        order = order[:top_k]
    total = math.fsum(p[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        kept.append(token)
        mass += p[token] / total
        if mass >= top_p and top_p < 1:
            break
    total = math.fsum(p[token] for token in kept)
    return {token: p[token] / total for token in kept}


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12, unique=True),
    temperature=st.floats(0.2, 5.0),
    top_k=st.integers(0, 14),
    top_p=st.floats(0.01, 1.0),
)
@example(logits=[0.0, 1.0], temperature=1.0, top_k=5, top_p=1.0)
@example(logits=[0.0, 1.0, 3.0], temperature=1.0, top_k=2, top_p=0.01)
@settings(deadline=None, max_examples=300)
def test_the_distribution_equals_the_literal_one(logits, temperature, top_k, top_p):
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    p = [w / math.fsum(weights) for w in weights]
    assume(all(abs(a - b) > 1e-6 for i, a in enumerate(p) for b in p[:i]))  # equal ones may be cut either way
    expected = literal_distribution(p, top_k, top_p)
    assume(expected == literal_distribution(p, top_k, min(top_p + 1e-5, 1.0 if top_p == 1 else 1 - 1e-9)))
    assume(expected == literal_distribution(p, top_k, top_p - 1e-5 if top_p < 1 else top_p))
    log_p = torch.tensor(logits).log_softmax(0)
    got, tokens = Sampler(temperature, top_k, top_p).distribution(log_p)
    assert set(tokens.tolist()) == set(expected)
    for probability, token in zip(got.tolist(), tokens.tolist(), strict=True):
        assert probability == pytest.approx(expected[token], abs=1e-5)


@pytest.mark.parametrize(
    ("p", "top_p", "kept"),
    [
        ([0.25, 0.25, 0.25, 0.25], 0.25, 1),
        ([0.25, 0.25, 0.25, 0.25], 0.5, 2),
        ([0.25, 0.25, 0.25, 0.25], 0.500001, 3),
        ([0.25, 0.25, 0.25, 0.25], 0.75, 3),
        ([0.25, 0.25, 0.25, 0.25], 0.999999, 4),
        ([0.5, 0.25, 0.25], 0.5, 1),
        ([0.5, 0.25, 0.25], 0.75, 2),
        ([0.5, 0.25, 0.25], 1.0, 3),
        ([0.9, 0.1], 0.05, 1),
        ([0.9, 0.1], 1e-12, 1),
        ([1.0], 0.5, 1),
    ],
)
def test_top_p_keeps_the_smallest_sufficient_set(p, top_p, kept):
    """Exactly at the boundary the set is sufficient; one more would be too many, and none is never left."""
    got, tokens = Sampler(top_p=top_p).distribution(torch.tensor(p).log())
    assert len(got) == len(tokens) == kept
    assert sum(p[token] for token in tokens.tolist()) >= top_p - 1e-6
    assert float(got.sum()) == pytest.approx(1, abs=1e-6)


def test_top_p_counts_what_top_k_left():
    """Of 0.4, 0.3, 0.3 top-k 2 leaves 4/7 and 3/7, of which top-p 0.5 keeps the first; of all three it takes two."""
    log_p = torch.tensor([0.3, 0.4, 0.3]).log()
    assert Sampler(top_k=2, top_p=0.5).distribution(log_p)[1].tolist() == [1]
    assert len(Sampler(top_p=0.5).distribution(log_p)[1]) == 2


def test_temperature_acts_before_the_cuts():
    log_p = torch.tensor([0.6, 0.3, 0.1]).log()
    assert len(Sampler(1.0, top_p=0.85).distribution(log_p)[1]) == 2
    assert len(Sampler(0.5, top_p=0.75).distribution(log_p)[1]) == 1  # 0.36 : 0.09 : 0.01
    p, _ = Sampler(0.5).distribution(log_p)
    assert p.tolist() == pytest.approx([0.36 / 0.46, 0.09 / 0.46, 0.01 / 0.46], abs=1e-6)


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(), [0.2, 0.5, 0.3]),
        (Sampler(top_k=3), [0.2, 0.5, 0.3]),
        (Sampler(top_k=99), [0.2, 0.5, 0.3]),
        (Sampler(top_k=2), [0.0, 0.625, 0.375]),
        (Sampler(top_p=0.7), [0.0, 0.625, 0.375]),
        (Sampler(temperature=0.5), [4 / 38, 25 / 38, 9 / 38]),
        (Sampler(top_k=1), [0.0, 1.0, 0.0]),
        (Sampler(temperature=0), [0.0, 1.0, 0.0]),
    ],
)
def test_the_whole_distribution_by_frequency(sampler, expected):
    """Three tokens, 8,000 draws: each frequency within five standard deviations."""
    log_p, generator, n = torch.tensor([0.2, 0.5, 0.3]).log(), seeded(0), 8000
    counts = Counter(sampler(log_p, generator) for _ in range(n))
    for token, p in enumerate(expected):
        assert abs(counts[token] / n - p) <= 5 * math.sqrt(p * (1 - p) / n)


@given(LOGITS, st.integers(0, 13), st.floats(0.01, 1.0))
@settings(deadline=None)
def test_temperature_zero_is_greedy_and_greedy_takes_the_first_of_equals(logits, top_k, top_p):
    log_p = torch.tensor(logits).log_softmax(0)
    token = Sampler(0.0, top_k, top_p)(log_p, seeded(0))
    assert token == greedy(log_p) == log_p.tolist().index(max(log_p.tolist()))


@given(
    st.lists(st.one_of(st.floats(-(2.0**100), 2.0**100, width=32), st.just(-math.inf)), min_size=1, max_size=9),
    st.floats(1e-6, 1e6),
    st.integers(0, 10),
    st.floats(1e-9, 1.0),
)
@settings(deadline=None)
def test_extreme_logits_give_a_distribution_without_excluded_tokens(logits, temperature, top_k, top_p):
    assume(max(logits) > -math.inf)
    log_p = torch.tensor(logits).log_softmax(0)
    p, tokens = Sampler(temperature, top_k, top_p).distribution(log_p)
    assert float(p.sum()) == pytest.approx(1, abs=1e-5)
    assert all(q == 0 for q, token in zip(p.tolist(), tokens.tolist(), strict=True) if log_p[token] == -math.inf)
    assert log_p[Sampler(temperature, top_k, top_p)(log_p, seeded(1))] > -math.inf


def test_bad_samplers():
    for bad in ({"temperature": -0.1}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}, {"temperature": math.nan}):
        with pytest.raises(ValueError, match="expected temperature >= 0, top_k >= 0 and 0 < top_p <= 1"):
            Sampler(**bad)


@pytest.mark.parametrize("top_k", [0, 3])
def test_draws_are_as_frequent_as_their_probabilities(top_k):
    p, n = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]), 4000
    generator = torch.Generator().manual_seed(0)
    draws = torch.tensor([Sampler(top_k=top_k)(p.log(), generator) for _ in range(n)])
    assert (torch.bincount(draws, minlength=6) / n - p).abs().max() < 0.03
    assert p[draws].min() > 0
