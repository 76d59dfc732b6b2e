"""Sharded over processes and machines, a run is the run of one process."""

import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

import train
from conftest import assert_same_run, at, die, ended, errors, free_port, metrics, replace, run, torchrun
from infra import ranks
from tasks._characters import EOS_ID, char_tokenizer, small_config
from tasks.sorting import LETTERS


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    """Several updates a rollout, and a reference."""
    return sorting | dict(
        steps=3, num_iterations=2, minibatches=2, beta=0.1, learning_rate=2e-3, warmup_steps=2, max_grad_norm=0.5,
        save_every=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders: an output head of its own; a model that caps its logits, so that each row is scored by itself."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), char_tokenizer(LETTERS + ">")
    torch.manual_seed(0)
    untied = small_config(tokenizer, 32, 48)
    untied.tie_word_embeddings = False
    capped = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, sliding_window=8, eos_token_id=EOS_ID, bos_token_id=None, pad_token_id=0,
        final_logit_softcapping=5.0,
    )  # fmt: skip
    for name, model in dict(untied=LlamaForCausalLM(untied), capped=Gemma2ForCausalLM(capped)).items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def keep_gradients(out: Path) -> None:
    """The gradient of each update, after clipping, as the optimizer sees it."""
    seen: dict[str, Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen[f"{len(seen):03d}"] = torch.cat([whole(p.grad).flatten() for p in optimizer.param_groups[0]["params"]])
        if ranks.rank() == 0:
            save_file(seen, out.with_suffix(".gradients"))

    register_optimizer_step_pre_hook(keep)


@pytest.fixture(scope="module")
def one_process(small, models, tmp_path_factory):
    """-> a function that gives the run of one process with these settings, made once"""
    made, folder = {}, tmp_path_factory.mktemp("one")

    def make(**changes) -> Path:
        key = json.dumps(changes)
        if key not in made:
            made[key] = folder / f"{len(made)}"
            run(with_model(small | changes, models), made[key], partial(keep_gradients, made[key]))
        return made[key]

    return make


def with_model(settings: dict, models: Path) -> dict:
    return settings | ({"model": models / settings["model"]} if "model" in settings else {})


CASES = {  # ranks; settings; and those of the sharded run alone, which change no number
    "four": (4, {}, dict(micro_batch_size=2)),
    "two copies of two shards": (4, {}, dict(shard_size=2)),
    "filled by tokens, gradient checkpointing": (3, {}, dict(micro_batch_tokens=60, gradient_checkpointing=True)),
    "ranks without a completion": (4, dict(prompts_per_step=1, num_generations=3, minibatches=1), {}),
    "unequal numbers of micro-batches": (3, dict(minibatches=1, num_generations=5), dict(micro_batch_size=1)),
    "no reference, one update": (3, dict(beta=0.0, num_iterations=1, minibatches=1, entropy_coef=0.01), {}),
    "a refreshed reference": (2, dict(ref_sync_every=2), {}),
    "an output head of its own": (3, dict(model="untied"), {}),
    "logits that are capped": (3, dict(model="capped"), {}),
    "evaluation": (3, dict(eval_every=2, eval_prompts=5, eval_k=2), {}),
    "one rank, without torchrun": (1, {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_run_is_that_of_one_process(small, models, one_process, tmp_path, name):
    world, given, sharded = CASES[name]
    one, out = one_process(**given), tmp_path / "out"
    settings = with_model(small | given | sharded, models) | dict(shard=True)
    shown = run(settings, out, partial(keep_gradients, out), world=world)
    assert f", each with 1/{sharded.get('shard_size', world)} of the model" in shown
    assert_same_run(out, one)

    ours, theirs = (load_file(x.with_suffix(".gradients")) for x in (out, one))
    assert ours.keys() == theirs.keys() and len(ours) >= settings["steps"]
    first = ours["000"] - theirs["000"]
    assert theirs["000"].norm() > 1e-3 and first.norm() <= 1e-5 * theirs["000"].norm()
    assert json.loads((out / "model/config.json").read_text()) == json.loads((one / "model/config.json").read_text())
    AutoModelForCausalLM.from_pretrained(out / "model")


def one_way_for_each_device() -> None:
    """As on GPUs, where objects travel another way than tensors."""
    replace("infra.ranks.backend", lambda _: lambda device: "cpu:gloo,cuda:gloo")


@pytest.mark.parametrize("sharded", [{}, dict(shard=True, shard_size=2)])
def test_a_process_group_with_a_backend_for_each_device(small, one_process, tmp_path, sharded):
    settings = small | sharded | dict(save_every=1)
    for steps in (2, 3):
        run(settings | dict(steps=steps), tmp_path / "out", one_way_for_each_device, world=4)
    assert_same_run(tmp_path / "out", one_process())


# ---- Memory ----


def keep_bytes(folder: Path) -> None:
    """What this rank holds of the weights, of Adam's moments and of the reference after a step."""
    step = train.training_step

    def local(tensors: list[Tensor]) -> int:
        return sum((x.to_local() if isinstance(x, DTensor) else x).untyped_storage().nbytes() for x in tensors)

    def watched(run: train.Run, *args: int):
        result = step(run, *args)
        weights = list(run.model.parameters())
        moments = [run.optimizer.state[p][key] for p in weights for key in ("exp_avg", "exp_avg_sq")]
        sizes = dict(weights=local(weights), moments=local(moments), reference=local(run.reference.parameters()))
        sizes |= dict(dtype=str(weights[0].dtype), gradients=sum(p.grad is not None for p in weights))
        (folder / f"bytes-{ranks.rank()}").write_text(json.dumps(sizes))
        return result

    train.training_step = watched


def held(folder: Path, world: int) -> list[dict]:
    return [json.loads((folder / f"bytes-{rank}").read_text()) for rank in range(world)]


def test_each_rank_holds_its_part_of_weights_moments_and_reference(small, tmp_path):
    settings = small | dict(steps=1)
    run(settings, tmp_path / "one", partial(keep_bytes, tmp_path))
    (one,) = held(tmp_path, 1)
    assert one["moments"] == 2 * one["weights"] == 2 * one["reference"] > 0
    run(settings | dict(shard=True), tmp_path / "out", partial(keep_bytes, tmp_path), world=4)
    for of_rank in held(tmp_path, 4):
        for name in ("weights", "moments", "reference"):
            assert of_rank[name] <= 1.1 * one[name] / 4, "vectors are padded to equal parts"
        assert of_rank["gradients"] == 0


def test_in_bfloat16_the_shards_stay_in_float32(small, tmp_path):
    """Near the replicated run: that one adds up activations in fp32, this one in bf16."""
    settings = small | dict(dtype="bfloat16", steps=1, minibatches=1, num_iterations=1)
    run(settings, tmp_path / "one")
    run(settings | dict(shard=True), tmp_path / "out", partial(keep_bytes, tmp_path), world=2)
    (ours,), (theirs,) = metrics(tmp_path / "out"), metrics(tmp_path / "one")
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=0.01)
    assert {x["dtype"] for x in held(tmp_path, 2)} == {"torch.float32"}


# ---- Resumed ----


def sgd(momentum: float) -> None:
    """As if `train.py` had this optimizer in the place of its own."""

    def in_its_place(parameters, lr: float, **settings_of_adam) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum)

    torch.optim.AdamW = in_its_place


OPTIMIZERS = {"AdamW": [], "SGD with momentum": [partial(sgd, 0.9)], "SGD": [partial(sgd, 0.0)]}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_on_other_numbers_of_ranks_sharded_and_not(small, tmp_path, optimizer):
    settings, change = small | dict(steps=7, save_every=2, ref_sync_every=3), OPTIMIZERS[optimizer]
    settings |= {} if optimizer == "AdamW" else dict(learning_rate=0.5)
    one, out, third_step = tmp_path / "one", tmp_path / "out", partial(at, "step", 3, die)
    run(settings, one, *change)
    for world, sharded in ((2, {"shard": True}), (1, {}), (3, {"shard": True})):
        run(settings | sharded, out, *change, third_step, code=None, world=world)
    assert "continued after step 6" in run(settings, out, *change, world=2)
    assert_same_run(out, one)
    kinds = {path.suffix for path in (out / "checkpoint").rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}, "nothing that would be unpickled"


# ---- Faults ----


def oom_on(rank: int) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError

    at("loss", 2, fail, rank=rank)


def test_out_of_memory_on_one_rank_ends_all_with_a_line(small, tmp_path):
    started = time.monotonic()
    settings = small | dict(shard=True, micro_batch_size=2)
    error, *others = errors(run(settings, tmp_path / "out", partial(oom_on, 1), code=None, world=2))
    assert time.monotonic() - started < 30
    assert error.startswith("error: out of memory in an update: with --shard no rank can go back without the others")
    assert error.endswith(", so lower --micro_batch_size (now 2), or try --gradient_checkpointing")
    assert all("lost contact" in line for line in others)


def unequal_machines() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if os.environ["RANK"] in "01" else "1"


def tied_by_its_configuration_alone(models: Path, folder: Path) -> Path:
    """Unsharded the two heads stay apart; the empty model that is sharded would tie them."""
    shutil.copytree(models / "untied", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


def torn(models: Path, folder: Path) -> Path:
    """Only the first rank reads the weights."""
    shutil.copytree(models / "untied", folder)
    os.truncate(folder / "model.safetensors", 999)
    return folder


WRONG = [  # ranks, settings, what makes the model, the line
    (2, dict(shard_size=4), None, "--shard_size 4: does not divide the 2 ranks"),
    (2, dict(model="nowhere/nothing/at/all"), None, "--model nowhere/nothing/at/all: there is no such"),
    (2, {}, tied_by_its_configuration_alone, "its config.json says tie_word_embeddings: set that to false"),
    (3, {}, torn, "its weights cannot be loaded"),
    # Each of these machines would make groups of its own, and wait for the others' for ever.
    (4, {}, None, "machines of [1, 2] ranks; give a --shard_size"),
]


@pytest.mark.parametrize("world, given, make_model, line", WRONG)
def test_mistakes_are_told_once(small, models, tmp_path, world, given, make_model, line):
    if make_model:
        given = given | dict(model=make_model(models, tmp_path / "model"))
    before = [unequal_machines] if world == 4 else []
    shown = run(small | dict(shard=True) | given, tmp_path / "out", *before, code=2, world=world)
    assert shown.count("error: ") == 1 and line in shown


def test_machines_of_unequal_size_share_shards_of_a_size_that_divides_them(small, tmp_path):
    settings = small | dict(steps=1, shard=True, shard_size=2)
    assert "each with 1/2 of the model" in run(settings, tmp_path / "out", unequal_machines, world=4)


# ---- Several machines, each an agent of torchrun on loopback ----


def two_machines(settings: dict, out: Path, *before) -> list:
    meet = ("--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{free_port()}", "--rdzv_id=1")
    return [torchrun(settings, out, *before, options=(*meet, f"--node_rank={node}")) for node in range(2)]


def kill_agent(noted: Path) -> None:
    noted.touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_two_machines_and_one_of_them_dies(small, tmp_path):
    """The other ends by itself; the same commands again continue the run. Hybrid: a copy of the model on each."""
    settings, out, killed = small | dict(steps=5, save_every=2), tmp_path / "out", tmp_path / "killed"
    run(settings, tmp_path / "one")
    settings["shard"] = True
    agents = two_machines(settings, out, partial(at, "step", 4, partial(kill_agent, killed), rank=3))
    ended(*agents)
    assert all(agent.returncode for agent in agents)
    assert time.time() - killed.stat().st_mtime < 40
    agents = two_machines(settings, out)
    shown = "".join(ended(*agents))
    assert [agent.returncode for agent in agents] == [0, 0], shown
    assert shown.count("continued after step 2") == 1
    assert shown.count("computed by 4 ranks, each with 1/2 of the model") == 1
    assert_same_run(out, tmp_path / "one")
