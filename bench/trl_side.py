"""Make TRL's trainer for a run of this codebase, so that bench/against_trl.py can compare the two.

The trainer gets the run's model, tokenizer and rewards, its prompts in the same order, and every setting that TRL has
too. `plain_head` can replace TRL's output head, which is written for Triton and slow on a CPU.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import selective_log_softmax_and_entropy

from train import Run

SAME = """num_generations max_completion_length temperature scale_rewards beta learning_rate adam_beta1 adam_beta2
    weight_decay max_grad_norm epsilon_high seed""".split()
LOSS_TYPES = {"sequence": "grpo", "global": "dapo", "constant": "dr_grpo"}


def trainer_of(run: Run, rows: int, end_step: Callable[[dict], None], with_plain_head: bool) -> GRPOTrainer:
    """Return the trainer. `rows` is the number of completions that it trains on at once."""
    cfg, on_gpu = run.config, torch.cuda.is_available()
    settings = {name: getattr(cfg, name) for name in SAME} | dict(epsilon=cfg.epsilon_low, max_steps=cfg.steps)
    settings |= dict(loss_type=LOSS_TYPES[cfg.normalization], mask_truncated_completions=cfg.mask_truncated)
    settings |= dict(reward_weights=run.task.weights, lr_scheduler_type="constant", shuffle_dataset=False)
    settings |= dict(per_device_train_batch_size=rows, gradient_checkpointing=False, bf16=on_gpu, use_cpu=not on_gpu)
    settings["gradient_accumulation_steps"] = cfg.prompts_per_step * cfg.num_generations // rows
    config = GRPOConfig(tempfile.mkdtemp(), **settings, logging_steps=1, save_strategy="no", report_to="none")
    prompts = datasets.Dataset.from_list(run.task.rows_from(0, cfg.steps * cfg.prompts_per_step, cfg.seed))
    trainer = GRPOTrainer(run.model, run.task.rewards, config, prompts, processing_class=run.tokenizer)
    trainer.log = partial(log, trainer, end_step, trainer.log)
    if with_plain_head:
        trainer._get_per_token_logps_and_entropies = partial(plain_head, trainer.temperature)
    return trainer


def log(trainer: GRPOTrainer, end_step: Callable[[dict], None], original: Callable, *logged: Any) -> None:
    """Log as TRL does, and call `end_step` with the metrics of the step."""
    original(*logged)
    metrics = trainer.state.log_history[-1]
    if "grad_norm" in metrics:  # the summary at the end has none
        completions = trainer.args.generation_batch_size
        end_step(metrics | {"tokens": round(completions * metrics["completions/mean_length"])})


def plain_head(temperature: float, model: nn.Module, ids: Tensor, mask: Tensor, keep: int, **unused: Any) -> tuple:
    """Compute the logits of all completion positions at once, as TRL did before it had its tiled head."""
    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits[:, :-1] / temperature
    return *selective_log_softmax_and_entropy(logits, ids[:, -keep:], entropy_requires_grad=False), None


def force(tokens: Tensor, likely: float, generate: Callable, input_ids: Tensor, **kwargs: Any) -> Tensor:
    """Call `generate`, but make it pick `tokens` (N, L), by setting their logits to `likely`, a large number."""

    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        # The next token comes after those that were generated so far.
        return scores.scatter_(1, tokens[:, ids.shape[1] - input_ids.shape[1], None], likely)

    return generate(input_ids=input_ids, logits_processor=[forced], **kwargs)
