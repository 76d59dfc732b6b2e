"""Measures this codebase: against TRL on the same work, and against what the work itself should cost.

    python bench.py step                      a GRPO step, this codebase and TRL side by side (requirements-bench.txt)
    python bench.py step --size 50m --equal   a large vocabulary; completions of equal length
    python bench.py scaling                   the cost of a step against its tokens, and a plot of it
    python bench.py overhead                  what the default run does besides rollout, forward, backward, optimizer
    python bench.py logprobs                  log-probs of completions: this codebase against full logits
    python bench.py table                     the README's tables, from the log

Every measurement runs in a process of its own, the contestants in alternation. A table is printed, and one line of
JSON with command, commit, versions and hardware is appended to results/bench.jsonl.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import logprob
import train
from infra import command_line as checks
from tools.bench_work import (
    CONTESTANTS,
    DEVICE,
    PHASES,
    SIZES,
    Clock,
    Figures,
    measure,
    measure_step,
    our_run,
    peak_memory,
    plan_work,
    reset_peak_memory,
    watch,
)

HERE = Path(__file__).parent.parent
LOG = HERE / "results" / "bench.jsonl"


# ---- A step ----


def report_step(args: argparse.Namespace) -> None:
    about = circumstances()
    results, facts = alternate(args.ways.split("; "), args.repeats)
    for way, its in facts.items():
        norms, tolerance = [its["grad_norm"], facts["ours"]["grad_norm"]], 1e-2 if DEVICE == "cuda" else 1e-3
        same = np.allclose(*norms, rtol=tolerance) or "continuous" in way  # its tokens are not forced
        if its["settings"] != facts["ours"]["settings"] or not same:
            raise SystemExit(f"not the same work: {way} {its}, ours {facts['ours']}")
    tokens = facts["ours"]["trained"]
    lengths = "equal" if args.equal else "ragged"
    print(
        f"{args.size}, {args.prompts} prompts x {args.group}, {lengths} lengths to {args.limit}: {tokens} tokens a step"
    )
    print("medians and ranges; memory is the peak above the model")
    names = [f"{phase}{unit}" for unit in ("", "_cpu") for phase in PHASES] + ["memory_gb"]
    ratios = {way: compare(results, "ours", way, names) for way in facts if way != "ours"}
    for way, its in facts.items():
        rollout, step = (statistics.median(results[way][name]) for name in ("rollout", "step"))
        print(f"{way}: {tokens / rollout:,.0f} generated, {tokens / step:,.0f} trained tokens a second; {its['about']}")
        if DEVICE == "cuda":
            update = statistics.median(results[way]["update"])
            share = its["update_limit"] / update
            print(f"  decode {rollout / its['decode_limit']:.1f} x its limit, update {share:.0%} of the matrix rate")
    work = {name: getattr(args, name) for name in ("size", "prompts", "group", "prompt", "limit")}
    append_to_log(
        about | work | {"lengths": lengths, "tokens": tokens, "results": results, "ratios": ratios, "facts": facts}
    )


# ---- Scaling ----


def measure_scaling(args: argparse.Namespace) -> tuple[Figures, dict]:
    """A step of 8 completions to warm up, and the step itself."""
    args.prompts, args.equal = args.completions // args.group, False
    work, clock, memory = plan_work(args), Clock(), {}
    run = our_run(work, args)
    before = reset_peak_memory(DEVICE)
    for name in ("rollout", "update"):
        watch(train, name, lambda result, *args, name=name: memory.update({name: peak_memory(DEVICE)}))
        clock.wrap(train, name, name)
    watch(train, "collate", lambda result, *args: reset_peak_memory(DEVICE))
    for prompts in (1, args.prompts):
        run.config.prompts_per_step = prompts
        reset_peak_memory(DEVICE)
        clock.call("step", train.training_step, run, 1, 0)
        clock.end_step()
    peaks = {f"memory_{name}": [(peak - before) / 1e9] for name, peak in memory.items()}
    prompts, completions = sum(len(prompt.split()) for prompt in work.prompts), sum(work.lengths)
    tokens = {"tokens_rollout": [prompts + completions], "tokens_update": [args.group * prompts + completions]}
    return clock.figures(1) | peaks | tokens, {}


def report_scaling(args: argparse.Namespace) -> None:
    about, points = circumstances(), []
    series = [(n, 256) for n in (8, 16, 32, 64, 128, 256, 512)] + [(32, limit) for limit in (64, 128, 512, 1024)]
    names = [
        "completions",
        "limit",
        "tokens_rollout",
        "rollout_cpu",
        "tokens_update",
        "update_cpu",
        "memory_rollout",
        "memory_update",
    ]
    print("".join(f"{name:>15}" for name in names))
    for completions, limit in series:
        figures, _ = child("--way", "ours", "--completions", str(completions), "--limit", str(limit))
        points.append({"completions": completions, "limit": limit} | {name: v[0] for name, v in figures.items()})
        print("".join(f"{points[-1][name]:>15.5g}" for name in names))
    append_to_log(about | {"size": args.size, "points": points})
    plot_scaling(points, LOG.parent / "scaling.png")


def plot_scaling(points: list[dict], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    unit = "" if DEVICE == "cuda" else "_cpu"
    figure, (cost, memory) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for marker, label, chosen in (
        ("o", "8 to 512 completions to 256", [p for p in points if p["limit"] == 256]),
        ("s", "32 completions, to 64 ... 1024", [p for p in points if p["completions"] == 32]),
    ):
        for color, name in (("#0072B2", "rollout"), ("#D55E00", "update")):
            chosen = sorted(chosen, key=lambda p: p[f"tokens_{name}"])
            tokens, style = [p[f"tokens_{name}"] for p in chosen], dict(color=color, marker=marker)
            cost.loglog(tokens, [p[name + unit] for p in chosen], label=f"{name}, {label}", **style)
            memory.semilogx(tokens, [p[f"memory_{name}"] for p in chosen], **style)
    ends = sorted(p["tokens_update"] for p in points)[:: len(points) - 1]
    middle = statistics.median(p["update" + unit] / p["tokens_update"] for p in points)
    cost.loglog(ends, [middle * n for n in ends], "k:", label="proportional")
    cost.set(ylabel="seconds" if DEVICE == "cuda" else "CPU-seconds")
    memory.set(ylabel="peak memory above the model, GB", ylim=(0, None))
    for axes in (cost, memory):
        axes.set_xlabel("tokens of the phase: prompts once in the rollout, in each row of the update")
        axes.xaxis.label.set_size(8)
    cost.legend(fontsize=7)
    figure.savefig(file, dpi=120)


# ---- Overhead ----


def measure_overhead(args: argparse.Namespace) -> tuple[Figures, dict]:
    """The default run's steps, with its files and lines, from the third on."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = train.set_up(checks.parse(["--out", folder], DEVICE == "cuda"), 0, 1, torch.device(DEVICE))
        run.model.generation_config = transformers.GenerationConfig()
        for name, phase in (("rollout", "rollout"), ("score_rows", "forward"), ("policy_loss", "forward")):
            clock.wrap(train, name, phase)
        clock.wrap(torch.Tensor, "backward", "backward")
        clock.wrap(torch.nn.utils, "clip_grad_norm_", "optimizer")
        clock.wrap(torch.optim.AdamW, "step", "optimizer")

        def whole_step(step: int) -> None:
            metrics, groups, _ = train.training_step(run, step, 16 * step)
            run.show.step(metrics, groups)

        for step in range(2 + args.steps):
            clock.call("step", whole_step, step + 1)
            clock.end_step()
    return clock.figures(2), {}


def report_overhead(args: argparse.Namespace) -> None:
    about = circumstances()
    figures, _ = child("--way", "ours")
    unit = "" if DEVICE == "cuda" else "_cpu"
    sums = {phase: sum(values) for phase in (*PHASES, "step") if (values := figures.get(phase + unit))}
    shares = {phase: value / sums["step"] for phase, value in sums.items() if phase != "step"}
    shares["overhead"] = 1 - sum(shares.values())
    print(
        f"{args.steps} steps of the default run: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    )
    append_to_log(about | {"shares": {name: round(share, 4) for name, share in shares.items()}, "results": figures})


# ---- Log-probs ----


def token_logprobs_way(model: nn.Module, ids: Tensor, completion: Tensor, args: argparse.Namespace) -> Tensor:
    chunk = {} if args.chunk_tokens is None else {"chunk_tokens": args.chunk_tokens}
    return logprob.token_logprobs(model, ids, torch.ones_like(ids), completion, **chunk)[0]


def full_logits_way(model: nn.Module, ids: Tensor, completion: Tensor, args: argparse.Namespace) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2) * completion[:, 1:]


LOGPROB_WAYS = {"token_logprobs": token_logprobs_way, "full logits": full_logits_way}


def measure_logprobs(args: argparse.Namespace) -> tuple[Figures, dict]:
    """One process's figures, per forward and backward pass: seconds, CPU-seconds, peak memory above the model.

    The model is its weights and their gradients, both there (and touched) before the measurement begins. Above it:
    whatever else the process holds at its worst moment, activations, logits and gradients in transit.
    """
    torch.manual_seed(0)
    settings = transformers.Qwen2Config(
        vocab_size=args.vocab, hidden_size=args.hidden, intermediate_size=2 * args.hidden, num_attention_heads=8,
        num_hidden_layers=args.layers, num_key_value_heads=8, max_position_embeddings=args.prompt + args.tokens,
    )  # fmt: skip
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(settings)
    ids = torch.randint(args.vocab, (args.rows, args.prompt + args.tokens), device=DEVICE)
    completion = torch.ones_like(ids)
    completion[:, : args.prompt] = 0
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter).zero_()

    def run(ids: Tensor, completion: Tensor) -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=args.autocast):
            logp = LOGPROB_WAYS[args.way](model, ids, completion, args)
        logp.sum().backward()

    few = args.prompt + 8
    run(ids[:1, :few], completion[:1, :few])  # libraries loaded, the output head tried
    if DEVICE == "cuda":
        run(ids, completion)
    return measure(lambda: run(ids, completion), DEVICE, args.passes), {}


def report_logprobs(args: argparse.Namespace) -> None:
    about = circumstances()
    results, _ = alternate(list(LOGPROB_WAYS), args.repeats)
    print(f"forward and backward, {args.rows} x {args.tokens} tokens, vocabulary {args.vocab:,}, hidden {args.hidden};")
    print("medians and ranges; memory is the peak above weights and gradients")
    ratios = compare(results, "token_logprobs", "full logits", list(results["token_logprobs"]))
    append_to_log(about | {"results": results, "ratios": ratios})


# ---- Runs and log ----


def alternate(ways: list[str], repeats: int) -> tuple[dict[str, Figures], dict[str, dict]]:
    """Each way in turn in a process of its own: A B A B ... -> way: figure: all its values; and way: its facts"""
    results, facts = {way: {} for way in ways}, {}
    for _ in range(repeats):
        for way in ways:
            figures, facts[way] = child("--way", way)
            for name, values in figures.items():
                results[way].setdefault(name, []).extend(values)
    return results, facts


def child(*flags: str) -> tuple[Figures, dict]:
    """This script again, with the same flags and these."""
    command = [sys.executable, __file__, *sys.argv[1:], *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def compare(results: dict[str, Figures], of: str, to: str, names: list[str]) -> dict[str, float]:
    """Prints medians and spreads of the two, and the ratios of the medians. -> the ratios"""
    ratios = {}
    print(f"{'':16}{of:>28}{to:>28}{'ratio':>8}")
    for name in names:
        pair = results[of][name], results[to][name]
        ratios[name] = round(statistics.median(pair[0]) / statistics.median(pair[1]), 4)
        cells = (f"{statistics.median(v):.3f} ({min(v):.3f} to {max(v):.3f})" for v in pair)
        print(f"{name:16}" + "".join(f"{cell:>28}" for cell in cells) + f"{ratios[name]:>8.3f}")
    return ratios


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


# ---- The tables of the README ----


def report_table(args: argparse.Namespace) -> None:
    print(markdown([json.loads(line) for line in LOG.read_text().splitlines()]))


def markdown(entries: list[dict]) -> str:
    """The newest entry of each kind; ratios are ours / theirs. On a CPU the seconds are CPU-seconds."""
    newest = {(e["hardware"], e.get("size"), e.get("lengths"), e.get("limit"), kind(e)): e for e in entries}
    lines = []
    for entry in newest.values():
        lines += {"step": step_table, "scaling": scaling_table, "overhead": overhead_line}.get(
            kind(entry), lambda e: []
        )(entry)
    return "\n".join(lines)


def kind(entry: dict) -> str:
    return entry["command"].split()[2]


def step_table(entry: dict) -> list[str]:
    unit = "_cpu" if "CPU" in entry["hardware"] else ""
    names = [phase + unit for phase in PHASES] + ["memory_gb"]
    lines = [
        "",
        f"{entry['size']}, {entry['prompts']} prompts x {entry['group']}, {entry['lengths']} lengths to "
        f"{entry['limit']}, {entry['tokens']} tokens a step; {entry['hardware']}, {entry['commit'][:7]}",
        "",
        "| " + " | ".join(["", *PHASES, "tokens a second", "peak GB"]) + " |",
        "|---" * (len(PHASES) + 3) + "|",
    ]
    for way, figures in entry["results"].items():
        medians = [statistics.median(figures[name]) for name in names]
        cells = [f"{value:.2f}" for value in medians]
        cells.insert(-1, f"{entry['tokens'] / medians[-2]:,.0f}")
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    for way, ratios in entry["ratios"].items():
        cells = [f"{ratios[name]:.2f}" for name in names]
        cells.insert(-1, f"{1 / ratios[names[-2]]:.1f}")
        lines.append(f"| ours / {way} | " + " | ".join(cells) + " |")
    return lines


def scaling_table(entry: dict) -> list[str]:
    unit = "_cpu" if "CPU" in entry["hardware"] else ""
    phases = ("rollout", "update")
    names = ["completions", "limit", *(f"{x}: {y}" for x in phases for y in ("tokens", "ms a token", "GB"))]
    lines = ["", "| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for p in entry["points"]:
        cells = [p["completions"], p["limit"]]
        for phase in phases:
            tokens = p[f"tokens_{phase}"]
            cells += [tokens, f"{1e3 * p[phase + unit] / tokens:.2f}", f"{p[f'memory_{phase}']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def overhead_line(entry: dict) -> list[str]:
    return ["", "The default run: " + ", ".join(f"{name} {share:.1%}" for name, share in entry["shares"].items()) + "."]


COMMANDS = {
    "step": (measure_step, report_step),
    "scaling": (measure_scaling, report_scaling),
    "overhead": (measure_overhead, report_overhead),
    "logprobs": (measure_logprobs, report_logprobs),
    "table": (None, report_table),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, contestants: dict | tuple, **flags: tuple[Any, str]) -> None:
        made = commands.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        made.add_argument("--way", choices=contestants, help="measure this one here and print JSON")
        for flag, (default, help) in flags.items():
            kind = {"default": default, "type": str if isinstance(default, str) else int}
            made.add_argument(f"--{flag}", help=help, **({"action": "store_true"} if default is False else kind))

    shape = dict(size=("12m", " ".join(SIZES)), group=(8, "completions of each prompt"), prompt=(64, "tokens at most"))
    command(
        "step", CONTESTANTS, **shape,
        prompts=(None, "of a step; None: by size"), limit=(None, "tokens of a completion; None: by size"),
        equal=(False, "all completions as long as the limit; else ragged"),
        trl_rows=(8, "per_device_train_batch_size"), ways=("; ".join(CONTESTANTS), "contestants, with '; ' between"),
        warm_up=(1, "steps of each process before it measures"), steps=(2, "measured in each process"),
        repeats=(3, "processes of each contestant"),
    )  # fmt: skip
    command("scaling", ("ours",), **shape, completions=(8, "set for each point"), limit=(256, "set for each point"))
    command("overhead", ("ours",), steps=(10, "measured"))
    command(
        "logprobs", LOGPROB_WAYS,
        rows=(4, "completions"), tokens=(512, "of each completion"), prompt=(16, "tokens of each prompt"),
        vocab=(151_936, "rows of the head"), hidden=(512, "its columns"), layers=(1, "few, so that the head dominates"),
        chunk_tokens=(None, "None: as token_logprobs has it"), autocast=(False, "bf16 autocast; else fp32"),
        repeats=(5, "processes for each way"), passes=(1, "measured in each process"),
    )  # fmt: skip
    command("table", ())
    args = parser.parse_args()
    if args.command == "step":
        args.prompts, args.limit = args.prompts or SIZES[args.size][6], args.limit or SIZES[args.size][7]
    measure_it, report = COMMANDS[args.command]
    if args.way is None:
        report(args)
    else:
        print(json.dumps(measure_it(args)))


if __name__ == "__main__":
    main()
