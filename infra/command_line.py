"""The command line -> settings, by argparse, and the mistakes in them that can be found before a run starts.

A flag is made of each field of Config. Settings also come from files: --config, and the run that --out continues. A
flag wins over both. Left out: mistakes that only the rows, the model or the machine can reveal.
"""

import argparse
import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any, get_args, get_origin

from transformers.hf_argparser import string_to_bool

from advantage import compares_in_group
from config import ALGORITHMS, Config, UserError, resolve, task_of
from infra import run_folder
from loss import SWITCHES_READ
from tasks import task_defaults, task_file, task_names

SETTINGS = {field.name: field for field in dataclasses.fields(Config)}
BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


# ---- Words -> settings ----


def parse(words: list[str], on_gpu: bool) -> Config:
    """-> the settings that were given, the others as in Config. A mistake ends the process with exit code 2."""
    words = [re.sub(r"^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in words]
    parser = flags()
    try:
        if file := parser.parse_args(words).config:
            words = [*words_of(run_folder.given_in(Path(file))), *words]
        given = {name: x for name, x in vars(parser.parse_args(words)).items() if name != "config"}
        out, there = Path(given.get("out", "")).expanduser(), Config()
        if "out" in given and not given.get("overwrite") and run_folder.made_steps(out) is not None:
            there = dataclasses.replace(run_folder.settings_of(out), overwrite=False)  # it started over only once
        config = dataclasses.replace(there, **given)
        ready(config, on_gpu)
    except (UserError, OSError, ValueError) as error:
        parser.error(str(error))
    return config


def words_of(settings: dict) -> list[str]:
    """The settings of a file as words of a command line. null leaves a setting open."""
    words = []
    for name, x in settings.items():
        if isinstance(x, list):
            words += [f"--{name}", *map(str, x)]
        elif x is not None:
            words.append(f"--{name}={x}")
    return words


def flags() -> argparse.ArgumentParser:
    about = "GRPO of a language model. A default of None is the task's, the algorithm's or the machine's."
    parser = argparse.ArgumentParser("train.py", "train.py [--setting value ...]", about, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="settings, as a run's config.json; flags win over it")
    for heading, settings in itertools.groupby(SETTINGS.values(), lambda setting: setting.metadata["heading"]):
        group = parser.add_argument_group(heading)
        for setting in settings:
            kind = kind_of(setting)
            how = {"nargs": "?", "const": True, "type": string_to_bool} if kind is bool else {"type": kind}
            how |= {"nargs": "+"} if is_list(setting) else {"choices": setting.metadata["names"]}
            default = getattr(Config(), setting.name)
            text = f"{setting.metadata['text']} ({allowed(setting)}; default {default})".replace("%", "%%")
            group.add_argument(f"--{setting.name}", default=argparse.SUPPRESS, help=text, **how)
    return parser


def kind_of(setting: Field) -> type:
    """str, int, float or bool: of an optional setting if it is given, and of each value of a list"""
    return (get_args(setting.type) or (setting.type,))[0]


def is_list(setting: Field) -> bool:
    return get_origin(setting.type) is list


def allowed(setting: Field) -> str:
    """For instance "float at least 0 and below 1"."""
    # A task is a file, so config.py does not know its name.
    if names := task_names() if setting.name == "task" else setting.metadata["names"]:
        return f"one of {', '.join(names)}"
    bounds = [f"{name.replace('_', ' ')} {x:g}" for name, x in setting.metadata["bounds"].items() if math.isfinite(x)]
    each = f"{kind_of(setting).__name__} {' and '.join(bounds)}".rstrip()
    return f"list of {each}" if is_list(setting) else each


# ---- Mistakes in settings ----


def ready(config: Config, on_gpu: bool) -> Config:
    """-> the resolved settings, if a run can start with them; otherwise a UserError with a line for each mistake"""
    config = resolve(config, task_defaults(task_of(config), config.model), on_gpu)
    if wrong := [*wrong_values(config)] or [*contradictions(config)]:
        raise UserError("\n".join(wrong))
    return config


def wrong_values(config: Config) -> Iterator[str]:
    """A line for each setting whose value is wrong, whatever the others are."""
    for name, setting in SETTINGS.items():
        value = getattr(config, name)
        if not all(is_allowed(setting, x) for x in (value if isinstance(value, list) else [value]) if x is not None):
            yield f"--{name} {value}: must be {allowed(setting)}"


def is_allowed(setting: Field, value: Any) -> bool:
    if kind_of(setting) in (str, bool):
        return value != ""  # an unset variable of the shell
    bounds = setting.metadata["bounds"]
    is_finite = abs(value) < math.inf or value == bounds.get("at_most")
    return is_finite and all(BOUNDS[name](value, bound) for name, bound in bounds.items())


def contradictions(config: Config) -> Iterator[str]:
    # What is trained, and on what.
    needed = [] if hasattr(task_file(config.task), "model") else ["model"]
    rows = "data" if config.steps or not config.eval_data else "eval_data"  # an evaluation trains on nothing
    needed += [rows, "reward"] if config.task == "data" else []
    yield from (f"--task {config.task}: needs --{name}" for name in needed if not getattr(config, name))
    if config.reward_weights and len(config.reward_weights) != len(config.reward):
        yield f"--reward_weights {config.reward_weights}: give one for each of {len(config.reward)} rewards"

    # The objective.
    updates = config.num_iterations * config.minibatches
    preset, read = vars(Config()) | ALGORITHMS[config.algorithm], SWITCHES_READ[config.objective]
    for name in sorted({name for names in SWITCHES_READ.values() for name in names} - {*read}):
        if getattr(config, name) not in (preset[name], getattr(Config, name)):
            yield f"--{name} {getattr(config, name)}: is not read by --objective {config.objective}; leave it out"
    if config.objective == "reinforce" and updates > 1:
        yield f"--objective reinforce: has no ratio, so it is right for one update a rollout, not for {updates}"
    if config.objective == "reinforce" and config.old_policy == "sampler" and not config.kl_importance:
        yield "--old_policy sampler: is not read by --objective reinforce, which has no ratio; leave it out"
    if config.objective == "cispo" and config.epsilon_high < 1.0:
        yield f"--epsilon_high {config.epsilon_high:g}: is the cap itself under cispo, below every ratio; use 5, say"
    least = math.inf if config.ratio == "geometric" else 1 + config.epsilon_high  # it clips the logarithm alone
    if config.delta is not None and config.objective == "clip" and config.delta <= least:
        yield f"--delta {config.delta:g}: must be above 1 + epsilon_high, and is not for --ratio geometric"
    if config.ratio == "geometric" and config.objective != "clip":
        yield f"--ratio geometric: clips by itself and is part of --objective clip, not of {config.objective}"
    given = [name for name in ("tis_cap", "tis_floor", "gate_low", "gate_high") if getattr(config, name) is not None]
    bounded = config.tis_cap is not None or config.tis_floor is not None
    if config.tis_mode == "geometric_mask":  # of a run of an earlier version
        yield "--tis_mode geometric_mask: is now --gate_low and --gate_high, in place of --tis_floor and --tis_cap"
    if config.tis_mode != Config.tis_mode and not bounded:
        yield f"--tis_mode {config.tis_mode}: corrects nothing without --tis_cap or --tis_floor"
    if bounded and config.objective == "vespo" and not config.tis_mode.startswith("token"):
        yield f"--tis_mode {config.tis_mode}: --objective vespo takes the product itself; use a mode of tokens"
    if given and config.old_policy == "sampler":
        yield f"--{given[0]} with --old_policy sampler: the ratio that it bounds is always 1"
    for low, high in (("tis_floor", "tis_cap"), ("gate_low", "gate_high")):
        if (getattr(config, low) or 0.0) > (getattr(config, high) or math.inf):
            yield f"--{low} {getattr(config, low):g}: must not be above --{high} {getattr(config, high):g}"
    corrected = given or config.off_policy_mask is not None or config.sampler_coef
    if (corrected or config.old_policy == "sampler") and config.truncates and not config.keep_set:
        yield "--keep_set false: old_policy sampler, tis_*, gate_*, off_policy_mask, sampler_coef need the kept sets"
    if config.scale_rewards == "mean" and config.combine_rewards == "gdpo":
        yield "--scale_rewards mean: would divide by means that --combine_rewards gdpo has made 0"
    if config.normalization == "prompt" and config.minibatches > 1:
        yield "--normalization prompt with --minibatches: a prompt's completions would be in several updates"
    compares = compares_in_group(config.scale_rewards, config.baseline, config.combine_rewards)
    if config.num_generations == 1 and (compares or config.dynamic_sampling):
        yield "--num_generations 1: a group of one has nothing to compare with; use the batch's baseline and scale"
    if config.minibatches > config.prompts_per_step * config.num_generations:
        yield f"--minibatches {config.minibatches}: more than a step has completions"
    if config.steps == 0 and config.eval_every == 0:
        yield "--steps 0 with --eval_every 0: nothing to do"
    if config.kl_importance and config.kl_estimator not in ("k1", "k3"):
        yield f"--kl_importance: the ratio makes k1 and k3 exact, not {config.kl_estimator}"
    only_with = dict.fromkeys(("kl_estimator", "kl_importance", "ref_sync_every"), "beta")
    only_with |= dict(shard_size="shard", lora_alpha="lora_rank", eval_k="eval_every")
    for name, other in only_with.items():
        if getattr(config, name) != getattr(Config, name) and not getattr(config, other):
            yield f"--{name}: is not read without --{other}"
    if not (config.keep_set or config.truncates):
        yield "--keep_set: is not read without --top_p, --top_k or --min_p"
    if config.lr_schedule != Config.lr_schedule and 0 < config.steps <= config.warmup_steps:
        yield "--lr_schedule: is not read without --steps after the --warmup_steps"
    if config.ref_sync_every and config.lora_rank:
        yield "--ref_sync_every with --lora_rank: the reference is the model without adapters, and never changes"


def warnings(config: Config) -> Iterator[str]:
    """What is allowed but worth a line."""
    if config.lora_rank and config.learning_rate == task_defaults(config.task, config.model)["learning_rate"]:
        yield f"learning_rate {config.learning_rate:g} suits all weights; adapters learn best at about ten times that"
    if config.truncates and not config.keep_set:
        yield "keep_set false: completions come from a part of the vocabulary, log-probs are of the whole"
    chosen = config.top_entropy < 1.0 or (config.tis_mode == "token_mask" and (config.tis_cap or config.tis_floor))
    if config.ratio != "token" and chosen:
        yield f"ratio {config.ratio} is of a whole completion: all its tokens get a gradient, not the chosen ones alone"
    if config.beta and config.kl_estimator == "k1" and not config.kl_importance:
        yield "kl_estimator k1: on-policy its gradient is 0 on average, so beta adds noise alone; use k2 or k3"
