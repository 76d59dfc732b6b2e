"""Seeds. Every random number of a run is a function of its seed, the step and what the number is for, so that nothing
random has to be saved to continue a run."""

import hashlib

import numpy as np
import transformers

from infra import ranks


def seed_everything(seed: int, step: int) -> None:
    """Seed Python, NumPy and PyTorch anew for this step and rank. Nothing here draws from them, but a reward may."""
    transformers.set_seed(int(np.random.SeedSequence([seed, step, ranks.rank()]).generate_state(1)[0]))


def generator(name: str, seed: int, *numbers: int) -> np.random.Generator:
    """Random numbers for a new purpose: give it a name of its own, and numbers such as the step. No other name and no
    other numbers give the same ones.

    The streams of completions, minibatches and epochs are older and are named by plain lists like [seed, step, ...].
    NumPy pads these with zeros, so [seed, step] would be the stream of (seed, step, 0, 0). They stay as they are for
    the sake of runs that have used them."""
    key = hashlib.sha256(repr((name, *map(int, (seed, *numbers)))).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key)))
