"""What bench.py measures: the same planned work for this codebase and for TRL, and our log-probs by themselves.

The tokens of every completion are drawn beforehand, from a seed. The samplers do all they ever do, but find the planned
token all but certain. So lengths, rewards and gradients are the same on both sides, which bench.py checks. For TRL with
continuous batching only the lengths can be planned.
"""

import argparse
import math
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
from transformers.generation.continuous_batching import ContinuousBatchingManager

import rollout
import train
from batch import Limits
from config import Config, resolve
from infra import memory
from logprob import token_logprobs
from rollout import Sampling
from tasks import Task

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAD, EOS = 0, 1
LIKELY = 60.0  # a logit; not so high that the other probabilities are denormal numbers, which are slow
PROMPT = 64  # tokens at most
ROWS = 8  # TRL's per_device_train_batch_size; ours has micro-batches of as many padded tokens

# The shape of a model, by Qwen2's names; prompts of a step and tokens of a completion where no flag says
Size = namedtuple(
    "Size",
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads prompts limit",
)
SIZES = {
    "12m": Size(32_000, 256, 1024, 4, 4, 2, prompts=4, limit=256),
    "50m": Size(151_936, 256, 1024, 11, 4, 2, prompts=2, limit=128),
    "grouped": Size(32_000, 896, 1792, 2, 14, 2, prompts=4, limit=256),  # the heads of 0.5B
    "0.5B": Size(151_936, 896, 4864, 24, 14, 2, prompts=16, limit=1024),
    "1.5B": Size(151_936, 1536, 8960, 28, 12, 2, prompts=16, limit=1024),
    "3B": Size(151_936, 2048, 11008, 36, 16, 2, prompts=8, limit=1024),
}

Work = namedtuple("Work", "prompts tokens lengths")  # tokens (N, L): the completions of a step, PAD after their end


def plan_work(args: argparse.Namespace) -> Work:
    """Ragged lengths are log-normal with median limit / 4 and sigma 0.8; beyond the limit they are cut off, as equal
    ones are. Prompts have half to all of PROMPT."""
    rng = np.random.default_rng(0)
    n, vocab = args.prompts * args.group, SIZES[args.size].vocab_size
    stops = np.exp(rng.normal(math.log(args.limit / 4), 0.8, n)).astype(int).clip(1)
    if args.equal:
        stops[:] = args.limit + 1
    tokens = rng.integers(2, vocab, (n, args.limit))
    for row, stop in zip(tokens, stops):
        row[stop - 1 : stop] = EOS
        row[stop:] = PAD
    sizes = rng.integers(PROMPT // 2, PROMPT + 1, args.prompts)
    prompts = [" ".join(f"t{i}" for i in rng.integers(2, vocab, size)) for size in sizes]
    return Work(prompts, torch.as_tensor(tokens, device=DEVICE), stops.clip(max=args.limit).tolist())


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def make_model(size: Size, tied: bool = True) -> transformers.PreTrainedModel:
    shape = {name: value for name, value in size._asdict().items() if name not in ("prompts", "limit")}
    special = dict(bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD)
    settings = transformers.Qwen2Config(**shape, **special, max_position_embeddings=8192, tie_word_embeddings=tied)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return transformers.AutoModelForCausalLM.from_config(settings)


def make_tokenizer(size: Size) -> transformers.PreTrainedTokenizerFast:
    vocab = {f"t{i}": i for i in range(size.vocab_size)}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}", eos_token=f"t{EOS}")


# ---- The samplers are made to draw the planned tokens ----


def wrap(owner: Any, name: str, around: Callable) -> None:
    """From here on a call of `owner.name` is a call of `around`, with the original before the arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))


def force_ours(work: Work) -> None:
    """The uniform numbers only say which completion and which token of it they are for: any would pick the planned."""
    n = work.tokens.numel()

    def numbered_rollout(original, model, prompts, uniform, *args, **kwargs):
        places = np.arange(uniform.size).reshape(uniform.shape)  # (N, L)
        return original(model, prompts, (places + 0.5) / n, *args, **kwargs)

    def forced_sample(original, logits, u, *args):
        planned = work.tokens.flatten()[(u * n).long(), None]  # (B, 1)
        return original(logits.scatter_(1, planned, LIKELY), u, *args)

    wrap(train, "rollout", numbered_rollout)
    wrap(rollout, "sample", forced_sample)


def force_trl(model: transformers.PreTrainedModel, work: Work) -> None:
    def forced_generate(original, input_ids, **kwargs):
        def force(ids: Tensor, scores: Tensor) -> Tensor:
            return scores.scatter_(1, work.tokens[:, ids.shape[1] - input_ids.shape[1], None], LIKELY)

        return original(input_ids=input_ids, logits_processor=transformers.LogitsProcessorList([force]), **kwargs)

    def request_of_length(original, manager, *args, request_id, **kwargs):
        kwargs |= {"max_new_tokens": work.lengths[int(request_id.removeprefix("req_"))], "eos_token_id": -1}
        return original(manager, *args, request_id=request_id, **kwargs)

    wrap(model, "generate", forced_generate)
    wrap(ContinuousBatchingManager, "add_request", request_of_length)


# ---- Measuring ----


class Clock(transformers.TrainerCallback):
    """Seconds and CPU-seconds of each step and of phases in it, and the peak of memory above what is held now. A phase
    is the calls of `owner.name`, and may lie within another. The first step is not counted: it warms up. TRL's trainer
    takes it as a callback."""

    def __init__(self, *phases: tuple[Any, str, str]) -> None:
        for owner, name, phase in phases:
            wrap(owner, name, partial(self.timed, phase))
        self.steps: list[dict[str, np.ndarray]] = []
        reset_peak_memory()
        self.held = bytes_held("VmRSS")
        self.on_step_begin()

    def timed(self, phase: str, original: Callable, *args: Any, **kwargs: Any) -> Any:
        start = read_clock()
        result = original(*args, **kwargs)
        self.now[phase] = self.now.get(phase, 0) + read_clock() - start
        return result

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.now: dict[str, np.ndarray] = {}
        self.start = read_clock()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(self.now | {"step": read_clock() - self.start})
        self.peak = (bytes_held("VmHWM") - self.held) / 1e9
        reset_peak_memory()
        self.on_step_begin()

    def figures(self) -> dict[str, list[float]]:
        """Of each phase its values in each step; with _cpu at the end in CPU-seconds."""
        columns = {f"{phase}{unit}": (phase, i) for phase in self.steps[-1] for i, unit in enumerate(("", "_cpu"))}
        made = {name: [round(float(s[phase][i]), 4) for s in self.steps[1:]] for name, (phase, i) in columns.items()}
        return made | {"memory_gb": [self.peak]}


def read_clock() -> np.ndarray:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return np.array([time.perf_counter(), time.process_time()])


def reset_peak_memory() -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def bytes_held(kind: str) -> int:
    """-> bytes held now, VmRSS, or at the peak, VmHWM: of this process as Linux counts them, or on a GPU by PyTorch"""
    if DEVICE == "cuda":
        return torch.cuda.memory_allocated() if kind == "VmRSS" else torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:"))


# ---- What is measured -> its figures, and facts of it that are not measured ----


def our_run(work: Work, args: argparse.Namespace) -> train.Run:
    """Micro-batches hold as many padded tokens as TRL's."""
    rows = [{"prompt": prompt} for prompt in work.prompts]
    task = Task(rows, [], [reward], [1.0])
    task.draw = lambda index, seed: rows[index % len(rows)]  # in order, as for TRL
    shape = dict(prompts_per_step=args.prompts, num_generations=args.group, max_completion_length=args.limit)
    padded = ROWS * (max(len(prompt.split()) for prompt in work.prompts) + max(work.lengths))
    config = Config(**shape, learning_rate=1e-6, warmup_steps=0, steps=1, micro_batch_tokens=padded)
    config = resolve(config, {}, DEVICE == "cuda")
    free = memory.free_memory()
    model, tokenizer = make_model(SIZES[args.size]), make_tokenizer(SIZES[args.size])
    config = memory.fitting(config, memory.costs(model.config, config, 1, PROMPT), free)
    adam = dict(lr=config.learning_rate, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    optimizer = torch.optim.AdamW(model.parameters(), **adam)
    sampling = Sampling(args.limit, [EOS], tokens_at_once=config.rollout_tokens)
    limits = Limits(rows=None, tokens=config.micro_batch_tokens)
    force_ours(work)
    return train.Run(config, torch.device(DEVICE), task, tokenizer, model, None, optimizer, sampling, limits)


def measure_ours(args: argparse.Namespace) -> tuple[dict, dict]:
    run, metrics = our_run(plan_work(args), args), []
    clock = Clock(
        (train, "rollout", "rollout"),
        (train, "token_logprobs", "forward"),
        (torch.Tensor, "backward", "backward"),
        (train, "update", "update"),
    )
    for step in range(1, 2 + args.steps):
        metrics.append(train.training_step(run, step)[0])
        clock.on_step_end()
    return clock.figures(), {"grad_norm": [m["grad_norm"] for m in metrics], "trained": metrics[-1]["tokens"]}


def measure_trl(args: argparse.Namespace, plain: bool = False, continuous: bool = False) -> tuple[dict, dict]:
    import datasets
    import trl

    work, n = plan_work(args), args.prompts * args.group
    settings = dict(
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=n // ROWS, num_generations=args.group,
        max_completion_length=args.limit, max_steps=1 + args.steps, loss_type="grpo", beta=0.0, learning_rate=1e-6,
        lr_scheduler_type="constant", adam_beta2=0.99, shuffle_dataset=False, gradient_checkpointing=False,
        bf16=DEVICE == "cuda", use_cpu=DEVICE == "cpu", dataloader_pin_memory=False, report_to="none", logging_steps=1,
        save_strategy="no", disable_tqdm=True, use_transformers_continuous_batching=continuous,
    )  # fmt: skip
    if continuous and DEVICE == "cpu":  # or it takes half of all memory
        blocks = n * math.ceil((PROMPT + args.limit) / 256) + 8
        settings["transformers_continuous_batching_config"] = {"num_blocks": blocks, "max_batch_tokens": 4096}
    model, tokenizer = make_model(SIZES[args.size]), make_tokenizer(SIZES[args.size])
    prompts = datasets.Dataset.from_list([{"prompt": prompt} for prompt in work.prompts])
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(folder, **settings)
        trainer = trl.GRPOTrainer(model, reward, config, prompts, processing_class=tokenizer)
        force_trl(model, work)
        if plain:
            trainer._get_per_token_logps_and_entropies = partial(plain_head, trainer.temperature)
        clock = Clock(
            (trainer, "_generate_single_turn", "rollout"),
            (trainer, "_get_per_token_logps_and_entropies", "forward"),
            (torch.Tensor, "backward", "backward"),
            (trainer, "_prepare_inputs", "prepare"),
        )
        trainer.add_callback(clock)
        trainer.train()
    for step in clock.steps:
        step["update"] = step["step"] - step.pop("prepare")
    logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    trained = round(n * logged[-1]["completions/mean_length"])
    facts = {"grad_norm": [line["grad_norm"] for line in logged], "trained": trained}
    return clock.figures(), facts | {"trl": trl.__version__, "settings": settings}


def plain_head(temperature: float, model: nn.Module, ids: Tensor, mask: Tensor, keep: int, **unused: Any) -> tuple:
    """The logits of all completion positions at once, as in TRL before its tiled head, by TRL's own functions."""
    from trl.trainer.utils import selective_log_softmax_and_entropy

    logits = model(input_ids=ids, attention_mask=mask, logits_to_keep=keep + 1).logits[:, :-1] / temperature
    return *selective_log_softmax_and_entropy(logits, ids[:, -keep:], entropy_requires_grad=False), None


def measure_logprobs(way: str, args: argparse.Namespace) -> tuple[dict, dict]:
    """A forward and backward pass over 4 x 512 completion tokens, beside a model and its gradients."""
    model = make_model(Size(151_936, 512, 1024, 1, 8, 8, prompts=4, limit=512), tied=False)
    completion = (torch.arange(16 + 512, device=DEVICE) >= 16).long().expand(4, -1)
    ids = torch.randint(151_936, completion.shape, device=DEVICE)

    def logprobs() -> Tensor:  # a function, so that the logits themselves are gone before the backward pass
        if way == "token_logprobs":
            return token_logprobs(model, ids, torch.ones_like(ids), completion)[0]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2) * completion[:, 1:]

    clock = Clock()
    for _ in range(2):
        clock.held = bytes_held("VmRSS")  # when it counts, with the gradients
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            logp = logprobs()
        logp.sum().backward()
        clock.on_step_end()
    figures = clock.figures()
    return {"seconds": figures["step"], "cpu_seconds": figures["step_cpu"], "memory_gb": figures["memory_gb"]}, {}


WAYS = {
    "step": {
        "ours": measure_ours,
        "TRL": measure_trl,
        "TRL, plain head": partial(measure_trl, plain=True),
        "TRL, continuous batching": partial(measure_trl, continuous=True),
    },
    "logprobs": {way: partial(measure_logprobs, way) for way in ("token_logprobs", "full logits")},
}
