"""What is said between the turns of a completion: texts and messages for a task, token ids for the rollout.

A task's reply(row, turns) is called whenever the model has ended a turn. `turns` are the texts that the model wrote so
far, and `row` is a copy for this completion only, so it can keep the state of a game. The function returns None if the
completion is over. Otherwise it returns a text, or messages if the prompt is a chat; there, a text is the user's.

What the model has sampled is never encoded again. The tokens of a reply are those that the chat template puts behind a
turn, up to the next turn. Left out: tools as a setting (docs/extending.md has them in a few lines), async replies.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from config import UserError
from tasks import Prompt, Task, columns_of
from tasks._files import is_prompt

MARK = "\ue000"  # stands for a turn of the model, in a character that nobody uses


@dataclass
class Replies:
    """What is replied to one completion. It is called with the ids of a turn and returns those of the reply."""

    reply: Callable
    row: dict
    tokenizer: Any
    eos_ids: list[int]
    max_turns: int = 0
    time_limit: Callable = nullcontext  # is entered with the function's name around its call
    turns: list[str] = field(default_factory=list)
    said: list[Prompt] = field(default_factory=list)

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
            if not said or not is_prompt(said) or isinstance(self.said[-1], str) == is_chat:
                raise ValueError(f"a text{' or messages' * is_chat} or None was expected, and not an empty one")
            return encode_reply(self.tokenizer, self.said[-1], self.eos_ids, ended=ids[-1] in self.eos_ids)
        except Exception as error:  # a letter that the tokenizer does not know, a role that the template does not
            returned = f"reply function {self.reply.__name__} returned {said!r:.200}"
            raise UserError(f"{returned}, for prompt {self.row['prompt']!r:.200}: {error}") from error


def encode_reply(tokenizer: Any, reply: Prompt, eos_ids: list[int], ended: bool = True) -> list[int]:
    """-> the ids between a turn and the next one. They begin with the end token of the turn unless the model wrote it
    itself, as it does if no stop string ended the turn."""
    if isinstance(reply, str):
        ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    else:
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        changed = [message | {"content": message["content"] + "-"} for message in reply]
        how = dict(add_generation_prompt=True, tokenize=False)
        text, changed_text = (tokenizer.apply_chat_template([*turn, *said], **how) for said in (reply, changed))
        if text == changed_text:
            raise ValueError("the model's chat template does not show it")
        _, *behind = text.split(MARK)
        ids = tokenizer(behind[0], add_special_tokens=False)["input_ids"] if len(behind) == 1 else []
        if not ids or ids[0] not in eos_ids:
            raise ValueError("the model's chat template does not go on from the end token of a turn")
        ids = ids[1:] if ended else ids
    if not ids:
        raise ValueError("it has no tokens")
    return ids


def check_template(task: Task, tokenizer: Any, eos_ids: list[int]) -> None:
    """Refuse a chat template that cannot continue a turn."""
    if task.reply is not None and not all(isinstance(row["prompt"], str) for row in task.train + task.eval):
        try:
            encode_reply(tokenizer, [{"role": "user", "content": "-"}], eos_ids)
        except Exception as error:
            raise UserError(f"a reply to the model's turns: {error}") from error
