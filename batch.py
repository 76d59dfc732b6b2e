"""The completions of a step as tensors, and in pieces: minibatches (what an update is made of) and micro-batches (what
goes through the model at once).

Which completions form a minibatch is a function of (seed, step, pass). Micro-batches depend on ranks and memory, and
nothing depends on them: a rank takes every n-th row in the order of length, and fills pieces to a budget. Left out:
packing several completions in a row.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from config import Config
from rollout import Completion

if TYPE_CHECKING:
    from train import Run


@dataclass
class Group:
    """One prompt and its completions."""

    row: dict
    prompt_ids: list[int]
    completions: list[Completion]
    rewards: Tensor  # (G,), NaN: no reward
    parts: Tensor  # (G, functions)
    advantages: Tensor | None = None  # (G,)


@dataclass
class Batch:
    """The completions of a step, on every rank. (N, T) is prompt, completion, padding on the right. Tensors have one
    row more, of no completion: what a rank without work computes where the others need it (--shard)."""

    ids: Tensor  # (N, T)
    attention: Tensor  # (N, T)
    mask: Tensor  # (N, T), the completion tokens that are trained on
    advantages: Tensor  # (N,)
    sampler_logp: Tensor  # (N, T)
    old_logp: Tensor | None = None  # (N, T); None: the policy that is about to be updated
    ref_logp: Tensor | None = None  # (N, T)

    def __len__(self) -> int:
        return len(self.ids) - 1


def collate(groups: list[Group], advantages: Tensor, mask_truncated: bool, device: torch.device) -> Batch:
    """Completions without a reward, and truncated ones where asked, stay in the batch with all their tokens masked."""
    pairs = [(group, i) for group in groups for i in range(len(group.completions))]
    N, T = len(pairs), max(len(group.prompt_ids) + len(group.completions[i].ids) for group, i in pairs)
    ids, attention, mask = (torch.zeros(N + 1, T, dtype=torch.long) for _ in range(3))
    attention[N, :2] = 1
    sampler_logp = torch.zeros(N + 1, T)
    for n, (group, i) in enumerate(pairs):
        completion, start = group.completions[i], len(group.prompt_ids)
        end = start + len(completion.ids)
        ids[n, :end] = torch.tensor(group.prompt_ids + completion.ids)
        attention[n, :end] = 1
        sampler_logp[n, start:end] = torch.tensor(completion.logp)
        trained = not group.rewards[i].isnan() and not (mask_truncated and completion.truncated)
        mask[n, start:end] = int(trained)
    advantages = torch.cat([advantages.float(), torch.zeros(1)])
    return Batch(*(x.to(device) for x in (ids, attention, mask, advantages, sampler_logp)))


def minibatches(n: int, cfg: Config, step: int, iteration: int) -> list[Tensor]:
    """Which completions make each update of a pass: a function of (seed, step, pass)."""
    if cfg.minibatches == 1:
        return [torch.arange(n)]
    order = np.random.Generator(np.random.PCG64([cfg.seed, step, iteration])).permutation(n)
    return [torch.as_tensor(np.sort(part)) for part in np.array_split(order, min(n, cfg.minibatches))]


def micro_batches(run: "Run", batch: Batch, rows: Tensor) -> list[Tensor]:
    """This rank's part of the rows, sorted by length to save padding, in pieces of so many rows or padded tokens."""
    lengths = batch.attention.sum(1).tolist()
    order = sorted(rows.tolist(), key=lambda row: -lengths[row])
    by_rank = [in_pieces(order[rank :: run.world], lengths, run) for rank in range(run.world)]
    pieces = by_rank[run.rank]
    if run.config.shard:  # as many on every rank
        pieces += [[len(batch)]] * (max(map(len, by_rank)) - len(pieces))
    return [torch.tensor(piece, device=run.device) for piece in pieces]


def in_pieces(rows: list[int], lengths: list[int], run: "Run") -> list[list[int]]:
    pieces: list[list[int]] = []
    for row in rows:
        size = len(pieces[-1]) + 1 if pieces else 0
        if pieces and (size if run.config.micro_batch_size else size * lengths[pieces[-1][0]]) <= run.micro_batch:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces
