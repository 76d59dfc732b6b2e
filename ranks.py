"""One process or many: the few calls that know the difference.

Every rank holds the whole model, samples and trains on a share of the step's completions, and adds its gradients to the
others'. Gradients are summed, never averaged: the token weights already hold the totals of the step.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from config import Mistake


def start() -> tuple[int, int, torch.device]:
    """-> rank, number of ranks, device. Under torchrun the process group is opened; otherwise there is one rank."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(hours=2))
        return dist.get_rank(), dist.get_world_size(), device
    return 0, 1, device


def _end_with(parent: int) -> None:
    """A rank whose torchrun was killed must not go on, least of all beside its successor."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def report_failure(message: str) -> None:
    """On stderr, and in torchrun's own report, which stands last on the screen."""
    print(message, file=sys.stderr, flush=True)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        details = {"py_callstack": message, "timestamp": str(int(time.time()))}
        report = {"message": {"message": message, "extraInfo": details}}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(report))


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def share(n: int, rank: int, world: int) -> range:
    """This rank's contiguous part of n things; the parts differ by one at most and may be empty."""
    return range(rank * n // world, (rank + 1) * n // world)


class Elsewhere(Mistake):
    """A mistake on another rank, which is the one to report it."""


def gather(make: Callable[[], list], of: Sequence[int] | None = None) -> list:
    """What every rank (or those in `of`) makes, joined in the order of the ranks, on every rank.
    A mistake on one of them ends the work on all."""
    made, mistake = [], None
    if of is None or not dist.is_initialized() or dist.get_rank() in of:
        try:
            made = make()
        except Mistake as error:
            mistake = error
    parts: list[Any] = [(made, mistake is not None)]
    if dist.is_initialized():
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (made, mistake is not None))
    if mistake is not None:
        raise mistake
    if any(failed for _, failed in parts):
        raise Elsewhere
    return [item for part, _ in parts for item in part]


@contextmanager
def weights_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The model computes in this dtype for a while: decoding reads half the bytes in bf16. The fp32 weights come back
    untouched. Buffers (rotary frequencies) keep their precision."""
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
        for tensor in tensors:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)


def sum_gradients(model: nn.Module) -> None:
    """A rank without a micro-batch, and a parameter without a part in the loss, count as zeros."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    sum_(*(p.grad for p in parameters))
