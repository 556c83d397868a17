"""Measure decoding with the default model: speed beside transformers and the memory's, KID's steps, memory, start.

    python bench/decode.py                 two threads, 64 tokens, 7 rounds: about 10 minutes

What is compared runs in turns within each round, so that noise hits all alike; ratios are taken round by round, and
medians are printed. Best of all on a machine that does nothing else.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minikid import options, weights
from minikid.decode import KID, Sampler, Update, Vanilla, generate, generate_on_cache, greedy
from minikid.model import GPT, load
from minikid.retrieve import BM25

QUESTION = "Does marijuana impair driving ability?"
ROOT = Path(__file__).resolve().parent.parent
THREADS = 2


class Timed:
    """A policy that adds up the seconds spent in its calls."""

    def __init__(self, policy):
        self.policy, self.seconds, self.start = policy, 0.0, policy.start

    def __call__(self, *args):
        began = time.perf_counter()
        result = self.policy(*args)
        self.seconds += time.perf_counter() - began
        return result


def seconds_of(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def in_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each run in each round; one round before, not counted, warms everything up."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name].append(seconds_of(run))
    return seconds


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median of a / b, round by round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def read_bandwidth() -> float:
    """Bytes per second that the cores read from memory together: the best of ten sums over 1 GiB."""
    numbers = torch.rand(2**28)  # equal pages could be shared
    return numbers.nbytes / min(seconds_of(numbers.sum) for _ in range(10))


def read_per_token(model: GPT) -> int:
    """Bytes of weights that a step of one token reads: all but the embeddings, of which it reads one row."""
    parts = [module for module in model.modules() if not isinstance(module, torch.nn.Embedding)]
    return sum(p.nbytes for module in parts for p in module.parameters(recurse=False))


def plain(tokens: int, rounds: int) -> list[list]:
    """Greedy decoding in float32 and bfloat16 beside transformers' `generate` in float32, and beside reading alone."""
    folder = weights.resolve()
    ours, tokenizer = load(folder)
    narrow, _ = load(folder, dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = tokenizer.prompt(QUESTION, chat=True)
    outputs = {}

    def run(name: str, model: GPT) -> None:
        outputs[name] = generate(model, prompt, Vanilla(), greedy, max_new_tokens=tokens, eos_ids=()).tokens

    def reference() -> None:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        out = theirs.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **length)
        outputs["reference"] = out[0, len(prompt) :].tolist()

    runs = {
        "reference": reference,
        "float32": lambda: run("float32", ours),
        "bfloat16": lambda: run("bfloat16", narrow),
    }
    seconds = in_turns(runs, rounds)
    bandwidth = read_bandwidth()
    same = next(
        (i for i, (a, b) in enumerate(zip(outputs["float32"], outputs["reference"], strict=True)) if a != b), tokens
    )
    rows = [["transformers float32, tokens/s", tokens / statistics.median(seconds["reference"]), None]]
    for name, model, target in (("float32", ours, 1.5), ("bfloat16", narrow, 2.2)):
        rate, floor = tokens / statistics.median(seconds[name]), bandwidth / read_per_token(model)
        rows += [
            [f"minikid {name}, tokens/s", rate, None],
            [f"minikid {name} / transformers", ratio(seconds["reference"], seconds[name]), f">= {target}"],
            [f"minikid {name}, share of the memory floor ({floor:.1f} tokens/s)", rate / floor, None],
        ]
    rows.append(["read bandwidth, GB/s", bandwidth / 1e9, None])
    rows.append([f"first tokens of {tokens} equal to transformers', float32", same, f"{tokens}"])
    return rows


def infused(tokens: int, rounds: int) -> list[list]:
    """Sampling, and KID in all its forms, per token; the same prompt, built-in knowledge and sampler."""
    model, tokenizer = load()
    found, _ = options.read_knowledge([options.builtin_knowledge()])
    knowledge = options.build_trie([hit.passage for hit in BM25(found).search(QUESTION, 5)], [])
    prompt, sampler = tokenizer.prompt(QUESTION, chat=True), Sampler(top_k=20, top_p=0.9)
    common = {"sampler": sampler, "max_new_tokens": tokens, "eos_ids": ()}

    def kid(**update) -> KID:
        return KID(knowledge, tokenizer, Update(**update), hops=2, question=QUESTION)

    policies = {
        "sampling": Timed(Vanilla()),
        "KID exact, beta solved": Timed(kid(sigma=0.3)),
        "KID exact, beta adapted": Timed(kid(rule="adapt", sigma=0.3)),
        "KID adam, K = 3, beta adapted": Timed(kid(optimiser="adam", rule="adapt", sigma=0.3)),
        "KID adam, K = 3, beta solved": Timed(kid(optimiser="adam", sigma=0.3)),
    }
    on_cache = kid(rule="fixed", beta=0.01)

    def run(policy: Timed) -> None:
        generate(model, prompt, policy, generator=torch.Generator().manual_seed(0), **common)

    runs = {name: (lambda policy=policy: run(policy)) for name, policy in policies.items()}
    runs["KID cache, K = 3"] = lambda: generate_on_cache(
        model, prompt, on_cache, generator=torch.Generator().manual_seed(0), **common
    )
    seconds = in_turns(runs, rounds)
    targets = {name: "<= 1.10" if "exact" in name else "<= 1.25" if "adam" in name else None for name in runs}
    rows = []
    for name, times in seconds.items():
        rows.append([f"{name}, ms/token", 1000 * statistics.median(times) / tokens, None])
        if name == "sampling":
            continue
        rows.append([f"{name} / sampling", ratio(times, seconds["sampling"]), targets[name]])
        if name in policies:
            spent = 1000 * policies[name].seconds / (tokens * (rounds + 1))
            rows.append([f"{name}, ms/token within the policy", spent, None])
    return rows


def whole_run(rounds: int) -> list[list]:
    """The command itself in fresh processes: seconds to the first byte of text, and peak memory.

    Measured before a model is loaded here: a process begins with the peak of the one that starts it.
    """
    rows = []
    for dtype in ("float32", "bfloat16"):
        command = [
            sys.executable,
            str(ROOT / "generate.py"),
            "--decoder",
            "kid",
            "--max-new-tokens",
            "40",
            "--dtype",
            dtype,
        ]
        firsts, peaks = [], []
        for _ in range(rounds + 1):
            began = time.perf_counter()
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
                process.stdout.read(1)
                firsts.append(time.perf_counter() - began)
                process.stdout.read()
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            if process.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}")
            peaks.append(usage.ru_maxrss * 1024)
        rows.append([f"generate.py {dtype}, s to the first text, warm", statistics.median(firsts[1:]), "<= 5"])
        rows.append([f"generate.py {dtype}, peak memory, GB", max(peaks) / 1e9, "< 1.3"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(THREADS)
    started = whole_run(3)
    rows = [*plain(args.tokens, args.rounds), *infused(args.tokens, args.rounds), *started]
    print("|  | measured | target |\n| --- | --- | --- |")
    for name, value, target in rows:
        print(f"| {name} | {value:.3g} | {target or '-'} |")


if __name__ == "__main__":
    main()
