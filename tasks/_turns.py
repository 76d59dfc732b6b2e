"""Replies between the model's turns: call the task's function, and encode what it returns for the rollout.

When the model ends a turn, the task's reply(row, turns) is called. `turns` are the texts that the model has written so
far. `row` is a copy for this completion only, so the function can keep the state of a game in it, which the rewards see
in its columns. The function returns None to end the completion. Otherwise it returns a text, which becomes a message
from the user if the prompt is a chat. For a chat, it can also return a list of messages. After an empty text or list,
the model's next turn begins at once.

In a chat, a reply is encoded with all that the template puts between the end of one turn and the start of the next. A
message of the assistant is encoded alone, because it continues the turn. What the model has sampled is never encoded
again. Asynchronous replies are not supported. No setting lists tools, but docs/extending.md shows how to write a tool
as a reply function.
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
    given: dict  # the row of the prompt
    tokenizer: Any
    eos_ids: list[int]
    max_turns: int = 0  # 0: any number
    time_limit: Callable = nullcontext  # time_limit(what) is a context manager around each call of `reply`
    turns: list[str] = field(default_factory=list)
    replies: list[TextOrMessages] = field(default_factory=list)  # the replies so far, as texts or messages
    row: dict = field(init=False)  # a copy of `given`, in which `reply` may store the state of a game

    def __post_init__(self) -> None:
        self.row = copy.deepcopy({"prompt": self.given["prompt"], **columns_of(self.given)})

    def __call__(self, ids: list[int]) -> list[int] | None:
        self.turns.append(self.tokenizer.decode(ids, skip_special_tokens=True))
        with self.time_limit(f"reply function {self.reply.__name__}"):
            said = self.reply(self.row, [*self.turns])
        # After --max_turns turns, the completion ends, even if the function returns a reply. The function is still
        # called, so that it sees every turn.
        if said is None or len(self.turns) == self.max_turns:
            return None
        reply = self.checked(said)
        self.replies.append(reply)
        return encode_reply(self.tokenizer, reply, self.eos_ids, has_end=ids[-1] in self.eos_ids) if reply else []

    def checked(self, said: object) -> TextOrMessages:
        """Return what the function has said, as messages if the prompt is a chat, and otherwise as a text."""
        is_chat = not isinstance(self.given["prompt"], str)
        if isinstance(said, str):
            as_messages = [{"role": "user", "content": said}] if said else []
            return as_messages if is_chat else said
        if is_chat and isinstance(said, list) and (not said or is_prompt(said)):
            return said
        expected = "a text or a list of messages" if is_chat else "a text, as the prompt is no chat"
        raise UserError(f"reply function {self.reply.__name__}: {said!r:.200} is not {expected}")

    @property
    def state(self) -> dict:
        """What `reply` may have changed in its copy of the row. A text or a number is the same object in a copy."""
        return {name: x for name, x in columns_of(self.row).items() if x is not self.given.get(name)}


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
    """Return the token ids between a turn and the next one. A text is encoded as it is, and so is a message of the
    assistant, which continues the turn. Any other reply in a chat needs an end token before it. If the model wrote one
    (`has_end`), it is not among the returned ids. If a stop string ended the turn, the model wrote no end token, so the
    returned ids begin with one."""
    if not isinstance(reply, str) and [message["role"] for message in reply] == ["assistant"]:
        reply = reply[0]["content"]
    if isinstance(reply, str):
        ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
    else:
        # Some templates refuse a chat that begins with the assistant.
        turn = [{"role": "user", "content": "-"}, {"role": "assistant", "content": MARK}]
        text = tokenizer.apply_chat_template([*turn, *reply], add_generation_prompt=True, tokenize=False)
        if left_out(tokenizer, [*turn, *reply]):  # some templates leave out messages of certain roles
            raise UserError("the model's chat template does not show the reply")
        after = text.partition(MARK)[2]
        ids = tokenizer(after, add_special_tokens=False)["input_ids"] if text.count(MARK) == 1 else []
        if not ids or ids[0] not in eos_ids:
            raise UserError("the model's chat template puts no end token after a turn, so a turn cannot get a reply")
        ids = ids[1:] if has_end else ids
    if not ids:
        raise UserError("the reply has no tokens")
    return ids
