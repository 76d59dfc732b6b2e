"""One process or many: the few calls that know the difference.

Every rank samples and trains on a share of the step's completions. Gradients are summed, never averaged: the token
weights already hold the totals of the step. With --shard a rank holds a part of the model (shard.py).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import nn

from config import UserError
from infra import faults
from infra.shard import is_sharded


def start(shard: bool = False) -> torch.device:
    """Under torchrun the process group is opened; otherwise there is one rank, in a group if weights are sharded."""
    if "RANK" in os.environ and not os.environ.keys() >= {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}:
        raise UserError("RANK is set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT: start with torchrun, or unset RANK")
    faults.end_with_torchrun()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        # A cache that grows with every token would leave gaps behind. PyTorch reads this at its first tensor there.
        if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        torch.cuda.set_device(device)
        # cuDNN, which would be the first choice for attention on an H100 or later, makes a plan for each new shape, and
        # a cache has one with every token: some 30 ms each.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if "RANK" in os.environ:
        store, number, count = next(dist.rendezvous("env://", timeout=timedelta(hours=2)))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # torchrun keeps one store for all restarts, old addresses in it
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group(backend(device), timeout=timedelta(hours=2), store=store, rank=number, world_size=count)
        dist.all_reduce(torch.zeros(1, device=device))  # opens what carries tensors: here it fails, or takes its memory
    elif shard and not dist.is_initialized():
        dist.init_process_group(backend(device), store=dist.HashStore(), rank=0, world_size=1)
    return device


def backend(device: torch.device) -> str:
    """Objects travel between CPUs, where a machine that is gone is noticed at once; tensors between GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(n: int) -> range:
    """This rank's contiguous part of n things; the parts differ by one at most and may be empty."""
    return range(rank() * n // world(), (rank() + 1) * n // world())


def gather(made: list) -> list:
    """What each rank has made, joined in the order of the ranks, on every rank."""
    parts = [made] * world()
    if dist.is_initialized():
        dist.all_gather_object(parts, made)
    return [item for part in parts for item in part]


def on_first(call: Callable, *args: Any) -> Any:
    """What the first rank gets from this call, or its user's error, on every rank."""
    with fail_together():
        made = call(*args) if rank() == 0 else None
    return gather([made])[0]


def barrier() -> None:
    gather([])


@contextmanager
def fail_together() -> Iterator[None]:
    """A user's error of one rank in this block is one of all; the first reports it. No call between ranks inside."""
    own = None
    try:
        yield
    except UserError as error:
        own = error
    for other, message in enumerate(gather([own and str(own)])):
        if message is not None:
            raise own if other == rank() else faults.FailedElsewhere(message)


def sum_(tensor: torch.Tensor) -> None:
    """Over ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def sum_gradients(model: nn.Module) -> None:
    """A rank without a micro-batch, and a parameter without a part in the loss, count as zeros."""
    for p in (p for p in model.parameters() if p.requires_grad):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if not is_sharded(model):  # those of shards were summed in the backward pass
            sum_(p.grad)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """-> the norm over the whole model, before clipping"""
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if is_sharded(model) else norm


def seed_everything(seed: int, step: int) -> None:
    """Nothing here draws from these; a reward function of yours may. Set anew in each step, they need not be saved."""
    transformers.set_seed(int(np.random.SeedSequence([seed, step, rank()]).generate_state(1)[0]))
