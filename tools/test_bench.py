"""The benchmark: both samplers draw the planned tokens, and what is measured is what its tables need."""

import argparse
from types import SimpleNamespace

import pytest
import torch

import rollout
import train
from tools import bench, bench_work, evidence

TINY = bench_work.Size(50, 16, 32, 1, 2, 1, prompts=3, limit=12)


@pytest.fixture
def args(monkeypatch):
    monkeypatch.setitem(bench_work.SIZES, "tiny", TINY)
    for owner, names in ((train, ("rollout", "token_logprobs", "update")), (rollout, ("sample",))):
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # what is put around it is taken off
    monkeypatch.setattr(torch.Tensor, "backward", torch.Tensor.backward)
    return argparse.Namespace(size="tiny", prompts=3, group=4, limit=12, equal=False, steps=2)


def test_the_plan(args):
    work, again = bench_work.plan_work(args), bench_work.plan_work(args)
    assert work.prompts == again.prompts and work.tokens.equal(again.tokens)
    assert len(set(work.lengths)) > 3 and max(work.lengths) <= 12
    for tokens, length in zip(work.tokens.tolist(), work.lengths):
        assert bench_work.EOS not in tokens[: length - 1] and bench_work.PAD not in tokens[:length]
        assert tokens[length - 1] == bench_work.EOS or length == 12
        assert set(tokens[length:]) <= {bench_work.PAD}
    args.equal = True
    work = bench_work.plan_work(args)
    assert work.lengths == [12] * 12 and not (work.tokens == bench_work.EOS).any()


@pytest.mark.parametrize("equal", [False, True])
def test_a_step_of_ours_has_the_planned_completions(args, equal):
    args.equal = equal
    work = bench_work.plan_work(args)
    run = bench_work.our_run(work, args)
    for step in (1, 2):
        _, groups = train.training_step(run, step)
        made = [completion.ids for group in groups for completion in group.completions]
        assert made == [row[:n] for row, n in zip(work.tokens.tolist(), work.lengths)]


def test_generate_has_the_planned_completions(args):
    """As TRL calls it: sampling, all rows at once, padded on the left."""
    work, model = bench_work.plan_work(args), bench_work.make_model(TINY)
    bench_work.force_trl(model, work)
    ids = torch.randint(2, 50, (12, 6))
    settings = dict(max_new_tokens=12, do_sample=True, eos_token_id=bench_work.EOS, pad_token_id=bench_work.PAD)
    made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)[:, 6:]
    assert made.equal(work.tokens[:, : max(work.lengths)])


def test_the_clock_sums_the_calls_of_a_phase_in_each_step_but_the_first():
    thing = SimpleNamespace(work=lambda n: sum(range(n)))
    clock = bench_work.Clock((thing, "work", "work"))
    for calls in (1, 3, 3):
        for _ in range(calls):
            assert thing.work(10) == 45
        clock.on_step_end()
    figures = clock.figures()
    assert set(figures) == {"work", "work_cpu", "step", "step_cpu", "memory_gb"}
    assert [len(figures[name]) for name in ("work", "step_cpu")] == [2, 2] and figures["work"] <= figures["step"]


def test_what_is_measured_makes_a_line_of_its_table(args):
    about = {"hardware": "2 CPU cores", "threads": 1, "transformers": "1.2.3", "commit": "0123456789"}
    figures, facts = bench_work.measure_ours(args)
    assert facts["trained"] == sum(bench_work.plan_work(args).lengths) and len(facts["grad_norm"]) == 3
    work = dict(size="tiny", prompts=3, group=4, limit=12, lengths="ragged", tokens=facts["trained"])
    step = about | work | {"command": "python -m tools.bench step", "results": {"ours": figures}}
    assert "| ours | " in evidence.measurement_table(step)


def test_other_work_is_an_error():
    ours = {"grad_norm": [1.0, 2.0], "trained": 100}
    bench.check_same_work({"ours": ours, "TRL": ours | {"grad_norm": [1.0005, 2.0]}})
    bench.check_same_work({"ours": ours, "TRL, continuous batching": ours | {"grad_norm": [3.0, 4.0]}})
    for other in ({"grad_norm": [1.0, 2.1]}, {"trained": 101}):
        with pytest.raises(SystemExit, match="not the same work: TRL"):
            bench.check_same_work({"ours": ours, "TRL": ours | other})
