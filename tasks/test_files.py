"""Rows from files and from the hub: what is read, what is held out, and what each mistake says."""

import json
import random
import sys
from types import SimpleNamespace

import pytest

from config import UserError
from tasks._files import hold_out, read_rows

ROWS = [
    {"prompt": "é\u2028\x85", "n": 1, "more": {"deep": [1]}},
    {"prompt": [{"role": "user", "content": "x"}], "level": 2},
]
READ = [ROWS[0] | {"level": None}, {"prompt": ROWS[1]["prompt"], "n": None, "more": None, "level": 2}]


@pytest.mark.parametrize(
    ("name", "start", "newline"), [("rows.jsonl", "", "\n"), ("rows", "\ufeff", "\r\n\r\n"), ("rows.txt", "", "\n\n")]
)
def test_read_rows(tmp_path, name, start, newline):
    """Every row has all columns: which rows share a call of a reward depends on the ranks."""
    text = start + newline.join([json.dumps(row, ensure_ascii=False) for row in ROWS] + [""])
    (tmp_path / name).write_bytes(text.encode())
    assert read_rows(str(tmp_path / name)) == READ


NO_ROW = 'needs a "prompt", a string or chat messages: '
WRONG = [  # what is in a file, and what is said
    (b'{"prompt": "a"}\n{"prompt": \n', ":2: not JSON: Expecting value"),
    (b'{"prompt": "a"}\n\n["a"]\n', f":3: {NO_ROW}['a']"),
    (b'{"question": "a", "answer": 1}\n', f":1: {NO_ROW}{{'question': 'a', 'answer': 1}}"),
    (b'{"prompt": [], "more": "' + b"a" * 10_000 + b'"}', f":1: {NO_ROW}{{'prompt': [], 'more': '{'a' * 160}"),
    (b'{"prompt": [{"role": "user", "content": null}]}\n', f":1: {NO_ROW}"),
    (b'{"prompt": [{"role": "user", "content": "a"}, "b"]}\n', f":1: {NO_ROW}"),
    (b"[" * 200_000, ":1: not JSON: "),
    (b'{"prompt": "a", "n": ' + b"1" * 5000 + b"}", ":1: not JSON: "),
    (b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', ":2: not JSON: 'utf-8' codec can't decode byte 0xe9"),
    ('{"prompt": "a"}\n'.encode("utf-16"), ":2: not JSON: "),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_rows_that_cannot_be_read_are_named_by_file_and_line(tmp_path, text, words):
    (tmp_path / "rows.jsonl").write_bytes(text)
    with pytest.raises(UserError) as told:
        read_rows(f"{tmp_path}/rows.jsonl")
    assert str(told.value).startswith(f"{tmp_path}/rows.jsonl{words}") and len(str(told.value)) < 1000


ASKED = [("them/theirs", "them/theirs"), ("rows.csv", "csv"), ("rows.json", "json"), ("rows.v2.jsonl.gz", "json")]


@pytest.mark.parametrize(("source", "kind"), ASKED)
def test_all_else_is_read_by_datasets(tmp_path, monkeypatch, source, kind):
    found = {(kind, None if kind == source else source): ROWS}
    library = SimpleNamespace(load_dataset=lambda name, subset, split, data_files: found[name, data_files])
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.chdir(tmp_path)
    if kind != source:
        with pytest.raises(UserError, match=f"^{source}: there is no such file$"):
            read_rows(source)
        (tmp_path / source).touch()
    assert read_rows(source) == READ
    found[next(iter(found))] = [{"prompt": "a"}, {"question": "b"}]
    with pytest.raises(UserError, match=f"^{source}:2: {NO_ROW}"):
        read_rows(source)


def test_hold_out_depends_on_the_prompts_alone():
    rows = [{"prompt": str(i % 30), "n": i} for i in range(60)]  # each prompt twice
    train, held = hold_out(rows, 6)
    prompts = {row["prompt"] for row in held}
    assert prompts == {"8", "9", "10", "11", "20", "21"}, "runs that were made are continued with the same"
    assert len(held) == 6 and len(train) == 48 and not prompts & {row["prompt"] for row in train}
    assert {row["prompt"] for row in hold_out(random.Random(0).sample(rows, 60), 6)[1]} == prompts
    assert {row["prompt"] for row in hold_out(rows, 4)[1]} < prompts
    parts = {(60, 0): (60, 0), (60, 256): (48, 6), (1, 256): (1, 0), (2, 256): (1, 1)}  # no more than a fifth
    assert {given: tuple(map(len, hold_out(rows[: given[0]], given[1]))) for given in parts} == parts
