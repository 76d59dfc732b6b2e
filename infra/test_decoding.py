"""Heads that share a key head are taken together while decoding: the same tokens as without."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infra import decoding
from rollout import Sampling, rollout, uniforms


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_grouped_heads_give_the_same_tokens(monkeypatch, top_p):
    torch.manual_seed(0)
    sizes = dict(vocab_size=40, hidden_size=56, intermediate_size=64, num_hidden_layers=2, initializer_range=0.3)
    heads = dict(num_attention_heads=14, num_key_value_heads=2, attn_implementation="sdpa")
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, bos_token_id=None, eos_token_id=1, pad_token_id=0))
    prompts = [[5] * (2 + i % 3) for i in range(12)]  # of several lengths, so that there is a mask
    uniform = uniforms(0, 1, [(i, 0) for i in range(12)], 16)
    sampling = Sampling(max_completion_length=16, eos_ids=(1, 2, 3), top_p=top_p)
    plain = rollout(model, prompts, uniform, sampling)

    taken, own = [], decoding.F.scaled_dot_product_attention
    monkeypatch.setattr(
        decoding.F,
        "scaled_dot_product_attention",
        lambda q, *rest, **more: taken.append(q.shape) or own(q, *rest, **more),
    )
    with decoding.decoding(model, torch.float32):
        grouped = rollout(model, prompts, uniform, sampling)
    assert model.config._attn_implementation == "sdpa"
    assert any(shape[1:3] == (2, 7) for shape in taken), "seven heads are the queries of one"
    assert len({len(completion.ids) for completion in plain}) > 1, "rows are dropped"
    for a, b in zip(plain, grouped, strict=True):
        assert a.ids == b.ids and a.logp == pytest.approx(b.logp, abs=1e-5)
