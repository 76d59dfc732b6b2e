"""The equations: importance ratio, clipping, KL, token weights. Tensors in, tensors out; no model, no ranks.

Every objective of the GRPO family is one weighted sum over the completions i of an optimizer update and their tokens t:

    loss = sum_i sum_t  w_it * ( policy_it + beta * kl_it + tau * (log pi_it - log mu_it)^2 )

    w_it       token_weights    the normalization, computed once for the whole update before it is split
    policy_it  policy_loss      minus the surrogate: clipped (PPO, GRPO), CISPO, SAPO, DPPO or REINFORCE
    kl_it      kl_divergence    estimates of KL(policy || reference)
    tau        sampler_coef     the pull towards mu, the policy that sampled

The weights know the totals of the update. So the loss of a micro-batch is a partial sum, and partial sums over any
split (micro-batches, ranks, any order, any padding) add up to the same loss and the same gradient. Policy term and KL
share the weights, so they cannot be normalized differently.

Tokens are those of `mask`, (B, T); what stands elsewhere, garbage included, reaches neither loss nor gradient.
Left out: KL inside the reward, value losses, dual-clip by a separate coefficient (`delta` is its general form), VESPO,
Clip-Cov and KL-Cov.
"""

import math

import torch
from torch import Tensor

NORMALIZATIONS = ("sequence", "global", "prompt", "constant", "sum")
SWITCHES_READ = {  # by an objective; every other switch of policy_loss belongs to all of them
    "clip": ("ratio", "epsilon_low", "epsilon_high", "delta"),
    "cispo": ("ratio", "epsilon_high"),
    "sapo": ("ratio", "sapo_tau_pos", "sapo_tau_neg"),
    "dppo": ("ratio", "epsilon_low", "epsilon_high"),
    "reinforce": (),
}
OBJECTIVES = tuple(SWITCHES_READ)
RATIOS = ("token", "sequence", "geometric")
KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
TIS_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")


def token_weights(
    mask: Tensor, normalization: str, max_completion_length: int | None = None, prompts: Tensor | None = None
) -> Tensor:
    """mask (N, T) of a whole optimizer update, over all ranks -> w (N, T), float64, 0 where masked.

    prompts (N,) says which prompt each completion answers. A completion without any token is not counted in N.
    """
    mask = mask.bool()
    lengths = mask.sum(1, keepdim=True)  # (N, 1), |o_i|
    N = (lengths > 0).sum()
    one = mask.double()

    if normalization == "sequence":  # GRPO 2402.03300: mean over each completion, then over completions
        w = one / (N * lengths)
    elif normalization == "global":  # DAPO 2503.14476: every token of the update counts the same
        w = one / lengths.sum()
    elif normalization == "prompt":  # DAPO as printed, eq. 8: mean over the tokens of a prompt, then over prompts
        if prompts is None:
            raise ValueError("normalization='prompt' needs prompts: the prompt that each completion answers")
        same_prompt = prompts[:, None] == prompts  # (N, N)
        tokens = same_prompt.double() @ lengths.double()  # (N, 1), of all completions of the prompt
        w = one / (prompts[lengths[:, 0] > 0].unique().numel() * tokens)
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
    """Per-token estimates of KL(policy || reference) at tokens the policy sampled, http://joschu.net/blog/kl-approx.html.
    On-policy only k2 has the gradient of the KL. "k1+" has the value of k1 and the gradient of k2; "k3+" likewise."""
    log_r = ref_logp - logp  # mind the sign: reference over policy
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if estimator == "k3":
        return torch.expm1(log_r) - log_r
    if estimator == "abs":
        return log_r.abs()
    if estimator in ("k1+", "k3+"):
        k2 = kl_divergence(logp, ref_logp, "k2")
        return kl_divergence(logp, ref_logp, estimator[:2]).detach() + k2 - k2.detach()
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
    tis_mode: str = "token_truncate",
    tis_cap: float | None = None,
    tis_floor: float | None = None,
    off_policy_mask: float | None = None,
    sampler_coef: float = 0.0,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """The loss of these rows, a partial sum of the update's, and its statistics as name: (sum, count), detached.

    logp, old_logp, ref_logp, sampler_logp, weights, mask (B, T); advantages (B,) or (B, T).
    Which switches make sense together is settled in infra/command_line.py.
    """
    mask = mask.bool()
    sampler_is_old = old_logp is sampler_logp  # not by value: a part of a batch may be equal by chance
    logp, old_logp, ref_logp, sampler_logp = (_clean(x, mask) for x in (logp, old_logp, ref_logp, sampler_logp))
    A = _clean(advantages if advantages.dim() == 2 else advantages[:, None].expand_as(mask), mask).to(logp.dtype)
    w = _clean(weights, mask).to(logp.dtype)

    # The ratio of new to old policy.
    too_low = too_high = torch.zeros_like(mask)  # beyond a bound, where the advantage pushes further
    log_rho = logp - old_logp  # (B, T)
    if ratio == "sequence":  # GSPO 2507.18071: s_i = exp( 1/|o_i| sum_t log rho_it ), the same at every token of o_i
        log_rho = _mean_over_tokens(log_rho, mask)
    elif ratio == "geometric":  # GMPO 2507.20673: the same, of tokens that are clipped in the log by the sign of A
        if delta is not None:
            raise ValueError("delta bounds a ratio, and ratio='geometric' clips its logarithm: leave delta out")
        too_low, too_high = (log_rho < -epsilon_low) & (A < 0), (log_rho > epsilon_high) & (A > 0)
        log_rho = torch.where(too_low, -epsilon_low, torch.where(too_high, epsilon_high, log_rho))
        log_rho = _mean_over_tokens(log_rho, mask)
        epsilon_low, epsilon_high = 1.0, math.inf  # nothing is clipped twice
    elif ratio != "token":
        raise _unknown("ratio", ratio, RATIOS)
    rho = log_rho.exp()

    # The policy term, to be minimised.
    if objective == "clip":  # PPO, GRPO; DAPO's clip-higher: epsilon_high > epsilon_low
        clipped = rho.clamp(1 - epsilon_low, 1 + epsilon_high)
        unclipped = rho if delta is None else rho.clamp(max=delta)  # two-sided: bounds the loss where A < 0
        policy = -torch.min(unclipped * A, clipped * A)
        too_low = too_low | (rho < 1 - epsilon_low) & (A < 0)
        too_high = too_high | (rho > 1 + epsilon_high) & (A > 0)
    elif objective == "cispo":  # MiniMax-M1 2506.13585: the capped ratio is a constant factor, no token is cut off
        policy = -rho.clamp(max=epsilon_high).detach() * A * logp
        too_high = (rho > epsilon_high) & (A > 0)
    elif objective == "sapo":  # SAPO 2511.20347: a gate that closes smoothly, sooner where the advantage is negative
        tau = torch.full_like(A, sapo_tau_neg).masked_fill(A > 0, sapo_tau_pos)
        policy = -(4 / tau) * torch.sigmoid(tau * (rho - 1)) * A
    elif objective == "dppo":  # DPPO-TV 2602.04879: epsilon bounds the change of the probability, not the ratio
        change = logp.exp() - old_logp.exp()
        too_low, too_high = (change < -epsilon_low) & (A < 0), (change > epsilon_high) & (A > 0)
        policy = (-rho.detach() * A * logp).masked_fill(too_low | too_high, 0.0)
    elif objective == "reinforce":
        policy = -A * logp
    else:
        raise _unknown("objective", objective, OBJECTIVES)

    # Corrections for a sampler that was not the old policy: constant factors.
    stats, tokens = {}, mask.sum()
    if sampler_logp is not None:
        scored = logp if sampler_is_old else old_logp  # else the gap would be 0 by construction
        stats["sampler_gap"] = ((scored - sampler_logp).detach().abs().sum(), tokens)
        if tis_cap is not None or tis_floor is not None:
            log_w = (old_logp - sampler_logp).detach()
            policy = policy * _sampler_correction(log_w, mask, tis_mode, tis_cap, tis_floor)
        # DeepSeek-V3.2 2512.02556, eq. 9: A < 0, and the policy would hardly give it now
        if off_policy_mask is not None:
            far = _mean_over_tokens((sampler_logp - logp).detach(), mask) > off_policy_mask
            policy = policy.masked_fill(far & (A < 0), 0.0)
            stats["off_policy"] = ((far & (A < 0) & mask).sum(), tokens)
    elif tis_cap is not None or tis_floor is not None or off_policy_mask is not None or sampler_coef != 0.0:
        raise ValueError("tis_cap, tis_floor, off_policy_mask and sampler_coef need sampler_logp")

    # The KL term and the pull towards the sampler, under the same weights.
    loss = policy
    if kl_importance and kl_estimator not in ("k1", "k3"):
        raise ValueError(f"kl_importance: the ratio makes k1 and k3 exact, value and gradient, not {kl_estimator}")
    if ref_logp is not None:
        kl = kl_divergence(logp, ref_logp, kl_estimator)
        stats["kl"] = (kl.detach().sum(), tokens)
    if beta != 0.0:
        if ref_logp is None:
            raise ValueError(f"beta={beta} needs ref_logp")
        if kl_importance:  # the token's ratio, whatever `ratio` is: DeepSeek-V3.2, eq. 7
            kl = (logp - old_logp).exp() * kl
        loss = policy + beta * kl
    if sampler_coef != 0.0:  # Kimi-K2.5 2602.02276
        loss = loss + sampler_coef * (logp - sampler_logp.detach()).square()

    if objective in ("clip", "cispo", "dppo"):
        stats["clip_low"] = ((too_low & mask).sum(), tokens)
        stats["clip_high"] = ((too_high & mask).sum(), tokens)
    return (w * loss).sum(), stats


def _sampler_correction(log_w: Tensor, mask: Tensor, mode: str, cap: float | None, floor: float | None) -> Tensor:
    """w = pi_old / pi_sampler of a token, or their product over a completion: truncated (TIS), or 0 outside
    [floor, cap] (IcePop, MIS). "geometric_mask" only drops: 0 where their geometric mean is outside, else 1."""
    if mode not in TIS_MODES:
        raise _unknown("tis_mode", mode, TIS_MODES)
    if mode == "geometric_mask":
        mean = _mean_over_tokens(log_w, mask).exp()
        return (mean == mean.clamp(floor, cap)).to(mean.dtype)
    level, action = mode.split("_")
    if level == "sequence":
        log_w = log_w.sum(1, keepdim=True).expand_as(log_w)
    w = log_w.exp()
    bounded = w.clamp(floor, cap)
    return bounded if action == "truncate" else w.masked_fill(bounded != w, 0.0)


def _mean_over_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T) -> (B, T), the same at every token of a completion"""
    return (x.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(x)


def _clean(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """0 where masked; torch.where, because in a product 0 * NaN is NaN, in the gradient too."""
    return None if x is None else torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _unknown(setting: str, value: str, valid: tuple[str, ...]) -> ValueError:
    return ValueError(f"{setting} is {value!r}; it must be one of {', '.join(valid)}")
