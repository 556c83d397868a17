"""A BERT encoder from scratch, and the sentence and passage vectors read off it.

Devlin et al. 2018 (post-layer-norm, learned absolute positions, token types); DPR (Karpukhin et al. 2020) takes the
first token's vector, Sentence-BERT (Reimers and Gurevych 2019) the mean over the tokens, often scaled to length 1.

Letters:  B texts in a batch, T tokens, D width, H heads, N texts in all
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from tqdm import tqdm

from minikid import weights
from minikid.config import read_json
from minikid.folder import tensor_shapes, usable

ACTIVATIONS = {
    "gelu": F.gelu,  # the exact, erf form; GPT-2's tanh form has names of its own
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
BLOCK = 4096  # texts that are tokenised and sorted by length at a time, so that memory stays bounded


@dataclass(frozen=True)
class BertConfig:
    """Sizes and constants of a BERT trunk, under the names of config.json."""

    vocab_size: int
    hidden_size: int  # D
    num_hidden_layers: int
    num_attention_heads: int  # H
    intermediate_size: int
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_act: str = "gelu"


class Layer(nn.Module):
    """One encoder layer: attention over the whole text, then a two-layer perceptron; the norm comes after each sum."""

    def __init__(self, config: BertConfig):
        super().__init__()
        D = config.hidden_size
        self.heads = config.num_attention_heads
        self.activation = ACTIVATIONS[config.hidden_act]
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.attention_norm = nn.LayerNorm(D, eps=config.layer_norm_eps)
        self.up = nn.Linear(D, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, D)
        self.norm = nn.LayerNorm(D, eps=config.layer_norm_eps)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        # [B, T, D], [B, 1, 1, T] or None -> [B, T, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [B, H, T, D/H]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.out(mixed))
        return self.norm(x + self.down(self.activation(self.up(x))))


class Bert(nn.Module):
    """The trunk: token ids to one vector per token. Heads (pooling here, classification elsewhere) go on top."""

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.types = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))

    def forward(self, tokens: Tensor, mask: Tensor | None = None, types: Tensor | None = None) -> Tensor:
        """Vectors of every token; `mask` is True where there is a token (None: everywhere), `types` default to 0.

        Vectors at masked positions mean nothing. ValueError for a text longer than the position table.
        """
        # [B, T], [B, T], [B, T] -> [B, T, D]
        T, limit = tokens.shape[1], self.config.max_position_embeddings
        if limit < T:
            raise ValueError(f"expected at most {limit} tokens, came {T}; shorten the text or truncate it")
        types = torch.zeros_like(tokens) if types is None else types
        x = self.tokens(tokens) + self.types(types) + self.positions.weight[:T]
        x, mask = self.norm(x), None if mask is None else mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return x


class Encoder(nn.Module):
    """Texts to vectors: a trunk, its tokenizer, a way of pooling.

    Arguments:
        trunk, tokenizer: as `load_bert` gives them
        pooling: "cls", the first token's vector, or "mean" over the tokens
        normalise: scale vectors to length 1, so that inner products are cosines
        max_length: tokens per text, special ones included; the rest is cut off
        pairs: read (title, text) as two segments `[CLS] title [SEP] text [SEP]`, else as one text "title text"
        fingerprint: what tells this encoder from others; by default from the weights in memory
    """

    def __init__(
        self,
        trunk: Bert,
        tokenizer: Tokenizer,
        *,
        pooling: str = "mean",
        normalise: bool = True,
        max_length: int | None = None,
        pairs: bool = False,
        fingerprint: str | None = None,
    ):
        super().__init__()
        if pooling not in ("cls", "mean"):
            raise ValueError(f'expected pooling "cls" or "mean", came {pooling!r}')
        limit = trunk.config.max_position_embeddings
        self.trunk, self.pooling, self.normalise, self.pairs = trunk, pooling, normalise, pairs
        self.max_length = min(max_length or limit, limit)
        self.tokenizer = Tokenizer.from_str(tokenizer.to_str())  # its settings below are this encoder's own
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(self.max_length)
        self.tokenizer.encode_special_tokens = True  # "[SEP]" within a passage is plain text
        settings = [pooling, normalise, self.max_length, pairs, self.tokenizer.to_str()]
        self.fingerprint = _digest([json.dumps(settings), fingerprint or _digest_tensors(trunk.state_dict())])

    @property
    def dimension(self) -> int:
        return self.trunk.config.hidden_size

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        # [B, T], [B, T] -> [B, D]
        hidden = self.trunk(tokens, mask)
        if self.pooling == "cls":
            pooled = hidden[:, 0]
        elif mask is None:
            pooled = hidden.mean(1)
        else:
            pooled = (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(pooled, dim=-1) if self.normalise else pooled

    @torch.inference_mode()
    def encode(
        self, texts: Sequence[str | tuple[str, str]], batch_size: int = 32, progress: bool = False
    ) -> np.ndarray:
        """Vectors of texts, or of (title, text) pairs, in their order: contiguous float32 [N, D].

        Texts are batched by length, so that little is padded. DPR's pairs have token type 0 throughout, as its
        authors trained it (transformers' tokenizer would give the text type 1).
        """
        # N texts -> [N, D]
        if isinstance(texts, str):
            raise ValueError("expected a list of texts, came one string; wrap it in a list")
        if batch_size < 1:
            raise ValueError(f"expected a batch_size of at least 1, came {batch_size}")
        device = self.trunk.tokens.weight.device
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        bar = tqdm(total=len(texts), unit="text", desc="encoding", disable=not progress)
        for start in range(0, len(texts), BLOCK):
            block = [self._plain(text) for text in texts[start : start + BLOCK]]
            ids = [encoding.ids for encoding in self.tokenizer.encode_batch_fast(block)]
            order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
            for first in range(0, len(order), batch_size):
                rows = order[first : first + batch_size]
                longest = len(ids[rows[-1]])
                tokens = torch.tensor([ids[i] + [0] * (longest - len(ids[i])) for i in rows], device=device)
                mask = None  # texts of one length need none, and attention is faster without
                if len(ids[rows[0]]) != longest:
                    mask = torch.arange(longest) < torch.tensor([[len(ids[i])] for i in rows])
                    mask = mask.to(device)
                vectors[[start + i for i in rows]] = self(tokens, mask).float().cpu().numpy()
                bar.update(len(rows))
        bar.close()
        return vectors

    def _plain(self, text: str | tuple[str, str]) -> str | tuple[str, str]:
        if isinstance(text, str):
            return text
        title, body = text
        return (title, body) if self.pairs and title else f"{title} {body}".strip()


def load_encoder(
    name_or_dir: str | Path = weights.ENCODER, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Encoder:
    """An encoder from a folder in Hugging Face or sentence-transformers layout, or by a name that `weights` knows.

    modules.json and its pooling folder decide on pooling and normalisation. Without them DPR folders take the first
    token's vector as it is, other BERT folders the mean over the tokens scaled to length 1.
    ValueError where something that the folder asks for is not done here, and for weights that do not fit.
    """
    folder = trunk_folder = weights.resolve(name_or_dir)
    dpr = read_json(folder / "config.json").get("model_type") == "dpr"
    pooling, normalise, max_length = ("cls", False, None) if dpr else ("mean", True, None)
    if (folder / "modules.json").exists():
        normalise = False
        for module in json.loads((folder / "modules.json").read_text(encoding="utf-8")):
            kind, path = module["type"].rsplit(".", 1)[-1], folder / module["path"]
            if kind == "Transformer":
                trunk_folder = path
            elif kind == "Pooling":
                pooling = _read_pooling(path / "config.json")
            elif kind == "Normalize":
                normalise = True
            else:
                raise ValueError(f"{folder / 'modules.json'}: expected Transformer, Pooling, Normalize, came {kind}")
    if (trunk_folder / "sentence_bert_config.json").exists():
        max_length = read_json(trunk_folder / "sentence_bert_config.json").get("max_seq_length")
    trunk, tokenizer, _, digest = load_bert(trunk_folder)
    settings = {"pooling": pooling, "normalise": normalise, "max_length": max_length, "pairs": dpr}
    encoder = Encoder(trunk, tokenizer, **settings, fingerprint=digest)
    return encoder.to(device=usable(device), dtype=dtype).eval().requires_grad_(False)


def load_bert(folder: str | Path) -> tuple[Bert, Tokenizer, dict[str, Tensor], str]:
    """Trunk in float32, tokenizer, the tensors that belong to heads (under their names in the file), a digest of all.

    Names may have the prefix of BertModel ("bert.") or of DPR's two encoders, or none. One ValueError names every
    tensor that is missing, unexpected or of the wrong shape.
    """
    folder = Path(folder)
    trunk = Bert(_read_config(folder / "config.json"))
    tensors = _read_tensors(folder)
    digest = _digest_tensors(tensors)
    tensors = {_plain_name(name): tensor for name, tensor in tensors.items()}
    loaded, faults = {}, []
    for name, parameter in trunk.state_dict().items():
        parts = []
        for source in _sources(name):
            part = tensors.pop(source, None)
            shape = (parameter.shape[0] // len(_sources(name)), *parameter.shape[1:])
            if part is None:
                faults.append(f"missing {source}")
            elif part.shape != shape:
                faults.append(f"{source} is {tuple(part.shape)}, expected {shape}")
            else:
                parts.append(part.to(torch.float32))
        loaded[name] = torch.cat(parts) if parts else None
    heads = {name: tensors.pop(name) for name in list(tensors) if name.startswith(HEADS)}
    faults += [f"unexpected {name}" for name in tensors if not name.endswith("embeddings.position_ids")]
    if faults:
        raise ValueError(f"{folder}: weights do not fit config.json: " + "; ".join(faults))
    trunk.load_state_dict(loaded)
    return trunk, _read_tokenizer(folder), heads, digest


# Where each of our modules stands in a Hugging Face file; three of theirs make up our qkv.
EMBEDDING_SOURCES = {
    "tokens": ["word_embeddings"],
    "positions": ["position_embeddings"],
    "types": ["token_type_embeddings"],
    "norm": ["LayerNorm"],
}
LAYER_SOURCES = {
    "qkv": ["attention.self.query", "attention.self.key", "attention.self.value"],
    "out": ["attention.output.dense"],
    "attention_norm": ["attention.output.LayerNorm"],
    "up": ["intermediate.dense"],
    "down": ["output.dense"],
    "norm": ["output.LayerNorm"],
}
PREFIX = re.compile(r"^(bert|question_encoder\.bert_model|ctx_encoder\.bert_model)\.")
HEADS = ("pooler.", "classifier.", "cls.")


def _sources(name: str) -> list[str]:
    if not name.startswith("layers."):
        module, kind = name.split(".")
        return [f"embeddings.{source}.{kind}" for source in EMBEDDING_SOURCES[module]]
    _, number, module, kind = name.split(".")
    return [f"encoder.layer.{number}.{source}.{kind}" for source in LAYER_SOURCES[module]]


def _plain_name(name: str) -> str:
    # "gamma" and "beta" are what the first BERT files call a norm's weight and bias
    name = PREFIX.sub("", name)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


def _read_config(path: Path) -> BertConfig:
    entries = read_json(path)
    kind = entries.get("model_type", "bert")
    if kind not in ("bert", "dpr"):
        raise ValueError(
            f"{path}: expected model_type bert or dpr, came {kind}, whose layers differ; use a BERT encoder"
        )
    for key, value in {"position_embedding_type": "absolute", "is_decoder": False, "projection_dim": 0}.items():
        if entries.get(key, value) != value:
            raise ValueError(f"{path}: expected {key} {value}, came {entries[key]}; such encoders are not supported")
    try:
        config = BertConfig(**{name: entries[name] for name in BertConfig.__dataclass_fields__ if name in entries})
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error
    if config.hidden_act not in ACTIVATIONS:
        raise ValueError(f"{path}: expected hidden_act among {', '.join(ACTIVATIONS)}, came {config.hidden_act}")
    if config.hidden_size % config.num_attention_heads:
        raise ValueError(
            f"{path}: hidden_size {config.hidden_size} is no multiple of {config.num_attention_heads} heads"
        )
    return config


def _read_pooling(path: Path) -> str:
    entries = read_json(path)
    modes = [key.removeprefix("pooling_mode_") for key, value in entries.items() if value is True and "_mode_" in key]
    modes = [mode.removesuffix("_token").removesuffix("_tokens") for mode in modes] or [entries.get("pooling_mode")]
    if modes not in (["cls"], ["mean"]):
        raise ValueError(f"{path}: expected pooling over the first token (cls) or the mean over tokens, came {modes}")
    return modes[0]


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for name, (path, _) in tensor_shapes(folder).items():
        with safe_open(path, framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if path.exists():
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer file ({error}); fetch it again") from error
    path = folder / "vocab.txt"
    if not path.exists():
        raise ValueError(f"{folder}: expected tokenizer.json or vocab.txt, found neither")
    settings = folder / "tokenizer_config.json"
    settings = read_json(settings) if settings.exists() else {}
    tokenizer = Tokenizer(models.WordPiece.from_file(str(path), unk_token="[UNK]"))
    ends = [tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]")]
    if None in ends:
        raise ValueError(f"{path}: expected a BERT vocabulary with [CLS] and [SEP]")
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=settings.get("do_lower_case", True),
        strip_accents=settings.get("strip_accents"),
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ends[1]), ("[CLS]", ends[0]))
    return tokenizer


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _digest_tensors(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
