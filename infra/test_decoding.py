"""Decoding steps that can be CUDA graphs sample the same tokens as plain steps. Here, stand-ins for graphs are captured
on a CPU."""

import math
import re
import sys
from functools import update_wrapper
from itertools import count

import numpy as np
import pytest
import torch
from torch import nn

import train
from conftest import EOS, VOCAB, Graph, Operations, as_lists, flags, tiny_model
from fast.norm import fuse_norms
from infra import decoding
from infra.model import reads_together
from rollout import Completion, Sampling, rollout, uniforms

PROMPTS = [prompt for prompt in ([5], [9, 10, 11, 12, 13], [3, 4, 5, 6, 7], [20, 21]) for _ in range(2)]
LENGTH, ENDS, NO_ENDS = 10, [2, 4, 8, 11, 22, 33, 44, 55], [VOCAB]  # no token has the id VOCAB
STREAMS = uniforms(0, 1, [(i, 0) for i in range(len(PROMPTS))], LENGTH)
SAMPLINGS = [
    Sampling(LENGTH, ENDS, top_p=0.8, drop_share=0.5),
    # A batch of 60 tokens has four rows, because the longest prompt has 5 tokens and a completion has up to 10. Each
    # row is dropped from the batch as soon as it has ended.
    Sampling(LENGTH, ENDS, tokens_at_once=60, drop_share=0.01),
    Sampling(LENGTH, ENDS[:1], temperature=0.0),
]
KINDS = {"llama": 4, "qwen2": 1, "qwen3": 2, "gemma": 2}  # the heads of keys and values; there are 4 heads of queries


def model_of(kind: str, **sizes) -> nn.Module:
    return tiny_model(kind, torch.float32, spread=2.0, num_key_value_heads=KINDS.get(kind, 2), **sizes)


def sampled(model: nn.Module, sampling: Sampling, decode: str, dtype: torch.dtype = torch.float32) -> list[Completion]:
    """Sample a completion of each prompt. With the first of SAMPLINGS, each turn gets a reply."""
    replies = [lambda turn: [7, 2]] * len(PROMPTS) if sampling is SAMPLINGS[0] else None
    with decoding.decoding(model, dtype, decode):
        return rollout(model, PROMPTS, STREAMS if sampling.temperature else None, sampling, replies=replies)


def all_sampled(model: nn.Module, decode: str, dtype: torch.dtype = torch.float32) -> list[Completion]:
    """Return the completions of all SAMPLINGS. After each of them the weights change, as in an update."""
    found = []
    for sampling in SAMPLINGS:
        found += sampled(model, sampling, decode, dtype)
        model.get_output_embeddings().weight.data.mul_(0.9)
    return found


def kept_sets(completion: Completion) -> list[set[int] | None]:
    """Return the kept ids of each token as a set, because their order does not matter."""
    return [None if ids is None else set(ids) for ids in completion.kept or []]


def assert_same(ours: list[Completion], theirs: list[Completion], dtype: torch.dtype = torch.float32) -> None:
    """Compare tokens and log-probs, which are of the size of 1 to 10. In bf16 a rounding error may change a token, and
    then the rest of the completion is not compared. At least half of all tokens must be compared, and in fp32 all."""
    compared_share, tolerance = (1.0, 1e-5) if dtype == torch.float32 else (0.5, 0.1)
    gaps = []
    for a, b in zip(ours, theirs, strict=True):
        n = min(len(a.ids), len(b.ids))
        same = (a.ids[:n] == b.ids[:n]).cumprod().astype(bool)
        gaps += abs(a.logp[:n] - b.logp[:n])[same].tolist()
        if dtype == torch.float32:
            assert kept_sets(a) == kept_sets(b)
    assert len(gaps) >= compared_share * sum(len(b.ids) for b in theirs) and max(gaps) <= tolerance


@pytest.mark.parametrize("kind", [*KINDS, "qwen3 in bfloat16"])
def test_steps_of_fixed_shapes_sample_the_same(monkeypatch, kind, capsys):
    kind, _, dtype = kind.partition(" in ")
    dtype = getattr(torch, dtype or "float32")
    plain = all_sampled(model_of(kind), "plain", dtype)
    assert len({len(completion.ids) for completion in plain}) > 3, "some rows must end before others"
    monkeypatch.setattr("rollout.PROMPT_TOKENS", 4)  # so that the prompts are read in pieces
    assert decoding.graph_decoding_works(model_of(kind), dtype) and not capsys.readouterr().err
    model, read = model_of(kind), []
    model.model.register_forward_pre_hook(
        lambda _, args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    assert_same(all_sampled(model, "graph", dtype), plain, dtype)
    assert max(read) == 2, "with two prompts at once, two tokens of each"


@pytest.mark.parametrize("dtype, least_room", [(torch.float32, 256), (torch.float32, 1), (torch.bfloat16, 256)])
def test_graphs_sample_the_same_even_if_the_cache_grows(monkeypatch, graphs, dtype, least_room):
    plain = all_sampled(model_of("qwen3"), "plain", dtype)
    monkeypatch.setattr(decoding, "LEAST_ROOM", least_room)
    assert_same(all_sampled(model_of("qwen3"), "graph", dtype), plain, dtype)
    assert len(graphs) > len(SAMPLINGS)


def test_all_graphs_of_a_rollout_have_one_pool_of_memory(graphs):
    """PyTorch fails if a pool is used again after its last graph is gone, so there is always one."""
    sampled(model_of("qwen3"), SAMPLINGS[1], "graph")  # two batches, of which rows leave
    assert len(graphs) > 3 and all(graph.pool() is graphs[0] for graph in graphs)


def test_a_full_cache_gets_room_for_a_quarter_more_tokens(monkeypatch):
    monkeypatch.setattr(decoding, "LEAST_ROOM", 2)
    model, seen = model_of("qwen2"), []
    attention = model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda _, args, given: seen.append(given["attention_mask"]), with_kwargs=True)
    with decoding.decoding(model, torch.float32, "graph"):
        rollout(model, [[3, 4, 5]], None, Sampling(40, NO_ENDS, temperature=0.0))
    # The first call reads the prompt, so its mask is left out. Lengths are rounded up to a multiple of 8: those of
    # 3 + 2, 8 + 2, 16 + 4, 24 + 6 and 32 + 8 tokens. The prompt and its completion need 43.
    assert [mask.shape[-1] for mask in seen[1:]] == [8] * 5 + [16] * 8 + [24] * 8 + [32] * 8 + [40] * 8 + [48] * 2


def sampling_of(decode: str, length: int, **cut) -> Operations:
    """Count the operations of a rollout with completions of this length."""
    model, streams = model_of("qwen2"), uniforms(0, 1, [(0, 0), (1, 0)], length)
    with decoding.decoding(model, torch.float32, decode), Operations() as operations:
        rollout(model, PROMPTS[1:3], streams, Sampling(length, NO_ENDS, **cut), progress=lambda *_: None)
    return operations


@pytest.mark.parametrize("decode, numbers_read", [("graph", 16 // 8), ("plain", 16 // 8 + 16)])
@pytest.mark.parametrize("cut, copied", [({}, {}), (dict(top_p=0.8), {"nonzero": 16, "cpu": 2 * 16, "tolist": 16})])
def test_the_host_reads_only_at_every_eighth_token_how_many_rows_have_ended(
    monkeypatch, graphs, decode, numbers_read, cut, copied
):
    """Without a graph it also reads, for each token, whether there is padding. If the vocabulary is cut, the kept ids,
    their numbers and the numbers of the rows are copied as well."""
    monkeypatch.setattr("rollout.CHECK_EVERY", {"cpu": 8})
    one, two = (sampling_of(decode, length, **cut) for length in (16, 32))
    # What a rollout does once cancels out. The operation that reads one number is called _local_scalar_dense.
    assert two.waits - one.waits == {"_local_scalar_dense": numbers_read} | copied
    assert bool(graphs) == (decode == "graph")


def test_how_many_kernels_a_token_takes(graphs):
    """With weights in bf16: for each layer, and beside the layers."""
    found = []
    for layers in (2, 3):
        model = model_of("qwen2", num_hidden_layers=layers)
        fuse_norms(model)
        sampled(model, SAMPLINGS[0], "graph", torch.bfloat16)
        found.append(graphs[-1].launches.total())
    each = found[1] - found[0]
    assert each <= 26 and found[0] - 2 * each <= 14


def test_a_rollout_captures_few_graphs(monkeypatch, graphs):
    """One for the prompts, and one whenever half of the rows have left, or the cache is full. Here lengths are
    log-normal, with a mean of about 170 and at most 512 tokens."""
    model, ends = model_of("qwen2", max_position_embeddings=1024), []
    lengths = torch.from_numpy(np.random.default_rng(0).lognormal(math.log(128), 0.8, 128).astype(int).clip(1, 512))
    monkeypatch.setattr("rollout.CHECK_EVERY", {"cpu": 8})

    def sample(logits, u, sampling):
        """Sample the end token of row n, whose random numbers are n / 128, after lengths[n] tokens."""
        rows = (128 * u).long()
        ends.append(rows)
        return torch.where(lengths[rows] <= len(ends), EOS, 5), torch.zeros(len(rows)), None, None

    monkeypatch.setattr("rollout.sample", sample)
    with decoding.decoding(model, torch.float32, "graph"):
        streams = np.repeat(np.arange(128)[:, None] / 128, 512, axis=1)
        found = rollout(model, [[7] * 128] * 128, streams, Sampling(512, [EOS], drop_share=0.5))
    assert [len(completion.ids) for completion in found] == lengths.tolist()
    assert len(graphs) <= 6


REFUSED = {
    "gemma2": "cache has a layer of type DynamicSlidingWindowLayer",
    "bloom": "missing 1 required positional argument: 'position_ids'",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_without_graphs_is_reported_and_left_as_it_was(kind, capsys):
    model = model_of(kind)
    plain = as_lists(sampled(model, SAMPLINGS[-1], "plain"))
    assert not decoding.graph_decoding_works(model, torch.float32)
    assert "no CUDA graph" in (line := capsys.readouterr().err) and REFUSED[kind] in line
    assert as_lists(sampled(model, SAMPLINGS[-1], "plain")) == plain


@pytest.mark.parametrize("row, factor, words", [(0, 1.1, "log-probs differ"), (1, -1.0, "it samples other tokens")])
def test_a_graph_that_computes_one_token_otherwise_is_not_used(monkeypatch, capsys, row, factor, words):
    def wrong_at_the_last_token(forward):
        calls = count(1)

        def call(**inputs):
            out = forward(**inputs)
            out.logits[row] *= factor if next(calls) == 4 else 1.0
            return out

        return update_wrapper(call, forward)

    monkeypatch.setattr(decoding, "GraphForward", wrong_at_the_last_token)
    assert not decoding.graph_decoding_works(model_of("qwen2"), torch.float32)
    assert words in capsys.readouterr().err


def test_a_number_that_the_host_reads_would_be_frozen_in_a_graph(monkeypatch, graphs, capsys):
    """The token that is captured is right, with the number of then. The next one, the fourth, is wrong."""
    model, lengths = model_of("qwen2"), []

    def noted(_, args, given) -> None:
        if given["input_ids"].shape[1] > 1:  # a prompt
            lengths.clear()
        lengths.append(1)

    model.model.register_forward_pre_hook(noted, with_kwargs=True)
    model.model.norm.register_forward_hook(lambda *args: args[-1] * (1.0 + 0.1 * len(lengths)))
    monkeypatch.setattr(decoding, "CAPTURING", set())
    assert decoding.graph_decoding_works(model, torch.float32), "without graphs, the number is read for each token"
    monkeypatch.setattr(decoding, "CAPTURING", {"cpu"})
    assert not decoding.graph_decoding_works(model, torch.float32)
    assert graphs and re.search("log-probs differ|other tokens", capsys.readouterr().err)


def test_memory_that_runs_out_inside_a_capture_is_out_of_memory(monkeypatch, graphs, caplog):
    """The error of an operation is followed by another one, at the end of the capture."""
    greedy, model, capture_end = Sampling(LENGTH, NO_ENDS, temperature=0.0), model_of("qwen3"), Graph.capture_end
    plain = sampled(model, greedy, "plain")

    def limited(_, args, given) -> None:
        if len(given["input_ids"]) > 4 and is_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory")

    def is_capturing() -> bool:
        return bool(graphs) and not hasattr(graphs[-1], "launches")

    def ending(graph: Graph) -> None:
        capture_end(graph)
        if sys.exc_info()[0]:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    model.model.register_forward_pre_hook(limited, with_kwargs=True)
    monkeypatch.setattr(Graph, "capture_end", ending)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert_same(sampled(model, greedy, "graph"), plain)
    assert "at most 4 completions are sampled at once" in caplog.text


def test_a_capture_frees_memory_only_if_little_is_free(monkeypatch, graphs):
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    for free in (3e9, 1e9):
        assert not freed
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 8e10))
        sampled(model_of("qwen3"), SAMPLINGS[2], "graph")
    assert freed


@pytest.mark.parametrize("works", [True, False])
def test_a_run_decodes_plainly_where_the_trial_fails(sorting, tmp_path, monkeypatch, watch, works):
    monkeypatch.setattr("infra.model.graph_decoding_works", lambda model, dtype: works and dtype == torch.bfloat16)
    graphs = watch(decoding, "GraphForward")
    settings = sorting | dict(decode="graph", steps=1, rollout_dtype="bfloat16")
    assert train.main(flags(settings, tmp_path / "out")) == 0 and bool(graphs) == works


def test_a_model_for_which_the_host_waits_is_not_captured(monkeypatch, capsys):
    # In mode 0 the host may wait, and in mode 2 waiting raises an error. `modes` begins with the mode before the
    # rollout.
    model, modes = model_of("qwen2"), [0]
    monkeypatch.setattr(decoding, "sync_debug_mode", modes.append)

    def wait(*_) -> None:
        if modes[-1] == 2:
            raise RuntimeError("called a synchronizing CUDA operation")

    model.model.register_forward_pre_hook(wait)
    assert not decoding.graph_decoding_works(model, torch.float32)
    assert "no CUDA graph, tokens are slower: Qwen2ForCausalLM: called a sync" in capsys.readouterr().err
    assert modes == [0, 2, 0]


def test_a_model_that_may_take_the_mask_of_a_shared_row_for_one_of_padding_reads_none(monkeypatch):
    model = model_of("qwen2")
    assert reads_together(model, 12)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    assert not reads_together(model, 12)
