"""Sums over samples of a parameter's squared gradients, and what each sample contributes to the result.

`DiagonalSum` keeps the diagonal of the Fisher matrix, entry by entry, for its norm. What a sample contributes to the
norm is estimated from some entries (`contributions.py`). `NormSum` keeps only the trace, for which the squared norm
of each sample's gradient is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from peft_surgical.distributed import all_reduce, gather
from peft_surgical.fisher.contributions import WHOLE_VECTOR, EntryKeeper, KeptEntries, estimate_products
from peft_surgical.fisher.gradients import DenseGradients, SampleGradients
from peft_surgical.fisher.squares import SquareQueue, sum_type


class TensorFisher(NamedTuple):
    """The diagonal Fisher of one parameter.

    The sum of the contributions, divided by the number of samples (or tokens), is the norm, or the trace if only that
    was asked for.
    """

    size: int
    norm: float  # the Frobenius norm; NaN if only the trace was asked for
    trace: float
    contributions: Tensor  # of each sample, (N,) float64


def new_sum(gradients: SampleGradients) -> Tensor:
    """Zeros that the squares of such gradients can be added to."""
    return torch.zeros(gradients.sum_shape, dtype=sum_type(gradients.example.dtype), device=gradients.device)


class LayerZeros:
    """Zeros for the sums of a layer: parts of one tensor, since filling each by itself would take a launch."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self._size = sum(_aligned(p.numel()) for p in parameters)
        self._left: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def take(self, gradients: SampleGradients) -> Tensor:
        """As `new_sum`."""
        kind = gradients.device, sum_type(gradients.example.dtype)
        left = self._left.get(kind)
        if left is None:
            left = torch.zeros(self._size, dtype=kind[1], device=kind[0])
        if len(left) < gradients.size:  # a quantised weight has more entries than its parameter
            return new_sum(gradients)
        self._left[kind] = left[_aligned(gradients.size) :]
        return left[: gradients.size].view(gradients.sum_shape)


def _aligned(size: int) -> int:
    return -(-size // 64) * 64


class DiagonalSum:
    """Sum over samples of the squared gradients of one parameter, entry by entry; the keeper keeps some entries of
    each sample's, None keeps none."""

    def __init__(self, keeper: EntryKeeper | None = None, zeros: Callable[[SampleGradients], Tensor] = new_sum):
        self.keeper, self._zeros = keeper, zeros
        self.sum: Tensor | None = None
        self.kept = KeptEntries()
        self.seen = self._first = 0

    def start(self, samples: int) -> None:
        self._first, self.seen = self.seen, self.seen + samples

    def add(self, gradients: SampleGradients, first: int, queue: SquareQueue) -> None:
        """Add the squared gradients of the samples of this batch from number `first` on."""
        if self.sum is None:
            self.sum = self._zeros(gradients)
        first += self._first
        if self.keeper is None:
            gradients.add_squares(self.sum, queue)
        elif isinstance(gradients, DenseGradients) and self.sum.dim() == 1 and gradients.size <= WHOLE_VECTOR:
            self.kept.choose(None)
            gradients.add_squares(self.sum, queue, partial(self.kept.add_squares, first))
        else:
            gradients.add_squares(self.sum, queue)
            self.keeper.keep(self.kept, first, gradients, self.sum, queue)


def reduce_diagonals(pairs: Sequence[tuple[nn.Parameter, DiagonalSum]], count: float) -> list[TensorFisher]:
    """The means over the samples of all processes: the sums, divided by `count`."""
    totals = _totals(pairs)
    found = [norm for order in (2, 1) for norm in torch._foreach_norm(totals, order, dtype=torch.float64)]
    norms, traces = on_host(found).view(2, -1)
    contributions = torch.zeros(len(pairs), 0, dtype=torch.float64)
    if pairs[0][1].keeper is not None:
        scales = [1 / norm if norm else 0.0 for norm in norms.tolist()]
        contributions = estimate_products([s.kept for _, s in pairs], totals, scales, pairs[0][1].seen)
    contributions = torch.cat(gather(contributions), 1)
    # the exact norms are known, so that an error in the level of the estimates need not stay
    level = contributions.sum(1)
    contributions *= torch.where(level > 0, norms / level, 1.0)[:, None]
    sizes = [max(p.numel(), total.numel()) for (p, _), total in zip(pairs, totals, strict=True)]
    numbers = zip(sizes, (norms / count).tolist(), (traces / count).tolist(), contributions, strict=True)
    return [TensorFisher(*row) for row in numbers]


def _totals(pairs: Sequence[tuple[nn.Parameter, DiagonalSum]]) -> list[Tensor]:
    """The sums over processes, empty where none has got a gradient. They are written to those of this process."""
    mine = [None if s.sum is None else (tuple(s.sum.shape), s.sum.dtype) for _, s in pairs]
    totals = []
    for (parameter, own), kinds in zip(pairs, zip(*gather(mine), strict=True), strict=True):
        if own.sum is None:
            shape, dtype = next((kind for kind in kinds if kind is not None), ((0,), torch.float32))
            device = torch.device("cpu") if parameter.is_meta else parameter.device
            own.sum = torch.zeros(shape, dtype=dtype, device=device)
        totals.append(all_reduce(own.sum))
    return totals


def on_host(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one shape, stacked, float64 on the CPU: one copy instead of many, which waits for the device."""
    device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([t.to(device) for t in tensors]).cpu().double()


class NormSum:
    """The squared norm of each sample's gradient of one parameter."""

    def __init__(self) -> None:
        self._norms: list[Tensor] = []
        self._size: int | None = None

    def start(self, samples: int) -> None:
        self._norms.append(torch.zeros(samples, dtype=torch.float64))

    def add(self, gradients: SampleGradients, first: int, queue: SquareQueue) -> None:
        """Add the squared norms of the samples of this batch from number `first` on."""
        self._size = gradients.size
        norms = self._norms[-1] = self._norms[-1].to(gradients.device)
        norms[first : first + gradients.samples] += gradients.squared_norms().double()

    def mine(self) -> tuple[Tensor, int | None]:
        """The squared norms of the samples of this process, (N,) float64, and the size of the parameter, if known."""
        norms = torch.cat([n.cpu() for n in self._norms]) if self._norms else torch.zeros(0, dtype=torch.float64)
        return norms, self._size


def reduce_norms(pairs: Sequence[tuple[nn.Parameter, NormSum]], count: float) -> list[TensorFisher]:
    """The means over the samples of all processes, as `reduce_diagonals`."""
    found = []
    parts = gather([total.mine() for _, total in pairs])
    for (parameter, _), of_processes in zip(pairs, zip(*parts, strict=True), strict=True):
        contributions = torch.cat([norms for norms, _ in of_processes])
        size = next((size for _, size in of_processes if size is not None), parameter.numel())
        found.append(TensorFisher(size, float("nan"), float(contributions.sum()) / count, contributions))
    return found


class LayerSums:
    """The sums of the parameters of some layers: the diagonal, for its norm, or only the trace. Random numbers are for
    the estimate of what each sample contributes to the norm; None leaves it out."""

    def __init__(
        self, parameters: Sequence[dict[str, nn.Parameter]], diagonal: bool, generator: torch.Generator | None = None
    ):
        self.parameters, self._diagonal, self._generator = parameters, diagonal, generator
        self.by_id: dict[int, DiagonalSum | NormSum] = {}
        self.clear()

    def clear(self) -> None:
        self._keeper = EntryKeeper(self._generator) if self._diagonal and self._generator else None
        for group in self.parameters:
            zeros = LayerZeros(group.values())
            for p in group.values():
                self.by_id[id(p)] = DiagonalSum(self._keeper, zeros.take) if self._diagonal else NormSum()

    def start(self, samples: int) -> None:
        for total in self.by_id.values():
            total.start(samples)

    def finish(self) -> None:
        """Finish a backward pass, after the queue of squares is empty."""
        if self._keeper is not None:
            self._keeper.flush()

    def results(self, count: float) -> list[dict[str, TensorFisher]]:
        """The means over all processes, for each layer."""
        pairs = [(p, self.by_id[id(p)]) for group in self.parameters for p in group.values()]
        diagonals = [(p, total) for p, total in pairs if isinstance(total, DiagonalSum)]
        norms = [(p, total) for p, total in pairs if isinstance(total, NormSum)]
        found = iter(reduce_diagonals(diagonals, count) if diagonals else reduce_norms(norms, count))
        return [{name: next(found) for name in group} for group in self.parameters]
