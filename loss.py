"""The equations: importance ratio, clipping, KL, token weights. Tensors in, tensors out; no model, no ranks.

Every objective of the GRPO family is one weighted sum over the completions i of an optimizer step and their tokens t:

    loss = sum_i sum_t  w_it * ( policy_it + beta * kl_it )

    w_it       token_weights    the normalization, computed once for the whole step before the step is split
    policy_it  policy_loss      minus the surrogate: clipped (PPO, GRPO), CISPO or REINFORCE
    kl_it      kl_divergence    Schulman's estimators of KL(policy || reference)

The weights know the totals of the step. So the loss of a micro-batch is a partial sum, and partial sums over any
split (micro-batches, ranks, any order, any padding) add up to the same loss and the same gradient. Policy term and KL
share the weights, so they cannot be normalized differently.

Tokens are those of `mask`, (B, T); what stands elsewhere, garbage included, reaches neither loss nor gradient.
Left out: KL inside the reward, value losses, dual-clip by a separate coefficient (`delta` is its general form).
"""

import torch
from torch import Tensor

NORMALIZATIONS = ("sequence", "global", "constant", "sum")
OBJECTIVES = ("clip", "cispo", "reinforce")
RATIOS = ("token", "sequence")
KL_ESTIMATORS = ("k1", "k2", "k3")


def token_weights(mask: Tensor, normalization: str, max_completion_length: int | None = None) -> Tensor:
    """mask (N, T) of a whole optimizer update, over all ranks -> w (N, T), float64, 0 where masked.

    A completion without any token is not counted in N.
    """
    mask = mask.bool()
    lengths = mask.sum(1, keepdim=True)  # (N, 1), |o_i|
    N = (lengths > 0).sum()
    one = mask.double()

    if normalization == "sequence":  # GRPO 2402.03300: mean over each completion, then over completions
        w = one / (N * lengths)
    elif normalization == "global":  # DAPO 2503.14476: every token of the step counts the same
        w = one / lengths.sum()
    elif normalization == "constant":  # Dr. GRPO 2503.20783: by the budget L, not by the longest completion seen
        if max_completion_length is None:
            raise ValueError("normalization='constant' divides by max_completion_length: give it")
        w = one / (N * max_completion_length)
    elif normalization == "sum":  # RLOO 2402.14740: the log-prob of a whole completion
        w = one / N
    else:
        raise _unknown("normalization", normalization, NORMALIZATIONS)
    return w.masked_fill(~mask, 0.0)


def kl_divergence(logp: Tensor, ref_logp: Tensor, estimator: str = "k3") -> Tensor:
    """Per-token estimates of KL(policy || reference) at tokens the policy sampled. http://joschu.net/blog/kl-approx.html"""
    log_r = ref_logp - logp  # mind the sign: reference over policy
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if estimator == "k3":
        return torch.expm1(log_r) - log_r
    raise _unknown("kl_estimator", estimator, KL_ESTIMATORS)


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    objective: str = "clip",
    ratio: str = "token",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_importance: bool = False,
    sampler_logp: Tensor | None = None,
    tis_cap: float | None = None,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The loss of these rows, a partial sum of the step's, and its statistics as name: (sum, count), detached.

    logp, old_logp, ref_logp, sampler_logp, weights, mask (B, T); advantages (B,) or (B, T).
    It computes and does not judge: which switches make sense together is settled in infra/command_line.py.
    """
    mask = mask.bool()
    logp, old_logp, ref_logp, sampler_logp = (_clean(x, mask) for x in (logp, old_logp, ref_logp, sampler_logp))
    A = _clean(advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask), mask).to(logp.dtype)
    w = _clean(weights, mask).to(logp.dtype)

    # The ratio of new to old policy.
    log_rho = logp - old_logp  # (B, T)
    if ratio == "sequence":  # GSPO 2507.18071: s_i = exp( 1/|o_i| sum_t log rho_it ), the same at every token of o_i
        log_rho = (log_rho.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(mask)
    elif ratio != "token":
        raise _unknown("ratio", ratio, RATIOS)
    rho = log_rho.exp()

    # The policy term, to be minimised.
    too_low = too_high = torch.zeros_like(mask)  # beyond a bound, where the advantage pushes further
    if objective == "clip":  # PPO, GRPO; DAPO's clip-higher: epsilon_high > epsilon_low
        clipped = rho.clamp(1 - epsilon_low, 1 + epsilon_high)
        unclipped = rho if delta is None else rho.clamp(max=delta)  # two-sided: bounds the loss where A < 0
        policy = -torch.min(unclipped * A, clipped * A)
        too_low = (rho < 1 - epsilon_low) & (A < 0)
        too_high = (rho > 1 + epsilon_high) & (A > 0)
    elif objective == "cispo":  # MiniMax-M1 2506.13585: the capped ratio is a constant factor, no token is cut off
        policy = -rho.clamp(max=epsilon_high).detach() * A * logp
        too_high = (rho > epsilon_high) & (A > 0)
    elif objective == "reinforce":
        policy = -A * logp
    else:
        raise _unknown("objective", objective, OBJECTIVES)

    if tis_cap is not None:  # truncated importance sampling: pi_old over the sampler's own policy
        if sampler_logp is None:
            raise ValueError("tis_cap needs sampler_logp")
        policy = policy * (old_logp - sampler_logp).exp().clamp(max=tis_cap).detach()

    # The KL term, under the same weights.
    loss, stats, tokens = policy, {}, mask.sum()
    if ref_logp is not None:
        kl = kl_divergence(logp, ref_logp, kl_estimator)
        stats["kl"] = (kl.detach().sum(), tokens)
    if beta != 0.0:
        if ref_logp is None:
            raise ValueError(f"beta={beta} needs ref_logp")
        loss = policy + beta * (rho * kl if kl_importance else kl)

    if objective != "reinforce":
        stats["clip_low"] = ((too_low & mask).sum(), tokens)
        stats["clip_high"] = ((too_high & mask).sum(), tokens)
    if sampler_logp is not None:
        stats["sampler_gap"] = ((old_logp - sampler_logp).detach().abs().sum(), tokens)
    return (w * loss).sum(), stats


def _clean(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """0 where masked: a where, because 0 * NaN is NaN, in the gradient too."""
    return None if x is None else torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _unknown(setting: str, value: str, valid: tuple[str, ...]) -> ValueError:
    return ValueError(f"{setting} is {value!r}; it must be one of {', '.join(valid)}")
