"""Prefix attention (UniLM): against transformers with an explicit mask, and the loops against one whole forward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from minikid.beam import beam_search
from minikid.config import Config
from minikid.decode import Sampler, Vanilla, generate_batch, generate_on_cache, greedy
from minikid.folder import hf_tensors
from minikid.memory import WorkingMemory
from minikid.model import GPT
from tests.tiny import tiny_model

V = 61


def prefix_model(family: str = "llama") -> GPT:
    """tiny.tiny_model, in float64, with prefix attention."""
    causal = tiny_model(V, family)
    raw = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64}
    if family == "llama":
        raw = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
        raw |= {"hidden_size": 24, "intermediate_size": 40, "max_position_embeddings": 64}
    raw |= {"model_type": family, "vocab_size": V, "eos_token_id": 2, "attention": "prefix"}
    model = GPT(Config.from_dict(raw)).double().eval().requires_grad_(False)
    model.load_state_dict(causal.state_dict())
    return model


def literal_mask(prefix: torch.Tensor, T: int) -> torch.Tensor:
    """Row by row, query by query: 0 where it may look, -inf elsewhere."""
    mask = torch.full((len(prefix), 1, T, T), -torch.inf, dtype=torch.float64)
    for b, p in enumerate(prefix.tolist()):
        for t in range(T):
            mask[b, 0, t, : max(t + 1, p)] = 0
    return mask


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_logits_are_those_of_transformers_with_the_mask_written_out(family):
    model = prefix_model(family)
    if family == "gpt2":
        theirs = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=V,
                n_embd=24,
                n_layer=2,
                n_head=4,
                n_positions=64,
                bos_token_id=2,
                eos_token_id=2,
                attn_implementation="eager",
            )
        )
    else:
        theirs = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=V,
                hidden_size=24,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=6,
                intermediate_size=40,
                max_position_embeddings=64,
                rms_norm_eps=1e-6,
                attn_implementation="eager",
            )
        )
    weights = hf_tensors(model.config, dict(model.named_parameters()))
    theirs = theirs.double().eval()
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert (set(missing) - {"lm_head.weight"}, unexpected) == (set(), [])
    tokens = torch.randint(V, (4, 12), generator=torch.Generator().manual_seed(0))
    prefix = torch.tensor([0, 1, 5, 12])
    expected = theirs(tokens, attention_mask=literal_mask(prefix, 12)).logits
    torch.testing.assert_close(model(tokens, prefix=prefix), expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(model(tokens[:1]), expected[:1], atol=2e-5, rtol=1e-5)  # without one: 0


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 12), new=st.integers(1, 8), chunk=st.integers(1, 3), seed=st.integers(0, 99))
def test_a_prompt_and_steps_on_the_cache_are_one_forward_with_its_prefix(n, new, chunk, seed):
    model = prefix_model(("gpt2", "llama")[seed % 2])
    tokens = torch.randint(V, (1, n + new), generator=torch.Generator().manual_seed(seed))
    expected = model(tokens, prefix=torch.tensor([n]))
    cache = model.new_cache()
    parts = [model(tokens[:, :n], cache)]
    parts += [model(tokens[:, i : min(i + chunk, n + new)], cache) for i in range(n, n + new, chunk)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, atol=2e-5, rtol=1e-5)
    cache.truncate(0)  # an empty cache again: what comes is a prompt
    torch.testing.assert_close(model(tokens[:, :n], cache), expected[:, :n], atol=1e-6, rtol=1e-6)


def test_a_prompt_sees_both_ways_and_what_follows_does_not():
    model = prefix_model()
    tokens = torch.arange(10)[None] + 3
    before = model(tokens, prefix=torch.tensor([5]))
    for place in (4, 8):
        changed = tokens.clone()
        changed[0, place] += 20
        moved = (model(changed, prefix=torch.tensor([5])) - before).abs().amax(-1)[0] > 1e-9
        assert moved.tolist() == ([True] * 10 if place == 4 else [False] * 8 + [True] * 2)


def test_loops_of_prompts_side_by_side_follow_the_whole_forward():
    model = prefix_model()
    prompts = [[5, 6, 7, 8, 9], [11, 12], [5, 6, 7, 8, 9], [13]]
    rows = generate_batch(model, prompts, [Vanilla()] * 4, greedy, max_new_tokens=8, eos_ids=())
    beams = [beam_search(model, prompt, Vanilla(), 3, max_new_tokens=5, eos_ids=())[0] for prompt in prompts]
    for prompt, row, best in zip(prompts, rows, beams, strict=True):
        for found in (row, best):
            log_p = model(torch.tensor([[*prompt, *found.tokens]]), prefix=torch.tensor([len(prompt)])).log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) + len(found.tokens) - 1)
            expected = [float(log_p[0, t, token]) for t, token in zip(places, found.tokens, strict=True)]
            torch.testing.assert_close(found.log_probs, expected, atol=2e-5, rtol=1e-5)


def test_what_would_read_a_prompt_in_parts_is_refused():
    model = prefix_model()
    with pytest.raises(ValueError, match="last token apart"):
        generate_on_cache(model, [1, 2], None, Sampler())
    memory = WorkingMemory(tiny_model(V), 1, 4)
    with pytest.raises(ValueError, match="a working memory"):
        model(torch.tensor([[3]]), model.new_cache(), memory)
    with pytest.raises(ValueError, match="expected attention 'causal' or 'prefix', got 'both'"):
        Config.from_dict({"model_type": "gpt2", "attention": "both"})
