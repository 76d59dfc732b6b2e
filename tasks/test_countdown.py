import inspect
import json
import sys
import time
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import pytest

from config import Config, UserError
from tasks import countdown as tasks_real
from tasks import load_task
from tasks._files import call_reward
from tasks.countdown import countdown, equation, evaluate, final_number, format, gsm8k, near_20, right_number, tldr


def both_kinds(text):
    return [text, [{"role": "assistant", "content": text}]]


def score_one(reward, completion, **columns):
    (value,) = call_reward(reward, ["a prompt"], [completion], [[1]], {name: [v] for name, v in columns.items()})
    return value


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the package datasets, and notes what is loaded."""
    loaded = []

    def load_dataset(name, subset=None, split=None):
        loaded.append((name, subset, split))
        if name == "openai/gsm8k":
            return [{"question": f"How many in {split}?", "answer": "6 * 12 = <<6*12=72>>72\n#### 1,072"}]
        return [{"prompt": f"SUBREDDIT: {split} TL;DR:", "completion": " a summary"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return loaded


# ---- countdown ----

ACCEPTED = [
    ("1 + 2 * 3", (1, 2, 3), 7),  # precedence
    ("(1 + 2) * 3", (1, 2, 3), 9),
    ("9 - 3 - 2", (2, 3, 9), 4),  # from left to right
    ("24 / 4 / 2", (24, 4, 2), 3),
    ("24 / 4 * 2", (24, 4, 2), 12),
    ("8 / (3 - 8 / 3)", (3, 3, 8, 8), 24),  # through a fraction
    ("1 / 3 * 3", (1, 3, 3), 1),
    ("1 / 49 * 49", (1, 49, 49), 1),  # floats say 0.9999999999999999
    ("1 - 2 + 3", (1, 2, 3), 2),  # through a negative
    ("5 * (1 - 1)", (1, 1, 5), 0),
    ("7", (7,), 7),
    ("\n ( (10)\t)+20 ", (10, 20), 30),
    ("(" * 20 + "7" + ")" * 20, (7,), 7),
    ("1/2", (1, 2), Fraction(1, 2)),
]


@pytest.mark.parametrize("text, numbers, value", ACCEPTED)
def test_an_expression_has_its_exact_value(text, numbers, value):
    assert evaluate(text, list(numbers)) == value


REJECTED = [
    ("", (7,)),
    ("1 + 2", (1, 2, 3)),  # a number left out
    ("1 + 2 + 2", (1, 2)),  # used twice
    ("1 + 4", (1, 2)),  # not given
    ("1 + 2 + 0", (1, 2)),
    ("12", (1, 2)),  # digits joined
    ("1 2", (1, 2)),
    ("1\u200b2", (1, 2)),
    ("1 + 2 3", (1, 23)),  # digits pulled apart
    ("07 + 1", (7, 1)),
    ("7.0 + 1", (7, 1)),
    ("1_0 + 1", (10, 1)),
    ("2(3)", (2, 3)),  # implicit multiplication
    ("(2)(3)", (2, 3)),
    ("2 ** 3", (2, 3)),
    ("7 // 2", (7, 2)),
    ("7 % 2", (7, 2)),
    ("2 ^ 3", (2, 3)),
    ("-1 + 2", (1, 2)),
    ("+1 + 2", (1, 2)),
    ("2 - -1", (1, 2)),
    ("2 * (-1)", (1, 2)),
    ("~1 + 2", (1, 2)),
    ("1 / 0", (0, 1)),
    ("1 / (2 - 2)", (1, 2, 2)),
    ("1e9", (1, 9)),
    ("1e9", (1000000000,)),
    ("0x10", (16,)),
    ("9 ** 9 ** 9 ** 9", (9, 9, 9, 9)),
    ("9" * 5000, (9,)),
    ("１ + ２", (1, 2)),  # fullwidth digits
    ("١ + ٢", (1, 2)),  # Arabic digits
    ("2²", (2, 2)),
    ("1 × 2", (1, 2)),
    ("1 + 2 = 3", (1, 2)),
    ("1 + 2 = 3", (1, 2, 3)),
    ("x + 1", (1,)),
    ("max(1, 2)", (1, 2)),
    ("__import__('os').getpid()", (1,)),
    ("1 + 2 # 3", (1, 2)),
    ("1, 2", (1, 2)),
    ("1 if 2 else 3", (1, 2, 3)),
    ("(1 + 2", (1, 2)),
    ("(1 x + 2", (1, 2)),
    ("1 + 2)", (1, 2)),
    ("()", ()),
    ("1 +", (1,)),
    ("* 1 + 2", (1, 2)),
    ("[1 + 2]", (1, 2)),
    ("(" * 21 + "7" + ")" * 21, (7,)),
    ("(" * 10_000 + "7" + ")" * 10_000, (7,)),
    ("(" * 10_000, (7,)),
    ("7" + " " * 200, (7,)),
]


@pytest.mark.parametrize("text, numbers", REJECTED)
def test_anything_else_has_no_value(text, numbers):
    assert evaluate(text, list(numbers)) is None


@pytest.mark.parametrize(
    "text, right, shaped",
    [
        ("<think>5 < 6, 2 * 3</think>\n<answer>2 * 3 + 4</answer>", 1, 1),
        ("\n<think>\n</think><answer> (2 * 3) + 4 </answer>\n", 1, 1),
        ("2 * 3</think> <answer>2 * 3 + 4</answer>", 1, 1),  # the template opened the thought
        ("<think>a</think><answer>2 + 3 + 4</answer>", 0, 1),  # 9
        ("<answer>2 * 3 + 4</answer>", 1, 0),
        ("<think>a</think> so <answer>2 * 3 + 4</answer>", 1, 0),
        ("<think>a</think><answer>2 * 3 + 4</answer> and done", 1, 0),
        ("<think>a</think><answer>1</answer><answer>2 * 3 + 4</answer>", 1, 0),  # the last one counts
        ("<think>a</think><answer>2 * 3 + 4</answer><answer>1</answer>", 0, 0),
        ("<think><think>a</think><answer>2 * 3 + 4</answer>", 1, 0),
        ("<answer>2 * 3 + 4</answer><think>a</think>", 1, 0),
        ("<think>a</think><answer>2 * 3 + 4", 0, 0),
        ("2 * 3 + 4</answer>", 0, 0),
        ("2 * 3 + 4", 0, 0),
        ("", 0, 0),
    ],
)
def test_countdown_rewards_answer_and_form_apart(text, right, shaped):
    for completion in both_kinds(text):
        assert score_one(equation, completion, numbers=[2, 3, 4], target=10) == right
        assert score_one(format, completion) == shaped


@pytest.mark.parametrize("numbers, target", [([2], None), (None, 2)])
def test_countdown_rows_without_their_columns_are_a_mistake(numbers, target):
    with pytest.raises(UserError, match="equation"):
        score_one(equation, "<answer>2 +</answer>", numbers=numbers, target=target)


def test_countdown_solutions_earn_the_full_reward():
    task = countdown(Config(eval_prompts=64))
    assert (len(task.train), len(task.eval)) == (8192, 64)
    for row in task.train[:1000] + task.eval:
        completion = [{"role": "assistant", "content": f"<think></think><answer>{row['solution']}</answer>"}]
        columns = {name: value for name, value in row.items() if name != "prompt"}
        values = [score_one(reward, completion, **columns) for reward in task.rewards]
        assert sum(w * v for w, v in zip(task.weights, values, strict=True)) == pytest.approx(task.full_reward)


def test_countdown_problems_are_as_described():
    rows = countdown(Config()).train
    assert {len(row["numbers"]) for row in rows} == {3, 4}
    assert all(1 <= n <= 99 for row in rows for n in row["numbers"])
    assert all(10 <= row["target"] <= 999 for row in rows)
    assert all(any(sign in row["solution"] for row in rows) for sign in "+-*/")
    (message,) = rows[0]["prompt"]
    assert message["role"] == "user"
    assert ", ".join(map(str, rows[0]["numbers"])) in message["content"]
    assert f" {rows[0]['target']}." in message["content"]


def test_countdown_never_divides_with_a_remainder_on_the_way():
    for row in countdown(Config()).train[:1000]:
        floors = eval(row["solution"].replace("/", "//"), {"__builtins__": {}})  # text of our own making
        assert floors == row["target"]


def test_countdown_holds_out_other_problems_and_is_the_same_every_time():
    task, again = countdown(Config(seed=0, eval_prompts=300)), countdown(Config(seed=1, eval_prompts=300))
    assert (task.train, task.eval) == (again.train, again.eval)
    train, held = ({(*sorted(row["numbers"]), row["target"]) for row in rows} for rows in (task.train, task.eval))
    assert not train & held
    assert len(train) == len(task.train) and len(held) == 300


# ---- gsm8k ----


@pytest.mark.parametrize(
    "text, number",
    [
        ("so 6 * 12 = 72", "72"),
        ("It is 72.", "72"),
        ("It is 72.0", "72"),
        ("**$1,234.50**.", "1234.5"),
        ("he owes -5 dollars", "-5"),
        ("he owes -$5", "-5"),
        ("a loss of −5", "-5"),  # U+2212
        ("12-5", "5"),
        ("72kg", "72"),
        ("3 of 10 are left", "10"),
        ("#### 72", "72"),
        ("first 5\n#### 1,072 apples\nNot 6.", "1072"),
        ("#### 5\n#### 6", "6"),
        ("#### 5 or 6", None),
        ("then 5 ####", None),
        ("\\boxed{72}", "72"),
        ("\\boxed{5} or rather \\boxed{72}, not 9", "72"),
        ("\\boxed{72} #### 5", "72"),
        ("$\\boxed{\\$1{,}072.00}$", "1072"),
        ("\\boxed{-\\$5}", "-5"),
        ("\\boxed{1\\,072}", "1072"),
        ("\\boxed{72\\text{ apples}}", "72"),
        ("\\boxed{x = 72}", "72"),
        ("\\boxed{\\frac{1}{2}}", None),
        ("\\boxed{5, 6, 7}", None),
        ("it is 72: \\boxed{}", None),
        ("it is 72: \\boxed{7", None),  # cut off
        ("1e3", None),
        ("1e+22", None),
        ("1e-5", None),
        ("1.2.3", None),
        ("1,2", None),
        ("x2", None),
        ("７２", None),
        ("none", None),
        ("", None),
    ],
)
def test_gsm8k_extraction(text, number):
    assert final_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("answer", [72, 72.0, "72", "72.00", "$72", "6*12 = <<6*12=72>>72\n#### 72"])
def test_gsm8k_reward(answer):
    for text, value in [("so \\boxed{72}", 1), ("72", 1), ("#### 72.0", 1), ("\\boxed{-72}", 0), ("71", 0), ("", 0)]:
        for completion in both_kinds(text):
            assert score_one(right_number, completion, answer=answer) == value


@pytest.mark.parametrize("answer", [None, "seventy-two", "", "1 2", "72\n#### none", float("nan"), 1e22])
def test_an_answer_that_is_no_number_is_a_mistake(answer):
    with pytest.raises(UserError, match="neither a number"):
        score_one(right_number, "72", answer=answer)


def test_gsm8k_comes_from_the_hub(hub):
    task = gsm8k(Config())
    assert hub == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    (row,) = task.eval
    assert row["answer"] == "1,072"
    assert row["prompt"][0]["role"] == "user" and row["prompt"][0]["content"].startswith("How many in test?")
    assert task.train[0]["prompt"][0]["content"].startswith("How many in train?")
    assert score_one(task.rewards[0], "\\boxed{1072}", answer=row["answer"]) == task.full_reward


# ---- tldr ----


def test_tldr_reward_is_highest_at_20_characters():
    for text, value in [("x" * 20, 0), ("x" * 19, -1), ("x" * 22, -2), ("é" * 20, 0), ("", -20)]:
        for completion in both_kinds(text):
            assert score_one(near_20, completion) == value


def test_tldr_comes_from_the_hub(hub):
    task = tldr(Config())
    assert [name for name, _, _ in hub] == ["trl-lib/tldr"] * 2
    assert task.train == [{"prompt": "SUBREDDIT: train TL;DR:"}]
    assert task.eval == [{"prompt": "SUBREDDIT: test TL;DR:"}]
    assert score_one(task.rewards[0], "x" * 20) == task.full_reward


# ---- all of them ----


@pytest.mark.parametrize("name", ["gsm8k", "tldr"])
def test_without_datasets_the_message_says_what_to_install(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # makes the import fail
    with pytest.raises(UserError, match="pip install datasets"):
        getattr(tasks_real, name)(Config())


@pytest.mark.parametrize("name", ["countdown", "gsm8k", "tldr"])
def test_rows_of_ones_own_replace_the_tasks(name, tmp_path, hub):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"p{i}", "answer": i, "numbers": [i], "target": i} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = Config(task=name, data=str(path), eval_prompts=1)
    assert getattr(tasks_real, name)(config).train == []
    task = load_task(config)
    assert hub == []
    assert sorted(row["prompt"] for row in task.train + task.eval) == ["p0", "p1", "p2", "p3"]
    assert len(task.eval) == 1
    (row,) = task.eval
    columns = {column: value for column, value in row.items() if column != "prompt"}
    score_one(task.rewards[0], "<answer>1</answer>", **columns)


def test_the_example_at_the_top_is_complete(monkeypatch):
    lines = inspect.getdoc(tasks_real).split("\n")
    start = next(i for i, line in enumerate(lines) if line.startswith("    def "))
    end = next(i for i, line in enumerate(lines) if line.startswith("    python "))
    code = inspect.cleandoc("\n".join(lines[start:end]))
    scope = dict(vars(tasks_real))
    exec(code, scope)
    monkeypatch.setattr(tasks_real, "shout", scope["shout"], raising=False)
    task = load_task(Config(task="shout"))
    assert task.train and task.eval
    assert not {row["word"] for row in task.train} & {row["word"] for row in task.eval}
    for text, value in [("RED", 1), ("red", 0)]:
        for completion in both_kinds(text):
            assert score_one(task.rewards[0], completion, word="red") == value


@pytest.mark.parametrize(
    "text", ["(", "9", "\n", "<think>", "<answer>", "\\boxed{", "\\boxed{{}", "1,111", "####", "-$"]
)
def test_long_completions_cost_little_time(text):
    long = text * (200_000 // len(text))
    start = time.perf_counter()
    score_one(equation, f"<answer>{long}</answer>", numbers=[9], target=9)
    score_one(equation, long, numbers=[9], target=9)
    score_one(format, long)
    score_one(right_number, long + "e5", answer=9)
    assert time.perf_counter() - start < 5  # about 0.1 where time grows with the length, minutes where with its square
