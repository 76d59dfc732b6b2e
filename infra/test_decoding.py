"""What a model is while it decodes, and after it."""

import pytest
import torch

from conftest import tiny_model
from infra.decoding import decoding
from rollout import Sampling, rollout, uniforms


def test_decoding_has_weights_in_the_dtype_of_the_computation_and_gives_the_very_weights_back():
    """Buffers keep their precision; tied weights stay tied; whatever happens within."""
    model = tiny_model("llama tied", torch.float32)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), decoding(model, torch.bfloat16):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {x.dtype for x in model.buffers()} == {torch.float32}
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        raise KeyboardInterrupt
    after = model.state_dict()
    assert all(after[name].dtype == x.dtype and after[name].equal(x) for name, x in before.items())


def test_a_cache_of_grouped_heads_is_not_repeated_for_each_query(monkeypatch):
    """Under a mask, too: prompts of several lengths."""
    model, seen = tiny_model("llama", torch.float32).eval(), set()
    attention = torch.nn.functional.scaled_dot_product_attention

    def watched(q, k, *rest, **more):
        seen.add((q.shape[1:3], k.shape[1], more["attn_mask"] is not None))
        return attention(q, k, *rest, **more)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    rollout(model, [[5, 6], [5, 6, 7]], uniforms(0, 1, [(0, 0), (1, 0)], 4), Sampling(4, eos_ids=(1,)))
    assert ((2, 2), 2, True) in seen, "four query heads on two key heads are two queries of each"
