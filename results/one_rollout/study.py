"""Is a group of completions worth its prompts? One completion of each of 128 prompts against eight of each of 16.

    python results/one_rollout/study.py addition    makes the runs that are missing, in runs/one_rollout/
    python results/one_rollout/study.py sum         the same on a language model, in runs/one_rollout_sum/

FlashREINFORCE (2026) trains on one completion of each prompt. It compares a completion with the others of the update,
not with those of its prompt, and sees eight times as many prompts. All variants sample the same number of completions
in a step. Each gets the rate of RATES with the highest reward over the second half of the run on the seeds of TUNED_ON,
and is then trained with it on SEEDS. Without a delay, centering is the same as GRPO. No run is taken from an earlier
study. (In lag_study, no rate above 5e-4 was the best of any arm.)

The questions, written down before the runs:
1. Does one completion of each prompt earn as much as groups do? It earns less, or more, if the interval of its
   difference from an arm with groups excludes 0, after Holm's correction for all such comparisons.
2. Does that change with the delay? It does if the interval of the difference of two differences excludes 0.

`sum` is the task of docs/real_model.md, where the model is made. A completion costs a second of one core or more there,
so steps have 16, and only the two sides of the question are run, `one` and `grpo`, both at 1e-5: the rate that the
tuning seed of results/real_lora chose for all weights.

Added when the other runs of addition were known, because `one` has not only other prompts than `grpo` but corrects for
the delay, too: `grouped`, which is `one` with eight completions of each of 16 prompts, at the rate that `one` got, with
delays. If it earns what `one` does, the difference from `grpo` comes from the correction.

The measure is the mean reward over the second half of a run: steps 41 to 80 in addition, 13 to 24 in sum.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bench import logs  # noqa: E402


class Study(NamedTuple):
    folder: str
    arms: list[str]
    flags: list[str]
    steps: int
    groups: tuple[int, int]  # prompts, and completions of each
    rates: list[str]
    tuned_on: list[int]
    seeds: list[int]
    delays: list[int]


STUDIES = {
    "addition": Study(
        "one_rollout", ["one", "grpo", "cispo", "centering", "grouped"], [],
        80, (16, 8), ["1e-4", "2e-4", "5e-4"], [101, 102], [1, 2, 3, 4, 5], [8, 0, 32],
    ),
    "sum": Study(
        "one_rollout_sum", ["one", "grpo"],
        """--model=models/smollm2 --data=runs/candidates/sum.jsonl --reward=results/real_model/candidates.py:last_number
        --correct=last_number --max_completion_length=32 --warmup_steps=0 --dtype=float32""".split(),
        24, (4, 4), ["1e-5"], [], [1, 2, 3], [8, 0],
    ),
}  # fmt: skip
ARMS = {
    "one": ["--algorithm=flash_reinforce"],
    "grpo": [],
    "cispo": ["--algorithm=cispo", "--old_policy=sampler"],
    "centering": ["--tis_cap=2", "--score_centering=17"],  # all ids of addition
    "grouped": ["--algorithm=flash_reinforce"],
}


def variants(study: Study) -> list[tuple[str, int]]:
    return [(arm, k) for k in study.delays for arm in study.arms if k > 0 or arm not in ("centering", "grouped")]


def train(study: Study, runs: dict[str, logs.Run], arm: str, delay: int, rate: str, seed: int) -> None:
    """Make the run, unless it is among those that are finished. One that was interrupted is continued."""
    run = ROOT / "runs" / study.folder / f"{arm}-{delay}-{rate}-{seed}"
    if reward_of(study, runs, arm, delay, rate, seed) is None:
        P, G = study.groups
        words = [*study.flags, *ARMS[arm], f"--delay={delay}", f"--learning_rate={rate}", f"--seed={seed}"]
        words += [f"--steps={study.steps}", "--eval_every=0"]
        words += [f"--prompts_per_step={P * G}", "--num_generations=1"] if arm == "one" else []
        words += [f"--prompts_per_step={P}", f"--num_generations={G}"] if arm != "one" else []
        command = [sys.executable, ROOT / "train.py", *words, "--out", run]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    for weights in ("checkpoint", "model"):
        shutil.rmtree(run / weights, ignore_errors=True)


def reward_of(study: Study, runs: dict[str, logs.Run], arm: str, delay: int, rate: str, seed: int) -> float | None:
    """Return the measure of a run, or None if it is missing or unfinished."""
    run = runs.get(f"{arm}-{delay}-{rate}-{seed}")
    if run is None or not run.lines or run.lines[-1]["step"] < study.steps:
        return None
    values = [line["reward"] for line in run.lines if line["step"] > study.steps // 2]
    return sum(values) / len(values)


def best_rate(study: Study, runs: dict[str, logs.Run], arm: str, delay: int) -> str | None:
    """Return the rate that the tuning seeds choose, or None if one of their runs is missing."""
    arm = "one" if arm == "grouped" else arm
    tuned = {rate: [reward_of(study, runs, arm, delay, rate, seed) for seed in study.tuned_on] for rate in study.rates}
    if any(None in rewards for rewards in tuned.values()):
        return None
    return max(study.rates, key=lambda rate: sum(tuned[rate]))


def main(study: Study) -> None:
    folder = ROOT / "runs" / study.folder
    for arm, delay in variants(study):
        runs = logs.read(folder)
        for rate in study.rates if arm != "grouped" else []:
            for seed in study.tuned_on:
                train(study, runs, arm, delay, rate, seed)
        best = best_rate(study, logs.read(folder), arm, delay)
        for seed in study.seeds:
            train(study, runs, arm, delay, best, seed)
        print(arm, delay, best, flush=True)


if __name__ == "__main__":
    main(STUDIES[sys.argv[1]])
