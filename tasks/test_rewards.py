"""Reward functions: how they are found, what they are given, and what happens to the values that they return."""

import asyncio
import contextlib
import copy
import functools
import math
import re
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch

from config import UserError
from tasks._rewards import load_function, shared_runner, values_of

COLUMNS = dict(prompts=["p0", "p1", "p2"], completions=["c0", "c1", "c2"], completion_ids=[[5], [6], [7]])
RETURNED = [  # what a reward function returns -> the rewards, or how the error shows it
    ([True, None, np.float32(-2.5)], [1.0, math.nan, -2.5]),
    ((x for x in (1, None, Decimal("-2.5"))), [1.0, math.nan, -2.5]),
    (torch.tensor([1.0, math.nan, -2.5]), [1.0, math.nan, -2.5]),
    ([1.0, 2.0], "[1.0, 2.0]"),
    ("123", "'123'"),
    ([1.0, "good", 2.0], "[1.0, 'good', 2.0]"),
    (torch.ones(3, 1), "[[1.0], [1.0], [1.0]]"),
    (torch.tensor([0.0, -torch.inf, 0.0]), "[0.0, -inf, 0.0]"),
    ([math.nan, 1.0, -1.01e100], "[nan, 1.0, -1.01e+100]"),
]
MEDDLES = """
import torch
LIMIT = 3
def meddle():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
meddle()
def mine(completions):
    meddle()
    return [1.0] * len(completions)
async def awaited(completions):
    return mine(completions)
"""
NAMED = [  # a name -> the error
    ("good", "must be exact_sum, file.py:function or package.module:function"),
    ("nowhere.py:good", "there is no file .*/nowhere.py"),
    ("nowhere.deep:good", "No module named 'nowhere'"),
    ("meddles.py:good", "meddles.py has no function good"),
    ("meddles.py:LIMIT", "meddles.py has no function LIMIT"),
]
# What the file of a reward imports -> whether that is refused. BESIDE are the files beside it. Of these, `config` and
# `tasks` have the names of modules of this program, and `theirs` that of a module beside another reward.
BESIDE = "config.py", "tasks/__init__.py", "theirs.py", "statistics.py", "datasets/rows.py", "indirect.py"
IMPORTS = [
    ("import functools, config as settings", True),
    ("from tasks.math import to_row", True),
    ("from theirs import N", True),
    ("import indirect", True),  # this one imports `theirs`
    ("import statistics, datasets, mine.config as config", False),  # the first is always Python's own
    ("import loss\n    from .config import theirs", False),  # nothing else is called `loss`
]


def call(reward, **columns) -> list[float]:
    return values_of([reward], COLUMNS | columns, {})[0]


@pytest.mark.parametrize("returned, outcome", RETURNED)
def test_numbers_and_none_are_rewards_and_all_else_is_an_error_that_names_the_function(returned, outcome):
    def mine(**columns):
        return returned

    message = f"^reward function mine returned {re.escape(str(outcome))}; 3 numbers were expected, for prompt 'p0' and"
    with pytest.raises(UserError, match=message) if isinstance(outcome, str) else contextlib.nullcontext():
        assert repr(call(mine)) == repr(outcome)  # unlike ==, this compares types, and NaN equals NaN


def test_a_reward_gets_the_arguments_that_it_accepts():
    @functools.wraps(lambda completions: None)  # gives `count` this signature, so it gets only the completions
    def count(**given):
        return [len(given)] * 3

    assert call(count, level=[1, 2, 3]) == [1.0] * 3
    assert call(lambda level, completions, other=2: level, level=[1, 2, 3]) == [1, 2, 3]
    assert call(lambda **given: [len(given)] * 3, level=[1, 2, 3]) == [4.0] * 3
    values = values_of([lambda log, level: log], COLUMNS | {"level": [0] * 3, "log": [0] * 3}, {"log": [1] * 3})
    assert values == [[1.0] * 3], "an argument of the run takes precedence over a column of the same name"


def test_a_reward_gets_copies():
    """Each function gets its own copies. If several completions belong to one row, each gets a copy of its values."""

    def spoils(prompts, completions, completion_ids, more):
        for value in (prompts[0], completions, completion_ids[0], more[0]["n"]):
            value.append("spoiled")
        return [len(a) + len(b) + len(c["n"]) for a, b, c in zip(prompts, completion_ids, more, strict=True)]

    given = dict(prompts=[[{}]] * 2, completions=["a", "b"], completion_ids=[[9]] * 2, more=[{"n": [1]}] * 2)
    before = copy.deepcopy(given)
    # For the first completion, the prompt, the ids and `n` then have 2 items each. For the second, they still have 1.
    assert values_of([spoils, spoils], given, {}) == [[6.0, 3.0]] * 2 and given == before


def test_rewards_that_are_awaited_run_at_the_same_time():
    """They are awaited under one time limit. One event loop serves all calls, even if another loop is already running.
    If a reward returns a generator, its values are read under the time limit of that reward."""
    events, loops, both_started = [], [], asyncio.Barrier(2)

    @contextlib.contextmanager
    def time_limit(what: str):
        events.append(f"start {what.removeprefix('reward function ')}")
        yield
        events.append("stop")

    def plain(completions):
        yield from [1.0] * len(completions)
        events.append("values")

    async def awaited(completions):
        loops.append(asyncio.get_running_loop())
        await asyncio.wait_for(both_started.wait(), 30)  # a TimeoutError if only one of them has started
        return plain(completions)

    async def in_a_notebook():
        return values_of([awaited, plain, awaited], COLUMNS, {}, time_limit)

    shared_runner.cache_clear()
    assert asyncio.run(in_a_notebook()) == [[1.0] * 3] * 3
    # First, each function is called under a time limit of its own. The calls of `awaited` only return coroutines. Then
    # the two coroutines are awaited under one limit, whose name is "awaited, awaited".
    own = ["start awaited", "stop"]
    assert events == [*own, "start plain", "values", "stop", *own, "start awaited, awaited", "values", "values", "stop"]
    assert values_of([awaited, awaited], COLUMNS, {}) == [[1.0] * 3] * 2 and len({*loops}) == 1


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Return a function that writes a file into the working directory. What a test imports is unloaded afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}

    def write_file(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    yield write_file
    for name in {*sys.modules} - before:
        del sys.modules[name]


def sees_this_program(prompts):
    """Return 1 for each prompt if `import config` gives the module of this program."""
    import config

    return [float(config.UserError is UserError)] * len(prompts)


@pytest.mark.parametrize("name", ["rewards", "config", "statistics"])
def test_a_file_may_have_the_name_of_any_other_module(write, name):
    """Such as a file in another folder, a module of this program, or one of Python's own. The file may belong to a
    package, whose name may also be that of another one. All functions of a file share its module."""
    modules = dict(sys.modules)
    for n in "12":
        write(f"{n}/beside{n}.py", f"N = {n}\n")
        write(f"{n}/{name}.py", f"def mine(prompts):\n    import beside{n}\n    return [beside{n}.N] * 3\n")
        write(f"{n}/in/{name}/__init__.py", "from .deep import mine\n")
        write(f"{n}/in/{name}/helper.py", f"N = {n}\n")
        write(f"{n}/in/{name}/deep.py", "from .helper import N\ndef mine(prompts):\n    return [N] * 3\n")
        for path in f"{n}/{name}.py", f"{n}/in/{name}/deep.py":
            reward, again = (load_function(f"{path}:mine", {}) for _ in range(2))
            assert call(reward) == [float(n)] * 3 and reward.__wrapped__ is again.__wrapped__
    assert modules.items() <= sys.modules.items(), "this program still has its own modules"
    for own in f"{__name__}:sees_this_program", f"{__file__}:sees_this_program":
        assert call(load_function(own, {})) == [1.0] * 3


@pytest.mark.parametrize(("imports", "refused"), IMPORTS)
def test_an_import_that_would_get_another_module_is_refused_by_name(write, imports, refused):
    write("other/theirs.py", "")
    write("other/rewards.py", "def mine():\n    from theirs import N\n")
    load_function("other/rewards.py:mine", {})
    for name in BESIDE:
        write(f"here/{name}", "import theirs" if name == "indirect.py" else "")
    write("here/mine.py", f"def mine():\n    {imports}\n")
    message = "here/(mine|indirect).py imports (config|tasks|theirs), but .*/here/.* has the name of .*: rename it$"
    with pytest.raises(UserError, match=message) if refused else contextlib.nullcontext():
        load_function("here/mine.py:mine", {})


def test_what_a_reward_changes_in_pytorch_is_put_back(write):
    def settings():
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()

    write("meddles.py", MEDDLES)
    before = settings()
    for name in "mine", "awaited":
        assert call(load_function(f"meddles.py:{name}", {})) == [1.0] * 3 and settings() == before


@pytest.mark.parametrize(("name", "message"), NAMED)
def test_what_is_no_function_is_named(write, name, message):
    """The task has one reward of its own, exact_sum."""
    write("meddles.py", MEDDLES)
    for setting in "--reward", "--reply":
        with pytest.raises(UserError, match=f"^{setting} {name}: {message}$"):
            load_function(name, {"exact_sum": len}, setting)
    assert load_function("exact_sum", {"exact_sum": len}) is len
