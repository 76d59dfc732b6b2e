"""Read the rows of a task from users' files or from the hub, which needs the package datasets (requirements-gpu.txt).
Left out: streaming."""

import csv
import glob
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from config import Config, UserError, needs

# What this program adds to the rows: the first two when prompts are encoded, the last one to those of --eval_data.
ADDED_COLUMNS = ("prompt_ids", "_index", "eval_data")
REWARD_ARGUMENTS = "prompts completions completion_ids truncated trainer_state log_metric log_extra".split()


def read_rows(source: str, to_row: Callable[[dict], dict] = dict) -> list[dict]:
    """Read the rows of a .jsonl, .json, .csv or .parquet file, or of the train split of a data set on the hub. The
    package datasets would guess types: a date in .json, and in .csv 7 for "007" and None for "NA". Here, the values of
    .json stay as they are, and all values of .csv are texts."""
    try:
        contents = contents_of(source)
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"{source} cannot be read: {error}") from error
    if not contents:
        raise UserError(f"{source} has no rows")
    rows = []
    for number, content in enumerate(contents, start=1):
        try:
            row = to_row(content) if isinstance(content, dict) else {}
        except KeyError as error:
            raise UserError(f"{source}, row {number}: the task needs a column {error}: {content!r:.200}") from error
        if not is_prompt(row.get("prompt")):
            raise UserError(f'{source}, row {number}: needs a "prompt", a string or chat messages: {content!r:.200}')
        rows.append(row)
    if taken := {name for row in rows for name in row} & {*ADDED_COLUMNS, *REWARD_ARGUMENTS, "turns"}:
        raise UserError(f"{source}: rename {', '.join(sorted(taken))}: this program has columns of that name itself")
    return with_all_columns(rows)


def contents_of(source: str) -> list[dict]:
    """Return the rows as they are in the source."""
    kind = Path(source).suffix.removeprefix(".")
    if kind in ("jsonl", "json"):
        text = Path(source).read_text("utf-8-sig")
        is_list = text.lstrip().startswith("[")  # many .json files have a row in each line, as .jsonl does
        return json.loads(text) if is_list else [*json_lines(text)]
    if kind == "csv":
        with open(source, newline="", encoding="utf-8-sig") as file:
            names, *lines = [line for line in csv.reader(file, strict=True) if line] or [[]]
        if len({*names}) < len(names):
            raise ValueError(f"two of its columns have the same name: {', '.join(names)}")
        if odd := [line for line in lines if len(line) != len(names)]:
            raise ValueError(f"its columns are {', '.join(names)}, but a row has {len(odd[0])} values: {odd[0]!r:.200}")
        return [dict(zip(names, line)) for line in lines]
    if kind == "parquet":
        return load_with_datasets(kind, "train", data_files=glob.escape(source))
    if Path(source).is_file():
        raise ValueError("its name must end with .jsonl, .json, .csv or .parquet")
    return load_with_datasets(source, "train")


def json_lines(text: str) -> Iterator[dict]:
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            if line.strip():
                yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error


def with_all_columns(rows: list[dict]) -> list[dict]:
    """Give every row the columns of all rows, with None where it has none: a reward gets each column as a list, with a
    value for each row."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def is_prompt(prompt: Any) -> bool:
    """Return whether this is a string, or a list of messages that have a role and a content."""
    if not isinstance(prompt, list):
        return isinstance(prompt, str)
    has_both = [isinstance(x, dict) and {type(x.get("role")), type(x.get("content"))} == {str} for x in prompt]
    return prompt != [] and all(has_both)


def load_with_datasets(name: str, split: str, subset: str | None = None, data_files: str | None = None) -> list[dict]:
    """Return the rows of a data set on the hub, or of a file. For a file, `name` is its format."""
    needs("datasets")
    import datasets

    return list(datasets.load_dataset(name, subset, split=split, data_files=data_files))


def hub_splits(config: Config, name: str, subset: str | None = None) -> tuple[list[dict], list[dict]]:
    """Return the rows of a data set's train split and of its test split. Load neither if --data replaces them."""
    if config.data:
        return [], []
    return load_with_datasets(name, "train", subset), load_with_datasets(name, "test", subset)


def hold_out(rows: list[dict], count: int) -> tuple[list[dict], list[dict]]:
    """Hold out `count` prompts for evaluation, but at most a fifth of the prompts. If there are only 2 to 4 prompts,
    hold out one. If there is only one, hold out none. A hash of each prompt decides which prompts are held out, so the
    choice does not depend on the order of the rows, and rows with the same prompt are either all held out or all
    trained on. Return the rows to train on, and one row for each held-out prompt."""
    keys = [zlib.crc32(json.dumps(row["prompt"]).encode()) for row in rows]
    distinct = sorted(set(keys))
    chosen = set(distinct[: min(count, max(1, len(distinct) // 5), len(distinct) - 1)])
    train = [row for row, key in zip(rows, keys, strict=True) if key not in chosen]
    held = {key: row for row, key in zip(rows, keys, strict=True) if key in chosen}
    return train, list(held.values())
