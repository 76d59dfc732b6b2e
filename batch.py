"""The completions of a step as tensors, cut into minibatches and micro-batches.

One optimizer update is computed from one minibatch. Which completions are in it depends only on the seed, the step, and
the index (0, 1, ...) of the pass over the step's completions. A micro-batch is the part of a minibatch that goes
through the model at once. How large it is depends on the ranks and the memory, but the result does not: the weight of
every token is fixed before the minibatch is cut (loss.py), so the gradients of any micro-batches add up to the same
sum.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from advantage import all_equal
from fast.kept_sets import KeptSets
from fast.shared_prompts import Facts, SharedRow, shared_rows
from rollout import Completion


@dataclass
class Group:
    """One prompt and its G completions. Rewards and advantages are filled in later."""

    prompt_ids: list[int]
    row: dict = field(default_factory=dict)  # the task's row: the prompt as text, and columns for the rewards
    completions: list[Completion] = field(default_factory=list)
    # Set by `judge` in train.py:
    rewards: Tensor | None = None  # (G,), the weighted sum of the reward functions; NaN where none gave a value
    reward_parts: Tensor | None = None  # (G, K), the value of each reward function
    right: Tensor | None = None  # (G,), bool; None if the task does not say which answers are right
    has_signal: bool = True  # whether dynamic sampling keeps this group
    extras: list[dict] | None = None  # for each completion, what reward functions passed to `log_extra`
    # Set by `training_step`, from all groups of the step: (G,), or a list of G tensors with one value for each token.
    # It stays None if dynamic sampling replaced the group.
    advantages: Tensor | list[Tensor] | None = None
    # Where the group comes from:
    index: int | None = None  # the position of the row in the task's list of rows
    step: int = 0  # the step in which the completions were sampled


@dataclass
class Batch:
    """Tensors with one row for each completion: the prompt, the completion, then padding."""

    ids: Tensor  # (N, T)
    attention: Tensor  # (N, T), 0 for padding
    mask: Tensor  # (N, T), 1 for the tokens that are trained on
    advantages: Tensor  # (N,) or (N, T)
    prompts: Tensor  # (N,), for each row, the number of its prompt in this step: 0, 1, ...
    prompt_lengths: Tensor  # (N,)
    sampler_logp: Tensor  # (N, T)
    sampler_entropy: Tensor  # (N, T), 0 if it was not recorded
    old_logp: Tensor | None = None  # (N, T); None with a single update, or with --old_policy sampler
    ref_logp: Tensor | None = None  # (N, T)
    weights: Tensor | None = None  # (N, T), computed from the whole minibatch
    steps: Tensor | None = None  # (N,), the step in which each completion was sampled
    samples: Tensor | None = None  # (N,), the number of each completion within its group
    kept: list[KeptSets] | None = None  # for each completion and position, the ids that log-probs are normalized over
    together: list[int] | None = None  # how many completions share each row of the model's input; None: no sharing

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: list[int]) -> "Batch":
        # Copy the row numbers to the device once. Indexing with a list would copy them again for each tensor.
        index = torch.tensor(rows, device=self.ids.device)
        tensors = {name: x[index] for name, x in vars(self).items() if isinstance(x, Tensor)}
        # `together` stays None: `micro_batches` sets it for the rows of a whole micro-batch.
        return Batch(**tensors, kept=None if self.kept is None else [self.kept[row] for row in rows])

    @property
    def has_gradient(self) -> Tensor:
        """Whether the policy term gives each completion a gradient, (N,)."""
        return ((self.advantages.reshape(len(self), -1) != 0) & self.mask.bool()).any(1)


@dataclass
class Limits:
    """The limits of a micro-batch, which is full when it reaches `rows` or `tokens`."""

    rows: int | None  # how many completions
    tokens: int | None  # how many tokens, with padding; halved when memory runs out
    hidden_size: int | None = None  # the model's; decides which completions share a row. None: no sharing

    def allow(self, rows: int, tokens: int) -> bool:
        return rows <= (self.rows or math.inf) and tokens <= (self.tokens or math.inf)


# ---- Completions -> tensors ----


def trained_tokens(group: Group, mask_truncated: bool) -> list[list[bool]]:
    """Return for each completion which of its tokens are trained on. These are the tokens that the model wrote. No
    token is trained on if the completion has no reward, or if it is truncated and `mask_truncated` is set."""
    masks = []
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        left_out = math.isnan(reward) or (mask_truncated and completion.truncated)
        written = [True] * len(completion.ids) if completion.written is None else completion.written
        masks.append([False] * len(written) if left_out else written)
    return masks


def trained_lengths(groups: list[Group], mask_truncated: bool) -> Tensor:
    """Return how many tokens of each completion are trained on, (P, G)."""
    return torch.tensor([[sum(mask) for mask in trained_tokens(group, mask_truncated)] for group in groups])


def has_signal(group: Group, mask_truncated: bool, graded: bool = False) -> bool:
    """Return whether the group shows which completions are better: at least two are trained on, and some but not all
    are right. If rewards are graded, or the task does not say what is right, the second condition is that rewards
    differ."""
    by_reward = graded or group.right is None
    # A completion without a reward is neither right nor wrong: it becomes NaN, which `all_equal` leaves out.
    values = group.rewards if by_reward else group.right.double().masked_fill(group.rewards.isnan(), math.nan)
    trained = sum(any(mask) for mask in trained_tokens(group, mask_truncated))
    return trained >= 2 and not bool(all_equal(values[None]))


def collate(groups: list[Group], mask_truncated: bool, device: torch.device) -> Batch:
    """Build the batch of a step. Completions that are not trained on stay in it, with all their tokens masked."""
    completions = [
        (p, group, completion, trained)
        for p, group in enumerate(groups)
        for completion, trained in zip(group.completions, trained_tokens(group, mask_truncated), strict=True)
    ]
    N, T = len(completions), max(len(group.prompt_ids) + len(one.ids) for _, group, one, _ in completions)
    ids, attention, mask = (torch.zeros(N, T, dtype=torch.long) for _ in range(3))
    sampler_logp, sampler_entropy, advantages = torch.zeros(N, T), torch.zeros(N, T), torch.zeros(N, T)
    flat_advantages = [A for group in groups for A in group.advantages]
    for_each_token = any(np.ndim(A) > 0 for A in flat_advantages)
    kept = []
    for n, (_, group, completion, trained) in enumerate(completions):
        start = len(group.prompt_ids)
        end = start + len(completion.ids)
        ids[n, :end] = torch.tensor(group.prompt_ids + completion.ids)
        attention[n, :end] = 1
        mask[n, start:end] = torch.tensor(trained)
        advantages[n, start:end] = flat_advantages[n]
        sampler_logp[n, start:end] = torch.tensor(completion.logp)
        if completion.entropy is not None:
            sampler_entropy[n, start:end] = torch.tensor(completion.entropy)
        kept.append(completion.kept.padded(start, T - end) if completion.kept else [None] * T)
    has_kept_sets = any(completion.kept for _, _, completion, _ in completions)
    return Batch(
        ids=ids.to(device),
        attention=attention.to(device),
        mask=mask.to(device),
        advantages=(advantages if for_each_token else torch.tensor([float(A) for A in flat_advantages])).to(device),
        prompts=torch.tensor([p for p, *_ in completions], device=device),
        prompt_lengths=torch.tensor([len(group.prompt_ids) for _, group, *_ in completions], device=device),
        sampler_logp=sampler_logp.to(device),
        sampler_entropy=sampler_entropy.to(device),
        steps=torch.tensor([group.step for _, group, *_ in completions], device=device),
        samples=torch.tensor([i for group in groups for i in range(len(group.completions))], device=device),
        kept=kept if has_kept_sets else None,
    )


# ---- Tensors -> pieces ----


def minibatches(n: int, parts: int, seed: tuple[int, int, int]) -> list[list[int]]:
    """Return the rows of each update in one pass over n completions. seed is (seed, step, pass)."""
    order = np.random.Generator(np.random.PCG64(list(seed))).permutation(n)
    return [sorted(rows.tolist()) for rows in np.array_split(order, min(n, parts))]


def micro_batches(
    batch: Batch, limits: Limits, rank: int = 0, world: int = 1, same_count: bool = False
) -> Iterator[tuple[list[int], Batch]]:
    """Cut this rank's part of the batch into micro-batches. Yield the row numbers of each, and that part of the batch.

    The completions are sorted by length, to keep padding small, and dealt out to the ranks in turn. Completions to
    which the policy term gives no gradient come last, in micro-batches that may need no backward pass. Completions of
    one prompt that are packed into one row of the model's input (fast/shared_prompts.py) stay together.

    With same_count, a rank with fewer micro-batches than another also gets fully masked ones, because all
    ranks must take part whenever sharded weights are gathered.
    """
    lengths = batch.attention.sum(1) - batch.prompt_lengths
    columns = batch.has_gradient, batch.prompts, batch.prompt_lengths, lengths  # in the order of the fields of Facts
    facts = [Facts(*row) for row in zip(*(column.tolist() for column in columns))]
    # A shared row has a prompt and several of its completions. Such rows are formed twice. First, they are formed of
    # all completions, to decide which rank gets which completions. All ranks must decide alike, so they do not use
    # limits.rows and limits.tokens, which a rank may have lowered because it ran out of memory. `fair_share` limits a
    # shared row to N / world completions, rounded up, so that one row does not leave other ranks without work.
    fair_share = Limits(math.ceil(len(batch) / world), tokens=None)
    deal = shared_rows(facts, range(len(batch)), limits.hidden_size, fair_share.allow)

    # Then each rank forms rows of its own completions, within its own limits, and divides the list of rows into
    # micro-batches.
    def pieces_of(rank: int) -> list[list[SharedRow]]:
        dealt = [i for shared in deal[rank::world] for i in shared.members]
        return _pieces(shared_rows(facts, dealt, limits.hidden_size, limits.allow), limits)

    pieces = pieces_of(rank)
    for piece in pieces:
        members = [i for shared in piece for i in shared.members]
        yield members, replace(batch[members], together=[len(shared.members) for shared in piece])
    if same_count:
        # This is only for sharded weights. With these, a rank never lowers its limits, so all ranks have the same ones,
        # and this rank can compute how many micro-batches the others have.
        most = max(len(pieces_of(other)) for other in range(world))
        filler = deal[-1].members[:1]  # any completion would do, because it is masked
        for _ in range(most - len(pieces)):
            yield filler, replace(batch[filler], mask=torch.zeros_like(batch.mask[filler]))


def _pieces(rows: list[SharedRow], limits: Limits) -> list[list[SharedRow]]:
    """Divide a list of shared rows into micro-batches that the limits allow. The list must be sorted as `shared_rows`
    returns it: those with a gradient first, and within each kind the longest first."""
    pieces: list[list[SharedRow]] = []
    for row in rows:
        extended = [*pieces[-1], row] if pieces else [row]
        # The first row is the longest, and the others are padded to its length.
        fits = limits.allow(sum(len(one.members) for one in extended), len(extended) * extended[0].length)
        if pieces and fits and extended[0].has_gradient == row.has_gradient:
            pieces[-1].append(row)
        else:
            pieces.append([row])
    return pieces
