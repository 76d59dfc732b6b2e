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

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from config import UserError
from fast.compact_list import CompactList
from fast.growing_cache import make_room
from fast.kept_sets import KeptSets, SetsOfBatch

Progress = Callable[[int, int], None]  # gets how many tokens each row has so far, and the number of unfinished rows
Reply = Callable[[list[int]], list[int] | None]  # ids of a turn -> ids of the reply; None ends the completion
BLOCK = 512  # size of a block of the vocabulary
PROMPT_TOKENS = 1 << 14  # how many tokens of prompts, with padding, are read at once: enough to keep a GPU busy
PER_ROW = "attention_mask", "position_ids"  # arguments of the model that have a row for each completion
PIECEWISE_LAYERS = DynamicLayer, DynamicSlidingWindowLayer  # cache layers of these types take prompts in pieces


@dataclass
class Sampling:
    max_completion_length: int
    eos_ids: list[int]  # each of these ends a turn
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all tokens
    top_p: float = 1.0
    min_p: float = 0.0  # the lowest probability that is kept, relative to the highest one
    keep_set: bool = True  # record the ids that remain after top_k, top_p and min_p, and normalize log-probs over them
    tokens_at_once: int = 1 << 19  # limit of tokens in the cache, counting every row at its maximum length
    drop_share: float = 0.25  # finished rows are dropped from the batch once they make up this share of it
    with_entropy: bool = False  # record the entropy of the distribution of each token
    stop: list[str] = field(default_factory=list)  # a turn ends with the token that completes one of these strings
    to_text: Callable[[list[int]], str] | None = None  # the tokenizer's decode; `stop` needs it


@dataclass
class Completion:
    """The turns of the model after a prompt, and the replies between them. Each list has one entry per token. The
    tokens of replies have log-prob 0, entropy 0 and no kept set. `= CompactList(...)` says how a field is stored: you
    may assign a list, an array or a tensor, it is kept as an array, and reading it gives a list. An optional field may
    be None."""

    ids: list[int] = CompactList(np.int32)  # with the end-of-sequence token of each turn
    logp: list[float] = CompactList(np.float32)  # under the sampler, at its temperature, normalized over `kept`
    truncated: bool  # the limit of tokens, replies included, was reached before the completion was over
    entropy: list[float] | None = CompactList(np.float32, optional=True)  # of the uncut distribution, if requested
    kept: KeptSets | None = None  # for each token, the ids it was sampled from; None if nothing was cut
    written: list[bool] | None = CompactList(np.bool_, optional=True)  # False in replies; None if there are none
    replies: list | None = None  # as texts or messages, for samples.jsonl and rewards; set in tasks/_turns.py

    @property
    def length(self) -> int:
        """The number of tokens that the model wrote, which is |o| in every equation."""
        return len(self.ids) if self.written is None else sum(self.written)

    @property
    def turns(self) -> list[list[int]]:
        """The ids of each turn of the model."""
        written = self.written or [True] * self.length
        pieces = groupby(zip(written, self.ids, strict=True), key=lambda pair: pair[0])
        return [[token for _, token in piece] for by_model, piece in pieces if by_model]


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
    replies: list[Reply] | None = None,
    progress: Progress | None = None,
) -> list[Completion]:
    """Sample one completion of each prompt. Row i of uniform (N, max_completion_length) picks the tokens of completion
    i. Greedy sampling needs no random numbers. Equal prompts are read only once. replies[i] is called whenever a turn
    of completion i has ended. Without replies, every completion has one turn."""
    length = max(map(len, prompts), default=0) + sampling.max_completion_length
    rows_at_once = max(1, sampling.tokens_at_once // length)
    completions = []
    for start in range(0, len(prompts), rows_at_once):
        rows = slice(start, start + rows_at_once)
        own_uniform = None if uniform is None else uniform[rows]
        own_replies = None if replies is None else [replies[i] for i in range(len(prompts))[rows]]
        completions += _generate(model, prompts[rows], own_uniform, own_replies, sampling, progress)
    return completions


def _generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniform: np.ndarray | None,
    replies: list[Reply] | None,
    sampling: Sampling,
    progress: Progress | None,
) -> list[Completion]:
    distinct = list(dict.fromkeys(map(tuple, prompts)))
    place = {prompt: i for i, prompt in enumerate(distinct)}
    width = max(map(len, distinct))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in distinct], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=model.device)
    decode = partial(
        _decode,
        rows=torch.tensor([place[tuple(prompt)] for prompt in prompts], device=model.device),
        uniform=None if uniform is None else torch.as_tensor(uniform, device=model.device),
        replies=replies,
        sampling=sampling,
        progress=progress,
    )
    # This configuration only prepares the cache and the inputs. Tokens are chosen by `sample`, below.
    config = GenerationConfig(max_new_tokens=sampling.max_completion_length, do_sample=False, use_cache=True)

    saved_config, was_training = model.generation_config, model.training
    # What `config` leaves unset, `generate` takes from the model's own configuration. So give the model an empty one.
    model.generation_config = GenerationConfig()
    model.eval()  # in train mode, gradient checkpointing would silently turn the cache off
    try:
        sampled = model.generate(ids, attention_mask=mask, generation_config=config, custom_generate=decode)
    finally:
        model.generation_config = saved_config
        model.train(was_training)
    tokens, logp, entropies, kept, written, lengths, truncated = sampled
    if not logp.isfinite().all():
        raise UserError("the model's logits are not finite: its weights are NaN, or --learning_rate is too high")
    tokens, logp, entropies = tokens.cpu(), logp.cpu(), entropies.cpu()
    return [
        Completion(
            ids=tokens[i, :n],
            logp=logp[i, :n],
            truncated=cut_off,
            entropy=entropies[i, :n] if sampling.with_entropy else None,
            kept=KeptSets(kept[i].words, kept[i].offsets[: n + 1]) if kept[i] else None,  # n sets have n + 1 offsets
            written=None if written is None else written[i, :n].cpu(),
        )
        for i, (n, cut_off) in enumerate(zip(lengths.tolist(), truncated.tolist(), strict=True))
    ]


def _decode(
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
) -> tuple[Tensor, Tensor, Tensor, list[KeptSets], Tensor | None, Tensor, Tensor]:
    """Run the loop over tokens that `generate` calls in place of its own. input_ids (P, T) are the distinct prompts,
    padded on the left, and rows (N,) gives the prompt of each completion. Return seven values: tokens, log-probs and
    entropies, each (N, L); the kept sets of each completion; a mask (N, L) of the tokens that the model wrote, or None
    if there are no replies; the length of each completion, and whether it was truncated, each (N,). Values after the
    end of a completion have no meaning."""
    N, L = len(rows), sampling.max_completion_length
    tokens = torch.zeros(N, L, dtype=torch.long, device=rows.device)
    reply_ids = torch.full((N, L), -1, device=rows.device)  # ids of replies at their positions, and -1 elsewhere
    starts = [0] * N  # the position where the current turn of each completion starts
    kept = SetsOfBatch(N)
    eos_ids = torch.tensor(sampling.eos_ids, device=rows.device)
    lengths = torch.zeros(N, dtype=torch.long, device=rows.device)
    truncated = torch.zeros(N, dtype=torch.bool, device=rows.device)

    # Read each prompt once, in pieces if there are many tokens. Then repeat its cache for all its samples.
    past = kwargs.get("past_key_values")
    # --decode graph sets `forward` on the model object to a function that cannot read prompts in pieces
    # (infra/decoding.py). Otherwise `forward` belongs to the model's class, and is not in vars(model).
    is_graph = "forward" in vars(model)
    if past is not None and not is_graph and all(type(layer) in PIECEWISE_LAYERS for layer in past.layers):
        generation_config.prefill_chunk_size = max(1, PROMPT_TOKENS // len(input_ids))
    out = model._prefill(input_ids, generation_config, kwargs)
    kwargs = model._update_model_kwargs_for_generation(out, kwargs)
    logits = out.logits[:, -1][rows]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logps, entropies = (torch.zeros(N, L, dtype=dtype, device=rows.device) for _ in range(2))
    _select_rows(kwargs, rows)
    make_room(kwargs.get("past_key_values"), max_tokens=input_ids.shape[1] + L)

    live = torch.arange(N, device=rows.device)  # for each row of the batch, the number of its completion
    done = torch.zeros(N, dtype=torch.bool, device=rows.device)
    for t in range(L):
        token, logp, in_set = sample(logits, None if uniform is None else uniform[live, t], sampling)
        in_reply = reply_ids[live, t] >= 0
        token = torch.where(in_reply, reply_ids[live, t], token)
        tokens[live, t], logps[live, t] = token, logp.masked_fill(in_reply, 0.0)
        if in_set is not None:
            kept.append(in_set & ~(done | in_reply)[:, None], live)
        if sampling.with_entropy:
            entropies[live, t] = entropy_of(logits, sampling.temperature).masked_fill(in_reply, 0.0)
        ended = torch.isin(token, eos_ids)
        if sampling.stop:
            turns = [ids[starts[n] :] for n, ids in zip(live.tolist(), tokens[live, : t + 1].tolist(), strict=True)]
            ended = ended | torch.tensor([has_stop(ids, sampling) for ids in turns], device=rows.device)
        ended = ended & ~in_reply & ~done
        # Now `ended` is True where a turn of the model has ended. The loop over `turn_ends` sets it to False where
        # a reply follows, so that only the completions that have ended remain.
        turn_ends = [] if replies is None else ended.nonzero().squeeze(1).tolist()
        for b in turn_ends:
            n = int(live[b])  # the number of the completion
            reply = replies[n](tokens[n, starts[n] : t + 1].tolist())
            if reply:
                next_start = t + 1 + len(reply)
                # If the reply leaves no room for another turn, it is dropped, and the completion ends here.
                truncated[n] = next_start >= L
                if not truncated[n]:
                    reply_ids[n, t + 1 : next_start] = torch.tensor(reply)
                    starts[n], ended[b] = next_start, False
        lengths[live] += ~done
        done = done | ended
        count = int(done.sum())
        if progress is not None:
            progress(t + 1, len(live) - count)
        if count == len(live) or t + 1 == L:
            break
        if count >= sampling.drop_share * len(live):  # dropping rows copies the cache, so not for every single row
            kept.to_host(live)  # `live` says whose sets these are, so do this before it changes
            keep = (~done).nonzero().squeeze(1)
            live, done, token = live[keep], done[keep], token[keep]
            _select_rows(kwargs, keep)
        inputs = model.prepare_inputs_for_generation(token[:, None], next_sequence_length=1, **kwargs)
        out = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(out, kwargs)
        logits = out.logits[:, -1]
    truncated[live] |= ~done
    kept.to_host(live)
    written = None if replies is None else reply_ids < 0
    return tokens, logps, entropies, kept.sets, written, lengths, truncated


def has_stop(ids: list[int], sampling: Sampling) -> bool:
    """Return whether the text of a turn contains a stop string. Earlier tokens were already checked, so a stop string
    must end in the last token, and only the end of the turn is decoded. A stop string of n characters has at most 4 n
    bytes, and so at most 4 n tokens. Four more tokens are decoded, in case the piece begins inside a character."""
    text = sampling.to_text(ids[-4 * (1 + max(map(len, sampling.stop))) :])
    return any(stop in text for stop in sampling.stop)


def sample(logits: Tensor, u: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor | None]:
    """Pick the next token of each row from logits (B, V) and uniform numbers (B,). Return the tokens (B,), their
    log-probs (B,), and a mask (B, V) of the kept sets, or None if log-probs are normalized over the whole
    vocabulary."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0.0:
        whole = p = logits.softmax(-1)  # (B, V)
        token = logits.argmax(-1, keepdim=True)
    else:
        whole = (logits if sampling.temperature == 1.0 else logits / sampling.temperature).softmax(-1)
        p = _cut(whole, sampling)
        token = (_pick_in_blocks if logits.is_cuda else _pick)(p, u[:, None])
    logp = whole.gather(1, token).log().squeeze(1)
    if p is whole or not sampling.keep_set:  # `_cut` returns its argument if it cuts nothing
        return token.squeeze(1), logp, None
    return token.squeeze(1), logp - p.sum(-1).log(), p > 0.0


def _pick(p: Tensor, u: Tensor) -> Tensor:
    """Return the first token (B, 1) whose cumulative probability exceeds u (B, 1), for p (B, V)."""
    cdf = p.cumsum(-1)
    # The sum of p is not 1 if p was cut, or because of rounding. So scale u by the sum.
    return _first_above(cdf, u.to(cdf.dtype) * cdf[:, -1:])


def _pick_in_blocks(p: Tensor, u: Tensor) -> Tensor:
    """Do the same as `_pick`, for a GPU. On a GPU, cumulative sums are computed in parallel and may not be monotonic in
    fp32, so sum in float64. A search along whole rows would keep only a small part of the GPU busy, so find the block
    first, and then the token in it."""
    blocks = F.pad(p, (0, -p.shape[1] % BLOCK)).view(len(p), -1, BLOCK)
    cdf = blocks.sum(-1, dtype=torch.float64).cumsum(-1)  # (B, V / BLOCK)
    target = u.double() * cdf[:, -1:]
    block = _first_above(cdf, target)
    inside = blocks.take_along_dim(block[..., None], 1).squeeze(1).cumsum(-1, dtype=torch.float64)  # (B, BLOCK)
    before = F.pad(cdf, (1, 0)).gather(1, block)  # (B, 1), the mass of all earlier blocks
    return block * BLOCK + _first_above(inside, target - before)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    total = cdf[:, -1:]
    # u may round up to 1, so keep the target strictly below the total. right=True makes sure that a target of 0 does
    # not pick a first token that has probability 0.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)


def entropy_of(logits: Tensor, temperature: float) -> Tensor:
    """Return the entropy (B,) of the distribution before top-k, top-p and min-p cut it, for logits (B, V). For greedy
    tokens, it is taken at temperature 1, like their log-probs."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.special.entr((logits / (temperature or 1.0)).softmax(-1)).sum(-1)


def _cut(p: Tensor, sampling: Sampling) -> Tensor:
    """Set to 0 the probabilities outside the top k, then those outside the smallest set that has top_p of the remaining
    mass, and then those below min_p times the highest."""
    if sampling.top_k and sampling.top_k < p.shape[1]:
        p = p.where(p >= p.topk(sampling.top_k).values[:, -1:], 0.0)
    if sampling.top_p < 1.0:
        high, order = p.sort(descending=True)
        mass_before = high.cumsum(-1).sub_(high)
        high = high.where(mass_before < sampling.top_p * high.sum(-1, keepdim=True), 0.0)
        del mass_before
        p = torch.zeros_like(p).scatter_(1, order, high)
    if sampling.min_p > 0.0:
        p = p.where(p >= sampling.min_p * p.amax(-1, keepdim=True), 0.0)
    return p


def _select_rows(kwargs: dict, rows: Tensor) -> None:
    """Replace the batch by these rows of it, in the cache, the mask and the positions. A row that is given several
    times is repeated."""
    for name in ("past_key_values", "cache_params"):  # models like Mamba use the second name
        if kwargs.get(name) is not None:
            kwargs[name].reorder_cache(rows)
    for name in PER_ROW:
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][rows]
