"""A training run. To read the algorithm first, without options, see minimal.py.

    torchrun train.py                                     learns addition, with a small model of this repository
    torchrun --nproc_per_node 8 train.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
    python train.py --help                                lists every setting

A step goes from prompts to completions, rewards, advantages and updates: `training_step`, `update`, `accumulate`. It
trains on prompts_per_step x num_generations completions. Ranks and micro-batches change how it is computed, not what is
computed: every rank knows all completions (a few megabytes), the weight of each token is fixed before the completions
are split, and gradients are summed.
"""

import math
import os
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and os.environ.get("RANK", "0") == "0":
    print("loading PyTorch and transformers ...", file=sys.stderr, flush=True)  # the imports take seconds

import torch
from torch import Tensor
from transformers import PreTrainedModel

from advantage import combine_rewards, group_advantages, on_high_entropy
from batch import Batch, Group, Limits, collate, has_signal, micro_batches, minibatches, trained_lengths
from config import Config, UserError
from infra import checkpoint, command_line, faults, lora, memory, ranks, report, run_folder, seeds
from infra.decoding import decoding
from infra.model import load, open_model
from logprob import token_logprobs
from loss import policy_loss, token_weights
from rollout import Completion, Progress, Sampling, rollout, uniforms
from tasks import Task, load_task, score, task_file
from tasks._prompts import check_prompts, encode_prompts, notes
from tasks._turns import check_template, replies_to, with_replies

# policy_loss gets every setting whose name is one of its keyword arguments, so a new switch needs no line here.
LOSS_SWITCHES = [name for name in policy_loss.__kwdefaults__ if name in vars(Config())]
STATS = ("entropy", "kl", "clip_low", "clip_high", "sampler_gap", "off_policy")  # means over tokens, or null


@dataclass
class Run:
    """What outlives a step. A checkpoint holds the model, the reference, the optimizer, `cursor` and `state`; all other
    fields are made again from the settings when a run is continued."""

    config: Config
    device: torch.device
    task: Task
    tokenizer: Any
    model: PreTrainedModel
    reference: PreTrainedModel | None  # of the KL term; None with LoRA, where it is the model without adapters
    optimizer: torch.optim.Optimizer
    sampling: Sampling
    limits: Limits  # of a micro-batch
    progress: Progress | None = None  # is called while a rollout goes on
    cursor: int = 0  # how many prompts were drawn so far
    state: dict[str, Any] = field(default_factory=dict)  # for forks; equal on all ranks; holds JSON, tensors and Groups
    logged: list[tuple[str, float]] = field(default_factory=list)  # figures of this step, whose means are reported

    def log(self, name: str, value: float) -> None:
        self.logged.append((f"logged/{name}", float(value)))


# ---- The step ----


def training_step(run: Run, step: int) -> tuple[dict, list[Group]]:
    """One rollout and all its updates. -> the metrics, and the groups that were trained on"""
    cfg = run.config
    seeds.seed_everything(cfg.seed, step)
    start, run.logged = time.perf_counter(), []

    # Prompts -> completions -> rewards -> advantages.
    groups, drawn = draw_groups(run, step)
    rewards = torch.stack([group.combined for group in groups])  # (P, G)
    lengths = trained_lengths(groups, cfg.mask_truncated)  # (P, G)
    advantages = group_advantages(rewards, cfg.scale_rewards, cfg.baseline, lengths=lengths)  # (P, G)
    if cfg.dynamic_sampling and not any(group.has_signal for group in groups):
        advantages = torch.zeros_like(advantages)  # dynamic sampling found no group to learn from
    for group, row in zip(groups, advantages, strict=True):
        group.advantages = row
    batch = collate(groups, cfg.mask_truncated, run.device)
    run.logged = ranks.gather(run.logged, report.checksums(step, batch.ids, rewards, batch.advantages))
    if cfg.old_policy == "policy" and bool((batch.steps != step).any()):
        raise UserError("--old_policy policy: another policy sampled the completions of earlier steps; use sampler")
    sampled = time.perf_counter()

    # The model scores tokens as it sampled them, in eval mode, without dropout. Only layers with gradient checkpointing
    # stay in train mode, because they would not checkpoint otherwise.
    for module in run.model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)

    # Log-probs that stay fixed during the updates. If there is only one update, the old policy is the policy itself,
    # and its log-probs come from the forward pass of that update.
    if cfg.old_policy == "policy" and cfg.num_iterations * cfg.minibatches > 1:
        batch.old_logp = memory.until_it_fits(memory.smaller_micro_batches, fixed_logprobs, run, batch, run.model)
    if run.reference is not None or cfg.beta:
        reference = run.reference or run.model
        with lora.without_adapters(reference):
            batch.ref_logp = memory.until_it_fits(memory.smaller_micro_batches, fixed_logprobs, run, batch, reference)

    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(cfg, step, group.setdefault("initial_lr", group["lr"]))
    updates = []
    for iteration in range(cfg.num_iterations):
        for rows in minibatches(len(batch), cfg.minibatches, seed=(cfg.seed, step, iteration)):
            updates.append(update(run, batch[rows], step))

    metrics = {"step": step} | report.of_groups(drawn, run.task.reward_names) | report.of_updates(updates)
    metrics |= report.of_logged(run.logged)
    metrics |= report.of_machine(metrics["tokens"], sampled - start, time.perf_counter() - sampled)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    metrics |= {f"learning_rate/{i}" if i else "learning_rate": rate for i, rate in enumerate(rates)}
    return metrics, groups


def update(run: Run, batch: Batch, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """One optimizer update. -> the loss, the gradient norm, and this rank's (sum, count) of each figure"""
    cfg = run.config
    # All completions of the update are here, those of other ranks too, so the weight of each token can be computed now.
    # That makes the loss of a micro-batch a partial sum: however the update is split, the parts add up to its loss, and
    # their gradients, summed (not averaged) over micro-batches and ranks, to its gradient.
    batch.weights = token_weights(batch.mask, cfg.normalization, cfg.max_completion_length, batch.prompts)
    if cfg.top_entropy < 1.0:
        batch.advantages = on_high_entropy(batch.advantages, batch.sampler_entropy, batch.mask, cfg.top_entropy)
    loss, totals = memory.until_it_fits(memory.smaller_micro_batches, accumulate, run, batch)
    ranks.sum_gradients(run.model)
    ranks.sum_(loss)
    grad_norm = ranks.clip_gradients(run.model, cfg.max_grad_norm)
    if not (loss.isfinite() and grad_norm.isfinite()):
        report.not_finite(cfg, step, loss, grad_norm, batch, fixed_logprobs(run, batch, run.model))
    if batch.mask.any():  # otherwise there is nothing to learn from, and only momentum would move the weights
        run.optimizer.step()
    run.optimizer.zero_grad()  # frees the memory of the gradients for the next rollout
    return loss, grad_norm, totals


def accumulate(run: Run, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Add up this rank's part of the gradient, one micro-batch after another. -> its part of the loss and of figures"""
    cfg = run.config
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    totals = dict.fromkeys(STATS, torch.zeros(2, dtype=torch.float64, device=run.device))
    run.optimizer.zero_grad()
    # Without these terms, completions of advantage 0 have no gradient. With shards, all ranks must go back together.
    every_row = cfg.beta != 0.0 or cfg.entropy_coef != 0.0 or cfg.sampler_coef != 0.0 or cfg.shard
    for _, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world(), as_many_on_every_rank=cfg.shard):
        has_gradient = every_row or bool(part.has_gradient.any())
        with torch.set_grad_enabled(has_gradient):
            logp, entropy = logprobs(run, part, run.model, with_entropy=True)
        part_loss, stats = policy_loss(
            logp,
            logp.detach() if part.old_logp is None else part.old_logp,
            part.advantages,
            part.weights,
            part.mask,
            ref_logp=part.ref_logp,
            sampler_logp=part.sampler_logp,
            **{name: getattr(cfg, name) for name in LOSS_SWITCHES},
        )
        if cfg.entropy_coef:
            part_loss = part_loss - cfg.entropy_coef * (part.weights * entropy).sum()
        if has_gradient:
            part_loss.backward()

        loss += part_loss.detach()
        stats["entropy"] = entropy.detach().sum(), part.mask.sum()
        for name, pair in stats.items():
            pair = torch.stack(pair).double()
            totals[name] = report.together(name, totals.get(name, torch.zeros_like(pair)), pair)
    return loss, totals


@torch.no_grad()
def fixed_logprobs(run: Run, batch: Batch, model: PreTrainedModel) -> Tensor:
    """-> (N, T), the log-probs of all completions. Each rank computes a part, and all get the whole."""
    logp = torch.zeros_like(batch.sampler_logp)
    for rows, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world(), run.config.shard):
        logp[rows] += logprobs(run, part, model)[0]
    ranks.sum_(logp)
    return logp


def logprobs(run: Run, part: Batch, model: PreTrainedModel, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """-> logp (B, T), entropy (B, T) or None"""
    cfg = run.config
    with torch.autocast(run.device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        return token_logprobs(
            model,
            part.ids,
            part.attention,
            part.mask,
            temperature=cfg.temperature,
            kept=part.kept,
            together=part.together,
            with_entropy=with_entropy,
            entropy_grad=with_entropy and cfg.entropy_coef != 0.0,
        )


def learning_rate(cfg: Config, step: int, highest: float) -> float:
    """Linear warm-up, then the schedule, which ends at 0 after the last step."""
    if step <= cfg.warmup_steps:
        return highest * step / cfg.warmup_steps
    done = (step - cfg.warmup_steps - 1) / max(1, cfg.steps - cfg.warmup_steps)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    return highest * factor[cfg.lr_schedule]


# ---- The completions of a step ----


def draw_groups(run: Run, step: int) -> tuple[list[Group], list[Group]]:
    """-> the groups to train on, and all groups that were drawn.

    With dynamic_sampling (DAPO), groups without a signal are replaced by groups of further prompts, in at most that
    many further rounds. Every rank sees all rewards, so all decide the same."""
    cfg = run.config
    drawn, alive = [], []
    for _ in range(1 + cfg.dynamic_sampling):
        picked = pick_rows(run, cfg.prompts_per_step - len(alive), step)
        groups = generate_groups(run, run.task.train, picked, cfg.num_generations, step, first=len(drawn))
        drawn += judge(run, groups, done=step - 1)
        alive = [group for group in drawn if not cfg.dynamic_sampling or group.has_signal]
        if len(alive) == cfg.prompts_per_step:
            break
    return alive or drawn[: cfg.prompts_per_step], drawn


def pick_rows(run: Run, n: int, step: int) -> list[int]:
    """Choose the rows of a round, as places in run.task.train. A curriculum would go here: what it must remember
    belongs in run.state, and group.index says which row a group was of."""
    run.cursor += n
    return run.task.draw(run.cursor - n, n, run.config.seed)


def generate_groups(
    run: Run, rows: list[dict], picked: list[int], n: int, step: int, first: int = 0, greedy: bool = False
) -> list[Group]:
    """Sample n completions for each picked row. Each rank samples a part, and all get all groups. `first` counts the
    prompts that the step had before: it keeps the random numbers of its rounds apart."""
    encode_prompts(run.tokenizer, [rows[i] for i in picked if "prompt_ids" not in rows[i]])  # rows that a fork added
    cfg, prompts = run.config, [rows[i]["prompt_ids"] for i in picked]
    mine = [divmod(i, n) for i in ranks.share(len(picked) * n)]  # (place of the prompt, number of the sample)
    uniform = uniforms(cfg.seed, step, [(first + p, i) for p, i in mine], cfg.max_completion_length)

    def complete(run: Run, prompts: list[list[int]]) -> list[Completion]:
        sampling = replace(run.sampling, temperature=0.0, with_entropy=False) if greedy else run.sampling
        limit = partial(faults.time_limit, cfg.reward_timeout, what="reply function")
        asked = [rows[picked[p]] for p, _ in mine]
        replies = replies_to(run.task, asked, run.tokenizer, sampling.eos_ids, cfg.max_turns, limit)
        completions = rollout(run.model, prompts, uniform, sampling, replies=replies, progress=run.progress)
        return with_replies(completions, replies)

    with decoding(run.model, getattr(torch, cfg.dtype), cfg.decode, cfg.max_completion_length), ranks.fail_together():
        completions = memory.until_it_fits(memory.smaller_rollout, complete, run, [prompts[p] for p, _ in mine])
    completions = ranks.gather(completions)
    return [Group(prompts[p], rows[i], completions[p * n :][:n], index=i, step=step) for p, i in enumerate(picked)]


def judge(run: Run, groups: list[Group], done: int) -> list[Group]:
    """Reward every completion, when this many steps are done. Each rank calls the rewards for a part of the groups."""
    cfg, own = run.config, ranks.share(len(groups))
    with ranks.fail_together():
        limit = partial(faults.time_limit, cfg.reward_timeout)
        scored, logged = score(run.task, groups[own.start : own.stop], run.tokenizer, done, limit)
    for group, (values, extras) in zip(groups, ranks.gather(scored), strict=True):
        group.reward_parts = torch.tensor(values, dtype=torch.float64)  # (G, K)
        group.rewards = group.combined = combine_rewards(group.reward_parts[None], run.task.weights)[0]  # (G,)
        if cfg.combine_rewards != "sum":
            group.combined = combine_rewards(group.reward_parts[None], run.task.weights, cfg.combine_rewards)[0]
        group.right, group.extras = run.task.right(group.reward_parts), extras
        group.has_signal = has_signal(group, cfg.mask_truncated, run.task.graded)
    run.logged += logged  # of this rank, until the step gathers it
    return groups


def evaluate(run: Run, step: int) -> tuple[dict, list[Group]]:
    """Held-out prompts: a greedy completion of each, and eval_k samples for pass@k. -> the figures, and the samples.
    The random numbers are those of step 0, so that every evaluation has the same."""
    rows, picked = run.task.eval, [*range(min(len(run.task.eval), run.config.eval_prompts))]
    # The larger rollout comes first: if it runs out of memory, the other one starts with what fits.
    sampled = judge(run, generate_groups(run, rows, picked, run.config.eval_k, step=0), step)
    greedy = judge(run, generate_groups(run, rows, picked, 1, step=0, greedy=True), step)
    return report.of_evaluation(greedy, sampled, run.task.reward_names), sampled


# ---- The run ----


def set_up(cfg: Config, device: torch.device) -> tuple[Run, report.RunLog, list[str]]:
    """-> the run, its log, and notes for the user"""
    with ranks.fail_together():  # everything that can be wrong before the weights are loaded
        task = load_task(cfg)
        opened = open_model(cfg.model or task_file(cfg.task).model(cfg), cfg)
        context = getattr(opened.config.get_text_config(), "max_position_embeddings", None)
        longest_prompt = check_prompts(task, opened.tokenizer, context, cfg)
    cfg, memory_plan = memory.plan(cfg, opened.config, longest_prompt, run_folder.common(cfg, task.train + task.eval))
    log = report.RunLog(cfg, opened.tokenizer.decode, task.reward_names)
    log.say(memory_plan)
    model, reference, eos_ids = load(opened, cfg, device)
    with ranks.fail_together():
        check_template(task, opened.tokenizer, eos_ids)
    adam = dict(betas=(cfg.adam_beta1, cfg.adam_beta2), weight_decay=cfg.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, **adam)
    same = vars(cfg).keys() & Sampling.__dataclass_fields__.keys()  # settings that have the name of a field
    sampling = Sampling(
        eos_ids=eos_ids,
        tokens_at_once=cfg.rollout_tokens,
        with_entropy=cfg.top_entropy < 1.0,
        to_text=opened.tokenizer.decode,
        drop_share=0.5 if cfg.decode == "graph" else 0.25,  # a smaller batch needs a new CUDA graph
        **{name: getattr(cfg, name) for name in same},
    )
    limits = memory.limits(cfg, model, longest_prompt)
    run = Run(cfg, device, task, opened.tokenizer, model, reference, optimizer, sampling, limits, log.generating)
    return run, log, [*notes(task, opened.tokenizer), *command_line.warnings(cfg), *lora.notes(model)]


@faults.handlers_put_back()
def train(cfg: Config) -> int:
    """A whole run or the rest of one, or an evaluation if `steps` is 0. -> exit code"""
    given, cfg = cfg, command_line.ready(cfg, torch.cuda.is_available())
    cfg = replace(cfg, out=str(Path(cfg.out).expanduser().resolve()))  # a reward may change the working directory
    device, out = ranks.start(cfg.shard), Path(cfg.out)
    done = ranks.on_first(run_folder.step_to_continue_after, cfg)
    if done is None:
        return report.finished(out, ranks.on_first(run_folder.changes, cfg))
    run, log, noted = set_up(cfg, device)
    models = {"model": run.model} | ({"reference": run.reference} if run.reference is not None else {})
    if done:
        run.cursor, run.state = checkpoint.load(out, done, models, run.optimizer)
    # Everything is ready, so from here on the run's folder is written to, and not before.
    noted += ranks.on_first(run_folder.begin, run.config, given, done)
    ranks.on_first(log.open, done)
    log.plan(run.model, (len(run.task.train), len(run.task.eval)), device, noted, done)

    if cfg.eval_every and not done:
        seeds.seed_everything(cfg.seed, 0)
        figures, evaluated = evaluate(run, 0)
        log.step({"step": 0} | figures, [], evaluated)
    stop_requests = faults.stop_requests()
    for step in range(done + 1, cfg.steps + 1):
        metrics, groups = training_step(run, step)
        if cfg.ref_sync_every and step % cfg.ref_sync_every == 0:
            run.reference.load_state_dict(run.model.state_dict())
        evaluates = cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps)
        figures, evaluated = evaluate(run, step) if evaluates else ({}, [])
        log.step(metrics | figures, groups, evaluated)
        stop = max(ranks.gather(stop_requests), default=0)
        if stop or step == cfg.steps or (cfg.save_every and step % cfg.save_every == 0):
            checkpoint.save(out, step, models, run.optimizer, run.cursor, run.state, cfg.keep_checkpoints)
        if stop and step < cfg.steps:
            return log.stopped(stop, step)
    if cfg.steps:
        checkpoint.save_model(out / "model", run.model, run.tokenizer)
    return report.finished(out)


def main(words: list[str]) -> int:
    return faults.run_to_the_end(train, command_line.parse(words, torch.cuda.is_available()))


if __name__ == "__main__":
    faults.leave(main(sys.argv[1:]))
