"""The tasks for real models, countdown, gsm8k and tldr: rewards and rows."""

import sys
import time
from decimal import Decimal
from types import SimpleNamespace

import pytest

from config import Config, UserError
from tasks import countdown, gsm8k, tldr

EXPRESSIONS = [  # text, numbers, its value
    ("1 + 2 * 3", [1, 2, 3], 7),  # precedence
    ("(1 + 2) * 3", [1, 2, 3], 9),
    ("9 - 3 - 2", [2, 3, 9], 4),  # from left to right
    ("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24),  # through a fraction
    ("1 / 49 * 49", [1, 49, 49], 1),  # floats say 0.9999999999999999
    ("(" * 99 + "7" + ")" * 99, [7], 7),
    ("", [7], None),
    ("1 + 2", [1, 2, 3], None),  # a number left out
    ("1 + 2 3", [1, 23], None),  # digits pulled apart
    ("1 / 0", [0, 1], None),
    ("2²", [2, 2], None),
    *(
        (text, [1, 2], None)
        for text in ("1 + 2 + 2", "1\u200b2", "01 + 2", "1.0 + 2", "1 ** 2", "1 // 2", "-1 + 2", "1(2)")
    ),
    *((text, [7], None) for text in ("7" * 5000, "f(7)", "(" * 10_000 + "7" + ")" * 10_000, "7" + " " * 200)),
]
NUMBERS = [  # text, its final number
    ("**$1,234.50**.", "1234.5"),
    ("a loss of −5", "-5"),  # U+2212
    ("12-5", "5"),
    ("72kg", "72"),
    ("first 5\n#### 1,072 apples\nNot 6.", "1072"),
    ("#### 5\n#### 6", "6"),
    ("#### 5 or 6", None),
    ("\\boxed{5} or rather \\boxed{72}, not 9", "72"),
    ("$\\boxed{\\$1{,}072.00}$", "1072"),
    ("\\boxed{1\\,072}", "1072"),
    ("\\boxed{72\\text{ apples}}", "72"),
    ("\\boxed{\\frac{1}{2}}", None),
    ("so \\boxed{72", None),  # cut off
    *((text, None) for text in ("1e3", "1e-5", "1.2.3", "1,2", "x2", "７２", "")),
]
NUMBER_OF_2_3_4_IS_10 = dict(numbers=[[2, 3, 4]], target=[10])
REWARDS = [  # a reward, columns, a completion, its value
    *(
        (reward, NUMBER_OF_2_3_4_IS_10, text, value)
        for text, *values in [
            ("<think>5 < 6, 2 * 3</think>\n<answer>2 * 3 + 4</answer>", 1, 1),
            ("\n<think>\n</think><answer> (2 * 3) + 4 </answer>\n", 1, 1),
            ("2 * 3</think> <answer>2 * 3 + 4</answer>", 1, 1),  # the template opened the thought
            ("<think>a</think><answer>2 + 3 + 4</answer>", 0, 1),  # 9
            ("<answer>2 * 3 + 4</answer>", 1, 0),
            ("<think>a</think><answer>2 * 3 + 4</answer> and done", 1, 0),
            ("<think>a</think><answer>1</answer><answer>2 * 3 + 4</answer>", 1, 0),  # the last one counts
            ("<think>a</think><answer>2 * 3 + 4</answer><answer>1</answer>", 0, 0),
            ("<think><think>a</think><answer>2 * 3 + 4</answer>", 1, 0),
            ("<think>a</think><answer>2 * 3 + 4", 0, 0),
        ]
        for reward, value in zip((countdown.equation, countdown.well_formed), values, strict=True)
    ),
    *(
        (gsm8k.right_number, {"answer": [answer]}, text, value)
        for answer in (72, 72.0, "72.00", "$72", "6*12 = <<6*12=72>>72\n#### 72")
        for text, value in [("so \\boxed{72}", 1), ("72", 1), ("#### 72.0", 1), ("\\boxed{-72}", 0), ("71", 0), ("", 0)]
    ),
    *((tldr.near_20, {}, x, value) for x, value in [("x" * 20, 0), ("x" * 19, -1), ("é" * 22, -2), ("", -20)]),
]


@pytest.mark.parametrize(("text", "numbers", "value"), EXPRESSIONS)
def test_an_expression_has_its_exact_value_and_anything_else_has_none(text, numbers, value):
    assert countdown.value_of(text, numbers) == value


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_final_number_of_a_text(text, number):
    assert gsm8k.final_number(text) == (None if number is None else Decimal(number))


def test_rewards_for_text_and_for_messages():
    for reward, columns, text, value in REWARDS:
        for completion in (text, [{"role": "assistant", "content": text}]):
            assert reward([""], [completion], [[1]], **columns) == [value], (reward, text)


@pytest.mark.parametrize("answer", [None, "seventy-two", "1 2", "72\n#### none", float("nan"), 1e22])
def test_an_answer_that_is_no_number_is_a_mistake_that_names_the_prompt(answer):
    with pytest.raises(UserError, match=r"^the answer .* has no number, or several, for prompt 'how many\?'$"):
        gsm8k.right_number(["why?", "how many?"], ["72", "72"], [[1], [1]], answer=[72, answer])


def test_problems():
    """Each is another one, its solution earns every reward, and those held out are the same in every run."""
    task, again = (countdown.load(Config(eval_prompts=64, seed=seed)) for seed in (0, 1))
    rows = task.train + task.eval
    assert (len(task.train), len(task.eval)) == (8192, 64) and rows == again.train + again.eval
    assert len({(*sorted(row["numbers"]), row["target"]) for row in rows}) == len(rows)
    assert {len(row["numbers"]) for row in rows} == {3, 4} and {*range(1, 100)} == {
        n for row in rows for n in row["numbers"]
    }
    assert all(any(sign in row["solution"] for row in rows) for sign in "+-*/")
    assert all(10 <= row["target"] <= 999 for row in rows) and task.correct == "equation"
    given = dict(prompts=[""] * len(rows), completion_ids=[[1]] * len(rows))
    columns = {name: [row[name] for row in rows] for name in ("numbers", "target")}
    texts = [f"<think></think><answer>{row['solution']}</answer>" for row in rows]
    assert [{*reward(**given, completions=texts, **columns)} for reward in task.rewards] == [{1.0}, {1.0}]
    (message,) = rows[0]["prompt"]
    assert message["role"] == "user" and f" {rows[0]['target']}." in message["content"]
    assert ", ".join(map(str, rows[0]["numbers"])) in message["content"]


HUB = [  # a task, the data set that it asks for, a row of that, how its prompt begins, and what is a right answer
    (gsm8k, ("openai/gsm8k", "main"), {"question": "{}?", "answer": "6 * 2\n#### 1,072"}, "{}?\nThink", "1072"),
    (tldr, ("trl-lib/tldr", None), {"prompt": "{} TL;DR:", "completion": " a summary"}, "{} TL;DR:", "x" * 20),
]


@pytest.mark.parametrize(("file", "asked", "row", "prompt", "best"), HUB)
def test_rows_come_from_the_hub(monkeypatch, file, asked, row, prompt, best):
    def load_dataset(name, subset, split, data_files):
        assert (name, subset, data_files) == (*asked, None)
        return [{column: text.format(split) for column, text in row.items()}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = file.load(Config())
    for split, (found,) in ("train", task.train), ("test", task.eval):
        messages = found["prompt"]
        text = messages if file is tldr else messages[0]["content"]
        assert text.startswith(prompt.format(split)) and (file is tldr or messages[0]["role"] == "user")
        assert task.rewards[0]([""], [best], [[1]], answer=[found.get("answer")]) == [task.correct_at]
        assert found == ({"prompt": text} if file is tldr else {"prompt": messages, "answer": "1,072"})


LONG = ["9", "\n", "\\boxed{", "\\boxed{{}", "1,111", "####", "-$", "(", "<think>", "<answer>"]


@pytest.mark.parametrize("text", LONG)
def test_long_completions_cost_little_time(text):
    start, long = time.process_time(), text * (200_000 // len(text))
    for completion in (f"<answer>{long}</answer>", long + "e5"):
        for reward in (gsm8k.right_number, countdown.equation, countdown.well_formed):
            reward([""], [completion], [[1]], answer=[9], numbers=[[9]], target=[9])
    assert time.process_time() - start < 5  # about 0.1 where time grows with the length, minutes where with its square
