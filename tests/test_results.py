"""The files that runs leave: lines, also torn ones, the results against a loop over the resamples, their table."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minikid.metrics import resamples
from minikid.questions import Question
from minikid.results import compare, kept_lines, table, write_results

QUESTIONS = [Question(i, f"d:{i}", i, f"Question {i}?", ["yes"], []) for i in range(4)]


def line_of(i, settings="s", **changed):
    scores = {"F1": 10.0 * i, "Cov": None if i % 2 else 50.0}
    own = {"index": i, "record": QUESTIONS[i].digest, "settings": settings, "scores": scores, "text": "a\u2028b\x85"}
    return own | {"tokens": 5 + i, "forwarded": 9, "seconds": 0.5 + i} | changed


def written(path, lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path.read_bytes()


# --- lines


def test_there_are_none_without_a_file(tmp_path):
    assert kept_lines(tmp_path / "none.jsonl", "s", QUESTIONS) == {}


def test_a_file_torn_at_any_byte_keeps_its_whole_lines(tmp_path):
    path, lines = tmp_path / "sample.jsonl", [line_of(2), line_of(0)]
    content = written(path, lines)
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        whole = sum(end <= length for end in ends)
        assert kept_lines(path, "s", QUESTIONS) == {line["index"]: line for line in lines[:whole]}
        assert path.read_bytes() == content[: ([0, *ends])[whole]]


@pytest.mark.parametrize(
    "lines",
    [
        [line_of(0), line_of(1, settings="t")],
        [line_of(0, record=QUESTIONS[1].digest)],
        [line_of(0, settings=None)],
        [{}],
        [[1, 2]],
        [{"index": 0, "settings": "s", "record": QUESTIONS[0].digest}],
    ],
)
@pytest.mark.parametrize("torn", [b"", b'{"ind'])
def test_lines_of_other_settings_data_or_programs_are_refused_and_left_alone(tmp_path, lines, torn):
    path = tmp_path / "sample.jsonl"
    content = written(path, lines) + torn
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"sample.jsonl:{len(lines)}: .*choose another --out"):
        kept_lines(path, "s", QUESTIONS)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"notes without a line end", b"notes\n", b"\n", b"\xff\n"])
def test_a_foreign_file_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "sample.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"not a .*of results"):
        kept_lines(path, "s", QUESTIONS)
    assert path.read_bytes() == content


def test_lines_of_questions_that_are_not_asked_for_stay(tmp_path):
    written(tmp_path / "a.jsonl", [line_of(i) for i in range(4)])
    assert sorted(kept_lines(tmp_path / "a.jsonl", "s", QUESTIONS[:2])) == [0, 1, 2, 3]


# --- results

SCORE = st.one_of(st.none(), st.floats(0, 100))
LINE = st.fixed_dictionaries(
    {
        "scores": st.fixed_dictionaries({"F1": SCORE, "Cov": SCORE}),
        "tokens": st.integers(0, 60),
        "forwarded": st.integers(1, 900),
        "seconds": st.floats(0.1, 9),
    }
)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(LINE, min_size=n, max_size=n), min_size=2, max_size=3)))
@settings(max_examples=8, deadline=None)
def test_results_equal_a_loop_over_the_resamples(runs):
    runs = dict(zip(("sample", "kid", "rag"), runs, strict=False))
    results = compare(runs, seed=3)
    n = len(runs["kid"])
    drawn = [[i for i, times in enumerate(row) for _ in range(int(times))] for row in resamples(n, 3)]

    def mean(lines, draw, metric):
        if metric == "tokens per second":
            return sum(lines[i]["tokens"] for i in draw) / sum(lines[i]["seconds"] for i in draw)
        values = [lines[i]["forwarded"] if metric == "tokens forwarded" else lines[i]["scores"][metric] for i in draw]
        defined = [value for value in values if value is not None]
        return sum(defined) / len(defined) if defined else np.nan

    def check(estimate, means):
        if np.isnan(means[0]):
            assert estimate == {"mean": None, "low": None, "high": None}
        else:
            low, high = np.nanpercentile(means[1:], (2.5, 97.5))
            assert estimate == pytest.approx({"mean": means[0], "low": low, "high": high}, abs=1e-9)

    assert results["n"] == n
    assert results["undefined"] == {
        name: {m: sum(line["scores"][m] is None for line in lines) for m in ("F1", "Cov")}
        for name, lines in runs.items()
    }
    assert set(results["differences"]) == {f"{a}-{b}" for a in runs for b in runs if a != b}
    for metric in ("F1", "Cov", "tokens per second", "tokens forwarded"):
        means = {name: np.array([mean(lines, draw, metric) for draw in drawn]) for name, lines in runs.items()}
        for a in runs:
            check(results["decoders"][a][metric], means[a])
            for b in runs.keys() - {a}:
                check(results["differences"][f"{a}-{b}"][metric], means[a] - means[b])


def test_results_hang_on_the_seed_alone():
    generator = np.random.default_rng(0)
    lines = [line_of(0, scores={"F1": value}) for value in generator.uniform(0, 100, size=30)]
    runs = {"sample": lines, "kid": lines}
    assert compare(runs, 0) == compare(runs, 0) != compare(runs, 1)
    assert compare(runs, 0)["differences"]["kid-sample"]["F1"] == {"mean": 0, "low": 0, "high": 0}


@pytest.mark.parametrize("runs", [{}, {"sample": []}, {"sample": [line_of(0)], "kid": [line_of(0), line_of(1)]}])
def test_runs_of_different_questions_are_refused(runs):
    with pytest.raises(ValueError, match="as many lines of each decoder"):
        compare(runs, 0)


def test_the_table_shows_each_decoder_each_pair_once_and_what_is_undefined():
    runs = {name: [line_of(i) for i in (1, 3)] for name in ("kid", "beam", "sample")}
    text = table(compare(runs, 0), ["greedy", "sample", "beam", "kid"])
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n")]
    assert [row[0] for row in rows if len(row) > 1][2:] == [
        *("sample", "beam", "kid"),
        *("beam - sample", "kid - sample", "kid - beam"),
    ]
    assert rows[0] == ["", "F1", "Cov", "tokens per second", "tokens forwarded"]
    assert rows[2] == ["sample", "20.0 [10.0, 30.0]", "undefined", "2.8 [2.3, 4.0]", "9.0 [9.0, 9.0]"]
    assert rows[5] == ["beam - sample", "0.0 [0.0, 0.0]", "undefined", "0.0 [0.0, 0.0]", "0.0 [0.0, 0.0]"]
    assert [row[0] for row in rows[-3:]] == [f"undefined for {name}, of 2: Cov 2" for name in ("sample", "beam", "kid")]
    assert len({line.index("|", 1) for line in text.split("\n")[:-3]}) == 1


def test_results_replace_older_ones_in_one_step(tmp_path):
    path = tmp_path / "results.json"
    write_results(path, {"n": 1})
    write_results(path, {"n": 2})
    assert json.loads(path.read_text()) == {"n": 2}
    with pytest.raises(TypeError):
        write_results(path, {"n": object()})
    assert json.loads(path.read_text()) == {"n": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
