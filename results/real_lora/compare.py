"""Print the tables of docs/real_model.md on LoRA, from the logs in this folder.

    PYTHONPATH=. python results/real_lora/compare.py

The first table has `reward:1-40` of every learning rate on seed 21. The second one compares ranks 1 and 16 with all
weights (rank 0) on the other seeds, each of the three at its best rate.
"""

from pathlib import Path

from bench import logs
from tools import ablate

RUNS = logs.read(Path(__file__).parent)
RATES = {"0": ("3e-6", "1e-5", "3e-5"), "1": ("3e-5", "1e-4", "3e-4"), "16": ("3e-5", "1e-4", "3e-4")}
SEEDS = ("22", "23", "24")
FIGURES = ["reward:1-40", "eval/pass@1:last"]


def lines_of(rank: str, rate: str, seed: str) -> ablate.Lines:
    return RUNS[f"{rank},{rate}-{seed}"].lines


variants = []
for rank, rates in RATES.items():
    rewards = {rate: ablate.figure(lines_of(rank, rate, "21"), "reward:1-40") for rate in rates}
    print(f"rank {rank}: {', '.join(f'{reward:.3f} at {rate}' for rate, reward in rewards.items())}")
    variants.append({"lora_rank": rank, "learning_rate": max(rewards, key=rewards.get)})
of_seeds = [[lines_of(*variant.values(), seed) for seed in SEEDS] for variant in variants]
rows = ablate.compared(FIGURES, variants, of_seeds)
difference = "difference from lora_rank 0 (95 % interval)"
print(ablate.markdown(["metric", *variants[0], "mean ± std of 3 seeds", difference, "verdict"], *rows))
