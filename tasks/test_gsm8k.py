import sys
import time
from decimal import Decimal
from types import SimpleNamespace

import pytest

from config import Config, UserError
from tasks import countdown, gsm8k, tldr
from tasks.gsm8k import final_number, right_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
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
        ("1e3", None),
        ("1e-5", None),
        ("1.2.3", None),
        ("1,2", None),
        ("x2", None),
        ("７２", None),
    ],
)
def test_the_final_number_of_a_text(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("answer", [72, 72.0, "72.00", "$72", "6*12 = <<6*12=72>>72\n#### 72"])
def test_the_reward_is_for_the_number_however_it_is_written(answer):
    for text, value in [("so \\boxed{72}", 1), ("72", 1), ("#### 72.0", 1), ("\\boxed{-72}", 0), ("71", 0), ("", 0)]:
        for completion in (text, [{"role": "assistant", "content": text}]):
            assert right_number([""], [completion], [[1]], answer=[answer]) == [value]


@pytest.mark.parametrize("answer", [None, "seventy-two", "1 2", "72\n#### none", float("nan"), 1e22])
def test_an_answer_that_is_no_number_is_a_mistake_that_names_the_prompt(answer):
    with pytest.raises(UserError, match=r"^the answer .* has no number, or several, for prompt 'how many\?'$"):
        right_number(["why?", "how many?"], ["72", "72"], [[1], [1]], answer=[72, answer])


@pytest.mark.parametrize(
    ("file", "asked", "row", "prompt", "best"),
    [
        (gsm8k, ("openai/gsm8k", "main"), {"question": "{}?", "answer": "6 * 2\n#### 1,072"}, "{}?\nThink", "1072"),
        (tldr, ("trl-lib/tldr", None), {"prompt": "{} TL;DR:", "completion": " a summary"}, "{} TL;DR:", "x" * 20),
    ],
)
def test_rows_come_from_the_hub(monkeypatch, file, asked, row, prompt, best):
    def load_dataset(name, subset, split):
        assert (name, subset) == asked
        return [{column: text.format(split) for column, text in row.items()}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    task = file.load(Config())
    for split, (found,) in ("train", task.train), ("test", task.eval):
        messages = found["prompt"]
        text = messages if file is tldr else messages[0]["content"]
        assert text.startswith(prompt.format(split)) and (file is tldr or messages[0]["role"] == "user")
        assert task.rewards[0]([""], [best], [[1]], answer=[found.get("answer")]) == [task.correct_at]
        assert found == ({"prompt": text} if file is tldr else {"prompt": messages, "answer": "1,072"})


def test_a_summary_is_best_at_20_characters():
    for text, value in [("x" * 20, 0), ("x" * 19, -1), ("x" * 22, -2), ("é" * 20, 0), ("", -20)]:
        for completion in (text, [{"role": "assistant", "content": text}]):
            assert tldr.near_20([""], [completion], [[1]]) == [value]


@pytest.mark.parametrize(
    "text", ["9", "\n", "\\boxed{", "\\boxed{{}", "1,111", "####", "-$", "(", "<think>", "<answer>"]
)
def test_long_completions_cost_little_time(text):
    start, long = time.process_time(), text * (200_000 // len(text))
    for completion in (f"<answer>{long}</answer>", long + "e5"):
        for reward in (right_number, countdown.equation, countdown.well_formed):
            reward([""], [completion], [[1]], answer=[9], numbers=[[9]], target=[9])
    assert time.process_time() - start < 5  # about 0.1 where time grows with the length, minutes where with its square
