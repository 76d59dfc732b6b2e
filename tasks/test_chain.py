from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import Config
from tasks._characters import EOS_ID, char_tokenizer
from tasks.chain import ALPHABET, exact_result, load, model


@pytest.mark.parametrize(
    ("text", "end", "reward"),
    [
        ("+8=45*3=35-6=29", [EOS_ID], 1.0),
        ("=29", [EOS_ID], 1.0),  # at once
        ("+8=45*3=35", [EOS_ID], 0.0),  # not to the end
        ("29", [EOS_ID], 0.0),  # no "=" at all
    ],
)
def test_exact_result(text, end, reward):
    ids = char_tokenizer(ALPHABET)(text).input_ids + end
    assert exact_result(["37+8*3-6:"], [text], [ids], answer=["29"]) == [reward]


def result_of(prompt: str) -> str:
    """Of a chain, by Python's own arithmetic: each sign closes a bracket around all before it."""
    chain = prompt.removesuffix(":")
    for sign in "+-*":
        chain = chain.replace(sign, f"){sign}")
    return str(eval("(" * chain.count(")") + chain) % 100)


def test_answers_are_worked_out_from_left_to_right():
    for row in load(Config()).train[:200]:
        assert row["answer"] == result_of(row["prompt"]) and 2 <= sum(map(row["prompt"].count, "+-*")) <= 6


def test_the_model_of_the_repository_knows_the_alphabet():
    folder = Path(model(Config()))
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == policy.config.vocab_size and tokenizer.decode(tokenizer(ALPHABET).input_ids) == ALPHABET
