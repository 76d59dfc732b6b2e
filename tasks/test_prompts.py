"""Prompts in the tokens of a model: how they are encoded, which cannot be used, and what is noted."""

from dataclasses import replace

import pytest
from tokenizers.processors import TemplateProcessing

from config import Config, UserError
from tasks import Task
from tasks._characters import EOS_ID, char_tokenizer
from tasks._prompts import check_prompts, encode_prompt, notes

TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}:{% endif %}"
CHAT = [{"role": "user", "content": "1+1"}]
PLAIN, WITH_TEMPLATE, ENDING = (char_tokenizer("0123456789+=[]:") for _ in range(3))
WITH_TEMPLATE.chat_template = TEMPLATE
ENDING.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", special_tokens=[("<eos>", EOS_ID)])
ENCODED = [
    (WITH_TEMPLATE, "1+1=", "1+1="),
    (WITH_TEMPLATE, CHAT, "[1+1]:"),
    (ENDING, "1+1=", "1+1="),  # which would end every text
    (PLAIN, "1+1=<eos>", "1+1=<eos>"),  # one that the user wrote stays
]
CANNOT = [
    (PLAIN, "", "a prompt has no tokens: ''"),
    (PLAIN, "1x", "a prompt could not be encoded: '1x': Exception: .*UNK"),
    (PLAIN, CHAT, "a prompt could not be encoded: .*'1[+]1'.*chat_template is not set"),
    (PLAIN, "1" * 8, "^1 prompts and .* 3 exceed .* context of 10; .* 8 tokens: '11111111'; .*--drop_long_prompts"),
]
NOTED = [
    ([], "1", ["2"], PLAIN),
    (["strings do not get the model's chat template"], "1", [], WITH_TEMPLATE),
    (["1 of the 2 held-out prompts are trained on as well"], "1", ["3", "1"], PLAIN),
    (["1 of the 1 held-out prompts are trained on as well"], CHAT, [CHAT], WITH_TEMPLATE),
]


def task_of(*prompts, held_out=()) -> Task:
    return Task(*([{"prompt": prompt} for prompt in part] for part in (prompts, held_out)), [], [])


@pytest.mark.parametrize(("tokenizer", "prompt", "text"), ENCODED)
def test_a_string_is_taken_as_it_is_and_messages_go_through_the_template(tokenizer, prompt, text):
    assert PLAIN.decode(encode_prompt(tokenizer, prompt)) == text


@pytest.mark.parametrize(("tokenizer", "prompt", "words"), CANNOT)
def test_prompts_that_cannot_be_used(tokenizer, prompt, words):
    for task in task_of("1", prompt), task_of("1", held_out=["1", prompt]):
        with pytest.raises(UserError, match=words):
            check_prompts(task, tokenizer, 10, Config(max_completion_length=3))


def test_prompts_that_are_too_long_can_be_left_out():
    """Which is noted; and enough must be left."""
    config = Config(max_completion_length=3, drop_long_prompts=True)
    task = task_of("1", "1" * 8, "2" * 7, held_out=["2" * 9, "3"])
    assert check_prompts(task, PLAIN, 10, config) == 7
    assert [row["prompt"] for row in task.train] == ["1", "2" * 7] and [row["prompt"] for row in task.eval] == ["3"]
    (note,) = task.notes
    assert note.startswith("2 prompts and a completion of 3 exceed") and note.endswith("they are left out")
    for task in task_of("1" * 8, held_out=["1"]), task_of("1", held_out=["1" * 8]):
        with pytest.raises(
            UserError, match=r"1 prompts and .*'11111111'; they are left out; no prompts to train on, or"
        ):
            check_prompts(task, PLAIN, 10, config)
    with pytest.raises(UserError, match=r"^no prompts to train on, or none held out: see --eval_data$"):
        check_prompts(task_of("1"), PLAIN, 10, config)
    assert check_prompts(task_of(held_out=["1"]), PLAIN, 10, Config(max_completion_length=3, steps=0)) == 1
    never = replace(config, eval_every=0)
    assert check_prompts(task_of("1", held_out=["1" * 8]), PLAIN, 10, never) == 1


def test_a_task_for_its_own_small_model_takes_no_other():
    task, config = task_of("1", held_out=["1+1"]), Config(max_completion_length=7, task="addition", model="mine")
    task.eos_id = EOS_ID
    for context in (10, None):  # the longest prompt may fill it
        assert check_prompts(task, PLAIN, context, config) == 3
    task.eos_id = EOS_ID + 1
    with pytest.raises(UserError, match="--model mine: --task addition is for its own small model"):
        check_prompts(task, PLAIN, None, config)


@pytest.mark.parametrize(("expected", "prompt", "held_out", "tokenizer"), NOTED)
def test_a_figure_that_would_be_wrong_is_noted(expected, prompt, held_out, tokenizer):
    task = task_of(prompt, held_out=held_out)
    task.notes = ["before"]
    assert all(words in note for words, note in zip(["before", *expected], notes(task, tokenizer), strict=True))
    task.max_steps = 0  # an evaluation trains on nothing
    assert not any("trained on" in note for note in notes(task, tokenizer))
