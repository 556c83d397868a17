"""KID's demonstrations against a literal reading of their definition, and the policies' bookkeeping."""

import copy
import math
from itertools import takewhile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer

from minikid.decode import KID, LittleKID, Update
from minikid.kid import exact_policy, kl_divergence, solve_beta
from minikid.knowledge import KnowledgeTrie
from minikid.text import words

OPENING = " \t\n([{\"'“‘-–—/"  # behind these a value is spelt without a space of its own
NAMES = ["Mongolia", "Mongol", "Tuul", "river", "Ulaanbaatar", "car", "1990"]
VALUES = [
    *NAMES,
    "Ulaanbaatar on the Tuul",
    "the Tuul river",
    "19",
    "1991",
    "日本の首都",
    "café (1990)",
    "Ulan Ude",
    "🙂",
]
INNER = ("1990", "19", "1991", "the Tuul river", "🙂")  # values that begin with a number, a stopword, or no word
RELATIONS = ["is", "has", "related to"]
TRIPLES = st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(RELATIONS), st.sampled_from(VALUES)), max_size=8)
TOKENIZER = byte_tokenizer()
SIZE = TOKENIZER.vocab_size
PLAIN = torch.zeros(SIZE)


@st.composite
def texts(draw, max_parts=6):
    """Token lists that stray in and out of values: whole ones, beginnings, other tokens, in both spellings."""
    tokens = []
    for _ in range(draw(st.integers(0, max_parts))):
        path = TOKENIZER.encode(
            draw(st.sampled_from(["", " ", "(", " 2"])) + draw(st.sampled_from([*VALUES, "river has", "Tuul is"]))
        )
        tokens += path[: draw(st.integers(0, len(path)))]
        tokens += draw(st.lists(st.sampled_from(TOKENIZER.encode(" is. 0a")), max_size=2))
    return tokens


def complete(text):
    """The words that no letter or digit behind the text could change."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(words(text + "x"), words(text + "0"), strict=False))
    return [word for word, _ in pairs]


class Literal:
    """Section 3.3 read to the letter: every text is decoded anew, every sublist compared."""

    def __init__(self, knowledge, question, prompt, hops, window):
        self.knowledge, self.question, self.prompt = knowledge, question, TOKENIZER.decode(prompt)
        self.hops, self.window = hops, window

    def text(self, tokens):
        return self.prompt + TOKENIZER.decode(tokens)

    def concepts(self, tokens):
        """FIFO of the last w_max mentions: the question's, then those of the words that are complete."""
        new = complete(self.text(tokens))[len(complete(self.prompt)) :]
        memory = []
        for key in [
            *self.knowledge.mentions(self.question),
            *(k for word in new for k in self.knowledge.mentions(word)),
        ]:
            if key not in memory:
                memory = [*memory, key][-self.window :]
        return memory

    def spellings(self, value, tokens, start):
        """The paths of a value that begins behind `tokens[:start]`."""
        paths = [TOKENIZER.encode(" " + value)]
        before = self.text(tokens[:start])
        if not before or before[-1] in OPENING:
            paths.append(TOKENIZER.encode(value))
        return paths

    def completed(self, value, tokens):
        return any(
            tokens[i : i + len(path)] == path for i in range(len(tokens)) for path in self.spellings(value, tokens, i)
        )

    def led_to(self, value, suffix):
        """What follows the suffix on the way "subject relation value": the relation behind two tokens of the subject,
        or its only one; the value's first token behind any three.
        """
        found, first = set(), TOKENIZER.encode(" " + value)[0]
        ways = [(s, r, True) for s, r, o in self.knowledge.triples if o == value]
        ways += [
            (o, r, False) for s, r, o in self.knowledge.triples if s == value and r in ("is", "are", "was", "were")
        ]
        for subject, relation, forward in ways:
            way, n = [*TOKENIZER.encode(f" {subject} {relation}"), first], len(TOKENIZER.encode(f" {subject}"))
            for end in range(1, len(way)):
                start = end - len(suffix)
                if start >= 0 and way[start:end] == suffix:
                    from_subject = forward and relation != "related to" and end >= n and n - start >= min(2, n)
                    if from_subject or (end == len(way) - 1 and len(suffix) >= 3):
                        found.add(way[end])
        return found

    def edge(self, tokens):
        return self.path(tokens, edges=True)

    def path(self, tokens, edges=False):
        """n_v counts the hops whose set of tokens has v."""
        demonstrations = self.knowledge.query(self.concepts(tokens), self.hops)
        for start in range(len(tokens)):  # the longest suffix first
            suffix = tokens[start:]
            sets = [
                {
                    path[len(suffix)]
                    for value in values
                    if not (edges and self.completed(value, tokens))
                    for path in self.spellings(value, tokens, start)
                    if path[: len(suffix)] == suffix and len(path) > len(suffix)
                }
                | {
                    token
                    for value in values
                    if edges and not self.completed(value, tokens)
                    for token in self.led_to(value, suffix)
                }
                for values in demonstrations
            ]
            if any(sets):
                return self.counts(sets)
        here = self.text(tokens)[-1:]
        space = "" if not here or here in OPENING else " "
        return self.counts(
            {
                TOKENIZER.encode(space + value)[0]
                for value in values
                if not self.completed(value, tokens) and not (edges and value in INNER)
            }
            for values in demonstrations
        )

    def bag(self, tokens):
        demonstrations = self.knowledge.query(self.concepts(tokens), self.hops)
        return self.counts(
            {token for value in values for token in TOKENIZER.encode(" " + value)} for values in demonstrations
        )

    def counts(self, sets):
        n = torch.zeros(SIZE)
        for tokens in sets:
            for token in tokens:
                n[token] += 1
        return n


@pytest.mark.parametrize("form", ["edge", "path", "bag"])
@given(
    triples=TRIPLES,
    tokens=texts(),
    prompt=st.sampled_from(["Where is Mongolia?\n", "Tell of the Tuul", "("]),
    hops=st.integers(1, 3),
    window=st.integers(1, 3),
)
@settings(deadline=None, max_examples=150)
def test_demonstrations_equal_the_literal_definition(form, triples, tokens, prompt, hops, window):
    knowledge, ids = KnowledgeTrie.from_triples(triples), TOKENIZER.encode(prompt)
    policy = KID(knowledge, TOKENIZER, demonstrations=form, hops=hops, window=window)
    literal = Literal(knowledge, prompt, ids, hops, window)
    state = policy.start(ids)
    for end in range(len(tokens) + 1):
        state, counts = policy.demonstrate(tokens[:end], state, PLAIN)
        if TOKENIZER.decode(tokens[:end]).endswith("\ufffd"):
            continue  # within a character nothing new is read, and the literal form has no say
        assert torch.equal(counts, getattr(literal, form)(tokens[:end]))
        assert state.demonstrations == set(counts.nonzero().flatten().tolist())


@given(TRIPLES, texts(), st.data())
@settings(deadline=None)
def test_tokens_taken_in_at_once_or_one_by_one(triples, tokens, data):
    policy = KID(KnowledgeTrie.from_triples(triples), TOKENIZER, question="Mongolia")
    first = policy.start(TOKENIZER.encode("Say"))
    cut = data.draw(st.integers(0, len(tokens)))
    halves, _ = policy.demonstrate(tokens[:cut], first, PLAIN)
    halves, counts = policy.demonstrate(tokens, halves, PLAIN)
    state = first
    for end in range(1, len(tokens) + 1):
        state, _ = policy.demonstrate(tokens[:end], state, PLAIN)
    state, expected = policy.demonstrate(tokens, state, PLAIN)
    assert state == halves
    assert torch.equal(counts, expected)


def test_an_edge_demonstrates_its_own_value():
    """Behind "capital of Mongolia is" the capital alone, whatever else is known; "is" is read both ways."""
    triples = [("Mongolia", "has", "capital"), ("Mongolia", "has", "river"), ("Mongolia", "related to", "Ulaanbaatar")]
    for fact in (("capital of Mongolia", "is", "Ulaanbaatar"), ("Ulaanbaatar", "is", "capital of Mongolia")):
        knowledge = KnowledgeTrie.from_triples([*triples, fact])
        texts = {" The capital of Mongolia is": True, " The capital": False}
        for text, alone in texts.items():
            tokens = TOKENIZER.encode(text)
            policy = KID(knowledge, TOKENIZER, demonstrations="edge", question="Mongolia?")
            _, counts = policy.demonstrate(tokens, policy.start(TOKENIZER.encode("Q:")), PLAIN)
            assert (counts.nonzero().flatten().tolist() == TOKENIZER.encode(" Ulaanbaatar")[:1]) == alone


@given(texts(), st.integers(1, 40), st.integers(0, 10**6))
@settings(deadline=None)
def test_reach_bounds_beginnings_alone(tokens, reach, seed):
    """Within a value nothing is left out; else D is what it would be, less what pi finds improbable."""
    knowledge = KnowledgeTrie.from_triples([("Mongolia", "is", value) for value in VALUES])
    log_pi = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).log_softmax(0)
    free, bounded = (KID(knowledge, TOKENIZER, question="Mongolia", reach=n) for n in (0, reach))
    state, counts = free.demonstrate(tokens, free.start(TOKENIZER.encode("Say")), log_pi)
    _, kept = bounded.demonstrate(tokens, bounded.start(TOKENIZER.encode("Say")), log_pi)
    inside = bool(state.paths.inside(tokens, state.bare))
    near = torch.zeros(SIZE).index_fill(0, log_pi.topk(reach).indices, 1)
    assert torch.equal(kept, counts if inside else counts * near)


def after(policy, text, prompt="Q:\n"):
    """What the policy demonstrates behind a text whose tokens follow the canonical spelling."""
    state, tokens = policy.start(TOKENIZER.encode(prompt)), TOKENIZER.encode(text)
    for end in range(len(tokens) + 1):
        state, counts = policy.demonstrate(tokens[:end], state, PLAIN)
    return {TOKENIZER.decode([i]): int(counts[i]) for i in counts.nonzero().flatten().tolist()}


def test_after_ul_only_what_continues_ulaanbaatar():
    """The word's tokens in turn, then nothing of it any more; after a bracket the word without its space."""
    knowledge = KnowledgeTrie.from_triples([("Mongolia", "capital", "Ulaanbaatar"), ("Mongolia", "river", "Tuul")])
    policy = KID(knowledge, TOKENIZER, question="What is the capital of Mongolia?")
    tokens = TOKENIZER.encode(" Ulaanbaatar")
    assert len(tokens) > 2
    state = policy.start(TOKENIZER.encode("It is"))
    firsts = {tokens[0], TOKENIZER.encode(" Tuul")[0]}
    for end, expected in enumerate([firsts, *[{token} for token in tokens[1:]], {TOKENIZER.encode(" Tuul")[0]}]):
        state, counts = policy.demonstrate(tokens[:end], state, PLAIN)
        assert set(counts.nonzero().flatten().tolist()) == expected
        assert counts.max() == 1
    bare = TOKENIZER.encode("Ulaanbaatar")
    assert bare[0] != tokens[0]
    state, counts = policy.demonstrate([], policy.start(TOKENIZER.encode("It is (")), PLAIN)
    assert counts[bare[0]] == 1
    assert counts[tokens[0]] == 0
    state, counts = policy.demonstrate(bare[:1], state, PLAIN)
    assert counts.nonzero().flatten().tolist() == [bare[1]]


def test_digits_within_another_number_are_no_value():
    """The bare spelling "1990" begins behind a space or a bracket of the text, not inside "2011" or "21990"."""
    policy = KID(KnowledgeTrie.from_triples([("war", "year", "1990")]), TOKENIZER, question="war")
    inside = after(policy, "in 201")
    assert "9" not in inside
    assert inside == after(policy, "in 202")
    assert after(policy, "in (1") == {"9": 1}
    assert after(policy, "in (1990 and") == {}
    assert after(policy, "in (21990 and") != {}


def test_a_value_that_the_text_has_before_it_is_known_is_complete():
    knowledge = KnowledgeTrie.from_triples([("Mongolia", "capital", "Ulaanbaatar")])
    assert after(KID(knowledge, TOKENIZER, question="?"), "Say Ulaanbaatar of Mongolia. ") == {}
    assert len(after(KID(knowledge, TOKENIZER, question="?"), "Say the river of Mongolia. ")) == 1


def test_a_mention_counts_when_its_word_is_complete():
    """ "Mongol" is a key, but the text goes on to "Mongolian"; the word of the prompt may go on as well."""
    knowledge = KnowledgeTrie.from_triples([("Mongol", "is", "rider"), ("Tuul", "is", "river"), ("car", "is", "slow")])
    policy = KID(knowledge, TOKENIZER, question="?")
    for prompt, pieces in (("A\n", ["A", " Mong", "ol", "i", "a", " and"]), ("The Mong", ["oli", "a", " and"])):
        tokens, state = [], policy.start(TOKENIZER.encode(prompt))
        for piece in pieces:
            tokens += TOKENIZER.encode(piece)
            state, _ = policy.demonstrate(tokens, state, PLAIN)
            assert state.memory.concepts == ()
    tokens, state = [], policy.start(TOKENIZER.encode("The Tu"))
    for piece, expected in (("ul", ()), (" Mongol", ("tuul",)), (".", ("tuul",)), (" A", ("tuul", "mongol"))):
        tokens += TOKENIZER.encode(piece)
        state, _ = policy.demonstrate(tokens, state, PLAIN)
        assert state.memory.concepts == expected


def test_the_question_fills_the_memory():
    knowledge = KnowledgeTrie.from_triples([(name, "is", "x") for name in ("Tuul", "river", "car")])
    prompt = TOKENIZER.encode("the river, the Tuul and the car")
    assert KID(knowledge, TOKENIZER).start(prompt).memory.concepts == ("river", "tuul", "car")
    assert KID(knowledge, TOKENIZER, window=2).start(prompt).memory.concepts == ("tuul", "car")
    assert KID(knowledge, TOKENIZER, question="A car?").start(prompt).memory.concepts == ("car",)


def test_hops_add_up():
    """A value of two hops counts twice, and hop 2 is not there with h_max = 1."""
    knowledge = KnowledgeTrie.from_triples([("car", "on", "river"), ("river", "has", "river"), ("river", "is", "café")])
    for form in ("path", "bag"):
        two = after(KID(knowledge, TOKENIZER, demonstrations=form, question="car", hops=2), "so")
        one = after(KID(knowledge, TOKENIZER, demonstrations=form, question="car", hops=1), "so")
        token = TOKENIZER.decode(TOKENIZER.encode(" river")[:1])
        assert (one[token], two[token]) == (1, 2)
        assert len(two) > len(one)


@given(triples=TRIPLES, tokens=texts(), seed=st.integers(0, 999), rule=st.sampled_from(["solve", "adapt", "fixed"]))
@settings(deadline=None, max_examples=50)
def test_policies_are_pure(triples, tokens, seed, rule):
    """The same call twice gives the same, and neither the state nor pi nor the tokens change."""
    knowledge = KnowledgeTrie.from_triples(triples)
    log_pi = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)).log_softmax(0)
    for policy in (KID(knowledge, TOKENIZER, Update(rule=rule)), LittleKID(knowledge, TOKENIZER, Update(rule=rule))):
        state = policy.start(TOKENIZER.encode("Where is Mongolia?"))
        _, state = policy(log_pi, tokens[:2], state)
        kept, pi = copy.deepcopy((state, tokens)), log_pi.clone()
        first, after_first = policy(log_pi, tokens, state)
        second, after_second = policy(log_pi, tokens, state)
        assert torch.equal(first, second)
        assert after_first == after_second
        assert (state, tokens) == kept
        assert torch.equal(log_pi, pi)
        assert float(first.exp().sum()) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("rule", ["solve", "adapt", "fixed"])
@pytest.mark.parametrize("optimiser", ["exact", "adam"])
@given(beta=st.floats(1e-3, 1e3))
@settings(deadline=None, max_examples=10)
def test_a_step_without_demonstrations_leaves_pi_and_beta(rule, optimiser, beta):
    log_pi = torch.linspace(0, 1, SIZE).log_softmax(0)
    update = Update(rule=rule, optimiser=optimiser)
    log_p, kl, after_beta = update(log_pi, torch.zeros(SIZE), beta)
    assert torch.equal(log_p, log_pi)
    assert (kl, after_beta) == (0.0, beta)
    policy = KID(KnowledgeTrie(), TOKENIZER, Update(rule=rule, optimiser=optimiser, beta=beta))
    log_p, state = policy(log_pi, [5], policy.start([7]))
    assert torch.equal(log_p, log_pi)
    assert (state.beta, state.kl, state.demonstrations) == (beta, 0.0, frozenset())


@pytest.mark.parametrize("reward", ["sum-log", "log-sum"])
def test_the_rules_of_beta(reward):
    log_pi = torch.linspace(0, 3, SIZE, dtype=torch.float64).log_softmax(0)
    counts = torch.zeros(SIZE, dtype=torch.float64)
    counts[:9] = 1
    log_p, kl, beta = Update(reward, rule="solve", sigma=0.1, beta=5.0)(log_pi, counts, 5.0)
    assert kl == pytest.approx(0.1, abs=1e-6)
    assert beta == solve_beta(log_pi, counts, 0.1, reward)
    assert kl == kl_divergence(log_pi, log_p)
    for start, factor in ((1e-2, 2.0), (900.0, 0.5)):  # far too much, far too little
        log_p, kl, beta = Update(reward, rule="adapt")(log_pi, counts, start)
        assert torch.equal(log_p, exact_policy(log_pi, counts, start, reward))
        assert beta == factor * start
    assert Update(reward, rule="fixed")(log_pi, counts, 0.3)[2] == 0.3


def test_kid_applies_its_update_to_its_demonstrations():
    knowledge = KnowledgeTrie.from_triples([("Mongolia", "capital", "Ulaanbaatar"), ("Mongolia", "is", "cold")])
    log_pi = torch.linspace(0, 3, SIZE).log_softmax(0)
    update = Update("sum-log", rule="adapt", beta=2.0)
    policy = KID(knowledge, TOKENIZER, update, question="Mongolia")
    state = policy.start(TOKENIZER.encode("It is"))
    _, counts = policy.demonstrate([], state, log_pi)
    log_p, after_state = policy(log_pi, [], state)
    expected, kl, beta = update(log_pi, counts, 2.0)
    assert counts.sum() == 2
    assert torch.equal(log_p, expected)
    assert (after_state.kl, after_state.beta) == (kl, beta)
    assert kl > 0
    assert beta != 2.0


@given(TRIPLES, texts())
@settings(deadline=None, max_examples=50)
def test_little_kid_demonstrates_one_constant_list(triples, tokens):
    """The tokens of all end nodes, subjects and objects, whatever the text says."""
    knowledge = KnowledgeTrie.from_triples(triples)
    policy = LittleKID(knowledge, TOKENIZER, Update(rule="fixed", beta=0.5))
    nodes = {node for subject, _, value in triples for node in (subject, value)}
    counts = torch.zeros(SIZE)
    for node in nodes:
        counts[TOKENIZER.encode(" " + node)] = 1
    log_pi = torch.linspace(0, 3, SIZE).log_softmax(0)
    expected = exact_policy(log_pi, counts, 0.5, "log-sum")
    state = policy.start(TOKENIZER.encode("Where is Mongolia?"))
    for end in (0, 1, len(tokens)):
        log_p, state = policy(log_pi, tokens[:end], state)
        assert torch.equal(log_p, expected)
        assert state.demonstrations == set(counts.nonzero().flatten().tolist())


def test_bad_arguments():
    knowledge = KnowledgeTrie()
    with pytest.raises(ValueError, match="demonstrations 'edge', 'path' or 'bag', got 'tree'"):
        KID(knowledge, TOKENIZER, demonstrations="tree")
    with pytest.raises(ValueError, match=r"hops \(h_max\) and window \(w_max\) from 1"):
        KID(knowledge, TOKENIZER, hops=0)
    with pytest.raises(ValueError, match=r"hops \(h_max\) and window \(w_max\) from 1"):
        KID(knowledge, TOKENIZER, window=0)
    with pytest.raises(ValueError, match="reach from 0"):
        KID(knowledge, TOKENIZER, reach=-1)
    for bad in ({"reward": "sum"}, {"optimiser": "cache"}, {"rule": "double"}):
        with pytest.raises(ValueError, match=f"expected {next(iter(bad))} to be one of"):
            Update(**bad)
    for bad in ({"sigma": 0.0}, {"beta": -1.0}, {"steps": 0}, {"lr": 0.0}, {"sigma": math.nan}):
        with pytest.raises(ValueError, match="above 0 and at least one step"):
            Update(**bad)
