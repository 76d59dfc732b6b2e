"""GRPO: the training step, from top to bottom.

    torchrun train.py                                     learns addition, from a small model that is in this repository
    torchrun --nproc_per_node 8 train.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
    python train.py --help                                every setting

prompts -> completions -> rewards -> advantages -> updates: `training_step` and `update` are that step. What they call
stands in the file of its name: rollout, task (rewards), advantage, logprob, loss.

A step is described by prompts_per_step x num_generations completions. Ranks and micro-batches are how it is computed,
not what is computed: every rank knows all completions of the step (a few megabytes), the weight of each token is fixed
before the work is split, and gradients are summed.
"""

import copy
import functools
import math
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from advantage import group_advantages
from batch import Batch, Group, collate, micro_batches, minibatches
from config import BUILT_IN, Config, UserError
from infra import checkpoint, faults, memory, ranks, report
from infra import command_line as checks
from infra.shard import make_mesh, shard
from logprob import head_returns_logits, token_logprobs
from loss import policy_loss, token_weights
from rollout import Sampling, rollout, uniforms
from tasks import Task, encode_prompt, load_task, score
from tasks._characters import EOS_ID

LOSS_SWITCHES = "objective ratio epsilon_low epsilon_high delta beta kl_estimator kl_importance tis_cap".split()
STATS = ("entropy", "kl", "clip_low", "clip_high", "sampler_gap")


@dataclass
class Run:
    """What stays from step to step."""

    config: Config
    task: Task
    model: PreTrainedModel
    reference: PreTrainedModel | None
    tokenizer: object
    optimizer: torch.optim.Optimizer
    sampling: Sampling
    greedy: Sampling
    show: report.Report
    rank: int
    world: int
    device: torch.device
    micro_batch: int  # rows or padded tokens; halved where memory runs out
    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # rows and loss of the micro-batches at work


# ---- The step ----


def training_step(run: Run, step: int, cursor: int) -> tuple[dict, list[Group], int]:
    """One rollout with all its updates. `cursor` counts the prompts drawn so far. -> metrics, groups, cursor"""
    cfg = run.config
    seed_everything(cfg.seed, step, run.rank)
    clock = time.perf_counter()

    # Prompts -> completions -> rewards -> advantages, over whole groups.
    groups, drawn = sample_groups(run, step, cursor)
    rewards = torch.cat([group.rewards for group in groups])  # (N,)
    advantages = group_advantages(rewards, cfg.num_generations, cfg.scale_rewards, cfg.baseline)
    for group, part in zip(groups, advantages.split(cfg.num_generations), strict=True):
        group.advantages = part
    batch = collate(groups, advantages, cfg.mask_truncated, run.device)
    seconds_rollout, clock = time.perf_counter() - clock, time.perf_counter()

    # Log-probs that stay fixed during the updates. With one update the old policy is the policy itself, and its
    # log-probs come with the gradient's: no second forward pass.
    if cfg.num_iterations * cfg.minibatches > 1:
        batch.old_logp = score_all(run, run.model, batch)
    if run.reference is not None:
        batch.ref_logp = score_all(run, run.reference, batch)

    run.model.train()
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(cfg, step)
    updates = [
        update(run, batch, minibatch, step)
        for iteration in range(cfg.num_iterations)
        for minibatch in minibatches(len(batch), cfg, step, iteration)
    ]
    metrics = {"step": step} | report.of_groups(drawn, run.task) | report.of_updates(updates, STATS)
    seconds = {"seconds_rollout": seconds_rollout, "seconds_update": time.perf_counter() - clock}
    metrics |= {"learning_rate": learning_rate(cfg, step)} | report.of_machine(metrics["tokens"], **seconds)
    return metrics, groups, cursor + len(drawn)


def update(run: Run, batch: Batch, minibatch: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """One optimizer update on these rows of the batch. -> loss, gradient norm, (sum, count) of each of STATS"""
    cfg, model = run.config, run.model
    # The weight of every token is settled here, from all completions of the update on all ranks. So the loss of a
    # micro-batch is a partial sum: partial sums add up to the update's loss however it is split, and their gradients,
    # summed (not averaged) over micro-batches and ranks, to its gradient.
    weights = torch.zeros(batch.mask.shape, dtype=torch.float64, device=run.device)  # (N, T)
    weights[minibatch] = token_weights(
        batch.mask[minibatch], cfg.normalization, max_completion_length=cfg.max_completion_length
    )
    loss, totals = fitting(run, batch, minibatch, lambda: accumulate(run, batch, minibatch, weights))
    ranks.sum_gradients(model)
    ranks.sum_(loss, totals)
    grad_norm = ranks.clip_gradients(model, cfg.max_grad_norm)
    if not (loss.isfinite() and grad_norm.isfinite()):
        ranks.gather(lambda: not_finite(run, batch, step, loss, grad_norm))
    run.optimizer.step()
    run.optimizer.zero_grad()  # the memory is the next rollout's
    return loss, grad_norm, totals


def accumulate(run: Run, batch: Batch, minibatch: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part of the gradient, one micro-batch after another. -> its part of the loss and of the STATS"""
    cfg, model = run.config, run.model
    switches = {name: getattr(cfg, name) for name in LOSS_SWITCHES}
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    totals = torch.zeros(len(STATS), 2, dtype=torch.float64, device=run.device)
    run.optimizer.zero_grad()
    run.pieces.clear()
    for rows in micro_batches(run, batch, minibatch):
        mask = batch.mask[rows]
        logp, entropy = score_rows(run, model, batch, rows, with_entropy=True)
        partial, stats = policy_loss(
            logp,
            pick(batch.old_logp, rows, logp.detach()),
            batch.advantages[rows],
            weights[rows],
            mask,
            ref_logp=pick(batch.ref_logp, rows),
            sampler_logp=batch.sampler_logp[rows],
            **switches,
        )
        if cfg.entropy_coef:
            partial = partial - cfg.entropy_coef * (weights[rows] * entropy).sum()
        partial.backward()

        loss += partial.detach()
        run.pieces.append((rows, partial.detach()))
        stats["entropy"] = entropy.detach().sum(), mask.sum()
        for name, (total, count) in stats.items():
            totals[STATS.index(name)] += torch.stack([total, count])
    return loss, totals


def score_rows(run: Run, model: PreTrainedModel, batch: Batch, rows: Tensor, with_entropy: bool = False):
    """-> logp (B, T), entropy (B, T) or None"""
    cfg = run.config
    with torch.autocast(run.device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        return token_logprobs(
            model,
            batch.ids[rows],
            batch.attention[rows],
            batch.mask[rows],
            temperature=cfg.temperature,
            with_entropy=with_entropy,
            entropy_grad=with_entropy and cfg.entropy_coef != 0.0,
        )


@torch.no_grad()
def score_all(run: Run, model: PreTrainedModel, batch: Batch) -> Tensor:
    """Log-probs of all completions of the step, each computed by one rank and known to all: (N, T)."""
    everything = torch.arange(len(batch))

    def own() -> Tensor:
        logp = torch.zeros_like(batch.sampler_logp)
        for rows in micro_batches(run, batch, everything):
            logp[rows] = score_rows(run, model, batch, rows)[0]
        return logp

    logp = fitting(run, batch, everything, own)
    ranks.sum_(logp)
    return logp


# ---- What the step is made of ----


def sample_groups(run: Run, step: int, cursor: int) -> tuple[list[Group], list[Group]]:
    """Groups to train on, and all that were drawn. With dynamic_sampling (DAPO), groups whose rewards are all equal are
    replaced by further prompts, for so many rounds; every rank sees all rewards and so decides the same."""
    cfg = run.config
    drawn: list[Group] = []
    alive: list[Group] = []
    for _ in range(1 + cfg.dynamic_sampling):
        rows = [run.task.draw(cursor + len(drawn) + i, cfg.seed) for i in range(cfg.prompts_per_step - len(alive))]
        drawn += complete(run, rows, len(drawn), step, cfg.num_generations, run.sampling)
        alive = [group for group in drawn if not (cfg.dynamic_sampling and is_dead(group.rewards))]
        if len(alive) == cfg.prompts_per_step:
            break
    return alive or drawn[: cfg.prompts_per_step], drawn


def complete(run: Run, rows: list[dict], first: int, step: int, n: int, sampling: Sampling) -> list[Group]:
    """n scored completions of each prompt. The ranks share the sampling by completions and the scoring by groups."""
    prompts = [encode_prompt(run.tokenizer, row["prompt"]) for row in rows]
    mine = ranks.share(len(rows) * n, run.rank, run.world)
    streams = [(first + i // n, i % n) for i in mine]
    uniform = uniforms(run.config.seed, step, streams, sampling.max_completion_length)
    with ranks.weights_in(run.model, getattr(torch, run.config.dtype)):
        which = [i // n for i in mine]
        completions = ranks.gather(lambda: rollout(run.model, prompts, which, uniform, sampling, run.show.generating))
    groups = [completions[i : i + n] for i in range(0, len(completions), n)]

    own = ranks.share(len(rows), run.rank, run.world)
    scores = ranks.gather(lambda: score(run.task, [rows[i] for i in own], [groups[i] for i in own], run.tokenizer))
    parts = torch.tensor(scores, dtype=torch.float64)  # (P, n, functions)
    rewards = (parts * torch.tensor(run.task.weights)).nansum(-1).masked_fill(parts.isnan().all(-1), math.nan)  # (P, n)
    return [Group(*group) for group in zip(rows, prompts, groups, rewards, parts, strict=True)]


def fitting(run: Run, batch: Batch, rows: Tensor, compute: Callable[[], Any]) -> Any:
    """`compute` is done again with half the micro-batch whenever memory runs out: any split gives the same sums."""
    while True:
        try:
            return compute()
        except torch.OutOfMemoryError:
            pass  # what it held is free from here on
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        unit = "rows" if run.config.micro_batch_size else "padded tokens"
        if run.config.shard:
            raise UserError(
                f"out of memory with micro-batches of {run.micro_batch} {unit}, and with --shard no rank can go back "
                "without the others: lower --micro_batch_tokens (or --micro_batch_size), or --gradient_checkpointing"
            )
        tried = [piece for piece in micro_batches(run, batch, rows) if len(piece) > 1]
        if not tried:
            raise UserError(
                "out of memory with one completion at a time: try --gradient_checkpointing, "
                "a smaller --max_completion_length, or a GPU with more memory"
            )
        run.micro_batch = max(len(p) * (1 if unit == "rows" else int(batch.attention[p[0]].sum())) for p in tried) // 2
        faults.warn(f"out of memory; going on with micro-batches of up to {run.micro_batch} {unit}")


def learning_rate(cfg: Config, step: int) -> float:
    """Linear warm-up, then the schedule down to 0 after the last step."""
    if step <= cfg.warmup_steps:
        return cfg.learning_rate * step / cfg.warmup_steps
    done = (step - cfg.warmup_steps - 1) / max(1, cfg.steps - cfg.warmup_steps)
    factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    return cfg.learning_rate * factor[cfg.lr_schedule]


def is_dead(rewards: Tensor) -> bool:
    """All equal, or fewer than two: the group does not tell better from worse."""
    rewards = rewards[~rewards.isnan()]
    return len(rewards) < 2 or bool(rewards.min() == rewards.max())


def pick(x: Tensor | None, rows: Tensor, otherwise: Tensor | None = None) -> Tensor | None:
    return otherwise if x is None else x[rows]


def not_finite(run: Run, batch: Batch, step: int, loss: Tensor, grad_norm: Tensor) -> list:
    """The likely cause. The micro-batches that show it (all of them, if only the gradient does) go into a file."""
    bad = [rows for rows, partial in run.pieces if loss.isfinite() or not partial.isfinite()]
    if not bad:
        return []  # another rank has them
    kept = {name: x[torch.cat(bad)] for name, x in vars(batch).items() if x is not None}
    file = checkpoint.save_tensors(Path(run.config.out) / f"not_finite-{run.rank}.safetensors", kept)
    if not loss.isfinite():
        cause = "a reward, a log-prob or a ratio overflowed; check the rewards, or lower --learning_rate"
    else:
        cause = "the backward pass overflowed; lower --learning_rate, or try --dtype float32"
    found = f"loss {float(loss):g}, gradient norm {float(grad_norm):g}"
    raise UserError(f"step {step}: {found}: {cause}. The update was not made; its micro-batch is in {file}")


def seed_everything(seed: int, step: int, rank: int) -> None:
    """Nothing here draws from these; a reward function of yours may. Set anew in each step, they need not be saved."""
    state = int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])
    random.seed(state)
    np.random.seed(state)
    torch.manual_seed(state)


# ---- The run ----


def evaluate(run: Run) -> tuple[dict, list[Group]]:
    """Held-out prompts: greedy accuracy, and pass@k from eval_k samples. The streams are those of step 0 each time, so
    that two evaluations differ by the policy alone."""
    cfg = run.config
    rows = run.task.eval[: cfg.eval_prompts]
    greedy = complete(run, rows, 0, 0, 1, run.greedy)
    sampled = complete(run, rows, 0, 0, cfg.eval_k, run.sampling)
    return report.of_evaluation(greedy, sampled, run.task), sampled


def set_up(cfg: Config, rank: int, world: int, device: torch.device) -> Run:
    task, show, tokenizer, settings, load = ranks.together(lambda: open_task(cfg, rank, world))
    model, reference = load_models(cfg, settings, load, device)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    micro_batch = cfg.micro_batch_size or cfg.micro_batch_tokens
    if cfg.shard and not head_returns_logits(model, torch.zeros(1, 2, dtype=torch.long, device=device)):
        micro_batch = 1  # such a model is called once for each row, which must be as often on every rank
    ends = cfg.max_completion_length, ranks.together(lambda: checkpoint.eos_ids(model, tokenizer))
    sampling = Sampling(*ends, cfg.temperature, cfg.top_k, cfg.top_p, cfg.rollout_tokens)
    greedy = Sampling(*ends, temperature=0.0, tokens_at_once=cfg.rollout_tokens)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=cfg.learning_rate,
        betas=(cfg.adam_beta1, cfg.adam_beta2),
        weight_decay=cfg.weight_decay,
        fused=True,
    )
    policy = task, model, reference, tokenizer, optimizer, sampling, greedy
    return Run(cfg, *policy, show, rank, world, device, micro_batch)


def load_models(
    cfg: Config, settings: PretrainedConfig, load: Callable[[], PreTrainedModel], device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel | None]:
    """-> model and, for a KL term, reference. Sharded, the first rank loads the weights for all."""
    if cfg.shard:
        mesh, dtype = ranks.together(lambda: make_mesh(cfg.shard_size, device)), getattr(torch, cfg.dtype)
        whole = ranks.together(load, of=[0])
        model, *reference = [
            shard(checkpoint.empty_model(settings, cfg), whole, mesh, dtype, device)
            for _ in range(2 if cfg.beta else 1)
        ]
        (model.generation_config,) = ranks.gather(lambda: [whole.generation_config], of=[0])
    else:
        model = ranks.together(load).to(device)
        reference = [copy.deepcopy(model)] if cfg.beta else []
    return model, reference[0].requires_grad_(False).eval() if reference else None


def open_task(cfg: Config, rank: int, world: int) -> tuple:
    """Everything that can be wrong before the weights are loaded, and how to load them."""
    task = load_task(cfg)
    source = cfg.model or task.model
    if callable(source):
        model, tokenizer = source()
        settings, load = model.config, lambda: model
    else:
        settings, tokenizer = checkpoint.open_model(source, cfg)
        load = functools.partial(checkpoint.load_model, source, settings, tokenizer, cfg)
    if cfg.task in BUILT_IN and tokenizer.eos_token_id != EOS_ID:
        raise UserError(f"--model {cfg.model}: --task {cfg.task} is for its own small model, or one trained from it")
    context = getattr(settings.get_text_config(), "max_position_embeddings", None)
    longest = checks.check_prompts(task, tokenizer, context, cfg.max_completion_length)
    show = report.Report(cfg, tokenizer.decode, checks.notes(task, tokenizer) + checks.warnings(cfg), quiet=rank > 0)
    show.say(memory.check(memory.needed(settings, cfg, world, longest), memory.available()))
    return task, show, tokenizer, settings, load


def train(cfg: Config, rank: int, world: int, device: torch.device) -> int:
    """-> exit code"""
    out = Path(cfg.out)
    (done,) = ranks.gather(lambda: [checkpoint.open_run(cfg)], of=[0])
    if done is None:
        if rank == 0:
            print(f"the run in {out}/ is finished")
        return report.finished(out, quiet=rank > 0)
    run = set_up(cfg, rank, world, device)
    # Its fields would leak into every rollout; it goes back into the saved model.
    generation_config, run.model.generation_config = run.model.generation_config, GenerationConfig()
    run.show.plan(run.model, run.task, world, device, done)
    state = {"cursor": 0}
    refreshed = run.reference if cfg.ref_sync_every else None
    if done:
        state = ranks.together(lambda: checkpoint.load(out, done, run.model, refreshed, run.optimizer))
    run.show.keep_until(done)

    if cfg.eval_every and not done:
        seed_everything(cfg.seed, 0, rank)
        run.show.evaluation(0, *evaluate(run))
    signals = caught_signals()
    for step in range(done + 1, cfg.steps + 1):
        metrics, groups, state["cursor"] = training_step(run, step, state["cursor"])
        if cfg.ref_sync_every and step % cfg.ref_sync_every == 0:
            run.reference.load_state_dict(run.model.state_dict())
        if cfg.eval_every and (step % cfg.eval_every == 0 or step == cfg.steps):
            evaluation, completions = evaluate(run)
            run.show.step(metrics | evaluation, groups, completions)
        else:
            run.show.step(metrics, groups)
        stop = max(ranks.gather(lambda: [*signals, 0]))
        if stop or step == cfg.steps or (cfg.save_every and step % cfg.save_every == 0):
            checkpoint.save(out, step, run.model, refreshed, run.optimizer, state, cfg.keep_checkpoints)
        if stop and step < cfg.steps:
            run.show.say(
                f"stopped by {signal.Signals(stop).name} after step {step}; the same command continues the run"
            )
            return 128 + stop
    checkpoint.save_model(out / "model", run.model, run.tokenizer, generation_config)
    return report.finished(out, quiet=rank > 0)


def caught_signals() -> list[int]:
    """Grows by a request to stop: the step in progress is finished first. A second one, later than the copies of the
    first that torchrun sends, ends the process at once."""
    caught: list[int] = []
    times: list[float] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        times.append(time.monotonic())
        if times[-1] - times[0] > 3:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return caught


def main(args: list[str]) -> int:
    cfg = checks.parse(args, torch.cuda.is_available())
    try:
        code = train(cfg, *ranks.start())
        ranks.stop()
        return code
    except faults.FailedElsewhere:
        return faults.fail(2)
    except UserError as mistake:
        return faults.fail(2, f"error: {mistake}")
    except (OSError, torch.OutOfMemoryError) as error:  # a full disk, no permission
        return faults.fail(1, f"error: {error}. What {cfg.out} holds is whole: the same command goes on from there")
    except KeyboardInterrupt:  # before the first step
        return faults.fail(130, "stopped")
    except Exception as error:
        if not faults.is_lost_contact(error):
            return faults.fail(1, traceback.format_exc())
        return faults.fail(1, f"error: {faults.lost_contact(error)}")


if __name__ == "__main__":
    faults.leave(main(sys.argv[1:]))
