"""The arithmetic of scaling.py, against arithmetic done otherwise and against what the code does on tiny models."""

import itertools
import os
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_checkpoint import PROCESSES, exit_codes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, Qwen2ForCausalLM

import batch
from infra import ranks, shard
from logprob import token_logprobs
from rollout import Completion
from tools import scaling
from tools.scaling import SHAPES, Given, Shape, needs

G = Given()
TINY = Shape(64, 160, 3, 4, 2, 512, tied=True)


# ---- The page ----


def test_the_page_has_the_tables_of_the_command(capsys):
    assert scaling.main(["--check"]) == 0, capsys.readouterr().out


def test_the_check_finds_another_digit_and_writing_mends_it(tmp_path, monkeypatch, capsys):
    page = tmp_path / "SCALING.md"
    shutil.copy(scaling.PAGE, page)
    monkeypatch.setattr(scaling, "PAGE", page)
    made = page.read_text()
    page.write_text(made.replace("| **7B**: 7.616 |", "| **7B**: 7.615 |"))
    assert page.read_text() != made and scaling.main(["--check"]) == 1
    assert scaling.main(["--write"]) == 0 and page.read_text() == made
    page.write_text(made.replace("made by scaling.py: sent", "sent"))
    assert scaling.main(["--check"]) == 1


def test_other_figures_are_printed_and_never_written(capsys):
    with pytest.raises(SystemExit):
        scaling.main(["--card", "141e9", "--write"])
    assert "is for the default figures" in capsys.readouterr().err


def test_what_the_words_of_the_page_say():
    text = " ".join(scaling.PAGE.read_text().split())
    step = f"prompts of {G.prompt} tokens, completions of up to {G.limit} with log-normal lengths of mean {G.mean}, "
    assert step + f"{G.per_gpu} for each GPU or {G.fixed} in all" in text
    seven, three = SHAPES["7B"], SHAPES["3B"]
    assert all(needs(G, seven, 8, beta)["peak"] < 80e9 / 2 for beta in (0.0, 0.1))
    assert all(needs(G, three, 1, beta)["peak"] < 80e9 for beta in (0.0, 0.1))
    alone = needs(G, seven, 1)
    assert alone["stays"] + alone["rollout"] < 141e9 < alone["least"] < 1.02 * 141e9
    both = [scaling.parameters(scaling.largest(G, SHAPES["32B"], 8, beta, 80e9)) for beta in (0.0, 0.1)]
    assert 17e9 < both[1] < both[0] < 20e9
    for shape, gpus in itertools.product(SHAPES.values(), scaling.GPUS):
        if size := scaling.size_of(G, shape, gpus):
            for n in (G.fixed, G.per_gpu * gpus):
                rollout, update, _ = scaling.step_seconds(G, shape, size, n, gpus)
                assert rollout > update


# ---- Memory ----


def test_the_parameters_are_those_the_models_are_known_for():
    counts = [scaling.parameters(shape) for shape in SHAPES.values()]
    assert counts == [
        494_032_768, 1_543_714_304, 3_085_938_688, 7_615_616_512, 14_770_033_664, 32_763_876_352, 70_553_706_496
    ]  # fmt: skip


def test_memory_by_hand():
    P, seven = 7_615_616_512, SHAPES["7B"]
    cache = 28 * 2 * 4 * 128 * 2 * (512 + 4096)  # layers, keys and values, heads, their size, bytes, tokens
    whole, part = needs(G, seven, 1, beta=0.1), needs(G, seven, 8, beta=0.1)
    assert whole["stays"] == 16 * P and part["stays"] == 2 * P and needs(G, seven, 8)["stays"] == 1.5 * P
    assert whole["rollout"] == part["rollout"] == 2 * P + 16 * cache
    assert part["peak"] - part["stays"] == max(part["rollout"], part["update"])
    gb = {name: round(needs(G, SHAPES["3B"], 1)[name] / 1e9, 1) for name in ("weights", "Adam", "reference")}
    assert gb == {"weights": 12.3, "Adam": 24.7, "reference": 0.0}


def test_more_machines_add_nothing_to_a_gpu_but_the_rows_of_their_completions():
    """So 8 ranks stand for any number, with as many completions on each."""
    one = needs(G, SHAPES["7B"], 8, 0.1)
    config = scaling.replace(scaling.settings(G, 8, 0.1), prompts_per_step=16 * 128)
    many = scaling.memory.needed(SHAPES["7B"].config(), config, 128, G.prompt)
    rows = 16 * (128 - 8) * (512 + 4096) * scaling.BATCH_BYTES
    assert {name: many[name] - one[name] for name in many if many[name] != one[name]} == dict(update=rows)


@pytest.mark.parametrize("size, at_once, beta", [(1, 1, 0.0), (8, 1, 0.1), (8, 16, 0.0), (128, 16, 0.1)])
def test_the_largest_fits_and_one_layer_more_does_not(size, at_once, beta):
    g = scaling.replace(G, per_gpu=at_once)
    deepest = scaling.largest(g, SHAPES["7B" if size == 1 else "32B"], size, beta, 80e9)
    deeper = scaling.replace(deepest, layers=deepest.layers + 1)
    peaks = [needs(g, shape, size, beta, G.prompt + G.limit)["peak"] for shape in (deepest, deeper)]
    assert peaks[0] <= 80e9 < peaks[1]


# ---- Seconds ----


def test_a_decode_step_by_hand():
    seven, small = SHAPES["7B"], SHAPES["0.5B"]
    weights = 7_615_616_512 - 152064 * 3584
    cache = 16 * 1536 * 28 * 2 * 4 * 128 * 2
    assert scaling.decode_step(G, seven, 16, 1536) == pytest.approx((2 * weights + 3 * cache) / (0.4 * 3.35e12))
    assert scaling.decode_step(G, small, 1, 512) == pytest.approx(24 * 40 * 6e-6), "launching takes longer"
    assert scaling.decode_step(G, seven, 0, 1536) == 0


def test_a_layer_takes_so_many_operations_to_decode_a_token():
    same_storage = "view _unsafe_view t transpose slice expand unsqueeze reshape select detach alias".split()

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen[operation._schema.name.removeprefix("aten::")] += 1
            return operation(*args, **(kwargs or {}))

    counts = []
    for layers in (2, 3):
        model = Qwen2ForCausalLM(scaling.replace(TINY, layers=layers).config()).to(torch.bfloat16).eval()
        cache, seen = DynamicCache(config=model.config), Counter()
        with torch.no_grad():
            model(torch.ones(3, 7, dtype=torch.long), past_key_values=cache, use_cache=True)
            token, mask = torch.ones(3, 1, dtype=torch.long), torch.ones(3, 8, dtype=torch.long)
            with Counted():
                model(token, attention_mask=mask, past_key_values=cache, use_cache=True)
        counts.append(sum(n for name, n in seen.items() if name not in same_storage))
    assert counts[1] - counts[0] == pytest.approx(G.kernels, abs=2)


def test_the_update_takes_the_flop_that_are_counted():
    T = 96
    settings = TINY.config()
    settings._attn_implementation = "eager"  # whole squares, where causal kernels compute half
    model = Qwen2ForCausalLM(settings).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids, mask = torch.ones(2, T, dtype=torch.long), torch.ones(2, T, dtype=torch.long)
    completion = mask.clone()
    completion[:, 0] = 0
    with FlopCounterMode(display=False) as counter:
        token_logprobs(model, ids, mask, completion)[0].sum().backward()
    attention = 2 * 16 * TINY.layers * TINY.hidden * T**2
    g = scaling.replace(G, flops=1.0, update_share=1.0)
    estimate = scaling.update_seconds(g, TINY, [(2, T)])
    not_again = 2 * 2 * T * TINY.layers * TINY.hidden * TINY.intermediate  # the checkpoint leaves out the last product
    not_counted = 2 * 2 * T * TINY.hidden * TINY.vocab  # addmm_, in place, of the head's gradient
    counted = counter.get_total_flops() + not_again + not_counted
    assert estimate + attention / 2 == pytest.approx(counted, rel=0.01)
    assert estimate == 2 * T * 8 * scaling.products(TINY) + attention / 2


def test_the_lengths():
    drawn = scaling.lengths(G, 100_000)
    whole = scaling.lengths(scaling.replace(G, limit=10**9), 100_000)
    assert whole.mean() == pytest.approx(1024, rel=0.02) and np.log(whole).std() == pytest.approx(0.8, rel=0.02)
    assert drawn.max() == 4096 and (drawn == np.minimum(whole, 4096)).all()


def test_rows_are_dealt_and_cut_as_in_training():
    n, gpus, tokens = 37, 3, 9000
    widths = (G.prompt + scaling.lengths(G, n)).tolist()
    attention = torch.zeros(n + 1, max(widths), dtype=torch.long)
    for row, width in enumerate(widths):
        attention[row, :width] = 1
    everything = batch.Batch(*[attention] * 3, torch.zeros(n + 1), attention.float())
    config = SimpleNamespace(micro_batch_size=None, shard=False)
    run = SimpleNamespace(config=config, micro_batch=tokens, rank=0, world=gpus, device="cpu")
    pieces = batch.micro_batches(run, everything, torch.arange(n))
    theirs = [(len(rows), max(widths[row] for row in rows.tolist())) for rows in pieces]
    assert scaling.micro_batches(G, n, gpus, tokens) == theirs

    counts = scaling.live(G, n, gpus, 5)
    assert counts.shape == (3, 3, 4096)
    lengths = scaling.lengths(G, n)
    for rank in range(gpus):
        mine = list(ranks.share(n, rank, gpus))
        for part in range(3):
            its = lengths[mine[5 * part : 5 * part + 5]]
            assert counts[rank, part].tolist() == [(its > t).sum() for t in range(4096)]


# ---- Waiting ----


def test_equal_lengths_lose_nothing():
    ways = scaling.rollout_ways(scaling.replace(G, sigma=0.0), SHAPES["7B"], 128, 8, 16, 0)
    assert ways["waiting"] == 0 and abs(ways["lost"]) < 0.01 and ways["longest"] == ways["of a GPU"]
    assert ways["today"] == pytest.approx(ways["handed out"], rel=0.01)


def test_ways_to_sample_by_hand():
    drawn = np.array([3, 1, 1, 2])
    assert scaling.handed_out(drawn, 2).tolist() == [2, 2, 2, 1]  # 3 beside 1, 1, 2
    assert scaling.handed_out(drawn, 9).tolist() == [4, 2, 1] and scaling.handed_out(drawn, 1).tolist() == [1] * 7
    ways = scaling.rollout_ways(G, SHAPES["7B"], 512, 8, 16, 0)
    assert ways["full"] < ways["handed out"] < ways["today"] and ways["dropped"] < ways["today"]


# ---- Bytes ----


def test_bytes_sent_by_hand():
    P, seven = 7_615_616_512, SHAPES["7B"]
    assert scaling.sent(seven, 1, 8)["step"] == pytest.approx(7 * P) == 8 * P * 7 / 8
    assert scaling.sent(seven, 1, 1)["step"] == 0
    shared = scaling.sent(seven, 8, 128)
    assert (shared["step"], shared["micro-batch"]) == pytest.approx((1.75 * P, 7 * P))
    assert shared["between"] == pytest.approx(2 * 15 / 16 * 4 * P / 8)
    assert scaling.sent(seven, 8, 8)["between"] == 0
    seconds = scaling.sent_seconds(G, seven, 8, 128)
    assert seconds["micro-batch"] == pytest.approx(7 * P / 360e9) and seconds["between"] == pytest.approx(
        shared["between"] / 40e9
    )
    assert scaling.sent_seconds(G, seven, 128, 128)["micro-batch"] == pytest.approx(8 * P * 127 / 128 / 320e9)


def count_bytes(rank: int, folder: str) -> None:
    """One of four ranks, in two copies: what a rollout and a micro-batch with checkpointing hand to each collective."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    seen: Counter[str] = Counter()
    inside = []

    def counted(name: str, kind: str) -> None:
        call = getattr(dist, name)

        def wrapped(*args, **kwargs):
            if not inside:
                tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
                seen[kind] += max(x.numel() * x.element_size() for x in tensors)
            inside.append(name)
            try:
                return call(*args, **kwargs)
            finally:
                inside.pop()

        setattr(dist, name, wrapped)

    settings = TINY.config()
    whole = Qwen2ForCausalLM(settings) if rank == 0 else None
    with torch.device("meta"):
        empty = Qwen2ForCausalLM(settings)
    model = shard.shard(empty, whole, shard.make_mesh(2, torch.device("cpu")), torch.bfloat16, torch.device("cpu"))
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    kinds = {"gather": ("all_gather_single", "all_gather_into_tensor"), "all-reduce": ("all_reduce",)}
    kinds["reduce"] = ("reduce_scatter_single", "reduce_scatter_tensor")
    for kind, names in kinds.items():
        for name in names:
            if hasattr(dist, name):
                counted(name, kind)
    found = []
    with shard.gathered(model):
        pass
    found.append(dict(seen))
    for _ in range(2):
        seen.clear()
        ids = torch.ones(2, 8, dtype=torch.long)
        mask = torch.ones_like(ids)
        mask[:, 0] = 0
        token_logprobs(model, ids, torch.ones_like(ids), mask)[0].sum().backward()
        found.append(dict(seen))
    if rank == 0:
        torch.save(found, os.path.join(folder, "found.pt"))
    dist.destroy_process_group()


def test_bytes_of_a_sharded_micro_batch_are_those_of_its_collectives(tmp_path):
    processes = [PROCESSES.Process(target=count_bytes, args=(rank, str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    assert exit_codes(processes) == [0] * 4
    rollout, first, second = torch.load(tmp_path / "found.pt")
    P = scaling.parameters(TINY)
    assert rollout == {"gather": 2 * P}
    assert second == {"gather": 2 * 2 * P, "reduce": 4 * P, "all-reduce": 4 * P // 2}, "size 2, two copies"
    assert first["reduce"] == second["reduce"] and first["all-reduce"] == second["all-reduce"]
    sent = scaling.sent(TINY, 2, 4)
    assert sent["step"] == rollout["gather"] / 2
    assert sent["micro-batch"] == (second["gather"] + second["reduce"]) / 2
    assert sent["between"] == second["all-reduce"]  # 2 (n - 1) / n for n = 2


def test_what_every_rank_holds_of_all_completions():
    made = [Completion(list(range(1000, 1050)), [-0.5] * 50, False) for _ in range(2)]
    groups = [SimpleNamespace(prompt_ids=[1, 2], completions=made, rewards=torch.tensor([0.0, 1.0]))]
    collated = batch.collate(groups, torch.zeros(2), False, torch.device("cpu"))
    planes = [x for x in vars(collated).values() if x is not None and x.dim() == 2]
    weights = 8  # a float64 of each position, in `train.update`
    assert sum(x.element_size() for x in planes) + weights == scaling.BATCH_BYTES
    wire, held = scaling.of_completion_token()
    assert 9 + 3 < wire < 9 + 5 + 0.1  # a double, and an int of two bytes or four, each with a byte that says so
    assert held == 28 + 24 + 2 * 8
