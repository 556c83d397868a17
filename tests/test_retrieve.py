"""BM25 against its formula, rank fusion against its definition, and the program from the shell."""

import io
import json
import math
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minikid import retrieve
from minikid.retrieve import BM25, Hit, Hybrid, Passage, fuse, terms

WORDS = ["cat", "cats", "driving", "Mongolia", "the", "3,5", "naïve", "東京", "首都", "서울은"]
texts = st.lists(st.sampled_from(WORDS), max_size=9).map(" ".join)
corpora = st.lists(st.tuples(texts, texts), max_size=9).map(
    lambda pairs: [Passage(str(i), *pair) for i, pair in enumerate(pairs)]
)


def literal_bm25(corpus: list[list[str]], query: list[str], k1: float, b: float) -> list[float]:
    """Lucene's formula, document by document and term by term."""
    lengths = [len(document) for document in corpus]
    average = sum(lengths) / len(corpus)
    scores = []
    for document, length in zip(corpus, lengths, strict=True):
        score = 0.0
        for term in query:
            tf = document.count(term)
            df = sum(term in other for other in corpus)
            if tf:
                idf = math.log(1 + (len(corpus) - df + 0.5) / (df + 0.5))
                score += idf * tf / (tf + k1 * (1 - b + b * length / average))
        scores.append(score)
    return scores


@settings(max_examples=150, deadline=None)
@given(corpora, texts, st.sampled_from([(0.9, 0.4), (1.5, 0.75), (2.0, 0.0)]), st.integers(1, 12))
def test_bm25_equals_the_formula(passages, query, parameters, k):
    k1, b = parameters
    hits = BM25(passages, k1=k1, b=b).search(query, k)
    documents = [terms(f"{p.title} {p.text}") for p in passages]
    scores = literal_bm25(documents, terms(query), k1, b) if any(documents) else []
    matching = sorted((score for score in scores if score > 0), reverse=True)
    np.testing.assert_allclose([hit.score for hit in hits], matching[:k], rtol=1e-5)
    for hit in hits:
        np.testing.assert_allclose(hit.score, scores[int(hit.passage.id)], rtol=1e-5)
        assert hit.passage == passages[int(hit.passage.id)]
    assert len({hit.passage.id for hit in hits}) == len(hits)


@settings(max_examples=20, deadline=None)
@given(corpora, texts)
def test_a_saved_index_finds_the_same(tmp_path_factory, passages, query):
    folder = tmp_path_factory.mktemp("index")
    index = BM25(passages)
    index.save(folder)
    index.save(folder)
    assert BM25.open(folder).search(query, 5) == index.search(query, 5)
    assert BM25.open(folder, passages).search(query, 3) == index.search(query, 3)


def test_a_saved_index_is_mapped_not_read(tmp_path):
    BM25([Passage("1", "", "a cat")]).save(tmp_path)
    assert isinstance(BM25.open(tmp_path)._index.scores["data"], np.memmap)


def test_equal_scores_keep_the_order_of_the_corpus():
    passages = [Passage(str(i), "", "cat" if i % 2 else "dog") for i in range(40)]
    assert [hit.passage.id for hit in BM25(passages).search("cats", 5)] == ["1", "3", "5", "7", "9"]


def test_odd_corpora_and_queries():
    passages = [Passage("1", "", ""), Passage("2", "", "a cat"), Passage("3", "", "?!")]
    index = BM25(passages)
    assert [hit.passage.id for hit in index.search("Cats unheard-of", 100)] == ["2"]
    for query in ("unheard-of", "", "?!", "\n"):
        assert index.search(query, 3) == []
    for corpus in ([], [Passage("1", "", "")], iter([])):
        assert BM25(corpus).search("cat", 3) == []
    for k in (0, -1):
        with pytest.raises(ValueError, match="k of at least 1"):
            index.search("cat", k)
        with pytest.raises(ValueError, match="k of at least 1"):
            fuse([], k)


def test_titles_are_searched():
    assert BM25([Passage("1", "Mongolia", "a country")]).search("mongolia", 1)[0].passage.id == "1"


@pytest.mark.parametrize("query", ["蒙古", "首都是哪里", "烏", "トウキョウ", "서울", "서울에"])
def test_unspaced_scripts_are_searchable(query):
    passages = [
        Passage("0", "", "An English passage."),
        Passage("蒙", "", "蒙古国的首都是乌兰巴托。"),
        Passage("烏", "", "烏蘭巴托"),
        Passage("ト", "", "トウキョウは都市である。"),
        Passage("서", "", "서울은 대한민국의 수도이다."),
    ]
    expected = {"首": "蒙"}.get(query[0], query[0])
    assert BM25(passages).search(query, 1)[0].passage.id == expected


def test_a_whole_word_outweighs_its_scattered_characters():
    passages = [Passage("scattered", "", "京は東にある"), Passage("whole", "", "東京にある町")]
    assert BM25(passages).search("東京", 1)[0].passage.id == "whole"


def test_other_passages_damaged_and_missing_indexes_are_refused(tmp_path):
    passages = [Passage("1", "", "a cat")]
    with pytest.raises(ValueError, match="build it again"):
        BM25.open(tmp_path)
    BM25(passages).save(tmp_path)
    with pytest.raises(ValueError, match="other passages"):
        BM25.open(tmp_path, [Passage("1", "", "a dog")])
    with pytest.raises(ValueError, match="other passages"):
        BM25([Passage("1", "", "a dog")]).save(tmp_path)
    for name in ("vocab.index.json", "data.csc.index.npy", "meta.json"):
        (tmp_path / "bm25" / name).write_bytes(b"")
        with pytest.raises(ValueError, match="expected a BM25 index"):
            BM25.open(tmp_path)
        BM25(passages).save(tmp_path)
    assert BM25.open(tmp_path).search("cat", 1)[0].passage.id == "1"


def test_building_and_searching_say_nothing(tmp_path, capfd):
    BM25([Passage("1", "", "a cat")]).save(tmp_path)
    BM25.open(tmp_path).search("cat", 1)
    assert capfd.readouterr() == ("", "")


@given(st.lists(st.lists(st.integers(0, 9), unique=True), max_size=4), st.integers(1, 12), st.floats(0, 100), st.data())
def test_fusion_equals_its_definition(lists, k, c, data):
    weights = data.draw(st.none() | st.lists(st.floats(0.1, 5), min_size=len(lists), max_size=len(lists)))
    passages = [Passage(str(i), "", "") for i in range(10)]
    fused = fuse([[Hit(passages[i], 7.0) for i in found] for found in lists], k, c, weights)
    expected = {
        i: sum(
            (weights or [1] * len(lists))[n] / (c + found.index(i) + 1) for n, found in enumerate(lists) if i in found
        )
        for i in {i for found in lists for i in found}
    }
    assert [hit.score for hit in fused] == pytest.approx(sorted(expected.values(), reverse=True)[:k])
    for hit in fused:
        assert hit.score == pytest.approx(expected[int(hit.passage.id)])
    assert len({hit.passage for hit in fused}) == len(fused)


def test_fusion_tells_passages_of_one_id_apart_and_wants_a_weight_per_list():
    one, other = Hit(Passage("1", "", "a"), 1.0), Hit(Passage("1", "", "b"), 1.0)
    assert [hit.passage.text for hit in fuse([[one], [other, one]], 5)] == ["a", "b"]
    with pytest.raises(ValueError, match="zip"):
        fuse([[one]], 5, weights=[1, 2])


class Fixed:
    """A retriever that always finds the same, and remembers the k it was asked for."""

    def __init__(self, hits):
        self.hits, self.asked = hits, []

    def search(self, query, k):
        self.asked.append(k)
        return self.hits[:k]


def test_hybrid_fuses_deep_lists_and_keeps_the_first_of_both():
    passages = [Passage(str(i), "", "") for i in range(300)]
    lexical, dense = Fixed([Hit(p, 1.0) for p in passages[150:]]), Fixed([Hit(p, 1.0) for p in passages[:150]])
    hybrid = Hybrid(dense, lexical)
    first = [hit.passage for hit in hybrid.search("q", 5)]
    assert first[0] == passages[0]
    assert passages[150] in first
    assert len(hybrid.search("q", 250)) == 250
    assert lexical.asked == dense.asked == [100, 250]
    equal = Hybrid(dense, lexical, c=60, weights=(1, 1)).search("q", 4)
    assert equal == fuse([dense.hits[:100], lexical.hits[:100]], 4)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("Ulaanbaatar is the capital of Mongolia.")
    (tmp_path / "b.jsonl").write_text('{"_id": "p", "title": "Paris", "text": "The\\tcapital of France."}\n')
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]


def test_program_builds_and_searches(corpus, tmp_path, capsys, monkeypatch):
    index = str(tmp_path / "index")
    assert retrieve.main(["build", *corpus, "--out", index]) == 0
    assert "2 passages" in capsys.readouterr().err
    assert retrieve.main(["search", index, "capital of Mongolia"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split("\t")[2] for line in out] == ["a.txt:1", "p"]
    assert out[1].endswith("\tParis\tThe capital of France.")
    monkeypatch.setattr(sys, "stdin", io.StringIO("France\n\nnothing known\n"))
    assert retrieve.main(["search", index, "-", "--json", "-k", "1"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [entry["query"] for entry in found] == ["France", "nothing known"]
    assert [[hit["id"] for hit in entry["hits"]] for entry in found] == [["p"], []]


def test_program_fails_with_one_line(corpus, tmp_path, capsys):
    (tmp_path / "triples.tsv").write_text("Paris\tcapital of\tFrance\n")
    (tmp_path / "bad.jsonl").write_text("{\n")
    out = str(tmp_path / "index")
    for arguments, message in (
        (["build", str(tmp_path / "triples.tsv"), "--out", out], "triples, not passages"),
        (["build", str(tmp_path / "bad.jsonl"), "--out", out], "bad.jsonl:1: "),
        (["build", str(tmp_path / "none.txt"), "--out", out], "none.txt"),
        (["search", out, "x"], "no index there"),
        (["search", out, "x", "--retriever", "bm25"], "build it again"),
    ):
        assert retrieve.main(arguments) == 1
        streams = capsys.readouterr()
        assert streams.out == ""
        assert streams.err.startswith("minikid.retrieve: ")
        assert message in streams.err
        assert streams.err.count("\n") == 1
    assert list((tmp_path / "index").iterdir()) == []
    assert retrieve.main(["build", *corpus, "--out", out]) == 0
    for extra in (["--k1", "nan"], ["--b", "2"], ["--retriever", "dense", "--batch-size", "0"]):
        with pytest.raises(SystemExit) if "dense" in extra else nullcontext():
            assert retrieve.main(["build", *corpus, "--out", str(tmp_path / "new"), *extra]) == 1


def test_exit_codes_of_usage(tmp_path):
    for arguments, code in (
        ([], 2),
        (["search", str(tmp_path), "x", "--retriever", "best"], 2),
        (["search", str(tmp_path), "x", "-k", "0"], 2),
        (["--help"], 0),
    ):
        with pytest.raises(SystemExit) as raised:
            retrieve.main(arguments)
        assert raised.value.code == code
    run = subprocess.run(
        [sys.executable, "-m", "minikid.retrieve", "search", tmp_path, "x"], capture_output=True, check=False
    )
    assert (run.returncode, run.stdout) == (1, b"")
    assert b"no index there" in run.stderr
