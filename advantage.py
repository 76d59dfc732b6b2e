"""Rewards -> advantages, over whole groups.

    A_i = (r_i - b_i) / s_i

for the G completions of one prompt, whose rewards stand side by side:

    GRPO         2402.03300   b = mean of the group            s = std of the group + eps
    Dr. GRPO     2503.20783   b = mean of the group            s = 1
    RLOO         2402.14740   b = mean of the group's others   s = 1
    REINFORCE++  2501.03262   b = mean of the batch            s = std of the batch + eps

The batch is every reward of the step, over all ranks. Left out: running means over steps, value functions.
"""

import torch
from torch import Tensor

SCALES = ("group", "batch", "none")
BASELINES = ("mean", "leave_one_out", "batch", "none")


def group_advantages(
    rewards: Tensor, num_generations: int, scale: str = "group", baseline: str = "mean", eps: float = 1e-4
) -> Tensor:
    """rewards (N,), all samples of prompt 0, then of prompt 1, ... -> advantages (N,).

    NaN stands for a completion without a reward: it gets advantage 0 and is in no mean and no std. A group (or batch)
    without spread, its rewards all equal or fewer than two, does not tell better from worse: where its mean or std
    is asked for, the advantages are exactly 0.
    """
    _check(rewards, num_generations, scale, baseline)
    r = rewards.double().reshape(-1, num_generations)  # (P, G), a row for each prompt
    group_mean, group_std, group_flat = _moments(r)  # (P, 1)
    batch_mean, batch_std, batch_flat = _moments(r.reshape(1, -1))  # (1, 1)

    if baseline == "mean":
        b = group_mean
    elif baseline == "leave_one_out":
        b = (r.nansum(1, keepdim=True) - r) / (_count(r) - 1)  # the mean of the others
    elif baseline == "batch":
        b = batch_mean
    else:
        b = 0.0

    if scale == "group":
        s = group_std + eps
    elif scale == "batch":
        s = batch_std + eps
    else:
        s = 1.0

    no_signal = r.isnan()
    if scale == "group" or baseline in ("mean", "leave_one_out"):
        no_signal = no_signal | group_flat
    if scale == "batch" or baseline == "batch":
        no_signal = no_signal | batch_flat
    advantages = ((r - b) / s).masked_fill(no_signal, 0.0)
    return advantages.reshape(-1).to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def _moments(r: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(P, G) -> mean, std and whether a row has no spread, each (P, 1); NaN is left out."""
    count = _count(r)
    mean = r.nanmean(1, keepdim=True)
    # The sample std (ddof 1), as in TRL. The population's (ddof 0) would make advantages larger by
    # sqrt(G / (G - 1)): 41 % at G = 2, 7 % at G = 8.
    std = ((r - mean).square().nansum(1, keepdim=True) / (count - 1)).sqrt()
    # Equality is judged by min and max: a mean of equal floats can round away from them, and its std from 0.
    low = r.masked_fill(r.isnan(), float("inf")).amin(1, keepdim=True)
    high = r.masked_fill(r.isnan(), float("-inf")).amax(1, keepdim=True)
    return mean, std, (count < 2) | (low == high)


def _count(r: Tensor) -> Tensor:
    return (~r.isnan()).sum(1, keepdim=True)


def _check(rewards: Tensor, num_generations: int, scale: str, baseline: str) -> None:
    if scale not in SCALES:
        raise ValueError(f"scale is {scale!r}; it must be one of {', '.join(SCALES)}")
    if baseline not in BASELINES:
        raise ValueError(f"baseline is {baseline!r}; it must be one of {', '.join(BASELINES)}")
    if num_generations < 1 or rewards.dim() != 1 or len(rewards) % num_generations:
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} are no whole groups of num_generations={num_generations}"
        )
    if num_generations == 1 and (scale == "group" or baseline in ("mean", "leave_one_out")):
        raise ValueError(
            f"num_generations=1 leaves nothing to compare with for baseline={baseline!r}, scale={scale!r}: "
            "use at least 2, or the batch's baseline and scale"
        )
