"""What a sharded rank hands to the others, in bytes."""

import os
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import Qwen2Config, Qwen2ForCausalLM

from infra import shard
from logprob import token_logprobs

SETTINGS = Qwen2Config(
    vocab_size=512, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, tie_word_embeddings=True,
)  # fmt: skip
CALLS = {  # their names differ between versions of PyTorch
    "gather": ("all_gather_single", "all_gather_into_tensor"),
    "reduce": ("reduce_scatter_single", "reduce_scatter_tensor"),
    "all-reduce": ("all_reduce",),
}


def count_bytes(rank: int, folder: str) -> None:
    """One of four ranks, in two copies of two: what gathering and two micro-batches hand to each collective call."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    handed: Counter[str] = Counter()
    under_way = []

    def counted(call, kind, *args, **kwargs):
        if not under_way:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
            handed[kind] += max(x.numel() * x.element_size() for x in tensors)
        under_way.append(kind)
        try:
            return call(*args, **kwargs)
        finally:
            under_way.pop()

    whole = Qwen2ForCausalLM(SETTINGS) if rank == 0 else None
    with torch.device("meta"):
        empty = Qwen2ForCausalLM(SETTINGS)
    cpu = torch.device("cpu")
    model = shard.shard(empty, whole, shard.make_mesh(2, cpu), torch.bfloat16, cpu)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    for kind, names in CALLS.items():
        for name in names:
            if hasattr(dist, name):
                setattr(dist, name, partial(counted, getattr(dist, name), kind))
    with shard.unsharded(model):
        pass
    found = [dict(handed)]
    for _ in range(2):
        handed.clear()
        ids = torch.ones(2, 8, dtype=torch.long)
        completion = torch.ones_like(ids)
        completion[:, 0] = 0
        token_logprobs(model, ids, torch.ones_like(ids), completion)[0].sum().backward()
        found.append(dict(handed))
    if rank == 0:
        torch.save(found, os.path.join(folder, "found.pt"))
    dist.destroy_process_group()


def test_weights_travel_in_bf16_and_gradients_in_fp32(tmp_path):
    """For the rollout once, for a micro-batch twice and once: the table in docs/distributed.md."""
    mp.start_processes(count_bytes, args=(str(tmp_path),), nprocs=4, start_method="forkserver")
    rollout, first, second = torch.load(tmp_path / "found.pt")
    P = sum(p.numel() for p in Qwen2ForCausalLM(SETTINGS).parameters())
    assert rollout == {"gather": 2 * P}
    assert second == {"gather": 2 * 2 * P, "reduce": 4 * P, "all-reduce": 4 * P // 2}, "size 2, two copies"
    assert (first["reduce"], first["all-reduce"]) == (second["reduce"], second["all-reduce"])
