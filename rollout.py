"""Prompts -> completions, with Hugging Face `generate` and its KV cache.

Each completion is a function of the model, its prompt and its own stream of uniform numbers, never of the rank or of
the rows it happens to share a batch with. The stream is named by (seed, step, position of the prompt in the step,
number of the sample), and a token is picked by inverting the cumulative distribution at the stream's next number:

    token_t = min { v : cdf_t[v] > u_t },      cdf_t = cumsum(softmax(logits_t / temperature))

So the same run on any number of processes samples the same completions, up to ties in floating point. (In bf16 on a
GPU the logits themselves depend on the shape of the batch, so single tokens may differ there.) The distribution that
is sampled from is at hand, so the log-prob of each chosen token is recorded without another forward pass, and where
top-k, top-p or min-p cut it the ids that were left: all log-probs are over these ("Keep Sampling Mask", 2512.02556).

Three things make it fast, all inside `generate(custom_generate=...)`: a prompt is prefilled once for all its samples,
finished rows leave the batch while the others go on, and sampling is one pass over the distribution.
Left out: paged caches, continuous batching, beams, speculative decoding.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from config import UserError

Progress = Callable[[int, int], None]  # is told how many tokens were sampled and how many rows go on


@dataclass
class Sampling:
    max_completion_length: int
    eos_ids: list[int]
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    min_p: float = 0.0  # the least probability, as a share of the likeliest token's
    keep_set: bool = True  # where these three cut: which ids are left is recorded, and log-probs are over them
    tokens_at_once: int = 1 << 19  # of the cache, completions at full length; at least one completion
    drop_share: float = 0.25  # of the rows must have ended before they leave the batch
    with_entropy: bool = False  # that of each token's distribution is recorded


@dataclass
class KeptSets:
    """kept[t]: the ids that token t was sampled from; None: the whole vocabulary.

    One flat int32 array with offsets. A set of more than V / 32 ids is -1 and a bit for each id of the vocabulary: with
    V = 152k no token takes more than 19 kB, where its ids might take 600.
    """

    words: array = field(default_factory=lambda: array("i"))
    offsets: array = field(default_factory=lambda: array("q", [0]))

    def append(self, ids: np.ndarray, vocabulary: int) -> None:
        if 32 * len(ids) > vocabulary:
            bits = np.zeros(-(-vocabulary // 32) * 32, dtype=bool)
            bits[ids] = True
            self.words.append(-1)
            ids = np.packbits(bits).view(np.int32)
        self.words.frombytes(ids.tobytes())
        self.offsets.append(len(self.words))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, t: int) -> np.ndarray | None:
        t = range(len(self))[t]
        words = np.frombuffer(self.words, np.int32)[self.offsets[t] : self.offsets[t + 1]]
        if len(words) == 0:
            return None
        return words if words[0] >= 0 else np.unpackbits(words[1:].view(np.uint8)).nonzero()[0].astype(np.int32)

    def between(self, before: int, after: int) -> "KeptSets":
        """With so many None on either side."""
        return KeptSets(self.words, array("q", [0] * before) + self.offsets + array("q", [len(self.words)] * after))


@dataclass
class Completion:
    ids: list[int]  # as sampled, the end-of-sequence token included
    logp: list[float]  # the sampler's at this temperature: over the kept set or, without one, the whole vocabulary
    truncated: bool  # it reached the length limit without an end-of-sequence token
    entropy: list[float] | None = None  # where it was asked for; of the whole distribution
    kept: KeptSets | None = None  # for each token the ids that it was sampled from; None where nothing is cut


def uniforms(seed: int, step: int, samples: list[tuple[int, int]], length: int) -> np.ndarray:
    """The streams of the samples (prompt's position in the step, number of the sample): (len(samples), length)."""
    streams = [np.random.Generator(np.random.PCG64([seed, step, *sample])).random(length) for sample in samples]
    return np.stack(streams) if streams else np.zeros((0, length))


@torch.no_grad()
def rollout(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniform: np.ndarray | None,
    sampling: Sampling,
    *,
    progress: Progress | None = None,
) -> list[Completion]:
    """One completion of each prompt. Row i of uniform (N, max_completion_length) picks the tokens of completion i;
    greedy sampling needs none. Equal prompts are read once."""
    due, given = (len(prompts), sampling.max_completion_length), np.shape(uniform)
    enough = sampling.temperature == 0.0 or (given[:1] == due[:1] and given[1:] >= due[1:])
    if not enough or not all(isinstance(prompt, list) for prompt in prompts):
        raise ValueError(f"prompts must be lists of token ids; uniform must be {due}, not {given}")
    length = max(map(len, prompts), default=0) + sampling.max_completion_length
    done: list[Completion] = []
    while len(done) < len(prompts):
        rows = slice(len(done), len(done) + max(1, sampling.tokens_at_once // length))
        done += _generate(model, prompts[rows], None if uniform is None else uniform[rows], sampling, progress)
    return done


def _generate(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniform: np.ndarray | None,
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
        sampling=sampling,
        progress=progress,
    )
    # Only the cache and the inputs are prepared by this configuration; every choice of a token is in `sample`.
    config = GenerationConfig(max_new_tokens=sampling.max_completion_length, do_sample=False, use_cache=True)

    own, was_training = model.generation_config, model.training
    model.generation_config = GenerationConfig()  # the model's own fields would fill in what is not set here
    model.eval()  # in train(), gradient checkpointing would silently switch the cache off
    try:
        tokens, *figures = model.generate(ids, attention_mask=mask, generation_config=config, custom_generate=decode)
    finally:
        model.generation_config = own
        model.train(was_training)
    return _completions(tokens, *figures, sampling)


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: object = None,
    stopping_criteria: object = None,
    generation_config: GenerationConfig | None = None,
    *,
    rows: Tensor,
    uniform: Tensor | None,
    sampling: Sampling,
    progress: Progress | None,
    **kwargs,
) -> tuple[Tensor, Tensor, Tensor, list[KeptSets]]:
    """Prompts (P, T), left-padded, and rows (N,) -> tokens, log-probs, entropies, (N, L) each, and N kept sets."""
    N, L = len(rows), sampling.max_completion_length
    tokens = torch.zeros(N, L, dtype=torch.long, device=rows.device)
    logps, entropies = (torch.zeros(N, L, device=rows.device) for _ in range(2))
    kept = [KeptSets() for _ in range(N)]
    eos_ids = torch.tensor(sampling.eos_ids, device=rows.device)

    # Prefill: each prompt once, then its state and cache are repeated for its samples.
    out = model(**model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **kwargs), return_dict=True)
    kwargs = model._update_model_kwargs_for_generation(out, kwargs)
    logits = out.logits[rows, -1]
    _select_rows(kwargs, rows)

    live = torch.arange(N, device=rows.device)  # the completion that each row of the batch is
    done = torch.zeros(N, dtype=torch.bool, device=rows.device)
    for t in range(L):
        token, logp, left = sample(logits, None if uniform is None else uniform[live, t], sampling)
        tokens[live, t], logps[live, t] = token, logp
        if left is not None:
            for row, was_done, ids in zip(live.tolist(), done.tolist(), left, strict=True):
                if not was_done:
                    kept[row].append(ids, logits.shape[1])
        if sampling.with_entropy:
            entropies[live, t] = entropy_of(logits, sampling.temperature)
        done = done | torch.isin(token, eos_ids)
        finished = int(done.sum())
        if progress is not None:
            progress(t + 1, len(live) - finished)
        if finished == len(live) or t + 1 == L:
            break
        if finished >= sampling.drop_share * len(live):  # dropping rows copies the cache: not for each one
            keep = (~done).nonzero().squeeze(1)
            live, done, token = live[keep], done[keep], token[keep]
            _select_rows(kwargs, keep)
        inputs = model.prepare_inputs_for_generation(token[:, None], next_sequence_length=1, **kwargs)
        out = model(**inputs, return_dict=True)
        kwargs = model._update_model_kwargs_for_generation(out, kwargs)
        logits = out.logits[:, -1]
    return tokens, logps, entropies, kept


def sample(logits: Tensor, u: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor, list[np.ndarray] | None]:
    """logits (B, V), uniform numbers (B,) -> tokens (B,), their log-probs (B,) and, where log-probs are over the kept
    sets, the ids of each row's."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if sampling.temperature == 0.0:
        whole = p = logits.softmax(-1)  # (B, V)
        token = logits.argmax(-1, keepdim=True)
    else:
        whole = (logits if sampling.temperature == 1.0 else logits / sampling.temperature).softmax(-1)
        p = _truncated(whole, sampling)
        # On a GPU the sum is made in parallel parts, and in fp32 it might not be sorted.
        cdf = p.cumsum(-1, dtype=torch.float64 if logits.is_cuda else None)
        total = cdf[:, -1:]  # not exactly 1 in fp32
        # Strictly below the total: u may round up to 1. right=True: u = 0 must not pick a token of probability 0.
        target = torch.minimum(u[:, None].to(cdf.dtype) * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1)
    logp = whole.gather(1, token).log().squeeze(1)
    if p is whole or not sampling.keep_set:  # nothing was cut
        return token.squeeze(1), logp, None
    left = p > 0.0
    ids = left.nonzero()[:, 1].int().cpu().numpy()
    return token.squeeze(1), logp - p.sum(-1).log(), np.split(ids, left.sum(1).cumsum(0)[:-1].tolist())


def entropy_of(logits: Tensor, temperature: float) -> Tensor:
    """(B, V) -> (B,), that of the whole distribution, before anything is cut"""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.special.entr((logits / temperature).softmax(-1)).sum(-1)


def _truncated(p: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities outside the top k, outside the smallest set that then holds top_p of the mass, or below min_p of
    the highest become 0."""
    if sampling.top_k and sampling.top_k < p.shape[1]:
        p = p.where(p >= p.topk(sampling.top_k).values[:, -1:], 0.0)
    if sampling.top_p < 1.0:
        high, order = p.sort(descending=True)
        mass_before = high.cumsum(-1) - high
        high = high.where(mass_before < sampling.top_p * high.sum(-1, keepdim=True), 0.0)
        p = torch.zeros_like(p).scatter(1, order, high)
    if sampling.min_p > 0.0:
        p = p.where(p >= sampling.min_p * p.amax(-1, keepdim=True), 0.0)
    return p


def _select_rows(kwargs: dict, rows: Tensor) -> None:
    """The batch becomes these of its rows, in cache, mask and positions."""
    for name in ("past_key_values", "cache_params"):  # the latter: models of Mamba's kind
        if kwargs.get(name) is not None:
            kwargs[name].reorder_cache(rows)
    for name in ("attention_mask", "position_ids"):
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][rows]


def _completions(
    tokens: Tensor, logp: Tensor, entropies: Tensor, kept: list[KeptSets], sampling: Sampling
) -> list[Completion]:
    if not logp.isfinite().all():
        raise UserError("the model's logits are not finite: weights of NaN, or huge ones of too high a --learning_rate")
    tokens, logp, entropies = tokens.cpu(), logp.cpu(), entropies.cpu()
    ended = torch.isin(tokens, torch.tensor(sampling.eos_ids))
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, tokens.shape[1])
    return [
        Completion(
            ids=tokens[i, :n].tolist(),
            logp=logp[i, :n].tolist(),
            truncated=not bool(ended[i].any()),
            entropy=entropies[i, :n].tolist() if sampling.with_entropy else None,
            kept=kept[i] or None,
        )
        for i, n in enumerate(lengths.tolist())
    ]
