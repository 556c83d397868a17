"""Training: the loss, the optimiser, the steps, and the checkpoints that a run continues from.

    B rows · T tokens · n scored tokens · D hidden size

A step's loss is the mean over the scored tokens of the whole batch, however it is cut into micro-batches or shared by
processes. Nothing in a step is random: there is no dropout, and the data of a step follow from the seed and its number
(corpus.py). So weights, the optimiser's moments and the number of the step are all that a run is continued from.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from minikid.corpus import Batch, Corpus, Row, collate
from minikid.files import replacing
from minikid.generation import log_probabilities
from minikid.model import GPT

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's state for each parameter


@dataclass(frozen=True)
class Settings:
    """What a step does with its batch."""

    steps: int
    lr: float  # at the end of the warm-up
    min_lr: float  # at the last step
    warmup: int  # steps over which the rate rises from 0
    weight_decay: float = 0.1  # of matrices; biases and norms have none
    clip: float = 1.0  # greatest norm of the gradient; 0: any
    accumulate: int = 1  # micro-batches into which each process cuts its rows
    bfloat16: bool = False  # matrix products in bfloat16, weights and sums in float32

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: a line up, half a cosine down."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - 1 - self.warmup, 1)
        return self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


@dataclass(frozen=True)
class World:
    """The processes that share each batch; alone without torch.distributed."""

    rank: int = 0
    size: int = 1

    def sum(self, *tensors: Tensor) -> None:
        """Replace tensors by their sums over all processes, in one message."""
        if self.size > 1:
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            torch.distributed.all_reduce(flat)
            for tensor, total in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                tensor.copy_(total.view_as(tensor))


@dataclass(frozen=True)
class Step:
    """What a step did."""

    number: int  # from 1
    loss: float  # before the update, in nats per scored token
    norm: float  # of the gradient before clipping
    rate: float
    tokens: int  # read, padding not counted


def make_optimiser(model: GPT, settings: Settings) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=True)


def loss_sum(model: GPT, batch: Batch) -> Tensor:
    """-log p of the scored tokens, summed; logits are made of their positions alone."""
    # [B, T] -> []
    states = model.hidden(batch.inputs, prefix=batch.prefix).flatten(0, 1)  # [B * T, D]
    if len(batch.places) < len(states):
        states = states.index_select(0, batch.places)
    return F.nll_loss(log_probabilities(model.head(states)), batch.targets, reduction="sum")


def train(
    model: GPT,
    optimiser: torch.optim.Optimizer,
    corpus: Corpus,
    batches: Callable[[int], Sequence[Row]],
    settings: Settings,
    *,
    done: int = 0,
    world: World = World(),
) -> Iterator[Step]:
    """The steps behind the first `done` ones. ArithmeticError, before the weights change, for a loss or gradient that
    is not finite.
    """
    for step in range(done, settings.steps):
        rows = batches(step)
        total = sum(row.scored for row in rows)
        loss = gradients(model, corpus, rows, total, settings, world)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ArithmeticError(
                f"step {step + 1} has a loss of {loss} and a gradient of norm {norm}; lower the learning rate, or look "
                "at the data"
            )
        for group in optimiser.param_groups:
            group["lr"] = settings.rate(step)
        optimiser.step()
        tokens = sum(row.end - row.begin - 1 for row in rows)
        yield Step(step + 1, loss, norm, settings.rate(step), tokens)


def gradients(
    model: GPT, corpus: Corpus, rows: Sequence[Row], total: int, settings: Settings, world: World = World()
) -> float:
    """The loss of a batch that has `total` scored tokens; leaves its gradient in the parameters.

    Each process takes every `size`-th row.
    """
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = None
    loss = torch.zeros((), device=model.device, dtype=model.dtype)
    mine = rows[world.rank :: world.size]
    size = -(-len(mine) // settings.accumulate)
    for i in range(0, len(mine), size or 1):
        batch = collate(corpus, mine[i : i + size], model.device)
        with autocast(model, settings.bfloat16):
            part = loss_sum(model, batch) / total
        part.backward()
        loss += part.detach()
    if world.size > 1:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        world.sum(loss, *(parameter.grad for parameter in parameters))
    return float(loss)


@torch.no_grad()
def evaluate(
    model: GPT, corpus: Corpus, batches: Sequence[Sequence[Row]], bfloat16: bool = False, world: World = World()
) -> float:
    """The mean loss over the scored tokens of all batches, of which each process takes every `size`-th."""
    sums = torch.zeros(2, dtype=torch.float64, device=model.device)
    for rows in batches[world.rank :: world.size]:
        batch = collate(corpus, rows, model.device)
        with autocast(model, bfloat16):
            sums[0] += loss_sum(model, batch)
        sums[1] += len(batch.targets)
    world.sum(sums)
    return float(sums[0] / sums[1])


def autocast(model: GPT, bfloat16: bool):
    return torch.autocast(model.device.type, torch.bfloat16) if bfloat16 else nullcontext()


def save_checkpoint(path: Path, model: GPT, optimiser: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Weights, moments and `state` in one safetensors file, in one step: a kill or a full disk leaves the old one."""
    tensors = {f"weight.{name}": p.detach() for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{m}.{name}": optimiser.state[parameter][m] for m in MOMENTS if parameter in optimiser.state}
    with replacing(path) as temporary:
        save_file(tensors, temporary, {"state": json.dumps(state)})


def read_state(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; ValueError for a file that is none."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {})["state"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint of a training run ({error}); choose another folder") from None


@torch.no_grad()
def load_checkpoint(path: Path, model: GPT, optimiser: torch.optim.Optimizer, done: int) -> None:
    """Put a checkpoint's weights, and the moments after `done` steps, into a model and its optimiser."""
    with safe_open(path, framework="pt") as file:
        for name, parameter in model.named_parameters():
            parameter.copy_(file.get_tensor(f"weight.{name}"))
            if done:
                moments = {m: file.get_tensor(f"{m}.{name}").to(parameter) for m in MOMENTS}
                step = torch.tensor(float(done), device=parameter.device)
                optimiser.state[parameter] = {"step": step, **moments}
