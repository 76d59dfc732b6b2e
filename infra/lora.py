"""LoRA, 2106.09685: the weights of the model stay as they are, and two small matrices are trained for each layer.

    y = W x + alpha / r B A x,    A (r, in) uniform in +-1 / sqrt(in), B (out, r) = 0

Every linear layer except the output head gets such an adapter. The weights are in the dtype of the computation, and the
adapters are in fp32. Adapters are never merged into the weights, because bf16 would round small updates away. The
reference of the KL term is the same model with its adapters switched off. Adapters are saved in the format of the PEFT
library, which transformers and vLLM read.

Left out: adapters of embeddings and of experts that are stored as one tensor, dropout, training from saved adapters. An
adapter learns nothing if the model uses the weight of its layer without calling the layer, as Mamba does with dt_proj.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Conv1D, PreTrainedModel

from infra.ranks import generator

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
        layer.register_forward_hook(_add)
    return model


def _add(layer: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
    """Add what the adapter computes to the output y (..., out) of its layer. `addmm` multiplies and adds in one
    operation, so that the product is not stored in a second tensor of that size."""
    if not layer.lora_on:
        return y
    low = nn.functional.linear(inputs[0], layer.lora_A.to(inputs[0].dtype)).flatten(0, -2)  # (n, r)
    return torch.addmm(y.flatten(0, -2), low, layer.lora_B.T.to(low.dtype), alpha=layer.lora_scale).view_as(y)


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if hasattr(layer, "lora_scale")}


def trained_tensors(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return the tensors that are trained, by name: the adapters, or all weights of a model without adapters."""
    named = dict(model.named_parameters(remove_duplicate=remove_duplicate))
    return {name: p for name, p in named.items() if name.endswith((".lora_A", ".lora_B"))} or named


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off for a while. A model without adapters stays as it is."""
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
    tensors = {f"base_model.model.{name}.weight": x.detach().cpu() for name, x in adapters.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
