"""Settings: what a preset switches, what wins over what, and that those of committed runs still mean the same."""

import json
from pathlib import Path

import pytest

from config import ALGORITHMS, Config, resolve, settings_that_may_change
from infra.command_line import ready

TASK = dict(num_generations=6, max_completion_length=12, steps=150, learning_rate=1e-3, warmup_steps=5)
GRPO = dict(
    normalization="sequence", scale_rewards="group", baseline="mean", objective="clip", ratio="token", epsilon_low=0.2,
    epsilon_high=0.2, combine_rewards="sum", dynamic_sampling=0,
)  # fmt: skip
PAPERS = {  # as on docs/objectives.md: in what each differs from GRPO
    "grpo": {},
    "dr_grpo": dict(normalization="constant", scale_rewards="none"),
    "dapo": dict(normalization="global", epsilon_high=0.28, dynamic_sampling=3),
    "gspo": dict(ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "cispo": dict(normalization="global", objective="cispo", epsilon_high=5.0),
    "sapo": dict(objective="sapo"),
    "gmpo": dict(ratio="geometric", epsilon_low=0.4, epsilon_high=0.4),
    "luspo": dict(normalization="sum", ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "dppo": dict(normalization="global", objective="dppo"),
    "maxrl": dict(scale_rewards="mean"),
    "opo": dict(normalization="global", scale_rewards="none", baseline="length"),
    "gdpo": dict(combine_rewards="gdpo", scale_rewards="batch", baseline="batch"),
    "rloo": dict(normalization="sum", scale_rewards="none", baseline="leave_one_out", objective="reinforce"),
    "reinforce++": dict(normalization="global", scale_rewards="whiten", baseline="none"),
    "reinforce++-baseline": dict(normalization="global", scale_rewards="whiten"),
}


def resolved(on_gpu: bool = False, **settings) -> Config:
    return resolve(Config(**settings), TASK, on_gpu)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_preset_is_the_papers_and_sets_nothing_else(algorithm):
    ours, plain = vars(resolved(algorithm=algorithm)), vars(resolved())
    assert ours | GRPO | PAPERS[algorithm] == ours
    changed = {name for name in ours if ours[name] != plain[name]}
    assert changed <= {"algorithm", "out", *GRPO}


def test_what_is_given_wins():
    given = dict(epsilon_high=0.3, normalization="sequence", dynamic_sampling=0)  # over the preset
    given |= dict(num_generations=3, learning_rate=0.5, steps=7, warmup_steps=0)  # over the task
    given |= dict(micro_batch_tokens=5, rollout_tokens=7, dtype="bfloat16", out="here")  # over the machine
    dapo = vars(resolved(algorithm="dapo", **given))
    assert dapo | given == dapo
    assert dapo["epsilon_low"] == 0.2 and dapo["max_completion_length"] == 12, "what is not given is filled in"


def test_what_the_machine_decides():
    cpu, gpu = resolved(), resolved(on_gpu=True)
    assert (cpu.dtype, gpu.dtype) == ("float32", "bfloat16") and resolved(
        on_gpu=True, dtype="float32"
    ).dtype == "float32"
    assert (cpu.micro_batch_tokens, cpu.rollout_tokens) == (2048, 32768)
    assert (gpu.micro_batch_tokens, gpu.rollout_tokens) == (None, None), "decided by its memory, later"
    assert resolved(micro_batch_size=3).micro_batch_tokens is None, "rows given alone: any number of tokens"


def test_task_and_folder():
    assert (resolved().task, resolved(data="d.jsonl").task) == ("addition", "data")
    assert resolved(data="d.jsonl", task="sorting").task == "sorting"
    assert resolved(task="sorting", algorithm="gspo", seed=4).out == "runs/sorting-gspo-4"


def test_resolving_leaves_what_it_is_given_as_it_is():
    given = Config(algorithm="dapo", reward=["a.py:f"])
    once = resolve(given, TASK, on_gpu=True)
    assert given == Config(algorithm="dapo", reward=["a.py:f"])
    assert resolve(once, {name: 99 for name in TASK}, on_gpu=True) == once


def test_a_run_may_be_continued_with_what_does_not_change_it():
    assert {"micro_batch_tokens", "shard", "out", "save_every"} <= set(settings_that_may_change())
    assert not {"seed", "dtype", "task", "reward", "beta", *GRPO} & set(settings_that_may_change())


COMMITTED = sorted((Path(__file__).parent / "results").rglob("config.json"))


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: "/".join(file.parts[-3:-1]))
def test_settings_of_a_committed_run_are_valid_and_stay_as_they_are(file):
    settings = json.loads(file.read_text())["settings"]
    config = vars(ready(Config(**settings), on_gpu=True))  # a setting that came later counts as its default
    assert config | settings == config


def test_there_are_committed_runs():
    assert len(COMMITTED) > 50
