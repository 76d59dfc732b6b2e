"""Rows from files and from the hub: what is read, what is held out, and what each mistake says."""

import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from config import UserError
from tasks._files import hold_out, read_rows

ROWS = [
    {"prompt": "é\u2028\x85", "n": 1, "more": {"deep": [1]}},
    {"prompt": [{"role": "user", "content": "x"}], "level": 2},
]
READ = [ROWS[0] | {"level": None}, {"prompt": ROWS[1]["prompt"], "n": None, "more": None, "level": 2}]


def write(tmp_path: Path, text: str | bytes, name: str = "rows.jsonl") -> str:
    (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "start", "newline"), [("rows.jsonl", "", "\n"), ("rows", "\ufeff", "\r\n\r\n"), ("rows.txt", "", "\n\n")]
)
def test_read_rows(tmp_path, name, start, newline):
    """Every row has all columns: which rows share a call of a reward depends on the ranks."""
    text = newline.join([json.dumps(row, ensure_ascii=False) for row in ROWS] + [""])
    assert read_rows(write(tmp_path, start + text, name)) == READ


IS_NO_ROW = 'must be an object with a "prompt", a string or a list of chat messages, not '


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ": holds no rows"),
        ('{"prompt": "a"}\n{"prompt": \n', ":2: not JSON: Expecting value"),
        ('{"prompt": "a"}\n\n["a"]\n', f":3: {IS_NO_ROW}['a']"),
        ('{"question": "a", "answer": 1}\n', f":1: {IS_NO_ROW}{{'question': 'a', 'answer': 1}}"),
        ('{"prompt": [], "more": "' + "a" * 10_000 + '"}', f":1: {IS_NO_ROW}{{'prompt': [], 'more': '{'a' * 160}"),
        ('{"prompt": [{"role": "user", "content": null}]}\n', f":1: {IS_NO_ROW}"),
        ("[" * 200_000, ":1: not JSON: "),
        ('{"prompt": "a", "n": ' + "1" * 5000 + "}", ":1: not JSON: "),
        (b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', ":2: not JSON: 'utf-8' codec can't decode byte 0xe9"),
        ('{"prompt": "a"}\n'.encode("utf-16"), ":2: not JSON: "),
    ],
)
def test_rows_that_cannot_be_read_are_named_by_file_and_line(tmp_path, text, words):
    source = write(tmp_path, text)
    with pytest.raises(UserError) as told:
        read_rows(source)
    assert str(told.value).startswith(source + words) and len(str(told.value)) < 1000


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("them/theirs", ("them/theirs", None)),
        ("rows.csv", ("csv", "rows.csv")),
        ("rows.json", ("json", "rows.json")),
        ("rows.v2.jsonl.gz", ("json", "rows.v2.jsonl.gz")),
    ],
)
def test_all_else_is_read_by_datasets(tmp_path, monkeypatch, source, asked):
    found = {asked: ROWS}
    library = SimpleNamespace(load_dataset=lambda name, subset, split, data_files=None: found[name, data_files])
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.chdir(tmp_path)
    if source.startswith("rows"):
        with pytest.raises(UserError, match=f"^{source}: there is no such file$"):
            read_rows(source)
        write(tmp_path, "", source)
    assert read_rows(source) == READ
    found[asked] = [{"prompt": "a"}, {"question": "b"}]
    with pytest.raises(UserError, match=f"^{source}:2: {IS_NO_ROW}"):
        read_rows(source)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=f"^{source}: .*: pip install datasets$"):
        read_rows(source)


def test_hold_out_depends_on_the_prompts_alone():
    rows = [{"prompt": str(i % 30), "n": i} for i in range(60)]  # each prompt twice
    train, held = hold_out(rows, 6)
    held_prompts, train_prompts = {row["prompt"] for row in held}, {row["prompt"] for row in train}
    assert len(held) == 6 and len(train) == 48 and not held_prompts & train_prompts
    assert held_prompts == {"8", "9", "10", "11", "20", "21"}, "runs that were made are continued with the same"
    mixed = random.Random(0).sample(rows, 60)
    assert {row["prompt"] for row in hold_out(mixed, 6)[1]} == held_prompts
    assert {row["prompt"] for row in hold_out(rows, 4)[1]} < held_prompts
    for count, parts in (0, (60, 0)), (256, (48, 6)):  # no more than a fifth
        assert tuple(map(len, hold_out(rows, count))) == parts
    for few, parts in (1, (1, 0)), (2, (1, 1)):
        assert tuple(map(len, hold_out(rows[:few], 256))) == parts
