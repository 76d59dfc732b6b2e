"""Sharded over processes and machines, a run is the run of one process."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import HERE, at, die, figures, flags, lines, rows_to_sort, run
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, LlamaForCausalLM

import train
from tasks._characters import EOS_ID, SORTING_LETTERS, char_tokenizer, small_config


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> dict:
    """A run of several updates a rollout and a reference."""
    rows = rows_to_sort(tmp_path_factory.mktemp("data") / "rows.jsonl")
    return dict(
        task="sorting", data=rows, prompts_per_step=3, num_generations=4, steps=10, num_iterations=2, minibatches=2,
        beta=0.1, learning_rate=2e-3, warmup_steps=2, max_grad_norm=0.5, micro_batch_size=2, eval_every=0,
        save_every=0, samples_per_step=-1,
    )  # fmt: skip


@pytest.fixture
def screen(tmp_path) -> Path:
    return tmp_path / "screen"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders: an output head of its own; a model that caps its logits, so that each row is scored by itself."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), char_tokenizer(SORTING_LETTERS + ">")
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


def keep_gradients(file: Path) -> None:
    """The gradient of each update, after clipping, as the optimizer sees it."""
    seen: dict[str, Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen[f"{len(seen):03d}"] = torch.cat([whole(p.grad).flatten() for p in optimizer.param_groups[0]["params"]])
        if os.environ.get("RANK", "0") == "0":
            save_file(seen, file)

    register_optimizer_step_pre_hook(keep)


def assert_same_run(out: Path, one: Path) -> None:
    for ours, theirs in zip(figures(out), figures(one), strict=True):
        assert ours.pop("sampler_gap", 0.0) < 1e-5 > theirs.pop("sampler_gap", 0.0)
        for name, x in theirs.items():
            assert ours[name] == (x if x is None else pytest.approx(x, rel=1e-5, abs=1e-6)), (theirs["step"], name)
    for ours, theirs in zip(lines(out / "samples.jsonl"), lines(one / "samples.jsonl"), strict=True):
        assert ours == theirs | {"advantage": pytest.approx(theirs["advantage"], abs=1e-5)}


CASES = {  # ranks, settings; and those of the sharded run alone
    "two": (2, {}, {}),
    "three": (3, {}, {}),
    "four": (4, {}, {}),
    "two copies of two shards": (4, dict(steps=5), dict(shard_size=2)),
    "ranks without a completion": (4, dict(prompts_per_step=1, num_generations=3, minibatches=1, steps=5), {}),
    "unequal numbers of micro-batches": (3, dict(micro_batch_size=1, minibatches=1, num_generations=5, steps=5), {}),
    "filled by tokens": (3, dict(micro_batch_size=None, micro_batch_tokens=60, steps=5), {}),
    "gradient checkpointing": (3, dict(steps=5), dict(gradient_checkpointing=True)),
    "no reference, one update": (3, dict(beta=0.0, num_iterations=1, minibatches=1, entropy_coef=0.01), {}),
    "a refreshed reference": (2, dict(ref_sync_every=2, steps=5), {}),
    "an output head of its own": (3, dict(model="untied", steps=5), {}),
    "logits that are capped": (3, dict(model="capped", steps=4), {}),
    "evaluation": (3, dict(eval_every=2, eval_prompts=5, eval_k=2, steps=4), {}),
    "one rank": (1, dict(steps=4), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_run_is_that_of_one_process(settings, models, tmp_path, screen, name):
    world, given, sharded = CASES[name]
    given = {key: value for key, value in (settings | given).items() if value is not None}
    if "model" in given:
        given["model"] = models / given["model"]
    one, out = tmp_path / "one", tmp_path / "out"
    run(flags(**given, out=one), screen, before=partial(keep_gradients, tmp_path / "one.safetensors"))
    keep = partial(keep_gradients, tmp_path / "out.safetensors")
    run(flags(**given, **sharded, shard=True, out=out), screen, world=world, before=keep)
    assert_same_run(out, one)

    ours, theirs = (load_file(tmp_path / f"{x}.safetensors") for x in ("out", "one"))
    assert ours.keys() == theirs.keys() and len(ours) >= given["steps"]
    first = ours["000"] - theirs["000"]
    assert theirs["000"].norm() > 1e-3 and first.norm() <= 1e-5 * theirs["000"].norm()

    ours, theirs = (load_file(x / "model" / "model.safetensors") for x in (out, one))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[key], theirs[key], rtol=1e-3, atol=1e-4) for key in theirs)
    assert json.loads((out / "model" / "config.json").read_text()) == json.loads(
        (one / "model/config.json").read_text()
    )
    AutoModelForCausalLM.from_pretrained(out / "model")


def test_in_bfloat16_the_shards_stay_in_float32(settings, tmp_path, screen):
    """Near the replicated run: that one adds up activations in fp32, this one in bf16."""
    given = settings | dict(dtype="bfloat16", steps=1, minibatches=1, num_iterations=1, samples_per_step=0)
    before = partial(keep_bytes, tmp_path)
    run(flags(**given, out=tmp_path / "one"), screen)
    run(flags(**given, shard=True, out=tmp_path / "out"), screen, world=2, before=before)
    ours, theirs = figures(tmp_path / "out")[0], figures(tmp_path / "one")[0]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.1)
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=0.01)
    assert {x["dtype"] for x in held(tmp_path, 2)} == {"torch.float32"}


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
        reference = list(run.reference.parameters())
        sizes = dict(weights=local(weights), moments=local(moments), reference=local(reference))
        sizes |= dict(dtype=str(weights[0].dtype), gradients=sum(p.grad is not None for p in weights))
        (folder / f"bytes-{run.rank}").write_text(json.dumps(sizes))
        return result

    train.training_step = watched


def held(folder: Path, world: int) -> list[dict]:
    return [json.loads((folder / f"bytes-{rank}").read_text()) for rank in range(world)]


def test_each_rank_holds_its_part_of_weights_moments_and_reference(settings, tmp_path, screen):
    given = settings | dict(steps=1)
    run(flags(**given, out=tmp_path / "one"), screen, before=partial(keep_bytes, tmp_path))
    (one,) = held(tmp_path, 1)
    assert one["moments"] == 2 * one["weights"] == 2 * one["reference"] > 0
    run(flags(**given, shard=True, out=tmp_path / "out"), screen, world=4, before=partial(keep_bytes, tmp_path))
    for of_rank in held(tmp_path, 4):
        for name in ("weights", "moments", "reference"):
            assert of_rank[name] <= 1.1 * one[name] / 4, "vectors are padded to equal parts"
        assert of_rank["gradients"] == 0


# ---- Faults ----


def test_resumed_on_other_numbers_of_ranks_sharded_and_not(settings, tmp_path, screen):
    given = settings | dict(steps=9, save_every=2, ref_sync_every=3)
    run(flags(**given, out=tmp_path / "one"), screen)
    given |= dict(out=tmp_path / "out")
    legs = ((2, True, 3), (3, True, 3), (1, False, 3), (2, False, 3), (4, True, None))  # die in the 3rd step of each
    for world, sharded, dies in legs:
        before = partial(at, "step", dies, die) if dies else None
        shown = run(flags(**given, **{"shard": True} if sharded else {}), screen, None, world=world, before=before)
    assert "continued after step 8" in shown
    assert_same_run(tmp_path / "out", tmp_path / "one")
    kinds = {path.suffix for path in (tmp_path / "out" / "checkpoint").rglob("*") if path.is_file()}
    assert kinds == {".safetensors", ".json"}, "nothing that would be unpickled"


def test_without_torchrun_there_is_one_shard(settings, tmp_path, screen):
    shown = run(flags(**settings | dict(steps=2), shard=True, out=tmp_path / "out"), screen)
    assert "computed by 1 rank, each with 1/1 of the model" in shown


def oom_on(rank: int) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError

    if os.environ["RANK"] == str(rank):
        at("loss", 2, fail)


def test_out_of_memory_on_one_rank_ends_all_with_a_line(settings, tmp_path, screen):
    args = flags(**settings, shard=True, out=tmp_path / "out")
    start = time.monotonic()
    shown = run(args, screen, None, world=2, before=partial(oom_on, 1))
    assert time.monotonic() - start < 30
    assert "error: out of memory with micro-batches of 2 rows, and with --shard" in shown


@pytest.mark.parametrize(
    "world, given, line",
    [
        (2, dict(shard=True, shard_size=4), "error: --shard_size 4: does not divide the 2 ranks"),
        (
            2,
            dict(shard=True, model="nowhere/nothing/at/all"),
            "error: --model nowhere/nothing/at/all: there is no such",
        ),
        (1, dict(shard_size=2), "error: --shard_size 2: is part of --shard"),
    ],
)
def test_mistakes_are_told_once(settings, tmp_path, screen, world, given, line):
    shown = run(flags(**settings | given, out=tmp_path / "out"), screen, 2, world=world)
    assert shown.count("error: ") == 1 and line in shown


def unequal_machines() -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if os.environ["RANK"] in "01" else "1"


def test_machines_of_unequal_size(settings, tmp_path, screen):
    """Each would make groups of its own, and wait for the others' for ever."""
    args = flags(**settings, shard=True, out=tmp_path / "out")
    shown = run(args, screen, 2, world=4, before=unequal_machines)
    assert shown.count("error: ") == 1 and "machines of [1, 2] ranks; give a --shard_size" in shown
    run(flags(**settings | dict(steps=1), shard=True, shard_size=2, out=tmp_path / "other"), screen, world=4)


def test_a_head_of_its_own_that_the_configuration_says_is_tied(settings, models, tmp_path, screen):
    """Unsharded the two stay apart; the empty model that is sharded would tie them."""
    odd = shutil.copytree(models / "untied", tmp_path / "odd")
    config = json.loads((odd / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    shown = run(flags(**settings, model=odd, shard=True, out=tmp_path / "out"), screen, 2, world=2)
    assert shown.count("error: ") == 1 and "its config.json says tie_word_embeddings: set that to false" in shown


def test_weights_that_only_the_first_rank_finds_wrong(settings, models, tmp_path, screen):
    torn = tmp_path / "torn"
    torn.mkdir()
    for path in (models / "untied").iterdir():
        (torn / path.name).write_bytes(path.read_bytes()[: 999 if path.suffix == ".safetensors" else None])
    shown = run(flags(**settings, model=torn, shard=True, out=tmp_path / "out"), screen, 2, world=3)
    assert shown.count("error: ") == 1 and "its weights cannot be loaded" in shown


# ---- Several machines, each an agent of torchrun on loopback ----


def agents(args: list[str], folder: Path, before: str = "") -> list[subprocess.Popen]:
    """Two, of two ranks each."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = folder / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport test_shard, train\n"
        f"{before}\ntrain.faults.leave(train.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=1"]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FOLDER": str(folder)}
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    return [
        subprocess.Popen([*command, f"--node_rank={node}", str(program), *args], env=env, **streams)
        for node in range(2)
    ]


def wait(nodes: list[subprocess.Popen], seconds: float) -> list[str]:
    """-> what each showed; its pipe closes when the last of its ranks is gone."""
    try:
        return [node.communicate(timeout=seconds)[0] for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)


def kill_second_agent() -> None:
    if os.environ["RANK"] == "3":
        Path(os.environ["FOLDER"], "killed").touch()
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)


def test_two_machines_and_one_of_them_dies(settings, tmp_path, screen):
    """The other ends by itself; the same commands again continue the run. Hybrid: a copy of the model on each."""
    given = settings | dict(steps=6, save_every=2)
    run(flags(**given, out=tmp_path / "one"), screen)
    args = flags(**given, shard=True, out=tmp_path / "out")
    nodes = agents(args, tmp_path, "test_shard.at('step', 4, test_shard.kill_second_agent)")
    wait(nodes, 100)
    assert all(node.returncode for node in nodes)
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 40
    nodes = agents(args, tmp_path)
    shown = wait(nodes, 100)
    assert [node.returncode for node in nodes] == [0, 0], shown
    assert sum(x.count("continued after step 2") for x in shown) == 1
    assert sum(x.count("computed by 4 ranks, each with 1/2 of the model") for x in shown) == 1
    assert_same_run(tmp_path / "out", tmp_path / "one")
