"""The losses and their gradients, compared with the papers' equations in plain Python.

The test of a preset quotes the objective J from its paper. It computes the term of J for every token, and the
derivative of that term with respect to log π_θ(o_it), with nothing but `math`; the derivatives were worked out by hand.
The loss is −J.

    ρ_it = π_θ/π_old of a token      S(ρ, A) = min(ρ A, clip(ρ, 1−ε_low, 1+ε_high) A)      Δ = log π_ref − log π_θ

A paper averages over the G completions of one prompt. These tests have two prompts and N completions in all.
"""

import math
from functools import partial
from itertools import product
from statistics import fmean, stdev
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad

from advantage import group_advantages
from infra.report import combine
from loss import (
    KL_ESTIMATORS,
    NORMALIZATIONS,
    OBJECTIVES,
    RATIOS,
    SWITCHES_READ,
    TIS_MODES,
    kl_divergence,
    policy_loss,
    token_weights,
)

F64 = torch.float64
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
every_normalization = pytest.mark.parametrize("normalization", NORMALIZATIONS)


def draw(seed, lengths=LENGTHS, spread=0.4):
    """Return random log-probs of four policies that differ by `spread`. Padding has random values as well."""
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


def clipped(x, low=0.2, high=0.2, delta=math.inf):
    """Return min(min(ρ, δ) A, clip(ρ, 1−low, 1+high) A) and its derivative with respect to log ρ. The derivative is
    ρ A, or 0 where ρ is clipped. x has the numbers of one token, among them ρ as x.ratio and A as x.A."""
    slope = x.ratio * x.A
    # `free` and `bound` are the two arguments of the outer min, each as a pair (value, derivative).
    free = (min(x.ratio, delta) * x.A, slope if x.ratio < delta else 0.0)
    bound = (min(max(x.ratio, 1 - low), 1 + high) * x.A, slope if 1 - low <= x.ratio <= 1 + high else 0.0)
    return free if free[0] < bound[0] else bound


def minus_sum(b, J, A, weights, ratio="token"):
    """Return −Σ_i Σ_t w_it J_it and its gradient. J is a function that gets the numbers x of one token. It returns the
    token's term J_it and the derivative of this term with respect to log ρ. A and weights are (N,) or (N, T). With
    ratio="sequence", the ratio of all tokens is GSPO's s_i, the exponential of the mean of log ρ over the completion.
    Then every log-prob of a completion changes all of its terms."""
    loss, grad = 0.0, torch.zeros_like(b.logp)
    A, weights = (torch.as_tensor(x, dtype=F64).reshape(N, -1).expand_as(grad) for x in (A, weights))
    for i, length in enumerate(LENGTHS):
        s = math.exp(fmean((b.logp - b.old)[i, :length].tolist()))
        for t in range(length):
            # x.logp, x.old, x.ref, x.sampler and x.mask are the numbers of this token.
            x = SimpleNamespace(i=i, t=t, A=A[i, t].item(), **{k: v[i, t].item() for k, v in vars(b).items()})
            x.ratio = s if ratio == "sequence" else math.exp(x.logp - x.old)
            value, derivative = J(x)
            loss = loss - weights[i, t] * value
            grad[i, t] = -weights[i, t] * derivative
        if ratio == "sequence":
            # So far, grad[i, t] is the derivative of term t with respect to log s_i. Each log-prob affects log s_i, and
            # so all of these terms: the derivative of log s_i with respect to each log-prob is 1/length.
            grad[i, :length] = grad[i].sum() / length
    return loss, grad


def run(logp, *args, **switches):
    """Return what policy_loss computes: the loss, its gradient, and the statistics as numbers."""
    logp = logp.clone().requires_grad_()
    loss, stats = policy_loss(logp, *args, **switches)
    loss.backward()
    assert loss.dtype == logp.dtype, "the loss must have the dtype of the log-probs, even if the weights have another"
    assert not any(getattr(x, "requires_grad", False) for pair in stats.values() for x in pair)
    return loss.detach(), logp.grad, {name: (float(total), float(count)) for name, (total, count) in stats.items()}


def close(ours, theirs, tolerance=1e-10):
    """Compare two numbers or tensors, or two tuples of them. A sum of 35 terms in float64 is accurate to 1e-13."""
    pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
    for actual, expected in pairs:
        actual, expected = (torch.as_tensor(x, dtype=F64).detach() for x in (actual, expected))
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def check(b, A, normalization, J=None, advantage_settings=None, **switches):
    """Compare advantages, loss, gradient and the statistics of clipping with those of the paper. A is the paper's
    advantage of each completion. group_advantages must compute the same when it is called with `advantage_settings`.
    J is a function as in `minus_sum`, by default the one for S(ρ, A)."""
    settings = (advantage_settings or {}) | {"eps": 0.0, "lengths": torch.tensor(LENGTHS).reshape(2, 4)}
    close(group_advantages(torch.tensor(GROUPS, dtype=F64), **settings).flatten(), A)
    weights = token_weights(b.mask, normalization, max_completion_length=BUDGET, prompts=PROMPTS)
    A = torch.tensor(A, dtype=F64)
    J = J or partial(clipped, low=switches.get("epsilon_low", 0.2), high=switches.get("epsilon_high", 0.2))
    loss, grad, stats = run(b.logp, b.old, A, weights, b.mask, **switches)
    paper = minus_sum(b, J, A, WEIGHTS[normalization], switches.get("ratio", "token"))
    close((loss, grad), paper)
    objective = switches.get("objective", "clip")
    assert ("clip_low" in stats) == (objective in ("clip", "cispo", "dppo"))
    if objective in ("clip", "dppo"):
        assert stats["clip_low"][0] > 0 and stats["clip_high"][0] > 0, "the data must reach both bounds"
        if "ref_logp" not in switches:  # a clipped token has no gradient, unless there is a KL term
            no_gradient = (paper[1] == 0) & b.mask
            # Where A < 0, only the lower bound clips, and where A > 0, only the upper one.
            at_low = (no_gradient & (A < 0)[:, None]).sum()
            at_high = (no_gradient & (A > 0)[:, None]).sum()
            assert stats["clip_low"] == (at_low, TOKENS) and stats["clip_high"] == (at_high, TOKENS)
    return stats


def test_grpo(b):
    """GRPO, arXiv 2402.03300: J = 1/G Σ_i 1/|o_i| Σ_t [S(ρ_it, A_i) − β (e^Δ − Δ − 1)], A = (r − mean r)/std r."""

    def J(x):
        (surrogate, slope), delta = clipped(x), x.ref - x.logp
        return surrogate - 0.04 * (math.exp(delta) - delta - 1), slope - 0.04 * (1 - math.exp(delta))

    check(b, OVER_STD, "sequence", J, ref_logp=b.ref, beta=0.04)


def test_dr_grpo(b):
    """Dr. GRPO, arXiv 2503.20783: J = 1/(G L) Σ_i Σ_t S(ρ_it, A_i), A = r − mean r. L is the budget, a constant."""
    check(b, MINUS_MEAN, "constant", advantage_settings={"scale": "none"})


def test_dapo(b):
    """DAPO, arXiv 2503.14476: J = 1/Σ_i|o_i| Σ_i Σ_t S(ρ_it, A_i), ε 0.2 and 0.28, A = (r − mean r)/std r."""
    check(b, OVER_STD, "global", epsilon_low=0.2, epsilon_high=0.28)


def test_dapo_as_printed(b):
    """DAPO, arXiv 2503.14476, eq. 8: the mean over prompts of 1/Σ_i|o_i| Σ_i Σ_t S(ρ_it, A_i), whose sums run over the
    completions of one prompt."""
    check(b, OVER_STD, "prompt", epsilon_low=0.2, epsilon_high=0.28)


def test_gspo(b):
    """GSPO, arXiv 2507.18071: J = 1/G Σ_i S(s_i, A_i), s_i = exp(1/|o_i| Σ_t log ρ_it), A = (r − mean r)/std r."""
    check(b, OVER_STD, "sequence", ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4)


def test_luspo(b):
    """LUSPO, arXiv 2602.05261: J = 1/G Σ_i |o_i| S(s_i, A_i), with GSPO's s_i."""
    check(b, OVER_STD, "sum", ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4)


def test_cispo():
    """CISPO, arXiv 2506.13585: J = 1/Σ_i|o_i| Σ_i Σ_t sg(min(ρ_it, cap)) A_i log π_θ, A = (r − mean r)/std r."""

    def J(x):
        coefficient = min(x.ratio, 5.0)  # sg stops the gradient, so this is a constant
        return coefficient * x.A * x.logp, coefficient * x.A

    b = draw(0, spread=2.0)  # policies far enough apart for a cap of 5
    # For CISPO, epsilon_high is the cap itself and not its distance from 1.
    stats = check(b, OVER_STD, "global", J, objective="cispo", epsilon_high=5.0)
    cut = (b.logp - b.old > math.log(5.0)) & b.mask & (torch.tensor(OVER_STD) > 0)[:, None]
    assert stats["clip_low"] == (0, TOKENS) and stats["clip_high"] == (cut.sum(), TOKENS) and cut.any()


def test_rloo(b):
    """RLOO, arXiv 2402.14740: J = 1/k Σ_i (r_i − 1/(k−1) Σ_{j≠i} r_j) Σ_t log π_θ(o_it)."""
    A = [r - (sum(group) - r) / 3 for group in GROUPS for r in group]
    advantage_settings = {"scale": "none", "baseline": "leave_one_out"}
    check(b, A, "sum", lambda x: (x.A * x.logp, x.A), advantage_settings=advantage_settings, objective="reinforce")


def over_tokens(values):
    """Return (r − mean)/std. Mean and std are over all tokens of the batch: the value of a completion counts once for
    each of its tokens."""
    token_values = [r for r, length in zip(values, LENGTHS) for _ in range(length)]
    return [(r - fmean(token_values)) / stdev(token_values) for r in values]


def test_reinforce_plus_plus(b):
    """REINFORCE++, arXiv 2501.03262, eq. 10: J = 1/Σ_i|o_i| Σ_i Σ_t S(ρ_it, A_it), A_it = (r_i − mean)/std."""
    check(b, over_tokens(REWARDS), "global", advantage_settings={"scale": "whiten", "baseline": "none"})


def test_reinforce_plus_plus_baseline(b):
    """REINFORCE++-baseline does the same, but starts from r − mean of the group."""
    check(b, over_tokens(MINUS_MEAN), "global", advantage_settings={"scale": "whiten"})


def test_maxrl(b):
    """MaxRL, arXiv 2602.02710: A = (r − mean r)/mean r of the group."""
    A = [(r - fmean(group)) / fmean(group) for group in GROUPS for r in group]
    check(b, A, "sequence", advantage_settings={"scale": "mean"})


def test_opo(b):
    """OPO, arXiv 2505.23585: A = r − Σ_j |o_j| r_j / Σ_j |o_j|, where the sums are over the group."""
    pairs = zip(GROUPS, (LENGTHS[:4], LENGTHS[4:]))
    A = [r - fmean(group, weights=lengths) for group, lengths in pairs for r in group]
    check(b, A, "global", advantage_settings={"scale": "none", "baseline": "length"})


def test_gmpo(b):
    """GMPO, arXiv 2507.20673: J = 1/G Σ_i {Π_t min[ρ^sgn(A), clip(ρ^sgn(A), e^−ε, e^ε)]^sgn(A)}^(1/|o_i|) A_i."""
    low, high = 0.3, 0.4
    # In logs, the factor of a token is min(log ρ, high) if A > 0. If A < 0, the exponent sgn(A) turns the min into a
    # max.
    s = []  # for each completion, the factor of A_i
    for i, length in enumerate(LENGTHS):
        log_ratios = (b.logp - b.old)[i, :length].tolist()
        s.append(math.exp(fmean(min(x, high) if OVER_STD[i] > 0 else max(x, -low) for x in log_ratios)))

    def J(x):
        # The weights 1/(N |o_i|) of a completion add up to 1/N, so each of its tokens has the value s_i A_i. The
        # derivative of s_i A_i / N with respect to log ρ_it is s_i A_i / (N |o_i|), or 0 where log ρ_it is clipped.
        is_clipped = x.ratio > math.exp(high) if x.A > 0 else x.ratio < math.exp(-low)
        return s[x.i] * x.A, 0.0 if is_clipped else s[x.i] * x.A

    check(b, OVER_STD, "sequence", J, ratio="geometric", epsilon_low=low, epsilon_high=high)


def test_sapo(b):
    """SAPO, arXiv 2511.20347: J = 1/G Σ_i 1/|o_i| Σ_t (4/τ) σ(τ (ρ_it − 1)) A_i, τ 1 where A > 0, 1.05 elsewhere."""

    def J(x):
        tau = 1.0 if x.A > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau * (x.ratio - 1)))
        return 4 / tau * gate * x.A, 4 * gate * (1 - gate) * x.ratio * x.A

    check(b, OVER_STD, "sequence", J, objective="sapo")


def test_dppo(b):
    """DPPO-TV, arXiv 2602.04879: J = 1/Σ_i|o_i| Σ_i Σ_t M_it sg(ρ_it) A_i log π_θ, where M_it is 0 for a token whose
    probability has changed by more than δ in the direction of A_i."""

    def J(x):
        change = math.exp(x.logp) - math.exp(x.old)
        dropped = change > 0.05 if x.A > 0 else change < -0.03
        return (0.0, 0.0) if dropped else (x.ratio * x.A * x.logp, x.ratio * x.A)

    check(b, OVER_STD, "global", J, objective="dppo", epsilon_low=0.03, epsilon_high=0.05)


@pytest.mark.parametrize("tis", [{}, {"tis_cap": 1.1, "tis_floor": 0.9}, {"tis_mode": "token_mask", "tis_cap": 1.2}])
def test_vespo(b, tis):
    """VESPO, arXiv 2602.10693: J = 1/Σ_i|o_i| Σ_i Σ_t sg(φ(w_i)) A_i log π_θ, φ(w) = w^k exp(λ (1 − w)). Here (k, λ)
    is (2, 3) if A >= 0, else (3, 2). w_i is Π_t ρ_it u_it. The correction u_it is π_old/π_sampler of the token, bounded
    as `tis` says, or 1 if `tis` is empty. As in TRL, ρ_it is clamped to [e^−20, e^20], u_it is at least 1e-8, and w_i
    is clamped to [1e-8, e^20]. Some of these data are beyond these limits."""
    b.old[2, 0] = b.logp[2, 0] - 30  # the log-ratio of this token is 30
    b.old[4, :2] = b.logp[4, :2] - torch.tensor([-30.0, 19.0])  # and of these it is −30 and 19
    b.sampler[4] = b.old[4] - 0.05
    phi = []
    for i, length in enumerate(LENGTHS):
        logs = [min(max(x, -20.0), 20.0) for x in (b.logp - b.old)[i, :length].tolist()]
        # An empty `tis` turns the corrections off.
        corrections = [math.exp(x) for x in (b.old - b.sampler)[i, :length].tolist()] if tis else []
        for correction in corrections:
            u = min(max(correction, tis.get("tis_floor", 0.0)), tis["tis_cap"])
            # In the mode token_mask, a correction beyond a bound becomes 0 and not the bound.
            u = 0.0 if tis.get("tis_mode") == "token_mask" and u != correction else u
            logs.append(math.log(max(u, 1e-8)))
        w = math.exp(min(max(sum(logs), math.log(1e-8)), 20.0))
        k, decay = (2, 3) if OVER_STD[i] >= 0 else (3, 2)
        phi.append(w**k * math.exp(decay * (1 - w)))
    assert phi[4] > 0.05  # completion 4 has log-ratios −30, which counts as −20, and 19

    def J(x):
        return phi[x.i] * x.A * x.logp, phi[x.i] * x.A

    check(b, OVER_STD, "global", J, objective="vespo", sampler_logp=b.sampler, **tis)


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


# ---- Each switch ----


@pytest.mark.parametrize("delta", [0.9, 1.05, 1.2, 1.5, 4.0])
def test_two_sided_clipping(delta):
    """min(min(ρ, δ) A, clip(ρ, 1−ε, 1+ε) A) for any δ. Each token has its own advantage, and some are 0."""
    b, A = draw(0, spread=1.0), draw(10).logp + 1.5  # log-probs from -3 to 0, so A has both signs
    A[:, 1::3] = 0.0
    loss, grad, stats = run(b.logp, b.old, A, token_weights(b.mask, "global"), b.mask, delta=delta)
    close((loss, grad), minus_sum(b, partial(clipped, delta=delta), A, WEIGHTS["global"]))
    ratio = (b.logp - b.old).exp()
    # A ratio beyond a bound counts as clipped only if A pushes it further out.
    assert stats["clip_low"] == (((ratio < 0.8) & (A < 0) & b.mask).sum(), TOKENS) and stats["clip_low"][0] > 0
    assert stats["clip_high"] == (((ratio > 1.2) & (A > 0) & b.mask).sum(), TOKENS) and stats["clip_high"][0] > 0


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_kl_term(estimator):
    """S(ρ, A) − β k. k1 = −Δ, k2 = Δ²/2, k3 = e^Δ − Δ − 1, abs = |Δ|. With a +, the value is the same, but the gradient
    is that of k2."""
    b, A = draw(0), torch.tensor(REWARDS, dtype=F64) - 0.3

    def k(x):
        d = x.ref - x.logp
        value = {"k1": -d, "k2": d**2 / 2, "k3": math.exp(d) - d - 1, "abs": abs(d)}[estimator.rstrip("+")]
        slopes = {"k1": 1.0, "k2": -d, "k3": 1 - math.exp(d), "abs": math.copysign(1, -d), "k1+": -d, "k3+": -d}
        return value, slopes[estimator]

    args = b.logp, b.old, A, token_weights(b.mask, "global"), b.mask
    reference = {"ref_logp": b.ref, "kl_estimator": estimator}
    loss, grad, stats = run(*args, beta=0.3, **reference)
    # Pairs of value and gradient: −Σ w S and −Σ w k.
    minus_surrogate, minus_kl = (minus_sum(b, J, A, WEIGHTS["global"]) for J in (clipped, k))
    close((loss, grad), (minus_surrogate[0] - 0.3 * minus_kl[0], minus_surrogate[1] - 0.3 * minus_kl[1]))
    close(stats["kl"], (-TOKENS * minus_kl[0], TOKENS))
    # With β = 0, the KL is measured, but changes nothing.
    no_beta, no_reference = run(*args, **reference), run(*args)
    assert torch.equal(no_beta[1], no_reference[1])  # the gradients
    assert no_beta[2]["kl"] == stats["kl"] and "kl" not in no_reference[2]


SAMPLER_CORRECTIONS = {  # mode: cap, floor; with these data some ratios are beyond each bound and some are not
    "token_truncate": (1.1, 0.8),
    "token_mask": (1.2, 0.7),
    "sequence_truncate": (1.5, 0.5),
    "sequence_mask": (2.5, 0.3),
}
GATES = [None, None], [0.8, 1.18], [None, 1.0], [1.0, None]  # the last three drop some completions and not all


def correction(b, mode, cap, floor, gate=(None, None)):
    """Return the factor of each token: π_old/π_sampler of the token or, in a sequence mode, the product of these ratios
    over the completion. A factor outside of [floor, cap] becomes the nearest bound in a truncate mode, and 0 in a mask
    mode. The gate is a pair of bounds for the geometric mean of the ratios of a completion. Outside of the gate, all
    factors of the completion are 0."""
    factor = torch.zeros_like(b.logp)
    for i, length in enumerate(LENGTHS):
        logs = (b.old - b.sampler)[i, :length].tolist()
        if not (gate[0] or 0.0) <= math.exp(fmean(logs)) <= (gate[1] or math.inf):
            continue  # all factors of the completion remain 0
        for t in range(length):
            ratio = math.exp(logs[t] if mode.startswith("token") else sum(logs))
            if mode.endswith("truncate"):
                factor[i, t] = max(min(ratio, cap), floor)
            elif floor <= ratio <= cap:
                factor[i, t] = ratio
    return factor


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("mode", TIS_MODES)
@pytest.mark.parametrize("switches", [{}, {"ratio": "sequence"}, {"objective": "cispo"}, {"objective": "reinforce"}])
def test_sampler_correction(switches, mode, gate):
    """The correction is a constant factor of the policy term and does not change the KL term. With a gate, but without
    tis_cap and tis_floor, some completions are dropped and the others are not corrected."""
    b, A, (cap, floor) = draw(0), torch.tensor(REWARDS, dtype=F64) - 0.3, SAMPLER_CORRECTIONS[mode]
    weights, kl = token_weights(b.mask, "global"), {"ref_logp": b.ref, "beta": 0.1}
    factor = correction(b, mode, cap, floor, gate)
    unbounded = correction(b, mode, math.inf, 0.0)[b.mask]
    too_low, too_high = unbounded < floor, unbounded > cap
    assert too_low.any() and too_high.any() and not (too_low | too_high).all()
    policy = run(b.logp, b.old, A, weights * factor, b.mask, **switches)[:2]
    penalty = run(b.logp, b.old, 0 * A, weights, b.mask, **kl)[:2]

    sampler = b.sampler.clone().requires_grad_()
    gates = {"sampler_logp": sampler, "gate_low": gate[0], "gate_high": gate[1]}
    bounds = {"tis_mode": mode, "tis_cap": cap, "tis_floor": floor}
    loss, grad, stats = run(b.logp, b.old, A, weights, b.mask, **gates, **bounds, **kl, **switches)
    close((loss, grad), (policy[0] + penalty[0], policy[1] + penalty[1]))
    assert sampler.grad is None or (sampler.grad == 0).all()
    close(stats["sampler_gap"], ((b.old - b.sampler)[b.mask].abs().sum(), TOKENS))
    assert stats["tis_bounded"] == ((too_low | too_high).sum(), TOKENS)
    close(stats["tis_ratio"], (unbounded.sum(), TOKENS))
    close(stats["tis_ratio_max"], (unbounded.max(), 1))
    # With both bounds at 1, the correction is 1 for the completions that the gate keeps, and 0 for those that it drops.
    kept = correction(b, "token_truncate", 1.0, 1.0, gate)
    dropped = (kept[:, 0] == 0).sum()
    assert stats["gate_dropped"] == (dropped, N) and dropped < N and (dropped > 0) == (gate != [None, None])

    _, grad, stats = run(b.logp, b.old, A, weights, b.mask, **gates, **switches)
    close(grad, run(b.logp, b.old, A, weights * kept, b.mask, **switches)[1])
    # Without tis_cap and tis_floor, nothing is bounded: tis_bounded is 0, or missing if there is no gate either.
    assert stats.get("tis_bounded", (0, TOKENS)) == (0, TOKENS) and "sampler_gap" in stats


@pytest.mark.parametrize("switches", [{}, {"ratio": "sequence"}, {"objective": "dppo"}])
def test_the_sampler_as_the_old_policy(b, switches):
    """With old_policy="sampler", the denominator of the ratio is the probability under the sampler, not under the old
    policy. The statistic sampler_gap still compares the sampler with the old policy."""
    args = torch.tensor(OVER_STD, dtype=F64), token_weights(b.mask, "global"), b.mask
    ours = run(b.logp, b.old, *args, sampler_logp=b.sampler, old_policy="sampler", **switches)
    expected = run(b.logp, b.sampler, *args, **switches)
    assert all(torch.equal(*pair) for pair in zip(ours[:2], expected[:2]))
    close(ours[2]["sampler_gap"], ((b.old - b.sampler)[b.mask].abs().sum(), TOKENS))


@pytest.mark.parametrize("tau, bounds", [(0.05, {"tis_cap": 1.1}), (-0.5, {"tis_floor": 0.8})])
def test_pull_towards_the_sampler(b, tau, bounds):
    """Kimi-K2.5, arXiv 2602.02276: S(ρ, A) − τ (log π_θ − log π_sampler)² − β k1. The sampler's correction, which has
    only one bound here, changes only the first term."""

    def J(x):
        (surrogate, slope), away = clipped(x), x.logp - x.sampler
        factor = max(min(math.exp(x.old - x.sampler), bounds.get("tis_cap", math.inf)), bounds.get("tis_floor", 0.0))
        value = factor * surrogate - tau * away**2 - 0.1 * (x.logp - x.ref)
        return value, factor * slope - 2 * tau * away - 0.1

    sampler = b.sampler.clone().requires_grad_()
    kl = {"ref_logp": b.ref, "beta": 0.1, "kl_estimator": "k1"}
    check(b, OVER_STD, "sequence", J, sampler_logp=sampler, sampler_coef=tau, **bounds, **kl)
    assert sampler.grad is None or not sampler.grad.any()


def test_off_policy_sequence_masking(b):
    """DeepSeek-V3.2, arXiv 2512.02556, eq. 9: M_i = 0 where A_i < 0 and 1/|o_i| Σ_t log(π_sampler/π_θ) > δ."""
    A = torch.tensor([1.0, -1.0] * 4, dtype=F64)
    drift = [fmean((b.sampler - b.logp)[i, :length].tolist()) for i, length in enumerate(LENGTHS)]
    threshold = sorted(drift[1::2])[1] + 1e-6  # two of the four completions with A < 0 stay
    keep = torch.tensor([1.0 if a > 0 or d <= threshold else 0.0 for a, d in zip(A, drift)], dtype=F64)
    assert keep.sum() == 6
    weights, kl = token_weights(b.mask, "sequence"), {"ref_logp": b.ref, "beta": 0.1}
    loss, grad, stats = run(b.logp, b.old, A, weights, b.mask, sampler_logp=b.sampler, off_policy_mask=threshold, **kl)
    # A masked completion still counts in the weights of the others, and has its KL term.
    close((loss, grad), run(b.logp, b.old, A * keep, weights, b.mask, **kl)[:2])
    assert stats["off_policy"] == (sum(n for n, k in zip(LENGTHS, keep) if k == 0), TOKENS)


def test_sequence_ratio_with_weights_and_advantages_of_tokens(b):
    """The loss is −Σ_i Σ_t w_it S(s_i, A_it). Every log-prob of a completion changes s_i, and so all of its terms."""
    weights, A = draw(10).logp.abs(), draw(20).logp + 1.5
    ours = run(b.logp, b.old, A, weights, b.mask, ratio="sequence")
    close(ours[:2], minus_sum(b, clipped, A, weights, "sequence"))


# For each switch that only some objectives read, a value that is not its default.
OTHER_VALUES = {
    "ratio": "sequence",
    "epsilon_low": 0.05,
    "epsilon_high": 0.05,
    "delta": 1.3,
    "sapo_tau_pos": 2.0,
    "sapo_tau_neg": 2.0,
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_switches_that_an_objective_reads(objective):
    """A switch changes the gradient of an objective if and only if SWITCHES_READ lists it for this objective."""
    b, A = draw(0, spread=1.0), torch.tensor(OVER_STD, dtype=F64)
    args = b.logp.float(), b.old.float(), A, token_weights(b.mask, "global"), b.mask
    # For cispo, epsilon_high is the cap itself, and only some of these ratios reach 1.1.
    switches = {"objective": objective, "epsilon_high": 1.1}
    _, before, _ = run(*args, **switches)
    grads = {name: run(*args, **switches | {name: value})[1] for name, value in OTHER_VALUES.items()}
    assert {name for name, grad in grads.items() if not torch.equal(grad, before)} == set(SWITCHES_READ[objective])
    assert set().union(*SWITCHES_READ.values()) == OTHER_VALUES.keys()


# ---- Neither masked positions nor the split of a step change anything ----

SWITCHES = {  # run_all adds a KL term and truncated importance sampling
    "clip": {"delta": 1.5, "kl_estimator": "k1", "kl_importance": True},
    "sequence": {"ratio": "sequence", "kl_importance": True},
    "cispo": {"objective": "cispo", "epsilon_high": 1.3},
    "reinforce": {"objective": "reinforce", "kl_estimator": "k2"},
    "geometric": {"ratio": "geometric", "kl_estimator": "abs", "tis_mode": "sequence_truncate", "sampler_coef": 0.2},
    "vespo": {"objective": "vespo", "tis_floor": 0.8, "gate_high": 1.2},
    "sapo": {"objective": "sapo", "kl_estimator": "k1+", "tis_mode": "sequence_mask"},
    "dppo": {"objective": "dppo", "epsilon_low": 0.05, "kl_estimator": "k3+", "off_policy_mask": 0.05},
    "masked by the sampler": {"tis_mode": "token_mask", "tis_floor": 0.8, "off_policy_mask": -0.05, "gate_low": 0.9},
}
every_switch = pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)


def step(seed, normalization):
    """Return nine completions with their weights. One completion is masked as a whole."""
    b = draw(seed, [*LENGTHS[:4], 0, *LENGTHS[4:]])
    b.advantages = torch.tensor([1.0, -2.0, 0.5, 1.0, 3.0, 1.5, -1.0, 3.0, -0.5], dtype=F64)
    b.prompts = torch.tensor([0] * 4 + [1] * 5)
    b.weights = token_weights(b.mask, normalization, max_completion_length=BUDGET, prompts=b.prompts)
    return b


def run_all(b, switches):
    kl_and_tis = {"ref_logp": b.ref, "beta": 0.1, "sampler_logp": b.sampler, "tis_cap": 1.1}
    return run(b.logp, b.old, b.advantages, b.weights, b.mask, **kl_and_tis | switches)


# "advantages" has one number for each completion, "token advantages" one for each token. Both are set as b.advantages.
@every_switch
@pytest.mark.parametrize("name", ["logp", "old", "ref", "sampler", "weights", "advantages", "token advantages"])
def test_garbage_where_masked(name, switches):
    def with_garbage(value):
        b = step(0, "global")
        if name == "token advantages":
            b.advantages = b.advantages[:, None].expand_as(b.logp)
        field = name.removeprefix("token ")
        live = b.mask.any(1) if name == "advantages" else b.mask
        setattr(b, field, getattr(b, field).masked_fill(~live, value))
        return b.mask, *run_all(b, switches)

    mask, loss, grad, stats = with_garbage(0.0)
    assert (grad[mask] != 0).any() and (grad[~mask] == 0).all()
    for garbage in (math.nan, -math.inf, math.inf, 1e30, -1e30):
        _, same_loss, same_grad, same_stats = with_garbage(garbage)
        assert torch.equal(loss, same_loss) and torch.equal(grad, same_grad) and stats == same_stats


@every_switch
@every_normalization
def test_any_split_of_the_step(normalization, switches):
    """Cut the step into micro-batches, each with its own padding. They add up to the whole step. The first one has only
    row 4, which is masked."""
    whole = step(0, normalization)
    loss, grad, stats = run_all(whole, switches)
    sum_loss, sum_grad, sum_stats = 0.0, torch.zeros_like(grad), dict.fromkeys(stats, (0.0, 0.0))
    for number, rows in enumerate(([4], [7, 2, 5, 0, 8], [6, 1], [3])):
        width = max(1, int(whole.mask[rows].sum(1).max())) + number % 3
        part = {name: tensor[rows] for name, tensor in vars(whole).items()}
        widening = width - whole.mask.shape[1]  # where this is negative, pad() removes columns
        part = SimpleNamespace(**{name: pad(x, (0, widening)) if x.dim() == 2 else x for name, x in part.items()})
        part_loss, part_grad, part_stats = run_all(part, switches)
        assert part.mask.any() or set(part_stats.values()) == {(0, 0)}, "a masked row counts in no statistic"
        sum_loss += part_loss
        sum_grad[rows] += pad(part_grad, (0, -widening))
        assert part_stats.keys() == stats.keys()
        for name, so_far in sum_stats.items():
            pairs = torch.tensor([so_far, part_stats[name]], dtype=F64)  # each is a total and a count
            sum_stats[name] = tuple(combine(name, *pairs).tolist())  # added in the way a run adds micro-batches
    close(sum_loss, loss, 1e-12)
    close(sum_grad, grad, 1e-12)
    for name in stats:
        close(sum_stats[name], stats[name], 1e-12)
        assert stats[name][1] == {"gate_dropped": N, "tis_ratio_max": 1}.get(name, TOKENS)


# ---- Token weights ----

RAGGED = torch.tensor([[1, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [1, 0, 1, 1, 0]])  # a masked row, a gap


@every_normalization
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_token_weights(normalization, dtype):
    """Here N = 3 rows have a token, L = 100, and Σ_j |o_j| = 8. Prompt 7 has row 0, prompt 2 has rows
    2 and 3, and each of the two has four tokens. Prompt 0 has only row 1, which is masked. So P = 2.

        sequence: 1/(N |o_i|)       global: 1/Σ_j |o_j|       prompt: 1/(P Σ |o_j| of the prompt)
        constant: 1/(N L)           sum: 1/N
    """
    by_row = torch.tensor([[3 * 4], [1], [3 * 1], [3 * 3]])  # the masked row has weight 0 with any divisor
    divisors = {"sequence": by_row, "global": 8, "prompt": 2 * 4, "constant": 3 * 100, "sum": 3}
    prompts = torch.tensor([7, 0, 2, 2])
    weights = token_weights(RAGGED.to(dtype), normalization, max_completion_length=100, prompts=prompts)
    assert weights.dtype == F64
    close(weights, RAGGED.double() / divisors[normalization], 1e-15)
    close(token_weights(0 * RAGGED, normalization, max_completion_length=100, prompts=prompts), torch.zeros(4, 5), 0)


# ---- Errors name what is valid or what is missing ----

NEED_SAMPLER = "tis_cap", "off_policy_mask", "sampler_coef", "gate_low"
ERRORS = [  # switches of the loss, or arguments of token_weights; and words of the message
    ({"kl_estimator": "k9"}, KL_ESTIMATORS),
    ({"objective": "k9"}, OBJECTIVES),
    ({"ratio": "k9"}, RATIOS),
    ({"tis_mode": "k9"}, TIS_MODES),
    *(({"kl_importance": True, "kl_estimator": k}, ["kl_importance", k]) for k in ("k2", "abs", "k1+", "k3+")),
    ({"ratio": "geometric", "delta": 2.0}, ["delta", "geometric"]),
    ({"ref_logp": None}, ["ref_logp"]),
    # Take away sampler_logp and tis_cap, which run_all passes, and set one switch that needs sampler_logp.
    *(({"sampler_logp": None, "tis_cap": None, name: 0.9}, ["sampler_logp"]) for name in NEED_SAMPLER),
    ({"normalization": "k9"}, NORMALIZATIONS),
    ({"normalization": "constant"}, ["max_completion_length"]),
    ({"normalization": "prompt"}, ["prompts"]),
]


@pytest.mark.parametrize("switches, words", ERRORS)
def test_errors(switches, words):
    with pytest.raises(ValueError) as error:
        if "normalization" in switches:
            token_weights(RAGGED, **switches)  # raises, so run_all is not called
        run_all(step(0, "sum"), switches)
    assert all(word in str(error.value) for word in words)
