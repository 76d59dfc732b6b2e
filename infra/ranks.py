"""The functions through which ranks communicate, and the random numbers that they agree on.

Every rank samples a part of a step's completions and trains on a part of them. Gradients are summed, never averaged,
because the weight of each token in the loss is already divided by a total over all ranks (loss.py).
With --shard, each rank also has only a part of the model (shard.py). A single process has nothing to communicate.

Every random number of a run depends only on the seed, the step and what the number is for (in user code, also on the
rank), so a checkpoint does not have to contain the state of any random generator.
"""

import hashlib
import os
import signal
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from config import UserError
from infra import faults

BUCKET_BYTES = 2**26  # about how many bytes of gradients are summed at once: a small call costs as much as a large one
TIMEOUT = timedelta(hours=2)  # the longest that a rank waits for the rollout or the rewards of another


def start(shard: bool = False) -> torch.device:
    """Join the process group if torchrun started this process, and return the device of this rank. A process that was
    started without torchrun is the only rank, and needs a group only for sharded weights."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # End this rank when its torchrun is killed. Without this, the rank would stay alive and keep the GPU.
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        # The cache of a rollout grows with every token. Expandable segments keep this from fragmenting memory. PyTorch
        # reads the setting when it first uses the GPU.
        if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        torch.cuda.set_device(device)
        # On an H100 or later, PyTorch would prefer the attention of cuDNN, which spends 30 ms on a plan for every new
        # shape. In a rollout, the cache has a new shape at every token.
        torch.backends.cuda.enable_cudnn_sdp(False)
    if "RANK" in os.environ:
        if missing := {"WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} - os.environ.keys():
            raise UserError(f"RANK is set, but not {', '.join(sorted(missing))}: start with torchrun, or unset RANK")
        # If the host MASTER_ADDR is not known, fail now. `rendezvous` would keep looking it up for half an hour.
        socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
        check_own_address()
        # `rendezvous` waits half an hour for the other ranks, which is PyTorch's default. That is enough, because all
        # ranks start at about the same time. All later calls wait for TIMEOUT.
        store, number, count = next(dist.rendezvous("env://"))
        store.set_timeout(TIMEOUT)
        # torchrun uses the same store for all its restarts, so the store still has the addresses of processes that have
        # ended. A new prefix for each restart hides them. On several machines there is no such prefix, because each
        # machine counts its own restarts, and the ranks would not agree on the number.
        if os.environ.get("GROUP_WORLD_SIZE") == "1":
            store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group(backend(device), timeout=TIMEOUT, store=store, rank=number, world_size=count)
        # PyTorch connects the ranks in the first collective call. Make one now, so that a failure shows at once.
        dist.all_reduce(torch.zeros(1, device=device))
    elif shard and not dist.is_initialized():
        dist.init_process_group(backend(device), store=dist.HashStore(), rank=0, world_size=1)
    return device


def check_own_address() -> None:
    """Make sure that ranks on other machines can reach this one. Gloo listens at the address of the host's name, and
    some systems give the name an address that only the machine itself can reach. On the first machine, MASTER_ADDR may
    be that name. So its address does not tell whether all ranks are on one machine, but its text does."""
    is_local = os.environ["MASTER_ADDR"].startswith(("127.", "::1", "localhost"))
    if is_local or os.environ.get("GROUP_WORLD_SIZE", "1") == "1" or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        advice = "set GLOO_SOCKET_IFNAME to its network interface, such as eth0 (`ip route` shows it)"
        raise UserError(f"other machines cannot reach {socket.gethostname()} at its address {address}; {advice}")


def backend(device: torch.device) -> str:
    """Return the backends of the process group. Tensors are exchanged between GPUs. Python objects are exchanged
    between CPUs, where a rank notices at once that another machine is gone."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def share(n: int) -> range:
    """Return which of n items are this rank's. The items of a rank are contiguous, and their number, which may be zero,
    differs between ranks by one at most."""
    return range(rank() * n // world(), (rank() + 1) * n // world())


def gather(own: list) -> list:
    """Concatenate the lists of all ranks, in the order of the ranks, and return the result on every rank."""
    parts = [own] * world()
    if dist.is_initialized():
        dist.all_gather_object(parts, own)  # replaces each element with the list of that rank
    return [item for part in parts for item in part]


def check_same(values: dict[str, Any]) -> None:
    """Make sure that these values, given by name, are equal on all ranks. If those of a rank differ from those of rank
    0, all ranks fail, and rank 0 reports the names."""
    first, *others = gather([values])
    for number, theirs in enumerate(others, start=1):
        if differing := [name for name in first if theirs.get(name) != first[name]]:
            fail(f"rank {number} differs from rank 0 in {', '.join(differing)}")


def wait() -> None:
    """Wait until all ranks have come to this line."""
    gather([])


def on_first(call: Callable, *args: Any) -> Any:
    """Call a function on the first rank only, and return the function's result on every rank. If the function raises a
    UserError, every rank fails."""
    with fail_together():
        made = call(*args) if rank() == 0 else None
    return gather([made])[0]


@contextmanager
def fail_together() -> Iterator[None]:
    """Make every rank fail at the end of this block if any rank raises an error inside it. If several ranks do, only
    the one with the lowest number reports its error. A rank that raises an error skips the rest of the block, so ranks
    must not communicate inside the block."""
    error_here = None
    try:
        yield
    except BaseException as error:
        error_here = error
    for number, message in enumerate(gather([None if error_here is None else str(error_here)])):
        if message is not None:
            error = error_here if number == rank() else faults.FailedElsewhere(message)
            error.on_all_ranks = True
            raise error


def all_fail_with(error: BaseException) -> bool:
    """Return whether all ranks end with this error, so that they can still work together."""
    return world() == 1 or getattr(error, "on_all_ranks", False)


def fail(message: str) -> NoReturn:
    """End the run. All ranks must call this, and rank 0 reports the message."""
    raise UserError(message) if rank() == 0 else faults.FailedElsewhere(message)


def sum_(tensor: torch.Tensor) -> None:
    """Sum a tensor over the ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def sum_gradients(model: torch.nn.Module) -> None:
    """Sum the gradients over the ranks. A missing gradient counts as zero: this rank may have had no micro-batch, or
    the loss does not depend on the parameter."""
    buckets, before = defaultdict(list), 0  # `before` counts the bytes of all earlier gradients
    for p in (p for p in model.parameters() if p.requires_grad):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        # Sharded gradients are already summed in the backward pass.
        if dist.is_initialized() and not isinstance(p.grad, DTensor):
            buckets[before // BUCKET_BYTES].append(p.grad)
            before += p.grad.nbytes
    for bucket in buckets.values():
        flat = torch.cat([gradient.flatten() for gradient in bucket])
        sum_(flat)
        for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
            gradient.copy_(summed.view_as(gradient))


def clip_gradients(model: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Clip the gradients to this norm. Return the norm that the gradients of the whole model had before."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# ---- Random numbers ----


def seed_everything(seed: int, *numbers: int) -> None:
    """Seed Python, NumPy and PyTorch. `numbers` are for instance the step and the rank. Only user code, such as a
    reward, draws from these global generators."""
    transformers.set_seed(int(np.random.SeedSequence([seed, *numbers]).generate_state(1)[0]))


def generator(name: str, seed: int, *numbers: int) -> np.random.Generator:
    """Return a generator for one purpose. `name` describes the purpose, and `numbers` are for instance the step. Two
    generators produce the same random numbers only if the name, the seed and all numbers are equal."""
    # Hashed, because NumPy pads seeds with zeros: completion (0, 0) and shuffle of step s share the stream of epoch s.
    # NumPy's integers have another repr, so convert them.
    key = hashlib.sha256(repr((name, int(seed), *map(int, numbers))).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key)))
