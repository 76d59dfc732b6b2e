"""(model, completions) -> log-prob and entropy of each completion token, without holding (tokens x vocabulary) logits.

    logp_t = z_t[y_t] - logsumexp(z_t),    H_t = -sum_v p_t[v] log p_t[v],    z_t = head(h_t) / temperature

or, of a token that was sampled from a part of the vocabulary, with the logsumexp over that set.

8 completions of 1024 tokens over a vocabulary of 150k make logits of 5 GB in fp32, held several times over for the
softmax and the gradients. Two things avoid that: only positions that predict a completion token go through the output
head, and they go through it a chunk at a time, in the forward pass and again in the backward pass. The model's own
forward runs as ever; for this one call its output head returns (logp, H) where it would return logits. Of states and
weights in bf16 the logits are made in fp32: rounded to bf16, one of 20 would be off by up to 0.06.

That is right only if what the head returns is what the model returns: some models cap or scale the logits afterwards.
The two are compared once, on a short input. If they differ, the log-probs come from the model's logits, one row at a
time, computed again in the backward pass: correct, slower, one row's logits held.

Completions of one prompt may go through the model as one row, so that the prompt is read once. Left out: a head split
over devices.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)
Row = Sequence[Sequence[int] | None]  # of each position the ids of a set, or None: the whole vocabulary


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
    kept: Sequence[Row] | None = None,
    together: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """input_ids, attention_mask, completion_mask (B, T) -> logp (B, T), entropy (B, T) or None.

    Position t scores token t, both at this temperature; 0 where completion_mask is 0. Padding may stand on either
    side. The entropy carries a gradient only with entropy_grad. kept[b][t] are the ids that logp[b, t] is over; None
    there: all, as the entropy always is. together: so many rows, one behind the other, are read as one row.
    """
    real = attention_mask.bool()
    # Real tokens move to the left, in order. All padding then stands behind what is scored, so a causal model needs
    # neither a mask nor position ids, and plain causal attention has the faster kernels.
    order = real.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(real.sum(1).max()))]
    ids = input_ids.gather(1, order)
    scored = (completion_mask.bool() & real).gather(1, order)
    if scored[:, 0].any():
        raise ValueError("a completion starts with the first token of its row, where no prompt predicts it")

    chunk, sets = chunk_tokens(ids.is_cuda), None
    if kept is not None:  # found when their turn comes: a set may be as large as the logits, and its ids larger
        places = zip(scored.nonzero()[:, 0].tolist(), order[scored].tolist())
        chunk, sets = max(1, chunk // 2), [(kept[row], t) for row, t in places]
    with_entropy = with_entropy or entropy_grad
    inputs, places = inputs_of(ids, real.sum(1), together)
    before, targets = places[:, :-1][scored[:, 1:]], ids[scored]  # (n,), where the states are that predict them

    def score(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, part: slice) -> Tensor:
        """This part of what is scored, as states (n, H) and a head's weights, or as logits (n, V) and None -> (n, 2)"""
        settings = sets and sets[part], temperature, chunk, with_entropy, entropy_grad
        return _LogProb.apply(hidden, weight, bias, targets[part], *settings)

    through = _through_head if head_returns_logits(model, ids) else _through_logits
    values = through(model, inputs, before, score)  # (n, 2)
    logp, entropy = values.new_zeros(*ids.shape, 2).masked_scatter(scored[..., None], values).unbind(-1)
    logp, entropy = (torch.zeros_like(input_ids, dtype=x.dtype).scatter(1, order, x) for x in (logp, entropy))
    if not with_entropy:
        return logp, None
    return logp, entropy if entropy_grad else entropy.detach()


def inputs_of(ids: Tensor, lengths: Tensor, together: Sequence[int] | None) -> tuple[dict[str, Tensor], Tensor]:
    """Rows of tokens (B, T), of these lengths (B,) -> what the model reads, as rows (R, L), and where in it, flattened,
    each token stands: (B, T).

    Rows that are read together begin alike. That beginning comes once, then what is left of each, one behind another:
    each sees the beginning and itself, at the positions that it has in a row of its own."""
    (B, T), device = ids.shape, ids.device
    number, t = torch.arange(B, device=device)[:, None], torch.arange(T, device=device)  # (B, 1), (T,)
    if together is None or max(together) == 1:
        return {"input_ids": ids}, t + T * number
    real, packed, begin, shift = t < lengths[:, None], *torch.empty(3, B, 1, dtype=torch.long, device=device)
    for r, rows in enumerate(number[:, 0].split(list(together))):
        alike = ((ids[rows] == ids[rows[0]]) & real[rows]).all(0)
        begin[rows, 0] = alike.long().cumprod(0).sum()
        left = lengths[rows] - begin[rows, 0]
        packed[rows, 0], shift[rows, 0] = r, left.cumsum(0) - left
    own = t >= begin  # (B, T)
    column = t + shift * own
    L = int(column[real].max()) + 1
    places = column + L * packed

    def as_read(x: Tensor) -> Tensor:
        return x.new_zeros(len(together) * L).scatter(0, places[real], x.expand(B, T)[real]).view(-1, L)

    of = as_read(own * (number + 1))  # 0: the beginning
    seen = (of[:, None] == 0) | (of[:, None] == of[..., None])  # (R, L, L)
    return {"input_ids": as_read(ids), "position_ids": as_read(t), "attention_mask": seen.tril()[:, None]}, places


def _through_head(model: nn.Module, inputs: dict[str, Tensor], before: Tensor, score: Callable) -> Tensor:
    """The fast way: inside the model's forward the output head returns (n, 2) instead of (R, L, V)."""
    head = model.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        hidden = hidden.flatten(0, 1)[before]  # (n, H)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        return score(hidden, head.weight, head.bias, slice(None))

    with forward_replaced(head, forward):
        return model(**inputs, use_cache=False).logits


def _through_logits(model: nn.Module, inputs: dict[str, Tensor], before: Tensor, score: Callable) -> Tensor:
    """The way for every other model: its own logits, one row at a time."""
    can_select = "logits_to_keep" in inspect.signature(model.forward).parameters
    R, L = inputs["input_ids"].shape

    def of_row(row: dict[str, Tensor], at: Tensor, part: slice) -> Tensor:  # (n,) -> (n, 2)
        logits = model(**row, use_cache=False, **({"logits_to_keep": at} if can_select else {})).logits[0]
        return score(logits if can_select else logits[at], None, None, part)

    values, n = [], 0
    for r in range(R):
        at = before[before // L == r] - r * L
        given = {name: x[r : r + 1] for name, x in inputs.items()}, at, slice(n, n + len(at))
        values.append(of_row(*given) if R == 1 else checkpoint(of_row, *given, use_reentrant=False))
        n += len(at)
    return torch.cat(values)


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


def linear_in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The factors as they are; product and sum in fp32, or in fp64 where they are."""
    dtype = _at_least_fp32(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        if x.is_cuda and x.dtype != dtype:  # about ten times as fast as casting
            y = torch.mm(x.flatten(0, -2), weight.T, out_dtype=dtype).unflatten(0, x.shape[:-1])
            return y if bias is None else y + bias
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    with torch.autocast(p.device.type, enabled=False):  # einsum is among what autocast computes in bf16
        return -torch.einsum("nv,nv->n", p, log_p)


def _at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---- The head's own backward pass: nothing of the size of the logits outlives its chunk ----


class _LogProb(torch.autograd.Function):
    """States (n, H), a linear head and targets (n,) -> (n, 2): log-prob of each target, and entropy. Without a
    head the states are the logits (n, V) themselves.

    The head is taken in the dtype of the states, and its gradient given back in its own, which under autocast is fp32.
    The forward pass saves its inputs alone and the backward pass computes the logits z again. With p = softmax(z), and
    q the same over the target's set:
        d logp / dz = onehot(target) - q,      d H / dz = -p (log p + H)
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, sets, temperature, chunk, with_entropy, entropy_grad):
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.settings = sets, temperature, chunk, entropy_grad
        weight, bias = _to(weight, hidden), _to(bias, hidden)
        values = torch.zeros(len(hidden), 2, dtype=_at_least_fp32(hidden.dtype), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            log_p = _log_p(hidden[rows], weight, bias, temperature)  # (chunk, V)
            values[rows, 0] = log_p.gather(1, targets[rows, None]).squeeze(1)
            if sets is not None:
                values[rows, 0] -= _over_sets(log_p, sets[rows])[1].logsumexp(1)
            if with_entropy:
                values[rows, 1] = _entropy(log_p.exp(), log_p)
            del log_p  # before the next chunk makes its own
        return values

    @staticmethod
    def backward(ctx, grad):
        hidden, own_weight, own_bias, targets = ctx.saved_tensors
        sets, temperature, chunk, entropy_grad = ctx.settings
        weight, bias = _to(own_weight, hidden), _to(own_bias, hidden)
        dtype = _at_least_fp32(hidden.dtype)
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if ctx.needs_input_grad[2] else None

        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            h, g_logp, g_entropy = hidden[rows], grad[rows, :1], grad[rows, 1:]  # (chunk, 1) each
            log_p, g_p = _log_p(h, weight, bias, temperature), g_logp
            if sets is not None:
                ids, log_q = _over_sets(log_p, sets[rows])
                d_set, g_p = log_q.softmax(1).mul_(-g_logp), torch.zeros_like(g_logp)
            if entropy_grad:
                p = log_p.exp()
                H = _entropy(p, log_p)[:, None]
                d_z = log_p.add_(H).mul_(-g_entropy).sub_(g_p).mul_(p)
                del p
            else:
                d_z = log_p.exp_().mul_(-g_p)
            if sets is not None:
                d_z.scatter_add_(1, ids, d_set)
                del ids, log_q, d_set
            d_z.scatter_add_(1, targets[rows, None], g_logp)
            if temperature != 1.0:
                d_z.div_(temperature)
            if d_bias is not None:
                d_bias += d_z.sum(0)
            d_z = d_z.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = d_z if weight is None else d_z @ weight
            if d_weight is not None and d_weight.dtype == d_z.dtype:
                d_weight.addmm_(d_z.T, h)
            elif d_weight is not None:
                d_weight += linear_in_fp32(d_z.T, h.T)
            del log_p, d_z  # before the next chunk makes its own
        return d_hidden, _to(d_weight, own_weight), _to(d_bias, own_bias), *6 * [None]


def _log_p(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, temperature: float) -> Tensor:
    z = hidden.to(_at_least_fp32(hidden.dtype)) if weight is None else linear_in_fp32(hidden, weight, bias)
    if temperature != 1.0:
        z = z / temperature
    return torch.log_softmax(z, dim=-1)


def _over_sets(log_p: Tensor, sets: list[tuple[Row, int]]) -> tuple[Tensor, Tensor]:
    """(n, V) -> ids (n, K), as many as the widest set has, and log_p of them; behind a set's last 0 and -inf"""
    found, whole = [row[t] for row, t in sets], torch.arange(log_p.shape[1])
    ids = [torch.as_tensor(whole if of_one is None else of_one, dtype=torch.int32) for of_one in found]
    ids = pad_sequence(ids, batch_first=True, padding_value=-1).to(log_p.device)
    at = ids.clamp(min=0).long()
    return at, log_p.gather(1, at).masked_fill_(ids < 0, -torch.inf)


def _to(x: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(like.dtype)
