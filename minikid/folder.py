"""The tensors of an HF-layout folder: one `model.safetensors`, or shards with an index.

Tensors are read one at a time, each through its own short-lived mapping of the file, so that a model is never in memory twice.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from minikid.config import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def tensor_shapes(folder: str | Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Name -> (file, shape) of every tensor in the folder. ValueError names a file that is missing, cut short or no safetensors file."""
    folder = Path(folder)
    if (folder / INDEX).exists():
        weight_map: Mapping[str, str] = read_json(folder / INDEX).get("weight_map", {})
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            raise ValueError(
                f"{folder}: the index names shards that are not there: {', '.join(missing)}; fetch the folder again"
            )
    elif (folder / SINGLE).exists():
        files = [folder / SINGLE]
    else:
        raise ValueError(
            f"{folder}: expected {SINGLE} or {INDEX}, found neither; pickled weights (.bin, .pt) are not read"
        )
    return {name: (path, shape) for path in files for name, shape in _header(path).items()}


def read_tensor(path: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    """One tensor, copied out of the file in the wanted dtype (stored as float32, float16 or bfloat16)."""
    with safe_open(path, framework="pt") as file:
        tensor = file.get_tensor(name)
        return tensor.to(dtype, copy=True)


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} ({size:,} bytes) is no whole safetensors file: {error}; fetch it again") from None
