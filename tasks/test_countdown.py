import time
from fractions import Fraction

import pytest

from config import Config
from tasks.countdown import equation, load, value_of, well_formed

ACCEPTED = [
    ("1 + 2 * 3", (1, 2, 3), 7),  # precedence
    ("(1 + 2) * 3", (1, 2, 3), 9),
    ("9 - 3 - 2", (2, 3, 9), 4),  # from left to right
    ("24 / 4 / 2", (24, 4, 2), 3),
    ("8 / (3 - 8 / 3)", (3, 3, 8, 8), 24),  # through a fraction
    ("1 / 49 * 49", (1, 49, 49), 1),  # floats say 0.9999999999999999
    ("7", (7,), 7),
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
    ("12", (1, 2)),  # digits joined
    ("1 2", (1, 2)),
    ("1 + 2 3", (1, 23)),  # digits pulled apart
    ("07 + 1", (7, 1)),
    ("7.0 + 1", (7, 1)),
    ("2(3)", (2, 3)),  # implicit multiplication
    ("2 ** 3", (2, 3)),
    ("7 // 2", (7, 2)),
    ("-1 + 2", (1, 2)),
    ("1 / 0", (0, 1)),
    ("1e9", (1, 9)),
    ("0x10", (16,)),
    ("9 ** 9 ** 9 ** 9", (9, 9, 9, 9)),
    ("9" * 5000, (9,)),
    ("1 + 2 = 3", (1, 2, 3)),
    ("max(1, 2)", (1, 2)),
    ("__import__('os').getpid()", (1,)),
    ("1 + 2 # 3", (1, 2)),
    ("1, 2", (1, 2)),
    ("()", ()),
    ("1 +", (1,)),
    ("(" * 10_000 + "7" + ")" * 10_000, (7,)),
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
        ("<think>a</think><answer>2 * 3 + 4</answer> and done", 1, 0),
        ("<think>a</think><answer>1</answer><answer>2 * 3 + 4</answer>", 1, 0),  # the last one counts
        ("<think>a</think><answer>2 * 3 + 4</answer><answer>1</answer>", 0, 0),
        ("<think><think>a</think><answer>2 * 3 + 4</answer>", 1, 0),
        ("<think>a</think><answer>2 * 3 + 4", 0, 0),
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


def test_problems_are_as_described():
    """Their solutions earn every reward, and pass through whole numbers; others are held out, the same in every run."""
    task, again = load(Config(seed=0, eval_prompts=64)), load(Config(seed=1, eval_prompts=64))
    assert (task.train, task.eval) == (again.train, again.eval)
    rows = task.train + task.eval
    assert len({(*sorted(row["numbers"]), row["target"]) for row in rows}) == len(rows) == 8192 + 64
    assert len(task.eval) == 64 and task.correct == "equation"
    assert {len(row["numbers"]) for row in rows} == {3, 4}
    assert all(1 <= n <= 99 for row in rows for n in row["numbers"])
    assert all(any(sign in row["solution"] for row in rows) for sign in "+-*/")
    for row in rows[-1000:]:
        floors = eval(row["solution"].replace("/", "//"), {"__builtins__": {}})  # text of our own making
        assert floors == row["target"] and 10 <= row["target"] <= 999
        completion = [f"<think></think><answer>{row['solution']}</answer>"]
        columns = dict(numbers=[row["numbers"]], target=[row["target"]])
        assert [reward([""], completion, [[1]], **columns) for reward in task.rewards] == [[1.0], [1.0]]
    (message,) = rows[0]["prompt"]
    assert message["role"] == "user" and f" {rows[0]['target']}." in message["content"]
    assert ", ".join(map(str, rows[0]["numbers"])) in message["content"]


@pytest.mark.parametrize("text", ["(", "9", "\n", "<think>", "<answer>"])
def test_long_completions_cost_little_time(text):
    long = text * (200_000 // len(text))
    start = time.process_time()
    for completion in (f"<answer>{long}</answer>", long):
        equation([""], [completion], [[1]], numbers=[[9]], target=[9])
        well_formed([""], [completion], [[1]])
    assert time.process_time() - start < 5  # about 0.1 where time grows with the length, minutes where with its square
