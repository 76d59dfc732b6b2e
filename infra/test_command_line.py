"""The command line: flags -> settings, --help, and every mistake told at once, in a line that says what to change."""

import dataclasses
import json
import math
import re
from dataclasses import Field

import numpy as np
import pytest
import torch

from config import ALGORITHMS, Config, UserError
from infra import command_line, run_folder
from infra.command_line import SETTINGS, allowed, flags, is_list, kind_of, parse, ready, warnings, wrong_values
from tasks import REAL_MODEL_DEFAULTS, task_names


def read(line: str) -> Config:
    return parse(line.split(), on_gpu=False)


def assert_told(said: list[str], told: list[str]) -> None:
    """Each of `told` is in a line; " ... " stands for what is between its words."""
    assert len(said) == len(told), said
    for words in told:
        assert any(re.search(".*".join(map(re.escape, words.split(" ... "))), line) for line in said), (words, said)


def assert_refused(capsys, line: str, told: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        read(line)
    printed = capsys.readouterr()
    assert (end.value.code, printed.out) == (2, "")
    assert_told(printed.err.partition(" error: ")[2].splitlines(), told)


def test_flags_may_be_written_either_way():
    given = "--micro-batch-size=3 --mask_truncated --kl_importance true --beta .1 --entropy-coef=-1e-3 --shard no"
    same = "--micro_batch_size 3 --mask-truncated yes --kl-importance --beta 0.1 --entropy_coef -.001 --shard=False"
    settings = Config(micro_batch_size=3, mask_truncated=True, kl_importance=True, beta=0.1, entropy_coef=-1e-3)
    assert read(given) == read(same) == settings
    lists = "--data d.jsonl --model m --reward a.py:f b.py:g --reward_weights 1 -0.5 --out=--x"
    own = Config(data="d.jsonl", model="m", reward=["a.py:f", "b.py:g"], reward_weights=[1.0, -0.5], out="--x")
    assert read(lists) == own and read("") == Config()


RESOLVED = [
    ("", dict(task="addition", algorithm="grpo", out="runs/addition-grpo-0", num_generations=8, learning_rate=2e-4)),
    ("--steps 0 --seed 3", dict(out="runs/addition-evaluation-3", dtype="float32", micro_batch_tokens=2048)),
    ("--data d.jsonl --model m --reward a.py:f", dict(task="data", learning_rate=1e-6)),
    ("--micro_batch_size 3 --task addition --model m", dict(micro_batch_tokens=None, learning_rate=1e-6)),
    ("--num_generations 1 --baseline none --scale_rewards none --prompts_per_step 7", {}),  # this and the rest are fine
    ("--delta 3 --epsilon_high 0.3 --beta 0.1 --ref_sync_every 5 --kl_importance --tis_cap 2 --tis_floor 2", {}),
    ("--epsilon_high inf --ratio sequence --num_iterations 2 --minibatches 128 --tis_cap 2", {}),
    ("--lr_schedule cosine --warmup_steps 9 --steps 10 --algorithm reinforce++ --num_generations 1", {}),
    ("--lr_schedule cosine --warmup_steps 9 --steps 0 --eval_k 8", {}),
    ("--algorithm cispo --num_iterations 4 --eval_every 0 --warmup_steps 1000 --steps 5", {}),
    ("--algorithm gspo --objective reinforce --epsilon_low 3e-4", {}),  # not read, but as the preset has it
    ("--algorithm rloo --old_policy sampler --beta 0.1 --kl_importance --kl_estimator k1", {}),
    ("--objective cispo --epsilon_high 1 --tis_mode sequence_mask --tis_floor 0.5 --gate_low 1 --gate_high 1", {}),
    (
        "--algorithm vespo --num_iterations 2 --tis_cap 2 --old_policy policy --stop </answer> #",
        dict(objective="vespo"),
    ),
    ("--algorithm gmpo --epsilon_low 1.5 --normalization prompt --num_iterations 2", {}),
    ("--tis_cap 2 --off_policy_mask 1 --sampler_coef 1 --top_p 0.9 --top_k 9 --min_p 0.1", dict(keep_set=True)),
    ("--old_policy sampler --off_policy_mask 1 --sampler_coef 1 --top_p 0.9 --keep_set", {}),
]


@pytest.mark.parametrize(("line", "settings"), RESOLVED)
def test_what_is_left_open_is_the_tasks_the_algorithms_or_the_machines(line, settings):
    config = vars(ready(read(line), on_gpu=False))
    assert {name: config[name] for name in settings} == settings


@pytest.mark.parametrize("task", task_names())
def test_nothing_stays_open_and_what_is_resolved_can_be_given_as_flags(task):
    config = ready(Config(task=task, model="m", data="d.jsonl", reward=["r.py:f"], algorithm="dapo", seed=7), False)
    filled_in = {"task", "out", "rollout_tokens", "micro_batch_tokens", *ALGORITHMS["dapo"], *REAL_MODEL_DEFAULTS}
    assert [name for name in filled_in if getattr(config, name) is None] == []
    given = {name: x if isinstance(x, list) else [x] for name, x in vars(config).items() if x not in (None, [])}
    words = [word for name, values in given.items() for word in (f"--{name}", *map(str, values))]
    assert parse(words, on_gpu=True) == config == ready(config, on_gpu=True)


def test_settings_of_ones_own_file_and_of_an_earlier_run(tmp_path, capsys):
    """Of a run --config reads what was given by hand, without its folder. --out alone goes on with all settings of the
    run, once it has made steps."""
    out, file = tmp_path / "out", tmp_path / "out" / "config.json"
    words = "--task sorting --algorithm dapo --epsilon_high inf --micro_batch_size 3 --reward r.py:f --steps 7"
    given = read(f"{words} --out {out} --overwrite")
    mine = {name: "inf" if x == math.inf else x for name, x in vars(given).items() if x != vars(Config())[name]}
    (tmp_path / "mine.json").write_text(json.dumps(mine | dict(delta=None)))
    assert read(f"--config {tmp_path}/mine.json") == given
    run_folder.begin(of_run := ready(given, on_gpu=False), given, 0)
    for more in ("", "--algorithm gspo", "--task gsm8k --model m", "--epsilon_high 0.3", "--micro_batch_size 1"):
        assert read(f"{more} --config {file}") == read(f"--config={file} {more}") == read(f"{words} {more}")
    assert read(f"--out {out}") == Config(out=str(out)), "nothing was made: there is nothing to go on with"
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    assert vars(read(f"--out {out} --steps 9")) == vars(of_run) | dict(steps=9, overwrite=False)
    again = read(f"--out {out}")  # killed before its first checkpoint
    run_folder.begin(ready(again, on_gpu=False), again, 0)
    assert read(f"--config {file}") == read(words)
    assert read(f"--out {out} --overwrite") == Config(out=str(out), overwrite=True)
    assert run_folder.step_to_continue_after(ready(read(f"--out {out}"), on_gpu=False)) == 0
    with pytest.raises(UserError, match="only --overwrite starts over: --algorithm dapo there, gspo here"):
        run_folder.step_to_continue_after(ready(read(f"--out {out} --algorithm gspo"), on_gpu=False))
    file.write_text(file.read_text().replace("token_truncate", "geometric_mask"))
    with pytest.raises(SystemExit):
        read(f"--out {out}")
    assert "--tis_mode geometric_mask: is now --gate_low and --gate_high" in capsys.readouterr().err


MISTAKES = [  # a line -> what each of its mistakes is told with; argparse ends at the first one that it finds
    ("--epsilon-hi=0.3 oops", "unrecognized arguments: --epsilon_hi=0.3 oops"),
    ("--steps many --beta -1", "--steps: ... 'many'"),
    ("--beta -1 --algorithm ppo", "--algorithm: invalid choice: 'ppo'"),
    ("--model= --data=", "--model : must be str | --data : must be str"),  # an unset variable of the shell
    ("--reward_weights 1 nan", "list of float at least -1e+09 and at most 1e+09"),
    ("--top_k -1 --temperature 0", "--top_k -1: must be int at least 0 | --temperature 0.0"),
    ("--task data", "--task data: needs --model | --task data: needs --data | --task data: needs --reward"),
    ("--data d.jsonl --model m --reward r.py:f --reward_weights 1 2", "give one for each of 1 rewards"),
    ("--algorithm gmpo --delta 3", "--delta 3: ... not for --ratio geometric"),
    ("--algorithm gmpo --objective dppo --delta 3", "--delta 3.0: | geometric: ... of dppo"),
    ("--sapo_tau_pos 2 --sapo_tau_neg 2", "--sapo_tau_neg 2.0: is not read by --objective clip | --sapo_tau_pos 2.0"),
    ("--algorithm cispo --epsilon_low 1.5 --delta 3", "--delta 3.0: ... by --objective cispo | --epsilon_low 1.5"),
    ("--algorithm rloo --ratio sequence --old_policy sampler", "--ratio sequence: is not read | sampler: is not read"),
    ("--objective cispo --tis_mode sequence_mask", "0.2: is the cap itself | mask: corrects nothing without --tis"),
    (
        "--tis_mode geometric_mask --tis_cap 1.1",
        "--tis_mode: invalid choice: 'geometric_mask'",
    ),
    ("--gate_low 1.1 --gate_high 1", "--gate_low 1.1: ... above --gate_high 1"),
    ("--stop=", "--stop ['']: must be list of str"),
    ("--algorithm vespo --tis_mode sequence_mask --tis_cap 2 --epsilon_low 0.1", "0.1: is not read | sequence_mask: "),
    ("--old_policy sampler --gate_low 0.5", "--gate_low with --old_policy sampler: ... always 1"),
    ("--old_policy sampler --top_p 0.9 --keep_set no", "--keep_set false: "),
    *[(f"--{x} 1 --top_k 9 --keep_set no", "kept") for x in "off_policy_mask tis_cap gate_low sampler_coef".split()],
    ("--algorithm maxrl --combine_rewards gdpo --normalization prompt --minibatches 2", "made 0 | prompt with"),
    ("--lora_alpha 8", "--lora_alpha: is not read without --lora_rank"),
    ("--lora_rank 8 --beta 1 --ref_sync_every 5", "--ref_sync_every with --lora_rank: ... never changes"),
    ("--num_generations 1 --minibatches 17", "a group of one | --minibatches 17: more than"),
    ("--algorithm reinforce++ --num_generations 1 --dynamic_sampling 2", "a group of one"),
    ("--kl_estimator k1 --eval_k 8 --eval_every 0", "--kl_estimator: ... --beta | --eval_k: ... --eval_every"),
    ("--lr_schedule linear --warmup_steps 9 --steps 9 --keep_set no", "--lr_schedule: | --keep_set: ... --top_p"),
    ("--delta 1.2 --tis_cap 2 --tis_floor 3", "--delta 1.2: ... 1 | above --tis_cap 2"),
    ("--old_policy sampler --tis_floor 0.5", "--tis_floor with --old_policy sampler: ... always 1"),
    ("--beta 1 --kl_importance --kl_estimator k2", "not k2"),
    ("--steps 0 --eval_every 0", "nothing to do"),
    ("--kl_importance --ref_sync_every 5 --shard_size 2", "--kl_importance: | --ref_sync_every: | --shard_size: "),
]
IN_FILES = [  # what a file holds, flags beside it, what each mistake is told with
    ({"lerning_rate": 1}, "", "unrecognized arguments: --lerning_rate=1"),
    ({"given": {"tis_mode": "geometric_mask", "tis_floor": 0.9}}, "", "--tis_mode: invalid choice: 'geometric_mask'"),
    (
        {"settings": {"algorithm": "rloo"}},
        "--algorithm dapo",
        "unrecognized arguments: --settings=",
    ),  # not given by hand
    ({"algorithm": "rloo", "beta": None, "seed": 2}, "--minibatches 4", "reinforce: ... not for 4"),
    ({"seed": True}, "", "--seed: invalid int value: 'True'"),
    ({}, "--config none.json", "none.json"),
]


@pytest.mark.parametrize("settings, line, told", [({}, *mistake) for mistake in MISTAKES] + IN_FILES)
def test_a_mistake_is_told(tmp_path, capsys, settings, line, told):
    (tmp_path / "mine.json").write_text(json.dumps(settings))
    assert_refused(capsys, f"--config {tmp_path}/mine.json {line}", told.split(" | "))


def test_a_tasks_defaults_are_checked_too(capsys, monkeypatch):
    monkeypatch.setattr(command_line, "task_defaults", lambda name, model: dict(steps=-5))
    assert_refused(capsys, "", ["--steps -5: must be int"])


def test_numbers_of_numpy_and_torch_are_numbers():
    config = Config(num_generations=np.int64(3), beta=np.float32(0.5), minibatches=torch.tensor(2), shard=np.True_)
    assert [type(x) for x in (config.num_generations, config.beta, config.minibatches)] == [int, float, int]


BOUNDS = [  # a value that is refused, one that is taken, by these numbers
    (0, 1, "prompts_per_step num_generations max_completion_length num_iterations minibatches eval_prompts eval_k"),
    (0, 1, "micro_batch_size micro_batch_tokens rollout_tokens keep_checkpoints lora_alpha"),
    (0, 1e-9, "reward_timeout temperature tis_cap tis_floor delta max_grad_norm learning_rate top_p top_entropy"),
    (0, 1e-9, "sapo_tau_pos sapo_tau_neg gate_low gate_high"),
    (-1, 0, "steps top_k ref_sync_every dynamic_sampling warmup_steps eval_every save_every shard_size seed"),
    (-1, 0, "lora_rank"),
    (-1e-9, 0, "min_p sampler_coef off_policy_mask beta weight_decay epsilon_low epsilon_high adam_beta1 adam_beta2"),
    (-2, -1, "samples_per_step"),
    (1, 0.999, "adam_beta1 adam_beta2"),
    (1.001, 1, "top_p min_p top_entropy"),
    (math.inf, 1e9, "reward_timeout temperature tis_cap delta max_grad_norm learning_rate beta entropy_coef"),
    (math.inf, 1e9, "weight_decay tis_floor gate_low gate_high sapo_tau_pos sapo_tau_neg off_policy_mask sampler_coef"),
    (math.nan, math.inf, "epsilon_low epsilon_high"),
    ([-math.inf], [-1e9], "reward_weights"),
]


def test_numbers_have_their_bounds():
    for refused, taken, names in BOUNDS:
        assert len([*wrong_values(Config(**dict.fromkeys(names.split(), refused)))]) == len(names.split())
        assert [*wrong_values(Config(**dict.fromkeys(names.split(), taken)))] == []


def values_of(setting: Field) -> tuple[list, list]:
    """Values that the line of this setting in config.py allows, and values that it refuses."""
    kind, names, bounds = kind_of(setting), setting.metadata["names"], setting.metadata["bounds"]
    if kind is bool:
        return [True, False], []
    if kind is str:
        return [*(names or ["a_word"])], ["", "?"] if names else [""]
    fine, wrong = [], [math.nan, -math.inf] if kind is float else []
    for bound, x in bounds.items():
        step = (1 if kind is int else 1e-6 * max(1.0, abs(x))) * (1 if bound in ("above", "at_least") else -1)
        inside, outside = (x + step, x) if bound in ("above", "below") else (x, x - step)
        fine, wrong = [*fine, inside], [*wrong, outside] if math.isfinite(x) else wrong
    return fine or [kind(1)], wrong


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_what_its_line_says(capsys, name):
    """Its flag, its type, its default, its names or bounds: of every setting there is, a new one, too."""
    setting, default = SETTINGS[name], getattr(Config(), name)
    fine, wrong = values_of(setting)
    assert {*map(type, default if is_list(setting) else [default])} <= {kind_of(setting), type(None)}
    for x in fine:
        given = vars(flags().parse_args([f"--{name}={x}"]))
        assert given[name] == ([x] if is_list(setting) else x)
        assert [*wrong_values(dataclasses.replace(Config(), **{name: given[name]}))] == []
    for x in wrong:
        assert_refused(capsys, f"--{name}={x}", [f"--{name}"])
    if kind_of(setting) is not str:
        assert_refused(capsys, f"--{name} many", [f"--{name}: "])


def test_what_is_allowed_but_worth_a_line():
    for settings, *notes in (
        (dict(top_k=5, keep_set=False), "log-probs are of the whole"),
        (dict(ratio="sequence", top_entropy=0.5), "sequence ... not the chosen ones alone"),
        (dict(ratio="geometric", tis_mode="token_mask", tis_floor=0.5), "geometric ... not the chosen"),
        (dict(beta=0.1, kl_estimator="k1"), "adds noise"),
        (dict(ratio="sequence", beta=0.1, tis_cap=2.0, top_p=0.9),),
        (dict(top_entropy=0.5, scale_rewards="mean"),),
        (dict(lora_rank=8), "learning_rate 0.0002 suits all weights"),
        (dict(lora_rank=8, learning_rate=1e-3),),
    ):
        assert_told([*warnings(ready(Config(**settings), on_gpu=False))], notes)


def test_help_has_each_flag_with_what_it_may_be_and_its_default(capsys):
    with pytest.raises(SystemExit) as end:
        read("--help")
    shown = "".join(capsys.readouterr().out.split())  # however wide the screen is
    assert end.value.code == 0 and f"(oneof{','.join(task_names())};defaultNone)" in shown
    assert "(floatabove0andatmost1;default1.0)" in shown and "(listofstr;default[])" in shown
    for name, setting in SETTINGS.items():
        about = f"{setting.metadata['text']} ({allowed(setting)};"
        assert f"--{name}" in shown and about.replace(" ", "") in shown
