"""What a run is made of, and random numbers for a purpose of one's own."""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from batch import Limits
from config import Config
from infra import command_line, memory, ranks, report
from infra.model import load, open_model
from rollout import Progress, Sampling
from tasks import Task, load_task, task_file
from tasks._prompts import check_prompts, notes


@dataclass
class Run:
    """What outlives a step. A checkpoint has model, reference, optimizer, cursor and state, and no other field."""

    config: Config
    device: torch.device
    task: Task
    tokenizer: Any
    model: PreTrainedModel
    reference: PreTrainedModel | None
    optimizer: torch.optim.Optimizer
    sampling: Sampling
    limits: Limits  # of a micro-batch
    progress: Progress | None = None  # is told how far a rollout is
    cursor: int = 0  # prompts drawn so far
    state: dict[str, Any] = field(default_factory=dict)  # of a fork, alike on all ranks: JSON, tensors, Groups
    logged: list[tuple[str, float]] = field(default_factory=list)  # in this step: their means go to metrics.jsonl

    def log(self, name: str, value: float) -> None:
        self.logged.append((f"logged/{name}", float(value)))


def set_up(cfg: Config, device: torch.device) -> tuple[Run, report.RunLog, list[str]]:
    """-> the run, its log, and notes on what was found"""
    with ranks.fail_together():  # all that can be wrong before the weights are loaded
        task = load_task(cfg)
        opened = open_model(cfg.model or task_file(cfg.task).model(cfg), cfg)
        context = getattr(opened.config.get_text_config(), "max_position_embeddings", None)
        longest = check_prompts(task, opened.tokenizer, context, cfg)
    cfg, memory_plan = memory.plan(cfg, opened.config, longest)
    log = report.RunLog(cfg, opened.tokenizer.decode, task.reward_names)
    log.say(memory_plan)
    model, reference, ends = load(opened, cfg, device)
    adam = dict(betas=(cfg.adam_beta1, cfg.adam_beta2), weight_decay=cfg.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, **adam)
    same = vars(cfg).keys() & Sampling.__dataclass_fields__.keys()
    sampling = Sampling(
        eos_ids=ends,
        tokens_at_once=cfg.rollout_tokens,
        with_entropy=cfg.top_entropy < 1.0,
        drop_share=0.5 if cfg.decode == "graph" else 0.25,  # other rows are another graph
        **{name: getattr(cfg, name) for name in same},
    )
    limits = memory.limits(cfg, model, longest)
    run = Run(cfg, device, task, opened.tokenizer, model, reference, optimizer, sampling, limits, log.generating)
    return run, log, [*notes(task, opened.tokenizer), *command_line.warnings(cfg)]


def learning_rate(cfg: Config, step: int, highest: float) -> float:
    """Linear warm-up, then the schedule down to 0 after the last step."""
    if step <= cfg.warmup_steps:
        return highest * step / cfg.warmup_steps
    done = (step - cfg.warmup_steps - 1) / max(1, cfg.steps - cfg.warmup_steps)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    return highest * factor[cfg.lr_schedule]


def generator(name: str, seed: int, *numbers: int) -> np.random.Generator:
    """Random numbers for a purpose of this name (in step numbers[0], say), which are those of no other name or numbers.
    The streams of completions, minibatches and epochs have keys of their own, as plain lists, which numpy pads with
    zeros: [seed, step] would be the stream of (seed, step, 0, 0). They stay, for the runs that have them."""
    key = hashlib.sha256(repr((name, *map(int, (seed, *numbers)))).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(key)))
