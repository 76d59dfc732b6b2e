"""The first hour on a GPU: does training work, does it stay within the memory, how fast is it, does it learn, and does
the same command give the same numbers?

    python -m tools.first_hour                                  a small model from this repository, and one of 0.5B
    torchrun --nproc_per_node 8 -m tools.first_hour --model Qwen/Qwen2.5-0.5B-Instruct --task gsm8k

It takes every setting of train.py. It prints what it measures, and writes it to first_hour.txt in the current
directory. docs/distributed.md says how to read it. Please send us this file.
"""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

import train
from infra import ranks, run_folder
from infra.command_line import parse, ready
from infra.decoding import sync_debug_mode
from tasks import addition
from tasks._characters import EOS_ID, char_tokenizer

# For each kind of run: its flags, and the hidden size from which it is decided which completions share a row in an
# update. None: none do. A very large one: all of a prompt do. "own": the model's, as in any run.
KINDS = {
    "plain": ("--decode plain", "own"),
    "graph": ("--decode graph", "own"),
    "separate rows": ("--decode graph", None),
    "shared rows": ("--decode graph", 10**7),
    "sharded": ("--decode plain --shard", "own"),
}
STEPS = {"plain": 20}  # of the small model, to see whether it learns; all others make 3
# The model of 0.5B has random weights, so no answer is right, and only the sampler term gives it a gradient.
LARGER = "--sampler_coef 1e-6 --max_completion_length 256"


def larger_model(config: object) -> tuple:
    """Make a model with the shape of Qwen2.5-0.5B and random weights."""
    sizes = dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14)
    shape = Qwen2Config(
        **sizes, num_key_value_heads=2, vocab_size=151936, tie_word_embeddings=True, eos_token_id=EOS_ID
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(shape), char_tokenizer(addition.ALPHABET)


def measure(
    words: list[str], steps: int, hidden_size: str | int | None, device: torch.device
) -> tuple[dict, list[dict]]:
    """Train for some steps. Return what the last one shows of time and memory, and the metrics of all steps."""
    config = ready(parse(words, torch.cuda.is_available()), torch.cuda.is_available())
    run, *_ = train.set_up(config, device)
    if hidden_size != "own":
        run.limits = replace(run.limits, hidden_size=hidden_size, least_prompt=0.0)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        sync_debug_mode(1)  # each wait for the GPU is a warning
    lines = []
    for step in range(1, steps + 1):
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            metrics, groups = train.training_step(run, step)
        lines.append(metrics)
    longest = max(len(completion.ids) for group in groups for completion in group.completions)
    names = "tokens completion_length seconds_rollout seconds_update sampler_gap peak_memory_reserved_gb peak_memory_gb"
    found = {name: metrics[name] for name in names.split()}
    found |= {name: getattr(run.config, name) for name in ("rollout_tokens", "micro_batch_tokens", "dtype")}
    if torch.cuda.is_available():
        sync_debug_mode(0)
        found["gpu_memory_gb"] = torch.cuda.mem_get_info()[1] / 1e9
    if run.config.decode == "plain":  # a graph switches the warnings off
        found["waits_per_token"] = len(waits) / longest
    found["ms_per_decode_step"] = 1000 * metrics["seconds_rollout"] / longest
    for part in ("rollout", "update"):
        found[f"tokens_per_second_{part}"] = metrics["tokens"] / metrics[f"seconds_{part}"]
    return found | {"rewards": [round(line["reward"], 3) for line in lines]}, lines


def first_difference(words: list[str], steps: int, device: torch.device) -> str:
    """Make some steps twice, with one seed, and name the first metric that differs."""
    one, two = (measure(words, steps, "own", device)[1] for _ in range(2))
    for line, other in zip(one, two, strict=True):
        for name in ("reward", "tokens", "loss", "grad_norm", "sampler_gap"):
            if line[name] != other[name]:
                return f"step {line['step']}, {name}: {line[name]} and {other[name]}"
    return f"none in {steps} steps"


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
    report(found)
    for larger in (False, True) if parse(words, torch.cuda.is_available()).model is None else (False,):
        if larger:
            addition.model = larger_model
        size, more = ("0.5B ", LARGER.split()) if larger else ("", [])
        # In rows of more than about a hundred tokens, as the larger model's, attention's backward pass may add in
        # another order each time.
        difference = first_difference([*more, *words, "--decode", "plain"], 2 if larger else 5, device)
        found[f"{size}first difference of two runs"] = difference
        for kind, (flags, hidden_size) in KINDS.items():
            steps = 3 if larger else STEPS.get(kind, 3)
            found[size + kind], _ = measure([*more, *words, *flags.split()], steps, hidden_size, device)
            report(found)  # a failure later ends all ranks
        speeds = {kind: found[f"{size}{kind} rows"]["tokens_per_second_update"] for kind in ("separate", "shared")}
        found[f"{size}faster update"] = f"{max(speeds, key=speeds.get)} rows"
        report(found)


def report(found: dict) -> None:
    """Print what was measured so far, and write it to the file. If a later kind of run fails, it stays there."""
    if ranks.rank() == 0:
        text = []
        for name, x in found.items():
            text += [f"{name}, {part}: {y}" for part, y in x.items()] if isinstance(x, dict) else [f"{name}: {x}"]
        run_folder.write_text(Path("first_hour.txt"), "\n".join([*text, ""]))
        print(*text, "all of this is in first_hour.txt", sep="\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
