"""Generate text: `python generate.py --decoder kid`. Text on standard output, everything else on standard error."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from minikid import kgclue, options
from minikid.arguments import positive
from minikid.decode import (
    Constrained,
    Generation,
    LittleKID,
    Vanilla,
    beam_search,
    generate_batch,
    generate_on_cache,
    greedy,
)
from minikid.ewe import SETTINGS, EweGeneration, generate_ewe
from minikid.ewe_options import add_ewe_options, make_settings, make_verifier
from minikid.filter import MEASURES, Reader, filter_by_model, saving, select, with_context, word_counts
from minikid.knowledge import KnowledgeTrie
from minikid.model import GPT, Tokenizer, load
from minikid.passages import Passage
from minikid.rethinker import as_record, as_text
from minikid.triples import Triple

PROMPT = "Does marijuana impair driving ability?"
DECODERS = ("greedy", "sample", "beam", "kid", "little-kid", "trie", "rr", *SETTINGS)
COLOUR, STRUCK, PLAIN = "\x1b[36m", "\x1b[9m", "\x1b[0m"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="generate.py", description="Knowledge-infused decoding on a GPT-2 / Llama model."
    )
    parser.add_argument("--decoder", default="kid", choices=DECODERS, help="default: %(default)s")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help=f"default: {PROMPT!r}")
    prompt.add_argument("--prompt-file", metavar="F", help="a UTF-8 text file; - for standard input")
    prompt.add_argument("stdin", nargs="?", choices=["-"], metavar="-", help="the prompt from standard input")
    options.add_knowledge_options(parser)
    options.add_filter_option(parser, "a measure needs --answer")
    parser.add_argument("--answer", nargs="+", metavar="TEXT", help="gold answers, for the measures of --filter alone")
    options.add_model_options(parser)
    options.add_decoding_options(parser)
    options.add_rethink_options(parser)
    add_ewe_options(parser)
    parser.add_argument("--num-samples", type=positive, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--beams", type=positive, default=5, metavar="B", help="of beam and trie (default: %(default)s)"
    )
    parser.add_argument(
        "--trie",
        type=Path,
        metavar="DIR",
        help="of kid, little-kid and trie: build a trie of all of --knowledge and keep it there; if there is one, open "
        "it and leave --knowledge unread",
    )
    parser.add_argument("--no-lookahead", action="store_true", help="of trie: the prefix tree alone")
    parser.add_argument("--json", action="store_true", help="one JSON object per generation on standard output")
    args = parser.parse_args(argv)
    if args.num_samples > 1 and args.decoder == "rr":
        parser.error("--num-samples: --decoder rr gives one answer; --paths sets how many texts it samples")
    if args.filter and args.decoder in ("trie", "rr", *SETTINGS):
        parser.error(f"--filter: the passages of --decoder {args.decoder} are not filtered; choose another decoder")
    if args.context and args.decoder in ("trie", "rr", *SETTINGS):
        parser.error(f"--context: --decoder {args.decoder} puts no passages into its prompt; choose another decoder")
    if bool(args.answer) != (args.filter in MEASURES):
        parser.error(
            "--filter strinc, lexical and cxmi choose by the gold answers: they need --answer TEXT, and nothing else "
            "does; where the answer is unknown, give the folder of a trained model: --filter DIR"
        )
    try:
        options.check_filter(args.filter)
        options.settle(args)
        if args.decoder in SETTINGS:
            make_settings(args, args.decoder)
        args.question = read_prompt(args)
        check_knowledge(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.trie and args.decoder not in ("kid", "little-kid", "trie"):
        parser.error(f"--trie: {args.decoder} has no trie; expected --decoder kid, little-kid or trie")
    if args.decoder in ("beam", "trie") and args.num_samples > args.beams:
        parser.error(f"--num-samples {args.num_samples}: {args.beams} beams end in no more texts; raise --beams")
    return args


def check_knowledge(args: argparse.Namespace) -> None:
    """ValueError or OSError for --knowledge that is not there, or not what the decoder works with."""
    files, wanted = args.knowledge or [], "triples, a .tsv of subject, predicate and object without a header"
    for file in files:
        if not Path(file).exists():
            raise ValueError(f"--knowledge {file}: no such file or folder")
    if args.decoder == "trie":
        if not files and not args.trie:
            raise ValueError(f"--decoder trie needs triples: --knowledge FILE of {wanted}, or --trie DIR")
        for file in files:
            if Path(file).is_dir() or not options.holds_triples(file):
                raise ValueError(f"--knowledge {file}: expected {wanted}")


def read_prompt(args: argparse.Namespace) -> str:
    if args.stdin or args.prompt_file == "-":
        text = sys.stdin.read()
    elif args.prompt_file:
        text = Path(args.prompt_file).read_text(encoding="utf-8")
    else:
        text = PROMPT if args.prompt is None else args.prompt
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").rstrip("\n")
    if not text.strip():
        raise ValueError("the prompt is empty; give --prompt TEXT, --prompt-file F or -")
    return text


def retrieve(args: argparse.Namespace) -> tuple[list[Passage], list[Triple]]:
    """The passages for the prompt, best first, and the triples of --knowledge."""
    retriever, triples = options.open_knowledge(args)
    return [hit.passage for hit in retriever.search(args.question, args.k)], triples


def narrow(args: argparse.Namespace, reader: Reader, passages: list[Passage]) -> list[Passage]:
    """What --filter leaves of the passages."""
    if args.filter in MEASURES:
        left = select(args.filter, passages, args.question, args.answer, reader, chat=args.chat)
    else:
        trained = load(args.filter, args.device, options.DTYPES[args.dtype])
        left = filter_by_model(trained, [(args.question, passages)])[0]
    note(f"--filter {args.filter}: {saving([word_counts(passages, left)], [left.found])}")
    return left.passages


def build_knowledge(args: argparse.Namespace, passages: list[Passage], triples: list[Triple]) -> KnowledgeTrie:
    """G_ext of what was retrieved, or with --trie that of all knowledge, built once."""
    if args.trie:
        knowledge, origin = options.open_or_build_knowledge(args.trie, options.knowledge_of(args))
    else:
        knowledge = options.build_trie(passages, triples)
        origin = f"{len(passages)} passages" + (f" and {len(triples)} of the files" if triples else "")
    note(f"{len(knowledge.triples)} triples from {origin}")
    return knowledge


def make_policy(args: argparse.Namespace, tokenizer: Tokenizer, passages: list[Passage], triples: list[Triple]):
    if args.decoder not in ("kid", "little-kid"):
        return Vanilla()
    knowledge = build_knowledge(args, passages, triples)
    if args.decoder == "little-kid":
        return LittleKID(knowledge, tokenizer, options.make_update(args))
    return options.make_kid(args, knowledge, tokenizer, args.question)


class Stream:
    """Prints a generation as it grows; knowledge tokens in colour on a terminal."""

    def __init__(self, tokenizer: Tokenizer, colour: bool):
        self.tokenizer, self.colour = tokenizer, colour
        self.tokens: list[int] = []
        self.place, self.written = (0, 0), ""

    def __call__(self, row: int, token: int, state) -> None:
        self.tokens.append(token)
        text, self.place = self.tokenizer.read_on(self.tokens, self.place)
        self.write(text, self.colour and token in getattr(state, "demonstrations", ()))

    def sentence(self, tokens: list[int], kept: bool) -> None:
        """A whole sentence; one that is written again is struck through on a terminal, and nowhere else."""
        for token in tokens if kept else ():
            self(0, token, None)
        if not kept and self.colour:
            print(f"{STRUCK}{self.tokenizer.decode(tokens)}{PLAIN}", end=" ", flush=True)

    def write(self, text: str, coloured: bool = False) -> None:
        self.written += text
        print(f"{COLOUR}{text}{PLAIN}" if text and coloured else text, end="", flush=True)

    def close(self) -> None:
        self.write(self.tokenizer.decode(self.tokens)[len(self.written) :] + "\n")


def as_json(
    args: argparse.Namespace, sample: int, row: Generation, tokenizer: Tokenizer, passages: list[Passage]
) -> str:
    record = {
        "prompt": args.question,
        "decoder": args.decoder,
        "seed": args.seed + sample,
        "text": tokenizer.decode(row.tokens),
        "tokens": row.tokens,
        "log_probs": row.log_probs,
        "stop": row.stop,
        "forwarded": row.forwarded,
        "passages": [passage.id for passage in passages],
    }
    if args.decoder in ("kid", "little-kid"):
        record["knowledge"] = [
            token in state.demonstrations for token, state in zip(row.tokens, row.states, strict=True)
        ]
        record["kl"] = [state.kl for state in row.states]
        record["beta"] = [state.beta for state in row.states]
    if isinstance(row, EweGeneration):
        record["pauses"] = [pause.record() for pause in row.pauses]
    return json.dumps(record, ensure_ascii=False)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    passages, triples = ([], []) if args.trie and not args.context else retrieve(args)
    model, tokenizer = load(args.model, args.device, options.DTYPES[args.dtype])
    if args.filter:
        passages = narrow(args, (model, tokenizer), passages)
    text = with_context(args.question, passages) if args.context else args.question
    prompt = tokenizer.prompt(text, args.chat)
    policy = make_policy(args, tokenizer, passages, triples)
    stream = Stream(tokenizer, sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    live = args.num_samples == 1 and not args.json and args.decoder != "beam"
    rows = generate_rows(args, model, prompt, policy, stream if live else None)
    if live:
        stream.close()
    for i, row in enumerate(rows):
        if args.json:
            print(as_json(args, i, row, tokenizer, passages), flush=True)
        elif not live:
            print((f"[{i + 1}] " if args.num_samples > 1 else "") + tokenizer.decode(row.tokens), flush=True)
    seconds = time.perf_counter() - began
    total = sum(len(row.tokens) for row in rows)
    note(f"{total} tokens, {sum(row.forwarded for row in rows)} forwarded, {seconds:.1f} s in all")


def run_trie(args: argparse.Namespace) -> None:
    """Answers from a trie of triples: `S ||| P ||| O` lines, the best key first, with every value of a key."""
    model, tokenizer = load(args.model, args.device, options.DTYPES[args.dtype])
    separator = options.separator_of(tokenizer)
    began = time.perf_counter()
    trie, origin = options.open_or_build_trie(args.trie, args.knowledge, tokenizer, separator)
    note(f"{len(trie)} keys from {origin}, {time.perf_counter() - began:.1f} s")
    if args.no_lookahead:
        policy = Constrained(trie, tokenizer.eos_ids)
    else:
        policy = options.make_look_ahead(trie, tokenizer, args.question, separator)
    prompt = tokenizer.prompt(args.question, args.chat)
    # a key's probability is the product of its tokens'; a mean would favour keys of many forced tokens
    rows = beam_search(model, prompt, policy, args.beams, max_new_tokens=args.max_new_tokens, length_penalty=0.0)
    rows = [row for row in rows if row.stop == "eos"][: args.num_samples]
    if not rows:
        raise ValueError(f"no key ended within {args.max_new_tokens} tokens; raise --max-new-tokens")
    for row in rows:
        fields = [tokenizer.decode(field) for field in kgclue.split_key(row.tokens, separator)]
        values = trie.values(row.tokens)
        if args.json:
            record = dict(zip(("subject", "predicate", "meaning"), fields, strict=True))
            record |= {"prompt": args.question, "decoder": "trie", "values": values, "score": row.score}
            print(json.dumps(record, ensure_ascii=False), flush=True)
        else:
            for value in values:
                print(f"{kgclue.join_subject(fields[0], fields[2])} ||| {fields[1]} ||| {value}", flush=True)


def run_rethink(args: argparse.Namespace) -> None:
    """Reasoning paths and what the evidence says about them: the answer, its reasoning, each fact's premise, votes."""
    began = time.perf_counter()
    retriever, tables = options.open_evidence(args)
    model, tokenizer = load(args.model, args.device, options.DTYPES[args.dtype])
    rethinker = options.make_rethinker(args, model, tokenizer)
    question = f"{tables} {args.question}".lstrip()
    judge = rethinker.judge(retriever)
    rows = rethinker.sample(question, args.seed)
    found = rethinker.rethink(rows, judge)
    chain, facts = rethinker.conclude(question, found, judge, args.variant)
    answer = chain and chain.answer
    if args.json:
        record = {"prompt": args.question, "decoder": "rr", "seed": args.seed, "variant": args.variant}
        record |= as_record(found) | {
            "answer": answer,
            "text": chain and chain.text,
            "support": [f.text for f in facts],
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)
    else:
        print(f"{answer or 'no answer'}\n\n{as_text(found, chain.text if chain else '', facts)}", flush=True)
    seconds = time.perf_counter() - began
    note(f"{len(rows)} paths, {sum(row.forwarded for row in rows)} tokens forwarded for them, {seconds:.1f} s in all")


def run_ewe(args: argparse.Namespace) -> None:
    """Text that pauses to retrieve, to verify and to write again what is refuted; printed sentence by sentence."""
    began = time.perf_counter()
    retriever, triples = options.open_knowledge(args)
    model, tokenizer = load(args.model, args.device, options.DTYPES[args.dtype])
    settings, verifier = make_settings(args, args.decoder), make_verifier(args, model, tokenizer, triples)
    stream = Stream(tokenizer, sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    live, rows = args.num_samples == 1 and not args.json, []
    for i in range(args.num_samples):
        row = generate_ewe(
            model,
            tokenizer,
            args.question,
            retriever,
            verifier,
            options.make_sampler(args),
            settings,
            max_new_tokens=args.max_new_tokens,
            chat=args.chat,
            generator=torch.Generator().manual_seed(args.seed + i),
            on_sentence=stream.sentence if live else None,
        )
        rows.append(row)
        if args.json:
            print(
                as_json(args, i, row, tokenizer, list(dict.fromkeys(p for pause in row.pauses for p in pause.added))),
                flush=True,
            )
        elif not live:
            print(f"[{i + 1}] {tokenizer.decode(row.tokens)}", flush=True)
    if live:
        stream.close()
    dropped, rewritten = sum(row.dropped for row in rows), sum(pause.deleted for row in rows for pause in row.pauses)
    if dropped:
        length = f"the longest first passage's, at most {settings.unit_length} tokens"
        note(f"{dropped} tokens of passages did not fit in their units, whose length is {length}")
    if settings.units and not any(pause.added for row in rows for pause in row.pauses):
        note("no passage was found for the question or the text: the memory stayed empty")
    pauses = sum(len(row.pauses) for row in rows)
    total, seconds = sum(len(row.tokens) for row in rows), time.perf_counter() - began
    note(f"{pauses} pauses, {rewritten} sentences written again")
    note(f"{total} tokens, {sum(row.forwarded for row in rows)} forwarded, {seconds:.1f} s in all")


def generate_rows(args: argparse.Namespace, model: GPT, prompt: list[int], policy, on_token) -> list[Generation]:
    n, length = args.num_samples, args.max_new_tokens
    if args.decoder == "beam":
        return beam_search(model, prompt, policy, args.beams, max_new_tokens=length)[:n]
    sampler = greedy if args.decoder == "greedy" else options.make_sampler(args, args.decoder)
    generators = [torch.Generator().manual_seed(args.seed + i) for i in range(n)]
    if args.decoder == "kid" and args.optimiser == "cache":
        keywords = {"steps": args.steps, "max_new_tokens": length, "on_token": on_token}
        return [generate_on_cache(model, prompt, policy, sampler, generator=g, **keywords) for g in generators]
    return generate_batch(
        model,
        [prompt] * n,
        [policy] * n,
        sampler,
        max_new_tokens=length,
        generators=generators,
        on_token=on_token,
    )


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        runs = {"trie": run_trie, "rr": run_rethink} | dict.fromkeys(SETTINGS, run_ewe)
        runs.get(args.decoder, run)(args)
    except (ValueError, OSError) as error:
        note(f"generate.py: error: {error}")
        return 1
    except KeyboardInterrupt:
        note("interrupted")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
