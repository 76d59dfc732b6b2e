"""The first hour on a GPU: does training work, does it stay within the memory, how fast is it, does it learn?

    python -m tools.first_hour                                  a small model from this repository
    torchrun --nproc_per_node 8 -m tools.first_hour --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k

It takes every setting of train.py. It prints what it measures, and writes it to first_hour.json and, as text, to
first_hour.txt in the current directory. docs/distributed.md says how to read it. Please send us one of the two files,
or paste the text into an issue.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

import train
from infra import ranks, run_folder
from infra.command_line import parse, ready

KINDS = {  # for each kind of run its flags, and the number of its steps
    "plain": ("--decode plain", 20),
    "graph": ("--decode graph", 3),
    "sharded": ("--decode plain --shard", 3),
}


def measure(words: list[str], steps: int, device: torch.device) -> dict:
    """Train for some steps. Return the rewards of all steps, and the other metrics of the last one."""
    config = ready(parse(words, torch.cuda.is_available()), torch.cuda.is_available())
    run, *_ = train.set_up(config, device)  # on a GPU, this prints what was measured
    decode_calls: list[int] = []  # has an element for each decode step
    run.progress = lambda tokens, rows: decode_calls.append(tokens)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    rewards = []
    for step in range(1, steps + 1):
        decode_calls.clear()
        metrics, _ = train.training_step(run, step)
        rewards.append(round(metrics["reward"], 3))
    names = "tokens completion_length seconds_rollout seconds_update sampler_gap peak_memory_reserved_gb peak_memory_gb"
    found = {name: metrics[name] for name in names.split()}
    found |= {name: getattr(run.config, name) for name in ("rollout_tokens", "micro_batch_tokens", "dtype")}
    if torch.cuda.is_available():
        found["gpu_memory_gb"] = torch.cuda.mem_get_info()[1] / 1e9
    found["ms_per_decode_step"] = 1000 * metrics["seconds_rollout"] / len(decode_calls)
    for part in ("rollout", "update"):
        found[f"tokens_per_second_{part}"] = metrics["tokens"] / metrics[f"seconds_{part}"]
    return found | {"rewards": rewards}


def gpu_tests() -> str:
    """Return the last line of `pytest -m gpu`. The tests start ranks of their own, so they must not inherit the
    environment variables that torchrun has set for this rank."""
    env = {name: x for name, x in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_"))}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
    shown = subprocess.run(command, env=env, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    return (shown.stdout.strip().splitlines() or [shown.stderr[-300:]])[-1]


def main(words: list[str]) -> None:
    device = ranks.start(shard=True)  # needed for the kind "sharded", and harmless for the others
    found = run_folder.provenance() | {"settings": words, "ranks": ranks.world()}
    found["pytest -m gpu"] = ranks.on_first(gpu_tests)
    for kind, (flags, steps) in KINDS.items():
        found[kind] = measure([*words, *flags.split()], steps, device)  # a failure ends the program on all ranks
        if ranks.rank() == 0:
            report(found)


def report(found: dict) -> None:
    """Print what was measured so far, and write it to the files. If a later kind of run fails, it stays there."""
    kinds = [kind for kind in KINDS if kind in found]
    text = [f"{name}: {x}" for name, x in found.items() if name not in kinds]
    text += [f"{kind}, {name}: {x}" for kind in kinds for name, x in found[kind].items()]
    run_folder.write_text(Path("first_hour.json"), json.dumps(found, indent=1))
    run_folder.write_text(Path("first_hour.txt"), "\n".join([*text, ""]))
    print(*text, "all of this is in first_hour.json and first_hour.txt", sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
