"""What a run writes and shows: metrics.jsonl, samples.jsonl, a line on the screen for each step.

Every metric covers the whole step on all ranks, except the peak of memory, which covers the run so far. A metric
without a value is null, for instance the length of wrong completions if every completion was right.
"""

import atexit
import functools
import importlib
import json
import math
import os
import resource
import shlex
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from advantage import Group
from batch import Batch
from config import Config
from infra import faults, ranks, run_folder
from loss import Statistic, combine
from tasks import columns_of

# ---- Metrics ----


def metrics_of_step(
    run: Any, step: int, groups: list[Group], drawn: list[Group], updates: list, seconds: tuple[float, float]
) -> dict:
    """Compute all metrics of a step. `groups` were trained on, `drawn` are all that were sampled, `updates` is what
    each call of `update` returned, and `seconds` are those of the rollout and of the updates. All ranks must call
    this."""
    metrics = {"step": step, "groups": len(groups), "delay": mean(step - group.step for group in groups)}
    metrics |= metrics_of_groups(drawn, run.task.reward_names) | metrics_of_updates(updates, run.optimizer)
    metrics |= by_column(drawn, run.config.metrics_by, "reward", lambda group: group.rewards)
    metrics |= run.server.take_seconds() if run.server else {}
    metrics |= metrics_of_logged(drawn, "logged/", ranks.gather(run.logged))
    return metrics | metrics_of_machine(metrics["tokens"], *seconds)


def metrics_of_groups(groups: list[Group], names: list[str]) -> dict:
    """Compute the metrics of all completions of a step, including those of groups that dynamic sampling has replaced.
    `names` are the names of the reward functions."""
    rewards = torch.cat([group.rewards for group in groups])
    parts = torch.cat([group.reward_parts for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    lengths = [completion.length for completion in completions]
    # `written` says which tokens the model wrote, and `length` counts these. If the task does not reply, `written` is
    # None: the model wrote all tokens.
    in_turns = [completion for completion in completions if completion.written is not None]
    judged = [group for group in groups if group.right is not None]
    right = [(c.length, ok) for group in judged for c, ok in zip(group.completions, group.right.tolist(), strict=True)]
    spreads = [std(group.rewards) for group in groups]
    return {
        "reward": mean(rewards),
        "reward_std": mean(spread for spread in spreads if spread is not None),  # within a group
        **{f"reward/{name}": mean(parts[:, i]) for i, name in enumerate(names)},
        "completion_length": mean(lengths),
        "length_correct": mean(n for n, ok in right if ok == 1),
        "length_incorrect": mean(n for n, ok in right if ok == 0),
        "truncated": mean(completion.truncated for completion in completions),
        "turns": mean(len(completion.turns) for completion in in_turns),
        "reply_length": mean(len(completion.ids) - completion.length for completion in in_turns),
        "groups_replaced": sum(group.advantages is None for group in groups),
        "equal_rewards": mean(not spread for spread in spreads),  # all rewards are equal, or there is only one
        "without_signal": mean(not group.has_signal for group in groups),
        "without_reward": int(rewards.isnan().sum()),
        "tokens": sum(lengths),
    }


def by_column(groups: list[Group], column: str | None, name: str, values_of: Callable) -> dict[str, float | None]:
    """Average what values_of(group) returns, over the groups with each value of a column, and count the groups."""
    metrics = {}
    for value in sorted({str(group.row[column]) for group in groups} if column else ()):
        with_value = [group for group in groups if str(group.row[column]) == value]
        metrics[f"{name}/{column}={value}"] = mean(x for group in with_value for x in values_of(group))
        metrics[f"{name.rpartition('/')[0]}/groups/{column}={value}".lstrip("/")] = len(with_value)
    return metrics


def metrics_of_evaluation_by(column: str, greedy: list[Group], sampled: list[Group]) -> dict[str, float | None]:
    """Compute the reward, avg@n and the accuracy for each value of a column. Only judged groups are counted."""
    n = len(sampled[0].rewards)
    judged, judged_samples = ([group for group in groups if group.right is not None] for groups in (greedy, sampled))
    metrics = by_column(greedy, column, "eval/reward", lambda group: group.rewards)
    metrics |= by_column(judged_samples, column, f"eval/avg@{n}", lambda group: group.right)
    return metrics | by_column(judged, column, "eval/accuracy", lambda group: group.right)


def metrics_of_logged(
    groups: Iterable[Group], prefix: str, by_code: Sequence[tuple[str, float]] = ()
) -> dict[str, float]:
    """Average each metric over the values that reward functions and, with `run.log`, other code have logged for it."""
    logged = [*(pair for group in groups for pair in group.logged), *by_code]
    names = sorted({name for name, _ in logged})
    return {prefix + name: mean(x for other, x in logged if other == name) for name in names}


def metrics_of_updates(
    updates: list[tuple[Tensor, Tensor, dict[str, Statistic]]], optimizer: torch.optim.Optimizer
) -> dict:
    """Compute the metrics of the updates of a step. Each update is (loss, gradient norm, statistics). The first two are
    the same on all ranks, and are averaged over the updates. The statistics are those of this rank only, and of the
    tokens and completions that it trained on. If the optimizer has several groups of parameters, each has its own
    learning rate."""
    losses, grad_norms, of_rank = zip(*updates, strict=True)
    on_cpu = [{name: type(x)(*(y.cpu() for y in x)) for name, x in stats.items()} for stats in of_rank]
    stats = combine(ranks.gather(on_cpu))
    log_w = stats.pop("log_w").values
    means = {name: float(total / count) if count else None for name, (total, count) in stats.items()}
    means |= metrics_of_weights(log_w)
    rates = [group["lr"] for group in optimizer.param_groups]
    means |= {f"learning_rate/{i}" if i else "learning_rate": rate for i, rate in enumerate(rates)}
    return {"loss": mean(map(float, losses)), "grad_norm": mean(map(float, grad_norms))} | means


def metrics_of_weights(log_w: Tensor) -> dict[str, float | None]:
    """Compute how far the completions are from those of the policy before the step. log_w has log W for each
    completion that is trained on, and NaN for the others, where W is its probability under that policy divided by its
    probability under the sampler. `ess` is the effective sample size, as a share of the completions. 2602.17616"""
    log_w = log_w[~log_w.isnan()]
    if not len(log_w):
        return {"ess": None}
    w = (log_w - log_w.max()).exp()  # a factor changes nothing
    return {"ess": float(w.mean() ** 2 / (w**2).mean())}


def metrics_of_machine(tokens: int, seconds_rollout: float, seconds_update: float) -> dict:
    """Compute the metrics of time and memory. All ranks must call this."""
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    peak = torch.cuda.max_memory_allocated() or resident  # without a GPU, functions of torch.cuda return 0
    return {
        "seconds_rollout": seconds_rollout,
        "seconds_update": seconds_update,
        "tokens_per_second": tokens / (seconds_rollout + seconds_update),
        "peak_memory_gb": max(ranks.gather([peak])) / 1e9,
        "peak_memory_reserved_gb": max(ranks.gather([torch.cuda.max_memory_reserved()])) / 1e9 or None,
    }


def metrics_of_evaluation(greedy: list[Group], sampled: list[Group], names: list[str]) -> dict:
    """Compute the metrics of an evaluation, as means over prompts. A metric that ends in _ci is half the width of a
    95 % confidence interval, by the normal approximation. Accuracy, rewards and lengths come from the greedy
    completions, pass@k and avg@n, the share of right ones, from the n sampled ones."""
    n = len(sampled[0].rewards)
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    # The number of right answers in each group whose samples were all judged.
    counts = [int(group.right.sum()) for group in sampled if group.right is not None and group.right.isfinite().all()]
    prompt_values = {
        "accuracy": [float(group.right[0]) for group in greedy if group.right is not None],
        **{f"pass@{k}": [pass_at_k(n, count, k) for count in counts] for k in ks},
        f"avg@{n}": [count / n for count in counts],
        "completion_length": [group.completions[0].length for group in greedy],
        "turns": [len(group.completions[0].turns) for group in greedy if group.completions[0].written is not None],
        "reward": [float(group.rewards[0]) for group in greedy],
        **{f"reward/{name}": [float(group.reward_parts[0, i]) for group in greedy] for i, name in enumerate(names)},
    }
    metrics = {}
    for name, values in prompt_values.items():
        given = [float(v) for v in values if not math.isnan(v)]
        half = 1.96 * statistics.stdev(given) / math.sqrt(len(given)) if len(given) > 1 else None
        metrics |= {f"eval/{name}": mean(given), f"eval/{name}_ci": half}
    return metrics


def checksums(step: int, groups: list[Group], batch: Batch) -> dict[str, int]:
    """Compute checksums of what all ranks must train on alike. They may differ if you add code whose result depends on
    the rank, for instance because each rank draws its own random numbers, reads its own clock, or has other values in
    `run.state`."""
    rewards = torch.stack([group.reward_parts for group in groups])
    tensors = {"completions": batch.ids, "rewards": rewards, "advantages": batch.advantages}
    return {f"the {name} of step {step}": zlib.crc32(x.cpu().contiguous().numpy()) for name, x in tensors.items()}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of these n samples, drawn without replacement, include a correct one. This is an
    unbiased estimate of the probability that k new samples include one. 2107.03374"""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean(values: Iterable[float]) -> float | None:
    values = [float(v) for v in values if not math.isnan(v)]
    return sum(values) / len(values) if values else None


def std(values: Iterable[float]) -> float | None:
    values = [float(v) for v in values if not math.isnan(v)]
    return statistics.stdev(values) if len(values) > 1 else None  # exactly 0 if all values are equal


# ---- Files and screen ----

TABLE = ["kind", "prompt", "completion", "reward", "advantage", "length", "truncated"]  # of a tracker's samples


class RunLog:
    """Writes the files of a run and prints to the screen, on the first rank only."""

    def __init__(self, config: Config, decode: Callable[[list[int]], str], reward_names: list[str]):
        self.config, self.decode, self.reward_names, self.out = config, decode, reward_names, Path(config.out)
        self.say_once = functools.cache(say)  # says a line only the first time
        self.made = 0  # the last step of which the files had lines when this process started
        self.first = (0, 0.0)  # the step before the first one of this process, and the time at which it was over
        self.is_terminal = sys.stdout.isatty()
        self.doing, self.begun = "", 0  # what is sampled, for the progress line, and how many completions were begun

    def plan(self, model: Any, rows: tuple, device: torch.device, notes: list[str], after_step: int) -> None:
        """Print what is about to start. `rows` is the number of prompts to train on, of held-out ones, and of
        those that are evaluated."""
        defaults = vars(Config())
        train, held_out, self.evaluated = rows
        say(f"{train} prompts to train on, {held_out} held out, of which evaluations use the first {self.evaluated}")
        say(f"{model.num_parameters():,} parameters; {ranks.world()} rank(s) ({device.type})")
        say(", ".join(f"{name} {x}" for name, x in vars(self.config).items() if x != defaults[name]))
        for note in notes:
            say(f"note: {note}")
        again = f"; steps {after_step + 1} to {self.made} are made again" if self.made > after_step else ""
        say(f"{f'continued after step {after_step}' if after_step else 'started'} in {self.out}/{again}")
        self.before_step(after_step + 1)
        self.first = (after_step, time.monotonic())

    def open(self, after_step: int) -> None:
        """Open the files. Remove the lines of steps that will be run again, and an incomplete last line. A run that
        starts from the beginning repeats the evaluation at step 0 as well, so no line stays if `after_step` is 0."""
        for path in (self.out / "metrics.jsonl", self.out / "samples.jsonl"):
            lines = run_folder.read_lines(path)
            self.made = max([self.made, *(line["step"] for line in lines)])
            kept = [line for line in lines if after_step and line["step"] <= after_step]
            run_folder.write_text(path, as_json(kept))
        self.track = open_tracker(self.config, after_step) if self.config.report_to else None

    def write(self, metrics: dict, groups: list[Group], evaluated: list[Group]) -> None:
        """Write and show the metrics, and write some completions of the step and the first ones of an evaluation."""
        if ranks.rank() > 0:
            return
        run_folder.check_lock(self.out)
        step, most = metrics["step"], self.config.samples_per_step
        chosen = [(group, i) for group in groups for i in range(len(group.completions))]
        if 0 <= most < len(chosen):  # spread evenly over the step
            chosen = [chosen[n * len(chosen) // most] for n in range(most)]
        lines = [self.sample_line(step, "train", group, i) for group, i in chosen]
        lines += [self.sample_line(step, "eval", group, 0) for group in evaluated[:2]]
        append(self.out / "samples.jsonl", lines)
        append(self.out / "metrics.jsonl", [metrics])
        if self.track:
            self.track({name: x for name, x in metrics.items() if x is not None and name != "step"}, lines, step)
        if groups:
            names = "reward", "loss", "learning_rate", "completion_length", "truncated", "without_signal", "entropy"
            values = "  ".join(f"{name} {show(metrics[name])}" for name in names)
            say(f"step {step}/{self.config.steps}  {values}  {self.time_of(metrics)}")
            for hint in hints(metrics, groups, self.config):
                self.say_once(f"note: {hint}")
            if seconds_of(metrics) > (limit := faults.seconds_to_stop()):
                longer = "export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600 (from torch 2.12 on)"
                self.say_once(f"note: a step takes longer than torchrun waits after Ctrl-C, {limit:g} s; {longer}")
        else:
            self.first = (step, time.monotonic())  # without the evaluation before the first step
        show_evaluation(metrics)
        self.before_step(step + 1)

    def time_of(self, metrics: dict) -> str:
        """Return how long a step took, and about how long the others will take, with evaluations and checkpoints."""
        first, since = self.first
        each = (time.monotonic() - since) / (metrics["step"] - first)
        left = duration(each * (self.config.steps - metrics["step"]))
        return f"{seconds_of(metrics):.1f} s, {left} left"

    def sample_line(self, step: int, kind: str, group: Group, i: int) -> dict:
        """Describe completion i of a group as a line of samples.jsonl. Each token has its text and its log-prob. The
        log-prob is null in a reply; in an evaluation, it is over the whole vocabulary. A token that is only a part of a
        character has the text U+FFFD."""
        one = group.completions[i]
        written = [True] * len(one.ids) if one.written is None else one.written
        tokens = zip(one.ids, one.logp, written, strict=True)
        return {
            "step": step,
            "kind": kind,
            "prompt": group.row["prompt"],
            "completion": self.decode(one.ids),
            "reward": float(group.rewards[i]),
            "rewards": dict(zip(self.reward_names, group.reward_parts[i].tolist(), strict=True)),
            "advantage": None if group.advantages is None else torch.as_tensor(group.advantages[i]).tolist(),
            "length": one.length,
            "truncated": one.truncated,
            "columns": columns_of(group.row),
            "extras": group.extras[i],
            "tokens": [[self.decode([id]), round(float(x), 2) if by_model else None] for id, x, by_model in tokens],
        }

    def before_step(self, step: int) -> None:
        self.doing, self.begun = f"step {step}", 0

    def before_evaluation(self) -> None:
        """Say how much an evaluation samples, before the first one starts."""
        k, most = self.config.eval_k, self.config.max_completion_length
        n = self.evaluated * (k + 1)
        what = f"{self.evaluated} prompts, for each a greedy completion and {k} samples of at most {most:,} tokens"
        self.say_once(f"an evaluation samples {n:,} completions: {what}")
        self.doing, self.begun = f"evaluation, {len(ranks.share(n)):,} completions", 0

    def generating(self, tokens: int, rows: int) -> None:
        """Show in a terminal that a rollout makes progress. `tokens` is 1, 2, 3 ... on a CPU, and 1, 9, 17 ... on a
        GPU. It begins again for every part of the completions. The next line is longer, so it covers this one."""
        if tokens == 1:
            self.begun += rows  # without those that have ended already
        if tokens % 16 == 1 and self.is_terminal:
            say(f"{self.doing}: token {tokens:5}, {rows:5} unfinished, {self.begun - rows:5} finished", end="\r")


def say(line: str, end: str = "\n") -> None:
    with suppress(OSError, ValueError):  # stdout may be closed, a closed pipe, or on a full disk
        if ranks.rank() == 0:
            print(line, end=end, flush=True)


def as_json(lines: list[dict]) -> str:
    """Write each line as JSON. Numbers that are not finite become null, because JSON does not have them."""
    valid = [json.loads(json.dumps(line, default=str), parse_constant=lambda name: None) for line in lines]
    return "".join(json.dumps(line) + "\n" for line in valid)


def append(path: Path, lines: list[dict]) -> None:
    with path.open("a") as file:
        file.write(as_json(lines))


def open_tracker(config: Config, after_step: int) -> Callable[[dict[str, float], list[dict], int], None]:
    """Return a function that sends the metrics of a step, by name, and its samples to the tracker, with the number of
    the step. A run that goes on is the same run there, too."""
    if config.report_to == "tensorboard":
        first = after_step + 1 if after_step else 0
        summary_writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        writer = summary_writer(config.out, purge_step=first)  # hides what a killed run has written of these steps
        atexit.register(writer.close)
        return lambda metrics, _, step: [writer.add_scalar(name, value, step) for name, value in metrics.items()]

    tracker = importlib.import_module(config.report_to)
    name, run_id = Path(config.out).name, run_folder.config_json(Path(config.out))["run_id"]
    if config.report_to == "wandb":
        its_own = dict(id=run_id, name=name, dir=config.out)
    else:  # trackio knows a run by its name, and chooses its own folder
        its_own = dict(name=f"{name}-{run_id[:8]}")
    project = os.environ.get(f"{config.report_to.upper()}_PROJECT", "grpo")
    run = tracker.init(project=project, resume="allow", config=vars(config), **its_own)

    def track(metrics: dict[str, float], samples: list[dict], step: int) -> None:
        rows = [[as_cell(line[name]) for name in TABLE] for line in samples]
        table = {"samples": tracker.Table(columns=TABLE, data=rows)} if rows else {}
        run.log(metrics | table, step)

    return track


def as_cell(value: Any) -> Any:
    """Return a value for a table of a tracker, which has no lists, such as messages or the advantages of tokens."""
    return json.dumps(value) if isinstance(value, list) else value


def hints(metrics: dict, groups: list[Group], config: Config) -> Iterator[str]:
    """Yield each sign that the run may not be learning."""
    # An advantage is a number, or a tensor with a number for each token.
    has_advantages = any(torch.as_tensor(A).any() for group in groups for A in group.advantages)
    if has_advantages and metrics["grad_norm"] == 0.0:
        yield (
            "there are advantages, but no gradient: every token has probability 1 (--top_k 1? --learning_rate?), "
            "or a gate or a mask drops every completion"
        )
    if metrics["truncated"] >= 0.9:
        yield "nine of ten completions are cut off at the limit; see --max_completion_length"
    if metrics["delay"] and not config.reads_sampler:
        yield "completions of earlier steps are trained on, and nothing corrects for it; see --old_policy, --tis_cap"
    if metrics["step"] <= 3 and metrics["length_correct"] is None and metrics["length_incorrect"] is not None:
        yield f"no completion of this step is right; look at some with {command('look', Path(config.out))}"
    is_flat = metrics["reward"] is None or metrics["reward_std"] == 0.0
    if metrics["step"] <= 3 and is_flat and any(config.reward_weights or [1.0]):
        look = command("look", Path(config.out))
        yield f"in every group of this step, all rewards are equal or missing; look at some with {look}"


def finished(out: Path, already: bool = False) -> int:
    """Say that a run is finished, and return the exit code. If it was finished when this process started, show its
    first and its last evaluation again."""
    if already:
        say(f"the run in {out}/ is finished; only --overwrite starts it over")
        lines = [line for line in run_folder.read_lines(out / "metrics.jsonl") if held_out(line)]
        for line in lines[:1] + lines[1:][-1:]:
            show_evaluation(line)
    say(f"\nfor a plot of the run: {command('plot', out)}; for its completions: {command('look', out)}")
    return 0


def command(tool: str, out: Path) -> str:
    """Return the command that calls a tool for a run, from any folder."""
    return shlex.join(["python", str(Path(__file__).parent.parent / "tools" / f"{tool}.py"), str(out)])


def show_evaluation(metrics: dict) -> None:
    if values := [f"{name.removeprefix('eval/')} {show(metrics[name])}" for name in held_out(metrics)]:
        say(f"step {metrics['step']}, held out: {'  '.join(values)}")


def held_out(metrics: dict) -> list[str]:
    """Return the names of the metrics on held-out prompts that have a value."""
    return [name for name, x in metrics.items() if name.startswith("eval/") and name[-3:] != "_ci" and x is not None]


def seconds_of(metrics: dict) -> float:
    return metrics["seconds_rollout"] + metrics["seconds_update"]


def show(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1e}" if 0 < abs(value) < 0.001 else f"{value:,.3f}"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
