"""A grid of switches and seeds, and its table.

    python -m tools.ablate --vary normalization=sequence,global,constant --seeds 1,2,3,4,5 --out runs/normalization
    python -m tools.ablate --vary epsilon_high=0.2,0.28 --seeds 1,2,3 --out runs/clip -- --num_iterations 4
    python -m tools.ablate --vary epsilon_high=0.2,0.28 --seeds 1,2,3 --out runs/clip --figures entropy:last --table
    python -m tools.ablate --vary algorithm=grpo,dapo --tune learning_rate=1e-4,2e-4,4e-4 --tune_seeds 101,102 \
        --decides eval/pass@1:last --seeds 1,2,3,4,5,6,7,8 --out runs/tuned

What stands after `--` goes to every run. Each run is `train.py` in a folder of its own, --jobs of them at a time; the
same command again continues what was stopped and repeats nothing. --table makes the table of finished runs and runs
nothing. A figure is a metric of metrics.jsonl: its mean over the second half of the run (`entropy`), over some steps
(`entropy:21-40`), or its last value (`entropy:last`).

The first value of each switch is the one the others are compared with, seed by seed: the mean of the paired
differences, its 95 % interval (Student's t), and whether the interval leaves out 0. With less than three seeds nothing
is claimed. One comparison in twenty "differs" by chance alone, so decide before the runs which figure counts.

With --decides that figure alone is compared, in a table of one line a variant; what differs is what holds when all
comparisons of the table are taken together (Holm's correction); the other figures describe. With --tune each variant
first gets the value that is best in it, on seeds that are not reported.

Left out: values with a comma in them, runs of several processes, the choice of a GPU for each run.
"""

import argparse
import functools
import itertools
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import train
from config import Config
from infra import command_line

FIGURES = ("eval/accuracy:last", "eval/pass@1:last", "completion_length", "length_incorrect", "entropy")
# Student's t at 97.5 %, for 1, 2, 3 ... degrees of freedom
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
RESULTS = Path(__file__).parent.parent / "results"
Lines = list[dict]  # of a run's metrics.jsonl
Variant = dict[str, str]  # switch: value


# ---- The grid ----


def grid(vary: list[str]) -> list[Variant]:
    """["a=1,2", "b=3,4"] -> a variant for each combination"""
    switches = [(name, values.split(",")) for name, _, values in (v.partition("=") for v in vary)]
    names = [name for name, _ in switches]
    return [dict(zip(names, values)) for values in itertools.product(*(values for _, values in switches))]


def folder_of(out: Path, variant: Variant, seed: str) -> Path:
    """Inside `out`, whatever the values are."""
    return out / "-".join([*variant.values(), seed]).replace("/", "_")


def flags_of(variant: Variant) -> list[str]:
    return [word for name, value in variant.items() for word in (f"--{name}", value)]


def words_of(out: Path, variant: Variant, seed: str, flags: list[str]) -> list[str]:
    return [*flags, *flags_of(variant), "--seed", seed, "--out", str(folder_of(out, variant, seed))]


def check_grid(args: argparse.Namespace) -> None:
    """What is wrong with any of the runs, or with the table they are for, ends the program before the first one."""
    for variant, seed in itertools.product(args.trials, [*args.tune_seeds, *args.seeds]):
        config = command_line.parse(words_of(args.out, variant, seed, args.flags), torch.cuda.is_available())
        for name in args.figures:
            steps = re.search(r":(\d+)-", name)
            if (name.startswith("eval/") and not config.eval_every) or (steps and int(steps[1]) > config.steps):
                sys.exit(f"error: --figures {name}: {folder_of(args.out, variant, seed)} will have no such figure")


def run_all(args: argparse.Namespace, variants: list[Variant], seeds: list[str]) -> None:
    """Seed after seed, so that what is there early can be compared. The first failure stops what has not started; so
    does a figure that the first run to end does not have."""
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")  # a worker imports once, for all its runs
    with ProcessPoolExecutor(args.jobs, spawn, initializer=torch.set_num_threads, initargs=[1]) as pool:
        runs = [
            pool.submit(run_one, folder_of(args.out, variant, seed), words_of(args.out, variant, seed, args.flags))
            for seed, variant in itertools.product(seeds, variants)
            if folder_of(args.out, variant, seed).name not in kept(args.out.name)
        ]
        spent = 0.0
        try:
            for done, finished in enumerate(as_completed(runs), 1):
                folder, seconds = finished.result()
                spent += seconds
                hours = spent / done * len(runs) / 3600
                print(f"{done} of {len(runs)} done: {folder} ({hours:.2f} CPU-hours in all)", flush=True)
                for name in args.figures:
                    figure(read_run(folder), name)
        except BrokenProcessPool:
            sys.exit(f"error: a run ended its process; the newest .log in {args.out} says why")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run_one(folder: Path, words: list[str]) -> tuple[Path, float]:
    """-> the run's folder and its CPU-seconds"""
    start = time.process_time()
    with open(f"{folder}.log", "w") as log, redirect_stdout(log), redirect_stderr(log):
        code = train.main(words)
    if code:
        shown = Path(f"{folder}.log").read_text(errors="replace").strip().splitlines()
        reason = [line for line in shown if line.startswith("error: ")] or shown or ["it said nothing"]
        sys.exit(f"{reason[-1]}\n{folder} ended with {code}; see {folder}.log")
    return folder, time.process_time() - start


def tuned(args: argparse.Namespace) -> list[Variant]:
    """Each variant with the value of --tune that is best in the figure that decides, over the seeds of --tune_seeds."""
    if not args.tune:
        return args.variants
    best = []
    for variant in args.variants:
        of_value = [variant | value for value in grid([args.tune])]
        runs = read_runs(args.out, of_value, args.tune_seeds)
        scores = [statistics.fmean(figure(lines, args.decides) for lines in its) for its in runs]
        best.append(of_value[scores.index(max(scores))])
    return best


# ---- Its table ----


def read_runs(out: Path, variants: list[Variant], seeds: list[str]) -> list[list[Lines]]:
    """For each variant its runs, in the order of the seeds."""
    return [[read_run(folder_of(out, variant, seed)) for seed in seeds] for variant in variants]


def read_run(folder: Path) -> Lines:
    """From its folder or, if it is kept, from results/."""
    return kept(folder.parent.name).get(folder.name) or finished(folder)


def finished(folder: Path) -> Lines:
    if not (folder / "metrics.jsonl").exists():
        sys.exit(f"{folder}: there is no such run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = json.loads((folder / "config.json").read_text())["settings"]["steps"]
    if not lines or lines[-1]["step"] < steps:
        sys.exit(f"{folder}: not finished, {lines[-1]['step'] if lines else 0} of {steps} steps")
    return lines


def figure(lines: Lines, name: str) -> float:
    """entropy, entropy:21-40 or entropy:last -> its value for a run; NaN where it has none"""
    metric, _, when = name.partition(":")
    if not any(metric in line for line in lines):
        known = dict.fromkeys(name for line in lines for name in line)
        sys.exit(f"--figures {name}: no such metric; there are {', '.join(known)}")
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


def table(variants: list[Variant], runs: list[list[Lines]], figures: list[str]) -> str:
    """In Markdown, a row for each figure and variant."""
    first = ", ".join(variants[0].values())
    rows = [
        f"| figure | {', '.join(variants[0])} | mean ± std of {len(runs[0])} seeds | minus {first}, 95 % interval | |",
        "|---|---|---|---|---|",
    ]
    for name in figures:
        values = [[figure(lines, name) for lines in its] for its in runs]
        digits = decimals(statistics.fmean(values[0]))
        for variant, its in zip(variants, values):
            of_first = its is values[0]
            cells = [name if of_first else "", ", ".join(variant.values())]
            cells.append(f"{statistics.fmean(its):.{digits}f} ± {spread(its):.{digits}f}")
            cells += ["", ""] if of_first else compared(its, values[0], digits)
            rows.append(f"| {' | '.join(cells)} |".replace("|  ", "| "))
    return "\n".join(rows)


@dataclass
class Comparison:
    """With the first variant, in the figure that decides."""

    variant: Variant
    values: list[float]  # one for each seed
    differences: list[float]  # paired
    holds: bool  # when all comparisons of the table are taken together


def comparisons(variants: list[Variant], runs: list[list[Lines]], decides: str) -> list[Comparison]:
    values = [[figure(lines, decides) for lines in its] for its in runs]
    differences = [[a - b for a, b in zip(its, values[0], strict=True)] for its in values]
    holds = [False, *holm([p_value(each) for each in differences[1:]])]
    return [Comparison(*each) for each in zip(variants, values, differences, holds, strict=True)]


def wide_table(variants: list[Variant], runs: list[list[Lines]], figures: list[str]) -> str:
    """In Markdown, a row for each variant. The first figure decides."""
    decides, *others = figures
    first, *_ = compared_all = comparisons(variants, runs, decides)
    digits = decimals(statistics.fmean(first.values))
    names = [
        *variants[0],
        f"{decides}, {len(first.values)} seeds",
        f"minus {', '.join(variants[0].values())}, 95 % interval",
    ]
    names += ["", "worst", *others]
    rows = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for its, lines_of_seeds in zip(compared_all, runs):
        cells = [*its.variant.values(), f"{statistics.fmean(its.values):.{digits}f} ± {spread(its.values):.{digits}f}"]
        cells.append("" if its is first else compared(its.values, first.values, digits)[0])
        cells += ["**holds**" if its.holds else "", f"{min(its.values):.{digits}f}"]
        for name in others:
            described = statistics.fmean(figure(lines, name) for lines in lines_of_seeds)
            cells.append(f"{described:.{decimals(described)}f}")
        rows.append(f"| {' | '.join(cells)} |".replace("|  ", "| "))
    return "\n".join(rows)


def table_of(args: argparse.Namespace) -> str:
    variants = tuned(args)
    return (wide_table if args.decides else table)(variants, read_runs(args.out, variants, args.seeds), args.figures)


def compared(values: list[float], with_: list[float], digits: int) -> list[str]:
    """-> the paired difference with its interval, and what it says"""
    mean, half = interval([a - b for a, b in zip(values, with_, strict=True)])
    differs = mean - half > 0 or mean + half < 0
    verdict = "**differs**" if differs else "not told from noise"
    if len(values) < 3:
        verdict = "too few seeds"
    if max(abs(mean), half) < 10**-digits:  # all of it would be 0.00
        digits = decimals(max(abs(mean), half))
    return [f"{mean:+.{digits}f}, {mean - half:+.{digits}f} to {mean + half:+.{digits}f}", verdict]


def interval(differences: list[float]) -> tuple[float, float]:
    """-> mean, half the width of its 95 % interval"""
    n = len(differences)
    if n < 2 or any(map(math.isnan, differences)):
        return statistics.fmean(differences), math.inf
    return statistics.fmean(differences), T[min(n - 2, len(T) - 1)] * statistics.stdev(differences) / math.sqrt(n)


def p_value(differences: list[float]) -> float:
    """Of the paired t-test, two-sided: the share of Student's density beyond t, as an integral over angles."""
    n, mean = len(differences), statistics.fmean(differences)
    if n < 3 or math.isnan(mean):
        return 1.0  # nothing is claimed
    angle = math.atan2(abs(mean) * math.sqrt(n), statistics.stdev(differences) * math.sqrt(n - 1))  # atan(t / sqrt df)
    beyond, whole = (np.linspace(start, math.pi / 2, 10001) for start in (angle, 0.0))
    return float(np.trapezoid(np.cos(beyond) ** (n - 2), beyond) / np.trapezoid(np.cos(whole) ** (n - 2), whole))


def holm(p_values: list[float], alpha: float = 0.05) -> list[bool]:
    """Which differences hold when all are taken together: the k-th smallest p against alpha / (m - k + 1), as long as
    all before it hold."""
    holds = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > alpha / (len(p_values) - rank):
            break
        holds[i] = True
    return holds


def spread(values: list[float]) -> float:
    return math.nan if len(values) < 2 or any(map(math.isnan, values)) else statistics.stdev(values)


def decimals(value: float) -> int:
    """Three significant digits, and two decimals at least."""
    return 2 if math.isnan(value) or value == 0 else max(2, 2 - math.floor(math.log10(abs(value))))


# ---- Runs that are kept in results/, a line each ----


@functools.cache
def kept(name: str) -> dict[str, Lines]:
    """Those of runs/NAME -> by their folder's name, what the figures need of metrics.jsonl"""
    file = RESULTS / f"{name}.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else []
    return {row["run"]: [dict(zip(row["columns"], line)) for line in zip(*row["columns"].values())] for row in rows}


def keep(out: Path, figures: list[str]) -> None:
    """The runs in `out` join those in results/NAME.jsonl: the metrics of these figures, to five digits, and of the
    settings those that are not the default."""
    file = RESULTS / f"{out.name}.jsonl"
    rows = {row["run"]: row for row in map(json.loads, file.read_text().splitlines())} if file.exists() else {}
    metrics = ["step", *dict.fromkeys(name.partition(":")[0] for name in figures)]
    for config in out.glob("*/config.json"):
        lines = finished(config.parent)
        columns = {name: [short(line.get(name)) for line in lines] for name in metrics}
        made = json.loads(config.read_text())
        default = vars(Config())
        made["settings"] = {name: its for name, its in made["settings"].items() if its != default.get(name)}
        rows[config.parent.name] = {"run": config.parent.name, "columns": columns} | made
    file.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))


def short(value: float | None) -> float | None:
    return float(f"{value:.5g}") if isinstance(value, float) else value


# ---- The command line ----


def parse(words: list[str]) -> argparse.Namespace:
    own = list(itertools.takewhile(lambda word: word != "--", words))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vary", action="append", required=True, metavar="SWITCH=A,B", help="may be given repeatedly")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs at a time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), metavar="FIGURE", help="in the table")
    parser.add_argument("--decides", metavar="FIGURE", help="the one that is compared; the others describe")
    parser.add_argument("--tune", metavar="SWITCH=A,B", help="each variant gets the value that is best in --decides")
    parser.add_argument("--tune_seeds", default="101,102", help="on which that is found out; they are not reported")
    parser.add_argument("--table", action="store_true", help="the table of finished runs; nothing is run")
    parser.add_argument("--keep", action="store_true", help="in results/NAME.jsonl; what is there is not run again")
    args = parser.parse_args(own)
    if args.decides:
        args.figures = [args.decides, *(name for name in args.figures if name != args.decides)]
    elif args.tune:
        parser.error("--tune needs --decides, the figure by which a value is the best")
    switched = [*args.vary, *filter(None, [args.tune])]
    wrong = [name for name in args.figures if not re.fullmatch(r"[^:]+(:last|:\d+-\d+)?", name)]
    wrong += [given for given in switched if not re.fullmatch(r"\w+=[^,]+(,[^,]+)*", given)]
    if wrong:
        parser.error(f"cannot be read: {', '.join(wrong)}")
    args.flags, args.variants, args.trials = words[len(own) + 1 :], grid(args.vary), grid(switched)
    args.seeds, args.tune_seeds = args.seeds.split(","), args.tune_seeds.split(",") if args.tune else []
    switches = [given.partition("=")[0] for given in switched]
    all_seeds = [*args.seeds, *args.tune_seeds]
    for values in (switches, all_seeds, *(given.partition("=")[2].split(",") for given in switched)):
        if len(set(values)) < len(values):
            parser.error(f"given twice: {', '.join(values)}")
    its_own = {"seed", "out"} & {*switches, *(word.split("=")[0].removeprefix("--") for word in args.flags)}
    if its_own:
        parser.error(f"the grid itself gives each run its seed and folder: leave out {', '.join(its_own)}")
    return args


def main(words: list[str]) -> None:
    args = parse(words)
    if not args.table:
        check_grid(args)
        runs = len(args.trials) * len(args.tune_seeds) + len(args.variants) * len(args.seeds)
        print(f"{runs} runs, {len(kept(args.out.name))} of them in results/", flush=True)
        run_all(args, args.trials, args.tune_seeds)
        run_all(args, tuned(args), args.seeds)
    text = table_of(args)
    print(text)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "table.md").write_text(text + "\n")
    if args.keep:
        keep(args.out, args.figures)


if __name__ == "__main__":
    main(sys.argv[1:])
