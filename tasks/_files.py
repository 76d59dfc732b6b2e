"""Rows of prompts from users' files or from the hub, read and checked. Left out: streaming."""

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from config import Config, UserError

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # that the package datasets reads


def read_rows(source: str, to_row: Callable[[dict], dict] = dict) -> list[dict]:
    """Read a file with a row in JSON on each line, another file that the package datasets can read, or the train split
    of a data set on the hub. Every row gets the columns of all rows, because a reward is called with several rows."""
    kind, is_file = FORMATS.get(Path(source.removesuffix(".gz")).suffix), Path(source).is_file()
    if kind and not is_file:
        raise UserError(f"{source}: there is no such file")
    if is_file and (source.endswith(".jsonl") or not kind):
        rows = dict(read_lines(source))
    else:
        rows = dict(enumerate(load_hub(kind or source, "train", data_files=source if kind else None), start=1))
    rows = {number: to_row(row) if isinstance(row, dict) else row for number, row in rows.items()}
    for number, row in rows.items():
        if not isinstance(row, dict) or not is_prompt(row.get("prompt")):
            raise UserError(f'{source}:{number}: needs a "prompt", a string or chat messages: {row!r:.200}')
    columns = dict.fromkeys(name for row in rows.values() for name in row)
    return [{name: row.get(name) for name in columns} for row in rows.values()]


def read_lines(source: str) -> Iterator[tuple[int, Any]]:
    """-> the number and the content of each line"""
    for number, line in enumerate(Path(source).read_bytes().split(b"\n"), start=1):
        try:
            if line.strip():
                yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source}:{number}: not JSON: {error}") from None


def is_prompt(prompt: Any) -> bool:
    if not isinstance(prompt, list):
        return isinstance(prompt, str)
    texts = [message.get(key) for message in prompt if isinstance(message, dict) for key in ("role", "content")]
    return len(texts) == 2 * len(prompt) > 0 and all(isinstance(text, str) for text in texts)


def load_hub(name: str, split: str, subset: str | None = None, data_files: str | None = None) -> list[dict]:
    try:
        import datasets  # only needed here

        return list(datasets.load_dataset(name, subset, split=split, data_files=data_files))
    except Exception as error:  # of many kinds
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{data_files or name}: the package datasets cannot read it: {why:.300}") from None


def hub_splits(config: Config, name: str, subset: str | None = None) -> tuple[list[dict], list[dict]]:
    """Rows to train on and held-out rows; none if --data replaces them."""
    if config.data:
        return [], []
    return load_hub(name, "train", subset), load_hub(name, "test", subset)


def hold_out(rows: list[dict], count: int) -> tuple[list[dict], list[dict]]:
    """Hold out `count` prompts for evaluation, but at most a fifth of them, and at least one. A hash chooses them, so
    that they are the same in every run, whatever the order of the rows, and equal prompts are on the same side."""
    keys = [zlib.crc32(json.dumps(row["prompt"]).encode()) for row in rows]
    distinct = sorted(set(keys))
    chosen = set(distinct[: min(count, max(1, len(distinct) // 5), len(distinct) - 1)])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = {key: row for row, key in zip(rows, keys, strict=True) if key in chosen}
    return train, list(held.values())
