"""The built-in knowledge: its form, and that it holds what the built-in prompts ask for."""

import json
import re
from collections import Counter
from importlib.resources import files

import pytest

LEAST_PASSAGES, LEAST_TOPICS = 60, 10
SHORTEST, LONGEST = 50, 110  # words a passage


@pytest.fixture(scope="module")
def passages() -> list[dict]:
    lines = files("minikid").joinpath("passages.jsonl").read_bytes().decode("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def sentences(text: str) -> list[str]:
    """Split at full stops, which is enough here: the file is written without abbreviations that carry one."""
    return [s.strip() for s in re.split(r"(?<=[.!?])\s+", text) if s.strip()]


def topic(passage: dict) -> str:
    return passage["id"].rpartition("-")[0]


def test_every_line_is_a_passage(passages):
    for passage in passages:
        assert list(passage) == ["id", "title", "text"]
        assert all(isinstance(value, str) and value == value.strip() and value for value in passage.values())
        assert re.fullmatch(r"[a-z]+-[1-9]\d*", passage["id"])


def test_enough_passages_over_enough_topics(passages):
    topics = Counter(map(topic, passages))
    assert len(passages) >= LEAST_PASSAGES
    assert len(topics) >= LEAST_TOPICS
    assert min(topics.values()) >= 2, "a topic of a single passage is no topic"


@pytest.mark.parametrize("field", ["id", "title", "text"])
def test_fields_are_unique(passages, field):
    assert [v for v, n in Counter(p[field] for p in passages).items() if n > 1] == []


def test_passages_are_short_but_not_too_short(passages):
    outside = {p["id"]: len(p["text"].split()) for p in passages if not SHORTEST <= len(p["text"].split()) <= LONGEST}
    assert outside == {}


def test_no_sentence_stands_twice(passages):
    counts = Counter(s.lower() for p in passages for s in sentences(p["text"]))
    assert [s for s, n in counts.items() if n > 1] == []


def test_sentences_are_whole(passages):
    for passage in passages:
        for sentence in sentences(passage["text"]):
            assert sentence[0].isupper(), (passage["id"], sentence)
            assert sentence.endswith("."), (passage["id"], sentence)
            assert len(sentence.split()) >= 4, (passage["id"], sentence)


def test_text_is_plain_ascii_on_single_spaces(passages):
    for passage in passages:
        for value in passage.values():
            assert value.isascii(), passage["id"]
            assert value == " ".join(value.split()), passage["id"]


def test_title_is_named_in_the_text(passages):
    """The title is what a pronoun stands for, so the text must speak of it under that name."""
    for passage in passages:
        assert passage["title"].lower() in passage["text"].lower(), passage["id"]


def test_driving_prompt_is_covered(passages):
    texts = [p["text"].lower() for p in passages if topic(p) in {"cannabis", "driving"}]
    assert len(texts) >= 6
    for phrase in ("marijuana", "cannabis", "driving ability", "reaction time", "alcohol", "drowsy driving", "impair"):
        assert sum(phrase in text for text in texts) >= 1, phrase
    assert sum(bool(re.search(r"(marijuana|cannabis).*\bimpairs?\b", s)) for t in texts for s in sentences(t)) >= 3


def test_mongolia_prompt_is_covered(passages):
    by_title = {p["title"]: p["text"] for p in passages}
    assert "The capital of Mongolia is Ulaanbaatar" in by_title["Mongolia"]
    assert "Ulaanbaatar is the capital and largest city of Mongolia." in by_title["Ulaanbaatar"]
