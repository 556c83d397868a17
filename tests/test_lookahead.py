"""Constrained and look-ahead decoding against direct, slow definitions on random tries."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model

from minikid.decode import Sampler, beam_search, generate, generate_batch, greedy, lookahead_gains
from minikid.lookahead import Constrained, Coverage, LookAhead
from minikid.trie import TokenTrie

V, END, SEP = 9, 0, 1
TOKEN = st.integers(2, V - 1)
FIELD = st.lists(st.integers(2, 4), max_size=4)  # of few tokens, so that keys fork and gains of 2 and more are common


def join(fields):
    return [2, *(token for i, field in enumerate(fields) for token in ([SEP] if i else []) + field)]


KEYS = st.lists(st.lists(FIELD, min_size=2, max_size=3).map(join), min_size=1, max_size=8)
FORKED = st.builds(  # some fields, of which all combinations are keys: forks at every place
    lambda *fields: [join(key) for key in itertools.product(*fields)],
    st.lists(FIELD, min_size=1, max_size=2),
    *[st.lists(FIELD, min_size=1, max_size=6)] * 2,
)
LOGITS = st.lists(st.floats(-5, 5), min_size=V, max_size=V)


def lcs(a, b):
    """By recursion over the last tokens."""
    if not a or not b:
        return 0
    if a[-1] == b[-1]:
        return lcs(a[:-1], b[:-1]) + 1
    return max(lcs(a[:-1], b), lcs(a, b[:-1]))


def allowed(keys, prefix):
    """Tokens that continue the prefix to a key, END where it is one."""
    longer = {key[len(prefix)] for key in keys if key[: len(prefix)] == prefix and len(key) > len(prefix)}
    return longer | ({END} if prefix in keys else set())


def constrained(keys, prefix, p):
    """The distribution renormalised over the allowed tokens, by plain division."""
    inside = allowed(keys, prefix)
    total = sum(p[token] for token in inside)
    return [p[token] / total if token in inside else 0.0 for token in range(V)]


@given(KEYS, LOGITS, st.data())
@settings(deadline=None)
def test_the_constraint_is_renormalisation_over_the_children(keys, logits, data):
    key = data.draw(st.sampled_from(keys))
    prefix = key[: data.draw(st.integers(0, len(key)))]
    policy = Constrained(TokenTrie.build(keys), [END])
    log_pi = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    log_p, state = policy(log_pi, prefix, policy.start([5]))
    expected = torch.tensor(constrained(keys, prefix, log_pi.exp().tolist()), dtype=torch.float64)
    assert (log_p.exp() - expected).abs().max() < 1e-9
    assert state.seen == len(prefix)
    state = policy.start([5])
    for end in range(len(prefix) + 1):  # token by token, from the cursor
        again, state = policy(log_pi, prefix[:end], state)
    assert torch.equal(again, log_p)


@given(st.lists(TOKEN, max_size=7), st.lists(TOKEN, max_size=7))
@settings(deadline=None)
def test_bit_rows_are_lcs_lengths(sequence, question):
    coverage = Coverage(question)
    row = coverage.start
    for end in range(len(sequence) + 1):
        assert coverage.length(row) == lcs(sequence[:end], question)
        row = coverage.extend(row, sequence[end]) if end < len(sequence) else row


def look_ahead_cases():
    """Keys and a prefix of one, most often one where the keys fork in the field that is looked ahead in."""

    def prefixes(keys, field):
        every = sorted({tuple(key[:end]) for key in keys for end in range(len(key) + 1)})
        forks = [p for p in every if p.count(SEP) == field and len(allowed(keys, list(p))) > 1]
        return st.one_of(st.sampled_from(forks or every), st.sampled_from(forks or every), st.sampled_from(every))

    return st.tuples(KEYS | FORKED, st.sampled_from([1, 2])).flatmap(
        lambda case: st.tuples(st.just(case[0]), st.just(case[1]), prefixes(*case).map(list))
    )


@given(st.lists(TOKEN, max_size=7), st.lists(TOKEN, max_size=7))
@settings(deadline=None)
def test_tokens_alike_count_as_one(sequence, question):
    """4 in the question is met by 4 and by 5: as if both were one token, where no other 5 is in the question."""
    question = [4 if token == 5 else token for token in question]
    coverage = Coverage(question, {4: 5, 8: 8})
    row = coverage.start
    for token in sequence:
        row = coverage.extend(row, token)
    assert coverage.length(row) == lcs([4 if token == 5 else token for token in sequence], question)


@given(look_ahead_cases(), st.lists(st.integers(2, 5), max_size=8), LOGITS, st.booleans())
@settings(deadline=None, max_examples=300)
def test_look_ahead_equals_the_direct_definition(case, question, logits, whole):
    """Every completion enumerated, every LCS from the beginning."""
    keys, field, prefix = case
    policy = LookAhead(TokenTrie.build(keys), [END], question, SEP, field=field, whole=whole)
    log_pi = torch.tensor(logits, dtype=torch.float64).log_softmax(0)
    log_p, _ = policy(log_pi, prefix, policy.start([5]))
    state = policy.start([5])
    for end in range(len(prefix) + 1):  # token by token: the cursor and the row of the prefix are carried on
        again, state = policy(log_pi, prefix[:end], state)
    assert torch.equal(again, log_p)
    p = constrained(keys, prefix, log_pi.exp().tolist())
    if prefix.count(SEP) == field and sum(x > 0 for x in p) > 1:
        begin = 0 if whole else len(prefix) - prefix[::-1].index(SEP)
        written = [token for token in prefix[begin:] if token != SEP]
        gain = dict.fromkeys(allowed(keys, prefix), 0)
        for k in keys:
            if k[: len(prefix)] == prefix and len(k) > len(prefix) and k[len(prefix)] != SEP:
                rest = k[len(prefix) :]
                rest = rest[: rest.index(SEP)] if SEP in rest else rest
                value = lookahead_gains([written + rest], written, question)[0]
                assert value == lcs(written + rest, question) - lcs(written, question) >= 0
                gain[rest[0]] = max(gain[rest[0]], value)
        p = [x ** (1 / (gain[token] + 1)) if x else 0.0 for token, x in enumerate(p)]
        p = [x / sum(p) for x in p]
    assert (log_p.exp() - torch.tensor(p, dtype=torch.float64)).abs().max() < 1e-9


def test_the_articles_kind_of_mistake_is_mended():
    """The model prefers predicate 5 5; the question names 6 7, which 6 begins."""
    keys = [[2, SEP, 5, 5], [2, SEP, 6, 7], [2, SEP, 6, 3]]
    log_pi = torch.tensor([0.1, 0.1, 0.1, 0.1, 0.1, 0.30, 0.05, 0.1, 0.05]).log()
    question = [2, 4, 6, 7]
    plain = Constrained(TokenTrie.build(keys), [END])
    ahead = LookAhead(TokenTrie.build(keys), [END], question, SEP)
    assert plain(log_pi, [2, SEP], plain.start([]))[0].argmax() == 5
    log_p = ahead(log_pi, [2, SEP], ahead.start([]))[0]
    raised = [6 / 7, (1 / 7) ** (1 / 3)]
    assert log_p[[5, 6]].exp().tolist() == pytest.approx([x / sum(raised) for x in raised], abs=1e-6)
    assert lookahead_gains([[6, 7], [6, 3], [6]], [6], question) == [1, 0, 0]


@given(KEYS, st.lists(TOKEN, max_size=6), st.booleans())
@settings(deadline=None, max_examples=10)
def test_beams_are_the_best_keys_in_order(keys, question, ahead):
    """With as many beams as there are keys the search is exhaustive: distinct, finite, sorted, each with its cursor."""
    model, trie = tiny_model(V), TokenTrie.build(keys)
    distinct = [list(key) for key in dict.fromkeys(map(tuple, keys))]
    policy = LookAhead(trie, [END], question, SEP) if ahead else Constrained(trie, [END])
    found = beam_search(model, [3, 4], policy, 30, max_new_tokens=20, eos_ids=[END], length_penalty=0.0)
    finished = [row for row in found if row.stop == "eos"]
    scores = {}
    for key in distinct:
        total, state = 0.0, policy.start([3, 4])
        for end, token in enumerate([*key, END]):
            log_pi = model(torch.tensor([[3, 4, *key[:end]]]))[0, -1].log_softmax(0)
            log_p, state = policy(log_pi, key[:end], state)
            total += float(log_p[token])
        scores[tuple(key)] = total
    assert sorted(map(tuple, (row.tokens for row in finished))) == sorted(scores)
    order = [scores[tuple(row.tokens)] for row in finished]
    assert order == pytest.approx([row.score for row in finished])
    assert order == sorted(order, reverse=True)
    assert all(map(math.isfinite, order))
    for row in finished:  # the state behind a token is that before it: its own path, whatever the other beams did
        assert [state.node for state in row.states] == [trie.find(row.tokens[:i]) for i in range(len(row.tokens))]


def test_several_eos_ids_keep_their_proportions():
    policy = Constrained(TokenTrie.build([[2], [2, 3]]), [0, 7, 0])
    log_pi = torch.arange(1.0, V + 1, dtype=torch.float64).log().log_softmax(0)
    p = policy(log_pi, [2], policy.start([]))[0].exp()
    assert p[[0, 3, 7]].tolist() == pytest.approx([1 / 13, 4 / 13, 8 / 13], abs=1e-12)
    assert p.sum() == pytest.approx(1)


def test_sampling_draws_the_renormalised_distribution():
    """Whole keys on a toy trie: frequencies of 1000 samples against the products of brute-force renormalised steps."""
    model, keys = tiny_model(V), [[2, 3], [2, 3, 4], [2, 5], [6]]
    policy = Constrained(TokenTrie.build(keys), [END])
    exact = {}
    for key in keys:
        p = 1.0
        for end, token in enumerate([*key, END]):
            pi = model(torch.tensor([[7, *key[:end]]]))[0, -1].softmax(0).tolist()
            p *= constrained(keys, key[:end], pi)[token]
        exact[tuple(key)] = p
    assert sum(exact.values()) == pytest.approx(1)
    n, generator = 1000, torch.Generator().manual_seed(0)
    rows = generate_batch(
        model, [[7]] * n, [policy] * n, Sampler(), max_new_tokens=5, eos_ids=[END], generators=[generator] * n
    )
    counts = Counter(tuple(row.tokens) for row in rows)
    assert counts.keys() <= exact.keys()
    for key, p in exact.items():
        assert abs(counts[key] / n - p) < 4 * math.sqrt(p * (1 - p) / n) + 1e-9


def test_greedy_ends_in_a_key():
    keys = [[2, SEP, 4], [2, SEP, 4, 5], [3, SEP, 6, 7]]
    for policy in (Constrained(TokenTrie.build(keys), [END]), LookAhead(TokenTrie.build(keys), [END], [6, 7], SEP)):
        row = generate(tiny_model(V), [8], policy, greedy, max_new_tokens=9, eos_ids=[END])
        assert row.tokens in keys
        assert row.stop == "eos"


def test_errors():
    trie = TokenTrie.build([[2, 3]])
    policy = Constrained(trie, [END])
    log_pi = torch.zeros(V).log_softmax(0)
    with pytest.raises(ValueError, match="4"):
        policy(log_pi, [4], policy.start([]))
    masked = log_pi.clone()
    masked[2] = -math.inf
    with pytest.raises(ValueError, match=r"all 1 continuations that the trie allows after \[\] have probability 0"):
        policy(masked, [], policy.start([]))
    with pytest.raises(ValueError, match="vocabulary has 2: it was built with another tokenizer"):
        policy(torch.zeros(2), [], policy.start([]))
    with pytest.raises(ValueError, match=r"keys without the eos ids \[3\], but one goes on with 3 after \[2\]"):
        Constrained(trie, [3])(log_pi, [2], policy.start([]))
    with pytest.raises(ValueError, match="at least one eos id"):
        Constrained(trie, [])
    with pytest.raises(ValueError, match="begin with the prefix"):
        lookahead_gains([[1, 2], [2, 2]], [1], [1])
