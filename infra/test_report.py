"""The figures of a step."""

import math

import pytest
import torch

from advantage import group_advantages
from batch import Group
from infra.report import share_of_advantage


@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_share_of_the_advantages_on_easy_and_hard_groups(scale):
    """Of binary rewards, with p right among G: sum |A| is 2 G p (1 - p), over the std where it is divided by."""
    G, right = 8, [1, 4, 6, 7, 8, 0]  # the last two are dead; 6 of 8 is the bound itself
    rewards = torch.tensor([[1.0] * n + [0.0] * (G - n) for n in right])
    advantages = group_advantages(rewards, scale, "mean", eps=0.0)
    groups = [Group({}, [], [], r, r[:, None], a) for r, a in zip(rewards, advantages)]
    never_trained_on = Group({}, [], [], torch.ones(G), torch.ones(G, 1))  # as dynamic sampling leaves behind
    p = torch.tensor(right) / G
    sizes = 2 * G * p * (1 - p)
    if scale == "group":
        sizes = sizes / (p * (1 - p) * G / (G - 1)).sqrt().clamp(min=1e-9)
    shares = (sizes / sizes.sum()).tolist()
    assert share_of_advantage([*groups, never_trained_on], 0.75, math.inf) == pytest.approx(shares[3])
    assert share_of_advantage([*groups, never_trained_on], -math.inf, 0.25) == pytest.approx(shares[0])
    assert shares[3] == pytest.approx(0.2075 if scale == "group" else 1 / 6, abs=1e-4)
    assert share_of_advantage(groups[4:], 0.75, math.inf) is None


def test_a_completion_without_a_reward_counts_for_nothing_in_them():
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, math.nan])  # 4 of 5 is easy, 4 of 6 would not be
    (advantages,) = group_advantages(rewards[None])
    group = Group({}, [], [], rewards, rewards[:, None], advantages)
    assert share_of_advantage([group], 0.75, math.inf) == 1.0
