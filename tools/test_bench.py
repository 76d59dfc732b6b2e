"""The benchmark: both samplers draw the planned tokens, and what is measured is what its table needs."""

import argparse
import json
from types import SimpleNamespace

import pytest
import torch

import rollout
import train
from tools import bench

TINY = (3, 12, 50, 16, 32, 1, 2, 1)


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setitem(bench.SIZES, "tiny", TINY)
    for owner, name in (*bench.OUR_PHASES.values(), (train, "open_model"), (rollout, "sample")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what is put around it is taken off
    monkeypatch.setattr(torch.Tensor, "backward", torch.Tensor.backward)
    return argparse.Namespace(size="tiny", prompts=3, group=4, limit=12, equal=False, steps=2)


def test_the_plan(args):
    work = bench.plan_work(args)
    assert work.tokens.equal(bench.plan_work(args).tokens) and len(set(work.lengths)) > 3 and max(work.lengths) <= 12
    for tokens, length in zip(work.tokens.tolist(), work.lengths):
        assert not {bench.EOS, bench.PAD} & {*tokens[: length - 1]} and {*tokens[length:]} <= {bench.PAD}
        assert tokens[length - 1] == bench.EOS or length == 12
    args.equal = True
    work = bench.plan_work(args)
    assert work.lengths == [12] * 12 and not (work.tokens == bench.EOS).any()


@pytest.mark.parametrize("equal", [False, True])
def test_a_step_of_ours_has_the_planned_completions(args, equal):
    """Each prompt its own, whatever the order of the prompts in a step."""
    args.equal = equal
    work = bench.plan_work(args)
    run = bench.our_run(work, args)
    planned = [row[:n] for row, n in zip(work.tokens.tolist(), work.lengths)]
    planned = {prompt: planned[4 * i : 4 * i + 4] for i, prompt in enumerate(work.prompts)}
    for step in (1, 2):
        _, groups = train.training_step(run, step)
        assert {group.row["prompt"]: [made.ids for made in group.completions] for group in groups} == planned


def test_generate_has_the_planned_completions(args):
    """As TRL calls it: sampling, all rows at once, padded on the left."""
    work, (model, _) = bench.plan_work(args), bench.make("tiny")
    bench.force_trl(model, work)
    ids = torch.randint(2, 50, (12, 6))
    settings = dict(max_new_tokens=12, do_sample=True, eos_token_id=bench.EOS, pad_token_id=bench.PAD)
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)[:, 6:]
    assert made.equal(work.tokens[:, : max(work.lengths)])


def test_the_clock_sums_the_calls_of_a_phase_in_each_step_but_the_first(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(bench, "read_clock", lambda: torch.tensor([next(ticks), 0.0]).numpy())  # a second a reading
    thing = SimpleNamespace(work=lambda n: sum(range(n)))
    clock = bench.Clock(work=(thing, "work"))
    for calls in (1, 3, 2):
        for _ in range(calls):
            assert thing.work(10) == 45
        clock.end_step()
    figures = clock.figures()
    assert figures["work"] == [3.0, 2.0] and figures["step"] == [7.0, 5.0] and figures["step_cpu"] == [0.0, 0.0]
    assert figures["memory_gb"][0] >= 0


def test_what_is_measured_makes_the_newest_table_of_its_kind(args, tmp_path):
    figures, facts = bench.measure_ours(args)
    assert facts["trained"] == sum(bench.plan_work(args).lengths) and len(facts["grad_norm"]) == 3
    about = {"hardware": "2 CPU cores", "threads": 1, "transformers": "1.2.3", "commit": "0123456789"}
    about |= dict(size="tiny", prompts=3, group=4, limit=12, lengths="ragged", results={"ours": figures})
    both = {way: {name: [value] for name in figures} for way, value in (("ours", 2.0), ("TRL", 4.0))}
    lines = [  # command, tokens, what differs
        ("python bench.py step", 7, {"hardware": "1 CPU core"}),
        ("python -m tools.bench step --repeats 9", 1000, {}),
        ("python -m tools.bench step --ways ours; TRL", 11, {"results": both}),
        ("python bench.py logprobs", 13, {}),
    ]
    lines = [about | {"command": command, "tokens": tokens} | other for command, tokens, other in lines]
    (tmp_path / "log").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = bench.tables(tmp_path / "log")
    assert [n for n in (7, 11, 13, 1000) if f": {n} tokens" in table] == [11, 1000]
    assert "| ours / TRL | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 | 2.0 | 0.50 |" in table


def test_other_work_is_an_error():
    ours = {"grad_norm": [1.0, 2.0], "trained": 100}
    bench.check_same_work({"ours": ours, "TRL": ours | {"grad_norm": [1.0005, 2.0]}})
    for other in ({"grad_norm": [1.0, 2.1]}, {"trained": 101}):
        with pytest.raises(SystemExit, match="not the same work: TRL"):
            bench.check_same_work({"ours": ours, "TRL": ours | other})
