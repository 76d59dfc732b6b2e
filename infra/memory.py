"""Choose how many tokens go into a rollout and into a micro-batch, by measuring on the GPU what they take. If memory
runs out all the same, an update is computed in smaller parts.

Nothing here knows what a layer, a loss or a sampler needs. Before the first step, the run's own code computes made-up
completions of full length, with n tokens at once and then with 2 n. At their peaks these take `one` and `two` bytes,
and the straight line through both says what any other number of tokens takes:

    bytes(tokens) = one + (two - one) * (tokens / n - 1)

On a CPU nothing is measured, and the budgets are constants (config.py). Three things are left out: the tensors of a
whole step, about 50 bytes for each token; the reading of many long prompts at once; and what the allocator loses to
fragmentation. This is why the budgets do not fill all of the free memory.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from advantage import Group
from batch import Batch, collate, micro_batches
from config import SMALLER, UserError
from infra import faults, ranks
from infra.decoding import decoding
from logprob import CHUNK
from rollout import Completion, rollout

MOST_ROLLOUT_TOKENS = 1 << 22  # a larger rollout gains little: reading its cache takes most of the time
MOST_MICRO_BATCH_TOKENS = 1 << 15  # enough to keep a GPU busy and to make up for gathering sharded weights
SAMPLED = 4  # tokens sampled in a trial. With --decode graph, the third is captured and the fourth replays the graph
KEPT_IDS = 1000  # a guess at how many ids top_p or min_p keep


def choose_budgets(run: Any, longest_prompt: int, accumulate: Callable) -> str:
    """Choose the budgets of the run that were not given, the same on all ranks. Return a line for the screen. Nothing
    else changes: no weight, gradient, state of Adam, or random generator."""
    cfg, length, said = run.config, longest_prompt + run.config.max_completion_length, []
    trained = [p for p in run.model.parameters() if p.requires_grad] if cfg.steps != 0 else []
    adam = [torch.empty_like(p) for p in trained for _ in range(2)]  # takes the place of AdamW's two moments
    if cfg.rollout_tokens is None:
        run.sampling.tokens_at_once, found = rollout_budget(run, length)
        run.config = replace(run.config, rollout_tokens=run.sampling.tokens_at_once)
        said.append(f"rollout_tokens {found}")
    if trained and cfg.micro_batch_tokens is None and cfg.micro_batch_size is None:
        run.limits.tokens, found = micro_batch_budget(run, longest_prompt, accumulate)
        run.config = replace(run.config, micro_batch_tokens=run.limits.tokens)
        said.append(f"micro_batch_tokens {found}")
    del adam
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return "; ".join(said)


def rollout_budget(run: Any, length: int) -> tuple[int, str]:
    """Return how many tokens fit into the cache of a rollout, and what was measured."""
    # These prompts leave room for SAMPLED tokens only, so the cache is full after a few tokens.
    cfg, prompt = run.config, [0] * max(1, length - SAMPLED)
    # The end token is -1, which is no id, so no completion ends early.
    sampling = replace(run.sampling, max_completion_length=SAMPLED, tokens_at_once=2 * length, eos_ids=[-1], stop=[])

    def leave_out_the_prompt(tokens: int, unfinished: int) -> None:
        if tokens == 1:  # the prompt has been read; no real prompt is that long
            torch.cuda.reset_peak_memory_stats()

    def compute(tokens: int) -> None:
        n = tokens // length
        rollout(run.model, [prompt] * n, np.full((n, SAMPLED), 0.5), sampling, progress=leave_out_the_prompt)

    with decoding(run.model, getattr(torch, cfg.sampler_dtype), cfg.decode, SAMPLED):
        return largest_budget(compute, length, length, MOST_ROLLOUT_TOKENS, cfg.shard)


def micro_batch_budget(run: Any, longest_prompt: int, accumulate: Callable) -> tuple[int, str]:
    """Return how many tokens fit into a micro-batch, and what was measured."""
    cfg, length = run.config, run.config.max_completion_length
    # A row of the model's input is a prompt with as many of its completions as `micro_batches` puts together.
    run.limits.tokens = MOST_MICRO_BATCH_TOKENS
    _, first_row = next(micro_batches(made_up_batch(run, longest_prompt, 1, cfg.num_generations), run.limits))
    together = first_row.per_row[0]
    row = longest_prompt + together * length
    # n is the fewest rows that fill a chunk of the output head. From there on, the head takes the same memory for any
    # number of rows. With fewer, it would take less, and the bytes would not lie on the straight line.
    n = max(1, min(math.ceil(CHUNK["cuda"] / (together * length)), MOST_MICRO_BATCH_TOKENS // row))
    # Each rank gets 4 n rows. So even with micro-batches of 2 n rows, there are two, and the second one is computed
    # while the gradients of the first are in memory.
    batch = made_up_batch(run, longest_prompt, 4 * n * ranks.world(), together)

    def compute(tokens: int) -> None:
        run.limits.tokens = tokens
        in_parts_that_fit(accumulate, run, batch)
        run.optimizer.zero_grad()

    # This try is not measured. If n rows do not fit, it lowers run.limits.tokens to a number that fits.
    compute(n * row)
    tokens = min(ranks.gather([run.limits.tokens]))
    most = MOST_MICRO_BATCH_TOKENS if tokens == n * row else tokens  # if n rows do not fit, nothing larger does
    return largest_budget(compute, tokens, longest_prompt + length, most, cfg.shard)


def largest_budget(compute: Callable[[int], None], n: int, length: int, most: int, shard: bool) -> tuple[int, str]:
    """Return how many tokens fit, and what was measured. A budget is the length of a prompt with its completion, times
    a power of two, so it seldom changes when the free memory changes a little."""
    held = torch.cuda.memory_allocated()
    # What no process uses, and what PyTorch has reserved but does not use.
    free = min(ranks.gather([torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - held]))
    # With --shard, leave more free: a rank that runs out of memory in an update cannot try again by itself.
    room = (0.7 if shard else 0.8) * free

    def peak(tokens: int) -> int:
        torch.cuda.reset_peak_memory_stats()
        compute(tokens)
        return max(ranks.gather([torch.cuda.max_memory_allocated() - held]))

    one = peak(n)
    # Twice the tokens take at most twice the bytes. If that might not fit, count with twice the bytes and do not try.
    can_try = 2 * one <= free
    two = peak(2 * n) if can_try else 2 * one
    budget = length
    while 2 * budget <= most and one + (two - one) * (2 * budget / n - 1) <= room:
        budget *= 2
    found = f"{n} tokens take {one / 1e9:.3g} GB, {2 * n} {'' if can_try else 'at most '}{two / 1e9:.3g}"
    return budget, f"{budget} ({found}; {room / 1e9:.3g} of {free / 1e9:.3g} GB may be filled)"


def made_up_batch(run: Any, prompt_length: int, prompts: int, completions: int) -> Batch:
    """Return a batch of prompts, all with the same random tokens, with this many random completions each, all of full
    length. Whatever a batch may have is filled in."""
    cfg, length = run.config, run.config.max_completion_length
    vocabulary = run.model.config.get_text_config().vocab_size
    draw, kept = np.random.default_rng(0), None
    if cfg.cuts_vocabulary and cfg.keep_set:
        kept = length * [np.arange(min(cfg.top_k or KEPT_IDS, vocabulary), dtype=np.int32)]
    prompt, ones = draw.integers(vocabulary, size=prompt_length).tolist(), torch.ones(completions)
    ids = draw.integers(vocabulary, size=(completions, length))
    made = [Completion(ids=row, logp=np.zeros(length), truncated=False, kept=kept) for row in ids]
    # Advantages of 0 would not do: a micro-batch in which all are 0 may need no backward pass.
    group = Group(prompt, completions=made, rewards=ones, advantages=ones)
    batch = collate([group] * prompts, cfg.mask_truncated, run.device)
    batch.weights = batch.mask.double()
    batch.old_logp = batch.ref_logp = batch.sampler_logp
    if cfg.score_centering:
        batch.sampler_head_logp = batch.sampler_logp[..., None].repeat(1, 1, cfg.score_centering + 1)
        batch.head_ids = torch.zeros_like(batch.sampler_head_logp[..., 1:], dtype=torch.int32)
    return batch


def in_parts_that_fit(compute: Callable, run: Any, batch: Batch) -> Any:
    """Return compute(run, batch). Whenever memory runs out, halve the tokens of a micro-batch and start again. The
    result stays the same, because the size of a micro-batch does not change what is computed. Only the rank that ran
    out of memory starts again, so `compute` may communicate only once it needs no more memory, at its end."""
    while True:
        # If memory runs out, the lines below this block run. The tensors of the failed try are free by then, which they
        # would not be in an `except` block.
        with suppress(torch.OutOfMemoryError):
            return compute(run, batch)
        torch.cuda.empty_cache()
        parts = [part for _, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world()) if len(part) > 1]
        if run.config.shard or not parts:  # with --shard, no rank can start again by itself
            raise UserError(f"out of memory in an update: {SMALLER}")
        # The limit may be far above the largest micro-batch, so halve the tokens of that one. If its completions share
        # rows, their prompts count here more often than in the limit, and it may take another try to split it.
        run.limits.tokens = min(run.limits.tokens or math.inf, max(int(part.attention.sum()) for part in parts)) // 2
        faults.warn(f"out of memory: from now on a micro-batch has at most {run.limits.tokens} tokens, with padding")
