"""The work that bench.py gives to this codebase and to TRL, the same for both, and how each is measured at it.

The tokens of every completion are drawn beforehand, from a seed, and the samplers, which do all they ever do, find each
row's next token all but certain. So lengths, rewards, loss and gradient are the same on both sides; measure_step checks
the completions here, and bench.py compares gradients and settings.
"""

import argparse
import functools
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers.generation.continuous_batching import ContinuousBatchingManager

import config
import rollout
import train
from tasks import Task

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD, EOS = 0, 1
LIKELY = 60.0  # a logit; not so high that the other probabilities are denormal numbers, which are slow

# vocabulary, hidden, intermediate, layers, heads, key-value heads of 64 or 128; prompts of a step, longest completion
SIZES = {
    "12m": (32_000, 256, 1024, 4, 4, 2, 4, 256),
    "50m": (151_936, 256, 1024, 11, 4, 2, 2, 128),
    "0.5B": (151_936, 896, 4864, 24, 14, 2, 16, 1024),
    "1.5B": (151_936, 1536, 8960, 28, 12, 2, 16, 1024),
    "3B": (151_936, 2048, 11008, 36, 16, 2, 8, 1024),
}
PHASES = ("rollout", "forward", "backward", "optimizer", "update", "step")
Figures = dict[str, list[float]]


# ---- The work ----


@dataclass
class Work:
    prompts: list[str]
    tokens: Tensor  # (N, L), the completions of a step; PAD after their end
    lengths: list[int]


def plan_work(args: argparse.Namespace, seed: int = 0) -> Work:
    """Ragged lengths are log-normal with median limit / 4 and sigma 0.8; beyond the limit they are cut off, as equal
    ones are. Prompts have half to all of the given length."""
    rng = np.random.default_rng(seed)
    n, vocab = args.prompts * args.group, SIZES[args.size][0]
    stops = np.exp(rng.normal(math.log(args.limit / 4), 0.8, n)).astype(int).clip(1)
    if args.equal:
        stops[:] = args.limit + 1
    tokens = rng.integers(2, vocab, (n, args.limit))
    for row, stop in zip(tokens, stops):
        row[stop - 1 : stop] = EOS
        row[stop:] = PAD
    sizes = rng.integers(args.prompt // 2, args.prompt + 1, args.prompts)
    prompts = [" ".join(f"t{i}" for i in rng.integers(2, vocab, size)) for size in sizes]
    return Work(prompts, torch.as_tensor(tokens, device=DEVICE), stops.clip(max=args.limit).tolist())


def number_rows(uniform: np.ndarray) -> np.ndarray:
    """The number of the row goes into the low bits of its uniform numbers: the sampler's rows can be told from them."""
    return np.floor(uniform * 2**30) / 2**30 + np.arange(len(uniform))[:, None] / 2**45


def row_numbers(u: Tensor) -> Tensor:
    return (u * 2**30 % 1 * 2**15).long()


def force_ours(work: Work) -> None:
    uniforms, sample = train.uniforms, rollout.sample
    seen = torch.zeros(len(work.tokens), dtype=torch.long, device=DEVICE)

    def forced_uniforms(*args: Any) -> np.ndarray:
        seen.zero_()
        return number_rows(uniforms(*args))

    def forced_sample(logits: Tensor, u: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        row = row_numbers(u)
        token = work.tokens[row, seen[row]]
        seen[row] += 1
        return sample(logits.scatter_(1, token[:, None], LIKELY), u, *args)

    train.uniforms, rollout.sample = forced_uniforms, forced_sample


def force_trl(model: transformers.PreTrainedModel, work: Work) -> None:
    """`generate` gets one more logits processor; with continuous batching each request gets its length alone."""
    generate, add_request = model.generate, ContinuousBatchingManager.add_request

    def forced_generate(input_ids: Tensor, **kwargs: Any) -> Tensor:
        def force(ids: Tensor, scores: Tensor) -> Tensor:
            return scores.scatter_(1, work.tokens[:, ids.shape[1] - input_ids.shape[1], None], LIKELY)

        return generate(input_ids=input_ids, logits_processor=transformers.LogitsProcessorList([force]), **kwargs)

    def forced_request(manager: Any, *args: Any, request_id: str, **kwargs: Any) -> str | None:
        kwargs |= {"max_new_tokens": work.lengths[int(request_id.removeprefix("req_"))], "eos_token_id": -1}
        return add_request(manager, *args, request_id=request_id, **kwargs)

    model.generate, ContinuousBatchingManager.add_request = forced_generate, forced_request


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def make_model(size: str) -> transformers.PreTrainedModel:
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    shape = dict(zip(names.split(), SIZES[size]))
    special = dict(bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
    settings = transformers.Qwen2Config(**shape, **special, max_position_embeddings=8192, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(settings)


def make_tokenizer(size: str) -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(SIZES[size][0])}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}", eos_token=f"t{EOS}")


# ---- Measuring ----


class Clock:
    """Seconds and CPU-seconds of named phases, step by step. A phase may lie within another."""

    def __init__(self) -> None:
        self.now: dict[str, np.ndarray] = {}
        self.steps: list[dict[str, np.ndarray]] = []

    def read(self) -> np.ndarray:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return np.array([time.perf_counter(), time.process_time()])

    def call(self, phase: str, function: Callable, *args: Any, **kwargs: Any) -> Any:
        start = self.read()
        try:
            return function(*args, **kwargs)
        finally:
            self.now[phase] = self.now.get(phase, 0) + self.read() - start

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: self.call(phase, function, *args, **kwargs))

    def end_step(self) -> None:
        self.steps.append(self.now)
        self.now = {}

    def figures(self, warm_up: int) -> Figures:
        steps = self.steps[warm_up:]
        column = {f"{phase}{unit}": (phase, i) for phase in steps[0] for i, unit in enumerate(("", "_cpu"))}
        return {name: [round(float(s[phase][i]), 4) for s in steps] for name, (phase, i) in column.items()}


def watch(owner: Any, name: str, note: Callable) -> None:
    """`note` is given what each call returned, and its arguments."""
    function = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        note(result, *args)
        return result

    setattr(owner, name, watched)


def measure(run: Callable[[], Any], device: str, passes: int) -> Figures:
    before, clock = reset_peak_memory(device), Clock()
    start = clock.read()
    for _ in range(passes):
        run()
    seconds, cpu_seconds = (clock.read() - start) / passes
    memory = (peak_memory(device) - before) / 1e9
    figures = {"seconds": seconds, "cpu_seconds": cpu_seconds, "memory_gb": memory}
    return {name: [round(float(value), 6)] for name, value in figures.items()}


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


# ---- A step of each contestant ----


def our_run(work: Work, args: argparse.Namespace, micro_batch_tokens: int | None = None) -> train.Run:
    given = dict(prompts_per_step=len(work.prompts), num_generations=args.group, max_completion_length=args.limit)
    given |= dict(learning_rate=1e-6, warmup_steps=0, eval_every=0, micro_batch_tokens=micro_batch_tokens)
    cfg = config.Config(task="data", **given)
    rows = [{"prompt": prompt} for prompt in work.prompts]
    task = Task(rows, [], [reward], [1.0], 1.0, model=lambda: (make_model(args.size), make_tokenizer(args.size)))
    task.draw = lambda index, seed: rows[index % len(rows)]  # in order, as for TRL
    train.load_task = lambda cfg: task
    run = train.set_up(config.resolve(cfg, DEVICE == "cuda"), 0, 1, torch.device(DEVICE))
    run.model.generation_config = transformers.GenerationConfig()
    force_ours(work)
    return run


def measure_ours(work: Work, args: argparse.Namespace) -> tuple[Figures, dict]:
    clock, facts = Clock(), {"grad_norm": []}
    run = our_run(work, args, args.trl_rows * padded_length(work))
    before = reset_peak_memory(DEVICE)
    clock.wrap(train, "rollout", "rollout")
    clock.wrap(train, "token_logprobs", "forward")
    clock.wrap(torch.Tensor, "backward", "backward")
    clock.wrap(torch.optim.AdamW, "step", "optimizer")
    clock.wrap(train, "update", "update")
    watch(train, "collate", lambda batch, *args: facts.update(trained=int(batch.mask.sum())))
    for step in range(args.warm_up + args.steps):
        if step == args.warm_up:
            reset_peak_memory(DEVICE)
        metrics, groups, _ = clock.call("step", train.training_step, run, step + 1, 0)
        clock.end_step()
        facts["grad_norm"].append(metrics["grad_norm"])
    facts["lengths"] = [len(completion.ids) for group in groups for completion in group.completions]
    cfg = run.config
    updates = cfg.num_iterations * cfg.minibatches
    facts["settings"] = common_settings(cfg, cfg.normalization, updates, cfg.epsilon_low, cfg.epsilon_high)
    facts["about"] = f"micro-batches of up to {run.micro_batch} padded tokens, {cfg.dtype}"
    return clock.figures(args.warm_up) | {"memory_gb": [(peak_memory(DEVICE) - before) / 1e9]}, facts


def padded_length(work: Work) -> int:
    """Of TRL's rows; both sides get the same padded tokens in a micro-batch, so that memory can be compared."""
    return max(len(prompt.split()) for prompt in work.prompts) + max(work.lengths)


def trl_settings(args: argparse.Namespace) -> dict:
    n = args.prompts * args.group
    settings = dict(
        per_device_train_batch_size=args.trl_rows, gradient_accumulation_steps=n // args.trl_rows, loss_type="grpo",
        num_generations=args.group, max_completion_length=args.limit, max_steps=args.warm_up + args.steps, beta=0.0,
        learning_rate=1e-6, lr_scheduler_type="constant", adam_beta2=0.99, shuffle_dataset=False, bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu", gradient_checkpointing=False, dataloader_pin_memory=False, report_to="none",
        logging_strategy="no", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    if "continuous" in args.way:
        settings["use_transformers_continuous_batching"] = True
        if DEVICE == "cpu":  # or it takes half of all memory
            blocks = n * math.ceil((args.prompt + args.limit) / 256) + 8
            settings["transformers_continuous_batching_config"] = {"num_blocks": blocks, "max_batch_tokens": 4096}
    return settings


def measure_trl(work: Work, args: argparse.Namespace) -> tuple[Figures, dict]:
    import datasets
    import trl

    clock, facts, settings = Clock(), {"grad_norm": []}, trl_settings(args)
    model, tokenizer = make_model(args.size), make_tokenizer(args.size)
    prompts = datasets.Dataset.from_list([{"prompt": prompt} for prompt in work.prompts])
    before = reset_peak_memory(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model, reward, trl.GRPOConfig(folder, **settings), prompts, processing_class=tokenizer
        )
        force_trl(model, work)
        if "plain" in args.way:
            trainer._get_per_token_logps_and_entropies = functools.partial(plain_head, trainer.temperature)
        watch_trl(trainer, clock, facts, args.warm_up)
        trainer.train()
    for step in clock.steps:
        step["update"] = step["step"] - step.pop("prepare")
    cfg = trainer.args
    updates = cfg.num_iterations * cfg.steps_per_generation // cfg.gradient_accumulation_steps
    loss = {"grpo": "sequence"}[trainer.loss_type]
    facts["settings"] = common_settings(cfg, loss, updates, trainer.epsilon_low, trainer.epsilon_high)
    facts["about"] = f"trl {trl.__version__}, " + ", ".join(f"{name}={value}" for name, value in settings.items())
    return clock.figures(args.warm_up) | {"memory_gb": [(peak_memory(DEVICE) - before) / 1e9]}, facts


def common_settings(cfg: Any, loss: str, updates: int, epsilon_low: float, epsilon_high: float) -> dict:
    names = "num_generations max_completion_length temperature top_p top_k beta scale_rewards learning_rate"
    names += " weight_decay max_grad_norm adam_beta1 adam_beta2"
    own = {"loss": loss, "updates": updates, "epsilon_low": epsilon_low, "epsilon_high": epsilon_high}
    return own | {name: getattr(cfg, name) for name in names.split()}


def plain_head(temperature: float, model: nn.Module, ids: Tensor, mask: Tensor, keep: int, **unused: Any) -> tuple:
    """The logits of all completion positions at once, as in TRL before its tiled head, by TRL's own functions."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits[:, :-1] / temperature
    return *selective_log_softmax_and_entropy(logits, ids[:, -keep:], entropy_requires_grad=False), None


def watch_trl(trainer: Any, clock: "Clock", facts: dict, warm_up: int) -> None:
    def count(loss: Tensor, model: nn.Module, inputs: dict) -> None:
        facts["trained"] += int(inputs["completion_mask"].sum())

    class Steps(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if len(clock.steps) == warm_up:
                reset_peak_memory(DEVICE)
            self.start = clock.read()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.now["step"] = clock.read() - self.start
            clock.end_step()

    trainer.add_callback(Steps())
    rollout, forward = "_generate_single_turn", "_get_per_token_logps_and_entropies"
    watch(trainer, rollout, lambda made, *args: facts.update(lengths=[len(ids) for ids in made[0]], trained=0))
    watch(trainer, "_compute_loss", count)
    watch(trainer.accelerator, "clip_grad_norm_", lambda norm, *args: facts["grad_norm"].append(float(norm)))
    clock.wrap(trainer, rollout, "rollout")
    clock.wrap(trainer, forward, "forward")
    clock.wrap(trainer, "_prepare_inputs", "prepare")
    clock.wrap(torch.Tensor, "backward", "backward")
    clock.wrap(torch.optim.AdamW, "step", "optimizer")


CONTESTANTS = {
    "ours": measure_ours,
    "TRL": measure_trl,
    "TRL, plain head": measure_trl,
    "TRL, continuous batching": measure_trl,
}


def measure_step(args: argparse.Namespace) -> tuple[Figures, dict]:
    work = plan_work(args)
    figures, facts = CONTESTANTS[args.way](work, args)
    if facts["lengths"] != work.lengths or facts["trained"] != sum(work.lengths):
        raise SystemExit(f"{args.way}: not the completions that were planned, {work.lengths}: {facts}")
    if DEVICE == "cuda":
        facts |= limits(work, args)
    return figures, facts


def limits(work: Work, args: argparse.Namespace) -> dict[str, float]:
    """What this GPU could do: seconds to read weights and cache once for each token, at its measured copy bandwidth;
    and seconds for the update's products at its measured matrix rate. In bf16."""
    vocab, hidden, intermediate, layers, heads, kv_heads = SIZES[args.size][:6]
    kv = hidden * kv_heads // heads
    body = layers * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * intermediate)
    prompts = [len(prompt.split()) for prompt in work.prompts for _ in range(args.group)]
    reads = sum(n * (p + n / 2) for p, n in zip(prompts, work.lengths))  # cached tokens, over all decoding steps
    total = [p + n for p, n in zip(prompts, work.lengths)]
    decode = 2 * (max(work.lengths) * (body + vocab * hidden) + reads * 2 * layers * kv)
    products = 6 * (
        body * sum(total) + vocab * hidden * sum(work.lengths) + layers * hidden * sum(t * t for t in total)
    )
    x = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    square = torch.randn(2, 8192, 8192, device=DEVICE).bfloat16()
    copy, multiply = lambda: x.clone(), lambda: square[0] @ square[1]
    copy, multiply = (min(measure(run, DEVICE, 20)["seconds"][0] for _ in range(3)) for run in (copy, multiply))
    return {"decode_limit": decode * copy / 2**31, "update_limit": products * multiply / (2 * 8192**3)}
