"""The folder of a run: what it contains, which runs may be resumed in it, and how its files are written.

    out/config.json           all settings; those given explicitly; a record of each start: commit and versions
    out/metrics.jsonl         a line for each step
    out/samples.jsonl         completions
    out/checkpoint/000040/    everything that is needed to resume after step 40 (see checkpoint.py)
    out/model/                the trained model, in fp32

Nothing is written before everything is ready to start. The same command resumes a run. A command with other settings
is refused, unless only settings in MAY_CHANGE differ. If the commit, the versions or the files that the run reads have
changed, this is recorded and a note is printed. The results of a finished run are only printed again. --overwrite
renames the folder and starts over.
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
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from hashlib import file_digest, sha256
from pathlib import Path

import torch
import transformers

from config import Config, UserError, resolve

MAY_CHANGE = {each.name for each in fields(Config) if each.metadata["may_change"]}  # when a run is resumed


# ---- What is in a folder ----


def step_to_continue_after(config: Config) -> int | None:
    """Return the step after which the run in `config.out` is resumed: 0 if it starts from the beginning, None if it is
    finished. Raise a UserError if this run must not write there. Nothing is written."""
    out = Path(config.out)
    if (out / ".lock").exists():  # otherwise no process has ever written here
        lock(out)  # waits for a process that is still writing
    others = [path for path in out.glob("*") if path.name != ".lock" and path.suffix != ".partial"]
    if others and "settings" not in content_of(out / "config.json"):
        raise UserError(f"{out} contains something that is not a run: give another --out")
    kept = None if starts_over(config) else kept_steps(out)
    if kept is None:
        return 0
    there = settings_of(out)
    if changed := other_settings(there, config):
        values = [f"--{name} {getattr(there, name)} there, {getattr(config, name)} here" for name in changed]
        raise UserError(f"the run in {out} has other settings, and only --overwrite starts over: {'; '.join(values)}")
    # A run with --steps 0 writes no model. It is finished once it has logged its evaluation. At this line it has:
    # without an evaluation, kept_steps gives None, and this function has returned above.
    is_finished = (out / "model").exists() or there.steps == 0
    if is_finished and config.steps == kept:
        return None
    if config.steps < kept:
        raise UserError(f"--steps {config.steps}: the run in {out} has already made {kept}")
    if is_finished and not saved_steps(out):
        raise UserError(f"--steps {config.steps}: the run in {out} is finished, and has no checkpoint to resume from")
    return max(saved_steps(out), default=0)


def kept_steps(out: Path) -> int | None:
    """Return how many steps of the run are kept when it is resumed: all steps of a finished run, and otherwise those up
    to its newest checkpoint. Return 0 if it has no checkpoint but has results: the log of a step or, with --steps 0, an
    evaluation. Return None if there is no run or it has no results, so that nothing is lost by starting over."""
    if (there := settings_of(out)) is None:
        return None
    if saved := saved_steps(out):
        return saved[-1]  # of a finished run, this is the last step
    if (out / "model").exists():
        return there.steps
    # A line with step 0 is the first evaluation. It is worth keeping only if the run was to do nothing else. So return
    # 0 if there is a line of a later step, or if the run has --steps 0 and there is any line.
    return 0 if any(line["step"] > 0 or there.steps == 0 for line in read_lines(out / "metrics.jsonl")) else None


def other_settings(there: Config, here: Config) -> list[str]:
    """Return the names of the settings that differ although a resumed run must keep them."""
    # If one of the runs is only an evaluation, its result also depends on settings that a training run may change.
    both_train = there.steps != 0 and here.steps != 0
    may_change = MAY_CHANGE if both_train else MAY_CHANGE - {"steps", "eval_prompts", "eval_k"}
    return [name for name in vars(here) if getattr(there, name) != getattr(here, name) and name not in may_change]


def inputs(config: Config) -> list[Path]:
    """Return the files and folders that the settings name."""
    named = [config.model, config.data, config.eval_data, *(name.rpartition(":")[0] for name in config.reward)]
    return [Path(path).resolve() for path in named if path and Path(path).exists()]


def checkpoint_of(out: Path, step: int) -> Path:
    return out / "checkpoint" / f"{step:06d}"


def saved_steps(out: Path) -> list[int]:
    """Return the steps after which a complete checkpoint was saved, in ascending order."""
    return sorted(int(path.name) for path in (out / "checkpoint").glob("*") if path.name.isdigit())


def settings_of(out: Path) -> Config | None:
    """Return the settings of the run in this folder, or None if there is no run."""
    if (settings := content_of(out / "config.json").get("settings")) is None:
        return None
    if unknown := settings.keys() - vars(Config()).keys():
        raise UserError(f"the run in {out} has settings that this code does not know: {', '.join(sorted(unknown))}")
    settings = {name: float("inf") if x == "inf" else x for name, x in settings.items()}  # JSON has no infinity
    return resolve(Config(**settings), {}, on_gpu=False)


def given_in(file: Path) -> dict:
    """Return the settings in a file of the user. If the file is the config.json of a run, return only the settings that
    were given explicitly to that run, without those about its folder."""
    content = json.loads(file.read_text())
    if "given" not in content:
        return content
    return {name: x for name, x in content["given"].items() if name not in ("out", "overwrite")}


def content_of(file: Path) -> dict:
    """Return the content of a run's config.json, or an empty dict if there is no such file."""
    return json.loads(file.read_text()) if file.is_file() else {}


def read_lines(file: Path) -> list[dict]:
    """Return the lines of a .jsonl file, without a last one that was cut off when the run was killed."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


# ---- The start of a run ----


def begin(config: Config, given: Config, done: int) -> list[str]:
    """Take over the folder and write config.json, once everything is ready to start. Return notes for the user. `given`
    has the settings before `resolve`, and `config` those after it. The run continues after step
    `done`."""
    out, notes, beginnings = Path(config.out), [], []
    out.mkdir(parents=True, exist_ok=True)
    lock(out)
    if step_to_continue_after(config) != done:
        raise UserError(f"another process has written to {out} since this one started: start again")
    if starts_over(config) and "settings" in content_of(out / "config.json"):
        free = (out.with_name(f"{out.name}.replaced-{n}") for n in itertools.count(1))
        replaced = next(path for path in free if not path.exists())
        out.rename(replaced)
        out.mkdir()
        lock(out)
        notes.append(f"the run that was in {out}/ is in {replaced}/ now")
    for torn in [*out.glob("*.partial"), *out.glob("checkpoint/*.partial")]:  # left by a run that was killed
        shutil.rmtree(torn, ignore_errors=True)
    explicit = {name: x for name, x in vars(given).items() if x != getattr(Config(), name)}
    now = provenance() | {"digests": digests(config)}
    if kept_steps(out) is not None:
        notes += notes_on_changes(config, now)
        about, settings = content_of(out / "config.json"), vars(settings_of(out))
        beginnings = about["beginnings"]
        # Keep the settings that earlier commands gave, and add those that this command changes.
        explicit = about["given"] | {name: x for name, x in explicit.items() if settings[name] != x}
    beginnings = [*beginnings, {"after_step": done} | now]
    about = {"given": explicit, "settings": vars(config)} | now | {"beginnings": beginnings}
    # JSON has no infinity, but Python writes one, as Infinity. Replace it by the string "inf", which
    # `settings_of` turns back into a number.
    about = json.loads(json.dumps(about), parse_constant=lambda infinity: "inf")
    write_text(out / "config.json", json.dumps(about, indent=2) + "\n")
    return notes


def starts_over(config: Config) -> bool:
    """Return whether --overwrite applies. It applies to the first start only: when torchrun restarts the ranks after a
    failure, the run is resumed."""
    return config.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def notes_on_changes(config: Config, now: dict | None = None) -> list[str]:
    """Return a note for each change since the last start of the run. None of these changes keeps the run from being
    resumed. `now` is what `begin` has found out about this start."""
    now = now or (provenance() | {"digests": digests(config)})
    about = content_of(Path(config.out) / "config.json")
    before, after = ({"commit": x["commit"]} | x["versions"] | x["digests"] for x in (about, now))
    before |= vars(settings_of(Path(config.out)))
    # A setting that is still None, such as a budget that depends on the free memory, cannot be compared yet. And
    # --overwrite is not a setting of the run itself.
    after |= {name: x for name, x in vars(config).items() if x is not None and name != "overwrite"}
    return [f"{name} was {before.get(name)}, now {x}" for name, x in after.items() if before.get(name) != x]


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
    hardware = dict(gpu=gpu, cpu=(names or [platform.machine()])[0], cores=os.cpu_count())
    return {"commit": commit or None, "code": digest_of_code(), "versions": versions, "hardware": hardware}


def digest_of_code() -> str:
    """Return a digest of all files that decide what a run computes, whether or not they are committed."""
    root, kinds = Path(__file__).parents[1], ("*.py", "fast/*.py", "infra/*.py", "tasks/*.py")
    return digest_of(file for kind in kinds for file in sorted(root.glob(kind)) if "test" not in file.name)


def digests(config: Config) -> dict[str, str]:
    """Return a digest of each file, and of all files in each folder, that the run reads."""
    # Each path is a file or a folder. For a file, `glob` finds nothing. A folder itself is skipped by `digest_of`.
    return {f"digest of {path}": digest_of([path, *sorted(path.glob("*"))]) for path in inputs(config)}


def digest_of(paths: Iterable[Path]) -> str:
    return sha256("".join(sha256_of(path) for path in paths if path.is_file()).encode()).hexdigest()[:16]


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


# ---- One writer at a time; files that are either complete or absent ----


def lock(out: Path) -> None:
    """Make sure that only one process writes to a folder. The lock is released when that process ends, which may take a
    moment. Child processes that it leaves behind, such as those of a reward function, do not keep the lock."""
    descriptor = os.open(out / ".lock", os.O_RDWR | os.O_CREAT, 0o666)  # kept open: closing it would release the lock
    for _ in range(10):
        with suppress(BlockingIOError, PermissionError):
            return fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(1)
    raise UserError(f"another process is writing to {out}: wait for it, or give another --out")


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
