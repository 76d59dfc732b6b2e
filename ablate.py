"""A grid of switches and seeds, and its table.

    python ablate.py --vary normalization=sequence,global,constant --seeds 1,2,3,4,5 --out runs/normalization
    python ablate.py --vary epsilon_high=0.2,0.28 --seeds 1,2,3 --out runs/clip -- --num_iterations 2 --minibatches 2

What stands after `--` goes to every run. Each run is `train.py` in a folder of its own, --jobs of them at a time; the
same command again continues what was stopped and repeats nothing. The first value of each switch is the one the
others are compared with, seed by seed: the mean of the paired differences, its 95 % interval (Student's t), and whether
the interval leaves out 0. With less than three seeds nothing is claimed.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# figure in the table: how it is had from the lines of metrics.jsonl
FIGURES = {
    "accuracy": lambda lines: last(lines, "eval/accuracy"),
    "pass@1": lambda lines: last(lines, "eval/pass@1"),
    "length": lambda lines: late(lines, "completion_length"),
    "length_incorrect": lambda lines: late(lines, "length_incorrect"),
    "entropy": lambda lines: late(lines, "entropy"),
}
# Student's t at 97.5 %, for 1, 2, 3 ... degrees of freedom
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def last(lines: list[dict], metric: str) -> float:
    values = [line[metric] for line in lines if line.get(metric) is not None]
    return values[-1] if values else math.nan


def late(lines: list[dict], metric: str) -> float:
    """The mean over the second half of the run."""
    values = [line[metric] for line in lines[len(lines) // 2 :] if line.get(metric) is not None]
    return statistics.fmean(values) if values else math.nan


def run(folder: Path, flags: list[str]) -> list[dict]:
    """-> the lines of its metrics.jsonl"""
    folder.parent.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    command = [sys.executable, str(here / "train.py"), *flags, "--out", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with open(f"{folder}.log", "w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        sys.exit(f"{folder} ended with {code}; see {folder}.log")
    print(f"done: {folder}", flush=True)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def interval(differences: list[float]) -> tuple[float, float]:
    """-> mean, half the width of its 95 % interval"""
    n = len(differences)
    if n < 2 or any(map(math.isnan, differences)):
        return statistics.fmean(differences), math.inf
    return statistics.fmean(differences), T[min(n - 2, len(T) - 1)] * statistics.stdev(differences) / math.sqrt(n)


def spread(values: list[float]) -> float:
    return math.nan if len(values) < 2 or any(map(math.isnan, values)) else statistics.stdev(values)


def table(results: dict[str, list[list[dict]]]) -> str:
    """variant -> runs, in the order of their seeds. A row for each variant and figure, in Markdown."""
    rows = ["| | " + " | ".join(FIGURES) + " |", "|---|" + "---|" * len(FIGURES)]
    first = next(iter(results))
    values = {
        variant: {f: [get(lines) for lines in runs] for f, get in FIGURES.items()} for variant, runs in results.items()
    }
    for variant, figures in values.items():
        cells = [f"{statistics.fmean(v):.3f} ± {spread(v):.3f}" for v in figures.values()]
        rows.append(f"| {variant} | " + " | ".join(cells) + " |")
    for variant in list(values)[1:]:
        cells = []
        for figure in FIGURES:
            pairs = zip(values[variant][figure], values[first][figure], strict=True)
            mean, half = interval([a - b for a, b in pairs])
            found = (
                "too few seeds" if len(results[first]) < 3 else "differs" if abs(mean) > half else "no difference seen"
            )
            cells.append(f"{mean:+.3f} ± {half:.3f}, {found}")
        rows.append(f"| {variant} − {first} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--vary", action="append", required=True, metavar="SWITCH=A,B,C", help="may be given several times"
    )
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="runs at a time")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="-- and flags for every run")
    args = parser.parse_args()

    common = args.flags[1:] if args.flags[:1] == ["--"] else args.flags
    switches = [(name, values.split(",")) for name, _, values in (v.partition("=") for v in args.vary)]
    seeds = args.seeds.split(",")
    variants = [dict(zip([n for n, _ in switches], values)) for values in itertools.product(*(v for _, v in switches))]
    jobs = {}
    with ThreadPoolExecutor(args.jobs) as pool:
        for seed, variant in itertools.product(seeds, variants):
            name = " ".join(f"{key} {value}" for key, value in variant.items())
            folder = args.out / ("-".join(variant.values()) + f"-{seed}")
            flags = [word for key, value in variant.items() for word in (f"--{key}", value)]
            jobs[name, seed] = pool.submit(run, folder, [*common, *flags, "--seed", seed])
    names = dict.fromkeys(name for name, _ in jobs)
    print(text := table({name: [jobs[name, seed].result() for seed in seeds] for name in names}))
    (args.out / "table.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
