"""Sums over samples of squared per-sample gradients: what is to be squared waits until it is worth a launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from peft_surgical.fisher import kernel


if TYPE_CHECKING:
    from peft_surgical.fisher.triton_kernel import Job, Kind


Lengths = Tensor | Sequence[int] | None

ENTRIES_PER_LAUNCH = 2**23
"""Entries of weights in a launch: several tiles for each multiprocessor, so that few idle while the last ones end."""


def accumulate_squared_products(
    out: Tensor, grad_outputs: Tensor, inputs: Tensor, lengths: Lengths = None, *, precision: str | None = None
) -> Tensor:
    """Add the squared per-sample gradients of a linear map's weight: `out += sum_n (G[n].T @ A[n]) ** 2`.

    Args:
        out: The sum so far, (O, I), float32 or float64.
        grad_outputs: G, the gradient at the outputs, (N, T, O), of any float type and stride.
        inputs: A, the inputs, (N, T, I), of the type of G.
        lengths: Tokens of each sample, N integers, if all rows of G after them are zero: the kernel skips them.
        precision: How the kernel multiplies float32 operands, one of `PRECISIONS`; sums are in float32. By default
            what `torch.set_float32_matmul_precision` allows: `"bf16"` with `high` and `medium`, else `"fp32x3"`.

    Returns:
        `out`.

    Raises:
        ValueError: The shapes do not belong together, or the precision is unknown.

    Example:

        >>> g, a = torch.randn(5, 7, 3), torch.randn(5, 7, 2)
        >>> out = accumulate_squared_products(torch.zeros(3, 2), g, a)
        >>> torch.allclose(out, torch.einsum("nto,nti->noi", g, a).square().sum(0), atol=1e-4)
        True
    """
    _check(out, grad_outputs, inputs, lengths)
    pending = PendingSquares(precision)
    pending.add_products(out, grad_outputs, inputs, lengths)
    pending.flush()
    return out


def squared_product_norm(
    grad_outputs: Tensor, inputs: Tensor, lengths: Lengths = None, *, precision: str | None = None
) -> Tensor:
    """The squared Frobenius norm of what `accumulate_squared_products` would add to a zero matrix.

    Norms of batches do not add up, so this is for the case that all samples are in one batch; the kernel then needs no
    memory of the size of the weight. Arguments as there.

    Returns:
        A scalar of at least float32.

    Example:

        >>> g, a = torch.randn(5, 7, 3), torch.randn(5, 7, 2)
        >>> out = accumulate_squared_products(torch.zeros(3, 2), g, a)
        >>> torch.allclose(squared_product_norm(g, a), out.square().sum())
        True
    """
    height, width = grad_outputs.shape[-1], inputs.shape[-1]
    dtype = kernel.sum_type(grad_outputs.dtype)
    pending = PendingSquares(precision)
    if not kernel.has_kernel(grad_outputs, dtype, pending.precision):
        out = grad_outputs.new_zeros(height, width, dtype=dtype)
        return accumulate_squared_products(out, grad_outputs, inputs, lengths).square_().sum()
    from peft_surgical.fisher import triton_kernel

    job, kind = pending._make_job(None, grad_outputs, inputs, lengths)
    triton_kernel.launch([job], kind, pending.precision, norm=True)
    return job.out.sum()


class PendingSquares:
    """Squares that wait until there are enough of them for one launch.

    A transformer layer has a dozen small parameters, and starting a few small operations for each would take longer
    than the arithmetic. Whoever adds must call `flush` before reading any of the sums.

    Args:
        precision: See `accumulate_squared_products`.

    Example:

        >>> pending, weight, bias = PendingSquares(), torch.zeros(3, 2), torch.zeros(3)
        >>> g, a = torch.randn(5, 7, 3), torch.randn(5, 7, 2)
        >>> pending.add_products(weight, g, a)
        >>> pending.add_gradients(bias, g.sum(1))
        >>> pending.flush()
        >>> torch.allclose(bias, g.sum(1).square().sum(0))
        True
    """

    def __init__(self, precision: str | None = None):
        self.precision = _resolve(precision)
        self._products: dict[Kind, _Waiting] = {}
        self._gradients: list[tuple[Tensor, Tensor, Callable[[Tensor], None] | None]] = []
        self._rounded: tuple[Tensor, Tensor] | None = None

    def add_products(self, out: Tensor, grad_outputs: Tensor, inputs: Tensor, lengths: Lengths = None) -> None:
        """Add `sum_n (G[n].T @ A[n]) ** 2` to `out`; see `accumulate_squared_products`."""
        if not grad_outputs.numel() or not inputs.numel():
            return
        if 1 not in out.stride() or not kernel.has_kernel(grad_outputs, out.dtype, self.precision):
            if grad_outputs.is_cuda:
                return kernel.add_by_chunk(out, *self._operands(grad_outputs, inputs))
            return kernel.add_by_sample(out, grad_outputs, inputs)
        if out.stride(1) != 1:  # the kernel writes along rows
            out, grad_outputs, inputs = out.T, inputs, grad_outputs
        job, kind = self._make_job(out, grad_outputs, inputs, lengths)
        waiting, place = self._products.get(kind), out.data_ptr()
        if waiting is not None and place in waiting.places:
            self._launch(kind)  # within a launch a result belongs to one job
            waiting = None
        if waiting is None:
            waiting = self._products[kind] = _Waiting()
        waiting.jobs.append(job)
        waiting.places.add(place)
        waiting.entries += out.numel()
        if waiting.entries >= ENTRIES_PER_LAUNCH:
            self._launch(kind)

    def add_gradients(self, out: Tensor, gradients: Tensor, then: Callable[[Tensor], None] | None = None) -> None:
        """Add `sum_n g[n] ** 2` to `out`.

        Args:
            out: The sum so far.
            gradients: Per-sample gradients g, (N, *shape of out).
            then: Gets the squares, (N, entries of out), as soon as they are there.
        """
        if gradients.shape[1:] != out.shape:
            raise ValueError(f"gradients of shape {tuple(gradients.shape)} are not (N, *{tuple(out.shape)}).")
        self._gradients.append((out, gradients.flatten(1), then))
        if gradients.numel() > ENTRIES_PER_LAUNCH:  # worth a launch of its own, and too large to be kept
            self._add_gradients()

    def flush(self) -> None:
        """Finish everything that waits."""
        self._rounded = None
        for kind in list(self._products):
            self._launch(kind)
        self._add_gradients()

    def _add_gradients(self) -> None:
        alike: dict[tuple, list] = {}
        times = Counter[int]()  # within a launch a result may be there once
        for waiting in self._gradients:
            out, g, _ = waiting
            place = out.data_ptr()
            alike.setdefault((out.dtype, out.device, g.shape[0], times[place]), []).append(waiting)
            times[place] += 1
        self._gradients.clear()
        for (dtype, *_), group in alike.items():
            outs, gradients, thens = zip(*group, strict=True)
            squares = torch.cat(gradients, 1).to(dtype).square_()
            widths = [g.shape[1] for g in gradients]
            parts = squares.sum(0).split(widths)
            torch._foreach_add_(list(outs), [part.view_as(out) for part, out in zip(parts, outs, strict=True)])
            for then, part in zip(thens, squares.split(widths, 1), strict=True):
                if then is not None:
                    then(part)

    def _make_job(
        self, out: Tensor | None, grad_outputs: Tensor, inputs: Tensor, lengths: Lengths
    ) -> tuple[Job, Kind]:
        from peft_surgical.fisher import triton_kernel

        if lengths is not None:
            lengths = torch.as_tensor(lengths, dtype=torch.int32, device=grad_outputs.device)
        return triton_kernel.make_job(out, *self._operands(grad_outputs, inputs), lengths)

    def _operands(self, grad_outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Both in the type in which they are multiplied."""
        dtype = grad_outputs.dtype
        if dtype != inputs.dtype:
            dtype = torch.promote_types(dtype, inputs.dtype)
        dtype = kernel.operand_type(dtype, self.precision)
        return grad_outputs.to(dtype), self._round(inputs, dtype)

    def _round(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The inputs in another type. Several maps in a row may have the same ones, as query, key and value do."""
        if inputs.dtype == dtype:
            return inputs
        if self._rounded is None or not self._rounded[0].is_set_to(inputs) or self._rounded[1].dtype != dtype:
            self._rounded = inputs, inputs.to(dtype)
        return self._rounded[1]

    def _launch(self, kind: Kind) -> None:
        from peft_surgical.fisher import triton_kernel

        triton_kernel.launch(self._products.pop(kind).jobs, kind, self.precision)


@dataclass
class _Waiting:
    """Products of one kind, where their results are, and how many entries these have."""

    jobs: list[Job] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
    entries: int = 0


def _resolve(precision: str | None) -> str:
    precision = precision or kernel.default_precision()
    if precision not in kernel.PRECISIONS:
        raise ValueError(f"precision={precision!r} is unknown; allowed are {', '.join(kernel.PRECISIONS)}.")
    return precision


def _check(out: Tensor, grad_outputs: Tensor, inputs: Tensor, lengths: Lengths) -> None:
    shapes = tuple(grad_outputs.shape), tuple(inputs.shape)
    if len(shapes[0]) != 3 or len(shapes[1]) != 3 or shapes[0][:2] != shapes[1][:2]:
        raise ValueError(f"grad_outputs and inputs have shapes {shapes}; needed are (N, T, O) and (N, T, I).")
    if tuple(out.shape) != (shapes[0][2], shapes[1][2]):
        raise ValueError(f"out has shape {tuple(out.shape)}; needed is (O, I) = {(shapes[0][2], shapes[1][2])}.")
    if lengths is not None and len(lengths) != shapes[0][0]:
        raise ValueError(f"{len(lengths)} lengths are given for {shapes[0][0]} samples; needed is one for each.")
