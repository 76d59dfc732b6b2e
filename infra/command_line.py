"""The command line -> settings, and everything that can be wrong with them before a run.

Every mistake is told at once, each in a line that says what was given, what is allowed and what to change. Left out:
what only the model or the machine can tell (checkpoint.py, memory.py).
"""

import argparse
import dataclasses
import difflib
import math
import os
import re
from collections.abc import Callable
from typing import Any

from transformers import HfArgumentParser

from advantage import BASELINES, SCALES
from config import ALGORITHMS, BUILT_IN, TASKS, Config, UserError, resolve
from infra.faults import report_failure
from loss import KL_ESTIMATORS, NORMALIZATIONS, OBJECTIVES, RATIOS
from tasks import Task, encode_prompt
from tasks._files import excerpt as shown

# ---- The command line ----


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
    report_failure("\n".join(f"error: {line}" for line in errors), show=os.environ.get("RANK", "0") == "0")
    raise SystemExit(2)


# ---- Settings ----

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


# ---- Prompts ----


def check_prompts(task: Task, tokenizer: Any, context: int | None, max_completion_length: int) -> int:
    """Every prompt can be encoded and leaves room for its completion. -> tokens of the longest"""
    longest = 0
    for row in task.train + task.eval:
        prompt = row["prompt"]
        if not isinstance(prompt, str) and tokenizer.chat_template is None:
            raise UserError("the prompts are chat messages, but the tokenizer has no chat template: use string prompts")
        try:
            length = len(encode_prompt(tokenizer, prompt))
        except Exception as error:  # of a chat template, say
            raise UserError(
                f"a prompt could not be encoded: {type(error).__name__}: {error}: {shown(prompt)}"
            ) from error
        if length == 0:
            raise UserError(f"a prompt has no tokens: {shown(prompt)}")
        if context and length + max_completion_length > context:
            raise UserError(
                f"a prompt of {length} tokens and a completion of {max_completion_length} exceed the model's context "
                f"of {context}: shorten it, or lower --max_completion_length: {shown(prompt)}"
            )
        longest = max(longest, length)
    return longest


def notes(task: Task, tokenizer: Any) -> list[str]:
    if tokenizer.chat_template is not None and any(isinstance(row["prompt"], str) for row in task.train):
        return ["the prompts are strings, so the model's chat template is not applied; give chat messages to apply it"]
    return []
