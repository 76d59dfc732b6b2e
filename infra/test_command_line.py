"""The command line: flags become settings, --help describes them, and all mistakes are reported at once."""

import dataclasses
import json
import math
import re
import sys

import pytest

import train
from config import ALGORITHMS, SETTINGS, Config, is_allowed, is_list, kind_of
from infra import run_folder
from infra.command_line import allowed, flags, for_argparse, parse, ready, warnings
from loss import TIS_MODES
from tasks import REAL_MODEL_DEFAULTS, task_names


def read(line: str) -> Config:
    return parse(line.split(), on_gpu=False)


def assert_refused(capsys, line: str, expected: list[str]) -> None:
    """Check that each expected text is in a line of the error. In the text, " ... " stands for any words."""
    with pytest.raises(SystemExit) as end:
        read(line)
    printed = capsys.readouterr()
    lines = printed.err.partition(" error: ")[2].splitlines()
    assert (end.value.code, printed.out, len(lines)) == (2, "", len(expected)), lines
    for words in expected:
        assert any(re.search(".*".join(map(re.escape, words.split(" ... "))), line) for line in lines), (words, lines)


def test_flags_may_be_written_either_way():
    given = "--micro-batch-size=3 --mask_truncated --kl_importance true --beta .1 --entropy-coef=-1e-3 --shard no"
    same = "--micro_batch_size 3 --mask-truncated yes --kl-importance --beta 0.1 --entropy_coef -.001 --shard=False"
    settings = Config(micro_batch_size=3, mask_truncated=True, kl_importance=True, beta=0.1, entropy_coef=-1e-3)
    assert read(given) == read(same) == settings
    lists = "--data d.jsonl --model m --reward a.py:f --reward_weights 1 -1e-2 --reward=b.py:g --out=--x"
    own = Config(data="d.jsonl", model="m", reward=["a.py:f", "b.py:g"], reward_weights=[1.0, -0.01], out="--x")
    assert read(lists) == own and read("") == Config()


def test_a_value_may_begin_with_a_hyphen_or_a_space():
    """A word is a flag only if it begins with two hyphens and a letter. What follows "=" is always a value."""
    hyphens = Config(entropy_coef=-1e-3, stop=["--", "---", "-x", "-"], seed=3)
    assert read("--entropy_coef -1e-3 --stop -- --- -x - --seed 3") == hyphens
    assert read("--stop=--a=b --shard") == Config(stop=["--a=b"], shard=True) and read("--stop=--").stop == ["--"]
    assert parse(["--stop", " -", "a=b c", "-"], on_gpu=False) == Config(stop=[" -", "a=b c", "-"])


ACCEPTED = [  # a command line -> some of its resolved settings
    ("", dict(task="addition", algorithm="grpo", out="runs/addition-grpo-0", num_generations=8, learning_rate=2e-4)),
    ("--steps 0 --seed 3 --lr_schedule cosine --task gym:a:{} --model m", dict(out="runs/gym-a-evaluation-3")),
    ("--data d.jsonl --model m --reward a.py:f --eval_k 8", dict(task="data", learning_rate=1e-6)),
    ("--reward exact_sum tasks/_rewards.py:overlong --overlong_buffer 9 --max_completion_length 9", {}),
    ("--num_generations 1 --baseline none --scale_rewards none --ratio sequence_token --top_entropy 0.5", {}),
    ("--delta 3 --epsilon_high 0.3 --beta 0.1 --ref_sync_every 5 --kl_importance --tis_cap 2 --tis_floor 2", {}),
    ("--micro_batch_size 3", dict(micro_batch_tokens=None)),
    ("--steps 79", dict(warmup_steps=5)),
    ("--steps 49", dict(warmup_steps=4)),
    ("--steps 3 --warmup_steps 9", dict(warmup_steps=9)),
    ("--steps 0", dict(warmup_steps=0)),
    # reinforce does not read epsilon_low, but 3e-4 is its value in the preset gspo, so it is not refused.
    ("--algorithm gspo --objective reinforce --epsilon_low 3e-4", {}),
    ("--algorithm rloo --old_policy sampler --beta 0.1 --kl_importance --kl_estimator k1", {}),
    ("--algorithm rloo --score_centering 5 --sampler_coef 1 --num_iterations 2 --minibatches 2", {}),
    ("--objective cispo --epsilon_high 5 --old_policy sampler --score_centering 5 --minibatches 2", {}),
    ("--objective cispo --epsilon_high 1 --tis_mode sequence_mask --tis_floor 0.5 --gate_low 0.9 --gate_high 1.1", {}),
    ("--algorithm vespo --num_iterations 2 --tis_cap 2 --old_policy policy --stop </answer> #", {}),
    ("--algorithm gmpo --epsilon_low 1.5 --epsilon_high inf --normalization prompt --num_iterations 2", {}),
    ("--old_policy sampler --off_policy_mask 1 --sampler_coef 1 --top_p 0.9 --min_p 0.1", dict(keep_set=True)),
    ("--algorithm dppo --ratio sequence --top_entropy 0.2 --gate_low 0.5 --gate_high 2 --minibatches 128", {}),
]


@pytest.mark.parametrize(("line", "settings"), ACCEPTED)
def test_accepted_command_lines_and_what_they_resolve_to(line, settings):
    config = vars(ready(read(line), on_gpu=False))
    assert {name: config[name] for name in settings} == settings


@pytest.mark.parametrize("task", task_names())
def test_every_default_is_filled_in_and_resolved_settings_can_be_given_as_flags(task):
    config = ready(read(f"--task {task} --model m --data d --reward r.py:f --algorithm dapo --seed 7"), on_gpu=False)
    filled_in = {"task", "out", "rollout_tokens", "micro_batch_tokens", *ALGORITHMS["dapo"], *REAL_MODEL_DEFAULTS}
    assert [name for name in filled_in if getattr(config, name) is None] == []
    given = {name: x if isinstance(x, list) else [x] for name, x in vars(config).items() if x not in (None, [])}
    words = [word for name, values in given.items() for word in (f"--{name}", *map(str, values))]
    # No setting is left to be filled in, so it makes no difference that there is a GPU now.
    assert parse(words, on_gpu=True) == config == ready(config, on_gpu=True)


def test_settings_from_a_file_and_from_a_run(tmp_path):
    """If --config names the config.json of a run, the settings are those that were typed for that run, except for --out
    and --overwrite. --out alone takes no settings from the run in its folder."""
    out, file = tmp_path / "out", tmp_path / "out" / "config.json"
    words = "--task sorting --algorithm dapo --epsilon_high inf --micro_batch_size 3 --stop -- --- --steps 7"
    words += " --reward r.py:f --reward_weights -1e-5"
    typed = read(f"{words} --out {out} --overwrite")
    mine = {name: x for name, x in vars(typed).items() if x != vars(Config())[name]}
    (tmp_path / "mine.json").write_text(json.dumps(mine | dict(delta=None, beta=0)))  # null means not typed
    assert read(f"--config {tmp_path}/mine.json") == typed
    config = ready(typed, on_gpu=False)
    run_folder.begin(config, typed, run_folder.claim(config), {})
    for more in ("", "--algorithm grpo", "--task gsm8k --model m", "--epsilon_high 0.3", "--micro_batch_size 1"):
        assert read(f"{more} --config {file}") == read(f"--config={file} {more}") == read(f"{words} {more}")
    assert read(f"--config {file} --out {out} --overwrite") == typed
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    assert read(f"--out {out}") == Config(out=str(out))


def test_a_path_means_the_same_in_every_directory(tmp_path, monkeypatch):
    """Names on the hub and of modules stay as they are, and so do paths that do not exist."""
    (tmp_path / "inside").mkdir()
    for name in ("rows.jsonl", "mine.py"):
        (tmp_path / name).touch()
    words = "--model Qwen/Qwen2.5 --data {0}rows.jsonl --eval_data none.jsonl --reference {0}inside --beta 1"
    words += " --reward {0}mine.py:f overlong package.module:g --reply {0}mine.py:h"
    expected = read(words.format(f"{tmp_path}/"))
    assert expected.reward == [f"{tmp_path}/mine.py:f", "overlong", "package.module:g"]
    assert (expected.model, expected.eval_data) == ("Qwen/Qwen2.5", ["none.jsonl"])
    for folder, prefix in (tmp_path, ""), (tmp_path / "inside", "../"):
        monkeypatch.chdir(folder)
        assert read(words.format(prefix)) == expected
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read(words.format("~/")) == expected


# A command line -> a part of each line of its error message. " | " separates the lines. " ... " stands for any words.
MISTAKES = [
    ("--epsilon-hi=0.3 oops", "unrecognized arguments: --epsilon_hi ... 0.3 ... oops"),
    ("--seed 1 -2", "unrecognized arguments: ... -2"),
    ("--per-device-train-batch-size=8", "unrecognized arguments: --per_device_train_batch_size ... ; docs/from_trl"),
    ("--num_train_epochs 3 --seed 1", "unrecognized arguments: --num_train_epochs ... 3; docs/from_trl.md"),
    # The value, which is empty here, is printed before the colon.
    ("--model= --data= --stop=", "--model : must be str | --data : must be str | --stop ['']: must be list of str"),
    ("--temperature 0 --min_p 1.1 --eval_temperature 0", "--temperature | --min_p | --eval_temperature"),
    ("--task data", "--task data: needs --model | --task data: needs --reward"),
    *[
        (f"--chat_template_kwargs {x}", "--chat_template_kwargs ... must be an object in JSON")
        for x in ("{think}", "[1]")
    ],
    ("--algorithm gmpo --objective dppo", "geometric: ... with dppo"),
    ("--algorithm rloo --ratio sequence --old_policy sampler", "--ratio sequence: has | --old_policy: has no effect"),
    ("--objective cispo --tis_mode sequence_mask", "--epsilon_high 0.2: cispo caps | --tis_mode: has no effect"),
    *[(f"--algorithm vespo --tis_cap 2 --tis_mode {x}", f"{x}: vespo already") for x in TIS_MODES[2:]],
    ("--algorithm vespo --epsilon_low 0.1 --delta 1", "--epsilon_low 0.1: has no effect | --delta 1.0: has no effect"),
    ("--old_policy sampler --gate_low 0.5 --delta 1.2", "--gate_low 0.5: ... sampler | --delta 1.2: ... 1"),
    ("--old_policy sampler --top_p 0.9 --keep_set no", "--keep_set false: "),
    *[
        (f"--{x} --top_k 9 --keep_set no", "--keep_set false: ")
        for x in ("off_policy_mask 1", "tis_cap 1", "tis_floor 1", "gate_low 0.9", "gate_high 2", "sampler_coef 1")
    ],
    ("--algorithm maxrl --combine_rewards gdpo --normalization prompt --minibatches 2", "--scale_rewards | prompt: "),
    *[(f"--beta 1 --ref_sync_every 5 {other}", "--ref_sync_every: ") for other in ("--lora_rank 8", "--reference m")],
    ("--algorithm reinforce++ --num_generations 1 --dynamic_sampling 2", "--num_generations 1: a group of one"),
    ("--algorithm gdpo --num_generations 1", "--num_generations 1: a group of one"),
    ("--kl_estimator k1 --eval_k 8 --eval_every 0", "--kl_estimator: ... --beta | --eval_k: ... --eval_every"),
    ("--reference m", "--reference: ... --beta"),
    ("--kl_importance --ref_sync_every 5", "--kl_importance: | --ref_sync_every: "),
    ("--keep_set no --overlong_buffer 5", "--keep_set: | --overlong_buffer: ... --reward overlong"),
    ("--lora_alpha 8 --shard_size 2", "--lora_alpha: | --shard_size: "),
    ("--server_timeout 5 --server_folder f", "--server_timeout: | --server_folder: "),
    ("--num_generations 1 --lr_schedule linear --steps 5 --warmup_steps 5", "--num_generations 1: | --lr_schedule: "),
    *[(f"--gate_{x}", "--gate_low, --gate_high: ") for x in ("low 1", "high 1", "low 1.5 --gate_high 1.2")],
    ("--tis_floor 2 --tis_cap 1.5", "--tis_floor 2 --tis_cap 1.5: the floor must not be above the cap"),
    ("--prompts_per_step 2 --num_generations 3 --minibatches 7", "--minibatches 7: a step has fewer completions"),
    ("--server u --min_p 0.1 --report_to trackio", "--server: cannot record | trackio: the package is not installed"),
    *[(f"--objective {x} --ratio sequence --top_entropy 0.2", "--top_entropy with --ratio") for x in ("clip", "sapo")],
    ("--algorithm gmpo --top_entropy 0.2", "--top_entropy with --ratio geometric: ... use sequence_token"),
    ("--score_centering 5 --top_k 9 --keep_set false", "--keep_set false: cannot be used with settings that read"),
    ("--score_centering 5 --old_policy sampler", "cannot be used with --objective clip --old_policy sampler"),
    ("--score_centering 5 --algorithm rloo --sampler_coef 1 --num_iterations 2 --tis_floor 1", "with several updates"),
    ("--score_centering 5 --algorithm gspo --minibatches 2", "with --ratio sequence | with several updates"),
    ("--score_centering 5 --algorithm sapo --gate_high 2", "cannot be used with --objective sapo | with --gate_high"),
    ("--score_centering 5 --tis_cap 2 --tis_mode sequence_mask --delta 3", "with --tis_mode | with --delta"),
    ("--score_centering 5 --gate_low 0.9 --off_policy_mask 1", "with --gate_low | with --off_policy_mask"),
    ("--steps 0 --eval_every 0", "--steps 0 --eval_every 0: "),
    ("--reward overlong --overlong_buffer 17 --max_completion_length 16", "--overlong_buffer 17: must be at most"),
    ("--eval_every 0 --eval_data d --eval_temperature 1 --eval_top_p 0.5", "--eval_data: | _temperature: | _top_p: "),
]
# The text of a file, flags, a part of each line of the error message.
IN_FILES = [
    ('{"lerning_rate": 1}', "", "mine.json: ... lerning_rate"),
    *[(text, "", "mine.json cannot be read: ") for text in ("", "[]", "7", '{"seed": 1')],
    ('{"algorithm": "rloo", "beta": null, "seed": 2}', "--minibatches 4", "--objective reinforce: has no ratio"),
    ('{"seed": "1", "eval_k": 2.0, "steps": true, "beta": NaN}', "", "--seed 1 | --eval_k 2.0 | --steps True | --beta"),
    ('{"algorithm": "ppo", "task": 5}', "", "--task 5 | --algorithm ppo"),
    ('{"reward": "r.py:f", "stop": ["a", 1], "baseline": []}', "", "--reward r.py:f | --stop ['a', 1] | --baseline []"),
]


@pytest.mark.parametrize("text, line, expected", [("{}", *mistake) for mistake in MISTAKES] + IN_FILES)
def test_mistakes_are_reported(tmp_path, capsys, monkeypatch, text, line, expected):
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not installed
    (tmp_path / "mine.json").write_text(text)
    assert_refused(capsys, f"--config {tmp_path}/mine.json {line}", expected.split(" | "))


def values_of(setting: dataclasses.Field) -> tuple[list, list]:
    """Return values that config.py allows for this setting, and values that it does not allow."""
    kind, names, bounds = kind_of(setting), setting.metadata["names"], setting.metadata["bounds"]
    if kind is bool:
        return [True, False], []
    if kind is str:
        wrong = ["", "?"] if names else [""]
        return list(names or ["a_word"]), wrong
    fine = []
    wrong = [math.nan, -math.inf] if kind is float else []
    if kind is float and bounds.get("at_most") != math.inf:  # only at_most=inf allows infinity
        wrong.append(math.inf)
    for bound, x in bounds.items():
        size = 1 if kind is int else 1e-6 * max(1.0, abs(x))
        inwards = size if bound in ("above", "at_least") else -size  # a small step to the allowed side of the bound
        # "above" and "below" exclude x itself, "at_least" and "at_most" include it.
        inside, outside = (x + inwards, x) if bound in ("above", "below") else (x, x - inwards)
        fine.append(inside)
        wrong += [outside] if math.isfinite(x) else []
    return fine or [kind(1)], wrong


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_behaves_as_its_line_in_config_py_says(capsys, name):
    """This covers the flag, the type, the default and the names or bounds of every setting, new ones included."""
    setting, default = SETTINGS[name], getattr(Config(), name)
    fine, wrong = values_of(setting)
    for x in default if is_list(setting) else [default]:
        assert x is None or type(x) is kind_of(setting)
    for x in fine:
        typed = vars(flags().parse_args([*for_argparse([f"--{name}={x}"])]))
        assert typed == {name: [x] if is_list(setting) else x} and is_allowed(setting, typed[name])
    for x in wrong:
        assert_refused(capsys, f"--{name}={x}", [f"--{name}"])
    if kind_of(setting) is not str:
        assert_refused(capsys, f"--{name} many", [f"--{name}: "])


SELDOM_WANTED = [  # settings that are noted, and others with which they are not
    (dict(lora_rank=8, model="m"), dict(learning_rate=1e-3)),
    (dict(stop=["#", "\\n"]), dict(stop=["\n"])),
    (dict(steps=3, warmup_steps=4), dict(steps=4)),
    (dict(steps=3, warmup_steps=4), dict(steps=0)),
]


@pytest.mark.parametrize("noted, changed", SELDOM_WANTED)
def test_what_is_seldom_wanted_is_noted(noted, changed):
    config = ready(Config(**noted), on_gpu=False)
    assert len([*warnings(config)]) == 1 and not [*warnings(dataclasses.replace(config, **changed))]


def test_help_shows_each_flag_with_its_allowed_values_and_its_default(capsys):
    assert train.main(["--help"]) == 0
    shown = "".join(capsys.readouterr().out.split())  # without spaces, it is the same on every width of screen
    assert f"(oneof{','.join(task_names())};defaultaddition)" in shown
    assert "(floatabove0andatmost1;default1.0)" in shown and "(listofstr;default[])" in shown
    assert "(intatleast1;default8;with--taskguess16,sorting16)" in shown and "defaultsequence)" in shown
    for name, setting in SETTINGS.items():
        about = f"{setting.metadata['text']} ({allowed(setting)};"
        assert f"--{name}" in shown and about.replace(" ", "") in shown
