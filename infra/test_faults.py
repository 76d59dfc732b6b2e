"""Faults in a run: memory that runs out, ranks that fail, numbers that are not finite. Every run is in processes of its
own that are killed if they hang."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import (
    assert_near_figures,
    at,
    die,
    exit_codes,
    fail,
    figures,
    flags,
    lines,
    rows_to_sort,
    run,
    saved,
    start,
    torchrun,
)

import rollout
import train
from config import UserError

SECONDS = 20  # for a whole run; "within seconds" is told from a hang, on a busy machine too


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict:
    rows = rows_to_sort(tmp_path_factory.mktemp("data") / "rows.jsonl")
    return dict(
        task="sorting", data=rows, prompts_per_step=2, num_generations=4, max_completion_length=6, steps=3, beta=0.1,
        warmup_steps=0, eval_every=2, eval_prompts=4, eval_k=2, save_every=1, samples_per_step=-1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run(flags(**small, out=folder / "out"), folder / "screen")
    return folder / "out"


@pytest.fixture
def screen(tmp_path) -> Path:
    return tmp_path / "screen"


# ---- Out of memory: injected, so that it needs no GPU ----


def oom(*where: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def only_rank(rank: int | None) -> bool:
    return rank is None or os.environ.get("RANK", "0") == str(rank)


def oom_above(rows: int, rank: int | None = None) -> None:
    """A forward pass of more rows than this, in the update or where log-probs are scored, does not fit."""
    if only_rank(rank):
        score = train.score_rows
        train.score_rows = lambda run, model, batch, these, **kw: (
            oom() if len(these) > rows else score(run, model, batch, these, **kw)
        )


def oom_in_rollout_above(rows: int, rank: int | None = None) -> None:
    if only_rank(rank):
        generate = rollout._generate
        rollout._generate = lambda model, prompts, which, *args: (
            oom() if len(which) > rows else generate(model, prompts, which, *args)
        )


def assert_same_numbers(out: Path, whole: Path) -> None:
    """The very same completions; the update within the rounding of float32."""
    ours, theirs = (lines(folder / "samples.jsonl") for folder in (out, whole))
    assert [line | {"advantage": 0} for line in ours] == [line | {"advantage": 0} for line in theirs]
    assert_near_figures(out, whole, rel=1e-5, abs=1e-7)
    a, b = (load_file(folder / "model" / "model.safetensors") for folder in (out, whole))
    assert sum((a[name] - b[name]).norm() for name in b) < 1e-4 * sum(x.norm() for x in b.values())


def told(shown: str) -> list[str]:
    return [line for line in shown.splitlines() if "out of memory" in line]


@pytest.mark.parametrize("rank, world", [(None, 1), (1, 2)])
@pytest.mark.parametrize("unit", ["micro_batch_size", "micro_batch_tokens"])
def test_update_out_of_memory_in_one_micro_batch(small, tmp_path, screen, unit, rank, world):
    """After part of the gradient has been summed: the second of two micro-batches fails, once."""
    settings = small | {unit: {"micro_batch_size": 4 // world, "micro_batch_tokens": 56 // world}[unit], "beta": 0.0}
    run(flags(**settings, out=tmp_path / "whole"), screen)
    before = partial(at, "loss", 2, oom, rank=rank)
    shown = run(flags(**settings, out=tmp_path / "out"), screen, before=before, world=world)
    assert len(told(shown)) == 1 and told(shown)[0].startswith(f"note: rank {rank or 0}: out of memory; going on with ")
    assert_same_numbers(tmp_path / "out", tmp_path / "whole")


@pytest.mark.parametrize("fits", [1, 3])
def test_update_out_of_memory_keeps_the_smaller_size(small, whole, tmp_path, screen, fits):
    shown = run(flags(**small, out=tmp_path / "out"), screen, before=partial(oom_above, fits))
    sizes = [int(re.search(r"up to (\d+) padded tokens", line).group(1)) for line in told(shown)]
    assert sizes == sorted(set(sizes), reverse=True) and len(sizes) <= 4, "each size is tried, and told, once"
    assert_same_numbers(tmp_path / "out", whole)


def test_rollout_out_of_memory(small, whole, tmp_path, screen):
    shown = run(flags(**small, out=tmp_path / "out"), screen, before=partial(oom_in_rollout_above, 3))
    sizes = [int(re.search(r"at most (\d+) completions", line).group(1)) for line in told(shown)]
    assert sizes and min(sizes) <= 3 and len(sizes) <= 3
    assert_same_numbers(tmp_path / "out", whole)


def test_rollout_out_of_memory_on_one_rank(small, whole, tmp_path, screen):
    before = partial(oom_in_rollout_above, 2, rank=1)
    assert told(run(flags(**small, out=tmp_path / "out"), screen, before=before, world=2))
    assert_same_numbers(tmp_path / "out", whole)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("before", [oom_above, oom_in_rollout_above])
def test_out_of_memory_at_one_row(small, tmp_path, screen, before, world):
    codes = exit_codes(
        start(flags(**small, out=tmp_path / "out"), screen, world, partial(before, 0, world - 1)), SECONDS
    )
    errors = [line for line in screen.read_text().splitlines() if line.startswith("error: ")]
    assert codes[-1] == 2 and "out of memory with one completion at a time" in errors[0]
    assert "--max_completion_length" in errors[0] and "Traceback" not in screen.read_text()


def test_out_of_memory_anywhere_else_is_told_plainly(small, tmp_path, screen):
    shown = run(flags(**small, out=tmp_path / "out"), screen, code=1, before=partial(at, "update", 2, oom))
    assert shown.splitlines()[-1].startswith("error: CUDA out of memory.") and "Traceback" not in shown


# ---- A rank that fails ----

PHASES = {"rollout": 4, "reward": 4, "loss": 2, "update": 2, "evaluate": 2}
FAULTS = {
    "exception": (partial(fail, ValueError("what went wrong")), 1, "ValueError: what went wrong"),
    "mistake": (partial(fail, UserError("what went wrong")), 2, "error: what went wrong"),
    "kill": (die, -signal.SIGKILL, None),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_ends_all(small, tmp_path, screen, fault, phase):
    action, code, message = FAULTS[fault]
    before = partial(at, phase, PHASES[phase], action, rank=1)
    codes = exit_codes(start(flags(**small, out=tmp_path / "out"), screen, 3, before), SECONDS)
    shown = screen.read_text()
    assert codes[1] == code and set(codes) <= {code, 1, 2}, (codes, shown)
    if message:
        errors = [line for line in shown.splitlines() if line.startswith(("error:", "ValueError"))]
        assert errors[0] == message and shown.count(message) <= 2
        assert all("lost contact with another rank" in line for line in errors[1:])


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", ["save", "save_model"])
def test_a_fault_while_saving_ends_all(small, tmp_path, screen, fault, phase):
    """Only the first rank saves; the others wait for it."""
    action, code, message = FAULTS[fault]
    codes = exit_codes(
        start(flags(**small, out=tmp_path / "out"), screen, 3, partial(at, phase, 1, action, rank=0)), SECONDS
    )
    assert codes[0] == code and 0 not in codes
    assert message is None or message in screen.read_text()


def test_under_torchrun_a_rank_that_lost_contact_leaves_the_last_word(small, tmp_path, screen):
    """The others wait in a collective call, which fails when rank 1 does; torchrun would end them now."""
    before = partial(at, "rollout", 4, partial(fail, ValueError("what went wrong")), rank=1)
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "0"}
    shown = run(flags(**small, out=tmp_path / "out"), screen, code=1, before=before, world=3, **torchrun)
    assert shown.rstrip().endswith("\nValueError: what went wrong") and shown.count("Error: ") == 1, shown


def test_ranks_without_rows(small, tmp_path, screen):
    """Five ranks for one prompt of two completions, and for four prompts to evaluate."""
    settings = small | dict(prompts_per_step=1, num_generations=2)
    run(flags(**settings, out=tmp_path / "one"), screen)
    run(flags(**settings, out=tmp_path / "many"), screen, world=5)
    assert_same_numbers(tmp_path / "many", tmp_path / "one")


def test_a_mistake_of_all_ranks_is_told_once(small, tmp_path, screen):
    shown = run(flags(**small | dict(data=tmp_path / "none.jsonl"), out=tmp_path / "out"), screen, code=2, world=2)
    assert shown == f"error: --data {tmp_path}/none.jsonl: No such file or directory\n"


def late_failure() -> None:
    """Rank 1 fails while rank 0 is in a rollout that takes a minute more."""
    at("rollout", 4, partial(time.sleep, 60), rank=0)
    at("rollout", 4, partial(fail_late, Path(os.environ["FOLDER"], "failed")), rank=1)


def fail_late(file: Path) -> None:
    time.sleep(0.5)
    file.touch()
    raise ValueError("what went wrong")


def test_under_torchrun_the_message_of_the_failing_rank_is_last(small, tmp_path):
    agent = torchrun(flags(**small, out=tmp_path / "out"), tmp_path, "test_faults.late_failure")
    try:
        shown, _ = agent.communicate(timeout=100)
    finally:
        os.killpg(agent.pid, signal.SIGKILL) if agent.poll() is None else None
    assert time.time() - (tmp_path / "failed").stat().st_mtime < SECONDS
    assert agent.returncode == 1
    errors = [line for line in shown.splitlines() if "Error: " in line and "ChildFailedError" not in line]
    assert len(errors) == 2 and all(line.strip() == "ValueError: what went wrong" for line in errors), shown
    assert "what went wrong" in "\n".join(shown.splitlines()[-5:]), shown


# ---- A reward that takes too long ----

SLOW = """
import time

def slow(prompts, **columns):
    time.sleep(60)
"""


@pytest.mark.parametrize("world", [1, 2])
def test_reward_timeout(small, tmp_path, screen, world):
    (tmp_path / "mine.py").write_text(SLOW)
    settings = small | dict(reward=f"{tmp_path}/mine.py:slow", reward_timeout=0.5, out=tmp_path / "out")
    codes = exit_codes(start(flags(**settings), screen, world), SECONDS)
    assert 2 in codes and 0 not in codes
    message = "error: reward function slow took longer than --reward_timeout 0.5 seconds"
    assert message in screen.read_text().splitlines() and "Traceback" not in screen.read_text()


# ---- Numbers that are not finite ----

OVERFLOWS = """
STEP = [0]

def much(prompts, completions, **columns):
    STEP[0] += 1
    return [(-1e300 if i % 2 else 1e300) if STEP[0] > 1 and i < 2 else float(i) for i in range(len(prompts))]
"""


def nan_in_gradient(n: int) -> None:
    """The loss is finite and its gradient is not."""
    policy_loss = train.policy_loss

    def poisoned(logp, *args, **kwargs):
        nonlocal n
        n -= 1
        if n == 0:
            logp.register_hook(lambda gradient: gradient * float("nan"))
        return policy_loss(logp, *args, **kwargs)

    train.policy_loss = poisoned


def watch_weights(then=None) -> None:
    """Says whether an update that failed has changed the weights."""
    if then:
        then()
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
def test_not_finite(small, tmp_path, screen, what, world):
    settings = small | dict(scale_rewards="none", beta=0.0, eval_every=0, micro_batch_size=2)
    before = watch_weights
    if what == "loss":
        (tmp_path / "mine.py").write_text(OVERFLOWS)
        settings["reward"] = f"{tmp_path}/mine.py:much"
    else:
        before = partial(watch_weights, partial(nan_in_gradient, 4 // world + 1))
    out = tmp_path / "out"
    shown = run(flags(**settings, out=out), screen, code=2, before=before, world=world)
    errors = [line for line in shown.splitlines() if line.startswith("error: step 2: loss ")]
    assert len(errors) == 1 and "The update was not made" in errors[0] and "Traceback" not in shown
    assert saved(out) == ["000001"] and figures(out)[-1]["step"] == 1 and not (out / "model").exists()
    assert shown.count("as before: True") == world and "as before: False" not in shown
    (file,) = {Path(path) for path in re.findall(r"\S+/not_finite-\d\.safetensors", errors[0])}
    kept = load_file(file)
    assert {"ids", "attention", "mask", "advantages", "sampler_logp"} <= kept.keys()
    if what == "loss":
        assert 0 < len(kept["ids"]) <= 4 and kept["advantages"].isinf().any() | (kept["advantages"].abs() > 1e38).any()
    else:
        assert len(kept["ids"]) == 8 // world, "it cannot be told which: all of the rank"
