"""Reward functions of users: how they are found, what they are given, and what their values are checked for. Left out:
any further sandbox."""

import asyncio
import copy
import functools
import importlib.util
import inspect
import logging
import math
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import set_seed

from config import UserError

warn_once = functools.cache(logging.getLogger(__name__).warning)
event_loop = functools.cache(asyncio.Runner)  # one for all calls, so that a client which is made once stays usable
thread = ThreadPoolExecutor(1)  # of that loop, because in a notebook the main thread runs another one
loaded_from: dict[tuple[str, ...], dict[str, ModuleType]] = {}  # folders -> modules whose names others have as well
LARGEST = 1e100  # finite even when it is weighted, squared and summed
IMMUTABLE = (str, int, float, bool, bytes, type(None))  # not copied, which would be slow


def load_reward(name: str, own: dict[str, Callable], setting: str = "--reward") -> Callable:
    """The function of file.py:function, of package.module:function, or of one of the task's own rewards"""
    if name in own:
        return own[name]
    path, _, function = name.rpartition(":")
    if not path:
        known = ", ".join([*own, "file.py:function or package.module:function"])
        raise UserError(f"{setting} {name}: must be {known}")
    module, folders = _run_file(Path(path)) if path.endswith(".py") else (importlib.import_module(path), ())
    found = getattr(module, function)
    reward = functools.update_wrapper(functools.partial(found), found)  # takes attributes, whatever was found
    reward.__name__, reward.folders = getattr(found, "__name__", function), folders
    return reward


def _run_file(path: Path) -> tuple[ModuleType, tuple[str, ...]]:
    """Run the file as a module of the packages that it is in, so that it can import its neighbours, by relative imports
    too. -> the module, and the folders that it imports from"""
    names, folder = [path.stem], path.resolve().parent
    folders = [str(folder)]
    while (folder / "__init__.py").exists():
        names, folder = [folder.name, *names], folder.parent
        folders.append(str(folder))
    with surroundings(tuple(folders)):
        spec = importlib.util.spec_from_file_location(".".join(names), path)
        module = importlib.util.module_from_spec(spec)
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
    return module, tuple(folders)


@contextmanager
def surroundings(folders: tuple[str, ...]) -> Iterator[None]:
    """Import or call a reward from these folders. Meanwhile their modules come before modules of the same name in this
    program or in the folders of other rewards. Afterwards the settings of PyTorch are what they were, and random
    numbers do not depend on what the reward did with them."""
    dtype, threads, seed, others = torch.get_default_dtype(), torch.get_num_threads(), random.getrandbits(32), {}
    for name in {path.stem for folder in folders for path in Path(folder).iterdir()} - sys.stdlib_module_names:
        loaded = getattr(sys.modules.get(name), "__file__", None)
        own = PathFinder.find_spec(name, folders) if loaded else None
        if own and own.origin and Path(loaded).resolve() != Path(own.origin).resolve():
            for part in [part for part in sys.modules if part.partition(".")[0] == name]:
                others[part] = sys.modules.pop(part)
    sys.modules.update(loaded_from.get(folders, {}))
    sys.path[:] = dict.fromkeys([*folders, *sys.path])
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # puts it back
            yield
    finally:
        loaded_from[folders] = {name: sys.modules[name] for name in others.keys() & sys.modules.keys()}
        sys.modules.update(others)
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        set_seed(seed)


def call_rewards(
    rewards: list[Callable], columns: dict[str, list], run_arguments: dict[str, Any], time_limit: Callable = nullcontext
) -> list[list[float]]:
    """-> for each function its values, one for each completion, NaN where it gave none. Functions that are awaited run
    at the same time. Each function gets its own copy of the columns; `run_arguments` are not copied."""
    results = []
    for reward in rewards:
        taken = room_for(reward, columns | run_arguments)
        given = {name: x if name in run_arguments else [copied(value) for value in x] for name, x in taken.items()}
        with time_limit(reward.__name__), surroundings(getattr(reward, "folders", ())):
            results.append(as_list(reward(**given)))
    awaited = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if awaited:
        folders = getattr(rewards[awaited[0]], "folders", ())
        with time_limit(", ".join(rewards[i].__name__ for i in awaited)), surroundings(folders):
            together = _all_of([results[i] for i in awaited])
            for i, result in zip(awaited, thread.submit(lambda: event_loop().run(together)).result(), strict=True):
                results[i] = as_list(result)
    return [numbers_of(reward, values, columns["prompts"]) for reward, values in zip(rewards, results, strict=True)]


def copied(value: Any) -> Any:
    return value if type(value) in IMMUTABLE else copy.deepcopy(value)


def room_for(reward: Callable, given: dict[str, Any]) -> dict[str, Any]:
    """Those of the given arguments that the function takes."""
    parameters = inspect.signature(reward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: x for name, x in given.items() if name in parameters}


async def _all_of(awaited: list) -> list:
    return await asyncio.gather(*awaited)


def as_list(values: Any) -> Any:
    """A list in place of a tensor, an array or a generator; anything else as it is."""
    values = list(values) if isinstance(values, Iterator) else values
    return values.tolist() if hasattr(values, "tolist") else values


def numbers_of(reward: Callable, values: Any, prompts: list) -> list[float]:
    """A number for each completion, and NaN where the function gave None."""
    if not isinstance(values, list | tuple) or len(values) != len(prompts):
        due = f"a list of {len(prompts)} numbers was due, for prompt {prompts[0]!r:.200} and others"
        raise UserError(f"reward function {reward.__name__} returned {values!r:.200}, where {due}")
    numbers = [math.nan if value is None else float(value) for value in values]
    for value, number, prompt in zip(values, numbers, prompts, strict=True):
        if abs(number) > LARGEST:
            raise UserError(f"reward function {reward.__name__} returned {value} for prompt {prompt!r:.200}")
        if value is not None and math.isnan(number):
            warn_once(f"reward function {reward.__name__} returned nan, which counts as None")
    return numbers
