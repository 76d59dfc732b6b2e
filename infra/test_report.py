"""The metrics of a step and of an evaluation, the files they are written to, and what the screen shows."""

import io
import json
import math
import os
import sys
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batch import Group
from config import Config
from conftest import run, samples
from infra import ranks, report, run_folder
from infra.report import RunLog
from rollout import Completion

NAMES = ["right", "penalty"]


def group(right: list[float], length: int, judged: bool = True) -> Group:
    """Make a group with a completion for each value of the first reward function; the second one always gives -1. A
    value of 1 is a right answer. If not `judged`, the task does not say which answers are right."""
    made = Group([1], {"prompt": "a"}, [Completion([7] * length, [0.0] * length, truncated=False)] * len(right))
    made.reward_parts = torch.tensor([[r, -1.0] for r in right])
    made.rewards = made.reward_parts.sum(1)
    first = made.reward_parts[:, 0]
    made.right = (first == 1).double().masked_fill(first.isnan(), math.nan) if judged else None
    return made


def test_the_metrics_of_an_evaluation_are_means_over_prompts_with_their_intervals():
    """Each of three prompts has 5 samples, of which 0, 1 and 5 are right. One of a fourth prompt was not judged, so it
    is left out of pass@k, and its greedy completion has no reward. An interval is 1.96 standard errors to each side.
    Accuracy, rewards and lengths are those of the greedy completions, which differ from the samples."""
    greedy = [group([1], 1), group([0], 2), group([1], 5), group([math.nan], 4)]
    sampled = [group([0] * 5, 9), group([0, 0, 0, 0, 1], 9), group([1] * 5, 9), group([math.nan, 1, 1, 1, 1], 9)]
    of_prompts = {"accuracy": [1, 0, 1], "pass@1": [0, 0.2, 1], "pass@2": [0, 0.4, 1], "pass@4": [0, 0.8, 1]}
    of_prompts |= {"pass@5": [0, 1, 1], "completion_length": [1, 2, 5, 4], "reward": [0, -1, 0]}
    of_prompts |= {"avg@5": of_prompts["pass@1"]}
    of_prompts |= {"reward/right": [1, 0, 1], "reward/penalty": [-1, -1, -1, -1]}
    expected = {f"eval/{name}": np.mean(x) for name, x in of_prompts.items()}
    expected |= {f"eval/{name}_ci": 1.96 * np.std(x, ddof=1) / len(x) ** 0.5 for name, x in of_prompts.items()}
    metrics = report.metrics_of_evaluation(greedy, sampled, NAMES)
    assert metrics.pop("eval/turns") is metrics.pop("eval/turns_ci") is None
    assert metrics == pytest.approx(expected)
    one, missing = group([1.0], 1, judged=False), group([math.nan], 1, judged=False)
    metrics = report.metrics_of_evaluation([missing, one], [one, one], NAMES)
    # The reward of the first prompt is missing. The mean is that of the second one, 1 + (-1), and has no interval.
    assert (metrics["eval/reward"], metrics["eval/reward_ci"]) == (0.0, None)
    assert metrics["eval/accuracy"] is metrics["eval/pass@1"] is metrics["eval/accuracy_ci"] is None


STEP = dict(step=1, reward=0.5, reward_std=0.5, without_signal=0.25, truncated=0.1, completion_length=7.0)
STEP |= dict(length_correct=5.0, length_incorrect=9.0, delay=0.0, entropy=None, grad_norm=0.1, loss=-0.0123)
STEP |= dict(learning_rate=2e-4, seconds_rollout=1.5, seconds_update=0.44)
SHORT = {"TORCHELASTIC_RUN_ID": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1.5"}
NOTES = [  # metrics, whether each of the four groups has an advantage -> the note, or "" for none
    (dict(truncated=0.9), [1] * 4, "nine of ten completions are cut off"),
    (dict(length_correct=None, first=3), [1] * 4, "no completion of this step is right"),
    (dict(reward_std=0.0, first=3), [1] * 4, "in every group of this step, all rewards are equal or missing; look"),
    (dict(reward_std=0.0, reward_weights=[0.0, 0.0]), [1] * 4, ""),  # distillation
    (dict(length_correct=None, reward_std=0.0, first=4), [1] * 4, ""),  # by now, that is not unusual
    (dict(length_correct=None, length_incorrect=None), [1] * 4, ""),  # nothing is judged
    (dict(reward=None, reward_std=None), [1] * 4, "in every group of this step, all rewards are equal or missing"),
    (dict(reward_std=None), [1] * 4, ""),  # groups of one
    (dict(delay=0.5), [1] * 4, "completions of earlier steps are trained on"),
    (dict(delay=0.5, tis_cap=2.0), [1] * 4, ""),  # tis_cap is a setting, which corrects for it
    (dict(grad_norm=0.0), [0, 0, 1, 1], "a gate or a mask drops every completion"),
    (dict(grad_norm=0.0), [0] * 4, ""),
]


@pytest.mark.parametrize("metrics, advantages, note", NOTES)
def test_what_keeps_a_run_from_learning_is_noted_once(tmp_path, capsys, metrics, advantages, note):
    groups = [group([0.0, 1.0], 1) for _ in advantages]
    for made, A in zip(groups, advantages):
        made.advantages = [torch.tensor([-A, A]), 0.0]  # of each token, or of the completion
    settings = dict(prompts_per_step=4, samples_per_step=0, tis_cap=metrics.get("tis_cap"), steps=4)
    settings |= dict(reward_weights=metrics.get("reward_weights", []))
    log = RunLog(Config(out=str(tmp_path), **settings), decode=str, reward_names=NAMES)
    log.track = None
    for step in range(metrics.get("first", 1), 5):
        log.write(STEP | metrics | {"step": step}, groups, [])
    shown = capsys.readouterr().out
    assert shown.count("note: ") == (1 if note else 0) and note in shown


@pytest.mark.parametrize("env, is_noted", [({}, False), ({"TORCHELASTIC_RUN_ID": "1"}, False), (SHORT, True)])
def test_a_step_that_is_longer_than_torchrun_waits_is_noted_once(tmp_path, capsys, monkeypatch, env, is_noted):
    monkeypatch.setattr(os, "environ", env)
    log = RunLog(Config(out=str(tmp_path), samples_per_step=0, steps=9), decode=str, reward_names=NAMES)
    log.track, made = None, group([0.0, 1.0], 1)
    made.advantages = [-1.0, 1.0]
    for step in (1, 2):
        log.write(STEP | {"step": step}, [made], [])  # it took 1.94 s
    noted = "note: a step takes longer than torchrun waits after Ctrl-C, 1.5 s; export TORCH_"
    assert capsys.readouterr().out.count(noted) == is_noted


def test_replies_have_no_log_probs_and_do_not_count_in_lengths():
    """A reply is what the task answers between two turns of the model. One completion has two turns, with a reply of
    two tokens between them. The other one has one turn."""
    several = Completion([1, 2, 3, 4, 5], [-0.126] * 5, False, written=[True, True, False, False, True])
    made = group([1.0, 0.0], 3)
    made.completions = [several, Completion([6], [-0.5], True, written=[True])]
    made.advantages, made.extras = [torch.tensor([0.5, 0.5, 0.0, 0.0, -1.0]), torch.tensor([2.0])], [{}, {}]
    log = RunLog(Config(out="run"), lambda ids: "".join(map(str, ids)), NAMES)
    line = log.sample_line(3, "train", made, 0)
    assert line["tokens"] == [["1", -0.13], ["2", -0.13], ["3", None], ["4", None], ["5", -0.13]]
    assert (line["length"], line["completion"], line["advantage"]) == (3, "12345", [0.5, 0.5, 0.0, 0.0, -1.0])
    step = report.metrics_of_groups([made], NAMES)
    assert (step["turns"], step["reply_length"], step["length_correct"], step["tokens"]) == (1.5, 1.0, 3.0, 4)
    # An evaluation counts only the turns and tokens of the first completion of each group, which is the greedy one.
    nan = group([math.nan], 9)
    assert {"eval/turns": 2, "eval/completion_length": 3}.items() <= report.metrics_of_evaluation(
        [made], [nan], NAMES
    ).items()
    (without_replies := group([1.0, 0.0], 3)).reward_parts[0, 1] = math.nan  # the other function gives it a reward
    plain = report.metrics_of_groups([without_replies, nan], NAMES)
    assert plain["turns"] is plain["reply_length"] is None and plain["without_reward"] == 1
    assert (plain["length_incorrect"], plain["equal_rewards"]) == (3.0, 0.5), "what is not judged is not wrong"


def test_peaks_of_memory_are_those_of_the_rank_with_the_highest(monkeypatch):
    monkeypatch.setattr(ranks, "gather", lambda made: [*made, 2 * made[0]])  # a second rank has peaks twice as high
    assert 0.1 < report.metrics_of_machine(30, 1.0, 2.0)["peak_memory_gb"] < 100, "without a GPU, that of the process"
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3e9)
    metrics = report.metrics_of_machine(30, 1.0, 2.0)
    names = "peak_memory_gb", "peak_memory_reserved_gb", "tokens_per_second"
    assert [metrics[name] for name in names] == [4.0, 6.0, 30 / (1.0 + 2.0)]


def test_every_line_that_is_written_is_json():
    columns = {"x": [math.inf, {"y": math.nan}], "day": date(2026, 1, 2), 3: (4,)}
    (line,) = report.as_json([{"step": 1, "loss": math.nan, "kl": 0.5, "columns": columns}]).splitlines()
    written = {"x": [None, {"y": None}], "day": "2026-01-02", "3": [4]}
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 1, "loss": None, "kl": 0.5, "columns": written}


def test_a_run_that_resumes_after_step_2_removes_later_lines(tmp_path, capsys):
    """The run repeats the later steps, so it writes their lines again. A kill has cut off the last line. A finished run
    shows its first and its last evaluation."""
    evaluated = [{"step": s, "eval/x": s, "eval/x_ci": s + 7, "eval/y": s or None} for s in range(4)]
    (tmp_path / "metrics.jsonl").write_text(report.as_json(evaluated) + '{"step": ')
    # Here "inf" is a text, not a number, so the line must stay as it is.
    (tmp_path / "samples.jsonl").write_text(samples := '{"step": 1, "completion": "inf"}\n')
    (log := RunLog(Config(out=str(tmp_path), steps=2), decode=str, reward_names=NAMES)).open(2)
    assert (tmp_path / "samples.jsonl").read_text() == samples
    assert [line["step"] for line in run_folder.read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    report.finished(tmp_path, already=True)
    said, *shown, _, _ = capsys.readouterr().out.splitlines()
    assert shown == ["step 0, held out: x 0.000", "step 2, held out: x 2.000  y 2.000"] and "is finished" in said
    # A run without a checkpoint starts from the beginning, and evaluates at step 0 again.
    assert log.open(0) is None and run_folder.read_lines(tmp_path / "metrics.jsonl") == []


def track_to_a_file(tracker: str, calls: Path, project: str | None) -> None:
    """Put a module in the place of this tracker that writes its calls to a file. The user has perhaps a project."""
    if project:
        os.environ[f"{tracker.upper()}_PROJECT"] = project

    def write(**call) -> None:
        with calls.open("a") as file:
            file.write(json.dumps(call) + "\n")

    def init(**about):
        write(**about)
        return SimpleNamespace(log=lambda figures, step: write(step=step, **figures))

    sys.modules[tracker] = SimpleNamespace(__spec__="it is installed", init=init, Table=dict)


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_run_that_goes_on_is_the_same_run_of_the_tracker(tmp_path, sorting, tracker):
    settings = sorting | dict(report_to=tracker, samples_per_step=3, save_every=1)
    for steps, overwrite, project in (1, False, None), (2, False, "theirs"), (2, True, "theirs"):
        track = partial(track_to_a_file, tracker, tmp_path / "calls", project)
        run(settings | dict(steps=steps, overwrite=overwrite), tmp_path / "out", track)
    calls = [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]
    first, step_1, second, step_2, third, *again = calls
    assert [line.pop("step") for line in (step_1, step_2, *again)] == [1, 2, 1, 2]
    known_by = {"wandb": "id", "trackio": "name"}[tracker]
    assert first["resume"] == "allow" and first[known_by] == second[known_by] != third[known_by]
    assert all(about["name"].startswith("out") and len(about.get("id", "-")) <= 64 for about in (first, third))
    assert [about["project"] for about in (first, second, third)] == ["grpo", "theirs", "theirs"]
    assert [about["config"]["steps"] for about in (first, second)] == [1, 2]
    assert [about.get("dir") for about in (first,)] == [str(tmp_path / "out") if tracker == "wandb" else None]
    lines = [line for line in samples(tmp_path / "out") if line["step"] == 1]
    table = again[0].pop("samples")
    assert table["columns"][:4] == ["kind", "prompt", "completion", "reward"] and len(lines) == 3
    assert table["data"] == [[line[name] for name in table["columns"]] for line in lines]
    metrics_of_step = run_folder.read_lines(tmp_path / "out/metrics.jsonl")[0]
    assert again[0] == {name: x for name, x in metrics_of_step.items() if x is not None and name != "step"}


def test_each_step_is_a_line_and_a_terminal_also_shows_the_progress_of_a_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := io.StringIO())
    screen.isatty = lambda: True
    settings = dict(steps=3, samples_per_step=0, eval_prompts=1, max_completion_length=9)
    log, tracked = RunLog(Config(out=str(tmp_path), **settings), str, NAMES), []
    writer, purged = SimpleNamespace(add_scalar=lambda *scalar: tracked.append(scalar), close=tracked.clear), []

    def opened(folder, purge_step):
        purged.append(purge_step)
        return writer

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=opened))
    log.track = report.open_tracker(Config(out=str(tmp_path), report_to="tensorboard"), after_step=4)
    report.open_tracker(Config(out=str(tmp_path), report_to="tensorboard"), after_step=0)
    assert purged == [5, 0], "a run that starts over evaluates again at step 0"
    now = iter((0.0, 90.0, 0.0))  # at the evaluation before the first step, after that step, and later
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: next(now)))
    log.evaluated = 1
    log.before_evaluation()
    log.generating(1, 5)
    log.write({"step": 0, "eval/x": 1.0}, [], [])
    for tokens in (*range(1, 41, 8), *range(1, 41)):  # in two parts, one of them as on a GPU
        log.generating(tokens, 3 if tokens < 17 else 2)
    made = group([1.0], 1)
    made.advantages = [1.0]
    log.write(STEP, [made], [])
    of_evaluation, _, of_step = screen.getvalue().partition("step 0, held out: x 1.000\n")
    assert of_evaluation.startswith("an evaluation samples 5 completions: 1 prompts, for each ")
    assert of_evaluation.endswith("evaluation, 5 completions: token     1,     5 unfinished,     0 finished\r")
    *progress, line = of_step.split("\r")
    assert progress[::3] == [f"step 1: token     1,     3 unfinished,     {n} finished" for n in (0, 3)]
    assert progress[5] == "step 1: token    33,     2 unfinished,     4 finished" and len(progress) == 6
    values = "reward 0.500  loss -0.012  learning_rate 2.0e-04  completion_length 7.000  truncated 0.100"
    # The two steps that are left are expected to take 90 s each, as this one did with all that is around it.
    assert line == f"step 1/3  {values}  without_signal 0.250  entropy -  1.9 s, 3 min left\n"
    log.write({"step": 2, "eval/x": 1.0}, [], [])
    # A metric without a value is not sent to the tracker.
    of_step_1 = [(name, x, 1) for name, x in STEP.items() if name not in ("step", "entropy")]
    assert tracked == [("eval/x", 1.0, 0), *of_step_1, ("eval/x", 1.0, 2)]
