"""(model, tokens) -> the log-prob and the entropy of each completion token under the model. Plainly:

    log_p = (model(ids).logits[:, :-1] / temperature).log_softmax(-1)
    logp = log_p.gather(-1, ids[:, 1:, None])         # the score of tokens 1, 2, ... of each row
    entropy = -(log_p.exp() * log_p).sum(-1)

If top-k, top-p or min-p had cut the distribution that a token was sampled from, its log-prob is normalized over the
token ids that were left: `logp - log_p[left].logsumexp(-1)`.

The logits of a whole batch rarely fit into memory, and a prompt need not be read once for each of its completions.
fast/output_head.py and fast/shared_prompts.py see to that; the result is the same.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fast.output_head import Sets, score_tokens
from fast.shared_prompts import model_inputs


def chunk_tokens(on_gpu: bool) -> int:
    """How many tokens go through the output head at once."""
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
    kept: Sequence[Sets] | None = None,
    together: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """input_ids, attention_mask, completion_mask (B, T) -> logp (B, T), entropy (B, T) or None.

    Position t holds the score of token t, and 0 where completion_mask is 0. Padding may stand on either side.
    entropy_grad gives the entropy a gradient. kept[b][t] holds the token ids that logp[b, t] is normalized over, or
    None for all of them; the entropy is always over all of them. together says how many consecutive rows the model
    reads as one row, because they share their prompt (fast/shared_prompts.py); the result does not depend on it.
    """
    # Real tokens move to the left, so that padding comes after everything that is scored. A causal model then needs
    # neither a mask nor position ids, and attention without a mask has the faster kernels.
    real = attention_mask.bool()
    order = real.int().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(real.sum(1).max()))]
    ids = input_ids.gather(1, order)
    scored = (completion_mask.bool() & real).gather(1, order)
    if scored[:, 0].any():
        raise ValueError("a completion starts with the first token of its row, where no prompt predicts it")
    # Each scored token is predicted one position before its own, so the model need not read the last token of a row.
    T = ids.shape[1]
    inputs, places = model_inputs(ids[:, : max(1, T - 1)], (real.sum(1) - 1).clamp(min=1), together)
    predictors = places[:, : T - 1][scored[:, 1:]]  # (n,)

    chunk, sets = chunk_tokens(ids.is_cuda), None
    if kept is not None:
        chunk = max(1, chunk // 2)  # the ids and log-probs of the sets take about as much memory as the logits
        sets = [(kept[row], t) for row, t in zip(scored.nonzero()[:, 0].tolist(), order[scored].tolist())]
    with_entropy = with_entropy or entropy_grad
    how = dict(temperature=temperature, chunk=chunk, with_entropy=with_entropy, entropy_grad=entropy_grad)
    values = score_tokens(model, inputs, predictors, ids[scored], sets, **how)  # (n, 2)

    values = values.new_zeros(*ids.shape, 2).masked_scatter(scored[..., None], values)
    logp, entropy = (torch.zeros_like(input_ids, dtype=x.dtype).scatter(1, order, x) for x in values.unbind(-1))
    if not with_entropy:
        return logp, None
    return logp, entropy if entropy_grad else entropy.detach()
