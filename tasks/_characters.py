"""The two tasks that are built in, their tokenizer and their models: small enough to learn on a CPU in a minute.

Addition starts from models/addition, made by make_addition.py; sorting from random weights. Their rewards ask for a
completion that ended by itself: its last id is EOS.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from config import Config
from tasks import Task

ADDITION_MODEL = str(Path(__file__).parent.parent / "models" / "addition")
PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1  # in every tokenizer that char_tokenizer makes
ADDITION_ALPHABET = "0123456789+=#,."
SORTING_LETTERS = "abcdef"
TRAIN_ROWS, EVAL_ROWS = 8192, 512


def held_out(prompt: str) -> bool:
    """One prompt in eight is kept for evaluation, whatever the seed: by a hash that is the same in every process."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 8 == 0


def ended(ids: list[int]) -> bool:
    """Stopped by EOS. A sampled PAD is invisible in the text, so it must not pass for a clean answer."""
    return len(ids) > 0 and ids[-1] == EOS_ID and PAD_ID not in ids


# Addition: answer at once ("#132") or think first ("7+5+0=12,4+8+1=13#132").


def draw_addition(rng: random.Random) -> dict:
    a, b = (rng.randrange(10 ** (digits - 1), 10**digits) for digits in (rng.randint(2, 4), rng.randint(2, 4)))
    return {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def exact_sum(prompts, completions, completion_ids, answer: list[str], **columns) -> list[float]:
    """1 if the completion ended and the text after its last '#' is the sum."""
    rewards = []
    for text, ids, right in zip(completions, completion_ids, answer, strict=True):
        _, mark, given = text.rpartition("#")
        rewards.append(float(ended(ids) and mark == "#" and given == right))
    return rewards


def addition(config: Config) -> Task:
    return Task(*_split(draw_addition), [exact_sum], [1.0], 1.0, model=ADDITION_MODEL)


# Sorting: "cab>" is answered by "abc". The reward is graded, so that random weights earn something to start from.


def draw_sorting(rng: random.Random) -> dict:
    letters = rng.choices(SORTING_LETTERS, k=rng.randint(1, 6))
    return {"prompt": "".join(letters) + ">", "answer": "".join(sorted(letters))}


def sorted_share(prompts, completions, completion_ids, answer: list[str], **columns) -> list[float]:
    """The mean of two shares: of letters kept, and of letters in their place. Half of it if the completion never ended.

    Both are shares of the longer text, so that 1 is an exact answer and surplus letters cost.
    """
    rewards = []
    for text, ids, right in zip(completions, completion_ids, answer, strict=True):
        kept = (Counter(text) & Counter(right)).total()
        placed = sum(given == wanted for given, wanted in zip(text, right, strict=False))
        share = (kept + placed) / (2 * max(len(text), len(right)))
        rewards.append(share if ended(ids) else share / 2)
    return rewards


def sorting(config: Config) -> Task:
    return Task(*_split(draw_sorting), [sorted_share], [1.0], 1.0, model=lambda: sorting_model(config.seed))


def sorting_model(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Random weights, the same for the same seed; torch's own random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = char_tokenizer(SORTING_LETTERS + ">")
        return LlamaForCausalLM(small_config(tokenizer, hidden_size=64, intermediate_size=128)), tokenizer


def _split(draw: Callable[[random.Random], dict]) -> tuple[list[dict], list[dict]]:
    """Rows to train on and distinct held-out ones, the same in every run."""
    rng, train, evaluation = random.Random(0), [], {}
    while len(train) < TRAIN_ROWS or len(evaluation) < EVAL_ROWS:
        row = draw(rng)
        if held_out(row["prompt"]):
            evaluation[row["prompt"]] = row
        else:
            train.append(row)
    return train[:TRAIN_ROWS], list(evaluation.values())[:EVAL_ROWS]


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """One id for each character. A character outside the alphabet is an error, never a silently shorter prompt."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def small_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int, intermediate_size: int) -> LlamaConfig:
    """Llama: in a Qwen2 folder AutoTokenizer ignores the saved class and drops unknown characters without a word."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
