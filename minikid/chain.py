"""Chains of thought: demonstrations, prompts, and the facts and the answer in what a model wrote (RR 3).

Demonstrations are JSON lines {"question": ..., "reasoning": ...}, where the reasoning ends in "So the answer is ...";
a "task" (yes-no, temporal, table) tells kinds in one file apart. Those of the package are its own.
"""

import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import torch

from minikid.decode import Sampler, Vanilla, generate_batch, greedy
from minikid.files import json_lines
from minikid.generation import Generation
from minikid.metrics import ARTICLES
from minikid.model import GPT
from minikid.text import sentences, words
from minikid.tokenizer import Tokenizer

TASKS = ("yes-no", "temporal", "table")

_CONCLUSION = re.compile(r"\W*(?:thus|so(?! far\b|-)|therefore|hence|consequently|in conclusion)\b", re.I)
_STATED = re.compile(r".*\banswer(?: to [^.?]*)?(?:\s+(?:is|must be|would be)\b|\s*(?=:)):?(.*)", re.I | re.S)
_SAID = re.compile(r"\W*(?:(?:thus|so|therefore|hence),?\s+)?(yes|no)\s*(?:[,.;:!]|$)", re.I)
_YES_NO = re.compile(r"\W*(?:(?:yes)\b|no\s*(?:$|[^\w\s]|(?:because|since|as|it|he|she|they|there)\b))", re.I)


class Demonstration(NamedTuple):
    """A question and the reasoning that answers it."""

    question: str
    reasoning: str


class Chain(NamedTuple):
    """One reasoning path, read: RR's R = (E, P), where only the facts of the explanation E are kept apart."""

    text: str
    facts: tuple[str, ...]  # sentences that evidence can speak about, as written; conclusions are not
    answer: str | None  # P, the last answer stated, as written; None where there is none


def read_demonstrations(path: str | Path | None = None, task: str | None = None) -> list[Demonstration]:
    """The demonstrations of a file (default: the package's) in order; those of another task are passed over.

    ValueError names the file and the line that is not a demonstration, or says that there are none.
    """
    path = Path(str(resources.files("minikid") / "demonstrations.jsonl")) if path is None else Path(path)
    found = []
    for where, entry in json_lines(path):
        fields = [entry.get(key) if isinstance(entry, dict) else None for key in Demonstration._fields]
        if not all(isinstance(field, str) and field.strip() for field in fields):
            raise ValueError(f'{where}: expected {{"question", "reasoning"}} with text in both, came {str(entry)[:60]}')
        if parse(fields[1]).answer is None:
            raise ValueError(f'{where}: expected a reasoning that ends in "So the answer is ...", came {fields[1]!r}')
        if task is None or entry.get("task", task) == task:
            found.append(Demonstration(*fields))
    if not found:
        raise ValueError(f"{path}: no demonstrations" + (f" for the task {task}" if task else ""))
    return found


def parse(text: str) -> Chain:
    """The facts and the answer of a reasoning path.

    An answer is what follows "the answer is" to the end of the sentence, or a "Yes" or "No" that a sentence opens with;
    the last one wins. Sentences that answer, conclude ("Thus, ...", "So ...") or ask are not facts.
    """
    facts, answer = [], None
    for sentence in sentences(text):
        stated = _STATED.match(sentence) or _SAID.match(sentence)
        if stated:
            answer = stated[1].strip(" \t\"'“”*.!") or answer
        elif not _CONCLUSION.match(sentence) and not sentence.endswith("?") and words(sentence):
            facts.append(sentence)
    return Chain(text, tuple(facts), answer)


def normalise(answer: str) -> str:
    """What answers are compared by: lower-case words without articles, signs and points; "yes, ..." is "yes".

    "1990." and "1990" are the same, "3.5" and "35" or "-5" and "5" are not. Never empty unless the answer is.
    """
    if _YES_NO.match(answer):
        return words(answer)[0]
    signed = re.sub(r"(?<![\w.])[-−](?=\d)", "minus ", answer)
    found = [re.sub(r",|\.(?!\d)|(?<!\d)\.", "", word) for word in words(signed)]
    return " ".join([word for word in found if word not in ARTICLES] or found) or answer.strip().lower()


def accuracy(text: str, answers: Iterable[str]) -> dict[str, float]:
    """{"Acc": 100 or 0} where the answers are yes or no: whether the answer that the text states is among them.

    A text without "the answer is" counts as a whole, so that "Yes, it is" is "yes".
    """
    wanted = {normalise(answer) for answer in answers}
    if not wanted or not wanted <= {"yes", "no"}:
        return {}
    stated = parse(text).answer
    return {"Acc": 100.0 * (normalise(text if stated is None else stated) in wanted)}


def cot_prompt(
    tokenizer: Tokenizer, demonstrations: Sequence[Demonstration], question: str, chat: bool = False, begun: str = ""
) -> list[int]:
    """Ids of a few-shot prompt: "Q: ... A: ..." blocks as in the paper, or turns of the model's chat template.

    `begun` is reasoning that is given, and that the model goes on from.
    """
    if chat:
        roles = ("user", "assistant")
        turns = [{"role": role, "content": text} for d in demonstrations for role, text in zip(roles, d, strict=True)]
        return tokenizer.chat([*turns, {"role": "user", "content": question}]) + tokenizer.encode(begun)
    blocks = "".join(f"Q: {d.question}\nA: {d.reasoning}\n\n" for d in demonstrations)
    return tokenizer.prompt(f"{blocks}Q: {' '.join(question.split())}\nA:{' ' * bool(begun)}{begun}", chat=False)


def line_ends(tokenizer: Tokenizer) -> list[int]:
    """The tokens with a line break in them: where a completion's line ends. Takes a moment; keep it."""
    return [token for token in range(tokenizer.vocab_size) if "\n" in tokenizer.decode([token])]


def sample_chains(
    model: GPT, prompt: Sequence[int], stops: Sequence[int], sampler: Sampler, n: int, length: int, seed: int = 0
) -> list[Generation]:
    """n reasoning paths of at most `length` tokens, in one batch that reads the prompt once; path i draws with
    seed + i.
    """
    generators = [torch.Generator().manual_seed(seed + i) for i in range(n)]
    ends = [*model.config.eos_ids, *stops]
    return generate_batch(
        model, [prompt] * n, [Vanilla()] * n, sampler, max_new_tokens=length, eos_ids=ends, generators=generators
    )


def complete(model: GPT, prompts: Sequence[Sequence[int]], stops: Sequence[int], length: int) -> list[Generation]:
    """The most probable token at each step, up to the end of the line: greedy chain-of-thought, and short answers."""
    ends = [*model.config.eos_ids, *stops]
    return generate_batch(model, prompts, [Vanilla()] * len(prompts), greedy, max_new_tokens=length, eos_ids=ends)
