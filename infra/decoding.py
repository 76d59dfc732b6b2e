"""A model made ready for decoding, and back: its weights in the dtype of the computation, and whole where they are
sharded."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from infra.shard import is_sharded, unsharded


def decoding(model: PreTrainedModel, dtype: torch.dtype) -> AbstractContextManager:
    return unsharded(model) if is_sharded(model) else weights_in(model, dtype)


@contextmanager
def weights_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Decoding reads half the bytes in bf16. The fp32 weights come back untouched; buffers (rotary frequencies) keep
    their precision."""
    parameters = list(model.parameters())
    weights = [p.data for p in parameters]
    try:
        for p in parameters:
            p.data = p.data.to(dtype)
        yield
    finally:
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight
