"""KnowledgeTrie against a slow literal query and depth, its invariants on random triples, and its file."""

import json
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikid.knowledge import FILE, KnowledgeTrie, head_stems
from minikid.text import stem, words
from minikid.triples import Triple

CHAIN = [
    ("Marijuana", "has", "influence of drugs"),
    ("drugs", "impair", "driving ability"),
    ("Driving", "needs", "attention"),
    ("attention", "is hurt by", "marijuana"),
]
WORDS = "driving drives drug drugs car cars cardiologist marijuana ability attention the of in 1995 乌".split()
PHRASES = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)
TRIPLES = st.lists(st.tuples(PHRASES, st.sampled_from(["is", ""]), PHRASES), max_size=12)
CONCEPTS = st.lists(PHRASES, max_size=3)


def literal_query(triples: list[tuple[str, str, str]], concepts: list[str], hops: int) -> list[set[str]]:
    """The query of KID A.2.2 word for word: a dictionary from stems to values, and the keys that were looked up."""
    table: dict[str, list[str]] = {}
    for subject, _, value in triples:
        for key in head_stems(subject):
            table.setdefault(key, []).append(value)
    now = {stem(word) for concept in concepts for word in words(concept)} & set(table)
    now |= {word for concept in concepts for word in words(concept)} & set(table)
    visited: set[str] = set()
    result = []
    for _ in range(hops):
        if not now:
            break
        values = {value for key in now for value in table[key]}
        visited = visited | now
        now = {stem(word) for value in values for word in words(value)} & set(table) - visited
        result.append(values)
    return result


def literal_depth(trie: KnowledgeTrie, key: str, above: frozenset[str] = frozenset()) -> int:
    """Keys on the longest chain of links that repeats no key: exponential, for tiny tries."""
    nexts = {link for _, value in trie.edges(key) for link in trie.mentions(value)} - above - {key}
    return 1 + max((literal_depth(trie, link, above | {key}) for link in nexts), default=0)


@given(TRIPLES, CONCEPTS, st.integers(0, 5))
def test_query_is_the_literal_query(triples, concepts, hops):
    result = KnowledgeTrie.from_triples(triples).query(concepts, hops)
    assert [set(values) for values in result] == literal_query(triples, concepts, hops)
    assert all(len(values) == len(set(values)) for values in result)


@given(TRIPLES)
def test_every_value_is_reached_from_its_subjects_stems_at_hop_1(triples):
    trie = KnowledgeTrie.from_triples(triples)
    for subject, relation, value in triples:
        assert value in trie.query([subject], 1)[0]
        for key in head_stems(subject):
            assert value in trie.query([key], 1)[0]
            assert (relation, value) in trie.edges(key)


@given(TRIPLES, CONCEPTS)
def test_cycles_end_and_no_key_is_looked_up_twice(triples, concepts):
    trie = KnowledgeTrie.from_triples(triples)
    result = trie.query(concepts, 1000)
    assert len(result) <= len(trie)
    looked_up: set[str] = set()
    frontier = {key for concept in concepts for key in trie.mentions(concept)}
    for values in result:
        assert not frontier & looked_up
        assert all(any(value in trie.query([key], 1)[0] for key in frontier) for value in values)
        looked_up |= frontier
        frontier = {key for value in values for key in trie.mentions(value)} - looked_up
    assert not frontier


@given(TRIPLES, st.randoms(use_true_random=False), CONCEPTS)
def test_order_and_repetition_do_not_matter(triples, random, concepts):
    shuffled = [*triples, *triples[:3]]
    random.shuffle(shuffled)
    one, other = KnowledgeTrie.from_triples(triples), KnowledgeTrie.from_triples(iter(shuffled))
    assert one == other
    assert hash(one) == hash(other)
    assert one.query(concepts, 3) == other.query(concepts, 3)
    assert (one.keys(), one.values()) == (other.keys(), other.values())
    assert list(map(one.depth, one.keys())) == list(map(other.depth, other.keys()))


@given(TRIPLES)
def test_depth_bounds_every_query_and_is_exact_without_cycles(triples):
    trie = KnowledgeTrie.from_triples(triples)
    for key in sorted(trie.keys()):
        assert len(trie.query([key], 1000)) <= literal_depth(trie, key) <= trie.depth(key) <= len(trie)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=14))
def test_depth_is_the_longest_chain_where_links_make_no_cycle(pairs):
    names = ["oak", "elm", "fir", "ash", "yew", "lime", "pine"]
    trie = KnowledgeTrie.from_triples((names[min(a, b)], "is", names[max(a, b)]) for a, b in pairs)
    for key in sorted(trie.keys()):
        assert trie.depth(key) == literal_depth(trie, key)


def test_depth_of_a_cycle_counts_its_keys_and_what_follows():
    trie = KnowledgeTrie.from_triples([*CHAIN, ("influence", "is", "power"), ("power", "is", "good")])
    assert trie.depth("power") == 1
    assert trie.depth("influence") == 2
    assert trie.depth("marijuana") == 4 + 2
    assert trie.depth("nothing") == 0


def test_a_long_chain_needs_no_recursion():
    trie = KnowledgeTrie.from_triples((f"node{i}", "then", f"node{i + 1}") for i in range(5000))
    assert trie.depth("node0") == 5000
    assert len(trie.query(["node0"], 10_000)) == 5000


def test_the_papers_walk():
    trie = KnowledgeTrie.from_triples(CHAIN)
    assert trie.query(["marijuana"], 4) == [["influence of drugs"], ["driving ability"], ["attention"], ["marijuana"]]
    assert trie.query(["Driven by drives"], 1) == [["attention"]]
    assert trie.mentions("Does marijuana impair driving? Marijuana!") == ["marijuana", "drive"]
    assert trie.query(["unknown"], 4) == trie.query([], 4) == trie.query(["drug"], 0) == []
    assert "drive" in trie
    assert "driver" not in trie
    assert len(trie) == 4
    assert trie.values() == sorted({end for subject, _, value in CHAIN for end in (subject, value)})


def test_a_key_is_a_whole_word():
    trie = KnowledgeTrie.from_triples([("cardiologist", "treats", "hearts"), ("cars", "have", "wheels")])
    assert trie.query(["car"], 4) == [["wheels"]]
    assert trie.query(["cardio"], 4) == []
    assert trie.mentions("the car of a cardiologist") == ["car", "cardiologist"[:9]]
    assert KnowledgeTrie.from_triples([("cardiologist", "treats", "hearts")]).query(["car", "card"], 4) == []


@pytest.mark.parametrize(
    ("subject", "stems"),
    [
        ("short stay ward", ("short", "stay", "ward")),
        ("the capital of Mongolia", ("capit", "mongolia")),
        ("temple in Jerusalem", ("templ",)),
        ("In Jerusalem", ("jerusalem",)),
        ("1995", ("1995",)),
        ("The Who", ("the", "who")),
        ("50 home run club", ("home", "run", "club")),
    ],
)
def test_keys_are_the_stems_of_the_head_words(subject, stems):
    assert head_stems(subject) == stems


@dataclass
class Page:
    title: str
    text: str


def test_from_text_reads_strings_and_passages():
    text = "Ulaanbaatar is the capital of Mongolia. It lies on the Tuul."
    trie = KnowledgeTrie.from_text([text])
    assert "capital of Mongolia" in trie.query(["Ulaanbaatar"], 1)[0]
    assert "Tuul" in trie.query(["Ulaanbaatar"], 1)[0]
    assert "Ulaanbaatar" in trie.query(["What is the capital of Mongolia?"], 1)[0]
    page = KnowledgeTrie.from_text([Page("Ulaanbaatar", "It is the capital of Mongolia."), Page("", text)])
    assert Triple("Ulaanbaatar", "is", "capital of Mongolia") in page.triples
    assert set(trie.triples) <= set(page.triples)


ANY_TRIPLES = st.lists(
    st.tuples(
        st.text().filter(lambda text: bool(words(text))), st.text(), st.text().filter(lambda text: bool(text.strip()))
    )
)


@given(st.one_of(TRIPLES, ANY_TRIPLES))
def test_saved_and_opened_tries_are_equal(tmp_path_factory, triples):
    folder = tmp_path_factory.mktemp("trie") / "new" / "folder"
    trie = KnowledgeTrie.from_triples(triples)
    trie.save(folder)
    opened = KnowledgeTrie.open(str(folder))
    assert opened == trie
    assert opened.keys() == trie.keys()
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_saving_again_replaces_and_a_failed_save_leaves_the_old_trie(tmp_path, monkeypatch):
    old, new = KnowledgeTrie.from_triples(CHAIN[:1]), KnowledgeTrie.from_triples(CHAIN)
    old.save(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(json, "dump", lambda *arguments: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            new.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert KnowledgeTrie.open(tmp_path) == old != new
    new.save(tmp_path)
    assert KnowledgeTrie.open(tmp_path) == new


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "is damaged"),
        (lambda data: data.replace(b"ability", b"agility"), "checksum"),
        (lambda data: data.replace(b"Trie 1", b"Trie 9"), "not in the format"),
        (lambda data: b"\x80\x04\x95", "is damaged"),
        (lambda data: b"[1, 2]", "not in the format"),
        (lambda data: b"", "is damaged"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused(tmp_path, damage, message):
    KnowledgeTrie.from_triples(CHAIN).save(tmp_path)
    path = tmp_path / FILE
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        KnowledgeTrie.open(tmp_path)


def test_a_folder_without_a_trie_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read .*build the trie again"):
        KnowledgeTrie.open(tmp_path)


@pytest.mark.parametrize("triple", [("!?", "is", "odd"), ("a", "is", " "), ("a", "b"), "abc", ("a", None, "b")])
def test_unusable_triples_are_refused(triple):
    with pytest.raises(ValueError, match=r"expected .*got"):
        KnowledgeTrie.from_triples([triple])


def test_a_string_in_place_of_a_list_is_refused():
    trie = KnowledgeTrie.from_triples(CHAIN)
    with pytest.raises(ValueError, match="list of passages"):
        KnowledgeTrie.from_text("A passage.")
    with pytest.raises(ValueError, match="list of concepts"):
        trie.query("drug", 1)
    with pytest.raises(ValueError, match="hops >= 0, got -1"):
        trie.query(["drug"], -1)


def test_a_few_documents_take_less_than_ten_megabytes(tmp_path):
    sentence = (
        "Drug number{0} impairs the driving ability of group{0}, and it raises the risk of crash number{1} in town{0}."
    )
    passages = [" ".join(sentence.format(i * 10 + j, j) for j in range(10)) for i in range(5)]
    trie = KnowledgeTrie.from_text(passages)
    trie.save(tmp_path)
    assert len(trie.triples) > 200
    assert (tmp_path / FILE).stat().st_size < 10 * 2**20
