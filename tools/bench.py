"""Compare this codebase with TRL: what a training step costs, and how fast each of them learns.

    python -m tools.bench step                               ours, TRL, and TRL with a plain output head
    python -m tools.bench step --ways "ours; TRL" --prompt_tokens 150 -- --prompts_per_step 8
    python -m tools.bench learn --out runs/learn --seeds 1,2,3 -- --steps 80 --eval_every 5
    python -m tools.bench long                               what a token costs in completions of up to 16,384

Install tools/requirements-bench.txt first. Flags after `--` go to train.py, and TRL gets the same settings where it has
them. Every run is a separate process, and the ways take turns.

`step` appends a line to results/bench.jsonl. Its completions are drawn in advance: both samplers do their usual work,
but the planned token has nearly all the probability. So lengths, rewards and gradients are the same in every way, and
the gradient norms are compared to make sure. In `learn`, each way samples its own completions. If `learn` is run again
with the same --out, it makes only the runs that are missing. `long` appends a line, too. Its model is tiny, so that
most of what it measures is the cost of lists, tensors and files.
"""

import argparse
import itertools
import json
import multiprocessing
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

import rollout
import train
from infra import checkpoint, command_line, report, run_folder
from tasks._characters import char_tokenizer, small_config
from tasks.sorting import LETTERS
from tools.ablate import Lines, markdown, paired

LOG = Path(__file__).parent.parent / "results" / "bench.jsonl"
ON_GPU = torch.cuda.is_available()
UNIT = "" if ON_GPU else "_cpu"  # seconds on a GPU, CPU-seconds otherwise
WAYS = ["ours", "TRL", "TRL, plain head"]
LIKELY = 60.0  # a logit; a higher one would make the other probabilities denormal, and arithmetic on those is slow
STEP = """--model models/smollm2 --task sorting --reward tasks.chain:shortness --eval_every 0 --prompts_per_step 4
    --num_generations 8 --max_completion_length 64 --learning_rate 1e-6 --warmup_steps 0 --steps 3"""
LONG = """--task sorting --reward tasks.chain:shortness --top_p 0.9 --eval_every 0 --prompts_per_step 16
    --num_generations 8 --warmup_steps 0 --steps 1 --rollout_tokens 4000000 --samples_per_step -1"""
LEARN = "--warmup_steps 0"  # because TRL's warm-up is not the same


# ---- One run ----


def measure(args: argparse.Namespace, way: str, seed: str) -> tuple[dict, Lines]:
    """Train a run. -> its settings, and a line for each step, whose cost does not include evaluation"""
    config = command_line.ready(command_line.parse([*args.flags, "--seed", seed], ON_GPU), ON_GPU)
    run, lines = train.set_up(config, torch.device("cuda" if ON_GPU else "cpu"))[0], []

    def timed(original: Callable, *args: Any, **kwargs: Any) -> Any:
        start = read_clock()
        result = original(*args, **kwargs)
        spent["rollout"] += read_clock() - start
        return result

    def end_step(metrics: dict) -> None:
        line = {"step": len(lines) + 1} | {name: metrics[name] for name in ("reward", "grad_norm", "tokens")}
        line |= {f"rollout{UNIT}": spent["rollout"], f"step{UNIT}": read_clock() - spent["start"]}
        line["seconds"] = line[f"step{UNIT}"] + sum(last["seconds"] for last in lines[-1:])  # of all steps so far
        line["memory_gb"] = gigabytes("VmHWM") - memory
        if config.eval_every and line["step"] % config.eval_every == 0:
            line |= train.evaluate(run, line["step"])[0]
        lines.append(line)
        spent.update(rollout=0.0, start=read_clock())

    if args.what == "step":
        tokens = plan_step(run, args)
        force_ours(tokens) if way == "ours" else wrap(run.model, "generate", partial(force_trl, tokens))
    if way != "ours":
        from tools.trl_side import trainer_of  # without TRL, this codebase can still be measured

        trainer = trainer_of(run, args.rows, end_step, with_plain_head=way == "TRL, plain head")
    wrap(*((train, "rollout") if way == "ours" else (run.model, "generate")), timed)
    memory, spent = gigabytes("VmRSS"), {"rollout": 0.0, "start": read_clock()}
    if way == "ours":
        for step in range(1, 1 + config.steps):
            end_step(train.training_step(run, step)[0])
    else:
        trainer.train()
    return vars(config) | {"trainer": way}, lines


def wrap(owner: Any, name: str, wrapper: Callable) -> None:
    """Replace the function `owner.name` with `wrapper`, which gets the original as its first argument."""
    setattr(owner, name, partial(wrapper, getattr(owner, name)))


def read_clock() -> float:
    """CPU-seconds, which hardly depend on what else the machine does. On a GPU, seconds."""
    (torch.cuda if ON_GPU else torch.cpu).synchronize()
    return time.perf_counter() if ON_GPU else time.process_time()


def gigabytes(kind: str) -> float:
    """The memory of this process: VmRSS is what it uses now, VmHWM its peak. On a GPU, as PyTorch counts it."""
    if ON_GPU:
        return (torch.cuda.memory_allocated() if kind == "VmRSS" else torch.cuda.max_memory_allocated()) / 1e9
    return 1024 * int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e9


# ---- The same step in every way ----


def plan_step(run: train.Run, args: argparse.Namespace) -> Tensor:
    """Give the run planned prompts, and micro-batches with as many padded tokens as TRL's. -> the planned completions
    (N, L). Their lengths are log-normal with a median of L / 4, and cut off at L."""
    cfg, tokenizer, rng = run.config, run.tokenizer, np.random.default_rng(0)
    words = sorted(word for word in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{3,}|[0-9]", word))  # a token each
    prompts = ["".join(rng.choice(words, args.prompt_tokens)).replace("Ġ", " ") for _ in range(cfg.prompts_per_step)]
    run.task = replace(run.task, train=[{"prompt": prompt} for prompt in prompts])
    run.limits = replace(run.limits, rows=None, tokens=args.rows * (args.prompt_tokens + cfg.max_completion_length))
    return plan_tokens(run, rng)


def plan_tokens(run: train.Run, rng: np.random.Generator) -> Tensor:
    cfg, tokenizer = run.config, run.tokenizer
    n, limit = cfg.prompts_per_step * cfg.num_generations, cfg.max_completion_length
    tokens = rng.integers(1 + max(tokenizer.all_special_ids), len(tokenizer), (n, limit))
    lengths = rng.lognormal(np.log(limit / 4), 0.8, (n, 1)).astype(int).clip(min=1)
    tokens[np.arange(limit) == lengths - 1] = tokenizer.eos_token_id
    tokens[np.arange(limit) >= lengths] = tokenizer.pad_token_id
    return torch.as_tensor(tokens, device=run.device)


def force_ours(tokens: Tensor) -> None:
    """The planned token is picked whatever the random number is, so the random number can say which completion it is
    for, and which of its tokens."""
    n = tokens.numel()

    def forced(sample: Callable, logits: Tensor, u: Tensor, *args: Any) -> Any:
        return sample(logits.scatter_(1, tokens.flatten()[(u * n).long(), None], LIKELY), u, *args)

    wrap(train, "uniforms", lambda uniforms, *args: (np.arange(n).reshape(tokens.shape) + 0.5) / n)
    wrap(rollout, "sample", forced)


def force_trl(tokens: Tensor, generate: Callable, input_ids: Tensor, **kwargs: Any) -> Tensor:
    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_(1, tokens[:, ids.shape[1] - input_ids.shape[1], None], LIKELY)

    return generate(input_ids=input_ids, logits_processor=[forced], **kwargs)


# ---- Long completions ----


def measure_long(args: argparse.Namespace, limit: int, folder: Path) -> dict[str, list[float]]:
    """-> for each part of a step, CPU-microseconds and bytes for each token of the completions. The bytes are those of
    the peak of memory, or those that are sent or written."""
    tokenizer, found = char_tokenizer(LETTERS + ">"), {}
    shape = small_config(tokenizer, hidden_size=16, intermediate_size=32)
    shape.max_position_embeddings = 2 * limit
    wrap(train, "open_model", lambda original, _, config: original((LlamaForCausalLM(shape), tokenizer), config))
    config = command_line.parse([*args.flags, f"--max_completion_length={limit}", f"--out={folder}"], on_gpu=False)
    run, log, _ = train.set_up(command_line.ready(config, on_gpu=False), torch.device("cpu"))
    log.open(done=0)
    tokens = plan_tokens(run, np.random.default_rng(0))
    force_ours(tokens)

    def timed(part: str, call: Callable, *given: Any, **settings: Any) -> Any:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of memory starts again
        start, held = read_clock(), gigabytes("VmRSS")
        result = call(*given, **settings)
        found[part] = [1e6 * (read_clock() - start), 1e9 * (gigabytes("VmHWM") - held)]
        return result

    for part in ("rollout", "collate", "update"):
        wrap(train, part, partial(timed, part))
    metrics, groups = train.training_step(run, 1)
    pickled = pickle.dumps(groups)
    timed("gather", lambda: pickle.loads(pickle.dumps(groups)))  # what each of two ranks does
    timed("samples", log.step, metrics, groups, [])
    timed("checkpoint", checkpoint.save, folder, 1, {"model": run.model}, run.optimizer, 0, {"groups": groups})
    found["gather"][1] = len(pickled)
    for part, files in (("samples", "samples.jsonl"), ("checkpoint", "state.*")):
        found[part][1] = sum(file.stat().st_size for file in folder.rglob(files))
    n = metrics["tokens"]
    return {"tokens": [n]} | {part: [x / n for x in figures] for part, figures in found.items()}


def record_long(args: argparse.Namespace) -> None:
    results = {}
    for limit in args.limits:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            results[limit] = process.submit(measure_long, args, limit, Path(tempfile.mkdtemp())).result()
    report.append(LOG, [about(args) | {"results": results}])
    print(long_table(LOG))


def long_table(log: Path) -> str:
    """The newest one: CPU-microseconds and, behind them, bytes a token."""
    results = [line for line in run_folder.read_lines(log) if "bench long" in line["command"]][-1]["results"]
    rows = [
        [limit, *(" / ".join(f"{x:,.0f}" for x in its) for its in parts.values())] for limit, parts in results.items()
    ]
    return markdown(["limit", *next(iter(results.values()))], *rows)


# ---- All runs, and what they show ----


def make_missing_runs(args: argparse.Namespace) -> None:
    for seed, way in itertools.product(args.seeds, args.ways):
        log = log_of(args, way, seed)
        if not log.exists():
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                settings, lines = process.submit(measure, args, way, seed).result()
            log.parent.mkdir(parents=True, exist_ok=True)
            log.with_name("config.json").write_text(json.dumps(run_folder.provenance() | {"settings": settings}))
            run_folder.write_text(log, report.as_json(lines))


def log_of(args: argparse.Namespace, way: str, seed: str) -> Path:
    return args.out / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}" / "metrics.jsonl"


def read_logs(args: argparse.Namespace) -> dict[str, list[Lines]]:
    return {way: [run_folder.read_lines(log_of(args, way, seed)) for seed in args.seeds] for way in args.ways}


def check_same_work(logs: dict[str, list[Lines]]) -> None:
    """Gradients in fp32 differ by rounding, which Adam amplifies over steps. In bf16 on a GPU they differ more."""
    for name, tolerance in (("tokens", 0.0), ("grad_norm", 1e-2 if ON_GPU else 1e-3)):
        expected, *others = ([line[name] for run in runs for line in run] for runs in logs.values())
        for way, values in zip([*logs][1:], others):
            np.testing.assert_allclose(values, expected, tolerance, err_msg=f"{way} did other work: {name}")


def about(args: argparse.Namespace) -> dict:
    made = run_folder.provenance()
    entry = dict(command=" ".join(["python -m tools.bench", *args.words]), commit=made["commit"], **made["versions"])
    entry["hardware"] = made["hardware"]["gpu"] or "{cores} CPU cores, {cpu}".format(**made["hardware"])
    return entry | dict(threads=torch.get_num_threads())


def record_step(args: argparse.Namespace) -> None:
    """Append a line to results/bench.jsonl. The first step of a run only warms up and is left out of the results."""
    cfg = command_line.parse(args.flags, ON_GPU)
    logs, names = read_logs(args), (f"rollout{UNIT}", f"step{UNIT}")
    check_same_work(logs)
    entry = about(args) | dict(size=cfg.model, prompts=cfg.prompts_per_step)
    entry |= dict(group=cfg.num_generations, prompt_tokens=args.prompt_tokens, limit=cfg.max_completion_length)
    entry |= dict(lengths="ragged", tokens=logs[args.ways[0]][0][0]["tokens"], results={})
    for way, runs in logs.items():
        figures = {name: [line[name] for run in runs for line in run[1:]] for name in names}
        entry["results"][way] = figures | {"memory_gb": [run[-1]["memory_gb"] for run in runs]}
    report.append(LOG, [entry])
    print(table(logs, [*(f"{name}:2-{cfg.steps}" for name in names), "memory_gb:last"]))


def learn_table(args: argparse.Namespace) -> str:
    logs = read_logs(args)
    for run in itertools.chain(*logs.values()):
        on_target = [line["seconds"] for line in run if line.get("eval/accuracy", 0.0) >= args.target]
        run[-1]["seconds to target"] = on_target[0] if on_target else None
    names = [f"reward:1-{len(logs[args.ways[0]][0])}", "eval/accuracy:last", "seconds:last"]
    if all(run[-1]["seconds to target"] for run in itertools.chain(*logs.values())):
        names.append("seconds to target:last")
    return table(logs, names)


def table(logs: dict[str, list[Lines]], names: list[str]) -> str:
    first = next(iter(logs))
    rows = [row for name in names for row in paired(name, [{"": way} for way in logs], [*logs.values()])]
    seeds = f"mean ± std of {len(logs[first])} seeds"
    return markdown(["figure", "", seeds, f"minus {first}, 95 % interval", ""], *rows)


def parse(words: list[str]) -> argparse.Namespace:
    own = list(itertools.takewhile(lambda word: word != "--", words))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "learn", "long"])
    parser.add_argument("--ways", default=WAYS, type=lambda text: text.split("; "), help="separated by '; '")
    parser.add_argument(
        "--seeds", default="1,2,3", type=lambda text: text.split(","), help="a run of every way for each"
    )
    parser.add_argument("--rows", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--prompt_tokens", type=int, default=48, help="step: tokens of each prompt")
    parser.add_argument("--target", type=float, default=0.95, help="learn: greedy accuracy on held-out prompts")
    parser.add_argument("--limits", default=[256, 1024, 4096, 16384], type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--out", type=Path, help="folder of the runs; default: a temporary one")
    args = parser.parse_args(own)
    args.words, args.flags = (
        words,
        [*dict(step=STEP, long=LONG, learn=LEARN)[args.what].split(), *words[len(own) + 1 :]],
    )
    return args


def main(words: list[str]) -> None:
    args = parse(words)
    if args.what == "long":
        return record_long(args)
    args.out = args.out or Path(tempfile.mkdtemp())
    make_missing_runs(args)
    record_step(args) if args.what == "step" else print(learn_table(args))


if __name__ == "__main__":
    main(sys.argv[1:])
