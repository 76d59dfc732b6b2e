"""The plot, the grid, the figures of a step and the estimate of memory."""

import json
import math

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

import ablate
import memory
import plot
from advantage import group_advantages
from config import Config, Mistake, resolve
from report import share_of_advantage
from train import Group

# ---- plot ----


def folder(path, lines: list[dict], **settings):
    path.mkdir(parents=True)
    (path / "config.json").write_text(
        json.dumps({"settings": {"algorithm": "grpo", "seed": 0, "beta": 0.0} | settings})
    )
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_runs_of_several_seeds_are_one_line_and_the_legend_names_what_differs(tmp_path):
    lines = [{"step": 1, "reward": 0.5}]
    runs = [folder(tmp_path / f"{b}-{s}", lines, beta=b, seed=s) for b in (0.0, 0.1) for s in (0, 1, 2)]
    groups = plot.by_settings([plot.read(run) for run in runs])
    assert {label: len(of) for label, of in groups.items()} == {"beta 0.0": 3, "beta 0.1": 3}


def test_a_metric_that_is_null_leaves_a_gap():
    runs = [
        ({}, [{"step": 1, "kl": 1.0}, {"step": 2, "kl": None}]),
        ({}, [{"step": 1, "kl": 3.0}, {"step": 2, "kl": 5.0}]),
    ]
    steps, values = plot.series(runs, "kl")
    assert steps.tolist() == [1, 2] and values[:, 0].tolist() == [1.0, 3.0]
    assert math.isnan(values[0, 1]) and values[1, 1] == 5.0


def test_smoothing_is_a_centred_mean():
    values = torch.arange(20.0)[None].numpy() ** 2
    smoothed = plot.smooth(values, 5)
    assert smoothed[0, 10] == values[0, 8:13].mean() and smoothed[0, 0] == values[0, :3].mean()


def test_the_picture_is_written_twice_and_is_the_same_each_time(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", [{"step": s, "reward": s / 10, "eval/accuracy": 0.5, "kl": None} for s in range(9)])
    monkeypatch.setattr("sys.argv", ["plot.py", str(run), "--out", str(tmp_path / "a.png")])
    plot.main()
    first = (tmp_path / "a.svg").read_bytes()
    plot.main()
    assert (tmp_path / "a.svg").read_bytes() == first and (tmp_path / "a.png").stat().st_size > 1000
    assert b"KL to the reference" not in first  # nothing to draw there


# ---- ablate ----


def test_paired_differences():
    mean, half = ablate.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 / math.sqrt(3))


def test_the_table_says_what_can_be_told_from_noise():
    def run(accuracy: float, length: float) -> list[dict]:
        return [{"step": 0, "eval/accuracy": 0.0}, {"step": 1, "completion_length": length, "eval/accuracy": accuracy}]

    a = [run(0.50, 10), run(0.60, 11), run(0.70, 12)]
    b = [run(0.61, 10), run(0.70, 12), run(0.80, 11)]  # better for each seed; length as it happens
    row = ablate.table({"a": a, "b": b}).splitlines()[-1].split(" | ")
    assert row[0] == "| b − a"
    assert row[1].startswith("+0.103") and row[1].endswith("differs")
    assert row[3].endswith("no difference seen")
    assert "too few seeds" in ablate.table({"a": a[:2], "b": b[:2]})


# ---- the figures of a step ----


@pytest.mark.parametrize("scale", ["group", "none"])
def test_the_share_of_the_advantages_on_easy_and_hard_groups(scale):
    """Of binary rewards, with p right among G: sum |A| is 2 G p (1 - p), over the std where it is divided by."""
    G, right = 8, [1, 4, 6, 7, 8, 0]  # the last two are dead; 6 of 8 is the bound itself
    rewards = torch.tensor([[1.0] * n + [0.0] * (G - n) for n in right])
    advantages = group_advantages(rewards.flatten(), G, scale, "mean", eps=0.0).reshape(-1, G)
    groups = [Group({}, [], [], r, r[:, None], a) for r, a in zip(rewards, advantages)]
    never_trained_on = Group({}, [], [], torch.ones(G), torch.ones(G, 1))  # as dynamic sampling leaves behind
    p = torch.tensor(right) / G
    sizes = 2 * G * p * (1 - p)
    if scale == "group":
        sizes = sizes / (p * (1 - p) * G / (G - 1)).sqrt().clamp(min=1e-9)
    shares = (sizes / sizes.sum()).tolist()
    assert share_of_advantage([*groups, never_trained_on], 0.75, math.inf) == pytest.approx(shares[3])
    assert share_of_advantage([*groups, never_trained_on], -math.inf, 0.25) == pytest.approx(shares[0])
    assert shares[3] == pytest.approx(0.2075 if scale == "group" else 1 / 6, abs=1e-4)
    assert share_of_advantage(groups[4:], 0.75, math.inf) is None


def test_a_completion_without_a_reward_counts_for_nothing_in_them():
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, math.nan])  # 4 of 5 is easy, 4 of 6 would not be
    advantages = group_advantages(rewards, 6)
    group = Group({}, [], [], rewards, rewards[:, None], advantages)
    assert share_of_advantage([group], 0.75, math.inf) == 1.0


# ---- memory ----

SETTINGS = Qwen2Config(
    vocab_size=500, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip


def settings(**flags) -> Config:
    given = dict(prompts_per_step=3, num_generations=4, max_completion_length=20, micro_batch_tokens=512, eval_every=0)
    return resolve(Config(**(given | flags)), on_gpu=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_cache_are_what_a_model_has(dtype):
    model = Qwen2ForCausalLM(SETTINGS)
    weights = sum(p.numel() * 4 for p in model.parameters())
    cache = DynamicCache(config=SETTINGS)
    model.to(dtype)(torch.ones(12, 30, dtype=torch.long), past_key_values=cache, use_cache=True)
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    need = memory.needed(SETTINGS, settings(dtype=str(dtype).removeprefix("torch."), beta=0.1), 1, longest_prompt=10)
    copy = weights / 2 if dtype == torch.bfloat16 else 0
    assert need["weights"] == weights and need["Adam"] == 2 * weights
    assert need["reference"] == weights and need["rollout"] == copy + held
    halves = memory.needed(SETTINGS, settings(dtype=str(dtype).removeprefix("torch.")), 2, longest_prompt=10)
    assert halves["rollout"] == copy + held / 2 and halves["reference"] == 0


def test_activations_are_about_what_autograd_keeps():
    model, kept = Qwen2ForCausalLM(SETTINGS).train(), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = model.model(input_ids=torch.ones(8, 64, dtype=torch.long), use_cache=False)
    assert out.last_hidden_state is not None
    head = 2 * 256 * 500 * 4 + 500 * 64 * 4
    estimate = memory.needed(SETTINGS, settings(), 1, 10)
    assert estimate["update"] - estimate["weights"] - head == pytest.approx(sum(kept.values()), rel=0.15)


def test_what_cannot_fit_is_said_before_anything_is_loaded():
    need = memory.needed(SETTINGS, settings(), 1, 10)
    assert "rollout" in memory.check(need, 1e12)
    with pytest.raises(Mistake, match=r"cannot fit.*Try --gradient_checkpointing"):
        memory.check(need, need["weights"] * 3)
    between = need["weights"] + need["Adam"] + (need["update"] + need["update of one completion"]) / 2
    assert "in smaller parts" in memory.check(need, between)
    smaller = memory.needed(SETTINGS, settings(gradient_checkpointing=True), 1, 10)
    assert smaller["update"] < need["update"]
