"""Compare this codebase with TRL: what a training step costs, and how fast each of them learns.

    python -m bench.against_trl step --out runs/step               ours, TRL, and TRL with a plain output head
    python -m bench.against_trl step --out runs/long --ways "ours; TRL" --prompt_tokens 150 -- --prompts_per_step 8
    python -m bench.against_trl learn --out runs/learn --seeds 1,2,3 -- --steps 80 --eval_every 5

Install bench/requirements.txt first. What is compared are three ways to train: "ours", "TRL", and "TRL, plain
head", where TRL's tiled output head is replaced by one that computes all logits at once; --ways chooses some of them.
Flags after `--` go to train.py, and TRL gets the same settings where it has them. Every run is a separate process with
its own folder, and runs of the different ways alternate. Repeating a command makes only the runs that are missing. The
table has a row for each metric and way: its mean, its difference from the first way as in tools/ablate.py, and the mean
of the first way divided by the mean of this one.

In `step`, the completions are planned: their tokens are drawn in advance. Our sampler and TRL's do their usual work,
but the logit of the planned token is raised so far that they pick it. So lengths, rewards and gradients are the same
here and in TRL, and the gradient norms are compared to make sure. The first step only warms up and is left out of the
table. In `learn`, each way samples its own completions.
"""

import argparse
import itertools
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rollout
import train
from infra import command_line, report, run_folder
from tasks._prompts import encode_prompts
from tools import ablate

ON_GPU = torch.cuda.is_available()
WAYS = ["ours", "TRL", "TRL, plain head"]
LIKELY = 60.0  # a logit; a higher one would make the other probabilities denormal, and arithmetic on those is slow
STEP = """--model models/smollm2 --task countdown --reward tasks.chain:shortness --eval_every 0 --prompts_per_step 4
    --num_generations 8 --max_completion_length 64 --learning_rate 1e-6 --warmup_steps 0 --steps 3"""
LEARN = "--warmup_steps 0"  # because TRL's warm-up is not the same
# Metrics that must be the same for all ways, each with a relative tolerance. The number of tokens must be equal. The
# gradient norm of the last step may differ a little, because Adam amplifies the rounding errors of earlier steps.
SAME = {"tokens:last": 0.0, "grad_norm:last": 1e-2}
FIGURES = {  # in place of {} goes the number of steps
    "step": [*SAME, "seconds_rollout:2-{}", "seconds_update:2-{}", "seconds_step:2-{}", "peak_memory_gb:last"],
    "learn": ["reward:1-{}", "eval/accuracy:last", "seconds:last", "seconds to target:last"],
}


# ---- One run ----


def measure(args: argparse.Namespace, way: str, folder: Path, words: list[str]) -> None:
    """Train a run, and write its settings and a line of metrics for each step. Evaluations do not count as cost."""
    config = command_line.ready(command_line.parse(words, ON_GPU), ON_GPU)
    run, *_ = train.set_up(config, torch.device("cuda" if ON_GPU else "cpu"))
    lines: list[dict] = []
    clock: list[float] = []  # when the step began, and when each of its rollouts ended

    def timed(original: Callable, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        clock.append(read_clock())
        return result

    def end_step(metrics: dict) -> None:
        start, sampled, end = clock[0], clock[-1], read_clock()
        line = {"step": len(lines) + 1} | {name: metrics[name] for name in ("reward", "grad_norm", "tokens")}
        line |= report.metrics_of_machine(line["tokens"], sampled - start, end - sampled) | {
            "seconds_step": end - start
        }
        line["seconds"] = sum(each["seconds_step"] for each in [*lines, line])  # so far
        if config.eval_every and line["step"] % config.eval_every == 0:
            line |= train.evaluate(run, line["step"])[0]
        lines.append(line)
        clock[:] = [read_clock()]

    wrap(run.model, "generate", timed)  # all ways sample with it
    if way == "ours":
        if args.what == "step":
            force_ours(plan_step(run, args))
        clock.append(read_clock())
        for step in range(1, 1 + config.steps):
            end_step(train.training_step(run, step)[0])
    else:
        from bench import trl_side  # imports TRL, which `ours` does not need

        if args.what == "step":
            wrap(run.model, "generate", partial(trl_side.force, plan_step(run, args), LIKELY))
        trainer = trl_side.trainer_of(run, args.rows, end_step, with_plain_head=way == "TRL, plain head")
        clock.append(read_clock())
        trainer.train()
    on_target = [line["seconds"] for line in lines if line.get("eval/accuracy", 0.0) >= args.target]
    lines[-1]["seconds to target"] = on_target[0] if on_target else None
    folder.mkdir(parents=True, exist_ok=True)
    about = run_folder.provenance() | {"settings": vars(config) | {"trainer": way}}
    (folder / "config.json").write_text(report.as_json([about]))
    run_folder.write_text(folder / "metrics.jsonl", report.as_json(lines))


def wrap(owner: Any, name: str, wrapper: Callable) -> None:
    """Replace the function `owner.name` with a call of `wrapper`, which gets the original function before the arguments
    of the call."""
    setattr(owner, name, partial(wrapper, getattr(owner, name)))


def read_clock() -> float:
    """Return CPU-seconds, which hardly depend on what else the machine does. On a GPU, return seconds."""
    (torch.cuda if ON_GPU else torch.cpu).synchronize()
    return time.perf_counter() if ON_GPU else time.process_time()


# ---- The same step, here and in TRL ----


def plan_step(run: train.Run, args: argparse.Namespace) -> Tensor:
    """Give the run planned prompts. Let its micro-batches have at most as many tokens as TRL's largest one, which is
    args.rows rows of the maximum length. Return the planned completions (N, L). Their lengths are log-normal with a
    median of L / 4, and cut off at L."""
    cfg, tokenizer, rng = run.config, run.tokenizer, np.random.default_rng(0)
    # These words stay one token each when they are joined.
    words = sorted(word for word in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{3,}|[0-9]", word))
    prompts = ["".join(rng.choice(words, args.prompt_tokens)).replace("Ġ", " ") for _ in range(cfg.prompts_per_step)]
    run.task = replace(run.task, train=[{"prompt": prompt} for prompt in prompts])
    encode_prompts(tokenizer, run.task.train)
    n, limit = cfg.prompts_per_step * cfg.num_generations, cfg.max_completion_length
    run.limits = replace(run.limits, rows=None, tokens=args.rows * (args.prompt_tokens + limit))
    ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    tokens = ordinary[rng.integers(len(ordinary), size=(n, limit))]
    lengths = rng.lognormal(np.log(limit / 4), 0.8, (n, 1)).astype(int).clip(min=1)
    tokens[np.arange(limit) == lengths - 1] = tokenizer.eos_token_id
    tokens[np.arange(limit) >= lengths] = tokenizer.pad_token_id
    return torch.as_tensor(tokens, device=run.device)


def force_ours(tokens: Tensor) -> None:
    """Make our sampler pick the planned tokens. `uniforms`, which draws its random numbers, is replaced by a function
    that returns the id of the planned token plus 0.5. `forced` takes this number apart: it raises the logit of the id,
    and gives the sampler 0.5 as its random number."""

    def forced(sample: Callable, logits: Tensor, u: Tensor, *args: Any) -> Any:
        return sample(logits.scatter_(1, u.long()[:, None], LIKELY), u % 1, *args)

    wrap(train, "uniforms", lambda uniforms, *args: tokens.cpu().numpy() + 0.5)
    wrap(rollout, "sample", forced)


# ---- All runs, and what they show ----


def log_of(args: argparse.Namespace, way: str, seed: str) -> Path:
    return args.out / f"{re.sub('[, ]+', '-', way)}-{seed}" / "metrics.jsonl"


def make_missing_runs(args: argparse.Namespace) -> None:
    for seed, way in itertools.product(args.seeds, args.ways):
        log = log_of(args, way, seed)
        if not log.exists():
            # With max_tasks_per_child, Python starts a new process and does not fork this one.
            with ProcessPoolExecutor(max_tasks_per_child=1) as process:
                process.submit(measure, args, way, log.parent, [*args.flags, "--seed", seed]).result()


def table(args: argparse.Namespace) -> str:
    """Return the table in Markdown, without the time to the target if not every run reached it. Exit with an error if
    the ways did not do the same work."""
    logs = [[run_folder.read_lines(log_of(args, way, seed)) for seed in args.seeds] for way in args.ways]
    # `ablate.compared` takes variants as {setting: value}. A way is a variant with one setting, which has no name.
    rows, steps, ways = [], len(logs[0][0]), [{"": way} for way in args.ways]
    for name in (figure.format(steps) for figure in FIGURES[args.what]):
        means = [np.mean([ablate.figure(lines, name) for lines in runs]) for runs in logs]
        if name in SAME:
            np.testing.assert_allclose(means, means[0], SAME[name], err_msg=f"the ways did other work: {name}")
        elif np.isfinite(means).all():
            rows += [[*row, f"{means[0] / mean:.2f}"] for row, mean in zip(ablate.compared([name], ways, logs), means)]
    first = args.ways[0]
    headings = ["metric", "", f"mean ± std of {len(args.seeds)} seeds", f"difference from {first} (95 % interval)"]
    return ablate.markdown([*headings, "verdict", f"{first} divided by this row"], *rows)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "learn"])
    parser.add_argument("--ways", type=lambda text: text.split("; "), default=WAYS, help="separated by '; '")
    parser.add_argument("--rows", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--prompt_tokens", type=int, default=48, help="step: tokens of each prompt")
    parser.add_argument("--target", type=float, default=0.95, help="learn: greedy accuracy on held-out prompts")
    args = ablate.parse_args_and_flags(parser, words)
    args.flags = [*dict(step=STEP, learn=LEARN)[args.what].split(), *args.flags]
    return args


def main(words: list[str]) -> None:
    args = parse(words)
    make_missing_runs(args)
    print(table(args))


if __name__ == "__main__":
    main(sys.argv[1:])
