"""Rows from files and from the hub, and their prompts as token ids."""

import glob
import json
import random
import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

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
READ = [ROWS[0] | {"level": None}, {"prompt": ROWS[1]["prompt"], "n": None, "more": None, "level": 2}]
NO_ROW = ', row 2: needs a "prompt", a string or chat messages: '
WRONG = [  # the second row of a file, and the error
    ('{"prompt": [], "more": "%s"}' % ("a" * 10_000), NO_ROW),  # the error shows only the beginning of a long row
    ('{"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": null}]}', NO_ROW),
    ('{"answer": "a"}', NO_ROW),
    ('{"prompt": "a", "prompt_ids": "1", "turns": 3}', ": rename prompt_ids, turns: this program has columns"),
]
TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}:{% endif %}"
CHAT = [{"role": "user", "content": "1+1"}]
PLAIN, WITH_TEMPLATE, ENDING, STARTING = (char_tokenizer("0123456789+=[]:") for _ in range(4))
WITH_TEMPLATE.chat_template = TEMPLATE
ENDING.backend_tokenizer.post_processor = TemplateProcessing("$A <eos>", special_tokens=[("<eos>", EOS_ID)])
STARTING.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", special_tokens=[("<eos>", EOS_ID)])
STARTING.bos_token = "<eos>"
ENCODED = [
    (WITH_TEMPLATE, "1+1=", "1+1="),
    (WITH_TEMPLATE, CHAT, "[1+1]:"),
    (ENDING, "1+1=", "1+1="),  # this tokenizer puts <eos> after every text
    (PLAIN, "1+1=<eos>", "1+1=<eos>"),  # the user wrote this <eos>
    (ENDING, "", "<eos>"),  # a prompt needs a token
]


@pytest.mark.parametrize(("start", "newline"), [("", "\n"), ("\ufeff", "\r\n\r\n")])
def test_read_rows(tmp_path, start, newline):
    """Every row has all columns. Otherwise the columns that a reward gets would depend on which rows are scored in one
    call, and therefore on the number of ranks. Blank lines are skipped."""
    text = start + newline.join([json.dumps(row, ensure_ascii=False) for row in ROWS] + [""])
    (tmp_path / "rows.jsonl").write_bytes(text.encode())
    assert read_rows(f"{tmp_path}/rows.jsonl") == READ
    (tmp_path / "rows.jsonl").write_bytes(text.encode() + b'{"prompt": "a",\n{"prompt": "b"}\n')
    with pytest.raises(UserError, match=f"rows.jsonl cannot be read: line {text.count(chr(10)) + 1}, column 16: "):
        read_rows(f"{tmp_path}/rows.jsonl")


# No value is changed. With a comma at the end of each line, the package datasets would take the answers for prompts.
FILES = {
    "a.json": ('[{"prompt": "a", "answer": "2020-01-01"}]', [{"prompt": "a", "answer": "2020-01-01"}]),
    "lines.json": ('{"prompt": "a"}\n{"prompt": "b"}\n', [{"prompt": "a"}, {"prompt": "b"}]),
    "a.csv": ('\ufeffprompt,answer\r\n\r\n"NA,\r\n",007\r\n', [{"prompt": "NA,\r\n", "answer": "007"}]),
    "commas.csv": ("prompt,answer\na,b,\nc,d,\n", "its columns are prompt, answer, but a row has 3 values"),
    "quote.csv": ('prompt,answer\n"a,b\nc,d\n', "unexpected end of data"),
    "twice.csv": ("prompt,answer,answer\na,b,c\n", "two of its columns have the same name"),
    "indented.json": ('{\n  "prompt": "a"\n}\n', "indented.json cannot be read: line 1, column 2: "),
    "texts.jsonl": ('"a"\n', 'row 1: needs a "prompt", a string or chat messages'),
    **{
        f"empty.{x}": (text, f"empty.{x} has no rows")
        for x, text in dict(jsonl="\n", json="[]", csv="prompt\n").items()
    },
    "nothing.csv": ("", "nothing.csv has no rows"),
}


@pytest.mark.parametrize("name", FILES)
def test_values_in_files_stay_as_they_are(tmp_path, name):
    text, rows = FILES[name]
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(UserError, match=rows) if isinstance(rows, str) else nullcontext():
        assert read_rows(f"{tmp_path}/{name}") == rows


def test_a_file_that_is_not_there_or_lacks_the_columns_of_a_task_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no\.jsonl cannot be read: .*No such file"):
        read_rows(f"{tmp_path}/no.jsonl")
    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n{"prompt": "a"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl, row 2: the task needs a column 'question'"):
        read_rows(f"{tmp_path}/rows.jsonl", lambda row: {"prompt": row["question"]})


@pytest.mark.parametrize(("row", "message"), WRONG)
def test_rows_that_cannot_be_used_are_named(tmp_path, row, message):
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "a"}}\n{row}\n')
    with pytest.raises(UserError) as error:
        read_rows(f"{tmp_path}/rows.jsonl")
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl{message}") and len(str(error.value)) < 1000


# The first argument of load_dataset is the name of a data set on the hub, or the kind of a file.
@pytest.mark.parametrize(("source", "kind"), [("them/theirs", None), ("rows[1].parquet", "parquet")])
def test_everything_else_is_read_by_the_package_datasets(monkeypatch, source, kind):
    found = {(kind, glob.escape(source)) if kind else (source, None): ROWS}
    library = SimpleNamespace(load_dataset=lambda name, subset, split, data_files: found[name, data_files])
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert read_rows(source) == READ


def test_which_rows_are_held_out_depends_only_on_the_prompts():
    rows = [{"prompt": str(i % 30), "n": i} for i in range(60)]  # each prompt twice
    train, held = hold_out(rows, 6)
    prompts = {row["prompt"] for row in held}
    assert prompts == {"8", "9", "10", "11", "20", "21"}, "the runs in results/ held these out"
    # Each held-out prompt has two rows. One of them is held out, and the other is dropped.
    assert len(held) == 6 and len(train) == 48 and not prompts & {row["prompt"] for row in train}
    assert {row["prompt"] for row in hold_out(random.Random(0).sample(rows, 60), 6)[1]} == prompts
    # (rows, prompts to hold out) -> (rows to train on, rows held out). At most a fifth of the prompts are held out, but
    # at least one, unless there is only one prompt.
    parts = {(60, 0): (60, 0), (60, 256): (48, 6), (1, 256): (1, 0), (2, 256): (1, 1)}
    assert {given: tuple(map(len, hold_out(rows[: given[0]], given[1]))) for given in parts} == parts


def task_of(*prompts, held_out=()) -> Task:
    return Task([{"prompt": prompt} for prompt in prompts], [{"prompt": prompt} for prompt in held_out], [], [])


@pytest.mark.parametrize(("tokenizer", "prompt", "text"), ENCODED)
def test_a_string_is_not_changed_and_messages_go_through_the_template(tokenizer, prompt, text):
    rows = [{"prompt": each} for each in ("1", prompt, prompt, "2")]  # strings and messages in one data set
    encode_prompts(tokenizer, rows)
    assert [PLAIN.decode(row["prompt_ids"]) for row in rows] == ["1", text, text, "2"]


def test_a_text_that_begins_with_a_start_token_gets_no_second_one():
    rows = [{"prompt": "<eos>1"}, {"prompt": "1"}]
    encode_prompts(STARTING, rows)
    assert rows[0]["prompt_ids"] == rows[1]["prompt_ids"] == STARTING("1")["input_ids"]


@pytest.mark.parametrize(("prompt", "message"), [("", "has no tokens"), ("1" * 8, "^1 prompts have more than 7")])
def test_prompts_that_cannot_be_used(prompt, message):
    for task in task_of("1", prompt), task_of("1", held_out=["1", prompt]):
        with pytest.raises(UserError, match=message):
            check_prompts(task, PLAIN, 10, Config(max_completion_length=3))


def test_prompts_that_are_too_long_can_be_left_out():
    """A note reports it. There must still be prompts to train on and prompts to evaluate on."""
    config = Config(max_completion_length=3, drop_long_prompts=True)
    task = task_of("1", "1" * 8, "3", held_out=["2" * 9, "2" * 7])
    # The result is the length of the longest prompt that is left.
    assert check_prompts(task, PLAIN, 10, config) == 7
    assert [row["prompt"] for row in task.train + task.eval] == ["1", "3", "2" * 7]
    assert [row.get("_index") for row in task.train + task.eval] == [0, 1, None], "the positions after leaving some out"
    (note,) = task.notes
    assert note.startswith("2 prompts have more than 7 tokens") and note.endswith("they are left out")
    assert check_prompts(task, PLAIN, None, config) == 7, "in a context of unknown length, too"
    for task, how in (task_of("1" * 8, held_out=["1"]), {}), (task_of("1", held_out=["1" * 8]), dict(eval_data=["a"])):
        with pytest.raises(UserError, match="no prompts to train on, or none to evaluate on: see --eval_data"):
            check_prompts(task, PLAIN, 10, replace(config, **how))
    with pytest.raises(UserError, match="no prompts to train on, or none to evaluate on"):
        check_prompts(task_of("1"), PLAIN, 10, replace(config, steps=0))
    with pytest.raises(UserError, match=r"--max_completion_length 9: leaves no room for prompts .* of 9 tokens"):
        check_prompts(task_of("1", held_out=["1"]), PLAIN, 9, replace(config, max_completion_length=9))
    assert check_prompts(few := task_of("1"), PLAIN, 10, config) == 1 and "does not evaluate" in few.notes[0]
    assert check_prompts(task_of(held_out=["1"]), PLAIN, 10, replace(config, steps=0)) == 1
    assert check_prompts(task_of("1", held_out=["1" * 8]), PLAIN, 10, replace(config, eval_every=0)) == 1


def test_a_task_with_its_own_small_model_refuses_other_models():
    task = replace(task_of("1"), eos_id=EOS_ID + 1)  # not the end-of-sequence token of the tokenizer
    with pytest.raises(UserError, match="--model mine: --task addition works only with its own small model"):
        check_prompts(task, PLAIN, None, Config(task="addition", model="mine"))


def test_prompts_that_are_held_out_and_trained_on_are_counted_but_not_in_an_evaluation():
    task = task_of("1", CHAT, held_out=["2", CHAT, "1"])
    task.notes = ["before"]
    *shown, last = notes(task, WITH_TEMPLATE, trains=True)
    assert shown == ["before", "2 of the 3 held-out prompts are trained on as well"] and "strings do not get" in last
    assert notes(task, WITH_TEMPLATE, trains=False) == ["before", last]
    assert notes(task_of(CHAT, held_out=["2"]), WITH_TEMPLATE, trains=False) == [last], "also in what is evaluated only"


def test_a_prompt_that_ends_with_an_answer_is_noted_and_a_chat_needs_a_template():
    (note,) = notes(task_of([*CHAT, {"role": "assistant", "content": "2"}]), WITH_TEMPLATE, trains=True)
    assert note.startswith("a prompt ends with a message of the assistant")
    with pytest.raises(UserError, match="a prompt is a chat, but the model has no chat template"):
        encode_prompts(PLAIN, [{"prompt": CHAT}])


def test_messages_that_the_chat_template_leaves_out_are_noted(monkeypatch):
    task = task_of(CHAT, [{"role": "system", "content": "1"}, *CHAT], [*CHAT, {"role": "tool", "content": "1"}])
    assert notes(task, WITH_TEMPLATE, trains=True) == []
    monkeypatch.setattr(WITH_TEMPLATE, "chat_template", TEMPLATE.replace("messages", "messages if m['role'] == 'user'"))
    (note,) = notes(task, WITH_TEMPLATE, trains=True)
    assert note == "the model's chat template leaves out messages with the role system, tool"
