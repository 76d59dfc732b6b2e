"""Replies between the model's turns: from a task's function to the token ids that a rollout inserts.

When the model ends a turn, the task's reply(row, turns) is called. `turns` are the texts that the model has written so
far. `row` is a copy for this completion only, so the function can keep the state of a game in it. The function returns
None to end the completion. Otherwise it returns a text, or messages if the prompt is a chat; there, a text becomes a
message from the user.

The tokens of a reply are those that the chat template puts between one turn and the next. What the model has sampled is
never encoded again. Left out: tools as a setting (docs/extending.md has them in a few lines), asynchronous replies.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from config import UserError
from rollout import Completion
from tasks import Prompt, Task, columns_of

MARK = "\ue000"  # stands for a turn of the model: a character that nobody uses


@dataclass
class Replies:
    """The replies to one completion. Call it with the token ids of the turn that has ended: it returns those of the
    reply, or None if the completion is over."""

    reply: Callable
    row: dict
    tokenizer: Any
    eos_ids: list[int]
    max_turns: int = 0  # 0: any number
    time_limit: Callable = nullcontext  # time_limit(name) is a context manager around each call of `reply`
    turns: list[str] = field(default_factory=list)
    said: list[Prompt] = field(default_factory=list)  # the replies so far, as texts or messages

    def __post_init__(self) -> None:
        self.row = copy.deepcopy({"prompt": self.row["prompt"], **columns_of(self.row)})

    def __call__(self, ids: list[int]) -> list[int] | None:
        self.turns.append(self.tokenizer.decode(ids, skip_special_tokens=True))
        is_chat = not isinstance(self.row["prompt"], str)
        with self.time_limit(self.reply.__name__):
            said = self.reply(self.row, [*self.turns])
        if said is None or len(self.turns) == self.max_turns:
            return None
        self.said.append([{"role": "user", "content": said}] if is_chat and isinstance(said, str) else said)
        try:
            if isinstance(self.said[-1], list) != is_chat:
                raise UserError("a text" + " or messages" * is_chat + " was expected")
            return encode_reply(self.tokenizer, self.said[-1], self.eos_ids, ended=ids[-1] in self.eos_ids)
        except Exception as error:  # such as a role that the chat template does not know
            returned = f"reply function {self.reply.__name__} returned {said!r:.200}"
            raise UserError(f"{returned}, for prompt {self.row['prompt']!r:.200}: {error}") from error


def replies_to(task: Task, rows: list[dict], *settings: Any) -> list[Replies] | None:
    """Prepare the replies to one completion of each row, with these fields of Replies: tokenizer, eos_ids, max_turns,
    time_limit. None if the task does not reply."""
    return [Replies(task.reply, row, *settings) for row in rows] if task.reply else None


def with_replies(completions: list[Completion], replies: list[Replies] | None) -> list[Completion]:
    """Record in each completion what was replied to it, for the rewards."""
    for completion, its_replies in zip(completions, replies or []):
        completion.replies = its_replies.said
    return completions


def encode_reply(tokenizer: Any, reply: Prompt, eos_ids: list[int], ended: bool = True) -> list[int]:
    """Return the token ids between a turn and the next one. If the model has ended the turn with an end token, they do
    not contain that token again. If it has not, because a stop string ended the turn, they begin with it."""
    if isinstance(reply, str):
        ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    else:
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        changed = [message | {"content": message["content"] + "-"} for message in reply]
        how = dict(add_generation_prompt=True, tokenize=False)
        text, changed_text = (tokenizer.apply_chat_template([*turn, *said], **how) for said in (reply, changed))
        if text == changed_text:
            raise UserError("the model's chat template does not show it")
        _, *after = text.split(MARK)
        ids = tokenizer(after[0], add_special_tokens=False)["input_ids"] if len(after) == 1 else []
        if not ids or ids[0] not in eos_ids:
            raise UserError("the model's chat template puts no end token after a turn, so a turn cannot get a reply")
        ids = ids[1:] if ended else ids
    if not ids:
        raise UserError("it has no tokens")
    return ids


def check_template(task: Task, tokenizer: Any, eos_ids: list[int]) -> None:
    """Refuse a chat template that cannot continue after a turn."""
    if task.reply is not None and not all(isinstance(row["prompt"], str) for row in task.train + task.eval):
        encode_reply(tokenizer, [{"role": "user", "content": "-"}], eos_ids)
