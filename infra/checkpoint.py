"""Save a run so that it can be resumed, and save the trained model.

    out/checkpoint/000040/    all that is needed to resume after step 40:
        model/, reference/    the weights of the model and of the reference, if there is one
        optimizer/            the state of the optimizer
        state.pt              how many prompts were drawn, Run.state, in which user code keeps its own values, the step,
                              and the id of the run
        SHA256SUMS            the checksums of all these files
    out/model/                the trained model, an ordinary `from_pretrained` folder

A checkpoint is either complete or absent: it is written under a temporary name, flushed to disk, and then renamed. It
contains no random state, because every random number of a run is a function of the seed and the step. It does not
contain the learning rate and the other settings of the optimizer either: the settings of the run decide these.

Loading a checkpoint executes nothing that is in it. Weights are safetensors, and from `state.pt`, PyTorch makes only
objects of the classes that are listed here. Not supported: optimizers that add state after their first update, because
`load` finds out from a first update what state there is.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.serialization import safe_globals
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, PreTrainedModel

from advantage import Group
from config import UserError
from infra import faults, ranks
from infra.lora import adapted_layers, save_adapters, trained_tensors
from infra.run_folder import checkpoint_of, config_json, flush, saved_steps, sha256_of, write_text
from infra.shard import whole_weights
from rollout import Completion

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # PyTorch warns if a single process saves
FILE_BYTES = 2**28  # about the size of a file of weights; each rank writes its own files
FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)

# What Run.state may contain, beside tensors and Python's numbers, texts, lists, tuples, sets and dictionaries. NumPy's
# arrays and numbers need classes of their own, and the functions that `__reduce__` names, which make them again.
CLASSES = [Group, Completion, np.ndarray, np.dtype, bytes]
CLASSES += [getattr(np.dtypes, name) for name in np.dtypes.__all__]
CLASSES += [x.__reduce__()[0] for x in (np.ones(1), np.float64(1))]


# ---- Checkpoints ----


def save(
    out: Path, step: int, models: dict[str, nn.Module], optimizer: Optimizer, cursor: int, state: dict, keep: int = 1
) -> None:
    """Save everything that step + 1 needs. `cursor` is the number of prompts that the run has drawn, and `state` is
    Run.state. All ranks must call this, because each of them writes a part of the weights: its own shard, if the model
    is sharded. Only the newest `keep` checkpoints stay."""
    first = ranks.rank() == 0
    # Before the first update the optimizer has no state, and `parts_of` would create it by an update.
    parts = parts_of(models, optimizer, with_optimizer=bool(optimizer.state))
    with ranks.fail_together():
        for part, tensors in parts.items():
            for name, x in tensors.items():
                if not (x.to_local() if isinstance(x, DTensor) else x).isfinite().all():
                    raise UserError(f"after step {step} {name} of the {part} is not finite: nothing was saved")
    with whole_folder(checkpoint_of(out, step)) as partial_folder:
        # The id of the run is there so that a checkpoint of another run is not taken for one of this run.
        about = {"run_id": config_json(out).get("run_id"), "step": step, "cursor": cursor, "state": state}
        ranks.on_first(write_state, partial_folder / "state.pt", about)
        for part, tensors in parts.items():
            writer = HuggingFaceStorageWriter(partial_folder / part, files_of(tensors), save_distributed=True)
            dcp.save(tensors, storage_writer=writer)
        # Each rank hashes the shards that it has written, which have its number in their names. For a large model, one
        # rank would need minutes to hash everything.
        sums = ranks.gather(checksums(partial_folder, f"*/shard-{ranks.rank() + 1:05}-*"))
        if first:
            sums += checksums(partial_folder, "state.pt")
            write_text(partial_folder / "SHA256SUMS", "".join(sums))
            for path in [*out.glob("*.jsonl"), out]:  # the lines up to this step must survive a crash as well
                flush(path)
    if first:
        for saved in saved_steps(out)[:-keep]:
            old = checkpoint_of(out, saved)
            # If the process is killed here, what is left must not look like a checkpoint, so it is renamed first.
            shutil.rmtree(old.rename(old.with_suffix(".partial")))


@contextmanager
def saved_if_it_fails(run: Any, step: int, save: Callable[[int], None]) -> Iterator[None]:
    """Around what follows a step: if it fails on all ranks, save what the run has now, after this step. An error after
    `training_step` has set run.whole to None comes too late: the next update may have changed the weights."""
    run.whole = run.cursor, {**run.state}, [*run.queue]
    try:
        yield
    except BaseException as error:
        is_new = step not in (0, *saved_steps(Path(run.config.out)))
        if run.whole and is_new and ranks.all_fail_with(error):
            run.cursor, run.state, run.queue = run.whole
            with suppress(Exception):  # for instance weights that are not finite; `error` is what the user must see
                save(step)
                if ranks.rank() == 0:
                    faults.say(f"saved after step {step}, from which the same command goes on, because of this:")
        raise


def load(out: Path, step: int, models: dict[str, nn.Module], optimizer: Optimizer) -> tuple[int, dict]:
    """Load a checkpoint into the models and the optimizer, and return the cursor and Run.state. The number of ranks and
    --shard may differ from those of the run that saved it."""
    folder = checkpoint_of(out, step)
    ranks.on_first(check, folder)
    parts = parts_of(models, optimizer, with_optimizer=(folder / "optimizer").exists())
    with ranks.fail_together(), safe_globals(CLASSES):
        # The first rank saved the state. What was on its GPU goes to the GPU of each rank that loads it.
        about = torch.load(folder / "state.pt", lambda x, place: x if place == "cpu" else x.cuda(), weights_only=True)
        if (about["run_id"], about["step"]) != (config_json(out).get("run_id"), step):
            raise UserError(f"the checkpoint {folder} is of another run or step: move it away")
        readers = {path.name: HuggingFaceStorageReader(path) for path in folder.iterdir() if path.is_dir()}
        saved = {part: reader.read_metadata().state_dict_metadata for part, reader in readers.items()}
        there = {f"{name} {[*x.size]} of the {part}" for part, tensors in saved.items() for name, x in tensors.items()}
        here = {f"{name} {[*x.shape]} of the {part}" for part, tensors in parts.items() for name, x in tensors.items()}
        if wrong := sorted(there ^ here):  # what only one of the two has
            raise UserError(f"the checkpoint {folder} does not fit the model or code: {'; '.join(wrong[:3])}")
    for part, tensors in parts.items():
        dcp.load(tensors, storage_reader=readers[part])  # writes into the tensors of `parts`
    if "optimizer" in parts:
        # This state has the tensors of `parts`, so they are loaded already. Its numbers were saved as tensors.
        state = state_dict.get_optimizer_state_dict(models["model"], optimizer, options=FLAT)
        state |= {name: x.item() for name, x in parts["optimizer"].items() if not isinstance(state[name], Tensor)}
        state_dict.set_optimizer_state_dict(models["model"], optimizer, state, options=FLAT)
    return about["cursor"], about["state"]


def load_weights(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Load only the weights of the trained model, and return the model. No other rank has to take part."""
    check(folder)
    dcp.load(trained_tensors(model), storage_reader=HuggingFaceStorageReader(folder / "model"), no_dist=True)
    return model


def parts_of(models: dict[str, nn.Module], optimizer: Optimizer, with_optimizer: bool) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each part of a checkpoint, by name, without copying them. If the optimizer has no state
    yet, PyTorch creates it, by an update at a learning rate of 0. Numbers in it become tensors of 64 bits, because only
    tensors can be saved."""
    parts = {part: trained_tensors(model) for part, model in models.items()}
    if with_optimizer:
        state = state_dict.get_optimizer_state_dict(models["model"], optimizer, options=FLAT)
        own = {name: x for name, x in state.items() if name.startswith("state.")}  # the others are settings
        numbers = {name: x for name, x in own.items() if not isinstance(x, Tensor)}
        parts["optimizer"] = own | {name: torch.from_numpy(np.array(x)) for name, x in numbers.items()}
    return parts


def files_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Number the files of weights, and return for each tensor the number of its file. Files are small, because PyTorch
    copies all tensors of a file in memory before it writes them.

    Every rank writes a file of each number, with its own part of the tensors that have this number. So these tensors
    may have FILE_BYTES times the number of ranks."""
    before = accumulate((x.nbytes for x in tensors.values()), initial=0)
    return {name: 1 + n // (FILE_BYTES * ranks.world()) for name, n in zip(tensors, before)}


def checksums(folder: Path, files: str) -> list[str]:
    """Return a line for each file that matches the pattern, in the format of sha256sum."""
    return [f"{sha256_of(path)}  {path.relative_to(folder)}\n" for path in sorted(folder.glob(files))]


def check(folder: Path) -> None:
    """Raise a UserError if a file of the checkpoint is missing, or is not as it was written. Files that do not belong
    to a checkpoint, such as notes, do not matter."""
    written = (folder / "SHA256SUMS").read_text(errors="replace").splitlines(keepends=True)
    there = checksums(folder, "*/shard-*") + checksums(folder, "state.pt")
    if differing := {*written} ^ {*there}:
        raise UserError(f"the checkpoint {folder} is damaged ({min(differing).strip()}): restore it, or move it away")


@contextmanager
def rows_by_index(saved: Any, rows: list[dict]) -> Iterator[None]:
    """Take the rows out of all groups in `saved` for the duration of the block. Their indices are enough to find them
    again, and rows may hold objects that cannot be saved."""
    groups = [x for x in tree_leaves(saved) if isinstance(x, Group)]
    of_task = [group for group in groups if group.index is not None and group.row is rows[group.index]]
    for group in of_task:
        group.row = {}
    yield
    put_rows_back(of_task, rows)


def put_rows_back(saved: Any, rows: list[dict]) -> None:
    for group in tree_leaves(saved):
        if isinstance(group, Group) and group.index is not None and not group.row:
            group.row = rows[group.index]


def write_state(file: Path, about: dict) -> None:
    """Write state.pt. A state that could not be loaded is refused now, and not when the run is resumed."""
    if any(isinstance(x, DTensor) for x in tree_leaves(about)):
        raise UserError("run.state contains a sharded tensor, of which each rank has a part: store its full_tensor()")
    torch.save(about, file)
    with safe_globals(CLASSES):
        torch.load(file, "cpu", weights_only=True)  # an error names the class; add it to CLASSES


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any) -> None:
    """Save the trained model. With LoRA, save only its adapters. All ranks must call this. The first one writes."""
    weights = whole_weights(model) if isinstance(model, FSDPModule) and not adapted_layers(model) else None
    with whole_folder(folder) as partial_folder:
        if ranks.rank() == 0:
            tokenizer.save_pretrained(partial_folder)
            if adapted_layers(model):
                save_adapters(partial_folder, model, trained_tensors(model))
            else:
                write_model(partial_folder, model, weights)
                write_text(partial_folder / "generation_config.json", model.generation_config.to_json_string())


def write_model(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor] | None) -> None:
    """Write the configuration of a model, and `weights`, or the model's own weights if they are None."""
    # `save_pretrained` may refuse the generation settings that came with the model.
    own, model.generation_config = model.generation_config, GenerationConfig()
    model.save_pretrained(folder, state_dict=weights)
    model.generation_config = own  # a run may continue after the model is saved


# ---- Folders that are either complete or absent ----


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder for the ranks to write into. At the end of the block, flush it to disk and rename it to
    `folder`, which must not exist yet. If the block fails, the next start of the run deletes the temporary folder."""
    partial_folder, first = folder.with_name(folder.name + ".partial"), ranks.rank() == 0
    if first:
        partial_folder.mkdir(parents=True)
    ranks.wait()  # no rank writes before the folder exists
    yield partial_folder
    ranks.wait()  # until all ranks have written
    if first:
        for path in [*partial_folder.rglob("*"), partial_folder]:
            flush(path)
        partial_folder.rename(folder)
        flush(folder.parent)
