"""Sample on inference servers that speak vLLM's HTTP API, with --server.

Token ids go in and come out, so nothing is encoded again. Weights go through a folder that both sides see: the first
rank writes them, and each server reads them. Adapters are written to the same folder.

A server that has restarted answers with the weights that it started with, and without an error. So each hand-over has
a name of its own, which is stored in the server as the version of its weights. Completions count only if the server had
the same version before the first of them was asked for and after the last one was complete. Otherwise the weights are
handed over again, and all completions of that server are asked for again.

The first hand-over is a trial, which finds out whether weights arrive. The server gets weights with noise in every
tensor, and then the true ones. Each time, its log-probs must be those that the trainer computes with these weights, and
not with the previous weights of any part of the model. The trainer's model is not changed for this.

`served` makes only requests and replies. It uses neither the model nor another rank, so it runs in a thread: with
--delay, during the updates of a step.

Left out: transfer of weights between GPUs, kept sets, and streams that do not depend on the number of ranks.
"""

import json
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from pathlib import Path
from threading import Lock
from typing import Any
from urllib.error import HTTPError
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from config import UserError
from infra import checkpoint, lora, ranks
from infra.decoding import decoding
from rollout import Completion, Reply, Sampling, uniforms

REQUESTS = 256  # how many a rank sends to a server at once; the server queues what it cannot compute yet
# vLLM takes what a request leaves out from the model's generation_config.json. Only Sampling.eos_ids end a turn.
ALWAYS = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0, ignore_eos=True)
ALWAYS |= dict(skip_special_tokens=False, return_token_ids=True, return_tokens_as_token_ids=True)
SAME_NAMES = ("temperature", "top_p", "top_k", "min_p", "stop")  # in a request and in Sampling
# The largest mean difference of log-probs that is taken for rounding. A wrong model or temperature gives more.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.1}
TRIAL_PROMPTS, TRIAL_LENGTH, TRIAL_TOKENS = 8, 32, 500
PARTS = {  # of a model: the first one whose pattern is found in the name of a tensor
    "adapters": r"\.lora_[AB]$",
    "head": r"^lm_head\.",
    "norms": r"norm|ln_",
    "embedding": r"embed|wte|wpe",
    "attention": r"attn|attention",
    "feed-forward layers": r"",
}


class Lost(Exception):
    """A server does not answer, or not with our weights. It may do so later."""


@dataclass
class Server:
    urls: list[str]
    timeout: float  # how long to wait for an answer, and how long a server may be lost
    has_adapters: bool
    holder: tempfile.TemporaryDirectory | None = None  # of all weights; deleted when the process of the first rank ends
    folder: Path | None = None  # of the weights of the last hand-over, which has the same name
    is_current: bool = False  # set to False at the end of a step (train.py), after whose updates the weights are old
    is_tried: bool = False  # whether the trial was passed; until then, a lost server ends the run at once
    seconds: Counter = field(default_factory=Counter)  # of this step, under the names handover and waited
    opener: OpenerDirector = field(default_factory=lambda: build_opener(ProxyHandler({})))  # uses no proxy
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    replying: Lock = field(default_factory=Lock)  # one reply at a time, because they are the user's code

    def take_seconds(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        return {f"seconds_{name}": self.seconds.pop(name, 0.0) for name in ("handover", "waited")}


def ask_servers(run: Any, *how: Any) -> Callable[[], list[Completion]]:
    """Let the servers sample with the weights of the model. They get these first, if theirs are older. The arguments
    are those of `served`. Return a function that waits for the completions. All ranks must call both."""
    if not run.server.is_current:
        hand_over(run, run.server)
    return partial(wait_for, run.server, run.server.background.submit(served, run.server, *how))


def wait_for(server: Server, future: Future[list[Completion]]) -> list[Completion]:
    start = time.perf_counter()
    with ranks.fail_together():
        completions = future.result()
    server.seconds["waited"] += time.perf_counter() - start
    return completions


# ---- Requests ----


def ask(server: Server, url: str, path: str, body: dict | None = None) -> dict:
    """Send a request, which is a POST if it has a body. Return the answer, if it is JSON."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.rstrip("/") + path, data, {"Content-Type": "application/json"})
        with server.opener.open(request, timeout=server.timeout) as answer:
            text = answer.read()
            return json.loads(text) if text.startswith(b"{") else {}
    except HTTPError as error:
        kind = Lost if error.code >= 500 else UserError
        raise kind(f"--server {url}: {path} gave {error.code} {error.read().decode(errors='replace'):.600}") from None
    except (OSError, HTTPException, ValueError) as error:  # ValueError: not an address
        raise Lost(f"--server {url}: {error}") from None


def at_once(call: Callable, items: Any) -> list:
    """Call a function with each item, each in a thread of its own. Return the results."""
    with ThreadPoolExecutor(REQUESTS) as pool:
        return list(pool.map(call, items))


def version(server: Server, url: str) -> str:
    return str(ask(server, url, "/weight_info").get("weight_version"))


def load(server: Server, url: str) -> str:
    """Let a server load the weights of the last hand-over. Return their new version, which no other call returns."""
    path = str(server.folder)
    if server.has_adapters:
        ask(server, url, "/v1/load_lora_adapter", dict(lora_name="adapters", lora_path=path, load_inplace=True))
    else:
        ask(server, url, "/collective_rpc", dict(method="reload_weights", kwargs=dict(weights_path=path)))
    ask(server, url, "/reset_prefix_cache", {})
    held = f"{server.folder.name}-{uuid4().hex}"
    ask(server, url, "/update_weight_version", dict(new_version=held))
    return held


def with_our_weights(server: Server, url: str, do: Callable[[], Any]) -> Any:
    """Return what `do` returns, if the server has the weights of the last hand-over from the start of the call to its
    end. Otherwise hand them over again and call it again, until the server was lost for longer than server.timeout."""
    lost_since = None
    while True:
        try:
            held = version(server, url)
            if not held.startswith(server.folder.name):
                held = load(server, url)
            made = do()
            if version(server, url) == held:
                return made
            # Another rank of this run may have loaded them, after a restart of the server. Then the next try succeeds.
            raise Lost(f"--server {url}: other weights were loaded; a server can have one run only")
        except Lost as error:
            lost_since = lost_since or time.monotonic()
            if not server.is_tried or time.monotonic() - lost_since > server.timeout:
                raise UserError(f"{error}; see --server_timeout") from None
            time.sleep(1.0)


# ---- Completions ----


def served(
    server: Server, prompts: list[list[int]], uniform: np.ndarray, sampling: Sampling, begin: Any = None
) -> list[Completion]:
    """Sample as `rollout` does, but on the servers, to which the prompts are dealt out in turn. The seed of a turn is
    the uniform number at its first token, so it is a function of the seed, step, prompt and sample."""
    n = len(server.urls)

    def complete_one(i: int) -> Completion:
        reply = None if begin is None else begin(i)
        return complete(server, server.urls[i % n], prompts[i], uniform[i], sampling, reply)

    def share_of(k: int) -> list[Completion]:
        rows = range(k, len(prompts), n)
        return with_our_weights(server, server.urls[k], lambda: at_once(complete_one, rows))

    shares = at_once(share_of, range(n))
    return [shares[i % n][i // n] for i in range(len(prompts))]


def complete(
    server: Server, url: str, prompt: list[int], uniform: np.ndarray, sampling: Sampling, reply: Reply | None
) -> Completion:
    """Ask for the turns of one completion, one after another."""
    ids, logps, tops, written, splits = [], [], [], [], []
    while True:
        room, seed = sampling.max_completion_length - len(ids), int(uniform[len(ids)] * 2**53)
        turn = ask_turn(server, url, prompt + ids, room, seed, sampling)
        ids += turn["token_ids"]
        logps += turn["logprobs"]["token_logprobs"]
        tops += turn["logprobs"]["top_logprobs"]
        written += [True] * len(turn["token_ids"])
        truncated, reply_ids = turn["finish_reason"] == "length", None
        if reply is not None and not truncated:
            with server.replying:
                reply_ids = reply(turn["token_ids"])
            truncated = reply_ids is not None and len(ids) + len(reply_ids) >= sampling.max_completion_length
        if truncated or reply_ids is None:
            break
        if not reply_ids:
            splits.append(len(ids))
        ids += reply_ids
        logps += [0.0] * len(reply_ids)
        tops += tops[-1:] * len(reply_ids)  # any will do
        written += [False] * len(reply_ids)
    completion = Completion(ids, logps, truncated, written=written if reply else None, splits=splits)
    if sampling.head:
        completion.head_ids, completion.head_logp = head(completion, tops, sampling.head)
    return completion


def ask_turn(server: Server, url: str, ids: list[int], room: int, seed: int, sampling: Sampling) -> dict:
    """Ask for one turn after these ids. Return what the server has chosen. The turn has ended, unless its finish_reason
    is "length": then `room` tokens were too few."""
    body = ALWAYS | {name: getattr(sampling, name) for name in SAME_NAMES}
    body |= dict(prompt=ids, max_tokens=room, seed=seed, stop_token_ids=sampling.eos_ids, logprobs=sampling.head)
    body |= {"model": "adapters"} if server.has_adapters else {}
    choice = ask(server, url, "/v1/completions", body)["choices"][0]
    if choice["finish_reason"] not in ("stop", "length"):
        raise Lost(f"--server {url}: a completion ended with {choice['finish_reason']}")
    return choice


def head(completion: Completion, tops: list[dict[str, float]], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids (T, K) of the likeliest tokens, and the log-probs (T, K + 1) of these and of all others together.
    `tops` has the log-probs that the server has named at each token, each under a name such as "token_id:7"."""
    # vLLM adds the sampled id to its list. It is the least likely one of the list if it is not among the K.
    likeliest = [sorted(top.items(), key=lambda pair: -pair[1])[:k] for top in tops]
    ids = np.array([[int(name.split(":")[1]) for name, _ in top] for top in likeliest], np.int32)
    logp = np.array([[x for _, x in top] for top in likeliest])
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
        server.folder = ranks.on_first(put if server.is_tried else trial, server, run)
    server.is_tried = server.is_current = True
    server.seconds["handover"] += time.perf_counter() - start


def put(server: Server, run: Any, weights: dict[str, Tensor] | None = None) -> Path:
    """Write these weights, or else the model's own, and let every server load them. Return their folder, which is not
    flushed to disk."""
    before, server.folder = server.folder, Path(tempfile.mkdtemp(dir=server.holder.name))
    write = lora.save_adapters if server.has_adapters else checkpoint.write_model
    weights = weights or lora.trained_tensors(run.model)
    write(server.folder, run.model, {name: x.detach() for name, x in weights.items()})
    at_once(lambda url: with_our_weights(server, url, lambda: None), server.urls)
    if before is not None:
        shutil.rmtree(before)
    return server.folder


# ---- The trial ----


@torch.no_grad()
def trial(server: Server, run: Any) -> Path:
    """Make sure that the servers compute with the weights that they are given, and as the trainer does. Only the first
    rank calls this, with whole weights in the served dtype. Return the folder of the last hand-over."""
    cfg, model, n = run.config, run.model, len(server.urls)
    server.holder = tempfile.TemporaryDirectory(".partial", "served-", cfg.server_folder or cfg.out)
    length = min(TRIAL_LENGTH, run.sampling.max_completion_length)
    sampling = Sampling(length, run.sampling.eos_ids, run.sampling.temperature)
    rows = (run.task.train or run.task.eval)[:TRIAL_PROMPTS]
    prompts = [row["prompt_ids"][-TRIAL_LENGTH:] for row in rows for _ in server.urls]  # each one for each server
    uniform = uniforms(cfg.seed, 0, [(p, 0) for p in range(len(prompts))], length)

    true = lora.trained_tensors(model, remove_duplicate=False)  # a tied head has a name of its own
    stream = torch.Generator(model.device).manual_seed(cfg.seed)
    # Tied tensors have two names in `true`, but are one object, so they get the same noise.
    with_its_noise = {x: with_noise(x, stream) for x in dict.fromkeys(true.values())}
    noisy = {name: with_its_noise[x] for name, x in true.items()}
    parts = {name: next(part for part in PARTS if re.search(PARTS[part], name)) for name in true}
    for new, old in ((noisy, true), (true, noisy)):
        put(server, run, new)
        completions = served(server, prompts, uniform, sampling)
        for k, url in enumerate(server.urls):
            pairs = list(zip(prompts, completions))[k::n]
            own, gaps = mean_gap(model, new, pairs, sampling.temperature), {}
            for part in set(parts.values()):
                # The new weights, except that this part is as it was.
                variant = new | {name: old[name] for name in parts if parts[name] == part}
                gaps[part] = mean_gap(model, variant, pairs, sampling.temperature)
            nearest = min(gaps, key=gaps.get)
            if gaps[nearest] < own / 2:  # a server that uses an old part differs from that variant by rounding only
                raise UserError(f"--server {url}: given new weights, it still computes with the old {nearest}")
            if not own <= TOLERANCE[model.dtype]:
                wanted = "it needs the same model and tokenizer, and the flag --logprobs-mode processed_logprobs"
                raise UserError(f"--server {url}: its log-probs are off by {own:.3g} on average; {wanted}")

    sampling.max_completion_length = 1
    uniform = uniforms(cfg.seed, 0, [(0, i) for i in range(TRIAL_TOKENS * n)], 1)
    drawn = served(server, prompts[:1] * len(uniform), uniform, sampling)
    logits = model(torch.tensor(prompts[:1], device=model.device), use_cache=False).logits[0, -1].double()
    p = (logits / sampling.temperature).softmax(-1).cpu().numpy()
    for k, url in enumerate(server.urls):
        if not are_samples(np.array([completion.ids[0] for completion in drawn[k::n]]), p):
            raise UserError(f"--server {url}: the tokens that it samples do not have the probabilities that it reports")
    return server.folder


def with_noise(x: Tensor, stream: torch.Generator) -> Tensor:
    """Add noise of 5 % of the spread of x, or of 0.02 where all its values are equal."""
    noise = torch.randn(x.shape, generator=stream, device=x.device)
    spread = float(x.float().std(correction=0))
    return (x.float() + noise * (0.05 * spread or 0.02)).to(x.dtype)


def mean_gap(model: nn.Module, weights: dict[str, Tensor], pairs: list, temperature: float) -> float:
    """Return the mean difference between the log-probs of a server's completions and those of the model with these
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


def are_samples(ids: np.ndarray, p: np.ndarray) -> bool:
    """Return whether these ids may be samples from p, by a chi-square test. Ids that are expected fewer than five times
    are counted together. True samples fail with a probability of about 1e-7."""
    counts, expected = np.bincount(ids, minlength=len(p)), p * len(ids)
    common = expected >= 5
    counts = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    df = len(counts)
    return bool(((counts - expected) ** 2 / np.maximum(expected, 5)).sum() <= df + 8 * df**0.5 + 32)
