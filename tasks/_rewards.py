"""Users' reward functions: find them, call them, and check what they return.

`surroundings` keeps a reward from changing what this program imports and computes. There is no other sandbox: a reward
can read and write files, for instance.
"""

import asyncio
import copy
import functools
import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from config import UserError

event_loop = functools.cache(asyncio.Runner)  # all calls share one loop, so that a client keeps its connections
thread = ThreadPoolExecutor(1)  # runs that loop, because in a notebook the main thread already runs another one
modules_of: dict[str, dict[str, ModuleType]] = {}  # folder -> the modules that its rewards have imported
PROGRAM = str(Path(__file__).resolve().parent.parent)  # the folder of this program


def load_function(name: str, own: dict[str, Callable], setting: str = "--reward") -> Callable:
    """Return the function that `name` means: file.py:function, package.module:function, or one of the task's own. The
    file may import other files of its folder."""
    if name in own:
        return own[name]
    path, _, function = name.rpartition(":")
    if not path:
        raise UserError(f"{setting} {name}: must be {', '.join([*own, 'file.py:function'])} or package.module:function")
    is_file = path.endswith(".py")
    folder = str(Path(path).resolve().parent) if is_file else PROGRAM
    with surroundings(folder):
        found = getattr(importlib.import_module(Path(path).stem if is_file else path), function)
    # The attributes are set on a copy, because a built-in function takes none.
    reward = functools.update_wrapper(functools.partial(found), found)
    reward.__name__, reward.folder = getattr(found, "__name__", function), folder
    return reward


@contextmanager
def surroundings(folder: str) -> Iterator[None]:
    """Isolate a reward from this program while it is imported or called. A module in the reward's folder then comes
    before a module of the same name in this program or in another reward's folder. Afterwards, PyTorch's default dtype
    and gradient mode are what they were."""
    dtype = torch.get_default_dtype()
    # A reward in the folder of this program shares the program's modules.
    neighbours = pkgutil.iter_modules([folder] if folder != PROGRAM else [])
    names = {module.name for module in neighbours} - sys.stdlib_module_names
    modules_of_program = swap_modules(names, modules_of.get(folder, {}))
    sys.path[:] = dict.fromkeys([folder, *sys.path])  # the folder comes first, and is in the list only once
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores the mode at its end
            yield
    finally:
        modules_of[folder] = swap_modules(names, modules_of_program)  # keeps the reward's modules for its next call
        torch.set_default_dtype(dtype)


def swap_modules(names: set[str], replacements: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Unload all modules with these names, and their submodules, and load the replacements. Return the modules that
    were unloaded."""
    unloaded = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}
    sys.modules.update(replacements)
    return unloaded


def call_rewards(
    rewards: list[Callable], columns: dict[str, list], run_arguments: dict[str, Any], time_limit: Callable = nullcontext
) -> list[list[float]]:
    """Call every function, and return its values: one for each completion, NaN where it gave none. Asynchronous
    functions run at the same time. Each function gets its own copy of the columns; `run_arguments` are not copied."""
    results = []
    for reward in rewards:
        parameters = inspect.signature(reward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        copies = {name: [*map(copy.deepcopy, x)] for name, x in columns.items() if takes_all or name in parameters}
        given = copies | {name: x for name, x in run_arguments.items() if takes_all or name in parameters}
        with time_limit(reward.__name__), surroundings(getattr(reward, "folder", PROGRAM)):
            results.append(as_list(reward(**given)))
    awaited = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if awaited:

        async def gather() -> list:
            return await asyncio.gather(*(results[i] for i in awaited))

        # They run at the same time, so they all have the surroundings of the first one.
        folder = getattr(rewards[awaited[0]], "folder", PROGRAM)
        with time_limit(", ".join(rewards[i].__name__ for i in awaited)), surroundings(folder):
            for i, result in zip(awaited, thread.submit(lambda: event_loop().run(gather())).result(), strict=True):
                results[i] = as_list(result)
    return [numbers_of(reward, values, columns["prompts"]) for reward, values in zip(rewards, results, strict=True)]


def as_list(values: Any) -> Any:
    """Turn a tensor, an array or a generator into a list, and return anything else unchanged."""
    values = list(values) if isinstance(values, Iterator) else values
    return values.tolist() if hasattr(values, "tolist") else values


def numbers_of(reward: Callable, values: Any, prompts: list) -> list[float]:
    """Check what the function returned, and turn it into floats. None becomes NaN, which means "no reward"."""
    if not isinstance(values, list | tuple) or len(values) != len(prompts):
        raise UserError(f"reward function {reward.__name__} returned {values!r:.200}, not {len(prompts)} numbers")
    numbers = [math.nan if value is None else float(value) for value in values]
    for number, prompt in zip(numbers, prompts, strict=True):
        if math.isinf(number):
            raise UserError(f"reward function {reward.__name__} returned {number} for prompt {prompt!r:.200}")
    return numbers
