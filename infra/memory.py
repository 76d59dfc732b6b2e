"""What a run needs on each rank, from the configurations alone, before anything is loaded; and what is done where
memory runs out all the same.

    weights, gradients and reference 4 bytes a parameter each, Adam 8: fp32. Sharded, 1/n of that.
    rollout: the weights in bf16 where that is the dtype (sharded: all of them, gathered), and the cache, keys and
        values of every layer and token.
    update: the step's completions as tensors, activations of one micro-batch, and two chunks of logits with the
        gradient of the output head (sharded: and two layers, gathered, with their gradients, embeddings and head).

Weights, gradients, Adam and reference are exact. The cache is an upper bound: every completion at full length. The
activations of a layer, about 11 h + 4 i numbers a token (h hidden, i intermediate size; counted on Llama-like models
with fused attention), are an estimate. Left out: what the allocator loses to fragmentation, about a tenth.
"""

import functools
import math
import os
from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

from batch import Batch, Limits, micro_batches
from config import Config, UserError
from infra import faults, ranks
from infra.model import empty_model
from infra.shard import ranks_of_a_copy


def needed(model_config: PretrainedConfig, config: Config, world: int, longest_prompt: int) -> dict[str, float]:
    """-> bytes by what they are for."""
    model = empty_model(model_config, config)
    parameters = sum(p.numel() for p in model.parameters())
    compute = 2 if config.dtype == "bfloat16" else 4  # bytes
    n = ranks_of_a_copy(config.shard_size, world) if config.shard else 1
    copy = compute * parameters if compute < 4 or config.shard else 0
    text = model_config.get_text_config()
    layers, h = text.num_hidden_layers, text.hidden_size
    i = getattr(text, "intermediate_size", None) or 4 * h
    all_heads = getattr(text, "num_attention_heads", None) or 1  # Mamba has none, and a cache smaller than this
    heads = getattr(text, "num_key_value_heads", None) or all_heads
    head_size = getattr(text, "head_dim", None) or h // all_heads

    length = longest_prompt + config.max_completion_length
    evaluated = config.eval_prompts * config.eval_k if config.eval_every else 0
    completions = config.prompts_per_step * config.num_generations
    rows = math.ceil(max(completions, evaluated) / world)
    rows = min(rows, max(1, config.rollout_tokens // length))

    ends = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and text.vocab_size in p.shape)
    gathered = ends * compute + 2 * (parameters - ends) / layers * (compute + 4)
    batch = completions * length * (3 * 8 + 4 + 8)  # ids, attention, mask, the sampler's log-probs, weights
    cache = 2 * layers * heads * head_size * length * compute  # of one completion

    of_a_micro_batch = min((config.micro_batch_size or math.inf) * length, config.micro_batch_tokens or math.inf)

    def of_an_update(tokens: float) -> float:
        """With micro-batches of so many tokens."""
        if config.steps == 0:
            return 0.0
        of_a_layer = tokens * (4 * 11 * h + compute * 4 * i)
        between = compute if config.shard else 4  # replicated weights are fp32, and so is what is between layers
        kept = tokens * h * between * layers + of_a_layer if config.gradient_checkpointing else of_a_layer * layers
        head = 2 * 256 * text.vocab_size * 4 + text.vocab_size * h * 4
        return 4 * parameters / n + (gathered if config.shard else copy) + batch + kept + head

    return {
        "weights": 4 * parameters / n,
        "Adam": 8 * parameters / n if config.steps != 0 else 0.0,
        "reference": 4 * parameters / n if config.beta else 0,
        "rollout": copy + rows * cache,
        "update": of_an_update(max(length, of_a_micro_batch)),
        "one completion": max(copy + cache, of_an_update(length)),
    }


def totals(need: dict[str, float]) -> tuple[float, float, float]:
    """-> what stays from step to step, the most at once, the least that it can do with."""
    stays = need["weights"] + need["Adam"] + need["reference"]
    return stays, stays + max(need["rollout"], need["update"]), stays + need["one completion"]  # one after the other


def check(need: dict[str, float], available: float) -> str:
    """-> a line for the screen; a mistake where it cannot fit even one completion at a time."""
    _, peak, least = totals(need)
    parts = ", ".join(f"{name} {readable(need[name])}" for name in need if name != "one completion" and need[name])
    line = f"memory on each rank: {parts}; at most {readable(peak)} at once, of {readable(available)}"
    if least > available:
        raise UserError(
            f"{line}. It cannot fit: with one completion at a time it needs {readable(least)}. "
            "Try --gradient_checkpointing, a smaller --max_completion_length, --shard, or a smaller model"
        )
    return line if peak <= available else f"{line}. Where it does not fit, it is done in smaller parts"


def readable(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.1f} MB"


def available() -> float:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def in_smaller_pieces(compute: Callable) -> Callable:
    """compute(run, batch, ...) is done again with half the micro-batch whenever memory runs out: any split gives the
    same sums."""

    @functools.wraps(compute)
    def until_it_fits(run: Any, batch: Batch, *rest: Any) -> Any:
        while True:
            try:
                return compute(run, batch, *rest)
            except torch.OutOfMemoryError:
                pass  # what it held is free from here on
            torch.cuda.empty_cache()
            if run.config.shard:
                now = {"--micro_batch_size": run.limits.rows, "--micro_batch_tokens": run.limits.tokens}
                given = " or ".join(f"{flag} (now {limit})" for flag, limit in now.items() if limit)
                raise UserError(
                    "out of memory in an update, and with --shard no rank can go back without the others: lower "
                    f"{given}, or try --gradient_checkpointing"
                )
            halve(run.limits, batch)

    return until_it_fits


def halve(limits: Limits, batch: Batch) -> None:
    tried = [part for _, part in micro_batches(batch, limits, ranks.rank(), ranks.world()) if len(part) > 1]
    if not tried:
        raise UserError(
            "out of memory with one completion at a time: try --gradient_checkpointing, "
            "a smaller --max_completion_length, or a GPU with more memory"
        )
    limits.tokens = max(len(part) * int(part.attention.sum(1).max()) for part in tried) // 2
    faults.warn(f"out of memory; going on with micro-batches of up to {limits.tokens} padded tokens")
