"""The completions of a step as tensors, cut into minibatches and micro-batches.

One optimizer update is computed from one minibatch. Which completions are in it depends only on the seed, the step, and
the index (0, 1, ...) of the pass over the step's completions. A micro-batch is the part of a minibatch that goes
through the model at once. How large it is depends on the ranks and the memory, but the result does not: the weight of
every token is fixed before the minibatch is cut (loss.py), so the gradients of any micro-batches add up to the same
sum.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from advantage import Group, trained_tokens
from config import SMALLER, UserError
from fast.shared_prompts import Row, Sample, row_length, shared_rows

logger = logging.getLogger(__name__)
BUSY_TOKENS = 4096  # as many in a micro-batch keep a GPU busy


@dataclass
class Batch:
    """Tensors with one row for each completion: the prompt, the completion, then padding."""

    ids: Tensor  # (N, T)
    attention: Tensor  # (N, T), 0 for padding
    mask: Tensor  # (N, T), 1 for the tokens that are trained on
    advantages: Tensor  # (N, T)
    prompt_numbers: Tensor  # (N,), for each row, the number of its prompt in this step: 0, 1, ...
    prompt_lengths: Tensor  # (N,)
    sampler_logp: Tensor  # (N, T)
    kept: list[list[np.ndarray | None]] | None = None  # (N, T), the ids that the log-prob is normalized over
    head_ids: Tensor | None = None  # (N, T, K), the ids that were likeliest at each token, for --score_centering
    sampler_head_logp: Tensor | None = None  # (N, T, K + 1), of these and of all others together
    old_logp: Tensor | None = None  # (N, T); None with a single update: then it is logp itself, detached
    ref_logp: Tensor | None = None  # (N, T)
    entropy: Tensor | None = None  # (N, T), of the policy before the step; None unless --top_entropy needs it
    weights: Tensor | None = None  # (N, T), computed from the whole update
    completions_per_row: list[int] | None = None  # in each row that the model reads; None: one each

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: list[int]) -> "Batch":
        # Copy the row numbers to the device once. Indexing with a list would copy them again for each tensor.
        index = torch.tensor(rows, device=self.ids.device)
        tensors = {name: x[index] for name, x in vars(self).items() if isinstance(x, Tensor)}
        kept = None if self.kept is None else [self.kept[row] for row in rows]
        return replace(self, **tensors, kept=kept, completions_per_row=None)

    @property
    def has_gradient(self) -> Tensor:
        """Whether the policy term gives each completion a gradient, (N,)."""
        return ((self.advantages != 0) & self.mask.bool()).any(1)


@dataclass
class Limits:
    """The limits of a micro-batch, which is full when it reaches `rows` or `tokens`."""

    rows: int | None  # how many completions
    tokens: int | None  # how many tokens, with padding; `retry_smaller` lowers it
    # The model's, which decides how many completions share a row (fast/shared_prompts.py). None: each has its own.
    hidden_size: int | None = None
    least_prompt: float = 0.0  # completions share a row if their prompt is at least this many times as long as they are
    largest: int = 0  # tokens of the largest micro-batch of several completions, since `retry_smaller` set it to 0

    def allow(self, rows: int, tokens: int) -> bool:
        return rows <= (self.rows or math.inf) and tokens <= (self.tokens or math.inf)


# ---- Completions -> tensors ----


def collate(groups: list[Group], mask_truncated: bool, device: torch.device) -> Batch:
    """Build the batch of a step. Completions that are not trained on stay in it, with all their tokens masked."""
    completions = [completion for group in groups for completion in group.completions]
    N = len(completions)
    T = max(len(group.prompt_ids) + len(completion.ids) for group in groups for completion in group.completions)
    ids, attention, mask = (torch.zeros(N, T, dtype=torch.long) for _ in range(3))
    advantages, sampler_logp = torch.zeros(N, T), torch.zeros(N, T)
    prompt_numbers, prompt_lengths = (torch.zeros(N, dtype=torch.long) for _ in range(2))
    K = 0 if completions[0].head_ids is None else completions[0].head_ids.shape[1]
    head_ids, head_logp = torch.zeros(N, T, K, dtype=torch.int32), torch.zeros(N, T, K + 1)
    kept: list[list[np.ndarray | None]] = [[None] * T for _ in range(N)]
    n = 0
    for p, group in enumerate(groups):
        start = len(group.prompt_ids)
        masks = trained_tokens(group, mask_truncated)
        for completion, is_trained, advantage in zip(group.completions, masks, group.advantages, strict=True):
            end = start + len(completion.ids)
            prompt_numbers[n], prompt_lengths[n] = p, start
            ids[n, :start] = torch.tensor(group.prompt_ids)
            ids[n, start:end] = torch.as_tensor(completion.ids)
            attention[n, :end] = 1
            mask[n, start:end] = torch.as_tensor(is_trained)
            advantages[n, start:end] = torch.as_tensor(advantage)  # a number, or one for each token
            sampler_logp[n, start:end] = torch.as_tensor(completion.logp)
            if K:
                head_ids[n, start:end] = torch.as_tensor(completion.head_ids)
                head_logp[n, start:end] = torch.as_tensor(completion.head_logp)
            if completion.kept is not None:
                kept[n][start:end] = completion.kept
            n += 1
    has_kept_sets = any(completion.kept is not None for completion in completions)
    return Batch(
        ids=ids.to(device),
        attention=attention.to(device),
        mask=mask.to(device),
        advantages=advantages.to(device),
        prompt_numbers=prompt_numbers.to(device),
        prompt_lengths=prompt_lengths.to(device),
        sampler_logp=sampler_logp.to(device),
        kept=kept if has_kept_sets else None,
        head_ids=head_ids.to(device) if K else None,
        sampler_head_logp=head_logp.to(device) if K else None,
    )


# ---- Tensors -> pieces ----


def minibatches(n: int, parts: int, seed: tuple[int, int, int]) -> list[list[int]]:
    """Return the rows of each update in one pass over n completions. seed is (seed, step, pass)."""
    order = np.random.Generator(np.random.PCG64(seed)).permutation(n)
    return [sorted(rows.tolist()) for rows in np.array_split(order, min(n, parts))]


def micro_batches(
    batch: Batch, limits: Limits, rank: int = 0, world: int = 1, same_count: bool = False
) -> Iterator[tuple[list[int], Batch]]:
    """Cut this rank's part of the batch into micro-batches. Yield the row numbers of each, and that part of the batch.

    Completions of one prompt may share a row of the model's input (fast/shared_prompts.py). Rows are sorted by length,
    to keep padding small. Completions to which the policy term gives no gradient come last, in micro-batches that may
    need no backward pass.

    With same_count, all ranks get as many micro-batches as the one that has most, because all must take part whenever
    sharded weights are gathered. Those that are added are fully masked. All ranks must then have the same limits.
    """
    shares = _shares(batch, world)

    def pieces_of(share: list[Sample]) -> list[list[Row]]:
        rows = shared_rows(share, limits.hidden_size, limits.least_prompt, limits.allow)
        return _pieces(rows, limits)

    mine = pieces_of(shares[rank])
    for piece in mine:
        if len(piece) > 1 or len(piece[0]) > 1:
            limits.largest = max(limits.largest, _tokens(piece))
        rows = [sample.index for row in piece for sample in row]  # their numbers in the batch
        yield rows, replace(batch[rows], completions_per_row=[len(row) for row in piece])
    if same_count:
        most = max(len(pieces_of(share)) for share in shares)
        filler = replace(batch[[0]], mask=torch.zeros_like(batch.mask[:1]))  # any completion would do: it is masked
        for _ in range(most - len(mine)):
            yield [0], filler


def _shares(batch: Batch, world: int) -> list[list[Sample]]:
    """Divide the completions among the ranks, so that all have about the same work. Completions of one prompt stay
    together, except where the share of one rank ends and the next one begins."""
    has_gradient, numbers = batch.has_gradient.tolist(), batch.prompt_numbers.tolist()
    prompt_lengths, whole_lengths = batch.prompt_lengths.tolist(), batch.attention.sum(1).tolist()
    samples = []
    for n, prompt_length in enumerate(prompt_lengths):
        samples.append(Sample(n, has_gradient[n], numbers[n], prompt_length, whole_lengths[n] - prompt_length))
    samples.sort(key=lambda sample: (sample.prompt, -sample.length))
    # A forward pass counts once, and a backward pass twice.
    work = [(3 if sample.has_gradient else 1) * (sample.prompt_length + sample.length) for sample in samples]
    total, before = sum(work), 0
    shares: list[list[Sample]] = [[] for _ in range(world)]
    for sample, its_work in zip(samples, work, strict=True):
        # Cut the line of all work into `world` equal pieces. A completion goes to the rank whose piece has its middle,
        # which is below `total`.
        middle = before + its_work / 2
        shares[int(world * middle / total)].append(sample)
        before += its_work
    return shares


def _pieces(rows: list[Row], limits: Limits) -> list[list[Row]]:
    """Divide the rows into micro-batches that the limits allow. The rows must be sorted as `shared_rows` returns them:
    first those with a gradient, then those without, and in both parts the longest first."""
    pieces: list[list[Row]] = []
    for row in rows:
        if pieces and _has_room(pieces[-1], row, limits):
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces


def _has_room(piece: list[Row], row: Row, limits: Limits) -> bool:
    """Return whether this row, which is not longer than those of the piece, should be computed with them."""
    larger = [*piece, row]
    is_full = not limits.allow(sum(map(len, larger)), _tokens(larger))
    # The row would be padded to the length of the first one. A GPU that is busy anyway has less work without this.
    is_wasteful = _tokens(piece) >= BUSY_TOKENS and row_length(row) < 0.8 * row_length(piece[0])
    return not is_full and not is_wasteful and piece[0][0].has_gradient == row[0].has_gradient


def _tokens(piece: list[Row]) -> int:
    """Return how many tokens the model reads, with padding."""
    return len(piece) * row_length(piece[0])


def retry_smaller(compute: Callable, run: Any, batch: Batch) -> Any:
    """Return compute(run, batch). Whenever memory runs out, halve the largest micro-batch and start again. The result
    stays the same, because the size of a micro-batch does not change what is computed. Only the rank that ran out of
    memory starts again, so `compute` must not call a collective before its last allocation."""
    while True:
        run.limits.largest = 0  # `micro_batches` raises it
        # If memory runs out, the lines below this block run. The tensors of the failed try are free by then, which they
        # would not be in an `except` block.
        with suppress(torch.OutOfMemoryError):
            return compute(run, batch)
        torch.cuda.empty_cache()
        if run.config.shard or not run.limits.largest:  # with --shard, no rank can start again by itself
            raise UserError(f"out of memory in an update: {SMALLER}")
        run.limits.tokens = run.limits.largest // 2
        logger.warning(f"out of memory: from now on a micro-batch has at most {run.limits.tokens} tokens, with padding")
