"""The training questions that bench/kgclue.py makes, and its scores."""

import importlib.util
import random
from itertools import islice
from pathlib import Path

import pytest

from minikid.kgclue import Fact, Question, join_key

FACTS = [
    Fact("海豚湾", "创办时间", "电影", "2009年"),
    Fact("灰结节", "关闭时间", "", "1990年"),
    Fact("蛇曲", "水深", "", "3米"),
]
QUESTION = Question("0", "你知道红棉路是什么时候创办的吗？", Fact("红棉路", "创办时间", "", "1900年"))


@pytest.fixture(scope="module")
def bench():
    path = Path(__file__).parent.parent / "bench" / "kgclue.py"
    spec = importlib.util.spec_from_file_location("bench_kgclue", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_template_is_cut_at_the_subject_and_the_longest_part_of_the_predicate(bench):
    template = bench.make_template(QUESTION.question, QUESTION.answer)
    assert template.text == "你知道\0是什么时候\1的吗？"
    assert template[1:4] == ("", "创办", "时间")
    bare = bench.make_template("红棉路多深？", Fact("红绵路", "水位", "", "2米"))
    assert (bare.text, bare.part, bare.before + bare.behind) == ("红棉路多深？", "", "水位")


def test_varied_questions_name_their_subject_and_follow_their_predicate(bench):
    drawn = list(islice(bench.vary([QUESTION], FACTS, random.Random(0)), 200))
    names, found = {fact.subject for fact in FACTS}, {fact.subject for _, fact in drawn}
    assert found > names | {"红棉路"}
    assert set("".join(found - {"红棉路"})) == set("".join(names))  # what is made up is of the base's characters
    assert {fact.predicate for _, fact in drawn} == {"创办时间", "关闭时间"}  # those that end as the question asks
    for text, fact in drawn:
        assert text == f"你知道{fact.subject}是什么时候{fact.predicate[:2]}的吗？"
        assert fact.subject not in names or fact.meaning == ("电影" if fact.subject == "海豚湾" else "")
    assert drawn == list(islice(bench.vary([QUESTION], FACTS, random.Random(0)), 200))


@pytest.mark.parametrize("order", ["SPM", "SMP"])
def test_fields_for_training_join_to_the_keys_of_the_trie(bench, order):
    for fact in FACTS:
        fields = bench.in_order(fact, order)
        assert list("|".join(fields)) == join_key(fact, list, "|", order)


def test_scores_name_the_field_that_is_wrong(bench):
    values = {fact[:3]: fact.value for fact in FACTS}
    right, other = FACTS[0][:3], FACTS[1][:3]
    scores = bench.score([right, other], FACTS[0], values)
    assert scores == {"EM": 100, "F1": 100, "S wrong": 0, "P wrong": 0, "M wrong": 0, "missed": 0}
    scores = bench.score([other, right], FACTS[0], values)
    assert scores["F1"] == bench.similarity("1990年", "2009年") == 200 * 2 / 10
    assert (scores["EM"], scores["S wrong"], scores["P wrong"], scores["missed"]) == (0, 100, 0, 0)
    assert bench.score([other], FACTS[0], values)["missed"] == 100
