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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from config import SMALLER, UserError
from fast.token_search import first_above, first_beyond

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]  # gets how many tokens each row has so far, and the number of unfinished rows
Reply = Callable[[list[int]], list[int] | None]  # ids of a turn -> ids of the reply, or None: the completion is over
CHECK_EVERY = {"cuda": 8, "cpu": 1}  # how many tokens between two checks for ended rows; each waits for the GPU
PROMPT_TOKENS = 1 << 14  # how many tokens of prompts, with padding, are read at once: enough to keep a GPU busy
ROW_ARGUMENTS = "attention_mask", "position_ids"  # arguments of the model that have a row for each completion
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
    head: int = 0  # record the log-probs of this many ids at each token, the likeliest; if sets are cut, use keep_set
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
    splits: list[int] | None = None  # where a turn begins right after another one, because the reply was empty
    replies: list | None = None  # as texts or messages, for the rewards; set in train.py, like the next one
    state: dict | None = None  # this completion's copy of the task's row, as `reply` left it; None after the rewards

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
        changes = np.flatnonzero(np.diff(self.written)) + 1  # where a turn or a reply begins
        parts = np.split(np.arange(len(self.ids)), sorted({*changes, *(self.splits or [])}))
        return [self.ids[part].tolist() for part in parts if self.written[part[0]]]


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
    of completion i has ended. If the reply is empty, the next turn begins at once. Without replies, every completion
    has one turn."""
    begin = None if replies is None else replies.__getitem__
    return rollout_and_limit(model, prompts, uniform, sampling, begin=begin, progress=progress)[0]


@torch.no_grad()
def rollout_and_limit(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniform: np.ndarray | None,
    sampling: Sampling,
    *,
    begin: Callable[[int], Reply] | None = None,
    progress: Progress | None = None,
) -> tuple[list[Completion], int]:
    """Do what `rollout` does, where begin(i) takes the place of replies[i]. Return the completions, and the limit of
    tokens at once: that of `sampling`, or a lower one if memory ran out.

    If memory runs out, the limit is halved, and the completions that were lost are sampled again. They do not depend on
    how many are sampled at once. Each attempt calls begin(i) anew, so no game goes on where the last one broke off.
    """
    length = max(map(len, prompts), default=0) + sampling.max_completion_length
    completions, limit = [], sampling.tokens_at_once
    while len(completions) < len(prompts):
        start = len(completions)
        part = range(start, min(start + max(1, limit // length), len(prompts)))
        sampled = _unless_out_of_memory(
            _generate,
            model,
            [prompts[i] for i in part],
            uniform=None if uniform is None else torch.as_tensor(uniform[part.start : part.stop], device=model.device),
            replies=None if begin is None else [begin(i) for i in part],
            sampling=sampling,
            progress=progress,
        )
        if sampled is not None:
            completions += sampled
            continue
        half = len(part) // 2
        if half == 0:
            raise UserError(f"out of memory with one completion at a time: {SMALLER}")
        torch.cuda.empty_cache()
        limit = half * length
        logger.warning(f"out of memory: from now on at most {half} completions are sampled at once")
    return completions, limit


def _unless_out_of_memory(call: Callable, *args: object, **how: object) -> list[Completion] | None:
    """Return what the call returns, or None if memory ran out. By then, the tensors of the call are free, which they
    would not be in an `except` block of the caller."""
    with suppress(torch.OutOfMemoryError):
        return call(*args, **how)
    return None


def _generate(model: PreTrainedModel, prompts: list[list[int]], sampling: Sampling, **how: object) -> list[Completion]:
    """Call `generate`, with `_token_loop` in place of its own loop over tokens. `how` has the other arguments of
    `_token_loop`."""
    distinct = [*dict.fromkeys(map(tuple, prompts))]
    place = {prompt: p for p, prompt in enumerate(distinct)}
    width = max(map(len, distinct))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in distinct], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in distinct], device=model.device)
    of_prompt = torch.tensor([place[tuple(prompt)] for prompt in prompts], device=model.device)
    # This configuration only prepares the cache and the inputs. Tokens are chosen by `sample`, below.
    config = GenerationConfig(max_new_tokens=sampling.max_completion_length, do_sample=False, use_cache=True)
    loop = partial(_token_loop, of_prompt=of_prompt, sampling=sampling, **how)
    with _without_defaults(model):
        return model.generate(ids, attention_mask=mask, generation_config=config, custom_generate=loop)


@contextmanager
def _without_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Let no setting of the model change what is sampled. What a call of `generate` leaves unset, it takes from the
    model's own configuration, and in train mode, gradient checkpointing would silently turn the cache off."""
    its_config, in_train_mode = model.generation_config, [m for m in model.modules() if m.training]
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        yield
    finally:
        model.generation_config = its_config
        for module in in_train_mode:
            module.training = True


# ---- The loop over tokens ----


@dataclass
class Drafts:
    """N completions of at most L tokens, while they are sampled. The batch has a row for each of them at first, and B
    rows later. At token t, completion n is in one of four states:

                     n is in `live`   done    reply_ids[n, t]   its token t
        in a turn    yes              False   -1                is sampled
        in a reply   yes              False   an id             is this id
        over         yes              True    -1                does not count
        gone         no               -       -1                is not computed
    """

    live: Tensor  # (B,), the completion of each row of the batch
    done: Tensor  # (B,) bool, which of these are over
    reply_ids: Tensor  # (N, L), the ids of replies at their positions, and -1 elsewhere
    turn_starts: list[int]  # where the turn of each completion starts or, in a reply, where its next turn will
    splits: list[list[int]]  # where turns start right after another one
    lengths: Tensor  # (N,), how many tokens each completion has so far, with its replies
    truncated: Tensor  # (N,) bool
    tokens: Tensor  # (N, L)
    logps: Tensor  # (N, L)
    head_ids: Tensor  # (N, L, K)
    head_logps: Tensor  # (N, L, K + 1)
    kept: list[list[np.ndarray]]  # for each completion, the kept set of each token; one without ids stands for no set
    kept_ids: int = 0  # how many ids all these sets have

    def turn(self, n: int, t: int) -> list[int]:
        """The ids of completion n's turn up to token t, which are none in a reply."""
        return self.tokens[n, self.turn_starts[n] : t + 1].tolist()


def _begin_drafts(N: int, logits: Tensor, sampling: Sampling) -> Drafts:
    """Return N empty completions for logits of this type and vocabulary."""
    L, K = sampling.max_completion_length, min(sampling.head, logits.shape[1])
    device = logits.device
    return Drafts(
        live=torch.arange(N, device=device),
        done=torch.zeros(N, dtype=torch.bool, device=device),
        reply_ids=torch.full((N, L), -1, device=device),
        turn_starts=[0] * N,
        splits=[[] for _ in range(N)],
        lengths=torch.zeros(N, dtype=torch.long, device=device),
        truncated=torch.zeros(N, dtype=torch.bool, device=device),
        tokens=torch.zeros(N, L, dtype=torch.long, device=device),
        logps=torch.zeros(N, L, dtype=torch.promote_types(logits.dtype, torch.float32), device=device),
        head_ids=torch.zeros(N, L, K, dtype=torch.int32, device=device),
        head_logps=torch.zeros(N, L, K + 1, device=device),
        kept=[[] for _ in range(N)],
    )


def _token_loop(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: object = None,  # `generate` passes this and the next one; they are not used
    stopping_criteria: object = None,
    generation_config: GenerationConfig | None = None,
    *,
    of_prompt: Tensor,
    uniform: Tensor | None,
    replies: list[Reply] | None,
    sampling: Sampling,
    progress: Progress | None,
    **kwargs,
) -> list[Completion]:
    """Sample the completions. `generate` calls this in place of its own loop over tokens. input_ids (P, T) are the
    distinct prompts, padded on the left, of_prompt (N,) gives the prompt of each completion, and kwargs are the other
    arguments of the model."""
    L, check_every = sampling.max_completion_length, CHECK_EVERY[input_ids.device.type]
    logits, kwargs = _read_prompts(model, input_ids, of_prompt, generation_config, kwargs, room=L)
    drafts = _begin_drafts(len(of_prompt), logits, sampling)
    eos_ids = torch.tensor(sampling.eos_ids, device=logits.device)
    may_stop = cache(partial(may_end_stop, sampling=sampling))  # decodes each token of the vocabulary at most once
    for t in range(L):
        token, in_turn = _pick_tokens(drafts, t, logits, uniform, sampling)
        ends = in_turn & _ends_turn(drafts, t, token, eos_ids, may_stop, sampling)
        goes_on = ends & _take_replies(drafts, t, ends, replies)
        drafts.done = drafts.done | (ends & ~goes_on)
        if t % check_every == 0:
            unfinished = len(drafts.live) - int(drafts.done.sum())
            if progress is not None:
                progress(t + 1, unfinished)
            if unfinished == 0:
                break
            # Dropping rows copies the cache, so it is not done for every single row.
            if len(drafts.live) - unfinished >= sampling.drop_share * len(drafts.live):
                _drop_done(drafts, kwargs)
        if t + 1 < L:
            token = drafts.tokens[drafts.live, t : t + 1]  # (B, 1); rows may have left, so not the one above
            inputs = model.prepare_inputs_for_generation(token, next_sequence_length=1, **kwargs)
            out = model(**inputs, return_dict=True)
            kwargs = model._update_model_kwargs_for_generation(out, kwargs)
            logits = out.logits[:, -1]
    drafts.truncated[drafts.live] |= ~drafts.done
    return _completions(drafts, has_replies=replies is not None)


def _read_prompts(
    model: PreTrainedModel,
    input_ids: Tensor,
    of_prompt: Tensor,
    generation_config: GenerationConfig,
    kwargs: dict,
    room: int,
) -> tuple[Tensor, dict]:
    """Read each prompt once, in pieces if there are many tokens. Then repeat its cache for all its completions, each
    with room for this many tokens. Return the logits (N, V) of the first tokens, and the arguments of the model."""
    past = cache_of(kwargs)
    if past is not None and all(type(layer) in PIECEWISE_LAYERS for layer in past.layers):
        generation_config.prefill_chunk_size = max(1, PROMPT_TOKENS // len(input_ids))
    out = model._prefill(input_ids, generation_config, kwargs)
    kwargs = model._update_model_kwargs_for_generation(out, kwargs)
    _select_rows(kwargs, of_prompt)
    if hasattr(model.forward, "make_room"):  # with --decode graph, tokens are written in place (infra/decoding.py)
        model.forward.make_room(cache_of(kwargs), max_tokens=input_ids.shape[1] + room)
    return out.logits[:, -1][of_prompt], kwargs


def _pick_tokens(
    drafts: Drafts, t: int, logits: Tensor, uniform: Tensor | None, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """Write token t of each row: the next one of its reply, or else a sampled one. Return the tokens (B,), and which
    rows are in a turn (B,)."""
    live = drafts.live
    token, logp, in_set, head = sample(logits, None if uniform is None else uniform[live, t], sampling)
    reply_id = drafts.reply_ids[live, t]
    in_reply = reply_id >= 0
    in_turn = ~(drafts.done | in_reply)
    token = torch.where(in_reply, reply_id, token)
    drafts.tokens[live, t] = token
    drafts.logps[live, t] = logp.masked_fill(in_reply, 0.0)
    drafts.lengths[live] += ~drafts.done
    if head is not None:
        drafts.head_ids[live, t], drafts.head_logps[live, t] = head
    if in_set is not None:
        _append_sets(drafts, in_set & in_turn[:, None])
    return token, in_turn


def _append_sets(drafts: Drafts, in_set: Tensor) -> None:
    """Add the kept set of a token to each completion in the batch. in_set (B, V) is True for the ids in a set."""
    ids, counts = in_set.nonzero()[:, 1].int().cpu().numpy(), in_set.sum(1).cpu().numpy()
    # `ids` has the ids of the first row, then those of the second, and so on.
    for n, own in zip(drafts.live.tolist(), np.split(ids, counts.cumsum()[:-1])):
        drafts.kept[n].append(own)
    drafts.kept_ids += len(ids)
    if drafts.kept_ids > MOST_KEPT_IDS:
        mean = drafts.kept_ids // int(drafts.lengths.sum())
        raise UserError(f"kept sets of {mean:,} ids are too large: lower --top_p, or give --keep_set false")


def _ends_turn(
    drafts: Drafts, t: int, token: Tensor, eos_ids: Tensor, may_stop: Callable[[int], bool], sampling: Sampling
) -> Tensor:
    """Return which of these tokens (B,) end a turn: end tokens, and those that complete a stop string."""
    ends = torch.isin(token, eos_ids)
    if not sampling.stop:
        return ends
    ids = zip(drafts.live.tolist(), token.tolist())
    stops = [may_stop(token_id) and has_stop(drafts.turn(n, t), sampling) for n, token_id in ids]
    return ends | torch.tensor(stops, device=token.device)


def _take_replies(drafts: Drafts, t: int, ends: Tensor, replies: list[Reply] | None) -> Tensor:
    """Ask for a reply to each turn that ends with token t. Return which rows (B,) get one, and so go on."""
    goes_on = torch.zeros_like(ends)
    if replies is None:
        return goes_on
    L = drafts.tokens.shape[1]
    for b in ends.nonzero().squeeze(1).tolist():
        n = int(drafts.live[b])
        reply = replies[n](drafts.turn(n, t))
        if reply is None:
            continue
        next_turn = t + 1 + len(reply)
        if next_turn >= L:
            drafts.truncated[n] = True  # the reply leaves no room for another turn, so it is dropped
            continue
        drafts.reply_ids[n, t + 1 : next_turn] = torch.tensor(reply)
        drafts.turn_starts[n] = next_turn
        if not reply:
            drafts.splits[n].append(next_turn)
        goes_on[b] = True
    return goes_on


def _drop_done(drafts: Drafts, kwargs: dict) -> None:
    """Let the completions that are over leave the batch."""
    rows = (~drafts.done).nonzero().squeeze(1)
    drafts.live, drafts.done = drafts.live[rows], drafts.done[rows]
    _select_rows(kwargs, rows)


def _completions(drafts: Drafts, has_replies: bool) -> list[Completion]:
    if not drafts.logps.isfinite().all():
        raise UserError("the model's logits are not finite: its weights are NaN, or --learning_rate is too high")
    ids, logp = drafts.tokens.int().cpu().numpy(), drafts.logps.float().cpu().numpy()
    written = (drafts.reply_ids < 0).cpu().numpy()
    head_ids, head_logp = drafts.head_ids.cpu().numpy(), drafts.head_logps.cpu().numpy()
    has_head, has_sets = head_ids.shape[2] > 0, drafts.kept_ids > 0
    return [
        Completion(
            ids=ids[i, :n].copy(),  # a view would keep all N x L ids in memory
            logp=logp[i, :n].copy(),
            truncated=truncated,
            kept=[own if len(own) else None for own in drafts.kept[i][:n]] if has_sets else None,
            head_ids=head_ids[i, :n].copy() if has_head else None,
            head_logp=head_logp[i, :n].copy() if has_head else None,
            written=written[i, :n].copy() if has_replies else None,
            splits=drafts.splits[i] if has_replies else None,
        )
        for i, (n, truncated) in enumerate(zip(drafts.lengths.tolist(), drafts.truncated.tolist(), strict=True))
    ]


# ---- Stop strings ----


def has_stop(turn: list[int], sampling: Sampling) -> bool:
    """Return whether the text of a turn contains a stop string. Earlier tokens were already checked, so a stop string
    must end in the last token. The last 4 n tokens are enough for one of n characters: these have at most 4 n bytes,
    and a token has at least one."""
    text = sampling.to_text(turn[-stop_window(sampling) :])
    if "\ufffd" in text:  # these tokens may begin inside a character, which may spoil all of the text
        text = sampling.to_text(turn)
    return any(stop in text for stop in sampling.stop)


def stop_window(sampling: Sampling) -> int:
    """Return how many tokens a stop string may have."""
    return 4 * max(map(len, sampling.stop))


def may_end_stop(token: int, sampling: Sampling) -> bool:
    """Return whether a stop string may end in this token: the token has the last character of one, or a part of a
    character. This saves decoding the end of every turn at every token."""
    # A tokenizer may drop a space at the start of a text, but not before the second token.
    text = sampling.to_text([token]) + sampling.to_text([token, token])
    return "\ufffd" in text or any(stop[-1] in text for stop in sampling.stop)


# ---- The next token ----


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
    if p.is_cuda:  # it adds in parallel; a sum in fp32 might not be monotonic, and one in fp64 takes long
        return first_above(p, u)
    cdf = p.cumsum(-1)
    # The total is not 1 if p was cut, or because of rounding, so u is scaled by it.
    return first_beyond(cdf, u.to(cdf.dtype) * cdf[:, -1:])[0]


def _cut(p: Tensor, sampling: Sampling) -> Tensor:
    """Set to 0 the probabilities outside the top k, then those outside the smallest set that has top_p of the remaining
    mass, and then those below min_p times the highest."""
    if sampling.top_k and sampling.top_k < p.shape[1]:
        p = p.where(p >= p.topk(sampling.top_k).values[:, -1:], 0.0)
    if sampling.top_p < 1.0:
        high, order = p.sort(descending=True)
        # A GPU adds in another order if there are other rows. In fp64, this does not change a set.
        dtype = torch.float64 if p.is_cuda else p.dtype
        mass_before = high.cumsum(-1, dtype=dtype).sub_(high)
        high = high.where(mass_before < sampling.top_p * high.sum(-1, keepdim=True, dtype=dtype), 0.0)
        del mass_before  # as large as p, so free it before the next line allocates
        p = torch.zeros_like(p).scatter_(1, order, high)
    if sampling.min_p > 0.0:
        p = p.where(p >= sampling.min_p * p.amax(-1, keepdim=True), 0.0)
    return p


# ---- The arguments of the model ----


def cache_of(kwargs: dict) -> Cache | None:
    """Return the cache among the arguments of a model."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def _select_rows(kwargs: dict, rows: Tensor) -> None:
    """Replace the batch by these rows of it, in the cache, the mask and the positions. A row that is given several
    times is repeated."""
    if (past := cache_of(kwargs)) is not None:
        past.reorder_cache(rows)
    for name in ROW_ARGUMENTS:
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][rows]
