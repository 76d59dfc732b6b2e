"""The log-prob and the entropy of each completion token under the model. The plain computation is:

    z = model(ids).logits[:, :-1] / temperature       # they predict tokens 1, 2, ... of each row
    log_p = z.log_softmax(-1)
    log_q = z.masked_fill(outside, -inf).log_softmax(-1)
    logp = log_q.gather(-1, ids[:, 1:, None])
    entropy = -(log_p.exp() * log_p).sum(-1)

`outside` is True at the ids that top-k, top-p or min-p did not let the sampler pick. If nothing was cut, q is p.

`TokenScores` is this computation from z on, with its gradient. fast/output_head.py calls it on a few tokens at a time,
so that the logits of all tokens are never in memory, and fast/shared_prompts.py lets completions share the row of their
prompt. The results are the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor, nn

from fast.output_head import function_of_logits
from fast.shared_prompts import model_inputs

CHUNK = {"cuda": 2048, "cpu": 256}  # how many tokens have their logits in memory at once


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor,
    completion_mask: Tensor,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    entropy_grad: bool = False,
    kept: Sequence[Sequence[Sequence[int] | None]] | None = None,
    head_ids: Tensor | None = None,
    completions_per_row: list[int] | None = None,
) -> tuple[Tensor | None, ...]:
    """Return logp (B, T) and the entropy (B, T) or None, and with head_ids (B, T, K) a third result (B, T, K + 1): the
    log-probs of these ids at each token, and last of all other ids together.

    input_ids, attention_mask and completion_mask are (B, T), with all padding on the right. Entry t of a result is that
    of token t, and 0 where completion_mask is 0. The entropy has a gradient only with entropy_grad. kept[b][t] are the
    ids that token t of row b was sampled from, or None for all. All log-probs are normalized over these ids, the
    entropy is that of the whole vocabulary. completions_per_row[r] is how many consecutive rows of input_ids, all of
    one prompt, are one row for the model. The results do not depend on it.
    """
    lengths = attention_mask.sum(1)  # (B,)
    T = int(lengths.max())  # all later columns are padding in every row
    ids, real = input_ids[:, :T], attention_mask[:, :T].bool()
    scored = completion_mask[:, :T].bool() & real
    after_padding = real[:, 1:] & ~real[:, :-1]  # (B, T - 1)
    if torch.cat([after_padding, scored[:, :1]], 1).any():  # one `any`, because the host waits for each
        raise ValueError("each row must be a prompt of at least one token, then the completion, then padding")

    device = ids.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else next(model.parameters()).dtype
    # The model's output for token t predicts token t + 1. So the model need not read the last token of a row.
    # If rows are shared, the inputs have a mask of numbers, in this dtype. places (B, T - 1) are those of the tokens.
    inputs, places = model_inputs(ids[:, :-1], lengths - 1, completions_per_row, dtype)
    b, t = scored.nonzero().unbind(1)  # (n,), row and position of each token that is scored
    token = ids[b, t, None].int()  # (n, 1)
    scores = TokenScores(
        ids=token if head_ids is None else torch.cat([token, head_ids[b, t].int()], 1),
        allowed=None if kept is None else allowed_ids([kept[i][j] for i, j in zip(b.tolist(), t.tolist())], ids.device),
        temperature=temperature,
        with_entropy=with_entropy or entropy_grad,
        entropy_grad=entropy_grad,
    )
    chunk = CHUNK[device] if kept is None else CHUNK[device] // 2  # log q is one more tensor of the size of the logits
    values = function_of_logits(model, inputs, places[b, t - 1], scores.values, scores.gradient, chunk)  # (n, K + 3)
    # Log q of an id that the sampler could not pick is -inf whatever the logits are. This line lets no gradient through
    # there, and changes no value.
    values = values.masked_fill(values == -math.inf, -math.inf)
    values = values.new_zeros(*input_ids.shape, values.shape[1]).index_put((b, t), values)

    logp, entropy, of_head_ids = values[..., 0], values[..., -1], values[..., 1:-1]
    if not entropy_grad:
        entropy = entropy.detach() if with_entropy else None  # TokenScores.gradient leaves it out
    return (logp, entropy) if head_ids is None else (logp, entropy, of_head_ids)


@dataclass
class AllowedIds:
    """The ids that each of n tokens was sampled from. A token without any was sampled from the whole vocabulary."""

    ids: Tensor  # (m,), int32; those of the first token, then those of the second, and so on
    counts: Tensor  # (n,), how many each token has
    starts: list[int]  # n + 1 numbers: where those of each token start, and where the last ones end

    def outside(self, part: slice, vocabulary: int) -> Tensor:
        """Return which ids could not be sampled, (n, V), for this part of the tokens."""
        first, last = self.starts[part.start], self.starts[part.stop]
        counts = self.counts[part]
        # With output_size, the host does not wait for the sum of the counts.
        row = torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=last - first)
        outside = (counts > 0)[:, None].repeat(1, vocabulary)
        outside[row, self.ids[first:last].long()] = False
        return outside


def allowed_ids(sets: Sequence[Sequence[int] | None], device: torch.device) -> AllowedIds:
    """Copy the sets to the device. None stands for the whole vocabulary."""
    arrays = [np.asarray([] if ids is None else ids, np.int32) for ids in sets]
    counts = [len(ids) for ids in arrays]
    ids = np.concatenate([np.empty(0, np.int32), *arrays])
    starts = [*accumulate(counts, initial=0)]
    return AllowedIds(torch.as_tensor(ids).to(device), torch.tensor(counts, dtype=torch.long, device=device), starts)


@dataclass
class TokenScores:
    """What is wanted of n tokens as a function of their logits, and the gradient of the logits.

    Let z be the logits divided by the temperature, p = softmax(z), and q the softmax over the ids that a token was
    sampled from. Wanted are log q of 1 + K ids, log q of the rest, and the entropy of p. The rest is all ids except the
    K, taken as one:

        d log q(id) / dz = onehot(id) - q
        d log q(rest) / dz = q(. | rest) - q            # q(. | rest) is q / q(rest) in the rest, and 0 elsewhere
        d entropy / dz = -p (log p + entropy)
    """

    ids: Tensor  # (n, 1 + K), int32; the token itself, and K ids that may include it
    allowed: AllowedIds | None  # None: q is p
    temperature: float
    with_entropy: bool  # otherwise its place has 0
    entropy_grad: bool  # otherwise the gradient of the entropy is ignored

    def values(self, logits: Tensor, part: slice) -> Tensor:
        """Return log q of the ids, log q of the rest (0 if K is 0), and the entropy, (n, 1 + K + 2), of this part of
        the tokens. The logits (n, V) are overwritten."""
        ids = self.ids[part].long()
        K = ids.shape[1] - 1
        log_p, log_q = self._distributions(logits, part, self.with_entropy)
        values = logits.new_zeros(len(ids), 1 + K + 2)
        values[:, : 1 + K] = log_q.gather(1, ids)
        if K:
            values[:, -2] = _rest(log_q, ids, out=logits).logsumexp(1)
        if self.with_entropy:
            values[:, -1] = _entropy(torch.exp(log_p, out=logits), log_p)
        return values

    def gradient(self, logits: Tensor, part: slice, d_values: Tensor) -> Tensor:
        """Return the gradient of the logits (n, V), which are overwritten. With the gradients g of the values, it is

            sum of onehot(id) g_id - q (sum of g_id + g_rest) + q(. | rest) g_rest - p (log p + entropy) g_entropy

        divided by the temperature. A tensor (n, V) is a large part of the memory of an update, so most lines overwrite
        one: `logits` becomes p, log_p becomes d_logits, and log_q becomes q. Without kept sets, q is p."""
        ids = self.ids[part].long()
        K = ids.shape[1] - 1
        log_p, log_q = self._distributions(logits, part, self.entropy_grad)
        g_ids, g_rest, g_entropy = (d_values / self.temperature).split([1 + K, 1, 1], dim=1)
        g_q = g_ids.sum(1, keepdim=True)
        if K:
            g_q = g_q + g_rest
            d_rest = _rest(log_q, ids, out=logits).softmax(1)  # NaN if the rest is empty
            d_rest = d_rest.nan_to_num_(0.0).mul_(g_rest)  # q(. | rest) g_rest
        if self.entropy_grad:
            p = torch.exp(log_p, out=logits)
            q = p if self.allowed is None else log_q.exp_()
            d_logits = (
                log_p.add_(_entropy(p, log_p)[:, None]).mul_(p).mul_(-g_entropy)
            )  # -p (log p + entropy) g_entropy
            d_logits.addcmul_(q, g_q, value=-1.0)  # - q g_q
        else:
            d_logits = log_q.exp_().mul_(-g_q)  # - q g_q
        if K:
            d_logits += d_rest
        # Two calls, because the token may be among the K. On a GPU, one call would add the two in no fixed order.
        d_logits.scatter_add_(1, ids[:, :1], g_ids[:, :1])
        return d_logits.scatter_add_(1, ids[:, 1:], g_ids[:, 1:])

    def _distributions(self, logits: Tensor, part: slice, needs_p: bool) -> tuple[Tensor | None, Tensor]:
        """Return log p, or None if it is not needed, and log q. If nothing was cut, both are the same tensor."""
        z = logits if self.temperature == 1.0 else logits.div_(self.temperature)
        log_p = z.log_softmax(1) if needs_p or self.allowed is None else None
        if self.allowed is None:
            return log_p, log_p
        return log_p, z.masked_fill_(self.allowed.outside(part, z.shape[1]), -math.inf).log_softmax(1)


def _rest(log_q: Tensor, ids: Tensor, out: Tensor) -> Tensor:
    """Return log q, but -inf at the K ids, in the memory of `out`."""
    return out.copy_(log_q).scatter_(1, ids[:, 1:], -math.inf)


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    return -torch.einsum("nv,nv->n", p, log_p)  # -(p * log_p).sum(1) would take memory for the products
