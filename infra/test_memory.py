"""What a run needs, from configurations alone, against models that are there."""

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, Qwen2Config, Qwen2ForCausalLM

import conftest
from config import Config, UserError, resolve
from infra import memory

SETTINGS = Qwen2Config(
    vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


def settings(**flags) -> Config:
    given = dict(prompts_per_step=3, num_generations=4, max_completion_length=20, micro_batch_tokens=512, eval_every=0)
    return resolve(Config(**(given | flags)), {}, on_gpu=False)


def costs(world: int = 1, **flags) -> memory.Costs:
    return memory.costs(SETTINGS, settings(**flags), world, longest_prompt=10)


def needed(world: int = 1, **flags) -> dict[str, float]:
    return memory.needed(settings(**flags), costs(world, **flags))


def least(**flags) -> float:
    """With one completion at a time."""
    return memory.peak(settings(**flags | dict(rollout_tokens=1, micro_batch_size=1)), costs(**flags))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_cache_are_what_a_model_has(dtype):
    model = Qwen2ForCausalLM(SETTINGS)
    weights = sum(p.numel() * 4 for p in model.parameters())
    cache = DynamicCache(config=SETTINGS)
    model.to(dtype)(torch.ones(12, 30, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    need = needed(dtype=str(dtype).removeprefix("torch."), beta=0.1)
    copy = weights / 2 if dtype == torch.bfloat16 else 0
    held += 12 * 500 * (dtype.itemsize + 4 + 4 + 8)  # the distributions
    assert need["weights"] == weights and need["Adam"] == 2 * weights
    assert need["reference"] == weights and need["rollout"] == copy + held
    halves = needed(world=2, dtype=str(dtype).removeprefix("torch."))
    assert halves["rollout"] == copy + held / 2 and halves["reference"] == 0


def test_an_evaluation_needs_the_weights_and_a_cache():
    need = needed(steps=0, eval_every=1)
    assert {name for name in need if need[name]} == {"weights", "rollout"}
    assert least(steps=0, eval_every=1) < least() / 2


def test_sharded_each_rank_needs_its_part_and_a_whole_copy_to_sample():
    one = needed(beta=0.1)
    sharded = dict(world=8, beta=0.1, shard=True, shard_size=4)
    part = needed(**sharded)
    for name in ("weights", "Adam", "reference"):
        assert part[name] == one[name] / 4
    cache = one["rollout"] / 12
    assert part["rollout"] == one["weights"] + 2 * cache, "12 completions on 8 ranks"
    with pytest.raises(UserError, match="cannot fit"):  # though each of the parts would
        memory.check(settings(), costs(**sharded), one["weights"] + cache)


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
    estimate = needed(prompts_per_step=30)
    assert estimate["update"] - estimate["weights"] - head == pytest.approx(sum(kept.values()), rel=0.15)


def test_what_cannot_fit_is_said_before_anything_is_loaded():
    need = needed()
    assert "rollout" in memory.check(settings(), costs(), 1e12)
    with pytest.raises(UserError, match=r"cannot fit.*Try --gradient_checkpointing"):
        memory.check(settings(), costs(), need["weights"] * 3)
    assert "in smaller parts" in memory.check(settings(), costs(), least())
    with pytest.raises(UserError, match="cannot fit"):
        memory.check(settings(), costs(), least() - 1)
    assert needed(gradient_checkpointing=True)["update"] < need["update"]


def test_sharded_an_update_that_cannot_fit_is_refused_because_it_cannot_be_done_in_smaller_parts():
    given = dict(shard=True, micro_batch_size=9)
    need, cost = needed(**given), costs(**given)
    peak = memory.peak(settings(**given), cost)
    assert need["update"] > need["rollout"]
    memory.check(settings(**given), cost, peak)
    with pytest.raises(UserError, match=r"lower --micro_batch_size \(now 9\) or --micro_batch_tokens \(now 512\)"):
        memory.check(settings(**given), cost, peak - 1)


def test_on_a_gpu_what_is_free_counts_and_a_chunk_of_the_head_is_larger(monkeypatch):
    on_cpu = costs()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 9))
    assert memory.free_memory() == 5
    assert costs().update - on_cpu.update == 2 * (2048 - 256) * 500 * 4


# ---- Real shapes ----

QWEN_7B = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4,
)  # fmt: skip
QWEN_HALF_B = Qwen2Config(
    vocab_size=151_936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
LLAMA_2_7B = LlamaConfig(
    vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, num_hidden_layers=32, num_attention_heads=32,
)  # fmt: skip


def on_gpu(**flags) -> Config:
    given = dict(prompts_per_step=128, num_generations=8, max_completion_length=1024, eval_every=0)
    return resolve(Config(**(given | flags)), {}, on_gpu=True)


def test_a_real_model_by_hand():
    """7B, completions of 4096 tokens: 12 P bytes stay, 16 P with a reference; divided over 8 ranks with --shard."""
    P = 7_615_616_512
    row = 28 * 2 * 4 * 128 * 2 * (512 + 4096)  # layers, keys and values, heads, their size, bytes, tokens
    row += 152_064 * (2 + 4 + 4 + 8)  # the distribution
    for ranks, rows in ((1, 16), (8, 128)):
        given = dict(prompts_per_step=rows, num_generations=1, max_completion_length=4096, beta=0.1, shard=ranks > 1)
        config = on_gpu(**given, rollout_tokens=10**6, micro_batch_tokens=16_384)
        cost = memory.costs(QWEN_7B, config, ranks, longest_prompt=512)
        need = memory.needed(config, cost)
        assert need["weights"] == 4 * P / ranks and need["rollout"] == 2 * P + 16 * row
        assert memory.peak(config, cost) == 16 * P / ranks + max(need["rollout"], need["update"])


FITTING = {  # model, ranks with --shard or 0, bytes free on each, settings; rollout_tokens, micro_batch_tokens
    "7B on 8 x 80 GB": (QWEN_7B, 8, 80e9, {}, 1 << 19, 1 << 12),
    "with checkpointing and a reference": (
        QWEN_7B, 8, 80e9, dict(gradient_checkpointing=True, beta=0.1), 1 << 19, memory.MOST_MICRO_BATCH_TOKENS
    ),
    "a cache eight times as large": (LLAMA_2_7B, 8, 80e9, {}, 1 << 16, 1 << 12),
    "half a billion on one of 80 GB": (QWEN_HALF_B, 0, 80e9, {}, 1 << 21, 1 << 14),
    "half a billion on one of 141 GB": (
        QWEN_HALF_B, 0, 141e9, {}, memory.MOST_ROLLOUT_TOKENS, memory.MOST_MICRO_BATCH_TOKENS
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FITTING)
def test_budgets_that_are_left_open_fit_and_twice_as_much_would_not(case):
    model, ranks, free, given, rollout_tokens, micro_batch_tokens = FITTING[case]
    config = on_gpu(shard=bool(ranks), **given)
    cost = memory.costs(model, config, ranks or 1, longest_prompt=512)
    config = memory.fitting(config, cost, free)
    assert (config.rollout_tokens, config.micro_batch_tokens) == (rollout_tokens, micro_batch_tokens)
    assert memory.peak(config, cost) <= memory.ROOM * free
    cost = replace(cost, sampled=10**6, trained=10**6)  # completions enough for any budget
    for name, most in (("rollout_tokens", 1 << 22), ("micro_batch_tokens", 1 << 15)):
        twice = replace(config, **{name: 2 * getattr(config, name)})
        assert getattr(config, name) == most or memory.peak(twice, cost) > memory.ROOM * free


def test_budgets_given_by_hand_are_kept_and_one_completion_is_the_least():
    config = on_gpu(rollout_tokens=7)
    cost = memory.costs(QWEN_7B, config, 1, longest_prompt=512)
    fitted = memory.fitting(config, cost, free=80e9)
    assert (fitted.rollout_tokens, fitted.micro_batch_tokens) == (7, 1024), "of 512 + 1024 tokens"
    with pytest.raises(UserError, match="It cannot fit"):
        memory.check(fitted, cost, 80e9)
    rows = on_gpu(micro_batch_size=4)
    assert memory.fitting(rows, cost, free=1e12).micro_batch_tokens is None, "rows given alone: any number of tokens"
    on_cpu = settings(micro_batch_tokens=None)
    assert memory.fitting(on_cpu, cost, free=1e12) == on_cpu


# ---- In a run ----


def budgets_left_open(free_by_rank: list[float]) -> None:
    """As on GPUs, with so much memory."""
    conftest.replace(
        "infra.command_line.resolve", lambda resolve: lambda config, task, on_gpu: resolve(config, task, True)
    )
    free = free_by_rank[int(os.environ.get("RANK", 0))]
    conftest.replace("infra.memory.free_memory", lambda _: lambda: free)


def test_a_run_goes_on_with_the_budgets_that_it_began_with(sorting, tmp_path):
    """Those that fit on the rank with the least memory."""
    given, out = sorting | dict(dtype="float32", save_every=1), tmp_path / "out"
    shown = conftest.run(given, out, partial(budgets_left_open, [1e12, 1e7]), world=2)
    began = json.loads((out / "config.json").read_text())["settings"]
    budgets = began["rollout_tokens"], began["micro_batch_tokens"]
    assert budgets[0] < memory.MOST_ROLLOUT_TOKENS and budgets[1] < memory.MOST_MICRO_BATCH_TOKENS
    assert f"with up to {budgets[0]} tokens in the cache" in shown and f"up to {budgets[1]} padded tokens" in shown

    conftest.run(given | dict(steps=3, micro_batch_tokens=64), out, partial(budgets_left_open, [1e12]))
    went_on = json.loads((out / "config.json").read_text())["settings"]
    assert (went_on["rollout_tokens"], went_on["micro_batch_tokens"]) == (budgets[0], 64)
    conftest.run(given | dict(overwrite=True), out, partial(budgets_left_open, [1e12]))
    anew = json.loads((out / "config.json").read_text())["settings"]
    assert anew["rollout_tokens"] == memory.MOST_ROLLOUT_TOKENS
