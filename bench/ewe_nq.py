"""Ewe beside RAG on Natural Questions, the gold passage among distractors: `python bench/ewe_nq.py nq.jsonl --out DIR`.

Each question has five passages, its own and four of other questions that BM25 finds for it, best first. Texts are
greedy, of 40 tokens at most. The runs are evaluate.py's, so one that was stopped goes on:

    plain, rag, ewe       no passages; all five in the prompt; all five in the memory (k = 5, L = 224)
    ... as in the paper   Ewe with equal units, at temperature 1, and the question behind them alone
    ... best passage      the one that BM25 ranks first, in the prompt or as the one unit
    ... gold sentence     FILCO's oracle (StrInc): the first sentence that holds an answer, likewise

`found` counts the texts that hold an answer. Forwarded tokens are the model's whole reading; the last line sets the
tokens of one new unit against those of the whole prompt. Options behind `--` go to evaluate.py.
Expect 20 seconds a question on one core.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import evaluate
from minikid.filter import string_inclusion
from minikid.passages import Passage
from minikid.questions import read_questions
from minikid.retrieve import BM25
from minikid.tokenizer import Tokenizer
from minikid.weights import resolve

RUNS = {  # folder: decoders, options
    "five": ("greedy,rag,ewe", []),
    "paper": ("ewe", ["--unit-temperature", "1", "--relevance", "0", "--no-ask-first"]),
    "best": ("rag,ewe", ["-k", "1", "--units", "1"]),
    "sentence": ("rag,ewe", ["--filter", "strinc", "--units", "1"]),
}
NAMES = {"five": "", "paper": ", as in the paper", "best": ", best passage", "sentence": ", gold sentence"}


def with_distractors(path: Path, limit: int, out: Path) -> None:
    """The first questions of a file, each with its gold passage and the best four of the others', in BM25's order."""
    questions = list(read_questions(path))
    passages = [Passage(str(q.index), q.ctxs[0].title, q.ctxs[0].text) for q in questions]
    index = BM25(passages)
    with out.open("w", encoding="utf-8") as file:
        for question, gold in islice(zip(questions, passages, strict=True), limit):
            hits = [hit.passage for hit in index.search(question.question, 20)]
            others = [passage for passage in hits if passage.text != gold.text][:4]
            chosen = sorted([gold, *others], key=lambda p: hits.index(p) if p in hits else len(hits))
            record = {
                "question": f"{question.question.rstrip('?')}? Answer in a few words.",
                "answers": question.answers,
            }
            record |= {"id": question.id, "ctxs": [{"title": p.title, "text": p.text} for p in chosen]}
            file.write(json.dumps(record) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="questions with their gold passage first (DPR's form)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=200)
    parser.add_argument("--runs", default=",".join(RUNS), help="default: %(default)s")
    parser.add_argument("rest", nargs="*", help="behind --: for evaluate.py")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data = args.out / "questions.jsonl"
    with_distractors(args.data, args.limit, data)
    common = ["--temperature", "0", "--max-new-tokens", "40", "--batch-size", "8", "--limit", str(args.limit)]
    common += ["--unit-length", "224", *args.rest]
    rows, lengths = [], {}
    for run in args.runs.split(","):
        decoders, options = RUNS[run]
        if evaluate.main([str(data), "--out", str(args.out / run), "--decoders", decoders, *common, *options]):
            return 1
        for decoder in decoders.split(","):
            lines = [json.loads(line) for line in (args.out / run / f"{decoder}.jsonl").open(encoding="utf-8")]
            lengths[run, decoder] = [line["forwarded"] for line in lines]
            means = [sum(line["scores"][name] for line in lines) / len(lines) for name in ("EM", "F1")]
            found = sum(string_inclusion(line["text"], line["answers"]) for line in lines)
            rows.append(
                (decoder.replace("greedy", "plain") + NAMES[run], *means, found, len(lines), lengths[run, decoder])
            )
    print(f"\n{'':24} {'EM':>6} {'F1':>6} {'found':>9} {'forwarded':>10}")
    for name, em, f1, found, n, forwarded in rows:
        print(f"{name:24} {em:6.1f} {f1:6.1f} {found:5d}/{n:3d} {sum(forwarded) / n:10.0f}")
    if ("five", "rag") in lengths:
        tokenizer = Tokenizer.from_folder(resolve())
        units = [len(tokenizer.encode(f"{p.title}: {p.text}\n\n")) for q in read_questions(data) for p in q.ctxs]
        unit, whole = sum(units) / len(units), sum(lengths["five", "rag"]) / len(lengths["five", "rag"])
        print(f"one passage replaced: {unit:.0f} tokens as a unit, {whole:.0f} as a prompt, ratio {unit / whole:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
