"""A model made ready for decoding, and back: its weights in the dtype of the computation, gathered where they are
sharded, and attention that repeats no keys."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from infra.shard import gathered, is_sharded


@contextmanager
def decoding(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    attention = model.config._attn_implementation
    weights_at_hand = gathered(model) if is_sharded(model) else weights_in(model, dtype)
    with weights_at_hand:
        try:
            if attention == "sdpa":
                model.set_attn_implementation("grouped")
            yield
        finally:
            model.set_attn_implementation(attention)


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


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # (B, heads, T, D)
    key: Tensor,  # (B, key heads, S, D)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Of one token a row: the heads that share a key head are taken as its queries. Under a mask transformers before
    5.23 copies keys and values of the whole cache for each of them instead."""
    B, heads, T, D = query.shape
    if T > 1 or attention_mask is None or heads == key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    queries = query.reshape(B, key.shape[1], heads // key.shape[1], D)
    out = F.scaled_dot_product_attention(queries, key, value, attention_mask, scale=scaling)
    return out.reshape(B, 1, heads, value.shape[-1]), None


AttentionInterface.register("grouped", grouped_attention)
AttentionMaskInterface.register("grouped", sdpa_mask)
