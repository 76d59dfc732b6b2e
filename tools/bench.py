"""A step of this codebase against TRL's, on the same tokens.

    python -m tools.bench step --size 50m --equal        ours, TRL, and TRL with a plain output head
    python -m tools.bench step --ways "ours; ../before"  ours, and ours in another checkout

Needs tools/requirements-bench.txt. Each measurement is a process of its own, the contestants in turn; it becomes a line
of results/bench.jsonl, and a table. The tokens of every completion are drawn beforehand. The samplers do all they ever
do, but find the planned token all but certain. So lengths, rewards and gradients are the same, which is checked.
"""

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import rollout
import train
from infra import command_line, run_folder
from tools.ablate import markdown

ROOT = Path(__file__).parent.parent
LOG = "results/bench.jsonl"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD, EOS = 0, 1
LIKELY = 60.0  # a logit; not so high that the other probabilities are denormal numbers, which are slow
ROWS = 8  # TRL's per_device_train_batch_size; ours has micro-batches of as many padded tokens
PROMPT_LENGTHS = 32, 64
SHAPE = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads".split()
SIZES = {  # prompts of a step, tokens of a completion, and the shape of a Qwen2
    "12m": (4, 256, 32_000, 256, 1024, 4, 4, 2),
    "50m": (2, 128, 151_936, 256, 1024, 11, 4, 2),
    "grouped": (4, 256, 32_000, 896, 1792, 2, 14, 2),  # the heads of 0.5B
    "0.5B": (16, 1024, 151_936, 896, 4864, 24, 14, 2),
    "1.5B": (16, 1024, 151_936, 1536, 8960, 28, 12, 2),
}
Work = namedtuple("Work", "prompts tokens lengths")  # tokens (N, L): the completions of a step, PAD after their end


def plan_work(args: argparse.Namespace) -> Work:
    """Ragged lengths are log-normal, of median limit / 4; beyond the limit they are cut off, as equal ones are."""
    rng = np.random.default_rng(0)
    n, vocab = args.prompts * args.group, SIZES[args.size][2]
    stops = np.exp(rng.normal(math.log(args.limit / 4), 0.8, n)).astype(int).clip(1)
    if args.equal:
        stops[:] = args.limit + 1
    tokens = rng.integers(2, vocab, (n, args.limit))
    for row, stop in zip(tokens, stops):
        row[stop - 1 : stop] = EOS
        row[stop:] = PAD
    sizes = rng.integers(*PROMPT_LENGTHS, args.prompts, endpoint=True)
    prompts = [" ".join(f"t{i}" for i in rng.integers(2, vocab, size)) for size in sizes]
    return Work(prompts, torch.as_tensor(tokens, device=DEVICE), stops.clip(max=args.limit).tolist())


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def make(size: str) -> tuple[transformers.PreTrainedModel, transformers.PreTrainedTokenizerFast]:
    shape = dict(zip(SHAPE, SIZES[size][2:]))
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(shape["vocab_size"])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}", eos_token=f"t{EOS}")
    special = dict(bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**shape, **special)), tokenizer


def wrap(owner: Any, name: str, around: Callable) -> None:
    """From here on a call of `owner.name` is a call of `around`, with the original before the arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


class Clock:
    """Seconds and CPU-seconds of each step and of phases in it, the calls of `owner.name`; memory above that of now."""

    def __init__(self, **phases: tuple[Any, str]) -> None:
        for phase, (owner, name) in phases.items():
            wrap(owner, name, partial(self.timed, phase))
        self.steps, self.held = [], bytes_held("VmRSS")
        self.now, self.start = {}, read_clock()

    def timed(self, phase: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        start = read_clock()
        result = original(*args, **kwargs)
        self.now[phase] = self.now.get(phase, 0) + read_clock() - start
        return result

    def end_step(self) -> None:
        self.steps.append(self.now | {"step": read_clock() - self.start})
        self.now, self.start = {}, read_clock()

    def figures(self) -> dict[str, list[float]]:
        """Of each phase its values in each step but the first, which warms up; with _cpu at the end in CPU-seconds."""
        made = {"memory_gb": [(bytes_held("VmHWM") - self.held) / 1e9]}
        for phase in self.steps[-1]:
            made[phase], made[f"{phase}_cpu"] = np.stack([step[phase] for step in self.steps[1:]], 1).round(4).tolist()
        return made


def read_clock() -> np.ndarray:
    getattr(torch, DEVICE).synchronize()
    return np.array([time.perf_counter(), time.process_time()])


def bytes_held(kind: str) -> int:
    """-> bytes held now, VmRSS, or at the peak, VmHWM: of this process as Linux counts them, or on a GPU by PyTorch"""
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated() if kind == "VmRSS" else torch.cuda.max_memory_allocated()
    return 1024 * int(re.search(rf"{kind}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


OUR_PHASES = {"rollout": (train, "rollout"), "forward": (train, "token_logprobs"), "update": (train, "update")}


def our_run(work: Work, args: argparse.Namespace) -> train.Run:
    """The run of a command line. Micro-batches hold as many padded tokens as TRL's."""
    model, tokenizer = make(args.size)
    wrap(train, "open_model", lambda original, source, config: original((model, tokenizer), config))
    padded = ROWS * (max(len(prompt.split()) for prompt in work.prompts) + max(work.lengths))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in work.prompts))
        words = f"""--model random --data {data} --reward tools.bench:reward --out {folder}/out --eval_every 0
            --prompts_per_step {args.prompts} --num_generations {args.group} --max_completion_length {args.limit}
            --learning_rate 1e-6 --warmup_steps 0 --steps {1 + args.steps} --micro_batch_tokens {padded}"""
        config = command_line.ready(command_line.parse(words.split(), DEVICE == "cuda"), DEVICE == "cuda")
        run, *_ = train.set_up(config, torch.device(DEVICE))
    force_ours(work, tokenizer(work.prompts)["input_ids"])
    return run


def force_ours(work: Work, prompts: list[list[int]]) -> None:
    """The uniform numbers only say which completion and which token of it they are for: any would pick the planned."""
    n, places = work.tokens.numel(), np.arange(work.tokens.numel()).reshape(len(prompts), -1, work.tokens.shape[1])

    def numbered_rollout(original, model, asked, uniform, *args, **kwargs):
        rows = {tuple(prompt): iter(its) for prompt, its in zip(prompts, places, strict=True)}  # its (G, L)
        uniform = np.stack([(next(rows[tuple(prompt)]) + 0.5) / n for prompt in asked])  # in any order of prompts
        return original(model, asked, uniform, *args, **kwargs)

    def forced_sample(original, logits, u, *args):
        planned = work.tokens.flatten()[(u * n).long(), None]  # (B, 1)
        return original(logits.scatter_(1, planned, LIKELY), u, *args)

    wrap(train, "rollout", numbered_rollout)
    wrap(rollout, "sample", forced_sample)


def measure_ours(args: argparse.Namespace) -> tuple[dict, dict]:
    """-> figures, and facts of the work"""
    run, metrics = our_run(plan_work(args), args), []
    clock = Clock(**OUR_PHASES, backward=(torch.Tensor, "backward"))
    for step in range(1, 2 + args.steps):
        metrics.append(train.training_step(run, step)[0])
        clock.end_step()
    return clock.figures(), {"grad_norm": [m["grad_norm"] for m in metrics], "trained": metrics[-1]["tokens"]}


def force_trl(model: transformers.PreTrainedModel, work: Work) -> None:
    def forced_generate(original: Callable, input_ids: Tensor, **kwargs: Any) -> Tensor:
        start = input_ids.shape[1]
        force = [lambda ids, scores: scores.scatter_(1, work.tokens[:, ids.shape[1] - start, None], LIKELY)]
        return original(input_ids=input_ids, logits_processor=transformers.LogitsProcessorList(force), **kwargs)

    wrap(model, "generate", forced_generate)


def measure_trl(args: argparse.Namespace, plain: bool = False) -> tuple[dict, dict]:
    import datasets
    import trl

    work, n = plan_work(args), args.prompts * args.group
    settings = dict(
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=n // ROWS, num_generations=args.group,
        max_completion_length=args.limit, max_steps=1 + args.steps, loss_type="grpo", beta=0.0, learning_rate=1e-6,
        lr_scheduler_type="constant", adam_beta2=0.99, shuffle_dataset=False, gradient_checkpointing=False,
        bf16=DEVICE == "cuda", use_cpu=DEVICE == "cpu", dataloader_pin_memory=False, report_to="none", logging_steps=1,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    model, tokenizer = make(args.size)
    with tempfile.TemporaryDirectory() as folder:
        config, prompts = trl.GRPOConfig(folder, **settings), datasets.Dataset.from_dict({"prompt": work.prompts})
        trainer = trl.GRPOTrainer(model, reward, config, prompts, processing_class=tokenizer)
        force_trl(model, work)
        if plain:
            trainer._get_per_token_logps_and_entropies = partial(plain_head, trainer.temperature)
        methods = [("rollout", "_generate_single_turn"), ("forward", "_get_per_token_logps_and_entropies")]
        phases = {phase: (trainer, name) for phase, name in [*methods, ("prepare", "_prepare_inputs")]}
        clock = Clock(**phases, backward=(Tensor, "backward"))
        wrap(trainer.callback_handler, "on_step_end", lambda original, *args: (clock.end_step(), original(*args))[1])
        trainer.train()
    for step in clock.steps:
        step["update"] = step["step"] - step.pop("prepare")
    logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    facts = {"trained": round(n * logged[-1]["completions/mean_length"]), "trl": trl.__version__}
    return clock.figures(), facts | {"grad_norm": [line["grad_norm"] for line in logged]}


def plain_head(temperature: float, model: nn.Module, ids: Tensor, mask: Tensor, keep: int, **unused: Any) -> tuple:
    """The logits of all completion positions at once, as in TRL before its tiled head, by TRL's own functions."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits[:, :-1] / temperature
    return *selective_log_softmax_and_entropy(logits, ids[:, -keep:], entropy_requires_grad=False), None


WAYS = {"ours": measure_ours, "TRL": measure_trl, "TRL, plain head": partial(measure_trl, plain=True)}


def measure_one(way: str) -> tuple[dict, dict]:
    """The same command in a process of its own. A way that is a folder is ours in that checkout."""
    root, way = (Path(way), "ours") if Path(way).is_dir() else (ROOT, way)
    command = [sys.executable, "-m", "tools.bench", *sys.argv[1:], "--way", way]
    ended = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return tuple(json.loads(ended.stdout.splitlines()[-1]))


def check_same_work(facts: dict[str, dict]) -> None:
    ours, tolerance = facts["ours"], 1e-2 if DEVICE == "cuda" else 1e-3
    for way, its in facts.items():
        same = np.allclose(its["grad_norm"], ours["grad_norm"], rtol=tolerance)
        if not same or its["trained"] != ours["trained"]:
            sys.exit(f"error: not the same work: {way} {its}, ours {ours}")


def tables(log: Path) -> str:
    """Of the newest of those that differ in what was measured, with which transformers, on a CPU or on which GPU."""
    newest = {}
    for entry in map(json.loads, log.read_text().splitlines()):
        if re.search(r"\bbench(\.py)? step", entry["command"]):
            differ = [str(entry[name]) for name in ("size", "lengths", "prompts", "limit", "transformers")]
            on = "CPU" if "CPU" in entry["hardware"] else entry["hardware"]
            newest[*differ, on, *entry["results"]] = entry
    return "\n\n".join(step_table(newest[key]) for key in sorted(newest))


def step_table(entry: dict) -> str:
    """Medians. On a CPU CPU-seconds are compared: other work on the machine hardly changes them."""
    unit = "_cpu" if "CPU" in entry["hardware"] else ""
    phases = ["rollout", "forward", "backward", "update", "step"]
    names = [*(phase + unit for phase in phases), "memory_gb"]
    of = {way: np.array([statistics.median(its[name]) for name in names]) for way, its in entry["results"].items()}
    rows = [["", *phases, "tokens a second", "peak GB"]]
    for way, its in of.items():
        *seconds, memory = (f"{value:.2f}" for value in its)
        rows.append([way, *seconds, f"{entry['tokens'] / its[-2]:,.0f}", memory])
    first, *others = of
    for way in others:
        *ratios, memory = (f"{value:.2f}" for value in of[first] / of[way])
        rows.append([f"{first} / {way}", *ratios, f"{of[way][-2] / of[first][-2]:.1f}", memory])
    shape = "**{size}, {prompts} prompts × {group}, {lengths} lengths to {limit}: {tokens} tokens a step**"
    about = "({hardware}; threads: {threads}; transformers {transformers}; commit `{commit:.7}`)"
    return f"{shape.format(**entry)}\n\n{markdown(*rows)}\n\n{about.format(**entry)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["step"])
    parser.add_argument("--size", choices=SIZES, default="12m")
    parser.add_argument("--prompts", type=int, help="of a step; default by size")
    parser.add_argument("--group", type=int, default=8, help="completions of each prompt")
    parser.add_argument("--limit", type=int, help="tokens of a completion, at most; default by size")
    parser.add_argument("--equal", action="store_true", help="all completions are as long as that")
    parser.add_argument("--ways", default="; ".join(WAYS), help="what is measured, with '; ' between")
    parser.add_argument("--steps", type=int, default=2, help="measured in each process, after one that warms up")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each")
    parser.add_argument("--log", type=Path, default=ROOT / LOG)
    parser.add_argument("--way", choices=WAYS, help="this one, here")
    args = parser.parse_args()
    prompts, limit, *_ = SIZES[args.size]
    args.prompts, args.limit = args.prompts or prompts, args.limit or limit
    if args.way:
        print(json.dumps(WAYS[args.way](args)))
        return
    ways = args.ways.split("; ")
    results, facts = {way: {} for way in ways}, {}
    for way in ways * args.repeats:  # A B A B ...
        figures, facts[way] = measure_one(way)
        for name, values in figures.items():
            results[way].setdefault(name, []).extend(values)
    check_same_work(facts)
    made, command = run_folder.provenance(), " ".join(["python -m tools.bench", *sys.argv[1:]])
    hardware = made["hardware"]["gpu"] or "{cores} CPU cores, {cpu}".format(**made["hardware"])
    entry = dict(command=command, commit=made["commit"], hardware=hardware, threads=torch.get_num_threads())
    entry |= made["versions"] | {name: getattr(args, name) for name in ("size", "prompts", "group", "limit")}
    entry |= dict(lengths="equal" if args.equal else "ragged", tokens=facts["ours"]["trained"])
    entry |= dict(results=results, facts=facts)
    with args.log.open("a") as file:
        file.write(json.dumps(entry) + "\n")
    print(step_table(entry))


if __name__ == "__main__":
    main()
