"""The benchmark: both samplers pick the planned tokens, and the tables show what was measured."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import rollout
import train
from conftest import ROOT, lines
from tools import bench

SMALL = "--task addition --prompts_per_step 3 --num_generations 4 --max_completion_length 12"
STEP = f"step --rows 4 --prompt_tokens 17 -- --model {ROOT}/models/addition {SMALL}"


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch):
    """Undo what the benchmark wraps."""
    for owner, name in ((train, "uniforms"), (train, "rollout"), (rollout, "sample")):
        monkeypatch.setattr(owner, name, getattr(owner, name))


@pytest.fixture
def planned():
    """The run of a small step, and its planned completions."""
    args = bench.parse(STEP.split())
    config = bench.command_line.ready(bench.command_line.parse(args.flags, on_gpu=False), on_gpu=False)
    run, *_ = train.set_up(config, torch.device("cpu"))
    return run, bench.plan_step(run, args)


def completions(run, tokens: torch.Tensor) -> list[list[int]]:
    """Each up to and including its end-of-sequence token."""
    ends = [(row == run.tokenizer.eos_token_id).tolist() for row in tokens]
    return [row[: end.index(True) + 1 if True in end else None] for row, end in zip(tokens.tolist(), ends)]


def test_the_planned_step(planned):
    run, tokens = planned
    special, planned_ids = {*run.tokenizer.all_special_ids}, completions(run, tokens)
    assert len({*map(len, planned_ids)}) > 3
    for row, ids in zip(tokens.tolist(), planned_ids):
        assert not special & {*ids[:-1]} and {*row[len(ids) :]} <= {run.tokenizer.pad_token_id}
    assert [len(run.tokenizer(row["prompt"])["input_ids"]) for row in run.task.train] == [17] * 3
    assert run.limits.tokens == 4 * (17 + 12)


def test_our_steps_have_the_planned_completions(planned):
    run, tokens = planned
    bench.force_ours(tokens)
    for step in (1, 2):
        _, groups = train.training_step(run, step)
        assert [made.ids for group in groups for made in group.completions] == completions(run, tokens)


def test_generate_returns_the_planned_completions(planned):
    """When called as TRL does: sampling, with all rows at once, padded on the left."""
    run, tokens = planned
    bench.wrap(run.model, "generate", bench.partial(bench.force_trl, tokens))
    ids = torch.randint(2, 17, (12, 6))
    settings = dict(max_new_tokens=12, do_sample=True, eos_token_id=1, pad_token_id=0)
    made = run.model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **settings)[:, 6:]
    assert made.equal(tokens[:, : made.shape[1]]) and not tokens[:, made.shape[1] :].any()


def test_a_step_is_measured_and_recorded(planned, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "LOG", tmp_path / "bench.jsonl")
    args = bench.parse(STEP.replace("step", f"step --ways ours --seeds 1,2 --out {tmp_path}", 1).split())
    for seed in args.seeds:
        log = bench.log_of(args, "ours", seed)
        log.parent.mkdir()
        log.write_text(bench.report.as_json(bench.measure(args, "ours", seed)[1]))
    bench.record_step(args)
    (entry,) = lines(bench.LOG)
    figures = entry["results"]["ours"]
    assert entry["tokens"] == sum(map(len, completions(*planned))) and entry["prompts"] == 3
    assert [len(figures[name]) for name in ("rollout_cpu", "step_cpu", "memory_gb")] == [4, 4, 2]
    assert all(0 < part < whole for part, whole in zip(figures["rollout_cpu"], figures["step_cpu"]))
    assert "| step_cpu:2-3 | ours |" in capsys.readouterr().out


def test_other_work_is_an_error():
    ours = {"grad_norm": 2.0, "tokens": 100}
    bench.check_same_work({"ours": [[ours]], "TRL": [[ours | {"grad_norm": 2.001}]]})
    for difference in ({"grad_norm": 2.1}, {"tokens": 101}):
        with pytest.raises(AssertionError, match=f"TRL did other work: {next(iter(difference))}"):
            bench.check_same_work({"ours": [[ours]], "TRL": [[ours | difference]]})


def test_trl_does_the_same_work():
    pytest.importorskip("trl")
    args, logs = bench.parse(STEP.split()), {}
    for way in bench.WAYS:
        with pytest.MonkeyPatch.context() as undone:
            undone.setattr(train, "rollout", train.rollout)
            logs[way] = [bench.measure(args, way, "1")[1]]
    bench.check_same_work(logs)


def test_what_is_learned(tmp_path, monkeypatch):
    """The run is the one that train.py makes. The table pairs the seeds of two ways."""
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda n, context: ThreadPoolExecutor(n))  # starts at once
    flags = "--steps 4 --prompts_per_step 2 --eval_every 2 --eval_prompts 16 --eval_k 1"
    args = bench.parse(f"learn --out {tmp_path} --seeds 3 --ways ours -- {flags}".split())
    bench.make_missing_runs(args)
    (made,) = bench.read_logs(args)["ours"]
    assert train.main([*flags.split(), "--warmup_steps", "0", "--seed", "3", "--out", str(tmp_path / "plain")]) == 0
    plain = [line for line in lines(tmp_path / "plain" / "metrics.jsonl") if line["step"]]
    for name in ("step", "reward", "eval/accuracy"):
        assert [line.get(name) for line in made] == [line.get(name) for line in plain]
    seconds = [line["seconds"] for line in made]
    assert seconds == pytest.approx([sum(line["step_cpu"] for line in made[:n]) for n in (1, 2, 3, 4)])
    assert json.loads((tmp_path / "ours-3" / "config.json").read_text())["settings"]["trainer"] == "ours"

    shutil.copytree(tmp_path / "ours-3", tmp_path / "TRL-3")
    args.ways, args.target = ["ours", "TRL"], 0.3
    bench.make_missing_runs(args)  # there are none
    table = bench.learn_table(args)
    assert "| reward:1-4 | ours |" in table and "| | TRL | 0." in table and "| +0.000, " in table
    on_target = re.search(r"seconds to target:last \| ours \| ([\d.]+)", table)[1]
    assert float(on_target) == pytest.approx(seconds[1], rel=0.01)  # the table rounds to three digits
    args.target = 1.1
    assert bench.learn_table(args) == table[: table.index("\n| seconds to target")]


def test_long_completions(monkeypatch, tmp_path, capsys):
    """Twice the length costs memory in proportion, and the table is made from the log."""
    monkeypatch.setattr(bench, "LOG", tmp_path / "log")
    bench.main(["long", "--limits", "40,160"])
    (entry,) = lines(tmp_path / "log")
    short, long = entry["results"].values()
    assert 3 < long.pop("tokens")[0] / short.pop("tokens")[0] < 5
    assert list(long) == ["rollout", "gather", "collate", "update", "samples", "checkpoint"]
    assert all(microseconds > 0 for microseconds, _ in long.values())
    for part in ("gather", "samples", "checkpoint"):
        assert 0 < long[part][1] < short[part][1]
    assert capsys.readouterr().out.endswith(bench.long_table(tmp_path / "log") + "\n")
