"""What a run writes and shows: metrics.jsonl, samples.jsonl, a progress bar or lines of text, and a table at its end.

Every figure covers the whole step on all ranks, except the peak of memory, which covers the run so far. A figure
without a value is null, for instance if no completion was wrong or there is no reference.
"""

import atexit
import functools
import importlib
import json
import math
import resource
import statistics
import sys
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from batch import Batch, Group
from config import Config, UserError
from infra import ranks, run_folder
from loss import kl_divergence
from tasks import columns_of

# ---- Figures ----


def of_groups(groups: list[Group], names: list[str]) -> dict:
    """Figures of all completions of a step. `names` are those of the reward functions."""
    rewards = torch.cat([group.rewards for group in groups])
    parts = torch.cat([group.reward_parts for group in groups])
    completions = [completion for group in groups for completion in group.completions]
    lengths = [completion.length for completion in completions]
    several = [completion for completion in completions if completion.written is not None]  # could have several turns
    right = [ok for group in groups if group.right is not None for ok in group.right.tolist()]
    spreads = [std(group.rewards) for group in groups]
    return {
        "reward": mean(rewards),
        "reward_std": mean(spread for spread in spreads if spread is not None),  # the mean spread within a group
        **{f"reward/{name}": mean(parts[:, i]) for i, name in enumerate(names)},
        "completion_length": mean(lengths),
        "length_correct": mean(n for n, ok in zip(lengths, right) if ok),
        "length_incorrect": mean(n for n, ok in zip(lengths, right) if not ok),
        "truncated": mean(completion.truncated for completion in completions),
        "turns": mean(len(completion.turns) for completion in several),
        "reply_length": mean(len(completion.ids) - completion.length for completion in several),
        "dead_groups": mean(not spread for spread in spreads),
        "rejected_groups": mean(not group.has_signal for group in groups),  # whether or not dynamic sampling is on
        "groups_replaced": sum(group.advantages is None for group in groups),
        "without_reward": int(rewards.isnan().sum()),
        "tokens": sum(lengths),
    }


def of_logged(logged: list[tuple[str, float]]) -> dict[str, float]:
    """The mean of each figure that rewards or `run.log` have logged in this step."""
    return {name: mean(x for other, x in logged if other == name) for name in sorted({name for name, _ in logged})}


def of_updates(updates: list[tuple[Tensor, Tensor, dict[str, Tensor]]]) -> dict:
    """The loss and the gradient norm are means over the updates of a step. All other figures are means over the tokens
    that these updates trained on, or over their completions, or maxima."""
    losses, grad_norms, totals = zip(*updates, strict=True)
    figures, sums = {"loss": mean(map(float, losses)), "grad_norm": mean(map(float, grad_norms))}, {}
    for name, pair in ranks.gather([(name, pair.cpu()) for update in totals for name, pair in update.items()]):
        sums[name] = together(name, sums.get(name, torch.zeros_like(pair)), pair)
    return figures | {name: float(total / count) if count else None for name, (total, count) in sums.items()}


def together(name: str, one: Tensor, other: Tensor) -> Tensor:
    """The (sum, count) of a figure in two parts of a step -> that in both. A maximum stands in the place of a sum if
    the figure's name ends in _max."""
    return torch.maximum(one, other) if name.endswith("_max") else one + other


def of_machine(tokens: int, seconds_rollout: float, seconds_update: float) -> dict:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident
    reserved = [torch.cuda.max_memory_reserved() / 1e9] if on_gpu else []  # there is no such figure on a CPU
    return {
        "seconds_rollout": seconds_rollout,
        "seconds_update": seconds_update,
        "tokens_per_second": tokens / (seconds_rollout + seconds_update),
        "peak_memory_gb": max(ranks.gather([peak])) / 1e9,
        "peak_memory_reserved_gb": max(ranks.gather(reserved), default=None),
    }


def of_evaluation(greedy: list[Group], sampled: list[Group], names: list[str]) -> dict:
    """Each figure is a mean over prompts. The figure named _ci is half the width of its 95 % interval, by the normal
    approximation. Rewards and lengths are those of the greedy completions."""
    n = len(sampled[0].rewards)
    ks = sorted({2**i for i in range(n.bit_length())} | {n})
    parts = torch.cat([group.reward_parts for group in greedy])  # (P, K)
    correct = [int(group.right.sum()) for group in sampled if group.right is not None]
    prompt_values = {
        "accuracy": [float(group.right[0]) for group in greedy if group.right is not None],
        **{f"pass@{k}": [pass_at_k(n, c, k) for c in correct] for k in ks},
        "completion_length": [group.completions[0].length for group in greedy],
        "turns": [len(group.completions[0].turns) for group in greedy if group.completions[0].written is not None],
        "reward": torch.cat([group.rewards for group in greedy]).tolist(),
        **{f"reward/{name}": parts[:, i].tolist() for i, name in enumerate(names)},
    }
    figures = {}
    for name, values in prompt_values.items():
        given = [float(v) for v in values if not math.isnan(v)]
        half = 1.96 * statistics.stdev(given) / math.sqrt(len(given)) if len(given) > 1 else None
        figures |= {f"eval/{name}": mean(given), f"eval/{name}_ci": half}
    return figures


def checksums(step: int, completions: Tensor, rewards: Tensor, advantages: Tensor) -> dict[str, int]:
    """All ranks compute these from the same values. They differ where a fork draws random numbers of its own, reads a
    clock, or keeps something in `run.state` that depends on the rank."""
    given = {"completions": completions, "rewards": rewards, "advantages": advantages}
    return {f"the {name} of step {step}": zlib.crc32(x.cpu().contiguous().numpy()) for name, x in given.items()}


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that k of these n samples, drawn without replacement, include a right one. It is an unbiased estimate
    of the chance for k new samples. 2107.03374"""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean(values: Iterable[float]) -> float | None:
    values = [float(v) for v in values if not math.isnan(v)]
    return sum(values) / len(values) if values else None


def std(values: Iterable[float]) -> float | None:
    values = [float(v) for v in values if not math.isnan(v)]
    return statistics.stdev(values) if len(values) > 1 else None  # of equal values exactly 0


# ---- Files and screen ----


class RunLog:
    """Writes the files of a run and prints to the screen. On all ranks but the first it does neither."""

    def __init__(self, config: Config, decode: Callable[[list[int]], str], reward_names: list[str]):
        self.config, self.decode, self.reward_names = config, decode, reward_names
        self.quiet, self.out = ranks.rank() > 0, Path(config.out)
        self.say_once = functools.cache(self.say)
        self.bar = tqdm(disable=True)

    def plan(self, model: Any, rows: tuple[int, int], device: torch.device, notes: list[str], done: int) -> None:
        """Print what is about to start. `rows` counts the prompts to train on and the held-out ones."""
        cfg, usual = self.config, vars(Config())
        size = sum(p.numel() for p in model.parameters())
        own = [f"{name} {x}" for name, x in vars(cfg).items() if x != usual[name]]
        lines = [f"{cfg.task}: {rows[0]} prompts to train on, {rows[1]} held out; {cfg.model or 'its own model'}"]
        lines += [f"{size:,} parameters; {ranks.world()} rank(s) ({device.type})", ", ".join(own)]
        lines += [f"note: {note}" for note in notes]
        self.say(
            "\n".join([*lines, f"continued after step {done} in {self.out}/" if done else f"started in {self.out}/"])
        )

    def open(self, done: int) -> None:
        """Open the files. Drop lines of steps that will be run again, and a last line that a kill left incomplete."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            lines = [line for line in run_folder.read_lines(self.out / name) if done and line["step"] <= done]
            run_folder.write_text(self.out / name, as_json(lines))
        self.track = open_tracker(self.config) if self.config.report_to else None
        # disable=None shows a bar only in a terminal; miniters=0 lets it be drawn within a step
        self.bar = tqdm(total=self.config.steps, initial=done, file=sys.stdout, disable=None, miniters=0)

    def step(self, metrics: dict, groups: list[Group], evaluated: list[Group]) -> None:
        """Write a line of metrics, some completions of the step, and the first ones of an evaluation."""
        if self.quiet:
            return
        pairs = [("train", group, i) for group in groups for i in range(len(group.rewards))]
        count = self.config.samples_per_step
        if 0 <= count < len(pairs):  # spread evenly over the step
            pairs = [pairs[i * len(pairs) // count] for i in range(count)]
        pairs += [("eval", group, 0) for group in evaluated[:2]]
        append(self.out / "samples.jsonl", [self.sample_line(metrics["step"], *pair) for pair in pairs])
        append(self.out / "metrics.jsonl", [metrics])
        if self.track:
            self.track({name: x for name, x in metrics.items() if x is not None and name != "step"}, metrics["step"])
        if groups:
            self.show_step(metrics)
            # What may keep the run from learning is said the first time that it is so.
            trained_on = sum(any(torch.as_tensor(A).any() for A in group.advantages) for group in groups)
            if 2 * trained_on < self.config.prompts_per_step:
                self.say_once("note: fewer than half of a step's groups are trained on: see rejected_groups")
            if metrics["truncated"] >= 0.9:
                self.say_once("note: nine of ten completions are cut off: see --max_completion_length")
            if metrics["dead_groups"] == 1.0 and metrics["step"] <= 3:
                self.say_once("note: in one of the first steps no reward differs from the others of its group")
        if figures := [f"{name.removeprefix('eval/')} {show(metrics[name])}" for name in held_out(metrics)]:
            self.say(f"step {metrics['step']}, held out: {'  '.join(figures)}")

    def sample_line(self, step: int, kind: str, group: Group, i: int) -> dict:
        completion, A = group.completions[i], None if group.advantages is None else group.advantages[i]
        written = completion.written or [True] * len(completion.ids)
        of_tokens = completion.logp, completion.entropy
        figures = [its and [x if own else None for own, x in zip(written, its)] for its in of_tokens]  # null in replies
        return {
            "step": step,
            "kind": kind,
            "prompt": group.row["prompt"],
            "completion": self.decode(completion.ids),
            "reward": float(group.rewards[i]),
            "rewards": dict(zip(self.reward_names, group.reward_parts[i].tolist(), strict=True)),
            "advantage": A.tolist() if isinstance(A, Tensor) else A,
            "length": completion.length,
            "truncated": completion.truncated,
            "columns": columns_of(group.row),
            "extras": group.extras[i],
            "tokens": self.tokens(completion.ids, *figures),
        }

    def tokens(self, ids: list[int], *figures: list[float | None] | None) -> list[list]:
        """The text of each token with its rounded figures. If several tokens make a character, the last one has it."""
        text, ends, before, done = self.decode(ids), [0], 0, 0  # the first `done` tokens make whole characters
        for t in range(1, len(ids) + 1):
            new = self.decode(ids[before:t])[len(self.decode(ids[before:done])) :]
            before, done, grown = (before, done, 0) if new.endswith("\ufffd") and t - done < 8 else (done, t, len(new))
            ends.append(ends[-1] + grown)
        columns = ends, [*ends[1:-1], None], *(values for values in figures if values is not None)
        return [[text[a:b], *(None if x is None else round(x, 2) for x in row)] for a, b, *row in zip(*columns)]

    def show_step(self, metrics: dict) -> None:
        names = ("reward", "completion_length", "entropy", "tokens_per_second")
        figures = "  ".join(f"{name} {show(metrics[name])}" for name in names)
        self.bar.set_postfix_str(figures, refresh=False)
        self.bar.update()
        if self.bar.disable:
            self.say(f"step {metrics['step']}/{self.config.steps}  {figures}")
        if metrics["step"] == self.config.steps:
            self.bar.close()

    def generating(self, tokens: int, rows: int) -> None:
        self.bar.set_postfix_str(f"token {tokens}, {rows} going on", refresh=False)  # shown a few times a second
        self.bar.update(0)

    def stopped(self, signal_number: int, step: int) -> int:
        """-> exit code"""
        self.say(f"stopped after step {step}; the same command, without --overwrite, goes on from there")
        return 128 + signal_number

    def say(self, line: str) -> None:
        with suppress(OSError):  # the run goes on if nobody reads this any more, or its disk is full
            if not self.quiet:
                tqdm.write(line, file=sys.stdout)  # does not break the line of a bar
                sys.stdout.flush()


def as_json(lines: list[dict]) -> str:
    """JSON has no numbers that are not finite. They become null."""
    valid = [json.loads(json.dumps(line, default=str), parse_constant=lambda name: None) for line in lines]
    return "".join(json.dumps(line) + "\n" for line in valid)


def append(path: Path, lines: list[dict]) -> None:
    with path.open("a") as file:
        file.write(as_json(lines))


def open_tracker(config: Config) -> Callable[[dict[str, float], int], None]:
    """-> a function that reports the figures of a step: by their names, and the step"""
    if config.report_to in ("trackio", "wandb"):  # trackio chooses its folder itself
        folder = {"dir": config.out} if config.report_to == "wandb" else {}
        about = dict(project="grpo", name=Path(config.out).name, config=vars(config), **folder)
        return importlib.import_module(config.report_to).init(**about).log
    writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(config.out)
    atexit.register(writer.close)
    return lambda figures, step: [writer.add_scalar(name, value, step) for name, value in figures.items()]


def not_finite(cfg: Config, step: int, loss: Tensor, grad_norm: Tensor, batch: Batch, logp: Tensor) -> None:
    """Stop the run, and name the first token with a figure that is not finite, or too large for products of it to be.
    All ranks call this, and one of them reports it."""
    old_logp = batch.sampler_logp if cfg.old_policy == "sampler" else batch.old_logp
    ratio = (logp - (logp if old_logp is None else old_logp)).exp()
    kl = kl_divergence(logp, logp if batch.ref_logp is None else batch.ref_logp, cfg.kl_estimator)
    figures = torch.stack([batch.advantages.reshape(len(batch), -1).expand_as(logp), logp, ratio, kl])
    cause = "no advantage, log-prob, ratio or KL is out of range; lower --learning_rate, or try --dtype float32"
    for i, n, t in (~(figures.abs() < 1e30) & batch.mask.bool()).nonzero()[:1].tolist():
        where = f"prompt {batch.prompts[n]}, step {batch.steps[n]}, sample {batch.samples[n]}"
        name, token = ("advantage", "log-prob", "ratio", "KL")[i], t - batch.prompt_lengths[n]
        cause = f"the {name} is {figures[i, n, t]:g} at token {token} of the completion of {where}"
    with ranks.fail_together():
        figures = f"step {step}: loss {float(loss):g}, gradient norm {float(grad_norm):g}; the update was not made"
        raise UserError(f"{figures}: {cause}")


def finished(out: Path, notes: Iterable[str] | None = None) -> int:
    """Print the result of a run from its files: held-out figures and samples, at its beginning and at its end. `notes`
    are given for a run that was finished before. -> exit code"""
    lines = run_folder.read_lines(out / "metrics.jsonl")
    if ranks.rank() > 0 or not lines:
        return 0
    lines = [line for line in lines if held_out(line)] or lines
    ends = lines[:1] + lines[1:][-1:]
    steps, names = [line["step"] for line in ends], held_out(ends[-1])
    with suppress(OSError):
        if notes is not None:
            print(f"the run in {out}/ is finished; only --overwrite starts it over", *notes, sep="\nnote: ")
        print(f"{'held out (± 95 %)' if names else 'trained on':24}", *(f"{f'step {step}':>18}" for step in steps))
        for name in names or ["reward", "completion_length", "entropy"]:
            cells = [show(line.get(name)) + (f" ± {show(line.get(f'{name}_ci'))}" if names else "") for line in ends]
            print(f"{name.removeprefix('eval/'):24}", *(f"{cell:>18}" for cell in cells))
        for line in run_folder.read_lines(out / "samples.jsonl"):
            if line["kind"] == "eval" and line["step"] in steps:
                print(f"\nstep {line['step']}, a sample, reward {show(line['reward'])}: {line['prompt']}")
                print(line["completion"])
        plot, look = (f"python -m tools.{tool} {out}" for tool in ("plot", "look"))
        print(f"\nall of it is in {out}/; its picture: {plot}; look at it: {look}")
    return 0


def held_out(metrics: dict) -> list[str]:
    """The names of the held-out figures that have a value."""
    return [name for name, x in metrics.items() if name.startswith("eval/") and name[-3:] != "_ci" and x is not None]


def show(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"
