"""Reward functions and rows as users of TRL have them, in files, run as they are."""

import json
import sys

import pytest

from batch import Group
from config import Config
from rollout import Completion
from tasks import load_task, score
from tasks._characters import EOS_ID, char_tokenizer

TEXT = """
def curriculum(completions, trainer_state, **kwargs):
    done = trainer_state.global_step / trainer_state.max_steps
    return [done * len(text) for text in completions]

def logging(completions, answer, log_extra=None, log_metric=None, **kwargs):
    right = [float(text.endswith(a)) for text, a in zip(completions, answer)]
    if log_extra:
        log_extra("golden", answer)
    if log_metric:
        log_metric("accuracy", sum(right) / len(right))
    return right
"""
CHAT = """
def correctness(prompts, completions, answer, **kwargs) -> list[float]:
    question = prompts[0][-1]["content"]
    answers = [completion[0]["content"].split("#")[-1] for completion in completions]
    print("-" * 20, f"Question: {question}", f"Answer: {answer[0]}", f"Given: {answers[0]}")
    return [2.0 if given == right else 0.0 for given, right in zip(answers, answer)]
"""
FACTORY = """
from .helper import SOFT

def get_soft_punishment(limit, soft):
    def soft_punishment(completion_ids, **kwargs):
        return [min(0.0, (limit - soft - len(ids)) / soft) for ids in completion_ids]
    return soft_punishment

soft_punishment = get_soft_punishment(limit=5, soft=SOFT)
"""
FILES = [  # the file, what it holds, a function, and its values for "1#46" and "46"
    ("text.py", TEXT, "curriculum", [2.0, 1.0]),
    ("text.py", TEXT, "logging", [1.0, 1.0]),
    ("chat.py", CHAT, "correctness", [2.0, 2.0]),
    ("r1/rewards.py", FACTORY, "soft_punishment", [-1.0, 0.0]),
]
QUESTION = [{"role": "user", "content": "12+34="}]
TOKENIZER = char_tokenizer("0123456789#+=")


def answered(row: dict, *texts: str) -> Group:
    completions = [Completion([*TOKENIZER(x).input_ids, EOS_ID], [0.0] * (len(x) + 1), False) for x in texts]
    return Group([], row, completions)


@pytest.mark.parametrize(("file", "text", "function", "values"), FILES, ids=[name for *_, name, _ in FILES])
def test_it_runs_as_it_is(tmp_path, monkeypatch, file, text, function, values):
    monkeypatch.setattr(sys, "path", [*sys.path])
    row = {"prompt": QUESTION if text == CHAT else "12+34=", "completion": "46", "answer": "46", "task": "math"}
    (tmp_path / "r1").mkdir()
    files = {file: text, "r1/__init__.py": "", "r1/helper.py": "SOFT = 2\n", "rows.jsonl": json.dumps(row)}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    reward = [f"{tmp_path}/{file}:{function}"]
    task = load_task(Config(task="data", data=f"{tmp_path}/rows.jsonl", reward=reward, eval_every=0, steps=10))
    ((parts, extras),), metrics = score(task, [answered(task.train[0], "1#46", "46")], TOKENIZER, step=6)
    assert parts == [[value] for value in values]
    assert extras == [{"golden": "46"} if function == "logging" else {}] * 2
    assert metrics == [("logged/accuracy", 1.0)] * (function == "logging")
