"""Measures this codebase against the plain way of doing the same work.

    python bench.py logprobs                    log-probs of completions: this codebase against full logits
    python bench.py logprobs --autocast         the same under bf16 autocast; runs on a GPU where there is one

Every measurement runs in a process of its own, the ways in alternation. A table is printed, and one line of JSON with
command, commit, versions and hardware is appended to results/bench.jsonl.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

import logprob

HERE = Path(__file__).parent
LOG = HERE / "results" / "bench.jsonl"


# log-probs


def token_logprobs_way(model: nn.Module, ids: Tensor, completion: Tensor, args: argparse.Namespace) -> Tensor:
    chunk = {} if args.chunk_tokens is None else {"chunk_tokens": args.chunk_tokens}
    return logprob.token_logprobs(model, ids, torch.ones_like(ids), completion, **chunk)[0]


def full_logits_way(model: nn.Module, ids: Tensor, completion: Tensor, args: argparse.Namespace) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2) * completion[:, 1:]


LOGPROB_WAYS = {"token_logprobs": token_logprobs_way, "full logits": full_logits_way}


def measure_logprobs(way: str, args: argparse.Namespace) -> dict[str, float]:
    """One process's figures, per forward and backward pass: seconds, CPU-seconds, peak memory above the model.

    The model is its weights and their gradients, both there (and touched) before the measurement begins. Above it:
    whatever else the process holds at its worst moment, activations, logits and gradients in transit.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=args.prompt + args.tokens,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(args.vocab, (args.rows, args.prompt + args.tokens), device=device)
    completion = torch.ones_like(ids)
    completion[:, : args.prompt] = 0
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).zero_()

    def run(ids: Tensor, completion: Tensor) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=args.autocast):
            logp = LOGPROB_WAYS[way](model, ids, completion, args)
        logp.sum().backward()

    few = args.prompt + 8
    run(ids[:1, :few], completion[:1, :few])  # libraries loaded, the output head tried
    if device == "cuda":
        run(ids, completion)
    return measure(lambda: run(ids, completion), device, args.passes)


def report_logprobs(args: argparse.Namespace) -> None:
    about = circumstances()
    results = alternate(list(LOGPROB_WAYS), args.repeats)
    print(f"forward and backward, {args.rows} x {args.tokens} tokens, vocabulary {args.vocab:,}, hidden {args.hidden};")
    print("medians and ranges; memory is the peak above weights and gradients")
    ratios = compare(results, of="token_logprobs", to="full logits")
    append_to_log(about | {"results": results, "ratios": ratios})


# Measuring


def measure(run: Callable[[], None], device: str, passes: int) -> dict[str, float]:
    before = reset_peak_memory(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(passes):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = (time.perf_counter() - wall) / passes, (time.process_time() - cpu) / passes
    return {
        "seconds": round(seconds, 4),
        "cpu_seconds": round(cpu_seconds, 4),
        "memory_gb": round((peak_memory(device) - before) / 1e9, 4),
    }


def reset_peak_memory(device: str) -> int:
    """-> bytes held now. On a CPU the process's resident memory as Linux counts it, on a GPU PyTorch's allocations."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak, VmHWM, to what is held now
    return status("VmRSS")


def peak_memory(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else status("VmHWM")


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def alternate(ways: list[str], repeats: int) -> dict[str, dict[str, list[float]]]:
    """This script again, with the same flags, for one way at a time: A B A B ... -> way: figure: all its values."""
    results = {way: {} for way in ways}
    for _ in range(repeats):
        for way in ways:
            child = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True)
            for name, value in json.loads(done.stdout.splitlines()[-1]).items():
                results[way].setdefault(name, []).append(value)
    return results


def compare(results: dict[str, dict[str, list[float]]], of: str, to: str) -> dict[str, float]:
    """Prints medians, spreads and the ratio of one way's medians to another's. -> the ratios"""
    names = list(results[of])
    print(f"{'':16}" + "".join(f"{name:>26}" for name in names))
    for way, figures in results.items():
        cells = (f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in figures.values())
        print(f"{way:16}" + "".join(f"{cell:>26}" for cell in cells))
    ratios = {name: statistics.median(results[of][name]) / statistics.median(results[to][name]) for name in names}
    print(f"{'ratio':16}" + "".join(f"{ratio:>26.3f}" for ratio in ratios.values()))
    return {name: round(ratio, 4) for name, ratio in ratios.items()}


def append_to_log(entry: dict) -> None:
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(f"appended to {LOG.relative_to(HERE)}")


def circumstances() -> dict:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", Path(__file__).name, *sys.argv[1:]]),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
    }


def commit() -> str:
    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", HERE, *args], capture_output=True, text=True).stdout.strip()

    return (git("rev-parse", "--verify", "-q", "HEAD") or "none") + (
        "-dirty" if git("status", "--porcelain", "--", ".", ":!results") else ""
    )


def hardware() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    models = [x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x]
    return f"{len(os.sched_getaffinity(0))} CPU cores, {models[0] if models else platform.machine()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    logprobs = commands.add_parser("logprobs", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    logprobs.add_argument("--rows", type=int, default=4, help="completions")
    logprobs.add_argument("--tokens", type=int, default=512, help="of each completion")
    logprobs.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    logprobs.add_argument("--vocab", type=int, default=151_936)
    logprobs.add_argument("--hidden", type=int, default=512)
    logprobs.add_argument("--layers", type=int, default=1, help="few, so that the output head dominates")
    logprobs.add_argument("--chunk_tokens", type=int, help="None: as token_logprobs has it")
    logprobs.add_argument("--autocast", action="store_true", help="bf16 autocast; else fp32")
    logprobs.add_argument("--repeats", type=int, default=5, help="processes for each way")
    logprobs.add_argument("--passes", type=int, default=1, help="measured in each process")
    logprobs.add_argument("--way", choices=LOGPROB_WAYS, help="measure this one here and print JSON")
    args = parser.parse_args()

    if args.way is None:
        report_logprobs(args)
    else:
        print(json.dumps(measure_logprobs(args.way, args)))


if __name__ == "__main__":
    main()
