"""A training run. To read the algorithm first, without options, see minimal.py.

    torchrun train.py                                     learns addition, with a small model of this repository
    torchrun --nproc_per_node 8 train.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
    python train.py --help                                lists every setting

Read `training_step`, `update` and `accumulate` in this order. Ranks and micro-batches change how a step is computed,
not what is computed: token weights are fixed before the completions are split, and gradients are summed.
"""

import math
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the program loads, Ctrl-C ends it without a stack trace

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
from tasks import Task, load_task, score, task_module
from tasks._prompts import check_prompts, encode_prompts, notes
from tasks._turns import check_template, replies_to, with_replies

# Every setting that has the name of a keyword argument of policy_loss is passed to it. A new one needs no code here.
LOSS_SWITCHES = [name for name in policy_loss.__kwdefaults__ if name in vars(Config())]
STATS = ("entropy", "kl", "clip_low", "clip_high", "sampler_gap", "off_policy")  # always reported; there may be others


@dataclass
class Run:
    """Everything that is needed for more than one step. A checkpoint contains the model, the reference, the optimizer,
    `cursor` and `state`. When a run is continued, the other fields are made again from its settings."""

    config: Config
    device: torch.device
    task: Task
    tokenizer: Any
    model: PreTrainedModel
    reference: PreTrainedModel | None  # for the KL term; None with LoRA, which uses the model without its adapters
    optimizer: torch.optim.Optimizer
    sampling: Sampling
    limits: Limits  # the size of a micro-batch; `memory.until_it_fits` lowers it when memory runs out
    progress: Progress | None = None  # called after each token of a rollout
    cursor: int = 0  # the number of prompts drawn so far
    state: dict[str, Any] = field(default_factory=dict)  # for your own code; saved; keep it the same on all ranks
    logged: list[tuple[str, float]] = field(default_factory=list)  # values logged in this step; the means are reported

    def log(self, name: str, value: float) -> None:
        self.logged.append((f"logged/{name}", float(value)))


def training_step(run: Run, step: int) -> tuple[dict, list[Group]]:
    """Do one rollout and all its updates. Return the metrics, and the groups that were trained on."""
    cfg = run.config
    seeds.seed_everything(cfg.seed, step)
    start, run.logged = time.perf_counter(), []

    # Prompts -> completions -> rewards -> advantages.
    groups, drawn = draw_groups(run, step)  # those to train on, and all that were sampled
    combined = torch.stack([group.combined for group in groups])  # (P, G)
    lengths = trained_lengths(groups, cfg.mask_truncated)  # (P, G)
    advantages = group_advantages(combined, cfg.scale_rewards, cfg.baseline, lengths=lengths)  # (P, G)
    if cfg.dynamic_sampling and not any(group.has_signal for group in groups):
        # No group has a signal. A baseline or scale of the whole batch could still make some advantages differ from 0.
        advantages = torch.zeros_like(advantages)
    for group, row in zip(groups, advantages, strict=True):
        group.advantages = row
    batch = collate(groups, cfg.mask_truncated, run.device)
    ranks.check_same(report.checksums(step, batch.ids, combined, batch.advantages))
    run.logged = ranks.gather(run.logged)
    if cfg.old_policy == "policy" and bool((batch.steps != step).any()):  # your own `draw_groups` may replay groups
        raise UserError("--old_policy policy: some completions are of earlier steps; give --old_policy sampler")
    sampled = time.perf_counter()

    # Compute log-probs in eval mode, as when sampling, so that dropout is off. Layers with gradient checkpointing stay
    # in train mode, because in eval mode they would not checkpoint.
    for module in run.model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)

    # These log-probs stay fixed during the updates. `old_logp` stays None if it is not needed: with a single update it
    # equals the log-probs in `accumulate`, and with --old_policy sampler `policy_loss` uses those of the sampler.
    if cfg.old_policy == "policy" and cfg.num_iterations * cfg.minibatches > 1:
        batch.old_logp = memory.until_it_fits(memory.smaller_micro_batches, fixed_logprobs, run, batch, run.model)
    if run.reference is not None or cfg.beta:  # your own code may use a reference even if beta is 0
        reference = run.reference or run.model  # with LoRA, the reference is the model without its adapters
        with lora.without_adapters(reference):
            batch.ref_logp = memory.until_it_fits(memory.smaller_micro_batches, fixed_logprobs, run, batch, reference)

    for params in run.optimizer.param_groups:
        params.setdefault("initial_lr", params["lr"])  # the rate that the optimizer was made with
        params["lr"] = learning_rate(cfg, step, params["initial_lr"])
    updates = []
    for iteration in range(cfg.num_iterations):
        for rows in minibatches(len(batch), cfg.minibatches, seed=(cfg.seed, step, iteration)):
            updates.append(update(run, batch[rows], step))

    metrics = {"step": step} | report.of_groups(drawn, run.task.reward_names) | report.of_logged(run.logged)
    metrics |= report.of_updates(updates, run.optimizer)
    metrics |= report.of_machine(metrics["tokens"], sampled - start, time.perf_counter() - sampled)
    return metrics, groups


def update(run: Run, batch: Batch, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Do one optimizer update. Return the loss, the gradient norm, and this rank's (sum, count) of each statistic."""
    cfg = run.config
    # The batch has the completions of all ranks, so the weight of every token is computed before anything is split.
    # Then the loss of a micro-batch is a partial sum: in any split, the partial losses add up to the loss of the
    # update. Their gradients, which are summed over all ranks and not averaged, add up to the gradient of the update.
    batch.weights = token_weights(batch.mask, cfg.normalization, cfg.max_completion_length, batch.prompts)
    if cfg.top_entropy < 1.0:
        batch.advantages = on_high_entropy(batch.advantages, batch.sampler_entropy, batch.mask, cfg.top_entropy)
    loss, totals = memory.until_it_fits(memory.smaller_micro_batches, accumulate, run, batch)
    ranks.sum_gradients(run.model)
    ranks.sum_(loss)
    grad_norm = ranks.clip_gradients(run.model, cfg.max_grad_norm)
    if not (loss.isfinite() and grad_norm.isfinite()):
        report.stop_not_finite(cfg, step, loss, grad_norm, batch, fixed_logprobs(run, batch, run.model))  # raises
    if batch.mask.any():  # otherwise only momentum and weight decay would change the weights
        run.optimizer.step()
    run.optimizer.zero_grad()  # frees the memory of the gradients for the next rollout
    return loss, grad_norm, totals


def accumulate(run: Run, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Add up the gradients of this rank's micro-batches. Return this rank's part of the loss and of the statistics."""
    cfg = run.config
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    totals = {name: torch.zeros(2, dtype=torch.float64, device=run.device) for name in STATS}  # (sum, count) of each
    run.optimizer.zero_grad()  # there may be gradients of an attempt that ran out of memory
    # A micro-batch whose advantages are all 0 needs no backward pass, unless the KL, entropy or sampler term gives it a
    # gradient, or the weights are sharded, so that every rank must take part in every backward pass.
    always_backward = cfg.beta != 0.0 or cfg.entropy_coef != 0.0 or cfg.sampler_coef != 0.0 or cfg.shard
    for _, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world(), same_count=cfg.shard):
        has_gradient = always_backward or bool(part.has_gradient.any())
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
            totals[name] = report.combine(name, totals.get(name), torch.stack(pair).double())
    return loss, totals


@torch.no_grad()
def fixed_logprobs(run: Run, batch: Batch, model: PreTrainedModel) -> Tensor:
    """Return the log-probs (N, T) of all completions. Each rank computes a part, and every rank gets all of them."""
    logp = torch.zeros_like(batch.sampler_logp)
    for rows, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world(), same_count=run.config.shard):
        # `+=`, not `=`: with `same_count`, a row may come again, fully masked. Its zeros must not erase its log-probs.
        logp[rows] += logprobs(run, part, model)[0]
    ranks.sum_(logp)
    return logp


def logprobs(run: Run, part: Batch, model: PreTrainedModel, with_entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob (B, T) and the entropy (B, T) of each token, with the settings of the run."""
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
    """Return the rate of a step: linear warm-up, then the schedule. `linear` and `cosine` end just above 0."""
    if step <= cfg.warmup_steps:
        return highest * step / cfg.warmup_steps
    elapsed = (step - cfg.warmup_steps - 1) / max(1, cfg.steps - cfg.warmup_steps)
    factor = {"constant": 1.0, "linear": 1.0 - elapsed, "cosine": (1.0 + math.cos(math.pi * elapsed)) / 2}
    return highest * factor[cfg.lr_schedule]


def draw_groups(run: Run, step: int) -> tuple[list[Group], list[Group]]:
    """Return the groups to train on, and all that were drawn. With dynamic sampling (DAPO), groups without a signal are
    replaced, in at most cfg.dynamic_sampling further rounds. Every rank has all rewards, so all ranks decide alike."""
    cfg = run.config
    drawn, alive = [], []
    for _ in range(1 + cfg.dynamic_sampling):
        picked = pick_rows(run, cfg.prompts_per_step - len(alive), step)
        groups = generate_groups(run, run.task.train, picked, cfg.num_generations, step, offset=len(drawn))
        drawn += judge(run, groups, steps_done=step - 1)
        alive = [group for group in drawn if not cfg.dynamic_sampling or group.has_signal]
        if len(alive) == cfg.prompts_per_step:
            break
    return (alive or drawn[: cfg.prompts_per_step]), drawn  # the first groups, if none has a signal


def pick_rows(run: Run, n: int, step: int) -> list[int]:
    """Choose the next n rows of the task, as positions in run.task.train. For a curriculum, change this function, and
    store its state in run.state. After the step, group.index tells which row a group came from."""
    run.cursor += n
    return run.task.draw(run.cursor - n, n, run.config.seed)


def generate_groups(
    run: Run, rows: list[dict], picked: list[int], n: int, step: int, offset: int = 0, greedy: bool = False
) -> list[Group]:
    """Sample n completions for each picked row. Each rank samples a part, and every rank gets all groups. `offset` is
    the number of prompts already drawn in this step. Random numbers depend on it, so that no two prompts share them."""
    new = [rows[i] for i in picked if "prompt_ids" not in rows[i]]
    encode_prompts(run.tokenizer, new)  # rows that your own code has added during the run
    cfg, prompts = run.config, [rows[i]["prompt_ids"] for i in picked]
    mine = [divmod(i, n) for i in ranks.share(len(picked) * n)]  # (position p in `picked`, number of the sample)
    uniform = uniforms(cfg.seed, step, [(offset + p, sample) for p, sample in mine], cfg.max_completion_length)

    # Called by `until_it_fits`, which calls it again, with a lower run.sampling.tokens_at_once, if memory runs out.
    def complete(run: Run, own_prompts: list[list[int]]) -> list[Completion]:
        sampling = replace(run.sampling, temperature=0.0, with_entropy=False) if greedy else run.sampling
        limit = partial(faults.time_limit, cfg.reward_timeout, what="reply function")
        own_rows = [rows[picked[p]] for p, _ in mine]
        replies = replies_to(run.task, own_rows, run.tokenizer, sampling.eos_ids, cfg.max_turns, limit)
        completions = rollout(run.model, own_prompts, uniform, sampling, replies=replies, progress=run.progress)
        return with_replies(completions, replies)

    with decoding(run.model, getattr(torch, cfg.dtype), cfg.decode, cfg.max_completion_length), ranks.fail_together():
        completions = memory.until_it_fits(memory.smaller_rollout, complete, run, [prompts[p] for p, _ in mine])
    completions = ranks.gather(completions)
    by_prompt = [completions[start : start + n] for start in range(0, len(completions), n)]
    return [Group(prompts[p], rows[index], by_prompt[p], index=index, step=step) for p, index in enumerate(picked)]


def judge(run: Run, groups: list[Group], steps_done: int) -> list[Group]:
    """Set the rewards of every group. Each rank scores a part of them. `steps_done` counts finished steps."""
    cfg, own, weights = run.config, ranks.share(len(groups)), run.task.weights
    with ranks.fail_together():
        limit = partial(faults.time_limit, cfg.reward_timeout)
        scored, logged = score(run.task, groups[own.start : own.stop], run.tokenizer, steps_done, limit)
    for group, (values, extras) in zip(groups, ranks.gather(scored), strict=True):
        group.reward_parts = torch.tensor(values, dtype=torch.float64)  # (G, K)
        group.rewards = combine_rewards(group.reward_parts[None], weights)[0]  # (G,), for reports
        group.combined = combine_rewards(group.reward_parts[None], weights, cfg.combine_rewards)[0]  # for advantages
        group.right, group.extras = run.task.right(group.reward_parts), extras
        group.has_signal = has_signal(group, cfg.mask_truncated, run.task.graded)
    run.logged += logged  # of this rank only; `training_step` gathers it
    return groups


def evaluate(run: Run, step: int) -> tuple[dict, list[Group]]:
    """Evaluate on held-out prompts, with one greedy completion of each, and eval_k samples for pass@k. Return the
    metrics and the samples. Every evaluation uses the random numbers of step 0, so that evaluations can be compared."""
    rows, picked = run.task.eval, [*range(min(len(run.task.eval), run.config.eval_prompts))]
    sampled = judge(run, generate_groups(run, rows, picked, run.config.eval_k, step=0), step)
    greedy = judge(run, generate_groups(run, rows, picked, 1, step=0, greedy=True), step)
    return report.of_evaluation(greedy, sampled, run.task.reward_names), sampled


def set_up(cfg: Config, device: torch.device) -> tuple[Run, report.RunLog, list[str]]:
    """Load everything that a run needs. Return the run, its log, and notes for the user."""
    with ranks.fail_together():  # all mistakes that can be found before the weights are loaded
        task = load_task(cfg)
        opened = open_model(cfg.model or task_module(cfg.task).model(cfg), cfg)  # a task's file may make a model
        context = getattr(opened.config.get_text_config(), "max_position_embeddings", None)
        longest_prompt = check_prompts(task, opened.tokenizer, context, cfg)
    ranks.check_same(run_folder.fingerprint_of_start(cfg, task.train + task.eval))
    cfg, memory_plan = memory.plan(cfg, opened.config, longest_prompt)
    log = report.RunLog(cfg, opened.tokenizer.decode, task.reward_names)
    log.say(memory_plan)
    model, reference, eos_ids = load(opened, cfg, device)
    with ranks.fail_together():
        check_template(task, opened.tokenizer, eos_ids)
    adam = dict(betas=(cfg.adam_beta1, cfg.adam_beta2), weight_decay=cfg.weight_decay, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, **adam)
    sampling = Sampling(
        eos_ids=eos_ids,
        tokens_at_once=cfg.rollout_tokens,
        with_entropy=cfg.top_entropy < 1.0,
        to_text=opened.tokenizer.decode,
        drop_share=0.5 if cfg.decode == "graph" else 0.25,  # after rows are dropped, a new graph must be captured
        # The settings that have the same name as a field of Sampling:
        **{name: getattr(cfg, name) for name in vars(cfg).keys() & Sampling.__dataclass_fields__.keys()},
    )
    limits = memory.limits(cfg, model, longest_prompt)
    run = Run(cfg, device, task, opened.tokenizer, model, reference, optimizer, sampling, limits, log.generating)
    return run, log, [*notes(task, opened.tokenizer), *command_line.warnings(cfg), *lora.notes(model)]


def train(typed: Config) -> int:
    """Do a whole run, or what is left of an interrupted one, or only evaluate if `steps` is 0. Return the exit code.
    `typed` has the settings that the user typed. The others are still to be filled in."""
    cfg = command_line.ready(typed, torch.cuda.is_available())
    cfg = replace(cfg, out=str(Path(cfg.out).expanduser().resolve()))  # a reward may change the working directory
    device, out = ranks.start(cfg.shard), Path(cfg.out)
    ranks.on_first(run_folder.claim, cfg)
    if ranks.on_first(run_folder.is_finished, cfg):
        return report.finished(out, already=True)
    steps_made = ranks.on_first(run_folder.step_to_continue_after, cfg)
    cfg = replace(cfg, **ranks.on_first(run_folder.budgets, cfg))
    run, log, noted = set_up(cfg, device)
    models = {"model": run.model} | ({"reference": run.reference} if run.reference is not None else {})
    if steps_made:
        run.cursor, run.state = checkpoint.load(out, steps_made, models, run.optimizer)
    # But for its lock, the folder is unchanged up to this line, so a run that cannot start leaves it as it was.
    noted += ranks.on_first(run_folder.begin, run.config, typed, steps_made)
    ranks.on_first(log.open, steps_made)
    log.plan(run.model, (len(run.task.train), len(run.task.eval)), device, noted, steps_made)

    stop_requests = faults.stop_requests()  # a list, to which a signal handler appends the number of its signal
    if cfg.eval_every and not steps_made:
        seeds.seed_everything(cfg.seed, 0)
        held_out, evaluated = evaluate(run, 0)
        log.step({"step": 0} | held_out, [], evaluated)
    for step in range(steps_made + 1, cfg.steps + 1):
        metrics, groups = training_step(run, step)
        if cfg.ref_sync_every and step % cfg.ref_sync_every == 0:
            run.reference.load_state_dict(run.model.state_dict())
        evaluates = cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps)
        held_out, evaluated = evaluate(run, step) if evaluates else ({}, [])
        log.step(metrics | held_out, groups, evaluated)
        stop = max(ranks.gather(stop_requests), default=0)
        if stop or step == cfg.steps or (cfg.save_every and step % cfg.save_every == 0):
            checkpoint.save(out, step, models, run.optimizer, run.cursor, run.state, cfg.keep_checkpoints)
        if stop and step < cfg.steps:
            return log.stopped(stop, step)
    if cfg.steps:
        checkpoint.save_model(out / "model", run.model, run.tokenizer)
    return report.finished(out)


def main(words: list[str]) -> int:
    # A stream that was closed when the program started is None.
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    return faults.run_to_the_end(train, command_line.parse(words, torch.cuda.is_available()))


if __name__ == "__main__":
    faults.leave(main(sys.argv[1:]))
