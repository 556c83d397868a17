"""Beam search against a literal one, full enumeration, greedy decoding and transformers."""

import functools
import itertools
import math
import random

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from minikid.config import Config
from minikid.decode import KID, Update, Vanilla, beam_search, beam_search_batch, generate, greedy
from minikid.knowledge import KnowledgeTrie
from minikid.model import GPT, Cache, load_weights
from minikid.tokenizer import Tokenizer

PENALTIES = (-2.0, -0.5, 0.0, 0.3, 1.0, 2.5)


@functools.cache
def tiny(vocab: int = 5, eos: tuple[int, ...] = (), scale: float = 1.0, positions: int = 64) -> GPT:
    """A random Llama in float64; `scale` sharpens its distributions."""
    shape = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings = {"model_type": "llama", "vocab_size": vocab, "max_position_embeddings": positions, **shape}
    torch.manual_seed(vocab)
    model = GPT(Config.from_dict({**settings, "eos_token_id": list(eos), "tie_word_embeddings": False})).double()
    model.head.weight.data.mul_(scale)
    return model.eval().requires_grad_(False)


class Counted:
    """A model that notes the shape of every batch of tokens it reads."""

    def __init__(self, model: GPT):
        self.model, self.shapes = model, []
        self.config, self.device, self.new_cache, self.head = model.config, model.device, model.new_cache, model.head

    def hidden(self, tokens, cache=None):
        self.shapes.append(tuple(tokens.shape))
        return self.model.hidden(tokens, cache)

    def __call__(self, tokens, cache=None):
        return self.head(self.hidden(tokens, cache))


class Table:
    """A policy that takes no notice of the model: a distribution per text so far, drawn from a seed.

    `weights` are what is drawn from: 0 rules a token out, few values give ties. The state is the text of the last call.
    """

    def __init__(self, seed: int, vocab: int, weights: tuple[float, ...] = (), prompt: tuple[int, ...] = ()):
        self.seed, self.vocab, self.weights, self.prompt = seed, vocab, weights, prompt

    def row(self, tokens) -> list[float]:
        drawn = random.Random(f"{self.seed} {self.prompt} {list(tokens)}")
        row = [drawn.choice(self.weights) if self.weights else drawn.expovariate(1) ** 2 for _ in range(self.vocab)]
        return [math.log(w / sum(row)) if w > 0 else -math.inf for w in row]

    def start(self, prompt):
        return ("start", *prompt)

    def __call__(self, log_pi, tokens, state):
        assert state == (tuple(tokens[:-1]) if tokens else ("start", *self.prompt))
        assert log_pi.shape == (self.vocab,)
        assert log_pi.exp().sum().item() == pytest.approx(1)
        return torch.tensor(self.row(tokens), dtype=torch.float64), tuple(tokens)


def literal_search(row_of, beams, eos, steps, penalty):
    """Beam search word for word: every step is taken and nothing is dropped early.

    Returns (tokens with eos, score, log-probability) best first, and how many rows a search has to forward that stops
    following a hypothesis once no length could bring it above the worst of `beams` finished ones.
    """
    running, finished, needed = [((), 0.0)], [], 0
    for n in range(1, steps + 1):
        candidates = []
        for rank, (tokens, total) in enumerate(running):
            for token, log_p in enumerate(row_of(tokens)):
                if log_p != -math.inf:
                    candidates.append((-(total + log_p), rank, token, tokens))
        candidates.sort(key=lambda c: c[:3])
        ended = [token in eos or n == steps for _, _, token, _ in candidates]
        for (minus, _, token, tokens), end in list(zip(candidates, ended, strict=True))[:beams]:
            if end:
                finished.append(((*tokens, token), -minus / n**penalty, -minus))
        finished.sort(key=lambda f: -f[1])
        del finished[beams:]
        running = [
            ((*tokens, token), -minus) for (minus, _, token, tokens), e in zip(candidates, ended, strict=True) if not e
        ]
        running = running[:beams]
        if beams == 1 and finished:
            break
        useful = [
            total
            for _, total in running
            if len(finished) < beams or max(total / m**penalty for m in range(n + 1, steps + 1)) > finished[-1][1]
        ]
        needed += len(useful)
    return finished, needed


def every_sequence(row_of, eos, steps, penalty, tokens=(), total=0.0):
    """All finished sequences of probability above 0: (tokens with eos, score)."""
    if tokens and (tokens[-1] in eos or len(tokens) == steps):
        yield tokens, total / len(tokens) ** penalty
        return
    for token, log_p in enumerate(row_of(tokens)):
        if log_p != -math.inf:
            yield from every_sequence(row_of, eos, steps, penalty, (*tokens, token), total + log_p)


def model_rows(model, prompt):
    """Distributions of a model without a cache, for the literal searches."""
    return functools.cache(lambda tokens: model(torch.tensor([[*prompt, *tokens]]))[0, -1].log_softmax(-1).tolist())


def check(generations, expected, eos, exact=True):
    """Generations against (tokens with eos, score, ...) in the same order."""
    assert len(generations) == len(expected)
    for found, (tokens, score, *_) in zip(generations, expected, strict=True):
        assert found.stop == ("eos" if tokens[-1] in eos else "length")
        assert found.tokens == list(tokens[:-1] if tokens[-1] in eos else tokens)
        assert len(found.states) == len(found.log_probs) == len(found.tokens)
        assert found.score == score if exact else found.score == pytest.approx(score, rel=1e-9)


@st.composite
def searches(draw, largest=6):
    vocab = draw(st.integers(1, 5))
    return {
        "table": Table(
            draw(st.integers(0, 10**6)), vocab, draw(st.sampled_from([(), (0, 1, 3), (1, 1, 2), (0, 0, 1)])), (0,)
        ),
        "beams": draw(st.integers(1, largest)),
        "eos": draw(st.lists(st.integers(0, vocab), max_size=3)),  # one of them may be no token at all
        "steps": draw(st.integers(1, 6)),
        "penalty": draw(st.sampled_from(PENALTIES)),
    }


@given(searches())
@settings(max_examples=200, deadline=None)
def test_equals_the_literal_search(case):
    """Sequences, order with ties, scores bit for bit, log-probabilities, states; and not one row read in vain."""
    table, eos, steps = case["table"], case["eos"], case["steps"]
    expected, needed = literal_search(table.row, case["beams"], eos, steps, case["penalty"])
    model = Counted(tiny(table.vocab))
    found = beam_search(
        model, [0], table, case["beams"], max_new_tokens=steps, length_penalty=case["penalty"], eos_ids=eos
    )
    check(found, expected, eos)
    assert model.shapes[0] == (1, 1)
    assert all(T == 1 and 0 < R <= case["beams"] for R, T in model.shapes[1:])
    assert sum(R for R, _ in model.shapes[1:]) == needed
    assert [g.forwarded for g in found] == [1 + needed, *[0] * len(found)][: len(found)]
    for g, (tokens, _, total) in zip(found, expected, strict=True):
        assert g.states == [tuple(tokens[:i]) for i in range(len(g.tokens))]
        assert g.log_probs == [table.row(tokens[:i])[tokens[i]] for i in range(len(g.tokens))]
        last = table.row(tokens[:-1])[tokens[-1]] if g.stop == "eos" else 0.0
        assert sum(g.log_probs) + last == total


@given(searches())
@settings(max_examples=60, deadline=None)
def test_enough_beams_are_exhaustive(case):
    table, eos, steps, penalty = case["table"], case["eos"], min(case["steps"], 4), case["penalty"]
    beams = table.vocab**steps
    found = beam_search(tiny(table.vocab), [0], table, beams, max_new_tokens=steps, length_penalty=penalty, eos_ids=eos)
    if beams == 1:  # one token, or one step: greedy all the same
        found_all = literal_search(table.row, 1, eos, steps, penalty)[0]
    else:
        found_all = list(every_sequence(table.row, eos, steps, penalty))
    whole = {tokens: score for tokens, score, *_ in found_all}
    ended = [(*g.tokens, *([None] if g.stop == "eos" else [])) for g in found]
    assert len(found) == len(whole)
    assert [g.score for g in found] == sorted(whole.values(), reverse=True)
    # which of several eos tokens ended it is not told: sequences are compared without
    anonymous = sorted(((*t[:-1], None) if t[-1] in eos else t for t in whole), key=str)
    assert sorted(ended, key=str) == anonymous


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("beams", [2, 3, 125])
def test_model_distributions(beams, penalty):
    """The cached, reordered batch against whole forward passes: a wrong row would change the distributions."""
    model, prompt, eos = tiny(scale=30), [3, 1, 4, 1], (2,)
    row_of = model_rows(model, prompt)
    expected = literal_search(row_of, beams, eos, 4, penalty)[0]
    found = beam_search(model, prompt, Vanilla(), beams, max_new_tokens=4, length_penalty=penalty, eos_ids=eos)
    check(found, expected, eos, exact=False)
    for g in found:
        rows = [row_of(tuple(g.tokens[:i]))[token] for i, token in enumerate(g.tokens)]
        assert g.log_probs == pytest.approx(rows, abs=1e-9)


@given(searches(), st.sampled_from(PENALTIES))
@settings(max_examples=60, deadline=None)
def test_one_beam_is_greedy(case, penalty):
    table, model = case["table"], tiny(case["table"].vocab)
    found = beam_search(model, [0], table, 1, max_new_tokens=case["steps"], length_penalty=penalty, eos_ids=case["eos"])
    expected = generate(model, [0], table, greedy, max_new_tokens=case["steps"], eos_ids=case["eos"])
    texts = [expected.tokens[:i] for i in range(min(len(expected.tokens) + 1, case["steps"]))]
    if any(max(table.row(text)) == -math.inf for text in texts):  # a dead end, where a beam gives up
        assert found == []
        return
    assert len(found) == 1
    assert (found[0].tokens, found[0].stop, found[0].forwarded) == (expected.tokens, expected.stop, expected.forwarded)
    assert (found[0].log_probs, found[0].states) == (expected.log_probs, expected.states)


THEIRS = {
    "gpt2": GPT2Config(
        vocab_size=41, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=None, bos_token_id=None
    ),
    "llama": LlamaConfig(
        vocab_size=41,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
    ),
}


@pytest.fixture(scope="module", params=sorted(THEIRS))
def pair(request, tmp_path_factory):
    """The same tiny random model in transformers and here, in float64, with distributions far from uniform."""
    config = THEIRS[request.param]
    torch.manual_seed(7)
    theirs = (GPT2LMHeadModel if config.model_type == "gpt2" else LlamaForCausalLM)(config).double().eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, load_weights(folder, dtype=torch.float64).eval().requires_grad_(False)


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("beams", [1, 2, 5])
def test_equals_transformers(pair, beams, penalty):
    """All returned hypotheses, their order and scores, for one and for several eos ids.

    The rules agree wherever there are at least `beams` hypotheses and no ties; scores there are float32.
    """
    theirs, ours = pair
    ended = 0
    for seed, eos in itertools.product(range(2), ([], [3], [*range(1, 30, 2)])):
        prompt = torch.randint(41, (1, 3 + seed), generator=torch.Generator().manual_seed(seed))
        output = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=beams,
            num_return_sequences=beams,
            do_sample=False,
            early_stopping="never" if beams > 1 else None,
            length_penalty=penalty,
            max_new_tokens=12,
            eos_token_id=eos or None,
            pad_token_id=40,
            return_dict_in_generate=True,
            output_scores=True,
        )
        found = beam_search(
            ours, prompt[0].tolist(), Vanilla(), beams, max_new_tokens=12, length_penalty=penalty, eos_ids=eos
        )
        assert len(found) == beams
        if beams > 1:
            assert [g.score for g in found] == pytest.approx(output.sequences_scores.tolist(), rel=1e-5)
        for g, sequence in zip(found, output.sequences[:, prompt.shape[1] :].tolist(), strict=True):
            n = len(g.tokens)
            assert sequence[:n] == g.tokens
            assert (g.stop == "eos") == (n < 12 and sequence[n] in eos)
            ended += g.stop == "eos"
    assert ended > 0


def ragged(count, vocab):
    drawn = random.Random(count)
    return [[drawn.randrange(vocab) for _ in range(n)] for n in (7, 1, 4, 12, 4)[:count]]


@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_batch_equals_each_alone(penalty):
    """Ragged prompts, two of them equal, searches that end at different steps."""
    model, vocab = Counted(tiny(vocab=23, eos=(2, 5, 7, 11), scale=40)), 23
    prompts = ragged(5, vocab)
    prompts.append(list(prompts[2]))
    options = {"max_new_tokens": 10, "length_penalty": penalty}
    alone = [beam_search(model, prompt, Vanilla(), 3, **options) for prompt in prompts]
    if penalty <= 0:
        assert len({g[0].forwarded - len(p) for g, p in zip(alone, prompts, strict=True)}) > 1
    model.shapes.clear()
    together = beam_search_batch(model, prompts, [Vanilla()] * len(prompts), 3, **options)
    for a, b in zip(alone, together, strict=True):
        assert [(g.tokens, g.stop) for g in a] == [(g.tokens, g.stop) for g in b]
        for x, y in zip(a, b, strict=True):
            assert x.log_probs == pytest.approx(y.log_probs, abs=1e-9)
            assert x.score == pytest.approx(y.score, rel=1e-9)
    read = sum(R * T for R, T in model.shapes)
    assert read == sum(g.forwarded for group in together for g in group)
    assert read == sum(group[0].forwarded for group in alone) - len(prompts[2])  # the equal prompts are read once


@given(st.lists(searches(largest=4), min_size=2, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_groups_never_mix(cases, data):
    """Each prompt's policy sees its own prompt, texts and states, and its result is that of its literal search."""
    first = cases[0]
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=len(cases), max_size=len(cases)))
    prompts = [(0,) * n for n in lengths]
    vocab = first["table"].vocab
    tables = [Table(c["table"].seed, vocab, c["table"].weights, p) for c, p in zip(cases, prompts, strict=True)]
    beams, eos, steps, penalty = (first[k] for k in ("beams", "eos", "steps", "penalty"))
    model = Counted(tiny(vocab))
    options = {"max_new_tokens": steps, "length_penalty": penalty, "eos_ids": eos}
    found = beam_search_batch(model, prompts, tables, beams, **options)
    needed = 0
    for group, table in zip(found, tables, strict=True):
        expected, rows = literal_search(table.row, beams, eos, steps, penalty)
        check(group, expected, eos)
        needed += rows
    assert sum(R for R, T in model.shapes[len(set(prompts)) :]) == needed


class Fixed:
    """A policy without memory: the probabilities of the tokens by the length of the text."""

    def __init__(self, *rows):
        self.rows = rows

    def start(self, prompt):
        return None

    def __call__(self, log_pi, tokens, state):
        return torch.tensor(self.rows[len(tokens)], dtype=torch.float64).log(), None


def test_nothing_but_eos():
    found = beam_search(tiny(4), [0], Fixed([0, 0, 1, 0]), 5, eos_ids=[2], max_new_tokens=9)
    assert [(g.tokens, g.stop, g.score, g.forwarded) for g in found] == [([], "eos", 0.0, 1)]


def test_fewer_sequences_than_beams():
    found = beam_search(tiny(4), [0], Fixed([0.25, 0.75, 0, 0], [0, 0, 1, 0]), 5, eos_ids=[2], max_new_tokens=9)
    assert [(g.tokens, g.stop) for g in found] == [([1], "eos"), ([0], "eos")]
    assert [g.score for g in found] == pytest.approx([math.log(0.75) / 2, math.log(0.25) / 2])


def test_dead_ends_are_left_out():
    """A text that the policy lets neither go on nor end is no hypothesis; with no other there is none."""
    assert beam_search(tiny(3), [0], Fixed([0.5, 0.5, 0], [0, 0, 0]), 2, eos_ids=[2], max_new_tokens=4) == []
    model = tiny(3)
    groups = beam_search_batch(
        model, [[0], [1, 1]], [Fixed([0, 0, 0]), Fixed([0, 0, 1])], 2, eos_ids=[2], max_new_tokens=4
    )
    assert [[g.tokens for g in group] for group in groups] == [[], [[]]]


@pytest.mark.parametrize(
    ("penalty", "steps", "forwarded", "second"),
    [(-1.0, 4, 1, []), (0.0, 4, 1, []), (1.0, 3, 1, []), (1.0, 4, 4, [2, 2, 2, 2])],
)
def test_early_stop_by_sign_of_the_penalty(penalty, steps, forwarded, second):
    """Two end at once, of probability 0.5 and 0.45. The third, of 0.05 and certain from then on, can only beat log 0.45
    where length helps and there are four tokens to go: log 0.05 / 4 > log 0.45 > log 0.05 / 3.
    """
    policy = Fixed([0.5, 0.45, 0.05], *[[0, 0, 1.0]] * 3)
    options = {"eos_ids": [0, 1], "max_new_tokens": steps, "length_penalty": penalty}
    found = beam_search(tiny(3), [0], policy, 2, **options)
    assert [g.tokens for g in found] == [[], second]
    assert found[0].forwarded == forwarded


def test_ties_are_broken_by_the_order_of_parents_and_ids():
    """Uniform distributions: every candidate is equal to every other."""
    uniform = Fixed(*[[0.25] * 4] * 3)
    found = beam_search(tiny(4), [0], uniform, 3, eos_ids=[], max_new_tokens=3)
    assert [g.tokens for g in found] == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]


def test_no_new_tokens():
    found = beam_search_batch(tiny(), [[1], [2]], [Vanilla()] * 2, 3, max_new_tokens=0)
    assert [[(g.tokens, g.stop, g.score) for g in group] for group in found] == [[([], "length", 0.0)]] * 2
    assert beam_search_batch(tiny(), [], [], 3) == []


def test_eos_ids_of_the_model_are_the_default():
    options = {"max_new_tokens": 8, "length_penalty": 0.0}
    model = tiny(eos=(2, 4))
    assert beam_search(model, [1], Vanilla(), 3, **options) == beam_search(
        tiny(), [1], Vanilla(), 3, eos_ids=[4, 2], **options
    )
    assert all(g.stop == "length" for g in beam_search(model, [1], Vanilla(), 3, eos_ids=[], **options))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"max_new_tokens": 64}, "leaves room for 63 more of this model's 64 positions, but 64"),
        ({"beams": 0}, "at least one beam, got 0"),
        ({"length_penalty": math.nan}, "penalty from -10 to 10, got nan"),
        ({"length_penalty": 11.0}, "penalty from -10 to 10, got 11"),
        ({"policy": Fixed([math.nan, 1, 0, 0, 0])}, "the policy gave NaN"),
    ],
)
def test_errors_of_the_caller(changes, message):
    arguments = {"prompt_ids": [1], "policy": Vanilla(), "beams": 2, "max_new_tokens": 3, **changes}
    with pytest.raises(ValueError, match=message):
        beam_search(tiny(), **arguments)


@pytest.fixture(scope="module")
def letters():
    """A tokenizer whose tokens are the bytes of the text."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    library = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(library)


def test_kid_in_a_beam(letters):
    """Each beam carries its own memory: replaying a hypothesis alone gives its log-probabilities and states again."""
    knowledge = KnowledgeTrie.from_triples(
        [("fox", "eats", "hen"), ("fox", "lives in", "den"), ("hen", "eats", "corn"), ("den", "is", "dark")]
    )
    policy = KID(knowledge, letters, Update(sigma=3.0))
    model, prompt = tiny(vocab=256, positions=128), letters.encode("The fox")
    eos = letters.encode(".")
    found = beam_search(model, prompt, policy, 4, max_new_tokens=12, eos_ids=eos)
    assert found == beam_search(model, prompt, policy, 4, max_new_tokens=12, eos_ids=eos)
    assert len({tuple(g.tokens) for g in found}) == 4
    assert any(word in letters.decode(g.tokens) for g in found for word in ("hen", "den"))
    assert {state.memory.concepts for g in found for state in g.states} - {policy.start(prompt).memory.concepts}
    for g in found:
        state = policy.start(prompt)
        for i, token in enumerate(g.tokens):
            log_pi = model(torch.tensor([prompt + g.tokens[:i]]))[0, -1].log_softmax(-1)
            log_p, state = policy(log_pi, g.tokens[:i], state)
            assert g.log_probs[i] == pytest.approx(float(log_p[token]), abs=1e-6)
            assert g.states[i].memory == state.memory
            assert g.states[i].demonstrations == state.demonstrations


def test_reorder_is_select_of_rows_that_share_a_prompt():
    """Two prompts of two beams each, ragged: the logits behind both caches are the same."""
    model = tiny()
    caches = []
    for prompt in ([1, 2, 3, 4], [3, 0]):
        caches.append(model.new_cache())
        with torch.no_grad():
            model(torch.tensor([prompt]), caches[-1])
    cache = Cache.stack(caches).select([0, 0, 1, 1])
    since = cache.length
    with torch.no_grad():
        for tokens in ([0, 1, 2, 3], [3, 3, 4, 1]):
            model(torch.tensor(tokens)[:, None], cache)
        rows = [1, 1, 3, 2]
        selected, before = cache.select(rows), cache.select([0, 1, 2, 3])
        cache.reorder(rows, since)
        step = torch.tensor([2, 1, 0, 4])[:, None]
        expected = model(step, selected)
        assert torch.equal(model(step, cache), expected)
        assert not torch.allclose(model(step, before), expected)
