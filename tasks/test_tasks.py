"""Tasks by name, with the user's own rows and rewards; the order of prompts; the scoring of completions."""

import asyncio
import json
import math
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import tasks
from batch import Group
from config import Config, UserError
from infra.command_line import ready
from rollout import Completion
from tasks import Task, call_rewards, load_task, task_defaults, task_module, task_names
from tasks._characters import EOS_ID, char_tokenizer
from tasks._rewards import overlong

NAMES = ["addition", "chain", "countdown", "data", "gsm8k", "guess", "gym", "math", "sorting", "tldr"]
TOKENIZER = char_tokenizer("0123456789+=[]: abc")
MINE = """
from tasks import Task
DEFAULTS = dict(max_completion_length=20)
def mine(prompts):
    pass
def load(config):
    return Task(rows := [{"prompt": "a"}, {"prompt": "c", "n": 1}], rows[::-1], [mine], [1.0], correct="mine")
"""
SHORT, SUM = "mine.py:short", "mine.py:exact_sum"
OWN_REWARDS = """
def short(completion_ids):
    return [-len(ids) for ids in completion_ids]
def exact_sum(completions):
    pass
def needs_answer(answer, other=None, **columns):
    pass
def needs_turns(turns):
    pass
"""
COLUMNS = {"answer": "1", "numbers": [1], "target": 1}  # of the user's rows
ROWS = [  # a task, settings, rows to train on, rows held out
    ("countdown", {"eval_prompts": 3}, 17, 3),
    ("gsm8k", {"eval_every": 0}, 20, 0),
    ("tldr", {"eval_data": ["held.jsonl"]}, 20, 3),
    ("addition", {"data": None, "eval_data": ["held.jsonl"], "steps": 0, "metrics_by": "target"}, 8192, 3),
    # A task that replies, so that its reward gets the turns. The user's reply function takes the place of its own.
    ("guess", {"data": None, "max_turns": 3}, 8879, 1121),
    ("guess", {"data": None, "max_turns": 3, "reply": SHORT}, 8879, 1121),
    ("data", {"data": None, "eval_data": ["held.jsonl"], "steps": 0, "reward": [SHORT]}, 0, 3),
    ("addition", {"reply": SHORT, "reward": ["mine.py:needs_turns"], "eval_every": 0}, 20, 0),
]
REWARDS = [  # a task, --reward, settings; then the names of its rewards, their weights, `correct` and `correct_at`
    ("addition", [SUM], {}, (["exact_sum"], [1.0], None, 1.0)),
    ("countdown", ["well_formed", SHORT], {}, (["well_formed", "short"], [0.1, 1.0], None, 1.0)),
    ("tldr", ["near_20"], {"reward_weights": [3]}, (["near_20"], [3], "near_20", 0.0)),
    ("tldr", ["near_20", SHORT], {"correct": "near_20"}, (["near_20", "short"], [1.0, 1.0], "near_20", 0.0)),
    ("tldr", ["near_20", SHORT], {"correct": "short"}, (["near_20", "short"], [1.0, 1.0], "short", 1.0)),
]


def group_of(row: dict, *texts: str) -> Group:
    ids = [[*TOKENIZER(text).input_ids, EOS_ID] for text in texts]
    return Group([], row, [Completion(text_ids, [0.0] * len(text_ids), truncated=False) for text_ids in ids])


def test_names_and_defaults_of_the_tasks():
    """The learning rate of a task's small model is too high for the user's own model."""
    assert [name for name in task_names() if name in NAMES] == NAMES, "a fork may have more tasks"
    for name in NAMES:
        defaults = task_defaults(name, None)
        assert defaults.keys() == tasks.REAL_MODEL_DEFAULTS.keys()
        has_small_model = name in ("addition", "chain", "guess", "sorting")
        assert (defaults["learning_rate"] > 1e-4) == has_small_model
        assert defaults["warmup_steps"] == (5 if has_small_model else 10)
        assert defaults["eval_every"] == defaults["save_every"] == (20 if has_small_model else 100)
        real = {"learning_rate": 1e-6, "eval_every": 100, "save_every": 100}
        assert task_defaults(name, "a model") == defaults | real
    assert task_module("gym:chain_sum:{}") is tasks.gym
    for name in ("chess", "_files", "test_tasks", "", "os.path", "../config", "addition:", "math:chain_sum"):
        with pytest.raises(UserError, match=f"^--task {name}: must be one of {', '.join(task_names())}$"):
            task_module(name)


def test_one_new_file_is_a_task(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])
    (tmp_path / "mine.py").write_text(MINE)
    # Of these five names, only `steps` is a setting that a task may set. There is no setting `step`.
    (tmp_path / "other.py").write_text("DEFAULTS = dict(temperature=1, step=1, delta=3, baseline='none', steps=1)")
    task = load_task(Config(task="mine", steps=7))
    rows = [{"prompt": "a", "n": None}, {"prompt": "c", "n": 1}]  # a reward gets every column for every completion
    assert (task.train, task.eval, task.of_run["max_steps"]) == (rows, rows[::-1], 7)
    assert task_defaults("mine", "a model") == tasks.REAL_MODEL_DEFAULTS | {"max_completion_length": 20}
    with pytest.raises(UserError, match="a task cannot set baseline, delta, step, temperature;"):
        task_module("other")
    (tmp_path / "wrong.py").write_text("DEFAULTS = dict(steps=-1)")
    with pytest.raises(UserError, match="--steps -1: must be int at least 0"):
        ready(Config(task="wrong", model="any"), on_gpu=False)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with files of rows and a file with a reward."""
    monkeypatch.setitem(sys.modules, "datasets", None)  # so that nothing can be downloaded
    monkeypatch.setattr(sys, "path", [*sys.path])  # a reward's folder is appended
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test
    for name, n in (("rows", 20), ("held", 3)):
        rows = [{"prompt": f"{name} {i}"} | COLUMNS for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "poor.jsonl").write_text('{"prompt": "poor"}\n' * 2)
    (tmp_path / "mine.py").write_text(OWN_REWARDS)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "settings", "train", "held_out"), ROWS)
def test_the_users_rows_replace_those_of_the_task(folder, name, settings, train, held_out):
    task = load_task(Config(**{"task": name, "data": "rows.jsonl"} | settings))
    assert (len(task.train), len(task.eval), task.notes) == (train, held_out, [])
    assert all("eval_data" not in settings or row["prompt"].startswith("held") for row in task.eval)
    assert getattr(task.reply, "__name__", None) == ("short" if "reply" in settings else {"guess": "reply"}.get(name))


@pytest.mark.parametrize(("task", "rewards", "settings", "expected"), REWARDS)
def test_a_run_can_use_rewards_of_its_task_and_of_files(folder, task, rewards, settings, expected):
    """The task's rewards keep their weights, and its `correct` counts unless --correct names another reward."""
    task = load_task(Config(task=task, data="rows.jsonl", reward=rewards, eval_every=0, **settings))
    assert (task.reward_names, task.weights, task.correct, task.correct_at) == expected
    assert task.graded == (task.correct_at == 0.0), "only tldr's near_20 is graded, and it is right at 0"


POOR = dict(data="rows.jsonl", eval_data=["poor.jsonl"])
MISSING = "reward function needs_answer: missing a .*'answer'"
WRONG = [  # settings of the rewards -> the error
    (dict(reward=[SUM, "exact_sum"]), "needs one weight and a name of its own for each reward"),
    (dict(reward_weights=[1, 2]), "needs one weight and a name of its own for each reward"),
    (dict(correct="better"), "--correct better: must be one of the rewards, exact_sum$"),
    (dict(max_turns=3), "--max_turns 3: nothing replies"),
    (dict(metrics_by="grade"), "--metrics_by grade: must be one of prompt, answer$"),
    (dict(POOR, reward=[SHORT], metrics_by="answer"), "--metrics_by answer: must be one of prompt$"),
    (dict(task="data", reward=["mine.py:needs_answer"], data="poor.jsonl"), MISSING),
    (dict(task="data", reward=["mine.py:needs_answer"], **POOR), MISSING),
]


@pytest.mark.parametrize(("settings", "message"), WRONG)
def test_rewards_that_cannot_be_told_apart_or_weighted(folder, settings, message):
    with pytest.raises(UserError, match=f"^{message}"):
        load_task(Config(**dict(task="addition") | settings))


def test_each_epoch_has_every_row_once_in_the_order_of_earlier_versions():
    rows = [{"prompt": i} for i in range(50)]
    task = Task(rows, [], [], [])
    order = [i for epoch in range(4) for i in np.random.Generator(np.random.PCG64([3, epoch])).permutation(50)]
    for first, n in (0, 200), (120, 40), (49, 1), (50, 50):
        assert task.rows_from(first, n, seed=3) == [rows[i] for i in order[first : first + n]]


def test_what_is_right():
    """Of two rewards, the second one, `min`, decides: at least 0.5 is right, up to rounding. Where it gave no value, an
    answer is neither right nor wrong. The functions are not called; only their names matter."""
    task = Task([], [], [max, min], [1.0, 1.0], correct="min", correct_at=0.5)
    parts = torch.tensor([[0.0, 0.5], [1.0, 0.5 - 1e-12], [1.0, 0.4], [1.0, math.nan]], dtype=torch.float64)
    assert str(task.right(parts).tolist()) == "[1.0, 1.0, 0.0, nan]"
    assert task.right(parts[3:]) is None, "it judged none of this group"
    assert Task([], [], [max, min], [1.0, 1.0]).right(parts) is None


def test_call_rewards_calls_each_reward_once_with_everything_it_needs():
    """Two steps are done. The first prompt is a text, and the second a chat."""
    calls, events = [], []

    @contextmanager
    def time_limit(what: str):
        events.append(what)
        yield
        events.append("end")

    async def first(trainer_state, log_metric, log_extra, **columns):
        await asyncio.sleep(0)
        events.append("awaited")
        calls.append(columns)
        for i in range(3):
            log_metric("i", torch.tensor(i))
        log_extra("text", iter(columns["completions"]))
        return [trainer_state.global_step, None, 3.0]

    def second(n, trainer_state, log_metric, log_extra):
        log_metric("n", n[0])
        log_extra("n", torch.tensor(n))
        log_extra("kind", [int] * 3)  # what has no form in JSON is written as text
        yield from [trainer_state.max_steps] * 3
        events.append("values")

    prompts = ["1+1=", [{"role": "user", "content": "1+1"}]]
    rows = [{"prompt": x, "n": n, "completion": [n, None], "more": {"deep": [0.5]}} for n, x in enumerate(prompts, 1)]
    task = Task(rows, [], [first, second], [1.0, 1.0], of_run=dict(max_steps=100), time_limit=time_limit)
    rows[0] |= {"prompt_ids": [1], "_index": 0}  # these are not for rewards
    groups = [group_of(rows[0], "a", "b"), group_of(rows[1], "c")]
    groups[1].completions[0].truncated = True
    judged, logged = call_rewards(task, groups, TOKENIZER, 2)
    texts = ["a", "b", [{"role": "assistant", "content": "c"}]]
    values = [[step, 100] for step in (2.0, math.nan, 3.0)]
    extras = [dict(text=text, n=n, kind=str(int)) for text, n in zip(texts, (1, 1, 2))]
    found = [(parts.tolist(), each) for parts, each in judged]
    np.testing.assert_equal(found, [(values[:2], extras[:2]), (values[2:], extras[2:])])
    assert {parts.dtype for parts, _ in judged} == {torch.float64}
    assert logged == [("i", 0.0), ("i", 1.0), ("i", 2.0), ("n", 1.0)]
    assert events == ["reward function first", "awaited", "end", "reward function second", "values", "end"]
    expected = {name: [rows[i][name] for i in (0, 0, 1)] for name in ("n", "completion", "more")}
    expected |= {"prompts": [prompts[i] for i in (0, 0, 1)], "completions": texts}
    ids = [[*TOKENIZER(text).input_ids, EOS_ID] for text in "abc"]
    assert calls == [expected | {"truncated": [False, False, True], "completion_ids": ids}]
    assert call_rewards(task, [], TOKENIZER, 2) == ([], []) and len(calls) == 1, "without groups no reward is called"


def test_the_reward_overlong_is_that_of_dapo_for_every_task():
    """2503.14476, eq. 13, with a limit of 20 and a buffer of 8: 0 up to 12 tokens, -1/2 at 16, and -1 from 20 on. By
    default, the buffer is a fifth of the limit."""
    state = SimpleNamespace(max_completion_length=20, overlong_buffer=8)
    ids = [[0] * n for n in (0, 12, 16, 20, 25)]
    assert overlong(ids, state) == [0.0, 0.0, -0.5, -1.0, -1.0]
    assert overlong(ids, SimpleNamespace(max_completion_length=20, overlong_buffer=None)) == [0.0, 0.0, 0.0, -1.0, -1.0]
    assert overlong(ids[:2], SimpleNamespace(max_completion_length=4, overlong_buffer=None)) == [0.0, -1.0]
    how = dict(max_completion_length=4, overlong_buffer=2, steps=0)
    task = load_task(Config(task="addition", reward=["exact_sum", "overlong"], **how))
    groups = [group_of({"prompt": "1+1=", "answer": "2"}, "11", "1111")]  # with their end tokens, 3 and 5 tokens
    ((parts, _),), _ = call_rewards(task, groups, TOKENIZER, 0)
    assert parts[:, 1].tolist() == [-0.5, -1.0] and task.of_run["max_steps"] == 1, "a reward may divide by it"
