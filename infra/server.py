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

from config import UserError
from infra import ranks
from infra.checkpoint import write_model
from infra.decoding import decoding
from infra.lora import adapted_layers, save_adapters, trained_tensors
from infra.seeds import generator
from infra.shard import whole_weights
from rollout import Completion, Progress, Reply, Sampling, has_stop, stop_window, uniforms

WITHOUT_PROXY = build_opener(ProxyHandler({}))
REQUESTS = 256  # how many a rank sends to a server at once; the server queues what it cannot compute yet
# vLLM takes what a request leaves out from the model's generation_config.json.
NEUTRAL = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0)
# The largest mean difference of the log-probs of tokens that is taken for rounding. A wrong model or temperature gives
# more.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
TRIAL_PROMPTS, TRIAL_LENGTH, SINGLE_TOKENS = 8, 32, 500


class Lost(Exception):
    """A server does not answer, or not with our weights. It may do so later."""


@dataclass
class Server:
    urls: list[str]
    folder: Path  # the weights of hand-over `weights` are in folder / weights
    timeout: float  # how long to wait for an answer, and how long a server may be lost
    has_adapters: bool
    weights: str = ""  # the name of the last hand-over
    is_current: bool = False  # whether the model has not changed since then
    is_tried: bool = False  # before, a server that is lost ends the run at once
    seconds: dict[str, float] = field(default_factory=dict)  # metrics of this step
    holder: tempfile.TemporaryDirectory | None = None  # deletes the folder when the process ends
    replying: Lock = field(default_factory=Lock)  # one reply at a time, because they are the user's code

    def take_seconds(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        seconds, self.seconds = self.seconds, {}
        return {f"seconds_{name}": seconds.get(name, 0.0) for name in ("handover", "waited")}

    def add_seconds(self, name: str, start: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


def sampler(run: Any) -> Callable[..., list[Completion]]:
    """Return a function that takes what `rollout` takes, after the weights of the model were handed over to the servers
    of the run. All ranks must call this."""
    if run.server is None:
        run.server = connect(run)
    hand_over(run, run.server)
    return partial(served, server=run.server)


# ---- Requests ----


def ask(server: Server, url: str, path: str, body: dict | None = None) -> str:
    """Send a request, which is a POST if it has a body."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        with WITHOUT_PROXY.open(request, timeout=server.timeout) as answer:
            return answer.read().decode(errors="replace")
    except HTTPError as error:
        words = " ".join(error.read().decode(errors="replace").split())
        kind = Lost if error.code >= 500 else UserError
        raise kind(f"--server {url}: {path} gave {error.code} {words:.600}") from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: not an address
        raise Lost(f"--server {url}: {error}") from None


def ask_json(server: Server, url: str, path: str, body: dict | None = None) -> dict:
    text = ask(server, url, path, body)
    try:
        return json.loads(text)
    except ValueError:
        raise UserError(f"--server {url}: {path} gave no JSON, but {text:.200}") from None


def version(server: Server, url: str) -> str:
    return str(ask_json(server, url, "/weight_info").get("weight_version"))


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
            if not (server.weights and held.startswith(server.weights)):
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


def in_threads(do: Callable, items: list, threads: int) -> list:
    """Call do(item) for each item, in threads. After an error, no further call begins."""
    pool = ThreadPoolExecutor(max(1, min(threads, len(items))))
    try:
        return list(pool.map(do, items))
    finally:
        pool.shutdown(cancel_futures=True)


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
    """Sample as `rollout` does, but on the servers, each of which gets an equal share of the prompts. The seed of a
    turn is the uniform number at its first token, so it is a function of the seed, step, prompt and sample."""
    start, n, left = time.perf_counter(), len(prompts), list(prompts)

    def complete_one(url: str, i: int) -> Completion:
        own = None if uniform is None else uniform[i]
        made = complete(server, url, prompts[i], own, sampling, None if replies is None else replies[i])
        if progress is not None and left:
            left.pop()
            progress(0, len(left))
        return made

    def share_of(k: int) -> list[Completion]:
        url, rows = server.urls[k], range(k * n // len(server.urls), (k + 1) * n // len(server.urls))
        make = partial(in_threads, partial(complete_one, url), list(rows), REQUESTS)
        return with_our_weights(server, url, make) if rows else []

    shares = in_threads(share_of, list(range(len(server.urls))), len(server.urls))
    server.add_seconds("waited", start)
    return [completion for share in shares for completion in share]


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
        truncated = not has_ended or (
            bool(reply_ids) and len(tokens) + len(reply_ids) >= sampling.max_completion_length
        )
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
    choice = ask_json(server, url, "/v1/completions", asked)["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise Lost(f"--server {url}: a completion ended with {choice['finish_reason']}")
    turn_ids, logps, has_ended = choice["token_ids"], choice["logprobs"]["token_logprobs"], False
    for t in range(len(turn_ids)):  # find the end by our own rule, because a server may look at text differently
        recent = turn_ids[max(0, t + 1 - stop_window(sampling)) : t + 1] if sampling.stop else []
        has_ended = turn_ids[t] in sampling.eos_ids or (bool(recent) and has_stop(recent, sampling))
        if has_ended:
            turn_ids = turn_ids[: t + 1]
            break
    heads = [[] for _ in turn_ids]
    if sampling.head:
        tops = [{int(key.split(":")[1]): x for key, x in top.items()} for top in choice["logprobs"]["top_logprobs"]]
        # vLLM adds the sampled id to its list. It is the least likely one of the list if it is not among the K.
        heads = [sorted(top.items(), key=lambda pair: -pair[1])[: sampling.head] for top in tops]
    return list(zip(turn_ids, logps, heads)), has_ended or choice["finish_reason"] == "stop"


# ---- Weights ----


def connect(run: Any) -> Server:
    """Find the servers, and try them out. All ranks must call this."""
    cfg = run.config
    holder = tempfile.TemporaryDirectory(".partial", "served-", cfg.server_folder or cfg.out) if is_first() else None
    folder = ranks.on_first(lambda: holder.name)
    server = Server(cfg.server, Path(folder), cfg.server_timeout, bool(adapted_layers(run.model)))
    server.holder = holder
    dtype = served_dtype(run)
    with ranks.fail_together():
        for url in server.urls if is_first() else []:
            try:
                version(server, url)
            except Lost as error:
                raise UserError(str(error)) from None
    with decoding(run.model, dtype):
        server.weights = ranks.on_first(trial, run, server, dtype)
    server.is_tried = True
    # From now on, every update makes the weights on the servers old.
    run.optimizer.register_step_post_hook(lambda *_: setattr(server, "is_current", False))
    return server


def is_first() -> bool:
    return ranks.rank() == 0


def served_dtype(run: Any) -> torch.dtype:
    return getattr(torch, run.config.sampler_dtype)


def hand_over(run: Any, server: Server) -> None:
    """Give the weights of the model to all servers, unless they have them. All ranks must call this."""
    start = time.perf_counter()
    if not server.is_current:
        is_sharded = isinstance(run.model, FSDPModule) and not server.has_adapters
        weights = whole_weights(run.model) if is_sharded else trained_tensors(run.model)
        server.weights = ranks.on_first(put, run.model, weights, server, served_dtype(run))
        server.is_current = True
    server.add_seconds("handover", start)


def put(model: PreTrainedModel, weights: dict[str, Tensor], server: Server, dtype: torch.dtype) -> str:
    """Write the weights, without flushing them to disk, and let every server load them. Return their new name."""
    before, server.weights = server.folder / server.weights, uuid4().hex
    folder = server.folder / server.weights
    folder.mkdir()
    if server.has_adapters:
        save_adapters(folder, model)
    else:
        write_model(folder, model, {name: x.detach().to("cpu", dtype) for name, x in weights.items()})
    in_threads(lambda url: with_our_weights(server, url, lambda: None), server.urls, len(server.urls))
    if before != server.folder:
        shutil.rmtree(before)
    return server.weights


# ---- The trial ----


@torch.no_grad()
def trial(run: Any, server: Server, dtype: torch.dtype) -> str:
    """Make sure that the servers compute with the weights that they are given, and as the trainer does. Only the first
    rank calls this, with whole weights in the served dtype. Return the name of the last hand-over."""
    model, tensors = run.model, trained_tensors(run.model)
    length = min(TRIAL_LENGTH, run.sampling.max_completion_length)
    plain = dict(top_p=1.0, top_k=0, min_p=0.0, stop=[], head=0, max_completion_length=length)
    sampling, rows = replace(run.sampling, **plain), (run.task.train or run.task.eval)[:TRIAL_PROMPTS]
    prompts = [row["prompt_ids"] for row in rows]
    seed = run.config.seed

    def compare(url: str, variants: dict[str, Callable]) -> None:
        uniform = uniforms(seed, 0, [(p, 0) for p in range(len(prompts))], length)
        completions = served(None, prompts, uniform, sampling, server=replace(server, urls=[url]))
        theirs = np.concatenate([completion.logp for completion in completions])
        gap = partial(gap_to, theirs, model, prompts, completions, sampling.temperature)
        own, gaps = gap(), {}
        for name, old in variants.items():
            with old():
                gaps[name] = gap()
        nearest = min(gaps, key=gaps.get, default=None)
        if nearest and gaps[nearest] < own / 2:  # where an old part is in use, its gap is but rounding
            raise UserError(f"--server {url}: given new weights, it still computes with the old {nearest}")
        if not own <= TOLERANCE[dtype]:
            raise UserError(
                f"--server {url}: its log-probs differ from the trainer's by {own:.3g} on average; it needs the same "
                "model and tokenizer, and the flag --logprobs-mode processed_logprobs"
            )

    noisy = {name: with_noise(name, x, seed) for name, x in tensors.items()}
    with changed(tensors, noisy) as old:
        put(model, tensors, server, dtype)
        for url in server.urls:
            compare(url, old_variants(model, tensors, old))
    name = put(model, tensors, server, dtype)
    for url in server.urls:
        compare(url, {})
        one = replace(sampling, max_completion_length=1)
        uniform = uniforms(seed, 0, [(0, i) for i in range(SINGLE_TOKENS)], 1)
        drawn = served(None, prompts[:1] * SINGLE_TOKENS, uniform, one, server=replace(server, urls=[url]))
        p = (logits_after(model, prompts[0]) / sampling.temperature).softmax(-1).double().cpu().numpy()
        if not are_samples(np.array([completion.ids[0] for completion in drawn]), p):
            raise UserError(f"--server {url}: the tokens that it samples do not have the probabilities that it reports")
    return name


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


def logits_after(model: PreTrainedModel, ids: list[int], n: int = 1) -> Tensor:
    """Return the logits after each of the last n ids, (n, V), or (V,) for one."""
    logits = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -n:].float()
    return logits[0] if n == 1 else logits


def gap_to(theirs: np.ndarray, model: PreTrainedModel, prompts: list, completions: list, temperature: float) -> float:
    """Return the mean difference between these log-probs of the completions and those under the model."""
    ours = []
    for prompt, completion in zip(prompts, completions, strict=True):
        ids, n = completion.ids.tolist(), len(completion.ids)
        logits = logits_after(model, prompt + ids[:-1], n).view(n, -1) / temperature
        ours.append(logits.log_softmax(-1).gather(1, torch.tensor(ids, device=logits.device)[:, None]).cpu().flatten())
    return float(np.abs(theirs - torch.cat(ours).numpy()).mean())


def are_samples(ids: np.ndarray, p: np.ndarray) -> bool:
    """Return whether these ids may be samples from p, by a chi-square test. Ids that are expected fewer than five times
    are counted together. True samples fail with a probability of about 1e-7."""
    counts, expected = np.bincount(ids, minlength=len(p)), p * len(ids)
    common = expected >= 5
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    df = len(counts)
    return bool(((counts - expected) ** 2 / np.maximum(expected, 5)).sum() <= df + 8 * df**0.5 + 32)
