"""The command line: turn flags into settings, and find the mistakes that can be found before a run starts.

There is a flag for each field of Config. Settings also come from a --config file, and a flag overrides them. Left out:
mistakes that only the data, the model or the machine can reveal.
"""

import argparse
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Iterator
from dataclasses import Field, replace
from functools import cache
from pathlib import Path
from typing import NoReturn

from transformers.hf_argparser import string_to_bool

from advantage import compares_in_group
from config import ALGORITHMS, SETTINGS, Config, UserError, is_allowed, is_list, is_on, kind_of, resolve, task_of
from infra import lora, run_folder
from loss import OBJECTIVES, RATIOS, SWITCHES_READ
from tasks import REAL_MODEL_DEFAULTS, task_defaults, task_module, task_names

# ---- From the words of a command line to settings ----


def parse(words: list[str], on_gpu: bool) -> Config:
    """As `read`, for tools: a mistake ends the process with exit code 2."""
    try:
        return read(words, on_gpu)
    except UserError as error:
        flags().exit(2, f"train.py: error: {error}\n")


def read(words: list[str], on_gpu: bool) -> Config:
    """Return the settings that the user has typed, as flags or in the file of --config. All others are as in Config,
    where many are None."""
    typed, unknown = flags().parse_known_args([*for_argparse(words)])
    if unknown:
        raise UserError(f"unrecognized arguments: {' '.join(unknown)}{of_trl(unknown)}")
    typed = vars(typed)
    in_file = run_folder.settings_in(Path(typed.pop("config"))) if "config" in typed else Config()
    config = replace(in_file, **typed)
    ready(config, on_gpu)  # only to find mistakes: train.py fills in the defaults later
    return run_folder.with_absolute_paths(config)


def of_trl(words: list[str]) -> str:
    """Point to the page about TRL if the first column of its tables names one of these flags."""
    page = Path(__file__).parent.parent / "docs" / "from_trl.md"
    cells = re.findall(r"^\| (.*?) \|", page.read_text(), re.MULTILINE) if page.exists() else []
    is_of_trl = {word[2:] for word in words} & {*re.findall(r"\w+", " ".join(cells))}
    return "; docs/from_trl.md has TRL's settings" if is_of_trl else ""


def for_argparse(words: list[str]) -> Iterator[str]:
    """Yield each flag without its value, so that --learning-rate=1e-6 becomes --learning_rate and 1e-6. argparse takes
    every word that begins with a hyphen for a flag, even -1e-6 or ---. Here, a flag is two hyphens and a name. So put a
    space before all other words, which `flags` removes again."""
    for word in words:
        if re.match("--[a-zA-Z]|-h$", word):
            flag, *values = word.split("=", 1)
            yield re.sub(r"(?<=\w)-", "_", flag)
            yield from (f" {value}" for value in values)
        else:
            yield f" {word}"


def show_help(on_gpu: bool) -> int:
    """Print every flag with its default, and return the exit code."""
    flags(on_gpu, tuple(task_names())).print_help()
    return 0


def refuse(message: str) -> NoReturn:
    raise UserError(message)


@cache  # a grid of runs parses hundreds of command lines
def flags(on_gpu: bool = False, tasks: tuple[str, ...] = ()) -> argparse.ArgumentParser:
    """Return a parser with a flag for each setting, for the words of `for_argparse`. Its result has no entry for a flag
    that is not given. --help shows the defaults of these tasks."""
    about = "GRPO of a language model. Defaults are those of --algorithm grpo, other algorithms have others. None: off."
    usage = "train.py [--setting value ...]"
    parser = argparse.ArgumentParser("train.py", usage, about, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    parser.error = refuse  # in the place of a usage and an exit, which every rank would print
    # What turns a word into a value: int and float ignore the space.
    convert = {str: lambda word: word[1:], bool: lambda word: string_to_bool(word[1:]), int: int, float: float}
    parser.add_argument("--config", metavar="FILE", type=convert[str], help="settings, e.g. the config.json of a run")
    for heading, settings in itertools.groupby(SETTINGS.values(), lambda setting: setting.metadata["heading"]):
        group = parser.add_argument_group(heading)
        for setting in settings:
            kind = kind_of(setting)
            how = {"type": convert[kind]} | ({"nargs": "+", "action": "extend"} if is_list(setting) else {})
            how |= {"nargs": "?", "const": True} if kind is bool else {"choices": setting.metadata["names"]}
            text = f"{setting.metadata['text']} ({allowed(setting)}; default {default_of(setting, on_gpu, tasks)})"
            group.add_argument(f"--{setting.name}", help=text.replace("%", "%%"), **how)
    return parser


def allowed(setting: Field) -> str:
    """Describe the values that a setting may have, for instance "float at least 0 and below 1"."""
    # Tasks are files, so config.py does not list their names.
    names = task_names() if setting.name == "task" else setting.metadata["names"]
    if names:
        return f"one of {', '.join(names)}"
    bounds = [f"{name.replace('_', ' ')} {x:g}" for name, x in setting.metadata["bounds"].items() if math.isfinite(x)]
    each = f"{kind_of(setting).__name__} {' and '.join(bounds)}".rstrip()
    return f"list of {each}" if is_list(setting) else each


def default_of(setting: Field, on_gpu: bool, tasks: tuple[str, ...]) -> str:
    """Describe the value of a setting that is not given: with a real model and, where it differs, with each task."""
    name, usual = setting.name, getattr(Config(), setting.name)
    if usual is None:
        usual = getattr(resolve(Config(), REAL_MODEL_DEFAULTS, on_gpu), name)
    by_task = {task: getattr(task_module(task), "DEFAULTS", {}).get(name, usual) for task in tasks}
    others = [f"{task} {value}" for task, value in by_task.items() if value != usual]
    return f"{usual}; with --task {', '.join(others)}" if others else f"{usual}"


# ---- Mistakes in settings ----


def ready(config: Config, on_gpu: bool) -> Config:
    """Return the settings with every default filled in. Raise a UserError with a line for each mistake in them."""
    wrong = [*wrong_values(config)]
    if not wrong:
        config = as_saved_adapters(resolve(config, task_defaults(task_of(config), config.model), on_gpu))
        wrong = [*wrong_values(config)] or [*contradictions(config)]  # a task's DEFAULTS may be wrong as well
    if wrong:
        raise UserError("\n".join(wrong))
    return config


def as_saved_adapters(config: Config) -> Config:
    """If --model is a folder of adapters, take their rank and alpha from its file."""
    about = lora.read_config(config.model)
    saved = {"lora_rank": about["r"], "lora_alpha": about["lora_alpha"]} if about else {}
    for name, x in saved.items():
        if getattr(config, name) not in (x, getattr(Config, name)):
            raise UserError(f"--{name} {getattr(config, name)}: the adapters in {config.model} have {x}; leave it out")
    return replace(config, **saved)


def wrong_values(config: Config) -> Iterator[str]:
    """Yield a line for each value that is wrong whatever the other settings are."""
    for name, setting in SETTINGS.items():
        if not is_allowed(setting, value := getattr(config, name)):
            yield f"--{name} {value}: must be {allowed(setting)}"


def contradictions(config: Config) -> Iterator[str]:
    """Yield a line for each setting that does not fit the others, or that nothing would read."""
    # What is trained, and on what.
    if not config.model and not hasattr(task_module(config.task), "model"):
        yield f"--task {config.task}: needs --model"
    if config.task == "data" and not config.reward:
        yield "--task data: needs --reward"
    try:
        {**json.loads(config.chat_template_kwargs or "{}")}
    except (TypeError, ValueError):
        yield f"--chat_template_kwargs {config.chat_template_kwargs}: must be an object in JSON"

    # A switch that nothing reads must have its default value, or the value that --algorithm sets.
    for choice, reads in SWITCHES_READ.items():
        chosen = getattr(config, choice)
        for name in sorted(set().union(*reads.values()) - set(reads[chosen])):
            if getattr(config, name) not in (getattr(Config, name), ALGORITHMS[config.algorithm].get(name)):
                yield f"--{name} {getattr(config, name)}: has no effect with --{choice} {chosen}; leave it out"
    default = Config()
    for name, setting in SETTINGS.items():
        needs = setting.metadata["needs"].split()
        if (
            needs
            and getattr(config, name) != getattr(default, name)
            and not any(is_on(config, other) for other in needs)
        ):
            yield f"--{name}: has no effect without {' or '.join(f'--{other}' for other in needs)}; leave it out"
    if config.old_policy == "sampler" and config.objective == "reinforce" and not config.kl_importance:
        yield "--old_policy: has no effect without a ratio of policies; leave it out"
    if config.overlong_buffer and not any(name.endswith("overlong") for name in config.reward):
        yield "--overlong_buffer: has no effect without --reward overlong; leave it out"
    if config.lr_schedule != "constant" and 0 < config.steps <= config.warmup_steps:
        yield "--lr_schedule: has no effect without steps after the warm-up; leave it out"

    # The objective.
    one_update = config.num_iterations * config.minibatches == 1
    if config.objective == "reinforce" and not one_update and not config.sampler_coef:
        yield "--objective reinforce: has no ratio, so use one update per rollout, or --sampler_coef"
    if config.objective == "cispo" and config.epsilon_high < 1.0:
        yield f"--epsilon_high {config.epsilon_high:g}: cispo caps ratios at this value; use at least 1, for instance 5"
    if config.objective == "clip" and config.delta is not None and config.delta <= 1 + config.epsilon_high:
        yield f"--delta {config.delta:g}: must be above 1 + epsilon_high"
    if config.ratio == "geometric" and config.objective != "clip":
        yield f"--ratio geometric: can be used with --objective clip, but not with {config.objective}"
    if config.objective == "vespo" and not config.tis_mode.startswith("token"):
        yield f"--tis_mode {config.tis_mode}: vespo already multiplies the ratios of all tokens; use a token mode"
    if config.reads_sampler and config.cuts_vocabulary and not config.keep_set:
        yield "--keep_set false: cannot be used with settings that read the log-probs of the sampler"
    if config.server and config.cuts_vocabulary and config.keep_set:
        yield "--server: cannot record the tokens that --top_p, --top_k and --min_p leave; use --keep_set false"
    if config.score_centering:
        yield from (f"--score_centering: cannot be used with {other}" for other in not_centered(config, one_update))
    if config.scale_rewards == "mean" and config.combine_rewards == "gdpo":
        yield "--scale_rewards mean: cannot divide by the means, because --combine_rewards gdpo makes them 0"
    if config.normalization == "prompt" and config.minibatches > 1:
        yield "--normalization prompt: needs all completions of a prompt in one update; use --minibatches 1"
    compares = compares_in_group(config.scale_rewards, config.baseline, config.combine_rewards)
    if config.num_generations == 1 and (compares or config.dynamic_sampling):
        yield "--num_generations 1: a group of one compares nothing; use --baseline batch and --scale_rewards batch"
    if config.ref_sync_every and (config.reference or config.lora_rank):
        yield "--ref_sync_every: with --reference or --lora_rank, the reference is not a copy of the policy"
    if (config.tis_floor or 0.0) > (config.tis_cap or math.inf):
        yield f"--tis_floor {config.tis_floor:g} --tis_cap {config.tis_cap:g}: the floor must not be above the cap"
    if (config.gate_low or 0.0) >= 1.0 or (config.gate_high or math.inf) <= 1.0:
        yield "--gate_low, --gate_high: must be below and above 1, because pi_old / pi_sampler is about 1"
    if (config.overlong_buffer or 0) > config.max_completion_length:
        yield f"--overlong_buffer {config.overlong_buffer}: must be at most --max_completion_length"
    if config.minibatches > config.prompts_per_step * config.num_generations:
        yield f"--minibatches {config.minibatches}: a step has fewer completions"
    if config.steps == 0 and not config.eval_every:
        yield "--steps 0 --eval_every 0: the run would neither train nor evaluate"
    if config.report_to and importlib.util.find_spec(config.report_to) is None:
        yield f"--report_to {config.report_to}: the package is not installed; pip install {config.report_to}"
    if config.top_entropy < 1 and RATIOS[config.ratio].mixes_tokens and OBJECTIVES[config.objective].by_ratio:
        yield f"--top_entropy with --ratio {config.ratio}: trains all tokens through the ratio; use sequence_token"


def not_centered(config: Config, one_update: bool) -> list[str]:
    """Return each setting with which the weight of a token is not a function of pi / pi_sampler at that token. The
    score that is expected under the sampler needs this function at other ids."""
    has_tis = config.tis_cap is not None or config.tis_floor is not None
    centered_with = OBJECTIVES[config.objective].centered_with
    has_ratio_of_policies = config.old_policy == "policy" and config.objective != "reinforce"
    refused = {
        f"--objective {config.objective} --old_policy {config.old_policy}": config.old_policy not in centered_with,
        f"--ratio {config.ratio}": config.ratio != "token",
        "several updates": not one_update and (has_tis or has_ratio_of_policies),  # pi / pi_old is not pi / pi_sampler
        f"--tis_mode {config.tis_mode}": has_tis and not config.tis_mode.startswith("token"),
    }
    dropping = "gate_low", "gate_high", "gate_kl", "off_policy_mask", "delta"
    refused |= {f"--{name}": getattr(config, name) is not None for name in dropping}
    return [name for name, is_refused in refused.items() if is_refused]


def warnings(config: Config) -> Iterator[str]:
    """Yield a line for each combination that is allowed but seldom wanted."""
    if config.lora_rank and config.learning_rate == task_defaults(config.task, config.model)["learning_rate"]:
        yield f"learning_rate {config.learning_rate:g} suits full fine-tuning; use about ten times that with adapters"
    if any("\\n" in stop for stop in config.stop):
        yield r"stop: \n is a backslash and an n; for the end of a line, many shells take $'\n'"
    if 0 < config.steps < config.warmup_steps:
        yield f"learning_rate {config.learning_rate:g} is never reached: the warm-up is longer than the run"
