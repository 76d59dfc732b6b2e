"""Reward functions as users of TRL have them, in files, run as they are."""

import json
import sys

import pytest

from config import Config
from rollout import Completion
from tasks import load_task, means_of_logged, score
from tasks._characters import EOS_ID, char_tokenizer

TEXT = """
import re

def by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]

def by_characters(prompts, completions, **kwargs):
    return [-abs(3 - len(text)) for text in completions]

def boxed(completions, answer, **kwargs):
    found = [re.search(r"#(.*)", text) for text in completions]
    return [1.0 if match and match.group(1) == right else 0.0 for match, right in zip(found, answer)]

def only_math(prompts, completions, task, **kwargs):
    return [1.0 if kind == "math" else None for kind in task]
"""
CHAT = """
import re

def well_formed(completions, **kwargs):
    answers = [completion[0]["content"] for completion in completions]
    return [0.5 if re.match(r"^\\d+#", text) else 0.0 for text in answers]

def correctness(prompts, completions, answer, **kwargs) -> list[float]:
    question = prompts[0][-1]["content"]
    answers = [completion[0]["content"].split("#")[-1] for completion in completions]
    print("-" * 20, f"Question: {question}", f"Answer: {answer[0]}", f"Given: {answers[0]}")
    return [2.0 if given == right else 0.0 for given, right in zip(answers, answer)]
"""
AWAITED = """
import asyncio

async def asked(prompts, completions, **kwargs):
    async def ask(text):
        await asyncio.sleep(0)
        return float(len(text))
    return await asyncio.gather(*[ask(text) for text in completions])

class Judge:
    async def __call__(self, completions, **kwargs):
        return [1.0 async for _ in self.each(completions)]

    async def each(self, completions):
        for text in completions:
            yield text

judge = Judge()
"""
OF_THE_RUN = """
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
FACTORY = """
from functools import partial, update_wrapper

from .helper import SOFT

def get_soft_punishment(limit, soft):
    def soft_punishment(completion_ids, **kwargs):
        return [min(0.0, (limit - soft - len(ids)) / soft) for ids in completion_ids]
    return soft_punishment

def cosine(completions, weight, **kwargs):
    return [weight * len(text) for text in completions]

soft_punishment = get_soft_punishment(limit=5, soft=SOFT)
bound = update_wrapper(partial(cosine, weight=2.0), cosine)
"""
GIVEN = ["1#46", "46"]  # completions
FILES = [  # the file, what it holds, whether prompts are messages, a function and its values
    ("text.py", TEXT, False, "by_tokens", [5.0, 3.0]),
    ("text.py", TEXT, False, "by_characters", [-1.0, -1.0]),
    ("text.py", TEXT, False, "boxed", [1.0, 0.0]),
    ("text.py", TEXT, False, "only_math", [1.0, 1.0]),
    ("chat.py", CHAT, True, "well_formed", [0.5, 0.0]),
    ("chat.py", CHAT, True, "correctness", [2.0, 2.0]),
    ("awaited.py", AWAITED, False, "asked", [4.0, 2.0]),
    ("awaited.py", AWAITED, False, "judge", [1.0, 1.0]),
    ("run.py", OF_THE_RUN, False, "curriculum", [2.0, 1.0]),
    ("run.py", OF_THE_RUN, False, "logging", [1.0, 1.0]),
    ("r1/rewards.py", FACTORY, False, "soft_punishment", [-1.0, 0.0]),
    ("r1/rewards.py", FACTORY, False, "bound", [8.0, 4.0]),
]


@pytest.mark.parametrize(("file", "text", "is_chat", "function", "values"), FILES, ids=[name for *_, name, _ in FILES])
def test_it_runs_as_it_is(tmp_path, monkeypatch, file, text, is_chat, function, values):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "r1").mkdir()
    for name, content in {file: text, "r1/__init__.py": "", "r1/helper.py": "SOFT = 2\n"}.items():
        (tmp_path / name).write_text(content)
    prompt = '[{"role": "user", "content": "12+34="}]' if is_chat else '"12+34="'
    row = f'{{"prompt": {prompt}, "completion": "46", "answer": "46", "task": "math"}}\n'
    (tmp_path / "rows.jsonl").write_text(row)
    reward = [f"{tmp_path}/{file}:{function}"]
    task = load_task(Config(task="data", data=f"{tmp_path}/rows.jsonl", reward=reward, eval_every=0, steps=10))
    tokenizer = char_tokenizer("0123456789#+=")
    group = [Completion([*tokenizer(x).input_ids, EOS_ID], [0.0] * (len(x) + 1), truncated=False) for x in GIVEN]
    task.begin(6)
    assert score(task, task.train, [group], tokenizer) == [[[value] for value in values]]
    assert task.extras == [[{"golden": "46"} if function == "logging" else {}] * 2]
    assert means_of_logged(task.logged) == ({"logged/accuracy": 1.0} if function == "logging" else {})


QUESTION, ANSWER = [{"role": "user", "content": "12+34="}], [{"role": "assistant", "content": "46"}]
ROWS = {  # as TRL's data sets have them
    "prompt": {"prompt": "12+34="},
    "prompt and completion": {"prompt": "12+34=", "completion": "46"},
    "the same as messages": {"prompt": QUESTION, "completion": ANSWER},
    "nested columns": {"prompt": QUESTION, "extra_info": {"index": 3, "tests": [["1", None], {"deep": [0.5]}]}},
}


@pytest.mark.parametrize("shape", ROWS)
def test_rows_are_taken_as_they_come(tmp_path, shape):
    """The prompt is the prompt, and all else goes to the rewards as it is."""
    seen = []
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[shape]))
    task = load_task(Config(task="tldr", data=f"{tmp_path}/rows.jsonl", eval_every=0))
    task.rewards = [lambda **given: seen.append(given) or [1.0]]
    tokenizer = char_tokenizer("0123456789#+=")
    score(task, task.train, [[Completion([*tokenizer("46").input_ids, EOS_ID], [0.0] * 3, False)]], tokenizer)
    columns = {name: [value] for name, value in ROWS[shape].items() if name != "prompt"}
    is_chat = isinstance(ROWS[shape]["prompt"], list)
    given = {"prompts": [ROWS[shape]["prompt"]], "completions": [ANSWER if is_chat else "46"]}
    assert seen[0] == seen[0] | columns | given and seen[0].keys() >= {"completion_ids", "trainer_state", "log_metric"}


def test_an_evaluation_has_a_step_that_a_reward_can_divide_by():
    state = load_task(Config(task="addition", steps=0)).state
    assert state.global_step / state.max_steps == 0.0
