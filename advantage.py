"""Rewards -> advantages: how much better a completion is than the others that answer the same prompt.

    A_i = (r_i - b_i) / s_i

The G completions of one prompt are a group. The papers choose b and s like this:

    GRPO         2402.03300   b = mean of the group            s = std of the group + eps
    Dr. GRPO     2503.20783   b = mean of the group            s = 1
    RLOO         2402.14740   b = mean of the other rewards   s = 1
    OPO          2505.23585   b = mean weighted by length      s = 1
    MaxRL        2602.02710   b = mean of the group            s = mean of the group
    GDPO         2601.05242   each reward normalized in its group, then all added; b = batch mean, s = batch std + eps
    REINFORCE++  2501.03262   b = 0, or the mean of the group ("REINFORCE++-baseline"); then whitened over the batch

The batch is all rewards of a step, over all ranks. A group gives no signal if its rewards do not show which of its
completions are better. --dynamic_sampling replaces such groups.

Not here: baselines from running means over steps, and value functions.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCALES = ("group", "batch", "mean", "whiten", "none")
GROUP_BASELINES = ("mean", "leave_one_out", "length")  # from the rewards of the completion's group
BASELINES = (*GROUP_BASELINES, "batch", "none")
COMBINATIONS = ("sum", "gdpo")


@dataclass
class Group:
    """One prompt and its G completions. Rewards and advantages are filled in later."""

    prompt_ids: list[int]
    row: dict = field(default_factory=dict)  # the task's row: the prompt as text, and columns for the rewards
    completions: list = field(default_factory=list)  # Completion objects (rollout.py)
    # Set by `add_rewards` in train.py:
    rewards: Tensor | None = None  # (G,), the weighted sum of the reward functions; NaN where none gave a value
    reward_parts: Tensor | None = None  # (G, K), the value of each reward function
    right: Tensor | None = None  # (G,), 1 or 0, NaN where that was not judged; None if it was judged nowhere
    has_signal: bool = True
    extras: list[dict] | None = None  # for each completion, what reward functions passed to `log_extra`
    logged: list[tuple[str, float]] = field(default_factory=list)  # to `log_metric`; a round's are in its first group
    # Set by `set_advantages`, unless dynamic sampling replaced the group: (G,), or a list of G tensors with one value
    # for each token.
    advantages: Tensor | list[Tensor] | None = None
    extra: dict = field(default_factory=dict)  # for your own code; saved with the group; keep it the same on all ranks
    # Where the group comes from:
    index: int | None = None  # the position of the row in the task's list of rows
    step: int = 0  # the step in which the completions were sampled


# ---- Rewards -> advantages ----


def set_advantages(groups: list[Group], weights: Sequence[float], settings: Any) -> None:
    """Set the advantages of all groups of a step, from the values of the reward functions and their weights. `settings`
    has the fields of Config that are used here. (config.py imports this file, so this file cannot import Config.)"""
    parts = torch.stack([group.reward_parts for group in groups])  # (P, G, K)
    rewards = combine_rewards(parts, weights, settings.combine_rewards)  # (P, G)
    # (P, G), the number of tokens of each completion that are trained on
    lengths = [[int(mask.sum()) for mask in trained_tokens(group, settings.mask_truncated)] for group in groups]
    switches = advantage_switches(settings)
    advantages = group_advantages(rewards, settings.scale_rewards, lengths=torch.tensor(lengths), **switches)
    for group, own in zip(groups, advantages, strict=True):
        # A baseline or a scale of the whole batch could give even a group without a signal advantages other than 0.
        without_signal = settings.dynamic_sampling and not group.has_signal
        group.advantages = torch.zeros_like(own) if without_signal else own


def advantage_switches(settings: Any) -> dict[str, Any]:
    """Return each setting that has the name of an argument of group_advantages. A new one needs no code here."""
    arguments = inspect.signature(group_advantages).parameters
    return {name: getattr(settings, name) for name in arguments if hasattr(settings, name)}


def combine_rewards(parts: Tensor, weights: Sequence[float], how: str = "sum") -> Tensor:
    """Return the weighted sum (P, G) of the values of K reward functions (P, G, K). NaN is a missing value. It is left
    out of the sum. If all values are missing, the sum is NaN. With "gdpo", each function is first normalized to mean 0
    and std 1 within every group, so that no function dominates by its scale."""
    if how == "sum":
        values = parts
    elif how == "gdpo":
        values = torch.stack([group_advantages(part) for part in parts.unbind(-1)], dim=-1)
    else:
        raise _unknown("how", how, COMBINATIONS)
    weights = torch.tensor(weights, dtype=parts.dtype)
    return (values * weights).nansum(-1).masked_fill(parts.isnan().all(-1), torch.nan)


def group_advantages(
    rewards: Tensor,
    scale: str = "group",
    baseline: str = "mean",
    eps: float = 1e-4,
    *,
    lengths: Tensor | None = None,
) -> Tensor:
    """Return the advantages (P, G) of rewards (P, G), which have one row for each prompt. lengths (P, G) is the number
    of tokens of each completion that are trained on. Without it, every completion with a reward counts as one token.

    NaN is a missing reward. Its advantage is 0, and it is left out of every mean and std. A completion of length 0 is
    not trained on. Its reward still counts in the group's mean and std, as in DAPO, but not in baseline="length"
    or scale="whiten", which weight each reward by its number of tokens.

    If the baseline or the scale comes from the group, a group has advantages of exactly 0 in two cases: all its rewards
    are equal, or fewer than two of its completions are trained on, so that there is nothing to compare. If the baseline
    or the scale comes from the batch, and all rewards of the batch are equal, all advantages are exactly 0.
    """
    _check(rewards, scale, baseline, lengths)
    r = rewards.double()
    batch = r.reshape(1, -1)  # (1, P * G)
    tokens = (torch.ones_like(r) if lengths is None else lengths.double()).masked_fill(r.isnan(), 0.0)  # (P, G)
    trained = tokens > 0  # (P, G)

    if baseline == "mean":
        b = r.nanmean(1, keepdim=True)  # (P, 1)
    elif baseline == "leave_one_out":
        b = (r.nansum(1, keepdim=True) - r) / (_count(r) - 1)  # (P, G), the mean of the others
    elif baseline == "length":
        b = (tokens * r).nansum(1, keepdim=True) / tokens.sum(1, keepdim=True).clamp(min=1)
    elif baseline == "batch":
        b = batch.nanmean(1, keepdim=True)
    elif baseline == "none":
        b = 0.0
    else:
        raise _unknown("baseline", baseline, BASELINES)

    if scale == "group":
        s = _std(r) + eps
    elif scale == "batch":
        s = _std(batch) + eps
    elif scale == "mean":
        s = r.nanmean(1, keepdim=True)
    elif scale in ("whiten", "none"):
        s = 1.0
    else:
        raise _unknown("scale", scale, SCALES)

    no_signal = r.isnan()
    if compares_in_group(scale, baseline):
        no_signal = no_signal | all_equal(r) | (trained.sum(1, keepdim=True) < 2)
    if scale == "mean":  # the mean must be above 0 by more than rounding; 0.1 + 0.2 - 0.3 gives 6e-17
        no_signal = no_signal | (s <= 1e-6 * r.abs().nanmean(1, keepdim=True))
    if scale == "batch" or baseline == "batch":
        no_signal = no_signal | all_equal(batch)
    advantages = ((r - b) / s).masked_fill(no_signal, 0.0)
    if scale == "whiten":
        # Only completions that are trained on are compared: the others become NaN, which `all_equal` ignores.
        trained_advantages = advantages.masked_fill(~trained, torch.nan).reshape(1, -1)
        no_signal = no_signal | ~trained | all_equal(trained_advantages)
        advantages = _whitened(advantages, tokens, eps).masked_fill(no_signal, 0.0)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def compares_in_group(scale: str, baseline: str, combination: str = "sum") -> bool:
    """Return whether an advantage depends on the other rewards of its group."""
    return scale in ("group", "mean") or baseline in GROUP_BASELINES or combination == "gdpo"


def keep_high_entropy(advantages: Tensor, entropy: Tensor, mask: Tensor, share: float) -> Tensor:
    """Keep the advantages (N,) or (N, T) of the tokens with the highest entropy, and set all others to 0 (2506.01939).
    `share` is the share of the update's tokens that keep their advantage. entropy and mask (N, T) must be those of the
    whole update. If several tokens have the same entropy, the first ones are kept, so that the share is exact."""
    place = entropy[mask.bool()].argsort(descending=True, stable=True).argsort()  # rank by entropy; 0 is the highest
    chosen = (place < share * len(place) - 1e-9).to(entropy)  # - 1e-9 because 0.07 * 100 gives 7 + 9e-16
    keeps = torch.zeros_like(entropy).masked_scatter(mask.bool(), chosen)  # (N, T), 1 or 0
    return advantages.reshape(len(advantages), -1) * keeps


def _whitened(x: Tensor, tokens: Tensor, eps: float) -> Tensor:
    """Subtract the mean of the batch and divide by its std, both weighted by the number of tokens."""
    total = tokens.sum().clamp(min=2)  # a batch of one token has no signal, but must not divide by 0
    centred = x - (tokens * x).sum() / total
    return centred / (((tokens * centred.square()).sum() / (total - 1)).sqrt() + eps)


def _std(r: Tensor) -> Tensor:
    """Return the standard deviation (P, 1) of each row of r (P, G). It is that of a sample (ddof 1), as in TRL. With
    ddof 0, advantages would be larger by a factor of sqrt(G / (G - 1)): 41 % at G = 2, 7 % at G = 8."""
    squares = (r - r.nanmean(1, keepdim=True)).square()
    return (squares.nansum(1, keepdim=True) / (_count(r) - 1)).sqrt()


def _count(r: Tensor) -> Tensor:
    """Return how many rewards of each row of r (P, G) are not missing, (P, 1)."""
    return (~r.isnan()).sum(1, keepdim=True)


def _check(rewards: Tensor, scale: str, baseline: str, lengths: Tensor | None) -> None:
    if lengths is None and (scale == "whiten" or baseline == "length"):
        raise ValueError("baseline='length' and scale='whiten' need lengths (P, G)")
    if rewards.shape[1] == 1 and compares_in_group(scale, baseline):
        raise ValueError(f"baseline={baseline!r}, scale={scale!r} need at least 2 completions of a prompt")


def _unknown(argument: str, value: str, valid: Sequence[str]) -> ValueError:
    return ValueError(f"{argument} is {value!r}; it must be one of {', '.join(valid)}")


# ---- Who has a signal ----


def trained_tokens(group: Group, mask_truncated: bool) -> list[np.ndarray]:
    """Return for each completion which of its tokens are trained on, as booleans. These are the tokens that the model
    wrote. No token is trained on if the completion has no reward, or if it is truncated and `mask_truncated` is set."""
    masks = []
    for completion, reward in zip(group.completions, group.rewards, strict=True):
        left_out = math.isnan(reward) or (mask_truncated and completion.truncated)
        written = np.ones(len(completion.ids), bool) if completion.written is None else completion.written
        masks.append(np.zeros_like(written) if left_out else written)
    return masks


def has_signal(group: Group, mask_truncated: bool, graded: bool = False) -> bool:
    """Return whether the group shows which completions are better: at least two are trained on, and some but not all
    are right. If rewards are graded, or the task does not say what is right, the second condition is that rewards
    differ."""
    values = group.rewards if graded or group.right is None else group.right  # NaN where there is no reward
    trained = sum(mask.any() for mask in trained_tokens(group, mask_truncated))
    return trained >= 2 and not bool(all_equal(values[None]))


def all_equal(rewards: Tensor) -> Tensor:
    """Return for each row of rewards (P, G) whether all its rewards are equal, (P, 1). NaN is ignored. This compares
    the minimum with the maximum, because the std of equal floats may differ from 0 by rounding."""
    low = rewards.masked_fill(rewards.isnan(), torch.inf).amin(1, keepdim=True)
    high = rewards.masked_fill(rewards.isnan(), -torch.inf).amax(1, keepdim=True)
    return low >= high  # low > high in a row without rewards
