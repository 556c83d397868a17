"""The decoder against transformers on tiny random models, against itself in other chunkings, and against damaged
folders.
"""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from minikid.config import Config
from minikid.model import GPT, Cache, load_weights
from minikid.pack import BlockedLinear, NarrowLinear, pack

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "gpt2": GPT2Config(vocab_size=97, n_embd=48, n_layer=3, n_head=4, n_positions=256),
    "gpt2-inner": GPT2Config(vocab_size=97, n_embd=48, n_layer=2, n_head=3, n_positions=256, n_inner=100),
    "llama": LlamaConfig(**LLAMA, num_attention_heads=4),
    "llama-gqa-llama3": LlamaConfig(
        **LLAMA, num_attention_heads=6, num_key_value_heads=2, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "llama-linear": LlamaConfig(
        **LLAMA, num_attention_heads=4, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}
    ),
    "llama-head-dim": LlamaConfig(**LLAMA, num_attention_heads=3, num_key_value_heads=3, head_dim=32),
    "llama-biases": LlamaConfig(
        **LLAMA, num_attention_heads=4, num_key_value_heads=1, attention_bias=True, mlp_bias=True
    ),
}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request, tmp_path_factory):
    """A tiny random model in HF layout, written by transformers; every tensor random, biases and norms too."""
    config = CONFIGS[request.param]
    torch.manual_seed(0)
    model = (GPT2LMHeadModel if config.model_type == "gpt2" else LlamaForCausalLM)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(CONFIGS["llama"]).save_pretrained(path)
    return path


def tiny(seed: int = 0) -> GPT:
    """A random Llama with grouped queries, in float64."""
    config = Config.from_dict(
        {
            "model_type": "llama",
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
        }
        | {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 64}
    )
    torch.manual_seed(seed)
    return GPT(config).double().eval().requires_grad_(False)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
def test_logits_equal_transformers(folder, dtype, tolerance):
    """Whole, in chunks, token by token and in a batch."""
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ours = load_weights(folder, dtype=dtype).eval()
    tokens = torch.randint(97, (3, 150), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() < tolerance
        for sizes in ([100, 1, 49], [1] * 10 + [140]):
            cache = ours.new_cache(3)
            chunks = [ours(part, cache) for part in tokens.split(sizes, dim=1)]
            assert (torch.cat(chunks, dim=1) - expected).abs().max() < tolerance
            assert cache.length == 150


def test_gradients_equal_transformers(folder):
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ours = load_weights(folder, dtype=torch.float64)
    tokens = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(3))
    for logits in (theirs(tokens).logits, ours(tokens)):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    embedding = theirs.get_input_embeddings().weight.grad
    assert (
        ours.embed.weight.grad - embedding
    ).abs().max() < 1e-7  # transformers takes Llama's norm in float32, backwards too
    assert all(parameter.grad is not None for parameter in ours.parameters())


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 20))
@settings(deadline=None, max_examples=30)
def test_chunks_and_cuts_never_change_a_logit(sizes, extra):
    """Reading in any chunks equals reading at once, also after foreign tokens were read in between and cut away."""
    model = tiny()
    tokens = torch.randint(61, (1, sum(sizes)), generator=torch.Generator().manual_seed(sum(sizes)))
    with torch.no_grad():
        expected = model(tokens)
        cache, chunks = model.new_cache(), []
        for part in tokens.split(sizes, dim=1):
            if extra and cache.length + extra <= 64:
                length = cache.length
                model(torch.full((1, extra), 7), cache)
                cache.truncate(length)
            chunks.append(model(part, cache))
    assert (torch.cat(chunks, dim=1) - expected).abs().max() < 1e-9


@given(st.lists(st.integers(1, 15), min_size=1, max_size=5))
@settings(deadline=None, max_examples=30)
def test_a_row_in_a_ragged_batch_equals_the_row_alone(lengths):
    model = tiny()
    generator = torch.Generator().manual_seed(sum(lengths))
    prompts = [torch.randint(61, (1, n), generator=generator) for n in lengths]
    after = torch.randint(61, (len(lengths), 4), generator=generator)
    with torch.no_grad():
        caches = [model.new_cache() for _ in prompts]
        for prompt, cache in zip(prompts, caches, strict=True):
            model(prompt, cache)
        batch = Cache.stack(caches)
        together = torch.cat([model(after[:, :1], batch), model(after[:, 1:], batch)], dim=1)
        picked = batch.select(list(reversed(range(len(lengths)))))
        onwards = model(after[:, :1].flip(0), picked)
        for i, prompt in enumerate(prompts):
            alone = model(torch.cat([prompt, after[i : i + 1], after[i : i + 1, :1]], dim=1))
            assert (together[i] - alone[0, -5:-1]).abs().max() < 1e-9
            assert (onwards[len(lengths) - 1 - i] - alone[0, -1:]).abs().max() < 1e-9


def test_expanded_rows_are_independent():
    model = tiny()
    prompt, after = torch.tensor([[3, 1, 4]]), torch.tensor([[1], [5], [9]])
    with torch.no_grad():
        cache = model.new_cache()
        model(prompt, cache)
        wide = cache.expand(3)
        logits = model(after, wide)
        for i in range(3):
            alone = model(torch.cat([prompt, after[i : i + 1]], dim=1))
            assert (logits[i, -1] - alone[0, -1]).abs().max() < 1e-9
    assert cache.length == 3
    assert wide.length == 4
    with pytest.raises(ValueError, match="cache of one row, got 3"):
        wide.expand(2)


def test_cache_truncate():
    model = tiny()
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), cache)
    with pytest.raises(ValueError, match="from 0 to 3"):
        cache.truncate(4)
    cache.truncate(0)
    assert cache.length == 0
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([[5]]), cache), model(torch.tensor([[5]])))


def test_gradients_pass_through_a_cached_chunk():
    model = tiny().requires_grad_(True)
    tokens = torch.tensor([[4, 8, 15, 16, 23, 42]])
    whole = torch.autograd.grad(model(tokens)[0, -1].logsumexp(-1), model.embed.weight)[0]
    cache = model.new_cache()
    model(tokens[:, :3], cache)
    chunked = torch.autograd.grad(model(tokens[:, 3:], cache)[0, -1].logsumexp(-1), model.embed.weight)[0]
    assert (whole - chunked).abs().max() < 1e-7  # Llama's norm is taken in float32


def test_past_the_position_limit():
    model = tiny()
    cache = model.new_cache()
    with torch.no_grad():
        model(torch.ones(1, 60, dtype=torch.long), cache)
        with pytest.raises(
            ValueError, match="60 tokens are read and 5 more were given, but this model has 64 positions"
        ):
            model(torch.ones(1, 5, dtype=torch.long), cache)
        assert cache.length == 60
        assert model(torch.ones(1, 4, dtype=torch.long), cache).shape == (1, 4, 61)


@pytest.mark.parametrize("rows", [1, 2, 3, 8, 9, 40])
@pytest.mark.parametrize("shape", [(7, 5), (64, 33), (83, 12)])
def test_packed_layers_equal_plain_ones(rows, shape):
    torch.manual_seed(rows)
    plain, x = torch.nn.Linear(shape[1], shape[0]), torch.randn(2, rows, shape[1])
    expected = plain(x)
    blocked = BlockedLinear(plain.weight, plain.bias)
    assert (blocked(x) - expected).abs().max() < 1e-5
    slope = torch.randn_like(expected)
    gradients = [torch.autograd.grad(layer(y := x.clone().requires_grad_()), y, slope)[0] for layer in (plain, blocked)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-5
    rounded = torch.nn.Linear(shape[1], shape[0]).double()
    rounded.weight.data, rounded.bias.data = plain.weight.bfloat16().double(), plain.bias.double()
    exact = rounded(x.double())
    narrow = NarrowLinear(plain.weight.bfloat16(), plain.bias)(x)
    assert narrow.dtype == torch.float32
    few = 2 * rows <= 8  # the matrix-vector kernel takes x and returns y in bfloat16: 8 bits
    assert (narrow - exact).abs().max() < (0.05 if few else 1e-5)


def test_packed_model_equals_plain_one(folder):
    plain, packed = load_weights(folder).eval(), pack(load_weights(folder)).eval()
    tokens = torch.randint(97, (2, 30), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        assert (plain(tokens) - packed(tokens)).abs().max() < 1e-4
        narrow = pack(load_weights(folder, dtype=torch.bfloat16)).eval()
        rounded = load_weights(folder, dtype=torch.bfloat16).float().eval()
        assert narrow.new_cache().keys[0].dtype == torch.float32
        assert (
            narrow(tokens) - rounded(tokens)
        ).abs().max() < 1e-4  # many rows: float32 products of the rounded weights
        cache = narrow.new_cache(2)
        narrow(tokens[:, :29], cache)
        assert (narrow(tokens[:, 29:], cache) - rounded(tokens)[:, 29:]).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_and_shards(llama_folder, tmp_path, dtype):
    """The same tensors in a narrower dtype, over two shards with an index."""
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(llama_folder / "model.safetensors").items()}
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    model = load_weights(tmp_path)
    assert torch.equal(model.embed.weight, tensors["model.embed_tokens.weight"].float())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shards that are not there: model-00002-of-00002\.safetensors"):
        load_weights(tmp_path)


def test_every_misfit_is_named_in_one_error(llama_folder, tmp_path):
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    tensors = load_file(llama_folder / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors["model.extra.weight"] = torch.zeros(2)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(80, 48)
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(12, 48)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"missing: model\.norm\.weight; unexpected: model\.extra\.weight; wrong shape: "
    ) as error:
        load_weights(tmp_path)
    assert "k_proj" in str(error.value)
    assert "down_proj.weight: expected [48, 80], got [[80, 48]]" in str(error.value)


@pytest.mark.parametrize("content", [b"version https://example.org/spec/v1\noid sha256:0\n", b"", None])
def test_a_stub_or_truncated_file_is_named(llama_folder, tmp_path, content):
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    whole = (llama_folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(ValueError, match=r"model\.safetensors .*is no whole safetensors file"):
        load_weights(tmp_path)


def test_no_weights_at_all(llama_folder, tmp_path):
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        load_weights(tmp_path)


def test_redundant_head_and_mask_buffers_are_ignored(tmp_path):
    torch.manual_seed(5)
    model = GPT2LMHeadModel(CONFIGS["gpt2"])
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    noise = {
        "h.0.attn.bias": torch.ones(1, 1, 256, 256),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "lm_head.weight": torch.zeros(97, 48),
    }
    expected = load_weights(tmp_path)(torch.tensor([[1, 2, 3]]))
    save_file(bare | noise, tmp_path / "model.safetensors")
    assert torch.equal(load_weights(tmp_path)(torch.tensor([[1, 2, 3]])), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'gpt2' or 'llama', got 'mamba'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "got 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "got 'dynamic'"),
        ({"hidden_act": "relu"}, "got 'relu'"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"hidden_size": None}, "hidden_size"),
    ],
)
def test_what_is_not_built_is_refused(change, message):
    raw = {
        "model_type": "llama",
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
    }
    raw = {key: value for key, value in (raw | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        Config.from_dict(raw)


def test_rope_settings_under_old_and_new_names():
    raw = {
        "model_type": "llama",
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 8,
    }
    old = Config.from_dict(raw | {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = Config.from_dict(raw | {"rope_parameters": {"rope_theta": 5.0, "rope_type": "linear", "factor": 2.0}})
    assert old == new
    assert old.rope.theta == 5.0
    assert Config.from_dict(raw | {"eos_token_id": [3, 4]}).eos_ids == (3, 4)
