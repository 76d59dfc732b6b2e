"""A mixture of experts under autocast: as in a rollout, where the weights themselves are in bf16."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import distance, flat_gradient, tiny_model
from infra.model import compute_experts_in_bf16


class Products(TorchDispatchMode):
    """Notes the dtype in which products of experts are computed, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._grouped_mm.default:
            self.dtypes |= {args[0].dtype, args[1].dtype}
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_computed_in_the_dtype_of_autocast(name):
    compute_experts_in_bf16()
    model, ids = tiny_model(name, torch.float32), torch.arange(3, 43).view(2, 20)
    found = {}
    for experts in ("eager", "grouped_mm"):  # one product for each expert, or one for all
        model.set_experts_implementation(experts)
        for autocast in (torch.autocast("cpu", torch.bfloat16), nullcontext()):
            with Products() as products:
                with autocast:
                    logits = model(input_ids=ids).logits
                model.zero_grad()
                logits.float().square().mean().backward()
            assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
            found[experts, logits.dtype] = logits.detach(), flat_gradient(model), products.dtypes
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-4)):
        logits, gradient, dtypes = found["grouped_mm", dtype]
        assert dtypes == {dtype}
        assert distance(logits, found["eager", dtype][0]) < tolerance
        assert distance(gradient, found["eager", dtype][1]) < tolerance
