"""The losses and their gradients, compared with the papers' equations in plain Python.

The test of a preset quotes the objective J from its paper, and computes it with nothing but plain numbers. The loss
is −J.

No formula is needed for the gradient. Add 1e-30 i to one log-prob, and the imaginary part of the loss is 1e-30 times
the derivative. This is exact, because it is not a difference of two losses. The real part of a number is the number
without its gradient, sg in the papers.

    ρ_it = π_θ/π_old of a token      S(ρ, A) = min(ρ A, clip(ρ, 1−ε_low, 1+ε_high) A)      Δ = log π_ref − log π_θ

A paper averages over the G completions of one prompt. These tests have two prompts and N completions in all.

`completion_by_hand` has all the equations again, for any combination of switches.
"""

import cmath
import contextlib
import inspect
import math
import random
from functools import cache, partial
from itertools import islice, product
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from advantage import combine_rewards, group_advantages
from config import ALGORITHMS, Config, UserError, resolve
from conftest import allowed_pairs
from infra.command_line import ready
from loss import (
    KL_ESTIMATORS,
    NORMALIZATIONS,
    OBJECTIVES,
    RATIOS,
    SWITCHES_READ,
    binary_kl,
    combine,
    kl_divergence,
    needs_advantages,
    policy_loss,
    token_weights,
)

F64, INF = torch.float64, math.inf
LENGTHS = [1, 7, 3, 5, 2, 7, 4, 6]  # |o_i| of two prompts with four completions each
GROUPS = [[0.0, 1.0, 0.5, 1.0], [1.0, 0.0, 0.5, 0.5]]  # rewards; the mean of the second is 0.5, so A is 0 twice
REWARDS = GROUPS[0] + GROUPS[1]
MINUS_MEAN = [r - fmean(group) for group in GROUPS for r in group]
OVER_STD = [(r - fmean(group)) / stdev(group) for group in GROUPS for r in group]
PROMPTS = torch.tensor([5] * 4 + [3] * 4)  # which prompt each completion belongs to; the labels need not be in order
N, TOKENS, BUDGET = len(LENGTHS), sum(LENGTHS), 20  # BUDGET is max_completion_length; no completion is that long
WEIGHTS = {  # the weight in J of each token of completion i
    "sequence": [1 / (N * length) for length in LENGTHS],
    "global": [1 / TOKENS] * N,
    "prompt": [1 / (2 * sum(of_prompt)) for of_prompt in (LENGTHS[:4], LENGTHS[4:]) for _ in range(4)],
    "constant": [1 / (N * BUDGET)] * N,
    "sum": [1 / N] * N,
}


def draw(seed, lengths=LENGTHS, spread=0.4):
    """Return random log-probs of four policies that differ by `spread`. Some are above 0, so an objective that needs
    1 - π must clamp π, as it must for a π that is rounded to 1. Padding has random values as well."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths)
    logp = -3 * torch.rand(shape, generator=generator, dtype=F64)
    old, ref, sampler = (logp + spread * torch.randn(shape, generator=generator, dtype=F64) for _ in range(3))
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    return SimpleNamespace(logp=logp, old=old, ref=ref, sampler=sampler, mask=mask)


@pytest.fixture(params=range(1, 4))
def b(request):
    """Return one of three random batches: log-probs of four policies, and a mask."""
    return draw(request.param)


def sg(x):
    return x.real


def least(*numbers):
    return min(numbers, key=sg)


def most(*numbers):
    return max(numbers, key=sg)


def surrogate(c, ratio="token", epsilon_low=0.2, epsilon_high=0.2):
    """Return Σ_t S(ρ_t, A) of a completion. With ratio="sequence", the ratio of all tokens is GSPO's s, the exponential
    of the mean of log ρ over the completion. Then every log-prob of a completion changes all of its terms."""
    log_ratios = [sum(c.log_rho) / len(c.log_rho)] * len(c.log_rho) if ratio == "sequence" else c.log_rho
    ratios = [cmath.exp(x) for x in log_ratios]
    return sum(least(rho * c.A, least(most(rho, 1 - epsilon_low), 1 + epsilon_high) * c.A) for rho in ratios)


def of_sequences(c):
    return surrogate(c, "sequence", 3e-4, 4e-4)


def minus_sum(b, J, A, weights):
    """Return −Σ_i w_i Σ_t J_it and its gradient. J is a function that gets a completion c and returns Σ_t J_it."""
    loss, grad = 0.0, torch.zeros_like(b.logp)
    for i, length in enumerate(LENGTHS):
        for t in range(length):
            # c.A is a number. c.logp, c.old, c.ref, c.sampler and c.log_rho have a number for each token.
            c = SimpleNamespace(A=A[i], **{name: x[i, :length].tolist() for name, x in vars(b).items()})
            c.logp[t] += 1e-30j
            c.log_rho = [x - y for x, y in zip(c.logp, c.old)]
            term = -weights[i] * J(c)
            grad[i, t] = term.imag / 1e-30
        loss += term.real
    return loss, grad


def run(logp, *args, **switches):
    """Return what policy_loss computes: the loss, its gradient, and the statistics."""
    logp = logp.clone().requires_grad_()
    loss, stats = policy_loss(logp, *args, **switches)
    loss.backward()
    assert loss.dtype == logp.dtype, "the loss must have the dtype of the log-probs, even if the weights have another"
    assert not any(getattr(x, "requires_grad", False) for pair in stats.values() for x in pair)
    return loss.detach(), logp.grad, stats


def close(ours, theirs, tolerance=1e-10):
    """Compare two numbers or tensors, or two tuples of them. A sum of 35 terms in float64 is accurate to 1e-13."""
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    for actual, expected in pairs:
        actual, expected = (torch.as_tensor(x, dtype=F64).detach() for x in (actual, expected))
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def check(b, algorithm, A, weights, J=surrogate, **given):
    """Compare advantages, loss and gradient of a preset with those of its paper: A is the paper's advantage of each
    completion, `weights` those of its tokens, and J a function as in `minus_sum`. `given` replaces switches of the
    preset, and has the log-probs that it needs. Return the statistics."""
    settings = ALGORITHMS[algorithm] | given
    rewards = combine_rewards(torch.tensor(GROUPS, dtype=F64)[..., None], [1.0], settings["combine_rewards"])
    lengths = torch.tensor(LENGTHS).reshape(2, 4)
    advantages = group_advantages(rewards, settings["scale_rewards"], settings["baseline"], 0.0, lengths=lengths)
    close(advantages.flatten(), A)
    w = token_weights(b.mask, settings["normalization"], max_completion_length=BUDGET, prompts=PROMPTS)
    switches = {name: x for name, x in settings.items() if name in policy_loss.__kwdefaults__}
    loss, grad, stats = run(b.logp, b.old, torch.tensor(A, dtype=F64), w, b.mask, **switches)
    close((loss, grad), minus_sum(b, J, A, weights))
    if settings["objective"] in ("clip", "dppo") and settings["epsilon_high"] < INF:
        assert stats["clip_low"].sum > 0 and stats["clip_high"].sum > 0, "the data must reach both bounds"
    return stats


def test_grpo(b):
    """GRPO, arXiv 2402.03300: J = 1/G Σ_i 1/|o_i| Σ_t [S(ρ_it, A_i) − β (e^Δ − Δ − 1)], A = (r − mean r)/std r."""

    def J(c):
        deltas = [y - x for x, y in zip(c.logp, c.ref)]
        return surrogate(c) - 0.04 * sum(cmath.exp(x) - x - 1 for x in deltas)

    check(b, "grpo", OVER_STD, WEIGHTS["sequence"], J, ref_logp=b.ref, beta=0.04)


def test_dr_grpo(b):
    """Dr. GRPO, arXiv 2503.20783: J = 1/(G L) Σ_i Σ_t S(ρ_it, A_i), A = r − mean r. L is the budget, a constant."""
    check(b, "dr_grpo", MINUS_MEAN, WEIGHTS["constant"])


def test_dapo(b):
    """DAPO, arXiv 2503.14476: J = 1/Σ_i|o_i| Σ_i Σ_t S(ρ_it, A_i), ε 0.2 and 0.28, A = (r − mean r)/std r."""
    check(b, "dapo", OVER_STD, WEIGHTS["global"], partial(surrogate, epsilon_high=0.28))


def test_dapo_as_printed(b):
    """DAPO, arXiv 2503.14476, eq. 8: the mean over prompts of 1/Σ_i|o_i| Σ_i Σ_t S(ρ_it, A_i), whose sums run over the
    completions of one prompt."""
    check(b, "dapo", OVER_STD, WEIGHTS["prompt"], partial(surrogate, epsilon_high=0.28), normalization="prompt")


def test_gspo(b):
    """GSPO, arXiv 2507.18071: J = 1/G Σ_i S(s_i, A_i), s_i = exp(1/|o_i| Σ_t log ρ_it), A = (r − mean r)/std r."""
    check(b, "gspo", OVER_STD, WEIGHTS["sequence"], of_sequences)


def test_luspo(b):
    """LUSPO, arXiv 2602.05261: J = 1/G Σ_i |o_i| S(s_i, A_i), with GSPO's s_i."""
    check(b, "luspo", OVER_STD, WEIGHTS["sum"], of_sequences)


def test_cispo():
    """CISPO, arXiv 2506.13585: J = 1/Σ_i|o_i| Σ_i Σ_t sg(min(ρ_it, cap)) A_i log π_θ, A = (r − mean r)/std r."""

    def J(c):
        return sum(sg(least(cmath.exp(x), 5.0)) * c.A * logp for x, logp in zip(c.log_rho, c.logp))

    b = draw(0, spread=2.0)  # policies far enough apart for a cap of 5
    check(b, "cispo", OVER_STD, WEIGHTS["global"], J)
    assert ((b.logp - b.old > math.log(5.0)) & b.mask).any()


def test_rloo(b):
    """RLOO, arXiv 2402.14740: J = 1/k Σ_i (r_i − 1/(k−1) Σ_{j≠i} r_j) Σ_t log π_θ(o_it)."""
    A = [r - (sum(group) - r) / 3 for group in GROUPS for r in group]
    check(b, "rloo", A, WEIGHTS["sum"], lambda c: c.A * sum(c.logp))


def over_tokens(values):
    """Return (r − mean)/std. Mean and std are over all tokens of the batch: the value of a completion counts once for
    each of its tokens."""
    token_values = [r for r, length in zip(values, LENGTHS) for _ in range(length)]
    return [(r - fmean(token_values)) / stdev(token_values) for r in values]


def test_reinforce_plus_plus(b):
    """REINFORCE++, arXiv 2501.03262, eq. 10: J = 1/Σ_i|o_i| Σ_i Σ_t S(ρ_it, A_it), A_it = (r_i − mean)/std."""
    check(b, "reinforce++", over_tokens(REWARDS), WEIGHTS["global"])


def test_reinforce_plus_plus_baseline(b):
    """REINFORCE++-baseline does the same, but starts from r − mean of the group."""
    check(b, "reinforce++-baseline", over_tokens(MINUS_MEAN), WEIGHTS["global"])


def test_maxrl(b):
    """MaxRL, arXiv 2602.02710: A = (r − mean r)/mean r of the group."""
    A = [(r - fmean(group)) / fmean(group) for group in GROUPS for r in group]
    check(b, "maxrl", A, WEIGHTS["sequence"])


def test_opo(b):
    """OPO, arXiv 2505.23585: A = r − Σ_j |o_j| r_j / Σ_j |o_j|, where the sums are over the group."""
    pairs = zip(GROUPS, (LENGTHS[:4], LENGTHS[4:]))
    A = [r - fmean(group, weights=lengths) for group, lengths in pairs for r in group]
    check(b, "opo", A, WEIGHTS["global"])


def test_gdpo(b):
    """GDPO, arXiv 2601.05242: GRPO's J with A = (A' − mean A')/std A' over the batch, where A' is the sum over the
    rewards k of (r_k − mean r_k)/std r_k in the group: here of one reward, with the 1e-4 that is added to its std."""
    of_group = [(r - fmean(group)) / (stdev(group) + 1e-4) for group in GROUPS for r in group]
    check(b, "gdpo", [(x - fmean(of_group)) / stdev(of_group) for x in of_group], WEIGHTS["sequence"])


def test_gmpo(b):
    """GMPO, arXiv 2507.20673: J = 1/G Σ_i {Π_t min[ρ^sgn(A), clip(ρ^sgn(A), e^−ε, e^ε)]^sgn(A)}^(1/|o_i|) A_i."""

    def J(c):
        # In logs, the factor of a token is min(log ρ, ε) if A > 0. If A < 0, the exponent sgn(A) turns the min into a
        # max, and ε into −ε. The weights 1/(N |o_i|) of a completion add up to 1/N, so each token has the whole value.
        logs = [least(x, 0.4) if c.A > 0 else most(x, -0.4) for x in c.log_rho]
        return len(logs) * cmath.exp(sum(logs) / len(logs)) * c.A

    check(b, "gmpo", OVER_STD, WEIGHTS["sequence"], J)


def test_sapo(b):
    """SAPO, arXiv 2511.20347: J = 1/G Σ_i 1/|o_i| Σ_t (4/τ) σ(τ (ρ_it − 1)) A_i, τ 1 where A > 0, 1.05 elsewhere."""

    def J(c):
        tau = 1.0 if c.A > 0 else 1.05
        return sum(4 / tau / (1 + cmath.exp(-tau * (cmath.exp(x) - 1))) * c.A for x in c.log_rho)

    check(b, "sapo", OVER_STD, WEIGHTS["sequence"], J)


def test_dppo(b):
    """DPPO-TV, arXiv 2602.04879: J = 1/Σ_i|o_i| Σ_i Σ_t M_it sg(ρ_it) A_i log π_θ, where M_it is 0 for a token whose
    probability has changed by more than δ in the direction of A_i."""

    def J(c):
        changes = [math.exp(sg(x)) - math.exp(y) for x, y in zip(c.logp, c.old)]
        kept = [x <= 0.05 if c.A > 0 else x >= -0.03 for x in changes]
        return sum(sg(cmath.exp(x)) * c.A * logp for x, logp, is_kept in zip(c.log_rho, c.logp, kept) if is_kept)

    # Few of these changes reach the preset's bounds of 0.2.
    check(b, "dppo", OVER_STD, WEIGHTS["global"], J, epsilon_low=0.03, epsilon_high=0.05)


def test_vespo(b):
    """VESPO, arXiv 2602.10693: J = 1/Σ_i|o_i| Σ_i Σ_t sg(φ(w_i)) A_i log π_θ, φ(w) = w^k exp(λ (1 − w)). Here (k, λ)
    is (2, 3) if A >= 0, else (3, 2). w_i is Π_t ρ_it. As in TRL, ρ_it is clamped to [e^−20, e^20], and w_i to [1e-8,
    e^20]. Some of these data are beyond these limits."""
    b.old[2, 0] = b.logp[2, 0] - 30  # the log-ratio of this token is 30
    b.old[4, :2] = b.logp[4, :2] - torch.tensor([-30.0, 19.0])  # and of these it is −30 and 19
    b.old[3, :2] = b.logp[3, :2] - torch.tensor([30.0, -19.5])

    def J(c):
        log_w = sum(min(max(sg(x), -20.0), 20.0) for x in c.log_rho)
        w = math.exp(min(max(log_w, math.log(1e-8)), 20.0))
        k, decay = (2, 3) if c.A >= 0 else (3, 2)
        return w**k * math.exp(decay * (1 - w)) * c.A * sum(c.logp)

    check(b, "vespo", OVER_STD, WEIGHTS["global"], J)


def test_flash_reinforce(b):
    """FlashREINFORCE, 2026: J = 1/N Σ_i M_i 1/|o_i| Σ_t ρ_it A_i, A_i = r_i − mean r of all, ρ_it = π_θ/μ. M_i is 0 if
    the mean over the tokens of o_i of the binary KL of μ and π_θ is above δ, else 1."""
    A = [r - fmean(REWARDS) for r in REWARDS]
    one_rollout_a_prompt = torch.tensor(REWARDS, dtype=F64)[:, None]
    close(group_advantages(one_rollout_a_prompt, scale="none", baseline="batch").flatten(), A)

    def is_far(c):
        return fmean(coin_kl(sg(x), sg(y)) for x, y in zip(c.sampler, c.logp)) > 0.1

    def J(c):
        return 0.0 if is_far(c) else sum(cmath.exp(x - y) for x, y in zip(c.logp, c.sampler)) * c.A

    stats = check(b, "flash_reinforce", A, WEIGHTS["sequence"], J, sampler_logp=b.sampler, gate_kl=0.1)
    completions = [
        SimpleNamespace(sampler=x[:n].tolist(), logp=y[:n].tolist()) for x, y, n in zip(b.sampler, b.logp, LENGTHS)
    ]
    far = sum(map(is_far, completions))
    assert stats["gate_dropped"] == (far, N) and 0 < far < N


def test_the_binary_kl_at_probabilities_of_1():
    """With p = 1 the second term is 0, and with q = 1 the KL is infinite, unless p is 1 as well. A set of one id has
    both. Probabilities that are rounded to more than 1 are 1."""
    log_p, log_q = torch.tensor([[0.0, 0.0, -1.0, 1e-9, -1e-9], [0.0, -2.0, 0.0, 1e-9, -1e-9]], dtype=F64)
    close(binary_kl(log_p, log_q), torch.tensor([0.0, 2.0, INF, 0.0, 0.0], dtype=F64))


# ---- Facts that hold for any policy ----


def gradients(theta, *scalars):
    return [torch.autograd.grad(scalar, theta, retain_graph=True)[0] for scalar in scalars]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_estimators_on_policy(estimator):
    """For every estimator but k2 and abs, the mean value Σ_x π_θ(x) k(x) is KL(π_θ ‖ π_ref). The mean gradient
    Σ_x π_θ(x) ∇k(x) is 0 for k1, ∇KL(π_θ ‖ π_ref) for k2, k1+ and k3+, and ∇KL(π_ref ‖ π_θ) for k3. For abs it is the
    gradient of no KL divergence."""
    logits = torch.randn(2, 6, 1, generator=torch.Generator().manual_seed(0), dtype=F64)  # a vocabulary of six tokens
    theta = logits[0].clone().requires_grad_()
    logp, ref = theta.log_softmax(0), logits[1].log_softmax(0)
    kl, reverse_kl = (logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    # The mean gradient of abs is Σ π_θ ∇|log π_θ − log π_ref|, which is Σ ∇π_θ times the sign of log π_θ − log π_ref,
    # because π_θ ∇log π_θ = ∇π_θ. `absolute` has this gradient.
    absolute = (logp.exp() * (logp - ref).sign().detach()).sum()
    mean = (logp.detach().exp() * kl_divergence(logp, ref, estimator)).sum()
    assert (abs(mean - kl) < 1e-12) == (estimator not in ("k2", "abs"))
    expected = {"k1": 0 * kl, "k2": kl, "k3": reverse_kl, "abs": absolute, "k1+": kl, "k3+": kl}[estimator]
    close(*gradients(theta, mean, expected), 1e-12)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_importance_always_uses_the_ratio_of_the_token(estimator, ratio):
    """DeepSeek-V3.2, arXiv 2512.02556, eq. 7. With kl_importance, the expected KL term has the value and the gradient
    of the exact KL divergence, even if the completions were sampled from π_old. For every π_θ,

        Σ_o π_old(o) Σ_t ρ_ot k_ot = Σ_p π_old(p) KL(π_θ(·|p) ‖ π_ref(·|p)).

    Here o is a completion, ρ_ot and k_ot are the ratio and the estimate at its token t, and p is a prefix (perhaps
    empty) after which another token follows. The equation needs the ratio of the token, so the loss must use it
    whatever `ratio` is. The test lists all completions of a toy model: each ends with token 0 or after three tokens."""
    prefixes = [p for length in range(3) for p in product((1, 2), repeat=length)]
    completions = [(*p, token) for p in prefixes for token in range(3) if token == 0 or len(p) == 2]
    logits = torch.randn(3, len(prefixes), 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    theta = logits[0].clone().requires_grad_()
    policy, old, ref = theta.log_softmax(1), logits[1].log_softmax(1), logits[2].log_softmax(1)

    def scored(model):  # (15, 3), the log-prob of each token of each completion
        rows = [torch.stack([model[prefixes.index(o[:t]), o[t]] for t in range(len(o))]) for o in completions]
        return torch.stack([pad(row, (0, 3 - len(row))) for row in rows])

    probability = scored(old).sum(1).exp()  # π_old(o)
    close(probability.sum(), 1.0, 1e-12)
    prefix_probability = [sum(q for o, q in zip(completions, probability) if o[: len(p)] == p) for p in prefixes]
    kl = (torch.stack(prefix_probability) * (policy.exp() * (policy - ref)).sum(1)).sum()

    mask = torch.tensor([[t < len(o) for t in range(3)] for o in completions])
    # All advantages are 0, so only the KL term is left. The weight of a token of o is π_old(o).
    args = scored(policy), scored(old), torch.zeros(len(completions)), probability[:, None] * mask, mask
    switches = {"ref_logp": scored(ref), "beta": 1.0, "kl_estimator": estimator, "kl_importance": True}
    loss, _ = policy_loss(*args, ratio=ratio, **switches)
    close(loss, kl, 1e-12)
    close(*gradients(theta, loss, kl), 1e-12)


def test_the_loss_is_zero_and_its_gradient_is_not():
    """With one update per rollout, β = 0 and a mean over each completion, the loss is −Σ_i A_i / N = 0."""
    b, A = draw(0), group_advantages(torch.tensor(GROUPS, dtype=F64)).flatten()
    loss, grad, _ = run(b.logp, b.logp, A, token_weights(b.mask, "sequence"), b.mask)
    assert abs(loss) < 1e-12 and grad.abs().max() > 0.01
    loss, _, _ = run(b.logp, b.logp, A, token_weights(b.mask, "global"), b.mask)
    assert abs(loss) > 0.01  # long completions weigh more than short ones


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_what_an_objective_and_a_ratio_say_about_themselves(objective, ratio):
    """Here only token (0, 2) has an advantage."""
    b, one = draw(0, [5, 4], spread=0.05), torch.zeros(2, 5, dtype=F64)
    one[0, 2] = 1.0
    weights = token_weights(b.mask, "global")
    _, grad, stats = run(b.logp, b.old, one, weights, b.mask, objective=objective, ratio=ratio, epsilon_high=2.0)
    says, says_ratio = OBJECTIVES[objective], RATIOS[ratio]
    mixes_tokens, may_mix = bool((grad[one == 0] != 0).any()), says.by_ratio and says_ratio.mixes_tokens
    # The defaults of a new objective, which does not need A, allow more than it may do.
    assert mixes_tokens == may_mix if says.needs_A else mixes_tokens <= may_mix
    assert (grad[1] == 0).all() or not says.needs_A
    assert needs_advantages(objective, 0.0, 0.0, 0.0) == says.needs_A
    assert says.clips == ("clip_low" in stats) == ("clip_high" in stats)
    assert not any(needs_advantages(objective, *switches) for switches in ((1, 0, 0), (0, 1, 0), (0, 0, 1)))


# ---- Every switch with every other, in any split of the step ----

# `completion_by_hand` states all equations of policy_loss a second time, with nothing but numbers. The gradient is that
# of an imaginary step, as above.


def coin_kl(log_p, log_q):
    """Return the KL between two coins that show heads with probability p and q. A log-prob above 0 counts as 0."""
    p, q = (math.exp(min(x, 0.0)) for x in (log_p, log_q))
    tails = 0.0 if p == 1 else INF if q == 1 else (1 - p) * math.log((1 - p) / (1 - q))
    return p * math.log(p / q) + tails


def completion_by_hand(c, s):
    """Return the loss of one completion and its statistics. c has a list for each of logp, old, ref, sampler, A and
    weight, with the numbers of the T tokens that are trained on. s has the switches of policy_loss. In s, a bound that
    is not set is 0 or infinity."""
    T, loss, lows, highs, kls = len(c.logp), 0.0, [], [], []
    old = c.sampler if s.old_policy == "sampler" else c.old
    log_rho = [x - y for x, y in zip(c.logp, old)]
    if s.ratio == "token":
        log_ratio = log_rho
    elif s.ratio == "sequence":
        log_ratio = [sum(log_rho) / T] * T
    elif s.ratio == "sequence_token":
        log_ratio = [sg(sum(log_rho) / T) + x - sg(x) for x in c.logp]
    elif s.ratio == "geometric":
        clipped = [least(x, s.epsilon_high) if A > 0 else x for x, A in zip(log_rho, c.A)]
        clipped = [most(x, -s.epsilon_low) if A < 0 else x for x, A in zip(clipped, c.A)]
        log_ratio = [sum(clipped) / T] * T

    # u is π_old/π_sampler, and f is the factor that the policy term of a token gets from it.
    log_u = [x - y for x, y in zip(old, c.sampler)]
    u = [math.exp(sum(log_u) if s.tis_mode.startswith("sequence") else x) for x in log_u]
    is_inside = [s.tis_floor <= x <= s.tis_cap for x in u]
    has_tis, has_gate = s.tis_floor > 0 or s.tis_cap < INF, s.gate_low > 0 or min(s.gate_high, s.gate_kl) < INF

    def bounded(x):
        if not has_tis:
            return 1.0
        if s.tis_mode.endswith("truncate"):
            return min(max(x, s.tis_floor), s.tis_cap)
        return x if s.tis_floor <= x <= s.tis_cap else 0.0

    f = [bounded(x) for x in u]
    now = c.logp if s.old_policy == "sampler" else c.old
    far = fmean(coin_kl(sg(x), sg(y)) for x, y in zip(c.sampler, now)) > s.gate_kl
    is_dropped = far or not s.gate_low <= math.exp(fmean(log_u)) <= s.gate_high
    is_far = fmean(y - sg(x) for x, y in zip(c.logp, c.sampler)) > s.off_policy_mask

    for t in range(T):
        logp, A, rho = c.logp[t], c.A[t], cmath.exp(log_ratio[t])
        # x is the number that has the bounds low and high.
        x, low, high = rho, 1 - s.epsilon_low, 1 + s.epsilon_high
        if s.objective == "cispo":
            low, high = 0.0, s.epsilon_high
        elif s.objective == "dppo":
            x, low, high = cmath.exp(logp) - math.exp(old[t]), -s.epsilon_low, s.epsilon_high
        elif s.ratio == "geometric":
            x, low, high = log_rho[t], -s.epsilon_low, s.epsilon_high
        lows.append(sg(x) < low and A < 0)
        highs.append(sg(x) > high and A > 0)

        if s.objective == "clip":
            clipped = rho if s.ratio == "geometric" else least(most(rho, low), high)
            J = least(least(rho, s.delta) * A, clipped * A) * f[t]
        elif s.objective == "cispo":
            J = sg(least(rho, high)) * A * logp * f[t]
        elif s.objective == "sapo":
            tau = s.sapo_tau_pos if A > 0 else s.sapo_tau_neg
            J = 4 / tau / (1 + cmath.exp(-tau * (rho - 1))) * A * f[t]
        elif s.objective == "dppo":
            J = 0.0 if lows[t] or highs[t] else sg(rho) * A * logp * f[t]
        elif s.objective == "vespo":  # with the limits of TRL
            log_w = sum(min(max(sg(x), -20), 20) + math.log(max(y, 1e-8)) for x, y in zip(log_rho, f))
            w = math.exp(min(max(log_w, math.log(1e-8)), 20))
            k, lambda_ = (2, 3) if A >= 0 else (3, 2)
            J = w**k * math.exp(lambda_ * (1 - w)) * A * logp
        elif s.objective == "reinforce":
            J = A * logp * f[t]
        else:
            raise NotImplementedError(f"write an `elif` with the equation of {s.objective} above")
        if s.score_centering:  # subtract what the sampler expects; the last outcome is any other id
            outcomes = [*zip(c.head[t], c.sampler_head[t])]
            others = 1 - sum(cmath.exp(x) for x, _ in outcomes), 1 - sum(math.exp(y) for _, y in outcomes)
            for x, y in [*outcomes, (cmath.log(others[0]), math.log(others[1]))]:
                v = math.exp(sg(x) - y)
                is_capped = s.objective == "cispo" and s.old_policy == "sampler"
                J -= A * math.exp(y) * (min(v, s.epsilon_high) if is_capped else bounded(v)) * x
        if is_dropped or (is_far and A < 0):
            J = 0.0

        d = c.ref[t] - logp
        k1, k2, k3 = -d, d**2 / 2, cmath.exp(d) - d - 1
        kl = {"k1": k1, "k2": k2, "k3": k3, "abs": most(d, -d), "k1+": sg(k1 - k2) + k2, "k3+": sg(k3 - k2) + k2}
        kls.append(kl[s.kl_estimator])
        importance = cmath.exp(log_rho[t]) if s.kl_importance else 1.0
        pull = s.sampler_coef * (logp - c.sampler[t]) ** 2
        loss += c.weight[t] * (-J + s.beta * importance * kls[t] + pull - s.entropy_coef * c.entropy[t])

    gaps = [abs(x - y) for x, y in zip(c.old, c.sampler)]
    quarter = math.ceil(T / 4)
    stats = {"kl": sg(sum(kls)), "sampler_gap": sum(gaps), "entropy": sg(sum(c.entropy))}
    stats |= {"sampler_gap/first": sum(gaps[:quarter]), "sampler_gap/last": sum(gaps[-quarter:])}
    if s.objective in ("clip", "cispo", "dppo"):
        stats |= {"clip_low": sum(lows), "clip_high": sum(highs)}
    if has_tis or has_gate:
        stats |= {"tis_bounded": is_inside.count(False), "tis_ratio": sum(u), "tis_ratio_max": max(u)}
        stats |= {"gate_dropped": is_dropped}
    if s.off_policy_mask < INF:
        stats |= {"off_policy": sum(is_far and A < 0 for A in c.A)}
    return loss, stats


@cache
def mixed():
    """Return a batch of policies that are far apart, so that every switch matters. Row 3 is masked as a whole, and rows
    1 and 5 have a gap, as replies leave it. Rows 1, 5 and 6 have an advantage for each token, the others one each.
    Where the mask is 0, there is garbage."""
    b = draw(19, [1, 5, 3, 5, 4, 5, 4, 3], spread=1.2)
    b.mask[3], b.mask[1, 2], b.mask[5, 0] = False, False, False
    b.sampler[[2, 6]] += 1.5  # off_policy_mask drops these two
    b.logp[4, 1] = 0.0  # a probability of 1, for which gate_kl drops row 4
    b.A, b.weight, b.entropy = draw(10, [5] * 8).logp + 1.5, *(draw(seed, [5] * 8).logp.abs() for seed in (20, 23))
    garbage = torch.tensor([math.nan, INF, -INF, 1e30, -1e30] * 8, dtype=F64).view(8, 5)
    for name in ("logp", "old", "ref", "sampler", "A", "weight", "entropy"):
        setattr(b, name, torch.where(b.mask, getattr(b, name), garbage))
    # Two of the five ids of a vocabulary, at each token, and their log-probs under the policy and the sampler.
    heads = (draw(seed, [25] * 8, spread=1.0).old.view(8, 5, 5).log_softmax(-1)[..., :2] for seed in (21, 22))
    b.head, b.sampler_head = (torch.where(b.mask[..., None], head, garbage[..., None]) for head in heads)
    b.A[[0, 2, 3, 4, 7]] = torch.tensor([1.5, -0.7, math.nan, -1.2, 0.9], dtype=F64)[:, None]
    b.A[[1, 5, 6], [4, 2, 0]] = 0.0  # as top_entropy leaves it
    return b


# The micro-batches of `mixed`: rows, how many columns they need, and whether advantages are (B,).
PARTS = ([3], 1, True), ([6, 1, 5], 5, False), ([4, 0, 2, 7], 4, True)
# The values that stand for no bound.
UNSET = dict(delta=INF, tis_floor=0.0, tis_cap=INF, gate_low=0.0, gate_high=INF, gate_kl=INF, off_policy_mask=INF)


def switches_of(settings):
    """Return the arguments that a run with these settings gives to policy_loss."""
    config = vars(resolve(Config(**settings), {}, on_gpu=False))
    return {name: config[name] for name in policy_loss.__kwdefaults__ if name in config}


def step_by_hand(settings):
    """Return the loss of `mixed`, its gradient with respect to logp, the entropy and the two of `head`, and each
    statistic as [sum, count]."""
    b, loss, found = mixed(), 0.0, []
    grad = torch.zeros(8, 5, 4, dtype=F64)
    s = SimpleNamespace(**{name: UNSET[name] if x is None else x for name, x in switches_of(settings).items()})
    s.score_centering = settings.get("score_centering", 0)
    for i in (0, 1, 2, 4, 5, 6, 7):
        tokens = b.mask[i].nonzero()[:, 0].tolist()
        c = SimpleNamespace(**{name: x[i, tokens].tolist() for name, x in vars(b).items()})
        for (n, t), k in product(enumerate(tokens), range(4 if s.score_centering else 2)):
            numbers, at = ((c.logp, n), (c.entropy, n), (c.head[n], 0), (c.head[n], 1))[k]
            numbers[at] += 1e-30j
            value, stats = completion_by_hand(c, s)
            numbers[at] -= 1e-30j
            grad[i, t, k] = value.imag / 1e-30
        loss += value.real
        found.append(stats)
    quarters = sum(math.ceil(n / 4) for n in b.mask.sum(1).tolist())
    # For all other statistics, the count is the number of tokens.
    counts = {"gate_dropped": len(found), "tis_ratio_max": 1}
    counts |= {"sampler_gap/first": quarters, "sampler_gap/last": quarters}
    sums = {name: (max if name == "tis_ratio_max" else sum)(stats[name] for stats in found) for name in found[0]}
    return loss, grad, {name: [x, counts.get(name, int(b.mask.sum()))] for name, x in sums.items()}


@cache
def step_in_parts(**settings):
    """Return the same from policy_loss, added up over micro-batches in the way of a run."""
    b, loss, found, switches = mixed(), 0.0, [], switches_of(settings)
    grad = torch.zeros(8, 5, 4, dtype=F64)
    for rows, width, one_each in PARTS:
        part = SimpleNamespace(**{name: x[rows, :width] for name, x in vars(b).items()})
        args = part.logp, part.old, part.A[:, 0] if one_each else part.A, part.weight, part.mask
        more = dict(ref_logp=part.ref, sampler_logp=part.sampler, entropy=part.entropy.clone().requires_grad_())
        if settings.get("score_centering"):
            more |= dict(head_logp=part.head.clone().requires_grad_(), sampler_head_logp=part.sampler_head)
        part_loss, grad[rows, :width, 0], stats = run(*args, **more, **switches)
        if more["entropy"].grad is not None:
            grad[rows, :width, 1] = more["entropy"].grad
        if "head_logp" in more:
            grad[rows, :width, 2:] = more["head_logp"].grad
        loss += part_loss
        found.append(stats)
    return loss, grad, {name: [*map(float, x)] for name, x in combine(found).items()}


def assert_is_by_hand(settings):
    *ours, stats = step_in_parts(**settings)
    *by_hand, stats_by_hand = step_by_hand(settings)
    close(tuple(ours), tuple(by_hand))
    assert stats.keys() == stats_by_hand.keys(), "write a new statistic into completion_by_hand, too"
    close(torch.tensor([stats[name] for name in stats]), torch.tensor([stats_by_hand[name] for name in stats]))


def words(settings):
    return " ".join(f"{name}={x}" for name, x in settings.items())


PAIRS = [*allowed_pairs()]


@pytest.mark.parametrize("chosen, switch", PAIRS, ids=words)
def test_every_pair_of_switches(chosen, switch):
    """If a switch or a choice is new, write its equation into completion_by_hand."""
    assert_is_by_hand(chosen | switch)
    ours, without = step_in_parts(**chosen | switch)[1], step_in_parts(**chosen)[1]
    # If this fails, let policy_loss read the switch with this choice, or list it at the top of loss.py for the choices
    # that do read it. The command line then refuses it with the others.
    assert not torch.equal(ours, without), "the switch changes nothing"


def test_every_switch_is_in_a_pair():
    """A new one joins by its line in config.py, unless no pair with it is allowed: see `needs` in allowed_pairs."""
    arguments = inspect.signature(policy_loss).parameters.values()
    switches = {x.name for x in arguments if x.kind is x.KEYWORD_ONLY and x.annotation != torch.Tensor | None}
    assert switches | {"score_centering"} == {name for _, switch in PAIRS for name in switch}
    values = {(name, x) for name, reads in SWITCHES_READ.items() for x in reads}
    assert values <= {pair for chosen, _ in PAIRS for pair in chosen.items()}


def several_pairs_at_once():
    """Yield allowed combinations of many switches, drawn at random: four pairs without one of their settings."""
    generator = random.Random(0)
    while True:
        settings = {}
        for chosen, switch in generator.sample(PAIRS, 4):
            settings |= chosen | switch
        del settings[generator.choice([*settings])]
        with contextlib.suppress(UserError):
            ready(Config(**settings), on_gpu=False)
            yield settings


@pytest.mark.parametrize("settings", islice(several_pairs_at_once(), 300), ids=words)
def test_many_switches(settings):
    assert_is_by_hand(settings)


CENTERED = [dict(objective="reinforce"), dict(tis_cap=1.1), dict(tis_cap=2.0, tis_floor=0.5, tis_mode="token_mask")]
CENTERED += [dict(objective="cispo", old_policy="sampler", epsilon_high=1.2)]


@pytest.mark.parametrize("switches", CENTERED, ids=words)
def test_centered_scores_have_mean_0(switches):
    """If the head is the whole vocabulary, here of six tokens, the gradient that the sampler expects is 0 for constant
    advantages. With exact ratios, centering changes no gradient."""
    theta, other = torch.randn(2, 6, generator=torch.Generator().manual_seed(0), dtype=F64)
    policy, sampler = (x.log_softmax(0)[None, None] for x in (theta.requires_grad_(), other))  # (1, 1, 6)
    one, means, exact = torch.ones(1, 1, dtype=F64), [], []
    for head in ({}, dict(head_logp=policy, sampler_head_logp=sampler)):
        args = [(policy[..., v], policy[..., v].detach(), one, one, one) for v in range(6)]
        losses = [policy_loss(*x, sampler_logp=sampler[..., v], **head, **switches)[0] for v, x in enumerate(args)]
        means += gradients(theta, (sampler.exp() * torch.stack(losses)).sum())
        exact += gradients(theta, policy_loss(*args[0], sampler_logp=sampler[..., 0], **head, tis_cap=1e9)[0])
    assert means[1].abs().max() < 1e-12 < 0.01 < means[0].abs().max()  # sums of numbers near 1, in float64
    close(*exact, 1e-12)


# ---- Token weights ----

RAGGED = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 1, 1, 0]])  # a masked row, a gap


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_token_weights(normalization):
    """Here N = 3 rows have a token, L = 100, and Σ_j |o_j| = 8. Prompt 7 has row 0, prompt 2 has rows
    2 and 3, and each of the two has four tokens. Prompt 0 has only row 1, which is masked. So P = 2.

        sequence: 1/(N |o_i|)       global: 1/Σ_j |o_j|       prompt: 1/(P Σ |o_j| of the prompt)
        constant: 1/(N L)           sum: 1/N
    """
    by_row = torch.tensor([[3 * 4], [1], [3 * 1], [3 * 3]])  # the masked row has weight 0 with any divisor
    divisors = {"sequence": by_row, "global": 8, "prompt": 2 * 4, "constant": 3 * 100, "sum": 3}
    prompts = torch.tensor([7, 0, 2, 2])
    weights = token_weights(RAGGED, normalization, max_completion_length=100, prompts=prompts)
    assert weights.dtype == F64
    close(weights, RAGGED.double() / divisors[normalization], 1e-15)  # KeyError: write the new one into `divisors`
    close(token_weights(0 * RAGGED, normalization, max_completion_length=100, prompts=prompts), torch.zeros(4, 5), 0)


# ---- Errors ----

ERRORS = [{name: "k9"} for name in ("objective", "ratio", "old_policy", "kl_estimator")]
ERRORS += [{"tis_cap": 2.0, "tis_mode": "k9"}, {"ratio": "geometric", "delta": 2.0}, {"beta": 0.1, "ref_logp": None}]
ERRORS += [{"entropy_coef": 0.1, "entropy": None}]
ERRORS += [{"kl_importance": True, "kl_estimator": estimator} for estimator in ("k2", "abs", "k1+", "k3+")]


@pytest.mark.parametrize("switches", ERRORS, ids=words)
def test_what_would_be_another_loss_is_an_error(switches):
    b = draw(0)
    others = dict(ref_logp=b.ref, sampler_logp=b.sampler) | switches
    with pytest.raises(ValueError, match="|".join(switches)):
        policy_loss(b.logp, b.old, torch.ones(N), token_weights(b.mask, "sum"), b.mask, **others)
    with pytest.raises(ValueError, match="normalization"):
        token_weights(b.mask, "k9")
