"""Rethinking with retrieval: reading paths, faithfulness by hand, the vote against brute force, evidence, variants."""

import json
import math
from zlib import crc32

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_encoder import save, sentence_transformer
from tiny import TEMPLATE, byte_tokenizer, tiny_model, write_folder
from transformers import BertModel

import evaluate
import generate
from minikid import chain, templates
from minikid.chain import Demonstration, accuracy, cot_prompt, normalise, parse, read_demonstrations
from minikid.decode import Sampler
from minikid.factgen import entities, generate_facts, restate
from minikid.model import load
from minikid.passages import Passage
from minikid.rethink import Evidence, Fact, cluster, faithfulness, majority, rethink, select_facts, vote
from minikid.rethinker import Rethinker, as_record, as_text
from minikid.retrieve import BM25
from minikid.text import words

# The paper's running example: what three paths say about Aristotle and the laptop.
ARISTOTLE = Passage("1", "Aristotle", "Aristotle, who lived from 384 to 322 BC, was a philosopher of ancient Greece.")
LAPTOP = Passage("2", "Epson HX-20", "The Epson HX-20 of 1980 counts as the first laptop computer.")
DIED_WRONG, DIED = "Aristotle died in 2000.", "Aristotle died in 322 BC."
FIRST, FIRST_WRONG = "The first laptop was invented in 1980.", "The first laptop was invented in 2000."
SCORES = {  # M, E, C; chosen so that every threshold divides them
    DIED_WRONG: (0.7, 0.05, 0.995),
    DIED: (0.8, 0.9, 0.02),
    FIRST: (0.4, 0.7, 0.1),
    FIRST_WRONG: (0.45, 0.3, 0.6),
}
PATHS = [
    f"{DIED_WRONG} {FIRST} Thus, Aristotle used a laptop. So the answer is yes.",
    f"{DIED} {FIRST_WRONG} Thus, Aristotle did not use a laptop. So the answer is no.",
    f"{DIED} {FIRST} Thus, Aristotle did not use a laptop. So the answer is no.",
]
VECTORS = {DIED_WRONG: (1, 0.1, 0), DIED: (1, 0, 0.1), FIRST: (0, 1, 0.1), FIRST_WRONG: (0.1, 1, 0)}
BY_HAND = {1: [0.305, 0.48, 1.38], 2: [1.85, 2.45, 2.8], 3: [-0.295, 0.9, 1.6]}


def judge(facts):
    return [Fact(fact, ARISTOTLE if "Aristotle" in fact else LAPTOP, *SCORES[fact]) for fact in facts]


def encode(texts):
    vectors = np.array([VECTORS[text] for text in texts], float)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


# --- paths


@pytest.mark.parametrize(
    ("text", "facts", "answer"),
    [
        (PATHS[0], (DIED_WRONG, FIRST), "yes"),
        (
            "A. is a letter. So the answer is no. Wait, it is. The answer is yes",
            ("A. is a letter.", "Wait, it is."),
            "yes",
        ),
        ("It fell in 1990. Therefore, the answer is: 1990.", ("It fell in 1990.",), "1990"),
        ("Yes, it can. Water is wet. Thus, no.", ("Water is wet.",), "no"),
        ("So far, nobody knows. Is it so? So it is.", ("So far, nobody knows.",), None),
        ("The answer to this question is George H. W. Bush.", (), "George H. W. Bush"),
        ("The answer is.", (), None),
        ("", (), None),
        ("...", (), None),
    ],
)
def test_paths_are_read_into_facts_and_the_last_answer(text, facts, answer):
    assert parse(text)[1:] == (facts, answer)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1990.", "1990", True),
        ("The U.S.", "US", True),
        ("1,990 metres", "1990 Metres", True),
        ("Yes, because he lived", "yes", True),
        ("no (it did not)", "No!", True),
        ("No one", "no", False),
        ("3.5", "35", False),
        ("-5", "5", False),
        ("A", "the", False),
        ("!", "?", False),
    ],
)
def test_answers_are_compared_in_normal_form(one, other, same):
    assert (normalise(one) == normalise(other)) == same
    assert normalise(normalise(one)) == normalise(one)


def test_the_packages_demonstrations_are_read_as_they_are_meant():
    for task in chain.TASKS:
        shown = read_demonstrations(task=task)
        assert len(shown) >= 4
        assert all(len(parse(d.reasoning).facts) == 2 for d in shown)
    answers = [normalise(parse(d.reasoning).answer) for d in read_demonstrations(task="yes-no")]
    assert answers.count("yes") == answers.count("no") == 3


def test_demonstrations_of_a_file_are_checked(tmp_path):
    path = tmp_path / "mine.jsonl"
    good = {"question": "Is it?", "reasoning": "It is. So the answer is yes."}
    path.write_text(json.dumps(good) + "\n\n" + json.dumps(good | {"task": "temporal"}) + "\n")
    assert len(read_demonstrations(path)) == 2
    assert read_demonstrations(path, "yes-no") == [Demonstration(*good.values())]  # without a task: fits any
    for bad in ("{", "[]", '{"question": "Is it?"}', json.dumps(good | {"reasoning": "It is."})):
        path.write_text(json.dumps(good) + "\n" + bad + "\n")
        with pytest.raises(ValueError, match=r"mine.jsonl:2: expected"):
            read_demonstrations(path)
    path.write_text("")
    with pytest.raises(ValueError, match="no demonstrations"):
        read_demonstrations(path)


def test_prompts_show_the_demonstrations_and_end_where_the_reasoning_begins():
    shown = [Demonstration("Is A B?", "A is B. So the answer is yes.")]
    tokenizer = byte_tokenizer()
    text = "Q: Is A B?\nA: A is B. So the answer is yes.\n\nQ: Is B A?\nA:"
    assert tokenizer.decode(cot_prompt(tokenizer, shown, "Is B A?")) == text
    assert tokenizer.decode(cot_prompt(tokenizer, shown, "Is B A?", begun="B is A.")) == text + " B is A."
    tokenizer = byte_tokenizer(TEMPLATE)
    roles = ["user", "assistant", "user"]
    turns = [{"role": r, "content": c} for r, c in zip(roles, [*shown[0], "Is B A?"], strict=True)]
    assert cot_prompt(tokenizer, shown, "Is B A?", chat=True) == tokenizer.chat(turns)


def test_n_paths_read_the_prompt_once_and_forward_no_token_twice():
    model, prompt, (n, T) = tiny_model(64), [5, 6, 7, 8, 9], (9, 12)
    read, hidden = [], model.hidden
    model.hidden = lambda tokens, *rest: read.append(tokens.numel()) or hidden(tokens, *rest)
    try:
        rows = chain.sample_chains(model, prompt, [], Sampler(0.7), n, T, seed=3)
    finally:
        del model.hidden
    forwarded = sum(read)  # every pass goes through `hidden`
    assert forwarded == sum(row.forwarded for row in rows) <= len(prompt) + n * T
    assert forwarded == len(prompt) + sum(len(row.tokens) - (row.stop == "length") for row in rows)
    alone = [chain.sample_chains(model, prompt, [], Sampler(0.7), 1, T, seed=3 + i)[0].tokens for i in range(n)]
    assert [row.tokens for row in rows] == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


def test_a_line_ends_where_a_token_breaks_it():
    tokenizer = byte_tokenizer()
    stops = chain.line_ends(tokenizer)
    assert tokenizer.encode("\n")[0] in stops
    assert not set(tokenizer.encode("The capital of Mongolia, 1990.")) & set(stops)
    model = tiny_model(tokenizer.vocab_size)
    first = chain.complete(model, [[5, 6]], [], 3)[0].tokens[0]
    assert chain.complete(model, [[5, 6]], [first], 3)[0].tokens == []


# --- faithfulness and votes


@pytest.mark.parametrize("form", [1, 2, 3])
def test_the_running_example_by_hand(form):
    result = rethink(PATHS, judge, form)
    assert [path.score for path in result.paths] == pytest.approx(BY_HAND[form], abs=1e-12)
    assert result.answer == "no"
    assert (result.winner, result.best) == (2, 2)
    assert result.votes == pytest.approx({"no": BY_HAND[form][1] + BY_HAND[form][2], "yes": BY_HAND[form][0]})
    assert next(iter(rethink(PATHS[:1], judge, form).votes)) == "yes"


def test_thresholds_belong_to_the_upper_side():
    assert faithfulness([(0.5, 0.2, 0.0)], 1) == 0.5
    assert faithfulness([(0.49, 0.2, 0.0)], 1) == 0.2
    assert faithfulness([(0.0, 0.6, 0.99)], 3) == pytest.approx(-0.39)
    assert faithfulness([(1.0, 0.59, 0.98)], 3) == 0
    assert [faithfulness([], form) for form in (1, 2, 3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="form of 1, 2 or 3"):
        faithfulness([], 4)


@pytest.mark.parametrize("form", [1, 2, 3])
@given(scores=st.lists(st.tuples(*[st.floats(-1, 1)] * 3), max_size=6))
def test_faithfulness_is_the_literal_sum(form, scores):
    literal = 0.0
    for M, E, C in scores:
        if form == 1:
            literal += M * (M >= 0.5) + E * (M < 0.5) - C
        elif form == 2:
            literal += M + E
        else:
            literal += E * (E >= 0.6) - C * (C >= 0.99)
    assert faithfulness(scores, form) == pytest.approx(literal, abs=1e-12)


ANSWERS = st.lists(st.tuples(st.sampled_from(["yes", "no", "1990", None]), st.integers(-8, 8).map(lambda n: n / 8)))


@given(ANSWERS)
def test_votes_equal_brute_force(paths):
    votes = vote(*zip(*paths, strict=True)) if paths else vote([], [])
    for answer, total in votes.items():
        if any(score for given_answer, score in paths if given_answer is not None):
            assert total == sum(score for given_answer, score in paths if given_answer == answer)
    voting = {a for a, score in paths if a is not None and score} or {a for a, _ in paths if a is not None}
    assert set(votes) == voting
    assert list(votes.values()) == sorted(votes.values(), reverse=True)


@given(ANSWERS, st.randoms())
def test_order_does_not_matter_and_a_score_of_zero_changes_nothing(paths, random):
    answers, scores = [a for a, _ in paths], [s for _, s in paths]
    votes = list(vote(answers, scores).items())
    shuffled = random.sample(paths, len(paths))
    assert list(vote([a for a, _ in shuffled], [s for _, s in shuffled]).items()) == votes
    assert list(majority([a for a, _ in shuffled])) == list(majority(answers))
    if any(score and answer is not None for answer, score in paths):
        assert list(vote([*answers, "a new one"], [*scores, 0.0]).items()) == votes


def test_permuting_paths_permutes_the_result():
    for form in (1, 2, 3):
        result = rethink(PATHS, judge, form)
        for order in ([2, 0, 1], [1, 2, 0], [2, 1, 0]):
            other = rethink([PATHS[i] for i in order], judge, form)
            assert (other.votes, other.answer) == (result.votes, result.answer)
            assert (order[other.winner], order[other.best]) == (result.winner, result.best)
            assert [f.text for f in select_facts(other, encode, form)] == [DIED, FIRST]


def test_sums_do_not_depend_on_the_order_of_rounding():
    scores = [0.1, 0.2, 0.3, 1e16, -1e16, 0.7]
    assert vote(["a"] * 6, scores)["a"] == vote(["a"] * 6, scores[::-1])["a"] == math.fsum(scores)


def test_edges_have_documented_results():
    nothing = rethink([], judge)
    assert (nothing.votes, nothing.answer, nothing.winner, nothing.best) == ({}, None, None, None)
    mute = rethink(["Nothing to say.", ""], lambda facts: [Fact(f, None, 0, 0, 0) for f in facts])
    assert (mute.answer, mute.winner, mute.best) == (None, None, None)
    assert select_facts(mute, encode) == []
    bare = rethink(["The answer is no.", "The answer is yes.", "The answer is yes"], judge)  # no facts: counted
    assert (bare.answer, bare.votes, bare.winner) == ("yes", {"yes": 2.0, "no": 1.0}, 2)
    against = rethink(["Snow is hot. So the answer is no.", "Ice is hot. So the answer is yes."], contradicting)
    assert against.answer == "yes"  # the least contradicted
    assert against.votes == {"yes": -0.5, "no": -1.0}
    silent = rethink(["Snow is hot. So the answer is no.", "So the answer is yes."], contradicting)
    assert silent.answer == "no"  # a path without facts abstains
    assert (silent.winner, silent.best) == (0, 1)
    assert vote(["b", "a"], [1.0, 1.0]) == {"a": 1.0, "b": 1.0}
    assert list(vote(["b", "a", "b"], [1.0, 2.0, 1.0])) == ["b", "a"]
    assert list(vote(["b", "a"], [1.0, 1.0])) == ["a", "b"]


def contradicting(facts):
    return [Fact(fact, LAPTOP, 0.0, 0.0, 1.0 if fact == "Snow is hot." else 0.5) for fact in facts]


# --- evidence


class Words:
    """An encoder that counts words, and an NLI that finds a fact entailed where the premise has its last word."""

    def encode(self, texts):
        vectors = np.zeros((len(texts), 512))
        for vector, text in zip(vectors, texts, strict=True):
            for word in words(text if isinstance(text, str) else " ".join(text)):
                vector[crc32(word.encode()) % 512] += len(word)
        return vectors

    def scores(self, pairs):
        self.asked = pairs
        return torch.tensor([[0.9, 0.05, 0.05] if words(f)[-1] in words(p) else [0.1, 0.2, 0.7] for p, f in pairs])


def test_the_premise_is_the_most_similar_of_the_candidates():
    passages = [ARISTOTLE, LAPTOP, Passage("3", "", "Aristotle taught Alexander."), Passage("4", "", "Snow is white.")]
    counter = Words()
    evidence = Evidence(BM25(passages), counter, counter)
    facts = evidence([FIRST, DIED, "Zebras graze.", FIRST])
    assert [fact.premise for fact in facts] == [LAPTOP, ARISTOTLE, None, LAPTOP]
    assert facts[0] == facts[3]
    assert facts[2].scores == (0, 0, 0)
    assert len(counter.asked) == 2  # each fact once
    for fact, (E, C) in zip(facts, [(0.9, 0.05), (0.9, 0.05)], strict=False):
        a, b = evidence.encode([fact.text, (fact.premise.title, fact.premise.text)])
        assert fact.scores == pytest.approx((float(a @ b), E, C))
    assert counter.asked[0] == (LAPTOP.text, FIRST)  # the text names its title
    candidates = BM25(passages).search(DIED, 10)
    cosines = [evidence.encode([DIED, (h.passage.title, h.passage.text)]) for h in candidates]
    assert facts[1].similarity == pytest.approx(max(float(a @ b) for a, b in cosines))
    assert evidence([]) == []
    assert Evidence(BM25([]), counter, counter)([FIRST])[0].premise is None


# --- variants


@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0.1, 1)), max_size=8), st.floats(0.1, 0.99))
def test_clusters_hold_what_is_near_their_founder(points, threshold):
    vectors = np.array(points).reshape(-1, 2)
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    numbers = cluster(vectors, threshold)
    founders = [numbers.index(number) for number in sorted(set(numbers))]
    assert sorted(set(numbers)) == list(range(len(founders)))
    for i, number in enumerate(numbers):
        before = [float(vectors[f] @ vectors[i]) for f in founders if f < i]
        if i in founders:
            assert all(cosine < threshold for cosine in before)
        else:
            assert before[number] == pytest.approx(max(before))


def test_variant_one_takes_the_facts_that_hold_from_two_paths():
    result = rethink(PATHS[:2], judge, 3)
    assert [fact.text for fact in select_facts(result, encode, 3)] == [DIED, FIRST]
    assert [fact.text for fact in select_facts(result, encode, 3, threshold=1.1)] == [DIED, FIRST_WRONG]


def test_entities_are_names_and_numbers():
    assert entities("The first laptop, the Epson HX-20, was invented in 1980.") == ["Epson HX-20", "1980"]
    assert entities("Aristotle died in 322 BC.") == ["Aristotle", "322 BC"]
    assert entities("It is 5,895 metres high, as Mount Kilimanjaro is.") == ["5,895", "Mount Kilimanjaro"]
    assert entities("water is wet.") == []


def test_variant_two_mends_the_only_path():
    def ask(prompts):
        said = []
        for prompt in prompts:
            last = prompt.rsplit("\n\n", 1)[1]
            if last.endswith("Question:"):
                said.append("When did Aristotle die?" if "Entity: 2000" in last else "")
            elif last.endswith("Answer:"):
                assert last.startswith("Passage: Aristotle, who lived")
                said.append("322 BC")
            else:
                assert last == "Question: When did Aristotle die?\nAnswer: 322 BC\nStatement:"
                said.append(DIED)
        return said

    result = rethink(PATHS[:1], judge, 3)
    own = result.paths[0].facts
    assert restate(own, ask) == [(DIED_WRONG, "When did Aristotle die?", "322 BC", DIED)]
    assert [fact.text for fact in generate_facts(own, select_facts(result, encode, 3), ask, judge)] == [DIED, FIRST]
    doubted = {DIED: (0.8, 0.59, 0.0)}  # E below its threshold

    def strict(facts):
        return [fact._replace(entailment=doubted.get(fact.text, fact.scores)[1]) for fact in judge(facts)]

    assert [fact.text for fact in generate_facts(own, own, ask, strict)] == [DIED_WRONG, FIRST]
    assert generate_facts([], [], ask, judge) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("model"))


def rethinker(folder, **settings) -> Rethinker:
    counter = Words()
    return Rethinker(*load(folder), counter, counter, [], [], length=6, **settings)


def test_inference_begins_with_the_facts(folder):
    rr, facts = rethinker(folder), judge([DIED] * 2)
    read = rr.infer("So?", facts)
    prompt = rr.tokenizer.encode(f"Q: So?\nA: {DIED}")
    more = rr.tokenizer.decode(chain.complete(rr.model, [prompt], [], 6)[0].tokens)
    assert read.text == f"{DIED} {more.strip()}".strip()  # equal facts stand once
    assert rr.infer("So?", []).text == rr.text(rr.greedy("So?"))


def test_a_question_is_concluded_by_the_variant_asked_for(folder):
    rr = rethinker(folder, form=3)
    found = rethink(PATHS[:2], judge, 3)
    assert rr.conclude("So?", found, rr.judge(BM25([])))[0].text == PATHS[1]
    assert rr.conclude("So?", found, rr.judge(BM25([])), "best")[1] == found.paths[1].facts
    evidence = Evidence(BM25([]), rr.encoder, rr.nli)
    evidence.encode = encode
    read, facts = rr.conclude("So?", found, evidence, "selection")
    assert [fact.text for fact in facts] == [DIED, FIRST]
    assert read.text.startswith(f"{DIED} {FIRST}")
    assert rr.conclude("So?", rethink(["Hm."], contradicting), evidence, "generation") == (None, [])
    record = json.loads(json.dumps(as_record(found)))
    assert record["answer"] == "no"
    assert record["paths"][0]["facts"][0]["premise"] == ARISTOTLE._asdict()
    shown = as_text(found, PATHS[1], found.paths[1].facts)
    assert shown.startswith(f"{PATHS[1]}\n  {DIED}  M 0.80  E 0.90  C 0.02\n    {ARISTOTLE.text}\n")
    assert shown.endswith("\nvotes: no 0.90 of 1, yes -0.30 of 1, no answer of 0")


# --- knowledge bases


def test_templates():
    merkel = templates.temporal_sentence("Angela Merkel", "wasChancellorOf_Germany", "2005", "2021")
    assert merkel == "Angela Merkel was chancellor of Germany from 2005 to 2021."
    assert templates.temporal_sentence("A", "was king", "", "1685") == "A was king until 1685."
    assert templates.temporal_sentence("A", "was king", "1660", "") == "A was king from 1660."
    assert templates.temporal_sentence("The wall", "fell", "1989", "1989") == "The wall fell in 1989."
    assert templates.temporal_sentence("A", "is", "", "") == "A is."
    assert templates.triple_sentence("married", "RelatedTo", "spouse") == "Married is related to spouse."
    assert templates.triple_sentence("wheel", "PartOf", "car") == "Wheel is part of car."
    assert templates.triple_sentence("bank", "hyponym", "river_bank") == "River bank is a kind of bank."
    assert (
        templates.triple_sentence("Ulaanbaatar", "is the capital of", "Mongolia")
        == "Ulaanbaatar is the capital of Mongolia."
    )
    table = {
        "title": ["Ana"],
        "Born": ["in 1951"],
        "Instruments": ["guitar", "piano", "cello"],
        "Spouse": ["Luis"],
        "Age": [],
    }
    assert templates.table_sentences(table) == [
        "Ana was born in 1951.",
        "The instruments of Ana are guitar, piano and cello.",
        "The spouse of Ana is Luis.",
    ]


def test_knowledge_files_are_told_apart_and_bad_lines_named(tmp_path):
    def read(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return [passage.text for passage in templates.read_sentences(tmp_path / name)]

    header = "Entity\tRelation\tStart\tEnd\n"
    assert read("t.tsv", header + "Charles II\twas king\t1660\t1685\n\nX\tis\t\t\n") == [
        "Charles II was king from 1660 to 1685.",
        "X is.",
    ]
    assert read("r.tsv", "wheel\tPartOf\tcar\n") == ["Wheel is part of car."]
    assert read("p.txt", "Snow is white.") == ["Snow is white."]
    assert read("p.jsonl", '{"text": "Snow is white."}') == ["Snow is white."]
    assert read("p.tsv", "id\ttext\ttitle\n1\tSnow is white.\tSnow\n") == ["Snow is white."]
    assert read("one.json", '{"title": "Ana", "Age": 7}') == ["The age of Ana is 7."]
    assert len(read("two.json", '[{"title": "Ana", "Age": ["7"]}, {"Age": [8, "9"]}]')) == 2
    for name, text, place in [
        ("t.tsv", header + "Charles II\twas king\t1660\n", "t.tsv:2"),
        ("t.tsv", header + "\n\twas king\t1660\t\n", "t.tsv:3"),
        ("r.tsv", "wheel\tPartOf\tcar\nwheel\tPartOf\n", "r.tsv:2"),
        ("one.json", '{"title":\n', "one.json:2"),
        ("two.json", '[{"Age": ["7"]}, 3]', "two.json, table 2"),
        ("two.json", '[{"Age": [["7"]]}]', "two.json, table 1"),
    ]:
        with pytest.raises(ValueError, match=place):
            read(name, text)


# --- the programs


@pytest.fixture(scope="module")
def given_files(tmp_path_factory, folder):
    """Arguments for tiny models and one short demonstration, and a file of knowledge."""
    path = tmp_path_factory.mktemp("files")
    save(path, BertModel)
    sentence_transformer(path, pooling_mode_mean_tokens=True)
    demonstration = {"question": "Is it?", "reasoning": "It is. So the answer is yes."}
    (path / "demos.jsonl").write_text(json.dumps(demonstration))
    (path / "facts.jsonl").write_text(json.dumps({"id": "s", "title": "Snow", "text": "Snow is white."}))
    (path / "table.json").write_text(json.dumps({"title": "Snow", "Colour": ["white"]}))
    arguments = ["--model", folder, "--encoder", path, "--demos", path / "demos.jsonl", "--max-new-tokens", 12]
    return path, [str(argument) for argument in [*arguments, "--paths", 3]]


@pytest.mark.parametrize("variant", ["vote", "best", "selection", "generation"])
def test_generate_prints_answer_path_evidence_and_votes(given_files, monkeypatch, capfd, variant):
    path, arguments = given_files
    said = iter(["Snow is white. So the answer is yes.", "Snow is black. So the answer is no.", "Hm."])
    monkeypatch.setattr(Rethinker, "text", lambda self, row: next(said, "Thus, the answer is yes."))
    monkeypatch.setattr(Rethinker, "ask", lambda self, prompts: ["Snow is white."] * len(prompts))
    command = ["--decoder", "rr", "--prompt", "Is snow white?", "--knowledge", str(path / "facts.jsonl")]
    assert generate.main([*arguments, *command, "--variant", variant]) == 0
    out, err = capfd.readouterr()
    lines = out.splitlines()
    assert lines[0] in ("yes", "no")
    assert lines[1] == ""
    assert "Snow is white." in lines[4]
    assert lines[-1].startswith("votes: ")
    assert lines[-1].endswith("no answer of 1")
    assert "3 paths" in err


def test_an_index_and_triples_are_not_both_evidence(given_files, tmp_path, capfd):
    _, arguments = given_files
    (tmp_path / "t.tsv").write_text("Snow\tis\twhite\n")
    BM25([Passage("0", "Snow", "Snow is white.")]).save(tmp_path / "index")
    command = ["--decoder", "rr", "--knowledge", str(tmp_path / "index"), str(tmp_path / "t.tsv")]
    assert generate.main([*arguments, *command]) == 1
    assert "got both" in capfd.readouterr().err


def test_generate_gives_all_paths_as_json_and_the_same_for_a_seed(given_files, capfd):
    path, arguments = given_files
    command = ["--decoder", "rr", "--prompt", "Is snow white?", "--knowledge", str(path / "table.json"), "--json"]
    outputs = []
    for _ in range(2):
        assert generate.main([*arguments, *command, "--task", "table"]) == 0
        outputs.append(capfd.readouterr().out)
    assert outputs[0] == outputs[1]
    record = json.loads(outputs[0])
    assert len(record["paths"]) == 3
    assert {"answer", "votes", "winner", "best", "text", "support"} <= record.keys()


def test_evaluate_compares_reasoning_decoders_by_accuracy(given_files, tmp_path, capfd):
    arguments = given_files[1]
    ctxs = [{"title": "Snow", "text": "Snow is white."}]
    questions = [
        {"question": f"Is snow {c}?", "answers": [a], "ctxs": ctxs} for c, a in (("white", "yes"), ("red", "no"))
    ]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, questions)))
    out = tmp_path / "out"
    command = [str(tmp_path / "q.jsonl"), "--decoders", "greedy,cot,self-consistency,rr", "--out", str(out)]
    assert evaluate.main([*command, *arguments]) == 0
    header = capfd.readouterr().out.splitlines()[0]
    assert "Acc" in header
    results = json.loads((out / "results.json").read_text())
    assert all(0 <= results["decoders"][name]["Acc"]["mean"] <= 100 for name in ("greedy", "cot", "rr"))
    kept = (out / "rr.jsonl").read_text()
    assert evaluate.main([*command, *arguments]) == 0
    assert (out / "rr.jsonl").read_text() == kept


def test_accuracy_is_of_the_answer_that_is_stated():
    assert accuracy("It is. So the answer is yes.", ["Yes"]) == {"Acc": 100.0}
    assert accuracy("No, it is not. Thus, the answer is yes.", ["no"]) == {"Acc": 0.0}
    assert accuracy("No", ["no"]) == {"Acc": 100.0}
    assert accuracy("It never was.", ["no"]) == {"Acc": 0.0}
    assert accuracy("1990", ["1990"]) == accuracy("yes", []) == {}
