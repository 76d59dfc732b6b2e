"""Advantages against plain Python, and the corner cases: missing rewards, equal rewards, too few of them."""

import math
from statistics import fmean, stdev

import pytest
import torch

from advantage import group_advantages

NAN = math.nan
SCALES = ["group", "batch", "none"]
BASELINES = ["mean", "leave_one_out", "batch", "none"]
PAIRS = [(scale, baseline) for scale in SCALES for baseline in BASELINES]
OF_THE_GROUP = [(s, b) for s, b in PAIRS if s == "group" or b in ("mean", "leave_one_out")]
REWARDS = {  # three groups of four
    "plain": [0.0, 1.0, 0.5, 1.0, 7.0, -3.0, 2.5, 2.0, 0.1, 0.2, 0.4, 0.8],
    "one group equal": [0.0, 1.0, 0.5, 1.0, 0.3, 0.3, 0.3, 0.3, 0.1, 0.2, 0.4, 0.8],
    "some missing": [0.0, NAN, 0.5, 1.0, 7.0, -3.0, 2.5, 2.0, NAN, 0.2, NAN, 0.8],
    "one reward in a group": [0.0, 1.0, 0.5, 1.0, NAN, NAN, 2.5, NAN, 0.1, 0.2, 0.4, 0.8],
    "no reward in a group": [0.0, 1.0, 0.5, 1.0, NAN, NAN, NAN, NAN, 0.1, 0.2, 0.4, 0.8],
    "missing and equal": [0.0, NAN, 0.5, 1.0, 0.1, NAN, 0.1, 0.1, 0.1, 0.2, 0.4, 0.8],
}


def by_hand(rewards, k, scale, baseline, eps):
    """(r - baseline) / (sample std + eps), one reward after the other."""
    batch = [r for r in rewards if not math.isnan(r)]
    advantages = []
    for i, r in enumerate(rewards):
        first = i - i % k
        others = [rewards[j] for j in range(first, first + k) if j != i and not math.isnan(rewards[j])]
        group = [*others, r]
        no_signal = (scale, baseline) in OF_THE_GROUP and (not others or min(group) == max(group))
        if math.isnan(r) or no_signal:
            advantages.append(0.0)
            continue
        centre = {"mean": group, "leave_one_out": others, "batch": batch, "none": [0.0]}[baseline]
        spread = stdev({"group": group, "batch": batch}[scale]) + eps if scale != "none" else 1.0
        advantages.append((r - fmean(centre)) / spread)
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("scale, baseline", PAIRS)
def test_against_plain_python(scale, baseline, rewards):
    for dtype, tolerance, eps in ((torch.float64, 1e-12, 0.5), (torch.float32, 1e-5, 1e-4)):
        given = torch.tensor(rewards, dtype=dtype)
        advantages = group_advantages(given, 4, scale=scale, baseline=baseline, eps=eps)
        expected = by_hand(rewards, 4, scale, baseline, eps).to(dtype)  # the dtype that was given
        torch.testing.assert_close(advantages, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(given.isnan(), torch.tensor(rewards).isnan()), "the rewards were changed in place"


def test_defaults_and_the_sample_std():
    """The group's mean and std, ddof 1: rewards 0 and 1 have a std of 0.7071, not of 0.5."""
    advantages = group_advantages(torch.tensor([0.0, 1.0]), 2)
    torch.testing.assert_close(advantages, torch.tensor([-0.5, 0.5]) / (math.sqrt(0.5) + 1e-4))


@pytest.mark.parametrize("scale, baseline", OF_THE_GROUP)
@pytest.mark.parametrize("value", [0.1, 0.3, -1 / 3, 0.0, 1e7 / 3])
def test_equal_rewards_give_exactly_zero(scale, baseline, value):
    """Seven times 0.1 in float32 have a mean that is not 0.1: what counts is min == max, not a rounded std."""
    for dtype, eps in ((torch.float32, 1e-4), (torch.float32, 0.0), (torch.float64, 1e-4), (torch.float64, 0.0)):
        rewards = torch.tensor([value] * 7 + [0.0, 1.0, 2.0, 0.0, 0.5, 0.0, 4.0], dtype=dtype)
        advantages = group_advantages(rewards, 7, scale=scale, baseline=baseline, eps=eps)
        assert (advantages[:7] == 0).all() and (advantages[7:] != 0).any()


@pytest.mark.parametrize("value", [0.1, 0.3, -1 / 3, 1e7 / 3])
@pytest.mark.parametrize("ones", [[1.0] * 14, [1.0, NAN, *[1.0] * 12]])
def test_a_whole_batch_of_equal_rewards_gives_exactly_zero(value, ones):
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor(ones, dtype=dtype) * value
        assert (group_advantages(rewards, 7, scale="batch", baseline="batch") == 0).all()


def test_almost_equal_rewards_still_count():
    rewards = torch.tensor([0.0, 0.0, 0.0, 1e-9], dtype=torch.float64)
    assert (group_advantages(rewards, 4) != 0).all()


@pytest.mark.parametrize("scale, baseline", PAIRS)
def test_no_reward_at_all(scale, baseline):
    assert group_advantages(torch.full((4,), NAN), 2, scale=scale, baseline=baseline).tolist() == [0.0] * 4


def test_one_reward_in_the_batch():
    assert group_advantages(torch.tensor([NAN, 2.0]), 2, scale="batch", baseline="batch").tolist() == [0.0, 0.0]


def test_groups_are_neighbours():
    """All samples of prompt 0, then all of prompt 1."""
    rewards = torch.tensor([0.0, 1.0, 10.0, 14.0, 200.0, 500.0])
    assert group_advantages(rewards, 2, scale="none").tolist() == [-0.5, 0.5, -2.0, 2.0, -150.0, 150.0]
    assert group_advantages(rewards, 3, scale="none", baseline="leave_one_out")[:3].tolist() == [-5.5, -4.0, 9.5]


@pytest.mark.parametrize("scale, baseline", PAIRS)
def test_one_sample_a_prompt_has_no_group(scale, baseline):
    rewards = torch.tensor([0.0, 1.0, 5.0], dtype=torch.float64)
    if (scale, baseline) in OF_THE_GROUP:
        with pytest.raises(ValueError, match="num_generations"):
            group_advantages(rewards, 1, scale=scale, baseline=baseline)
    else:
        advantages = group_advantages(rewards, 1, scale=scale, baseline=baseline)
        torch.testing.assert_close(advantages, by_hand(rewards.tolist(), 1, scale, baseline, eps=1e-4))


def test_rewards_are_whole_groups():
    with pytest.raises(ValueError, match=r"\b10\b.*\b4\b|\b4\b.*\b10\b"):
        group_advantages(torch.zeros(10), 4)


@pytest.mark.parametrize("name, values", [("scale", SCALES), ("baseline", BASELINES)])
def test_unknown_names(name, values):
    with pytest.raises(ValueError) as error:
        group_advantages(torch.zeros(4), 2, **{name: "median"})
    assert all(value in str(error.value) for value in values)
