"""A run's folder: what it holds, whether this run may have it, and files that are there whole or not at all.

    out/config.json           settings, versions, commit, hardware
    out/metrics.jsonl         a line for each step
    out/samples.jsonl         completions
    out/checkpoint/000040/    checkpoint.py
    out/model/                the trained model

Nothing is written before all is ready to start. Left out: what the user puts into the folder, which stays as it is.
"""

import dataclasses
import fcntl
import itertools
import json
import math
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from config import Config, UserError, resolve, settings_that_may_change

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
        tempfile.TemporaryFile(dir=above).close()
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
    made, saved = made_steps(out), saved_steps(out)
    if made is None:
        return 0
    changed = other_settings(there, config)
    if changed:
        lines = [f"  --{name}: {getattr(there, name)} there, {getattr(config, name)} here" for name in changed]
        raise UserError(
            f"{out} holds a run with other settings:\n" + "\n".join(lines) + "\n"
            "give another --out, or start over with --overwrite"
        )
    if config.steps < made:
        weights = out / "model" if (out / "model").exists() else checkpoint_of(out, made)
        raise UserError(
            f"--steps {config.steps}: the run in {out} has made {made} already; give as many or more, or evaluate it: "
            f"--model {weights} --steps 0 --out ..."
        )
    if config.steps == made and (out / "model").exists():
        return None
    if not saved and (out / "model").exists():
        raise UserError(
            f"the run in {out} is finished and its checkpoint is gone, so it cannot go on to --steps {config.steps}; "
            f"another run can start from its model: --model {out / 'model'} --out ..."
        )
    return max(saved, default=0)


def claim(config: Config, done: int) -> list[str]:
    """The folder becomes this run's: called when all is ready to start. -> notes"""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
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
    there = settings_of(out)
    if there is None:
        return None
    first = 1 if there.steps else 0  # an evaluation is step 0
    lines = read_lines(out / "metrics.jsonl") + read_lines(out / "samples.jsonl")
    lines = [line for line in lines if line["step"] >= first]
    if saved_steps(out):
        return max(saved_steps(out))
    if (out / "model").exists():
        return lines[-1]["step"] if lines else there.steps
    return 0 if lines else None


def goes_on(config: Config) -> str:
    """What the same command would do now; nothing where it would not go on."""
    out = Path(config.out)
    there, saved = settings_of(out), saved_steps(out)
    if there is None or not saved or other_settings(there, config):
        return ""
    without = "without --overwrite " if config.overwrite else ""
    return f"the same command {without}goes on after step {max(saved)}, from {out}/"


def _starts_over(config: Config) -> bool:
    """Once, not at every restart."""
    return config.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def _check_that_nothing_is_read_from_inside(config: Config) -> None:
    moved = [path.resolve() for pattern in WRITTEN for path in Path(config.out).glob(pattern)]
    for name in PATHS:
        for word in _words(config, name):
            if any(Path(word).resolve().is_relative_to(path) for path in moved):
                raise UserError(f"--{name} {word}: --overwrite would move it away; give another --out")


def other_settings(there: Config, here: Config) -> list[str]:
    fixed = [name for name in SETTINGS if name not in settings_that_may_change()]
    return [name for name in fixed if _meant(there, name) != _meant(here, name)]


def _meant(config: Config, name: str) -> Any:
    """Other words for one file mean the same."""
    return [*map(os.path.realpath, _words(config, name))] if name in PATHS else getattr(config, name)


def _words(config: Config, name: str) -> list[str]:
    given = getattr(config, name) or []
    return [given] if isinstance(given, str) else given


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
    if not file.is_file() or not isinstance(_read_object(file).get("settings"), dict):
        return None  # not written by a run
    known = {name: x for name, x in read_settings(file).items() if name in SETTINGS}
    try:
        return resolve(Config(**known), {}, on_gpu=False)
    except (KeyError, TypeError) as error:
        raise UserError(f"{file}: not the settings of a run ({error}): mend it, or give another --out") from None


def read_settings(file: Path) -> dict:
    """Of a run, from its config.json, without those of its folder; or of a file of one's own."""
    content = _read_object(file)
    if isinstance(content.get("settings"), dict):
        content = {name: x for name, x in content["settings"].items() if name not in ("out", "overwrite")}
    return {name: math.inf if x == "inf" else x for name, x in content.items()}


def _read_object(file: Path) -> dict:
    content = _parse(file.read_text(errors="replace"), file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: must hold a JSON object")
    return content


def read_lines(file: Path) -> list[dict]:
    """The whole lines of a .jsonl file of a run, which a kill may have torn at its end."""
    if not file.exists():
        return []
    lines = []
    for n, text in enumerate(file.read_text(errors="replace").split("\n")[:-1], 1):
        lines.append(_parse(text, file, n))
        if not isinstance(lines[-1], dict) or not isinstance(lines[-1].get("step"), int):
            raise UserError(f"{file}:{n}: not a line of a run: mend or delete it")
    return lines


def _parse(text: str, file: Path, number: int | None = None) -> Any:
    """`number`: of the line, where it is one of a .jsonl file"""
    try:
        return json.loads(text)
    except ValueError as error:
        number = number or getattr(error, "lineno", 1)
        raise UserError(f"{file}:{number}: damaged, not JSON ({error}): mend that line") from None


def provenance() -> dict:
    """Where and with what a run was made."""
    command = ["git", "-C", Path(__file__).parent, *"describe --always --dirty --abbrev=40 --exclude=*".split()]
    git = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": (git and git.stdout.strip()) or None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "hardware": {"gpu": gpu, "cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }


def checkpoint_of(out: Path, step: int) -> Path:
    return out / "checkpoint" / f"{step:06d}"


def saved_steps(out: Path) -> list[int]:
    """Those with a whole checkpoint, in their order."""
    return sorted(int(path.name) for path in (out / "checkpoint").glob("*") if path.name.isdigit())


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
