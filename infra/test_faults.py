"""Faults in a run: memory that runs out, ranks that fail, numbers that are not finite. Every run is in processes of its
own that are killed if they hang."""

import io
import os
import re
import signal
import socket
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rollout
import train
from config import Config, UserError
from conftest import (
    assert_same_run,
    at,
    die,
    ended,
    errors,
    exit_codes,
    fail,
    free_port,
    metrics,
    on_rank,
    run,
    saved,
    screen,
    start,
    torchrun,
)
from infra import faults, ranks

SECONDS = 30  # for a whole run; "within seconds" is told from a hang, on a busy machine too


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    return sorting | dict(
        prompts_per_step=2, max_completion_length=6, steps=3, beta=0.1, eval_every=2, eval_prompts=4, eval_k=2,
        save_every=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    run(small, out)
    return out


# ---- Out of memory: injected, so that it needs no GPU ----


def oom(*where: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def oom_above(rows: int, rank: int | None = None) -> None:
    """A forward pass of more rows than this, in the update or where log-probs are scored, does not fit."""
    if on_rank(rank):
        logprobs = train.logprobs
        train.logprobs = lambda run, part, *args, **kw: oom() if len(part) > rows else logprobs(run, part, *args, **kw)


def oom_in_rollout_above(rows: int, rank: int | None = None) -> None:
    if on_rank(rank):
        generate = rollout._generate
        rollout._generate = lambda model, prompts, *args: (
            oom() if len(prompts) > rows else generate(model, prompts, *args)
        )


def out_of_memory(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if "out of memory" in line]


@pytest.mark.parametrize("rank, world", [(None, 1), (1, 2)])
@pytest.mark.parametrize("unit, limit", [("micro_batch_size", 4), ("micro_batch_tokens", 56)])
def test_update_out_of_memory_in_one_micro_batch(small, whole, tmp_path, unit, limit, rank, world):
    """After part of the gradient has been summed: the second of two micro-batches fails, once."""
    settings, out = small | {unit: limit // world}, tmp_path / "out"
    (told,) = out_of_memory(run(settings, out, partial(at, "loss", 2, oom, rank=rank), world=world))
    assert re.match(rf"note: rank {rank or 0}: out of memory; going on with micro-batches of up to \d+ padded", told)
    assert_same_run(out, whole)


@pytest.mark.parametrize("fits, rank, world", [(1, None, 1), (3, 1, 2)])
def test_update_out_of_memory_keeps_the_smaller_size(small, whole, tmp_path, fits, rank, world):
    shown = run(small, tmp_path / "out", partial(oom_above, fits, rank), world=world)
    sizes = [int(re.search(r"up to (\d+) padded tokens", line).group(1)) for line in out_of_memory(shown)]
    assert sizes and sizes == sorted(set(sizes), reverse=True) and len(sizes) <= 4, "each is tried, and told, once"
    assert_same_run(tmp_path / "out", whole)


@pytest.mark.parametrize("fits, rank, world", [(3, None, 1), (2, 1, 2)])
def test_rollout_out_of_memory(small, whole, tmp_path, fits, rank, world):
    shown = run(small, tmp_path / "out", partial(oom_in_rollout_above, fits, rank), world=world)
    sizes = [int(re.search(r"at most (\d+) completions", line).group(1)) for line in out_of_memory(shown)]
    assert min(sizes) <= fits and sizes == sorted(set(sizes), reverse=True), "greedy or not, each is tried once"
    assert_same_run(tmp_path / "out", whole)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("before", [oom_above, oom_in_rollout_above])
def test_out_of_memory_at_one_row(small, tmp_path, before, world):
    out = tmp_path / "out"
    codes = exit_codes(start(small, out, partial(before, 0, world - 1), world=world), SECONDS)
    shown = screen(out).read_text()
    assert codes[-1] == 2 and "out of memory with one completion at a time" in errors(shown)[0]
    assert "--max_completion_length" in errors(shown)[0] and "Traceback" not in shown


def test_out_of_memory_anywhere_else_is_told_plainly(small, tmp_path):
    shown = run(small, tmp_path / "out", partial(at, "update", 2, oom), code=1)
    assert shown.splitlines()[-1].startswith("error: CUDA out of memory.") and "Traceback" not in shown


# ---- A rank that fails ----

PHASES = {  # at which call, and on which rank; the first one alone saves, and the others wait for it
    "rollout": (4, 1), "reward": (4, 1), "loss": (2, 1), "update": (2, 1), "evaluate": (2, 1),
    "save": (1, 0), "save_model": (1, 0),
}  # fmt: skip
FAULTS = {
    "exception": (partial(fail, ValueError("what went wrong")), 1, "ValueError: what went wrong"),
    "mistake": (partial(fail, UserError("what went wrong")), 2, "error: what went wrong"),
    "kill": (die, -signal.SIGKILL, None),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_ends_all(small, tmp_path, fault, phase):
    action, code, message = FAULTS[fault]
    (n, rank), out = PHASES[phase], tmp_path / "out"
    codes = exit_codes(start(small, out, partial(at, phase, n, action, rank=rank), world=3), SECONDS)
    shown = screen(out).read_text()
    assert codes[rank] == code and set(codes) <= {code, 1, 2}, (codes, shown)
    if message:
        first, *others = [line for line in shown.splitlines() if line.startswith(("error:", "ValueError"))]
        assert first == message and shown.count(message) <= 2
        assert all("lost contact with another rank" in line for line in others)
    else:
        assert shown.count("error: lost contact with another rank: ") == 2 and "Traceback" not in shown


def test_under_torchrun_a_rank_that_lost_contact_leaves_the_last_word(small, tmp_path):
    """The others wait in a collective call, which fails when rank 1 does; torchrun would end them now."""
    before = partial(at, "rollout", 4, partial(fail, ValueError("what went wrong")), rank=1)
    shown = run(small, tmp_path / "out", before, code=1, world=3, TORCHELASTIC_RUN_ID="1", GROUP_RANK="0")
    assert shown.rstrip().endswith("\nValueError: what went wrong") and shown.count("Error: ") == 1, shown


def test_a_mistake_of_all_ranks_is_told_once(small, tmp_path):
    shown = run(small | dict(data=tmp_path / "none.jsonl"), tmp_path / "out", code=2, world=2)
    assert shown == f"error: --data {tmp_path}/none.jsonl: No such file or directory\n"


def late_failure(noted: Path) -> None:
    """Rank 1 fails while rank 0 is in a rollout that takes a minute more."""
    at("rollout", 4, partial(time.sleep, 60), rank=0)
    at("rollout", 4, partial(fail_late, noted), rank=1)


def fail_late(noted: Path) -> None:
    time.sleep(0.5)
    noted.touch()
    raise ValueError("what went wrong")


def test_under_torchrun_the_message_of_the_failing_rank_is_last(small, tmp_path):
    agent = torchrun(small, tmp_path / "out", partial(late_failure, tmp_path / "failed"))
    (shown,) = ended(agent)
    assert time.time() - (tmp_path / "failed").stat().st_mtime < SECONDS
    assert agent.returncode == 1
    told = [line.strip() for line in shown.splitlines() if "Error: " in line and "ChildFailedError" not in line]
    assert told == ["ValueError: what went wrong"] * 2, shown
    assert "what went wrong" in "\n".join(shown.splitlines()[-5:]), shown


# ---- Ranks that do not meet, and what a terminal cannot show ----


@pytest.fixture
def lone_rank(monkeypatch):
    """-> a function that starts rank 0 of these, in this process, and gives the line it gets"""
    monkeypatch.setattr(faults, "watch", lambda: None)
    monkeypatch.setattr(ranks, "PATIENCE", 0.1)

    def start(**env: str) -> str:
        for name, value in ({"RANK": "0"} | env).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError) as told:
            ranks.start()
        return str(told.value)

    return start


def test_a_rank_without_its_friends(lone_rank):
    told = "RANK is set, but not WORLD_SIZE, MASTER_PORT: start with torchrun; for one process, unset RANK"
    assert lone_rank(MASTER_ADDR="127.0.0.1") == told


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_rank_that_is_no_number(lone_rank, name):
    given = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1") | {name: "x"}
    assert lone_rank(**given) == f"{name} is 'x', not a number: start with torchrun, or unset {name}"


def test_a_port_that_is_taken(lone_rank):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = lone_rank(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    assert told.startswith(f"no meeting of 2 ranks at MASTER_ADDR:MASTER_PORT 127.0.0.1:{port}: ")
    assert "address already in use" in told.lower() and "\n" not in told


def test_what_is_waited_for_is_said_while_waiting(lone_rank, monkeypatch, capsys):
    def rendezvous(*args, **kwargs):
        time.sleep(1)
        raise RuntimeError("timed out\nmore")

    monkeypatch.setattr(torch.distributed, "rendezvous", rendezvous)
    meeting = f"2 ranks at MASTER_ADDR:MASTER_PORT 127.0.0.1:{free_port()}"
    told = lone_rank(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=meeting.rpartition(":")[2])
    assert told == f"no meeting of {meeting}: timed out"
    assert capsys.readouterr().err == f"note: rank 0: waiting for {meeting}: [Errno 111] Connection refused\n"


def test_text_that_the_terminal_cannot_show_ends_no_run(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", terminal)
    assert faults.run_to_the_end(lambda config: print("\u4f60", flush=True) or 0, Config()) == 0
    assert terminal.buffer.getvalue() == rb"\u4f60" + b"\n"


def test_a_signal_is_acknowledged_at_once(capfd):
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        caught = faults.stop_requests()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a copy by torchrun
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert caught == [signal.SIGINT] * 2 and capfd.readouterr().err.count("stopping after this step") == 1


# ---- Rewards of the user's own ----

MINE = """
import time

def raises(prompts, completions, **columns):
    return [grade(prompt, text) for prompt, text in zip(prompts, completions)]

def grade(prompt, text):
    return 1 / text.count(prompt)

def slow(prompts, **columns):
    time.sleep(60)

def stubborn(prompts, **columns):
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass

def in_c(prompts, **columns):
    sum(range(10**13))

CALLS = []

def overflows(prompts, **columns):
    CALLS.append(1)
    return [(-1e90 if i % 2 else 1e90) if len(CALLS) > 1 and i < 2 else float(i) for i in range(len(prompts))]
"""


@pytest.fixture
def mine(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("world", [1, 2])
def test_a_reward_that_raises_is_one_line_under_the_frames_of_its_file(small, mine, tmp_path, world):
    shown = run(small | dict(reward=f"{mine}:raises"), tmp_path / "out", code=2, world=world)
    told = "error: reward function raises raised ZeroDivisionError: division by zero"
    assert errors(shown) == [told] and shown.rstrip().endswith(told) and "Traceback" not in shown
    frames = re.findall(r'File "(.*)", line \d+, in (.*)', shown)
    assert {file for file, _ in frames} == {str(mine)}
    assert frames[0][1] == "raises" and frames[-1][1] == "grade" and "    return 1 / text.count(prompt)\n" in shown


@pytest.mark.parametrize("reward, world", [("slow", 1), ("slow", 2), ("stubborn", 1)])
def test_reward_timeout(small, mine, tmp_path, reward, world):
    settings = small | dict(reward=f"{mine}:{reward}", reward_timeout=0.5)
    codes = exit_codes(start(settings, tmp_path / "out", world=world), SECONDS)
    shown = screen(tmp_path / "out").read_text()
    assert 2 in codes and 0 not in codes and "Traceback" not in shown
    assert f"error: reward function {reward} took longer than --reward_timeout 0.5 seconds" in shown.splitlines()


def test_the_timeout_ends_code_in_c_that_lets_no_thread_run(small, mine, tmp_path):
    shown = run(small | dict(reward=f"{mine}:in_c", reward_timeout=0.5), tmp_path / "out", code=1)
    assert "Timeout (" in shown and re.search(rf'File "{mine}", line \d+ in in_c', shown), shown


def test_a_timeout_may_be_longer_than_any_clock_counts(monkeypatch):
    failed = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with faults.time_limit(1e300)("mine"):
        time.sleep(0.1)
    assert not failed


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_run_that_waits_for_a_reward(small, mine, tmp_path, number, code):
    (process,) = start(small | dict(reward=f"{mine}:stubborn", eval_every=0), tmp_path / "out")
    while "started in" not in screen(tmp_path / "out").read_text():
        time.sleep(0.1)
    time.sleep(1)
    os.kill(process.pid, number)
    asked = time.monotonic()
    assert exit_codes([process], SECONDS) == [code] and time.monotonic() - asked < 2 * faults.GRACE
    told = f"stopped by {number.name} while reward function stubborn was running: this step is lost"
    assert screen(tmp_path / "out").read_text().splitlines()[-1] == told


# ---- Numbers that are not finite ----


def nan_in_gradient(n: int) -> None:
    """The n-th loss is finite and its gradient is not."""
    policy_loss, calls = train.policy_loss, []

    def poisoned(logp, *args, **kwargs):
        calls.append(1)
        if len(calls) == n:
            logp.register_hook(lambda gradient: gradient * float("nan"))
        return policy_loss(logp, *args, **kwargs)

    train.policy_loss = poisoned


def watch_weights() -> None:
    """Says whether an update that failed has changed the weights."""
    update = train.update

    def watched(run, *args):
        before = [p.detach().clone() for p in run.model.parameters()]
        try:
            return update(run, *args)
        except UserError:
            same = all(map(torch.equal, before, run.model.parameters()))
            os.write(1, f"as before: {same}\n".encode())  # at once, though several ranks write
            raise

    train.update = watched


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_not_finite(small, mine, tmp_path, what, world):
    settings, out = small | dict(scale_rewards="none", beta=0.0, eval_every=0, micro_batch_size=2), tmp_path / "out"
    if what == "loss":
        shown = run(settings | dict(reward=f"{mine}:overflows"), out, watch_weights, code=2, world=world)
    else:
        poison = partial(nan_in_gradient, 4 // world + 1)  # the first of step 2
        shown = run(settings, out, watch_weights, poison, code=2, world=world)
    (error,) = errors(shown)
    assert error.startswith("error: step 2: loss ") and "The update was not made" in error and "Traceback" not in shown
    assert saved(out) == ["000001"] and metrics(out)[-1]["step"] == 1 and not (out / "model").exists()
    assert shown.count("as before: True") == world and "as before: False" not in shown
    assert f"its completions are in {out}/not_finite.safetensors" in error
    kept = load_file(out / "not_finite.safetensors")
    assert {"ids", "attention", "mask", "advantages", "sampler_logp", "weights"} <= kept.keys()
    assert len(kept["ids"]) == 8 and (kept["advantages"].abs() > 1e38).any() == (what == "loss")
