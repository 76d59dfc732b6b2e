"""What the small tasks share: rows that are held out, and a tokenizer of single characters."""

import random
from types import ModuleType

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from config import Config
from tasks import addition, sorting
from tasks._characters import EOS_ID, EVAL_ROWS, PAD_ID, TRAIN_ROWS, char_tokenizer, held_out, small_config


@pytest.mark.parametrize("file", [addition, sorting])
def test_rows(file: ModuleType):
    state = random.getstate()
    task, again = file.load(Config(seed=3)), file.load(Config(seed=4))
    assert (task.train, task.eval) == (again.train, again.eval), "the same in every run"
    assert random.getstate() == state
    prompts = [row["prompt"] for row in task.eval]
    assert (len(task.train), len(task.eval), len(set(prompts))) == (TRAIN_ROWS, EVAL_ROWS, EVAL_ROWS)
    assert all(map(held_out, prompts))
    assert not any(held_out(row["prompt"]) for row in task.train)
    assert len(task.rewards) == len(task.weights) and task.eos_id == EOS_ID


def test_held_out_is_the_same_in_every_process():
    assert [n for n in range(10, 30) if held_out(f"{n}+{n}=")] == [15, 19, 26]


@pytest.fixture(scope="module", params=["made", "saved and loaded"])
def tokenizer(request, tmp_path_factory):
    made = char_tokenizer("abcdef>")
    if request.param == "made":
        return made
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(small_config(made, hidden_size=16, intermediate_size=16)).save_pretrained(folder)
    made.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_tokenizer_round_trip(tokenizer):
    assert tokenizer("fdbfef>").input_ids == [7, 5, 3, 7, 6, 7, 8]
    assert tokenizer.decode([7, 5, 3, 8]) == "fdb>"
    assert tokenizer.decode([7, 5, EOS_ID, PAD_ID], skip_special_tokens=True) == "fd"
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, EOS_ID)
    assert len(tokenizer) == 9


@pytest.mark.parametrize("text", ["x", "A>", "a b", "a\nb"])
def test_unknown_characters_are_an_error(tokenizer, text):
    with pytest.raises(Exception, match="UNK"):
        tokenizer(text)
