"""The log-prob and the entropy of each completion token under the model. The plain computation is:

    all_logp = (model(ids).logits[:, :-1] / temperature).log_softmax(-1)
    logp = all_logp.gather(-1, ids[:, 1:, None])      # the score of tokens 1, 2, ... of each row
    entropy = -(all_logp.exp() * all_logp).sum(-1)

Where top-k, top-p or min-p cut the distribution, a log-prob is normalized over the ids that they kept:
`logp - all_logp[kept].logsumexp(-1)`. To save memory and time, fast/output_head.py computes logits in chunks, and
fast/shared_prompts.py lets completions share the row of their prompt. The results are the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fast.output_head import score_tokens
from fast.shared_prompts import model_inputs

CHUNK = {"cuda": 2048, "cpu": 256}  # how many tokens go through the output head at once


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
    per_row: list[int] | None = None,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Return logp (B, T) and the entropy (B, T) or None, for input_ids, attention_mask and completion_mask (B, T), with
    all padding on the right. Position t belongs to token t, and is 0 where completion_mask is 0. The entropy is always
    that of the whole vocabulary. It has a gradient only with entropy_grad.

    kept[b][t] are the token ids that logp[b, t] is normalized over, or None for all. With head_ids (B, T, K), a third
    result (B, T, K + 1) has the log-probs of these ids at each token, and of all others together. per_row[r] is how
    many consecutive rows, all of one prompt, the model reads as one. The result does not depend on it.
    """
    lengths = attention_mask.sum(1)  # (B,)
    T = int(lengths.max())  # all later columns are padding in every row
    ids, real = input_ids[:, :T], attention_mask[:, :T].bool()
    scored = completion_mask[:, :T].bool() & real
    if (real[:, 1:] > real[:, :-1]).any() or scored[:, 0].any():
        raise ValueError("each row must be a prompt of at least one token, then the completion, then padding")

    device = ids.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else next(model.parameters()).dtype
    # The model's output for token t predicts token t + 1. So the model need not read the last token of a row.
    inputs, places = model_inputs(ids[:, :-1], lengths - 1, per_row, dtype)  # places (B, T - 1)
    b, t = scored.nonzero().unbind(1)  # (n,), row and position of each token that is scored
    with_entropy = with_entropy or entropy_grad
    values = score_tokens(
        model,
        inputs,
        places[b, t - 1],  # (n,)
        ids[b, t],  # (n,)
        None if kept is None else [kept[row][at] for row, at in zip(b.tolist(), t.tolist())],
        None if head_ids is None else head_ids[b, t].long(),  # (n, K)
        temperature=temperature,
        chunk=CHUNK[device] // (1 if kept is None else 2),  # the sets take memory as well
        with_entropy=with_entropy,
        entropy_grad=entropy_grad,
    )  # (n, 2), or (n, 2 + K + 1)

    values = values.new_zeros(*input_ids.shape, values.shape[1]).index_put((b, t), values)
    entropy = values[..., 1] if entropy_grad else values[..., 1].detach()
    scores = values[..., 0], entropy if with_entropy else None
    return scores if head_ids is None else (*scores, values[..., 2:])
