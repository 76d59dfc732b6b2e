"""Rows -> prompts that this model can be given: in its tokens, and short enough for its context."""

import json
import math
from typing import Any

from config import Config, UserError
from tasks import RESERVED, Prompt, Task
from tasks._files import excerpt


def encode_prompt(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Chat messages go through the chat template; a string is taken as it is."""
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id:  # some tokenizers end every text; a prompt goes on
            own = tokenizer(prompt, add_special_tokens=False)["input_ids"]
            ids = ids if own[-1:] == ids[-1:] else ids[:-1]
        return ids
    return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]


def check_prompts(task: Task, tokenizer: Any, context: int | None, config: Config) -> int:
    """Every prompt can be encoded and leaves room for its completion, or is left out where the settings say so.
    -> tokens of the longest"""
    if task.eos_id is not None and tokenizer.eos_token_id != task.eos_id:
        raise UserError(
            f"--model {config.model}: --task {config.task} is for its own small model, or one trained from it"
        )
    lengths = {id(row): length_of(tokenizer, row["prompt"]) for row in task.train + task.eval}
    room = (context or math.inf) - config.max_completion_length
    too_long = [row for row in task.train + task.eval if lengths[id(row)] > room]
    if too_long:
        first = f"the first has {lengths[id(too_long[0])]} tokens: {excerpt(too_long[0]['prompt'])}"
        told = (
            f"{len(too_long)} prompts and a completion of {config.max_completion_length} exceed the model's context of "
            f"{context}; {first}"
        )
        if not config.drop_long_prompts:
            raise UserError(f"{told}; shorten them, --drop_long_prompts, or lower --max_completion_length")
        task.train, task.eval = ([row for row in part if lengths[id(row)] <= room] for part in (task.train, task.eval))
        if not task.train or (config.eval_every and not task.eval):
            raise UserError(f"{told}; too few others are left: lower --max_completion_length")
        task.notes.append(f"{told}; they are left out")
    return max(lengths[id(row)] for row in task.train + task.eval)


def length_of(tokenizer: Any, prompt: Prompt) -> int:
    try:
        ids = encode_prompt(tokenizer, prompt)
    except Exception as error:  # a letter that the tokenizer does not know, a chat template that is missing
        raise UserError(f"a prompt could not be encoded: {excerpt(prompt)}: {type(error).__name__}: {error}") from error
    if not ids:
        raise UserError(f"a prompt has no tokens: {excerpt(prompt)}")
    return len(ids)


def notes(task: Task, tokenizer: Any) -> list[str]:
    """What was found, and what may be meant otherwise."""
    found, columns, prompts = [*task.notes], task.train[0].keys(), [row["prompt"] for row in task.train]
    trained_on = set(map(json.dumps, prompts))
    in_both = sum(json.dumps(row["prompt"]) in trained_on for row in task.eval)
    if in_both and task.max_steps != 0:
        found.append(f"{in_both} of the {len(task.eval)} held-out prompts are trained on as well")
    if tokenizer.chat_template is not None and any(isinstance(prompt, str) for prompt in prompts):
        found.append("prompts that are strings do not get the model's chat template; chat messages do")
    if any(not isinstance(prompt, str) and prompt[-1]["role"] == "assistant" for prompt in prompts):
        found.append("some prompts end with a message of the assistant, which is answered, not continued")
    for name in sorted(columns & {"tools", "images", "image", "chat_template_kwargs"}):
        found.append(f"the column {name} goes to the rewards alone: no prompt is made with it")
    for name in sorted(columns & {*RESERVED}):
        found.append(f"the column {name} is not used: rewards are given that of the run under this name")
    return found
