"""Save a run and continue it, save the trained model.

    out/checkpoint/000040/    weights, reference (where it is refreshed), the optimizer's state, and state.json
    out/model/                the trained model, an ordinary `from_pretrained` folder

A checkpoint appears whole or not at all: it is written beside, flushed to disk, and renamed. No random state is in it,
because every random number of a run is a function of (seed, step). Weights are safetensors and the rest is JSON:
nothing is unpickled. Left out: sharded, an optimizer's tensors that have neither its parameter's shape nor one value.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig, PreTrainedModel

from config import UserError
from infra import faults, ranks
from infra.run_folder import checkpoint_of, flush, saved_steps, write_text
from infra.shard import is_sharded, whole_weights

DAMAGE = (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError, dcp.CheckpointException)
DELETE = "delete that folder, and the same command goes on from the one before, or from the first step"


@contextmanager
def _one_process_needs_no_distributed() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@_one_process_needs_no_distributed()
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
    folder, first = checkpoint_of(out, step), ranks.rank() == 0
    tensors, numbers = _optimizer_state(model, optimizer)
    parts = _weights(model, reference) | {"optimizer": tensors}
    _check_finite(parts, f"after step {step}", "nothing was saved. Lower --learning_rate, or check the rewards")
    if first:
        for torn in folder.parent.glob("*.partial"):
            shutil.rmtree(torn)
        for name in ("metrics.jsonl", "samples.jsonl"):  # the lines up to this step must outlive a crash as well
            if (out / name).exists():
                flush(out / name)
    with whole_folder(folder) as beside:
        for name, part in parts.items():
            if part:  # an optimizer may have no state
                writer = HuggingFaceStorageWriter(beside / name, save_distributed=True)
                dcp.save(part, storage_writer=writer, no_dist=not dist.is_initialized())
        if first:
            files = sorted(str(path.relative_to(beside)) for path in beside.rglob("*.safetensors"))
            state = {"cursor": cursor, "optimizer": type(optimizer).__name__, "numbers": numbers, "files": files}
            write_text(beside / "state.json", json.dumps(state, indent=2))
    if first:
        flush(out)
        for old in saved_steps(out)[:-keep]:
            shutil.rmtree(checkpoint_of(out, old))


@_one_process_needs_no_distributed()
def load(out: Path, step: int, model: nn.Module, reference: nn.Module | None, optimizer: torch.optim.Optimizer) -> int:
    """Put everything back as `save` found it, on any number of ranks, sharded or not. -> the cursor"""
    folder = checkpoint_of(out, step)
    with ranks.fail_together(), _reading(folder):
        state = json.loads((folder / "state.json").read_text())
        cursor, kind, numbers = state["cursor"], state["optimizer"], state["numbers"]
        for file in state["files"]:
            safe_open(folder / file, "pt")  # fails where it is not there, or not whole
        if kind != type(optimizer).__name__:
            raise UserError(f"the checkpoint {folder} is of a run with {kind}, not {type(optimizer).__name__}")
    parts = _weights(model, reference) | {"optimizer": {}}
    with _reading(folder):
        if (folder / "optimizer").exists():
            parts["optimizer"] = _room_for_state(folder / "optimizer", model)
        for name, part in parts.items():
            if part:
                reader = HuggingFaceStorageReader(folder / name)
                dcp.load(part, storage_reader=reader, no_dist=not dist.is_initialized())
    _check_finite(parts, f"in the checkpoint {folder}", DELETE)
    _restore(optimizer, model, parts["optimizer"] | numbers)
    return cursor


@_one_process_needs_no_distributed()
def load_weights(folder: Path, model: PreTrainedModel) -> PreTrainedModel:
    """Of the policy alone. A rank that calls this needs no other one."""
    reader = HuggingFaceStorageReader(folder / "model")
    try:
        dcp.load(_weights(model, None)["model"], storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:
        raise ValueError(_cause(error)) from error
    return model


def _weights(model: nn.Module, reference: nn.Module | None) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint, by the folder they are in; tied weights once."""
    models = {"model": model} if reference is None else {"model": model, "reference": reference}
    return {name: dict(one.named_parameters()) for name, one in models.items()}


def _check_finite(parts: dict[str, dict[str, Tensor]], where: str, advice: str) -> None:
    """On all ranks, each of which looks at its own part of what is sharded."""
    with ranks.fail_together():
        for part, tensors in parts.items():
            for name, x in tensors.items():
                if not (x.to_local() if isinstance(x, DTensor) else x).isfinite().all():
                    raise UserError(f"{where} {name} of the {part} is not finite (NaN or infinity): {advice}")


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
        like = p if saved.size == p.shape else torch.empty(saved.size)
        room[key] = torch.zeros_like(like, dtype=saved.properties.dtype)
    return room


def _restore(optimizer: torch.optim.Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    names = {p: name for name, p in model.named_parameters()}
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    by_number: dict[int, dict] = {}
    for key, value in state.items():
        kind, _, name = key.partition(".")
        by_number.setdefault(order.index(name), {})[kind] = value
    # It knows on which device it wants what.
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGE as error:
        raise UserError(f"the checkpoint {folder} is damaged ({_cause(error)}): {DELETE}") from error


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


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """The ranks write into the folder beside that this gives. At the end it becomes `folder` at once, and is on disk;
    or nothing does."""
    beside, first = folder.with_name(folder.name + ".partial"), ranks.rank() == 0
    try:
        if first:
            shutil.rmtree(beside, ignore_errors=True)
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
