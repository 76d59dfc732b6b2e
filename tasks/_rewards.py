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
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from config import UserError

runner = asyncio.Runner()  # one loop for all calls, so that an HTTP client keeps its connections
thread = ThreadPoolExecutor(1)  # runs that loop, because in a notebook the main thread already runs another one
LARGEST = 1e100  # stays finite even when it is weighted, squared and summed
imported: dict[Path, bytes] = {}  # what was in each file when it was imported

# ---- Find a function ----


def load_function(name: str, own: dict[str, Callable]) -> Callable:
    """Return the function that `name` means: file.py:function, package.module:function, or one of the task's own."""
    if name in own:
        return own[name]
    source, _, function = name.rpartition(":")
    if not source:
        raise UserError(f"{name}: must be {', '.join([*own, 'file.py:function'])} or package.module:function")
    try:
        with torch_settings_put_back():
            module = import_file(Path(source).resolve()) if source.endswith(".py") else importlib.import_module(source)
        found = getattr(module, function)
    except (FileNotFoundError, ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"{name}: {error}") from error
    if not callable(found):
        raise UserError(f"{name}: is not a function")
    reward = functools.partial(found)  # the name of some callables cannot be set, but that of a partial can
    reward.__name__ = getattr(found, "__name__", function)
    return reward


def import_file(path: Path) -> ModuleType:
    """Import a file. It may import its neighbours, the other modules in its folder. Python looks for modules in that
    folder last, so that no neighbour takes the place of a module that something else imports. If a neighbour has the
    name of another module, Python would import the other one without a word, so this is an error."""
    sys.path.append(str(path.parent))
    files = [path]
    for file in files:  # and the neighbours that are appended below
        names, content = imported_by(file), file.read_bytes()  # a file with a syntax error is not imported
        if imported.setdefault(file, content) != content:  # a notebook makes several runs
            raise UserError(f"{file} has changed since this process imported it: start the process again")
        for name in sorted(names):
            for neighbour in (path.parent / f"{name}.py", path.parent / name / "__init__.py"):
                if neighbour.exists() and (other := origin_of(name)) != neighbour:
                    raise UserError(f"{file} imports {name}, and {neighbour} has the name of {other}: rename it")
                if neighbour.exists() and neighbour not in files:
                    files.append(neighbour)
    if origin_of(path.stem) == path:
        return importlib.import_module(path.stem)
    name = f"file {path}"  # another module has its name
    if name not in sys.modules:  # two functions of a file share its variables
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def origin_of(name: str) -> Path:
    """Return the file in which Python finds this module."""
    return Path(str(importlib.util.find_spec(name).origin)).resolve()


def imported_by(file: Path) -> set[str]:
    """Return the names of the modules that this file imports, without those of Python itself. Of a module in a package,
    it is the name of the package."""
    nodes = [*ast.walk(ast.parse(file.read_bytes(), file))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


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


def check_arguments(rewards: list[Callable], names: list[str]) -> None:
    """Raise an error if a reward needs an argument other than these, before hours are spent on a first rollout."""
    for reward in rewards:
        try:
            inspect.signature(reward).bind(**accepted(reward, dict.fromkeys(names)))
        except TypeError as error:
            raise UserError(f"reward function {reward.__name__}: {error}; there are {', '.join(names)}") from error


def copied(value: Any) -> Any:
    """Return a deep copy. For a list of numbers or texts, a shallow one is as good and takes a fifth of the time."""
    is_flat = type(value) is list and {*map(type, value)} <= {int, float, str}
    return value.copy() if is_flat else copy.deepcopy(value)


def values_of(reward: Callable, columns: dict[str, list], of_the_run: dict[str, Any]) -> list[float]:
    """Call a reward function, and return one value for each completion. None becomes NaN, which means "no reward". The
    function gets its own copy of the columns, but not of `of_the_run`."""
    copies = {name: [*map(copied, x)] for name, x in accepted(reward, columns).items()}
    with torch_settings_put_back():
        values = reward(**copies | accepted(reward, of_the_run))
        if inspect.iscoroutine(values):
            values = thread.submit(runner.run, values).result()
        values = [*values] if inspect.isgenerator(values) else values  # here, its own errors are raised
        try:
            numbers = [math.nan if value is None else float(value) for value in values]
        except (OverflowError, TypeError, ValueError) as error:
            what = f"reward function {reward.__name__} has returned {values!r:.200}"
            raise UserError(f"{what}: not a list with a number or None for each completion") from error
    expected = len(columns["prompts"])
    if isinstance(values, dict | set | str) or len(numbers) != expected or any(abs(x) > LARGEST for x in numbers):
        shown = f"{type(values).__name__} {numbers!r:.200}"
        raise UserError(f"reward function {reward.__name__}: {shown} is not a list of {expected} finite numbers")
    return numbers
