"""How KID's quality moves with sigma, with h_max and with the number of passages k: the paper's Figure 2, and ours.

    python bench/kid_curves.py DATA.jsonl --out DIR --limit 200         about 25 runs of KID, evaluate.py's options
    python bench/kid_curves.py DATA.jsonl --out DIR --curves h_max,k    only these

The knowledge of the curves over sigma and h_max are a record's own passages. Those of the curve over k are the first k
that BM25 finds for the question among the passages of all records. As in the paper (A.2.2) w_max is set to h_max on
that curve; else all is as the options and their defaults say. Cov is always measured against the record's own passages.

The paper's figure shows ROUGE-L on ELI5 for a model that was fine-tuned, and gives as numbers only where it is best:
k = 5 and h_max = 4; sigma is 0.02 there throughout. Prints a table; DIR/kid_curves.png has the curves with their 95%
intervals. DIR also keeps the generations, so that a run that was stopped goes on.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import evaluate
from minikid import metrics, options
from minikid.knowledge import KnowledgeTrie
from minikid.model import load
from minikid.passages import Passage
from minikid.questions import Question, digest, read_questions
from minikid.results import compare
from minikid.retrieve import BM25

CURVES = {"sigma": (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 3.0, 5.0), "h_max": range(1, 6), "k": range(1, 11)}
PAPER = {"sigma": (0.02, "the paper's choice"), "h_max": (4, "best in the paper"), "k": (5, "best in the paper")}
COLUMNS = ("ROUGE-L", "Cov", "F1", "tokens per second")


def changed(args: argparse.Namespace, curve: str, value: float) -> argparse.Namespace:
    changes = {"sigma": {"sigma": value}, "h_max": {"hops": value, "window": value}, "k": {"k": value}}
    return argparse.Namespace(**vars(args) | changes[curve])


def with_retrieved(path: Path, questions: Sequence[Question], k: int) -> list[Question]:
    """The questions with k passages from the whole file, best first, in place of their own."""
    texts = dict.fromkeys((ctx.title, ctx.text) for question in read_questions(path) for ctx in question.ctxs)
    index = BM25([Passage(str(i), *both) for i, both in enumerate(texts)])
    return [
        replace(question, ctxs=[hit.passage for hit in index.search(question.question, k)]) for question in questions
    ]


def lines_of(
    args: argparse.Namespace, model: tuple, name: str, questions: Sequence[Question], own: Sequence[Question]
) -> list[dict[str, Any]]:
    """What a decoder gives, in a folder of its own for these settings and passages; scored against the own passages."""
    folder = digest([evaluate.settings_of(args, name), [question.digest for question in questions]])
    args = argparse.Namespace(**vars(args) | {"out": args.out / folder})
    args.out.mkdir(parents=True, exist_ok=True)
    lines = evaluate.run_decoder(evaluate.Setup(args, *model), name, questions)
    for line, question in zip(lines, own, strict=True):
        provenance = metrics.provenance_stems(KnowledgeTrie.from_text(question.ctxs).triples)
        line["scores"] = metrics.score(line["text"], question.answers, provenance)
    return lines


def show(results: dict[str, Any], runs: Sequence[tuple[str, float]]) -> None:
    cells = [["curve", "value", *COLUMNS, "ROUGE-L - sampling", "the paper, ELI5"]]
    for name, curve, value in [("sample", "sampling", ""), *((f"{c} {v}", c, v) for c, v in runs)]:
        row = [results["decoders"][name][column] for column in COLUMNS]
        row.append(results["differences"][f"{name}-sample"]["ROUGE-L"] if value else None)
        shown = ["" if e is None else "{mean:.1f} [{low:.1f}, {high:.1f}]".format(**e) for e in row]
        cells.append([curve, str(value), *shown, PAPER[curve][1] if value and PAPER[curve][0] == value else ""])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    for row in cells:
        print("| " + " | ".join(map(str.ljust, row, widths)) + " |")


def plot(results: dict[str, Any], curves: Sequence[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(5 * len(curves), 3.6), squeeze=False)
    for curve, left in zip(curves, axes[0], strict=True):
        right = left.twinx()
        for axis, metric, colour in ((left, "ROUGE-L", "tab:blue"), (right, "Cov", "tab:orange")):
            found = [results["decoders"][f"{curve} {value}"][metric] for value in CURVES[curve]]
            if any(estimate["mean"] is None for estimate in found):
                continue
            lows, means, highs = ([estimate[key] for estimate in found] for key in ("low", "mean", "high"))
            axis.plot(CURVES[curve], means, color=colour, marker="o", markersize=4)
            axis.fill_between(CURVES[curve], lows, highs, color=colour, alpha=0.15, linewidth=0)
            baseline = results["decoders"]["sample"][metric]["mean"]
            axis.axhline(baseline, color=colour, linestyle="--", linewidth=1)
            axis.set_ylabel(f"{metric} (dashed: sampling)", color=colour)
        value, remark = PAPER[curve]
        left.axvline(value, color="grey", linestyle=":")
        left.annotate(remark, (value, 0.03), xycoords=("data", "axes fraction"), rotation=90, color="grey", fontsize=8)
        left.set_xlabel("sigma, nats per step" if curve == "sigma" else curve)
        if curve == "sigma":
            left.set_xscale("log")
        left.set_xticks(CURVES[curve], map(str, CURVES[curve]), minor=False)
        left.set_xticks([], minor=True)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--curves", default=",".join(CURVES))
    own, rest = parser.parse_known_args()
    curves = own.curves.split(",")
    if unknown := [curve for curve in curves if curve not in CURVES]:
        parser.error(f"--curves: expected names of {', '.join(CURVES)} with commas between, got {unknown[0]!r}")
    args = evaluate.parse(["--decoders", "sample,kid", *rest])
    torch.set_num_threads(2)
    questions = list(islice(read_questions(args.data), args.limit))
    model = load(args.model, args.device, options.DTYPES[args.dtype])
    knowledge = dict.fromkeys(curves, questions)
    if "k" in curves:
        knowledge["k"] = with_retrieved(args.data, questions, max(CURVES["k"]))
    points = [(curve, value) for curve in curves for value in CURVES[curve]]
    runs = {"sample": lines_of(args, model, "sample", questions, questions)}
    for curve, value in points:
        evaluate.note(f"{curve} = {value}")
        runs[f"{curve} {value}"] = lines_of(changed(args, curve, value), model, "kid", knowledge[curve], questions)
    results = compare(runs, args.seed)
    show(results, points)
    plot(results, curves, args.out / "kid_curves.png")


if __name__ == "__main__":
    main()
