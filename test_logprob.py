"""token_logprobs against full logits: every row run alone, without padding, through the model's own forward."""

import logging
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import logprob
from conftest import EOS, FAMILIES, PAD, VOCAB, distance, flat_gradient, rounding, tiny_model
from logprob import head_returns_logits, token_logprobs

CHANGES_LOGITS = ("gemma2", "granite", "cohere", "falcon_h1")  # after the head: caps or scales them
ALL_IN_FLOAT64 = ("gpt2", "gpt2 tied", "opt")  # a float64 model of any other family computes parts in float32


def make_batch() -> SimpleNamespace:
    rows = ["...pppcccccc", "ppppccc.....", "ppppp.......", "..pc........", "pppp..cccc.."]  # prompt, completion
    attention, completion = (torch.tensor([[int(c in of) for c in row] for row in rows]) for of in ("pc", "c"))
    ids = torch.randint(3, VOCAB, attention.shape, generator=torch.Generator().manual_seed(1))
    ids[attention == 0] = PAD
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
    (g[0] * logp + (0 if entropy is None else g[1] * entropy)).sum().backward()
    return flat_gradient(model)


def assert_equals_reference(model: nn.Module, dtype: torch.dtype = torch.float32, temperature: float = 0.7) -> None:
    """Up to a hundred roundings in this dtype, the coarsest that the model computes in: by how much such a part rounds
    depends on the CPU and on the shape of the batch."""
    logp, entropy = score(model, temperature=temperature, entropy_grad=True)
    grad = gradient(model, logp, entropy)
    expected_logp, expected_entropy = reference(model, temperature=temperature)
    expected_grad = gradient(model, expected_logp, expected_entropy)
    assert expected_logp.min() * temperature < -10 and expected_entropy.max() > 0.01
    close = partial(torch.testing.assert_close, rtol=rounding(dtype), atol=10 * rounding(dtype))
    close(logp.double(), expected_logp)
    close(entropy.double(), expected_entropy)
    assert distance(grad, expected_grad) < rounding(dtype)
    scored = BATCH.completion.bool()
    assert (logp[scored] < 0).all() and (logp[~scored] == 0).all() and (entropy[~scored] == 0).all()


# Every family, both ways


@pytest.mark.parametrize("name", FAMILIES)
def test_family(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprob, "chunk_tokens", lambda on_gpu: 3)
    model = tiny_model(name, spread=2.0 if "tied" in name else 4.0)
    coarsest = torch.float64 if name in ALL_IN_FLOAT64 else torch.float32
    assert_equals_reference(model, coarsest)
    assert head_returns_logits(model, BATCH.ids) == (name not in CHANGES_LOGITS)
    monkeypatch.setitem(logprob._returns_logits, model, False)
    assert_equals_reference(model, coarsest)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "gpt2"])
def test_float32(name: str):
    assert_equals_reference(tiny_model(name, torch.float32))


@pytest.mark.parametrize("head_bias", [False, True])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("chunk", [1, 1000])
def test_chunks_and_temperatures(chunk, temperature, head_bias, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprob, "chunk_tokens", lambda on_gpu: chunk)
    model = tiny_model("gpt2")
    if head_bias:
        model.lm_head.bias = nn.Parameter(3 * torch.randn(VOCAB, dtype=torch.float64))
    assert_equals_reference(model, torch.float64, temperature)
    assert head_returns_logits(model, BATCH.ids)


def only_the_head_trains(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.get_output_embeddings().requires_grad_(True)


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "qwen3_moe", "gpt2"])
@pytest.mark.parametrize(
    "prepare",
    [
        lambda model: model.gradient_checkpointing_enable(),
        lambda model: model.get_output_embeddings().requires_grad_(False),
        only_the_head_trains,
    ],
    ids=["gradient checkpointing", "frozen head", "frozen body"],
)
def test_a_model_as_it_may_be_trained(name: str, prepare: Callable):
    model = tiny_model(name)
    prepare(model)
    assert_equals_reference(model)
    assert model.training


def by_hand(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Logits of the padded batch -> (B, T), by shifting; for a batch without left padding."""
    log_p = torch.log_softmax(logits[:, :-1].float() / temperature, -1)
    logp = F.pad(log_p.gather(2, BATCH.ids[:, 1:, None]).squeeze(2), (1, 0))
    return logp, F.pad(-(log_p.exp() * log_p).sum(-1), (1, 0))


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_bf16_autocast(name: str, monkeypatch: pytest.MonkeyPatch):
    """Each logit is rounded to bfloat16, here or there differently, and so is each state's gradient."""
    monkeypatch.setattr(logprob, "chunk_tokens", lambda on_gpu: 3)
    model = tiny_model(name, torch.float32)
    batch = SimpleNamespace(ids=BATCH.ids, attention=torch.ones_like(BATCH.ids), completion=BATCH.completion)
    with torch.autocast("cpu", torch.bfloat16):
        logp, entropy = score(model, batch, temperature=0.7, entropy_grad=True)
        logits = model(input_ids=batch.ids).logits
        expected_logp, expected_entropy = by_hand(logits, 0.7)
    assert head_returns_logits(model, batch.ids) == (name not in CHANGES_LOGITS)
    assert logp.dtype == entropy.dtype == torch.float32

    scored, eps = batch.completion.bool(), torch.finfo(torch.bfloat16).eps
    of_a_logit = eps * float(logits.abs().max()) / 0.7
    assert (logp - expected_logp)[scored].abs().max() < of_a_logit
    assert (entropy - expected_entropy)[scored].abs().max() < of_a_logit
    grad = gradient(model, logp, entropy)
    assert distance(grad, gradient(model, expected_logp * scored, expected_entropy * scored)) < eps


def test_entropy_under_autocast_is_summed_in_float32():
    model = tiny_model("qwen2", torch.float32, spread=0.1, vocab_size=4000)
    with torch.autocast("cpu", torch.bfloat16):
        _, entropy = score(model, with_entropy=True)
        _, expected = by_hand(model(input_ids=BATCH.ids).logits, 1.0)
    scored = BATCH.completion.bool() & BATCH.attention.cummin(1).values.bool()  # the rows without left padding
    assert scored.any() and expected[scored].max() > 7
    tolerance = rounding(torch.float32)  # far below a rounding in bfloat16, of 8e-3
    torch.testing.assert_close(entropy[scored], expected[scored], rtol=tolerance, atol=0)


def test_the_heads_gradient_under_autocast_stays_in_float32_once_a_chunk_is_made(monkeypatch: pytest.MonkeyPatch):
    """600 chunks of the same gradient: a sum in bfloat16 no longer grows after 256 of them, and one that is rounded in
    the end is off by up to 0.004."""
    model = tiny_model("qwen2", torch.float32)
    ids = torch.tensor([[5, 6, 7]])
    gradients = []
    for rows in (1, 600):
        monkeypatch.setattr(logprob, "chunk_tokens", lambda on_gpu: 1)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            logp, _ = token_logprobs(
                model, ids.expand(rows, 3), torch.ones(rows, 3), torch.tensor([[0, 0, 1]]).expand(rows, 3)
            )
        logp.sum().backward()
        gradients.append(model.lm_head.weight.grad)
    assert distance(gradients[1], 600 * gradients[0]) < 600 * torch.finfo(torch.float32).eps  # one for each sum


# Shapes and masks


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
@pytest.mark.parametrize("attended", [0, 1])
def test_nothing_to_score(name: str, attended: int):
    model = tiny_model(name)
    nothing = torch.zeros_like(BATCH.ids)
    logp, entropy = token_logprobs(model, BATCH.ids, nothing + attended, nothing, entropy_grad=True)
    assert (logp == 0).all() and (entropy == 0).all() and logp.dtype == torch.float64
    assert (gradient(model, logp, entropy) == 0).all()


@pytest.mark.parametrize("left_padding", [0, 2])
def test_completion_without_a_prompt_is_an_error(left_padding: int):
    attention = torch.ones_like(BATCH.ids)
    attention[:, :left_padding] = 0
    with pytest.raises(ValueError, match="first token"):
        token_logprobs(tiny_model(), BATCH.ids, attention, attention)


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_entropy_only_when_asked_for(name: str):
    model = tiny_model(name)
    plain, none = score(model)
    logp, detached = score(model, with_entropy=True)
    _, entropy = score(model, entropy_grad=True)
    assert none is None and logp.requires_grad and not detached.requires_grad and entropy.requires_grad
    assert torch.equal(detached, entropy) and torch.equal(plain, logp)
    assert torch.equal(gradient(model, plain, None), gradient(model, logp, None))


# Which way, and that the model stays as it was


def of_class(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    class Changes(transformers.GPT2LMHeadModel):
        def forward(self, input_ids, use_cache=None):  # no logits_to_keep; the configuration says nothing of it
            output = super().forward(input_ids=input_ids, use_cache=use_cache)
            output.logits = change(output.logits)
            return output

    return lambda model: setattr(model, "__class__", Changes)


def own_forward(model: nn.Module) -> None:
    model.lm_head.forward = lambda hidden: 1.5 * F.linear(hidden, model.lm_head.weight)


CHANGES = {
    "scaled": of_class(lambda logits: 1.5 * logits),
    "scaled in place": of_class(lambda logits: logits.mul_(1.5)),
    "a token less": of_class(lambda logits: logits[..., : VOCAB - 1]),
    "by the head's own forward": own_forward,
    "by a hook of the head": lambda model: model.lm_head.register_forward_hook(lambda _, args, out: 1.5 * out),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_logits_are_noticed(name: str):
    model = tiny_model("gpt2")
    CHANGES[name](model)
    forward = vars(model.lm_head).get("forward")
    assert_equals_reference(model, torch.float64)
    assert not head_returns_logits(model, BATCH.ids) and vars(model.lm_head).get("forward") is forward


def test_a_cap_is_noticed_where_the_head_is_still_zero():
    model = tiny_model("gemma2")
    weight = model.lm_head.weight.detach().clone()
    nn.init.zeros_(model.lm_head.weight)
    score(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(weight)
    assert_equals_reference(model)


def test_the_slower_way_is_logged_once(caplog: pytest.LogCaptureFixture):
    model = tiny_model("gemma2")
    with caplog.at_level(logging.WARNING, logger="logprob"):
        score(tiny_model("qwen2"))
        assert not caplog.records
        score(model)
        score(model)
    assert len(caplog.records) == 1
    assert "Gemma2ForCausalLM" in caplog.text and "slower" in caplog.text


@pytest.mark.parametrize("name", ["qwen2", "gemma2"])
def test_model_is_left_unchanged(name: str):
    model = tiny_model(name)
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
    model = tiny_model()
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


LARGE_VOCAB, CHUNK, LENGTHS = 40_000, 8, (40, 25, 1, 13)
CHUNK_BYTES = WEIGHT_BYTES = CHUNK * LARGE_VOCAB * 4  # a chunk's logits; the head's weight, hidden size 8
ALL_BYTES = sum(LENGTHS) * LARGE_VOCAB * 4


def memory(name: str, run: Callable[..., Tensor], lengths: tuple[int, ...] = LENGTHS) -> Memory:
    """Of run(model, ids, attention, completion mask).backward(), where the vocabulary outweighs all else."""
    sizes = dict(vocab_size=LARGE_VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=8)
    model = tiny_model(name, torch.float32, num_attention_heads=1, num_key_value_heads=1, **sizes)
    ids = torch.randint(3, LARGE_VOCAB, (len(lengths), 2 + max(lengths)))
    completion = F.pad((torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long(), (2, 0))
    attention = F.pad(completion[:, 2:], (2, 0), value=1)
    with Memory(model) as used:
        run(model, ids, attention, completion).backward()
    return used


def summed(*batch: object, entropy_grad: bool) -> Tensor:
    logp, entropy = token_logprobs(*batch, temperature=0.7, entropy_grad=entropy_grad)
    return logp.sum() + entropy.sum() if entropy_grad else logp.sum()


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_two_chunks_of_logits_are_held_at_most(entropy_grad: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logprob, "chunk_tokens", lambda on_gpu: CHUNK)
    used = memory("qwen2", partial(summed, entropy_grad=entropy_grad))
    assert used.largest == CHUNK_BYTES
    assert used.peak < 1.05 * (2 * CHUNK_BYTES + WEIGHT_BYTES) < 0.4 * ALL_BYTES  # all else is small, but there


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_the_slower_way_holds_one_rows_logits(entropy_grad: bool):
    run = partial(summed, entropy_grad=entropy_grad)
    one, three = (memory("gemma2", run, lengths) for lengths in ((20,), (20, 20, 20)))
    assert one.largest == three.largest == 20 * LARGE_VOCAB * 4
    # Two more: gradients of the head and of the embedding, to which the next row's are added.
    assert three.peak < 1.02 * (one.peak + 2 * WEIGHT_BYTES)  # all else is small, but there


def test_full_logits_are_seen_by_the_measurement():
    def run(model: nn.Module, ids: Tensor, *masks: Tensor) -> Tensor:
        log_p = model(input_ids=ids).logits[:, :-1].log_softmax(-1)
        return log_p.gather(2, ids[:, 1:, None]).sum()

    used = memory("qwen2", run)
    assert used.largest > ALL_BYTES and used.peak > 2 * ALL_BYTES
