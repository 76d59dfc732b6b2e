"""Print the table of the study, for the runs that are in this folder.

PYTHONPATH=. python results/lag_smollm2/table.py
"""

import statistics
from pathlib import Path

from infra import run_folder
from results.lag_smollm2.study import RATES, SEEDS, VARIANTS
from tools.ablate import markdown

HERE = Path(__file__).parent


def main() -> None:
    rows = []
    for rate in RATES:
        for name, delay in VARIANTS:
            logs = [run_folder.read_lines(HERE / f"{name}-{delay}-{rate}-{seed}" / "metrics.jsonl") for seed in SEEDS]
            if logs := [lines for lines in logs if lines]:
                figures = [
                    [statistics.mean(line["reward"] for line in lines if line["step"] > 20) for lines in logs],
                    [lines[-1]["eval/pass@1"] for lines in logs],
                    [min(line["ess"] for line in lines[1:]) for lines in logs],
                ]
                cells = [", ".join(f"{x:.3f}" for x in of_seeds) for of_seeds in figures]
                rows.append([name, str(delay), rate, *cells])
    print(
        markdown(["correction", "delay", "rate", "reward of steps 21 to 40", "pass@1 at the end", "lowest ess"], *rows)
    )


if __name__ == "__main__":
    main()
