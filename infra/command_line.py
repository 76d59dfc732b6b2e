"""The command line -> settings, by argparse, and all that can be wrong with them before a run.

A flag is made of each field of Config. Settings also come from files: --config, and the run that --out goes on with; a
flag wins over both. Wrong values and contradictions are told at once, each in a line that says what was given, what is
allowed and what to change. Left out: what only the rows, the model or the machine can tell.
"""

import argparse
import dataclasses
import difflib
import itertools
import math
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any, get_args, get_origin

from transformers.hf_argparser import string_to_bool

from advantage import compares_in_group
from config import ALGORITHMS, Config, UserError, resolve, task_of
from infra import run_folder
from infra.faults import say
from loss import SWITCHES_READ
from tasks import task_defaults, task_file, task_names

SETTINGS = {field.name: field for field in dataclasses.fields(Config)}
BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


# ---- Words -> settings ----


def parse(words: list[str], on_gpu: bool) -> Config:
    """-> the settings that were given, the others left open; or what is wrong with them on stderr, and exit code 2."""
    words = [re.sub(r"^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in words]
    wrong: list[str] = []
    try:
        given, unknown = flags().parse_known_args(words)
        given = vars(given)
        if file := given.pop("config", None):
            given = run_folder.given_in(Path(file)) | given
        out = Path(str(given.get("out") or "")).expanduser()
        if "out" in given and not given.get("overwrite") and run_folder.made_steps(out) is not None:
            given = vars(run_folder.settings_of(out)) | {"overwrite": False} | given  # it started over once
        unknown += [f"--{name}" for name in given.keys() - SETTINGS.keys()]
        wrong += map(no_such_flag, unknown)
        config = Config(**{name: x for name, x in given.items() if name in SETTINGS})
        ready(config, on_gpu)
    except (UserError, argparse.ArgumentError, OSError) as error:
        wrong.append(str(error))
    if wrong:
        if os.environ.get("RANK", "0") == "0":  # a mistake of all ranks is told once
            say("\n".join(f"error: {line}" for line in wrong))
        raise SystemExit(2)
    return config


def flags() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="train.py [--setting value ...]",
        description="GRPO of a language model. A default of None is the task's, the algorithm's or the machine's.",
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_argument("--config", metavar="FILE", help="settings, as a run's config.json; flags win over it")
    for heading, settings in itertools.groupby(SETTINGS.values(), lambda setting: setting.metadata["heading"]):
        group = parser.add_argument_group(heading)
        for setting in settings:
            kind = kind_of(setting)
            about = f"{setting.metadata['text']} ({allowed(setting)}; default {getattr(Config(), setting.name)})"
            group.add_argument(
                f"--{setting.name}",
                type=string_to_bool if kind is bool else kind,
                nargs="+" if is_list(setting) else "?" if kind is bool else None,
                const=True if kind is bool else None,
                metavar=kind.__name__.upper(),
                help=about.replace("%", "%%"),
            )
    return parser


def kind_of(setting: Field) -> type:
    """str, int, float or bool: of an optional setting if it is given, and of each value of a list"""
    return (get_args(setting.type) or (setting.type,))[0]


def is_list(setting: Field) -> bool:
    return get_origin(setting.type) is list


def names_of(setting: Field) -> list[str]:
    """Those of a choice. A task is a file, so its name is not known to config.py."""
    return task_names() if setting.name == "task" else list(setting.metadata["names"] or [])


def allowed(setting: Field) -> str:
    """ "float at least 0 and below 1" """
    if names := names_of(setting):
        return f"one of {', '.join(names)}"
    bounds = [f"{name.replace('_', ' ')} {x:g}" for name, x in setting.metadata["bounds"].items() if math.isfinite(x)]
    of_each = " ".join([kind_of(setting).__name__, " and ".join(bounds)]).rstrip()
    return f"list of {of_each}" if is_list(setting) else of_each


def no_such_flag(word: str) -> str:
    close = difflib.get_close_matches(word.split("=")[0].removeprefix("--"), SETTINGS, n=1)
    return f"{word}: there is no such flag; {f'did you mean --{close[0]}?' if close else 'see --help'}"


# ---- What is wrong with them ----


def ready(config: Config, on_gpu: bool) -> Config:
    """Resolved settings that a run can start with; or a UserError with a line for each mistake. The default stands in
    for a value that cannot be, so that the rest can be judged."""
    wrong = wrong_values(config)
    config = dataclasses.replace(config, **{name: getattr(Config(), name) for name in wrong})
    config = resolve(config, task_defaults(task_of(config), config.model), on_gpu)
    of_task = wrong_values(config)
    lines = [*wrong.values(), *of_task.values()] + ([] if of_task else [*contradictions(config)])
    if lines:
        raise UserError("\nerror: ".join(lines))
    return config


def wrong_values(config: Config) -> dict[str, str]:
    """A line for each setting whose value cannot be, whatever the others are."""
    lines = {}
    for name, setting in SETTINGS.items():
        given = getattr(config, name)
        if given is None and setting.default is None:
            continue
        values = given if isinstance(given, list) else [given]
        if is_list(setting) != isinstance(given, list) or not all(is_allowed(setting, value) for value in values):
            lines[name] = f"--{name} {given}: must be {allowed(setting)}"
    return lines


def is_allowed(setting: Field, value: Any) -> bool:
    kind, names, bounds = kind_of(setting), names_of(setting), setting.metadata["bounds"]
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        return False
    if kind in (str, bool):
        return (value.partition(":")[0] if setting.name == "task" else value) in names if names else value != ""
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
    if config.objective == "clip" and config.ratio != "geometric" and config.epsilon_low > 1.0:
        yield f"--epsilon_low {config.epsilon_low:g}: 1 - epsilon_low must not be negative; use at most 1"
    if config.objective == "cispo" and config.epsilon_high < 1.0:
        yield f"--epsilon_high {config.epsilon_high:g}: is the cap itself under cispo, below every ratio; use 5, say"
    least = math.inf if config.ratio == "geometric" else 1 + config.epsilon_high  # it clips the logarithm alone
    if config.delta is not None and config.objective == "clip" and config.delta <= least:
        yield f"--delta {config.delta:g}: must be above 1 + epsilon_high, and is not for --ratio geometric"
    if config.ratio == "geometric" and config.objective != "clip":
        yield f"--ratio geometric: clips by itself and is part of --objective clip, not of {config.objective}"
    bounds = [f"--{name}" for name in ("tis_cap", "tis_floor") if getattr(config, name) is not None]
    if config.tis_mode != Config.tis_mode and not bounds:
        yield f"--tis_mode {config.tis_mode}: corrects nothing without --tis_cap or --tis_floor"
    if bounds and config.old_policy == "sampler":
        yield f"{bounds[0]} with --old_policy sampler: the ratio that it bounds is 1 by construction"
    if len(bounds) == 2 and config.tis_floor > config.tis_cap:
        yield f"--tis_floor {config.tis_floor:g}: must not be above --tis_cap {config.tis_cap:g}"
    corrected = bounds or config.off_policy_mask is not None or config.sampler_coef
    if (corrected or config.old_policy == "sampler") and config.truncates and not config.keep_set:
        yield "--keep_set false: --old_policy sampler, --tis_*, --off_policy_mask, --sampler_coef need the kept sets"
    if config.scale_rewards == "mean" and config.combine_rewards == "gdpo":
        yield "--scale_rewards mean: would divide by means that --combine_rewards gdpo has made 0"
    if config.normalization == "prompt" and config.minibatches > 1:
        yield "--normalization prompt with --minibatches: a prompt's completions would be in several updates"
    if config.kl_importance and config.kl_estimator not in ("k1", "k3"):
        yield f"--kl_importance: the ratio makes k1 and k3 exact, not {config.kl_estimator}"
    only_with = dict(kl_importance="beta", ref_sync_every="beta", shard_size="shard", lora_alpha="lora_rank")
    for name, other in only_with.items():
        if getattr(config, name) != getattr(Config, name) and not getattr(config, other):
            yield f"--{name}: is not read without --{other}"
    if config.ref_sync_every and config.lora_rank:
        yield "--ref_sync_every with --lora_rank: the reference is the model without adapters, and never changes"

    # The step.
    if config.steps == 0 and config.eval_every == 0:
        yield "--steps 0: evaluates, which --eval_every 0 says never to do; give --eval_every 1"
    completions = config.prompts_per_step * config.num_generations
    if config.num_generations == 1 and compares_in_group(config.scale_rewards, config.baseline, config.combine_rewards):
        yield "--num_generations 1: a group of one has nothing to compare with; use the batch's baseline, scale"
    if config.minibatches > completions:
        yield f"--minibatches {config.minibatches}: more than the {completions} completions of a step"


def warnings(config: Config) -> Iterator[str]:
    """What is allowed but worth a line."""
    if config.steps and config.model and (Path(config.model) / "state.json").is_file():
        yield f"this run goes on only as long as {config.model} is there, which its own run deletes when it goes on"
    if config.lora_rank and config.learning_rate == task_defaults(config.task, config.model)["learning_rate"]:
        yield f"learning_rate {config.learning_rate:g} suits all weights; adapters learn best at about ten times that"
    if config.truncates and not config.keep_set:
        yield "keep_set false: completions come from a part of the vocabulary, log-probs are of the whole"
    chosen = config.top_entropy < 1.0 or (config.tis_mode == "token_mask" and (config.tis_cap or config.tis_floor))
    if config.ratio != "token" and chosen:
        yield f"ratio {config.ratio} is of a whole completion: all its tokens get a gradient, not the chosen ones alone"
    if config.beta and config.kl_estimator == "k1" and not config.kl_importance:
        yield "kl_estimator k1: on-policy its gradient is 0 on average, so beta adds noise alone; use k2 or k3"
