import time
from fractions import Fraction

import pytest

from config import Config
from tasks.countdown import equation, load, problems, value_of, well_formed

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
    ("(" * 99 + "7" + ")" * 99, (7,), 7),
    ("1/2", (1, 2), Fraction(1, 2)),
]


@pytest.mark.parametrize("text, numbers, value", ACCEPTED)
def test_an_expression_has_its_exact_value(text, numbers, value):
    assert value_of(text, list(numbers)) == value


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
    ("(" * 10_000 + "7" + ")" * 10_000, (7,)),
    ("(" * 10_000, (7,)),
    ("7" + " " * 200, (7,)),
]


@pytest.mark.parametrize("text, numbers", REJECTED)
def test_anything_else_has_no_value(text, numbers):
    assert value_of(text, list(numbers)) is None


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
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert equation([""], [completion], [[1]], numbers=[[2, 3, 4]], target=[10]) == [right]
        assert well_formed([""], [completion], [[1]]) == [shaped]


@pytest.mark.parametrize("numbers, target", [([2], None), (None, 2)])
def test_rows_without_their_columns_are_a_mistake(numbers, target):
    with pytest.raises(TypeError):
        equation([""], ["<answer>2 +</answer>"], [[1]], numbers=[numbers], target=[target])


def test_solutions_earn_every_reward():
    task = load(Config(eval_prompts=64))
    assert (len(task.train), len(task.eval)) == (8192, 64)
    rows = task.train[:1000] + task.eval
    completions = [f"<think></think><answer>{row['solution']}</answer>" for row in rows]
    columns = {name: [row[name] for row in rows] for name in ("numbers", "target")}
    for reward in task.rewards:
        assert reward([""] * len(rows), completions, [[1]] * len(rows), **columns) == [1.0] * len(rows)
    assert task.correct == "equation"


def test_problems_are_as_described():
    rows = problems(8192)
    assert {len(row["numbers"]) for row in rows} == {3, 4}
    assert all(1 <= n <= 99 for row in rows for n in row["numbers"])
    assert all(10 <= row["target"] <= 999 for row in rows)
    assert all(any(sign in row["solution"] for row in rows) for sign in "+-*/")
    (message,) = rows[0]["prompt"]
    assert message["role"] == "user"
    assert ", ".join(map(str, rows[0]["numbers"])) in message["content"]
    assert f" {rows[0]['target']}." in message["content"]


def test_no_division_with_a_remainder_on_the_way():
    for row in problems(1000):
        floors = eval(row["solution"].replace("/", "//"), {"__builtins__": {}})  # text of our own making
        assert floors == row["target"]


def test_other_problems_are_held_out_and_all_are_the_same_every_time():
    task, again = load(Config(seed=0, eval_prompts=300)), load(Config(seed=1, eval_prompts=300))
    assert (task.train, task.eval) == (again.train, again.eval)
    train, held = ({(*sorted(row["numbers"]), row["target"]) for row in rows} for rows in (task.train, task.eval))
    assert not train & held
    assert len(train) == len(task.train) and len(held) == 300


@pytest.mark.parametrize("text", ["(", "9", "\n", "<think>", "<answer>"])
def test_long_completions_cost_little_time(text):
    long = text * (200_000 // len(text))
    start = time.perf_counter()
    for completion in (f"<answer>{long}</answer>", long):
        equation([""], [completion], [[1]], numbers=[[9]], target=[9])
        well_formed([""], [completion], [[1]])
    assert time.perf_counter() - start < 5  # about 0.1 where time grows with the length, minutes where with its square
