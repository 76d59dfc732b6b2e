"""A function of the logits of some tokens, without the logits of all tokens in memory.

The plain computation, for n places among the tokens of the inputs, is:

    logits = model(**inputs).logits.flatten(0, 1)[places]  # (n, V)
    values = values_of(logits)                             # (n, W), a few numbers for each token
    d_logits = gradient_of(logits, d_values)               # in the backward pass

8 completions of 1024 tokens over a vocabulary of 150k have logits of 5 GB in fp32, and autograd would keep several
copies of them. So only the places that are needed go through the output head, one chunk at a time. Inside the forward
pass of the model, the head returns the W numbers instead of V logits, and the backward pass computes the logits of each
chunk again. Logits are in fp32 even if states and weights are in bf16, because rounding a logit of 20 to bf16 would
change it by up to 0.06.

Replacing the output of the head is right only if the model returns it unchanged, but some models cap or scale it. So
each model is tried once, on a short input: the head returns made-up values, which must come back as the model's logits.
If they do not, the model's logits are used, one row at a time, which is slower but right for every model. Left out: an
output head that is split over devices.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)


def function_of_logits(
    model: nn.Module,
    inputs: dict[str, Tensor],
    places: Tensor,
    values_of: Callable[[Tensor, slice], Tensor],
    gradient_of: Callable[[Tensor, slice, Tensor], Tensor],
    chunk: int,
) -> Tensor:
    """Return the values (n, W) of a function of the logits at n places, with their gradient.

    `inputs` are R rows of L tokens, as keyword arguments of the model. `places` (n,) are indices into these R * L
    tokens, in ascending order. values_of(logits, part) gets the logits of places[part], which are at most a chunk, and
    returns their values. gradient_of(logits, part, d_values) gets the gradient of these values as well, and returns
    that of the logits. Both may overwrite the logits.
    """
    in_chunks = partial(_InChunks.apply, values_of, gradient_of, chunk)
    if returns_head_output(model, inputs["input_ids"]):
        return _in_head(model, inputs, places, in_chunks)
    return _from_own_logits(model, inputs, places, in_chunks)


def _in_head(model: nn.Module, inputs: dict[str, Tensor], places: Tensor, in_chunks: Callable) -> Tensor:
    """Compute the values inside the model's forward pass, where the head returns them instead of (R, L, V) logits."""
    head = model.get_output_embeddings()

    def forward(states: Tensor) -> Tensor:
        states = states.flatten(0, 1)[places]  # (n, H)
        if torch.is_autocast_enabled(states.device.type):
            states = states.to(torch.get_autocast_dtype(states.device.type))
        return in_chunks(0, states, head.weight, head.bias)

    with forward_replaced(head, forward):
        return model(**inputs, use_cache=False).logits


def _from_own_logits(model: nn.Module, inputs: dict[str, Tensor], places: Tensor, in_chunks: Callable) -> Tensor:
    """Compute the values from the model's own logits, one row at a time. If there are several rows, the backward pass
    computes each of them again, so that only the logits of one row are in memory."""
    can_select = "logits_to_keep" in inspect.signature(model.forward).parameters
    R, L = inputs["input_ids"].shape

    def of_row(row: dict[str, Tensor], at: Tensor, first: int) -> Tensor:
        """Compute the values at these places in the row. `first` is how many places there are in earlier rows."""
        selection = {"logits_to_keep": at} if can_select else {}
        logits = model(**row, **selection, use_cache=False).logits[0]
        return in_chunks(first, logits if can_select else logits[at], None, None)

    if R == 1:
        return of_row(inputs, places, 0)
    values, first = [], 0
    for r in range(R):
        at = places[places // L == r] - r * L  # the tokens of row r have the places r * L to r * L + L - 1
        row = {name: x[r : r + 1] for name, x in inputs.items()}
        values.append(checkpoint(of_row, row, at, first, use_reentrant=False))
        first += len(at)
    return torch.cat(values)


class _InChunks(torch.autograd.Function):
    """Compute the values of n tokens from their states (n, H) and a linear head. Without a head, the states are logits
    (n, V). Only one chunk of logits is in memory at any time.

    The head is used in the dtype of the states. The gradient of its weight has the dtype of the weight, which is fp32
    under autocast. The first of the states belongs to places[first].
    """

    @staticmethod
    def forward(ctx, values_of, gradient_of, chunk, first, states, weight, bias):
        ctx.save_for_backward(states, weight, bias)
        ctx.settings = gradient_of, chunk, first
        weight, bias = _in_dtype(weight, states.dtype), _in_dtype(bias, states.dtype)
        values = []
        with torch.autocast(states.device.type, enabled=False):
            for rows, part in _chunks(len(states), chunk, first):
                values.append(values_of(_logits(states[rows], weight, bias), part))
        return torch.cat(values)

    @staticmethod
    def backward(ctx, grad):
        states, own_weight, own_bias = ctx.saved_tensors
        gradient_of, chunk, first = ctx.settings
        weight, bias = _in_dtype(own_weight, states.dtype), _in_dtype(own_bias, states.dtype)
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad[-3:]
        dtype = at_least_fp32(states.dtype)
        d_states = torch.empty_like(states) if needs_states else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if needs_bias else None
        with torch.autocast(states.device.type, enabled=False):
            for rows, part in _chunks(len(states), chunk, first):
                d_logits = gradient_of(_logits(states[rows], weight, bias), part, grad[rows])
                if needs_bias:
                    d_bias += d_logits.sum(0)
                d_logits = d_logits.to(states.dtype)
                if needs_states:
                    d_states[rows] = d_logits if weight is None else d_logits @ weight
                if needs_weight:
                    _add_product(d_weight, d_logits.T, states[rows])
                del d_logits  # free it before the next chunk makes its own
        d_weight = _in_dtype(d_weight, own_weight.dtype) if needs_weight else None
        d_bias = _in_dtype(d_bias, own_bias.dtype) if needs_bias else None
        return None, None, None, None, d_states, d_weight, d_bias


def _chunks(n: int, size: int, first: int) -> list[tuple[slice, slice]]:
    """Divide n states into chunks. Return for each chunk its rows of the states, and its part of the places. There is
    at least one chunk, which is empty if n is 0."""
    ends = [(start, min(start + size, n)) for start in range(0, max(n, 1), size)]
    return [(slice(start, end), slice(first + start, first + end)) for start, end in ends]


def _logits(states: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return logits that may be overwritten."""
    if weight is None:
        return states.to(at_least_fp32(states.dtype), copy=True)
    return linear_in_fp32(states, weight, bias)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the total, which is in fp32 even if a and b are in bf16."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)  # needs no memory for the product
    elif _addmm_takes_fp32(total.device):
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)  # neither does this
    else:
        total += linear_in_fp32(a, b.T)


@cache
def _addmm_takes_fp32(device: torch.device) -> bool:
    """Return whether PyTorch can add a product in bf16 to a sum in fp32 here, which is tried once."""
    one = torch.ones(1, 1, device=device)
    try:
        torch.addmm(one, one.bfloat16(), one.bfloat16(), out_dtype=one.dtype, out=one)
    except (RuntimeError, TypeError):  # it cannot on a CPU
        return False
    return one.item() == 2.0


def _in_dtype(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if x is None else x.to(dtype)


_returns_logits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # the results of earlier trials


def returns_head_output(model: nn.Module, ids: Tensor) -> bool:
    """Return whether the model has a plain linear head and returns its output unchanged. Each model is tried once."""
    if model not in _returns_logits:
        _returns_logits[model] = _returns_made_up_values(model, ids[:1, :8])
        if not _returns_logits[model]:
            logger.warning(f"{type(model).__name__} changes its head's output: scoring its logits, which is slower")
    return _returns_logits[model]


def _returns_made_up_values(model: nn.Module, ids: Tensor) -> bool:
    """Return whether the model returns what its head returns, tried with values that any cap or scale would change. The
    head's own output may be 0, or so small that a cap does not change it."""
    head = model.get_output_embeddings()
    if head is None or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return False  # it is not a plain linear head
    seen = []

    def made_up(states: Tensor) -> Tensor:
        values = torch.linspace(-100, 120, len(head.weight), dtype=states.dtype, device=states.device)
        seen.append(values.expand(*states.shape[:-1], -1))
        return seen[-1].clone(memory_format=torch.contiguous_format)  # some models change the output in place

    with torch.no_grad(), forward_replaced(head, made_up):
        logits = model(input_ids=ids, use_cache=False).logits
    return len(seen) == 1 and seen[0].shape == logits.shape and torch.equal(seen[0].to(logits.dtype), logits)


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Replace the module's `forward` in a `with` block, which may be inside another such block. Its hooks still run, so
    sharded weights are gathered as usual."""
    outer = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if outer is not None:
            module.forward = outer


def logits_in_fp32(model: nn.Module, dtype: torch.dtype) -> AbstractContextManager:
    """Let a rollout compute logits as training does: in fp32, without rounding them to the dtype of the weights. Models
    that change the output of their head are left alone, because training uses their own logits, too."""
    head, ids = model.get_output_embeddings(), torch.zeros(1, 2, dtype=torch.long, device=model.device)
    in_fp32 = forward_replaced(head, lambda hidden: linear_in_fp32(hidden, head.weight, head.bias))
    return in_fp32 if dtype != torch.float32 and returns_head_output(model, ids) else nullcontext()


def linear_in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute F.linear with products and sums in fp32, even if x and weight are in bf16. If they are in fp64, use
    fp64."""
    dtype = at_least_fp32(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        if x.is_cuda and x.dtype != dtype:  # about ten times faster than casting the factors
            y = torch.mm(x.flatten(0, -2), weight.T, out_dtype=dtype).unflatten(0, x.shape[:-1])
            return y if bias is None else y + bias
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
