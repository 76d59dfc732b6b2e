"""The report of the first hour on a GPU, here of a CPU."""

import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

import conftest
from conftest import PROCESSES, ROOT
from tools import first_hour


def first_hour_of(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    # `replace` calls the outer lambda with the original function. The inner lambda takes the place of gpu_tests.
    conftest.replace("tools.first_hour.gpu_tests", lambda _: lambda: "7 passed")
    conftest.replace("tools.first_hour.STEPS", lambda _: dict.fromkeys(first_hour.KINDS, 2))
    first_hour.main(words)


def test_the_first_hour(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n' * 9)  # few prompts are soon encoded
    words = f"--model {ROOT}/models/addition --task addition --data {tmp_path}/rows.jsonl --eval_every 0"
    words += " --prompts_per_step 2 --num_generations 4 --max_completion_length 2 --micro_batch_tokens 64"
    with ProcessPoolExecutor(1, PROCESSES) as pool:  # in a process of its own, which joins a group
        pool.submit(first_hour_of, words.split(), tmp_path).result()
    lines = (tmp_path / "first_hour.txt").read_text().splitlines()
    found = dict(line.split(": ", 1) for line in lines)
    assert found["pytest -m gpu"] == "7 passed" and found["ranks"] == "1"
    assert found["first difference of two runs"] == "none in 5 steps"
    for kind in first_hour.KINDS:
        numbers = {name.partition(", ")[2]: x for name, x in found.items() if name.startswith(f"{kind}, ")}
        assert numbers.pop("dtype") == "float32" and len(json.loads(numbers.pop("rewards"))) == 2
        assert numbers.pop("peak_memory_reserved_gb") == "None"
        assert all(float(x) > 0 for name, x in numbers.items() if name not in ("waits_per_token", "sampler_gap"))
    speed = {kind: float(found[f"{kind}, tokens_per_second_update"]) for kind in ("separate rows", "shared rows")}
    assert found["faster update"] == max(speed, key=speed.get)


def test_the_larger_model_has_the_parameters_of_qwen2_5_of_half_a_billion():
    with torch.device("meta"):
        model, tokenizer = first_hour.larger_model(None)
    assert model.num_parameters() == 494_032_768 and tokenizer("1+1=").input_ids


def test_what_was_measured_stays_in_the_file_when_a_later_kind_of_run_fails(tmp_path, monkeypatch):
    """The first two runs are compared: they are told apart by step and metric. The third is of the first kind, and the
    fourth fails, because there are only three."""
    line = dict(step=1, reward=0.5, tokens=10, loss=0.25, grad_norm=1.0, sampler_gap=0.0)
    runs = iter([[line, line | dict(step=2)], [line, line | dict(step=2, grad_norm=1.5)], []])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(first_hour, "measure", lambda *_: ({"rewards": [0.5]}, next(runs)))
    monkeypatch.setattr(first_hour, "gpu_tests", lambda: "7 passed")
    monkeypatch.setattr(first_hour.ranks, "start", lambda shard: None)
    with pytest.raises(StopIteration):
        first_hour.main([])
    shown = (tmp_path / "first_hour.txt").read_text()
    assert "difference of two runs: step 2, grad_norm: 1.0 and 1.5\nplain, rewards: [0.5]\n" in shown
