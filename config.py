"""Every setting of a run in one line each: its type, its default, what it means, its bounds or names. And the presets.

What is left at None is filled in by `resolve`, once: from the algorithm's preset (the switches of the objective), from
the task's defaults (what suits its size), or by the machine. A value given by hand always wins.

infra/command_line.py makes a flag of each setting and says what is wrong with its value; a setting that is added here
needs nothing there. What a run has is in its config.json, which --config reads.
"""

import dataclasses
from dataclasses import dataclass, field
from math import inf
from typing import Any

from advantage import BASELINES, COMBINATIONS, SCALES
from loss import KL_ESTIMATORS, NORMALIZATIONS, OBJECTIVES, RATIOS, TIS_MODES


class UserError(Exception):
    """Something the user can mend: shown as one line, without a stack trace."""


# ---- Presets ----

# The switches of each algorithm, and nothing else: learning rate, group size and beta stay yours.
GRPO = dict(
    normalization="sequence",
    scale_rewards="group",
    baseline="mean",
    objective="clip",
    ratio="token",
    epsilon_low=0.2,
    epsilon_high=0.2,
    combine_rewards="sum",
    dynamic_sampling=0,
)
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
    "maxrl": GRPO | dict(scale_rewards="mean"),
    "opo": GRPO | dict(normalization="global", scale_rewards="none", baseline="length"),
    "gdpo": GRPO | dict(combine_rewards="gdpo", scale_rewards="batch", baseline="batch"),
    "rloo": GRPO | dict(normalization="sum", scale_rewards="none", baseline="leave_one_out", objective="reinforce"),
    "reinforce++": GRPO | dict(normalization="global", scale_rewards="whiten", baseline="none"),
    "reinforce++-baseline": GRPO | dict(normalization="global", scale_rewards="whiten"),
}


# ---- Settings ----

_headings: list[str] = []


def heading(title: str) -> None:
    """The settings below it, down to the next one, stand under it in --help."""
    _headings.append(title)


def setting(default: Any, text: str, *, names: Any = None, may_change: bool = False, **bounds: float) -> Any:
    """A field of Config.

    names       what a choice may be
    may_change  when a run is continued: the setting says how it is computed or shown, or how long, not what is computed
    bounds      above, at_least, below, at_most, of which a number has some; without the last two it must be finite
    """
    metadata = dict(heading=_headings[-1], text=text, names=names, may_change=may_change, bounds=bounds)
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)  # what changes during a run is in Run.state
class Config:
    heading("What is trained, and on what")
    model: str | None = setting(None, "folder or hub name; some tasks bring a small model of their own")
    task: str | None = setting(None, "what is learnt; data: prompts and rewards of your own")  # names: files of tasks/
    data: str | None = setting(None, "prompts of your own: .jsonl, .json, .csv, .parquet, or a hub data set")
    eval_data: str | None = setting(None, "held-out prompts of your own; if left out, a share of those of --data")
    chat_template_kwargs: str | None = setting(None, "for the chat template, as JSON: '{\"enable_thinking\": false}'")
    reward: list[str] = setting([], "each file.py:function, package.module:function, or one of the task's")
    reward_weights: list[float] = setting([], "for each reward; else the task's, or 1", at_least=-1e9, at_most=1e9)
    drop_long_prompts: bool = setting(False, "leave out prompts that are too long for the model's context")
    correct: str | None = setting(None, "name of the reward that says whether an answer is right; some tasks have one")
    reward_timeout: float = setting(600.0, "seconds, for a call of a reward", above=0, at_most=1e9, may_change=True)
    trust_remote_code: bool = setting(False, "run code that comes with the model")

    heading("Rollout, of prompts_per_step x num_generations completions")
    prompts_per_step: int = setting(16, "prompts drawn in each step", at_least=1)
    num_generations: int | None = setting(None, "G, completions of each prompt", at_least=1)
    max_completion_length: int | None = setting(None, "tokens a completion may have", at_least=1)
    temperature: float = setting(1.0, "of sampling and of every log-prob", above=0)
    top_p: float = setting(1.0, "sample from the likeliest tokens of this mass; 1: from all", above=0, at_most=1)
    top_k: int = setting(0, "sample from the k likeliest tokens; 0: from all", at_least=0)
    min_p: float = setting(0.0, "least probability of a token, as a share of the likeliest's", at_least=0, at_most=1)
    keep_set: bool = setting(True, "where these cut: log-probs are over the tokens that are left")

    heading("The objective")
    algorithm: str = setting("grpo", "preset of the switches", names=ALGORITHMS)
    normalization: str | None = setting(None, "weight of a token", names=NORMALIZATIONS)
    combine_rewards: str | None = setting(None, "of several rewards: sum, or each normalized first", names=COMBINATIONS)
    scale_rewards: str | None = setting(None, "advantages are divided by", names=SCALES)
    baseline: str | None = setting(None, "subtracted from a reward", names=BASELINES)
    objective: str | None = setting(None, "policy term", names=OBJECTIVES)
    ratio: str | None = setting(None, "importance ratio of a token, or one for a whole sequence", names=RATIOS)
    old_policy: str = setting("policy", "denominator of the ratio, before the updates", names=("policy", "sampler"))
    epsilon_low: float | None = setting(None, "clip ratios below 1 - this", at_least=0, at_most=inf)
    epsilon_high: float | None = setting(None, "clip ratios above 1 + this; cispo: above this", at_least=0, at_most=inf)
    sapo_tau_pos: float = setting(1.0, "sapo: temperature where the advantage is positive", above=0)
    sapo_tau_neg: float = setting(1.05, "sapo: temperature where it is negative", above=0)
    delta: float | None = setting(None, "two-sided clipping: cap of the ratio where the advantage is negative", above=0)
    beta: float = setting(0.0, "weight of the KL to the reference model", at_least=0)
    kl_estimator: str = setting("k3", "estimator of the KL", names=KL_ESTIMATORS)
    kl_importance: bool = setting(False, "KL term times the importance ratio, so that it is right off-policy")
    ref_sync_every: int = setting(0, "steps after which the reference becomes the policy; 0: never", at_least=0)
    tis_mode: str = setting("token_truncate", "how pi_old / pi_sampler corrects the policy term", names=TIS_MODES)
    tis_cap: float | None = setting(None, "upper bound of that ratio; none: there is no correction", above=0)
    tis_floor: float | None = setting(None, "lower bound of that ratio", above=0)
    off_policy_mask: float | None = setting(None, "mask A < 0 with mean log(pi_sampler / pi) above this", at_least=0)
    sampler_coef: float = setting(0.0, "tau, weight of (log pi - log pi_sampler)^2", at_least=0)
    top_entropy: float = setting(1.0, "train this share of tokens, of the highest entropy", above=0, at_most=1)
    entropy_coef: float = setting(0.0, "weight of an entropy bonus")
    mask_truncated: bool = setting(False, "completions cut off by the length limit are not trained on")
    dynamic_sampling: int | None = setting(None, "rounds of further prompts for groups without a signal", at_least=0)

    heading("Optimization; a step is one rollout with all its updates")
    steps: int | None = setting(None, "how many the run has; 0: evaluate, train nothing", at_least=0, may_change=True)
    num_iterations: int = setting(1, "passes over the completions of a step", at_least=1)
    minibatches: int = setting(1, "optimizer updates in each pass", at_least=1)
    learning_rate: float | None = setting(None, "AdamW's, after warm-up", above=0)
    lr_schedule: str = setting("constant", "after warm-up", names=("constant", "linear", "cosine"))
    warmup_steps: int | None = setting(None, "steps in which the learning rate grows from 0", at_least=0)
    adam_beta1: float = setting(0.9, "AdamW: decay of the mean gradient", at_least=0, below=1)
    adam_beta2: float = setting(0.99, "AdamW: decay of the mean squared gradient", at_least=0, below=1)
    weight_decay: float = setting(0.0, "AdamW: decoupled decay of the weights", at_least=0)
    max_grad_norm: float = setting(1.0, "gradients are clipped to this norm", above=0)

    heading("How it is computed; but for rounding, none of these changes what is computed")
    micro_batch_size: int | None = setting(None, "completions in a forward pass, and/or", at_least=1, may_change=True)
    micro_batch_tokens: int | None = setting(None, "padded tokens in a forward pass", at_least=1, may_change=True)
    rollout_tokens: int | None = setting(None, "tokens in the cache of a rollout", at_least=1, may_change=True)
    dtype: str = setting("auto", "all but the weights; auto: bfloat16 on a GPU", names=("auto", "float32", "bfloat16"))
    decode: str = setting("plain", "graph: each token is one CUDA graph", names=("plain", "graph"), may_change=True)
    attn_implementation: str | None = setting(None, "sdpa, eager, flash_attention_2, or another", may_change=True)
    gradient_checkpointing: bool = setting(False, "less memory, a third more time", may_change=True)
    shard: bool = setting(False, "weights, gradients and Adam are split over the ranks (FSDP2)", may_change=True)
    shard_size: int = setting(0, "ranks that share a copy of the model; 0: a machine's", at_least=0, may_change=True)

    heading("What is looked at and left behind")
    eval_every: int = setting(20, "steps between evaluations, and at both ends; 0: never", at_least=0, may_change=True)
    eval_prompts: int = setting(256, "held-out prompts; of --data a fifth at most", at_least=1, may_change=True)
    eval_k: int = setting(4, "samples of each for pass@k", at_least=1, may_change=True)
    save_every: int = setting(20, "steps between checkpoints; 0: only at the end", at_least=0, may_change=True)
    keep_checkpoints: int = setting(1, "how many of them are kept", at_least=1, may_change=True)
    samples_per_step: int = setting(4, "completions of a step that are written; -1: all", at_least=-1, may_change=True)
    report_to: str | None = setting(None, "also gets the metrics", names=("tensorboard", "wandb"), may_change=True)
    seed: int = setting(0, "of everything random", at_least=0)
    out: str | None = setting(None, "folder of the run, where the same command continues it", may_change=True)
    overwrite: bool = setting(False, "start over there; the run that was there is moved aside", may_change=True)

    def __post_init__(self) -> None:
        vars(self).update({name: x.item() for name, x in vars(self).items() if hasattr(x, "item")})  # numpy's numbers

    @property
    def truncates(self) -> bool:
        """Tokens are sampled from a part of the vocabulary."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


def task_of(config: Config) -> str:
    """The name of the task, which need not be given."""
    return config.task or ("data" if config.data else "addition")


def resolve(config: Config, task_defaults: dict, on_gpu: bool) -> Config:
    """Fill in what was left at None. What is resolved already stays as it is. On a GPU the budgets of tokens wait until
    its memory is known (infra/memory.py)."""
    defaults = ALGORITHMS[config.algorithm] | task_defaults
    defaults["task"] = task_of(config)
    name = "-".join(task_of(config).split(":")[:2])  # of gym:NAME:JSON without what may be in no name of a folder
    defaults["out"] = f"runs/{name}-{'evaluation' if config.steps == 0 else config.algorithm}-{config.seed}"
    left_open = {name: value for name, value in defaults.items() if getattr(config, name, None) is None}
    if config.dtype == "auto":
        left_open["dtype"] = "bfloat16" if on_gpu else "float32"
    config = dataclasses.replace(config, **left_open)
    return config if on_gpu else with_budgets(config, rollout_tokens=32768, micro_batch_tokens=2048)


def with_budgets(config: Config, rollout_tokens: int | None, micro_batch_tokens: int | None) -> Config:
    """These, where they were left open. micro_batch_size alone means any number of tokens."""
    budgets = {"rollout_tokens": rollout_tokens}
    if config.micro_batch_size is None:
        budgets["micro_batch_tokens"] = micro_batch_tokens
    return dataclasses.replace(config, **{name: x for name, x in budgets.items() if getattr(config, name) is None})
