"""Save a run so that it can be continued, and save the trained model.

    out/checkpoint/000040/    weights, those of the reference, the optimizer's state, Run.state, state.json; SHA256SUMS
    out/model/                the trained model, an ordinary `from_pretrained` folder

A checkpoint appears as a whole or not at all: it is written under another name, flushed to disk, and then renamed. It
holds no random state, because every random number of a run is a function of (seed, step). Weights are safetensors and
the rest is JSON, so nothing is unpickled. Left out: state that an optimizer adds after its first update, and what it
keeps in its groups of parameters, which come from the code.
"""

import json
import shutil
import warnings
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import GenerationConfig, PreTrainedModel

from batch import Group
from config import UserError
from fast.kept_sets import KeptSets
from infra import ranks
from infra.lora import adapted_layers, save_adapters, trained
from infra.run_folder import checkpoint_of, flush, saved_steps, sha256_of, write_text
from infra.shard import is_sharded, whole_weights
from rollout import Completion

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process writes a checkpoint without a group
FILE_BYTES = 2**28  # of each rank
FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
GROUPS = {kind.__name__: kind for kind in (Group, Completion, KeptSets)}
ARRAYS = {  # what makes them again from a tensor
    "Tensor": lambda x: x,
    "ndarray": Tensor.numpy,
    "array": lambda x: array("i" if x.dtype == torch.int32 else "q", x.tolist()),
}


def save(
    out: Path, step: int, models: dict[str, nn.Module], optimizer: Optimizer, cursor: int, state: dict, keep: int = 1
) -> None:
    """Save everything that step + 1 needs. All ranks must call this. Each writes a part: its own part, if the model is
    sharded."""
    folder, first, tensors = checkpoint_of(out, step), ranks.rank() == 0, {}
    parts = {name: trained(model) for name, model in models.items()}
    if optimizer.state:  # otherwise PyTorch would make an update to find out what the optimizer keeps
        parts["optimizer"] = as_tensors(state_dict.get_optimizer_state_dict(models["model"], optimizer, options=FLAT))
    with ranks.fail_together():
        for part, named in parts.items():
            for name, x in named.items():
                if not (x.to_local() if isinstance(x, DTensor) else x).isfinite().all():
                    raise UserError(f"after step {step} {name} of the {part} is not finite: nothing was saved")
        about = {"cursor": cursor, "optimizer": type(optimizer).__name__, "state": state}
        comes_back = False
        with suppress(RuntimeError, TypeError, ValueError):  # a sparse tensor, an odd key, a cycle
            text = json.dumps(about, indent=2, default=partial(_as_json, tensors=tensors))
            comes_back = repr(_from_text(text, tensors)) == repr(about)  # JSON has no tuples, for instance
        if not comes_back:
            raise UserError("run.state would not come back as it is: it takes JSON, tensors, arrays and Groups")
    with whole_folder(folder) as partial_folder:
        if first:
            save_file(tensors, partial_folder / "state.safetensors")
            write_text(partial_folder / "state.json", text)
        for name, part in parts.items():
            writer = HuggingFaceStorageWriter(partial_folder / name, files_of(part), save_distributed=True)
            dcp.save(part, storage_writer=writer)
        # Each rank reads what it has written. For one rank, that would take minutes for a large model.
        sums = ranks.gather(checksums(partial_folder, f"shard-{ranks.rank() + 1:05}-*", rest=first))
        if first:
            write_text(partial_folder / "SHA256SUMS", "\n".join([*sums, ""]))
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
    ranks.on_first(check, folder)
    parts, flat = {name: trained(model) for name, model in models.items()}, {}
    if (folder / "optimizer").exists():
        # PyTorch makes an update at a learning rate of 0, so that the optimizer has all of its state to load into.
        flat = state_dict.get_optimizer_state_dict(models["model"], optimizer, options=FLAT)
        parts["optimizer"] = as_tensors(flat)
    with ranks.fail_together():
        try:
            about = _from_text((folder / "state.json").read_text(), load_file(folder / "state.safetensors"))
        except (KeyError, TypeError) as error:  # a class that is not in GROUPS, a field that one of them does not have
            raise UserError(f"the checkpoint {folder} does not fit the model or code: run.state: {error}") from None
        if about["optimizer"] != (kind := type(optimizer).__name__):
            raise UserError(f"the checkpoint {folder} is of a run with {about['optimizer']}, not {kind}")
        known = {f"{name} of the {part} {[*x.shape]}" for part, named in parts.items() for name, x in named.items()}
        if differing := shapes_in(folder) ^ known:
            raise UserError(f"the checkpoint {folder} does not fit the model or code: {sorted(differing)[:3]}")
    for name, part in parts.items():
        dcp.load(part, storage_reader=HuggingFaceStorageReader(folder / name))
    if flat:
        loaded = {name: x if isinstance(flat[name], Tensor) else x.item() for name, x in parts["optimizer"].items()}
        state_dict.set_optimizer_state_dict(models["model"], optimizer, flat | loaded, options=FLAT)
    return about["cursor"], about["state"]


def load_weights(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Load only the weights of the policy. A rank can call this by itself."""
    check(folder)
    dcp.load(trained(model), storage_reader=HuggingFaceStorageReader(folder / "model"), no_dist=True)
    return model


def as_tensors(flat: dict[str, Any]) -> dict[str, Tensor]:
    """The state of each parameter in an optimizer's flat state dict. Plain numbers become tensors of 64 bits."""
    return {name: _as_tensor(x) for name, x in flat.items() if name.startswith("state.")}


def _as_tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.from_numpy(np.array(x))


def shapes_in(folder: Path) -> set[str]:
    """The names of all tensors that a checkpoint holds in folders, each with its folder and its shape."""
    parts = {path.name: HuggingFaceStorageReader(path).read_metadata() for path in folder.iterdir() if path.is_dir()}
    tensors = [(part, *item) for part, about in parts.items() for item in about.state_dict_metadata.items()]
    return {f"{name} of the {part} {[*x.size]}" for part, name, x in tensors}


def files_of(part: dict[str, Tensor]) -> dict[str, int]:
    """-> the number of the file for each tensor. Files are small, as a rank holds its part of one twice to write it."""
    before = accumulate((x.nbytes for x in part.values()), initial=0)
    return {name: 1 + n // (FILE_BYTES * ranks.world()) for name, n in zip(part, before)}


def checksums(folder: Path, shards: str = "shard-*", rest: bool = True) -> list[str]:
    """A line for each file, in the format of sha256sum: for those of these shards, and for the rest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    chosen = [path for path in files if path.match(shards) or (rest and not path.match("shard-*"))]
    return [f"{sha256_of(path)}  {path.relative_to(folder)}" for path in chosen]


def check(folder: Path) -> None:
    """Raise an error if a file is not as it was written."""
    sums = folder / "SHA256SUMS"
    written = sums.read_text(errors="replace").split("\n") if sums.exists() else []
    if differing := {*written} ^ {*checksums(folder), ""}:
        advice = "without it the run goes on from the one before or, if it is not finished, from the first step"
        raise UserError(f"the checkpoint {folder} is damaged ({min(differing)}): restore it, or move it away: {advice}")


def _as_json(x: Any, tensors: dict[str, Tensor]) -> dict:
    """JSON in place of what it does not have. Numbers of tensors and arrays go to `tensors`, under a name."""
    kind = type(x).__name__
    if type(x) in GROUPS.values():
        return {"<class>": kind} | vars(x)
    if kind not in ARRAYS:
        raise UserError(f"run.state holds a {kind}: it takes JSON, tensors, arrays and Groups")
    name = str(len(tensors))
    tensors[name] = _as_tensor(x).detach().clone(memory_format=torch.contiguous_format)
    return {"<class>": kind, "name": name, "device": tensors[name].device.type}


def _from_text(text: str, tensors: dict[str, Tensor]) -> dict:
    def make(x: dict) -> Any:
        kind = x.pop("<class>", None)
        if kind in ARRAYS:
            return ARRAYS[kind](tensors[x["name"]].to(x["device"]))
        return GROUPS[kind](**x) if kind else x

    return json.loads(text, object_hook=make)


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """All ranks must call this. The first one writes."""
    weights = whole_weights(model) if is_sharded(model) and not adapted_layers(model) else None
    with whole_folder(folder) as partial_folder:
        if ranks.rank() == 0 and adapted_layers(model):
            save_adapters(partial_folder, model)
            tokenizer.save_pretrained(partial_folder)
        elif ranks.rank() == 0:
            own, model.generation_config = model.generation_config, GenerationConfig()
            model.save_pretrained(partial_folder, state_dict=weights)
            model.generation_config = own
            tokenizer.save_pretrained(partial_folder)
            # These are the settings that came with the model. `save_pretrained` might refuse them.
            write_text(partial_folder / "generation_config.json", own.to_json_string())


# ---- Folders that appear whole or not at all ----


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """The ranks write into the temporary folder that this yields. At the end it is flushed to disk and renamed to
    `folder` in one call. If anything fails, `folder` stays as it was, and the next start deletes what is left."""
    partial_folder, first = folder.with_name(folder.name + ".partial"), ranks.rank() == 0
    if first:
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
    ranks.barrier()  # it is there
    yield partial_folder
    ranks.barrier()  # all have written
    if first:
        for path in [*partial_folder.rglob("*"), partial_folder]:
            flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial_folder.rename(folder)
        flush(folder.parent)
