"""A run's folder: what it holds, whether this run may have it, and files that are there whole or not at all.

    out/config.json           settings, versions, commit, hardware
    out/metrics.jsonl         a line for each step
    out/samples.jsonl         completions
    out/checkpoint/000040/    checkpoint.py
    out/model/                the trained model

Nothing is written before all is ready to start. Left out: what the user puts into the folder, which stays as it is.
"""

import dataclasses
import errno
import fcntl
import itertools
import json
import math
import os
import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from config import Config, UserError, resolve, settings_that_may_change, with_budgets

SETTINGS = [setting.name for setting in dataclasses.fields(Config)]


# What a run writes into its folder; config.json, which says what the rest is, last. All else in there is the user's.
WRITTEN = (
    "checkpoint", "model", "metrics.jsonl", "samples.jsonl", "not_finite.safetensors", "events.out.tfevents.*", "wandb",
    "config.json",
)  # fmt: skip
PATHS = ("model", "data", "reward")  # settings that may name a file


def open_run(config: Config) -> int | None:
    """What the folder `config.out` holds; nothing is written. -> the step to continue after, 0 to start; None: the run
    is finished."""
    out = Path(config.out)
    try:
        above = next(path for path in (out, *out.absolute().parents) if path.exists())
        os.listdir(above)  # fails where it is no folder
        if not os.access(above, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    if (out / ".lock").exists():
        _lock(out)
    there = settings_of(out)
    if there is None and out.exists() and any(p.name != ".lock" and p.suffix != ".partial" for p in out.iterdir()):
        raise UserError(f"{out} holds something that is not a run: give another --out")
    if _starts_over(config):
        _check_that_nothing_is_read_from_inside(config)
        return 0
    made = made_steps(out)
    if there is None or made is None:
        return 0
    changed = _changed(there, config)
    if changed:
        lines = [f"  --{name}: {getattr(there, name)} there, {getattr(config, name)} here" for name in changed]
        raise UserError(
            f"{out} holds a run with other settings:\n" + "\n".join(lines) + "\n"
            "give another --out, or start over with --overwrite"
        )
    if config.steps < made:
        raise UserError(f"--steps {config.steps}: the run in {out} has made {made} already; give as many or more")
    if config.steps == made and (out / "model").exists():
        return None
    if latest(out) is None and (out / "model").exists():
        raise UserError(
            f"the run in {out} is finished and its checkpoint is gone, so it cannot go on to --steps {config.steps}; "
            f"another run can start from its model: --model {out / 'model'} --out ..."
        )
    return latest(out) or 0


def with_its_budgets(config: Config) -> Config:
    """A run that goes on keeps the budgets of tokens that it began with, unless others are given."""
    there = settings_of(Path(config.out))
    return with_budgets(config, there.rollout_tokens, there.micro_batch_tokens)


def claim(config: Config, done: int) -> list[str]:
    """The folder becomes this run's: called when all is ready to start. -> notes"""
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    _lock(out)
    if open_run(config) != done:
        raise UserError(f"another process has written to {out} by now: start again, or give another --out")
    notes = _notes(config) if done else []
    written = [path for pattern in WRITTEN for path in sorted(out.glob(pattern))]
    if _starts_over(config) and written:
        aside = next(out / f"replaced-{n}" for n in itertools.count(1) if not (out / f"replaced-{n}").exists())
        aside.mkdir()
        for path in written:
            path.rename(aside / path.name)
        notes.append(f"the run that was in {out}/ is in {aside}/ now")
    settings = {name: str(x) if x == math.inf else x for name, x in dataclasses.asdict(config).items()}
    write_json(out / "config.json", {"settings": settings} | provenance())
    return notes


def made_steps(out: Path) -> int | None:
    """How many steps the run in this folder has made, in its newest checkpoint or, finished, altogether; None: no step
    at all, so that there is nothing to lose."""
    lines = [line for line in read_lines(out / "metrics.jsonl") + read_lines(out / "samples.jsonl") if line["step"] > 0]
    if latest(out) is not None:
        return latest(out)
    if (out / "model").exists():
        return lines[-1]["step"] if lines else settings_of(out).steps
    return 0 if lines else None


def goes_on(config: Config) -> str:
    """What the same command would do now; nothing where it would not go on."""
    out = Path(config.out)
    there, done = settings_of(out), latest(out)
    if there is None or not done or _changed(there, config):
        return ""
    return (
        f"the same command {'without --overwrite ' if config.overwrite else ''}goes on after step {done}, from {out}/"
    )


def _starts_over(config: Config) -> bool:
    """Once, not at every restart."""
    return config.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _check_that_nothing_is_read_from_inside(config: Config) -> None:
    moved = [path.resolve() for pattern in WRITTEN for path in Path(config.out).glob(pattern)]
    for name in PATHS:
        given = getattr(config, name) or []
        for word in [given] if isinstance(given, str) else given:
            if any(Path(word).resolve().is_relative_to(path) for path in moved):
                raise UserError(f"--{name} {word}: --overwrite would move it away; give another --out")


def _changed(there: Config, here: Config) -> list[str]:
    return [name for name in SETTINGS if name not in settings_that_may_change() and _differs(name, there, here)]


def _differs(name: str, there: Config, here: Config) -> bool:
    was, now = getattr(there, name), getattr(here, name)
    if name in PATHS and was and now:  # other words for one file are the same
        real = os.path.realpath
        return real(was) != real(now) if isinstance(was, str) else list(map(real, was)) != list(map(real, now))
    return was != now


def _notes(config: Config) -> list[str]:
    """What it means that a run goes on with these settings."""
    out, notes = Path(config.out), []
    there = settings_of(out)
    if not (out / "metrics.jsonl").exists():
        notes.append(f"{out}/metrics.jsonl is gone: figures of the steps so far are lost")
    if there.steps != config.steps and config.lr_schedule != "constant":
        notes.append(
            f"lr_schedule {config.lr_schedule}: goes down over {config.steps} steps from here on, so far it did over "
            f"{there.steps}: this is not the run that --steps {config.steps} makes in one go"
        )
    held_out = [one.eval_prompts if one.eval_every else 0 for one in (there, config)]
    if config.data and held_out[0] != held_out[1]:
        notes.append(
            f"{held_out[0]} prompts were held out so far, {held_out[1]} are from here on: other ones are trained on"
        )
    return notes


def settings_of(out: Path) -> Config | None:
    """Of the run in this folder, if it is one. What a newer version has added counts as its default."""
    file = out / "config.json"
    content = _parse(file.read_text(errors="replace"), str(file)) if file.is_file() else None
    if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
        return None  # not written by a run
    known = {name: math.inf if x == "inf" else x for name, x in content["settings"].items() if name in SETTINGS}
    try:
        return resolve(Config(**known), {}, on_gpu=False)
    except (KeyError, TypeError) as error:
        raise UserError(f"{file}: not the settings of a run ({error}): mend it, or give another --out") from None


def read_lines(file: Path) -> list[dict]:
    """The whole lines of a .jsonl file of a run, which a kill may have torn at its end."""
    if not file.exists():
        return []
    lines = [_parse(text, f"{file}:{n}") for n, text in enumerate(file.read_text(errors="replace").split("\n")[:-1], 1)]
    for n, line in enumerate(lines, 1):
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            raise UserError(f"{file}:{n}: not a line of a run: mend or delete it")
    return lines


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        line = f":{error.lineno}" if where.endswith(".json") and isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{where}{line}: damaged, not JSON ({error}): mend that line") from None


def provenance() -> dict:
    """Where and with what a run was made."""
    here = Path(__file__).parent.parent

    def git(*args: str) -> str:
        if not shutil.which("git"):
            return ""
        return subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True).stdout.strip()

    commit, dirty = git("rev-parse", "HEAD"), git("status", "--porcelain", "-uno")
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": (commit or None) if not dirty else f"{commit}-dirty",
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "hardware": {"gpu": gpu, "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }


def latest(out: Path) -> int | None:
    """The step of the newest whole checkpoint."""
    steps = [int(path.name) for path in (out / "checkpoint").glob("*") if path.name.isdigit()]
    return max(steps, default=None)


# ---- One writer at a time; files that are there whole or not at all ----

_locks = []


def _lock(out: Path) -> None:
    """One writer at a time. The lock dies with the process that holds it, which may take a moment; children that it
    leaves behind (of a reward function, say) do not hold it."""
    handle = open(out / ".lock", "w")
    for _ in range(10):
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _locks.append(handle)
            return
        except (BlockingIOError, PermissionError):
            time.sleep(1)
    raise UserError(f"another process is writing to {out}: wait for it, or give another --out")


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: dict) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text)
    flush(beside)
    beside.rename(path)
    flush(path.parent)
