"""The command line: turn flags into settings, and find the mistakes that can be found before a run starts.

There is a flag for each field of Config. Settings also come from a --config file, and from the run that --out resumes;
a flag overrides both. Left out: mistakes that only the data, the model or the machine can reveal.
"""

import argparse
import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from transformers.hf_argparser import string_to_bool

from advantage import compares_in_group
from config import ALGORITHMS, Config, UserError, resolve, task_of
from infra import run_folder
from loss import SWITCHES_READ, policy_loss
from tasks import task_defaults, task_module, task_names

SETTINGS = {field.name: field for field in dataclasses.fields(Config)}
BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


# ---- From the words of a command line to settings ----


def parse(words: list[str], on_gpu: bool) -> Config:
    """Return all settings: those that the user gave, and the others from the run that is resumed, or else from Config,
    where many are None. A mistake ends the process with exit code 2."""
    # A flag may be written with hyphens: --learning-rate=1e-6 becomes --learning_rate=1e-6. What follows "=" stays.
    words = [re.sub(r"(?<=^--)[^=]+", lambda match: match[0].replace("-", "_"), word) for word in words]
    parser = flags()
    try:
        if file := parser.parse_args(words).config:
            words = [*words_of(run_folder.given_in(Path(file))), *words]
        given = {name: x for name, x in vars(parser.parse_args(words)).items() if name != "config"}
        out = Path(given.get("out", "")).expanduser()
        others = Config()
        if "out" in given and not given.get("overwrite") and run_folder.kept_steps(out) is not None:
            others = dataclasses.replace(run_folder.settings_of(out), overwrite=False)  # the saved one may be True
        config = dataclasses.replace(others, **given)
        ready(config, on_gpu)  # only to find mistakes: train.py fills in the defaults later
    except (UserError, OSError, ValueError) as error:
        parser.error(str(error))
    return config


def words_of(settings: dict) -> list[str]:
    """Write the settings of a file as words of a command line. A setting that is null is left out."""
    words = []
    for name, x in settings.items():
        if isinstance(x, list):
            words += [f"--{name}", *map(str, x)]
        elif x is not None:
            words.append(f"--{name}={x}")
    return words


def flags() -> argparse.ArgumentParser:
    """Return a parser with a flag for each setting."""
    about = "GRPO of a language model. Where a default is None, the task, the algorithm or the machine decides."
    parser = argparse.ArgumentParser("train.py", "train.py [--setting value ...]", about, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", help="read settings from here, e.g. from a run's config.json")
    for heading, settings in itertools.groupby(SETTINGS.values(), lambda setting: setting.metadata["heading"]):
        group = parser.add_argument_group(heading)
        for setting in settings:
            kind = kind_of(setting)
            how = {"type": kind, "choices": setting.metadata["names"], "nargs": "+" if is_list(setting) else None}
            if kind is bool:
                how |= {"type": string_to_bool, "nargs": "?", "const": True}
            text = f"{setting.metadata['text']} ({allowed(setting)}; default {getattr(Config(), setting.name)})"
            group.add_argument(f"--{setting.name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how)
    return parser


def kind_of(setting: dataclasses.Field) -> type:
    """Return the type of a setting's value: str, int, float or bool. For a list, it is the type of each element, and
    for a setting that may be None, the type of any other value."""
    return (get_args(setting.type) or (setting.type,))[0]


def is_list(setting: dataclasses.Field) -> bool:
    return get_origin(setting.type) is list


def allowed(setting: dataclasses.Field) -> str:
    """Describe the values that a setting may have, for instance "float at least 0 and below 1"."""
    # Tasks are files, so config.py does not list their names.
    names = task_names() if setting.name == "task" else setting.metadata["names"]
    if names:
        return f"one of {', '.join(names)}"
    bounds = [f"{name.replace('_', ' ')} {x:g}" for name, x in setting.metadata["bounds"].items() if math.isfinite(x)]
    each = f"{kind_of(setting).__name__} {' and '.join(bounds)}".rstrip()
    return f"list of {each}" if is_list(setting) else each


# ---- Mistakes in settings ----


def ready(config: Config, on_gpu: bool) -> Config:
    """Return the settings with every default filled in. Raise a UserError with a line for each mistake in them."""
    config = resolve(config, task_defaults(task_of(config), config.model), on_gpu)
    if wrong := [*wrong_values(config)] or [*contradictions(config)]:
        raise UserError("\n".join(wrong))
    return config


def wrong_values(config: Config) -> Iterator[str]:
    """Yield a line for each value that is wrong whatever the other settings are."""
    for name, setting in SETTINGS.items():
        value = getattr(config, name)
        values = value if isinstance(value, list) else [value]
        if not all(is_allowed(setting, x) for x in values):
            yield f"--{name} {value}: must be {allowed(setting)}"


def is_allowed(setting: dataclasses.Field, value: Any) -> bool:
    if value is None or kind_of(setting) in (str, bool):
        return value != ""  # an empty text comes from a shell variable that is not set; None and booleans are allowed
    bounds = setting.metadata["bounds"]
    # Infinity is allowed only where it is the upper bound. NaN is never allowed.
    is_number = abs(value) < math.inf or value == bounds.get("at_most")
    return is_number and all(BOUNDS[name](value, bound) for name, bound in bounds.items())


def contradictions(config: Config) -> Iterator[str]:
    """Yield a line for each setting that does not fit the others, or that nothing would read."""
    # What is trained, and on what.
    needed = [] if hasattr(task_module(config.task), "model") else ["model"]
    if config.task == "data":
        # A run that only evaluates on --eval_data needs no prompts to train on.
        needed += ["reward"] if config.steps == 0 and config.eval_data else ["data", "reward"]
    yield from (f"--task {config.task}: needs --{name}" for name in needed if not getattr(config, name))
    if config.reward_weights and len(config.reward_weights) != len(config.reward):
        yield f"--reward_weights {config.reward_weights}: give one weight for each of {len(config.reward)} rewards"

    # The objective. A switch that nothing reads must have its default value, or the value that --algorithm sets.
    for choice, reads in SWITCHES_READ.items():
        chosen = getattr(config, choice)
        for name in sorted(set().union(*reads.values()) - set(reads[chosen])):
            if getattr(config, name) not in (getattr(Config, name), ALGORITHMS[config.algorithm].get(name)):
                yield f"--{name} {getattr(config, name)}: has no effect with --{choice} {chosen}; leave it out"
    if config.objective == "reinforce" and config.num_iterations * config.minibatches > 1:
        yield "--objective reinforce: has no ratio, so use --num_iterations 1 --minibatches 1, one update per rollout"
    if config.objective == "reinforce" and config.old_policy == "sampler" and not config.kl_importance:
        yield "--old_policy sampler: has no effect with --objective reinforce, which has no ratio; leave it out"
    if config.objective == "cispo" and config.epsilon_high < 1.0:
        yield f"--epsilon_high {config.epsilon_high:g}: cispo caps ratios at this value; use at least 1, for instance 5"
    if config.objective == "clip" and config.delta is not None and config.delta <= 1 + config.epsilon_high:
        yield f"--delta {config.delta:g}: must be above 1 + epsilon_high"
    if config.ratio == "geometric" and config.objective != "clip":
        yield f"--ratio geometric: can be used with --objective clip, but not with {config.objective}"
    if config.tis_mode != Config.tis_mode and config.tis_cap is None and config.tis_floor is None:
        yield f"--tis_mode {config.tis_mode}: has no effect without --tis_cap or --tis_floor"
    if config.objective == "vespo" and not config.tis_mode.startswith("token"):
        yield f"--tis_mode {config.tis_mode}: vespo already multiplies the ratios of all tokens; use a token mode"
    bounds = config.tis_cap, config.tis_floor, config.gate_low, config.gate_high, config.off_policy_mask
    reads_sampler = config.old_policy == "sampler" or config.sampler_coef or any(x is not None for x in bounds)
    if reads_sampler and config.cuts_vocabulary and not config.keep_set:
        yield "--keep_set false: cannot be used with old_policy sampler, tis_*, gate_*, off_policy_mask or sampler_coef"
    if config.scale_rewards == "mean" and config.combine_rewards == "gdpo":
        yield "--scale_rewards mean: cannot divide by the means, because --combine_rewards gdpo makes them 0"
    if config.normalization == "prompt" and config.minibatches > 1:
        yield "--normalization prompt: needs all completions of a prompt in one update; use --minibatches 1"
    compares = compares_in_group(config.scale_rewards, config.baseline, config.combine_rewards)
    if config.num_generations == 1 and (compares or config.dynamic_sampling):
        yield "--num_generations 1: a group of one compares nothing; use --baseline batch and --scale_rewards batch"
    only_with = dict.fromkeys(("kl_estimator", "kl_importance", "ref_sync_every"), "beta")
    only_with |= dict(shard_size="shard", lora_alpha="lora_rank", eval_k="eval_every")
    for name, other in only_with.items():
        if getattr(config, name) != getattr(Config, name) and not getattr(config, other):
            yield f"--{name}: has no effect without --{other}"
    if not config.keep_set and not config.cuts_vocabulary:
        yield "--keep_set false: has no effect without --top_p, --top_k or --min_p; leave --keep_set out"
    if config.lr_schedule != Config.lr_schedule and 0 < config.steps <= config.warmup_steps:
        yield f"--lr_schedule: has no effect, because the warm-up takes all {config.steps} steps; lower --warmup_steps"
    if config.ref_sync_every and config.lora_rank:
        yield "--ref_sync_every with --lora_rank: the reference is the model without adapters, which never changes"


def allowed_pairs() -> Iterator[tuple[dict, dict]]:
    """Yield each objective, ratio, old policy and KL estimator with each value of every other switch of policy_loss
    that is allowed with it. A pair is two dictionaries of settings: the first choice with what the two need, and the
    switch. A number is 0.8 or 1.3. Tests and tools go through these pairs, so that a new switch joins by its name."""
    needs = dict(kl_estimator={"beta": 0.5}, kl_importance={"beta": 0.5}, cispo={"epsilon_high": 2.0})
    needs["tis_mode"] = {"tis_floor": 0.8, "tis_cap": 1.3}
    settings = [SETTINGS[name] for name in policy_loss.__kwdefaults__ if name in SETTINGS]
    values = {x.name: x.metadata["names"] or {kind_of(x)(0.8), kind_of(x)(1.3)} for x in settings}
    switches = [(name, x) for name in values for x in values[name]]
    choices = [(name, x) for name in SWITCHES_READ for x in SWITCHES_READ[name]]
    default = ready(Config(), on_gpu=False)
    for (choice, x), (name, y) in itertools.product(choices, switches):
        chosen = needs.get(choice, {}) | needs.get(x, {}) | needs.get(name, {}) | needs.get(y, {}) | {choice: x}
        without = dataclasses.replace(default, **chosen)
        pair = dataclasses.replace(without, **{name: y})
        is_refused = any(itertools.chain(wrong_values(pair), contradictions(pair)))
        if name != choice and pair != without and not is_refused:
            yield chosen, {name: y}


def warnings(config: Config) -> Iterator[str]:
    """Yield a line for each combination that is allowed but seldom wanted."""
    if config.lora_rank and config.learning_rate == task_defaults(config.task, config.model)["learning_rate"]:
        yield f"learning_rate {config.learning_rate:g} suits full fine-tuning; use about ten times that with adapters"
    if config.beta and config.kl_estimator == "k1" and not config.kl_importance:
        yield "kl_estimator k1: its gradient is 0 on average, so beta adds nothing but noise; use k2 or k3"
