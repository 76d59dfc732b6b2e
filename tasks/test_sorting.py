import pytest
import torch

from config import Config
from tasks._characters import EOS_ID, PAD_ID, char_tokenizer
from tasks.sorting import LETTERS, load, model, sorted_share


@pytest.mark.parametrize(
    ("text", "end", "reward"),
    [
        ("abcc", [EOS_ID], 1.0),
        ("abcc", [], 0.5),  # cut off
        ("abcc", [PAD_ID, EOS_ID], 0.5),
        ("accb", [EOS_ID], 0.75),  # all four kept, two in place
        ("abccabcc", [EOS_ID], 0.5),  # four surplus letters
        ("ab", [EOS_ID], 0.5),
        ("ffff", [EOS_ID], 0.0),
        ("", [EOS_ID], 0.0),
        ("", [], 0.0),
    ],
)
def test_sorted_share(text, end, reward):
    ids = char_tokenizer(LETTERS + ">")(text).input_ids + end
    assert sorted_share(["ccba>"], [text], [ids], answer=["abcc"]) == [reward]


def test_answers():
    rows = load(Config()).train
    for row in rows[:200]:
        assert row["answer"] == "".join(sorted(row["prompt"].rstrip(">")))
    assert {len(row["answer"]) for row in rows} == {1, 2, 3, 4, 5, 6}


def test_the_model_depends_on_the_seed_alone():
    state = torch.random.get_rng_state()
    policies = [model(Config(seed=seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [policy.model.embed_tokens.weight for policy in policies]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert 80_000 < policies[0].num_parameters() < 86_000
