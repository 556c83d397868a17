"""LocalMemory, KID's local knowledge G_loc: the concepts of the text so far, and how words are recognised (KID 3.2)."""

from dataclasses import dataclass, replace

from minikid.text import WORD_JOINERS, word_spans, words
from minikid.working_memory import Unit, WorkingMemory, aggregate_attention

__all__ = ["LocalMemory", "Unit", "WorkingMemory", "aggregate_attention", "complete_words"]


@dataclass(frozen=True)
class LocalMemory:
    """The last `capacity` different concepts, oldest first: w_max of KID A.2.2, first filled from the prompt.

    A value, never changed in place, so that the beams of a search can share it: `add` returns the memory after it.
    """

    capacity: int
    concepts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"expected a capacity of at least 1 concept, got {self.capacity}: the paper's w_max is 4")
        if len(self.concepts) > self.capacity:
            raise ValueError(
                f"expected at most {self.capacity} concepts, got {len(self.concepts)}: add them one by one"
            )

    def add(self, concept: str) -> "LocalMemory":
        """The memory with one concept more, without its oldest if it was full; one that it holds stays where it is."""
        if concept in self.concepts:
            return self
        return replace(self, concepts=(*self.concepts, concept)[-self.capacity :])


def complete_words(tail: str, piece: str, final: bool = False) -> tuple[list[str], str]:
    """The words that are complete once `piece` is written after `tail`, and the tail to pass with the next piece.

    A word is complete when something follows that cannot be part of it; a comma after "1" may still become "1,000".
    The tail is the last, open word alone, so the work does not grow with the text; `final` completes that as well. The
    words of all calls together are `text.words` of the whole text, however it is cut into pieces.
    """
    text = tail + piece
    spans = word_spans(text)
    if final or not spans:
        return words(text), ""
    start, end = spans[-1]
    rest = text[end:]
    if not rest or (len(rest) == 1 and rest in WORD_JOINERS):
        return words(text[:start]), text[start:]
    return words(text), ""
