"""The folder of a run: what it contains, what a command does with it, and how its files are written.

    out/config.json           all settings; those that were typed; a record of each start: commit, versions, hardware
    out/metrics.jsonl         a line for each step
    out/samples.jsonl         completions
    out/checkpoint/000040/    everything that is needed to go on after step 40 (see checkpoint.py)
    out/model/                the trained model, in fp32
    out/model-40/             the model after 40 steps, if the run has then been given more steps

A folder with a line in metrics.jsonl, a checkpoint or a model/ is a run. This is what a command does with it, in order:

- It refuses settings that may not change, fewer steps than were made, more steps if the run is finished and has no
  checkpoint, a newest checkpoint without a line in metrics.jsonl, and --overwrite if the new run reads a file of the
  folder.
- If the run has made its steps (it has a model/, or an evaluation at --steps 0), the results are printed. A line says
  so if they would be others now, because the code, a file or a setting of evaluations has changed.
- Otherwise it goes on after its newest checkpoint, or from the beginning if there is none.

So the same command continues a run. `--config RUN/config.json` gives the settings of a run to another or, together
with `--out RUN`, to itself. --overwrite renames the folder and starts over. If the code, the hardware or the files that
the run reads have changed, this is recorded and a note is printed.
"""

import fcntl
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import time
import uuid
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path

import torch
import transformers

from config import SETTINGS, Config, UserError, resolve
from infra import faults, ranks

EVALUATION = {"eval_prompts", "eval_k", "eval_temperature", "eval_top_p", "metrics_by"}  # decide what is evaluated
REPLACE = ".replace"  # a file that marks the folder of the old run until --overwrite has renamed this folder

# ---- What a command does with a folder ----


@dataclass
class Start:
    """How a command starts, which follows from what is in its folder."""

    before: dict  # the config.json of the run that goes on; empty for a new run
    after_step: int  # the step of the newest checkpoint; 0 without a checkpoint
    is_finished: bool  # the run has made its steps, so that only its results are left to print


def claim(config: Config) -> Start:
    """Make the folder `config.out`, lock it, and return how this command starts. Raise a UserError if it must not write
    there, or if the run in the folder must not go on with these settings."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    lock(out)
    before, saved, has_model = config_json(out), saved_steps(out), (out / "model").exists()
    newest = max(saved, default=0)
    others = [path for path in out.glob("*") if path.name not in (".lock", "config.json.partial")]
    if others and not before:
        raise UserError(f"{out} contains something that is not a run: give another --out")
    if starts_over(config) and any(path.is_relative_to(out) for path in inputs(config)):
        raise UserError(f"--overwrite would rename {out}, from which this run reads: give another --out")
    if starts_over(config) and before:
        (out / REPLACE).touch()  # is renamed with the folder. A restart by torchrun looks for it in `starts_over`
    if starts_over(config) or not (saved or has_model or read_lines(out / "metrics.jsonl")):
        return Start(before={}, after_step=0, is_finished=False)
    if gone := outdated(before["settings"]):
        raise UserError(f"the run in {out} has settings that no longer exist; only --overwrite starts over: {gone}")
    there = with_absolute_paths(settings_of(out))
    if changed := other_settings(there, config):
        values = [f"--{name} {getattr(there, name)} there, {getattr(config, name)} here" for name in changed]
        raise UserError(f"the run in {out} has other settings, and only --overwrite starts over: {'; '.join(values)}")
    if saved and newest not in [line["step"] for line in read_lines(out / "metrics.jsonl")]:
        raise UserError(f"{out}/metrics.jsonl lacks the line of step {newest}: restore it, or move its checkpoint away")
    steps_made = there.steps if has_model else newest  # the model may be all that is left of a finished run
    if config.steps < steps_made:
        raise UserError(f"--steps {config.steps}: the run in {out} has already made {steps_made}")
    if config.steps > steps_made and has_model and not saved:
        raise UserError(f"--steps {config.steps}: the run in {out} is finished, and has no checkpoint to go on from")
    is_finished = config.steps == there.steps and (config.steps == 0 or has_model)
    if is_finished:
        made_by = [before["code"], *before["digests"].values()]  # of a file, the content counts and not the path
        if differing(EVALUATION, there, config) or made_by != [digest_of_code(), *digests(config).values()]:
            faults.warn(f"code, files or settings have changed since the run in {out}: its results are those of before")
    return Start(before, newest, is_finished)


def starts_over(config: Config) -> bool:
    """Return whether --overwrite applies. After torchrun has restarted the ranks, it does only if the folder is still
    the one that is to be replaced. Otherwise the new run goes on."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return config.overwrite and (not is_restart or (Path(config.out) / REPLACE).exists())


def other_settings(there: Config, here: Config) -> list[str]:
    """Return the names of the settings that differ although a run must keep them."""
    fixed = {name for name, setting in SETTINGS.items() if not setting.metadata["may_change"]}
    if there.steps == 0 or here.steps == 0:  # the result of an evaluation depends on these as well
        fixed |= {"steps"} | EVALUATION
    if here.data and there.held_out != here.held_out:  # other rows of --data would be trained on
        fixed |= {"eval_prompts", "eval_every"}
    return differing(fixed, there, here)


def differing(names: set[str], there: Config, here: Config) -> list[str]:
    """Return those of these settings that differ, in the order of --help."""
    return [name for name in vars(here) if name in names and getattr(there, name) != getattr(here, name)]


# ---- What is in a folder ----


def checkpoint_of(out: Path, step: int) -> Path:
    return out / "checkpoint" / f"{step:06d}"


def saved_steps(out: Path) -> list[int]:
    """Return the steps after which a complete checkpoint was saved, in ascending order. Whatever else is in the folder
    of the checkpoints is ignored."""
    folders = [path for path in (out / "checkpoint").glob("*") if path.is_dir() and path.name.isdecimal()]
    return sorted(int(path.name) for path in folders if path == checkpoint_of(out, int(path.name)))


def settings_of(out: Path) -> Config | None:
    """Return the settings of the run in this folder, or None if there is no run."""
    settings = config_json(out).get("settings")
    # If the code has gained a switch since the run, the file lacks it. `resolve` takes its value from the run's preset.
    return resolve(still_there(settings, out), {}, on_gpu=False) if settings else None


def still_there(settings: dict, out: Path) -> Config:
    """Return the settings of a run without those that no longer exist, which are noted."""
    if gone := outdated(settings):
        faults.warn(f"the run in {out} has settings that no longer exist: {gone}")
    return Config(**{name: x for name, x in settings.items() if name in SETTINGS and x is not None})


def outdated(settings: dict) -> str:
    """Name the settings that no longer exist, unless they were off."""
    return ", ".join(f"--{name} {x}" for name, x in settings.items() if name not in SETTINGS and x)


def settings_in(file: Path) -> Config:
    """Return the settings in a file of the user. If the file is the config.json of a run, return only those that were
    typed, since another task or algorithm has other defaults. --out and --overwrite are left out."""
    content = read_json(file)
    if "given" in content:
        typed = {name: x for name, x in content["given"].items() if name not in ("out", "overwrite")}
        return still_there(typed, file.parent)
    if unknown := sorted(content.keys() - SETTINGS.keys()):
        raise UserError(f"{file}: there is no setting {', '.join(unknown)}")
    return Config(**{name: x for name, x in content.items() if x is not None})


def with_absolute_paths(config: Config) -> Config:
    """Return the settings with absolute paths of the files and folders that exist, so that they mean the same in every
    working directory. What does not exist here may be a name on the hub or a module."""

    def absolute(name: str) -> str:
        path, colon, function = name.rpartition(":") if ".py:" in name else (name, "", "")
        path = os.path.expanduser(path)
        return os.path.abspath(path) + colon + function if os.path.exists(path) else name

    single = {name: getattr(config, name) for name in ("model", "reference", "data", "reply")}
    changes = {name: absolute(x) for name, x in single.items() if x}
    changes |= {name: [absolute(x) for x in getattr(config, name)] for name in ("reward", "eval_data")}
    return replace(config, **changes)


def config_json(out: Path) -> dict:
    """Return the content of a run's config.json, or an empty dict if there is no such file, or it is not of a run."""
    with suppress(UserError):
        about = read_json(out / "config.json")
        if isinstance(about.get("settings"), dict) and "algorithm" in about["settings"]:
            return about
    return {}


def read_json(file: Path) -> dict:
    try:
        return {**json.loads(file.read_text())}  # an error if it is not a dict
    except (OSError, TypeError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None


def read_lines(file: Path) -> list[dict]:
    """Return the lines of a .jsonl file, without a last one that was cut off when the run was killed."""
    *whole, last = file.read_bytes().split(b"\n") if file.exists() else [b""]
    try:
        lines = [{**json.loads(line)} for line in whole]
    except (TypeError, ValueError) as error:
        raise UserError(f"{file} has a damaged line: {error}") from None
    with suppress(ValueError):  # only what follows the last newline may be incomplete
        lines.append(json.loads(last))
    return lines


# ---- The start of a run ----


def begin(config: Config, typed: Config, start: Start) -> list[str]:
    """Write config.json, once everything is ready to start. Return notes for the user. `config` has all settings, and
    `typed` only those that the user typed."""
    out, notes = Path(config.out), []
    file = out / "config.json"
    if starts_over(config) and file.exists():
        free = (out.with_name(f"{out.name}.replaced-{n}") for n in itertools.count(1))
        replaced = next(path for path in free if not path.exists())
        out.rename(replaced)
        out.mkdir()
        lock(out)
        notes.append(f"the run that was in {out}/ is in {replaced}/ now")
    for torn in [*out.glob("*.partial"), *out.glob("checkpoint/*.partial")]:  # left by a run that was killed
        shutil.rmtree(torn, ignore_errors=True)
    before = start.before or {"run_id": uuid.uuid4().hex, "beginnings": []}
    if (out / "model").exists():  # with more steps, the run is not finished until it has another model
        earlier = out / f"model-{before['settings']['steps']}"
        shutil.rmtree(earlier, ignore_errors=True)  # the same model, if the run has been ended at this length before
        (out / "model").rename(earlier)
    now = provenance() | {"digests": digests(config)}
    beginnings = [*before["beginnings"], {"after_step": start.after_step} | now]
    given = {name: x for name, x in vars(typed).items() if x != getattr(Config(), name)}
    settings = vars(replace(config, overwrite=False))  # it belongs to this start, and not to the run
    about = {"run_id": before["run_id"], "given": given, "settings": settings} | now | {"beginnings": beginnings}
    # JSON has no infinity, but a number that is too large for a float is read as one.
    write_text(file, json.dumps(about, indent=2).replace('": Infinity', '": 1e999') + "\n")
    old, new = facts(start.before or about), facts(about)  # a new run is compared with itself: nothing has changed
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    return notes + [f"{name} was {old.get(name)}, now {new.get(name)}" for name in changed]


def facts(about: dict) -> dict:
    """Return what is told if it has changed since the last start of a run. `about` is a config.json."""
    code = {"commit": about["commit"], "code": about["code"]}
    return code | about["versions"] | about["hardware"] | about["digests"] | about["settings"]


def fingerprint_of_start(config: Config, rows: list[dict]) -> dict:
    """Return what must be the same on all ranks when they start. --out may differ, as only the first rank uses it."""
    # The code of this program, and the Python files that the user gives.
    code = [digest_of_code(), *(sha256_of(path) for path in inputs(config) if path.suffix == ".py")]
    # Each row becomes a text, and the checksums of all texts are added. The text contains the position of the row, so
    # that the sum depends on the order of the rows. For an object that JSON cannot represent, it contains only the
    # type, because the repr may differ between processes.
    texts = (json.dumps([i, row], default=lambda x: type(x).__name__, skipkeys=True) for i, row in enumerate(rows))
    settings = {f"--{name}": x for name, x in vars(config).items() if name != "out"}
    return settings | {"the code": code, "the rows": sum(zlib.crc32(x.encode()) for x in texts)}


def provenance() -> dict:
    """Return the commit and the digest of the code, the versions of the libraries, and the hardware."""
    command = ["git", "-C", Path(__file__).parent, *"describe --always --dirty --abbrev=40 --exclude=*".split()]
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    versions = dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpuinfo = Path("/proc/cpuinfo")  # only Linux has this file
    names = re.findall("model name\t: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    hardware = dict(ranks=ranks.world(), gpu=gpu, cpu=(names or [platform.machine()])[0], cores=os.cpu_count())
    hardware["threads"] = torch.get_num_threads()  # of a rank; on a CPU, another number rounds differently
    return {"commit": commit or None, "code": digest_of_code(), "versions": versions, "hardware": hardware}


def inputs(config: Config) -> list[Path]:
    """Return the files and folders that the settings name."""
    functions = [name.rpartition(":")[0] for name in [*config.reward, config.reply or ""]]
    named = [config.model, config.reference, config.data, *config.eval_data, *functions]
    return [Path(path).resolve() for path in named if path and Path(path).exists()]


def digests(config: Config) -> dict[str, str]:
    """Return a digest of each of these files and folders."""
    files = {path: sorted(path.rglob("*")) if path.is_dir() else [path] for path in inputs(config)}
    return {f"digest of {path}": digest_of(inside) for path, inside in files.items()}


def digest_of_code() -> str:
    """Return a digest of all files that decide what a run computes, whether or not they are committed."""
    root, kinds = Path(__file__).parents[1], ("*.py", "fast/*.py", "infra/*.py", "tasks/*.py")
    return digest_of(file for kind in kinds for file in sorted(root.glob(kind)) if not file.name.startswith("test_"))


def digest_of(paths: Iterable[Path]) -> str:
    return sha256("".join(sha256_of(path) for path in paths if path.is_file()).encode()).hexdigest()[:16]


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


# ---- One writer at a time; files that are either complete or absent ----

locks: dict[Path, os.stat_result] = {}  # of the folders that this process has locked


def lock(out: Path) -> None:
    """Make sure that only one process writes to a folder. The lock is released when that process ends, which may take a
    moment. Child processes that it leaves behind, such as those of a reward function, do not keep the lock."""
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # kept open: closing it would release the lock
    for _ in range(10):
        with suppress(BlockingIOError, PermissionError):
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locks[out] = os.fstat(descriptor)
            return
        time.sleep(1)
    raise UserError(f"another process is writing to {out}: wait for it, or give another --out")


def check_lock(out: Path) -> None:
    """Raise a UserError if this process has locked the folder, but somebody has then deleted or moved it, and another
    run has made a new one."""
    if out in locks and not os.path.samestat(locks[out], (out / ".lock").stat()):
        raise UserError(f"{out} now belongs to another run: this one ends")


def flush(path: Path) -> None:
    """Make sure that a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write or replace a file in one step: if the process is killed meanwhile, the file is what it was before."""
    partial_file = path.with_name(path.name + ".partial")
    partial_file.write_text(text)
    flush(partial_file)
    partial_file.rename(path)
    flush(path.parent)
