"""Accuracy of rethinking with retrieval on yes/no questions, and the time of N reasoning paths beside one.

    python bench/rethink.py --out runs/rethink             72 two-hop questions, all methods on the same sampled paths
    python bench/rethink.py --timing                       1 and 9 paths, in the same run

Paths, scores of facts and answers of variants are kept in OUT; a run that was stopped goes on from there. Evidence is
searched for among the passages of all questions (RR 4.2) or, with --own, of each question
alone (RR 5.3). No answer counts as a wrong one.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minikid import chain, metrics, weights
from minikid.decode import Sampler
from minikid.encoder import load_encoder
from minikid.model import load
from minikid.nli import CrossEncoder, LanguageModelNLI
from minikid.passages import Passage
from minikid.questions import Question, read_questions
from minikid.rethink import Evidence, Fact, Rethought, majority, rethink
from minikid.rethinker import Rethinker
from minikid.retrieve import BM25

HERE = Path(__file__).parent
PATHS, LENGTH, TEMPERATURE = 9, 96, 0.7  # RR 4.5, of 256 tokens there


class Silent:
    """An NLI that finds everything neutral: what similarity alone does."""

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        return torch.tensor([[0.0, 1.0, 0.0]]).repeat(len(pairs), 1)


def kept(path: Path, questions: list[Question], make: Callable[[Question], dict]) -> dict[Any, dict]:
    """The records of the questions by their ids, made and written one by one where the file has none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = {record["id"]: record for record in map(json.loads, lines)}
    with path.open("a", encoding="utf-8") as file:
        for question in tqdm([q for q in questions if q.id not in records], desc=path.stem, unit="question"):
            records[question.id] = {"id": question.id, **make(question)}
            file.write(json.dumps(records[question.id], ensure_ascii=False) + "\n")
            file.flush()
    return records


def accuracy(args: argparse.Namespace) -> None:
    questions = list(read_questions(args.data))[: args.limit]
    model, tokenizer = load(args.model)
    if args.nli == "none":
        nli = Silent()
    else:
        nli = CrossEncoder.from_folder(args.nli) if args.nli else LanguageModelNLI(model, tokenizer)
    shown, ends = chain.read_demonstrations(task="yes-no"), chain.line_ends(tokenizer)
    rr = Rethinker(model, tokenizer, load_encoder(), nli, shown, ends, form=args.form)
    corpus = BM25([passage for question in questions for passage in question.ctxs])
    args.out.mkdir(parents=True, exist_ok=True)

    def sample(question: Question) -> dict:
        greedy, rows = rr.greedy(question.question), rr.sample(question.question, args.seed)
        return {"greedy": rr.text(greedy), "paths": [rr.text(row) for row in rows]}

    def score(question: Question) -> dict:
        facts = [fact for text in paths[question.id]["paths"] for fact in chain.parse(text).facts]
        return {"facts": live(question)(list(dict.fromkeys(facts)))}

    def live(question: Question) -> Evidence:
        return rr.judge(BM25(question.ctxs) if args.own else corpus)

    def rethought(question: Question, form: int) -> Rethought:
        kept_facts = (Fact(text, p and Passage(*p), *scores) for text, p, *scores in judged[question.id]["facts"])
        facts = {fact.text: fact for fact in kept_facts}
        return rethink(paths[question.id]["paths"], lambda texts: [facts[text] for text in texts], form)

    def vary(question: Question) -> dict:
        found, judge, record = rethought(question, args.form), live(question), {}
        for variant in ("selection", "generation"):
            conclusion, facts = rr.conclude(question.question, found, judge, variant)
            record[variant] = {"text": conclusion and conclusion.text, "facts": [fact.text for fact in facts]}
        return record

    def infer(question: Question) -> dict:
        facts = [Fact(passage.text, passage, 0.0, 0.0, 0.0) for passage in question.ctxs]
        return {"text": rr.infer(question.question, facts).text}

    name = ("own" if args.own else "corpus") + (f"-{Path(args.nli).name}" if args.nli else "")
    paths = kept(args.out / "paths.jsonl", questions, sample)
    judged = kept(args.out / f"{name}.jsonl", questions, score)
    varied = {} if args.no_variants else kept(args.out / f"{name}-variants-f{args.form}.jsonl", questions, vary)

    gold = {} if args.no_variants else kept(args.out / "gold.jsonl", questions, infer)

    def stated(text: str | None) -> str | None:
        answer = chain.parse(text or "").answer
        return answer and chain.normalise(answer)

    rows = []
    for question in questions:
        found = {form: rethought(question, form) for form in (1, 2, 3)}
        votes = majority([path.answer for path in found[1].paths])
        answers = {"greedy CoT": stated(paths[question.id]["greedy"]), "self-consistency": next(iter(votes), None)}
        answers |= {f"RR f{form}": result.answer for form, result in found.items()}
        for form, result in found.items():
            answers[f"best path f{form}"] = None if result.best is None else result.paths[result.best].answer
        for title, variant in (("Variant I", "selection"), ("Variant II", "generation")) if varied else ():
            answers[f"{title} f{args.form}"] = stated(varied[question.id][variant]["text"])
        if gold:
            answers["inference from the passages"] = stated(gold[question.id]["text"])
        any_right = chain.normalise(question.answers[0]) in [path.answer for path in found[1].paths]
        rows.append(answers | {"any path right (oracle)": question.answers[0] if any_right else None})
    table(rows, [chain.normalise(question.answers[0]) for question in questions], args.seed)


def table(answers: list[dict], wanted: list[str], seed: int) -> None:
    """Accuracies with 95% bootstrap intervals, and each method's difference from self-consistency, paired."""
    resampled = metrics.resamples(len(wanted), seed)
    right = {
        name: [100.0 * (given[name] == answer) for given, answer in zip(answers, wanted, strict=True)]
        for name in answers[0]
    }
    means = {name: metrics.resampled_means(values, resampled) for name, values in right.items()}
    print(f"{len(wanted)} questions, {wanted.count('yes')} of them with the answer yes\n")
    print("| method | accuracy | minus self-consistency | yes, no, neither |\n|---|---|---|---|")
    for name, mean in means.items():
        cells = [metrics.Estimate.of(values) for values in (mean, mean - means["self-consistency"])]
        shown = ["{:.1f} [{:.1f}, {:.1f}]".format(*cell) for cell in cells]
        said = [given[name] for given in answers]
        counts = said.count("yes"), said.count("no"), len(said) - said.count("yes") - said.count("no")
        print(f"| {name} | {' | '.join(shown)} | {', '.join(map(str, counts))} |")


def timing(args: argparse.Namespace) -> None:
    model, tokenizer = load(args.model)
    prompt = chain.cot_prompt(tokenizer, chain.read_demonstrations(task="yes-no"), "Did Aristotle use a laptop?")
    model.config = replace(model.config, eos_ids=())  # all paths run to their full length
    seconds = {1: [], PATHS: []}
    for _ in range(args.repeat + 1):
        for n, times in seconds.items():
            began = time.perf_counter()
            rows = chain.sample_chains(model, prompt, [], Sampler(TEMPERATURE), n, LENGTH, seed=args.seed)
            times.append(time.perf_counter() - began)
            assert sum(row.forwarded for row in rows) == len(prompt) + n * (LENGTH - 1)
    one, many = (statistics.median(times[1:]) for times in seconds.values())
    print(f"| paths | seconds (median of {args.repeat}) | ratio |\n|---|---|---|\n| 1 | {one:.2f} | 1 |")
    print(f"| {PATHS} | {many:.2f} | {many / one:.2f} |")
    print(f"prompt of {len(prompt)} tokens, paths of {LENGTH}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=HERE / "rethink_questions.jsonl")
    parser.add_argument("--out", type=Path, default=Path("runs/rethink"))
    parser.add_argument("--model", default=weights.DEFAULT)
    parser.add_argument("--nli", metavar="DIR", help="a cross-encoder, or none; default: the model itself")
    parser.add_argument("--form", type=int, default=1, help="of the variants (default: 1)")
    parser.add_argument("--own", action="store_true", help="search each question's own passages alone")
    parser.add_argument("--no-variants", action="store_true")
    parser.add_argument("--limit", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    timing(args) if args.timing else accuracy(args)


if __name__ == "__main__":
    main()
