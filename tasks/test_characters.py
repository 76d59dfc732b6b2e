"""The small tasks: rewards, rows and models; and the tokenizer of single characters."""

import itertools
import json
import random
from hashlib import sha256

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import Config
from rollout import Sampling, rollout
from tasks import addition, chain, guess, sorting
from tasks._characters import EOS_ID, PAD_ID, char_tokenizer, small_config

# Each case: a reward function, the right answer, a value, some texts, and a factor. A text that ends with EOS earns the
# value, and one that does not earns the value times the factor.
REWARDS = [
    (addition.exact_sum, 132, 1.0, ["7+5+0=12,4+8+1=13.#132", "#133#132"], 0.0),  # in a file of the user, a number
    (addition.exact_sum, "132", 0.0, ["#132#133", "#0132", "132", ""], 0.0),  # the last "#" counts
    (chain.exact_result, "29", 1.0, ["+8=45*3=35-6=29"], 0.0),
    (sorting.sorted_share, "abcc", 1.0, ["abcc"], 0.5),
    (sorting.sorted_share, "abcc", 0.75, ["accb"], 0.5),  # the mean of 1 (all four letters) and 0.5 (two in place)
    (sorting.sorted_share, "abcc", 0.5, ["abccabcc"], 0.5),  # four surplus letters
    (sorting.sorted_share, "abcc", 0.0, [""], 0.5),
]
DIGESTS = [(addition, "8ee20c40f370cc2f"), (chain, "7b97653b64f0c103"), (sorting, "b6ea4db949fe0a50")]
DIGESTS += [(guess, "d8c2c02c043f0671")]


@pytest.mark.parametrize(("reward", "answer", "value", "texts", "factor_without_eos"), REWARDS)
def test_rewards(reward, answer, value, texts, factor_without_eos):
    """The tested completion is the second of three. The right answer to the two others is "f", so they earn 0: each
    completion is compared with its own answer. A completion with a PAD counts as one that does not end."""
    endings = [([EOS_ID], 1.0), ([], factor_without_eos), ([PAD_ID, EOS_ID], factor_without_eos)]
    for text, (ending, factor) in itertools.product(texts, endings):
        ids = [2] * len(text) + ending  # 2 is the id of a letter
        columns = dict(prompts=["", "", ""], completions=["", text, text], completion_ids=[[EOS_ID], ids, ids])
        assert reward(**columns, answer=["f", answer, "f"], other=[0] * 3) == [0.0, value * factor, 0.0]
        with pytest.raises(ValueError):
            reward(**columns, answer=[answer])


def test_shortness_is_minus_the_number_of_tokens():
    assert chain.shortness(["a", "b"], ["", "12"], [[], [2, 3, 1]], answer=["1", "2"]) == [0, -3]


@pytest.mark.parametrize(("module", "digest"), DIGESTS)
def test_rows_are_the_same_as_in_the_runs_in_results(module, digest):
    state = random.getstate()
    task = module.load(Config(seed=3))
    assert sha256(json.dumps([task.train, task.eval]).encode()).hexdigest()[:16] == digest
    assert random.getstate() == state
    assert not {row["prompt"] for row in task.train} & {row["prompt"] for row in task.eval}
    assert (task.eos_id, task.correct, task.graded) == (EOS_ID, task.reward_names[0], module is sorting)


@pytest.mark.parametrize("module", [addition, chain])
def test_a_model_of_the_repository(module):
    """Its greedy answers are right often enough to learn from them, but not always."""
    policy, tokenizer = (auto.from_pretrained(module.model(Config())) for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert policy.dtype == torch.float32 and len(tokenizer) == policy.config.vocab_size
    task = module.load(Config())
    rows = task.eval[:64]
    made = rollout(policy, [tokenizer(row["prompt"]).input_ids for row in rows], None, Sampling(64, [EOS_ID], 0.0))
    texts = [tokenizer.decode(each.ids, skip_special_tokens=True) for each in made]
    rewards = task.rewards[0]([], texts, [each.ids for each in made], answer=[row["answer"] for row in rows])
    assert 0.3 < sum(rewards) / 64 < 0.7


def test_random_weights_depend_only_on_the_seed():
    state = torch.random.get_rng_state()
    policies = [sorting.model(Config(seed=seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    first, again, other = (policy.model.embed_tokens.weight for policy in policies)
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_saved_tokenizer_of_characters_is_loaded_as_the_same_one(tmp_path):
    """A character that it does not know is an error."""
    made = char_tokenizer("abcdef>")
    for part in made, small_config(made, hidden_size=16, intermediate_size=16):
        part.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer("fdbfef>").input_ids == [7, 5, 3, 7, 6, 7, 8] and tokenizer.decode([7, 5, 3, 8]) == "fdb>"
    assert tokenizer.decode([7, 5, EOS_ID, PAD_ID], skip_special_tokens=True) == "fd"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (PAD_ID, EOS_ID, 9)
    with pytest.raises(Exception, match="UNK"):
        tokenizer("a\nb")
