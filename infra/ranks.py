"""One process or many: these few functions are the only ones that know the difference.

Every rank samples a part of the completions of a step and trains on a part of them. Gradients are summed, never
averaged, because the token weights already hold the totals of the step. With --shard, a rank also holds only a part of
the model (shard.py).
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from config import UserError
from infra import faults
from infra.shard import TIMEOUT


def start(shard: bool = False) -> torch.device:
    """Join the process group if torchrun started this process. Otherwise there is one rank, and it needs a group only
    for sharded weights. -> the device of this rank"""
    if "RANK" in os.environ and not os.environ.keys() >= {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}:
        raise UserError("RANK is set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start with torchrun, or unset RANK")
    faults.end_with_torchrun()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        # A cache that grows with every token would fragment the memory. PyTorch reads this when it first uses the GPU.
        if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        torch.cuda.set_device(device)
        # On an H100 or later PyTorch would prefer the attention of cuDNN, which plans for 30 ms whenever it sees a new
        # shape. While decoding, the cache has a new shape at every token.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if "RANK" in os.environ:
        try:
            socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # `rendezvous` would try again for two hours
        except OSError as error:
            raise UserError(f"MASTER_ADDR {os.environ['MASTER_ADDR']}: {error}") from None
        store, number, count = next(dist.rendezvous("env://", timeout=TIMEOUT))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # torchrun keeps one store for all restarts, with old addresses
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group(backend(device), timeout=TIMEOUT, store=store, rank=number, world_size=count)
        dist.all_reduce(torch.zeros(1, device=device))  # connects the ranks now, so that it fails or takes memory now
    elif shard and not dist.is_initialized():
        dist.init_process_group(backend(device), store=dist.HashStore(), rank=0, world_size=1)
    return device


def backend(device: torch.device) -> str:
    """Tensors travel between GPUs. Objects travel between CPUs, where the loss of a machine is noticed at once."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(n: int) -> range:
    """The contiguous part of n things that this rank has to do. Parts differ by one at most and may be empty."""
    return range(rank() * n // world(), (rank() + 1) * n // world())


def gather(made: list, same: dict[str, Any] | None = None) -> list:
    """Join the lists of all ranks, in the order of the ranks. Every rank gets the whole list. All ranks fail if one has
    another value in `same` than the first rank has."""
    parts = [(made, same or {})] * world()
    if dist.is_initialized():
        dist.all_gather_object(parts, parts[0])
    for other, (_, theirs) in enumerate(parts):
        if differing := [name for name, x in theirs.items() if x != parts[0][1].get(name)]:
            error = UserError if rank() == 0 else faults.FailedElsewhere  # one rank reports it
            raise error(f"rank {other} differs from rank 0 in {', '.join(differing)}")
    return [item for part, _ in parts for item in part]


def on_first(call: Callable, *args: Any) -> Any:
    """Call a function on the first rank only. Every rank gets its result, or its UserError."""
    with fail_together():
        made = call(*args) if rank() == 0 else None
    return gather([made])[0]


def barrier() -> None:
    gather([])


@contextmanager
def fail_together() -> Iterator[None]:
    """If one rank raises a UserError in this block, all ranks fail, and the first that raised one reports it. The block
    must not contain calls between ranks."""
    own = None
    try:
        yield
    except UserError as error:
        own = error
    for other, message in enumerate(gather([own and str(own)])):
        if message is not None:
            raise own if other == rank() else faults.FailedElsewhere(message)


def sum_(tensor: torch.Tensor) -> None:
    """Sum a tensor over the ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients over the ranks. A gradient may be missing, because this rank had no micro-batch or because the loss
    does not depend on the parameter. It counts as zero."""
    for p in (p for p in model.parameters() if p.requires_grad):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if not isinstance(p.grad, DTensor):  # sharded gradients are already summed in the backward pass
            sum_(p.grad)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradients to this norm. -> the norm of the whole model before clipping"""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
