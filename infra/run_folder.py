"""A run's folder: what it holds, which runs may continue in it, and how its files are written.

    out/config.json           settings, those given by hand and all of them; each beginning with its commit and versions
    out/metrics.jsonl         a line for each step
    out/samples.jsonl         completions
    out/checkpoint/000040/    checkpoint.py
    out/model/                the trained model, in fp32

Nothing is written before everything is ready to start. The same command continues a run. Other settings are refused;
another commit, other versions, and other contents of what the run reads are recorded and told in a note. A finished run
is only shown. --overwrite renames the folder and starts over.
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
import zlib
from dataclasses import fields
from hashlib import file_digest, sha256
from pathlib import Path

import torch
import transformers

from config import Config, UserError, resolve

MAY_CHANGE = {each.name for each in fields(Config) if each.metadata["may_change"]}  # when a run is continued
locks = []  # as long as their files are open, this process has them


# ---- What a folder holds ----


def step_to_continue_after(config: Config) -> int | None:
    """0 if the run starts, None if the run in `config.out` is finished. Nothing is written."""
    out = Path(config.out)
    if (out / ".lock").exists():
        lock(out)
    others = [path for path in out.glob("*") if path.name != ".lock" and path.suffix != ".partial"]
    if others and "settings" not in content_of(out / "config.json"):
        raise UserError(f"{out} holds something that is not a run: give another --out")
    if starts_over(config):
        if inside := [path for path in inputs(config) if path.is_relative_to(out.resolve())]:
            raise UserError(f"--overwrite would move away {inside[0]}, which the new run reads: give another --out")
        return 0
    made = made_steps(out)
    if made is None:
        return 0
    there = settings_of(out)
    if changed := other_settings(there, config):
        values = [f"--{name} {getattr(there, name)} there, {getattr(config, name)} here" for name in changed]
        raise UserError(f"{out} holds a run with other settings, and only --overwrite starts over: {'; '.join(values)}")
    is_finished = (out / "model").exists() or there.steps == 0
    if is_finished and config.steps == made:
        return None
    if config.steps < made or (is_finished and not saved_steps(out)):
        raise UserError(f"--steps {config.steps}: the run in {out} has made {made}, and no checkpoint leads there")
    return max(saved_steps(out), default=0)


def made_steps(out: Path) -> int | None:
    """The number of steps that the run in this folder has made: up to its newest checkpoint, or all of them if it is
    finished. None if there is nothing to lose: no run, or one that has not made a step."""
    if (there := settings_of(out)) is None:
        return None
    if saved := saved_steps(out):
        return saved[-1]
    if (out / "model").exists():
        return there.steps
    # The evaluation before the first step counts only if the run is nothing else.
    return 0 if any(line["step"] >= min(1, there.steps) for line in read_lines(out / "metrics.jsonl")) else None


def other_settings(there: Config, here: Config) -> list[str]:
    """The settings that differ, and that a run must keep."""
    trains = there.steps and here.steps  # otherwise a run is an evaluation
    may_change = MAY_CHANGE - (set() if trains else {"steps", "eval_prompts", "eval_k"})
    return [name for name in vars(here) if getattr(there, name) != getattr(here, name) and name not in may_change]


def inputs(config: Config) -> list[Path]:
    """The files and folders that the settings name."""
    named = [config.model, config.data, config.eval_data, *(name.rpartition(":")[0] for name in config.reward)]
    return [Path(path).resolve() for path in named if path and Path(path).exists()]


def checkpoint_of(out: Path, step: int) -> Path:
    return out / "checkpoint" / f"{step:06d}"


def saved_steps(out: Path) -> list[int]:
    """The steps with a whole checkpoint, in their order."""
    return sorted(int(path.name) for path in (out / "checkpoint").glob("*") if path.name.isdigit())


def settings_of(out: Path) -> Config | None:
    """The settings of the run in this folder, or None if there is no run."""
    settings = content_of(out / "config.json").get("settings")
    if settings is None:
        return None
    if unknown := settings.keys() - vars(Config()).keys():
        raise UserError(f"{out} holds a run with settings that this code does not know: {', '.join(sorted(unknown))}")
    settings = {name: math.inf if x == "inf" else x for name, x in settings.items()}  # JSON has no infinity
    return resolve(Config(**settings), {}, on_gpu=False)


def given_in(file: Path) -> dict:
    """The settings in a user's own file, or those that were given by hand to the run with this config.json, without
    those that name its folder."""
    content = json.loads(file.read_text())
    if "given" not in content:
        return content
    return {name: x for name, x in content["given"].items() if name not in ("out", "overwrite")}


def content_of(file: Path) -> dict:
    """The content of a run's config.json; empty where there is none."""
    return json.loads(file.read_text()) if file.is_file() else {}


def read_lines(file: Path) -> list[dict]:
    """The lines of a .jsonl file of a run, without a last one that a kill has cut off."""
    *lines, last = file.read_text().split("\n") if file.exists() else [""]
    whole = [json.loads(line) for line in lines]
    with contextlib.suppress(ValueError):
        whole.append(json.loads(last))
    return whole


# ---- The folder becomes this run's ----


def begin(config: Config, given: Config, done: int) -> list[str]:
    """Write config.json, when everything is ready to start. -> notes"""
    out, notes, beginnings = Path(config.out), [], []
    out.mkdir(parents=True, exist_ok=True)
    lock(out)
    if step_to_continue_after(config) != done:
        raise UserError(f"another process has written to {out} by now: start again, or give another --out")
    if starts_over(config) and "settings" in content_of(out / "config.json"):
        free = (out.with_name(f"{out.name}.replaced-{n}") for n in itertools.count(1))
        replaced = next(path for path in free if not path.exists())
        out.rename(replaced)
        out.mkdir()
        lock(out)
        notes.append(f"the run that was in {out}/ is in {replaced}/ now")
    for torn in [*out.glob("*.partial"), *out.glob("checkpoint/*.partial")]:  # folders that a kill has left
        shutil.rmtree(torn, ignore_errors=True)
    by_hand = {name: x for name, x in vars(given).items() if x != getattr(Config(), name)}
    now = provenance() | {"digests": digests(config)}
    if made_steps(out) is not None:
        notes += changes(config, now)
        about, there = content_of(out / "config.json"), vars(settings_of(out))
        beginnings = about["beginnings"]
        by_hand = about["given"] | {name: x for name, x in by_hand.items() if there[name] != x}
    beginnings = [*beginnings, {"after_step": done} | now]
    about = {"given": by_hand, "settings": vars(config)} | now | {"beginnings": beginnings}
    about = json.loads(json.dumps(about), parse_constant=lambda infinity: "inf")
    write_text(out / "config.json", json.dumps(about, indent=2) + "\n")
    return notes


def starts_over(config: Config) -> bool:
    """Only the first start does. torchrun's restarts continue."""
    return config.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def changes(config: Config, now: dict | None = None) -> list[str]:
    """A note for each change since the last beginning of this run that is no reason to refuse it."""
    now, about = now or provenance() | {"digests": digests(config)}, content_of(Path(config.out) / "config.json")
    before, after = ({"commit": x["commit"]} | x["versions"] | x["digests"] for x in (about, now))
    before |= vars(settings_of(Path(config.out)))
    after |= {name: x for name, x in vars(config).items() if x is not None and name != "overwrite"}
    return [f"{name} was {before.get(name)}, now {x}" for name, x in after.items() if before.get(name) != x]


def digests(config: Config) -> dict[str, str]:
    """A digest of each file that the run reads, and of the files of each folder together."""
    found = {}
    for path in inputs(config):
        files = [file for file in sorted(path.glob("*")) or [path] if file.is_file()]
        found[f"digest of {path}"] = sha256("".join(map(sha256_of, files)).encode()).hexdigest()[:16]
    return found


def common(config: Config, rows: list[dict]) -> dict:
    """What all ranks must have been started with. Only the first one reads and writes `out`."""
    root, own = Path(__file__).parents[1], [path for path in inputs(config) if path.suffix == ".py"]
    code = [sha256_of(file) for file in [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py")), *own]]
    texts = (json.dumps([i, row], default=lambda x: type(x).__name__, skipkeys=True) for i, row in enumerate(rows))
    settings = {f"--{name}": x for name, x in vars(config).items() if name != "out"}
    return settings | {"the code": code, "the rows": sum(zlib.crc32(text.encode()) for text in texts)}


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def provenance() -> dict:
    """With which code, which libraries and on which machine a run is made."""
    command = ["git", "-C", Path(__file__).parent, *"describe --always --dirty --abbrev=40 --exclude=*".split()]
    git = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    versions = dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpuinfo = Path("/proc/cpuinfo")  # Linux
    names = re.findall("model name\t: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    hardware = dict(gpu=gpu, cpu=(names or [platform.machine()])[0], cores=os.cpu_count())
    commit = (git and git.stdout.strip()) or None
    return {"commit": commit, "code": digest_of_code(), "versions": versions, "hardware": hardware}


def digest_of_code() -> str:
    """A digest of all files that decide what a run computes, whether or not they are committed."""
    root = Path(__file__).parents[1]
    files = [file for kind in ("*.py", "fast/*.py", "infra/*.py", "tasks/*.py") for file in sorted(root.glob(kind))]
    return sha256("".join(sha256_of(file) for file in files if "test" not in file.name).encode()).hexdigest()[:16]


# ---- One writer at a time; files that appear whole or not at all ----


def lock(out: Path) -> None:
    """Let only one process write. The system releases the lock when that process ends, which may take a moment. Child
    processes that it leaves behind, of a reward function for instance, do not inherit the lock."""
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
    partial_file = path.with_name(path.name + ".partial")
    partial_file.write_text(text)
    flush(partial_file)
    partial_file.rename(path)
    flush(path.parent)
