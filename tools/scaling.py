"""What a step needs as models and machines grow: memory, seconds, bytes sent, time lost waiting. Arithmetic alone.

    python scaling.py                                   prints every table of SCALING.md
    python scaling.py --bandwidth 4.8e12 --card 141e9   the same for other figures; --help lists them
    python scaling.py --write                           puts the tables into SCALING.md
    python scaling.py --check                           changes nothing; exits with 1 where SCALING.md has others

Memory is that of `memory.needed`, which a run itself goes by. Seconds come from rates and from shares of them that are
assumed to be reached. Lengths are drawn with a fixed seed, dealt to ranks and cut into batches as in training.

    decode step    max(bytes of weights and cache that it moves / bandwidth, kernels it launches x time of a launch)
    update         8 P FLOP a token (forward, again for the checkpoint, backward) + 8 layers h T^2 a sequence (causal)
    ring of n      all-reduce of b bytes: each GPU sends 2 (n - 1) / n b; all-gather, reduce-scatter: half of that

Left out: prefill, scoring with the reference, rewards, the optimizer's own step, finished rows that stay in a batch for
a while, latency of links, hooks of sharded layers; and that the last product of a layer is not computed again for the
checkpoint (a few percent of the update). Communication is counted as if none were hidden behind computing.
"""

import argparse
import heapq
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from config import Config, UserError, resolve
from infra import memory

PAGE = Path(__file__).parent.parent / "docs" / "scaling.md"
BLOCK = re.compile(r"(<!-- made by scaling\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MACHINE, GPUS = 8, (1, 8, 64, 128, 1024)  # GPUs of a machine, and in all
BATCH_BYTES = 3 * 8 + 4 + 8  # of a position in `batch.Batch`: ids, attention, mask, the sampler's log-prob; its weight


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False
    kind: type = Qwen2Config

    def config(self) -> PretrainedConfig:
        return self.kind(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
        )  # fmt: skip


SHAPES = {
    "0.5B": Shape(896, 4864, 24, 14, 2, 151936, tied=True),
    "1.5B": Shape(1536, 8960, 28, 12, 2, 151936, tied=True),
    "3B": Shape(2048, 11008, 36, 16, 2, 151936, tied=True),
    "7B": Shape(3584, 18944, 28, 28, 4, 152064),
    "14B": Shape(5120, 13824, 48, 40, 8, 152064),
    "32B": Shape(5120, 27648, 64, 40, 8, 152064),
    "70B": Shape(8192, 28672, 80, 64, 8, 128256, kind=LlamaConfig),
}


def given(default: float, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class Given:
    card: float = given(80e9, "bytes of GPU memory")
    bandwidth: float = given(3.35e12, "bytes a second from GPU memory: H100 SXM, data sheet")
    flops: float = given(989e12, "FLOP a second, dense bf16: H100 SXM, data sheet")
    link: float = given(450e9, "bytes a second from a GPU to the others of its machine: NVLink, one direction")
    network: float = given(50e9, "bytes a second from a GPU to other machines: 400 Gb/s for each GPU")
    host: float = given(2e12, "bytes of memory that the CPUs of a machine have")
    decode_share: float = given(0.4, "share of the bandwidth that decoding reaches: assumed")
    update_share: float = given(0.4, "share of the matrix rate that the update reaches: assumed")
    link_share: float = given(0.8, "share of the links' rates that is reached: assumed")
    launch: float = given(6e-6, "seconds to launch a kernel from Python: assumed")
    kernels: float = given(40, "operations of a layer in a decode step, a kernel each: counted by a test")
    cache_moves: float = given(3, "times the cache is moved for a token: read and written to append, read to attend")
    prompt: int = given(512, "tokens of a prompt")
    limit: int = given(4096, "tokens that a completion may have")
    mean: float = given(1024, "mean of the log-normal lengths before they are cut at the limit")
    sigma: float = given(0.8, "their spread: standard deviation of the logarithm")
    per_gpu: int = given(16, "completions of a step on each GPU, where a step grows with the GPUs")
    fixed: int = given(1024, "completions of a step, where it does not")
    oversample: float = given(1.25, "completions started for each that is needed, where the longest are dropped")


# ---- Memory. `size`: the GPUs that share one copy of the model; 1 is without --shard ----


@cache
def settings(g: Given, size: int, beta: float = 0.0, micro_batch: int | None = None) -> Config:
    config = Config(
        prompts_per_step=g.per_gpu * size, num_generations=1, max_completion_length=g.limit, eval_every=0, beta=beta,
        shard=size > 1, shard_size=size, micro_batch_tokens=micro_batch, gradient_checkpointing=True,
    )  # fmt: skip
    return resolve(config, on_gpu=True)


@cache
def needs(g: Given, shape: Shape, size: int, beta: float = 0.0, micro_batch: int | None = None) -> dict[str, float]:
    """`memory.needed`, and of it: what stays from step to step, the most at once, the least that it can do with."""
    need = memory.needed(shape.config(), settings(g, size, beta, micro_batch), size, g.prompt)
    return need | dict(zip(("stays", "peak", "least"), memory.totals(need)))


def parameters(shape: Shape) -> int:
    return round(needs(Given(), shape, 1)["weights"] / 4)


def products(shape: Shape) -> int:
    """Parameters of matrix products: an input embedding that is not the output head, too, is only looked up."""
    return parameters(shape) - (0 if shape.tied else shape.vocab * shape.hidden)


def cache_of_token(shape: Shape) -> int:
    return 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * 2


def verdict(need: dict[str, float], card: float) -> str:
    """By `memory.check`. In parts: with fewer completions at once or smaller micro-batches than the default."""
    try:
        memory.check(need, card)
    except UserError:
        return "no"
    return "yes" if need["peak"] <= card else "in parts"


def largest(g: Given, shape: Shape, size: int, beta: float, card: float) -> Shape:
    """-> the deepest model of this width that fits, with micro-batches of one completion: all is linear in its depth"""

    def layers(part: str) -> float:
        few, more = (needs(g, replace(shape, layers=n), size, beta, g.prompt + g.limit) for n in (8, 16))
        low, high = (need["stays"] + need[part] for need in (few, more))
        return 8 + (card - low) / (high - low) * 8

    return replace(shape, layers=int(min(layers("rollout"), layers("update"))))


def size_of(g: Given, shape: Shape, gpus: int) -> int | None:
    """The fewest GPUs to a copy that fit: one, those of a machine, all; or None."""
    sizes = (1, min(MACHINE, gpus), gpus)
    return next((size for size in sizes if verdict(needs(g, shape, size), g.card) != "no"), None)


def rows_at_once(g: Given, shape: Shape, size: int) -> int:
    """As --rollout_tokens says, or what the card has room for."""
    length = g.prompt + g.limit
    room = g.card - needs(g, shape, size)["stays"] - 2 * parameters(shape)
    return max(1, min(settings(g, size).rollout_tokens // length, int(room / length / cache_of_token(shape))))


def micro_batch_tokens(g: Given, shape: Shape, size: int) -> int:
    """The default, or those of one completion where that does not fit."""
    need = needs(g, shape, size)
    fits = need["stays"] + need["update"] <= g.card
    return settings(g, size).micro_batch_tokens if fits else g.prompt + g.limit


# ---- Seconds ----


@cache
def lengths(g: Given, n: int, repeat: int = 0) -> np.ndarray:
    drawn = np.random.default_rng([n, repeat]).normal(np.log(g.mean) - g.sigma**2 / 2, g.sigma, n)
    return np.exp(drawn).astype(int).clip(1, g.limit)


@cache
def live(g: Given, n: int, gpus: int, rows: int, repeat: int = 0) -> np.ndarray:
    """-> (gpus, batches, limit): the completions that a token is sampled for, `rows` at once on each GPU"""
    drawn, ends = lengths(g, n, repeat), [n * rank // gpus for rank in range(gpus + 1)]  # as ranks.share
    most = max(end - start for start, end in zip(ends, ends[1:]))
    counts = np.zeros((gpus, len(range(0, most, rows)), g.limit), dtype=np.int32)
    for rank, (start, end) in enumerate(zip(ends, ends[1:])):
        for batch, first in enumerate(range(start, end, rows)):
            ended = np.bincount(drawn[first : min(end, first + rows)], minlength=g.limit + 1)
            counts[rank, batch] = ended[::-1].cumsum()[::-1][1:]
    return counts


def decode_step(g: Given, shape: Shape, rows: Any, context: Any) -> Any:
    """-> seconds of one more token for so many rows with so many tokens each; 0 for none"""
    moved = 2 * products(shape) + rows * context * cache_of_token(shape) * g.cache_moves
    return np.maximum(moved / (g.bandwidth * g.decode_share), g.kernels * g.launch * shape.layers) * (rows > 0)


def rollout_seconds(g: Given, shape: Shape, counts: np.ndarray) -> np.ndarray:
    """-> of each GPU"""
    return decode_step(g, shape, counts, g.prompt + np.arange(counts.shape[-1])).sum((1, 2))


@cache
def micro_batches(g: Given, n: int, gpus: int, tokens: int) -> list[tuple[int, int]]:
    """-> (rows, width) of those of rank 0, which has the most work: rows are dealt in the order of their lengths."""
    pieces: list[tuple[int, int]] = []
    for length in g.prompt + np.sort(lengths(g, n))[::-1][::gpus]:
        rows, width = pieces[-1] if pieces else (0, 0)
        if pieces and (rows + 1) * width <= tokens:
            pieces[-1] = rows + 1, width
        else:
            pieces.append((1, int(length)))
    return pieces


def update_seconds(g: Given, shape: Shape, pieces: list[tuple[int, int]]) -> float:
    flop = sum(rows * (8 * products(shape) * T + 8 * shape.layers * shape.hidden * T**2) for rows, T in pieces)
    return flop / (g.flops * g.update_share)


# ---- Bytes ----


def sent(shape: Shape, size: int, gpus: int) -> dict[str, float]:
    """-> bytes that each GPU sends: in a step, in each micro-batch, and in each micro-batch to its peers elsewhere"""
    P, copies, part = parameters(shape), gpus // size, (size - 1) / size
    if size == 1:
        return {"step": 2 * (gpus - 1) / gpus * 4 * P, "micro-batch": 0, "between": 0}  # gradients in fp32
    # Gathered once to sample; gathered for the forward and for the backward pass, in bf16, and gradients reduced, in
    # fp32; then each part of the gradient is added up over the copies.
    return {"step": part * 2 * P, "micro-batch": part * (2 * 2 + 4) * P, "between": 2 * (1 - 1 / copies) * 4 * P / size}


def sent_seconds(g: Given, shape: Shape, size: int, gpus: int) -> dict[str, float]:
    """A ring over whole machines crosses from one to the next through the network of all their GPUs."""
    of_machines = (gpus if size == 1 else size) > MACHINE
    ring = min(g.link, MACHINE * g.network) if of_machines else g.link
    rates = {"step": ring, "micro-batch": ring, "between": g.network}
    return {name: b / (rates[name] * g.link_share) for name, b in sent(shape, size, gpus).items()}


def of_completion_token() -> tuple[int, int]:
    """-> bytes of a completion's token, its id and log-prob: as `all_gather_object` sends them, as lists hold them"""
    return 5 + 9, sys.getsizeof(2**17) + sys.getsizeof(0.5) + 2 * 8


def step_seconds(g: Given, shape: Shape, size: int, n: int, gpus: int) -> tuple[float, float, float]:
    """-> of rollout, update, communication"""
    counts = live(g, n, gpus, rows_at_once(g, shape, size))
    pieces = micro_batches(g, n, gpus, micro_batch_tokens(g, shape, size))
    its = sent_seconds(g, shape, size, gpus)
    talk = its["step"] + len(pieces) * (its["micro-batch"] + its["between"])
    return rollout_seconds(g, shape, counts).max(), update_seconds(g, shape, pieces), talk


# ---- Waiting ----


def handed_out(drawn: np.ndarray, slots: int) -> np.ndarray:
    """-> how many completions a token is sampled for, at each time, where a free slot of any GPU takes the next one"""
    free, change = [0] * slots, np.zeros(int(drawn.sum()) + 1, dtype=int)
    for length in drawn:
        start = heapq.heappop(free)
        heapq.heappush(free, start + int(length))
        change[start] += 1
        change[start + length] -= 1
    return change.cumsum()[: max(free)]


def rollout_ways(g: Given, shape: Shape, n: int, gpus: int, rows: int, repeat: int) -> dict[str, float]:
    """-> one rollout's lengths, shares and seconds, as it is done and in other ways"""
    drawn, counts = lengths(g, n, repeat), live(g, n, gpus, rows, repeat)
    seconds = rollout_seconds(g, shape, counts)
    context = g.prompt + (drawn.astype(float) ** 2).sum() / drawn.sum() / 2  # behind a sampled token, on average
    more = round(n * g.oversample)
    enough = np.sort(lengths(g, more, repeat))[n - 1]
    full = min(rows, n // gpus)
    its = {
        "longest": drawn.max(), "of a GPU": (counts > 0).sum((1, 2)).mean(),
        "waiting": 1 - seconds.mean() / seconds.max(), "today": seconds.max(),
        "handed out": decode_step(g, shape, np.ceil(handed_out(drawn, rows * gpus) / gpus), context).sum(),
        "dropped": rollout_seconds(g, shape, live(g, more, gpus, rows, repeat)[..., :enough]).max(),
        "full": drawn.sum() / gpus / full * float(decode_step(g, shape, full, context)),
    }  # fmt: skip
    return its | {"lost": 1 - its["full"] / its["today"]}


@cache
def mean_ways(g: Given, shape: Shape, n: int, gpus: int, rows: int) -> dict[str, float]:
    repeats = max(1, min(16, 8192 // n))
    ways = [rollout_ways(g, shape, n, gpus, rows, repeat) for repeat in range(repeats)]
    return {name: float(np.mean([its[name] for its in ways])) for name in ways[0]}


# ---- Tables ----


def table(names: list[str], rows: Iterable[list[Any]]) -> str:
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("|" + "".join(f" {cell} |" if cell != "" else " |" for cell in line) for line in lines)


def gb(x: float) -> str:
    return f"{x / 1e9:.1f}" if x < 99.95e9 else f"{x / 1e9:,.0f}"


def short(x: float) -> str:
    return f"{x:.0f}" if x >= 9.5 or x == 0 else f"{x:.2g}"


def given_table(g: Given) -> str:
    values = {f: getattr(g, f.name) for f in fields(g)}
    rows = [[f"`--{f.name}`", f"{x / 1e9:g}e9" if x > 1e6 else f"{x:g}", f.metadata["help"]] for f, x in values.items()]
    return table(["flag", "default", ""], rows)


def memory_table(g: Given) -> str:
    parts, rows = ("weights", "Adam", "reference", "rollout", "update"), []
    for name, shape in SHAPES.items():
        for size in (1, MACHINE, 128):
            need, without = needs(g, shape, size, beta=0.1), needs(g, shape, size)
            head = f"**{name}**: {parameters(shape) / 1e9:.3f}" if size == 1 else ""
            rows.append([head, size, *(gb(need[part]) for part in parts), gb(without["peak"]), gb(without["least"])])
    return table(["10⁹ parameters", "GPUs to a copy", *parts, "peak, no reference", "least, no reference"], rows)


PLACES = {  # (GPUs to a copy, bytes of a card, width to deepen)
    "80 GB, any number": (1, 80e9, "7B"), "141 GB, any number": (1, 141e9, "7B"),
    "8 × 80 GB, `--shard`": (8, 80e9, "32B"), "16 × 8 × 80 GB, `--shard`": (8, 80e9, "32B"),
    "16 × 8 × 80 GB, `--shard_size 128`": (128, 80e9, "32B"),
}  # fmt: skip


def fits_table(g: Given) -> str:
    def cell(without: str, with_it: str) -> str:
        return without if without == with_it else f"{without}; {with_it}"

    def most(at_once: int, size: int, card: float, width: str) -> str:
        few = replace(g, per_gpu=at_once)
        deep = [largest(few, SHAPES[width], size, beta, card) for beta in (0.0, 0.1)]
        return cell(*(f"{parameters(shape) / 1e9:.1f}" for shape in deep))

    rows = [
        [name, *(cell(*(verdict(needs(g, shape, size, beta), card) for beta in (0.0, 0.1)))
                 for size, card, _ in PLACES.values())]
        for name, shape in SHAPES.items()
    ]  # fmt: skip
    for at_once in (1, g.per_gpu):
        rows.append([f"largest, {at_once} at once", *(most(at_once, *place) for place in PLACES.values())])
    return table(["", *PLACES], rows)


QUESTIONS = {  # (model, GPUs to a copy, bytes of a card)
    "7B on 8 × 80 GB, `--shard`": ("7B", 8, 80e9), "7B on 8 × 80 GB, without": ("7B", 1, 80e9),
    "3B on one of 141 GB": ("3B", 1, 141e9), "7B on one of 141 GB": ("7B", 1, 141e9),
    "7B on two of 141 GB, `--shard`": ("7B", 2, 141e9),
}  # fmt: skip


def answers_table(g: Given) -> str:
    rows = []
    for question, (name, size, card) in QUESTIONS.items():
        for beta, what in ((0.0, question), (0.1, "with a reference")):
            need = needs(g, SHAPES[name], size, beta)
            gradients, copy = need["weights"], 2 * parameters(SHAPES[name])
            cells = need["stays"], gradients, copy, need["rollout"], need["update"], need["peak"], need["least"]
            rows.append([what, *map(gb, cells), verdict(need, card)])
    names = [
        "",
        "stays",
        "gradients",
        "bf16 copy",
        "rollout with copy",
        "update with gradients",
        "peak",
        "least",
        "fits",
    ]
    return table(names, rows)


def step_table(g: Given) -> str:
    def cell(shape: Shape, n: int, gpus: int) -> str:
        if (size := size_of(g, shape, gpus)) is None:
            return ""
        seconds = " + ".join(map(short, step_seconds(g, shape, size, n, gpus)))
        return seconds if size == 1 else f"{seconds} (1/{size})"

    names = [f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS]
    rows = [
        [f"{name}, {what}", *(cell(shape, n or g.per_gpu * gpus, gpus) for gpus in GPUS)]
        for what, n in ((f"{g.per_gpu} a GPU", 0), (f"{g.fixed} in all", g.fixed))
        for name, shape in SHAPES.items()
        if size_of(g, shape, GPUS[-1])
    ]
    return table(["model, completions", *names], rows)


def sent_table(g: Given) -> str:
    columns = {  # GPUs to a copy, GPUs, what
        "without `--shard`, a step, 8 GPUs": (1, 8, "step"), "128 GPUs": (1, 128, "step"),
        "`--shard`, a rollout": (8, 8, "step"), "a micro-batch, in the machine": (8, 8, "micro-batch"),
        "among 16 machines": (8, 128, "between"), "`--shard_size 128`, a micro-batch": (128, 128, "micro-batch"),
    }  # fmt: skip
    rows = []
    for name, shape in SHAPES.items():
        cells = [
            f"{gb(sent(shape, *where)[what])}: {short(sent_seconds(g, shape, *where)[what])} s"
            for *where, what in columns.values()
        ]
        length = g.prompt + g.limit
        computing = update_seconds(g, shape, [(settings(g, 8).micro_batch_tokens // length, length)])
        rows.append([name, *cells, f"{short(computing)} s"])
    return table(["GB sent by a GPU", *columns, "computing a micro-batch"], rows)


def waiting_table(g: Given, name: str = "7B") -> str:
    steps = [(g.per_gpu * gpus, gpus) for gpus in GPUS[1:]] + [(g.fixed, gpus) for gpus in GPUS[1:]]
    rows = []
    for n, gpus in dict.fromkeys(steps):
        its = mean_ways(g, SHAPES[name], n, gpus, rows_at_once(g, SHAPES[name], MACHINE))
        cells = [f"{its['longest']:.0f}", f"{its['of a GPU']:.0f}", f"{its['waiting']:.0%}", f"{its['lost']:.0%}"]
        rows.append([gpus, n, *cells, *(short(its[way]) for way in ("today", "handed out", "dropped", "full"))])
    names = ["GPUs", "completions", "longest", "tokens of a GPU one after the other", "waiting", "lost in all"]
    return table([*names, "seconds", "handed out one by one", "longest dropped", "always full"], rows)


def ways_out_table(g: Given) -> str:
    """Today's choices, in the order in which they begin to hurt."""
    shape, everywhere = SHAPES["7B"], g.per_gpu * GPUS[-1]
    lost = [mean_ways(g, shape, g.per_gpu * gpus, gpus, rows_at_once(g, shape, 8))["lost"] for gpus in (8, GPUS[-1])]
    seconds = step_seconds(g, shape, 8, g.per_gpu * 8, 8)
    reading = {name: 2 * products(s) / (g.bandwidth * g.decode_share) for name, s in SHAPES.items()}
    launched = [name for name, s in SHAPES.items() if g.kernels * g.launch * s.layers > reading[name]]
    many = g.per_gpu, rows_at_once(g, shape, 8)
    moving = [[float(decode_step(replace(g, cache_moves=moves, launch=0), shape, n, g.prompt + g.mean)) for n in many]
              for moves in (1, g.cache_moves)]  # fmt: skip
    copying = [1 - once / today for once, today in zip(*moving)]
    one = replace(g, per_gpu=1)
    copies = [parameters(largest(one, SHAPES["32B"], size, 0.0, g.card)) / 1e9 for size in (8, 128, 1024)]
    computed = update_seconds(g, shape, [(1, 1)])
    even = [sum(sent_seconds(g, shape, *where)[part] for part in ("micro-batch", "between")) / computed
            for where in ((8, 8), (8, 128), (128, 128))]  # fmt: skip
    wire, held = (x * lengths(g, everywhere).sum() for x in of_completion_token())
    batch = everywhere * (g.prompt + g.limit) * BATCH_BYTES
    tenth, host = g.card / 10 / batch * everywhere, g.host / 4e9
    rows = [
        ["all wait for the longest completion",
         f"at any size: {lost[0]:.0%} of the rollout's seconds on 8 GPUs, {lost[1]:.0%} on {GPUS[-1]} (7B, {g.per_gpu} "
         f"a GPU); the rollout is {seconds[0] / sum(seconds):.0%} of the step",
         "the longest dropped; sampling while training, corrected by `--tis_cap`"],
        ["kernels launched one by one from Python",
         f"small models: the weights of {', '.join(launched)} are read sooner than that",
         "CUDA graphs; an inference engine"],
        ["the cache is copied to append to it",
         f"many rows: {copying[0]:.0%} of the seconds with {many[0]} rows, {copying[1]:.0%} with {many[1]} (7B)",
         "a cache written in place"],
        ["each GPU gathers all weights to sample",
         f"large models: {copies[0]:.1f}·10⁹ parameters with 8 GPUs to a copy, {copies[1]:.1f} with 128, "
         f"{copies[2]:.1f} with {GPUS[-1]}", "sampling with split weights (tensor parallelism)"],
        ["gradients reduced in each micro-batch",
         f"short micro-batches: sending takes as long as computing at {even[0]:,.0f} tokens in one machine, "
         f"{even[1]:,.0f} in 16, {even[2]:,.0f} with `--shard_size 128`; the slower the network, the more",
         "larger micro-batches; gradients kept whole until the last one"],
        ["every rank holds all completions of a step",
         f"large steps: {everywhere:,} completions are {gb(wire)} GB received, {gb(held)} GB of Python numbers and "
         f"{gb(batch)} GB on each GPU; {round(tenth, -3):,.0f} take a tenth of it",
         "each rank keeps the rows that it trains on"],
        ["rank 0 loads and saves the whole model in fp32",
         f"{host:.0f}·10⁹ parameters in {gb(g.host)} GB of host memory, without `--shard` (every rank loads) "
         f"{host / MACHINE:.1f}: later than all else", "each rank reads its part"],
    ]  # fmt: skip
    return table(["today", "gives way", "to"], rows)


# ---- The page ----

TABLES = dict(
    fits=fits_table, answers=answers_table, memory=memory_table, step=step_table, waiting=waiting_table,
    sent=sent_table, ways_out=ways_out_table, given=given_table,
)  # fmt: skip


def filled(text: str, g: Given) -> str:
    return BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]](g)}\n\n{match[3]}", text)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    parser.add_argument("--check", action="store_true", help=f"exit with 1 where {PAGE.name} has others")
    for f in fields(Given):
        parser.add_argument(f"--{f.name}", type=type(f.default), default=f.default, help=f.metadata["help"])
    args = vars(parser.parse_args(words))
    write, check, g = args.pop("write"), args.pop("check"), Given(**args)
    if not (write or check):
        print("\n\n".join(f"{name}\n\n{make(g)}" for name, make in TABLES.items()))
        return 0
    if g != Given():
        parser.error(f"{PAGE.name} is for the default figures")
    text = PAGE.read_text()
    if write:
        PAGE.write_text(filled(text, g))
        return 0
    stale = filled(text, g) != text or {match[2] for match in BLOCK.finditer(text)} != set(TABLES)
    print(f"{PAGE.name} has {'other tables: --write puts these there' if stale else 'these tables'}")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
