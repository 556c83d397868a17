"""Ewe through generate.py and evaluate.py: options, what a terminal and a pipe see, JSON, errors."""

import json

import pytest
from tiny import TEMPLATE, write_folder

import evaluate
import generate
from minikid.ewe import SETTINGS, Settings
from minikid.verify import Verdict

SMALL = ["--units", "2", "--unit-length", "60", "--max-new-tokens", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture
def run(folder, capfd):
    def call(*arguments):
        try:
            code = generate.main(["--model", str(folder), "--prompt", "Where is Mongolia?", *arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def refuting(monkeypatch):
    """Every bit of text is a sentence of three tokens with one claim, which is refuted."""
    monkeypatch.setattr("minikid.ewe._complete", lambda tokenizer, tokens, following: len(tokens) == 3)
    monkeypatch.setattr("minikid.ewe.claims", lambda text: ["a claim"])
    verifier = lambda claim, passages: Verdict(claim, "refuted", passages[0] if passages else None)  # noqa: E731
    monkeypatch.setattr(generate, "make_verifier", lambda *args: verifier)


@pytest.mark.parametrize("decoder", SETTINGS)
def test_text_alone_on_standard_output(run, decoder):
    code, out, err = run("--decoder", decoder, *SMALL)
    assert code == 0
    record = json.loads(run("--decoder", decoder, *SMALL, "--json")[1])
    assert out == record["text"] + "\n"
    assert record["pauses"][0]["query"] == "Where is Mongolia?"
    assert "pauses" in err
    assert "did not fit" in err


def test_no_units_are_sample(run):
    sampled = json.loads(run("--decoder", "sample", *SMALL[4:], "--json", "--seed", "4")[1])
    ours = json.loads(run("--decoder", "ewe", "--units", "0", *SMALL[2:], "--json", "--seed", "4")[1])
    assert (ours["tokens"], ours["log_probs"]) == (sampled["tokens"], sampled["log_probs"])


def test_a_terminal_sees_what_was_struck_and_a_pipe_only_what_stays(run, refuting, monkeypatch):
    arguments = ["--decoder", "ewe", *SMALL, "--tries", "1"]
    code, out, err = run(*arguments)
    record = json.loads(run(*arguments, "--json")[1])
    assert (code, out) == (0, record["text"] + "\n")
    deleted = [pause["sentence"] for pause in record["pauses"] if pause["deleted"]]
    assert deleted
    assert f"{len(deleted)} sentences written again" in err
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    shown = run(*arguments)[1]
    assert shown.count(generate.STRUCK) == len(deleted)
    assert all(sentence in shown for sentence in deleted)


def test_triples_alone_are_knowledge_to_verify_by(run, tmp_path):
    """There is nothing to retrieve, and still a memory to write with."""
    (tmp_path / "kb.tsv").write_text("Mongolia\tcapital\tUlaanbaatar\n")
    code, out, _ = run("--decoder", "ewe", *SMALL, "--knowledge", str(tmp_path / "kb.tsv"), "--json")
    record = json.loads(out)
    assert (code, record["passages"], record["pauses"][0]["added"]) == (0, [], [])
    assert all(pause["support"] is None for pause in record["pauses"] if not pause["verdicts"])


def test_samples_draw_with_seeds_of_their_own(run):
    lines = [
        json.loads(line) for line in run("--decoder", "ewe", *SMALL, "--json", "--num-samples", "2")[1].splitlines()
    ]
    alone = json.loads(run("--decoder", "ewe", *SMALL, "--json", "--seed", "1")[1])
    assert lines[1]["tokens"] == alone["tokens"]
    assert lines[0]["tokens"] != alone["tokens"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--context"], "--context"),
        (["--filter", "strinc", "--answer", "x"], "--filter"),
        (["--context-weight", "0"], "above 0"),
        (["--unit-temperature", "-1"], "above 0"),
        (["-k", "0"], "1 or more"),
        (["--trigger", "sometimes"], "invalid choice"),
    ],
)
def test_bad_usage(run, arguments, message):
    code, out, err = run("--decoder", "ewe", *SMALL, *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_units_that_the_model_has_no_room_for(run):
    code, out, err = run("--decoder", "ewe", "--unit-length", "4000")
    assert (code, out) == (1, "")
    assert "shorter units" in err


def test_every_setting_is_an_option_or_a_decoder():
    args = evaluate.parse(
        ["tests/test_ewe_programs.py", "--out", "x", "--units", "3", "--tries", "0", "--verify-first", "--no-ask-first"]
    )
    settings = evaluate.make_settings(args, "ewe")
    assert settings == Settings(units=3, tries=0, verify_first=True, ask_first=False)
    assert evaluate.make_settings(args, "ewe-rag").context_stream is False


def test_evaluate(folder, tmp_path, capfd):
    question = {"question": "Where is Mongolia?", "answers": ["in Asia"]}
    question["ctxs"] = [{"title": "Mongolia", "text": "Mongolia is in Asia."}, {"title": "", "text": "Japan is, too."}]
    (tmp_path / "data.jsonl").write_text(json.dumps(question))
    arguments = [str(tmp_path / "data.jsonl"), "--model", str(folder), "--out", str(tmp_path / "out"), *SMALL]
    assert evaluate.main([*arguments, "--decoders", "ewe,ewe-iterative"]) == 0
    assert "ewe-iterative" in capfd.readouterr().out
    line = json.loads((tmp_path / "out" / "ewe.jsonl").read_text())
    assert line["forwarded"] > line["tokens"] > 0
    arguments += ["--decoders", "greedy,ewe", "--out", str(tmp_path / "b"), "--unit-length", "4000"]
    assert evaluate.main(arguments) == 1
    assert "data.jsonl:1" in (err := capfd.readouterr().err)
    assert "shorter units" in err
    assert not (tmp_path / "b" / "greedy.jsonl").exists()  # found before any decoder ran
