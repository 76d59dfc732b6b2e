"""Train a grid of settings and seeds, and compare the results in a table.

    python -m tools.ablate --vary normalization=sequence,global,constant --seeds 1,2,3,4,5 --out runs/normalization
    python -m tools.ablate --vary epsilon_high=0.2,0.28 --out runs/clip --figures entropy:last -- --num_iterations 4

Each run is a `train.py` with its own folder. It gets the flags after `--` and its settings of the grid. A setting that
is in both gets its value from the grid. Repeating a command continues the runs that were stopped and does not repeat
finished runs. Runs that were made by other code are used only with --keep.

The table has a row for each metric and variant. It shows the mean of the metric over the second half of a run
(`entropy`), over some steps (`entropy:21-40`), or its last value (`entropy:last`). Every variant is compared with the
first one, seed by seed. The table shows the mean of these differences and its 95 % interval (Student's t). One
comparison in twenty "differs" by chance, so before the runs, choose the metric that will decide. Not supported: values
that contain a comma, runs of several processes, choosing a GPU for each run.
"""

import argparse
import itertools
import math
import os
import re
import subprocess
import sys
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from config import Config
from infra import command_line, run_folder

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
    """Exit if the run in this folder was made with other settings. A run with fewer steps can be continued."""
    too_long = ["steps"] if made.steps > run.config.steps else []
    for name in run_folder.other_settings(made, run.config) + too_long:
        # Only --dtype can be "auto". If it is, any dtype fits: the machine that made the run has chosen it.
        if (wanted := getattr(run.config, name)) != "auto":
            sys.exit(f"error: {run.folder} was made with --{name} {getattr(made, name)}, not {wanted}")


def log_if_finished(run: Run) -> Lines:
    """Return the log of the run if it is finished, otherwise an empty list. Exit if it was made with other settings."""
    try:
        if made := run_folder.settings_of(run.folder):
            check_settings(run, made)
        lines = run_folder.read_lines(run.folder / "metrics.jsonl")
        return lines if lines and lines[-1]["step"] >= run.config.steps else []
    except Exception as error:
        sys.exit(f"error: {run.folder} does not have the files of a run: {error!r}")


def finished(run: Run) -> Lines:
    """Return the log of the run, or exit if it is not finished."""
    return log_if_finished(run) or sys.exit(f"error: {run.folder} is not finished")


def run_all(args: argparse.Namespace) -> None:
    """Check the settings of all runs, and exit if any are wrong. Then make the runs that are not finished. If one
    fails, the others continue."""
    runs = runs_of(args)
    unfinished = [run for run in runs if not log_if_finished(run)]
    for run in runs:
        about = run_folder.content_of(run.folder / "config.json")
        if about and about.get("code") != run_folder.digest_of_code() and not args.keep:
            sys.exit(f"error: {run.folder} was made by other code: give --keep to use it, or another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for run, exit_code in zip(unfinished, pool.map(run_one, unfinished), strict=True):
            print(f"failed: see {run.folder}.log" if exit_code else f"done: {run.folder}", flush=True)


def run_one(run: Run) -> int:
    command = [sys.executable, Path(__file__).parent.parent / "train.py", *run.words, "--out", run.folder]
    with open(f"{run.folder}.log", "w") as log:
        return subprocess.run(command, stdout=log, stderr=log, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode


def figure(lines: Lines, name: str) -> float:
    """Return the value of a figure, such as entropy, entropy:21-40 or entropy:last, in a run. It is NaN if those steps
    have no value."""
    metric, _, when = name.partition(":")
    if not any(metric in line for line in lines):
        sys.exit(f"error: {name}: no such metric; the log has {', '.join(lines[-1])}")
    with_value = [line for line in lines if line.get(metric) is not None]
    if when == "last":
        return with_value[-1][metric] if with_value else math.nan
    first, last = map(int, when.split("-")) if when else (lines[-1]["step"] // 2 + 1, math.inf)
    values = [line[metric] for line in with_value if first <= line["step"] <= last]
    return np.mean(values) if values else math.nan


def table(args: argparse.Namespace) -> str:
    """Return the table in Markdown. Every run must be finished."""
    logs = [finished(run) for run in runs_of(args)]
    # runs_of goes through all variants for each seed, so every len(variants)-th run is of the same variant.
    by_variant = [logs[i :: len(args.variants)] for i in range(len(args.variants))]
    rows = [row for name in args.figures for row in paired(name, args.variants, by_variant)]
    headings = ["metric", *args.variants[0], f"mean ± std of {len(args.seeds)} seeds"]
    if len(args.variants) > 1:
        headings += [f"difference from {', '.join(map(' '.join, args.variants[0].items()))} (95 % interval)", "verdict"]
    # With one variant there is nothing to compare, so the last two cells of each row are left out.
    return markdown(headings, *(row[: len(headings)] for row in rows))


def paired(name: str, variants: list[dict], logs: list[list[Lines]]) -> list[list[str]]:
    """Return a row of the table for each variant: its mean, its difference from the first variant, and a verdict."""
    values = np.array([[figure(lines, name) for lines in variant_logs] for variant_logs in logs])  # (variants, seeds)
    digits, rows = decimals(values[0].mean()), []
    for variant, by_seed, differences in zip(variants, values, values - values[0], strict=True):
        spread = by_seed.std(ddof=1) if len(by_seed) > 1 else math.nan
        mean, half = interval(differences)
        verdict = "too few seeds" if len(by_seed) < 3 else "**differs**" if abs(mean) > half else "no clear difference"
        row = [*variant.values(), f"{by_seed.mean():.{digits}f} ± {spread:.{digits}f}"]
        is_first = variant is variants[0]
        rows.append([name, *row, "", ""] if is_first else ["", *row, with_interval(differences, digits), verdict])
    return rows


def interval(differences: list[float], alpha: float = 0.05) -> tuple[float, float]:
    """Return the mean and half the width of its interval. Both are NaN if a run has no value."""
    n = len(differences)
    if n < 2:
        return differences[0], math.inf
    # Substituting t = sqrt(n - 1) tan(angle) turns Student's density into a power of the cosine, which is easy to sum.
    # The density is symmetric, so P(|T| < t) is its area from 0 to t, divided by its area from 0 to infinity.
    angles, step = np.linspace(0.0, math.pi / 2, 10001, retstep=True)
    within = np.cumsum(np.cos(angles[1:] - step / 2) ** (n - 2))  # the density in the middle of each step
    t = math.sqrt(n - 1) * math.tan(np.interp(1 - alpha, within / within[-1], angles[1:]))
    return np.mean(differences), t * np.std(differences, ddof=1) / math.sqrt(n)


def with_interval(differences: list[float], digits: int) -> str:
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


def main(words: list[str]) -> None:
    args = parse(words)
    run_all(args)
    print(table(args))


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vary", action="append", required=True, metavar="SWITCH=A,B", help="can be repeated")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs at the same time")
    parser.add_argument("--figures", nargs="+", default=FIGURES, metavar="FIGURE", help="rows of the table")
    parser.add_argument("--keep", action="store_true", help="use runs that other code has made")
    args = parse_args_and_flags(parser, words)
    for name in args.figures:  # before the runs, which may take days
        steps = re.fullmatch(r"[^:]+(:last|:(\d+)-(\d+))?", name)
        if not steps or (steps[2] and int(steps[2]) > int(steps[3])):
            parser.error(f"--figures {name}: must be METRIC, METRIC:last or METRIC:FIRST-LAST")
    grid = {name: values.split(",") for name, _, values in (switch.partition("=") for switch in args.vary)}
    if len(grid) < len(args.vary):
        parser.error("--vary names a setting twice")
    args.variants = [dict(zip(grid, values)) for values in itertools.product(*grid.values())]
    return args


def parse_args_and_flags(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Add the options that this tool shares with tools/bench.py, and parse the words before "--". The words after it
    become `flags`."""
    parser.add_argument("--seeds", default="1,2,3", type=lambda text: text.split(","))
    parser.add_argument("--out", type=Path, required=True)
    own = list(itertools.takewhile(lambda word: word != "--", words))
    args = parser.parse_args(own)
    args.flags = words[len(own) + 1 :]
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
