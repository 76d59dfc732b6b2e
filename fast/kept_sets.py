"""The kept sets of a completion: for each sampled token, the ids that remained after top-k, top-p and min-p.

The plain way to store them is:

    kept: list[np.ndarray | None] = []
    kept.append(ids)                 # the set of the next token; None if no set is stored for it

KeptSets is used like this list: `kept[t]` is the set of token t. It is compressed, because every rank has the sets of
all tokens of a step, and a flat distribution keeps most of the vocabulary. With 152,000 ids, a set takes at most 19 kB
instead of 600 kB.

The sets are stored one after another in a flat array of 32-bit words, and `offsets` says where each of them begins and
ends. A set of more than 1/32 of the vocabulary is stored as -1, followed by one bit for each id of the vocabulary.

While a batch is sampled, `SetsOfBatch` collects the sets of several tokens on the device before it copies them, so that
the host does not wait for the device at every token.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

# Whenever every row has this many new tokens, their sets are copied to the host. Until then, they take one bit on the
# device for each token and each id of the vocabulary.
TOKENS_ON_DEVICE = 16


@dataclass
class KeptSets:
    words: array = field(default_factory=lambda: array("i"))
    offsets: array = field(default_factory=lambda: array("q", [0]))

    def append(self, ids: np.ndarray, vocabulary: int) -> None:
        words = ids  # one int32 word for each id
        if 32 * len(ids) > vocabulary:
            bits = np.zeros(-(-vocabulary // 32) * 32, dtype=bool)
            bits[ids] = True
            self.words.append(-1)
            words = np.packbits(bits).view(np.int32)
        self.words.frombytes(words.tobytes())
        self.offsets.append(len(self.words))

    def extend(self, ids: np.ndarray, counts: np.ndarray, vocabulary: int) -> None:
        """Append several sets. Their ids are given one after another, and counts are their sizes."""
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
        if len(words) == 0:  # no set was stored, for instance because this token belongs to the prompt
            return None
        if words[0] >= 0:
            return words
        return np.unpackbits(words[1:].view(np.uint8)).view(bool).nonzero()[0].astype(np.int32)

    def padded(self, before: int, after: int) -> "KeptSets":
        """Return a longer list: None for the first `before` tokens, then these sets, then None for `after` more tokens.
        A token with None has no words: it begins and ends at the same offset. The sets are not copied."""
        return KeptSets(self.words, array("q", [0] * before) + self.offsets + array("q", [len(self.words)] * after))


class SetsOfBatch:
    def __init__(self, rows: int):
        self.sets = [KeptSets() for _ in range(rows)]
        self.bits: list[Tensor] = []  # (B, V / 32) for each token whose sets are still on the device

    def append(self, in_set: Tensor, rows: Tensor) -> None:
        """Add the sets of the next token of these rows (B,). Every call must pass the same rows until `to_host` is
        called. in_set (B, V) is True for the ids in a set."""
        self.vocabulary = in_set.shape[1]
        # This is np.packbits on the device: 8 ids for each byte, the first id in its highest bit.
        eights = F.pad(in_set, (0, -in_set.shape[1] % 32)).view(len(in_set), -1, 8)
        powers = 2 ** torch.arange(7, -1, -1, dtype=torch.uint8, device=in_set.device)
        self.bits.append((eights * powers).sum(-1, dtype=torch.uint8).view(torch.int32))
        if len(self.bits) == TOKENS_ON_DEVICE:
            self.to_host(rows)

    def to_host(self, rows: Tensor) -> None:
        """Copy the sets that were appended for these rows to the host. Call this before rows leave, and at the end."""
        if not self.bits:
            return
        bits = torch.stack(self.bits, 1)
        B, T, W = bits.shape  # rows, tokens, words of 32 ids
        self.bits.clear()
        # Copy only the words that are not 0, and their places in the flat `bits`. The place of word w of a token is
        # (row * T + token) * W + w. Places and words are stacked (as int64), so that one copy is enough.
        place = bits.flatten().nonzero().squeeze(1)
        place, words = torch.stack([place, bits.flatten()[place]]).cpu().numpy()
        # Unpack every copied word into 32 booleans, one for each id. For each True, `which` is the index of its word in
        # `words`, and `bit` is its number in that word.
        which, bit = np.unpackbits(words.astype(np.int32).view(np.uint8)).view(bool).reshape(-1, 32).nonzero()
        ids = (place[which] % W * 32 + bit).astype(np.int32)
        counts = np.bincount(place[which] // W, minlength=B * T).reshape(B, T)
        for row, its_ids, its_counts in zip(rows.tolist(), np.split(ids, counts.sum(1).cumsum()[:-1]), counts):
            self.sets[row].extend(its_ids, its_counts, self.vocabulary)
