from config import Config
from tasks.chain import load, shortness


def result_of(prompt: str) -> str:
    """Of a chain, by Python's own arithmetic: each sign closes a bracket around all before it."""
    chain = prompt.removesuffix(":")
    for sign in "+-*":
        chain = chain.replace(sign, f"){sign}")
    return str(eval("(" * chain.count(")") + chain) % 100)


def test_answers_are_worked_out_from_left_to_right_and_can_be_short():
    assert all(row["answer"] == result_of(row["prompt"]) for row in load(Config()).train[:200])
    assert shortness(["a", "b"], ["", "12"], [[], [2, 3, 1]], answer=["1", "2"]) == [0, -3]
