"""Retrieval, measured: encoding against transformers, BM25 over many passages, and what each retriever finds.

    python bench/retrieve.py                            encoding and BM25
    python bench/retrieve.py --data nq_dev.jsonl        and precision over the passages of a question file

The question file has JSON lines as DPR and FiD use them, {"question": ..., "ctxs": [{"title", "text"}]}: the passages
of all questions together are the corpus, a question's own are its gold ones. Hybrid's defaults were chosen on Natural
Questions of this kind, all of them: there, its lead over dense search is no independent finding.
"""

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from minikid.encoder import load_encoder
from minikid.passages import read_passages, save_passages
from minikid.retrieve import BM25, Dense, Hybrid, Passage
from minikid.weights import ENCODER, resolve

THREADS, ROUNDS, QUERIES = 2, 3, 200
VOCABULARY, WORDS = 200_000, 100  # of the synthetic passages, drawn by Zipf's law


def row(name: str, *values: str) -> None:
    print(f"{name:<44}" + "".join(f"{value:>16}" for value in values), flush=True)


def synthetic(count: int, generator: np.random.Generator) -> Iterator[Passage]:
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    vocabulary = np.array(["".join(generator.choice(letters, generator.integers(3, 10))) for _ in range(VOCABULARY)])
    share = 1 / np.arange(1, VOCABULARY + 1)
    edges = np.cumsum(share / share.sum())
    for number in range(count):
        found = np.minimum(np.searchsorted(edges, generator.random(WORDS)), VOCABULARY - 1)
        yield Passage(str(number), "", " ".join(vocabulary[found]))


def encoding(passages: list[Passage], batch_size: int) -> None:
    """Both sort by length, batch alike, pool and normalise; rounds alternate, the best of each counts."""
    from transformers import AutoModel, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = resolve(ENCODER)
    ours, model, tokenizer = (
        load_encoder(),
        AutoModel.from_pretrained(folder).eval(),
        AutoTokenizer.from_pretrained(folder),
    )
    texts = [f"{passage.title} {passage.text}".strip() for passage in passages]

    @torch.inference_mode()
    def theirs() -> np.ndarray:
        vectors = np.empty((len(texts), ours.dimension), np.float32)
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        for start in range(0, len(texts), batch_size):
            rows = order[start : start + batch_size]
            batch = [texts[i] for i in rows]
            batch = tokenizer(batch, padding=True, truncation=True, max_length=ours.max_length, return_tensors="pt")
            hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"][:, :, None]
            mean = (hidden * mask).sum(1) / mask.sum(1)
            vectors[rows] = torch.nn.functional.normalize(mean, dim=-1).numpy()
        return vectors

    runs: dict[str, Callable[[], np.ndarray]] = {
        "ours": lambda: ours.encode(texts, batch_size=batch_size),
        "theirs": theirs,
    }
    best, vectors = dict.fromkeys(runs, float("inf")), {}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            vectors[name] = run()
            best[name] = min(best[name], time.perf_counter() - start)
    row("encode: minikid", f"{len(texts) / best['ours']:.1f} / s")
    row("encode: transformers, same weights", f"{len(texts) / best['theirs']:.1f} / s")
    row("encode: ratio", f"{best['theirs'] / best['ours']:.2f} x")
    row("encode: largest difference", f"{np.abs(vectors['ours'] - vectors['theirs']).max():.1e}")


def lexical(count: int) -> None:
    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path, times = Path(folder) / "passages.tsv", {}
        with open(path, "w") as file:
            file.write("id\ttext\ttitle\n")
            file.writelines(f"{p.id}\t{p.text}\t{p.title}\n" for p in synthetic(count, generator))
        start = time.perf_counter()
        kept = save_passages(read_passages(path), Path(folder) / "passages")
        times["read and keep"] = time.perf_counter() - start
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        start = time.perf_counter()
        index = BM25(kept)
        times["build"] = time.perf_counter() - start
        start = time.perf_counter()
        index.save(folder)
        times["save"] = time.perf_counter() - start
        del index
        start = time.perf_counter()
        index = BM25.open(folder)
        times["open"] = time.perf_counter() - start
        spans = []
        for number in generator.integers(0, count, QUERIES):
            query = " ".join(kept[int(number)].text.split()[:10])
            start = time.perf_counter()
            hits = index.search(query, 10)
            spans.append(time.perf_counter() - start)
            assert len(hits) == min(10, count)
    for name, seconds in times.items():
        row(f"BM25, {count:,} passages: {name}", f"{seconds:.1f} s")
    row(f"BM25, {count:,} passages: query of 10 words", f"{1e3 * statistics.median(spans):.1f} ms")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    row("BM25: peak memory, before and after the build", f"{before:.1f} GB", f"{peak:.1f} GB")


def read(path: Path) -> list[dict]:
    with open(path, encoding="utf-8") as file:  # not splitlines, which also cuts at separators within a string
        return [json.loads(line) for line in file]


def quality(path: Path) -> None:
    entries = read(path)
    gold = [{Passage("", c.get("title", ""), c["text"]) for c in entry["ctxs"]} for entry in entries]
    passages = list(dict.fromkeys(passage for found in gold for passage in sorted(found)))
    bm25, dense = BM25(passages), Dense(passages, load_encoder(), progress=True)
    equal = Hybrid(dense, bm25, c=60, weights=(1, 1))
    retrievers = {"BM25": bm25, "dense": dense, "hybrid": Hybrid(dense, bm25), "hybrid, c = 60, equal weights": equal}
    row(f"{len(entries)} questions, {len(passages)} passages", "Prec@1", "recall@5")
    for name, retriever in retrievers.items():
        places = []
        for entry, own in zip(entries, gold, strict=True):
            found = [hit.passage in own for hit in retriever.search(entry["question"], 5)]
            places.append((found[:1] == [True], any(found)))
        row(name, *(f"{100 * share:.2f} %" for share in np.array(places).mean(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="question file, for precision and recall")
    parser.add_argument("--count", type=int, default=1_000_000, help="synthetic passages for BM25, 0 for none")
    parser.add_argument("--encode", type=int, default=256, help="passages to encode, 0 for none")
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    if options.encode:
        lengths = np.random.default_rng(1).integers(20, WORDS, options.encode)  # real passages differ in length
        texts = synthetic(options.encode, np.random.default_rng(0))
        cut = [p._replace(text=" ".join(p.text.split()[:n])) for p, n in zip(texts, lengths, strict=True)]
        if options.data:
            first = [entry["ctxs"][0] for entry in read(options.data)[: options.encode]]
            cut = [Passage("", c.get("title", ""), c["text"]) for c in first]
        encoding(cut, options.batch_size)
    if options.data:
        quality(options.data)
    if options.count:
        lexical(options.count)


if __name__ == "__main__":
    main()
