"""The plot, the grid, the figures of a step and the estimate of memory."""

import json
import math
import statistics

import pytest
import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from advantage import group_advantages
from config import Config, UserError, resolve
from infra import memory
from infra.report import share_of_advantage
from tools import ablate, plot
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


def test_the_picture_is_written_twice_and_is_the_same_each_time(tmp_path):
    run = folder(tmp_path / "run", [{"step": s, "reward": s / 10, "eval/accuracy": 0.5, "kl": None} for s in range(9)])
    words = [str(run), "--out", str(tmp_path / "a.png")]
    plot.main(words)
    first = (tmp_path / "a.svg").read_bytes()
    plot.main(words)
    assert (tmp_path / "a.svg").read_bytes() == first and (tmp_path / "a.png").stat().st_size > 1000
    assert first.count(b"held-out accuracy") == 1 and b"KL to the reference" not in first  # nothing to draw there


def test_any_metric_is_a_panel_and_what_no_run_has_is_named(tmp_path):
    runs = [folder(tmp_path / b, [{"step": 1, "reward/x": 0.5}], beta=float(b), seed=1) for b in ("0.0", "0.1")]
    (tmp_path / "0.0.log").touch()
    plot.main(
        [*map(str, tmp_path.iterdir()), "--out", str(tmp_path / "a.png"), "--panels", "reward/x", "--columns", "1"]
    )
    drawn = (tmp_path / "a.svg").read_text()
    assert [drawn.count(f"<!-- {text} -->") for text in ("reward/x", "beta 0.0", "beta 0.1")] == [1, 1, 1]
    with pytest.raises(SystemExit, match=r"no run has rewardx; there are reward/x, step"):
        plot.main([*map(str, runs), "--panels", "rewardx"])


def test_no_two_lines_of_a_picture_look_alike():
    assert len({str(plot.style(i)) for i in range(35)}) == 35


# ---- ablate ----


def test_the_t_values():
    """Each is where the integral of Student's density reaches 0.975."""
    for df, t in enumerate(ablate.T, 1):
        x = torch.linspace(0, t, 20001, dtype=torch.float64)
        scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
        mass = torch.trapezoid(scale * (1 + x**2 / df) ** (-(df + 1) / 2), x)
        assert float(mass) == pytest.approx(0.475, abs=3e-5), df


def test_paired_differences():
    mean, half = ablate.interval([1.0, 2.0, 3.0])
    assert mean == 2.0 and half == pytest.approx(4.303 / math.sqrt(3))
    assert ablate.interval([1.0, math.nan, 3.0])[1] == math.inf and ablate.interval([1.0])[1] == math.inf


def test_the_steps_of_a_figure():
    lines = [{"step": 0, "eval/accuracy": 0.1}]
    lines += [{"step": s, "entropy": s * 1.0, "length_incorrect": None if s == 5 else 7.0} for s in range(1, 7)]
    assert ablate.figure(lines, "entropy") == 5.0  # of 4, 5, 6
    assert ablate.figure(lines, "entropy:2-3") == 2.5 and ablate.figure(lines, "entropy:last") == 6.0
    assert ablate.figure(lines, "length_incorrect") == 7.0 and ablate.figure(lines, "eval/accuracy:last") == 0.1
    assert math.isnan(ablate.figure(lines, "length_incorrect:5-5"))
    with pytest.raises(SystemExit, match="entropie: no such metric; there are step, eval/accuracy, entropy"):
        ablate.figure(lines, "entropie")


def one_step(accuracy: float, length: float) -> list[dict]:
    return [{"step": 0, "eval/accuracy": 0.0}, {"step": 1, "completion_length": length, "eval/accuracy": accuracy}]


def test_the_table_says_what_can_be_told_from_noise():
    a = [one_step(0.50, 10), one_step(0.60, 11), one_step(0.70, 12)]
    b = [one_step(0.61, 10), one_step(0.70, 12), one_step(0.80, 11)]  # better for each seed; length as it happens
    names = ["eval/accuracy:last", "completion_length"]
    rows = ablate.table([{"beta": "0"}, {"beta": "1"}], [a, b], names).splitlines()
    assert rows[0] == "| figure | beta | mean ± std of 3 seeds | minus 0, 95 % interval | |"
    assert rows[2:] == [
        "| eval/accuracy:last | 0 | 0.600 ± 0.100 | | |",
        "| | 1 | 0.703 ± 0.095 | +0.103, +0.089 to +0.118 | **differs** |",
        "| completion_length | 0 | 11.00 ± 1.00 | | |",
        "| | 1 | 11.00 ± 1.00 | +0.00, -2.48 to +2.48 | not told from noise |",
    ]
    few = ablate.table([{"beta": "0"}, {"beta": "1"}], [a[:2], b[:2]], names)
    assert few.count("too few seeds") == 2 and "differs" not in few


def test_a_grid_is_every_combination_and_each_run_has_a_folder():
    args = ablate.parse("--vary a=1,2 --vary b=x,y --out o --figures entropy reward:1-2 -- --steps 3".split())
    assert args.flags == ["--steps", "3"] and args.figures == ["entropy", "reward:1-2"]
    folders = [str(ablate.folder_of(args.out, v, seed)) for v in args.variants for seed in args.seeds]
    assert folders[:4] == ["o/1-x-1", "o/1-x-2", "o/1-x-3", "o/1-y-1"] and len(set(folders)) == 12


@pytest.mark.parametrize("words", ["--vary a=1,2 --figures entropy:late", "--vary a", "--vary a=1,,2"])
def test_what_cannot_be_read_is_said_before_anything_runs(words, capsys):
    with pytest.raises(SystemExit):
        ablate.parse(f"--out o {words}".split())
    assert f"cannot be read: {words.split()[-1]}" in capsys.readouterr().err


def test_the_grid_repeats_nothing_and_its_table_runs_nothing(tmp_path, monkeypatch, capsys):
    def words(seeds: str) -> list[str]:
        given = f"--vary beta=0.0 --seeds {seeds} --jobs 1 --out {tmp_path} --figures completion_length --".split()
        return given + "--task sorting --steps 2 --prompts_per_step 2 --num_generations 2 --eval_every 0".split()

    ablate.main(words("1"))
    log = tmp_path / "0.0-1" / "metrics.jsonl"
    before = log.read_text(), log.stat().st_mtime_ns
    ablate.main(words("1,2"))
    assert (log.read_text(), log.stat().st_mtime_ns) == before
    of_each = [statistics.fmean(x["completion_length"] for x in lines[1:]) for lines in ablate.read(
        tmp_path, [{"beta": "0.0"}], ["1", "2"])[0]]  # fmt: skip
    made = (tmp_path / "table.md").read_text()
    assert f"| 0.0 | {statistics.fmean(of_each):.2f} ± " in made

    monkeypatch.setattr(ablate.subprocess, "run", None)  # whoever runs anything fails
    capsys.readouterr()
    ablate.main(["--table", *words("1,2")])
    assert capsys.readouterr().out == made
    with pytest.raises(SystemExit, match=r"0\.0-3: there is no such run"):
        ablate.main(["--table", *words("1,2,3")])
    log.write_text(before[0].splitlines()[0] + "\n")
    with pytest.raises(SystemExit, match=r"0\.0-1: not finished, 1 of 2 steps"):
        ablate.main(["--table", *words("1,2")])


def test_a_run_that_fails_stops_the_grid_and_says_where_to_look(tmp_path):
    with pytest.raises(SystemExit, match=r"0\.0-1 ended with 2; see .*0\.0-1\.log"):
        ablate.main(f"--vary beta=0.0 --seeds 1 --out {tmp_path} -- --task nonsense".split())
    assert "--task nonsense: must be one of" in (tmp_path / "0.0-1.log").read_text()


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


def test_sharded_each_rank_needs_its_part_and_a_whole_copy_to_sample():
    one = memory.needed(SETTINGS, settings(beta=0.1), 1, 10)
    part = memory.needed(SETTINGS, settings(beta=0.1, shard=True, shard_size=4), 8, 10)
    for name in ("weights", "Adam", "reference"):
        assert part[name] == one[name] / 4
    cache = one["rollout"] / 12
    assert part["rollout"] == one["weights"] + 2 * cache, "12 completions on 8 ranks"
    with pytest.raises(UserError, match="cannot fit"):  # though each of the parts would
        memory.check(part, one["weights"] + cache)


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
    with pytest.raises(UserError, match=r"cannot fit.*Try --gradient_checkpointing"):
        memory.check(need, need["weights"] * 3)
    between = need["weights"] + need["Adam"] + (need["update"] + need["one completion"]) / 2
    assert "in smaller parts" in memory.check(need, between)
    smaller = memory.needed(SETTINGS, settings(gradient_checkpointing=True), 1, 10)
    assert smaller["update"] < need["update"]
