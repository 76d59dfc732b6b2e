"""What happens to a run if memory runs out, a rank fails, a signal comes, a reward hangs or a loss is NaN."""

import dataclasses
import functools
import itertools
import math
import os
import re
import signal
import socket
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from config import UserError
from conftest import assert_same_run, at, die, errors, fail, metrics, oom, replace, run, run_supervised
from infra import faults, ranks, run_folder


def answered(row, turns):
    """Reply once, with a text that depends on the row and on what the model wrote. The assertion checks that each
    completion has its own new copy of the row, even when a rollout is repeated with less memory."""
    row["calls"] = row.get("calls", 0) + 1
    assert row["calls"] == len(turns)
    return row["answer"][:1] + turns[0][:1] if len(turns) == 1 else None


@pytest.fixture(scope="module")
def small(sorting) -> dict:
    held_out = dict(eval_every=2, eval_prompts=4, eval_k=2, reply=f"{__name__}:answered")
    return sorting | held_out | dict(prompts_per_step=2, max_completion_length=6, beta=0.1, minibatches=2, save_every=1)


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "out"
    run(small, out)
    return out


# ---- Out of memory: the tests raise the error themselves, so they need no GPU ----

LOSS, LOGPROBS, SAMPLES = "train.policy_loss", "train.logprobs_of", "rollout._generate"
OPTIMIZER = "torch.optim.AdamW.step"


def oom_above(rows: int, name: str, rank: int | None = None) -> None:
    def limited(call):
        return lambda *args, **how: oom() if len(args[-1]) > rows else call(*args, **how)

    replace(name, limited, rank)


UPDATE, ROLLOUT = r"a micro-batch has at most (\d+) tokens", r"at most (\d+) completions are sampled"
OUT_OF_MEMORY = {  # number of ranks, what happens on the last one, settings, message
    "second micro-batch of one rank": (2, partial(at, LOSS, 2, oom, rank=1), dict(micro_batch_size=2), UPDATE),
    "two rows": (1, partial(oom_above, 1, LOGPROBS), {}, UPDATE),
    "the reference of one rank": (2, partial(at, LOGPROBS, 2, oom, rank=1), {}, UPDATE),
    "three sampled on one rank": (2, partial(oom_above, 2, SAMPLES, 1), {}, ROLLOUT),
}


@pytest.mark.parametrize("world, before, settings, message", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_out_of_memory_is_answered_with_smaller_parts(small, whole, tmp_path, world, before, settings, message):
    shown = run(small | settings, tmp_path / "out", before, world=world)
    sizes = [int(size) for size in re.findall(f"out of memory.*{message}", shown)]
    assert sizes and sizes == sorted(set(sizes), reverse=True), "a size was tried twice"
    # A step has 8 completions of at most 13 tokens with their prompts. Half of a higher limit would change nothing.
    assert sizes[0] <= 8 * 13 / 2, sizes
    assert len(sizes) == shown.count("out of memory"), shown
    assert_same_run(tmp_path / "out", whole)


# ---- A rank that fails, signals, a terminal ----

exception = partial(fail, ValueError("what went wrong"))
mistake = partial(fail, UserError("what went wrong"))
# Memory runs out even with one row, or with one sample.
even_one_row, even_one_sample = partial(oom_above, 0, LOGPROBS), partial(oom_above, 0, SAMPLES)
# The columns: fault, function, n, rank, number of ranks, exit code, message. The fault happens on this rank, before its
# n-th call of the function. The rank ends with this exit code and prints a line that begins with this message.
FAULTS = [
    (exception, "train.rollout_and_limit", 4, 1, 2, 1, "ValueError: what went wrong"),
    (mistake, "train.rollout_and_limit", 4, 1, 3, 2, "error: what went wrong"),
    (mistake, "train.call_rewards", 4, 1, 2, 2, "error: what went wrong"),
    (oom, LOSS, 2, 1, 2, 2, "error: out of memory in an update: "),
    (even_one_row, "train.training_step", 1, 1, 2, 2, "error: out of memory in an update: "),
    (even_one_sample, "train.training_step", 1, 0, 1, 2, "error: out of memory with one completion at a time: "),
    (die, "infra.checkpoint.HuggingFaceStorageWriter.write_data", 1, 0, 2, -signal.SIGKILL, None),
]


def test_a_rank_whose_trial_of_graphs_fails_goes_on_without_them(small, tmp_path):
    fails = partial(at, "infra.decoding.rollout", 1, exception, rank=1)
    shown = run(small | dict(shard=True, decode="graph", steps=1), tmp_path / "out", fails, world=2)
    assert re.findall("note: (.*graph).*: what went wrong", shown) == ["rank 1: no CUDA graph"]


@pytest.mark.parametrize("fault, function, n, rank, world, code, message", FAULTS)
def test_a_fault_on_one_rank_ends_all_ranks(small, tmp_path, fault, function, n, rank, world, code, message):
    # An error in a rollout or in a reward also reaches the other ranks, which end without a message.
    reaches_others = fault in (mistake, exception)
    code_of_others = 2 if reaches_others else 1
    codes = [code if i == rank else code_of_others for i in range(world)]
    before = partial(at, function, n, fault, rank=rank)
    # Without --shard, a rank that runs out of memory in the loss would continue with smaller micro-batches.
    shown = run(small | dict(shard=function == LOSS), tmp_path / "out", before, code=codes, world=world)
    assert shown.count("lost contact with another rank: ") == (0 if reaches_others else world - 1), shown
    assert message is None or sum(line.startswith(message) for line in shown.splitlines()) == 1, shown
    assert shown.count("Traceback") == (1 if fault is exception else 0), shown


def test_under_torchrun_the_failing_rank_is_reported_last(small, tmp_path):
    code, shown = run_supervised(small, tmp_path / "out", partial(at, OPTIMIZER, 2, exception, rank=1))
    report = shown.partition("Root Cause (first observed failure):")[2]
    said = r"rank      : 1 .*exitcode  : 1 .*\n  ValueError: what went wrong\n"
    assert code == 1 and re.search(said, report, re.DOTALL), shown


def test_a_mistyped_flag_is_named_by_one_rank_and_then_by_torchrun(small, tmp_path):
    code, shown = run_supervised(small | dict(mistyped=3), tmp_path / "out")
    said = "unrecognized arguments: --mistyped  3"
    assert errors(shown) == [f"error: {said}"] and "usage" not in shown
    report = shown.partition("Root Cause (first observed failure):")[2]
    assert code == 1 and report.strip("\n =").endswith(f"config.UserError: {said}"), shown
    assert f"traceback : config.UserError: {said}" in report, "torchrun shows no stack trace of a mistake"


def unwritable_stdout() -> None:
    """Make every write to stdout fail, as on a full disk. Send a signal that nohup ignores."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    at(OPTIMIZER, 1, partial(signal.raise_signal, signal.SIGHUP))


def closed_stdout() -> None:
    """Close stdout in the first reward."""
    at("train.call_rewards", 1, sys.stdout.close)


def unwritable_stderr() -> None:
    """Make every write to stderr fail, and send a signal in the last step, as Ctrl-C does if tee reads stderr."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    at(OPTIMIZER, 4, partial(signal.raise_signal, signal.SIGINT))


@pytest.mark.parametrize("spoil", [unwritable_stdout, closed_stdout, unwritable_stderr])
def test_a_run_does_not_need_a_screen(small, whole, tmp_path, spoil):
    assert "Traceback" not in run(small, tmp_path / "out", spoil)
    assert metrics(tmp_path / "out") == metrics(whole)


def other_rows(pick_rows):
    """Return a function that picks the usual rows in step 1, and in step 2 the row after each of them."""
    return lambda run, n, step: [run.task.train[row["_index"] + step - 1] for row in pick_rows(run, n, step)]


def other_advantages(advantages):
    """Return a function that computes the usual advantages in step 1, and slightly different ones in step 2."""
    earlier_calls = itertools.count()

    @functools.wraps(advantages)
    def other(*args, **how):
        return advantages(*args, **how) * (1 + 1e-4 * next(earlier_calls))

    return other


UNLIKE = {  # how rank 1 differs, which function it replaces, and by what
    "--eval_k": ("train.set_up", lambda set_up: lambda cfg, device: set_up(dataclasses.replace(cfg, eval_k=7), device)),
    "the code": ("infra.run_folder.sha256_of", lambda sha256_of: lambda file: file.name),
    "the rows": (
        "infra.model.load_task",
        lambda load: lambda cfg: dataclasses.replace(load(cfg), eval=load(cfg).eval[::-1]),
    ),
    "the weights": ("tasks.sorting.model", lambda model: lambda cfg: model(dataclasses.replace(cfg, seed=7))),
    "the completions of step 2": ("train.pick_rows", other_rows),
    "the advantages of step 2": ("advantage.group_advantages", other_advantages),
}


def unlike_the_others(how: str) -> None:
    replace(*UNLIKE[how], rank=1)


@pytest.mark.parametrize("how", UNLIKE)
def test_a_rank_that_differs_from_the_others_is_named_once(small, tmp_path, how):
    world = 3 if how == "--eval_k" else 2
    shown = run(small, tmp_path / "out", partial(unlike_the_others, how), code=2, world=world)
    (error,) = errors(shown)
    assert error.startswith(f"error: rank 1 differs from rank 0 in {how}"), shown
    assert run_folder.saved_steps(tmp_path / "out") == ([1] if "step 2" in how else [])


def test_the_time_limit_of_a_reward_is_cancelled_when_the_reward_ends(monkeypatch):
    events = []
    for owner, name in ((threading.Timer, "start"), (threading.Timer, "cancel")):
        monkeypatch.setattr(owner, name, lambda timer, name=name: events.append((name, timer.interval)))
    for name in ("dump_traceback_later", "cancel_dump_traceback_later"):
        monkeypatch.setattr(faults.faulthandler, name, lambda *args, name=name, **how: events.append((name, *args)))
    with pytest.raises(ValueError), faults.time_limit(9.0, "mine"):
        # After 9 s, a timer prints the function's name. A second later, faulthandler ends the process.
        assert events == [("start", 9.0), ("dump_traceback_later", 10.0)]
        raise ValueError
    assert sorted(events[2:]) == [("cancel", 9.0), ("cancel_dump_traceback_later",)]


def test_a_rank_that_is_done_waits_for_the_others(monkeypatch):
    events = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda name=name: events.append(name))
    assert faults.run_to_the_end(lambda: 0) == 0 and events == ["barrier", "destroy_process_group"]


def test_a_run_in_a_notebook_forgets_the_signal_that_stopped_the_run_before(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    faults.caught.append(signal.SIGINT)
    assert faults.stop_requests() == []


def in_c(prompts, **columns):
    sum(range(10**13))


def never_answers(row, turns):
    while True:
        pass


# `named`: how often the message with the function's name is printed. A Python thread prints it. This thread
# cannot run while `in_c` runs, which is C code. The stack trace shows the function in both cases.
@pytest.mark.parametrize("what, function, named", [("reward", "in_c", 0), ("reply", "never_answers", 1)])
def test_a_reward_that_hangs_ends_the_run_and_shows_where_it_was(small, tmp_path, what, function, named):
    shown = run(small | {what: f"{__name__}:{function}", "reward_timeout": 0.5}, tmp_path / "out", code=1)
    before, _, dump = shown.partition("Timeout (")
    assert before.count(f"{what} function {function} took longer than --reward_timeout 0.5 s\n") == named, shown
    assert re.search(rf'File "{__file__}", line \d+ in {function}\n', dump), shown


def overflows(prompts, trainer_state, **columns):
    os.chdir("/")  # the run must still write to the same folder
    # global_step counts the steps that are finished, so it is 1 during step 2.
    spoiled = [1e90, -1e90] if trainer_state.global_step == 1 else [0.0, 1.0]
    return spoiled + [float(i) for i in range(2, len(prompts))]


def spoil_gradients() -> None:
    """From now on, make gradients NaN although losses are finite."""
    replace("torch.Tensor.backward", lambda backward: lambda loss: backward(loss * math.nan))


@pytest.mark.parametrize("what, world", [("loss", 1), ("gradient", 2)])
def test_a_loss_or_gradient_that_is_not_finite_ends_the_run(small, tmp_path, monkeypatch, what, world):
    monkeypatch.chdir(tmp_path)
    settings, out = small | dict(scale_rewards="none", beta=0.0, eval_every=0, micro_batch_size=2), Path("out")
    settings |= dict(minibatches=1)
    if what == "loss":  # 1e9 s is the longest time limit that --reward_timeout allows, and timers must accept it
        settings |= dict(reward=f"{__name__}:overflows", reward_timeout=1e9)
    spoil = [partial(at, OPTIMIZER, 1, spoil_gradients, after=True)] if what == "gradient" else []
    # The process would print this if it made a second update, which it must not.
    updated = partial(at, OPTIMIZER, 2, partial(os.write, 1, b"updated"))
    shown = run(settings, out, updated, *spoil, code=2, world=world)
    (error,) = errors(shown)
    assert error.startswith("error: step 2: loss ") and "the update was not made" in error and "Traceback" not in shown
    assert run_folder.saved_steps(out) == [1] and metrics(out)[-1]["step"] == 1 and not (out / "model").exists()
    assert "updated" not in shown
    # The message shows the loss as nan or inf if the loss was spoiled, and as a number if only the gradient was.
    assert bool(re.search("loss (nan|inf)", error)) == (what == "loss") and re.search("gradient norm (nan|inf)", error)


def test_a_rank_waits_hours_for_the_others(monkeypatch):
    """Their rollout or their rewards may take that long."""
    given, store = {}, dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *args: iter([(store, 0, 1)]))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: given.update(how))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    torchrun = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1"}
    torchrun |= {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    monkeypatch.setattr(os, "environ", os.environ | torchrun)
    ranks.start()
    assert min(given["timeout"], store.timeout) >= timedelta(hours=1)
    assert given["store"] is store, "of two machines, each counts its own restarts"


UNUSABLE = [  # what a launcher has set besides RANK and MASTER_PORT -> the error
    ({}, UserError),
    ({"MASTER_ADDR": "nobody.invalid", "WORLD_SIZE": "2"}, socket.gaierror),
]


@pytest.mark.parametrize("env, error", UNUSABLE)
def test_a_rank_that_cannot_find_the_first_machine_fails_at_once(monkeypatch, env, error):
    monkeypatch.setattr(dist, "rendezvous", lambda *args: pytest.fail("it would retry for half an hour"))
    monkeypatch.setattr(os, "environ", {"RANK": "1", "MASTER_PORT": "29500"} | env)
    with pytest.raises(error):
        ranks.start()


ADDRESSES = [  # own address, MASTER_ADDR, number of machines, what else is set -> whether it fails
    ("127.0.1.1", "10.0.0.1", "2", {}, True),
    ("127.0.1.1", "10.0.0.1", "2", {"GLOO_SOCKET_IFNAME": "eth0"}, False),
    ("127.0.1.1", "10.0.0.1", "1", {}, False),
    ("127.0.1.1", "127.0.0.1", "2", {}, False),
    ("127.0.1.1", "node-0", "2", {}, True),  # on node-0 itself
    ("10.0.0.2", "10.0.0.1", "2", {}, False),
]


@pytest.mark.parametrize("own, master, machines, env, fails", ADDRESSES)
def test_a_machine_that_others_cannot_reach_is_refused(monkeypatch, own, master, machines, env, fails):
    """Gloo listens at the address of the host's name, which only the machine itself may be able to reach."""
    monkeypatch.setattr(socket, "gethostbyname", lambda name: own)
    monkeypatch.setattr(os, "environ", {"GROUP_WORLD_SIZE": machines, "MASTER_ADDR": master} | env)
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME") if fails else nullcontext():
        ranks.check_own_address()
