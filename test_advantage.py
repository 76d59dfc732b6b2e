"""Advantages compared with plain Python, also where rewards are missing, equal, or too few."""

import math
from itertools import product
from statistics import fmean, stdev

import pytest
import torch

from advantage import BASELINES, COMBINATIONS, SCALES, all_equal, combine_rewards, group_advantages, on_high_entropy
from conftest import rounding

NAN = math.nan
# Those that by_hand knows.
PAIRS = [*product(("group", "batch", "mean", "whiten", "none"), ("mean", "leave_one_out", "length", "batch", "none"))]
OF_THE_GROUP = [(s, b) for s, b in PAIRS if s in ("group", "mean") or b in ("mean", "leave_one_out", "length")]
OF_THE_BATCH = [pair for pair in PAIRS if "batch" in pair or "whiten" in pair]
PLAIN = [[0.0, 1.0, 0.5, 1.0], [7.0, -3.0, 2.5, 2.0], [0.1, 0.2, 0.4, 0.8]]
REWARDS = {  # and the tokens that are trained on, where that matters: 0 of what was cut off, with --mask_truncated
    "plain": (PLAIN, None),
    "some missing": ([[0.0, NAN, 0.5, 1.0], PLAIN[1], [NAN, 0.2, NAN, 0.8]], None),
    "one or no reward in a group": ([PLAIN[0], [NAN, NAN, 2.5, NAN], [NAN] * 4, PLAIN[2]], None),
    "missing and equal": ([[0.0, NAN, 0.5, 1.0], [0.1, NAN, 0.1, 0.1], PLAIN[2]], None),
    "one reward in all": ([[NAN, NAN], [NAN, 2.0]], None),
    "no reward at all": ([[NAN, NAN], [NAN, NAN]], None),
    "groups of one": ([[0.0], [1.0], [5.0]], None),
    "negative": ([[-1.0, -2.0, 0.0], [-3.0, 1.0, 0.5]], None),
    "some are cut off": (PLAIN, [[3, 0, 5, 2], [4, 1, 0, 0], [0, 2, 6, 1]]),
    "all but one of a group": ([[0.0, 1.0, 0.5], [1.0, 0.25, 2.0], [0.0, 3.0, 1.0]], [[3, 2, 4], [0, 5, 0], [1, 2, 0]]),
    "the wrong ones": ([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]], [[4, 2, 0], [3, 3, 0]]),  # the others are alike
    "the wrong ones, some missing": ([[1.0, 0.0, NAN], [1.0, 0.0, 0.5]], [[4, 0, 9], [3, 0, 0]]),
    "all": ([[1.0, 0.0, 0.0], [1.0, 1.0, 0.5]], [[0, 0, 0], [0, 0, 0]]),
    # Seven times 0.1 have a mean that is not 0.1, nor 20 times 1e7 / 3: what counts is min == max, not a rounded std.
    "equal in a group": ([[0.1] * 7, [0.0, 1.0, 2.0, 0.0, 0.5, 0.0, 4.0], [-1 / 3] * 7], None),
    "equal in all": ([[1e7 / 3] * 7, [NAN, *[1e7 / 3] * 6], [1e7 / 3] * 7], None),
}


def by_hand(groups, scale, baseline, eps, lengths):
    """(r - baseline) / scale for one reward after the other, or 0 where there is no other reward to compare it with.
    Completions that are not trained on count as well. A mean over tokens counts a reward once for each token."""
    given = [(p, i) for p, group in enumerate(groups) for i, r in enumerate(group) if not math.isnan(r)]
    batch = [groups[p][i] for p, i in given]
    values, not_alike = torch.zeros(len(groups), len(groups[0]), dtype=torch.float64), set()
    for p, i in given:
        own = [j for q, j in given if q == p]
        group, others = [groups[p][j] for j in own], [groups[p][j] for j in own if j != i]
        compared = [group] * ((scale, baseline) in OF_THE_GROUP) + [batch] * ((scale, baseline) in OF_THE_BATCH)
        too_few = (scale, baseline) in OF_THE_GROUP and sum(lengths[p][j] > 0 for j in own) < 2
        alike = any(min(rewards) == max(rewards) for rewards in compared)
        if too_few or alike or (scale == "mean" and fmean(group) <= 0):
            continue
        by_length = sum(lengths[p][j] * groups[p][j] for j in own) / max(1, sum(lengths[p][j] for j in own))
        centres = {"mean": fmean(group), "length": by_length, "batch": fmean(batch), "none": 0.0}
        centre = fmean(others) if baseline == "leave_one_out" else centres[baseline]
        spread = fmean(group) if scale == "mean" else 1.0
        if scale in ("group", "batch"):
            spread = stdev({"group": group, "batch": batch}[scale]) + eps
        values[p, i] = (groups[p][i] - centre) / spread
        not_alike.add((p, i))
    if scale != "whiten":
        return values
    token_values = [values[p, i].item() for p, i in given for _ in range(lengths[p][i])]
    whitened = torch.zeros_like(values)
    for p, i in not_alike if len(set(token_values)) > 1 else []:
        whitened[p, i] = (lengths[p][i] > 0) * (values[p, i] - fmean(token_values)) / (stdev(token_values) + eps)
    return whitened


@pytest.mark.parametrize("groups, lengths", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("scale, baseline", PAIRS)
def test_against_plain_python(scale, baseline, groups, lengths):
    lengths = lengths or some_lengths(groups)
    for dtype, eps in ((torch.float64, 0.5), (torch.float64, 0.0), (torch.float32, 1e-4)):
        rewards, how = torch.tensor(groups, dtype=dtype), dict(lengths=torch.tensor(lengths))
        if len(groups[0]) == 1 and (scale, baseline) in OF_THE_GROUP:
            with pytest.raises(ValueError, match="at least 2 completions"):
                group_advantages(rewards, scale, baseline, eps, **how)
            continue
        advantages = group_advantages(rewards, scale, baseline, eps, **how)
        expected = by_hand(groups, scale, baseline, eps, lengths).to(dtype)  # the dtype that was given
        torch.testing.assert_close(advantages, expected, rtol=rounding(dtype), atol=rounding(dtype))
        assert (advantages[expected == 0] == 0).all(), "exactly"
        assert torch.equal(rewards.isnan(), torch.tensor(groups).isnan()), "the rewards were changed in place"


def some_lengths(groups):
    """A number of tokens for each completion."""
    return [[1 + (3 * p + 5 * i) % 7 for i in range(len(group))] for p, group in enumerate(groups)]


def test_defaults_and_the_sample_std():
    """The group's mean and std, ddof 1: rewards 0 and 1 have a std of 0.7071, not of 0.5."""
    advantages = group_advantages(torch.tensor([[0, 1]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.5, 0.5]]) / (math.sqrt(0.5) + 1e-4))


def test_all_equal_is_exact_and_counts_what_is_given():
    one_up = math.nextafter(0.1, 1.0)
    groups = [[0.1, 0.1, 0.1], [0.1, one_up, 0.1], [NAN, 0.1, one_up], [NAN, 0.1, 0.1], [NAN, NAN, 0.1], [NAN] * 3]
    rewards = torch.tensor(groups, dtype=torch.float64)
    assert all_equal(rewards).tolist() == [[True], [False], [False], [True], [True], [True]]
    assert ((group_advantages(rewards[:2], scale="none") != 0).sum(1) > 0).tolist() == [False, True]


ERRORS = [
    (lambda: group_advantages(torch.zeros(2, 2), "whiten", "none"), ["need lengths"]),
    (lambda: group_advantages(torch.zeros(2, 2), baseline="length"), ["need lengths"]),
    (lambda: group_advantages(torch.zeros(10)), [r"a row for each prompt, not \(10,\)"]),
    (lambda: group_advantages(torch.zeros(2, 2), scale="unheard"), ["unheard", *SCALES]),
    (lambda: group_advantages(torch.zeros(2, 2), baseline="unheard"), ["unheard", *BASELINES]),
    (lambda: combine_rewards(torch.zeros(2, 2, 1), [1.0], how="unheard"), ["unheard", *COMBINATIONS]),
    (lambda: combine_rewards(torch.zeros(2, 1, 2), [1.0, 1.0], how="gdpo"), ["at least 2 completions"]),
]


@pytest.mark.parametrize("call, words", ERRORS)
def test_errors_name_what_is_valid_or_missing(call, words):
    with pytest.raises(ValueError, match=".*".join(words)):
        call()


def test_several_rewards_are_added_by_their_weights_and_a_missing_one_is_left_out():
    parts = torch.tensor([[[1.0, 2.0, 3.0], [NAN, 2.0, 3.0]], [[1.0, NAN, NAN], [NAN, NAN, NAN]]])  # (P, G, K)
    rewards = combine_rewards(parts.double(), [1.0, -0.5, 10.0])
    assert torch.equal(rewards.nan_to_num(7.0), torch.tensor([[30.0, 29.0], [1.0, 7.0]]).double())


def test_gdpo_brings_each_reward_to_the_same_scale_first():
    """GDPO, arXiv 2601.05242: A = Σ_k w_k (r_k − mean r_k)/(std r_k) in the group, then (A − mean)/std of the batch."""
    parts = [[[1.0, 200.0], [0.0, 100.0], [0.0, NAN]], [[1.0, 50.0], [1.0, 0.0], [0.0, 10.0]]]  # (P, G, K)
    parts, weights = torch.tensor(parts, dtype=torch.float64), [1.0, 0.5]
    lengths = some_lengths(parts)
    first, second = (by_hand(part.tolist(), "group", "mean", 1e-4, lengths) for part in parts.unbind(-1))
    expected = by_hand((first + 0.5 * second).tolist(), "batch", "batch", 1e-4, lengths)
    advantages = group_advantages(combine_rewards(parts, weights, how="gdpo"), "batch", "batch")
    torch.testing.assert_close(advantages, expected, rtol=rounding(torch.float64), atol=rounding(torch.float64))
    assert combine_rewards(torch.full((1, 2, 2), NAN), weights, how="gdpo").isnan().all()


def test_only_the_tokens_of_the_highest_entropy_are_trained_on():
    """arXiv 2506.01939, a share of 0.25: of eight trained tokens the two highest; a masked one counts for nothing."""
    entropy = torch.tensor([[9.0, 0.1, 0.5, 0.3, 0.2], [0.4, 0.9, 0.6, 0.7, 9.0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    for share, expected in ((0.25, [[0] * 5, [0, -1, 0, -1, 0]]), (1.0, [[0, 2, 2, 2, 2], [-1, -1, -1, -1, 0]])):
        assert (on_high_entropy(torch.tensor([2.0, -1.0]), entropy, mask, share) * mask).tolist() == expected
        of_tokens = torch.tensor([[2.0], [-1.0]]).expand(mask.shape)
        assert (on_high_entropy(of_tokens, entropy, mask, share) * mask).tolist() == expected
    for share, tokens in ((0.07, 7), (0.2, 20), (0.205, 21)):  # the authors' code rounds up
        kept = on_high_entropy(torch.ones(10), torch.full((10, 10), 0.5), torch.ones(10, 10), share)
        assert kept.flatten().tolist() == [1.0] * tokens + [0.0] * (100 - tokens), "of equal ones the first"
    assert on_high_entropy(torch.ones(1), torch.zeros(1, 2), torch.zeros(1, 2), 0.2).isfinite().all()


@pytest.mark.parametrize("group", [[0.3, -0.1, -0.2], [-0.3, 0.1, 0.2], [1.0, -1.0, 0.0], [-1.0, -2.0, 0.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_that_is_not_above_zero_scales_nothing(group, dtype):
    """0.3 - 0.1 - 0.2 is 3e-17, and 7e-9 in float32: a mean of 0 but for rounding."""
    groups = torch.tensor([group, [0.0, 0.0, 1e-3]], dtype=dtype)  # small rewards that are not negative are no rounding
    advantages = group_advantages(groups, "mean")
    torch.testing.assert_close(advantages, torch.tensor([[0.0] * 3, [-1.0, -1.0, 2.0]], dtype=dtype))
