"""A run's folder: what it holds, whether this run may have it, and files that are there whole or not at all.

    out/config.json           settings, as given by hand and as resolved; versions, commit, hardware
    out/metrics.jsonl         a line for each step
    out/samples.jsonl         completions
    out/checkpoint/000040/    checkpoint.py
    out/model/                the trained model

Nothing is written before all is ready to start, and no run is written over: --overwrite renames its folder.
"""

import contextlib
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
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import torch
import transformers

from config import Config, UserError, resolve

PATHS = ("model", "data", "eval_data", "reward")  # settings that may name a file
MAY_CHANGE = {each.name for each in fields(Config) if each.metadata["may_change"]}  # when a run is continued
locks = []  # held as long as this process lives


# ---- What a folder holds ----


def open_run(config: Config) -> int | None:
    """Nothing is written. -> the step to continue after, 0 to start; None: the run in `config.out` is finished"""
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
        inside = [path for name in PATHS for path in paths(config, name) if path.is_relative_to(out.resolve())]
        if inside or os.path.ismount(out):
            raise UserError(f"--overwrite cannot move away {inside[0] if inside else 'a mount'}: give another --out")
        return 0
    made, is_finished = made_steps(out), (out / "model").exists()
    if made is None:
        return 0
    if changed := other_settings(there, config):
        lines = [f"  --{name}: {getattr(there, name)} there, {getattr(config, name)} here\n" for name in changed]
        advice = "give another --out, or start over with --overwrite"
        raise UserError(f"{out} holds a run with other settings:\n{''.join(lines)}{advice}")
    if is_finished and config.steps == made:
        return None
    if config.steps < made or (is_finished and not saved_steps(out)):
        raise UserError(f"--steps {config.steps}: the run in {out} has made {made}, and no checkpoint leads there")
    return max(saved_steps(out), default=0)


def made_steps(out: Path) -> int | None:
    """How many steps the run in this folder has made, in its newest checkpoint or, finished, altogether; None: not one,
    an evaluation's step 0 included, so that there is nothing to lose."""
    there = settings_of(out)
    if there is None:
        return None
    if saved := saved_steps(out):
        return saved[-1]
    if (out / "model").exists():
        return there.steps
    return 0 if any(line["step"] >= min(1, there.steps) for line in read_lines(out / "metrics.jsonl")) else None


def other_settings(there: Config, here: Config) -> list[str]:
    """What makes another run of it."""
    may_change = MAY_CHANGE | (set() if here.truncates else {"keep_set"})
    may_change -= set() if there.steps else {"steps", "eval_prompts", "eval_k"}  # figures would be written over
    changed = [name for name in vars(here) if getattr(there, name) != getattr(here, name) and name not in may_change]
    return [name for name in changed if name not in PATHS or paths(there, name) != paths(here, name)]


def paths(config: Config, name: str) -> list[Path]:
    """As this setting has them, however they are written."""
    value = getattr(config, name) or []
    return [Path(word).resolve() for word in ([value] if isinstance(value, str) else value)]


def checkpoint_of(out: Path, step: int) -> Path:
    return out / "checkpoint" / f"{step:06d}"


def saved_steps(out: Path) -> list[int]:
    """Those with a whole checkpoint, in their order."""
    return sorted(int(path.name) for path in (out / "checkpoint").glob("*") if path.name.isdigit())


def settings_of(out: Path) -> Config | None:
    """Of the run in this folder, if it is one. What a newer version has added counts as its default."""
    file = out / "config.json"
    settings = parse(file.read_bytes(), file, with_infinity).get("settings") if file.is_file() else None
    if not isinstance(settings, dict):
        return None  # not written by a run
    known = {name: x for name, x in settings.items() if name in vars(Config())}
    return resolve(Config(**{"keep_set": False} | known), {}, on_gpu=False)  # earlier runs had none


def given_in(file: Path) -> dict:
    """What was given by hand to the run with this config.json, but for its folder; or the settings of one's own file.
    Runs of earlier versions say only what they had in all."""
    content = parse(file.read_bytes(), file, with_infinity)
    given = content.get("given", content.get("settings"))
    return content if given is None else {name: x for name, x in given.items() if name not in ("out", "overwrite")}


def read_lines(file: Path) -> list[dict]:
    """The whole lines of a .jsonl file of a run, which a kill may have torn at its end."""
    *lines, last = file.read_bytes().split(b"\n") if file.exists() else [b""]
    whole = [parse(line, f"{file}:{number}") for number, line in enumerate(lines, 1)]
    with contextlib.suppress(UserError):
        whole.append(parse(last, file))
    return whole


def parse(text: bytes, where: Path | str, object_hook: Callable | None = None) -> dict:
    try:
        return {**json.loads(text, object_hook=object_hook)}
    except (ValueError, TypeError) as error:
        raise UserError(f"{where}: damaged, no JSON object ({error}): mend it") from None


def with_infinity(settings: dict) -> dict:
    """JSON has none: config.json says "inf"."""
    return {name: math.inf if x == "inf" else x for name, x in settings.items()}


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
    by_hand = {name: x for name, x in vars(given).items() if x != getattr(Config(), name)}
    if made_steps(out) is not None:
        there = vars(settings_of(out))
        changed = [name for name, x in vars(config).items() if there[name] != x and name != "overwrite"]
        notes += [f"{name} was {there[name]}, now {getattr(config, name)}" for name in changed]
        by_hand = given_in(out / "config.json") | {name: x for name, x in by_hand.items() if there[name] != x}
    content = {"given": by_hand, "settings": vars(config)} | provenance()
    content = json.loads(json.dumps(content), parse_constant=lambda infinity: "inf")
    write_text(out / "config.json", json.dumps(content, indent=2) + "\n")
    return notes


def starts_over(config: Config) -> bool:
    """Once, not at every restart."""
    return config.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def provenance() -> dict:
    """Where and with what a run was made."""
    command = ["git", "-C", Path(__file__).parent, *"describe --always --dirty --abbrev=40 --exclude=*".split()]
    git = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    versions = dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpuinfo = Path("/proc/cpuinfo")  # Linux
    names = re.findall("model name\t: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    hardware = dict(gpu=gpu, cpu=(names or [platform.machine()])[0], cores=os.cpu_count())
    return {"commit": (git and git.stdout.strip()) or None, "versions": versions, "hardware": hardware}


# ---- One writer at a time; files that are there whole or not at all ----


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
    os.fsync(descriptor)
    os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text)
    flush(beside)
    beside.rename(path)
    flush(path.parent)
