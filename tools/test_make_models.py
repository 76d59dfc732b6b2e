"""The training data of the small models."""

import random

import pytest

from config import Config
from tasks import task_file
from tasks._characters import EOS, char_tokenizer, held_out
from tasks.test_characters import result_of
from tools.make_models import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_answers_are_right_and_prompts_not_held_out(name):
    task, rng = task_file(name), random.Random(0)
    tokenizer, (reward,) = char_tokenizer(task.ALPHABET), task.load(Config()).rewards
    for _ in range(200):
        prompt, completion = RECIPES[name].line(rng)
        answer = str(sum(map(int, prompt.removesuffix("=").split("+")))) if name == "addition" else result_of(prompt)
        ids, text = tokenizer(completion)["input_ids"], completion.removesuffix(EOS)
        assert reward([prompt], [text], [ids], answer=[answer]) == [1.0] and not held_out(prompt)
