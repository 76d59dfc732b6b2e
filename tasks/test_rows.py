"""Rows from files and from the hub, and their prompts as token ids."""

import json
import random
import sys
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from tokenizers.processors import TemplateProcessing

from config import Config, UserError
from tasks import Task
from tasks._characters import EOS_ID, char_tokenizer
from tasks._files import hold_out, read_rows
from tasks._prompts import check_prompts, encode_prompts, notes

ROWS = [
    {"prompt": "é\u2028\x85", "n": 1, "more": {"deep": [1]}},
    {"prompt": [{"role": "user", "content": "x"}], "level": 2},
]
# Each case: the name of a file, what it begins with, and the line break. Blank lines are skipped.
FILES = [("rows.jsonl", "", "\n"), ("rows", "\ufeff", "\r\n\r\n"), ("rows.txt", "", "\n\n")]
READ = [ROWS[0] | {"level": None}, {"prompt": ROWS[1]["prompt"], "n": None, "more": None, "level": 2}]
NO_ROW = 'needs a "prompt", a string or chat messages: '
WRONG = [  # what a file contains, and the error
    (b'{"prompt": "a"}\n{"prompt": \n', ":2: not JSON: Expecting value"),
    # The error shows only the beginning of a long row.
    (b'{"prompt": [], "more": "' + b"a" * 10_000 + b'"}', f":1: {NO_ROW}{{'prompt': [], 'more': '{'a' * 160}"),
    (b'{"prompt": [{"role": "user", "content": "a"}, "b"]}\n', f":1: {NO_ROW}"),
    (b'{"prompt": [{"role": "user", "content": null}]}\n', f":1: {NO_ROW}"),
    (b'["prompt"]\n', f":1: {NO_ROW}"),
    (b'{"prompt": "a"}\n{"prompt": "a", "prompt_ids": "1"}\n', ": has a column prompt_ids, a name that this program"),
    (b'{"prompt": "a", "_index": 1}\n', ": has a column _index, a name that this program"),
]
# The name of a data set, and the first argument with which load_dataset must be called: for a data set on the hub its
# name, and for a file the kind of the file.
DATASETS = [("them/theirs", "them/theirs"), ("rows.csv", "csv"), ("rows.json", "json"), ("rows.v2.jsonl.gz", "json")]
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}:{% endif %}"
CHAT = [{"role": "user", "content": "1+1"}]
PLAIN, WITH_TEMPLATE, ENDING = (char_tokenizer("0123456789+=[]:") for _ in range(3))
WITH_TEMPLATE.chat_template = TEMPLATE
ENDING.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", special_tokens=[("<eos>", EOS_ID)])
ENCODED = [
    (WITH_TEMPLATE, "1+1=", "1+1="),
    (WITH_TEMPLATE, CHAT, "[1+1]:"),
    (ENDING, "1+1=", "1+1="),  # this tokenizer puts <eos> after every text
    (PLAIN, "1+1=<eos>", "1+1=<eos>"),  # the user wrote this <eos>
]
CANNOT = [  # a prompt, and the error
    ("", "a prompt has no tokens: ''"),
    ("1x", "a prompt could not be encoded: '1x': Exception.*UNK"),
    (CHAT, "a prompt could not be encoded: .*'1[+]1'.*chat_template is not set"),
    ("1" * 8, "^1 prompts have more than 7 tokens .*context of 10 .*, for instance '11111111'; .*--drop_long_prompts"),
]


@pytest.mark.parametrize(("name", "start", "newline"), FILES)
def test_read_rows(tmp_path, name, start, newline):
    """Every row has all columns. Otherwise the columns that a reward gets would depend on which rows are scored in one
    call, and therefore on the number of ranks."""
    text = start + newline.join([json.dumps(row, ensure_ascii=False) for row in ROWS] + [""])
    (tmp_path / name).write_bytes(text.encode())
    assert read_rows(str(tmp_path / name)) == READ


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_rows_that_cannot_be_read_are_named_by_file_and_line(tmp_path, text, message):
    (tmp_path / "rows.jsonl").write_bytes(text)
    with pytest.raises(UserError) as error:
        read_rows(f"{tmp_path}/rows.jsonl")
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl{message}") and len(str(error.value)) < 1000


@pytest.mark.parametrize(("source", "kind"), DATASETS)
def test_everything_else_is_read_by_the_package_datasets(tmp_path, monkeypatch, source, kind):
    data_files = None if kind == source else source  # `kind` is `source` only for a data set on the hub
    found = {(kind, data_files): ROWS}
    library = SimpleNamespace(load_dataset=lambda name, subset, split, data_files: found[name, data_files])
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.chdir(tmp_path)
    if kind != source:
        with pytest.raises(UserError, match=f"^{source}: there is no such file$"):
            read_rows(source)
        (tmp_path / source).touch()
    assert read_rows(source) == READ
    # The message of this error has several lines.
    monkeypatch.setattr(library, "load_dataset", Mock(side_effect=FileNotFoundError("Couldn't find\nany data file")))
    with pytest.raises(UserError, match=f"^{source}: the package datasets cannot read it: [^\n]+ any data file$"):
        read_rows(source)


def test_which_rows_are_held_out_depends_only_on_the_prompts():
    rows = [{"prompt": str(i % 30), "n": i} for i in range(60)]  # each prompt twice
    train, held = hold_out(rows, 6)
    prompts = {row["prompt"] for row in held}
    assert prompts == {"8", "9", "10", "11", "20", "21"}, "the runs in results/ held these out"
    # Each held-out prompt has two rows. One of them is held out, and the other is dropped.
    assert len(held) == 6 and len(train) == 48 and not prompts & {row["prompt"] for row in train}
    assert {row["prompt"] for row in hold_out(random.Random(0).sample(rows, 60), 6)[1]} == prompts
    assert {row["prompt"] for row in hold_out(rows, 4)[1]} < prompts
    # (rows, prompts to hold out) -> (rows to train on, rows held out). At most a fifth of the prompts are held out, but
    # at least one, unless there is only one prompt.
    parts = {(60, 0): (60, 0), (60, 256): (48, 6), (1, 256): (1, 0), (2, 256): (1, 1)}
    assert {given: tuple(map(len, hold_out(rows[: given[0]], given[1]))) for given in parts} == parts


def task_of(*prompts, held_out=()) -> Task:
    return Task([{"prompt": prompt} for prompt in prompts], [{"prompt": prompt} for prompt in held_out], [], [])


@pytest.mark.parametrize(("tokenizer", "prompt", "text"), ENCODED)
def test_a_string_is_not_changed_and_messages_go_through_the_template(tokenizer, prompt, text):
    rows = [{"prompt": each} for each in ("1", prompt, prompt, "2")]  # strings and messages in one data set
    encode_prompts(tokenizer, rows, at_once=2)
    assert [PLAIN.decode(row["prompt_ids"]) for row in rows] == ["1", text, text, "2"]


@pytest.mark.parametrize(("prompt", "message"), CANNOT)
def test_prompts_that_cannot_be_used(prompt, message):
    for task in task_of("1", prompt), task_of("1", held_out=["1", prompt]):
        with pytest.raises(UserError, match=message):
            check_prompts(task, PLAIN, 10, Config(max_completion_length=3))


def test_prompts_that_are_too_long_can_be_left_out():
    """A note reports it. There must still be prompts to train on and prompts to evaluate on."""
    config = Config(max_completion_length=3, drop_long_prompts=True)
    task = task_of("1", "1" * 8, "2" * 7, held_out=["2" * 9, "3"])
    # The result is the length of the longest prompt that is left, with a context of 10 tokens and with an unknown one.
    assert check_prompts(task, PLAIN, 10, config) == 7 and check_prompts(task, PLAIN, None, config) == 7
    assert [row["prompt"] for row in task.train + task.eval] == ["1", "2" * 7, "3"]
    assert [row.get("_index") for row in task.train + task.eval] == [0, 1, None], "the positions after leaving some out"
    (note,) = task.notes
    assert note.startswith("2 prompts have more than 7 tokens") and note.endswith("they are left out")
    # A prompt is left out of the first two tasks, so they get a note.
    for task, count in (task_of("1" * 8, held_out=["1"]), 1), (task_of("1", held_out=["1" * 8]), 1), (task_of("1"), 0):
        with pytest.raises(UserError, match="no prompts to train on, or none to evaluate on: see --eval_data"):
            check_prompts(task, PLAIN, 10, config)
        assert len(task.notes) == count
    assert check_prompts(task_of(held_out=["1"]), PLAIN, 10, replace(config, steps=0)) == 1
    assert check_prompts(task_of("1", held_out=["1" * 8]), PLAIN, 10, replace(config, eval_every=0)) == 1


def test_a_task_with_its_own_small_model_refuses_other_models():
    task, config = task_of("1", held_out=["1+1"]), Config(max_completion_length=7, task="addition", model="mine")
    task.eos_id = EOS_ID
    assert check_prompts(task, PLAIN, 10, config) == 3, "prompt and completion may fill the context, 3 + 7 = 10"
    # The tokenizer has another end-of-sequence token than the task, so the model cannot be the task's own.
    task.eos_id = EOS_ID + 1
    with pytest.raises(UserError, match="--model mine: --task addition works only with its own small model"):
        check_prompts(task, PLAIN, None, config)


def test_prompts_that_are_held_out_and_trained_on_are_counted_but_not_in_an_evaluation():
    task = task_of("1", CHAT, held_out=["2", CHAT, "1"])
    task.notes = ["before"]
    assert notes(task, PLAIN, trains=True) == ["before", "2 of the 3 held-out prompts are trained on as well"]
    assert len(notes(task, WITH_TEMPLATE, trains=True)) == 3, "strings do not get its template"
    task.max_steps = 0
    assert notes(task, PLAIN, trains=False) == ["before"]
