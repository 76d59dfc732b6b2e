"""Measures this codebase: a step against TRL, log-probs against full logits.

    python -m tools.bench step                           the same work, done by ours and by TRL
    python -m tools.bench step --size 50m --equal        a large vocabulary; completions of equal length
    python -m tools.bench step --ways "ours; ../before"  ours, and ours in another checkout
    python -m tools.bench logprobs                       log-probs of completions: ours, and from full logits

Needs tools/requirements-bench.txt. Each measurement runs in a process of its own, the contestants in turn. A line of
JSON with command, commit, versions and hardware is appended to results/bench.jsonl, and its table is printed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from tools.bench_work import DEVICE, SIZES, WAYS
from tools.evidence import BENCH_LOG, ROOT, measurement_table


def measure_all(args: argparse.Namespace) -> dict:
    """-> what is measured, as it goes into the log"""
    results, facts = measure_in_turn(args.ways.split("; ") if args.ways else [*WAYS[args.what]], args.repeats)
    if args.what == "logprobs":
        return {"results": results}
    check_same_work(facts)
    work = {name: getattr(args, name) for name in ("size", "prompts", "group", "limit")}
    work |= {"lengths": "equal" if args.equal else "ragged", "tokens": facts["ours"]["trained"]}
    return work | {"results": results, "facts": facts}


def measure_in_turn(ways: list[str], repeats: int) -> tuple[dict, dict]:
    """A B A B ... -> for each way all values of each figure, and its facts"""
    results, facts = {way: {} for way in ways}, {}
    for _ in range(repeats):
        for way in ways:
            figures, facts[way] = measure_one(way)
            for name, values in figures.items():
                results[way].setdefault(name, []).extend(values)
    return results, facts


def measure_one(way: str) -> tuple[dict, dict]:
    """The same command in a process of its own. A way that is a folder is ours in that checkout."""
    root, way = (Path(way), "ours") if Path(way).is_dir() else (ROOT, way)
    command = [sys.executable, "-m", "tools.bench", *sys.argv[1:], "--way", way]
    ended = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(ended.stdout.splitlines()[-1]))


def check_same_work(facts: dict[str, dict]) -> None:
    norms, tolerance = facts["ours"]["grad_norm"], 1e-2 if DEVICE == "cuda" else 1e-3
    for way, its in facts.items():
        same = np.allclose(its["grad_norm"], norms, rtol=tolerance) or "continuous" in way
        if not same or its["trained"] != facts["ours"]["trained"]:
            raise SystemExit(f"not the same work: {way} {its}, ours {facts['ours']}")


def circumstances() -> dict:
    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!results")
    cpu = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), platform.machine())
    cpus = f"{len(os.sched_getaffinity(0))} CPU cores, {cpu.split(':')[-1].strip()}"
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m tools.bench", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD") + ("-dirty" if changed else ""),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
        "hardware": torch.cuda.get_device_name() if DEVICE == "cuda" else cpus,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("--size", choices=SIZES, default="12m")
    parser.add_argument("--prompts", type=int, help="of a step; default by size")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--limit", type=int, help="tokens of a completion, at most; default by size")
    parser.add_argument("--equal", action="store_true", help="all completions are as long as that")
    parser.add_argument("--ways", help="what is measured, with '; ' between; default all")
    parser.add_argument("--steps", type=int, default=2, help="measured in each process, after one that warms up")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each")
    parser.add_argument("--log", type=Path, default=ROOT / BENCH_LOG, help="where the line of JSON goes")
    parser.add_argument("--way", choices={**WAYS["step"], **WAYS["logprobs"]}, help="this one, here")
    args = parser.parse_args()
    args.prompts = args.prompts or SIZES[args.size].prompts
    args.limit = args.limit or SIZES[args.size].limit
    if args.way:
        print(json.dumps(WAYS[args.what][args.way](args)))
        return
    entry = circumstances() | measure_all(args)
    with args.log.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(measurement_table(entry))


if __name__ == "__main__":
    main()
