"""LoRA, 2106.09685: the weights of the model stay as they are, and two small matrices are trained for each layer.

    y = W x + alpha / r B A x,    A (r, in) uniform in +-1 / sqrt(in), B (out, r) = 0

Every linear layer but the output head gets such an adapter. The weights are in the dtype of the computation and the
adapters in fp32. Adapters are never merged into the weights, because bf16 would round small updates away. With its
adapters switched off, the model is the reference of the KL term. Adapters are saved in the format of the library PEFT,
which transformers and vLLM read.
Left out: embeddings, experts that are one tensor, dropout, training that starts from saved adapters.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from config import UserError
from infra.seeds import generator

PLAIN = dict(peft_type="LORA", task_type="CAUSAL_LM", bias="none", init_lora_weights=True)
# The names and shapes of the tensors show which layers have an adapter. Other settings of PEFT that are in use change
# what is computed, so they are refused.
NOT_READ = {
    *("base_model_name_or_path", "r", "lora_alpha", "target_modules", "exclude_modules", "layers_to_transform"),
    *("layers_pattern", "fan_in_fan_out", "lora_dropout", "inference_mode", "auto_mapping", "peft_version"),
    *("megatron_core", "qalora_group_size"),
}


# ---- Adapters in a model ----


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    head = model.get_output_embeddings()
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}


def sizes(layer: nn.Module) -> tuple[int, int]:
    """-> the sizes of the layer's input and output"""
    return (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.in_features, layer.out_features)


def add_adapters(model: PreTrainedModel, rank: int, alpha: float, seed: int = 0) -> None:
    """Freeze the model and add adapters, the same ones on every rank. Sharded weights stay sharded, and the adapters
    are whole on every rank."""
    model.requires_grad_(False)
    layers, numbers = linear_layers(model), generator("lora", seed)
    if not layers:
        raise UserError(f"--lora_rank: {type(model).__name__} has no linear layer but its output head")
    for layer in layers.values():
        (n_in, n_out), weight = sizes(layer), layer.weight
        like = dict(dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        A = torch.from_numpy(numbers.uniform(-(n_in**-0.5), n_in**-0.5, (rank, n_in)))
        layer.lora_A, layer.lora_B = nn.Parameter(A.to(**like)), nn.Parameter(torch.zeros(n_out, rank, **like))
        layer.lora_scale = alpha / rank
        layer.register_forward_hook(_add)


def _add(layer: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
    """(..., out) -> (..., out). One product adds to y, so that nothing else of the size of y is made."""
    if layer.lora_scale == 0.0:
        return y
    low = F.linear(inputs[0], layer.lora_A.to(inputs[0].dtype)).flatten(0, -2)  # (n, r)
    return torch.addmm(y.flatten(0, -2), low, layer.lora_B.T.to(low.dtype), alpha=layer.lora_scale).view_as(y)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_scale")}


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did before it got adapters. A model without adapters stays as it is."""
    scales = {layer: layer.lora_scale for layer in adapted_layers(model).values()}
    try:
        for layer in scales:
            layer.lora_scale = 0.0
        yield
    finally:
        for layer, scale in scales.items():
            layer.lora_scale = scale


def trained(model: nn.Module) -> dict[str, Tensor]:
    """-> the adapters by name; all weights of a model that has none"""
    layers, parts = adapted_layers(model), ("lora_A", "lora_B")
    adapters = {f"{name}.{part}": getattr(layer, part) for name, layer in layers.items() for part in parts}
    return adapters or dict(model.named_parameters())


def idle_layer(model: PreTrainedModel) -> str | None:
    """-> the first layer whose adapter a short forward pass does not call, because the model uses its weight in another
    way. All ranks must call this."""
    layers, called = adapted_layers(model), set()
    hooks = [layer.register_forward_hook(lambda layer, *_: called.add(layer)) for layer in layers.values()]
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    for hook in hooks:
        hook.remove()
    return next((name for name, layer in layers.items() if layer not in called), None)


def notes(model: PreTrainedModel) -> Iterator[str]:
    layers, head = adapted_layers(model).values(), model.get_output_embeddings()
    if layers:
        inner = [module for module in model.modules() if not isinstance(module, nn.Embedding) and module is not head]
        weights = [p for module in inner for p in module.parameters(recurse=False) if p.dim() > 1]
        frozen = sum(p.numel() for p in weights if not p.requires_grad)
        reached = sum(layer.weight.numel() for layer in layers) / frozen
        yield f"the adapters have {sum(p.numel() for p in trained(model).values()):,} parameters"
        if reached < 1:
            yield f"they reach {reached:.0%} of the weights between embeddings and head; only linear layers have any"


# ---- Adapters on disk, as PEFT has them ----


def save_adapters(folder: Path, model: PreTrainedModel) -> None:
    layers, base = adapted_layers(model), model.config.name_or_path
    first = next(iter(layers.values()))
    rank = len(first.lora_A)
    about = PLAIN | dict(
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
        r=rank,
        lora_alpha=round(first.lora_scale * rank),  # PEFT and vLLM expect an integer
        target_modules=sorted({name.rpartition(".")[2] for name in layers}),
        fan_in_fan_out=isinstance(first, Conv1D),
        inference_mode=True,
    )
    (folder / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
    tensors = {f"base_model.model.{name}.weight": p.detach().cpu() for name, p in trained(model).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def check_plain(folder: Path, about: dict[str, Any]) -> None:
    """Raise an error if adapter_config.json asks for more than plain LoRA."""
    more = {name: x for name, x in about.items() if name not in NOT_READ and x and x != PLAIN.get(name)}
    for name, x in more.items():
        raise UserError(f"--model {folder}: its adapter_config.json has {name} {x}, and only plain LoRA is read")


def load_adapters(model: PreTrainedModel, folder: Path, rank: int, alpha: float, tensors: dict[str, Tensor]) -> None:
    add_adapters(model, rank, alpha)
    saved = {name.removeprefix("base_model.model.").removesuffix(".weight"): x for name, x in tensors.items()}
    wrong = {(name, x.shape) for name, x in saved.items()} ^ {(name, p.shape) for name, p in trained(model).items()}
    if wrong:
        only = "only adapters of every linear layer but the output head, all of one rank, are read"
        raise UserError(f"--model {folder}: {only}; {min(wrong)[0]} is missing, or should not be there")
    with torch.no_grad():
        for name, p in trained(model).items():
            p.copy_(saved[name])
