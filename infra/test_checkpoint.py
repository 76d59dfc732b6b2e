"""Runs that are killed or stopped, at any moment and more than once, against a run that was not."""

import errno
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import train
from infra import checkpoint, report

HERE = Path(__file__).parent.parent
TIMINGS = {"seconds_rollout", "seconds_update", "tokens_per_second", "peak_memory_gb"}

# Processes are forked from a server that has imported everything, so that one starts in milliseconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["infra.test_checkpoint", "tasks._characters", "tasks.countdown"])


# ---- Runs in processes of their own ----


def child(args: list[str], screen: Path, env: dict, before: Callable[[], object] | None) -> None:
    """train.py in this process; `before` may arrange that something goes wrong."""
    os.environ.update(env)
    with screen.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    torch.cuda.is_available = lambda: False
    try:
        if before:
            before()
        code = train.main(args)
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    os._exit(code)


def start(args: list[str], screen: Path, world: int = 1, before=None, **env: str) -> list:
    """One process for each rank. `before` is called in all of them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free.getsockname()[1]}", "WORLD_SIZE": f"{world}"}
    processes = []
    for rank in range(world):
        own = env | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"} if world > 1 else {}
        processes.append(PROCESSES.Process(target=child, args=(args, screen, own, before)))
        processes[-1].start()
    return processes


def exit_codes(processes: list, seconds: float = 60) -> list[int]:
    """Waits for all; one that hangs is killed."""
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hanging = [process for process in processes if process.exitcode is None]
    for process in hanging:
        process.kill()
    assert not hanging, f"{len(hanging)} of {len(processes)} processes went on after {seconds} seconds"
    return [process.exitcode for process in processes]


def run(args: list[str], screen: Path, code: int | None = 0, **how) -> str:
    """A whole run with that exit code on every rank. -> what it showed"""
    screen.write_text("")
    codes = exit_codes(start(args, screen, **how))
    shown = screen.read_text()
    assert code is None or set(codes) == {code}, (codes, shown)
    return shown


def flags(**settings) -> list[str]:
    words = []
    for name, value in settings.items():
        given = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, given)]
    return words


def rows_to_sort(path: Path) -> Path:
    r = random.Random(0)
    words = dict.fromkeys("".join(r.choices("abcdef", k=r.randint(1, 6))) for _ in range(40))
    path.write_text("".join(json.dumps({"prompt": w + ">", "answer": "".join(sorted(w))}) + "\n" for w in words))
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict:
    """Settings of a small run in which everything happens that a checkpoint must carry over."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "rewards.py").write_text(NOISY)
    return dict(
        task="sorting", data=rows_to_sort(folder / "rows.jsonl"), reward=f"{folder}/rewards.py:noisy",
        prompts_per_step=2, num_generations=3, dynamic_sampling=2, max_completion_length=6, steps=7, num_iterations=2,
        minibatches=2, beta=0.1, ref_sync_every=3, weight_decay=0.1, lr_schedule="linear", eval_every=4,
        eval_prompts=3, eval_k=2, save_every=2, keep_checkpoints=2, samples_per_step=-1,
    )  # fmt: skip


NOISY = """
import random
import numpy as np

def noisy(completions, **columns):
    return [float((text[:1] in "abc") != (random.random() + np.random.rand() < 0.5)) for text in completions]
"""


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    """That run, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    run(flags(**small, out=folder / "out"), folder / "screen")
    return folder / "out"


@pytest.fixture(scope="module")
def quiet(small) -> dict:
    """For runs on several numbers of ranks: a reward that throws dice gives each rank its own."""
    return {name: value for name, value in small.items() if name != "reward"} | dict(steps=13)


@pytest.fixture(scope="module")
def quiet_whole(quiet, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quiet")
    run(flags(**quiet, out=folder / "out"), folder / "screen")
    return folder / "out"


@pytest.fixture
def screen(tmp_path) -> Path:
    return tmp_path / "screen"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(out: Path) -> list[dict]:
    return [{name: x for name, x in line.items() if name not in TIMINGS} for line in lines(out / "metrics.jsonl")]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def saved(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoint").iterdir())


def assert_same(out: Path, whole: Path) -> None:
    """Bit for bit, timings aside."""
    assert figures(out) == figures(whole)
    assert (out / "samples.jsonl").read_bytes() == (whole / "samples.jsonl").read_bytes()
    assert contents(out / "model") == contents(whole / "model")
    assert not list(out.rglob("*.partial"))


# ---- What goes wrong: functions that are called in the process before the run ----

POINTS = {
    "rollout": (train, "rollout"),
    "reward": (train, "score"),
    "loss": (train, "policy_loss"),
    "update": (torch.optim.AdamW, "step"),
    "append": (report, "append"),
    "save": (checkpoint, "save"),
    "write_data": (checkpoint.HuggingFaceStorageWriter, "write_data"),
    "fsync": (os, "fsync"),
    "rename": (Path, "rename"),
    "rmtree": (shutil, "rmtree"),
    "save_model": (checkpoint, "save_model"),
    "evaluate": (train, "evaluate"),
    "step": (train, "training_step"),
}


def at(point: str, n: int, action: Callable, after: bool = False, rank: int | None = None, of: str = "") -> None:
    """`action` happens before (or after) the n-th call whose first argument ends so; "any": the calls of all points."""
    if rank is not None and os.environ.get("RANK", "0") != str(rank):
        return
    count = 0

    def watched(call):
        def calling(*args, **kwargs):
            nonlocal count
            meant = str(args[0] if args else "").endswith(of)
            count += meant
            now = meant and count == n
            if now and not after:
                action()
            result = call(*args, **kwargs)
            if now and after:
                action()
            return result

        return calling

    for owner, name in POINTS.values() if point == "any" else [POINTS[point]]:
        setattr(owner, name, watched(getattr(owner, name)))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(error: Exception) -> None:
    raise error


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


# ---- Killed ----

KILLS = {  # of one run, one after the other
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


def test_killed_at_chosen_moments(small, whole, tmp_path, screen):
    args = flags(**small, out=tmp_path / "out")
    for moment, kill in KILLS.items():
        codes = exit_codes(start(args, screen, before=kill))
        assert codes == [-signal.SIGKILL], (moment, screen.read_text())
    run(args, screen)
    assert_same(tmp_path / "out", whole)


def test_the_run_that_is_killed_needs_all_that_is_saved(whole):
    """Otherwise these tests would show less than they seem to."""
    state = json.loads((whole / "checkpoint" / "000007" / "state.json").read_text())
    assert state["cursor"] > 7 * 2, "dynamic sampling drew further prompts"
    before, *metrics = figures(whole)
    assert before["step"] == 0 and [line["step"] for line in metrics] == list(range(1, 8))
    assert len({line["learning_rate"] for line in metrics}) > 5
    assert any(line["kl"] > 0 for line in metrics) and all(line["grad_norm"] > 0 for line in metrics)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(small, whole, tmp_path, screen, seed):
    """Thirty kills, half of them at a random call of a function that writes or computes, half at a random time."""
    r, kills, runs, code = random.Random(seed), 0, 0, None
    while kills < 10 or code != 0:
        args = flags(**small, out=tmp_path / f"{runs}")
        n, delay = (r.randint(1, 100), None) if r.random() < 0.5 else (10**9, r.uniform(0.2, 2.0))
        (process,) = start(args, screen, before=partial(at, "any", n, die, after=r.random() < 0.5))
        process.join(delay)
        process.kill()
        (code,) = exit_codes([process])
        kills += code == -signal.SIGKILL
        if code == 0:
            assert_same(tmp_path / f"{runs}", whole)
            runs += 1
    assert kills >= 10 and runs >= 1


def assert_near_figures(out: Path, whole: Path, **tolerance: float) -> None:
    for ours, theirs in zip(figures(out), figures(whole), strict=True):
        ours, theirs = ({k: math.nan if x is None else x for k, x in line.items()} for line in (ours, theirs))
        assert ours == pytest.approx(theirs, nan_ok=True, **tolerance)


def assert_near(out: Path, whole: Path) -> None:
    """The same completions, and metrics within 1e-3."""
    one, other = (lines(folder / "samples.jsonl") for folder in (out, whole))
    for name in ("step", "kind", "prompt", "completion", "reward", "length", "truncated"):
        assert [line[name] for line in one] == [line[name] for line in other]
    assert_near_figures(out, whole, abs=1e-3)


def test_resumed_on_another_number_of_ranks(quiet, quiet_whole, tmp_path, screen):
    args = flags(**quiet, out=tmp_path / "out")
    run(args, screen, None, before=partial(at, "step", 3, die))
    run(args, screen, None, before=partial(at, "step", 3, die, rank=1), world=3)
    shown = run(args, screen, world=2)
    assert "continued after step 4" in shown and "computed by 2 ranks" in shown
    assert_near(tmp_path / "out", quiet_whole)


# ---- Checkpoints: whole or not at all ----


def a_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_all_of_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    happened = []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: happened.append(Path(os.readlink(f"/proc/self/fd/{fd}"))) or fsync(fd))
    monkeypatch.setattr(Path, "rename", lambda self, to: happened.append((self, to)) or rename(self, to))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    model, optimizer = a_model()
    checkpoint.save(tmp_path, 7, model, None, optimizer, {"cursor": 1})
    folder = tmp_path / "checkpoint" / "000007"
    beside = folder.with_name("000007.partial")
    before = happened[: happened.index((beside, folder))]
    assert {beside, tmp_path / "metrics.jsonl", *(beside / path.name for path in folder.iterdir())} <= set(before)
    assert folder.parent in happened[len(before) + 1 :], "the new name itself is flushed"


def test_a_checkpoint_brings_everything_back(tmp_path):
    model, optimizer = a_model()
    reference, _ = a_model()
    checkpoint.save(tmp_path, 7, model, reference, optimizer, {"cursor": 5})
    other, empty = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    again = torch.optim.AdamW(other.parameters())
    assert checkpoint.load(tmp_path, 7, other, empty, again) == {"cursor": 5}
    for ours, theirs in ((other, model), (empty, reference)):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))
    for p, q in zip(model.parameters(), other.parameters()):
        assert optimizer.state[p].keys() == again.state[q].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(optimizer.state[p][key], again.state[q][key]) for key in again.state[q])


@pytest.mark.parametrize("keep, left", [(1, ["000007"]), (3, ["000004", "000006", "000007"])])
def test_keep_checkpoints(small, half, screen, keep, left):
    run(flags(**small | dict(keep_checkpoints=keep), out=half), screen)
    assert saved(half) == left


DAMAGES = {
    "no weights": lambda folder: shutil.rmtree(folder / "model"),
    "no reference": lambda folder: next((folder / "reference").iterdir()).unlink(),
    "half of Adam's moments": lambda folder: os.truncate(next((folder / "optimizer").iterdir()), 9999),
    "weights of another shape": lambda folder: save_file({"x": torch.ones(1)}, next((folder / "model").iterdir())),
    "an empty state": lambda folder: (folder / "state.json").write_text(""),
}


@pytest.fixture(scope="module")
def halfway(small, tmp_path_factory) -> Path:
    """The run, killed after step 5: checkpoints 2 and 4."""
    folder = tmp_path_factory.mktemp("halfway")
    args = flags(**small, out=folder / "out")
    assert exit_codes(start(args, folder / "screen", before=partial(at, "step", 6, die))) == [-signal.SIGKILL]
    assert saved(folder / "out") == ["000002", "000004"]
    return folder / "out"


@pytest.fixture
def half(halfway, tmp_path) -> Path:
    return shutil.copytree(halfway, tmp_path / "half")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_serves(small, whole, half, screen, damage):
    DAMAGES[damage](half / "checkpoint" / "000004")
    shown = run(flags(**small, out=half), screen, code=2)
    error = shown.splitlines()[-1]
    assert error.startswith(f"error: the checkpoint {half}/checkpoint/000004 is damaged") and "Traceback" not in shown
    if damage == "no weights":
        shutil.rmtree(half / "checkpoint" / "000004")
        assert "continued after step 2" in run(flags(**small, out=half), screen)
        assert_same(half, whole)


def test_what_a_kill_left_half_written_is_cleared_away(small, whole, half, screen):
    for name in ("000005.partial", "000006.partial"):
        (half / "checkpoint" / name).mkdir()
        (half / "checkpoint" / name / "model.safetensors").write_bytes(b"half of")
    assert "continued after step 4" in run(flags(**small, out=half), screen)
    assert_same(half, whole)


def test_nothing_is_unpickled(small, whole, half, screen):
    run(flags(**small, out=half), screen, before=without_pickle)
    assert_same(half, whole)


def without_pickle() -> None:
    import pickle

    for module, names in ((pickle, "load loads Unpickler _Unpickler"), (torch, "load")):
        for name in names.split():
            setattr(module, name, lambda *args, **kwargs: os._exit(71))


# ---- A full disk, no permission ----


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))


NO_SPACE = OSError(errno.ENOSPC, "No space left on device")
UNWRITABLE = {  # what happens, what is said
    "full while writing": (partial(at, "write_data", 2, partial(fail, NO_SPACE)), "No space left on device"),
    "full while flushing": (partial(at, "fsync", 12, partial(fail, NO_SPACE)), "No space left on device"),
    "full in a line of metrics": (partial(at, "append", 4, partial(fail, NO_SPACE)), "No space left on device"),
    "files of a limited size": (partial(at, "save", 1, small_files), "File too large"),
    "no permission": (partial(at, "write_data", 2, partial(fail, PermissionError(13, "Not allowed"))), "Not allowed"),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_the_last_good_checkpoint_outlives_what_cannot_be_written(small, whole, half, screen, what):
    before, reason = UNWRITABLE[what]
    good = contents(half / "checkpoint")
    shown = run(flags(**small, out=half), screen, code=1, before=before)
    error = shown.splitlines()[-1]
    assert error.startswith("error: ") and reason in error and str(half) in error, shown
    assert "the same command goes on" in error and "Traceback" not in shown
    assert contents(half / "checkpoint") == good
    assert "continued after step 4" in run(flags(**small, out=half), screen)
    assert_same(half, whole)


def test_a_disk_that_is_really_full(small, whole, tmp_path, screen):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        args = flags(**small, out=disk / "out")
        shown = run(args, screen, code=1)
        assert shown.splitlines()[-1].startswith(f"error: {disk}/out/checkpoint/000006 could not be written: ")
        assert "No space left" in shown and saved(disk / "out") == ["000002", "000004"]
        subprocess.run(["mount", "-o", "remount,size=30m", disk], check=True)
        assert "continued after step 4" in run(args, screen)
        assert_same(disk / "out", whole)
    finally:
        subprocess.run(["umount", disk], check=True)


def as_nobody(folder: Path) -> None:
    os.chdir(folder)
    if os.geteuid() == 0:
        os.setuid(65534)


def test_a_folder_that_may_not_be_written(small, tmp_path, screen):
    (tmp_path / "mine").mkdir(mode=0o555)
    shown = run(flags(**small, out="out"), screen, code=2, before=partial(as_nobody, tmp_path / "mine"))
    assert shown == "error: --out out: Permission denied\n"


# ---- --out ----


def test_no_checkpoint_yet_starts_over(small, whole, tmp_path, screen):
    args = flags(**small, out=tmp_path / "out")
    run(args, screen, code=None, before=partial(at, "append", 3, die, after=True))
    assert "started in" in run(args, screen)
    assert_same(tmp_path / "out", whole)


@pytest.mark.parametrize("after", [False, True])
def test_killed_while_the_settings_are_written(small, tmp_path, screen, after):
    args = flags(**small | dict(steps=1), out=tmp_path / "out")
    run(args, screen, code=-signal.SIGKILL, before=partial(at, "rename", 1, die, after=after))
    assert "started in" in run(args, screen)


def test_a_finished_run_says_so_and_is_left_as_it_is(small, whole, screen):
    before = contents(whole)
    shown = run(flags(**small, out=whole), screen)
    assert "finished" in shown.splitlines()[0] and "step 7/7" not in shown
    after = contents(whole)
    assert {name for name in after if before.get(name) != after[name]} == set() == before.keys() - after.keys()


def test_other_settings_are_listed_and_nothing_is_touched(small, half, screen):
    before = contents(half)
    shown = run(flags(**small | dict(learning_rate=0.5, beta=0.2), out=half), screen, code=2)
    assert "--learning_rate: 0.001 there, 0.5 here" in shown and "--beta: 0.1 there, 0.2 here" in shown
    assert "--overwrite" in shown and "--steps" not in shown and "Traceback" not in shown
    assert contents(half) == before


def test_how_it_is_computed_may_change(small, half, screen):
    changed = dict(
        micro_batch_size=1, reward_timeout=5.0, save_every=0, keep_checkpoints=1, gradient_checkpointing=True
    )
    assert "continued after step 4" in run(flags(**small | changed, out=half), screen)
    assert saved(half) == ["000007"]


def test_overwrite_starts_over_but_not_at_every_restart(small, whole, half, screen):
    args = flags(**small, overwrite=True, out=half)
    restart = dict(world=2, TORCHELASTIC_RESTART_COUNT="1", before=partial(at, "step", 1, die))
    assert "continued after step 4" in run(args, screen, None, **restart)
    assert "started in" in run(args, screen)
    assert_same(half, whole)


@pytest.mark.parametrize("overwrite", [{}, {"overwrite": True}])
@pytest.mark.parametrize("name", ["thesis.tex", "config.json"])
def test_what_is_not_a_run_is_never_deleted(small, tmp_path, screen, name, overwrite):
    folder = tmp_path / "documents"
    folder.mkdir()
    (folder / name).write_text('{"model_type": "llama"}')
    shown = run(flags(**small, **overwrite, out=folder), screen, code=2)
    assert shown == f"error: {folder} holds something that is not a run: give another --out\n"
    assert (folder / name).read_text() == '{"model_type": "llama"}'


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
    checkpoint.time.sleep = lambda seconds: None


def test_two_runs_at_once(small, whole, half, tmp_path, screen):
    args = flags(**small, out=half)
    first = start(args, tmp_path / "first", before=partial(at, "step", 2, partial(pause, tmp_path)))
    left = int(wait_for(tmp_path / "paused"))
    before = contents(half)
    for more in ([], ["--overwrite"]):
        shown = run(args + more, screen, code=2, before=impatient)
        assert shown.startswith(f"error: another process is writing to {half}: ") and shown.count("\n") == 1
    assert contents(half) == before
    (tmp_path / "go").touch()
    assert exit_codes(first) == [0]
    os.kill(left, signal.SIGKILL)
    assert_same(half, whole)


def test_the_lock_dies_with_its_holder(small, whole, half, tmp_path, screen):
    args = flags(**small, out=half)
    first = start(args, tmp_path / "first", before=partial(at, "step", 2, partial(pause, tmp_path)))
    left = int(wait_for(tmp_path / "paused"))
    first[0].kill()
    run(args, screen, before=impatient)
    os.kill(left, signal.SIGKILL)  # it was there all the time
    assert_same(half, whole)


# ---- Stopped ----


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "number, code, point, world",
    [(signal.SIGTERM, 143, "rollout", 1), (signal.SIGINT, 130, "update", 1), (signal.SIGTERM, 143, "update", 2)],
)
def test_a_signal_ends_the_run_after_the_step(small, whole, half, screen, number, code, point, world):
    args = flags(**small | dict(save_every=0), out=half)
    shown = run(args, screen, code, before=partial(at, point, 1, partial(send, number), rank=world - 1), world=world)
    assert f"stopped by {number.name} after step 5; the same command continues the run" in shown
    assert saved(half) == ["000004", "000005"] and figures(half)[-1]["step"] == 5
    if world == 1:
        assert "continued after step 5" in run(args, screen)
        assert_same(half, whole)


def test_ctrl_c_before_the_first_step(small, tmp_path, screen):
    args = flags(**small, out=tmp_path / "out")
    shown = run(args, screen, code=130, before=partial(at, "rollout", 1, partial(send, signal.SIGINT)))
    assert shown.splitlines()[-1] == "stopped" and "Traceback" not in shown


def twice() -> None:
    clock = iter([0.0, 0.5, 4.0])
    train.time.monotonic = lambda: next(clock)
    for _ in range(3):
        send(signal.SIGTERM)


def test_a_second_signal_ends_the_run_at_once(small, half, screen):
    shown = run(flags(**small, out=half), screen, code=-signal.SIGTERM, before=partial(at, "update", 1, twice))
    assert "stopped by" not in shown and saved(half) == ["000002", "000004"]


# ---- Under torchrun ----


def kill_torchrun() -> None:
    Path(os.environ["FOLDER"], "killed").touch()
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(0.5)


def accident() -> None:
    """Rank 1 is killed; after torchrun has started all again, torchrun is."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    at("step", 4, die if first else kill_torchrun, rank=1)


def torchrun(args: list[str], folder: Path, before: str, *options: str) -> subprocess.Popen:
    """Two ranks; `before` is the name of a function of these tests."""
    module = before.split(".")[0]
    program = folder / "program.py"
    program.write_text(
        f"import sys\nsys.path.insert(0, {str(HERE)!r})\nimport {module}, train\n"
        f"{before}()\ntrain.faults.leave(train.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *options]
    return subprocess.Popen(
        [*command, str(program), *args],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "FOLDER": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_torchrun_recovers_from_a_killed_rank_and_its_ranks_do_not_outlive_it(quiet, quiet_whole, tmp_path, screen):
    args = flags(**quiet, out=tmp_path / "out")
    agent = torchrun(args, tmp_path, "test_checkpoint.accident", "--max-restarts=2")
    try:
        shown, _ = agent.communicate(timeout=100)  # the pipe closes when the last of its ranks is gone
    finally:
        os.killpg(agent.pid, signal.SIGKILL) if agent.poll() is None else None
    assert time.time() - (tmp_path / "killed").stat().st_mtime < 10, "its ranks ended within seconds"
    assert agent.returncode == -signal.SIGKILL and shown.count("started in") == 1, shown
    assert shown.count("continued after step 2") == 1, shown
    assert figures(tmp_path / "out")[-1]["step"] < 13
    run(args, screen, before=impatient)
    assert_near(tmp_path / "out", quiet_whole)
