"""Prompts, rewards and data files: what goes in, what comes out, and what each mistake says."""

import json
import random
from decimal import Decimal

import numpy as np
import pytest
import torch

from config import Config, UserError
from infra.command_line import check_prompts, notes
from rollout import Completion
from tasks import Task, encode_prompt, load_task, score
from tasks._characters import EOS_ID, char_tokenizer
from tasks._files import call_reward, hold_out, load_reward, read_rows, shown

CHAT = [{"role": "user", "content": "1+1"}]
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}:{% endif %}"


@pytest.fixture(scope="module")
def tokenizer():
    return char_tokenizer("0123456789+=[]: abc")


@pytest.fixture(scope="module")
def chat_tokenizer():
    tokenizer = char_tokenizer("0123456789+=[]: abc")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def of(*prompts, eval=()) -> Task:
    return Task([{"prompt": p} for p in prompts], [{"prompt": p} for p in eval], [], [], 1.0)


# ---- Prompts ----


def test_a_string_is_taken_as_it_is_and_messages_go_through_the_template(chat_tokenizer):
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, "1+1=")) == "1+1="
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, CHAT)) == "[1+1]:"
    assert chat_tokenizer.decode(encode_prompt(chat_tokenizer, CHAT * 2)) == "[1+1][1+1]:"


def test_an_end_token_that_the_tokenizer_adds_is_taken_off(tokenizer):
    class Ending:
        eos_token_id = EOS_ID

        def __call__(self, text, add_special_tokens=True):
            return {"input_ids": [*tokenizer(text).input_ids, *[EOS_ID] * add_special_tokens]}

    assert encode_prompt(Ending(), "1+1=") == tokenizer("1+1=").input_ids
    written = "1+1=" + tokenizer.eos_token
    assert encode_prompt(tokenizer, written)[-1] == EOS_ID, "one that the user wrote stays"


def test_each_row_once_an_epoch_in_another_order(tokenizer):
    task = of(*map(str, range(50)))
    epochs = [[task.draw(50 * epoch + i, seed=3)["prompt"] for i in range(50)] for epoch in range(4)]
    assert all(sorted(epoch) == sorted(map(str, range(50))) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4
    assert epochs[2] == [task.draw(100 + i, seed=3)["prompt"] for i in range(50)], "the same every time"
    assert epochs[0] != [task.draw(i, seed=4)["prompt"] for i in range(50)]


def test_prompts_that_are_fine_need_no_note(tokenizer, chat_tokenizer):
    assert check_prompts(of("1+1=", eval=["12+2="]), tokenizer, context=11, max_completion_length=6) == 5
    assert check_prompts(of(CHAT), chat_tokenizer, None, 10**6) > 0 and notes(of(CHAT), chat_tokenizer) == []


def test_strings_to_a_chat_model_are_noted(chat_tokenizer):
    (note,) = notes(of("1+1=", CHAT), chat_tokenizer)
    assert "chat template is not applied" in note and "\n" not in note


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (of("1", CHAT), ["no chat template", "string prompts"]),
        (of("1", ""), ["no tokens", "''"]),
        (of("1", "1" * 8), ["8 tokens", "a completion of 3", "context of 10", "--max_completion_length", "'11111111'"]),
        (of("1", eval=["2" * 8]), ["8 tokens", "'22222222'"]),
        (of("1", "what?"), ["'what?'"]),  # the tokenizer cannot encode it
    ],
)
def test_a_prompt_that_cannot_be_used_is_named(tokenizer, task, words):
    with pytest.raises(UserError) as mistake:
        check_prompts(task, tokenizer, context=10, max_completion_length=3)
    assert all(word in str(mistake.value) for word in words)


def test_a_template_that_refuses_a_prompt_is_a_mistake():
    tokenizer = char_tokenizer("abc")
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UserError, match="roles must alternate"):
        check_prompts(of(CHAT), tokenizer, None, 10)


def test_long_prompts_are_shown_in_part():
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown("x" * 10**6)) < 220 and shown("x" * 201).endswith("...'")
    assert json.dumps(CHAT) in shown(CHAT)


# ---- Rewards ----


PROMPTS, COMPLETIONS, IDS = ["p0", "p1", "p2"], ["c0", "c1", "c2"], [[5], [6], [7]]


def called(values, **columns):
    def mine(prompts, completions, completion_ids, **kwargs):
        return values(completions) if callable(values) else values

    return call_reward(mine, PROMPTS, COMPLETIONS, IDS, columns)


@pytest.mark.parametrize(
    "values",
    [
        [1.0, None, -2.5],
        (1, None, -2.5),
        [True, None, np.float32(-2.5)],
        [torch.tensor(1.0), None, torch.tensor([-2.5])],
        [np.int64(1), None, np.array(-2.5)],
    ],
)
def test_numbers_and_none_are_fine(values):
    got = called(values)
    assert got[0] == 1.0 and np.isnan(got[1]) and got[2] == -2.5
    assert all(type(value) is float for value in got)


@pytest.mark.parametrize("values", [torch.tensor([1, 2, 3]), np.array([1.0, 2.0, 3.0])])
def test_tensors_and_arrays_are_fine(values):
    assert called(values) == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("values", "at", "what"),
    [
        ([1.0, 2.0], 0, "returned 2 values where 3 were due"),
        ([1.0] * 4, 0, "returned 4 values where 3 were due"),
        (torch.tensor([1.0]), 0, "returned 1 values where 3 were due"),
        (None, 0, "returned a NoneType"),
        (1.0, 0, "returned a float"),
        ({"a": 1.0}, 0, "returned a dict"),
        ("abc", 0, "returned a str"),
        ([1.0, float("nan"), 1.0], 1, "returned nan"),
        ([1.0, 1.0, float("inf")], 2, "returned inf"),
        (torch.tensor([0.0, -torch.inf, 0.0]), 1, "returned -inf"),
        ([1.0, "1.0", 1.0], 1, "returned '1.0'"),
        ([1.0, [1.0], 1.0], 1, "returned [1.0]"),
        ([1.0, 1j, 1.0], 1, "returned 1j"),
        ([1.0, Decimal("NaN"), 1.0], 1, "returned Decimal('NaN')"),
        ([1.0, 10**400, 1.0], 1, "returned 1000"),
        ([1.0, torch.tensor([1.0, 2.0]), 1.0], 1, "returned tensor"),
        (torch.zeros(3, 2), 0, "returned [0.0, 0.0]"),
    ],
)
def test_anything_else_names_function_prompt_and_completion(values, at, what):
    with pytest.raises(UserError) as mistake:
        called(values)
    message = str(mistake.value)
    assert "reward function mine" in message and what in message and "\n" not in message
    assert f"prompt 'p{at}'" in message and f"completion 'c{at}'" in message


def test_a_reward_that_raises_names_the_completion_it_raised_for():
    def fails(completions):
        return [1 / (text != "c1") for text in completions]

    with pytest.raises(UserError, match=r"mine raised ZeroDivisionError: .*'p1' and completion 'c1'") as mistake:
        called(fails)
    assert isinstance(mistake.value.__cause__, ZeroDivisionError), "the trace is not lost"

    def fails_together(completions):
        raise ValueError("all") if len(completions) > 1 else KeyError

    with pytest.raises(UserError, match="mine raised"):
        called(fails_together)


def test_a_reward_without_room_for_the_columns_is_told_so():
    with pytest.raises(UserError, match=r"narrow raised TypeError: .*unexpected keyword argument 'answer'"):
        call_reward(narrow, PROMPTS, COMPLETIONS, IDS, {"answer": [1, 2, 3]})


def narrow(prompts, completions, completion_ids):
    return [0.0] * len(prompts)


def test_nothing_to_score_calls_nothing():
    assert call_reward(None, [], [], [], {}) == []


def completion(tokenizer, text: str) -> Completion:
    ids = [*tokenizer(text).input_ids, EOS_ID]
    return Completion(ids, [0.0] * len(ids), truncated=False)


@pytest.mark.parametrize("prompt", ["1+1=", CHAT])
def test_score_calls_each_reward_once_with_everything_it_needs(tokenizer, prompt):
    calls = []

    def first(prompts, completions, completion_ids, answer, **kwargs):
        calls.append((prompts, completions, completion_ids, answer, kwargs))
        return [0.0, 1.0, 2.0, 3.0]

    def second(completions, **kwargs):
        return [None, 5.0, None, 7.0]

    rows = [{"prompt": prompt, "answer": "2", "more": [1]}, {"prompt": prompt, "answer": "3", "more": {}}]
    groups = [[completion(tokenizer, text) for text in pair] for pair in (("a", "b"), ("c", "1"))]
    task = Task(rows, [], [first, second], [1.0, 1.0], 1.0)
    parts = np.array(score(task, rows, groups, tokenizer))
    assert parts.shape == (2, 2, 2)
    np.testing.assert_array_equal(parts[..., 0], [[0.0, 1.0], [2.0, 3.0]])
    np.testing.assert_array_equal(parts[..., 1], [[np.nan, 5.0], [np.nan, 7.0]])

    ((prompts, completions, ids, answer, kwargs),) = calls
    texts = ["a", "b", "c", "1"]
    assert prompts == [prompt] * 4 and answer == ["2", "2", "3", "3"] and kwargs == {"more": [[1], [1], {}, {}]}
    assert completions == (texts if prompt != CHAT else [[{"role": "assistant", "content": text}] for text in texts])
    assert ids == [[*tokenizer(text).input_ids, EOS_ID] for text in texts]


def test_no_rows_no_scores(tokenizer):
    assert score(of("1"), [], [], tokenizer) == []


@pytest.fixture
def rewards_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import math\nLIMIT = 3\ndef good(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    return path


def test_load_reward(rewards_file):
    good = load_reward(f"{rewards_file}:good")
    assert good(completions=["a", "b"]) == [1.0, 1.0] and good.__name__ == "good"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("good", ["must be file.py:function"]),
        ("{}", ["must be file.py:function"]),
        ("{}:", ["must be file.py:function"]),
        ("nowhere.py:good", ["there is no file nowhere.py"]),
        ("{}:LIMIT", ["has no function LIMIT", "it has good"]),
        ("{}:god", ["has no function god", "it has good"]),
        ("{}.broken.py:good", ["could not be loaded", "SyntaxError"]),
        ("{}.needs.py:good", ["could not be loaded", "ModuleNotFoundError", "no_such_module"]),
    ],
)
def test_a_reward_that_cannot_be_loaded(rewards_file, name, words):
    rewards_file.with_name("mine.py.broken.py").write_text("def good(:\n")
    rewards_file.with_name("mine.py.needs.py").write_text("import no_such_module\n")
    with pytest.raises(UserError) as mistake:
        load_reward(name.format(rewards_file))
    assert all(word in str(mistake.value) for word in ["--reward", *words])


def test_a_callable_object_is_a_reward_too(tmp_path):
    path = tmp_path / "objects.py"
    path.write_text(
        "class Judge:\n    def __call__(self, completions, **kwargs):\n        return [1.0]\njudge = Judge()\n"
    )
    task = Task([], [], [load_reward(f"{path}:judge")], [1.0], 1.0)
    assert task.reward_names == ["judge"]


def test_rewards_of_one_name_keep_their_columns_apart(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.py").write_text("def mine(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    task = Task([], [], [load_reward(f"{tmp_path / name}.py:mine") for name in "ab"], [1.0, 1.0], 2.0)
    assert len(set(task.reward_names)) == 2


# ---- Data of one's own ----


def write(tmp_path, text: str | bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


@pytest.mark.parametrize(
    "text", ['{{"prompt": "é", "n": 1}}{0}{0}{{"prompt": [{{"role": "user", "content": "x"}}], "n": 2}}{0}']
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_read_rows(tmp_path, text, newline, start):
    rows = read_rows(write(tmp_path, start + text.format(newline).encode()))
    assert rows == [{"prompt": "é", "n": 1}, {"prompt": [{"role": "user", "content": "x"}], "n": 2}]


def test_columns_that_only_some_rows_have(tmp_path):
    """Which rows share a call depends on the ranks, so its columns must not depend on which row comes first."""
    rows = read_rows(write(tmp_path, '{"prompt": "a", "level": 1}\n{"prompt": "b", "answer": "2"}\n'))
    assert rows == [{"prompt": "a", "level": 1, "answer": None}, {"prompt": "b", "level": None, "answer": "2"}]


def test_a_line_separator_inside_a_string_ends_no_row(tmp_path):
    assert read_rows(write(tmp_path, '{"prompt": "a\u2028b\x85c"}\n')) == [{"prompt": "a\u2028b\x85c"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no rows"]),
        ("\n \n", ["holds no rows"]),
        ('{"prompt": "a"}\n{"prompt": \n', ["rows.jsonl:2", "not JSON"]),
        ('{"prompt": "a"}\n\n["a"]\n', ["rows.jsonl:3", "holds a list"]),
        ('{"question": "a", "answer": 1}\n', ["rows.jsonl:1", 'no "prompt"', "'question', 'answer'"]),
        ('{"prompt": 5}\n', ["rows.jsonl:1", "string or a list of chat messages", "5"]),
        ('{"prompt": []}\n', ["rows.jsonl:1", "string or a list of chat messages"]),
        ('{"prompt": [{"content": "a"}]}\n', ["rows.jsonl:1", "string or a list of chat messages"]),
        ('{"prompt": [{"role": "user", "content": null}]}\n', ["rows.jsonl:1", "chat messages"]),
        ('{"prompt": "a", "completions": 1}\n', ["rows.jsonl:1", "'completions'", "rename"]),
        (b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', ["rows.jsonl:2", "UTF-8"]),
    ],
)
def test_rows_that_cannot_be_read_are_named_by_file_and_line(tmp_path, text, words):
    with pytest.raises(UserError) as mistake:
        read_rows(write(tmp_path, text))
    assert all(word in str(mistake.value) for word in words)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_rows(str(tmp_path / "rows.jsonl"))


def test_hold_out_depends_on_the_prompts_alone():
    rows = [{"prompt": str(i % 30), "n": i} for i in range(60)]  # each prompt twice
    train, held = hold_out(rows, 8, "rows")
    held_prompts, train_prompts = {row["prompt"] for row in held}, {row["prompt"] for row in train}
    assert len(held) == len(held_prompts) == 8 and len(train) == 44
    assert not held_prompts & train_prompts
    mixed = random.Random(0).sample(rows, 60)
    assert {row["prompt"] for row in hold_out(mixed, 8, "rows")[1]} == held_prompts
    assert {row["prompt"] for row in hold_out(rows, 4, "rows")[1]} < held_prompts
    assert hold_out(rows, 0, "rows") == (rows, [])


def test_holding_out_everything_is_a_mistake():
    with pytest.raises(UserError, match=r"has 2 prompts and 5 are held out.*--eval_prompts.*--eval_every 0"):
        hold_out([{"prompt": "a"}, {"prompt": "b"}], 5, "rows.jsonl")


def test_load_task_with_data_and_rewards(tmp_path, rewards_file):
    data = write(tmp_path, "".join(f'{{"prompt": "{i}"}}\n' for i in range(20)))
    settings = dict(task="data", data=data, reward=[f"{rewards_file}:good"] * 2, reward_weights=[0.5, 2.0])
    task = load_task(Config(**settings, eval_prompts=5))
    assert len(task.train) == 15 and len(task.eval) == 5
    assert task.weights == [0.5, 2.0] and task.full_reward == 2.5
    assert len(load_task(Config(**settings, eval_prompts=5, eval_every=0)).train) == 20
