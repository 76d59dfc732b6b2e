"""token_logprobs compared with full logits, for which the model reads each row separately and without padding."""

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import logprob
from conftest import EOS, FAMILIES, PAD, VOCAB, distance, flat_gradient, rounding, tiny_model
from fast import output_head
from fast.output_head import forward_replaced, returns_head_output
from infra.model import reads_together
from logprob import TokenScores, allowed_ids, token_logprobs
from loss import policy_loss

CHANGES_LOGITS = ("gemma2", "granite", "cohere", "falcon_h1")  # they cap or scale what the head returns
# Completions cannot share a row if the model has a short sliding window, no position ids or a state.
NOT_SHARED = ("mistral", "gemma3", "gpt_oss", "bloom", "mamba", "falcon_h1")
ALL_IN_FLOAT64 = ("gpt2", "gpt2 tied")  # the others compute some parts in float32

ROWS = ["pppcccccc...", "pc..........", "ppppccc.....", "ppppp.......", "ppppcccc...."]  # prompt, completion, padding
ATTENTION, COMPLETION = (torch.tensor([[int(c in letters) for c in row] for row in ROWS]) for letters in ("pc", "c"))
SCORED = COMPLETION.bool()
IDS = torch.randint(3, VOCAB, ATTENTION.shape, generator=torch.Generator().manual_seed(1)).where(ATTENTION == 1, PAD)
IDS[0, [1, 5, 8]] = EOS  # in a prompt, inside a completion and at its end
IDS[2, 6] = EOS
IDS[3:, :5] = IDS[2, :5]  # rows 2 to 4 begin with the same five tokens, but the model need not read the last of row 3
IDS[1, 0] = IDS[0, 0]  # the prompts of rows 0 and 1 begin with the same token


def score(model: nn.Module, **settings) -> tuple[Tensor, Tensor | None]:
    return token_logprobs(model, IDS, ATTENTION, COMPLETION, **settings)


def plain_values(logits: Tensor, sets: Sequence, ids: Tensor, temperature: float) -> Tensor:
    """Compute what TokenScores computes, (n, K + 3), in plain PyTorch: log q of the ids (n, 1 + K), log q of the rest,
    and the entropy of p. sets[i] are the ids that token i was sampled from, or None."""
    never = -1e30  # unlike -inf, it has a gradient of 0, not NaN, where all others are never sampled either
    outside = torch.zeros_like(logits, dtype=torch.bool)
    for row, allowed in zip(outside, sets, strict=True):
        if allowed is not None:
            row[:] = True
            row[torch.as_tensor(allowed).long()] = False
    z = logits.double() / temperature
    log_p, log_q = z.log_softmax(1), z.masked_fill(outside, never).log_softmax(1)
    rest = log_q.scatter(1, ids[:, 1:], never).logsumexp(1, keepdim=True)
    entropy = -(log_p.exp() * log_p).sum(1, keepdim=True)
    values = torch.cat([log_q.gather(1, ids), rest, entropy], 1)
    return values.masked_fill(values < never / 2, -torch.inf)


def reference(model: nn.Module, temperature: float = 1.0, kept: list | None = None, head_ids: Tensor | None = None):
    """Compute the log-probs and entropies of the tokens (B, T), and the log-probs of the head_ids and the rest
    (B, T, K + 1), from the model's logits, one row after another and without padding."""
    ids = IDS[..., None] if head_ids is None else torch.cat([IDS[..., None], head_ids], -1)
    values = torch.zeros(*IDS.shape, ids.shape[-1] + 2, dtype=torch.float64)
    for b, attention in enumerate(ATTENTION):
        at = attention.nonzero()[:, 0]
        logits = model(input_ids=IDS[b : b + 1, at]).logits[0, :-1]
        sets = [None if kept is None else kept[b][t] for t in at[1:]]
        values[b, at[1:]] = plain_values(logits, sets, ids[b, at[1:]], temperature)
    values = values.where(SCORED[..., None], 0.0)
    return values[..., 0], values[..., -1], values[..., 1:-1]


def gradient(model: nn.Module, logp: Tensor, entropy: Tensor | None) -> Tensor:
    """Return the gradient of a random linear function of both, with respect to all parameters, as one vector."""
    g = torch.randn(2, *logp.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    model.zero_grad(set_to_none=True)
    (g[0] * logp + (0 if entropy is None else g[1] * entropy)).sum().backward()
    return flat_gradient(model)


def assert_equals_reference(model: nn.Module, dtype: torch.dtype = torch.float32, ways: Sequence = (None,)):
    """Compare log-probs, entropies and gradients, for every value of `completions_per_row` in ways. With None, the
    model reads each row separately. With [2, 3], it reads the first two as one row, and the other three as another. The
    results may differ by a hundred roundings in dtype, the coarsest one that the model uses, because the order of
    additions depends on the CPU and on the shape of the batch."""
    expected_logp, expected_entropy, _ = reference(model, temperature=0.7)
    expected_grad = gradient(model, expected_logp, expected_entropy)
    assert expected_logp.min() < -14 and expected_entropy.max() > 0.01, "some tokens are unlikely, some entropies not 0"
    close = partial(torch.testing.assert_close, rtol=rounding(dtype), atol=10 * rounding(dtype))
    for completions_per_row in ways:
        logp, entropy = score(model, temperature=0.7, entropy_grad=True, completions_per_row=completions_per_row)
        close(logp.double(), expected_logp.detach())
        close(entropy.double(), expected_entropy.detach())
        assert distance(gradient(model, logp, entropy), expected_grad) < rounding(dtype)
        assert (logp[SCORED] < 0).all() and (logp[~SCORED] == 0).all() and (entropy[~SCORED] == 0).all()


# ---- Every family of models ----


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, monkeypatch: pytest.MonkeyPatch):
    """If a model returns the output of its head unchanged, token_logprobs computes the log-probs inside the head.
    Otherwise, it computes them from the logits of the model. A model of the first kind is tested in both ways."""
    monkeypatch.setitem(logprob.CHUNK, "cpu", 3)
    model = tiny_model(name, spread=2.0 if "tied" in name else 4.0)
    coarsest = torch.float64 if name in ALL_IN_FLOAT64 else torch.float32
    assert reads_together(model, 12) == (name not in NOT_SHARED)
    ways = [None] if name in NOT_SHARED else [None, [2, 3], [1, 1, 3]]
    assert_equals_reference(model, coarsest, ways)
    assert returns_head_output(model, IDS) == (name not in CHANGES_LOGITS)
    if name not in CHANGES_LOGITS:
        monkeypatch.setitem(output_head._returns_logits, model, False)
        assert_equals_reference(model, coarsest, ways)


def test_what_is_read_together_is_read_once():
    model, read = tiny_model("gpt2"), []
    model.transformer.h[0].register_forward_hook(lambda _, args, out: read.append(args[0].shape[:2]))
    for completions_per_row in (None, [2, 3], [1, 1, 3]):
        score(model, completions_per_row=completions_per_row)
    separately, two, three = read[-3:]  # the last three, because the first call also reads a trial input
    # The last token of a row predicts nothing, so the model need not read it. Without it, the rows have 8, 1, 6, 4 and
    # 7 tokens. Rows 0 and 1 share 1 token, so together they have 8 + 1 - 1 = 8. Rows 2 to 4 share 4 tokens, which are
    # read once and not three times, so together they have 6 + 4 + 7 - 2 * 4 = 9.
    assert separately == (5, 8) and two == (2, 9) and three == (3, 9)


@pytest.mark.parametrize("size, together", [(None, True), (12, True), (11, False)])
@pytest.mark.parametrize("name", ["sliding_window", "attention_window_size", "attention_chunk_size"])  # by families
def test_a_window_shorter_than_a_row_is_noticed_even_if_the_trial_input_fits_in_it(name, size, together):
    """`reads_together` tries the model on rows of at most 7 tokens, which a window of 11 does not cut. But it would cut
    rows of 12 tokens, so the model must not read them together."""
    assert reads_together(tiny_model("mistral", **{"sliding_window": None, name: size}), 12) == together


def fp64_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Round the hidden states and the weights to bf16, as autocast does, but return their logits in float64."""
    with torch.autocast("cpu", enabled=False):
        weight, bias = (None if x is None else x.bfloat16().double() for x in (head.weight, head.bias))
        return F.linear(hidden.bfloat16().double(), weight, bias)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_the_gradient_under_bf16_autocast(name: str, monkeypatch: pytest.MonkeyPatch):
    """Under autocast, gradients are rounded to bf16 at many places. These places differ between ours and the reference,
    for instance because the reference reads one row after another. So the results differ by a few roundings."""
    monkeypatch.setitem(logprob.CHUNK, "cpu", 3)
    model = tiny_model(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        logp, entropy = score(model, temperature=0.7, entropy_grad=True)
        # For qwen2, token_logprobs does not round logits, so the reference must not round them either. For gemma2, both
        # use the model's own logits, which are rounded to bf16.
        unrounded_logits = forward_replaced(model.lm_head, partial(fp64_logits, model.lm_head))
        with unrounded_logits if name == "qwen2" else nullcontext():
            expected = reference(model, temperature=0.7)[:2]
    assert returns_head_output(model, IDS) == (name not in CHANGES_LOGITS)
    assert logp.dtype == entropy.dtype == torch.float32
    # Allow one rounding for each of the two layers.
    assert distance(gradient(model, logp, entropy), gradient(model, *expected)) < 2 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("all_in_bf16", [False, True])
def test_log_probs_and_entropies_in_bf16_are_of_unrounded_logits(all_in_bf16: bool, bias: bool):
    model = tiny_model("qwen2", torch.bfloat16 if all_in_bf16 else torch.float32)
    model.lm_head.bias = nn.Parameter(3 * torch.randn(VOCAB).to(model.dtype)) if bias else None
    with torch.autocast("cpu", torch.bfloat16, enabled=not all_in_bf16):
        # Without padding, the hidden states are exactly those of model(input_ids=IDS) below.
        inputs = IDS, torch.ones_like(IDS), COMPLETION
        logp, entropy = (x[SCORED] for x in token_logprobs(model, *inputs, with_entropy=True))
        logits = [model(input_ids=IDS).logits]
        with forward_replaced(model.lm_head, partial(fp64_logits, model.lm_head)):
            token_logprobs(model, *inputs)  # which replaces it once more, for a while
            logits.append(model(input_ids=IDS).logits)
    log_p = torch.stack([x[:, :-1].double() for x in logits]).log_softmax(-1)[:, SCORED[:, 1:]]  # (2, n, V)
    # The log-probs of the scored tokens: first from logits that the model rounded to bf16, then from unrounded ones.
    rounded, expected = (x.gather(1, IDS[SCORED][:, None])[:, 0] for x in log_p)
    # The second condition shows that rounded logits would fail the first one.
    assert (logp - expected).abs().max() < 1e-5 and (rounded - expected).abs().max() > 1e-2
    assert (entropy - torch.special.entr(log_p[1].exp()).sum(-1)).abs().max() < 1e-5 and not entropy.requires_grad


def addmm_of_a_gpu(total: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
    assert a.dtype == b.dtype == torch.bfloat16 and out_dtype == total.dtype == torch.float32
    return out.copy_(total + a.float() @ b.float())


@pytest.mark.parametrize("addmm", [torch.addmm, addmm_of_a_gpu])
@pytest.mark.parametrize("name, dtype", [("weight", torch.float32), ("bias", torch.bfloat16)])
def test_gradients_of_the_heads_chunks_are_summed_in_float32(name: str, dtype: torch.dtype, addmm, monkeypatch):
    """600 chunks have the same gradient. In the case "weight", the weight is in float32, even under autocast, and a
    single rounding of its gradient to bfloat16 would exceed the tolerance. In the case "bias", the bias is in bfloat16,
    and a sum in bfloat16 would stop growing after 256 chunks. A GPU has an addmm that adds to a sum in float32."""
    monkeypatch.setattr(torch, "addmm", addmm)
    output_head._addmm_takes_fp32.cache_clear()
    monkeypatch.setitem(logprob.CHUNK, "cpu", 1)
    model = tiny_model("qwen2", dtype)
    model.lm_head.bias = nn.Parameter(torch.zeros(VOCAB, dtype=dtype)) if name == "bias" else None
    gradients = []
    for rows in (1, 600):
        ids, attention, completion = torch.tensor([[[5, 6, 7]], [[1, 1, 1]], [[0, 0, 1]]]).expand(3, rows, 3)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            logp, _ = token_logprobs(model, ids, attention, completion)
        logp.sum().backward()
        gradients.append(getattr(model.lm_head, name).grad)
    # float32: one rounding for each addition. bfloat16: one for each of the two gradients that are compared.
    roundings = 600 if dtype == torch.float32 else 2
    assert distance(gradients[1], 600 * gradients[0]) < roundings * torch.finfo(dtype).eps
    assert output_head._addmm_takes_fp32(torch.device("cpu")) == (addmm is addmm_of_a_gpu)
    output_head._addmm_takes_fp32.cache_clear()


# ---- Shapes and masks ----


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_nothing_to_score(name: str):
    model = tiny_model(name)
    logp, entropy = token_logprobs(model, IDS, ATTENTION, torch.zeros_like(IDS), entropy_grad=True)
    assert (logp == 0).all() and (entropy == 0).all() and logp.dtype == torch.float64
    assert (gradient(model, logp, entropy) == 0).all()


@pytest.mark.parametrize("row", ["cc..", ".pcc", "p.cc"])
def test_a_row_without_a_prompt_or_with_padding_before_its_end_is_an_error(row: str):
    attention, completion = (torch.tensor([[int(c in letters) for c in row]]) for letters in ("pc", "c"))
    with pytest.raises(ValueError, match="each row"):
        token_logprobs(tiny_model(), IDS[:1, :4], attention, completion)


# ---- Log-probs over sets of ids, and of several ids ----


def random_sets(n: int, V: int, cut: str) -> list:
    """Return what each of n tokens was sampled from: ids, or None for all V."""
    r = np.random.default_rng(0)
    least = 1 if cut == "small" else V // 2
    sets = [r.permutation(V)[: r.integers(least, least + V // 4)] for _ in range(n)]
    return [None if cut == "nothing" or (cut == "mixed" and i % 3 == 1) else ids for i, ids in enumerate(sets)]


@pytest.mark.parametrize("cut, entropy_grad", product(["nothing", "large", "mixed", "small"], [False, True]))
@pytest.mark.parametrize("K", [0, 4, 20])  # small sets have at most 4 ids, and the vocabulary has 17
def test_values_and_gradients_are_those_of_autograd(cut: str, K: int, entropy_grad: bool):
    """Compare with a plain computation in float64. A value of -inf has no gradient: that of an id that its token was
    not sampled from, or of the rest if nothing is left."""
    n, H, V, generator = 23, 5, 17, torch.Generator().manual_seed(4)
    draw = partial(torch.randn, dtype=torch.float64, generator=generator)
    head = [(3 * draw(*shape)).requires_grad_() for shape in ((n, H), (V, H), (V,))]  # states, weight, bias
    sets = random_sets(n, V, cut)
    token = torch.tensor([0 if ids is None else ids[0] for ids in sets])[:, None]
    others = torch.rand(n, V, generator=generator).argsort(1).repeat(1, 2)[:, :K]  # more than V have some twice
    assert K == 0 or (others == token).any(), "a token may be one of the others"
    ids = torch.cat([token, others], 1)
    expected = plain_values(F.linear(*head), sets, ids, 0.7)
    allowed = None if cut == "nothing" else allowed_ids(sets, ids.device)
    scores = TokenScores(ids.int(), allowed, 0.7, True, entropy_grad)
    actual = output_head._InChunks.apply(scores.values, scores.gradient, 5, 0, *head)
    wanted = torch.ones(K + 3, dtype=torch.bool)
    wanted[-2], wanted[-1] = K > 0, entropy_grad
    close = partial(torch.testing.assert_close, rtol=1e-12, atol=1e-12)  # sums of at most a hundred numbers
    close(actual[:, wanted], expected[:, wanted])
    assert (expected[:, 1:] == -torch.inf).any() == (K > V or (K > 0 and cut != "nothing"))
    g = draw(actual.shape).masked_fill(expected == -torch.inf, 0.0) * wanted
    ours, plain = (torch.autograd.grad(x, head, g) for x in (actual, expected))
    for one, other in zip(ours, plain, strict=True):
        close(one, other)


def some_sets() -> list[list]:
    """Return for each position a set of ids that contains the token itself, as a list, an array or a tensor. Some
    positions have None, which stands for all ids."""
    r = np.random.default_rng(0)
    converters = (list, lambda ids: ids.astype(np.int32), torch.as_tensor, lambda ids: None)
    others = [r.permutation(VOCAB)[: r.choice([0, 5, 30, VOCAB])] for _ in range(IDS.numel())]
    sets = iter([np.unique([token, *other_ids]) for token, other_ids in zip(IDS.flatten().tolist(), others)])
    return [[converters[r.integers(4)](next(sets)) for _ in row] for row in IDS]


@pytest.mark.parametrize("returns_logits, with_entropy", product([True, False], repeat=2))
@pytest.mark.parametrize("K", [0, 4])
def test_sets_and_ids_of_a_model(returns_logits: bool, with_entropy: bool, K: int, monkeypatch: pytest.MonkeyPatch):
    """Each token gets its own sets and ids, in any chunk, and also if the model's own logits are used. A value of -inf
    has no gradient, even if one is asked for."""
    monkeypatch.setitem(logprob.CHUNK, "cpu", 10)
    model, kept = tiny_model("gpt2"), some_sets()
    monkeypatch.setitem(output_head._returns_logits, model, returns_logits)
    generator = torch.Generator().manual_seed(3)
    head_ids = torch.rand(*IDS.shape, VOCAB, generator=generator).argsort(-1)[..., :K] if K else None
    expected = reference(model, 0.7, kept, head_ids)
    actual = score(model, temperature=0.7, kept=kept, head_ids=head_ids, with_entropy=with_entropy)
    close = partial(torch.testing.assert_close, rtol=rounding(torch.float64), atol=10 * rounding(torch.float64))
    assert len(actual) == (3 if K else 2) and (actual[1] is not None) == with_entropy
    if with_entropy:
        close(actual[1], expected[1])
        assert not actual[1].requires_grad
    g = torch.randn(*IDS.shape, K + 1, dtype=torch.float64, generator=generator)
    gradients = []
    for logp, _, *of_ids in (actual, expected[: len(actual)]):
        logp = logp + sum((g * x).sum(-1) for x in of_ids)  # may be -inf or NaN, but its gradient is finite
        gradients.append(gradient(model, logp, None))
    for x, y in zip(actual[2:], expected[2:]):
        close(x, y)
        assert (y == -torch.inf).any()
    close(actual[0], expected[0])
    assert distance(*gradients) < rounding(torch.float64)


def test_scores_are_centered_exactly_where_the_head_has_nearly_all_of_the_policy_but_not_of_the_sampler():
    """Then the others are much likelier under the sampler, and 1 minus the sum of the head would be rounded to 0. With
    S = sum of mu f over the head and m = f (1 - M), the gradient of the logits is mu_j f_j - pi_j (S + m) in the head,
    and pi_j (m P / (1 - P) - S) outside, where P and M are the sums of pi and mu over the head."""
    z = torch.tensor([[22.0, 21.0, 1.0, 0.5, -0.5, 0.0]])
    mu, cap = torch.tensor([0.2, 0.3, 0.5]), 1.2  # the last number is for the four others together
    logits = z.clone().requires_grad_()
    scores = TokenScores(torch.tensor([[1, 0, 1]]), None, 1.0, with_entropy=False, entropy_grad=False)
    values = output_head._InChunks.apply(scores.values, scores.gradient, 8, 0, logits, None, None)
    one, sampler = torch.ones(1, 1), mu.log()[None, None]
    switches = dict(objective="cispo", old_policy="sampler", epsilon_high=cap, sampler_logp=sampler[..., 1])
    centering = dict(head_logp=values[None, :, 1:-1], sampler_head_logp=sampler)
    policy_loss(values[:, :1], values[:, :1].detach(), one, one, one, **switches, **centering)[0].backward()

    pi, mu = z[0].double().softmax(-1), mu.double()
    others = pi[2:].sum()
    f = (torch.cat([pi[:2], others[None]]) / mu).clamp(max=cap)
    assert others < 1e-8
    S, m = (mu * f)[:2].sum(), (mu * f)[2]
    expected = torch.cat([(mu * f)[:2] - pi[:2] * (S + m), pi[2:] * (m * (1 - others) / others - S)])
    expected += f[1] * (pi - torch.eye(6, dtype=torch.float64)[1])  # of the token itself: the loss is -f log pi
    # float32 has 7 digits, and these numbers are sums of at most ten others.
    torch.testing.assert_close(logits.grad[0].double(), expected, rtol=1e-5, atol=1e-7)


# ---- Models that somebody has changed, and models that must stay as they were ----


class Scaled(transformers.GPT2LMHeadModel):
    def forward(self, input_ids, use_cache=None):  # it takes no logits_to_keep, and its configuration has no scale
        output = super().forward(input_ids=input_ids, use_cache=use_cache)
        output.logits.mul_(1.5)
        return output


SAME_LOGITS = {  # changes that leave the logits as they are
    "activation checkpointing": lambda model: model.gradient_checkpointing_enable(),
    "frozen head": lambda model: model.get_output_embeddings().requires_grad_(False),
    "frozen body": lambda model: model.requires_grad_(False).get_output_embeddings().requires_grad_(True),
}
SCALED = {  # changes that scale the logits
    "logits scaled in place, by the model's class": lambda model: setattr(model, "__class__", Scaled),
    "logits scaled by the head's own forward": lambda model: setattr(
        model.lm_head, "forward", lambda hidden: 1.5 * F.linear(hidden, model.lm_head.weight)
    ),
    "logits scaled by a hook": lambda model: model.lm_head.register_forward_hook(lambda _, args, out: 1.5 * out),
}


@pytest.mark.parametrize("name, how", [*product(("qwen2", "gemma2"), SAME_LOGITS), *product(("gpt2",), SCALED)])
def test_a_model_that_was_changed(name: str, how: str):
    model = tiny_model(name)
    (SAME_LOGITS | SCALED)[how](model)
    # One of the changes sets `forward` on the head itself, not on its class. Scoring must leave it there. With any
    # other change, this is None, and scoring must leave no `forward` behind.
    forward = vars(model.lm_head).get("forward")
    assert_equals_reference(model, torch.float64 if name in ALL_IN_FLOAT64 else torch.float32)
    assert returns_head_output(model, IDS) == (name == "qwen2"), "any other model must compute its own logits"
    assert vars(model.lm_head).get("forward") is forward and model.training


# ---- Memory ----

LARGE_VOCAB, CHUNK = 40_000, 8
# The head is as large as a chunk of logits, because the hidden size is 8 as well.
CHUNK_BYTES = WEIGHT_BYTES = CHUNK * LARGE_VOCAB * 4


def memory(name: str, entropy_grad: bool, *lengths: int) -> tuple[int, int]:
    """Return the bytes of the largest tensor in a forward and backward pass, and of all tensors at the peak. With so
    large a vocabulary, all but logits and head is small."""
    sizes = dict(vocab_size=LARGE_VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=8)
    model = tiny_model(name, torch.float32, num_attention_heads=1, num_key_value_heads=1, **sizes)
    ids = torch.randint(3, LARGE_VOCAB, (len(lengths), 2 + max(lengths)))
    completion = F.pad((torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long(), (2, 0))
    attention = F.pad(completion[:, 2:], (2, 0), value=1)
    gc.collect()  # free old memory now, because the profiler would count its release without its allocation
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        logp, entropy = token_logprobs(model, ids, attention, completion, temperature=0.7, entropy_grad=entropy_grad)
        (logp.sum() + entropy.sum() if entropy_grad else logp.sum()).backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(changes), max(accumulate(changes))


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_at_most_two_chunks_of_logits_are_in_memory(entropy_grad: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(logprob.CHUNK, "cpu", CHUNK)
    largest, peak = memory("qwen2", entropy_grad, 40, 25, 1, 13)
    expected = 2 * CHUNK_BYTES + WEIGHT_BYTES
    assert largest == CHUNK_BYTES and expected < peak < 1.05 * expected  # everything else is small


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_the_models_own_logits_are_in_memory_for_one_row_at_a_time(entropy_grad: bool):
    (largest, one), (largest_of_three, three) = (memory("gemma2", entropy_grad, *n) for n in ([20], [20] * 3))
    assert largest == largest_of_three == 20 * LARGE_VOCAB * 4
    # With several rows, the gradients of head and embedding (WEIGHT_BYTES each) from earlier rows are in memory while
    # those of the next row are computed.
    assert one < three < 1.02 * (one + 2 * WEIGHT_BYTES)  # everything else is small
