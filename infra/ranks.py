"""One process or many: the few calls that know the difference.

Every rank samples and trains on a share of the step's completions, and adds its gradients to the others'. Gradients are
summed, never averaged: the token weights already hold the totals of the step. Each rank holds the whole model or, with
--shard, a part of it (shard.py); what goes wrong is in faults.py.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from config import UserError
from infra import faults
from infra.shard import gathered, is_sharded


def start() -> tuple[int, int, torch.device]:
    """-> rank, number of ranks, device. Under torchrun the process group is opened; otherwise there is one rank."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu and device.index >= torch.cuda.device_count():
        raise UserError(
            f"{device.index + 1} ranks or more on a machine of {torch.cuda.device_count()} GPUs: start one for each"
        )
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        faults.watch()
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(minutes=10)))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # torchrun keeps one store for all restarts, old addresses in it
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        timeout = timedelta(hours=2)
        store.set_timeout(timeout)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timeout, store=store, rank=rank, world_size=world)
        if faults.under_torchrun():  # the ranks of this machine are children of the same torchrun
            node = os.environ.get("GROUP_RANK")
            faults.siblings.update(pid for other, pid in gather(lambda: [(node, os.getpid())]) if other == node)
        return dist.get_rank(), dist.get_world_size(), device
    return 0, 1, device


def stop() -> None:
    if dist.is_initialized():
        faults.siblings.clear()
        gather(list)  # nobody is gone before all are done
        dist.destroy_process_group()


def share(n: int, rank: int, world: int) -> range:
    """This rank's contiguous part of n things; the parts differ by one at most and may be empty."""
    return range(rank * n // world, (rank + 1) * n // world)


def gather(make: Callable[[], list], of: Sequence[int] | None = None) -> list:
    """What every rank (or those in `of`) makes, joined in the order of the ranks, on every rank.
    A mistake on any of them ends the work on all, and the first reports it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    made, mistake = [], None
    if of is None or rank in of:
        try:
            made = make()
        except UserError as error:
            mistake = str(error)
    parts: list[Any] = [(made, mistake)]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        with _contact():
            dist.all_gather_object(parts, (made, mistake))
    for other, (_, message) in enumerate(parts):
        if message is not None:
            raise UserError(message) if other == rank else faults.FailedElsewhere(message)
    return [item for part, _ in parts for item in part]


def together(make: Callable[[], Any], of: Sequence[int] | None = None) -> Any:
    """The same work on every rank (or those in `of`), each keeping its own result; a mistake is reported once."""
    made = []
    gather(lambda: made.append(make()) or [], of)
    return made[0] if made else None


@contextmanager
def _contact() -> Iterator[None]:
    """A collective call fails where another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        raise faults.lost_contact(error) from error


@contextmanager
def weights_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The model computes in this dtype for a while: decoding reads half the bytes in bf16. The fp32 weights come back
    untouched. Buffers (rotary frequencies) keep their precision."""
    if is_sharded(model):
        with gathered(model):
            yield
        return
    parameters = list(model.parameters())
    weights = [p.data for p in parameters]
    try:
        for p in parameters:
            p.data = p.data.to(dtype)
        yield
    finally:
        for p, weight in zip(parameters, weights, strict=True):
            p.data = weight


def sum_(*tensors: torch.Tensor) -> None:
    """Sums over ranks, in place."""
    if dist.is_initialized():
        with _contact():
            for tensor in tensors:
                dist.all_reduce(tensor, op=dist.ReduceOp.SUM)


def sum_gradients(model: nn.Module) -> None:
    """A rank without a micro-batch, and a parameter without a part in the loss, count as zeros."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if is_sharded(model):  # the backward pass has averaged them over the ranks
        for p in parameters:
            p.grad *= dist.get_world_size()
    else:
        sum_(*(p.grad for p in parameters))


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """-> the norm over the whole model, before clipping"""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
