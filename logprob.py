"""(model, completions) -> log-prob and entropy of each completion token, without holding (tokens x vocabulary) logits.

    logp_t = z_t[y_t] - logsumexp(z_t),    H_t = -sum_v p_t[v] log p_t[v],    z_t = head(h_t) / temperature

8 completions of 1024 tokens over a vocabulary of 150k make logits of 5 GB in fp32, held several times over for the
softmax and the gradients. Two things avoid that: only positions that predict a completion token go through the output
head, and they go through it a chunk at a time, in the forward pass and again in the backward pass. The model's own
forward runs as ever; for this one call its output head returns (logp, H) where it would return logits.

That is right only if what the head returns is what the model returns: some models cap or scale the logits afterwards.
The two are compared once, on a short input. If they differ, the log-probs come from the model's logits, one row at a
time, computed again in the backward pass: correct, slower, one row's logits held.

Left out: packing several completions in one row; a head split over devices.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)


def chunk_tokens(on_gpu: bool) -> int:
    """That go through the output head at once."""
    return 2048 if on_gpu else 256


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """input_ids, attention_mask, completion_mask (B, T) -> logp (B, T), entropy (B, T) or None.

    Position t scores token t, both at this temperature; 0 where completion_mask is 0. Padding may stand on either
    side. The entropy carries a gradient only with entropy_grad.
    """
    real = attention_mask.bool()
    # Real tokens move to the left, in order. All padding then stands behind what is scored, so a causal model needs
    # neither a mask nor position ids, and plain causal attention has the faster kernels.
    order = real.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(real.sum(1).max()))]
    ids = input_ids.gather(1, order)
    scored = (completion_mask.bool() & real).gather(1, order)
    if scored[:, 0].any():
        raise ValueError("a completion starts with the first token of its row, where no prompt predicts it")

    with_entropy = with_entropy or entropy_grad
    if head_returns_logits(model, ids):
        logp, entropy = _through_head(model, ids, scored, temperature, with_entropy, entropy_grad)
    else:
        logp, entropy = _through_logits(model, ids, scored, temperature, with_entropy)

    logp, entropy = (torch.zeros_like(input_ids, dtype=x.dtype).scatter(1, order, x) for x in (logp, entropy))
    if not with_entropy:
        return logp, None
    return logp, entropy if entropy_grad else entropy.detach()


def _through_head(
    model: nn.Module,
    ids: Tensor,
    scored: Tensor,
    temperature: float,
    with_entropy: bool,
    entropy_grad: bool,
) -> tuple[Tensor, Tensor]:
    """The fast way: inside the model's forward the output head returns (B, T, 2) instead of (B, T, V)."""
    head = model.get_output_embeddings()
    targets = ids[:, 1:][scored[:, 1:]]  # (n,)

    def score(hidden: Tensor) -> Tensor:
        hidden = hidden[:, :-1][scored[:, 1:]]  # (n, H), the states that predict them
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        chunk = chunk_tokens(hidden.is_cuda)
        values = _HeadLogProb.apply(
            hidden, head.weight, head.bias, targets, temperature, chunk, with_entropy, entropy_grad
        )
        return values.new_zeros(*ids.shape, 2).masked_scatter(scored[..., None], values)

    with forward_replaced(head, score):
        return model(input_ids=ids, use_cache=False).logits.unbind(-1)


def _through_logits(
    model: nn.Module,
    ids: Tensor,
    scored: Tensor,
    temperature: float,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """The way for every other model: its own logits, one row at a time."""
    can_select = "logits_to_keep" in inspect.signature(model.forward).parameters

    def score(row: Tensor, at: Tensor) -> Tensor:  # (T,), positions (n,) -> (n, 2)
        keep = {"logits_to_keep": at - 1} if can_select else {}
        logits = model(input_ids=row[None], use_cache=False, **keep).logits[0]
        logits = logits if can_select else logits[at - 1]
        log_p = torch.log_softmax(logits.to(_at_least_fp32(logits.dtype)) / temperature, dim=-1)
        entropy = _entropy(log_p.exp(), log_p) if with_entropy else log_p.new_zeros(len(at))
        return torch.stack([log_p.gather(1, row[at, None]).squeeze(1), entropy], dim=1)

    values = []
    for row, mask in zip(ids, scored):
        at = mask.nonzero().squeeze(1)
        end = int(at[-1]) + 1 if len(at) else 1
        if len(ids) == 1:
            values.append(score(row[:end], at))
        else:
            values.append(checkpoint(score, row[:end], at, use_reentrant=False))
    values = torch.cat(values)
    out = values.new_zeros(*ids.shape, 2).masked_scatter(scored[..., None], values)
    return out.unbind(-1)


_returns_logits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def head_returns_logits(model: nn.Module, ids: Tensor) -> bool:
    """Whether the model returns its (plain linear) output head's values unchanged: tried once on a short input."""
    if model not in _returns_logits:
        head, seen = model.get_output_embeddings(), []
        if head is not None and type(head).forward is nn.Linear.forward and "forward" not in vars(head):

            def record(hidden: Tensor) -> Tensor:
                # Wide values in place of the head's own, which may be too small for a cap to change them, or all 0.
                values = torch.linspace(-100, 120, len(head.weight), dtype=hidden.dtype, device=hidden.device)
                seen.append(values.expand(*hidden.shape[:-1], -1))
                return seen[-1].clone(memory_format=torch.contiguous_format)

            with torch.no_grad(), forward_replaced(head, record):
                logits = model(input_ids=ids[:1, :8], use_cache=False).logits
        same = len(seen) == 1 and seen[0].shape == logits.shape and torch.equal(seen[0].to(logits.dtype), logits)
        _returns_logits[model] = same
        if not same:
            logger.warning(
                f"{type(model).__name__} returns other logits than its linear head's output: "
                "log-probs are computed from its logits one row at a time, which is correct but slower."
            )
    return _returns_logits[model]


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable) -> Iterator[None]:
    """The module's hooks stay in force, so sharded weights are gathered as ever."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    with torch.autocast(p.device.type, enabled=False):  # einsum is among what autocast computes in bf16
        return -torch.einsum("nv,nv->n", p, log_p)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---- The head's own backward pass: nothing of the size of the logits outlives its chunk ----


class _HeadLogProb(torch.autograd.Function):
    """States (n, H), a linear head and targets (n,) -> (n, 2): log-prob of each target, and entropy.

    The head is taken in the dtype of the states, and its gradient given back in its own, which under autocast is fp32.
    The forward pass saves its inputs alone and the backward pass computes the logits z again. With p = softmax(z):
        d logp / dz = onehot(target) - p,      d H / dz = -p (log p + H)
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature, chunk, with_entropy, entropy_grad):
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = temperature, chunk, entropy_grad
        weight, bias = _to(weight, hidden), _to(bias, hidden)
        values = torch.zeros(len(hidden), 2, dtype=_at_least_fp32(hidden.dtype), device=hidden.device)
        for out, h, y in zip(values.split(chunk), hidden.split(chunk), targets.split(chunk)):
            log_p = _head_log_p(h, weight, bias, temperature)  # (chunk, V)
            out[:, 0] = log_p.gather(1, y[:, None]).squeeze(1)
            if with_entropy:
                out[:, 1] = _entropy(log_p.exp(), log_p)
            del log_p  # before the next chunk makes its own
        return values

    @staticmethod
    def backward(ctx, grad):
        hidden, own_weight, own_bias, targets = ctx.saved_tensors
        temperature, chunk, entropy_grad = ctx.settings
        weight, bias = _to(own_weight, hidden), _to(own_bias, hidden)
        dtype = _at_least_fp32(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if ctx.needs_input_grad[2] else None

        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            h, g_logp, g_entropy = hidden[rows], grad[rows, :1], grad[rows, 1:]  # (chunk, 1) each
            log_p = _head_log_p(h, weight, bias, temperature)
            if entropy_grad:
                p = log_p.exp()
                H = _entropy(p, log_p)[:, None]
                d_z = log_p.add_(H).mul_(-g_entropy).sub_(g_logp).mul_(p)
                del p
            else:
                d_z = log_p.exp_().mul_(-g_logp)
            d_z.scatter_add_(1, targets[rows, None], g_logp)
            if temperature != 1.0:
                d_z.div_(temperature)
            if d_bias is not None:
                d_bias += d_z.sum(0)
            d_z = d_z.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_z, weight, out=d_hidden[rows])
            if d_weight is not None and d_weight.dtype == d_z.dtype:
                d_weight.addmm_(d_z.T, h)
            elif d_weight is not None:
                d_weight += d_z.T @ h  # the sum over chunks stays in fp32
            del log_p, d_z  # before the next chunk makes its own
        return d_hidden, _to(d_weight, own_weight), _to(d_bias, own_bias), None, None, None, None, None


def _head_log_p(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    z = F.linear(hidden, weight, bias)
    z = z.to(_at_least_fp32(z.dtype))
    return torch.log_softmax(z if temperature == 1.0 else z.div_(temperature), dim=-1)


def _to(x: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(like.dtype)
