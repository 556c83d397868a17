"""Questions from JSON lines and arrays: what is read, and how bad records are named."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minikid.passages import Passage
from minikid.questions import digest, read_questions

GOOD = {"id": "q1", "question": "Who?", "answers": ["Ann"], "ctxs": [{"title": "T", "text": "Ann did."}]}
BAD = [
    ([1, 2], "expected an object"),
    ({"answers": []}, 'string "question"'),
    (GOOD | {"question": " \n"}, 'string "question" with text'),
    (GOOD | {"question": 3}, "came 3"),
    ({"question": "Who?"}, '"answers", a list of strings, came null'),
    (GOOD | {"answers": "Ann"}, '"answers", a list of strings'),
    (GOOD | {"answers": ["Ann", 1]}, '"answers", a list of strings'),
    (GOOD | {"ctxs": "Ann did."}, '"ctxs", a list of objects'),
    (GOOD | {"ctxs": ["Ann did."]}, 'string "text"'),
    (GOOD | {"ctxs": [{"title": "T"}]}, 'string "text"'),
    (GOOD | {"ctxs": [{"title": 1, "text": "t"}]}, 'string "title"'),
    (GOOD | {"question": "a \ud800 b"}, "surrogate"),
    (GOOD | {"id": "\udfff"}, "surrogate"),
]
RECORDS = st.lists(
    st.fixed_dictionaries(
        {"question": st.text(min_size=1).filter(str.strip), "answers": st.lists(st.text(), max_size=2)},
        optional={
            "id": st.one_of(st.integers(), st.text(), st.none()),
            "ctxs": st.lists(st.fixed_dictionaries({"text": st.text()}, optional={"title": st.text()}), max_size=2),
            "label": st.booleans(),
        },
    ),
    min_size=1,
    max_size=5,
)


def essence(questions):
    return [(q.index, q.id, q.question, q.answers, q.ctxs) for q in questions]


@given(RECORDS, st.sampled_from([None, 1, "\t"]), st.sampled_from(["", "\ufeff"]), st.booleans())
@settings(max_examples=60, deadline=None)
def test_lines_and_arrays_hold_the_same(tmp_path_factory, records, indent, mark, ascii_only):
    folder = tmp_path_factory.mktemp("data")
    lines = "\r\n\n".join(json.dumps(record, ensure_ascii=ascii_only) for record in records)
    (folder / "lines").write_text(mark + "\n" + lines, encoding="utf-8", newline="")
    (folder / "array").write_text(mark + "\n" + json.dumps(records, indent=indent, ensure_ascii=ascii_only), "utf-8")
    found = list(read_questions(folder / "lines"))
    expected = [
        (
            i,
            record.get("id", i),
            record["question"],
            record["answers"],
            [Passage(str(j), c.get("title", ""), c["text"]) for j, c in enumerate(record.get("ctxs", []))],
        )
        for i, record in enumerate(records)
    ]
    assert essence(found) == expected
    assert essence(read_questions(folder / "array")) == expected
    text = (folder / "lines").read_bytes().decode("utf-8-sig").split("\n")
    for question, record in zip(found, records, strict=True):
        assert json.loads(text[int(question.place.rpartition(":")[2]) - 1]) == record


@pytest.mark.parametrize(("record", "message"), BAD)
@pytest.mark.parametrize("form", ["lines", "array"])
def test_a_bad_record_is_named_by_file_and_line_and_passed_over_on_request(tmp_path, record, message, form):
    path, rows = tmp_path / "data.json", [json.dumps(entry) for entry in (GOOD, record, GOOD)]
    path.write_text("\n".join(rows) if form == "lines" else "[\n" + ",\n".join(rows) + "]")
    line = 2 if form == "lines" else 3
    with pytest.raises(ValueError, match=f"data.json:{line}: .*{message}"):
        list(read_questions(path))
    bad = []
    assert [question.index for question in read_questions(path, bad.append)] == [0, 2]
    assert len(bad) == 1
    assert f"data.json:{line}: " in str(bad[0])


@pytest.mark.parametrize(
    "line", [b'{"question": "Wh', b"\xff{}", b'{"question": "Who?"} {}', b"nonsense", b"[" * 100_000]
)
def test_lines_that_are_not_json_are_bad_records(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n" + line + b"\n" + json.dumps(GOOD).encode())
    with pytest.raises(ValueError, match=r"data\.jsonl:2: "):
        list(read_questions(path))
    assert len(list(read_questions(path, lambda error: None))) == 2


def test_records_in_front_of_a_bad_one_come_first(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(GOOD) + "\nnonsense\n")
    assert next(read_questions(path)).question == "Who?"


@pytest.mark.parametrize(
    ("text", "line"), [("[\n{},\n{]", 3), ("[{}\n", 2), ("[{}] \n\n {}", 3), ("[{},]", 1), ("\n[\n", 3)]
)
def test_a_broken_array_is_named_whatever_may_be_passed_over(tmp_path, text, line):
    path = tmp_path / "data.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"data.json:{line}: broken JSON array"):
        list(read_questions(path, lambda error: None))


def test_lines_of_entries_in_an_array_that_span_lines(tmp_path):
    path = tmp_path / "data.json"
    path.write_text('\n\n[ {"question":\n"a", "answers": []}\n,\n\n{"question": "b\\n", "answers": []}, 3, {\n}]')
    bad = []
    places = [question.place for question in read_questions(path, bad.append)]
    assert [place.rpartition(":")[2] for place in places] == ["3", "7"]
    assert ["data.json:7:" in str(bad[0]), "data.json:7:" in str(bad[1])] == [True, True]


def test_empty_files_have_no_questions(tmp_path):
    for text in ("", "\n \n", "[]", " [ \n] "):
        (tmp_path / "data").write_text(text)
        assert list(read_questions(tmp_path / "data")) == []


def test_the_digest_changes_with_all_that_decoders_and_scores_read(tmp_path):
    changed = [
        GOOD,
        GOOD | {"question": "Whom?"},
        GOOD | {"answers": []},
        GOOD | {"ctxs": [{"title": "T", "text": "Ann did it."}]},
        GOOD | {"ctxs": [{"title": "", "text": "Ann did."}]},
        GOOD | {"id": "q2", "label": "yes"},
    ]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(changed))
    digests = [question.digest for question in read_questions(path)]
    assert len(set(digests)) == 5
    assert digests[5] == digests[0]
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": "2"})


def test_gzipped_files(tmp_path):
    record = {"question": "Who?", "answers": ["me"], "ctxs": []}
    for text in (json.dumps(record), json.dumps([record])):
        (tmp_path / "a.json").write_text(text)
        (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode()))
        plain, packed = (list(read_questions(tmp_path / name)) for name in ("a.json", "b.json.gz"))
        assert [q.digest for q in plain] == [q.digest for q in packed]
        (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode())[:-12])
        with pytest.raises(ValueError, match=r"b\.json\.gz: broken gzip"):
            list(read_questions(tmp_path / "b.json.gz"))
