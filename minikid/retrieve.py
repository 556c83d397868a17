"""Retrieval from a user's own corpus: lexical (BM25), dense (`minikid.dense`), and both fused.

    python -m minikid.retrieve build FILE ... --out DIR --retriever bm25|dense|hybrid
    python -m minikid.retrieve search DIR "a question" -k 5

Every retriever has `search(query, k) -> list[Hit]`, best first: at most k hits, fewer where fewer passages match.
"""

import argparse
import json
import math
import re
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol

import bm25s
import numpy as np
from tqdm import tqdm

from minikid.arguments import positive
from minikid.dense import Dense
from minikid.encoder import load_encoder
from minikid.files import replacing_folder
from minikid.passages import (
    UNSPACED,
    Hit,
    Passage,
    PassageFile,
    fingerprint,
    holds_triples,
    keep_passages,
    read_passages,
)
from minikid.text import stem, words
from minikid.weights import ENCODER

__all__ = [
    "BM25",
    "Dense",
    "Hit",
    "Hybrid",
    "Passage",
    "fuse",
    "holds_triples",
    "make_retriever",
    "open_retriever",
    "read_passages",
    "terms",
]

TERMS = 1  # part of a saved index: raise it whenever `terms` changes
_RUN = re.compile(rf"[{UNSPACED}\uac00-\ud7a3]{{2,}}")


def terms(text: str) -> list[str]:
    """What BM25 counts: the stems of the words; for Chinese, Japanese and Korean also every pair of neighbours.

    Ideographs and kana are words one by one, so a query of one character finds it anywhere; the pairs, as in Lucene's
    CJK analyser, make whole words count more than their scattered characters. Stopwords stay: their weight is near 0.
    """
    found = [stem(word) for word in words(text)]
    if not text.isascii():
        found += [first + second for run in _RUN.findall(text) for first, second in pairwise(run)]
    return found


class BM25:
    """Lucene's BM25 (Kamphuis et al. 2020) over title and text; k1 and b by default as in DPR, section 5.

    score(q, d) = sum over terms t of q:  ln(1 + (N - df + 0.5) / (df + 0.5)) * tf / (tf + k1 (1 - b + b |d| / avgdl))
    """

    def __init__(self, passages: Iterable[Passage], *, k1: float = 0.9, b: float = 0.4, progress: bool = False):
        if not (0 <= k1 < math.inf and 0 <= b <= 1):
            raise ValueError(f"expected k1 of at least 0 and b from 0 to 1, came {k1} and {b}")
        self.passages = passages if isinstance(passages, Sequence) else list(passages)
        vocabulary: dict[str, int] = {}
        documents = []
        for passage in tqdm(self.passages, unit="passage", desc="indexing", disable=not progress):
            found = terms(f"{passage.title} {passage.text}")
            documents.append(array("i", [vocabulary.setdefault(term, len(vocabulary)) for term in found]))
        self._index = bm25s.BM25(k1=k1, b=b, method="lucene")
        if vocabulary:  # bm25s cannot index a corpus without any term
            self._index.index((documents, vocabulary), create_empty_token=False, show_progress=False)
        else:
            self._index.vocab_dict = {}

    def search(self, query: str, k: int) -> list[Hit]:
        """The k best passages that share a term with the query; of equal scores the earlier passage goes first."""
        if k < 1:
            raise ValueError(f"expected k of at least 1, came {k}")
        ids = self._index.get_tokens_ids(terms(query))
        if not ids:
            return []
        scores = self._index.get_scores_from_ids(ids)
        rows = np.flatnonzero(scores > 0)
        if len(rows) > k:  # all that reach the k-th best score, so that ties are cut in order
            rows = rows[scores[rows] >= np.partition(scores[rows], -k)[-k]]
        rows = rows[np.argsort(-scores[rows], kind="stable")][:k]
        return [Hit(self.passages[row], float(scores[row])) for row in rows]

    def save(self, folder: str | Path) -> None:
        """Write passages and index; an index already there is replaced. ValueError if its passages are others."""
        kept = keep_passages(self.passages, folder)
        with replacing_folder(Path(folder) / "bm25") as new:
            if self._index.vocab_dict:
                self._index.save(new, show_progress=False)
            (new / "meta.json").write_text(json.dumps({"passages": kept.fingerprint, "terms": TERMS}))

    @classmethod
    def open(cls, folder: str | Path, passages: Iterable[Passage] | None = None) -> "BM25":
        """A saved index, memory-mapped; ValueError where it is not of its folder's passages, or not of `passages`."""
        folder, self = Path(folder), cls.__new__(cls)
        self.passages = PassageFile(folder / "passages")
        wanted = fingerprint(self.passages if passages is None else passages)
        try:
            if json.loads((folder / "bm25" / "meta.json").read_text()) != {"passages": wanted, "terms": TERMS}:
                raise ValueError("it is of other passages or of another version")
            self._index = bm25s.BM25()
            self._index.vocab_dict = {}
            if (folder / "bm25" / "params.index.json").exists():
                self._index = bm25s.BM25.load(folder / "bm25", mmap=True, show_progress=False)
        except (OSError, ValueError, EOFError) as error:
            raise ValueError(f"{folder}: expected a BM25 index of these passages ({error}); build it") from error
        return self


class Retriever(Protocol):
    """Whatever finds passages for a query."""

    def search(self, query: str, k: int) -> list[Hit]: ...


class Everything:
    """All passages in their order, whatever the query and k, with the score 0."""

    def __init__(self, passages: Iterable[Passage]):
        self.passages = passages

    def search(self, query: str, k: int) -> list[Hit]:
        return [Hit(passage, 0.0) for passage in self.passages]


class Hybrid:
    """A dense and a lexical retriever, fused by rank; each is asked for `depth` hits, or for k if that is more.

    A departure from Cormack's c = 60 and equal weights: these defaults were chosen on the same Natural Questions
    as they are measured on, where plain fusion falls behind dense search alone. The dense retriever's first hit stays
    first unless BM25 ranks its second or third far higher, and BM25's first hit is always among the first five.
    """

    def __init__(
        self,
        dense: Retriever,
        lexical: Retriever,
        *,
        depth: int = 100,
        c: float = 1,
        weights: tuple[float, float] = (2, 1),
    ):
        self.retrievers, self.depth, self.c, self.weights = (dense, lexical), depth, c, weights

    def search(self, query: str, k: int) -> list[Hit]:
        """The k best passages by fused rank; the scores are those of `fuse`."""
        depth = max(k, self.depth)
        return fuse([r.search(query, depth) for r in self.retrievers], k, self.c, self.weights)


def fuse(lists: Sequence[Sequence[Hit]], k: int, c: float = 60, weights: Sequence[float] | None = None) -> list[Hit]:
    """Reciprocal rank fusion (Cormack et al. 2009): a passage's score is the sum over the lists of w / (c + rank).

    Ranks count from 1; the weights w are 1 unless given. Passages are the same when id, title and text are. Of equal
    scores the one that came first, reading list after list, goes first.
    """
    if k < 1:
        raise ValueError(f"expected k of at least 1, came {k}")
    scores: dict[Passage, float] = {}
    for hits, weight in zip(lists, weights or [1.0] * len(lists), strict=True):
        for rank, hit in enumerate(hits, start=1):
            scores[hit.passage] = scores.get(hit.passage, 0.0) + weight / (c + rank)
    ranked = sorted(scores.items(), key=lambda item: -item[1])
    return [Hit(passage, score) for passage, score in ranked[:k]]


def make_retriever(
    passages: Sequence[Passage], kind: str, encoder: str | Path = ENCODER, device: str = "cpu"
) -> Retriever:
    """A retriever of a small corpus, indexed in memory; kind: "bm25", "dense", "hybrid", or "none" for all passages."""
    if kind == "none" or not passages:
        return Everything(passages)
    if kind == "bm25":
        return BM25(passages)
    dense = Dense(passages, load_encoder(encoder, device=device))
    return dense if kind == "dense" else Hybrid(dense, BM25(passages))


def open_retriever(
    folder: Path, kind: str | None = None, encoder: str | Path = ENCODER, device: str = "cpu"
) -> Retriever:
    """What `build` wrote; kind as for `make_retriever`, None: all that was built. ValueError where it was not built."""
    if kind == "none":
        return Everything(PassageFile(folder / "passages"))
    built = [name for name in ("bm25", "dense") if (folder / name).exists()]
    wanted = {"hybrid": ["bm25", "dense"], None: built}.get(kind, [kind])
    if not wanted:
        raise ValueError(f"{folder}: no index there; run `python -m minikid.retrieve build` first")
    retrievers: list[Retriever] = []
    if "dense" in wanted:
        retrievers.append(Dense.open(folder, load_encoder(encoder, device=device)))
    if "bm25" in wanted:
        retrievers.append(BM25.open(folder))
    return retrievers[0] if len(retrievers) == 1 else Hybrid(*retrievers)


def _build(options: argparse.Namespace) -> None:
    for path in options.files:
        if holds_triples(path):
            raise ValueError(f"{path}: triples, not passages; a passage file has a header row with id, text, title")
    passages = keep_passages(chain.from_iterable(map(read_passages, options.files)), options.out)
    print(f"{len(passages)} passages in {options.out}", file=sys.stderr)
    if options.retriever in ("bm25", "hybrid"):
        BM25(passages, k1=options.k1, b=options.b, progress=True).save(options.out)
    if options.retriever in ("dense", "hybrid"):
        encoder = load_encoder(options.encoder, device=options.device)
        questions = load_encoder(options.query_encoder, device=options.device) if options.query_encoder else None
        Dense(
            passages,
            encoder,
            query_encoder=questions,
            factory=options.factory,
            tuning=options.tuning,
            folder=options.out,
            batch_size=options.batch_size,
            progress=True,
        )


def _search(options: argparse.Namespace) -> None:
    retriever = open_retriever(options.index, options.retriever, options.encoder, options.device)
    for query in _queries(options.queries):
        hits = retriever.search(query, options.k)
        if options.json:
            found = [hit.passage._asdict() | {"score": hit.score} for hit in hits]
            print(json.dumps({"query": query, "hits": found}, ensure_ascii=False), flush=True)
            continue
        for rank, (passage, score) in enumerate(hits, start=1):
            print(f"{rank}\t{score:.4f}\t{passage.id}\t{passage.title}\t{' '.join(passage.text.split())}", flush=True)
        if not hits:
            print(f"no passage matches: {query}", file=sys.stderr)


def _queries(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        yield from (line.strip() for line in sys.stdin if line.strip()) if argument == "-" else [argument]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m minikid.retrieve", description="Index passages and search them.")
    commands = parser.add_subparsers(required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--device", default="cpu", help="for the encoder, say cuda (default: cpu)")

    build = commands.add_parser("build", parents=[shared], help="read passages, write an index")
    build.set_defaults(run=_build)
    build.add_argument("files", nargs="+", metavar="FILE", help=".txt, .jsonl or .tsv, each also with .gz")
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the index")
    build.add_argument("--retriever", choices=["bm25", "dense", "hybrid"], default="bm25", help="hybrid: build both")
    build.add_argument("--k1", type=float, default=0.9, help="BM25: saturation of term counts (default: 0.9)")
    build.add_argument("--b", type=float, default=0.4, help="BM25: share of length normalisation (default: 0.4)")
    build.add_argument("--encoder", default=ENCODER, metavar="NAME|DIR", help="encoder of the passages")
    build.add_argument("--query-encoder", metavar="NAME|DIR", help="encoder of queries, if another one (DPR)")
    build.add_argument("--factory", default="Flat", help="faiss index, say IVF4096,PQ64 (default: Flat, exact)")
    build.add_argument("--tuning", default="", help="faiss search parameters, say nprobe=32")
    build.add_argument("--batch-size", type=positive, default=32, help="passages encoded at a time (default: 32)")

    search = commands.add_parser("search", parents=[shared], help="search an index")
    search.set_defaults(run=_search)
    search.add_argument("index", type=Path, metavar="DIR", help="folder that build wrote")
    search.add_argument(
        "queries", nargs="+", metavar="QUERY", help="a question; - reads one per line from standard input"
    )
    search.add_argument("-k", type=positive, default=5, help="hits per query (default: 5)")
    search.add_argument("--retriever", choices=["bm25", "dense", "hybrid"], help="default: all that was built")
    search.add_argument("--encoder", default=ENCODER, metavar="NAME|DIR", help="encoder of the queries")
    search.add_argument("--json", action="store_true", help="one JSON object per query")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; the exit code: 0 done, 1 failed with a message on standard error, 2 bad usage."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        print(f"minikid.retrieve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
