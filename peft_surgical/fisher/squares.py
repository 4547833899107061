"""Sums over samples of squared per-sample gradients: the inner loop of the Fisher.

The gradient of sample n for a linear map's weight is `G[n].T @ A[n]`, with G the gradient at the outputs and A the
inputs. The diagonal Fisher needs the sum over n of its square, entry by entry. Written out, the per-sample gradients
are N times the size of the weight, and moving them is what costs. So:

- On a GPU with Triton one program owns each tile of the weight, walks over the samples and squares in registers
  (`triton.py`). Products wait in a `SquareQueue` until they fill the card, and then share one launch.
- On a GPU without Triton a few samples at a time are multiplied by `bmm`, and reduced while they are in the cache.
- On a CPU one sample at a time goes through one reused buffer. Token rows whose gradient is zero are skipped.

All give the same numbers up to rounding, and the same bits when they run twice.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor


if TYPE_CHECKING:
    from peft_surgical.fisher.triton import Job, Kind


logger = logging.getLogger(__name__)

ENTRIES_PER_LAUNCH = 2**23
"""Entries of weights in a launch: several tiles for each multiprocessor, so that few idle while the last ones end."""

CHUNK_ELEMENTS = 2**25
"""Per-sample gradients that exist at a time without the kernel, 128 MiB. A quarter would stay in the cache of a large
card and take more launches: BERT-large takes 1.4 times as long so."""


def on_cpu(x: Tensor) -> bool:
    """Whether operations on a tensor are done at once, rather than put in a queue that Python must keep filled."""
    return x.device.type == "cpu"


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of a type are added up: at least float32. `promote_types` takes ten times as long."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """The same numbers in the type in which they are added up."""
    return x.to(sum_type(x.dtype))


def operand_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which operands of a type are multiplied: bfloat16 for float32, where
    `torch.set_float32_matmul_precision` allows it."""
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return torch.bfloat16
    return dtype


class SquareQueue:
    """Squares that wait until there are enough of them for one launch.

    A transformer layer has a dozen small parameters, and starting a few small operations for each would take longer
    than the arithmetic. Whoever adds must call `flush` before reading any of the sums.
    """

    def __init__(self) -> None:
        self._products: dict[Kind, _Waiting] = {}
        self._gradients: list[tuple[Tensor, Tensor, Callable[[Tensor], None] | None]] = []
        self._rounded: tuple[Tensor, Tensor] | None = None

    def add_products(self, out: Tensor, grad_outputs: Tensor, inputs: Tensor, lengths: Tensor | None = None) -> None:
        """Add `sum_n (G[n].T @ A[n]) ** 2` to `out`, (O, I) float32 or float64.

        G, the gradients at the outputs, (N, T, O), and A, the inputs, (N, T, I), have any float type and stride. All
        rows of G after the `lengths`, (N,), are zero: the kernel skips them.
        """
        if not grad_outputs.numel() or not inputs.numel():
            return
        if 1 not in out.stride() or not has_kernel(grad_outputs, out.dtype):
            if grad_outputs.is_cuda:
                return add_by_chunk(out, *self._operands(grad_outputs, inputs))
            return add_by_sample(out, grad_outputs, inputs)
        from peft_surgical.fisher import triton

        if out.stride(1) != 1:  # the kernel writes along rows
            out, grad_outputs, inputs = out.T, inputs, grad_outputs
        if lengths is not None:
            lengths = lengths.to(grad_outputs.device, torch.int32)
        job, kind = triton.make_job(out, *self._operands(grad_outputs, inputs), lengths)
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
        """Add `sum_n g[n] ** 2` to `out`; `then` gets the squares, (N, entries of out), as soon as they are there."""
        self._gradients.append((out, gradients.reshape(len(gradients), out.numel()), then))
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

    def _operands(self, grad_outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Both in the type in which they are multiplied."""
        dtype = grad_outputs.dtype
        if dtype != inputs.dtype:
            dtype = torch.promote_types(dtype, inputs.dtype)
        dtype = operand_type(dtype)
        return grad_outputs.to(dtype), self._round(inputs, dtype)

    def _round(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        """The inputs in another type. Several maps in a row may have the same ones, as query, key and value do."""
        if inputs.dtype == dtype:
            return inputs
        if self._rounded is None or not self._rounded[0].is_set_to(inputs) or self._rounded[1].dtype != dtype:
            self._rounded = inputs, inputs.to(dtype)
        return self._rounded[1]

    def _launch(self, kind: Kind) -> None:
        from peft_surgical.fisher import triton

        triton.launch(self._products.pop(kind).jobs, kind)


@dataclass
class _Waiting:
    """Products of one kind, where their results are, and how many entries these have."""

    jobs: list[Job] = field(default_factory=list)
    places: set[int] = field(default_factory=set)
    entries: int = 0


def add_by_sample(out: Tensor, grad_outputs: Tensor, inputs: Tensor) -> None:
    """One sample at a time, through one buffer; samples with a single token row all at once, by one product."""
    # true for NaN as well; several times as fast as any()
    live = (grad_outputs.amax(-1) != 0) | (grad_outputs.amin(-1) != 0)
    counts = live.sum(1)
    first = torch.arange(live.shape[1]) < counts[:, None]  # padding on the right, and nothing else
    single = live & (counts == 1)[:, None]
    if single.any():  # (g a^T)^2 = g^2 (a^2)^T
        g, a = grad_outputs[single].to(out.dtype), inputs[single].to(out.dtype)
        out.addmm_(g.square().T, a.square())
    buffer = torch.empty_like(out)
    for n, (count, gapless) in enumerate(zip(counts.tolist(), (first == live).all(1).tolist(), strict=True)):
        if count < 2:
            continue
        rows = slice(count) if gapless else live[n]
        g, a = grad_outputs[n, rows].to(out.dtype), inputs[n, rows].to(out.dtype)
        torch.mm(g.T, a, out=buffer)
        out.addcmul_(buffer, buffer)


def add_by_chunk(out: Tensor, grad_outputs: Tensor, inputs: Tensor) -> None:
    """A few samples at a time: their gradients by one `bmm`, their sum of squares in one pass over those."""
    chunk = max(1, CHUNK_ELEMENTS // out.numel())
    for g, a in zip(grad_outputs.split(chunk), inputs.split(chunk), strict=True):
        norm = torch.linalg.vector_norm(multiply(g.transpose(1, 2), a, out.dtype), dim=0)
        out.addcmul_(norm, norm)


def multiply(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """A batched product in `dtype`, which may be wider than the operands."""
    if left.dtype == dtype:
        return torch.bmm(left, right)
    try:
        return torch.bmm(left, right, out_dtype=dtype)
    except (TypeError, RuntimeError):  # older torch, or a type that it cannot widen to
        return torch.bmm(left.to(dtype), right.to(dtype))


def has_kernel(grad_outputs: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel can multiply such gradients and add up in this type."""
    operand = operand_type(grad_outputs.dtype)
    if dtype != torch.float32 or operand not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return grad_outputs.is_cuda and kernel_works(operand, grad_outputs.device)


@functools.cache
def kernel_works(operand: torch.dtype, device: torch.device) -> bool:
    """Whether Triton is there and able to build the kernel, which takes a C compiler and a card that it knows."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    samples, tokens = 3, 80  # several steps of the kernel's loop
    x = torch.ones(samples, tokens, 16, dtype=operand, device=device)
    out = torch.zeros(16, 16, device=device)
    try:
        from peft_surgical.fisher import triton

        job, kind = triton.make_job(out, x, x, None)
        triton.launch([job], kind)
        return bool((out == samples * tokens**2).all())
    except Exception as error:  # whatever a compiler may raise
        logger.warning("The Triton kernel for the Fisher cannot be used on %s; bmm is used instead. %s", device, error)
        return False


def sum_normalized(grad_outputs: Tensor, inputs: Tensor, eps: float, *, center: bool = True) -> Tensor:
    """Per-sample gradients of the weight and the bias of a LayerNorm (or, not centred, an RMSNorm).

    From G, the gradients at the outputs, and the inputs, (N, T, C): `sum_t G[n, t] * xhat[n, t]` and `sum_t G[n, t]`,
    (N, 2, C), at least float32.
    """
    dtype = sum_type(grad_outputs.dtype)
    if has_kernel(grad_outputs, dtype) and inputs.shape[2] <= 8192:
        from peft_surgical.fisher import triton

        return triton.sum_normalized(grad_outputs, inputs, eps, center)
    g, x = grad_outputs.to(dtype), inputs.to(dtype)
    x = F.layer_norm(x, x.shape[2:], eps=eps) if center else x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return torch.stack([(g * x).sum(1), g.sum(1)], dim=1)
