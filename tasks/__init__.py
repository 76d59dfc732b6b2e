"""What is asked and how an answer is scored: rows of prompts, and reward functions.

A row is a dictionary: "prompt", a string or a list of chat messages, and any columns that the rewards need. A reward is
a function with the signature of TRL's,

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

one value for each completion, None where it has none to give. `columns` are the rows' other columns, repeated for each
completion; `completion_ids` are the sampled ids with their end-of-sequence token. Completions of chat prompts come as
chat messages. A call holds whole groups; which ones depends on the number of ranks, so a reward must not compare
completions of different prompts.

The tasks themselves stand in tasks_small.py and tasks_real.py; data.py reads rows and rewards from files of your own,
and checks what a reward gives. Left out: tools, several turns, images.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from config import BUILT_IN, Config, UserError
from rollout import Completion
from tasks._files import call_reward, hold_out, load_reward, read_rows

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
    from tasks import _characters as tasks_small
    from tasks import countdown as tasks_real

    if config.task == "data":
        task = Task([], [], [], [], full_reward=1.0)
    else:
        task = getattr(tasks_small if config.task in BUILT_IN else tasks_real, config.task)(config)
    mistakes: list[str] = []  # of all files, to be told at once
    rows = _noting(mistakes, read_rows, config.data) if config.data else None
    rewards = [_noting(mistakes, load_reward, name) for name in config.reward]
    if mistakes:
        raise UserError("\nerror: ".join(mistakes))
    if config.data:
        held_out = config.eval_prompts if config.eval_every else 0
        task.train, task.eval = hold_out(rows, held_out, config.data)
    if config.reward:
        task.rewards = rewards
        task.weights = config.reward_weights
        task.full_reward = sum(config.reward_weights)
    task.reward_timeout = config.reward_timeout
    if config.eval_every and not task.eval:
        raise UserError(f"--task {config.task} has no held-out prompts to evaluate on: set --eval_every 0")
    return task


def _noting(mistakes: list[str], load: Callable, name: str) -> Any:
    try:
        return load(name)
    except UserError as mistake:
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
