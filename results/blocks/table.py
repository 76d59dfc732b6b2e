"""Print what each normalization earned at its best rate: the mean reward over all steps, for seeds 1 to 5.

    PYTHONPATH=. python results/blocks/table.py

The rates 1e-4, 2e-4 and 4e-4 were compared on seeds 101 and 102. `block` is the example of docs/extending.md, with
blocks of four and of eight completions. All are compared with `sequence`, seed by seed.
"""

import statistics
from pathlib import Path

from bench import logs
from tools.ablate import interval, markdown

RUNS = logs.read(Path(__file__).parent)


def reward(name: str, rate: str, seed: int) -> float:
    lines = RUNS[f"{name}-{rate}-{seed}"].lines
    return statistics.mean(line["reward"] for line in lines if line["step"] > 0)


def best_rate(name: str) -> str:
    return max(("1e-4", "2e-4", "4e-4"), key=lambda rate: sum(reward(name, rate, seed) for seed in (101, 102)))


if __name__ == "__main__":
    rows, first = [], None
    for name in ("sequence", "global", "block4", "block8"):
        values = [reward(name, best_rate(name), seed) for seed in range(1, 6)]
        first = first or values
        mean, half = interval([a - b for a, b in zip(values, first, strict=True)])
        shown = f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"
        rows.append([name, best_rate(name), shown, f"{mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f})"])
    print(markdown(["normalization", "its rate", "mean reward", "minus sequence (95 % interval)"], *rows))
