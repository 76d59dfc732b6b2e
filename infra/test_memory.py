"""What a run needs, from configurations alone, against models that are there."""

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from config import Config, UserError, resolve
from infra import memory

SETTINGS = Qwen2Config(
    vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


def settings(**flags) -> Config:
    given = dict(prompts_per_step=3, num_generations=4, max_completion_length=20, micro_batch_tokens=512, eval_every=0)
    return resolve(Config(**(given | flags)), {}, on_gpu=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_cache_are_what_a_model_has(dtype):
    model = Qwen2ForCausalLM(SETTINGS)
    weights = sum(p.numel() * 4 for p in model.parameters())
    cache = DynamicCache(config=SETTINGS)
    model.to(dtype)(torch.ones(12, 30, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    need = memory.needed(SETTINGS, settings(dtype=str(dtype).removeprefix("torch."), beta=0.1), 1, longest_prompt=10)
    copy = weights / 2 if dtype == torch.bfloat16 else 0
    assert need["weights"] == weights and need["Adam"] == 2 * weights
    assert need["reference"] == weights and need["rollout"] == copy + held
    halves = memory.needed(SETTINGS, settings(dtype=str(dtype).removeprefix("torch.")), 2, longest_prompt=10)
    assert halves["rollout"] == copy + held / 2 and halves["reference"] == 0


def test_an_evaluation_needs_the_weights_and_a_cache():
    need = memory.needed(SETTINGS, settings(steps=0, eval_every=1), 1, 10)
    assert {name for name in need if need[name]} == {"weights", "rollout", "one completion"}
    assert memory.totals(need)[2] < memory.totals(memory.needed(SETTINGS, settings(), 1, 10))[2] / 2


def test_sharded_each_rank_needs_its_part_and_a_whole_copy_to_sample():
    one = memory.needed(SETTINGS, settings(beta=0.1), 1, 10)
    part = memory.needed(SETTINGS, settings(beta=0.1, shard=True, shard_size=4), 8, 10)
    for name in ("weights", "Adam", "reference"):
        assert part[name] == one[name] / 4
    cache = one["rollout"] / 12
    assert part["rollout"] == one["weights"] + 2 * cache, "12 completions on 8 ranks"
    with pytest.raises(UserError, match="cannot fit"):  # though each of the parts would
        memory.check(part, one["weights"] + cache)


def test_activations_are_about_what_autograd_keeps():
    model, kept = Qwen2ForCausalLM(SETTINGS).train(), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.model(input_ids=torch.ones(8, 64, dtype=torch.long), use_cache=False)
    assert out.last_hidden_state is not None
    head = 2 * 256 * 500 * 4 + 500 * 64 * 4
    estimate = memory.needed(SETTINGS, settings(), 1, 10)
    assert estimate["update"] - estimate["weights"] - head == pytest.approx(sum(kept.values()), rel=0.15)


def test_what_cannot_fit_is_said_before_anything_is_loaded():
    need = memory.needed(SETTINGS, settings(), 1, 10)
    assert "rollout" in memory.check(need, 1e12)
    with pytest.raises(UserError, match=r"cannot fit.*Try --gradient_checkpointing"):
        memory.check(need, need["weights"] * 3)
    between = need["weights"] + need["Adam"] + (need["update"] + need["one completion"]) / 2
    assert "in smaller parts" in memory.check(need, between)
    smaller = memory.needed(SETTINGS, settings(gradient_checkpointing=True), 1, 10)
    assert smaller["update"] < need["update"]


def test_a_real_model_by_hand():
    """7B, completions of 4096 tokens: 12 P bytes stay, 16 P with a reference; divided over 8 ranks with --shard."""
    P = 7_615_616_512
    seven = Qwen2Config(
        vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4,
    )  # fmt: skip
    cache = 28 * 2 * 4 * 128 * 2 * (512 + 4096)  # layers, keys and values, heads, their size, bytes, tokens
    for ranks, rows in ((1, 16), (8, 128)):
        given = dict(prompts_per_step=rows, num_generations=1, max_completion_length=4096, beta=0.1, shard=ranks > 1)
        config = resolve(Config(**given, eval_every=0), {}, on_gpu=True)
        need = memory.needed(seven, config, ranks, longest_prompt=512)
        stays, peak, _ = memory.totals(need)
        assert need["weights"] == 4 * P / ranks and stays == 16 * P / ranks
        assert need["rollout"] == 2 * P + 16 * cache and peak == stays + max(need["rollout"], need["update"])
