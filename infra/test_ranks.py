"""How a rank starts, on a GPU too, and which way things travel between ranks."""

import os

import pytest
import torch
import torch.distributed as dist

from config import UserError
from infra import ranks


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2"}])
def test_on_a_gpu_segments_grow_unless_the_allocator_has_other_settings(given, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert ranks.start() == torch.device("cuda", 0)
    assert os.environ == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_a_rank_without_its_friends(monkeypatch):
    monkeypatch.setattr(os, "environ", {"RANK": "0", "MASTER_ADDR": "127.0.0.1"})
    told = "RANK is set, but not WORLD_SIZE, MASTER_PORT: start with torchrun; for one process, unset RANK"
    with pytest.raises(UserError, match=told):
        ranks.start()


def test_objects_travel_between_cpus_and_tensors_between_gpus():
    assert ranks.backend(torch.device("cpu")) == "gloo"
    both = ranks.backend(torch.device("cuda", 1))
    assert both == "cpu:gloo,cuda:nccl"
    dist.init_process_group(both.replace("nccl", "gloo"), store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.distributed_c10d._get_object_coll_device() == "cpu"
    finally:
        dist.destroy_process_group()
