"""Sums over samples of a parameter's squared gradients, and what each sample contributes to the result.

`DiagonalSum` keeps the diagonal of the Fisher matrix, entry by entry, for its norm. What a sample contributes to the
norm is estimated from some entries (`entries.py`). `NormSum` keeps only the trace, for which the squared norm
of each sample's gradient is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from peft_surgical.fisher.entries import WHOLE_VECTOR, EntryKeeper, KeptEntries, estimate_products
from peft_surgical.fisher.kernel import sum_type
from peft_surgical.fisher.pending_squares import PendingSquares
from peft_surgical.fisher.sample_gradients import DenseGradients, SampleGradients
from peft_surgical.processes import add_up, gather


@dataclass(frozen=True)
class TensorFisher:
    """The diagonal Fisher of one parameter.

    Args:
        size: Number of its entries.
        norm: Frobenius norm of the diagonal. NaN if only the trace was asked for.
        trace: Sum of the diagonal.
        shares: What each sample contributes, (N,) float64: to the norm, or to the trace if only that was asked for.
            The sum over samples, divided by the number of samples (or tokens), is the norm (or the trace).
    """

    size: int
    norm: float
    trace: float
    shares: Tensor


class Zeros:
    """Gives out zeros. Small tensors are parts of a few larger ones, for to fill each takes a launch."""

    def __init__(self) -> None:
        self._left: dict[tuple[torch.device, torch.dtype], tuple[Tensor, int]] = {}

    def take(self, gradients: SampleGradients) -> Tensor:
        """Zeros that squares of such gradients can be added to."""
        shape, dtype = gradients.sum_shape, sum_type(gradients.example.dtype)
        size, device = gradients.size, gradients.device
        if size >= _TOGETHER // 8:
            return torch.zeros(shape, dtype=dtype, device=device)
        whole, used = self._left.get((device, dtype), (None, 0))
        if whole is None or used + size > _TOGETHER:
            whole, used = torch.zeros(_TOGETHER, dtype=dtype, device=device), 0
        self._left[device, dtype] = whole, used + -(-size // 64) * 64
        return whole[used : used + size].view(shape)


_TOGETHER = 2**18
"""Entries of a tensor that small sums are taken from."""


class DiagonalSum:
    """Sum over samples of the squared gradients of one parameter, entry by entry.

    Args:
        keeper: Keeps some entries of each sample's; None keeps none.
        zeros: Where the sum is taken from.
    """

    def __init__(self, keeper: EntryKeeper | None = None, zeros: Zeros | None = None):
        self.keeper, self._zeros = keeper, zeros or Zeros()
        self.sum: Tensor | None = None
        self.kept = KeptEntries()
        self.seen = self._first = 0

    def start(self, samples: int) -> None:
        """Get ready for a batch."""
        self._first, self.seen = self.seen, self.seen + samples

    def add(self, gradients: SampleGradients, first: int, pending: PendingSquares) -> None:
        """Add the squared gradients of the samples of this batch from number `first` on."""
        if self.sum is None:
            self.sum = self._zeros.take(gradients)
        first += self._first
        if self.keeper is None:
            gradients.add_squares(self.sum, pending)
        elif isinstance(gradients, DenseGradients) and self.sum.dim() == 1 and gradients.size <= WHOLE_VECTOR:
            self.kept.choose(None)
            pending.add_gradients(self.sum, gradients.gradients, partial(self.kept.add_squares, first))
        else:
            gradients.add_squares(self.sum, pending)
            self.keeper.keep(self.kept, first, gradients, self.sum, pending)

    def total(self, parameter: nn.Parameter) -> Tensor | None:
        """The sum over processes; None if none has got a gradient. It is written to the sum of this process."""
        mine = None if self.sum is None else (tuple(self.sum.shape), self.sum.dtype)
        known = next((other for other in gather(mine) if other is not None), None)
        if known is None:
            return None
        if self.sum is None:
            shape, dtype = known
            device = torch.device("cpu") if parameter.is_meta else parameter.device
            self.sum = torch.zeros(shape, dtype=dtype, device=device)
        return add_up(self.sum)


def reduce_diagonals(pairs: Sequence[tuple[nn.Parameter, DiagonalSum]], count: float) -> list[TensorFisher]:
    """The means over the samples of all processes.

    Args:
        pairs: Parameters and their sums.
        count: What the sums are divided by.
    """
    totals = [s.total(p) for p, s in pairs]
    norms, traces = _norms(totals, 2), _norms(totals, 1)  # nothing is negative
    shares = torch.cat(gather(_shares([s for _, s in pairs], totals, norms.tolist())), 1)
    # the exact norms are known, so that an error in the level of the estimates need not stay
    level = shares.sum(1)
    shares *= torch.where(level > 0, norms / level, 1.0)[:, None]
    sizes = [(p if total is None else total).numel() for (p, _), total in zip(pairs, totals, strict=True)]
    numbers = zip(sizes, (norms / count).tolist(), (traces / count).tolist(), shares, strict=True)
    return [TensorFisher(*row) for row in numbers]


def _shares(sums: Sequence[DiagonalSum], totals: Sequence[Tensor | None], norms: Sequence[float]) -> Tensor:
    """What each sample of this process contributes to each total, up to a factor for each, (P, N) float64."""
    if sums[0].keeper is None:
        return torch.zeros(len(sums), 0, dtype=torch.float64)
    some = [(s, t, 1 / norm if norm else 0.0) for s, t, norm in zip(sums, totals, norms, strict=True) if t is not None]
    samples = sums[0].seen
    out = torch.zeros(len(sums), samples, dtype=torch.float64)
    out[[t is not None for t in totals]] = estimate_products(
        [s.kept for s, _, _ in some], [t for _, t, _ in some], [scale for _, _, scale in some], samples
    )
    return out


def _norms(tensors: Sequence[Tensor | None], order: int) -> Tensor:
    """The norm of each tensor, float64 on the CPU; 0 for None."""
    out, some = torch.zeros(len(tensors), dtype=torch.float64), [t for t in tensors if t is not None]
    if some:
        found = torch._foreach_norm(some, order, dtype=torch.float64)
        out[[t is not None for t in tensors]] = _together(found)
    return out


def _together(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape, stacked, float64 on the CPU: one copy instead of many."""
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([t.to(device) for t in tensors]).cpu().double() if tensors else torch.zeros(0)


class NormSum:
    """The squared norm of each sample's gradient of one parameter."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []
        self._size: int | None = None

    def start(self, samples: int) -> None:
        """Get ready for a batch."""
        self._norms.append(torch.zeros(samples, dtype=torch.float64))

    def add(self, gradients: SampleGradients, first: int, pending: PendingSquares) -> None:
        """Add the squared norms of the samples of this batch from number `first` on."""
        self._size = gradients.size
        norms = self._norms[-1] = self._norms[-1].to(gradients.device)
        norms[first : first + gradients.samples] += gradients.squared_norms().double()

    def result(self, parameter: nn.Parameter, count: float) -> TensorFisher:
        """The mean over the samples of all processes.

        Args:
            parameter: The parameter.
            count: What the sum is divided by.
        """
        mine = torch.cat([n.cpu() for n in self._norms]) if self._norms else torch.zeros(0, dtype=torch.float64)
        parts = gather((mine, self._size))
        shares = torch.cat([norms for norms, _ in parts])
        size = next((size for _, size in parts if size is not None), parameter.numel())
        return TensorFisher(size, float("nan"), float(shares.sum()) / count, shares)
