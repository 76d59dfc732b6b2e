"""Rows of prompts from files of the user's own, read and checked.

A mistake in them is told in a line that names the file and the row. Where the user's code raises, the frames of their
file go with it as a note. Left out: streaming; all rows are in memory.
"""

import contextlib
import gzip
import importlib
import json
import re
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


class Row(dict):
    """What a row holds, and where it stands."""

    def __init__(self, columns: dict, where: str):
        super().__init__(columns)
        self.where = where


def read_rows(source: str) -> list[dict]:
    """A file, or the train split of a hub data set. Every row has all columns, so that calls of a reward do too."""
    path = Path(source)
    if path.suffix in (".csv", ".parquet") and path.is_file():
        rows = load_hub(path.suffix[1:], split="train", data_files=source)
    elif path.suffix in (".jsonl", ".json", ".gz") or path.exists():
        rows = read_text(source)
    else:
        rows = load_hub(source, split="train")
    for row in rows:
        check_row(row)
    if not rows:
        raise UserError(f'--data {source}: holds no rows; each line must be like {{"prompt": "..."}}')
    columns = dict.fromkeys(name for row in rows for name in row)
    return [Row({name: row.get(name) for name in columns}, row.where) for row in rows]


def read_text(source: str) -> list[Row]:
    """Lines of JSON; in a .json file, one list is fine too."""
    try:
        data = Path(source).read_bytes()
        data = gzip.decompress(data) if source.endswith(".gz") else data
        lines = re.split("\r\n?|\n", data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UserError(f"{source}:{line}: not UTF-8 text; save the file as UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"--data {source}: {getattr(error, 'strerror', None) or error}") from None
    if ".json" in Path(source).suffixes and lines[0].lstrip().startswith("["):
        rows = [(row, f"{source}, row {i}") for i, row in enumerate(read_json("\n".join(lines), source), start=1)]
    else:
        numbered = [(line, f"{source}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
        rows = [(read_json(line, where), where) for line, where in numbered]
    for row, where in rows:
        if not isinstance(row, dict):
            raise UserError(f'{where}: holds a {type(row).__name__}; each row must be an object with a "prompt"')
    return [Row(row, where) for row, where in rows]


def read_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise UserError(f"{where}: not JSON that can be read: {error}") from None


def check_row(row: Row) -> None:
    if "prompt" not in row:
        hint = '; give the turns of "messages" before the answer as "prompt"' if "messages" in row else ""
        raise UserError(f'{row.where}: has no "prompt"; it has {", ".join(map(repr, row)) or "nothing"}{hint}')
    prompt = row["prompt"]
    if not (isinstance(prompt, str) or are_messages(prompt)):
        raise UserError(f'{row.where}: "prompt" must be a string or a list of chat messages: {excerpt(prompt)}')


def are_messages(prompt: Any) -> bool:
    if not isinstance(prompt, list) or not prompt:
        return False
    return all(isinstance(m, dict) and all(isinstance(m.get(k), str) for k in ("role", "content")) for m in prompt)


def load_hub(name: str, split: str, subset: str | None = None, **files: str) -> list[Row]:
    source = files.get("data_files", name)
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{source}: hub data sets, .csv and .parquet files need the package datasets: "
            "pip install datasets, or give --data a .json or .jsonl file"
        ) from None
    try:
        rows = datasets.load_dataset(name, subset, split=split, **files)
        return [Row(row, f"{source}, row {i}") for i, row in enumerate(rows, start=1)]
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UserError(f"data set {name} could not be loaded: {reason}") from error


def hub_splits(config: Config, name: str, subset: str | None = None) -> tuple[list[dict], list[dict]]:
    """Rows to train on and held-out ones; none where --data brings others."""
    if config.data:
        return [], []
    return load_hub(name, split="train", subset=subset), load_hub(name, split="test", subset=subset)


def hold_out(rows: list[dict], count: int, source: str) -> tuple[list[dict], list[dict]]:
    """`count` prompts for evaluation, but no more than a fifth. They are chosen by a hash: the same in every run, and a
    prompt that stands twice is on one side. The order of the file does not matter."""
    keys = [zlib.crc32(json.dumps(row["prompt"]).encode()) for row in rows]
    count = min(count, max(1, len(set(keys)) // 5))
    chosen = set(sorted(set(keys))[:count])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = {key: row for row, key in zip(rows, keys, strict=True) if key in chosen}
    if not train:
        raise UserError(
            f"{source} has {len(set(keys))} prompts and {count} are held out, which leaves none to train on: "
            "give --eval_data, or set --eval_every 0"
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
