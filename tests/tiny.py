"""A tiny random decoder and a small byte-level tokenizer, built in memory for tests."""

import functools
import json
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from minikid.config import Config
from minikid.model import GPT
from minikid.tokenizer import Tokenizer

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = [
    "The capital of Mongolia is Ulaanbaatar. Ulaanbaatar lies on the river Tuul, in the north of Mongolia.",
    "A mongolian car is a car; a cardiologist drives a car to the capital and to the river.",
    "日本の首都は東京です。東京は日本にある。 🙂🙃👍🏽 naïve café, 1990 and 2011.",
]


@functools.cache
def byte_tokenizer(template: str | None = None) -> Tokenizer:
    """Byte-level BPE with 40 merges and three control tokens at the front; eos is 2."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL) + 40,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    return Tokenizer(library, eos_ids=(2,), template=template)


@functools.cache
def tiny_model(vocab_size: int, family: str = "llama") -> GPT:
    """A random Llama with grouped queries, or a GPT-2, in float64; its distributions are neither flat nor certain."""
    llama = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    llama |= {"hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 64}
    shape = llama if family == "llama" else {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
    torch.manual_seed(0)
    model = GPT(Config.from_dict({"model_type": family, "vocab_size": vocab_size, "eos_token_id": 2} | shape))
    model = model.double().eval().requires_grad_(False)
    for block in model.blocks:  # so large that the tokens read decide what comes
        for layer in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down):
            layer.weight.mul_(4.0)
    model.head.weight.mul_(4.0)
    return model


def write_folder(path: Path, template: str | None = None) -> Path:
    """An HF-layout folder of a random Llama, written by transformers, with the byte-level tokenizer."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=400,
            eos_token_id=2,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    model.save_pretrained(path)
    tokenizer._library.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return path
