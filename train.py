"""A training run. To read the algorithm first, without options, see minimal.py.

    torchrun train.py                                     learns addition, with a small model of this repository
    torchrun --nproc_per_node 8 train.py --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
    python train.py --help                                lists every setting

Read `training_step`, `update` and `accumulate` in this order. Ranks and micro-batches change how a step is computed,
not what is computed: token weights are fixed before the completions are split, and gradients are summed.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from advantage import Group, combine_rewards, has_signal, keep_high_entropy, set_advantages
from batch import Batch, Limits, collate, micro_batches, minibatches, retry_smaller
from config import SETTINGS, Config
from infra import checkpoint, command_line, faults, lora, ranks, report, run_folder
from infra.decoding import decoding
from infra.model import load_run
from infra.server import Server, ask_servers
from infra.shard import sum_between_machines, try_micro_batch
from logprob import token_logprobs
from loss import Each, Mean, Statistic, combine, needs_advantages, policy_loss, token_weights
from rollout import Progress, Sampling, rollout_and_limit, uniforms
from tasks import Task, call_rewards
from tasks._turns import Conversations

# Every setting that has the name of a keyword argument of policy_loss is passed to it. A new one needs no code here.
LOSS_SWITCHES = [name for name in policy_loss.__kwdefaults__ if name in SETTINGS]
# Every run has these statistics.
STATS = "entropy kl clip_low clip_high sampler_gap sampler_gap/first sampler_gap/last off_policy".split()


@dataclass
class Run:
    """Everything that is needed for more than one step. A checkpoint contains the model, the reference if it changes,
    the optimizer, `cursor`, `queue` and `state`. When a run is continued, the other fields are made again from its
    settings."""

    config: Config
    device: torch.device
    task: Task
    tokenizer: Any
    model: PreTrainedModel
    reference: PreTrainedModel | None  # for the KL term; with LoRA, `model` with the adapters of its start
    optimizer: torch.optim.Optimizer
    sampling: Sampling
    limits: Limits  # the size of a micro-batch; `retry_smaller` lowers it
    server: Server | None = None  # where completions are sampled, with --server
    progress: Progress | None = None  # called from time to time in a rollout
    loaded: dict[str, int] = field(default_factory=dict)  # checksums of the rows and of the weights that were loaded
    cursor: int = 0  # the number of prompts drawn so far
    queue: list[tuple] = field(default_factory=list)  # what `finish_sampling` returned for this step, for the next, ...
    state: dict[str, Any] = field(default_factory=dict)  # for your own code; keep it the same on all ranks
    after_last_step: tuple | None = None  # cursor, state and queue; kept by checkpoint.saved_if_it_fails
    logged: list[tuple[str, float]] = field(default_factory=list)  # what `log` got on this rank in this step

    def log(self, name: str, value: float) -> None:
        self.logged.append((name, float(value)))


def training_step(run: Run, step: int) -> tuple[dict, list[Group]]:
    """Do one rollout and all its updates. Return the metrics, and the groups that were trained on."""
    cfg = run.config
    start = time.perf_counter()
    run.logged = []

    # Prompts -> completions -> rewards. queue[d] is for step + d. Without --delay, a step trains on what it samples.
    # With it, a step samples what step + delay trains on, before its own updates.
    while len(run.queue) < cfg.delay:  # in the first step
        for_step = step + len(run.queue)
        wait = start_sampling(run, for_step)
        run.queue.append(finish_sampling(run, for_step, step, wait))
    for_step = step + cfg.delay
    wait = start_sampling(run, for_step)
    during_updates = bool(cfg.server and cfg.delay)  # then a server goes on sampling until the end of the step
    if not during_updates:
        run.queue.append(finish_sampling(run, for_step, step, wait))
    groups, drawn = run.queue.pop(0)  # those to train on, and all that were sampled
    run.after_last_step = None  # from here on, the run is in the middle of a step, and cannot be saved

    # Rewards -> advantages -> tensors. Every rank has those of the whole step.
    set_advantages(groups, run.task.weights, cfg)
    batch = collate(groups, cfg.mask_truncated, run.device)
    ranks.check_same(report.checksums(step, groups, batch))

    updates_start = time.perf_counter()
    retry_smaller(score_before_updates, run, batch)
    updates = []
    for iteration in range(cfg.num_iterations):
        for rows in minibatches(len(batch), cfg.minibatches, seed=(cfg.seed, step, iteration)):
            updates.append(update(run, batch[rows], step))
    seconds_update = time.perf_counter() - updates_start

    if during_updates:
        run.queue.append(finish_sampling(run, for_step, step, wait))
    if run.server:  # it still has the old weights, which the extra rounds of the line above needed
        run.server.is_current = False
    seconds_rollout = time.perf_counter() - start - seconds_update
    return report.metrics_of_step(run, step, groups, drawn, updates, (seconds_rollout, seconds_update)), groups


def start_sampling(run: Run, for_step: int) -> Callable[[], list[Group]]:
    """Start to sample what `for_step` will train on. Return a function that waits for it. All random numbers are those
    of that step, so runs with different delays have the same ones."""
    ranks.seed_everything(run.config.seed, for_step, ranks.rank())  # for rewards and other user code; updates draw none
    rows = pick_rows(run, run.config.prompts_per_step, for_step)
    return start_groups(run, rows, run.config.num_generations, for_step)


def finish_sampling(
    run: Run, for_step: int, sampled_at: int, wait: Callable[[], list[Group]]
) -> tuple[list[Group], list[Group]]:
    """Wait for what `start_sampling` has started, and compute the rewards. Return the groups that `for_step` will train
    on, and all that were sampled for it.

    With dynamic sampling (DAPO), groups without a signal are replaced, in at most cfg.dynamic_sampling further rounds.
    All ranks have all rewards, so they decide alike."""
    cfg = run.config
    groups, drawn = [], []
    for extra_rounds in range(1 + cfg.dynamic_sampling):
        if extra_rounds > 0:
            rows = pick_rows(run, cfg.prompts_per_step - len(groups), for_step)
            wait = start_groups(run, rows, cfg.num_generations, for_step, first=len(drawn))
        sampled = wait()
        add_rewards(run, sampled, steps_done=for_step - 1)  # so a schedule in a reward does not depend on --delay
        drawn += sampled
        groups += [group for group in sampled if group.has_signal or not cfg.dynamic_sampling]
        if len(groups) == cfg.prompts_per_step:  # there may be fewer after the last round
            break
    for group in drawn:
        group.step = sampled_at
    # If no group has a signal, this step has nothing to learn from, but it must have groups.
    return groups or drawn[: cfg.prompts_per_step], drawn


def pick_rows(run: Run, n: int, step: int) -> list[dict]:
    """Choose the next n rows of the task. For a curriculum, change this function, and store its state in run.state.
    In every group, `index` is the position of its row in run.task.train. If you return rows that are not in that list,
    call `encode_prompts` on them first."""
    run.cursor += n
    return run.task.rows_from(run.cursor - n, n, run.config.seed)


def start_groups(
    run: Run, rows: list[dict], n: int, step: int, first: int = 0, **changes: Any
) -> Callable[[], list[Group]]:
    """Start to sample n completions for each row. Return a function that waits for them and returns the groups. Only a
    server samples in the meantime: without one, the completions are there when this function returns.

    Each rank samples its share of the completions, and every rank gets all groups. `changes` replace fields of
    run.sampling. `first` is the position of the first row's prompt in the step, which decides its random numbers."""
    cfg = run.config
    own_samples = [divmod(k, n) for k in ranks.share(len(rows) * n)]  # for each completion: its prompt, and its number
    own_rows = [rows[p] for p, _ in own_samples]
    sampling = replace(run.sampling, **changes)
    conversations = Conversations(run.task, own_rows, run.tokenizer, sampling.eos_ids, max_turns=cfg.max_turns)
    begin = conversations.begin if run.task.reply else None  # begin(i) returns what answers the turns of completion i
    uniform = uniforms(cfg.seed, step, [(first + p, i) for p, i in own_samples], cfg.max_completion_length)
    prompts = [row["prompt_ids"] for row in own_rows]
    if cfg.server:
        wait_for_servers = ask_servers(run, prompts, uniform, sampling, begin)
    else:
        with decoding(run.model, getattr(torch, cfg.sampler_dtype), cfg.decode), ranks.fail_together():
            # The limit of tokens at once is lower than before if memory ran out.
            sampled, run.sampling.tokens_at_once = rollout_and_limit(
                run.model, prompts, uniform, sampling, begin=begin, progress=run.progress
            )

    def wait_for_groups() -> list[Group]:
        mine = wait_for_servers() if cfg.server else sampled  # this rank's
        for i, conversation in conversations.begun.items():
            mine[i].replies, mine[i].state = conversation.replies, conversation.state  # for the rewards
        completions = iter(ranks.gather(mine))  # those of the first prompt, then those of the second, and so on
        return [Group(row["prompt_ids"], row, [*islice(completions, n)], index=row.get("_index")) for row in rows]

    return wait_for_groups


def add_rewards(run: Run, groups: list[Group], steps_done: int) -> None:
    """Set the rewards of every group, and what follows from them. Each rank calls the rewards for its share."""
    cfg, own_groups = run.config, [groups[k] for k in ranks.share(len(groups))]
    with ranks.fail_together():
        results, logged = faults.not_interrupted(call_rewards, run.task, own_groups, run.tokenizer, steps_done)
    groups[0].logged = ranks.gather(logged)  # of all these groups: a call of a reward is for many of them
    for group, (reward_parts, extras) in zip(groups, ranks.gather(results), strict=True):
        group.reward_parts, group.extras = reward_parts, extras  # (G, K)
        group.rewards = combine_rewards(reward_parts[None], run.task.weights)[0]  # (G,)
        group.right = run.task.right(reward_parts)  # (G,)
        group.has_signal = has_signal(group, cfg.mask_truncated, run.task.graded)
        for completion in group.completions:
            completion.state = None  # it may hold objects that cannot be saved


@torch.no_grad()
def score_before_updates(run: Run, batch: Batch) -> None:
    """Compute what stays fixed during the updates of a step, where it is needed: the log-probs of the old policy and of
    the reference, and the entropies that choose the tokens for --top_entropy. Each rank computes a part, and every rank
    gets all of them."""
    cfg, has_reference = run.config, run.reference is not None
    # With a single update, the old log-probs are those that `accumulate` computes.
    needs_old = cfg.num_iterations * cfg.minibatches > 1
    needs_entropy = cfg.top_entropy < 1.0
    if not (needs_old or needs_entropy or has_reference):
        return
    scores = batch.sampler_logp.new_zeros(3, *batch.ids.shape)
    for rows, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world(), same_count=cfg.shard):
        # `+=`, not `=`: with `same_count`, a row may come again, fully masked. Its zeros must not erase its log-probs.
        if needs_old or needs_entropy:
            logp, entropy = logprobs_of(run, run.model, part, with_entropy=needs_entropy)
            scores[0, rows] += logp
            if needs_entropy:
                scores[1, rows] += entropy
        if has_reference:
            with lora.starting_adapters(run.reference):
                scores[2, rows] += logprobs_of(run, run.reference, part)[0]
    ranks.sum_(scores)
    batch.old_logp = scores[0] if needs_old else None
    batch.entropy = scores[1] if needs_entropy else None
    batch.ref_logp = scores[2] if has_reference else None


def update(run: Run, batch: Batch, step: int) -> tuple[Tensor, Tensor, dict[str, Statistic]]:
    """Do one optimizer update. Return the loss, the gradient norm, and this rank's statistics."""
    cfg = run.config
    for params in run.optimizer.param_groups:
        params.setdefault("initial_lr", params["lr"])  # the rate that the optimizer was made with
        params["lr"] = learning_rate(cfg, step, params["initial_lr"])
    # The batch has the completions of all ranks, so the weight of every token is computed before anything is split.
    # Then the loss of a micro-batch is a partial sum: in any split, the partial losses add up to the loss of the
    # update. Their gradients, which are summed over all ranks and not averaged, add up to the gradient of the update.
    batch.weights = token_weights(batch.mask, cfg.normalization, cfg.max_completion_length, batch.prompt_numbers)
    if cfg.top_entropy < 1.0:
        batch.advantages = keep_high_entropy(batch.advantages, batch.entropy, batch.mask, cfg.top_entropy)
    loss, totals = retry_smaller(accumulate, run, batch)
    ranks.sum_gradients(run.model)
    ranks.sum_(loss)
    grad_norm = ranks.clip_gradients(run.model, cfg.max_grad_norm)
    if not (loss.isfinite() and grad_norm.isfinite()):
        what = f"step {step}: loss {loss:g}, gradient norm {grad_norm:g}"
        ranks.fail(f"{what}; the update was not made; is --learning_rate too high?")
    # Without a token to train on, momentum and weight decay must not move the weights. If there are tokens, but all
    # advantages are 0, they may.
    if batch.mask.any():
        run.optimizer.step()
    run.optimizer.zero_grad()  # frees the memory of the gradients for the next rollout
    return loss, grad_norm, totals


def accumulate(run: Run, batch: Batch) -> tuple[Tensor, dict[str, Statistic]]:
    """Add up the gradients of this rank's micro-batches. Return this rank's part of the loss and of the statistics."""
    cfg = run.config
    switches = {name: getattr(cfg, name) for name in LOSS_SWITCHES}
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    # A rank without micro-batches has these statistics, too.
    stats = [dict.fromkeys(STATS, Mean(torch.zeros_like(loss), torch.zeros_like(loss)))]
    run.optimizer.zero_grad()  # there may be gradients of an attempt that ran out of memory
    # A micro-batch whose advantages are all 0 needs no backward pass, if nothing else gives it a gradient. With sharded
    # weights, every rank must take part in every backward pass.
    may_skip = needs_advantages(**switches) and not cfg.shard
    parts = [part for _, part in micro_batches(batch, run.limits, ranks.rank(), ranks.world(), same_count=cfg.shard)]
    for i, part in enumerate(parts):
        needs_backward = not may_skip or bool(part.has_gradient.any())
        with torch.set_grad_enabled(needs_backward):
            # head_ids are the ids that were likeliest at each token, for --score_centering, or None.
            how = dict(with_entropy=True, entropy_grad=cfg.entropy_coef != 0.0, head_ids=part.head_ids)
            logp, entropy, *of_head_ids = logprobs_of(run, run.model, part, **how)
        old_logp = logp.detach() if part.old_logp is None else part.old_logp
        part_loss, part_stats = policy_loss(
            logp,
            old_logp,
            part.advantages,
            part.weights,
            part.mask,
            sampler_logp=part.sampler_logp,  # for statistics, and for the switches that correct for the sampler
            ref_logp=part.ref_logp,
            entropy=entropy,
            head_logp=of_head_ids[0] if of_head_ids else None,
            sampler_head_logp=part.sampler_head_logp,
            **switches,
        )
        if needs_backward:
            sum_between_machines(run.model, i == len(parts) - 1)  # sharded gradients, once an update
            part_loss.backward()

        loss += part_loss.detach()
        # The log of each completion's importance weight, pi_old / pi_sampler, for the effective sample size, `ess`.
        # Completions without a token that is trained on have NaN.
        log_w = ((old_logp - part.sampler_logp).double() * part.mask).sum(1)  # both are finite everywhere
        stats.append(part_stats | {"log_w": Each(log_w.masked_fill(~part.mask.any(1), torch.nan))})
    return loss, combine(stats)


def logprobs_of(run: Run, model: PreTrainedModel, part: Batch, **more: Any) -> tuple[Tensor | None, ...]:
    """Return what `token_logprobs` returns, with the settings of the run: the log-probs, the entropy or None, and with
    head_ids the log-probs of these and of all others together."""
    cfg = run.config
    with torch.autocast(run.device.type, torch.bfloat16, enabled=cfg.dtype == "bfloat16"):
        return token_logprobs(
            model,
            part.ids,
            part.attention,
            part.mask,
            temperature=cfg.temperature,
            kept=part.kept,
            completions_per_row=part.completions_per_row,
            **more,
        )


def learning_rate(cfg: Config, step: int, highest: float) -> float:
    """Return the rate of a step: linear warm-up, then the schedule. `linear` and `cosine` end just above 0."""
    if step <= cfg.warmup_steps:
        return highest * step / cfg.warmup_steps
    # 0 at the first step after the warm-up, and just below 1 at the last step.
    elapsed = (step - cfg.warmup_steps - 1) / max(1, cfg.steps - cfg.warmup_steps)
    factor = {"constant": 1.0, "linear": 1.0 - elapsed, "cosine": (1.0 + math.cos(math.pi * elapsed)) / 2}
    return highest * factor[cfg.lr_schedule]


def evaluate(run: Run, step: int) -> tuple[dict, list[Group]]:
    """Evaluate on held-out prompts, with one greedy completion of each, and eval_k samples for pass@k. Return the
    metrics and the samples. Every evaluation uses the random numbers of step 0, so that evaluations can be compared."""
    cfg = run.config
    ranks.seed_everything(cfg.seed, 0, ranks.rank())
    rows = run.task.rows_of_evaluation(cfg.eval_prompts)
    changes = dict(temperature=cfg.eval_temperature or cfg.temperature, top_p=cfg.eval_top_p or cfg.top_p)
    unrecorded = dict(head=0, keep_set=False)  # only training reads heads and kept sets
    sampled = start_groups(run, rows, cfg.eval_k, step=0, **unrecorded, **changes)()
    add_rewards(run, sampled, steps_done=step)
    greedy = start_groups(run, rows, 1, step=0, **unrecorded, temperature=0.0)()
    add_rewards(run, greedy, steps_done=step)
    metrics = report.metrics_of_evaluation(greedy, sampled, run.task.reward_names)
    if cfg.metrics_by:
        metrics |= report.metrics_of_evaluation_by(cfg.metrics_by, greedy, sampled)
    if len(cfg.eval_data) > 1:
        metrics |= report.metrics_of_evaluation_by("eval_data", greedy, sampled)
    return metrics | report.metrics_of_logged([*sampled, *greedy], "eval/logged/"), sampled


def make_optimizer(model: PreTrainedModel, cfg: Config) -> torch.optim.Optimizer:
    """Return the optimizer of a run. Each update sets its learning rate."""
    adam = dict(betas=(cfg.adam_beta1, cfg.adam_beta2), weight_decay=cfg.weight_decay, fused=True)
    return torch.optim.AdamW(model.parameters(), lr=cfg.learning_rate, **adam)


def set_up(cfg: Config, device: torch.device) -> tuple[Run, report.RunLog, list[str]]:
    """Load everything that a run needs. Return the run, its log, and notes for the user."""
    fields, longest_prompt, notes = load_run(cfg, device)
    server = Server(cfg.server, cfg.server_timeout, bool(cfg.lora_rank)) if cfg.server else None
    run = Run(**fields, optimizer=make_optimizer(fields["model"], cfg), server=server)
    if cfg.shard and cfg.steps:
        try_micro_batch(run, longest_prompt, accumulate)
    # `load_run` has completed the settings, which are in run.config.
    log = report.RunLog(run.config, run.tokenizer.decode, run.task.reward_names)
    run.progress = log.generating
    return run, log, notes


def train(typed: Config) -> int:
    """Do a whole run, or what is left of an interrupted one, or only evaluate if `steps` is 0. Return the exit code.
    `typed` has the settings that the user typed. The others are still to be filled in."""
    cfg = command_line.ready(typed, torch.cuda.is_available())
    cfg = replace(cfg, out=str(Path(cfg.out).expanduser().resolve()))  # a reward may change the working directory
    device, out = ranks.start(cfg.shard), Path(cfg.out)
    start = ranks.on_first(run_folder.claim, cfg)
    if start.is_finished:
        return report.finished(out, already=True)
    run, log, notes = set_up(cfg, device)
    if start.after_step:
        checkpoint.load(out, start.after_step, run)
    # Up to this line, only hidden files of the folder are new. A run that cannot start leaves all others as they were.
    notes += ranks.on_first(run_folder.begin, run.config, typed, start, run.loaded)
    ranks.on_first(log.open, start.after_step)
    evaluated_prompts = len(run.task.rows_of_evaluation(cfg.eval_prompts))
    log.plan(run.model, (len(run.task.train), len(run.task.eval), evaluated_prompts), device, notes, start.after_step)
    stopped_by = take_steps(run, log, start.after_step)
    if stopped_by:
        return 128 + stopped_by  # the exit code of a process that this signal ends
    if cfg.steps:
        checkpoint.save_model(out, cfg.steps, run)
    return report.finished(out)


def take_steps(run: Run, log: report.RunLog, after_step: int) -> int:
    """Take the steps after this one. Evaluate, log and save. Return the number of the signal that has stopped the run
    before its last step, or 0."""
    cfg, stop_requests = run.config, faults.stop_requests()  # a signal handler appends the number of its signal
    has_evaluations = bool(cfg.eval_every and run.task.eval)
    if has_evaluations and not after_step:
        log.before_evaluation()
        eval_metrics, evaluated = evaluate(run, 0)
        log.write({"step": 0} | eval_metrics, [], evaluated)
    for step in range(after_step + 1, cfg.steps + 1):
        with checkpoint.saved_if_it_fails(run, step - 1):
            metrics, groups = training_step(run, step)
        if cfg.ref_sync_every and step % cfg.ref_sync_every == 0:  # it is a copy of the policy, never with LoRA
            run.reference.load_state_dict(run.model.state_dict())
        eval_metrics, evaluated = {}, []
        if has_evaluations and (step % cfg.eval_every == 0 or step == cfg.steps):
            log.before_evaluation()
            # If the evaluation fails, the step is logged without it.
            with checkpoint.saved_if_it_fails(run, step, first=partial(log.write, metrics, groups, [])):
                eval_metrics, evaluated = evaluate(run, step)
        log.write(metrics | eval_metrics, groups, evaluated)
        stop = max(ranks.gather(stop_requests), default=0)
        if stop or step == cfg.steps or (cfg.save_every and step % cfg.save_every == 0):
            checkpoint.save(Path(cfg.out), step, run, cfg.keep_checkpoints)
        if stop and step < cfg.steps:
            report.say(f"stopped after step {step}; the same command, without --overwrite, resumes the run")
            return stop
    return 0


def main(words: list[str]) -> int:
    if {"-h", "--help"} & {*words}:
        return command_line.show_help(torch.cuda.is_available())
    return faults.run_to_the_end(lambda: train(command_line.read(words, torch.cuda.is_available())))


if __name__ == "__main__":
    faults.leave(main(sys.argv[1:]))
