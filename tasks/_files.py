"""Rows of prompts from files of the user's own, or from the hub, read and checked. Left out: streaming."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config import Config, UserError

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # that the package datasets reads


def read_rows(source: str, to_row: Callable[[dict], dict] = dict) -> list[dict]:
    """A file with a row in JSON on each line, another file that the package datasets can read, or the train split of a
    hub data set. Every row has all columns, so that calls of a reward do too."""
    ending = Path(source.removesuffix(".gz")).suffix
    if ending in FORMATS and not Path(source).is_file():
        raise UserError(f"{source}: there is no such file")
    if source.endswith(".jsonl") or (ending not in FORMATS and Path(source).is_file()):
        rows = read_lines(source)
    else:
        files = {"data_files": source} if ending in FORMATS else {}
        rows = dict(enumerate(load_hub(FORMATS.get(ending, source), split="train", **files), start=1))
    rows = {number: to_row(row) if isinstance(row, dict) else row for number, row in rows.items()}
    for number, row in rows.items():
        if not isinstance(row, dict) or not is_prompt(row.get("prompt")):
            needs = 'an object with a "prompt", a string or a list of chat messages'
            raise UserError(f"{source}:{number}: must be {needs}, not {excerpt(row)}")
    if not rows:
        raise UserError(f'{source}: holds no rows; each line must be like {{"prompt": "..."}}')
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    return [{name: row.get(name) for name in columns} for row in rows.values()]


def read_lines(source: str) -> dict[int, Any]:
    """-> what stands on each line, by its number"""
    rows = {}
    for number, line in enumerate(Path(source).read_bytes().split(b"\n"), start=1):
        try:
            if line.strip():
                rows[number] = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source}:{number}: not JSON: {error}") from None
    return rows


def is_prompt(prompt: Any) -> bool:
    return isinstance(prompt, str) or (isinstance(prompt, list) and prompt != [] and all(map(is_message, prompt)))


def is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def load_hub(name: str, split: str, subset: str | None = None, **files: str) -> list[dict]:
    try:
        import datasets
    except ImportError:
        source = files.get("data_files", name)
        raise UserError(f"{source}: all but .jsonl needs the package datasets: pip install datasets") from None
    return list(datasets.load_dataset(name, subset, split=split, **files))


def hub_splits(config: Config, name: str, subset: str | None = None) -> tuple[list[dict], list[dict]]:
    """Rows to train on and held-out ones; none where --data brings others."""
    if config.data:
        return [], []
    return load_hub(name, split="train", subset=subset), load_hub(name, split="test", subset=subset)


def hold_out(rows: list[dict], count: int) -> tuple[list[dict], list[dict]]:
    """`count` prompts for evaluation, but no more than a fifth, or one of a few. They are chosen by a hash: the same in
    every run, and a prompt that stands twice is on one side. The order of the file does not matter."""
    keys = [zlib.crc32(json.dumps(row["prompt"]).encode()) for row in rows]
    distinct = sorted(set(keys))
    chosen = set(distinct[: min(count, max(1, len(distinct) // 5), len(distinct) - 1)])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = {key: row for row, key in zip(rows, keys, strict=True) if key in chosen}
    return train, list(held.values())


def excerpt(x: Any) -> str:
    """Enough to find it by."""
    text = repr(x)
    return text if len(text) <= 200 else text[:200] + "..."
