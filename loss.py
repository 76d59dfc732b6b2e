"""The equations: importance ratio, clipping, KL, token weights. All functions take and return tensors.

Every objective of the GRPO family is one weighted sum over the completions i of an optimizer update and their tokens t:

    loss = sum_i sum_t  w_it * ( policy_it + beta * kl_it + tau * (log pi_it - log mu_it)^2 )

    w_it       token_weights    the normalization, computed once for the whole update before it is split
    policy_it  policy_loss      minus the surrogate: clipped (PPO, GRPO), CISPO, SAPO, DPPO, VESPO or REINFORCE
    kl_it      kl_divergence    an estimate of KL(policy || reference)
    mu         sampler_logp     the policy that sampled; sampler_coef is tau, the strength of the pull towards it

The weights are computed from the whole update. So the loss of a micro-batch is a partial sum, and the partial sums of
any split (into micro-batches, over ranks, in any order, with any padding) add up to the same loss and the same
gradient. The policy term and the KL share the weights, so they cannot be normalized differently.

Only tokens where `mask` (B, T) is 1 count. Values at other tokens, even NaN, affect neither the loss nor the gradient.
Dual-clip, also called two-sided clipping, is the argument `delta`. Not here: KL inside the reward, value losses,
Clip-Cov and KL-Cov.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

NORMALIZATIONS = ("sequence", "global", "prompt", "constant", "sum")
# Each of these tables lists the values of one argument of policy_loss and, for each value, the other arguments that are
# read with it. If a table lists an argument, but not for the value that was chosen, the argument has no effect, and the
# command line refuses it. An argument that no table lists, such as beta, is always read.
OBJECTIVES = {
    "clip": ("ratio", "epsilon_low", "epsilon_high", "delta"),
    "cispo": ("ratio", "epsilon_high"),
    "sapo": ("ratio", "sapo_tau_pos", "sapo_tau_neg"),
    "dppo": ("ratio", "epsilon_low", "epsilon_high"),
    "vespo": (),
    "reinforce": (),
}
RATIOS = {"token": ("delta",), "sequence": ("delta",), "sequence_token": ("delta",), "geometric": ()}
OLD_POLICIES = {"policy": ("tis_mode", "tis_cap", "tis_floor", "gate_low", "gate_high"), "sampler": ()}
KL_ESTIMATORS = {"k1": ("kl_importance",), "k2": (), "k3": ("kl_importance",), "abs": (), "k1+": (), "k3+": ()}
SWITCHES_READ = dict(objective=OBJECTIVES, ratio=RATIOS, old_policy=OLD_POLICIES, kl_estimator=KL_ESTIMATORS)
TIS_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def token_weights(
    mask: Tensor, normalization: str, max_completion_length: int | None = None, prompts: Tensor | None = None
) -> Tensor:
    """Return the weights (N, T) of all tokens in float64, 0 where the mask is 0. The mask (N, T) must be that of a
    whole optimizer update, over all ranks.

    prompts (N,) gives the prompt of each completion, as a number. Fully masked completions are not counted.
    """
    mask = mask.bool()
    lengths = mask.sum(1, keepdim=True)  # (N, 1), |o_i|
    n_trained = (lengths > 0).sum()  # the number of completions that are trained on
    one = mask.double()  # (N, T), 1 at the tokens that are trained on

    if normalization == "sequence":  # GRPO 2402.03300: the mean over each completion, then over completions
        w = one / (n_trained * lengths)
    elif normalization == "global":  # DAPO 2503.14476: every token of the update has the same weight
        w = one / lengths.sum()
    elif normalization == "prompt":  # eq. 8 of the DAPO paper: the mean over a group's tokens, then over groups
        same_prompt = prompts[:, None] == prompts  # (N, N)
        tokens = same_prompt.double() @ lengths.double()  # (N, 1), in all completions of the prompt
        trained_prompts = prompts[lengths[:, 0] > 0].unique().numel()  # those with a completion that is trained on
        w = one / (trained_prompts * tokens)
    elif normalization == "constant":  # Dr. GRPO 2503.20783: divided by the limit L, not by the longest completion
        w = one / (n_trained * max_completion_length)
    elif normalization == "sum":  # RLOO 2402.14740: the sum over each completion, then the mean over completions
        w = one / n_trained
    else:
        raise _unknown("normalization", normalization, NORMALIZATIONS)
    return w.masked_fill(~mask, 0.0)  # a fully masked completion may have 0 / 0


def kl_divergence(logp: Tensor, ref_logp: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled, http://joschu.net/blog/kl-approx.html.
    On-policy, only k2 has the gradient of the KL. So "k1+" has the value of k1 and the gradient of k2, and "k3+" has
    the value of k3 and the gradient of k2."""
    log_r = ref_logp - logp  # the ratio of reference to policy, not the other way round
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
    old_policy: str = "policy",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_importance: bool = False,
    sampler_logp: Tensor | None = None,
    head_logp: Tensor | None = None,
    sampler_head_logp: Tensor | None = None,
    tis_mode: str = "token_truncate",
    tis_cap: float | None = None,
    tis_floor: float | None = None,
    gate_low: float | None = None,
    gate_high: float | None = None,
    off_policy_mask: float | None = None,
    sampler_coef: float = 0.0,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """Return the loss of these completions, which is a partial sum of the update's loss, and its statistics by name,
    each as (sum, count). A statistic whose name ends in _max is (maximum, 1), or (0, 0) if every token is masked.

    logp, old_logp, ref_logp, sampler_logp, weights, mask are (B, T); advantages are (B,) or (B, T). old_logp are the
    log-probs under the policy before the updates of this step, computed like logp. sampler_logp are those that the
    sampler recorded. They may differ from old_logp, because sampling and training round differently. The denominator of
    the ratio is old_logp, or sampler_logp if old_policy is "sampler".

    The tis_* arguments (truncated importance sampling) correct the policy term for the difference between the old
    policy and the sampler. The gate_* arguments drop completions in which this difference is too large. head_logp and
    sampler_head_logp (B, T, K) center the scores: they have the log-probs of the sampler's likeliest ids at each token,
    under the policy and under the sampler. The last of the K may be the log-prob of all other ids together.
    infra/command_line.py checks which arguments make sense together.
    """
    if old_policy not in OLD_POLICIES:
        raise _unknown("old_policy", old_policy, OLD_POLICIES)
    has_tis = tis_cap is not None or tis_floor is not None
    has_gate = gate_low is not None or gate_high is not None
    mask = mask.bool()
    tokens, stats = mask.sum(), {}
    logp, old_logp, ref_logp, sampler_logp = (_clean(x, mask) for x in (logp, old_logp, ref_logp, sampler_logp))
    A = advantages[:, None] if advantages.dim() == 1 else advantages  # (B, 1) or (B, T)
    A, w = (_clean(x, mask).to(logp.dtype) for x in (A, weights))  # (B, T)
    if sampler_logp is not None:
        stats["sampler_gap"] = ((old_logp - sampler_logp).detach().abs().sum(), tokens)
    denominator = sampler_logp if old_policy == "sampler" else old_logp  # of the ratio, as log-probs

    # The ratio of the new to the old policy. The statistics clip_low and clip_high count `too_low` and `too_high`.
    # `too_low` marks tokens whose ratio is below the lower bound and would fall further, because A is negative.
    # `too_high` marks tokens whose ratio is above the upper bound and would rise further, because A is positive.
    too_low = too_high = torch.zeros_like(mask)
    lowest, highest = 1 - epsilon_low, 1 + epsilon_high
    log_rho = logp - denominator  # (B, T)
    if ratio == "sequence":  # GSPO 2507.18071: s_i = exp( 1/|o_i| sum_t log rho_it ), the same at every token of o_i
        log_rho = _mean_over_tokens(log_rho, mask)
    elif ratio == "sequence_token":  # GSPO-token, 2507.18071 eq. 13: sg(s_i) pi / sg(pi), where sg stops the gradient
        log_rho = _mean_over_tokens(log_rho, mask).detach() + logp - logp.detach()
    elif ratio == "geometric":  # GMPO 2507.20673: clip the log-ratio of each token, then take the same mean
        if delta is not None:
            raise ValueError("ratio='geometric' clips log-ratios, so it cannot be used with delta")
        too_low, too_high = (log_rho < -epsilon_low) & (A < 0), (log_rho > epsilon_high) & (A > 0)
        log_rho = torch.where(too_low, -epsilon_low, torch.where(too_high, epsilon_high, log_rho))
        log_rho = _mean_over_tokens(log_rho, mask)
        lowest, highest = 0.0, math.inf  # the mean is not clipped again
    elif ratio != "token":
        raise _unknown("ratio", ratio, RATIOS)
    rho = log_rho.exp()

    # The correction for sampling from a slightly different policy multiplies the policy term. It has no gradient.
    correction = torch.ones_like(log_rho)
    if has_tis or has_gate:
        # log(pi_old / pi_sampler); 0 if old_policy is "sampler", because that denominator is the sampler itself
        log_tis_ratio = (denominator - sampler_logp).detach()  # (B, T)
        tis_ratio = _sampler_ratio(log_tis_ratio, tis_mode)  # of the token, or of its whole completion
        beyond = _is_beyond(tis_ratio, tis_floor, tis_cap)
        if has_tis:
            correction = _bounded(tis_ratio, tis_mode, tis_floor, tis_cap)
        # The geometric sequence mask of Liu, Li et al. 2025, "When Speed Kills Stability": drop the completions whose
        # geometric mean of pi_old / pi_sampler is outside of the gate.
        outside_gate = _is_beyond(_mean_over_tokens(log_tis_ratio, mask).exp(), gate_low, gate_high)
        tis_ratio = tis_ratio.masked_fill(~mask, 0.0)
        stats["tis_bounded"] = ((beyond & mask).sum(), tokens)
        stats["tis_ratio"] = (tis_ratio.sum(), tokens)
        stats["tis_ratio_max"] = (tis_ratio.max(), mask.any().to(tis_ratio.dtype))
        stats["gate_dropped"] = ((outside_gate & mask).any(1).sum(), mask.any(1).sum())

    # The policy term. It is minimised, so it is minus the objective of the paper.
    if objective == "clip":  # PPO, GRPO; DAPO's clip-higher: epsilon_high > epsilon_low
        clipped = rho.clamp(lowest, highest)
        # If A < 0, the min below selects the larger of the two ratios, because A reverses their order. Then clipping
        # sets no upper bound on the ratio; only delta does.
        capped = rho if delta is None else rho.clamp(max=delta)
        policy = -torch.min(capped * A, clipped * A)
        too_low = too_low | ((rho < lowest) & (A < 0))
        too_high = too_high | ((rho > highest) & (A > 0))
    elif objective == "cispo":  # MiniMax-M1 2506.13585: the capped ratio is a constant, so every token has a gradient
        policy = -rho.clamp(max=epsilon_high).detach() * A * logp  # here epsilon_high is the cap itself
        too_high = (rho > epsilon_high) & (A > 0)
    elif objective == "sapo":  # SAPO 2511.20347: a sigmoid in place of clipping, steeper where A is negative
        sapo_tau = torch.full_like(A, sapo_tau_neg).masked_fill(A > 0, sapo_tau_pos)
        policy = -(4 / sapo_tau) * torch.sigmoid(sapo_tau * (rho - 1)) * A
    elif objective == "dppo":  # DPPO-TV 2602.04879: epsilon bounds the change of the probability, not the ratio
        change = logp.exp() - denominator.exp()
        too_low, too_high = (change < -epsilon_low) & (A < 0), (change > epsilon_high) & (A > 0)
        policy = (-rho.detach() * A * logp).masked_fill(too_low | too_high, 0.0)
    elif objective == "vespo":  # VESPO 2602.10693: weighted by a smooth function of the completion's ratio
        policy = -_vespo_weight((logp - denominator).detach(), correction, A, mask) * A * logp
    elif objective == "reinforce":
        policy = -A * logp
    else:
        raise _unknown("objective", objective, OBJECTIVES)

    if has_tis and objective != "vespo":  # the weight of VESPO includes the correction
        policy = policy * correction
    if head_logp is not None:  # 2609.20807: subtract the score that the sampler expects at each token
        # -A [ sg(f(rho)) log pi(a) - sum_v sg(mu_v f(pi_v / mu_v)) log pi_v ], where sg stops the gradient and f is the
        # weight of the token: a capped ratio, a correction, or 1. The command line refuses objectives with others.
        outcome_logp, mu = _outcomes(head_logp, sampler_head_logp, mask)  # (B, T, K + 1)
        outcome_ratio = outcome_logp.detach().exp() / mu  # infinite where the sampler has probability 0
        if objective == "cispo" and old_policy == "sampler":
            f = outcome_ratio.clamp(max=epsilon_high)
        elif has_tis:
            f = _bounded(outcome_ratio, tis_mode, tis_floor, tis_cap)
        else:
            f = torch.ones_like(mu)
        c = (mu * f).masked_fill(mu == 0.0, 0.0)
        policy = policy + A * (c * outcome_logp).sum(-1)
    if has_gate:
        policy = policy.masked_fill(outside_gate, 0.0)
    if off_policy_mask is not None:  # DeepSeek-V3.2 2512.02556, eq. 9: drop A < 0 where the policy has moved far
        far = _mean_over_tokens((sampler_logp - logp).detach(), mask) > off_policy_mask
        policy = policy.masked_fill(far & (A < 0), 0.0)
        stats["off_policy"] = ((far & (A < 0) & mask).sum(), tokens)

    # The KL term and the pull towards the sampler have the same weights as the policy term.
    loss = policy
    if kl_importance and kl_estimator not in ("k1", "k3"):
        raise ValueError(f"kl_importance needs kl_estimator k1 or k3: it does not correct {kl_estimator}")
    if beta != 0.0 and ref_logp is None:
        raise ValueError(f"beta={beta} needs ref_logp")
    if ref_logp is not None:
        kl = kl_divergence(logp, ref_logp, kl_estimator)
        stats["kl"] = (kl.detach().sum(), tokens)
        if kl_importance:  # DeepSeek-V3.2, eq. 7: times the ratio of the token, whatever `ratio` is
            kl = (logp - denominator).exp() * kl
        if beta != 0.0:
            loss = loss + beta * kl
    if sampler_coef != 0.0:  # Kimi-K2.5 2602.02276, by token; Kimi-k1.5 and DRO square the sum over the completion
        loss = loss + sampler_coef * (logp - sampler_logp.detach()).square()

    if "epsilon_high" in OBJECTIVES[objective]:
        stats["clip_low"] = ((too_low & mask).sum(), tokens)
        stats["clip_high"] = ((too_high & mask).sum(), tokens)
    return (w * loss).sum(), stats


def _sampler_ratio(log_ratio: Tensor, tis_mode: str) -> Tensor:
    """Return the ratio pi_old / pi_sampler of each token, or the product of the ratios of its completion."""
    if tis_mode not in TIS_MODES:
        raise _unknown("tis_mode", tis_mode, TIS_MODES)
    if tis_mode.startswith("sequence"):
        log_ratio = log_ratio.sum(1, keepdim=True).expand_as(log_ratio)
    return log_ratio.exp()


def _bounded(ratio: Tensor, tis_mode: str, floor: float | None, cap: float | None) -> Tensor:
    """Return the ratio truncated to its bounds (TIS), or 0 outside of them (IcePop, MIS)."""
    if tis_mode.endswith("truncate"):
        return ratio.clamp(floor, cap)
    return ratio.masked_fill(_is_beyond(ratio, floor, cap), 0.0)


def _outcomes(head_logp: Tensor, sampler_head_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probs under the policy and the probabilities under the sampler, both (B, T, K + 1), of the
    outcomes at each token: the K that are given, and the rest as one more. In the rest, the paper takes the sampler to
    be proportional to the policy.

    If the given outcomes have probability 1 together, nothing is left, and the rest gets probability 0. This is so if
    one of them is already "all other ids together", which a caller should give in fp32: 1 minus the probabilities of
    the likeliest ids would be rounded."""
    head_logp, sampler_head_logp = (_clean(x, mask[..., None]) for x in (head_logp, sampler_head_logp))
    mu, given = sampler_head_logp.exp(), head_logp.exp().sum(-1, keepdim=True)
    others = 1 - mu.sum(-1, keepdim=True)
    has_others = others > 1e-5  # in fp32, a sum of 1000 probabilities is accurate to 1e-6
    # Where nothing is left for the others, this is log 1 = 0.
    log_others = (1 - given).clamp(min=torch.finfo(given.dtype).tiny).where(has_others, 1.0).log()
    mu = torch.cat([mu, others.where(has_others, 0.0)], -1)
    return torch.cat([head_logp, log_others], -1).masked_fill(mu == 0.0, 0.0), mu


def _is_beyond(ratio: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return where a ratio is outside of [low, high]. None means that there is no bound."""
    return (ratio < (0.0 if low is None else low)) | (ratio > (math.inf if high is None else high))


def _vespo_weight(log_rho: Tensor, correction: Tensor, A: Tensor, mask: Tensor) -> Tensor:
    """Return phi(w) = exp(lambda - lambda w) w^k, with k = 2 and lambda = 3 where A >= 0, else k = 3 and lambda = 2.
    w is a product over the tokens of a completion. Each factor is (policy / old policy) * correction, where the
    correction stands for (old policy / sampler). phi(1) is 1, and phi goes to 0 for small and for large w. The
    logarithms of both factors are clamped as in TRL. TRL also clamps log w, but only where phi is below 1e-14, so that
    is left out."""
    log_w = log_rho.clamp(-20.0, 20.0) + correction.log().clamp(math.log(1e-8), 20.0)
    log_w = log_w.masked_fill(~mask, 0.0).sum(1, keepdim=True)
    k, lambda_ = torch.where(A >= 0, 2.0, 3.0), torch.where(A >= 0, 3.0, 2.0)
    return (lambda_ + k * log_w - lambda_ * log_w.exp()).exp()


def _mean_over_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """Return for each token the mean of x (B, T) over its completion. x must be 0 where the mask is 0."""
    return (x.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(x)


def _clean(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """Set x to 0 where the mask is 0. Multiplying by the mask would not remove NaN, because 0 * NaN is NaN."""
    return None if x is None else torch.where(mask, x, 0.0)


def _unknown(setting: str, value: str, valid: Iterable[str]) -> ValueError:
    return ValueError(f"{setting} is {value!r}; it must be one of {', '.join(valid)}")
