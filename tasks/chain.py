"""Chain: the answer to "37+8*3-6:" is "+8=45*3=35-6=29", the steps "+8=45", "*3=35" and "-6=29" in a row. They are
worked out from left to right, modulo 100.

The reward is 1 for a completion that ends by itself and has the result after its last "=", and 0 otherwise. A guess is
right one time in a hundred, and a mistake in any step makes the result wrong. The model comes with the repository
(bench/make_models.py made it). It can do each step, but not reliably, and often writes a result without the steps.
Columns: prompt, answer.
"""

import random

from config import Config
from tasks import Task
from tasks._characters import EOS_ID, MODELS, exact, split

DEFAULTS = dict(num_generations=8, max_completion_length=48, steps=60, learning_rate=1.2e-4, warmup_steps=5)
ALPHABET = "0123456789+-*=:"


def draw_chain(rng: random.Random) -> dict:
    """Draw a row that also has the steps of its solution, such as ["+8=45", "*3=35", "-6=29"]."""
    value = rng.randrange(100)
    prompt, steps = str(value), []
    for _ in range(rng.randint(2, 6)):
        sign = rng.choice("+-*")
        number = rng.randint(2, 3) if sign == "*" else rng.randint(2, 9)
        value = {"+": value + number, "-": value - number, "*": value * number}[sign] % 100
        prompt += f"{sign}{number}"
        steps.append(f"{sign}{number}={value}")
    return {"prompt": f"{prompt}:", "answer": str(value), "steps": steps}


def draw_row(rng: random.Random) -> dict:
    row = draw_chain(rng)
    return {"prompt": row["prompt"], "answer": row["answer"]}


def exact_result(prompts, completions, completion_ids, answer: list[str], **columns) -> list[float]:
    """Return 1 if the completion ended and the text after its last "=" is the result, otherwise 0."""
    return exact("=", completions, completion_ids, answer)


def shortness(prompts, completions, completion_ids, **columns) -> list[float]:
    """Return minus the number of tokens. Add this reward with `--reward exact_result tasks.chain:shortness`."""
    return [-float(len(ids)) for ids in completion_ids]


def load(config: Config) -> Task:
    train, evaluation = split(draw_row)
    return Task(train, evaluation, [exact_result], [1.0], correct="exact_result", eos_id=EOS_ID)


def model(config: Config) -> str:
    return str(MODELS / "chain")
