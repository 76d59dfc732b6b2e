"""A grid of switches and seeds, and its table.

    python -m tools.ablate --vary normalization=sequence,global,constant --seeds 1,2,3,4,5 --out runs/normalization
    python -m tools.ablate --vary epsilon_high=0.2,0.28 --seeds 1,2,3 --out runs/clip -- --num_iterations 4
    python -m tools.ablate --vary epsilon_high=0.2,0.28 --seeds 1,2,3 --out runs/clip --figures entropy:last --table

What stands after `--` goes to every run. Each run is `train.py` in a folder of its own, --jobs of them at a time; the
same command again continues what was stopped and repeats nothing. --table makes the table of finished runs and runs
nothing. A figure is a metric of metrics.jsonl: its mean over the second half of the run (`entropy`), over some steps
(`entropy:21-40`), or its last value (`entropy:last`).

The first value of each switch is the one the others are compared with, seed by seed: the mean of the paired
differences, its 95 % interval (Student's t), and whether the interval leaves out 0. With fewer than three seeds nothing
is claimed. One comparison in twenty "differs" by chance alone, so decide before the runs which figure counts.

Left out: values with a comma in them, runs of several processes, the choice of a GPU for each run.
"""

import argparse
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch

from config import Config
from infra import command_line

FIGURES = ("eval/accuracy:last", "eval/pass@1:last", "completion_length", "length_incorrect", "entropy")
ALPHA = 0.05  # the share of differences by chance alone that are taken for real
TRAIN = Path(__file__).parent.parent / "train.py"
Lines = list[dict]  # of a run's metrics.jsonl
Variant = dict[str, str]  # switch: value


# ---- The grid ----


@dataclass
class Run:
    folder: Path
    words: list[str]  # for train.py, without the folder
    config: Config

    @property
    def given(self) -> dict:
        """The settings that stand in the words; with a file of settings, all."""
        names = {word[2:].partition("=")[0].replace("-", "_") for word in self.words if word.startswith("--")}
        names = vars(self.config).keys() - {"out", "overwrite"} if "config" in names else names
        return {name: value for name, value in vars(self.config).items() if name in names}


def grid(vary: list[str]) -> list[Variant]:
    """["a=1,2", "b=3,4"] -> a variant for each combination"""
    switches = [given.partition("=") for given in vary]
    names = [name for name, _, _ in switches]
    return [dict(zip(names, each)) for each in itertools.product(*(values.split(",") for _, _, values in switches))]


def folder_of(out: Path, variant: Variant, seed: str) -> Path:
    """Inside `out` whatever the values are, and no other run's: no value has a comma, and a slash is quoted."""
    return out / f"{quote(','.join(variant.values()), safe=',+:')}-{seed}"


def flags_of(variant: Variant) -> list[str]:
    return [f"--{name}={value}" for name, value in variant.items()]


def runs_of(args: argparse.Namespace) -> list[Run]:
    """Seed after seed, so that what is there early can be compared. What is wrong with any of them ends the program."""
    runs: list[Run] = []
    for seed, variant in itertools.product(args.seeds, args.variants):
        words = [*args.flags, *flags_of(variant), "--seed", seed]
        config = command_line.parse(words, torch.cuda.is_available())
        if any(run.config == config for run in runs):
            sys.exit(f"error: {' '.join([*flags_of(variant), '--seed', seed])}: this run is given twice")
        runs.append(Run(folder_of(args.out, variant, seed), words, config))
    return runs


def check_settings(run: Run, made: dict) -> None:
    """Those that it was made with are those that are given. What was added to the code since then had its default."""
    made = vars(Config()) | made
    for name, meant in run.given.items():
        longer = name == "steps" and made[name] < meant  # the run can go on
        if str(made[name]) != str(meant) and not longer:
            sys.exit(f"error: {run.folder} was made with --{name} {made[name]}, not {meant}")


def read(run: Run) -> tuple[Lines, bool]:
    """-> what it has logged so far, and whether it is finished"""
    if not (run.folder / "config.json").exists():
        return [], False
    made = json.loads((run.folder / "config.json").read_text())["settings"]
    check_settings(run, made)
    log = run.folder / "metrics.jsonl"
    text = log.read_text() if log.exists() else ""
    lines = [json.loads(line) for line in text.split("\n")[:-1]]  # a kill may have torn the last one
    return lines, bool(lines) and lines[-1]["step"] >= run.given.get("steps", made["steps"])


def run_all(args: argparse.Namespace) -> None:
    """What is wrong with any of the runs, or with the table they are for, ends the program before the first one. A run
    that fails stops what has not started; so does a figure that the first run to end does not have."""
    runs = runs_of(args)
    for run in runs:
        for name in args.figures:
            steps = re.search(r"-(\d+)$", name)
            if (name.startswith("eval/") and not run.config.eval_every) or (steps and int(steps[1]) > run.config.steps):
                sys.exit(f"error: {name}: {run.folder} will have no such figure")
    left = iter([run for run in runs if not read(run)[1]])
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run_one, run) for run in itertools.islice(left, args.jobs)}
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for run in [each.result() for each in ended]:
                print(f"done: {run.folder}", flush=True)
                for name in args.figures:
                    figure(finished(run), name)
                running |= {pool.submit(run_one, following) for following in itertools.islice(left, 1)}


def run_one(run: Run) -> Run:
    log = Path(f"{run.folder}.log")
    command = [sys.executable, TRAIN, *run.words, "--out", run.folder]
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=file, env={"OMP_NUM_THREADS": "1"} | os.environ).returncode
    if code:
        shown = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
        reason = [line for line in shown if line.startswith("error: ")] or shown
        sys.exit(f"{reason[-1]}\n{run.folder} ended with {code}; see {log}")
    return run


# ---- Its table ----


def finished(run: Run) -> Lines:
    lines, is_finished = read(run)
    if not is_finished:
        sys.exit(f"error: {run.folder}: not finished, {lines[-1]['step'] if lines else 0} steps are there")
    return lines


def figure(lines: Lines, name: str) -> float:
    """entropy, entropy:21-40 or entropy:last -> its value for a run; NaN where it has none"""
    metric, _, when = name.partition(":")
    if not any(metric in line for line in lines):
        known = dict.fromkeys(name for line in lines for name in line)
        sys.exit(f"error: {name}: no such metric; there are {', '.join(known)}")
    end = lines[-1]["step"]
    first, last = end // 2 + 1, end
    if when == "last":
        first = 0
    elif when:
        first, last = map(int, when.split("-"))
    values = [line[metric] for line in lines if first <= line["step"] <= last and line.get(metric) is not None]
    if not values:
        return math.nan
    return values[-1] if when == "last" else statistics.fmean(values)


def table(args: argparse.Namespace) -> str:
    lines = [finished(run) for run in runs_of(args)]
    of_variants = [lines[i :: len(args.variants)] for i in range(len(args.variants))]
    baseline = ", ".join(args.variants[0].values())
    seeds = f"mean ± std of {len(args.seeds)} seeds"
    rows = [row for name in args.figures for row in paired(name, args.variants, of_variants)]
    return markdown(["figure", *args.variants[0], seeds, f"minus {baseline}, 95 % interval", ""], rows)


def paired(name: str, variants: list[Variant], runs: list[list[Lines]]) -> list[list[str]]:
    """A row for each variant: its mean, its difference from the first one, seed by seed, and what can be said of it."""
    values = [[figure(lines, name) for lines in its] for its in runs]
    digits = decimals(statistics.fmean(values[0]))
    rows = []
    for variant, its in zip(variants, values, strict=True):
        spread = statistics.stdev(its) if len(its) > 1 and all(map(math.isfinite, its)) else math.nan
        row = ["" if rows else name, *variant.values(), f"{statistics.fmean(its):.{digits}f} ± {spread:.{digits}f}"]
        differences = [a - b for a, b in zip(its, values[0], strict=True)]
        mean, half = interval(differences)
        verdict = "**differs**" if abs(mean) > half else "not told from noise"
        verdict = verdict if len(its) > 2 else "too few seeds"
        rows.append([*row, with_interval(differences, digits), verdict] if rows else [*row, "", ""])
    return rows


def interval(differences: list[float]) -> tuple[float, float]:
    """-> mean, half the width of its 95 % interval"""
    n, mean = len(differences), statistics.fmean(differences)
    if n < 2 or not all(map(math.isfinite, differences)):
        return mean, math.inf
    angles, within = student(n - 1)
    t = math.sqrt(n - 1) * math.tan(np.interp(1 - ALPHA, within, angles))
    return mean, t * statistics.stdev(differences) / math.sqrt(n)


def student(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Student's distribution over angles, atan(t / sqrt(df)), where its density is a power of the cosine.
    -> angles from 0 up, and the probability that |t| is within each"""
    angles = np.linspace(0.0, math.pi / 2, 10001)
    density = np.cos(angles) ** (df - 1)
    within = np.cumsum([0.0, *(density[1:] + density[:-1])])
    return angles, within / within[-1]


def with_interval(differences: list[float], digits: int) -> str:
    mean, half = interval(differences)
    if max(abs(mean), half) < 10**-digits:  # all of it would be 0.00
        digits = decimals(max(abs(mean), half))
    return f"{mean:+.{digits}f}, {mean - half:+.{digits}f} to {mean + half:+.{digits}f}"


def decimals(value: float) -> int:
    """Three significant digits, and two decimals at least."""
    return max(2, 2 - math.floor(math.log10(abs(value)))) if math.isfinite(value) and value else 2


def markdown(names: list[str], rows: list[list[str]]) -> str:
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (names, *rows))
    return "\n".join([first, "|" + "---|" * len(names), *others])


# ---- The command line ----


def parse(words: list[str]) -> argparse.Namespace:
    own = list(itertools.takewhile(lambda word: word != "--", words))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vary", action="append", required=True, metavar="SWITCH=A,B", help="may be given repeatedly")
    parser.add_argument("--seeds", default="1,2,3", type=lambda given: given.split(","))
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs at a time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), metavar="FIGURE", help="in the table")
    parser.add_argument("--table", action="store_true", help="the table of finished runs; nothing is run")
    args = parser.parse_args(own)
    args.flags, args.variants = words[len(own) + 1 :], grid(args.vary)
    for name in args.figures:
        if not re.fullmatch(r"[^:]+(:last|:\d+-\d+)?", name):
            parser.error(f"--figures {name}: cannot be read")
    if len(args.variants[0]) < len(args.vary):
        parser.error("--vary: a switch is given twice")
    given = {*args.variants[0], *(word.partition("=")[0].removeprefix("--") for word in args.flags)}
    if given & {"seed", "out", "overwrite"}:
        parser.error("the grid itself gives each run its seed and its folder: leave out seed, out and overwrite")
    return args


def main(words: list[str]) -> None:
    args = parse(words)
    if not args.table:
        run_all(args)
    text = table(args)
    print(text)
    (args.out / "table.md").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
