"""Train a model, from scratch or from one that there is: `python train.py --data FILE --out DIR --init scratch`.

OUT becomes a folder that generate.py and transformers load. Several processes share each batch:
`torchrun --nproc-per-node 2 train.py ...`. Everything but what --dry-run prints goes to standard error.
"""

import argparse
import csv
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from minikid import scratch, weights
from minikid.arguments import count, positive
from minikid.config import Config, read_json
from minikid.corpus import Batches, Corpus, all_batches, read_corpus, read_texts
from minikid.files import replacing
from minikid.folder import SINGLE, usable, write_parameters
from minikid.model import GPT, Tokenizer, load_weights
from minikid.training import (
    Settings,
    World,
    evaluate,
    load_checkpoint,
    make_optimiser,
    read_state,
    save_checkpoint,
    train,
)

CHECKPOINT, LOG, CURVE = "checkpoint.safetensors", "log.csv", "loss.png"
COLUMNS = ("step", "tokens", "lr", "loss", "gradient_norm", "valid_loss", "tokens_per_second")
COMPANIONS = (  # what a folder has beside config and tensors
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "generation_config.json"),
)
FREE = ("out", "resume", "dry_run", "valid", "valid_every", "save_every", "log_every", "device")  # may change on resume


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="train.py", description="Train a GPT-2 / Llama model.")
    add = parser.add_argument
    add("--data", required=True, metavar="FILE", help='a text, or a .jsonl of {"prompt", "completion"}')
    add("--valid", metavar="FILE", help="the same, for the validation loss")
    add("--out", required=True, type=Path, metavar="DIR", help="the folder of the model, its checkpoint and its log")
    add("--init", default="scratch", metavar="scratch|NAME|DIR", help="what to train (default: %(default)s)")
    add("--steps", type=positive, required=True, metavar="N", help="updates of the weights")
    add(
        "--batch-size",
        type=positive,
        default=16,
        metavar="B",
        help="rows a step, of all processes (default: %(default)s)",
    )
    add("--resume", action="store_true", help="go on from the checkpoint in DIR, if there is one")
    add("--dry-run", action="store_true", help="print parameters, memory and steps, and write nothing")
    add("--length", type=positive, metavar="T", help="tokens of a row at most (default: the positions, up to 1024)")
    add("--chat", action=argparse.BooleanOptionalAction, help="wrap prompts in the chat template (default: if any)")
    add(
        "--attention", choices=("causal", "prefix"), help="prefix: prompts see both ways (default: as the model has it)"
    )
    new = parser.add_argument_group("a model from scratch")
    new.add_argument("--family", default="llama", choices=("gpt2", "llama"), help="default: %(default)s")
    for name, value in (("layers", 4), ("heads", 4), ("hidden", 128), ("positions", 512)):
        new.add_argument(f"--{name}", type=positive, default=value, metavar="N", help="default: %(default)s")
    new.add_argument("--kv-heads", type=positive, metavar="N", help="default: as many as heads")
    new.add_argument("--intermediate", type=positive, metavar="N", help="default: 4 x hidden, in a llama 8/3 x hidden")
    new.add_argument("--tokenizer", default="bpe", choices=("bpe", "characters"), help="default: %(default)s")
    new.add_argument("--vocab-size", type=positive, default=4096, metavar="V", help="at most (default: %(default)s)")
    steps = parser.add_argument_group("the steps")
    steps.add_argument("--lr", type=float, help="learning rate at its peak (default: 1e-3 from scratch, else 5e-5)")
    steps.add_argument("--min-lr", type=float, help="at the end (default: a tenth)")
    steps.add_argument("--warmup", type=count, metavar="N", help="steps (default: a tenth, up to 100)")
    steps.add_argument("--weight-decay", type=float, default=0.1, help="of matrices (default: %(default)s)")
    steps.add_argument("--clip", type=float, default=1.0, help="norm of the gradient; 0: any (default: %(default)s)")
    steps.add_argument(
        "--accumulate", type=positive, default=1, metavar="N", help="cut each batch N times to save memory"
    )
    steps.add_argument("--seed", type=int, default=0, help="of first weights and order of data (default: %(default)s)")
    steps.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: %(default)s)")
    steps.add_argument("--dtype", choices=("float32", "bfloat16"), help="of products (default: bfloat16 on CUDA)")
    steps.add_argument("--valid-every", type=positive, metavar="N", help="steps (default: a tenth)")
    steps.add_argument("--save-every", type=positive, default=100, metavar="N", help="steps (default: %(default)s)")
    steps.add_argument("--log-every", type=positive, default=10, metavar="N", help="steps (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("lr", "min_lr", "weight_decay", "clip"):
        value = getattr(args, name)
        if value is not None and not 0 <= value < math.inf:
            parser.error(f"--{name.replace('_', '-')}: expected 0 or more, got {value}")
    for file in filter(None, (args.data, args.valid)):
        if not Path(file).is_file():
            parser.error(f"{file}: no such file")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch finds no CUDA device")
    new_model = args.init == "scratch"
    args.lr = (1e-3 if new_model else 5e-5) if args.lr is None else args.lr
    args.min_lr = args.lr / 10 if args.min_lr is None else args.min_lr
    args.warmup = min(100, args.steps // 10) if args.warmup is None else args.warmup
    args.valid_every = args.valid_every or max(args.steps // 10, 1)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def join_world(device: str) -> tuple[World, str]:
    """The processes that torchrun started, and this one's device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(), device
    import torch.distributed

    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    return World(torch.distributed.get_rank(), size), device


def prepare(args: argparse.Namespace, out: Path) -> None:
    """Write all of the folder but the tensors. ValueError for one that holds a model already."""
    if args.init != "scratch" and weights.resolve(args.init).resolve() == out.resolve():
        raise ValueError(f"--init and --out are the same folder, {out}; choose another --out")
    if other := next(out.glob("*.safetensors"), None):
        raise ValueError(f"{other} is a model without the checkpoint of a run; choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    if args.init == "scratch":
        train_tokenizer = scratch.train_bpe if args.tokenizer == "bpe" else scratch.train_characters
        library = train_tokenizer(read_texts(args.data), args.vocab_size)
        with replacing(out / "tokenizer.json") as path:
            path.write_text(library.to_str(pretty=True), encoding="utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": scratch.EOS}
        write_json(out / "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})
        names = ("layers", "heads", "kv_heads", "hidden", "intermediate", "positions")
        config = scratch.hf_config(
            args.family,
            library.get_vocab_size(),
            **{name: getattr(args, name) for name in names},
            eos_id=library.token_to_id(scratch.EOS),
            attention=args.attention or "causal",
        )
    else:
        source = weights.resolve(args.init)
        for name in COMPANIONS:
            if (source / name).exists():
                shutil.copyfile(source / name, out / name)
        if args.chat is False:  # what reads the model later shall not wrap prompts either
            (out / "chat_template.jinja").unlink(missing_ok=True)
            if (settings := out / "tokenizer_config.json").exists():
                write_json(settings, {k: v for k, v in read_json(settings).items() if k != "chat_template"})
        config = read_json(source / "config.json")
        config.pop("torch_dtype", None)
        config |= {"dtype": "float32"} | ({"attention": args.attention} if args.attention else {})
    write_json(out / "config.json", config)


def write_json(path: Path, value: dict[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def what_counts(args: argparse.Namespace) -> dict[str, Any]:
    """All that a run's numbers depend on."""
    settings = {name: value for name, value in vars(args).items() if name not in FREE}
    return settings | {"data": hashlib.sha256(Path(args.data).read_bytes()).hexdigest()}


def check_same(now: dict[str, Any], then: dict[str, Any], place: Path) -> None:
    if changed := [name for name in now if now[name] != then.get(name)]:
        what = ", ".join(f"{name} was {then.get(name)!r} and is {now[name]!r}" for name in changed)
        raise ValueError(f"{place} belongs to another run: {what}; give the same options, or choose another --out")


class Clock:
    """Tokens per second of each step, and the time left of all that is done between two."""

    def __init__(self, steps: int):
        self.began = self.tick = time.perf_counter()
        self.steps, self.done = steps, 0

    def rate(self, tokens: int) -> float:
        self.done += 1
        return tokens / (time.perf_counter() - self.tick)

    def go(self) -> None:
        self.tick = time.perf_counter()

    def __str__(self) -> str:
        left = int((time.perf_counter() - self.began) / self.done * (self.steps - self.done))
        return f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"


class Log:
    """The CSV file of all steps; rows behind the step that a run goes on from are dropped."""

    def __init__(self, path: Path, done: int):
        rows = list(csv.reader(path.open(encoding="utf-8", newline=""))) if done and path.exists() else []
        self.rows = [row for row in rows[1:] if len(row) == len(COLUMNS) and int(row[0]) <= done]
        with replacing(path) as new, new.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([COLUMNS, *self.rows])
        self.file = path.open("a", encoding="utf-8", newline="")

    def write(self, *row: float | None) -> None:
        self.rows.append(["" if value is None else str(value) for value in row])
        csv.writer(self.file).writerow(self.rows[-1])
        self.file.flush()

    def draw(self, path: Path) -> None:
        """The curve of both losses as PNG, where matplotlib is installed."""
        try:
            from matplotlib.figure import Figure
        except ImportError:
            note(f"{path.name} is left out: it needs one more library, pip install matplotlib")
            return
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="step", ylabel="loss, nats per token")
        axes.plot([int(row[0]) for row in self.rows], [float(row[3]) for row in self.rows], lw=0.8, label="training")
        if valid := [(int(row[0]), float(row[5])) for row in self.rows if row[5]]:
            axes.plot(*zip(*valid, strict=True), marker="o", ms=3, label="validation")
        axes.legend()
        with replacing(path) as temporary:
            figure.savefig(temporary, format="png", dpi=120)


def make_model(args: argparse.Namespace, config: Config, device: str) -> GPT:
    if args.init != "scratch":
        return load_weights(weights.resolve(args.init), device)
    model = GPT(config)
    scratch.init_weights(model, torch.Generator().manual_seed(args.seed))
    return model.to(device)


def describe(args: argparse.Namespace, config: Config, corpus: Corpus, batches: Batches) -> str:
    """What a run would take. Of a batch's memory the greater part is counted: what the backward pass keeps."""
    with torch.device("meta"):
        n = sum(p.numel() for p in GPT(config).parameters())
    some = [batches(step) for step in range(min(args.steps, 64))]
    widest = [max(row.end - row.begin - 1 for row in rows) for rows in some]
    read = sum(row.end - row.begin - 1 for rows in some for row in rows)
    scored = sum(row.scored for rows in some for row in rows)
    padded = sum(width * len(rows) for width, rows in zip(widest, some, strict=True))
    rows = -(-args.batch_size // (args.accumulate * int(os.environ.get("WORLD_SIZE", "1"))))
    wide, inner = (15, 4) if config.family == "llama" else (9, 2)  # numbers kept for each token in each layer
    per_token = config.num_layers * (wide * config.hidden_size + inner * config.intermediate_size)
    batch = 4 * rows * max(widest) * (per_token + 3 * config.vocab_size * scored / read)
    lines = {
        "parameters": f"{n:,}",
        "memory": f"{16 * n / 1e9:.2f} GB for weights, gradients and moments, about {batch / 1e9:.2f} GB for a batch, "
        "0.4 GB for the program",
        "data": f"{len(corpus.spans):,} examples, {int((corpus.spans[:, 1] - corpus.spans[:, 0] - 1).sum()):,} tokens, "
        f"{corpus.left_out} longer ones left out",
        "steps": f"{args.steps:,} of {args.batch_size} rows, {args.steps * args.batch_size / len(corpus.spans):.2f} "
        f"epochs, {args.steps * read / len(some):,.0f} tokens",
        "padding": f"{1 - read / padded:.1%} of what is computed; {scored / read:.1%} of the tokens are scored",
    }
    return "\n".join(f"{name:<12}{text}" for name, text in lines.items())


def run(args: argparse.Namespace, out: Path) -> None:
    world, device = join_world(args.device)
    usable(device)  # said before anything is written
    chief = world.rank == 0
    checkpoint, counts, done = out / CHECKPOINT, what_counts(args), 0
    if checkpoint.exists():
        if not args.resume:
            raise ValueError(f"{checkpoint} is there already: --resume goes on from it; or choose another --out")
        state = read_state(checkpoint)
        check_same(counts, state["settings"], checkpoint)
        done = state["step"]
    elif chief:
        prepare(args, out)
    if world.size > 1:
        torch.distributed.barrier()  # the others read what the first has prepared
    tokenizer, config = Tokenizer.from_folder(out), Config.from_folder(out)
    if config.attention == "prefix" and not args.data.endswith(".jsonl"):
        raise ValueError('prefix attention needs prompts: expected --data FILE.jsonl of {"prompt", "completion"}')
    length = min(args.length or 1024, config.max_positions)
    corpus = read_corpus(args.data, tokenizer, length, args.chat)
    valid = read_corpus(args.valid, tokenizer, length, args.chat, whole=True) if args.valid else None
    batches = Batches(corpus, args.batch_size, args.seed)
    if args.dry_run:
        print(describe(args, config, corpus, batches))
        return
    names = ("steps", "lr", "min_lr", "warmup", "weight_decay", "clip", "accumulate")
    settings = Settings(**{name: getattr(args, name) for name in names}, bfloat16=args.dtype == "bfloat16")
    model = GPT(config).to(device) if done else make_model(args, config, device)
    optimiser = make_optimiser(model, settings)
    if done:
        load_checkpoint(checkpoint, model, optimiser, done)
    if chief:
        for left in [*out.glob(".*.tmp"), *out.glob(".tmp*")]:  # of a killed run: ours, and safetensors' own
            left.unlink()
        log = Log(out / LOG, done)
        note(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(corpus.spans):,} examples")
        for file, part in ((args.data, corpus), (args.valid, valid)):
            if part and part.left_out:
                note(f"{file}: {part.left_out} examples of more than {length} tokens are left out")
        if args.resume:
            note(f"going on behind step {done}" if done else f"no checkpoint in {out} yet: from the beginning")
    valid_batches = all_batches(valid, -(-args.batch_size // world.size)) if valid else []
    saved = f"{checkpoint} (step {done})" if done else "none"
    clock = Clock(args.steps - done)
    try:
        for step in train(model, optimiser, corpus, batches, settings, done=done, world=world):
            rate = clock.rate(step.tokens)
            last, valid_loss = step.number == args.steps, None
            if valid and (last or step.number % args.valid_every == 0):
                valid_loss = evaluate(model, valid, valid_batches, settings.bfloat16, world)
            if chief:
                log.write(step.number, step.tokens, step.rate, step.loss, step.norm, valid_loss, round(rate, 1))
                if last or valid_loss is not None or step.number % args.log_every == 0:
                    told = "" if valid_loss is None else f"  validation {valid_loss:.4f}"
                    note(f"step {step.number}/{args.steps}  loss {step.loss:.4f}{told}  {rate:,.0f} tokens/s  {clock}")
                if last or step.number % args.save_every == 0:
                    save_checkpoint(checkpoint, model, optimiser, {"step": step.number, "settings": counts})
                    saved = f"{checkpoint} (step {step.number})"
            clock.go()
    except (ArithmeticError, OSError) as error:
        raise ValueError(f"{error}. The last good checkpoint: {saved}") from None
    if chief:
        write_parameters(out / SINGLE, config, dict(model.named_parameters()))
        log.draw(out / CURVE)
        note(f"{out} holds the model")


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        with tempfile.TemporaryDirectory() if args.dry_run else nullcontext(args.out) as folder:
            run(args, Path(folder))
    except (ValueError, OSError) as error:
        note(f"train.py: error: {error}")
        return 1
    except KeyboardInterrupt:
        note("interrupted; --resume goes on from the last checkpoint")
        return 1
    finally:
        if "WORLD_SIZE" in os.environ and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
