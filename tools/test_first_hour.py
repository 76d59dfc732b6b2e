"""The report of the first hour on a GPU, here a pretended one."""

import json
import os
from pathlib import Path

import pytest

import conftest
from infra import pretend_gpu
from tools import first_hour


def first_hour_of(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    conftest.replace("infra.ranks.backend", lambda _: lambda device: "cpu:gloo,cuda:gloo")  # there is no NCCL
    conftest.replace("tools.first_hour.gpu_tests", lambda _: lambda: "7 passed")
    conftest.replace("tools.first_hour.KINDS", lambda kinds: {kind: (flags, 2) for kind, (flags, _) in kinds.items()})
    first_hour.main(words)


@pytest.mark.skipif(bool(pretend_gpu.WHY_NOT), reason=str(pretend_gpu.WHY_NOT))
def test_the_first_hour(sorting, tmp_path):
    words = f"--task sorting --data {sorting['data']} --prompts_per_step 2 --num_generations 2"
    pretend_gpu.on_pretended_gpu(first_hour_of, words.split(), tmp_path)
    found = json.loads((tmp_path / "first_hour.json").read_text())
    assert found["hardware"]["gpu"] == "pretended GPU" and found["pytest -m gpu"] == "7 passed" and found["ranks"] == 1
    for kind in first_hour.KINDS:
        assert found[kind].pop("dtype") == "bfloat16" and len(found[kind].pop("rewards")) == 2
        assert all(value > 0 for value in found[kind].values())
        assert found[kind]["peak_memory_gb"] < found[kind]["planned_memory_gb"]
