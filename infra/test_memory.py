"""What a run needs, from configurations alone, against a model that is there and a real one worked out by hand."""

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
QWEN_7B = Qwen2Config(
    vocab_size=152_064, hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4,
)  # fmt: skip


def small(**flags) -> tuple[Config, memory.Costs]:
    given = dict(prompts_per_step=3, num_generations=4, max_completion_length=20, micro_batch_tokens=512, eval_every=0)
    config = resolve(Config(**(given | flags)), {}, on_gpu=False)
    return config, memory.costs(SMALL, config, 1, longest_prompt=10)


def large(ranks: int = 1, **flags) -> tuple[Config, memory.Costs]:
    given = dict(prompts_per_step=128, num_generations=8, max_completion_length=4096, eval_every=0)
    config = resolve(Config(**(given | flags)), {}, on_gpu=True)
    return config, memory.costs(QWEN_7B, config, ranks, longest_prompt=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_counted_is_what_a_model_has(dtype):
    """Weights and cache exactly; what autograd keeps within 15 %: norms and rotations are not counted one by one."""
    model, kept = Qwen2ForCausalLM(SMALL).train(), []
    weights = sum(p.numel() * 4 for p in model.parameters())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    _, cost = small(dtype=str(dtype).removeprefix("torch."))
    if dtype == torch.float32:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            out = model.model(input_ids=torch.ones(8, 64, dtype=torch.long), use_cache=False)
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}
        of_activations = sum(size for place, size in storages.items() if place not in own)
        assert out is not None and cost.token * 8 * 64 == pytest.approx(of_activations, rel=0.15)
    cache = DynamicCache(config=SMALL)
    model.to(dtype)(torch.ones(1, 30, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    assert cost.stays == {"weights": weights, "Adam": 2 * weights, "reference": 0}
    assert cost.row == held + 500 * (dtype.itemsize + 4 + 4 + 8), "and the distribution"
    assert cost.rollout == (weights / 2 if dtype == torch.bfloat16 else 0), "a copy"


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_real_model_by_hand(monkeypatch, ranks):
    """7B on GPUs in bf16, completions of 512 + 4096 tokens, 16 on each rank; with 8 ranks sharded."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 9))
    assert memory.free_memory() == 5
    given = dict(prompts_per_step=16, num_generations=ranks, beta=0.1, shard=ranks > 1, rollout_tokens=10**6)
    config, cost = large(ranks, **given, micro_batch_tokens=16_384)
    P, ends = 7_615_616_512, 2 * 152_064 * 3584  # parameters, and those of embeddings and head
    row = 28 * 2 * 4 * 128 * 2 * 4608 + 152_064 * (2 + 4 + 4 + 8)  # keys and values; the distribution
    update = 4 * P / ranks + 16 * ranks * 4608 * (3 * 8 + 4 * 4 + 8)  # gradients; the completions as tensors
    update += (2 * 2048 + 3584) * 152_064 * 4  # two chunks of logits, and the head's gradient
    update += 2 * P if ranks == 1 else 2 * ends + 2 * (P - ends) / 28 * (2 + 4)  # a copy, or two layers with gradients
    of_a_layer = 4 * 11 * 3584 + 2 * 4 * 18_944
    expected = {"weights": 4 * P / ranks, "Adam": 8 * P / ranks, "reference": 4 * P / ranks}
    expected |= {"rollout": 2 * P + 16 * row, "update": update + 16_384 * 28 * of_a_layer}
    need = memory.needed(config, cost)
    assert need == {name: pytest.approx(amount) for name, amount in expected.items()}
    assert memory.peak(config, cost) == 16 * P / ranks + max(need["rollout"], need["update"])

    fewer = memory.needed(replace(config, rollout_tokens=3 * 4608, micro_batch_size=2), cost)
    assert fewer["rollout"] == 2 * P + 3 * row
    assert fewer["update"] == pytest.approx(update + 2 * 4608 * 28 * of_a_layer)
    _, checkpointed = large(ranks, **given, gradient_checkpointing=True)
    assert checkpointed.token == of_a_layer + 28 * 3584 * (4 if ranks == 1 else 2), "what is between layers"
    evaluation, cost = large(ranks, **given | dict(beta=0, steps=0, eval_every=1, eval_prompts=7 * ranks))  # x 4
    alone = memory.needed(evaluation, cost)
    assert {name: x for name, x in alone.items() if x} == {"weights": 4 * P / ranks, "rollout": 2 * P + 28 * row}


MOST = (memory.MOST_ROLLOUT_TOKENS, memory.MOST_MICRO_BATCH_TOKENS)
FITTING = [  # bytes free, ranks, what was given, rollout_tokens and micro_batch_tokens
    (1e13, 1, {}, MOST),
    (80e9, 8, dict(shard=True, max_completion_length=1024), (1 << 19, 1 << 12)),
    (80e9, 1, dict(rollout_tokens=7), (7, 1 << 12)),  # one completion of 4608 tokens, as a power of two
    (1e13, 1, dict(micro_batch_size=4), (MOST[0], None)),  # rows given alone: any number of tokens
]


@pytest.mark.parametrize("free, ranks, given, budgets", FITTING)
def test_budgets_that_are_left_open_fit_and_twice_as_much_would_not(free, ranks, given, budgets):
    config, cost = large(ranks, **given)
    config = memory.fitting(config, cost, free)
    assert (config.rollout_tokens, config.micro_batch_tokens) == budgets
    if ranks > 1:
        enough = replace(cost, sampled=10**6, trained=10**6)  # completions for any budget
        for name in ("rollout_tokens", "micro_batch_tokens"):
            twice = replace(config, **{name: 2 * getattr(config, name)})
            assert memory.peak(config, enough) <= memory.ROOM * free < memory.peak(twice, enough)


def test_what_cannot_fit_is_said_before_anything_is_loaded():
    """What does not fit is done in smaller parts, down to one completion at a time; sharded, an update must fit as it
    is, since no rank can go back without the others."""
    config, cost = small()
    most = memory.peak(config, cost)
    least = memory.peak(small(rollout_tokens=1, micro_batch_size=1)[0], cost)
    said = ["in smaller parts" in memory.check(config, cost, free) for free in (most, most - 1, least)]
    assert said == [False, True, True]
    with pytest.raises(UserError, match=r"with one completion at a time: try --gradient_checkpointing"):
        memory.check(config, cost, least - 1)
    config, cost = small(shard=True, micro_batch_size=9)
    most = memory.peak(config, cost)
    memory.check(config, cost, most)
    with pytest.raises(UserError, match=r"lower --micro_batch_size \(now 9\) or --micro_batch_tokens \(now 512\)"):
        memory.check(config, cost, most - 1)


def budgets_left_open(free_by_rank: list[float]) -> None:
    """As on GPUs, with so much memory."""
    conftest.replace("infra.command_line.resolve", lambda resolve: lambda config, task, _: resolve(config, task, True))
    free = free_by_rank[int(os.environ.get("RANK", 0))]
    conftest.replace("infra.memory.free_memory", lambda _: lambda: free)


def test_a_run_goes_on_with_the_budgets_that_it_began_with(sorting, tmp_path):
    """Those that fit on the rank with the least memory."""

    def budgets(*before, world: int = 1, **changes) -> tuple[int, int]:
        conftest.run(sorting | dict(dtype="float32") | changes, tmp_path / "out", *before, world=world)
        settings = json.loads((tmp_path / "out" / "config.json").read_text())["settings"]
        return settings["rollout_tokens"], settings["micro_batch_tokens"]

    began = budgets(partial(budgets_left_open, [1e12, 1e7]), world=2)
    assert began[0] < MOST[0] and began[1] < MOST[1]
    assert budgets(partial(budgets_left_open, [1e12]), steps=3, micro_batch_tokens=64) == (began[0], 64)
