"""Settings: presets, what wins over what, and every mistake named at once."""

import dataclasses
import math

import pytest

from config import ALGORITHMS, SWITCHES, TASKS, Config, resolve
from infra.command_line import OTHER_NAMES, check, parse, warnings

FIELDS = {field.name: field for field in dataclasses.fields(Config)}


def mistakes(capsys, line: str) -> list[str]:
    with pytest.raises(SystemExit) as end:
        parse(line.split(), on_gpu=False)
    assert end.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == "" and all(line.startswith("error: ") for line in shown.err.splitlines())
    return [line.removeprefix("error: ") for line in shown.err.splitlines()]


# ---- Presets and defaults ----

PAPERS = {  # as in the README
    "grpo": dict(normalization="sequence", scale_rewards="group", baseline="mean", objective="clip", ratio="token",
                 epsilon_low=0.2, epsilon_high=0.2, dynamic_sampling=0),
    "dr_grpo": dict(normalization="constant", scale_rewards="none", baseline="mean", objective="clip", ratio="token",
                    epsilon_low=0.2, epsilon_high=0.2, dynamic_sampling=0),
    "dapo": dict(normalization="global", scale_rewards="group", baseline="mean", objective="clip", ratio="token",
                 epsilon_low=0.2, epsilon_high=0.28),
    "gspo": dict(normalization="sequence", scale_rewards="group", baseline="mean", objective="clip", ratio="sequence",
                 epsilon_low=3e-4, epsilon_high=4e-4, dynamic_sampling=0),
    "cispo": dict(normalization="global", scale_rewards="group", baseline="mean", objective="cispo", ratio="token",
                  epsilon_high=5.0, dynamic_sampling=0),
    "rloo": dict(normalization="sum", scale_rewards="none", baseline="leave_one_out", objective="reinforce",
                 dynamic_sampling=0),
    "reinforce++": dict(normalization="global", scale_rewards="batch", baseline="batch", objective="clip",
                        ratio="token", epsilon_low=0.2, epsilon_high=0.2, dynamic_sampling=0),
}  # fmt: skip


@pytest.mark.parametrize("algorithm", PAPERS)
def test_a_preset_is_the_papers_and_sets_nothing_else(algorithm):
    assert PAPERS.keys() == ALGORITHMS.keys()
    ours = vars(parse(["--algorithm", algorithm], on_gpu=False))
    assert ours | PAPERS[algorithm] == ours
    assert algorithm != "dapo" or ours["dynamic_sampling"] > 0
    plain = vars(parse([], on_gpu=False))
    changed = {name for name, value in ours.items() if value != plain[name]}
    assert changed <= {"algorithm", "out", "dynamic_sampling", *SWITCHES}


def test_a_flag_by_hand_wins():
    by_hand = parse("--algorithm dapo --epsilon_high 0.3 --normalization sequence --dynamic_sampling 0".split(), False)
    assert (by_hand.epsilon_high, by_hand.normalization, by_hand.dynamic_sampling) == (0.3, "sequence", 0)
    assert by_hand.epsilon_low == 0.2
    by_hand = parse("--task sorting --num_generations 3 --learning_rate 0.5 --steps 7 --warmup_steps 0".split(), False)
    assert (by_hand.num_generations, by_hand.learning_rate, by_hand.steps, by_hand.warmup_steps) == (3, 0.5, 7, 0)


def test_defaults():
    plain = parse([], on_gpu=False)
    assert (plain.task, plain.out, plain.num_generations, plain.prompts_per_step) == (
        "addition",
        "runs/addition-grpo-0",
        8,
        16,
    )
    assert (plain.steps, plain.learning_rate, plain.max_completion_length) == (80, 2e-4, 64)
    assert (plain.dtype, plain.micro_batch_size, plain.micro_batch_tokens) == ("float32", None, 2048)
    gpu = parse([], on_gpu=True)
    assert gpu.dtype == "bfloat16" and gpu.micro_batch_tokens > 2048
    assert parse(["--micro_batch_size", "3"], on_gpu=True).micro_batch_tokens is None
    assert parse(["--dtype", "float32"], on_gpu=True).dtype == "float32"
    assert parse("--task sorting --algorithm gspo --seed 4".split(), False).out == "runs/sorting-gspo-4"


@pytest.mark.parametrize("task", TASKS)
def test_nothing_stays_open_once_resolved(task):
    resolved = resolve(Config(task=task, model="m", data="d.jsonl", reward=["r.py:f"]), on_gpu=False)
    may_be_none = {"attn_implementation", "delta", "micro_batch_size", "report_to", "tis_cap"}
    assert {name for name, value in vars(resolved).items() if value is None} == may_be_none
    assert resolved.reward_weights == [1.0]


def test_resolving_again_changes_nothing():
    once = resolve(Config(algorithm="dapo", task="sorting"), on_gpu=True)
    assert resolve(once, on_gpu=True) == once


def test_data_of_ones_own_and_models():
    own = parse("--data d.jsonl --model m --reward a.py:f b.py:g --reward_weights 1 0.5".split(), False)
    assert (own.task, own.reward, own.reward_weights) == ("data", ["a.py:f", "b.py:g"], [1.0, 0.5])
    assert own.learning_rate == 1e-6
    assert parse("--data d.jsonl --task sorting".split(), False).task == "sorting"
    assert parse("--task addition --model folder".split(), False).learning_rate == 1e-6, "not the small model's"


def test_flags_may_be_written_either_way():
    assert parse("--micro-batch-size=3 --mask_truncated --kl_importance true --beta .1".split(), False) == parse(
        "--micro_batch_size 3 --mask-truncated true --kl-importance --beta 0.1".split(), False
    )


# ---- Mistakes ----


def test_all_mistakes_at_once(capsys):
    line = "--steps many --lerning_rate 1 --algorithm ppo --temperature 0 --micro_batch_size 1 --micro_batch_tokens 9 x"
    told = mistakes(capsys, line)
    for word in ("--steps many", "--lerning_rate", "--algorithm ppo", "--temperature 0", "--micro_batch_size and"):
        assert sum(word in mistake for mistake in told) == 1, word


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--lerning_rate 1", "--learning_rate"),
        ("--num-generation 8", "--num_generations"),
        ("--epsilon-hi=0.3", "--epsilon_high"),
        ("--lr 1e-5", "--learning_rate"),
        ("--max_steps 5", "--steps"),
        ("--loss_type dapo", "--normalization"),
        ("--per_device_train_batch_size 4", "--micro_batch_size"),
        ("--steps_per_generation 4", "--minibatches"),
        ("--num_iteration 2", "--num_iterations"),
        ("--output_dir out", "--out"),
    ],
)
def test_an_unknown_flag_is_an_error_that_suggests_one(capsys, given, meant):
    (told,) = mistakes(capsys, given)
    assert told.startswith(given.split()[0]) and f"did you mean {meant}?" in told


def test_other_names_lead_to_flags_that_exist():
    assert set(OTHER_NAMES.values()) <= FIELDS.keys() and not OTHER_NAMES.keys() & FIELDS.keys()


@pytest.mark.parametrize("line", ["--zzz 1", "oops", "--steps 3 oops", "--step 3 --zzz=4"])
def test_what_belongs_to_no_flag_is_an_error(capsys, line):
    assert mistakes(capsys, line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--steps 1.5", ["--steps 1.5", "whole number"]),
        ("--beta much", ["--beta much", "a number"]),
        ("--mask_truncated perhaps", ["--mask_truncated perhaps", "true or false"]),
        ("--reward r.py:f r.py:g --reward_weights 1 heavy", ["--reward_weights heavy", "a number"]),
        ("--steps", ["--steps"]),
        ("--steps 0", ["--steps 0", "at least 1"]),
        ("--prompts_per_step 0", ["--prompts_per_step 0", "at least 1"]),
        ("--num_generations -1", ["--num_generations -1", "at least 1"]),
        ("--seed -1", ["--seed -1", "at least 0"]),
        ("--samples_per_step -2", ["at least -1"]),
        ("--top_p 1.5", ["--top_p 1.5", "at most 1"]),
        ("--top_p 0", ["--top_p 0", "above 0"]),
        ("--adam_beta2 1", ["--adam_beta2 1", "below 1"]),
        ("--temperature 0", ["--temperature 0", "above 0"]),
        ("--temperature nan", ["--temperature nan"]),
        ("--temperature inf", ["--temperature inf", "finite"]),
        ("--learning_rate -0.001", ["--learning_rate -0.001", "above 0"]),
        ("--entropy_coef nan", ["--entropy_coef nan"]),
        ("--beta inf", ["--beta inf"]),
        ("--beta -1e-3", ["--beta -0.001", "at least 0"]),
        ("--data d.jsonl --model m --reward r.py:f --reward_weights nan", ["--reward_weights", "nan"]),
        ("--algorithm ppo", ["--algorithm ppo", "must be one of grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce++"]),
        ("--normalization bnpo", ["--normalization bnpo", "sequence, global, constant, sum"]),
        ("--dtype float16", ["--dtype float16", "auto, float32, bfloat16"]),
        ("--task math", ["--task math", "addition, sorting, countdown, gsm8k, tldr, data"]),
        ("--report_to paper", ["--report_to paper", "tensorboard, wandb"]),
    ],
)
def test_a_value_that_cannot_be(capsys, line, words):
    (told,) = mistakes(capsys, line)
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--num_generations 1", ["a group of one", "at least 2", "--baseline batch --scale_rewards batch"]),
        ("--minibatches 200", ["--minibatches 200", "128 completions"]),
        ("--micro_batch_size 3 --micro_batch_tokens 99", ["one of them"]),
        ("--task gsm8k", ["--task gsm8k", "needs --model"]),
        ("--task data --model m --reward r.py:f", ["needs --data"]),
        ("--data d.jsonl --model m", ["needs --reward"]),
        ("--data d.jsonl --model m --reward r.py:f --reward_weights 1 2", ["2 for 1 rewards"]),
        ("--reward_weights 1 2", ["--reward_weights"]),
        ("--algorithm rloo --num_iterations 2", ["--objective reinforce", "not 2", "--objective clip"]),
        ("--algorithm rloo --minibatches 4", ["--objective reinforce", "not 4", "--minibatches 1"]),
        ("--epsilon_low 1.5", ["--epsilon_low 1.5", "at most 1"]),
        ("--delta 1.1", ["--delta 1.1", "above 1 + epsilon_high = 1.2"]),
        ("--algorithm cispo --delta 3", ["--delta 3", "not of cispo"]),
        ("--algorithm gspo --normalization global", ["--ratio sequence", "--normalization sequence"]),
        ("--ratio sequence --normalization sum", ["--ratio sequence", "--normalization sequence"]),
        ("--tis_cap 2 --top_p 0.9", ["--tis_cap with --top_p", "--top_p 1 --top_k 0"]),
        ("--tis_cap 2 --top_k 9", ["--tis_cap with --top_p", "--top_p 1 --top_k 0"]),
        ("--algorithm reinforce++ --dynamic_sampling 2", ["--dynamic_sampling"]),
        ("--algorithm dapo --prompts_per_step 1", ["--dynamic_sampling", "--prompts_per_step 1", "at least 2"]),
        ("--ref_sync_every 5", ["--ref_sync_every", "--beta above 0"]),
        ("--kl_importance", ["--kl_importance", "--beta above 0"]),
    ],
)
def test_contradictions(capsys, line, words):
    (told,) = mistakes(capsys, line)
    assert all(word in told for word in words), told


@pytest.mark.parametrize(
    "line",
    [
        "--num_generations 1 --baseline batch --scale_rewards batch",
        "--num_generations 1 --baseline none --scale_rewards none",
        "--delta 3 --epsilon_high 0.3",
        "--ratio sequence",
        "--beta 0.1 --ref_sync_every 5 --kl_importance",
        "--tis_cap 2 --num_iterations 2 --minibatches 3",
        "--algorithm cispo --num_iterations 4",
        "--prompts_per_step 7 --num_generations 5 --micro_batch_size 3 --minibatches 2",  # nothing divides anything
        "--samples_per_step -1 --eval_every 0 --save_every 0",
        "--warmup_steps 1000 --steps 5",
    ],
)
def test_what_is_fine(line):
    parse(line.split(), on_gpu=False)


def test_other_ranks_leave_the_telling_to_the_first(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert mistakes(capsys, "--steps 0") == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(top_p=0.9), "slightly off-policy"),
        (dict(top_k=5), "slightly off-policy"),
        (dict(ratio="sequence", normalization="constant"), "long completions weigh more"),
        (dict(temperature=0.7), "pass@k is sampled at temperature 0.7"),
    ],
)
def test_warnings(settings, words):
    (note,) = warnings(resolve(Config(**settings), on_gpu=False))
    assert words in note and "\n" not in note
    assert warnings(resolve(Config(), on_gpu=False)) == []


# ---- Help ----


def test_help_shows_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        parse(["--help"], on_gpu=False)
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_has_a_help_text(name):
    help = FIELDS[name].metadata["help"]
    assert len(help) > 3 and not help.endswith(".")


def test_defaults_are_within_bounds():
    assert not check(resolve(Config(), on_gpu=False))
    assert not any(isinstance(value, float) and math.isnan(value) for value in vars(Config()).values())
