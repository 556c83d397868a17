"""Compare decoders on questions: `python evaluate.py DATA.jsonl --decoders sample,beam,kid --out DIR`.

The table goes to standard output, everything else to standard error; each generation is kept as it is made in
DIR/NAME.jsonl, and a run that was stopped goes on from there. DIR/results.json holds the table in full precision.
"""

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from minikid import metrics, options
from minikid.decode import KID, Generation, LittleKID, Vanilla, beam_search_batch, generate_batch, greedy
from minikid.generation import check_room
from minikid.knowledge import KnowledgeTrie
from minikid.model import GPT, Tokenizer, load
from minikid.passages import Passage


@dataclass(frozen=True)
class Question:
    """One record of the data."""

    index: int  # its number in the file
    place: str  # file:line
    id: Any
    question: str
    answers: list[str]
    ctxs: list[Passage]

    @cached_property
    def digest(self) -> str:
        return digest([self.question, self.answers, self.ctxs])

    @cached_property
    def provenance(self) -> frozenset[str]:
        return metrics.provenance_stems(KnowledgeTrie.from_text(self.ctxs).triples)


@dataclass(frozen=True)
class Setup:
    """What a decoder has to work with."""

    args: argparse.Namespace
    model: GPT
    tokenizer: Tokenizer

    def passages(self, question: Question) -> list[Passage]:
        return question.ctxs if self.args.k is None else question.ctxs[: self.args.k]

    def prompt(self, question: Question, context: bool) -> list[int]:
        text = question.question
        if context or self.args.context:
            text = options.with_context(text, self.passages(question))
        return self.tokenizer.prompt(
            text, self.tokenizer.template is not None if self.args.chat is None else self.args.chat
        )


# --- the decoders: each a function of the setup, questions and their prompts; the table at the end says the rest


def sampled(setup: Setup, questions: Sequence[Question], prompts, policies, sampler=None) -> list[Generation]:
    """One sample per question, whose generator is the same for every decoder."""
    seeds = [np.random.SeedSequence((setup.args.seed % 2**64, question.index)) for question in questions]
    return generate_batch(
        setup.model,
        prompts,
        policies,
        sampler or options.make_sampler(setup.args),
        max_new_tokens=setup.args.max_new_tokens,
        generators=[torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0])) for seed in seeds],
    )


def greedily(setup: Setup, questions: Sequence[Question], prompts) -> list[Generation]:
    return sampled(setup, questions, prompts, [Vanilla()] * len(questions), greedy)


def sample(setup: Setup, questions: Sequence[Question], prompts) -> list[Generation]:
    return sampled(setup, questions, prompts, [Vanilla()] * len(questions))


def beam(setup: Setup, questions: Sequence[Question], prompts) -> list[Generation]:
    best = beam_search_batch(
        setup.model,
        prompts,
        [Vanilla()] * len(questions),
        setup.args.beams,
        max_new_tokens=setup.args.max_new_tokens,
    )
    return [found[0] if found else Generation() for found in best]


def little_kid(setup: Setup, questions: Sequence[Question], prompts) -> list[Generation]:
    update = options.make_update(setup.args)
    tries = [KnowledgeTrie.from_text(setup.passages(question)) for question in questions]
    return sampled(setup, questions, prompts, [LittleKID(trie, setup.tokenizer, update) for trie in tries])


def kid(setup: Setup, questions: Sequence[Question], prompts) -> list[Generation]:
    args = setup.args
    policies = [
        KID(
            KnowledgeTrie.from_text(setup.passages(question)),
            setup.tokenizer,
            options.make_update(args),
            demonstrations=args.demonstrations,
            hops=args.hops,
            window=args.window,
            question=question.question,
        )
        for question in questions
    ]
    return sampled(setup, questions, prompts, policies)


@dataclass(frozen=True)
class Decoder:
    decode: Callable[[Setup, Sequence[Question], list[list[int]]], list[Generation]]
    settings: tuple[str, ...] = ()  # the options that it depends on, apart from those that all depend on
    context: bool = False  # whether the passages stand in the prompt, whatever --context says


COMMON = ("model", "dtype", "chat", "max_new_tokens", "k", "context")
SAMPLING = ("seed", "temperature", "top_k", "top_p")
UPDATE = (*SAMPLING, "reward", "optimiser", "rule", "sigma", "beta", "steps", "lr")
QUERY = (*UPDATE, "demonstrations", "hops", "window")
DECODERS = {
    "greedy": Decoder(greedily),
    "sample": Decoder(sample, SAMPLING),
    "beam": Decoder(beam, ("beams",)),
    "rag": Decoder(sample, SAMPLING, context=True),
    "little-kid": Decoder(little_kid, UPDATE),
    "kid": Decoder(kid, QUERY),
    "kid-rag": Decoder(kid, QUERY, context=True),
}


# --- the data


def read_questions(path: Path, skip_bad: bool, limit: int | None) -> list[Question]:
    """The first records of a JSON lines file, or of one JSON array. ValueError names file and line of a bad one."""
    questions: list[Question] = []
    for index, (line, entry) in enumerate(read_entries(path)):
        if len(questions) == limit:
            break
        try:
            if isinstance(entry, ValueError):
                raise entry
            questions.append(as_question(index, f"{path}:{line}", entry))
        except ValueError as error:
            if not skip_bad:
                raise ValueError(
                    f"{path}:{line}: {error}; mend it, or pass over such records with --skip-bad"
                ) from None
            note(f"skipped {path}:{line}: {error}")
    if not questions:
        raise ValueError(f"{path}: no questions; expected JSON lines or a JSON array of records")
    return questions


def read_entries(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, entry) of each entry; the entry is a ValueError where a line is not JSON."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    yield number, ValueError(f"not JSON: {error}")


def as_question(index: int, place: str, entry: Any) -> Question:
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, came {type(entry).__name__}")
    question, answers, ctxs = entry.get("question"), entry.get("answers"), entry.get("ctxs") or []
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f'expected a string "question" with text in it, came {question!r}')
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f'expected "answers", a list of strings, came {answers!r}')
    if not isinstance(ctxs, list) or not all(isinstance(c, dict) and isinstance(c.get("text"), str) for c in ctxs):
        raise ValueError('expected "ctxs", a list of objects with a string "text"')
    passages = [Passage(str(i), c.get("title") or "", c["text"]) for i, c in enumerate(ctxs)]
    return Question(index, place, entry.get("id", index), question, answers, passages)


# --- the runs


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def finished(path: Path, settings: str, questions: Sequence[Question]) -> dict[int, dict]:
    """What a file of generations holds, by question number; a line that was being written is cut off."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    lines = [json.loads(line) for line in content[:whole].splitlines()]
    expected = {question.index: question.digest for question in questions}
    for line in lines:
        if line["settings"] != settings or line["record"] != expected.get(line["index"], line["record"]):
            raise ValueError(f"{path} was made with other settings or data; choose another --out, or remove it")
    return {line["index"]: line for line in lines}


def run_decoder(setup: Setup, name: str, questions: Sequence[Question]) -> list[dict]:
    """The lines of all questions, in order; those that are not in the file yet are generated and added to it."""
    args, decoder = setup.args, DECODERS[name]
    settings = digest({key: getattr(args, key) for key in (*COMMON, *decoder.settings)})
    path = args.out / f"{name}.jsonl"
    lines = finished(path, settings, questions)
    todo = [question for question in questions if question.index not in lines]
    prompts = {question.index: setup.prompt(question, decoder.context) for question in todo}
    for question in todo:
        try:
            check_room(setup.model, prompts[question.index], args.max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{question.place}: {error}") from None
    rows = max(1, args.batch_size // args.beams) if name == "beam" else args.batch_size
    with path.open("a", encoding="utf-8") as file, tqdm(total=len(questions), desc=name, unit="question") as bar:
        bar.update(len(questions) - len(todo))
        for start in range(0, len(todo), rows):
            batch = todo[start : start + rows]
            began = time.perf_counter()
            generations = decoder.decode(setup, batch, [prompts[question.index] for question in batch])
            seconds = (time.perf_counter() - began) / len(batch)
            for question, generation in zip(batch, generations, strict=True):
                text = setup.tokenizer.decode(generation.tokens)
                line = {
                    "index": question.index,
                    "id": question.id,
                    "question": question.question,
                    "text": text,
                    "answers": question.answers,
                    "scores": metrics.score(text, question.answers, question.provenance),
                    "tokens": len(generation.tokens),
                    "forwarded": generation.forwarded,
                    "seconds": seconds,
                    "settings": settings,
                    "record": question.digest,
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                lines[question.index] = line
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(batch))
    return [lines[question.index] for question in questions]


# --- the results


def summarise(runs: dict[str, list[dict]], seed: int) -> dict:
    n = len(next(iter(runs.values())))
    weights = metrics.resamples(n, seed)
    means: dict[str, dict[str, np.ndarray]] = {}
    for name, lines in runs.items():
        scores = {metric: [line["scores"][metric] for line in lines] for metric in lines[0]["scores"]}
        means[name] = {metric: metrics.resampled_means(values, weights) for metric, values in scores.items()}
        tokens, seconds = ([line[key] for line in lines] for key in ("tokens", "seconds"))
        means[name]["tokens per second"] = metrics.resampled_means(tokens, weights, per=seconds)
        means[name]["tokens forwarded"] = metrics.resampled_means([line["forwarded"] for line in lines], weights)
    return {
        "decoders": {
            name: {m: as_json(values) for m, values in by_metric.items()} for name, by_metric in means.items()
        },
        "differences": {
            f"{a}-{b}": {m: as_json(means[a][m] - means[b][m]) for m in means[a]} for a, b in permutations(means, 2)
        },
        "undefined": {
            name: {m: sum(line["scores"][m] is None for line in lines) for m in lines[0]["scores"]}
            for name, lines in runs.items()
        },
        "n": n,
    }


def as_json(values: np.ndarray) -> dict[str, float | None]:
    estimate = metrics.Estimate.of(values)
    return {"mean": None, "low": None, "high": None} if estimate is None else estimate._asdict()


def table(results: dict) -> str:
    """Means and intervals; each pair of decoders once, the later one of the table of decoders minus the earlier."""
    names = [name for name in DECODERS if name in results["decoders"]]
    rows = [(name, results["decoders"][name]) for name in names]
    rows += [(f"{b} - {a}", results["differences"][f"{b}-{a}"]) for i, a in enumerate(names) for b in names[i + 1 :]]
    cells = [["", *rows[0][1]]] + [[name, *map(cell, row.values())] for name, row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(t.ljust(w) for t, w in zip(row, widths, strict=True)) + " |" for row in cells)


def cell(estimate: dict[str, float | None]) -> str:
    return "undefined" if estimate["mean"] is None else "{mean:.1f} [{low:.1f}, {high:.1f}]".format(**estimate)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evaluate.py", description="Compare decoders on questions with answers.")
    parser.add_argument("data", type=Path, metavar="DATA", help="JSON lines or a JSON array: question, answers, ctxs")
    parser.add_argument("--decoders", default="sample,beam,kid", metavar="NAME,...", help=f"of {', '.join(DECODERS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where generations and results go")
    parser.add_argument("--limit", type=options.count, metavar="N", help="the first N questions (default: all)")
    parser.add_argument("--batch-size", type=options.count, default=32, metavar="B", help="rows at once (default: 32)")
    parser.add_argument("--beams", type=options.count, default=5, metavar="B", help="default: %(default)s")
    parser.add_argument("-k", type=options.count, metavar="K", help="the first K passages (default: all)")
    parser.add_argument("--context", action="store_true", help="the passages in the prompts of all decoders")
    parser.add_argument("--skip-bad", action="store_true", help="pass over records that cannot be used")
    options.add_model_options(parser)
    options.add_decoding_options(parser)
    parser.set_defaults(max_new_tokens=60)
    args = parser.parse_args(argv)
    args.decoders = list(dict.fromkeys(args.decoders.split(",")))
    for name in args.decoders:
        if name not in DECODERS:
            parser.error(f"--decoders: {name!r} is none of {', '.join(DECODERS)}")
    if not args.data.is_file():
        parser.error(f"{args.data}: no such file")
    for name in ("limit", "batch_size", "beams"):
        if getattr(args, name) == 0:
            parser.error(f"--{name.replace('_', '-')}: expected 1 or more")
    try:
        options.settle(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def run(args: argparse.Namespace) -> None:
    questions = read_questions(args.data, args.skip_bad, args.limit)
    setup = Setup(args, *load(args.model, args.device, options.DTYPES[args.dtype]))
    args.out.mkdir(parents=True, exist_ok=True)
    results = summarise({name: run_decoder(setup, name, questions) for name in args.decoders}, args.seed)
    print(table(results))
    new = args.out / "results.json.new"
    new.write_text(json.dumps(results, indent=1), encoding="utf-8")
    os.replace(new, args.out / "results.json")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        note(f"evaluate.py: error: {error}")
        return 1
    except KeyboardInterrupt:
        note("interrupted")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
