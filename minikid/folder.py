"""The tensors of an HF-layout folder, one file or shards with an index, and their names in both families.

Tensors are read one at a time, each through its own short-lived mapping of the file, so that a model is never in memory
twice.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from minikid.config import Config, read_json
from minikid.files import replacing

Source = tuple[str, list[str], bool]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def usable(device: str | torch.device) -> torch.device:
    """The device of that name. ValueError where this machine, or this build of torch, has none."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # no such kind; torch was built without it
        reason = str(error).split("\n")[0]
        raise ValueError(f"--device {device}: torch cannot use it ({reason}); expected cpu, cuda, ...") from None


def tensor_shapes(folder: str | Path) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """Name -> (file, shape) of every tensor in the folder.

    ValueError names a file that is missing, cut short or no safetensors file.
    """
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


def _header(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ValueError(f"{path} ({size:,} bytes) is no whole safetensors file: {error}; fetch it again") from None


def parameter_sources(config: Config) -> Iterator[Source]:
    """(our parameter, the HF tensors that are stacked to make it, whether these are stored transposed)."""
    gpt2 = config.family == "gpt2"

    def affine(ours: str, theirs: list[str], bias: bool, transposed: bool = False) -> Iterator[Source]:
        yield f"{ours}.weight", [f"{name}.weight" for name in theirs], transposed
        if bias:
            yield f"{ours}.bias", [f"{name}.bias" for name in theirs], False

    yield "embed.weight", ["wte.weight" if gpt2 else "model.embed_tokens.weight"], False
    if gpt2:
        yield "positions.weight", ["wpe.weight"], False
    for i in range(config.num_layers):
        ours = f"blocks.{i}"
        if gpt2:  # its Conv1D keeps weights as [in, out]
            yield from affine(f"{ours}.attention_norm", [f"h.{i}.ln_1"], bias=True)
            yield from affine(f"{ours}.attention.qkv", [f"h.{i}.attn.c_attn"], True, transposed=True)
            yield from affine(f"{ours}.attention.out", [f"h.{i}.attn.c_proj"], True, transposed=True)
            yield from affine(f"{ours}.mlp_norm", [f"h.{i}.ln_2"], bias=True)
            yield from affine(f"{ours}.mlp.up", [f"h.{i}.mlp.c_fc"], True, transposed=True)
            yield from affine(f"{ours}.mlp.down", [f"h.{i}.mlp.c_proj"], True, transposed=True)
        else:
            layer = f"model.layers.{i}"
            qkv = [f"{layer}.self_attn.{name}_proj" for name in "qkv"]
            yield from affine(f"{ours}.attention_norm", [f"{layer}.input_layernorm"], bias=False)
            yield from affine(f"{ours}.attention.qkv", qkv, config.attention_bias)
            yield from affine(f"{ours}.attention.out", [f"{layer}.self_attn.o_proj"], config.attention_bias)
            yield from affine(f"{ours}.mlp_norm", [f"{layer}.post_attention_layernorm"], bias=False)
            yield from affine(f"{ours}.mlp.up", [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], config.mlp_bias)
            yield from affine(f"{ours}.mlp.down", [f"{layer}.mlp.down_proj"], config.mlp_bias)
    yield from affine("norm", ["ln_f" if gpt2 else "model.norm"], bias=gpt2)
    if not config.tied:
        yield "head.weight", ["lm_head.weight"], False


def read_parameters(
    folder: str | Path, config: Config, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Our parameters one by one, given the shapes that the model expects; stored as float32, float16 or bfloat16.

    ValueError names every missing, unexpected and mis-shaped tensor at once, before the first is read.
    """
    stored = _without_noise(tensor_shapes(folder), config)
    sources = list(parameter_sources(config))
    _check(stored, sources, shapes, folder)
    for name, parts, transposed in sources:
        tensors = [_read(stored[part][0], stored[part][2], dtype) for part in parts]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        yield name, tensor.t().contiguous() if transposed else tensor


def hf_tensors(config: Config, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our parameters, or their gradients, by their HF names and in HF's layout: `parameter_sources` the other way."""
    tensors = {}
    for name, parts, transposed in parameter_sources(config):
        tensor = parameters[name].detach()
        rows = [len(tensor)]
        if len(parts) == 3:
            rows = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
        elif len(parts) == 2:
            rows = [config.intermediate_size] * 2
        for part, block in zip(parts, tensor.split(rows), strict=True):
            prefix = "transformer." if config.family == "gpt2" and part != "lm_head.weight" else ""
            tensors[prefix + part] = block.t() if transposed else block
    return tensors


def write_parameters(path: Path, config: Config, parameters: Mapping[str, torch.Tensor]) -> None:
    """Write our parameters as an HF-layout folder's one file of tensors, in one step."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in hf_tensors(config, parameters).items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, {"format": "pt"})


def _read(path: Path, name: str, dtype: torch.dtype) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name).to(dtype, copy=True)


def _without_noise(
    found: Mapping[str, tuple[Path, tuple[int, ...]]], config: Config
) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """Canonical name -> (file, shape, name in the file), less what a checkpoint may carry beside its parameters."""
    kept = {}
    for name, (path, shape) in found.items():
        plain = name.removeprefix("transformer.") if config.family == "gpt2" else name
        # masks and rotation tables are computed here, a tied head is the embedding
        buffer = plain.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))
        if not buffer and not (config.tied and plain == "lm_head.weight"):
            kept[plain] = (path, shape, name)
    return kept


def _check(
    stored: Mapping[str, tuple[Path, tuple[int, ...], str]],
    sources: list[Source],
    shapes: Mapping[str, tuple[int, ...]],
    folder: str | Path,
) -> None:
    wanted = {part for _, parts, _ in sources for part in parts}
    problems = [
        f"{kind}: {', '.join(sorted(names))}"
        for kind, names in (("missing", wanted - stored.keys()), ("unexpected", stored.keys() - wanted))
        if names
    ]
    wrong = []
    for name, parts, transposed in sources:
        if all(part in stored for part in parts):
            found = [stored[part][1][::-1] if transposed else stored[part][1] for part in parts]
            stacked = (sum(shape[0] for shape in found), *found[0][1:])
            if stacked != shapes[name] or len({shape[1:] for shape in found}) > 1:
                wrong.append(f"{' + '.join(parts)}: expected {list(shapes[name])}, got {[list(s) for s in found]}")
    if wrong:
        problems.append("wrong shape: " + "; ".join(wrong))
    if problems:
        raise ValueError(f"{folder}: the tensors do not fit config.json; {'; '.join(problems)}")
