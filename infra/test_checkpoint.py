"""Checkpoints and a run's folder: a run that was killed or stopped at any moment ends like an uninterrupted run."""

import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from transformers.optimization import Adafactor

import conftest
from advantage import Group
from config import Config, UserError
from conftest import (
    PROCESSES,
    assert_same_files,
    assert_same_run,
    at,
    contents,
    die,
    fail,
    metrics,
    run,
    run_supervised,
    tiny_model,
)
from infra import checkpoint, ranks, report, run_folder
from infra.command_line import ready
from infra.model import trained_on_before
from infra.run_folder import checkpoint_of, saved_steps
from rollout import Completion
from tasks._characters import char_tokenizer

UPDATE, REWARDS, RENAME = "torch.optim.AdamW.step", "train.call_rewards", "pathlib.Path.rename"
WRITE = "infra.checkpoint.write_folder"


def noisy(completions, log_metric, **columns):
    """Reward texts that begin with a, b or c, or are empty. Then flip a few rewards at random, with the global random
    generators, which every rank seeds differently."""
    log_metric("of_torch", torch.rand(()))
    flips = [random.random() + np.random.rand() < 0.5 for _ in completions]
    return [float((text[:1] in "abc") != flip) for text, flip in zip(completions, flips)]


@pytest.fixture(scope="module")
def without_noise(sorting) -> dict:
    """Return the settings of a small run whose results depend on every part of a checkpoint. If a part were not
    restored, the resumed run would end with other numbers."""
    return sorting | dict(
        prompts_per_step=2, num_generations=3, dynamic_sampling=2, max_completion_length=6, steps=7, num_iterations=2,
        minibatches=2, beta=0.1, ref_sync_every=3, weight_decay=0.1, lr_schedule="linear", warmup_steps=5, eval_every=4,
        eval_prompts=3, eval_k=2, save_every=2, keep_checkpoints=2, reply="infra.test_faults:answered",
    )  # fmt: skip


def length(completions, **columns):
    return [float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def small(without_noise) -> dict:
    rewards = [f"{__name__}:noisy", f"{__name__}:length"]
    return without_noise | dict(reward=rewards, reward_weights=[1.0, 0.5], correct="noisy", combine_rewards="gdpo")


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    """Make the run in one go, and check that the settings of `without_noise` have an effect on it."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(small, out)
    # Without dynamic sampling, the seven steps would draw two prompts each.
    assert torch.load(out / "checkpoint/000007/state.pt", weights_only=True)["cursor"] > 7 * 2
    steps = [line for line in metrics(out) if line["step"] > 0]
    assert all(line["kl"] > 0 for line in steps), steps
    weighted = [line["reward/noisy"] + 0.5 * line["reward/length"] for line in steps]
    assert [line["reward"] for line in steps] == pytest.approx(weighted), "rewards are reported as they were given"
    assert sum(line["grad_norm"] > 0 for line in steps) > 4 and sum(line["turns"] > 1.1 for line in steps) > 3, steps
    return out


def interrupted(call_rewards):
    """Let a signal come during the first call. Nothing that it returns must be used, because the signal may have ended
    processes that a reward had started."""
    calls = itertools.count()

    def calling(*args):
        made = call_rewards(*args)
        return made if next(calls) else STOP() or ([], [])

    return calling


STOP = partial(signal.raise_signal, signal.SIGTERM)
FULL_DISK = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
# One run is ended at each of these moments in turn. Each value is what ends the run, and the exit code. `at(f, n, do)`
# calls `do` before the n-th call of f, or after this call with after=True. With `of`, it counts only the calls of f
# whose first argument ends with this text.
ENDS = {
    "after the third of a step's four updates": (partial(at, UPDATE, 3, die, after=True), -signal.SIGKILL),
    "inside a reply": (partial(at, "infra.test_faults.answered", 12, die), -signal.SIGKILL),
    "between samples and metrics": (partial(at, "infra.report.append", 7, die, after=True), -signal.SIGKILL),
    "between two parts of a checkpoint": (partial(at, WRITE, 2, die), -signal.SIGKILL),
    "because the disk is full": (partial(at, "infra.checkpoint.save", 1, FULL_DISK), 2),
    "after the step of a signal": (partial(conftest.replace, REWARDS, interrupted), 128 + signal.SIGTERM),
    # 6.partial is renamed when checkpoint 6 is complete. 4 is renamed to 4.partial before it is deleted.
    "before an old checkpoint is deleted": (partial(at, RENAME, 1, die, after=True, of="6.partial"), -signal.SIGKILL),
    "while the last old checkpoint is deleted": (partial(at, "shutil.rmtree", 1, die, of="4.partial"), -signal.SIGKILL),
    "between writing the model and renaming it": (partial(at, RENAME, 1, die, of="model.partial"), -signal.SIGKILL),
}


def test_killed_at_chosen_moments(small, whole, out):
    """Whatever ends the run, its newest checkpoint stays, and in the end its files are those of a whole run."""
    for end, code in ENDS.values():
        newest = saved_steps(out)[-1:]
        run(small, out, end, code=code)
        assert saved_steps(out)[-1:] >= newest  # `[-1:]`, because at first nothing is saved
    run(small, out)
    assert_same_files(out, whole)


def test_a_reward_that_fails_loses_no_finished_step(small, whole, out):
    """It fails in rounds of dynamic sampling, before which the run has drawn prompts already, and in an evaluation,
    which is then missing."""
    made, settings = [], small | dict(save_every=0)
    for n in (8, 4, 3):
        shown = run(settings, out, partial(at, REWARDS, n, partial(fail, ValueError("away"))), code=1)
        made.append(saved_steps(out)[-1])
        assert made[-1] == metrics(out)[-1]["step"] and f"saved after step {made[-1]}," in shown
        assert shown.endswith("ValueError: away\n") and "are made again" not in shown
    assert made == [2, 4, 5], "the second time, the evaluation after step 4 fails"
    run(small, out)
    expected = metrics(whole)
    expected[4] = {name: x for name, x in expected[4].items() if not name.startswith("eval/")}
    assert metrics(out) == expected and contents(out / "model") == contents(whole / "model")


def test_if_a_reward_fails_on_one_rank_all_ranks_save(without_noise, out):
    fails = partial(at, REWARDS, 8, partial(fail, ValueError("away")), rank=1)
    shown = run(without_noise | dict(save_every=0, shard=True), out, fails, code=[2, 1], world=2)
    assert saved_steps(out) == [metrics(out)[-1]["step"]] and shown.count("ValueError: away\n") == 1, shown
    goes_on = run(without_noise, out, partial(at, "train.training_step", 2, die), code=-signal.SIGKILL)
    assert f"continued after step {saved_steps(out)[-1]} in {out}/\n" in goes_on


def test_steps_that_are_made_again_are_counted(without_noise, out):
    settings, shown = without_noise | dict(save_every=0), []
    for steps_made in (2, 0):
        dies = partial(at, "train.training_step", steps_made + 1, die)
        shown.append(run(settings, out, dies, code=-signal.SIGKILL))
    again = f"started in {out}/; steps 1 to 2 are made again\n"
    assert again in shown[1] and "made again" not in shown[0]


# ---- Checkpoints: complete or absent ----


def a_run(kind: type = torch.optim.AdamW, updates: int = 1, hidden_size: int = 32, **how) -> SimpleNamespace:
    model, reference = (tiny_model("llama", torch.float32, hidden_size=hidden_size) for _ in range(2))
    run = SimpleNamespace(model=model, reference=reference, optimizer=kind(model.parameters(), lr=0.1, **how))
    run.task, run.config = SimpleNamespace(train=ROWS), Config(steps=9, dtype="float32", beta=0.1, ref_sync_every=5)
    run.tokenizer, run.cursor, run.queue, run.state = char_tokenizer("abc"), 0, [], {}
    for _ in range(updates):
        update(run)
    return run


def update(run: SimpleNamespace) -> None:
    run.optimizer.zero_grad()
    run.model(torch.arange(3, 9)[None]).logits.square().mean().backward()
    run.optimizer.step()


COMPLETION = Completion([3], [-0.1], True, kept=[np.array([3, 5], np.int32)], written=[True])
COMPLETION.replies = [[{"role": "tool", "content": "7"}]]
ROWS = [{"prompt": text, "image": object()} for text in "ab"]  # a row of a task may hold what cannot be saved
A_ROW = {"prompt": "b", "hint": "of a fork"}  # is not in the task's list, although it has the index of one that is
GROUPS = [Group([1, 2], row, [COMPLETION], torch.tensor([math.nan]), index=i) for i, row in ((1, ROWS[1]), (1, A_ROW))]
GROUPS.append(Group([1, 2], {}, [COMPLETION], advantages=[torch.ones(1)], index=None))
GROUPS[1].extra = {"seen": torch.ones(2), "of": ["a"]}
# With only every second column, the tensor of the rates is not contiguous. NaN and -0.0 must come back as they are.
STATE = {"rates": torch.tensor([[math.nan, 1.0, -0.0]]).double()[:, ::2], "buffer": [*GROUPS, GROUPS[0]]}
STATE["nested"] = {"": ({1, 2}, None, True, 2**70, math.inf, "\u4f60\n", {7: torch.tensor(3)})}
STATE["numpy"] = np.float64(0.1), np.arange(4)[::2]


class Counting(torch.optim.SGD):
    """Counts updates in tenths: its state has a plain number, which needs all of its 64 bits."""

    def step(self, closure: Callable | None = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            self.state[p]["updates"] = self.state[p].get("updates", 0.0) + 0.1


# SGD has no state. The state of Adafactor has other shapes than the weights.
KINDS = [(torch.optim.AdamW, {}), (torch.optim.SGD, {}), (Adafactor, dict(relative_step=False)), (Counting, {})]


@pytest.mark.parametrize("kind, how", KINDS)
def test_a_loaded_checkpoint_restores_everything(tmp_path, monkeypatch, kind, how):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 1000)
    run, other = a_run(kind, updates=3, **how), a_run(kind, updates=0, **how)
    run.reference.load_state_dict(run.model.state_dict())
    run.cursor, run.queue, run.state = 5, [([GROUPS[0]], GROUPS)], STATE
    checkpoint.save(tmp_path, 7, run)
    files = [*tmp_path.glob("checkpoint/*/optimizer/*.safetensors")]
    assert len(files) > 1 or issubclass(kind, torch.optim.SGD), "files are small"
    assert [group.row is row for group, row in zip(GROUPS, (ROWS[1], A_ROW, {}))] == [True, True, False]
    checkpoint.load(tmp_path, 7, other)
    buffer, [([first], groups)] = other.state["buffer"], other.queue
    assert buffer[0] is buffer[3] is first is groups[0] and first.row is ROWS[1] and buffer[1].row == A_ROW
    assert other.cursor == 5 and repr((other.queue, other.state)) == repr((run.queue, run.state))
    assert all(map(torch.equal, other.reference.parameters(), run.reference.parameters()))
    for _ in range(3):
        assert all(map(torch.equal, other.model.parameters(), run.model.parameters()))
        numbers, own = ([x.get("updates") for x in each.optimizer.state.values()] for each in (other, run))
        assert numbers == own
        update(run)
        update(other)


def test_each_rank_loads_the_state_to_its_own_gpu(tmp_path, monkeypatch):
    """The state was saved on the first GPU. Here, a call of `cuda` stands for the GPU of the rank that loads it."""
    run = a_run()
    run.state = {"on GPU": torch.ones(3), "on CPU": torch.ones(5)}
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0" if len(storage) == 12 else "cpu")
    checkpoint.save(tmp_path, 7, run)
    monkeypatch.setattr(torch.UntypedStorage, "cuda", lambda storage: storage.fill_(0))
    checkpoint.load(tmp_path, 7, run)
    assert run.state["on GPU"].tolist() == [0.0] * 3 and run.state["on CPU"].tolist() == [1.0] * 5


def test_the_error_names_what_in_a_checkpoint_does_not_fit_the_model(tmp_path):
    """The checkpoint has state that this code does not know, or layers of another width."""
    run = a_run()
    run.optimizer.state[run.model.lm_head.weight]["ema"] = torch.zeros(2)
    checkpoint.save(tmp_path, 7, run)
    named = re.escape("000007/optimizer does not fit the model or code: state.lm_head.weight.ema [2]")
    with pytest.raises(UserError, match=named):
        checkpoint.load(tmp_path, 7, a_run())
    with pytest.raises(UserError, match=r"000007/model: its files lack \d+ weights of this model: lm_head.weight"):
        checkpoint.load(tmp_path, 7, a_run(hidden_size=16))


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    happened, fsync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: happened.append(Path(os.readlink(f"/proc/self/fd/{fd}"))) or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda self, to: happened.append((self, to)) or rename(self, to))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    checkpoint.save(tmp_path, 7, a_run())
    folder, partial_folder = (tmp_path / "checkpoint" / name for name in ("000007", "000007.partial"))
    before = happened[: happened.index((partial_folder, folder))]
    inside = {partial_folder / path.relative_to(folder) for path in folder.rglob("*")}
    assert {partial_folder, tmp_path / "metrics.jsonl", *inside} <= set(before)
    names = {str(path.relative_to(partial_folder)) for path in inside}
    of_a_model = "config.json generation_config.json model.safetensors step.json tokenizer.json tokenizer_config.json"
    expected = {f"{part}/{name}" for part in ("model", "reference") for name in of_a_model.split()}
    expected |= {"model", "reference", "optimizer", "state.pt"}
    assert {name for name in names if "shard" not in name} == expected and len(names) == len(expected) + 1
    assert folder.parent in happened[len(before) + 1 :], "the new name itself is not flushed"


@pytest.mark.parametrize("spoiled", ["model", "reference", "optimizer"])
def test_what_is_not_finite_on_any_rank_is_never_saved(tmp_path, monkeypatch, spoiled):
    run = a_run()
    moments = run.optimizer.state[run.model.lm_head.weight]["exp_avg"]
    tensor = moments if spoiled == "optimizer" else getattr(run, spoiled).lm_head.weight
    tensor.data[0] = math.inf
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    with pytest.raises(UserError, match=rf"after step 2 .* of the {spoiled} is not finite: nothing was saved"):
        checkpoint.save(tmp_path, 2, run)


def test_a_state_that_could_not_be_loaded_is_never_saved(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    sharded = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (1,)))
    dist.destroy_process_group()
    refused = (sharded, "a sharded tensor, of which each rank has a part"), (deque(), "collections.deque")
    run = a_run()
    for step, (value, message) in enumerate(refused):
        run.state = {"mine": [value]}
        with pytest.raises((UserError, UnpicklingError), match=message):
            checkpoint.save(tmp_path, step, run)
    assert saved_steps(tmp_path) == []


def test_a_damaged_checkpoint_is_named_and_files_that_do_not_belong_to_it_do_not_matter(tmp_path):
    checkpoint.save(tmp_path, 4, run := a_run())
    folder = tmp_path / "checkpoint" / "000004"
    files = [*folder.rglob("*.safetensors"), folder / "state.pt"]
    for name in (".DS_Store", "model/.DS_Store", "mine/notes.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    checkpoint.load(tmp_path, 4, run)
    assert len(files) == 4
    for file in files:
        whole = file.read_bytes()
        for damage in Path.unlink, lambda file, whole=whole: file.write_bytes(whole[:-1]), Path.touch:
            damage(file)
            with pytest.raises(
                UserError, match=rf"the checkpoint {folder} is damaged, .* \({file.relative_to(folder)}\)"
            ):
                checkpoint.load(tmp_path, 4, run)
        file.write_bytes(whole)
    torch.save({"run_id": None, "step": 4, "cursor": 3, "state": {}}, folder / "state.pt")
    with pytest.raises(UserError, match="or of an older version"):
        checkpoint.load(tmp_path, 4, run)


def test_the_checkpoint_of_another_run_or_step_is_refused(tmp_path):
    for out in (tmp_path / "one", tmp_path / "other"):  # with the same settings
        begun(out)
    checkpoint.save(tmp_path / "one", 4, run := a_run())
    checkpoint.load(tmp_path / "one", 4, run)
    for name, step in ("other", 4), ("one", 2):
        copied = shutil.copytree(checkpoint_of(tmp_path / "one", 4), checkpoint_of(tmp_path / name, step))
        with pytest.raises(UserError, match=f"the checkpoint {copied} is of another run or step"):
            checkpoint.load(tmp_path / name, step, run)


# ---- What is in a folder, and what a command does with it; nothing is trained here ----


INFINITE = dict(algorithm="dapo", epsilon_high=math.inf)
LOADED = dict(rows=1, weights=2, reference=3)  # checksums
AN_INPUT = dict(model="{relative}/model")  # the run reads a folder that lies in its own


def config_of(out: Path, **settings) -> Config:
    relative = os.path.relpath(out)
    settings |= {name: x.format(relative=relative) for name, x in settings.items() if isinstance(x, str)}
    return ready(Config(**({"out": str(out), "steps": 4} | settings)), on_gpu=False)


def begun(out: Path, loaded: dict[str, int] = LOADED, **settings) -> list[str]:
    """Do what a run does before its first step, and return its notes."""
    config = config_of(out, **settings)
    return run_folder.begin(config, Config(out=str(out), **settings), run_folder.claim(config), loaded)


def made(out: Path, steps_made: int = 4, left: tuple[str, ...] = ("checkpoint/000004", "model"), **settings) -> None:
    """Write what a run leaves in its folder, except for weights. The last line of the metrics was cut off."""
    begun(out, **settings)
    # JSON has no infinity, so config.json must not contain one, even if a setting is infinite.
    json.loads((out / "config.json").read_text(), parse_constant=pytest.fail)
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(steps_made + 1)) + '{"st')
    for name in left:
        (out / name).mkdir(parents=True)
    if "model" in left:
        (out / "model/step.json").write_text('{"step": 4}')


def with_file(make: Callable, name: str, text: str, out: Path) -> None:
    """Make the folder, and write a file in it."""
    make(out)
    (out / name).write_text(text)


def of_an_older_version(value: object, out: Path) -> None:
    """Make a run with a setting that no longer exists."""
    made(out)
    about = run_folder.config_json(out)
    about["settings"]["mystery"] = about["given"]["mystery"] = value
    (out / "config.json").write_text(json.dumps(about))


def extended(out: Path, log: int, checkpoint: int = 4, model: str = "model") -> None:
    """A finished run got more steps, and was killed. `log` is the last step in its log."""
    made(out)
    begun(out, steps=9)
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(log + 1)))
    (out / "checkpoint/000004").rename(checkpoint_of(out, checkpoint))
    (out / "model").rename(out / model)


unfinished = partial(made, left=("checkpoint/000004",), steps=9)
only_model = partial(made, left=("model",), **INFINITE)
two_saved = partial(made, left=("checkpoint/000002", "checkpoint/000004"))
no_step_made = partial(made, steps_made=0, left=())
evaluation = partial(no_step_made, steps=0)
OWN_DATA = dict(task="addition", data="rows.jsonl")
OTHER, NOT_A_RUN = "only --overwrite starts over: ", "/out contains something that is not a run: give another --out$"
FOLDERS = [  # what is there, the settings of the command -> "finished", the step to go on after, or the error
    (Path.mkdir, dict(beta=0.1), 0),
    *[(partial(with_file, Path.mkdir, f"thesis.{x}", "mine"), {}, NOT_A_RUN) for x in ("tex", "partial")],
    (partial(with_file, Path.mkdir, "config.json.partial", "{"), {}, 0),  # killed while it wrote its first file
    (partial(with_file, Path.mkdir, "config.json", '{"model_type": "gpt2"}'), dict(overwrite=True), NOT_A_RUN),
    (partial(with_file, Path.mkdir, "config.json", '{"settings": {"theme": "dark"}}'), {}, NOT_A_RUN),
    (partial(of_an_older_version, 7), dict(steps=9), "no longer exist; only --overwrite starts over: --mystery 7$"),
    (partial(of_an_older_version, 0), dict(steps=9), 4),
    (begun, dict(beta=0.1), 0),  # it was killed before its first line
    (no_step_made, dict(beta=0.1), f"{OTHER}--beta 0.0 there, 0.1 here$"),
    (partial(made, left=()), dict(steps=3), 0),
    (partial(made, left=("checkpoint/000004",)), {}, 4),  # only the model is missing
    (made, dict(steps=9, eval_every=3, eval_prompts=5, eval_k=1), 4),
    (partial(extended, log=6), dict(steps=9), 4),
    (partial(extended, log=9), dict(steps=9), 4),  # killed before the last checkpoint
    (partial(extended, log=9, checkpoint=9), dict(steps=9), 9),  # before the new model
    (partial(extended, log=9, checkpoint=9, model="model-4"), dict(steps=9), 9),  # before it has its name
    (partial(extended, log=6), {}, 4),  # given its old length again
    (partial(extended, log=4), {}, "finished"),
    (partial(made, left=("model",)), dict(steps=3), "--steps 3: the run in .* has already made 4"),
    (unfinished, dict(steps=3), "--steps 3: the run in .* has already made 4"),
    (partial(made, left=("model",)), dict(steps=9), "--steps 9: the run in .* is finished, and has no checkpoint"),
    (made, dict(beta=0.5, seed=1), f"{OTHER}--beta 0.0 there, 0.5 here; --seed 0 there, 1 here$"),
    (partial(made, left=("model",), steps_made=-1), dict(beta=0.5), OTHER),  # the log is empty
    (partial(made, left=("model",), steps_made=-1), {}, "is finished, and has no checkpoint"),
    (partial(with_file, made, "model/step.json", '{"step": 2}'), {}, 4),
    (partial(with_file, only_model, "metrics.jsonl", '{"step": 4}\n'), INFINITE, "finished"),  # without evaluations
    (partial(made, **OWN_DATA), OWN_DATA | dict(steps=9, eval_every=5), 4),
    (partial(made, **OWN_DATA), OWN_DATA | dict(steps=9, eval_every=0), f"{OTHER}--eval_every 20 there, 0 here$"),
    (partial(made, **OWN_DATA), OWN_DATA | dict(steps=9, eval_prompts=5), f"{OTHER}--eval_prompts 256 there, 5 here$"),
    (partial(made, **OWN_DATA, eval_data=["e"]), OWN_DATA | dict(eval_data=["e"], eval_prompts=5), "finished"),
    (evaluation, dict(steps=0, micro_batch_size=1), "finished"),
    (evaluation, dict(steps=0, eval_k=8, eval_prompts=9), f"{OTHER}--eval_prompts 256 there, 9 here; --eval_k 4 there"),
    (evaluation, dict(steps=0, eval_top_p=0.9, metrics_by="answer"), f"{OTHER}--metrics_by .*; --eval_top_p None "),
    (evaluation, dict(eval_temperature=0.5), f"{OTHER}--steps 0 there, 4 here; .*--eval_temperature None "),
    (partial(made, steps_made=2, left=()), dict(steps=0), f"{OTHER}--steps 4 there, 0 here"),
    (made, AN_INPUT | dict(overwrite=True), "--overwrite would rename .*, from which this run reads"),
    # Files that somebody has changed, copied or left there.
    (partial(with_file, unfinished, "metrics.jsonl", ""), dict(steps=9), "metrics.jsonl lacks the line of step 4"),
    (partial(with_file, two_saved, "metrics.jsonl", '{"step": 2}\n'), {}, "lacks the line of step 4"),
    (partial(with_file, unfinished, "metrics.jsonl", '{"step": 4}'), dict(steps=9), 4),  # without its newline
    (partial(with_file, unfinished, "metrics.jsonl", '{"step": 4}\n\0\n'), dict(steps=9), "l has a damaged line"),
    (partial(with_file, unfinished, "metrics.jsonl", "?\n"), dict(beta=0.1, overwrite=True), 0),
    (partial(made, left=("checkpoint/000004", "checkpoint/000004 copy", "checkpoint/²", "checkpoint/9")), {}, 4),
    (partial(with_file, unfinished, "checkpoint/000009", ""), dict(steps=9), 4),
]


@pytest.mark.parametrize("state, settings, outcome", FOLDERS)
def test_what_a_command_does_with_what_is_in_its_folder(out, state, settings, outcome):
    state(out)
    before, config = contents(out), config_of(out, **settings)
    if isinstance(outcome, str) and outcome != "finished":
        with pytest.raises((UserError, ValueError), match=outcome):
            run_folder.claim(config)
    else:
        start = run_folder.claim(config)
        assert start.is_finished == (outcome == "finished") and (start.is_finished or start.after_step == outcome)
        out = out.with_name("out.replaced-1") if start.notes else out  # --overwrite has renamed it
    assert contents(out) | {".lock": b""} == before | {".lock": b""}


def test_the_old_folder_is_renamed_at_once_and_never_when_torchrun_restarts_the_ranks(out, monkeypatch):
    made(out)
    config = config_of(out, overwrite=True)
    assert run_folder.claim(config).notes == [f"the run that was in {out}/ is in {out}.replaced-1/ now"]
    assert not run_folder.claim(config).notes, "there is nothing left to replace"
    made(out)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert run_folder.claim(config).is_finished


def test_other_rows_and_other_weights_than_those_of_the_run_are_refused(out, tmp_path):
    """Weights that the checkpoint has may differ: those that are trained, and a reference that follows them."""
    of_adapters, metrics_of_weights, fresh = (out.with_name(name) for name in ("adapters", "weights", "fresh"))
    lora, synced = dict(lora_rank=2, model="m", task="addition"), dict(beta=0.1, ref_sync_every=2)
    made(of_adapters, left=("checkpoint/000004",), **lora)
    made(metrics_of_weights, left=("checkpoint/000004",), **synced)
    made(fresh, left=())  # has no checkpoint, so it starts again
    other = dict(rows=7, weights=8, reference=9)
    for folder, settings, named in (
        (of_adapters, lora, "rows and weights and reference"),
        (metrics_of_weights, synced, "rows"),
    ):
        before = contents(folder)
        with pytest.raises(UserError, match=f"other {named} than when the run in {folder} was saved"):
            begun(folder, other, **settings)
        assert contents(folder) == before
    assert begun(metrics_of_weights, LOADED | dict(weights=8), **synced) == ["weights was 2, now 8"]
    assert begun(fresh, other)


def test_a_setting_that_no_longer_exists_is_noted_where_a_run_is_read(out, capsys, monkeypatch):
    """In a file of the user's own, it is a mistake. A config.json of something else is not read."""
    of_an_older_version(7, out)
    note = f"note: rank 0: the run in {out} has settings that no longer exist: --mystery 7\n"
    reads = {
        "a model": lambda: [*trained_on_before(config_of(out, model=f"{out}/model"))],
        "a grid": lambda: run_folder.settings_of(out),
        "--config": lambda: run_folder.settings_in(out / "config.json"),
    }
    for name, read in reads.items():
        read()
        assert capsys.readouterr().err == note, name
    (own := out / "own.json").write_text('{"mystery": 0}')
    with pytest.raises(UserError, match="there is no setting mystery"):
        run_folder.settings_in(own)
    monkeypatch.chdir(out)
    for text in ('{"settings": {"theme": "dark"}}', '{"settings": "of algorithm"}', "// not JSON"):
        (out / "config.json").write_text(text)
        for model in (f"{out}/model", "hub/addition", None):
            assert [*trained_on_before(replace(config_of(out), model=model))] == []
        assert run_folder.settings_of(out) is None
    assert not capsys.readouterr().err


def test_prompts_that_an_earlier_run_has_trained_on_are_not_held_out_in_silence(out):
    made(out, data="d", eval_prompts=64, task="addition")
    (out / "checkpoint/000004/model").mkdir()
    for name in "model", "checkpoint/000004/model":
        for n, data, held, count in (65, "./d", [], 1), (64, "d", [], 0), (65, "e", [], 0), (65, "d", ["e"], 0):
            settings = dict(data=data, eval_data=held, eval_prompts=n, task="addition")
            config = config_of(out, steps=0, model=f"{out}/{name}", **settings)
            assert len([*trained_on_before(config)]) == count


# ---- Runs that are finished, resumed, started over or stopped, and two runs in one folder ----


def test_an_extended_run_and_one_that_starts_over_have_the_same_files(small, tmp_path):
    """With --overwrite, the earlier run is moved to the first out.replaced-N that does not exist. A finished run shows
    its first and its last evaluation again."""
    settings = small | dict(lr_schedule="constant", eval_every=2)
    out, taken, replaced = (tmp_path / name for name in ("out", "out.replaced-1", "out.replaced-2"))
    taken.mkdir()
    run(settings | dict(steps=2), out)
    (out / "notes.md").write_text("mine")
    longer, before = dict(config=out / "config.json", steps=4), contents(out / "model")
    # The old model stays until the new one is whole, and a run with the old one is not finished.
    gaps = [partial(at, "infra.checkpoint.save", 1, die), partial(at, "infra.checkpoint.save_model", 1, die)]
    gaps += [partial(at, RENAME, 1, die, of="/model", after=after) for after in (False, True)]
    for gap, old_model, after in zip(gaps, ("model", "model", "model", "model-2"), (2, 2, 4, 4)):
        shown = run(longer, out, gap, code=-signal.SIGKILL)
        assert f"continued after step {after} in {out}/" in shown
        assert ("note: steps was 2, now 4\n" in shown) == (gap is gaps[0])
        assert contents(out / old_model) == before and metrics(out)[-1]["step"] == 4
    assert f"continued after step 4 in {out}/" in run(longer, out) and contents(out / "model-2") == before
    shown = run(settings | dict(steps=4, overwrite=True), out)
    assert f"note: the run that was in {out}/ is in {replaced}/ now\nstarted in {out}/" in shown
    assert_same_files(replaced, out)  # this compares only the files that a run writes, so not notes.md
    assert run_folder.settings_in(replaced / "config.json") == run_folder.settings_in(out / "config.json")
    assert (replaced / "notes.md").read_text() == "mine" and not (out / "notes.md").exists()
    before = contents(out)
    evaluations = [line for line in shown.splitlines(keepends=True) if ", held out: accuracy " in line]
    last_line = f"\nfor a plot of the run: {shown.partition('for a plot of the run: ')[2]}"
    shown = run(settings | dict(steps=4, micro_batch_size=2), out)
    finished = f"the run in {out}/ is finished; only --overwrite starts it over\n"
    assert shown == finished + evaluations[0] + evaluations[-1] + last_line and len(evaluations) > 1
    assert contents(out) == before


def test_each_beginning_is_recorded_and_what_has_changed_is_told(out, monkeypatch):
    made(out, left=("checkpoint/000004",), overwrite=True)  # --overwrite is not told: it is of one start only
    assert begun(out, eval_every=7) == ["eval_every was 20, now 7"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    (note,) = begun(out, eval_every=7)
    assert re.fullmatch(r"threads was \d+, now 99", note)
    now = run_folder.provenance()
    later = dict(commit="abc", versions=now["versions"] | {"torch": "9.9"}, hardware=now["hardware"] | {"ranks": 2})
    monkeypatch.setattr(run_folder, "provenance", lambda: now | later)
    notes = [f"commit was {now['commit']}, now abc", f"torch was {torch.__version__}, now 9.9", "ranks was 1, now 2"]
    assert begun(out, eval_every=7) == notes
    beginnings = json.loads((out / "config.json").read_text())["beginnings"]
    assert [start["after_step"] for start in beginnings] == [0, 4, 4, 4]
    assert beginnings[2].items() >= now.items() and beginnings[3].items() >= later.items()


CODE = ["loss.py", "fast/output_head.py", "infra/shard.py", "tasks/contest.py", "test_loss.py", "tools/plot.py"]
NAMED = ["rewards/mine.py", "rewards/reply.py"]


@pytest.mark.parametrize("changed", CODE + NAMED)
def test_a_file_that_has_changed_is_told_and_code_is_compared_between_ranks(tmp_path, out, monkeypatch, changed):
    for name in CODE + NAMED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    for words in ("init -q", "add .", "-c user.name=a -c user.email=a commit -qm first"):
        subprocess.check_call(["git", "-C", tmp_path, *words.split()])
    monkeypatch.setattr(run_folder, "__file__", str(tmp_path / "infra" / "run_folder.py"))
    reward, reply = (str(tmp_path / name) for name in NAMED)
    settings = dict(reward=[f"{reward}:f"], reply=f"{reply}:f")
    made(out, left=("checkpoint/000004",), **settings)
    on_other_ranks = run_folder.fingerprint_of_start(config_of(out, **settings))
    assert begun(out, **settings) == []
    (tmp_path / changed).write_text("second")
    name = "code" if changed in CODE else f"digest of {tmp_path / changed}"
    notes, is_told = begun(out, **settings), not changed.startswith(("test_", "tools/"))
    assert [note.partition(" was ")[0] for note in notes] == ["commit", *([name] if is_told else [])]  # now "-dirty"
    fingerprint = run_folder.fingerprint_of_start(config_of(out.with_name("elsewhere"), **settings))
    assert (fingerprint != on_other_ranks) == is_told


def write(out: Path, to_test: object) -> None:
    """Replace the run in this folder, and keep the lock of the folder for minutes. Start a child process, as a reward
    may do, and send its pid to the test. The child does not have the lock."""
    made(out)
    begun(out, overwrite=True)
    if child := os.fork():  # in the child, this is 0
        to_test.send(child)
    time.sleep(600)  # the parent, which has the lock, and the child both sleep
    die()


def test_a_folder_has_one_writer_and_its_lock_ends_with_the_process(out, monkeypatch):
    receiver, sender = PROCESSES.Pipe(duplex=False)
    (writer := PROCESSES.Process(target=write, args=(out, sender), daemon=True)).start()
    sender.close()  # so that `recv` fails if the writer does
    child, before = receiver.recv(), contents(out)
    # A command that does not get the lock sleeps before it tries again. In this process, do not wait for that.
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(UserError, match=f"another process is writing to {out}: "):
        run_folder.claim(config_of(out, overwrite=True))
    assert contents(out) == before
    writer.kill()
    writer.join()
    run_folder.claim(config_of(out))
    os.kill(child, signal.SIGKILL)  # until now the child was running, but it did not have the lock
    out.rename(out.with_name("moved"))
    out.mkdir()
    (out / ".lock").touch()
    with pytest.raises(UserError, match="now belongs to another run"):
        report.RunLog(config_of(out), str, []).write({}, [], [])


def shuffled(load_task):
    """Let the task shuffle its rows, as a user's task may do, with a generator that it does not seed."""

    def load(config):
        task = load_task(config)
        random.shuffle(task.train)
        return task

    return load


# In the first evaluation, or in the update of the first step.
@pytest.mark.parametrize("name, number", [("train.evaluate", signal.SIGINT), (UPDATE, signal.SIGHUP)])
def test_a_signal_to_one_rank_ends_all_ranks_after_the_step(without_noise, tmp_path, name, number):
    interrupt = partial(at, name, 1, partial(signal.raise_signal, number), rank=1)
    before = random.seed, partial(conftest.replace, "infra.model.load_task", shuffled), interrupt
    shown = run(without_noise | dict(save_every=0), tmp_path / "out", *before, code=128 + number, world=2)
    assert "stopped after step 1; the same command, without --overwrite, resumes the run\n" in shown
    assert saved_steps(tmp_path / "out") == [1] and metrics(tmp_path / "out")[-1]["step"] == 1


def kill_torchrun() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def accident() -> None:
    """Kill rank 1 and, once torchrun has restarted both ranks, kill torchrun while both ranks are busy for minutes."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    # The fourth step of a process is step 4 at first, and step 6 after the restart, which resumes after step 2.
    at("train.training_step", 4, die if first else kill_torchrun, rank=1)
    at("train.training_step", 4, partial(time.sleep, 0 if first else 600), rank=0)
    # Ranks find each other's addresses in torchrun's store, which survives a restart. Rank 1 starts a second late. So
    # when rank 0 looks up the address of rank 1 after the restart, the store has only the old one, of the killed
    # process. This is the hardest case: rank 0 must wait for the new address.
    time.sleep(1 if os.environ["RANK"] == "1" else 0)


def test_torchrun_restarts_ranks_and_if_it_is_killed_they_end_and_more_ranks_can_resume(without_noise, out, tmp_path):
    # Only the first start may start over. After a restart by torchrun, the run is resumed in spite of --overwrite.
    # `run_supervised` returns when all ranks have ended, and fails if they do not end.
    code, shown = run_supervised(without_noise | dict(overwrite=True, keep_checkpoints=3), out, accident, restarts=2)
    assert code == -signal.SIGKILL and shown.count("started in") == shown.count("continued after step 2") == 1, shown
    assert saved_steps(out) == [2, 4]
    changed = dict(micro_batch_size=1, gradient_checkpointing=True, keep_checkpoints=1)
    assert "continued after step 4" in run(without_noise | changed, out, world=3) and saved_steps(out) == [7]
    run(without_noise, tmp_path / "whole")
    assert_same_run(out, tmp_path / "whole", 1e-3)
