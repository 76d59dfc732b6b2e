"""Everything that a run needs before its first step: the task, the model, the optimizer, and how completions are
sampled. Mistakes that can be found before the weights are loaded are found first."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from os.path import realpath
from pathlib import Path
from typing import Any

import torch

from config import Config
from infra import command_line, faults, lora, ranks, run_folder
from infra.decoding import graph_decoding_works
from infra.model import limits_of, load, open_model
from infra.server import Server
from rollout import Sampling
from tasks import load_task, task_module
from tasks._prompts import check_prompts, notes


def load_run(cfg: Config, device: torch.device) -> tuple[dict[str, Any], int, list[str]]:
    """Return the fields of `Run` (train.py), the number of tokens of the longest prompt, and notes for the user."""
    ranks.seed_everything(cfg.seed)  # the same for all ranks, because a task may shuffle its rows
    with ranks.fail_together():
        task = load_task(cfg)
        task.time_limit = partial(faults.time_limit, cfg.reward_timeout)
        opened = open_model(cfg.model or task_module(cfg.task).model(cfg), cfg)  # a task's file may make a model
        context = getattr(opened.config.get_text_config(), "max_position_embeddings", None)
        longest_prompt = check_prompts(task, opened.tokenizer, context, cfg)
    ranks.check_same(run_folder.fingerprint_of_start(cfg, task.train + task.eval))
    model, reference, eos_ids = load(opened, cfg, device)
    adam = dict(betas=(cfg.adam_beta1, cfg.adam_beta2), weight_decay=cfg.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, **adam)
    if cfg.server or (cfg.decode == "graph" and not graph_decoding_works(model, getattr(torch, cfg.sampler_dtype))):
        cfg = replace(cfg, decode="plain")
    sampling = Sampling(
        max_completion_length=cfg.max_completion_length,
        eos_ids=eos_ids,
        temperature=cfg.temperature,
        top_k=cfg.top_k,
        top_p=cfg.top_p,
        min_p=cfg.min_p,
        keep_set=cfg.keep_set,
        head=cfg.score_centering,
        stop=cfg.stop,
        to_text=opened.tokenizer.decode,
        tokens_at_once=cfg.rollout_tokens,
        drop_share=0.5 if cfg.decode == "graph" else 0.25,  # after rows are dropped, a new graph must be captured
    )
    fields = dict(
        config=cfg,
        device=device,
        task=task,
        tokenizer=opened.tokenizer,
        model=model,
        reference=reference,
        optimizer=optimizer,
        sampling=sampling,
        server=Server(cfg.server, cfg.server_timeout, bool(lora.adapted_layers(model))) if cfg.server else None,
        limits=limits_of(cfg, [model] if reference in (None, model) else [model, reference], longest_prompt),
    )
    noted = [*notes(task, opened.tokenizer, trains=cfg.steps != 0), *command_line.warnings(cfg), *lora.notes(model)]
    return fields, longest_prompt, [*noted, *trained_on_before(cfg)]


def trained_on_before(cfg: Config) -> Iterator[str]:
    """Yield a note if --model comes from a run that has trained on prompts of --data that are held out now."""
    is_folder = cfg.model is not None and Path(cfg.model).is_dir()  # and not a name on the hub
    for folder in Path(cfg.model).absolute().parents[:2] if is_folder else ():  # of RUN/model, RUN/checkpoint/000040
        there = run_folder.settings_of(folder)
        has_same_data = there and there.data and realpath(there.data) == realpath(cfg.data or "")
        if has_same_data and there.held_out < cfg.held_out:
            yield f"the run in {folder} held out fewer prompts, so it has trained on some that are held out now"
