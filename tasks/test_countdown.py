import pytest

from config import Config
from tasks.countdown import equation, load, value_of, well_formed


@pytest.mark.parametrize(
    ("text", "numbers", "value"),
    [
        ("1 + 2 * 3", [1, 2, 3], 7),  # precedence
        ("(1 + 2) * 3", [1, 2, 3], 9),
        ("9 - 3 - 2", [2, 3, 9], 4),  # from left to right
        ("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24),  # through a fraction
        ("1 / 49 * 49", [1, 49, 49], 1),  # floats say 0.9999999999999999
        ("(" * 99 + "7" + ")" * 99, [7], 7),
        ("", [7], None),
        ("1 + 2", [1, 2, 3], None),  # a number left out
        ("1 + 2 + 2", [1, 2], None),  # used twice
        ("1\u200b2", [1, 2], None),
        ("1 + 2 3", [1, 23], None),  # digits pulled apart
        ("07 + 1", [7, 1], None),
        ("7.0 + 1", [7, 1], None),
        ("2 ** 3", [2, 3], None),
        ("-1 + 2", [1, 2], None),
        ("1 / 0", [0, 1], None),
        ("9" * 5000, [9], None),
        ("2²", [2, 2], None),
        ("__import__('os').getpid()", [1], None),
        ("(" * 10_000 + "7" + ")" * 10_000, [7], None),
        ("7" + " " * 200, [7], None),
    ],
)
def test_an_expression_has_its_exact_value_and_anything_else_has_none(text, numbers, value):
    assert value_of(text, numbers) == value


@pytest.mark.parametrize(
    ("text", "right", "shaped"),
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
    ],
)
def test_rewards_for_answer_and_form_apart(text, right, shaped):
    for completion in (text, [{"role": "assistant", "content": text}]):
        assert equation([""], [completion], [[1]], numbers=[[2, 3, 4]], target=[10]) == [right]
        assert well_formed([""], [completion], [[1]]) == [shaped]
        with pytest.raises(TypeError):
            equation([""], [completion], [[1]], numbers=[[2, 3, 4]], target=[None])


def test_problems():
    """Each is another one, its solution earns every reward, and those held out are the same in every run."""
    task, again = load(Config(eval_prompts=64)), load(Config(eval_prompts=64, seed=1))
    rows = task.train + task.eval
    assert (len(task.train), len(task.eval)) == (8192, 64) and rows == again.train + again.eval
    assert len({(*sorted(row["numbers"]), row["target"]) for row in rows}) == len(rows)
    assert {len(row["numbers"]) for row in rows} == {3, 4} and {n for row in rows for n in row["numbers"]} <= {
        *range(100)
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
