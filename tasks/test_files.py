"""Rows and rewards from files: what is read, what is held out, and what each mistake says."""

import gzip
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from config import UserError
from tasks import Task, load_files
from tasks._files import MOST_FRAMES, excerpt, hold_out, read_rows
from tasks._rewards import call_rewards, load_reward


def write(tmp_path: Path, text: str | bytes) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


# ---- Rows ----

LINES = '{{"prompt": "é", "n": 1}}{0}{0}{{"prompt": [{{"role": "user", "content": "x"}}], "n": 2}}{0}'


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_read_rows(tmp_path, newline, start):
    rows = read_rows(write(tmp_path, start + LINES.format(newline).encode()))
    assert rows == [{"prompt": "é", "n": 1}, {"prompt": [{"role": "user", "content": "x"}], "n": 2}]


def test_columns_that_only_some_rows_have(tmp_path):
    """Which rows share a call depends on the ranks, so its columns must not depend on which row comes first."""
    rows = read_rows(write(tmp_path, '{"prompt": "a", "level": 1}\n{"prompt": "b", "answer": "2"}\n'))
    assert rows == [{"prompt": "a", "level": 1, "answer": None}, {"prompt": "b", "level": None, "answer": "2"}]


def test_a_line_separator_inside_a_string_ends_no_row(tmp_path):
    assert read_rows(write(tmp_path, '{"prompt": "a\u2028b\x85c"}\n')) == [{"prompt": "a\u2028b\x85c"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["holds no rows"]),
        ("\n \n", ["holds no rows"]),
        ('{"prompt": "a"}\n{"prompt": \n', ["rows.jsonl:2", "not JSON"]),
        ('{"prompt": "a"}\n\n["a"]\n', ["rows.jsonl:3", "holds a list"]),
        ('{"question": "a", "answer": 1}\n', ["rows.jsonl:1", 'no "prompt"', "'question', 'answer'"]),
        ('{"prompt": 5}\n', ["rows.jsonl:1", "string or a list of chat messages", "5"]),
        ('{"prompt": []}\n', ["rows.jsonl:1", "string or a list of chat messages"]),
        ('{"prompt": [{"content": "a"}]}\n', ["rows.jsonl:1", "string or a list of chat messages"]),
        ('{"prompt": [{"role": "user", "content": null}]}\n', ["rows.jsonl:1", "chat messages"]),
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            ["rows.jsonl:1", 'turns of "messages" before the answer'],
        ),
        (b'{"prompt": "a"}\n{"prompt": "\xe9"}\n', ["rows.jsonl:2", "UTF-8"]),
    ],
)
def test_rows_that_cannot_be_read_are_named_by_file_and_line(tmp_path, text, words):
    with pytest.raises(UserError) as told:
        read_rows(write(tmp_path, text))
    assert all(word in str(told.value) for word in words)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_rows(str(tmp_path / "rows.jsonl"))


def hub(monkeypatch, rows: list[dict] | Exception) -> None:
    def load_dataset(name, subset=None, split=None):
        assert (name, subset, split) == ("them/theirs", None, "train")
        if isinstance(rows, Exception):
            raise rows
        return rows

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))


def test_rows_of_the_hub(monkeypatch):
    hub(monkeypatch, [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])
    assert read_rows("them/theirs") == [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    hub(monkeypatch, [{"prompt": "a"}, {"question": "b"}])
    with pytest.raises(UserError, match=r"""^them/theirs, row 2: has no "prompt"; it has 'question'$"""):
        read_rows("them/theirs")
    hub(monkeypatch, ValueError("no such set\nat all"))
    with pytest.raises(UserError, match=r"^data set them/theirs could not be loaded: ValueError: no such set$"):
        read_rows("them/theirs")


def test_hold_out_depends_on_the_prompts_alone():
    rows = [{"prompt": str(i % 30), "n": i} for i in range(60)]  # each prompt twice
    train, held = hold_out(rows, 6, "rows")
    held_prompts, train_prompts = {row["prompt"] for row in held}, {row["prompt"] for row in train}
    assert len(held) == len(held_prompts) == 6 and len(train) == 48
    assert not held_prompts & train_prompts
    mixed = random.Random(0).sample(rows, 60)
    assert {row["prompt"] for row in hold_out(mixed, 6, "rows")[1]} == held_prompts
    assert {row["prompt"] for row in hold_out(rows, 4, "rows")[1]} < held_prompts
    assert hold_out(rows, 0, "rows") == (rows, [])


def test_no_more_than_a_fifth_is_held_out():
    assert [len(part) for part in hold_out([{"prompt": str(i)} for i in range(300)], 256, "rows")] == [240, 60]
    assert [len(part) for part in hold_out([{"prompt": "a"}, {"prompt": "b"}], 5, "rows")] == [1, 1]
    with pytest.raises(UserError, match=r"has 1 prompts and 1 are held out.*--eval_data.*--eval_every 0"):
        hold_out([{"prompt": "a"}], 5, "rows.jsonl")


ROWS = [{"prompt": "é", "n": 1, "more": {"deep": [1]}}, {"prompt": [{"role": "user", "content": "x"}], "n": 2}]


@pytest.mark.parametrize("name", ["rows.json", "lines.json", "rows.jsonl.gz", "rows.json.gz"])
def test_other_files_of_json(tmp_path, name):
    text = (
        json.dumps(ROWS, indent=1)
        if name.startswith("rows.json") and "jsonl" not in name
        else "\n".join(map(json.dumps, ROWS))
    )
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    rows = read_rows(f"{tmp_path}/{name}")
    assert rows == [ROWS[0], ROWS[1] | {"more": None}]
    assert rows[1].where.removeprefix(f"{tmp_path}/{name}") == (", row 2" if text.startswith("[") else ":2")


def test_a_damaged_file_of_json(tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(b"{}" * 99)[:-9])
    with pytest.raises(UserError, match=r"--data .*rows.jsonl.gz: Compressed file ended"):
        read_rows(f"{tmp_path}/rows.jsonl.gz")
    (tmp_path / "rows.json").write_text('[{"prompt": "a"}, 3]')
    with pytest.raises(UserError, match=r"rows.json, row 2: holds a int"):
        read_rows(f"{tmp_path}/rows.json")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_are_read_by_datasets(tmp_path, monkeypatch, kind):
    table = tmp_path / f"rows.{kind}"
    table.write_text("")

    def load_dataset(name, subset=None, split=None, data_files=None):
        assert (name, subset, split, data_files) == (kind, None, "train", str(table))
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_rows(str(table))[1].where == f"{table}, row 2"
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UserError, match=f"rows.{kind}: hub data sets, .csv and .parquet files need the package datasets"
    ):
        read_rows(str(table))


# ---- Reward functions ----

REWARDS = """\
import math
LIMIT = 3

def good(completions, **columns):
    return [1.0 for _ in completions]

class Judge:
    def __call__(self, completions, **columns):
        return [2.0 for _ in completions]

judge = Judge()

def fails(prompts, **columns):
    return share(prompts[0], 50)

def share(prompt, depth):
    return half(prompt, depth - 1)

def half(prompt, depth):
    return share(prompt, depth - 1) if depth > 0 else 1 / len(prompt)
"""


@pytest.fixture
def rewards_file(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path / "mine.py"


def test_a_function_and_an_object_that_can_be_called(rewards_file):
    rewards = [load_reward(f"{rewards_file}:{name}", []) for name in ("good", "judge")]
    assert [reward(completions=["a", "b"]) for reward in rewards] == [[1.0, 1.0], [2.0, 2.0]]
    assert Task([], [], rewards, [1.0, 1.0], 2.0).reward_names == ["good", "judge"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("good", ["must be file.py:function or package.module:function"]),
        ("{}", ["must be file.py:function"]),
        ("{}:", ["must be file.py:function"]),
        ("nowhere.py:good", ["there is no file nowhere.py"]),
        ("{}:LIMIT", ["has no function LIMIT", "it has good, Judge, judge"]),
        ("{}:god", ["has no function god", "it has good, Judge, judge"]),
    ],
)
def test_a_reward_that_is_not_there(rewards_file, name, words):
    with pytest.raises(UserError) as told:
        load_reward(name.format(rewards_file), [])
    assert all(word in str(told.value) for word in ["--reward", *words])


@pytest.fixture
def modules(monkeypatch):
    """What a test imports is gone afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        del sys.modules[name]


def test_a_file_can_import_its_neighbours(tmp_path, modules):
    """Plainly, or relatively in a package; later too."""
    package = tmp_path / "src" / "they"
    package.mkdir(parents=True)
    files = {
        "they/__init__.py": "",
        "they/scale.py": "FACTOR = 2.0\n",
        "they/rewards.py": "from .scale import FACTOR\nfrom they import scale\ndef mine(completions):\n"
        "    return [FACTOR] * len(completions)\n",
        "nearby.py": "FACTOR = 3.0\n",
        "afar.py": "def mine(completions):\n    import nearby\n    return [nearby.FACTOR] * len(completions)\n",
    }
    for name, text in files.items():
        (tmp_path / "src" / name).write_text(text)
    given = dict(prompts=["p"], completions=["c"], completion_ids=[[1]])
    names = [f"{package}/rewards.py:mine", f"{tmp_path}/src/afar.py:mine", "they.rewards:mine"]
    assert call_rewards([load_reward(name, []) for name in names], given) == [[2.0], [3.0], [2.0]]
    with pytest.raises(UserError, match=r"--reward they.reward:mine: they.reward could not be loaded: ModuleNotFound"):
        load_reward("they.reward:mine", [])


def broken(folder: Path) -> list[str]:
    (folder / "needs.py").write_text("x = 1\nimport no_such_module\n")
    (folder / "broken.py").write_text("def good(:\n")
    return [f"{folder}/needs.py:good", f"{folder}/broken.py:good"]


def test_a_name_without_a_file_is_that_of_one_of_the_tasks_own():
    with pytest.raises(UserError, match=r"--reward sum: must be .*, or exact_sum of the task$"):
        load_reward("sum", ["exact_sum"])


def test_a_file_that_raises_shows_its_own_frames(tmp_path):
    needs, syntax = broken(tmp_path)
    with pytest.raises(UserError, match=r"--reward .*: .*/needs.py could not be loaded: ModuleNotFoundError") as told:
        load_reward(needs, [])
    assert told.value.__notes__ == [f'  File "{tmp_path}/needs.py", line 2, in <module>\n    import no_such_module']
    with pytest.raises(UserError, match=r"--reward .*: .*/broken.py could not be loaded: SyntaxError") as told:
        load_reward(syntax, [])
    (note,) = told.value.__notes__
    assert note.startswith(f'  File "{tmp_path}/broken.py", line 1\n    def good(:\n') and "SyntaxError" not in note


def test_what_is_wrong_with_several_files_is_told_at_once(tmp_path, rewards_file):
    rewards = [f"{rewards_file}:good", *broken(tmp_path)]
    with pytest.raises(UserError) as told:
        load_files(str(tmp_path / "none.jsonl"), rewards, Task([], [], [], []))
    lines = str(told.value).split("\n")
    words = ["--data", "error: --reward", "error: --reward"]
    assert len(lines) == 3 and all(map(str.startswith, lines, words)), lines
    assert [re.findall(r"(\w+)\.py", note) for note in told.value.__notes__] == [["needs"], ["broken"]]


def test_the_frames_of_a_long_stack_are_its_two_ends(rewards_file):
    with pytest.raises(UserError, match="reward function fails raised ZeroDivisionError: division by zero") as told:
        call_rewards(
            [load_reward(f"{rewards_file}:fails", [])], dict(prompts=[""], completions=["a"], completion_ids=[[1]])
        )
    (note,) = told.value.__notes__
    frames = re.findall(r'File "(.*)", line \d+, in (\w+)', note)
    assert {file for file, _ in frames} == {str(rewards_file)} and len(frames) == MOST_FRAMES
    names = [name for _, name in frames]
    assert names[:3] == ["fails", "share", "half"] and names[-2:] == ["share", "half"] and "\n  ...\n" in note


def test_long_prompts_are_shown_in_part():
    assert excerpt("a\nb") == r"'a\nb'"
    assert len(excerpt("x" * 10**6)) < 220 and excerpt("x" * 201).endswith("...'")
    chat = [{"role": "user", "content": "1+1"}]
    assert json.dumps(chat) in excerpt(chat)
