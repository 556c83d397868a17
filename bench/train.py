"""Measure training: tokens per second beside a plain loop in nanoGPT's style and beside transformers' own model.

    python bench/train.py                  two threads, 3 shapes, 5 rounds: about 4 minutes

All train the same GPT-2 in float32 on the same number of rows; no dropout, no compiler. The plain loop pads to the
longest row of a random batch, makes logits of all positions and lets the loss pass over what is not scored. What is
compared runs in turns within each round, so that noise hits all alike; ratios are taken round by round, and medians
are printed. Best of all on a machine that does nothing else.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minikid.config import Config
from minikid.corpus import Batches, Corpus
from minikid.model import GPT
from minikid.scratch import hf_config
from minikid.training import Settings, make_optimiser, train

THREADS = 2
SHAPES = {  # layers, heads, hidden, vocabulary, rows of a batch, (shortest, longest, scored) tokens of a row
    "text, 512 tokens in the vocabulary": (6, 6, 384, 512, 8, (256, 256, 256)),
    "text, 50,257 tokens in the vocabulary": (4, 4, 256, 50_257, 8, (256, 256, 256)),
    "completions of 16 tokens behind prompts of 16 to 240": (4, 4, 256, 50_257, 8, (32, 256, 16)),
}


class PlainBlock(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """GPT-2 as short as it can be written."""

    def __init__(self, layers: int, heads: int, hidden: int, vocabulary: int, positions: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, hidden), nn.Embedding(positions, hidden)
        self.blocks = nn.Sequential(*(PlainBlock(hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        # [B, T] -> [B, T, V]
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def plain_steps(model: nn.Module, logits_of: Callable, batches: Callable) -> Iterator[int]:
    """Steps of a plain loop; yields the number of tokens that each read."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    while True:
        inputs, targets, tokens = batches()
        logits = logits_of(model, inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        loss.item()
        yield tokens


def make_corpus(vocabulary: int, lengths: tuple[int, int, int], examples: int = 4096) -> Corpus:
    shortest, longest, scored = lengths
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(shortest, longest + 1, (examples,), generator=generator) + 1
    ends = sizes.cumsum(0)
    spans = torch.stack([ends - sizes, ends, sizes - scored], dim=1)
    return Corpus(torch.randint(vocabulary, (int(ends[-1]),), generator=generator, dtype=torch.int32), spans)


def random_batches(corpus: Corpus, size: int) -> Callable:
    """Random rows side by side, padded to the longest; -1 where nothing is scored."""
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, Tensor, int]:
        rows = [corpus.row(int(i)) for i in torch.randint(len(corpus.spans), (size,), generator=generator)]
        T = max(row.end - row.begin for row in rows) - 1
        inputs, targets = torch.zeros(size, T, dtype=torch.long), torch.full((size, T), -1)
        for i, row in enumerate(rows):
            ids = corpus.tokens[row.begin : row.end].long()
            inputs[i, : len(ids) - 1] = ids[:-1]
            targets[i, row.first - 1 : len(ids) - 1] = ids[row.first :]
        return inputs, targets, sum(row.end - row.begin - 1 for row in rows)

    return batch


def runs_of(shape: tuple) -> dict[str, Iterator[int]]:
    layers, heads, hidden, vocabulary, size, lengths = shape
    positions = lengths[1]
    corpus = make_corpus(vocabulary, lengths)
    torch.manual_seed(0)
    plain = PlainGPT(layers, heads, hidden, vocabulary, positions)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_positions=positions,
            n_embd=hidden,
            n_layer=layers,
            n_head=heads,
            bos_token_id=0,
            eos_token_id=0,
            **dropout,
        )
    )
    sizes = {"layers": layers, "heads": heads, "kv_heads": None, "hidden": hidden, "intermediate": None}
    raw = hf_config("gpt2", vocabulary, **sizes, positions=positions, eos_id=0, attention="causal")
    ours = GPT(Config.from_dict(raw))
    settings = Settings(steps=10**6, lr=1e-3, min_lr=1e-4, warmup=0)
    steps = train(ours, make_optimiser(ours, settings), corpus, Batches(corpus, size, seed=0), settings)
    return {
        "plain loop": plain_steps(plain, lambda model, x: model(x), random_batches(corpus, size)),
        "transformers": plain_steps(
            theirs, lambda model, x: model(x, use_cache=False).logits, random_batches(corpus, size)
        ),
        "minikid": (step.tokens for step in steps),
    }


def rates(runs: dict[str, Iterator[int]], steps: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each run in each round; one step before, not counted, warms up."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        next(run)
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.perf_counter()
            tokens = sum(next(run) for _ in range(steps))
            found[name].append(tokens / (time.perf_counter() - began))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2, help="per run and round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--shape", type=int, choices=range(len(SHAPES)), help="one of them alone")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    print("|  | plain loop, tokens/s | transformers, tokens/s | minikid, tokens/s | minikid / plain, target >= 1 |")
    print("| --- | --- | --- | --- | --- |")
    for i, (name, shape) in enumerate(SHAPES.items()):
        if args.shape in (None, i):
            found = rates(runs_of(shape), args.steps, args.rounds)
            ratio = statistics.median(a / b for a, b in zip(found["minikid"], found["plain loop"], strict=True))
            print(f"| {name} | " + " | ".join(f"{statistics.median(x):,.0f}" for x in found.values()), end="")
            print(f" | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
