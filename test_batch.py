"""Completions as tensors, and the split of a step: loss, gradient, statistics and updated weights do not depend on
micro-batches or ranks."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import train
from advantage import Group, group_advantages, has_signal, set_advantages
from batch import Batch, Limits, collate, micro_batches, minibatches
from config import ALGORITHMS, GRPO, Config
from conftest import EOS, distance, flat_gradient, tiny_model
from infra import ranks
from loss import Each, token_weights
from rollout import Completion, Sampling, rollout, uniforms

CPU = torch.device("cpu")
WHOLE = Limits(rows=None, tokens=None)
# For a model as wide as this, reading a prompt only once always saves work. So the completions of a prompt share a row
# whenever the limits allow it.
TOGETHER = partial(Limits, hidden_size=1000)

# ---- Completions as tensors ----


def test_collate():
    """The second completion is truncated. Only it has kept sets: for each of its tokens, the ids from which it was
    sampled. The last one has no reward."""
    long = Completion([7, 8, EOS], [-0.1, -0.2, -0.3], truncated=False)
    cut = Completion(np.array([9, 9], np.int32), np.float32([-0.4, -0.5]), truncated=True, kept=[[7, 9], [8, 9, EOS]])
    short = Completion([EOS], [-0.6], truncated=False)
    unscored = Completion([5, EOS], [-0.7, -0.8], truncated=False)
    groups = [
        Group([3, 4], completions=[long, cut], rewards=torch.tensor([1.0, 0.0]), advantages=torch.tensor([1.5, -1.5])),
        Group([EOS, 0, 6], completions=[short, unscored], rewards=[1.0, math.nan], advantages=[3.0, -3.0]),
    ]
    batch = collate(groups, mask_truncated=False, device=CPU)
    assert batch.ids.tolist() == [[3, 4, 7, 8, EOS], [3, 4, 9, 9, 0], [EOS, 0, 6, EOS, 0], [EOS, 0, 6, 5, EOS]]
    assert batch.attention.tolist() == [[1] * 5, [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1] * 5]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 1, 0], [0] * 5]
    assert (batch.advantages * batch.mask).sum(1).tolist() == [3 * 1.5, 2 * -1.5, 3.0, 0]
    assert batch.prompt_numbers.tolist() == [0, 0, 1, 1] and batch.prompt_lengths.tolist() == [2, 2, 3, 3]
    logp = [[0, 0, -0.1, -0.2, -0.3], [0, 0, -0.4, -0.5, 0], [0, 0, 0, -0.6, 0], [0, 0, 0, -0.7, -0.8]]
    torch.testing.assert_close(batch.sampler_logp, torch.tensor(logp))
    assert batch.kept == [[None] * 5, [None, None, [7, 9], [8, 9, EOS], None], [None] * 5, [None] * 5]
    assert collate([groups[0]] * 2, False, CPU).prompt_numbers.tolist() == [0, 0, 1, 1], "a prompt that was drawn twice"
    masked = collate(groups, mask_truncated=True, device=CPU)
    assert masked.mask.tolist() == [[0, 0, 1, 1, 1], [0] * 5, [0, 0, 0, 1, 0], [0] * 5]


def test_tokens_that_the_model_did_not_write_are_not_trained_on():
    """The environment answers the model with replies. Their tokens are masked. They do not count in the length of a
    completion, and a completion with no other tokens is not trained on. One completion here has an advantage for each
    token."""
    turns = Completion([7, 8, 9, 5], [-0.1, 0.0, 0.0, -0.2], False, written=[True, False, False, True])
    reply = Completion([6, 5], [0.0, 0.0], False, written=[False, False])
    advantages = [torch.tensor([0.0, 7.0, 7.0, 2.0]), 1.0]
    group = Group([3], completions=[turns, reply], rewards=torch.tensor([1.0, 0.0]), advantages=advantages)
    batch = collate([group, replace(group, rewards=[math.nan] * 2)], mask_truncated=False, device=CPU)
    assert batch.mask.tolist() == [[0, 1, 0, 0, 1], [0] * 5, [0] * 5, [0] * 5]
    assert batch.advantages.tolist() == 2 * [[0, 0.0, 7.0, 7.0, 2.0], [0, 1.0, 1.0, 0, 0]]
    # The mean reward weighted by these lengths is (2 · 1 + 1 · 0) / 3.
    played = replace(group, completions=[turns, Completion([5], [0.0], False)], reward_parts=group.rewards[:, None])
    set_advantages([played], [1.0], Config(scale_rewards="none", baseline="length", combine_rewards="sum"))
    assert played.advantages.tolist() == pytest.approx([1 / 3, -2 / 3])
    # A group needs two completions that can be trained on.
    assert not has_signal(group, mask_truncated=False) and has_signal(replace(group, completions=2 * [turns]), False)
    cut = replace(turns, truncated=True)
    assert not has_signal(replace(group, completions=2 * [cut]), mask_truncated=True)
    # Whether some are right and some wrong also depends on those that are not trained on.
    three = replace(group, completions=[turns, turns, cut], rewards=torch.tensor([1.0, 1.0, 0.0]))
    assert has_signal(three, mask_truncated=True)


# ---- Which rows are in which piece ----


def test_minibatches():
    """Each row is in exactly one minibatch of a pass. Minibatches depend on nothing but seed, step and pass."""
    for n, parts in ((12, 1), (12, 3), (11, 3), (12, 12), (12, 40)):
        updates = minibatches(n, parts, seed=(0, 1, 0))
        assert len(updates) == min(n, parts) and max(map(len, updates)) - min(map(len, updates)) <= 1
        assert sorted(row for rows in updates for row in rows) == list(range(n))
    seeds = [(0, 1, 0), (5, 1, 0), (0, 2, 0), (0, 1, 1), (1, 0, 0)]
    once, again = ([minibatches(12, 3, seed) for seed in seeds] for _ in range(2))
    assert once == again and len(set(map(str, once))) == len(seeds)


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("world", [1, 2, 7])
@pytest.mark.parametrize("rows, tokens", [(None, None), (1, None), (3, None), (None, 1), (None, 60), (4, 60)])
@pytest.mark.parametrize("hidden_size", [None, 4, 1000])
def test_micro_batches(n, world, rows, tokens, hidden_size):
    prompts = torch.arange(n) // 6
    starts = torch.tensor([7, 2, 1, 12, 3, 5, 5])[prompts]
    lengths = torch.tensor(np.random.default_rng(n).integers(1, 30, n))  # of the completions
    attention = (torch.arange(42) < (starts + lengths)[:, None]).long()
    zeros = torch.zeros(attention.shape)
    # The attention also serves as ids and, in a copy, as mask.
    batch = Batch(attention, attention, attention.clone(), zeros + 1, prompts, starts, zeros)
    limits = Limits(rows, tokens, hidden_size)
    by_rank = [list(micro_batches(batch, limits, rank, world)) for rank in range(world)]
    assert sorted(row for rows, _ in chain(*by_rank) for row in rows) == [*range(n)], "every completion once"
    # The last rank lowers its limits, as it does when it has run out of memory.
    last = micro_batches(batch, Limits(1, None, hidden_size), world - 1, world)
    assert sorted(row for rows, _ in chain(*by_rank[:-1], last) for row in rows) == [*range(n)], "every completion once"

    def tokens_in(sequence: Tensor) -> int:
        return int(starts[sequence[0]] + lengths[sequence].sum())  # the prompt once, and the completions

    def fits(piece: Sequence[Tensor]) -> bool:
        completions, padded = sum(map(len, piece)), len(piece) * max(map(tokens_in, piece))
        return completions <= (rows or math.inf) and padded <= (tokens or math.inf)

    for rank, parts in enumerate(by_rank):
        # The model reads a prompt and the completions that share it as one row. Here, such a row is a tensor with the
        # indices of its completions, called a sequence, and a piece has the sequences of a micro-batch.
        pieces = [torch.tensor(index).split(part.completions_per_row) for index, part in parts]
        sizes = [*map(tokens_in, chain(*pieces))]
        assert sizes == sorted(sizes, reverse=True)
        assert hidden_size or all(len(sequence) == 1 for sequence in chain(*pieces)), "no row is shared"
        assert all(sum(map(len, piece)) == 1 or fits(piece) for piece in pieces), "no limit is exceeded"
        assert not any(fits([*piece, after[0]]) for piece, after in pairwise(pieces)), "none has room for the next"
        # Each rank has the share of the work, with prompts, that it would have if completions could be divided, but for
        # a completion at each end.
        work = sum(int((starts + lengths)[index].sum()) for index, _ in parts)
        assert abs(work - (starts + lengths).sum() / world) <= (starts + lengths).max(), "about the same work"
        # With same_count, a rank with fewer micro-batches than others gets more of them: single rows that are fully
        # masked.
        filled = list(micro_batches(batch, limits, rank, world, same_count=True))
        assert len(filled) == max(map(len, by_rank)) and [x for x, _ in filled[: len(parts)]] == [x for x, _ in parts]
        assert all(len(rows) == len(part) == 1 and not part.mask.any() for rows, part in filled[len(parts) :])


@pytest.mark.parametrize("length, completions_per_row", [(30, [8]), (300, [2] * 4), (140, [4, 4]), (2000, [1] * 8)])
def test_as_many_completions_share_a_row_as_is_cheapest(length: int, completions_per_row: list[int]):
    """A layer needs 12 h² L + 2 h L² multiplications for a row of L tokens. Eight completions of one prompt share a row
    if they are short. The longer they are, the fewer share one."""
    ones, prompt_lengths = torch.ones(8, 150 + length), torch.full((8,), 150)
    batch = Batch(ones, ones, ones, ones, torch.zeros(8), prompt_lengths, ones)
    [(_, part)] = micro_batches(batch, Limits(None, None, hidden_size=576))
    assert part.completions_per_row == completions_per_row
    [(_, part)] = micro_batches(batch, Limits(None, None, hidden_size=576, least_prompt=1.0))  # as on a GPU
    assert part.completions_per_row == (completions_per_row if length <= 150 else [1] * 8)


@pytest.mark.parametrize("prompt, without, most", [(10, 0.35, 0.16), (128, 0.20, 0.10)])
def test_a_gpu_is_given_little_padding(monkeypatch, prompt, without, most):
    """The padding of 128 completions with log-normal lengths of at most 512 tokens: its share of the tokens of all
    micro-batches, without and with the rule, and how many micro-batches there are."""

    def padding(tokens: int) -> tuple[float, float]:
        shares, counts = [], []
        for seed in range(30):
            drawn = np.random.default_rng(seed).lognormal(math.log(128), 0.8, 128).astype(int).clip(1, 512)
            lengths, limits = torch.from_numpy(drawn), Limits(None, tokens)
            attention = (torch.arange(prompt + 512) < (prompt + lengths)[:, None]).long()
            batch = Batch(*[attention] * 4, torch.arange(128) // 8, torch.full((128,), prompt), attention)
            sizes = [
                (int(part.attention.sum()), int(part.attention.sum(1).max()) * len(part))
                for _, part in micro_batches(batch, limits)
            ]
            shares.append(1 - sum(real for real, _ in sizes) / sum(padded for _, padded in sizes))
            counts.append(len(sizes))
        return np.mean(shares), np.mean(counts)

    share, count = padding(16384)
    on_a_cpu = padding(2048)
    monkeypatch.setattr("batch.BUSY_TOKENS", math.inf)
    assert padding(16384)[0] == pytest.approx(without, abs=0.01) and share < most and count < 8
    assert padding(2048) == on_a_cpu, "the limit of a CPU is full before the rule applies"


# ---- The same step however it is split ----

# These tests compute in float64, where a split changes a gradient by roundings of 1e-16. An entry of the gradient that
# should be 0 is such a rounding. Adam divides this entry by eps, 1e-8, and multiplies it by the learning rate, 1e-2, so
# a weight differs by 1e-10.
same_up_to_rounding = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@cache
def sampled_groups() -> list[Group]:
    """Sample 4 x 3 completions under top-p. One group has equal rewards, and one completion has no reward."""
    prompts = [[5, 9, 7], [4, 2, 6, 6, 11], [3], [8, 8]]
    rewards = torch.tensor([[0.0, 1.0, 2.0], [1.0, 1.0, 1.0], [1.0, 0.0, 1.0], [0.0, 1.0, math.nan]])
    samples = [(p, i) for p in range(4) for i in range(3)]
    sampling = Sampling(8, eos_ids=list(range(2, 12)), temperature=0.8, top_p=0.9)
    model = tiny_model("gpt2", spread=1.0).float()
    completions = rollout(model, [prompts[p] for p, _ in samples], uniforms(0, 1, samples, 8), sampling)
    judged = zip(prompts, rewards, group_advantages(rewards))
    return [Group(ids, {}, completions[3 * p : 3 * p + 3], r, advantages=A) for p, (ids, r, A) in enumerate(judged)]


def make_batch() -> Batch:
    """Return the sampled groups as a batch, with log-probs of an old policy and of a reference."""
    batch = collate(sampled_groups(), mask_truncated=False, device=CPU)
    noise = torch.randn(2, *batch.mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    batch.old_logp, batch.ref_logp = (batch.sampler_logp + 0.3 * x for x in noise)
    batch.entropy = noise[0].abs()
    return batch


def make_run(limits: Limits, **switches) -> train.Run:
    settings = GRPO | dict(temperature=0.8, max_completion_length=10, warmup_steps=0, steps=1)
    model = tiny_model("gpt2", spread=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    # An update needs no task, tokenizer, reference, sampling or progress.
    return train.Run(Config(**settings | switches), CPU, None, None, model, None, optimizer, None, limits, None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_split_gives_the_same_update_of_every_algorithm(algorithm):
    """Compare loss, gradient norm, statistics, and the weights after an update with a clipped gradient. Some of the
    settings need to see the whole update at once: top_entropy, for instance, picks the tokens of the highest entropy
    among all of its tokens."""
    chosen = dict(tis_cap=1.5, tis_mode="sequence_mask", off_policy_mask=0.1, top_entropy=0.4, max_grad_norm=1e-3)
    chosen |= dict(beta=0.1, entropy_coef=0.01)
    steps = []
    for limits in (WHOLE, Limits(5, 40), TOGETHER(3, 40)):
        run = make_run(limits, **ALGORITHMS[algorithm] | chosen)
        loss, norm, stats = train.update(run, make_batch(), step=1)
        assert norm > run.config.max_grad_norm, "the gradient is clipped"
        log_w = stats["log_w"].values.sort().values  # the order depends on the split, and NaN comes last
        assert len(log_w) == 12 and log_w.isnan().tolist() == [False] * 11 + [True], "one has no reward, so no weight"
        stats["log_w"] = Each(log_w[:-1])
        steps.append([loss, norm, stats, torch.cat([p.detach().flatten() for p in run.model.parameters()])])
    for step in steps[1:]:
        same_up_to_rounding(step, steps[0])


@pytest.mark.parametrize("also", [{}, dict(shard=True), dict(beta=0.1), dict(entropy_coef=0.1), dict(sampler_coef=0.1)])
def test_any_split_is_the_same_step_and_only_rows_with_a_gradient_run_backward(monkeypatch, also):
    """Rows whose advantages are all 0 need no backward pass, unless the KL, entropy or sampler term gives them a
    gradient. They are row 1, which has the mean reward of its group, row 2, where this test sets them, rows 3 to 5,
    which have equal rewards, and row 11, which has no reward. With shards, every row has a backward pass, and so have
    the masked rows that are added to give all ranks the same number of micro-batches."""
    batch = make_batch()
    batch.old_logp, batch.weights = None, token_weights(batch.mask, "global")
    batch.advantages = batch.advantages * torch.arange(batch.mask.shape[1])  # each token has its own advantage
    batch.advantages[0, 3:] = torch.tensor([7.0, -7.0] + [0.0] * (batch.mask.shape[1] - 5))  # they add up to 0
    batch.advantages[2] = (1 - batch.mask[2]).float()  # 0 on all tokens that are trained on
    ran_backward, logprobs = [], train.logprobs_of

    def noting(run: train.Run, model: nn.Module, part: Batch, **more) -> tuple:
        ran_backward.append(len(part) if torch.is_grad_enabled() else 0)
        return logprobs(run, model, part, **more)

    def parts_of_ranks(limits: Limits, world: int, **switches) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Compute one rank after another. Return the gradient, the loss and the statistics of each rank."""
        run, parts = make_run(limits, **switches), []
        monkeypatch.setattr(ranks, "world", lambda: world)
        for rank in range(world):
            monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
            loss, totals = train.accumulate(run, batch)  # clears the gradients of the previous rank first
            # With shards, every rank must take part in the backward pass.
            assert not run.config.shard or all(p.grad is not None for p in run.model.parameters())
            parts.append(
                (flat_gradient(run.model), loss, torch.stack([torch.stack(totals[name]) for name in train.STATS]))
            )
        return parts

    monkeypatch.setattr(train, "logprobs_of", noting)
    # All splits are compared with this one: one rank, no limits, and a backward pass for every row. Because of
    # shard=True, even rows with advantage 0 have one.
    [(gradient, loss, totals)] = parts_of_ranks(WHOLE, 1, **also | dict(shard=True))
    assert sum(ran_backward) == 12 and gradient.norm() > 1e-3
    assert totals[train.STATS.index("sampler_gap"), 0] < 1e-4, "the trainer uses the sampler's sets"
    splits = [(1, Limits(1, None)), (2, Limits(3, 40)), (1, TOGETHER(None, None)), (3, TOGETHER(3, 40)), (13, WHOLE)]
    for world, limits in splits:
        ran_backward.clear()
        parts = parts_of_ranks(limits, world, **also)
        split = [sum(figures) for figures in zip(*parts)]
        assert "shard" in also or sum(ran_backward) == (12 if also else 6)
        assert distance(split[0], gradient) < 1e-12
        same_up_to_rounding(split[1:], [loss, totals])
    # The last split has 13 ranks for 12 rows.
    assert not any(figures.any() for figures in parts[12]), "a rank without rows adds exactly nothing"
