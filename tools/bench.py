"""This codebase and TRL: a step of each on the same tokens, and what each learns from the same prompts.

    python -m tools.bench step                               ours, TRL, and TRL with a plain output head
    python -m tools.bench step --ways "ours; ../before" --prompt_tokens 150 -- --prompts_per_step 8
    python -m tools.bench learn --out runs/learn --seeds 1,2,3 -- --steps 80 --eval_every 5

Needs tools/requirements-bench.txt. What stands behind `--` is for train.py, and TRL is given what it has for it. A way
that is a folder is ours in that checkout. Each measurement is a process of its own, the contestants in turn.

A step becomes a line of results/bench.jsonl, and a table. The tokens of every completion are drawn beforehand. Both
samplers do all they ever do, but find the planned token all but certain. So lengths, rewards and gradients are the
same, which is checked. To learn, each samples by itself; the same command again makes the runs that are missing.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

import rollout
import train
from config import Config
from infra import command_line, run_folder
from tasks import Task
from tasks.chain import shortness
from tools.ablate import markdown, paired

ROOT = Path(__file__).parent.parent
LOG = "results/bench.jsonl"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = "ours", "TRL", "TRL, plain head"
LIKELY = 60.0  # a logit; not so high that the other probabilities are denormal numbers, which are slow
STEP = """--model models/smollm2 --task sorting --eval_every 0 --prompts_per_step 4 --num_generations 8
    --max_completion_length 64 --learning_rate 1e-6 --warmup_steps 0 --steps 3"""


def run_of(words: list[str]) -> train.Run:
    config = command_line.ready(command_line.parse(words, DEVICE == "cuda"), DEVICE == "cuda")
    return train.set_up(config, torch.device(DEVICE))[0]


def train_all(run: train.Run, args: argparse.Namespace, end_step: Callable[[dict], None]) -> None:
    """All steps of the run, by us or by TRL. `end_step` is called after each, with its metrics and what it took."""
    trainer = None if args.way == "ours" else trl_trainer(run, args)
    spent = {"rollout": 0.0, "start": read_clock()}

    def timed(original: Callable, *args: Any, **kwargs: Any) -> Any:
        start = read_clock()
        result = original(*args, **kwargs)
        spent["rollout"] += read_clock() - start
        return result

    def end(metrics: dict) -> None:
        end_step(metrics | {"rollout": spent["rollout"], "step": read_clock() - spent["start"]})
        spent.update(rollout=0.0, start=read_clock())

    def log(original: Callable, *logged: Any) -> None:
        original(*logged)
        metrics = trainer.state.log_history[-1]
        if "grad_norm" in metrics:  # else it is the summary at the end
            completions = trainer.args.generation_batch_size
            end(metrics | {"tokens": round(metrics["completions/mean_length"] * completions)})

    wrap(*((run.model, "generate") if trainer else (train, "rollout")), timed)
    if trainer:
        wrap(trainer, "log", log)
        trainer.train()
    else:
        for step in range(1, 1 + run.config.steps):
            end(train.training_step(run, step)[0])


def trl_trainer(run: train.Run, args: argparse.Namespace) -> Any:
    """With our model, prompts in our order, rewards and settings, as far as TRL has them."""
    import datasets
    import trl

    cfg, same = run.config, "num_generations max_completion_length temperature scale_rewards beta learning_rate"
    same = f"{same} adam_beta1 adam_beta2 weight_decay max_grad_norm epsilon_high seed".split()
    config = trl.GRPOConfig(
        tempfile.mkdtemp(), **{name: getattr(cfg, name) for name in same}, epsilon=cfg.epsilon_low, max_steps=cfg.steps,
        loss_type={"sequence": "grpo", "global": "dapo", "constant": "dr_grpo"}[cfg.normalization],
        mask_truncated_completions=cfg.mask_truncated, reward_weights=run.task.weights, lr_scheduler_type="constant",
        gradient_accumulation_steps=cfg.prompts_per_step * cfg.num_generations // args.rows, shuffle_dataset=False,
        per_device_train_batch_size=args.rows, gradient_checkpointing=False, save_strategy="no", report_to="none",
        bf16=DEVICE == "cuda", use_cpu=DEVICE == "cpu", dataloader_pin_memory=False, logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    drawn = run.task.draw(0, cfg.steps * cfg.prompts_per_step, cfg.seed)
    rows = datasets.Dataset.from_list([run.task.train[i] for i in drawn])
    trainer = trl.GRPOTrainer(run.model, run.task.rewards, config, rows, processing_class=run.tokenizer)
    if args.way == "TRL, plain head":
        trainer._get_per_token_logps_and_entropies = partial(plain_head, trainer.temperature)
    return trainer


def plain_head(temperature: float, model: nn.Module, ids: Tensor, mask: Tensor, keep: int, **unused: Any) -> tuple:
    """The logits of all completion positions at once, as in TRL before its tiled head, by TRL's own functions."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits[:, :-1] / temperature
    return *selective_log_softmax_and_entropy(logits, ids[:, -keep:], entropy_requires_grad=False), None


def wrap(owner: Any, name: str, around: Callable) -> None:
    """From here on a call of `owner.name` is a call of `around`, with the original before the arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def read_clock() -> float:
    """CPU-seconds, which other work on the machine hardly changes; on a GPU seconds."""
    getattr(torch, DEVICE).synchronize()
    return time.perf_counter() if DEVICE == "cuda" else time.process_time()


def gigabytes(kind: str) -> float:
    """Held now, VmRSS, or at the peak, VmHWM: by this process as Linux counts it, or on a GPU by PyTorch."""
    if DEVICE == "cuda":
        return (torch.cuda.memory_allocated() if kind == "VmRSS" else torch.cuda.max_memory_allocated()) / 1e9
    return 1024 * int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e9


def in_a_process(way: str, *words: str) -> list[str]:
    """The same command, for one way; where that is a folder, with the code of that checkout. -> what it printed"""
    root, way = (Path(way).resolve(), "ours") if Path(way).is_dir() else (ROOT, way)
    command = [sys.executable, __file__, "--way", way, *words, *sys.argv[1:]]
    env = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()


def plan_tokens(cfg: Config, tokenizer: Any) -> Tensor:
    """The completions of a step, (N, L). Lengths are log-normal, of median L / 4, and cut off at L."""
    rng, limit = np.random.default_rng(0), cfg.max_completion_length
    n, first = cfg.prompts_per_step * cfg.num_generations, 1 + max(tokenizer.all_special_ids)
    tokens = rng.integers(first, len(tokenizer), (n, limit))
    for row in tokens:
        stop = max(1, int(rng.lognormal(np.log(limit / 4), 0.8)))
        row[stop - 1 : stop] = tokenizer.eos_token_id
        row[stop:] = tokenizer.pad_token_id
    return torch.as_tensor(tokens, device=DEVICE)


def planned_run(args: argparse.Namespace) -> tuple[train.Run, Tensor]:
    """It draws the prompts of the plan, in their order. Micro-batches hold as many padded tokens as TRL's."""
    cfg, rng = command_line.parse([*STEP.split(), *args.flags], DEVICE == "cuda"), np.random.default_rng(0)
    tokenizer = AutoTokenizer.from_pretrained(cfg.model)
    words = sorted(word for word in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{3,}|[0-9]", word))  # a token each
    drawn = [rng.choice(words, args.prompt_tokens or rng.integers(32, 65)) for _ in range(cfg.prompts_per_step)]
    rows = [{"prompt": "".join(prompt).replace("Ġ", " ")} for prompt in drawn]
    task = Task(rows, [], [shortness], [1.0])
    task.draw = lambda first, n, seed: [i % len(rows) for i in range(n)]
    wrap(train, "load_task", lambda original, config: task)
    padded = args.rows * (max(map(len, drawn)) + cfg.max_completion_length)
    flags = [*STEP.split(), *args.flags, "--micro_batch_tokens", str(padded)]
    return run_of(flags), plan_tokens(cfg, tokenizer)


def force_ours(tokens: Tensor) -> None:
    """The uniform numbers only say which completion and which token of it they are for: any would pick the planned."""
    n = tokens.numel()

    def forced(original: Callable, logits: Tensor, u: Tensor, *args: Any) -> Any:
        return original(logits.scatter_(1, tokens.flatten()[(u * n).long(), None], LIKELY), u, *args)

    wrap(train, "uniforms", lambda original, *args: (np.arange(n).reshape(tokens.shape) + 0.5) / n)
    wrap(rollout, "sample", forced)


def force_trl(tokens: Tensor, original: Callable, input_ids: Tensor, **kwargs: Any) -> Tensor:
    def forced(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_(1, tokens[:, ids.shape[1] - input_ids.shape[1], None], LIKELY)

    return original(input_ids=input_ids, logits_processor=[forced], **kwargs)


def measure(args: argparse.Namespace) -> None:
    """Prints figures, each a list with a value of every step but the first, which warms up; and facts of the work."""
    (run, tokens), lines = planned_run(args), []
    if args.way == "ours":
        force_ours(tokens)
    else:
        wrap(run.model, "generate", partial(force_trl, tokens))
    held = gigabytes("VmRSS")
    train_all(run, args, lines.append)
    unit, peak, cfg = "" if DEVICE == "cuda" else "_cpu", gigabytes("VmHWM"), run.config
    figures = {name + unit: [round(line[name], 4) for line in lines[1:]] for name in ("rollout", "step")}
    facts = dict(size=cfg.model, prompts=cfg.prompts_per_step, group=cfg.num_generations, lengths="ragged")
    facts |= dict(limit=cfg.max_completion_length, prompt_tokens=args.prompt_tokens, tokens=lines[-1]["tokens"])
    facts["grad_norm"] = [line["grad_norm"] for line in lines]
    print(json.dumps([figures | {"memory_gb": [peak - held], "peak_gb": [peak]}, facts]))


def compare_steps(args: argparse.Namespace) -> None:
    results, facts = {way: {} for way in args.ways}, {}
    for way in args.ways * args.repeats:  # A B A B ...
        figures, facts[way] = json.loads(in_a_process(way)[-1])
        for name, values in figures.items():
            results[way].setdefault(name, []).extend(values)
    check_same_work(facts)
    made, command = run_folder.provenance(), " ".join(["python -m tools.bench", *sys.argv[1:]])
    hardware = made["hardware"]["gpu"] or "{cores} CPU cores, {cpu}".format(**made["hardware"])
    entry = dict(command=command, commit=made["commit"], hardware=hardware, threads=torch.get_num_threads())
    entry |= made["versions"] | facts[args.ways[0]] | dict(results=results, facts=facts)
    with (ROOT / LOG).open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(step_table(entry))


def check_same_work(facts: dict[str, dict]) -> None:
    """Gradients in fp32 differ by rounding, and by what Adam makes of it in a step; in bf16 on a GPU by more."""
    first, tolerance = next(iter(facts.values())), 1e-2 if DEVICE == "cuda" else 1e-3
    for way, its in facts.items():
        if not np.allclose(its["grad_norm"], first["grad_norm"], rtol=tolerance) or its["tokens"] != first["tokens"]:
            sys.exit(f"error: not the same work: {way} {its}, not {first}")


def tables(log: Path) -> str:
    """Of the newest of those that differ in what was measured, with which transformers, on a CPU or on which GPU."""
    newest = {}
    for entry in map(json.loads, log.read_text().splitlines()):
        if re.search(r"\bbench(\.py)? step", entry["command"]):
            table, on = step_table(entry), "CPU" if "CPU" in entry["hardware"] else entry["hardware"]
            newest[table.partition(":")[0], entry["transformers"], on, *entry["results"]] = table
    return "\n\n".join(newest[key] for key in sorted(newest))


def step_table(entry: dict) -> str:
    """Medians. The rest of a step is scoring and the update."""
    unit, rows, of = "_cpu" if "CPU" in entry["hardware"] else "", [], {}
    for way, its in entry["results"].items():
        rollout, step, memory = (np.median(its[name]) for name in ("rollout" + unit, "step" + unit, "memory_gb"))
        of[way] = np.array([rollout, step - rollout, step, memory])
        rows.append([way, *(f"{x:.2f}" for x in of[way]), f"{entry['tokens'] / step:,.0f}"])
    first, *others = of
    for way in others:
        ratios = of[first] / of[way]
        rows.append([f"{first} / {way}", *(f"{x:.2f}" for x in ratios), f"{1 / ratios[2]:.1f}"])
    asked = f" of {entry['prompt_tokens']} tokens" if entry.get("prompt_tokens") else ""
    shape = "**{size}, {prompts} prompts{asked} × {group}, {lengths} lengths to {limit}: {tokens} tokens a step**"
    about = "({hardware}; threads: {threads}; transformers {transformers}; commit `{commit}`)"
    table = markdown(["", "rollout", "rest", "step", "peak GB", "tokens a second"], *rows)
    commit = entry["commit"][:7] + entry["commit"][40:]  # -dirty
    return f"{shape.format(asked=asked, **entry)}\n\n{table}\n\n{about.format(**entry | {'commit': commit})}"


def log_of(args: argparse.Namespace, way: str, seed: str) -> Path:
    return args.out / f"{way.replace(', ', '-').replace(' ', '-')}-{seed}" / "metrics.jsonl"


def learn(args: argparse.Namespace) -> None:
    """One run. Its seconds are those of the steps, without evaluations, which are ours on both sides."""
    log = log_of(args, args.way, args.seed)
    words = [*args.flags, "--warmup_steps", "0", "--seed", args.seed, "--out", str(log.parent)]  # TRL's warm-up differs
    run, lines, reached = run_of(words), [], [None]
    made = run_folder.provenance() | {"settings": vars(run.config) | {"trainer": args.way}}
    log.parent.mkdir(parents=True, exist_ok=True)
    log.with_name("config.json").write_text(json.dumps(made, indent=1))

    def end_step(metrics: dict) -> None:
        line = {"step": len(lines) + 1, "reward": metrics["reward"]}
        line["seconds"] = metrics["step"] + sum(line["seconds"] for line in lines[-1:])
        if run.config.eval_every and line["step"] % run.config.eval_every == 0:
            line |= train.evaluate(run, line["step"])[0]
        if line.get("eval/accuracy", 0) >= args.target:
            reached.append(line["seconds"])
        lines.append(line | {"seconds to target": reached[:2][-1]})
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))

    train_all(run, args, end_step)


def compare_learning(args: argparse.Namespace) -> None:
    for seed, way in itertools.product(args.seeds, args.ways):
        if not log_of(args, way, seed).with_name("finished").exists():
            in_a_process(way, "--seed", seed)
            log_of(args, way, seed).with_name("finished").touch()
            print(f"done: {way}, seed {seed}", flush=True)
    print(learn_table(args))


def learn_table(args: argparse.Namespace) -> str:
    runs = [[run_folder.read_lines(log_of(args, way, seed)) for seed in args.seeds] for way in args.ways]
    figures = [f"reward:1-{len(runs[0][0])}", "eval/accuracy:last", "seconds:last"]
    if all(run[-1]["seconds to target"] for of_way in runs for run in of_way):
        figures.append("seconds to target:last")
    rows = [row for name in figures for row in paired(name, [{"": way} for way in args.ways], runs)]
    seeds = f"mean ± std of {len(args.seeds)} seeds"
    return markdown(["figure", "", seeds, f"minus {args.ways[0]}, 95 % interval", ""], *rows)


def parse(words: list[str]) -> argparse.Namespace:
    own = list(itertools.takewhile(lambda word: word != "--", words))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step", "learn"])
    parser.add_argument("--ways", default=[*WAYS], type=lambda given: given.split("; "), help="with '; ' between")
    parser.add_argument("--rows", type=int, default=8, help="TRL's per_device_train_batch_size")
    parser.add_argument("--prompt_tokens", type=int, help="of each prompt of a step; default: 32 to 64")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each")
    parser.add_argument("--out", type=Path, help="learn: folder of the runs")
    parser.add_argument("--seeds", default="1,2,3", type=lambda given: given.split(","))
    parser.add_argument("--target", type=float, default=0.95, help="held-out greedy accuracy")
    parser.add_argument("--way", choices=WAYS, help="this one, here")
    parser.add_argument("--seed", help="of this one")
    args = parser.parse_args(own)
    args.flags = words[len(own) + 1 :]
    return args


def main(words: list[str]) -> None:
    args = parse(words)
    if args.what == "step":
        (measure if args.way else compare_steps)(args)
    else:
        (learn if args.way else compare_learning)(args)


if __name__ == "__main__":
    main(sys.argv[1:])
