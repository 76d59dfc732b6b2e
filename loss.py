"""The equations: importance ratio, clipping, KL, token weights. All functions take and return tensors.

Every objective here is one weighted sum over the completions i of an optimizer update and their tokens t:

    loss = sum_i sum_t  w_it * ( policy_it + beta kl_it + sampler_coef (log pi_it - log mu_it)^2 - entropy_coef H_it )

    w_it       token_weights    the normalization, computed once for the whole update before it is split
    policy_it  policy_term      minus the surrogate: clipped (PPO, GRPO), CISPO, SAPO, DPPO, VESPO or REINFORCE
    kl_it      kl_divergence    an estimate of KL(policy || reference)
    mu         sampler_logp     the policy that sampled
    H_it       entropy          that of the policy

The weights are computed from the whole update. So the loss of a micro-batch is a partial sum, and the partial sums of
any split (into micro-batches, over ranks, in any order, with any padding) add up to the same loss and the same
gradient. All terms share the weights, so no two of them can be normalized differently.

Only tokens where `mask` (B, T) is 1 count. Values at other tokens, even NaN, affect neither the loss nor the gradient.
Dual-clip, also called two-sided clipping, is the argument `delta`. Not here: KL inside the reward, value losses,
Clip-Cov and KL-Cov.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# ---- The choices, and what they say about themselves ----

NORMALIZATIONS = ("sequence", "global", "prompt", "constant", "sum")
TIS_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


class Ratio(NamedTuple):
    mixes_tokens: bool = True  # the ratio at a token has a gradient at other tokens of its completion
    reads: tuple[str, ...] = ()  # see SWITCHES_READ


class Objective(NamedTuple):
    """What an objective says about itself. The defaults are safe for a new one: it may get a backward pass in vain, or
    the command line may refuse a combination that would be right, but nothing is computed wrongly."""

    clips: bool = False  # it has bounds, and counts the tokens beyond them: clip_low, clip_high
    needs_A: bool = False  # where the advantage is 0, it has no gradient
    by_ratio: bool = True  # its gradient goes through the ratio; --top_entropy then needs one with mixes_tokens=False
    reads: tuple[str, ...] = ()
    centered_with: tuple[str, ...] = ()  # the values of old_policy with which --score_centering is right


OBJECTIVES = {
    #                     clips, needs_A, by_ratio, reads                                centered_with
    "clip":      Objective(True,  True, True,  ("ratio", "epsilon_low", "epsilon_high", "delta"), ("policy",)),
    "cispo":     Objective(True,  True, False, ("ratio", "epsilon_high"),                ("policy", "sampler")),
    "sapo":      Objective(False, True, True,  ("ratio", "sapo_tau_pos", "sapo_tau_neg")),
    "dppo":      Objective(True,  True, False, ("ratio", "epsilon_low", "epsilon_high")),
    "vespo":     Objective(False, True, False),
    "reinforce": Objective(False, True, False, (),                                       ("policy", "sampler")),
}  # fmt: skip
RATIOS = {
    "token": Ratio(mixes_tokens=False, reads=("delta",)),
    "sequence": Ratio(reads=("delta",)),
    "sequence_token": Ratio(mixes_tokens=False, reads=("delta",)),
    "geometric": Ratio(),
}
OLD_POLICIES = {"policy": ("tis_mode", "tis_cap", "tis_floor", "gate_low", "gate_high"), "sampler": ()}
KL_ESTIMATORS = {"k1": ("kl_importance",), "k2": (), "k3": ("kl_importance",), "abs": (), "k1+": (), "k3+": ()}
# The arguments of policy_loss that each choice reads. If one choice of a switch reads an argument, and the chosen one
# does not, the argument has no effect, and the command line refuses it: --objective cispo --delta 3, for example. An
# argument that is listed nowhere, such as beta, is always read.
SWITCHES_READ = {
    "objective": {name: objective.reads for name, objective in OBJECTIVES.items()},
    "ratio": {name: ratio.reads for name, ratio in RATIOS.items()},
    "old_policy": OLD_POLICIES,
    "kl_estimator": KL_ESTIMATORS,
}


def needs_advantages(objective: str, beta: float, sampler_coef: float, entropy_coef: float, **others: object) -> bool:
    """Return whether a loss with these switches has no gradient at tokens whose advantage is 0."""
    return OBJECTIVES[objective].needs_A and beta == sampler_coef == entropy_coef == 0.0


# ---- Statistics ----


class Mean(NamedTuple):
    sum: Tensor
    count: Tensor  # of what was summed


class Max(NamedTuple):
    max: Tensor  # of numbers that are not negative
    count: Tensor  # 1, or 0 if there were no numbers


class Each(NamedTuple):
    values: Tensor  # one for each completion


Statistic = Mean | Max | Each


def combine(parts: Sequence[dict[str, Statistic]]) -> dict[str, Statistic]:
    """Return the statistics, by name, of all these parts of a step together, in float64."""
    combined = {}
    for name in dict.fromkeys(name for stats in parts for name in stats):
        found = [stats[name] for stats in parts if name in stats]
        if isinstance(found[0], Each):
            combined[name] = Each(torch.cat([each.values.double() for each in found]))
            continue
        values, counts = (torch.stack([x.double() for x in column]) for column in zip(*found, strict=True))
        if isinstance(found[0], Max):
            combined[name] = Max(values.max(), counts.max())
        else:
            combined[name] = Mean(values.sum(), counts.sum())
    return combined


# ---- The weight of a token ----


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
    counted = mask.double()  # (N, T), 1 at the tokens that are trained on

    if normalization == "sequence":  # GRPO 2402.03300: the mean over each completion, then over completions
        w = counted / (n_trained * lengths)
    elif normalization == "global":  # DAPO 2503.14476: every token of the update has the same weight
        w = counted / lengths.sum()
    elif normalization == "prompt":  # eq. 8 of the DAPO paper: the mean over a group's tokens, then over groups
        same_prompt = prompts[:, None] == prompts  # (N, N)
        tokens = same_prompt.double() @ lengths.double()  # (N, 1), of all completions of the same prompt
        trained_prompts = prompts[lengths[:, 0] > 0].unique().numel()  # those with a completion that is trained on
        w = counted / (trained_prompts * tokens)
    elif normalization == "constant":  # Dr. GRPO 2503.20783: divided by the limit L, not by the longest completion
        w = counted / (n_trained * max_completion_length)
    elif normalization == "sum":  # RLOO 2402.14740: the sum over each completion, then the mean over completions
        w = counted / n_trained
    else:
        raise _unknown("normalization", normalization, NORMALIZATIONS)
    return w.masked_fill(~mask, 0.0)  # a fully masked completion may have 0 / 0


# ---- The loss of a token ----


def policy_loss(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    # the ratio and the policy term
    objective: str = "clip",
    ratio: str = "token",
    old_policy: str = "policy",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    delta: float | None = None,
    sapo_tau_pos: float = 1.0,
    sapo_tau_neg: float = 1.05,
    # the sampler
    sampler_logp: Tensor | None = None,
    tis_mode: str = "token_truncate",
    tis_cap: float | None = None,
    tis_floor: float | None = None,
    gate_low: float | None = None,
    gate_high: float | None = None,
    gate_kl: float | None = None,
    off_policy_mask: float | None = None,  # a threshold, see far_from_sampler
    head_logp: Tensor | None = None,
    sampler_head_logp: Tensor | None = None,
    # what is added
    ref_logp: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    kl_importance: bool = False,
    sampler_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> tuple[Tensor, dict[str, Mean | Max]]:
    """Return the loss of these completions, which is a partial sum of the update's loss, and statistics by name.

    logp, old_logp, sampler_logp, ref_logp, entropy, weights, mask are (B, T); advantages are (B,) or (B, T). old_logp
    are the log-probs under the policy before the updates of this step, computed like logp. sampler_logp are those that
    the sampler recorded. They may differ from old_logp, because sampling and training round differently. The
    denominator of the ratio is old_logp, or sampler_logp if old_policy is "sampler".

    The tis_* arguments (truncated importance sampling) correct the policy term for the difference between the old
    policy and the sampler. The gate_* arguments drop the policy term of completions in which this difference is too
    large. head_logp and sampler_head_logp (B, T, K) center the scores, see `expected_score`. infra/command_line.py
    checks which arguments make sense together.
    """
    _check(
        objective, ratio, old_policy, tis_mode, kl_estimator, kl_importance,
        delta, beta, ref_logp, entropy_coef, entropy,
    )  # fmt: skip
    mask = mask.bool()
    logp, old_logp, sampler_logp = (_clean(x, mask) for x in (logp, old_logp, sampler_logp))
    ref_logp, entropy = (_clean(x, mask) for x in (ref_logp, entropy))
    A = advantages[:, None] if advantages.dim() == 1 else advantages  # (B, 1) or (B, T)
    A, w = (_clean(x, mask).to(logp.dtype) for x in (A, weights))  # (B, T)
    denominator = sampler_logp if old_policy == "sampler" else old_logp  # of the ratio, as log-probs
    tokens, stats = mask.sum(), {}

    # Which ratio?
    log_rho, too_low, too_high = log_ratio(ratio, logp, denominator, A, mask, epsilon_low, epsilon_high)
    if ratio == "geometric":  # it has clipped already; the bounds 1 - 1 and 1 + inf clip no more
        epsilon_low, epsilon_high = 1.0, math.inf

    # Which correction for the sampler?
    correction, dropped = torch.ones_like(logp), torch.zeros_like(mask)
    if sampler_logp is not None:
        stats |= _statistics_of_gap((old_logp - sampler_logp).detach().abs(), mask)
    if any(bound is not None for bound in (tis_floor, tis_cap, gate_low, gate_high, gate_kl)):
        log_u = (denominator - sampler_logp).detach()  # (B, T), of old policy / sampler
        u = sampler_ratio(log_u, tis_mode)
        correction = bounded_ratio(u, tis_mode, tis_floor, tis_cap)
        gated = logp if old_policy == "sampler" else old_logp  # the policy that --gate_kl compares with the sampler
        dropped = outside_gates(log_u, sampler_logp, gated.detach(), mask, gate_low, gate_high, gate_kl)
        stats |= _statistics_of_correction(u, dropped, mask, tis_floor, tis_cap)
    if off_policy_mask is not None:
        far = far_from_sampler(logp, sampler_logp, A, mask, off_policy_mask)
        stats["off_policy"] = Mean((far & mask).sum(), tokens)
        dropped = dropped | far

    # Which policy term?
    policy, is_low, is_high = policy_term(
        objective, log_rho.exp(), A, logp, denominator, correction, mask,
        epsilon_low, epsilon_high, delta, sapo_tau_pos, sapo_tau_neg,
    )  # fmt: skip
    if OBJECTIVES[objective].clips:
        stats |= _statistics_of_clipping(too_low | is_low, too_high | is_high, mask)

    # What is added?
    if head_logp is not None:  # score centering: its f is what the policy term above multiplies grad log pi by
        is_capped = objective == "cispo" and old_policy == "sampler"
        bounds = ("token_truncate", None, epsilon_high) if is_capped else (tis_mode, tis_floor, tis_cap)
        policy = policy + A * expected_score(head_logp, sampler_head_logp, mask, *bounds)
    loss = policy.masked_fill(dropped, 0.0)
    if ref_logp is not None:
        kl = kl_divergence(logp, ref_logp, kl_estimator)
        stats["kl"] = Mean(kl.detach().sum(), tokens)
        # DeepSeek-V3.2 2512.02556, eq. 7: times the ratio of the token, whatever `ratio` is
        kl = (logp - denominator).exp() * kl if kl_importance else kl
        loss = loss + beta * kl if beta != 0.0 else loss
    if sampler_coef != 0.0:  # Kimi-K2.5 2602.02276, by token; Kimi-k1.5 and DRO square the sum over the completion
        loss = loss + sampler_coef * (logp - sampler_logp.detach()).square()
    if entropy is not None:
        stats["entropy"] = Mean(entropy.detach().sum(), tokens)
        loss = loss - entropy_coef * entropy if entropy_coef != 0.0 else loss
    return (w * loss).sum(), stats


# ---- Which ratio? ----


def log_ratio(
    ratio: str, logp: Tensor, denominator: Tensor, A: Tensor, mask: Tensor, epsilon_low: float, epsilon_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithm of the new policy's ratio to the old one at each token, and where it was clipped because it
    was too low, and too high; all (B, T)."""
    log_rho = logp - denominator
    nowhere = torch.zeros_like(mask)
    if ratio == "token":
        return log_rho, nowhere, nowhere
    if ratio == "sequence":  # GSPO 2507.18071: s_i = exp( 1/|o_i| sum_t log rho_it ), the same at every token of o_i
        return _mean_over_tokens(log_rho, mask), nowhere, nowhere
    if ratio == "sequence_token":  # GSPO-token, 2507.18071 eq. 13: sg(s_i) pi / sg(pi), where sg stops the gradient
        return _mean_over_tokens(log_rho, mask).detach() + logp - logp.detach(), nowhere, nowhere
    if ratio == "geometric":  # GMPO 2507.20673: clip the log-ratio of each token, then take the same mean
        too_low, too_high = _beyond_bounds(log_rho, -epsilon_low, epsilon_high, A)
        clipped = log_rho.masked_fill(too_low, -epsilon_low).masked_fill(too_high, epsilon_high)
        return _mean_over_tokens(clipped, mask), too_low, too_high
    raise _unknown("ratio", ratio, RATIOS)


# ---- Which correction for the sampler? ----


def sampler_ratio(log_u: Tensor, tis_mode: str) -> Tensor:
    """Return u = pi_old / pi_sampler of each token, or the product over its completion, (B, T), from its logarithm."""
    if tis_mode.startswith("sequence"):
        log_u = log_u.sum(1, keepdim=True).expand_as(log_u)
    return log_u.exp()


def bounded_ratio(u: Tensor, tis_mode: str, floor: float | None, cap: float | None) -> Tensor:
    """Return the factor that corrects for the sampler: u truncated to its bounds (TIS), or u with 0 outside of them
    (IcePop, MIS). Without bounds, there is no correction, and the factor is 1."""
    if floor is None and cap is None:
        return torch.ones_like(u)
    if tis_mode.endswith("truncate"):
        return u.clamp(floor, cap)
    return u.masked_fill(_is_outside(u, floor, cap), 0.0)


def outside_gates(
    log_u: Tensor,
    sampler_logp: Tensor,
    logp: Tensor,
    mask: Tensor,
    gate_low: float | None,
    gate_high: float | None,
    gate_kl: float | None,
) -> Tensor:
    """Return which completions a gate drops, (B, T), because the sampler was too far from the policy:

    gate_low, gate_high   by the geometric mean of u: the geometric sequence mask of Liu, Li et al. 2025, "When Speed
                          Kills Stability"
    gate_kl               by the mean of the binary KL, the sequence trust region of FlashREINFORCE, 2026
    """
    outside = _is_outside(_mean_over_tokens(log_u, mask).exp(), gate_low, gate_high)
    if gate_kl is not None:
        outside = outside | (_mean_over_tokens(binary_kl(sampler_logp, logp), mask) > gate_kl)
    return outside


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return p log(p / q) + (1 - p) log((1 - p) / (1 - q)): the KL between "this token or any other" under two
    policies. It is infinite if q = 1 and p < 1. The second term is 0 if p = 1."""
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)  # rounding may put them above 0
    other_p, other_q = -torch.expm1(log_p), -torch.expm1(log_q)  # 1 - p and 1 - q, exactly
    others = torch.where(other_p > 0.0, other_p * (other_p.log() - other_q.log()), 0.0)
    return log_p.exp() * (log_p - log_q) + others


def far_from_sampler(logp: Tensor, sampler_logp: Tensor, A: Tensor, mask: Tensor, threshold: float) -> Tensor:
    """Return where A < 0 in a completion that has become much less likely than it was for the sampler, (B, T)."""
    # DeepSeek-V3.2 2512.02556, eq. 9
    return (_mean_over_tokens((sampler_logp - logp).detach(), mask) > threshold) & (A < 0)


# ---- Which policy term? ----


def policy_term(
    objective: str,
    rho: Tensor,
    A: Tensor,
    logp: Tensor,
    denominator: Tensor,
    correction: Tensor,
    mask: Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
    sapo_tau_pos: float,
    sapo_tau_neg: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy term of each token: the objective of the paper with its sign changed, because it is minimized,
    times the correction for the sampler. Return also which tokens are below their lower bound and would fall further,
    because A is negative, and which are above their upper bound and would rise further, because A is positive; all
    (B, T)."""
    too_low = too_high = torch.zeros_like(mask)
    if objective == "clip":  # PPO, GRPO; DAPO's clip-higher: epsilon_high > epsilon_low
        low, high = 1 - epsilon_low, 1 + epsilon_high
        # If A < 0, the min below selects the larger of the two ratios, because A reverses their order. Then clipping
        # sets no upper bound on the ratio; only delta does.
        capped = rho if delta is None else rho.clamp(max=delta)
        policy = -torch.min(capped * A, rho.clamp(low, high) * A)
        too_low, too_high = _beyond_bounds(rho, low, high, A)
    elif objective == "cispo":  # MiniMax-M1 2506.13585: the capped ratio is a constant, so every token has a gradient
        policy = -rho.clamp(max=epsilon_high).detach() * A * logp  # here epsilon_high is the cap itself
        too_low, too_high = _beyond_bounds(rho, -math.inf, epsilon_high, A)
    elif objective == "sapo":  # SAPO 2511.20347: a sigmoid in place of clipping, flat sooner if A is negative
        tau = torch.full_like(A, sapo_tau_neg).masked_fill(A > 0, sapo_tau_pos)
        policy = -(4 / tau) * torch.sigmoid(tau * (rho - 1)) * A  # its slope at rho = 1 is -A for every tau
    elif objective == "dppo":  # DPPO-TV 2602.04879: epsilon bounds the change of the probability, not the ratio
        too_low, too_high = _beyond_bounds(logp.exp() - denominator.exp(), -epsilon_low, epsilon_high, A)
        policy = (-rho.detach() * A * logp).masked_fill(too_low | too_high, 0.0)
    elif objective == "vespo":  # VESPO 2602.10693: weighted by a smooth function of the completion's ratio
        policy = -_vespo_weight((logp - denominator).detach(), correction, A, mask) * A * logp
        correction = torch.ones_like(correction)  # the weight includes it
    elif objective == "reinforce":
        policy = -A * logp
    else:
        raise _unknown("objective", objective, OBJECTIVES)
    return policy * correction, too_low, too_high


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


# ---- What is added? ----


def kl_divergence(logp: Tensor, ref_logp: Tensor, estimator: str = "k3") -> Tensor:
    """Estimate KL(policy || reference) at each token that the policy sampled, http://joschu.net/blog/kl-approx.html.
    On-policy, only k2 has the gradient of the KL. So "k1+" has the value of k1 and the gradient of k2, and "k3+" has
    the value of k3 and the gradient of k2."""
    log_r = ref_logp - logp  # reference / policy, so k1 is -log_r
    if estimator == "k1":
        return -log_r
    if estimator == "k2":
        return log_r.square() / 2
    if estimator == "k3":
        return torch.expm1(log_r) - log_r
    if estimator == "abs":
        return log_r.abs()
    if estimator in ("k1+", "k3+"):
        value, k2 = (kl_divergence(logp, ref_logp, name) for name in (estimator.removesuffix("+"), "k2"))
        return value.detach() + k2 - k2.detach()
    raise _unknown("kl_estimator", estimator, KL_ESTIMATORS)


def expected_score(
    head_logp: Tensor, sampler_head_logp: Tensor, mask: Tensor, tis_mode: str, floor: float | None, cap: float | None
) -> Tensor:
    """Return sum_v mu_v f_v log pi_v for each token, (B, T), over all ids v, with a gradient through log pi_v alone.

    The score of a token a is grad log pi(a). The policy term gives it the weight f_a = bounded_ratio(pi_a / mu_a, ...),
    where mu is the sampler. (The command line refuses the settings with which the weight is another function.) The
    token was drawn from mu, so its weighted score is expected to be

        sum_v  mu_v f_v grad log pi_v

    which is the gradient of the result. Score centering (2609.20807) subtracts it from the score. head_logp and
    sampler_head_logp (B, T, K) are log pi and log mu of K ids. All other ids together are one more v: the paper takes
    their mu to be proportional to their pi, so their scores add up to mu_v grad log pi_v of this v. The last of the K
    may stand for all others, too. In fp32 it should, because 1 minus the probabilities of the likeliest is rounded.
    """
    head_logp, sampler_head_logp = (_clean(x, mask[..., None]) for x in (head_logp, sampler_head_logp))
    mu, pi_others = sampler_head_logp.exp(), 1 - head_logp.exp().sum(-1, keepdim=True)
    mu_others = 1 - mu.sum(-1, keepdim=True)
    exist = mu_others > 1e-5  # in fp32, a sum of 1000 probabilities is accurate to 1e-6
    pi_others = pi_others.clamp(min=torch.finfo(pi_others.dtype).tiny)  # rounding may make it negative
    # Where mu is 0, an id counts nothing. Its log pi must be finite even so, because 0 * -inf is NaN.
    mu = torch.cat([mu, mu_others.where(exist, 0.0)], -1)  # (B, T, K + 1)
    log_pi = torch.cat([head_logp, pi_others.where(exist, 1.0).log()], -1).masked_fill(mu == 0.0, 0.0)
    f = bounded_ratio(log_pi.detach().exp() / mu, tis_mode, floor, cap)  # the ratio is infinite where mu is 0
    return ((mu * f).masked_fill(mu == 0.0, 0.0) * log_pi).sum(-1)


# ---- Helpers ----


def _statistics_of_clipping(too_low: Tensor, too_high: Tensor, mask: Tensor) -> dict[str, Mean]:
    clipped = {"clip_low": too_low, "clip_high": too_high}
    return {name: Mean((where & mask).sum(), mask.sum()) for name, where in clipped.items()}


def _statistics_of_gap(gap: Tensor, mask: Tensor) -> dict[str, Mean]:
    """Return the mean gap (B, T), and those of the first and the last quarter of each completion, since a gap may grow
    with the length."""
    number, length = mask.cumsum(1), mask.sum(1, keepdim=True)  # (B, T), 1 at the first token; (B, 1)
    parts = {"": mask, "/first": mask & (4 * (number - 1) < length), "/last": mask & (4 * number > 3 * length)}
    return {f"sampler_gap{name}": Mean(gap.masked_fill(~part, 0.0).sum(), part.sum()) for name, part in parts.items()}


def _statistics_of_correction(
    u: Tensor, dropped: Tensor, mask: Tensor, tis_floor: float | None, tis_cap: float | None
) -> dict[str, Mean | Max]:
    tokens, u = mask.sum(), u.masked_fill(~mask, 0.0)
    return {
        "tis_bounded": Mean((_is_outside(u, tis_floor, tis_cap) & mask).sum(), tokens),
        "tis_ratio": Mean(u.sum(), tokens),
        "tis_ratio_max": Max(u.max(), mask.any().to(u.dtype)),
        "gate_dropped": Mean((dropped & mask).any(1).sum(), mask.any(1).sum()),
    }


def _beyond_bounds(x: Tensor, low: float, high: float, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return where x is below `low` and A lets it fall further, and where it is above `high` and A lets it rise."""
    return (x < low) & (A < 0), (x > high) & (A > 0)


def _is_outside(x: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return where x is outside of [low, high]. None means that there is no bound."""
    return (x < (-math.inf if low is None else low)) | (x > (math.inf if high is None else high))


def _mean_over_tokens(x: Tensor, mask: Tensor) -> Tensor:
    """Return for each token the mean of x (B, T) over its completion. x must be 0 where the mask is 0."""
    return (x.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(x)


def _clean(x: Tensor | None, mask: Tensor) -> Tensor | None:
    """Set x to 0 where the mask is 0. Multiplying by the mask would not remove NaN, because 0 * NaN is NaN."""
    return None if x is None else torch.where(mask, x, 0.0)


def _check(
    objective: str, ratio: str, old_policy: str, tis_mode: str, kl_estimator: str, kl_importance: bool,
    delta: float | None, beta: float, ref_logp: Tensor | None, entropy_coef: float, entropy: Tensor | None,
) -> None:  # fmt: skip
    """Raise a ValueError for an unknown name, or for arguments of policy_loss that contradict one another."""
    chosen = dict(objective=objective, ratio=ratio, old_policy=old_policy, tis_mode=tis_mode, kl_estimator=kl_estimator)
    for name, valid in (SWITCHES_READ | {"tis_mode": TIS_MODES}).items():
        if chosen[name] not in valid:
            raise _unknown(name, chosen[name], valid)
    if ratio == "geometric" and delta is not None:
        raise ValueError("ratio='geometric' clips log-ratios, so it cannot be used with delta")
    if kl_importance and kl_estimator not in ("k1", "k3"):
        raise ValueError(f"kl_importance needs kl_estimator k1 or k3: it does not correct {kl_estimator}")
    if beta != 0.0 and ref_logp is None:
        raise ValueError(f"beta={beta} needs ref_logp")
    if entropy_coef != 0.0 and entropy is None:
        raise ValueError(f"entropy_coef={entropy_coef} needs entropy")


def _unknown(name: str, value: str, valid: Iterable[str]) -> ValueError:
    return ValueError(f"{name} is {value!r}; it must be one of {', '.join(valid)}")
