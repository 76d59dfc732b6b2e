"""Reward functions of the user's own: found by their names, called with copies of what they take, and their values
checked. Left out: any further sandbox."""

import asyncio
import copy
import functools
import importlib.util
import inspect
import logging
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from config import UserError

warn_once = functools.cache(logging.getLogger(__name__).warning)
event_loop = functools.cache(asyncio.Runner)  # one for all calls: a client that is made once stays usable
thread = ThreadPoolExecutor(1)  # for that loop where another one is running, as in a notebook
folders: list[Path] = []  # of files of rewards
LARGEST = 1e100  # weighted, squared and summed, it is still a number


def load_reward(name: str, own: dict[str, Callable], setting: str = "--reward") -> Callable:
    """file.py:function, package.module:function of what is installed, or one of the task's own"""
    if name in own:
        return own[name]
    path, _, function = name.rpartition(":")
    is_file = path.endswith(".py")
    if not path or not (Path(path).is_file() if is_file else importlib.util.find_spec(path.partition(".")[0])):
        known = ", ".join([*own, "file.py:function or package.module:function that is there"])
        raise UserError(f"{setting} {name}: must be {known}")
    module = _run_file(Path(path)) if is_file else importlib.import_module(path)
    if not hasattr(module, function):
        raise UserError(f"{setting} {name}: {path} has no {function}")
    found = getattr(module, function)
    if not hasattr(found, "__name__"):  # an object that can be called
        found.__name__ = function
    return found


def _run_file(path: Path) -> ModuleType:
    """As a module of the packages it stands in, so that it can import its neighbours, relatively too. They come after
    what is there of this name here, also for processes that it starts."""
    names, folder = [path.stem], path.resolve().parent
    sys.path.insert(1, str(folder))
    while (folder / "__init__.py").exists():
        names, folder = [folder.name, *names], folder.parent
        sys.path.insert(1, str(folder))
    for neighbour in path.resolve().parent.glob("*.py"):  # one of this name may be that of another file
        other = Path(getattr(sys.modules.get(neighbour.stem), "__file__", None) or "")
        if other.parent in folders and other != neighbour:
            del sys.modules[neighbour.stem]
    folders.append(path.resolve().parent)
    spec = importlib.util.spec_from_file_location(".".join(names), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


def call_rewards(
    rewards: list[Callable], columns: dict[str, list], of_the_run: dict[str, Any], time_limit: Callable = nullcontext
) -> list[list[float]]:
    """A list for each function, with a number for each completion; NaN where it gave none. Those that are awaited run
    at the same time. A column is copied, value by value; what is `of_the_run` is given as it is."""
    values = []  # of each function
    for reward in rewards:
        taken = room_for(reward, columns | of_the_run)
        given = {name: x if name in of_the_run else [copy.deepcopy(y) for y in x] for name, x in taken.items()}
        with time_limit(reward.__name__):
            values.append(as_list(reward(**given)))
    awaited = [i for i, value in enumerate(values) if inspect.isawaitable(value)]
    if awaited:
        with time_limit(", ".join(rewards[i].__name__ for i in awaited)):
            run, all_of = event_loop().run, _all_of([values[i] for i in awaited])
            given = thread.submit(run, all_of).result() if asyncio._get_running_loop() else run(all_of)
            for i, value in zip(awaited, given, strict=True):
                values[i] = as_list(value)
    return [numbers_of(reward, of_one, columns) for reward, of_one in zip(rewards, values, strict=True)]


def room_for(reward: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """Of what is given, the arguments that the function has."""
    parameters = inspect.signature(reward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: x for name, x in given.items() if name in parameters}


async def _all_of(awaited: list) -> list:
    return await asyncio.gather(*awaited)


def as_list(values: Any) -> Any:
    """Of a tensor, an array or a generator; anything else as it is."""
    values = list(values) if isinstance(values, Iterator) else values
    return values.tolist() if hasattr(values, "tolist") else values


def numbers_of(reward: Callable, values: Any, columns: dict[str, list]) -> list[float]:
    """What the function gave, checked: a number for each completion, and NaN where it gave None."""
    told, prompts = f"reward function {reward.__name__} returned", columns["prompts"]
    if not isinstance(values, list | tuple) or len(values) != len(prompts):
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"{values!r:.200}"
        due = f"a list of {len(prompts)} was due, for prompt {prompts[0]!r:.200} and those after it"
        raise UserError(f"{told} {got} where {due}")
    numbers = [to_number(value) for value in values]
    for value, number, prompt in zip(values, numbers, prompts, strict=True):
        if abs(number) > LARGEST:
            due = f"a number up to {LARGEST:g} or None was due, for prompt {prompt!r:.200}"
            raise UserError(f"{told} {value!r:.200} where {due}")
        if value is not None and math.isnan(number):
            warn_once(f"{told} nan, which counts as None")
    return numbers


def to_number(value: Any) -> float:
    """NaN for None; infinity for what is no number."""
    try:
        return math.nan if value is None else math.inf if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.inf
