"""What the programs share: command-line options, presets, and the making of policies and prompts from them."""

import argparse
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from minikid import chain, store, weights
from minikid.arguments import count, positive
from minikid.decode import KID, LookAhead, Sampler, Update
from minikid.encoder import load_encoder
from minikid.filter import MEASURES
from minikid.kgclue import build_trie as build_keys
from minikid.kgclue import join_subject, read_facts
from minikid.knowledge import FILE, KnowledgeTrie
from minikid.model import GPT
from minikid.nli import NLI, CrossEncoder, LanguageModelNLI
from minikid.passages import Passage, PassageFile, holds_triples, read_passages
from minikid.rethinker import Rethinker
from minikid.retrieve import Retriever, make_retriever, open_retriever
from minikid.templates import read_sentences
from minikid.tokenizer import Tokenizer
from minikid.trie import TokenTrie
from minikid.triples import Triple

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Every option that a preset sets may be given on the command line as well, which then wins.
PRESETS: dict[str, dict[str, Any]] = {
    "default": {  # chosen by measurement, see the README
        "reward": "log-sum",
        "optimiser": "exact",
        "rule": "solve",
        "sigma": 1.5,
        "beta": 1.0,
        "demonstrations": "edge",
        "reach": 20,
        "hops": 2,
        "window": 4,
        "kid_temperature": 0.5,
        "top_k": 20,
        "top_p": 0.9,
    },
    "paper": {  # KID 3.3, A.2 and Table 5
        "reward": "sum-log",
        "optimiser": "adam",
        "rule": "adapt",
        "sigma": 0.02,
        "beta": 1.0,
        "demonstrations": "bag",
        "reach": 0,
        "hops": 4,
        "window": 4,
        "kid_temperature": 1.0,
        "top_k": 20,
        "top_p": 0.9,
    },
    "released": {  # the constants of the authors' program, without its faults
        "reward": "log-sum",
        "optimiser": "cache",
        "rule": "fixed",
        "sigma": 0.02,
        "beta": 0.01,
        "demonstrations": "bag",
        "reach": 0,
        "hops": 1,
        "window": 4,
        "kid_temperature": 1.0,
        "top_k": 20,
        "top_p": 0.92,
    },
}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=weights.DEFAULT,
        metavar="NAME|DIR",
        help="built-in name, HF id, or HF-layout folder (default: %(default)s)",
    )
    group.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    group.add_argument("--dtype", default="float32", choices=DTYPES, help="of the weights (default: %(default)s)")
    group.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="wrap the prompt in the model's chat template (default: if it has one)",
    )


def add_knowledge_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("knowledge")
    group.add_argument(
        "--knowledge",
        nargs="+",
        metavar="FILE|DIR",
        help="passages (.txt, .jsonl, DPR .tsv) or triples (.tsv of 3 columns), or a folder that `python -m "
        "minikid.retrieve build` wrote, whose index is searched; default: the built-in passages",
    )
    group.add_argument(
        "--retriever",
        choices=("bm25", "dense", "hybrid", "none"),
        help="none: all passages (default: bm25; for a folder, all that it was built with)",
    )
    group.add_argument("--encoder", default=weights.ENCODER, metavar="NAME|DIR", help="of dense and hybrid, BERT")
    group.add_argument("-k", type=positive, default=5, help="passages to retrieve (default: %(default)s)")
    group.add_argument("--context", action="store_true", help="put the passages into the prompt as well")


def add_filter_option(parser: argparse._ActionsContainer, about: str) -> None:
    parser.add_argument(
        "--filter",
        metavar="|".join((*MEASURES, "DIR")),
        help="FILCO: of the passages leave one sentence, chosen by a measure or written by the trained model in DIR; "
        + about,
    )


def check_filter(name: str | None) -> None:
    """ValueError unless --filter is a measure or a folder."""
    if name and name not in MEASURES and not Path(name).is_dir():
        raise ValueError(f"--filter: expected {', '.join(MEASURES)} or the folder of a trained model, got {name!r}")


def add_decoding_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("decoding")
    group.add_argument("--max-new-tokens", type=count, default=80, metavar="N", help="default: %(default)s")
    group.add_argument("--seed", type=int, default=0, help="sample i draws with seed + i (default: %(default)s)")
    group.add_argument("--temperature", type=float, help="0 is greedy (default: 1, of kid and little-kid 0.5)")
    group.add_argument(
        "--top-k", type=count, metavar="K", help="keep the K most probable tokens, 0 for all (default: 20)"
    )
    group.add_argument("--top-p", type=float, metavar="P", help="keep the smallest set of mass P (default: 0.9)")
    kid = parser.add_argument_group("KID")
    kid.add_argument(
        "--preset",
        default="default",
        choices=PRESETS,
        help="paper: the letter of the paper; released: that of the authors' program",
    )
    kid.add_argument("--reward", choices=("sum-log", "log-sum"), help="reading of Eq. 3")
    kid.add_argument(
        "--optimiser",
        choices=("exact", "adam", "cache"),
        help="closed form, K steps of Adam, or steps on the key-value cache",
    )
    kid.add_argument(
        "--rule", choices=("solve", "adapt", "fixed"), help="beta: solved for sigma, Algorithm 1's rule, or constant"
    )
    kid.add_argument("--sigma", type=float, help="target KL(pi || p) per step, in nats: the strength of infusion")
    kid.add_argument("--beta", type=float, help="weight of the KL penalty: where 'adapt' starts, what 'fixed' keeps")
    kid.add_argument(
        "--steps", type=count, default=3, metavar="K", help="gradient steps of adam and cache (default: %(default)s)"
    )
    kid.add_argument("--lr", type=float, default=0.1, help="Adam's learning rate (default: %(default)s)")
    kid.add_argument(
        "--demonstrations",
        choices=("edge", "path", "bag"),
        help="values as token paths behind their edges, as token paths, or as bags of tokens",
    )
    kid.add_argument(
        "--reach", type=count, metavar="R", help="begin a value only by one of the R most probable tokens; 0: by any"
    )
    kid.add_argument("--hops", type=positive, metavar="N", help="h_max, hops per query")
    kid.add_argument("--window", type=positive, metavar="N", help="w_max, concepts in the local memory")


def add_rethink_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("rethinking with retrieval")
    group.add_argument("--paths", type=positive, default=9, metavar="N", help="reasoning paths (default: %(default)s)")
    group.add_argument("--path-temperature", type=temperature, default=0.7, metavar="T", help="default: %(default)s")
    group.add_argument(
        "--task", choices=chain.TASKS, default=chain.TASKS[0], help="which demonstrations (default: %(default)s)"
    )
    group.add_argument("--demos", metavar="FILE", help='others: JSON lines {"question": ..., "reasoning": ...}')
    group.add_argument("--form", type=int, choices=(1, 2, 3), help="of faithfulness (default: 1; of temporal: 2)")
    group.add_argument(
        "--variant",
        choices=("vote", "best", "selection", "generation"),
        default="vote",
        help="faithful voting, the single best path, or Variant I or II (default: %(default)s)",
    )
    group.add_argument("--nli", metavar="NAME|DIR", help="a cross-encoder of E and C (default: the model itself)")


def temperature(text: str) -> float:
    """An argparse type: what a Sampler takes, from 0."""
    return Sampler(float(text)).temperature


def settle(args: argparse.Namespace) -> argparse.Namespace:
    """Fill what the command line left open from the preset. ValueError for values that the policies would refuse."""
    args.kid_temperature = args.temperature
    for name, value in (*PRESETS[args.preset].items(), ("temperature", 1.0)):
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.optimiser == "cache" and args.rule == "solve":
        raise ValueError("--optimiser cache has no closed form to solve beta for; use --rule adapt or --rule fixed")
    make_sampler(args)
    make_update(args)
    return args


def make_sampler(args: argparse.Namespace, decoder: str = "sample") -> Sampler:
    """Without --temperature, KID's comes from the preset, that of other decoders is 1."""
    infused = decoder in ("kid", "little-kid")
    return Sampler(args.kid_temperature if infused else args.temperature, args.top_k, args.top_p)


def make_update(args: argparse.Namespace) -> Update:
    optimiser = "exact" if args.optimiser == "cache" else args.optimiser  # the cache's steps are not an Update's
    return Update(args.reward, optimiser, args.rule, args.sigma, args.beta, args.steps, args.lr)


def make_kid(args: argparse.Namespace, knowledge: KnowledgeTrie, tokenizer: Tokenizer, question: str) -> KID:
    return KID(
        knowledge,
        tokenizer,
        make_update(args),
        demonstrations=args.demonstrations,
        hops=args.hops,
        window=args.window,
        reach=args.reach,
        question=question,
    )


def make_nli(args: argparse.Namespace, model: GPT, tokenizer: Tokenizer) -> NLI:
    """The cross-encoder of --nli, or the language model itself."""
    return CrossEncoder.from_folder(args.nli, args.device) if args.nli else LanguageModelNLI(model, tokenizer)


def make_rethinker(args: argparse.Namespace, model: GPT, tokenizer: Tokenizer, judges: bool = True) -> Rethinker:
    """Plain few-shot prompts unless --chat asks for turns; without `judges` only paths; no encoder, no NLI is loaded.

    ValueError for what cannot be read.
    """
    return Rethinker(
        model,
        tokenizer,
        load_encoder(args.encoder, args.device) if judges else None,
        make_nli(args, model, tokenizer) if judges else None,
        chain.read_demonstrations(args.demos, args.task),
        chain.line_ends(tokenizer),
        chat=bool(args.chat),
        form=args.form or (2 if args.task == "temporal" else 1),
        paths=args.paths,
        temperature=args.path_temperature,
        length=args.max_new_tokens,
    )


def open_evidence(args: argparse.Namespace) -> tuple[Retriever, str]:
    """What finds premises in --knowledge, every kind of it as sentences; and, for --task table, the tables as text."""
    files = [file for file in knowledge_of(args) if not Path(file).is_dir()]
    if len(files) < len(knowledge_of(args)):
        retriever, triples = open_knowledge(args)
        if triples:
            raise ValueError("--knowledge: expected an index or files as evidence, got both; index the sentences, too")
        return retriever, ""
    found = {file: list(read_sentences(file)) for file in files}
    tables = [p.text for file, passages in found.items() if Path(file).suffix == ".json" for p in passages]
    passages = [passage for some in found.values() for passage in some]
    retriever = make_retriever(passages, args.retriever or "bm25", args.encoder, args.device)
    return retriever, " ".join(tables) if args.task == "table" else ""


def separator_of(tokenizer: Tokenizer) -> int:
    """The token between the fields of a trie's keys, `Tokenizer.separator`; ValueError for a tokenizer without one."""
    if tokenizer.separator is None:
        raise ValueError("this tokenizer has no control token beside eos that could separate the fields of a key")
    return tokenizer.separator


def make_look_ahead(trie: TokenTrie, tokenizer: Tokenizer, question: str, separator: int, field: int = 1) -> LookAhead:
    """Look-ahead for a question; " river" in it is met by "river", as which a predicate begins, `field` of a key."""
    tokens = tokenizer.encode(question)
    bare = {token: tokenizer.encode(tokenizer.decode([token]).lstrip(" ")) for token in tokens}
    alike = {token: ids[0] for token, ids in bare.items() if len(ids) == 1}
    return LookAhead(trie, tokenizer.eos_ids, tokens, separator, field=field, alike=alike)


def open_or_build_trie(
    folder: Path | None, files: Sequence[str] | None, tokenizer: Tokenizer, separator: int
) -> tuple[TokenTrie, str]:
    """The trie kept in `folder`, or else one built of the triples in `files` and kept there; and where it comes from.

    ValueError where there is neither, for a trie of another tokenizer, and for a file or folder that is damaged.
    """
    if folder and (not files or (folder / store.HEADER).exists()):
        return TokenTrie.open(folder, tokenizer.digest), f"{folder}" + (", --knowledge unread" if files else "")
    facts = (fact for file in files or [] for fact in read_facts(file))
    trie = build_keys(facts, tokenizer.encode, separator)
    if folder:
        trie.save(folder, tokenizer.digest)
    return trie, ", ".join(files or [])


def builtin_knowledge() -> Path:
    """The passages that come with the package."""
    return Path(str(resources.files("minikid") / "passages.jsonl"))


def read_knowledge(files: Iterable[str | Path]) -> tuple[list[Passage], list[Triple]]:
    """Passages and triples of any mixture of files, by their kind, and of folders with an index of passages."""
    passages: list[Passage] = []
    triples: list[Triple] = []
    for file in files:
        if Path(file).is_dir():
            passages += PassageFile(Path(file) / "passages")
        elif holds_triples(file):
            triples += [
                Triple(join_subject(fact.subject, fact.meaning), fact.predicate, fact.value)
                for fact in read_facts(file)
            ]
        else:
            passages += read_passages(file)
    return passages, triples


def knowledge_of(args: argparse.Namespace) -> list[str | Path]:
    """The files of --knowledge, or the passages that come with the package."""
    return args.knowledge or [builtin_knowledge()]


def open_knowledge(args: argparse.Namespace) -> tuple[Retriever, list[Triple]]:
    """What finds the passages of --knowledge, and its triples.

    A folder's index is searched as it is; the passages of files are indexed in memory. ValueError for both at once,
    since scores of two indices do not compare, and for whatever cannot be read.
    """
    folders = [Path(file) for file in knowledge_of(args) if Path(file).is_dir()]
    passages, triples = read_knowledge(file for file in knowledge_of(args) if not Path(file).is_dir())
    if folders and (passages or len(folders) > 1):
        raise ValueError("--knowledge: expected files, or one folder with an index (and files of triples beside it)")
    if folders:
        return open_retriever(folders[0], args.retriever, args.encoder, args.device), triples
    return make_retriever(passages, args.retriever or "bm25", args.encoder, args.device), triples


def open_or_build_knowledge(folder: Path, files: Sequence[str | Path]) -> tuple[KnowledgeTrie, str]:
    """The G_ext kept in `folder`, or else one of all that `files` hold, kept there; and where it comes from."""
    if (folder / FILE).exists():
        return KnowledgeTrie.open(folder), f"{folder}, --knowledge unread"
    trie = build_trie(*read_knowledge(files))
    trie.save(folder)
    return trie, ", ".join(map(str, files))


def build_trie(passages: Sequence[Passage], triples: Sequence[Triple]) -> KnowledgeTrie:
    """G_ext of passages, whose triples are extracted, and of ready-made triples."""
    return KnowledgeTrie.from_triples([*KnowledgeTrie.from_text(passages).triples, *triples])
