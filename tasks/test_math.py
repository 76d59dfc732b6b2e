"""Problems with their answers, judged by math-verify."""

import json
import sys

import pytest

from config import Config, UserError
from tasks import load_task
from tasks.math import ASK, equal_answer

BOXES = [  # an answer, completions that are right, and wrong ones
    ("34", ["\\boxed{34}", "no \\boxed{1}, \\boxed{34.0}"], ["$34$", "\\boxed{34}, \\boxed{35}", "\\boxed{34"]),
    (72, ["\\boxed{72}"], ["\\boxed{}"]),
    ("\\frac12", ["\\boxed{0.5}", "\\boxed{\\frac{1}{2}}"], ["\\boxed{2}"]),
    ("$\\frac{1}{2}$", ["\\boxed{1/2}"], ["\\boxed{12}"]),
    ("hence \\boxed{\\frac{\\sqrt{2}}{3}}.", ["\\boxed{\\dfrac{\\sqrt2}{3}}"], ["\\boxed{\\frac{2}{3}}"]),
    # If the right answer is the pair (1,2), math-verify calls the interval 1<x<2 wrong. If the right answer is the
    # interval, it calls the pair right. So its two arguments, the right answer and the completion, must not be swapped.
    ("(1,2)", ["\\boxed{(1,2)}"], ["\\boxed{(2,1)}", "\\boxed{1<x<2}"]),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), BOXES)
def test_the_last_box_is_compared(answer, right, wrong):
    pytest.importorskip("math_verify")
    texts = [*right, *wrong]
    for given in texts, [[{"role": "assistant", "content": text}] for text in texts]:
        columns = dict(prompts=["?"] * len(texts), completions=given, answer=[answer] * len(texts))
        assert equal_answer(completion_ids=[[1]] * len(texts), **columns) == [1.0] * len(right) + [0.0] * len(wrong)


@pytest.mark.parametrize("answer", ["", None])
def test_an_answer_without_mathematics_is_an_error_that_names_the_prompt(answer):
    pytest.importorskip("math_verify")
    with pytest.raises(UserError, match=r"^the answer .* is not mathematics, for prompt 'how\?'$"):
        equal_answer(["why?", "how?"], ["\\boxed{1}"] * 2, [[1]] * 2, answer=["1", answer])


def test_without_the_judge_its_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)  # an import of it fails, as if it were not installed
    with pytest.raises(UserError, match=r"needs the package math_verify: pip install math_verify$"):
        equal_answer(["why?"], ["\\boxed{1}"], [[1]], answer=["1"])


def test_rows_of_a_file(tmp_path):
    """A prompt that is a text becomes a message that also asks for an answer in a box (ASK). A prompt that is a list of
    chat messages is left as it is."""
    chat = [{"role": "user", "content": "Is it 7?"}]
    rows = [{"problem": f"{n} + 0?", "prompt": "Add.", "answer": n, "solution": "By adding."} for n in range(20)]
    rows += [{"prompt": "2 + 2?", "solution": "It is \\boxed{4}."}, {"prompt": chat, "problem": "?", "answer": "7"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(Config(task="math", data=str(tmp_path / "rows.jsonl"), eval_prompts=4))
    made = {row["prompt"][0]["content"]: row["answer"] for row in task.train + task.eval}
    expected = {f"{n} + 0?{ASK}": n for n in range(20)}
    more = dict(data=str(tmp_path / "rows.jsonl"), eval_data=[str(tmp_path / "rows.jsonl")])
    task_of_two = load_task(Config(task="math", **more))
    assert task_of_two.eval == [row | {"eval_data": "rows"} for row in task_of_two.train]
    assert made == expected | {f"2 + 2?{ASK}": "It is \\boxed{4}.", "Is it 7?": "7"} and len(task.eval) == 4
    assert "\\boxed{}" in ASK and task.correct == task.reward_names[0] == "equal_answer"
