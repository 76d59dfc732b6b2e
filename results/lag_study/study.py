"""Which correction for stale completions needs which learning rate, and what it reaches with it.

    python results/lag_study/study.py         makes the runs that are missing, in runs/lag_study/

Every variant is one correction at one delay. Its learning rate is the one of RATES with the highest mean reward over
the second half of the run, on seeds 101 and 102. With that rate it is then trained on seeds 1 to 5. Without a delay,
nothing, truncation, centering and gates are the same, so each objective is trained once.

The questions, written down before the runs:
1. Which correction needs which rate?
2. Does score centering help beyond truncation? It does not if the interval of its difference contains 0.
3. Does `ess` fall before the reward does? The answer is no if its lowest mean over five steps comes later.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from infra import run_folder  # noqa: E402

RATES = ["1e-4", "2e-4", "5e-4", "1e-3"]
TUNED_ON, SEEDS = [101, 102], [1, 2, 3, 4, 5]
CORRECTIONS = {
    "none": [],
    "tis": ["--tis_cap=2"],
    "tis-centering": ["--tis_cap=2", "--score_centering=17"],
    "sampler": ["--old_policy=sampler"],
    "gspo": ["--algorithm=gspo", "--old_policy=sampler"],
    "cispo": ["--algorithm=cispo", "--old_policy=sampler"],
    "dppo": ["--algorithm=dppo", "--old_policy=sampler"],
    "vespo": ["--algorithm=vespo", "--old_policy=sampler"],
    "gate": ["--gate_low=0.99", "--gate_high=1.01"],
}
ON_POLICY = ["none", "gspo", "cispo", "dppo", "vespo"]  # without a delay, the others are the same as the first
VARIANTS = [(name, delay) for delay in (8, 32) for name in CORRECTIONS]
VARIANTS += [(name, 0) for name in ON_POLICY] + [(name, 2) for name in CORRECTIONS]


def folder(name: str, delay: int, rate: str, seed: int) -> Path:
    return ROOT / "runs" / "lag_study" / f"{name}-{delay}-{rate}-{seed}"


def lines_of(run: Path) -> list[dict]:
    lines = run_folder.read_lines(run / "metrics.jsonl")
    return lines if lines and lines[-1]["step"] == 80 else []


def train(name: str, delay: int, rate: str, seed: int) -> None:
    """Make the run, unless it is finished. A run that an interruption left unfinished is continued."""
    run = folder(name, delay, rate, seed)
    if lines_of(run):
        return
    words = [*CORRECTIONS[name], f"--delay={delay}", f"--learning_rate={rate}", f"--seed={seed}", "--eval_every=80"]
    subprocess.run([sys.executable, ROOT / "train.py", *words, "--out", run], stdout=subprocess.DEVNULL, check=True)


def second_half(lines: list[dict]) -> float:
    values = [line["reward"] for line in lines if line["step"] > 40]
    return sum(values) / len(values)


def best_rate(name: str, delay: int) -> str:
    return max(RATES, key=lambda rate: sum(second_half(lines_of(folder(name, delay, rate, s))) for s in TUNED_ON))


def main() -> None:
    for name, delay in VARIANTS:
        for rate in RATES:
            for seed in TUNED_ON:
                train(name, delay, rate, seed)
        for seed in SEEDS:
            train(name, delay, best_rate(name, delay), seed)
        print(name, delay, best_rate(name, delay), flush=True)


if __name__ == "__main__":
    main()
