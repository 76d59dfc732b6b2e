"""Rollouts: what is sampled depends on the prompt and its stream alone, and is what is scored afterwards."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from config import UserError
from conftest import VOCAB, rounding, tiny_model
from logprob import token_logprobs
from rollout import Completion, Sampling, rollout, sample, uniforms

KINDS = ["qwen2", "gemma2", "gpt2", "bloom", "qwen3_moe", "mamba"]
DISTINCT = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 20], [3]]
PROMPTS = [DISTINCT[i] for i in (0, 0, 0, 1, 1, 2)]  # one for each completion
SAMPLES = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
SAMPLING = Sampling(12, eos_ids=[2, 4, 8, 11, 22, 33, 44, 55], temperature=0.9)

build = partial(tiny_model, dtype=torch.float32, spread=2.0)  # far from uniform, far from certain
OF_FLOAT32 = rounding(torch.float32)  # relative; log-probs and entropies are of the size of 1 to 10
close = partial(torch.testing.assert_close, rtol=OF_FLOAT32, atol=OF_FLOAT32)


def streams(samples=SAMPLES):
    return uniforms(0, 3, samples, 12)


def ids_of(completions: list[Completion]) -> list[list[int]]:
    return [completion.ids for completion in completions]


@torch.no_grad()
def training_logp(model, prompt: list[int], completion: list[int], temperature: float) -> torch.Tensor:
    ids = torch.tensor([prompt + completion])
    mask = torch.tensor([[0] * len(prompt) + [1] * len(completion)])
    return token_logprobs(model, ids, torch.ones_like(ids), mask, temperature=temperature)[0][0, len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_completion_depends_on_its_prompt_and_stream_alone(kind):
    model = build(kind)
    together = rollout(model, PROMPTS, streams(), SAMPLING)
    assert len({len(c.ids) for c in together}) > 1
    order = [4, 0, 5, 2]
    apart = rollout(model, [PROMPTS[i] for i in order], streams()[order], SAMPLING)
    for i, completion in zip(order, apart, strict=True):
        assert completion.ids == together[i].ids and completion.truncated == together[i].truncated
        alone = rollout(model, [PROMPTS[i]], streams([SAMPLES[i]]), SAMPLING)
        assert alone[0].ids == together[i].ids
    assert together[0].ids != together[1].ids, "samples of one prompt must differ"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_the_sampled_distribution_is_the_scored_one(kind, temperature):
    model = build(kind)
    completions = rollout(model, PROMPTS, streams(), Sampling(12, [2, 4, 8], temperature))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = training_logp(model, prompt, completion.ids, temperature)
        close(torch.tensor(completion.logp), expected)


@torch.no_grad()
def test_every_token_is_the_one_its_number_picks():
    """Against a loop without cache, without padding: the first token whose cumulative probability exceeds u."""
    model, u = build(), streams()
    for i, completion in enumerate(rollout(model, PROMPTS, u, SAMPLING)):
        ids = list(PROMPTS[i])
        for t, token in enumerate(completion.ids):
            p = (model(torch.tensor([ids])).logits[0, -1] / 0.9).softmax(-1).double()
            assert token == int((p.cumsum(0) <= u[i, t] * p.sum()).sum())
            ids.append(token)
        assert completion.truncated == (ids[-1] not in SAMPLING.eos_ids)
        assert not any(token in SAMPLING.eos_ids for token in completion.ids[:-1])
        assert len(completion.ids) == 12 or not completion.truncated


@pytest.mark.parametrize("budget, rows", [(1, 1), (38, 2), (80, 4), (10**6, 6)])
def test_no_more_rows_at_once_than_the_budget_of_cache_tokens_holds(budget, rows):
    """The longest prompt and the longest completion are 7 and 12 tokens: each row may come to hold 19."""
    model, seen = build(), []
    whole = rollout(model, PROMPTS, streams(), SAMPLING)
    sampling = replace(SAMPLING, tokens_at_once=budget)
    pieces = rollout(model, PROMPTS, streams(), sampling, progress=lambda t, live: seen.append((t, live)))
    assert pieces == [Completion(c.ids, pytest.approx(c.logp, rel=OF_FLOAT32), c.truncated) for c in whole]
    assert max(live for _, live in seen) <= rows
    assert sum(t == 1 for t, _ in seen) == -(-len(PROMPTS) // rows)


def test_greedy_is_the_librarys_own():
    model = build().eval()
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
    completions = rollout(model, DISTINCT, None, Sampling(12, [2], temperature=0.0))
    for prompt, completion in zip(DISTINCT, completions, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), generation_config=config
        )
        assert prompt + completion.ids == expected[0].tolist()


def test_frequencies_follow_the_distribution():
    logits = torch.randn(5, generator=torch.Generator().manual_seed(0)).repeat(20000, 1)
    u = torch.as_tensor(np.random.default_rng(0).random(20000))
    token, logp = sample(logits, u, Sampling(1, [0], temperature=0.5))
    expected = (logits[0] / 0.5).softmax(-1)
    sampling_error = 3 * 0.5 / 20000**0.5  # three standard deviations, the widest of which is that of p = 0.5
    close(torch.bincount(token, minlength=5) / 20000, expected, atol=sampling_error, rtol=0)
    close(logp, expected.log()[token])


@pytest.mark.parametrize("u", [0.0, 1.0 - 2**-53, 1.0])
def test_a_token_of_probability_zero_is_never_picked(u):
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2:4] = 1.0
    token, _ = sample(logits, torch.tensor([u], dtype=torch.float64), Sampling(1, [0]))
    assert int(token) == (2 if u == 0.0 else 3)


def test_top_k_and_top_p():
    logits = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]]).log().repeat(1000, 1)
    u = torch.linspace(0, 1, 1001)[:-1].double()

    cases = {(0, 1.0): {0, 1, 2, 3, 4}, (2, 1.0): {1, 3}, (0, 0.69): {1, 3}, (0, 0.71): {1, 3, 4}, (0, 0.01): {1}}
    cases[2, 0.55] = {1}  # 0.4 of the 0.7 that top_k has left
    for (top_k, top_p), expected in cases.items():
        assert set(sample(logits, u, Sampling(1, [0], top_k=top_k, top_p=top_p))[0].tolist()) == expected
    token, logp = sample(logits, u, Sampling(1, [0], top_k=2))
    close(logp, logits[0][token])  # of the whole distribution
    assert token.bincount().tolist() == [0, 572, 0, 428], "in proportion 4 to 3"


def test_logits_in_bfloat16_are_sampled_from_in_float32():
    logits = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    u = torch.as_tensor(np.random.default_rng(0).random(100))
    given, exact = (sample(x, u, Sampling(1, [0])) for x in (logits, logits.float()))
    assert torch.equal(given[0], exact[0]) and torch.equal(given[1], exact[1])


def test_every_end_token_ends_and_is_part_of_the_completion():
    model, last = build(), VOCAB - 1
    long = rollout(model, PROMPTS, streams(), replace(SAMPLING, eos_ids=[last]))
    for stop in long[0].ids[:4]:
        short = rollout(model, PROMPTS, streams(), replace(SAMPLING, eos_ids=[stop, last]))
        for a, b in zip(long, short, strict=True):
            expected = a.ids[: a.ids.index(stop) + 1] if stop in a.ids else a.ids
            assert b.ids == expected and len(b.logp) == len(b.ids)
            assert b.truncated == (b.ids[-1] not in (stop, last))


def test_a_sampled_pad_token_is_a_token_like_any_other():
    model, pad = build(), 0  # what rollout fills up with
    with torch.no_grad():
        model.lm_head.weight[pad] = 0.0  # logit 0: it is often picked
        model.lm_head.weight[1:] *= 0.1
    prompts = [DISTINCT[1]] * 50
    completions = rollout(model, prompts, streams([(1, i) for i in range(50)]), Sampling(12, [2]))
    inside = [c for c in completions if pad in c.ids[:-1]]
    assert inside
    for completion in inside:
        expected = training_logp(model, DISTINCT[1], completion.ids, 1.0)
        close(torch.tensor(completion.logp), expected)


def test_the_models_own_generation_settings_and_gradient_checkpointing_change_nothing():
    model = build()
    expected = ids_of(rollout(model, PROMPTS, streams(), SAMPLING))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=5.0, eos_token_id=7, max_length=5,
        bad_words_ids=[[9]], min_new_tokens=9, num_beams=2, num_return_sequences=2,
    )  # fmt: skip
    assert model.training and ids_of(rollout(model, PROMPTS, streams(), SAMPLING)) == expected


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_handed_back_as_it_was(training, fails):
    model, modes = build().train(training), []
    own = model.generation_config
    settings = own.to_dict()

    def see(module, args):
        modes.append(module.training)
        if fails and len(modes) == 3:
            raise RuntimeError("from inside the model")

    model.register_forward_pre_hook(see)
    with pytest.raises(RuntimeError, match="inside") if fails else nullcontext():
        rollout(model, PROMPTS, streams(), SAMPLING)
    assert len(modes) >= 3 and not any(modes), "it samples in eval mode"
    assert model.training == training and model.generation_config is own and own.to_dict() == settings


def test_streams_are_named_by_seed_step_prompt_and_sample():
    base = uniforms(0, 1, [(0, 0)], 5)[0]
    others = [uniforms(1, 1, [(0, 0)], 5), uniforms(0, 2, [(0, 0)], 5), uniforms(0, 1, [(1, 0), (0, 1)], 5)]
    assert all(not np.array_equal(base, stream) for part in others for stream in part)
    assert np.array_equal(base, uniforms(0, 1, [(7, 7), (0, 0)], 5)[1])
    assert np.array_equal(base[:3], uniforms(0, 1, [(0, 0)], 3)[0])


def test_weights_that_are_not_finite_are_named():
    model = build()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    with pytest.raises(UserError, match="not finite"):
        rollout(model, PROMPTS, streams(), SAMPLING)


def test_equal_prompts_are_prefilled_once_and_finished_rows_leave_the_batch():
    model, seen = build(), []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape), with_kwargs=True)
    completions = rollout(model, PROMPTS, streams(), SAMPLING)
    assert seen[0] == (len(DISTINCT), max(map(len, DISTINCT)))
    assert [width for _, width in seen[1:]] == [1] * (len(seen) - 1)
    assert len(seen) == max(len(c.ids) for c in completions)
    rows = [rows for rows, _ in seen[1:]]
    assert rows == sorted(rows, reverse=True) and rows[-1] < len(PROMPTS)


def test_nothing_to_do():
    assert rollout(build(), [], np.zeros((0, 12)), SAMPLING) == []


@torch.no_grad()
def test_entropies_are_those_of_the_sampled_distributions_and_cost_nothing_unasked():
    """H = −Σ_v p_v log p_v at the temperature, from a pass over the whole sequence; the samples stay the same."""
    model = build()
    plain = rollout(model, PROMPTS, streams(), SAMPLING)
    completions = rollout(model, PROMPTS, streams(), replace(SAMPLING, with_entropy=True))
    for prompt, without, completion in zip(PROMPTS, plain, completions, strict=True):
        assert without.entropy is None and (without.ids, without.logp) == (completion.ids, completion.logp)
        logits = model(torch.tensor([prompt + completion.ids])).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature
        p = logits.softmax(-1)
        close(torch.tensor(completion.entropy), -(p * p.log()).sum(-1))
