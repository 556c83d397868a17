"""train.py end to end: killed and resumed, in two processes, on a full disk, and the folder that it leaves."""

import csv
import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import generate
import train
from minikid import training
from minikid.decode import Vanilla, greedy
from minikid.decode import generate as continue_prompt
from minikid.model import load
from tests.tiny import TEMPLATE, write_folder

ROOT = Path(__file__).resolve().parent.parent
HOMES = {"Ann": "Rome", "Bob": "Oslo", "Cid": "Lima", "日本": "東京"}
SMALL = "--layers 1 --heads 2 --hidden 16 --positions 64 --tokenizer characters --log-every 1000".split()


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = [
        {"prompt": f"Where does {name} live?{' Say it.' * n}", "completion": f" In {home}."}
        for name, home in HOMES.items()
        for n in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def log_of(folder: Path) -> list[dict[str, str]]:
    with (folder / train.LOG).open(encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in csv.DictReader(file)]


def start(options: list[str], **variables: str) -> subprocess.Popen:
    """train.py in a process of its own, with one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} | variables
    command = [sys.executable, "train.py", *options]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_killed_run_goes_on_bit_for_bit(pairs, tmp_path, one_thread):
    def options(name: str) -> list[str]:
        run = ["--data", pairs, "--valid", pairs, "--steps", "200", "--batch-size", "4", "--save-every", "20"]
        return [*run, "--valid-every", "50", "--out", str(tmp_path / name), *SMALL]

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert train.main(options("whole")) == 0
    moment = random.randint(20, 100)
    with start(options("killed")) as process:
        while process.poll() is None and not (
            (killed / train.CHECKPOINT).exists() and len((killed / train.LOG).read_bytes().splitlines()) > moment
        ):
            time.sleep(0.002)
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGKILL
    (killed / f".{train.CHECKPOINT}.1.tmp").write_text("what a kill in the middle of writing leaves")
    assert 20 <= training.read_state(killed / train.CHECKPOINT)["step"] < 200
    assert train.main([*options("killed"), "--resume"]) == 0
    assert log_of(killed) == log_of(whole)
    for name in (train.CHECKPOINT, "model.safetensors"):
        ours, expected = load_file(killed / name), load_file(whole / name)
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[key], expected[key]) for key in ours)
    assert sorted(p.name for p in killed.iterdir()) == sorted(p.name for p in whole.iterdir())


def test_two_processes_have_the_losses_of_one(pairs, tmp_path):
    def options(name: str) -> list[str]:
        run = ["--data", pairs, "--valid", pairs, "--steps", "20", "--batch-size", "7", "--lr", "3e-3"]
        return [*run, "--accumulate", "2", "--out", str(tmp_path / name), *SMALL]

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # as torchrun sets them
    processes = [start(options("two"), RANK=rank, LOCAL_RANK=rank, **shared) for rank in "01"]
    assert train.main(options("one")) == 0
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
    one, two = log_of(tmp_path / "one"), log_of(tmp_path / "two")
    assert len(one) == len(two) == 20
    for a, b in zip(one, two, strict=True):
        assert (a["step"], a["tokens"], a["lr"]) == (b["step"], b["tokens"], b["lr"])
        assert abs(float(a["loss"]) - float(b["loss"])) < 1e-5
        assert (a["valid_loss"] == "") == (b["valid_loss"] == "")
        assert abs(float(a["valid_loss"] or 0) - float(b["valid_loss"] or 0)) < 1e-5
    ours, expected = (
        load_file(tmp_path / "two" / "model.safetensors"),
        load_file(tmp_path / "one" / "model.safetensors"),
    )
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


def test_a_full_disk_leaves_the_old_checkpoint(pairs, tmp_path, capfd, monkeypatch):
    run = ["--data", pairs, "--out", str(tmp_path / "out"), "--steps", "6", "--save-every", "2", *SMALL]
    save, limits = train.save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_a_full_disk(path, *rest):
        if path.exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a full disk: writing fails halfway
        save(path, *rest)

    monkeypatch.setattr(train, "save_checkpoint", save_on_a_full_disk)
    try:
        assert train.main(run) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    error = capfd.readouterr().err
    assert "the old file stays as it was" in error
    assert f"The last good checkpoint: {tmp_path / 'out' / train.CHECKPOINT} (step 2)" in error
    assert training.read_state(tmp_path / "out" / train.CHECKPOINT)["step"] == 2
    monkeypatch.setattr(train, "save_checkpoint", save)
    assert train.main([*run, "--resume"]) == 0
    assert training.read_state(tmp_path / "out" / train.CHECKPOINT)["step"] == 6


def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(pairs, tmp_path, capsys, monkeypatch):
    gradients = training.gradients
    calls = iter(range(100))
    monkeypatch.setattr(training, "gradients", lambda *a: gradients(*a) if next(calls) < 5 else float("nan"))
    assert train.main(["--data", pairs, "--out", str(tmp_path), "--steps", "9", "--save-every", "2", *SMALL]) == 1
    error = capsys.readouterr().err
    assert "step 6 has a loss of nan" in error
    assert f"The last good checkpoint: {tmp_path / train.CHECKPOINT} (step 4)" in error
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(("family", "attention"), [("gpt2", "causal"), ("llama", "prefix")])
def test_a_model_from_scratch_learns_and_writes_what_it_was_shown(pairs, tmp_path, capsys, family, attention):
    shape = ["--family", family, "--attention", attention, "--layers", "2", "--heads", "4", "--hidden", "48"]
    if family == "llama":
        shape += ["--kv-heads", "2"]
    rest = ["--positions", "64", "--tokenizer", "characters", "--batch-size", "8", "--lr", "1e-2"]
    assert train.main(["--data", pairs, "--valid", pairs, "--out", str(tmp_path), "--steps", "120", *shape, *rest]) == 0
    errors = capsys.readouterr().err
    assert "tokens/s" in errors
    decode = ["--model", str(tmp_path), "--decoder", "greedy", "--max-new-tokens", "20"]
    for name, home in HOMES.items():
        prompt = f"Where does {name} live? Say it."
        assert generate.main([*decode, "--prompt", prompt]) == 0
        assert capsys.readouterr().out == f" In {home}.\n"
    assert (tmp_path / train.CURVE).read_bytes().startswith(b"\x89PNG")
    rows = log_of(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 121))
    assert sum(row["valid_loss"] != "" for row in rows) == 10


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_transformers_loads_the_folder(tmp_path, family):
    data = tmp_path / "text.txt"
    data.write_text(
        "The capital of Mongolia is Ulaanbaatar, which lies on the river Tuul. 日本\n" * 8, encoding="utf-8"
    )
    sizes = ["--layers", "2", "--heads", "4", "--hidden", "32", "--positions", "32", "--vocab-size", "300"]
    out = tmp_path / "out"
    assert train.main(["--data", str(data), "--out", str(out), "--steps", "5", "--family", family, *sizes]) == 0
    model, tokenizer = load(out)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    their_tokenizer = AutoTokenizer.from_pretrained(out)
    text = "On the river 日本 [SEP"
    ids = tokenizer.encode(text)
    assert their_tokenizer(text, add_special_tokens=False)["input_ids"] == ids
    assert their_tokenizer.eos_token_id == tokenizer.eos_ids[0] == theirs.config.eos_token_id
    tokens = torch.tensor([ids])
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-5)


def test_a_model_is_trained_further_in_its_chat_template(pairs, tmp_path, capsys):
    init, out = write_folder(tmp_path / "init", TEMPLATE), tmp_path / "out"
    (init / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    run = ["--data", pairs, "--init", str(init), "--out", str(out), "--steps", "60", "--lr", "1e-2"]
    assert train.main([*run, "--batch-size", "12"]) == 0
    model, tokenizer = load(out)
    assert model.config == load(init)[0].config
    assert tokenizer.template == TEMPLATE
    for name, home in HOMES.items():
        prompt = tokenizer.prompt(f"Where does {name} live?", chat=True)
        row = continue_prompt(model, prompt, Vanilla(), greedy, max_new_tokens=20)
        assert (tokenizer.decode(row.tokens), row.stop) == (f" In {home}.", "eos")
    torch.testing.assert_close(  # the folder has what was trained
        AutoModelForCausalLM.from_pretrained(out)(torch.tensor([prompt])).logits,
        model(torch.tensor([prompt])),
        atol=1e-4,
        rtol=1e-4,
    )
    assert train.main([*run[:4], "--out", str(init), "--steps", "1"]) == 1
    assert "the same folder" in capsys.readouterr().err


def test_a_dry_run_prints_and_writes_nothing(pairs, tmp_path, capsys):
    out = tmp_path / "out"
    assert (
        train.main(["--data", pairs, "--out", str(out), "--steps", "30", "--batch-size", "4", "--dry-run", *SMALL]) == 0
    )
    printed = capsys.readouterr().out
    model = 16 * (256 + 2 + len(set("".join(HOMES) + "".join(HOMES.values()) + "Where does live? Say it. In .")))
    model += 16 + 2 * 16 + 16 * 48 + 16 * 16 + 3 * 16 * 64  # norms, attention, MLP
    assert f"parameters  {model:,}" in printed
    assert "12 examples" in printed
    assert "30 of 4 rows, 10.00 epochs" in printed
    assert not out.exists()


def test_the_curve_is_left_out_without_matplotlib(pairs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert train.main(["--data", pairs, "--out", str(tmp_path), "--steps", "1", *SMALL]) == 0
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / train.CURVE).exists()


def test_bad_usage_is_refused(pairs, tmp_path, capsys):
    def error(*args: str, code: int = 1) -> str:
        try:
            found = train.main(["--out", str(tmp_path / "out"), *args])
        except SystemExit as stop:
            found = stop.code
        assert found == code
        return capsys.readouterr().err

    run = ["--data", pairs, "--steps", "2", *SMALL]
    assert "no such file" in error("--data", "nowhere.txt", "--steps", "2", code=2)
    assert "expected 1 or more" in error("--data", pairs, "--steps", "0", code=2)
    if not torch.cuda.is_available():
        assert "no CUDA device" in error("--data", pairs, "--steps", "2", "--device", "cuda", code=2)
    assert "is no folder here" in error("--data", pairs, "--steps", "2", "--init", "nothing")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n')
    assert f"{bad}:1: expected a JSON object" in error("--data", str(bad), "--steps", "2")
    text = tmp_path / "text.txt"
    text.write_text("text")
    assert "prefix attention needs prompts" in error(*run[2:], "--data", str(text), "--attention", "prefix")
    assert "holds the model" in error(*run, code=0)
    assert "--resume goes on from it" in error(*run)
    assert "lr was 0.001 and is 0.1" in error(*run, "--resume", "--lr", "0.1")
    (tmp_path / "out" / train.CHECKPOINT).write_text("broken")
    assert "is no checkpoint" in error(*run, "--resume")


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(pairs, tmp_path, capsys):
    assert train.main(["--data", pairs, "--out", str(tmp_path / "out"), "--steps", "1", "--device", "foo", *SMALL]) == 1
    assert "--device foo: torch cannot use it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_with_a_model_is_left_alone(pairs, tmp_path, capsys):
    out = write_folder(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert train.main(["--data", pairs, "--out", str(out), "--steps", "1", *SMALL]) == 1
    assert "choose another --out" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_model_that_was_trained_without_its_template_has_none(pairs, tmp_path):
    init, out = write_folder(tmp_path / "init", TEMPLATE), tmp_path / "out"
    assert train.main(["--data", pairs, "--init", str(init), "--out", str(out), "--steps", "1", "--no-chat"]) == 0
    tokenizer = load(out)[1]
    assert tokenizer.template is None
    assert tokenizer.prompt("Hi") == tokenizer.encode("Hi")
