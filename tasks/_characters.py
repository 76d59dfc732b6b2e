"""Helpers of the small tasks: a tokenizer of single characters, a small Llama, and a split into train and eval rows."""

import hashlib
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1  # in every tokenizer that char_tokenizer makes
TRAIN_ROWS, EVAL_ROWS = 8192, 512
MODELS = Path(__file__).parent.parent / "models"  # those that come with the repository


def ended(ids: list[int]) -> bool:
    """Return whether the completion ended with EOS and contains no PAD. The decoded text does not show a sampled PAD,
    so without this check a completion with PAD could count as right."""
    return len(ids) > 0 and ids[-1] == EOS_ID and PAD_ID not in ids


def exact(mark: str, completions: list[str], completion_ids: list[list[int]], answer: list[str]) -> list[float]:
    """Return 1 for each completion that ended and whose text after the last `mark` is the answer, otherwise 0."""
    return [
        float(ended(ids) and mark in text and text.rpartition(mark)[2] == str(right))
        for text, ids, right in zip(completions, completion_ids, answer, strict=True)
    ]


def split(draw_row: Callable[[random.Random], dict]) -> tuple[list[dict], list[dict]]:
    """Draw the rows to train on, and held-out rows with distinct prompts. They are the same in every run."""
    rng, train, evaluation = random.Random(0), [], {}
    while len(train) < TRAIN_ROWS or len(evaluation) < EVAL_ROWS:
        row = draw_row(rng)
        if held_out(row["prompt"]):
            evaluation[row["prompt"]] = row
        else:
            train.append(row)
    return train[:TRAIN_ROWS], list(evaluation.values())[:EVAL_ROWS]


def held_out(prompt: str) -> bool:
    """Return whether this prompt is held out for evaluation. About one in eight is. A hash of the prompt decides, so
    the same prompts are held out in every run."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 8 == 0


def char_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one id for each character. A character outside the alphabet raises an error."""
    vocab = {token: i for i, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, padding_side="left")


def small_config(tokenizer: PreTrainedTokenizerFast, hidden_size: int, intermediate_size: int) -> LlamaConfig:
    """Return the configuration of a small Llama, and not of a Qwen2: for a Qwen2, AutoTokenizer would ignore the saved
    tokenizer's class and silently drop unknown characters."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
