"""The norms of a model's layers as one kernel each.

The plain computation, in fp32 and then rounded to the dtype of x, is:

    x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

On a GPU, these are up to eight kernels, which take more time than the sum: a third of all kernels of a token, and a
third of what the elementwise operations of an update read and write. `F.rms_norm` is one. It rounds once where a model
in bf16 rounds twice.

Some models have norms of another form, such as Gemma's, which multiplies by 1 + weight. So each norm is tried once, on
made-up numbers in fp32: `F.rms_norm` must give its values and its gradients, on a CPU to the bit. A norm for which it
does not stays as it is.
"""

from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call


def fuse_norms(model: nn.Module) -> str | None:
    """Let every norm of the model that computes what `F.rms_norm` computes call it, in rollouts and in training. Return
    a note for the user. A norm is a module with a vector of weights, an epsilon, and nothing else."""
    norms = [module for module in model.modules() if parameters_of(module) == [("weight", 1)] and epsilon(module)]
    fused = [norm for norm in norms if is_rms_norm(norm)]
    for norm in fused:
        norm.forward = MethodType(one_kernel, norm)
    return f"{len(fused)} of {len(norms)} norms are computed by one kernel each" if norms else None


def parameters_of(module: nn.Module) -> list[tuple[str, int]]:
    """Return the name and the number of dimensions of each parameter."""
    return [(name, p.dim()) for name, p in module.named_parameters()]


def epsilon(norm: nn.Module) -> float | None:
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)


def one_kernel(norm: nn.Module, x: Tensor) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):  # it would return fp32, also where the layers pass on bf16
        with torch.autocast(x.device.type, enabled=False):
            return one_kernel(norm, x)
    weight = norm.weight
    if x.dtype != weight.dtype:  # `F.rms_norm` has one kernel for equal dtypes only
        dtype = torch.promote_types(x.dtype, weight.dtype)
        x, weight = x.to(dtype), weight.to(dtype)
    return F.rms_norm(x, weight.shape, weight, epsilon(norm))


def is_rms_norm(norm: nn.Module) -> bool:
    n, device = len(norm.weight), norm.weight.device
    weight = torch.linspace(0.5, 1.7, n, device=device).requires_grad_()
    x = (torch.arange(3.0 * n, device=device).sin() + 0.1).view(3, n).requires_grad_()
    g = torch.arange(3.0 * n, device=device).cos().view(3, n)
    found = []
    with torch.enable_grad():
        try:
            its_output = functional_call(norm, {"weight": weight}, (x,))
        except TypeError:  # it also takes a gate, for instance
            return False
        for y in (its_output, F.rms_norm(x, (n,), weight, epsilon(norm))):
            found.append([y, *torch.autograd.grad(y, (x, weight), g)])
    # Kernels of a GPU add up in another order. Four units in the last place of the largest number are allowed there.
    ulps = 0 if device.type == "cpu" else 4 * torch.finfo(torch.float32).eps
    return all((a - b).abs().max() <= ulps * a.abs().max() for a, b in zip(*found))
