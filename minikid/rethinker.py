"""Rethinking with retrieval from a question to an answer: the sampling of paths, and what answers (RR 4, 5.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minikid.chain import Chain, Demonstration, complete, cot_prompt, parse, sample_chains
from minikid.decode import Sampler
from minikid.encoder import Encoder
from minikid.factgen import generate_facts
from minikid.generation import Generation
from minikid.model import GPT
from minikid.nli import NLI
from minikid.rethink import Evidence, Fact, Rethought, premise_text, rethink, select_facts
from minikid.retrieve import Retriever
from minikid.tokenizer import Tokenizer


@dataclass(frozen=True)
class Rethinker:
    """The models and settings of RR."""

    model: GPT
    tokenizer: Tokenizer
    encoder: Encoder | None  # of M, and
    nli: NLI | None  # of E and C: only the judge needs them
    demonstrations: Sequence[Demonstration]
    line_ends: Sequence[int]  # of `chain.line_ends`; they end a path except in a chat
    chat: bool = False
    form: int = 1  # of faithfulness
    paths: int = 9
    temperature: float = 0.7
    length: int = 96  # tokens of a path; a departure from the paper's 256

    @property
    def stops(self) -> Sequence[int]:
        return () if self.chat else self.line_ends

    def prompt(self, question: str, begun: str = "") -> list[int]:
        return cot_prompt(self.tokenizer, self.demonstrations, question, self.chat, begun)

    def text(self, row: Generation) -> str:
        return self.tokenizer.decode(row.tokens).strip()

    def greedy(self, question: str) -> Generation:
        """The baseline CoT: one path, the most probable token at each step."""
        return complete(self.model, [self.prompt(question)], self.stops, self.length)[0]

    def sample(self, question: str, seed: int) -> list[Generation]:
        """The paths, in one batch."""
        sampler = Sampler(self.temperature)
        return sample_chains(self.model, self.prompt(question), self.stops, sampler, self.paths, self.length, seed)

    def judge(self, retriever: Retriever) -> Evidence:
        return Evidence(retriever, self.encoder, self.nli)

    def rethink(self, rows: Sequence[Generation], judge: Evidence) -> Rethought:
        return rethink([self.text(row) for row in rows], judge, self.form)

    def select(self, found: Rethought, judge: Evidence) -> list[Fact]:
        """The supporting facts of Variant I."""
        return select_facts(found, judge.encode, self.form)

    def generate(self, found: Rethought, judge: Evidence) -> list[Fact]:
        """The supporting facts of Variant II."""
        own = [] if found.best is None else found.paths[found.best].facts
        return generate_facts(own, self.select(found, judge), self.ask, judge)

    def conclude(
        self, question: str, found: Rethought, judge: Evidence, variant: str = "vote"
    ) -> tuple[Chain | None, list[Fact]]:
        """The reasoning that answers and its facts; variant: "vote", "best", "selection" or "generation".

        None where no path states an answer.
        """
        if variant in ("selection", "generation") and found.best is not None:
            facts = self.select(found, judge) if variant == "selection" else self.generate(found, judge)
            return self.infer(question, facts), facts
        chosen = found.winner if variant == "vote" else found.best
        return (None, []) if chosen is None else (found.paths[chosen].chain, found.paths[chosen].facts)

    def infer(self, question: str, facts: Sequence[Fact]) -> Chain:
        """The answer that supporting facts lead to: greedy reasoning that begins with them (RR 5.3).

        Equal facts stand once. A departure: the paper prefers UnifiedQA here, and compares it with this (Table 7).
        Without facts this is greedy chain-of-thought.
        """
        begun = " ".join(dict.fromkeys(fact.text for fact in facts))
        row = complete(self.model, [self.prompt(question, begun)], self.stops, self.length)[0]
        return parse(f"{begun} {self.text(row)}".strip())

    def ask(self, prompts: Sequence[str]) -> list[str]:
        """The line, of at most 40 tokens, that the model completes each prompt with."""
        rows = complete(self.model, [self.tokenizer.prompt(p, chat=False) for p in prompts], self.line_ends, 40)
        return [self.text(row) for row in rows]


def as_record(found: Rethought) -> dict[str, Any]:
    """All that was found, for JSON."""
    paths = [
        {
            "text": path.chain.text,
            "answer": path.answer,
            "score": path.score,
            "facts": [fact._asdict() | {"premise": fact.premise and fact.premise._asdict()} for fact in path.facts],
        }
        for path in found.paths
    ]
    return {"answer": found.answer, "votes": found.votes, "winner": found.winner, "best": found.best, "paths": paths}


def as_text(found: Rethought, text: str, facts: Sequence[Fact]) -> str:
    """For readers: reasoning, its facts with their scores and premises, and the votes."""
    lines = [text]
    for fact in facts:
        lines.append("  {}  M {:.2f}  E {:.2f}  C {:.2f}".format(fact.text, *fact.scores))
        lines.append(f"    {premise_text(fact.premise)}" if fact.premise else "    no evidence found")
    given = [path.answer for path in found.paths]
    votes = [f"{answer} {total:.2f} of {given.count(answer)}" for answer, total in found.votes.items()]
    return "\n".join([*lines, f"votes: {', '.join([*votes, f'no answer of {given.count(None)}'])}"])
