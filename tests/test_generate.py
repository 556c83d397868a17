"""generate.py from the outside: text on standard output, all else on standard error, exit codes, seeds, errors."""

import io
import json
import math
import sys

import pytest
import tokenizers
from tiny import SPECIAL, TEMPLATE, byte_tokenizer, write_folder

import generate
from minikid import retrieve
from minikid.ewe import SETTINGS
from minikid.knowledge import KnowledgeTrie
from minikid.options import separator_of
from minikid.passages import read_passages
from minikid.retrieve import make_retriever
from minikid.tokenizer import Tokenizer
from minikid.trie import TokenTrie


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"), TEMPLATE)


@pytest.fixture
def run(folder, capfd):
    """Runs the program on the tiny model: exit code, standard output, standard error."""

    def call(*arguments, model=True):
        try:
            code = generate.main([*(["--model", str(folder)] if model else []), "--max-new-tokens", "12", *arguments])
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return call


@pytest.mark.parametrize("decoder", [name for name in generate.DECODERS if name not in ("trie", "rr", *SETTINGS)])
def test_every_decoder_writes_its_text_alone_to_standard_output(run, decoder):
    code, out, err = run("--decoder", decoder, "--prompt", "What is the capital of Mongolia?")
    assert code == 0
    _, record, _ = run("--decoder", decoder, "--prompt", "What is the capital of Mongolia?", "--json")
    assert out == json.loads(record)["text"] + "\n"
    assert "forwarded" in err


@pytest.mark.parametrize("preset", ["default", "paper", "released"])
def test_presets_run_and_repeat(run, preset):
    first = run("--preset", preset, "--json", "--seed", "3")
    assert first[0] == 0
    assert run("--preset", preset, "--json", "--seed", "3")[1] == first[1]
    record = json.loads(first[1])
    assert record["prompt"] == generate.PROMPT
    assert record["passages"]
    assert len(record["knowledge"]) == len(record["kl"]) == len(record["beta"]) == len(record["tokens"])
    assert any(kl > 0 for kl in record["kl"])


def test_samples_of_one_batch_are_the_samples_alone(run):
    """Sample i draws with seed + i."""
    lines = [json.loads(line) for line in run("--num-samples", "3", "--seed", "5", "--json")[1].splitlines()]
    assert [line["seed"] for line in lines] == [5, 6, 7]
    for line in lines:
        alone = json.loads(run("--seed", str(line["seed"]), "--json")[1])
        assert alone["tokens"] == line["tokens"]
        assert alone["log_probs"] == pytest.approx(line["log_probs"], abs=1e-4)
    assert [line["forwarded"] - len(line["tokens"]) for line in lines][1:] == [-1, -1] or any(
        line["stop"] == "eos" for line in lines
    )


def test_temperature_zero_is_greedy(run):
    assert run("--decoder", "sample", "--temperature", "0")[1] == run("--decoder", "greedy")[1]


def test_the_prompt_from_a_file_or_standard_input(run, tmp_path, monkeypatch):
    prompt = "Where is Mongolia? 🙂"
    expected = run("--prompt", prompt, "--json")[1]
    (tmp_path / "prompt.txt").write_text(prompt + "\n", encoding="utf-8")
    assert run("--prompt-file", str(tmp_path / "prompt.txt"), "--json")[1] == expected
    for arguments in (["-"], ["--prompt-file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.StringIO(prompt + "\n"))
        assert run(*arguments, "--json")[1] == expected


def test_knowledge_of_every_kind(run, tmp_path):
    (tmp_path / "a.txt").write_text("Ulaanbaatar is the capital of Mongolia.", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"title": "Tuul", "text": "The Tuul is a river in Mongolia."}\n')
    (tmp_path / "c.tsv").write_text("Mongolia\tcapital\tUlaanbaatar\n")
    files = [str(tmp_path / name) for name in ("a.txt", "b.jsonl", "c.tsv")]
    code, out, err = run("--prompt", "Tell of Mongolia", "--json", "--knowledge", *files)
    assert code == 0
    assert len(json.loads(out)["passages"]) == 2
    assert "from 2 passages and 1 of the files" in err
    code, out, _ = run("--prompt", "Tell of Mongolia", "--json", "--retriever", "none", "--knowledge", files[0])
    assert code == 0
    assert len(json.loads(out)["passages"]) == 1


def test_context_puts_the_passages_into_the_prompt(run, tmp_path):
    (tmp_path / "a.txt").write_text("Ulaanbaatar is the capital. <|im_end|> stays text.", encoding="utf-8")
    arguments = ("--decoder", "greedy", "--json", "--knowledge", str(tmp_path / "a.txt"), "--retriever", "none")
    without, within = (json.loads(run(*arguments, *more)[1]) for more in ([], ["--context"]))
    assert within["forwarded"] > without["forwarded"]


FACTS = (
    "Mongolia（country）\tcapital\tUlaanbaatar\nMongolia（country）\triver\tTuul\nMongolia（country）\triver\tOrkhon\n"
)


def test_trie_answers_with_keys_and_all_their_values(run, tmp_path):
    """Built and kept, opened again; with and without look-ahead; as lines and as JSON."""
    kb, folder = tmp_path / "kb.tsv", tmp_path / "trie"
    kb.write_text(FACTS + "car\twheels\t4\n", encoding="utf-8")
    arguments = ["--decoder", "trie", "--prompt", "Which river is in Mongolia?", "--max-new-tokens", "60"]
    folder.mkdir()
    code, out, err = run(*arguments, "--knowledge", str(kb), "--trie", str(folder), "--num-samples", "3")
    assert code == 0
    assert f"3 keys from {kb}" in err
    assert sorted(out.splitlines()) == [
        "Mongolia（country） ||| capital ||| Ulaanbaatar",
        "Mongolia（country） ||| river ||| Orkhon",
        "Mongolia（country） ||| river ||| Tuul",
        "car ||| wheels ||| 4",
    ]
    assert run(*arguments, "--trie", str(folder), "--num-samples", "3")[1] == out
    kb.write_text("other\tcontents\t1\n")
    code, again, err = run(*arguments, "--trie", str(folder), "--num-samples", "3", "--knowledge", str(kb))
    assert (code, again) == (0, out)
    assert f"3 keys from {folder}, --knowledge unread" in err
    for flags in ([], ["--no-lookahead"]):
        lines = run(*arguments, "--trie", str(folder), "--json", "--num-samples", "3", *flags)[1].splitlines()
        records = [json.loads(line) for line in lines]
        scores = [record["score"] for record in records]
        assert scores == sorted(scores, reverse=True)
        # the probabilities of all keys: no mass is lost, and a score is the whole key's
        assert sum(map(math.exp, scores)) == pytest.approx(1, abs=1e-4)
        keys = {(r["subject"], r["predicate"], r["meaning"]): r["values"] for r in records}
        assert keys == {
            ("Mongolia", "capital", "country"): ["Ulaanbaatar"],
            ("Mongolia", "river", "country"): ["Tuul", "Orkhon"],
            ("car", "wheels", ""): ["4"],
        }
    assert len(run(*arguments, "--trie", str(folder), "--json", "--beams", "1")[1].splitlines()) == 1


def test_look_ahead_raises_the_predicate_that_the_question_names(run, tmp_path):
    """The two runs differ in the look-ahead alone; the two predicates share no token."""
    (tmp_path / "kb.tsv").write_text("car\tkkkk\t1\ncar\tjjjj\t2\n")
    arguments = ["--decoder", "trie", "--knowledge", str(tmp_path / "kb.tsv"), "--json", "--num-samples", "2"]
    for named, question in (
        ("kkkk", "kkkk"),
        ("jjjj", "jjjj"),
        ("kkkk", "what kkkk?"),
    ):  # also where the word has its space in front
        scores = []
        for flags in ([], ["--no-lookahead"]):
            out = run(*arguments, "--prompt", question, *flags)[1]
            scores.append({r["predicate"]: r["score"] for r in map(json.loads, out.splitlines())})
        assert scores[0][named] > scores[1][named]


def test_the_separator_is_a_token_that_no_text_has():
    def tokenizer(special, eos_ids=()):
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.add_special_tokens(special)
        return Tokenizer(library, eos_ids)

    assert separator_of(tokenizer(["<s>", "[SEP]"])) == 1
    assert separator_of(tokenizer(["</s>", "<s>", "<pad>"], eos_ids=[0])) == 1
    assert separator_of(byte_tokenizer()) not in byte_tokenizer().encode("".join(SPECIAL))
    with pytest.raises(ValueError, match="no control token beside eos"):
        separator_of(tokenizer(["</s>"], eos_ids=[0]))


@pytest.mark.parametrize("device", ["foo", "cuda:99"])
def test_a_device_that_is_not_there(run, device):
    code, out, err = run("--decoder", "greedy", "--device", device)
    assert (code, out) == (1, "")
    assert f"--device {device}: torch cannot use it" in err


def test_line_ends_and_a_byte_order_mark_are_no_part_of_a_prompt(tmp_path):
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    args = generate.parse(["--prompt-file", str(tmp_path / "prompt.txt")])
    assert args.question == "one\ntwo"


def test_trie_errors(run, tmp_path):
    code, _, err = run("--decoder", "trie")
    assert code == 2
    assert "--decoder trie needs triples" in err
    (tmp_path / "a.txt").write_text("text")
    code, _, err = run("--decoder", "trie", "--knowledge", str(tmp_path / "a.txt"))
    assert code == 2
    assert "expected triples" in err
    (tmp_path / "kb.tsv").write_text("one\ttwo\n")
    code, _, err = run("--decoder", "trie", "--knowledge", str(tmp_path / "kb.tsv"))
    assert code == 1
    assert "kb.tsv:1" in err
    (tmp_path / "kb.tsv").write_text(FACTS, encoding="utf-8")
    code, _, err = run("--decoder", "trie", "--knowledge", str(tmp_path / "kb.tsv"), "--max-new-tokens", "2")
    assert code == 1
    assert "no key ended within 2 tokens" in err
    trie = TokenTrie.build([[5, 6]], ["v"])
    trie.save(tmp_path / "other", "0123456789abcdef")
    code, out, err = run("--decoder", "trie", "--trie", str(tmp_path / "other"))
    assert (code, out) == (1, "")
    assert "built with another tokenizer (0123456789abcdef" in err
    code, out, err = run("--decoder", "trie", "--trie", str(tmp_path / "none"))
    assert (code, out) == (1, "")
    assert "expected a folder with trie.json" in err
    (tmp_path / "kb.tsv").write_text("")
    code, _, err = run("--decoder", "trie", "--knowledge", str(tmp_path / "kb.tsv"))
    assert code == 1
    assert "got 0" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--decoder", "magic"], "invalid choice: 'magic'"),
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt-file", "no/such/file"], "No such file"),
        (["--knowledge", "no/such/file.txt"], "no/such/file.txt: no such file"),
        (["--top-p", "0"], "0 < top_p <= 1"),
        (["--sigma", "-1"], "sigma"),
        (["--max-new-tokens", "-3"], "expected 0 or more, got -3"),
        (["--num-samples", "0"], "expected 1 or more"),
        (["--decoder", "beam", "--num-samples", "9"], "5 beams end in no more texts"),
        (["--decoder", "trie", "--trie", "x", "--num-samples", "9"], "5 beams end in no more texts"),
        (["--decoder", "greedy", "--trie", "x"], "greedy has no trie"),
        (["--optimiser", "cache"], "no closed form to solve beta for"),
    ],
)
def test_bad_usage_is_refused_with_code_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert message in err


def test_what_fails_while_running_ends_with_code_1_and_one_line(run, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"title": "t", "text": "fine"}\n{"title": 3\n')
    (tmp_path / "config.json").write_text("{}")
    for arguments, message in (
        (["--knowledge", str(bad)], f"{bad}:2"),
        (["--model", str(tmp_path)], "tokenizer.json does not exist"),
        (["--max-new-tokens", "4000"], "leaves room for"),
        (["--model", "no such model"], "no such model"),
    ):
        code, out, err = run(*arguments)
        assert code == 1
        assert out == ""
        assert message in err
        assert err.splitlines()[-1].startswith("generate.py: error: ")


def test_the_streamed_text_is_the_whole_text(run, monkeypatch):
    """Knowledge tokens in colour on a terminal; without the colours the text is the same."""
    plain = run("--prompt", "Mongolia 🙂 日本")[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = run("--prompt", "Mongolia 🙂 日本")[1]
    assert generate.COLOUR in coloured
    assert coloured.replace(generate.COLOUR, "").replace(generate.PLAIN, "") == plain


def test_mongolia_on_the_default_model(default_folder, tmp_path, capfd):
    """The model alone does not know the capital; with a passage that says so KID writes it."""
    (tmp_path / "a.txt").write_text("Ulaanbaatar is the capital and largest city of Mongolia.", encoding="utf-8")
    question = ["--model", str(default_folder), "--prompt", "What is the capital of Mongolia?"]
    short = ["--max-new-tokens", "24"]
    assert generate.main([*question, *short, "--decoder", "greedy"]) == 0
    assert "Ulaanbaatar" not in capfd.readouterr().out
    assert generate.main([*question, *short, "--temperature", "0", "--knowledge", str(tmp_path / "a.txt")]) == 0
    assert "Ulaanbaatar" in capfd.readouterr().out


# --- retrieval and kept tries

CORPUS = [
    {"id": "a", "title": "Mongolia", "text": "Ulaanbaatar is the capital of Mongolia."},
    {"id": "b", "title": "Tuul", "text": "The Tuul is a river in Mongolia."},
    {"id": "c", "title": "Japan", "text": "Tokyo is the capital of Japan."},
    {"id": "d", "title": "Cars", "text": "A cardiologist drives a car."},
]


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in CORPUS))
    return path


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    from test_encoder import BertModel, save

    folder = tmp_path_factory.mktemp("encoder")
    save(folder, BertModel)
    return folder


@pytest.mark.parametrize("retriever", ["bm25", "dense", "hybrid", "none"])
@pytest.mark.parametrize("decoder", ["greedy", "kid"])
def test_every_retriever_on_files_and_on_an_index(run, corpus, encoder, tmp_path, retriever, decoder):
    """Files indexed on the fly and the index built of them give the same passages, those of the library."""
    question = "Which river is in Mongolia?"
    loaded = list(read_passages(corpus))
    found = make_retriever(loaded, retriever, encoder).search(question, 2)
    expected = [hit.passage.id for hit in found]
    assert len(expected) == (4 if retriever == "none" else 2)
    arguments = ["--prompt", question, "-k", "2", "--decoder", decoder, "--json", "--context"]
    arguments += ["--retriever", retriever, "--encoder", str(encoder)]
    code, out, _ = run(*arguments, "--knowledge", str(corpus))
    assert code == 0
    assert json.loads(out)["passages"] == expected
    index = tmp_path / "index"
    build = ["build", str(corpus), "--out", str(index), "--retriever", "hybrid", "--encoder", str(encoder)]
    assert retrieve.main(build) == 0
    assert run(*arguments, "--knowledge", str(index))[:2] == (0, out)


def test_an_index_is_searched_as_it_was_built_and_stands_beside_triples(run, corpus, tmp_path):
    assert retrieve.main(["build", str(corpus), "--out", str(tmp_path / "index")]) == 0
    (tmp_path / "c.tsv").write_text("Mongolia\tcapital\tUlaanbaatar\n")
    question = ["--prompt", "Which river is in Mongolia?", "-k", "1", "--json", "--knowledge", str(tmp_path / "index")]
    code, out, err = run(*question, str(tmp_path / "c.tsv"))
    assert code == 0
    assert json.loads(out)["passages"] == ["b"]
    assert "from 1 passages and 1 of the files" in err
    for more, message in (
        ([str(corpus)], "or one folder with an index"),
        (["--retriever", "dense"], "expected a dense index"),
    ):
        code, out, err = run(*question, *more)
        assert (code, out) == (1, "")
        assert message in err
    code, _, err = run("--knowledge", str(tmp_path))
    assert code == 1
    assert "minikid.retrieve build" in err


@pytest.mark.parametrize("decoder", ["kid", "little-kid"])
def test_a_kept_trie_holds_all_knowledge_and_is_used_instead_of_it(run, corpus, tmp_path, decoder):
    arguments = ["--decoder", decoder, "--prompt", "Tell of Mongolia", "--json", "--trie", str(tmp_path / "trie")]
    code, first, err = run(*arguments, "--knowledge", str(corpus), "-k", "1")
    assert code == 0
    trie = KnowledgeTrie.open(tmp_path / "trie")
    assert trie == KnowledgeTrie.from_text(read_passages(corpus))
    assert f"{len(trie.triples)} triples from {corpus}" in err
    corpus.write_text('{"text": "Ferrets eat mice."}\n')
    code, again, err = run(*arguments, "--knowledge", str(corpus))
    assert (code, again) == (0, first)
    assert "--knowledge unread" in err
    assert json.loads(run(*arguments, "--context", "--knowledge", str(corpus), "-k", "1")[1])["passages"] == []
    out = run(*arguments, "--context", "--knowledge", str(corpus), "--prompt", "Tell of ferrets")[1]
    assert json.loads(out)["passages"] == ["corpus.jsonl:1"]
