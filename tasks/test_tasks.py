"""A task by its name, prompts, rewards: what goes in, what comes out, and what each mistake says."""

import asyncio
import contextlib
import functools
import importlib
import inspect
import json
import math
import os
import random
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch

import tasks
from config import Config, UserError
from rollout import Completion
from tasks import Task, encode_prompt, load_task, score, task_defaults, task_file, task_names
from tasks._characters import EOS_ID, char_tokenizer
from tasks._rewards import call_rewards, check_signature, load_reward, say_once

CHAT = [{"role": "user", "content": "1+1"}]
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}:{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return char_tokenizer("0123456789+=[]: abc")


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = char_tokenizer("0123456789+=[]: abc")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def task_of(*prompts, held_out=()) -> Task:
    return Task([{"prompt": p} for p in prompts], [{"prompt": p} for p in held_out], [], [])


def completion(tokenizer, text: str) -> Completion:
    ids = [*tokenizer(text).input_ids, EOS_ID]
    return Completion(ids, [0.0] * len(ids), truncated=False)


# ---- A task by its name ----

SHOUT = '''
"""A word is answered in capitals."""

from tasks import Task, text_of

DEFAULTS = dict(max_completion_length=20)


def in_capitals(prompts, completions, completion_ids, word, **columns):
    return [float(text_of(c).strip() == w.upper()) for c, w in zip(completions, word, strict=True)]


def load(config):
    words = ["red", "green", "blue", "white", "black", "brown"]
    rows = [{"prompt": [{"role": "user", "content": f"Shout: {word}"}], "word": word} for word in words]
    return Task(train=rows[2:], eval=rows[:2], rewards=[in_capitals], weights=[1.0], correct="in_capitals")
'''


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
    assert task_names() == ["addition", "chain", "countdown", "data", "gsm8k", "sorting", "tldr"]
    for name in task_names():
        assert task_file(name).__doc__ and task_defaults(name, None).keys() == tasks.REAL_MODEL_DEFAULTS.keys()
    assert [name for name in task_names() if hasattr(task_file(name), "model")] == ["addition", "chain", "sorting"]


def test_one_new_file_is_a_task(add_task):
    add_task(SHOUT)
    assert "mine" in task_names()
    task = load_task(Config(task="mine"))
    assert [row["word"] for row in task.eval] == ["red", "green"] and len(task.train) == 4
    letters = char_tokenizer("redRED")
    group = [completion(letters, text) for text in ("RED", "red")]
    assert score(task, task.eval[:1], [group], letters) == [[[1.0], [0.0]]]
    assert task_defaults("mine", "a model") == tasks.REAL_MODEL_DEFAULTS | {"max_completion_length": 20}


@pytest.mark.parametrize("name", ["addition", "chain", "sorting"])
def test_a_model_of_ones_own_does_not_learn_at_the_rate_of_a_small_one(name):
    assert task_defaults(name, None)["learning_rate"] > 1e-4
    assert task_defaults(name, "a model") == task_defaults(name, None) | {"learning_rate": 1e-6}


@pytest.mark.parametrize("name", ["chess", "_files", "test_tasks", "", "os.path", "../config"])
def test_a_name_that_is_no_task_lists_those_that_are(name):
    with pytest.raises(UserError) as told:
        task_file(name)
    assert str(told.value) == f"--task {name}: must be one of {', '.join(task_names())}"


LOAD = "def load(config):\n    "
BROKEN = [  # the file, the message, what its frames show
    ("1 / 0\n", "tasks/mine.py could not be loaded: ZeroDivisionError: division by zero", "1 / 0"),
    ("import no_such_module\n", "tasks/mine.py could not be loaded: ModuleNotFoundError: No module", "no_such_module"),
    ("def load(:\n", "tasks/mine.py could not be loaded: SyntaxError: invalid syntax (mine.py, line 1)", "^"),
    ("raise SystemExit(0)\n", "tasks/mine.py could not be loaded: SystemExit: 0", "SystemExit(0)"),
    ("", "tasks/mine.py needs DEFAULTS, a dictionary", None),
    ("DEFAULTS = 3\n", "tasks/mine.py needs DEFAULTS, a dictionary", None),
    ("DEFAULTS = {}\n", "tasks/mine.py needs a function load(config) that returns a Task", None),
    ("DEFAULTS = {}\nload = 3\n", "tasks/mine.py needs a function load(config) that returns a Task", None),
    (f"DEFAULTS = dict(step=3)\n{LOAD}pass\n", "tasks/mine.py has step in DEFAULTS; what a task can set is ", None),
    (f"DEFAULTS = dict(temperature=2)\n{LOAD}pass\n", "tasks/mine.py has temperature in DEFAULTS; what a task", None),
    (f"DEFAULTS = {{}}\n{LOAD}return config.dota\n", "load raised AttributeError: 'Config' object has no", "dota"),
    ("DEFAULTS = {}\ndef load(): pass\n", "load raised TypeError: load() takes 0 positional arguments", None),
    (f"DEFAULTS = {{}}\n{LOAD}return [], []\n", "load returned a tuple where a Task was due", None),
]


@pytest.mark.parametrize(("text", "message", "shown"), BROKEN)
def test_a_file_that_is_no_task_gets_a_line_and_its_own_frames(add_task, tmp_path, text, message, shown):
    add_task(text)
    with pytest.raises(UserError) as told:
        load_task(Config(task="mine"))
    assert str(told.value).startswith(f"--task mine: {message}") and "\n" not in str(told.value)
    frames = getattr(told.value, "__notes__", [])
    assert len(frames) == (shown is not None)
    assert all(frame.startswith(f'  File "{tmp_path}/mine.py", line ') and shown in frame for frame in frames)


def test_a_mistake_that_the_task_itself_tells_is_told_as_it_is(add_task):
    add_task(f"from config import UserError\nDEFAULTS = {{}}\n{LOAD}raise UserError('first get the rows')\n")
    with pytest.raises(UserError, match=r"^first get the rows$"):
        load_task(Config(task="mine"))


@pytest.mark.parametrize("name", ["countdown", "gsm8k", "tldr"])
def test_rows_of_ones_own_replace_the_tasks(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # nothing is asked of the hub
    rows = [{"prompt": f"p{i}", "answer": i, "numbers": [i], "target": i} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = Config(task=name, data=str(tmp_path / "rows.jsonl"), eval_prompts=1)
    assert task_file(name).load(config).train == []
    task = load_task(config)
    assert sorted(row["prompt"] for row in task.train + task.eval) == ["p0", "p1", "p2", "p3"]
    assert len(task.eval) == 1
    groups = [[completion(char_tokenizer("1"), "1")]] * 4
    assert np.shape(score(task, rows, groups, char_tokenizer("1"))) == (4, 1, len(task.rewards))


@pytest.mark.parametrize("name", ["gsm8k", "tldr"])
def test_without_datasets_the_message_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        load_task(Config(task=name))


def test_rows_and_rewards_from_files(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}"}}\n' for i in range(20)))
    (tmp_path / "mine.py").write_text("def good(completions, **columns):\n    return [1.0] * len(completions)\n")
    files = dict(data=str(tmp_path / "rows.jsonl"), reward=[f"{tmp_path}/mine.py:good"] * 2, reward_weights=[0.5, 2.0])
    task = load_task(Config(task="data", **files, eval_prompts=4))
    assert len(task.train) == 16 and len(task.eval) == 4 and task.notes == []
    assert task.weights == [0.5, 2.0] and task.correct is None
    assert load_task(Config(**files, task="data", correct="good_2", eval_prompts=4)).correct == "good_2"
    with pytest.raises(UserError, match="--correct better: must be one of the rewards, good, good_2"):
        load_task(Config(**files, task="data", correct="better", eval_prompts=4))
    assert task.reward_names == ["good", "good_2"]
    assert len(load_task(Config(task="data", **files, eval_prompts=4, eval_every=0)).train) == 20


def test_held_out_prompts_of_ones_own(tmp_path):
    for name, n in (("rows", 30), ("held", 3)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(f'{{"prompt": "{name} {i}", "answer": "1"}}\n' for i in range(n))
        )
    task = load_task(Config(task="addition", data=f"{tmp_path}/rows.jsonl"))
    assert (len(task.train), len(task.eval)) == (24, 6)
    assert task.notes == [f"6 prompts, a fifth of {tmp_path}/rows.jsonl, are held out, not 256"]
    task = load_task(Config(task="addition", data=f"{tmp_path}/rows.jsonl", eval_data=f"{tmp_path}/held.jsonl"))
    assert len(task.train) == 30 and [row["prompt"] for row in task.eval] == ["held 0", "held 1", "held 2"]
    assert task.notes == []
    assert len(load_task(Config(task="addition", eval_data=f"{tmp_path}/held.jsonl")).eval) == 3


def test_rewards_of_the_task_stand_beside_those_of_files(tmp_path):
    """With their weights; and what the task calls right stays so, unless --correct says otherwise."""
    (tmp_path / "mine.py").write_text("def short(completion_ids):\n    return [-len(ids) for ids in completion_ids]\n")
    short = f"{tmp_path}/mine.py:short"

    def loaded(task, *names, **settings) -> tuple:
        task = load_task(Config(task=task, reward=[*names], **settings))
        return task.reward_names, task.weights, task.correct, task.correct_at

    assert loaded("addition", "exact_sum", short) == (["exact_sum", "short"], [1.0, 1.0], "exact_sum", 1.0)
    assert loaded("addition", short) == (["short"], [1.0], None, 1.0)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "numbers": [1], "target": 1}\n{"prompt": "b"}\n')
    rows = dict(data=f"{tmp_path}/rows.jsonl", eval_every=0)
    names = ["well_formed", short, "equation"]
    assert loaded("countdown", *names, **rows)[1:] == ([0.1, 1.0, 1.0], "equation", 1.0)
    assert loaded("countdown", *names, **rows, reward_weights=[3, 2, 1])[1] == [3, 2, 1]
    assert loaded("tldr", "near_20", short, **rows)[2:] == ("near_20", 0.0)
    assert loaded("tldr", "near_20", short, **rows, correct="short")[2:] == ("short", 1.0)
    assert loaded("tldr", "near_20", **rows, correct="near_20")[2:] == ("near_20", 0.0)
    for names, count in (("exact_sum", short), 0), ((short,), 1):
        notes = load_task(Config(task="addition", reward=[*names], dynamic_sampling=3)).notes
        assert len(notes) == count and all("nothing says which answers are right" in note for note in notes)


def test_evaluation_needs_held_out_prompts(add_task):
    add_task(SHOUT.replace("eval=rows[:2]", "eval=[]"))
    with pytest.raises(UserError, match="--task mine has no held-out prompts to evaluate on: set --eval_every 0"):
        load_task(Config(task="mine"))
    assert load_task(Config(task="mine", eval_every=0)).eval == []


def test_each_row_once_an_epoch_in_another_order():
    task = task_of(*map(str, range(50)))
    epochs = [[task.draw(50 * epoch + i, seed=3)["prompt"] for i in range(50)] for epoch in range(4)]
    assert all(sorted(epoch) == sorted(map(str, range(50))) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert epochs[2] == [task.draw(100 + i, seed=3)["prompt"] for i in range(50)], "the same every time"
    assert epochs[0] != [task.draw(i, seed=4)["prompt"] for i in range(50)]


# ---- Prompts ----


def test_a_string_is_taken_as_it_is_and_messages_go_through_the_template(chat_tokenizer):
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, "1+1=")) == "1+1="
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, CHAT)) == "[1+1]:"
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, CHAT * 2)) == "[1+1][1+1]:"


def test_an_end_token_that_the_tokenizer_adds_is_taken_off(tokenizer):
    class Ending:
        eos_token_id = EOS_ID

        def __call__(self, text, add_special_tokens=True):
            ids = tokenizer(text).input_ids
            return {"input_ids": [*ids, EOS_ID] if add_special_tokens else ids}

    assert encode_prompt(Ending(), "1+1=") == tokenizer("1+1=").input_ids
    written = "1+1=" + tokenizer.eos_token
    assert encode_prompt(tokenizer, written)[-1] == EOS_ID, "one that the user wrote stays"


# ---- Rewards ----

COLUMNS = dict(prompts=["p0", "p1", "p2"], completions=["c0", "c1", "c2"], completion_ids=[[5], [6], [7]])


def call(reward, **columns):
    return call_rewards([reward], COLUMNS | columns)[0]


def values_of(values):
    def mine(prompts, completions, completion_ids, **columns):
        return values

    return call(mine)


@pytest.mark.parametrize(
    "values",
    [
        [1.0, None, -2.5],
        (1, None, -2.5),
        [True, None, np.float32(-2.5)],
        [torch.tensor(1.0), None, torch.tensor([-2.5])],
        [np.int64(1), None, np.array(-2.5)],
        torch.tensor([1.0, math.nan, -2.5]),
        np.array([1.0, math.nan, -2.5]),
        iter([1.0, None, -2.5]),
        map(float, ["1", "nan", "-2.5"]),
        (x for x in (1, None, -2.5)),
    ],
)
def test_numbers_and_none_are_fine(values):
    got = values_of(values)
    assert got[0] == 1.0 and np.isnan(got[1]) and got[2] == -2.5
    assert all(type(value) is float for value in got)


@pytest.mark.parametrize(
    ("values", "at", "what"),
    [
        ([1.0, 2.0], 0, "returned 2 values where 3 were due"),
        ([1.0] * 4, 0, "returned 4 values where 3 were due"),
        (torch.tensor([1.0]), 0, "returned 1 values where 3 were due"),
        (None, 0, "returned a NoneType"),
        (1.0, 0, "returned a float"),
        ({"a": 1.0}, 0, "returned a dict"),
        ("abc", 0, "returned a str"),
        ([1.0, 1.0, float("inf")], 2, "returned inf"),
        (torch.tensor([0.0, -torch.inf, 0.0]), 1, "returned -inf"),
        ([1.0, "1.0", 1.0], 1, "returned '1.0'"),
        ([1.0, [1.0], 1.0], 1, "returned [1.0]"),
        ([1.0, 1j, 1.0], 1, "returned 1j"),
        ([1.0, Decimal("NaN"), 1.0], 1, "returned Decimal('NaN')"),
        ([1.0, 10**400, 1.0], 1, "returned 1000"),
        ([1.0, 1.0, -1e308], 2, "returned -1e+308 where a number up to 1e+100 or None was due"),
        ([1.0, torch.tensor([1.0, 2.0]), 1.0], 1, "returned tensor"),
        (torch.zeros(3, 2), 0, "returned [0.0, 0.0]"),
    ],
)
def test_anything_else_names_function_prompt_and_completion(values, at, what):
    with pytest.raises(UserError) as told:
        values_of(values)
    message = str(told.value)
    assert "reward function mine" in message and what in message and "\n" not in message
    assert f"prompt 'p{at}'" in message and f"completion 'c{at}'" in message


@pytest.mark.parametrize("error", [ZeroDivisionError("division\nby zero"), SystemExit("by zero"), KeyError()])
def test_a_reward_that_raises_is_called_once_and_told_in_one_line(error):
    calls = []

    def fails(prompts, **columns):
        calls.append(prompts)
        raise error

    with pytest.raises(UserError) as told:
        call(fails)
    assert calls == [COLUMNS["prompts"]] and told.value.__cause__ is error
    line = " ".join(str(error).splitlines())
    assert str(told.value) == f"reward function fails raised {type(error).__name__}: {line}"
    (frames,) = told.value.__notes__
    assert frames.startswith(f'  File "{__file__}", line ') and frames.count("File") == 1 and "in fails" in frames


def test_a_reward_can_be_interrupted():
    def interrupted(**columns):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call(interrupted)


def test_a_reward_gets_what_it_has_room_for():
    def narrow(completions, level=None):
        return [len(text) + (level or 0) for text in completions]

    def positional(prompts, completions, completion_ids, /):
        return []

    assert call(narrow, answer=[1, 2, 3]) == [2.0] * 3
    assert call(lambda level, completions: level, level=[1, 2, 3]) == [1, 2, 3]
    with pytest.raises(UserError, match=r"positional: .*positional.*; what it can be given is prompts, "):
        check_signature(positional, [*COLUMNS])


def test_a_reward_gets_copies():
    """Of each row by itself, and each function its own."""
    row, prompt = {"n": [3, 1, 2]}, [{"role": "user", "content": "x"}]

    def spoils(prompts, completions, completion_ids, more, **columns):
        for messages, ids, extra in zip(prompts, completion_ids, more, strict=True):
            messages.append({"role": "user", "content": "y"})
            ids.sort()
            extra["n"].sort()
            extra["seen"] = extra.get("seen", 0) + 1
        completions.clear()
        return [extra["seen"] for extra in more]

    ids = [[9, 5], [9, 5]]
    given = dict(prompts=[prompt] * 2, completions=["a", "b"], completion_ids=ids, more=[row] * 2)
    assert call_rewards([spoils, spoils], given) == [[1.0, 1.0], [1.0, 1.0]]
    assert row == {"n": [3, 1, 2]} and len(prompt) == 1 and ids == [[9, 5], [9, 5]]
    assert given["completions"] == ["a", "b"]


def upset(folder) -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1), os.chdir(folder)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)


def state() -> list:
    """With the next random numbers."""
    numbers = random.random(), np.random.rand(), torch.rand(()).item()
    return [*numbers, torch.is_grad_enabled(), torch.get_default_dtype(), os.getcwd()]


UPSET = f"import os, random\nimport numpy as np\nimport torch\n{inspect.getsource(upset)}\nupset({{!r}})\n"
UPSET += "def mine(completions, answer):\n    upset({!r})\n    return answer\n"
UPSET += "async def later(completions, answer):\n    return mine(completions, answer)\n"


@pytest.mark.parametrize("name", ["mine", "later"])
def test_what_a_reward_changes_is_put_back(tmp_path, name):
    (tmp_path / "upsets.py").write_text(UPSET.format(str(tmp_path), str(tmp_path)))
    found = []
    for quiet in (True, False):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        if not quiet:
            reward = load_reward(f"{tmp_path}/upsets.py:{name}", [])
            assert call(reward, answer=[1, 2, 3]) == [1, 2, 3]
            with pytest.raises(UserError):
                call(reward, answer=[1, 2])
        found.append(state())
    assert found[0] == found[1]


def test_rewards_that_are_awaited_run_at_the_same_time():
    """Two that wait for each other. One event loop serves all calls, and a function may have one of its own."""
    arrived = []

    async def first(completions, **columns):
        arrived.append(asyncio.get_running_loop())
        while len(arrived) % 2:
            await asyncio.sleep(0)
        return (1 for _ in completions)

    class Judge:
        __name__ = "judge"

        async def __call__(self, completions):
            return await first(completions)

    def own_loop(completions):
        return asyncio.run(asyncio.sleep(0, [5] * 3))

    for _ in range(2):
        assert call_rewards([first, own_loop, Judge()], COLUMNS) == [[1.0] * 3, [5.0] * 3, [1.0] * 3]
    assert len(arrived) == 4 and len(set(arrived)) == 1

    async def fails(completions):
        await asyncio.sleep(0)
        return 1 / 0

    with pytest.raises(UserError, match="reward function fails raised ZeroDivisionError") as told:
        call(fails)
    assert told.value.__notes__[0].count("File") == 1 and "in fails" in told.value.__notes__[0]


def test_nan_counts_as_none_and_is_said_once(capfd):
    say_once.cache_clear()
    for values in ([1.0, math.nan, 2.0], torch.tensor([1.0, math.nan, 2.0]), [1.0, np.float32("nan"), math.nan]):
        assert math.isnan(values_of(values)[1])
    assert capfd.readouterr().err == "note: reward function mine returned nan, which counts as None\n"


# Signatures

WITHIN = [  # all can be called
    lambda completions: None,
    lambda prompts, completions, completion_ids, answer: None,
    lambda answer, **columns: None,
    lambda *rest, completions, level=3: None,
    lambda **columns: None,
    functools.partial(lambda limit, completions, **columns: None, 3),
]


def make_penalty(limit: int, costs: int):
    def penalty(completions, **columns):
        return [0.0] * len(completions)

    return penalty


def make_other(limit: int = 3):
    return make_penalty(limit, 3)


@pytest.mark.parametrize("reward", WITHIN)
def test_signatures_that_can_take_what_they_are_given(reward):
    check_signature(reward, [*COLUMNS, "answer"])


def test_a_signature_that_cannot_take_it_is_found_before_it_is_called(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": 1}\n' * 2)
    (tmp_path / "mine.py").write_text("def mine(completions, solution, **columns):\n    return solution\n")
    files = dict(task="data", data=f"{tmp_path}/rows.jsonl", reward=[f"{tmp_path}/mine.py:mine"], eval_every=0)
    words = "mine: missing a required argument: 'solution'; what it can be given is .*, completion_ids, .*, answer$"
    with pytest.raises(UserError, match=words):
        load_task(Config(**files))


@pytest.mark.parametrize("make", [make_penalty, make_other])
def test_a_function_that_makes_a_reward_is_told_to_be_bound(make):
    words = rf"takes none of .* mine = {make.__name__}\(\.\.\.\), and give --reward file.py:mine"
    with pytest.raises(UserError, match=words):
        check_signature(make, [*COLUMNS, "answer"])
    with pytest.raises(UserError, match=r"maker returned a function; .* mine = maker\(\.\.\.\)"):
        maker = lambda **columns: make_other()  # noqa: E731
        maker.__name__ = "maker"
        call(maker)


@pytest.mark.parametrize("prompt", ["1+1=", CHAT])
def test_score_calls_each_reward_once_with_everything_it_needs(tokenizer, prompt):
    calls = []

    def first(prompts, completions, completion_ids, answer, trainer_state, log_metric, log_extra, **columns):
        calls.append((prompts, completions, completion_ids, answer, columns))
        return [0.0, 1.0, 2.0, 3.0]

    def second(completions, **columns):
        return [None, 5.0, None, 7.0]

    rows = [{"prompt": prompt, "answer": "2", "more": [1]}, {"prompt": prompt, "answer": "3", "more": {}}]
    groups = [[completion(tokenizer, text) for text in pair] for pair in (("a", "b"), ("c", "1"))]
    parts = np.array(score(Task(rows, [], [first, second], [1.0, 1.0], 1.0), rows, groups, tokenizer))
    assert parts.shape == (2, 2, 2)
    np.testing.assert_array_equal(parts[..., 0], [[0.0, 1.0], [2.0, 3.0]])
    np.testing.assert_array_equal(parts[..., 1], [[np.nan, 5.0], [np.nan, 7.0]])

    ((prompts, completions, ids, answer, columns),) = calls
    texts = ["a", "b", "c", "1"]
    assert prompts == [prompt] * 4 and answer == ["2", "2", "3", "3"] and columns == {"more": [[1], [1], {}, {}]}
    assert completions == (texts if prompt != CHAT else [[{"role": "assistant", "content": text}] for text in texts])
    assert ids == [[*tokenizer(text).input_ids, EOS_ID] for text in texts]


def test_a_reward_is_told_the_step_and_can_log(tokenizer):
    def logs(completions, trainer_state, log_metric):
        for i in range(len(completions)):
            log_metric("i", i)
        log_metric("nan", math.nan)
        return [trainer_state.global_step + trainer_state.max_steps] * len(completions)

    task = Task([{"prompt": "1"}], [], [logs, lambda **given: [0.0] * ("log_metric" in given)], [1.0, 1.0])
    task.state.max_steps = 100
    for _ in range(2):
        task.begin(3)
        assert score(task, task.train, [[completion(tokenizer, "a")]], tokenizer) == [[[102.0, 0.0]]]
    assert tasks.means_of_logged([*task.logged, ("logged/i", 4.0)]) == {"logged/i": 2.0}
    task.rewards = [lambda log_metric, **given: log_metric("x", "3")]
    with pytest.raises(UserError, match=r"log_metric\('x', '3'\): a value must be a number"):
        score(task, task.train, [[completion(tokenizer, "a")]], tokenizer)


def test_a_reward_can_log_something_of_each_completion(tokenizer):
    def first(completions, log_extra):
        log_extra("text", (text.upper() for text in completions))
        log_extra("length", torch.tensor([len(text) for text in completions]))
        return [0.0] * len(completions)

    def second(log_extra, **columns):
        log_extra("n", columns["n"])
        log_extra("kind", [int] * 4)  # what has no form in JSON is written as text
        return columns["n"]

    rows = [{"prompt": "1", "n": n} for n in (1, 2)]
    task = Task(rows, [], [first, second], [1.0, 1.0])
    groups = [[completion(tokenizer, text) for text in texts] for texts in (("a", "bb"), ("c", "ab"))]
    score(task, rows, groups, tokenizer)
    assert task.extras == [
        [dict(text=text, length=len(text), n=row["n"], kind=str(int)) for text in texts]
        for row, texts in zip(rows, (("A", "BB"), ("C", "AB")), strict=True)
    ]
    task.rewards = [lambda completions, **given: [0.0] * len(completions)]
    score(task, rows, groups, tokenizer)
    assert task.extras == [[{}, {}], [{}, {}]]
    task.rewards = [None]  # nothing to score calls nothing
    assert score(task, [], [], tokenizer) == task.extras == []
    for wrong in ([1], "abcd", None):
        task.rewards = [lambda log_extra, wrong=wrong, **given: log_extra("x", wrong)]
        with pytest.raises(UserError, match=r"log_extra\('x', .*\): 4 values were due, in a list"):
            score(task, rows, groups, tokenizer)


def test_the_time_limit_is_around_each_call(tokenizer):
    events = []

    @contextlib.contextmanager
    def time_limit(name: str):
        events.append(f"{name} begins")
        try:
            yield
        finally:
            events.append(f"{name} ends")

    def first(completions, **columns):
        events.append("first is called")
        return [1.0]

    def second(completions, **columns):
        raise ValueError

    task = Task([{"prompt": "1"}], [], [first, second], [1.0, 1.0], 2.0, time_limit=time_limit)
    with pytest.raises(UserError, match="second raised ValueError"):
        score(task, task.train, [[completion(tokenizer, "a")]], tokenizer)
    assert events == ["first begins", "first is called", "first ends", "second begins", "second ends"]
