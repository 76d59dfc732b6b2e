"""The lag study on a language model: what corrections for stale completions reach on `sum` (docs/real_model.md).

    python results/lag_smollm2/study.py 6       makes the runs that are missing, six at once, in runs/lag_smollm2/

Two learning rates, and three seeds of each. Without a delay, nothing, truncation and centering are the same. Runs come
in the order of their seeds, so the first third of them is a study of one seed. They are computed in fp32, so that the
trainer has the sampler's log-probs and only the delay makes completions stale.

The questions, written down before the runs:
1. Do truncation, centering and GSPO earn more than no correction at 8, as on the small task? They do not if the
   interval of the difference contains 0.
2. Is the order of the corrections that of the small task? It is not if one that is behind there is clearly ahead here.
"""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from infra import run_folder  # noqa: E402

RATES, SEEDS, STEPS = ["1e-5", "3e-6"], [1, 2, 3], 40
CORRECTIONS = {
    "none": [],
    "tis": ["--tis_cap=2"],
    "tis-centering": ["--tis_cap=2", "--score_centering=20"],
    "gspo": ["--algorithm=gspo", "--old_policy=sampler"],
}
VARIANTS = [(name, 8) for name in CORRECTIONS] + [("none", 0), ("gspo", 0)]
SUMS = """--model=models/smollm2 --data=runs/candidates/sum.jsonl --reward=results/real_model/candidates.py:last_number
    --correct=last_number --prompts_per_step=4 --max_completion_length=32 --warmup_steps=0 --eval_every=40
    --eval_prompts=64 --dtype=float32 --rollout_tokens=32768 --micro_batch_tokens=4096""".split()


def lines_of(run: Path) -> list[dict]:
    lines = run_folder.read_lines(run / "metrics.jsonl")
    return lines if lines and lines[-1]["step"] == STEPS else []


def train(name: str, delay: int, rate: str, seed: int) -> None:
    """Make the run, unless it is finished. A run that an interruption left unfinished is continued."""
    run = ROOT / "runs" / "lag_smollm2" / f"{name}-{delay}-{rate}-{seed}"
    if not lines_of(run):
        words = [
            *SUMS,
            f"--steps={STEPS}",
            *CORRECTIONS[name],
            f"--delay={delay}",
            f"--learning_rate={rate}",
            f"--seed={seed}",
        ]
        command = [sys.executable, ROOT / "train.py", *words, "--out", run]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        print(run.name, flush=True)
    for weights in ["checkpoint", "model"]:  # 2 GB
        shutil.rmtree(run / weights, ignore_errors=True)


def main(jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        runs = [(*variant, rate, seed) for seed in SEEDS for rate in RATES for variant in VARIANTS]
        for made in [pool.submit(train, *run) for run in runs]:
            made.result()


if __name__ == "__main__":
    main(int(sys.argv[1]))
