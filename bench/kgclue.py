"""KgCLUE end to end: a small model is trained from scratch and answers the dev set as `--decoder trie` does.

    python bench/kgclue.py --data kgclue --out runs/kgclue      kgclue: train.json, dev.json, kb.tsv.gz
    python bench/kgclue.py ... --orders SPM                     one order alone: two processes train side by side

Each order of a key's fields has a model of its own, trained by train.py on the same questions; it answers with and
without look-ahead, with 1, 3 and 5 beams. A run that was stopped goes on where it was when it is started again.

No subject of the dev set occurs in the training set, and of its predicates hardly any: the model must learn to copy
names, not to know them. So the training questions are varied. A subject that stands in its question becomes another one
of the base, half the time with some characters drawn anew, as rare ones are hard to copy; and where the question has a
part of the predicate, another predicate of the base with the same rest brings its own: "when was X founded" and
"founding date" turn into "when was X closed" and "closing date". Both draw on the names in the base, which the decoder
has as well; no question and no answer of the dev set is looked at.

EM asks for the whole triple, meaning included. F1 is that of KgCLUE's own evaluation, 2 LCS / (length + length) of the
two objects. The peer is a rule without any model: the longest subject of the base that stands in the question, and of
its predicates the one whose LCS with the rest is longest, the shortest of equals.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import combinations, islice, product
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minikid import metrics, options
from minikid.beam import beam_search_batch
from minikid.files import replacing
from minikid.folder import SINGLE
from minikid.kgclue import ORDERS, Fact, Question, build_trie, join_key, read_facts, read_questions, split_key
from minikid.lookahead import Constrained, Coverage
from minikid.model import load

ROOT = Path(__file__).resolve().parent.parent
DECODINGS, BEAMS = ("prefix tree", "look-ahead"), (1, 3, 5)
EXAMPLES, AT_ONCE = 300_000, 50  # training questions that are written, dev questions that are answered in one batch
SCORES = ("EM", "F1", "S wrong", "P wrong", "M wrong", "missed")
SUBJECT, PART = "\0", "\1"  # the gaps in a template
MODEL = {"layers": 3, "hidden": 192, "heads": 3, "positions": 256, "tokenizer": "characters", "vocab-size": 8192}
STEPS = {"batch-size": 64, "lr": 2e-3, "warmup": 200, "attention": "prefix", "dtype": "bfloat16"}


class Template(NamedTuple):
    """A question with gaps for its subject and for the longest part of its predicate that it has word for word."""

    text: str
    before: str  # the predicate is before + part + behind
    part: str
    behind: str
    answer: Fact


def make_template(question: str, answer: Fact) -> Template:
    text = question.replace(answer.subject, SUBJECT, 1)
    predicate = answer.predicate
    spans = [(j - i, -i) for i, j in combinations(range(len(predicate) + 1), 2) if predicate[i:j] in text]
    length, begin = max(spans, default=(0, -len(predicate)))
    begin, end = -begin, length - begin
    part = predicate[begin:end]
    return Template(text.replace(part, PART, 1) if part else text, predicate[:begin], part, predicate[end:], answer)


def vary(questions: Iterable[Question], facts: Sequence[Fact], chance: random.Random) -> Iterator[tuple[str, Fact]]:
    """Training questions without end, nine of ten with another subject and half with another predicate where it goes;
    their facts have no value. Half of the new subjects are made up: a third of the characters are any of the base's.
    """
    subjects = sorted({(fact.subject, fact.meaning) for fact in facts})
    characters = sorted({character for subject, _ in subjects for character in subject})
    parts = defaultdict(list)  # of the predicates, by what is before and behind
    for predicate in sorted({fact.predicate for fact in facts}):
        for i, j in combinations(range(len(predicate) + 1), 2):
            parts[predicate[:i], predicate[j:]].append(predicate[i:j])
    templates = [make_template(question.question, question.answer) for question in questions]
    while True:
        text, before, part, behind, answer = chance.choice(templates)
        subject, meaning = answer.subject, answer.meaning
        if SUBJECT in text and chance.random() < 0.9:
            subject, meaning = chance.choice(subjects)
            if chance.random() < 0.5:
                subject = "".join(chance.choice(characters) if chance.random() < 1 / 3 else c for c in subject)
        if part and chance.random() < 0.5:
            part = chance.choice(parts[before, behind])
        yield text.replace(SUBJECT, subject).replace(PART, part), Fact(subject, before + part + behind, meaning, "")


def in_order(fact: Fact, order: str) -> list[str]:
    """The fields of a key, as train.py takes them."""
    fields = [(fact.subject, fact.predicate, fact.meaning)[place] for place in ORDERS[order]]
    return fields if fields[-1] else fields[:-1]


def train(args: argparse.Namespace, order: str, facts: Sequence[Fact]) -> None:
    """Train by train.py unless that is done; the seconds of all its runs are kept."""
    folder = args.out / order
    if (folder / "model" / SINGLE).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "questions.jsonl"
    if not data.exists():
        varied = vary(read_questions(args.data / "train.json"), facts, random.Random(args.seed))
        with replacing(data) as new, new.open("w", encoding="utf-8") as file:
            for text, fact in islice(varied, min(EXAMPLES, args.steps * STEPS["batch-size"])):
                json.dump({"prompt": text, "completion": in_order(fact, order)}, file, ensure_ascii=False)
                file.write("\n")
    flags = [f"--{name}={value}" for name, value in (MODEL | STEPS | {"steps": args.steps, "seed": args.seed}).items()]
    command = [sys.executable, ROOT / "train.py", "--data", data, "--out", folder / "model", *flags]
    began = time.perf_counter()
    try:
        subprocess.run([*command, "--resume", "--log-every=100"], check=True)
    finally:
        with (folder / "seconds.txt").open("a") as file:
            file.write(f"{time.perf_counter() - began:.0f}\n")


def answer(args: argparse.Namespace, order: str, facts: Sequence[Fact], questions: Sequence[Question]) -> None:
    """Write the answers of all decodings that are not there yet: of each question its keys as (S, P, M), best first."""
    files = {pair: answers_file(args, order, *pair) for pair in product(DECODINGS, args.beams)}
    if all(file.exists() for file in files.values()):
        return
    model, tokenizer = load(args.out / order / "model")
    separator = options.separator_of(tokenizer)
    trie = build_trie(facts, tokenizer.encode, separator, order)
    longest = max(len(join_key(fact, tokenizer.encode, separator, order)) for fact in facts) + 1
    for (decoding, beams), path in files.items():
        if path.exists():
            continue
        began, found = time.perf_counter(), []
        for begin in range(0, len(questions), AT_ONCE):
            texts = [question.question for question in questions[begin : begin + AT_ONCE]]
            policies = [Constrained(trie, tokenizer.eos_ids)] * len(texts)
            if decoding == "look-ahead":
                field = ORDERS[order].index(1)
                policies = [options.make_look_ahead(trie, tokenizer, text, separator, field) for text in texts]
            prompts = [tokenizer.prompt(text, chat=False) for text in texts]
            rows = beam_search_batch(model, prompts, policies, beams, max_new_tokens=longest, length_penalty=0.0)
            keys = [[split_key(g.tokens, separator, order) for g in row if g.stop == "eos"] for row in rows]
            found += [[[tokenizer.decode(field) for field in key] for key in row] for row in keys]
        with replacing(path) as new:
            new.write_text(json.dumps({"seconds": time.perf_counter() - began, "keys": found}, ensure_ascii=False))
        print(f"{path}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


def answers_file(args: argparse.Namespace, order: str, decoding: str, beams: int) -> Path:
    return args.out / order / f"{decoding.replace(' ', '-')}-{beams}.json"


def common(a: str, b: str) -> int:
    """The length of the longest common subsequence."""
    coverage = Coverage([ord(character) for character in b])
    return coverage.length(reduce(coverage.extend, map(ord, a), coverage.start))


def similarity(a: str, b: str) -> float:
    """KgCLUE's F1 of two texts, 0 to 100."""
    return 200 * common(a, b) / (len(a) + len(b))


def score(keys: Sequence[Sequence[str]], gold: Fact, values: Mapping[tuple[str, ...], str]) -> dict[str, float]:
    """Scores of one question's answers, 0 or 100 but for F1, and which field of the best one is wrong."""
    best = tuple(keys[0])
    subject, predicate, _ = (found == wanted for found, wanted in zip(best, gold[:3], strict=True))
    value = values.get(best, "")
    exact = best == gold[:3] and value == gold.value
    return {
        "EM": 100.0 * exact,
        "F1": similarity(value, gold.value),
        "S wrong": 100.0 * (not subject),
        "P wrong": 100.0 * (subject and not predicate),
        "M wrong": 100.0 * (subject and predicate and not exact),
        "missed": 100.0 * (list(gold[:3]) not in [list(key) for key in keys]),
    }


def answer_by_rule(question: str, keys: Mapping[str, Sequence[Sequence[str]]]) -> Sequence[str]:
    """The key (S, P, M) that the rule finds, three times "" without a subject; `keys` by subject."""
    spans = combinations(range(len(question) + 1), 2)
    subject = max((question[i:j] for i, j in spans if question[i:j] in keys), key=len, default="")
    rest = question.replace(subject, SUBJECT, 1)
    return max(keys.get(subject, [("", "", "")]), key=lambda key: (common(key[1], rest), -len(key[1])))


def report(args: argparse.Namespace, facts: Sequence[Fact], questions: Sequence[Question]) -> None:
    values = {fact[:3]: fact.value for fact in facts}
    by_subject = defaultdict(list)
    for key in values:
        by_subject[key[0]].append(key)
    began = time.perf_counter()
    found = {("rule",): [[answer_by_rule(q.question, by_subject)] for q in questions]}
    seconds = {("rule",): time.perf_counter() - began}
    for name in product(args.orders, DECODINGS, args.beams):
        kept = json.loads(answers_file(args, *name).read_text(encoding="utf-8"))
        found[name], seconds[name] = kept["keys"], kept["seconds"]
    weights = metrics.resamples(len(questions), args.seed)
    means = {}
    print(f"{'order, decoding, beams':<28}" + "".join(f"{score:>9}" for score in (*SCORES, "seconds")))
    for name, keys in found.items():
        scores = [score(some, q.answer, values) for some, q in zip(keys, questions, strict=True)]
        means[name] = {s: metrics.resampled_means([row[s] for row in scores], weights) for s in SCORES}
        cells = [f"{means[name][s][0]:.1f}" for s in SCORES] + [f"{seconds[name]:.0f}"]
        print(f"{', '.join(map(str, name)):<28}" + "".join(f"{cell:>9}" for cell in cells))
    print("\nmissed: the right key is none of the beams'; differences with 95% of a paired bootstrap over questions:")
    pairs = [((o, "look-ahead", b), (o, "prefix tree", b)) for o, b in product(args.orders, args.beams)]
    pairs += [
        ((o, d, b), (p, d, b)) for o, p in combinations(args.orders, 2) for d, b in product(DECODINGS, args.beams)
    ]
    for a, b in pairs:
        cells = [(s, metrics.Estimate.of(means[a][s] - means[b][s])) for s in ("EM", "F1")]
        text = "   ".join(f"{s} {e.mean:+5.1f} [{e.low:+.1f}, {e.high:+.1f}]" for s, e in cells)
        print(f"{', '.join(map(str, a)):<20} - {', '.join(map(str, b)):<22} {text}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, type=Path, metavar="DIR")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR")
    parser.add_argument("--orders", nargs="+", default=list(ORDERS), choices=ORDERS, help="default: both")
    parser.add_argument("--beams", nargs="+", type=int, default=BEAMS, metavar="B", help="default: 1 3 5")
    parser.add_argument("--steps", type=int, default=2500, help="of training (default: %(default)s)")
    parser.add_argument("--limit", type=int, metavar="N", help="dev questions (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    settings = {"steps": args.steps, "limit": args.limit, "seed": args.seed}
    kept = args.out / "settings.json"
    args.out.mkdir(parents=True, exist_ok=True)
    if kept.exists() and json.loads(kept.read_text()) != settings:
        sys.exit(f"{kept} is of another run, {kept.read_text()}, not {json.dumps(settings)}: choose another --out")
    with replacing(kept) as new:
        new.write_text(json.dumps(settings))
    facts = list(read_facts(args.data / "kb.tsv.gz"))
    questions = list(islice(read_questions(args.data / "dev.json"), args.limit))
    known = {q.answer.predicate for q in read_questions(args.data / "train.json")}
    for order in args.orders:
        train(args, order, facts)
        answer(args, order, facts, questions)
    keys = {fact[:3] for fact in facts}
    print(
        f"{len(questions)} dev questions; {sum(q.answer[:3] in keys for q in questions)} of their keys are in the base,"
    )
    print(f"{sum(q.answer.predicate in known for q in questions)} have a predicate of the training set")
    for order in args.orders:
        seconds = [int(line) for line in (args.out / order / "seconds.txt").read_text().split()]
        print(f"{order}: {args.steps} steps of {STEPS['batch-size']} in {sum(seconds) / 60:.1f} minutes")
    report(args, facts, questions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
