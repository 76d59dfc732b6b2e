"""Rollouts: a completion depends on nothing but the model, its prompt and its random numbers, and training scores it as
it was sampled."""

import math
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GenerationConfig

import rollout as rollout_module
from advantage import Group
from batch import collate
from config import UserError
from conftest import VOCAB, Operations, as_lists, rounding, tiny_model
from fast.token_search import first_above
from logprob import token_logprobs
from rollout import Completion, Sampling, rollout, rollout_and_limit, sample, uniforms

KINDS = ["qwen2", "gemma2", "gpt2", "bloom", "qwen3_moe", "mamba"]
DISTINCT = [[5, 6, 7], [9, 10, 11, 12, 13, 14, 20], [3]]
SAMPLES = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]  # (prompt, number) of each completion
PROMPTS = [DISTINCT[p] for p, _ in SAMPLES]
SAMPLING = Sampling(12, eos_ids=[2, 4, 8, 11, 22, 33, 44, 55], temperature=0.9)

build = partial(tiny_model, dtype=torch.float32, spread=2.0)  # no distribution is uniform or certain
# Log-probs and entropies have sizes between 1 and 10, so the same number serves as relative and as absolute tolerance.
TOLERANCE = rounding(torch.float32)
close = partial(torch.testing.assert_close, rtol=TOLERANCE, atol=TOLERANCE)


def streams(length=12):
    """Return the random numbers of these samples in step 3 of a run with seed 0."""
    return uniforms(0, 3, SAMPLES, length)


@torch.no_grad()
def assert_scored_as_sampled(model, prompts: list[list[int]], completions: list[Completion], temperature: float):
    for prompt, completion in zip(prompts, completions, strict=True):
        ids, start = torch.tensor([[*prompt, *completion.ids]]), len(prompt)
        mask = torch.ones_like(ids)
        mask[:, :start] = 0
        if completion.written is not None:  # only tokens that the model wrote are scored
            mask[0, start:] = torch.as_tensor(completion.written)
        kept = None if completion.kept is None else [[None] * start + completion.kept]
        # The attention mask is all ones, because there is no padding.
        logp, _ = token_logprobs(model, ids, torch.ones_like(ids), mask, temperature=temperature, kept=kept)
        close(torch.as_tensor(completion.logp), logp[0, start:].float())


@pytest.mark.parametrize("cut", [{}, dict(top_k=9, top_p=0.9), dict(top_k=2)], ids=str)
@torch.no_grad()
def test_the_head_has_the_likeliest_ids_and_is_scored_as_sampled(cut):
    """Whatever was sampled. `others` is the log of what is left, -inf if nothing is. Half of the ids need 17 bits."""
    model, K = build("qwen2", vocab_size=2**17), 3
    for prompt, one in zip(PROMPTS, rollout(model, PROMPTS, streams(), replace(SAMPLING, head=K, **cut)), strict=True):
        batch, start = collate([Group(prompt, {}, [one], [0.0], advantages=[0.0])], False, model.device), len(prompt)
        how = dict(temperature=0.9, kept=batch.kept, head_ids=batch.head_ids)
        logp, _, scored = token_logprobs(model, batch.ids, batch.attention, batch.mask, **how)
        close(batch.sampler_logp, logp)
        p = (model(batch.ids).logits[0, start - 1 : -1] / 0.9).softmax(-1)
        for t, (head_ids, head_logp) in enumerate(zip(one.head_ids, one.head_logp)):
            is_there = np.isfinite(head_logp)
            assert is_there.sum() == min(K + 1, cut.get("top_k", 99), 99 if one.kept is None else len(one.kept[t]))
            assert head_ids[is_there[:-1]].tolist() == p[t].topk(is_there[:-1].sum()).indices.tolist()
            assert np.exp(head_logp).sum() == pytest.approx(1.0, rel=1e-5)
            close(torch.as_tensor(head_logp)[is_there], scored[0, start + t].float()[is_there])


def kept_ids(p: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[int]:
    """Return the ids that the cuts keep of a distribution p (V,). Probabilities are added up one by one."""
    ids = p.argsort(descending=True).tolist()[: top_k or None]
    mass, kept = float(p[ids].sum()), []
    while not kept or float(p[kept].sum()) < top_p * mass:
        kept.append(ids[len(kept)])  # the next id
    return sorted(v for v in kept if p[v] >= min_p * p.max())


@pytest.mark.parametrize("budget, rows", [(1, 1), (38, 2), (80, 4), (10**6, 6)])
def test_no_more_rows_at_once_than_the_budget_of_cache_tokens_holds(budget, rows):
    """Every row counts as 19 tokens: 7 of the longest prompt and 12 of the longest completion."""
    model, seen = build(), []
    sampling = replace(SAMPLING, tokens_at_once=budget)
    rollout(model, PROMPTS, streams(), sampling, progress=lambda t, live: seen.append((t, live)))
    # `progress` gets the number of the token, which begins at 1 in each batch, and the number of unfinished rows.
    assert max(live for _, live in seen) <= rows
    assert sum(t == 1 for t, _ in seen) == math.ceil(len(PROMPTS) / rows), "the number of batches"


# The kind of model, how many tokens of prompts it may read at once, and how many tokens of each prompt it then reads in
# each call. Mamba cannot read a prompt in pieces.
READING = [("qwen2", 1000, [7]), ("qwen2", 14, [4, 3]), ("gemma2", 14, [4, 3]), ("mamba", 14, [7])]


@pytest.mark.parametrize("kind, at_once, pieces", READING)
def test_each_prompt_is_read_once_and_finished_rows_leave_the_batch(kind, at_once, pieces, monkeypatch):
    """There are 6 completions of 3 prompts, which have up to 7 tokens and are padded to this length."""
    model = build(kind, sliding_window=5) if kind == "gemma2" else build(kind)
    shapes = []
    expected = rollout(model, PROMPTS, streams(), SAMPLING)
    monkeypatch.setattr(rollout_module, "PROMPT_TOKENS", at_once)
    model.register_forward_pre_hook(lambda _, args, given: shapes.append(given["input_ids"].shape), with_kwargs=True)
    completions = rollout(model, PROMPTS, streams(), SAMPLING)
    reading, sampling = shapes[: len(pieces)], shapes[len(pieces) :]
    assert reading == [(3, width) for width in pieces]
    # The longest completion takes one call fewer than it has tokens, because reading the prompts gives the first one.
    assert len(sampling) == max(len(c.ids) for c in completions) - 1 and {width for _, width in sampling} == {1}
    rows = [rows for rows, _ in sampling]
    assert rows == sorted(rows, reverse=True) and rows[-1] < len(PROMPTS)
    for ours, theirs in zip(completions, expected, strict=True):
        assert np.array_equal(ours.ids, theirs.ids)
        close(torch.tensor(ours.logp), torch.tensor(theirs.logp))


def test_a_completion_that_ends_exactly_at_the_limit_is_not_truncated():
    model, longer = build(), rollout(build(), PROMPTS, streams(), SAMPLING)
    n = min(len(one.ids) for one in longer)
    shorter = rollout(model, PROMPTS, streams(), replace(SAMPLING, max_completion_length=n))
    assert [one.truncated for one in shorter] == [len(one.ids) > n for one in longer]


def test_greedy_sampling_is_that_of_transformers():
    model = build().eval()
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0)
    completions = rollout(model, DISTINCT, None, Sampling(12, [2], temperature=0.0, top_k=3))
    assert_scored_as_sampled(model, DISTINCT, completions, temperature=1.0)
    for prompt, completion in zip(DISTINCT, completions, strict=True):
        assert completion.kept is None
        expected = model.generate(torch.tensor([prompt]), generation_config=config)[0].tolist()
        assert [*prompt, *completion.ids] == expected


def replied(turn: list[int]) -> list[int] | None:
    """Reply to some turns with up to 4 tokens, depending on what was sampled. Replies of two or more tokens contain the
    end token 2. It ends a turn of the model, but must not end a reply. After an empty reply, the next turn begins."""
    length = 1 + turn[0] % 4 if turn[-1] % 4 else 0
    return None if sum(turn) % 3 == 0 else [7, 2, 0, 31][:length]


PIECES = ["x>y", "</", " ", "a", "\ufffd", "  ", "\ufffd", "bc"]  # the text of token i is PIECES[i % 8]


def text_of(ids: list[int]) -> str:
    """Decode as tokenizers do: drop the first space, and join two halves of a character."""
    return "".join(PIECES[i % 8] for i in ids).removeprefix(" ").replace("\ufffd\ufffd", "é")


def is_over(turn: list[int], sampling: Sampling) -> bool:
    return turn[-1] in sampling.eos_ids or any(stop in sampling.to_text(turn) for stop in sampling.stop)


def talk(model, prompt: list[int], numbers: list[float], sampling: Sampling, cut: dict) -> tuple:
    """Sample one completion in a loop without cache or padding. Return the ids, which of them the model wrote, whether
    the completion is truncated, its turns, and the ids that the cuts kept for each token."""
    ids, written, turns, sets = [], [], [[]], []
    for t in range(sampling.max_completion_length):
        if t < len(ids):  # a reply has filled this position
            continue
        p = (model(torch.tensor([prompt + ids])).logits[0, -1].double() / sampling.temperature).softmax(-1)
        kept = kept_ids(p, **cut)
        # The token is the first kept id at which the cumulative probability exceeds the random number times the
        # probability of all kept ids. The number of ids before it is its index.
        token = kept[(p[kept].cumsum(0) <= numbers[t] * p[kept].sum()).sum()]
        ids, written, sets = [*ids, token], [*written, True], [*sets, kept]
        turns[-1].append(token)
        if is_over(turns[-1], sampling):
            reply = replied(turns[-1])
            if reply is None or t + 1 + len(reply) >= sampling.max_completion_length:
                # There is no reply, or no room for the reply and one more token. In the second case, the completion is
                # truncated.
                return ids, written, reply is not None, turns, sets
            ids, written, sets = ids + reply, written + [False] * len(reply), sets + [None] * len(reply)
            turns.append([])
    return ids, written, True, turns, sets


CUTS = {}, dict(top_p=0.8), dict(top_k=5), dict(min_p=0.1), {}, dict(top_k=9, top_p=0.9, min_p=0.05)
STOPS = ["é", "aa", "y "], ["</x>", "abc", "    "]
CONVERSATIONS = [*zip(KINDS, CUTS, [[]] * 6), ("qwen2", CUTS[5], STOPS[0]), ("qwen2", {}, STOPS[1])]


@pytest.mark.parametrize("kind, cut, stop", CONVERSATIONS, ids=str)
@torch.no_grad()
def test_turns_are_those_of_a_loop_and_are_scored_as_they_were_sampled(kind, cut, stop, monkeypatch):
    """A completion is the same in a batch as when the loop of `talk` samples it. Neither the division of rows into
    batches nor the moment when finished rows are dropped makes a difference. The token that completes a stop string is
    the last of its turn. A string that begins in one turn and ends in another does not count."""
    model = build(kind, dtype=torch.float64 if kind == "mamba" else torch.float32)
    u = streams(length=20)
    sampling = Sampling(20, [2] if stop else SAMPLING.eos_ids, temperature=0.9, stop=stop, **cut)
    sampling.to_text = text_of
    monkeypatch.setattr(rollout_module, "stop_window", lambda _: 4)  # shorter than most turns
    expected = [talk(model.eval(), prompt, numbers, sampling, cut) for prompt, numbers in zip(PROMPTS, u, strict=True)]
    _, _, all_truncated, all_turns, all_sets = zip(*expected)
    assert any(len(turns) > 2 for turns in all_turns) and any(all_truncated)
    assert kind != "bloom" or any(0 in ids for ids, *_ in expected), "also the id with which rows are padded is sampled"
    texts = [text_of(turn) for turns in all_turns for turn in turns]
    assert all(any(string in text for text in texts) for string in stop)
    assert not cut or max(len(kept) for sets in all_sets for kept in sets if kept) < VOCAB / 2
    for how in (dict(drop_share=0.01), dict(drop_share=1.0), dict(tokens_at_once=60)):
        heard = [[] for _ in PROMPTS]
        # append() returns None, so each function notes the turn and returns the reply.
        replies = [lambda turn, notes=notes: notes.append(turn) or replied(turn) for notes in heard]
        completions = rollout(model, PROMPTS, u, replace(sampling, **how), replies=replies)
        # A turn that the length limit cuts off gets no reply.
        ended = [[turn for turn in turns if is_over(turn, sampling)] for turns in all_turns]
        assert heard == ended, "the reply function must be called once for each turn that ended"
        assert any(one.splits for one in completions), "an empty reply, after which the next turn begins at once"
        for completion, (ids, written, truncated, turns, sets) in zip(completions, expected, strict=True):
            assert (completion.ids.tolist(), completion.written.tolist()) == (ids, written)
            assert completion.truncated == truncated
            assert completion.turns == turns and completion.length == sum(written)
            kept = None if completion.kept is None else [None if x is None else x.tolist() for x in completion.kept]
            assert kept == (sets if cut else None)
        assert_scored_as_sampled(model, PROMPTS, completions, 0.9)


@pytest.mark.parametrize("u, expected", [(0.0, 2), (1.0 - 2**-53, 3), (1.0, 3)])
def test_a_token_of_probability_zero_is_never_picked(u, expected):
    logits = torch.full((1, 6), float("-inf"))
    logits[0, 2:4] = 1.0
    assert sample(logits, torch.tensor([u], dtype=torch.float64), Sampling(1, [0]))[0] == expected


@pytest.mark.parametrize("V", [5, 128, 1000, 49152])
def test_the_search_in_two_levels_finds_the_same_tokens(V):
    """For almost uniform and for very uneven distributions, also with most ids cut off."""
    torch.manual_seed(0)
    whole = (torch.randn(40, V) * torch.linspace(0.1, 12, 40)[:, None]).softmax(-1)
    u = torch.rand(40, 25, dtype=torch.float64)
    u[:, 0] = 0.0
    for p in (whole, whole.where((torch.rand(40, V) < 0.3) | (whole == whole.amax(-1, keepdim=True)), 0.0)):
        cdf = p.cumsum(-1, dtype=torch.float64)
        found = torch.cat([first_above(p, u[:, i : i + 1]) for i in range(25)], 1)
        assert torch.equal(found, torch.searchsorted(cdf, u * cdf[:, -1:], right=True))
        # Rounding may make the last of these the whole sum. A token without probability must not be picked then.
        ends = torch.cat(
            [first_above(p, torch.full((40, 1), end, dtype=torch.float64)) for end in (0.0, 1 - 2**-53, 1)], 1
        )
        assert p.gather(1, ends).min() > 0.0
    assert first_above(torch.full((1, V), torch.nan), u[:1, :1]).item() < V  # an error is raised later


def test_the_search_in_two_levels_reads_the_distribution_once():
    p, u = torch.rand(4, 49152), torch.rand(4, 1, dtype=torch.float64)
    with Operations() as plain:
        cdf = p.cumsum(-1, dtype=torch.float64)  # on a GPU, p is first copied to fp64, so this counts too little
        torch.searchsorted(cdf, u, right=True)
    with Operations() as two_levels:
        first_above(p, u)
    assert plain.bytes > 4 * p.nbytes and two_levels.bytes < 1.2 * p.nbytes


def test_kept_sets_that_are_too_large_for_memory_are_refused_with_their_size(monkeypatch):
    monkeypatch.setattr(rollout_module, "MOST_KEPT_IDS", 40 * len(PROMPTS))
    model = build(spread=0.1)  # nearly uniform, so top_p keeps about nine tenths of the ids
    with pytest.raises(UserError, match=r"kept sets of 5\d ids are too large: lower --top_p"):
        rollout(model, PROMPTS, streams(), replace(SAMPLING, top_p=0.9))


def test_a_rollout_that_runs_out_of_memory_goes_on_with_fewer_rows_and_fresh_replies():
    """Memory runs out once a turn has ended and more than two rows are left. What was sampled before stays, and the
    completions of the failed attempt begin again, with replies that have not seen that attempt."""
    model, heard = build(), []
    model.register_forward_pre_hook(lambda _, args, given: too_large(given["input_ids"]), with_kwargs=True)

    def too_large(ids):
        if len(ids) > 2 and any(turns for _, turns in heard):
            raise torch.OutOfMemoryError("pretended")

    def begin(i):
        turns = []
        heard.append((i, turns))
        return lambda turn: turns.append(turn) or replied(turn)

    sampling = replace(SAMPLING, tokens_at_once=10**6, drop_share=1.0)
    completions, limit = rollout_and_limit(model, PROMPTS, streams(), sampling, begin=begin)
    expected = rollout(build(), PROMPTS, streams(), SAMPLING, replies=[replied] * len(PROMPTS))
    for one, other in zip(completions, expected, strict=True):
        assert np.array_equal(one.ids, other.ids) and one.turns == other.turns
    assert limit < 3 * 19 and sampling.tokens_at_once == 10**6, "19 tokens a row"
    last = dict(heard)  # a turn that the limit cuts off is not heard
    assert len(heard) > len(PROMPTS) and all(c.turns[: len(last[i])] == last[i] for i, c in enumerate(completions))
    model.register_forward_pre_hook(lambda *args: too_large([0, 1, 2]))
    with pytest.raises(UserError, match="out of memory"):
        rollout(model, PROMPTS, streams(), sampling)


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = Tokenizer(BPE({token: i for i, token in enumerate([*BYTES, "▁"])}, []))
# The decoder of Llama 2, Mistral and Gemma. It shows a run of bytes as a text only if the whole run is one.
LLAMA.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
# How a model decodes bytes, what it has written, and the stop string that follows. The last but one has as many tokens
# as a string of its length may have.
STOPPED = [
    (lambda ids: bytes(ids).decode(errors="replace"), "é🙂🙂", "🙂🙂🙃"),
    (LLAMA.decode, "日本語日本語", "😀"),
    (LLAMA.decode, "这是一个测试", "答"),
    (LLAMA.decode, "ab", "🙂🙂🙃"),
    (LLAMA.decode, "ab", "a "),
]


@pytest.mark.parametrize("to_text, before, stop", STOPPED)
def test_a_stop_string_of_many_tokens_a_character_is_found_where_it_ends(to_text, before, stop):
    """Each token is a byte, or a space, as "▁". The end of a turn that is decoded may begin inside a character. Another
    stop string has two characters."""
    sampling = Sampling(99, [], stop=["~~", stop], to_text=to_text)
    ids = [256 if byte == ord(" ") else byte for byte in f"{before}{stop}{before}".encode()]
    ends = [t for t in range(len(ids)) if rollout_module.has_stop(ids[: t + 1], sampling)]
    assert min(ends) == len(f"{before}{stop}".encode()) - 1
    assert rollout_module.may_end_stop(ids[min(ends)], sampling)
    assert not rollout_module.may_end_stop(ord("x"), sampling)


def test_logits_in_bfloat16_are_sampled_from_in_float32():
    logits = torch.randn(100, 1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    u = torch.as_tensor(np.random.default_rng(0).random(100))
    given, exact = (sample(x, u, Sampling(1, [0])) for x in (logits, logits.float()))
    assert torch.equal(given[0], exact[0]) and torch.equal(given[1], exact[1])


def test_the_models_own_settings_change_nothing_and_are_restored():
    """The model's mode and generation settings are also restored after an exception."""
    model, modes = build(), []
    expected = rollout(model.eval(), PROMPTS, streams(), SAMPLING)
    assert not model.training
    # Checkpointing has an effect only in training mode, so it must not change a rollout.
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    norm = model.model.norm.eval()
    model.generation_config = own = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=1, top_p=0.1, repetition_penalty=5.0, eos_token_id=7, max_length=5,
        bad_words_ids=[[9]], min_new_tokens=9, num_beams=2, num_return_sequences=2,
    )  # fmt: skip
    settings = own.to_dict()
    model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    assert as_lists(rollout(model, PROMPTS, streams(), SAMPLING)) == as_lists(expected)
    model.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rollout(model, PROMPTS, streams(), SAMPLING)
    assert len(modes) >= 3 and not any(modes), "the model must sample in eval mode"
    assert model.training and not norm.training and model.generation_config is own and own.to_dict() == settings


def test_a_stream_is_determined_by_seed_step_prompt_and_sample():
    base = uniforms(0, 1, [(0, 0)], 5)[0]
    others = {str(uniforms(seed, step, [sample], 5)) for seed, step, *sample in product((0, 1), repeat=4)}
    assert len(others) == 16, "no two streams are equal, even if the same numbers are in another order"
    assert np.array_equal(base, uniforms(0, 1, [(7, 7), (0, 0)], 5)[1])
    assert np.array_equal(base[:3], uniforms(0, 1, [(0, 0)], 3)[0])
