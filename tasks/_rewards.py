"""Users' reward functions: find them, call them, and check what they return.

`isolated` keeps a reward from changing what this program imports and computes. Left out: a sandbox. A reward can,
for instance, read and write any file.
"""

import asyncio
import copy
import functools
import importlib
import inspect
import math
import pkgutil
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import set_seed

from config import UserError

shared_runner = functools.cache(asyncio.Runner)  # one loop for all calls, so that an HTTP client keeps its connections
thread = ThreadPoolExecutor(1)  # runs that loop, because in a notebook the main thread already runs another one
# For each set of folders, the modules that rewards imported from there. `isolated` puts them into sys.modules.
modules_of: dict[tuple[str, ...], dict[str, ModuleType]] = {}
PROGRAM = str(Path(__file__).resolve().parent.parent)  # the folder of this program
LARGEST = 1e100  # stays finite even when it is weighted, squared and summed


def load_function(name: str, own: dict[str, Callable], setting: str = "--reward") -> Callable:
    """Return the function that `name` means: file.py:function, package.module:function, or one of the task's own."""
    if name in own:
        return own[name]
    path, _, function = name.rpartition(":")
    if not path:
        raise UserError(f"{setting} {name}: must be {', '.join([*own, 'file.py:function'])} or package.module:function")
    module, folders = import_file(Path(path)) if path.endswith(".py") else (importlib.import_module(path), ())
    found = getattr(module, function)
    # Wrap the function in a partial, because the attributes below cannot be set on a built-in function.
    reward = functools.update_wrapper(functools.partial(found), found)
    reward.__name__, reward.folders = getattr(found, "__name__", function), folders
    return reward


def import_file(path: Path) -> tuple[ModuleType, tuple[str, ...]]:
    """Import the file as a module of the packages that contain it, so that relative imports work too. Return the
    module, and the folders that it imports from."""
    names, folders = [path.stem], [path.resolve().parent]
    while (folders[-1] / "__init__.py").exists():
        names.insert(0, folders[-1].name)
        folders.append(folders[-1].parent)
    folders = tuple(map(str, folders))
    with isolated(folders):
        module = importlib.import_module(".".join(names))
    if not path.samefile(module.__file__):  # for instance a module of the standard library
        raise UserError(f"{path}: Python finds {module.__file__} under this name: rename the file")
    return module, folders


@contextmanager
def isolated(folders: tuple[str, ...]) -> Iterator[None]:
    """Isolate a reward from this program while the reward is imported or called. A module in the reward's folders then
    comes before a module of the same name in this program or in another reward's folders. Afterwards, PyTorch's global
    settings are what they were, and the random generators are seeded with a number that was drawn at the start. So the
    program's later random numbers do not depend on what the reward draws."""
    dtype, threads, seed = torch.get_default_dtype(), torch.get_num_threads(), random.getrandbits(32)
    names = module_names(folders)
    modules_outside = swap_modules(names, modules_of.get(folders, {}))
    sys.path[:] = dict.fromkeys([*folders, *sys.path])  # stays so, because a thread of the reward may import later
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores the mode at its end
            yield
    finally:
        modules_of[folders] = swap_modules(names, modules_outside)  # keeps the reward's modules for its next call
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        set_seed(seed)


@functools.cache
def module_names(folders: tuple[str, ...]) -> set[str]:
    """Return the names of the modules in these folders. `isolated` swaps these modules. A reward in the folder of this
    program uses the same modules as the program, so that folder is skipped."""
    names = {module.name for module in pkgutil.iter_modules(folder for folder in folders if folder != PROGRAM)}
    return names - sys.stdlib_module_names


def swap_modules(names: set[str], replacements: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Unload all modules with these names, and their submodules, and load the replacements. Return the modules that
    were unloaded."""
    unloaded = {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] in names}
    sys.modules.update(replacements)
    return unloaded


def call_each(
    rewards: list[Callable], columns: dict[str, list], run_arguments: dict[str, Any], time_limit: Callable = nullcontext
) -> list[list[float]]:
    """Call every reward function, and return a list for each: one value for each completion, NaN where the function
    gave none. Asynchronous functions run at the same time. Each function gets its own copy of the columns, but not of
    `run_arguments`."""
    results = []
    for reward in rewards:
        parameters = inspect.signature(reward).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        copies = {name: [*map(copy.deepcopy, x)] for name, x in columns.items() if takes_all or name in parameters}
        given = copies | {name: x for name, x in run_arguments.items() if takes_all or name in parameters}
        with time_limit(reward.__name__), isolated(getattr(reward, "folders", ())):
            results.append(as_list(reward(**given)))
    awaited = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if awaited:

        async def gather() -> list:
            return await asyncio.gather(*(results[i] for i in awaited))

        # They run at the same time, so all of them run with the modules of the first one.
        folders = getattr(rewards[awaited[0]], "folders", ())
        with time_limit(", ".join(rewards[i].__name__ for i in awaited)), isolated(folders):
            gathered = thread.submit(shared_runner().run, gather()).result()
            for i, result in zip(awaited, gathered, strict=True):
                results[i] = as_list(result)
    return [numbers_of(reward, values, columns["prompts"]) for reward, values in zip(rewards, results, strict=True)]


def as_list(values: Any) -> Any:
    """Turn a tensor, an array or a generator into a list, and return anything else unchanged."""
    values = list(values) if isinstance(values, Iterator) else values
    return values.tolist() if hasattr(values, "tolist") else values


def numbers_of(reward: Callable, values: Any, prompts: list) -> list[float]:
    """Check what the function returned, and turn it into floats. None becomes NaN, which means "no reward"."""
    if not isinstance(values, list | tuple) or len(values) != len(prompts):
        expected = f"a list of {len(prompts)} numbers was expected, for prompt {prompts[0]!r:.200} and others"
        raise UserError(f"reward function {reward.__name__} returned {values!r:.200}; {expected}")
    numbers = [math.nan if value is None else float(value) for value in values]
    for number, prompt in zip(numbers, prompts, strict=True):
        if abs(number) > LARGEST:
            raise UserError(f"reward function {reward.__name__} returned {number} for prompt {prompt!r:.200}")
    return numbers
