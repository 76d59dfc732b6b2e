"""Whole runs on a real GPU, with `pytest -m gpu`. What can be counted on a CPU: how often a GPU would be waited for."""

import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cosine_similarity

import conftest
from batch import micro_batches
from conftest import Operations, assert_same_run, flat_gradient, metrics, run

GPUS = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if torch.version.cuda else 0


def on_a_gpu(test: Callable) -> Callable:
    return pytest.mark.gpu(pytest.mark.skipif(GPUS == 0, reason="there is no GPU")(test))


def show_gpus() -> None:
    del os.environ["CUDA_VISIBLE_DEVICES"]  # conftest.py hides them


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    """Return settings that use all code that handles devices: several updates, a reference, an evaluation, entropies, a
    checkpoint."""
    settings = dict(minibatches=2, beta=0.1, ref_sync_every=1, top_entropy=0.9, eval_every=1, eval_prompts=2, eval_k=2)
    settings |= dict(top_p=0.9, gradient_checkpointing=True, save_every=1, dtype="float32", decode="plain")
    settings |= dict(max_completion_length=4, rollout_tokens=32768, micro_batch_tokens=2048)  # those of a CPU
    return sorting | settings


def print_waits(accumulate: Callable) -> Callable:
    """Print how often the host waits in each micro-batch of an update. The update is computed twice, with few and with
    many micro-batches, and the additional waits are divided by the number of additional micro-batches."""

    def accumulating(run, batch):
        pieces, waits = [], []
        accumulate(run, batch)  # the trial of the model's head waits, too, but only once
        for rows in (4, 2):
            run.limits = replace(run.limits, rows=rows, tokens=None, hidden_size=None)
            pieces.append(len([*micro_batches(batch, run.limits)]))
            with Operations() as operations:
                result = accumulate(run, batch)
            waits.append(operations.waits.total())
        print("waits:", (waits[1] - waits[0]) / (pieces[1] - pieces[0]))
        return result

    return accumulating


@pytest.mark.parametrize("given, most", [({}, 5), (dict(top_p=0.9), 8)])
def test_how_often_the_host_waits_in_a_micro_batch(small, tmp_path, given, most):
    """The host waits five times: to copy the row numbers of the micro-batch to the GPU, for the length of the longest
    row, to check that every row is a prompt and a completion, to find the scored tokens, and for transformers, which
    looks whether a row has several sequences. With top-p it waits more often, to look up the sets of ids that the
    tokens were sampled from and to copy them. This fails if a change adds a wait, for instance for a metric."""
    settings = small | dict(top_p=1.0, steps=1, minibatches=1, top_entropy=1.0, eval_every=0) | given
    shown = run(settings, tmp_path / "out", partial(conftest.replace, "train.accumulate", print_waits))
    assert 0 < float(re.search("waits: (.*)", shown)[1]) <= most


@pytest.fixture(scope="module")
def on_a_cpu(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cpu") / "out"
    run(small, out)
    return out


@on_a_gpu
@pytest.mark.parametrize("world, given, stops", [(1, {}, [1, 2]), (2, {}, [2]), (2, dict(shard=True), [1, 2])])
def test_in_float32_a_run_on_a_gpu_is_the_run_on_a_cpu(small, on_a_cpu, tmp_path, world, given, stops):
    """The results are the same up to rounding, on any number of ranks, even after the run was stopped and resumed."""
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    out = tmp_path / "out"
    for steps in stops:
        shown = run(small | given | dict(steps=steps), out, show_gpus, world=world)
    assert f"{world} rank(s)" in shown and "(cpu" not in shown  # a line says "2 rank(s) (cuda)", not "2 rank(s) (cpu)"
    assert_same_run(out, on_a_cpu)


def print_cosine(accumulate: Callable) -> Callable:
    """Compare the gradient of each update in bfloat16 with that of the same update in float32."""

    def accumulating(run, batch):
        run.config = replace(run.config, dtype="float32")
        accumulate(run, batch)
        exact = flat_gradient(run.model)
        run.config = replace(run.config, dtype="bfloat16")
        result = accumulate(run, batch)
        print(f"cosine {float(cosine_similarity(flat_gradient(run.model), exact, dim=0)):.6f}")
        return result

    return accumulating


@on_a_gpu
@pytest.mark.parametrize("given", [{}, dict(shard=True)])
def test_a_run_in_bfloat16(small, tmp_path, given):
    # With --shard, gradients are not compared, because `flat_gradient` cannot make one vector of the shards.
    watched = [] if given else [partial(conftest.replace, "train.accumulate", print_cosine)]
    shown = run(small | given | dict(dtype="auto", steps=1), tmp_path / "out", show_gpus, *watched)
    assert '"bfloat16"' in (tmp_path / "out/config.json").read_text()
    assert '"peak_memory_reserved_gb": null' not in (tmp_path / "out/metrics.jsonl").read_text()
    assert all(line["grad_norm"] > 0 for line in metrics(tmp_path / "out") if line["step"])
    cosines = [float(x) for x in re.findall("cosine (.*)", shown)]
    # bfloat16 rounds by up to 0.4 %, so the gradient differs by about 1 %. A cosine of exactly 1 would show that it was
    # computed in float32.
    assert len(cosines) == (0 if given else small["minibatches"]) and all(0.99 <= cosine < 1.0 for cosine in cosines)
