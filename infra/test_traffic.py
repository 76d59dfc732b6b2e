"""What a sharded rank hands to the others, in bytes."""

from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from conftest import tiny_model
from infra import shard
from logprob import token_logprobs

CALLS = {  # their names differ between versions of PyTorch
    "all_gather_single": "gather", "all_gather_into_tensor": "gather", "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce", "all_reduce": "all-reduce",
}  # fmt: skip


def count_bytes(rank: int, folder: Path) -> None:
    """One of four ranks, in two copies of two: what gathering and two micro-batches hand to each collective call."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    handed: Counter[str] = Counter()
    within = []

    def counted(call, name, *args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        handed[CALLS[name]] += 0 if within else max(x.numel() * x.element_size() for x in tensors)
        within.append(name)  # one may call another
        result = call(*args, **kwargs)
        within.pop()
        return result

    whole, cpu = tiny_model("qwen2 tied", torch.float32, vocab_size=62), torch.device("cpu")
    with torch.device("meta"):
        empty = type(whole)(whole.config)
    model = shard.shard(empty, whole if rank == 0 else None, shard.make_mesh(2, cpu), torch.bfloat16, cpu)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    for name in CALLS.keys() & vars(dist).keys():
        setattr(dist, name, partial(counted, getattr(dist, name), name))
    with shard.unsharded(model):
        pass
    found = [dict(handed)]
    for _ in range(2):
        handed.clear()
        ids = torch.ones(2, 8, dtype=torch.long)
        token_logprobs(model, ids, torch.ones_like(ids), ids.cumsum(1) > 1)[0].sum().backward()
        found.append(dict(handed))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


def test_weights_travel_in_bf16_and_gradients_in_fp32(tmp_path):
    """For the rollout once, for a micro-batch twice and once: the table in docs/distributed.md."""
    mp.start_processes(count_bytes, args=(tmp_path,), nprocs=4, start_method="forkserver")
    rollout, first, second = torch.load(tmp_path / "found.pt")
    P = sum(p.numel() for p in tiny_model("qwen2 tied", vocab_size=62).parameters())
    assert rollout == {"gather": 2 * P}
    assert second == {"gather": 2 * 2 * P, "reduce": 4 * P, "all-reduce": 4 * P // 2}, "size 2, two copies"
    assert (first["reduce"], first["all-reduce"]) == (second["reduce"], second["all-reduce"])
