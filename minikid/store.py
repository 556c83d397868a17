"""The folder of a saved TokenTrie: one file for each array, and a header in JSON that names and describes them.

The arrays of each save go to files with a new number; replacing the header, in one step, makes them the trie. So a save
that is killed, or fails on a full disk, leaves the old trie, and processes that have it open keep reading it.
"""

import json
import mmap
import os
from pathlib import Path

import numpy as np

HEADER = "trie.json"
FORMAT = {"format": "minikid TokenTrie", "version": 1}
TYPES = {  # of each array the types that it may have
    **{"codes": ("<u2", "<u4"), "ends": ("<i4",), "forks": ("<i4",), "rows": ("<i4",)},
    **{"branches": ("<u2", "<u4"), "children": ("<i4",), "offsets": ("<u4", "<u8"), "values": ("|u1",)},
}
WITHOUT_VALUES = set(TYPES) - {"offsets", "values"}


def save_arrays(
    folder: str | Path, arrays: dict[str, np.ndarray], vocabulary: int, tokenizer: str | None = None
) -> None:
    """Write a trie to a folder, in place of the one that is there; one writer at a time.

    `tokenizer` is the digest of the one that made the tokens, if it is known. ValueError for a folder that holds
    anything but a trie.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    generation = 1
    if (folder / HEADER).exists():
        generation += _read_header(folder)["generation"]
    elif strangers := [p.name for p in folder.iterdir() if not p.name.endswith(".trie")]:
        raise ValueError(f"expected a trie or an empty folder, but {folder} has {strangers[0]}: choose another one")
    entries = {
        name: {"file": f"{name}.{generation}.trie", "type": a.dtype.str, "length": len(a)} for name, a in arrays.items()
    }
    header = {**FORMAT, "generation": generation, "vocabulary": vocabulary, "tokenizer": tokenizer, "arrays": entries}
    temporary = folder / f"{HEADER}.trie"
    try:
        for name, a in arrays.items():
            _write(folder / entries[name]["file"], a)
        _write(temporary, np.frombuffer(json.dumps(header, indent=1).encode(), np.uint8))
        os.replace(temporary, folder / HEADER)
    finally:  # whatever happened: the header on disk says what stays; this also clears what a killed build left
        kept = _read_header(folder)["arrays"] if (folder / HEADER).exists() else {}
        files = {entry["file"] for entry in kept.values()}
        for path in folder.glob("*.trie"):
            if path.name not in files:
                path.unlink()


def open_arrays(folder: str | Path, tokenizer: str | None = None) -> tuple[dict[str, np.ndarray], int]:
    """The arrays as memory maps, and the vocabulary.

    ValueError unless all files are as the header says, and where it names another tokenizer than the one that is given.
    """
    folder = Path(folder)
    header = _read_header(folder)
    if tokenizer and header.get("tokenizer") and header["tokenizer"] != tokenizer:
        raise ValueError(
            f"{folder}: this trie was built with another tokenizer ({header['tokenizer']}, expected {tokenizer}); use "
            "the model that it was built for, or build it again in another folder"
        )
    arrays = {name: _map(folder / entry["file"], entry) for name, entry in header["arrays"].items()}
    return arrays, header["vocabulary"]


def _write(path: Path, a: np.ndarray) -> None:
    with path.open("wb") as file:
        a.tofile(file)
        file.flush()
        os.fsync(file.fileno())


def _read_header(folder: Path) -> dict:
    """The header of a trie's folder, checked in every field that is used."""
    path = folder / HEADER
    if not path.is_file():
        raise ValueError(f"expected a folder with {HEADER}, as TokenTrie.save writes it, but {folder} has none")
    advice = "remove the folder and build the trie again"
    try:
        header = json.loads(path.read_bytes())
        found = {key: header[key] for key in FORMAT}
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the header of a trie ({error!r}): {advice}") from error
    if found != FORMAT:
        raise ValueError(f"expected {FORMAT}, but {path} says {found}: {advice}")
    try:
        arrays = header["arrays"]
        whole = all(isinstance(header[key], int) and header[key] > 0 for key in ("generation", "vocabulary"))
        whole &= set(arrays) in (set(TYPES), WITHOUT_VALUES)
        for name, entry in arrays.items():
            whole &= entry["file"] == f"{name}.{header['generation']}.trie" and isinstance(entry["length"], int)
            whole &= entry["type"] in TYPES[name]
        length = {name: entry["length"] for name, entry in arrays.items()}
        whole &= length["rows"] == length["forks"] + 1 and length["branches"] == length["children"]
        whole &= length.get("offsets", length["ends"] + 1) == length["ends"] + 1
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"{path} is damaged: restore it, or {advice}")
    return header


def _map(path: Path, entry: dict) -> np.ndarray:
    """One array of a trie as a memory map, private and copied on write: the file itself is never written to."""
    dtype = np.dtype(entry["type"])
    expected, size = entry["length"] * dtype.itemsize, path.stat().st_size if path.is_file() else -1
    if size != expected:
        came = "it is missing" if size < 0 else f"it has {size}"
        raise ValueError(f"expected {path} with {expected} bytes, but {came}: restore the file or build the trie again")
    if not expected:
        return np.empty(0, dtype)
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for advice in ("MADV_RANDOM", "MADV_NOHUGEPAGE"):  # a walk needs single pages, not their neighbours
        if hasattr(mmap, advice):
            memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, dtype)
