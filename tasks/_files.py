"""Rows of prompts from files of the user's own, or from the hub, read and checked. Left out: streaming."""

import json
import zlib
from pathlib import Path
from typing import Any

from config import Config, UserError

FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # that the package datasets reads


def read_rows(source: str) -> list[dict]:
    """A file with a row in JSON on each line, another file that the package datasets can read, or the train split of a
    hub data set. Every row has all columns, so that calls of a reward do too."""
    ending = Path(source.removesuffix(".gz")).suffix
    if ending in FORMATS and not Path(source).is_file():
        raise UserError(f"{source}: there is no such file")
    if source.endswith(".jsonl") or (ending not in FORMATS and Path(source).is_file()):
        rows = read_lines(source)
    elif ending in FORMATS:
        rows = dict(enumerate(load_hub(FORMATS[ending], split="train", data_files=source), start=1))
    else:
        rows = dict(enumerate(load_hub(source, split="train"), start=1))
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
    try:
        lines = Path(source).read_text(encoding="utf-8-sig").split("\n")  # splitlines would also split inside of text
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows[number] = json.loads(line)
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source}:{number}: not JSON: {error}") from None
    return rows


def is_prompt(prompt: Any) -> bool:
    if not isinstance(prompt, list):
        return isinstance(prompt, str)
    return prompt != [] and all(map(is_message, prompt))


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


def hold_out(rows: list[dict], count: int, source: str) -> tuple[list[dict], list[dict]]:
    """`count` prompts for evaluation, but no more than a fifth. They are chosen by a hash: the same in every run, and a
    prompt that stands twice is on one side. The order of the file does not matter."""
    keys = [zlib.crc32(json.dumps(row["prompt"]).encode()) for row in rows]
    chosen = set(sorted(set(keys))[: min(count, max(1, len(set(keys)) // 5))])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = {key: row for row, key in zip(rows, keys, strict=True) if key in chosen}
    if not train:
        raise UserError(f"{source}: all of its prompts would be held out: give --eval_data, or set --eval_every 0")
    return train, list(held.values())


def excerpt(x: Any) -> str:
    """Enough to find it by."""
    text = repr(x)
    return text if len(text) <= 200 else text[:200] + "..."
