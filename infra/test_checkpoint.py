"""Runs that are killed or stopped, at any moment and more than once, against a run that was not."""

import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import time
from array import array
from collections.abc import Callable
from functools import partial, reduce
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from batch import Group
from config import Config, UserError
from conftest import PROCESSES, assert_same_files, assert_same_run, at, contents, die, metrics, run, run_supervised
from infra import checkpoint, run_folder
from infra.command_line import ready
from infra.run_folder import saved_steps
from rollout import Completion, KeptSets

UPDATE, RENAME = "torch.optim.AdamW.step", "pathlib.Path.rename"
WRITE = "infra.checkpoint.HuggingFaceStorageWriter.write_data"


def noisy(completions, **columns):
    """Throws dice, which each rank has of its own."""
    return [float((text[:1] in "abc") != (random.random() + np.random.rand() < 0.5)) for text in completions]


def answered(row, turns):
    """Once, with what the row has and what was written."""
    return row["answer"][:1] + turns[0][:1] if len(turns) == 1 else None


@pytest.fixture(scope="module")
def quiet(sorting) -> dict:
    """Settings of a small run in which everything happens that a checkpoint must carry over."""
    return sorting | dict(
        prompts_per_step=2, num_generations=3, dynamic_sampling=2, max_completion_length=6, steps=7, num_iterations=2,
        minibatches=2, beta=0.1, ref_sync_every=3, weight_decay=0.1, lr_schedule="linear", warmup_steps=5, eval_every=4,
        eval_prompts=3, eval_k=2, save_every=2, keep_checkpoints=2, reply=f"{__name__}:answered",
    )  # fmt: skip


@pytest.fixture(scope="module")
def small(quiet) -> dict:
    return quiet | dict(reward=f"{__name__}:noisy", correct="noisy")


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    """The run, in one go. It needs all that a checkpoint has."""
    out = tmp_path_factory.mktemp("whole") / "out"
    run(small, out)
    assert '"cursor": 14' not in (out / "checkpoint/000007/state.json").read_text(), "further prompts were drawn"
    shown = [(line["kl"], line["grad_norm"], line["turns"]) for line in metrics(out) if line["step"]]
    assert all(kl > 0 for kl, _, _ in shown[3:])
    assert sum(norm > 0 for _, norm, _ in shown) > 4 and sum(turns > 1.1 for *_, turns in shown) > 4, shown
    return out


STOP = partial(signal.raise_signal, signal.SIGTERM)
ENDS = {  # of one run, one after the other: what happens there, the exit code
    "after the third of four updates": (partial(at, UPDATE, 3, die, after=True), -signal.SIGKILL),
    "inside a reply": (partial(at, f"{__name__}.answered", 12, die), -signal.SIGKILL),
    "between samples and metrics": (partial(at, "infra.report.append", 7, die, after=True), -signal.SIGKILL),
    "between two files of a checkpoint": (partial(at, WRITE, 2, die), -signal.SIGKILL),
    "after the step in which it was asked to stop": (partial(at, UPDATE, 2, STOP), 128 + signal.SIGTERM),
    "before an old checkpoint is deleted": (partial(at, RENAME, 1, die, after=True, of="6.partial"), -signal.SIGKILL),
    "while the last old one is deleted": (partial(at, "shutil.rmtree", 1, die, of="4.partial"), -signal.SIGKILL),
    "between writing the model and renaming it": (partial(at, RENAME, 1, die, of="model.partial"), -signal.SIGKILL),
}


def test_killed_at_chosen_moments(small, whole, tmp_path):
    out = tmp_path / "out"
    for end, code in ENDS.values():
        run(small, out, end, code=code)
    run(small, out)
    assert_same_files(out, whole)


# ---- Checkpoints: whole or not at all ----


def a_model(kind: type = torch.optim.AdamW, updates: int = 1) -> tuple[dict[str, nn.Module], torch.optim.Optimizer]:
    models = {"model": nn.Linear(3, 2), "reference": nn.Linear(3, 2)}
    optimizer = kind(models["model"].parameters(), lr=0.1)
    for _ in range(updates):
        update(models["model"], optimizer)
    return models, optimizer


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.tensor([1.0, 2.0, 3.0])).square().sum().backward()
    optimizer.step()


GROUP = Group([1, 2], {"prompt": "a"}, [Completion([3], [-0.1], True)], torch.tensor([math.nan]), index=7)
GROUP.completions[0].kept = KeptSets(array("i", [3, 5]), array("q", [0, 2]))
GROUP.completions[0].written, GROUP.completions[0].replies = [True], [[{"role": "tool", "content": "7"}]]
GROUP.advantages = [torch.tensor([0.5])]
STATE = {"rates": torch.tensor([[math.nan, 1.0, -0.0]]).double()[:, ::2], "mean": 0.1 + 0.2, "buffer": [GROUP, GROUP]}
DEEP, CYCLE = reduce(lambda nested, _: [nested], range(9999), []), []
CYCLE.append(CYCLE)
NO_STATE = [
    (1, 2),
    {1: 2},
    {(1, 2): 3},
    {1},
    np.float64(1),
    torch.ones(1, requires_grad=True),
    torch.eye(2).to_sparse(),
]
NO_STATE += [DEEP, CYCLE]
STATE["nested"] = {"": [[], {}, None, True, 2**70, math.inf, "\u4f60\n", {"step": torch.tensor(3)}, np.ones(2)]}


class Counting(torch.optim.SGD):
    """Its state is plain numbers, and its rate depends on them."""

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["updates"], state["sum"] = state.get("updates", 0) + 1, state.get("sum", 0.0) + 0.1
                p.data.sub_(p.grad, alpha=group["lr"] * state["sum"] / state["updates"] ** 2)


# SGD has no state, Adafactor a row and a column for a matrix.
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, Counting])
def test_a_checkpoint_brings_everything_back(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 24)
    (models, optimizer), (others, again) = a_model(kind, updates=3), a_model(kind, updates=0)
    model, other = models["model"], others["model"]
    checkpoint.save(tmp_path, 7, models, optimizer, 5, STATE)
    assert len([*tmp_path.glob("checkpoint/*/model/*.safetensors")]) == 2, "24 bytes, and 8"
    assert repr(checkpoint.load(tmp_path, 7, others, again)) == repr((5, STATE))
    assert all(map(torch.equal, others["reference"].parameters(), models["reference"].parameters()))
    for _ in range(3):
        assert all(map(torch.equal, other.parameters(), model.parameters()))
        update(model, optimizer)
        update(other, again)
    if kind is Counting:
        assert again.state[other.bias] == {"updates": 6, "sum": pytest.approx(0.6)}
    with pytest.raises(UserError, match=f"is of a run with {kind.__name__}, not Adamax"):
        checkpoint.load(tmp_path, 7, others, torch.optim.Adamax(other.parameters()))


def test_what_this_code_does_not_know_is_refused_by_name(tmp_path):
    """A tensor of a fork's model or optimizer, before anything is loaded."""
    models, optimizer = a_model()
    models["critic"] = nn.Linear(1, 1)
    optimizer.state[models["model"].bias]["ema"] = torch.zeros(2)
    checkpoint.save(tmp_path, 7, models, optimizer, 5, {})
    others, again = a_model(updates=0)
    told = "000007 does not fit the model or code: "
    with pytest.raises(
        UserError, match=rf"{told}\['bias of the critic \[1\]', 'state.bias.ema of the optimizer \[2\]'"
    ):
        checkpoint.load(tmp_path, 7, others, again)


def test_a_checkpoint_of_another_model_or_class_is_not_called_damaged(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 7, *a_model(), 5, STATE)
    (models, optimizer), told = a_model(updates=0), "000007 does not fit the model or code: "
    with monkeypatch.context() as patched:
        patched.setitem(checkpoint.GROUPS, "Group", lambda prompt_ids: None)
        with pytest.raises(UserError, match=f"{told}run.state: .* unexpected keyword argument 'row'"):
            checkpoint.load(tmp_path, 7, models, optimizer)
    models["model"] = nn.Linear(3, 4)  # a wider layer
    optimizer = torch.optim.AdamW(models["model"].parameters())
    with pytest.raises(UserError, match=rf"{told}\['bias of the model \[2\]', 'bias of the model \[4\]'"):
        checkpoint.load(tmp_path, 7, models, optimizer)


def test_tensors_of_the_state_come_back_to_their_device():
    text, tensors = json.dumps({"<class>": "Tensor", "name": "0", "device": "meta"}), {"0": torch.ones(2)}
    assert checkpoint._from_text(text, tensors).device.type == "meta"


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    happened, fsync, rename = [], os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: happened.append(Path(os.readlink(f"/proc/self/fd/{fd}"))) or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda self, to: happened.append((self, to)) or rename(self, to))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    checkpoint.save(tmp_path, 7, *a_model(), 1, {})
    folder, beside = (tmp_path / "checkpoint" / name for name in ("000007", "000007.partial"))
    before = happened[: happened.index((beside, folder))]
    inside = {beside / path.relative_to(folder) for path in folder.rglob("*")}
    assert {beside, tmp_path / "metrics.jsonl", *inside} <= set(before) and len(inside) == 9
    assert folder.parent in happened[len(before) + 1 :], "the new name itself is flushed"
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **settings: None)
    checkpoint.save(tmp_path, 8, *a_model(), 1, {})
    assert saved_steps(tmp_path) == [8], "an old one loses its name before its files"


@pytest.mark.parametrize("spoiled", ["model", "reference", "optimizer", *NO_STATE])
def test_what_is_not_finite_or_would_not_come_back_is_never_saved(tmp_path, spoiled):
    models, optimizer = a_model()
    checkpoint.save(tmp_path, 1, models, optimizer, 0, {})
    before, weights = contents(tmp_path), models["model"].weight
    state, told = {"mine": {"of it": [0, spoiled]}}, "run.state .*: it takes JSON, tensors, arrays and Groups"
    if isinstance(spoiled, str):
        state, told = {}, rf"after step 2 .* of the {spoiled} is not finite: nothing was saved"
        tensors = {"model": weights, "reference": models["reference"].bias}
        tensors.get(spoiled, optimizer.state[weights]["exp_avg"]).data[0] = math.inf
    with pytest.raises(UserError, match=told):
        checkpoint.save(tmp_path, 2, models, optimizer, 0, state)
    assert contents(tmp_path) == before


def test_a_damaged_checkpoint_is_named_with_what_goes_on_without_it(tmp_path):
    """Whatever file of it is empty, longer, or has another byte."""
    models, optimizer = a_model()
    checkpoint.save(tmp_path, 4, models, optimizer, 0, {})
    folder = tmp_path / "checkpoint" / "000004"
    told = (
        "is damaged .*: restore it, or move it away: .* the one before or, if it is not finished, from the first step"
    )
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        whole = file.read_bytes()
        for damaged in (b"", whole + b" ", whole[:-1] + bytes([whole[-1] ^ 1])):
            file.write_bytes(damaged)
            with pytest.raises(UserError, match=f"the checkpoint {folder} {told}"):
                checkpoint.load(tmp_path, 4, models, optimizer)
        file.write_bytes(whole)


def without_pickle() -> None:
    for module, names in ((pickle, "load loads Unpickler _Unpickler"), (torch, "load")):
        for name in names.split():
            setattr(module, name, lambda *args, **kwargs: os._exit(71))


def test_the_last_good_checkpoint_outlives_a_full_disk(small, whole, tmp_path):
    """And the one before serves where it is deleted; nothing is unpickled."""
    out = tmp_path / "out"
    full = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    shown = run(small, out, partial(at, "infra.checkpoint.save", 3, full), code=1)
    assert "File too large" in shown
    assert saved_steps(out) == [2, 4]
    checkpoint.check(out / "checkpoint" / "000004")
    shutil.rmtree(out / "checkpoint" / "000004")
    assert "continued after step 2" in run(small, out, without_pickle)
    assert_same_files(out, whole)


# ---- What a folder holds and a command -> what happens; nothing is trained here ----


@pytest.fixture
def out(tmp_path) -> Path:
    return tmp_path / "out"


DAPO = dict(algorithm="dapo", epsilon_high=math.inf)


def config_of(out: Path, **settings) -> Config:
    return ready(Config(**({"out": str(out), "steps": 4} | settings)), on_gpu=False)


def made(out: Path, steps_made: int = 4, left: tuple[str, ...] = ("checkpoint/000004", "model"), **settings) -> None:
    """What a run leaves, without its weights."""
    run_folder.begin(config_of(out, **settings), Config(out=str(out), **settings), 0)
    for name in ("metrics.jsonl", "samples.jsonl"):
        (out / name).write_text("".join(f'{{"step": {step}}}\n' for step in range(steps_made + 1)) + '{"st')  # torn
    for name in left:
        (out / name).mkdir(parents=True)


def holding(name: str, text: str, state: Callable = Path.mkdir) -> Callable:
    return lambda out: (state(out), (out / name).write_text(text))


def of_a_fork(out: Path, **settings) -> None:
    made(out, **settings)
    about = json.loads((out / "config.json").read_text(), parse_constant=pytest.fail)  # JSON has no infinity
    about["settings"] |= {"kl_target": 0.1}
    (out / "config.json").write_text(json.dumps(about))


unfinished = partial(made, left=("checkpoint/000004",))
evaluated = partial(made, steps_made=0, left=())  # before the first step failed
evaluation = partial(evaluated, steps=0)
without_checkpoint = partial(made, left=("model",))
MOVED = "--overwrite would move away /.*/out/model, which the new run reads:"
FOLDERS = [  # its state, the command's settings -> the step to go on after, None: finished, or what is wrong
    (holding("thesis.tex", "mine"), {}, "/out holds something that is not a run: give another --out$"),
    (holding("config.json", '{"model_type": "llama"}'), dict(overwrite=True), "holds something that is not a run"),
    (evaluated, dict(beta=0.1), 0),
    (unfinished, {}, 4),
    (made, {}, None),
    (made, dict(steps=9, eval_every=3, eval_prompts=5, eval_k=1), 4),
    (made, dict(steps=3), "--steps 3: the run in .* has made 4, and no checkpoint leads there"),
    (made, dict(beta=0.5, seed=1), "only --overwrite starts over: --beta 0.0 there, 0.5 here; --seed 0 there, 1 here$"),
    (made, dict(top_k=3, keep_set=False), "--top_k 0 there, 3 here; --keep_set True there, False here$"),
    (made, dict(beta=0.5, overwrite=True), 0),
    (made, dict(overwrite=True, model="out/model"), MOVED),
    (without_checkpoint, {}, None),
    (without_checkpoint, dict(steps=9), "--steps 9: the run in .* has made 4, and no checkpoint leads there"),
    (partial(made, **DAPO), DAPO, None),
    (evaluation, dict(steps=0, micro_batch_size=1), None),
    (evaluation, dict(steps=0, overwrite=True), 0),
    (evaluation, dict(steps=0, eval_k=8, eval_prompts=9), "--eval_prompts 256 there, 9 here; --eval_k 4 there, 8"),
    (evaluation, {}, "--steps 0 there, 4 here"),
    (partial(made, steps_made=2, left=()), dict(steps=0), "--steps 4 there, 0 here"),
    (evaluation, dict(steps=0, model="m"), "--model None there, m here"),
    (of_a_fork, {}, "holds a run with settings that this code does not know: kl_target$"),
    (of_a_fork, dict(overwrite=True), 0),
]


@pytest.mark.parametrize("state, settings, outcome", FOLDERS)
def test_what_a_folder_holds_and_a_command_does_with_it(out, monkeypatch, state, settings, outcome):
    monkeypatch.chdir(out.parent)
    state(out)
    before = contents(out.parent)
    if isinstance(outcome, str):
        with pytest.raises(UserError, match=outcome):
            run_folder.step_to_continue_after(config_of(out, **settings))
    else:
        assert run_folder.step_to_continue_after(config_of(out, **settings)) == outcome
    assert contents(out.parent) == before


# ---- Runs that are finished, go on, start over, are stopped, or meet another one ----


def test_an_extended_run_and_one_that_starts_over_are_those_made_in_one_go(small, tmp_path):
    """No folder is written over, and the same is told to have been given by hand. A finished one shows its table."""
    settings = small | dict(lr_schedule="constant", eval_every=2)
    out, taken, aside = (tmp_path / name for name in ("out", "out.replaced-1", "out.replaced-2"))
    taken.mkdir()
    run(settings | dict(steps=2), out)
    (out / "notes.md").write_text("mine")
    shown = run(dict(steps=4), out)
    assert "note: steps was 2, now 4\n" in shown and f"continued after step 2 in {out}/" in shown
    shown = run(settings | dict(steps=4, overwrite=True), out)
    assert f"note: the run that was in {out}/ is in {aside}/ now\nstarted in {out}/" in shown
    assert_same_files(aside, out)
    assert run_folder.given_in(aside / "config.json") == run_folder.given_in(out / "config.json")
    assert (aside / "notes.md").read_text() == "mine" and not (out / "notes.md").exists()
    table = shown.partition("held out (± 95 %)")[2]
    assert "accuracy" in table
    before = contents(out)
    shown = run(settings | dict(steps=4, micro_batch_size=2), out)
    told = f"the run in {out}/ is finished; only --overwrite starts it over\nnote: micro_batch_size was None, now 2\n"
    assert shown == f"{told}held out (± 95 %){table}" and contents(out) == before


def test_each_beginning_is_recorded_and_what_has_changed_is_told(out, monkeypatch):
    """What this code does not refuse: another commit, other versions, another content of what the run reads."""
    reward = out.with_name("mine.py")
    config = config_of(out, reward=[f"{reward}:mine"])
    reward.write_text("first")
    unfinished(out, reward=config.reward)
    (first,) = json.loads((out / "config.json").read_text())["beginnings"]
    assert run_folder.changes(config) == []
    reward.write_text("second")
    later = {"commit": "abc", "versions": {"torch": "9.9"}, "hardware": {}}
    monkeypatch.setattr(run_folder, "provenance", lambda: later)
    digest = f"digest of {reward}"
    notes = run_folder.begin(config, config, 4)
    about = json.loads((out / "config.json").read_text())
    assert about["beginnings"][0] == first and about["beginnings"][1].items() >= later.items()
    values = (first["digests"][digest], about["digests"][digest])
    expected = [f"commit was {first['commit']}, now abc", f"torch was {torch.__version__}, now 9.9"]
    assert notes == [*expected, f"{digest} was {values[0]}, now {values[1]}"] and len({*values}) == 2


def test_a_finished_evaluation_is_told_and_stays_as_it_is(quiet, tmp_path):
    """Only --overwrite evaluates again."""
    settings, out = quiet | dict(steps=0), tmp_path / "out"
    run(settings, out)
    before = contents(out)
    assert run(settings, out).startswith(f"the run in {out}/ is finished; only --overwrite starts it over\nheld out")
    assert contents(out) == before
    assert f"started in {out}/" in run(settings | dict(overwrite=True), out)


def write(out: Path, told: Connection) -> None:
    """For minutes, in the place of another run. A process that this one leaves behind, as a reward might, lives on."""
    made(out)
    run_folder.begin(config_of(out, overwrite=True), Config(), 0)
    if left := os.fork():
        told.send(left)
    time.sleep(600)
    die()


def test_one_writer_at_a_time_and_a_lock_that_dies_with_it(out, monkeypatch):
    told, tell = PROCESSES.Pipe(duplex=False)
    (writer := PROCESSES.Process(target=write, args=(out, tell), daemon=True)).start()
    tell.close()  # else a writer that fails would be waited for
    left, before = told.recv(), contents(out)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for command in (run_folder.step_to_continue_after, partial(run_folder.begin, given=Config(), done=0)):
        with pytest.raises(UserError, match=f"another process is writing to {out}: "):
            command(config_of(out, overwrite=True))
    assert contents(out) == before
    writer.kill()
    writer.join()
    assert run_folder.step_to_continue_after(config_of(out)) == 0
    os.kill(left, signal.SIGKILL)  # it was there all the time


def test_a_signal_to_one_rank_ends_all_after_the_step(quiet, tmp_path):
    before = partial(at, UPDATE, 1, partial(signal.raise_signal, signal.SIGINT), rank=1)
    shown = run(quiet, tmp_path / "out", before, code=128 + signal.SIGINT, world=2)
    assert "stopped after step 1; the same command, without --overwrite, resumes the run\n" in shown
    assert saved_steps(tmp_path / "out") == [1] and metrics(tmp_path / "out")[-1]["step"] == 1


def impatient() -> None:
    time.sleep = lambda seconds: None


def kill_torchrun() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def accident() -> None:
    """Rank 1 is killed; after torchrun has started all again, torchrun is, while both ranks are busy for minutes."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    at("train.training_step", 4, die if first else kill_torchrun, rank=1)
    at("train.training_step", 4, partial(time.sleep, 0 if first else 600), rank=0)
    time.sleep(os.environ["RANK"] == "1")  # late: until then there is only the address of the rank 1 before


def test_torchrun_recovers_from_a_killed_rank_and_ranks_do_not_outlive_it_and_others_go_on(quiet, tmp_path):
    out = tmp_path / "out"
    code, shown = run_supervised(quiet | dict(overwrite=True), out, accident, restarts=2)  # starts over once
    assert code == -signal.SIGKILL and shown.count("started in") == shown.count("continued after step 2") == 1, shown
    assert saved_steps(out) == [2, 4]
    changed = dict(micro_batch_size=1, gradient_checkpointing=True, keep_checkpoints=1)
    assert "continued after step 4" in run(quiet | changed, out, impatient, world=3) and saved_steps(out) == [7]
    run(quiet, tmp_path / "whole")
    assert_same_run(out, tmp_path / "whole", 1e-3)
