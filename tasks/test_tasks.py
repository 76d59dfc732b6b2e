"""A task by its name with files of one's own, the order of its prompts, and the scoring of completions."""

import contextlib
import importlib
import json
import math
import sys

import numpy as np
import pytest
import torch

import tasks
from batch import Group
from config import Config, UserError
from rollout import Completion
from tasks import Task, load_task, score, task_defaults, task_file, task_names
from tasks._characters import EOS_ID, char_tokenizer

TOKENIZER = char_tokenizer("0123456789+=[]: abcredRED")


def group_of(row: dict, *texts: str) -> Group:
    ids = [[*TOKENIZER(text).input_ids, EOS_ID] for text in texts]
    return Group([], row, [Completion(of_one, [0.0] * len(of_one), truncated=False) for of_one in ids])


SHOUT = """
from tasks import Task, text_of

DEFAULTS = dict(max_completion_length=20)

def in_capitals(prompts, completions, completion_ids, word, **columns):
    return [float(text_of(c).strip() == w.upper()) for c, w in zip(completions, word, strict=True)]

def load(config):
    rows = [{"prompt": f"Shout: {word}", "word": word} for word in ["red", "green", "blue"]]
    return Task(train=rows[1:], eval=rows[:1], rewards=[in_capitals], weights=[1.0], correct="in_capitals")
"""


@pytest.fixture
def add_task(tmp_path, monkeypatch):
    """-> a function that puts one more file beside the tasks: mine.py"""
    monkeypatch.setattr(tasks, "__path__", [*tasks.__path__, str(tmp_path)])

    def add(text: str) -> None:
        (tmp_path / "mine.py").write_text(text)
        importlib.invalidate_caches()

    yield add
    sys.modules.pop("tasks.mine", None)
    vars(tasks).pop("mine", None)


def test_the_tasks_that_are_there():
    """What suits the small model of some of them is too fast for one of the user's own."""
    assert task_names() == ["addition", "chain", "countdown", "data", "gsm8k", "sorting", "tldr"]
    for name in task_names():
        defaults = task_defaults(name, None)
        assert defaults.keys() == tasks.REAL_MODEL_DEFAULTS.keys()
        assert (defaults["learning_rate"] > 1e-4) == (name in ("addition", "chain", "sorting"))
        assert task_defaults(name, "a model") == defaults | {"learning_rate": 1e-6}


def test_one_new_file_is_a_task(add_task):
    add_task(SHOUT)
    task = load_task(Config(task="mine", steps=7))
    assert [row["word"] for row in task.eval] == ["red"] and len(task.train) == 2 and task.max_steps == 7
    assert score(task, [group_of(task.eval[0], "RED", "red")], TOKENIZER, 1) == ([([[1.0], [0.0]], [{}, {}])], [])
    assert task_defaults("mine", "a model") == tasks.REAL_MODEL_DEFAULTS | {"max_completion_length": 20}


@pytest.mark.parametrize(
    ("old", "new", "error", "words"),
    [
        ("rows = ", "rows = config.dota or ", AttributeError, "dota"),
        (
            "max_completion_length=",
            "temperature=1, step=",
            UserError,
            "mine.py: DEFAULTS cannot hold step, temperature$",
        ),
        ("eval=rows[:1]", "eval=[]", UserError, "^--task mine has no held-out prompts: .*, or set --eval_every 0$"),
    ],
)
def test_a_file_that_is_no_task(add_task, old, new, error, words):
    add_task(SHOUT.replace(old, new))
    with pytest.raises(error, match=words):
        load_task(Config(task="mine"))
    if new == "eval=[]":
        assert load_task(Config(task="mine", eval_every=0)).eval == []


@pytest.mark.parametrize("name", ["chess", "_files", "test_tasks", "", "os.path", "../config"])
def test_a_name_that_is_no_task_lists_those_that_are(name):
    with pytest.raises(UserError) as told:
        task_file(name)
    assert str(told.value) == f"--task {name}: must be one of {', '.join(task_names())}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """With rows and a reward."""
    monkeypatch.setitem(sys.modules, "datasets", None)  # nothing is asked of the hub
    for name, n in (("rows", 20), ("held", 3)):
        rows = [{"prompt": f"{name} {i}"} for i in range(n)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text("def short(completion_ids):\n    return [-len(ids) for ids in completion_ids]\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "settings", "train", "held_out", "notes"),
    [
        ("addition", {}, 16, 4, ["4 prompts, a fifth of rows.jsonl, are held out, not 256"]),
        ("countdown", {"eval_prompts": 4}, 16, 4, []),
        ("gsm8k", {"eval_every": 0}, 20, 0, []),
        ("tldr", {"eval_data": "held.jsonl"}, 20, 3, []),
    ],
)
def test_rows_of_ones_own_replace_the_tasks(folder, name, settings, train, held_out, notes):
    task = load_task(Config(task=name, data="rows.jsonl", **settings))
    assert (len(task.train), len(task.eval), task.notes) == (train, held_out, notes)
    assert len({row["prompt"] for row in task.train + task.eval}) == train + held_out
    assert all(row["prompt"].startswith("held") for row in task.eval) or "eval_data" not in settings


SHORT = "mine.py:short"


@pytest.mark.parametrize(
    ("task", "rewards", "settings", "expected"),
    [  # -> names, weights, what says what is right, and from which value on
        ("addition", ["exact_sum", SHORT], {}, (["exact_sum", "short"], [1.0, 1.0], "exact_sum", 1.0)),
        ("addition", [SHORT], {}, (["short"], [1.0], None, 1.0)),
        ("addition", [SHORT, SHORT], {"correct": "short_2"}, (["short", "short_2"], [1.0, 1.0], "short_2", 1.0)),
        ("countdown", ["well_formed", SHORT], {}, (["well_formed", "short"], [0.1, 1.0], None, 1.0)),
        ("countdown", ["equation"], {"reward_weights": [3]}, (["equation"], [3], "equation", 1.0)),
        ("tldr", ["near_20", SHORT], {}, (["near_20", "short"], [1.0, 1.0], "near_20", 0.0)),
        ("tldr", ["near_20", SHORT], {"correct": "short"}, (["near_20", "short"], [1.0, 1.0], "short", 1.0)),
        ("tldr", ["near_20"], {"correct": "near_20"}, (["near_20"], [1.0], "near_20", 0.0)),
        ("data", [SHORT], {"correct": "better"}, "^--correct better: must be one of the rewards, short$"),
        ("data", ["exact_sum"], {}, "^--reward exact_sum: must be file.py:function or package.module:function$"),
    ],
)
def test_rewards_of_the_task_stand_beside_those_of_files(folder, task, rewards, settings, expected):
    """With their weights; and what the task calls right stays so, unless --correct says otherwise."""
    config = Config(task=task, data="rows.jsonl", reward=rewards, eval_every=0, dynamic_sampling=3, **settings)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            load_task(config)
    else:
        task = load_task(config)
        assert (task.reward_names, task.weights, task.correct, task.correct_at) == expected
        notes = ["dynamic_sampling: nothing says which answers are right"] * (task.correct is None)
        assert [note.split(" (")[0] for note in task.notes] == notes


def test_each_row_once_an_epoch_in_another_order():
    task = Task([{"prompt": str(i)} for i in range(50)], [], [], [])
    epochs = [[row["prompt"] for row in task.draw(50 * epoch, 50, seed=3)] for epoch in range(4)]
    assert all(sorted(epoch) == sorted(map(str, range(50))) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert [row["prompt"] for row in task.draw(120, 40, seed=3)] == epochs[2][20:] + epochs[3][:10], "the same again"
    assert epochs[0] != [row["prompt"] for row in task.draw(0, 50, seed=4)]
    order = np.random.Generator(np.random.PCG64([3, 1])).permutation(50)
    assert epochs[1] == list(map(str, order)), "runs that were made are continued in their order"


def test_what_is_right():
    parts = torch.tensor([[[0.0, 0.5], [1.0, 0.5 - 1e-12]], [[1.0, 0.4], [1.0, math.nan]]], dtype=torch.float64)
    task = Task([], [], [max, min], [1.0, 1.0], correct="min", correct_at=0.5)
    assert task.right(parts).tolist() == [[True, True], [False, False]]
    assert Task([], [], [max, min], [1.0, 1.0]).right(parts) is None


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "1+1"}]])
def test_score_calls_each_reward_once_with_everything_it_needs(prompt):
    calls, limited = [], []

    def first(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **columns):
        calls.append((prompts, completions, completion_ids, answer, columns))
        return [0.0, 1.0, 2.0]

    def second(completions, **columns):
        return [None, 5.0, None]

    rows = [{"prompt": prompt, "answer": x, "completion": [x, None], "more": {"deep": [0.5]}} for x in ("2", "3")]
    task, groups = Task(rows, [], [first, second], [1.0, 1.0]), [group_of(rows[0], "a", "b"), group_of(rows[1], "c")]
    scores, _ = score(task, groups, TOKENIZER, 1, lambda name: contextlib.nullcontext(limited.append(name)))
    for (values, _), expected in zip(scores, ([[0.0, np.nan], [1.0, 5.0]], [[2.0, np.nan]]), strict=True):
        np.testing.assert_array_equal(values, expected)
    assert limited == ["first", "second"]
    texts = ["a", "b", "c"]
    ids = [[*TOKENIZER(text).input_ids, EOS_ID] for text in texts]
    columns = {name: [rows[i][name] for i in (0, 0, 1)] for name in ("completion", "more")}
    texts = texts if prompt == "1+1=" else [[{"role": "assistant", "content": text}] for text in texts]
    assert calls == [([prompt] * 3, texts, ids, ["2", "2", "3"], columns)]


@pytest.mark.parametrize(("max_steps", "step", "told"), [(100, 3, [2, 100]), (0, 0, [0, 1])])
def test_a_reward_is_told_the_step_and_can_log(max_steps, step, told):
    def first(completions, trainer_state, log_metric, log_extra):
        for i in range(3):
            log_metric("i", torch.tensor(i))
        log_extra("text", (text.upper() for text in completions))
        return [trainer_state.global_step] * 3

    def second(n, trainer_state, log_metric, log_extra):
        log_metric("n", n[0])
        log_extra("n", torch.tensor(n))
        log_extra("kind", [int] * 3)  # what has no form in JSON is written as text
        return [trainer_state.max_steps] * 3

    rows, kind = [{"prompt": "1", "n": n} for n in (1, 2)], str(int)
    task = Task(rows, [], [first, second], [1.0, 1.0], max_steps=max_steps)
    scores, metrics = score(task, [group_of(rows[0], "a", "bb"), group_of(rows[1], "c")], TOKENIZER, step)
    extras = [dict(text="A", n=1, kind=kind), dict(text="BB", n=1, kind=kind)], [dict(text="C", n=2, kind=kind)]
    assert scores == [([told] * 2, extras[0]), ([told], extras[1])]
    assert metrics == [("logged/i", 0.0), ("logged/i", 1.0), ("logged/i", 2.0), ("logged/n", 1.0)]
    assert all(type(value) is float for _, value in metrics)


@pytest.mark.parametrize("wrong", [[1], "abcd", None])
def test_a_log_of_the_wrong_length(wrong):
    task = Task([], [], [lambda log_extra, **given: log_extra("x", wrong)], [1.0])
    with pytest.raises(UserError, match=r"log_extra\('x', .*\): 4 values were due, in a list"):
        score(task, [group_of({"prompt": "1"}, *"abca")], TOKENIZER, 1)
    assert score(task, [], TOKENIZER, 1) == ([], []), "nothing is called where there is nothing to score"
