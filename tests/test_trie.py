"""TokenTrie against the literal dict of dicts: every operation, batches, files, faults."""

import json
import signal
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minikid.flatten import nearest_smaller
from minikid.store import HEADER
from minikid.trie import DictTrie, TokenTrie, _scatter

TEXTS = st.sampled_from(["", "a", "ab", "b", "長城", "é", "\n", "🦉"])


@st.composite
def entries(draw):
    """Keys and values with much in common: few tokens, from small, 16-bit and 32-bit vocabularies."""
    top = draw(st.sampled_from([1, 3, 2**16 - 3, 2**16 - 2, 2**16 - 1, 2**31]))
    pool = draw(st.lists(st.integers(0, top), min_size=1, max_size=5))
    key = st.lists(st.sampled_from(pool), min_size=1, max_size=7)
    keys = draw(st.lists(key, min_size=1, max_size=25))
    return keys, draw(st.lists(TEXTS, min_size=len(keys), max_size=len(keys)))


def assert_same(trie: TokenTrie, keys: list[list[int]], values: list[str] | None) -> None:
    """Every operation of the trie, on prefixes and on nodes, equals the oracle's."""
    oracle = DictTrie(keys, values)
    distinct = sorted(set(map(tuple, keys)))
    assert len(trie) == len(distinct)
    for prefix in {key[:i] for key in distinct for i in range(len(key) + 1)}:
        node, expected = trie.find(prefix), oracle.find(prefix)
        tokens = oracle.children(expected)
        assert trie.children(node).tolist() == tokens
        assert trie.child_nodes(node) == [trie.advance(node, token) for token in tokens]
        assert trie.ends(node) == ("end" in expected) == (prefix in trie) == (prefix in distinct)
        completions = list(oracle.completions(expected))
        assert list(trie.completions(prefix)) == list(trie.completions_at(node)) == completions
        assert trie.count(prefix) == trie.count_at(node) == len(completions)
        below = {tuple(c[: i + 1]) for c in completions for i in range(len(c))}
        assert [(d, t, n) for d, t, n in trie.walk(node)] == [
            (len(tail), tail[-1], trie.find(prefix + tail)) for tail in sorted(below)
        ]
        if prefix in distinct:
            assert trie.values(prefix) == trie.values_at(node) == expected["end"]
        else:
            with pytest.raises(ValueError, match="no key ends"):
                trie.values(prefix)
        for token in {t for key in keys for t in key} - set(tokens):
            assert (*prefix, token) not in trie
            with pytest.raises(ValueError, match=f"token {token} "):
                trie.advance(node, token)


@given(entries())
@settings(max_examples=200, deadline=None)
def test_equals_the_dict_of_dicts(case):
    keys, values = case
    assert_same(TokenTrie.build(keys, values), keys, values)


@given(entries())
@settings(max_examples=50, deadline=None)
def test_without_values(case):
    assert_same(TokenTrie.build(iter(case[0])), case[0], None)


@given(entries())
@settings(max_examples=50, deadline=None)
def test_arrays_give_the_same_trie_as_sequences(case):
    keys, values = case
    blobs = [value.encode() for value in values]
    arrays = TokenTrie.from_arrays(
        np.array([t for key in keys for t in key]),
        np.array([len(key) for key in keys]),
        (np.frombuffer(b"".join(blobs), np.uint8), np.array([len(b) for b in blobs])),
    )
    sequences = TokenTrie.build((tuple(key) for key in keys), blobs)
    for name, a in sequences._arrays.items():
        assert np.array_equal(a, arrays._arrays[name])
        assert a.dtype == arrays._arrays[name].dtype


@given(entries(), st.integers(0, 3), st.data())
@settings(max_examples=100, deadline=None)
def test_batches_equal_single_nodes(case, extra, data):
    keys = [[token % 1000 for token in key] for key in case[0]]
    trie = TokenTrie.build(keys)
    nodes = [trie.find(key[:i]) for key in keys for i in range(len(key) + 1)]
    nodes = data.draw(st.lists(st.sampled_from(nodes), max_size=12))
    size = trie.vocabulary + extra
    mask = trie.masks(torch.tensor(nodes, dtype=torch.int64), size)
    assert mask.shape == (len(nodes), size)
    assert mask.dtype == torch.bool
    for row, node in zip(mask, nodes, strict=True):
        assert row.nonzero().flatten().tolist() == trie.children(node).tolist()
    assert trie.ends_all(torch.tensor(nodes, dtype=torch.int64)).tolist() == [trie.ends(node) for node in nodes]
    first, spans = torch.tensor([trie._next(node) for node in nodes]).long(), [slice(*trie._further(n)) for n in nodes]
    again = _scatter(first, torch.from_numpy(trie._arrays["branches"]), spans, size)  # as on accelerators
    assert torch.equal(again[:, 1:], mask)


def test_masks_take_the_trie_s_vocabulary_and_refuse_less():
    trie = TokenTrie.build([[3, 9], [5]])
    assert trie.masks(torch.tensor([trie.root])).shape == (1, 10)
    with pytest.raises(ValueError, match="at least 10 tokens"):
        trie.masks(torch.tensor([trie.root]), 9)


def test_a_large_trie_of_random_keys():
    """Several rounds of the sort, chains, and a wide root: beyond what drawn examples reach."""
    rng = np.random.default_rng(0)
    keys = [rng.zipf(1.3, rng.integers(1, 30)).clip(max=5000).tolist() for _ in range(3000)]
    keys += [[*key[: len(key) // 2], 7] for key in keys[:500] if len(key) > 1]
    trie, oracle = TokenTrie.build(keys, map(str, range(len(keys)))), DictTrie(keys, map(str, range(len(keys))))
    assert list(trie.completions([])) == list(oracle.completions(oracle.root))
    for key in keys[::50]:
        for i in range(len(key) + 1):
            assert trie.children(trie.find(key[:i])).tolist() == oracle.children(oracle.find(key[:i]))
        assert trie.values(key) == oracle.find(key)["end"]


@given(st.lists(st.integers(0, 5), max_size=40))
def test_nearest_smaller(rest):
    x = np.array([-1, *rest])
    expected = [max(j for j in range(i) if x[j] < x[i]) for i in range(1, len(x))]
    assert nearest_smaller(x)[1:].tolist() == expected


def test_walk_stops_at_a_separator():
    trie = TokenTrie.build([[1, 0, 4], [1, 0, 5], [1, 2, 0, 4], [3, 0]])
    assert [(depth, token) for depth, token, _ in trie.walk(trie.root, stop=0)] == [
        *[(1, 1), (2, 0), (2, 2), (3, 0)],
        *[(1, 3), (2, 0)],
    ]


# --- input


def test_no_object_per_key_is_kept():
    """Memory held while keys and values stream in: 25 bytes or so each, where lists alone would take 88."""
    n, held = 20_000, []

    def keys():
        for i in range(n):
            if i in (0, n - 1):
                held.append(tracemalloc.get_traced_memory()[0])
            yield [i % 97, i % 89, i + 1000]

    tracemalloc.start()
    trie = TokenTrie.build(keys(), ("v" for _ in range(n)))
    tracemalloc.stop()
    assert len(trie) == n
    assert 17 * n < held[1] - held[0] < 40 * n


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        ([], None, "between 1 and"),
        ([[1], []], None, "key 1 is empty"),
        ([[1], [-1]], None, "key 1: expected token ids"),
        ([[1], [2**31 + 1]], None, "got 2147483649"),
        ([[1], [2**32]], None, "key 1: expected token ids"),
        ([[1], ["a"]], None, "key 1: expected token ids"),
        ([[1], 5], None, "key 1: expected token ids"),
        ([[1], [2]], ["a"], "ends after 1"),
        ([[1]], ["a", "b"], "ends after 1"),
        ([[1]], [b"\xff"], "value 0: expected a string or UTF-8"),
        ([[1]], ["\ud800"], "value 0: expected a string or UTF-8"),
        ([[1]], [5], "value 0: expected a string or UTF-8"),
    ],
)
def test_bad_input(keys, values, message):
    with pytest.raises(ValueError, match=message):
        TokenTrie.build(keys, values)


@pytest.mark.parametrize(
    ("tokens", "lengths", "values", "message"),
    [
        ([1, 2, 3], [2], None, "expected 2 integer tokens"),
        ([1.0, 2.0], [2], None, "expected 2 integer tokens"),
        ([1, -2], [2], None, "got -2"),
        ([1, 2], [2, 0], None, "key 1 is empty"),
        ([1, 2], [1, 1], ([97], [1]), "one value for each of 2 keys"),
        ([1, 2], [1, 1], ([97], [1, 1]), "one value for each of 2 keys"),
    ],
)
def test_bad_arrays(tokens, lengths, values, message):
    if values is not None:
        values = np.array(values[0], np.uint8), np.array(values[1])
    with pytest.raises(ValueError, match=message):
        TokenTrie.from_arrays(np.array(tokens), np.array(lengths), values)


def test_errors_off_the_trie():
    trie = TokenTrie.build([[1, 2, 3], [1, 2]])
    with pytest.raises(ValueError, match=r"position 1 .* token 5 at node"):
        trie.find([1, 5, 3])
    with pytest.raises(ValueError, match="token -1 at node"):
        trie.advance(trie.find([1, 2]), -1)  # the code of the end of a key is not a token
    for call in (trie.advance, lambda node, _: trie.children(node), lambda node, _: trie.ends(node)):
        for node in (-1, 10**6):
            with pytest.raises(ValueError, match="expected a node of this trie"):
                call(node, 1)
    for nodes in ([-1], [0, 10**6]):
        with pytest.raises(ValueError, match="expected nodes of this trie"):
            trie.masks(torch.tensor(nodes))


def test_numpy_and_torch_tokens():
    trie = TokenTrie.build([np.array([1, 2]), (1, 3)], [b"x", "y"])
    assert trie.values(np.array([1, 2])) == ["x"]
    assert torch.tensor([1, 3]) in trie


# --- files


@given(entries())
@settings(max_examples=30, deadline=None)
def test_a_saved_trie_is_the_same(tmp_path_factory, case):
    keys, values = case
    folder = tmp_path_factory.mktemp("trie") / "new"
    TokenTrie.build(keys, values).save(folder)
    assert_same(TokenTrie.open(folder), keys, values)


def test_saving_replaces_the_old_trie_and_leaves_open_ones_alone(tmp_path):
    TokenTrie.build([[1, 2]], ["old"]).save(tmp_path)
    (tmp_path / "codes.7.trie").write_bytes(b"left behind by a killed build")
    opened = TokenTrie.open(tmp_path)
    TokenTrie.build([[1, 2], [3]]).save(str(tmp_path))
    assert opened.values([1, 2]) == ["old"]
    assert TokenTrie.open(tmp_path).values([1, 2]) == []
    assert len(list(tmp_path.iterdir())) == 7  # the header and six arrays of the new one
    TokenTrie.open(tmp_path).save(tmp_path)  # onto the very files that it is a map of
    assert list(TokenTrie.open(tmp_path).completions([])) == [[1, 2], [3]]


def test_a_trie_of_another_tokenizer_is_refused(tmp_path):
    trie = TokenTrie.build([[1, 2], [3]])
    trie.save(tmp_path, "aaaa")
    for same in ("aaaa", None):
        assert len(TokenTrie.open(tmp_path, same)) == 2
    with pytest.raises(ValueError, match=r"another tokenizer \(aaaa, expected bbbb\)"):
        TokenTrie.open(tmp_path, "bbbb")
    trie.save(tmp_path)  # from who knows which
    assert len(TokenTrie.open(tmp_path, "bbbb")) == 2


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.txt"):
        TokenTrie.build([[1]]).save(tmp_path)
    with pytest.raises(ValueError, match="has none"):
        TokenTrie.open(tmp_path)
    with pytest.raises(ValueError, match="has none"):
        TokenTrie.open(tmp_path / "nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.fixture
def folder(tmp_path) -> Path:
    TokenTrie.build([[1, 2], [1, 3], [4]], ["a", "b", "c"]).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["codes", "ends", "forks", "rows", "branches", "children", "offsets", "values"])
def test_truncated_or_missing_arrays_are_named(folder, name):
    path = folder / f"{name}.1.trie"
    data = path.read_bytes()
    for damaged in (data[:-1], data + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}\.1\.trie with {len(data)} bytes, but it has {len(damaged)}"):
            TokenTrie.open(folder)
    path.unlink()
    with pytest.raises(ValueError, match=rf"{name}\.1\.trie .* it is missing"):
        TokenTrie.open(folder)


def test_every_damaged_header_is_refused(folder):
    path = folder / HEADER
    good = json.loads(path.read_text())

    def changed(**fields):
        return json.dumps(good | fields)

    arrays = good["arrays"]
    strange = {**arrays, "codes": {**arrays["codes"], "file": "../codes.1.trie"}}
    object_type = {**arrays, "codes": {**arrays["codes"], "type": "|O"}}
    uneven = {**arrays, "rows": {**arrays["rows"], "length": 7}}
    cases = {
        "not the header": ["", "{", "[]", "{}", "3", "\x00\xff", json.dumps({"format": "another"})],
        "expected": [changed(version=2), changed(format="minikid KnowledgeTrie")],
        "is damaged": [
            *(changed(arrays=a) for a in (None, [], {}, {"codes": 1}, strange, object_type, uneven)),
            *(changed(generation=g) for g in ("1", 0, 2, None)),
            *(changed(vocabulary=v) for v in ("1", -1)),
        ],
    }
    for message, texts in cases.items():
        for text in texts:
            path.write_text(text)
            with pytest.raises(ValueError, match=f"{message}.*"):
                TokenTrie.open(folder)
            with pytest.raises(ValueError, match=message):
                TokenTrie.build([[1]]).save(folder)
    path.write_text(json.dumps(good))
    assert TokenTrie.open(folder).values([1, 3]) == ["b"]


@pytest.mark.parametrize("moment", range(1, 11))
def test_a_killed_build_leaves_the_old_trie(folder, moment):
    """kill -9 at each of the file operations of a save: nine files are written, then the header is replaced."""
    program = f"""
        import os, signal, sys
        import minikid.trie as trie
        calls = 0
        def deadly(name, real):
            def call(*args):
                global calls
                calls += 1
                if calls == {moment}:
                    if name == "fsync":
                        os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args)
            return call
        os.fsync, os.replace = deadly("fsync", os.fsync), deadly("replace", os.replace)
        trie.TokenTrie.build([[9], [9, 9], [8, 9, 9]], ["x", "y", "z"]).save(sys.argv[1])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), str(folder)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert_same(TokenTrie.open(folder), [[1, 2], [1, 3], [4]], ["a", "b", "c"])
    TokenTrie.build([[5]], ["new"]).save(folder)
    assert TokenTrie.open(folder).values([5]) == ["new"]
    assert len(list(folder.iterdir())) == 9  # nothing of the killed build is left


def test_a_failed_save_leaves_the_old_trie_and_no_litter(folder, monkeypatch):
    before = sorted(path.name for path in folder.iterdir())

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        TokenTrie.build([[9]]).save(folder)
    assert sorted(path.name for path in folder.iterdir()) == before
    assert TokenTrie.open(folder).values([4]) == ["c"]
