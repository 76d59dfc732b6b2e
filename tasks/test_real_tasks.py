"""The tasks for real models, countdown, gsm8k and tldr: rewards and rows. The task math is tested in
test_math.py."""

import sys
import time
from decimal import Decimal
from types import SimpleNamespace

import pytest

from config import Config, UserError
from tasks import countdown, gsm8k, math, tldr

EXPRESSIONS = [  # text, numbers, its value
    ("1 + 2 * 3", [1, 2, 3], 7),  # precedence
    ("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24),  # through a fraction
    ("(" * 99 + "7" + ")" * 99, [7], 7),
    ("1 + 2", [1, 2, 3], None),  # lacks a number
    ("1 + 2 3", [1, 23], None),  # digits pulled apart
    ("1 / 0", [0, 1], None),
    *((text, [1, 2], None) for text in ("1 + 2 + 2", "1\u200b2", "01 + 2", "1.0 + 2", "1 ** 2", "-1 + 2", "1(2)")),
    # The last text in the next line has the right value, but is too long.
    *((text, [7], None) for text in ("", "7" * 5000, "f(7)", "(" * 10_000 + "7" + ")" * 10_000, "7" + " " * 200)),
]
FORMS = [  # a completion, whether it is the solution of (2, 3, 4) -> 10, whether it has the form
    ("<think>5 < 6, 2 * 3</think>\n<answer>2 * 3 + 4</answer>", 1, 1),
    ("\n<think>\n</think><answer> (2 * 3) + 4 </answer>\n", 1, 1),
    ("2 * 3</think> <answer>2 * 3 + 4</answer>", 1, 1),  # the chat template has written the <think>
    ("<think>a</think><answer>2 + 3 + 4</answer>", 0, 1),  # the value is 9
    ("<answer>2 * 3 + 4</answer>", 1, 0),
    ("<think>a</think><answer>2 * 3 + 4</answer> and done", 1, 0),
    ("<think>a</think><answer>1</answer><answer>2 * 3 + 4</answer>", 1, 0),  # the last one counts
    ("<think><think>a</think><answer>2 * 3 + 4</answer>", 1, 0),
    ("<think>a</think><answer>2 * 3 + 4", 0, 0),
]
NUMBERS = [  # text, its final number
    ("**$1,234.50**.", "1234.5"),
    ("a loss of −5", "-5"),  # U+2212
    ("12-5", "5"),
    ("\\boxed{5} or rather \\boxed{72}, not 9", "72"),
    ("$\\boxed{\\$1{,}072.00}$", "1072"),
    ("\\boxed{72\\text{ apples}}", "72"),
    *((text, None) for text in ("#### 5 or 6", "\\boxed{\\frac{1}{2}}", "cut off, \\boxed{72")),
    *((text, None) for text in ("1e3", "1e-5", "1.2.3", "1,2", "x2", "７２", "")),
]
OF_72 = [("so \\boxed{72}", 1), ("72", 1), ("####\n72.0\n5", 1), ("\\boxed{-72}", 0), ("71", 0), ("", 0)]
LENGTHS = [("x" * 20, 0), ("x" * 19, -1), ("é" * 22, -2), ("", -20)]
LONG = ["9", "\n", "\\boxed{", "\\boxed{{}", "1,111", "####", "-$", "(", "<think>", "<answer>"]


@pytest.mark.parametrize(("text", "numbers", "value"), EXPRESSIONS)
def test_an_expression_has_its_exact_value_and_anything_else_has_none(text, numbers, value):
    assert countdown.value_of(text, numbers) == value


@pytest.mark.parametrize(("text", "number"), NUMBERS)
def test_the_final_number_of_a_text(text, number):
    assert gsm8k.final_number(text) == (None if number is None else Decimal(number))


def test_rewards_for_text_and_for_messages():
    cases = [(countdown.equation, text, right) for text, right, _ in FORMS]
    cases += [(countdown.well_formed, text, shaped) for text, _, shaped in FORMS]
    cases += [(gsm8k.right_number, *case) for case in OF_72] + [(tldr.near_20, *case) for case in LENGTHS]
    for answer in (72, 72.0, "72.00", "$72", "6*12 = <<6*12=72>>72\n#### 72"):
        for reward, text, value in cases:
            for completion in (text, [{"role": "assistant", "content": turn} for turn in ("72", text)]):
                # The same completion of another prompt, whose right answer is "0", comes first.
                given = dict(answer=["0", answer], numbers=[[9], [2, 3, 4]], target=[0, 10])
                values = [value if reward in (countdown.well_formed, tldr.near_20) else 0, value]
                assert reward(["", ""], [completion] * 2, [[1]] * 2, **given) == values, (reward, text)


# As a text, 1e22 is "1e+22". Numbers with an exponent are not read.
@pytest.mark.parametrize("answer", [None, "seventy-two", "1 2", "72\n#### none", float("nan"), 1e22])
def test_an_answer_that_is_no_number_is_a_mistake_that_names_the_prompt(answer):
    with pytest.raises(UserError, match=r"^the answer .* has no number, or several, for prompt 'how many\?'$"):
        gsm8k.right_number(["why?", "how many?"], ["72", "72"], [[1], [1]], answer=[72, answer])


def test_problems_of_countdown():
    """No two problems are the same, each solution earns every reward, and every run holds out the same problems."""
    task, again = (countdown.load(Config(eval_prompts=n, seed=n)) for n in (64, 32))
    rows = task.train + task.eval
    assert (len(task.train), len(task.eval)) == (8192, 64) and rows[: 8192 + 32] == again.train + again.eval
    assert len({(*sorted(row["numbers"]), row["target"]) for row in rows}) == len(rows)
    numbers, target, solution = ([row[name] for row in rows] for name in ("numbers", "target", "solution"))
    assert {*map(len, numbers)} == {3, 4} and 10 <= min(target) <= max(target) <= 999
    texts = [f"<think></think><answer>{each}</answer>" for each in solution]
    for reward in task.rewards:
        assert {*reward([], texts, [], numbers=numbers, target=target)} == {1.0}
    (message,) = rows[0]["prompt"]
    assert f" {target[0]}." in message["content"] and ", ".join(map(str, numbers[0])) in message["content"]


HUB = {
    ("openai/gsm8k", "main"): {"question": "why?", "answer": "6 * 2\n#### 1,072"},
    ("trl-lib/tldr", None): {"prompt": "why? TL;DR:", "completion": " a summary"},
    ("DigitalLearningGmbH/MATH-lighteval", None): {"problem": "why?", "solution": "1"},
}


def test_rows_come_from_the_hub(monkeypatch):
    def load_dataset(name, subset, split, data_files):
        return [{column: f"{split}: {text}" for column, text in HUB[name, subset].items()}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    tasks = [file.load(Config()) for file in (gsm8k, math, tldr)]
    for split, part in ("train", "train"), ("test", "eval"):
        (question,), (problem,), (post,) = (getattr(task, part) for task in tasks)
        assert question["prompt"][0]["content"].startswith(f"{split}: why?\nThink") and question["answer"] == "1,072"
        assert problem == {"prompt": [{"role": "user", "content": f"{split}: why?{math.ASK}"}], "answer": f"{split}: 1"}
        assert post == {"prompt": f"{split}: why? TL;DR:"}
    assert {task.correct: task.correct_at for task in tasks} == {"right_number": 1, "equal_answer": 1, "near_20": 0}


@pytest.mark.parametrize("text", LONG)
def test_long_completions_cost_little_time(text):
    start, long = time.process_time(), text * (200_000 // len(text))
    # With "e5" after it, a number at the end cannot be read, so that a regular expression has to backtrack.
    for completion in (f"<answer>{long}</answer>", long + "e5"):
        for reward in (gsm8k.right_number, countdown.equation, countdown.well_formed):
            reward([""], [completion], [[1]], answer=[9], numbers=[[9]], target=[9])
    assert time.process_time() - start < 5  # 0.1 s if linear in the length, minutes if quadratic
