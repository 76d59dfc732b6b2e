"""Tests of the strict judge of "larger"."""

import pytest
from candidates import judge_text, last_number, true_sentence

ASKED = "Which number is larger, 6 or 17?"
TRUE = [
    "17",
    "17 is the larger number.",
    "The larger number is 17.",
    "17 is larger than 6.",
    "6 is less than 17.",
    "17 > 6",
    "The answer is: 17",
    "17 is indeed the larger number",
    "The number 17 is indeed larger than 6. 6 is the smaller number.",
]
UNTRUE = [
    "6 is 17.",
    "6 is indeed equal to 17.",
    "6 is greater than 17.",
    "6 > 17",
    "17 is less than 6.",
    "6",
    "27 is the larger number.",
    "The larger number is 17. 6 is 17.",
    "17 is the smaller number.",
]
NOT_READ = ["", "17 is 17.", "16 is a multiple of 17.", "17 is the larger number. A dog has", "To find out, we take 17"]


@pytest.mark.parametrize(
    "text, verdict", [(t, True) for t in TRUE] + [(t, False) for t in UNTRUE] + [(t, None) for t in NOT_READ]
)
def test_a_text_is_true_only_if_all_of_it_is_read_and_true(text, verdict):
    assert judge_text(text, ASKED) is verdict


def test_what_is_paid_and_untrue_is_logged():
    logged = {}
    # The first text is true, but its last number is 6, so `last_number` gives it 0.
    texts = ["17 is larger than 6.", "6 is 17.", "17 is 17.", "6 is the larger number."]
    given = dict(completions=[[{"content": text}] for text in texts], answer=["17"] * 4)
    prompts = [[{"role": "user", "content": ASKED}]] * 4
    strict = true_sentence(prompts, **given, log_metric=lambda name, value: logged.setdefault(name, []).append(value))
    assert last_number(**given) == [0.0, 1.0, 1.0, 0.0] and strict == [1.0, 0.0, 0.0, 0.0]
    assert logged == {"untrue": [0, 1, 0, 1], "paid_untrue": [0, 1, 0, 0], "paid_not_true": [0, 1, 1, 0]}
