"""Print the least CPU time that the steps of `bench.against_trl step` could take on this machine, next to the time that
our code and TRL took, which is read from results/step_NxG/.

    OMP_NUM_THREADS=1 python results/least_work/least_work.py 8,40,32 6,90,48 3,12,96 > results/least_work/least_work.md

Each shape is given as prompts, tokens of a prompt, limit of a completion. There are 8 completions for each prompt, and
their lengths are those of `bench.against_trl step`.

An update reads each prompt once for all of its completions, and each completion once. The least time is a sum:
the time for the matrix products and for attention, at the rate that this core reaches for products of the model's
shapes, and the time for the optimizer's reads and writes, at this core's memory bandwidth.

A rollout reads each prompt once, and then generates the completions position by position. At each position, the least
time is the longer of two: that of the matrix products for all unfinished completions, or that of reading all weights
once. Attention is counted in updates only.

Everything else counts as 0: softmax, norms, activations, the cache, sampling, Python.
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
from bench import against_trl, logs
from infra import command_line, run_folder
from tools import ablate


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
    """Return the row of the table for one shape."""
    prompts, prompt_tokens, limit = map(int, shape.split(","))
    flags = ["--prompts_per_step", f"{prompts}", "--max_completion_length", f"{limit}"]
    args = against_trl.parse(["step", "--out", tempfile.mkdtemp(), "--prompt_tokens", f"{prompt_tokens}", "--", *flags])
    config = command_line.ready(command_line.parse([*args.flags, "--out", str(args.out)], on_gpu=False), on_gpu=False)
    run = train.set_up(config, torch.device("cpu"))[0]
    completions = against_trl.plan_step(run, args)
    lengths = (completions != run.tokenizer.pad_token_id).sum(1)

    head = run.model.get_output_embeddings().weight.detach()
    layers = [
        x.weight.detach() for x in run.model.modules() if isinstance(x, nn.Linear) and x.weight.shape != head.shape
    ]
    # The first seven linear layers are those of one block, and all blocks have the same shapes. A full micro-batch has
    # roughly 1,024 tokens, and 256 tokens go through the output head at once (logprob.chunk_tokens).
    rate, head_rate = rate_of(layers[:7], 1024), rate_of([head], 256)
    bytes_per_second = bandwidth()
    all_prompt_tokens, completion_tokens = prompts * prompt_tokens, int(lengths.sum())
    n_layers, hidden = run.model.config.num_hidden_layers, run.model.config.hidden_size
    layer_weights, head_weights = sum(weight.numel() for weight in layers), head.numel()

    # A matrix product takes 2 operations for each weight and token. An update has 3 products: 1 forward and 2 backward.
    # The last token of each completion is predicted, but it is not an input.
    input_tokens = all_prompt_tokens + completion_tokens - len(lengths)
    update = 3 * 2 * layer_weights * input_tokens / rate
    update += 3 * 2 * head_weights * completion_tokens / head_rate
    # Attention has 2 products, so it takes 4 operations for each hidden dimension and each pair of a token and an
    # earlier token that it sees.
    pairs = all_prompt_tokens * prompt_tokens / 2 + float((lengths * (prompt_tokens + lengths / 2)).sum())
    update += 3 * 4 * n_layers * hidden * pairs / rate
    # For each parameter, the gradient is written and read, and the weight and both moments are read and written: that
    # is 8 numbers of 4 bytes.
    update += sum(x.numel() for x in run.model.parameters()) * 8 * 4 / bytes_per_second

    # Reading the prompts also gives the first token of each completion.
    rollout = 2 * (layer_weights * all_prompt_tokens + head_weights * prompts) / rate
    weights = layer_weights + head_weights
    for position in range(1, limit):
        unfinished = int((lengths > position).sum())
        if unfinished:
            rollout += max(4 * weights / bytes_per_second, 2 * unfinished * weights / rate)

    speed = f"{rate / 1e9:.0f}, {head_rate / 1e9:.0f} GFLOP/s (layers, head), {bytes_per_second / 1e9:.1f} GB/s"
    print(f"{shape}: {completion_tokens} tokens; {speed}", file=sys.stderr)
    cells = [f"{prompts} × 8, {prompt_tokens}, {limit}"]
    for part, least in (("rollout", rollout), ("update", update)):
        cells += [f"{seconds(prompts, way, part):.1f}" for way in ("ours", "TRL-plain-head")] + [f"{least:.1f}"]
    return [*cells, f"{seconds(prompts, 'ours', 'step') / seconds(prompts, 'TRL-plain-head', 'step'):.2f}"]


def seconds(prompts: int, way: str, part: str) -> float:
    """Return the mean CPU-seconds of a part of a step, without the first step, which only warms up."""
    runs = [run for name, run in logs.read(Path(f"results/step_{prompts}x8")).items() if name.startswith(f"{way}-")]
    return statistics.fmean(line[f"seconds_{part}"] for run in runs for line in run.lines[1:])


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
