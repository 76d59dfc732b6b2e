"""How a rank starts on a GPU, and which way things travel between ranks."""

import os

import pytest
import torch
import torch.distributed as dist

from infra import ranks

SETTINGS = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2"}])
def test_on_a_gpu_segments_grow_unless_the_allocator_has_other_settings(given, monkeypatch):
    without = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    monkeypatch.setattr(os, "environ", without | given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert ranks.start() == torch.device("cuda", 0)
    now = {name: os.environ[name] for name in SETTINGS & os.environ.keys()}
    assert now == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_objects_travel_between_cpus_and_tensors_between_gpus():
    assert ranks.backend(torch.device("cpu")) == "gloo"
    both = ranks.backend(torch.device("cuda", 1))
    assert both == "cpu:gloo,cuda:nccl"
    dist.init_process_group(both.replace("nccl", "gloo"), store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.distributed_c10d._get_object_coll_device() == "cpu"
    finally:
        dist.destroy_process_group()
