"""The log-probs and entropies of tokens, without computing the logits of all tokens at once.

The plain computation, with the logits z of the positions that predict the targets y, is:

    all_logp = (z / temperature).log_softmax(-1)
    logp = all_logp.gather(-1, y)
    entropy = -(all_logp.exp() * all_logp).sum(-1)

The kept set of a token is the set of ids that top-k, top-p and min-p left for the sampler to choose from. If a token
has a kept set, its log-prob is normalized over this set: `logp - all_logp[kept].logsumexp(-1)`.

A token may also have a head, which has nothing to do with the output head: some ids whose log-probs are wanted as well,
together with that of all others (in the kept set): `all_logp[head_ids]` and `all_logp[others].logsumexp(-1)`.

8 completions of 1024 tokens over a vocabulary of 150k have logits of 5 GB in fp32, and autograd would keep several
copies of them. So only the positions that are needed go through the output head, one chunk at a time. Inside the
forward pass of the model, the head returns (logp, entropy) instead of V logits, and its hand-written backward pass
computes the logits of each chunk again. Logits are in fp32 even if states and weights are in bf16, because rounding a
logit of 20 to bf16 would change it by up to 0.06.

Replacing the output of the head is right only if the model returns it unchanged, but some models cap or scale it. So
each model is tried once, on a short input: the head returns made-up values, which must come back as the model's logits.
If they do not, the model's logits are used, one row at a time, which is slower but right for every model. Left out: an
output head that is split over devices.
"""

import inspect
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)


@dataclass
class KeptSets:
    """The kept sets of n targets, of any sizes, one after another."""

    ids: Tensor  # (m,), int32
    sizes: Tensor  # (n,)
    starts: list[int]  # n + 1 numbers: where each set starts in `ids`, and where the last one ends

    def __getitem__(self, part: slice) -> "KeptSets":
        starts = self.starts[part.start : part.stop + 1]
        return KeptSets(self.ids[starts[0] : starts[-1]], self.sizes[part], [x - starts[0] for x in starts])

    def for_each_id(self, values: Tensor) -> Tensor:
        """Repeat the value (n,) of each target for each id of its set, (m,)."""
        return values.repeat_interleave(self.sizes, output_size=len(self.ids))


def kept_sets(sets: Sequence[Sequence[int] | None], vocabulary: int, device: torch.device) -> KeptSets:
    """Copy the sets to the device. None stands for the whole vocabulary."""
    whole = np.arange(vocabulary)
    arrays = [whole if ids is None else np.asarray(ids) for ids in sets]
    sizes = [len(ids) for ids in arrays]
    ids = torch.as_tensor(np.concatenate(arrays).astype(np.int32)).to(device)
    return KeptSets(ids, torch.tensor(sizes, device=device), [*accumulate(sizes, initial=0)])


def score_tokens(
    model: nn.Module,
    inputs: dict[str, Tensor],
    predictors: Tensor,
    targets: Tensor,
    sets: Sequence[Sequence[int] | None] | None = None,
    head_ids: Tensor | None = None,
    *,
    temperature: float,
    chunk: int,
    with_entropy: bool,
    entropy_grad: bool,
) -> Tensor:
    """Return the log-prob and the entropy of each target, (n, 2). With head_ids (n, K), return (n, 2 + K + 1): also the
    log-probs of these ids and, last, of all others together.

    `inputs` are R rows of L tokens, as keyword arguments of the model. Target i is predicted at position predictors[i]
    of these R * L tokens, and sets[i] are the ids of its kept set.
    """
    kept = kept_sets(sets, len(model.get_output_embeddings().weight), targets.device) if sets else None

    def score(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, part: slice | None = None):
        """Score this part of the targets. x are their states, or their logits if there is no weight."""
        part = part or slice(0, len(targets))
        of_part = targets[part], *(None if each is None else each[part] for each in (kept, head_ids))
        return _ScoreTokens.apply(x, weight, bias, *of_part, temperature, chunk, with_entropy, entropy_grad)

    path = _from_head if returns_head_output(model, inputs["input_ids"]) else _from_logits
    return path(model, inputs, predictors, score)


def _from_logits(model: nn.Module, inputs: dict[str, Tensor], predictors: Tensor, score: Callable) -> Tensor:
    """Score the model's own logits, one row at a time. The backward pass computes them again, so that only the logits
    of one row are in memory."""
    can_select = "logits_to_keep" in inspect.signature(model.forward).parameters
    R, L = inputs["input_ids"].shape

    def score_row(row: dict[str, Tensor], at: Tensor, part: slice) -> Tensor:
        selection = {"logits_to_keep": at} if can_select else {}
        logits = model(**row, **selection, use_cache=False).logits[0]
        return score(logits if can_select else logits[at], part=part)

    values, n = [], 0
    for r in range(R):
        at = predictors[predictors // L == r] - r * L
        row = {name: x[r : r + 1] for name, x in inputs.items()}
        args = row, at, slice(n, n + len(at))  # predictors are in the order of the rows
        # If there are several rows, each is checkpointed, so that only the logits of one row are in memory at a time.
        values.append(score_row(*args) if R == 1 else checkpoint(score_row, *args, use_reentrant=False))
        n += len(at)
    return torch.cat(values)


def _from_head(model: nn.Module, inputs: dict[str, Tensor], predictors: Tensor, score: Callable) -> Tensor:
    """Score inside the model's forward pass, where the head returns (n, 2) instead of (R, L, V) logits."""
    head = model.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        hidden = hidden.flatten(0, 1)[predictors]  # (n, H)
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        return score(hidden, head.weight, head.bias)

    with forward_replaced(head, forward):
        return model(**inputs, use_cache=False).logits


_returns_logits: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def returns_head_output(model: nn.Module, ids: Tensor) -> bool:
    """Return whether the model has a plain linear head and returns its output unchanged. Each model is tried once."""
    if model not in _returns_logits:
        head, seen = model.get_output_embeddings(), []
        if head is not None and type(head).forward is nn.Linear.forward and "forward" not in vars(head):

            def record(hidden: Tensor) -> Tensor:
                # Return made-up values that any cap or scale would change. The head's own output may be 0, or so small
                # that a cap does not change it. Return a copy, because some models change the output in place.
                values = torch.linspace(-100, 120, len(head.weight), dtype=hidden.dtype, device=hidden.device)
                seen.append(values.expand(*hidden.shape[:-1], -1))
                return seen[-1].clone(memory_format=torch.contiguous_format)

            with torch.no_grad(), forward_replaced(head, record):
                logits = model(input_ids=ids[:1, :8], use_cache=False).logits
        # If the head is not plain, `seen` is empty. Then `same` is False, and `logits` is not read.
        same = len(seen) == 1 and seen[0].shape == logits.shape and torch.equal(seen[0].to(logits.dtype), logits)
        _returns_logits[model] = same
        if not same:
            logger.warning(f"{type(model).__name__} changes its head's output: scoring its logits, which is slower")
    return _returns_logits[model]


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
    """Let a rollout compute logits as training does: in fp32, without rounding them to the dtype of the weights. A
    model that changes the logits after its head, for instance caps them, is left as it is, because training takes the
    logits that such a model returns."""
    head, ids = model.get_output_embeddings(), torch.zeros(1, 2, dtype=torch.long, device=model.device)
    in_fp32 = forward_replaced(head, lambda hidden: linear_in_fp32(hidden, head.weight, head.bias))
    return in_fp32 if dtype != torch.float32 and returns_head_output(model, ids) else nullcontext()


# ---- The hand-written backward pass: only one chunk of logits is in memory at any time ----


class _ScoreTokens(torch.autograd.Function):
    """Compute (n, 2 + K + 1) from states (n, H), a linear head and targets (n,). Without a head, the states are logits
    (n, V).

    The head is used in the dtype of the states. The gradient of its weight has the dtype of the weight, which is fp32
    under autocast. Let z be the logits divided by the temperature, let p = softmax(z), and let q be the softmax over
    the target's kept set only (q = p without a set):

        d logp / dz = onehot(target) - q,      d entropy / dz = -p (log p + entropy)

    The log-prob of an id in the head has the same gradient as that of a target. For the log-prob of all others
    together, the place of onehot(target) is taken by their distribution, q restricted to them.
    """

    @staticmethod
    def forward(ctx, states, weight, bias, targets, sets, head_ids, temperature, chunk, with_entropy, entropy_grad):
        ctx.save_for_backward(states, weight, bias, targets, head_ids)
        ctx.settings = sets, temperature, chunk, entropy_grad
        weight, bias = (None if x is None else x.to(states.dtype) for x in (weight, bias))
        width = 2 if head_ids is None else 3 + head_ids.shape[1]
        values = torch.zeros(len(states), width, dtype=at_least_fp32(states.dtype), device=states.device)
        for start in range(0, len(states), chunk):
            rows = slice(start, min(start + chunk, len(states)))
            log_p = _log_softmax(states[rows], weight, bias, temperature)  # (chunk, V)
            values[rows, 0] = log_p.gather(1, targets[rows, None]).squeeze(1)
            places, log_mass = (None, 0.0) if sets is None else _log_mass(log_p, sets[rows])
            values[rows, 0] -= log_mass
            if head_ids is not None:
                values[rows, 2:-1] = log_p.gather(1, head_ids[rows])
                values[rows, -1] = _others(log_p, head_ids[rows], places).logsumexp(-1)
                values[rows, 2:].T.sub_(log_mass)
            if with_entropy:
                values[rows, 1] = _entropy(log_p.exp(), log_p)
            del log_p  # free it before the next chunk makes its own
        return values

    @staticmethod
    def backward(ctx, grad):
        states, own_weight, own_bias, targets, head_ids = ctx.saved_tensors
        sets, temperature, chunk, entropy_grad = ctx.settings
        weight, bias = (None if x is None else x.to(states.dtype) for x in (own_weight, own_bias))
        dtype = at_least_fp32(states.dtype)
        d_states = torch.empty_like(states) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias, dtype=dtype) if ctx.needs_input_grad[2] else None

        for start in range(0, len(states), chunk):
            rows = slice(start, min(start + chunk, len(states)))
            h, g_logp, g_entropy = states[rows], grad[rows, :1], grad[rows, 1:2]  # the gradients are (chunk, 1)
            g_head = grad[rows, 2:]  # (chunk, K + 1), or (chunk, 0)
            g_q = g_logp + g_head.sum(1, keepdim=True)  # every log-prob is normalized by the same sum
            log_p = _log_softmax(h, weight, bias, temperature)
            # d_z = g_logp * onehot(target)  -  g_q * q  -  g_entropy * p * (log_p + entropy)  +  that of the head
            # Without kept sets, q is p. With kept sets, q is 0 outside of a set, so g_q * q is computed for the ids in
            # the sets only, as d_sets, before the memory of log_p is used for d_z.
            places = None
            if sets is not None:
                of_rows = sets[rows]
                places, log_mass = _log_mass(log_p, of_rows)
                log_q = log_p.view(-1)[places].sub_(of_rows.for_each_id(log_mass))  # (m,)
                d_sets = log_q.exp_().mul_(of_rows.for_each_id(-g_q[:, 0]))
            if head_ids is not None:  # NaN where there are no others
                d_others = _others(log_p, head_ids[rows], places).softmax(-1).nan_to_num_(0.0).mul_(g_head[:, -1:])
            g_p = g_q if sets is None else torch.zeros_like(g_q)  # what is multiplied by p
            if entropy_grad:
                d_z = _times_p_in_place(log_p, g_p, g_entropy)
            else:
                d_z = log_p.exp_().mul_(-g_p)
            if sets is not None:
                d_z.view(-1).scatter_add_(0, places, d_sets)  # no place occurs twice
                del of_rows, log_q, d_sets
            if head_ids is not None:
                d_z += d_others.scatter_(1, head_ids[rows], g_head[:, :-1])
                del d_others
            d_z.scatter_add_(1, targets[rows, None], g_logp)
            if temperature != 1.0:
                d_z.div_(temperature)
            if d_bias is not None:
                d_bias += d_z.sum(0)
            d_z = d_z.to(states.dtype)
            if d_states is not None:
                d_states[rows] = d_z if weight is None else d_z @ weight
            if d_weight is not None and d_weight.dtype == d_z.dtype:
                d_weight.addmm_(d_z.T, h)
            elif d_weight is not None:
                d_weight += linear_in_fp32(d_z.T, h.T)  # d_z.T @ h
            del log_p, d_z, places  # free them before the next chunk makes its own
        d_weight = None if d_weight is None else d_weight.to(own_weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(own_bias.dtype)
        return d_states, d_weight, d_bias, None, None, None, None, None, None, None


def _log_softmax(states: Tensor, weight: Tensor | None, bias: Tensor | None, temperature: float) -> Tensor:
    z = states.to(at_least_fp32(states.dtype)) if weight is None else linear_in_fp32(states, weight, bias)
    if temperature != 1.0:
        z = z / temperature
    return torch.log_softmax(z, dim=-1)


def _log_mass(log_p: Tensor, sets: KeptSets) -> tuple[Tensor, Tensor]:
    """Return where the ids of all sets are in the flat log_p (n, V), as indices (m,), and the logarithm of the
    probability of each set, (n,)."""
    n, V = log_p.shape
    places = sets.for_each_id(V * torch.arange(n, device=log_p.device)).add_(sets.ids)
    inside = log_p.view(-1)[places]
    # `index_add` would be shorter, but on a GPU it adds in another order in each run. `unsafe` leaves out a check of
    # the sizes, for which the host would wait.
    top = torch.segment_reduce(inside, "max", lengths=sets.sizes, unsafe=True)
    ratios = inside.sub_(sets.for_each_id(top)).exp_()
    return places, top + torch.segment_reduce(ratios, "sum", lengths=sets.sizes, unsafe=True).log()


def _others(log_p: Tensor, head_ids: Tensor, places: Tensor | None) -> Tensor:
    """Return log_p (n, V), but -inf at the ids in the head, and outside of the kept sets if they are given by their
    places in the flat log_p."""
    if places is not None:
        inside = torch.full_like(log_p, -math.inf)
        inside.view(-1)[places] = log_p.view(-1)[places]
        log_p = inside
    return log_p.scatter(1, head_ids, -math.inf)


def _times_p_in_place(log_p: Tensor, g_p: Tensor, g_entropy: Tensor) -> Tensor:
    """Return -p * (g_p + g_entropy * (log_p + entropy)), in the memory of log_p."""
    p = log_p.exp()
    entropy = _entropy(p, log_p)[:, None]
    return log_p.add_(entropy).mul_(g_entropy).add_(g_p).mul_(p).neg_()


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    # A sum of products would need memory for another chunk. Autocast would compute einsum in bf16.
    with torch.autocast(p.device.type, enabled=False):
        return -torch.einsum("nv,nv->n", p, log_p)


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
