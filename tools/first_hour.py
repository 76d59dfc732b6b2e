"""The first run on a GPU: does it work, how much memory does it use compared with the plan, and how fast is it? Paste
the output into an issue.

    python -m tools.first_hour                                  a small model from this repository
    python -m tools.first_hour --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k      or any settings of train.py
"""

import json
import sys
import tempfile

import torch

import train
from infra import ranks, run_folder
from infra.command_line import parse, ready

STEPS = 3  # only the last one is reported


def figures(words: list[str]) -> dict:
    config = ready(parse(words, torch.cuda.is_available()), torch.cuda.is_available())
    run, *_ = train.set_up(config, ranks.start(config.shard))  # prints the memory plan
    decoded: list[int] = []
    run.progress = lambda tokens, rows: decoded.append(tokens)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    for step in range(1, STEPS + 1):
        decoded.clear()
        metrics, _ = train.training_step(run, step)
    names = "tokens", "peak_memory_gb", "peak_memory_reserved_gb", "sampler_gap", "seconds_rollout", "seconds_update"
    found = {name: metrics[name] for name in names} | {"dtype": config.dtype}
    found["ms_a_decode_step"] = 1000 * metrics["seconds_rollout"] / len(decoded)
    for part in ("rollout", "update"):
        found[f"tokens_per_second_{part}"] = metrics["tokens"] / metrics[f"seconds_{part}"]
    return found


def main(words: list[str]) -> None:
    print(json.dumps(run_folder.provenance(), indent=1))
    for decode in ("plain", "graph"):
        with tempfile.TemporaryDirectory() as folder:
            print(decode, json.dumps(figures([*words, "--decode", decode, "--out", f"{folder}/out"]), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
