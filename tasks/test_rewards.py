"""Reward functions: how they are found, what they are given, and what comes of what they return."""

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
from tasks._rewards import call_rewards, event_loop, load_reward, warn_once

ANSWERS = ["x" * 99, 10**9, [1]]
COLUMNS = dict(prompts=["p0", "p1", "p2"], completions=["c0", "c1", "c2"], completion_ids=[[5], [6], [7]])
NAN = "reward function mine returned nan, which counts as None"
FINE = [  # a return value for 1, None and -2.5, and what is noted
    ([1.0, None, -2.5], []),
    ([True, None, np.float32(-2.5)], []),
    ([torch.tensor(1.0), None, torch.tensor([-2.5])], []),
    ((x for x in (1, None, Decimal("-2.5"))), []),
    (map(float, ["1", "nan", "-2.5"]), [NAN]),
    (torch.tensor([1.0, math.nan, -2.5]), [NAN]),
]
LIST = ", where a list of 3 numbers was due, for prompt 'p0' and others"
WRONG = [  # a return value, and the error
    ([1.0, 2.0], f"[1.0, 2.0]{LIST}"),
    (None, f"None{LIST}"),
    ("abc", f"'abc'{LIST}"),
    (torch.tensor([0.0, -torch.inf, 0.0]), "-inf for prompt 'p1'"),
    ([1.0, 1.0, -1.01e100], "-1.01e+100 for prompt 'p2'"),
]
FILES = {
    "nearby.py": "FACTOR = 3.0\n",
    "afar.py": """
import functools
def mine(completions):
    import nearby
    return [nearby.FACTOR] * len(completions)
bound = functools.partial(mine)
""",
    "installed/needs.py": "import no_such_module\n",
    "installed/installed.py": "def mine(prompts):\n    return [0.0] * len(prompts)\n",
    "chat.py": """
def correctness(prompts, completions, answer, **kwargs) -> list[float]:
    answers = [completion[0]["content"].split("#")[-1] for completion in completions]
    return [2.0 if given == right else 0.0 for given, right in zip(answers, answer)]
""",
    "r1/__init__.py": "",
    "r1/helper.py": "SOFT = 2\n",
    "r1/rewards.py": """
from .helper import SOFT
def get_soft_punishment(limit, soft):
    def soft_punishment(completion_ids, **kwargs):
        return [min(0.0, (limit - soft - len(ids)) / soft) for ids in completion_ids]
    return soft_punishment
soft_punishment = get_soft_punishment(limit=5, soft=SOFT)
""",
}
OF_TRL = [  # a function, and its values for "1#46" and "46"
    ("chat.py:correctness", [2.0, 2.0]),
    ("r1/rewards.py:soft_punishment", [-1.0, 0.0]),
    ("afar.py:mine", [3.0, 3.0]),
    ("afar.py:bound", [3.0, 3.0]),
    ("installed:mine", [0.0, 0.0]),
]
NOT_THERE = [  # a name, the error, what is said
    ("good", UserError, "--reward good: must be exact_sum, file.py:function or package.module:function"),
    ("nowhere.py:good", FileNotFoundError, "nowhere.py"),
    ("nowhere.at.all:good", ModuleNotFoundError, "No module named 'nowhere'"),
    ("afar.py:LIMIT", AttributeError, "LIMIT"),
    ("needs:good", ModuleNotFoundError, "No module named 'no_such_module'"),
]


def call(reward, **columns) -> list[float]:
    return call_rewards([reward], COLUMNS | columns, {})[0]


def mine(values) -> list[float]:
    """What comes of the values that a reward of this name returns."""
    return call(functools.wraps(mine)(lambda **columns: values))


@pytest.mark.parametrize(("values", "noted"), FINE)
def test_numbers_and_none_are_fine(caplog, values, noted):
    warn_once.cache_clear()
    got = mine(values)
    assert got[0] == 1.0 and math.isnan(got[1]) and got[2] == -2.5 and {*map(type, got)} == {float}
    assert mine([math.nan if noted else None] * 3) and caplog.messages == noted, "once"


@pytest.mark.parametrize(("values", "told"), WRONG)
def test_anything_else_names_function_and_prompt(values, told):
    with pytest.raises(UserError, match=f"^reward function mine returned {re.escape(told)}$"):
        mine(values)


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
    """Each row has its own, and each function. What cannot be changed is not copied."""

    def spoils(prompts, completions, completion_ids, more):
        for value in (prompts[0], completions, completion_ids[0], more[0]["n"]):
            value.append("spoiled")
        return [len(a) + len(b) + len(c["n"]) for a, b, c in zip(prompts, completion_ids, more, strict=True)]

    given = dict(prompts=[[{}]] * 2, completions=["a", "b"], completion_ids=[[9]] * 2, more=[{"n": [1]}] * 2)
    before = copy.deepcopy(given)
    assert call_rewards([spoils, spoils], given, {}) == [[6.0, 3.0]] * 2 and given == before
    assert call(lambda answer: [float(x is y) for x, y in zip(answer, ANSWERS)], answer=ANSWERS) == [1.0, 1.0, 0.0]


def test_rewards_that_are_awaited_run_at_the_same_time():
    """Two that wait for each other, with one time limit around both. One event loop serves all calls, and a function
    may have one of its own. A generator works while it is read."""
    events, loops = [], []

    @contextlib.contextmanager
    def time_limit(name: str):
        events.append(f"({name}")
        yield
        events.append(")")

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
    assert " ".join(events[:11]) == "(asked ) (read read ) (own ) (asked ) (asked, asked read" and len({*loops}) == 1
    assert events[:13] == events[13:] and len(loops) == 4


def test_rewards_are_awaited_where_an_event_loop_is_running():
    async def in_a_notebook():
        return call_rewards([lambda completions: asyncio.sleep(0, [1.0] * 3)], COLUMNS, {})

    event_loop.cache_clear()
    assert [asyncio.run(in_a_notebook()) for _ in range(2)] == [[[1.0] * 3]] * 2
    event_loop.cache_clear()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Files that find each other; what a test imports from here is gone afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "installed")])
    monkeypatch.chdir(tmp_path)
    before = {*sys.modules}
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


NEIGHBOURS = """
import config, functools, tasks.helper
import train
def mine(completions):
    import loss
    return [config.N + tasks.helper.N + loss.N + train.N] * len(completions)
async def awaited(completions):
    import batch
    return [batch.N] * len(completions)
bound = functools.partial(mine)
"""


def test_neighbours_come_before_modules_of_this_program(folder):
    """Of two projects, while their rewards are imported and called, and never for the program itself."""
    ours = {name: sys.modules[name] for name in ("config", "loss", "batch", "tasks", "tasks._rewards")}
    rewards = []
    for place, n in (("x", 1), ("y", 2)):
        (folder / place / "tasks").mkdir(parents=True)
        for name in ("config", "train", "loss", "batch", "tasks/__init__", "tasks/helper"):
            (folder / place / f"{name}.py").write_text(f"N = {n}\n")
        (folder / place / "rewards.py").write_text(NEIGHBOURS)
        rewards += [load_reward(f"{folder}/{place}/rewards.py:{name}", {}) for name in ("mine", "bound", "awaited")]
    for _ in range(2):
        assert call_rewards(rewards[:3], COLUMNS, {}) == [[4.0] * 3, [4.0] * 3, [1.0] * 3]
        assert call_rewards(rewards[3:], COLUMNS, {}) == [[8.0] * 3, [8.0] * 3, [2.0] * 3]
        assert {name: sys.modules[name] for name in ours} == ours
        assert call(load_reward(f"{__name__}:words", {})) == [2.0] * 3, "not a neighbour: of this program"


def words(completions):
    import config

    return [2.0 * (config.UserError is UserError)] * len(completions)


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


def test_what_a_reward_changes_in_pytorch_and_random_is_put_back(folder):
    """What is drawn after it does not depend on it, and is not the same each time."""
    (folder / "meddles.py").write_text(MEDDLES)
    fine = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()
    drawn = []

    def draw(completions):
        drawn.append((random.random(), np.random.rand(), float(torch.rand(1))))
        return [0.0] * len(completions)

    rewards = [load_reward(f"meddles.py:{name}", {}) for name in ("mine", "awaited")]
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == fine
    for harmless in (False, True):
        set_seed(1)
        for reward in rewards:
            call_rewards([draw if harmless else reward, draw], COLUMNS, {})
            assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()) == fine
    assert len({*drawn[:2]}) == 2 and drawn[:1] == drawn[3:4]


def test_each_file_finds_its_own_neighbours(folder):
    text = "import nearby\ndef mine(completions):\n    return [nearby.FACTOR] * 3\n"
    for name, factor in (("one", 1.0), ("two", 2.0)):
        (folder / name).mkdir()
        (folder / name / "nearby.py").write_text(f"FACTOR = {factor}\n")
        (folder / name / "rewards.py").write_text(text)
    rewards = [load_reward(f"{folder}/{name}/rewards.py:mine", {}) for name in ("one", "two", "one")]
    assert call_rewards(rewards, COLUMNS, {}) == [[1.0] * 3, [2.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(("name", "error", "words"), NOT_THERE)
def test_a_reward_that_is_not_there(folder, name, error, words):
    with pytest.raises(error, match=words):
        load_reward(name, {"exact_sum": len})


@pytest.mark.parametrize(("reward", "values"), OF_TRL)
def test_it_runs_as_it_is(folder, reward, values):
    texts, prompts = ("1#46", "46"), [[{"role": "user", "content": "12+34="}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    given = dict(prompts=prompts, completions=completions, completion_ids=[[1] * 5, [1] * 3], answer=["46", "46"])
    assert call_rewards([load_reward(reward, {})], given, {}) == [values]
    assert load_reward("min", {"min": max}) is max, "one of the task's own"
