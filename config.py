"""Every setting of a run, in one dataclass: its help text beside it, the presets and the checks below.

A setting left at None is filled in once, in `resolve`: from the algorithm's preset (switches of the objective), from
the task's (what suits its size), else from the machine. A flag given by hand always wins.
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import HfArgumentParser

from advantage import BASELINES, SCALES
from loss import KL_ESTIMATORS, NORMALIZATIONS, OBJECTIVES, RATIOS


class Mistake(Exception):
    """Something the user can mend: shown as one line, without a stack trace."""


def setting(default: Any, help: str) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    # What is trained, and on what.
    model: str | None = setting(None, "folder or hub name; a built-in task brings its own small model")
    task: str | None = setting(None, "addition (the default), sorting, countdown, gsm8k, tldr, or data (with --data)")
    data: str | None = setting(None, "prompts of your own: a .jsonl file, or a hub data set where `datasets` is there")
    reward: list[str] = setting([], "rewards of your own, each as file.py:function")
    reward_weights: list[float] = setting([], "a weight for each reward; 1 each if left out")
    reward_timeout: float = setting(600.0, "seconds that one call of a reward function may take")
    trust_remote_code: bool = setting(False, "run code that comes with the model")

    # Rollout: prompts_per_step x num_generations completions make a step.
    prompts_per_step: int = setting(16, "prompts drawn in each step")
    num_generations: int | None = setting(None, "G, completions of each prompt; default 8, sorting 16")
    max_completion_length: int | None = setting(None, "tokens a completion may have; default by task")
    temperature: float = setting(1.0, "of sampling and of every log-prob")
    top_p: float = setting(1.0, "sample from the likeliest tokens of this mass; below 1 it is not what is scored")
    top_k: int = setting(0, "sample from the k likeliest tokens; above 0 it is not what is scored")

    # The objective. None: as the algorithm says.
    algorithm: str = setting("grpo", "preset: grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce++")
    normalization: str | None = setting(None, "weight of a token: sequence, global, constant, sum")
    scale_rewards: str | None = setting(None, "advantages are divided by the std of: group, batch, none")
    baseline: str | None = setting(None, "subtracted from a reward: mean, leave_one_out, batch, none")
    objective: str | None = setting(None, "clip, cispo, reinforce")
    ratio: str | None = setting(None, "importance ratio of a token, or of a sequence (GSPO)")
    epsilon_low: float | None = setting(None, "ratio is clipped below 1 - epsilon_low")
    epsilon_high: float | None = setting(None, "ratio is clipped above 1 + epsilon_high; with cispo above epsilon_high")
    delta: float | None = setting(None, "two-sided clipping: cap of the ratio where the advantage is negative")
    beta: float = setting(0.0, "weight of the KL to the reference model")
    kl_estimator: str = setting("k3", "k1, k2, k3")
    kl_importance: bool = setting(False, "KL term times the importance ratio, so that it is right off-policy")
    ref_sync_every: int = setting(0, "steps after which the reference becomes the policy; 0: never")
    tis_cap: float | None = setting(None, "policy term times min(pi_old / pi_sampler, cap)")
    entropy_coef: float = setting(0.0, "weight of an entropy bonus")
    mask_truncated: bool = setting(False, "completions cut off by the length limit are not trained on")
    dynamic_sampling: int | None = setting(None, "rounds of further prompts while groups are all-equal; 0: none")

    # Optimization. A step is one rollout with all its updates.
    steps: int | None = setting(None, "default by task")
    num_iterations: int = setting(1, "passes over the completions of a step")
    minibatches: int = setting(1, "optimizer updates in each pass")
    learning_rate: float | None = setting(None, "default by task; 1e-6 for real models")
    lr_schedule: str = setting("constant", "after warm-up: constant, linear, cosine")
    warmup_steps: int | None = setting(None, "default by task")
    adam_beta1: float = setting(0.9, "AdamW: decay of the mean gradient")
    adam_beta2: float = setting(0.99, "AdamW: decay of the mean squared gradient")
    weight_decay: float = setting(0.0, "AdamW: decoupled decay of the weights")
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm")

    # How it is computed. None of these changes what is computed.
    micro_batch_size: int | None = setting(None, "completions in each forward pass; or:")
    micro_batch_tokens: int | None = setting(None, "padded tokens in each forward pass; default 2048, on a GPU 16384")
    rollout_tokens: int | None = setting(None, "cache tokens sampled at once; default 32768, on a GPU 524288")
    dtype: str = setting("auto", "of the computation: float32, bfloat16; auto: bfloat16 on a GPU. Weights stay float32")
    attn_implementation: str | None = setting(None, "sdpa, eager, flash_attention_2, ...; default the model's")
    gradient_checkpointing: bool = setting(False, "less memory, a third more time")
    shard: bool = setting(False, "weights, gradients and Adam are split over the ranks (FSDP2)")
    shard_size: int = setting(0, "ranks that share one copy of the model; 0: those of a machine")

    # What is looked at and left behind.
    eval_every: int = setting(20, "steps between evaluations, also before the first and after the last; 0: none at all")
    eval_prompts: int = setting(256, "held-out prompts")
    eval_k: int = setting(4, "samples of each for pass@k")
    save_every: int = setting(20, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = setting(1, "how many of them are kept")
    samples_per_step: int = setting(4, "completions of each step written to samples.jsonl; -1: all")
    report_to: str | None = setting(None, "tensorboard or wandb, where installed")
    seed: int = setting(0, "of everything random")
    out: str | None = setting(None, "folder of the run; default runs/<task>-<algorithm>-<seed>")
    overwrite: bool = setting(False, "throw away what another run left in that folder")


# What each algorithm switches. Nothing else: learning rate, group size and beta stay yours.
SWITCHES = ("normalization", "scale_rewards", "baseline", "objective", "ratio", "epsilon_low", "epsilon_high")
ALGORITHMS = {
    "grpo": ("sequence", "group", "mean", "clip", "token", 0.2, 0.2),
    "dr_grpo": ("constant", "none", "mean", "clip", "token", 0.2, 0.2),
    "dapo": ("global", "group", "mean", "clip", "token", 0.2, 0.28),
    "gspo": ("sequence", "group", "mean", "clip", "sequence", 3e-4, 4e-4),
    "cispo": ("global", "group", "mean", "cispo", "token", 0.2, 5.0),
    "rloo": ("sum", "none", "leave_one_out", "reinforce", "token", 0.2, 0.2),
    "reinforce++": ("global", "batch", "batch", "clip", "token", 0.2, 0.2),
}
DYNAMIC_SAMPLING = {"dapo": 3}

# What suits a task: the two small ones learn from these in about a minute on a CPU.
_REAL = dict(num_generations=8, max_completion_length=1024, steps=500, learning_rate=1e-6, warmup_steps=10)
TASKS = {
    "addition": dict(num_generations=8, max_completion_length=64, steps=80, learning_rate=2e-4, warmup_steps=5),
    "sorting": dict(num_generations=16, max_completion_length=12, steps=150, learning_rate=1e-3, warmup_steps=5),
    "countdown": _REAL,
    "gsm8k": _REAL,
    "tldr": _REAL | dict(max_completion_length=128),
    "data": _REAL,
}
BUILT_IN = ("addition", "sorting")  # tasks with a model of their own


def resolve(config: Config, on_gpu: bool) -> Config:
    """Fill in what was left at None."""
    config = dataclasses.replace(config)
    config.task = config.task or ("data" if config.data else "addition")
    defaults = dict(zip(SWITCHES, ALGORITHMS[config.algorithm])) | TASKS[config.task]
    if config.model and config.task in BUILT_IN:
        defaults["learning_rate"] = _REAL["learning_rate"]
    defaults["dynamic_sampling"] = DYNAMIC_SAMPLING.get(config.algorithm, 0)
    defaults["out"] = f"runs/{config.task}-{config.algorithm}-{config.seed}"
    if config.micro_batch_size is None:
        defaults["micro_batch_tokens"] = 16384 if on_gpu else 2048
    defaults["rollout_tokens"] = 524288 if on_gpu else 32768
    for name, value in defaults.items():
        if getattr(config, name) is None:
            setattr(config, name, value)
    if config.dtype == "auto":
        config.dtype = "bfloat16" if on_gpu else "float32"
    if not config.reward_weights:
        config.reward_weights = [1.0] * len(config.reward)
    return config


# ---- Checks: every mistake at once, each in a line that says what was given, what is allowed and what to change. ----


def parse(args: list[str], on_gpu: bool) -> Config:
    """The command line -> resolved settings; or all that is wrong with it on stderr, and exit code 2."""
    errors: list[str] = []
    parser = HfArgumentParser(Config, prog="train.py", allow_abbrev=False, description="GRPO of a language model.")
    for action in parser._actions:
        if action.type is not None:
            action.type = _noting(action, errors)
    parser._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$", re.IGNORECASE)  # -1e-3 is no flag
    parser.error = lambda message: _stop([message])
    config, unknown = parser.parse_args_into_dataclasses(args, return_remaining_strings=True, look_for_args_file=False)
    errors += check_flags(unknown) + check_names(config)
    config = resolve(config, on_gpu)
    errors += check(config)
    if errors:
        _stop(errors)
    return config


def _noting(action: argparse.Action, errors: list[str]) -> Callable[[str], Any]:
    """A value that cannot be read is noted, and the default stands in for it while the rest is checked."""
    convert = action.type

    def converted(text: str) -> Any:
        try:
            return convert(text)
        except (ValueError, argparse.ArgumentTypeError):
            kind = {"int": "a whole number", "float": "a number"}.get(convert.__name__, "true or false")
            errors.append(f"{action.option_strings[0]} {text}: must be {kind}")
            return convert("1") if isinstance(action.default, list) else action.default

    return converted


def _stop(errors: list[str]) -> None:
    from ranks import report_failure  # which imports this file

    report_failure("\n".join(f"error: {line}" for line in errors), show=os.environ.get("RANK", "0") == "0")
    raise SystemExit(2)


OTHER_NAMES = {  # what others call them
    "lr": "learning_rate", "epsilon": "epsilon_low", "max_steps": "steps", "loss_type": "normalization",
    "per_device_train_batch_size": "micro_batch_size", "gradient_accumulation_steps": "micro_batch_size",
    "steps_per_generation": "minibatches", "importance_sampling_level": "ratio", "output_dir": "out",
    "use_bias_correction_kl": "kl_importance", "mask_truncated_completions": "mask_truncated",
    "ref_model_sync_steps": "ref_sync_every", "reward_funcs": "reward", "bf16": "dtype",
}  # fmt: skip


def check_flags(unknown: list[str]) -> list[str]:
    """Words that argparse could not place; those that follow an unknown flag are its values."""
    names = [field.name for field in dataclasses.fields(Config)]
    errors = []
    for i, word in enumerate(unknown):
        if word.startswith("--"):
            name = word[2:].split("=")[0].replace("-", "_")
            near = OTHER_NAMES.get(name) or "".join(difflib.get_close_matches(name, names, n=1))
            errors.append(f"{word}: there is no such flag; {f'did you mean --{near}?' if near else 'see --help'}")
        elif i == 0 or not unknown[0].startswith("--"):
            errors.append(f"{word}: belongs to no flag")
    return errors


def check_names(config: Config) -> list[str]:
    """Settings that are one of a few names. A wrong one is set to its default, so that the rest can be checked."""
    valid = dict(
        task=TASKS, algorithm=ALGORITHMS, normalization=NORMALIZATIONS, scale_rewards=SCALES, baseline=BASELINES,
        objective=OBJECTIVES, ratio=RATIOS, kl_estimator=KL_ESTIMATORS, lr_schedule=("constant", "linear", "cosine"),
        dtype=("auto", "float32", "bfloat16"), report_to=("tensorboard", "wandb"),
    )  # fmt: skip
    errors = []
    for name, names in valid.items():
        value = getattr(config, name)
        if value is not None and value not in names:
            errors.append(f"--{name} {value}: must be one of {', '.join(names)}")
            setattr(config, name, getattr(Config(), name))
    return errors


def check(config: Config) -> list[str]:
    """What is wrong with resolved settings, a line each."""
    errors = []

    def bounds(names: str, low: float, high: float = math.inf, open_low: bool = False, open_high: bool = False) -> None:
        for name in names.split():
            value = getattr(config, name)
            if value is None:
                continue
            too_low = value <= low if open_low else value < low
            too_high = value >= high if open_high else value > high
            if too_low or too_high or math.isnan(value):
                allowed = f"{'above' if open_low else 'at least'} {low}"
                if high < math.inf:
                    allowed += f" and {'below' if open_high else 'at most'} {high}"
                elif open_high:
                    allowed += " and finite"
                errors.append(f"--{name} {value}: must be {allowed}")

    bounds("prompts_per_step num_generations max_completion_length steps num_iterations minibatches", 1)
    bounds("micro_batch_size micro_batch_tokens rollout_tokens eval_prompts eval_k keep_checkpoints", 1)
    bounds("top_k ref_sync_every dynamic_sampling warmup_steps eval_every save_every shard_size seed", 0)
    bounds("beta weight_decay", 0.0, math.inf, open_high=True)
    bounds("epsilon_low epsilon_high", 0.0)
    bounds("samples_per_step", -1)
    bounds(
        "reward_timeout temperature tis_cap delta max_grad_norm learning_rate",
        0.0,
        math.inf,
        open_low=True,
        open_high=True,
    )
    bounds("top_p", 0.0, 1.0, open_low=True)
    bounds("adam_beta1 adam_beta2", 0.0, 1.0, open_high=True)

    for name, values in (("entropy_coef", [config.entropy_coef]), ("reward_weights", config.reward_weights)):
        errors += [f"--{name} {value}: must be finite" for value in values if not math.isfinite(value)]

    completions, updates = config.prompts_per_step * config.num_generations, config.num_iterations * config.minibatches
    needs_group = config.scale_rewards == "group" or config.baseline in ("mean", "leave_one_out")
    if config.num_generations == 1 and needs_group:
        errors.append(
            "--num_generations 1: a group of one has nothing to compare with; use at least 2, "
            "or --baseline batch --scale_rewards batch"
        )
    if config.minibatches > completions > 0:
        errors.append(f"--minibatches {config.minibatches}: more than the {completions} completions of a step")
    if config.micro_batch_size and config.micro_batch_tokens:
        errors.append("--micro_batch_size and --micro_batch_tokens: give one of them, rows or padded tokens")
    if config.shard_size and not config.shard:
        errors.append(f"--shard_size {config.shard_size}: is part of --shard; give both or neither")
    if config.model is None and config.task not in BUILT_IN:
        errors.append(f"--task {config.task}: needs --model, a folder or a hub name")
    if config.task == "data" and not config.data:
        errors.append("--task data: needs --data, a .jsonl file or a hub data set")
    if config.task == "data" and not config.reward:
        errors.append("--data: needs --reward file.py:function, or a --task whose rewards it is for")
    if len(config.reward_weights) != len(config.reward):
        errors.append(
            f"--reward_weights: {len(config.reward_weights)} for {len(config.reward)} rewards; give one for each"
        )
    if config.objective == "reinforce" and updates > 1:
        errors.append(
            f"--objective reinforce: has no ratio, so it is right for one update a rollout, not {updates}; "
            "set --num_iterations 1 --minibatches 1, or use --objective clip"
        )
    if config.objective == "clip" and config.epsilon_low > 1.0:
        errors.append(f"--epsilon_low {config.epsilon_low}: 1 - epsilon_low must not be negative; use at most 1")
    if config.delta is not None and config.objective == "clip" and config.delta <= 1 + config.epsilon_high:
        errors.append(f"--delta {config.delta}: must be above 1 + epsilon_high = {1 + config.epsilon_high:g}")
    if config.delta is not None and config.objective != "clip":
        errors.append(f"--delta {config.delta}: is part of --objective clip, not of {config.objective}; leave it out")
    if config.ratio == "sequence" and config.normalization in ("global", "sum"):
        errors.append(
            f"--ratio sequence with --normalization {config.normalization}: counts a completion's one ratio once for "
            "each of its tokens; use --normalization sequence"
        )
    if config.tis_cap is not None and (config.top_p < 1.0 or config.top_k > 0):
        errors.append(
            "--tis_cap with --top_p or --top_k: the sampler's recorded log-probs are of the whole distribution, so the "
            "correction would be wrong; set --top_p 1 --top_k 0"
        )
    if config.dynamic_sampling and not needs_group:
        errors.append("--dynamic_sampling: groups of equal rewards are no dead weight under a baseline of the batch")
    if config.dynamic_sampling and config.prompts_per_step == 1:
        errors.append("--dynamic_sampling with --prompts_per_step 1: use at least 2 prompts, or --dynamic_sampling 0")
    if config.ref_sync_every and config.beta == 0.0:
        errors.append("--ref_sync_every: there is no reference model without --beta above 0")
    if config.kl_importance and config.beta == 0.0:
        errors.append("--kl_importance: there is no KL term without --beta above 0")
    return errors


def warnings(config: Config) -> list[str]:
    """What is allowed but worth a line."""
    notes = []
    if config.top_p < 1.0 or config.top_k > 0:
        notes.append(
            "top_p or top_k: completions come from a truncated distribution, log-probs are of the whole one, so the "
            "update is slightly off-policy"
        )
    if config.ratio == "sequence" and config.normalization == "constant":
        notes.append("ratio sequence with normalization constant: long completions weigh more than in GSPO")
    if config.beta and config.kl_estimator == "k1" and not config.kl_importance:
        notes.append("kl_estimator k1: on-policy its gradient is 0 on average, so beta adds noise alone; use k2 or k3")
    if config.temperature != 1.0 and config.eval_every:
        notes.append(f"pass@k is sampled at temperature {config.temperature:g}")
    return notes
