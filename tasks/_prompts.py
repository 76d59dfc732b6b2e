"""Rows -> prompts that this model can be given: in its tokens, and short enough for its context."""

import json
import math
from typing import Any

from config import Config, UserError
from tasks import Prompt, Task


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Chat messages go through the chat template; a string is taken as it is."""
    if not isinstance(prompt, str):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
    ids = tokenizer(prompt)["input_ids"]
    if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text; a prompt goes on
        own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = ids if own[-1:] == ids[-1:] else ids[:-1]
    return ids


def check_prompts(task: Task, tokenizer: Any, context: int | None, config: Config) -> int:
    """Every prompt can be encoded and leaves room for its completion, or is left out where the settings say so.
    -> tokens of the longest"""
    if task.eos_id not in (None, tokenizer.eos_token_id):
        raise UserError(f"--model {config.model}: --task {config.task} is for its own small model")
    lengths = {id(row): length_of(tokenizer, row["prompt"]) for row in task.train + task.eval}
    room = (context or math.inf) - config.max_completion_length
    too_long = [row["prompt"] for row in task.train + task.eval if lengths[id(row)] > room]
    if too_long:
        told = f"{len(too_long)} prompts and a completion of {config.max_completion_length} exceed the model's context "
        told += f"of {context}; the first has {length_of(tokenizer, too_long[0])} tokens: {too_long[0]!r:.200}"
        if not config.drop_long_prompts:
            raise UserError(f"{told}; shorten them, --drop_long_prompts, or lower --max_completion_length")
        task.train, task.eval = ([row for row in part if lengths[id(row)] <= room] for part in (task.train, task.eval))
        task.notes.append(f"{told}; they are left out")
    if (config.steps != 0 and not task.train) or (config.eval_every and not task.eval):
        raise UserError("; ".join([*task.notes, "no prompts to train on, or none held out: see --eval_data"]))
    return max(lengths[id(row)] for row in task.train + task.eval)


def length_of(tokenizer: Any, prompt: Prompt) -> int:
    try:
        ids = encode_prompt(tokenizer, prompt)
    except Exception as error:  # a letter that the tokenizer does not know, a chat template that is missing
        raise UserError(f"a prompt could not be encoded: {prompt!r:.200}: {type(error).__name__}: {error}") from error
    if not ids:
        raise UserError(f"a prompt has no tokens: {prompt!r:.200}")
    return len(ids)


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
