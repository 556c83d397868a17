"""What a model from scratch begins with: a configuration, a tokenizer trained on the data, random weights."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import nn

from minikid.model import GPT

EOS, SEPARATOR = "<|endoftext|>", "[SEP]"
CONTROL = [EOS, SEPARATOR]


def train_bpe(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE with GPT-2's cutting of words; it can write any text. ValueError for less than 258 tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(CONTROL) + len(alphabet):
        raise ValueError(f"expected a vocabulary of at least {len(CONTROL) + len(alphabet)} tokens, got {vocab_size}")
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(texts, trainer)
    return library


def train_characters(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A token for each character of the texts, of the most frequent ones if there are too many, and one for each byte,
    which write all other characters: nothing is unknown. ValueError for less than 259 tokens.
    """
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256))]
    room = vocab_size - len(tokens)
    if room < 1:
        raise ValueError(f"expected a vocabulary of at least {len(tokens) + 1} tokens, got {vocab_size}")
    counts = Counter(character for text in texts for character in text)
    tokens += sorted(counts, key=lambda c: (-counts[c], c))[:room]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens(CONTROL)
    return library


def hf_config(
    family: str,
    vocab_size: int,
    *,
    layers: int,
    heads: int,
    kv_heads: int | None,
    hidden: int,
    intermediate: int | None,
    positions: int,
    eos_id: int,
    attention: str,
) -> dict[str, Any]:
    """config.json of a new model, for `Config.from_dict` and for transformers. ValueError for sizes that do not fit.

    The head is the embedding matrix; the intermediate size is 4 x hidden, in a Llama, whose MLP has three matrices
    instead of two, 8/3 x hidden in whole 64s.
    """
    kv_heads = kv_heads or heads
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ValueError(
            f"expected a hidden size of heads times an even number, and heads a multiple of kv-heads; "
            f"got hidden {hidden}, heads {heads}, kv-heads {kv_heads}"
        )
    if family == "gpt2" and kv_heads != heads:
        raise ValueError(f"expected as many kv-heads as heads in a gpt2, got {kv_heads} and {heads}")
    common = {"vocab_size": vocab_size, "eos_token_id": eos_id, "bos_token_id": None}
    common |= {"tie_word_embeddings": True, "dtype": "float32", "attention": attention}
    if family == "gpt2":
        shape = {"n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
        shape |= {"n_inner": intermediate or 4 * hidden, "activation_function": "gelu_new"}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **common, **shape, **dropout}
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"num_key_value_heads": kv_heads, "head_dim": hidden // heads, "max_position_embeddings": positions}
    shape |= {"intermediate_size": intermediate or -(-8 * hidden // (3 * 64)) * 64, "hidden_act": "silu"}
    shape |= {"rms_norm_eps": 1e-5, "rope_theta": 10_000.0}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **common, **shape}


@torch.no_grad()
def init_weights(model: GPT, generator: torch.Generator) -> None:
    """As in GPT-2: matrices normal with deviation 0.02, those that write to the residual stream divided by the root of
    their number; biases 0, norms 1.
    """
    writers = {module for block in model.blocks for module in (block.attention.out, block.mlp.down)}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = 0.02 / len(writers) ** 0.5 if module in writers else 0.02
            module.weight.normal_(0.0, scale, generator=generator)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
