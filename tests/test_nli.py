"""Entailment scorers: the cross-encoder against transformers, the language model against its definition."""

import json

import pytest
import torch
from test_encoder import SIZES, TEXTS, VOCAB
from tiny import TEMPLATE, byte_tokenizer, tiny_model
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from minikid.nli import FALSE, FREE, LABELS, TRUE, CrossEncoder, LanguageModelNLI

PAIRS = [(premise, hypothesis) for premise in TEXTS for hypothesis in ("a cat", "東京 is " * 12, "x")]


def save(folder, names):
    torch.manual_seed(0)
    labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    model = BertForSequenceClassification(BertConfig(**SIZES, **labels)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCAB), encoding="utf-8")
    return model


@pytest.mark.parametrize("names", [("contradiction", "entailment", "neutral"), ("ENTAILMENT", "not_entailment")])
def test_the_cross_encoder_is_that_of_transformers(tmp_path, names):
    model = save(tmp_path, names)
    theirs = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    inputs = theirs(*map(list, zip(*PAIRS, strict=True)), padding=True, truncation=True, max_length=32)
    inputs = {name: torch.tensor(rows) for name, rows in inputs.items()}
    plain = [i for i, (premise, _) in enumerate(PAIRS) if "[SEP]" not in premise]  # transformers reads it as the token
    with torch.no_grad():
        expected = model(**inputs).logits.softmax(-1)
    scores = CrossEncoder.from_folder(tmp_path).scores(PAIRS, batch_size=4)
    assert scores.shape == (len(PAIRS), 3)
    torch.testing.assert_close(scores.sum(1), torch.ones(len(PAIRS)))
    for column, name in enumerate(names):
        ours = scores[:, LABELS.index(name.lower().replace("not_entailment", "neutral"))]
        torch.testing.assert_close(ours[plain], expected[plain, column], atol=1e-5, rtol=0)
    assert (scores[:, 2] > 0).any() == (len(names) == 3)


@pytest.mark.parametrize("names", [("LABEL_0", "LABEL_1", "LABEL_2"), ("entailment",), ("neutral", "contradiction")])
def test_labels_that_say_nothing_are_refused(tmp_path, names):
    save(tmp_path, names)
    with pytest.raises(ValueError, match="id2label"):
        CrossEncoder.from_folder(tmp_path)


def test_a_folder_without_a_classifier_is_refused(tmp_path):
    save(tmp_path, LABELS)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {"0": "entailment", "1": "not_entailment"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="classifier"):
        CrossEncoder.from_folder(tmp_path)


def test_no_pairs(tmp_path):
    save(tmp_path, LABELS)
    model = tiny_model(byte_tokenizer().vocab_size)
    for scorer in (CrossEncoder.from_folder(tmp_path), LanguageModelNLI(model, byte_tokenizer())):
        assert scorer.scores([]).shape == (0, 3)


@pytest.fixture
def short_asks(monkeypatch):
    """Asks that fit the tiny model's positions."""
    for name, text in {"TRUE": "A?", "FALSE": "Ab?", "FREE": "C?"}.items():
        monkeypatch.setattr(f"minikid.nli.{name}", text)
    return "A?", "C?", "Ab?"


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_the_language_model_scores_as_defined(short_asks, template):
    tokenizer = byte_tokenizer(template)
    model = tiny_model(tokenizer.vocab_size)
    pairs = [("the river", "in the north"), ("", "car"), ("the river", "car <|im_end|>"), ("the", "car")]
    pairs = pairs if template is None else [("a", "the"), ("a", "car"), ("", "the")]

    def mean(premise, ask, text):
        prompt = ask if premise is None else f"{premise}\n\n{ask}"
        prompt = tokenizer.prompt(prompt if template else prompt + "\n", template is not None)
        ids = tokenizer.encode(text)
        log_p = model(torch.tensor([prompt + ids]))[0].log_softmax(-1)
        return sum(log_p[len(prompt) - 1 + i, token] for i, token in enumerate(ids)) / len(ids)

    true, free, false = short_asks
    z = [[mean(premise, true, text), mean(None, free, text), mean(premise, false, text)] for premise, text in pairs]
    expected = torch.tensor(z).softmax(-1)
    for batch_size in (1, 3, 16):
        scores = LanguageModelNLI(model, tokenizer).scores(pairs, batch_size=batch_size)
        torch.testing.assert_close(scores, expected, atol=1e-9, rtol=0)


def test_a_premise_is_read_once(short_asks, monkeypatch):
    tokenizer = byte_tokenizer()
    model, read = tiny_model(tokenizer.vocab_size), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda tokens, cache: read.append(tokens.tolist()) or hidden(tokens, cache))
    premise = "the capital of Mongolia is on the river"
    beginning = tokenizer.encode(premise)
    LanguageModelNLI(model, tokenizer).scores([(premise, "car"), (premise, "river")])
    assert sum(row[: len(beginning)] == beginning for rows in read for row in rows) == 1


def test_empty_hypotheses_are_refused():
    with pytest.raises(ValueError, match="empty"):
        LanguageModelNLI(tiny_model(byte_tokenizer().vocab_size), byte_tokenizer()).scores([("a", "")])


def test_the_asks_differ():
    assert len({TRUE, FALSE, FREE}) == 3


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_premise_that_is_too_long_is_cut(short_asks, batch_size):
    """For both asks alike, and by the pair's own hypothesis, whatever it is scored with."""
    tokenizer = byte_tokenizer()
    scorer = LanguageModelNLI(tiny_model(tokenizer.vocab_size), tokenizer)
    longer = max(len(tokenizer.encode(f"\n\n{ask}\n")) for ask in (short_asks[0], short_asks[2]))
    rooms = [scorer.model.config.max_positions - len(tokenizer.encode(text)) - longer for text in ("ab", "b" * 20)]
    long = scorer.scores([("x" * 500, "ab"), ("x" * 500, "b" * 20)], batch_size)
    fitting = scorer.scores([("x" * rooms[0], "ab"), ("x" * rooms[1], "b" * 20)], batch_size)
    torch.testing.assert_close(long, fitting)
