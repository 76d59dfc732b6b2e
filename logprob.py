"""The log-prob and the entropy of each completion token under the model. The plain computation is:

    all_logp = (model(ids).logits[:, :-1] / temperature).log_softmax(-1)
    logp = all_logp.gather(-1, ids[:, 1:, None])      # the score of tokens 1, 2, ... of each row
    entropy = -(all_logp.exp() * all_logp).sum(-1)

If top-k, top-p or min-p cut the distribution that a token was sampled from, its log-prob is normalized over the set of
token ids that remained: `logp - all_logp[kept].logsumexp(-1)`.

The logits of a whole batch rarely fit into memory, so fast/output_head.py computes them in chunks. So that a prompt is
read only once, fast/shared_prompts.py puts it into one row with several of its completions. The results are the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fast.output_head import SetsOfRow, score_tokens
from fast.shared_prompts import model_inputs


def chunk_tokens(on_gpu: bool) -> int:
    """Return how many tokens go through the output head at once."""
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
    kept: Sequence[SetsOfRow] | None = None,
    together: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return logp (B, T) and the entropy (B, T) or None, for input_ids, attention_mask and completion_mask (B, T).

    Position t of the result belongs to token t, and is 0 where completion_mask is 0. Padding may be on either side.
    entropy_grad gives the entropy a gradient. kept[b][t] are the token ids that logp[b, t] is normalized over, or None
    for the whole vocabulary. The entropy is always over the whole vocabulary. `together` lists the sizes of
    groups of consecutive rows. The rows of a group have the same prompt and are read as one row, see
    fast/shared_prompts.py. The result does not depend on `together`.
    """
    # Move all padding to the right. A causal model then needs neither a mask nor position ids, and attention is faster
    # without a mask.
    real = attention_mask.bool()
    # order (B, longest row): the old positions of the real tokens, then of padding
    order = real.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(real.sum(1).max()))]
    ids = input_ids.gather(1, order)
    scored = (completion_mask.bool() & real).gather(1, order)
    if scored[:, 0].any():
        raise ValueError("the first token of a row belongs to a completion: it needs a prompt before it")
    # A token is predicted at the position before it. So the model need not read the last token of a row.
    width = max(1, ids.shape[1] - 1)
    lengths = (real.sum(1) - 1).clamp(min=1)  # how many tokens of each row the model reads
    inputs, places = model_inputs(ids[:, :width], lengths, together)  # places (B, width) in the model's output
    # Token t is predicted by the output for token t - 1, whose place is in column t - 1. The slice only matters if
    # every row is a single token. Then nothing is predicted, and it removes the one column that `max` has kept.
    predictors = places[:, : ids.shape[1] - 1][scored[:, 1:]]  # (n,)

    chunk, sets = chunk_tokens(ids.is_cuda), None
    if kept is not None:
        chunk = max(1, chunk // 2)  # because the sets take about as much memory as the logits
        # Each scored token gets a pair (kept[b], t): its kept set is kept[b][t]. t is its position in input_ids.
        rows, positions = scored.nonzero()[:, 0].tolist(), order[scored].tolist()
        sets = [(kept[row], position) for row, position in zip(rows, positions)]
    with_entropy = with_entropy or entropy_grad
    how = dict(temperature=temperature, chunk=chunk, with_entropy=with_entropy, entropy_grad=entropy_grad)
    values = score_tokens(model, inputs, predictors, ids[scored], sets, **how)  # (n, 2)

    # Put the values back to the positions of their tokens in input_ids.
    values = values.new_zeros(*ids.shape, 2).masked_scatter(scored[..., None], values)
    logp, entropy = (torch.zeros_like(input_ids, dtype=x.dtype).scatter(1, order, x) for x in values.unbind(-1))
    if not with_entropy:
        return logp, None
    return logp, (entropy if entropy_grad else entropy.detach())
