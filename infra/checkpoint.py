"""Save a run so that it can be continued, and save the trained model.

    out/checkpoint/000040/    weights, those of the reference, the optimizer's state, Run.state, state.json; SHA256SUMS
    out/model/                the trained model, an ordinary `from_pretrained` folder

A checkpoint appears as a whole or not at all: it is written under another name, flushed to disk, and then renamed. It
holds no random state, because every random number of a run is a function of (seed, step). Weights are safetensors and
the rest is JSON, so nothing is unpickled. Left out: with shards, tensors of an optimizer that have neither the shape of
their parameter nor a single value.
"""

import json
import shutil
import warnings
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import file_digest
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import GenerationConfig, PreTrainedModel

from batch import Group
from config import UserError
from fast.kept_sets import KeptSets
from infra import faults, ranks
from infra.run_folder import checkpoint_of, flush, saved_steps, write_text
from infra.shard import is_sharded, whole_weights
from rollout import Completion

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError, dcp.CheckpointException)
DELETE = "delete that folder, and the same command goes on from the one before, or from the first step"
FILE_BYTES = 2**28  # of each rank
GROUPS = {kind.__name__: kind for kind in (Group, Completion, KeptSets)}
LONG = {  # fields of these, with what makes them again
    **dict.fromkeys(("prompt_ids", "ids", "logp", "entropy", "written"), list),
    "words": partial(array, "i"),
    "offsets": partial(array, "q"),
}


def save(
    out: Path, step: int, models: dict[str, nn.Module], optimizer: Optimizer, cursor: int, state: dict, keep: int = 1
) -> None:
    """Save everything that step + 1 needs. All ranks must call this: each writes a part, namely its own of shards."""
    folder, first = checkpoint_of(out, step), ranks.rank() == 0
    named, tensors = models["model"].named_parameters(), {}
    numbers = {f"{key}.{name}": x for name, p in named for key, x in optimizer.state.get(p, {}).items()}
    parts = {name: dict(model.named_parameters()) for name, model in models.items()}
    parts["optimizer"] = {key: numbers.pop(key) for key, x in [*numbers.items()] if isinstance(x, Tensor)}
    with ranks.fail_together():
        for part, of_part in parts.items():
            for name, x in of_part.items():
                if not (x.to_local() if isinstance(x, DTensor) else x).isfinite().all():
                    told = f"after step {step} {name} of the {part} is not finite (NaN or infinity): nothing was saved"
                    raise UserError(f"{told}. Lower --learning_rate, or check the rewards")
        kept = _as_json(state, "run.state", tensors)
    with whole_folder(folder) as beside:
        for name, part in parts.items():
            if part:  # because an optimizer may have no state
                writer = HuggingFaceStorageWriter(beside / name, files_of(part), save_distributed=True)
                _call(dcp.save, part, storage_writer=writer)
        if first:
            save_file(tensors, beside / "state.safetensors")
            about = {"cursor": cursor, "optimizer": type(optimizer).__name__, "numbers": numbers, "state": kept}
            write_text(beside / "state.json", json.dumps(about, indent=2))
            write_text(beside / "SHA256SUMS", "\n".join([*checksums(beside), ""]))
            for lines in out.glob("*.jsonl"):  # the lines up to this step must survive a crash, too
                flush(lines)
    if first:
        flush(out)
        for saved in saved_steps(out)[:-keep]:
            old = checkpoint_of(out, saved)
            # It is renamed first, so that half of it, left by a kill, is not taken for a checkpoint.
            shutil.rmtree(old.rename(old.with_suffix(".partial")))


def load(out: Path, step: int, models: dict[str, nn.Module], optimizer: Optimizer) -> tuple[int, dict]:
    """Restore what `save` saved, on any number of ranks, sharded or not. -> cursor, state"""
    folder = checkpoint_of(out, step)
    parts = {name: dict(model.named_parameters()) for name, model in models.items()}
    ranks.on_first(check, folder)
    with ranks.fail_together(), _reading(folder):
        tensors = load_file(file) if (file := folder / "state.safetensors").exists() else {}
        about = json.loads((folder / "state.json").read_text(), object_hook=partial(_from_json, tensors=tensors))
        if about["optimizer"] != (kind := type(optimizer).__name__):
            raise UserError(f"the checkpoint {folder} is of a run with {about['optimizer']}, not {kind}")
    with _reading(folder):
        if (folder / "optimizer").exists():
            parts["optimizer"] = _room_for_state(folder / "optimizer", models["model"])
        for name, part in parts.items():
            if (folder / name).exists():  # earlier versions kept no reference that is not refreshed
                _call(dcp.load, part, storage_reader=HuggingFaceStorageReader(folder / name))
    _restore(optimizer, models["model"], parts.get("optimizer", {}) | about["numbers"])
    return about["cursor"], about.get("state", {})  # of an earlier version


def load_weights(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Load only the weights of the policy. A rank can call this by itself."""
    check(folder)
    with _reading(folder):
        _call(dcp.load, dict(model.named_parameters()), True, storage_reader=HuggingFaceStorageReader(folder / "model"))
    return model


def files_of(part: dict[str, Tensor]) -> dict[str, int]:
    """-> the number of the file for each tensor. Files are small, as a rank holds its part of one twice to write it."""
    before = accumulate((x.nbytes for x in part.values()), initial=0)
    return {name: 1 + n // (FILE_BYTES * ranks.world()) for name, n in zip(part, before)}


def checksums(folder: Path) -> list[str]:
    """A line for each file, in the format of sha256sum."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    return [f"{file_digest(path.open('rb'), 'sha256').hexdigest()}  {path.relative_to(folder)}" for path in files]


def check(folder: Path) -> None:
    """Raise an error if a file is not as it was written. Checkpoints of earlier versions have no checksums."""
    with _reading(folder):
        written = (folder / "SHA256SUMS").read_text() if (folder / "SHA256SUMS").exists() else ""
        if changed := {*written.splitlines()} - {*checksums(folder)}:
            raise ValueError(f"{min(changed).split()[-1]} is not as it was written")


def _call(call: Callable, part: dict[str, Tensor], alone: bool = False, **storage: Any) -> None:
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is one rank
        call(part, no_dist=alone or ranks.world() == 1, **storage)


def _as_json(x: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert what Run.state holds to JSON. Tensors and the long fields of groups go to `tensors`, under a name."""
    if type(x) in GROUPS.values():
        long = {field: torch.from_numpy(np.array(y)) for field, y in vars(x).items() if field in LONG and y is not None}
        return {"<class>": type(x).__name__} | _as_json(vars(x) | long, name, tensors)
    if type(x) is Tensor and not x.requires_grad:
        tensors[name] = x.clone(memory_format=torch.contiguous_format)
        return {"<class>": "Tensor", "name": name, "device": x.device.type}
    if type(x) is dict and all(type(key) is str and key != "<class>" for key in x):
        return {key: _as_json(y, f"{name}[{key!r}]", tensors) for key, y in x.items()}
    if type(x) is list:
        return [_as_json(y, f"{name}[{i}]", tensors) for i, y in enumerate(x)]
    if x is not None and type(x) not in (bool, int, float, str):
        raise UserError(f"{name} is a {type(x).__name__}: a checkpoint holds JSON, tensors without gradient, Groups")
    return x


def _from_json(x: dict, tensors: dict[str, Tensor]) -> Any:
    kind = x.pop("<class>", None)
    if kind == "Tensor":
        return tensors[x["name"]].to(x["device"])
    long = {field: LONG[field](y.tolist()) for field, y in x.items() if kind and field in LONG and y is not None}
    return GROUPS[kind](**x | long) if kind else x


def _room_for_state(folder: Path, model: nn.Module) -> dict[str, Tensor]:
    """Zeros in place of each tensor of the optimizer in this folder, sharded like its parameter."""
    parameters, room = dict(model.named_parameters()), {}
    for key, saved in HuggingFaceStorageReader(folder).read_metadata().state_dict_metadata.items():
        p = parameters[key.partition(".")[2]]
        like = p if saved.size == p.shape else torch.empty(saved.size)
        room[key] = torch.zeros_like(like, dtype=saved.properties.dtype)
    return room


def _restore(optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    by_number: dict[int, dict] = {}
    for key, value in state.items():
        kind, _, name = key.partition(".")
        by_number.setdefault(order.index(name), {})[kind] = value
    # The optimizer moves each value to the device where it needs it.
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise UserError(f"the checkpoint {folder} is damaged ({_cause(error)}): {DELETE}") from error


def _cause(error: BaseException) -> str:
    return str(error).strip().rpartition("\n")[2]  # the last line, below what the library reports of all ranks


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """All ranks must call this. The first one writes."""
    weights = whole_weights(model) if is_sharded(model) else None
    with whole_folder(folder) as beside:
        if ranks.rank() == 0:
            own, model.generation_config = model.generation_config, GenerationConfig()
            model.save_pretrained(beside, state_dict=weights)
            model.generation_config = own
            tokenizer.save_pretrained(beside)
            # These are the settings that came with the model. `save_pretrained` might refuse them.
            write_text(beside / "generation_config.json", own.to_json_string())


# ---- Files that are there whole or not at all ----


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """The ranks write into the temporary folder that this yields. At the end it is flushed to disk and renamed to
    `folder` in one call. If anything fails, `folder` stays as it was."""
    beside, first = folder.with_name(folder.name + ".partial"), ranks.rank() == 0
    try:
        if first:
            for torn in folder.parent.glob("*.partial"):
                shutil.rmtree(torn, ignore_errors=True)
            beside.mkdir(parents=True)
        ranks.barrier()  # it is there
        yield beside
        ranks.barrier()  # all have written
        if first:
            for path in [*beside.rglob("*"), beside]:
                flush(path)
            shutil.rmtree(folder, ignore_errors=True)
            beside.rename(folder)
            flush(folder.parent)
    except (OSError, SafetensorError, dcp.CheckpointException) as error:  # a full disk, no permission
        if isinstance(error, dcp.CheckpointException) and not first:
            raise faults.FailedElsewhere(_cause(error)) from error  # every rank is told
        shutil.rmtree(beside, ignore_errors=True)
        raise UserError(f"{folder} could not be written: {_cause(error)}") from error
