"""Dense search against brute force, and what it does with other passages, other encoders and killed runs."""

import hashlib
import json
import types

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minikid import dense, retrieve
from minikid.dense import Dense
from minikid.encoder import load_encoder
from minikid.passages import Passage

D = 8


class Hashed:
    """An encoder whose vectors are drawn from a hash of the text; float64 and strided, as a careless one might be."""

    dimension = D

    def __init__(self, name="a", stop_after=None):
        self.fingerprint, self.seen, self.stop_after = name, [], stop_after

    def encode(self, texts, batch_size=32, progress=False):
        rows = np.empty((len(texts), 2 * D))
        for row, text in zip(rows, texts, strict=True):
            if len(self.seen) == self.stop_after:
                raise KeyboardInterrupt
            self.seen.append(text)
            seed = hashlib.sha256(repr((self.fingerprint, text)).encode()).digest()
            row[:] = np.random.default_rng(list(seed)).normal(size=2 * D)
        return rows[:, ::2]


def numbered(count) -> list[Passage]:
    return [Passage(str(i), f"title {i}", f"text {i}") for i in range(count)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.text(max_size=5), st.integers(1, 40))
def test_search_equals_brute_force(count, query, k):
    passages, encoder = numbered(count), Hashed()
    hits = Dense(passages, encoder).search(query, k)
    vector = encoder.encode([query])[0]
    scores = [float(vector @ encoder.encode([(p.title, p.text)])[0]) for p in passages]
    order = sorted(range(count), key=lambda i: -scores[i])[:k]
    assert [hit.passage for hit in hits] == [passages[i] for i in order]
    np.testing.assert_allclose([hit.score for hit in hits], [scores[i] for i in order], rtol=1e-5, atol=1e-5)


def test_two_encoders_and_saved_index(tmp_path):
    passages, ours, theirs = numbered(20), Hashed("passages"), Hashed("questions")
    index = Dense(passages, ours, query_encoder=theirs, folder=tmp_path)
    vector = theirs.encode(["q"])[0]
    best = max(passages, key=lambda p: vector @ ours.encode([(p.title, p.text)])[0])
    assert index.search("q", 1)[0].passage == best
    again = Dense.open(tmp_path, Hashed("questions"), passages)
    assert again.search("q", 7) == index.search("q", 7)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "passages"]
    memory = Dense(passages, ours, query_encoder=theirs)
    memory.save(tmp_path / "other")
    assert Dense.open(tmp_path / "other", theirs).search("q", 7) == index.search("q", 7)


def test_other_passages_and_encoders_are_refused(tmp_path):
    Dense(numbered(5), Hashed(), folder=tmp_path)
    with pytest.raises(ValueError, match="other query encoder"):
        Dense.open(tmp_path, Hashed("b"))
    with pytest.raises(ValueError, match="other passages"):
        Dense.open(tmp_path, Hashed(), numbered(4))
    with pytest.raises(ValueError, match="other passages"):
        Dense(numbered(4), Hashed(), folder=tmp_path)
    wide = types.SimpleNamespace(dimension=D + 1, fingerprint="wide", encode=None)
    with pytest.raises(ValueError, match="two encoders of one width"):
        Dense(numbered(5), Hashed(), query_encoder=wide)


def test_damaged_and_missing_indexes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a dense index"):
        Dense.open(tmp_path, Hashed())
    index = Dense(numbered(5), Hashed(), folder=tmp_path)
    path = tmp_path / "dense" / "index.faiss"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match="expected a dense index"):
        Dense.open(tmp_path, Hashed())
    index._index.reset()
    index.save(tmp_path)
    with pytest.raises(ValueError, match="differ in number"):
        Dense.open(tmp_path, Hashed())


def test_a_killed_run_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "SHARD", 4)
    passages = numbered(18)
    with pytest.raises(KeyboardInterrupt):
        Dense(passages, Hashed(stop_after=10), folder=tmp_path)
    assert not (tmp_path / "dense").exists()
    assert len(list((tmp_path / "dense.part").glob("*.npy"))) == 2
    with pytest.raises(ValueError, match="other encoder"):
        Dense(passages, Hashed("b"), folder=tmp_path)
    encoder = Hashed()
    index = Dense(passages, encoder, folder=tmp_path)
    assert encoder.seen == [(p.title, p.text) for p in passages[8:]]
    assert index.search("q", 18) == Dense(passages, Hashed()).search("q", 18)
    assert not (tmp_path / "dense.part").exists()


@pytest.mark.parametrize("factory", ["IVF4,Flat", "HNSW8", "PQ4x4", "OPQ4,IVF2,PQ4x4"])
def test_large_corpus_indexes_train_and_find(tmp_path, factory):
    passages = numbered(400)
    tuning = "nprobe=4" if "IVF" in factory else ""
    index = Dense(passages, Hashed(), factory=factory, tuning=tuning, folder=tmp_path)
    exact = {hit.passage for hit in Dense(passages, Hashed()).search("q", 20)}
    hits = index.search("q", 20)
    assert len(hits) == 20
    assert len(exact & {hit.passage for hit in hits}) >= (20 if factory == "IVF4,Flat" else 5)
    assert Dense.open(tmp_path, Hashed()).search("q", 20) == hits


def test_rows_that_faiss_does_not_find_are_dropped():
    passages = numbered(40)
    hits = Dense(passages, Hashed(), factory="IVF4,Flat").search("q", 40)  # looks into one cell of four
    assert 0 < len(hits) < 40
    assert len({hit.passage for hit in hits}) == len(hits)


@pytest.mark.parametrize(
    ("factory", "tuning", "message"),
    [("Nonsense", "", "cannot make"), ("Flat", "nprobe=2", "cannot set"), ("IVF64,Flat", "", "cannot train")],
)
def test_what_faiss_cannot_do_is_said_before_encoding(factory, tuning, message):
    encoder = Hashed()
    with pytest.raises(ValueError, match=message):
        Dense(numbered(9), encoder, factory=factory, tuning=tuning)
    assert encoder.seen == [] or message == "cannot train"


def test_empty_corpora_empty_passages_and_odd_k(tmp_path):
    for factory in ("Flat", "IVF4,Flat"):
        index = Dense([], Hashed(), factory=factory, folder=tmp_path / factory)
        assert index.search("q", 3) == Dense.open(tmp_path / factory, Hashed()).search("q", 3) == []
    index = Dense(iter([Passage("1", "", "")]), Hashed())
    assert [hit.passage.id for hit in index.search("", 9)] == ["1"]
    with pytest.raises(ValueError, match="k of at least 1"):
        index.search("q", 0)


def test_a_gpu_is_used_where_faiss_has_one(monkeypatch):
    moved = []
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", lambda index: moved.append(index) or index)
    index = Dense(numbered(5), Hashed())
    assert moved == [index._index]

    def refuse(index):
        raise RuntimeError

    monkeypatch.setattr(faiss, "index_cpu_to_all_gpus", refuse)
    assert Dense(numbered(5), Hashed()).search("q", 3) == index.search("q", 3)


def test_program_builds_and_searches_both_indexes(tmp_path, tmp_path_factory, capsys):
    from test_encoder import BertModel, save

    folder = tmp_path_factory.mktemp("encoder")
    save(folder, BertModel)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"id": c, "text": f"{c} cat"}) + "\n" for c in "xyz"))
    out = str(tmp_path / "index")
    build = ["build", str(tmp_path / "a.jsonl"), "--out", out, "--encoder", str(folder)]
    assert retrieve.main([*build, "--retriever", "hybrid"]) == 0
    for kind in ("bm25", "dense", "hybrid"):
        capsys.readouterr()
        assert retrieve.main(["search", out, "y", "--encoder", str(folder), "--retriever", kind]) == 0
        found = [line.split("\t")[2] for line in capsys.readouterr().out.splitlines()]
        assert "y" in found
        assert len(found) == (1 if kind == "bm25" else 3)
    assert len(Dense.open(out, load_encoder(folder)).search("y", 2)) == 2
