from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import Config
from tasks._characters import EOS_ID, PAD_ID, char_tokenizer
from tasks.addition import ALPHABET, exact_sum, load, model


def ids_of(text: str, end: list[int]) -> list[int]:
    return char_tokenizer(ALPHABET)(text).input_ids + end


@pytest.mark.parametrize(
    ("text", "end", "reward"),
    [
        ("#132", [EOS_ID], 1.0),
        ("7+5+0=12,4+8+1=13.#132", [EOS_ID], 1.0),
        ("#133#132", [EOS_ID], 1.0),  # the last "#" counts
        ("#132#133", [EOS_ID], 0.0),
        ("#0132", [EOS_ID], 0.0),
        ("#132.", [EOS_ID], 0.0),
        ("#132", [], 0.0),  # cut off
        ("#132", [PAD_ID, EOS_ID], 0.0),  # the text hides a sampled PAD
        ("132", [EOS_ID], 0.0),  # no "#" at all
        ("", [EOS_ID], 0.0),
    ],
)
def test_exact_sum(text, end, reward):
    assert exact_sum(["47+85="], [text], [ids_of(text, end)], answer=["132"]) == [reward]


def test_rewards_keep_the_order():
    texts = ["#1", "#2", "#3"]
    ids = [ids_of(text, [EOS_ID]) for text in texts]
    assert exact_sum([""] * 3, texts, ids, answer=["1", "1", "3"], other=[0] * 3) == [1.0, 0.0, 1.0]


def test_answers():
    for row in load(Config()).train[:200]:
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        assert row["answer"] == str(a + b)
        assert all(2 <= len(str(n)) <= 4 for n in (a, b))


def test_the_model_of_the_repository():
    """It loads by the usual names, and its greedy answers are right often enough to learn from, but not always."""
    folder = Path(model(Config()))
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert policy.dtype == torch.float32
    assert len(tokenizer) == policy.config.vocab_size
    rows = load(Config()).eval[:128]
    inputs = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
    with torch.no_grad():
        output = policy.generate(**inputs, do_sample=False, max_new_tokens=64)[:, inputs.input_ids.shape[1] :]
    ids = [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in output.tolist()]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = exact_sum([""] * 128, texts, ids, answer=[row["answer"] for row in rows])
    assert 0.3 < sum(rewards) / 128 < 0.7
