"""What the small model is shown."""

import random

from tasks import addition
from tasks._characters import EOS, char_tokenizer, held_out
from tools.make_addition import scratch_pad, training_line


def test_a_thought_goes_digit_by_digit_with_the_carry():
    thought = scratch_pad(47, 85, random.Random(0)).replace(".", "")
    assert thought == "7+5+0=12,4+8+1=13"


def test_what_is_shown_is_right_and_never_held_out():
    rng, tokenizer = random.Random(0), char_tokenizer(addition.ALPHABET)
    for _ in range(200):
        prompt, completion = training_line(rng)
        answer = str(sum(map(int, prompt.removesuffix("=").split("+"))))
        ids, text = tokenizer(completion)["input_ids"], completion.removesuffix(EOS)
        assert addition.exact_sum([prompt], [text], [ids], answer=[answer]) == [1.0] and not held_out(prompt)
