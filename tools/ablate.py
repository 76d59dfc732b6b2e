"""Train a grid of settings and seeds, and compare the results in a table.

    python -m tools.ablate --vary normalization=sequence,global,constant --seeds 1,2,3,4,5 --out runs/normalization
    python -m tools.ablate --vary epsilon_high=0.2,0.28 --out runs/clip --figures entropy:last -- --num_iterations 4

Each run is a `train.py` with its own folder. It gets the flags after `--` and its settings of the grid. A setting that
is in both gets its value from the grid, and a list such as --reward gets the values of both. Repeating a command
continues the runs that were stopped and does not repeat finished runs. Runs that were made by other code, or from other
files, are used only with --keep.

The table has a row for each metric and variant. It shows the mean of the metric over the second half of a run
(`entropy`), over some steps (`entropy:21-40`), its last value (`entropy:last`), or the steps, tokens or seconds until
it first reaches a value (`reward:reaches-0.9`, `reward:reaches-0.9-tokens`). Every variant is compared with the first
one, seed by seed. The table shows the mean of these differences and its 95 % interval (Student's t). Verdicts are
corrected for the number of comparisons (Holm): in 95 % of tables, no row "differs" by chance.

    python -m tools.ablate --vary beta=0,0.1 --tune learning_rate=1e-4,5e-4 --tune_seeds 101,102 --out runs/own

With --tune, each variant gets the value with which the first of --figures is highest, on seeds of their own.

Each GPU makes a run at a time; without a GPU, half as many runs as there are cores are made at once. Of the GPUs, only
those that CUDA_VISIBLE_DEVICES names are used. With `--launch "torchrun --nproc_per_node 4"`, each run has four
processes and as many GPUs. If a run fails, the others go on, and the table leaves out its seed for every variant. Not
supported: values that contain a comma, runs on several machines.
"""

import argparse
import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from config import Config
from infra import command_line, run_folder
from infra.report import duration

FIGURES = ["eval/accuracy:last", "eval/pass@1:last", "completion_length", "length_incorrect", "entropy"]
Lines = list[dict]  # the parsed lines of a metrics.jsonl
Run = namedtuple("Run", "folder words config")  # config has all defaults filled in, except dtype


def runs_of(args: argparse.Namespace) -> list[Run]:
    """Return the runs of the grid, or exit if a setting is wrong in any of them. They are ordered by seed, so that
    runs that can be compared finish together."""
    runs = []
    for seed, variant in itertools.product(args.seeds, args.variants):
        words = [*args.flags, *(f"--{name}={value}" for name, value in variant.items()), f"--seed={seed}"]
        given = command_line.parse(words, on_gpu=False)
        # A dtype "auto" is decided on the machine that makes the run, so the dtype stays as it was given.
        config = replace(command_line.ready(given, on_gpu=False), dtype=given.dtype)
        name = ",".join(variant.values()).replace("%", "%25").replace("/", "%2F")  # unique, and without a "/"
        runs.append(Run(args.out / f"{name}-{config.seed}", words, config))
    if len({run.folder for run in runs}) < len(runs):
        sys.exit("error: --vary and --seeds name a run twice")
    return runs


def check_settings(run: Run, made: Config) -> None:
    """Exit if the run in this folder was made with other settings, or is evaluated otherwise. A run with fewer steps
    can be continued, if its learning rates would be those of a run that is made at once."""
    other = run_folder.other_settings(made, run.config)
    other += run_folder.differing(run_folder.EVALUATION | {"warmup_steps"}, made, run.config)
    if made.steps > run.config.steps or (made.steps < run.config.steps and made.lr_schedule != "constant"):
        other.append("steps")
    for name in other:
        # Only --dtype can be "auto". If it is, any dtype fits: the machine that made the run has chosen it.
        if (wanted := getattr(run.config, name)) != "auto":
            sys.exit(f"error: {run.folder} was made with --{name} {getattr(made, name)}, not {wanted}")


def log_if_finished(run: Run) -> Lines:
    """Return the log of the run if it is finished, otherwise an empty list. Exit if it was made with other settings."""
    if made := run_folder.settings_of(run.folder):
        check_settings(run, run_folder.with_absolute_paths(made))
    lines = run_folder.read_lines(run.folder / "metrics.jsonl")
    return lines if lines and lines[-1]["step"] >= run.config.steps else []


def finished(run: Run) -> Lines:
    """Return the log of the run, or exit if it is not finished."""
    return log_if_finished(run) or sys.exit(f"error: {run.folder} is not finished")


def run_all(args: argparse.Namespace) -> list[Run]:
    """Check the settings of all runs, and exit if any are wrong. Then make the runs that are not finished. Return those
    that failed."""
    runs = runs_of(args)
    unfinished = [run for run in runs if not log_if_finished(run)]
    code = run_folder.digest_of_code()
    for run in runs:
        about = run_folder.config_json(run.folder)
        made_by = about.get("code"), about.get("digests")
        if about and not args.keep and made_by != (code, run_folder.digests(run.config)):
            sys.exit(f"error: {run.folder} was made by other code or files: give --keep to use it, or another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    return make(unfinished, args, len(runs))


def make(unfinished: list[Run], args: argparse.Namespace, total: int) -> list[Run]:
    """Make these runs of the `total` runs of a grid, each at a place that is free. Return those that failed."""
    places, free = places_of(args), SimpleQueue()
    print(f"{total} runs, of which {total - len(unfinished)} are made; {len(places)} at once", flush=True)
    for place in places:
        free.put(place)

    def make_at_a_place(run: Run) -> tuple[bool, float]:
        place, start = free.get(), time.monotonic()
        try:
            is_made = run_one(run, args.launch, place) == 0 and bool(log_if_finished(run))
        finally:
            free.put(place)
        return is_made, time.monotonic() - start

    failed, seconds = [], []
    with ThreadPoolExecutor(len(places)) as pool:
        making = {pool.submit(make_at_a_place, run): run for run in unfinished}
        try:
            for future in as_completed(making):
                (is_made, its_seconds), run = future.result(), making[future]
                seconds.append(its_seconds)
                if not is_made:
                    failed.append(run)
                to_come = len(unfinished) - len(seconds)
                left = duration(np.mean(seconds) * to_come / len(places))
                what = f"{run.folder}: {'done' if is_made else 'failed'}"
                print(f"{what}; {total - to_come} of {total}, {left} left", flush=True)
        except KeyboardInterrupt:  # those that are being made have got it, too
            pool.shutdown(cancel_futures=True)
            raise
    return failed


def places_of(args: argparse.Namespace) -> list[str]:
    """Return a place for each run that can be made at the same time: the GPUs of that run, as CUDA_VISIBLE_DEVICES
    names them, or "" where there are none."""
    count, each = torch.cuda.device_count(), processes(args.launch) if args.launch else 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    gpus = [name.strip() for name in visible.split(",") if name.strip()][:count]
    if not gpus:
        return [""] * (args.jobs or max(1, (os.cpu_count() or 1) // 2 // each))
    if len(gpus) < each:
        sys.exit(f"error: --launch: a run takes {each} GPUs, and there are {len(gpus)}")
    places = [",".join(gpus[i : i + each]) for i in range(0, len(gpus) - each + 1, each)]
    return places[: args.jobs]


def processes(launch: str) -> int:
    """Return how many processes a run has that is started with these words, or 0 if they do not say it."""
    found = re.search(r"--nproc[-_]per[-_]node[= ](\d+)", launch)
    return int(found[1]) if found else 0


def run_one(run: Run, launch: str, gpus: str) -> int:
    program = [*shlex.split(launch), "--standalone"] if launch else [sys.executable]  # with a rendezvous of its own
    command = [*program, Path(__file__).parent.parent / "train.py", *run.words, "--out", run.folder]
    env = {"OMP_NUM_THREADS": "1"} | os.environ | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
    with open(f"{run.folder}.log", "w") as log:
        return subprocess.run(command, stdout=log, stderr=log, env=env).returncode


def with_(args: argparse.Namespace, **changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**vars(args) | changes)


def to_tune(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of the runs with which --tune chooses: every variant with every value."""
    name, values = args.tune
    variants = [variant | {name: value} for variant in args.variants for value in values]
    return with_(args, variants=variants, seeds=args.tune_seeds)


def tuned(args: argparse.Namespace) -> argparse.Namespace:
    """Return the arguments of the comparison, in which every variant has the value that was best for it."""

    def score(variant: dict[str, str]) -> float:
        logs = [log_if_finished(run) for run in runs_of(with_(args, variants=[variant], seeds=args.tune_seeds))]
        mean = np.mean([figure(lines, args.figures[0]) for lines in logs]) if all(logs) else math.nan
        # A value with which a run has failed, or has no figure, is never the best one.
        return -math.inf if math.isnan(mean) else mean

    name, values = args.tune
    best = [max([variant | {name: value} for value in values], key=score) for variant in args.variants]
    return with_(args, variants=best)


def spent(lines: Lines, unit: str) -> dict[int, float]:
    """Return for each step how many steps, tokens or seconds the run had taken at its end."""
    names = {"step": [], "tokens": ["tokens"], "seconds": ["seconds_rollout", "seconds_update"]}[unit]
    totals = itertools.accumulate(sum(line.get(name) or 0.0 for name in names) for line in lines)
    return {line["step"]: total if names else line["step"] for line, total in zip(lines, totals)}


def figure(lines: Lines, name: str) -> float:
    """Return the value of a figure, such as entropy, entropy:21-40, entropy:last or entropy:reaches-0.1, in a run. It
    is NaN if those steps have no value, or the value is never reached."""
    metric, _, when = name.partition(":")
    if not any(metric in line for line in lines):
        sys.exit(f"error: {name}: no such metric; the log has {', '.join(lines[-1])}")
    with_value = [line for line in lines if line.get(metric) is not None]
    if when == "last":
        return with_value[-1][metric] if with_value else math.nan
    if when.startswith("reaches-"):
        _, threshold, *unit = when.split("-")
        reached = [line["step"] for line in with_value if line[metric] >= float(threshold)]
        return spent(lines, *(unit or ["step"]))[reached[0]] if reached else math.nan
    first, last = map(int, when.split("-")) if when else (lines[-1]["step"] // 2 + 1, math.inf)
    values = [line[metric] for line in with_value if first <= line["step"] <= last]
    return np.mean(values) if values else math.nan


def table(args: argparse.Namespace) -> str:
    """Return the table in Markdown. Every run must be finished."""
    logs = [finished(run) for run in runs_of(args)]
    # runs_of goes through all variants for each seed, so every len(variants)-th run is of the same variant.
    by_variant = [logs[i :: len(args.variants)] for i in range(len(args.variants))]
    figures = args.figures
    if figures is FIGURES and "eval/accuracy" not in logs[0][-1]:  # without --figures, if runs are not evaluated
        figures = ["reward", *(name for name in FIGURES if not name.startswith("eval/"))]
    rows = compared(figures, args.variants, by_variant)
    first = ", ".join(map(" ".join, args.variants[0].items()))
    headings = ["metric", *args.variants[0], f"mean ± std of {len(args.seeds)} seeds"]
    return markdown([*headings, f"difference from {first} (95 % interval)", "verdict"], *rows)


def compared(figures: list[str], variants: list[dict], logs: list[list[Lines]]) -> list[list[str]]:
    """Return a row of the table for each figure and variant: its mean, its difference from the first variant, and a
    verdict."""
    rows, differences_of = [], {}  # a row's number -> its differences, one for each seed
    for name in figures:
        values = np.array([[figure(lines, name) for lines in variant_logs] for variant_logs in logs])
        digits = decimals(values[0].mean())
        for variant, by_seed, differences in zip(variants, values, values - values[0], strict=True):
            spread = by_seed.std(ddof=1) if len(by_seed) > 1 else math.nan
            row = [*variant.values(), f"{by_seed.mean():.{digits}f} ± {spread:.{digits}f}"]
            if variant is variants[0]:
                rows.append([name, *row, "", ""])
            else:
                differences_of[len(rows)] = differences
                verdict = "too few seeds" if len(by_seed) < 3 else "no clear difference"
                rows.append(["", *row, with_interval(differences, digits), verdict])
    for i in clear(differences_of):
        rows[i][-1] = "**differs**"
    return rows


def clear(differences_of: dict[Any, Sequence[float]]) -> set:
    """Return which of these comparisons are clear. By Holm's method, the smallest p is compared with 0.05 / m for m
    comparisons, the next with 0.05 / (m - 1), and so on, until one is larger."""
    p = {comparison: p_value(differences) for comparison, differences in differences_of.items()}
    found = set()
    for n, comparison in enumerate(sorted(p, key=p.get)):
        if p[comparison] > 0.05 / (len(p) - n):
            break
        found.add(comparison)
    return found


def student(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return angles, and for each the probability that |T| of n numbers is below sqrt(n - 1) tan(angle)."""
    # Substituting t = sqrt(n - 1) tan(angle) turns Student's density into a power of the cosine, which is easy to sum.
    # The density is symmetric, so P(|T| < t) is its area from 0 to t, divided by its area from 0 to infinity.
    angles, step = np.linspace(0.0, math.pi / 2, 10001, retstep=True)
    within = np.cumsum(np.cos(angles[1:] - step / 2) ** (n - 2))  # the density in the middle of each step
    return angles[1:], within / within[-1]


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the mean and half the width of its 95 % interval. Both are NaN if a run has no value."""
    n = len(differences)
    if n < 2:
        return differences[0], math.inf
    angles, within = student(n)
    t = math.sqrt(n - 1) * math.tan(np.interp(0.95, within, angles))
    return np.mean(differences), t * np.std(differences, ddof=1) / math.sqrt(n)


def p_value(differences: Sequence[float]) -> float:
    """Return the probability of a mean at least as far from 0 by chance. It is 1 with fewer than three differences, or
    if a run has no value."""
    n, mean, spread = len(differences), abs(np.mean(differences)), np.std(differences)
    if n < 3 or not mean > 0.0:
        return 1.0
    return 1.0 - float(np.interp(math.atan2(mean, spread), *student(n)))


def with_interval(differences: Sequence[float], digits: int) -> str:
    mean, half = interval(differences)
    if max(abs(mean), half) < 10**-digits:  # these numbers would all be shown as about 0.00
        digits = decimals(max(abs(mean), half))
    return f"{mean:+.{digits}f} ({mean - half:+.{digits}f} to {mean + half:+.{digits}f})"


def decimals(value: float) -> int:
    """Return how many decimals show three significant digits, but at least 2."""
    return max(2, 2 - math.floor(math.log10(abs(value)))) if math.isfinite(value) and value else 2


def markdown(*rows: list[str]) -> str:
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in rows)
    return "\n".join([first, "|" + "---|" * len(rows[0]), *others])


def main(words: list[str]) -> int:
    args, failed = parse(words), []
    if args.tune:
        failed = run_all(to_tune(args))
        args = tuned(args)
    failed += run_all(args)
    failed_seeds = {run.config.seed for run in failed}
    args.seeds = [seed for seed in args.seeds if int(seed) not in failed_seeds]  # every variant has the same ones
    if args.seeds:
        print(table(args))
    for run in failed:
        print(f"failed, so its seed is left out: {run.folder}, see {run.folder}.log")
    return 1 if failed else 0


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    switch = dict(type=name_and_values, metavar="SWITCH=A,B")
    parser.add_argument("--vary", action="append", required=True, help="can be repeated", **switch)
    parser.add_argument("--jobs", type=int, help="at most so many runs at the same time")
    parser.add_argument("--launch", default="", metavar="WORDS", help='e.g. "torchrun --nproc_per_node 4"')
    parser.add_argument("--figures", nargs="+", default=FIGURES, metavar="FIGURE", help="rows of the table")
    parser.add_argument("--keep", action="store_true", help="use runs that other code has made")
    parser.add_argument("--tune", help="choose a value for each variant first", **switch)
    parser.add_argument("--tune_seeds", default="101,102", type=lambda text: text.split(","), help="default: 101,102")
    args = parse_args_and_flags(parser, words)
    for name in args.figures:  # before the runs, which may take days
        if not re.fullmatch(r"[^:]+(:last|:\d+-\d+|:reaches-[\d.]+(-tokens|-seconds)?)?", name):
            parser.error(f"--figures {name}: must be METRIC, METRIC:last, METRIC:FIRST-LAST or METRIC:reaches-0.9")
    if args.tune and (":reaches-" in args.figures[0] or {*args.tune_seeds} & {*args.seeds}):  # the highest is slowest
        parser.error("--tune needs --tune_seeds others than --seeds, and a first figure whose highest value is best")
    if args.launch and not (shutil.which(args.launch.split()[0]) and processes(args.launch)):
        parser.error(f"--launch {args.launch}: must be torchrun, with --nproc_per_node and a number")
    grid = dict(args.vary)
    if len(grid) < len(args.vary):
        parser.error("--vary names a setting twice")
    if "seed" in grid or "out" in grid:
        parser.error("--vary seed, --vary out: give --seeds and --out")
    args.variants = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    return args


def name_and_values(switch: str) -> tuple[str, list[str]]:
    name, _, values = switch.partition("=")
    return name, values.split(",")


def parse_args_and_flags(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Add the options that this tool shares with bench/against_trl.py, and parse the words before "--". The words
    after it become `flags`."""
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, required=True)
    own = list(itertools.takewhile(lambda word: word != "--", words))
    args = parser.parse_args(own)
    args.flags = words[len(own) + 1 :]
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
