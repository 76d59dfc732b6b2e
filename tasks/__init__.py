"""What is asked and how an answer is scored: one file a task, found by its name.

`--task NAME` is the file tasks/NAME.py. A task of your own is one new file here, with

    load(config) -> Task    rows of prompts, reward functions, and what a right answer is worth
    DEFAULTS: dict          where some settings suit it; what it leaves out is as for a real model
    model(config)           only where the task brings a small model of its own: a folder, or a model and its tokenizer

tldr.py is the shortest to start from, sorting.py the shortest with a new model. A row is a dictionary: "prompt", a
string or a list of chat messages, and any columns that the rewards need. A reward has the signature of TRL's,

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

one value for each completion, None where it has none to give. `columns` are the rows' other columns, repeated for each
completion; `completion_ids` are the sampled ids with their end-of-sequence token; completions of chat prompts come as
messages. A call holds whole groups; which ones depends on the number of ranks, so a reward must not compare completions
of different prompts. A task may also reply to the turns of the model (_turns.py); then the column `turns` has the texts
that the model wrote. Left out: images.
"""

import importlib
import itertools
import json
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from batch import Group
from config import Config, UserError
from rollout import Completion
from tasks._files import hold_out, read_rows
from tasks._rewards import as_list, call_rewards, load_reward, warn_once

Prompt = str | list[dict]
REAL_MODEL_DEFAULTS = dict(
    num_generations=8, max_completion_length=1024, steps=500, learning_rate=1e-6, warmup_steps=10
)


@dataclass
class Task:
    train: list[dict]  # rows
    eval: list[dict]  # rows that are never trained on
    rewards: list[Callable]
    weights: list[float]  # one for each reward
    correct: str | None = None  # the reward that says whether an answer is right; None: nothing does
    correct_at: float = 1.0  # its value, or more, for a right answer
    graded: bool = False  # right answers are rare at first: dynamic sampling keeps each group whose rewards differ
    to_row: Callable[[dict], dict] = dict  # of a row of --data, which others have made
    eos_id: int | None = None  # what the rewards take for the end of a completion; None: any
    notes: list[str] = field(default_factory=list)  # to be told
    max_steps: int | None = None  # of the run; 0: it evaluates
    reply: Callable | None = None  # (row, turns) -> what is said to the model's last turn (_turns.py); None: one turn

    @property
    def reward_names(self) -> list[str]:
        """Each its own: a second function of the same name gets a number."""
        names = [reward.__name__ for reward in self.rewards]
        counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
        return [f"{name}_{n}" if n > 1 else name for name, n in zip(names, counts, strict=True)]

    def right(self, reward_parts: Tensor) -> Tensor | None:
        """(..., K), the values of each reward -> (...), bool; None where nothing says what is right"""
        if self.correct is None:
            return None
        return reward_parts[..., self.reward_names.index(self.correct)] >= self.correct_at - 1e-9  # NaN is not right

    def draw(self, first: int, n: int, seed: int) -> list[int]:
        """n rows of the run, from the first-th on: every row once an epoch, each epoch in an order of its own."""
        size, last = len(self.train), first + n - 1
        epochs = range(first // size, last // size + 1)
        orders = {epoch: np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size) for epoch in epochs}
        return [int(orders[i // size][i % size]) for i in range(first, last + 1)]


def task_names() -> list[str]:
    return sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith(("_", "test_")))


def task_file(name: str) -> ModuleType:
    """The file of a task: a module with load, and perhaps DEFAULTS and model."""
    name, colon, _ = name.partition(":")  # gym:NAME
    if name not in task_names() or (colon and name != "gym"):
        raise UserError(f"--task {name}{colon}: must be one of {', '.join(task_names())}")
    file = importlib.import_module(f"tasks.{name}")
    free = {x.name for x in fields(Config) if x.default is None and x.metadata["heading"] != "The objective"}
    if fixed := getattr(file, "DEFAULTS", {}).keys() - free:
        raise UserError(f"tasks/{name}.py: DEFAULTS cannot hold {', '.join(sorted(fixed))}, which no task decides")
    return file


def task_defaults(name: str, model: str | None) -> dict:
    """The settings that suit the task. What suits a task's own small model is too fast for another one."""
    file = task_file(name)
    slower = {"learning_rate": REAL_MODEL_DEFAULTS["learning_rate"]} if model and hasattr(file, "model") else {}
    return REAL_MODEL_DEFAULTS | getattr(file, "DEFAULTS", {}) | slower


def load_task(config: Config) -> Task:
    """Rows and rewards of the user's own, where there are any, stand in the place of the task's."""
    task = task_file(config.task).load(config)
    task.max_steps = config.steps
    if config.data:
        count = config.eval_prompts if config.eval_every and not config.eval_data else 0
        task.train, task.eval = hold_out(read_rows(config.data, task.to_row), count)
    if config.eval_data:
        task.eval = read_rows(config.eval_data, task.to_row)
    if config.reward:
        own = dict(zip(task.reward_names, task.rewards, strict=True))
        weights = dict(zip(task.reward_names, task.weights, strict=True))
        task.rewards = [load_reward(name, own) for name in config.reward]
        task.weights = config.reward_weights or [weights.get(name, 1.0) for name in config.reward]
        if task.correct not in config.reward:
            task.correct, task.correct_at, task.graded = None, 1.0, False
    if config.reply:
        task.reply = load_reward(config.reply, {}, "--reply")
    if config.max_turns and task.reply is None:
        raise UserError(f"--max_turns {config.max_turns}: nothing replies to the model's turns; see --reply")
    if config.correct not in (None, task.correct):
        task.correct, task.correct_at, task.graded = config.correct, 1.0, False
    if task.correct is not None and task.correct not in task.reward_names:
        raise UserError(f"--correct {task.correct}: must be one of the rewards, {', '.join(task.reward_names)}")
    return task


def as_completion(prompt: Prompt, completion: Completion, tokenizer: Any) -> Prompt:
    """To a chat prompt all messages, replies included, and to a string all text."""
    if isinstance(prompt, str):
        return tokenizer.decode(completion.ids, skip_special_tokens=True)
    first, *later = [{"role": "assistant", "content": text} for text in turns_of(completion, tokenizer)]
    pairs = zip(completion.replies or [], later)  # the last reply may have been dropped
    return [first, *(message for reply, turn in pairs for message in (*reply, turn))]


def turns_of(completion: Completion, tokenizer: Any) -> list[str]:
    """What the model wrote."""
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion.turns]


def text_of(completion: Prompt) -> str:
    """A completion is a string, or to a chat prompt a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def columns_of(row: dict) -> dict:
    """What a row holds for the rewards: everything but its prompt."""
    return {name: value for name, value in row.items() if name not in ("prompt", "prompt_ids")}


def score(
    task: Task, groups: list[Group], tokenizer: Any, done: int, time_limit: Callable = nullcontext
) -> tuple[list[tuple[list[list[float]], list[dict]]], list[tuple[str, float]]]:
    """-> for each group the values of the K rewards (G, K), NaN where one gave none, and what log_extra was given of
    each completion; and all that log_metric was given. `done` steps are done; `time_limit` is entered with a reward's
    name around its call."""
    if not groups:
        return [], []
    pairs = [(group.row, completion) for group in groups for completion in group.completions]
    columns = {name: [row.get(name) for row, _ in pairs] for name in columns_of(pairs[0][0])}
    columns["prompts"] = [row["prompt"] for row, _ in pairs]
    columns["completions"] = [as_completion(row["prompt"], completion, tokenizer) for row, completion in pairs]
    columns["completion_ids"] = [completion.ids for _, completion in pairs]
    if task.reply is not None:
        columns["turns"] = [turns_of(completion, tokenizer) for _, completion in pairs]
    metrics, extras = [], [{} for _ in pairs]

    def log_metric(name: str, value: Any) -> None:
        if not np.isfinite(float(value)):
            warn_once(f"log_metric({name!r}) was given {value}")
        metrics.append((f"logged/{name}", float(value)))

    def log_extra(name: str, values: Any) -> None:
        for extra, value in zip(extras, as_list(values), strict=True):
            extra[name] = json.loads(json.dumps(value, default=str))  # as it will be written

    state = SimpleNamespace(global_step=done, max_steps=task.max_steps or 1)  # rewards divide by it
    of_the_run = dict(trainer_state=state, log_metric=log_metric, log_extra=log_extra)
    values = call_rewards(task.rewards, columns, of_the_run, time_limit)  # a list for each reward
    parts = [list(completion) for completion in zip(*values, strict=True)]
    sizes = [len(group.completions) for group in groups]
    ends = itertools.accumulate(sizes)
    return [(parts[end - n : end], extras[end - n : end]) for n, end in zip(sizes, ends, strict=True)], metrics
