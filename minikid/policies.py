"""KID's decoding policy: which tokens the knowledge demonstrates at this step, and how far pi is moved to them (KID
Algorithm 2).

    V vocabulary · n[V] demonstration counts · G_ext the knowledge trie · G_loc the local memory of concepts

Each step: words that the last tokens completed and that are keys of G_ext enter G_loc; if G_loc changed, G_ext is
queried over h_max hops; the values found become tokens, n_v counting the hops in which v stands; the update of
Algorithm 1 is applied.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from minikid.kid import Reward, adam_policy, adapt_beta, exact_policy, kl_divergence, solve_beta
from minikid.knowledge import KnowledgeTrie
from minikid.memory import LocalMemory, complete_words
from minikid.text import is_content, words
from minikid.tokenizer import Tokenizer
from minikid.triples import RELATED

COPULAS = ("is", "are", "was", "were")
SHORTEST_LEAD = 3  # tokens of "subject relation" that the text must end in: "of Mongolia is"
BARE = frozenset(" \t\n([{\"'“‘-–—/")  # behind these a word has no space of its own


@dataclass(frozen=True)
class Update:
    """How one step moves pi towards the demonstrations (KID Algorithm 1)."""

    reward: Reward = "log-sum"  # the reading of Eq. 3
    optimiser: Literal["exact", "adam"] = "exact"  # the closed form, or K steps of Adam
    rule: Literal["solve", "adapt", "fixed"] = "solve"  # beta solved for sigma, Algorithm 1's rule, or constant
    sigma: float = 0.02  # target divergence KL(pi || p), nats per step
    beta: float = 1.0  # where "adapt" starts, and what "fixed" keeps
    steps: int = 3  # K of Adam
    lr: float = 0.1  # of Adam; the paper names none

    def __post_init__(self):
        for name, allowed in (
            ("reward", ("sum-log", "log-sum")),
            ("optimiser", ("exact", "adam")),
            ("rule", ("solve", "adapt", "fixed")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not (all(0 < x < math.inf for x in (self.sigma, self.lr)) and 1e-9 <= self.beta <= 1e9 and self.steps >= 1):
            wanted = "expected sigma, beta and lr above 0 and at least one step"
            raise ValueError(f"{wanted}, got {self}; all are finite, beta is from 1e-9 to 1e9")

    def __call__(self, log_pi: Tensor, counts: Tensor, beta: float) -> tuple[Tensor, float, float]:
        """The updated log-probabilities, KL(pi || p), and the beta of the next step."""
        # [V], [V] -> [V], scalar, scalar
        weight = solve_beta(log_pi, counts, self.sigma, self.reward) if self.rule == "solve" else beta
        if self.optimiser == "exact":
            log_p = exact_policy(log_pi, counts, weight, self.reward)
        else:
            log_p = adam_policy(log_pi, counts, weight, self.reward, self.steps, self.lr)
        if log_p is log_pi:  # no demonstrations that could move anything: beta is left alone
            return log_pi, 0.0, beta
        kl = kl_divergence(log_pi, log_p)
        return log_p, kl, adapt_beta(weight, kl, self.sigma) if self.rule == "adapt" else weight


@dataclass(frozen=True)
class KIDState:
    """What KID remembers between steps; never changed in place."""

    memory: LocalMemory  # G_loc
    paths: "Paths"  # the values that G_loc leads to
    beta: float  # of the next step
    tail: str = ""  # the unfinished word at the end of the text
    bare: frozenset[int] = frozenset()  # numbers of tokens behind which a word has no space of its own
    place: tuple[int, int] = (0, 0)  # how far the tokens are read (Tokenizer.read_on)
    done: frozenset[str] = frozenset()  # values that the text has completed, known to G_loc or not
    demonstrations: frozenset[int] = frozenset()  # D of the step that chose the last token
    kl: float = 0.0  # KL(pi || p) of that step, nats


Path = tuple[int, ...]


@dataclass(frozen=True)
class Spelling:
    """A value as token paths: behind a space, and where a word has no space of its own."""

    spaced: Path
    bare: Path

    def ends(self, tokens: Sequence[int], bare: frozenset[int]) -> bool:
        """Whether the tokens end in the value."""
        return _end(tokens, len(self.spaced)) == self.spaced or (
            len(tokens) - len(self.bare) in bare and _end(tokens, len(self.bare)) == self.bare
        )


@dataclass(frozen=True)
class Lead:
    """The way to a value along its edge: the tokens of "subject relation"."""

    tokens: Path
    subject: int  # how many of them are the subject's; 0: the relation is not demonstrated

    def endings(self) -> Iterator[tuple[Path, int]]:
        """Ends of it that text may have written, with how many tokens of each it takes to demonstrate the next one.

        The subject's last two tokens, or its only one, demonstrate the relation; the last three of the whole, the
        value.
        """
        for i in range(len(self.tokens)):
            held = self.subject - i  # of the subject's tokens
            if held >= 2 or held == self.subject == 1:
                yield self.tokens[i:], held
            elif len(self.tokens) - i >= SHORTEST_LEAD:
                yield self.tokens[i:], len(self.tokens) - i


@dataclass(frozen=True)
class Paths:
    """Values by hop as token paths: what continues a path from inside, and what begins one."""

    spaced: dict[Path, list[tuple[int, str, int]]]  # the tokens of a path so far -> (hop, value, next token)
    bare: dict[Path, list[tuple[int, str, int]]]
    starts: tuple[tuple[int, str, int, int], ...]  # (hop, value, first token after a space, first token after none)
    bag: frozenset[tuple[int, int]]  # (hop, token) of every token of every value
    longest: int

    @classmethod
    def of(
        cls, hops: Sequence[Sequence[str]], spell: Mapping[str, Spelling], leads: Mapping[str, Sequence["Lead"]]
    ) -> "Paths":
        found = [(hop, value, spell[value]) for hop, values in enumerate(hops) for value in values if value in spell]
        behind = [
            (hop, value, (*tokens, path.spaced[0]), shortest)
            for hop, value, path in found
            for lead in leads.get(value, ())
            for tokens, shortest in lead.endings()
        ]
        spaced = _continuations([*((hop, value, path.spaced, 1) for hop, value, path in found), *behind])
        bare = _continuations((hop, value, path.bare, 1) for hop, value, path in found)
        starts = tuple((hop, value, spelling.spaced[0], spelling.bare[0]) for hop, value, spelling in found)
        bag = frozenset((hop, token) for hop, _, spelling in found for token in spelling.spaced)
        return cls(spaced, bare, starts, bag, max(map(len, [*spaced, *bare]), default=0))

    def inside(
        self, tokens: Sequence[int], bare: frozenset[int], done: frozenset[str] = frozenset()
    ) -> set[tuple[int, int]]:
        """(hop, token) pairs that continue the longest path in which the tokens end; none if they end in none."""
        for length in range(min(self.longest, len(tokens)), 0, -1):
            prefix = _end(tokens, length)
            following = [*self.spaced.get(prefix, ())]
            if len(tokens) - length in bare:
                following += self.bare.get(prefix, ())
            if pairs := {(hop, token) for hop, value, token in following if value not in done}:
                return pairs
        return set()

    def beginning(self, tokens: Sequence[int], bare: frozenset[int], done: frozenset[str]) -> set[tuple[int, int]]:
        """(hop, token) pairs that begin a value that the text has not completed."""
        here = len(tokens) in bare
        return {(hop, first if here else after) for hop, value, after, first in self.starts if value not in done}


class KID:
    """Knowledge infused decoding (KID 3.3): `policy(log_pi[V], tokens, state) -> (log_p[V], state)`.

    `demonstrations` says how a value, which is a phrase, becomes tokens. "bag" (the paper): every token of every value.
    "path" (ours): if the text ends inside a value, the tokens that continue it; else the first tokens of the values
    that the text has not completed. "edge" (ours): the same with the paths of the trie, which run from the subject over
    the relation to the value: text that ends in "capital of Mongolia" demonstrates " is", and text that ends in
    "capital of Mongolia is" that edge's value alone; "is" is read both ways from there; values that the text has
    completed do not continue, and those whose first word is a number or a stopword do not begin one. Values are spelt
    as they stand in a sentence, with a leading space, except where the text ends in white space or an opening bracket.
    `question` is the text whose concepts fill G_loc first, the prompt if it is not given.

    `reach` (ours; 0: off) keeps the beginnings of values out of D unless they are among pi's `reach` most probable
    tokens: a large sigma then makes the text take up knowledge where the model sees room for it, and follow it to the
    end.
    """

    def __init__(
        self,
        knowledge: KnowledgeTrie,
        tokenizer: Tokenizer,
        update: Update | None = None,
        *,
        demonstrations: Literal["edge", "path", "bag"] = "path",
        hops: int = 4,
        window: int = 4,
        reach: int = 0,
        question: str | None = None,
    ):
        if demonstrations not in ("edge", "path", "bag"):
            raise ValueError(f"expected demonstrations 'edge', 'path' or 'bag', got {demonstrations!r}")
        if hops < 1 or window < 1 or reach < 0:
            raise ValueError(
                f"expected hops (h_max) and window (w_max) from 1 and reach from 0, got {hops}, {window} and {reach}"
            )
        self.knowledge, self.tokenizer, self.update = knowledge, tokenizer, update or Update()
        self.form, self.hops, self.window, self.reach, self.question = demonstrations, hops, window, reach, question
        self._spelling = _spell({triple.object for triple in knowledge.triples}, tokenizer)
        self._leads = _leads(knowledge, tokenizer) if demonstrations == "edge" else {}
        self._inner = frozenset(value for value in self._spelling if not is_content(next(iter(words(value)), "")))
        self._by_last: dict[int, list[str]] = {}  # values by their last token
        for value, spelling in self._spelling.items():
            for token in {spelling.spaced[-1], spelling.bare[-1]}:
                self._by_last.setdefault(token, []).append(value)

    def start(self, prompt: Sequence[int]) -> KIDState:
        """G_loc begins with the concepts of the question, the last `window` of them."""
        text = self.tokenizer.decode(prompt)
        memory = self._remember(LocalMemory(self.window), [text if self.question is None else self.question])
        _, tail = complete_words("", text)
        return KIDState(memory, self._query(memory), self.update.beta, tail=tail, bare=_bare(text, 0))

    def __call__(self, log_pi: Tensor, tokens: Sequence[int], state: KIDState) -> tuple[Tensor, KIDState]:
        # [V] -> [V]
        state, counts = self.demonstrate(tokens, state, log_pi)
        log_p, kl, beta = self.update(log_pi, counts, state.beta)
        return log_p, replace(state, beta=beta, kl=kl)

    def demonstrate(self, tokens: Sequence[int], state: KIDState, like: Tensor) -> tuple[KIDState, Tensor]:
        """Take in the tokens that are new since the state, and count what the knowledge demonstrates next."""
        # -> state, [V]
        state = self._read(tokens, state)
        following = self._following(tokens, state, like)
        n = Counter(token for _, token in following)
        counts = torch.zeros_like(like)
        if n:
            counts[torch.tensor(list(n), device=like.device)] = torch.tensor(list(n.values()), device=like.device).to(
                like
            )
        return replace(state, demonstrations=frozenset(n)), counts

    def _following(self, tokens: Sequence[int], state: KIDState, log_pi: Tensor) -> set[tuple[int, int]]:
        if self.form == "bag":
            return set(state.paths.bag)
        edge = self.form == "edge"
        if inside := state.paths.inside(tokens, state.bare, state.done if edge else frozenset()):
            return inside
        beginning = state.paths.beginning(tokens, state.bare, state.done | self._inner if edge else state.done)
        if not 0 < self.reach < len(log_pi):
            return beginning
        near = set(log_pi.topk(self.reach).indices.tolist())
        return {(hop, token) for hop, token in beginning if token in near}

    def _read(self, tokens: Sequence[int], state: KIDState) -> KIDState:
        """The state behind all of the tokens, taken in one by one."""
        memory, tail, place, bare, done = state.memory, state.tail, state.place, state.bare, set(state.done)
        for end in range(place[1] + 1, len(tokens) + 1):
            text, place = self.tokenizer.read_on(tokens[:end], place)
            if text:
                completed, tail = complete_words(tail, text)
                memory = self._remember(memory, completed)
                bare |= _bare(text, end)
            ending = self._by_last.get(tokens[end - 1], ())
            done.update(value for value in ending if self._spelling[value].ends(tokens[:end], bare))
        paths = state.paths if memory == state.memory else self._query(memory)
        return replace(state, memory=memory, paths=paths, tail=tail, place=place, bare=bare, done=frozenset(done))

    def _remember(self, memory: LocalMemory, texts: Iterable[str]) -> LocalMemory:
        for text in texts:
            for concept in self.knowledge.mentions(text):
                memory = memory.add(concept)
        return memory

    def _query(self, memory: LocalMemory) -> Paths:
        return Paths.of(self.knowledge.query(memory.concepts, self.hops), self._spelling, self._leads)


class LittleKID:
    """KID's ablation (KID A.3): the tokens of all end nodes as one constant list; no query, no hops, no memory."""

    def __init__(self, knowledge: KnowledgeTrie, tokenizer: Tokenizer, update: Update | None = None):
        self.update = update or Update()
        spellings = _spell(knowledge.values(), tokenizer).values()
        self.tokens = sorted({token for spelling in spellings for token in spelling.spaced})

    def start(self, prompt: Sequence[int]) -> KIDState:
        return KIDState(LocalMemory(1), Paths.of([], {}, {}), self.update.beta, demonstrations=frozenset(self.tokens))

    def __call__(self, log_pi: Tensor, tokens: Sequence[int], state: KIDState) -> tuple[Tensor, KIDState]:
        # [V] -> [V]
        counts = torch.zeros_like(log_pi)
        counts[self.tokens] = 1
        log_p, kl, beta = self.update(log_pi, counts, state.beta)
        return log_p, replace(state, beta=beta, kl=kl)


def _spell(values: Iterable[str], tokenizer: Tokenizer) -> dict[str, Spelling]:
    """Value -> its token paths; a value that the tokenizer has no tokens for is left out."""
    spellings = {v: Spelling(tuple(tokenizer.encode(" " + v)), tuple(tokenizer.encode(v))) for v in sorted(values)}
    return {value: spelling for value, spelling in spellings.items() if spelling.spaced and spelling.bare}


def _leads(knowledge: KnowledgeTrie, tokenizer: Tokenizer) -> dict[str, list[Lead]]:
    """Value -> the ways that lead to it. "Related to", which no text says, is not followed from the subject on."""
    leads: dict[str, list[Lead]] = {}
    for subject, relation, value in knowledge.triples:
        tokens, said = tuple(tokenizer.encode(f" {subject} {relation}")), relation != RELATED
        leads.setdefault(value, []).append(Lead(tokens, len(tokenizer.encode(f" {subject}")) if said else 0))
        if relation in COPULAS:
            leads.setdefault(subject, []).append(Lead(tuple(tokenizer.encode(f" {value} {relation}")), 0))
    return leads


def _continuations(paths: Iterable[tuple[int, str, Path, int]]) -> dict[Path, list[tuple[int, str, int]]]:
    """Of (hop, value, path, n): what follows each beginning of a path that has at least n tokens."""
    following: dict[Path, list[tuple[int, str, int]]] = {}
    for hop, value, path, shortest in paths:
        for i in range(shortest, len(path)):
            following.setdefault(path[:i], []).append((hop, value, path[i]))
    return following


def _end(tokens: Sequence[int], length: int) -> Path:
    """The last `length` tokens; fewer if there are not as many."""
    return tuple(tokens[max(len(tokens) - length, 0) :])


def _bare(text: str, place: int) -> frozenset[int]:
    """The place behind the text if a word has no space of its own there."""
    return frozenset({place} if text[-1:] in BARE or not text else ())
