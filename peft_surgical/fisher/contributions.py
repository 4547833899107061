"""Some squared gradients of each sample, from which is estimated what it contributes to the norm of the diagonal.

To tell how sure a score is, samples are drawn anew many times (`ranking.py`), which needs the contribution of each
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
    """M entries of a parameter, which is seen as a matrix (a vector as one row)."""

    rows: Tensor  # (M,)
    columns: Tensor  # (M,)
    index: Tensor  # their positions in the flattened parameter, (M,)
    weight: Tensor  # how many each stands for, (M,): `(weight * x[index]).sum()` estimates the sum of x


def choose_entries(diagonals: Tensor, count: int, generator: torch.Generator) -> list[Entries]:
    """Choose entries of P parameters, (P, O, I), from which a sum over all can be told, in proportion to their size.

    Laid end to end, each as long as it is large, the entries are picked at equal distances from a random start. So
    those that make up much of the sum are always there, some several times. A tenth of the length is shared out alike,
    so that nothing is left out. What is estimated from them is right on average over draws.
    """
    number, height, width = diagonals.shape
    tiny = torch.finfo(diagonals.dtype).tiny
    length = (diagonals * (0.9 / diagonals.sum((1, 2), keepdim=True).clamp_min(tiny))).add_(0.1 / (height * width))
    # first the row, then the column in it
    by_row = length.sum(2)
    end_of_row = by_row.cumsum(1)
    total = end_of_row[:, -1:]
    start = torch.rand((number, 1), generator=generator, dtype=diagonals.dtype).to(diagonals.device, non_blocking=True)
    points = (torch.arange(count, device=diagonals.device) + start) * (total / count)
    rows = torch.searchsorted(end_of_row, points).clamp_max_(height - 1)
    points -= (end_of_row - by_row).gather(1, rows)
    in_row = length.gather(1, rows[:, :, None].expand(-1, -1, width)).cumsum(2)
    columns = torch.searchsorted(in_row, points[:, :, None])[:, :, 0].clamp_max_(width - 1)
    index = rows * width + columns
    weights = total / (length.flatten(1).gather(1, index) * count)
    return [Entries(*one) for one in zip(rows, columns, index, weights, strict=True)]


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
    """Estimates of <F, d_n> for each of P parameters' F and the squared gradients d_n of each sample, (P, N) float64
    on the CPU. The factors `scales` of the F keep the products from being too small."""
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
    """Keeps entries for several parameters. Their first gradients wait until the entries can be chosen."""

    def __init__(self, generator: torch.Generator):
        self.generator = generator
        self._waiting: list[_Waiting] = []
        self._entries = 0

    def keep(
        self, kept: KeptEntries, first: int, gradients: SampleGradients, total: Tensor, queue: SquareQueue
    ) -> None:
        """Keep some entries of gradients that must not change before `flush`, of samples from number `first` on. They
        are chosen by `total`, the sum of squares, to which what is in the queue has still to be added."""
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
        for group in alike.values():
            first_of = list({id(w.kept): w for w in group if not w.kept.chosen}.values())
            diagonals = torch.stack([w.total.view(-1, w.total.shape[-1]) for w in first_of])  # a vector is one row
            found = choose_entries(diagonals, ENTRIES, self.generator)
            for waiting, entries in zip(first_of, found, strict=True):
                waiting.kept.choose(entries)
            for waiting in group:
                waiting.kept.add(waiting.first, waiting.gradients)
