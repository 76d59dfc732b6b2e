"""A compact list of sets of token ids: for each sampled token, the ids that top-k, top-p or min-p had left.

Plainly:

    kept: list[np.ndarray | None] = []
    kept.append(ids)                 # the set of the next token; None means the whole vocabulary

It is used like such a list: `kept[t]` is the set of token t. It is compressed because every rank holds one set for each
token of a step, and a flat distribution leaves most of the vocabulary. With 152,000 ids, a set takes 19 kB at most
instead of 600 kB.

All sets stand one after another in one flat int32 array; `offsets` says where each of them begins and ends. A set of
more than 1/32 of the vocabulary is stored as -1 followed by one bit for each id of the vocabulary.

While a batch is sampled, `SetsOfBatch` keeps the sets of the last tokens on the device, so that the host does not wait
for the device at every token.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

TOKENS_ON_DEVICE = 16  # they take two bytes for each id of the vocabulary and each row


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

    def extend(self, ids: np.ndarray, counts: np.ndarray, vocabulary: int) -> None:
        """Append several sets, whose ids stand one after another."""
        if 32 * counts.max() > vocabulary:
            for one in np.split(ids, counts.cumsum()[:-1]):
                self.append(one, vocabulary)
        else:
            self.offsets.extend((len(self.words) + counts.cumsum()).tolist())
            self.words.frombytes(ids.tobytes())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, t: int) -> np.ndarray | None:
        t = range(len(self))[t]  # allows negative indices, and raises IndexError past the end
        words = np.frombuffer(self.words, np.int32)[self.offsets[t] : self.offsets[t + 1]]
        if len(words) == 0:
            return None
        if words[0] >= 0:
            return words
        return np.unpackbits(words[1:].view(np.uint8)).view(bool).nonzero()[0].astype(np.int32)

    def padded(self, before: int, after: int) -> "KeptSets":
        """The same sets, with this many None before and after them. The sets themselves are not copied."""
        return KeptSets(self.words, array("q", [0] * before) + self.offsets + array("q", [len(self.words)] * after))


class SetsOfBatch:
    def __init__(self, rows: int):
        self.sets = [KeptSets() for _ in range(rows)]
        self.bits: list[Tensor] = []  # of each token that is still on the device, (B, V / 32)

    def append(self, left: Tensor, rows: Tensor) -> None:
        """left (B, V) says which ids are in the set of the next token of these rows (B,)."""
        self.vocabulary = left.shape[1]
        eights = F.pad(left, (0, -left.shape[1] % 32)).view(len(left), -1, 8)
        places = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=left.device)
        self.bits.append((eights * places).sum(-1, dtype=torch.uint8).view(torch.int32))
        if len(self.bits) == TOKENS_ON_DEVICE:
            self.to_host(rows)

    def to_host(self, rows: Tensor) -> None:
        """Copy to the host what is on the device. Must be called before `rows` change, and at the end."""
        if not self.bits:
            return
        bits = torch.stack(self.bits, 1)  # (B, t, V / 32)
        (B, t, W), bits = bits.shape, bits.flatten()
        self.bits.clear()
        at = bits.nonzero().squeeze(1)
        at, words = torch.stack([at, bits[at]]).cpu().numpy()  # only these words have ids in them
        word, bit = np.unpackbits(words.astype(np.int32).view(np.uint8)).view(bool).reshape(-1, 32).nonzero()
        ids = (at[word] % W * 32 + bit).astype(np.int32)
        counts = np.bincount(at[word] // W, minlength=B * t).reshape(B, t)
        for row, its_ids, its_counts in zip(rows.tolist(), np.split(ids, counts.sum(1).cumsum()[:-1]), counts):
            self.sets[row].extend(its_ids, its_counts, self.vocabulary)
