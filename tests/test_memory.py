"""LocalMemory against a literal first-in-first-out list, and words recognised piece by piece."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikid.memory import LocalMemory, complete_words
from minikid.text import words


@given(st.lists(st.sampled_from("abcdefgh")), st.integers(1, 5))
def test_memory_is_a_fifo_without_repeats(concepts, capacity):
    memory, literal = LocalMemory(capacity), []
    for concept in concepts:
        memory = memory.add(concept)
        if concept not in literal:
            literal.append(concept)
        if len(literal) > capacity:
            literal.pop(0)
        assert list(memory.concepts) == literal


def test_adding_leaves_the_old_memory_as_it_was():
    first = LocalMemory(2).add("drug")
    beams = [first.add("car"), first.add("law").add("court")]
    assert first.concepts == ("drug",)
    assert [beam.concepts for beam in beams] == [("drug", "car"), ("law", "court")]
    assert first.add("drug") == first
    assert hash(beams[0]) == hash(LocalMemory(2, ("drug", "car")))


def test_a_memory_without_room_is_refused():
    with pytest.raises(ValueError, match="at least 1 concept, got 0"):
        LocalMemory(0)
    with pytest.raises(ValueError, match="at most 1 concepts, got 2"):
        LocalMemory(1, ("a", "b"))


PIECES = st.lists(
    st.one_of(
        st.text(max_size=4), st.sampled_from(["dr", "iving", " ", ".", "'", "’", ",", "1", "000", "乌", "\u0301", "e"])
    )
)


@given(PIECES)
def test_words_in_pieces_are_the_words_of_the_whole(pieces):
    tail, found = "", []
    for piece in pieces:
        new, tail = complete_words(tail, piece)
        found += new
    new, tail = complete_words(tail, "", final=True)
    assert found + new == words("".join(pieces))
    assert tail == ""


@given(PIECES, st.sampled_from(["driving", "乌", "don't"]))
def test_a_word_is_recognised_when_it_is_complete_and_not_before(pieces, word):
    tail = ""
    for piece in [*pieces, " "]:
        _, tail = complete_words(tail, piece)
    for character in word:
        new, tail = complete_words(tail, character)
        assert new == []
    assert complete_words(tail, " and") == ([word], "and")


@given(st.lists(st.sampled_from(["word ", "wo", "rd, ", "3.", "5 "]), min_size=1))
def test_the_tail_is_at_most_the_last_open_word(pieces):
    tail = ""
    for piece in pieces:
        _, tail = complete_words(tail, piece)
        assert len(words(tail)) <= 1
        assert not any(map(str.isspace, tail))
