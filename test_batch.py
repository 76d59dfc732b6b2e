"""The completions of a step as tensors, and in pieces: however a step is split, over micro-batches and ranks, it is the
same step, in loss, gradient, statistics and weights afterwards."""

import math
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import train
from advantage import group_advantages
from batch import Batch, Group, Limits, collate, micro_batches, minibatches, trained_lengths
from config import ALGORITHMS, GRPO, Config
from conftest import VOCAB, distance, flat_gradient, tiny_model
from infra import ranks
from loss import token_weights
from rollout import Completion

CPU = torch.device("cpu")
WHOLE = Limits(rows=None, tokens=None)

# ---- Completions as tensors ----


def test_collate():
    eos, nan = 2, math.nan
    long, cut = Completion([7, 8, eos], [-0.1, -0.2, -0.3], False), Completion([9, 9], [-0.4, -0.5], True)
    short, unscored = Completion([eos], [-0.6], False), Completion([5, eos], [-0.7, -0.8], False)
    advantages = torch.tensor([1.5, -1.5], dtype=torch.float64)
    groups = [
        Group(prompt_ids=[3, 4], completions=[long, cut], rewards=torch.tensor([1.0, 0.0]), advantages=advantages),
        Group(prompt_ids=[eos, 0, 6], completions=[short, unscored], rewards=[1.0, nan], advantages=[3.0, -3.0]),
    ]
    batch = collate(groups, mask_truncated=False, device=CPU)
    assert len(batch) == 4
    assert batch.ids.tolist() == [[3, 4, 7, 8, eos], [3, 4, 9, 9, 0], [eos, 0, 6, eos, 0], [eos, 0, 6, 5, eos]]
    assert batch.attention.tolist() == [[1] * 5, [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [1] * 5]
    assert batch.mask.tolist() == [[0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 0, 1, 0], [0] * 5]
    assert batch.advantages.tolist() == [1.5, -1.5, 3.0, -3.0] and batch.prompts.tolist() == [0, 0, 1, 1]
    assert trained_lengths(groups, mask_truncated=False).tolist() == [[3, 2], [1, 0]]
    logp = [[0, 0, -0.1, -0.2, -0.3], [0, 0, -0.4, -0.5, 0], [0, 0, 0, -0.6, 0], [0, 0, 0, -0.7, -0.8]]
    torch.testing.assert_close(batch.sampler_logp, torch.tensor(logp))

    masked = collate(groups, mask_truncated=True, device=CPU)
    assert masked.mask.tolist() == [[0, 0, 1, 1, 1], [0] * 5, [0, 0, 0, 1, 0], [0] * 5]
    assert torch.equal(masked.attention, batch.attention)
    assert trained_lengths(groups, mask_truncated=True).tolist() == [[3, 0], [1, 0]]
    assert (batch.sampler_entropy == 0).all()
    for completion in (long, cut, short, unscored):
        completion.entropy = [0.5 * token for token in completion.ids]
    entropy = collate(groups, mask_truncated=False, device=CPU).sampler_entropy
    assert entropy.tolist() == [[0, 0, 3.5, 4, 1], [0, 0, 4.5, 4.5, 0], [0, 0, 0, 1, 0], [0, 0, 0, 2.5, 1]]


def make_batch() -> Batch:
    """3 x 4 completions, one of them without a reward, and log-probs of an old policy and a reference."""
    r = np.random.default_rng(0)
    rewards = torch.tensor([[0.0, 1.0, 0.5, 1.0], [0.2, math.nan, 0.9, 0.0], [2.0, 1.0, 1.0, 0.3]])
    lengths = [[4, 10, 1, 6], [3, 5, 8, 2], [5, 5, 1, 9]]
    prompts = [5, 9, 7], [4, 2, 6, 6, 11], [3]
    groups = [
        Group(
            prompt_ids=list(prompt),
            completions=[
                Completion(r.integers(2, VOCAB, n).tolist(), r.normal(-4, 0.5, n).tolist(), False) for n in of_prompt
            ],
            rewards=rewards[p],
            advantages=group_advantages(rewards)[p],
        )
        for p, (prompt, of_prompt) in enumerate(zip(prompts, lengths))
    ]
    batch = collate(groups, mask_truncated=False, device=CPU)
    batch.old_logp, batch.ref_logp = torch.tensor(r.normal(-4, 0.5, (2, *batch.mask.shape)))
    batch.sampler_entropy = torch.tensor(r.random(batch.mask.shape))
    return batch


def test_rows_of_a_batch_are_a_batch():
    batch = make_batch()
    part = batch[[7, 2]]
    assert len(part) == 2 and part.weights is None
    for name, tensor in vars(batch).items():
        assert tensor is None or torch.equal(getattr(part, name), torch.stack([tensor[7], tensor[2]])), name


# ---- Which rows are in which piece ----


def test_every_row_is_in_one_minibatch_of_a_pass():
    for n, parts in ((12, 1), (12, 3), (11, 3), (12, 12), (12, 40)):
        updates = minibatches(n, parts, seed=(0, 1, 0))
        assert len(updates) == min(n, parts) and max(map(len, updates)) - min(map(len, updates)) <= 1
        assert sorted(row for rows in updates for row in rows) == list(range(n))
        assert all(rows == sorted(rows) for rows in updates)


def test_minibatches_are_a_function_of_seed_step_and_pass():
    seeds = [(0, 1, 0), (5, 1, 0), (0, 2, 0), (0, 1, 1), (1, 0, 0)]
    np.random.seed(0)
    expected = [minibatches(12, 3, seed) for seed in seeds]
    np.random.seed(1)
    assert [minibatches(12, 3, seed) for seed in seeds] == expected and len(set(map(str, expected))) == len(seeds)


def of_lengths(lengths: list[int]) -> Batch:
    """Rows that are known by their number."""
    attention = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    number = torch.arange(len(lengths))
    zeros = torch.zeros(attention.shape)
    return Batch(attention * number[:, None], attention, attention.clone(), number.float(), number, zeros, zeros)


@pytest.mark.parametrize("n", [1, 5, 40])
@pytest.mark.parametrize("world", [1, 2, 7])
@pytest.mark.parametrize("rows, tokens", [(None, None), (1, None), (3, None), (None, 1), (None, 60), (4, 60)])
def test_micro_batches(n, world, rows, tokens):
    lengths = np.random.default_rng(n).integers(1, 30, n).tolist()
    batch, limits = of_lengths(lengths), Limits(rows, tokens)
    by_rank = [list(micro_batches(batch, limits, rank, world)) for rank in range(world)]

    def fits(piece: list[int]) -> bool:
        padded = len(piece) * max(lengths[row] for row in piece)
        return (rows is None or len(piece) <= rows) and (tokens is None or padded <= tokens)

    shares = [[row for piece, _ in pieces for row in piece] for pieces in by_rank]
    assert sorted(row for share in shares for row in share) == list(range(n)), "every row once"
    work = [sum(lengths[row] for row in share) for share in shares]
    assert max(work) - min(work) <= max(lengths), "no rank has much more to do than another"
    for share, pieces in zip(shares, by_rank):
        assert [lengths[row] for row in share] == sorted((lengths[row] for row in share), reverse=True)
        assert all(len(piece) == 1 or fits(piece) for piece, _ in pieces), "the limits are kept"
        assert not any(fits([*piece, after[0]]) for (piece, _), (after, _) in pairwise(pieces)), "and made use of"
        assert all(torch.equal(part.advantages, batch.advantages[piece]) for piece, part in pieces)

    most = max(map(len, by_rank))
    for rank, pieces in enumerate(by_rank):
        filled = list(micro_batches(batch, limits, rank, world, as_many_on_every_rank=True))
        assert len(filled) == most and [rows for rows, _ in filled[: len(pieces)]] == [rows for rows, _ in pieces]
        assert all(len(rows) == len(part) == 1 and not part.mask.any() for rows, part in filled[len(pieces) :])
    assert torch.equal(batch.mask, batch.attention), "rows of others are not masked with them"


# ---- The same step however it is split ----

# All of it is in float64, so that splits differ by some roundings of 1e-16. Adam divides by 1e-8 where a gradient is 0
# but for these.
same_up_to_rounding = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def make_run(normalization: str, limits: Limits, shard: bool = False, **switches) -> train.Run:
    settings = GRPO | dict(
        beta=0.1, entropy_coef=0.01, temperature=0.8, max_completion_length=10,
        max_grad_norm=0.05, dtype="float32", shard=shard,
    )  # fmt: skip
    cfg = Config(**settings | switches | dict(normalization=normalization))
    model = tiny_model("gpt2", spread=1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return train.Run(cfg, CPU, None, None, model, None, optimizer, None, limits)


def accumulated(monkeypatch, normalization: str, limits: Limits, world: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """-> the gradient, the loss and the statistics of a step, summed over ranks that come one after the other"""
    run, batch = make_run(normalization, limits, shard=True), make_batch()
    batch.weights = token_weights(batch.mask, normalization, run.config.max_completion_length, batch.prompts)
    monkeypatch.setattr(ranks, "world", lambda: world)
    gradient, loss, totals = 0.0, 0.0, 0.0
    for rank in range(world):
        monkeypatch.setattr(ranks, "rank", lambda rank=rank: rank)
        of_rank = train.accumulate(run, batch)
        gradient, loss, totals = gradient + flat_gradient(run.model), loss + of_rank[0], totals + of_rank[1]
    return gradient, loss, totals


@pytest.mark.parametrize("normalization", ["sequence", "prompt"])
def test_any_split_gives_the_same_loss_and_gradient(monkeypatch, normalization):
    gradient, loss, totals = accumulated(monkeypatch, normalization, WHOLE)
    assert gradient.norm() > 1e-3 and (totals[:4, 0] > 0).all()
    for world, rows, tokens in ((1, 1, None), (1, None, 30), (2, None, None), (3, 3, 40), (13, None, None)):
        split = accumulated(monkeypatch, normalization, Limits(rows, tokens), world)  # of 13 ranks one has no row
        assert distance(split[0], gradient) < 1e-10
        same_up_to_rounding(split[1:], (loss, totals))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_any_split_gives_the_same_update_of_every_algorithm(algorithm):
    """With what is chosen once for the whole update: the tokens of the highest entropy, the sampler's corrections."""
    chosen = dict(tis_cap=1.5, tis_mode="sequence_mask", off_policy_mask=0.1, top_entropy=0.4, max_grad_norm=1e-3)
    switches = ALGORITHMS[algorithm] | chosen
    whole, *split = (
        one_step(make_run(limits=limits, **switches), make_batch())
        for limits in (WHOLE, Limits(1, None), Limits(5, 40))
    )
    for figures in split:
        same_up_to_rounding(figures, whole)


def test_a_rank_without_rows_adds_exactly_nothing(monkeypatch):
    run, batch = make_run("sequence", WHOLE, shard=True), make_batch()
    batch.weights = token_weights(batch.mask, "sequence")
    monkeypatch.setattr(ranks, "rank", lambda: 12)
    monkeypatch.setattr(ranks, "world", lambda: 13)
    loss, totals = train.accumulate(run, batch)
    assert all(p.grad is not None for p in run.model.parameters()), "it took part in the backward pass"
    assert loss == 0 and not totals.any() and not flat_gradient(run.model).any()


# ---- On several processes ----


def one_step(run: train.Run, batch: Batch) -> list[Tensor]:
    """Loss, gradient norm and statistics of an update, and the weights after it: clipped, then AdamW."""
    figures = train.update(run, batch, step=1)
    assert figures[1] > run.config.max_grad_norm
    return [*figures, torch.cat([p.detach().flatten() for p in run.model.parameters()])]


def steps() -> list[list[Tensor]]:
    """One in pieces, and one with fewer completions than ranks."""
    small = make_batch()[[1, 6]]
    return [one_step(make_run("sequence", Limits(2, None)), make_batch()), one_step(make_run("global", WHOLE), small)]


def work(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    torch.save(steps(), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_three_processes_take_the_same_step(tmp_path):
    torch.multiprocessing.set_forkserver_preload([__name__])  # imported once, by the server that forks the processes
    torch.multiprocessing.start_processes(work, args=(3, tmp_path), nprocs=3, start_method="forkserver")
    for rank in range(3):
        same_up_to_rounding(torch.load(tmp_path / f"{rank}.pt"), steps())
