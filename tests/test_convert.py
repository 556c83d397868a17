"""The GGUF conversion: a tiny random Llama goes HF -> GGUF -> HF and comes back whole."""

import itertools
import json

import gguf
import numpy as np
import pytest
import regex
import tokenizers
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from minikid import convert

H, KV, D, E, F, LAYERS = 4, 2, 16, 64, 96, 2
CONTROL_TOKENS = ["<|end|>", "<|start|>", "<pad>"]
MERGES = ["Ġ t", "h e", "Ġt he", "a n", "Ġ a", "Ġa n", "e r", "1 2", "Ġ Ġ", "l l", "Ã ©"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}"
GPT2_PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXTS = [
    "", " ", "Hello, world", "the anthem  then\n\n another", "1234567 12.5% in 1999", "a1b2", "x²½Ⅷ٣", "👩‍👩‍👧 and 🇲🇳",
    "東京は日本の首都です。", "Ünïcödé naïve café", "it's we'll I'd", "tabs\tand \r\n ends  ", "\x00\x7f\u200b\ufeff",
    "Улаанбаатар", "e\u0301",
]  # fmt: skip


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def vocabulary() -> list[str]:
    return CONTROL_TOKENS + byte_letters() + [merge.replace(" ", "") for merge in MERGES]


def slow_encode(text: str, ids: dict[str, int], merges: list[str]) -> list[int]:
    """Digits one by one, GPT-2's pieces, then the earliest merge first, over and over."""
    letters, rank = byte_letters(), {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    out = []
    for part in regex.findall(r"\p{N}|[^\p{N}]+", text):
        for piece in regex.findall(GPT2_PIECES, part):
            word = [letters[b] for b in piece.encode()]
            while True:
                known = [(rank[pair], i) for i, pair in enumerate(itertools.pairwise(word)) if pair in rank]
                if not known:
                    break
                _, i = min(known)
                word[i : i + 2] = [word[i] + word[i + 1]]
            out += [ids[symbol] for symbol in word]
    return out


def tiny_llama(tied: bool) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary()), hidden_size=E, intermediate_size=F, num_hidden_layers=LAYERS,
        num_attention_heads=H, num_key_value_heads=KV, head_dim=D, max_position_embeddings=128, rms_norm_eps=1e-5,
        rope_theta=5000.0, bos_token_id=1, eos_token_id=0, pad_token_id=2, tie_word_embeddings=tied,
        initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """HF's halves to GGUF's pairs, row by row."""
    out = np.empty_like(weight)
    d = len(weight) // heads
    for head in range(heads):
        for i in range(d // 2):
            out[head * d + 2 * i] = weight[head * d + i]
            out[head * d + 2 * i + 1] = weight[head * d + d // 2 + i]
    return out


def write_gguf(path, model, quantised=None, leave_out=(), **changes) -> dict[str, np.ndarray]:
    """Write the model as a GGUF file; return the values that stand in it, by GGUF name."""
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    config, writer = model.config, gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(E)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(KV)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if "scaling" in changes:
        writer.add_rope_scaling_type(gguf.RopeScalingType(changes["scaling"]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(vocabulary())
    writer.add_token_types([3] * len(CONTROL_TOKENS) + [1] * (256 + len(MERGES)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    stored = {}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if name == "model.embed_tokens.weight":
            new = "token_embd.weight"
        elif name == "model.norm.weight":
            new = "output_norm.weight"
        elif name == "lm_head.weight":
            if config.tie_word_embeddings:
                continue
            new = "output.weight"
        else:
            _, _, layer, kind = name.removesuffix(".weight").split(".", 3)
            new = f"blk.{layer}.{names[kind]}.weight"
            if names[kind] in ("attn_q", "attn_k"):
                values = interleave(values, H if names[kind] == "attn_q" else KV)
        if quantised and values.ndim == 2:
            stored[new] = gguf.quantize(values, quantised)
            writer.add_tensor(new, stored[new], raw_dtype=quantised)
        else:
            stored[new] = values
            writer.add_tensor(new, values)
    for name in changes.get("extra", ()):
        writer.add_tensor(name, np.zeros(E, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = tiny_llama(tied=True)
    write_gguf(folder / "tiny.gguf", model)
    convert.convert_gguf(folder / "tiny.gguf", folder)
    return folder, model


@pytest.mark.parametrize("tied", [True, False])
def test_weights_come_back_bit_for_bit(tmp_path, tied):
    model = tiny_llama(tied)
    write_gguf(tmp_path / "tiny.gguf", model)
    convert.convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    want = {
        name: value.numpy() for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")
    }
    got = load_file(tmp_path / "model.safetensors")
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def test_config_describes_the_same_model(tiny):
    folder, model = tiny
    again, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for key in ("rms_norm_eps", "rope_parameters", "head_dim", "num_key_value_heads", "max_position_embeddings",
                "tie_word_embeddings", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):  # fmt: skip
        assert getattr(again.config, key) == getattr(model.config, key), key
    ids = torch.arange(60).reshape(2, 30)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def q8_0(blocks: bytes) -> list[float]:
    """Per block: a float16 scale and 32 signed bytes."""
    scale = np.frombuffer(blocks[:2], np.float16).astype(np.float32)[0]
    return [scale * np.float32(q) for q in np.frombuffer(blocks[2:34], np.int8)]


def q4_1(blocks: bytes) -> list[float]:
    """Per block: a float16 scale, a float16 minimum, 32 half bytes: the low halves first, then the high ones."""
    scale, least = np.frombuffer(blocks[:4], np.float16).astype(np.float32)
    halves = [byte & 15 for byte in blocks[4:20]] + [byte >> 4 for byte in blocks[4:20]]
    return [scale * np.float32(q) + least for q in halves]


@pytest.mark.parametrize(("kind", "size", "literal"), [("Q8_0", 34, q8_0), ("Q4_1", 20, q4_1)])
def test_quantised_tensors_follow_the_block_formula(tmp_path, kind, size, literal):
    model = tiny_llama(tied=True)
    stored = write_gguf(tmp_path / "tiny.gguf", model, quantised=gguf.GGMLQuantizationType[kind])
    convert.convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    got = load_file(tmp_path / "model.safetensors")
    for name in ("token_embd.weight", "blk.1.ffn_down.weight", "blk.0.attn_v.weight", "blk.0.attn_k.weight"):
        raw = stored[name].tobytes()
        want = np.array([v for i in range(0, len(raw), size) for v in literal(raw[i : i + size])], np.float32)
        value = got[convert.hf_name(name)]
        value = interleave(value, KV) if "attn_k" in name else value
        np.testing.assert_allclose(value.ravel(), want, rtol=1e-6, atol=1e-7)
        original = model.state_dict()[convert.hf_name(name)].numpy()
        original = interleave(original, KV) if "attn_k" in name else original
        assert np.abs(value - original).max() < 0.2  # and the values are those of the model, coarsely


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_rope_halves_undoes_the_interleaving(heads, half, width, seed):
    weight = np.random.default_rng(seed).normal(size=(heads * 2 * half, width))
    np.testing.assert_array_equal(convert.rope_halves(interleave(weight, heads), heads), weight)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(0, 50), st.integers(0, 50), st.integers(0, 2**32 - 1))
def test_rotated_pairs_and_rotated_halves_score_alike(heads, half, m, n, seed):
    """Two spellings of one attention: the query at position m and the key at n score the same in both layouts."""
    random = np.random.default_rng(seed)
    q, k = random.normal(size=(2, heads * 2 * half, 3))
    x, y = random.normal(size=(2, 3))
    theta = 100.0 ** (-np.arange(half) / half)

    def pairs(vector, position):  # [H * D] -> complex [H, D/2]: rows 2i and 2i + 1 are one plane
        planes = vector.reshape(heads, half, 2)
        return (planes[..., 0] + 1j * planes[..., 1]) * np.exp(1j * position * theta)

    def halves(vector, position):  # [H * D] -> complex [H, D/2]: rows i and i + D/2 are one plane
        planes = vector.reshape(heads, 2, half)
        return (planes[:, 0] + 1j * planes[:, 1]) * np.exp(1j * position * theta)

    want = (pairs(q @ x, m) * pairs(k @ y, n).conj()).real.sum(-1)
    q, k = convert.rope_halves(q, heads), convert.rope_halves(k, heads)
    np.testing.assert_allclose((halves(q @ x, m) * halves(k @ y, n).conj()).real.sum(-1), want, atol=1e-9)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tokenizers.Tokenizer.from_file(str(tiny[0] / "tokenizer.json"))


@settings(max_examples=300)
@given(st.one_of(st.text(max_size=40), st.text("the an12é 1\n'l", max_size=40)))
def test_tokenizer_equals_the_slow_one_and_round_trips(tokenizer, text):
    ids = {token: i for i, token in enumerate(vocabulary())}
    encoded = tokenizer.encode(text).ids
    assert encoded == slow_encode(text, ids, MERGES)
    assert tokenizer.decode(encoded) == text


@pytest.mark.parametrize("text", TEXTS)
def test_tokenizer_on_difficult_texts(tokenizer, text):
    test_tokenizer_equals_the_slow_one_and_round_trips.hypothesis.inner_test(tokenizer, text)


def test_control_tokens(tiny, tokenizer):
    assert tokenizer.get_vocab() == {token: i for i, token in enumerate(vocabulary())}
    encoded = tokenizer.encode("<|start|>the<|end|>")
    assert encoded.ids == [1, *tokenizer.encode("the").ids, 0]
    assert tokenizer.decode(encoded.ids) == "the"
    assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == "<|start|>the<|end|>"
    library = transformers.AutoTokenizer.from_pretrained(tiny[0])
    assert (library.bos_token_id, library.eos_token_id, library.pad_token_id) == (1, 0, 2)
    assert sorted(library.all_special_ids) == [0, 1, 2]
    assert library.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "<|start|>the<|end|>"
    assert library("the 12").input_ids == tokenizer.encode("the 12").ids  # nothing is added at either end


def test_every_id_decodes(tokenizer):
    letters = byte_letters()
    for i, token in enumerate(vocabulary()):
        raw = token.encode() if token in CONTROL_TOKENS else bytes(letters.index(c) for c in token)
        assert tokenizer.decode([i], skip_special_tokens=False) == raw.decode(errors="replace")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2', only 'smollm'"),
        ({"scaling": "yarn"}, "rope.scaling.type is 'yarn'"),
        ({"architecture": "gemma"}, "general.architecture is 'gemma', only 'llama'"),
        ({"extra": ["blk.0.attn_q.bias"]}, "blk.0.attn_q.bias"),
        ({"extra": ["rope_freqs.weight"]}, "rope_freqs.weight"),
    ],
)
def test_other_files_are_refused(tmp_path, changes, message):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama(tied=True), **changes)
    with pytest.raises(ValueError, match=message):
        convert.convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_default_tokenizer_equals_the_slow_one(default_folder):
    """The default model's whole vocabulary and merges, against the literal algorithm and transformers."""
    file = default_folder / "tokenizer.json"
    library = transformers.AutoTokenizer.from_pretrained(default_folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    model = json.loads(file.read_text(encoding="utf-8"))["model"]
    merges = [" ".join(pair) for pair in model["merges"]]
    ids = tokenizer.get_vocab()
    assert sorted(ids.values()) == list(range(49152))
    for text in [*TEXTS, "The Khan of 1206 ruled.\n\n  def f(x):\n\treturn x**2  # π≈3.14159\n"]:
        encoded = tokenizer.encode(text).ids
        assert encoded == slow_encode(text, ids, merges) == library(text).input_ids
        assert tokenizer.decode(encoded) == text == library.decode(encoded)
    chat = "<|im_start|>user\n12 <|im_end|>\n"
    want = [1, *slow_encode("user\n12 ", ids, merges), 2, *slow_encode("\n", ids, merges)]
    assert tokenizer.encode(chat).ids == want == library(chat).input_ids
    assert all(tokenizer.decode([i], skip_special_tokens=False) for i in range(49152))
