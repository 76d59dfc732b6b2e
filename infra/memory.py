"""How much memory a run needs on each rank, estimated from the configurations before anything is loaded. From that, how
many tokens fit into a rollout and into a micro-batch. And what to do if memory runs out all the same.

All amounts are upper bounds, for completions of full length and Llama-like models with fused attention. A table in
docs/distributed.md compares them with measurements. Left out: what the allocator loses to fragmentation, about a tenth.
"""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from batch import Batch, Limits, micro_batches
from config import Config, UserError, with_budgets
from fast.output_head import head_returns_logits
from infra import faults, ranks
from infra.lora import linear_layers
from infra.model import empty_model, reads_together, weights_dtype
from infra.shard import ranks_of_a_copy
from logprob import chunk_tokens
from rollout import PROMPT_TOKENS

ROOM = 0.8  # the budgets may fill this share of the free memory
MOST_ROLLOUT_TOKENS = 1 << 22  # more rows would gain little: attention reads the whole cache for each token
SMALLER = "try --gradient_checkpointing, a smaller --max_completion_length, or a smaller model"
MOST_MICRO_BATCH_TOKENS = 1 << 15  # enough to keep a GPU busy and to make up for gathering sharded weights


@dataclass
class Costs:
    """Bytes on each rank, unless it says otherwise. `needed` adds them up."""

    stays: dict[str, float]  # what is held from step to step: weights, Adam, reference
    rollout: float  # a rollout, without its completions
    row: float  # a completion of full length in a rollout
    read: float  # a token of a prompt that is being read
    update: float  # an update, without its micro-batches
    token: float  # a token of a micro-batch
    head: float  # the backward pass of the output head; it and `layer` are not needed at the same time
    layer: float  # the backward pass of a layer, for each token
    prompt: int  # the most tokens of a prompt
    length: int  # and of a prompt with its completion
    sampled: int  # the most completions that a rank samples
    trained: int  # the most completions that a rank trains on
    checkpoints: float  # on disk, for all ranks; a new one is written before an old one is deleted


def plan(config: Config, model_config: PretrainedConfig, longest_prompt: int, same: dict) -> tuple[Config, str]:
    """-> settings with budgets of tokens that fit, the same on all ranks, and a line for the screen. `same` is what all
    ranks must have been started with."""
    free = min(ranks.gather([free_memory()], same))
    with ranks.fail_together():
        cost = costs(model_config, config, ranks.world(), longest_prompt)
        config = fitting(config, cost, free)
        return config, plan_line(config, cost, free)


def limits(config: Config, model: PreTrainedModel, longest_prompt: int) -> Limits:
    """The limits of a micro-batch. If the log-probs of a sharded model come from its logits, one row is one call of the
    model, and all ranks must make as many calls, so a micro-batch is one row."""
    if config.shard and not head_returns_logits(model, torch.zeros(1, 2, dtype=torch.long, device=model.device)):
        return Limits(rows=1, tokens=None)
    packs = reads_together(model, longest_prompt + config.max_completion_length)
    hidden_size = model.config.get_text_config().hidden_size if packs else None
    return Limits(config.micro_batch_size, config.micro_batch_tokens, hidden_size)


def costs(model_config: PretrainedConfig, config: Config, world: int, longest_prompt: int) -> Costs:
    model = empty_model(model_config, config)
    parameters = sum(p.numel() for p in model.parameters())
    compute, held = 2 if config.dtype == "bfloat16" else 4, weights_dtype(config).itemsize  # bytes
    part = parameters / (ranks_of_a_copy(config.shard_size, world) if config.shard else 1)  # of this rank
    adapters = config.lora_rank * sum(sum(layer.weight.shape) for layer in linear_layers(model).values())
    full = config.lora_rank == 0  # all weights are trained
    learnt, reference = part if full else adapters, held * part * full * (config.beta != 0)
    copy = compute * (adapters + (parameters if compute < held or config.shard else 0))
    text = model_config.get_text_config()
    layers, h, vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
    i = getattr(text, "intermediate_size", None) or 4 * h
    all_heads = getattr(text, "num_attention_heads", None) or 1  # Mamba has none, and a cache smaller than this
    heads = getattr(text, "num_key_value_heads", None) or all_heads
    head_size = getattr(text, "head_dim", None) or h // all_heads

    length = longest_prompt + config.max_completion_length
    trained = config.prompts_per_step * config.num_generations
    sampled = max(trained, config.eval_prompts * config.eval_k if config.eval_every else 0)
    # Layers with a sliding window hold no more than that.
    kept_tokens = [min(length, getattr(layer, "sliding_window", length)) for layer in DynamicCache(config=text).layers]
    of_a_head = 2 * head_size * compute  # for each token
    cache = of_a_head * heads * sum(kept_tokens or [layers * length])
    # Besides the cache, the most of: a layer that grows; a layer with its keys repeated for the heads that share them,
    # which is done if prompts are padded, and logits; logits, those in fp32, probabilities, and those in blocks. If ids
    # are cut, what sorting takes, and the ids that were left.
    repeated = of_a_head * all_heads * length * (all_heads > heads) + 4 * vocabulary
    cut = config.top_k > 0 or config.top_p < 1 or config.min_p > 0
    distribution = vocabulary * (compute + 4 + 4 + 4 + 30 * cut)

    # In an update: the head, and two layers with their gradients.
    gathered = compute * (adapters + vocabulary * h) + 2 * (compute + 4 * full) * (parameters - vocabulary * h) / layers
    # ids, attention and mask; log-probs of sampler, old policy and reference, with the sampler's entropies; weights
    batch = trained * length * (3 * 8 + 4 * 4 + 8)
    # Logits and log-probs; or log-probs, their gradient, and that of the weights, which is added to another.
    chunk = chunk_tokens(torch.cuda.is_available())
    between = compute if config.shard else held  # between layers is the dtype in which the weights are held
    norms = sum(p.dim() == 1 and name.endswith("weight") for name, p in model.named_parameters()) / layers
    # What norms see and, for each product, give; query, key, value, output of each head; four of the feed-forward part.
    layer = h * (norms * (between + 4) + 2.5 * between) + compute * 4 * (all_heads * head_size + i)
    return Costs(
        stays={"weights": held * part + 4 * adapters, "Adam": 8 * learnt * (config.steps != 0), "reference": reference},
        rollout=copy,
        row=cache + max(of_a_head * heads * length, repeated, distribution),
        # The feed-forward part; what it is added to; keys and values for all heads; the mask.
        read=compute * (3 * i + 3 * h + 4 * all_heads * head_size) + longest_prompt * (1 + compute),
        update=4 * learnt + (gathered if config.shard else copy) + batch + 4 * h * vocabulary * full,
        token=(layers + 1) * (h * between if config.gradient_checkpointing else layer),
        head=vocabulary * max((4 + 4) * chunk, (4 + compute) * chunk + 4 * h * full),
        layer=layer + (0 if full else compute * i),  # adapters have a gradient for the input, too
        prompt=longest_prompt,
        length=length,
        sampled=math.ceil(sampled / world),
        trained=math.ceil(trained / world),
        checkpoints=(adapters or parameters) * (16 if reference else 12) * (config.keep_checkpoints + 1),
    )


def fitting(config: Config, cost: Costs, free: float) -> Config:
    """Choose the budgets that are None. Each has room for a power of two of full completions, so that it seldom changes
    when the free memory changes a little."""
    room = ROOM * free - sum(cost.stays.values())
    before = max(PROMPT_TOKENS, cost.prompt) * cost.read  # while prompts are read, the cache holds no more than these
    sampled = min(room - cost.rollout, (room - cost.rollout - before) * cost.length / cost.prompt) / cost.row
    sampled = min(sampled, MOST_ROLLOUT_TOKENS / cost.length)
    trained = (room - cost.update - cost.head) / ((cost.token + cost.layer) * cost.length)
    trained = min(trained, MOST_MICRO_BATCH_TOKENS / cost.length)
    return with_budgets(config, *(cost.length << int(math.log2(max(1, n))) for n in (sampled, trained)))


def needed(config: Config, cost: Costs) -> dict[str, float]:
    """-> how many bytes are needed for what"""
    rows = min(cost.sampled, max(1, config.rollout_tokens // cost.length))
    most = min(cost.trained, config.micro_batch_size or math.inf) * cost.length
    tokens = max(cost.length, min(most, config.micro_batch_tokens or math.inf))
    before = min(rows * cost.prompt, max(PROMPT_TOKENS, cost.prompt)) * cost.read
    rollout = cost.rollout + max(rows * cost.row, before + rows * cost.row * cost.prompt / cost.length)
    update = cost.update + tokens * cost.token + max(cost.head, tokens * cost.layer)
    return cost.stays | {"rollout": rollout, "update": update * (config.steps != 0)}


def peak(config: Config, cost: Costs) -> float:
    """The most that is held at once: what stays from step to step, and either a rollout or an update."""
    need = needed(config, cost)
    return sum(cost.stays.values()) + max(need["rollout"], need["update"])


def plan_line(config: Config, cost: Costs, free: float) -> str:
    """-> a line for the screen. It is a UserError if the run cannot fit even when it is computed in smaller parts."""
    need, most = needed(config, cost), peak(config, cost)
    least = peak(replace(config, rollout_tokens=1, micro_batch_tokens=1), cost)
    parts = ", ".join(f"{name} {readable(amount)}" for name, amount in need.items() if amount)
    line = (
        f"memory on each rank: {parts}; at most {readable(most)} at once, of {readable(free)}, "
        f"with up to {config.rollout_tokens} tokens in the cache of a rollout"
    )
    if config.steps != 0:
        disk = shutil.disk_usage(next(path for path in Path(config.out, "_").parents if path.exists())).free
        line += f"; checkpoints up to {readable(cost.checkpoints)} on disk, where {readable(disk)} are free"
    if least > free:
        raise UserError(
            f"{line}. It needs {readable(least)} with one completion at a time: {SMALLER}, --lora_rank or --shard"
        )
    if config.shard and sum(cost.stays.values()) + need["update"] > free:
        raise UserError(f"{line}. An update cannot fit: {lower(config.micro_batch_size, config.micro_batch_tokens)}")
    return line if most <= free else f"{line}. Where it does not fit, it is done in smaller parts"


def lower(rows: int | None, tokens: int | None) -> str:
    """Advice for an update of sharded weights that does not fit."""
    now = {"--micro_batch_size": rows, "--micro_batch_tokens": tokens}
    given = " or ".join(f"{flag} (now {limit})" for flag, limit in now.items() if limit)
    return f"with --shard one rank cannot start again by itself, so lower {given}, or try --gradient_checkpointing"


def readable(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.1f} MB"


def free_memory() -> float:
    """On a GPU, what is free before the model is loaded. Otherwise, all memory of the machine."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def until_it_fits(make_smaller: Callable, compute: Callable, run: Any, *work: Any) -> Any:
    """-> compute(run, *work). Whenever memory runs out, `make_smaller` halves a budget of the run, and it is computed
    again. The result is the same, because no budget changes what is computed."""
    while True:
        try:
            return compute(run, *work)
        except torch.OutOfMemoryError:
            pass  # outside of this block, the tensors that the error held are free
        torch.cuda.empty_cache()
        make_smaller(run, *work)


def smaller_rollout(run: Any, prompts: list[list[int]], *rest: Any) -> None:
    length = max(map(len, prompts)) + run.config.max_completion_length
    fewer = min(len(prompts), run.sampling.tokens_at_once // length) // 2
    if fewer == 0:
        raise UserError(f"out of memory with one completion at a time: {SMALLER}")
    run.sampling = replace(run.sampling, tokens_at_once=fewer * length)
    faults.warn(f"out of memory: from now on at most {fewer} completions are sampled at once")


def smaller_micro_batches(run: Any, batch: Batch, *rest: Any) -> None:
    if run.config.shard:
        raise UserError(f"out of memory in an update: {lower(run.limits.rows, run.limits.tokens)}")
    tried = [part for _, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world()) if len(part) > 1]
    if not tried:
        raise UserError(f"out of memory with one completion at a time: {SMALLER}")
    run.limits.tokens = min(run.limits.tokens or math.inf, max(int(part.attention.sum()) for part in tried)) // 2
    faults.warn(f"out of memory; going on with micro-batches of up to {run.limits.tokens} padded tokens")
