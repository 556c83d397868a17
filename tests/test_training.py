"""Training against transformers, against itself in other cuts of a batch, and the files that a run leaves."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from minikid import scratch
from minikid.config import Config
from minikid.corpus import WINDOW, Batches, Corpus, all_batches, collate, read_corpus
from minikid.files import replacing
from minikid.folder import hf_tensors, write_parameters
from minikid.model import GPT
from minikid.tokenizer import Tokenizer
from minikid.training import (
    Settings,
    evaluate,
    gradients,
    load_checkpoint,
    loss_sum,
    make_optimiser,
    read_state,
    save_checkpoint,
    train,
)
from tests.tiny import TEMPLATE, byte_tokenizer

V = 61
SIZES = {"layers": 2, "heads": 4, "kv_heads": None, "hidden": 32, "intermediate": 48, "positions": 64}


def new_model(family: str = "llama", attention: str = "causal", seed: int = 0) -> GPT:
    """A small model, its weights far from symmetric."""
    sizes = SIZES | {"kv_heads": 2 if family == "llama" else None}
    config = Config.from_dict(scratch.hf_config(family, V, **sizes, eos_id=0, attention=attention))
    model, generator = GPT(config), torch.Generator().manual_seed(seed)
    scratch.init_weights(model, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def some_corpus(rows: int = 40, seed: int = 0) -> Corpus:
    """Rows of 2 to 25 random tokens, scored from any place on."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(2, 26, (rows,), generator=generator)
    firsts = (torch.rand(rows, generator=generator) * sizes).long()
    ends = sizes.cumsum(0)
    tokens = torch.randint(V, (int(ends[-1]),), generator=generator, dtype=torch.int32)
    return Corpus(tokens, torch.stack([ends - sizes, ends, firsts], dim=1))


SETTINGS = Settings(steps=20, lr=3e-3, min_lr=3e-4, warmup=5)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_twenty_steps_have_the_losses_and_gradients_of_transformers(family, tmp_path):
    model, corpus = new_model(family), some_corpus()
    config = scratch.hf_config(
        family, V, **SIZES | {"kv_heads": 2 if family == "llama" else None}, eos_id=0, attention="causal"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_parameters(tmp_path / "model.safetensors", model.config, dict(model.named_parameters()))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).train()
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in theirs.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    batches = Batches(corpus, 6, seed=1)
    for step in train(model, make_optimiser(model, SETTINGS), corpus, batches, SETTINGS):
        rows = batches(step.number - 1)
        width = max(row.end - row.begin for row in rows)
        inputs, labels = torch.full((2, len(rows), width), 5)
        labels.fill_(-100)
        for i, row in enumerate(rows):
            ids = corpus.tokens[row.begin : row.end].long()
            inputs[i, : len(ids)], labels[i, row.first : len(ids)] = ids, ids[row.first :]
        loss = theirs(inputs, labels=labels).loss
        theirs.zero_grad()
        loss.backward()
        loss = loss.item()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert abs(step.loss - loss) < 1e-5
        assert abs(step.norm - float(norm)) < 1e-5
        ours = hf_tensors(model.config, {name: p.grad for name, p in model.named_parameters()})
        for name, parameter in theirs.named_parameters():
            torch.testing.assert_close(ours[name], parameter.grad, atol=1e-5, rtol=0)
        n = step.number - 1
        rate = 3e-3 * (n + 1) / 5 if n < 5 else 3e-4 + 2.7e-3 * 0.5 * (1 + math.cos(math.pi * (n - 5) / 14))
        assert step.rate == pytest.approx(rate, rel=1e-12)
        for group in optimiser.param_groups:
            group["lr"] = rate
        optimiser.step()


def literal_loss(model: GPT, corpus: Corpus, rows, prefix: bool = False) -> torch.Tensor:
    """Each row alone, each scored token by itself."""
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        ids = corpus.tokens[row.begin : row.end].long()
        length = torch.tensor([row.first]) if prefix else None
        log_p = model(ids[None], prefix=length)[0].log_softmax(-1)
        for t in range(row.first, len(ids)):
            total = total - log_p[t - 1, ids[t]]
    return total


@pytest.mark.parametrize("attention", ["causal", "prefix"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_loss_sum_is_that_of_each_row_alone(family, attention):
    model, corpus = new_model(family, attention).double(), some_corpus()
    rows = [corpus.row(i) for i in range(12)]
    batch = collate(corpus, rows)
    expected = literal_loss(model, corpus, rows, attention == "prefix")
    torch.testing.assert_close(loss_sum(model, batch), expected, atol=1e-9, rtol=1e-12)
    assert len(batch.targets) == sum(row.scored for row in rows)


@settings(max_examples=15, deadline=None)
@given(size=st.integers(1, 9), accumulate=st.integers(1, 4), seed=st.integers(0, 99))
def test_micro_batches_do_not_change_loss_or_gradient(size, accumulate, seed):
    model, corpus = new_model().double(), some_corpus(seed=seed)
    rows = Batches(corpus, size, seed)(0)
    total = sum(row.scored for row in rows)
    if total == 0:
        return
    results = []
    for cuts in (1, accumulate):
        loss = gradients(model, corpus, rows, total, replace(SETTINGS, accumulate=cuts))
        results.append((loss, [p.grad for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-9)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-9, rtol=1e-9)


def test_validation_loss_is_the_mean_over_all_scored_tokens():
    model, corpus = new_model().double(), some_corpus(13)
    rows = [corpus.row(i) for i in range(13)]
    expected = literal_loss(model, corpus, rows).item() / sum(row.scored for row in rows)
    assert evaluate(model, corpus, all_batches(corpus, 4)) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 300), size=st.integers(1, 8), seed=st.integers(-5, 5))
def test_batches_are_full_follow_from_the_step_and_have_each_example_once_an_epoch(n, size, seed):
    spans = torch.tensor([(3 * i, 3 * i + 2 + i % 2, 1) for i in range(n)])
    corpus = Corpus(torch.arange(3 * n, dtype=torch.int32), spans)
    batches = Batches(corpus, size, seed)
    steps = [batches(step) for step in range(WINDOW)]
    assert all(len(rows) == size for rows in steps)
    assert Batches(corpus, size, seed)(WINDOW - 1) == steps[-1]
    assert all(rows == sorted(rows, key=lambda row: row.end - row.begin) for rows in steps)
    counts = [sum(row.begin == 3 * i for rows in steps for row in rows) for i in range(n)]
    assert sum(counts) == WINDOW * size
    assert max(counts) - min(counts) <= 1


def test_orders_differ_by_epoch_and_seed():
    corpus = some_corpus(WINDOW)
    first, second = ([Batches(corpus, 1, seed)(s) for s in range(2 * WINDOW)] for seed in (0, 1))
    assert first[:WINDOW] != first[WINDOW:]
    assert first[:WINDOW] != second[:WINDOW]


def test_little_is_padded():
    corpus = some_corpus(2000)
    batches = Batches(corpus, 8, 0)
    for step in range(WINDOW):
        lengths = [row.end - row.begin for row in batches(step)]
        assert max(lengths) - min(lengths) <= 2


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("One two three.\nFour five, six.\n" * 9, encoding="utf-8")
    return path


def test_a_text_is_cut_into_blocks_that_move_with_the_epoch(text):
    tokenizer = byte_tokenizer()
    ids = [*tokenizer.encode(text.read_text()), 2]
    whole = read_corpus(text, tokenizer, 16, chat=False, whole=True)
    rows = [whole.row(i) for i in range(len(whole.spans))]
    predicted = [t for row in rows for t in range(row.begin + row.first, row.end)]
    assert predicted == list(range(1, len(ids)))
    assert whole.tokens.tolist() == ids
    assert all(row.end - row.begin <= 17 for row in rows)
    corpus = read_corpus(text, tokenizer, 16, chat=False)
    n = len(corpus.spans)
    epochs = []
    batches = Batches(corpus, n, seed=0)
    for step in range(4):
        epochs.append(sorted(row.begin for row in [batches._row(step * n + i) for i in range(n)]))
        assert [b - a for a, b in zip(epochs[-1], epochs[-1][1:], strict=False)] == [16] * (n - 1)
        assert 0 <= epochs[-1][0] < 16
    assert len({epoch[0] for epoch in epochs}) > 1


@pytest.mark.parametrize("length", [1, 5, 100, 1000])
def test_every_block_of_a_text_has_something_to_predict(text, length):
    corpus = read_corpus(text, byte_tokenizer(), length, chat=False)
    for shift in range(corpus.shift):
        assert all(corpus.row(i, shift).scored > 0 for i in range(len(corpus.spans)))


def test_a_completion_is_scored_from_the_token_that_spans_the_join():
    tokenizer = byte_tokenizer()
    joined = tokenizer.encode("The capital")
    assert joined == tokenizer.encode("The") + tokenizer.encode(" capital")
    ids, first = tokenizer.example("The ", "capital", chat=False)
    assert ids == [*joined, 2]
    assert first == len(tokenizer.encode("The"))  # " capital", or its first piece, has the prompt's space
    ids, first = tokenizer.example("The", " capital", chat=False)
    assert (ids, first) == ([*joined, 2], len(tokenizer.encode("The")))
    with pytest.raises(ValueError, match="no eos token"):
        Tokenizer(byte_tokenizer()._library).example("a", "b", chat=False)


@settings(max_examples=60, deadline=None)
@given(prompt=st.text(min_size=1, max_size=12), completion=st.text(min_size=1, max_size=12), kind=st.integers(0, 2))
def test_the_scored_tokens_are_those_with_anything_of_the_completion(prompt, completion, kind):
    texts = ["The capital of Mongolia. 日本 \n\n"]
    tokenizer = (
        byte_tokenizer(),
        Tokenizer(scratch.train_bpe(texts, 270), eos_ids=(0,)),
        Tokenizer(scratch.train_characters(texts, 400), eos_ids=(0,)),
    )[kind]
    ids, first = tokenizer.example(prompt, completion, chat=False)
    assert tokenizer.decode(ids) == prompt + completion
    assert prompt.startswith(tokenizer.decode(ids[:first]).rstrip("\ufffd"))
    assert len(tokenizer.decode(ids[: first + 1])) > len(prompt)


def test_a_chat_model_is_trained_on_what_generation_gives_it():
    tokenizer = byte_tokenizer(TEMPLATE)
    ids, first = tokenizer.example("The capital?", "Ulaanbaatar", chat=True)
    prompt = tokenizer.prompt("The capital?", chat=True)
    assert ids[:first] == prompt
    assert ids[first:] == [*tokenizer.encode("Ulaanbaatar"), 2]
    template = TEMPLATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>'")  # ends in a control token
    ids, first = byte_tokenizer(template).example("The capital?", " river", chat=True)
    assert ids[first:] == [*tokenizer.encode(" river"), 2]


def test_fields_are_encoded_as_in_the_keys_of_a_trie():
    tokenizer = byte_tokenizer()
    ids, first = tokenizer.example("q", ["river", "", "Tuul"], chat=False)
    separator = tokenizer.separator
    encode = tokenizer.encode
    assert ids == [*encode("q"), *encode("river"), separator, separator, *encode("Tuul"), 2]
    assert first == len(encode("q"))
    assert tokenizer.example("q", ["river"], chat=False)[0] == [*encode("q"), *encode("river"), 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "expected an object in JSON"),
        ("[1]", "expected a JSON object"),
        ('{"prompt": "a"}', "'completion'"),
        ('{"prompt": "a", "completion": 3}', "a string or a list"),
        ('{"prompt": 3, "completion": "a"}', "expected a JSON object"),
        ('{"prompt": "a", "completion": ""}', "expected some text in both"),
        ('{"prompt": "", "completion": "a"}', "expected some text in both"),
        ('{"prompt": "\\ud800", "completion": "a"}', "surrogates"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "pairs.jsonl"
    good = json.dumps({"prompt": "a", "completion": "b"})
    path.write_bytes(f"{good}\n\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        read_corpus(path, byte_tokenizer(), 64, chat=False)
    assert str(error.value).startswith(f"{path}:3: ")


def test_longer_examples_are_left_out_and_counted(tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = [{"prompt": "98765"[:n], "completion": "x"} for n in (3, 4, 5)]
    path.write_text("\n".join(map(json.dumps, lines)))
    corpus = read_corpus(path, byte_tokenizer(), 5, chat=False)  # a row's last token, the eos, is only predicted
    assert (len(corpus.spans), corpus.left_out) == (2, 1)
    with pytest.raises(ValueError, match="3 examples have more than 1 tokens, up to 6"):
        read_corpus(path, byte_tokenizer(), 1, chat=False)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="it is empty"):
        read_corpus(tmp_path / "empty.txt", byte_tokenizer(), 5, chat=False)


@settings(max_examples=40, deadline=None)
@given(st.text(max_size=30))
def test_tokenizers_from_scratch_know_every_text(text):
    for library in (scratch.train_bpe(["ab ab"], 300), scratch.train_characters(["ab日"], 300)):
        tokenizer = Tokenizer(library, eos_ids=(0,))
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not {0, 1} & set(ids)
        assert tokenizer.separator == 1
    assert tokenizer.encode("a日") == [tokenizer._library.token_to_id("a"), tokenizer._library.token_to_id("日")]


def test_sizes_that_do_not_fit_are_refused():
    keywords = SIZES | {"eos_id": 0, "attention": "causal"}
    with pytest.raises(ValueError, match="heads a multiple of kv-heads"):
        scratch.hf_config("llama", V, **keywords | {"kv_heads": 3})
    with pytest.raises(ValueError, match="an even number"):
        scratch.hf_config("llama", V, **keywords | {"hidden": 36})
    with pytest.raises(ValueError, match="as many kv-heads"):
        scratch.hf_config("gpt2", V, **keywords | {"kv_heads": 2})
    with pytest.raises(ValueError, match="at least 258 tokens"):
        scratch.train_bpe(["a"], 100)
    with pytest.raises(ValueError, match="at least 259 tokens"):
        scratch.train_characters(["a"], 100)


def test_steps_from_a_checkpoint_are_those_of_the_unbroken_run(tmp_path):
    corpus, path = some_corpus(), tmp_path / "c.safetensors"
    batches = Batches(corpus, 4, 0)
    model = new_model()
    optimiser = make_optimiser(model, SETTINGS)
    unbroken = []
    for step in train(model, optimiser, corpus, batches, SETTINGS):
        unbroken.append(step)
        if step.number == 7:
            save_checkpoint(path, model, optimiser, {"step": 7})
    other = new_model(seed=5)
    optimiser = make_optimiser(other, SETTINGS)
    assert read_state(path) == {"step": 7}
    load_checkpoint(path, other, optimiser, 7)
    assert list(train(other, optimiser, corpus, batches, SETTINGS, done=7)) == unbroken[7:]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_a_loss_that_is_not_finite_leaves_the_weights_alone():
    model, corpus = new_model(), some_corpus()
    with torch.no_grad():
        model.blocks[0].mlp.down.weight[0, 0] = math.nan
    before = copy.deepcopy(model.state_dict())
    steps = train(model, make_optimiser(model, SETTINGS), corpus, Batches(corpus, 4, 0), SETTINGS)
    with pytest.raises(ArithmeticError, match="step 1 has a loss of nan"):
        next(steps)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)


def test_replacing_keeps_the_old_file_when_writing_fails(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(error: Exception) -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(OSError, match="the old file stays as it was"):
        fail(OSError("No space left on device"))
    with pytest.raises(KeyError):
        fail(KeyError())
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"
    with replacing(path) as temporary:
        temporary.write_text("new")
    assert path.read_text() == "new"
