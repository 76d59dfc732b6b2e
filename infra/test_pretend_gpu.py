"""Whole runs that use a GPU: a pretended one by default, and a real one with `pytest -m gpu`."""

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
from conftest import assert_same_run, errors, flat_gradient, metrics, run
from fast.output_head import linear_in_fp32
from infra import pretend_gpu
from infra.pretend_gpu import needs_pretended_gpu, on_pretended_gpu

GPUS = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if torch.version.cuda else 0
REAL = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="there is no GPU")]
KINDS = [pytest.param("pretended", marks=needs_pretended_gpu), pytest.param("real", marks=REAL)]


def on_a_gpu(kind: str, capacity: float = 80e9) -> None:
    if kind == "real":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        pretend_gpu.install(capacity, gpus=8)


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    """Return settings that use all code that handles devices: several updates, a reference, an evaluation, entropies, a
    checkpoint."""
    settings = dict(minibatches=2, beta=0.1, ref_sync_every=1, top_entropy=0.9, eval_every=1, eval_prompts=2, eval_k=2)
    settings |= dict(top_p=0.9, gradient_checkpointing=True, save_every=1, dtype="float32", decode="plain")
    # The budgets are those of a CPU, so nothing is measured.
    settings |= dict(max_completion_length=4, rollout_tokens=32768, micro_batch_tokens=2048)
    return sorting | settings


def print_devices(pick_rows: Callable) -> Callable:
    """Print for each rank and step the device of the run, the device that torch.cuda.set_device has chosen, and the
    device of a tensor that is kept in Run.state. Loading this tensor from a checkpoint must not change its device."""

    def picking(run, *rest):
        kept = run.state.setdefault("kept", torch.arange(3.0, device=run.device))
        print(f"run on {run.device}, chosen {pretend_gpu.gpu.set_to}, state on {kept.device.type}")
        return pick_rows(run, *rest)

    return picking


def output_head_in_fp32() -> torch.Tensor:
    x = torch.linspace(-2, 3, 24).view(4, 6).bfloat16()
    return linear_in_fp32(x.pin_memory().to("cuda", non_blocking=True), x.to("cuda")).cpu()


@needs_pretended_gpu
def test_logits_of_the_output_head_are_not_rounded_to_bfloat16():
    y, x = on_pretended_gpu(output_head_in_fp32), torch.linspace(-2, 3, 24).view(4, 6).bfloat16().float()
    torch.testing.assert_close(y, x @ x.T)
    assert not torch.equal(y, y.bfloat16().float())


def print_waits(accumulate: Callable) -> Callable:
    """Print how often the host waits for the GPU in each micro-batch of an update. The update is computed twice, with
    few and with many micro-batches, and the additional waits are divided by the number of additional micro-batches."""

    def accumulating(run, batch):
        pieces, waits = [], []
        for rows in (4, 2):
            run.limits = replace(run.limits, rows=rows, tokens=None, hidden_size=None)
            pieces.append(len([*micro_batches(batch, run.limits)]))
            pretend_gpu.gpu.waits.clear()
            result = accumulate(run, batch)
            waits.append(pretend_gpu.gpu.waits.total())
        print("waits:", (waits[1] - waits[0]) / (pieces[1] - pieces[0]))
        return result

    return accumulating


@needs_pretended_gpu
@pytest.mark.parametrize("given, waits", [({}, 6), (dict(top_p=0.9), 10)])
def test_how_often_the_host_waits_in_a_micro_batch(small, tmp_path, given, waits):
    """The host waits six times: to copy the row numbers of the micro-batch to the GPU, to see if it has a gradient,
    for the length of the longest row, to check that every completion has a prompt, to find the scored tokens, and in
    transformers, which checks whether a row has several sequences. With top-p the host waits four more times, to look
    up the sets of ids that the tokens were sampled from and to copy them. This fails if a change adds a wait, for
    instance for a metric."""
    settings = small | dict(top_p=1.0, steps=1, minibatches=1, top_entropy=1.0, eval_every=0, dtype="bfloat16") | given
    watched = partial(conftest.replace, "train.accumulate", print_waits)
    shown = run(settings, tmp_path / "out", partial(on_a_gpu, "pretended"), watched)
    assert [float(x) for x in re.findall("waits: (.*)", shown)] == [waits]


@pytest.fixture(scope="module")
def on_a_cpu(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("cpu") / "out"
    run(small, out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, given, stops", [(1, {}, [1, 2]), (2, {}, [2]), (2, dict(shard=True), [1, 2])])
def test_in_float32_a_run_on_a_gpu_is_the_run_on_a_cpu(small, on_a_cpu, tmp_path, kind, world, given, stops):
    """The results are the same up to rounding, on any number of ranks, even after the run was stopped and resumed."""
    if kind == "real" and world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    watched, out = partial(conftest.replace, "train.pick_rows", print_devices), tmp_path / "out"
    for steps in stops:
        shown = run(small | given | dict(steps=steps), out, partial(on_a_gpu, kind), watched, world=world)
        assert {*re.findall(r"state on (cuda|cpu)", shown)} == {"cuda"}
    # A line of the output names the device: "2 rank(s) (cuda)", not "2 rank(s) (cpu)".
    assert f"{world} rank(s)" in shown and "(cpu" not in shown
    if kind == "pretended":
        assert {*re.findall(r"run on cuda:(\d), chosen cuda:(\d)", shown)} == {(str(n), str(n)) for n in range(world)}
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, dict(shard=True)])
def test_a_run_in_bfloat16(small, tmp_path, kind, given):
    # With --shard, gradients are not compared, because `flat_gradient` cannot make one vector of the shards.
    watched = [] if given else [partial(conftest.replace, "train.accumulate", print_cosine)]
    shown = run(small | given | dict(dtype="auto", steps=1), tmp_path / "out", partial(on_a_gpu, kind), *watched)
    assert '"bfloat16"' in (tmp_path / "out/config.json").read_text()
    assert '"peak_memory_reserved_gb": null' not in (tmp_path / "out/metrics.jsonl").read_text()
    assert all(line["grad_norm"] > 0 for line in metrics(tmp_path / "out") if line["step"])
    cosines = [float(x) for x in re.findall("cosine (.*)", shown)]
    # bfloat16 rounds by up to 0.4 %, so the gradient differs by about 1 %. A cosine of exactly 1 would show that it was
    # computed in float32.
    assert len(cosines) == (0 if given else small["minibatches"]) and all(0.99 <= cosine < 1.0 for cosine in cosines)


@needs_pretended_gpu
def test_a_run_out_of_memory_continues_with_smaller_parts(small, tmp_path):
    """Memory runs out in an evaluation, which has more completions than a step, and in an update. The results must be
    those of a run on a CPU."""
    settings = small | dict(max_completion_length=12, eval_prompts=5, eval_k=24)
    settings |= dict(steps=1, minibatches=1, gradient_checkpointing=False)
    run(settings, tmp_path / "cpu")
    budgets = dict(rollout_tokens=10**6, micro_batch_tokens=10**6)
    shown = run(settings | budgets, tmp_path / "out", partial(on_a_gpu, "pretended", 1.9e6))
    assert "completions are sampled at once" in shown and "from now on a micro-batch has" in shown
    assert not errors(shown)
    assert_same_run(tmp_path / "out", tmp_path / "cpu")
