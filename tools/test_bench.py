"""The benchmark: both samplers pick the planned tokens, and the tables show what was measured."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch

import rollout
import train
from conftest import ROOT, lines
from tools import bench

SMALL = "--task addition --prompts_per_step 3 --num_generations 4 --max_completion_length 12"
STEP = f"step --seeds 1 --rows 4 --prompt_tokens 17 --out {{}} -- --model {ROOT}/models/addition {SMALL}"


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Runs start at once. What the benchmark wraps is undone."""
    monkeypatch.setattr(bench, "ProcessPoolExecutor", lambda n, context: ThreadPoolExecutor(n))
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


def test_a_step_is_the_same_work_in_every_way(planned, tmp_path, capsys):
    words = STEP.format(tmp_path).split()
    words[1:1] = [] if find_spec("trl") else ["--ways", "ours"]
    bench.main(words)  # it compares the work
    made = lines(tmp_path / "ours-1" / "metrics.jsonl")
    assert [line["tokens"] for line in made] == [sum(map(len, completions(*planned)))] * 3
    assert all(0 < line["seconds_rollout"] < line["seconds_step"] for line in made)
    assert "| seconds_step:2-3 | ours |" in capsys.readouterr().out


def test_other_work_is_an_error():
    ours = {"grad_norm": 2.0, "tokens": 100}
    bench.check_same_work({"ours": [[ours]], "TRL": [[ours | {"grad_norm": 2.001}]]})
    for difference in ({"grad_norm": 2.1}, {"tokens": 101}):
        with pytest.raises(AssertionError, match=f"TRL did other work: {next(iter(difference))}"):
            bench.check_same_work({"ours": [[ours]], "TRL": [[ours | difference]]})


def test_what_is_learned(tmp_path):
    """The run is the one that train.py makes. The table compares two ways."""
    flags = "--steps 4 --prompts_per_step 2 --eval_every 2 --eval_prompts 16 --eval_k 1"
    args = bench.parse(f"learn --out {tmp_path} --seeds 3 --ways ours -- {flags}".split())
    bench.make_missing_runs(args)
    (made,) = bench.read_logs(args)["ours"]
    assert train.main([*flags.split(), "--warmup_steps", "0", "--seed", "3", "--out", str(tmp_path / "plain")]) == 0
    plain = [line for line in lines(tmp_path / "plain" / "metrics.jsonl") if line["step"]]
    for name in ("step", "reward", "eval/accuracy"):
        assert [line.get(name) for line in made] == [line.get(name) for line in plain]
    seconds = [line["seconds"] for line in made]
    assert seconds == pytest.approx([sum(line["seconds_step"] for line in made[:n]) for n in (1, 2, 3, 4)])
    assert json.loads((tmp_path / "ours-3" / "config.json").read_text())["settings"]["trainer"] == "ours"

    twice = tmp_path / "TRL-3"
    twice.mkdir()
    (twice / "metrics.jsonl").write_text(bench.report.as_json([x | {"seconds": 2 * x["seconds"]} for x in made]))
    args.ways, args.target = ["ours", "TRL"], 0.3
    bench.make_missing_runs(args)  # there are none
    table = bench.table(args)
    assert re.search(r"reward:1-4 \| ours \|.*\n\| \| TRL \| 0\..* \| \+0\.000, .* \| 1\.00 \|\n", table)
    assert re.search(r"\| seconds to target:last \| ours \|.*\n\| \| TRL \| .* \| 0\.50 \|$", table)
    on_target = re.search(r"seconds to target:last \| ours \| ([\d.]+)", table)[1]
    assert float(on_target) == pytest.approx(seconds[1], rel=0.01)  # the table rounds to three digits
    args.target = 1.1
    assert bench.table(args) == table[: table.index("\n| seconds to target")]
