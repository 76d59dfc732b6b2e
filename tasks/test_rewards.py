"""Reward functions: how they are found, what they are given, and what happens to the values that they return."""

import asyncio
import contextlib
import copy
import functools
import math
import random
import re
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch
from transformers import set_seed

from config import UserError
from tasks._rewards import call_rewards, load_function, shared_runner

COLUMNS = dict(prompts=["p0", "p1", "p2"], completions=["c0", "c1", "c2"], completion_ids=[[5], [6], [7]])
LIST = "; a list of 3 numbers was expected, for prompt 'p0' and others"
RETURNED = [  # what a reward function returns -> the rewards, or the end of the error, which names function and prompt
    ([True, None, np.float32(-2.5)], [1.0, math.nan, -2.5]),
    ([torch.tensor(1.0), None, torch.tensor([-2.5])], [1.0, math.nan, -2.5]),
    ((x for x in (1, None, Decimal("-2.5"))), [1.0, math.nan, -2.5]),
    (torch.tensor([1.0, math.nan, -2.5]), [1.0, math.nan, -2.5]),
    ([1.0, 2.0], f"[1.0, 2.0]{LIST}"),
    (None, f"None{LIST}"),
    (torch.tensor([0.0, -torch.inf, 0.0]), "-inf for prompt 'p1'"),
    ([1.0, 1.0, -1.01e100], "-1.01e+100 for prompt 'p2'"),
]
RELATIVE = """
from .helper import SOFT
def soft_punishment(completion_ids, **kwargs):
    return [min(0.0, (5 - SOFT - len(ids)) / SOFT) for ids in completion_ids]
"""
MEDDLES = """
import random, torch
import numpy as np
def meddle():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(torch.get_num_threads() + 1)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
meddle()
def mine(completions):
    meddle()
    return [1.0] * len(completions)
async def awaited(completions):
    return mine(completions)
"""
IMPORTS = """
import config, functools, nearby, tasks.helper
import train
def mine(completions):
    import loss
    return [config.N + nearby.N + tasks.helper.N + loss.N + train.N] * len(completions)
async def awaited(completions):
    import batch
    return [batch.N] * len(completions)
bound = functools.partial(mine)
"""
FILES = {
    "mine.py": "import no_such_module\n",
    "meddles.py": MEDDLES,
    "statistics.py": "",
    "installed/installed.py": "def mine(prompts):\n    return [0.0] * len(prompts)\n",
    "r1/__init__.py": "",
    "r1/helper.py": "SOFT = 2\n",
    "r1/rewards.py": RELATIVE,
}
NAMED = [  # a name -> the rewards of completions of five and of three tokens, or the error and a part of its message
    ("r1/rewards.py:soft_punishment", [-1.0, 0.0]),  # as in TRL
    ("installed:mine", [0.0, 0.0]),
    ("good", (UserError, "--reward good: must be exact_sum, file.py:function or package.module:function")),
    ("nowhere.py:good", (ModuleNotFoundError, "nowhere")),
    ("statistics.py:mean", (UserError, "statistics.py: Python finds .*/statistics.py under this name: rename")),
    ("meddles.py:LIMIT", (AttributeError, "LIMIT")),
    ("mine.py:good", (ModuleNotFoundError, "No module named 'no_such_module'")),
]


def call(reward, **columns) -> list[float]:
    return call_rewards([reward], COLUMNS | columns, {})[0]


@pytest.mark.parametrize("returned, outcome", RETURNED)
def test_numbers_and_none_are_rewards_and_all_else_is_an_error(returned, outcome):
    def mine(**columns):
        return returned

    message = f"^reward function mine returned {re.escape(str(outcome))}$"
    with pytest.raises(UserError, match=message) if isinstance(outcome, str) else contextlib.nullcontext():
        assert repr(call(mine)) == repr(outcome)  # unlike ==, this compares types, and NaN equals NaN


def test_a_reward_gets_the_arguments_that_it_accepts():
    @functools.wraps(lambda completions: None)  # gives `count` this signature, so it gets only the completions
    def count(**given):
        return [len(given)] * 3

    assert call(count, level=[1, 2, 3]) == [1.0] * 3
    assert call(lambda level, completions, other=2: level, level=[1, 2, 3]) == [1, 2, 3]
    assert call(lambda **given: [len(given)] * 3, level=[1, 2, 3]) == [4.0] * 3
    values = call_rewards([lambda log, level: log], COLUMNS | {"level": [0] * 3, "log": [0] * 3}, {"log": [1] * 3})
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
    assert call_rewards([spoils, spoils], given, {}) == [[6.0, 3.0]] * 2 and given == before


def test_rewards_that_are_awaited_run_at_the_same_time():
    """They are awaited under one time limit. One event loop serves all calls, even if another loop is already running.
    If a reward returns a generator, its values are read under the time limit of that reward."""
    events, loops, both_started = [], [], asyncio.Barrier(2)

    @contextlib.contextmanager
    def time_limit(name: str):
        events.append(f"start {name}")
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
        return call_rewards([awaited, plain, awaited], COLUMNS, {}, time_limit)

    shared_runner.cache_clear()
    assert asyncio.run(in_a_notebook()) == [[1.0] * 3] * 3
    # First, each function is called under a time limit of its own. The calls of `awaited` only return coroutines. Then
    # the two coroutines are awaited under one limit, whose name is "awaited, awaited".
    own = ["start awaited", "stop"]
    assert events == [*own, "start plain", "values", "stop", *own, "start awaited, awaited", "values", "values", "stop"]
    assert call_rewards([awaited, awaited], COLUMNS, {}) == [[1.0] * 3] * 2 and len({*loops}) == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with files of rewards. What a test imports from it is unloaded afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


def sees_this_program(completions, user_error):
    """Return 2 if `import config` gives the module of this program."""
    import config

    return [2.0 * (config.UserError is user_error)] * len(completions)


def test_a_reward_imports_from_the_folder_of_its_file_first(folder):
    """While the file is imported, and while its functions are called, `import` looks in the file's folder first: before
    this program and before the folders of other rewards. This program keeps its own modules."""
    ours = {name: sys.modules[name] for name in ("config", "loss", "batch", "tasks", "tasks._rewards")}
    rewards = []
    for place, n in (("x", 1), ("y", 2)):
        (folder / place / "tasks").mkdir(parents=True)
        for name in ("config", "train", "loss", "batch", "nearby", "tasks/__init__", "tasks/helper"):
            (folder / place / f"{name}.py").write_text(f"N = {n}\n")
        (folder / place / "rewards.py").write_text(IMPORTS)
        rewards += [load_function(f"{folder}/{place}/rewards.py:{name}", {}) for name in ("mine", "bound", "awaited")]
    for _ in range(2):
        # N is 1 in folder x and 2 in y. `mine` and `bound` add up the N of five modules. `awaited` returns one N.
        assert call_rewards(rewards[:3], COLUMNS, {}) == [[5.0] * 3, [5.0] * 3, [1.0] * 3]
        assert call_rewards(rewards[3:], COLUMNS, {}) == [[10.0] * 3, [10.0] * 3, [2.0] * 3]
        assert {name: sys.modules[name] for name in ours} == ours
        for own in f"{__name__}:sees_this_program", f"{__file__}:sees_this_program":
            values = call_rewards([load_function(own, {})], COLUMNS, {"user_error": UserError})
            assert values == [[2.0] * 3], "a reward of this program sees this program's modules"


def test_what_a_reward_changes_in_pytorch_and_random_is_put_back(folder):
    """Random numbers that are drawn after a reward do not depend on it, and differ from call to call."""
    drawn = []

    def settings():
        return torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()

    def draw(completions):
        drawn.append((random.random(), np.random.rand(), float(torch.rand(1))))
        return [0.0] * len(completions)

    before = settings()
    # In the first round, each call has a reward that meddles, and then `draw`. In the second, `draw` takes the place of
    # the rewards that meddle, so it is called twice.
    rewards = [load_function(f"meddles.py:{name}", {}) for name in ("mine", "awaited")]
    for harmless in (False, True):
        set_seed(1)
        for reward in rewards:
            assert settings() == before
            call_rewards([draw if harmless else reward, draw], COLUMNS, {})
    assert settings() == before
    # In the second round, the first draw is in place of `mine`, and the second comes after it.
    after_mine, after_awaited, _, after_harmless = drawn[:4]
    assert after_mine != after_awaited and after_mine == after_harmless


@pytest.mark.parametrize(("name", "outcome"), NAMED)
def test_how_a_reward_is_found_by_its_name(folder, name, outcome):
    columns = dict(prompts=["a", "b"], completions=["c", "d"], completion_ids=[[1] * 5, [1] * 3])
    # The task has one reward of its own, exact_sum, and an error names it.
    with pytest.raises(outcome[0], match=outcome[1]) if isinstance(outcome, tuple) else contextlib.nullcontext():
        assert call_rewards([load_function(name, {"exact_sum": len})], columns, {}) == [outcome]
