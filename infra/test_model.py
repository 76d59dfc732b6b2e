"""A model in bf16: its weights and logits while it decodes, and its experts in an update. Also: norms as one kernel,
which models read several completions as one row, and the generators of random numbers."""

import inspect

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.integrations import sdpa_attention

from config import Config
from conftest import FAMILIES, Operations, flat_gradient, tiny_model
from fast.norm import fuse_norms
from infra.decoding import decoding
from infra.lora import add_adapters
from infra.model import limits_of
from infra.ranks import generator, seed_everything


class Products(TorchDispatchMode):
    """Record the dtypes of the factors when one product is computed for all experts, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.aten._grouped_mm.default:
            self.dtypes |= {args[0].dtype, args[1].dtype}
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts_are_computed_in_the_dtype_of_autocast(name):
    """PyTorch's autocast has no rule for the product of all experts. infra.model adds one."""
    model = tiny_model(name, torch.float32)
    model.set_experts_implementation("grouped_mm")
    with Products() as products, torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.arange(3, 43).view(2, 20)).logits.float().square().mean().backward()
    assert products.dtypes == {torch.bfloat16}
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())


def test_decoding_converts_the_weights_and_restores_them():
    """Buffers keep their dtype, and tied weights stay tied. The weights, trained or not, are restored even after an
    exception."""
    model = add_adapters(tiny_model("llama tied", torch.float32), rank=2, alpha=4)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt), decoding(model, torch.bfloat16):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        assert {x.dtype for x in model.buffers()} == {torch.float32}
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        raise KeyboardInterrupt
    after = model.state_dict()
    assert all(after[name].dtype == x.dtype and after[name].equal(x) for name, x in before.items())


OWN_NORMS = "gemma", "gemma2", "gemma3", "cohere"  # two multiply by 1 + weight, and one subtracts the mean
WITH_A_BIAS = "phi", "gpt2", "gpt2 tied", "gpt_neox", "bloom"  # of another kind, so they are not tried


@pytest.mark.parametrize("name", FAMILIES)
def test_norms_as_one_kernel_give_the_same_numbers(name):
    model, ids = tiny_model(name, torch.float32), torch.arange(3, 43).view(2, 20)

    def outputs() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        logits = model(input_ids=ids).logits
        logits.square().mean().backward()
        return logits.detach(), flat_gradient(model)

    before, note = outputs(), fuse_norms(model)
    assert all(torch.equal(ours, own) for ours, own in zip(outputs(), before)), "to the bit"
    kept = [norm for norm in model.modules() if type(norm).__name__.endswith("Norm") and "forward" not in vars(norm)]
    assert bool(kept) == (name in OWN_NORMS + WITH_A_BIAS)
    assert (note is None) == (name in WITH_A_BIAS) and (note or "0 of").startswith("0 of") == bool(kept)


def test_a_norm_is_one_kernel_and_keeps_the_dtype_of_the_layers():
    """Under autocast, layers pass on fp32 if the weights are in fp32, and bf16 if they are in bf16, as with --shard."""
    model, ids = tiny_model("qwen3", torch.float32), torch.arange(3, 43).view(2, 20)
    launches = []
    for _ in range(2):
        with torch.no_grad(), Operations() as operations:
            model(input_ids=ids)
        launches.append(operations.launches.total())
        assert fuse_norms(model) == "9 of 9 norms are computed by one kernel each"
    assert launches[0] - launches[1] == 9 * 5  # a product, a mean, a sum, a root, two products: of these six, one stays
    norm = model.model.norm
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(torch.ones(2, 32)).dtype == torch.float32
        assert norm.bfloat16()(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


@torch.no_grad()
@pytest.mark.parametrize("name, exact", [("qwen2", True), ("phi", True), ("gemma2", False)])
def test_logits_while_decoding_in_bf16_are_not_rounded_to_bf16(name, exact):
    """Gemma 2 is an exception: after its head, it changes the logits, and it does so in bf16. The head of Phi has a
    bias."""
    model, ids, states = tiny_model(name, torch.float32).eval(), torch.arange(3, 15)[None], []
    model.lm_head.register_forward_pre_hook(lambda head, args: states.append(args[0]))
    with decoding(model, torch.bfloat16):
        logits = model(ids).logits
        expected = torch.nn.functional.linear(states[-1].double(), *(x.double() for x in model.lm_head.parameters()))
    assert states[-1].dtype == torch.bfloat16
    assert logits.dtype == (torch.float32 if exact else torch.bfloat16)
    # A logit is a sum of 32 terms and is at most about 16. Computing it in fp32 rounds it by less than 1e-5.
    assert not exact or (logits - expected).abs().max() < 1e-5
    # While decoding, the head may have another forward and its weights are in bf16. Now both are restored.
    assert "forward" not in vars(model.lm_head) and model(ids).logits.dtype == torch.float32


def test_random_numbers_follow_from_purpose_seed_and_numbers():
    names = [("a", 0), ("a", 0, 0), ("a", 0, 0, 0), ("a", 1), ("b", 0), ("a", 0, 12), ("a", 0, 1, 2), ("a", 0, 1)]
    first = [int(generator(*name).integers(2**62)) for name in names]
    assert len({*first}) == len(names)
    assert first[0] == generator("a", np.int64(0)).integers(2**62) == 4450455305437647052  # runs depend on this value
    drawn = []
    for seed in (0, 1, 0):
        seed_everything(seed, 1)
        drawn.append(np.random.rand())  # as a reward may do
    assert drawn[0] == drawn[2] != drawn[1]


@pytest.mark.parametrize("prompt, together", [(9, True), (11, False)])
def test_completions_share_a_row_only_if_they_fit_into_the_window_of_every_model(prompt, together):
    models = [tiny_model("llama"), tiny_model("mistral", sliding_window=30)]
    limits = limits_of(Config(max_completion_length=20), models, prompt)
    # The limits have the hidden size, 32, if completions may share a row, and otherwise None.
    assert limits.hidden_size == (32 if together else None)


def test_private_names_of_the_libraries_still_mean_what_the_code_assumes():
    """A renamed one would otherwise pass in silence: a slower run."""
    assert "use_gqa_in_sdpa(" in inspect.getsource(sdpa_attention.sdpa_attention_forward)  # replaced in infra/model.py
    assert "Qwen2DecoderLayer" in tiny_model("qwen2")._no_split_modules  # infra/shard.py
    assert torch.version.cuda is None or hasattr(torch._C, "_cuda_set_sync_debug_mode")  # infra/decoding.py
