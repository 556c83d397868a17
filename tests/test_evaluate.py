"""The program end to end on a tiny random model: what it generates, keeps, refuses and reports."""

import argparse
import itertools
import json
import sys

import numpy as np
import pytest
import torch
from tiny import TEMPLATE, write_folder

import evaluate
from minikid import metrics, options
from minikid.chain import accuracy
from minikid.decode import Generation, LittleKID, Vanilla, beam_search, generate, generate_on_cache, greedy
from minikid.filter import with_context
from minikid.knowledge import KnowledgeTrie
from minikid.model import load
from minikid.passages import Passage

SCORES = ["BLEU-1", "ROUGE-L", "F1", "EM", "Cov"]
ALL = "greedy,sample,beam,rag,little-kid,kid,kid-rag"
RECORDS = [
    {
        "id": f"q{i}",
        "question": question,
        "answers": answers,
        "ctxs": [{"title": title, "text": text} for title, text in ctxs],
        "label": "passed over",
    }
    for i, (question, answers, ctxs) in enumerate(
        [
            (
                "What is the capital of Mongolia?",
                ["Ulaanbaatar", "a city"],
                [
                    ("Mongolia", "The capital of Mongolia is Ulaanbaatar. Ulaanbaatar lies on the river Tuul."),
                    ("", "The capital has a cardiologist."),
                ],
            ),
            ("Who drives?", ["A cardiologist drives a car."], [("RESULTS", "A cardiologist drives a car.")]),
            ("Where is the river?", [""], [("", "The river lies in the north of Mongolia.")]),
            ("日本の首都は?", ["東京"], []),
            ("Does a car drive a mongolian cardiologist to the capital?", ["no"], [("", "A mongolian car is a car.")]),
        ]
    )
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS), encoding="utf-8")
    return path


@pytest.fixture
def run(model_folder, data, tmp_path, capfd):
    """Runs the program, and gives exit code, standard output and standard error."""

    def run(*arguments, path=data, out="out"):
        given = [str(path), "--model", str(model_folder), "--out", str(tmp_path / out), "--max-new-tokens", "12"]
        code = evaluate.main([*given, *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


def lines_of(tmp_path, name, out="out"):
    text = (tmp_path / out / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def texts(tmp_path, name, out="out"):
    return {line["index"]: line["text"] for line in lines_of(tmp_path, name, out)}


def without_times(lines):
    return sorted(({**line, "seconds": None} for line in lines), key=lambda line: line["index"])


def generator_of(seed, index):
    state = np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state))


# --- what is generated


def test_each_generation_is_the_one_that_its_decoder_gives_alone(run, model_folder, tmp_path):
    """Not in a batch: prompts, policies, generators and options as the library is called for one question."""
    code, _, _ = run("--decoders", ALL, "--seed", 3, "--beams", 3, "-k", 1, "--sigma", 0.5, "--top-k", 9, "--hops", 1)
    assert code == 0
    model, tokenizer = load(model_folder)
    parser = argparse.ArgumentParser()
    options.add_decoding_options(parser)
    settings = options.settle(parser.parse_args(["--top-k", "9", "--sigma", "0.5", "--hops", "1"]))
    update = options.make_update(settings)
    for i, record in enumerate(RECORDS):
        passages = [Passage("", ctx["title"], ctx["text"]) for ctx in record["ctxs"][:1]]
        plain = tokenizer.prompt(record["question"], chat=False)
        rich = tokenizer.prompt(with_context(record["question"], passages), chat=False)
        trie = KnowledgeTrie.from_text(passages)
        kid = options.make_kid(settings, trie, tokenizer, record["question"])

        def draw(prompt, policy, i=i):
            name = "sample" if isinstance(policy, Vanilla) else "kid"
            sampler = options.make_sampler(settings, name)
            return generate(model, prompt, policy, sampler, max_new_tokens=12, generator=generator_of(3, i))

        alone = {
            "greedy": generate(model, plain, Vanilla(), greedy, max_new_tokens=12),
            "sample": draw(plain, Vanilla()),
            "beam": beam_search(model, plain, Vanilla(), 3, max_new_tokens=12)[0],
            "rag": draw(rich, Vanilla()),
            "little-kid": draw(plain, LittleKID(trie, tokenizer, update)),
            "kid": draw(plain, kid),
            "kid-rag": draw(rich, kid),
        }
        for name, generation in alone.items():
            line = next(line for line in lines_of(tmp_path, name) if line["index"] == i)
            assert line["text"] == tokenizer.decode(generation.tokens), name
            assert (line["tokens"], line["forwarded"]) == (len(generation.tokens), generation.forwarded), name
    for a, b in itertools.combinations(alone, 2):  # or the test could not tell them apart
        assert texts(tmp_path, a) != texts(tmp_path, b)


def test_steps_on_the_cache_draw_with_the_same_generators(run, model_folder, tmp_path):
    assert run("--decoders", "sample,kid", "--preset", "released", "--limit", 2)[0] == 0
    model, tokenizer = load(model_folder)
    args = evaluate.parse([__file__, "--out", "-", "--preset", "released"])
    for i, record in enumerate(RECORDS[:2]):
        trie = KnowledgeTrie.from_text([Passage("", ctx["title"], ctx["text"]) for ctx in record["ctxs"]])
        policy = options.make_kid(args, trie, tokenizer, record["question"])
        prompt = tokenizer.prompt(record["question"], chat=False)
        alone = generate_on_cache(
            model,
            prompt,
            policy,
            options.make_sampler(args, "kid"),
            steps=args.steps,
            max_new_tokens=12,
            generator=generator_of(0, i),
        )
        assert texts(tmp_path, "kid")[i] == tokenizer.decode(alone.tokens)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_batches_change_nothing(run, tmp_path, size):
    run("--decoders", "sample,beam,kid-rag", "--beams", 2)
    run("--decoders", "sample,beam,kid-rag", "--beams", 2, "--batch-size", size, out="other")
    for name in ("sample", "beam", "kid-rag"):
        assert texts(tmp_path, name) == texts(tmp_path, name, "other")


def test_without_knowledge_kid_samples_as_the_model_does(run, tmp_path):
    """Since prompt and seed of a question are the same for all decoders."""
    run("--decoders", "sample,kid,little-kid", "-k", 0, "--temperature", 0.8)
    assert texts(tmp_path, "sample") == texts(tmp_path, "kid") == texts(tmp_path, "little-kid")
    run("--decoders", "sample,rag", "-k", 0, "--seed", 1, out="other")
    assert texts(tmp_path, "sample", "other") == texts(tmp_path, "rag", "other") != texts(tmp_path, "sample")


def test_context_puts_the_passages_into_all_prompts(run, tmp_path):
    run("--decoders", "sample,rag,kid,kid-rag", "--context")
    run("--decoders", "rag,kid-rag,sample", out="other")
    assert texts(tmp_path, "sample") == texts(tmp_path, "rag") == texts(tmp_path, "rag", "other")
    assert texts(tmp_path, "kid") == texts(tmp_path, "kid-rag") == texts(tmp_path, "kid-rag", "other")
    assert texts(tmp_path, "sample") != texts(tmp_path, "sample", "other")


def test_the_chat_template_is_used_where_there_is_one(run, model_folder, tmp_path, data):
    run("--decoders", "greedy", "--limit", 1)
    (model_folder / "chat_template.jinja").write_text(TEMPLATE)
    try:
        run("--decoders", "greedy", "--limit", 1, out="chat")
        run("--decoders", "greedy", "--limit", 1, "--no-chat", out="plain")
    finally:
        (model_folder / "chat_template.jinja").unlink()
    plain, chat, asked = (lines_of(tmp_path, "greedy", out)[0] for out in ("out", "chat", "plain"))
    assert plain["text"] == asked["text"]
    assert chat["forwarded"] > plain["forwarded"]


# --- what is kept and reported


def test_lines_results_and_streams(run, tmp_path):
    code, out, err = run("--decoders", "sample,beam,kid")
    assert code == 0
    for name in ("sample", "beam", "kid"):
        lines = sorted(lines_of(tmp_path, name), key=lambda line: line["index"])
        for i, (line, record) in enumerate(zip(lines, RECORDS, strict=True)):
            assert [line[key] for key in ("index", "id", "question", "answers")] == [
                i,
                *(record[key] for key in ("id", "question", "answers")),
            ]
            triples = KnowledgeTrie.from_text([Passage("", c["title"], c["text"]) for c in record["ctxs"]]).triples
            scores = metrics.score(line["text"], record["answers"], metrics.provenance_stems(triples))
            assert line["scores"] == scores | accuracy(line["text"], record["answers"])
            assert line["tokens"] <= 12
            assert line["seconds"] > 0
        assert f"{name}: 100%" in err
        assert len({line["settings"] for line in lines}) == 1
    assert "日本の首都は?" in (tmp_path / "out" / "sample.jsonl").read_text(encoding="utf-8")
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(results) == {"decoders", "differences", "undefined", "n", "settings"}
    assert results["n"] == 5
    assert set(results["decoders"]) == {"sample", "beam", "kid"}
    assert {"kid-sample", "kid-beam", "beam-sample"} <= set(results["differences"])
    for group in (results["decoders"], results["differences"]):
        for estimates in group.values():
            assert list(estimates) == [*SCORES, "Acc", "tokens per second", "tokens forwarded"]  # one is "no"
            for estimate in estimates.values():
                assert estimate["low"] <= estimate["mean"] <= estimate["high"]
    assert results["undefined"]["kid"] == {"BLEU-1": 1, "ROUGE-L": 2, "F1": 1, "EM": 1, "Cov": 1, "Acc": 4}
    assert results["settings"]["kid"]["sigma"] == options.PRESETS["default"]["sigma"]
    rows = out.split("\n")
    assert [row.split("|")[1].strip() for row in rows[2:8]] == [
        *("sample", "beam", "kid"),
        *("beam - sample", "kid - sample", "kid - beam"),
    ]
    assert rows[8] == "undefined for sample, of 5: BLEU-1 1, ROUGE-L 2, F1 1, EM 1, Cov 1, Acc 4"
    mean = np.mean([line["tokens"] for line in lines_of(tmp_path, "kid")]) / np.mean(
        [line["seconds"] for line in lines_of(tmp_path, "kid")]
    )
    assert results["decoders"]["kid"]["tokens per second"]["mean"] == pytest.approx(mean)


def test_cov_is_measured_against_all_passages_whatever_the_decoder_gets(run, tmp_path):
    run("--decoders", "sample", "-k", 0)
    run("--decoders", "sample", out="other")
    assert without_times(lines_of(tmp_path, "sample")) == without_times(lines_of(tmp_path, "sample", "other"))
    scores = {line["index"]: line["scores"]["Cov"] for line in lines_of(tmp_path, "sample")}
    assert scores[0] is not None
    assert scores[3] is None


def test_the_same_command_gives_the_same_lines(run, tmp_path):
    for out in ("out", "other"):
        run("--decoders", "sample,kid", out=out)
    for name in ("sample", "kid"):
        assert without_times(lines_of(tmp_path, name)) == without_times(lines_of(tmp_path, name, "other"))


def test_a_run_goes_on_where_a_kill_stopped_it(run, tmp_path):
    run("--decoders", "sample,kid", "--batch-size", 2)
    whole = {name: lines_of(tmp_path, name) for name in ("sample", "kid")}
    path = tmp_path / "out" / "kid.jsonl"
    content = path.read_bytes()
    (tmp_path / "out" / "results.json").unlink()
    for cut in (len(content) - 1, len(content) * 2 // 5, 1, 0):
        path.write_bytes(content[:cut])
        code, _, _ = run("--decoders", "sample,kid", "--batch-size", 2)
        assert code == 0
        kept = content[:cut].count(b"\n")
        assert path.read_bytes().split(b"\n")[:kept] == content.split(b"\n")[:kept]
        assert without_times(lines_of(tmp_path, "kid")) == without_times(whole["kid"])
        assert lines_of(tmp_path, "sample") == whole["sample"]
        assert json.loads((tmp_path / "out" / "results.json").read_text())["n"] == 5


def test_each_batch_is_kept_before_the_next_begins(run, tmp_path, monkeypatch):
    calls = []

    def stopped(setup, questions, prompts):
        calls.append(len(questions))
        assert len(lines_of(tmp_path, "sample")) == sum(calls[:-1]) - (len(calls) > 3)  # on the disk, not in a buffer
        if len(calls) == 3:
            raise KeyboardInterrupt
        return evaluate.sample(setup, questions, prompts)

    monkeypatch.setitem(evaluate.DECODERS, "sample", evaluate.Decoder(stopped, evaluate.SAMPLE))
    code, out, err = run("--decoders", "sample", "--batch-size", 2)
    assert (code, out, len(lines_of(tmp_path, "sample"))) == (1, "", 4)
    assert "interrupted" in err
    assert not (tmp_path / "out" / "results.json").exists()
    code, out, _ = run("--decoders", "sample", "--batch-size", 2)
    assert (code, calls, len(lines_of(tmp_path, "sample"))) == (0, [2, 2, 1, 1], 5)


def test_a_decoder_is_one_function_and_one_row(run, tmp_path, monkeypatch):
    def echo(setup, questions, prompts):
        return [Generation(tokens=prompt, forwarded=len(prompt)) for prompt in prompts]

    monkeypatch.setitem(evaluate.DECODERS, "echo", evaluate.Decoder(echo))
    assert run("--decoders", "echo,sample")[0] == 0
    assert texts(tmp_path, "echo") == {i: record["question"] for i, record in enumerate(RECORDS)}


def test_a_finished_run_is_reported_again_without_the_work(run, monkeypatch):
    _, before, _ = run("--decoders", "sample")
    monkeypatch.setitem(evaluate.DECODERS, "sample", evaluate.Decoder(None, evaluate.SAMPLE))
    code, again, err = run("--decoders", "sample")
    assert (code, again) == (0, before)
    assert "5/5" in err


# --- limits, and what does not fit together


def test_limit_takes_the_first_and_can_be_raised(run, tmp_path):
    code, _, _ = run("--decoders", "sample", "--limit", 2)
    assert (code, sorted(texts(tmp_path, "sample"))) == (0, [0, 1])
    first = texts(tmp_path, "sample")
    assert run("--decoders", "sample", "--limit", 4)[0] == 0
    more = texts(tmp_path, "sample")
    assert sorted(more) == [0, 1, 2, 3]
    assert first.items() <= more.items()
    assert run("--decoders", "sample", "--limit", 1)[0] == 0
    assert texts(tmp_path, "sample") == more
    assert json.loads((tmp_path / "out" / "results.json").read_text())["n"] == 1


@pytest.mark.parametrize(
    "changed", [["--sigma", 0.7], ["-k", 1], ["--seed", 1], ["--context"], ["--max-new-tokens", 9]]
)
def test_other_settings_are_refused_in_the_same_folder(run, tmp_path, changed):
    run("--decoders", "kid")
    content = (tmp_path / "out" / "kid.jsonl").read_bytes()
    code, out, err = run("--decoders", "kid", *changed)
    assert (code, out) == (1, "")
    assert "choose another --out" in err
    assert "Traceback" not in err
    assert (tmp_path / "out" / "kid.jsonl").read_bytes() == content


def test_the_fingerprint_of_kid_holds_all_that_presets_set():
    args = evaluate.parse([__file__, "--out", "-"])
    assert options.PRESETS["default"].items() <= evaluate.settings_of(args, "kid").items()
    for name in evaluate.DECODERS:
        assert {"model", "max_new_tokens"} < evaluate.settings_of(args, name).keys()


def test_settings_that_a_decoder_does_not_read_may_change(run, tmp_path):
    run("--decoders", "sample,greedy")
    lines = lines_of(tmp_path, "sample")
    changed = ("--sigma", 0.7, "--preset", "paper", "-k", 1, "--beams", 2, "--batch-size", 3)
    assert run("--decoders", "sample,greedy", *changed)[0] == 0
    assert lines_of(tmp_path, "sample") == lines


def test_other_data_is_refused_in_the_same_folder(run, data):
    run("--decoders", "sample")
    records = [*RECORDS[:3], RECORDS[3] | {"answers": ["Tokyo"]}, RECORDS[4]]
    data.write_text(json.dumps(records))
    code, _, err = run("--decoders", "sample")
    assert code == 1
    assert "other data; choose another --out" in err
    data.write_text(json.dumps(RECORDS))  # the same records as an array
    assert run("--decoders", "sample")[0] == 0


def test_a_bad_record_stops_the_run_or_is_skipped(run, tmp_path, data):
    rows = data.read_text(encoding="utf-8").splitlines()
    data.write_text("\n".join([rows[0], '{"question": 1}', "nonsense", *rows[1:]]), encoding="utf-8")
    code, out, err = run("--decoders", "sample")
    assert (code, out) == (1, "")
    assert "data.jsonl:2: expected" in err
    assert "--skip-bad" in err
    assert not (tmp_path / "out").exists()
    code, _, err = run("--decoders", "sample", "--skip-bad", "--limit", 3)
    assert code == 0
    assert "skipped" in err
    assert f"{data}:2: " in err
    assert f"{data}:3: " in err
    assert sorted(texts(tmp_path, "sample")) == [0, 3, 4]


def test_a_prompt_that_is_too_long_is_a_bad_record_for_all_decoders(run, tmp_path, data):
    long = RECORDS[0] | {"ctxs": [{"title": "", "text": "A long car drives. " * 40}]}
    data.write_text(json.dumps([RECORDS[1], long, RECORDS[2]], indent=1))
    line = 1 + data.read_text().splitlines().index(" {", 2)
    code, out, err = run("--decoders", "greedy,rag")
    assert (code, out) == (1, "")
    assert f"data.jsonl:{line}: a prompt of" in err
    assert run("--decoders", "greedy,rag", "--skip-bad")[0] == 0
    assert sorted(texts(tmp_path, "greedy")) == sorted(texts(tmp_path, "rag")) == [0, 2]
    assert run("--decoders", "greedy", out="other")[0] == 0
    assert sorted(texts(tmp_path, "greedy", "other")) == [0, 1, 2]


@pytest.mark.parametrize("content", ["", "[]", "nonsense"])
def test_data_without_questions_is_an_error(run, data, content):
    data.write_text(content)
    code, out, err = run("--decoders", "sample", "--skip-bad")
    assert (code, out) == (1, "")
    assert "no questions" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decoders", "sample,nonsense"], "'nonsense'"),
        (["--decoders", ""], "''"),
        (["--limit", "0"], "--limit: expected 1 or more"),
        (["--batch-size", "0"], "--batch-size"),
        (["--beams", "0"], "--beams"),
        (["-k", "-1"], "expected 0 or more"),
        (["--sigma", "-1"], "sigma"),
        (["--preset", "nonsense"], "invalid choice"),
    ],
)
def test_bad_usage_exits_with_2_and_one_line(run, capfd, arguments, message):
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    assert stop.value.code == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize("name", ["sacrebleu.metrics", "rouge_score.rouge_scorer"])
def test_missing_scorers_are_named_before_the_work(run, tmp_path, monkeypatch, name):
    metrics.load_scorers.cache_clear()
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    code, out, err = run("--decoders", "sample")
    assert (code, out) == (1, "")
    assert "pip install sacrebleu rouge-score" in err
    assert not (tmp_path / "out").exists()


def test_missing_files_are_errors(run, tmp_path, capfd):
    with pytest.raises(SystemExit) as stop:
        run(path=tmp_path / "none.jsonl")
    assert stop.value.code == 2
    assert "none.jsonl: no such file" in capfd.readouterr().err
    (tmp_path / "file").write_text("")
    code, _, err = run("--decoders", "sample", out="file")
    assert code == 1
    assert "evaluate.py: error: " in err
