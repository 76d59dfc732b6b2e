"""The command line: flags -> settings, --help, and every mistake told at once, in a line that says what to change."""

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from config import ALGORITHMS, Config, UserError
from infra import run_folder
from infra.command_line import (
    FLAGS,
    OF_OTHERS,
    SETTINGS,
    check_prompts,
    notes,
    parse,
    ready,
    warnings,
    wrong_values,
)
from loss import NORMALIZATIONS
from tasks import Task, task_names
from tasks._characters import char_tokenizer


def read(line: str) -> Config:
    return parse(line.split(), on_gpu=False)


def mistakes(capsys, words: str | list[str]) -> list[str]:
    with pytest.raises(SystemExit) as end:
        parse(words.split() if isinstance(words, str) else words, on_gpu=False)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and all(line.startswith("error: ") for line in printed.err.splitlines())
    return [line.removeprefix("error: ") for line in printed.err.splitlines()]


# ---- What is read ----


def test_without_flags():
    plain = read("")
    assert (plain.task, plain.algorithm, plain.out) == ("addition", "grpo", "runs/addition-grpo-0")
    assert (plain.prompts_per_step, plain.num_generations, plain.max_completion_length) == (16, 8, 64)
    assert (plain.steps, plain.learning_rate) == (80, 2e-4)
    assert read("--steps 0").out == "runs/addition-evaluation-0"


@pytest.mark.parametrize("task", task_names())
def test_nothing_stays_open(task):
    config = ready(Config(task=task, model="m", data="d.jsonl", reward=["r.py:f"]), on_gpu=False)
    may_be_none = {"attn_implementation", "delta", "micro_batch_size", "report_to"}
    may_be_none |= {"chat_template_kwargs", "eval_data", "correct", "tis_cap", "tis_floor", "off_policy_mask"}
    assert {name for name, value in vars(config).items() if value is None} == may_be_none


def test_data_of_ones_own_and_models():
    own = read("--data d.jsonl --model m --reward a.py:f b.py:g --reward_weights 1 -0.5")
    assert (own.task, own.reward, own.reward_weights) == ("data", ["a.py:f", "b.py:g"], [1.0, -0.5])
    assert own.learning_rate == 1e-6
    assert read("--task addition --model folder").learning_rate == 1e-6, "not the small model's"


def test_flags_may_be_written_either_way():
    given = "--micro-batch-size=3 --mask_truncated --kl_importance true --beta .1 --entropy-coef=-1e-3 --shard no"
    same = "--micro_batch_size 3 --mask-truncated yes --kl-importance --beta 0.1 --entropy_coef -1e-3 --shard=False"
    assert read(given) == read(same)
    assert read(given).mask_truncated is True and read(given).entropy_coef == -1e-3
    assert read("--out -5").out == "-5" and read("--out=--x").out == "--x"


def test_any_settings_can_be_given_as_flags():
    config = ready(Config(task="gsm8k", model="m", algorithm="dapo", reward=["r.py:f"], tis_cap=2.0, seed=7), False)
    words = []
    for name, value in vars(config).items():
        if value not in (None, []):
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    assert parse(words, on_gpu=True) == config


@pytest.mark.parametrize(
    "line",
    [
        "--num_generations 1 --baseline batch --scale_rewards batch",
        "--num_generations 1 --baseline none --scale_rewards none",
        "--delta 3 --epsilon_high 0.3",
        "--epsilon_high inf",
        "--ratio sequence",
        "--beta 0.1 --ref_sync_every 5 --kl_importance",
        "--tis_cap 2 --num_iterations 2 --minibatches 3",
        "--algorithm cispo --num_iterations 4",
        "--prompts_per_step 7 --num_generations 5 --micro_batch_size 3 --minibatches 2",  # nothing divides anything
        "--micro_batch_size 3 --micro_batch_tokens 99",  # a micro-batch is full when either is reached
        "--samples_per_step -1 --eval_every 0 --save_every 0",
        "--warmup_steps 1000 --steps 5",
    ],
)
def test_what_is_fine(line):
    read(line)


# ---- Settings from files ----


def in_a_file(folder: Path, settings: object) -> Path:
    (folder / "mine.json").write_text(json.dumps(settings))
    return folder / "mine.json"


def test_settings_from_a_file_of_ones_own(tmp_path):
    settings = dict(task="sorting", steps=7, beta=0.1, shard=True, reward=["r.py:f"], delta=None, out="there")
    file = in_a_file(tmp_path, settings)
    by_hand = "--task sorting --steps 9 --beta 0.1 --shard --reward r.py:f --out there"
    assert read(f"--config {file} --steps 9") == read(f"--steps 9 --config={file}") == read(by_hand)


def test_settings_of_an_earlier_run(tmp_path):
    """All but those of its folder; what came from its task and algorithm gives way to another's."""
    words = (
        "--task sorting --algorithm dapo --epsilon_high inf --steps 7 --micro_batch_size 3 --micro_batch_tokens 2048"
    )
    run_folder.claim(read(f"{words} --out {tmp_path} --overwrite"), 0)
    assert read(f"--config {tmp_path}/config.json") == read(words)
    for more in ("--algorithm gspo --steps 9", "--task gsm8k --model m", "--epsilon_high 0.3", "--micro_batch_size 1"):
        assert read(f"{more} --config {tmp_path}/config.json") == read(f"{words} {more}")


FILES = [  # what the file holds, flags beside it, what each mistake is told with
    ({"steps": "many", "beta": -1, "reward": "r.py:f"}, "", ["--reward r.py:f", "--beta -1", "--steps many"]),
    (
        {"lerning_rate": 1, "task": "math"},
        "--zzz",
        ["--zzz", "{}: --lerning_rate: ... --learning_rate?", "--task math"],
    ),
    ({"settings": {"algorithm": "rloo", "gone": 1}}, "--minibatches 2", ["{}: --gone: ", "--objective reinforce"]),
    ({"algorithm": ["ppo"], "out": 3}, "", ["--algorithm ['ppo']", "--out 3"]),
    ([1], "", ["{}: must hold a JSON object"]),
    ({}, "--config none.json", ["none.json: No such file or directory"]),
]


@pytest.mark.parametrize(("settings", "words", "told"), FILES)
def test_a_mistake_in_a_file_is_told_as_that_of_a_flag(tmp_path, capsys, settings, words, told):
    file = in_a_file(tmp_path, settings)
    said = mistakes(capsys, f"--config {file} {words}")
    assert len(said) == len(told), said
    for line, one in zip(said, told, strict=True):
        assert all(part in line for part in one.format(file).split("...")), line


def test_a_run_that_may_not_be_read_is_a_line(capsys, monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda path: open(path / "no" / "such"))  # as where it is not allowed
    (told,) = mistakes(capsys, "--out there")
    assert "there/config.json" in told


# ---- Mistakes ----

UNKNOWN = [  # a line -> what each of its mistakes is told with
    ("--lerning_rate 1", "--lerning_rate: ... did you mean --learning_rate?"),
    ("--num-generation 8", "--num-generation: ... did you mean --num_generations?"),
    ("--epsilon-hi=0.3", "--epsilon-hi=0.3: ... did you mean --epsilon_high?"),
    ("--lr 1e-5", "did you mean --learning_rate?"),
    ("--loss_type dapo", "did you mean --normalization?"),
    ("--eval-steps 5", "did you mean --eval_every?"),
    ("--num_train_epochs 3", "--num_train_epochs: ... the length of a run is its --steps"),
    ("--max_prompt_length 512", "--max_prompt_length: there is no such flag; prompts are never cut"),
    ("--logging_dir x", "--logging_dir: there is no such flag; see --help"),
    ("--max_grad 1 --stop_steps 3", "--max_grad: ... see --help", "--stop_steps: ... see --help"),
    ("--zzz 1 2", "--zzz: there is no such flag; see --help"),
    ("-x 1", "-x: there is no such flag; see --help"),
    ("--help=3", "--help=3: there is no such flag"),
    ("oops", "oops: belongs to no flag"),
    ("--steps 3 -1", "-1: belongs to no flag"),
    ("--zzz 1 --steps 3 oops", "--zzz: there is no such flag", "oops: belongs to no flag"),
    ("--step 3 --zzz=4", "did you mean --steps?", "--zzz=4: there is no such flag"),
]
VALUES = [
    ("--steps many", "--steps many: must be a whole number, at least 0"),
    ("--steps 1.5", "--steps 1.5: must be a whole number, at least 0"),
    ("--steps", "--steps: needs a value: a whole number, at least 0"),
    ("--steps --beta 0.1", "--steps: needs a value"),
    ("--model= --reward", "--model: needs a value: text", "--reward: needs a value: text"),
    ("--beta much", "--beta much: must be a number, at least 0 and finite"),
    ("--mask_truncated perhaps", "--mask_truncated perhaps: must be true or false"),
    ("--reward r.py:f r.py:g --reward_weights 1 heavy", "--reward_weights heavy: must be a number, at least -1e+09"),
    (
        "--data d.jsonl --model m --reward r.py:f --reward_weights nan",
        "--reward_weights nan: must be a number, at least -1e+09",
    ),
    ("--top_p 1.5", "--top_p 1.5: must be a number, above 0 and at most 1"),
    ("--adam_beta2 1", "--adam_beta2 1: must be a number, at least 0 and below 1"),
    ("--temperature nan", "--temperature nan: must be a number, above 0 and finite"),
    ("--beta -1e-3", "--beta -0.001: ... at least 0"),
    ("--beta -inf", "--beta -inf: must be a number, at least 0 and finite"),
    ("--epsilon_high nan", "--epsilon_high nan: must be a number, at least 0"),
    ("--algorithm ppo", f"--algorithm ppo: must be one of {', '.join(ALGORITHMS)}"),
    ("--normalization bnpo", f"--normalization bnpo: must be one of {', '.join(NORMALIZATIONS)}"),
    ("--dtype float16", "--dtype float16: must be one of auto, float32, bfloat16"),
    ("--task math", f"--task math: must be one of {', '.join(task_names())}"),
    ("--report_to paper", "--report_to paper: must be one of tensorboard, wandb"),
]
CONTRADICTIONS = [
    ("--num_generations 1", "a group of one ... at least 2 ... --baseline batch --scale_rewards batch"),
    ("--minibatches 200", "--minibatches 200: ... 128 completions"),
    ("--task gsm8k", "--task gsm8k: needs --model"),
    ("--task data --model m --reward r.py:f", "needs --data"),
    ("--data d.jsonl --model m", "needs --reward"),
    ("--data d.jsonl --model m --reward r.py:f --reward_weights 1 2", "2 for 1 rewards"),
    ("--reward_weights 1 2", "--reward_weights: 2 for 0 rewards"),
    ("--algorithm rloo --num_iterations 2", "--objective reinforce: ... not 2 ... --objective clip"),
    ("--algorithm rloo --minibatches 4", "--objective reinforce: ... not 4 ... --minibatches 1"),
    ("--epsilon_low 1.5", "--epsilon_low 1.5: ... at most 1"),
    ("--delta 1.1", "--delta 1.1: must be above 1 + epsilon_high = 1.2"),
    ("--algorithm cispo --delta 3", "--delta 3: ... not of cispo"),
    ("--algorithm gmpo --objective cispo", "--ratio geometric: ... part of --objective clip, not of cispo"),
    ("--tis_cap 2 --tis_floor 3", "--tis_floor 3: must not be above --tis_cap 2"),
    ("--off_policy_mask 1 --top_p 0.9", "--off_policy_mask with --top_p ... --top_p 1 --top_k 0"),
    ("--old_policy sampler --top_k 9", "--old_policy sampler with --top_p ... --top_p 1 --top_k 0"),
    ("--tis_cap 2 --top_p 0.9", "--tis_cap with --top_p ... --top_p 1 --top_k 0"),
    ("--tis_cap 2 --top_k 9", "--tis_cap with --top_p ... --top_p 1 --top_k 0"),
    ("--algorithm reinforce++ --dynamic_sampling 2", "--dynamic_sampling: groups of equal rewards"),
    ("--algorithm dapo --prompts_per_step 1", "--dynamic_sampling with --prompts_per_step 1: ... at least 2"),
    ("--ref_sync_every 5", "--ref_sync_every: ... --beta above 0"),
    ("--kl_importance", "--kl_importance: ... --beta above 0"),
    ("--shard_size 2", "--shard_size 2: is part of --shard"),
    ("--steps 0 --eval_every 0", "--steps 0: evaluates, which --eval_every 0"),
]


@pytest.mark.parametrize(("line", "told"), [(line, told) for line, *told in UNKNOWN + VALUES + CONTRADICTIONS])
def test_a_mistake_is_told(capsys, line, told):
    said = mistakes(capsys, line)
    assert len(said) == len(told), said
    for one, words in zip(said, told, strict=True):
        assert re.search(".*".join(map(re.escape, words.split(" ... "))), one), one


BOUNDS = [  # a value, the numbers that refuse it; they take the second value
    (
        0,
        1,
        "prompts_per_step num_generations max_completion_length num_iterations minibatches eval_prompts eval_k",
    ),
    (0, 1, "micro_batch_size micro_batch_tokens rollout_tokens keep_checkpoints"),
    (0, 1e-9, "reward_timeout temperature tis_cap tis_floor delta max_grad_norm learning_rate top_p top_entropy"),
    (0, 1e-9, "sapo_tau_pos sapo_tau_neg"),
    (-1, 0, "steps top_k ref_sync_every dynamic_sampling warmup_steps eval_every save_every shard_size seed"),
    (-1e-9, 0, "off_policy_mask"),
    (-1e-9, 0, "beta weight_decay epsilon_low epsilon_high adam_beta1 adam_beta2"),
    (-2, -1, "samples_per_step"),
    (1, 0.999, "adam_beta1 adam_beta2"),
    (1.001, 1, "top_p top_entropy"),
    (
        math.inf,
        1e9,
        "reward_timeout temperature tis_cap delta max_grad_norm learning_rate beta weight_decay entropy_coef",
    ),
    (math.nan, math.inf, "epsilon_low epsilon_high"),
]


@pytest.mark.parametrize(("refused", "taken", "names"), BOUNDS)
def test_bounds(refused, taken, names):
    assert wrong_values(Config(**dict.fromkeys(names.split(), refused))).keys() == set(names.split())
    assert wrong_values(Config(**dict.fromkeys(names.split(), taken))) == {}


def test_every_number_has_bounds():
    numbers = {name for name, value in vars(ready(Config(), False)).items() if type(value) in (int, float)}
    assert len(numbers) > 30 and numbers <= set(" ".join(names for *_, names in BOUNDS).split())


def test_all_mistakes_at_once(capsys):
    said = mistakes(capsys, "--steps many --lerning_rate 1 --algorithm ppo --temperature 0 --minibatches 900 x --beta")
    for word in (
        "--steps many",
        "--lerning_rate",
        "--algorithm ppo",
        "--temperature 0",
        "--minibatches 900",
        "x",
        "--beta",
    ):
        assert sum(line.startswith(f"{word}:") for line in said) == 1, word
    assert len(said) == 7


def test_an_empty_word_is_a_missing_value(capsys):  # an unset variable of the shell
    assert mistakes(capsys, ["--out", ""]) == ["--out: needs a value: text"]


def test_other_names_lead_to_flags_that_exist():
    sentences = {here for here in OF_OTHERS.values() if " " in here}
    named = {name for said in sentences for name in re.findall(r"--(\w+)", said)}
    assert {*OF_OTHERS.values()} - sentences | named <= SETTINGS.keys()
    assert not OF_OTHERS.keys() & SETTINGS.keys() and "overwrite" not in named


def test_other_ranks_leave_the_telling_to_the_first(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert mistakes(capsys, "--steps -1") == []


def test_a_task_that_cannot_be_loaded_is_told_with_the_frames_of_its_file(capsys, monkeypatch):
    def broken(name: str, model: str | None) -> dict:
        error = UserError("--task addition: could not be loaded")
        error.add_note('  File "addition.py", line 1')
        raise error

    monkeypatch.setattr("infra.command_line.task_defaults", broken)
    for line in ("", "--help"):
        with pytest.raises(SystemExit) as end:
            read(line)
        assert end.value.code == 2
        assert capsys.readouterr().err == '  File "addition.py", line 1\nerror: --task addition: could not be loaded\n'


def test_a_program_is_told_as_well():
    settings = dict(steps="5", beta=None, seed=True, eval_k=2.0, reward="r.py:f", out=3, task="math", top_k=10**400)
    with pytest.raises(UserError) as error:
        ready(Config(**settings, minibatches=200), on_gpu=False)
    lines = str(error.value).split("\nerror: ")
    for name in (*settings.keys() - {"top_k"}, "minibatches"):
        assert sum(line.startswith(f"--{name} ") for line in lines) == 1, name
    assert len(lines) == len(settings)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(top_p=0.9), "slightly off-policy"),
        (dict(top_k=5), "slightly off-policy"),
        (dict(ratio="sequence", normalization="constant"), "so long ones weigh more"),
        (dict(algorithm="luspo"), "LUSPO wants this"),
        (dict(algorithm="dppo", ratio="sequence", normalization="sequence"), "by their own probability"),
        (dict(beta=0.1, kl_estimator="k1"), "adds noise alone"),
        (dict(reward=["exact_sum"], reward_weights=[-1.0]), "learns to make those rewards small"),
        (dict(temperature=0.7), "pass@k is sampled at temperature 0.7"),
    ],
)
def test_warnings(settings, words):
    (note,) = warnings(ready(Config(**settings), on_gpu=False))
    assert words in note and "\n" not in note
    assert warnings(ready(Config(), on_gpu=False)) == []


# ---- Help ----


def help_text(capsys, monkeypatch, line: str, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as end:
        read(line)
    assert end.value.code == 0
    return capsys.readouterr().out


def entries(capsys, monkeypatch, line: str) -> dict[str, str]:
    """What --help says of each flag, on one line; a flag that is there twice would fail here."""
    parts = re.split(r"\n +--(?=\w)", help_text(capsys, monkeypatch, line, columns=1000))[1:]
    pairs = [re.split(r"\W", part, maxsplit=1) for part in parts]
    assert [name for name, _ in pairs] == list(FLAGS)
    return {name: " ".join(rest.partition("\n\n")[0].split()) for name, rest in pairs}


def test_help_names_each_flag_once_with_its_default_and_names(capsys, monkeypatch):
    said = entries(capsys, monkeypatch, "--help")
    for name, setting in FLAGS.items():
        assert setting.metadata["text"] in said[name] and re.search(r"default [^()]+\)$", said[name]), said[name]
        assert ", ".join(setting.metadata["names"] or []) in said[name]
    assert ", ".join(task_names()) in said["task"]
    expected = dict(
        task="addition", seed="0", temperature="1", kl_estimator="k3", shard="false", reward="none", delta="none",
        steps="80, by task", learning_rate="0.0002, by task", epsilon_high="0.2, by algorithm", dtype="auto",
        micro_batch_tokens="2048, on a GPU what fits", out="runs/addition-grpo-0",
    )  # fmt: skip
    for name, default in expected.items():
        assert said[name].endswith(f"default {default})"), said[name]
    assert "above 0 and at most 1; " in said["top_p"]


def test_help_has_the_defaults_of_the_task_and_algorithm_beside_it(capsys, monkeypatch):
    said = entries(capsys, monkeypatch, "--task gsm8k -h --algorithm dapo --steps 7")
    assert said["steps"].endswith("default 500, by task)") and said["epsilon_high"].endswith(
        "default 0.28, by algorithm)"
    )
    assert said["task"].endswith("default addition)") and said["algorithm"].endswith("default grpo)")
    assert entries(capsys, monkeypatch, "--help --task math") == entries(capsys, monkeypatch, "--help")


@pytest.mark.parametrize("columns", [80, 120])
def test_help_is_grouped_as_the_settings_are_and_fits_the_screen(capsys, monkeypatch, columns):
    text = help_text(capsys, monkeypatch, "--help", columns)
    assert max(map(len, text.splitlines())) <= columns
    found = []
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        elif line.startswith("  --"):
            found.append((line.split()[0][2:], heading))
    assert found == [(name, setting.metadata["heading"]) for name, setting in FLAGS.items()]
    headings = dict(found)
    assert len(set(headings.values())) == 6 and headings["beta"] == headings["ratio"] == "The objective"
    assert headings["model"] != headings["top_p"] != headings["steps"] != headings["dtype"] != headings["seed"]


# ---- Prompts that cannot be used ----

LETTERS = "0123456789+=[]: abc"
CHAT = [{"role": "user", "content": "1+1"}]


@pytest.fixture
def chat_tokenizer():
    tokenizer = char_tokenizer(LETTERS)
    tokenizer.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    return tokenizer


def task_of(*prompts, held_out=()) -> Task:
    return Task([{"prompt": p} for p in prompts], [{"prompt": p} for p in held_out], [], [])


def checked(task: Task, tokenizer, context: int | None, limit: int) -> int:
    return check_prompts(
        task, SimpleNamespace(tokenizer=tokenizer, context=context), Config(max_completion_length=limit)
    )


def test_prompts_that_are_fine_need_no_note(chat_tokenizer):
    assert checked(task_of("1+1=", held_out=["12+2="]), char_tokenizer(LETTERS), context=11, limit=6) == 5
    assert checked(task_of(CHAT), chat_tokenizer, None, 10**6) > 0
    assert notes(task_of(CHAT), chat_tokenizer) == []


def test_held_out_prompts_that_are_trained_on_are_noted():
    task = task_of("1", "2", held_out=["3", "1"])
    (note,) = notes(task, char_tokenizer(LETTERS))
    assert note == "1 of the 2 held-out prompts are trained on as well"
    task.state.max_steps = 0
    assert notes(task, char_tokenizer(LETTERS)) == []


def test_prompts_that_are_too_long_can_be_left_out():
    """Which is noted; and enough must be left."""
    tokenizer = SimpleNamespace(tokenizer=char_tokenizer(LETTERS), context=10)
    config = Config(max_completion_length=3, drop_long_prompts=True)
    task = task_of("1", "1" * 8, "22", held_out=["2" * 9, "3"])
    assert check_prompts(task, tokenizer, config) == 2
    assert [row["prompt"] for row in task.train] == ["1", "22"] and [row["prompt"] for row in task.eval] == ["3"]
    (note,) = task.notes
    words = [
        "2 prompts and a completion of 3 exceed",
        "(8 tokens, '11111111'; 9 tokens, '222222222'), and are left out",
    ]
    assert all(word in note for word in words)
    for task in task_of("1" * 8, held_out=["1"]), task_of("1", held_out=["1" * 8]):
        with pytest.raises(UserError, match=r"1 prompts and .* \(8 tokens, '11111111'\), and too few others are left"):
            check_prompts(task, tokenizer, config)
    config.eval_every = 0
    assert check_prompts(task_of("1", held_out=["1" * 8]), tokenizer, config) == 1
