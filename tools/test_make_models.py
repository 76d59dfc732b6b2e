"""The training data of the small models."""

import random
import re

import pytest

from config import Config
from tasks import task_file
from tasks._characters import EOS, char_tokenizer, held_out
from tools.make_models import RECIPES


def result_of(prompt: str) -> str:
    """Computed by Python from left to right: each sign closes a bracket around everything before it."""
    text = re.sub("([-+*])", r")\1", prompt.rstrip("=:"))
    return str(eval("(" * text.count(")") + text))


@pytest.mark.parametrize("name", RECIPES)
def test_answers_are_right_and_prompts_not_held_out(name):
    task, rng = task_file(name), random.Random(0)
    tokenizer, (reward,) = char_tokenizer(task.ALPHABET), task.load(Config()).rewards
    for _ in range(200):
        prompt, completion = RECIPES[name].line(rng)
        answer = result_of(prompt) if name == "addition" else str(int(result_of(prompt)) % 100)
        ids, text = tokenizer(completion)["input_ids"], completion.removesuffix(EOS)
        assert reward([prompt], [text], [ids], answer=[answer]) == [1.0] and not held_out(prompt)
