"""The budgets of tokens that a run measures, here on a pretended GPU. A rollout and an update that fill them take what
the straight line says.

    python -m infra.test_memory         prints the tables of docs/distributed.md; takes minutes and 2 GB
"""

import json
import math
import os
import random
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, Qwen2Config

import conftest
import train
from config import Config, UserError
from infra import faults, memory
from infra.command_line import parse, ready
from infra.decoding import decoding
from infra.lora import add_adapters
from infra.model import Opened, loading_options
from infra.pretend_gpu import gpu, install, needs_pretended_gpu, on_pretended_gpu
from infra.run_folder import provenance
from rollout import Completion, rollout

# ---- Runs of models that have shapes, but no numbers ----

FIELDS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
FIELDS += ["num_key_value_heads", "tie_word_embeddings"]
SHAPES = {
    "toy": (100, 512, 64, 1, 8, 4, False),
    "tiny": (1000, 512, 1024, 2, 8, 4, False),
    # Qwen2.5:
    "0.5B": (151_936, 896, 4864, 24, 14, 2, True),
    "1.5B": (151_936, 1536, 8960, 28, 12, 2, True),
    "7B": (152_064, 3584, 18_944, 28, 28, 4, False),
    "14B": (152_064, 5120, 13_824, 48, 40, 8, False),
}


def one_of_eight() -> None:
    """Make this process rank 0 of 8. The other ranks do not exist: every message from them is a copy of what
    this rank sends."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    conftest.replace("infra.ranks.gather", lambda _: lambda made: made * 8)
    conftest.replace("infra.shard.set_model_state_dict", lambda _: lambda *args, **settings: None)
    dist.all_gather_object = lambda out, own: out.__setitem__(slice(None), [own] * 8)  # out[:] = [own] * 8


class Counting:
    """A tokenizer of texts that are numbers: "7" has 7 tokens. The first token of each text is different."""

    eos_token_id, eos_token, chat_template = 1, "</s>", None

    def __call__(self, texts: list[str]) -> dict:
        return {"input_ids": [[3 + i] + [2] * (int(text) - 1) for i, text in enumerate(texts)]}

    def decode(self, ids: list[int], **settings) -> str:
        return ""


def some_reward(completions: list[str], **columns) -> list[float]:
    return [float(i % 3) for i in range(len(completions))]


def set_up(shape: str, gigabytes: float, prompt: int, length: int, flags: str) -> tuple[train.Run, list[str]]:
    """Make a run on a pretended GPU of this size, with prompts of `prompt` tokens and completions of up to `length`.
    Return it and its notes."""
    if "--shard" in flags:
        one_of_eight()
    sizes = dict(zip(FIELDS, SHAPES[shape]))
    config = Qwen2Config(**sizes, max_position_embeddings=32_768, eos_token_id=1, bos_token_id=None)
    gpu.capacity = gigabytes * 1e9

    def load(cfg: Config) -> torch.nn.Module:
        with torch.device("meta" if cfg.shard else "cuda"):
            return AutoModelForCausalLM.from_config(config, dtype=loading_options(cfg)["dtype"]).eval()

    def opened(_: str, cfg: Config) -> Opened:
        adapt = partial(add_adapters, rank=cfg.lora_rank, alpha=1) if cfg.lora_rank else None
        return Opened(config, Counting(), partial(load, cfg), adapt)

    conftest.replace("infra.model.open_model", lambda _: opened)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text(f'{{"prompt": "{prompt}"}}\n' * 64)
        flags = f"--num_generations 8 {flags} --model Qwen --data {prompts} --reward infra.test_memory:some_reward"
        flags += f" --max_completion_length {length} --eval_every 0 --warmup_steps 0 --out {folder}/out"
        run, _, noted = train.set_up(ready(parse(flags.split(), on_gpu=True), on_gpu=True), torch.device("cuda"))
        return run, noted


def used(shape: str, gigabytes: float, prompt: int, length: int, flags: str) -> list[tuple[int, float, float, float]]:
    """Let a run choose its budgets, and use them up. Return for the rollout and for the update: the budget, and how
    many GB may be in use, are in use on the straight line, and were in use."""
    run, noted = set_up(shape, gigabytes, prompt, length, flags)
    cfg, world, rng = run.config, 8 if "--shard" in flags else 1, np.random.default_rng(0)

    # Two steps, of which the first makes Adam's moments. Each rank has at least two full micro-batches.
    def sampled(model, own_prompts: list[list[int]], *rest, **settings) -> list[Completion]:
        return [Completion(rng.integers(2, 900, length), np.zeros(length), truncated=True) for _ in own_prompts]

    conftest.replace("train.rollout", lambda _: sampled)
    groups = math.ceil(2 * cfg.minibatches * cfg.micro_batch_tokens / (prompt + 8 * length))
    run.config = replace(cfg, prompts_per_step=groups * world)
    for step in (1, 2):
        conftest.at("train.collate", 1, lambda: setattr(gpu, "peak", gpu.held))
        train.training_step(run, step)
    assert run.limits.tokens == cfg.micro_batch_tokens, "memory ran out"
    peak_of_step, peaks = gpu.peak, []

    # Two rollouts of 4 tokens. The first has a full cache. The second reads as many different prompts as there may be.
    rows = cfg.rollout_tokens // (prompt + length)
    few = replace(run.sampling, max_completion_length=4, tokens_at_once=10**9)

    def progress(tokens: int, unfinished: int) -> None:
        peaks.append(gpu.peak)
        gpu.peak = gpu.held

    with decoding(run.model, getattr(torch, cfg.sampler_dtype), cfg.decode, 4):
        rollout(run.model, [[0] * (prompt + length - 4)] * rows, rng.random((rows, 4)), few, progress=progress)
        del peaks[0]  # of reading a prompt of that length, which no rollout does
        prompts = [[2 + i // 8 % 900] + [0] * (prompt - 1) for i in range(rows)]
        rollout(run.model, prompts, rng.random((rows, 4)), few, progress=progress)

    found = re.findall(r"(\d+) \((\d+) tokens take (\S+) GB, \d+ (?:at most )?(\S+); (\S+) of (\S+) GB", noted[-1])
    table = []
    for figures, peak in zip(found, (max(peaks), peak_of_step), strict=True):
        budget, n, one, two, room, free = map(float, figures)
        held = gigabytes - free
        table.append((int(budget), held + room, held + one + (two - one) * (budget / n - 1), peak / 1e9))
    return table


ADAPTERS, CHECKPOINTING = "--lora_rank 16 --gradient_checkpointing", "--gradient_checkpointing"


@needs_pretended_gpu
@pytest.mark.parametrize("flags", ["--shard", f"{ADAPTERS} --decode graph --rollout_dtype float32"])
def test_budgets_take_what_the_straight_line_says(flags):
    """A micro-batch of whole rows may have a few tokens less than the budget. The tensors of the whole step, which are
    not on the line, are a few percent with so small a model. The figures have three digits."""
    for _, room, line, peak in on_pretended_gpu(used, "tiny", 0.25, 32, 16, flags, shapes_only=True):
        assert line <= room and line * 0.9 <= peak <= line * 1.03


# ---- How a budget is chosen ----

LINES = [  # bytes of n = 8 tokens, bytes for each further token, free bytes, most tokens, --shard; the expected budget
    (100, 5, 1000, 1 << 15, False, 128),  # 100 + 120 * 5 is at most 800, and 100 + 248 * 5 is not
    (100, 5, 1000, 1 << 15, True, 128),  # 700 is at most 700
    (100, 5, 999, 1 << 15, True, 64),
    (100, 5, 1000, 100, False, 64),  # the next budget would be above the most
    (600, 5, 1000, 1 << 15, False, 8),  # 16 tokens are not tried: they might take 1200
    (900, 5, 1000, 1 << 15, False, 4),  # one completion, because even this may be too much
]


@pytest.mark.parametrize("one, each, free, most, shard, expected", LINES)
def test_a_budget_fills_its_share_of_the_free_memory(one, each, free, most, shard, expected, monkeypatch):
    fake, tried = SimpleNamespace(held=50, peak=0), []
    answers = dict(memory_allocated=lambda: fake.held, max_memory_allocated=lambda: fake.peak)
    # 10 bytes are reserved by PyTorch, but not allocated.
    answers |= dict(memory_reserved=lambda: fake.held + 10, mem_get_info=lambda: (free - 10, 10**6))
    for name, answer in (answers | dict(reset_peak_memory_stats=lambda: setattr(fake, "peak", fake.held))).items():
        monkeypatch.setattr(torch.cuda, name, answer)

    def compute(tokens: int) -> None:
        tried.append(tokens)
        fake.peak = max(fake.peak, fake.held + one + (tokens - 8) * each)

    budget, found = memory.largest_budget(compute, 8, 4, most, shard)
    assert budget == expected and str(budget) in found
    assert tried == ([8, 16] if 2 * one <= free else [8])


# ---- A trial ----


def trial(flags: str, fits: int = 10**9) -> tuple[str, Config, list[int], list[dict]]:
    """Make a trial in which memory runs out if a micro-batch may have more than `fits` tokens. Return its line for the
    screen, the settings with budgets, the limits that were tried, and the state of everything before and after it."""
    conftest.replace("infra.memory.CHUNK", lambda _: {"cuda": 64})
    conftest.replace("infra.test_memory.Counting.decode", lambda _: pytest.fail)  # no stop string may end a rollout
    lines, limits, states = [], [], []

    def state(run: train.Run) -> dict:
        return dict(
            generators=(torch.get_rng_state().tolist(), random.getstate(), repr(np.random.get_state())),
            weights=[float(p.detach().sum().cpu()) for p in run.model.parameters()],
            gradients=[p.grad for p in run.model.parameters()],
            adam=dict(run.optimizer.state),
            memory=(gpu.held, torch.cuda.max_memory_allocated()),
        )

    def watched(choose_budgets: Callable) -> Callable:
        def choosing(run: train.Run, *rest) -> str:
            torch.cuda.reset_peak_memory_stats()
            states.append(state(run))
            lines.append(choose_budgets(run, *rest))
            states.append(state(run))
            return lines[0]

        return choosing

    def limited(accumulate: Callable) -> Callable:
        def call(run: train.Run, batch) -> tuple:
            limits.append(run.limits.tokens)
            if run.limits.tokens > fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return accumulate(run, batch)

        return call

    conftest.replace("infra.memory.choose_budgets", watched)
    conftest.replace("train.accumulate", limited)
    config = set_up("toy", 80, 8, 16, flags)[0].config
    return lines[0], config, limits, states


@needs_pretended_gpu
def test_a_trial_computes_full_rows_and_then_twice_as_many_and_leaves_only_the_budgets():
    """A row is a prompt of 8 tokens and 8 completions of 16. A chunk of the output head has 64 tokens here, so one row
    fills it. There is memory for the largest budgets that are allowed: 24 tokens times a power of two."""
    flags = f"{CHECKPOINTING} --top_k 5 --decode graph --stop x"
    line, config, limits, (before, after) = on_pretended_gpu(trial, flags)
    assert limits == [136, 136, 272] and (config.rollout_tokens, config.micro_batch_tokens) == (24 << 17, 24 << 10)
    assert f"rollout_tokens {24 << 17} (24 tokens" in line and f"micro_batch_tokens {24 << 10} (136 " in line
    for name, value in before.items():
        assert after[name] == value, name


def test_what_is_given_is_not_tried(monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    for given in (dict(micro_batch_size=3), dict(steps=0)):  # an evaluation has no micro-batch
        cfg = replace(Config(), max_completion_length=5, rollout_tokens=100, **given)
        run = SimpleNamespace(config=cfg, model=conftest.tiny_model())
        assert memory.choose_budgets(run, 8, pytest.fail) == "" and run.config is cfg


@needs_pretended_gpu
def test_a_row_that_does_not_fit_is_split_and_a_completion_that_does_not_fit_ends_the_run():
    """If 100 tokens fit, then the row of 136 tokens does not, but half of it does, 68 tokens. The budget is 48 of them:
    two completions, each with its prompt."""
    _, config, limits, _ = on_pretended_gpu(trial, "", 100, shapes_only=True)
    assert limits[:3] == [136, 68, 68] and config.micro_batch_tokens == 48
    with pytest.raises(UserError, match="out of memory in an update"):
        on_pretended_gpu(trial, "", 0, shapes_only=True)
    with pytest.raises(torch.OutOfMemoryError):  # weights and gradients of this model are 23 MB each, Adam is 46 MB
        on_pretended_gpu(set_up, "tiny", 0.06, 8, 16, "", shapes_only=True)


def test_a_made_up_batch_has_all_that_a_batch_may_have():
    cfg = replace(Config(), max_completion_length=5, top_k=3, score_centering=2, mask_truncated=True)
    run = SimpleNamespace(config=cfg, model=conftest.tiny_model(), device=torch.device("cpu"))
    batch = memory.made_up_batch(run, 4, 2, 3)
    assert batch.ids.shape == (6, 9) and batch.prompts.tolist() == [0, 0, 0, 1, 1, 1] and batch.has_gradient.all()
    assert all(x.shape == (6, 9) for x in (batch.weights, batch.old_logp, batch.ref_logp)) and batch.mask[:, 4:].all()
    assert batch.head_ids.shape == (6, 9, 2) and batch.sampler_head_logp.shape == (6, 9, 3)
    assert [None if ids is None else len(ids) for ids in batch.kept[5]] == [None] * 4 + [3] * 5
    run.config = replace(cfg, keep_set=False)
    assert memory.made_up_batch(run, 4, 2, 3).kept is None


# ---- Whole runs ----


def on_a_gpu(*gigabytes: float) -> None:
    """Give each rank a pretended GPU of its own size, and print the limit of tokens whenever an update is computed."""

    def printing(accumulate: Callable) -> Callable:
        def call(run: train.Run, batch) -> tuple:
            faults.say(f"rank {os.environ.get('RANK', 0)}: {run.limits.tokens} of {len(batch)}")
            return accumulate(run, batch)

        return call

    install(gigabytes[int(os.environ.get("RANK", 0))] * 1e9, gpus=8)
    conftest.replace("train.accumulate", printing)
    conftest.replace("infra.memory.CHUNK", lambda _: {"cuda": 64})


@needs_pretended_gpu
def test_all_ranks_make_the_same_trials_and_choose_what_fits_on_the_smallest(sorting, tmp_path):
    given = sorting | dict(max_completion_length=4, shard=True, steps=1)
    shown = conftest.run(given, tmp_path / "out", partial(on_a_gpu, 80, 0.03), world=2)
    limits = [re.findall(rf"rank {rank}: (.*)", shown) for rank in range(2)]
    assert len(limits[0]) == 4 and limits[0] == limits[1]  # three in the trial, and one in the step
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["settings"]
    rollout_tokens, micro_batch_tokens = settings["rollout_tokens"], settings["micro_batch_tokens"]
    assert f"rollout_tokens {rollout_tokens} (" in shown and f"micro_batch_tokens {micro_batch_tokens} (" in shown
    # With 80 GB on both ranks, the budgets would be above half of their limits.
    assert rollout_tokens <= memory.MOST_ROLLOUT_TOKENS / 4 and micro_batch_tokens <= memory.MOST_MICRO_BATCH_TOKENS / 4
    shown = conftest.run(given | dict(steps=2), tmp_path / "out", partial(on_a_gpu, 80, 0.03), world=2)
    assert shown.count("rank 0: ") == 1, "a run that goes on makes no trial"


# ---- The tables of docs/distributed.md ----

CONTEXT = 0.6  # GB that CUDA itself takes
CASES = {  # shape, GB of the GPU, tokens of a prompt and of a completion, flags
    "0.5B": ("0.5B", 24, 256, 1024, ""),
    "1.5B, reference, two updates": ("1.5B", 80, 256, 1024, "--beta 0.1 --minibatches 2"),
    "7B, adapters": ("7B", 24, 256, 1024, ADAPTERS),
    "7B on 8": ("7B", 80, 256, 1024, "--shard"),
    "7B on 8, 16k": ("7B", 80, 256, 16_384, f"--shard {CHECKPOINTING}"),
}


def budgets(shape: str, gigabytes: float) -> str:
    """Return how many thousands of tokens fit into a rollout and into a micro-batch with adapters and checkpointing."""
    try:
        config = set_up(shape, gigabytes - CONTEXT, 256, 1024, ADAPTERS)[0].config
    except (UserError, torch.OutOfMemoryError):
        return "no"
    return f"{config.rollout_tokens / 1e3:.0f}k/{config.micro_batch_tokens / 1e3:.0f}k"


if __name__ == "__main__":
    print(json.dumps(provenance()))
    print("\n| | GPU, GB | rollout: tokens | line | used | update: tokens | line | used |", "|---" * 8 + "|", sep="\n")
    for name, (shape, gigabytes, *rest) in CASES.items():
        found = on_pretended_gpu(used, shape, gigabytes - CONTEXT, *rest, shapes_only=True)
        cells = [f"{budget:,} | {line:.1f} | {peak:.1f}" for budget, _, line, peak in found]
        print(f"| {' | '.join([name, str(gigabytes), *cells])} |", flush=True)
    print("\n| | 16 GB | 24 GB | 48 GB | 80 GB |\n|---|---|---|---|---|")
    for name in ("0.5B", "1.5B", "7B", "14B"):
        cells = [on_pretended_gpu(budgets, name, gigabytes, shapes_only=True) for gigabytes in (16, 24, 48, 80)]
        print(f"| {' | '.join([name, *cells])} |", flush=True)
