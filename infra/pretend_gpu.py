"""Pretend that there is a GPU, for tests: tensors claim to be on cuda:0, but their numbers are on the CPU.

    install(capacity=80e9)               give this process a GPU; call it before the code under test makes a tensor
    install(80e9, shapes_only=True)      keep only the shapes of floating-point tensors: a 7B model fits anywhere
    on_pretended_gpu(function, *args)    call a function in a new process that has a pretended GPU; return its result

A call with tensors of two devices raises an error, as on CUDA. Autocast follows CUDA's rules, not the CPU's. Memory is
counted in blocks of 512 bytes, like in PyTorch's allocator, and torch.OutOfMemoryError is raised beyond the capacity.
gpu.waits counts how often the host waits for the GPU; waiting while a CUDA graph is captured raises an error.

Each pretended tensor wraps one on the CPU. To C++, its device is XLA, because autograd supports that device without
CUDA, and because CUDA's rules for autocast can be applied to it. This relies on private names of torch 2.13.
Left out, because it cannot be pretended: kernels (limits, rounding and speed), streams, NCCL, fragmentation.
"""

import collections
import contextlib
import ctypes
import itertools
import math
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from conftest import PROCESSES, replace

needs_pretended_gpu = pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or torch.version.cuda is not None,
    reason=f"needs private names of torch 2.13 built without CUDA; this is {torch.__version__}",
)

plain_attention = F.scaled_dot_product_attention
aten, DEVICE = torch.ops.aten, torch.device("cuda", 0)
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}

gpu = SimpleNamespace(
    capacity=80e9,  # bytes
    shapes_only=False,
    held=0,  # bytes that are allocated now
    peak=0,  # the most bytes since torch.cuda.reset_peak_memory_stats()
    waits=collections.Counter(),  # how often the host waited, by the name of the operation
    set_to=None,  # the last argument of torch.cuda.set_device
    captured=None,  # the calls of the CUDA graph that is being captured
    changed=[],  # what these calls have changed, and what it was before
)


# ---- Memory ----

# The address of a storage -> its size in bytes, and a weak reference that calls release() when the storage is freed.
_blocks: dict[int, tuple[int, weakref.ref]] = {}


def count(storage: torch.UntypedStorage) -> None:
    address, bytes_ = storage._cdata, math.ceil(storage.nbytes() / 512) * 512
    more = bytes_ - _blocks.get(address, (0, None))[0]
    if more == 0:
        return
    if gpu.held + more > gpu.capacity:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {more} bytes (pretended)")
    _blocks[address] = bytes_, weakref.ref(storage, lambda _: release(address))
    gpu.held += more
    gpu.peak = max(gpu.peak, gpu.held)


def release(address: int) -> None:
    gpu.held -= _blocks.pop(address, (0, None))[0]


def resize(storage: torch.UntypedStorage, size: int, resize_: Callable = torch.UntypedStorage.resize_) -> None:
    """Replaces `UntypedStorage.resize_`, to count the memory as well. The default of the last argument is the original.
    To free gathered weights, FSDP resizes their storage to 0."""
    resize_(storage, size)
    if storage._cdata in _blocks:
        count(storage)


# ---- The tensor ----


def each(f: Callable, x: Any) -> Any:
    """Apply f to every tensor in arguments or results. PyTorch's `tree_map` would take most of a run's time."""
    if isinstance(x, torch.Tensor):
        return f(x)
    return type(x)([each(f, y) for y in x]) if isinstance(x, (list, tuple)) else x


class Pretended(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> "Pretended":
        # With shapes_only, floating-point tensors have no numbers. Integers and booleans keep theirs; those computed
        # from tensors without numbers get made-up ones.
        if gpu.shapes_only:
            inner = inner.to("meta") if inner.is_floating_point() else with_numbers(inner)
        count(inner.untyped_storage())
        outer = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("xla", 0), requires_grad=requires_grad,
            _extra_dispatch_keys=torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA),
        )  # fmt: skip
        outer.inner = inner
        return outer

    device = property(lambda self: DEVICE)
    is_cuda, is_cpu, is_xla, is_meta = True, False, False, False

    def __reduce_ex__(self, protocol: int) -> tuple:  # so that torch.load makes a pretended tensor again
        return Pretended, (self.inner, self.requires_grad)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return id(self.inner) if self.inner.is_meta else self.inner.data_ptr()

    def tolist(self) -> list:
        return self.cpu().tolist()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # `x.data = y` changes only the tensor in C++, so x must also get the inner tensor of y.
        if func == torch.Tensor.data.__set__:
            args[0].inner = args[1].inner
        return result

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tensors, wrapper_of = [], {}  # wrapper_of: the id of an inner tensor -> its wrapper

        def unwrap(x: torch.Tensor) -> torch.Tensor:
            tensors.append(x)
            if not isinstance(x, Pretended):
                return x
            wrapper_of[id(x.inner)] = x
            return x.inner

        def wrap(x: torch.Tensor) -> torch.Tensor:
            # An operation in place returns its argument, so return the wrapper of this argument.
            return wrapper_of[id(x)] if id(x) in wrapper_of else Pretended(x)

        args, kwargs = each(unwrap, args), {name: each(unwrap, x) for name, x in (kwargs or {}).items()}
        raise_on_two_devices(func, tensors)
        # Where the result must be. The call itself runs on a CPU, so it gets no `device`.
        target = torch.device(kwargs.pop("device", None) or DEVICE).type
        name = func._schema.name.partition("::")[2]
        if host_must_wait(name, args, target, all_on_gpu=all(isinstance(x, Pretended) for x in tensors)):
            gpu.waits[name] += 1
            if gpu.captured is not None:
                raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name} (pretended)")
        if gpu.captured is not None and func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            gpu.changed.append((args[0], args[0].clone()))
        has_numbers = not any(isinstance(x, Pretended) and x.inner.is_meta for x in tensors)
        out = (compute if has_numbers else compute_shapes)(func, name, args, kwargs)
        if gpu.captured is not None:
            gpu.captured.append((func, args, kwargs, out))
        if target == "cpu":
            return each(with_numbers, out)
        if func._schema.is_mutable:
            for x in wrapper_of.values():
                if (x.inner.shape, x.inner.stride()) != (x.shape, x.stride()):
                    # The operation has resized the inner tensor, so the wrapper gets the new shape too.
                    torch.Tensor.data.__set__(x, Pretended(x.inner))
        return each(wrap, out)


Pretended.__name__ = "Tensor"  # the name of the class on a real GPU


def raise_on_two_devices(func: Any, tensors: list[torch.Tensor]) -> None:
    """Raise the error that CUDA raises, except for copies between devices. CUDA also allows indices on the CPU, and
    single numbers of the CPU in pointwise operations, but nothing here needs that."""
    copies = func.namespace == "c10d" or func in (aten._to_copy.default, aten.copy_.default)
    if not copies and not all(isinstance(x, Pretended) for x in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, found cuda:0 and cpu: {func} (pretended)")


def host_must_wait(name: str, args: tuple, target: str, all_on_gpu: bool) -> bool:
    """Return whether the host must wait for the result of a computation on the GPU."""
    by_mask = name == "index" and any(index is not None and index.dtype == torch.bool for index in args[1])
    return name in WAITS or by_mask or target == "cpu" or (name == "copy_" and not all_on_gpu)


def compute(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    # The CPU does not support mm with out_dtype, the third argument.
    if name == "mm" and len(args) == 3 and args[0].dtype == args[1].dtype:
        return torch.mm(args[0].to(args[2]), args[1].to(args[2]))
    return func(*args, **kwargs)


def compute_shapes(func: Any, name: str, args: tuple, kwargs: dict) -> Any:
    """Compute the shape of a result that depends on tensors without numbers. Integers that are made from these
    tensors are 0, and booleans are true. If the host reads a number it gets 1.0, and two such tensors are equal."""
    if name in ("_local_scalar_dense", "equal"):
        return 1.0  # a number, or true
    if name == "copy_":
        # Copying from a tensor without numbers to one with numbers writes zeros.
        return args[0] if args[0].is_meta else args[0].zero_()
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        # Replace each mask by the positions where it is true, because the shape of the result depends on them.
        positions = [i.nonzero().unbind(1) if i is not None and i.dtype == torch.bool else [i] for i in args[1]]
        args = (args[0], list(itertools.chain(*positions)), *args[2:])
    originals = {}

    def to_shape(x: torch.Tensor) -> torch.Tensor:
        shape = x.to("meta")
        originals[id(shape)] = x, shape  # keep the shape alive, so that no other tensor gets its id
        return shape

    def from_shape(x: torch.Tensor) -> torch.Tensor:
        # An operation in place returns its argument, so return the original of this argument.
        if id(x) in originals:
            return originals[id(x)][0]
        return x if x.is_floating_point() else with_numbers(x)

    return each(from_shape, func(*each(to_shape, args), **{name: each(to_shape, x) for name, x in kwargs.items()}))


def with_numbers(x: torch.Tensor) -> torch.Tensor:
    """Return x. If it has only a shape, return made-up numbers of this shape: 0, or true for booleans."""
    return torch.full(x.size(), 1 if x.dtype == torch.bool else 0, dtype=x.dtype, device="cpu") if x.is_meta else x


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False) -> torch.Tensor:
    """If tensors have only shapes, call the kernel that CUDA would choose: flash attention in bf16 without a mask,
    otherwise memory-efficient attention. In torch 2.13 memory-efficient attention does not support key heads that
    several query heads share. Then plain attention is computed, and also if tensors have numbers."""
    if q.is_cuda and torch.is_autocast_enabled("cuda"):  # autocast includes attention
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    settings = dict(dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    flash = q.dtype != torch.float32 and attn_mask is None
    if q.is_cuda and gpu.shapes_only and flash:
        return aten._scaled_dot_product_flash_attention(q, k, v, **settings)[0]
    if q.is_cuda and gpu.shapes_only and not enable_gqa:
        if attn_mask is not None:
            attn_mask = torch.zeros(attn_mask.shape, dtype=q.dtype, device=DEVICE).expand(*q.shape[:3], k.shape[2])
        compute_log_sumexp = torch.is_grad_enabled() and q.requires_grad  # for the backward pass
        return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, compute_log_sumexp, **settings)[0]
    return plain_attention(q, k, v, attn_mask, **settings, enable_gqa=enable_gqa)


# ---- torch.cuda ----


class Graph:
    """Records calls and repeats them on the same tensors. Numbers from the host keep their recorded values."""

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = compute(func, func._schema.name.partition("::")[2], args, kwargs)
            old_tensors, new_tensors = (x if isinstance(x, list | tuple) else [x] for x in (out, again))
            for old, new in zip(old_tensors, new_tensors, strict=True):
                # A new result must go where the recorded one was. After an operation in place it is there already.
                if isinstance(old, torch.Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)


@contextlib.contextmanager
def capture(graph: Graph, *_: Any, **__: Any) -> Iterator[None]:
    """Record the calls into the graph. A real GPU would only record them. Here they also run, so the tensors that they
    change are restored at the end. With shapes_only there is nothing to repeat, so nothing is recorded."""
    graph.calls = []
    gpu.captured = None if gpu.shapes_only else graph.calls
    try:
        yield
    finally:
        gpu.captured = None
        while gpu.changed:
            changed, before = gpu.changed.pop()
            changed.copy_(before)


class Stream(MagicMock):
    """A stream or an event. Nothing has to wait, because everything is computed at once."""


def allocate(factory: Callable, *args: Any, dtype: torch.dtype | None = None, **_: Any) -> Pretended:
    return Pretended(factory(*args, dtype=dtype, device="meta" if gpu.shapes_only else "cpu"))


_kept_alive: list = []


def install(capacity: float = 80e9, shapes_only: bool = False, gpus: int = 1) -> SimpleNamespace:
    """Give this process a GPU, which cannot be removed again. Return `gpu`."""
    gpu.capacity, gpu.shapes_only = capacity, shapes_only
    torch.serialization.add_safe_globals([Pretended])  # for tensors in Run.state
    # Autograd asks an object, the device guard, for the number of devices and for their streams. This guard inherits
    # its answers: one device, and no streams.
    guard = type("Guard", (torch._C._acc.DeviceGuard,), {"type_": lambda self: torch._C._autograd.DeviceType.XLA})()
    library = torch.library.Library("aten", "IMPL")
    _kept_alive.extend([guard, library])
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    c10 = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
    guards = (ctypes.c_void_p * 21).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    CUDA, XLA, PRIVATE_USE = 1, 9, 20
    # PyTorch lets Python register a guard only for the device type PrivateUse1. Give this guard to CUDA and XLA, and
    # leave none for PrivateUse1, so that there seems to be no such device.
    guards[CUDA] = guards[XLA] = guards[PRIVATE_USE]
    guards[PRIVATE_USE] = None
    for key in ("CUDA", "XLA"):
        library.impl("empty.memory_format", partial(allocate, torch.empty), key)
        library.impl("empty_strided", partial(allocate, torch.empty_strided), key)
    # PyTorch would decompose this operation if it had no kernel. The kernel itself is never called, because
    # __torch_dispatch__ comes first.
    library.impl("silu_backward", lambda *_: None, "XLA")
    torch._C._set_only_lift_cpu_tensors(True)  # so that torch.tensor(..., device="cuda") calls _to_copy

    answers = dict(
        is_available=True, is_initialized=True, is_bf16_supported=True, device_count=gpus, current_device=0,
        get_device_name="pretended GPU", get_device_capability=(9, 0), _is_in_bad_fork=False, _lazy_init=None,
        empty_cache=None, manual_seed_all=None, set_rng_state=None, get_rng_state=torch.get_rng_state,
        is_current_stream_capturing=False, mem_get_info=lambda: (int(gpu.capacity - gpu.held), int(gpu.capacity)),
        memory_allocated=lambda: gpu.held, memory_reserved=lambda: gpu.held,
        max_memory_allocated=lambda: gpu.peak, max_memory_reserved=lambda: gpu.peak,
        reset_peak_memory_stats=lambda: setattr(gpu, "peak", gpu.held),
        stream=contextlib.nullcontext, device=contextlib.nullcontext, current_stream=Stream,
    )  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer() if callable(answer) else answer)
    torch.cuda.set_device = partial(setattr, gpu, "set_to")
    torch.Tensor.pin_memory = lambda x, *_: x
    torch.cuda._initialized, torch.cuda.Stream, torch.cuda.Event = True, Stream, type("Event", (Stream,), {})
    torch.Event, torch.cuda.CUDAGraph, torch.cuda.graph = torch.cuda.Event, Graph, capture
    torch.accelerator.current_stream = Stream
    torch.__future__.set_swap_module_params_on_conversion(True)  # keeps weights tied in model.to(device)
    torch.UntypedStorage.resize_ = resize
    F.scaled_dot_product_attention = attention
    # There is no NCCL, so use gloo for both devices. `replace` passes the original function, which is not needed.
    replace("infra.ranks.backend", lambda original: lambda device: "cpu:gloo,cuda:gloo")
    DTensor.device = property(lambda self: self._local_tensor.device)
    return gpu


def on_pretended_gpu(function: Callable, *args: Any, **settings: Any) -> Any:
    """Call the function in a new process, because a pretended GPU cannot be removed, and return its result."""
    with ProcessPoolExecutor(1, PROCESSES, partial(install, **settings)) as pool:
        return pool.submit(function, *args).result()
