"""Rewards -> advantages, over whole groups.

    A_i = (r_i - b_i) / s_i

for the G completions of one prompt:

    GRPO         2402.03300   b = mean of the group            s = std of the group + eps
    Dr. GRPO     2503.20783   b = mean of the group            s = 1
    RLOO         2402.14740   b = mean of the group's others   s = 1
    REINFORCE++  2501.03262   b = mean of the batch            s = std of the batch + eps

The batch is every reward of the step, over all ranks. Left out: running means over steps, value functions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

SCALES = ("group", "batch", "none")
BASELINES = ("mean", "leave_one_out", "batch", "none")


def combine_rewards(parts: Tensor, weights: Sequence[float]) -> Tensor:
    """parts (P, G, K), the values of K reward functions, NaN where one gave none -> their weighted sum (P, G)"""
    weights = torch.tensor(weights, dtype=parts.dtype)
    return (parts * weights).nansum(-1).masked_fill(parts.isnan().all(-1), torch.nan)


def group_advantages(rewards: Tensor, scale: str = "group", baseline: str = "mean", eps: float = 1e-4) -> Tensor:
    """rewards (P, G), a row for each prompt -> advantages (P, G).

    NaN stands for a completion without a reward: it gets advantage 0 and is in no mean and no std. A group (or batch)
    whose rewards are all equal, or fewer than two, does not tell better from worse: where its mean or std is asked for,
    the advantages are exactly 0.
    """
    _check(rewards, scale, baseline)
    r = rewards.double()
    batch = r.reshape(1, -1)  # (1, P * G)

    if baseline == "mean":
        b = r.nanmean(1, keepdim=True)  # (P, 1)
    elif baseline == "leave_one_out":
        b = (r.nansum(1, keepdim=True) - r) / (_count(r) - 1)  # (P, G), the mean of the others
    elif baseline == "batch":
        b = batch.nanmean(1, keepdim=True)
    else:
        b = 0.0

    if scale == "group":
        s = _std(r) + eps
    elif scale == "batch":
        s = _std(batch) + eps
    else:
        s = 1.0

    no_signal = r.isnan()
    if scale == "group" or baseline in ("mean", "leave_one_out"):
        no_signal = no_signal | all_equal(r)
    if scale == "batch" or baseline == "batch":
        no_signal = no_signal | all_equal(batch)
    advantages = ((r - b) / s).masked_fill(no_signal, 0.0)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def all_equal(rewards: Tensor) -> Tensor:
    """(P, G) -> (P, 1): whether the rewards of a row are all equal, or fewer than two. Judged by min and max: the mean
    of equal floats can round away from them, and their std from 0."""
    low = rewards.masked_fill(rewards.isnan(), torch.inf).amin(1, keepdim=True)
    high = rewards.masked_fill(rewards.isnan(), -torch.inf).amax(1, keepdim=True)
    return low >= high


def _std(r: Tensor) -> Tensor:
    """(P, G) -> (P, 1). Of the sample (ddof 1), as in TRL. The population's (ddof 0) would make advantages larger by
    sqrt(G / (G - 1)): 41 % at G = 2, 7 % at G = 8."""
    squares = (r - r.nanmean(1, keepdim=True)).square()
    return (squares.nansum(1, keepdim=True) / (_count(r) - 1)).sqrt()


def _count(r: Tensor) -> Tensor:
    return (~r.isnan()).sum(1, keepdim=True)


def _check(rewards: Tensor, scale: str, baseline: str) -> None:
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; it must be one of {', '.join(SCALES)}")
    if baseline not in BASELINES:
        raise ValueError(f"baseline is {baseline!r}; it must be one of {', '.join(BASELINES)}")
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be (P, G), a row for each prompt, not {tuple(rewards.shape)}")
    if rewards.shape[1] == 1 and (scale == "group" or baseline in ("mean", "leave_one_out")):
        raise ValueError(
            f"a group of one has nothing to compare with for baseline={baseline!r}, scale={scale!r}: "
            "use at least 2 completions of a prompt, or the batch's baseline and scale"
        )
