"""What is asked and how an answer is scored: one file a task, found by its name.

`--task NAME` is the file tasks/NAME.py. A task of your own is one new file here, with

    DEFAULTS: dict          settings that suit the task; what it leaves out is as for a real model
    load(config) -> Task    rows of prompts, reward functions, and what a right answer is worth
    model(config)           only where the task brings a small model of its own: a folder, or a model and its tokenizer

tldr.py is the shortest to start from, sorting.py the shortest with a model. A row is a dictionary: "prompt", a string
or a list of chat messages, and any columns that the rewards need. A reward is a function with the signature of TRL's,

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

one value for each completion, None where it has none to give. `columns` are the rows' other columns, repeated for each
completion; `completion_ids` are the sampled ids with their end-of-sequence token. Completions of chat prompts come as
chat messages. A call holds whole groups; which ones depends on the number of ranks, so a reward must not compare
completions of different prompts.

_files.py reads rows and rewards from files of your own (--data, --reward). Left out: tools, several turns, images.
"""

import copy
import dataclasses
import functools
import importlib
import json
import math
import pkgutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from config import Config, UserError
from rollout import Completion
from tasks._files import as_user_error, excerpt, hold_out, read_rows
from tasks._rewards import GIVEN, OF_THE_RUN, as_number, call_rewards, check_signature, listed, load_reward

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
    eos_id: int | None = None  # what the rewards take for the end of a completion; None: any
    time_limit: Callable[[str], AbstractContextManager] = nullcontext  # entered with a reward's name around each call

    notes: list[str] = field(default_factory=list)  # on what was found, to be told
    state: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(global_step=0, max_steps=None))  # of the run
    logged: list[tuple[str, float]] = field(default_factory=list)  # by rewards, in this step
    extras: list[list[dict]] = field(default_factory=list)  # by rewards, for each completion that was just scored

    def begin(self, step: int) -> None:
        self.state.global_step = step - 1  # steps that are done
        self.logged = []

    def log_metric(self, name: str, value: Any) -> None:
        if as_number(value) is None:
            raise UserError(f"log_metric({name!r}, {excerpt(value)}): a value must be a number")
        self.logged.append((f"logged/{name}", as_number(value)))

    @property
    def reward_names(self) -> list[str]:
        """Each its own: a second function of the same name gets a number."""
        names = [reward.__name__ for reward in self.rewards]
        earlier = [names[:i].count(name) for i, name in enumerate(names)]
        return [f"{name}_{n + 1}" if n else name for name, n in zip(names, earlier, strict=True)]

    def what_says_right(self, reward_parts: Tensor) -> Tensor | None:
        """(..., K), the values of each reward -> (...), those of the one that says what is right, if one does"""
        return None if self.correct is None else reward_parts[..., self.reward_names.index(self.correct)]

    def is_right(self, reward_parts: Tensor) -> Tensor | None:
        """(..., K) -> (...); None where nothing says what is right"""
        values = self.what_says_right(reward_parts)
        return None if values is None else values >= self.correct_at - 1e-9  # NaN is not right

    def draw(self, index: int, seed: int) -> dict:
        """The index-th prompt of the run: every row once an epoch, in an order of its own for each epoch."""
        epoch, place = divmod(index, len(self.train))
        return self.train[_order(len(self.train), seed, epoch)[place]]


@functools.lru_cache(maxsize=2)
def _order(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)


# ---- A task by its name ----


def task_names() -> list[str]:
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted(name for name in names if not name.startswith(("_", "test_")))


def task_file(name: str) -> ModuleType:
    """The file of a task: a module with DEFAULTS, load and perhaps model."""
    if name not in task_names():
        raise UserError(f"--task {name}: must be one of {', '.join(task_names())}")
    where = f"--task {name}: tasks/{name}.py"
    with as_user_error(f"{where} could not be loaded:"):
        file = importlib.import_module(f"tasks.{name}")
    if not isinstance(getattr(file, "DEFAULTS", None), dict):
        raise UserError(f"{where} needs DEFAULTS, a dictionary of the settings that suit the task")
    if not callable(getattr(file, "load", None)):
        raise UserError(f"{where} needs a function load(config) that returns a Task")
    left_open = [field.name for field in dataclasses.fields(Config) if field.default is None]
    for setting in file.DEFAULTS:
        if setting not in left_open:
            raise UserError(f"{where} has {setting} in DEFAULTS; what a task can set is {', '.join(left_open)}")
    return file


def task_defaults(name: str, model: str | None) -> dict:
    """The settings that suit the task. What suits a task's own small model is too fast for another one."""
    file = task_file(name)
    defaults = REAL_MODEL_DEFAULTS | file.DEFAULTS
    if model and hasattr(file, "model"):
        defaults["learning_rate"] = REAL_MODEL_DEFAULTS["learning_rate"]
    return defaults


def load_task(config: Config) -> Task:
    """Rows and rewards of the user's own, where there are any, stand in the place of the task's."""
    file = task_file(config.task)
    with as_user_error(f"--task {config.task}: load raised"):
        task = file.load(config)
    if not isinstance(task, Task):
        raise UserError(f"--task {config.task}: load returned a {type(task).__name__} where a Task was due")
    task.state.max_steps = config.steps or 1  # rewards divide by it
    rows, rewards = load_files(config.data, config.reward, task)
    if config.data:
        count = config.eval_prompts if config.eval_every and not config.eval_data else 0
        task.train, task.eval = hold_out(rows, count, config.data)
        if len(task.eval) < count:
            task.notes.append(f"{len(task.eval)} prompts, a fifth of {config.data}, are held out, not {count}")
    if config.eval_data:
        task.eval = read_rows(config.eval_data)
    if config.reward:
        own = dict(zip(task.reward_names, task.weights, strict=True))
        task.rewards, task.weights = rewards, config.reward_weights or [own.get(name, 1.0) for name in config.reward]
        if task.correct not in config.reward:
            task.correct, task.correct_at = None, 1.0
    if config.correct not in (None, task.correct):
        task.correct, task.correct_at = config.correct, 1.0
    if task.correct is not None and task.correct not in task.reward_names:
        raise UserError(f"--correct {task.correct}: must be one of the rewards, {', '.join(task.reward_names)}")
    if config.dynamic_sampling and task.correct is None:
        task.notes.append(
            "dynamic_sampling: nothing says which answers are right (--correct NAME), so groups are replaced where "
            "their total rewards are all equal"
        )
    for row in [*task.train[:1], *task.eval[:1]]:
        for reward in task.rewards:
            columns = [name for name in row if name not in ("prompt", *GIVEN, *OF_THE_RUN)]
            check_signature(reward, [*GIVEN, *OF_THE_RUN, *columns])
    if config.eval_every and not task.eval:
        raise UserError(f"--task {config.task} has no held-out prompts to evaluate on: set --eval_every 0")
    return task


def load_files(data: str | None, names: list[str], task: Task) -> tuple[list[dict], list[Callable]]:
    """-> rows and rewards, of files or by the name of one of the task's own. What is wrong is told at once."""
    own = dict(zip(task.reward_names, task.rewards, strict=True))
    mistakes: list[UserError] = []

    def attempt(read: Callable, *given: Any) -> Any:
        try:
            return read(*given)
        except UserError as mistake:
            mistakes.append(mistake)

    rows = attempt(read_rows, data) if data else []
    rewards = [own[name] if name in own else attempt(load_reward, name, [*own]) for name in names]
    if mistakes:
        together = UserError("\nerror: ".join(map(str, mistakes)))
        for mistake in mistakes:
            for note in getattr(mistake, "__notes__", []):
                together.add_note(note)
        raise together
    return rows, rewards


# ---- Prompts and completions ----


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


def as_completion(prompt: Prompt, completion: Completion, tokenizer: Any) -> Prompt:
    text = tokenizer.decode(completion.ids, skip_special_tokens=True)
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def text_of(completion: Prompt) -> str:
    """A completion is a string, or to a chat prompt a list of messages."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


# ---- Rewards ----


def score(task: Task, rows: list[dict], groups: list[list[Completion]], tokenizer: Any) -> list[list[list[float]]]:
    """A value for each row, completion and reward function; NaN where a function gives none."""
    task.extras = []
    if not rows:
        return []
    logged: dict[str, list] = {}
    pairs = [(row, completion) for row, group in zip(rows, groups, strict=True) for completion in group]
    columns = {name: [row.get(name) for row, _ in pairs] for name in rows[0] if name != "prompt"}
    columns |= dict(
        prompts=[row["prompt"] for row, _ in pairs],
        completions=[as_completion(row["prompt"], completion, tokenizer) for row, completion in pairs],
        completion_ids=[completion.ids for _, completion in pairs],
    )

    def log_extra(name: str, values: Any) -> None:
        logged[name] = json.loads(json.dumps(listed(values), default=str))  # as it will be written
        if not isinstance(logged[name], list) or len(logged[name]) != len(pairs):
            raise UserError(f"log_extra({name!r}, {excerpt(logged[name])}): {len(pairs)} values were due, in a list")

    def in_groups(values: Iterable) -> list[list]:
        left = iter(values)
        return [[next(left) for _ in group] for group in groups]

    of_the_run = dict(zip(OF_THE_RUN, (copy.copy(task.state), task.log_metric, log_extra), strict=True))
    scores = in_groups(map(list, zip(*call_rewards(task.rewards, columns, task.time_limit, **of_the_run))))
    task.extras = in_groups({name: values[i] for name, values in logged.items()} for i in range(len(pairs)))
    return scores


def means_of_logged(logged: list[tuple[str, float]]) -> dict[str, float]:
    """Over the step and all ranks."""
    values: dict[str, list[float]] = {}
    for name, value in logged:
        if math.isfinite(value):
            values.setdefault(name, []).append(value)
    return {name: sum(of_name) / len(of_name) for name, of_name in sorted(values.items())}
