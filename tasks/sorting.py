"""Sorting: "cab>" is answered by "abc".

The reward is graded, so that random weights, which the model has at first, earn something to start from: the mean of
two shares, of letters kept and of letters in their place. Columns: prompt, answer.
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
    """Both shares are of the longer text, so that 1 is an exact answer and surplus letters cost. Half of their mean if
    the completion never ended."""
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
    """Random weights, the same for the same seed; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        tokenizer = char_tokenizer(LETTERS + ">")
        return LlamaForCausalLM(small_config(tokenizer, hidden_size=64, intermediate_size=128)), tokenizer
