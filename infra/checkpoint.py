"""Runs on disk: claim a folder, save a run and continue it, save the trained model.

    out/config.json           settings, versions, commit, hardware
    out/checkpoint/000040/    weights, reference (where it is refreshed), the optimizer's state, and state.json
    out/model/                the trained model, an ordinary `from_pretrained` folder

A checkpoint appears whole or not at all: it is written beside, flushed to disk, and renamed. No random state is in it,
because every random number of a run is a function of (seed, step). Weights are safetensors and the rest is JSON:
nothing is unpickled. Left out: sharded, an optimizer's tensors that have neither its parameter's shape nor one value.
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
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from config import Config, UserError, resolve, settings_that_may_change
from infra import faults, ranks
from infra.shard import is_sharded, whole_weights

SETTINGS = [setting.name for setting in dataclasses.fields(Config)]

# ---- Runs ----

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
    there = _settings(out)
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
    _write_json(out / "config.json", {"settings": settings} | provenance())
    return notes


def made_steps(out: Path) -> int | None:
    """How many steps the run in this folder has made, in its newest checkpoint or, finished, altogether; None: no step
    at all, so that there is nothing to lose."""
    lines = [line for line in read_lines(out / "metrics.jsonl") + read_lines(out / "samples.jsonl") if line["step"] > 0]
    if latest(out) is not None:
        return latest(out)
    if (out / "model").exists():
        return lines[-1]["step"] if lines else _settings(out).steps
    return 0 if lines else None


def goes_on(config: Config) -> str:
    """What the same command would do now; nothing where it would not go on."""
    out = Path(config.out)
    there, done = _settings(out), latest(out)
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
    there = _settings(out)
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


def _settings(out: Path) -> Config | None:
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


def save(
    out: Path,
    step: int,
    model: nn.Module,
    reference: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    cursor: int,
    keep: int = 1,
) -> None:
    """Everything that step + 1 needs. Called on all ranks: each writes a part, of sharded tensors its own."""
    folder = out / "checkpoint" / f"{step:06d}"
    first = ranks.rank() == 0
    tensors, numbers = _optimizer_state(model, optimizer)
    parts = _weights(model, reference) | {"optimizer": tensors}
    _check_finite(parts, f"after step {step} {{}}: nothing was saved. Lower --learning_rate, or check the rewards")
    if first:
        for torn in folder.parent.glob("*.partial"):
            shutil.rmtree(torn)
        for name in ("metrics.jsonl", "samples.jsonl"):  # the lines up to this step must outlive a crash as well
            if (out / name).exists():
                _flush(out / name)
    with whole_folder(folder) as beside:
        for name, part in parts.items():
            if part:  # an optimizer may have no state
                _write_tensors(beside / name, part)
        if first:
            files = sorted(str(path.relative_to(beside)) for path in beside.rglob("*.safetensors"))
            state = {"cursor": cursor, "optimizer": type(optimizer).__name__, "numbers": numbers, "files": files}
            _write_json(beside / "state.json", state)
    if first:
        _flush(out)
        saved = [path for path in folder.parent.iterdir() if path.name.isdigit()]
        for old in sorted(saved, key=lambda path: int(path.name))[:-keep]:
            shutil.rmtree(old)


def load(out: Path, step: int, model: nn.Module, reference: nn.Module | None, optimizer: torch.optim.Optimizer) -> int:
    """Put everything back as `save` found it, on any number of ranks, sharded or not. -> the cursor"""
    folder = out / "checkpoint" / f"{step:06d}"
    with ranks.together():
        state = _read_state(folder)
        if state["optimizer"] != type(optimizer).__name__:
            raise UserError(
                f"the checkpoint {folder} is of a run with {state['optimizer']}, this one has "
                f"{type(optimizer).__name__}: go on with the code of that run, or give another --out"
            )
    parts = _weights(model, reference) | {"optimizer": {}}
    with _reading(folder):
        if (folder / "optimizer").exists():
            parts["optimizer"] = _room_for_state(folder / "optimizer", model)
        for name, part in parts.items():
            if part:
                _read_tensors(folder / name, part)
    _check_finite(parts, f"in the checkpoint {folder} {{}}: {_when_deleted(folder)}")
    _restore(optimizer, model, parts["optimizer"] | state["numbers"])
    return state["cursor"]


def _weights(model: nn.Module, reference: nn.Module | None) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint, by the folder they are in; tied weights once."""
    models = {"model": model} if reference is None else {"model": model, "reference": reference}
    return {name: dict(one.named_parameters()) for name, one in models.items()}


def _check_finite(parts: dict[str, dict[str, Tensor]], message: str) -> None:
    """On all ranks, each of which looks at its own part of what is sharded."""
    with ranks.together():
        for part, tensors in parts.items():
            for name, x in tensors.items():
                if not (x.to_local() if isinstance(x, DTensor) else x).isfinite().all():
                    raise UserError(message.format(f"{name} of the {part} is not finite (NaN or infinity)"))


def _optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """-> tensors and plain numbers, as `exp_avg.NAME OF THE PARAMETER`"""
    state = {f"{key}.{n}": x for n, p in model.named_parameters() for key, x in optimizer.state.get(p, {}).items()}
    tensors = {key: x for key, x in state.items() if isinstance(x, Tensor)}
    return tensors, {key: x for key, x in state.items() if key not in tensors}


def _room_for_state(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Zeros for each tensor of the optimizer in this folder, sharded as its parameter is."""
    parameters, room = dict(model.named_parameters()), {}
    for key, saved in HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata.items():
        p = parameters[key.partition(".")[2]]
        if saved.size == p.shape:
            room[key] = torch.zeros_like(p, dtype=saved.properties.dtype)
        else:
            room[key] = torch.zeros(saved.size, dtype=saved.properties.dtype)
    return room


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    with _one_process_needs_no_distributed():
        writer = HuggingFaceStorageWriter(folder, save_distributed=True)
        dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())


def _read_tensors(folder: Path, into: dict[str, Tensor]) -> None:
    with _one_process_needs_no_distributed():
        dcp.load(into, storage_reader=HuggingFaceStorageReader(folder), no_dist=not dist.is_initialized())


@contextmanager
def _one_process_needs_no_distributed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _restore(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    by_number: dict[int, dict] = {}
    for key, value in state.items():
        kind, _, name = key.partition(".")
        by_number.setdefault(order.index(name), {})[kind] = value
    # It knows on which device it wants what.
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})


def _read_state(folder: Path) -> dict:
    with _reading(folder):
        state = json.loads((folder / "state.json").read_text())
        for file in state.pop("files"):
            safe_open(folder / file, "pt")  # fails where it is not there, or not whole
        state["cursor"], state["optimizer"], state["numbers"]  # are there
    return state


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        SafetensorError,
        dcp.CheckpointException,
    ) as error:
        file = f"{folder}/state.json: " if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(
            f"the checkpoint {folder} is damaged ({file}{_cause(error)}): {_when_deleted(folder)}"
        ) from error


def _when_deleted(folder: Path) -> str:
    others = [int(path.name) for path in folder.parent.iterdir() if path.name.isdigit() and path != folder]
    if others:
        return f"delete that folder, and the same command goes on after step {max(others)}"
    if (folder.parent.parent / "model").exists():
        return "delete that folder; there is no other one, only the trained model beside it"
    return "delete that folder, and the same command starts from the first step"


def _cause(error: BaseException) -> str:
    """What lies under the library's report of all ranks, in one line."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, dcp.CheckpointException) else [error]
    return " ".join(str(causes[0]).split())


# ---- The trained model ----


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Called on all ranks; the first one writes."""
    weights = whole_weights(model) if is_sharded(model) else None
    own = model.generation_config
    with whole_folder(folder) as beside:
        if ranks.rank() == 0:
            model.generation_config = GenerationConfig()
            model.save_pretrained(beside, state_dict=weights)
            model.generation_config = own
            tokenizer.save_pretrained(beside)
            # As it came with the model, which need not be what `save_pretrained` finds valid.
            write_text(beside / "generation_config.json", own.to_json_string())


# ---- Files that are there whole or not at all ----

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


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({name: x.detach().contiguous() for name, x in tensors.items()}, path)
    return path


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """The ranks write into the folder beside that this gives. At the end it becomes `folder` at once, and is on disk;
    or nothing does."""
    beside, first = folder.with_name(folder.name + ".partial"), ranks.rank() == 0
    try:
        if first:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
        ranks.gather([])  # it is there
        yield beside
        ranks.gather([])  # all have written
        if first:
            for path in [*beside.rglob("*"), beside]:
                _flush(path)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
            _flush(folder.parent)
    except (OSError, SafetensorError, dcp.CheckpointException) as error:  # a full disk, no permission
        if isinstance(error, dcp.CheckpointException) and not first:
            raise faults.FailedElsewhere(_cause(error)) from error  # every rank is told
        shutil.rmtree(beside, ignore_errors=True)
        raise OSError(f"{folder} could not be written: {_cause(error)}") from error


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_json(path: Path, content: dict) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text)
    _flush(beside)
    beside.rename(path)
    _flush(path.parent)
