"""Files of your own: rows of prompts and reward functions, read, called and checked.

A mistake in them is told in a line that names the file, the row or the completion. Left out: any format but .jsonl and
hub data sets, and streaming: all rows are in memory.
"""

import importlib.util
import json
import math
import numbers
import os
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import UserError
from infra import faults

# ---- Rows ----


def read_rows(source: str) -> list[dict]:
    """A .jsonl file, or the train split of a hub data set."""
    if not source.endswith((".jsonl", ".json")) and not Path(source).exists():
        return load_hub(source, split="train")
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"--data {source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = Path(source).read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{source}:{line}: not UTF-8 text; save the file as UTF-8") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(read_row(line, f"{source}:{number}"))
    if not rows:
        raise UserError(f'--data {source}: holds no rows; each line must be like {{"prompt": "..."}}')
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]  # the same columns in every call of a reward


def read_row(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{where}: not JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f'{where}: holds a {type(row).__name__}; each line must be an object with a "prompt"')
    check_row(row, where)
    return row


def check_row(row: dict, where: str) -> None:
    if "prompt" not in row:
        raise UserError(f'{where}: has no "prompt"; it has {", ".join(map(repr, row)) or "nothing"}')
    prompt = row["prompt"]
    messages = (
        isinstance(prompt, list)
        and prompt
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
    )
    if not (isinstance(prompt, str) or messages):
        raise UserError(f'{where}: "prompt" must be a string or a list of chat messages: {shown(prompt)}')
    for name in ("prompts", "completions", "completion_ids"):
        if name in row:
            raise UserError(f"{where}: a column is named {name!r}, which every reward is given already; rename it")


def load_hub(name: str, split: str, subset: str | None = None) -> list[dict]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name} is no file, and a hub data set needs the package datasets: pip install datasets, "
            "or give --data a .jsonl file"
        ) from None
    try:
        rows = [dict(row) for row in datasets.load_dataset(name, subset, split=split)]
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UserError(f"data set {name} could not be loaded: {reason}") from error
    return rows


def hold_out(rows: list[dict], count: int, source: str) -> tuple[list[dict], list[dict]]:
    """`count` prompts for evaluation, chosen by a hash: the same in every run, and a prompt that stands twice is on one
    side. The order of the file does not matter."""
    for number, row in enumerate(rows, start=1):
        check_row(row, f"{source}, row {number}")
    keys = [zlib.crc32(json.dumps(row["prompt"]).encode()) for row in rows]
    chosen = set(sorted(set(keys))[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = {key: row for row, key in zip(rows, keys, strict=True) if key in chosen}
    if not train:
        raise UserError(
            f"{source} has {len(set(keys))} prompts and {count} are held out, which leaves none to train on: "
            "lower --eval_prompts, or set --eval_every 0"
        )
    return train, list(held.values())


def shown(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    return repr(text if len(text) <= 200 else text[:200] + "...")


# ---- Reward functions ----


def call_reward(
    reward: Callable, prompts: list, completions: list, ids: list, columns: dict, timeout: float = 600.0
) -> list[float]:
    """What the function gave, checked: a number or None for each completion, nothing else."""
    if not prompts:
        return []

    def fault(i: int, what: str) -> UserError:
        where = f"for prompt {shown(prompts[i])} and completion {shown(completions[i])}"
        return UserError(f"reward function {reward.__name__} {what}, {where}")

    late = threading.Timer(timeout, _too_late, (reward.__name__, timeout))
    late.start()
    try:
        values = reward(prompts=prompts, completions=completions, completion_ids=ids, **columns)
    except (Exception, SystemExit) as error:
        raise fault(*_first_failure(reward, prompts, completions, ids, columns, error)) from error
    finally:
        late.cancel()
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, list | tuple) or len(values) != len(prompts):
        got = f"{len(values)} values" if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        raise fault(0, f"returned {got} where {len(prompts)} were due, one for each completion; the call began")
    for i, value in enumerate(values):
        if value is not None and not math.isfinite(as_number(value)):
            raise fault(i, f"returned {repr(value)[:200]} where a finite number or None was due")
    return [math.nan if value is None else as_number(value) for value in values]


def as_number(value: Any) -> float:
    """A number of Python, NumPy or PyTorch; NaN for anything else."""
    try:
        return float(value) if isinstance(value, numbers.Real) or hasattr(value, "item") else math.nan
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return math.nan


def _too_late(name: str, timeout: float) -> None:
    """Nothing can interrupt a function that hangs, but its process can be ended."""
    faults.report_failure(f"error: reward function {name} took longer than --reward_timeout {timeout:g} seconds")
    os._exit(2)


def _first_failure(reward, prompts, completions, ids, columns, error: Exception) -> tuple[int, str]:
    """Which completion it was: each alone, until one fails too."""
    for i in range(len(prompts)):
        one = {name: values[i : i + 1] for name, values in columns.items()}
        try:
            reward(prompts=prompts[i : i + 1], completions=completions[i : i + 1], completion_ids=ids[i : i + 1], **one)
        except (Exception, SystemExit) as alone:
            return i, f"raised {type(alone).__name__}: {alone}"
    return 0, f"raised {type(error).__name__}: {error}; the call began"


def load_reward(name: str) -> Callable:
    """file.py:function"""
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function:
        raise UserError(f"--reward {name}: must be file.py:function")
    if not Path(path).is_file():
        raise UserError(f"--reward {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"--reward {name}: {path} could not be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise UserError(f"--reward {name}: {path} has no function {function}; it has {', '.join(names) or 'none'}")
    if not hasattr(found, "__name__"):  # an object that can be called
        found.__name__ = function
    return found
