"""Reading passages from files, and keeping them on disk."""

import csv
import gzip
import io
import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minikid.files import replacing_folder
from minikid.passages import (
    Passage,
    PassageFile,
    fingerprint,
    holds_triples,
    keep_passages,
    read_passages,
    save_passages,
    split_words,
)

PLAIN = [
    Passage("1", "Aaron", 'Aaron ( or ; "Ahärôn") is a prophet'),
    Passage("2", "", "蒙古国 in Asia"),
    Passage("3", "T", ""),
]
text = st.text(st.characters(codec="utf-8", exclude_characters="\r\0"), max_size=30)
corpora = st.lists(st.builds(Passage, text, text, text), max_size=8)


def as_tsv(passages, columns=("id", "text", "title"), end="\n") -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter="\t", lineterminator=end)
    writer.writerow(columns)
    writer.writerows([getattr(p, c.removeprefix("_")) for c in columns] for p in passages)
    return out.getvalue().encode()


def as_jsonl(passages, key="_id", end="\n") -> bytes:
    return "".join(json.dumps({key: p.id, "title": p.title, "text": p.text}) + end for p in passages).encode()


FORMS = {
    "dpr.tsv": as_tsv(PLAIN),
    "crlf.tsv": as_tsv(PLAIN, end="\r\n"),
    "order.tsv": as_tsv(PLAIN, ("title", "_id", "text")),
    "bom.tsv": b"\xef\xbb\xbf" + as_tsv(PLAIN),
    "beir.jsonl": as_jsonl(PLAIN),
    "dpr.jsonl": as_jsonl(PLAIN, "id"),
    "crlf.jsonl": as_jsonl(PLAIN, end="\r\n\r\n"),
    "bom.jsonl": b"\xef\xbb\xbf" + as_jsonl(PLAIN),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("zipped", [False, True])
def test_every_form_gives_the_same_passages(tmp_path, name, zipped):
    path = tmp_path / (name + ".gz" * zipped)
    path.write_bytes(gzip.compress(FORMS[name]) if zipped else FORMS[name])
    assert list(read_passages(path)) == PLAIN
    assert not holds_triples(path)


@settings(deadline=None)
@given(corpora)
def test_quoting_survives_any_text(tmp_path_factory, passages):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.tsv").write_bytes(as_tsv(passages))
    (folder / "a.jsonl").write_bytes(as_jsonl(passages))
    assert list(read_passages(folder / "a.tsv")) == passages
    assert list(read_passages(folder / "a.jsonl")) == passages


def test_missing_ids_and_titles(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"id": 7, "title": null, "text": "two"}\n')
    assert list(read_passages(tmp_path / "a.jsonl")) == [Passage("a.jsonl:1", "", "one"), Passage("7", "", "two")]
    (tmp_path / "a.tsv").write_text("id\ttext\n7\ttwo\n")
    assert list(read_passages(tmp_path / "a.tsv")) == [Passage("7", "", "two")]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.tsv", "a.txt.gz"])
def test_empty_files(tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(b"") if name.endswith(".gz") else b"")
    assert list(read_passages(tmp_path / name)) == []


def test_text_is_cut_every_hundred_words(tmp_path):
    words = [f"w{i}" for i in range(250)]
    (tmp_path / "a.txt").write_text("\ufeff" + " \n\n".join(words) + "\r\n", encoding="utf-8")
    blocks = [" ".join(words[i : i + 100]) for i in (0, 100, 200)]
    assert list(read_passages(tmp_path / "a.txt")) == [Passage(f"a.txt:{i}", "", t) for i, t in enumerate(blocks, 1)]


@given(st.lists(st.text("ab \n\t", max_size=12), max_size=6), st.integers(1, 4))
def test_blocks_of_words_equal_the_literal_ones(chunks, size):
    words = "".join(chunks).split()
    assert list(split_words(chunks, size)) == [" ".join(words[i : i + size]) for i in range(0, len(words), size)]


@given(st.lists(st.text("ab 三四か\n", max_size=12), max_size=6), st.integers(1, 4))
def test_blocks_lose_no_character_of_unspaced_scripts(chunks, size):
    blocks = list(split_words(chunks, size))
    assert "".join("".join(blocks).split()) == "".join("".join(chunks).split())
    for block in blocks[:-1]:
        spaced = "".join(f" {c} " if c in "三四か" else c for c in block)
        assert len(spaced.split()) == size


@pytest.mark.parametrize(
    ("name", "content", "line", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', 2, "expected an object in JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n[1]\n', 3, 'a string "text", came list'),
        ("a.jsonl", b'{"question": "x", "answers": []}\n', 1, r"came \['answers', 'question'\]"),
        ("a.jsonl", b'{"text": "x", "title": 3}\n', 1, 'a string "title"'),
        ("a.jsonl", b'{"text": "x", "id": [3]}\n', 1, 'a string "title" and a string or number "id"'),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', 2, "not UTF-8"),
        ("a.txt", b"x\ny\n\xe4\n", 3, "not UTF-8"),
        ("a.tsv", b"id\ttext\ttitle\n1\ta\tb\n2\tc\n", 3, "3 tab-separated fields as in the header, came 2"),
        ("a.tsv", b'id\ttext\ttitle\n1\t"a\tb\n2\tc\td\n', 2, "badly quoted"),
        ("a.tsv", b'id\ttext\ttitle\n1\t"a\nb"\tc\n2\t"a" b\tc\n', 4, "badly quoted"),
        ("a.tsv", b"Paris\tcapital of\tFrance\n", 1, "is it triples"),
    ],
)
def test_bad_lines_are_named(tmp_path, name, content, line, message):
    for path, stored in ((tmp_path / name, content), (tmp_path / f"{name}.gz", gzip.compress(content))):
        path.write_bytes(stored)
        with pytest.raises(ValueError, match=message) as raised:
            list(read_passages(path))
        assert str(raised.value).startswith(f"{path}:{line}: ")


def test_broken_gzip_files_are_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    whole = gzip.compress(as_jsonl(PLAIN * 50))
    for content in (whole[:-20], b"no gzip", whole[:30] + b"\0" * 30 + whole[60:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.jsonl\.gz(: broken gzip|:\d+: not)"):
            list(read_passages(path))


def test_unknown_suffix_is_refused_before_reading(tmp_path):
    with pytest.raises(ValueError, match=r"\.txt, \.jsonl or \.tsv"):
        read_passages(tmp_path / "a.csv")


def test_triples_are_told_from_passages(tmp_path):
    for content, expected in ((b"Paris\tcapital of\tFrance\n", True), (as_tsv([]), False), (b'a "b\tc\td\n', True)):
        (tmp_path / "a.tsv").write_bytes(content)
        assert holds_triples(tmp_path / "a.tsv") is expected
    (tmp_path / "a.txt").write_text("a\tb\tc\n")
    assert not holds_triples(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.tsv", "a.jsonl", "a.txt", "a.tsv.gz"])
def test_reading_a_large_file_holds_little_of_it(tmp_path, name):
    row = {"a.tsv": "{0}\t" + "word " * 40 + "\tT\n", "a.jsonl": '{{"id": {0}, "text": "' + "word " * 40 + '"}}\n'}
    line = row.get(name.removesuffix(".gz"), "word " * 40 + "{0}\n")
    with (gzip.open if name.endswith(".gz") else open)(tmp_path / name, "wt") as file:
        file.write("id\ttext\ttitle\n" * (".tsv" in name))
        file.writelines(line.format(i) for i in range(20_000))  # 4 MB
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_passages(tmp_path / name))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == (8200 if name == "a.txt" else 20_000)
    assert peak < 500_000


@settings(deadline=None)
@given(corpora)
def test_passages_on_disk_are_the_passages(tmp_path_factory, passages):
    folder = tmp_path_factory.mktemp("kept")
    kept = save_passages(iter(passages), folder / "p")
    assert list(kept) == passages
    assert len(kept) == len(passages)
    assert fingerprint(kept) == fingerprint(passages) == fingerprint(list(PassageFile(folder / "p")))
    with pytest.raises(IndexError):
        kept[len(passages)]


@given(corpora, corpora)
def test_fingerprints_are_equal_for_equal_passages_only(one, other):
    assert (fingerprint(one) == fingerprint(other)) == (one == other)


def test_damaged_or_other_passages_are_refused(tmp_path):
    kept = keep_passages(PLAIN, tmp_path)
    assert keep_passages(PLAIN, tmp_path).fingerprint == kept.fingerprint
    with pytest.raises(ValueError, match="other passages"):
        keep_passages(PLAIN[:2], tmp_path)
    path = tmp_path / "passages" / "passages.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="build it again"):
        PassageFile(tmp_path / "passages")
    (tmp_path / "passages" / "ends.npy").write_bytes(b"")
    with pytest.raises(ValueError, match="build it again"):
        PassageFile(tmp_path / "passages")
    with pytest.raises(ValueError, match="expected passages"):
        PassageFile(tmp_path / "nothing")


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    with replacing_folder(tmp_path / "a") as new:
        (new / "old").write_text("1")
    with pytest.raises(FileNotFoundError), replacing_folder(tmp_path / "a") as new:
        (new / "no such folder" / "new").write_text("2")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "old"]
    with replacing_folder(tmp_path / "a") as new:
        (new / "new").write_text("2")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "new"]
