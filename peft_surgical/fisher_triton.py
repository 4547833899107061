"""The Triton kernels of `fisher_kernel` and their launch. Importing this file needs Triton, so only that file does."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


TILE = 128
"""Rows and columns of a weight that one program works on: the sums for them fill the registers of a multiprocessor."""

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _squared_products(
    JOBS,
    OWNERS,
    LENGTHS,
    N,
    T,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    NORM: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """One tile of one job's diagonal: OUT[o, i] += sum_n (sum_t G[n, t, o] * A[n, t, i])**2.

    A program owns its tile, walks over all samples, and squares in registers, so no per-sample value is ever written
    and every sum has a fixed order. Jobs that share N, T and LENGTHS fill one grid; OWNERS tells the job of each tile.
    With NORM the tile is not written, only the sum of the squares of its entries, to OUT[tile].
    """
    job = JOBS + tl.load(OWNERS + tl.program_id(0)) * 10
    g_start = tl.load(job + 0).to(tl.pointer_type(OPERAND))
    a_start = tl.load(job + 1).to(tl.pointer_type(OPERAND))
    out = tl.load(job + 2).to(tl.pointer_type(tl.float32))
    height, width = tl.load(job + 3).to(tl.int32), tl.load(job + 4).to(tl.int32)
    g_stride, a_stride = tl.load(job + 5), tl.load(job + 6)
    out_row, out_column = tl.load(job + 7), tl.load(job + 8)
    tile = tl.program_id(0) - tl.load(job + 9).to(tl.int32)
    if ALIGNED:  # what the compiler sees of plain arguments, and must be told of numbers that are loaded
        g_start, a_start = tl.multiple_of(g_start, 16), tl.multiple_of(a_start, 16)
        height, width = tl.multiple_of(height, 16), tl.multiple_of(width, 16)
        g_stride, a_stride = tl.multiple_of(g_stride, 16), tl.multiple_of(a_stride, 16)

    # programs that run at the same time should read the same rows and columns: take tiles in bands of 8 rows
    band = 8 * tl.cdiv(width, TILE)
    top = tile // band * 8
    rows = min(tl.cdiv(height, TILE) - top, 8)
    o = (top + tile % band % rows) * TILE + tl.arange(0, TILE)
    i = (tile % band // rows) * TILE + tl.arange(0, TILE)
    t = tl.arange(0, BLOCK_T)

    total = tl.zeros((TILE, TILE), tl.float32)
    for n in tl.range(N, flatten=True):  # one loop with the next, so that loads run ahead into the next sample
        product = tl.zeros((TILE, TILE), tl.float32)
        length = min(tl.load(LENGTHS + n), T)
        for start in range(0, length, BLOCK_T):
            row = (n * T + start + t).to(tl.int64)
            valid = start + t < length
            g_mask, a_mask = valid[None, :] & (o < height)[:, None], valid[:, None] & (i < width)[None, :]
            g = tl.load(g_start + row[None, :] * g_stride + o[:, None], mask=g_mask, other=0.0)
            a = tl.load(a_start + row[:, None] * a_stride + i[None, :], mask=a_mask, other=0.0)
            product = tl.dot(g, a, product, input_precision=PRECISION)
        total += product * product

    if NORM:
        tl.store(out + tile, tl.sum(total * total))
    else:
        inside = (o < height)[:, None] & (i < width)[None, :]
        place = out + o[:, None] * out_row + i[None, :] * out_column
        tl.store(place, tl.load(place, mask=inside, other=0.0) + total, mask=inside)


class Kind(NamedTuple):
    """What the jobs of one launch have in common."""

    samples: int
    tokens: int
    lengths: int
    operand: torch.dtype
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


def make_job(
    out: Tensor | None, grad_outputs: Tensor, inputs: Tensor, lengths: Tensor | Sequence[int] | None, precision: str
) -> tuple[Job, Kind]:
    """Bring a product into the form that the kernel reads. Without `out` it is one for the norm."""
    g, a = _as_rows(grad_outputs, precision), _as_rows(inputs, precision)
    samples, tokens, height = g.shape
    width = a.shape[2]
    tiles = math.ceil(height / TILE) * math.ceil(width / TILE)
    if out is None:
        out = torch.empty(tiles, dtype=torch.float32, device=g.device)
    if lengths is None:
        lengths = _full_lengths(samples, tokens, g.device)
    lengths = torch.as_tensor(lengths, dtype=torch.int32, device=g.device)
    numbers = (height, width, g.stride(1), a.stride(1), g.data_ptr(), a.data_ptr())
    aligned = all(number % 16 == 0 for number in numbers)
    kind = Kind(samples, tokens, lengths.data_ptr(), g.dtype, aligned, g.device)
    return Job(out, g, a, lengths, (height, width), tiles), kind


def launch(jobs: list[Job], kind: Kind, precision: str, norm: bool = False) -> None:
    """Run jobs of one kind in one grid."""
    table, first = [], 0
    for job in jobs:
        g, a, out = job.grad_outputs, job.inputs, job.out
        strides = (g.stride(1), a.stride(1), out.stride(0), out.stride(-1))
        table.append((g.data_ptr(), a.data_ptr(), out.data_ptr(), *job.shape, *strides, first))
        first += job.tiles
    with torch.cuda.device_of(jobs[0].out):
        _squared_products[(first,)](
            _upload(torch.tensor(table), kind.device),
            _tile_owners(tuple(job.tiles for job in jobs), kind.device),
            jobs[0].lengths,
            kind.samples,
            kind.tokens,
            OPERAND=TYPES[kind.operand],
            PRECISION="tf32x3" if precision == "fp32x3" else "tf32",
            ALIGNED=kind.aligned,
            NORM=norm,
            TILE=TILE,
            BLOCK_T=64 if kind.operand.itemsize == 2 else 32,
            num_warps=8,
            num_stages=3,
        )


def _as_rows(x: Tensor, precision: str) -> Tensor:
    """Rows of tokens that lie side by side, in the type that is multiplied."""
    if x.dtype == torch.float32 and precision == "bf16":
        x = x.to(torch.bfloat16)
    return x if x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1) else x.contiguous()


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
def _normalized_sums(
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
