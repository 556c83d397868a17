"""A GPT-2 / Llama decoder from scratch, with an explicit key-value cache, and the reading of checkpoints.

    B batch · T new tokens · S tokens in the cache, new ones included · V vocabulary · D hidden size
    H query heads · K key-value heads · G = H / K queries per key-value head · C head dimension

The cache is a value that the caller owns. Its slots are filled in order and a token's position is its slot (less the
row's padding in a ragged batch), so that prefill, chunks and single tokens give the same logits, and cutting the cache
back is exactly undoing.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from minikid import weights
from minikid.config import Config, Rope
from minikid.folder import read_parameters, usable
from minikid.pack import pack
from minikid.tokenizer import Tokenizer
from minikid.working_memory import Unit, WorkingMemory

__all__ = ["GPT", "Cache", "Config", "Tokenizer", "load"]


class Cache:
    """Keys and values of the tokens read so far.

    `length` counts slots; `start[b]`, where given, is row b's first used slot.
    Buffers grow by doubling and are written in place, except while gradients are recorded: then each append makes a new
    tensor.
    """

    def __init__(self, config: Config, batch: int, device: torch.device, dtype: torch.dtype):
        empty = torch.empty(batch, config.num_kv_heads, 0, config.head_dim, device=device, dtype=dtype)
        self.keys: list[Tensor] = [empty] * config.num_layers  # each [B, K, capacity, C]
        self.values: list[Tensor] = [empty] * config.num_layers
        self.length = 0
        self.start: Tensor | None = None  # [B]; None: no row is padded
        self.front: list[Unit] = []  # what a working memory wrote into the first slots

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write T new keys and values behind `length` and return all of them.

        The caller moves `length` once every layer has written.
        """
        # [B, K, T, C], [B, K, T, C] -> [B, K, S, C], [B, K, S, C]
        end = self.length + k.shape[2]
        stored = []
        for buffers, new in ((self.keys, k), (self.values, v)):
            buffer = buffers[layer]
            if torch.is_grad_enabled():
                buffer = torch.cat([buffer[:, :, : self.length], new], dim=2)
            else:
                if buffer.shape[2] < end:
                    grown = new.new_empty(*buffer.shape[:2], max(64, 2 * end), buffer.shape[3])
                    grown[:, :, : self.length] = buffer[:, :, : self.length]
                    buffer = grown
                buffer[:, :, self.length : end] = new
            buffers[layer] = buffer
            stored.append(buffer[:, :, :end])
        return stored[0], stored[1]

    def truncate(self, length: int) -> None:
        """Forget every token behind the first `length`, as if it had never been read.

        ValueError when there are fewer.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"expected a length from 0 to {self.length} (what the cache holds), got {length}")
        self.length = length

    def select(self, rows: Sequence[int] | Tensor) -> "Cache":
        """A new cache of the given rows, in that order: surviving beams, unfinished samples, copies."""
        return self._map(lambda buffer: buffer[rows], None if self.start is None else self.start[rows])

    def reorder(self, rows: Sequence[int], since: int) -> None:
        """Row b goes on as row `rows[b]`, in place: `select` for as many rows, where b and `rows[b]` hold the same
        before the slot `since`. Beams copy what they generated, and leave the prompt, which they share, where it is.
        """
        for buffer in (*self.keys, *self.values):
            buffer[:, :, since : self.length] = buffer[rows, :, since : self.length]

    def expand(self, batch: int) -> "Cache":
        """A new cache in which the one row stands `batch` times: N samples that share a prompt read it once."""
        if self.batch != 1:
            raise ValueError(f"expected a cache of one row, got {self.batch}; choose rows with select()")
        return self.select([0] * batch)

    @staticmethod
    def stack(caches: Sequence["Cache"]) -> "Cache":
        """A ragged batch: the rows end at the same slot, shorter ones begin later (`start`), and no position moves."""
        if any(cache.front != caches[0].front for cache in caches):
            raise ValueError("expected caches that begin with the same working memory")
        length = max(cache.length for cache in caches)
        pads = [length - cache.length for cache in caches for _ in range(cache.batch)]
        merged = caches[0]._map(lambda buffer: buffer, None)
        for layer in range(len(merged.keys)):
            for name in ("keys", "values"):
                rows = [F.pad(getattr(c, name)[layer][:, :, : c.length], (0, 0, length - c.length, 0)) for c in caches]
                getattr(merged, name)[layer] = torch.cat(rows)
        merged.length = length
        starts = [c.start if c.start is not None else torch.zeros(c.batch, dtype=torch.long) for c in caches]
        merged.start = torch.cat([s.cpu() for s in starts]).add(torch.tensor(pads)).to(merged.keys[0].device)
        return merged

    def _map(self, change, start: Tensor | None) -> "Cache":
        new = object.__new__(Cache)
        new.keys = [change(buffer[:, :, : self.length]) for buffer in self.keys]
        new.values = [change(buffer[:, :, : self.length]) for buffer in self.values]
        new.length, new.start, new.front = self.length, start, self.front
        return new


class RMSNorm(nn.Module):
    """Llama's norm, taken in float32 whatever the dtype, as in the programs that the checkpoints were trained with."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # [..., D] -> [..., D]
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def rope_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each rotated pair, float32 (as the checkpoints' own programs compute them)."""
    # -> [C / 2]
    frequency = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return frequency / rope.factor
    if rope.kind == "llama3":
        # by turns within the original context: few are stretched in full, many left alone, between them a linear blend
        turns = rope.original_positions * frequency / (2 * torch.pi)
        keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
        return (1 - keep) * frequency / rope.factor + keep * frequency
    return frequency


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the rotate-half order: pair i is (x[i], x[i + C/2]), where the original paper has (x[2i], x[2i + 1]).

    The halves of `cos` are equal, those of `sin` are (-sin, sin).
    """
    # [B, heads, T, C], [B or 1, 1, T, C] x 2 -> [B, heads, T, C]
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = nn.Linear(
            config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.attention_bias
        )
        self.out = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=config.attention_bias)

    def forward(
        self,
        x: Tensor,
        layer: int,
        cache: Cache | None,
        rotation: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        causal: bool,
    ) -> Tensor:
        # [B, T, D] -> [B, T, D]
        B, T, _ = x.shape
        heads = self.qkv(x).view(B, T, -1, self.head_dim).transpose(1, 2)  # [B, H + 2K, T, C]
        qk, v = heads.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        if rotation is not None:
            qk = rotate(qk, *rotation)
        q, k = qk.split([self.heads, self.kv_heads], dim=1)
        if cache is not None:
            k, v = cache.append(layer, k, v)
        if causal:  # the fast form, without a mask
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads < self.heads)
        else:
            # the G queries of a key-value head attend as if they were G * T positions: nothing is repeated in memory
            q = q.reshape(B, self.kv_heads, -1, self.head_dim)  # [B, K, G * T, C]
            if mask is not None and q.shape[2] > T > 1:
                mask = mask.repeat(1, 1, q.shape[2] // T, 1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = y.view(B, self.heads, T, self.head_dim).transpose(1, 2).reshape(B, T, -1)
        return self.out(y)


class MLP(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gated, self.activation = config.gated, config.activation
        width = config.intermediate_size
        self.up = nn.Linear(config.hidden_size, 2 * width if self.gated else width, bias=config.mlp_bias)
        self.down = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        # [B, T, D] -> [B, T, D]
        if self.gated:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.activation == "gelu_tanh" else "none"))


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor, *context) -> Tensor:
        # [B, T, D] -> [B, T, D]
        x = x + self.attention(self.attention_norm(x), *context)
        return x + self.mlp(self.mlp_norm(x))


def _norm(config: Config) -> nn.Module:
    if config.family == "gpt2":
        return nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
    return RMSNorm(config.hidden_size, config.norm_eps)


class GPT(nn.Module):
    """A decoder-only language model: token ids in, next-token logits out."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = None if config.rope else nn.Embedding(config.max_positions, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What activations and the cache are kept in (packed bfloat16 weights still compute in float32 on a CPU)."""
        return self.norm.weight.dtype

    def new_cache(self, batch: int = 1) -> Cache:
        """An empty cache for `batch` sequences."""
        return Cache(self.config, batch, self.device, self.dtype)

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        memory: WorkingMemory | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:
        """Logits of every position; with a cache, `tokens` continue what it holds and are added to it.

        With `config.attention` "prefix", the tokens of a prompt see each other in both directions. The prompt is what
        the first call on an empty cache reads; without a cache, the first `prefix[b]` tokens of row b (none: 0).
        With a memory, which a cache then keeps from its first token to its last, they have its passages in view
        (working_memory.py). ValueError when the sequence would outgrow `config.max_positions`; no token is read then.
        """
        # [B, T], [B] -> [B, T, V]
        return self.head(self.hidden(tokens, cache, memory, prefix))

    def hidden(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        memory: WorkingMemory | None = None,
        prefix: Tensor | None = None,
    ) -> Tensor:
        """The last layer's normalised states; `head` makes logits of those positions that are wanted."""
        # [B, T], [B] -> [B, T, D]
        if memory is not None:
            if self.config.attention == "prefix":
                raise ValueError(
                    "a working memory stands before the context, which a model with prefix attention lacks"
                )
            cache = self.new_cache(len(tokens)) if cache is None else cache
            memory.write(cache)
        elif cache is not None and cache.length and cache.front:
            raise ValueError("the cache began with a working memory; pass that memory too")
        shift = 0 if memory is None else memory.shift
        T, past = tokens.shape[1], cache.length if cache is not None else 0
        start = cache.start if cache is not None else None
        if past + shift + T > self.config.max_positions:
            raise ValueError(
                f"{past + shift} tokens are read and {T} more were given, but this model has "
                f"{self.config.max_positions} positions; shorten the prompt or ask for fewer new tokens"
            )
        slots = torch.arange(past, past + T, device=self.device)  # [T]
        position = slots[None] + shift  # [1 or B, T]
        if start is not None:
            position = (position - start[:, None]).clamp_min(0)
        x = self.embed(tokens).to(self.dtype)
        rotation = None
        if self.config.rope is None:
            x = x + self.positions(position).to(self.dtype)
        else:
            frequency = rope_frequencies(self.config.rope, self.config.head_dim).to(self.device)
            angles = position[:, None, :, None].float() * frequency  # [1 or B, 1, T, C/2]
            cos, sin = torch.cat([angles, angles], dim=-1).cos(), torch.cat([-angles, angles], dim=-1).sin()
            rotation = cos.to(self.dtype), sin.to(self.dtype)
        both_ways = self.config.attention == "prefix" and past == 0
        whole = both_ways and cache is not None  # a prompt and nothing else: all see all
        prefix = prefix if both_ways and cache is None else None
        causal = past == 0 and T > 1 and start is None and prefix is None and not whole
        mask = None if whole or causal else _mask(slots, start, prefix)
        if memory is not None and memory.slots:
            mask = _biased(mask, memory.bias, past + T, start)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, cache, rotation, mask, causal)
        if cache is not None:
            cache.length += T
        return self.norm(x)


def _mask(slots: Tensor, start: Tensor | None, prefix: Tensor | None) -> Tensor | None:
    """True where a query may look: at its own slot, earlier ones and its row's prefix, not into its row's padding.
    None: everywhere.
    """
    # [T], [B], [B] -> [1 or B, 1, T, S]
    if len(slots) == 1 and start is None:
        return None
    seen = torch.arange(int(slots[-1]) + 1, device=slots.device)
    mask = (seen[None, :] <= slots[:, None])[None, None]
    if prefix is not None:
        mask = mask | (seen < prefix[:, None])[:, None, None]
    return mask if start is None else mask & (seen >= start[:, None])[:, None, None]


def _biased(mask: Tensor | None, bias: Tensor, S: int, start: Tensor | None) -> Tensor:
    """The mask as what is added to the logits, with a memory's bias on the first slots of every row."""
    # [1 or B, 1, T, S], [M], [B] -> [1 or B, 1, T or 1, S]
    place = torch.arange(S, device=bias.device)
    if start is not None:
        place = (place - start[:, None]).clamp_min(0)
    bias = F.pad(bias, (0, S - len(bias)))[place].view(-1, 1, 1, S)
    return bias if mask is None else torch.where(mask, bias, -torch.inf)


def load(
    name_or_dir: str | Path = weights.DEFAULT, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[GPT, Tokenizer]:
    """A model and its tokenizer, ready to decode: evaluation mode, no gradients to the weights, on a CPU packed for
    speed (pack.py).

    `name_or_dir` is whatever `weights.resolve` takes. ValueError names every missing, unexpected and mis-shaped tensor
    at once.
    """
    folder = weights.resolve(name_or_dir)
    tokenizer = Tokenizer.from_folder(folder)
    model = load_weights(folder, device, dtype)
    return (pack(model) if torch.device(device).type == "cpu" else model).eval().requires_grad_(False), tokenizer


class _NoInit(TorchFunctionMode):
    """Leaves new embeddings as they are: `normal_` on the device "meta" imports torch's compiler, a second's work."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return None if func is nn.init.normal_ else func(*args, **(kwargs or {}))


def load_weights(folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32) -> GPT:
    """The model of an HF-layout folder in plain `nn.Linear` layers, trainable."""
    config, device = Config.from_folder(folder), usable(device)
    with torch.device("meta"), _NoInit():
        model = GPT(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, tensor in read_parameters(folder, config, shapes, dtype):
        owner, leaf = name.rsplit(".", 1)
        setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor.to(device)))
    if config.tied:
        model.head.weight = model.embed.weight
    return model
