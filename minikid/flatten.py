"""Sort keys and lay their prefix tree out in flat arrays, without a Python object per key.

    n  keys given     u  distinct keys     N  cells     F  forks     E  further children     L  tokens of a key

A token is held as its *code*, the token plus one, so that 0 is free to mean END. END sorts before every token, as a
key sorts before the keys that it begins.

The tree is the list of the sorted keys, each closed by END, in which what a key shares with the one before is left out.
What remains is one row of cells. A node is the cell of its own token, and its first child is the next cell. A node with
further children is a *fork*; only forks have a row in a table of compressed sparse rows:

    codes     [N]      the cells; the first one is the root
    ends      [u]      the cells that hold END: the k-th closes the k-th key
    forks     [F]      the nodes with several children
    rows      [F+1]    the further children of forks[f] are rows[f] : rows[f+1] of
    branches  [E]      their codes, sorted, and
    children  [E]      their cells

All below a node lies together, so that a walk touches few pages of a memory map; a chain of single children, as most of
a knowledge base's keys end in, costs its tokens alone.
"""

import numpy as np

END = 0
NARROW = 2**16 - 1  # codes up to here are held in 16 bits
LIMIT = 2**31 - 1  # cells and keys are numbered in 32 bits
CHUNK = 1 << 16  # keys (or values) that are moved at a time: bounds the temporary arrays
SEPARATOR = 0xFF  # between the values of one key: a byte that UTF-8 never contains


def sort_keys(codes: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort keys by their tokens; also say how many tokens each shares with the one before.

    Key i is codes[begins[i] : begins[i] + sizes[i]]. Returns `order` int32 [n] (equal keys in the order of the input)
    and `shared` int32 [n], with -1 for the first. A radix sort from the first token on: each round packs, beside the
    number of the group of keys that are equal so far, as many tokens as fit into 64 bits, and only groups of several
    keys go on to the next round.
    """
    n = len(begins)
    bits = int(codes.max()).bit_length()
    order = np.arange(n, dtype=np.int32)
    shared = np.zeros(n, dtype=np.int32)
    at = np.arange(n, dtype=np.int32)  # the sorted positions that are still in question
    group = np.zeros(n, dtype=np.int32)
    longest, depth = int(sizes.max()), 0
    while len(at):
        width = min((64 - int(group[-1]).bit_length()) // bits, longest + 1 - depth)
        keys = order[at]
        begin, size = begins[keys], sizes[keys]
        word = group.astype(np.uint64)
        for d in range(depth, depth + width):
            word <<= np.uint64(bits)
            word |= np.where(d < size, codes[np.minimum(begin + d, len(codes) - 1)], END).astype(np.uint64)
        rank = np.argsort(word)
        word, size = word[rank], size[rank]
        order[at] = keys[rank]
        del keys, begin, group, rank
        change = word[1:] ^ word[:-1]
        equal = np.full(len(change), depth, dtype=np.int32)
        for k in range(width):
            equal += change >> np.uint64(bits * (width - 1 - k)) == 0
        met = change >> np.uint64(bits * width) == 0  # else they are of two groups, compared in an earlier round
        shared[at[1:][met]] = np.minimum(equal, size[1:])[met]  # equal keys agree in END as well, which is no token
        tie = change == 0
        keep = np.zeros(len(at), dtype=bool)
        keep[1:] = tie
        keep[:-1] |= tie
        keep &= word & np.uint64((1 << bits) - 1) != END
        at = at[keep]
        group = np.concatenate([[0], np.cumsum(~tie, dtype=np.int32)])[keep]
        group = np.cumsum(np.diff(group, prepend=group[:1]) != 0, dtype=np.int32)
        depth += width
    shared[0] = -1
    again = shared == sizes[order]
    tied = np.flatnonzero(again | np.append(again[1:], False))
    order[tied] = order[tied][np.lexsort((order[tied], np.cumsum(~again)[tied]))]
    return order, shared


def nearest_smaller(x: np.ndarray) -> np.ndarray:
    """For each i > 0 the last j < i with x[j] < x[i], by pointer jumping; x[0] must be smaller than all others."""
    left = np.maximum(np.arange(-1, len(x) - 1, dtype=np.int32), 0)
    todo = np.arange(1, len(x), dtype=np.int32)
    while len(todo):
        todo = todo[x[left[todo]] >= x[todo]]
        left[todo] = left[left[todo]]  # all that is jumped over is at least x[left] >= x[todo]
    return left


def lay_out(codes: np.ndarray, begins: np.ndarray, sizes: np.ndarray, shared: np.ndarray) -> dict[str, np.ndarray]:
    """The six arrays of the tree, by name, from distinct sorted keys and what each shares with the one before."""
    u = len(begins)
    added = sizes - shared + 1  # the tokens that are not shared, and END; the first key adds the root as well
    stop = np.cumsum(added, dtype=np.int64)
    N = int(stop[-1])
    if N > LIMIT:
        raise ValueError(f"expected a trie of at most {LIMIT} nodes, these keys need {N}: split them over several")
    start, ends = (stop - added).astype(np.int32), (stop - 1).astype(np.int32)
    del stop

    cells = np.empty(N, dtype=codes.dtype)
    for a in range(0, u, CHUNK):
        part = slice(a, a + CHUNK)
        source = np.repeat(begins[part] + shared[part] - start[part], added[part])
        lo, hi = int(start[a]), int(start[a]) + len(source)
        source += np.arange(lo, hi)
        cells[lo:hi] = codes[np.clip(source, 0, len(codes) - 1)]
    cells[ends] = END
    cells[0] = END  # the root is no token
    del added

    before = nearest_smaller(shared)  # the key that added the node at depth shared[i], where key i leaves its path
    parent = (start[before] + shared - shared[before] - 1)[1:]
    del before
    by_parent = np.argsort(parent, kind="stable")
    parent, children = parent[by_parent], start[1:][by_parent]
    rows = np.append(np.flatnonzero(np.diff(parent, prepend=-1)), u - 1).astype(np.int32)
    arrays = {"codes": cells, "ends": ends, "forks": parent[rows[:-1]], "rows": rows}
    return arrays | {"branches": cells[children], "children": children}


def group_values(order: np.ndarray, again: np.ndarray, text: np.ndarray, sizes: np.ndarray) -> dict[str, np.ndarray]:
    """Values by key: those of key k are values[offsets[k] : offsets[k+1]] (UTF-8), split at SEPARATOR.

    `order` sorts the entries by key, `again` marks those with the key of the entry before; `text` is the bytes of all
    values in the order of the input, `sizes` their lengths. A value that its key already has is dropped.
    """
    ends = np.cumsum(sizes, dtype=np.int64)
    drop = []
    seen: set[bytes] = set()
    for i in np.flatnonzero(again | np.append(again[1:], False)).tolist():
        e = order[i]
        value = text[ends[e] - sizes[e] : ends[e]].tobytes()
        if not again[i]:
            seen = set()
        if value in seen:
            drop.append(i)
        seen.add(value)
    order, new = np.delete(order, drop), np.delete(~again, drop)
    follows = np.append(~new[1:], False)  # another value of the same key comes after
    stops = np.cumsum(sizes[order] + follows, dtype=np.int64)
    total = int(stops[-1])
    offsets = np.append(0, stops[np.append(new[1:], True)]).astype("<u4" if total < 2**32 else "<u8")
    values = np.full(total, SEPARATOR, dtype=np.uint8)
    for a in range(0, len(order), CHUNK):
        part = order[a : a + CHUNK]
        size = sizes[part].astype(np.int64)
        begin = stops[a : a + CHUNK] - size - follows[a : a + CHUNK]
        inside = np.arange(size.sum()) - np.repeat(np.cumsum(size) - size, size)
        values[np.repeat(begin, size) + inside] = text[np.repeat(ends[part] - size, size) + inside]
    return {"offsets": offsets, "values": values}
