"""Plan the memory of a run on each rank, from the configurations and before anything is loaded. Choose how many
tokens fit into a rollout and into a micro-batch. If memory runs out all the same, continue with smaller parts.

All amounts are upper bounds, for completions of full length and Llama-like models with fused attention. A table in
docs/distributed.md compares them with measurements. Left out: what the allocator loses to fragmentation, about a tenth.
"""

import math
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from batch import Batch, Limits, micro_batches
from config import Config, UserError, with_budgets
from fast.output_head import returns_head_output
from infra import faults, ranks
from infra.lora import linear_layers
from infra.model import empty_model, reads_together, weights_dtype
from infra.shard import ranks_per_copy
from logprob import CHUNK
from rollout import PROMPT_TOKENS

ROOM = 0.8  # the plan may fill this share of the free memory
MOST_ROLLOUT_TOKENS = 1 << 22  # a larger rollout gains little: reading its cache takes most of the time
MOST_MICRO_BATCH_TOKENS = 1 << 15  # enough to keep a GPU busy and to make up for gathering sharded weights
SMALLER = "try --gradient_checkpointing, --lora_rank, --shard, or smaller --micro_batch_tokens, --max_completion_length"


@dataclass
class Costs:
    """The bytes that the parts of a run need on a rank (in all, or for each completion or token), and the numbers of
    prompts, tokens and completions. `needed` computes the total of each part."""

    stays: dict[str, float]  # what stays in memory from step to step: weights, Adam, reference
    rollout: float  # a rollout, without its completions
    row: float  # a completion of full length in a rollout
    read: float  # a token of a prompt while the prompt is read
    update: float  # an update, without its micro-batches
    token: float  # a token of a micro-batch
    head: float  # the output head. It is freed before `layer` is needed, so only the larger of the two counts
    layer: float  # the backward pass of a layer, for each token
    prompts: int  # the most prompts that a rank reads for a rollout
    length: int  # tokens of the longest prompt and a completion of full length
    sampled: float  # the most completions that a rank samples
    trained: float  # the most completions that a rank trains on
    checkpoints: float  # all checkpoints on disk, of all ranks


def plan(config: Config, model_config: PretrainedConfig, longest_prompt: int) -> tuple[Config, str]:
    """Return the settings with budgets of tokens that fit, the same on all ranks, and a line for the screen."""
    free = min(ranks.gather([free_memory()]))
    with ranks.fail_together():
        cost = costs(model_config, config, ranks.world(), longest_prompt)
        config = fitting(config, cost, free)
        return config, plan_line(config, cost, free)


def limits(config: Config, model: PreTrainedModel, longest_prompt: int) -> Limits:
    """Return the limits of a micro-batch.

    If a model changes the output of its head, log-probs are computed from the model's logits, and the model is called
    once for each row (fast/output_head.py). If such a model is sharded, each micro-batch is a single row. The reason is
    that all ranks must call a sharded model equally often. They have equally many micro-batches, but these may have
    different numbers of rows."""
    if config.shard and not returns_head_output(model, torch.zeros(1, 2, dtype=torch.long, device=model.device)):
        return Limits(rows=1, tokens=None)
    can_share_rows = reads_together(model, longest_prompt + config.max_completion_length)
    # Limits needs the hidden size only to decide which completions share a row. With None, none of them do.
    hidden_size = model.config.get_text_config().hidden_size if can_share_rows else None
    return Limits(config.micro_batch_size, config.micro_batch_tokens, hidden_size)


def costs(model_config: PretrainedConfig, config: Config, world: int, longest_prompt: int) -> Costs:
    """Compute the costs of a run of `world` ranks. The variables in this function count parameters, tokens or
    completions, unless their name or a comment says that they are bytes."""
    model = empty_model(model_config, config)
    parameters = sum(p.numel() for p in model.parameters())
    compute_bytes = 2 if config.dtype == "bfloat16" else 4
    weight_bytes = weights_dtype(config).itemsize
    part = parameters / (ranks_per_copy(config.shard_size, world) if config.shard else 1)  # the shard of this rank
    adapters = config.lora_rank * sum(sum(layer.weight.shape) for layer in linear_layers(model).values())
    trained_parameters = adapters or part
    # Each weight of the model has a gradient in fp32, unless adapters are trained instead of the weights.
    gradient_bytes = 0 if adapters else 4
    adam = 8 * trained_parameters if config.steps != 0 else 0  # bytes
    # Bytes of the reference. With adapters there is none, because they can be switched off.
    reference = weight_bytes * part if config.beta and not adapters else 0
    # Bytes of the adapters and weights that a rollout or an update copies, in the dtype of the computation. Adapters
    # are in fp32 and are always counted. The weights are copied only if they are in a larger dtype, or if they are
    # sharded.
    copy = compute_bytes * (adapters + (parameters if compute_bytes < weight_bytes or config.shard else 0))
    text = model_config.get_text_config()
    layers, h, vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
    feed_forward = getattr(text, "intermediate_size", None) or 4 * h
    query_heads = getattr(text, "num_attention_heads", None) or 1  # Mamba has none
    key_heads = getattr(text, "num_key_value_heads", None) or query_heads
    head_size = getattr(text, "head_dim", None) or h // query_heads

    length = longest_prompt + config.max_completion_length
    trained = config.prompts_per_step * config.num_generations
    evaluated = config.eval_prompts if config.eval_every else 0

    # Layers with a sliding window cache no more tokens than the window.
    kept_tokens = [min(length, getattr(layer, "sliding_window", length)) for layer in DynamicCache(config=text).layers]
    head_bytes = 2 * head_size * compute_bytes  # the key and the value of a token, in one head
    # For some models, such as Mamba, DynamicCache has no layers. Then every layer counts with the full length.
    cache = head_bytes * key_heads * (sum(kept_tokens) if kept_tokens else layers * length)  # bytes, for one completion
    # For each id, the sampler has its logit, the logit in fp32, the probability, and a copy of the probability. The
    # copy is made on a GPU, where the sampler divides the ids into blocks (rollout.py). To cut the distribution, the
    # sampler needs 30 bytes more: the sorted probability (4) and its id (8), the cumulative sum (4), the probability
    # after the cut, once in sorted order (4) and once in the order of the ids (4), and 6 for other cuts and for the
    # record of which ids are left.
    distribution = vocabulary * (compute_bytes + 4 + 4 + 4 + (30 if config.cuts_vocabulary else 0))  # bytes

    # Sharded weights are gathered for the output head and for two layers at a time, and adapters are always whole.
    # These layers also have whole gradients. The gradient of the output head is counted below.
    gathered = compute_bytes * (adapters + vocabulary * h)  # bytes
    gathered += 2 * (compute_bytes + gradient_bytes) * (parameters - vocabulary * h) / layers
    # For each token, there are three integers (its id and two masks), four fp32 numbers (the log-probs of the sampler,
    # the old policy and the reference, and the sampler's entropy), and an fp64 weight.
    batch = trained * length * (3 * 8 + 4 * 4 + 8)  # bytes
    chunk = CHUNK["cuda" if torch.cuda.is_available() else "cpu"]
    hidden_bytes = compute_bytes if config.shard else weight_bytes  # bytes of one element of the hidden states
    norms = sum(p.dim() == 1 and name.endswith("weight") for name, p in model.named_parameters()) / layers
    # `mask` is how many entries the attention mask has for a token, which is the number of tokens in its row. If a
    # layer has a sliding window, every row has a mask. Rows are then never shared, so each is a prompt and one
    # completion, `length` tokens. Otherwise only shared rows have a mask: a prompt of p tokens, and completions with
    # about sqrt(p (p + 6 h)) tokens together (fast/shared_prompts.py).
    shared_row = longest_prompt + math.sqrt(longest_prompt * (longest_prompt + 6 * h))
    mask = length if min(kept_tokens, default=length) < length else shared_row
    # Bytes that a layer saves for its backward pass, for each token. Each norm saves its input, as it is and in fp32.
    # Attention and the feed-forward part each save the input of their first linear layers, one vector. Instead of
    # these 2 vectors, 2.5 are counted, to stay on the safe side.
    layer = h * (norms * (hidden_bytes + 4) + 2.5 * hidden_bytes)
    # It also saves query, key, value and output of each head, four vectors of the feed-forward part, and the mask as
    # numbers.
    layer += compute_bytes * (4 * query_heads * head_size + 4 * feed_forward + mask)
    # `saved` is the part of `layer` that stays in memory from the forward to the backward pass. With gradient
    # checkpointing, only the input of the layer stays, and the rest is computed again, for one layer at a time.
    saved = h * hidden_bytes if config.gradient_checkpointing else layer
    return Costs(
        stays={"weights": weight_bytes * part + 4 * adapters, "Adam": adam, "reference": reference},
        rollout=copy,
        # The cache, and the larger of two amounts. First, to compute a token, the keys and values of one layer at a
        # time are copied (with padded prompts, they are also repeated for the query heads that share them), and the
        # logits are computed in fp32. Then, when this is freed, the sampler needs `distribution`.
        row=cache + max(head_bytes * query_heads * length + 4 * vocabulary, distribution),
        # Three vectors of the feed-forward part; three vectors of the hidden size; query, key, value and output of
        # all heads (keys and values are repeated for them); a row of the mask, as truth values and as numbers.
        read=compute_bytes * (3 * feed_forward + 3 * h + 4 * query_heads * head_size + longest_prompt) + longest_prompt,
        # The gradients; gathered or converted weights; the batch; and, unless the head is frozen, a second gradient of
        # its weight: that of the current micro-batch, until it is added to the sum of the earlier ones.
        update=4 * trained_parameters + (gathered if config.shard else copy) + batch + gradient_bytes * h * vocabulary,
        # What all layers save; embeddings, last norm, input of the head and its gradient; the mask as truth values.
        token=layers * saved + 2 * h * (hidden_bytes + compute_bytes) + mask,
        # The larger of two amounts. The forward pass has the logits and log-probs of a chunk. The backward pass has the
        # log-probs of a chunk, the gradient of its logits, and what it adds to the gradient of the head's weight.
        head=vocabulary * max((4 + 4) * chunk, (4 + compute_bytes) * chunk + gradient_bytes * h),
        # With adapters, the input of each linear layer gets two gradients, one of them from the adapter. Both are in
        # memory until they are added. The largest such input is in the feed-forward part.
        layer=layer + (compute_bytes * feed_forward if adapters else 0),
        # The completions of one prompt may be divided between two ranks, so a rank may read one prompt more than its
        # even share.
        prompts=math.ceil(max(config.prompts_per_step, evaluated) / world) + (1 if world > 1 else 0),
        length=length,
        sampled=math.ceil(max(trained, evaluated * config.eval_k) / world),
        trained=math.ceil(trained / world),
        # Each trained parameter takes 4 bytes itself, 8 for Adam, and 4 for the reference if there is one. One more
        # checkpoint is counted than is kept, because a new one is written before an old one is deleted.
        checkpoints=(adapters or parameters) * (16 if reference else 12) * (config.keep_checkpoints + 1),
    )


def fitting(config: Config, cost: Costs, free: float) -> Config:
    """Choose the budgets that are None. Each has room for as many completions of full length as fit, rounded down to a
    power of two, so it seldom changes when the free memory changes a little."""
    room = ROOM * free - sum(cost.stays.values())
    # `needed` counts no more completions than a rank has. Budgets must not depend on that number, so make it infinite.
    cost = replace(cost, sampled=math.inf, trained=math.inf)

    def largest(part: str, most: int) -> int:
        tokens = cost.length
        # Set both budgets to the value to try. Only one of them affects `part`, so the other does no harm.
        # `with_budgets` keeps a budget that the user gave.
        while 2 * tokens <= most and needed(with_budgets(config, 2 * tokens, 2 * tokens), cost)[part] <= room:
            tokens *= 2
        return tokens

    return with_budgets(config, largest("rollout", MOST_ROLLOUT_TOKENS), largest("update", MOST_MICRO_BATCH_TOKENS))


def needed(config: Config, cost: Costs) -> dict[str, float]:
    """Return how many bytes each part of a run needs: what stays in memory, a rollout, and an update."""
    rows = min(cost.sampled, max(1, config.rollout_tokens // cost.length))
    prompts, prompt_length = min(cost.prompts, rows), cost.length - config.max_completion_length
    # With --decode graph, all prompts are read in one call. Otherwise they are read in pieces of PROMPT_TOKENS tokens,
    # and at least one whole prompt is counted.
    at_once = prompts * prompt_length if config.decode == "graph" else max(PROMPT_TOKENS, prompt_length)
    reading = min(prompts * prompt_length, at_once) * cost.read
    # Add the cache of what has been read. This is a little too much, because `row` counts more than the cache.
    reading += prompts * cost.row * prompt_length / cost.length
    most = min(cost.trained, config.micro_batch_size or math.inf) * cost.length
    tokens = max(cost.length, min(most, config.micro_batch_tokens or math.inf))
    update = cost.update + tokens * cost.token + max(cost.head, tokens * cost.layer)
    rollout = cost.rollout + max(rows * cost.row, reading)
    return cost.stays | {"rollout": rollout, "update": update if config.steps != 0 else 0}


def peak(config: Config, cost: Costs) -> float:
    """Return the most that is needed at once: what stays from step to step, and either a rollout or an update."""
    need = needed(config, cost)
    return sum(cost.stays.values()) + max(need["rollout"], need["update"])


def plan_line(config: Config, cost: Costs, free: float) -> str:
    """Return a line for the screen. Raise UserError if the run cannot fit even when it is computed in smaller parts."""
    need, most = needed(config, cost), peak(config, cost)
    # With --shard, an update must fit as it is: a rank that runs out of memory cannot start the update again in smaller
    # parts (`until_it_fits`), because the other ranks have to take part. All else can be computed in smaller parts.
    smallest = replace(config, rollout_tokens=1, micro_batch_tokens=config.micro_batch_tokens if config.shard else 1)
    least = peak(smallest, cost)
    parts = ", ".join(f"{name} {readable(amount)}" for name, amount in need.items() if amount)
    line = f"memory on each rank: {parts}; at most {readable(most)} at once, of {readable(free)}"
    if config.steps != 0:
        # The folder of the run may not exist yet. Then its nearest parent that exists is on the same disk.
        out = Path(config.out)
        disk = shutil.disk_usage(next(path for path in (out, *out.parents) if path.exists())).free
        line += f"; checkpoints up to {readable(cost.checkpoints)} on disk, where {readable(disk)} are free"
    if least > free:
        raise UserError(f"{line}. The run needs at least {readable(least)} of memory: {SMALLER}")
    return line if most <= free else f"{line}. What does not fit is computed in smaller parts"


def readable(amount: float) -> str:
    return f"{amount / 1e9:.1f} GB" if amount >= 1e9 else f"{amount / 1e6:.1f} MB"


def free_memory() -> float:
    """Return the bytes that are free on the GPU before the model is loaded. Without a GPU, return all memory of the
    machine."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def in_parts_that_fit(compute: Callable, run: Any, *work: Any) -> Any:
    """Return compute(run, *work). Whenever memory runs out, let `make_smaller` halve a budget of the run, and start the
    work again. The result stays the same, because no budget changes what is computed."""
    while True:
        # If memory runs out, the lines below this block run. The tensors of the failed attempt are free by then, which
        # they would not be in an `except` block.
        with suppress(torch.OutOfMemoryError):
            return compute(run, *work)
        torch.cuda.empty_cache()
        smaller_micro_batches(run, *work)


def smaller_micro_batches(run: Any, batch: Batch, *rest: Any) -> None:
    if run.config.shard:
        raise UserError(f"out of memory in an update: with --shard one rank cannot start again by itself: {SMALLER}")
    splittable = [part for _, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world()) if len(part) > 1]
    if not splittable:
        raise UserError(f"out of memory with one completion at a time: {SMALLER}")
    # The largest micro-batch may have been far below the limit. Half of the limit would then change nothing, so the new
    # limit is half of the tokens in that micro-batch. Padding is left out of this count, but the limit includes it, so
    # that micro-batch certainly exceeds the new limit, and is split.
    run.limits.tokens = min(run.limits.tokens or math.inf, max(int(part.attention.sum()) for part in splittable)) // 2
    faults.warn(f"out of memory: from now on a micro-batch has at most {run.limits.tokens} tokens, with padding")
