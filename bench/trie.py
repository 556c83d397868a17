"""Measure TokenTrie on synthetic triples against its targets, a dict of dicts, marisa-trie and the released figures.

    python bench/trie.py                  20 million keys (3 minutes, 6 GB of disk)
    python bench/trie.py --keys 1000000   fewer

Every part runs in a process of its own, so that its peak memory is its own. The triples have the proportions of the
KgCLUE knowledge base: ten triples per subject, S of 5.1 tokens in the mean, P of 3.0, a meaning M of 9.9 for 27% of the
subjects, O of 18 bytes. Tokens follow Zipf's law over a vocabulary of 50,000, and so do the predicates over a pool of
50,000; 5.7% of the triples are a second value of their key. Keys are S | P or S | P | M, in random order.
"""

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

VOCABULARY, PREDICATES, SEPARATOR = 50_000, 50_000, 0
SMALL = 1_000_000  # keys for those that cannot take more
WALKS = 1_000


# --- the triples


def zipf(rng: np.random.Generator, size: int, n: int) -> np.ndarray:
    """Ranks 0 .. n-1, the r-th with a probability proportional to 1 / (r + 1)."""
    cumulated = np.cumsum(1 / np.arange(1, n + 1))
    return np.searchsorted(cumulated, rng.random(size) * cumulated[-1], side="right").clip(max=n - 1)


class Phrases:
    """A list of token sequences as one array: of Poisson length (at least 1), tokens by Zipf's law from 1 on."""

    def __init__(self, rng: np.random.Generator, number: int, mean: float, share: float = 1.0) -> None:
        self.lengths = (1 + rng.poisson(mean - 1, number)) * (rng.random(number) < share)
        self.begins = np.cumsum(self.lengths) - self.lengths
        self.tokens = (1 + zipf(rng, int(self.lengths.sum()), VOCABULARY - 1)).astype(np.uint16)

    def put(self, out: np.ndarray, at: np.ndarray, which: np.ndarray) -> np.ndarray:
        """Copy the phrases `which` to the places `at` of `out`; return the places behind them."""
        size = self.lengths[which]
        inside = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        out[np.repeat(at, size) + inside] = self.tokens[np.repeat(self.begins[which], size) + inside]
        return at + size


def generate(folder: Path, keys: int, seed: int = 0) -> dict:
    """Write tokens.npy, lengths.npy, text.npy, sizes.npy: as many triples as `keys` distinct keys need."""
    rng = np.random.default_rng(seed)
    n = int(keys * 1.065)
    subjects = max(1, n // 10)
    S, P = Phrases(rng, subjects, 5.1), Phrases(rng, PREDICATES, 3.0)
    M = Phrases(rng, subjects, 9.9, share=0.27)
    subject, predicate = rng.integers(subjects, size=n), zipf(rng, n, PREDICATES)
    lengths = S.lengths[subject] + 1 + P.lengths[predicate] + (M.lengths[subject] > 0) + M.lengths[subject]
    begins = np.cumsum(lengths) - lengths
    tokens = np.full(int(lengths.sum()), SEPARATOR, dtype=np.uint16)
    for a in range(0, n, 1 << 20):
        s, p = subject[a : a + (1 << 20)], predicate[a : a + (1 << 20)]
        end = P.put(tokens, S.put(tokens, begins[a : a + (1 << 20)], s) + 1, p)
        M.put(tokens, end + 1, s)
    sizes = 1 + rng.poisson(17, n)
    text = rng.integers(97, 123, int(sizes.sum()), dtype=np.uint8)
    for name, a in (("tokens", tokens), ("lengths", lengths), ("text", text), ("sizes", sizes)):
        np.save(folder / f"{name}.npy", a.astype(np.uint32) if name in ("lengths", "sizes") else a)
    return {"triples": n}


def load(folder: Path) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    tokens, lengths, text, sizes = (np.load(folder / f"{n}.npy") for n in ("tokens", "lengths", "text", "sizes"))
    return tokens, lengths, (text, sizes)


# --- the parts: each returns what it measured


def resident() -> float:
    """This process's resident memory, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def on_disk(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def build(folder: Path) -> dict:
    from minikid.trie import TokenTrie

    tokens, lengths, values = load(folder)
    before, start = resident(), time.perf_counter()
    trie = TokenTrie.from_arrays(tokens, lengths, values)
    built = time.perf_counter() - start
    trie.save(folder / "trie")
    saved = time.perf_counter() - start
    values = sum((folder / "trie" / f"{name}.1.trie").stat().st_size for name in ("offsets", "values")) / 1e6
    report = {"keys": len(trie), "build s": built, "build and save s": saved, "peak MB": peak(), "input MB": before}
    return report | {"disk MB": on_disk(folder / "trie"), "of which values MB": values}


def steps(seconds: list[float]) -> dict:
    return {"median us": float(np.median(seconds)) * 1e6, "p99 us": float(np.quantile(seconds, 0.99)) * 1e6}


def random_walks(trie, rng: np.random.Generator, walks: int) -> tuple[list[int], list[float]]:
    """Walk from the root to the end of a key, a child at random each time; all nodes, and the seconds of each step."""
    nodes, seconds = [], []
    for _ in range(walks):
        node = trie.root
        while True:
            nodes.append(node)
            tokens = trie.children(node)
            if not len(tokens):
                break
            token = int(tokens[rng.integers(len(tokens))])
            start = time.perf_counter()
            node = trie.advance(node, token)
            trie.children(node)
            seconds.append(time.perf_counter() - start)
    return nodes, seconds


def walk(folder: Path) -> dict:
    from minikid.trie import TokenTrie

    empty, start = resident(), time.perf_counter()
    trie = TokenTrie.open(folder / "trie")
    opened = time.perf_counter() - start
    _, seconds = random_walks(trie, np.random.default_rng(1), WALKS)
    return {"open ms": opened * 1e3, "before MB": empty, "resident MB": resident(), **steps(seconds)}


def walk_cold(folder: Path) -> dict:
    """`walk` with the trie's files dropped from the page cache first."""
    for path in (folder / "trie").iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return walk(folder)


def masks(folder: Path) -> dict:
    import torch

    from minikid.trie import TokenTrie

    torch.set_num_threads(2)
    trie = TokenTrie.open(folder / "trie")
    nodes, _ = random_walks(trie, np.random.default_rng(2), 200)
    rng = np.random.default_rng(3)
    first = trie.child_nodes(trie.root)
    cases = {
        "64 cursors on random walks": rng.choice(nodes, 64),
        "64 cursors at the root": np.zeros(64, dtype=np.int64),
        "64 cursors after the commonest tokens": np.array(first[:64]),
    }
    report = {}
    for name, cursors in cases.items():
        batch = torch.from_numpy(cursors.astype(np.int64))
        seconds = []
        for _ in range(200):
            start = time.perf_counter()
            trie.masks(batch, VOCABULARY)
            seconds.append(time.perf_counter() - start)
        report[name] = float(np.median(seconds[20:])) * 1e3
    return report


def lookahead(folder: Path) -> dict:
    """Gains of the children of nodes with about 100 completions, for questions of 20 tokens."""
    from minikid.lookahead import LookAhead
    from minikid.trie import TokenTrie

    trie, rng = TokenTrie.open(folder / "trie"), np.random.default_rng(4)
    nodes, _ = random_walks(trie, np.random.default_rng(2), 20_000)
    sized = [node for node in dict.fromkeys(nodes) if 90 <= trie.count_at(node) <= 110]
    seconds = []
    for node in sized[:300]:
        question = rng.choice(VOCABULARY, 20).tolist() + [int(token) for token in trie.children(node)[:2]]
        policy = LookAhead(trie, [0], question, separator=VOCABULARY)
        state = replace(policy.start([]), node=node)
        start = time.perf_counter()
        policy.gains(state)
        seconds.append(time.perf_counter() - start)
    return {"median ms": float(np.median(seconds)) * 1e3, "nodes": len(seconds)}


def keys_of(folder: Path):
    """The keys one by one, as lists."""
    tokens, lengths, _ = load(folder)
    ends = np.cumsum(lengths.astype(np.int64))
    for lo, hi in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
        yield tokens[lo:hi].tolist()


def ours_small(folder: Path) -> dict:
    """TokenTrie from the sequences one by one, without values, as the other two are built."""
    from minikid.trie import TokenTrie

    start = time.perf_counter()
    trie = TokenTrie.build(keys_of(folder))
    built = time.perf_counter() - start
    trie.save(folder / "keys")
    _, seconds = random_walks(trie, np.random.default_rng(1), 200)
    return {"build s": built, "MB": on_disk(folder / "keys"), **steps(seconds)}


def dicts(folder: Path) -> dict:
    before, start = None, time.perf_counter()
    root: dict = {}
    for key in keys_of(folder):
        before = before or resident()  # after the triples are loaded
        node = root
        for token in key:
            node = node.setdefault(token, {})
        node[-1] = True
    built, size = time.perf_counter() - start, resident() - before
    rng, seconds = np.random.default_rng(1), []
    for _ in range(200):
        node = root
        while children := [token for token in node if token >= 0]:
            token = children[rng.integers(len(children))]
            start = time.perf_counter()
            node = node[token]
            sorted(node)
            seconds.append(time.perf_counter() - start)
    return {"build s": built, "MB": size, **steps(seconds)}


def marisa(folder: Path) -> dict:
    """marisa-trie over strings, one character per token: it has no nodes, a step lists the keys with the new prefix."""
    if importlib.util.find_spec("marisa_trie") is None:
        return {"note": "marisa-trie is not installed (pip install marisa-trie): left out"}
    import marisa_trie

    start = time.perf_counter()
    trie = marisa_trie.Trie("".join(chr(token + 256) for token in key) for key in keys_of(folder))
    built = time.perf_counter() - start
    trie.save(str(folder / "marisa"))
    rng, seconds = np.random.default_rng(1), []
    for _ in range(20):
        prefix = trie.restore_key(int(rng.integers(len(trie))))[:1]  # not the root, where a step lists all keys
        while children := sorted({key[len(prefix)] for key in trie.iterkeys(prefix) if len(key) > len(prefix)}):
            prefix += children[rng.integers(len(children))]
            start = time.perf_counter()
            sorted({key[len(prefix)] for key in trie.iterkeys(prefix) if len(key) > len(prefix)})
            seconds.append(time.perf_counter() - start)
    size = (folder / "marisa").stat().st_size / 1e6
    return {"build s": built, "MB": size, **steps(seconds)}


PARTS = {f.__name__: f for f in (generate, build, walk, walk_cold, masks, lookahead, ours_small, dicts, marisa)}


def run(part: str, folder: Path, keys: int) -> dict:
    print(f"{part} ...", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder), "--keys", str(keys)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


# --- the table


def show(title: str, heads: list[str], lines: list[list]) -> None:
    """A table in Markdown: numbers to three digits, a dash where there is none."""

    def cell(x: object) -> str:
        if isinstance(x, float):
            return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"
        return "-" if x is None else f"{x:,}" if isinstance(x, int) else str(x)

    print(f"\n{title}\n")
    for line in (heads, ["---"] * len(heads), *lines):
        print("| " + " | ".join(map(cell, line)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keys", type=int, default=20_000_000, help="distinct keys, about")
    parser.add_argument("--folder", type=Path, help="where the triples and tries go (default: a temporary folder)")
    parser.add_argument("--part", choices=PARTS, help="run one part and print its figures as JSON")
    args = parser.parse_args()
    if args.part:
        part = PARTS[args.part]
        print(json.dumps(part(args.folder, args.keys) if part is generate else part(args.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        small = folder / "small"
        small.mkdir(parents=True, exist_ok=True)
        made = run("generate", folder, args.keys)
        parts = ("build", "walk", "walk_cold", "masks", "lookahead")
        B, W, C, M, L = (run(part, folder, args.keys) for part in parts)
        run("generate", small, min(args.keys, SMALL))
        small_runs = {part: run(part, small, args.keys) for part in ("ours_small", "dicts", "marisa")}

    rows = [  # what, measured, target at 20 million keys, released program at 20 million triples
        ("build and save, s", B["build and save s"], 180, 30 * 60),
        ("peak memory of the build, MB", B["peak MB"], 6000, None),
        ("on disk, MB", B["disk MB"], 1500, 1800),
        ("of which values, MB", B["of which values MB"], None, None),
        ("open, ms", W["open ms"], 50, 5 * 60 * 1000),
        (f"resident after {WALKS:,} walks, MB", W["resident MB"], 300, 30_000),
        ("the same, files not in the page cache before, MB", C["resident MB"], 300, 30_000),
        ("resident before opening, MB", W["before MB"], None, None),
        ("a step (advance and children), median, us", W["median us"], 20, None),
        ("the same, 99th percentile, us", W["p99 us"], None, None),
        ("the same, files not in the page cache before, median, us", C["median us"], 20, None),
        *((f"masks of {VOCABULARY:,} tokens, {name}, ms", ms, 1, None) for name, ms in M.items()),
        (f"look-ahead over about 100 completions ({L['nodes']} nodes), median, ms", L["median ms"], 2, None),
    ]
    lines = [[n, x, t, t and t / x, r, r and r / x] for n, x, t, r in rows]
    title = f"{made['triples']:,} triples, {B['keys']:,} distinct keys"
    show(title, ["", "minikid", "target", "target / minikid", "released", "released / minikid"], lines)
    ours = small_runs["ours_small"]
    names = {"ours_small": "TokenTrie", "dicts": "dict of dicts", "marisa": "marisa-trie"}
    lines = [
        [names[part], *(x for key in ("build s", "MB", "median us", "p99 us") for x in (r[key], r[key] / ours[key]))]
        for part, r in small_runs.items()
        if "note" not in r
    ]
    heads = ["", "build, s", "ratio", "size, MB", "ratio", "a step, median, us", "ratio", "p99, us", "ratio"]
    show(f"{min(args.keys, SMALL):,} keys, without values, from sequences one by one", heads, lines)
    for r in small_runs.values():
        print(r.get("note", ""), end="")


if __name__ == "__main__":
    main()
