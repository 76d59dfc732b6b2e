"""Several completions of one prompt in one row of the model, so that the model reads the prompt once, not G times.

In the plain computation, every row is one completion with its prompt:

    model(input_ids=ids)             # ids (B, T), padded on the right

A shared row has the prompt once, and then the completions one after another. An attention mask hides the completions
from one another, and the position ids of each completion continue from the end of the prompt. So every token gets the
same logits as in a separate row.

`shared_rows` decides which completions share a row, and `model_inputs` builds the rows. Some models cannot read shared
rows. For them, the caller passes hidden_size=None to `shared_rows`, which then puts each completion into its own row.
"""

import math
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor


class Sample(NamedTuple):
    """What decides which row a completion goes into."""

    index: int  # of the completion in its batch
    has_gradient: bool
    prompt: int  # the number of its prompt
    prompt_length: int
    length: int  # of the completion, without the prompt


Row = list[Sample]  # completions of one prompt that share a row of the model's input


def shared_rows(
    samples: Iterable[Sample], hidden_size: int | None, least_prompt: float, allow: Callable[[int, int], bool]
) -> list[Row]:
    """Divide these completions among rows. `allow(completions, tokens)` says whether a row of that size is allowed.
    Rows with a gradient come first, and within each kind the longest first."""
    by_prompt = sorted(samples, key=lambda sample: (sample.has_gradient, sample.prompt, -sample.length))
    rows: list[Row] = []
    for _, same_prompt in groupby(by_prompt, key=lambda sample: (sample.has_gradient, sample.prompt)):
        completions = list(same_prompt)
        rows += _rows_of_prompt(completions, _best_number(completions, hidden_size, least_prompt), allow)
    return sorted(rows, key=lambda row: (row[0].has_gradient, row_length(row)), reverse=True)


def row_length(row: Row) -> int:
    """Return how many tokens the model reads: the prompt once, and then every completion."""
    return row[0].prompt_length + sum(sample.length for sample in row)


def _rows_of_prompt(samples: list[Sample], together: int, allow: Callable[[int, int], bool]) -> list[Row]:
    """Divide completions of one prompt, the longest first, among rows with so many of them, or with fewer until every
    row is allowed. A single completion gets its row even if that is not allowed."""
    for n in range(math.ceil(len(samples) / together), len(samples) + 1):
        # The completions are dealt to the n rows in turn, so that the rows have about the same length.
        rows = [samples[i::n] for i in range(n)]
        if n == len(samples) or all(allow(len(row), row_length(row)) for row in rows):
            return rows


def _best_number(samples: list[Sample], hidden_size: int | None, least_prompt: float) -> int:
    """Return how many of these completions should share a row: one if their prompt is shorter than `least_prompt` times
    their mean length. On a GPU, a shared row needs a mask, and so a slower kernel than a row of its own.

    That number k minimises the multiplications. With completions of c tokens after a prompt of p tokens, the model
    reads p/k + c tokens for each completion. With hidden size h, each of these tokens costs 12 h^2 multiplications per
    layer, plus 2 h for each of the p + k c tokens in its row. So the cost of a completion is
    (p/k + c) (12 h^2 + 2 h (p + k c)), which is lowest at k = sqrt(p (p + 6 h)) / c.
    """
    p, c = samples[0].prompt_length, sum(sample.length for sample in samples) / len(samples)
    if hidden_size is None or p < least_prompt * c:
        return 1
    return max(1, int(math.sqrt(p * (p + 6 * hidden_size)) / c))


def model_inputs(
    ids: Tensor, lengths: Tensor, per_row: list[int] | None, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """Build the inputs of the model. ids (B, T) has a row for each completion with its prompt, padded on the right, and
    `lengths` (B,) are the lengths of these rows without padding.

    per_row[r] is how many consecutive completions are in row r of the model. If it is None, each completion has its own
    row. Return two things: the keyword arguments of the model, for R rows of L tokens, and a tensor (B, T) with the
    place of every token of `ids` among those R * L tokens. dtype is that of the computation.
    """
    B, T = ids.shape
    if per_row is None or max(per_row) == 1:
        return {"input_ids": ids}, torch.arange(B * T, device=ids.device).view(B, T)
    row = torch.arange(len(per_row)).repeat_interleave(torch.tensor(per_row)).to(ids.device)  # (B,), of each completion
    number = torch.tensor([i for count in per_row for i in range(count)], device=ids.device)  # (B,), in its row
    first = torch.arange(B, device=ids.device) - number  # (B,), the first completion in the same row

    # The completions of a row share their prompt, and their first tokens for as long as these are the same in all.
    # The first completion is compared with itself as well, so its own length is a limit, too.
    t = torch.arange(T, device=ids.device)
    is_same = (ids == ids[first]) & (t < lengths[:, None])
    same = is_same.long().cumprod(1).sum(1)  # (B,), how many tokens are those of the row's first completion
    shared = same.scatter_reduce(0, first, same, "amin")[first]  # (B,), how many tokens all have in common

    # Behind the shared tokens, each completion has its unshared ones, one completion after another.
    unshared = lengths - shared
    before = unshared.cumsum(0) - unshared  # (B,), unshared tokens of all earlier completions
    start = shared + before - before[first]  # (B,), where the unshared tokens start in the row
    is_shared = t < shared[:, None]  # (B, T)
    place_in_row = torch.where(is_shared, t, start[:, None] + t - shared[:, None])
    L = int((start + unshared).max())
    L += -L % 8 if ids.is_cuda else 0  # for other widths, attention would copy the mask in every layer
    R = len(per_row)
    places = row[:, None] * L + place_in_row
    places = torch.where(t < lengths[:, None], places, R * L)  # padding goes to one place behind the last row

    def in_rows(values: Tensor) -> Tensor:
        """Put values (B, T) to their places in the rows. A shared token gets the same value from each completion."""
        return values.new_zeros(R * L + 1).scatter(0, places.flatten(), values.flatten())[:-1].view(R, L)

    segment = in_rows(torch.where(is_shared, 0, 1 + number[:, None]))  # (R, L), 0 for shared tokens
    # sees[r, i, j]: token j of row r is shared, or in the same completion as token i. `tril` below then hides all
    # tokens after i, and so the padding too, which comes last.
    sees = (segment[:, None] == 0) | (segment[:, None] == segment[..., None])  # (R, L, L)
    # As numbers, in the dtype of the computation. From truth values, every layer would make such a mask of its own.
    mask = torch.zeros(R, 1, L, L, dtype=dtype, device=ids.device).masked_fill_(~sees.tril()[:, None], -torch.inf)
    inputs = {"input_ids": in_rows(ids), "position_ids": in_rows(t.expand(B, T)), "attention_mask": mask}
    return inputs, places.clamp(max=R * L - 1)
