"""The report of the first hour on a GPU, here a pretended one."""

import json
import os
from pathlib import Path

import pytest

import conftest
from conftest import ROOT
from infra.pretend_gpu import needs_pretended_gpu, on_pretended_gpu
from tools import first_hour


def first_hour_of(words: list[str], kinds: list[str], folder: Path) -> None:
    os.chdir(folder)
    # `replace` calls the outer lambda with the original function. The inner lambda takes the place of gpu_tests.
    conftest.replace("tools.first_hour.gpu_tests", lambda _: lambda: "7 passed")
    # Keep the flags of each kind, but make only 2 steps.
    conftest.replace("tools.first_hour.KINDS", lambda found: {kind: (found[kind][0], 2) for kind in kinds})
    first_hour.main(words)


@needs_pretended_gpu
@pytest.mark.parametrize("flags, kinds", [("", [*first_hour.KINDS]), ("--lora_rank 16", ["plain"])])
def test_the_first_hour(flags, kinds, tmp_path):
    # LoRA needs --model: saved adapters name the model that they belong to, and the task's own model has no name.
    words = f"--task addition --model {ROOT}/models/addition --prompts_per_step 2 --max_completion_length 4 {flags}"
    on_pretended_gpu(first_hour_of, words.split(), kinds, tmp_path)
    found = json.loads((tmp_path / "first_hour.json").read_text())
    assert found["hardware"]["gpu"] == "pretended GPU" and found["pytest -m gpu"] == "7 passed" and found["ranks"] == 1
    text = (tmp_path / "first_hour.txt").read_text()
    for kind in kinds:
        assert all(f"{kind}, {name}: {x}\n" in text for name, x in found[kind].items())
        assert found[kind]["dtype"] == "bfloat16" and len(found[kind]["rewards"]) == 2
        assert all(value > 0 for name, value in found[kind].items() if name not in ("dtype", "rewards"))
        assert found[kind]["peak_memory_gb"] < found[kind]["gpu_memory_gb"]


def test_what_was_measured_stays_in_the_files_when_a_later_kind_of_run_fails(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def measure(words: list[str], steps: int, device: object) -> dict:
        if "graph" in words:
            raise RuntimeError("out of order")
        return {"rewards": [0.5]}

    monkeypatch.setattr(first_hour, "measure", measure)
    monkeypatch.setattr(first_hour, "gpu_tests", lambda: "7 passed")
    monkeypatch.setattr(first_hour.ranks, "start", lambda shard: None)
    with pytest.raises(RuntimeError, match="out of order"):
        first_hour.main([])
    assert "plain, rewards: [0.5]\n" in (tmp_path / "first_hour.txt").read_text()
