"""Sample on inference servers that speak vLLM's HTTP API, with --server.

Token ids go in and come out, so nothing is encoded again. Weights go through a folder that both sides see: the first
rank writes them, and each server reads them. Adapters are written to the same folder.

A server that has restarted answers with the weights that it started with, and without an error. So each hand-over has
a name of its own, which is stored in the server as the version of its weights. Completions count only if the server had
the same version before the first of them was asked for and after the last one was complete. Otherwise the weights are
handed over again, and all completions of that server are asked for again.

Before the first step, a trial finds out whether weights arrive: the server gets weights with noise in every tensor, and
its log-probs must be nearer to the trainer's under these weights than to the trainer's with the old weights of any part
of the model. Then the true weights follow.

`served` makes only requests and replies. It uses neither the model nor another rank, so it may run in a thread.
`hand_over` writes the weights, on all ranks together.

Left out: transfer of weights between GPUs, kept sets, and streams that do not depend on the number of ranks.
"""

import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from advantage import Group
from batch import Batch, collate
from config import UserError
from infra import ranks
from infra.checkpoint import write_model
from infra.decoding import decoding
from infra.lora import adapted_layers, save_adapters, trained_tensors
from infra.seeds import generator
from infra.shard import whole_weights
from logprob import token_logprobs
from rollout import Completion, Progress, Reply, Sampling, rollout, uniforms

WITHOUT_PROXY = build_opener(ProxyHandler({}))
REQUESTS = 256  # how many a rank sends to a server at once; the server queues what it cannot compute yet
# vLLM takes what a request leaves out from the model's generation_config.json.
NEUTRAL = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0)
# The largest mean difference of the log-probs of tokens that is taken for rounding. A wrong model or temperature gives
# more.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
TRIAL_PROMPTS, TRIAL_LENGTH = 8, 32


class Lost(Exception):
    """A server does not answer, or not with our weights. It may do so later."""


@dataclass
class Server:
    urls: list[str]
    folder: Path  # the weights of hand-over `weights` are in folder / weights
    timeout: float  # how long to wait for an answer, and how long a server may be lost
    has_adapters: bool
    dtype: torch.dtype  # of the weights that are handed over
    holder: tempfile.TemporaryDirectory | None  # deletes the folder when the process ends; on the first rank
    weights: str = ""  # the name of the last hand-over
    is_current: bool = False  # whether the model has not changed since then
    is_tried: bool = False  # before, a server that is lost ends the run at once
    seconds: Counter = field(default_factory=Counter)  # handover, waited: of this step
    replying: Lock = field(default_factory=Lock)  # one reply at a time, because they are the user's code

    def take_seconds(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        return {f"seconds_{name}": self.seconds.pop(name, 0.0) for name in ("handover", "waited")}


@contextmanager
def sampler(run: Any) -> Iterator[Callable[..., list[Completion]]]:
    """Yield the function that samples: `rollout`, with the model prepared for it, or one that takes the same arguments
    and asks servers that have the weights of the model. All ranks must call this."""
    cfg = run.config
    if not cfg.server:
        with decoding(run.model, getattr(torch, cfg.sampler_dtype), cfg.decode, cfg.max_completion_length):
            yield rollout
        return
    if run.server is None:
        run.server = connect(run)
    hand_over(run, run.server)
    yield partial(served, server=run.server)


# ---- Requests ----


def ask(server: Server, url: str, path: str, body: dict | None = None) -> dict:
    """Send a request, which is a POST if it has a body. Return the answer, if it is JSON."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        with WITHOUT_PROXY.open(request, timeout=server.timeout) as answer:
            text = answer.read()
            return json.loads(text) if text.startswith(b"{") else {}
    except HTTPError as error:
        words = " ".join(error.read().decode(errors="replace").split())
        kind = Lost if error.code >= 500 else UserError
        raise kind(f"--server {url}: {path} gave {error.code} {words:.600}") from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: not an address
        raise Lost(f"--server {url}: {error}") from None


def version(server: Server, url: str) -> str:
    return str(ask(server, url, "/weight_info").get("weight_version"))


def load(server: Server, url: str) -> str:
    """Let a server load the weights of the last hand-over. Return their new version, which no other call returns."""
    folder = str(server.folder / server.weights)
    if server.has_adapters:
        asked = dict(lora_name="adapters", lora_path=folder, load_inplace=True)
        ask(server, url, "/v1/load_lora_adapter", asked)
    else:
        ask(server, url, "/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=folder)))
    ask(server, url, "/reset_prefix_cache", {})
    held = f"{server.weights}-{uuid4().hex}"
    ask(server, url, "/update_weight_version", dict(new_version=held))
    return held


def with_our_weights(server: Server, url: str, do: Callable[[], Any]) -> Any:
    """Return what `do` returns, if the server has the weights of the last hand-over from the start of the call to its
    end. Otherwise hand them over again and call it again, until the server was lost for longer than server.timeout."""
    lost_since = None
    while True:
        try:
            held = version(server, url)
            if not held.startswith(server.weights):
                held = load(server, url)
            made = do()
            if version(server, url) == held:
                return made
            raise Lost(f"--server {url}: other weights were loaded; a server can have one run only")
        except Lost as error:
            lost_since = lost_since or time.monotonic()
            if not server.is_tried or time.monotonic() - lost_since > server.timeout:
                raise UserError(str(error)) from None
            time.sleep(1.0)


# ---- Completions ----


def served(
    model: PreTrainedModel | None,
    prompts: list[list[int]],
    uniform: np.ndarray | None,
    sampling: Sampling,
    *,
    replies: Any = None,
    progress: Progress | None = None,
    server: Server,
) -> list[Completion]:
    """Sample as `rollout` does, but on the servers, to which the prompts are dealt out in turn. The seed of a turn is
    the uniform number at its first token, so it is a function of the seed, step, prompt and sample. `progress` is never
    called."""
    start = time.perf_counter()

    def complete_one(url: str, i: int) -> Completion:
        own = None if uniform is None else uniform[i]
        return complete(server, url, prompts[i], own, sampling, None if replies is None else replies[i])

    def share_of(k: int) -> list[Completion]:
        url, rows = server.urls[k], range(k, len(prompts), len(server.urls))
        with ThreadPoolExecutor(REQUESTS) as pool:
            return with_our_weights(server, url, lambda: list(pool.map(partial(complete_one, url), rows)))

    with ThreadPoolExecutor(len(server.urls)) as pool:
        shares = list(pool.map(share_of, range(len(server.urls))))
    server.seconds["waited"] += time.perf_counter() - start
    return [shares[i % len(shares)][i // len(shares)] for i in range(len(prompts))]


def complete(
    server: Server, url: str, prompt: list[int], uniform: np.ndarray | None, sampling: Sampling, reply: Reply | None
) -> Completion:
    """Ask for the turns of one completion, one after another."""
    tokens: list[tuple[int, float, list[tuple[int, float]]]] = []  # id, log-prob and head of each token
    written: list[bool] = []
    while True:
        room = sampling.max_completion_length - len(tokens)
        seed = None if uniform is None else int(uniform[len(tokens)] * 2**53)
        turn, has_ended = ask_turn(server, url, prompt + [token for token, *_ in tokens], room, seed, sampling)
        tokens, written = tokens + turn, written + [True] * len(turn)
        reply_ids = None
        if has_ended and reply is not None:
            with server.replying:
                reply_ids = reply([token for token, *_ in turn])
        next_turn = len(tokens) + len(reply_ids or [])
        truncated = not has_ended or (bool(reply_ids) and next_turn >= sampling.max_completion_length)
        if truncated or not reply_ids:
            break
        tokens += [(token, 0.0, [(0, 0.0)] * len(turn[0][2])) for token in reply_ids]
        written += [False] * len(reply_ids)
    completion = Completion(*zip(*[pair[:2] for pair in tokens]), truncated, written=written if reply else None)
    if sampling.head:
        top = np.array([head for *_, head in tokens], np.float64)  # (T, K, 2)
        # What the K have not together. The sampled id is at least as likely as the server says, where it is not in K.
        others = np.maximum(1 - np.exp(top[..., 1]).sum(1), 0.0)
        outside = (top[..., 0] != completion.ids[:, None]).all(1)
        others = np.where(outside, np.maximum(others, np.exp(completion.logp)), others)
        with np.errstate(divide="ignore"):
            completion.head_logp = np.c_[top[..., 1], np.log(others)].astype(np.float32)
        completion.head_ids = top[..., 0].astype(np.int32)
    return completion


def ask_turn(
    server: Server, url: str, ids: list[int], room: int, seed: int | None, sampling: Sampling
) -> tuple[list[tuple[int, float, list[tuple[int, float]]]], bool]:
    """Ask for one turn after these ids. Return the id, log-prob and head of each token, and whether the turn has ended,
    which it has not if `room` tokens were too few."""
    asked = NEUTRAL | dict(
        prompt=ids,
        max_tokens=room,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed,
        stop=sampling.stop,
        stop_token_ids=sampling.eos_ids,
        ignore_eos=True,  # only eos_ids end a turn
        skip_special_tokens=False,
        logprobs=sampling.head,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    asked |= {"model": "adapters"} if server.has_adapters else {}
    choice = ask(server, url, "/v1/completions", asked)["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise Lost(f"--server {url}: a completion ended with {choice['finish_reason']}")
    turn_ids, logprobs = choice["token_ids"], choice["logprobs"]
    heads = [[] for _ in turn_ids]
    if sampling.head:
        tops = [{int(key.split(":")[1]): x for key, x in top.items()} for top in logprobs["top_logprobs"]]
        # vLLM adds the sampled id to its list. It is the least likely one of the list if it is not among the K.
        heads = [sorted(top.items(), key=lambda pair: -pair[1])[: sampling.head] for top in tops]
    return list(zip(turn_ids, logprobs["token_logprobs"], heads)), choice["finish_reason"] == "stop"


# ---- Weights ----


def connect(run: Any) -> Server:
    """Find the servers, and try them out. All ranks must call this."""
    cfg, dtype, holder = run.config, getattr(torch, run.config.sampler_dtype), None
    if ranks.rank() == 0:
        holder = tempfile.TemporaryDirectory(".partial", "served-", cfg.server_folder or cfg.out)
    folder = Path(ranks.on_first(lambda: holder.name))
    server = Server(cfg.server, folder, cfg.server_timeout, bool(adapted_layers(run.model)), dtype, holder)
    with decoding(run.model, dtype):
        server.weights = ranks.on_first(trial, run, server)
    server.is_tried = True
    # From now on, every update makes the weights on the servers old.
    run.optimizer.register_step_post_hook(lambda *_: setattr(server, "is_current", False))
    return server


def hand_over(run: Any, server: Server) -> None:
    """Give the weights of the model to all servers, unless they have them. All ranks must call this."""
    start = time.perf_counter()
    if not server.is_current:
        is_sharded = isinstance(run.model, FSDPModule) and not server.has_adapters
        weights = whole_weights(run.model) if is_sharded else trained_tensors(run.model)
        server.weights = ranks.on_first(put, run.model, weights, server)
        server.is_current = True
    server.seconds["handover"] += time.perf_counter() - start


def put(model: PreTrainedModel, weights: dict[str, Tensor], server: Server) -> str:
    """Write the weights, without flushing them to disk, and let every server load them. Return their new name."""
    before, server.weights = server.folder / server.weights, uuid4().hex
    folder = server.folder / server.weights
    folder.mkdir()
    if server.has_adapters:
        save_adapters(folder, model)
    else:
        write_model(folder, model, {name: x.detach().to("cpu", server.dtype) for name, x in weights.items()})
    with ThreadPoolExecutor(len(server.urls)) as pool:
        list(pool.map(lambda url: with_our_weights(server, url, lambda: None), server.urls))
    if before != server.folder:
        shutil.rmtree(before)
    return server.weights


# ---- The trial ----


@torch.no_grad()
def trial(run: Any, server: Server) -> str:
    """Make sure that the servers compute with the weights that they are given, and as the trainer does. Only the first
    rank calls this, with whole weights in the served dtype. Return the name of the last hand-over."""
    model, tensors, seed = run.model, trained_tensors(run.model), run.config.seed
    length = min(TRIAL_LENGTH, run.sampling.max_completion_length)
    plain = dict(top_p=1.0, top_k=0, min_p=0.0, stop=[], head=0, max_completion_length=length)
    sampling = replace(run.sampling, **plain)
    prompts = [row["prompt_ids"] for row in (run.task.train or run.task.eval)[:TRIAL_PROMPTS]]
    noisy = {name: with_noise(name, x, seed) for name, x in tensors.items()}
    with changed(tensors, noisy) as old:
        put(model, tensors, server)
        for url in server.urls:
            compare(model, prompts, sampling, seed, replace(server, urls=[url]), old_variants(model, tensors, old))
    name = put(model, tensors, server)
    for url in server.urls:
        alone = replace(server, urls=[url])
        compare(model, prompts, sampling, seed, alone, {})
        one, uniform = replace(sampling, max_completion_length=1), uniforms(seed, 0, [(0, i) for i in range(500)], 1)
        drawn = served(None, prompts[:1] * len(uniform), uniform, one, server=alone)
        logits = model(torch.tensor(prompts[:1], device=model.device), use_cache=False).logits[0, -1].double()
        p = (logits / sampling.temperature).softmax(-1).cpu().numpy()
        if not are_samples(np.array([completion.ids[0] for completion in drawn]), p):
            raise UserError(f"--server {url}: the tokens that it samples do not have the probabilities that it reports")
    return name


def compare(
    model: PreTrainedModel, prompts: list, sampling: Sampling, seed: int, server: Server, variants: dict[str, Callable]
) -> None:
    """Raise an error if the log-probs of a server are not the trainer's, or are nearer to those of a variant of the
    model in which one part has its old weights."""
    uniform = uniforms(seed, 0, [(p, 0) for p in range(len(prompts))], sampling.max_completion_length)
    completions = served(None, prompts, uniform, sampling, server=server)
    nothing = torch.zeros(1)
    groups = [Group(ids, {}, [one], nothing, advantages=nothing) for ids, one in zip(prompts, completions)]
    gap = partial(mean_gap, model, collate(groups, False, model.device), sampling.temperature)
    own, gaps = gap(), {}
    for name, with_old_part in variants.items():
        with with_old_part():
            gaps[name] = gap()
    nearest = min(gaps, key=gaps.get, default=None)
    if nearest and gaps[nearest] < own / 2:  # where an old part is in use, its gap is but rounding
        raise UserError(f"--server {server.urls[0]}: given new weights, it still computes with the old {nearest}")
    if not own <= TOLERANCE[server.dtype]:
        wanted = "it needs the same model and tokenizer, and the flag --logprobs-mode processed_logprobs"
        raise UserError(f"--server {server.urls[0]}: its log-probs are off by {own:.3g} on average; {wanted}")


def mean_gap(model: PreTrainedModel, batch: Batch, temperature: float) -> float:
    """Return the mean difference between the log-probs of the server and those of the model."""
    logp, _ = token_logprobs(model, batch.ids, batch.attention, batch.mask, temperature=temperature)
    return float((logp - batch.sampler_logp).abs()[batch.mask.bool()].mean())


def with_noise(name: str, x: Tensor, seed: int) -> Tensor:
    """Add noise of 5 % of the spread of x, or of 0.02 where all its values are equal, from a stream of its name."""
    stream = torch.Generator(x.device).manual_seed(int(generator(f"trial {name}", seed).integers(2**62)))
    noise = torch.randn(x.shape, generator=stream, device=x.device)
    spread = float(x.float().std(correction=0))
    return (x.float() + noise * (0.05 * spread or 0.02)).to(x.dtype)


@contextmanager
def changed(tensors: dict[str, Tensor], values: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Give tensors other values for a while. Yield their own values, which they have again afterwards, bit for bit."""
    own = {name: tensors[name].detach().cpu().clone() for name in values}
    try:
        for name, x in values.items():
            tensors[name].data.copy_(x)
        yield own
    finally:
        for name, x in own.items():
            tensors[name].data.copy_(x)


@contextmanager
def replaced(module: nn.Module, weight: Tensor) -> Iterator[None]:
    """Give a module a weight of its own for a while, although it shares one with another module."""
    shared = module.weight
    module.weight = nn.Parameter(weight.to(shared.device), requires_grad=False)
    try:
        yield
    finally:
        module.weight = shared


def old_variants(model: PreTrainedModel, tensors: dict[str, Tensor], old: dict[str, Tensor]) -> dict[str, Callable]:
    """Return for each part of the model a context in which this part has its old weights."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts: dict[str, dict[str, Tensor]] = {}
    variants: dict[str, Callable] = {}
    for name, x in tensors.items():
        if x is embedding.weight and x is head.weight:
            variants |= {"head": partial(replaced, head, old[name])}
            variants |= {"embedding": partial(replaced, embedding, old[name])}
        else:
            part = "embedding" if x is embedding.weight else "head" if x is head.weight else part_of(name, x)
            parts.setdefault(part, {})[name] = old[name]
    return variants | {part: partial(changed, tensors, values) for part, values in parts.items()}


def part_of(name: str, x: Tensor) -> str:
    if name.endswith((".lora_A", ".lora_B")):
        return "adapters"
    if re.search(r"norm|ln_", name) and x.dim() == 1:
        return "norms"
    if re.search(r"embed|wpe", name):
        return "embedding"
    return "attention" if re.search(r"attn|attention", name) else "feed-forward layers"


def are_samples(ids: np.ndarray, p: np.ndarray) -> bool:
    """Return whether these ids may be samples from p, by a chi-square test. Ids that are expected fewer than five times
    are counted together. True samples fail with a probability of about 1e-7."""
    counts, expected = np.bincount(ids, minlength=len(p)), p * len(ids)
    common = expected >= 5
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    df = len(counts)
    return bool(((counts - expected) ** 2 / np.maximum(expected, 5)).sum() <= df + 8 * df**0.5 + 32)
