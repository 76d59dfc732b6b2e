"""Chain: "37+8*3-6:" is worked out from left to right, modulo 100: "+8=45*3=35-6=29".

The reward is 1 for a completion that ended by itself with the result after its last "=", and 0 for any other: one in a
hundred for a guess, and a mistake in any step loses all. The model comes with the repository; tools/make_models.py made
it. It knows the steps, none of them well, and often gives the result at once. Columns: prompt, answer.
"""

import random
from pathlib import Path

from config import Config
from tasks import Task
from tasks._characters import EOS_ID, exact, split

DEFAULTS = dict(num_generations=8, max_completion_length=48, steps=60, learning_rate=1.2e-4, warmup_steps=5)
ALPHABET = "0123456789+-*=:"


def draw_chain(rng: random.Random) -> tuple[str, list[str]]:
    """-> 37+8*3-6: and its steps, +8=45 *3=35 -6=29"""
    value = rng.randrange(100)
    prompt, steps = str(value), []
    for _ in range(rng.randint(2, 6)):
        sign = rng.choice("+-*")
        number = rng.randint(2, 3) if sign == "*" else rng.randint(2, 9)
        value = {"+": value + number, "-": value - number, "*": value * number}[sign] % 100
        prompt += f"{sign}{number}"
        steps.append(f"{sign}{number}={value}")
    return f"{prompt}:", steps


def draw_row(rng: random.Random) -> dict:
    prompt, steps = draw_chain(rng)
    return {"prompt": prompt, "answer": steps[-1].partition("=")[2]}


def exact_result(prompts, completions, completion_ids, answer: list[str], **columns) -> list[float]:
    """1 if the completion ended and the text after its last '=' is the result."""
    return exact("=", completions, completion_ids, answer)


def shortness(prompts, completions, completion_ids, **columns) -> list[float]:
    """Minus the tokens: a second reward, on another scale, for `--reward exact_result tasks.chain:shortness`."""
    return [-float(len(ids)) for ids in completion_ids]


def load(config: Config) -> Task:
    train, evaluation = split(draw_row)
    return Task(train, evaluation, [exact_result], [1.0], correct="exact_result", eos_id=EOS_ID)


def model(config: Config) -> str:
    return str(Path(__file__).parent.parent / "models" / "chain")
