"""Every setting of a run, in one dataclass with its help text beside it, and the presets.

A setting left at None is filled in once, in `resolve`: from the algorithm's preset (switches of the objective), from
the task's (what suits its size), else from the machine. A flag given by hand always wins.

Left out: settings files (a run writes its own, config.json). Reading the command line and all checks are in checks.py.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from advantage import BASELINES, SCALES
from loss import KL_ESTIMATORS, NORMALIZATIONS, OBJECTIVES

listed = ", ".join


class UserError(Exception):
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
    normalization: str | None = setting(None, f"weight of a token: {listed(NORMALIZATIONS)}")
    scale_rewards: str | None = setting(None, f"advantages are divided by the std of: {listed(SCALES)}")
    baseline: str | None = setting(None, f"subtracted from a reward: {listed(BASELINES)}")
    objective: str | None = setting(None, listed(OBJECTIVES))
    ratio: str | None = setting(None, "importance ratio of a token, or of a sequence (GSPO)")
    epsilon_low: float | None = setting(None, "ratio is clipped below 1 - epsilon_low")
    epsilon_high: float | None = setting(None, "ratio is clipped above 1 + epsilon_high; with cispo above epsilon_high")
    delta: float | None = setting(None, "two-sided clipping: cap of the ratio where the advantage is negative")
    beta: float = setting(0.0, "weight of the KL to the reference model")
    kl_estimator: str = setting("k3", listed(KL_ESTIMATORS))
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
