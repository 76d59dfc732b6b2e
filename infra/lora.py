"""LoRA, 2106.09685: the weights of the model stay as they are, and two small matrices are trained for each layer.

    y = W x + alpha / r B A x,    A (r, in) uniform in +-1 / sqrt(in), B (out, r) = 0

Every linear layer except the output head gets such an adapter. The weights are in the dtype of the computation, and the
adapters are in fp32. Adapters are never merged into the weights, because bf16 would round small updates away. The
reference of the KL term is the same model with the adapters that it started with or, if these were new, without any.
Adapters are saved in the format of the PEFT library, which transformers and vLLM read, and loaded from it.

Left out: adapters of embeddings and of experts that are stored as one tensor, dropout. An adapter learns nothing if the
model uses the weight of its layer without calling the layer, as Mamba does with dt_proj.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Conv1D, PreTrainedModel

from config import UserError
from infra.ranks import generator
from infra.run_folder import read_json

# In an adapter_config.json: the values of plain LoRA, and names whose values change nothing, or show in the tensors.
PLAIN = dict(peft_type="LORA", bias="none", init_lora_weights=True)
UNREAD = """base_model_name_or_path r lora_alpha target_modules exclude_modules layers_to_transform rank_pattern
    task_type inference_mode lora_dropout auto_mapping peft_version fan_in_fan_out qalora_group_size megatron_core"""

# ---- Adapters in a model ----


def add_adapters(model: PreTrainedModel, rank: int, alpha: float, seed: int = 0) -> PreTrainedModel:
    """Freeze the model and add adapters, the same ones in every process. Sharded weights stay sharded, but every
    process has all of the adapters."""
    model.requires_grad_(False)
    head, random_numbers = model.get_output_embeddings(), generator("lora", seed)
    # The linear layers of GPT-2 are Conv1D, whose weight is transposed.
    for layer in [m for m in model.modules() if isinstance(m, nn.Linear | Conv1D) and m is not head]:
        n_out, n_in = layer.weight.shape[::-1] if isinstance(layer, Conv1D) else layer.weight.shape
        A = torch.from_numpy(random_numbers.uniform(-(n_in**-0.5), n_in**-0.5, (rank, n_in)))
        like = dict(dtype=torch.promote_types(layer.weight.dtype, torch.float32), device=layer.weight.device)
        layer.lora_A, layer.lora_B = nn.Parameter(A.to(**like)), nn.Parameter(torch.zeros(n_out, rank, **like))
        layer.lora_scale, layer.lora_on = alpha / rank, True
        layer.lora_start = ()  # the A and B of `keep_start`
        layer.register_forward_hook(_add)
    return model


def _add(layer: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
    """Add what the adapter computes to the output y (..., out) of its layer. `addmm` multiplies and adds in one
    operation, so that the product is not stored in a second tensor of that size."""
    if not layer.lora_on and not layer.lora_start:
        return y
    A, B = (layer.lora_A, layer.lora_B) if layer.lora_on else layer.lora_start
    low = nn.functional.linear(inputs[0], A.to(inputs[0].dtype)).flatten(0, -2)  # (n, r)
    return torch.addmm(y.flatten(0, -2), low, B.T.to(low.dtype), alpha=layer.lora_scale).view_as(y)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_scale")}


def trained_tensors(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return the tensors that are trained, by name: the adapters, or all weights of a model without adapters."""
    named = dict(model.named_parameters(remove_duplicate=remove_duplicate))
    return {name: p for name, p in named.items() if name.endswith((".lora_A", ".lora_B"))} or named


def keep_start(model: nn.Module) -> None:
    """Keep a copy of the adapters as they are now, for `starting_adapters`."""
    for layer in adapted_layers(model).values():
        layer.lora_start = layer.lora_A.detach().clone(), layer.lora_B.detach().clone()


def started_with(model: nn.Module) -> list[Tensor]:
    """Return the adapters of `keep_start`, if there are any."""
    return [x for layer in adapted_layers(model).values() for x in layer.lora_start]


@contextmanager
def starting_adapters(model: nn.Module) -> Iterator[None]:
    """Compute for a while with the adapters that were there at the start: those of `keep_start`, or none. A model
    without adapters stays as it is."""
    layers = adapted_layers(model).values()
    try:
        for layer in layers:
            layer.lora_on = False
        yield
    finally:
        for layer in layers:
            layer.lora_on = True


def notes(model: PreTrainedModel) -> Iterator[str]:
    """Yield a note for weights that adapters do not reach, and one for adapters that get no gradient."""
    layers = adapted_layers(model)
    left_out = {".".join(name.split(".")[-2:]) for name, p in model.named_parameters() if p.dim() > 2}
    if layers and left_out:
        yield f"no adapters for {', '.join(sorted(left_out))}: experts in one tensor and convolutions stay as they are"
    if any(name.endswith("dt_proj") for name in layers):
        yield "the adapters of dt_proj learn nothing: the model reads the weight of this layer without calling it"


# ---- Adapters on disk, in the format of PEFT ----


def save_adapters(folder: Path, model: PreTrainedModel, adapters: dict[str, Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors, with these tensors of the model, or other values."""
    layers, base = adapted_layers(model), model.config.name_or_path
    first = next(iter(layers.values()))
    about = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=len(first.lora_A),
        lora_alpha=round(first.lora_scale * len(first.lora_A)),  # PEFT and vLLM expect an integer
        target_modules=sorted({name.rpartition(".")[2] for name in layers}),
        fan_in_fan_out=any(isinstance(layer, Conv1D) for layer in layers.values()),  # their weights are transposed
    )
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
    save_file(named_as_in_peft(adapters), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def load_adapters(folder: Path, model: PreTrainedModel) -> None:
    """Give the adapters of the model the values that are in this folder."""
    saved, adapters = load_file(folder / "adapter_model.safetensors"), named_as_in_peft(trained_tensors(model))
    shapes, wanted = ({f"{name} {[*x.shape]}" for name, x in tensors.items()} for tensors in (saved, adapters))
    if wrong := sorted(shapes ^ wanted):  # what only one of the two has
        raise UserError(f"{folder}: has other adapters than those of --lora_rank: {', '.join(wrong[:3])}")
    for name, p in adapters.items():
        p.copy_(saved[name])


def named_as_in_peft(adapters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"base_model.model.{name}.weight": x.detach() for name, x in adapters.items()}


def read_config(model: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json, or an empty dict if `model` is not a folder of adapters. Raise a
    UserError if PEFT would compute something else with these adapters than the hook of this file."""
    file = Path(model or "") / "adapter_config.json"
    if model is None or not file.is_file():
        return {}
    about = read_json(file)
    special = [name for name, x in about.items() if x and name not in UNREAD.split() and x != PLAIN.get(name)]
    if special or about.get("peft_type") != "LORA" or type(about.get("lora_alpha")) is not int:
        raise UserError(f"{model}: is not plain LoRA {special}; merge it into its base model first (docs/extending.md)")
    return about
