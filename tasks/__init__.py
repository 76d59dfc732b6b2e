"""Tasks: the prompts of a run and the rewards of its completions. Each task is one file, found by its name.

`--task NAME` loads tasks/NAME.py. To add a task, write a new file here. The file has

    load(config) -> Task    the rows with the prompts, the reward functions, and which one says that an answer is right
    DEFAULTS: dict          optional: values that suit the task, for settings that the user does not give
    model(config)           optional, for a task's own small model: returns a folder, or (model, tokenizer)

The shortest example is tldr.py, and the shortest with its own small model is sorting.py. A row is a dictionary. Its
"prompt" is a string or a list of chat messages, and its other columns are for the rewards. A reward has the signature
of TRL's:

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

It returns a list with one value for each completion; None means that it does not judge that completion. `columns` are
the other columns of the rows, repeated for each completion. `completion_ids` are the sampled ids with their
end-of-sequence token. A completion is a string, or a list of messages if its prompt is a chat. A call gets all the
completions of some prompts. Which prompts share a call depends on the number of ranks, so a reward must not compare
completions of different prompts.

A task can also reply to the model's turns (_turns.py). Its rewards then get a column `turns` with the texts that the
model wrote. Not supported: prompts with images.
"""

import importlib
import json
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from advantage import Group
from config import Config, UserError
from rollout import Completion
from tasks._files import hold_out, read_rows
from tasks._rewards import as_list, call_each, load_function

TextOrMessages = str | list[dict]  # a text, or the messages of a chat: the type of prompts, completions and replies
REAL_MODEL_DEFAULTS = dict(
    num_generations=8, max_completion_length=1024, steps=500, learning_rate=1e-6, warmup_steps=10
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
    to_row: Callable[[dict], dict] = dict  # makes a row of this task from a row of --data
    eos_id: int | None = None  # the end-of-sequence token that the rewards expect, if they expect a certain one
    notes: list[str] = field(default_factory=list)  # shown to the user
    max_steps: int | None = None  # the --steps of the run, set by load_task; 0 if it only evaluates
    reply: Callable | None = None  # (row, turns) -> the reply to the model's last turn (_turns.py); None: only one turn

    @property
    def reward_names(self) -> list[str]:
        """The names of the reward functions. If several have the same name, the second and later ones get a number."""
        names = [reward.__name__ for reward in self.rewards]
        counts = [names[: i + 1].count(name) for i, name in enumerate(names)]
        return [f"{name}_{n}" if n > 1 else name for name, n in zip(names, counts, strict=True)]

    def right(self, reward_parts: Tensor) -> Tensor | None:
        """Return which answers are right, as booleans (...), given the values of the K rewards (..., K). An answer
        whose reward is NaN is not right. Return None if no reward says which answers are right."""
        if self.correct is None:
            return None
        return reward_parts[..., self.reward_names.index(self.correct)] >= self.correct_at - 1e-9

    def rows_from(self, drawn: int, n: int, seed: int) -> list[dict]:
        """Return the indices in `train` of the next `n` rows, after the run has drawn `drawn` rows. Every epoch goes
        through all rows in a new random order."""
        size = len(self.train)
        epochs = {i // size for i in range(drawn, drawn + n)}
        orders = {epoch: np.random.Generator(np.random.PCG64([seed, epoch])).permutation(size) for epoch in epochs}
        picked = [int(orders[i // size][i % size]) for i in range(drawn, drawn + n)]
        return [self.train[i] | {"_index": i} for i in picked]


def task_names() -> list[str]:
    return sorted(name for _, name, _ in pkgutil.iter_modules(__path__) if not name.startswith(("_", "test_")))


def task_module(name: str) -> ModuleType:
    """Import the file of a task and return the module. It has load, and perhaps DEFAULTS and model."""
    name, colon, _ = name.partition(":")  # only gym:NAME has a colon
    if name not in task_names() or (colon and name != "gym"):
        raise UserError(f"--task {name}{colon}: must be one of {', '.join(task_names())}")
    file = importlib.import_module(f"tasks.{name}")
    # A task may set the settings whose default is None, except those of the objective, which --algorithm decides.
    allowed = {x.name for x in fields(Config) if x.default is None and x.metadata["heading"] != "The objective"}
    if forbidden := getattr(file, "DEFAULTS", {}).keys() - allowed:
        raise UserError(f"tasks/{name}.py: a task cannot set {', '.join(sorted(forbidden))}; delete it from DEFAULTS")
    return file


def task_defaults(name: str, model: str | None) -> dict:
    """Return the settings that suit the task. If the user gives another model than the task's own small one, the
    learning rate is that of a real model, because the rate that suits the small one is too high for others."""
    file = task_module(name)
    slower = {"learning_rate": REAL_MODEL_DEFAULTS["learning_rate"]} if model and hasattr(file, "model") else {}
    return REAL_MODEL_DEFAULTS | getattr(file, "DEFAULTS", {}) | slower


def load_task(config: Config) -> Task:
    """Load the task, and replace its rows, rewards and reply function with those that the user gives."""
    task = task_module(config.task).load(config)
    task.max_steps = config.steps
    if config.data:
        count = config.eval_prompts if config.eval_every and not config.eval_data else 0
        task.train, task.eval = hold_out(read_rows(config.data, task.to_row), count)
    if config.eval_data:
        task.eval = read_rows(config.eval_data, task.to_row)
    if config.reward:
        own = dict(zip(task.reward_names, task.rewards, strict=True))
        weights = dict(zip(task.reward_names, task.weights, strict=True))
        task.rewards = [load_function(name, own) for name in config.reward]
        task.weights = config.reward_weights or [weights.get(name, 1.0) for name in config.reward]
        if task.correct not in config.reward:
            task.correct, task.correct_at, task.graded = None, 1.0, False
    if config.correct not in (None, task.correct):
        task.correct, task.correct_at, task.graded = config.correct, 1.0, False
    if task.correct not in (None, *task.reward_names):
        raise UserError(f"--correct {task.correct}: must be one of the rewards, {', '.join(task.reward_names)}")
    if config.reply:
        task.reply = load_function(config.reply, {}, "--reply")
    if config.max_turns and task.reply is None:
        raise UserError(f"--max_turns {config.max_turns}: nothing replies to the model's turns; see --reply")
    return task


def as_completion(prompt: TextOrMessages, completion: Completion, tokenizer: Any) -> TextOrMessages:
    """Return what the rewards get: all messages of the completion if the prompt is a chat, otherwise all its text.
    Replies are included. In a chat, a last reply that the model did not answer is left out."""
    if isinstance(prompt, str):
        return tokenizer.decode(completion.ids, skip_special_tokens=True)
    turns = [{"role": "assistant", "content": text} for text in turns_of(completion, tokenizer)]
    messages = turns[:1]
    # A last reply that the model did not answer is left out.
    for reply, turn in zip(completion.replies or [], turns[1:]):
        messages += [*reply, turn]
    return messages


def turns_of(completion: Completion, tokenizer: Any) -> list[str]:
    """Return the texts that the model wrote, without the replies."""
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in completion.turns]


def text_of(completion: TextOrMessages) -> str:
    """Return the text of a completion, or of its last message if the prompt is a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def columns_of(row: dict) -> dict:
    """Return the columns that are for the rewards: all but the prompt."""
    return {name: value for name, value in row.items() if name not in ("prompt", "prompt_ids", "_index")}


def call_rewards(
    task: Task, groups: list[Group], tokenizer: Any, done: int, time_limit: Callable = nullcontext
) -> tuple[list[tuple[list[list[float]], list[dict]]], list[tuple[str, float]]]:
    """Call the rewards. `done` is the number of steps that are done. `time_limit(name)` is a context manager around the
    call of each reward.

    Return two lists. The first has a pair (rewards, extras) for each group. `rewards` lists the K values for each
    completion, NaN where a reward gave none. `extras` has a dictionary for each completion, of what the rewards passed
    to `log_extra`. The second list has a pair (name, value) for each call of `log_metric`."""
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
        metrics.append((name, float(value)))

    def log_extra(name: str, values: Any) -> None:
        for extra, value in zip(extras, as_list(values), strict=True):
            extra[name] = json.loads(json.dumps(value, default=str))  # samples.jsonl needs a value of JSON

    state = SimpleNamespace(global_step=done, max_steps=task.max_steps or 1)  # not 0: a user's reward may divide by it
    run_arguments = dict(trainer_state=state, log_metric=log_metric, log_extra=log_extra)
    values = call_each(task.rewards, columns, run_arguments, time_limit)  # K lists, with a value for each completion
    parts = [list(of_completion) for of_completion in zip(*values, strict=True)]  # for each completion, K values
    scored, start = [], 0
    for group in groups:
        end = start + len(group.completions)
        scored.append((torch.tensor(parts[start:end], dtype=torch.float64), extras[start:end]))
        start = end
    return scored, metrics
