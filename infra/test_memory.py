"""What a run needs, from configurations alone, against models that are there and a real one worked out by hand."""

import json
import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import conftest
from config import Config, UserError, resolve
from infra import memory

SMALL = Qwen2Config(
    vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


def small(**flags) -> Config:
    given = dict(prompts_per_step=3, num_generations=4, max_completion_length=20, micro_batch_tokens=512, eval_every=0)
    return resolve(Config(**(given | flags)), {}, on_gpu=False)


def test_what_is_counted_is_what_a_model_has():
    """Weights and cache exactly; what autograd keeps of a micro-batch within 15 %: norms and rotations are not counted
    one by one."""
    model, kept = Qwen2ForCausalLM(SMALL).train(), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.model(input_ids=torch.ones(8, 64, dtype=torch.long), use_cache=False)
    assert out.last_hidden_state is not None
    weights = sum(p.numel() * 4 for p in model.parameters())
    cost = memory.costs(SMALL, small(), world=1, longest_prompt=10)
    assert cost.stays == {"weights": weights, "Adam": 2 * weights, "reference": 0}
    assert cost.token * 8 * 64 == pytest.approx(sum(kept.values()), rel=0.15)
    for dtype, copy in ((torch.float32, 0), (torch.bfloat16, weights / 2)):
        cache = DynamicCache(config=SMALL)
        model.to(dtype)(torch.ones(1, 30, dtype=torch.long), past_key_values=cache, use_cache=True)
        held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
        cost = memory.costs(SMALL, small(dtype=str(dtype).removeprefix("torch.")), world=1, longest_prompt=10)
        assert (cost.rollout, cost.row) == (copy, held + 500 * (dtype.itemsize + 4 + 4 + 8))


# ---- A real model ----

QWEN_7B = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4,
)  # fmt: skip
P, ENDS, LAYERS, HIDDEN = 7_615_616_512, 2 * 152_064 * 3584, 28, 3584
LENGTH = 512 + 4096


def on_gpu(**flags) -> Config:
    given = dict(prompts_per_step=128, num_generations=8, max_completion_length=4096, eval_every=0)
    return resolve(Config(**(given | flags)), {}, on_gpu=True)


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_real_model_by_hand(monkeypatch, ranks):
    """On GPUs, in bf16, with a reference; with 8 ranks sharded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given = dict(prompts_per_step=16, num_generations=ranks, beta=0.1, shard=ranks > 1)
    config = on_gpu(**given, rollout_tokens=10**6, micro_batch_tokens=16_384)
    cost = memory.costs(QWEN_7B, config, ranks, longest_prompt=512)
    row = LAYERS * 2 * 4 * 128 * 2 * LENGTH  # keys and values, heads, their size, bytes, tokens
    row += 152_064 * (2 + 4 + 4 + 8)  # the distribution
    update = 4 * P / ranks  # gradients
    update += 2 * P if ranks == 1 else ENDS * 2 + 2 * (P - ENDS) / LAYERS * (2 + 4)  # a copy; or two layers and gradients
    update += 16 * ranks * LENGTH * (3 * 8 + 4 * 4 + 8)  # the completions as tensors
    update += (2 * 2048 + HIDDEN) * 152_064 * 4  # two chunks of logits, and the head's gradient
    token = LAYERS * (4 * 11 * HIDDEN + 2 * 4 * 18_944)
    assert cost.stays == {"weights": 4 * P / ranks, "Adam": 8 * P / ranks, "reference": 4 * P / ranks}
    expected = cost.stays | {"rollout": 2 * P + 16 * row, "update": update + 16_384 * token}
    need = memory.needed(config, cost)
    assert need == {name: pytest.approx(amount) for name, amount in expected.items()}
    assert memory.peak(config, cost) == 16 * P / ranks + max(need["rollout"], need["update"])

    # What is done in smaller parts needs less: activations of one number between layers, fewer rows.
    kept = replace(config, gradient_checkpointing=True)
    of_a_layer = 4 * 11 * HIDDEN + 2 * 4 * 18_944
    between = HIDDEN * LAYERS * (4 if ranks == 1 else 2)
    assert memory.costs(QWEN_7B, kept, ranks, 512).token == between + of_a_layer
    fewer = replace(config, rollout_tokens=3 * LENGTH, micro_batch_size=2)
    need = memory.needed(fewer, cost)
    assert need["rollout"] == 2 * P + 3 * row and need["update"] == pytest.approx(update + 2 * LENGTH * token)
    evaluation = replace(config, steps=0, eval_every=1, beta=0.0, eval_prompts=7 * ranks, eval_k=4)
    cost = memory.costs(QWEN_7B, evaluation, ranks, 512)
    assert cost.stays == {"weights": 4 * P / ranks, "Adam": 0, "reference": 0}
    assert memory.needed(evaluation, cost)["rollout"] == 2 * P + 28 * row and memory.needed(evaluation, cost)["update"] == 0


@pytest.mark.parametrize("checkpointing", [False, True])
def test_budgets_that_are_left_open_fit_and_twice_as_much_would_not(checkpointing):
    config = on_gpu(shard=True, gradient_checkpointing=checkpointing, max_completion_length=1024)
    cost = memory.costs(QWEN_7B, config, 8, longest_prompt=512)
    config = memory.fitting(config, cost, free=80e9)
    most = memory.MOST_MICRO_BATCH_TOKENS if checkpointing else 1 << 12
    assert (config.rollout_tokens, config.micro_batch_tokens) == (1 << 19, most)
    assert memory.peak(config, cost) <= memory.ROOM * 80e9
    cost = replace(cost, sampled=10**6, trained=10**6)  # completions enough for any budget
    for name in ("rollout_tokens", "micro_batch_tokens"):
        twice = replace(config, **{name: 2 * getattr(config, name)})
        capped = checkpointing and name == "micro_batch_tokens"
        assert capped or memory.peak(twice, cost) > memory.ROOM * 80e9
    plenty = memory.fitting(on_gpu(), cost, free=1e13)
    assert plenty.rollout_tokens == memory.MOST_ROLLOUT_TOKENS


def test_budgets_given_by_hand_are_kept_and_one_completion_is_the_least():
    cost = memory.costs(QWEN_7B, on_gpu(), 1, longest_prompt=512)
    fitted = memory.fitting(on_gpu(rollout_tokens=7), cost, free=80e9)
    assert (fitted.rollout_tokens, fitted.micro_batch_tokens) == (7, 1 << 12), "4608 tokens, as a power of two"
    rows = on_gpu(micro_batch_size=4)
    assert memory.fitting(rows, cost, free=1e13).micro_batch_tokens is None, "rows given alone: any number of tokens"
    assert memory.fitting(small(), cost, free=1e13) == small()


def test_what_cannot_fit_is_said_before_anything_is_loaded():
    """Unsharded, what does not fit is done in smaller parts, down to one completion at a time; sharded, an update must
    fit as it is, since no rank can go back without the others."""
    cost = memory.costs(SMALL, small(), world=1, longest_prompt=10)
    most = memory.peak(small(), cost)
    least = memory.peak(small(rollout_tokens=1, micro_batch_size=1), cost)
    assert "in smaller parts" not in memory.check(small(), cost, most)
    assert "in smaller parts" in memory.check(small(), cost, most - 1)
    assert "in smaller parts" in memory.check(small(), cost, least)
    with pytest.raises(UserError, match=r"cannot fit.*Try --gradient_checkpointing"):
        memory.check(small(), cost, least - 1)
    sharded = small(shard=True, micro_batch_size=9)
    cost = memory.costs(SMALL, sharded, world=1, longest_prompt=10)
    most = memory.peak(sharded, cost)
    memory.check(sharded, cost, most)
    with pytest.raises(UserError, match=r"lower --micro_batch_size \(now 9\) or --micro_batch_tokens \(now 512\)"):
        memory.check(sharded, cost, most - 1)


def test_on_a_gpu_what_is_free_counts(monkeypatch):
    assert memory.free_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 9))
    assert memory.free_memory() == 5


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

    def budgets(*before, world: int = 1, **changes) -> tuple[int, int]:
        given = sorting | dict(dtype="float32", save_every=1) | changes
        shown = conftest.run(given, tmp_path / "out", *before, world=world)
        settings = json.loads((tmp_path / "out" / "config.json").read_text())["settings"]
        assert f"with up to {settings['rollout_tokens']} tokens in the cache" in shown
        return settings["rollout_tokens"], settings["micro_batch_tokens"]

    began = budgets(partial(budgets_left_open, [1e12, 1e7]), world=2)
    most = memory.MOST_ROLLOUT_TOKENS, memory.MOST_MICRO_BATCH_TOKENS
    assert began[0] < most[0] and began[1] < most[1]
    assert budgets(partial(budgets_left_open, [1e12]), steps=3, micro_batch_tokens=64) == (began[0], 64)
