"""Faults in a run, in processes of its own: memory that runs out, ranks that fail, rewards that hang, NaN."""

import io
import math
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from config import Config, UserError
from conftest import (
    assert_same_run,
    at,
    contents,
    die,
    errors,
    exit_codes,
    fail,
    metrics,
    on_rank,
    replace,
    run,
    run_supervised,
    saved,
    screen,
    start,
    wait_until,
)
from infra import faults


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    held_out = dict(eval_every=2, eval_prompts=4, eval_k=2)
    return sorting | held_out | dict(prompts_per_step=2, max_completion_length=6, beta=0.1, save_every=1)


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    run(small, out)
    return out


# ---- Out of memory: injected, so that it needs no GPU ----


def oom() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def oom_above(rows: int, name: str, rank: int | None = None) -> None:
    def limited(call):
        return lambda of, work, *args, **how: oom() if len(work) > rows else call(of, work, *args, **how)

    if on_rank(rank):
        replace(name, limited)


LOGPROBS, SAMPLES = "train.logprobs", "rollout._generate"
UPDATE, ROLLOUT = r"going on with micro-batches of up to (\d+) padded tokens", r"at most (\d+) completions are sampled"
OUT_OF_MEMORY = {  # on the last of so many ranks: what happens, settings, what is told
    "second micro-batch of one rank": (2, partial(at, "loss", 2, oom, rank=1), dict(micro_batch_tokens=28), UPDATE),
    "two rows": (1, partial(oom_above, 1, LOGPROBS), {}, UPDATE),
    "four rows on one rank": (2, partial(oom_above, 3, LOGPROBS, 1), {}, UPDATE),
    "three sampled on one rank": (2, partial(oom_above, 2, SAMPLES, 1), {}, ROLLOUT),
}


@pytest.mark.parametrize("case", OUT_OF_MEMORY)
def test_out_of_memory_is_answered_with_smaller_parts(small, whole, tmp_path, case):
    world, before, settings, told = OUT_OF_MEMORY[case]
    shown = run(small | settings, tmp_path / "out", before, world=world)
    lines = [line for line in shown.splitlines() if "out of memory" in line]
    sizes = [int(re.search(told, line).group(1)) for line in lines]
    assert sizes and sizes == sorted(set(sizes), reverse=True), "each is tried once, and kept"
    assert all(line.startswith(f"note: rank {world - 1}: out of memory") for line in lines)
    assert_same_run(tmp_path / "out", whole)


ONE_ROW = "error: out of memory with one completion at a time: .*--max_completion_length"
FATAL = [  # ranks, what happens, what is told
    (2, partial(oom_above, 0, LOGPROBS, 1), ONE_ROW),
    (1, partial(oom_above, 0, SAMPLES), ONE_ROW),
    (1, partial(at, "update", 2, oom), "error: CUDA out of memory. Tried to allocate"),
]


@pytest.mark.parametrize("world, before, told", FATAL)
def test_out_of_memory_that_ends_the_run_is_one_line(small, tmp_path, world, before, told):
    codes = exit_codes(start(small, tmp_path / "out", before, world=world))
    shown = screen(tmp_path / "out").read_text()
    assert codes[-1] == 2 and re.match(told, *errors(shown)) and "Traceback" not in shown, shown


# ---- A rank that fails, signals, a terminal ----

FAULTS = {  # what happens, the exit code, the line that tells
    "exception": (partial(fail, ValueError("what went wrong")), 1, "ValueError: what went wrong"),
    "mistake": (partial(fail, UserError("what went wrong")), 2, "error: what went wrong"),
    "interrupt": (partial(signal.raise_signal, signal.SIGINT), 130, "stopped"),
    "kill": (die, -signal.SIGKILL, None),
}
FAILING = [  # at which call, on which rank of how many; the first one alone saves, and the others wait for it
    ("interrupt", "rollout", 1, 1, 2),  # before the first step
    ("exception", "rollout", 4, 1, 3),
    ("mistake", "reward", 4, 1, 2),
    ("kill", "loss", 2, 1, 2),
    ("kill", "evaluate", 2, 1, 2),
    ("exception", "save", 1, 0, 2),
    ("mistake", "save_model", 1, 0, 2),
    ("kill", "write_data", 1, 0, 2),
]


@pytest.mark.parametrize("fault, point, n, rank, world", FAILING)
def test_a_fault_on_one_rank_ends_all(small, tmp_path, fault, point, n, rank, world):
    action, code, message = FAULTS[fault]
    codes = exit_codes(start(small, tmp_path / "out", partial(at, point, n, action, rank=rank), world=world))
    shown = screen(tmp_path / "out").read_text()
    assert codes[rank] == code and set(codes) <= {code, 1, 2}, (codes, shown)
    together = (fault, point) == ("mistake", "reward")  # all are told of it, and the others say nothing
    assert shown.count("lost contact with another rank: ") == (0 if together else world - 1), shown
    assert message is None or shown.splitlines().count(message) == 1, shown
    assert shown.count("Traceback") == (fault == "exception"), shown


def fails_while_another_is_busy(action: Callable, out: Path) -> None:
    asked, busy = lambda: "stopping after this step" in screen(out).read_text(), out / "busy"
    at("update", 2, partial(wait_until, asked), rank=0)
    at("update", 2, busy.touch, rank=0)  # first
    at("update", 2, action, rank=1)
    at("update", 2, partial(wait_until, busy.exists), rank=1)  # first


REPORTED = {  # under torchrun, what its report at the end of the screen says of rank 1
    "exception": r"exitcode  : 1 .*\n  ValueError: what went wrong\n",
    "mistake": r"exitcode  : 2 .*traceback : config.UserError: what went wrong\n",
    "kill": r"exitcode  : -9 .*Signal 9 \(SIGKILL\) received",
}


@pytest.mark.parametrize("fault", REPORTED)
def test_under_torchrun_the_failing_rank_is_reported_last(small, tmp_path, fault):
    before = partial(fails_while_another_is_busy, FAULTS[fault][0], tmp_path / "out")
    code, shown = run_supervised(small, tmp_path / "out", before)
    report = shown.partition("Root Cause (first observed failure):")[2]
    assert code == 1 and re.search(rf"rank      : 1 .*{REPORTED[fault]}", report, re.DOTALL), shown


def thrice() -> None:
    """One signal, a copy of it by torchrun, and later another one."""
    for seconds in (0.0, 0.5, 4.0):
        time.monotonic = partial(float, seconds)
        os.write(2, b"asked\n")
        signal.raise_signal(signal.SIGTERM)


def test_a_second_signal_ends_the_run_at_once(small, tmp_path):
    shown = run(small, tmp_path / "out", partial(at, "update", 2, thrice), code=-signal.SIGTERM)
    assert shown.count("asked\n") == 3 and shown.count("stopping after this step") == 1, shown
    assert "stopped after" not in shown and saved(tmp_path / "out") == ["000001"]


def test_text_that_the_terminal_cannot_show_ends_no_run(monkeypatch):
    monkeypatch.setattr("sys.stdout", terminal := io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert faults.run_to_the_end(lambda config: print("\u4f60", flush=True) or 0, Config()) == 0
    assert terminal.buffer.getvalue() == rb"\u4f60" + b"\n"


# ---- What rewards of the user's own do; numbers that are not finite ----

MINE = """
import os
import time

def sleeps(prompts, **columns):
    time.sleep(600)

def in_c(prompts, **columns):
    sum(range(10**13))

def moves(prompts, **columns):
    os.chdir("/")
    return [float(i) for i in range(len(prompts))]

def overflows(prompts, trainer_state, **columns):
    spoiled = [1e90, -1e90] if trainer_state.global_step == 1 else [0.0, 1.0]
    return spoiled + [float(i) for i in range(2, len(prompts))]
"""


@pytest.fixture
def mine(tmp_path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("reward, told", [("sleeps", 1), ("in_c", 0)])  # code in C lets no thread speak
def test_a_reward_that_hangs_ends_the_run_and_shows_where_it_was(small, mine, tmp_path, reward, told):
    shown = run(small | dict(reward=f"{mine}:{reward}", reward_timeout=0.5), tmp_path / "out", code=1)
    before, _, dump = shown.partition("Timeout (")
    assert before.count(f"reward function {reward} took longer than --reward_timeout 0.5 s\n") == told, shown
    assert re.search(rf'File "{mine}", line \d+ in {reward}\n', dump), shown


def test_a_reward_that_changes_the_working_directory_sends_nothing_elsewhere(small, mine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = small | dict(reward="mine.py:moves", reward_timeout=1e300)  # longer than any clock counts
    assert "Traceback" not in run(settings, Path("out"))
    before = contents(tmp_path / "out")
    assert "is finished" in run(settings, Path("out")) and contents(tmp_path / "out") == before


def spoil_gradients() -> None:
    """From here on losses are finite and their gradients are not."""
    replace("torch.Tensor.backward", lambda backward: lambda loss: backward(loss * math.nan))


@pytest.mark.parametrize("what, world", [("loss", 1), ("gradient", 2)])
def test_not_finite(small, mine, tmp_path, what, world):
    settings, out = small | dict(scale_rewards="none", beta=0.0, eval_every=0, micro_batch_size=2), tmp_path / "out"
    settings |= dict(reward=f"{mine}:overflows") if what == "loss" else {}
    spoil = partial(at, "update", 1, spoil_gradients if what == "gradient" else int, after=True)
    shown = run(settings, out, partial(at, "update", 2, partial(os.write, 1, b"updated")), spoil, code=2, world=world)
    (error,) = errors(shown)
    assert error.startswith("error: step 2: loss ") and "the update was not made" in error and "Traceback" not in shown
    assert saved(out) == ["000001"] and metrics(out)[-1]["step"] == 1 and not (out / "model").exists()
    assert "updated" not in shown and ("loss nan" in error or "loss inf" in error) == (what == "loss")
