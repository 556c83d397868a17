"""The decoder's configuration: one frozen value, read from a Hugging Face `config.json`.

Two families are known: "gpt2" (LayerNorm, learned positions, GELU, biases everywhere) and "llama" (RMSNorm, RoPE,
SwiGLU, grouped-query attention). Whatever the file asks for beyond these is refused: a setting that is silently ignored
gives wrong logits.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency and, where the checkpoint was stretched, how."""

    theta: float = 10_000.0
    kind: str = "default"  # "default", "linear" or "llama3"
    factor: float = 1.0  # positions are divided by this ("linear"), or low frequencies are ("llama3")
    low_freq_factor: float = 1.0  # llama3: wavelengths above original_positions / low_freq_factor are stretched in full
    high_freq_factor: float = 4.0  # llama3: wavelengths below original_positions / high_freq_factor are left alone
    original_positions: int = 8192  # llama3: the context length before it was stretched


@dataclass(frozen=True)
class Config:
    """Everything that fixes the decoder's shape and arithmetic; the weights only fill it."""

    family: str  # "gpt2" or "llama"
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # fewer than num_heads: grouped-query attention
    head_dim: int
    intermediate_size: int
    max_positions: int  # hard limit in tokens, prompt included
    norm_eps: float
    rope: Rope | None = None  # None: learned absolute positions
    attention_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"  # "silu" (gated), "gelu_tanh" or "gelu"
    tied: bool = True  # the output head is the embedding matrix
    eos_ids: tuple[int, ...] = ()
    attention: str = "causal"  # or "prefix": the prompt's tokens see each other in both directions (UniLM)

    @property
    def gated(self) -> bool:
        """SwiGLU has a gate beside the up-projection; GPT-2's MLP has not."""
        return self.family == "llama"

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Config":
        """Read `config.json` of an HF-layout folder, and the eos ids of `generation_config.json` where it has them."""
        folder = Path(folder)
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        eos = read_json(generation).get("eos_token_id") if generation.exists() else None
        try:
            return cls.from_dict(raw if eos is None else {**raw, "eos_token_id": eos})
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from None

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> "Config":
        """Translate the keys of an HF config, and our own "attention", which transformers does not know: it reads a
        model with "prefix" as a causal one, and gets other logits.

        ValueError for a kind of model, position scaling, activation or attention that is not built here.
        """
        family = raw.get("model_type")
        if family not in ("gpt2", "llama"):
            raise ValueError(
                f"expected model_type 'gpt2' or 'llama', got {family!r}; other architectures are not implemented"
            )
        attention = raw.get("attention", "causal")
        if attention not in ("causal", "prefix"):
            raise ValueError(f"expected attention 'causal' or 'prefix', got {attention!r}")
        try:
            return replace(_gpt2(raw) if family == "gpt2" else _llama(raw), attention=attention)
        except KeyError as error:
            raise ValueError(f"the key {error} is missing; it is needed for model_type {family!r}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ValueError that names the file when there is none or it is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} does not exist; expected an HF-layout folder with config.json, *.safetensors and tokenizer.json"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _gpt2(raw: dict[str, Any]) -> Config:
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
    activation = raw.get("activation_function", "gelu_new")
    if activation not in activations:
        raise ValueError(f"expected activation_function in {sorted(activations)}, got {activation!r}")
    if raw.get("scale_attn_by_inverse_layer_idx") or not raw.get("scale_attn_weights", True):
        raise ValueError("expected attention scaled by 1/sqrt(head_dim); other scalings are not implemented")
    hidden, heads = raw["n_embd"], raw["n_head"]
    return Config(
        family="gpt2",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_layers=raw["n_layer"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=raw.get("n_inner") or 4 * hidden,
        max_positions=raw.get("n_positions", 1024),
        norm_eps=raw.get("layer_norm_epsilon", 1e-5),
        attention_bias=True,
        mlp_bias=True,
        activation=activations[activation],
        tied=raw.get("tie_word_embeddings", True),
        eos_ids=_as_ids(raw.get("eos_token_id")),
    )


def _llama(raw: dict[str, Any]) -> Config:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"expected hidden_act 'silu', got {activation!r}")
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return Config(
        family="llama",
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate_size=raw["intermediate_size"],
        max_positions=raw.get("max_position_embeddings", 2048),
        norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_rope(raw),
        attention_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        tied=raw.get("tie_word_embeddings", False),
        eos_ids=_as_ids(raw.get("eos_token_id")),
    )


def _rope(raw: dict[str, Any]) -> Rope:
    # older files: rope_theta beside rope_scaling; newer: both inside rope_parameters; the kind has two spellings
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, kind, factor=scaling["factor"])
    if kind == "llama3":
        return Rope(
            theta,
            kind,
            factor=scaling["factor"],
            low_freq_factor=scaling["low_freq_factor"],
            high_freq_factor=scaling["high_freq_factor"],
            original_positions=scaling["original_max_position_embeddings"],
        )
    raise ValueError(
        f"expected rope scaling 'default', 'linear' or 'llama3', got {kind!r}; ignoring it would change every logit"
    )


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
