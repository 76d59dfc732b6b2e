"""Users' reward and reply functions: find them, call them, and check what they return. Left out: a sandbox. A reward
can, for instance, read and write any file."""

import ast
import asyncio
import copy
import functools
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from config import UserError

shared_runner = functools.cache(asyncio.Runner)  # one loop for all calls, so that an HTTP client keeps its connections
thread = ThreadPoolExecutor(1)  # runs that loop, because in a notebook the main thread already runs another one
LARGEST = 1e100  # stays finite even when it is weighted, squared and summed

# ---- Find a function ----


def load_function(name: str, own: dict[str, Callable], setting: str = "--reward") -> Callable:
    """Return the function that `name` means: file.py:function, package.module:function, or one of the task's own."""
    if name in own:
        return own[name]
    source, _, function = name.rpartition(":")
    if not source:
        raise UserError(f"{setting} {name}: must be {', '.join([*own, 'file.py:function'])} or package.module:function")
    try:
        with torch_settings_put_back():
            module = import_file(Path(source).resolve()) if source.endswith(".py") else importlib.import_module(source)
    except ModuleNotFoundError as error:  # of this file or module, or of one that it imports
        raise UserError(f"{setting} {name}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"{setting} {name}: {source} has no function {function}")
    # Wrap the function in a partial, because the name of some callables cannot be set.
    reward = functools.update_wrapper(functools.partial(found), found)
    reward.__name__ = getattr(found, "__name__", function)
    return reward


def import_file(path: Path) -> ModuleType:
    """Import a file. It may import its neighbours, the other modules in its folder. Python looks for modules in that
    folder last, so that no neighbour takes the place of a module that something else imports."""
    if not path.is_file():
        raise ModuleNotFoundError(f"there is no file {path}")
    root, names = path.parent, [path.stem]
    while (root / "__init__.py").exists():  # the file belongs to a package, so it may also use relative imports
        names.insert(0, root.name)
        root = root.parent
    sys.path.append(str(root))
    check_neighbours(path, root)
    if folder_of(names[0]) != root:
        # Another module has this name, such as one of this program, or the rewards.py of another folder. To give this
        # file a name of its own, put the name of a package in front that has only the modules of this folder.
        package = f"modules_of_{bytes(root).hex()}"
        sys.modules.setdefault(package, ModuleType(package)).__path__ = [str(root)]
        names.insert(0, package)
    return importlib.import_module(".".join(names))


def check_neighbours(path: Path, root: Path) -> None:
    """Raise an error if this file, or a neighbour that it imports, imports a neighbour in the folder `root` whose name
    another module has, too. Python would import the other one without a word."""
    files = [path]
    for file in files:  # and those that are appended below
        nodes = [*ast.walk(ast.parse(file.read_bytes(), file))]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
        for name in sorted({name.partition(".")[0] for name in names} - sys.stdlib_module_names):
            neighbours = [one for one in (root / f"{name}.py", root / name / "__init__.py") if one.exists()]
            if neighbours and (folder := folder_of(name)) != root:
                other = f"{neighbours[0]} has the name of a module in {folder}"
                raise UserError(f"{file} imports {name}, but {other}: rename it")
            files += [one for one in neighbours if one not in files]


def folder_of(name: str) -> Path:
    """Return the folder in which Python finds the module or package with this name."""
    spec = importlib.util.find_spec(name)
    return Path((spec.submodule_search_locations or [spec.origin])[0]).parent.resolve()


# ---- A reward for every task ----


def overlong(completion_ids: list[list[int]], trainer_state: Any, **columns: list) -> list[float]:
    """Penalize long completions, DAPO 2503.14476 eq. 13: 0, and from -1 / buffer to -1 over the last tokens before the
    limit."""
    limit = trainer_state.max_completion_length
    buffer = trainer_state.overlong_buffer or max(1, limit // 5)
    return [-min(max(0, len(ids) - (limit - buffer)) / buffer, 1.0) for ids in completion_ids]


# ---- Call functions ----


@contextmanager
def torch_settings_put_back() -> Iterator[None]:
    """Afterwards, put back the settings of PyTorch that a reward may change, for instance if it calls a model."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        with torch.set_grad_enabled(torch.is_grad_enabled()):  # restores the mode at its end
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def accepted(reward: Callable, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return those arguments that the function has parameters for."""
    parameters = inspect.signature(reward).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: x for name, x in arguments.items() if takes_all or name in parameters}


def check_arguments(rewards: list[Callable], names: list[str], rows: str) -> None:
    """Raise an error if a reward needs an argument other than these."""
    for reward in rewards:
        try:
            inspect.signature(reward).bind(**accepted(reward, dict.fromkeys(names)))
        except TypeError as error:
            there = f"for {rows}, there are {', '.join(names)}"
            raise UserError(f"reward function {reward.__name__}: {error}; {there}") from error


def values_of(
    rewards: list[Callable], columns: dict[str, list], of_the_run: dict[str, Any], time_limit: Callable = nullcontext
) -> list[list[float]]:
    """Call every reward function, and return a list for each: one value for each completion, NaN where the function
    gave none. Asynchronous functions run at the same time. Each function gets its own copy of the columns, but not of
    `of_the_run`."""
    results = []
    for reward in rewards:
        copies = {name: [*map(copy.deepcopy, x)] for name, x in accepted(reward, columns).items()}
        with time_limit(f"reward function {reward.__name__}"), torch_settings_put_back():
            results.append(as_list(reward(**copies | accepted(reward, of_the_run))))
    awaited = [i for i, result in enumerate(results) if inspect.isawaitable(result)]
    if awaited:

        async def gather() -> list:
            return await asyncio.gather(*(results[i] for i in awaited))

        names = ", ".join(rewards[i].__name__ for i in awaited)
        with time_limit(f"reward function {names}"), torch_settings_put_back():
            gathered = thread.submit(shared_runner().run, gather()).result()
            for i, result in zip(awaited, gathered, strict=True):
                results[i] = as_list(result)
    return [numbers_of(reward, values, columns["prompts"]) for reward, values in zip(rewards, results, strict=True)]


def as_list(values: Any) -> Any:
    """Turn a tensor, an array or a generator into a list, and return anything else unchanged."""
    values = list(values) if isinstance(values, Iterator) else values
    return values.tolist() if hasattr(values, "tolist") else values


def numbers_of(reward: Callable, values: Any, prompts: list) -> list[float]:
    """Turn what the function returned into floats. None becomes NaN, which means "no reward"."""
    with suppress(Exception):  # `float` may raise anything if a value is not a number
        numbers = [math.nan if value is None else float(value) for value in values]
        too_large = any(abs(number) > LARGEST for number in numbers)
        if isinstance(values, list | tuple) and len(values) == len(prompts) and not too_large:
            return numbers
    expected = f"{len(prompts)} numbers were expected, for prompt {prompts[0]!r:.200} and others"
    raise UserError(f"reward function {reward.__name__} returned {values!r:.200}; {expected}")
