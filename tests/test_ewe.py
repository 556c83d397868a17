"""Ewe's loop on tiny models: what a pause changes and what it must not, and its special cases."""

import functools
import math
import re
from dataclasses import replace

import pytest
import tokenizers
import torch
from tiny import TEMPLATE, byte_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from minikid import ewe
from minikid.config import Config
from minikid.decode import Sampler, Vanilla, generate, greedy
from minikid.ewe import FLARE, ITERATIVE_RAG, RAG, SETTINGS, Draft, Settings, feedback, generate_ewe
from minikid.memory import WorkingMemory
from minikid.model import GPT
from minikid.passages import Hit, Passage
from minikid.retrieve import BM25
from minikid.tokenizer import Tokenizer
from minikid.verify import Verdict

PASSAGES = [
    Passage("0", "Mongolia", "The capital of Mongolia is Ulaanbaatar."),
    Passage("1", "", "Ulaanbaatar lies on the river Tuul. <|im_end|>"),
    Passage("2", "Cars", "A cardiologist drives a car to the capital."),
    Passage("3", "Japan", "The capital of Japan is Tokyo."),
]
QUESTION = "capital river car?"
SHORT = Settings(units=2, unit_length=40, hits=2)
SPLIT = re.compile(r" ?\w+|[^\w\s]|\s")
SAMPLER = Sampler(temperature=0.7, top_k=40)


WORDS = ["<|im_end|>", "?", " It", " He", " is", " was", " Japan", " Tokyo", ".", "!"]


@functools.cache
def word_tokenizer():
    """Whole words, so that what a random model says has sentences, verbs and claims."""
    names = list(dict.fromkeys(WORDS + [w for p in PASSAGES for w in SPLIT.findall(f"{p.title}: {p.text}\n\n")]))
    names += [w for w in SPLIT.findall(f"{QUESTION} {ewe.INSTRUCTION} {ewe.ASK_FIRST} Question:") if w not in names]
    library = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(SPLIT.pattern), "isolated")
    library.decoder = decoders.Fuse()
    return Tokenizer(library, eos_ids=(0,))


@pytest.fixture(scope="module")
def model():
    """A random Llama whose distributions are neither flat nor certain, with room for units."""
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    shape |= {"hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 400, "eos_token_id": 0}
    model = GPT(Config.from_dict({"model_type": "llama", "vocab_size": byte_tokenizer().vocab_size} | shape))
    model = model.double().eval().requires_grad_(False)
    for block in model.blocks:
        for layer in (block.attention.qkv, block.attention.out, block.mlp.up, block.mlp.down):
            layer.weight.mul_(4.0)
    model.head.weight.mul_(4.0)
    return model


def talk(log_p, generator=None):
    """Draws from WORDS without eos, by the model's odds among them, a little evened out."""
    return 2 + int(torch.multinomial((log_p[2 : len(WORDS)] / 4).softmax(0).float(), 1, generator=generator))


class Refuse:
    """Refutes everything by one passage."""

    def __init__(self, passage=PASSAGES[3]):
        self.passage, self.asked = passage, []

    def __call__(self, claim, passages):
        self.asked.append(claim)
        return Verdict(claim, "refuted", self.passage)


def accept(claim, passages):
    return Verdict(claim, "supported", passages[0] if passages else None)


def run(model, sampler=talk, verifier=accept, settings=SHORT, passages=PASSAGES, seed=0, **keywords):
    keywords = {"max_new_tokens": 40, "generator": torch.Generator().manual_seed(seed)} | keywords
    retriever = BM25(passages) if isinstance(passages, list) else passages
    return generate_ewe(model, word_tokenizer(), QUESTION, retriever, verifier, sampler, settings, **keywords)


def text(generation):
    return word_tokenizer().decode(generation.tokens)


@pytest.mark.parametrize("template", [None, TEMPLATE])
@pytest.mark.parametrize("sampler", [greedy, SAMPLER])
def test_no_units_are_the_plain_model(model, template, sampler):
    tokenizer = byte_tokenizer(template)
    prompt = tokenizer.prompt(QUESTION, template is not None)
    plain = generate(model, prompt, Vanilla(), sampler, max_new_tokens=30, generator=torch.Generator().manual_seed(1))
    settings = replace(SHORT, units=0)
    generator = torch.Generator().manual_seed(1)
    ours = generate_ewe(
        model, tokenizer, QUESTION, BM25(PASSAGES), accept, sampler, settings, max_new_tokens=30, generator=generator
    )
    assert ours.tokens == plain.tokens
    assert ours.log_probs == plain.log_probs
    assert (ours.stop, ours.forwarded) == (plain.stop, plain.forwarded)


def test_accepting_everything_changes_no_token(model):
    never = run(model, settings=replace(SHORT, verify_every=0, retrieve_every=0))
    checked = run(model, settings=replace(SHORT, retrieve_every=0))
    assert text(never).count(".") > 3
    assert checked.tokens == never.tokens
    assert checked.log_probs == never.log_probs
    assert checked.forwarded == never.forwarded
    assert [pause.verdicts[0].verdict for pause in checked.pauses if pause.verdicts]


@pytest.mark.parametrize("tries", [0, 1, 3])
def test_refuting_everything_ends_after_r_tries_for_each_sentence(model, tries):
    verifier, heard = Refuse(), []
    settings = replace(SHORT, tries=tries, retrieve_every=0)
    generation = run(model, verifier=verifier, settings=settings, on_sentence=lambda *args: heard.append(args))
    kept = [tokens for tokens, stays in heard if stays]
    assert [token for tokens in kept for token in tokens] == generation.tokens
    attempts = 0
    for pause in generation.pauses[1:]:
        refuted = any(verdict.verdict == "refuted" for verdict in pause.verdicts)
        assert pause.deleted == (refuted and attempts < tries)
        attempts = attempts + 1 if pause.deleted else 0
    assert any(pause.deleted for pause in generation.pauses) == (tries > 0)
    assert len(generation.tokens) == len(generation.log_probs) == len(generation.states) == 40


def test_a_deleted_sentence_leaves_no_trace(model):
    """Cutting and going on is never having written it, logit for logit, when the memory stays as it was."""
    memory = WorkingMemory(model, 2, 40, [5, 6])
    memory.add([9, 8, 7])
    draft, other = Draft(model, memory, [1, 3, 4]), Draft(model, memory, [1, 3, 4])
    for token in (10, 11):
        draft.write(token), other.write(token)
    for token in (12, 13, 14):
        draft.write(token)
    draft.cut(2)
    assert draft.tokens == other.tokens == [10, 11]
    torch.testing.assert_close(draft.logits, other.logits, atol=1e-9, rtol=0)
    draft.write(15), other.write(15)
    torch.testing.assert_close(draft.logits, other.logits, atol=1e-9, rtol=0)
    draft.cut(0)
    torch.testing.assert_close(draft.logits, Draft(model, memory, [1, 3, 4]).logits, atol=1e-9, rtol=0)


def test_a_new_unit_is_seen_by_the_next_token(model):
    memory = WorkingMemory(model, 2, 40, [5, 6])
    memory.add([9, 8, 7])
    draft = Draft(model, memory, [1, 3, 4])
    before = draft.logits
    memory.add([20, 21])
    draft.cut(0)
    assert (draft.logits - before).abs().max() > 1e-3


def test_the_refuting_passage_enters_the_memory_and_the_oldest_leaves(model):
    generation = run(model, verifier=Refuse(PASSAGES[1]), settings=replace(SHORT, retrieve_every=0, hits=2, tries=1))
    first, second, *_ = (pause for pause in generation.pauses if not pause.sentence or pause.deleted)
    assert len(first.added) == 2
    assert first.query == QUESTION
    assert (second.added, second.evicted) == ((PASSAGES[1],), first.added[:1])


def test_retrieval_feedback_asks_for_question_and_sentence(model):
    asked = []

    class Recorder:
        def search(self, query, k):
            asked.append((query, k))
            return [Hit(PASSAGES[len(asked) % 4], 1.0), Hit(PASSAGES[3], 0.5)]

    settings = replace(SHORT, verify_every=0, retrieve_every=2, threshold=0.7)
    generation = run(model, settings=settings, passages=Recorder())
    sentences = [pause.sentence for pause in generation.pauses]
    assert asked == [(QUESTION, 2)] + [(f"{QUESTION} {sentence}", 2) for sentence in sentences[1:]]
    assert all(hit.score > 0.7 for pause in generation.pauses[1:] for hit in pause.hits)
    every = run(model, settings=replace(settings, retrieve_every=1), passages=Recorder())
    assert len(every.pauses) > len(generation.pauses) > 1


def test_passages_that_are_held_are_not_added_again(model):
    generation = run(model, settings=replace(SHORT, units=4, hits=4, verify_every=0))
    assert len(generation.pauses) > 2
    assert all(not pause.added for pause in generation.pauses[1:] if pause.query)


@pytest.mark.parametrize("verify_first", [False, True])
def test_the_order_of_the_feedbacks(model, verify_first):
    retriever, shelf = BM25(PASSAGES), ewe.Shelf(WorkingMemory(model, 2, 40), byte_tokenizer(), SHORT)
    forms = ewe._due(replace(SHORT, verify_first=verify_first), 1, False, over=False)
    assert forms == (["verify", "retrieve"] if verify_first else ["retrieve", "verify"])
    pause = feedback("The car is old.", QUESTION, forms, shelf, retriever, Refuse(), SHORT, True)
    assert pause.deleted
    assert (pause.query is None) == verify_first  # a sentence that is gone is not asked about


def test_what_was_found_weighs_by_its_score(model):
    shelf = ewe.Shelf(WorkingMemory(model, 4, 40), byte_tokenizer(), replace(SHORT, units=4, relevance=2.0))
    hits = [Hit(PASSAGES[0], 8.0), Hit(PASSAGES[1], 4.0), Hit(PASSAGES[2], 0.0), Hit(PASSAGES[3], -1.0)]
    shelf.add(shelf.new(hits))
    assert [unit.weight for unit in shelf.memory.units] == [ewe.LEAST, ewe.LEAST, 0.25, 1.0]  # the best is last
    assert shelf.new(hits) == {}
    flat = ewe.Shelf(WorkingMemory(model, 4, 40), byte_tokenizer(), replace(SHORT, units=4, relevance=0.0))
    assert set(flat.new(hits).values()) == {1.0}
    assert ewe.weights([Hit(PASSAGES[0], 0.0), Hit(PASSAGES[1], -1.0)], 4.0) == dict.fromkeys(PASSAGES[:2], 1.0)


def test_triggers(model):
    for settings, log_p, token, expected in [
        (replace(SHORT, trigger="entropy", doubt=1.0), torch.zeros(4).log_softmax(0), 0, True),
        (replace(SHORT, trigger="entropy", doubt=1.5), torch.zeros(4).log_softmax(0), 0, False),
        (replace(SHORT, trigger="min-prob", doubt=0.3), torch.zeros(4).log_softmax(0), 0, True),
        (replace(SHORT, trigger="min-prob", doubt=0.2), torch.zeros(4).log_softmax(0), 0, False),
        (replace(SHORT, trigger="entropy", doubt=0.1), torch.tensor([0.0, -math.inf]), 0, False),
        (SHORT, torch.zeros(4).log_softmax(0), 0, False),
    ]:
        assert ewe._doubtful(settings, log_p, token) == expected
    sure = run(model, settings=replace(SHORT, trigger="min-prob", doubt=0.0))
    assert len(sure.pauses) == 1
    doubting = run(model, settings=replace(SHORT, trigger="min-prob", doubt=1.0))
    assert len(doubting.pauses) > 3


@pytest.mark.parametrize("room", [0, 30])
def test_rag_is_the_prompt_with_the_passages(model, room):
    """One unit, no context stream: logit for logit, however long the unit might be."""
    tokenizer = word_tokenizer()
    chosen = [hit.passage for hit in BM25(PASSAGES).search(QUESTION, 2)]
    block = "\n\n".join(f"{p.title}: {p.text}" if p.title else p.text for p in chosen) + "\n\n"
    prefix, context = ewe.layout(tokenizer, QUESTION, ewe.INSTRUCTION, False)
    prompt = prefix + tokenizer.encode(block) + context
    plain = generate(model, prompt, Vanilla(), greedy, max_new_tokens=25)
    settings = replace(RAG, hits=2, unit_length=len(tokenizer.encode(block)) + room)
    ours = run(model, sampler=greedy, settings=settings, max_new_tokens=25)
    assert ours.tokens == plain.tokens
    assert ours.log_probs == pytest.approx(plain.log_probs, abs=1e-9)
    assert ours.forwarded == plain.forwarded
    assert len(ours.pauses) == 1


def test_flare_rewrites_what_was_doubtful_with_what_it_found(model):
    settings = replace(FLARE, unit_length=80, hits=1, doubt=1.0, tries=1)
    generation = run(model, settings=settings)
    rewritten = [pause for pause in generation.pauses if pause.deleted]
    assert rewritten
    assert all(pause.added and not pause.verdicts for pause in rewritten)


def test_a_shared_unit_is_replaced_by_all_that_was_found(model):
    shelf = ewe.Shelf(WorkingMemory(model, 1, 90), byte_tokenizer(), replace(FLARE, hits=2))
    for pair in (PASSAGES[:2], PASSAGES[1:3]):  # the second passage is held when it is found again
        shelf.add(shelf.new([Hit(passage, 1.0) for passage in pair]))
        assert shelf.units == [tuple(pair)]
    assert shelf.new([Hit(PASSAGES[2], 1.0), Hit(PASSAGES[1], 1.0)]) == {}  # nothing new


def test_iterative_rag_only_retrieves(model):
    assert (ITERATIVE_RAG.units > 1, ITERATIVE_RAG.verify_every, ITERATIVE_RAG.rewrite) == (True, 0, False)
    generation = run(model, verifier=None, settings=replace(ITERATIVE_RAG, units=2, unit_length=40, hits=2))
    assert all(pause.query for pause in generation.pauses)
    assert len(generation.pauses) > 2


@pytest.mark.parametrize("name", SETTINGS)
def test_same_seed_same_tokens(model, name):
    settings = replace(SETTINGS[name], unit_length=60)
    runs = [run(model, verifier=Refuse(), settings=settings, seed=seed, max_new_tokens=25) for seed in (3, 3)]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].pauses == runs[1].pauses


@pytest.mark.parametrize("passages", [[], [Passage("0", "", "")], [Passage("0", "x", "nothing in common")]])
def test_no_passages_and_nothing_found(model, passages):
    generation = run(model, passages=passages, max_new_tokens=30)
    assert len(generation.tokens) == 30
    assert not generation.pauses[0].added


def test_control_tokens_in_a_passage_stay_text(model):
    tokenizer, memory = byte_tokenizer(), WorkingMemory(model, 4, 90)
    ewe.Shelf(memory, tokenizer, replace(SHORT, units=4)).add(dict.fromkeys(PASSAGES, 1.0))
    assert any("<|im_end|>" in tokenizer.decode(unit.tokens) for unit in memory.units)
    assert not any(set(unit.tokens) & set(tokenizer.special.values()) for unit in memory.units)


def test_passages_that_do_not_fit_are_cut_and_counted(model):
    assert run(model, max_new_tokens=1, settings=replace(SHORT, unit_length=5)).dropped > 0
    assert run(model, max_new_tokens=1, settings=replace(SHORT, unit_length=90)).dropped == 0


def test_units_take_what_the_longest_first_passage_needs(model):
    """So a later passage that is longer is cut, and no budget changes a token as long as the first passages fit."""
    longer = Passage("4", "Tokyo", " ".join(["Tokyo is a river of cars."] * 12))
    settings = replace(SHORT, retrieve_every=0, tries=1)
    runs = [run(model, verifier=Refuse(longer), settings=replace(settings, unit_length=n)) for n in (80, 100)]
    assert runs[0].tokens == runs[1].tokens
    assert longer in [passage for pause in runs[0].pauses for passage in pause.added]
    assert runs[0].dropped == runs[1].dropped > 0


def test_eos_ends_and_the_last_sentence_is_verified(model):
    tokenizer, script = word_tokenizer(), iter([*word_tokenizer().encode(" It is Japan. He was Tokyo"), 0])
    settings, verifier = replace(SHORT, tries=0, units=0), Refuse()
    generation = run(model, lambda log_p, generator: next(script), verifier, settings)
    assert (generation.stop, tokenizer.decode(generation.tokens)) == ("eos", " It is Japan. He was Tokyo")
    assert verifier.asked == ["It is Japan.", "He was Tokyo"]
    assert [pause.query for pause in generation.pauses] == [None, None]


@pytest.mark.parametrize("length", [0, 1, 7])
def test_max_new_tokens(model, length):
    generation = run(model, verifier=Refuse(), max_new_tokens=length)
    assert (len(generation.tokens), generation.stop) == (length, "length")


def test_forwarded_counts_what_the_model_read(model, monkeypatch):
    read, hidden = [], model.hidden
    monkeypatch.setattr(model, "hidden", lambda t, *args: read.append(t.numel()) or hidden(t, *args))
    generation = run(model, verifier=Refuse())
    assert generation.forwarded == sum(read)


def test_sentences_end_where_what_follows_says_so():
    tokenizer = byte_tokenizer()
    for said, following in [("The car is in Japan. ", "The"), ("The car is in Japan.\n", "The"), ("Japan", "")]:
        assert ewe._complete(tokenizer, tokenizer.encode(said), tokenizer.encode(following)[:1])
    for said, following in [("It costs 3.", "5"), ("Dr. ", "Smith"), ("in the", " car"), ("car.", "\n"), ("", "")]:
        assert not ewe._complete(tokenizer, tokenizer.encode(said), tokenizer.encode(following)[:1])


def test_the_layout_is_the_prompt_cut_in_two():
    for template in (None, TEMPLATE):
        tokenizer = byte_tokenizer(template)
        prefix, context = ewe.layout(tokenizer, QUESTION, "", template is not None)
        assert prefix + context == tokenizer.prompt(QUESTION, template is not None)
        assert QUESTION in tokenizer.decode(context)


@pytest.mark.parametrize(
    "bad",
    [
        {"trigger": "never"},
        {"hits": 0},
        {"tries": -1},
        {"units": -1},
        {"temperature": 0.0},
        {"context_weight": 0.0},
        {"unit_length": 0},
        {"relevance": -1.0},
        {"temperature": math.nan},
        {"context_weight": math.inf},
    ],
)
def test_bad_settings(bad):
    with pytest.raises(ValueError, match="expected"):
        Settings(**bad)


@pytest.mark.parametrize("ask_first", [True, False])
def test_units_may_be_read_behind_the_question(model, monkeypatch, ask_first):
    read, init = [], WorkingMemory.__init__
    monkeypatch.setattr(
        WorkingMemory, "__init__", lambda self, *args, **options: read.append(args[3]) or init(self, *args, **options)
    )
    run(model, settings=replace(SHORT, ask_first=ask_first), max_new_tokens=1)
    assert (QUESTION in word_tokenizer().decode(read[0])) == ask_first


def test_no_room(model):
    with pytest.raises(ValueError, match="positions"):
        run(model, max_new_tokens=1000)
    with pytest.raises(ValueError, match="shorter units"):
        run(model, settings=replace(SHORT, unit_length=1000))
