"""Prompts -> completions, with Hugging Face `generate` and its KV cache.

A completion depends only on the model, its prompt and its own stream of uniform random numbers. It does not depend on
the rank that samples it, or on the other rows of the batch. A stream is determined by (seed, step, position of the
prompt in the step, number of the sample). The next number u_t of the stream picks the next token by inverting the
cumulative distribution:

    token_t = min { v : cdf_t[v] > u_t },      cdf_t = cumsum(softmax(logits_t / temperature))

So the same run on any number of processes samples the same completions, except where rounding decides. (In bf16 on a
GPU, the logits depend on the shape of the batch, so single tokens may differ.)

The sampler has the distribution, so it records the log-prob of each token, which saves a forward pass. If top-k, top-p
or min-p cut the distribution, the token ids that remain are recorded too. They are the "kept set" of the token, and its
log-prob is normalized over them, here and in training ("Keep Sampling Mask", 2512.02556).

A completion may have several turns: after a turn of the model, the task (a game, a tool) may reply. The loop over
tokens then takes the tokens of the reply, one after another, instead of sampling. The KV cache is kept, and sampled
tokens are never decoded and encoded again.

Three things make a rollout fast, all inside `generate(custom_generate=...)`: each prompt goes through the model once
for all its samples, finished rows leave the batch, and sampling takes one pass over the distribution. Left out: paged
caches, continuous batching, beams, speculative decoding.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from config import SMALLER, UserError
from fast.growing_cache import make_room

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # gets how many tokens each row has so far, and the number of unfinished rows
Reply = Callable[[list[int]], list[int] | None]  # ids of a turn -> ids of the reply; None ends the completion
CHECK_EVERY = {"cuda": 8, "cpu": 1}  # how many tokens between two checks for ended rows; each waits for the GPU
PROMPT_TOKENS = 1 << 14  # how many tokens of prompts, with padding, are read at once: enough to keep a GPU busy
PER_ROW = "attention_mask", "position_ids"  # arguments of the model that have a row for each completion
# The argument with the cache. Before transformers 5.24, it has the second name, and in models like Mamba the third.
CACHE_NAMES = "cache", "past_key_values", "cache_params"
PIECEWISE_LAYERS = DynamicLayer, DynamicSlidingWindowLayer  # cache layers of these types take prompts in pieces
MOST_KEPT_IDS = 2**31  # the limit of ids, 8 GB, in all kept sets of the completions that are sampled at once


@dataclass
class Sampling:
    max_completion_length: int
    eos_ids: list[int]  # each of these ends a turn
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all tokens
    top_p: float = 1.0
    min_p: float = 0.0  # the lowest probability that is kept, relative to the highest one
    keep_set: bool = True  # record the ids that remain after top_k, top_p and min_p, and normalize log-probs over them
    head: int = 0  # record the log-probs of this many ids at each token, the likeliest ones
    tokens_at_once: int = 1 << 19  # limit of tokens in the cache, counting every row at its maximum length
    drop_share: float = 0.25  # finished rows leave the batch once they make up this share of it
    stop: list[str] = field(default_factory=list)  # a turn ends with the token that completes one of these strings
    to_text: Callable[[list[int]], str] | None = None  # the tokenizer's decode; `stop` needs it


@dataclass
class Completion:
    """The turns of the model after a prompt, and the replies between them. The arrays, which may be given as lists, and
    the list `kept` have an entry for each token. The tokens of replies have log-prob 0 and no kept set."""

    ids: np.ndarray  # int32, with the end token of each turn
    logp: np.ndarray  # float32, under the sampler, at its temperature, normalized over `kept`
    truncated: bool  # the limit of tokens, replies included, was reached before the completion was over
    kept: list[np.ndarray | None] | None = None  # int32 ids that each token was sampled from; None: nothing was cut
    head_ids: np.ndarray | None = None  # (T, K) int32, the likeliest ids at each token; None: not recorded
    head_logp: np.ndarray | None = None  # (T, K + 1) float32, of these and of all others together; -inf: none left
    written: np.ndarray | None = None  # bool, False in replies; None if there are none
    replies: list | None = None  # as texts or messages, for samples.jsonl and rewards; set in train.py

    def __post_init__(self) -> None:
        self.ids, self.logp = np.asarray(self.ids, np.int32), np.asarray(self.logp, np.float32)
        self.written = None if self.written is None else np.asarray(self.written, np.bool_)

    @property
    def length(self) -> int:
        """The number of tokens that the model wrote, which is |o| in every equation."""
        return len(self.ids) if self.written is None else int(self.written.sum())

    @property
    def turns(self) -> list[list[int]]:
        """The ids of each turn of the model."""
        if self.written is None:
            return [self.ids.tolist()]
        # Turns and replies alternate, and both have at least one token. The first one is a turn.
        starts = np.flatnonzero(np.diff(self.written)) + 1
        return [part.tolist() for part in np.split(self.ids, starts)[::2]]


def uniforms(seed: int, step: int, samples: list[tuple[int, int]], length: int) -> np.ndarray:
    """Return random numbers (len(samples), length). Each sample is given as (position of its prompt, its number)."""
    streams = [np.random.Generator(np.random.PCG64([seed, step, *sample])).random(length) for sample in samples]
    return np.stack(streams) if streams else np.zeros((0, length))


@torch.no_grad()
def rollout(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniform: np.ndarray | None,
    sampling: Sampling,
    *,
    replies: Sequence[Reply] | None = None,
    progress: Progress | None = None,
) -> list[Completion]:
    """Sample one completion of each prompt. Row i of uniform (N, max_completion_length) picks the tokens of completion
    i. Greedy sampling needs no random numbers. Equal prompts are read only once. replies[i] is called whenever a turn
    of completion i has ended. Without replies, every completion has one turn.

    If memory runs out, sampling.tokens_at_once is halved, and the completions that were lost are sampled again. They
    do not depend on how many are sampled at once. replies[i] is looked up again for each attempt, so `replies` can give
    a fresh game to an attempt that starts from the beginning.
    """
    length = max(map(len, prompts), default=0) + sampling.max_completion_length
    completions: list[Completion] = []
    while len(completions) < len(prompts):
        start, rows_at_once = len(completions), max(1, sampling.tokens_at_once // length)
        stop = min(start + rows_at_once, len(prompts))
        # If memory runs out, the lines below this block run. The tensors of the failed attempt are free by then, which
        # they would not be in an `except` block.
        with suppress(torch.OutOfMemoryError):
            completions += _generate(
                model,
                prompts[start:stop],
                uniform=None if uniform is None else torch.as_tensor(uniform[start:stop], device=model.device),
                replies=None if replies is None else [replies[i] for i in range(start, stop)],
                sampling=sampling,
                progress=progress,
            )
            continue
        half = (stop - start) // 2
        if half == 0:
            raise UserError(f"out of memory with one completion at a time: {SMALLER}")
        torch.cuda.empty_cache()
        sampling.tokens_at_once = half * length
        logger.warning(f"out of memory: from now on at most {half} completions are sampled at once")
    return completions


def _generate(model: PreTrainedModel, prompts: list[list[int]], sampling: Sampling, **how: object) -> list[Completion]:
    """Call `generate`, with `_token_loop` in place of its own loop over tokens. `how` has the other arguments of
    `_token_loop`."""
    distinct = {prompt: i for i, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}  # each with its place
    rows = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=model.device)
    width = max(map(len, distinct))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in distinct], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=model.device)
    # This configuration only prepares the cache and the inputs. Tokens are chosen by `sample`, below.
    config = GenerationConfig(max_new_tokens=sampling.max_completion_length, do_sample=False, use_cache=True)

    saved_config, in_train_mode = model.generation_config, [m for m in model.modules() if m.training]
    # What `config` leaves unset, `generate` takes from the model's own configuration. So give the model an empty one.
    model.generation_config = GenerationConfig()
    model.eval()  # in train mode, gradient checkpointing would silently turn the cache off
    try:
        own_loop = partial(_token_loop, rows=rows, sampling=sampling, **how)
        return model.generate(ids, attention_mask=mask, generation_config=config, custom_generate=own_loop)
    finally:
        model.generation_config = saved_config
        for module in in_train_mode:
            module.training = True


def _token_loop(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: object = None,
    stopping_criteria: object = None,
    generation_config: GenerationConfig | None = None,
    *,
    rows: Tensor,
    uniform: Tensor | None,
    replies: list[Reply] | None,
    sampling: Sampling,
    progress: Progress | None,
    **kwargs,
) -> list[Completion]:
    """Sample the completions. `generate` calls this in place of its own loop over tokens. input_ids (P, T) are the
    distinct prompts, padded on the left, and rows (N,) gives the prompt of each completion."""
    N, L = len(rows), sampling.max_completion_length
    tokens = torch.zeros(N, L, dtype=torch.long, device=rows.device)
    reply_ids = torch.full((N, L), -1, device=rows.device)  # ids of replies at their positions, and -1 elsewhere
    turn_starts = [0] * N  # the position where the current turn of each completion starts
    kept: list[list[np.ndarray]] = [[] for _ in range(N)]
    kept_ids = 0  # how many ids all these sets have
    eos_ids = torch.tensor(sampling.eos_ids, device=rows.device)
    lengths = torch.zeros(N, dtype=torch.long, device=rows.device)
    truncated = torch.zeros(N, dtype=torch.bool, device=rows.device)

    # Read each prompt once, in pieces if there are many tokens. Then repeat its cache for all its samples.
    # --decode graph sets `forward` on the model object to a function that cannot read prompts in pieces
    # (infra/decoding.py). Otherwise `forward` belongs to the model's class, and is not in vars(model).
    is_graph, past = "forward" in vars(model), cache_of(kwargs)
    if past is not None and not is_graph and all(type(layer) in PIECEWISE_LAYERS for layer in past.layers):
        generation_config.prefill_chunk_size = max(1, PROMPT_TOKENS // len(input_ids))
    out = model._prefill(input_ids, generation_config, kwargs)
    kwargs = model._update_model_kwargs_for_generation(out, kwargs)
    logits = out.logits[:, -1][rows]
    logps = torch.zeros(N, L, dtype=torch.promote_types(logits.dtype, torch.float32), device=rows.device)
    K = min(sampling.head, logits.shape[1])
    head_ids = torch.zeros(N, L, K, dtype=torch.int32, device=rows.device)
    head_logps = torch.zeros(N, L, K + 1, device=rows.device)
    _select_rows(kwargs, rows)
    make_room(cache_of(kwargs), max_tokens=input_ids.shape[1] + L)

    may_end = cache(partial(may_end_stop, sampling=sampling))  # decodes each token of the vocabulary once
    live = torch.arange(N, device=rows.device)  # the completion of each row of the batch; ended ones leave it later
    done = torch.zeros(N, dtype=torch.bool, device=rows.device)
    for t in range(L):
        token, logp, in_set, head = sample(logits, None if uniform is None else uniform[live, t], sampling)
        in_reply = reply_ids[live, t] >= 0
        token = torch.where(in_reply, reply_ids[live, t], token)
        tokens[live, t], logps[live, t] = token, logp.masked_fill(in_reply, 0.0)
        if head is not None:
            head_ids[live, t], head_logps[live, t] = head
        lengths[live] += ~done
        if in_set is not None:
            kept_ids += _append_sets(kept, live, in_set & ~(done | in_reply)[:, None])
            if kept_ids > MOST_KEPT_IDS:
                mean = kept_ids // int(lengths.sum())
                raise UserError(f"kept sets of {mean:,} ids are too large: lower --top_p, or give --keep_set false")

        ended = torch.isin(token, eos_ids)
        if sampling.stop:
            first = max(0, t + 1 - stop_window(sampling))
            recent = tokens[live, first : t + 1].tolist()
            # The tokens of `recent` that belong to each row's turn. During a reply there are none, because the next
            # turn starts after it.
            turns = [ids[max(0, turn_starts[n] - first) :] for n, ids in zip(live.tolist(), recent)]
            stopped = [bool(ids) and may_end(ids[-1]) and has_stop(ids, sampling) for ids in turns]
            ended = ended | torch.tensor(stopped, device=rows.device)
        # A completion ends with its turn, unless a reply follows: then the loop below sets it back to False.
        ended = ended & ~in_reply & ~done
        turn_ends = [] if replies is None else ended.nonzero().squeeze(1).tolist()
        for b in turn_ends:
            n = int(live[b])  # the number of the completion
            reply = replies[n](tokens[n, turn_starts[n] : t + 1].tolist())
            next_turn = t + 1 + len(reply or [])
            if reply and next_turn >= L:
                truncated[n] = True  # the reply leaves no room for another turn, so it is dropped
            elif reply:
                reply_ids[n, t + 1 : next_turn] = torch.tensor(reply)
                turn_starts[n] = next_turn
                ended[b] = False

        done = done | ended
        if t % CHECK_EVERY[rows.device.type] == 0:
            count = int(done.sum())
            if progress is not None:
                progress(t + 1, len(live) - count)
            if count == len(live):
                break
            if count >= sampling.drop_share * len(live):  # dropping rows copies the cache, so not for every single row
                keep = (~done).nonzero().squeeze(1)
                live, done, token = live[keep], done[keep], token[keep]
                _select_rows(kwargs, keep)
        if t + 1 == L:
            break
        inputs = model.prepare_inputs_for_generation(token[:, None], next_sequence_length=1, **kwargs)
        out = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(out, kwargs)
        logits = out.logits[:, -1]
    truncated[live] |= ~done

    if not logps.isfinite().all():
        raise UserError("the model's logits are not finite: its weights are NaN, or --learning_rate is too high")
    ids, logp, written = tokens.int().cpu().numpy(), logps.float().cpu().numpy(), (reply_ids < 0).cpu().numpy()
    head_ids, head_logps = head_ids.cpu().numpy(), head_logps.cpu().numpy()
    return [
        Completion(
            ids=ids[i, :n].copy(),  # a view would keep all N x L ids in memory
            logp=logp[i, :n].copy(),
            truncated=cut_off,
            kept=[own if len(own) else None for own in kept[i][:n]] or None,  # empty: no set, or nothing was cut
            head_ids=head_ids[i, :n].copy() if K else None,
            head_logp=head_logps[i, :n].copy() if K else None,
            written=None if replies is None else written[i, :n].copy(),
        )
        for i, (n, cut_off) in enumerate(zip(lengths.tolist(), truncated.tolist(), strict=True))
    ]


def _append_sets(kept: list[list[np.ndarray]], live: Tensor, in_set: Tensor) -> int:
    """Add the kept set of the next token to the list of each completion in the batch. in_set (B, V) is True for the ids
    in a set. A set without ids stands for no set, in a reply for instance. Return the number of ids."""
    ids, counts = in_set.nonzero()[:, 1].int().cpu().numpy(), in_set.sum(1).cpu().numpy()
    for n, own in zip(live.tolist(), np.split(ids, counts.cumsum()[:-1])):
        kept[n].append(own)
    return len(ids)


def has_stop(ids: list[int], sampling: Sampling) -> bool:
    """Return whether the text of a turn contains a stop string. Earlier tokens were already checked, so a stop string
    must end in the last token. `ids` are the last tokens of the turn, as many as `stop_window` says."""
    text = sampling.to_text(ids)
    return any(stop in text for stop in sampling.stop)


def stop_window(sampling: Sampling) -> int:
    """Return how many tokens a stop string may have. One of n characters has at most 4 n bytes, and so at most 4 n
    tokens. Four more are read, in case the first one begins inside a character, which then decodes to other text."""
    return 4 * (1 + max(map(len, sampling.stop)))


def may_end_stop(token: int, sampling: Sampling) -> bool:
    """Return whether a stop string may end in this token, which has its last character or a part of a character."""
    # A tokenizer may drop a space at the start of a text, but not before the second token.
    text = sampling.to_text([token]) + sampling.to_text([token, token])
    return "\ufffd" in text or any(stop[-1] in text for stop in sampling.stop)


def sample(
    logits: Tensor, u: Tensor | None, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Pick the next token of each row from logits (B, V) and uniform numbers (B,). Return the tokens (B,), their
    log-probs (B,), a mask (B, V) of the kept sets, or None if log-probs are normalized over the whole vocabulary, and
    the ids (B, K) and log-probs (B, K + 1) of the head, or None if it is not recorded."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0.0:  # greedy: nothing is cut, and log-probs are those at temperature 1
        whole = p = logits.softmax(-1)  # (B, V)
        token = logits.argmax(-1, keepdim=True)
    else:
        whole = (logits if sampling.temperature == 1.0 else logits / sampling.temperature).softmax(-1)
        p = _cut(whole, sampling)
        token = _pick(p, u[:, None])
    logp = whole.gather(1, token).log().squeeze(1)
    head = _head(p, min(sampling.head, p.shape[1])) if sampling.head else None
    if p is whole or not sampling.keep_set:  # `_cut` returns its argument if it cuts nothing
        return token.squeeze(1), logp, None, head
    return token.squeeze(1), logp - p.sum(-1).log(), p > 0.0, head


def _head(p: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k likeliest ids (B, K) under p (B, V), and the log-probs (B, K + 1) of each of them and of all others
    together. p may not add up to 1, because it was cut."""
    top, ids = p.topk(k)
    others = p.scatter(1, ids, 0.0).sum(-1, keepdim=True)  # 1 - top.sum() would be rounded
    return ids.int(), (torch.cat([top, others], -1) / p.sum(-1, keepdim=True)).log().float()


def _pick(p: Tensor, u: Tensor) -> Tensor:
    """Return the first token (B, 1) whose cumulative probability exceeds u (B, 1), for p (B, V)."""
    # A GPU computes a cumulative sum in parallel. In fp32 it may then not be monotonic.
    cdf = p.cumsum(-1, dtype=torch.float64 if p.is_cuda else p.dtype)
    total = cdf[:, -1:]  # not 1 if p was cut, or because of rounding, so u is scaled by it
    # u may round up to 1, so keep the target strictly below the total. right=True makes sure that a target of 0 does
    # not pick a first token that has probability 0.
    target = torch.minimum(u.to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).clamp(max=p.shape[1] - 1)


def _cut(p: Tensor, sampling: Sampling) -> Tensor:
    """Set to 0 the probabilities outside the top k, then those outside the smallest set that has top_p of the remaining
    mass, and then those below min_p times the highest."""
    if sampling.top_k and sampling.top_k < p.shape[1]:
        p = p.where(p >= p.topk(sampling.top_k).values[:, -1:], 0.0)
    if sampling.top_p < 1.0:
        high, order = p.sort(descending=True)
        mass_before = high.cumsum(-1).sub_(high)
        high = high.where(mass_before < sampling.top_p * high.sum(-1, keepdim=True), 0.0)
        del mass_before  # as large as p, so free it before the next line allocates
        p = torch.zeros_like(p).scatter_(1, order, high)
    if sampling.min_p > 0.0:
        p = p.where(p >= sampling.min_p * p.amax(-1, keepdim=True), 0.0)
    return p


def cache_of(kwargs: dict) -> Cache | None:
    """Return the cache among the arguments of a model."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def _select_rows(kwargs: dict, rows: Tensor) -> None:
    """Replace the batch by these rows of it, in the cache, the mask and the positions. A row that is given several
    times is repeated."""
    if (past := cache_of(kwargs)) is not None:
        past.reorder_cache(rows)
    for name in PER_ROW:
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][rows]
