"""Measure Ewe's working memory: attention to k units beside plain attention and the k + 1 streams, and whole steps.

    python bench/ewe.py                    two threads, 4 units of 128 tokens, 50 rounds: about a minute

The context is as long as the units together. What is compared runs in turns within each round; ratios are taken round
by round, and medians are printed. Attention is one layer of the default model's shape on random numbers; steps are
whole passes of the default model, everything included.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from decode import in_turns, ratio
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minikid.memory import WorkingMemory, aggregate_attention
from minikid.model import GPT, load

THREADS = 2


def repeated(run: Callable[[], object], times: int) -> Callable[[], None]:
    def runs() -> None:
        for _ in range(times):
            run()

    return runs


def attention(model: GPT, memory: WorkingMemory, rounds: int, T: int) -> list[list]:
    """One layer, T queries at the end of the context: plain, with the memory's bias, and as k + 1 streams."""
    c, M = model.config, memory.slots
    H, K, C, S = c.num_heads, c.num_kv_heads, c.head_dim, 2 * M
    generator = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(1, n, m, C, generator=generator) for n, m in ((H, T), (K, S), (K, S)))
    grouped = q.reshape(1, K, -1, C)
    seen = (torch.arange(S) <= torch.arange(S - T, S)[:, None])[None, None]
    bias = torch.where(seen, F.pad(memory.bias, (0, M)), -torch.inf)
    # the streams are given every query head's keys, so that their copying is not timed
    wide = [t[0].repeat_interleave(H // K, dim=0) for t in (keys, values)]
    parts = list(
        zip(*(t.split([memory.unit_length] * (M // memory.unit_length) + [M], dim=1) for t in wide), strict=True)
    )

    def one_pass(mask: torch.Tensor | None) -> torch.Tensor:
        mask = mask if mask is None or T == 1 else mask.repeat(1, 1, H // K, 1)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)

    def streams() -> torch.Tensor:
        return aggregate_attention(q[0], parts[:-1], parts[-1])

    assert (one_pass(bias).view(H, T, C) - streams()).abs().max() < 1e-5
    times = max(1, 40 // T)  # short turns: noise lasts longer
    runs = {
        "plain": lambda: one_pass(seen if T > 1 else None),
        "memory": lambda: one_pass(bias),
        "streams": streams,
    }
    seconds = in_turns({name: repeated(run, times) for name, run in runs.items()}, rounds)
    head = f"attention, T = {T}: "
    return [
        [f"{head}plain, {S} keys, us", 1e6 * statistics.median(seconds["plain"]) / times, None],
        [f"{head}with the memory / plain", ratio(seconds["memory"], seconds["plain"]), "<= 1.15"],
        [f"{head}k + 1 streams / with the memory", ratio(seconds["streams"], seconds["memory"]), ">= 2"],
    ]


def steps(model: GPT, memory: WorkingMemory, rounds: int) -> list[list]:
    """A token behind as many keys, with and without a memory; a new passage by refreshing and by reading all again."""
    M, L = memory.slots, memory.unit_length
    generator = torch.Generator().manual_seed(0)
    context, both = (torch.randint(model.config.vocab_size, (1, n), generator=generator) for n in (M, 2 * M))
    cache, plain = model.new_cache(), model.new_cache()
    model.hidden(context, cache, memory)
    model.hidden(both, plain)
    passage = both[0, :L].tolist()

    def step(c, m) -> None:
        model(both[:, :1], c, m)
        c.truncate(2 * M)

    def refresh() -> None:
        memory.add(passage)
        step(cache, memory)

    runs = {
        "plain": repeated(lambda: step(plain, None), 8),
        "memory": repeated(lambda: step(cache, memory), 8),
        "refresh": refresh,
        "read again": lambda: model.hidden(both, model.new_cache()),
    }
    seconds = in_turns(runs, rounds)
    return [
        [f"step of one token, plain, {2 * M} keys, ms", 1000 * statistics.median(seconds["plain"]) / 8, None],
        ["step of one token, with the memory / plain", ratio(seconds["memory"], seconds["plain"]), "<= 1.15"],
        [f"refresh of one unit of {L} and a step, ms", 1000 * statistics.median(seconds["refresh"]), None],
        [
            "reading units and context again / refresh and a step",
            ratio(seconds["read again"], seconds["refresh"]),
            None,
        ],
    ]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--units", type=int, default=4, help="k (default: %(default)s)")
    parser.add_argument("--unit-length", type=int, default=128, help="L (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=50, help="of attention; of steps a fifth (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    model, _ = load()
    memory = WorkingMemory(model, args.units, args.unit_length)
    for i in range(args.units):
        memory.add([100 + i] * args.unit_length)
    rows = [row for T in (1, 16, memory.slots) for row in attention(model, memory, args.rounds, T)]
    rows += steps(model, memory, max(1, args.rounds // 5))
    print("|  | measured | target |\n| --- | --- | --- |")
    for name, value, target in rows:
        print(f"| {name} | {value:.3g} | {target or '-'} |")


if __name__ == "__main__":
    main()
