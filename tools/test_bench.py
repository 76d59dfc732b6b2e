"""The benchmark: both samplers are made to draw the planned tokens, and the tables come from the log."""

import argparse
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rollout
import train
from tools import bench, bench_work

SIZE = (50, 16, 32, 1, 2, 1, 3, 12)  # as in SIZES


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setitem(bench_work.SIZES, "tiny", SIZE)
    return argparse.Namespace(size="tiny", prompts=3, group=4, prompt=6, limit=12, equal=False)


@pytest.fixture
def restored(monkeypatch):
    """What force_ours and our_run replace is put back."""
    for owner, name in ((train, "uniforms"), (train, "load_task"), (rollout, "sample")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


def test_the_plan(args):
    work = bench_work.plan_work(args)
    again = bench_work.plan_work(args)
    assert work.prompts == again.prompts and work.tokens.equal(again.tokens)
    assert len(set(work.lengths)) > 3 and max(work.lengths) <= 12
    for tokens, length in zip(work.tokens.tolist(), work.lengths):
        assert bench_work.EOS not in tokens[: length - 1] and bench_work.PAD not in tokens[:length]
        assert tokens[length - 1] == bench_work.EOS or length == 12
        assert set(tokens[length:]) <= {bench_work.PAD}
    args.equal = True
    work = bench_work.plan_work(args)
    assert work.lengths == [12] * 12 and not (work.tokens == bench_work.EOS).any()


def test_rows_are_told_from_their_uniform_numbers():
    uniform = np.random.default_rng(0).random((700, 9))
    numbered = bench_work.number_rows(uniform)
    assert np.abs(numbered - uniform).max() < 1e-8 and numbered.max() < 1
    rows = torch.randperm(700)
    assert bench_work.row_numbers(torch.as_tensor(numbered)[rows, 3]).equal(rows)


@pytest.mark.parametrize("equal", [False, True])
def test_a_step_of_ours_has_the_planned_completions(args, restored, equal):
    args.equal = equal
    work = bench_work.plan_work(args)
    run = bench_work.our_run(work, args, 64)
    for step in (1, 2):
        _, groups, _ = train.training_step(run, step, 0)
        made = [completion.ids for group in groups for completion in group.completions]
        assert made == [row[:n] for row, n in zip(work.tokens.tolist(), work.lengths)]


def test_generate_has_the_planned_completions(args):
    """As TRL calls it: sampling, all rows at once, padded on the left."""
    work, model = bench_work.plan_work(args), bench_work.make_model("tiny")
    bench_work.force_trl(model, work)
    ids = torch.randint(2, 50, (12, 6))
    settings = dict(max_new_tokens=12, do_sample=True, eos_token_id=bench_work.EOS, pad_token_id=bench_work.PAD)
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)[:, 6:]
    longest = max(work.lengths)
    assert made.equal(work.tokens[:, :longest])


def test_the_clock_sums_calls_of_a_phase_in_each_step():
    clock, thing = bench_work.Clock(), SimpleNamespace(work=lambda n: sum(range(n)))
    clock.wrap(thing, "work", "work")
    for calls in (1, 3, 3):
        for _ in range(calls):
            assert thing.work(10) == 45
        clock.end_step()
    figures = clock.figures(1)
    assert set(figures) == {"work", "work_cpu"} and len(figures["work"]) == 2


def entry(command: str, time: str, **more) -> dict:
    return {
        "command": f"python bench.py {command}",
        "commit": "abcdef0123",
        "hardware": "2 CPU cores",
        "time": time,
    } | more


def test_the_tables_come_from_the_newest_entries():
    phases = [f"{phase}{unit}" for phase in bench.PHASES for unit in ("", "_cpu")]
    results = {way: {n: [s, s, 9 * s] for n in [*phases, "memory_gb"]} for way, s in (("ours", 2.0), ("TRL", 4.0))}
    ratios = {"TRL": {name: 0.5 for name in results["ours"]}}
    step = dict(
        size="12m", prompts=4, group=8, limit=256, lengths="ragged", tokens=1000, results=results, ratios=ratios
    )
    point = dict(
        completions=8, limit=256, tokens_rollout=500, tokens_update=1000, memory_rollout=0.25, memory_update=0.5
    )
    point |= dict(rollout=9.0, rollout_cpu=2.0, update=9.0, update_cpu=3.0)
    text = bench.markdown(
        [
            entry("step", "1", **step | {"tokens": 7}),
            entry("step --repeats 9", "2", **step),
            entry("scaling", "3", size="12m", points=[point]),
            entry("overhead", "4", shares={"rollout": 0.6, "overhead": 0.04}),
            entry("logprobs", "5"),
        ]
    )
    assert "7 tokens" not in text and "1000 tokens a step" in text
    assert "| ours | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 2.00 | 500 | 2.00 |" in text
    assert "| ours / TRL | 0.50 |" in text
    assert "| 8 | 256 | 500 | 4.00 | 0.25 | 1000 | 3.00 | 0.50 |" in text
    assert "overhead 4.0%" in text
