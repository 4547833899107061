"""Some squared gradients of each sample, from which is estimated what it contributes to the norm of the diagonal.

To tell how sure a score is, samples are drawn anew many times (`uncertainty.py`), which needs the contribution of each
sample. The norm of F = mean_n d_n is a sum over samples: |F| = mean_n <F, d_n> / |F|, and to first order the norm of a
re-weighted mean is the re-weighted mean of these terms. But F is known only at the end, and the d_n are never kept. So
a few hundred entries of each d_n are: those where the first batch's diagonal is largest, which often make up most of
<F, d_n>, and some of the others, drawn in proportion to its square, which stand for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peft_surgical.fisher.kernel import PendingSquares
from peft_surgical.fisher.sample_gradients import SampleGradients


ENTRIES = 128
"""Entries of a parameter that are kept of each sample, half of them the largest."""

_WHOLE = 1024
"""Entries of a parameter up to which it is kept whole."""

_TOGETHER = 2**22
"""Entries of the parameters whose entries are chosen together on an accelerator: it takes many small operations."""


@dataclass(frozen=True)
class Entries:
    """Some entries of a parameter.

    Args:
        index: Their positions in the flattened parameter, (M,).
        weight: How many entries each stands for, (M,): `(weight * x[index]).sum()` estimates the sum of x.
    """

    index: Tensor
    weight: Tensor


def choose_entries(diagonals: Tensor, count: int, generator: torch.Generator) -> list[Entries]:
    """Choose entries from which a sum over all can be told: the largest, and some drawn from the rest.

    Args:
        diagonals: What is known of the size of the entries of P parameters, not negative, (P, O, I).
        count: How many entries of each, at most O * I; half of them are the largest.
        generator: Draws the others, on the same device.

    Returns:
        The entries of each parameter. What is estimated from them is right on average over draws.

    Example:

        >>> diagonal = torch.rand(1, 40, 30) ** 8
        >>> (entries,) = choose_entries(diagonal, 200, torch.Generator().manual_seed(0))
        >>> estimate = (entries.weight * diagonal.flatten()[entries.index] ** 2).sum()
        >>> abs(estimate / (diagonal**2).sum() - 1) < 0.1
        tensor(True)
    """
    number, height, width = diagonals.shape
    largest = _largest(diagonals, count // 2)
    free = torch.ones(number, height * width, dtype=torch.bool, device=diagonals.device).scatter_(1, largest, False)
    scale = diagonals.amax((1, 2), keepdim=True).clamp_min(torch.finfo(diagonals.dtype).tiny)
    squares = (diagonals / scale).nan_to_num().square_().mul_(free.view_as(diagonals))
    # first a row, then a column in it; a tenth is drawn alike from all, so that nothing is left out
    by_row = _mixed(squares.sum(2))
    row, row_chance = _draw(by_row, count - largest.shape[1], generator)
    by_column = _mixed(squares.gather(1, row[:, :, None].expand(-1, -1, width)))
    column, column_chance = (x[..., 0] for x in _draw(by_column, 1, generator))
    index = row * width + column
    weight = free.gather(1, index) / (row.shape[1] * row_chance * column_chance)
    indices = torch.cat([largest, index], 1)
    weights = torch.cat([torch.ones_like(largest, dtype=weight.dtype), weight], 1)
    return [Entries(i, w) for i, w in zip(indices, weights, strict=True)]


def _largest(diagonals: Tensor, count: int) -> Tensor:
    """The positions of the largest entries, (P, count), which lie in the rows with the largest maxima."""
    width = diagonals.shape[2]
    rows = diagonals.amax(2).topk(min(count, diagonals.shape[1]), 1).indices
    top = diagonals.gather(1, rows[:, :, None].expand(-1, -1, width)).flatten(1).topk(count, 1).indices
    return rows.gather(1, top // width) * width + top % width


def _mixed(x: Tensor) -> Tensor:
    """Probabilities in the last dimension: nine tenths in proportion to x, one tenth alike."""
    total, alike = x.sum(-1, keepdim=True), 1 / x.shape[-1]
    share = torch.where(total > 0, x / total.clamp_min(torch.finfo(x.dtype).tiny), alike)
    return 0.9 * share + 0.1 * alike


def _draw(chances: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions in the last dimension, (..., count), and how likely each was."""
    summed = chances.cumsum(-1)
    shape = (*chances.shape[:-1], count)
    uniform = torch.rand(shape, generator=generator, device=chances.device, dtype=chances.dtype)
    place = torch.searchsorted(summed, uniform * summed[..., -1:]).clamp_max(chances.shape[-1] - 1)
    return place, chances.gather(-1, place)


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
        self._squares: dict[int, Tensor] = {}

    def choose(self, entries: Entries | None) -> None:
        """Say which entries are kept; None keeps all."""
        self.entries, self.chosen = entries, True

    def add(self, first: int, gradients: SampleGradients) -> None:
        """Keep the squares of samples from number `first` on. Those of the same samples add up."""
        if self.entries is None:
            values = gradients.dense(0, gradients.samples).flatten(1)
        else:
            values = gradients.at(self.entries.index)
        squares = values.to(torch.promote_types(values.dtype, torch.float32)).square()
        self._squares[first] = self._squares[first] + squares if first in self._squares else squares

    def weighted(self, diagonal: Tensor) -> Tensor:
        """The entries of a flat diagonal that are kept, each times the number that it stands for, (M,)."""
        return diagonal if self.entries is None else diagonal[self.entries.index] * self.entries.weight

    def products(self, weighted: Tensor | None, samples: int) -> Tensor:
        """Estimates of <F, d_n> for each sample.

        Args:
            weighted: What `weighted` made of F. None if there was no gradient.
            samples: How many samples there were, N.

        Returns:
            (N,), on the device of F.
        """
        if weighted is None:
            return torch.zeros(samples)
        parts = {first: torch.mv(squares, weighted) for first, squares in self._squares.items()}
        if len(parts) == 1 and len(parts[min(parts)]) == samples:
            return parts[min(parts)]
        out = weighted.new_zeros(samples)
        for first, part in parts.items():
            out[first : first + len(part)] = part
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

    def keep(
        self, kept: KeptEntries, first: int, gradients: SampleGradients, total: Tensor, pending: PendingSquares
    ) -> None:
        """Keep some entries.

        Args:
            kept: Where to.
            first: The number of the first sample.
            gradients: The gradients; they must not change before `flush`.
            total: The sum of squares that the entries are chosen by.
            pending: What still has to be added to it.
        """
        if not kept.chosen and gradients.size <= _WHOLE:
            kept.choose(None)
        if kept.chosen:
            kept.add(first, gradients)
            return
        self._waiting.append(_Waiting(kept, first, gradients, total))
        if total.device.type == "cpu" or sum(waiting.gradients.size for waiting in self._waiting) >= _TOGETHER:
            pending.flush()
            self.flush()

    def flush(self) -> None:
        """Choose entries for what waits, from sums that are complete."""
        alike: dict[tuple, list[_Waiting]] = {}
        for waiting in self._waiting:
            alike.setdefault((waiting.total.device, waiting.total.dtype, waiting.total.shape), []).append(waiting)
        self._waiting.clear()
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
