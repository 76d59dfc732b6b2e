"""What is said between turns, as texts, messages and tokens; and the game of guessing."""

import contextlib

import pytest

from config import Config, UserError
from rollout import Completion
from tasks import Task, as_completion, guess, load_task, score
from tasks._characters import EOS_ID, char_tokenizer
from tasks._turns import Replies, check_template, encode_reply
from tasks.test_tasks import group_of

TOKENIZER, CHAT = (char_tokenizer("abcdefghijklmnopqrstuvwxyz 0123456789:-") for _ in range(2))
CHAT.add_special_tokens({"additional_special_tokens": ["<in>", "<out>", "<user>", "<tool>", "<ai>"]})
IN, OUT, USER, TOOL, AI = CHAT.convert_tokens_to_ids(["<in>", "<out>", "<user>", "<tool>", "<ai>"])
MARKS = {  # a kind of template -> what it writes of messages, what it asks an answer with
    "chatml": ("<in>{{ m.role }}:{{ m.content }}<out>", "<in>assistant:"),  # Qwen, LFM, Nemotron, SmolLM
    "llama": ("<in>{{ m.role }} {{ m.content | trim }}<out>", "<in>assistant "),
    "glm": ("{{ dict(user='<user>', tool='<tool>', assistant='<ai>')[m.role] }}{{ m.content }}", "<ai>"),
    "gpt-oss": ("<in>{{ m.role }}:{{ m.content }}{{ '<out>' if loop.last else '<eos>' }}", "<in>assistant:"),
    "no tools": ("{% if m.role != 'tool' %}<in>{{ m.role }}:{{ m.content }}<out>{% endif %}", "<in>assistant:"),
    "no history": ("{% if loop.last %}{{ m.content }}<out>{% endif %}", "<in>"),
    "twice": ("{{ m.content }}<out>{{ m.content }}<out>", "<in>"),
    "strict": ("{{ m.content if m.role != 'tool' else raise_exception('no tools here') }}<out>", "<in>"),
}


def template(kind: str) -> str:
    of_message, asked = MARKS[kind]
    return f"{{% for m in messages %}}{of_message}{{% endfor %}}{{% if add_generation_prompt %}}{asked}{{% endif %}}"


GOES_ON = "the model's chat template does not go on from the end token of a turn"
SHOWN = "the model's chat template does not show it"
TEMPLATES = [  # of which kind, who says "hi", the ids that end a turn -> what stands behind a turn, or what is said
    ("chatml", "user", [OUT], "<in>user:hi<out><in>assistant:"),
    ("chatml", "tool", [EOS_ID, OUT], "<in>tool:hi<out><in>assistant:"),
    ("chatml", "user", [EOS_ID], GOES_ON),
    ("llama", "user", [OUT], "<in>user hi<out><in>assistant "),
    ("glm", "user", [USER, TOOL], "hi<ai>"),
    ("glm", "tool", [USER, TOOL], "hi<ai>"),
    ("gpt-oss", "user", [OUT], GOES_ON),
    ("no tools", "user", [OUT], "<in>user:hi<out><in>assistant:"),
    ("no tools", "tool", [OUT], SHOWN),
    ("no history", "user", [OUT], GOES_ON),
    ("twice", "user", [OUT], GOES_ON),
    ("strict", "tool", [OUT], "no tools here"),
]


@pytest.mark.parametrize("kind, role, ends, expected", TEMPLATES)
def test_a_reply_is_what_the_template_puts_behind_a_turn(monkeypatch, kind, role, ends, expected):
    monkeypatch.setattr(CHAT, "chat_template", template(kind))
    rows = [{"prompt": [{"role": "user", "content": "1"}]}]
    task, message = Task(rows, [], [], [], reply=print), {"role": role, "content": "hi"}
    if "<" in expected:
        assert CHAT.decode(encode_reply(CHAT, [message], ends)) == expected
        assert CHAT.decode(encode_reply(CHAT, [message], ends, ended=False)[1:]) == expected
        check_template(task, CHAT, ends)
        game = [*rows[0]["prompt"], {"role": "assistant", "content": "ok"}, message]
        whole = CHAT.apply_chat_template(game, add_generation_prompt=True, tokenize=False)
        assert whole.endswith(expected) and whole.removesuffix(expected).endswith(("ok<out>", "ok<user>", "ok<tool>"))
    else:
        with pytest.raises(Exception, match=expected):
            encode_reply(CHAT, [message], ends)
        if role == "user":
            with pytest.raises(UserError, match=f"^a reply to the model's turns: {expected}$"):
                check_template(task, CHAT, ends)
    check_template(Task([{"prompt": "a"}], [], [], [], reply=print), TOKENIZER, ends)  # text needs no template
    check_template(Task(rows, [], [], []), TOKENIZER, ends)


USER_SAYS, MESSAGES = [{"role": "user", "content": "7"}], [{"role": "tool", "content": "7"}] * 2
DUE = "a text or messages or None was expected, and not an empty one"
WRONG = [  # is the prompt a chat, what is returned, what is said of it
    (True, "", f"returned '', for prompt .*: {DUE}$"),
    (True, [], DUE),
    (True, 7, f"returned 7, .*: {DUE}$"),
    (True, ["7"], DUE),
    (True, [{"role": "user", "content": None}], DUE),
    (False, USER_SAYS, "returned .*, for prompt '1': a text or None was expected"),
    (False, "", "a text or None was expected, and not an empty one$"),
    (False, b"7", "a text or None was expected"),
    (False, "?", r"returned '\?', for prompt '1': .*UNK"),
]


def replies_to(said: object, is_chat: bool, **how) -> Replies:
    def answer(row, turns):
        row.setdefault("seen", []).append([*turns])
        turns.clear()  # it gets copies
        return said(row) if callable(said) else said

    row = {"prompt": [{"role": "user", "content": "1"}] if is_chat else "1", "prompt_ids": [3], "answer": ["2"]}
    return Replies(answer, row, CHAT if is_chat else TOKENIZER, [OUT, EOS_ID], **how)


@pytest.mark.parametrize("is_chat, said, told", WRONG)
def test_what_is_no_reply_is_named_with_its_function_and_prompt(monkeypatch, is_chat, said, told):
    monkeypatch.setattr(CHAT, "chat_template", template("chatml"))
    with pytest.raises(UserError, match=f"^reply function answer .*{told}"):
        replies_to(said, is_chat)([8, EOS_ID])


def test_what_a_reply_function_gets_and_what_becomes_of_what_it_says(monkeypatch):
    monkeypatch.setattr(CHAT, "chat_template", template("chatml"))
    before = "<in>user:7<out><in>assistant:"
    for is_chat, said, text in [(False, "7", "7"), (True, "7", before), (True, USER_SAYS, before)]:
        limits = []
        limit = lambda name, limits=limits: limits.append(name) or contextlib.nullcontext()  # noqa: E731
        made = replies_to(said, is_chat, time_limit=limit)
        assert [made.tokenizer.decode(made(ids)) for ids in ([2, 3, EOS_ID], [4, EOS_ID])] == [text, text]
        assert made.row["seen"] == [["ab"], ["ab", "c"]] and "prompt_ids" not in made.row
        assert made.said == [USER_SAYS if is_chat else "7"] * 2 and limits == ["answer"] * 2
    made = replies_to(MESSAGES, True)
    assert CHAT.decode(made([2, OUT])) == "<in>tool:7<out>" * 2 + "<in>assistant:"
    assert CHAT.decode(made([2])) == "<out>" + "<in>tool:7<out>" * 2 + "<in>assistant:", "after a stop string"
    row = {"prompt": "1", "answer": ["2"]}
    kept = Replies(lambda row, turns: row["answer"].append("3"), row, TOKENIZER, [EOS_ID])
    assert kept([2, EOS_ID]) is None and kept.said == [] and row == {"prompt": "1", "answer": ["2"]}, "a copy"
    limited = replies_to("7", False, max_turns=2)
    assert [limited([2, EOS_ID]) is None for _ in range(2)] == [False, True]
    assert limited.row["seen"] == [["a"], ["a", "a"]] and limited.said == ["7"], "it sees the last turn"


def test_rewards_get_all_messages_and_the_turns_by_themselves():
    ids, written = [2, EOS_ID, 30, 31, 3, EOS_ID], [True] * 2 + [False] * 2 + [True] * 2
    completion = Completion(ids, [0.0] * 6, False, written=written, replies=[MESSAGES, USER_SAYS])  # one was dropped
    (first, last) = ({"role": "assistant", "content": text} for text in "ab")
    assert as_completion(USER_SAYS, completion, TOKENIZER) == [first, *MESSAGES, last]
    assert as_completion("1", completion, TOKENIZER) == TOKENIZER.decode(ids, skip_special_tokens=True)
    seen = []

    def reward(turns, completion_ids, **columns):
        seen.append((turns, completion_ids))
        return [0.0] * len(turns)

    group = group_of({"prompt": "1"}, "1")
    group.completions = [completion] * 2
    task = Task([], [], [reward], [1.0], reply=print)
    score(task, [group], TOKENIZER, done=0)
    assert seen == [([["a", "b"]] * 2, [ids] * 2)]


def test_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def say(row, turns):\n    return 'a'\n")
    assert load_task(Config(task="addition", reply="mine.py:say", max_turns=3)).reply({}, []) == "a"
    assert load_task(Config(task="guess", max_turns=3)).reply is guess.reply
    assert load_task(Config(task="guess", reply="mine.py:say")).reply({}, []) == "a"
    for given, error in {"mine.py:no": AttributeError, "no.py:say": FileNotFoundError, "say": UserError}.items():
        with pytest.raises(error, match="^--reply say: must be file.py:function or " if error is UserError else None):
            load_task(Config(task="addition", reply=given))
    with pytest.raises(UserError, match=r"^--max_turns 3: nothing replies to the model's turns; see --reply$"):
        load_task(Config(task="addition", max_turns=3))


# ---- The game ----


def play(number: int, guesses: list[str]) -> tuple[list[str | None], float]:
    row, (reward,) = {"prompt": "10-40:", "number": number}, guess.load(Config()).rewards
    said = [guess.reply(row, guesses[: n + 1]) for n in range(len(guesses))]
    ids = [[*TOKENIZER("".join(guesses)).input_ids, EOS_ID]]
    return said, reward(["10-40:"], [""], ids, turns=[guesses], number=[number])[0]


def test_guess():
    assert play(30, ["25", "33", "30"]) == (["h", "l", None], 1.0)
    assert play(30, ["25"] * 5) == (["h"] * 4 + [None], 0.0), "five guesses"
    assert play(30, ["25", "x"]) == (["h", None], 0.0) and play(30, ["030"]) == ([None], 0.0)
    assert play(30, [""]) == ([None], 0.0)
    task = guess.load(Config())
    sides = [{row["prompt"] for row in rows} for rows in (task.train, task.eval)]
    assert not sides[0] & sides[1] and len(task.train) > 8000 and len(task.eval) > 1000
    for row in task.train + task.eval:
        low, high = map(int, row["prompt"].rstrip(":").split("-"))
        assert 1 <= low <= row["number"] <= high <= 99 and high - low >= 9
    assert min(row["prompt"] for row in guess.load(Config()).eval) == min(sides[1]), "the same in every run"
