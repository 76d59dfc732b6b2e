"""A model in bf16: its weights and logits while it decodes, and its experts in an update."""

from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import distance, flat_gradient, tiny_model
from infra.decoding import decoding
from infra.model import compute_experts_in_bf16
from infra.seeds import generator


class Products(TorchDispatchMode):
    """Notes the dtype in which products of experts are computed, forward and backward."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._grouped_mm.default:
            self.dtypes |= {args[0].dtype, args[1].dtype}
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_experts_are_computed_in_the_dtype_of_autocast(name):
    compute_experts_in_bf16()
    model, ids = tiny_model(name, torch.float32), torch.arange(3, 43).view(2, 20)
    found = {}
    for experts, dtype in product(("eager", "grouped_mm"), (torch.bfloat16, torch.float32)):
        model.set_experts_implementation(experts)  # one product for each expert, or one for all
        model.zero_grad()
        with Products() as products, torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            products.dtypes = set()
            logits = model(input_ids=ids).logits
            logits.float().square().mean().backward()
        assert logits.dtype == dtype
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        found[experts, dtype] = logits.detach(), flat_gradient(model), products.dtypes
    for dtype, tolerance in ((torch.bfloat16, 0.02), (torch.float32, 1e-4)):
        logits, gradient, dtypes = found["grouped_mm", dtype]
        assert dtypes == {dtype}
        assert distance(logits, found["eager", dtype][0]) < tolerance
        assert distance(gradient, found["eager", dtype][1]) < tolerance


def test_decoding_has_weights_in_the_dtype_of_the_computation_and_gives_the_very_weights_back():
    """Buffers keep their dtype and tied weights stay tied, also where the block ends with an exception."""
    model = tiny_model("llama tied", torch.float32)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), decoding(model, torch.bfloat16):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {x.dtype for x in model.buffers()} == {torch.float32}
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        raise KeyboardInterrupt
    after = model.state_dict()
    assert all(after[name].dtype == x.dtype and after[name].equal(x) for name, x in before.items())


@torch.no_grad()
@pytest.mark.parametrize("name, exact", [("qwen2", True), ("gemma2", False)])
def test_logits_while_decoding_in_bf16_are_not_rounded_to_it(name, exact):
    """Unless the model changes what its head returns, which it does in bf16."""
    model, ids, states = tiny_model(name, torch.float32).eval(), torch.arange(3, 15)[None], []
    model.lm_head.register_forward_pre_hook(lambda head, args: states.append(args[0]))
    with decoding(model, torch.bfloat16):
        logits = model(ids).logits
        expected = states[-1].double() @ model.lm_head.weight.double().T
    assert states[-1].dtype == torch.bfloat16
    assert logits.dtype == (torch.float32 if exact else torch.bfloat16)
    assert not exact or (logits - expected).abs().max() < 1e-5  # 32 terms, logits of up to about 16, in fp32
    assert "forward" not in vars(model.lm_head) and model(ids).logits.dtype == torch.float32
    with decoding(model, torch.float32):
        assert "forward" not in vars(model.lm_head), "nothing is rounded there"


def test_generators_are_named_by_purpose_seed_and_numbers():
    names = [("a", 0), ("a", 0, 0), ("a", 0, 0, 0), ("a", 1), ("b", 0), ("a", 0, 12), ("a", 0, 1, 2), ("a", 0, 1)]
    first = [int(generator(*name).integers(2**62)) for name in names]
    assert len({*first}) == len(names)
    assert first[0] == generator("a", np.int64(0)).integers(2**62) == 4450455305437647052
