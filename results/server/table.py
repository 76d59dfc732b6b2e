"""Print the table of docs/server.md from the logs beside this file.

PYTHONPATH=. python results/server/table.py
"""

import statistics
from pathlib import Path

from bench import logs

RUNS = logs.read(Path(__file__).parent)


def steps(name: str) -> list[dict]:
    return [line for line in RUNS[name].lines if line["step"] > 0]


def mean(lines: list[dict], name: str) -> float:
    return statistics.mean(line[name] for line in lines)


def row(name: str, folders: list[str]) -> str:
    runs = [steps(folder) for folder in folders]
    rewards = [mean(lines, "reward") for lines in runs]
    spread = f" ± {statistics.stdev(rewards):.3f}" if len(runs) > 1 else ""
    gap = max(line["sampler_gap"] for lines in runs for line in lines)
    seconds = [statistics.mean(mean(lines, x) for lines in runs) for x in ("seconds_rollout", "seconds_update")]
    shown = " / ".join(f"{x:.2f}" for x in seconds)
    return f"| {name} | {statistics.mean(rewards):.3f}{spread} | {gap:.1g} | {shown} |"


if __name__ == "__main__":
    print("| sampler | mean reward | largest `sampler_gap` | seconds of rollout / update |")
    print("|---|---|---|---|")
    print(row("`generate`, five seeds", [f"generate-{seed}" for seed in range(1, 6)]))
    print(row("vLLM in fp32, five seeds", [f"vllm-{seed}" for seed in range(1, 6)]))
    print(row("vLLM in bf16, `--rollout_dtype bfloat16`, one seed", ["vllm-bf16-1"]))
    print(row("vLLM in fp32, SmolLM2, six steps", ["smollm2-fp32"]))
    print(row("vLLM in bf16, SmolLM2, six steps", ["smollm2-bf16"]))
    differences = [
        mean(steps(f"vllm-{seed}"), "reward") - mean(steps(f"generate-{seed}"), "reward") for seed in range(1, 6)
    ]
    half = 2.776 * statistics.stdev(differences) / 5**0.5  # Student's t, 4 degrees of freedom, 95 %
    print(f"\nvLLM - generate, paired: {statistics.mean(differences):+.4f} ± {half:.4f}")
