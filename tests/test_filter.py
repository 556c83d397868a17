"""FILCO: the measures against their literal forms, the choice, M_ctx, files, and both programs from end to end."""

import inspect
import json
import math
import runpy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import TEMPLATE, byte_tokenizer, write_folder

import evaluate
import generate
from minikid import filter as filco
from minikid import silver
from minikid.config import Config
from minikid.decode import Vanilla, greedy
from minikid.decode import generate as decode
from minikid.filter import Selection, cxmi, lexical_overlap, select, string_inclusion, with_context
from minikid.generation import likelihoods
from minikid.model import GPT, load
from minikid.passages import Passage
from minikid.questions import read_questions

MONGOLIA = Passage("0", "Mongolia", "The river is long. In the U.S. Dr. Tuul is known. The capital is Ulaanbaatar.")
PASSAGES = [MONGOLIA, Passage("1", "", "A cardiologist drives a car. Ulaanbaatar lies on the Tuul.")]
QUESTION = "What is the capital?"


# --- StrInc


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("They met in Paris.", ["paris"], True),
        ("They met in Paris.", ["London", "in  PARIS"], True),
        ("the party", ["art"], False),  # characters of a word are no token
        ("It was 1990.", ["199"], False),
        ("cafe\u0301 society", ["CAF\u00c9"], True),  # composed or not
        ("cafe society", ["caf\u00e9"], False),  # NFD keeps the accent
        ("the well-known man", ["well - known"], True),  # a hyphen is a token
        ("the well-known man", ["well known"], False),
        ("U.S. troops", ["u.s."], True),
        ("首都は東京です。", ["東京"], True),
        ("首都は東京です。", ["京東"], False),
        ("がく", ["か"], False),  # NFD parts the voicing mark, which stays with its sign
        ("zero\u200bwidth", ["width"], True),
        ("anything", ["", " ", "\n"], False),
        ("", ["a"], False),
        ("anything", [], False),
    ],
)
def test_string_inclusion_is_dprs(text, answers, expected):
    assert string_inclusion(text, answers) is expected


@given(st.lists(st.sampled_from(["a", "B", "é", "1.5", "-", "東京", "\n", " "]), max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_string_inclusion_equals_the_search_for_a_run_of_tokens(parts, data):
    text = " ".join(parts)
    tokens = filco.dpr_tokens(text)
    lo = data.draw(st.integers(0, len(tokens)))
    piece = tokens[lo : lo + data.draw(st.integers(0, 3))]
    assert string_inclusion(text, [" ".join(piece)]) is bool(piece)
    wanted = filco.dpr_tokens(answer := data.draw(st.sampled_from(["a b", "1.5", "京", "b é"])))
    literal = any(tokens[i : i + len(wanted)] == wanted for i in range(len(tokens)))
    assert string_inclusion(text, [answer]) is literal


# --- Lexical


@pytest.mark.parametrize(
    ("text", "answers", "expected"),
    [
        ("Paris Paris Paris Paris Paris", ["Paris"], 1 / 3),
        ("listen", ["silent"], 0.0),
        ("Paris", ["London", "paris"], 1.0),
        ("red green", ["green blue"], 0.5),
        ("anything", [""], 0.0),
        ("anything", [], 0.0),
        ("", ["Paris"], 0.0),
    ],
)
def test_lexical_overlap_is_the_f1_of_word_multisets(text, answers, expected):
    assert lexical_overlap(text, answers) == pytest.approx(expected, abs=1e-12)


def test_lexical_overlap_with_the_question():
    found = lexical_overlap("capital Mongolia Ulaanbaatar", ["Ulaanbaatar"], "capital of Mongolia")
    assert found == pytest.approx(6 / 7)
    assert lexical_overlap("capital of Mongolia", [" "], "capital of Mongolia") == 0.0


# --- CXMI


def literal(model, tokenizer, text, question, answer, chat):
    """Token by token, each behind all that precedes it, without a cache."""
    ids, total = tokenizer.encode(f" {answer}"), 0.0
    prompts = [with_context(question, [Passage("", "", text)]), question]
    for sign, prompt in zip((1, -1), (tokenizer.prompt(prompt, chat) for prompt in prompts), strict=True):
        for i, token in enumerate(ids):
            total += sign * float(model(torch.tensor([prompt + ids[:i]]))[0, -1].double().log_softmax(-1)[token])
    return total


@pytest.fixture(scope="module")
def readers():
    """A roomy model in float64 and its copy in float32."""
    shape = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"intermediate_size": 40, "max_position_embeddings": 2000, "eos_token_id": 2, "model_type": "llama"}
    tokenizer = byte_tokenizer(TEMPLATE)

    def make(dtype, **more):
        torch.manual_seed(0)
        model = GPT(Config.from_dict(shape | {"vocab_size": tokenizer.vocab_size} | more)).to(dtype)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.4)
        return model.eval().requires_grad_(False), tokenizer

    return {
        "float64": make(torch.float64),
        "float32": make(torch.float32),
        "prefix": make(torch.float64, attention="prefix"),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-9), ("float32", 1e-5)])
@pytest.mark.parametrize("chat", [False, True])
def test_cxmi_equals_sums_without_a_cache(readers, dtype, tolerance, chat):
    model, tokenizer = readers[dtype]
    for answer in ("Ulaanbaatar", "x", "the capital of Mongolia, 東京"):
        found = cxmi(model, tokenizer, "The capital is Ulaanbaatar.", QUESTION, answer, chat)
        expected = literal(model, tokenizer, "The capital is Ulaanbaatar.", QUESTION, answer, chat)
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert abs(expected) > 1e-3


def test_cxmi_of_a_batch_of_sentences_is_that_of_each_alone(readers):
    """Rows of unlike length that share a beginning; a row may begin another; of several answers the best counts."""
    reader = readers["float64"]
    texts = ["The river is long.", "The river", "東京", "The capital is Ulaanbaatar, in the north.", "The river"]
    candidates = [Passage("", "", text) for text in texts]
    found = filco.cxmi_scores(reader, candidates, QUESTION, ["Ulaanbaatar", " ", "a river"])
    alone = [[cxmi(*reader, text, QUESTION, answer) for answer in ("Ulaanbaatar", "a river")] for text in texts]
    assert found == pytest.approx([max(pair) for pair in alone], abs=1e-9)
    assert found[1] == found[4]
    assert filco.cxmi_scores(reader, candidates, QUESTION, [""]) == [0.0] * 5
    assert filco.cxmi_scores(reader, [], QUESTION, ["a"]) == []


def test_what_prompts_share_is_read_once(readers, monkeypatch):
    model, _ = readers["float64"]
    read = []
    hidden = GPT.hidden
    monkeypatch.setattr(
        GPT, "hidden", lambda self, tokens, *a, **k: read.append(tokens.shape) or hidden(self, tokens, *a, **k)
    )
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7, 4], [5, 6, 7]]
    found = likelihoods(model, prompts, [[10, 11]] * 3)
    assert [tuple(shape) for shape in read] == [(1, 2), (3, 4)]
    for prompt, values in zip(prompts, found, strict=True):
        log_p = model(torch.tensor([[*prompt, 10]]))[0].log_softmax(-1)
        assert values.tolist() == pytest.approx([float(log_p[-2, 10]), float(log_p[-1, 11])], abs=1e-9)


def test_cxmi_of_500_tokens_is_finite_where_a_product_underflows(readers):
    model, tokenizer = readers["float32"]
    answer = "Ulaanbaatar zq " * 70
    prompt = tokenizer.prompt(QUESTION, False)
    ids = tokenizer.encode(f" {answer.strip()}")
    assert len(ids) >= 500
    total = float(likelihoods(model, [prompt], [ids])[0].sum())
    assert math.exp(total) == 0.0
    assert math.isfinite(cxmi(model, tokenizer, "The river is long.", QUESTION, answer))


def test_cxmi_where_prompts_are_read_both_ways(readers):
    """A model with prefix attention reads a prompt in one piece; nothing of it is shared."""
    model, tokenizer = readers["prefix"]
    prompts = [tokenizer.prompt(text, False) for text in (QUESTION, "What is this?", "東京")]
    ids = tokenizer.encode(" Tuul")
    for prompt, values in zip(prompts, likelihoods(model, prompts, [ids] * 3), strict=True):
        cache = model.new_cache()
        states = [model(torch.tensor([prompt]), cache)[0, -1]]
        states += [model(torch.tensor([[token]]), cache)[0, -1] for token in ids[:-1]]
        expected = [float(s.log_softmax(-1)[token]) for s, token in zip(states, ids, strict=True)]
        assert values.tolist() == pytest.approx(expected, abs=1e-9)


# --- the choice


@pytest.mark.parametrize(
    ("measure", "scores", "expected"),
    [
        ("strinc", [0, 1, 1], 1),
        ("strinc", [0, 0], None),
        ("lexical", [0.2, 0.5, 0.5], 1),
        ("lexical", [0.2, 0.4999], None),
        ("cxmi", [-1.0, 0.1, 2.0], 2),
        ("cxmi", [-1.0, 0.0], None),  # not "above zero for a sigmoid", which always passes
        ("cxmi", [], None),
    ],
)
def test_the_rules_of_choice(measure, scores, expected):
    assert filco.choose(measure, scores) == expected


def test_sentences_survive_abbreviations_and_keep_their_title():
    assert [t.text for t in filco.candidates_of(PASSAGES)] == [
        *("The river is long.", "In the U.S. Dr. Tuul is known.", "The capital is Ulaanbaatar."),
        *("A cardiologist drives a car.", "Ulaanbaatar lies on the Tuul."),
    ]
    assert [t.title for t in filco.candidates_of(PASSAGES)] == ["Mongolia"] * 3 + [""] * 2


def test_selections(readers):
    first = select("strinc", PASSAGES, QUESTION, ["Ulaanbaatar"])
    assert first == ([MONGOLIA._replace(text="The capital is Ulaanbaatar.")], True)
    assert select("strinc", PASSAGES, QUESTION, ["Paris"]) == ([MONGOLIA], False)  # the whole top passage
    assert select("lexical", PASSAGES, QUESTION, ["the car drives"]).passages[0].text == "A cardiologist drives a car."
    assert select("lexical", PASSAGES, QUESTION, ["Tuul"]) == ([MONGOLIA], False)  # F1 is 0.4
    together = select("lexical", PASSAGES, QUESTION, ["Ulaanbaatar"], with_question=True)
    assert together.passages[0].text == "The capital is Ulaanbaatar."
    scores = filco.cxmi_scores(readers["float64"], filco.candidates_of(PASSAGES), QUESTION, ["Tuul"])
    chosen = select("cxmi", PASSAGES, QUESTION, ["Tuul"], readers["float64"])
    best = filco.candidates_of(PASSAGES)[scores.index(max(scores))]
    assert chosen == (([best], True) if max(scores) > 0 else ([MONGOLIA], False))
    for measure in filco.MEASURES:
        assert select(measure, [], QUESTION, ["a"], readers["float64"]) == ([], False)
    with pytest.raises(ValueError, match="expected a measure of strinc"):
        select("magic", PASSAGES, QUESTION, ["a"])


# --- M_ctx


def test_no_answer_can_reach_the_trained_filter():
    assert list(inspect.signature(filco.filter_by_model).parameters) == [
        "reader",
        "questions",
        "chat",
        "max_new_tokens",
    ]
    for prompt in (filco.context_prompt, filco.with_context):
        assert list(inspect.signature(prompt).parameters) == ["question", "passages"]


def test_the_trained_filter_is_greedy_decoding_of_its_prompt(readers):
    reader = readers["float64"]
    model, tokenizer = reader
    asked = [(QUESTION, PASSAGES), ("Who drives?", PASSAGES[1:]), ("Nothing?", [])]
    found = filco.filter_by_model(reader, asked, max_new_tokens=9)
    assert found[2] == ([], False)
    for (question, passages), selection in zip(asked[:2], found, strict=False):
        prompt = tokenizer.prompt(filco.context_prompt(question, passages), True)
        alone = decode(model, prompt, Vanilla(), greedy, max_new_tokens=9)
        text = tokenizer.decode(alone.tokens).strip().split("\n")[0]
        assert selection == (([Passage("", "", text)], True) if text else (passages[:1], False))


@pytest.mark.parametrize(
    ("written", "passages", "found"),
    [
        (" The capital is Ulaanbaatar.", [MONGOLIA._replace(text="The capital is Ulaanbaatar.")], True),
        (" Ulaanbaatar lies on the Tuul.\nMore", [Passage("1", "", "Ulaanbaatar lies on the Tuul.")], True),
        (" It is Paris.", [Passage("", "", "It is Paris.")], True),
        (" \n", [MONGOLIA], False),
        ("", [MONGOLIA], False),
    ],
)
def test_what_the_trained_filter_writes_becomes_a_passage(readers, monkeypatch, written, passages, found):
    ids = byte_tokenizer().encode(written)
    monkeypatch.setattr(filco, "generate_batch", lambda *_, **__: [filco_row(ids)])
    assert filco.filter_by_model(readers["float64"], [(QUESTION, PASSAGES)]) == [(passages, found)]


def filco_row(ids):
    from minikid.decode import Generation

    return Generation(tokens=ids)


# --- files


RECORDS = [
    {"question": QUESTION, "answers": ["Ulaanbaatar"], "ctxs": [{"title": p.title, "text": p.text} for p in PASSAGES]},
    {"question": "Who drives?", "answers": ["a cardiologist"], "ctxs": [{"text": PASSAGES[1].text}]},
    {"question": "Where?", "answers": ["Paris"], "ctxs": [{"title": "T", "text": "Nothing here.\nOr here."}]},
    {"question": "Why?", "answers": [""], "ctxs": [{"text": "No answer. At all."}]},
    {"question": "No passage?", "answers": ["none"], "ctxs": []},
]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


def test_a_question_that_a_filter_has_no_room_for_is_named_or_passed_over(data, tmp_path, folder, capsys, monkeypatch):
    def run(questions):
        if any(question.index == 1 for question in questions):
            raise ValueError("too long")
        return [Selection(question.ctxs[:1], False) for question in questions]

    questions = list(read_questions(data))
    with pytest.raises(ValueError, match=r"data.jsonl:2: too long"):
        silver.filter_questions(tmp_path / "a.jsonl", questions, {}, run)
    for _ in range(2):  # the second time from the file
        lines = silver.filter_questions(tmp_path / "b.jsonl", questions, {}, run, pass_over=True)
        assert [line.get("error") for line in lines] == [None, "too long", None, None, None]
    monkeypatch.setattr(evaluate, "oracle", lambda *args, **options: run)
    command = [str(data), "--out", str(tmp_path / "out"), "--model", str(folder), "--decoders", "greedy"]
    command += ["--filter", "strinc", "--max-new-tokens", "2"]
    assert evaluate.main(command) == 1
    assert "data.jsonl:2: too long" in capsys.readouterr().err
    for _ in range(2):
        assert evaluate.main([*command, "--skip-bad"]) == 0
        assert capsys.readouterr().err.count(f"skipped {data}:2: too long") == 1
    assert len((tmp_path / "out" / "greedy.jsonl").read_text().splitlines()) == 4
    assert evaluate.main(command) == 1  # what was passed over once is not passed over for good
    assert "data.jsonl:2: too long; mend this record" in capsys.readouterr().err


def test_the_oracle_of_a_file_goes_on_where_it_stopped(data, tmp_path, capsys):
    out = tmp_path / "silver.jsonl"
    arguments = ["oracle", str(data), "--measure", "strinc", "--out", str(out)]
    assert silver.main([*arguments, "--limit", "2"]) == 0
    first = out.read_text()
    with out.open("a") as file:
        file.write('{"index": 2, "torn')
    capsys.readouterr()
    assert silver.main(arguments) == 0
    assert out.read_text().startswith(first)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(5))
    assert [line["found"] for line in lines] == [True, True, False, False, False]
    assert lines[0]["ctxs"] == [{"title": "Mongolia", "text": "The capital is Ulaanbaatar."}]
    assert [line["words"] for line in lines] == [[25, 4], [10, 5], [4, 4], [4, 4], [0, 0]]
    assert "43 words of passages, 17 left, |P|/|t| = 2.53; a sentence for 2 of 5" in capsys.readouterr().err
    assert [q.ctxs[0].text for q in read_questions(out) if q.ctxs] == [line["ctxs"][0]["text"] for line in lines[:4]]
    kept = out.read_text()
    assert silver.main([*arguments[:-4], "--measure", "lexical", "--out", str(out)]) == 1
    assert "made with other settings" in capsys.readouterr().err
    assert out.read_text() == kept


def test_the_oracle_by_cxmi_is_the_librarys(data, folder, tmp_path):
    out = tmp_path / "silver.jsonl"
    arguments = ["oracle", str(data), "--measure", "cxmi", "--model", str(folder), "--limit", "1", "-k", "1"]
    assert silver.main([*arguments, "--out", str(out)]) == 0
    question = next(iter(read_questions(data)))
    expected = select("cxmi", question.ctxs[:1], question.question, question.answers, load(folder))
    line = json.loads(out.read_text())
    assert (silver.passages_of(line), line["found"]) == (expected.passages, expected.found)


def test_training_files(data, tmp_path, capsys):
    out, ctx, gen = (tmp_path / name for name in ("silver.jsonl", "ctx.jsonl", "gen.jsonl"))
    assert silver.main(["training", str(data), str(out), "--context", str(ctx)]) == 1
    assert "no such file" in capsys.readouterr().err
    assert silver.main(["oracle", str(data), "--measure", "strinc", "--out", str(out)]) == 0
    assert silver.main(["training", str(data), str(out), "--context", str(ctx), "--answer", str(gen)]) == 0
    contexts, answers = ([json.loads(line) for line in path.read_text().splitlines()] for path in (ctx, gen))
    assert [entry["completion"] for entry in contexts] == [
        *(" The capital is Ulaanbaatar.", " A cardiologist drives a car.", " Nothing here. Or here.")
    ]
    assert [entry["completion"] for entry in answers] == [" Ulaanbaatar", " a cardiologist", " Paris"]
    for record, context, answer in zip(RECORDS, contexts, answers, strict=False):
        passages = [Passage("", ctx.get("title", ""), ctx["text"]) for ctx in record["ctxs"]]
        assert context["prompt"] == filco.context_prompt(record["question"], passages)
        left = passages[0]._replace(text=context["completion"].strip())
        if record["question"] != "Where?":
            assert answer["prompt"] == with_context(record["question"], [left])
    assert silver.main(["training", str(data), str(out), "--skip", "1", "--limit", "2", "--answer", str(gen)]) == 0
    assert [json.loads(line)["completion"] for line in gen.read_text().splitlines()] == [" a cardiologist"]
    data.write_text(json.dumps(RECORDS[1]) + "\n")
    assert silver.main(["training", str(data), str(out), "--context", str(ctx)]) == 1
    assert "other data" in capsys.readouterr().err


# --- the programs


@pytest.fixture
def run_evaluate(data, folder, tmp_path, capfd):
    def run(*arguments, path=data, out="out"):
        given = [str(path), "--model", str(folder), "--max-new-tokens", "6", "--no-chat"]
        code = evaluate.main([*given, "--decoders", "rag,greedy", *arguments, "--out", str(tmp_path / out)])
        assert code == 0, capfd.readouterr().err
        return {
            name: [json.loads(line) for line in (tmp_path / out / f"{name}.jsonl").read_text().splitlines()]
            for name in ("rag", "greedy", "filter")
            if (tmp_path / out / f"{name}.jsonl").exists()
        }

    return run


def test_evaluate_reads_what_the_oracle_left(run_evaluate, data, tmp_path):
    """As if the file had held the chosen sentences; decoders that read no passages are as they were."""
    assert silver.main(["oracle", str(data), "--measure", "strinc", "--out", str(tmp_path / "silver.jsonl")]) == 0
    filtered = run_evaluate("--filter", "strinc")
    given = run_evaluate(path=tmp_path / "silver.jsonl", out="given")
    whole = run_evaluate(out="whole")
    for name in ("rag", "greedy"):
        assert [line["text"] for line in filtered[name]] == [line["text"] for line in given[name]]
        assert [line["forwarded"] for line in filtered[name]] == [line["forwarded"] for line in given[name]]
    assert [line["settings"] for line in filtered["greedy"]] == [line["settings"] for line in whole["greedy"]]
    assert [line["settings"] for line in filtered["rag"]] != [line["settings"] for line in whole["rag"]]
    assert sum(line["forwarded"] for line in filtered["rag"]) < sum(line["forwarded"] for line in whole["rag"])
    assert "filter" not in whole
    assert run_evaluate("--filter", "strinc") == filtered  # from the lines that are there
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["filter"] == {"words": [43, 17], "found": 2}
    assert results["settings"]["rag"]["filter"] == "strinc"


def test_the_program_is_the_modules(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["minikid.filter", "oracle"])
    monkeypatch.delitem(sys.modules, "minikid.filter")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("minikid.filter", run_name="__main__")
    assert stop.value.code == 2
    assert "--measure" in capsys.readouterr().err


def test_gold_answers_change_nothing_behind_a_trained_filter(run_evaluate, folder, tmp_path, monkeypatch):
    """The same questions with other answers: filter, prompts and texts are the same, scores alone differ."""
    whole = filco.generate_batch  # a random model never ends a sentence by itself
    monkeypatch.setattr(filco, "generate_batch", lambda *given, max_new_tokens: whole(*given, max_new_tokens=12))
    others = [record | {"answers": ["The river is long.", "zzz"]} for record in RECORDS]
    (tmp_path / "others.jsonl").write_text("".join(json.dumps(record) + "\n" for record in others))
    first = run_evaluate("--filter", str(folder))
    second = run_evaluate("--filter", str(folder), path=tmp_path / "others.jsonl", out="others")
    keys = {"filter": ("ctxs", "found", "words"), "rag": ("text", "tokens", "forwarded")}
    for name, same in keys.items():
        rows = [sorted([line[key] for key in ("index", *same)] for line in run[name]) for run in (first, second)]
        assert rows[0] == rows[1]
    assert any(line["found"] for line in first["filter"])
    assert [line["answers"] for line in first["rag"]] != [line["answers"] for line in second["rag"]]
    oracle = run_evaluate("--filter", "strinc", path=tmp_path / "others.jsonl", out="oracle")
    assert [line["ctxs"] for line in oracle["filter"]] != [line["ctxs"] for line in first["filter"]]


@pytest.fixture
def run_generate(folder, tmp_path, capfd):
    entries = [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
    (tmp_path / "passages.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def run(*arguments):
        given = [
            "--model",
            str(folder),
            "--max-new-tokens",
            "6",
            "--prompt",
            QUESTION,
            "--context",
            "--retriever",
            "none",
        ]
        try:
            code = generate.main([*given, "--knowledge", str(tmp_path / "passages.jsonl"), *arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return run


@pytest.mark.parametrize("decoder", ["greedy", "kid"])
def test_generate_with_an_oracle_and_with_a_trained_filter(run_generate, folder, tmp_path, decoder):
    code, out, err = run_generate("--json", "--decoder", decoder, "--filter", "strinc", "--answer", "x", "Ulaanbaatar")
    assert code == 0
    assert "25 words of passages, 4 left, |P|/|t| = 6.25; a sentence for 1 of 1" in err
    (tmp_path / "left.jsonl").write_text('{"id": "0", "title": "Mongolia", "text": "The capital is Ulaanbaatar."}\n')
    alone = run_generate("--json", "--decoder", decoder, "--knowledge", str(tmp_path / "left.jsonl"))
    assert json.loads(out) == json.loads(alone[1])
    code, out, err = run_generate("--json", "--decoder", decoder, "--filter", str(folder))
    assert code == 0
    assert "of passages" in err
    assert len(json.loads(out)["passages"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "strinc"], "they need --answer TEXT"),
        (["--answer", "Paris"], "nothing else does"),
        (["--filter", "no/such/folder"], "expected strinc, lexical, cxmi or the folder"),
        (["--filter", "strinc", "--answer", "x", "--decoder", "trie"], "--decoder trie are not filtered"),
    ],
)
def test_bad_usage_of_filters_is_refused(run_generate, arguments, message):
    code, out, err = run_generate(*arguments)
    assert (code, out) == (2, "")
    assert message in err
