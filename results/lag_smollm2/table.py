"""Print the table of the study, for the runs that are in this folder.

PYTHONPATH=. python results/lag_smollm2/table.py
"""

import statistics
from pathlib import Path

from bench import logs
from results.lag_smollm2.study import RATES, SEEDS, STEPS, VARIANTS
from tools.ablate import interval, markdown

RUNS = logs.read(Path(__file__).parent)


def lines_of(name: str, delay: int, rate: str, seed: int) -> list[dict]:
    run = RUNS.get(f"{name}-{delay}-{rate}-{seed}")
    return run.lines if run else []


def second_half(lines: list[dict]) -> float:
    """Return the mean reward of the last half of the steps."""
    return statistics.mean(line["reward"] for line in lines if line["step"] > STEPS // 2)


def main() -> None:
    rows, differences = [], []
    for rate in RATES:
        for name, delay in VARIANTS:
            runs = {seed: lines for seed in SEEDS if (lines := lines_of(name, delay, rate, seed))}
            if runs:
                figures = [
                    [second_half(lines) for lines in runs.values()],
                    [lines[-1]["eval/pass@1"] for lines in runs.values()],
                    [min(line["ess"] for line in lines[1:]) for lines in runs.values()],
                ]
                cells = [", ".join(f"{x:.3f}" for x in of_seeds) for of_seeds in figures]
                rows.append([name, str(delay), rate, *cells])
                other = delay if name != "none" else 8  # without a correction, a delay of 0 is compared with one of 8
                minus = [second_half(runs[s]) - second_half(lines_of("none", other, rate, s)) for s in runs]
                mean, half = interval(minus)
                between = f"{mean - half:+.3f} to {mean + half:+.3f}"
                if (name, delay) != ("none", 8):
                    differences.append(f"{name} at {delay}, {rate}, minus none at {other}: {mean:+.3f} ({between})")
    header = ["correction", "delay", "rate", "reward of steps 21 to 40", "pass@1 at the end", "lowest ess"]
    print(markdown(header, *rows), *differences, sep="\n")


if __name__ == "__main__":
    main()
