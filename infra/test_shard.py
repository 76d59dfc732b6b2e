"""Sharded over processes and machines, a run is the run of one process; how a rank starts, and what travels."""

import json
import os
import random
import shutil
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM

import train
from conftest import assert_same_run, at, die, errors, fail, metrics, replace, run, tiny_model
from infra import faults, ranks, shard
from logprob import token_logprobs
from tasks._characters import EOS_ID, char_tokenizer
from tasks.sorting import LETTERS


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    """Several updates a rollout, and a reference."""
    return sorting | dict(
        steps=2, num_iterations=2, minibatches=2, beta=0.1, learning_rate=2e-3, warmup_steps=2, max_grad_norm=0.5,
        save_every=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders: an output head of its own; a model that caps its logits, so that each row is scored by itself; weights
    that are torn; a configuration that ties heads which stay apart unsharded."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), char_tokenizer(LETTERS + ">")
    own = dict(vocab_size=15, eos_token_id=EOS_ID, bos_token_id=None, pad_token_id=0)
    for name, family in dict(untied="llama", capped="gemma2").items():
        tiny_model(family, torch.float32, **own).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    os.truncate(shutil.copytree(folder / "untied", folder / "torn") / "model.safetensors", 999)
    file = shutil.copytree(folder / "untied", folder / "tied") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    return folder


def with_model(settings: dict, models: Path) -> dict:
    return settings | ({"model": models / settings["model"]} if "model" in settings else {})


def keep_gradients(out: Path) -> None:
    """The gradient of each update, after clipping, as the optimizer sees it."""
    seen: dict[str, Tensor] = {}

    def whole(x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen[f"{len(seen):03d}"] = torch.cat([whole(p.grad).flatten() for p in optimizer.param_groups[0]["params"]])
        if ranks.rank() == 0:
            save_file(seen, out.with_suffix(".gradients"))

    register_optimizer_step_pre_hook(keep)


def machines_of_unequal_size() -> None:
    """Of two ranks and of one each."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if os.environ["RANK"] in "01" else "1"


def one_way_for_each_device() -> None:
    """As on GPUs, where objects travel another way than tensors."""
    replace("infra.ranks.backend", lambda _: lambda device: "cpu:gloo,cuda:gloo")


CASES = {  # ranks; settings; those of the sharded run alone, which change no number
    "two copies of two shards": (4, {}, dict(shard_size=2, micro_batch_tokens=60, gradient_checkpointing=True)),
    "ranks without a completion": (3, dict(prompts_per_step=1, num_generations=2, minibatches=1), {}),
    "capped, unequal numbers of micro-batches": (2, dict(model="capped", minibatches=1, num_generations=5), {}),
    "an own head, a refreshed reference": (3, dict(model="untied", ref_sync_every=1, eval_every=2, eval_prompts=5), {}),
    "one rank, one update": (1, dict(beta=0.0, num_iterations=1, minibatches=1, entropy_coef=0.01), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_run_is_that_of_one_process(small, models, tmp_path, name):
    world, given, sharded = CASES[name]
    one, out, settings = tmp_path / "one", tmp_path / "out", with_model(small | given, models)
    run(settings, one, partial(keep_gradients, one))
    before = [partial(keep_gradients, out)] + [machines_of_unequal_size, one_way_for_each_device] * (world == 4)
    run(settings | sharded | dict(shard=True), out, *before, world=world)
    assert_same_run(out, one)
    ours, theirs = (load_file(x.with_suffix(".gradients")) for x in (out, one))
    assert ours.keys() == theirs.keys() and len(ours) >= settings["steps"]
    first = ours["000"] - theirs["000"]
    assert theirs["000"].norm() > 1e-3 and first.norm() <= 1e-5 * theirs["000"].norm(), "rounding, in fp32"
    assert json.loads((out / "model/config.json").read_text()) == json.loads((one / "model/config.json").read_text())
    AutoModelForCausalLM.from_pretrained(out / "model")


def keep_bytes(folder: Path) -> None:
    """What this rank holds of the weights, of Adam's moments and of the reference after a step."""

    def local(tensors: list[Tensor]) -> int:
        return sum((x.to_local() if isinstance(x, DTensor) else x).untyped_storage().nbytes() for x in tensors)

    def watched(step):
        def stepping(run: train.Run, *args: int):
            result, weights = step(run, *args), list(run.model.parameters())
            moments = [run.optimizer.state[p][key] for p in weights for key in ("exp_avg", "exp_avg_sq")]
            sizes = [*map(local, (weights, moments, run.reference.parameters()))]
            assert {p.dtype for p in weights} == {torch.float32} and all(p.grad is None for p in weights)
            (folder / f"{ranks.rank()}-of-{ranks.world()}").write_text(json.dumps(sizes))
            return result

        return stepping

    replace("train.training_step", watched)


def test_each_rank_holds_its_part_of_weights_moments_and_reference_in_float32(small, tmp_path):
    """In bfloat16 near the replicated run: that one adds up activations in fp32, this one in bf16."""
    settings = small | dict(dtype="bfloat16", steps=1, minibatches=1, num_iterations=1, eval_every=1, eval_prompts=2)
    run(settings, tmp_path / "one", partial(keep_bytes, tmp_path))
    run(settings | dict(shard=True), tmp_path / "out", partial(keep_bytes, tmp_path), world=2)
    (*_, ours), (*_, theirs) = metrics(tmp_path / "out"), metrics(tmp_path / "one")
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=0.01)
    one, *parts = (json.loads((tmp_path / of_rank).read_text()) for of_rank in ("0-of-1", "0-of-2", "1-of-2"))
    assert one[1] == 2 * one[0] == 2 * one[2] > 0
    for part in parts:  # vectors are padded to equal parts
        assert all(held <= 1.1 * whole / 2 for held, whole in zip(part, one, strict=True))
    for file in (tmp_path / "out" / "checkpoint" / "000001" / "model").glob("*.safetensors"):  # after an evaluation
        assert {x.dtype for x in load_file(file).values()} == {torch.float32}


def test_resumed_on_other_numbers_of_ranks_sharded_and_not(small, tmp_path):
    """Each time one rank dies, which ends the others."""
    settings = small | dict(steps=5, save_every=2, ref_sync_every=3)
    one, out = tmp_path / "one", tmp_path / "out"
    run(settings, one)
    for world, sharded in ((2, True), (1, False)):
        dies = partial(at, "train.training_step", 3, die, rank=world - 1)
        run(settings | dict(shard=sharded), out, one_way_for_each_device, dies, code=None, world=world)
    shown = run(settings | dict(shard=True), out, one_way_for_each_device, world=3)
    assert "continued after step 4" in shown
    assert_same_run(out, one)
    kinds = {path.suffix or path.name for path in (out / "checkpoint").rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json", "SHA256SUMS"}, "nothing that would be unpickled"


def test_out_of_memory_on_one_rank_ends_all_with_a_line(small, tmp_path):
    settings = small | dict(shard=True, micro_batch_size=2)
    oom = partial(at, "train.policy_loss", 2, partial(fail, torch.OutOfMemoryError()), rank=1)
    (error,) = errors(run(settings, tmp_path / "out", oom, code=None, world=2))
    assert error.startswith("error: out of memory in an update: with --shard no rank can go back without the others")
    assert error.endswith(", so lower --micro_batch_size (now 2), or try --gradient_checkpointing")


WRONG = [  # ranks, settings, the line
    (2, dict(shard_size=4), "--shard_size 4: does not divide the 2 ranks"),
    (2, dict(model="tied"), "has a head of its own: set tie_word_embeddings to false in its config.json"),
    (2, dict(model="torn"), "its weights cannot be loaded"),  # only the first rank reads them
    (3, {}, "machines of [1, 2] ranks; give a --shard_size"),
]


@pytest.mark.parametrize("world, given, line", WRONG)
def test_mistakes_are_told_once(small, models, tmp_path, world, given, line):
    before = [machines_of_unequal_size] if world == 3 else []
    settings = with_model(small | dict(shard=True) | given, models)
    shown = run(settings, tmp_path / "out", *before, code=2, world=world)
    assert shown.count("error: ") == 1 and line in shown


@pytest.mark.parametrize("given", [{}, {"PYTORCH_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2"}])
def test_on_a_gpu_segments_grow_unless_the_allocator_has_other_settings(given, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert ranks.start() == torch.device("cuda", 0)
    assert os.environ == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "which would make a plan for each token"


def test_objects_travel_between_cpus_and_tensors_between_gpus():
    assert ranks.backend(torch.device("cpu")) == "gloo"
    both = ranks.backend(torch.device("cuda", 1))
    assert both == "cpu:gloo,cuda:nccl"
    dist.init_process_group(both.replace("nccl", "gloo"), store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.distributed_c10d._get_object_coll_device() == "cpu"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("message, lost", [("NCCL error: remote process exited", True), ("NCCL: out of memory", False)])
def test_where_nccl_runs_out_of_memory_no_contact_was_lost(message, lost):
    with pytest.raises(RuntimeError) as raised:
        exec(compile(f"raise RuntimeError({message!r})", torch.__file__, "exec"))  # as if there
    assert faults.is_lost_contact(raised.value) is lost


CALLS = {  # their names differ between versions of PyTorch
    "all_gather_single": "gather", "all_gather_into_tensor": "gather", "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce", "all_reduce": "all-reduce",
}  # fmt: skip


def count_bytes(rank: int, folder: Path) -> None:
    """One of four ranks, in two copies of two: what gathering and two micro-batches hand to each collective call."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    handed: Counter[str] = Counter()
    within = []

    def counted(call, name, *args, **kwargs):
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        handed[CALLS[name]] += 0 if within else max(x.numel() * x.element_size() for x in tensors)
        within.append(name)  # one may call another
        result = call(*args, **kwargs)
        within.pop()
        return result

    whole, cpu = tiny_model("qwen2 tied", torch.float32, vocab_size=62), torch.device("cpu")
    with torch.device("meta"):
        empty = type(whole)(whole.config)
    model = shard.shard(empty, whole if rank == 0 else None, shard.make_mesh(2, cpu), torch.bfloat16, cpu)
    model.train().activation_checkpointing_enable({"use_reentrant": False})
    for name in CALLS.keys() & vars(dist).keys():
        setattr(dist, name, partial(counted, getattr(dist, name), name))
    with shard.unsharded(model):
        pass
    found = [dict(handed)]
    for _ in range(2):
        handed.clear()
        ids = torch.ones(2, 8, dtype=torch.long)
        token_logprobs(model, ids, torch.ones_like(ids), ids.cumsum(1) > 1)[0].sum().backward()
        found.append(dict(handed))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


def test_weights_travel_in_bf16_and_gradients_in_fp32(tmp_path):
    """For the rollout once, for a micro-batch twice and once: the table in docs/distributed.md."""
    mp.start_processes(count_bytes, args=(tmp_path,), nprocs=4, start_method="forkserver")
    rollout, first, second = torch.load(tmp_path / "found.pt")
    P = sum(p.numel() for p in tiny_model("qwen2 tied", vocab_size=62).parameters())
    assert rollout == {"gather": 2 * P}
    assert second == {"gather": 2 * 2 * P, "reduce": 4 * P, "all-reduce": 4 * P // 2}, "size 2, two copies"
    assert (first["reduce"], first["all-reduce"]) == (second["reduce"], second["all-reduce"])


def test_what_rewards_draw_depends_on_seed_step_and_rank(monkeypatch):
    def draw(seed: int, step: int, rank: int) -> tuple[float, ...]:
        monkeypatch.setattr(ranks, "rank", lambda: rank)
        ranks.seed_everything(seed, step)
        return random.random(), np.random.random(), float(torch.rand(()))

    places = [*product((0, 1), (1, 2), (0, 1))]
    drawn = [draw(*place) for place in places]
    assert drawn == [draw(*place) for place in places]
    assert all(len({*of_one}) == len(places) for of_one in zip(*drawn))
