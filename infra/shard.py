"""Models that do not fit on one GPU: weights, gradients, Adam and reference split over ranks, by PyTorch's FSDP2.

`fully_shard` leaves each rank 1/n of every tensor, in fp32. A layer's weights are gathered, in the dtype of the
computation, right before they are used and given back right after; its gradients are summed over ranks, in fp32, as
soon as the backward pass has made them. For a rollout all weights are gathered once.

n is --shard_size, by default the ranks of one machine. With more ranks than that the shards are replicated (hybrid
sharding): weights travel within a machine, and between machines only the gradients of each rank's shard.

Every rank must take part in each forward and backward pass of an update. During a rollout none waits for another.
Left out: weights that stay split while sampling (tensor parallelism), so a whole copy in the compute dtype must fit on
one GPU; offloading to the CPU; before torch 2.13, layers whose parameters not every rank uses in each micro-batch.
"""

import os
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from config import UserError

TIMEOUT = timedelta(hours=2)  # a rank may wait that long for the rollout or the rewards of another


def ranks_of_a_copy(shard_size: int, world: int) -> int:
    return shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", world))


def make_mesh(size: int, device: torch.device) -> DeviceMesh:
    """-> ranks as (copies, shards of a copy), or as shards alone where there is one copy."""
    world = dist.get_world_size()
    sizes: list[int] = [0] * world
    dist.all_gather_object(sizes, ranks_of_a_copy(size, world))
    if len(set(sizes)) > 1:
        raise UserError(f"--shard: machines of {sorted(set(sizes))} ranks; give a --shard_size that divides them all")
    size = sizes[0]
    if world % size:
        raise UserError(f"--shard_size {size}: does not divide the {world} ranks")
    if size == world:
        return init_device_mesh(device.type, (world,))
    # `init_device_mesh` would give these groups NCCL's timeout of 10 minutes.
    mesh = torch.arange(world).view(-1, size)
    groups = [dist.new_subgroups_by_enumeration(peers.tolist(), timeout=TIMEOUT)[0] for peers in (mesh.T, mesh)]
    return DeviceMesh.from_group(groups, device.type, mesh=mesh, mesh_dim_names=("replicate", "shard"))


def shard(
    empty: PreTrainedModel, whole: PreTrainedModel | None, mesh: DeviceMesh, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A model without weights, on the meta device, becomes a sharded one with the weights that rank 0 has."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    units = [module for module in empty.modules() if type(module).__name__ in (empty._no_split_modules or ())]
    ends = [empty.get_input_embeddings(), empty.get_output_embeddings()]
    if ends[1] is not None and ends[0].weight is not ends[1].weight:  # tied ones stay together, in the root
        units += ends
    users = Counter(p for unit in units for p in unit.parameters())
    # A weight that several modules use must be gathered with the whole model, not with one of them.
    units = [unit for unit in units if all(users[p] == 1 for p in unit.parameters())]
    for module in [*units, empty]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)  # the root, too
        module.set_gradient_divide_factor(1.0)  # gradients are summed over the ranks, not averaged
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other way to do so
    if hasattr(empty, "set_reduce_scatter_unused_params"):  # experts that no token of this rank has chosen
        empty.set_reduce_scatter_unused_params(True)
    # What is saved goes by the name of the model's own class, and under the names that its files had.
    sharded, own = type(empty), type(empty).__bases__[1]
    sharded.__name__, sharded.__module__ = own.__name__, own.__module__
    empty._weight_conversions = getattr(whole, "_weight_conversions", None)
    empty.to_empty(device=device)
    empty.tie_weights()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(empty, whole.state_dict() if whole is not None else {}, options=options)
    buffers = dict(whole.named_buffers()) if whole is not None else {}
    for name, buffer in empty.named_buffers():  # rotary frequencies, say, are in no state dict
        if name in buffers:
            buffer.copy_(buffers[name])
        dist.broadcast(buffer, 0)
    return empty


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


@contextmanager
def unsharded(model: nn.Module) -> Iterator[None]:
    """Every rank has all weights in the compute dtype for a while, and needs no other rank to run the model. The hooks
    that gather weights for a forward pass would only cost time: some milliseconds a token."""
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


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """-> on rank 0's CPU the state dict, tied weights once; gathered one tensor at a time. Elsewhere nothing."""
    once = {name for name, _ in model.named_parameters()}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - once
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: x for name, x in weights.items() if name not in tied}
