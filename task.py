"""What is asked and how an answer is scored: rows of prompts, reward functions, files of your own.

A row is a dictionary: "prompt", a string or a list of chat messages, and any columns that the rewards need. A reward is
a function with the signature of TRL's,

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

one value for each completion, None where it has none to give. `columns` are the rows' other columns, repeated for each
completion; `completion_ids` are the sampled ids with their end-of-sequence token. Completions of chat prompts come as
chat messages. A call holds whole groups; which ones depends on the number of ranks, so a reward must not compare
completions of different prompts.

The tasks themselves stand in tasks_small.py and tasks_real.py. Left out: tools, several turns, images.
"""

import functools
import importlib.util
import json
import math
import numbers
import os
import sys
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ranks
from config import BUILT_IN, Config, Mistake
from rollout import Completion

Prompt = str | list[dict]


@dataclass
class Task:
    train: list[dict]  # rows
    eval: list[dict]  # rows that are never trained on
    rewards: list[Callable]
    weights: list[float]  # one for each reward
    full_reward: float  # the weighted reward of a fully right completion
    reward_timeout: float = 600.0
    model: str | Callable[[], tuple] | None = None  # a built-in task's own: a folder, or what makes model and tokenizer

    @property
    def reward_names(self) -> list[str]:
        """Each its own: a second function of the same name gets a number."""
        names = [reward.__name__ for reward in self.rewards]
        return [f"{name}_{i}" if (i := names[: k + 1].count(name)) > 1 else name for k, name in enumerate(names)]

    def draw(self, index: int, seed: int) -> dict:
        """The index-th prompt of the run: every row once an epoch, in an order of its own for each epoch."""
        epoch, place = divmod(index, len(self.train))
        return self.train[_order(len(self.train), seed, epoch)[place]]


@functools.lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)


def load_task(config: Config) -> Task:
    import tasks_real
    import tasks_small

    if config.task == "data":
        task = Task([], [], [], [], full_reward=1.0)
    else:
        task = getattr(tasks_small if config.task in BUILT_IN else tasks_real, config.task)(config)
    mistakes: list[str] = []  # of all files, to be told at once
    rows = _noting(mistakes, read_rows, config.data) if config.data else None
    rewards = [_noting(mistakes, load_reward, name) for name in config.reward]
    if mistakes:
        raise Mistake("\nerror: ".join(mistakes))
    if config.data:
        held_out = config.eval_prompts if config.eval_every else 0
        task.train, task.eval = hold_out(rows, held_out, config.data)
    if config.reward:
        task.rewards = rewards
        task.weights = config.reward_weights
        task.full_reward = sum(config.reward_weights)
    task.reward_timeout = config.reward_timeout
    if config.eval_every and not task.eval:
        raise Mistake(f"--task {config.task} has no held-out prompts to evaluate on: set --eval_every 0")
    return task


def _noting(mistakes: list[str], load: Callable, name: str) -> Any:
    try:
        return load(name)
    except Mistake as mistake:
        mistakes.append(str(mistake))


# ---- Prompts ----


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Chat messages go through the chat template; a string is taken as it is."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text; a prompt goes on
            own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            ids = ids if own[-1:] == ids[-1:] else ids[:-1]
        return ids
    encoded = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return encoded["input_ids"]


def check_prompts(task: Task, tokenizer: Any, context: int | None, max_completion_length: int) -> int:
    """Every prompt can be encoded and leaves room for its completion. -> tokens of the longest"""
    longest = 0
    for row in task.train + task.eval:
        prompt = row["prompt"]
        if not isinstance(prompt, str) and tokenizer.chat_template is None:
            raise Mistake("the prompts are chat messages, but the tokenizer has no chat template: use string prompts")
        try:
            length = len(encode_prompt(tokenizer, prompt))
        except Exception as error:  # of a chat template, say
            raise Mistake(f"a prompt could not be encoded: {type(error).__name__}: {error}: {shown(prompt)}") from error
        if length == 0:
            raise Mistake(f"a prompt has no tokens: {shown(prompt)}")
        if context and length + max_completion_length > context:
            raise Mistake(
                f"a prompt of {length} tokens and a completion of {max_completion_length} exceed the model's context "
                f"of {context}: shorten it, or lower --max_completion_length: {shown(prompt)}"
            )
        longest = max(longest, length)
    return longest


def notes(task: Task, tokenizer: Any) -> list[str]:
    if tokenizer.chat_template is not None and any(isinstance(row["prompt"], str) for row in task.train):
        return ["the prompts are strings, so the model's chat template is not applied; give chat messages to apply it"]
    return []


def shown(prompt: Any) -> str:
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    return repr(text if len(text) <= 200 else text[:200] + "...")


# ---- Rewards ----


def score(task: Task, rows: list[dict], groups: list[list[Completion]], tokenizer: Any) -> list[list[list[float]]]:
    """A value for each row, completion and reward function; NaN where a function gives none."""
    pairs = [(row, completion) for row, group in zip(rows, groups, strict=True) for completion in group]
    prompts = [row["prompt"] for row, _ in pairs]
    completions = [as_completion(row["prompt"], completion, tokenizer) for row, completion in pairs]
    ids = [completion.ids for _, completion in pairs]
    columns = {name: [row.get(name) for row, _ in pairs] for name in (rows[0] if rows else {}) if name != "prompt"}
    values = [call_reward(reward, prompts, completions, ids, columns, task.reward_timeout) for reward in task.rewards]
    by_completion = [list(parts) for parts in zip(*values, strict=True)]
    starts = np.cumsum([0] + [len(group) for group in groups])
    return [by_completion[start:end] for start, end in zip(starts, starts[1:], strict=False)]


def as_completion(prompt: Prompt, completion: Completion, tokenizer: Any) -> Prompt:
    text = tokenizer.decode(completion.ids, skip_special_tokens=True)
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def call_reward(
    reward: Callable, prompts: list, completions: list, ids: list, columns: dict, timeout: float = 600.0
) -> list[float]:
    """What the function gave, checked: a number or None for each completion, nothing else."""
    if not prompts:
        return []

    def fault(i: int, what: str) -> Mistake:
        where = f"for prompt {shown(prompts[i])} and completion {shown(completions[i])}"
        return Mistake(f"reward function {reward.__name__} {what}, {where}")

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
    ranks.report_failure(f"error: reward function {name} took longer than --reward_timeout {timeout:g} seconds")
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
        raise Mistake(f"--reward {name}: must be file.py:function")
    if not Path(path).is_file():
        raise Mistake(f"--reward {name}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise Mistake(f"--reward {name}: {path} could not be loaded: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        raise Mistake(f"--reward {name}: {path} has no function {function}; it has {', '.join(names) or 'none'}")
    if not hasattr(found, "__name__"):  # an object that can be called
        found.__name__ = function
    return found


# ---- Data of your own ----


def read_rows(source: str) -> list[dict]:
    """A .jsonl file, or the train split of a hub data set."""
    if not source.endswith((".jsonl", ".json")) and not Path(source).exists():
        return load_hub(source, split="train")
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise Mistake(f"--data {source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = Path(source).read_bytes()[: error.start].count(b"\n") + 1
        raise Mistake(f"{source}:{line}: not UTF-8 text; save the file as UTF-8") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(read_row(line, f"{source}:{number}"))
    if not rows:
        raise Mistake(f'--data {source}: holds no rows; each line must be like {{"prompt": "..."}}')
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]  # the same columns in every call of a reward


def read_row(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise Mistake(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise Mistake(f"{where}: not JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        raise Mistake(f'{where}: holds a {type(row).__name__}; each line must be an object with a "prompt"')
    check_row(row, where)
    return row


def check_row(row: dict, where: str) -> None:
    if "prompt" not in row:
        raise Mistake(f'{where}: has no "prompt"; it has {", ".join(map(repr, row)) or "nothing"}')
    prompt = row["prompt"]
    messages = (
        isinstance(prompt, list)
        and prompt
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in prompt
        )
    )
    if not (isinstance(prompt, str) or messages):
        raise Mistake(f'{where}: "prompt" must be a string or a list of chat messages: {shown(prompt)}')
    for name in ("prompts", "completions", "completion_ids"):
        if name in row:
            raise Mistake(f"{where}: a column is named {name!r}, which every reward is given already; rename it")


def load_hub(name: str, split: str, subset: str | None = None) -> list[dict]:
    try:
        import datasets
    except ImportError:
        raise Mistake(
            f"{name} is no file, and a hub data set needs the package datasets: pip install datasets, "
            "or give --data a .jsonl file"
        ) from None
    try:
        rows = [dict(row) for row in datasets.load_dataset(name, subset, split=split)]
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise Mistake(f"data set {name} could not be loaded: {reason}") from error
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
        raise Mistake(
            f"{source} has {len(set(keys))} prompts and {count} are held out, which leaves none to train on: "
            "lower --eval_prompts, or set --eval_every 0"
        )
    return train, list(held.values())
