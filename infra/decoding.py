"""Prepare a model for decoding, and restore it afterwards.

While it decodes, its weights are in the dtype of the computation, sharded weights are gathered, and logits are in fp32.
With --decode graph, a token is computed by replaying one CUDA graph, if a trial before the first step shows that the
model can. Otherwise Python launches about a thousand kernels for each token.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from fast.output_head import forward_replaced, logits_in_fp32
from infra import faults
from infra.shard import unsharded
from rollout import Sampling, cache_of, rollout

CAPTURING = {"cuda"}  # the kinds of devices that have graphs
FIRST_ROOM = 256  # the first cache of fixed length has room for this many tokens after the prompt
sync_debug_mode = getattr(torch._C, "_cuda_set_sync_debug_mode", lambda mode: None)  # which PyTorch without CUDA lacks
warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # PyTorch says this at its first use


@contextmanager
def decoding(model: PreTrainedModel, dtype: torch.dtype, decode: str = "plain", max_tokens: int = 0) -> Iterator[None]:
    """Prepare the model for rollouts of up to max_tokens for each completion."""
    as_graph = forward_replaced(model, GraphForward(model.forward, max_tokens)) if decode == "graph" else nullcontext()
    with unsharded(model), weights_in(model, dtype), logits_in_fp32(model, dtype), as_graph:
        yield


@contextmanager
def weights_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Convert the weights for a while. In bf16, decoding reads half as many bytes. Afterwards the original weights are
    back, unchanged. Buffers, such as rotary frequencies, are not converted."""
    weights = {p: p.data for p in model.parameters() if p.dtype != dtype}
    try:
        for p, weight in weights.items():
            p.data = weight.to(dtype)
        yield
    finally:
        for p, weight in weights.items():
            p.data = weight


class GraphForward:
    """Replaces the forward of a model, so that a CUDA graph can compute most of the tokens.

    A graph always reads and writes the same addresses. So everything that changes from token to token is copied into
    tensors that stay in place. The keys and values go into a cache of fixed length. Whenever the cache has new tensors,
    because of new prompts, fewer rows or a larger cache, the first token after that is computed without a graph. At the
    second one, a graph is captured, and it is replayed for this token and all later ones. The cache starts small,
    because attention reads all of it for every token, whether it is filled or not. When it is full, its length is
    doubled."""

    def __init__(self, forward: Callable, max_tokens: int):
        self.forward, self.max_tokens = forward, max_tokens
        update_wrapper(self, forward)  # because `generate` looks at the signature

    def __call__(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any = None, **more: Any) -> Any:
        layers, call = cache_of(more).layers, partial(self.forward, **more)
        if not isinstance(layers[0], StaticLayer):  # this call reads the prompts into a new cache
            self.seen_keys = self.graph = self.out = None  # frees the memory that earlier prompts took
            self.length = input_ids.shape[1]  # how many tokens each row has, with its prompt and padding
            self.final_length = self.length + self.max_tokens
            out = call(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
            if others := {type(layer).__name__ for layer in layers} - {"DynamicLayer"}:
                raise TypeError(f"the model's cache has a layer of type {min(others)}")
            make_static(layers, min(self.final_length, self.length + FIRST_ROOM))
            return out
        mask = attention_mask["full_attention"] if isinstance(attention_mask, dict) else attention_mask  # (B, 1, 1, T)
        if self.seen_keys is not layers[0].keys:  # the cache has new tensors
            self.seen_keys, self.graph, self.out = layers[0].keys, None, None
            self.ids, self.positions, self.mask = input_ids.clone(), position_ids.clone(), mask.clone()
        self.ids[:], self.positions[:], self.mask[:] = input_ids, position_ids, mask
        call = partial(call, input_ids=self.ids, attention_mask=self.mask, position_ids=self.positions)
        # `out` is None at the first token with new tensors. That token is computed without a graph. This warms up the
        # kernels, and it raises an error if the model makes the CPU wait for the GPU, which is impossible in a graph.
        # On a CPU, which has no graphs, all tokens are computed like this.
        if self.out is None or self.ids.device.type not in CAPTURING:
            try:
                sync_debug_mode(2)  # from now on, waiting for the GPU raises an error
                self.out = call()
            finally:
                sync_debug_mode(0)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):  # NCCL's thread may go on
                    self.out = call()  # records the kernels without running them
            self.graph.replay()
        self.length += 1
        if self.length == layers[0].max_cache_len and self.length < self.final_length:
            make_static(layers, min(self.final_length, 2 * self.length))
        return self.out


def make_static(layers: list[CacheLayerMixin], length: int) -> None:
    """Replace the layers of a cache by layers that have this length, with the same keys and values."""
    for i, old in enumerate(layers):
        layers[i] = StaticLayer(length)
        layers[i].update(old.keys, old.values)


def graph_decoding_works(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return whether the model gives the same log-probs with `GraphForward` as without."""
    # Pick three greedy tokens after each of two prompts of different length. The end token is -1, which is no id, so no
    # completion ends early.
    sample = partial(rollout, model, [[0], [0, 1, 2]], None, Sampling(3, eos_ids=[-1], temperature=0.0))
    try:
        with decoding(model, dtype):  # once, because all ranks must gather sharded weights, even one that fails below
            plain = sample()
            with forward_replaced(model, GraphForward(model.forward, 3)):
                graph = sample()
        if any((a.ids != b.ids).any() for a, b in zip(graph, plain)):
            raise ValueError("it samples other tokens")
        if max(abs(a.logp - b.logp).max() for a, b in zip(graph, plain)) > torch.finfo(dtype).eps ** 0.5:
            raise ValueError("log-probs differ")
        return True
    except Exception as error:
        faults.warn(f"no CUDA graph, tokens are slower: {type(model).__name__}: {error}".splitlines()[0])
        return False
