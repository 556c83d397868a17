"""FILCO, measured: answers from whole passages against answers from what each filter leaves of them.

    python bench/filter.py nq.jsonl --limit 200 --filters none,strinc,lexical,cxmi,runs/ctx --no-chat

A model without fine-tuning answers in sentences, which no exact match meets; so M gets two solved examples before the
question, in plain text, and the first line that it writes, greedily, is its answer. With --answer-model it is a model
trained on (t, q) -> o instead, which reads what `python -m minikid.filter training` wrote. Differences are paired by
question, with 95% bootstrap intervals. Tokens are M's: of the passages alone, and of all that it read for an answer;
what a trained filter, or cxmi, reads itself comes on top.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from minikid import metrics, weights
from minikid.decode import Vanilla, generate_batch, greedy
from minikid.filter import (
    MEASURES,
    Reader,
    Selection,
    filter_by_model,
    select,
    string_inclusion,
    with_context,
)
from minikid.metrics import Estimate
from minikid.model import load
from minikid.passages import Passage
from minikid.questions import Question, digest, read_questions

BATCH, LENGTH = 16, 24
EXAMPLES = [  # title, text, question, answer
    (
        *("Eiffel Tower", "The Eiffel Tower is a tower on the Champ de Mars in Paris, France, finished in 1889."),
        *("when was the eiffel tower finished", "1889"),
    ),
    (
        *("Moby-Dick", "Moby-Dick; or, The Whale is an 1851 novel by the American writer Herman Melville."),
        *("who wrote the novel moby dick", "Herman Melville"),
    ),
]


def ask(passages: Sequence[Passage], question: str, answer: str = "") -> str:
    blocks = [f"{passage.title}: {passage.text}" for passage in passages]
    return "\n\n".join([*blocks, f"Question: {question}\nAnswer: {answer}".rstrip()])


def prompts_of(reader: Reader, rows: Sequence[Sequence[Passage]], questions: Sequence[Question], trained, chat):
    tokenizer = reader[1]
    if trained:
        texts = [with_context(question.question, row) for question, row in zip(questions, rows, strict=True)]
        return [tokenizer.prompt(text, chat) for text in texts]
    shots = [ask([Passage("", title, text)], question, answer) for title, text, question, answer in EXAMPLES]
    texts = [ask(row, question.question) for question, row in zip(questions, rows, strict=True)]
    return [tokenizer.prompt("\n\n".join([*shots, text]), chat=False) for text in texts]


class Answers:
    """The first line of each greedy answer; what was asked before is remembered, with `path` from run to run."""

    def __init__(self, reader: Reader, name: str, path: Path | None):
        self.reader, self.name, self.path = reader, name, path
        lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
        self.known: dict[str, str] = dict(map(json.loads, lines))

    def __call__(self, prompts: Sequence[list[int]], label: str) -> list[str]:
        model, tokenizer = self.reader
        asked = {digest([self.name, prompt]): prompt for prompt in prompts}
        todo = sorted(asked.keys() - self.known.keys(), key=lambda key: len(asked[key]))
        for start in tqdm(range(0, len(todo), BATCH), desc=label, unit="batch"):
            keys = todo[start : start + BATCH]
            batch = [asked[key] for key in keys]
            rows = generate_batch(model, batch, [Vanilla()] * len(batch), greedy, max_new_tokens=LENGTH)
            texts = [tokenizer.decode(row.tokens).strip().split("\n")[0] for row in rows]
            self.known.update(zip(keys, texts, strict=True))
            if self.path:
                with self.path.open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(pair) + "\n" for pair in zip(keys, texts, strict=True))
        return [self.known[key] for key in (digest([self.name, prompt]) for prompt in prompts)]


def filtered(name: str, reader: Reader, questions: Sequence[Question], chat: bool | None) -> list[Selection]:
    if name == "none":
        return [Selection(question.ctxs, False) for question in questions]
    if name in MEASURES:
        bar = tqdm(questions, desc=name, unit="question")
        return [select(name, q.ctxs, q.question, q.answers, reader, chat=chat) for q in bar]
    context_reader = load(name)
    asked = [(question.question, question.ctxs) for question in questions]
    starts = tqdm(range(0, len(asked), BATCH), desc=name, unit="batch")
    return [s for start in starts for s in filter_by_model(context_reader, asked[start : start + BATCH], chat)]


def cell(estimate: Estimate | None) -> str:
    return "undefined" if estimate is None else f"{estimate.mean:.1f} [{estimate.low:.1f}, {estimate.high:.1f}]"


def line(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def run(options: argparse.Namespace) -> None:
    questions = list(islice(read_questions(options.data), options.limit))
    reader = load(options.model)
    answering = load(options.answer_model) if options.answer_model else reader
    answers = Answers(answering, str(options.answer_model or options.model), options.keep)
    tokenizer = answering[1]
    resampled, base, whole = metrics.resamples(len(questions), seed=0), {}, 0
    head = ["filter", "EM", "F1", "passage tokens", "prompt tokens", "P / t", "answer in t", "sentence found"]
    print(f"{len(questions)} questions, M: {options.answer_model or options.model}\n")
    line(head)
    line(["---"] * len(head))
    for name in options.filters.split(","):
        began, label = time.perf_counter(), {"none": "whole passages"}.get(name, Path(name).name)
        left = filtered(name, reader, questions, options.chat)
        rows = [selection.passages for selection in left]
        prompts = prompts_of(answering, rows, questions, options.answer_model, options.chat)
        texts = answers(prompts, label)
        pairs = list(zip(texts, questions, strict=True))
        scores = {
            "EM": [metrics.best(metrics.exact_match, text, question.answers) for text, question in pairs],
            "F1": [metrics.best(metrics.unigram_f1, text, question.answers) for text, question in pairs],
        }
        means = {metric: metrics.resampled_means(values, resampled) for metric, values in scores.items()}
        tokens = sum(len(tokenizer.encode(passage.text)) for row in rows for passage in row)
        whole = whole or tokens
        left_texts = [" ".join(passage.text for passage in row) for row in rows]
        has = np.mean([string_inclusion(t, q.answers) for t, q in zip(left_texts, questions, strict=True)])
        cells = [cell(Estimate.of(values)) for values in means.values()]
        cells += [f"{tokens / len(rows):.1f}", f"{np.mean([len(prompt) for prompt in prompts]):.1f}"]
        cells += [f"{whole / tokens:.2f}", f"{100 * has:.1f}%", f"{sum(selection.found for selection in left)}"]
        line([label, *cells])
        if base:
            line([f"{label} - whole", *(cell(Estimate.of(means[m] - base[m])) for m in means), *[""] * 5])
        base = base or means
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="questions with short answers and ctxs, as evaluate.py's")
    parser.add_argument("--limit", type=int, default=200, help="the first N questions (default: %(default)s)")
    parser.add_argument("--filters", default="none,strinc,lexical,cxmi", help="also folders of trained filters")
    parser.add_argument("--model", default=weights.DEFAULT, help="M, also of cxmi (default: %(default)s)")
    parser.add_argument("--answer-model", metavar="DIR", help="M trained on (t, q) -> o, which is shown no examples")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep answers there, and ask none of them again")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="as the trained models were trained")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
