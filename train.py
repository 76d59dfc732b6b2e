"""GRPO: the training step, from top to bottom.

    torchrun train.py                                     learns addition, from a small model that is in this repository
    torchrun --nproc_per_node 8 train.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
    python train.py --help                                every setting

prompts -> completions -> rewards -> advantages -> updates: `training_step`, `update` and `accumulate` are that step.
It is prompts_per_step x num_generations completions. Ranks and micro-batches are how it is computed, not what: every
rank knows all completions (a few megabytes), each token's weight is fixed before they are split, gradients are summed.
"""

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from advantage import combine_rewards, group_advantages, on_high_entropy
from batch import Batch, Group, collate, has_signal, micro_batches, minibatches, trained_lengths
from config import Config, UserError
from infra import checkpoint, command_line, faults, memory, ranks, report, run_folder
from infra.decoding import decoding
from infra.run import Run, learning_rate, set_up
from logprob import token_logprobs
from loss import policy_loss, token_weights
from rollout import Completion, rollout, uniforms
from tasks import score
from tasks._prompts import encode_prompt

LOSS_SWITCHES = vars(Config()).keys() & policy_loss.__kwdefaults__.keys()  # settings that it takes
STATS = ("entropy", "kl", "clip_low", "clip_high", "sampler_gap", "off_policy")  # means over tokens; null where none


# ---- The step ----


def training_step(run: Run, step: int) -> tuple[dict, list[Group]]:
    """One rollout with all its updates. -> metrics, groups"""
    cfg = run.config
    ranks.seed_everything(cfg.seed, step)
    start, run.logged = time.perf_counter(), []

    # Prompts -> completions -> rewards -> advantages, over whole groups.
    groups, drawn = draw_groups(run, step)
    rewards = total_rewards(run, groups, cfg.combine_rewards)  # (P, G)
    lengths = trained_lengths(groups, cfg.mask_truncated)  # (P, G), 0 where truncated and masked: the reward counts
    advantages = group_advantages(rewards, cfg.scale_rewards, cfg.baseline, lengths=lengths)  # (P, G)
    for group, of_group in zip(groups, advantages, strict=True):
        rejected = cfg.dynamic_sampling and not group.has_signal  # where further rounds brought no other group
        group.advantages = torch.zeros_like(of_group) if rejected else of_group
    batch = collate(groups, cfg.mask_truncated, run.device)
    if cfg.old_policy == "policy" and bool((batch.steps != step).any()):
        raise UserError("--old_policy policy: is not what sampled the completions of earlier steps; use sampler")
    sampled = time.perf_counter()

    # Scored as it was sampled, in eval mode: no dropout. Only layers with gradient checkpointing must say they train.
    for module in run.model.modules():
        module.training = getattr(module, "gradient_checkpointing", False)

    # Log-probs that stay fixed during the updates. With one update the old policy is the policy itself, and its
    # log-probs come with the gradient's: no second forward pass. Nor does the sampler as the old policy need one.
    if cfg.old_policy == "policy" and cfg.num_iterations * cfg.minibatches > 1:
        batch.old_logp = fixed_logprobs(run, batch, run.model)
    if run.reference is not None:
        batch.ref_logp = fixed_logprobs(run, batch, run.reference)

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
    """One optimizer update on these completions. -> loss, gradient norm, this rank's (sum, count) of each figure"""
    cfg = run.config
    # The weight of every token is settled here, from all completions of the update on all ranks. So the loss of a
    # micro-batch is a partial sum: partial sums add up to the update's loss however it is split, and their gradients,
    # summed (not averaged) over micro-batches and ranks, to its gradient.
    batch.weights = token_weights(batch.mask, cfg.normalization, cfg.max_completion_length, batch.prompts)
    if cfg.top_entropy < 1.0:
        batch.advantages = on_high_entropy(batch.advantages, batch.sampler_entropy, batch.mask, cfg.top_entropy)
    loss, totals = accumulate(run, batch)
    ranks.sum_gradients(run.model)
    ranks.sum_(loss)
    grad_norm = ranks.clip_gradients(run.model, cfg.max_grad_norm)
    if not (loss.isfinite() and grad_norm.isfinite()):
        report.not_finite(step, loss, grad_norm)
    if batch.mask.any():  # else momentum alone would move the weights
        run.optimizer.step()
    run.optimizer.zero_grad()  # frees the gradients' memory for the next rollout
    return loss, grad_norm, totals


@memory.retry_on_oom(memory.smaller_micro_batches)
def accumulate(run: Run, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """This rank's part of the gradient, one micro-batch after another. -> its part of the loss and of the figures"""
    cfg = run.config
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    totals = dict.fromkeys(STATS, torch.zeros(2, dtype=torch.float64, device=run.device))
    run.optimizer.zero_grad()
    # A completion of advantage 0 gets a gradient from these alone; with shards all ranks go back together.
    every_row = cfg.beta != 0.0 or cfg.entropy_coef != 0.0 or cfg.sampler_coef != 0.0 or cfg.shard
    for _, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world(), as_many_on_every_rank=cfg.shard):
        learns = every_row or bool(part.has_gradient.any())
        with torch.set_grad_enabled(learns):
            logp, entropy = logprobs(run, part, run.model, with_entropy=True)
        old_logp = logp.detach() if part.old_logp is None else part.old_logp
        partial, stats = policy_loss(
            logp,
            part.sampler_logp if cfg.old_policy == "sampler" else old_logp,
            part.advantages,
            part.weights,
            part.mask,
            ref_logp=part.ref_logp,
            sampler_logp=part.sampler_logp,
            **{name: getattr(cfg, name) for name in LOSS_SWITCHES},
        )
        if cfg.entropy_coef:
            partial = partial - cfg.entropy_coef * (part.weights * entropy).sum()
        if learns:
            partial.backward()

        loss += partial.detach()
        stats["entropy"] = entropy.detach().sum(), part.mask.sum()
        for name, pair in stats.items():
            totals[name] = totals.get(name, 0.0) + torch.stack(pair).double()
    return loss, totals


@torch.no_grad()
@memory.retry_on_oom(memory.smaller_micro_batches)
def fixed_logprobs(run: Run, batch: Batch, model: PreTrainedModel) -> Tensor:
    """Log-probs of all completions of the step, each computed by one rank and known to all: (N, T)."""
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


# ---- Its completions ----


def draw_groups(run: Run, step: int) -> tuple[list[Group], list[Group]]:
    """Groups to train on, and all that were drawn. With dynamic_sampling (DAPO), groups without a signal are replaced
    by further prompts, in at most so many further rounds; every rank sees all rewards and so decides the same."""
    cfg = run.config
    drawn, alive = [], []
    for _ in range(1 + cfg.dynamic_sampling):
        picked = pick_rows(run, cfg.prompts_per_step - len(alive), step)
        drawn += judge(run, sample(run, run.task.train, picked, cfg.num_generations, step, first=len(drawn)), step - 1)
        alive = [group for group in drawn if not cfg.dynamic_sampling or group.has_signal]
        if len(alive) == cfg.prompts_per_step:
            break
    return alive or drawn[: cfg.prompts_per_step], drawn


def pick_rows(run: Run, n: int, step: int) -> list[int]:
    """The rows of a round, by their places in run.task.train. To choose by what happened: run.state, group.index."""
    run.cursor += n
    return run.task.draw(run.cursor - n, n, run.config.seed)


def sample(
    run: Run, rows: list[dict], picked: list[int], n: int, step: int, first: int = 0, greedy: bool = False
) -> list[Group]:
    """n completions of each picked row, the first of which is the `first` of the step. The ranks share them."""
    cfg, prompts = run.config, [encode_prompt(run.tokenizer, rows[i]["prompt"]) for i in picked]
    mine = ranks.share(len(picked) * n)
    streams = [(first + i // n, i % n) for i in mine]
    uniform = uniforms(cfg.seed, step, streams, cfg.max_completion_length)
    with decoding(run.model, getattr(torch, cfg.dtype), cfg.decode, cfg.max_completion_length), ranks.fail_together():
        completions = complete(run, [prompts[i // n] for i in mine], uniform, greedy)
    completions = ranks.gather(completions)
    return [Group(prompts[p], rows[i], completions[p * n :][:n], index=i, step=step) for p, i in enumerate(picked)]


@memory.retry_on_oom(memory.smaller_rollout)
def complete(run: Run, prompts: list[list[int]], uniform: np.ndarray, greedy: bool) -> list[Completion]:
    sampling = replace(run.sampling, temperature=0.0, with_entropy=False) if greedy else run.sampling
    return rollout(run.model, prompts, uniform, sampling, progress=run.progress)


def judge(run: Run, groups: list[Group], done: int) -> list[Group]:
    """The groups, with rewards of every completion, after so many steps. The ranks share them."""
    own = ranks.share(len(groups))
    with ranks.fail_together():
        limit = partial(faults.time_limit, run.config.reward_timeout)
        scored, logged = score(run.task, groups[own.start : own.stop], run.tokenizer, done, limit)
    for group, (values, extras) in zip(groups, ranks.gather(scored), strict=True):
        group.reward_parts = torch.tensor(values, dtype=torch.float64)  # (G, K), of K reward functions
        group.rewards = total_rewards(run, [group])[0]  # (G,), as reported
        group.right, group.extras = run.task.right(group.reward_parts), extras
        group.has_signal = has_signal(group, run.config.mask_truncated)
    run.logged += ranks.gather(logged)
    return groups


def total_rewards(run: Run, groups: list[Group], how: str = "sum") -> Tensor:
    """(P, G), as reported or, by `combine_rewards`, as trained on"""
    return combine_rewards(torch.stack([group.reward_parts for group in groups]), run.task.weights, how)


def evaluate(run: Run, step: int) -> tuple[dict, list[Group]]:
    """Held-out prompts: greedy accuracy, and pass@k from eval_k samples. The streams are those of step 0 each time."""
    rows, picked = run.task.eval, [*range(min(len(run.task.eval), run.config.eval_prompts))]
    sampled = judge(run, sample(run, rows, picked, run.config.eval_k, step=0), step)  # first: it finds out what fits
    greedy = judge(run, sample(run, rows, picked, 1, step=0, greedy=True), step)
    return report.of_evaluation(greedy, sampled, run.task.reward_names), sampled


# ---- The run ----


@faults.handlers_put_back()
def train(cfg: Config) -> int:
    """A whole run, or what is left of one; without steps, an evaluation. -> exit code"""
    given, cfg = cfg, command_line.ready(cfg, torch.cuda.is_available())
    cfg = replace(cfg, out=str(Path(cfg.out).expanduser().resolve()))  # a reward may change the working directory
    device, out = ranks.start(cfg.shard), Path(cfg.out)
    done = ranks.on_first(run_folder.open_run, cfg)
    if done is None:
        return report.finished(out, f"the run in {out}/ is finished")
    run, log, noted = set_up(cfg, device)
    models = {"model": run.model} | ({"reference": run.reference} if run.reference is not None else {})
    if done:
        run.cursor, run.state = checkpoint.load(out, done, models, run.optimizer)
    # All is ready: only from here on anything is written.
    noted += ranks.on_first(run_folder.begin, run.config, given, done)
    ranks.on_first(log.open, done)
    log.plan(run.model, (len(run.task.train), len(run.task.eval)), device, noted, done)

    if cfg.eval_every and not done:
        ranks.seed_everything(cfg.seed, 0)
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
