"""The presets of the algorithms, and every setting of a run, one line each: type, default, meaning, and the bounds or
the names that are allowed.

A setting that is None is open: `resolve` fills in its default, or leaves it off. infra/command_line.py turns each
setting into a flag and checks its value, so a new setting needs no code there. A run writes its settings to
config.json, which --config can read.
"""

import importlib
import operator
from dataclasses import Field, dataclass, field, fields, replace
from math import inf
from typing import Any, get_args, get_origin

from advantage import BASELINES, COMBINATIONS, SCALES
from loss import KL_ESTIMATORS, NORMALIZATIONS, OBJECTIVES, OLD_POLICIES, RATIOS, TIS_MODES


class UserError(Exception):
    """A mistake that the user can correct. Its message is shown without a stack trace."""


def needs(package: str) -> None:
    """Raise an error if a package is not installed that only some runs need, and that requirements.txt lacks."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is installed, but something that it needs is not
            raise
        raise UserError(f"this needs the package {package}: pip install {package}") from error


# What to do about an error of memory.
SMALLER = "try --gradient_checkpointing, --lora_rank, --shard, or smaller --micro_batch_tokens, --max_completion_length"


# ---- Presets ----

# A preset sets the switches of its algorithm only. It does not set the learning rate, the group size or beta.
GRPO = dict(
    normalization="sequence",
    scale_rewards="group",
    baseline="mean",
    objective="clip",
    ratio="token",
    old_policy="policy",
    epsilon_low=0.2,
    epsilon_high=0.2,
    combine_rewards="sum",
    dynamic_sampling=0,
)
FLASH = dict(baseline="batch", scale_rewards="none", old_policy="sampler", epsilon_low=inf, epsilon_high=inf)
ALGORITHMS = {
    "grpo": GRPO,
    "dr_grpo": GRPO | dict(normalization="constant", scale_rewards="none"),
    "dapo": GRPO | dict(normalization="global", epsilon_high=0.28, dynamic_sampling=3),
    "gspo": GRPO | dict(ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "cispo": GRPO | dict(normalization="global", objective="cispo", epsilon_high=5.0),
    "sapo": GRPO | dict(objective="sapo"),
    "gmpo": GRPO | dict(ratio="geometric", epsilon_low=0.4, epsilon_high=0.4),
    "luspo": GRPO | dict(normalization="sum", ratio="sequence", epsilon_low=3e-4, epsilon_high=4e-4),
    "dppo": GRPO | dict(normalization="global", objective="dppo"),
    "vespo": GRPO | dict(normalization="global", objective="vespo"),
    "maxrl": GRPO | dict(scale_rewards="mean"),
    "opo": GRPO | dict(normalization="global", scale_rewards="none", baseline="length"),
    "gdpo": GRPO | dict(combine_rewards="gdpo", scale_rewards="batch", baseline="batch"),
    "rloo": GRPO | dict(normalization="sum", scale_rewards="none", baseline="leave_one_out", objective="reinforce"),
    "reinforce++": GRPO | dict(normalization="global", scale_rewards="whiten", baseline="none"),
    "reinforce++-baseline": GRPO | dict(normalization="global", scale_rewards="whiten"),
    "flash_reinforce": GRPO | FLASH | dict(gate_kl=5e-3),
}


# ---- Settings ----

_headings: list[str] = []


def heading(title: str) -> None:
    """Start a new section of --help. The settings below belong to it."""
    _headings.append(title)


def setting(
    default: Any, text: str, *, names: Any = None, needs: str = "", may_change: bool = False, **bounds: float
) -> Any:
    """Make a field of Config.

    names       the allowed values
    needs       it has no effect unless one of these settings is on, whose names are separated by spaces
    may_change  True if a run may be continued with another value (docs/guarantees.md)
    bounds      of a number: above, at_least, below, at_most. Numbers must be finite, unless at_most is infinity.
    """
    about = dict(heading=_headings[-1], text=text, names=names, needs=needs, may_change=may_change, bounds=bounds)
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=about)
    return field(default=default, metadata=about)


@dataclass(frozen=True)  # values that change during a run belong in Run.state
class Config:
    heading("What is trained, and on what")
    model: str | None = setting(None, "folder, or name on the hub; some tasks bring a small model")
    task: str | None = setting(None, "the task to learn, a file in tasks/; 'data' if you give --data")
    data: str | None = setting(None, "your own prompts: .jsonl, .json, .csv, .parquet, or a data set of the hub")
    eval_data: list[str] = setting([], "your own held-out prompts; default: a share of --data", needs="eval_every")
    chat_template_kwargs: str | None = setting(None, "for the chat template, as JSON: '{\"enable_thinking\": false}'")
    reward: list[str] = setting([], "functions: file.py:function, package.module:function, or one of the task's")
    reward_weights: list[float] = setting([], "for each reward; default: the task's, or 1", at_least=-1e9, at_most=1e9)
    drop_long_prompts: bool = setting(False, "leave out prompts that are too long for the model's context")
    correct: str | None = setting(None, "name of the reward that says whether an answer is right: at least 1 if so")
    reward_timeout: float = setting(600.0, "seconds for a reward or a reply", above=0, at_most=1e9, may_change=True)
    reply: str | None = setting(None, "file.py:function that answers the model's turns; some tasks have one")
    max_turns: int = setting(0, "with --reply: end a completion after this many turns; 0: no limit", at_least=0)
    trust_remote_code: bool = setting(False, "run code that comes with the model")
    lora_rank: int = setting(0, "train adapters of this rank and freeze the weights; 0: train all weights", at_least=0)
    lora_alpha: int = setting(32, "adapters' output is multiplied by this / lora_rank", needs="lora_rank", at_least=1)

    heading("Rollout: prompts_per_step x num_generations completions")
    prompts_per_step: int = setting(16, "prompts drawn in each step", at_least=1)
    num_generations: int | None = setting(None, "G, the number of completions of each prompt", at_least=1)
    max_completion_length: int | None = setting(None, "limit of tokens in a completion", at_least=1)
    temperature: float = setting(1.0, "of sampling, and of all log-probs", above=0)
    top_p: float = setting(1.0, "sample from the top tokens with this total probability; 1: all", above=0, at_most=1)
    top_k: int = setting(0, "sample from the k likeliest tokens; 0: from all", at_least=0)
    min_p: float = setting(0.0, "lowest probability, as a share of the highest", at_least=0, at_most=1)
    stop: list[str] = setting([], "texts that end a turn, as its end token does")
    keep_set: bool = setting(True, "normalize log-probs over the tokens that are left", needs="top_p top_k min_p")
    delay: int = setting(0, "train on completions that were sampled this many steps before", at_least=0)
    server: list[str] = setting([], "URLs of inference servers, such as vLLM's, that sample instead", may_change=True)
    server_folder: str | None = setting(None, "for the weights; default: the run's", needs="server", may_change=True)
    server_timeout: float = setting(600.0, "seconds to wait", needs="server", above=0, at_most=1e5, may_change=True)
    rollout_dtype: str | None = setting(None, "of the rollout alone; default: as dtype", names=("float32", "bfloat16"))

    heading("The objective")
    algorithm: str = setting("grpo", "preset of the switches below", names=ALGORITHMS)
    normalization: str | None = setting(None, "the weight of each token", names=NORMALIZATIONS)
    combine_rewards: str | None = setting(None, "add several rewards; gdpo: normalize each first", names=COMBINATIONS)
    scale_rewards: str | None = setting(None, "what advantages are divided by", names=SCALES)
    baseline: str | None = setting(None, "what is subtracted from a reward", names=BASELINES)
    objective: str | None = setting(None, "the policy term", names=OBJECTIVES)
    ratio: str | None = setting(None, "importance ratio of each token, or of a sequence", names=RATIOS)
    old_policy: str | None = setting(None, "denominator: policy before the step, or sampler", names=OLD_POLICIES)
    epsilon_low: float | None = setting(None, "clip ratios below 1 - this", at_least=0, at_most=inf)
    epsilon_high: float | None = setting(None, "clip ratios above 1 + this; cispo: above this", at_least=0, at_most=inf)
    sapo_tau_pos: float = setting(1.0, "sapo: temperature for positive advantages", above=0)
    sapo_tau_neg: float = setting(1.05, "sapo: temperature for negative advantages", above=0)
    delta: float | None = setting(None, "two-sided clipping: cap of the ratio for negative advantages", above=0)
    beta: float = setting(0.0, "weight of the KL to the reference model", at_least=0)
    kl_estimator: str = setting("k3", "how the KL is estimated", needs="beta", names=KL_ESTIMATORS)
    kl_importance: bool = setting(False, "multiply the KL by the ratio: corrects it off-policy", needs="beta")
    reference: str | None = setting(None, "model of the KL; default: the policy at its start", needs="beta")
    ref_sync_every: int = setting(0, "copy the policy to it every N steps; 0: never", needs="beta", at_least=0)
    tis_mode: str = setting("token_truncate", "how these bounds apply", needs="tis_cap tis_floor", names=TIS_MODES)
    tis_cap: float | None = setting(None, "upper bound of pi_old / pi_sampler; without bounds, no correction", above=0)
    tis_floor: float | None = setting(None, "lower bound of pi_old / pi_sampler", above=0)
    gate_low: float | None = setting(None, "drop completions with mean pi_old / pi_sampler below this", above=0)
    gate_high: float | None = setting(None, "drop completions with mean pi_old / pi_sampler above this", above=0)
    gate_kl: float | None = setting(None, "drop completions with mean binary KL(sampler, policy) above this", above=0)
    off_policy_mask: float | None = setting(None, "drop completions with A < 0 and log(sampler/pi) > this", above=0)
    sampler_coef: float = setting(0.0, "tau, the weight of (log pi - log pi_sampler)^2", at_least=0)
    score_centering: int = setting(0, "subtract the expected score, from the sampler's K likeliest ids", at_least=0)
    top_entropy: float = setting(1.0, "train only this share of tokens, those of highest entropy", above=0, at_most=1)
    entropy_coef: float = setting(0.0, "weight of an entropy bonus")
    overlong_buffer: int | None = setting(None, "tokens of the reward overlong; default: limit / 5", at_least=1)
    mask_truncated: bool = setting(False, "do not train on completions that the length limit cut off")
    dynamic_sampling: int | None = setting(None, "limit of extra rounds that replace groups without signal", at_least=0)

    heading("Optimization: a step is one rollout and all its updates")
    steps: int | None = setting(None, "length of the run; 0: only evaluate", at_least=0, may_change=True)
    num_iterations: int = setting(1, "passes over the completions of a step", at_least=1)
    minibatches: int = setting(1, "optimizer updates in each pass", at_least=1)
    learning_rate: float | None = setting(None, "of AdamW, after the warm-up", above=0)
    lr_schedule: str = setting("constant", "after the warm-up", names=("constant", "linear", "cosine"))
    warmup_steps: int | None = setting(None, "steps in which the rate grows from 0", at_least=0, may_change=True)
    adam_beta1: float = setting(0.9, "of AdamW: decay of the mean gradient", at_least=0, below=1)
    adam_beta2: float = setting(0.99, "of AdamW: decay of the mean squared gradient", at_least=0, below=1)
    weight_decay: float = setting(0.0, "of AdamW: decoupled decay of the weights", at_least=0)
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm", above=0)

    heading("How it is computed: these change nothing but rounding")
    micro_batch_size: int | None = setting(None, "limit of completions in a micro-batch", at_least=1, may_change=True)
    micro_batch_tokens: int | None = setting(None, "tokens in a micro-batch, with padding", at_least=1, may_change=True)
    rollout_tokens: int | None = setting(None, "limit of tokens in the cache of a rollout", at_least=1, may_change=True)
    dtype: str = setting("auto", "of the computation; auto: bfloat16 on a GPU", names=("auto", "float32", "bfloat16"))
    decode: str = setting(
        "auto", "graph: each token as one CUDA graph; auto: on a GPU", names=("auto", "plain", "graph"), may_change=True
    )
    attn_implementation: str | None = setting(None, "sdpa, eager, flash_attention_2, or another", may_change=True)
    gradient_checkpointing: bool = setting(False, "less memory, a third more time", may_change=True)
    shard: bool = setting(False, "split weights, gradients and Adam over the ranks (FSDP2)", may_change=True)
    shard_size: int = setting(0, "ranks per copy; 0: all of a machine", needs="shard", at_least=0, may_change=True)

    heading("Evaluation and files")
    eval_every: int | None = setting(None, "evaluate every N steps, and last; 0: never", at_least=0, may_change=True)
    metrics_by: str | None = setting(None, "column of the rows: metrics for each of its values", may_change=True)
    eval_prompts: int = setting(256, "of each held-out file; at most a fifth of --data", at_least=1, may_change=True)
    eval_k: int = setting(4, "samples of each of them, for pass@k", needs="eval_every", at_least=1, may_change=True)
    eval_temperature: float | None = setting(None, "default: temperature", needs="eval_every", above=0, may_change=True)
    eval_top_p: float | None = setting(None, "default: top_p", needs="eval_every", above=0, at_most=1, may_change=True)
    save_every: int | None = setting(None, "save every N steps, and last; 0: only then", at_least=0, may_change=True)
    keep_checkpoints: int = setting(1, "how many checkpoints are kept", at_least=1, may_change=True)
    samples_per_step: int = setting(4, "completions of a step to write out; -1: all", at_least=-1, may_change=True)
    report_to: str | None = setting(None, "metrics tracker", names=("tensorboard", "trackio", "wandb"), may_change=True)
    seed: int = setting(0, "of all random numbers", at_least=0)
    out: str | None = setting(None, "folder of the run; the same command continues it", may_change=True)
    overwrite: bool = setting(False, "start over; the old run's folder is renamed", may_change=True)

    @property
    def cuts_vocabulary(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary only."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def held_out(self) -> int:
        """How many prompts of --data are not trained on, if there are enough."""
        return 0 if self.eval_every == 0 or self.eval_data else self.eval_prompts

    @property
    def sampler_dtype(self) -> str:
        return self.rollout_dtype or self.dtype

    @property
    def reads_sampler(self) -> bool:
        """Whether the loss reads the log-probs that the sampler recorded."""
        bounds = self.tis_cap, self.tis_floor, self.gate_low, self.gate_high, self.gate_kl, self.off_policy_mask
        is_corrected = self.old_policy == "sampler" or any(bound is not None for bound in bounds)
        return is_corrected or self.sampler_coef > 0.0 or self.score_centering > 0


OFTEN = 20  # steps between two evaluations, or checkpoints, of a small model


def task_of(config: Config) -> str:
    """Return the name of the task, which may follow from other settings."""
    return config.task or ("data" if config.data else "addition")


def resolve(config: Config, task_defaults: dict, on_gpu: bool) -> Config:
    """Fill in the settings that are still open. The value of a setting comes from the first of these that has one:

    1. the user, on the command line or in the file of --config
    2. the preset of the algorithm
    3. the task; its warm-up becomes at most a tenth of the steps, and with a server it saves more often
    4. what follows from other settings (the task, the folder) or from the machine (dtype, decode, the two budgets)

    What is still None after this is off."""
    task = task_of(config)
    name = "-".join(task.split(":")[:2])  # gym:NAME:JSON gives gym-NAME, for the folder
    out = f"runs/{name}-{'evaluation' if config.steps == 0 else config.algorithm}-{config.seed}"
    defaults = dict(task=task, out=out) | task_defaults | ALGORITHMS[config.algorithm]
    if config.server:  # the run ends if a server restarts
        defaults["save_every"] = OFTEN
    is_given = config.warmup_steps is not None
    config = replace(config, **{name: x for name, x in defaults.items() if getattr(config, name) is None})
    if config.warmup_steps and not is_given:  # a short run reaches its learning rate, too
        config = replace(config, warmup_steps=min(config.warmup_steps, config.steps // 10))
    # Enough to keep the device busy. Where memory runs out, both limits are halved. A sharded update cannot be tried
    # again, so its limit is lower.
    tokens = 2048 if not on_gpu else 4096 if config.shard else 1 << 14
    if config.micro_batch_tokens is None and config.micro_batch_size is None:
        config = replace(config, micro_batch_tokens=tokens)
    if config.rollout_tokens is None:
        config = replace(config, rollout_tokens=1 << 19 if on_gpu else 1 << 15)
    auto = dict(dtype="bfloat16", decode="graph") if on_gpu else dict(dtype="float32", decode="plain")
    return replace(config, **{name: x for name, x in auto.items() if getattr(config, name) == "auto"})


# ---- What a setting may be ----

SETTINGS = {each.name: each for each in fields(Config)}
BOUNDS = {"above": operator.gt, "at_least": operator.ge, "below": operator.lt, "at_most": operator.le}


def kind_of(setting: Field) -> type:
    """Return the type of a setting's value: str, int, float or bool. For a list, it is the type of each element, and
    for a setting that may be None, the type of any other value."""
    return (get_args(setting.type) or (setting.type,))[0]


def is_list(setting: Field) -> bool:
    return get_origin(setting.type) is list


def is_on(config: Config, name: str) -> bool:
    """Return whether a setting that others need does something. A top_p of 1 keeps all tokens."""
    value = getattr(config, name)
    return bool(value) and not (name == "top_p" and value == 1.0)


def is_allowed(setting: Field, value: Any) -> bool:
    """Return whether the setting may have this value, whatever the other settings are."""
    if value is None:
        return setting.default is None
    values = value if is_list(setting) else [value]
    return isinstance(values, list) and all(is_in_bounds(setting, x) for x in values)


def is_in_bounds(setting: Field, x: Any) -> bool:
    """Return whether x has the type, the bounds and one of the names of the setting, or of an element of its list."""
    kind, names, bounds = kind_of(setting), setting.metadata["names"], setting.metadata["bounds"]
    if type(x) is not kind and (kind, type(x)) != (float, int):
        return False
    if kind is str:
        return x in names if names else x != ""  # an empty text comes from a shell variable that is not set
    # Infinity is allowed only where it is the upper bound. NaN is never allowed.
    is_number = abs(x) < inf or x == bounds.get("at_most")
    return is_number and all(BOUNDS[name](x, bound) for name, bound in bounds.items())
