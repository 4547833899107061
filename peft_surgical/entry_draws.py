"""Draw some entries of the gradients of many samples, so that the large ones are likely among them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peft_surgical.fisher_kernel import multiply


@dataclass(frozen=True)
class Entries:
    """Some entries of a parameter, drawn with replacement.

    Args:
        index: Their positions in the flattened parameter, (M,).
        weight: One over the expected number of times each is drawn, (M,): `(weight * x[index]).sum()` estimates the
            sum of x without bias.
    """

    index: Tensor
    weight: Tensor


def draw_blocks(
    products: Sequence[tuple[Tensor, Tensor]], count: int, generator: torch.Generator
) -> list[tuple[Entries, Tensor]]:
    """Draw rows and columns of some products, large gradients more often than small ones.

    Args:
        products: The factors of each, (N, T, O) and (N, T, I), of one type and device: sample n has the gradient
            `left[n].T @ right[n]`.
        count: About how many entries of each.
        generator: Random numbers, on that device.

    Returns:
        For each product the M entries where the rows drawn cross the columns drawn, and their squares, (N, M).
    """
    side = max(1, int(count**0.5))
    factors = [factor for product in products for factor in product]
    place, weight = draw_positions(column_norms(factors), [factor.shape[2] for factor in factors], side, generator)
    widths = _column([right.shape[2] for _, right in products], place.device)
    index = (place[0::2] * widths)[:, :, None] + place[1::2, None]
    weights = weight[0::2, :, None] * weight[1::2, None]
    blocks = [
        multiply(left.index_select(2, rows).transpose(1, 2), right.index_select(2, columns), weight.dtype)
        for (left, right), rows, columns in zip(products, place[0::2], place[1::2], strict=True)
    ]
    squares = torch.stack(blocks).square_().flatten(2)
    return [(Entries(i, w), s) for i, w, s in zip(index.flatten(1), weights.flatten(1), squares, strict=True)]


def column_norms(factors: Sequence[Tensor]) -> Tensor:
    """Norms of the columns of factors (N, T, W), padded with zeros to the widest. A part of the samples will do."""
    first, step = factors[0], max(1, len(factors[0]) // 32)
    dtype = torch.promote_types(first.dtype, torch.float32)
    norms = first.new_zeros(len(factors), max(factor.shape[2] for factor in factors), dtype=dtype)
    for row, factor in zip(norms, factors, strict=True):
        torch.linalg.vector_norm(factor[::step], dim=(0, 1), dtype=dtype, out=row[: factor.shape[2]])
    return norms


def draw_positions(
    norms: Tensor, widths: Sequence[int], count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw positions in proportion to the fourth power of the norms, mixed with a tenth of uniform.

    Args:
        norms: (R, W). Row r has `widths[r]` of them.
        count: How many positions to draw in each row, M.

    Returns:
        Positions, (R, M), and one over the expected number of times each is drawn, (R, M).
    """
    width = _column(widths, norms.device)
    share = (norms / norms.amax(1, keepdim=True)).nan_to_num().square().square()
    share = share * (0.9 / share.sum(1, keepdim=True).clamp_min(1e-30))
    share = torch.where(torch.arange(norms.shape[1], device=norms.device) < width, share + 0.1 / width, 0)
    summed = share.cumsum(1)
    uniform = torch.rand(len(norms), count, generator=generator, device=norms.device, dtype=norms.dtype)
    place = torch.searchsorted(summed, uniform * summed[:, -1:]).minimum(width - 1)
    return place, summed[:, -1:] / (count * share.gather(1, place))


@functools.lru_cache(maxsize=64)
def _cached_column(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)[:, None]


def _column(numbers: Sequence[int], device: torch.device) -> Tensor:
    return _cached_column(tuple(numbers), device)
