"""A run's folder: what it holds, whether this run may have it, and files that are there whole or not at all.

    out/config.json           settings, as given by hand and as resolved; versions, commit, hardware
    out/metrics.jsonl         a line for each step
    out/samples.jsonl         completions
    out/checkpoint/000040/    checkpoint.py
    out/model/                the trained model

Nothing is written before all is ready to start, and no run is written over: --overwrite renames its folder.
"""

import dataclasses
import fcntl
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import time
from pathlib import Path

import torch
import transformers

from config import Config, UserError, resolve, settings_that_may_change

PATHS = ("model", "data", "eval_data", "reward")  # settings that may name a file


# ---- What a folder holds ----


def open_run(config: Config) -> int | None:
    """What the folder `config.out` holds; nothing is written. -> the step to continue after, 0 to start; None: the run
    is finished."""
    out = Path(config.out)
    above = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise UserError(f"--out {out}: {above} is no folder that can be written to")
    if (out / ".lock").exists():
        lock(out)
    there = settings_of(out)
    if there is None and out.exists() and any(p.name != ".lock" and p.suffix != ".partial" for p in out.iterdir()):
        raise UserError(f"{out} holds something that is not a run: give another --out")
    if starts_over(config):
        check_that_it_can_be_renamed(config)
        return 0
    made, saved, model = made_steps(out), saved_steps(out), out / "model"
    if made is None:
        return 0
    if changed := other_settings(there, config):
        lines = [f"  --{name}: {getattr(there, name)} there, {getattr(config, name)} here" for name in changed]
        told = [f"{out} holds a run with other settings:", *lines, "give another --out, or start over with --overwrite"]
        raise UserError("\n".join(told))
    if config.steps < made:
        raise UserError(f"--steps {config.steps}: the run in {out} has made {made} already; give another --out")
    if config.steps == made and model.exists():
        return None
    if not saved and model.exists():
        raise UserError(f"{out} is finished and its checkpoint is gone: start another run, from --model {model}")
    return max(saved, default=0)


def made_steps(out: Path) -> int | None:
    """How many steps the run in this folder has made, in its newest checkpoint or, finished, altogether; None: no step
    at all, so that there is nothing to lose."""
    there = settings_of(out)
    if there is None:
        return None
    if saved_steps(out):
        return max(saved_steps(out))
    first = 1 if there.steps else 0  # an evaluation is step 0
    made = [line["step"] for line in read_lines(out / "metrics.jsonl") if line["step"] >= first]
    if (out / "model").exists():
        return made[-1] if made else there.steps
    return 0 if made else None


def other_settings(there: Config, here: Config) -> list[str]:
    """What makes another run of it."""
    no_matter = settings_that_may_change() if here.truncates else [*settings_that_may_change(), "keep_set"]
    fixed = [name for name in vars(here) if name not in no_matter]
    meant = {name: (words_of(there, name), words_of(here, name)) for name in fixed if name in PATHS}
    same_files = [name for name, (a, b) in meant.items() if [*map(os.path.realpath, a)] == [*map(os.path.realpath, b)]]
    return [name for name in fixed if getattr(there, name) != getattr(here, name) and name not in same_files]


def words_of(config: Config, name: str) -> list[str]:
    value = getattr(config, name) or []
    return [value] if isinstance(value, str) else value


def checkpoint_of(out: Path, step: int) -> Path:
    return out / "checkpoint" / f"{step:06d}"


def saved_steps(out: Path) -> list[int]:
    """Those with a whole checkpoint, in their order."""
    return sorted(int(path.name) for path in (out / "checkpoint").glob("*") if path.name.isdigit())


# ---- The folder becomes this run's ----


def begin(config: Config, given: Config, done: int) -> list[str]:
    """Called when all is ready to start. -> notes"""
    out, notes = Path(config.out), []
    out.mkdir(parents=True, exist_ok=True)
    lock(out)
    if open_run(config) != done:
        raise UserError(f"another process has written to {out} by now: start again, or give another --out")
    if starts_over(config) and settings_of(out) is not None:
        free = (out.with_name(f"{out.name}.replaced-{n}") for n in itertools.count(1))
        aside = next(path for path in free if not path.exists())
        out.rename(aside)
        out.mkdir()
        lock(out)
        notes.append(f"the run that was in {out}/ is in {aside}/ now")
    by_hand = {name: x for name, x in plain(given).items() if x != plain(Config())[name]}
    if done:
        notes += figures_that_change(settings_of(out), config)
        there = read_object(out / "config.json")
        new = {name: x for name, x in by_hand.items() if there["settings"].get(name) != x}
        by_hand = there.get("given", there["settings"]) | new
    write_json(out / "config.json", {"given": by_hand, "settings": plain(config)} | provenance())
    return notes


def starts_over(config: Config) -> bool:
    """Once, not at every restart."""
    return config.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def check_that_it_can_be_renamed(config: Config) -> None:
    out = Path(config.out).resolve()
    if os.path.ismount(out):
        raise UserError(f"--overwrite: {out} is a mount and cannot be renamed; give another --out")
    for name in PATHS:
        if any(Path(word).resolve().is_relative_to(out) for word in words_of(config, name)):
            raise UserError(f"--{name}: --overwrite would move away what is in {out}; give another --out")


def figures_that_change(there: Config, here: Config) -> list[str]:
    notes = []
    if there.steps != here.steps and here.lr_schedule != "constant":
        notes.append(f"lr_schedule {here.lr_schedule}: so far over {there.steps} steps, now over {here.steps}")
    held_out = [one.eval_prompts if one.eval_every else 0 for one in (there, here)]
    if here.data and held_out[0] != held_out[1]:
        notes.append(f"{held_out[0]} prompts were held out so far, now {held_out[1]}: other ones are trained on")
    return notes


def provenance() -> dict:
    """Where and with what a run was made."""
    command = ["git", "-C", Path(__file__).parent, *"describe --always --dirty --abbrev=40 --exclude=*".split()]
    git = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__)
    cpuinfo = Path("/proc/cpuinfo")  # Linux
    names = re.findall("model name\t: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else [platform.processor()]
    hardware = dict(gpu=gpu, cpu=(names or [platform.machine()])[0], cores=os.cpu_count())
    return {"commit": (git and git.stdout.strip()) or None, "versions": versions, "hardware": hardware}


# ---- Its files, read ----


def settings_of(out: Path) -> Config | None:
    """Of the run in this folder, if it is one. What a newer version has added counts as its default."""
    file = out / "config.json"
    settings = read_object(file).get("settings") if file.is_file() else None
    if not isinstance(settings, dict):
        return None  # not written by a run
    known = {name: x for name, x in from_json(settings).items() if name in vars(Config())}
    return resolve(Config(**{"keep_set": False} | known), {}, on_gpu=False)  # earlier runs had none


def given_in(file: Path) -> dict:
    """What was given by hand to the run with this config.json, but for its folder; or the settings of one's own file.
    Runs of earlier versions say only what they had in all."""
    content = read_object(file)
    if isinstance(content.get("settings"), dict):
        content = content.get("given", content["settings"])
        content = {name: x for name, x in content.items() if name not in ("out", "overwrite")}
    return from_json(content)


def plain(config: Config) -> dict:
    """For JSON, which has no infinity."""
    return {name: "inf" if x == math.inf else x for name, x in dataclasses.asdict(config).items()}


def from_json(settings: dict) -> dict:
    return {name: math.inf if x == "inf" else x for name, x in settings.items()}


def read_object(file: Path) -> dict:
    try:
        return parse(file.read_text(errors="replace"), str(file))
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}") from None


def read_lines(file: Path) -> list[dict]:
    """The whole lines of a .jsonl file of a run, which a kill may have torn at its end."""
    lines = file.read_text(errors="replace").split("\n")[:-1] if file.exists() else []
    return [parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1)]


def parse(text: str, where: str) -> dict:
    try:
        return {**json.loads(text)}
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: damaged, no JSON object ({error}): mend it") from None


# ---- One writer at a time; files that are there whole or not at all ----

locks = []


def lock(out: Path) -> None:
    """One writer at a time. The lock dies with the process that holds it, which may take a moment; children that it
    leaves behind (of a reward function, say) do not hold it."""
    handle = open(out / ".lock", "w")
    for _ in range(10):
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locks.append(handle)
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
