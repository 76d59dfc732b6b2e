"""Encode the prompts of all rows with the model's tokenizer, and check that they fit into its context."""

import json
import math
from functools import partial
from typing import Any

from config import Config, UserError
from tasks import Task, TextOrMessages


def encode_prompts(tokenizer: Any, rows: list[dict]) -> None:
    """Add to each row the token ids of its prompt, as `prompt_ids`. All prompts are encoded at a time, because encoding
    those of a large data set one by one takes minutes."""
    for is_text in (True, False):
        same_kind = [row for row in rows if isinstance(row["prompt"], str) == is_text]
        encoded = encode(tokenizer, [row["prompt"] for row in same_kind]) if same_kind else []
        for row, ids in zip(same_kind, encoded, strict=True):
            if not ids:
                raise UserError(f"a prompt has no tokens: {row['prompt']!r:.200}")
            row["prompt_ids"] = ids


def encode(tokenizer: Any, prompts: list[TextOrMessages]) -> list[list[int]]:
    """Encode prompts that are all strings, or all chats. Only chats go through the chat template."""
    if not isinstance(prompts[0], str):
        if tokenizer.chat_template is None:
            raise UserError("a prompt is a chat, but the model has no chat template: give another --model, or texts")
        return tokenizer.apply_chat_template(prompts, add_generation_prompt=True, return_dict=True)["input_ids"]
    encoded, eos_id, eos = tokenizer(prompts)["input_ids"], tokenizer.eos_token_id, tokenizer.eos_token
    # A tokenizer may add a start token to a text that already begins with one.
    start = [getattr(tokenizer, "bos_token_id", None)] * 2
    encoded = [ids[1:] if ids[:2] == start else ids for ids in encoded]
    # Some tokenizers add the end token to every text. It is removed, because the model has to continue the prompt. An
    # end token that the user wrote is kept.
    added = [len(ids) > 1 and ids[-1] == eos_id and not text.endswith(eos) for text, ids in zip(prompts, encoded)]
    return [ids[:-1] if is_added else ids for ids, is_added in zip(encoded, added)]


def check_prompts(task: Task, tokenizer: Any, context: int | None, config: Config) -> int:
    """Encode every prompt, and return the number of tokens of the longest one. If a prompt leaves no room in the
    model's context for its completion, raise an error or, with --drop_long_prompts, leave it out. Then each row that is
    trained on gets its position in task.train, as `_index`."""
    if task.eos_id not in (None, tokenizer.eos_token_id):
        raise UserError(f"--model {config.model}: --task {config.task} works only with its own small model")
    encode_prompts(tokenizer, task.train + task.eval)
    room = (context or math.inf) - config.max_completion_length
    if room < 1:
        shown = f"--max_completion_length {config.max_completion_length}"
        raise UserError(f"{shown}: leaves no room for prompts in the model's context of {context} tokens")
    too_long = [row["prompt"] for row in task.train + task.eval if len(row["prompt_ids"]) > room]
    if too_long:
        message = f"{len(too_long)} prompts have more than {room} tokens, for instance {too_long[0]!r:.200}"
        if not config.drop_long_prompts:
            raise UserError(f"{message}; give --drop_long_prompts or lower --max_completion_length")
        task.train = [row for row in task.train if len(row["prompt_ids"]) <= room]
        task.eval = [row for row in task.eval if len(row["prompt_ids"]) <= room]
        task.notes.append(f"{message}; they are left out")
    evaluates = config.eval_every != 0
    must_evaluate = config.steps == 0 or (evaluates and config.eval_data)
    if (config.steps != 0 and not task.train) or (must_evaluate and not task.eval):
        raise UserError("no prompts to train on, or none to evaluate on: see --eval_data and --drop_long_prompts")
    if evaluates and not task.eval:
        task.notes.append("too few prompts to hold some out, so this run does not evaluate; see --eval_data")
    for index, row in enumerate(task.train):
        row["_index"] = index
    return max(len(row["prompt_ids"]) for row in task.train + task.eval)


def notes(task: Task, tokenizer: Any, trains: bool) -> list[str]:
    """Return the task's notes, and warnings about rows that may not be what the user meant."""
    found = [*task.notes]
    trained_on = {json.dumps(row["prompt"]) for row in task.train}
    in_both = sum(json.dumps(row["prompt"]) in trained_on for row in task.eval)
    if in_both and trains:
        found.append(f"{in_both} of the {len(task.eval)} held-out prompts are trained on as well")
    prompts = [row["prompt"] for row in task.train + task.eval]
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    if texts and tokenizer.chat_template is not None:
        found.append("prompts that are strings do not get the model's chat template; chat messages do")
    if any(chat[-1]["role"] == "assistant" for chat in chats):
        found.append("a prompt ends with a message of the assistant, which the model reads before it answers")
    one_of_each_kind = {tuple(message["role"] for message in chat): chat for chat in chats}.values()
    if roles := {role for chat in one_of_each_kind for role in left_out(tokenizer, chat)}:
        found.append(f"the model's chat template leaves out messages with the role {', '.join(sorted(roles))}")
    return found


def left_out(tokenizer: Any, chat: list[dict]) -> list[str]:
    """Return the role of each message that the chat template leaves out. To find this out, change the messages one by
    one: if the text of the chat stays the same, the template does not show the message."""
    show = partial(tokenizer.apply_chat_template, add_generation_prompt=True, tokenize=False)
    changed = [[*chat[:i], one | {"content": one["content"] + "-"}, *chat[i + 1 :]] for i, one in enumerate(chat)]
    text = show(chat)
    return [one["role"] for one, other in zip(chat, changed, strict=True) if show(other) == text]
