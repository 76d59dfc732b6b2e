"""Read the rows of a task from users' files or from the hub, and check them. Left out: streaming."""

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from config import Config, UserError

# suffix -> the name of the format in Hugging Face's `datasets`
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
ADDED_COLUMNS = ("prompt_ids", "_index")  # check_prompts adds these to the rows
# What every reward may take, besides the columns of the rows. If the task replies, there is also `turns`.
REWARD_ARGUMENTS = ["prompts", "completions", "completion_ids", "truncated"]
REWARD_ARGUMENTS += ["trainer_state", "log_metric", "log_extra"]


def read_rows(source: str, to_row: Callable[[dict], dict] = dict) -> list[dict]:
    """Read the rows of a .jsonl file, of another file that the package `datasets` can read, or of the train split of a
    data set on the hub. A file with an unknown suffix is read as .jsonl."""
    kind = FORMATS.get(Path(source.removesuffix(".gz")).suffix)
    if kind and not Path(source).is_file():
        raise UserError(f"{source}: there is no such file")
    # A plain .jsonl is read here. A .jsonl.gz and the other formats are left to `datasets`.
    if source.endswith(".jsonl") or (kind is None and Path(source).is_file()):
        numbered = read_lines(source)
    else:
        found = load_with_datasets(kind, "train", data_files=source) if kind else load_with_datasets(source, "train")
        numbered = enumerate(found, start=1)
    rows = []
    for number, content in numbered:
        row = to_row(content) if isinstance(content, dict) else {}
        if not is_prompt(row.get("prompt")):
            raise UserError(f'{source}:{number}: needs a "prompt", a string or chat messages: {content!r:.200}')
        rows.append(row)
    columns = {name for row in rows for name in row}
    if taken := [name for name in (*ADDED_COLUMNS, *REWARD_ARGUMENTS, "turns") if name in columns]:
        raise UserError(f"{source}: has a column {taken[0]}, a name that this program uses itself: rename the column")
    return with_all_columns(rows)


def with_all_columns(rows: list[dict]) -> list[dict]:
    """Give every row the columns of all rows, with None where it has none: a reward gets each column as a list, with a
    value for each row."""
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name) for name in columns} for row in rows]


def read_lines(source: str) -> Iterator[tuple[int, Any]]:
    """Yield the number and the content of each line that is not blank."""
    for number, line in enumerate(Path(source).read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise UserError(f"{source}:{number}: not JSON: {error}") from None


def is_prompt(prompt: Any) -> bool:
    """Return whether this is a string, or a list of messages that have a role and a content."""
    if not isinstance(prompt, list):
        return isinstance(prompt, str)
    messages = [message for message in prompt if isinstance(message, dict)]
    texts = [message.get(key) for message in messages for key in ("role", "content")]
    return prompt != [] and messages == prompt and all(isinstance(text, str) for text in texts)


def load_with_datasets(name: str, split: str, subset: str | None = None, data_files: str | None = None) -> list[dict]:
    """Return the rows of a data set on the hub, or of a file. For a file, `name` is its format."""
    try:
        import datasets  # not needed for .jsonl files

        return list(datasets.load_dataset(name, subset, split=split, data_files=data_files))
    except Exception as error:  # there are many kinds, some with very long tracebacks
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{data_files or name}: the package datasets cannot read it: {why:.300}") from None


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
