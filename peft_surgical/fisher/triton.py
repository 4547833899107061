"""The Triton kernels of `squares.py` and their launch. Importing this file needs Triton, so only that file does."""

from __future__ import annotations

import contextvars
import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tiling(NamedTuple):
    """How a launch cuts its work, and how many warps share a program and loads run ahead."""

    rows: int
    columns: int
    tokens: int
    warps: int
    stages: int


TILINGS = {
    (2, True): Tiling(128, 256, 64, 8, 3),
    (2, False): Tiling(128, 128, 64, 8, 3),
    (4, False): Tiling(128, 128, 32, 8, 3),
}
"""By the bytes of an operand, and whether the copy engine fetches it (`benchmarks/fisher/tilings.py`). The larger the
tile, the less is read; the largest keeps some of its sums in local memory and is the fastest all the same."""

FLOAT32_PRODUCTS = "bf16x3"
"""What Triton calls the way to multiply float32 operands: each as the sum of two bfloat16 numbers, with an error of
1e-6. TF32 cuts digits off instead of rounding, so that the errors add up (1e-3); bfloat16 is faster (5e-4)."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit(do_not_specialize=["N", "T"])
def _squared_products(  # type: ignore[no-untyped-def]
    JOBS,
    OWNERS,
    LENGTHS,
    N,
    T,
    OPERAND: tl.constexpr,
    DOT: tl.constexpr,
    BULK: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One tile of one job's diagonal: OUT[o, i] += sum_n (sum_t G[n, t, o] * A[n, t, i])**2.

    A program owns its tile, walks over all samples, and squares in registers, so no per-sample value is ever written
    and every sum has a fixed order. Jobs that share N, T and LENGTHS fill one grid; each has an OUT of its own, and
    OWNERS tells the job of each tile. With BULK the copy engine of a Hopper or later card fetches the operands.
    """
    job = JOBS + tl.load(OWNERS + tl.program_id(0)) * 9
    g_start = tl.load(job + 0).to(tl.pointer_type(OPERAND))
    a_start = tl.load(job + 1).to(tl.pointer_type(OPERAND))
    out = tl.load(job + 2).to(tl.pointer_type(tl.float32))
    height, width = tl.load(job + 3).to(tl.int32), tl.load(job + 4).to(tl.int32)
    g_stride, a_stride, out_stride = tl.load(job + 5), tl.load(job + 6), tl.load(job + 7)
    tile = tl.program_id(0) - tl.load(job + 8).to(tl.int32)
    if ALIGNED:  # what the compiler sees of plain arguments, and must be told of numbers that are loaded
        g_start, a_start, out = tl.multiple_of(g_start, 16), tl.multiple_of(a_start, 16), tl.multiple_of(out, 16)
        height, width = tl.multiple_of(height, 16), tl.multiple_of(width, 16)
        g_stride, a_stride = tl.multiple_of(g_stride, 16), tl.multiple_of(a_stride, 16)
        out_stride = tl.multiple_of(out_stride, 16)

    # programs that run at the same time should read the same rows and columns: take tiles in bands of 8 rows
    band = 8 * tl.cdiv(width, COLUMNS)
    first = tile // band * 8
    rows = min(tl.cdiv(height, ROWS) - first, 8)
    top, left = (first + tile % band % rows) * ROWS, (tile % band // rows) * COLUMNS
    o, i, t = top + tl.arange(0, ROWS), left + tl.arange(0, COLUMNS), tl.arange(0, TOKENS)
    if BULK:
        G = tl.make_tensor_descriptor(g_start, [N, T, height], [T * g_stride, g_stride, 1], [1, TOKENS, ROWS])
        A = tl.make_tensor_descriptor(a_start, [N, T, width], [T * a_stride, a_stride, 1], [1, TOKENS, COLUMNS])

    steps = 0
    for n in range(N):
        steps += max(tl.cdiv(min(tl.load(LENGTHS + n), T), TOKENS), 1)

    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    product = tl.zeros((ROWS, COLUMNS), tl.float32)
    n, start, length = 0, 0, min(tl.load(LENGTHS), T)
    for _ in range(steps):  # over all samples, so that loads run ahead into the next one
        if BULK:
            g = G.load([n, start, top]).reshape(TOKENS, ROWS).T
            a = A.load([n, start, left]).reshape(TOKENS, COLUMNS)
        else:
            row, valid = (n * T + start + t).to(tl.int64), start + t < length
            g_mask, a_mask = valid[None, :] & (o < height)[:, None], valid[:, None] & (i < width)[None, :]
            g = tl.load(g_start + row[None, :] * g_stride + o[:, None], mask=g_mask, other=0.0)
            a = tl.load(a_start + row[:, None] * a_stride + i[None, :], mask=a_mask, other=0.0)
        product = tl.dot(g, a, product, input_precision=DOT)
        start += TOKENS
        is_last = start >= length
        if is_last:
            total += product * product
            product = tl.zeros((ROWS, COLUMNS), tl.float32)
        n, start = tl.where(is_last, n + 1, n), tl.where(is_last, 0, start)
        length = min(tl.load(LENGTHS + min(n, N - 1)), T)

    inside = (o < height)[:, None] & (i < width)[None, :]
    place = out + o[:, None] * out_stride + i[None, :]
    tl.store(place, tl.load(place, mask=inside) + total, mask=inside)


class Kind(NamedTuple):
    """What the jobs of one launch have in common."""

    samples: int
    tokens: int
    lengths: int
    operand: torch.dtype
    bulk: bool
    aligned: bool
    device: torch.device


class Job(NamedTuple):
    """One product. It holds its tensors because the kernel gets only their addresses."""

    out: Tensor
    grad_outputs: Tensor
    inputs: Tensor
    lengths: Tensor
    shape: tuple[int, int]
    tiles: int


def make_job(out: Tensor, grad_outputs: Tensor, inputs: Tensor, lengths: Tensor | None) -> tuple[Job, Kind]:
    """Bring a product into the form that the kernel reads: into `out`, (O, I) float32, the entries of a row side by
    side, with operands of one type. Lengths are (N,) int32 on their device; those of one launch must be one tensor."""
    g, a = _as_rows(grad_outputs), _as_rows(inputs)
    (samples, tokens, height), width, device, size = g.shape, a.shape[2], g.device, g.dtype.itemsize
    places, strides = g.data_ptr() | a.data_ptr(), g.stride(1) | a.stride(1)  # divisible if both are
    bulk = size == 2 and places % 16 == 0 and strides % 8 == 0 and _has_copy_engine(device)
    rows, columns = TILINGS[size, bulk][:2]
    tiles = math.ceil(height / rows) * math.ceil(width / columns)
    if lengths is None:
        lengths = _full_lengths(samples, tokens, device)
    aligned = (height | width | strides | places | out.data_ptr() | out.stride(0)) % 16 == 0
    kind = Kind(samples, tokens, lengths.data_ptr(), g.dtype, bulk, aligned, device)
    return Job(out, g, a, lengths, (height, width), tiles), kind


def launch(jobs: list[Job], kind: Kind) -> None:
    """Run jobs of one kind in one grid."""
    table, first = [], 0
    for job in jobs:
        g, a, out = job.grad_outputs, job.inputs, job.out
        strides = (g.stride(1), a.stride(1), out.stride(0))
        table.append((g.data_ptr(), a.data_ptr(), out.data_ptr(), *job.shape, *strides, first))
        first += job.tiles
    rows, columns, tokens, warps, stages = TILINGS[kind.operand.itemsize, kind.bulk]
    dot = FLOAT32_PRODUCTS if kind.operand == torch.float32 else "tf32"  # shorter types ignore it

    def run() -> None:
        if kind.bulk:
            triton.set_allocator(functools.partial(_scratch, kind.device))
        _squared_products[(first,)](
            _upload(torch.tensor(table), kind.device), _tile_owners(tuple(job.tiles for job in jobs), kind.device),
            jobs[0].lengths, kind.samples, kind.tokens, OPERAND=TYPES[kind.operand], DOT=dot,
            BULK=kind.bulk, ALIGNED=kind.aligned, ROWS=rows, COLUMNS=columns, TOKENS=tokens,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip

    with torch.cuda.device_of(jobs[0].out):
        contextvars.copy_context().run(run)  # so that the allocator is set for this launch only


def _scratch(device: torch.device, size: int, alignment: int, stream: int | None) -> Tensor:
    """Room for the descriptions that the copy engine reads."""
    return torch.empty(size, dtype=torch.int8, device=device)


@functools.cache
def _has_copy_engine(device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and (9, 0) <= torch.cuda.get_device_capability(device) < (12, 0)  # whose shared memory is too small
        and hasattr(tl, "make_tensor_descriptor")
        and hasattr(triton, "set_allocator")
    )


def _as_rows(x: Tensor) -> Tensor:
    """Rows of tokens that lie side by side."""
    (_, tokens, width), (sample, token, entry) = x.shape, x.stride()
    rows = entry == 1 and token >= width and sample == tokens * token
    return x if rows else x.contiguous()


@functools.lru_cache(maxsize=64)
def _full_lengths(samples: int, tokens: int, device: torch.device) -> Tensor:
    return torch.full((samples,), tokens, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=64)
def _tile_owners(tiles: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.arange(len(tiles), dtype=torch.int32).repeat_interleave(torch.tensor(tiles)).to(device)


def _upload(table: Tensor, device: torch.device) -> Tensor:
    """A copy that does not wait for the work that the device still has to do."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


@triton.jit
def _normalized_sums(  # type: ignore[no-untyped-def]
    G, X, OUT, T, C, g_stride, x_stride, eps, CENTER: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """OUT[n, s, 0] = sum_t G[n, t] * xhat[n, t] and OUT[n, s, 1] = sum_t G[n, t], over the tokens t of slice s.

    xhat is the input of a LayerNorm (CENTER) or an RMSNorm after normalisation, recomputed row by row.
    """
    n, s = tl.program_id(0), tl.program_id(1)
    c = tl.arange(0, BLOCK_C)
    scaled, plain = tl.zeros((BLOCK_T, BLOCK_C), tl.float32), tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for start in range(s * BLOCK_T, T, tl.num_programs(1) * BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        mask = (t < T)[:, None] & (c < C)[None, :]
        row = (n * T + t).to(tl.int64)[:, None]
        g = tl.load(G + row * g_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        x = tl.load(X + row * x_stride + c[None, :], mask=mask, other=0.0).to(tl.float32)
        if CENTER:
            x = tl.where(mask, x - tl.sum(x, 1)[:, None] / C, 0.0)
        scaled += g * x * tl.rsqrt(tl.sum(x * x, 1) / C + eps)[:, None]
        plain += g
    place = OUT + (n * tl.num_programs(1) + s) * 2 * C + c
    tl.store(place, tl.sum(scaled, 0), mask=c < C)
    tl.store(place + C, tl.sum(plain, 0), mask=c < C)


def sum_normalized(grad_outputs: Tensor, inputs: Tensor, eps: float, center: bool) -> Tensor:
    """Per-sample gradients of weight and bias of a normalisation, (N, 2, C) float32, from one pass over G and X."""
    g, x = grad_outputs.contiguous(), inputs.contiguous()
    samples, tokens, width = g.shape
    slices = min(4, math.ceil(tokens / 4))
    out = torch.empty(samples, slices, 2, width, dtype=torch.float32, device=g.device)
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(g):
        _normalized_sums[(samples, slices)](
            g, x, out, tokens, width, g.stride(1), x.stride(1), eps,
            CENTER=center, BLOCK_T=max(1, 4096 // block), BLOCK_C=block, num_warps=8,
        )  # fmt: skip
    return out.sum(1)
