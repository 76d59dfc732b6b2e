"""A compact list of sets of token ids: for each sampled token, the ids that top-k, top-p or min-p had left.

Plainly:

    kept: list[np.ndarray | None] = []
    kept.append(ids)                 # the set of the next token; None means the whole vocabulary

It is used like such a list: `kept[t]` is the set of token t. It is compressed because every rank holds one set for each
token of a step, and a flat distribution leaves most of the vocabulary. With 152,000 ids, a set takes 19 kB at most
instead of 600 kB.

All sets stand one after another in one flat int32 array; `offsets` says where each of them begins and ends. A set of
more than 1/32 of the vocabulary is stored as -1 followed by one bit for each id of the vocabulary.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np


@dataclass
class KeptSets:
    words: array = field(default_factory=lambda: array("i"))
    offsets: array = field(default_factory=lambda: array("q", [0]))

    def append(self, ids: np.ndarray, vocabulary: int) -> None:
        if 32 * len(ids) > vocabulary:
            bits = np.zeros(-(-vocabulary // 32) * 32, dtype=bool)
            bits[ids] = True
            self.words.append(-1)
            ids = np.packbits(bits).view(np.int32)
        self.words.frombytes(ids.tobytes())
        self.offsets.append(len(self.words))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, t: int) -> np.ndarray | None:
        t = range(len(self))[t]  # allows negative indices, and raises IndexError past the end
        words = np.frombuffer(self.words, np.int32)[self.offsets[t] : self.offsets[t + 1]]
        if len(words) == 0:
            return None
        if words[0] >= 0:
            return words
        return np.unpackbits(words[1:].view(np.uint8)).nonzero()[0].astype(np.int32)

    def padded(self, before: int, after: int) -> "KeptSets":
        """The same sets, with this many None before and after them. The sets themselves are not copied."""
        return KeptSets(self.words, array("q", [0] * before) + self.offsets + array("q", [len(self.words)] * after))
