"""Encode the prompts of all rows for this model, and check that they fit into its context."""

import json
import math
from typing import Any

from config import Config, UserError
from tasks import Prompt, Task


def encode_prompts(tokenizer: Any, rows: list[dict], at_once: int = 1000) -> None:
    """Keep the token ids of each row's prompt in the row, as `prompt_ids`. Prompts are encoded only once, and many at a
    time, because encoding a large data set one by one takes minutes."""
    for is_text in (True, False):
        same_kind = [row for row in rows if isinstance(row["prompt"], str) == is_text]
        for start in range(0, len(same_kind), at_once):
            batch = same_kind[start : start + at_once]
            try:
                encoded = encode(tokenizer, [row["prompt"] for row in batch])
            except Exception as error:  # a letter that the tokenizer does not know, a chat template that is missing
                if at_once > 1:
                    encode_prompts(tokenizer, batch, at_once=1)  # raises the error of the prompt that it is about
                prompt = batch[0]["prompt"]
                raise UserError(f"a prompt could not be encoded: {prompt!r:.200}: {error!r}") from error
            for row, ids in zip(batch, encoded, strict=True):
                if not ids:
                    raise UserError(f"a prompt has no tokens: {row['prompt']!r:.200}")
                row["prompt_ids"] = ids


def encode(tokenizer: Any, prompts: list[Prompt]) -> list[list[int]]:
    """Prompts of one kind: chat messages go through the chat template, and strings are taken as they are."""
    if not isinstance(prompts[0], str):
        return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
    encoded = tokenizer(prompts)["input_ids"]
    for n, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # this tokenizer ends every text, but a prompt goes on
            own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            encoded[n] = ids if own[-1:] == ids[-1:] else ids[:-1]
    return encoded


def check_prompts(task: Task, tokenizer: Any, context: int | None, config: Config) -> int:
    """Encode every prompt. One that leaves no room for its completion is an error, or is left out if the settings say
    so. -> the number of tokens of the longest prompt"""
    if task.eos_id not in (None, tokenizer.eos_token_id):
        raise UserError(f"--model {config.model}: --task {config.task} is for its own small model")
    encode_prompts(tokenizer, task.train + task.eval)
    room = (context or math.inf) - config.max_completion_length
    too_long = [row for row in task.train + task.eval if len(row["prompt_ids"]) > room]
    if too_long:
        first = too_long[0]
        message = (
            f"{len(too_long)} prompts and a completion of {config.max_completion_length} exceed the model's context of "
            f"{context}; the first has {len(first['prompt_ids'])} tokens: {first['prompt']!r:.200}"
        )
        if not config.drop_long_prompts:
            raise UserError(f"{message}; shorten them, --drop_long_prompts, or lower --max_completion_length")
        task.train, task.eval = (
            [row for row in rows if len(row["prompt_ids"]) <= room] for rows in (task.train, task.eval)
        )
        task.notes.append(f"{message}; they are left out")
    if (config.steps != 0 and not task.train) or (config.eval_every and not task.eval):
        raise UserError("; ".join([*task.notes, "no prompts to train on, or none held out: see --eval_data"]))
    return max(len(row["prompt_ids"]) for row in task.train + task.eval)


def notes(task: Task, tokenizer: Any) -> list[str]:
    """What was found, and where a figure would say something else than it seems to."""
    found = [*task.notes]
    trained_on = {json.dumps(row["prompt"]) for row in task.train}
    in_both = sum(json.dumps(row["prompt"]) in trained_on for row in task.eval)
    if in_both and task.max_steps != 0:
        found.append(f"{in_both} of the {len(task.eval)} held-out prompts are trained on as well")
    if tokenizer.chat_template is not None and any(isinstance(row["prompt"], str) for row in task.train):
        found.append("prompts that are strings do not get the model's chat template; chat messages do")
    return found
