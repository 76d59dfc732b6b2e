"""The figures of a step and of an evaluation."""

import itertools
import json
import math
import sys
from datetime import date

import numpy as np
import pytest
import torch

from advantage import group_advantages
from batch import Group
from config import Config, UserError
from infra import ranks
from infra.report import (
    RunLog,
    as_json,
    check_tracker,
    finished,
    of_evaluation,
    of_groups,
    of_machine,
    pass_at_k,
    share_of_advantage,
)
from rollout import Completion
from tasks import Task


def right(**columns) -> list[float]:
    raise NotImplementedError


TASK = Task([], [], [right], [1.0], correct="right")


@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_share_of_the_advantages_on_easy_and_hard_groups(scale):
    """Of binary rewards, with p right among G: sum |A| is 2 G p (1 - p), over the std where it is divided by."""
    G, right = 8, [1, 4, 6, 7, 8, 0]  # the last two are dead; 6 of 8 is the bound itself
    rewards = torch.tensor([[1.0] * n + [0.0] * (G - n) for n in right])
    advantages = group_advantages(rewards, scale, "mean", eps=0.0)
    groups = [Group([], [], r, r[:, None], a) for r, a in zip(rewards, advantages)]
    never_trained_on = Group([], [], torch.ones(G), torch.ones(G, 1))  # as dynamic sampling leaves behind
    p = torch.tensor(right) / G
    sizes = 2 * G * p * (1 - p)
    if scale == "group":
        sizes = sizes / (p * (1 - p) * G / (G - 1)).sqrt().clamp(min=1e-9)
    shares = (sizes / sizes.sum()).tolist()
    assert share_of_advantage([*groups, never_trained_on], TASK, 0.75, math.inf) == pytest.approx(shares[3])
    assert share_of_advantage([*groups, never_trained_on], TASK, -math.inf, 0.25) == pytest.approx(shares[0])
    assert shares[3] == pytest.approx(0.2075 if scale == "group" else 1 / 6, abs=1e-4)
    assert share_of_advantage(groups[4:], TASK, 0.75, math.inf) is None


def test_a_completion_without_a_reward_counts_for_nothing_in_them():
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, math.nan])  # 4 of 5 is easy, 4 of 6 would not be
    (advantages,) = group_advantages(rewards[None])
    group = Group([], [], rewards, rewards[:, None], advantages)
    assert share_of_advantage([group], TASK, 0.75, math.inf) == 1.0


@pytest.mark.parametrize("n", [1, 4, 6])
def test_pass_at_k_against_enumeration(n):
    for correct in range(n + 1):
        for k in range(1, n + 1):
            draws = list(itertools.combinations([1] * correct + [0] * (n - correct), k))
            assert pass_at_k(n, correct, k) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_one_reward_says_what_is_right_and_where_none_does_there_is_no_figure():
    """Of two rewards the first counts; the second, a penalty, makes the totals differ."""
    parts = torch.tensor([[1.0, -0.5], [0.0, 0.0], [1.0, -1.0], [math.nan, 0.0]], dtype=torch.float64)  # (G, K)
    completions = [Completion([7] * n, [0.0] * n, False) for n in (1, 2, 3, 4)]
    group = Group([1], completions, parts.nansum(1), parts, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    task = Task([], [], [right, max], [1.0, 1.0], correct="right")
    figures = of_groups([group], task)
    assert (figures["length_correct"], figures["length_incorrect"]) == (2.0, 3.0)
    greedy = [Group([1], completions[i : i + 1], parts[i].nansum()[None], parts[i : i + 1]) for i in range(4)]
    evaluated = of_evaluation(greedy, [group], task)
    assert (evaluated["eval/accuracy"], evaluated["eval/pass@1"], evaluated["eval/pass@4"]) == (0.5, 0.5, 1.0)
    assert (evaluated["eval/reward/right"], evaluated["eval/reward/max"]) == (pytest.approx(2 / 3), -0.375)

    task.correct = None
    figures, evaluated = of_groups([group], task), of_evaluation(greedy, [group], task)
    names = ["length_correct", "length_incorrect", "advantage_easy", "advantage_hard"]
    assert [figures[name] for name in names] == [None] * 4
    assert [evaluated[f"eval/{name}"] for name in ("accuracy", "pass@1", "pass@4")] == [None] * 3
    assert evaluated["eval/reward"] == 0.125


def test_the_figures_of_an_evaluation_are_means_over_prompts_with_their_intervals():
    """Three prompts of which 0, 1 and 5 of 5 samples are right; the interval is 1.96 standard errors to each side."""

    def group(values: list[float]) -> Group:
        rewards = torch.tensor(values, dtype=torch.float64)
        return Group([1], [Completion([7], [0.0], False)] * len(values), rewards, rewards[:, None])

    greedy, sampled = [[1.0], [0.0], [1.0]], [[0.0] * 5, [1.0] + [0.0] * 4, [1.0] * 5]
    figures = of_evaluation([*map(group, greedy)], [*map(group, sampled)], TASK)
    assert [name for name in figures if "@" in name and "_ci" not in name] == [f"eval/pass@{k}" for k in (1, 2, 4, 5)]
    of_prompts = {"accuracy": [1, 0, 1], "pass@1": [0, 0.2, 1], "pass@2": [0, 0.4, 1], "pass@5": [0, 1, 1]}
    of_prompts |= {"reward": [1, 0, 1], "reward/right": [1, 0, 1]}
    for name, values in of_prompts.items():
        assert figures[f"eval/{name}"] == pytest.approx(np.mean(values))
        assert figures[f"eval/{name}_ci"] == pytest.approx(1.96 * np.std(values, ddof=1) / 3**0.5)
    alone = of_evaluation([group([math.nan]), group([1.0])], [group([1.0])] * 2, Task([], [], [right], [1.0]))
    assert (alone["eval/reward"], alone["eval/reward_ci"], alone["eval/accuracy_ci"]) == (1.0, None, None)


def test_peak_memory_on_a_gpu_and_on_a_cpu(monkeypatch):
    on_cpu = of_machine(30, 1.0, 2.0)
    assert on_cpu["peak_memory_gb"] > 0 and on_cpu["peak_memory_reserved_gb"] is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 3e9)
    on_gpu = of_machine(30, 1.0, 2.0)
    assert (on_gpu["peak_memory_gb"], on_gpu["peak_memory_reserved_gb"]) == (2.0, 3.0)


def test_every_line_that_is_written_is_json():
    columns = {"x": [math.inf, {"y": math.nan}], "day": date(2026, 1, 2), 3: (4,)}
    (line,) = as_json([{"step": 1, "loss": math.nan, "kl": 0.5, "columns": columns}]).splitlines()
    written = {"x": [None, {"y": None}], "day": "2026-01-02", "3": [4]}
    assert json.loads(line) == {"step": 1, "loss": None, "kl": 0.5, "columns": written}
    assert "NaN" not in line and "Infinity" not in line


@pytest.mark.parametrize("value, count", [(0.5, 0), (math.nan, 1)])
def test_steps_without_a_signal_are_noted_once(tmp_path, capsys, value, count):
    log = RunLog(Config(out=str(tmp_path)), str, ["right"])
    dead = Group([1], [], torch.full((4,), value), None, torch.zeros(4))
    alive = Group([1], [], torch.tensor([0.0, 1.0]), None, torch.tensor([-1.0, 1.0]))
    for step, groups in enumerate([[dead] * 2] * 9 + [[dead, alive]] + [[dead]] * 30, 1):
        log.note_no_signal(step, groups)
    shown = capsys.readouterr().out.splitlines()
    missing = [line for line in shown if "no completion got a reward" in line]
    assert len(missing) == 2 * count and len(shown) == 2 * count + 1
    assert "nothing was learnt in 10 steps" in shown[-1] and f"{tmp_path}/samples.jsonl" in shown[-1]


def test_a_tracker_that_would_ask_for_a_password_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match="--report_to tracker_of_mine: not installed; pip install tracker_of_mine"):
        check_tracker("tracker_of_mine")
    (tmp_path / "wandb.py").write_text("KEY = None\ndef login(prompt):\n    return not prompt and KEY is not None\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"^--report_to wandb: not logged in; run wandb login, or set WANDB_MODE"):
        RunLog(Config(report_to="wandb", out="out"), str, [])
    with monkeypatch.context() as other_rank:
        other_rank.setattr(ranks, "rank", lambda: 1)
        RunLog(Config(report_to="wandb", out="out"), str, [])
    monkeypatch.setenv("WANDB_MODE", "offline")
    check_tracker("wandb")
    monkeypatch.delenv("WANDB_MODE")
    sys.modules["wandb"].KEY = "key"
    check_tracker("wandb")


def test_a_result_without_metrics_says_so(tmp_path, capsys):
    assert finished(tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path}/metrics.jsonl is gone or empty: there are no figures to show\n"
