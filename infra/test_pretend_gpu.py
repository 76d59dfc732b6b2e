"""Whole runs on the code path of a GPU: always on a pretended GPU, and with `pytest -m gpu` on real ones, which nobody
has done yet."""

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
from conftest import assert_same_files, assert_same_run, errors, flat_gradient, metrics, run
from fast.output_head import linear_in_fp32
from infra import pretend_gpu

GPUS = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if torch.version.cuda else 0
LACKING = pytest.mark.skipif(bool(pretend_gpu.WHY_NOT), reason=str(pretend_gpu.WHY_NOT))
REAL = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="there is no GPU")]
KINDS = [pytest.param("pretended", marks=LACKING), pytest.param("real", marks=REAL)]


def on_a_gpu(kind: str, capacity: float = 80e9) -> None:
    if kind == "real":
        del os.environ["CUDA_VISIBLE_DEVICES"]
    else:
        pretend_gpu.install(capacity, gpus=8)
        conftest.replace("infra.ranks.backend", lambda _: lambda device: "cpu:gloo,cuda:gloo")  # there is no NCCL


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    """Every path that knows a device: several updates, a reference, an evaluation, entropies, a checkpoint."""
    return sorting | dict(
        minibatches=2, beta=0.1, ref_sync_every=1, top_entropy=0.9, eval_every=1, eval_prompts=5, eval_k=2, top_p=0.9,
        gradient_checkpointing=True, save_every=1, dtype="float32",
    )  # fmt: skip


def without_reserved(out: Path) -> Path:
    """Set the memory that a GPU's allocator reserves to null, which it is on a CPU."""
    lines, name = (out / "metrics.jsonl").read_text(), '"peak_memory_reserved_gb": '
    assert name in lines and f"{name}null" not in lines
    (out / "metrics.jsonl").write_text(re.sub(f"({name})[^,}}]+", r"\1null", lines))
    return out


def look_at_devices() -> None:
    """Print the device of each rank, and where a tensor in Run.state is after it was stored in a checkpoint."""

    def start(original: Callable) -> Callable:
        def started(*given):
            device = original(*given)
            print(f"on {device}, set to {pretend_gpu.gpu.set_to}")
            return device

        return started

    def pick_rows(original: Callable) -> Callable:
        def picked(run, *rest):
            print("in the state:", run.state.setdefault("seen", torch.arange(3.0, device=run.device)).device.type)
            return original(run, *rest)

        return picked

    conftest.replace("infra.ranks.start", start)
    conftest.replace("train.pick_rows", pick_rows)


@LACKING
def test_each_rank_sets_its_device_and_what_is_remembered_comes_back_to_it(small, tmp_path):
    for steps in (1, 2):
        settings = small | dict(steps=steps, minibatches=1, beta=0.0, ref_sync_every=0, eval_every=0)
        shown = run(settings, tmp_path / "out", partial(on_a_gpu, "pretended"), look_at_devices, world=2)
        devices = sorted(re.findall(r"on cuda:(\d), set to cuda:(\d)", shown))
        assert devices == [("0", "0"), ("1", "1")]
        assert {*re.findall(r"in the state: (\w+)", shown)} == {"cuda"}


def in_fp32() -> torch.Tensor:
    x = torch.linspace(-2, 3, 24).view(4, 6).bfloat16()
    return linear_in_fp32(x.pin_memory().to("cuda", non_blocking=True), x.to("cuda")).cpu()


@LACKING
def test_the_heads_product_is_not_rounded_to_bfloat16():
    y, x = pretend_gpu.on_pretended_gpu(in_fp32), torch.linspace(-2, 3, 24).view(4, 6).bfloat16().float()
    torch.testing.assert_close(y, x @ x.T)
    assert not torch.equal(y, y.bfloat16().float())


def compare_buffers() -> None:
    def shard(original: Callable) -> Callable:
        def sharded(empty, whole, *rest):
            model, expected = original(empty, whole, *rest), dict(whole.named_buffers())
            assert all(torch.equal(buffer.cpu(), expected[name]) for name, buffer in model.named_buffers())
            print("equal buffers:", len(expected))
            return model

        return sharded

    conftest.replace("infra.model.shard", shard)


def count_waits() -> None:
    """Print how often the host waits for the GPU in a micro-batch of an update."""

    def accumulate(original: Callable) -> Callable:
        def accumulated(run, batch):
            counted = []
            for rows in (4, 2):
                run.limits = replace(run.limits, rows=rows, tokens=None, hidden_size=None)
                pieces = len([*micro_batches(batch, run.limits)])
                pretend_gpu.gpu.waits.clear()
                result = original(run, batch)
                counted.append((pieces, pretend_gpu.gpu.waits.total()))
            (few, its), (more, theirs) = counted
            print("waits:", (theirs - its) / (more - few))
            return result

        return accumulated

    conftest.replace("train.accumulate", accumulate)


@LACKING
@pytest.mark.parametrize("cut, expected", [({}, 6), (dict(top_p=0.9), 12)])
def test_how_often_the_host_waits_in_a_micro_batch(small, tmp_path, cut, expected):
    """Each wait has its reason: how long the longest row is, which tokens are scored, whether there is a gradient ...
    Another one, for a figure of the micro-batch, say, must not be added without noticing."""
    settings = small | dict(top_p=1.0, steps=1, minibatches=1, top_entropy=1.0, eval_every=0, dtype="bfloat16") | cut
    shown = run(settings, tmp_path / "out", partial(on_a_gpu, "pretended"), count_waits)
    assert [float(x) for x in re.findall("waits: (.*)", shown)] == [expected]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world, given, stops", [(1, {}, [1, 2]), (2, {}, [2]), (2, dict(shard=True), [1, 2])])
def test_in_float32_a_run_on_a_gpu_is_the_run_on_a_cpu(small, tmp_path, kind, world, given, stops):
    """Across a resume after the first of two stops, and on a pretended GPU bit for bit."""
    if kind == "real" and world > GPUS:
        pytest.skip(f"needs {world} GPUs")
    cpu, out = tmp_path / "cpu", tmp_path / "out"
    settings = small | given | dict(max_completion_length=4, eval_prompts=2)
    run(settings, cpu, world=world)
    for steps in stops:
        shown = run(settings | dict(steps=steps), out, partial(on_a_gpu, kind), world=world)
    assert f"{world} rank(s)" in shown and "(cpu" not in shown
    (assert_same_files if kind == "pretended" else assert_same_run)(without_reserved(out), cpu)


def compare_gradients() -> None:
    """Compare the gradient of each update in bfloat16 with that of the same update in float32."""

    def both(accumulate: Callable) -> Callable:
        def accumulating(run, batch):
            config, run.config = run.config, replace(run.config, dtype="float32")
            accumulate(run, batch)
            exact, run.config = flat_gradient(run.model), config
            result = accumulate(run, batch)
            cosine = cosine_similarity(flat_gradient(run.model), exact, dim=0)
            print(f"cosine {float(cosine):.6f}")
            return result

        return accumulating

    conftest.replace("train.accumulate", both)


def emulated() -> None:
    """bfloat16 is only emulated, as on GPUs from before 2020."""
    conftest.replace("torch.cuda.is_bf16_supported", lambda _: lambda including_emulation=True: including_emulation)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [{}, dict(shard=True)])
def test_in_bfloat16_it_goes_through(small, tmp_path, kind, given):
    settings = small | given | dict(dtype="auto", steps=1)
    looks = [emulated, compare_buffers] if given else [compare_gradients]
    shown = run(settings, tmp_path / "out", partial(on_a_gpu, kind), *looks)
    assert not given or int(re.search("equal buffers: (.*)", shown)[1]) > 0
    assert ("emulates bfloat16" in shown) == bool(given)
    assert '"bfloat16"' in (tmp_path / "out/config.json").read_text()
    assert all(line["grad_norm"] > 0 for line in metrics(tmp_path / "out") if line["step"])
    cosines = [float(x) for x in re.findall("cosine (.*)", shown)]
    assert given or (len(cosines) == 2 and all(0.99 <= cosine < 1.0 for cosine in cosines))


@LACKING
def test_memory_that_runs_out_is_found_by_allocating_it(small, tmp_path):
    """Memory runs out in an evaluation, which has more samples, and in an update. The result is that of a CPU."""
    settings = small | dict(eval_k=60, steps=1, minibatches=1, gradient_checkpointing=False)
    run(settings, tmp_path / "cpu")
    budgets = dict(rollout_tokens=10**6, micro_batch_tokens=10**6)
    shown = run(settings | budgets, tmp_path / "out", partial(on_a_gpu, "pretended", 2.4e6))
    assert "completions are sampled at once" in shown and "going on with micro-batches of up to" in shown
    assert not errors(shown)
    assert_same_run(without_reserved(tmp_path / "out"), tmp_path / "cpu")
