"""The command line -> settings, and everything that can be wrong with them before a run.

A flag is made of each field of Config. Settings also come from files: --config, and the run that --out goes on with.
Every mistake is told at once, each in a line that says what was given, what is allowed and what to change. Left out:
what only the model or the machine can tell (model.py, memory.py).
"""

import dataclasses
import difflib
import json
import math
import operator
import os
import shutil
import textwrap
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import Field, dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from advantage import compares_in_group
from config import ALGORITHMS, Config, UserError, resolve, task_of
from config import setting as a_setting
from infra import run_folder
from infra.faults import report_failure
from infra.model import Opened
from tasks import Task, encode_prompt, task_defaults, task_file, task_names, text_of
from tasks._files import Row, excerpt
from tasks._rewards import GIVEN


@dataclass
class Flags(Config):
    config: str | None = a_setting(None, "file of settings: a run's config.json, or your own; flags win over it")


SETTINGS = {field.name: field for field in dataclasses.fields(Config)}
FLAGS = {field.name: field for field in dataclasses.fields(Flags)}


def parse(args: list[str], on_gpu: bool) -> Config:
    """The command line -> resolved settings; or all that is wrong with it on stderr, and exit code 2."""
    flags, errors = _read_flags(args)
    context = []  # frames of a task's file that cannot be loaded
    try:
        settings, unknown = _with_files(flags, on_gpu)
        errors += unknown
        if not HELP.isdisjoint(args):
            print(_help(settings))
            raise SystemExit(0)
        config = ready(Config(**settings), on_gpu)
    except OSError as error:  # of a file with settings
        errors.append(f"{error.filename}: {error.strerror}")
    except UserError as error:
        errors.append(str(error))
        context = getattr(error, "__notes__", [])
    if errors:
        message = "\n".join([*context, *(f"error: {line}" for line in errors)])
        report_failure(message, show=os.environ.get("RANK", "0") == "0")
        raise SystemExit(2)
    return config


def _with_files(flags: dict, on_gpu: bool) -> tuple[dict, list[str]]:
    """Flags win over --config, and both over what the run has that --out goes on with. -> settings, errors"""
    file, errors = flags.pop("config", None), []
    if file is not None:
        found = _beyond_defaults(Path(file), on_gpu)
        errors = [f"{file}: {_no_such_flag(f'--{name}')}" for name in found if name not in SETTINGS]
        flags = found | flags
    out = flags.get("out")
    if isinstance(out, str) and not flags.get("overwrite") and run_folder.made_steps(Path(out)) is not None:
        flags = _beyond_defaults(Path(out) / "config.json", on_gpu) | flags
    return {name: flags[name] for name in SETTINGS if name in flags}, errors


def _beyond_defaults(file: Path, on_gpu: bool) -> dict:
    """The settings in a file. A run has written all that it had there: what its task and algorithm brought is left out,
    so that another --task or --algorithm brings its own."""
    settings = run_folder.read_settings(file)
    by_hand = ("task", "algorithm", "model", "data", "micro_batch_size")
    chosen = {name: settings[name] for name in by_hand if name in settings}
    brought = vars(_filled_in(Config(**chosen), on_gpu))
    return chosen | {name: x for name, x in settings.items() if name not in brought or x != brought[name]}


def ready(config: Config, on_gpu: bool) -> Config:
    """Resolved settings that a run can start with; or a UserError with a line for each mistake."""
    resolved = _filled_in(config, on_gpu)
    wrong_defaults = wrong_values(resolved)  # of a task
    errors = [*wrong_values(config).values(), *wrong_defaults.values()]
    if not wrong_defaults:
        errors += _contradictions(resolved)
    if errors:
        raise UserError("\nerror: ".join(errors))
    return resolved


def _filled_in(config: Config, on_gpu: bool) -> Config:
    """The default stands in for a value that cannot be, so that the rest can be checked."""
    plain = Config()
    config = dataclasses.replace(config, **{name: getattr(plain, name) for name in wrong_values(config)})
    return resolve(config, task_defaults(task_of(config), config.model), on_gpu)


# ---- Words -> values ----

TRUTHS = dict.fromkeys("true t yes y 1".split(), True) | dict.fromkeys("false f no n 0".split(), False)
OF_OTHERS = {  # what others call it: the setting here, or what is in its place
    "lr": "learning_rate", "max_steps": "steps", "loss_type": "normalization", "importance_sampling_level": "ratio",
    "epsilon clip_ratio clip_ratio_low": "epsilon_low", "clip_ratio_high": "epsilon_high", "output_dir": "out",
    "kl_coef kl_loss_coef init_kl_coef": "beta", "use_bias_correction_kl": "kl_importance", "bf16 fp16": "dtype",
    "per_device_train_batch_size gradient_accumulation_steps": "micro_batch_size", "ppo_epochs": "num_iterations",
    "train_batch_size": "prompts_per_step", "group_size": "num_generations", "steps_per_generation": "minibatches",
    "max_new_tokens max_tokens": "max_completion_length", "mask_truncated_completions": "mask_truncated",
    "model_name_or_path model_name": "model", "dataset_name dataset train_file": "data", "reward_funcs": "reward",
    "save_steps save_freq": "save_every", "save_total_limit": "keep_checkpoints", "eval_steps test_freq": "eval_every",
    "ref_model_sync_steps": "ref_sync_every", "lr_scheduler_type": "lr_schedule",
    "filter_overlong_prompts": "drop_long_prompts",
    "num_train_epochs total_epochs num_epochs epochs": "the length of a run is its --steps",
    "max_prompt_length": "prompts are never cut; see --drop_long_prompts", "logging_steps": "every step is logged",
    "warmup_ratio": "give the number of --warmup_steps", "generation_batch_size": "give --prompts_per_step",
    "resume_from_checkpoint overwrite_output_dir": "the same command with the same --out continues a run",
    "use_vllm": "the model itself samples", "use_peft lora_r": "all weights are trained", "optim": "it is AdamW",
    "deepspeed fsdp": "see --shard",
}  # fmt: skip
OF_OTHERS = {name: here for names, here in OF_OTHERS.items() for name in names.split()}


def _kind_of(setting: Field) -> type:
    """str, int, float or bool: what an optional setting is if it is given, and each value of a list."""
    return (get_args(setting.type) or (setting.type,))[0]


def _is_list(setting: Field) -> bool:
    return get_origin(setting.type) is list


def _read_flags(args: list[str]) -> tuple[dict[str, Any], list[str]]:
    """-> values by the name of their setting, and a line for each word that belongs to none. Hyphens in a name count as
    underscores. A flag that does not exist takes its values with it."""
    groups = [[""]]  # a flag and the words after it
    for word in args:
        if word.startswith("-") and isinstance(_as_kind(float, word), str):
            groups.append([word])
        else:
            groups[-1].append(word)
    given, errors = {}, []
    for flag, *words in groups:
        name, equals, value = flag.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        words = [value, *words] if equals else words
        taken = 0
        if flag.startswith("--") and name in FLAGS:
            taken = len(words) if _is_list(FLAGS[name]) else 1
            given[name] = _read(FLAGS[name], words[:taken])
        elif flag not in ("", *HELP):
            taken = len(words)
            errors.append(_no_such_flag(flag))
        errors += [f"{word}: belongs to no flag" for word in words[taken:]]
    return given, errors


def _no_such_flag(word: str) -> str:
    name = word.lstrip("-").split("=")[0].replace("-", "_")
    meant = OF_OTHERS.get(name) or "".join(difflib.get_close_matches(name, FLAGS, n=1, cutoff=0.8)) or "see --help"
    hint = f"did you mean --{meant}?" if meant in FLAGS else meant
    return f"{word}: there is no such flag; {hint}"


def _read(setting: Field, words: list[str]) -> Any:
    kind = _kind_of(setting)
    values = [_as_kind(kind, word) for word in words or ["true" if kind is bool else ""]]
    return values if _is_list(setting) else values[0]


def _as_kind(kind: type, word: str) -> Any:
    """A word that cannot be read stays as it is, and `wrong_values` tells it."""
    word = word.strip()
    if kind is bool:
        return TRUTHS.get(word.lower(), word)
    try:
        return kind(word)
    except ValueError:
        return word


# ---- --help ----

HELP = {"-h", "--help"}
ABOUT = """GRPO of a language model. Defaults by task and algorithm are those of the --task and --algorithm that stand
beside --help."""
PLACEHOLDERS = {str: "TEXT", int: "N", float: "X", bool: "[true|false]"}


def _help(settings: dict) -> str:
    width = shutil.get_terminal_size().columns - 2
    lines = ["usage: train.py [--setting value ...]", "", textwrap.fill(ABOUT, width)]
    defaults, heading = _defaults_in_words(settings), None
    for name, setting in FLAGS.items():
        if setting.metadata["heading"] != heading:
            heading = setting.metadata["heading"]
            lines += ["", f"{heading}:"]
        value = "NAME" if _names_of(setting) else PLACEHOLDERS[_kind_of(setting)]
        flag = f"  --{name} {value} ..." if _is_list(setting) else f"  --{name} {value}"
        limits = ", ".join(_names_of(setting)) or " and ".join(_limits_of(setting))
        brackets = "; ".join(filter(None, [limits, f"default {defaults[name]}"]))
        text = f"{setting.metadata['text']} ({brackets})"
        lines.append(textwrap.fill(text, width, initial_indent=f"{flag:30}  ", subsequent_indent=" " * 32))
    return "\n".join(lines)


def _defaults_in_words(settings: dict) -> dict[str, str]:
    """Of every setting; where it is by task or algorithm, for those of `settings`."""
    chosen = {name: settings[name] for name in ("task", "algorithm") if name in settings}
    on_cpu, on_gpu = (_filled_in(Config(**chosen), on_gpu) for on_gpu in (False, True))
    by_task = task_defaults(on_cpu.task, None)
    words = {"config": "none"}
    for name in SETTINGS:
        here, there = getattr(on_cpu, name), getattr(on_gpu, name)
        words[name] = _in_words(here)
        if here != there:
            words[name] += f", on a GPU {'what fits' if there is None else _in_words(there)}"
        elif name in by_task:
            words[name] += ", by task"
        elif name in ALGORITHMS[on_cpu.algorithm]:
            words[name] += ", by algorithm"
    return words | {"task": task_of(Config()), "algorithm": Config.algorithm, "dtype": Config.dtype}


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value in (None, []) else str(value)


# ---- Each setting by itself ----

KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


def wrong_values(config: Config) -> dict[str, str]:
    """A line for each setting whose value cannot be, whatever the others are."""
    lines = {}
    for name, setting in SETTINGS.items():
        value = getattr(config, name)
        if value is None and setting.default is None:
            continue
        if _is_list(setting) and not isinstance(value, list):
            lines[name] = f"--{name} {_in_words(value)}: must be a list"
            continue
        wrong = [item for item in (value if _is_list(setting) else [value]) if not _is_allowed(setting, item)]
        if wrong:
            given = " ".join([f"--{name}", *map(_in_words, wrong)]).rstrip()
            lines[name] = f"{given}: {'needs a value: ' if wrong == [''] else 'must be '}{_allowed(setting)}"
    return lines


def _is_allowed(setting: Field, value: Any) -> bool:
    kind = _kind_of(setting)
    of_kind = isinstance(value, (int, float) if kind is float else kind)
    if not of_kind or (isinstance(value, bool) and kind is not bool):
        return False
    if _names_of(setting):
        return value in _names_of(setting)
    if kind is str:
        return value != ""
    bounds = setting.metadata["bounds"]
    is_finite = isinstance(value, int) or math.isfinite(value) or value == bounds.get("at_most")
    return is_finite and all(BOUNDS[name](value, bound) for name, bound in bounds.items())


def _allowed(setting: Field) -> str:
    if _names_of(setting):
        return f"one of {', '.join(_names_of(setting))}"
    kind, limits = _kind_of(setting), _limits_of(setting)
    if kind is float and not setting.metadata["bounds"].keys() & {"below", "at_most"}:
        limits.append("finite")
    return f"{KINDS[kind]}, {' and '.join(limits)}" if limits else KINDS[kind]


def _names_of(setting: Field) -> list[str]:
    """Those of a choice. A task is a file, so its name is not known to config.py."""
    return task_names() if setting.name == "task" else list(setting.metadata["names"] or [])


def _limits_of(setting: Field) -> list[str]:
    """ "at least 0", "below 1" """
    bounds = setting.metadata["bounds"].items()
    return [f"{name.replace('_', ' ')} {bound:g}" for name, bound in bounds if math.isfinite(bound)]


# ---- Settings together ----


def _contradictions(config: Config) -> Iterator[str]:
    # What is trained, and on what.
    if config.model is None and not hasattr(task_file(config.task), "model"):
        yield f"--task {config.task}: needs --model, a folder or a hub name"
    if config.task == "data" and not config.data:
        yield "--task data: needs --data, a .jsonl file or a hub data set"
    if config.task == "data" and not config.reward:
        yield "--data: needs --reward file.py:function, or a --task whose rewards it is for"
    weights, rewards = len(config.reward_weights), len(config.reward)
    if weights and weights != rewards:
        yield f"--reward_weights: {weights} for {rewards} rewards; give one for each"

    # The objective.
    updates = config.num_iterations * config.minibatches
    if config.objective == "reinforce" and updates > 1:
        yield (
            f"--objective reinforce: has no ratio, so it is right for one update a rollout, not {updates}; "
            "set --num_iterations 1 --minibatches 1, or use --objective clip"
        )
    if config.objective == "clip" and config.epsilon_low > 1.0:
        yield f"--epsilon_low {config.epsilon_low:g}: 1 - epsilon_low must not be negative; use at most 1"
    if config.delta is not None and config.objective == "clip" and config.delta <= 1 + config.epsilon_high:
        yield f"--delta {config.delta:g}: must be above 1 + epsilon_high = {1 + config.epsilon_high:g}"
    if config.delta is not None and config.objective != "clip":
        yield f"--delta {config.delta:g}: is part of --objective clip, not of {config.objective}; leave it out"
    if config.ratio == "geometric" and config.objective != "clip":
        yield f"--ratio geometric: clips by itself and is part of --objective clip, not of {config.objective}"
    if config.tis_cap and config.tis_floor and config.tis_floor > config.tis_cap:
        yield f"--tis_floor {config.tis_floor:g}: must not be above --tis_cap {config.tis_cap:g}"
    of_sampler = ["tis_cap", "tis_floor", "off_policy_mask"]
    of_sampler = [f"--{name}" for name in of_sampler if getattr(config, name) is not None]
    of_sampler += ["--old_policy sampler"] if config.old_policy == "sampler" else []
    if of_sampler and (config.top_p < 1.0 or config.top_k > 0):
        yield (
            f"{of_sampler[0]} with --top_p or --top_k: the sampler's recorded log-probs are of the whole distribution, "
            "so the correction would be wrong; set --top_p 1 --top_k 0"
        )
    if config.ref_sync_every and config.beta == 0.0:
        yield "--ref_sync_every: there is no reference model without --beta above 0"
    if config.kl_importance and config.beta == 0.0:
        yield "--kl_importance: there is no KL term without --beta above 0"

    # The step.
    if config.steps == 0 and config.eval_every == 0:
        yield "--steps 0: evaluates, which --eval_every 0 says never to do; give --eval_every 1"
    completions = config.prompts_per_step * config.num_generations
    in_group = compares_in_group(config.scale_rewards, config.baseline)
    if config.num_generations == 1 and in_group:
        yield (
            "--num_generations 1: a group of one has nothing to compare with; use at least 2, "
            "or --baseline batch --scale_rewards batch"
        )
    if config.minibatches > completions:
        yield f"--minibatches {config.minibatches}: more than the {completions} completions of a step"
    if config.dynamic_sampling and not in_group:
        yield "--dynamic_sampling: groups of equal rewards are no dead weight under a baseline of the batch"
    if config.dynamic_sampling and config.prompts_per_step == 1:
        yield "--dynamic_sampling with --prompts_per_step 1: use at least 2 prompts, or --dynamic_sampling 0"
    if config.shard_size and not config.shard:
        yield f"--shard_size {config.shard_size}: is part of --shard; give both or neither"


def warnings(config: Config) -> list[str]:
    """What is allowed but worth a line."""
    notes = []
    if config.top_p < 1.0 or config.top_k > 0:
        notes.append(
            "top_p or top_k: completions come from a truncated distribution, log-probs are of the whole one, so the "
            "update is slightly off-policy"
        )
    if config.ratio != "token" and config.normalization != "sequence":
        notes.append(
            f"ratio {config.ratio} with normalization {config.normalization}: a completion's ratio counts for each "
            "of its tokens, so long ones weigh more (LUSPO wants this, GSPO and GMPO do not)"
        )
    if config.objective == "dppo" and config.ratio == "sequence":
        notes.append("objective dppo with ratio sequence: dppo drops tokens by their own probability")
    if config.beta and config.kl_estimator == "k1" and not config.kl_importance:
        notes.append("kl_estimator k1: on-policy its gradient is 0 on average, so beta adds noise alone; use k2 or k3")
    if any(weight < 0 for weight in config.reward_weights):
        notes.append("reward_weights below 0: the run learns to make those rewards small")
    if config.temperature != 1.0 and config.eval_every:
        notes.append(f"pass@k is sampled at temperature {config.temperature:g}")
    return notes


# ---- Prompts ----


def check_prompts(task: Task, opened: Opened, config: Config) -> int:
    """Every prompt can be encoded and leaves room for its completion, or is left out where the settings say so.
    -> tokens of the longest"""
    tokenizer = opened.tokenizer
    room = (opened.context or math.inf) - config.max_completion_length
    if task.eos_id is not None and tokenizer.eos_token_id != task.eos_id:
        raise UserError(
            f"--model {config.model}: --task {config.task} is for its own small model, or one trained from it"
        )
    too_long: dict[int, str] = {}  # by the identity of a row
    longest = letters = lost = 0
    for row in task.train + task.eval:
        where = row.where if isinstance(row, Row) else excerpt(row["prompt"])
        ids = _encoded(tokenizer, row["prompt"], where)
        if len(ids) > room:
            too_long[id(row)] = f"{len(ids)} tokens, {where}"
            continue
        longest = max(longest, len(ids))
        if letters < 1000:
            wanted = _letters(text_of(row["prompt"]))
            letters += wanted.total()
            known = [token for token in ids if token not in (tokenizer.unk_token_id, tokenizer.pad_token_id)]
            lost += (wanted - _letters(tokenizer.decode(known))).total()
    if too_long:
        _leave_out(too_long, task, opened, config)
    if lost > letters / 2:
        raise UserError(
            f"--model {config.model}: its tokenizer cannot encode the prompts ({lost} of {letters} letters are lost): "
            "is one of its files missing, or is it for other text?"
        )
    return longest


def _encoded(tokenizer: Any, prompt: Any, where: str) -> list[int]:
    if not isinstance(prompt, str) and tokenizer.chat_template is None:
        raise UserError("the prompts are chat messages, but the tokenizer has no chat template: use string prompts")
    try:
        ids = encode_prompt(tokenizer, prompt)
    except Exception as error:  # of a chat template, say
        told = f"{type(error).__name__}: {error}: {where}: {excerpt(prompt)}"
        raise UserError(f"a prompt could not be encoded: {told}") from error
    if not ids:
        raise UserError(f"a prompt has no tokens: {where}: {excerpt(prompt)}")
    return ids


def _leave_out(too_long: dict[int, str], task: Task, opened: Opened, config: Config) -> None:
    some = [*too_long.values()][:3]
    if len(too_long) > 3:
        some.append(f"and {len(too_long) - 3} more")
    told = (
        f"{len(too_long)} prompts and a completion of {config.max_completion_length} exceed the model's context of "
        f"{opened.context} ({'; '.join(some)})"
    )
    if not config.drop_long_prompts:
        raise UserError(f"{told}: shorten or --drop_long_prompts, or lower --max_completion_length")
    task.train, task.eval = ([row for row in part if id(row) not in too_long] for part in (task.train, task.eval))
    if not task.train or (config.eval_every and not task.eval):
        raise UserError(f"{told}, and too few others are left: lower --max_completion_length")
    task.notes.append(f"{told}, and are left out")


def _letters(text: str) -> Counter:
    return Counter(letter for letter in unicodedata.normalize("NFKD", text).casefold() if letter.isalnum())


def notes(task: Task, tokenizer: Any) -> list[str]:
    found, columns = [*task.notes], task.train[0].keys()
    trained_on = {json.dumps(row["prompt"]) for row in task.train}
    in_both = sum(json.dumps(row["prompt"]) in trained_on for row in task.eval)
    if in_both and task.state.max_steps != 0:  # without a step, it is an evaluation
        found.append(f"{in_both} of the {len(task.eval)} held-out prompts are trained on as well")
    if tokenizer.chat_template is not None and any(isinstance(row["prompt"], str) for row in task.train):
        found.append(
            "the prompts are strings, so the model's chat template is not applied; give chat messages to apply it"
        )
    if any(not isinstance(row["prompt"], str) and row["prompt"][-1]["role"] == "assistant" for row in task.train):
        found.append("some prompts end with a message of the assistant, which is answered, not continued")
    for name in [name for name in ("tools", "images", "image", "chat_template_kwargs") if name in columns]:
        found.append(f"the column {name} goes to the rewards alone: no prompt is made with it")
    for name in [name for name in GIVEN if name in columns]:
        found.append(f"the column {name} is not used: rewards are given the {name} of the run under that name")
    return found
