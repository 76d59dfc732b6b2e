"""Advantages against plain Python, and the corner cases: missing rewards, equal rewards, too few of them."""

import math
from statistics import fmean, stdev

import pytest
import torch

from advantage import BASELINES, SCALES, all_equal, combine_rewards, group_advantages

NAN = math.nan
PAIRS = [(scale, baseline) for scale in SCALES for baseline in BASELINES]
OF_THE_GROUP = [(s, b) for s, b in PAIRS if s == "group" or b in ("mean", "leave_one_out")]
REWARDS = {  # three groups of four
    "plain": [[0.0, 1.0, 0.5, 1.0], [7.0, -3.0, 2.5, 2.0], [0.1, 0.2, 0.4, 0.8]],
    "one group equal": [[0.0, 1.0, 0.5, 1.0], [0.3, 0.3, 0.3, 0.3], [0.1, 0.2, 0.4, 0.8]],
    "some missing": [[0.0, NAN, 0.5, 1.0], [7.0, -3.0, 2.5, 2.0], [NAN, 0.2, NAN, 0.8]],
    "one reward in a group": [[0.0, 1.0, 0.5, 1.0], [NAN, NAN, 2.5, NAN], [0.1, 0.2, 0.4, 0.8]],
    "no reward in a group": [[0.0, 1.0, 0.5, 1.0], [NAN, NAN, NAN, NAN], [0.1, 0.2, 0.4, 0.8]],
    "missing and equal": [[0.0, NAN, 0.5, 1.0], [0.1, NAN, 0.1, 0.1], [0.1, 0.2, 0.4, 0.8]],
    "one reward in all": [[NAN, NAN], [NAN, 2.0]],
    "no reward at all": [[NAN, NAN], [NAN, NAN]],
}


def by_hand(groups, scale, baseline, eps):
    """(r - baseline) / (sample std + eps), one reward after the other; 0 where there is nothing to compare with."""
    batch = [r for group in groups for r in group if not math.isnan(r)]

    def advantage(r, others):
        group = [r, *others]
        compared = [group] if (scale, baseline) in OF_THE_GROUP else []
        compared += [batch] if "batch" in (scale, baseline) else []
        if math.isnan(r) or any(min(rewards) == max(rewards) for rewards in compared):
            return 0.0
        centre = {"mean": group, "leave_one_out": others, "batch": batch, "none": [0.0]}[baseline]
        spread = stdev({"group": group, "batch": batch}[scale]) + eps if scale != "none" else 1.0
        return (r - fmean(centre)) / spread

    def of_group(group):
        given = [[r for j, r in enumerate(group) if j != i and not math.isnan(r)] for i in range(len(group))]
        return [advantage(r, others) for r, others in zip(group, given)]

    return torch.tensor([of_group(group) for group in groups], dtype=torch.float64)


@pytest.mark.parametrize("groups", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("scale, baseline", PAIRS)
def test_against_plain_python(scale, baseline, groups):
    for dtype, tolerance, eps in ((torch.float64, 1e-12, 0.5), (torch.float32, 1e-5, 1e-4)):
        rewards = torch.tensor(groups, dtype=dtype)
        advantages = group_advantages(rewards, scale, baseline, eps)
        expected = by_hand(groups, scale, baseline, eps).to(dtype)  # the dtype that was given
        torch.testing.assert_close(advantages, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(rewards.isnan(), torch.tensor(groups).isnan()), "the rewards were changed in place"


def test_defaults_and_the_sample_std():
    """The group's mean and std, ddof 1: rewards 0 and 1 have a std of 0.7071, not of 0.5."""
    advantages = group_advantages(torch.tensor([[0, 1]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.5, 0.5]]) / (math.sqrt(0.5) + 1e-4))


@pytest.mark.parametrize("scale, baseline", [pair for pair in PAIRS if pair in OF_THE_GROUP or "batch" in pair])
@pytest.mark.parametrize("value", [0.1, 0.3, -1 / 3, 0.0, 1e7 / 3])
def test_equal_rewards_give_exactly_zero(scale, baseline, value):
    """Seven times 0.1 in float32 have a mean that is not 0.1: what counts is min == max, not a rounded std."""
    equal, other = [value] * 7, [0.0, 1.0, 2.0, 0.0, 0.5, 0.0, 4.0]
    groups = [equal, other] if (scale, baseline) in OF_THE_GROUP else [equal, [NAN, *equal[1:]]]
    for dtype, eps in ((torch.float32, 1e-4), (torch.float32, 0.0), (torch.float64, 1e-4), (torch.float64, 0.0)):
        advantages = group_advantages(torch.tensor(groups, dtype=dtype), scale, baseline, eps)
        assert (advantages[0] == 0).all()
        assert (advantages[1] != 0).any() == ((scale, baseline) in OF_THE_GROUP)


def test_all_equal_is_exact_and_counts_what_is_given():
    one_up = math.nextafter(0.1, 1.0)
    groups = [[0.1, 0.1, 0.1], [0.1, one_up, 0.1], [NAN, 0.1, one_up], [NAN, 0.1, 0.1], [NAN, NAN, 0.1], [NAN] * 3]
    rewards = torch.tensor(groups, dtype=torch.float64)
    assert all_equal(rewards).tolist() == [[True], [False], [False], [True], [True], [True]]
    assert ((group_advantages(rewards[:2], scale="none") != 0).sum(1) > 0).tolist() == [False, True]


@pytest.mark.parametrize("scale, baseline", PAIRS)
def test_one_completion_of_a_prompt_has_no_group(scale, baseline):
    groups = [[0.0], [1.0], [5.0]]
    rewards = torch.tensor(groups, dtype=torch.float64)
    if (scale, baseline) in OF_THE_GROUP:
        with pytest.raises(ValueError, match="at least 2 completions"):
            group_advantages(rewards, scale, baseline)
    else:
        torch.testing.assert_close(
            group_advantages(rewards, scale, baseline), by_hand(groups, scale, baseline, eps=1e-4)
        )


def test_rewards_have_a_row_for_each_prompt():
    with pytest.raises(ValueError, match=r"a row for each prompt, not \(10,\)"):
        group_advantages(torch.zeros(10))


@pytest.mark.parametrize("name, valid", [("scale", SCALES), ("baseline", BASELINES)])
def test_unknown_names(name, valid):
    with pytest.raises(ValueError) as error:
        group_advantages(torch.zeros(2, 2), **{name: "median"})
    assert all(value in str(error.value) for value in ("median", *valid))


def test_several_rewards_are_added_by_their_weights_and_a_missing_one_is_left_out():
    parts = [[[1.0, 2.0, 3.0], [NAN, 2.0, 3.0]], [[1.0, NAN, NAN], [NAN, NAN, NAN]]]  # (P, G, K)
    rewards = combine_rewards(torch.tensor(parts, dtype=torch.float64), [1.0, -0.5, 10.0])
    expected = torch.tensor([[30.0, 29.0], [1.0, NAN]], dtype=torch.float64)
    torch.testing.assert_close(rewards, expected, rtol=0, atol=0, equal_nan=True)
