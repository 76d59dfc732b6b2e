"""The benchmark: all ways to train do the same work, and the tables show what was measured."""

import itertools
import json
import re
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import rollout
import train
from bench import against_trl
from conftest import PROCESSES, ROOT, lines

STEP = f"""step --seeds 1 --rows 4 --prompt_tokens 17 --out {{}} -- --model {ROOT}/models/addition --task addition
    --prompts_per_step 3 --num_generations 4 --max_completion_length 12 --temperature 0.8"""


@pytest.fixture(autouse=True)
def processes(monkeypatch):
    """Make the runs of a test in one process, which imports TRL only once, and undo what the benchmark wraps in this
    process."""
    for owner, name in ((train, "uniforms"), (rollout, "sample")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that monkeypatch restores it after the test
    with ProcessPoolExecutor(1, PROCESSES) as pool:
        monkeypatch.setattr(against_trl, "ProcessPoolExecutor", lambda **_: nullcontext(pool))
        yield


@pytest.fixture
def planned():
    """Return a run of small steps, and its planned completions."""
    args = against_trl.parse(STEP.format("out").split())
    config = against_trl.command_line.ready(against_trl.command_line.parse(args.flags, on_gpu=False), on_gpu=False)
    run, *_ = train.set_up(config, torch.device("cpu"))
    return run, against_trl.plan_step(run, args)


def completions(run, tokens: torch.Tensor) -> list[list[int]]:
    """Return the ids of each completion, up to and including its end-of-sequence token."""
    eos = run.tokenizer.eos_token_id
    return [row[: row.index(eos) + 1] if eos in row else row for row in tokens.tolist()]


def add_run(folder: Path, lines: list[dict]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text(against_trl.report.as_json(lines))


def test_our_steps_have_the_planned_completions(planned):
    run, tokens = planned
    ids = completions(run, tokens)
    assert not {*run.tokenizer.all_special_ids} & {token for row in ids for token in row[:-1]}
    assert len({*map(len, ids)}) > 3 and run.limits.tokens == 4 * (17 + 12)
    against_trl.force_ours(tokens)
    for step in (1, 2):
        _, groups = train.training_step(run, step)
        assert [made.ids.tolist() for group in groups for made in group.completions] == ids
        assert [len(group.row["prompt_ids"]) for group in groups] == [17] * 3


def test_every_way_does_the_same_work_in_a_step(planned, tmp_path, capsys):
    """A way is a trainer and its output head: "ours", "TRL" or "TRL, plain head". Those of TRL are compared only where
    TRL is installed."""
    command, *flags = STEP.format(tmp_path).split()
    ways = against_trl.WAYS if find_spec("trl") else ["ours"]
    against_trl.main([command, "--ways", "; ".join(ways), *flags])
    assert "| seconds_step:2-3 | ours |" in capsys.readouterr().out
    for way in ways:
        made = lines(tmp_path / f"{way.replace(', ', '-').replace(' ', '-')}-1" / "metrics.jsonl")
        assert [line["tokens"] for line in made] == [sum(map(len, completions(*planned)))] * 3
        assert all(0 < line["seconds_rollout"] < line["seconds_step"] for line in made)
    args = against_trl.parse([command, "--ways", "ours; other", *flags])
    # The other run has the lines of the last way, except that one number is 2 % higher.
    for name in ("tokens", "grad_norm"):
        add_run(tmp_path / "other-1", [line | {name: 1.02 * line[name]} for line in made])
        with pytest.raises(AssertionError, match=f"other work: {name}"):
            against_trl.table(args)


def test_evaluations_do_not_count_as_cost(tmp_path, monkeypatch):
    clock = itertools.count()  # each look at it is a second later
    monkeypatch.setattr(against_trl, "read_clock", lambda: next(clock))
    monkeypatch.setattr(train, "evaluate", lambda run, step: ({"eval/x": sum(next(clock) for _ in range(99))}, []))
    words = "--steps 3 --eval_every 1 --prompts_per_step 1 --num_generations 2 --max_completion_length 2".split()
    against_trl.measure(against_trl.parse(["learn", "--out", "x", "--", *words]), "ours", tmp_path, words)
    assert [line["seconds_step"] < 99 for line in lines(tmp_path / "metrics.jsonl")] == [True] * 3


def test_what_is_learned(tmp_path):
    """Our way makes the same run as train.py. The table compares two ways, without a metric that one of them lacks."""
    flags = "--steps 2 --prompts_per_step 2 --num_generations 4 --eval_every 1 --eval_prompts 16 --eval_k 1"
    words = f"--out {tmp_path} --seeds 3 --target 0.3 -- {flags}".split()
    against_trl.main(["learn", "--ways", "ours", *words])
    made = lines(tmp_path / "ours-3" / "metrics.jsonl")
    assert train.main([*flags.split(), "--warmup_steps", "0", "--seed", "3", "--out", str(tmp_path / "plain")]) == 0
    plain = [line for line in lines(tmp_path / "plain" / "metrics.jsonl") if line["step"]]
    for name in ("step", "reward", "eval/accuracy"):
        assert [line.get(name) for line in made] == [line.get(name) for line in plain]
    seconds = [line["seconds"] for line in made]
    assert seconds == pytest.approx([sum(line["seconds_step"] for line in made[:n]) for n in (1, 2)])
    assert made[-1]["seconds to target"] == seconds[0]
    assert json.loads((tmp_path / "ours-3" / "config.json").read_text())["settings"]["trainer"] == "ours"

    args = against_trl.parse(["learn", "--ways", "ours; TRL", *words])
    add_run(tmp_path / "TRL-3", [line | {"seconds": 2 * line["seconds"]} for line in made])
    against_trl.make_missing_runs(args)  # makes none, because both ways have a log
    # The last column is the mean of ours divided by that of the row. TRL has the same reward and twice the seconds.
    shown = against_trl.table(args)
    assert re.search(r"reward:1-2 \| ours .*\n\| \| TRL \| 0\..* \| \+0\.000 \(.* \| 1\.00 \|\n", shown)
    assert re.search(r"seconds:last \| ours .*\n\| \| TRL .* \| 0\.50 \|\n", shown)
    add_run(tmp_path / "TRL-3", [line | {"seconds to target": None} for line in made])
    assert "seconds:last" in against_trl.table(args) and "to target" not in against_trl.table(args)
