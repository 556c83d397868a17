"""Triples as keys: brackets, readers, joining and splitting."""

import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikid.kgclue import (
    ORDERS,
    Fact,
    build_trie,
    join_key,
    join_subject,
    read_facts,
    read_questions,
    split_key,
    split_subject,
)


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        ("牛郎织女（中国民间传说）", ("牛郎织女", "中国民间传说")),
        ("燕子尾（中药（圆叶西番莲的全草））", ("燕子尾", "中药（圆叶西番莲的全草）")),
        ("E-Type（捷豹(Jaguar)旗下跑车型号）", ("E-Type", "捷豹(Jaguar)旗下跑车型号")),
        ("Paris (Texas)", ("Paris", "Texas")),
        ("x (1) (2)", ("x (1)", "2")),
        ("a（b)", ("a", "b")),
        ("  a\u3000 b \t( c  d )\n", ("a b", "c d")),
        ("(You Drive Me) Crazy", ("(You Drive Me) Crazy", "")),
        ("（草）", ("（草）", "")),
        ("Foo（）", ("Foo（）", "")),
        ("a) b)", ("a) b)", "")),
        ("a (b", ("a (b", "")),
        (":)", (":)", "")),
        ("", ("", "")),
    ],
)
def test_split_subject(subject, expected):
    assert split_subject(subject) == expected


NAMES = st.text("ab 北京", min_size=1).map(lambda s: " ".join(s.split())).filter(bool)
BRACKETS = st.sampled_from(["()", "（）"])
MEANINGS = st.recursive(NAMES, lambda m: st.tuples(m, BRACKETS, m).map(lambda t: t[0] + t[1][0] + t[2] + t[1][1]))


@given(NAMES, st.one_of(st.just(""), MEANINGS))
def test_split_undoes_join(name, meaning):
    assert split_subject(join_subject(name, meaning)) == (name, meaning)


FIELDS = st.text("abc", min_size=1)


@given(st.builds(Fact, FIELDS, FIELDS, st.one_of(st.just(""), FIELDS), FIELDS), st.sampled_from(sorted(ORDERS)))
def test_split_key_undoes_join_key(fact, order):
    key = join_key(fact, encode, 0, order)
    assert split_key(key, 0, order) == tuple(encode(field) for field in fact[:3])
    assert key[0] == ord(fact.subject[0])
    assert key[-1] != 0


def test_join_key_by_hand():
    with_meaning, without = Fact("ab", "p", "m", "o"), Fact("ab", "p", "", "o")
    a, b, m, p = encode("abmp")
    assert join_key(with_meaning, encode, 0) == [a, b, 0, p, 0, m]
    assert join_key(with_meaning, encode, 0, "SMP") == [a, b, 0, m, 0, p]
    assert join_key(without, encode, 0) == [a, b, 0, p]
    assert join_key(without, encode, 0, "SMP") == [a, b, 0, 0, p]
    with pytest.raises(ValueError, match="a token of 'p'"):
        join_key(without, encode, p)
    with pytest.raises(ValueError, match="'PSM'"):
        join_key(without, encode, 0, "PSM")
    with pytest.raises(ValueError, match="at most two separators"):
        split_key([1, 0, 2, 0, 3, 0], 0)


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_build_trie(order):
    facts = [
        *(Fact("熊猫", "颜色", "", value) for value in ("黑", "白", "黑")),
        Fact("熊猫", "颜色", "汽车", "红"),
        Fact("熊猫", "食物", "", "竹子"),
    ]
    trie = build_trie(iter(facts), encode, 0, order)
    assert len(trie) == 3
    assert [trie.values(join_key(fact, encode, 0, order)) for fact in facts[2:]] == [["黑", "白"], ["红"], ["竹子"]]


@pytest.mark.parametrize("name", ["kb.tsv", "kb.tsv.gz"])
def test_read_facts(tmp_path, name):
    text = "\ufeff熊猫（动物）\t颜色\t黑 白\r\n\n a  b \tp\t o\u3000o \n"
    data = text.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert list(read_facts(tmp_path / name)) == [Fact("熊猫", "颜色", "动物", "黑 白"), Fact("a b", "p", "", "o o")]


@pytest.mark.parametrize("line", ["a\tb", "a\tb\tc\td", "a\t\tc", "\tb\tc", "a\tb\t ", "a b c"])
def test_bad_lines_are_named(tmp_path, line):
    path = tmp_path / "kb.tsv"
    path.write_text(f"s\tp\to\n{line}\n")
    facts = read_facts(path)
    assert next(facts) == Fact("s", "p", "", "o")
    with pytest.raises(ValueError, match=r"kb\.tsv:2: expected a subject"):
        next(facts)


def test_bytes_that_are_not_text_are_named(tmp_path):
    (tmp_path / "kb.tsv").write_bytes(b"s\tp\to\n" * 3 + b"\xff\t\t\n")
    (tmp_path / "kb.tsv.gz").write_bytes(gzip.compress(b"s\tp\to\n" * 1000)[:-12])
    (tmp_path / "plain.gz").write_bytes(b"s\tp\to\n")
    for name in ("kb.tsv", "kb.tsv.gz", "plain.gz"):
        with pytest.raises(ValueError, match=name):
            list(read_facts(tmp_path / name))


@pytest.mark.parametrize("whole", [False, True])
def test_read_questions(tmp_path, whole):
    entries = [
        {"id": 7, "question": "熊猫是什么 颜色？", "answer": "熊猫（动物） ||| 颜色 ||| 黑 ||| 白"},
        {"question": "q", "answer": "s|||p|||o"},
    ]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps(entries, indent=1) if whole else "\n".join(map(json.dumps, entries)))
    first, second = read_questions(path)
    assert first == ("7", "熊猫是什么 颜色？", Fact("熊猫", "颜色", "动物", "黑 ||| 白"))
    assert second == ("1", "q", Fact("s", "p", "", "o"))


@pytest.mark.parametrize(
    "line", ["{", "3", "{}", '{"question": "q", "answer": "s ||| p"}', '{"question": 1, "answer": ""}']
)
def test_bad_questions_are_named(tmp_path, line):
    path = tmp_path / "dev.json"
    path.write_text('{"question": "q", "answer": "s ||| p ||| o"}\n' + line)
    with pytest.raises(ValueError, match=r"dev\.json:2: expected"):
        list(read_questions(path))
