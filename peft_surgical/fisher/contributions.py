"""Some squared gradients of each sample, from which is estimated what it contributes to the norm of the diagonal.

To tell how sure a score is, samples are drawn anew many times (`uncertainty.py`), which needs the contribution of each
sample. The norm of F = mean_n d_n is a sum over samples: |F| = mean_n <F, d_n> / |F|, and to first order the norm of a
re-weighted mean is the re-weighted mean of these terms. But F is known only at the end, and the d_n are never kept. So
a hundred entries of each d_n are, drawn in proportion to the first batch's diagonal, which stand for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peft_surgical.fisher.gradients import SampleGradients
from peft_surgical.fisher.squares import SquareQueue, on_cpu, widen


ENTRIES = 128
"""Entries of a parameter that are kept of each sample."""

_WHOLE, WHOLE_VECTOR = 1024, 4096
"""Entries of a parameter up to which it is kept whole; those of a vector have to be written out anyway."""

_TOGETHER = 2**23
"""Entries of the parameters whose entries are chosen together on an accelerator: it takes many small operations."""


@dataclass(frozen=True)
class Entries:
    """Some entries of a parameter.

    Args:
        rows: The rows that they are in, (M,), where the parameter is seen as a matrix (a vector as one row).
        columns: Their columns, (M,).
        index: Their positions in the flattened parameter, (M,).
        weight: How many entries each stands for, (M,): `(weight * x[index]).sum()` estimates the sum of x.
    """

    rows: Tensor
    columns: Tensor
    index: Tensor
    weight: Tensor


def choose_entries(diagonals: Tensor, count: int, generator: torch.Generator) -> list[Entries]:
    """Choose entries from which a sum over all can be told, an entry about in proportion to its size.

    Laid end to end, each as long as it is large, the entries are picked at equal distances from a random start. So
    those that make up much of the sum are always there. A tenth of the length is shared out alike, so that nothing is
    left out.

    Args:
        diagonals: What is known of the size of the entries of P parameters, not negative, (P, O, I).
        count: How many entries of each, M. One may be there several times.
        generator: Draws the start, on the same device.

    Returns:
        The entries of each parameter. What is estimated from them is right on average over draws.

    Example:

        >>> diagonal = torch.rand(1, 40, 30) ** 8
        >>> (entries,) = choose_entries(diagonal, 200, torch.Generator().manual_seed(0))
        >>> estimate = (entries.weight * diagonal.flatten()[entries.index]).sum()
        >>> abs(estimate / diagonal.sum() - 1) < 0.1
        tensor(True)
    """
    number, height, width = diagonals.shape
    tiny = torch.finfo(diagonals.dtype).tiny
    length = (diagonals * (0.9 / diagonals.sum((1, 2), keepdim=True).clamp_min(tiny))).add_(0.1 / (height * width))
    # first the row, then the column in it
    by_row = length.sum(2)
    end_of_row = by_row.cumsum(1)
    total = end_of_row[:, -1:]
    start = torch.rand((number, 1), generator=generator, device=diagonals.device, dtype=diagonals.dtype)
    points = (torch.arange(count, device=diagonals.device) + start) * (total / count)
    rows = torch.searchsorted(end_of_row, points).clamp_max_(height - 1)
    points -= (end_of_row - by_row).gather(1, rows)
    in_row = length.gather(1, rows[:, :, None].expand(-1, -1, width)).cumsum(2)
    columns = torch.searchsorted(in_row, points[:, :, None])[:, :, 0].clamp_max_(width - 1)
    index = rows * width + columns
    weights = total / (length.flatten(1).gather(1, index) * count)
    return [Entries(*one) for one in zip(rows, columns, index, weights, strict=True)]


class Generators:
    """A random number generator for each device.

    Args:
        seed: Seed of all of them.
    """

    def __init__(self, seed: int):
        self.seed = seed
        self._made: dict[torch.device, torch.Generator] = {}

    def on(self, device: torch.device) -> torch.Generator:
        """That of a device."""
        if device not in self._made:
            self._made[device] = torch.Generator(device).manual_seed(self.seed)
        return self._made[device]


class KeptEntries:
    """What is kept of one parameter's gradients."""

    def __init__(self) -> None:
        self.entries: Entries | None = None
        self.chosen = False
        self.squares: dict[int, Tensor] = {}
        """By the number of the first sample, the squares of some samples, (n, M)."""

    def choose(self, entries: Entries | None) -> None:
        """Say which entries are kept; None keeps all."""
        self.entries, self.chosen = entries, True

    def add(self, first: int, gradients: SampleGradients) -> None:
        """Keep the squares of samples from number `first` on."""
        if self.entries is None:
            values = gradients.dense(0, gradients.samples).flatten(1)
        else:
            values = gradients.at(self.entries.rows, self.entries.columns)
        self.add_squares(first, widen(values).square())

    def add_squares(self, first: int, squares: Tensor) -> None:
        """Keep squares, (n, M), of samples from number `first` on. Those of the same samples add up."""
        self.squares[first] = self.squares[first] + squares if first in self.squares else squares


def estimate_products(
    kept: Sequence[KeptEntries], diagonals: Sequence[Tensor], scales: Sequence[float], samples: int
) -> Tensor:
    """Estimates of <F, d_n> for each parameter's F and the squared gradients d_n of each sample.

    Args:
        kept: What is kept of P parameters.
        diagonals: F of each.
        scales: Factors for each F, so that no product is too small.
        samples: How many samples there were, N.

    Returns:
        (P, N) float64, on the CPU.
    """
    if not kept:
        return torch.zeros(0, samples, dtype=torch.float64)
    pairs = zip(kept, diagonals, strict=True)
    flat = [d.flatten() if k.entries is None else d.flatten()[k.entries.index] for k, d in pairs]
    flat = list(torch._foreach_mul(flat, list(scales)))
    sampled = [(f, k.entries.weight) for f, k in zip(flat, kept, strict=True) if k.entries is not None]
    if sampled:
        torch._foreach_mul_(*zip(*sampled, strict=True))
    alike: dict[tuple, list[int]] = {}
    for p, k in enumerate(kept):
        for first, squares in k.squares.items():
            alike.setdefault((first, squares.shape, squares.device), []).append(p)
    out = torch.zeros(len(kept), samples, dtype=torch.float64)
    for (first, (number, _), _), group in alike.items():
        squares = torch.stack([kept[p].squares[first] for p in group])
        products = squares @ torch.stack([flat[p] for p in group])[:, :, None]
        out[group, first : first + number] = products[:, :, 0].cpu().double()
    return out


@dataclass(frozen=True)
class _Waiting:
    kept: KeptEntries
    first: int
    gradients: SampleGradients
    total: Tensor


class EntryKeeper:
    """Keeps entries for several parameters. Their first gradients wait until the entries can be chosen.

    Args:
        generators: Random numbers.
    """

    def __init__(self, generators: Generators):
        self.generators = generators
        self._waiting: list[_Waiting] = []
        self._entries = 0

    def keep(
        self, kept: KeptEntries, first: int, gradients: SampleGradients, total: Tensor, queue: SquareQueue
    ) -> None:
        """Keep some entries.

        Args:
            kept: Where to.
            first: The number of the first sample.
            gradients: The gradients; they must not change before `flush`.
            total: The sum of squares that the entries are chosen by.
            queue: What still has to be added to it.
        """
        if not kept.chosen and gradients.size <= _WHOLE:
            kept.choose(None)
        if kept.chosen:
            kept.add(first, gradients)
            return
        self._waiting.append(_Waiting(kept, first, gradients, total))
        self._entries += gradients.size
        if on_cpu(total) or self._entries >= _TOGETHER:
            queue.flush()
            self.flush()

    def flush(self) -> None:
        """Choose entries for what waits, from sums that are complete."""
        alike: dict[tuple, list[_Waiting]] = {}
        for waiting in self._waiting:
            alike.setdefault((waiting.total.device, waiting.total.dtype, waiting.total.shape), []).append(waiting)
        self._waiting.clear()
        self._entries = 0
        for (device, *_), group in alike.items():
            first_of = list({id(w.kept): w for w in group if not w.kept.chosen}.values())
            diagonals = torch.stack([_as_matrix(w.total) for w in first_of])
            found: Sequence[Entries] = choose_entries(diagonals, ENTRIES, self.generators.on(device))
            for waiting, entries in zip(first_of, found, strict=True):
                waiting.kept.choose(entries)
            for waiting in group:
                waiting.kept.add(waiting.first, waiting.gradients)


def _as_matrix(diagonal: Tensor) -> Tensor:
    return diagonal if diagonal.dim() == 2 else diagonal[None]
