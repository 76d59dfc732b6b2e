"""What the small tasks share: a tokenizer of single characters, a small Llama, and rows that are held out by a hash."""

import hashlib
import random
from collections.abc import Callable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1  # in every tokenizer that char_tokenizer makes
TRAIN_ROWS, EVAL_ROWS = 8192, 512


def ended(ids: list[int]) -> bool:
    """Stopped by EOS. A sampled PAD is invisible in the text, so it must not pass for a clean answer."""
    return len(ids) > 0 and ids[-1] == EOS_ID and PAD_ID not in ids


def exact(mark: str, completions: list[str], completion_ids: list[list[int]], answer: list[str]) -> list[float]:
    """1 for each completion that ended and has the answer after its last mark."""
    return [
        float(ended(ids) and text.rpartition(mark)[1:] == (mark, right))
        for text, ids, right in zip(completions, completion_ids, answer, strict=True)
    ]


def split(draw_row: Callable[[random.Random], dict]) -> tuple[list[dict], list[dict]]:
    """Rows to train on and distinct held-out ones, the same in every run."""
    rng, train, evaluation = random.Random(0), [], {}
    while len(train) < TRAIN_ROWS or len(evaluation) < EVAL_ROWS:
        row = draw_row(rng)
        if held_out(row["prompt"]):
            evaluation[row["prompt"]] = row
        else:
            train.append(row)
    return train[:TRAIN_ROWS], list(evaluation.values())[:EVAL_ROWS]


def held_out(prompt: str) -> bool:
    """One prompt in eight is kept for evaluation, whatever the seed: by a hash that is the same in every process."""
    return hashlib.sha256(prompt.encode()).digest()[0] % 8 == 0


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
        max_position_embeddings=256,
        initializer_range=0.06,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
