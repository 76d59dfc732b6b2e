"""Runs that are killed or stopped, at any moment and more than once, against a run that was not."""

import errno
import itertools
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import train
from config import Config, UserError
from conftest import (
    assert_same_files,
    assert_same_run,
    at,
    contents,
    die,
    ended,
    exit_codes,
    fail,
    metrics,
    run,
    saved,
    screen,
    start,
    torchrun,
)
from infra import checkpoint, report, run_folder
from infra.command_line import parse, ready

NOISY = """
import random
import numpy as np

def noisy(completions, **columns):
    return [float((text[:1] in "abc") != (random.random() + np.random.rand() < 0.5)) for text in completions]
"""


@pytest.fixture(scope="module")
def quiet(sorting) -> dict:
    """Settings of a small run in which everything happens that a checkpoint must carry over."""
    return sorting | dict(
        prompts_per_step=2, num_generations=3, dynamic_sampling=2, max_completion_length=6, steps=13, num_iterations=2,
        minibatches=2, beta=0.1, ref_sync_every=3, weight_decay=0.1, lr_schedule="linear", warmup_steps=5, eval_every=4,
        eval_prompts=3, eval_k=2, save_every=2, keep_checkpoints=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small(quiet, tmp_path_factory) -> dict:
    """With a reward that throws dice, which each rank has of its own: for one rank."""
    (file := tmp_path_factory.mktemp("rewards") / "rewards.py").write_text(NOISY)
    return quiet | dict(reward=f"{file}:noisy", correct="noisy", steps=7)


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    """That run, in one go."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(small, out)
    return out


@pytest.fixture(scope="module")
def quiet_whole(quiet, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("quiet") / "out"
    run(quiet, out)
    return out


@pytest.fixture(scope="module")
def halfway(small, tmp_path_factory) -> Path:
    """The run, killed after step 5: checkpoints 2 and 4."""
    out = tmp_path_factory.mktemp("halfway") / "out"
    run(small, out, partial(at, "step", 6, die), code=-signal.SIGKILL)
    assert saved(out) == ["000002", "000004"]
    return out


@pytest.fixture
def half(halfway, tmp_path) -> Path:
    return shutil.copytree(halfway, tmp_path / "half")


# ---- Killed ----


def torn_line(n: int) -> None:
    """The n-th lines are written up to their middle."""
    append = report.append

    def tear(path: Path, new: list[dict]) -> None:
        nonlocal n
        n -= 1
        append(path, new)
        if n == 0:
            os.truncate(path, path.stat().st_size - len(json.dumps(new[-1])) // 2)
            die()

    report.append = tear


KILLS = {  # of one run, one after the other
    "before the settings have their name": partial(at, "rename", 1, die),
    "after the settings are written": partial(at, "rename", 1, die, after=True),
    "in the first evaluation": partial(at, "rollout", 2, die),
    "before there is a checkpoint": partial(at, "append", 2, die, after=True),
    "during the rollout": partial(at, "rollout", 4, die, after=True),
    "in the first of four updates": partial(at, "loss", 2, die),
    "after the third of four updates": partial(at, "update", 7, die, after=True),
    "in the middle of a line of samples": partial(torn_line, 4 * 2 - 1),
    "between samples and metrics": partial(at, "append", 7, die, after=True),
    "in the middle of a line of metrics": partial(torn_line, 4),
    "between two files of a checkpoint": partial(at, "write_data", 2, die),
    "between writing a checkpoint and renaming it": partial(at, "rename", 1, die, of="6.partial"),
    "before an old checkpoint is deleted": partial(at, "rename", 1, die, after=True, of="6.partial"),
    "before the model is saved": partial(at, "save_model", 1, die),
    "between writing the model and renaming it": partial(at, "rename", 1, die, of="model.partial"),
}


def test_killed_at_chosen_moments(small, whole, tmp_path):
    out = tmp_path / "out"
    for moment, kill in KILLS.items():
        assert exit_codes(start(small, out, kill)) == [-signal.SIGKILL], (moment, screen(out).read_text())
    run(small, out)
    assert_same_files(out, whole)


def test_the_run_that_is_killed_needs_all_that_is_saved(whole):
    """Otherwise these tests would show less than they seem to."""
    state = json.loads((whole / "checkpoint" / "000007" / "state.json").read_text())
    assert state["cursor"] > 7 * 2, "dynamic sampling drew further prompts"
    before, *steps = metrics(whole)
    assert before["step"] == 0 and [line["step"] for line in steps] == list(range(1, 8))
    assert len({line["learning_rate"] for line in steps}) > 5
    assert any(line["kl"] > 0 for line in steps) and all(line["grad_norm"] > 0 for line in steps)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(small, whole, tmp_path, seed):
    """Thirty kills, half of them at a random call of a function that writes or computes, half at a random time."""
    r, kills, runs, code = random.Random(seed), 0, 0, None
    while kills < 10 or code != 0:
        out = tmp_path / f"{runs}"
        n, delay = (r.randint(1, 100), None) if r.random() < 0.5 else (10**9, r.uniform(0.2, 2.0))
        (process,) = start(small, out, partial(at, "any", n, die, after=r.random() < 0.5))
        process.join(delay)
        process.kill()
        (code,) = exit_codes([process])
        kills += code == -signal.SIGKILL
        if code == 0:
            assert_same_files(out, whole)
            runs += 1
    assert kills >= 10 and runs >= 1


def test_resumed_on_another_number_of_ranks(quiet, quiet_whole, tmp_path):
    out = tmp_path / "out"
    run(quiet, out, partial(at, "step", 3, die), code=-signal.SIGKILL)
    run(quiet, out, partial(at, "step", 3, die, rank=1), code=None, world=3)
    shown = run(quiet, out, world=2)
    assert "continued after step 4" in shown and "computed by 2 ranks" in shown
    assert_same_run(out, quiet_whole, 1e-3)


# ---- Checkpoints: whole or not at all ----


class OfOnesOwn(torch.optim.SGD):
    """Slower with each step; it keeps a plain number."""

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            p -= self.param_groups[0]["lr"] / self.state[p]["steps"] * p.grad


OPTIMIZERS = {
    "AdamW": torch.optim.AdamW,
    "SGD with momentum": partial(torch.optim.SGD, momentum=0.9),
    "SGD": torch.optim.SGD,  # has no state
    "Adafactor": torch.optim.Adafactor,  # a row and a column for a matrix
    "ASGD": torch.optim.ASGD,  # tensors of one value
    "of one's own": OfOnesOwn,
}


def a_model(
    make_optimizer: Callable = torch.optim.AdamW, updates: int = 1
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    for _ in range(updates):
        update(model, optimizer)
    return model, optimizer


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([1.0, 2.0, 3.0])).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_brings_everything_back(tmp_path, name):
    model, optimizer = a_model(OPTIMIZERS[name], updates=3)
    reference, _ = a_model()
    checkpoint.save(tmp_path, 7, model, reference, optimizer, cursor=5)
    other, again = a_model(OPTIMIZERS[name], updates=0)
    empty, _ = a_model(updates=0)
    assert checkpoint.load(tmp_path, 7, other, empty, again) == 5
    assert all(map(torch.equal, empty.parameters(), reference.parameters()))
    for _ in range(3):
        assert all(map(torch.equal, other.parameters(), model.parameters()))
        update(model, optimizer)
        update(other, again)
    assert optimizer.state_dict()["state"].keys() == again.state_dict()["state"].keys()


@pytest.mark.parametrize("there, here", itertools.permutations(["AdamW", "SGD"]))
def test_a_checkpoint_of_another_optimizer_is_one_line(tmp_path, there, here):
    model, optimizer = a_model(OPTIMIZERS[there])
    checkpoint.save(tmp_path, 7, model, None, optimizer, cursor=5)
    with pytest.raises(UserError, match=f"000007 is of a run with {there}, this one has {here}: .* another --out"):
        checkpoint.load(tmp_path, 7, model, None, OPTIMIZERS[here](model.parameters(), lr=0.1))


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    happened = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: happened.append(Path(os.readlink(f"/proc/self/fd/{fd}"))) or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda self, to: happened.append((self, to)) or rename(self, to))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    model, optimizer = a_model()
    checkpoint.save(tmp_path, 7, model, None, optimizer, cursor=1)
    folder = tmp_path / "checkpoint" / "000007"
    beside = folder.with_name("000007.partial")
    before = happened[: happened.index((beside, folder))]
    inside = {beside / path.relative_to(folder) for path in folder.rglob("*")}
    assert {beside, tmp_path / "metrics.jsonl", *inside} <= set(before) and len(inside) == 5
    assert folder.parent in happened[len(before) + 1 :], "the new name itself is flushed"


@pytest.mark.parametrize("keep, left", [(1, ["000010"]), (3, ["000004", "000006", "000010"])])
def test_keep_checkpoints(tmp_path, keep, left):
    model, optimizer = a_model()
    for step in (2, 4, 6, 10):
        checkpoint.save(tmp_path, step, model, None, optimizer, 0, keep)
    assert saved(tmp_path) == left


@pytest.mark.parametrize("where", ["model", "reference", "optimizer"])
def test_what_is_not_finite_is_never_saved(tmp_path, where):
    model, optimizer = a_model()
    reference, _ = a_model()
    checkpoint.save(tmp_path, 1, model, reference, optimizer, 0)
    before = contents(tmp_path)
    moments = optimizer.state[model.weight]["exp_avg"]
    bad = {"model": model.weight, "reference": reference.bias, "optimizer": moments}[where]
    with torch.no_grad():
        bad[0] = math.inf
    with pytest.raises(UserError, match=rf"after step 2 .* of the {where} is not finite .*: nothing was saved"):
        checkpoint.save(tmp_path, 2, model, reference, optimizer, 0)
    assert contents(tmp_path) == before


def test_a_checkpoint_that_is_not_finite_is_named_with_what_to_delete(tmp_path, monkeypatch):
    model, optimizer = a_model()
    checkpoint.save(tmp_path, 1, model, None, optimizer, 0, keep=2)
    monkeypatch.setattr(checkpoint, "_check_finite", lambda *args: None)  # as an older version did
    with torch.no_grad():
        model.weight[0] = math.nan
    checkpoint.save(tmp_path, 2, model, None, optimizer, 0, keep=2)
    monkeypatch.undo()
    with pytest.raises(
        UserError,
        match=r"checkpoint/000002 weight of the model is not finite .*: delete that folder, and "
        r"the same command goes on after step 1",
    ):
        checkpoint.load(tmp_path, 2, model, None, optimizer)


def test_a_promise_to_go_on_is_made_where_it_is_true(out):
    assert run_folder.goes_on(config_of(out)) == ""
    made(out, finished=False)
    assert run_folder.goes_on(config_of(out)) == f"the same command goes on after step 4, from {out}/"
    over = config_of(out, overwrite=True)
    assert run_folder.goes_on(over) == f"the same command without --overwrite goes on after step 4, from {out}/"
    assert run_folder.goes_on(config_of(out, beta=0.5)) == ""
    damaged = out / "checkpoint" / "000004"
    assert checkpoint._when_deleted(damaged).endswith("starts from the first step")
    (out / "model").mkdir()
    assert "same command" not in checkpoint._when_deleted(damaged)


@pytest.mark.parametrize("damage", ["elsewhere", "no weights", "torn weights", "no base"])
def test_a_checkpoint_that_cannot_be_a_model_is_told_so(half, capsys, tmp_path, damage):
    folder = half / "checkpoint" / "000004"
    if damage == "elsewhere":
        folder = folder.rename(tmp_path / "000004")
    elif damage == "no weights":
        shutil.rmtree(folder / "model")
    elif damage == "torn weights":
        os.truncate(next((folder / "model").iterdir()), 9999)
    else:
        config = half / "config.json"
        config.write_text(config.read_text().replace('"model": null', '"model": "./gone"'))
    assert train.main(["--task", "sorting", "--steps", "0", "--model", str(folder), "--out", f"{tmp_path}/out"]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    what = {"elsewhere": "must stand in its run's folder", "no base": "--model ./gone: there is no such folder"}
    assert what.get(damage, f"--model {folder}: its weights cannot be loaded: ") in told
    assert not (tmp_path / "out").exists()


DAMAGES = {
    "no weights": lambda folder: shutil.rmtree(folder / "model"),
    "no reference": lambda folder: next((folder / "reference").iterdir()).unlink(),
    "half of Adam's moments": lambda folder: os.truncate(next((folder / "optimizer").iterdir()), 9999),
    "weights of another shape": lambda folder: save_file({"x": torch.ones(1)}, next((folder / "model").iterdir())),
    "an empty state": lambda folder: (folder / "state.json").write_text(""),
    "another state": lambda folder: (folder / "state.json").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(small, whole, half, damage):
    DAMAGES[damage](half / "checkpoint" / "000004")
    shown = run(small, half, code=2)
    assert shown.splitlines()[-1].startswith(f"error: the checkpoint {half}/checkpoint/000004 is damaged")
    assert "Traceback" not in shown
    if damage == "no weights":
        shutil.rmtree(half / "checkpoint" / "000004")
        assert "continued after step 2" in run(small, half)
        assert_same_files(half, whole)


def without_pickle() -> None:
    for module, names in ((pickle, "load loads Unpickler _Unpickler"), (torch, "load")):
        for name in names.split():
            setattr(module, name, lambda *args, **kwargs: os._exit(71))


def test_nothing_is_unpickled(small, whole, half):
    run(small, half, without_pickle)
    assert_same_files(half, whole)


# ---- A full disk, no permission ----


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


NO_SPACE = partial(fail, OSError(errno.ENOSPC, "No space left on device"))
UNWRITABLE = {  # what happens, what is said
    "full while writing": (partial(at, "write_data", 2, NO_SPACE), "No space left on device"),
    "full while flushing": (partial(at, "fsync", 12, NO_SPACE), "No space left on device"),
    "full in a line of metrics": (partial(at, "append", 4, NO_SPACE), "No space left on device"),
    "files of a limited size": (partial(at, "save", 1, small_files), "File too large"),
    "no permission": (partial(at, "write_data", 2, partial(fail, PermissionError(13, "Not allowed"))), "Not allowed"),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_the_last_good_checkpoint_outlives_what_cannot_be_written(small, whole, half, what):
    before, reason = UNWRITABLE[what]
    good = contents(half / "checkpoint")
    shown = run(small, half, before, code=1)
    error = shown.splitlines()[-1]
    assert error.startswith("error: ") and reason in error and str(half) in error, shown
    assert "the same command goes on" in error and "Traceback" not in shown
    assert contents(half / "checkpoint") == good
    assert "continued after step 4" in run(small, half)
    assert_same_files(half, whole)


def test_a_disk_that_is_really_full(small, whole, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        shown = run(small, disk / "out", code=1)
        assert shown.splitlines()[-1].startswith(f"error: {disk}/out/checkpoint/000006 could not be written: ")
        assert "No space left" in shown and saved(disk / "out") == ["000002", "000004"]
        subprocess.run(["mount", "-o", "remount,size=30m", disk], check=True)
        assert "continued after step 4" in run(small, disk / "out")
        assert_same_files(disk / "out", whole)
    finally:
        subprocess.run(["umount", disk], check=True)


def not_allowed_in(folder: Path) -> None:
    folder.chmod(0o555)
    if os.geteuid() == 0:
        os.setuid(65534)


def test_a_folder_that_may_not_be_written(small):
    with tempfile.TemporaryDirectory() as folder:  # the folders above it may be read by everyone
        out = Path(folder) / "out"
        shown = run(small, out, partial(at, "open_run", 1, partial(not_allowed_in, out.parent)), code=2)
        assert shown == f"error: --out {out}: Permission denied\n"


# ---- --out ----


FIGURE = r" +\d\.\d+ ± \d\.\d+"


def test_a_finished_run_says_so_and_is_left_as_it_is(small, whole):
    table = re.compile(rf"\nheld out .* before +after\n.*accuracy{FIGURE * 2}\n.*pass@2{FIGURE * 2}\n.*", re.DOTALL)
    (result,) = table.findall(screen(whole).read_text())
    assert result.count("step 0, reward") == result.count("step 7, reward") == 2
    before = contents(whole)
    shown = run(small | dict(micro_batch_size=2), whole)
    assert table.findall("\n" + shown) == [result] and "step 7/7" not in shown
    assert f"python -m tools.plot {whole} " in shown and "pip install matplotlib" in shown
    assert f"in {whole}/: model, metrics.jsonl, samples.jsonl, config.json\n" in shown
    assert contents(whole) == before


def test_other_settings_are_listed_and_nothing_is_touched(small, half):
    before = contents(half)
    shown = run(small | dict(learning_rate=0.5, beta=0.2), half, code=2)
    assert "--learning_rate: 0.001 there, 0.5 here" in shown and "--beta: 0.1 there, 0.2 here" in shown
    assert "--overwrite" in shown and "--steps" not in shown and "Traceback" not in shown
    assert contents(half) == before


def test_how_it_is_computed_may_change(small, half):
    changed = dict(
        micro_batch_size=1, reward_timeout=5.0, save_every=0, keep_checkpoints=1, gradient_checkpointing=True
    )
    assert "continued after step 4" in run(small | changed, half)
    assert saved(half) == ["000007"]


def test_overwrite_starts_over_but_not_at_every_restart(small, whole, half):
    settings = small | dict(overwrite=True)
    shown = run(settings, half, partial(at, "step", 1, die), code=None, world=2, TORCHELASTIC_RESTART_COUNT="1")
    assert "continued after step 4" in shown
    assert "started in" in run(settings, half)
    assert_same_files(half, whole)


@pytest.mark.parametrize("overwrite", [{}, {"overwrite": True}])
@pytest.mark.parametrize("name", ["thesis.tex", "config.json"])
def test_what_is_not_a_run_is_never_deleted(small, tmp_path, name, overwrite):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / name).write_text('{"model_type": "llama"}')
    shown = run(small | overwrite, folder, code=2)
    assert shown == f"error: {folder} holds something that is not a run: give another --out\n"
    assert (folder / name).read_text() == '{"model_type": "llama"}'


# ---- Claimed when all is ready, and what may change in a run that goes on; none of these trains anything ----


def config_of(out: Path, **settings) -> Config:
    return ready(Config(**({"out": str(out), "steps": 4} | settings)), on_gpu=False)


def made(out: Path, steps: int = 4, finished: bool = True, **settings) -> Path:
    """What a run leaves, without its weights."""
    run_folder.claim(config_of(out, **settings), 0)
    (out / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(steps + 1)))
    (out / "samples.jsonl").touch()
    (out / "checkpoint" / f"{steps:06d}").mkdir(parents=True)
    if finished:
        (out / "model").mkdir()
    return out


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


WRONG = ["--model none/x", "--data none.jsonl --model models/addition --reward none.py:f", "--report_to wandb"]


@pytest.mark.parametrize("words", WRONG)
def test_a_start_that_fails_claims_nothing(out, words, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert train.main([*words.split(), "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith("error: --") and not out.exists()


def test_a_run_that_made_no_step_leaves_nothing_to_lose(out):
    run_folder.claim(config_of(out), 0)
    (out / "metrics.jsonl").write_text('{"step": 0}\n')  # evaluated, before the first step failed
    assert run_folder.open_run(config_of(out, beta=0.1)) == 0


def test_overwrite_moves_aside_what_the_run_wrote_and_nothing_else(out):
    made(out)
    (out / "notes.md").write_text("mine")
    (out / "nested").mkdir()
    before = contents(out)
    again = config_of(out, overwrite=True, beta=0.1)
    assert run_folder.open_run(again) == 0 and contents(out) == before
    assert run_folder.claim(again, 0) == [f"the run that was in {out}/ is in {out}/replaced-1/ now"]
    assert sorted(path.name for path in out.iterdir()) == [".lock", "config.json", "nested", "notes.md", "replaced-1"]
    assert run_folder.open_run(config_of(out / "replaced-1")) is None
    assert run_folder.claim(again, 0) == [f"the run that was in {out}/ is in {out}/replaced-2/ now"]


@pytest.mark.parametrize("name, file", [("model", "model"), ("model", "x/../model"), ("data", "samples.jsonl")])
def test_overwrite_keeps_what_the_command_reads(out, name, file):
    made(out)
    (out / "x").mkdir()
    with pytest.raises(UserError, match=f"--{name} {out}/{file}: --overwrite would move it away"):
        run_folder.open_run(
            config_of(out, overwrite=True, **{"model": "m", "reward": ["r.py:f"], name: str(out / file)})
        )


def test_a_finished_run_stays_finished_without_its_checkpoint(out):
    shutil.rmtree(made(out) / "checkpoint")
    assert run_folder.open_run(config_of(out)) is None
    with pytest.raises(
        UserError, match=r"checkpoint is gone, so it cannot go on to --steps 9; .* --model .*/out/model"
    ):
        run_folder.open_run(config_of(out, steps=9))
    (out / "metrics.jsonl").unlink()
    assert run_folder.open_run(config_of(out)) is None


@pytest.mark.parametrize("schedule, notes", [("constant", 0), ("linear", 1)])
def test_a_run_can_be_extended(out, schedule, notes):
    made(out, lr_schedule=schedule)
    more = config_of(out, lr_schedule=schedule, steps=9, eval_every=3, eval_prompts=5, eval_k=1)
    assert run_folder.open_run(more) == 4
    said = run_folder.claim(more, 4)
    assert len(said) == notes and all("goes down over 9 steps from here on, so far it did over 4" in x for x in said)
    with pytest.raises(UserError, match=r"--steps 3: the run in .* has made 4 already"):
        run_folder.open_run(config_of(out, lr_schedule=schedule, steps=3))


def test_an_extended_run_is_the_one_made_in_one_go(small, tmp_path):
    settings = small | dict(lr_schedule="constant", eval_every=2)
    run(settings | dict(steps=2), tmp_path / "out")
    assert "continued after step 2" in run(settings | dict(steps=4), tmp_path / "out")
    run(settings | dict(steps=4), tmp_path / "whole")
    assert_same_files(tmp_path / "out", tmp_path / "whole")


def test_out_alone_goes_on_with_the_settings_that_are_there(out):
    its_own = dict(algorithm="dapo", beta=0.1, eval_every=3, epsilon_high=0.3, overwrite=True)
    made(out, **its_own)
    words = ["--out", str(out)]
    assert parse(words, on_gpu=False) == config_of(out, **its_own | dict(overwrite=False))
    assert run_folder.open_run(parse(words, on_gpu=False)) is None
    assert run_folder.open_run(parse([*words, "--steps", "9", "--beta", "0.1", "--eval_k", "1"], on_gpu=False)) == 4
    other = parse([*words, "--algorithm", "gspo"], on_gpu=False)
    with pytest.raises(UserError, match=r"--algorithm: dapo there, gspo here\n  --normalization: global there"):
        run_folder.open_run(other)
    assert parse([*words, "--overwrite"], on_gpu=False) == config_of(out, steps=80, overwrite=True)


def test_a_run_that_made_no_step_gives_no_settings(out):
    run_folder.claim(config_of(out, beta=0.1), 0)
    assert parse(["--out", str(out)], on_gpu=False) == config_of(out, steps=80)


def test_an_evaluation_is_made_again_and_never_written_over_by_another(out):
    run_folder.claim(config_of(out, steps=0), 0)
    (out / "metrics.jsonl").write_text('{"step": 0}\n')
    assert run_folder.open_run(config_of(out, steps=0, eval_k=8)) == run_folder.open_run(config_of(out)) == 0
    with pytest.raises(UserError, match="--model: None there, m here"):
        run_folder.open_run(config_of(out, steps=0, model="m"))


def test_a_run_is_evaluated_elsewhere(out):
    made(out, finished=False)
    for weights in (out / "checkpoint" / "000004", out / "model"):
        weights.mkdir(exist_ok=True)
        with pytest.raises(UserError, match=f"has made 4 already; .* evaluate it: --model {weights} --steps 0 --out"):
            run_folder.open_run(config_of(out, steps=0))


def test_other_words_for_the_same_file_are_no_other_settings(out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made(out, model="m", data="rows.jsonl", reward=["r.py:f"])
    same = dict(model=f"{tmp_path}/m", data="./rows.jsonl", reward=[f"{tmp_path}/x/../r.py:f"])
    assert run_folder.open_run(config_of(out, **same)) is None
    with pytest.raises(UserError, match=r"--reward: \['r.py:f'\] there, \['r.py:g'\] here"):
        run_folder.open_run(config_of(out, **same | dict(reward=["r.py:g"])))
    (note,) = run_folder.claim(config_of(out, eval_prompts=9, steps=5, **same), 4)
    assert note.startswith("256 prompts were held out so far, 9 are from here on")


def test_a_setting_that_a_newer_version_added_counts_as_its_default(out):
    file = made(out, algorithm="dapo", epsilon_high=math.inf) / "config.json"
    assert "Infinity" not in file.read_text()
    content = json.loads(file.read_text())
    for name in ("top_entropy", "combine_rewards", "dynamic_sampling", "correct"):
        del content["settings"][name]
    file.write_text(json.dumps(content | {"settings": content["settings"] | {"of_old": 1}}))
    assert run_folder.open_run(config_of(out, algorithm="dapo", epsilon_high=math.inf)) is None
    with pytest.raises(UserError, match=r"--top_entropy: 1\.0 there, 0.5 here"):
        run_folder.open_run(config_of(out, algorithm="dapo", epsilon_high=math.inf, top_entropy=0.5))


DAMAGED = {  # file, its text, where the damage is
    "config.json": ('{\n"settings": {\n', "config.json:3: damaged, not JSON"),
    "metrics.jsonl": ('{"step": 0}\n{"step": 1\n{"step": 2}\n', "metrics.jsonl:2: damaged, not JSON"),
    "samples.jsonl": ('{"step": 0}\n[]\n', "samples.jsonl:2: not a line of a run"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_told_with_file_and_line(out, name):
    text, told = DAMAGED[name]
    (made(out) / name).write_text(text)
    before = contents(out)
    with pytest.raises(UserError, match=f"{out}/{told}.*: mend "):
        run_folder.open_run(config_of(out))
    assert contents(out) == before


# ---- One writer ----


def wait_for(path: Path, seconds: float = 30) -> str:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.01)
    return path.read_text()


def pause(folder: Path) -> None:
    """Until a file `go` is there. A process that this one leaves behind, as a reward function might, lives on."""
    left = os.fork()
    if left == 0:
        time.sleep(20)
        os._exit(0)
    (folder / "beside").write_text(str(left))
    (folder / "beside").rename(folder / "paused")
    wait_for(folder / "go")


def impatient() -> None:
    time.sleep = lambda seconds: None


@pytest.fixture
def writer(small, half, tmp_path):
    """A run that has paused in its second step."""
    (process,) = start(small, half, partial(at, "step", 2, partial(pause, tmp_path)))
    left_behind = int(wait_for(tmp_path / "paused"))
    yield process
    os.kill(left_behind, signal.SIGKILL)  # it was there all the time


def test_two_runs_at_once(small, whole, half, writer, tmp_path):
    before = contents(half)
    for more in ({}, {"overwrite": True}):
        shown = run(small | more, half, impatient, code=2)
        assert shown.startswith(f"error: another process is writing to {half}: ") and shown.count("\n") == 1
    assert contents(half) == before
    (tmp_path / "go").touch()
    assert exit_codes([writer]) == [0]
    assert_same_files(half, whole)


def test_the_lock_dies_with_its_holder(small, whole, half, writer):
    writer.kill()
    writer.join()
    run(small, half, impatient)
    assert_same_files(half, whole)


# ---- Stopped ----


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "number, code, point, world",
    [(signal.SIGTERM, 143, "rollout", 1), (signal.SIGINT, 130, "update", 1), (signal.SIGTERM, 143, "update", 2)],
)
def test_a_signal_ends_the_run_after_the_step(small, whole, half, number, code, point, world):
    settings = small | dict(save_every=0)
    before = partial(at, point, 1, partial(send, number), rank=world - 1)
    shown = run(settings, half, before, code=code, world=world)
    assert f"stopped by {number.name} after step 5; the same command goes on after step 5" in shown
    assert saved(half) == ["000004", "000005"] and metrics(half)[-1]["step"] == 5
    if world == 1:
        assert "continued after step 5" in run(settings, half)
        assert_same_files(half, whole)


def test_ctrl_c_before_the_first_step(small, tmp_path):
    shown = run(small, tmp_path / "out", partial(at, "rollout", 1, partial(send, signal.SIGINT)), code=130)
    assert shown.splitlines()[-1] == "stopped" and "Traceback" not in shown


def twice() -> None:
    clock = iter([0.0, 0.5, 4.0])
    time.monotonic = lambda: next(clock)
    for _ in range(3):
        send(signal.SIGTERM)


def test_a_second_signal_ends_the_run_at_once(small, half):
    shown = run(small, half, partial(at, "update", 1, twice), code=-signal.SIGTERM)
    assert "stopped by" not in shown and saved(half) == ["000002", "000004"]


# ---- Under torchrun ----


def kill_torchrun(noted: Path) -> None:
    noted.touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.5)


def accident(noted: Path) -> None:
    """Rank 1 is killed; after torchrun has started all again, torchrun is."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    at("step", 4, die if first else partial(kill_torchrun, noted), rank=1)


def test_torchrun_recovers_from_a_killed_rank_and_its_ranks_do_not_outlive_it(quiet, quiet_whole, tmp_path):
    out, killed = tmp_path / "out", tmp_path / "killed"
    agent = torchrun(quiet, out, partial(accident, killed), options=("--standalone", "--max-restarts=2"))
    (shown,) = ended(agent)
    assert time.time() - killed.stat().st_mtime < 10, "its ranks ended within seconds"
    assert agent.returncode == -signal.SIGKILL and shown.count("started in") == 1, shown
    assert shown.count("continued after step 2") == 1, shown
    assert metrics(out)[-1]["step"] < 13
    run(quiet, out, impatient)
    assert_same_run(out, quiet_whole, 1e-3)
