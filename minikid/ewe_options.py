"""Command-line options of Ewe, and the settings and verifiers made of them."""

import argparse
from collections.abc import Iterable
from dataclasses import fields, replace

from minikid.arguments import count, positive
from minikid.ewe import SETTINGS, TRIGGERS, Settings
from minikid.model import GPT, Tokenizer
from minikid.options import make_nli
from minikid.verify import EntailmentVerifier, TripleVerifier, Verifier

OPTIONS = (
    *("units", "unit_length", "retrieve_every", "verify_every", "threshold", "trigger", "doubt", "tries"),
    *("verify_first", "ask_first", "context_weight", "unit_temperature", "relevance"),
    *("verifier", "nli", "supported", "refuted"),
)


def add_ewe_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "Ewe", "the decoders " + ", ".join(SETTINGS) + "; what is not given is as the decoder has it"
    )
    group.add_argument("--units", type=count, metavar="K", help="k, passages in the working memory; 0: the plain model")
    group.add_argument("--unit-length", type=positive, metavar="L", help="tokens kept for each; longer ones are cut")
    group.add_argument("--retrieve-every", type=count, metavar="N", help="T_r, sentences between retrievals; 0: none")
    group.add_argument("--verify-every", type=count, metavar="N", help="T_v, sentences between verifications; 0: none")
    group.add_argument(
        "--threshold", type=float, metavar="S", help="score that a passage found while writing must pass"
    )
    group.add_argument(
        "--trigger", choices=TRIGGERS, help="pause by T_r and T_v, or after sentences with a doubtful token"
    )
    group.add_argument("--doubt", type=float, metavar="X", help="a token is doubtful above X nats, below probability X")
    group.add_argument("--tries", type=count, metavar="R", help="how often a refuted sentence is written again")
    group.add_argument("--verify-first", action="store_true", default=None, help="verify, then retrieve")
    group.add_argument(
        "--ask-first", action=argparse.BooleanOptionalAction, help="the question in front of the passages as well"
    )
    group.add_argument("--context-weight", type=float, metavar="W", help="streams of the context (default: K + 1)")
    group.add_argument("--unit-temperature", type=float, metavar="T", help="divides the logits of the units' tokens")
    group.add_argument("--relevance", type=float, metavar="X", help="a unit weighs (score / best score) ** X")
    group.add_argument(
        "--verifier",
        choices=("triples", "nli"),
        default="triples",
        help="facts that words alone refute, or entailment by --nli or by the model (default: %(default)s)",
    )
    group.add_argument("--supported", type=float, default=0.6, metavar="P", help="of nli (default: %(default)s)")
    group.add_argument("--refuted", type=float, default=0.9, metavar="P", help="of nli (default: %(default)s)")


def make_settings(args: argparse.Namespace, decoder: str) -> Settings:
    """The decoder's settings with what the command line changes in them. ValueError for what Ewe refuses."""
    given = {field.name: getattr(args, field.name, None) for field in fields(Settings) if field.name in OPTIONS}
    given |= {"hits": args.k, "temperature": args.unit_temperature}
    return replace(SETTINGS[decoder], **{name: value for name, value in given.items() if value is not None})


def make_verifier(args: argparse.Namespace, model: GPT, tokenizer: Tokenizer, triples: Iterable = ()) -> Verifier:
    if args.verifier == "triples":
        return TripleVerifier(triples)
    return EntailmentVerifier(make_nli(args, model, tokenizer), args.supported, args.refuted)
