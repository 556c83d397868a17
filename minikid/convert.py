"""A GGUF file of the Llama family, dequantised once into a folder in the Hugging Face (HF) layout.

The tensors are stored as float32: the dequantised values as they are, where bfloat16 would round them once more. Two
things differ between the layouts besides the names. GGUF keeps the rows of q and k in interleaved rotary pairs, HF in
halves; and GGUF only names its pre-tokeniser ("smollm": digits one by one, then byte-level BPE), HF spells it out.

Letters: H heads, D head dimension, E width of the model.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

CONTROL = 3  # GGUF's type of control tokens, such as <|im_start|>
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",  # absent where the head is tied to the embedding
}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write config.json, tokenizer.json, their companions and model.safetensors into an existing folder.

    Raises ValueError for another architecture, vocabulary or rotary scaling, and for tensors that a Llama model lacks.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    meta = {key: field.contents() for key, field in reader.fields.items()}
    wanted = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    wanted["llama.rope.scaling.type"] = None
    for key, value in wanted.items():
        if meta.get(key) != value:
            raise ValueError(f"{gguf_file}: {key} is {meta.get(key)!r}, only {value!r} can be converted")
    config = _config(meta, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: v for k, v in config.items() if k.endswith("token_id")})
    _write_tokenizer(meta, config, folder)
    _write_tensors(reader.tensors, config, folder / "model.safetensors")


def _config(meta: dict, tied: bool) -> dict:
    """HF's config.json from GGUF's metadata."""
    heads, width = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    eos = meta["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": meta.get("llama.attention.key_length", width // heads),
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # a float32: 9.99999975e-06
        "rope_theta": meta.get("llama.rope.freq_base", 10000.0),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", eos),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }


def _write_tokenizer(meta: dict, config: dict, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: digits one by one, then byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": meta.get("tokenizer.ggml.add_bos_token", False),
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "chat_template": meta.get("tokenizer.chat_template"),
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", {k: v for k, v in settings.items() if v is not None})


def _write_tensors(tensors: list, config: dict, path: Path) -> None:
    """Write a safetensors file one tensor at a time.

    The library's own writer wants all tensors in memory; the format is a length, a JSON header and the raw bytes.
    """
    import numpy as np
    from gguf import dequantize
    from tqdm import tqdm

    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        start, end = end, end + 4 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]  # GGUF names the innermost dimension first
        header[hf_name(tensor.name)] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of eight bytes
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tqdm(tensors, unit=" tensors", disable=None, leave=False):
            name = hf_name(tensor.name)
            values = dequantize(tensor.data, tensor.tensor_type).reshape(header[name]["shape"])
            if H := heads.get(name.split(".")[-2]):
                values = rope_halves(values, H)
            file.write(np.ascontiguousarray(values, dtype="<f4").data)


def hf_name(gguf_name: str) -> str:
    """The HF name of a tensor: blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if block and block[2] in INNER:
        return f"model.layers.{block[1]}.{INNER[block[2]]}.weight"
    if gguf_name not in OUTER:
        raise ValueError(f"GGUF tensor {gguf_name!r}: only the weights of a Llama without biases can be converted")
    return OUTER[gguf_name]


def rope_halves(weight: "np.ndarray", H: int) -> "np.ndarray":
    """Reorder the rows of q or k, head by head, from GGUF's rotary pairs to HF's halves.

    The two rows of pair i are 2i and 2i + 1 in GGUF, i and i + D/2 in HF.
    """
    # [H * D, E] -> [H, D/2, 2, E] -> [H, 2, D/2, E] -> [H * D, E]
    rows, E = weight.shape
    return weight.reshape(H, rows // H // 2, 2, E).swapaxes(1, 2).reshape(rows, E)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
