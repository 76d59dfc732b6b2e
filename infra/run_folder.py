"""The folder of a run: what it contains, what a command does with it, and how its files are written.

    out/config.json           all settings; those that were typed; a record of each start: commit, versions, hardware
    out/metrics.jsonl         a line for each step
    out/samples.jsonl         completions
    out/checkpoint/000040/    everything that is needed to go on after step 40 (see checkpoint.py)
    out/model/                the trained model, in fp32
    out/model-40/             the model after 40 steps, if the run was then given more steps

A folder with a line in metrics.jsonl, a checkpoint or a model/ is a run. This is what a command does with it:

- Settings that may not change are refused by name, and so are fewer steps than were made.
- A run is finished if its log has its last step and its model/ is of that step: its results are printed.
- A run with a checkpoint goes on after it.
- A finished run without a checkpoint is never started over, nor given more steps.
- Any other run starts from the beginning.

So the same command continues a run. `--config RUN/config.json` gives the settings of a run to another or, together
with `--out RUN`, to itself. --overwrite renames the folder before anything else, except when torchrun has restarted the
ranks. If the code, the hardware or the files that the run reads have changed, this is recorded and a note is printed;
other rows, or other weights than those under its adapters or of its reference, are refused.
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
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

import torch
import transformers

from config import SETTINGS, Config, UserError, resolve
from infra import faults, ranks

EVALUATION = {"eval_prompts", "eval_k", "eval_temperature", "eval_top_p", "metrics_by"}  # decide what is evaluated

# ---- What a command does with a folder ----


@dataclass
class Start:
    """How a command starts, which follows from what is in its folder."""

    before: dict  # the config.json of the run that goes on; empty for a new run
    after_step: int  # the step of the newest checkpoint; 0 without a checkpoint
    is_finished: bool = False  # the run has made its steps, so that only its results are left to print
    notes: list[str] = field(default_factory=list)


def claim(config: Config) -> Start:
    """Make the folder `config.out`, lock it, and return how this command starts. Raise a UserError if it must not write
    there, or if the run in the folder must not go on with these settings."""
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:  # a file of this name, or a folder that must not be written to
        raise UserError(f"--out {out}: {error.strerror}") from error
    lock(out)
    before = config_json(out)
    others = [path for path in out.glob("*") if path.name not in (".lock", "config.json.partial")]
    if others and not before:
        raise UserError(f"{out} contains something that is not a run: give another --out")
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if config.overwrite and not is_restart:
        if any(path.is_relative_to(out) for path in inputs(config)):
            raise UserError(f"--overwrite would rename {out}, from which this run reads: give another --out")
        return Start({}, 0, notes=replaced(out) if before else [])
    saved, lines = saved_steps(out), read_lines(out / "metrics.jsonl")
    newest, model_is_of, last = max(saved, default=0), step_of(out / "model"), lines[-1]["step"] if lines else None
    if not (saved or (out / "model").exists() or lines):
        return Start({}, 0)
    if gone := outdated(before["settings"]):
        raise UserError(f"the run in {out} has settings that no longer exist; only --overwrite starts over: {gone}")
    made = with_absolute_paths(settings_of(out))
    if changed := other_settings(made, config):
        values = [f"--{name} {getattr(made, name)} there, {getattr(config, name)} here" for name in changed]
        raise UserError(f"the run in {out} has other settings, and only --overwrite starts over: {'; '.join(values)}")
    if saved and newest not in [line["step"] for line in lines]:
        raise UserError(f"{out}/metrics.jsonl lacks the line of step {newest}: restore it, or move its checkpoint away")
    if config.steps < max(newest, model_is_of):
        raise UserError(f"--steps {config.steps}: the run in {out} has already made {max(newest, model_is_of)}")
    is_finished = last == config.steps and (config.steps == 0 or model_is_of == config.steps)
    if not (is_finished or saved) and (out / "model").exists():
        raise UserError(f"--steps {config.steps}: the run in {out} is finished, and has no checkpoint to go on from")
    return Start(before, newest, is_finished)


def replaced(out: Path) -> list[str]:
    """Rename the folder of a run, make an empty one in its place, and return a note."""
    free = (out.with_name(f"{out.name}.replaced-{n}") for n in itertools.count(1))
    earlier = next(path for path in free if not path.exists())
    out.rename(earlier)
    out.mkdir()
    lock(out)
    return [f"the run that was in {out}/ is in {earlier}/ now"]


def other_settings(made: Config, config: Config) -> list[str]:
    """Return the names of the settings that differ although a run must keep them."""
    fixed = {name for name, setting in SETTINGS.items() if not setting.metadata["may_change"]}
    if made.steps == 0 or config.steps == 0:  # the result of an evaluation depends on these as well
        fixed |= {"steps"} | EVALUATION
    if config.data and made.held_out != config.held_out:  # other rows of --data would be trained on
        fixed |= {"eval_prompts", "eval_every"}
    return differing(fixed, made, config)


def differing(names: set[str], made: Config, config: Config) -> list[str]:
    """Return those of these settings that differ, in the order of --help."""
    return [name for name in vars(config) if name in names and getattr(made, name) != getattr(config, name)]


# ---- What is in a folder ----


def checkpoint_of(out: Path, step: int) -> Path:
    return out / "checkpoint" / f"{step:06d}"


def saved_steps(out: Path) -> list[int]:
    """Return the steps after which a complete checkpoint was saved, in ascending order. Whatever else is in the folder
    of the checkpoints is ignored."""
    folders = [path for path in (out / "checkpoint").glob("*") if path.is_dir() and path.name.isdecimal()]
    return sorted(int(path.name) for path in folders if path == checkpoint_of(out, int(path.name)))


def step_of(model: Path) -> int:
    """Return the step after which this model was saved; 0 if there is none."""
    return read_json(model / "step.json")["step"] if (model / "step.json").exists() else 0


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


def begin(config: Config, typed: Config, start: Start, loaded: dict[str, int]) -> list[str]:
    """Write config.json, once everything is ready to start. Return notes for the user. `config` has all settings, and
    `typed` only those that the user typed. `loaded` has checksums of the rows and of the weights of --model and of the
    reference."""
    out = Path(config.out)
    before = start.before or {"run_id": uuid.uuid4().hex, "beginnings": []}
    # In a checkpoint are the weights that are trained, and a reference that follows them.
    is_saved = {"weights": not config.lora_rank, "reference": bool(config.ref_sync_every)}
    needed = [name for name in loaded if start.after_step and not is_saved.get(name)]
    if other := [name for name in needed if loaded[name] != before["loaded"].get(name)]:
        raise UserError(f"other {' and '.join(other)} than when the run in {out} was saved: restore them")
    for torn in [*out.glob("*.partial"), *out.glob("checkpoint/*.partial")]:  # left by a run that was killed
        shutil.rmtree(torn, ignore_errors=True)
    now = provenance() | {"digests": digests(config), "loaded": loaded}
    beginnings = [*before["beginnings"], {"after_step": start.after_step} | now]
    given = {name: x for name, x in vars(typed).items() if x != getattr(Config(), name)}
    settings = vars(replace(config, overwrite=False))  # it belongs to this start, and not to the run
    about = {"run_id": before["run_id"], "given": given, "settings": settings} | now | {"beginnings": beginnings}
    # JSON has no infinity, but a number that is too large for a float is read as one.
    write_text(out / "config.json", json.dumps(about, indent=2).replace('": Infinity', '": 1e999') + "\n")
    old, new = facts(start.before or about), facts(about)  # a new run is compared with itself: nothing has changed
    changed = [name for name in old | new if old.get(name) != new.get(name)]
    return start.notes + [f"{name} was {old.get(name)}, now {new.get(name)}" for name in changed]


def facts(about: dict) -> dict:
    """Return what is told if it has changed since the last start of a run. `about` is a config.json."""
    code = {"commit": about["commit"], "code": about["code"]}
    return code | about["versions"] | about["hardware"] | about["digests"] | about.get("loaded", {}) | about["settings"]


def fingerprint_of_start(config: Config) -> dict:
    """Return what must be the same on all ranks when they start. --out may differ, as only the first rank uses it."""
    settings = {f"--{name}": x for name, x in vars(config).items() if name != "out"}
    return settings | {"the code": [digest_of_code(), *digests(config).values()]}


def checksum(rows: list[dict]) -> int:
    """Return a number that depends on the rows and on their order. For an object that JSON cannot represent, only its
    type counts, because the repr may differ between processes."""
    texts = (json.dumps([i, row], default=lambda x: type(x).__name__, skipkeys=True) for i, row in enumerate(rows))
    return sum(zlib.crc32(x.encode()) for x in texts)


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
    """Return a digest of each Python file that the settings name."""
    return {f"digest of {path}": digest_of([path]) for path in inputs(config) if path.suffix == ".py"}


def digest_of_code() -> str:
    """Return a digest of all files that decide what a run computes, whether or not they are committed."""
    root, kinds = Path(__file__).parents[1], ("*.py", "fast/*.py", "infra/*.py", "tasks/*.py")
    return digest_of(file for kind in kinds for file in sorted(root.glob(kind)) if not file.name.startswith("test_"))


def digest_of(files: Iterable[Path]) -> str:
    return sha256("".join(sha256_of(file) for file in files).encode()).hexdigest()[:16]


def sha256_of(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


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
