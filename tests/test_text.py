"""Sentences that survive abbreviations, words of any script, stems: examples, and what holds for every text."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikid.text import STOPWORDS, is_content, sentence_spans, sentences, stem, word_spans, words

FRAGMENTS = """The the he Dr. Ph.D. U.S. No. 5 3.5 192.168.1.1 e.g. B. Smith etc. end. Why? Yes! ... … 。 ！ 乌兰
“quoted.”
(it. in.) é ’s don’t""".split()
PROSE = st.lists(st.sampled_from([*FRAGMENTS, " ", " ", " ", "\n", "\n\n", ". "])).map("".join)
TEXTS = st.one_of(st.text(), PROSE)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("He holds a Ph.D. in law. She does not.", ["He holds a Ph.D. in law.", "She does not."]),
        ("Dr. Smith met Lester B. Pearson. They talked.", ["Dr. Smith met Lester B. Pearson.", "They talked."]),
        ("J. R. R. Tolkien wrote it. J. A. Smith read it.", ["J. R. R. Tolkien wrote it.", "J. A. Smith read it."]),
        ("Ping 192.168.1.1. It answers in 3.5 ms.", ["Ping 192.168.1.1.", "It answers in 3.5 ms."]),
        ("Use fruit, e.g. apples. Peel them.", ["Use fruit, e.g. apples.", "Peel them."]),
        (
            "The U.S. Senate met. He lives in the U.S. The end.",
            ["The U.S. Senate met.", "He lives in the U.S.", "The end."],
        ),
        ("See No. 5 below. The answer is no. It is late.", ["See No. 5 below.", "The answer is no.", "It is late."]),
        ("And so... it went. Then... Nothing.", ["And so... it went.", "Then...", "Nothing."]),
        ('He said "Stop!" (It was late.) Then he left.', ['He said "Stop!"', "(It was late.)", "Then he left."]),
        ('"Stop!" he said. Jeopardy! is a show.', ['"Stop!" he said.', "Jeopardy! is a show."]),
        ("乌兰巴托是首都。它很大！是吗？好", ["乌兰巴托是首都。", "它很大！", "是吗？", "好"]),
        ("A heading\n\nA paragraph\nand a line.", ["A heading", "A paragraph", "and a line."]),
        ("1. First point. 2. Second point.", ["1. First point.", "2. Second point."]),
        ("Smith et al. Found it vs. Jones. Good.", ["Smith et al. Found it vs. Jones.", "Good."]),
        ("It was safe.The node.js team left.", ["It was safe.", "The node.js team left."]),
        ("Vitamin C. It is in fruit.", ["Vitamin C.", "It is in fruit."]),
        ("  \n \t", []),
        ("", []),
    ],
)
def test_sentences_end_where_a_reader_ends_them(text, expected):
    assert sentences(text) == expected


@given(TEXTS)
def test_sentence_spans_partition_the_text_but_for_white_space(text):
    spans = sentence_spans(text)
    bounds = [0, *(bound for span in spans for bound in span), len(text)]
    assert bounds == sorted(bounds)
    assert all(text[start:end] == text[start:end].strip() != "" for start, end in spans)
    assert not "".join(text[bounds[i] : bounds[i + 1]] for i in range(0, len(bounds), 2)).strip()


@given(TEXTS)
def test_the_words_of_the_sentences_are_the_words_of_the_text(text):
    assert [word for sentence in sentences(text) for word in words(sentence)] == words(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don’t stop the U.S. team!", ["don't", "stop", "the", "u.s", "team"]),
        ("1,000.5 well-known and/or 71% x,y", ["1,000.5", "well", "known", "and", "or", "71", "x", "y"]),
        ("Cafe\u0301 = CAFÉ", ["café", "café"]),
        ("乌兰巴托 is 首都", ["乌", "兰", "巴", "托", "is", "首", "都"]),
        ("हिन्दी Größe", ["हिन्दी", "größe"]),
        ("か\u3099く", ["が", "く"]),
        ("_ -- '' .", []),
    ],
)
def test_words(text, expected):
    assert words(text) == expected


@given(TEXTS)
def test_word_spans_are_ordered_and_hold_the_words(text):
    spans = word_spans(text)
    assert all(start < end for start, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert [word for start, end in spans for word in words(text[start:end])] == words(text)


@given(st.lists(st.sampled_from(["driver", "don't", "u.s", "3.5", "é", "1,000", "x"])))
def test_words_of_joined_words_are_the_words(parts):
    assert words(" ".join(parts)) == parts


@pytest.mark.parametrize(
    ("word", "expected"), [("driving", "drive"), ("drugs", "drug"), ("driver's", "driver"), ("蒙", "蒙"), ("", "")]
)
def test_stem(word, expected):
    assert stem(word) == expected


def test_a_stem_is_no_prefix_of_a_longer_word():
    assert stem("car") == stem("cars") != stem("cardiologist")


@given(st.text())
def test_stemming_is_a_function_of_any_string(word):
    assert isinstance(stem(word), str)
    assert stem(word) == stem.__wrapped__(word)


def test_stopwords_are_words_in_small_letters_and_carry_no_content():
    assert all(words(word) == [word] for word in STOPWORDS)
    assert not any(map(is_content, STOPWORDS))
    assert is_content("marijuana")
    assert not is_content("1995")
