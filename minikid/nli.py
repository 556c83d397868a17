"""Textual entailment: whether a premise says a hypothesis, contradicts it, or does neither.

    N pairs · B pairs in a batch · T tokens · D width · V vocabulary

Two scorers behind one protocol: a cross-encoder that was trained for it, and the language model itself, asked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from tokenizers import Tokenizer as Library
from torch import Tensor
from torch.nn import functional as F

from minikid import weights
from minikid.config import read_json
from minikid.encoder import Bert, load_bert
from minikid.folder import usable
from minikid.generation import likelihoods, pad
from minikid.model import GPT
from minikid.tokenizer import Tokenizer

LABELS = ("entailment", "neutral", "contradiction")  # the columns of scores
KNOWN = (*LABELS, "not_entailment")  # what id2label may say
TRUE = "Write one sentence that is true according to this text."
FALSE = "Write one sentence that is false according to this text."
FREE = "Write one sentence."


class NLI(Protocol):
    """What verifiers and re-rankers ask of a scorer."""

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """Probabilities of LABELS for each (premise, hypothesis), on the CPU: [N, 3], rows sum to 1."""


class CrossEncoder:
    """A BERT that reads `[CLS] premise [SEP] hypothesis [SEP]` and classifies the pair by its pooled first token.

    Arguments:
        trunk, tokenizer: as `load_bert` gives them
        heads: the file's pooler and classifier, by their names there
        labels: column of LABELS for each output of the classifier
    """

    def __init__(self, trunk: Bert, tokenizer: Library, heads: dict[str, Tensor], labels: Sequence[int]):
        D, names = trunk.config.hidden_size, ("pooler.dense", "classifier")
        shapes = {"pooler.dense.weight": (D, D), "pooler.dense.bias": (D,)}
        shapes |= {"classifier.weight": (len(labels), D), "classifier.bias": (len(labels),)}
        came = {name: tuple(tensor.shape) for name, tensor in heads.items()}
        if came != shapes:
            raise ValueError(f"expected the heads of a sequence classifier, {shapes}, came {came}")
        self.trunk, self.labels = trunk, list(labels)
        self.heads = [heads[f"{name}.{kind}"].to(trunk.tokens.weight) for name in names for kind in ("weight", "bias")]
        self.tokenizer = Library.from_str(tokenizer.to_str())  # the settings below are this scorer's own
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(trunk.config.max_position_embeddings)  # cuts the longer of the two
        self.tokenizer.encode_special_tokens = True  # "[SEP]" within a passage is plain text

    @classmethod
    def from_folder(cls, name_or_dir: str | Path, device: str | torch.device = "cpu") -> "CrossEncoder":
        """A folder of BertForSequenceClassification, or a name that `weights` knows; id2label orders the outputs.

        Of two labels, "not_entailment" counts as neutral: such a classifier contradicts nothing.
        ValueError for labels that say neither.
        """
        folder = weights.resolve(name_or_dir)
        names = read_json(folder / "config.json").get("id2label", {})
        names = [name.lower() for _, name in sorted(names.items(), key=lambda item: int(item[0]))]
        labels = [LABELS.index("neutral" if name == "not_entailment" else name) for name in names if name in KNOWN]
        if sorted(labels) not in ([0, 1], [0, 1, 2]) or len(labels) < len(names):
            raise ValueError(f"{folder / 'config.json'}: expected id2label to name {', '.join(LABELS)}, came {names}")
        trunk, tokenizer, heads, _ = load_bert(folder)
        return cls(trunk.to(usable(device)).eval().requires_grad_(False), tokenizer, heads, labels)

    def logits(self, tokens: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        """The classifier's outputs, in the file's order; `mask` is True where there is a token."""
        # [B, T] x 3 -> [B, outputs]
        first = self.trunk(tokens, mask, types)[:, 0]
        pool, pool_bias, classify, classify_bias = self.heads
        return F.linear(torch.tanh(F.linear(first, pool, pool_bias)), classify, classify_bias)

    @torch.inference_mode()
    def scores(self, pairs: Sequence[tuple[str, str]], batch_size: int = 32) -> Tensor:
        """As the protocol says; pairs are batched by length. Pairs longer than the position table are cut."""
        # N pairs -> [N, 3]
        read, scores = self.tokenizer.encode_batch(list(pairs)), torch.zeros(len(pairs), len(LABELS))
        order = sorted(range(len(pairs)), key=lambda row: len(read[row].ids))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            columns = ([getattr(read[row], name) for row in rows] for name in ("ids", "type_ids", "attention_mask"))
            tokens, types, mask = (pad(column).to(self.trunk.tokens.weight.device) for column in columns)
            p = self.logits(tokens, types, mask.bool()).float().softmax(-1).cpu()
            scores[torch.tensor(rows)[:, None], self.labels] = p
        return scores


class LanguageModelNLI:
    """A language model as scorer: how probable it finds the hypothesis as a true, a false, and a free statement.

        z = 1/T sum_t log M(h_t | premise, "... true ...", h_<t),   the same with "... false ...", and without a premise
        p(entailment, neutral, contradiction) = softmax(z_true, z_free, z_false)

    Bayes' rule with equal priors (a "noisy channel", Min et al. 2022), per token so that length does not matter.
    Asked for yes, no or maybe, a model of 135M weights ranks entailment poorly, and calibrated (Zhao et al. 2021) at
    chance; this way it ranks entailment well and contradiction poorly (bench/nli.py). Only the order among pairs means
    something.
    """

    def __init__(self, model: GPT, tokenizer: Tokenizer):
        self.model, self.tokenizer = model, tokenizer

    @torch.inference_mode()
    def scores(self, pairs: Sequence[tuple[str, str]], batch_size: int = 16) -> Tensor:
        """As the protocol says. A premise is read once for all its hypotheses; one that is too long is cut.

        ValueError for an empty hypothesis, and for one that is longer than the model's positions.
        """
        # N pairs -> [N, 3]
        z: dict[tuple[str | None, str, str], float] = {}
        asked = {None: [(FREE, h) for h in dict.fromkeys(h for _, h in pairs)]}
        for premise, hypothesis in dict.fromkeys(pairs):
            asked.setdefault(premise, []).extend([(TRUE, hypothesis), (FALSE, hypothesis)])
        for premise, rows in asked.items():
            for start in range(0, len(rows), batch_size):
                batch = rows[start : start + batch_size]
                texts = [self.tokenizer.encode(hypothesis) for _, hypothesis in batch]
                prompts = [
                    self._prompt(premise and self._fitting(premise, len(text)), ask)
                    for (ask, _), text in zip(batch, texts, strict=True)
                ]
                found = likelihoods(self.model, prompts, texts)
                z |= {(premise, *row): float(log_p.mean()) for row, log_p in zip(batch, found, strict=True)}
        table = [[z[p, TRUE, h], z[None, FREE, h], z[p, FALSE, h]] for p, h in pairs]
        return torch.tensor(table, dtype=torch.float64).reshape(-1, len(LABELS)).softmax(-1)

    def _prompt(self, premise: str | None, ask: str) -> list[int]:
        text = ask if premise is None else f"{premise}\n\n{ask}"
        chat = self.tokenizer.template is not None
        return self.tokenizer.prompt(text if chat else text + "\n", chat)

    def _fitting(self, premise: str, behind: int) -> str:
        """As much of a premise as leaves room for the longer ask and so many tokens behind it, whatever is asked."""
        while premise:
            longest = max(len(self._prompt(premise, ask)) for ask in (TRUE, FALSE))
            if longest + behind <= self.model.config.max_positions:
                break
            ids = self.tokenizer.encode(premise)
            kept = max(len(ids) - (longest + behind - self.model.config.max_positions), 0)
            premise = self.tokenizer.decode(ids[:kept]).rstrip("\ufffd")
        return premise
