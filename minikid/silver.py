"""FILCO's files: what a filter leaves of a file's passages, line by line, and training files made of it.

A line of a filter's file is a question in the form that `questions` reads, its `ctxs` the one passage that is left, and

    found      whether a sentence passed, or the whole top passage stayed
    words      numbers of words [before, behind]: |P| and |t|
    settings, record    digests, as in the lines of evaluate.py

A run that was stopped goes on from the lines that are there. Training files hold {"prompt", "completion"} lines:
(q, P) -> t for M_ctx, (t, q) -> o for M.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from minikid import weights
from minikid.arguments import count, positive
from minikid.files import replacing
from minikid.filter import (
    MEASURES,
    Reader,
    Selection,
    context_prompt,
    filter_by_model,
    one_line,
    saving,
    select,
    with_context,
    word_counts,
)
from minikid.model import load
from minikid.passages import Passage
from minikid.questions import Question, digest, read_questions
from minikid.results import keep_lines, kept_lines

FIELDS = ("index", "record", "settings", "ctxs", "found", "words")
BATCH = 8

Filter = Callable[[Sequence[Question]], list[Selection]]


def oracle(
    measure: str,
    k: int | None = None,
    reader: Reader | None = None,
    with_question: bool = False,
    chat: bool | None = None,
) -> Filter:
    """The filter that knows the answers; arguments as of `select`."""

    def run(questions: Sequence[Question]) -> list[Selection]:
        return [select(measure, q.ctxs[:k], q.question, q.answers, reader, with_question, chat) for q in questions]

    return run


def trained(reader: Reader, k: int | None = None) -> Filter:
    """The filter that M_ctx is: it is given questions and passages, and no answers; in its template if it has one."""

    def run(questions: Sequence[Question]) -> list[Selection]:
        return filter_by_model(reader, [(question.question, question.ctxs[:k]) for question in questions])

    return run


def filter_questions(
    path: Path,
    questions: Sequence[Question],
    settings: Mapping[str, Any],
    run: Filter,
    k: int | None = None,
    pass_over: bool = False,
) -> list[dict[str, Any]]:
    """The lines of all questions, of which those that the file has not yet are made and added to it.

    ValueError, and the file is left alone, where a line was made with other settings or from another record. ValueError
    for a question that the filter has no room for, too; with `pass_over` its line has the reason as "error" instead.
    """

    def make(batch: Sequence[Question]) -> list[dict[str, Any]]:
        try:
            found = run(batch)
        except ValueError as error:
            if len(batch) > 1:  # which of them?
                return [line for question in batch for line in make([question])]
            if not pass_over:
                raise ValueError(f"{batch[0].place}: {error}") from None
            return [{"ctxs": [], "found": False, "words": [0, 0], "error": str(error)}]
        return [_line(question, selection, k) for question, selection in zip(batch, found, strict=True)]

    def batches(todo: Sequence[Question]) -> Iterator[Sequence[Question]]:
        return (todo[start : start + BATCH] for start in range(0, len(todo), BATCH))

    return keep_lines(path, digest(settings), questions, batches, make, FIELDS)


def _line(question: Question, selection: Selection, k: int | None) -> dict[str, Any]:
    ctxs = [{"title": passage.title, "text": passage.text} for passage in selection.passages]
    return {"ctxs": ctxs, "found": selection.found, "words": word_counts(question.ctxs[:k], selection)}


def passages_of(line: Mapping[str, Any]) -> list[Passage]:
    """What the filter left."""
    return [Passage(str(i), ctx["title"], ctx["text"]) for i, ctx in enumerate(line["ctxs"])]


# --- training files


def training_examples(
    questions: Iterable[Question], lines: Mapping[int, Mapping[str, Any]], k: int | None = None
) -> Iterator[tuple[dict[str, str], dict[str, str]]]:
    """({"prompt", "completion"} of M_ctx, the same of M) of each question that has a line, an answer and a passage.

    The answer is the first that has text.
    """
    for question in questions:
        answer = next((one_line(answer) for answer in question.answers if answer.strip()), None)
        left = passages_of(lines.get(question.index, {"ctxs": []}))
        if answer is None or not left:
            continue
        context = context_prompt(question.question, question.ctxs[:k])
        yield (
            {"prompt": context, "completion": f" {one_line(left[0].text)}"},
            {"prompt": with_context(question.question, left), "completion": f" {answer}"},
        )


def _write(path: Path, examples: Iterable[Mapping[str, str]]) -> None:
    """JSON lines, in one step."""
    with replacing(path) as new, new.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(example, ensure_ascii=False) + "\n" for example in examples)


# --- the program


def _oracle(options: argparse.Namespace) -> None:
    questions = list(islice(read_questions(options.data), options.limit))
    reader = load(options.model, options.device) if options.measure == "cxmi" else None
    settings = {"measure": options.measure, "k": options.k, "with_question": options.with_question}
    settings |= {"model": options.model} if reader else {}
    run = oracle(options.measure, options.k, reader, options.with_question)
    lines = filter_questions(options.out, questions, settings, run, options.k)
    print(saving([line["words"] for line in lines], [line["found"] for line in lines]), file=sys.stderr)


def _training(options: argparse.Namespace) -> None:
    if not (options.context or options.answer):
        raise ValueError("expected --context FILE, --answer FILE or both: what shall be written?")
    questions = list(islice(read_questions(options.data), options.skip, options.limit))
    if not questions:
        raise ValueError(f"{options.data}: no questions from number {options.skip} on, before --limit {options.limit}")
    if not options.silver.is_file():
        raise ValueError(f"{options.silver}: no such file; run `python -m minikid.filter oracle` first")
    lines = kept_lines(options.silver, None, questions, FIELDS)
    examples = list(training_examples(questions, lines, options.k))
    if not examples:
        raise ValueError(f"{options.silver}: no line belongs to a question of {options.data}; make it of this file")
    for path, side in ((options.context, 0), (options.answer, 1)):
        if path:
            _write(path, [pair[side] for pair in examples])
    print(f"{len(examples)} examples of {len(questions)} questions", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minikid.filter", description="FILCO's oracles and training files.")
    commands = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("data", type=Path, metavar="DATA", help="questions with answers and ctxs, as evaluate.py's")
    shared.add_argument("--limit", type=positive, metavar="N", help="only the first N questions")
    shared.add_argument("-k", type=positive, metavar="K", help="only the first K passages of each")

    find = commands.add_parser("oracle", parents=[shared], help="choose a sentence by the gold answers")
    find.set_defaults(run=_oracle)
    find.add_argument("--measure", choices=MEASURES, required=True)
    find.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines; a stopped run goes on there")
    find.add_argument("--with-question", action="store_true", help="lexical: compare with question and answer together")
    find.add_argument("--model", default=weights.DEFAULT, metavar="NAME|DIR", help="cxmi's M (default: %(default)s)")
    find.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")

    train = commands.add_parser("training", parents=[shared], help="write files that train.py reads")
    train.set_defaults(run=_training)
    train.add_argument("silver", type=Path, metavar="SILVER", help="what oracle wrote for DATA")
    train.add_argument("--skip", type=count, default=0, metavar="N", help="leave the first N questions out")
    train.add_argument("--context", type=Path, metavar="FILE", help="for M_ctx: (question, passages) -> sentence")
    train.add_argument("--answer", type=Path, metavar="FILE", help="for M: (sentence, question) -> answer")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; the exit code: 0 done, 1 failed with a message on standard error, 2 bad usage."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"minikid.filter: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 1
    return 0
