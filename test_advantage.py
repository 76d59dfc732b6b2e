"""Advantages compared with plain Python, with rewards that are complete, missing, equal, or too few."""

import math
from functools import partial
from itertools import product
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import advantage
from advantage import Group, all_equal, combine_rewards, group_advantages, keep_high_entropy, set_advantages
from conftest import rounding

NAN = math.nan
# These are the names in SCALES and BASELINES. They are repeated here, so that someone who adds a name to advantage.py
# need not also add it to `by_hand`, the plain Python version below.
PAIRS = [*product(("group", "batch", "mean", "whiten", "none"), ("mean", "leave_one_out", "length", "batch", "none"))]
# Pairs that compare a reward with others of its group, and pairs that compare it with the batch. A pair may do both.
OF_THE_GROUP = [(s, b) for s, b in PAIRS if s in ("group", "mean") or b in ("mean", "leave_one_out", "length")]
OF_THE_BATCH = [pair for pair in PAIRS if "batch" in pair or "whiten" in pair]
PLAIN = [[0.0, 1.0, 0.5, 1.0], [7.0, -3.0, 2.5, 2.0], [0.1, 0.2, 0.4, 0.8]]
# Rewards, and how many tokens of each completion are trained on, which is 0 for a truncated completion if
# --mask_truncated is set. None stands for the lengths that `some_lengths` returns.
REWARDS = {
    "plain": (PLAIN, None),
    "some missing": ([[0.0, NAN, 0.5, 1.0], PLAIN[1], [NAN, 0.2, NAN, 0.8]], None),
    "one or no reward in a group": ([PLAIN[0], [NAN, NAN, 2.5, NAN], [NAN] * 4, PLAIN[2]], None),
    # 0.3 - 0.1 - 0.2 is 3e-17 in float64 and 7e-9 in float32. A mean that small counts as 0, but 1e-3 / 3 does not.
    "means near 0": ([[-0.1, 0.3, -0.2], [-0.3, 0.1, 0.2], [1.0, -1.25, 0.25], [-1.0, -2.5, 0], [0, 0, 1e-3]], None),
    "groups of one": ([[0.0], [1.0], [5.0]], None),
    "some truncated": (PLAIN, [[3, 0, 5, 2], [4, 1, 0, 0], [0, 2, 6, 1]]),
    "one left in a group": ([[0.0, 1.0, 0.5], [1.0, 0.25, 2.0], [0.0, 3.0, 1.0]], [[3, 2, 4], [0, 5, 0], [1, 2, 0]]),
    "only equal ones left": ([[1.0, 1.0, 0.0], [1.0, 1.0, NAN]], [[4, 2, 0], [3, 3, 9]]),
    "none left": ([[1.0, 0.0, 0.0], [1.0, 1.0, 0.5]], [[0, 0, 0], [0, 0, 0]]),
    # In floating point the mean of seven times 0.1 is not 0.1, so min == max decides whether rewards are equal.
    "equal in a group": ([[0.1] * 7, [0.0, 1.0, 2.0, 0.0, 0.5, 0.0, 4.0], [-1 / 3] * 7], None),
    "equal in all": ([[1e7 / 3] * 7, [NAN, *[1e7 / 3] * 6], [1e7 / 3] * 7], None),
}


def by_hand(groups, scale, baseline, eps, lengths):
    """Compute (r - baseline) / scale for one reward after another. A reward gets 0 if all rewards that it is compared
    with are equal to it. It also gets 0 if it is compared within its group, and fewer than two completions of the group
    have both a reward and tokens. Means and standard deviations over completions include every reward, even that
    of a completion without tokens. Those over tokens include a reward once for each token of its completion."""
    given = [(p, i) for p, group in enumerate(groups) for i, r in enumerate(group) if not math.isnan(r)]
    batch = [groups[p][i] for p, i in given]
    values, computed = torch.zeros(len(groups), len(groups[0]), dtype=torch.float64), set()
    for p, i in given:
        own = [j for q, j in given if q == p]
        group, others = [groups[p][j] for j in own], [groups[p][j] for j in own if j != i]
        of_group = (scale, baseline) in OF_THE_GROUP
        of_batch = (scale, baseline) in OF_THE_BATCH
        too_few = of_group and sum(lengths[p][j] > 0 for j in own) < 2
        equal = (of_group and min(group) == max(group)) or (of_batch and min(batch) == max(batch))
        # With scale "mean", the mean of the group is the divisor. It must be above 0 by more than rounding.
        if too_few or equal or (scale == "mean" and fmean(group) <= 1e-6):
            continue
        by_length = sum(lengths[p][j] * groups[p][j] for j in own) / max(1, sum(lengths[p][j] for j in own))
        centres = {"mean": fmean(group), "length": by_length, "batch": fmean(batch), "none": 0.0}
        centre = fmean(others) if baseline == "leave_one_out" else centres[baseline]
        spread = fmean(group) if scale == "mean" else 1.0
        if scale in ("group", "batch"):
            spread = stdev({"group": group, "batch": batch}[scale]) + eps
        values[p, i] = (groups[p][i] - centre) / spread
        computed.add((p, i))
    if scale != "whiten":
        return values
    # A reward that was skipped above counts as 0 in the mean and the standard deviation, and its own value stays 0.
    token_values = [values[p, i].item() for p, i in given for _ in range(lengths[p][i])]
    whitened = torch.zeros_like(values)
    if len(set(token_values)) > 1:
        for p, i in computed:
            whitened[p, i] = (lengths[p][i] > 0) * (values[p, i] - fmean(token_values)) / (stdev(token_values) + eps)
    return whitened


@pytest.mark.parametrize("groups, lengths", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize("scale, baseline", PAIRS)
def test_against_plain_python(scale, baseline, groups, lengths):
    lengths = lengths or some_lengths(groups)
    for dtype, eps in ((torch.float64, 0.5), (torch.float64, 0.0), (torch.float32, 1e-4)):
        rewards, token_counts = torch.tensor(groups, dtype=dtype), torch.tensor(lengths)
        if len(groups[0]) == 1 and (scale, baseline) in OF_THE_GROUP:
            with pytest.raises(ValueError, match="at least 2 completions"):
                group_advantages(rewards, scale, baseline, eps, lengths=token_counts)
            continue
        advantages = group_advantages(rewards, scale, baseline, eps, lengths=token_counts)
        expected = by_hand(groups, scale, baseline, eps, lengths).to(dtype)
        torch.testing.assert_close(advantages, expected, rtol=rounding(dtype), atol=rounding(dtype))
        assert (advantages[expected == 0] == 0).all(), "0 must be exact"
        assert torch.equal(rewards.isnan(), torch.tensor(groups).isnan()), "rewards must not be changed"


def some_lengths(groups):
    """Return a different number of tokens for most completions."""
    return [[1 + (3 * p + 5 * i) % 7 for i in range(len(group))] for p, group in enumerate(groups)]


def test_all_equal_is_exact_and_true_without_rewards():
    rewards = torch.tensor([[0.1, math.nextafter(0.1, 1.0), NAN], [NAN] * 3], dtype=torch.float64)
    assert all_equal(rewards).tolist() == [[False], [True]]
    assert group_advantages(torch.tensor([[1, 1]])).dtype == torch.float32, "also for rewards that are integers"


TWO = torch.zeros(2, 2)
UNCLEAR = [dict(scale="unheard"), dict(baseline="unheard"), dict(scale="whiten"), dict(baseline="length")]


def test_a_name_that_is_unknown_or_needs_lengths_is_an_error():
    calls = [partial(combine_rewards, TWO[..., None], [1.0], how="unheard")]
    for call in calls + [partial(group_advantages, TWO, **settings) for settings in UNCLEAR]:
        with pytest.raises(ValueError, match=r"must be one of|need lengths"):
            call()


def test_a_name_without_a_branch_is_an_error(monkeypatch):
    """Someone may add a name and forget its branch. Without an error, the baseline would be 0."""
    for table in ("SCALES", "BASELINES", "COMBINATIONS"):
        monkeypatch.setattr(advantage, table, (*getattr(advantage, table), "unheard"))
    test_a_name_that_is_unknown_or_needs_lengths_is_an_error()


def test_a_keyword_argument_that_has_the_name_of_a_setting_gets_its_value(monkeypatch):
    def forked(rewards, scale, baseline, *, lengths=None, bonus=0.0):
        return rewards + bonus

    monkeypatch.setattr(advantage, "group_advantages", forked)
    made = SimpleNamespace(ids=np.ones(2), written=None, truncated=False)
    group = Group([1], {}, [made] * 2, torch.tensor([1.0, 2.0]), torch.tensor([[1.0], [2.0]]))
    of_steps = dict(combine_rewards="sum", scale_rewards="none", baseline="none", mask_truncated=False)
    set_advantages([group], [1.0], SimpleNamespace(**of_steps, dynamic_sampling=0, bonus=0.5))
    assert group.advantages.tolist() == [1.5, 2.5]


def test_gdpo_brings_each_reward_to_the_same_scale_first():
    """GDPO, arXiv 2601.05242: A = Σ_k w_k (r_k − mean r_k)/(std r_k) in the group, then (A − mean)/std of the batch."""
    parts = [[[1, 200], [0, 100], [0, NAN], [NAN, NAN]], [[1, 50], [1, 0], [0, 10], [1, 5]]]  # (P, G, K)
    parts, weights = torch.tensor(parts, dtype=torch.float64), [1.0, 0.5]
    lengths = some_lengths(parts)
    first, second = (by_hand(part.tolist(), "group", "mean", 1e-4, lengths) for part in parts.unbind(-1))
    sums = (first + 0.5 * second).masked_fill(parts.isnan().all(-1), NAN)  # a completion without a reward is left out
    expected = by_hand(sums.tolist(), "batch", "batch", 1e-4, lengths)
    advantages = group_advantages(combine_rewards(parts, weights, how="gdpo"), "batch", "batch")
    torch.testing.assert_close(advantages, expected, rtol=rounding(torch.float64), atol=rounding(torch.float64))


def test_only_the_tokens_of_the_highest_entropy_are_trained_on():
    """arXiv 2506.01939. A share of 0.25 keeps the highest two of eight trained tokens. Masked tokens do not count."""
    entropy = torch.tensor([[9.0, 0.1, 0.5, 0.3, 0.2], [0.4, 0.9, 0.6, 0.7, 9.0]])
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    # The same advantages twice: one for each completion, and one for each token.
    for A in (torch.tensor([2.0, -1.0]), torch.tensor([[2.0] * 5, [-1.0] * 5])):
        assert (keep_high_entropy(A, entropy, mask, 0.25) * mask).tolist() == [[0] * 5, [0, -1, 0, -1, 0]]
    # The number of tokens is rounded up, as in the authors' code. But 0.07 * 100, which is 7.000000000000001 in
    # float64, counts as 7. All entropies are equal here, so the first tokens are kept.
    for share, tokens in ((0.07, 7), (0.2, 20), (0.205, 21)):
        kept = keep_high_entropy(torch.ones(10), torch.full((10, 10), 0.5), torch.ones(10, 10), share)
        assert kept.flatten().tolist() == [1.0] * tokens + [0.0] * (100 - tokens), "the first tokens are kept"
