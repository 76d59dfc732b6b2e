"""A cache of keys and values with room for more tokens, so that new tokens are written in place.

The plain computation, in every layer and for every token, is:

    keys, values = torch.cat([keys, new_keys], dim=-2), torch.cat([values, new_values], dim=-2)

It copies the whole cache for each token. Here the cache is copied only when rows leave the batch, and when it is full.
The copy has room for a quarter more tokens than it holds, or for 64 more if that is larger, up to max_tokens in all.
"""

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer


def make_room(cache: Cache | None, max_tokens: int) -> None:
    """Let every ordinary layer of the cache grow in place, up to max_tokens tokens in all. Layers of other kinds, such
    as those with a sliding window, stay as they are."""
    for i, layer in enumerate(cache.layers if cache is not None else []):
        if type(layer) is DynamicLayer and layer.is_initialized:
            cache.layers[i] = GrowingLayer(layer, max_tokens)


class GrowingLayer(DynamicLayer):
    def __init__(self, layer: DynamicLayer, max_tokens: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.max_tokens = max_tokens
        self._move(layer.keys, layer.values)

    def _move(self, keys: Tensor, values: Tensor) -> None:
        """Copy these keys and values (B, H, T, D) into new buffers that have space for more."""
        n = keys.shape[-2]
        size = min(self.max_tokens, n + max(64, n // 4))
        self.buffers = [x.new_empty(*x.shape[:2], size, x.shape[-1]) for x in (keys, values)]
        self._write(0, keys, values)

    def _write(self, start: int, keys: Tensor, values: Tensor) -> None:
        end = start + keys.shape[-2]
        for buffer, x in zip(self.buffers, (keys, values)):
            buffer[:, :, start:end] = x
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        if start + key_states.shape[-2] > self.buffers[0].shape[-2]:
            self._move(self.keys, self.values)
        self._write(start, key_states, value_states)
        return self.keys, self.values

    def reorder_cache(self, rows: Tensor) -> None:
        """Keep only these rows, in this order. transformers has given this method its name."""
        self._move(self.keys.index_select(0, rows), self.values.index_select(0, rows))
