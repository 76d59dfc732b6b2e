"""The command line -> settings, by argparse, and all that can be wrong with them before a run.

A flag is made of each field of Config. Settings also come from files: --config, and the run that --out goes on with; a
flag wins over both. Wrong values and contradictions are told at once, each in a line that says what was given, what is
allowed and what to change. Left out: what only the rows, the model or the machine can tell.
"""

import argparse
import dataclasses
import difflib
import math
import operator
import os
import re
from collections.abc import Iterator
from dataclasses import Field
from pathlib import Path
from typing import Any, get_args, get_origin

from advantage import compares_in_group
from config import ALGORITHMS, Config, UserError, resolve, task_of
from infra import run_folder
from infra.faults import say
from loss import SWITCHES_READ
from tasks import task_defaults, task_file, task_names

SETTINGS = {field.name: field for field in dataclasses.fields(Config)}
TRUTHS = dict.fromkeys("true t yes y 1".split(), True) | dict.fromkeys("false f no n 0".split(), False)
BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


# ---- Words -> settings ----


def parse(words: list[str], on_gpu: bool) -> Config:
    """-> the settings that were given, the others left open; or what is wrong with them on stderr, and exit code 2."""
    words = [re.sub(r"^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in words]
    try:
        given, unknown = flags().parse_known_args(words)
        given = vars(given)
        if file := given.pop("config", None):
            given = run_folder.given_in(Path(file)) | given
        out = Path(str(given.get("out") or ""))
        if "out" in given and not given.get("overwrite") and run_folder.made_steps(out) is not None:
            given = vars(run_folder.settings_of(out)) | given
        wrong = [no_such_flag(word) for word in (*unknown, *(f"--{name}" for name in given.keys() - SETTINGS.keys()))]
        config = Config(**{name: x for name, x in given.items() if name in SETTINGS})
        wrong += mistakes(config, on_gpu)
    except (UserError, argparse.ArgumentError) as error:
        wrong = [str(error)]
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
    groups: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        kind, heading = kind_of(setting), setting.metadata["heading"]
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        default = [] if is_list(setting) else setting.default
        limits = "; ".join(filter(None, [", ".join(names_of(setting)) or limits_of(setting), f"default {default}"]))
        groups[heading].add_argument(
            f"--{name}",
            type=as_truth if kind is bool else kind,
            nargs="+" if is_list(setting) else "?" if kind is bool else None,
            const=True if kind is bool else None,
            metavar="NAME" if names_of(setting) else kind.__name__.upper(),
            help=f"{setting.metadata['text']} ({limits})".replace("%", "%%"),
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


def limits_of(setting: Field) -> str:
    """ "at least 0 and below 1" """
    bounds = setting.metadata["bounds"].items()
    return " and ".join(f"{name.replace('_', ' ')} {bound:g}" for name, bound in bounds if math.isfinite(bound))


def as_truth(word: str) -> bool:
    if word.lower() not in TRUTHS:
        raise argparse.ArgumentTypeError(f"{word!r}: must be true or false")
    return TRUTHS[word.lower()]


def no_such_flag(word: str) -> str:
    if not word.startswith("--"):
        return f"{word}: belongs to no flag"
    close = difflib.get_close_matches(word.split("=")[0].removeprefix("--"), SETTINGS, n=1)
    return f"{word}: there is no such flag; {f'did you mean --{close[0]}?' if close else 'see --help'}"


# ---- What is wrong with them ----


def ready(config: Config, on_gpu: bool) -> Config:
    """Resolved settings that a run can start with; or a UserError with a line for each mistake."""
    wrong = mistakes(config, on_gpu)
    if wrong:
        raise UserError("\nerror: ".join(wrong))
    return filled_in(config, on_gpu)


def filled_in(config: Config, on_gpu: bool) -> Config:
    config = resolve(config, task_defaults(task_of(config), config.model), on_gpu)
    if config.keep_set is None:  # a run that was begun without it goes on without it
        out = Path(config.out)
        goes_on = not run_folder.starts_over(config) and run_folder.made_steps(out) is not None
        config.keep_set = run_folder.settings_of(out).keep_set if goes_on else True
    return config


def mistakes(config: Config, on_gpu: bool) -> list[str]:
    """A line for each. The default stands in for a value that cannot be, so that the rest can be judged."""
    wrong = wrong_values(config)
    config = filled_in(dataclasses.replace(config, **{name: getattr(Config(), name) for name in wrong}), on_gpu)
    of_task = wrong_values(config)
    return [*wrong.values(), *of_task.values()] + ([] if of_task else [*contradictions(config)])


def wrong_values(config: Config) -> dict[str, str]:
    """A line for each setting whose value cannot be, whatever the others are."""
    lines = {}
    for name, setting in SETTINGS.items():
        given = getattr(config, name)
        if given is None and setting.default is None:
            continue
        if is_list(setting) and not isinstance(given, list):
            lines[name] = f"--{name} {given}: must be a list"
            continue
        values = given if is_list(setting) else [given]
        wrong = [value for value in values if not is_allowed(setting, value)]
        if wrong:
            kind, names = kind_of(setting), names_of(setting)
            allowed = f"one of {', '.join(names)}" if names else " ".join([kind.__name__, limits_of(setting)]).rstrip()
            lines[name] = f"--{name} {' '.join(map(str, wrong))}: must be {allowed}"
    return lines


def is_allowed(setting: Field, value: Any) -> bool:
    kind, bounds = kind_of(setting), setting.metadata["bounds"]
    if not isinstance(value, (int, float) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        return False
    if names_of(setting):
        return (value.partition(":")[0] if setting.name == "task" else value) in names_of(setting)
    if kind in (str, bool):
        return value != ""
    is_finite = isinstance(value, int) or math.isfinite(value) or value == bounds.get("at_most")
    return is_finite and all(BOUNDS[name](value, bound) for name, bound in bounds.items())


def contradictions(config: Config) -> Iterator[str]:
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
    if config.delta is not None and config.objective == "clip" and config.delta <= 1 + config.epsilon_high:
        yield f"--delta {config.delta:g}: must be above 1 + epsilon_high = {1 + config.epsilon_high:g}"
    if config.ratio == "geometric" and config.objective != "clip":
        yield f"--ratio geometric: clips by itself and is part of --objective clip, not of {config.objective}"
    if config.ratio == "geometric" and config.delta is not None:
        yield f"--delta {config.delta:g}: bounds a ratio, and --ratio geometric clips its logarithm; leave it out"
    bounds = [f"--{name}" for name in ("tis_cap", "tis_floor") if getattr(config, name) is not None]
    if config.tis_mode != Config.tis_mode and not bounds:
        yield f"--tis_mode {config.tis_mode}: corrects nothing without --tis_cap or --tis_floor"
    if bounds and config.old_policy == "sampler":
        yield f"{bounds[0]} with --old_policy sampler: the ratio that it bounds is 1 by construction"
    if len(bounds) == 2 and config.tis_floor > config.tis_cap:
        yield f"--tis_floor {config.tis_floor:g}: must not be above --tis_cap {config.tis_cap:g}"
    of_sampler = [*bounds, *(["--off_policy_mask"] if config.off_policy_mask is not None else [])]
    of_sampler += ["--sampler_coef"] if config.sampler_coef else []
    of_sampler += ["--old_policy sampler"] if config.old_policy == "sampler" else []
    if of_sampler and config.truncates and not config.keep_set:
        yield f"{of_sampler[0]} with --keep_set false: the sampler's log-probs are not of what it sampled from"
    if config.scale_rewards == "mean" and config.combine_rewards == "gdpo":
        yield "--scale_rewards mean: would divide by means that --combine_rewards gdpo has made 0"
    if config.normalization == "prompt" and config.minibatches > 1:
        yield "--normalization prompt with --minibatches: a prompt's completions would be in several updates"
    if config.kl_importance and config.kl_estimator not in ("k1", "k3"):
        yield f"--kl_importance: the ratio makes k1 and k3 exact, not {config.kl_estimator}"
    if config.ref_sync_every and config.beta == 0.0:
        yield "--ref_sync_every: there is no reference model without --beta above 0"
    if config.kl_importance and config.beta == 0.0:
        yield "--kl_importance: there is no KL term without --beta above 0"

    # The step.
    if config.steps == 0 and config.eval_every == 0:
        yield "--steps 0: evaluates, which --eval_every 0 says never to do; give --eval_every 1"
    completions = config.prompts_per_step * config.num_generations
    in_group = compares_in_group(config.scale_rewards, config.baseline, config.combine_rewards)
    if config.num_generations == 1 and in_group:
        yield "--num_generations 1: a group of one has nothing to compare with; use the batch's baseline, scale"
    if config.minibatches > completions:
        yield f"--minibatches {config.minibatches}: more than the {completions} completions of a step"
    if config.dynamic_sampling and not in_group:
        yield "--dynamic_sampling: groups of equal rewards are no dead weight under a baseline of the batch"
    if config.dynamic_sampling and config.prompts_per_step == 1:
        yield "--dynamic_sampling with --prompts_per_step 1: use at least 2 prompts, or --dynamic_sampling 0"
    if config.shard_size and not config.shard:
        yield f"--shard_size {config.shard_size}: is part of --shard; give both or neither"


def warnings(config: Config) -> Iterator[str]:
    """What is allowed but worth a line."""
    if config.truncates and not config.keep_set:
        yield "keep_set false: completions come from a part of the vocabulary, log-probs are of the whole"
    if config.ratio != "token" and config.normalization != "sequence":
        yield f"ratio {config.ratio} with normalization {config.normalization}: long ones weigh more, as in LUSPO"
    chosen = config.top_entropy < 1.0 or (config.tis_mode == "token_mask" and (config.tis_cap or config.tis_floor))
    if config.ratio != "token" and chosen:
        yield f"ratio {config.ratio} is of a whole completion: all its tokens get a gradient, not the chosen ones alone"
    if config.objective == "dppo" and config.ratio == "sequence":
        yield "objective dppo with ratio sequence: dppo drops tokens by their own probability"
    if config.beta and config.kl_estimator == "k1" and not config.kl_importance:
        yield "kl_estimator k1: on-policy its gradient is 0 on average, so beta adds noise alone; use k2 or k3"
    if config.scale_rewards == "mean":
        yield "scale_rewards mean: is for rewards of 0 or more; a mean near 0 makes advantages large"
    if any(weight < 0 for weight in config.reward_weights):
        yield "reward_weights below 0: the run learns to make those rewards small"
    if config.eval_every and (config.temperature != 1.0 or config.truncates):
        sampling = ("temperature", "top_p", "top_k", "min_p")
        yield "pass@k is sampled with " + ", ".join(f"{name} {getattr(config, name):g}" for name in sampling)
