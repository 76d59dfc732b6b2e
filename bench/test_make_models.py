"""The training data of the small models."""

import random
import re

import pytest

from bench.make_models import RECIPES, example, training_parts
from config import Config
from tasks import guess, task_module
from tasks._characters import EOS, char_tokenizer, held_out


def result_of(prompt: str) -> str:
    """Put brackets around everything before each sign, so that Python computes from left to right: 1+2*3 becomes
    ((1)+2)*3."""
    text = re.sub("([-+*])", r")\1", prompt.rstrip("=:"))
    return str(eval("(" * text.count(")") + text))


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "guess"])
def test_answers_are_right_and_prompts_not_held_out(name):
    task, rng = task_module(name), random.Random(0)
    tokenizer, (reward,) = char_tokenizer(task.ALPHABET), task.load(Config()).rewards
    for _ in range(200):
        prompt, completion = example(RECIPES[name], rng)
        assert not held_out(prompt)
        # In the task chain, results are computed modulo 100.
        answer = result_of(prompt) if name != "chain" else str(int(result_of(prompt)) % 100)
        ids, text = tokenizer(completion)["input_ids"], completion.removesuffix(EOS)
        assert reward([prompt], [text], [ids], answer=[answer]) == [1.0]


def test_each_game_keeps_to_the_rules_and_its_replies_have_no_labels():
    """Every guess is a number that the replies have not excluded."""
    rng, recipe = random.Random(0), RECIPES["guess"]
    tokenizer = char_tokenizer(guess.ALPHABET)
    for _ in range(300):
        prompt, game = example(recipe, rng)
        assert not held_out(prompt)
        low, high = map(int, prompt.rstrip(":").split("-"))
        # A game is GUESS EOS REPLY GUESS EOS and so on. A reply is one letter, h or l.
        *turns, rest = game.split(EOS)
        replies = [turn[0] for turn in turns[1:]]
        guesses = [int(turn.lstrip("hl")) for turn in turns]
        assert rest == "" and len(guesses) <= guess.GUESSES and all(low <= n <= high for n in guesses)
        left = set(range(low, high + 1))
        # There is no reply to the last guess, and what is left after it does not matter.
        for n, reply in zip(guesses, [*replies, None], strict=True):
            assert n in left
            left = {x for x in left if (x > n if reply == "h" else x < n)}
    for ids, labels in training_parts(recipe._replace(batch_size=48), tokenizer, rng):
        for row, row_labels in zip(ids.tolist(), labels.tolist(), strict=True):
            text = tokenizer.decode(row, skip_special_tokens=True)
            learned = tokenizer.decode([x for x in row_labels if x >= 0], skip_special_tokens=True)
            assert learned == text.partition(":")[2].replace("h", "").replace("l", "")
