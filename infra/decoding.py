"""Prepare a model for decoding, and restore it afterwards.

While it decodes, its weights are in the dtype of the computation, sharded weights are gathered, and logits are in fp32.
With --decode graph, a token is computed by replaying one CUDA graph, if a trial before the first step shows that the
model can. Otherwise Python launches about a thousand kernels for each token.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from fast.output_head import forward_replaced, logits_in_fp32
from infra import faults
from infra.shard import unsharded
from rollout import Sampling, cache_of, rollout

CAPTURING = {"cuda"}  # the kinds of devices that have graphs
LEAST_ROOM = 256  # a cache of fixed length gets room for at least this many more tokens
CAPTURE_BYTES = 2e9  # a capture needs less free memory than this
sync_debug_mode = getattr(torch._C, "_cuda_set_sync_debug_mode", lambda mode: None)  # absent without CUDA
warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")  # PyTorch says this at its first use


@contextmanager
def decoding(model: PreTrainedModel, dtype: torch.dtype, decode: str = "plain") -> Iterator[None]:
    """Prepare the model for rollouts."""
    as_graph = forward_replaced(model, GraphForward(model.forward)) if decode == "graph" else nullcontext()
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
    """Replaces the forward of a model, so that a CUDA graph computes most of the tokens.

    A graph always reads and writes the same addresses. So everything that changes from token to token is copied into
    tensors that stay in place, and the keys and values are in a cache of fixed length. The cache has new tensors after
    new prompts, when rows leave, and when it has grown. From then on, `tokens_since` counts the tokens:

        prompts   are read into the model's own cache, as without graphs; then `make_room` is called
        token 0   is computed without a graph. This warms up the kernels, and raises an error if the model makes the
                  host wait for the GPU, which is impossible in a graph
        token 1   is captured: the graph records its kernels without running them, and is then replayed
        token 2   and all later ones are replayed
    """

    def __init__(self, forward: Callable):
        self.forward, self.graph = forward, None
        update_wrapper(self, forward)  # because `generate` looks at the signature

    def make_room(self, cache: Cache, max_tokens: int) -> None:
        """Let the cache grow to this many tokens. Called once the prompts have been read."""
        if unsupported := {type(layer).__name__ for layer in cache.layers} - {"DynamicLayer"}:
            raise TypeError(f"the model's cache has a layer of type {min(unsupported)}")
        self.length, self.max_tokens = cache.get_seq_length(), max_tokens
        self.next_position = torch.full((1,), self.length, device=cache.layers[0].keys.device)
        self.keys = None
        self.grow(cache.layers)

    def grow(self, layers: list[CacheLayerMixin]) -> None:
        """Give the cache room for a quarter more tokens, or for LEAST_ROOM. No more than that: attention reads all of
        the cache for every token, whether it is filled or not."""
        room = min(self.length + max(LEAST_ROOM, self.length // 4), self.max_tokens)
        room += -room % 8  # for other lengths, attention would copy the mask in every layer
        for i, layer in enumerate(layers):
            layers[i] = FixedLayer(layer, self.length, room, self.next_position)

    def __call__(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Any = None, **more: Any) -> Any:
        layers, call = cache_of(more).layers, partial(self.forward, **more)
        if not isinstance(layers[0], FixedLayer):
            self.keys = self.out = None  # frees the memory that earlier prompts took
            return call(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)
        if self.keys is not layers[0].keys:
            self.keys, self.tokens_since = layers[0].keys, 0
        mask = attention_mask["full_attention"] if isinstance(attention_mask, dict) else attention_mask  # (B, 1, 1, T)
        inputs = dict(input_ids=input_ids, position_ids=position_ids, attention_mask=as_numbers(mask, self.keys.dtype))
        if self.tokens_since == 0:
            self.inputs = {name: x.clone() for name, x in inputs.items()}
        for name, x in inputs.items():
            self.inputs[name].copy_(x)
        call = partial(call, **self.inputs)
        if self.tokens_since == 0 or self.keys.device.type not in CAPTURING:
            self.out = without_waiting(call)
        else:
            if self.tokens_since == 1:
                self.graph, self.out = capture(call, self.graph)
            self.graph.replay()
        self.tokens_since += 1
        self.length += 1
        self.next_position += 1
        if self.length == layers[0].max_cache_len and self.length < self.max_tokens:
            self.grow(layers)
        return self.out


class FixedLayer(StaticLayer):
    """A layer of the cache with room for max_cache_len tokens, of which it takes the first n from another layer. The
    next token is written at the position (1,) that all layers share."""

    def __init__(self, layer: CacheLayerMixin, n: int, max_cache_len: int, next_position: Tensor):
        super().__init__(max_cache_len)
        self.lazy_initialization(layer.keys, layer.values)
        self.keys[:, :, :n], self.values[:, :, :n] = layer.keys[:, :, :n], layer.values[:, :, :n]
        self.next_position, self.cumulative_length = next_position, next_position[0]

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.next_position, keys)
        self.values.index_copy_(2, self.next_position, values)
        return self.keys, self.values


def as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as 0 and -inf. From truth values, every layer would make such a mask of its own."""
    return mask if mask.is_floating_point() else torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def without_waiting(call: Callable) -> Any:
    """Return what the call returns, or raise an error if the host would wait for the GPU."""
    try:
        sync_debug_mode(2)
        return call()
    finally:
        sync_debug_mode(0)


def capture(call: Callable, earlier: "torch.cuda.CUDAGraph | None") -> tuple["torch.cuda.CUDAGraph", Any]:
    """Capture the call. Return the graph, and what the call returns: tensors that each replay fills. `torch.cuda.graph`
    would first free all memory that PyTorch keeps, and the next update would have to get it again.

    The graph uses the memory of the earlier one, which must exist until then: PyTorch has no use for the memory of a
    graph that is gone."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    if torch.cuda.mem_get_info()[0] < CAPTURE_BYTES:
        torch.cuda.empty_cache()
    try:
        with torch.cuda.stream(capture_stream()):
            # Meanwhile, the thread of NCCL may go on.
            graph.capture_begin(earlier and earlier.pool(), capture_error_mode="thread_local")
            try:
                out = call()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        # If memory runs out inside a capture, another error may come from its end.
        if "out of memory" in f"{error} {error.__context__}":
            raise torch.OutOfMemoryError(str(error)) from error
        raise
    return graph, out


@cache
def capture_stream() -> "torch.cuda.Stream":
    return torch.cuda.Stream()


def graph_decoding_works(model: PreTrainedModel, dtype: torch.dtype) -> bool:
    """Return whether the model gives the same log-probs with `GraphForward` as without."""
    # Pick four greedy tokens after each of two prompts of different length. The third is the one that is captured, so
    # only the fourth would show that a number of the host was recorded. No completion ends early: no token has id -1.
    four_tokens = Sampling(4, eos_ids=[-1], temperature=0.0)
    sample = partial(rollout, model, [[0], [0, 1, 2]], None, four_tokens)
    try:
        with decoding(model, dtype):  # once, because all ranks must gather sharded weights, even one that fails below
            plain = sample()
            with forward_replaced(model, GraphForward(model.forward)):
                graph = sample()
        if any((a.ids != b.ids).any() for a, b in zip(graph, plain)):
            raise ValueError("it samples other tokens")
        if max(abs(a.logp - b.logp).max() for a, b in zip(graph, plain)) > torch.finfo(dtype).eps ** 0.5:
            raise ValueError("log-probs differ")
        return True
    except Exception as error:
        faults.warn(f"no CUDA graph, tokens are slower: {type(model).__name__}: {error}".splitlines()[0])
        return False
