"""Sums over samples of a parameter's squared gradients, and what each sample contributes to the result.

`DiagonalSum` keeps the diagonal of the Fisher matrix, entry by entry, for its norm. `NormSum` keeps only its trace,
for which the squared norm of each sample's gradient is enough.

To tell how sure a score is, samples are drawn anew many times (`uncertainty.py`), which needs the contribution of each
sample. The trace is a sum over samples. The norm of F = mean_n d_n is one too: |F| = mean_n <F, d_n> / |F|, and to
first order the norm of a re-weighted mean is the re-weighted mean of these terms. But F is known only at the end, and
the d_n are never kept. So about a thousand entries of each d_n are, drawn so that the large ones are likely among
them, and <F, d_n> is estimated from those.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from peft_surgical.fisher_kernel import PendingSquares
from peft_surgical.sample_gradients import Entries, SampleGradients


ENTRIES = 1024
"""Entries of a parameter that are kept of each sample. Parameters that have no more are kept whole."""


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


class DiagonalSum:
    """Sum over samples of the squared gradients of one parameter, entry by entry.

    Args:
        generator: Draws the entries that are kept of each sample; None keeps none.
    """

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator
        self.sum: Tensor | None = None
        self._kept: list[tuple[Entries, Tensor]] = []
        self._open = False

    def start(self, samples: int) -> None:
        """Get ready for a batch."""
        self.samples, self._open = samples, False

    def add(self, gradients: SampleGradients, first: int, pending: PendingSquares) -> None:
        """Add the squared gradients of the samples of this batch from number `first` on."""
        if self.sum is None:
            self.sum = gradients.zeros()
        gradients.add_squares(self.sum, pending)
        if self.generator is not None:
            self._keep(gradients, first)

    def _keep(self, gradients: SampleGradients, first: int) -> None:
        assert self.generator is not None
        if not self._open:
            entries = gradients.draw(ENTRIES, self.generator)
            dtype = torch.promote_types(gradients.example.dtype, torch.float32)
            empty = torch.zeros(self.samples, len(entries.index), dtype=dtype, device=gradients.device)
            self._kept.append((entries, empty))
            self._open = True
        entries, squares = self._kept[-1]
        squares[first : first + gradients.samples] += gradients.at(entries).square()

    def result(self, size: int, count: float, samples: int) -> TensorFisher:
        """The mean.

        Args:
            size: Entries of the parameter, if it never got a gradient.
            count: What to divide by.
            samples: Samples in all batches.
        """
        if self.sum is None:
            return TensorFisher(size, 0.0, 0.0, torch.zeros(samples, dtype=torch.float64))
        diagonal = self.sum.flatten() / count
        norm = float(torch.linalg.vector_norm(diagonal, dtype=torch.float64))
        trace = float(diagonal.sum(dtype=torch.float64))
        return TensorFisher(diagonal.numel(), norm, trace, self._shares(diagonal, norm, count))

    def _shares(self, diagonal: Tensor, norm: float, count: float) -> Tensor:
        products = [
            squares.double() @ (entries.weight * diagonal[entries.index].double()) for entries, squares in self._kept
        ]
        if not products:
            return torch.zeros(0, dtype=torch.float64)
        shares = torch.cat([p.cpu() for p in products])
        total = float(shares.sum())
        return shares * (norm * count / total) if total > 0 else torch.zeros_like(shares)


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
        self._size = prod(gradients.shape)
        norms = self._norms[-1] = self._norms[-1].to(gradients.device)
        norms[first : first + gradients.samples] += gradients.squared_norms().double()

    def result(self, size: int, count: float, samples: int) -> TensorFisher:
        """The mean; arguments as for `DiagonalSum.result`."""
        shares = torch.cat([n.cpu() for n in self._norms]) if self._norms else torch.zeros(0, dtype=torch.float64)
        return TensorFisher(self._size or size, float("nan"), float(shares.sum()) / count, shares)
