"""A run that is sharded over processes and machines equals the run of one process. Also: how a rank starts, and what
ranks send to each other."""

import dataclasses
import json
import os
import random
import re
import shutil
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from batch import micro_batches
from config import Config
from conftest import assert_same_run, at, die, metrics, oom, replace, run, tiny_model
from infra import faults, ranks, shard
from logprob import token_logprobs
from tasks import sorting as sorting_task
from tasks._characters import EOS_ID, char_tokenizer
from tasks.sorting import LETTERS


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    """Return the settings of a small run with several updates per rollout, and a reference."""
    settings = dict(num_iterations=2, minibatches=2, beta=0.1, learning_rate=2e-3, warmup_steps=2, max_grad_norm=0.5)
    return sorting | settings | dict(save_every=0)


def save_model(folder: Path, family: str, **how) -> Path:
    """Save a tiny model with random weights that can read and write what the task sorting needs."""
    own = dict(vocab_size=15, eos_token_id=EOS_ID, bos_token_id=None, pad_token_id=0)
    tiny_model(family, torch.float32, **own, **how).save_pretrained(folder)
    char_tokenizer(LETTERS + ">").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Save four models. One has an untied output head, and one has experts. One caps its logits, and therefore each of
    its rows is scored in a separate pass. One has a configuration which says that the output head is tied, although it
    is not."""
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "capped", "gemma2")
    save_model(folder / "untied", "llama")
    save_model(folder / "experts", "qwen3_moe")
    file = shutil.copytree(folder / "untied", folder / "tied") / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": True}))
    return folder


def machines_of_unequal_size() -> None:
    """Pretend that ranks 0 and 1 are on one machine, and each other rank is on a machine of its own."""
    os.environ["LOCAL_WORLD_SIZE"] = "2" if os.environ["RANK"] in "01" else "1"


def separate_backends() -> None:
    """Send objects and tensors with different backends, as on GPUs."""
    replace("infra.ranks.backend", lambda _: lambda device: "cpu:gloo,cuda:gloo")


def print_exchanges(accumulate):
    """Print how often an update exchanges gradients between machines, and how many units have gradients."""

    def accumulating(run: train.Run, batch) -> tuple:
        calls, all_reduce = [], dist.all_reduce
        with mock.patch.object(dist, "all_reduce", lambda *args, **how: calls.append(args) or all_reduce(*args, **how)):
            result = accumulate(run, batch)
        units = sum(isinstance(module, FSDPModule) for module in run.model.modules())
        print("exchanges:", len(calls), "units:", units, flush=True)
        return result

    return accumulating


CASES = {  # number of ranks; settings; more settings for the sharded run, which change no result
    "two copies of two shards": (
        4,
        dict(model="untied", reference="capped"),
        dict(shard_size=2, micro_batch_tokens=60, gradient_checkpointing=True),
    ),
    "capped, unequal counts of parts": (2, dict(model="capped", minibatches=1, num_generations=5, top_entropy=0.5), {}),
    "experts, ranks without a completion, a refreshed reference": (
        3,
        dict(model="experts", prompts_per_step=1, num_generations=2, minibatches=1, ref_sync_every=1, eval_every=2),
        {},
    ),
}


@pytest.mark.parametrize("world, given, sharded", CASES.values(), ids=CASES)
def test_a_sharded_run_is_that_of_one_process(small, models, tmp_path, monkeypatch, world, given, sharded):
    monkeypatch.chdir(models)
    one, out, settings = tmp_path / "one", tmp_path / "out", small | given
    run(settings, one)
    # With a --shard_size, it does not matter how the ranks are spread over machines.
    before = [machines_of_unequal_size, separate_backends] if "shard_size" in sharded else []
    before.append(partial(replace, "train.accumulate", print_exchanges))
    shown = run(settings | sharded | dict(shard=True), out, *before, world=world)
    assert_same_run(out, one)
    exchanges = {(int(n), int(units)) for n, units in re.findall(r"exchanges: (\d+) units: (\d+)", shown)}
    # Gradients cross between machines once for each unit, in any number of micro-batches.
    assert all(n == (units if "shard_size" in sharded else 0) for n, units in exchanges) and exchanges
    assert json.loads((out / "model/config.json").read_text()) == json.loads((one / "model/config.json").read_text())


def test_a_micro_batch_that_does_not_fit_ends_a_sharded_run_before_its_first_step(small, tmp_path):
    settings, on_one_rank = small | dict(shard=True), partial(at, "train.token_logprobs", 1, oom, rank=1)
    shown = run(settings, tmp_path / "out", on_one_rank, code=None, world=2)
    assert "error: out of memory in an update" in shown and "--micro_batch_tokens" in shown
    assert not (tmp_path / "out/metrics.jsonl").exists()


def noted_trial(call):
    """Print the shape of the made-up micro-batch, and whether anything else changes."""

    def calling(run: train.Run, longest_prompt: int, accumulate) -> None:
        def accumulating(run: train.Run, batch) -> tuple:
            [(_, part)] = micro_batches(batch, run.limits, ranks.rank(), ranks.world(), same_count=True)
            print("a micro-batch of", tuple(part.ids.shape), bool(part.has_gradient.all()))
            return accumulate(run, batch)

        before, states = (
            [p.detach().clone() for p in run.model.parameters()],
            (torch.get_rng_state(), random.getstate()),
        )
        call(run, longest_prompt, accumulating)
        same = all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(before, run.model.parameters()))
        same = same and torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
        print("unchanged", same, all(p.grad is None for p in run.model.parameters()), not run.optimizer.state)

    return calling


def test_the_micro_batch_of_the_trial_is_full_and_leaves_everything_as_it_was(small, tmp_path):
    """The longest prompt, with up to 6 letters and ">", has 7 tokens."""
    settings = small | dict(shard=True, max_completion_length=13, micro_batch_tokens=100, steps=1)
    shown = run(settings, tmp_path / "out", partial(replace, "train.try_micro_batch", noted_trial), world=2)
    assert shown.count("a micro-batch of (5, 20) True") == shown.count("unchanged True True True") == 2, shown


def test_a_made_up_batch_has_all_that_a_batch_may_have():
    cfg = dataclasses.replace(Config(), max_completion_length=5, top_k=3, score_centering=2, mask_truncated=True)
    run = SimpleNamespace(config=cfg, model=tiny_model(), device=torch.device("cpu"))
    batch = shard.made_up_batch(run, 4, 2, 3)
    assert (
        batch.ids.shape == (6, 9) and batch.prompt_numbers.tolist() == [0, 0, 0, 1, 1, 1] and batch.has_gradient.all()
    )
    assert all(x.shape == (6, 9) for x in (batch.weights, batch.old_logp, batch.ref_logp)) and batch.mask[:, 4:].all()
    assert batch.head_ids.shape == (6, 9, 2) and batch.sampler_head_logp.shape == (6, 9, 3)
    assert [None if ids is None else len(ids) for ids in batch.kept[5]] == [None] * 4 + [3] * 5
    run.config = dataclasses.replace(cfg, keep_set=False)
    assert shard.made_up_batch(run, 4, 2, 3).kept is None


def in_parts(step):
    """Check after each step that this rank has only its part of weights, moments and reference, no gradients, and
    buffers that were not rounded."""

    def stepping(run: train.Run, *args: int):
        result, weights = step(run, *args), list(run.model.parameters())
        moments = [run.optimizer.state[p][key] for p in weights for key in ("exp_avg", "exp_avg_sq")]
        for whole in (weights, moments, [*run.reference.parameters()]):
            part = sum(x.to_local().untyped_storage().nbytes() for x in whole)
            # A number in fp32 has 4 bytes. Each of the 2 ranks has half of them, and up to a tenth more for padding.
            assert part <= sum(x.numel() for x in whole) * 4 / 2 * 1.1
        assert {p.dtype for p in weights} == {torch.float32} and all(p.grad is None for p in weights)
        made, _ = sorting_task.model(run.config)
        assert all(torch.equal(buffer, made.get_buffer(name)) for name, buffer in run.model.named_buffers())
        return result

    return stepping


def test_each_rank_has_only_its_part_of_weights_moments_and_reference_in_float32(small, tmp_path):
    """In bfloat16 the sharded run is only close to the run of one process: what layers pass to each other is in bf16 if
    the model is sharded, and otherwise in fp32."""
    settings = small | dict(dtype="bfloat16", steps=1, minibatches=1, num_iterations=1, eval_every=1, eval_prompts=2)
    run(settings, tmp_path / "one")
    run(settings | dict(shard=True), tmp_path / "out", partial(replace, "train.training_step", in_parts), world=2)
    (*_, ours), (*_, theirs) = metrics(tmp_path / "out"), metrics(tmp_path / "one")
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=0.01)
    # Before this checkpoint was saved, there was an evaluation, in which the weights were in bf16.
    files = [*(tmp_path / "out" / "checkpoint" / "000001").glob("*/*.safetensors")]
    assert {file.parent.name for file in files} == {"model", "optimizer"}, "and not a reference that stays as it is"
    assert {x.dtype for file in files for x in load_file(file).values()} == {torch.float32}


def small_files() -> None:
    """Make files of weights so small that each checkpoint has many."""
    replace("infra.checkpoint.FILE_BYTES", lambda _: 4096)


def test_a_run_can_be_resumed_on_another_number_of_ranks_sharded_or_not(small, tmp_path):
    """In each of the first two starts, the last rank is killed before the third step of that start: before step 3, and,
    after the run has resumed from the checkpoint of step 2, before step 5."""
    settings = small | dict(steps=5, save_every=2, ref_sync_every=3)
    one, out = tmp_path / "one", tmp_path / "out"
    run(settings, one)
    for world, sharded in ((2, True), (1, False)):
        dies = partial(at, "train.training_step", 3, die, rank=world - 1)
        run(settings | dict(shard=sharded), out, separate_backends, small_files, dies, code=None, world=world)
    assert "continued after step 4" in run(settings | dict(shard=True), out, separate_backends, world=3)
    assert_same_run(out, one)
    kinds = {path.suffix or path.name for path in (out / "checkpoint").rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".pt", ".json"}


def test_a_checkpoint_is_evaluated_sharded(small, tmp_path):
    run(small | dict(steps=1), tmp_path / "made")
    settings = small | dict(steps=0, eval_every=1, eval_prompts=4, model=tmp_path / "made/checkpoint/000001/model")
    run(settings, tmp_path / "one")
    run(settings | dict(shard=True), tmp_path / "out", world=2)
    assert metrics(tmp_path / "out") == metrics(tmp_path / "one")


WRONG = [  # number of ranks, what is called before the run, settings, a part of the error
    (2, [], dict(model="tied"), "its head is not tied; set tie_word_embeddings to false in its config.json"),
    # Without --shard_size, each machine has its own copy, and here the machines have 1 and 2 ranks.
    (3, [machines_of_unequal_size], {}, "must be one number that divides 3 ranks, not [1, 2]"),
]


@pytest.mark.parametrize("world, before, given, line", WRONG)
def test_a_mistake_is_reported_once(small, models, tmp_path, monkeypatch, world, before, given, line):
    monkeypatch.chdir(models)
    shown = run(small | dict(shard=True) | given, tmp_path / "out", *before, code=2, world=world)
    assert shown.count("error: ") == 1 and line in shown


@pytest.mark.parametrize("given", [{}, {"PYTORCH_CUDA_ALLOC_CONF": "b:2", "LOCAL_RANK": "1"}])
def test_settings_of_pytorch_on_a_gpu(given, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert ranks.start() == torch.device("cuda", int(given.get("LOCAL_RANK", 0)))
    assert os.environ == (given or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert ranks.backend(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"


def test_out_of_memory_in_nccl_is_not_a_lost_contact():
    with pytest.raises(RuntimeError) as raised:
        # This code has the name of a file of PyTorch, as if PyTorch had raised the error.
        exec(compile('raise RuntimeError("NCCL error: out of memory")', torch.__file__, "exec"))
    assert not faults.is_lost_contact(raised.value)


class SentBytes(TorchDispatchMode):
    """Count the bytes that are passed to collective calls, by the name of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d":
            # The arguments are what goes in and what comes out. One of them is the whole tensor, so count the largest.
            self.bytes[operation._schema.name] += max(x.nbytes for x in tree_leaves(args) if isinstance(x, Tensor))
        return operation(*args, **(kwargs or {}))


def test_weights_are_sent_in_bf16_and_gradients_in_fp32(monkeypatch, watch):
    """Check the table in docs/distributed.md: weights are gathered once for a rollout and twice for a micro-batch, and
    gradients are summed once. This process is one of four ranks with two copies of the model. The others are fake."""
    whole, cpu = tiny_model("qwen2 tied", torch.float32, vocab_size=62), torch.device("cpu")
    ids = torch.ones(2, 8, dtype=torch.long)
    scored = torch.arange(8).expand(2, 8) > 0  # every token but the first of each row
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    # out[:] = [own] * 4
    monkeypatch.setattr(dist, "all_gather_object", lambda out, own: out.__setitem__(slice(None), [own] * 4))
    monkeypatch.setattr(shard, "set_model_state_dict", lambda *args, **settings: None)
    timeouts = watch(dist.distributed_c10d, "_set_pg_timeout")
    try:
        with torch.device("meta"):
            empty = type(whole)(whole.config)
        model = shard.shard(empty, whole, shard.make_mesh(2, cpu), torch.bfloat16, cpu)
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
        with SentBytes() as rollout, shard.unsharded(model):
            pass
        # The first pass also calls the model once more, to see what its head returns. Only the second pass is counted.
        for _ in range(2):
            with SentBytes() as update:
                token_logprobs(model, ids, torch.ones_like(ids), scored)[0].sum().backward()
    finally:
        dist.destroy_process_group()
    P = sum(p.numel() for p in whole.parameters())
    gather, reduce, all_reduce = "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_"
    # The mesh has two kinds of groups: ranks that share a copy of the model, and ranks that have the same shard.
    # Both must have this program's time limit, because the default of NCCL is too short.
    assert [call.args[0] for call in timeouts] == [ranks.TIMEOUT] * 2
    assert rollout.bytes == {gather: 2 * P}
    # Weights in bf16 have 2 bytes and are gathered twice. Gradients in fp32 have 4 bytes. They are summed over the two
    # shards of a copy, and then each rank's half is summed over the two copies.
    assert update.bytes == {gather: 2 * 2 * P, reduce: 4 * P, all_reduce: 4 * P // 2}
