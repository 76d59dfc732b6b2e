"""However a step is split, over micro-batches, row orders, paddings and processes, its gradient is the same one."""

import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from advantage import group_advantages
from logprob import token_logprobs
from loss import NORMALIZATIONS, policy_loss, token_weights

NUM_GENERATIONS, VOCAB, BUDGET = 4, 31, 10
PROMPTS = ([5, 9, 7], [4, 2, 6, 6, 11], [3])
LENGTHS = (4, 10, 1, 6, 3, 0, 8, 2, 5, 5, 1, 9)  # of 3 x 4 completions; 0 is one that is masked as a whole
ROWS = range(len(LENGTHS))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


def make_model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    return model.to(dtype).train()


def make_rows(dtype: torch.dtype) -> list[dict]:
    """One dict for each completion; log-probs of old policy and reference stand beside its tokens."""
    r = random.Random(0)
    rows = []
    for i, length in enumerate(LENGTHS):
        tokens = [r.randrange(2, VOCAB) for _ in range(length or 4)]
        old_logp, ref_logp = (torch.tensor([r.gauss(-4, 1.5) for _ in tokens], dtype=dtype) for _ in "or")
        prompt = PROMPTS[i // NUM_GENERATIONS]
        mask = [int(length > 0)] * len(tokens)
        rows.append(dict(prompt=prompt, tokens=tokens, mask=mask, old_logp=old_logp, ref_logp=ref_logp))
    return rows


def rewards(dtype: torch.dtype) -> Tensor:
    return torch.tensor([0.0, 1.0, 0.5, 1.0, 0.2, 0.9, 0.0, 0.0, 2.0, 1.0, 1.0, 0.3], dtype=dtype)


def pad(rows: list[dict], left: int, right: int) -> dict[str, Tensor]:
    """-> (B, T) tensors: prompts padded on the left, completions on the right, by so many more than needed."""
    before = max(len(row["prompt"]) for row in rows) + left
    width = before + max(len(row["tokens"]) for row in rows) + right
    dtype = rows[0]["old_logp"].dtype
    batch = {name: torch.zeros(len(rows), width, dtype=torch.long) for name in ("input_ids", "attention", "mask")}
    batch |= {name: torch.full((len(rows), width), torch.nan, dtype=dtype) for name in ("old_logp", "ref_logp")}
    for b, row in enumerate(rows):
        prompt, completion = slice(before - len(row["prompt"]), before), slice(before, before + len(row["tokens"]))
        batch["input_ids"][b, prompt] = torch.tensor(row["prompt"])
        batch["input_ids"][b, completion] = torch.tensor(row["tokens"])
        batch["attention"][b, prompt.start : completion.stop] = 1
        batch["mask"][b, completion] = torch.tensor(row["mask"])
        for name in ("old_logp", "ref_logp"):
            batch[name][b, completion] = row[name]
    return batch


def totals(rows: list[dict]) -> tuple[int, int]:
    lengths = [sum(row["mask"]) for row in rows]
    return sum(n > 0 for n in lengths), sum(lengths)


def backward(
    model: nn.Module,
    rows: list[dict],
    advantages: Tensor,
    parts: Iterable[Sequence[int]],
    normalization: str,
    step_totals: tuple[int | None, int | None],
    padding: Sequence[tuple[int, int]] = ((0, 0),),
) -> float:
    """Adds up the gradients of these parts of the step, lists of row numbers. -> the loss, added up too"""
    loss = 0.0
    for i, part in enumerate(parts):
        batch = pad([rows[b] for b in part], *padding[i % len(padding)])
        mask = batch["mask"]
        logp, entropy = token_logprobs(
            model, batch["input_ids"], batch["attention"], mask, temperature=0.8, chunk_tokens=7, entropy_grad=True
        )
        weights = token_weights(
            mask,
            normalization,
            num_sequences=step_totals[0],
            num_tokens=step_totals[1],
            max_completion_length=BUDGET,
        )
        partial, _ = policy_loss(
            logp, batch["old_logp"], advantages[list(part)], weights, mask, ref_logp=batch["ref_logp"], beta=0.1
        )
        partial = partial - 0.01 * (weights.to(logp.dtype) * entropy).sum()
        partial.backward()
        loss += partial.item()
    return loss


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in model.parameters()]
    )


def undivided(dtype: torch.dtype, normalization: str) -> tuple[Tensor, float]:
    """The whole step as one batch, whose totals are its own."""
    model, advantages = make_model(dtype), group_advantages(rewards(dtype), NUM_GENERATIONS)
    loss = backward(model, make_rows(dtype), advantages, [ROWS], normalization, (None, None))
    return flat_gradient(model), loss


def assert_same(gradient: Tensor, expected: Tensor) -> None:
    assert expected.norm() > 1e-3
    assert (gradient - expected).norm() <= TOLERANCE[expected.dtype] * expected.norm()


def chunks(rows: Sequence[int], sizes: Iterable[int]) -> list[Sequence[int]]:
    """Cut to these sizes, the last of them repeated while rows are left."""
    sizes, parts = list(sizes), []
    while rows:
        n = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        parts.append(rows[:n])
        rows = rows[n:]
    return parts


# One process

SPLITS = {
    "1 each": chunks(ROWS, [1]),
    "2 each": chunks(ROWS, [2]),
    "3 each": chunks(ROWS, [3]),
    "unequal": chunks(ROWS, [1, 7, 4]),
    "any order": chunks(random.Random(1).sample(ROWS, len(ROWS)), [5, 1, 3]),
    "by length": chunks(sorted(ROWS, key=LENGTHS.__getitem__), [4]),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_micro_batches(normalization: str, dtype: torch.dtype):
    expected, expected_loss = undivided(dtype, normalization)
    rows, advantages = make_rows(dtype), group_advantages(rewards(dtype), NUM_GENERATIONS)
    for parts in SPLITS.values():
        model = make_model(dtype)
        loss = backward(model, rows, advantages, parts, normalization, totals(rows), [(0, 0), (3, 0), (0, 4), (1, 2)])
        assert_same(flat_gradient(model), expected)
        assert loss == pytest.approx(expected_loss, rel=10 * TOLERANCE[dtype], abs=10 * TOLERANCE[dtype])


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_masked_completion_changes_nothing(normalization: str):
    rows, advantages = make_rows(torch.float64), group_advantages(rewards(torch.float64), NUM_GENERATIONS)
    expected, _ = undivided(torch.float64, normalization)
    model = make_model(torch.float64)
    scored = [b for b in ROWS if LENGTHS[b]]
    backward(model, rows, advantages, [scored], normalization, (None, None))
    assert_same(flat_gradient(model), expected)

    alone = make_model(torch.float64)
    backward(alone, rows, advantages, [[LENGTHS.index(0)]], normalization, totals(rows))
    assert (flat_gradient(alone) == 0).all()


def take_step(model: nn.Module) -> None:
    """Clipped, then AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05
    optimizer.step()


def flat_parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def parameters_after_a_step(normalization: str) -> Tensor:
    model = make_model(torch.float64)
    advantages = group_advantages(rewards(torch.float64), NUM_GENERATIONS)
    backward(model, make_rows(torch.float64), advantages, [ROWS], normalization, (None, None))
    take_step(model)
    return flat_parameters(model)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("size", [4, 2, 1])
def test_a_group_in_parts_takes_the_same_optimizer_step(size: int, normalization: str):
    """num_generations=4 as 4 x 1, 2 x 2 and 1 x 4: completions at a time, times parts."""
    rows, advantages = make_rows(torch.float64), group_advantages(rewards(torch.float64), NUM_GENERATIONS)
    model = make_model(torch.float64)
    before = flat_parameters(model)
    backward(model, rows, advantages, chunks(ROWS, [size]), normalization, totals(rows))
    take_step(model)
    expected = parameters_after_a_step(normalization)
    assert (expected - before).abs().max() > 1e-3
    torch.testing.assert_close(flat_parameters(model), expected, rtol=0, atol=1e-10)


# Several processes

SHARES = {  # rows of each process; no count divides the groups of 4, so that groups straddle processes
    1: [ROWS],
    2: [ROWS[:5], ROWS[5:]],
    3: [ROWS[:3], ROWS[3:9], ROWS[9:]],
}
PARTS = ([2, 1], [3], [1, 2])  # sizes of the micro-batches on each process


def step_on_processes(size: int, group: dist.ProcessGroup, dtype: torch.dtype, normalization: str) -> nn.Module:
    """One process's part of a step: it knows its own rows, and everything else by sums over the processes."""
    rank = dist.get_rank()
    rows, own = make_rows(dtype), list(SHARES[size][rank])
    all_rewards = torch.zeros(len(rows), dtype=dtype)
    all_rewards[own] = rewards(dtype)[own]
    step_totals = torch.tensor(totals([rows[b] for b in own]))
    dist.all_reduce(all_rewards, dist.ReduceOp.SUM, group)
    dist.all_reduce(step_totals, dist.ReduceOp.SUM, group)

    model, advantages = make_model(dtype), group_advantages(all_rewards, NUM_GENERATIONS)
    padding = [(rank, 0), (0, 2)]
    backward(model, rows, advantages, chunks(own, PARTS[rank]), normalization, tuple(step_totals.tolist()), padding)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, group)
    return model


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=max(SHARES))
    results = {}
    for size in SHARES:
        group = dist.new_group(range(size))
        if rank < size:
            for dtype in TOLERANCE:
                for normalization in NORMALIZATIONS:
                    model = step_on_processes(size, group, dtype, normalization)
                    gradient = flat_gradient(model)
                    take_step(model)
                    results[size, dtype, normalization] = gradient, flat_parameters(model)
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Of each process; the steps of fewer processes run on the first few of them."""
    folder: Path = tmp_path_factory.mktemp("processes")
    torch.multiprocessing.set_forkserver_preload([__name__])  # imported once, by the server that forks the processes
    torch.multiprocessing.start_processes(work, args=(str(folder),), nprocs=max(SHARES), start_method="forkserver")
    return [torch.load(folder / f"{rank}.pt") for rank in range(max(SHARES))]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("size", SHARES)
def test_processes(results: list[dict], size: int, normalization: str, dtype: torch.dtype):
    expected, _ = undivided(dtype, normalization)
    for rank in range(size):
        assert_same(results[rank][size, dtype, normalization][0], expected)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("size", SHARES)
def test_processes_take_the_same_optimizer_step(results: list[dict], size: int, normalization: str):
    expected = parameters_after_a_step(normalization)
    for rank in range(size):
        parameters = results[rank][size, torch.float64, normalization][1]
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-10)
