"""A grid of switches and seeds, and its table.

    python -m tools.ablate --vary normalization=sequence,global,constant --seeds 1,2,3,4,5 --out runs/normalization
    python -m tools.ablate --vary epsilon_high=0.2,0.28 --out runs/clip --figures entropy:last -- --num_iterations 4

Each run is `train.py` in a folder of its own, with what stands after `--` and its place in the grid, which wins.
The same command again continues what was stopped and repeats nothing. A figure is a metric's mean over the second half
of a run (`entropy`), its mean over some steps (`entropy:21-40`), or its last value (`entropy:last`). The others are
compared with the first value of each switch, seed by seed: the mean of the paired differences, and its 95 % interval
(Student's t). One in twenty "differs" by chance alone: decide before the runs which figure counts. Left out: values
with a comma in them, runs of several processes, the choice of a GPU for each run.
"""

import argparse
import itertools
import math
import os
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
Lines = list[dict]  # of a run's metrics.jsonl
Run = namedtuple("Run", "folder words config")  # resolved, but for a dtype of "auto": it may be made elsewhere


def runs_of(args: argparse.Namespace) -> list[Run]:
    """Seed after seed, so that what is there early can be compared. What is wrong with any of them ends the program."""
    runs = []
    for seed, variant in itertools.product(args.seeds, args.variants):
        words = [*args.flags, *(f"--{name}={value}" for name, value in variant.items()), f"--seed={seed}"]
        given = command_line.parse(words, on_gpu=False)
        config = replace(command_line.ready(given, on_gpu=False), dtype=given.dtype)
        name = ",".join(variant.values()).replace("%", "%25").replace("/", "%2F")  # one folder, and no other run's
        runs.append(Run(args.out / f"{name}-{seed}", words, config))
    return runs


def check_settings(run: Run, made: Config) -> None:
    """Those that it was made with are those that are asked for. With fewer steps it can go on."""
    for name in run_folder.other_settings(made, run.config) + ["steps"] * (made.steps > run.config.steps):
        if (meant := getattr(run.config, name)) != "auto":
            sys.exit(f"error: {run.folder} was made with --{name} {getattr(made, name)}, not {meant}")


def finished(run: Run) -> Lines:
    """What it has logged; nothing while it has steps left."""
    if made := run_folder.settings_of(run.folder):
        check_settings(run, made)
    lines = run_folder.read_lines(run.folder / "metrics.jsonl")
    return lines if lines and lines[-1]["step"] >= run.config.steps else []


def run_all(args: argparse.Namespace) -> None:
    """Nothing starts if the settings of any run are wrong. Where one fails, the others go on."""
    left = [run for run in runs_of(args) if not finished(run)]
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        for run, code in zip(left, pool.map(run_one, left), strict=True):
            print(f"failed: see {run.folder}.log" if code else f"done: {run.folder}", flush=True)


def run_one(run: Run) -> int:
    command = [sys.executable, Path(__file__).parent.parent / "train.py", *run.words, "--out", run.folder]
    with open(f"{run.folder}.log", "w") as log:
        return subprocess.run(command, stdout=log, stderr=log, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode


def figure(lines: Lines, name: str) -> float:
    """entropy, entropy:21-40 or entropy:last -> its value for a run; NaN where it has none"""
    metric, _, when = name.partition(":")
    if not any(metric in line for line in lines):
        sys.exit(f"error: {name}: no such metric; there are {', '.join(lines[-1])}")
    first, last = map(int, when.split("-")) if "-" in when else (0 if when else lines[-1]["step"] // 2 + 1, math.inf)
    values = [line[metric] for line in lines if first <= line["step"] <= last and line.get(metric) is not None]
    return np.mean(values[-1:] if when == "last" else values) if values else math.nan


def table(args: argparse.Namespace) -> str:
    lines = [finished(run) or sys.exit(f"error: {run.folder} is not finished") for run in runs_of(args)]
    of_variants = [lines[i :: len(args.variants)] for i in range(len(args.variants))]
    rows = [row for name in args.figures for row in paired(name, args.variants, of_variants)]
    seeds, baseline = f"mean ± std of {len(args.seeds)} seeds", ", ".join(args.variants[0].values())
    return markdown(["figure", *args.variants[0], seeds, f"minus {baseline}, 95 % interval", ""], *rows)


def paired(name: str, variants: list[dict], runs: list[list[Lines]]) -> list[list[str]]:
    """A row for each variant: its mean, its difference from the first one, seed by seed, and what can be said of it."""
    values = np.array([[figure(lines, name) for lines in its] for its in runs])  # (variants, seeds)
    digits, rows = decimals(values[0].mean()), []
    for variant, its, differences in zip(variants, values, values - values[0], strict=True):
        spread = its.std(ddof=1) if len(its) > 1 else math.nan
        row = ["" if rows else name, *variant.values(), f"{its.mean():.{digits}f} ± {spread:.{digits}f}"]
        mean, half = interval(differences)
        told = "too few seeds" if len(its) < 3 else "**differs**" if abs(mean) > half else "not told from noise"
        rows.append([*row, with_interval(differences, digits), told] if rows else [*row, "", ""])
    return rows


def interval(differences: list[float], alpha: float = 0.05) -> tuple[float, float]:
    """-> mean, half the width of its interval; NaN where a run has no value"""
    n = len(differences)
    if n < 2:
        return differences[0], math.inf
    angles = np.linspace(0.0, math.pi / 2, 10001)[1:]  # atan(t / sqrt(n - 1)): Student's density is a cosine's power
    within = np.cumsum(np.cos(angles - angles[0] / 2) ** (n - 2))
    t = math.sqrt(n - 1) * math.tan(np.interp(1 - alpha, within / within[-1], angles))
    return np.mean(differences), t * np.std(differences, ddof=1) / math.sqrt(n)


def with_interval(differences: list[float], digits: int) -> str:
    mean, half = interval(differences)
    if max(abs(mean), half) < 10**-digits:  # all of it would be 0.00
        digits = decimals(max(abs(mean), half))
    return f"{mean:+.{digits}f}, {mean - half:+.{digits}f} to {mean + half:+.{digits}f}"


def decimals(value: float) -> int:
    return max(2, 2 - math.floor(math.log10(abs(value)))) if math.isfinite(value) and value else 2  # three digits


def markdown(*rows: list[str]) -> str:
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in rows)
    return "\n".join([first, "|" + "---|" * len(rows[0]), *others])


def main(words: list[str]) -> None:
    args = parse(words)
    if not args.table:
        run_all(args)
    (args.out / "table.md").write_text(table(args) + "\n")
    print((args.out / "table.md").read_text(), end="")


def parse(words: list[str]) -> argparse.Namespace:
    own = list(itertools.takewhile(lambda word: word != "--", words))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vary", action="append", required=True, metavar="SWITCH=A,B", help="may be given repeatedly")
    parser.add_argument("--seeds", default="1,2,3", type=lambda given: given.split(","))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs at a time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", nargs="+", default=FIGURES, metavar="FIGURE", help="in the table")
    parser.add_argument("--table", action="store_true", help="of finished runs; nothing is run")
    args = parser.parse_args(own)
    names, _, values = zip(*(given.partition("=") for given in args.vary))
    args.variants = [dict(zip(names, each)) for each in itertools.product(*(its.split(",") for its in values))]
    args.flags = words[len(own) + 1 :]
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
