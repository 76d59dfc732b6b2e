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
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, takewhile
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


class Facts(NamedTuple):
    """The facts about a completion that decide which row it goes into."""

    has_gradient: bool
    prompt: int  # the number of its prompt
    prompt_length: int
    length: int  # of the completion, without the prompt


class SharedRow(NamedTuple):
    has_gradient: bool
    length: int  # tokens that the model reads
    members: list[int]  # the completions in this row, by their index in the batch


def shared_rows(
    facts: Sequence[Facts], members: Iterable[int], hidden_size: int | None, allow: Callable[[int, int], bool]
) -> list[SharedRow]:
    """Divide these completions among rows. `allow(completions, tokens)` says whether a row of that size is allowed.
    Rows with a gradient come first, sorted by length, the longest first.

    The number k of completions in a row minimises the multiplications. With completions of c tokens after a prompt of p
    tokens, the model reads p/k + c tokens for each completion. With hidden size h, each of these tokens costs 12 h^2
    multiplications per layer, plus 2 h for each of the p + k c tokens in its row. So the cost of a completion is
    (p/k + c) (12 h^2 + 2 h (p + k c)), which is lowest at k = sqrt(p (p + 6 h)) / c.
    """
    rows = []
    order = sorted(members, key=lambda i: (facts[i].has_gradient, facts[i].prompt, -facts[i].length))
    for (has_gradient, _, p), same_prompt in groupby(order, key=lambda i: facts[i][:3]):  # the first 3 fields of Facts
        same_prompt = list(same_prompt)
        lengths = [facts[i].length for i in same_prompt]
        k = 1.0
        if hidden_size is not None:
            k = math.sqrt(p * (p + 6 * hidden_size)) * len(lengths) / max(1, sum(lengths))
        fewest_rows = math.ceil(len(same_prompt) / max(1, int(k)))
        # Try n = fewest_rows and larger n until every row is allowed. If no n is, n ends at one row for each
        # completion, and these rows are used although they are not allowed. The completions, the longest first, are
        # dealt to the n rows in turn, so that the rows have about the same length.
        for n in range(fewest_rows, len(same_prompt) + 1):
            candidates = [SharedRow(has_gradient, p + sum(lengths[i::n]), same_prompt[i::n]) for i in range(n)]
            if all(allow(len(row.members), row.length) for row in candidates):
                break
        rows += candidates
    return sorted(rows, reverse=True)  # by the fields of SharedRow, in their order


def model_inputs(ids: Tensor, lengths: Tensor, together: Sequence[int] | None) -> tuple[dict[str, Tensor], Tensor]:
    """Build the inputs of the model. ids (B, T) has a row for each completion with its prompt, left-aligned, and
    `lengths` (B,) are the lengths of these rows without padding.

    `together` lists how many consecutive completions share each row of the model. If it is None, each completion has
    its own row. Return two things: the keyword arguments of the model, for R rows of L tokens, and a tensor (B, T) with
    the index of every token of `ids` among those R * L tokens.
    """
    B, T = ids.shape
    if together is None or max(together) == 1:
        return {"input_ids": ids}, torch.arange(B * T, device=ids.device).view(B, T)
    completions = iter([row[:n] for row, n in zip(ids.tolist(), lengths.tolist())])
    tokens, positions, segments = [], [], []  # one list for each row of the model
    all_places = []  # one list for each completion: the place of each of its tokens in the shared row
    for count in together:
        members = [next(completions) for _ in range(count)]
        # The prompt, and the first tokens of these completions, as long as they are the same in all of them. The zip
        # gives the first token of every member, then the second of every member, and so on.
        shared = [same[0] for same in takewhile(lambda x: len(set(x)) == 1, zip(*members))]
        row, position, segment = [*shared], [*range(len(shared))], [0] * len(shared)  # segment 0 is shared
        for number, member in enumerate(members, start=1):
            own = member[len(shared) :]
            places = [*range(len(shared)), *range(len(row), len(row) + len(own))]
            all_places.append(places + [0] * (T - len(places)))
            row += own
            position += range(len(shared), len(member))
            segment += [number] * len(own)
        tokens.append(row)
        positions.append(position)
        segments.append(segment)

    def padded(rows: list[list[int]]) -> Tensor:
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(ids.device)

    input_ids, segment = padded(tokens), padded(segments)
    # sees[r, i, j]: token j of row r is shared, or in the same completion as token i. `tril` below then hides all
    # tokens after i, and so the padding too, which comes last.
    sees = (segment[:, None] == 0) | (segment[:, None] == segment[..., None])  # (R, L, L)
    # For each completion (B,), the index among the R * L tokens at which its row starts.
    row_start = input_ids.shape[1] * torch.arange(len(together)).repeat_interleave(torch.tensor(together))
    inputs = {"input_ids": input_ids, "position_ids": padded(positions), "attention_mask": sees.tril()[:, None]}
    return inputs, (torch.tensor(all_places) + row_start[:, None]).to(ids.device)
