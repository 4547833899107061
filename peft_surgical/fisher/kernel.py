"""Sums over samples of squared per-sample gradients: the inner loop of the Fisher engine.

The gradient of sample n for a linear map's weight is `G[n].T @ A[n]`, with G the gradient at the outputs and A the
inputs. The diagonal Fisher needs the sum over n of its square, entry by entry. Written out, the per-sample gradients
are N times the size of the weight, and moving them is what costs. So:

- On a GPU with Triton one program owns each tile of the weight, walks over the samples and squares in registers
  (`triton_kernel.py`). Products wait (`pending_squares.py`) until they fill the card, and then share one launch.
- On a GPU without Triton a few samples at a time are multiplied by `bmm`, and reduced while they are in the cache.
- On a CPU one sample at a time goes through one reused buffer. Token rows whose gradient is zero are skipped.

All give the same numbers up to rounding, and the same bits when they run twice.
"""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch
import torch.nn.functional as F
from torch import Tensor


logger = logging.getLogger(__name__)

PRECISIONS = ("fp32x3", "tf32", "bf16")
"""How the kernel multiplies float32 operands: each as the sum of two bfloat16 numbers (error 1e-6), as TF32, or as
bfloat16. TF32 is there for comparison: digits are cut off and not rounded, so that the errors add up (1e-3; 5e-4 with
bfloat16), and it is the slowest."""

CHUNK_ELEMENTS = 2**25
"""Per-sample gradients that exist at a time without the kernel, 128 MiB. A quarter would stay in the cache of a large
card and take more launches: BERT-large takes 1.4 times as long so."""


def sum_normalized(grad_outputs: Tensor, inputs: Tensor, eps: float, *, center: bool = True) -> Tensor:
    """Per-sample gradients of the weight and the bias of a LayerNorm (or, not centred, an RMSNorm).

    Args:
        grad_outputs: G, the gradient at the outputs, (N, T, C).
        inputs: The inputs of the normalisation, (N, T, C).
        eps: What it adds to the variance.
        center: Whether it takes off the mean, as LayerNorm does.

    Returns:
        (N, 2, C), at least float32: `sum_t G[n, t] * xhat[n, t]` and `sum_t G[n, t]`.

    Example:

        >>> sum_normalized(torch.ones(5, 7, 3), torch.randn(5, 7, 3), 1e-5).shape
        torch.Size([5, 2, 3])
    """
    dtype = sum_type(grad_outputs.dtype)
    if has_kernel(grad_outputs, dtype, default_precision()) and inputs.shape[2] <= 8192:
        from peft_surgical.fisher import triton_kernel

        return triton_kernel.sum_normalized(grad_outputs, inputs, eps, center)
    g, x = grad_outputs.to(dtype), inputs.to(dtype)
    x = F.layer_norm(x, x.shape[2:], eps=eps) if center else x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return torch.stack([(g * x).sum(1), g.sum(1)], dim=1)


def default_precision() -> str:
    """The precision that `torch.set_float32_matmul_precision` allows."""
    return "fp32x3" if torch.get_float32_matmul_precision() == "highest" else "bf16"


def on_cpu(x: Tensor) -> bool:
    """Whether operations on a tensor are done at once, rather than put in a queue that Python must keep filled."""
    return x.device.type == "cpu"


def sum_type(dtype: torch.dtype) -> torch.dtype:
    """The type in which numbers of a type are added up: at least float32. `promote_types` takes ten times as long."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operand_type(dtype: torch.dtype, precision: str) -> torch.dtype:
    """The type in which operands of a type are multiplied."""
    return torch.bfloat16 if dtype == torch.float32 and precision == "bf16" else dtype


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


def has_kernel(grad_outputs: Tensor, dtype: torch.dtype, precision: str) -> bool:
    operand = grad_outputs.dtype
    if dtype != torch.float32 or operand not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    return grad_outputs.is_cuda and kernel_works(operand, precision, grad_outputs.device)


@functools.cache
def kernel_works(operand: torch.dtype, precision: str, device: torch.device) -> bool:
    """Whether Triton is there and able to build the kernel, which takes a C compiler and a card that it knows."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    samples, tokens = 3, 80  # several steps of the kernel's loop
    x = torch.ones(samples, tokens, 16, dtype=operand_type(operand, precision), device=device)
    out = torch.zeros(16, 16, device=device)
    try:
        from peft_surgical.fisher import triton_kernel

        job, kind = triton_kernel.make_job(out, x, x, None)
        triton_kernel.launch([job], kind, precision)
        return bool((out == samples * tokens**2).all())
    except Exception as error:  # whatever a compiler may raise
        logger.warning("The Triton kernel for the Fisher cannot be used on %s; bmm is used instead. %s", device, error)
        return False
