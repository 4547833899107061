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
from torch import Tensor, nn

from peft_surgical.fisher_kernel import PendingSquares
from peft_surgical.processes import add_up, gather
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


class DiagonalSum:
    """Sum over samples of the squared gradients of one parameter, entry by entry.

    Args:
        generators: They draw the entries that are kept of each sample; None keeps none.
    """

    def __init__(self, generators: Generators | None = None):
        self.generators = generators
        self.sum: Tensor | None = None
        self._kept: list[tuple[int, Entries, Tensor]] = []
        self._open = False
        self._seen = 0
        self.samples = 0

    def start(self, samples: int) -> None:
        """Get ready for a batch."""
        self.samples, self._open = samples, False
        self._seen += samples

    def add(self, gradients: SampleGradients, first: int, pending: PendingSquares) -> None:
        """Add the squared gradients of the samples of this batch from number `first` on."""
        if self.sum is None:
            self.sum = gradients.zeros()
        gradients.add_squares(self.sum, pending)
        if self.generators is not None:
            self._keep(gradients, first, self.generators.on(gradients.device))

    def _keep(self, gradients: SampleGradients, first: int, generator: torch.Generator) -> None:
        if not self._open:
            entries = gradients.draw(ENTRIES, generator)
            dtype = torch.promote_types(gradients.example.dtype, torch.float32)
            empty = torch.zeros(self.samples, len(entries.index), dtype=dtype, device=gradients.device)
            self._kept.append((self._seen - self.samples, entries, empty))
            self._open = True
        _, entries, squares = self._kept[-1]
        squares[first : first + gradients.samples] += gradients.at(entries).square()

    def result(self, parameter: nn.Parameter, count: float) -> TensorFisher:
        """The mean over the samples of all processes.

        Args:
            parameter: The parameter.
            count: What the sum is divided by.
        """
        total = self._total(parameter)
        if total is None:
            return TensorFisher(parameter.numel(), 0.0, 0.0, self._gathered_shares(None, 0.0, count))
        diagonal = total.flatten() / count
        norm = float(torch.linalg.vector_norm(diagonal, dtype=torch.float64))
        trace = float(diagonal.sum(dtype=torch.float64))
        return TensorFisher(diagonal.numel(), norm, trace, self._gathered_shares(diagonal, norm, count))

    def _total(self, parameter: nn.Parameter) -> Tensor | None:
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

    def _gathered_shares(self, diagonal: Tensor | None, norm: float, count: float) -> Tensor:
        shares = torch.cat([s.cpu() for s in gather(self._shares(diagonal))])
        total = float(shares.sum())
        # the exact norm is known, so that an error in the level of the estimates need not stay
        return shares * (norm * count / total) if total > 0 else shares

    def _shares(self, diagonal: Tensor | None) -> Tensor:
        """Estimates of <F, d_n> for the samples of this process."""
        if self.generators is None:
            return torch.zeros(0, dtype=torch.float64)
        shares = torch.zeros(self._seen, dtype=torch.float64)
        for first, entries, squares in self._kept:
            assert diagonal is not None
            weight = entries.weight * diagonal[entries.index].double()
            shares[first : first + len(squares)] = (squares.double() @ weight).cpu()
        return shares


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

    def result(self, parameter: nn.Parameter, count: float) -> TensorFisher:
        """The mean over the samples of all processes; arguments as for `DiagonalSum.result`."""
        mine = torch.cat([n.cpu() for n in self._norms]) if self._norms else torch.zeros(0, dtype=torch.float64)
        parts = gather((mine, self._size))
        shares = torch.cat([norms for norms, _ in parts])
        size = next((size for _, size in parts if size is not None), parameter.numel())
        return TensorFisher(size, float("nan"), float(shares.sum()) / count, shares)
