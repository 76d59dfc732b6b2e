"""Decoding steps that can be CUDA graphs sample the same tokens as plain steps, on a CPU and on a pretended GPU."""

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from conftest import VOCAB, tiny_model
from infra import decoding as module
from infra import pretend_gpu
from infra.decoding import decoding
from infra.pretend_gpu import gpu, on_pretended_gpu
from rollout import Completion, Sampling, rollout, sample, uniforms

PROMPTS = [prompt for prompt in ([5], [9, 10, 11, 12, 13], [3, 4, 5, 6, 7], [20, 21]) for _ in range(2)]
LENGTH, ENDS = 10, [2, 4, 8, 11, 22, 33, 44, 55]
STREAMS = uniforms(0, 1, [(i, 0) for i in range(len(PROMPTS))], LENGTH)
SAMPLINGS = [
    Sampling(LENGTH, ENDS, top_p=0.8, with_entropy=True, drop_share=0.5),
    Sampling(LENGTH, ENDS, tokens_at_once=60, drop_share=0.01),  # four at once, some without padding
    Sampling(LENGTH, ENDS[:1], temperature=0.0),
]
KINDS = {"llama": 4, "qwen2": 1, "qwen3": 2, "gemma": 2}  # heads of keys and values; of queries there are 4
needs_gpu = pytest.mark.skipif(pretend_gpu.WHY_NOT is not None, reason=str(pretend_gpu.WHY_NOT))


def model_of(kind: str, device: str = "cpu") -> nn.Module:
    return tiny_model(kind, torch.float32, spread=2.0, num_key_value_heads=KINDS.get(kind, 2)).to(device)


def sampled(model: nn.Module, sampling: Sampling, decode: str, dtype: torch.dtype = torch.float32) -> list[Completion]:
    """Where rows leave late, each turn gets a reply."""
    replies = [lambda turn: [7, 2]] * len(PROMPTS) if sampling.drop_share == 0.5 else None
    with decoding(model, dtype, decode, LENGTH):
        return rollout(model, PROMPTS, STREAMS if sampling.temperature else None, sampling, replies=replies)


def all_sampled(model: nn.Module, decode: str, dtype: torch.dtype = torch.float32) -> list[Completion]:
    """The completions of all samplings. Between them the weights change, as in an update."""
    found = []
    for sampling in SAMPLINGS:
        found += sampled(model, sampling, decode, dtype)
        model.get_output_embeddings().weight.data.mul_(0.9)
    return found


def compare(ours: list[Completion], theirs: list[Completion]) -> tuple[float, float]:
    """-> the fraction of tokens up to which completions are the same, and the largest difference of their log-probs"""
    gaps = []
    for a, b in zip(ours, theirs, strict=True):
        gaps += [abs(a.logp[t] - b.logp[t]) for t in range(len(b.ids)) if a.ids[: t + 1] == b.ids[: t + 1]]
    return len(gaps) / sum(len(b.ids) for b in theirs), max(gaps)


def graphs(kind: str, dtype: torch.dtype, first_room: int = 256) -> tuple[list[Completion], int, int]:
    """-> the completions, how many graphs were replayed, and the bytes that are still allocated besides the model"""
    module.FIRST_ROOM = first_room
    replays, replay, model = [], pretend_gpu.Graph.replay, model_of(kind, "cuda")
    pretend_gpu.Graph.replay = lambda graph: replays.append(replay(graph))
    held = gpu.held
    return all_sampled(model, "graph", dtype), len(replays), gpu.held - held


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=needs_gpu)])
@pytest.mark.parametrize("kind", [*KINDS, "qwen3 in bfloat16"])
def test_steps_of_fixed_shapes_and_their_graphs_sample_the_same(kind, where, capsys):
    kind, _, dtype = kind.partition(" in ")
    dtype = getattr(torch, dtype or "float32")
    plain = all_sampled(model_of(kind), "plain", dtype)
    if where == "cpu":
        found = all_sampled(model_of(kind), "graph", dtype)
    else:
        found, replays, held = on_pretended_gpu(graphs, kind, dtype)
        assert replays > LENGTH and held == 0
    assert "--decode" not in capsys.readouterr().err and len({len(c.ids) for c in plain}) > 3, "rows end early"
    share, gap = compare(found, plain)
    exact = dtype == torch.float32  # log-probs are of the size of 1 to 10
    assert share >= (1.0 if exact else 0.5) and gap <= (1e-5 if exact else 0.1)
    for a, b in zip(found, plain, strict=True) if exact else ():
        assert np.allclose(a.entropy or 0, b.entropy or 0, rtol=0, atol=1e-5)
        assert [ids is None or {*ids} for ids in a.kept or []] == [ids is None or {*ids} for ids in b.kept or []]


@needs_gpu
def test_a_cache_that_doubles_samples_the_same():
    """It has room for 10 tokens only in the end: at first for one, after that for all of the 5 + 1 again."""
    found, replays, held = on_pretended_gpu(graphs, "qwen2", torch.float32, 1)
    share, gap = compare(found, all_sampled(model_of("qwen2"), "plain"))
    assert share == 1.0 and gap <= 1e-5 and replays > LENGTH and held == 0


def test_the_cache_is_no_longer_than_twice_what_is_in_it(monkeypatch):
    monkeypatch.setattr(module, "FIRST_ROOM", 2)
    model, seen = model_of("qwen2"), []
    see = model.model.layers[0].self_attn.register_forward_pre_hook
    see(lambda _, args, given: seen.append(given["attention_mask"]), with_kwargs=True)
    with decoding(model, torch.float32, "graph", 20):
        seen.clear()
        rollout(model, [[3, 4, 5]], None, Sampling(20, [VOCAB], temperature=0.0))
    assert [mask.shape[-1] for mask in seen[1:]] == [5] * 2 + [10] * 5 + [20] * 10 + [23] * 2


def test_a_model_that_was_decoded_is_forgotten():
    model = model_of("qwen2")
    sampled(model, SAMPLINGS[-1], "graph")
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def waits(cut: dict) -> list[dict]:
    """-> for graphs and for plain steps, the reads of the host that wait for the GPU, for each token"""
    model, found = model_of("qwen2", "cuda"), []
    for decode in ("graph", "plain"):
        sampled(model, SAMPLINGS[-1], decode)  # what is done once
        for length in (16, 48):
            gpu.waits.clear()
            with decoding(model, torch.float32, decode, length):
                streams = uniforms(0, 1, [(i, 0) for i in range(len(PROMPTS))], length)
                rollout(model, PROMPTS, streams, Sampling(length, [VOCAB], **cut), progress=lambda tokens, rows: None)
            found.append(gpu.waits.copy())
    return [{name: n / 32 for name, n in (long - short).items()} for short, long in (found[:2], found[2:])]


@needs_gpu
@pytest.mark.parametrize("cut", [{}, dict(temperature=0.0), dict(top_p=0.8), dict(top_k=9, min_p=0.01)])
def test_the_host_reads_one_number_a_token_how_many_rows_have_ended(cut):
    """Without a graph it also reads whether there is padding. Kept ids are copied after every 16 tokens."""
    kept = {"nonzero": 1 / 16, "_to_copy": 2 / 16} if {"top_p", "top_k"} & {*cut} else {}
    assert on_pretended_gpu(waits, cut) == [{"_local_scalar_dense": n} | kept for n in (1, 2)]


def picked(logits: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    return sample(logits.to("cuda"), u.to("cuda"), Sampling(1, [0]))[0].cpu()


@needs_gpu
@pytest.mark.parametrize("V", [4, 512, 513, 3000])
def test_a_gpu_picks_the_same_tokens(V):
    """Also at both ends, and none of probability 0."""
    r = torch.Generator().manual_seed(V)
    u = torch.rand(300, generator=r, dtype=torch.float64)
    u[:3] = torch.tensor([0.0, 1.0 - 2**-53, 1.0])
    logits = 3 * torch.randn(300, V, generator=r)
    logits[::2, 0], logits[::2, V // 2 :] = -torch.inf, -torch.inf
    cdf = logits.softmax(-1).double().cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(u[:, None] * total, torch.nextafter(total, 0 * total))
    assert torch.equal(on_pretended_gpu(picked, logits, u), torch.searchsorted(cdf, target, right=True).squeeze(1))


REFUSED = {
    "gemma2": "its cache has a DynamicSlidingWindowLayer",
    "bloom": "missing 1 required positional argument: 'position_ids'",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_is_not_made_for_it_says_so_once_and_goes_on_plainly(kind, capsys):
    assert all_sampled(model_of(kind), "graph") == all_sampled(model_of(kind), "plain")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--decode graph" in line]
    assert REFUSED[kind] in line


def test_where_the_host_waits_within_a_step_nothing_is_captured(monkeypatch, capsys):
    model, modes = model_of("qwen2"), [0]
    monkeypatch.setattr(module, "sync_debug_mode", modes.append)

    def wait(*_) -> None:
        if modes[-1] == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    model.model.register_forward_pre_hook(wait)
    sampled(model, SAMPLINGS[-1], "graph")
    assert "--decode graph: not used, Qwen2ForCausalLM cannot be a graph: called a sync" in capsys.readouterr().err
    assert modes == [0, 2, 0]
