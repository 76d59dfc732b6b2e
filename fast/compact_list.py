"""A field of a dataclass that is read and set as a list, but stored and pickled as an array.

The plain version is:

    ids: list[int]

Every rank has all completions of a step. A list of Python numbers takes about 36 bytes for each number, where an array
takes 4. At 512 prompts with 16 completions of 4,096 tokens, lists of ids and log-probs would take 2.4 GB.

Every access makes a new list. So read the field once before a loop, and assign a whole list to change it.
"""

from typing import Any

import numpy as np


class CompactList:
    def __init__(self, dtype: Any, optional: bool = False):
        self.dtype, self.optional = dtype, optional  # an optional field is None by default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type) -> list | None:
        # With instance=None, the dataclass asks for the field's default. Only optional fields have one (None).
        if instance is None and not self.optional:
            raise AttributeError(self.name)
        array = None if instance is None else vars(instance)[self.name]
        return None if array is None else array.tolist()

    def __set__(self, instance: Any, values: Any) -> None:
        vars(instance)[self.name] = None if values is None else np.array(values, self.dtype)
