"""Command-line tools for use before and after training: `python -m tools.NAME`."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Exit with the name of the folder if the block cannot read it: it has no run, or only a part of one."""
    try:
        yield
    except Exception as error:
        sys.exit(f"error: {folder} does not have the files of a run: {error!r}")
