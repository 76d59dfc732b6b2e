"""Guess: the prompt "23-71:" stands for a secret number from 23 to 71. The model guesses, say "40". The reply is "h" if
the secret number is higher, or "l" if it is lower, and the model guesses again. It has five guesses.

The reward is 1 if the last guess is the number, and 0 otherwise. Even perfect play does not always win: five guesses
are always enough for up to 31 numbers, but a range may have 99. The model comes with the repository
(bench/make_models.py made it). It has learned from games in which each guess is a random one of the numbers that are
still possible. Columns: prompt, number.
"""

import random

from config import Config
from tasks import Task
from tasks._characters import EOS_ID, MODELS, ended, held_out

DEFAULTS = dict(num_generations=16, max_completion_length=20, steps=100, learning_rate=3e-4, warmup_steps=5)
ALPHABET = "0123456789-:hl"
GUESSES = 5


def draw_row(rng: random.Random) -> dict:
    size = rng.randint(10, 99)
    low = rng.randint(1, 100 - size)
    high = low + size - 1
    return {"prompt": f"{low}-{high}:", "number": rng.randint(low, high)}


def reply(row: dict, turns: list[str]) -> str | None:
    """Reply to the last guess, or return None if the game is over."""
    guess = turns[-1]
    if not guess.isdecimal() or int(guess) == row["number"] or len(turns) == GUESSES:
        return None
    return "h" if int(guess) < row["number"] else "l"


def found(prompts, completions, completion_ids, turns: list[list[str]], number: list[int], **columns) -> list[float]:
    """Return 1 if the completion ended and the last guess is the number, otherwise 0."""
    played = zip(completion_ids, turns, number, strict=True)
    return [float(ended(ids) and guesses[-1] == str(right)) for ids, guesses, right in played]


def load(config: Config) -> Task:
    """Draw the rows. Rows with the same range are either all trained on or all held out."""
    rng = random.Random(0)
    rows = [draw_row(rng) for _ in range(10_000)]
    train = [row for row in rows if not held_out(row["prompt"])]
    evaluation = [row for row in rows if held_out(row["prompt"])]
    return Task(train, evaluation, [found], [1.0], correct="found", eos_id=EOS_ID, reply=reply)


def model(config: Config) -> str:
    return str(MODELS / "guess")
