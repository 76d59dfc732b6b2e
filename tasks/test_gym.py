"""Data sets of Reasoning Gym: each question occurs once, the answer is in tags, and the data set scores it."""

import inspect
import re

import pytest

from config import Config, UserError
from tasks import load_task

EASY = 'gym:chain_sum:{"max_terms": 2, "max_digits": 1, "size": 100}'


def rewards(task, row: dict, *texts: str) -> list[float]:
    columns = {name: [value] * len(texts) for name, value in row.items() if name != "prompt"}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return task.rewards[0](prompts=[row["prompt"]] * len(texts), completions=completions, completion_ids=[], **columns)


def test_a_data_set_of_reasoning_gym():
    """No question is in both parts. The answer is in the last tag, and the data set's own scorer judges it."""
    pytest.importorskip("reasoning_gym")
    task = load_task(Config(task=EASY))
    asked = [row["prompt"][0]["content"] for row in task.train + task.eval]
    assert load_task(Config(task=EASY, seed=1)).train == task.train, "a run may go on from a model of another seed"
    assert 100 > len(asked) == len(set(asked)) > 50 and len(task.eval) == len(asked) // 5 and task.correct_at == 1.0
    for row in task.eval[:9] + task.train[-9:]:
        # The question is "State the final answer to ...: 4 + 3 =", for example.
        answer = eval(row["prompt"][0]["content"].partition(": ")[2].partition(" =")[0])
        right, wrong = f"<answer>{answer}</answer>", "<answer>99</answer>"
        worth = rewards(task, row, right, wrong + right, right + wrong, right.removesuffix("</answer>"), str(answer))
        assert worth[:2] == [1.0, 1.0] and worth[2] < 1.0 and worth[3:] == [0.0, 0.0]


def test_a_data_set_that_cannot_be_made_is_named():
    for task, message in ("gym", "gym:chain_sum"), ("gym:nope", "nope"), ("gym:chain_sum:{", "Expecting"):
        pytest.importorskip("reasoning_gym")
        with pytest.raises(UserError, match=f"^--task {task}: .*{message}"):
            load_task(Config(task=task))


@pytest.mark.parametrize("name, text", [("prime_factorization", "<answer>x</answer>"), ("fraction_simplification", "")])
def test_what_a_scorer_cannot_read_is_wrong(name, text):
    """The first scorer raises a ValueError. The second one would reward a completion without an answer."""
    pytest.importorskip("reasoning_gym")
    task = load_task(Config(task=f'gym:{name}:{{"size": 10}}'))
    assert rewards(task, task.train[0], text) == [0.0]


def test_scorers_that_run_answers_as_code_are_refused():
    """Which ones do is read in their code. A composite data set that has one of them is refused, too."""
    factory = pytest.importorskip("reasoning_gym.factory")
    code = {name: inspect.getsource(data_set) for name, (data_set, _) in factory.DATASETS.items()}
    names = [name for name in code if re.search(r"(eval|parse_expr)\(answer\b", code[name])]
    assert len(names) >= 9
    for name in [*names, 'composite:{"datasets": [{"name": "puzzle24", "weight": 1}]}']:
        with pytest.raises(UserError, match=r"runs a model's answers as Python code$"):
            load_task(Config(task=f"gym:{name}"))
