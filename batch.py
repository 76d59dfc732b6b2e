"""The completions of a step as tensors, and in pieces: minibatches (what an update is made of) and micro-batches (what
goes through the model at once).

Which completions form a minibatch is a function of (seed, step, pass). Micro-batches depend on ranks and memory, and no
result depends on them. Left out: packing several completions in a row.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rollout import Completion, KeptSets


@dataclass
class Group:
    """One prompt and its completions."""

    prompt_ids: list[int]
    row: dict = field(default_factory=dict)  # of the task
    completions: list[Completion] = field(default_factory=list)  # G of them
    rewards: Tensor | None = None  # (G,), NaN: no reward
    reward_parts: Tensor | None = None  # (G, K), of each reward function
    right: Tensor | None = None  # (G,), bool; None: nothing says what is right
    has_signal: bool = True  # its completions tell better from worse: dynamic_sampling rejects others
    extras: list[dict] | None = None  # of each completion, logged by its rewards
    advantages: Tensor | None = None  # (G,)


@dataclass
class Batch:
    """Completions as rows of prompt, completion, and padding on the right."""

    ids: Tensor  # (N, T)
    attention: Tensor  # (N, T)
    mask: Tensor  # (N, T), the completion tokens that are trained on
    advantages: Tensor  # (N,) or (N, T)
    prompts: Tensor  # (N,), the number of the prompt that each row answers
    sampler_logp: Tensor  # (N, T)
    sampler_entropy: Tensor  # (N, T), 0 where it was not asked for
    old_logp: Tensor | None = None  # (N, T); None: those of the current policy, detached
    ref_logp: Tensor | None = None  # (N, T)
    weights: Tensor | None = None  # (N, T), computed over the whole update, not over these rows
    kept: list[KeptSets] | None = None  # N rows of T sets, which every log-prob is over; None: nothing was cut

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: list[int]) -> "Batch":
        tensors = {name: x[rows] for name, x in vars(self).items() if isinstance(x, Tensor)}
        return Batch(**tensors, kept=None if self.kept is None else [self.kept[row] for row in rows])

    @property
    def has_gradient(self) -> Tensor:  # (N,), of the policy term: some token is trained on and its advantage is not 0
        return ((self.advantages.reshape(len(self), -1) != 0) & self.mask.bool()).any(1)


@dataclass
class Limits:
    """Of a micro-batch: it is full when either is reached."""

    rows: int | None
    tokens: int | None  # padding included; halved where memory runs out

    def allow(self, rows: int, length: int) -> bool:
        return rows <= (self.rows or math.inf) and rows * length <= (self.tokens or math.inf)


def collate(groups: list[Group], mask_truncated: bool, device: torch.device) -> Batch:
    """Completions without a reward, and truncated ones where asked, stay in the batch with all their tokens masked."""
    rows = [(p, group, i) for p, group in enumerate(groups) for i in range(len(group.completions))]
    N, T = len(rows), max(len(group.prompt_ids) + len(group.completions[i].ids) for _, group, i in rows)
    ids, attention, mask = (torch.zeros(N, T, dtype=torch.long) for _ in range(3))
    sampler_logp, sampler_entropy = (torch.zeros(N, T) for _ in range(2))
    kept = []
    for n, (_, group, i) in enumerate(rows):
        completion, start = group.completions[i], len(group.prompt_ids)
        end = start + len(completion.ids)
        ids[n, :end] = torch.tensor(group.prompt_ids + completion.ids)
        attention[n, :end] = 1
        sampler_logp[n, start:end] = torch.tensor(completion.logp)
        if completion.entropy is not None:
            sampler_entropy[n, start:end] = torch.tensor(completion.entropy)
        kept.append(completion.kept.between(start, T - end) if completion.kept else [None] * T)
        mask[n, start:end] = int(is_trained_on(group, i, mask_truncated))
    advantages = torch.tensor([float(group.advantages[i]) for _, group, i in rows])
    prompts = torch.tensor([p for p, _, _ in rows])
    tensors = ids, attention, mask, advantages, prompts, sampler_logp, sampler_entropy
    something_cut = any(group.completions[i].kept for _, group, i in rows)
    return Batch(*(x.to(device) for x in tensors), kept=kept if something_cut else None)


def is_trained_on(group: Group, i: int, mask_truncated: bool) -> bool:
    return not math.isnan(group.rewards[i]) and not (mask_truncated and group.completions[i].truncated)


def trained_lengths(groups: list[Group], mask_truncated: bool) -> Tensor:
    """-> (P, G), the tokens of each completion that are trained on"""

    def length(group: Group, i: int) -> int:
        return len(group.completions[i].ids) * is_trained_on(group, i, mask_truncated)

    return torch.tensor([[length(group, i) for i in range(len(group.completions))] for group in groups])


def minibatches(n: int, parts: int, seed: tuple[int, int, int]) -> list[list[int]]:
    """The rows of each update of a pass over n completions, where seed is (seed, step, pass)."""
    if parts == 1:
        return [list(range(n))]
    order = np.random.Generator(np.random.PCG64(list(seed))).permutation(n)
    return [sorted(rows.tolist()) for rows in np.array_split(order, min(n, parts))]


def micro_batches(
    batch: Batch, limits: Limits, rank: int = 0, world: int = 1, as_many_on_every_rank: bool = False
) -> Iterator[tuple[list[int], Batch]]:
    """This rank's rows and the part of the batch that they are, piece by piece: every n-th row in the order of length,
    so that little is padding, and rows without a gradient apart from the others, so that they may go without a backward
    pass. With `as_many_on_every_rank`, a rank with fewer pieces also gets fully masked ones, because sharded weights
    come together only where all ranks take part."""
    lengths, has_gradient = batch.attention.sum(1).tolist(), batch.has_gradient.tolist()
    order = sorted(range(len(batch)), key=lambda row: (not has_gradient[row], -lengths[row]))
    pieces = _pieces(order[rank::world], lengths, has_gradient, limits)
    for rows in pieces:
        yield rows, batch[rows]
    if as_many_on_every_rank:
        most = max(len(_pieces(order[other::world], lengths, has_gradient, limits)) for other in range(world))
        masked = batch[order[-1:]]
        masked.mask = torch.zeros_like(masked.mask)
        for _ in range(most - len(pieces)):
            yield order[-1:], masked


def _pieces(rows: list[int], lengths: list[int], has_gradient: list[bool], limits: Limits) -> list[list[int]]:
    pieces: list[list[int]] = []
    for row in rows:
        first = pieces[-1][0] if pieces else row
        if pieces and has_gradient[first] == has_gradient[row] and limits.allow(len(pieces[-1]) + 1, lengths[first]):
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces
