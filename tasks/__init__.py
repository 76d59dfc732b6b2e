"""Tasks: the prompts of a run and the rewards of its completions. Each task is one file, found by its name.

`--task NAME` loads tasks/NAME.py. To add a task, write a new file here. The file has

    load(config) -> Task    the rows with the prompts, the reward functions, and which one says that an answer is right
    DEFAULTS: dict          optional: values that suit the task, for settings that the user does not give
    VARIANTS = True         optional: `--task NAME:MORE` is allowed, and `load` reads config.task
    model(config)           optional, for a task's own small model: returns a folder, or (model, tokenizer)

The shortest example is tldr.py, and the shortest with its own small model is sorting.py. A row is a dictionary. Its
"prompt" is a string or a list of chat messages, and its other columns are for the rewards. A
reward has the signature of TRL's:

    f(prompts, completions, completion_ids, truncated, **columns) -> list[float | None]

It returns a list with one value for each completion; None means that it does not judge that completion. `columns` are
the other columns of the rows, repeated for each completion, None where a row lacks one. `completion_ids` are the
sampled ids with their end-of-sequence token, and `truncated` says which completions were cut off at the limit. A
completion is a string, or a list of messages if its prompt is a chat. A call gets all the completions of some prompts.
Which prompts share a call depends on the number of ranks, so a reward must not compare completions of different
prompts.

A task can also reply to the model's turns (_turns.py). Its rewards then get a column `turns` with the texts that the
model wrote, and in the other columns what the replies have stored there. Not supported: prompts with images.
"""

import importlib
import itertools
import json
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from advantage import Group
from config import OFTEN, Config, UserError
from rollout import Completion
from tasks._files import ADDED_COLUMNS, REWARD_ARGUMENTS, hold_out, read_rows, with_all_columns
from tasks._rewards import check_arguments, load_function, overlong, values_of

TextOrMessages = str | list[dict]  # a text, or the messages of a chat: the type of prompts, completions and replies
# The defaults for a real model. A task's DEFAULTS may replace these, and set nothing else.
REAL_MODEL_DEFAULTS = dict(
    num_generations=8,
    max_completion_length=1024,
    steps=500,
    learning_rate=1e-6,
    warmup_steps=10,
    eval_every=100,  # an evaluation of 256 prompts samples 1,280 completions, as many as ten steps
    save_every=100,  # a checkpoint has 12 bytes for each parameter
)


@dataclass
class Task:
    train: list[dict]  # rows
    eval: list[dict]  # rows that are never trained on
    rewards: list[Callable]
    weights: list[float]  # one for each reward
    correct: str | None = None  # the name of the reward that says whether an answer is right, if one does
    correct_at: float = 1.0  # an answer is right if that reward is at least this
    # Whether a wrong answer can get a part of the reward. Dynamic sampling then keeps every group whose rewards differ.
    # Otherwise it keeps only groups with some right and some wrong answers.
    graded: bool = False
    to_row: Callable[[dict], dict] = dict  # makes a row of this task from a row of --data; by default, a copy
    eos_id: int | None = None  # the end-of-sequence token that the rewards expect, if they expect a certain one
    notes: list[str] = field(default_factory=list)  # shown to the user
    of_run: dict[str, Any] = field(default_factory=dict)  # what rewards see of the settings; set by load_task
    time_limit: Callable = nullcontext  # time_limit(what) is a context manager around each call of a reward or a reply
    reply: Callable | None = None  # (row, turns) -> the reply to the model's last turn (_turns.py); None: only one turn

    @property
    def reward_names(self) -> list[str]:
        return [reward.__name__ for reward in self.rewards]

    def right(self, reward_parts: Tensor) -> Tensor | None:
        """Return which completions of a group are right, (G,): 1.0 for right, 0.0 for wrong, NaN if the reward that
        decides it gave no value. `reward_parts` (G, K) has the values of all rewards. Return None if no reward decides
        it, or if that reward gave no value to the whole group."""
        if self.correct is None:
            return None
        values = reward_parts[:, self.reward_names.index(self.correct)]
        right = (values >= self.correct_at - 1e-9).double().masked_fill(values.isnan(), torch.nan)
        return None if right.isnan().all() else right

    def rows_of_evaluation(self, most: int) -> list[dict]:
        """Return the first rows of `eval` or, with several --eval_data, of each of them: at most this many."""
        by_file: dict[str | None, list[dict]] = {}
        for row in self.eval:
            by_file.setdefault(row.get("eval_data"), []).append(row)
        return [row for rows in by_file.values() for row in rows[:most]]

    def rows_from(self, first: int, n: int, seed: int) -> list[dict]:
        """Return the next n rows of `train`, from position `first` of the shuffled order on. Every epoch goes through
        all rows in a new random order."""
        size, positions = len(self.train), range(first, first + n)
        epochs = {position // size for position in positions}
        orders = {epoch: np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size) for epoch in epochs}
        return [self.train[orders[position // size][position % size]] for position in positions]


# ---- Find a task and load it ----


def task_names() -> list[str]:
    return sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith(("_", "test_")))


def task_module(task: str) -> ModuleType:
    """Import the file of a task and return the module. It has load, and perhaps DEFAULTS, VARIANTS and model."""
    name, colon, _ = task.partition(":")
    file = importlib.import_module(f"tasks.{name}") if name in task_names() else None
    if file is None or (colon and not hasattr(file, "VARIANTS")):
        raise UserError(f"--task {task}: must be one of {', '.join(task_names())}")
    if forbidden := getattr(file, "DEFAULTS", {}).keys() - REAL_MODEL_DEFAULTS:
        raise UserError(f"tasks/{name}.py: a task cannot set {', '.join(sorted(forbidden))}; delete it from DEFAULTS")
    return file


def task_defaults(name: str, model: str | None) -> dict:
    """Return the settings that suit the task. A small model of the task's own is evaluated and saved more often. If the
    user gives another model in its place, the learning rate is that of a real one, for which the other is too high."""
    file = task_module(name)
    settings = REAL_MODEL_DEFAULTS | getattr(file, "DEFAULTS", {})
    if not hasattr(file, "model"):
        return settings
    if model:
        return settings | {"learning_rate": REAL_MODEL_DEFAULTS["learning_rate"]}
    return REAL_MODEL_DEFAULTS | dict(eval_every=OFTEN, save_every=OFTEN) | getattr(file, "DEFAULTS", {})


def load_task(config: Config) -> Task:
    """Load the task, and replace its rows, rewards and reply function with those that the user gives."""
    task = task_module(config.task).load(config)
    task.of_run = dict(max_completion_length=config.max_completion_length, overlong_buffer=config.overlong_buffer)
    task.of_run["max_steps"] = config.steps or 1  # not 0, because a user's reward may divide by it
    if config.data:
        task.train, task.eval = hold_out(read_rows(config.data, task.to_row), config.held_out)
    if config.eval_data:
        files = {file: read_rows(file, task.to_row) for file in config.eval_data}
        task.eval = [row | {"eval_data": Path(file).stem} for file, rows in files.items() for row in rows]
    task.train, task.eval = with_all_columns(task.train), with_all_columns(task.eval)
    set_rewards(task, config)
    if config.reply:
        task.reply = load_function(config.reply, {})
    if config.max_turns and task.reply is None:
        raise UserError(f"--max_turns {config.max_turns}: nothing replies to the model's turns; see --reply")
    for rows, are_used in ((task.train, config.steps != 0), (task.eval, config.eval_every != 0)):
        if rows and are_used:
            turns = ["turns"] if task.reply else []
            check_arguments(task.rewards, [*REWARD_ARGUMENTS, *turns, *columns_of(rows[0])])
            if config.metrics_by not in (None, *(columns := ["prompt", *columns_of(rows[0])])):
                raise UserError(f"--metrics_by {config.metrics_by}: must be one of {', '.join(columns)}")
    return task


def set_rewards(task: Task, config: Config) -> None:
    """Replace the task's rewards with those of --reward. One of the task's own that is among them keeps its weight and,
    if it says which answers are right, still says it, unless --correct names another."""
    own = {"overlong": overlong} | dict(zip(task.reward_names, task.rewards, strict=True))
    weights = dict(zip(task.reward_names, task.weights, strict=True))
    if config.reward:
        task.rewards = [load_function(name, own) for name in config.reward]
        task.weights = [weights.get(name, 1.0) for name in config.reward]
    task.weights = config.reward_weights or task.weights
    if len(task.weights) != len(task.rewards) or len({*task.reward_names}) != len(task.rewards):
        raise UserError(f"needs one weight and a name of its own for each reward: {task.weights}, {task.reward_names}")
    is_kept = not config.reward or task.correct in config.reward  # the task's own judge of what is right
    if not is_kept or config.correct not in (None, task.correct):
        task.correct, task.correct_at, task.graded = config.correct, 1.0, False
    if task.correct not in (None, *task.reward_names):
        raise UserError(f"--correct {task.correct}: must be one of the rewards, {', '.join(task.reward_names)}")


# ---- What the rewards get, and what they return ----


def columns_of(row: dict) -> dict:
    """Return the columns that are for the rewards: all but the prompt, and what this program has added."""
    return {name: value for name, value in row.items() if name not in ("prompt", *ADDED_COLUMNS)}


def as_completion(prompt: TextOrMessages, completion: Completion, tokenizer: Any) -> TextOrMessages:
    """Return what the rewards get: all messages of the completion if the prompt is a chat, otherwise all its text.
    Replies are included. In a chat, a last reply that the model did not answer is left out, and messages of the
    assistant that follow each other, because a reply has continued a turn, are joined."""
    if isinstance(prompt, str):
        return tokenizer.decode(completion.ids, skip_special_tokens=True)
    first, *later = [{"role": "assistant", "content": text} for text in turns_of(completion, tokenizer)]
    messages = [first]
    for reply, turn in zip(completion.replies or [], later, strict=False):
        for message in [*reply, turn]:
            if message["role"] == messages[-1]["role"] == "assistant":
                messages[-1] = messages[-1] | {"content": messages[-1]["content"] + message["content"]}
            else:
                messages.append(message)
    return messages


def turns_of(completion: Completion, tokenizer: Any) -> list[str]:
    """Return the texts that the model wrote, without the replies."""
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion.turns]


def text_of(completion: TextOrMessages) -> str:
    """Return the text of a completion, or of its last message if the prompt is a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def call_rewards(
    task: Task, groups: list[Group], tokenizer: Any, steps_done: int
) -> tuple[list[tuple[Tensor, list[dict]]], list[tuple[str, float]]]:
    """Call the rewards for these groups. Return

    results  for each group, the values (G, K) of the K rewards, NaN where a reward gave none, and a dictionary for each
             completion with what the rewards passed to `log_extra`
    logged   for each call of `log_metric`, the name and the value
    """
    if not groups:
        return [], []
    pairs = [(group.row, completion) for group in groups for completion in group.completions]
    rows = with_all_columns([columns_of(row | (completion.state or {})) for row, completion in pairs])
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    columns["prompts"] = [row["prompt"] for row, _ in pairs]
    columns["completions"] = [as_completion(row["prompt"], completion, tokenizer) for row, completion in pairs]
    columns["completion_ids"] = [completion.ids.tolist() for _, completion in pairs]
    columns["truncated"] = [bool(completion.truncated) for _, completion in pairs]
    if task.reply is not None:
        columns["turns"] = [turns_of(completion, tokenizer) for _, completion in pairs]
    logged, extras = [], [[{} for _ in group.completions] for group in groups]

    def log_metric(name: str, value: Any) -> None:
        logged.append((name, float(value)))

    def log_extra(name: str, values: Any) -> None:
        values = values.tolist() if hasattr(values, "tolist") else values  # of a tensor or an array
        for extra, value in zip(itertools.chain(*extras), values, strict=True):
            extra[name] = json.loads(json.dumps(value, default=str))  # samples.jsonl needs a value of JSON

    state = SimpleNamespace(global_step=steps_done, **task.of_run)
    of_the_run = dict(trainer_state=state, log_metric=log_metric, log_extra=log_extra)
    values = []
    for reward in task.rewards:
        with task.time_limit(f"reward function {reward.__name__}"):
            values.append(values_of(reward, columns, of_the_run))
    sizes = [len(group.completions) for group in groups]
    parts = torch.tensor(values, dtype=torch.float64).T.split(sizes)  # of (N, K)
    return [(part.clone(), extra) for part, extra in zip(parts, extras, strict=True)], logged
