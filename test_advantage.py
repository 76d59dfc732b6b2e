"""Advantages against plain Python, and the corner cases: missing rewards, equal rewards, too few of them."""

import math
from statistics import fmean, stdev

import pytest
import torch

from advantage import BASELINES, COMBINATIONS, SCALES, all_equal, combine_rewards, group_advantages, on_high_entropy
from conftest import rounding

NAN = math.nan
PAIRS = [(scale, baseline) for scale in SCALES for baseline in BASELINES]
OF_THE_GROUP = [(s, b) for s, b in PAIRS if s in ("group", "mean") or b in ("mean", "leave_one_out", "length")]
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


def some_lengths(groups):
    """Tokens of each completion; one has none."""
    return [[(3 * p + 5 * i) % 7 for i in range(len(group))] for p, group in enumerate(groups)]


def by_hand(groups, scale, baseline, eps):
    """(r - baseline) / scale, one reward after the other; 0 where there is nothing to compare with."""
    lengths = some_lengths(groups)
    batch = [r for group in groups for r in group if not math.isnan(r)]

    def advantage(p, i):
        r = groups[p][i]
        given = [j for j, other in enumerate(groups[p]) if not math.isnan(other)]
        group, others = [groups[p][j] for j in given], [groups[p][j] for j in given if j != i]
        compared = [group] if (scale, baseline) in OF_THE_GROUP else []
        compared += [batch] if "batch" in (scale, baseline) or scale == "whiten" else []
        if math.isnan(r) or any(min(rewards) == max(rewards) for rewards in compared):
            return 0.0
        if scale == "mean" and fmean(group) <= 0:
            return 0.0
        tokens = [lengths[p][j] for j in given]
        by_length = sum(n * x for n, x in zip(tokens, group)) / max(1, sum(tokens))
        centres = {"length": by_length, "batch": fmean(batch), "none": 0.0, "mean": fmean(group)}
        centre = fmean(others) if baseline == "leave_one_out" else centres[baseline]
        spreads = {"none": lambda: 1.0, "whiten": lambda: 1.0, "mean": lambda: fmean(group)}
        spreads |= {"group": lambda: stdev(group) + eps, "batch": lambda: stdev(batch) + eps}
        return (r - centre) / spreads[scale]()

    values = [[advantage(p, i) for i in range(len(group))] for p, group in enumerate(groups)]
    if scale == "whiten":  # over tokens
        places = [(p, i) for p, group in enumerate(groups) for i, r in enumerate(group) if not math.isnan(r)]
        of_tokens = [values[p][i] for p, i in places for _ in range(lengths[p][i])]
        centre, spread = (fmean(of_tokens), stdev(of_tokens) + eps) if len(of_tokens) > 1 else (0.0, 1.0)
        for p, i in places:
            is_zero = (scale, baseline) in OF_THE_GROUP and all_equal(torch.tensor([groups[p]])).item()
            is_zero = is_zero or min(batch) == max(batch)
            values[p][i] = 0.0 if is_zero else (values[p][i] - centre) / spread
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("groups", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("scale, baseline", PAIRS)
def test_against_plain_python(scale, baseline, groups):
    for dtype, eps in ((torch.float64, 0.5), (torch.float32, 1e-4)):
        rewards = torch.tensor(groups, dtype=dtype)
        advantages = group_advantages(rewards, scale, baseline, eps, lengths=torch.tensor(some_lengths(groups)))
        expected = by_hand(groups, scale, baseline, eps).to(dtype)  # the dtype that was given
        torch.testing.assert_close(advantages, expected, rtol=rounding(dtype), atol=rounding(dtype))
        assert torch.equal(rewards.isnan(), torch.tensor(groups).isnan()), "the rewards were changed in place"


def test_defaults_and_the_sample_std():
    """The group's mean and std, ddof 1: rewards 0 and 1 have a std of 0.7071, not of 0.5."""
    advantages = group_advantages(torch.tensor([[0, 1]]))
    torch.testing.assert_close(advantages, torch.tensor([[-0.5, 0.5]]) / (math.sqrt(0.5) + 1e-4))


@pytest.mark.parametrize(
    "scale, baseline", [pair for pair in PAIRS if pair in OF_THE_GROUP or "batch" in pair or "whiten" in pair]
)
@pytest.mark.parametrize("value", [0.1, 0.3, -1 / 3, 0.0, 1e7 / 3])
def test_equal_rewards_give_exactly_zero(scale, baseline, value):
    """Seven times 0.1 in float32 have a mean that is not 0.1: what counts is min == max, not a rounded std."""
    equal, other = [value] * 7, [0.0, 1.0, 2.0, 0.0, 0.5, 0.0, 4.0]
    groups = [equal, other] if (scale, baseline) in OF_THE_GROUP else [equal, [NAN, *equal[1:]]]
    for dtype, eps in ((torch.float32, 1e-4), (torch.float32, 0.0), (torch.float64, 1e-4), (torch.float64, 0.0)):
        lengths = torch.arange(14).reshape(2, 7)
        advantages = group_advantages(torch.tensor(groups, dtype=dtype), scale, baseline, eps, lengths=lengths)
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
            group_advantages(rewards, scale, baseline, lengths=torch.ones(3, 1))
    else:
        lengths = torch.tensor(some_lengths(groups))
        advantages = group_advantages(rewards, scale, baseline, lengths=lengths)
        torch.testing.assert_close(advantages, by_hand(groups, scale, baseline, eps=1e-4))


def test_tokens_are_whitened_not_completions():
    """p = 0.4 right, wrong answers twice as long: mean 0.25 and std 0.433 over tokens, 0.4 and 0.5 over completions."""
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0, 0.0]] * 1000, dtype=torch.float64)
    advantages = group_advantages(rewards, "whiten", "none", eps=0.0, lengths=torch.where(rewards > 0, 10, 20))[0]
    expected = torch.tensor([3**0.5, -(3**-0.5)], dtype=torch.float64)
    torch.testing.assert_close(advantages[:2], expected, rtol=1e-4, atol=0)  # over n - 1 tokens, of 80000


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: group_advantages(torch.zeros(2, 2), "whiten", "none"), ["need lengths"]),
        (lambda: group_advantages(torch.zeros(2, 2), baseline="length"), ["need lengths"]),
        (lambda: group_advantages(torch.zeros(10)), ["a row for each prompt, not (10,)"]),
        (lambda: group_advantages(torch.zeros(2, 2), scale="median"), ["median", *SCALES]),
        (lambda: group_advantages(torch.zeros(2, 2), baseline="median"), ["median", *BASELINES]),
        (lambda: combine_rewards(torch.zeros(2, 2, 1), [1.0], how="median"), ["median", *COMBINATIONS]),
    ],
)
def test_errors_name_what_is_valid_or_missing(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert all(word in str(error.value) for word in words)


def test_several_rewards_are_added_by_their_weights_and_a_missing_one_is_left_out():
    parts = [[[1.0, 2.0, 3.0], [NAN, 2.0, 3.0]], [[1.0, NAN, NAN], [NAN, NAN, NAN]]]  # (P, G, K)
    rewards = combine_rewards(torch.tensor(parts, dtype=torch.float64), [1.0, -0.5, 10.0])
    expected = torch.tensor([[30.0, 29.0], [1.0, NAN]], dtype=torch.float64)
    torch.testing.assert_close(rewards, expected, rtol=0, atol=0, equal_nan=True)


def test_gdpo_brings_each_reward_to_the_same_scale_first():
    """GDPO, arXiv 2601.05242: A = Σ_k w_k (r_k − mean r_k)/(std r_k) in the group, then (A − mean)/std of the batch."""
    parts = [[[1.0, 200.0], [0.0, 100.0], [0.0, NAN]], [[1.0, 50.0], [1.0, 0.0], [0.0, 10.0]]]  # (P, G, K)
    weights, eps = [1.0, 0.5], 1e-4

    def normalized(p, k):
        given = [row[k] for row in parts[p] if not math.isnan(row[k])]
        return [0.0 if math.isnan(row[k]) else (row[k] - fmean(given)) / (stdev(given) + eps) for row in parts[p]]

    sums = [[sum(w * normalized(p, k)[i] for k, w in enumerate(weights)) for i in range(3)] for p in range(2)]
    batch = sums[0] + sums[1]
    expected = [[(x - fmean(batch)) / (stdev(batch) + eps) for x in group] for group in sums]
    combined = combine_rewards(torch.tensor(parts, dtype=torch.float64), weights, how="gdpo")
    advantages = group_advantages(combined, "batch", "batch", eps)
    close = rounding(torch.float64)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), rtol=close, atol=close)
    assert combine_rewards(torch.full((1, 2, 2), NAN), weights, how="gdpo").isnan().all()


def test_only_the_tokens_of_the_highest_entropy_are_trained_on():
    """arXiv 2506.01939, a share of 0.25: of eight trained tokens the two highest; a masked one counts for nothing."""
    entropy = torch.tensor([[9.0, 0.1, 0.5, 0.3, 0.2], [0.4, 0.9, 0.6, 0.7, 9.0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    A = on_high_entropy(torch.tensor([2.0, -1.0]), entropy, mask, 0.25) * mask
    assert A.tolist() == [[0, 0, 0, 0, 0], [0, -1, 0, -1, 0]]
    everything = on_high_entropy(torch.tensor([2.0, -1.0]), entropy, mask, 1.0) * mask
    assert everything.tolist() == [[0, 2, 2, 2, 2], [-1, -1, -1, -1, 0]]
    assert on_high_entropy(torch.ones(1), torch.zeros(1, 2), torch.zeros(1, 2), 0.2).isfinite().all()
