"""Replies between the model's turns: call the task's function, and encode what it returns for the rollout.

When the model ends a turn, the task's reply(row, turns) is called. `turns` are the texts that the model has written so
far. `row` is a copy for this completion only, so the function can keep the state of a game in it. The function returns
None to end the completion. Otherwise it returns a text, which becomes a message from the user if the prompt is a chat.
For a chat, it can also return a list of messages.

In a chat, a reply is encoded with all that the template puts between the end of one turn and the start of the next.
What the model has sampled is never encoded again. Asynchronous replies are not supported. No setting lists tools, but
docs/extending.md shows how to write a tool as a reply function.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from config import UserError
from tasks import Task, TextOrMessages, columns_of
from tasks._files import is_prompt
from tasks._prompts import left_out

MARK = "\ue000"  # stands for the text of the model's turn; nobody uses this character


@dataclass
class Conversation:
    """What the task says in one completion. Call this object with the token ids of the turn that has ended. It returns
    the token ids of the reply, or None if the completion is over."""

    reply: Callable
    row: dict
    tokenizer: Any
    eos_ids: list[int]
    max_turns: int = 0  # 0: any number
    time_limit: Callable = nullcontext  # time_limit(what) is a context manager around each call of `reply`
    turns: list[str] = field(default_factory=list)
    replies: list[TextOrMessages] = field(default_factory=list)  # the replies so far, as texts or messages

    def __post_init__(self) -> None:
        self.row = copy.deepcopy({"prompt": self.row["prompt"], **columns_of(self.row)})

    def __call__(self, ids: list[int]) -> list[int] | None:
        self.turns.append(self.tokenizer.decode(ids, skip_special_tokens=True))
        with self.time_limit(f"reply function {self.reply.__name__}"):
            reply = self.reply(self.row, [*self.turns])
        # After --max_turns turns, the completion ends, even if the function returns a reply. The function is still
        # called, so that it sees every turn.
        if reply is None or len(self.turns) == self.max_turns:
            return None
        is_chat = not isinstance(self.row["prompt"], str)
        if not isinstance(reply, str) and not (is_chat and is_prompt(reply)):
            expected = "a text or a list of messages" if is_chat else "a text, as the prompt is no chat"
            raise UserError(f"reply function {self.reply.__name__}: {reply!r:.200} is not {expected}")
        if is_chat and isinstance(reply, str):
            reply = [{"role": "user", "content": reply}]
        self.replies.append(reply)
        return encode_reply(self.tokenizer, reply, self.eos_ids, has_end=ids[-1] in self.eos_ids)


@dataclass
class Conversations:
    """What the task says in the completions of these rows, one of each."""

    task: Task
    rows: list[dict]
    tokenizer: Any
    eos_ids: list[int]
    max_turns: int
    begun: dict[int, Conversation] = field(default_factory=dict)  # the last one of each completion

    def begin(self, i: int) -> Conversation:
        """Begin the conversation of completion i. A completion that is sampled again begins it anew."""
        self.begun[i] = Conversation(
            self.task.reply,
            self.rows[i],
            self.tokenizer,
            self.eos_ids,
            max_turns=self.max_turns,
            time_limit=self.task.time_limit,
        )
        return self.begun[i]


def encode_reply(tokenizer: Any, reply: TextOrMessages, eos_ids: list[int], has_end: bool = True) -> list[int]:
    """Return the token ids between a turn and the next one. A text is encoded as it is. In a chat, the turn needs an
    end token. If the model wrote one (`has_end`), it is not among the returned ids. If a stop string ended the turn,
    the model wrote no end token, so the returned ids begin with one."""
    if isinstance(reply, str):
        ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    else:
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        text = tokenizer.apply_chat_template([*turn, *reply], add_generation_prompt=True, tokenize=False)
        if left_out(tokenizer, [*turn, *reply]):  # some templates leave out messages of certain roles
            raise UserError("the model's chat template does not show the reply")
        after = text.partition(MARK)[2]
        ids = tokenizer(after, add_special_tokens=False)["input_ids"] if text.count(MARK) == 1 else []
        if not ids or ids[0] not in eos_ids:
            raise UserError("the model's chat template puts no end token after a turn, so a turn cannot get a reply")
        ids = ids[1:] if has_end else ids
    if not reply or not ids:
        raise UserError("the reply has no tokens")
    return ids
