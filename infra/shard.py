"""Models that do not fit on one GPU: PyTorch's FSDP2 splits weights, gradients, Adam's state and the reference model
over the ranks.

`fully_shard` leaves each rank 1/n of every tensor, in fp32. The weights of a layer are gathered right before they are
used, in the dtype of the computation, and freed right after. Its gradients are summed over the ranks, in fp32, as soon
as the backward pass has computed them. For a rollout, all weights are gathered once.

n is --shard_size, by default the number of ranks on one machine. If there are more ranks than that, each group of n
ranks has a full copy of the model (hybrid sharding): weights are then exchanged only within a machine, and between
machines only the gradients of each rank's shard, once an update.

Every rank must take part in each forward and backward pass of an update. During a rollout, no rank waits for another.

Left out: tensor parallelism and offloading to the CPU. Without tensor parallelism, weights do not stay split during a
rollout, so a full copy in the dtype of the computation must fit on one GPU. Before torch 2.13, models in which a
micro-batch can leave parameters of a layer unused, such as mixtures of experts, cannot be sharded.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from advantage import Group
from batch import Batch, collate, retry_smaller
from config import UserError
from infra import ranks
from rollout import Completion

KEPT_IDS = 1000  # a guess at how many ids top_p or min_p keep


def make_mesh(size: int, device: torch.device) -> DeviceMesh:
    """Return the ranks as a mesh of shape (copies, shards of a copy), or (shards,) if there is only one copy. A copy is
    split over `size` ranks, or over those of a machine if this is 0."""
    world = ranks.world()
    sizes = ranks.gather([size or int(os.environ.get("LOCAL_WORLD_SIZE", world))])
    if len(set(sizes)) > 1 or world % sizes[0]:
        raise UserError(f"--shard_size: must be one number that divides {world} ranks, not {sorted(set(sizes))}")
    if sizes[0] == world:
        return init_device_mesh(device.type, (world,))
    mesh = init_device_mesh(device.type, (world // sizes[0], sizes[0]), mesh_dim_names=("replicate", "shard"))
    for group in mesh.get_all_groups():
        # The default of NCCL is 10 minutes. The first rank may need longer to save a checkpoint, and meanwhile the
        # others wait for it.
        dist.distributed_c10d._set_pg_timeout(ranks.TIMEOUT, group)
    return mesh


def shard(
    model: PreTrainedModel, whole: PreTrainedModel | None, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """Shard a model that is on the meta device, and fill it with the weights of `whole`. Only rank 0 has a
    `whole` model; on all other ranks it is None."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units = [module for module in model.modules() if type(module).__name__ in (model._no_split_modules or ())]
    units += [model.get_input_embeddings(), model.get_output_embeddings()]
    # A unit is a module whose weights are gathered and freed together. Modules that share a weight, such as tied
    # embeddings, cannot be units. Weights outside of every unit are gathered when the forward pass of the model starts.
    users = Counter(p for unit in units for p in unit.parameters())
    units = [unit for unit in units if all(users[p] == 1 for p in unit.parameters())]
    for module in [*units, model]:
        # For the outermost module, `model`, reshard_after_forward=True is not the default.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        module.set_gradient_divide_factor(1.0)  # gradients are summed over the ranks, not averaged
        module.set_force_sum_reduction_for_comms(True)  # the only way to sum with gloo
    if hasattr(model, "set_reduce_scatter_unused_params"):  # for experts that no token of this rank was routed to
        model.set_reduce_scatter_unused_params(True)
    # `fully_shard` has given the model a new class, which inherits from both FSDPModule and the original class. Give it
    # the name of the original class, which is saved with the model.
    sharded, original = type(model), type(model).__bases__[1]
    sharded.__name__, sharded.__module__ = original.__name__, original.__module__
    model.to_empty(device=device)
    model.tie_weights()
    fill(model, whole)
    for name, buffer in model.named_buffers():  # some buffers, such as rotary frequencies, are in no state dict
        if whole is not None:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, 0)
    return model


def fill(model: nn.Module, whole: nn.Module | None) -> None:
    """Copy the weights of `whole` into the model. If that is sharded, only rank 0 needs `whole`."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=isinstance(model, FSDPModule))
    set_model_state_dict(model, whole.state_dict() if whole is not None else {}, options=options)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Gather all weights on every rank, in the dtype of the computation, for the duration of the block. A rank can then
    run the model without the others. The hooks that would gather the weights again are removed meanwhile, because they
    cost several milliseconds per token."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    hooks = [(unit._forward_pre_hooks, unit._forward_hooks) for unit in units]
    try:
        for unit in units:
            unit.unshard()
            unit._forward_pre_hooks, unit._forward_hooks = OrderedDict(), OrderedDict()
        yield
    finally:
        for unit, (before, after) in zip(units, hooks, strict=True):
            unit._forward_pre_hooks, unit._forward_hooks = before, after
            unit.reshard()


def sum_between_machines(model: nn.Module, now: bool) -> None:
    """Say whether the next backward pass of a sharded model sums its gradients between machines, as the last one of an
    update must. The others sum them within each machine."""
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of the whole model, on the CPU of rank 0 and without duplicates of tied weights. All ranks
    must call this; the others get an empty dict. One tensor is gathered at a time."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    once = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}  # the first name of each tensor
    return {name: x for name, x in weights.items() if name in once}


def try_micro_batch(run: Any, longest_prompt: int, accumulate: Callable) -> None:
    """Compute the gradients of one full micro-batch, beside empty gradients and moments of Adam. If memory runs out,
    the run ends before its first step. No weight and no random generator changes."""
    trained = [p for p in run.model.parameters() if p.requires_grad]
    held = [torch.empty_like(p) for p in trained for _ in range(3)]
    length = longest_prompt + run.config.max_completion_length
    rows = run.limits.rows or max(1, run.limits.tokens // length)
    retry_smaller(accumulate, run, made_up_batch(run, longest_prompt, rows * ranks.world(), completions=1))
    run.optimizer.zero_grad()
    del held


def made_up_batch(run: Any, prompt_length: int, prompts: int, completions: int) -> Batch:
    """Return a batch of prompts, all with the same random tokens, with this many random completions each, all of full
    length. Whatever a batch may have is filled in."""
    cfg, length = run.config, run.config.max_completion_length
    vocabulary = run.model.config.get_text_config().vocab_size
    draw, kept = np.random.default_rng(0), None
    if cfg.cuts_vocabulary and cfg.keep_set:
        kept = length * [np.arange(min(cfg.top_k or KEPT_IDS, vocabulary), dtype=np.int32)]
    prompt, ones = draw.integers(vocabulary, size=prompt_length).tolist(), torch.ones(completions)
    ids = draw.integers(vocabulary, size=(completions, length))
    made = [Completion(ids=row, logp=np.zeros(length), truncated=False, kept=kept) for row in ids]
    # Advantages of 0 would not do: a micro-batch in which all are 0 may need no backward pass.
    group = Group(prompt, completions=made, rewards=ones, advantages=ones)
    batch = collate([group] * prompts, cfg.mask_truncated, run.device)
    batch.weights = batch.mask.double()
    batch.old_logp = batch.ref_logp = batch.sampler_logp
    if cfg.score_centering:
        batch.sampler_head_logp = batch.sampler_logp[..., None].repeat(1, 1, cfg.score_centering + 1)
        batch.head_ids = torch.zeros_like(batch.sampler_head_logp[..., 1:], dtype=torch.int32)
    return batch
