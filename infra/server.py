"""Sample on inference servers that speak vLLM's HTTP API, with --server.

Token ids go in and come out, so nothing is encoded again. Weights go through a folder that both sides see: the first
rank writes them, and each server reads them. With LoRA, these are only the adapters.

A server that has restarted answers with the weights that it started with, and without an error. So each hand-over has
a name, which the servers store as the version of their weights. They must have this version before the first request of
a rollout and after its last answer. Otherwise the run ends, so nothing that other weights have sampled is trained on,
and the same command resumes from the last checkpoint.

The first hand-over is a trial, which finds out whether weights arrive. The servers get weights with noise in every
tensor, and then the true ones. Each time, their log-probs must be those that the trainer computes with these weights.
The noise is large enough for the old weights of any part of the model to show. The trainer's own model is not changed.

A completion may take any time. Meanwhile the servers are asked for their version every few seconds. One that does not
answer this for --server_timeout is lost, and the run ends.

`sample_on_servers` makes only requests and replies. It uses neither the model nor another rank, so it runs in a thread:
with --delay, during the updates of a step.

Left out: transfer of weights between GPUs, kept sets, and completions that do not depend on the number of ranks.
"""

import json
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import repeat
from pathlib import Path
from threading import Lock, Semaphore, local
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from config import UserError
from infra import checkpoint, lora, ranks
from infra.decoding import decoding
from rollout import Completion, Reply, Sampling, rollout, uniforms

REQUESTS = 1024  # how many a rank makes of each server at once; the server queues what it cannot compute yet
OPENING = 4  # how many connections a rank opens at a time: a server's queue of new ones may be short
CHECK_EVERY = 5.0  # seconds between two looks at the servers, while they compute
# vLLM takes what a request leaves out from the model's generation_config.json. Only Sampling.eos_ids end a turn.
ALWAYS = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0, ignore_eos=True)
ALWAYS |= dict(skip_special_tokens=False, return_token_ids=True, return_tokens_as_token_ids=True)
SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "stop")  # in a request and in Sampling
# The largest mean difference of log-probs that is taken for rounding. A wrong model or temperature gives more.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
TRIAL_PROMPTS, TRIAL_LENGTH = 8, 32
NOISE = [0.01 * 2**k for k in range(14)]  # relative to the size of a tensor; the trial takes the first that is enough
USUAL_CAUSES = (
    "the usual causes are another model or tokenizer, no --logprobs-mode processed_logprobs, and weights that are only "
    "read when the server starts, such as a head that is tied to the embedding, on a CPU"
)


@dataclass
class Server:
    """The servers of a run, and how they are asked."""

    urls: list[str]
    timeout: float  # seconds after which a server that does not answer is lost
    has_adapters: bool
    holder: tempfile.TemporaryDirectory | None = None  # of all weights; deleted when the process of the first rank ends
    folder: Path | None = None  # of the weights of the last hand-over; its name is their version
    is_current: bool = False  # set to False at the end of a step (train.py), after whose updates the weights are old
    seconds: Counter = field(default_factory=Counter)  # of this step, under the names handover and waited
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    connections: local = field(default_factory=local)  # each thread keeps its own
    opening: Semaphore = field(default_factory=lambda: Semaphore(OPENING))
    replying: Lock = field(default_factory=Lock)  # one reply at a time, because they are the user's code

    def __post_init__(self) -> None:
        requests = REQUESTS * len(self.urls)
        self.threads = ThreadPoolExecutor(requests)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # each connection is an open file
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft + requests, hard), hard))

    def take_seconds(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        return {f"seconds_{name}": self.seconds.pop(name, 0.0) for name in ("handover", "waited")}


def ask_servers(
    run: Any,
    prompts: list[list[int]],
    uniform: np.ndarray,
    sampling: Sampling,
    begin: Callable[[int], Reply] | None = None,
) -> Callable[[], list[Completion]]:
    """Let the servers sample with the weights of the model. They get these first, if theirs are older. The arguments
    are those of `rollout_and_limit`. Return a function that waits for the completions. All ranks must call both."""
    server = run.server
    if not server.is_current:
        hand_over(run, server)
    future = server.background.submit(sample_on_servers, server, prompts, uniform, sampling, begin)
    return partial(wait_for, server, future)


def wait_for(server: Server, future: Future[list[Completion]]) -> list[Completion]:
    start = time.perf_counter()
    with ranks.fail_together():
        completions = future.result()
    server.seconds["waited"] += time.perf_counter() - start
    return completions


# ---- Requests ----


def ask(server: Server, url: str, path: str, body: dict | None = None) -> dict:
    """Send a request, which is a POST if it has a body. Return the answer, if it is JSON. A POST may take any time. If
    its connection breaks, a request is sent again. Before the first hand-over, the run ends instead."""
    connection = connection_to(server, url, timeout=server.timeout if body is None else None)
    lost_since = time.monotonic() if body is None else None
    while True:
        was_open = connection.sock is not None
        try:
            status, text = exchange(server, connection, urlsplit(url).path.rstrip("/") + path, body)
            break
        except (OSError, HTTPException) as error:
            connection.close()
            if was_open and not isinstance(error, TimeoutError):
                continue  # servers close connections that were not used for some seconds
            lost_since = lost_since or time.monotonic()
            if server.folder is None or time.monotonic() - lost_since >= server.timeout:
                raise UserError(f"--server {url}: {error or type(error).__name__}; see --server_timeout") from None
            time.sleep(1.0)
    if status != 200:
        raise UserError(f"--server {url}: {path} gave {status} {text:.600}")
    return json.loads(text) if text.startswith("{") else {}


def exchange(server: Server, connection: HTTPConnection, path: str, body: dict | None) -> tuple[int, str]:
    """Send a request once. Return the status and the text of the answer."""
    if body is None:
        connection.request("GET", path)
    else:
        if connection.sock is None:
            with server.opening:  # until the server answers, the connection may be in its queue of new ones
                connection.request("GET", "/health")
                connection.getresponse().read()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(errors="replace")


def connection_to(server: Server, url: str, timeout: float | None) -> HTTPConnection:
    """Return this thread's connection, which is opened by its next request if it is closed."""
    kept, parts = vars(server.connections), urlsplit(url)
    if not parts.hostname:
        raise UserError(f"--server {url}: not an address such as http://127.0.0.1:8000")
    if (url, timeout) not in kept:
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        kept[url, timeout] = kind(parts.hostname, parts.port, timeout=timeout)
    return kept[url, timeout]


def check(server: Server, version: str | None) -> None:
    """End the run if a server does not answer, or if its weights are not of this version. None is any version."""
    for url in server.urls:
        held = ask(server, url, "/weight_info").get("weight_version")
        if version is not None and held != version:
            why = "it was restarted, or another run uses it; the same command goes on from the last checkpoint"
            raise UserError(f"--server {url}: it does not have the weights that it was given: {why}")


def at_once(server: Server, calls: list[Callable], version: str | None) -> list:
    """Make these calls, each in a thread of its own, and return their results. The servers are checked before the first
    call, after the last one, and every few seconds in between."""
    check(server, version)
    pending = futures = [server.threads.submit(call) for call in calls]
    try:
        while pending:
            done, pending = wait(pending, CHECK_EVERY, FIRST_EXCEPTION)
            check(server, version)  # before errors are raised, because a restart may be their cause
            for future in done:
                future.result()
    finally:
        for future in pending:
            future.cancel()
    return [future.result() for future in futures]


# ---- Completions ----


def sample_on_servers(
    server: Server,
    prompts: list[list[int]],
    uniform: np.ndarray,
    sampling: Sampling,
    begin: Callable[[int], Reply] | None = None,
) -> list[Completion]:
    """Sample as `rollout` does, but on the servers, to which the prompts are dealt out in turn."""
    calls = []
    for i, prompt in enumerate(prompts):
        url = server.urls[i % len(server.urls)]
        reply = None if begin is None else begin(i)
        calls.append(partial(complete, server, url, prompt, uniform[i], sampling, reply))
    return at_once(server, calls, server.folder.name)


def complete(
    server: Server, url: str, prompt: list[int], uniform: np.ndarray, sampling: Sampling, reply: Reply | None
) -> Completion:
    """Ask for the turns of one completion, one after another. The seed of a turn is the uniform number at its first
    token, so it is a function of the seed, step, prompt and sample."""
    tokens, splits = [], []  # of each token: its id, its log-prob, the likeliest ids, and whether the model wrote it
    while True:
        ids = [token[0] for token in tokens]
        room, seed = sampling.max_completion_length - len(ids), int(uniform[len(ids)] * 2**53)
        turn = ask_turn(server, url, prompt + ids, room, seed, sampling)
        logprobs = turn["logprobs"]
        tokens += zip(turn["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], repeat(True))
        truncated, reply_ids = turn["finish_reason"] == "length", None
        if reply is not None and not truncated:
            with server.replying:
                reply_ids = reply(turn["token_ids"])
            truncated = reply_ids is not None and len(tokens) + len(reply_ids) >= sampling.max_completion_length
        if truncated or reply_ids is None:
            break
        if not reply_ids:
            splits.append(len(tokens))
        tokens += [(i, 0.0, tokens[-1][2], False) for i in reply_ids]  # any likeliest ids will do
    ids, logps, tops, written = zip(*tokens)
    completion = Completion(ids, logps, truncated, written=written if reply else None, splits=splits)
    if sampling.head:
        completion.head_ids, completion.head_logp = likeliest(completion, tops, sampling.head)
    return completion


def ask_turn(server: Server, url: str, ids: list[int], room: int, seed: int, sampling: Sampling) -> dict:
    """Ask for one turn after these ids. Return what the server has chosen. The turn has ended, unless its finish_reason
    is "length": then `room` tokens were too few."""
    body = ALWAYS | {name: getattr(sampling, name) for name in SAME_NAMES}
    body |= dict(prompt=ids, max_tokens=room, seed=seed, stop_token_ids=sampling.eos_ids, logprobs=sampling.head)
    body |= {"model": "adapters"} if server.has_adapters else {}
    choice = ask(server, url, "/v1/completions", body)["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise UserError(f"--server {url}: a completion ended with {choice['finish_reason']}")
    return choice


def likeliest(completion: Completion, tops: Sequence[dict[str, float]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids (T, K) of the likeliest tokens, and the log-probs (T, K + 1) of these and of all others together.
    `tops` has the log-probs that the server has named at each token, each under a name such as "token_id:7"."""
    # vLLM adds the sampled id to its list. It is the least likely one of the list if it is not among the K.
    best = [sorted(top.items(), key=lambda pair: -pair[1])[:k] for top in tops]
    ids = np.array([[int(name.split(":")[1]) for name, _ in top] for top in best], np.int32)
    logp = np.array([[x for _, x in top] for top in best])
    # The probability outside the K ids. If the sampled id is not one of them, it is at least that of the sampled id.
    outside = (ids != completion.ids[:, None]).all(1)
    others = np.maximum(1 - np.exp(logp).sum(1), outside * np.exp(completion.logp))
    with np.errstate(divide="ignore"):
        return ids, np.c_[logp, np.log(others)].astype(np.float32)


# ---- Weights ----


def hand_over(run: Any, server: Server) -> None:
    """Give the weights of the model to all servers, in the dtype of the rollout. All ranks must call this."""
    start = time.perf_counter()
    with decoding(run.model, getattr(torch, run.config.sampler_dtype)):
        if server.folder is None:
            server.folder = ranks.on_first(trial, server, run)
        else:
            server.folder = ranks.on_first(put, server, run.model, lora.trained_tensors(run.model))
    server.is_current = True
    server.seconds["handover"] += time.perf_counter() - start


def put(server: Server, model: nn.Module, weights: dict[str, Tensor]) -> Path:
    """Write these weights, and let every server load them. Return their folder, which is not flushed to disk."""
    before, folder = server.folder, Path(tempfile.mkdtemp(dir=server.holder.name))
    write = lora.save_adapters if server.has_adapters else checkpoint.write_model
    write(folder, model, {name: x.detach() for name, x in weights.items()})
    check(server, before and before.name)
    at_once(server, [partial(load, server, url, folder) for url in server.urls], version=None)
    if before is not None:
        shutil.rmtree(before)
    return folder


def load(server: Server, url: str, folder: Path) -> None:
    """Let a server load the weights in this folder. It gets their version first: if it restarts before it has loaded
    them, it loses the version, and the next check ends the run."""
    ask(server, url, "/update_weight_version", dict(new_version=folder.name))
    if server.has_adapters:
        ask(server, url, "/v1/load_lora_adapter", dict(lora_name="adapters", lora_path=str(folder), load_inplace=True))
    else:
        ask(server, url, "/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=str(folder))))
    ask(server, url, "/reset_prefix_cache", {})


# ---- The trial ----


@torch.no_grad()
def trial(server: Server, run: Any) -> Path:
    """Make sure that the servers compute with the weights that they are given, and as the trainer does. Only the first
    rank calls this, with whole weights in the dtype of the rollout. Return the folder of the last hand-over."""
    cfg, model = run.config, run.model
    server.holder = tempfile.TemporaryDirectory(".partial", "weights-", cfg.server_folder or cfg.out)
    length = min(TRIAL_LENGTH, run.sampling.max_completion_length)
    sampling = Sampling(length, run.sampling.eos_ids, run.sampling.temperature)
    rows = (run.task.train or run.task.eval)[:TRIAL_PROMPTS]
    prompts = [row["prompt_ids"][-TRIAL_LENGTH:] for row in rows]
    uniform = uniforms(cfg.seed, 0, [(p, 0) for p in range(len(prompts))], length)

    true = lora.trained_tensors(model, remove_duplicate=False)  # a tied head has a name of its own
    pairs = list(zip(prompts, rollout(model, prompts, uniform, sampling)))
    for scale in NOISE:
        noisy = with_noise(true, scale, cfg.seed)
        if mean_gap(model, noisy, pairs, sampling.temperature) >= 10 * TOLERANCE[model.dtype]:
            break
    n = len(server.urls)
    for what, weights, before in (("weights with noise", noisy, true), ("the true weights again", true, noisy)):
        server.folder = put(server, model, weights)
        completions = sample_on_servers(server, [p for p in prompts for _ in range(n)], uniform.repeat(n, 0), sampling)
        for k, url in enumerate(server.urls):
            pairs = list(zip(prompts, completions[k::n]))
            gap = mean_gap(model, weights, pairs, sampling.temperature)
            # A server that goes on with a part of the weights of before is off by much of what these would be off by.
            limit = min(TOLERANCE[model.dtype], mean_gap(model, before, pairs, sampling.temperature) / 20)
            if not gap <= limit:
                compared = f"given {what}, its log-probs differ from the trainer's by {gap:.2g} on average"
                raise UserError(f"--server {url}: {compared}, of which {limit:.2g} may be rounding; {USUAL_CAUSES}")
    return server.folder


def with_noise(weights: dict[str, Tensor], scale: float, seed: int) -> dict[str, Tensor]:
    """Add noise to every tensor, in proportion to its size."""
    stream = torch.Generator(next(iter(weights.values())).device).manual_seed(seed)
    noisy = {}  # by tensor, because tied ones have two names, but are one object and get the same noise
    for x in dict.fromkeys(weights.values()):
        size = max(float(x.float().square().mean().sqrt()), 0.02)  # biases, norms of Gemma, and new adapters may be 0
        noise = torch.randn(x.shape, generator=stream, device=x.device)
        noisy[x] = (x.float() + scale * size * noise).to(x.dtype)
    return {name: noisy[x] for name, x in weights.items()}


def mean_gap(model: nn.Module, weights: dict[str, Tensor], pairs: list, temperature: float) -> float:
    """Return the mean difference between the recorded log-probs of completions and those of the model with these
    weights. `pairs` are prompts and completions."""
    gaps = []
    for prompt, completion in pairs:
        ids = torch.tensor([[*prompt, *completion.ids.tolist()]], device=model.device)
        # Without tie_weights=False, a tied head would follow the embedding.
        logits = functional_call(model, weights, ids, dict(use_cache=False), tie_weights=False).logits[0]
        all_logp = (logits[len(prompt) - 1 : -1].float() / temperature).log_softmax(-1)
        logp = all_logp.gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        gaps.append((logp.cpu() - torch.from_numpy(completion.logp)).abs())
    return float(torch.cat(gaps).mean())
