"""A model made ready for decoding, and back: its weights in the dtype of the computation, and whole where they are
sharded; logits in fp32."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from infra.shard import is_sharded, unsharded
from logprob import forward_replaced, head_returns_logits, linear_in_fp32


@contextmanager
def decoding(model: PreTrainedModel, dtype: torch.dtype) -> Iterator[None]:
    weights_at_hand = unsharded(model) if is_sharded(model) else weights_in(model, dtype)
    with weights_at_hand, logits_in_fp32(model) if dtype != torch.float32 else nullcontext():
        yield


@contextmanager
def logits_in_fp32(model: PreTrainedModel) -> Iterator[None]:
    """As in scoring: of the states and weights of the computation, not rounded to their dtype."""
    if not head_returns_logits(model, torch.zeros(1, 2, dtype=torch.long, device=model.device)):
        yield
        return
    head = model.get_output_embeddings()
    with forward_replaced(head, lambda hidden: linear_in_fp32(hidden, head.weight, head.bias)):
        yield


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
