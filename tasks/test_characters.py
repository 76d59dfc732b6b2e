"""Prompts, rewards, the tokenizer and the checkpoint that comes with the repository."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import Config
from tasks import _characters as task
from tasks._characters import EOS, EOS_ID, PAD_ID
from tools.make_addition import scratch_pad, training_line, until_eos

ASSET = Path(__file__).parent.parent / "models" / "addition"


def ids_of(text: str, alphabet: str, end: list[int]) -> list[int]:
    return task.char_tokenizer(alphabet)(text).input_ids + end


@pytest.mark.parametrize(
    ("text", "end", "reward"),
    [
        ("#132", [EOS_ID], 1.0),
        ("7+5+0=12,4+8+1=13.#132", [EOS_ID], 1.0),
        ("#133#132", [EOS_ID], 1.0),  # the last "#" counts
        ("#132#133", [EOS_ID], 0.0),
        ("#133", [EOS_ID], 0.0),
        ("#0132", [EOS_ID], 0.0),
        ("#132.", [EOS_ID], 0.0),
        ("#132", [], 0.0),  # cut off
        ("#132", [PAD_ID, EOS_ID], 0.0),  # the text hides a sampled PAD
        ("132", [EOS_ID], 0.0),  # no "#" at all
        ("#", [EOS_ID], 0.0),
        ("", [EOS_ID], 0.0),
        ("", [], 0.0),
    ],
)
def test_exact_sum(text, end, reward):
    ids = ids_of(text, task.ADDITION_ALPHABET, end)
    assert task.exact_sum(["47+85="], [text], [ids], answer=["132"]) == [reward]


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
    ids = ids_of(text, task.SORTING_LETTERS + ">", end)
    assert task.sorted_share(["ccba>"], [text], [ids], answer=["abcc"]) == [reward]


def test_rewards_keep_the_order_and_refuse_a_missing_column():
    ids = [ids_of(text, task.ADDITION_ALPHABET, [EOS_ID]) for text in ("#1", "#2", "#3")]
    assert task.exact_sum([""] * 3, ["#1", "#2", "#3"], ids, answer=["1", "1", "3"], other=[0] * 3) == [1.0, 0.0, 1.0]
    with pytest.raises(ValueError):
        task.exact_sum([""] * 3, ["#1", "#2", "#3"], ids, answer=["1", "2"])


@pytest.mark.parametrize("make", [task.addition, task.sorting])
def test_rows(make):
    rows = make(Config())
    prompts = [row["prompt"] for row in rows.eval]
    assert (len(rows.train), len(rows.eval), len(set(prompts))) == (task.TRAIN_ROWS, task.EVAL_ROWS, task.EVAL_ROWS)
    assert all(map(task.held_out, prompts))
    assert not any(task.held_out(row["prompt"]) for row in rows.train)
    assert not set(prompts) & {row["prompt"] for row in rows.train}
    assert len(rows.rewards) == len(rows.weights)


@pytest.mark.parametrize("make", [task.addition, task.sorting])
def test_rows_are_the_same_in_every_run(make):
    state = random.getstate()
    first, again = make(Config(seed=3)), make(Config(seed=4))
    assert first.train == again.train and first.eval == again.eval
    assert random.getstate() == state


def test_held_out_is_the_same_in_every_process():
    assert [n for n in range(10, 30) if task.held_out(f"{n}+{n}=")] == [15, 19, 26]


def test_answers():
    for row in task.addition(Config()).train[:200]:
        a, b = map(int, row["prompt"].rstrip("=").split("+"))
        assert row["answer"] == str(a + b)
        assert all(2 <= len(str(n)) <= 4 for n in (a, b))
    for row in task.sorting(Config()).train[:200]:
        assert row["answer"] == "".join(sorted(row["prompt"].rstrip(">")))
    assert {len(row["answer"]) for row in task.sorting(Config()).train} == {1, 2, 3, 4, 5, 6}


def test_training_lines_are_right_and_not_held_out():
    rng = random.Random(0)
    lines = [training_line(rng) for _ in range(300)]
    assert not any(task.held_out(prompt) for prompt, _ in lines)
    for prompt, completion in lines:
        a, b = map(int, prompt.rstrip("=").split("+"))
        assert completion.removesuffix(EOS).rpartition("#")[2] == str(a + b)
        assert len(completion.removesuffix(EOS)) < 64
    assert 0.5 < sum(completion.startswith("#") for _, completion in lines) / 300 < 0.7


def test_scratch_pad():
    class NoFiller:
        def random(self):
            return 1.0

    assert scratch_pad(47, 85, NoFiller()) == "7+5+0=12,4+8+1=13"
    assert scratch_pad(7, 195, NoFiller()) == "7+5+0=12,0+9+1=10,0+1+1=2"


def saved(tmp_path) -> tuple:
    model, tokenizer = task.sorting_model(0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tokenizer, AutoTokenizer.from_pretrained(tmp_path)


def test_tokenizer_round_trip(tmp_path):
    for tokenizer in saved(tmp_path):
        assert tokenizer("fdbfef>").input_ids == [7, 5, 3, 7, 6, 7, 8]
        assert tokenizer.decode([7, 5, 3, 8]) == "fdb>"
        assert tokenizer.decode([7, 5, EOS_ID, PAD_ID], skip_special_tokens=True) == "fd"
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID)
        assert len(tokenizer) == 9


@pytest.mark.parametrize("text", ["x", "A>", "a b", "a\nb"])
def test_unknown_characters_are_an_error(tmp_path, text):
    for tokenizer in saved(tmp_path):
        with pytest.raises(Exception, match="UNK"):
            tokenizer(text)


def test_sorting_model_depends_on_the_seed_alone():
    state = torch.random.get_rng_state()
    weights = [task.sorting_model(seed)[0].model.embed_tokens.weight for seed in (0, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert 80_000 < task.sorting_model(0)[0].num_parameters() < 86_000


def test_asset():
    """It loads by the usual names, and its greedy answers are right often enough to learn from, but not always."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(ASSET), AutoTokenizer.from_pretrained(ASSET)
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size
    rows = task.addition(Config()).eval[:128]
    inputs = tokenizer([row["prompt"] for row in rows], padding=True, padding_side="left", return_tensors="pt")
    with torch.no_grad():
        output = model.generate(**inputs, do_sample=False, max_new_tokens=64)[:, inputs.input_ids.shape[1] :]
    ids = [until_eos(row) for row in output.tolist()]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = task.exact_sum([""] * 128, texts, ids, answer=[row["answer"] for row in rows])
    assert 0.3 < sum(rewards) / 128 < 0.7
