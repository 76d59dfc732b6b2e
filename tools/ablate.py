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
differences, its 95 % interval (Student's t), and whether the interval leaves out 0. With fewer than three seeds nothing
is claimed. One comparison in twenty "differs" by chance alone, so decide before the runs which figure counts.

With --decides that figure alone is compared, and a difference "holds" if it can be told from noise when all comparisons
of the table are taken together (Holm's correction); the other figures describe, in a column each. With --tune each
variant first gets the value that is best in the figure that decides, on seeds that are not reported.

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
from infra import command_line, run_folder

FIGURES = ("eval/accuracy:last", "eval/pass@1:last", "completion_length", "length_incorrect", "entropy")
ALPHA = 0.05  # the share of differences by chance alone that are taken for real
RESULTS = Path(__file__).parent.parent / "results"
Lines = list[dict]  # of a run's metrics.jsonl
Variant = dict[str, str]  # switch: value


# ---- The grid ----


def switch_of(given: str) -> tuple[str, list[str]]:
    """a=1,2 -> its name, its values"""
    name, _, values = given.partition("=")
    return name, values.split(",")


def grid(vary: list[str]) -> list[Variant]:
    """["a=1,2", "b=3,4"] -> a variant for each combination"""
    names, values = zip(*map(switch_of, vary))
    return [dict(zip(names, each)) for each in itertools.product(*values)]


def folder_of(out: Path, variant: Variant, seed: str) -> Path:
    """Inside `out`, whatever the values are."""
    return out / "-".join([*variant.values(), seed]).replace("/", "_")


def flags_of(variant: Variant) -> list[str]:
    return [word for name, value in variant.items() for word in (f"--{name}", value)]


def runs_of(args: argparse.Namespace, variants: list[Variant], seeds: list[str]) -> list[tuple[Path, list[str]]]:
    """-> folder and flags of each run, seed after seed, so that what is there early can be compared"""
    runs = []
    for seed, variant in itertools.product(seeds, variants):
        folder = folder_of(args.out, variant, seed)
        runs.append((folder, [*args.flags, *flags_of(variant), "--seed", seed, "--out", str(folder)]))
    return runs


def check_grid(args: argparse.Namespace) -> None:
    """What is wrong with any of the runs, or with the table they are for, ends the program before the first one."""
    in_results = {row["run"]: Config(**row["settings"]) for row in rows_kept(args.out.name)}
    for folder, words in runs_of(args, args.trials, [*args.tune_seeds, *args.seeds]):
        config = command_line.parse(words, torch.cuda.is_available())
        for name in args.figures:
            steps = re.search(r"-(\d+)$", name)
            if (name.startswith("eval/") and not config.eval_every) or (steps and int(steps[1]) > config.steps):
                sys.exit(f"error: {name}: {folder} will have no such figure")
        made = in_results.get(folder.name, config)
        other = [f"--{name}" for name in run_folder.other_settings(made, config)]
        if made.steps != config.steps:
            other.append("--steps")
        if other:
            sys.exit(
                f"error: results/{args.out.name}.jsonl has {folder.name} with another {', '.join(other)}: "
                "give another --out"
            )


def run_all(args: argparse.Namespace, variants: list[Variant], seeds: list[str]) -> None:
    """The first failure stops what has not started; so does a figure that the first run to end does not have."""
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    spawn = multiprocessing.get_context("spawn")  # a worker imports once, for all its runs
    with ProcessPoolExecutor(args.jobs, spawn, initializer=torch.set_num_threads, initargs=[1]) as pool:
        runs = [
            pool.submit(run_one, folder, words)
            for folder, words in runs_of(args, variants, seeds)
            if folder.name not in kept(args.out.name)
        ]
        spent = 0.0
        try:
            for done, run in enumerate(as_completed(runs), 1):
                folder, seconds = run.result()
                spent += seconds
                hours = spent / done * len(runs) / 3600
                print(f"{done} of {len(runs)} done: {folder} (about {hours:.2f} CPU-hours in all)", flush=True)
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
        sys.exit(f"{name}: no such metric; there are {', '.join(known)}")
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


@dataclass
class Comparison:
    """With the first variant, in one figure."""

    variant: Variant
    values: list[float]  # one for each seed
    differences: list[float]  # paired
    holds: bool  # it is told from noise


def comparisons(variants: list[Variant], runs: list[list[Lines]], name: str, together: bool) -> list[Comparison]:
    """`together`: a difference must hold beside all others (Holm), not by itself alone."""
    values = [[figure(lines, name) for lines in its] for its in runs]
    differences = [[a - b for a, b in zip(its, values[0], strict=True)] for its in values]
    p_values = [p_value(its) for its in differences[1:]]
    holds = holm(p_values) if together else [p < ALPHA for p in p_values]
    return [Comparison(*its) for its in zip(variants, values, differences, [False, *holds], strict=True)]


def table(variants: list[Variant], runs: list[list[Lines]], figures: list[str], decides: str | None = None) -> str:
    """A row for each figure and variant. Where one figure decides, the rows are its own, and the others are columns."""
    compared_figures, others = figures, []
    baseline = ", ".join(variants[0].values())
    names = ["figure", *variants[0], f"mean ± std of {len(runs[0])} seeds", f"minus {baseline}, 95 % interval", ""]
    if decides:
        compared_figures, others = [decides], [name for name in figures if name != decides]
        names += ["worst", *others]
    rows = []
    for name in compared_figures:
        first, *_ = compared = comparisons(variants, runs, name, together=decides is not None)
        digits = decimals(statistics.fmean(first.values))
        for its, lines_of_seeds in zip(compared, runs, strict=True):
            cells = [name, *its.variant.values()] if its is first else ["", *its.variant.values()]
            cells.append(f"{statistics.fmean(its.values):.{digits}f} ± {spread(its.values):.{digits}f}")
            cells += ["", ""] if its is first else [with_interval(its.differences, digits), verdict(its, decides)]
            if decides:
                cells.append(f"{min(its.values):.{digits}f}")
            for other in others:
                mean = statistics.fmean(figure(lines, other) for lines in lines_of_seeds)
                cells.append(f"{mean:.{decimals(mean)}f}")
            rows.append(cells)
    return markdown(names, rows)


def markdown(names: list[str], rows: list[list[str]]) -> str:
    first, *others = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in (names, *rows))
    return "\n".join([first, "|" + "---|" * len(names), *others])


def table_of(args: argparse.Namespace) -> str:
    variants = tuned(args)
    return table(variants, read_runs(args.out, variants, args.seeds), args.figures, args.decides)


def with_interval(differences: list[float], digits: int) -> str:
    mean, half = interval(differences)
    if max(abs(mean), half) < 10**-digits:  # all of it would be 0.00
        digits = decimals(max(abs(mean), half))
    return f"{mean:+.{digits}f}, {mean - half:+.{digits}f} to {mean + half:+.{digits}f}"


def verdict(its: Comparison, decides: str | None) -> str:
    if len(its.values) < 3:
        return "too few seeds"
    if its.holds:
        return "**holds**" if decides else "**differs**"
    return "not told from noise"


# ---- What is told from noise ----


def student(df: int) -> tuple[np.ndarray, np.ndarray]:
    """Student's distribution over angles, atan(t / sqrt(df)), where its density is a power of the cosine.
    -> angles from 0 up, and the probability that |t| is within each"""
    angles = np.linspace(0.0, math.pi / 2, 10001)
    density = np.cos(angles) ** (df - 1)
    within = np.cumsum([0.0, *(density[1:] + density[:-1])])
    return angles, within / within[-1]


def interval(differences: list[float]) -> tuple[float, float]:
    """-> mean, half the width of its 95 % interval"""
    n = len(differences)
    if n < 2 or any(map(math.isnan, differences)):
        return statistics.fmean(differences), math.inf
    angles, within = student(n - 1)
    t = math.sqrt(n - 1) * math.tan(np.interp(1 - ALPHA, within, angles))
    return statistics.fmean(differences), t * statistics.stdev(differences) / math.sqrt(n)


def p_value(differences: list[float]) -> float:
    """Of the paired t-test, two-sided."""
    n, mean = len(differences), statistics.fmean(differences)
    if n < 3 or math.isnan(mean):
        return 1.0  # nothing is claimed
    angle = math.atan2(abs(mean) * math.sqrt(n), statistics.stdev(differences) * math.sqrt(n - 1))
    return 1 - float(np.interp(angle, *student(n - 1)))


def holm(p_values: list[float]) -> list[bool]:
    """Which differences hold when all are taken together: the k-th smallest p against ALPHA / (m - k + 1), as long as
    all before it hold."""
    holds = [False] * len(p_values)
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if p_values[i] > ALPHA / (len(p_values) - rank):
            break
        holds[i] = True
    return holds


def spread(values: list[float]) -> float:
    return math.nan if len(values) < 2 or any(map(math.isnan, values)) else statistics.stdev(values)


def decimals(value: float) -> int:
    """Three significant digits, and two decimals at least."""
    return 2 if math.isnan(value) or value == 0 else max(2, 2 - math.floor(math.log10(abs(value))))


# ---- Runs that are kept in results/, a line each ----


def rows_kept(name: str) -> list[dict]:
    file = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@functools.cache
def kept(name: str) -> dict[str, Lines]:
    """Those of runs/NAME -> by their folder's name, what the figures need of metrics.jsonl"""
    columns = {row["run"]: row["columns"] for row in rows_kept(name)}
    return {run: [dict(zip(its, line)) for line in zip(*its.values())] for run, its in columns.items()}


def keep(out: Path, figures: list[str]) -> None:
    """The runs in `out` join those in results/NAME.jsonl: the metrics of these figures, to five digits, and of the
    settings those that are not the default."""
    rows = {row["run"]: row for row in rows_kept(out.name)}
    metrics = ["step", *dict.fromkeys(name.partition(":")[0] for name in figures)]
    default = vars(Config())
    for config in out.glob("*/config.json"):
        lines = finished(config.parent)
        columns = {name: [short(line.get(name)) for line in lines] for name in metrics}
        made = json.loads(config.read_text())
        del made["settings"]["out"]  # a folder of this machine
        made["settings"] = {name: its for name, its in made["settings"].items() if its != default.get(name)}
        rows[config.parent.name] = {"run": config.parent.name, "columns": columns} | made
    (RESULTS / f"{out.name}.jsonl").write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)))


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
    switches, values = zip(*map(switch_of, switched))
    for given in (switches, [*args.seeds, *args.tune_seeds], *values):
        if len(set(given)) < len(given):
            parser.error(f"given twice: {', '.join(given)}")
    its_own = {"seed", "out"} & {*switches, *(word.split("=")[0].removeprefix("--") for word in args.flags)}
    if its_own:
        parser.error(f"the grid itself gives each run its seed and folder: leave out {', '.join(its_own)}")
    return args


def main(words: list[str]) -> None:
    args = parse(words)
    if not args.table:
        check_grid(args)
        runs = len(args.trials) * len(args.tune_seeds) + len(args.variants) * len(args.seeds)
        print(f"{runs} runs; what is in results/{args.out.name}.jsonl is not run again", flush=True)
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
