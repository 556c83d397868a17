"""Accuracy of rethinking with retrieval on yes/no questions, and the time of N reasoning paths beside one.

    python bench/rethink.py --out runs/rethink             72 two-hop questions, all methods on the same sampled paths
    python bench/rethink.py --timing                       1 and 9 paths, in the same run

Paths are sampled once and kept in OUT/paths.jsonl, the variants' answers in OUT/variants.jsonl; a run that was stopped
goes on from there. Evidence is searched for among the passages of all questions (RR 4.2) or, with --own, of each
question alone (RR 5.3). No answer counts as a wrong one. All settings are printed to standard error.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from minikid import chain, factgen, metrics, weights
from minikid.decode import Sampler
from minikid.encoder import load_encoder
from minikid.model import load
from minikid.nli import CrossEncoder, LanguageModelNLI
from minikid.questions import Question, read_questions
from minikid.rethink import Evidence, majority, rethink, select_facts
from minikid.retrieve import BM25

HERE = Path(__file__).parent
PATHS, LENGTH, TEMPERATURE = 9, 96, 0.7  # RR 4.5, of 256 tokens there


def kept(path: Path, questions: list[Question], make: Callable[[Question], dict]) -> list[dict]:
    """The records of all questions in order, made and written one by one where the file has none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records = {record["id"]: record for record in map(json.loads, lines)}
    with path.open("a", encoding="utf-8") as file:
        for question in tqdm([q for q in questions if q.id not in records], desc=path.stem, unit="question"):
            records[question.id] = {"id": question.id, **make(question)}
            file.write(json.dumps(records[question.id], ensure_ascii=False) + "\n")
            file.flush()
    return [records[question.id] for question in questions]


def accuracy(args: argparse.Namespace) -> None:
    questions = list(read_questions(args.data))[: args.limit]
    model, tokenizer = load(args.model)
    stops, shown = chain.line_ends(tokenizer), chain.read_demonstrations(task="yes-no")
    encoder = load_encoder()
    nli = CrossEncoder.from_folder(args.nli) if args.nli else LanguageModelNLI(model, tokenizer)
    ask = factgen.asker(model, tokenizer, stops)
    corpus = BM25([passage for question in questions for passage in question.ctxs])
    args.out.mkdir(parents=True, exist_ok=True)

    def sample(question: Question) -> dict:
        prompt = chain.cot_prompt(tokenizer, shown, question.question)
        greedy = chain.complete(model, [prompt], stops, LENGTH)[0]
        rows = chain.sample_chains(model, prompt, stops, Sampler(TEMPERATURE), PATHS, LENGTH, seed=args.seed)
        return {"greedy": tokenizer.decode(greedy.tokens), "paths": [tokenizer.decode(row.tokens) for row in rows]}

    paths = kept(args.out / "paths.jsonl", questions, sample)
    by_id = {record["id"]: record for record in paths}

    def methods(question: Question) -> dict:
        record = by_id[question.id]
        judge = Evidence(BM25(question.ctxs) if args.own else corpus, encoder, nli)
        found = {form: rethink(record["paths"], judge, form) for form in (1, 2, 3)}
        votes = majority([path.answer for path in found[1].paths])
        greedy = chain.parse(record["greedy"]).answer
        answers = {"greedy CoT": greedy and chain.normalise(greedy), "self-consistency": next(iter(votes), None)}
        answers |= {f"RR f{form}": result.answer for form, result in found.items()}
        best = {form: None if result.best is None else result.paths[result.best] for form, result in found.items()}
        answers |= {f"best path f{form}": path and path.answer for form, path in best.items()}
        facts = {}
        if not args.no_variants:
            own = best[args.form].facts if best[args.form] else []
            facts["I"] = select_facts(found[args.form], judge.encode, args.form)
            facts["II"] = factgen.generate_facts(own, facts["I"], ask, judge)
        for name, chosen in facts.items():
            given = (model, tokenizer, shown, question.question, chosen, stops, LENGTH)
            answer = factgen.infer(*given).answer
            answers[f"Variant {name} f{args.form}"] = answer and chain.normalise(answer)
        scores = [[path.score for path in found[form].paths] for form in (1, 2, 3)]
        facts = {name: [fact.text for fact in chosen] for name, chosen in facts.items()}
        said = [[(f.text, f.premise and f.premise.title, *f.scores) for f in path.facts] for path in found[1].paths]
        return {"answers": answers, "scores": scores, "facts": facts, "paths": said}

    records = kept(args.out / ("own.jsonl" if args.own else "methods.jsonl"), questions, methods)
    wanted = [chain.normalise(question.answers[0]) for question in questions]
    table([record["answers"] for record in records], wanted, args.seed)


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
    model.config.eos_ids, seconds = [], {1: [], PATHS: []}  # all paths run to their full length
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
    parser.add_argument("--nli", metavar="DIR", help="a cross-encoder; default: the language model itself")
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
