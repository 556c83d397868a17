"""Dense retrieval: passages as vectors, the nearest by inner product (DPR, Karpukhin et al. 2020, section 3).

Letters:  N passages, D width of a vector, k hits

On disk, in one folder with `minikid.retrieve.BM25` over the same passages:

    passages/       the passages, found by number
    dense.part/     shards of vectors while the passages are being encoded; a killed run goes on from there
    dense/          the finished faiss index, and meta.json with the fingerprints of passages and encoders
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import faiss
import numpy as np
from tqdm import tqdm

from minikid.encoder import Encoder
from minikid.files import replacing, replacing_folder
from minikid.passages import Hit, Passage, PassageFile, fingerprint, keep_passages

SHARD = 2048  # passages that are encoded between two writes
TRAINING = 200_000  # vectors, evenly spaced, from which clusters and quantisers are learned


class Dense:
    """Search by inner product of the query's vector with the passages' vectors.

    Arguments:
        passages: at least two passes are made over them
        encoder: for the passages, and for the queries too unless `query_encoder` is given (DPR has two)
        factory: faiss's description of the index, "Flat" (exact) or, for large corpora, say "IVF4096,PQ64"
        tuning: faiss's search parameters, say "nprobe=32" for an IVF index, which by default looks into one cell
        folder: where vectors are kept as they are made, and the index when it is done; None keeps all in memory
        progress: show a bar on standard error

    ValueError where the folder holds vectors of other passages or of another encoder, and where faiss cannot build
    the index (an unknown description, fewer passages than clusters).
    """

    def __init__(
        self,
        passages: Iterable[Passage],
        encoder: Encoder,
        *,
        query_encoder: Encoder | None = None,
        factory: str = "Flat",
        tuning: str = "",
        folder: str | Path | None = None,
        batch_size: int = 32,
        progress: bool = False,
    ):
        self.encoder = query_encoder or encoder
        if self.encoder.dimension != encoder.dimension:
            raise ValueError(
                f"expected two encoders of one width, came {encoder.dimension} for passages and "
                f"{self.encoder.dimension} for queries"
            )
        self.passages = passages if isinstance(passages, Sequence) else list(passages)
        part = None
        if folder is not None:
            self.passages = keep_passages(self.passages, folder)
            part = Path(folder) / "dense.part"
        self._meta = {
            "passages": fingerprint(self.passages),
            "encoder": encoder.fingerprint,
            "query_encoder": self.encoder.fingerprint,
            "factory": factory,
            "tuning": tuning,
        }
        _empty_index(encoder.dimension, factory, tuning)  # a bad description is better known before the long work
        shards = _encode(self.passages, encoder, part, self._meta, batch_size, progress)
        self._index = _build(shards, encoder.dimension, factory, tuning)
        self._searcher = _on_gpu(self._index)
        if folder is not None:
            self.save(folder)
            shutil.rmtree(part)

    def save(self, folder: str | Path) -> None:
        """Write passages and index; an index already there is replaced. ValueError if its passages are others."""
        keep_passages(self.passages, folder)
        with replacing_folder(Path(folder) / "dense") as new:
            faiss.write_index(self._index, str(new / "index.faiss"))
            (new / "meta.json").write_text(json.dumps(self._meta))

    @classmethod
    def open(cls, folder: str | Path, encoder: Encoder, passages: Iterable[Passage] | None = None) -> "Dense":
        """A saved index; `encoder` is the one for queries, `passages` (optional) what the index should be of.

        ValueError where the encoder or the passages are not those that the index was built with.
        """
        folder, self = Path(folder), cls.__new__(cls)
        try:
            self._meta = json.loads((folder / "dense" / "meta.json").read_text())
            self._index = faiss.read_index(str(folder / "dense" / "index.faiss"))
        except (OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{folder}: expected a dense index ({error}); build it first") from error
        self.passages, self.encoder = PassageFile(folder / "passages"), encoder
        _tune(self._index, self._meta["tuning"])
        wanted = self.passages if passages is None else passages
        _same(folder, self._meta, {"passages": fingerprint(wanted), "query_encoder": encoder.fingerprint})
        if self._index.ntotal != len(self.passages) or self._index.d != encoder.dimension:
            raise ValueError(f"{folder}: index and passages differ in number or width; build it again")
        self._searcher = _on_gpu(self._index)
        return self

    def search(self, query: str, k: int) -> list[Hit]:
        """The k passages of the largest inner product, best first; fewer where the corpus or a cluster has fewer."""
        # k hits
        if k < 1:
            raise ValueError(f"expected k of at least 1, came {k}")
        if len(self.passages) == 0:
            return []
        vector = np.ascontiguousarray(self.encoder.encode([query]), dtype=np.float32)
        scores, rows = self._searcher.search(vector, min(k, len(self.passages)))
        found = zip(scores[0].tolist(), rows[0].tolist(), strict=True)
        return [Hit(self.passages[row], score) for score, row in found if row >= 0]  # -1: faiss found no more


def _same(folder: Path, meta: dict, wanted: dict) -> None:
    others = [name.replace("_", " ") for name in wanted if meta.get(name) != wanted[name]]
    if others:
        raise ValueError(f"{folder}: built with other {' and '.join(others)}; use the same, or build in another folder")


def _encode(
    passages: Sequence[Passage], encoder: Encoder, part: Path | None, meta: dict, batch_size: int, progress: bool
) -> list[np.ndarray]:
    """All vectors as a list of [<= SHARD, D]; with `part` they are written there, and those already there are kept."""
    if part is not None:
        part.mkdir(parents=True, exist_ok=True)
        key = {name: meta[name] for name in ("passages", "encoder")} | {"shard": SHARD}
        if (part / "meta.json").exists():
            _same(part, json.loads((part / "meta.json").read_text()), key)
        else:
            with replacing(part / "meta.json") as new:
                new.write_text(json.dumps(key))
    shards = []
    with tqdm(total=len(passages), unit="passage", desc="encoding", disable=not progress) as bar:
        for start in range(0, len(passages), SHARD):
            rows = range(start, min(start + SHARD, len(passages)))
            path = None if part is None else part / f"{start:010d}.npy"
            if path is None or not path.exists():
                texts = [(passages[row].title, passages[row].text) for row in rows]
                vectors = np.ascontiguousarray(encoder.encode(texts, batch_size=batch_size), dtype=np.float32)
                if path is not None:
                    with replacing(path) as new, new.open("wb") as file:
                        np.save(file, vectors, allow_pickle=False)
            shards.append(vectors if path is None else np.load(path, mmap_mode="r", allow_pickle=False))
            bar.update(len(rows))
    return shards


def _empty_index(dimension: int, factory: str, tuning: str) -> faiss.Index:
    try:
        index = faiss.index_factory(dimension, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise ValueError(f"faiss cannot make a {factory!r} index of width {dimension}: {error}") from error
    _tune(index, tuning)
    return index


def _tune(index: faiss.Index, tuning: str) -> None:
    try:
        faiss.ParameterSpace().set_index_parameters(index, tuning)
    except RuntimeError as error:
        raise ValueError(f"faiss cannot set {tuning!r} on this index: {error}") from error


def _build(shards: list[np.ndarray], dimension: int, factory: str, tuning: str) -> faiss.Index:
    index, count = _empty_index(dimension, factory, tuning), sum(map(len, shards))
    if not index.is_trained and count:
        step = -(-count // TRAINING)
        try:
            index.train(np.ascontiguousarray(np.concatenate([shard[::step] for shard in shards])))
        except RuntimeError as error:
            raise ValueError(
                f"{count} passages cannot train a {factory!r} index: {error}; use fewer clusters"
            ) from error
    for shard in shards:
        index.add(np.ascontiguousarray(shard))
    return index


def _on_gpu(index: faiss.Index) -> faiss.Index:
    """A copy on all GPUs where faiss-gpu is installed and knows this kind of index, else the index itself."""
    if faiss.get_num_gpus() == 0:
        return index
    try:
        return faiss.index_cpu_to_all_gpus(index)
    except RuntimeError:  # HNSW, for one, has no GPU form
        return index
