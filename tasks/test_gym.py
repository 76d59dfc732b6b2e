"""Data sets of Reasoning Gym: each question once, the answer in tags, their own scorers."""

import pytest

from config import Config, UserError
from tasks import load_task
from tasks.gym import RUNS_ANSWERS

EASY = 'gym:chain_sum:{"max_terms": 2, "max_digits": 1, "size": 200}'


def rewards(task, row: dict, *texts: str) -> list[float]:
    columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return task.rewards[0](prompts=[row["prompt"]] * len(texts), completions=completions, completion_ids=[], **columns)


def test_a_data_set_of_reasoning_gym():
    """No question is in both parts. The last tag holds the answer, and the data set's own scorer judges it."""
    pytest.importorskip("reasoning_gym")
    task = load_task(Config(task=EASY))
    asked = [row["prompt"][0]["content"] for row in task.train + task.eval]
    assert len(asked) == len(set(asked)) > 100 and len(task.eval) == len(asked) // 5 and task.correct_at == 1.0
    for row, text in zip(task.eval[:20], asked[-len(task.eval) :]):
        answer = eval(text.partition(": ")[2].partition(" =")[0])
        right, wrong = f"<answer>{answer}</answer>", "<answer>99</answer>"
        worth = rewards(task, row, right, wrong + right, right + wrong, right[:9], str(answer))
        assert worth[:2] == [1.0, 1.0] and worth[2] < 1.0 and worth[3:] == [0.0, 0.0]


@pytest.mark.parametrize("name, text", [("prime_factorization", "<answer>x</answer>"), ("fraction_simplification", "")])
def test_what_a_scorer_cannot_read_is_wrong(name, text):
    """The first raises a ValueError, the second gives something for no answer at all."""
    pytest.importorskip("reasoning_gym")
    task = load_task(Config(task=f'gym:{name}:{{"size": 10}}'))
    assert rewards(task, task.train[0], text) == [0.0]


CANNOT = [  # a task, what is message
    *((f"gym:{name}", "as Python code") for name in RUNS_ANSWERS),
    ('gym:composite:{"datasets": [{"name": "puzzle24", "weight": 1}]}', "puzzle24 runs"),
    ("gym:nothing", "gym:NAME"),
    ('gym:chain_sum:{"no_such": 1}', "no_such"),
    ('gym:chain_sum:{"min_terms": -1}', "min_terms must be positive"),
    ('gym:chain_sum:{"size": "many"}', "gym:NAME:JSON"),
    ('gym:chain_sum:{"seed": "x"}', "gym:NAME:JSON"),  # this and the next one only when a row is made
    ('gym:chain_sum:{"max_digits": 2.5}', "gym:NAME:JSON"),
    ("addition:chain_sum", "must be one of"),
]


@pytest.mark.parametrize(("task", "message"), CANNOT)
def test_a_data_set_that_cannot_be(task, message):
    if "chain_sum" in task:
        pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=message):
        load_task(Config(task=task))
