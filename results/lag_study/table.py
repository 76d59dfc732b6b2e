"""Print the table of the study, for the variants whose runs are all in this folder.

PYTHONPATH=. python results/lag_study/table.py
"""

import statistics
from pathlib import Path

from bench import logs
from results.lag_study.study import CORRECTIONS, RATES, SEEDS, TUNED_ON, second_half
from tools.ablate import clear, interval, markdown

RUNS = logs.read(Path(__file__).parent)
DELAYS = [0, 2, 8, 32]


def lines_of(name: str, delay: int, rate: str, seed: int) -> list[dict]:
    run = RUNS.get(f"{name}-{delay}-{rate}-{seed}")
    return run.lines if run else []


def best_rate(name: str, delay: int) -> str | None:
    """Return the rate that the study chose, or None if a run of the variant is missing."""
    tried = {rate: [lines_of(name, delay, rate, seed) for seed in TUNED_ON] for rate in RATES}
    if not all(lines for runs in tried.values() for lines in runs):
        return None
    best = max(RATES, key=lambda rate: sum(map(second_half, tried[rate])))
    return best if all(lines_of(name, delay, best, seed) for seed in SEEDS) else None


def falls(lines: list[dict]) -> tuple[int | None, int | None]:
    """Return the first steps at which the mean over five steps of `ess` is below 0.5, and of the reward below half of
    its highest value so far, which must be above 0.3."""
    lines = [line for line in lines if line["step"] > 0]
    means = {
        name: [statistics.mean(line[name] for line in lines[max(0, t - 4) : t + 1]) for t in range(len(lines))]
        for name in ("ess", "reward")
    }
    low = [t + 1 for t, x in enumerate(means["ess"]) if x < 0.5]
    highest = [max(means["reward"][: t + 1]) for t in range(len(lines))]
    lost = [t + 1 for t, (x, high) in enumerate(zip(means["reward"], highest)) if x < high / 2 and high > 0.3]
    return (low[0] if low else None), (lost[0] if lost else None)


def main() -> None:
    rates = {(name, delay): best_rate(name, delay) for name in CORRECTIONS for delay in DELAYS}
    runs = {v: [lines_of(*v, rate, seed) for seed in SEEDS] for v, rate in rates.items() if rate}
    rewards = {v: [second_half(lines) for lines in logs] for v, logs in runs.items()}
    minus_none = {
        (name, delay): [a - b for a, b in zip(own, rewards["none", delay], strict=True)]
        for (name, delay), own in rewards.items()
        if name != "none"
    }
    differ = clear(minus_none)

    def cell(v: tuple[str, int]) -> str:
        if v not in runs:
            return ""
        text = f"{statistics.mean(rewards[v]):.3f} ± {statistics.stdev(rewards[v]):.3f}"
        text = f"**{text}**" if v in differ else text
        return text if rates[v] == "2e-4" else f"{text} at {rates[v]}"

    delays = [delay for delay in DELAYS if any(v[1] == delay for v in runs)]
    print(
        markdown(
            ["correction", "delay " + str(delays[0]), *map(str, delays[1:])],
            *[[name, *(cell((name, d)) for d in delays)] for name in CORRECTIONS],
        )
    )
    print()
    for v, differences in minus_none.items():
        mean, half = interval(differences)
        ess = statistics.mean(min(line["ess"] for line in lines if line.get("ess")) for lines in runs[v])
        print(
            f"{v[0]} at {v[1]} minus none: {mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f}), lowest ess {ess:.2f}"
        )
    # Without a delay, `ess` is always 1.
    found = [falls(run.lines) for name, run in RUNS.items() if "-0-" not in name]
    before = [lost - low for low, lost in found if low and lost and low < lost]
    print(f"{sum(lost is not None for _, lost in found)} of {len(found)} runs with a delay lose half of their reward;")
    print(f"in {len(before)} of these `ess` is below 0.5 before, by {min(before)} to {max(before)} steps;")
    print(f"in {sum(low is not None and lost is None for low, lost in found)} of the others it is below 0.5 as well")


if __name__ == "__main__":
    main()
