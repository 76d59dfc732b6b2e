"""Sorting: the answer to "cab>" is "abc".

The model starts from random weights, so right answers are rare at first. The reward therefore gives partial credit: it
is the mean of two shares: how many of the letters were kept, and how many are in the right place. Columns:
prompt, answer.
"""

import random
from collections import Counter

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from config import Config
from tasks import Task
from tasks._characters import EOS_ID, char_tokenizer, ended, small_config, split

DEFAULTS = dict(num_generations=16, max_completion_length=12, steps=150, learning_rate=1e-3, warmup_steps=5)
LETTERS = "abcdef"


def draw_row(rng: random.Random) -> dict:
    letters = rng.choices(LETTERS, k=rng.randint(1, 6))
    return {"prompt": "".join(letters) + ">", "answer": "".join(sorted(letters))}


def sorted_share(prompts, completions, completion_ids, answer: list[str], **columns) -> list[float]:
    """Return the mean of the two shares, or half of it if the completion did not end. The shares are the numbers of
    letters that were kept, and that are in the right place, divided by the length of the completion or of the answer,
    whichever is longer. So only the exact answer is worth 1, and surplus letters lower the reward."""
    rewards = []
    for text, ids, right in zip(completions, completion_ids, answer, strict=True):
        kept = (Counter(text) & Counter(right)).total()
        placed = sum(given == wanted for given, wanted in zip(text, right, strict=False))
        score = (kept + placed) / (2 * max(len(text), len(right)))
        rewards.append(score if ended(ids) else score / 2)
    return rewards


def load(config: Config) -> Task:
    train, evaluation = split(draw_row)
    return Task(train, evaluation, [sorted_share], [1.0], correct="sorted_share", graded=True, eos_id=EOS_ID)


def model(config: Config) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Make a model with random weights that depend only on the seed. PyTorch's random state is not changed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        tokenizer = char_tokenizer(LETTERS + ">")
        return LlamaForCausalLM(small_config(tokenizer, hidden_size=64, intermediate_size=128)), tokenizer
