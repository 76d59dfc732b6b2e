"""Models and runs on disk: load a model, save one, save a run and continue it.

    out/config.json           settings, versions, commit, hardware
    out/checkpoint/000040/    weights, reference (where it is refreshed), Adam's moments, and state.json
    out/model/                the trained model, an ordinary `from_pretrained` folder

A checkpoint appears whole or not at all: it is written beside, flushed to disk, and renamed. No random state is in it,
because every random number of a run is a function of (seed, step). Weights are safetensors and the rest is JSON:
nothing is unpickled. Left out: optimizers other than AdamW.
"""

import dataclasses
import fcntl
import json
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
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from config import Config, UserError
from infra import faults, ranks
from infra.shard import is_sharded, whole_weights

# Settings that may change when a run is continued: they say how it is computed or shown, not what.
FREE = (
    "micro_batch_size", "micro_batch_tokens", "rollout_tokens", "gradient_checkpointing", "attn_implementation",
    "shard", "shard_size", "save_every", "keep_checkpoints", "samples_per_step", "report_to", "out", "overwrite",
    "reward_timeout",
)  # fmt: skip


warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process needs none
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()


# ---- Models ----


def open_model(name: str, config: Config) -> tuple[PretrainedConfig, Any]:
    """-> the model's configuration, its dropout off, and its tokenizer; before the weights, which may take minutes."""
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise UserError(f"--model {name}: there is no such folder")
    with _named(name, "configuration"):
        settings = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    with _named(name, "tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    # Sampling runs without dropout; scoring with it would compare two different policies.
    for field, value in settings.to_dict().items():
        if isinstance(value, float) and ("dropout" in field or "pdrop" in field):
            setattr(settings, field, 0.0)
    return settings, tokenizer


def load_model(name: str, settings: PretrainedConfig, tokenizer: Any, config: Config) -> PreTrainedModel:
    """-> the model, its weights in fp32"""
    with _named(name, "weights"):
        model, loaded = AutoModelForCausalLM.from_pretrained(
            name,
            config=settings,
            dtype=torch.float32,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    # transformers would go on with random weights in their place.
    wrong = sorted([*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])])
    if wrong:
        raise UserError(
            f"--model {name}: {len(wrong)} weights are not in its files, or not of the shape its config.json says: "
            f"{', '.join(wrong[:3])}"
        )
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    if config.shard and settings.get_text_config().tie_word_embeddings and head.weight is not embeddings.weight:
        raise UserError(
            f"--model {name}: its files hold an output head of its own, but its config.json says tie_word_embeddings: "
            "set that to false"
        )
    rows = embeddings.num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"--model {name}: its tokenizer has {len(tokenizer)} tokens, its model {rows}: they don't match"
        )
    return model


def empty_model(settings: PretrainedConfig, config: Config) -> PreTrainedModel:
    """The model without weights, on the meta device."""
    with _named(settings.name_or_path, "architecture"), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            settings,
            dtype=torch.float32,
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
    return model.requires_grad_(True)  # as `from_pretrained` has it


@contextmanager
def _named(name: str, part: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"--model {name}: its {part} cannot be loaded: {reason[:600]}") from error


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """All ids that end a completion: chat models have one for the turn and one for the text."""
    ids = set()
    for source in (model.generation_config, model.config, tokenizer):
        given = getattr(source, "eos_token_id", None)
        ids.update(given if isinstance(given, list) else [] if given is None else [given])
    if not ids:
        raise UserError("neither the model nor its tokenizer names an end-of-sequence token: completions could not end")
    return sorted(ids)


def save_model(folder: Path, model: PreTrainedModel, tokenizer: Any, generation_config: GenerationConfig) -> None:
    """Called on all ranks; the first one writes."""
    weights = whole_weights(model) if is_sharded(model) else None

    def write() -> None:
        with _writing(folder):
            _begin(folder)
            model.save_pretrained(_beside(folder), state_dict=weights)
            tokenizer.save_pretrained(_beside(folder))
            # As it came with the model, which need not be what `save_pretrained` finds valid.
            write_text(_beside(folder) / "generation_config.json", generation_config.to_json_string())
            _end(folder)

    ranks.together(write, of=[0])


# ---- Runs ----


def open_run(config: Config) -> int | None:
    """Claim the folder `config.out`. -> the step to continue after, 0 to start; None if the run is already finished."""
    out = Path(config.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    _lock(out)
    before = out / "config.json"
    settings = _settings(before)
    if settings is None and any(path.name != ".lock" and path.suffix != ".partial" for path in out.iterdir()):
        raise UserError(f"{out} holds something that is not a run: give another --out")
    if config.overwrite and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":  # once, not at every restart
        _clear(out)
        settings = None
    if settings is not None:
        changed = {
            name: (settings.get(name), value)
            for name, value in dataclasses.asdict(config).items()
            if name not in FREE and settings.get(name) != value
        }
        if changed:
            lines = [f"  --{name}: {was} there, {now} here" for name, (was, now) in changed.items()]
            raise UserError(
                f"{out} holds a run with other settings:\n" + "\n".join(lines) + "\n"
                "give another --out, or throw that run away with --overwrite"
            )
        if (out / "model").exists() and latest(out) == config.steps:
            return None
    _write_json(before, {"settings": dataclasses.asdict(config)} | provenance())
    return latest(out) or 0


def _settings(file: Path) -> dict | None:
    try:
        return json.loads(file.read_text())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not written by a run


def _clear(out: Path) -> None:
    for path in sorted(out.iterdir(), key=lambda path: path.name == "config.json"):  # which says what this is: last
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != ".lock":
            path.unlink()


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
    state: dict,
    keep: int = 1,
) -> None:
    """Everything that step + 1 needs. `state` is what the training loop carries from step to step. Called on all ranks:
    each writes a part, of sharded tensors its own."""
    folder = out / "checkpoint" / f"{step:06d}"

    def begin() -> None:
        for torn in folder.parent.glob("*.partial"):
            shutil.rmtree(torn)
        for name in ("metrics.jsonl", "samples.jsonl"):  # the lines up to this step must outlive a crash as well
            if (out / name).exists():
                _flush(out / name)
        _begin(folder)

    def end() -> None:
        files = sorted(str(path.relative_to(_beside(folder))) for path in _beside(folder).rglob("*.safetensors"))
        _write_json(_beside(folder) / "state.json", state | {"files": files})
        _end(folder)
        _flush(out)
        whole = [path for path in folder.parent.iterdir() if path.name.isdigit()]
        for old in sorted(whole, key=lambda path: int(path.name))[:-keep]:
            shutil.rmtree(old)

    with _writing(folder):
        ranks.together(begin, of=[0])
        moments = {f"{key}.{n}": x for n, p in model.named_parameters() for key, x in optimizer.state[p].items()}
        for name, tensors in _parts(model, reference, moments).items():
            writer = HuggingFaceStorageWriter(_beside(folder) / name, save_distributed=True)
            dcp.save(tensors, storage_writer=writer, no_dist=not dist.is_initialized())
        ranks.together(end, of=[0])


def load(out: Path, step: int, model: nn.Module, reference: nn.Module | None, optimizer: torch.optim.Optimizer) -> dict:
    """Put everything back as `save` found it, on any number of ranks, sharded or not. -> its `state`"""
    folder = out / "checkpoint" / f"{step:06d}"
    state = ranks.together(lambda: _read_state(folder))
    for p in model.parameters():
        optimizer.state[p] = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[p]["step"] = torch.zeros((), device=p.device)
    moments = {f"{key}.{n}": x for n, p in model.named_parameters() for key, x in optimizer.state[p].items()}
    with _reading(folder):
        for name, tensors in _parts(model, reference, moments).items():
            dcp.load(tensors, storage_reader=HuggingFaceStorageReader(folder / name), no_dist=not dist.is_initialized())
    return state


def _read_state(folder: Path) -> dict:
    with _reading(folder):
        state = json.loads((folder / "state.json").read_text())
        for file in state.pop("files"):
            safe_open(folder / file, "pt")  # fails where it is not there, or not whole
    return state


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, SafetensorError, dcp.CheckpointException) as error:
        raise UserError(
            f"the checkpoint {folder} is damaged ({_cause(error)}): delete that folder, and the same command goes on "
            "from the one before it or, where there is none, from the start"
        ) from error


def _parts(model: nn.Module, reference: nn.Module | None, moments: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The tensors of a checkpoint, by the folder they are in; tied weights once."""
    parts = {"model": dict(model.named_parameters()), "optimizer": moments}
    return parts if reference is None else parts | {"reference": dict(reference.named_parameters())}


def _cause(error: BaseException) -> str:
    """What lies under the library's report of all ranks, in one line."""
    causes = [cause for cause, _ in error.failures.values()] if isinstance(error, dcp.CheckpointException) else [error]
    return " ".join(str(causes[0]).split())


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
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, dcp.CheckpointException) as error:  # a full disk, no permission
        if isinstance(error, dcp.CheckpointException) and dist.is_initialized() and dist.get_rank():
            raise faults.FailedElsewhere(_cause(error)) from error  # which is told on all ranks
        shutil.rmtree(_beside(folder), ignore_errors=True)
        raise OSError(f"{folder} could not be written: {_cause(error)}") from error


def _beside(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


def _begin(folder: Path) -> None:
    """What is written into the folder beside becomes `folder` in `_end`, at once and on disk; or nothing does."""
    shutil.rmtree(_beside(folder), ignore_errors=True)
    _beside(folder).mkdir(parents=True)


def _end(folder: Path) -> None:
    for path in [*_beside(folder).rglob("*"), _beside(folder)]:
        _flush(path)
    shutil.rmtree(folder, ignore_errors=True)
    _beside(folder).rename(folder)
    _flush(folder.parent)


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
