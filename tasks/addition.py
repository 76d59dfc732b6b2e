"""Addition: the answer to "47+85=" is "#132". The model may first write steps, from right to
left and with the carry: "7+5+0=12,4+8+1=13#132".

The reward is 1 for a completion that ends by itself and has the sum after its last "#", and 0 otherwise. The model
comes with the repository (bench/make_models.py made it). At first it writes the steps of short sums, but answers most
long sums at once, and wrongly. It has to learn that the steps help there too. Columns: prompt, answer.
"""

import random

from config import Config
from tasks import Task
from tasks._characters import EOS_ID, MODELS, exact, split

DEFAULTS = dict(num_generations=8, max_completion_length=64, steps=80, learning_rate=2e-4, warmup_steps=5)
ALPHABET = "0123456789+=#,."  # the model may pad its steps with ".", so that their lengths vary


def draw_row(rng: random.Random) -> dict:
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in (rng.randint(2, 4), rng.randint(2, 4)))
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def exact_sum(prompts, completions, completion_ids, answer: list[str], **columns) -> list[float]:
    """Return 1 if the completion ended and the text after its last "#" is the sum, otherwise 0."""
    return exact("#", completions, completion_ids, answer)


def load(config: Config) -> Task:
    train, evaluation = split(draw_row)
    return Task(train, evaluation, [exact_sum], [1.0], correct="exact_sum", eos_id=EOS_ID)


def model(config: Config) -> str:
    return str(MODELS / "addition")
