"""Save a run so that it can be resumed, and save the trained model.

    out/checkpoint/000040/    all that is needed to resume after step 40:
        model/                the model, as in out/model/
        reference/            the reference, if --ref_sync_every changes it
        optimizer/            the state of the optimizer
        state.pt              how many prompts were drawn, the queue of completions, Run.state, in which user code keeps
                              its own values, the step, the id of the run, and the sizes of the files above
    out/model/                the trained model, an ordinary `from_pretrained` folder; with LoRA, adapters for PEFT

A checkpoint is either complete or absent: it is written under a temporary name, flushed to disk, and then renamed. It
contains no random state, because every random number of a run is a function of the seed and the step. It does not
contain the learning rate and the other settings of the optimizer either: the settings of the run decide these. Nor does
it contain weights that stay as they are: those of a reference, and those under adapters.

Loading a checkpoint executes nothing that is in it. Weights are safetensors, and from `state.pt`, PyTorch makes only
objects of the classes that are listed here. Not supported: optimizers that add state after their first update, because
`load` finds out from a first update what state there is.
"""

import io
import json
import shutil
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter, state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.serialization import safe_globals
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig, PreTrainedModel

from advantage import Group
from config import UserError
from infra import faults, ranks
from infra.lora import adapted_layers, save_adapters, trained_tensors
from infra.model import load_weights
from infra.run_folder import checkpoint_of, config_json, flush, saved_steps, step_of, write_text
from infra.shard import whole_weights
from rollout import Completion

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # PyTorch warns if a single process saves
FILE_BYTES = 2**28  # about the size of a file of the optimizer's state; each rank writes its own files
FLAT = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)

# What Run.state may contain, beside tensors and Python's numbers, texts, lists, tuples, sets and dictionaries. NumPy's
# arrays and numbers need classes of their own, and the functions that `__reduce__` names, which make them again.
CLASSES = [Group, Completion, np.ndarray, np.dtype, bytes]
CLASSES += [getattr(np.dtypes, name) for name in np.dtypes.__all__]
CLASSES += [x.__reduce__()[0] for x in (np.ones(1), np.float64(1))]


# ---- Checkpoints ----


def save(out: Path, step: int, run: Any, keep: int = 1) -> None:
    """Save everything that step + 1 needs. All ranks must call this, because each of them writes a part of the state of
    the optimizer. The first one writes everything else, and gathers a sharded model in its memory for that. Only the
    newest `keep` checkpoints stay."""
    models = models_of(run)
    # Before the first update the optimizer has no state, and `moments_of` would create it by an update.
    moments = moments_of(run) if run.optimizer.state else {}
    parts = {part: trained_tensors(model) for part, model in models.items()} | {"optimizer": moments}
    with ranks.fail_together():
        for part, name, x in ((part, name, x) for part, tensors in parts.items() for name, x in tensors.items()):
            if not (x.to_local() if isinstance(x, DTensor) else x).isfinite().all():
                raise UserError(f"after step {step} {name} of the {part} is not finite: nothing was saved")
    with whole_folder(checkpoint_of(out, step)) as folder:
        for part, model in models.items():
            write_folder(folder / part, model, run.tokenizer, step)
        if moments:
            writer = HuggingFaceStorageWriter(folder / "optimizer", files_of(moments), save_distributed=True)
            dcp.save(moments, storage_writer=writer)
        # The id of the run is there so that a checkpoint of another run is not taken for one of this run.
        about = {"run_id": config_json(out).get("run_id"), "step": step, "files": sizes_in(folder)}
        about |= {"cursor": run.cursor, "queue": run.queue, "state": run.state}
        ranks.on_first(write_state, folder / "state.pt", about, run.task.train)
        if ranks.rank() == 0:
            for path in [*out.glob("*.jsonl"), out]:  # the lines up to this step must survive a crash as well
                flush(path)
    if ranks.rank() == 0:
        for saved in saved_steps(out)[:-keep]:
            old = checkpoint_of(out, saved)
            # If the process is killed here, what is left must not look like a checkpoint, so it is renamed first.
            shutil.rmtree(old.rename(old.with_suffix(".partial")))


@contextmanager
def saved_if_it_fails(run: Any, step: int, first: Callable[[], None] | None = None) -> Iterator[None]:
    """Around what follows a step: if it fails on all ranks, call `first`, then save what the run has now, after this
    step. An error comes too late once `training_step` has set run.after_last_step to None: the next update may have
    changed the weights."""
    run.after_last_step = run.cursor, {**run.state}, [*run.queue]
    try:
        yield
    except BaseException as error:
        out = Path(run.config.out)
        if run.after_last_step and step not in (0, *saved_steps(out)) and ranks.all_fail_with(error):
            run.cursor, run.state, run.queue = run.after_last_step
            with suppress(Exception):  # for instance weights that are not finite; `error` is what the user must see
                if first is not None:
                    first()
                save(out, step, run, run.config.keep_checkpoints)
                if ranks.rank() == 0:
                    faults.say(f"saved after step {step}, from which the same command goes on, because of this:")
        raise


def load(out: Path, step: int, run: Any) -> None:
    """Load a checkpoint into the run. The number of ranks and --shard may differ from those when it was saved."""
    folder = checkpoint_of(out, step)
    with ranks.fail_together():
        about = read_state(folder, run.task.train)
        if (about["run_id"], about["step"]) != (config_json(out).get("run_id"), step):
            raise UserError(f"the checkpoint {folder} is of another run or step: move it away")
    for part, model in models_of(run).items():
        load_weights(folder / part, model, run.config)
    if any(name.startswith("optimizer/") for name in about["files"]):
        load_moments(folder / "optimizer", run)
    run.cursor, run.queue, run.state = about["cursor"], about["queue"], about["state"]


def models_of(run: Any) -> dict[str, PreTrainedModel]:
    """Return the models that the run changes."""
    return {"model": run.model} | ({"reference": run.reference} if run.config.ref_sync_every else {})


def moments_of(run: Any) -> dict[str, Tensor]:
    """Return the state of the optimizer, by name, without copying it. If the optimizer has none yet, PyTorch creates
    it, by an update at a learning rate of 0. Numbers become tensors of 64 bits, because only tensors can be saved."""
    state = state_dict.get_optimizer_state_dict(run.model, run.optimizer, options=FLAT)
    moments = {name: x for name, x in state.items() if name.startswith("state.")}  # the others are settings
    return {name: x if isinstance(x, Tensor) else torch.from_numpy(np.array(x)) for name, x in moments.items()}


def load_moments(folder: Path, run: Any) -> None:
    moments, reader = moments_of(run), HuggingFaceStorageReader(folder)
    with ranks.fail_together():
        saved = reader.read_metadata().state_dict_metadata
        there = {f"{name} {[*x.size]}" for name, x in saved.items()}
        here = {f"{name} {[*x.shape]}" for name, x in moments.items()}
        if wrong := sorted(there ^ here):  # what only one of the two has
            raise UserError(f"the checkpoint {folder} does not fit the model or code: {'; '.join(wrong[:3])}")
    dcp.load(moments, storage_reader=reader)  # writes into the tensors of `moments`
    # This state has the tensors of `moments`, so they are loaded already. Its numbers were saved as tensors.
    state = state_dict.get_optimizer_state_dict(run.model, run.optimizer, options=FLAT)
    state |= {name: x.item() for name, x in moments.items() if not isinstance(state[name], Tensor)}
    state_dict.set_optimizer_state_dict(run.model, run.optimizer, state, options=FLAT)


def files_of(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Number the files, and return for each tensor the number of its file. Files are small, because PyTorch copies all
    tensors of a file in memory before it writes them.

    Every rank writes a file of each number, with its own part of the tensors that have this number. So these tensors
    may have FILE_BYTES times the number of ranks."""
    before = accumulate((x.nbytes for x in tensors.values()), initial=0)
    return {name: 1 + n // (FILE_BYTES * ranks.world()) for name, n in zip(tensors, before)}


# ---- What is not a weight ----


def write_state(file: Path, about: dict, rows: list[dict]) -> None:
    """Write state.pt. Groups are written without their rows where the task has these, because the index of a row is
    enough to find it again. A state that could not be loaded is refused now, and not when the run is resumed."""
    leaves, by_index = tree_leaves(about), dict(enumerate(rows))
    if any(isinstance(x, DTensor) for x in leaves):
        raise UserError("run.state contains a sharded tensor, of which each rank has a part: store its full_tensor()")
    groups = [x for x in leaves if isinstance(x, Group) and x.row is by_index.get(x.index)]
    for group in groups:
        group.row = {}
    torch.save(about, written := io.BytesIO())  # into a file, it would not say that the disk is full
    file.write_bytes(written.getvalue())
    put_rows_back(groups, rows)
    with safe_globals(CLASSES):
        torch.load(file, "cpu", weights_only=True)  # an error names the class; add it to CLASSES


def read_state(folder: Path, rows: list[dict]) -> dict:
    """Return the content of state.pt. Raise a UserError if a file of the checkpoint is missing or cut off."""
    about = {}
    if zipfile.is_zipfile(folder / "state.pt"):  # its last bytes say so
        # The first rank saved the state. What was on its GPU goes to the GPU of each rank that loads it.
        place = {"map_location": lambda x, place: x if place == "cpu" else x.cuda()}
        with safe_globals(CLASSES):
            about = torch.load(folder / "state.pt", **place, weights_only=True)
    there, written = sizes_in(folder), about.get("files", {"state.pt": 0})  # older versions have no "files"
    if wrong := [name for name in written if there.get(name) != written[name]]:
        what = f"damaged, or of an older version ({wrong[0]})"
        raise UserError(f"the checkpoint {folder} is {what}: restore it, or move it away")
    put_rows_back(tree_leaves(about), rows)
    return about


def put_rows_back(values: list, rows: list[dict]) -> None:
    for group in values:
        if isinstance(group, Group) and group.index is not None and not group.row:
            group.row = rows[group.index]


def sizes_in(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*.safetensors")}


# ---- Models that others can load ----


def save_model(out: Path, step: int, run: Any) -> None:
    """Save the trained model. All ranks must call this."""
    with whole_folder(out / "model") as folder:
        write_folder(folder, run.model, run.tokenizer, step)


def write_folder(folder: Path, model: PreTrainedModel, tokenizer: Any, step: int) -> None:
    """Write a model with its tokenizer. With LoRA, write only its adapters. All ranks must call this. The first one
    writes."""
    weights = whole_weights(model) if isinstance(model, FSDPModule) and not adapted_layers(model) else None
    if ranks.rank() == 0:
        tokenizer.save_pretrained(folder)
        if adapted_layers(model):
            save_adapters(folder, model, trained_tensors(model))
        else:
            write_model(folder, model, weights)
            write_text(folder / "generation_config.json", model.generation_config.to_json_string())
        write_text(folder / "step.json", json.dumps({"step": step}))
    ranks.wait()


def write_model(folder: Path, model: PreTrainedModel, weights: dict[str, Tensor] | None) -> None:
    """Write the configuration of a model, and `weights`, or the model's own weights if they are None."""
    # `save_pretrained` may refuse the generation settings that came with the model.
    its_config, model.generation_config = model.generation_config, GenerationConfig()
    model.save_pretrained(folder, state_dict=weights)
    model.generation_config = its_config  # a run may continue after the model is saved


# ---- Folders that are either complete or absent ----


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Create a temporary folder for the ranks to write into. At the end of the block, flush it to disk and rename it to
    `folder`. If the block fails, the next start of the run deletes the temporary folder."""
    partial_folder, first = folder.with_name(folder.name + ".partial"), ranks.rank() == 0
    if first:
        partial_folder.mkdir(parents=True)
    ranks.wait()  # no rank writes before the folder exists
    yield partial_folder
    ranks.wait()  # until all ranks have written
    if first:
        for path in [*partial_folder.rglob("*"), partial_folder]:
            flush(path)
        if folder.exists():  # the model of an earlier end of the run
            earlier = folder.with_name(f"{folder.name}-{step_of(folder)}")
            shutil.rmtree(earlier, ignore_errors=True)
            folder.rename(earlier)
        partial_folder.rename(folder)
        flush(folder.parent)
