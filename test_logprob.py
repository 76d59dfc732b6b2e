"""token_logprobs against full logits: every row run alone, without padding, through the model's own forward."""

import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import logprob
from logprob import head_returns_logits, token_logprobs

EOS = PAD = 2  # one id for both, and it appears inside completions too
VOCAB = 61
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS,
)  # fmt: skip
GPT = dict(
    vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64,
    pad_token_id=PAD, bos_token_id=1, eos_token_id=EOS, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
)  # fmt: skip
BLOOM = dict(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, tie_word_embeddings=False)
MPT = dict(vocab_size=VOCAB, d_model=32, n_layers=2, n_heads=4, max_seq_len=64, tie_word_embeddings=False)
EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
HYBRID = dict(mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=8)

# name: model type, settings, how much to widen the head, whether it may score inside the head
FAMILIES = {
    "qwen2": ("qwen2", SIZES, 20, True),
    "qwen2 tied": ("qwen2", SIZES | {"tie_word_embeddings": True}, 7, True),
    "qwen3": ("qwen3", SIZES, 20, True),
    "llama": ("llama", SIZES, 20, True),
    "llama tied": ("llama", SIZES | {"tie_word_embeddings": True}, 7, True),
    "mistral": ("mistral", SIZES | {"sliding_window": 4}, 20, True),
    "gemma": ("gemma", SIZES, 7, True),
    "gemma2": ("gemma2", SIZES | {"final_logit_softcapping": 20.0}, 20, False),
    "gemma3": ("gemma3_text", SIZES | {"sliding_window": 4}, 7, True),
    "granite": ("granite", SIZES | {"logits_scaling": 8.0}, 160, False),
    "granite unscaled": ("granite", SIZES, 20, True),
    "cohere": ("cohere", SIZES, 200, False),
    "gpt2": ("gpt2", GPT, 7, True),
    "gpt2 untied": ("gpt2", GPT | {"tie_word_embeddings": False}, 20, True),
    "gptj": ("gptj", GPT | {"rotary_dim": 4}, 20, True),
    "mixtral": ("mixtral", SIZES | EXPERTS, 20, True),
    "qwen3_moe": ("qwen3_moe", SIZES | EXPERTS, 20, True),
    "gpt_oss": ("gpt_oss", SIZES | EXPERTS | {"sliding_window": 4}, 20, True),
    "phi": ("phi", SIZES, 20, True),
    "opt": ("opt", SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, 7, True),
    "bloom": ("bloom", BLOOM, 20, True),
    "mpt": ("mpt", MPT, 20, True),
    "mamba": ("mamba", SIZES | {"state_size": 4}, 5, True),
    "falcon_h1": ("falcon_h1", SIZES | HYBRID | {"lm_head_multiplier": 0.5}, 40, False),
}

# In a float64 model these families compute parts in float32, where rounding depends on the shape of the batch.
TOLERANCE = {"gemma": 1e-6, "gemma3": 1e-6, "gptj": 1e-6, "mpt": 1e-6, "mamba": 1e-4}


def build(name: str = "qwen2", dtype: torch.dtype = torch.float64, head_bias: bool = False, **settings) -> nn.Module:
    """Random weights, wide logits, no dropout; in train mode, as in an update."""
    kind, sizes, widen, _ = FAMILIES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    head = model.get_output_embeddings()
    if head_bias:
        head.bias = nn.Parameter(3 * torch.randn(VOCAB))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() > 1 else 1).add_(torch.randn_like(parameter), alpha=0.02)
        head.weight.mul_(widen)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(dtype).train()


def make_batch() -> SimpleNamespace:
    """Prompts padded left, right and not at all; completions of 6, 3, 0, 1 and 4 tokens, some ending in EOS."""
    rows = [  # padding, prompt, padding, completion; what is left of the width is padding
        (3, 3, 0, 6),
        (0, 4, 0, 3),
        (0, 5, 0, 0),
        (2, 1, 0, 1),
        (0, 4, 2, 4),
    ]
    generator = torch.Generator().manual_seed(1)
    ids = torch.full((len(rows), 12), PAD)
    attention, completion = torch.zeros_like(ids), torch.zeros_like(ids)
    for b, (left, prompt, gap, length) in enumerate(rows):
        for start, n, mask in (left, prompt, None), (left + prompt + gap, length, completion):
            ids[b, start : start + n] = torch.randint(3, VOCAB, (n,), generator=generator)
            attention[b, start : start + n] = 1
            if mask is not None:
                mask[b, start : start + n] = 1
    ids[0, [4, 8, 11]] = EOS  # in the prompt, in the middle of the completion and at its end
    ids[1, 6] = EOS
    return SimpleNamespace(ids=ids, attention=attention, completion=completion)


BATCH = make_batch()


def score(model: nn.Module, batch: SimpleNamespace = BATCH, **settings) -> tuple[Tensor, Tensor | None]:
    return token_logprobs(model, batch.ids, batch.attention, batch.completion, **settings)


def reference(model: nn.Module, batch: SimpleNamespace = BATCH, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    logp = torch.zeros(batch.ids.shape, dtype=torch.float64)
    entropy = torch.zeros_like(logp)
    for b in range(len(batch.ids)):
        at = [t for t in range(batch.ids.shape[1]) if batch.attention[b, t]]
        logits = model(input_ids=batch.ids[b : b + 1, at]).logits[0]
        for i, t in enumerate(at):
            if batch.completion[b, t]:
                log_p = torch.log_softmax(logits[i - 1].double() / temperature, 0)
                logp[b, t] = log_p[batch.ids[b, t]]
                entropy[b, t] = -(log_p.exp() * log_p).sum()
    return logp, entropy


def gradient(model: nn.Module, logp: Tensor, entropy: Tensor | None) -> Tensor:
    """Of a random linear functional of both, with respect to all parameters, as one vector."""
    g = torch.randn(2, *logp.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    model.zero_grad(set_to_none=True)
    value = (g[0] * logp).sum() if entropy is None else (g[0] * logp).sum() + (g[1] * entropy).sum()
    value.backward()
    flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([x.flatten().double() for x in flat])


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def assert_equals_reference(
    model: nn.Module, tolerance: float = 1e-9, temperature: float = 0.7, batch: SimpleNamespace = BATCH, **settings
) -> None:
    logp, entropy = score(model, batch, temperature=temperature, entropy_grad=True, **settings)
    grad = gradient(model, logp, entropy)
    expected_logp, expected_entropy = reference(model, batch, temperature)
    expected_grad = gradient(model, expected_logp, expected_entropy)
    assert expected_logp.min() * temperature < -14 and expected_entropy.max() > 0.01
    torch.testing.assert_close(logp.double(), expected_logp, rtol=tolerance, atol=10 * tolerance)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=tolerance, atol=10 * tolerance)
    assert relative(grad, expected_grad) < tolerance


def go_through_logits(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> None:
    monkeypatch.setitem(logprob._returns_logits, model, False)


# Every family, both ways


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, monkeypatch: pytest.MonkeyPatch):
    model, tolerance = build(name), TOLERANCE.get(name, 1e-9)
    assert_equals_reference(model, tolerance, chunk_tokens=3)
    assert head_returns_logits(model, BATCH.ids) == FAMILIES[name][3]
    go_through_logits(monkeypatch, model)
    assert_equals_reference(model, tolerance)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_float32(name: str):
    assert_equals_reference(build(name, torch.float32), 2e-5)


def test_the_cap_bites():
    logits = build("gemma2")(input_ids=BATCH.ids[:1]).logits
    assert 19 < logits.abs().max() < 20


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 1000])
def test_chunks_and_temperatures(chunk_tokens: int, temperature: float, head_bias: bool):
    model = build(head_bias=head_bias)
    assert_equals_reference(model, 1e-9, temperature, chunk_tokens=chunk_tokens)
    assert head_returns_logits(model, BATCH.ids)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "qwen3_moe", "gpt2"])
def test_gradient_checkpointing(name: str):
    model = build(name)
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing and model.training
    assert_equals_reference(model)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_frozen_head(name: str):
    model = build(name, tie_word_embeddings=False)
    model.get_output_embeddings().requires_grad_(False)
    assert_equals_reference(model)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_frozen_body(name: str):
    model = build(name, tie_word_embeddings=False).requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)
    assert_equals_reference(model)


def by_hand(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits of the padded batch -> (B, T), by shifting; for a batch without left padding."""
    log_p = torch.log_softmax(logits[:, :-1].float() / temperature, -1)
    logp = F.pad(log_p.gather(2, BATCH.ids[:, 1:, None]).squeeze(2), (1, 0))
    return logp, F.pad(-(log_p.exp() * log_p).sum(-1), (1, 0))


@pytest.mark.parametrize("name, gradient_off", [("qwen2", 3e-3), ("gemma2", 1e-2)])
def test_bf16_autocast(name: str, gradient_off: float):
    model = build(name, torch.float32)
    batch = SimpleNamespace(ids=BATCH.ids, attention=torch.ones_like(BATCH.ids), completion=BATCH.completion)
    with torch.autocast("cpu", torch.bfloat16):
        logp, entropy = score(model, batch, temperature=0.7, entropy_grad=True, chunk_tokens=3)
        expected_logp, expected_entropy = by_hand(model(input_ids=batch.ids).logits, 0.7)
    assert head_returns_logits(model, batch.ids) == FAMILIES[name][3]
    assert logp.dtype == entropy.dtype == torch.float32

    scored = batch.completion.bool()
    off = (logp - expected_logp)[scored].abs()
    assert off.median() < 0.01 and off.max() < 0.5
    assert (entropy - expected_entropy)[scored].abs().max() < 0.1
    shifted = (expected_logp.roll(1, 1) - expected_logp)[scored].abs()
    at_one = (by_hand(model(input_ids=batch.ids).logits, 1.0)[0] - expected_logp)[scored].abs()
    assert shifted.median() > 1 and at_one.median() > 1  # what the two usual mistakes would come to

    grad = gradient(model, logp, entropy)
    assert relative(grad, gradient(model, expected_logp * scored, expected_entropy * scored)) < gradient_off


def test_entropy_under_autocast_is_summed_in_float32():
    model = build("qwen2", torch.float32, vocab_size=4000)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.02)
    with torch.autocast("cpu", torch.bfloat16):
        _, entropy = score(model, with_entropy=True)
        _, expected = by_hand(model(input_ids=BATCH.ids).logits, 1.0)
    scored = BATCH.completion.bool() & BATCH.attention.cummin(1).values.bool()  # the rows without left padding
    assert scored.any() and expected[scored].max() > 7
    torch.testing.assert_close(entropy[scored], expected[scored], rtol=1e-4, atol=0)


# Shapes and masks


def test_zero_where_not_scored():
    logp, entropy = score(build(), with_entropy=True)
    unscored = ~BATCH.completion.bool()
    assert logp.shape == entropy.shape == BATCH.ids.shape
    assert (logp[unscored] == 0).all() and (entropy[unscored] == 0).all()
    assert (logp[~unscored] < 0).all()


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_eos_is_scored_like_any_token_though_it_is_the_pad_id(name: str):
    logp, _ = score(build(name))
    at_eos = BATCH.completion.bool() & (BATCH.ids == EOS)
    assert at_eos.sum() == 3 and (logp[at_eos] < 0).all()


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_padding_does_not_matter(name: str):
    model = build(name)
    wide = SimpleNamespace(
        ids=F.pad(BATCH.ids, (5, 4), value=7), attention=F.pad(BATCH.attention, (5, 4)),
        completion=F.pad(BATCH.completion, (5, 4)),
    )  # fmt: skip
    torch.testing.assert_close(score(model, wide)[0][:, 5:-4], score(model)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
@pytest.mark.parametrize("attended", [0, 1])
def test_nothing_to_score(name: str, attended: int):
    model = build(name)
    nothing = torch.zeros_like(BATCH.ids)
    logp, entropy = token_logprobs(model, BATCH.ids, nothing + attended, nothing, entropy_grad=True)
    assert (logp == 0).all() and (entropy == 0).all() and logp.dtype == torch.float64
    assert (gradient(model, logp, entropy) == 0).all()


@pytest.mark.parametrize("left_padding", [0, 2])
def test_completion_without_a_prompt_is_an_error(left_padding: int):
    attention = torch.ones_like(BATCH.ids)
    attention[:, :left_padding] = 0
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(build(), BATCH.ids, attention, attention)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_entropy_only_when_asked_for(name: str):
    model = build(name)
    plain, none = score(model)
    logp, detached = score(model, with_entropy=True)
    _, entropy = score(model, entropy_grad=True)
    assert none is None and logp.requires_grad and not detached.requires_grad and entropy.requires_grad
    assert torch.equal(detached, entropy) and torch.equal(plain, logp)
    assert torch.equal(gradient(model, plain, None), gradient(model, logp, None))


# Which way, and that the model stays as it was


class ScalesLogits(transformers.Qwen2ForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output


class ScalesLogitsInPlace(transformers.Qwen2ForCausalLM):
    def forward(self, input_ids, use_cache=None):  # no logits_to_keep either
        output = super().forward(input_ids=input_ids, use_cache=use_cache)
        output.logits *= 1.5
        return output


class DropsTokens(transformers.Qwen2ForCausalLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits[..., : VOCAB - 1]
        return output


@pytest.mark.parametrize("changed", [ScalesLogits, ScalesLogitsInPlace, DropsTokens])
def test_changed_logits_are_noticed(changed: type):
    model = build()
    model.__class__ = changed  # the configuration says nothing of it
    assert_equals_reference(model)
    assert not head_returns_logits(model, BATCH.ids)


def test_a_head_with_its_own_forward_keeps_it():
    model = build()
    head = model.lm_head
    head.forward = forward = lambda hidden: 1.5 * F.linear(hidden, head.weight)
    assert_equals_reference(model)
    assert not head_returns_logits(model, BATCH.ids) and head.forward is forward


def test_a_forward_hook_that_changes_the_heads_output_is_noticed():
    model = build()
    model.lm_head.register_forward_hook(lambda module, args, output: 1.5 * output)
    assert_equals_reference(model)
    assert not head_returns_logits(model, BATCH.ids)


def test_a_cap_is_noticed_where_the_head_is_still_zero():
    model = build("gemma2", tie_word_embeddings=False)
    weight = model.lm_head.weight.detach().clone()
    nn.init.zeros_(model.lm_head.weight)
    score(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
    assert_equals_reference(model)


def test_the_slower_way_is_logged_once(caplog: pytest.LogCaptureFixture):
    model = build("gemma2")
    with caplog.at_level(logging.WARNING, logger="logprob"):
        score(build("qwen2"))
        assert not caplog.records
        score(model)
        score(model)
    assert len(caplog.records) == 1
    assert "Gemma2ForCausalLM" in caplog.text and "slower" in caplog.text


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_model_is_left_unchanged(name: str):
    model = build(name)
    head = model.get_output_embeddings()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    before = model(input_ids=BATCH.ids).logits
    score(model, entropy_grad=True)[0].sum().backward()
    assert "forward" not in vars(head) and model.training and torch.equal(random_state, torch.get_rng_state())
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(input_ids=BATCH.ids).logits, before)


@pytest.mark.parametrize("already_tried", [False, True])
def test_model_is_left_unchanged_by_an_exception(already_tried: bool):
    model = build()
    if already_tried:
        score(model)

    def fail(*args):
        raise RuntimeError("from inside the model")

    hook = model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="inside"):
        score(model)
    hook.remove()
    assert "forward" not in vars(model.lm_head)
    assert_equals_reference(model)


# Memory


class Memory(TorchDispatchMode):
    """Bytes of the largest storage made while it is on, and of all that lived at the same time, less the model's."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self.known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self.add(tensor.untyped_storage())
        return output

    def add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.alive += size
            self.peak, self.largest = max(self.peak, self.alive), max(self.largest, size)
            weakref.finalize(storage, self.remove, key, size)

    def remove(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.alive -= size


LARGE_VOCAB, CHUNK, LENGTHS = 151_936, 8, (40, 25, 1, 13)


def memory(name: str, run: Callable[..., Tensor], lengths: tuple[int, ...] = LENGTHS) -> Memory:
    """Of run(model, ids, completion mask).backward() at a large vocabulary, ragged completions, hidden size 8."""
    sizes = dict(vocab_size=LARGE_VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=8)
    heads = dict(num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=False)
    model = build(name, torch.float32, **sizes, **heads)
    ids = torch.randint(3, LARGE_VOCAB, (len(lengths), 2 + max(lengths)))
    completion = torch.zeros_like(ids)
    for row, length in zip(completion, lengths):
        row[2 : 2 + length] = 1
    with Memory(model) as used:
        run(model, ids, completion).backward()
    return used


def value(with_entropy: bool) -> Callable[..., Tensor]:
    def run(model: nn.Module, ids: Tensor, completion: Tensor) -> Tensor:
        attention = F.pad(completion[:, 2:], (2, 0), value=1)
        logp, entropy = token_logprobs(
            model, ids, attention, completion, temperature=0.7, chunk_tokens=CHUNK, entropy_grad=with_entropy
        )
        return logp.sum() + entropy.sum() if with_entropy else logp.sum()

    return run


CHUNK_BYTES = WEIGHT_BYTES = CHUNK * LARGE_VOCAB * 4  # a chunk's logits; the head's weight, hidden size 8
ALL_BYTES = sum(LENGTHS) * LARGE_VOCAB * 4


@pytest.mark.parametrize("with_entropy", [False, True])
def test_ragged_completions_with_a_150k_vocabulary_in_bounded_memory(with_entropy: bool):
    used = memory("qwen2", value(with_entropy))
    assert used.largest == CHUNK_BYTES
    assert used.peak < 1.05 * (2 * CHUNK_BYTES + WEIGHT_BYTES) < 0.4 * ALL_BYTES


@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_slower_way_holds_one_rows_logits(with_entropy: bool):
    one, three = (memory("gemma2", value(with_entropy), lengths) for lengths in ((20,), (20, 20, 20)))
    assert one.largest == three.largest == 20 * LARGE_VOCAB * 4
    # Two more: gradients of the head and of the embedding, to which the next row's are added.
    assert three.peak < 1.02 * (one.peak + 2 * WEIGHT_BYTES)


def test_full_logits_are_seen_by_the_measurement():
    def run(model: nn.Module, ids: Tensor, completion: Tensor) -> Tensor:
        log_p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return log_p.gather(2, ids[:, 1:, None]).sum()

    used = memory("qwen2", run)
    assert used.largest > ALL_BYTES and used.peak > 2 * ALL_BYTES
