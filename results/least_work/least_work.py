"""The least CPU time that the steps of `tools.bench step` could take on this machine, next to the time that they took.

    OMP_NUM_THREADS=1 python results/least_work/least_work.py 8,40,32 6,90,48 3,12,96 > results/least_work/least_work.md

Each shape is given as prompts, tokens of a prompt, limit of a completion. There are 8 completions for each prompt, and
their lengths are those of `tools.bench step`. The least work of an update is the arithmetic of its matrix products and
of attention, at the rate that this core reaches for products of the model's shapes, and the bytes that the optimizer
must read and write, at this core's memory bandwidth. The times that the steps took are those in results/step_NxG/.
Every prompt and every token is read once. The least work of a rollout is reading the prompts, and for each token the
longer of two times: the arithmetic of all unfinished rows, or reading all weights once. Everything else counts as 0:
softmax, norms, activations, the cache, sampling, Python.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train
from infra import command_line, run_folder
from tools import ablate, bench


def rate_of(weights: list[Tensor], tokens: int) -> float:
    """Return the floating-point operations per CPU-second of multiplying this many tokens by each of these weights."""
    inputs = [torch.randn(tokens, weight.shape[1]) for weight in weights]
    best = []
    for weight, x in zip(weights, inputs):
        times = []
        for _ in range(5):
            start = time.process_time()
            F.linear(x, weight)
            times.append(time.process_time() - start)
        best.append(min(times))
    return sum(2 * tokens * weight.numel() for weight in weights) / sum(best)


def bandwidth() -> float:
    """Return the bytes per CPU-second of reading memory that is larger than the cache."""
    x, times = torch.ones(1 << 27), []
    for _ in range(5):
        start = time.process_time()
        x.sum()
        times.append(time.process_time() - start)
    return 4 * len(x) / min(times)


def least_work(shape: str) -> list[str]:
    prompts, prompt_tokens, limit = shape.split(",")
    flags = ["--prompts_per_step", prompts, "--max_completion_length", limit]
    args = bench.parse(["step", "--out", tempfile.mkdtemp(), "--prompt_tokens", prompt_tokens, "--", *flags])
    config = command_line.ready(command_line.parse([*args.flags, "--out", str(args.out)], on_gpu=False), on_gpu=False)
    run = train.set_up(config, torch.device("cpu"))[0]
    tokens = bench.plan_step(run, args)
    lengths = (tokens != run.tokenizer.pad_token_id).sum(1)

    head = run.model.get_output_embeddings().weight.detach()
    layers = [
        x.weight.detach() for x in run.model.modules() if isinstance(x, nn.Linear) and x.weight.shape != head.shape
    ]
    rate, head_rate, bytes_per_second = rate_of(layers[:7], 1024), rate_of([head], 256), bandwidth()
    P, p, N, n = int(prompts), int(prompt_tokens), len(lengths), int(lengths.sum())
    n_layers, hidden = run.model.config.num_hidden_layers, run.model.config.hidden_size
    W, H = sum(weight.numel() for weight in layers), head.numel()

    pairs = P * p * p / 2 + float((lengths * (p + lengths / 2)).sum())  # of a token and one that it sees
    update = 3 * 2 * W * (P * p + n - N) / rate  # a forward product, and two backward
    update += 3 * 2 * H * n / head_rate
    update += 3 * 4 * n_layers * hidden * pairs / rate
    update += sum(x.numel() for x in run.model.parameters()) * 32 / bytes_per_second  # 8 numbers for each parameter
    rollout = 2 * (W * P * p + H * P) / rate
    for t in range(1, int(limit)):
        rows = int((lengths > t).sum())
        rollout += max(4 * (W + H) / bytes_per_second, 2 * rows * (W + H) / rate) if rows else 0.0
    speed = f"{rate / 1e9:.0f}, {head_rate / 1e9:.0f} GFLOP/s (layers, head), {bytes_per_second / 1e9:.1f} GB/s"
    print(f"{shape}: {n} tokens; {speed}", file=sys.stderr)
    cells = [f"{P} × 8, {p}, {limit}"]
    for part, least in (("rollout", rollout), ("update", update)):
        cells += [f"{seconds(P, way, part):.1f}" for way in ("ours", "TRL-plain-head")] + [f"{least:.1f}"]
    return [*cells, f"{seconds(P, 'ours', 'step') / seconds(P, 'TRL-plain-head', 'step'):.2f}"]


def seconds(prompts: int, way: str, part: str) -> float:
    """Return the mean CPU-seconds of a part of a step, without the first step, which only warms up."""
    logs = Path(f"results/step_{prompts}x8").glob(f"{way}-*/metrics.jsonl")
    return statistics.fmean(line[f"seconds_{part}"] for log in logs for line in run_folder.read_lines(log)[1:])


if __name__ == "__main__":
    titles = [
        "prompts × completions, prompt tokens, completion limit",
        "rollout: ours",
        "rollout: TRL",
        "rollout: least",
        "update: ours",
        "update: TRL",
        "update: least",
        "step: ours / TRL",
    ]
    print(ablate.markdown(titles, *map(least_work, sys.argv[1:])))
    print(f"\n{json.dumps(run_folder.provenance())}")
