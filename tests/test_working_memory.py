"""The working memory against the literal streams in every layer, against transformers with a mask of our making, and
against what must not depend on it.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from minikid.config import Config
from minikid.memory import WorkingMemory, aggregate_attention
from minikid.model import GPT, Cache, load_weights, rope_frequencies, rotate

V = 61
FAMILIES = ["llama", "gpt2"]
PREFIX, UNITS, CONTEXT = [3, 4, 5], [[7, 8, 9, 10], [20, 21], [30, 31, 32]], [40, 41, 42, 43, 44]


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def remember(model: GPT, units=UNITS, capacity: int | None = None, length: int = 4, **options) -> WorkingMemory:
    memory = WorkingMemory(model, len(units) if capacity is None else capacity, length, PREFIX, **options)
    for unit in units:
        memory.add(unit)
    return memory


def rows(*tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.shape == b.shape
    return bool((a - b).abs().max() < 1e-9)


@given(
    st.lists(st.integers(0, 6), max_size=5),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([1.0, 300.0]),
)
@settings(deadline=None, max_examples=60)
def test_the_streams_are_one_attention_with_a_bias(lengths, T, before, heads, context_stream, scale):
    """Ewe 3.4 expanded: log(k + 1), or log k, on the context's logits. At scale 300 a bare exp would overflow."""
    q, k, v = scale * numbers(heads, T, 8), numbers(heads, before + T, 8, seed=1), numbers(heads, before + T, 8, seed=2)
    units = [(numbers(heads, n, 8, seed=n + 3), numbers(heads, n, 8, seed=n + 9)) for n in lengths]
    slow = aggregate_attention(q, units, (k, v), context_stream)
    bias = torch.full((T, before + T), math.log(max(len(units) + context_stream, 1)), dtype=torch.float64)
    bias = F.pad(bias.masked_fill(torch.ones(bias.shape).triu(before + 1) > 0, -math.inf), (sum(lengths), 0))
    keys, values = torch.cat([*(u[0] for u in units), k], 1), torch.cat([*(u[1] for u in units), v], 1)
    assert slow.isfinite().all()
    assert close(slow, F.scaled_dot_product_attention(q, keys, values, attn_mask=bias))


def literal(model: GPT, prefix, units, start, context, context_stream=True, temperature=1.0) -> torch.Tensor:
    """Logits of a context that begins at position `start`, each layer as k + 1 streams over the units that plain
    reading gives.
    """
    # -> [T, V]
    c, P = model.config, len(prefix)
    caches = [model.new_cache() for _ in units]
    shared = model.new_cache()
    if prefix:
        model(rows(prefix), shared)
    for unit, cache in zip(units, caches, strict=True):
        model(rows([*prefix, *unit]), cache)
    position = torch.arange(len(context)) + start
    x = model.embed(torch.tensor(context))
    if c.rope is None:
        x = x + model.positions(position)
    else:
        angles = position[:, None].float() * rope_frequencies(c.rope, c.head_dim)
        turn = torch.cat([angles, angles], -1).cos().to(x), torch.cat([-angles, angles], -1).sin().to(x)
    for layer, block in enumerate(model.blocks):
        heads = block.attention.qkv(block.attention_norm(x)).view(len(context), -1, c.head_dim).transpose(0, 1)
        q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads])
        if c.rope is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)

        def each_head(keys, values):
            return tuple(t.repeat_interleave(c.num_heads // c.num_kv_heads, dim=0) for t in (keys, values))

        def slots(cache, first, layer=layer):
            return (b[layer][0, :, first : cache.length] for b in (cache.keys, cache.values))

        whole = each_head(*(torch.cat(pair, dim=1) for pair in zip(slots(shared, 0), (k, v), strict=True)))
        streams = [each_head(*slots(cache, P)) for cache in caches]
        streams = [(keys / temperature, values) for keys, values in streams]
        y = aggregate_attention(q, streams, whole, context_stream)
        x = x + block.attention.out(y.transpose(0, 1).flatten(1))
        x = x + block.mlp(block.mlp_norm(x))
    return model.head(model.norm(x))


def random_model(family: str, kv_heads: int, group: int) -> GPT:
    heads = kv_heads * group
    shape = {"num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 6}
    shape |= {"hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 64}
    if family == "gpt2":
        shape = {"n_embd": 6 * heads, "n_layer": 2, "n_head": heads, "n_positions": 64}
    torch.manual_seed(group)
    model = GPT(Config.from_dict({"model_type": family, "vocab_size": V} | shape)).double()
    for block in model.blocks:
        block.attention.qkv.weight.mul_(4.0)
    return model


tokens = st.lists(st.integers(0, V - 1), min_size=1, max_size=9)


@given(
    st.sampled_from(FAMILIES),
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(tokens, max_size=4),
    st.integers(0, 2),
    st.integers(1, 7),
    tokens | st.just([]),
    tokens,
    st.booleans(),
    st.sampled_from([1.0, 0.7]),
    st.integers(1, 9),
)
@settings(deadline=None, max_examples=60)
def test_logits_equal_the_literal_streams(
    family, kv_heads, group, passages, free, length, prefix, context, stream, temperature, cut
):
    """Any heads, groups, units, lengths and free places, in a fresh cache and in pieces; passages too long are cut."""
    model = random_model(family, kv_heads, group)
    capacity, units = len(passages) + free, [passage[:length] for passage in passages]
    memory = WorkingMemory(model, capacity, length, prefix, context_stream=stream, temperature=temperature)
    dropped = [memory.add(passage).dropped for passage in passages]
    assert dropped == [max(len(passage) - length, 0) for passage in passages]
    start = len(prefix) + (length if capacity else 0)
    expected = literal(model, prefix, units, start, context, stream, temperature)[None]
    assert close(model(rows(context), None, memory), expected)
    cache = model.new_cache()
    pieces = [model(piece, cache, memory) for piece in rows(context).split(cut, dim=1)]
    assert close(torch.cat(pieces, dim=1), expected)
    assert cache.length == memory.slots + len(context)


@pytest.fixture(scope="module", params=FAMILIES)
def both(request, tmp_path_factory):
    """A random model in transformers and here."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 24, "max_position_embeddings": 64}
    config = LlamaConfig(vocab_size=V, num_key_value_heads=2, intermediate_size=40, **shape)
    if request.param == "gpt2":
        config = GPT2Config(vocab_size=V, n_embd=24, n_layer=2, n_head=4, n_positions=64)
    torch.manual_seed(0)
    theirs = (GPT2LMHeadModel if request.param == "gpt2" else LlamaForCausalLM)(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs.double().eval(), load_weights(folder, dtype=torch.float64).eval()


@pytest.mark.parametrize(
    ("units", "options", "streams"),
    [
        (UNITS, {}, 4),
        (UNITS, {"context_stream": False}, 3),
        (UNITS, {"context_weight": 2.5}, 2.5),
        (UNITS[:1], {"context_stream": False}, 1),  # retrieval put into the prompt
        (UNITS[1:2], {"context_stream": False}, 1),  # the same with a gap in the positions
        ([], {}, 1),
    ],
)
def test_logits_equal_transformers(both, units, options, streams):
    """Prefix, units and context as one sequence, with positions and a mask that say who sees whom, and how much."""
    theirs, ours = both
    P, S = len(PREFIX), len(PREFIX) + sum(map(len, units)) + len(CONTEXT)
    mask, position, end = torch.full((S, S), -math.inf, dtype=torch.float64).triu(1), list(range(P)), P
    for unit in units:
        first, end = end, end + len(unit)
        position += range(P, P + len(unit))
        mask[end : S - len(CONTEXT), first:end] = -math.inf
        mask[S - len(CONTEXT) :, first:end] = -math.log(streams)
    start = P + (4 if units else 0)
    position += range(start, start + len(CONTEXT))
    sequence = rows([*PREFIX, *(token for unit in units for token in unit), *CONTEXT])
    expected = theirs(sequence, position_ids=rows(position), attention_mask=mask[None, None], use_cache=False).logits
    assert close(ours(rows(CONTEXT), None, remember(ours, units, **options)), expected[:, -len(CONTEXT) :])


@pytest.mark.parametrize("family", FAMILIES)
def test_one_unit_without_the_contexts_stream_is_the_prompt_with_the_passage(family):
    model = tiny_model(V, family)
    plain = model(rows([*PREFIX, *UNITS[0], *CONTEXT]))[:, -len(CONTEXT) :]
    assert close(model(rows(CONTEXT), None, remember(model, UNITS[:1], context_stream=False)), plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stream", [True, False])
def test_no_units_are_the_plain_model(family, stream):
    model = tiny_model(V, family)
    memory = WorkingMemory(model, 0, 4, PREFIX, context_stream=stream)
    assert memory.add(UNITS[0]) is None
    assert memory.units == []
    assert close(model(rows(CONTEXT), None, memory), model(rows([*PREFIX, *CONTEXT]))[:, len(PREFIX) :])
    assert close(model(rows(CONTEXT), None, WorkingMemory(model, 0, 4)), model(rows(CONTEXT)))


def test_places_without_a_unit_only_keep_their_positions():
    model = tiny_model(V, "gpt2")
    memory = WorkingMemory(model, 3, 4, PREFIX, context_stream=False)
    assert close(model(rows(CONTEXT), None, memory), model(rows(CONTEXT), None, remember(model, [], capacity=1)))
    assert not close(model(rows(CONTEXT), None, memory), model(rows([*PREFIX, *CONTEXT]))[:, len(PREFIX) :])


@given(st.permutations(range(3)))
@settings(deadline=None, max_examples=6)
def test_the_order_of_units_does_not_matter(order):
    model = tiny_model(V)
    shuffled = remember(model, [UNITS[i] for i in order])
    assert close(model(rows(CONTEXT), None, shuffled), model(rows(CONTEXT), None, remember(model)))


@given(st.lists(tokens, max_size=7), st.integers(1, 3))
@settings(deadline=None, max_examples=30)
def test_an_evicted_unit_leaves_no_trace(passages, capacity):
    model = tiny_model(V)
    memory = remember(model, passages, capacity)
    assert [unit.tokens for unit in memory.units] == [tuple(p[:4]) for p in passages[-capacity:]]
    fresh = remember(model, passages[-capacity:], capacity)
    assert close(model(rows(CONTEXT), None, memory), model(rows(CONTEXT), None, fresh))


def test_a_refresh_forwards_the_units_tokens_and_nothing_else():
    model, read = tiny_model(V), []
    hook = model.embed.register_forward_hook(lambda module, inputs, output: read.append(inputs[0].tolist()))
    try:
        memory = remember(model)
        cache = model.new_cache()
        model(rows(CONTEXT), cache, memory)
        memory.add([50, 51, 52, 53, 54, 55])
        model(rows([1]), cache, memory)
    finally:
        hook.remove()
    assert read == [[t] for t in (PREFIX, *UNITS, CONTEXT, [50, 51, 52, 53], [1])]
    assert memory.forwarded == sum(len(t) for t in (PREFIX, *UNITS)) + 4


def test_a_refresh_leaves_the_context_as_it_was_read():
    """The next token sees the new unit, and the keys and values that the old memory gave to the context."""
    model = tiny_model(V)
    memory = remember(model, UNITS[:2])
    cache = model.new_cache()
    model(rows(CONTEXT), cache, memory)
    before = cache.select([0])
    memory.add(UNITS[2])
    after = model(rows([1]), cache, memory)
    renewed = model.new_cache()
    model(rows(CONTEXT), renewed, remember(model, UNITS[1:]))
    M = memory.slots
    for name in ("keys", "values"):
        for now, then, new in zip(*(getattr(c, name) for c in (cache, before, renewed)), strict=True):
            assert torch.equal(now[:, :, M : M + len(CONTEXT)], then[:, :, M:])
            new[:, :, M : M + len(CONTEXT)] = then[:, :, M:]
    assert close(after, model(rows([1]), renewed, remember(model, UNITS[1:])))


@pytest.mark.parametrize("family", FAMILIES)
def test_cutting_the_cache_back_is_never_having_written(family):
    """Also when the memory changed in between; cut back to nothing, the cache begins anew."""
    model = tiny_model(V, family)
    memory = remember(model, UNITS[:2])
    cache, other = model.new_cache(), model.new_cache()
    for c in (cache, other):
        model(rows(CONTEXT), c, memory)
    length = cache.length
    model(rows([11, 12, 13]), cache, memory)
    cache.truncate(length)
    assert close(model(rows([1, 2]), cache, memory), model(rows([1, 2]), other, memory))
    memory.add(UNITS[2])
    model(rows([14]), cache, memory)
    for c in (cache, other):
        c.truncate(length)
    assert close(model(rows([1, 2]), cache, memory), model(rows([1, 2]), other, memory))
    cache.truncate(0)
    assert close(model(rows(CONTEXT), cache, memory), model(rows(CONTEXT), None, memory))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_that_share_a_memory_equal_single_rows(family):
    """Side by side, and ragged; before and after a refresh."""
    model = tiny_model(V, family)
    memory = remember(model, UNITS[:2])
    prompts = [CONTEXT, CONTEXT[:2], [50], CONTEXT[::-1]]
    caches = [model.new_cache() for _ in prompts]
    alone = [model(rows(prompt), cache, memory) for prompt, cache in zip(prompts, caches, strict=True)]
    batch, even = Cache.stack(caches), model.new_cache(2)
    together = model(rows(prompts[0], prompts[3]), even, memory)
    assert close(together, torch.cat([alone[0], alone[3]]))
    for passage in ([1, 2], [3, 4, 5]):
        step = rows(*([token] for token in range(10, 14)))
        alone = torch.cat([model(step[i : i + 1], cache, memory) for i, cache in enumerate(caches)])
        assert close(model(step, batch, memory), alone)
        assert close(model(step[[0, 3]], even, memory), alone[[0, 3]])
        memory.add(passage)
    batch, alone = batch.select([2, 0]), [caches[2], caches[0]]
    expected = torch.cat([model(rows(CONTEXT), cache, memory) for cache in alone])
    assert close(model(rows(CONTEXT, CONTEXT), batch, memory), expected)
    batch.truncate(0)
    assert close(model(rows(CONTEXT, CONTEXT), batch, memory)[1:], model(rows(CONTEXT), None, memory))


def test_one_cache_that_is_copied_goes_on_twice():
    model = tiny_model(V)
    memory = remember(model)
    cache = model.new_cache()
    model(rows(CONTEXT), cache, memory)
    copies = cache.expand(2)
    expected = torch.cat([model(rows([*CONTEXT, token]), None, memory)[:, -1:] for token in (1, 2)])
    assert close(model(rows([1], [2]), copies, memory), expected)


def test_gradients_reach_the_context():
    """The units are constants; what the context is read with is not."""
    model = tiny_model(V)
    memory = remember(model)
    with torch.enable_grad():
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        handle = model.embed.register_forward_hook(lambda module, inputs, output: output * scale)
        model(rows(CONTEXT), None, memory).logsumexp(-1).sum().backward()
        handle.remove()
    assert scale.grad.isfinite()
    assert scale.grad != 0


def test_float32_equals_float64():
    model = tiny_model(V)
    expected = model(rows(CONTEXT), None, remember(model))
    single = GPT(model.config)
    single.load_state_dict(model.state_dict())
    assert (single(rows(CONTEXT), None, remember(single)) - expected).abs().max() < 1e-3 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_weight_is_so_many_equal_units(family):
    model = random_model(family, 2, 2)
    memory, copies = (WorkingMemory(model, n, 4, PREFIX, context_weight=3.0) for n in (2, 4))
    memory.add(UNITS[0], weight=3.0), memory.add(UNITS[1])
    for unit in [UNITS[0]] * 3 + [UNITS[1]]:
        copies.add(unit)
    assert close(model(rows(CONTEXT), memory=memory), model(rows(CONTEXT), memory=copies))


def test_mistakes_are_named():
    model = tiny_model(V)
    for arguments, message in [
        ((-1, 4), "units from 0"),
        ((1, 0), "unit_length from 1"),
        ((1, 60, [1] * 4), "shorter units"),
    ]:
        with pytest.raises(ValueError, match=message):
            WorkingMemory(model, *arguments)
    with pytest.raises(ValueError, match="above 0"):
        WorkingMemory(model, 1, 4, temperature=0.0)
    memory = remember(model)
    for passage in ([], "text"):
        with pytest.raises(ValueError, match="at least one token id"):
            memory.add(passage)
    for weight in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="a weight above 0"):
            memory.add([1], weight)
    cache, plain = model.new_cache(), model.new_cache()
    model(rows(CONTEXT), cache, memory)
    model(rows(CONTEXT), plain)
    with pytest.raises(ValueError, match="pass that memory too"):
        model(rows([1]), cache)
    for other in (remember(model, UNITS[:2]), remember(model, length=3)):
        with pytest.raises(ValueError, match="does not begin with this memory"):
            model(rows([1]), cache, other)
    with pytest.raises(ValueError, match="does not begin with this memory"):
        model(rows([1]), plain, memory)
    with pytest.raises(ValueError, match="the same working memory"):
        Cache.stack([cache, plain])
    with pytest.raises(ValueError, match="64 positions"):
        model(rows([1] * 53), cache, memory)
    assert close(model(rows([1] * 52), cache, memory)[:, :1], model(rows([*CONTEXT, 1]), None, memory)[:, -1:])
    cache.truncate(5)
    with pytest.raises(ValueError, match="truncate no further"):
        model(rows([1]), cache, memory)
