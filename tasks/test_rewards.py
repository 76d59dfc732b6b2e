"""Reward functions: how they are found, what they are given, and what comes of what they return."""

import asyncio
import contextlib
import functools
import math
import re
import sys
from decimal import Decimal

import numpy as np
import pytest
import torch

from config import UserError
from tasks._rewards import call_rewards, load_reward, warn_once

COLUMNS = dict(prompts=["p0", "p1", "p2"], completions=["c0", "c1", "c2"], completion_ids=[[5], [6], [7]])


def call(reward, **columns) -> list[float]:
    return call_rewards([reward], COLUMNS | columns, {})[0]


NAN = "reward function mine returned nan, which counts as None"
RETURNED = [  # a return value, what is told; an error, unless it is nothing or a note
    ([1.0, None, -2.5], None),
    ([True, None, np.float32(-2.5)], None),
    ([torch.tensor(1.0), None, torch.tensor([-2.5])], None),
    ((x for x in (1, None, Decimal("-2.5"))), None),
    (map(float, ["1", "nan", "-2.5"]), NAN),
    (torch.tensor([1.0, math.nan, -2.5]), NAN),
    ([1.0, 2.0], "2 values where a list of 3 was due, for prompt 'p0' and those after it"),
    (None, "None where a list of 3 was due, for prompt 'p0' and those after it"),
    ("abc", "'abc' where a list of 3 was due, for prompt 'p0' and those after it"),
    (torch.tensor([0.0, -torch.inf, 0.0]), "-inf where a number up to 1e+100 or None was due, for prompt 'p1'"),
    ([1.0, "1.0", 1.0], "'1.0' where a number up to 1e+100 or None was due, for prompt 'p1'"),
    ([1.0, 10**400, 1.0], f"1{'0' * 199} where a number up to 1e+100 or None was due, for prompt 'p1'"),
    ([1.0, 1.0, -1.01e100], "-1.01e+100 where a number up to 1e+100 or None was due, for prompt 'p2'"),
    ([1.0, torch.zeros(2), 1.0], "tensor([0., 0.]) where a number up to 1e+100 or None was due, for prompt 'p1'"),
    (torch.zeros(3, 2), "[0.0, 0.0] where a number up to 1e+100 or None was due, for prompt 'p0'"),
]


@pytest.mark.parametrize(("values", "told"), RETURNED)
def test_numbers_and_none_are_fine_and_all_else_names_function_and_prompt(caplog, values, told):
    warn_once.cache_clear()

    def mine(completions):
        return values

    if told in (None, NAN):
        got = call(mine)
        assert got[0] == 1.0 and math.isnan(got[1]) and got[2] == -2.5 and {*map(type, got)} == {float}
        values = [math.nan if told else None] * 3
        assert call(mine) and caplog.messages == [told] * (told is not None), "once"
    else:
        with pytest.raises(UserError, match=f"^reward function mine returned {re.escape(told)}$"):
            call(mine)


def test_a_reward_gets_what_it_has_room_for():
    wrapped = functools.wraps(lambda completions: None)(lambda **given: [len(given)] * 3)
    assert call(wrapped, level=[1, 2, 3]) == [1.0] * 3
    assert call(lambda level, completions, other=2: level, level=[1, 2, 3]) == [1, 2, 3]
    assert call(lambda **given: [len(given)] * 3, level=[1, 2, 3]) == [4.0] * 3
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'solution'"):
        call(lambda completions, solution: solution, answer=[1, 2, 3])
    wins = call_rewards([lambda log, level: log], COLUMNS | {"level": [0] * 3, "log": [0] * 3}, {"log": [1] * 3})
    assert wins == [[1.0] * 3], "what is of the run, over a column of its name"


def test_a_reward_gets_copies():
    """Of each row by itself, and each function its own."""
    row, prompt, ids = {"n": [3, 1, 2]}, [{"role": "user", "content": "x"}], [[9, 5], [9, 5]]

    def spoils(prompts, completions, completion_ids, more):
        for messages, of_one, extra in zip(prompts, completion_ids, more, strict=True):
            messages.append({"role": "user", "content": "y"})
            of_one.sort()
            extra["n"].append(4)
        completions.clear()
        return [len(extra["n"]) for extra in more]

    given = dict(prompts=[prompt] * 2, completions=["a", "b"], completion_ids=ids, more=[row] * 2)
    assert call_rewards([spoils, spoils], given, {}) == [[4.0, 4.0], [4.0, 4.0]]
    assert (row, len(prompt), ids, given["completions"]) == ({"n": [3, 1, 2]}, 1, [[9, 5], [9, 5]], ["a", "b"])


def test_rewards_that_are_awaited_run_at_the_same_time():
    """Two that wait for each other, with one time limit around both. One event loop serves all calls, and a function
    may have one of its own. A generator works while it is read."""
    events, loops = [], []

    @contextlib.contextmanager
    def time_limit(name: str):
        events.append(f"{name} begins")
        yield
        events.append(f"{name} ends")

    def read(completions):
        yield from [1.0] * len(completions)
        events.append("read")

    async def asked(completions):
        loops.append(asyncio.get_running_loop())
        for _ in range(99):
            await asyncio.sleep(0)
        assert len(loops) % 2 == 0, "the other one is there too"
        return read(completions)

    def own(completions):
        return asyncio.run(asyncio.sleep(0, [5] * 3))

    for _ in range(2):
        values = call_rewards([asked, read, own, asked], COLUMNS, {}, time_limit)
        assert values == [[1.0] * 3, [1.0] * 3, [5.0] * 3, [1.0] * 3]
    apart = ["asked begins", "asked ends", "read begins", "read", "read ends", "own begins", "own ends"]
    together = ["asked begins", "asked ends", "asked, asked begins", "read", "read", "asked, asked ends"]
    assert events == [*apart, *together] * 2 and len(loops) == 4 and len(set(loops)) == 1


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files that find each other; what a test imports from here is gone afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    files = {
        "nearby.py": "FACTOR = 3.0\n",
        "config.py": "1 / 0  # there is one of this name already\n",
        "afar.py": "import config\ndef mine(completions):\n    import nearby\n    return [nearby.FACTOR] * 3\n"
        "import functools\nbound = functools.partial(mine)\n",
        "needs.py": "import no_such_module\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


def test_a_file_can_import_its_neighbours(folder):
    """Later too; and it can be imported, or be read again. What can be called may have no name of its own."""
    names = [f"{folder}/afar.py:mine", "afar:mine", f"{folder}/afar.py:bound"]
    assert call_rewards([load_reward(name, {}) for name in names], COLUMNS, {}) == [[3.0] * 3] * 3
    assert load_reward("min", {"min": max}) is max, "one of the task's own"


NOT_THERE = [  # a name, the error, what is said
    ("good", UserError, "must be exact_sum, file.py:function or package.module:function that is there"),
    ("nowhere.py:good", UserError, "must be exact_sum, file.py:function or"),
    ("nowhere.at.all:good", UserError, "must be exact_sum, file.py:function or"),
    ("{}/afar.py:LIMIT", UserError, "has no LIMIT"),
    ("needs:good", ModuleNotFoundError, "No module named 'no_such_module'"),
]


@pytest.mark.parametrize(("name", "error", "words"), NOT_THERE)
def test_a_reward_that_is_not_there(folder, name, error, words):
    sys.path.append(str(folder))
    with pytest.raises(error, match=words):
        load_reward(name.format(folder), {"exact_sum": len})
