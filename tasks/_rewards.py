"""Reward functions, which are the user's own code: found, checked against what they will be given, and called.

A function gets copies, and what it takes of them; random state, grad mode, default dtype and working directory are
afterwards as they were. Left out: any further sandbox.
"""

import asyncio
import copy
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from config import UserError
from tasks._files import as_user_error, excerpt

GIVEN = ("prompts", "completions", "completion_ids")
OF_THE_RUN = ("trainer_state", "log_metric", "log_extra")
LARGEST = 1e100  # weighted, squared and summed, it is still a number


# ---- Found by their names ----


def load_reward(name: str, own: list[str]) -> Callable:
    """file.py:function, or package.module:function of what is installed. `own`: names that the task has"""
    path, _, function = name.rpartition(":")
    if not path or not function:
        others = "".join(f", or {reward} of the task" for reward in own)
        raise UserError(f"--reward {name}: must be file.py:function or package.module:function{others}")
    if path.endswith(".py") and not Path(path).is_file():
        raise UserError(f"--reward {name}: there is no file {path}")
    with as_user_error(f"--reward {name}: {path} could not be loaded:"), as_it_was():
        module = _run_file(Path(path)) if path.endswith(".py") else importlib.import_module(path)
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UserError(f"--reward {name}: {path} has no function {function}; it has {', '.join(names) or 'none'}")
    if not hasattr(found, "__name__"):  # an object that can be called
        found.__name__ = function
    return found


def _run_file(path: Path) -> ModuleType:
    """As a module of the packages it stands in, so that it can import its neighbours, relatively too. They come after
    what is there of this name here, also for processes that it starts."""
    names, root = [path.stem], path.resolve().parent
    sys.path.insert(1, str(root))
    while (root / "__init__.py").exists():
        names, root = [root.name, *names], root.parent
        sys.path.insert(1, str(root))
    spec = importlib.util.spec_from_file_location(".".join(names), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    spec.loader.exec_module(module)
    return module


# ---- What they take ----


def _signature(reward: Callable) -> inspect.Signature:
    """Of what a decorator wraps; but of a partial, without what is bound. Some that are written in C do not tell, and
    count as taking anything."""
    try:
        return inspect.signature(reward, follow_wrapped=not isinstance(reward, functools.partial))
    except ValueError:
        return inspect.signature(lambda **columns: None)


def taken(reward: Callable, names: list[str]) -> list[str]:
    """Of these names, those that the function has room for."""
    parameters = _signature(reward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return names
    return [parameter.name for parameter in parameters if parameter.name in names]


def check_signature(reward: Callable, names: list[str]) -> None:
    """A call with these names can be made."""
    takes = taken(reward, names)
    if not any(name in GIVEN for name in takes):
        raise UserError(f"reward function {reward.__name__}: takes none of {', '.join(GIVEN)}; {_to_bind(reward)}")
    try:
        _signature(reward).bind(**dict.fromkeys(takes))
    except TypeError as error:
        told = f"{error}; what it can be given is {', '.join(names)}"
        raise UserError(f"reward function {reward.__name__}: {told}") from None


def _to_bind(reward: Callable) -> str:
    return (
        f"if it makes a reward, make one in a file of your own, mine = {reward.__name__}(...), "
        "and give --reward file.py:mine"
    )


# ---- Calls ----


@contextmanager
def as_it_was() -> Iterator[None]:
    """Random state, grad mode, default dtype and working directory are put back."""
    own, numpy, folder = random.getstate(), np.random.get_state(), os.getcwd()
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(own)
            np.random.set_state(numpy)
            os.chdir(folder)
            torch.set_grad_enabled(grad)
            torch.set_default_dtype(dtype)


def call_rewards(
    rewards: list[Callable],
    columns: dict[str, list],
    time_limit: Callable[[str], AbstractContextManager] = nullcontext,
    **others: Any,
) -> list[list[float]]:
    """A list for each function, with a number for each completion; NaN where it gave none. Functions that are awaited
    run at the same time. `others` are given as they are."""

    @contextmanager
    def limited(reward: Callable) -> Iterator[None]:
        with time_limit(reward.__name__), as_user_error(f"reward function {reward.__name__} raised"):
            yield

    async def awaited(reward: Callable, values: Any) -> Any:
        with limited(reward):
            return listed(await values) if inspect.isawaitable(values) else values

    async def together(values: list) -> list:
        return await asyncio.gather(*map(awaited, rewards, values))

    values = []  # of each function
    for reward in rewards:
        # Each value by itself, also of a row that stands several times.
        given = {name: [copy.deepcopy(x) for x in columns[name]] for name in taken(reward, [*columns])}
        given |= {name: others[name] for name in taken(reward, [*others])}
        with limited(reward), as_it_was():
            values.append(listed(reward(**given)))
    if any(map(inspect.isawaitable, values)):
        with as_it_was():
            values = _runner().run(together(values))
    return [numbers_of(reward, of_one, columns) for reward, of_one in zip(rewards, values, strict=True)]


@functools.cache
def _runner() -> asyncio.Runner:
    """One event loop for all calls: a client that is made once stays usable."""
    return asyncio.Runner()


# ---- What they return ----


def listed(values: Any) -> Any:
    """Of a tensor, or of a generator, which runs the user's code too and so is read where that is watched."""
    values = list(values) if isinstance(values, Iterator) else values
    return values.tolist() if hasattr(values, "tolist") else values


def numbers_of(reward: Callable, values: Any, columns: dict[str, list]) -> list[float]:
    """What the function gave, checked: a number for each completion, and NaN where it gave None."""
    name, prompts = reward.__name__, columns["prompts"]
    if callable(values):
        raise UserError(f"reward function {name} returned a {type(values).__name__}; {_to_bind(reward)}")

    def wrong(i: int, what: str) -> UserError:
        where = f"for prompt {excerpt(prompts[i])} and completion {excerpt(columns['completions'][i])}"
        return UserError(f"reward function {name} returned {what}, {where}")

    if not isinstance(values, list | tuple) or len(values) != len(prompts):
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        raise wrong(0, f"{got} where {len(prompts)} were due, one for each completion; the call began")
    read = []
    for i, value in enumerate(values):
        number = math.nan if value is None else as_number(value)
        if number is None or abs(number) > LARGEST:
            raise wrong(i, f"{repr(value)[:200]} where a number up to {LARGEST:g} or None was due")
        if value is not None and math.isnan(number):
            say_once(f"reward function {name} returned nan, which counts as None")
        read.append(number)
    return read


def as_number(value: Any) -> float | None:
    """A number of Python, NumPy or PyTorch; None for anything else."""
    try:
        return float(value) if isinstance(value, numbers.Real) or hasattr(value, "item") else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None


@functools.cache
def say_once(line: str) -> None:
    print(f"note: {line}", file=sys.stderr)
