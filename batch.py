"""The completions of a step as tensors, and in pieces: minibatches (what an update is made of) and micro-batches (what
goes through the model at once).

Which completions form a minibatch is a function of (seed, step, pass). Micro-batches depend on ranks and memory, and no
result depends on them; nor on which completions of a prompt go through the model as one row, that reads it once.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from advantage import all_equal
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
    index: int | None = None  # of its row, among the task's rows
    step: int = 0  # in which its completions were sampled


@dataclass
class Batch:
    """Completions as rows of prompt, completion, and padding on the right."""

    ids: Tensor  # (N, T)
    attention: Tensor  # (N, T)
    mask: Tensor  # (N, T), the completion tokens that are trained on
    advantages: Tensor  # (N,) or (N, T)
    prompts: Tensor  # (N,), the number of the prompt that each row answers
    prompt_lengths: Tensor  # (N,)
    sampler_logp: Tensor  # (N, T)
    sampler_entropy: Tensor  # (N, T), 0 where it was not asked for
    old_logp: Tensor | None = None  # (N, T); None: those of the current policy, detached
    ref_logp: Tensor | None = None  # (N, T)
    weights: Tensor | None = None  # (N, T), computed over the whole update, not over these rows
    steps: Tensor | None = None  # (N,), in which each row was sampled
    kept: list[KeptSets] | None = None  # N rows of T sets, which every log-prob is over; None: nothing was cut
    together: list[int] | None = None  # so many rows, one after the other, are read as one

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

    rows: int | None  # completions
    tokens: int | None  # padding included; halved where memory runs out
    hidden_size: int | None = None  # of a model that can read several completions as one row; None: it cannot

    def allow(self, rows: int, tokens: int) -> bool:
        return rows <= (self.rows or math.inf) and tokens <= (self.tokens or math.inf)


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
    prompt_lengths = torch.tensor([len(group.prompt_ids) for _, group, _ in rows])
    steps = torch.tensor([group.step for _, group, _ in rows], device=device)
    tensors = ids, attention, mask, advantages, prompts, prompt_lengths, sampler_logp, sampler_entropy
    something_cut = any(group.completions[i].kept for _, group, i in rows)
    return Batch(*(x.to(device) for x in tensors), steps=steps, kept=kept if something_cut else None)


def is_trained_on(group: Group, i: int, mask_truncated: bool) -> bool:
    return not math.isnan(group.rewards[i]) and not (mask_truncated and group.completions[i].truncated)


def has_signal(group: Group, mask_truncated: bool) -> bool:
    """0 < #correct < G (where nothing says what is correct, rewards that differ), and two completions trained on."""
    values = group.rewards if group.right is None else group.right.double().masked_fill(group.rewards.isnan(), math.nan)
    trained = sum(is_trained_on(group, i, mask_truncated) for i in range(len(group.completions)))
    return trained >= 2 and not bool(all_equal(values[None]))


def trained_lengths(groups: list[Group], mask_truncated: bool) -> Tensor:
    """-> (P, G), the tokens of each completion that are trained on: 0 where mask_truncated leaves one out"""
    trained = [[is_trained_on(group, i, mask_truncated) for i in range(len(group.completions))] for group in groups]
    lengths = [[len(completion.ids) for completion in group.completions] for group in groups]
    return torch.tensor(trained) * torch.tensor(lengths)


def minibatches(n: int, parts: int, seed: tuple[int, int, int]) -> list[list[int]]:
    """The rows of each update of a pass over n completions, where seed is (seed, step, pass)."""
    order = np.random.Generator(np.random.PCG64(list(seed))).permutation(n)
    return [sorted(rows.tolist()) for rows in np.array_split(order, min(n, parts))]


class Pack(NamedTuple):  # completions of one prompt that are read as one row: the prompt, then one behind another
    has_gradient: bool
    length: int
    rows: list[int]


def micro_batches(
    batch: Batch, limits: Limits, rank: int = 0, world: int = 1, as_many_on_every_rank: bool = False
) -> Iterator[tuple[list[int], Batch]]:
    """This rank's rows and the part of the batch that they are, piece by piece: every n-th pack in the order of length,
    so that little is padding, and rows without a gradient apart from the others, so that they may go without a backward
    pass. With `as_many_on_every_rank`, a rank with fewer pieces also gets fully masked ones, because sharded weights
    come together only where all ranks take part."""
    lengths = batch.attention.sum(1) - batch.prompt_lengths  # (N,), of completions
    columns = batch.has_gradient, batch.prompts, batch.prompt_lengths, lengths
    facts = list(zip(*(column.tolist() for column in columns)))  # of each row
    share = Limits(math.ceil(len(batch) / world), None, limits.hidden_size)  # the same on all ranks; limits may not be
    packs = _packs(facts, range(len(batch)), share)

    def pieces_of(rank: int) -> list[list[Pack]]:
        rows = [row for pack in packs[rank::world] for row in pack.rows]
        return _pieces(_packs(facts, rows, limits), limits)

    pieces = pieces_of(rank)
    for piece in pieces:
        rows = [row for pack in piece for row in pack.rows]
        yield rows, replace(batch[rows], together=[len(pack.rows) for pack in piece])
    if as_many_on_every_rank:
        most = max(len(pieces_of(other)) for other in range(world))
        rows = packs[-1].rows[:1]
        for _ in range(most - len(pieces)):
            yield rows, replace(batch[rows], mask=torch.zeros_like(batch.mask[rows]))


def _packs(facts: list[tuple[bool, int, int, int]], rows: Iterable[int], limits: Limits) -> list[Pack]:
    """As many completions of a prompt in a row as is cheapest and within the limits. The longest come first, and those
    with a gradient before them.

    With k completions of c tokens behind a prompt of p, each costs p/k + c tokens, and a token of a model of size h
    12 h^2 multiplications a layer and 2 h for each of the p + k c in its row: the least where k = sqrt(p (p + 6h)) / c.
    """
    h, packs = limits.hidden_size, []
    order = sorted(rows, key=lambda row: (facts[row][:3], -facts[row][3]))
    for (has_gradient, _, p), same in groupby(order, lambda row: facts[row][:3]):
        rows = list(same)
        lengths = [facts[row][3] for row in rows]
        k = math.sqrt(p * (p + 6 * h)) * len(rows) / max(1, sum(lengths)) if h else 1
        for n in range(math.ceil(len(rows) / max(1, int(k))), len(rows) + 1):
            of_prompt = [Pack(has_gradient, p + sum(lengths[i::n]), rows[i::n]) for i in range(n)]
            if all(limits.allow(len(pack.rows), pack.length) for pack in of_prompt):
                break
        packs += of_prompt
    return sorted(packs, reverse=True)


def _pieces(packs: list[Pack], limits: Limits) -> list[list[Pack]]:
    pieces: list[list[Pack]] = []
    for pack in packs:
        piece = [*pieces[-1], pack] if pieces else [pack]
        fits = limits.allow(sum(len(pack.rows) for pack in piece), len(piece) * piece[0].length)
        if pieces and fits and piece[0].has_gradient == pack.has_gradient:
            pieces[-1].append(pack)
        else:
            pieces.append([pack])
    return pieces
