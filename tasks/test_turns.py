"""Replies between turns, as texts, messages and tokens; and the game of guessing."""

import contextlib

import pytest
from tokenizers.processors import TemplateProcessing

from advantage import Group
from config import UserError
from rollout import Completion
from tasks import Task, as_completion, call_rewards, guess, turns_of
from tasks._characters import EOS_ID, char_tokenizer
from tasks._turns import Conversation, Conversations, encode_reply

TOKENIZER, CHAT = (char_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789:-") for _ in range(2))
for tokenizer in (TOKENIZER, CHAT):  # put <eos> after every text, but must not put one into a reply
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", special_tokens=[("<eos>", EOS_ID)])
CHAT.add_special_tokens({"additional_special_tokens": ["<in>", "<out>", "<user>", "<tool>", "<ai>"]})
OUT, USER, TOOL = CHAT.convert_tokens_to_ids(["<out>", "<user>", "<tool>"])
MARKS = {  # the kind of a chat template: how it writes a message, and how it asks for an answer
    "chatml": ("<in>{{ m.role }}:{{ m.content }}<out>", "<in>assistant:"),  # Qwen, LFM, Nemotron, SmolLM
    "glm": ("{{ dict(user='<user>', tool='<tool>', assistant='<ai>')[m.role] }}{{ m.content }}", "<ai>"),
    "no tools": ("{% if m.role != 'tool' %}<in>{{ m.role }}:{{ m.content }}<out>{% endif %}", "<in>assistant:"),
    "twice": ("{{ m.content }}<out>{{ m.content }}<out>", "<in>"),
}


def template(kind: str) -> str:
    of_message, asked = MARKS[kind]
    return f"{{% for m in messages %}}{of_message}{{% endfor %}}{{% if add_generation_prompt %}}{asked}{{% endif %}}"


NO_END = "the model's chat template puts no end token after a turn"
NOT_SHOWN = "the model's chat template does not show the reply"
USER_SAYS, MESSAGES = [{"role": "user", "content": "7"}], [{"role": "tool", "content": "7"}] * 2
TEMPLATES = [  # the kind of template, who says "hi", the ids that end a turn, and the text after a turn or the error
    ("chatml", "user", [OUT], "<in>user:hi<out><in>assistant:"),
    ("chatml", "tool", [EOS_ID, OUT], "<in>tool:hi<out><in>assistant:"),
    ("chatml", "user", [EOS_ID], NO_END),
    ("glm", "user", [USER, TOOL], "hi<ai>"),  # the <user> before "hi" is the token with which the model ended its turn
    ("no tools", "tool", [OUT], NOT_SHOWN),
    ("twice", "user", [OUT], NO_END),  # shows each turn twice, so it is unclear which end token is meant
]


@pytest.mark.parametrize("kind, role, ends, expected", TEMPLATES)
def test_a_reply_is_what_the_template_puts_after_a_turn(monkeypatch, kind, role, ends, expected):
    monkeypatch.setattr(CHAT, "chat_template", template(kind))
    message = {"role": role, "content": "hi"}
    if expected in (NO_END, NOT_SHOWN):
        with pytest.raises(UserError, match=expected):
            encode_reply(CHAT, [message], ends)
        return
    assert CHAT.decode(encode_reply(CHAT, [message], ends)) == expected
    # If the model's turn has no end token, the reply begins with the one that the template puts there.
    assert CHAT.decode(encode_reply(CHAT, [message], ends, has_end=False)[1:]) == expected
    if kind == "chatml":
        with pytest.raises(UserError, match="has no tokens"):
            encode_reply(CHAT, "", ends)


def conversation(said: object, is_chat: bool, **how) -> Conversation:
    def answer(row, turns):
        row.setdefault("seen", []).append([*turns])
        turns.clear()  # changes only its own copy
        return said

    row = {"prompt": [{"role": "user", "content": "1"}] if is_chat else "1", "prompt_ids": [3], "answer": ["2"]}
    return Conversation(answer, row, CHAT if is_chat else TOKENIZER, [EOS_ID, OUT], **how)


NOT_MESSAGES = ".* is not a text or a list of messages"
WRONG = [  # whether the prompt is a chat, what the reply function returns, and the error
    (False, USER_SAYS, r"\[{.*}\] is not a text, as the prompt is no chat"),
    *((True, said, NOT_MESSAGES) for said in (7, USER_SAYS[0], ["7"], [{"role": "user"}], False)),
]


@pytest.mark.parametrize("is_chat, said, wrong", WRONG)
def test_a_wrong_reply(is_chat, said, wrong):
    with pytest.raises(UserError, match=f"reply function answer: {wrong}"):
        conversation(said, is_chat)([8, EOS_ID])


CONTINUED = [{"role": "assistant", "content": "7"}]
SAID = [  # whether the prompt is a chat, what the reply function returns, and the text that is inserted
    (False, "7", "7"),
    (True, "7", "<in>user:7<out><in>assistant:"),
    (True, MESSAGES, "<in>tool:7<out><in>tool:7<out><in>assistant:"),
    (True, CONTINUED, "7"),
    *((is_chat, "", "") for is_chat in (False, True)),
    (True, [], ""),
]


@pytest.mark.parametrize("is_chat, said, text", SAID)
def test_a_reply_function_gets_all_turns_and_its_reply_is_inserted(monkeypatch, is_chat, said, text):
    """The first turn ends with an end token. A stop string ends the second turn, so a message adds an end token, unless
    it is the assistant's."""
    monkeypatch.setattr(CHAT, "chat_template", template("chatml"))
    limits = []
    made = conversation(said, is_chat, time_limit=lambda name: limits.append(name) or contextlib.nullcontext())
    inserted = [made.tokenizer.decode(made(ids)) for ids in ([2, 3, OUT if is_chat else EOS_ID], [4])]
    assert inserted == [text, "<out>" + text if "assistant:" in text else text]
    assert made.row["seen"] == [["ab"], ["ab", "c"]] and "prompt_ids" not in made.row
    assert made.state == {"seen": made.row["seen"], "answer": ["2"]}, "and not what cannot have changed"
    messages = {"7": USER_SAYS, "": []}
    assert made.replies == [messages.get(said, said) if is_chat and isinstance(said, str) else said] * 2
    assert limits == ["reply function answer"] * 2
    limited = conversation(said, is_chat, max_turns=2)
    assert [limited([2, EOS_ID]) is None for _ in range(2)] == [False, True]
    assert limited.row["seen"] == [["a"], ["a", "a"]] and len(limited.replies) == 1, "the last turn is seen, too"


def test_each_completion_has_a_copy_of_its_row_and_gets_its_replies():
    def reply(row, turns):
        row["answer"].append("3")  # changes only the copy of this completion
        return "a" if turns == ["b"] else None

    row, task = {"prompt": "1", "answer": ["2"]}, Task([], [], [], [], reply=reply)
    conversations = Conversations(task, [row, row], TOKENIZER, [EOS_ID], max_turns=0)
    # Each try of a rollout begins the conversations anew, and the last try counts: here the turns "a" and "b". A server
    # may end the second completion first.
    for tried in {1: 3, 0: 3}, {1: 3, 0: 2}:
        ids = [conversations.begin(i)([token, EOS_ID]) for i, token in tried.items()]
        assert [made.row["answer"] for made in conversations.begun.values()] == [["2", "3"]] * 2
    assert ids == [[2], None] and row == {"prompt": "1", "answer": ["2"]}
    assert {i: made.replies for i, made in conversations.begun.items()} == {1: ["a"], 0: []}


def test_rewards_get_all_messages():
    ids, written = [2, EOS_ID, 30, 31, 3, EOS_ID], [True] * 2 + [False] * 2 + [True] * 2
    # The last reply did not fit into the completion, so its tokens are missing.
    completion = Completion(ids, [0.0] * 6, True, written=written, replies=[MESSAGES, USER_SAYS])
    (first, last) = ({"role": "assistant", "content": text} for text in "ab")
    # The first argument is a prompt. Here it is a chat, and in the next line a text.
    assert as_completion(USER_SAYS, completion, TOKENIZER) == [first, *MESSAGES, last]
    assert as_completion("1", completion, TOKENIZER) == TOKENIZER.decode(ids, skip_special_tokens=True)
    # A reply that continues a turn is a part of the message. After an empty one, the turn simply goes on.
    completion = Completion([2, 30, 3, 4], [0.0] * 4, True, written=[True, False, True, True], splits=[3])
    completion.replies = [CONTINUED, []]
    assert as_completion(USER_SAYS, completion, TOKENIZER) == [{"role": "assistant", "content": "a7bc"}]
    assert turns_of(completion, TOKENIZER) == ["a", "b", "c"]


def test_rewards_see_what_reply_has_stored():
    def stored(prompts, answer, calls, **columns):
        assert (answer, calls) == ([["2"], ["2", "3"]], [None, 1]) and "prompt_ids" not in columns
        return [0.0, 1.0]

    row = {"prompt": "1", "prompt_ids": [3], "answer": ["2"]}
    made = [Completion([2], [0.0], False, state=state) for state in (None, {"answer": ["2", "3"], "calls": 1})]
    ((parts, _),), _ = call_rewards(Task([], [], [stored], [1.0]), [Group([3], row, made)], TOKENIZER, 0)
    assert parts.tolist() == [[0.0], [1.0]]


# ---- The game ----


GAMES = [  # the guesses, if the range is 10 to 40 and the number is 30; the replies; the reward
    (["25", "33", "30"], ["h", "l", None], 1.0),
    (["25"] * 5, ["h"] * 4 + [None], 0.0),
    (["25", "x"], ["h", None], 0.0),
    (["030"], [None], 0.0),
]


@pytest.mark.parametrize("guesses, replies, reward", GAMES)
def test_a_game(guesses, replies, reward):
    row, ids = {"prompt": "10-40:", "number": 30}, TOKENIZER("".join(guesses)).input_ids
    assert [guess.reply(row, guesses[: n + 1]) for n in range(len(guesses))] == replies
    # In the second completion, the last guess is cut off: its end token is missing.
    assert guess.found([""] * 2, [""] * 2, [ids, ids[:-1]], turns=[guesses] * 2, number=[30] * 2) == [reward, 0.0]
