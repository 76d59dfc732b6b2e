"""Save a run so that it can be resumed, and save the trained model.

    out/checkpoint/000040/    all that is needed to resume after step 40:
        model/, reference/    the weights of the model and of the reference, if there is one
        optimizer/            the state of the optimizer
        state.json            how many prompts were drawn, Run.state, in which user code keeps its own values, and
                              the id of the run
        state.safetensors     the tensors of Run.state
        SHA256SUMS            the checksums of all these files
    out/model/                the trained model, an ordinary `from_pretrained` folder

A checkpoint is either complete or absent: it is written under a temporary name, flushed to disk, and then renamed. It
contains no random state, because every random number of a run is a function of the seed and the step. Weights are saved
as safetensors and everything else as JSON, so that loading never unpickles anything. The settings in the optimizer's
parameter groups are not saved, because the code sets them again. Not supported: optimizers that add state after their
first update.
"""

import json
import shutil
import warnings
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import GenerationConfig, PreTrainedModel

from batch import Group
from config import UserError
from fast.kept_sets import KeptSets
from infra import ranks
from infra.lora import adapted_layers, save_adapters, trained_tensors
from infra.run_folder import checkpoint_of, flush, run_id, saved_steps, sha256_of, write_text
from infra.shard import whole_weights
from rollout import Completion

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # PyTorch warns if a single process saves
FILE_BYTES = 2**28  # about the size of a file of weights; each rank writes its own files
FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
RECORDS = {kind.__name__: kind for kind in (Group, Completion, KeptSets)}  # dataclasses that Run.state may contain


def as_array(x: Tensor) -> array:
    return array("i" if x.dtype == torch.int32 else "q", x.tolist())


# For each type of array that Run.state may contain: how it is made from a tensor.
ARRAYS = {"Tensor": lambda x: x, "ndarray": Tensor.numpy, "array": as_array}


def save(
    out: Path, step: int, models: dict[str, nn.Module], optimizer: Optimizer, cursor: int, state: dict, keep: int = 1
) -> None:
    """Save everything that step + 1 needs. `cursor` is the number of prompts that the run has drawn, and `state` is
    Run.state. All ranks must call this, because each of them writes a part of the weights: its own shard, if the model
    is sharded. Only the newest `keep` checkpoints stay."""
    first = ranks.rank() == 0
    tensors_of_state: dict[str, Tensor] = {}  # `_as_json` adds the tensors to it
    parts = {part: trained_tensors(model) for part, model in models.items()}
    if optimizer.state:  # before the first update there is none, and the next line would make an update to create it
        parts["optimizer"] = as_tensors(state_dict.get_optimizer_state_dict(models["model"], optimizer, options=FLAT))
    with ranks.fail_together():
        for part, tensors in parts.items():
            for name, x in tensors.items():
                if not (x.to_local() if isinstance(x, DTensor) else x).isfinite().all():
                    raise UserError(f"after step {step} {name} of the {part} is not finite: nothing was saved")
        about = {"run_id": run_id(out), "cursor": cursor, "state": state}
        loaded = None
        # Load what would be written, and compare. If a value cannot be written as JSON, the error is ignored here, and
        # `loaded` stays None, which differs from `about`.
        with suppress(KeyError, RuntimeError, TypeError, ValueError):
            text = json.dumps(about, indent=2, default=lambda x: _as_json(x, tensors_of_state))
            loaded = _from_text(text, tensors_of_state)
        # Compare the reprs, because == does not work on tensors. They also differ if a value would come back as another
        # type. JSON turns a tuple into a list, for instance.
        if repr(loaded) != repr(about):
            raise UserError("run.state would be loaded differently: use only JSON, tensors, arrays and Groups in it")
    with whole_folder(checkpoint_of(out, step)) as partial_folder:
        if first:
            save_file(tensors_of_state, partial_folder / "state.safetensors")
            write_text(partial_folder / "state.json", text)
        for part, tensors in parts.items():
            writer = HuggingFaceStorageWriter(partial_folder / part, files_of(tensors), save_distributed=True)
            dcp.save(tensors, storage_writer=writer)
        # Each rank hashes the shards that it has written, and the first rank also hashes all other files. For a large
        # model, one rank would need minutes to hash everything.
        sums = ranks.gather(checksums(partial_folder, f"shard-{ranks.rank() + 1:05}-*", rest=first))
        if first:
            write_text(partial_folder / "SHA256SUMS", "\n".join([*sums, ""]))
            for path in [*out.glob("*.jsonl"), out]:  # the lines up to this step must survive a crash as well
                flush(path)
    if first:
        for saved in saved_steps(out)[:-keep]:
            old = checkpoint_of(out, saved)
            # If the process is killed here, what is left must not look like a checkpoint, so it is renamed first.
            shutil.rmtree(old.rename(old.with_suffix(".partial")))


def load(out: Path, step: int, models: dict[str, nn.Module], optimizer: Optimizer) -> tuple[int, dict]:
    """Load a checkpoint into the models and the optimizer, and return the cursor and Run.state. The number of ranks and
    --shard may differ from those of the run that saved it."""
    folder = checkpoint_of(out, step)
    ranks.on_first(check, folder)
    flat, parts = {}, {part: trained_tensors(model) for part, model in models.items()}
    if (folder / "optimizer").exists():
        # This makes PyTorch create the optimizer's state, by an update at a learning rate of 0.
        flat = state_dict.get_optimizer_state_dict(models["model"], optimizer, options=FLAT)
        parts["optimizer"] = as_tensors(flat)
    with ranks.fail_together():
        about = _from_text((folder / "state.json").read_text(), load_file(folder / "state.safetensors"))
        if about["run_id"] != run_id(out):
            raise UserError(f"the checkpoint {folder} is of another run: move it away")
        readers = {path.name: HuggingFaceStorageReader(path) for path in folder.iterdir() if path.is_dir()}
        saved = [(part, reader.read_metadata().state_dict_metadata) for part, reader in readers.items()]
        # Describe each tensor in the checkpoint, and each one that is expected. What is only in one set is an error.
        there = {f"{name} of the {part} {[*x.size]}" for part, tensors in saved for name, x in tensors.items()}
        here = {f"{name} of the {part} {[*x.shape]}" for part, tensors in parts.items() for name, x in tensors.items()}
        if differing := there ^ here:
            raise UserError(f"the checkpoint {folder} does not fit the model or code: {sorted(differing)[:3]}")
    for part, tensors in parts.items():
        dcp.load(tensors, storage_reader=readers[part])
    if flat:
        # Numbers were saved as tensors, so turn them back. The settings of the parameter groups, which were not saved,
        # come from `flat`.
        loaded = {name: x if isinstance(flat[name], Tensor) else x.item() for name, x in parts["optimizer"].items()}
        state_dict.set_optimizer_state_dict(models["model"], optimizer, flat | loaded, options=FLAT)
    return about["cursor"], about["state"]


def load_weights(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Load only the weights of the trained model, and return the model. No other rank has to take part."""
    check(folder)
    dcp.load(trained_tensors(model), storage_reader=HuggingFaceStorageReader(folder / "model"), no_dist=True)
    return model


def as_tensors(flat: dict[str, Any]) -> dict[str, Tensor]:
    """Return the entries of an optimizer's flat state dict that belong to a parameter. Only tensors can be saved, so
    numbers become tensors of 64 bits."""
    return {name: _as_tensor(x) for name, x in flat.items() if name.startswith("state.")}


def _as_tensor(x: Any) -> Tensor:
    return x if isinstance(x, Tensor) else torch.from_numpy(np.array(x))


def files_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Assign each tensor to a file, by number. Each rank writes one file for each number, with the rank's own parts of
    the tensors that have this number. Files are small, because PyTorch copies all tensors of a file in memory before it
    writes them."""
    before = accumulate((x.nbytes for x in tensors.values()), initial=0)
    # The tensors that share a number are split among the files of all ranks. Together they have about FILE_BYTES times
    # the number of ranks, so that each file has about FILE_BYTES.
    return {name: 1 + n // (FILE_BYTES * ranks.world()) for name, n in zip(tensors, before)}


def checksums(folder: Path, shards: str = "shard-*", rest: bool = True) -> list[str]:
    """Return a line for each file, in the format of sha256sum: for the shards that match the pattern and, with `rest`,
    for all files that are not shards."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "SHA256SUMS")
    chosen = [path for path in files if path.match(shards) or (rest and not path.match("shard-*"))]
    return [f"{sha256_of(path)}  {path.relative_to(folder)}" for path in chosen]


def check(folder: Path) -> None:
    """Raise a UserError if any file of the checkpoint is missing, or is not as it was written."""
    written = (folder / "SHA256SUMS").read_text(errors="replace").split("\n")
    # The file ends with a newline, so `written` also has an empty string, which is added to the other set.
    if differing := {*written} ^ {*checksums(folder), ""}:
        raise UserError(f"the checkpoint {folder} is damaged ({min(differing)}): restore it, or move it away")


def _as_json(x: Any, tensors: dict[str, Tensor]) -> dict:
    """Describe an object that is not of a JSON type. An object of a class in RECORDS is described by its fields. Any
    other object is converted to a tensor, which is added to `tensors`. A type that cannot become one raises an error
    here, and a type that is not in ARRAYS raises an error in `_from_text`."""
    kind = type(x).__name__
    if type(x) in RECORDS.values():
        return {"<class>": kind} | vars(x)
    name = str(len(tensors))
    tensors[name] = _as_tensor(x).detach().clone(memory_format=torch.contiguous_format)
    return {"<class>": kind, "name": name, "device": tensors[name].device.type}


def _from_text(text: str, tensors: dict[str, Tensor]) -> dict:
    """Rebuild the object that was turned into this text and these tensors with the help of `_as_json`."""

    def make(x: dict) -> Any:
        kind = x.pop("<class>", None)
        if kind is None:
            return x
        return RECORDS[kind](**x) if kind in RECORDS else ARRAYS[kind](tensors[x["name"]].to(x["device"]))

    return json.loads(text, object_hook=make)


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Save the trained model. With LoRA, save only its adapters. All ranks must call this. The first one writes."""
    weights = whole_weights(model) if isinstance(model, FSDPModule) and not adapted_layers(model) else None
    with whole_folder(folder) as partial_folder:
        if ranks.rank() > 0:
            return  # at the end of the block, `whole_folder` waits for the first rank
        tokenizer.save_pretrained(partial_folder)
        if adapted_layers(model):
            save_adapters(partial_folder, model)
        else:
            # `save_pretrained` may refuse the generation settings that came with the model, so they are written here.
            own, model.generation_config = model.generation_config, GenerationConfig()
            model.save_pretrained(partial_folder, state_dict=weights)
            model.generation_config = own  # a run may continue after the model is saved
            write_text(partial_folder / "generation_config.json", own.to_json_string())


# ---- Folders that are either complete or absent ----


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder for the ranks to write into. At the end of the block, flush it to disk and rename it to
    `folder`. If the block fails, `folder` stays as it was, and the next start of the run deletes the temporary one."""
    partial_folder, first = folder.with_name(folder.name + ".partial"), ranks.rank() == 0
    if first:
        shutil.rmtree(partial_folder, ignore_errors=True)
        partial_folder.mkdir(parents=True)
    ranks.wait()  # no rank writes before the folder exists
    yield partial_folder
    ranks.wait()  # until all ranks have written
    if first:
        for path in [*partial_folder.rglob("*"), partial_folder]:
            flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        partial_folder.rename(folder)
        flush(folder.parent)
