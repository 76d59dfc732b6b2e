"""Reward functions: how they are found, what they are given, and what happens to the values that they return."""

import asyncio
import contextlib
import copy
import functools
import importlib.util
import math
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch

from config import UserError
from tasks._rewards import load_function, values_of

COLUMNS = dict(prompts=["p0", "p1", "p2"], completions=["c0", "c1", "c2"], completion_ids=[[5], [6], [7]])
RETURNED = [  # what a reward function returns -> the rewards, or None if that is an error
    ([True, None, np.float32(-2.5)], [1.0, math.nan, -2.5]),
    ((x for x in (1, None, Decimal("-2.5"))), [1.0, math.nan, -2.5]),
    (torch.tensor([1.0, math.nan, -2.5]), [1.0, math.nan, -2.5]),
    ([1.0, 2.0], None),
    *[(x, None) for x in ("101", {1, 2, 3}, {0: 1.0, 1: 0.0, 2: 1.0})],  # in no order, or keys, or digits
    ([math.nan, 1.0, -1.01e100], None),
]
MEDDLES = """
import functools
import torch
def meddle():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
meddle()
class Judge:
    def __call__(self, completions):
        meddle()
        return (meddle() or 1.0 for _ in completions)
judge = Judge()
bound = functools.partial(judge)
async def awaited(completions):
    return judge(completions)
"""
# The name of a reward's file, and what it imports -> whether that is refused. BESIDE are the files beside it. Of these,
# `config` and `tasks` have the names of modules of this program, and `theirs` that of a module beside another reward.
BESIDE = "config.py tasks/__init__.py theirs.py statistics.py minimal.py datasets/rows.py indirect.py own/__init__.py"
IMPORTS = {"indirect.py": "import theirs", "own/__init__.py": "from .config import N"}
FILES = [
    ("mine", "import functools, config as settings", True),
    ("mine", "from tasks.math import to_row", True),
    ("mine", "from theirs import N", True),
    ("mine", "import indirect", True),  # this one imports `theirs`
    ("mine", "import statistics, datasets, own, mine.config as config", False),  # the first is always Python's own
    *[(name, "", False) for name in ("rewards", "config", "statistics")],  # it is loaded by its path
]


def call(reward, **columns) -> list[float]:
    return values_of(reward, COLUMNS | columns, {})


@pytest.mark.parametrize("returned, rewards", RETURNED)
def test_numbers_and_none_are_rewards_and_all_else_is_an_error_that_names_the_function(returned, rewards):
    def mine(**columns):
        return returned

    message = "^reward function mine: .* is not a list of 3 finite numbers$"
    with contextlib.nullcontext() if rewards else pytest.raises(UserError, match=message):
        assert repr(call(mine)) == repr(rewards)  # unlike ==, this compares types, and NaN equals NaN


@pytest.mark.parametrize("returned", [None, [10**400, 0, 0], [[0, 1]] * 3, ["a"] * 3])
def test_where_there_are_no_numbers_the_error_names_the_function(returned):
    with pytest.raises(UserError, match=r"^reward function <lambda> has returned .*: not a list with a number or None"):
        call(lambda: returned)


def test_an_error_inside_a_generator_is_the_users_own():
    def mine(prompts):
        yield 1.0
        raise TypeError("own")

    with pytest.raises(TypeError, match="own"):
        call(mine)


def test_a_reward_gets_the_arguments_that_it_accepts():
    @functools.wraps(lambda completions: None)  # gives `count` this signature, so it gets only the completions
    def count(**given):
        return [len(given)] * 3

    assert call(count, level=[1, 2, 3]) == [1.0] * 3
    assert call(lambda level, completions, other=2: level, level=[1, 2, 3]) == [1, 2, 3]
    assert call(lambda **given: [len(given)] * 3, level=[1, 2, 3]) == [4.0] * 3
    values = values_of(lambda log, level: log, COLUMNS | {"level": [0] * 3, "log": [0] * 3}, {"log": [1] * 3})
    assert values == [1.0] * 3, "an argument of the run takes precedence over a column of the same name"


def test_a_reward_gets_copies():
    """Each function gets its own copies. If several completions belong to one row, each gets a copy of its values."""

    def spoils(prompts, completions, completion_ids, more, mixed):
        for value in (prompts[0], completions, completion_ids[0], more[0]["n"], mixed[0][1]):
            value.append("spoiled")
        return [len(a) + len(b) + len(c["n"]) for a, b, c in zip(prompts, completion_ids, more, strict=True)]

    given = dict(prompts=[[{}]] * 2, completions=["a", "b"], completion_ids=[[9]] * 2, more=[{"n": [1]}] * 2)
    given["mixed"] = [[1, []]] * 2  # not a list of numbers, though it begins as one
    before = copy.deepcopy(given)
    # For the first completion, the prompt, the ids and `n` then have 2 items each. For the second, they still have 1.
    assert values_of(spoils, given, {}) == [6.0, 3.0] and given == before


def test_one_event_loop_serves_all_calls_even_if_another_one_is_running():
    loops = []

    async def awaited(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0] * len(completions)

    async def in_a_notebook():
        return call(awaited)

    assert asyncio.run(in_a_notebook()) == call(awaited) == [1.0] * 3 and len({*loops}) == 1


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file into the working directory. What a test imports is unloaded afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # that of another test
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}

    def write_file(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    yield write_file
    for name in {*sys.modules} - before:
        del sys.modules[name]


@pytest.mark.parametrize(("name", "imports", "refused"), FILES)
def test_a_name_that_would_get_another_module_is_refused(write, name, imports, refused):
    write("other/theirs.py", "N = 1\n")
    write("other/rewards.py", "def mine(prompts):\n    from theirs import N\n    return [N] * len(prompts)\n")
    reward, again = (load_function("other/rewards.py:mine", {}) for _ in range(2))
    assert call(reward) == [1.0] * 3 and reward.func is again.func, "all functions of a file share its module"
    for beside in BESIDE.split():
        write(f"here/{beside}", IMPORTS.get(beside, ""))
    write(f"here/{name}.py", f"def mine():\n    {imports or 'pass'}\n")
    message = "^.*/here/(mine|indirect).py imports (config|tasks|theirs), and .*/here/.* has the name of .*: rename it$"
    with pytest.raises(UserError, match=message) if refused else contextlib.nullcontext():
        load_function(f"here/{name}.py:mine", {})
    assert "here" not in importlib.util.find_spec("minimal").origin, "this program still finds its own modules"
    write("other/theirs.py", "N = 2\n")
    with pytest.raises(UserError, match=r"theirs\.py has changed since this process imported it"):
        load_function("other/rewards.py:mine", {})


def test_a_file_with_a_syntax_error_can_be_corrected_in_the_same_process(write):
    write("new.py", "def good(:")
    with pytest.raises(SyntaxError):
        load_function("new.py:good", {})
    write("new.py", "def good(): pass")
    assert load_function("new.py:good", {}).__name__ == "good"


@pytest.mark.parametrize("name", ["nowhere.py:good", "nowhere.deep:good", "empty.py:good", "good"])
def test_what_is_no_function_is_named(write, name):
    write("empty.py", "")
    with pytest.raises(UserError, match=f"^{name}: "):
        load_function(name, {"exact_sum": len})


@pytest.mark.parametrize("name", ["judge", "bound", "awaited"])
def test_what_a_reward_changes_in_pytorch_is_put_back(write, name):
    """The rewards are an object that can be called, a partial and an asynchronous function."""

    def settings():
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()

    write("meddles.py", MEDDLES)
    before = settings()
    reward = load_function(f"meddles.py:{name}", {})
    assert call(reward) == [1.0] * 3 and settings() == before and reward.__name__ == name
