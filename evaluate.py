"""Compare decoders on questions: `python evaluate.py DATA.jsonl --decoders sample,beam,kid --out DIR`.

The table goes to standard output, everything else to standard error. Each generation is kept as it is made, as a line
of DIR/NAME.jsonl, and a run that was stopped goes on from there. DIR/results.json has the table's numbers in full.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minikid import metrics, options, weights
from minikid.arguments import count, positive
from minikid.chain import accuracy
from minikid.decode import Generation, LittleKID, Vanilla, beam_search_batch, generate_batch, generate_on_cache, greedy
from minikid.ewe import SETTINGS, generate_ewe
from minikid.ewe import prompts as ewe_prompts
from minikid.ewe_options import OPTIONS as EWE_OPTIONS
from minikid.ewe_options import add_ewe_options, make_settings, make_verifier
from minikid.filter import MEASURES, saving, with_context
from minikid.generation import check_room
from minikid.knowledge import KnowledgeTrie
from minikid.model import GPT, Tokenizer, load
from minikid.passages import Passage
from minikid.questions import Question, digest, read_questions
from minikid.results import compare, keep_lines, table, write_results
from minikid.rethink import most_consistent
from minikid.rethinker import Rethinker
from minikid.retrieve import BM25
from minikid.silver import filter_questions, oracle, passages_of, trained

Prompts = list[list[int]]


@dataclass(frozen=True)
class Setup:
    """What the decoders work with."""

    args: argparse.Namespace
    model: GPT
    tokenizer: Tokenizer
    rethinker: Rethinker | None = None  # of the decoders that reason
    filtered: dict[int, list[Passage]] | None = None  # what --filter left, by a question's number

    def passages(self, question: Question) -> list[Passage]:
        return question.ctxs[: self.args.k] if self.filtered is None else self.filtered[question.index]

    def prompt(self, question: Question, context: bool) -> list[int]:
        text = with_context(question.question, self.passages(question)) if context else question.question
        return self.tokenizer.prompt(text, self.args.chat)


# --- the decoders: functions (setup, questions, prompts) -> generations, and the table of them


def generator_of(setup: Setup, question: Question) -> torch.Generator:
    """Of the question alone, the same for every decoder."""
    seed = np.random.SeedSequence((setup.args.seed % 2**64, question.index))
    return torch.Generator().manual_seed(int(seed.generate_state(1, np.uint64)[0]))


def draw(
    setup: Setup, questions: Sequence[Question], prompts: Prompts, policies, decoder: str = "sample"
) -> list[Generation]:
    """One sample per question."""
    generators = [generator_of(setup, question) for question in questions]
    sampler, length = options.make_sampler(setup.args, decoder), setup.args.max_new_tokens
    return generate_batch(setup.model, prompts, policies, sampler, max_new_tokens=length, generators=generators)


def sample(setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    return draw(setup, questions, prompts, [Vanilla()] * len(prompts))


def most_probable(setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    policies = [Vanilla()] * len(prompts)
    return generate_batch(setup.model, prompts, policies, greedy, max_new_tokens=setup.args.max_new_tokens)


def beam(setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    found, rows = [], max(1, setup.args.batch_size // setup.args.beams)  # questions whose hypotheses fill the batch
    for start in range(0, len(prompts), rows):
        some = prompts[start : start + rows]
        policies, length = [Vanilla()] * len(some), setup.args.max_new_tokens
        found += beam_search_batch(setup.model, some, policies, setup.args.beams, max_new_tokens=length)
    return [hypotheses[0] for hypotheses in found]


def little_kid(setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    update = options.make_update(setup.args)
    tries = [KnowledgeTrie.from_text(setup.passages(question)) for question in questions]
    return draw(setup, questions, prompts, [LittleKID(trie, setup.tokenizer, update) for trie in tries], "little-kid")


def kid(setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    tries = [KnowledgeTrie.from_text(setup.passages(question)) for question in questions]
    policies = [
        options.make_kid(setup.args, trie, setup.tokenizer, question.question)
        for trie, question in zip(tries, questions, strict=True)
    ]
    if setup.args.optimiser == "cache":
        return [
            generate_on_cache(
                setup.model,
                prompt,
                policy,
                options.make_sampler(setup.args, "kid"),
                steps=setup.args.steps,
                max_new_tokens=setup.args.max_new_tokens,
                generator=generator_of(setup, question),
            )
            for question, prompt, policy in zip(questions, prompts, policies, strict=True)
        ]
    return draw(setup, questions, prompts, policies, "kid")


def paths_of(setup: Setup, question: Question) -> list[Generation]:
    """The same reasoning paths for every decoder."""
    return setup.rethinker.sample(question.question, generator_of(setup, question).initial_seed() // 2)


def said(setup: Setup, text: str, rows: Sequence[Generation]) -> Generation:
    """A text that stands for all of its question's paths."""
    return Generation(tokens=setup.tokenizer.encode(text), forwarded=sum(row.forwarded for row in rows))


def cot(setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    rows = [setup.rethinker.greedy(question.question) for question in questions]
    return [said(setup, setup.rethinker.text(row), [row]) for row in rows]


def self_consistency(setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    """The first path with the most frequent answer."""
    found = []
    for question in questions:
        rows = paths_of(setup, question)
        text = most_consistent([setup.rethinker.text(row) for row in rows])
        found.append(said(setup, text, rows))
    return found


def rr(setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    """The reasoning that answers; `forwarded` counts the paths, not the scores or what variants generate."""
    found, rethinker = [], setup.rethinker
    for question in questions:
        rows, judge = paths_of(setup, question), rethinker.judge(BM25(setup.passages(question)))
        chain = rethinker.conclude(question.question, rethinker.rethink(rows, judge), judge, setup.args.variant)[0]
        found.append(said(setup, chain.text if chain else "", rows))
    return found


def ewe(decoder: str, setup: Setup, questions: Sequence[Question], prompts: Prompts) -> list[Generation]:
    """Retrieval is BM25's over the question's own passages."""
    settings = make_settings(setup.args, decoder)
    verifier, sampler = make_verifier(setup.args, setup.model, setup.tokenizer), options.make_sampler(setup.args)
    return [
        generate_ewe(
            setup.model,
            setup.tokenizer,
            question.question,
            BM25(setup.passages(question)),
            verifier,
            sampler,
            settings,
            max_new_tokens=setup.args.max_new_tokens,
            chat=setup.args.chat,
            generator=generator_of(setup, question),
        )
        for question in questions
    ]


@dataclass(frozen=True)
class Decoder:
    decode: Callable[[Setup, Sequence[Question], Prompts], list[Generation]]
    settings: tuple[str, ...] = ()  # the options it depends on, beside COMMON
    context: bool = False  # whether its prompts hold the passages, with or without --context


COMMON = ("model", "dtype", "chat", "max_new_tokens")
SAMPLE = ("seed", "temperature", "top_k", "top_p")
UPDATE = (*SAMPLE, "kid_temperature", "k", "reward", "optimiser", "rule", "sigma", "beta", "steps", "lr")
KNOWLEDGE = (*UPDATE, "demonstrations", "reach", "hops", "window")
PATHS = ("seed", "task", "demos", "paths", "path_temperature")
DECODERS = {  # in the order of the table of results
    "greedy": Decoder(most_probable),
    "sample": Decoder(sample, SAMPLE),
    "beam": Decoder(beam, ("beams",)),
    "rag": Decoder(sample, SAMPLE, context=True),
    "little-kid": Decoder(little_kid, UPDATE),
    "kid": Decoder(kid, KNOWLEDGE),
    "kid-rag": Decoder(kid, KNOWLEDGE, context=True),
    "cot": Decoder(cot, ("task", "demos")),
    "self-consistency": Decoder(self_consistency, PATHS),
    "rr": Decoder(rr, (*PATHS, "k", "form", "variant", "nli", "encoder")),
    **{name: Decoder(partial(ewe, name), (*SAMPLE, "k", *EWE_OPTIONS)) for name in SETTINGS},
}


def settings_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """All that the generations of a decoder depend on, apart from the record and rounding."""
    context = DECODERS[name].context or args.context
    names = {*COMMON, *DECODERS[name].settings, *(["k"] if context else [])}
    names |= {"filter"} if args.filter and "k" in names else set()
    return {"decoder": name, "context": context, **{key: getattr(args, key) for key in sorted(names)}}


# --- the runs


def complain(args: argparse.Namespace, bad: ValueError) -> None:
    """About a record that cannot be used."""
    if not args.skip_bad:
        raise ValueError(f"{bad}; mend this record, or pass over such records with --skip-bad")
    note(f"skipped {bad}")


def filter_passages(setup: Setup, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The lines of DIR/filter.jsonl: what --filter leaves of each question's passages. Only a measure knows answers."""
    args = setup.args
    settings = {"filter": args.filter, "k": args.k}
    if args.filter in MEASURES:
        settings |= {key: getattr(args, key) for key in ("model", "dtype", "chat")} if args.filter == "cxmi" else {}
        run = oracle(args.filter, args.k, (setup.model, setup.tokenizer), chat=args.chat)
    else:
        run = trained(load(args.filter, args.device, options.DTYPES[args.dtype]), args.k)
    return filter_questions(args.out / "filter.jsonl", questions, settings, run, args.k, args.skip_bad)


def fits(setup: Setup, question: Question) -> bool:
    """Whether the model has room for the prompts of all decoders."""
    try:
        for context in sorted({setup.args.context or DECODERS[name].context for name in setup.args.decoders}):
            check_room(setup.model, setup.prompt(question, context), setup.args.max_new_tokens)
        if setup.rethinker:
            check_room(setup.model, setup.rethinker.prompt(question.question), setup.args.max_new_tokens)
        for name in SETTINGS.keys() & set(setup.args.decoders):
            settings, length = make_settings(setup.args, name), setup.args.max_new_tokens
            ewe_prompts(setup.model, setup.tokenizer, question.question, settings, length, setup.args.chat)
    except ValueError as error:
        complain(setup.args, ValueError(f"{question.place}: {error}"))
        return False
    return True


def alike(questions: Sequence[Question], prompts: dict[int, list[int]], size: int) -> Iterator[list[Question]]:
    """Batches of questions whose prompts are of like length, which saves padding; sorted within spans of 8 batches."""
    for start in range(0, len(questions), 8 * size):
        span = sorted(questions[start : start + 8 * size], key=lambda question: len(prompts[question.index]))
        yield from (span[i : i + size] for i in range(0, len(span), size))


def run_decoder(setup: Setup, name: str, questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The lines of all questions in their order; those that the file has not yet are made and added to it."""
    settings, prompts = settings_of(setup.args, name), {}

    def batches(todo: Sequence[Question]) -> Iterator[Sequence[Question]]:
        prompts.update({question.index: setup.prompt(question, settings["context"]) for question in todo})
        return alike(todo, prompts, setup.args.batch_size)

    def make(batch: Sequence[Question]) -> list[dict[str, Any]]:
        began = time.perf_counter()
        generations = DECODERS[name].decode(setup, batch, [prompts[question.index] for question in batch])
        seconds = (time.perf_counter() - began) / len(batch)  # an equal share
        made = []
        for question, generation in zip(batch, generations, strict=True):
            text = setup.tokenizer.decode(generation.tokens)
            provenance = metrics.provenance_stems(KnowledgeTrie.from_text(question.ctxs).triples)
            made.append(
                {
                    "text": text,
                    "scores": metrics.score(text, question.answers, provenance) | accuracy(text, question.answers),
                    "tokens": len(generation.tokens),
                    "forwarded": generation.forwarded,
                    "seconds": seconds,
                }
            )
        return made

    return keep_lines(setup.args.out / f"{name}.jsonl", digest(settings), questions, batches, make)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evaluate.py", description="Compare decoders on questions with answers.")
    parser.add_argument("data", type=Path, metavar="DATA", help="JSON lines or an array: question, answers, ctxs")
    parser.add_argument("--decoders", default="sample,beam,kid", metavar="NAME,...", help=f"of {', '.join(DECODERS)}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for generations and results.json")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions")
    parser.add_argument("--batch-size", type=positive, default=32, metavar="N", help="rows at once (default: 32)")
    parser.add_argument("--beams", type=positive, default=5, metavar="N", help="of beam search (default: 5)")
    parser.add_argument("-k", type=count, metavar="K", help="only the first K passages of each question")
    parser.add_argument("--context", action="store_true", help="put the passages into the prompts of all decoders")
    options.add_filter_option(parser, "measures, which know the answers, are oracles")
    parser.add_argument("--skip-bad", action="store_true", help="pass over records that cannot be used")
    options.add_model_options(parser)
    options.add_decoding_options(parser)
    options.add_rethink_options(parser)
    add_ewe_options(parser)
    parser.add_argument("--encoder", default=weights.ENCODER, metavar="NAME|DIR", help="of rr's similarities")
    parser.set_defaults(max_new_tokens=60)
    args = parser.parse_args(argv)
    args.decoders = list(dict.fromkeys(name.strip() for name in args.decoders.split(",")))
    for name in args.decoders:
        if name not in DECODERS:
            parser.error(f"--decoders: expected names of {', '.join(DECODERS)} with commas between, got {name!r}")
    if not args.data.is_file():
        parser.error(f"{args.data}: no such file")
    try:
        options.check_filter(args.filter)
        for name in SETTINGS.keys() & set(args.decoders):
            make_settings(args, name)
        return options.settle(args)
    except ValueError as error:
        parser.error(str(error))


def run(args: argparse.Namespace) -> None:
    metrics.load_scorers()  # where they are missing, say so before the work
    questions = list(islice(read_questions(args.data, partial(complain, args)), args.limit))
    model, tokenizer = load(args.model, args.device, options.DTYPES[args.dtype])
    reasons = {"cot", "self-consistency", "rr"}.intersection(args.decoders)
    rethinker = options.make_rethinker(args, model, tokenizer, judges="rr" in reasons) if reasons else None
    setup = Setup(args, model, tokenizer, rethinker)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.filter:
        lines = {}  # by a question's number
        for question, line in zip(questions, filter_passages(setup, questions), strict=True):
            if "error" in line:
                complain(args, ValueError(f"{question.place}: {line['error']}"))
            else:
                lines[question.index] = line
        words, found = ([line[name] for line in lines.values()] for name in ("words", "found"))
        note(f"--filter {args.filter}: {saving(words, found)}")
        setup = replace(setup, filtered={index: passages_of(line) for index, line in lines.items()})
        questions = [question for question in questions if question.index in lines]
    questions = [question for question in questions if fits(setup, question)]
    if not questions:
        raise ValueError(f"{args.data}: no questions; expected JSON lines, or one array, of records")
    results = compare({name: run_decoder(setup, name, questions) for name in args.decoders}, args.seed)
    if args.filter:
        results["filter"] = {"words": [sum(counts) for counts in zip(*words, strict=True)], "found": sum(found)}
    results["settings"] = {name: settings_of(args, name) for name in args.decoders}
    write_results(args.out / "results.json", results)
    print(table(results, DECODERS))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        note(f"evaluate.py: error: {error}")
        return 1
    except KeyboardInterrupt:
        note("interrupted; the same command goes on from here")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
