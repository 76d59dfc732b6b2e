"""The search for a token, in two levels: first for its block of 128 ids, then for its place in the block.

The plain computation, for probabilities p (B, V) and a number u (B, 1) for each row, is:

    cdf = p.cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, u * cdf[:, -1:], right=True)

On a GPU, this copies p to fp64, and reads and writes V numbers of fp64 for the cumulative sum. Here p is read once, for
the sums of its blocks. In fp64 both give the same tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128  # ids


def first_above(p: Tensor, u: Tensor) -> Tensor:
    """Return the first token (B, 1) whose cumulative share of p (B, V) exceeds u (B, 1)."""
    V = p.shape[1]
    padded = F.pad(p, (0, -V % BLOCK)) if V % BLOCK else p
    blocks = padded.unflatten(1, (-1, BLOCK))  # (B, V / 128, 128)
    mass = blocks.sum(-1, dtype=torch.float64)
    block, rest = _search(mass, u.double() * mass.sum(-1, keepdim=True))
    inside = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK)).squeeze(1).double()  # (B, 128)
    place, _ = _search(inside, rest)
    return (BLOCK * block + place).clamp(max=V - 1)


def _search(mass: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place (B, 1) at which the cumulative sum of mass (B, n) exceeds the target (B, 1), and by how
    much the target exceeds the sum before it."""
    cdf = mass.cumsum(-1)
    place, target = first_beyond(cdf, target)
    return place, target - F.pad(cdf, (1, 0)).gather(1, place)


def first_beyond(cdf: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first place (B, 1) at which cdf (B, n) exceeds the target (B, 1), and the target, which rounding may
    have made as large as the last value: it becomes the next number below."""
    total = cdf[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    # right=True makes sure that a target of 0 does not find a first place where cdf is 0. With NaN, no place is found.
    return torch.searchsorted(cdf, target, right=True).clamp(max=cdf.shape[1] - 1), target
