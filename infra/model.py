"""Everything that a run needs before its first step: the task, the model, and how completions are sampled.

`open_model` reads the configuration and the tokenizer of a model, to find mistakes early. `load_models` loads its
weights and those of the reference, for one process or many.
"""

import copy
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.integrations import sdpa_attention

from batch import Limits
from config import Config, UserError
from fast.norm import fuse_norms
from fast.output_head import returns_head_output
from fast.shared_prompts import model_inputs
from infra import command_line, faults, lora, ranks, run_folder
from infra.decoding import graph_decoding_works
from infra.shard import fill, make_mesh, shard
from rollout import Sampling
from tasks import load_task, task_module
from tasks._prompts import check_prompts, notes

# Under autocast, compute the matrix products of mixture-of-experts layers in bf16, as a rollout does. PyTorch's own
# rules leave them out, so an update would compute them in fp32, which is slow.
for device_type in ("cpu", "cuda"):
    torch.library.register_autocast("aten::_grouped_mm", device_type, torch.bfloat16)


# A folder of a model or of adapters, a name on the hub, or a model that a task's file has made, with its tokenizer.
Source = str | tuple[PreTrainedModel, Any]


def load_run(cfg: Config, device: torch.device) -> tuple[dict[str, Any], int, list[str]]:
    """Return the fields of `Run` (train.py) but for the optimizer and the server, the number of tokens of the longest
    prompt, and notes for the user. Mistakes that can be found before the weights are loaded are found first."""
    ranks.seed_everything(cfg.seed)  # the same for all ranks, because a task may shuffle its rows
    with ranks.fail_together():
        task = load_task(cfg)
        task.time_limit = partial(faults.time_limit, cfg.reward_timeout)
        source = cfg.model or task_module(cfg.task).model(cfg)  # a task's file may make a model
        model_config, tokenizer = open_model(source, cfg)
        context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
        longest_prompt = check_prompts(task, tokenizer, context, cfg)
    rows = run_folder.checksum(task.train + task.eval)
    ranks.check_same(run_folder.fingerprint_of_start(cfg) | {"the rows": rows})
    model, reference = load_models(source, model_config, tokenizer, cfg, device)
    with ranks.fail_together():
        ends = eos_ids(model, tokenizer)
    loaded = {"rows": rows} | checksums_of_weights(model, reference)
    ranks.check_same({f"the {name}": x for name, x in loaded.items()})
    models = [model] if reference in (None, model) else [model, reference]
    fused = [fuse_norms(each) for each in models]
    if cfg.server or (cfg.decode == "graph" and not graph_decoding_works(model, getattr(torch, cfg.sampler_dtype))):
        cfg = replace(cfg, decode="plain")
    sampling = Sampling(
        max_completion_length=cfg.max_completion_length,
        eos_ids=ends,
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        keep_set=cfg.keep_set,
        head=cfg.score_centering,
        stop=cfg.stop,
        to_text=tokenizer.decode,
        tokens_at_once=cfg.rollout_tokens,
        drop_share=0.5 if cfg.decode == "graph" else 0.25,  # after rows are dropped, a new graph must be captured
    )
    fields = dict(
        config=cfg,
        device=device,
        task=task,
        tokenizer=tokenizer,
        model=model,
        reference=reference,
        loaded=loaded,
        sampling=sampling,
        limits=limits_of(cfg, models, longest_prompt),
    )
    noted = [*notes(task, tokenizer, trains=cfg.steps != 0), *command_line.warnings(cfg), *lora.notes(model)]
    return fields, longest_prompt, [*noted, *trained_on_before(cfg), *filter(None, fused[:1])]


def trained_on_before(cfg: Config) -> Iterator[str]:
    """Yield a note if --model comes from a run that has trained on prompts of --data that are held out now."""
    is_folder = cfg.model is not None and Path(cfg.model).is_dir()  # and not a name on the hub
    for folder in Path(cfg.model).absolute().parents[:3] if is_folder else ():  # RUN/model, RUN/checkpoint/000040/model
        there = run_folder.settings_of(folder)
        has_same_data = there and there.data and realpath(there.data) == realpath(cfg.data or "")
        if has_same_data and there.held_out < cfg.held_out:
            yield f"the run in {folder} held out fewer prompts, so it has trained on some that are held out now"


def open_model(source: Source, cfg: Config) -> tuple[PretrainedConfig, Any]:
    """Return the configuration and the tokenizer of a model. Its weights may take minutes to load."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if isinstance(source, tuple):
        if cfg.lora_rank:
            raise UserError("--lora_rank: give a --model; the task's own model has no name that adapters can refer to")
        model, tokenizer = source
        return model.config, tokenizer
    if (Path(source) / "state.pt").is_file():
        raise UserError(f"--model {source}: is a checkpoint; the model is in {source}/model")
    if Path(source).is_dir() and run_folder.config_json(Path(source)):
        raise UserError(f"--model {source}: is the folder of a run; the model is in {source}/model")
    base = base_of(source)
    try:
        model_config = AutoConfig.from_pretrained(base, trust_remote_code=cfg.trust_remote_code)
    except OSError as error:
        raise UserError(f"--model {source}: {' '.join(str(error).split())}") from error
    if getattr(model_config, "quantization_config", None):
        raise UserError(f"{base}: its weights are quantized; give a folder of bfloat16 weights")
    has_tokenizer = (Path(source) / "tokenizer_config.json").is_file()  # a folder of adapters may have none
    tokenizer = AutoTokenizer.from_pretrained(
        source if has_tokenizer else base, trust_remote_code=cfg.trust_remote_code
    )
    if cfg.chat_template_kwargs:
        given = dict(json.loads(cfg.chat_template_kwargs))
        if unread := [key for key in given if key not in str(tokenizer.chat_template)]:
            raise UserError(f"--chat_template_kwargs: the chat template of {source} does not read {', '.join(unread)}")
        tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **given)
    # Set all dropout to 0. Eval mode is not enough, because layers with gradient checkpointing are in train mode.
    for field, value in model_config.to_dict().items():
        if isinstance(value, float) and ("dropout" in field or "pdrop" in field):
            setattr(model_config, field, 0.0)
    return model_config, tokenizer


def base_of(source: str) -> str:
    """Return the base model of a folder of adapters. A model is its own base."""
    base = lora.read_config(source).get("base_model_name_or_path", source)
    # Saved adapters name the folder of their model, and a reward may change the working directory meanwhile.
    return str(Path(base).resolve()) if Path(base).is_dir() else base


def load_models(
    source: Source, model_config: PretrainedConfig, tokenizer: Any, cfg: Config, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """Load the weights. Return the model, and the reference, which is None unless the KL term needs one."""
    with ranks.fail_together():
        mesh = make_mesh(cfg.shard_size, device) if cfg.shard else None
        teacher_config = open_reference(cfg, tokenizer) if cfg.reference else None
    model, reference = on_device(source, model_config, cfg, mesh, device), None
    if cfg.lora_rank:
        lora.add_adapters(model, cfg.lora_rank, cfg.lora_alpha, cfg.seed)
        if lora.read_config(source):
            load_weights(Path(source), model, cfg)
            lora.keep_start(model)
    needs_reference = cfg.beta != 0.0 and cfg.steps != 0  # an evaluation has no KL term
    if needs_reference and cfg.lora_rank and not cfg.reference:
        reference = model  # with the adapters that it starts with
    elif needs_reference:
        its_source, its_config = (cfg.reference, teacher_config) if cfg.reference else (source, model_config)
        reference = on_device(its_source, its_config, replace(cfg, lora_rank=0), mesh, device).requires_grad_(False)
    if device.type == "cuda" and cfg.dtype == "float32":
        # PyTorch's attention can share a key head between query heads, but in fp32 its only kernel that does so needs
        # memory for (T x T) scores. So let transformers repeat the key heads instead.
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # Train in eval mode, as when sampling, so that dropout is off. Only layers with gradient checkpointing are in train
    # mode, because in eval mode they would not checkpoint.
    for module in model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)
    return model, reference


def open_reference(cfg: Config, tokenizer: Any) -> PretrainedConfig:
    """Return the configuration of --reference, a whole model that must have the tokens of the policy."""
    if lora.read_config(cfg.reference):
        raise UserError(f"--reference {cfg.reference}: merge these adapters into their base model (docs/extending.md)")
    model_config, other = open_model(cfg.reference, replace(cfg, lora_rank=0, chat_template_kwargs=None))
    if other.get_vocab() != tokenizer.get_vocab():
        raise UserError(f"--reference {cfg.reference}: has another vocabulary than the model that is trained")
    return model_config


def on_device(
    source: Source, model_config: PretrainedConfig, cfg: Config, mesh: DeviceMesh | None, device: torch.device
) -> PreTrainedModel:
    """Load a whole model: on every rank or, with --shard, on the first one, which sends the others their shards."""
    with ranks.fail_together():
        whole = whole_model(source, model_config, cfg) if mesh is None or ranks.rank() == 0 else None
    if mesh is None:
        return whole.to(device)
    with torch.device("meta"):
        # Some architectures create parameters that are not trainable. `from_pretrained` would make them trainable, so
        # do the same here.
        empty = AutoModelForCausalLM.from_config(model_config, **loading_options(cfg)).requires_grad_(True)
    model = shard(empty, whole, mesh, getattr(torch, cfg.dtype), device).eval()
    model.generation_config = ranks.on_first(lambda: whole.generation_config)
    return model


def load_weights(folder: Path, model: PreTrainedModel, cfg: Config) -> None:
    """Load the weights that were saved in a folder, or the adapters, into a model that is on its device. All ranks must
    call this."""
    if lora.adapted_layers(model):
        with ranks.fail_together():
            lora.load_adapters(folder, model)
        return
    with ranks.fail_together():
        needs_whole = not isinstance(model, FSDPModule) or ranks.rank() == 0
        whole = whole_model(str(folder), copy.deepcopy(model.config), cfg) if needs_whole else None
    fill(model, whole)


def whole_model(source: Source, model_config: PretrainedConfig, cfg: Config) -> PreTrainedModel:
    """Load a model on the CPU, without adapters."""
    if isinstance(source, tuple):
        return copy.deepcopy(source[0]).float().eval()
    name = base_of(source)
    # Where weights are missing or have another shape, transformers puts random ones. So ask it what it has loaded.
    options = dict(config=model_config, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True)
    model, loaded = AutoModelForCausalLM.from_pretrained(name, **options, **loading_options(cfg))
    if wrong := sorted([*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])]):
        raise UserError(f"{name}: its files lack {len(wrong)} weights of this model: {', '.join(wrong[:3])}")
    # With --shard, these weights go into an empty model that is made from the config. If the config ties the head to
    # the embeddings, that model has one weight for both, and a second one in the files would be lost.
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    if cfg.shard and model_config.get_text_config().tie_word_embeddings and not is_tied:
        raise UserError(f"{name}: its head is not tied; set tie_word_embeddings to false in its config.json")
    return model


def loading_options(cfg: Config) -> dict[str, Any]:
    """Return the arguments with which transformers makes a model, with or without weights. Weights that are trained are
    in fp32, because bf16 would round small updates away."""
    dtype = getattr(torch, cfg.dtype) if cfg.lora_rank or cfg.steps == 0 else torch.float32
    return dict(dtype=dtype, attn_implementation=cfg.attn_implementation, trust_remote_code=cfg.trust_remote_code)


def checksums_of_weights(model: PreTrainedModel, reference: PreTrainedModel | None) -> dict[str, int]:
    """Return a number that depends on the weights of --model, and one for those of the reference. All ranks must call
    this, because a sharded tensor is gathered for a moment."""
    adapters = lora.trained_tensors(model) if lora.adapted_layers(model) else {}
    parts = {"weights": [p for name, p in model.named_parameters() if name not in adapters]}
    if reference is model:
        parts["reference"] = lora.started_with(model)
    elif reference is not None:
        parts["reference"] = [*reference.parameters()]
    sums = {}
    for part, tensors in parts.items():
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in tensors)
        sums[part] = zlib.crc32(str([int(p.detach().flatten().view(torch.uint8).sum()) for p in whole]).encode())
    return sums


def eos_ids(model: PreTrainedModel, tokenizer: Any) -> list[int]:
    """Return all ids that end a completion. Chat models have one for a turn and another for the whole text."""
    ids, vocab_size = [], model.config.get_text_config().vocab_size
    for source in (model.generation_config, model.config, tokenizer):
        if (given := getattr(source, "eos_token_id", None)) is not None:
            ids += given if isinstance(given, list) else [given]
    if not ids or any(type(token) is not int or not 0 <= token < vocab_size for token in ids):
        raise UserError(f"eos_token_id {ids} of model and tokenizer: must be token ids from 0 to {vocab_size - 1}")
    return sorted(set(ids))


def reads_together(model: PreTrainedModel, length: int) -> bool:
    """Return whether the model can read several completions of a prompt as one row (fast/shared_prompts.py). This is
    tried on two short completions. The trial cannot reveal a sliding window that is longer than they are. So a model
    is refused if its configuration has a window shorter than `length`, the most tokens of a prompt and a completion."""
    config = model.config.get_text_config()
    sizes = [size for name, size in vars(config).items() if name.endswith(("window", "window_size", "chunk_size"))]
    has_short_window = any(type(size) is int and size < length for size in sizes)
    # Other implementations than these two may take the mask for one of padding.
    if has_short_window or model.config._attn_implementation not in ("sdpa", "eager"):
        return False
    # Two completions of 2 tokens after the same prompt of 3 tokens. The model reads them in two rows, and then in one.
    # `places` says where in that one row each token of `ids` is. Each row of `ids` has 5 tokens, and per_row=[2] puts
    # two completions into one row.
    ids = torch.tensor([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7]], device=model.device)
    inputs, places = model_inputs(ids, torch.tensor([5, 5], device=model.device), [2], model.dtype)
    try:
        with torch.no_grad():
            separate = model(input_ids=ids, use_cache=False).logits
            in_one_row = model(**inputs, use_cache=False).logits.flatten(0, 1)[places]
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # the model does not take such a mask
        return False
    # This tolerance is far above rounding errors, and far below the effect of a wrong token.
    tolerance = torch.finfo(separate.dtype).eps ** 0.5
    return bool((in_one_row - separate).abs().max() <= tolerance * separate.abs().max())


def limits_of(config: Config, models: list[PreTrainedModel], longest_prompt: int) -> Limits:
    """Return the limits of a micro-batch, which all these models can read: the policy, and the reference if there is
    one, which may be of another kind.

    If a model changes the output of its head, log-probs are computed from the model's logits, and the model is called
    once for each row (fast/output_head.py). If such a model is sharded, each micro-batch is a single row. The reason is
    that all ranks must call a sharded model equally often. They have equally many micro-batches, but these may have
    different numbers of rows."""
    ids = torch.zeros(1, 2, dtype=torch.long, device=models[0].device)
    if config.shard and not all(returns_head_output(model, ids) for model in models):
        return Limits(rows=1, tokens=None)
    shares_rows = all(reads_together(model, longest_prompt + config.max_completion_length) for model in models)
    return Limits(
        rows=config.micro_batch_size,
        tokens=config.micro_batch_tokens,
        hidden_size=models[0].config.get_text_config().hidden_size if shares_rows else None,
        # On an H100, an update with shared rows took 1.11 of the time with prompts of 64 tokens and completions of 256,
        # and 0.92 with 256 and 256. A CPU gains with short prompts, too.
        least_prompt=1.0 if models[0].device.type == "cuda" else 0.0,
    )
