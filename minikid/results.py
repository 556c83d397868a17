"""What runs of decoders leave behind: a file of lines for each, the results computed from them, and their table.

A line is one generation of one question, a JSON object: `index` and `record`, the question's number and digest;
`settings`, the digest of all settings it depends on; `scores`, as `metrics.score` gives them; `tokens` and `forwarded`,
numbers of tokens; `seconds`; and what else a reader may want.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from minikid import metrics
from minikid.files import replacing
from minikid.questions import Question

FIELDS = ("index", "record", "settings", "scores", "tokens", "forwarded", "seconds")


def keep_lines(
    path: Path,
    settings: str,
    questions: Sequence[Question],
    batches: Callable[[list[Question]], Iterable[Sequence[Question]]],
    make: Callable[[Sequence[Question]], list[dict[str, Any]]],
    fields: Sequence[str] = FIELDS,
) -> list[dict[str, Any]]:
    """The lines of all questions in their order; those that the file has not yet are made and added, batch by batch.

    `batches` cuts the questions that are left, `make` gives a batch's lines less what tells question and settings.
    """
    lines = kept_lines(path, settings, questions, fields)
    todo = [question for question in questions if question.index not in lines]
    bar = tqdm(total=len(questions), initial=len(questions) - len(todo), desc=path.stem, unit="question")
    with bar, path.open("a", encoding="utf-8") as file:
        for batch in batches(todo):
            for question, made in zip(batch, make(batch), strict=True):
                about = {"index": question.index, "id": question.id, "question": question.question}
                about |= {"answers": question.answers, "settings": settings, "record": question.digest}
                lines[question.index] = about | made
                file.write(json.dumps(lines[question.index], ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(batch))
    return [lines[question.index] for question in questions]


def kept_lines(
    path: Path, settings: str | None, questions: Sequence[Question], fields: Sequence[str] = FIELDS
) -> dict[int, dict[str, Any]]:
    """The lines of an earlier run by question number, none without a file; a last line that a kill tore is cut off.

    ValueError, and the file is left alone, where a line was made with other settings (None: than the first), from
    another record than the question's, or by another program, so that it lacks one of the fields.
    """
    if not path.exists():
        return {}
    *whole, torn = path.read_bytes().split(b"\n")
    records = {question.index: question.digest for question in questions}
    lines: dict[int, dict[str, Any]] = {}
    for number, raw in enumerate(whole, start=1):
        line = _read_line(raw, fields)
        if line is not None and settings is None:
            settings = line["settings"]
        if line is None or (line["settings"], line["record"]) != (settings, records.get(line["index"], line["record"])):
            came = "not a line of results" if line is None else "made with other settings or from other data"
            raise ValueError(f"{path}:{number}: {came}; choose another --out, or move this file away")
        lines[line["index"]] = line
    if torn:
        if not torn.startswith(b"{"):
            raise ValueError(f"{path}: not a file of results; choose another --out, or move this file away")
        os.truncate(path, path.stat().st_size - len(torn))
    return lines


def _read_line(raw: bytes, fields: Sequence[str]) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and line.keys() >= set(fields) else None


def compare(runs: Mapping[str, Sequence[Mapping[str, Any]]], seed: int) -> dict[str, Any]:
    """Means, and the differences of every two decoders, with intervals, of the lines of each decoder.

    Line i of each decoder belongs to question i and holds `scores`, as `score` gives them, the numbers `tokens` and
    `forwarded`, and `seconds`. An undefined mean is three times None. ValueError for runs of different questions.
    """
    # decoders x n lines -> {"decoders", "differences", "undefined", "n"}
    sizes = {len(lines) for lines in runs.values()}
    if len(sizes) != 1 or 0 in sizes:
        raise ValueError(f"expected as many lines of each decoder, at least one, got {sorted(sizes)}")
    weights = metrics.resamples(min(sizes), seed)
    means = {name: _means(lines, weights) for name, lines in runs.items()}
    differences = {(a, b): {m: x - means[b][m] for m, x in means[a].items()} for a, b in permutations(means, 2)}
    return {
        "decoders": {name: _estimates(by_metric) for name, by_metric in means.items()},
        "differences": {f"{a}-{b}": _estimates(by_metric) for (a, b), by_metric in differences.items()},
        "undefined": {name: {m: v.count(None) for m, v in _scores(lines).items()} for name, lines in runs.items()},
        "n": min(sizes),
    }


def _scores(lines: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    metrics_named = dict.fromkeys(metric for line in lines for metric in line["scores"])
    return {metric: [line["scores"].get(metric) for line in lines] for metric in metrics_named}


def _means(lines: Sequence[Mapping[str, Any]], weights: np.ndarray) -> dict[str, np.ndarray]:
    """For each metric its mean in each resample."""
    # n lines, [1 + R, n] -> [1 + R] each
    tokens, seconds, forwarded = ([line[key] for line in lines] for key in ("tokens", "seconds", "forwarded"))
    return {
        **{metric: metrics.resampled_means(values, weights) for metric, values in _scores(lines).items()},
        "tokens per second": metrics.resampled_means(tokens, weights, per=seconds),
        "tokens forwarded": metrics.resampled_means(forwarded, weights),
    }


def _estimates(means: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    nothing = dict.fromkeys(metrics.Estimate._fields)
    found = {metric: metrics.Estimate.of(values) for metric, values in means.items()}
    return {metric: nothing if estimate is None else estimate._asdict() for metric, estimate in found.items()}


def table(results: Mapping[str, Any], order: Iterable[str]) -> str:
    """What `compare` gives as a Markdown table with one decimal: means and intervals of each decoder in the order, then
    of each pair of them, the one further down minus the one further up; last how many scores are undefined.
    """
    names = [name for name in order if name in results["decoders"]]
    pairs = [(b, a) for i, a in enumerate(names) for b in names[i + 1 :]]
    rows = [(name, results["decoders"][name]) for name in names]
    rows += [(f"{b} - {a}", results["differences"][f"{b}-{a}"]) for b, a in pairs]
    cells = [["", *rows[0][1]], *([name, *map(_cell, row.values())] for name, row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    for name in names:
        missing = ", ".join(f"{metric} {n}" for metric, n in results["undefined"][name].items() if n)
        lines += [f"undefined for {name}, of {results['n']}: {missing}"] if missing else []
    return "\n".join(lines)


def write_results(path: Path, results: Mapping[str, Any]) -> None:
    """As JSON, in one step: a reader sees the old file or the new one."""
    with replacing(path) as new, new.open("w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)


def _cell(estimate: dict[str, float | None]) -> str:
    return "undefined" if estimate["mean"] is None else "{mean:.1f} [{low:.1f}, {high:.1f}]".format(**estimate)
