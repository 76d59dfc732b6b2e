"""Rows of prompts from files of the user's own, read and checked.

A mistake in them is told in a line that names the file and the row. Where the user's code raises, the frames of their
file go with it as a note. Left out: any format but .jsonl and hub data sets, and streaming: all rows are in memory.
"""

import contextlib
import importlib
import json
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

from config import Config, UserError

CALLERS = [Path(__file__).with_name(name) for name in ("__init__.py", "_files.py", "_rewards.py")]
OURS = {importlib.__file__, contextlib.__file__, *map(str, CALLERS)}  # what calls the user's code
MOST_FRAMES = 20


# ---- Rows ----


def read_rows(source: str) -> list[dict]:
    """A .jsonl file, or the train split of a hub data set."""
    if not source.endswith((".jsonl", ".json")) and not Path(source).exists():
        rows = load_hub(source, split="train")
        for number, row in enumerate(rows, start=1):
            check_row(row, f"{source}, row {number}")
        return rows
    try:
        text = Path(source).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"--data {source}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        line = Path(source).read_bytes()[: error.start].count(b"\n") + 1
        raise UserError(f"{source}:{line}: not UTF-8 text; save the file as UTF-8") from None
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            rows.append(read_row(line, f"{source}:{number}"))
    if not rows:
        raise UserError(f'--data {source}: holds no rows; each line must be like {{"prompt": "..."}}')
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]  # the same columns in every call of a reward


def read_row(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{where}: not JSON that can be read: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f'{where}: holds a {type(row).__name__}; each line must be an object with a "prompt"')
    check_row(row, where)
    return row


def check_row(row: dict, where: str) -> None:
    if "prompt" not in row:
        raise UserError(f'{where}: has no "prompt"; it has {", ".join(map(repr, row)) or "nothing"}')
    prompt = row["prompt"]
    if not (isinstance(prompt, str) or are_messages(prompt)):
        raise UserError(f'{where}: "prompt" must be a string or a list of chat messages: {excerpt(prompt)}')
    for name in ("prompts", "completions", "completion_ids"):
        if name in row:
            raise UserError(f"{where}: a column is named {name!r}, which every reward is given already; rename it")


def are_messages(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in prompt)


def load_hub(name: str, split: str, subset: str | None = None) -> list[dict]:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name} is no file, and a hub data set needs the package datasets: pip install datasets, "
            "or give --data a .jsonl file"
        ) from None
    try:
        rows = [dict(row) for row in datasets.load_dataset(name, subset, split=split)]
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UserError(f"data set {name} could not be loaded: {reason}") from error
    return rows


def hub_splits(config: Config, name: str, subset: str | None = None) -> tuple[list[dict], list[dict]]:
    """Rows to train on and held-out ones; none where --data brings others."""
    if config.data:
        return [], []
    return load_hub(name, split="train", subset=subset), load_hub(name, split="test", subset=subset)


def hold_out(rows: list[dict], count: int, source: str) -> tuple[list[dict], list[dict]]:
    """`count` prompts for evaluation, chosen by a hash: the same in every run, and a prompt that stands twice is on one
    side. The order of the file does not matter."""
    keys = [zlib.crc32(json.dumps(row["prompt"]).encode()) for row in rows]
    chosen = set(sorted(set(keys))[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = {key: row for row, key in zip(rows, keys, strict=True) if key in chosen}
    if not train:
        raise UserError(
            f"{source} has {len(set(keys))} prompts and {count} are held out, which leaves none to train on: "
            "lower --eval_prompts, or set --eval_every 0"
        )
    return train, list(held.values())


# ---- What is told ----


@contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """An exception of the user's code becomes one line, and the frames of their file a note."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        told = UserError(f"{what} {type(error).__name__}: {' '.join(str(error).splitlines())}")
        frames = frames_of_user(error)
        if frames:
            told.add_note(frames)
        raise told from error


def frames_of_user(error: BaseException) -> str:
    """From the first frame that is theirs; of a long stack, its two ends."""
    stack = traceback.extract_tb(error.__traceback__)
    theirs = dropwhile(lambda frame: frame.filename in OURS or frame.filename.startswith("<frozen importlib"), stack)
    lines = traceback.format_list(list(theirs))
    if len(lines) > MOST_FRAMES:
        lines = [*lines[: MOST_FRAMES // 2], "  ...\n", *lines[-MOST_FRAMES // 2 :]]
    if isinstance(error, SyntaxError):  # which no frame shows
        lines += traceback.format_exception_only(error)[:-1]
    return "".join(lines).rstrip()


def excerpt(prompt: Any) -> str:
    """Of a prompt or a completion: enough to find it by."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, default=str)
    return repr(text if len(text) <= 200 else text[:200] + "...")
