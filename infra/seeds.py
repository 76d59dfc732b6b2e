"""Random numbers. Every random number of a run depends only on the seed, the step and what the number is for (in user
code, also on the rank), so a checkpoint does not have to contain the state of any random generator."""

import hashlib

import numpy as np
import transformers


def seed_everything(seed: int, *numbers: int) -> None:
    """Seed Python, NumPy and PyTorch. `numbers` are for instance the step and the rank. Only user code, such as a
    reward, draws from these global generators."""
    transformers.set_seed(int(np.random.SeedSequence([seed, *numbers]).generate_state(1)[0]))


def generator(name: str, seed: int, *numbers: int) -> np.random.Generator:
    """Return a generator for one purpose. `name` describes the purpose, and `numbers` are for instance the step. Two
    generators produce the same random numbers only if the name, the seed and all numbers are equal.

    Completions, minibatches and epochs do not use this function. Their generators are seeded with plain lists, such as
    [seed, step, ...]. These lists are older than this function, and are kept so that old runs can be repeated. NumPy
    pads such lists with zeros, so [seed, step] and [seed, step, 0, 0] give the same random numbers. This function
    avoids that, because it hashes the name together with all the numbers."""
    # NumPy's integers have another repr, so convert them.
    key = hashlib.sha256(repr((name, int(seed), *map(int, numbers))).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key)))
