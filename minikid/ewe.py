"""Ewe: writing with a working memory that is refreshed while the text grows (Lei et al., ACL 2025).

    V vocabulary · T tokens

At the end of a sentence the loop may pause. Retrieval feedback looks for passages on what was just said and makes them
units of the memory; verification feedback checks the sentence's claims and, where one is refuted, puts the refuting
passage into the memory, deletes the sentence and writes it again. Plain decoding, RAG, FLARE and iterative RAG are the
same loop with other settings (Ewe 3.5).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from minikid.generation import Generation, check_room, log_probabilities
from minikid.memory import WorkingMemory
from minikid.model import GPT
from minikid.passages import Hit, Passage
from minikid.retrieve import Retriever
from minikid.text import sentence_spans
from minikid.tokenizer import Tokenizer
from minikid.verify import Verdict, Verifier, claims, support

INSTRUCTION = "Answer the question using these passages.\n\n"
ASK_FIRST = "Find the answer to this question: {question}\n\n"
SHORTEST = 64  # tokens of a unit of one passage, in view of what may be found later
LEAST = 1e-6  # weight of a unit, however far its passage is behind the best
TRIGGERS = ("interval", "entropy", "min-prob")


@dataclass(frozen=True)
class Settings:
    """What Ewe's authors varied (Ewe 3, 4), and beneath it what we add."""

    units: int = 5  # k; 0 is the plain model
    unit_length: int = 192  # L, tokens at most
    hits: int = 5  # passages looked for at a time, of which the best k become units
    retrieve_every: int = 1  # T_r, sentences between retrieval feedbacks; 0: none but at the beginning
    verify_every: int = 1  # T_v, sentences between verifications; 0: none. The paper has 8, for longer texts
    threshold: float = 0.0  # a passage found while writing must score above it
    trigger: str = "interval"  # or "entropy", "min-prob": pause where a token's entropy or probability passes `doubt`
    doubt: float = 0.4  # nats, or a probability
    tries: int = 3  # R, how often a sentence is written again
    verify_first: bool = False  # of the two feedbacks
    joined: bool = False  # passages that are found together share a unit, one behind the other
    rewrite: bool = False  # FLARE: a sentence that brought in new passages is itself written again
    context_stream: bool = True
    context_weight: float | None = None
    # Ours, measured on the default model; the paper has 1, 0 and False.
    temperature: float = 0.8  # of the units' logits
    relevance: float = 4.0  # a passage found with a score s weighs (s / the best score) ** relevance
    ask_first: bool = True  # the question in front of the passages as well

    def __post_init__(self) -> None:
        if self.trigger not in TRIGGERS:
            raise ValueError(f"expected a trigger of {', '.join(TRIGGERS)}, got {self.trigger!r}")
        counts = min(self.units, self.retrieve_every, self.verify_every, self.tries)
        weight = 1.0 if self.context_weight is None else self.context_weight
        finite = all(0 < number < math.inf for number in (self.temperature, weight)) and 0 <= self.relevance < math.inf
        if counts < 0 or min(self.hits, self.unit_length) < 1 or not finite:
            raise ValueError(
                "expected units, intervals, tries and relevance from 0, hits and unit_length from 1, context_weight "
                f"and temperature above 0, got {self}"
            )


# Ewe 3.5. RAG has all passages in the one unit, which without a context's own stream is a prompt with them in front.
RAG = Settings(
    units=1,
    joined=True,
    unit_length=960,
    retrieve_every=0,
    verify_every=0,
    context_stream=False,
    temperature=1.0,
    relevance=0.0,
    ask_first=False,
)
FLARE = replace(RAG, retrieve_every=1, trigger="min-prob", rewrite=True)
ITERATIVE_RAG = Settings(verify_every=0)
SETTINGS = {"ewe": Settings(), "ewe-rag": RAG, "ewe-flare": FLARE, "ewe-iterative": ITERATIVE_RAG}


@dataclass(frozen=True)
class Pause:
    """One stop of the loop; the first is the retrieval before any text."""

    place: int  # tokens written so far, those of the sentence included
    sentence: str
    query: str | None = None  # None: nothing was looked for
    hits: tuple[Hit, ...] = ()
    added: tuple[Passage, ...] = ()  # to the memory
    evicted: tuple[Passage, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    deleted: bool = False  # the sentence is written again

    def record(self) -> dict[str, Any]:
        """For JSON: passages by their ids."""
        return {
            "place": self.place,
            "sentence": self.sentence,
            "query": self.query,
            "hits": [{"id": hit.passage.id, "score": hit.score} for hit in self.hits],
            "added": [passage.id for passage in self.added],
            "evicted": [passage.id for passage in self.evicted],
            "verdicts": [{**v._asdict(), "passage": v.passage and v.passage.id} for v in self.verdicts],
            "support": support(self.verdicts),
            "deleted": self.deleted,
        }


@dataclass
class EweGeneration(Generation):
    """A generation, and what happened on its way. `forwarded` counts the memory's tokens, too."""

    pauses: list[Pause] = field(default_factory=list)
    dropped: int = 0  # tokens of passages that did not fit into their units


class Draft:
    """A text that can be taken back: the cache, the tokens behind the prompt, and the logits of the next one."""

    def __init__(self, model: GPT, memory: WorkingMemory | None, prompt: Sequence[int]):
        self.model, self.memory, self.prompt = model, memory, list(prompt)
        self.cache, self.tokens, self.forwarded = model.new_cache(), [], 0
        self.logits = self._read(self.prompt)

    def write(self, token: int, read: bool = True) -> None:
        """One token more; `read` False leaves the logits as they are, for the last one."""
        self.tokens.append(token)
        if read:
            self.logits = self._read([token])

    def cut(self, length: int) -> None:
        """Back to the first `length` tokens; the last of them is read again, with the memory as it is now in view."""
        self.cache.truncate(self.cache.length - (len(self.tokens) - length) - 1)
        del self.tokens[length:]
        self.logits = self._read((self.prompt + self.tokens)[-1:])

    def _read(self, tokens: Sequence[int]) -> Tensor:
        # [T] -> [V]
        self.forwarded += len(tokens)
        states = self.model.hidden(torch.tensor([tokens], device=self.model.device), self.cache, self.memory)
        return self.model.head(states[:, -1])[0]


class Shelf:
    """The passages in the memory, by unit; a memory of no units holds nothing."""

    def __init__(self, memory: WorkingMemory | None, tokenizer: Tokenizer, settings: Settings):
        self.memory, self.tokenizer, self.settings = memory, tokenizer, settings
        self.units: list[tuple[Passage, ...]] = []  # oldest first
        self.dropped = 0

    def add(self, weighed: Mapping[Passage, float]) -> tuple[tuple[Passage, ...], tuple[Passage, ...]]:
        """Make passages, best first, units of the memory, the best last, which stays longest; (added, evicted).

        Each comes with its weight; passages that share a unit have the largest of theirs.
        """
        groups = as_units(self.tokenizer, list(weighed), self.settings)
        for group, tokens in groups.items():
            self.dropped += self.memory.add(tokens, max(weighed[passage] for passage in group)).dropped
        held, many = [*self.units, *groups], max(0, len(self.units) + len(groups) - self.settings.units)
        evicted, self.units = held[:many], held[many:]
        return _flat(groups), _flat(evicted)

    def new(self, hits: Sequence[Hit]) -> dict[Passage, float]:
        """Those found that the memory does not hold, best first, with their weights; to share a unit, all if any."""
        held, found = set(_flat(self.units)), weights(hits, self.settings.relevance)
        new = {passage: weight for passage, weight in found.items() if passage not in held}
        return found if self.settings.joined and new else new


def weights(hits: Sequence[Hit], relevance: float) -> dict[Passage, float]:
    """(score / best score) ** relevance, at least LEAST, of each passage found; all 1 where no score is above 0."""
    best = max((hit.score for hit in hits), default=0.0)
    if best <= 0:
        return {hit.passage: 1.0 for hit in hits}
    return {hit.passage: max(max(hit.score / best, 0.0) ** relevance, LEAST) for hit in hits}


def as_units(
    tokenizer: Tokenizer, passages: Sequence[Passage], settings: Settings
) -> dict[tuple[Passage, ...], list[int]]:
    """The units that passages, best first, become, and their tokens: the first k, the best last, or all as one."""
    k = settings.units
    groups = [tuple(passages)] if settings.joined else [(passage,) for passage in reversed(passages[:k])]
    texts = [[f"{p.title}: {p.text}\n\n" if p.title else f"{p.text}\n\n" for p in group] for group in groups]
    return {group: tokenizer.encode("".join(text)) for group, text in zip(groups, texts, strict=True) if k and group}


@torch.inference_mode()
def generate_ewe(
    model: GPT,
    tokenizer: Tokenizer,
    question: str,
    retriever: Retriever,
    verifier: Verifier,
    sampler: Callable[[Tensor, torch.Generator | None], int],
    settings: Settings = SETTINGS["ewe"],
    *,
    max_new_tokens: int = 100,
    chat: bool | None = None,
    generator: torch.Generator | None = None,
    on_sentence: Callable[[list[int], bool], None] | None = None,
) -> EweGeneration:
    """Answer a question with Ewe (Ewe 3), until eos or `max_new_tokens`, of which deleted tokens are none.

    A sentence is complete once the token behind it is drawn. Where the pause changes nothing that token stays: a
    verifier that accepts everything changes no text. Else it is drawn anew. Departures: where there is nothing left to
    write, nothing is retrieved for it; a sentence that is refuted after its last try stays; of the L positions of a
    unit only as many are used as the longest of the first passages needs, but SHORTEST for a single one, since a gap
    between passages and text makes them harder to read (what is found later is cut to that).

    `chat`: use the chat template (default: if there is one); `on_sentence(tokens, kept)` hears of a sentence as it is
    settled, kept or deleted. ValueError, before any token, for a prompt that leaves no room.
    """
    prefix, context = prompts(model, tokenizer, question, settings, max_new_tokens, chat)
    result, memory, hits = EweGeneration(), None, []
    if max_new_tokens == 0:
        return result
    if settings.units:
        hits = retriever.search(question, settings.hits)
        first = as_units(tokenizer, [hit.passage for hit in hits], settings).values()
        longest = max(map(len, first), default=settings.unit_length)
        length = min(settings.unit_length, max(longest, 0 if settings.joined else SHORTEST))
        ours = {name: getattr(settings, name) for name in ("context_stream", "context_weight", "temperature")}
        memory = WorkingMemory(model, settings.units, length, prefix, **ours)
    shelf = Shelf(memory, tokenizer, settings)
    if memory:
        result.pauses.append(Pause(0, "", question, tuple(hits), *shelf.add(shelf.new(hits))))
    draft = Draft(model, memory, context if memory else prefix + context)
    start, number, tries = 0, 1, 0  # of the sentence that is being written: first token, number, rewrites so far
    paused = False  # whether the pause before the next token has been
    doubts: list[bool] = []  # of every token
    while True:
        log_p = log_probabilities(draft.logits)
        token = sampler(log_p, generator)
        over = token in model.config.eos_ids
        if not paused and _complete(tokenizer, draft.tokens[start:], [] if over else [token]):
            forms = _due(settings, number, any(doubts[start:]), over)
            sentence = tokenizer.decode(draft.tokens[start:]).strip()
            pause = feedback(sentence, question, forms, shelf, retriever, verifier, settings, tries < settings.tries)
            if forms:
                result.pauses.append(replace(pause, place=len(draft.tokens)))
            if on_sentence is not None:
                on_sentence(draft.tokens[start:], not pause.deleted)
            if pause.deleted:
                draft.cut(start)
                del doubts[start:], result.log_probs[start:]
                tries += 1
                continue
            start, number, tries, paused = len(draft.tokens), number + 1, 0, True
            if pause.added:
                draft.cut(start)
                continue
        if over:
            result.stop = "eos"
            break
        result.log_probs.append(float(log_p[token]))
        doubts.append(_doubtful(settings, log_p, token))
        paused = False
        draft.write(token, read=len(draft.tokens) + 1 < max_new_tokens)
        if len(draft.tokens) == max_new_tokens:
            break
    if on_sentence is not None and draft.tokens[start:]:
        on_sentence(draft.tokens[start:], True)
    result.tokens, result.states, result.dropped = draft.tokens, [None] * len(draft.tokens), shelf.dropped
    result.forwarded = draft.forwarded + (memory.forwarded if memory else 0)
    return result


def feedback(
    sentence: str,
    question: str,
    forms: Sequence[str],
    shelf: Shelf,
    retriever: Retriever,
    verifier: Verifier,
    settings: Settings,
    may_rewrite: bool,
) -> Pause:
    """What "retrieve" and "verify", in the order given, say of a sentence, and what they put into the memory (Ewe 3.2).

    Passages that the memory holds are not found again; one that refutes is added even so, and then counts twice.
    """
    pause = Pause(0, sentence)
    for form in forms:
        if form == "retrieve":
            query = f"{question} {sentence}"
            hits = tuple(hit for hit in retriever.search(query, settings.hits) if hit.score > settings.threshold)
            pause, passages = replace(pause, query=query, hits=hits), shelf.new(hits)
            deleted = settings.rewrite and may_rewrite and bool(passages)
        else:
            found = {
                claim: [hit.passage for hit in retriever.search(claim, settings.hits)] for claim in claims(sentence)
            }
            verdicts = tuple(verifier(claim, passages) for claim, passages in found.items())
            refuted = [verdict.passage for verdict in verdicts if verdict.verdict == "refuted"]
            pause, deleted = replace(pause, verdicts=verdicts), may_rewrite and bool(refuted)
            passages = {passage: 1.0 for passage in refuted if passage and deleted}
        added, evicted = shelf.add(passages)
        pause = replace(pause, added=pause.added + added, evicted=pause.evicted + evicted, deleted=deleted)
        if deleted:
            break
    return pause


def prompts(
    model: GPT, tokenizer: Tokenizer, question: str, settings: Settings, max_new_tokens: int, chat: bool | None = None
) -> tuple[list[int], list[int]]:
    """The tokens before and behind the memory's units; ValueError where they, a unit and new tokens find no room."""
    instruction = ASK_FIRST.format(question=question) if settings.ask_first else INSTRUCTION
    prefix, context = layout(tokenizer, question, instruction if settings.units else "", chat)
    kept = min(settings.units, 1) * settings.unit_length
    try:
        check_room(model, range(len(prefix) + kept + len(context)), max_new_tokens)
    except ValueError as error:
        units = f"; {kept} of the positions are kept for a unit: or take shorter units" if kept else ""
        raise ValueError(f"{error}{units}") from None
    return prefix, context


def layout(tokenizer: Tokenizer, question: str, instruction: str, chat: bool | None) -> tuple[list[int], list[int]]:
    """The prompt in two, between which the memory's units stand: chat header and instruction; question and the rest.

    Without an instruction the two together are the tokens of the plain prompt.
    """
    text = f"Question: {question}" if instruction else question
    whole = tokenizer.prompt(text, chat)
    others = [tokenizer.prompt(other, chat) for other in ("0", "A")]  # whatever they share is the header
    columns = zip(whole, *others, strict=False)
    header = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    return whole[:header] + tokenizer.encode(instruction), whole[header:]


def _complete(tokenizer: Tokenizer, tokens: list[int], following: list[int]) -> bool:
    """Whether the tokens are a sentence, now that what follows is known ([]: the end): "3." is none before " 5"."""
    text = tokenizer.decode(tokens)
    if not following:
        return bool(text.strip())
    spans = sentence_spans(tokenizer.decode(tokens + following))
    return len(spans) > 1 and spans[0][1] == len(text.rstrip())


def _due(settings: Settings, number: int, doubtful: bool, over: bool) -> list[str]:
    """The forms of feedback that the sentence gets, in their order."""
    in_vain = not settings.units or (over and not settings.rewrite)
    every = {"retrieve": 0 if in_vain else settings.retrieve_every, "verify": settings.verify_every}
    if settings.trigger == "interval":
        due = [form for form, interval in every.items() if interval and number % interval == 0]
    else:
        due = [form for form, interval in every.items() if interval and doubtful]
    return due[::-1] if settings.verify_first else due


def _doubtful(settings: Settings, log_p: Tensor, token: int) -> bool:
    # [V] -> whether this token sets off the trigger
    if settings.trigger == "entropy":
        return float(torch.special.entr(log_p.exp()).sum()) > settings.doubt
    return settings.trigger == "min-prob" and float(log_p[token].exp()) < settings.doubt


def _flat(units: Sequence[tuple[Passage, ...]]) -> tuple[Passage, ...]:
    return tuple(passage for unit in units for passage in unit)
