"""The encodings that round the difference: to bfloat16, to steps of a largest entry, or to its sign."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from peft_surgical.files.encoding import Encoding, Shape, difference


GROUP = 64


class Bfloat16(Encoding):
    """The difference, rounded to bfloat16: within a 256th of each entry's difference."""

    @staticmethod
    def part_shapes(shape: Shape) -> dict[str, tuple[int, ...] | None]:
        return {"bf16": tuple(shape)}

    @staticmethod
    def encode(trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"bf16": difference(trained, base).to(torch.bfloat16)}

    @staticmethod
    def decode(parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        return _add(base, parts["bf16"])

    @staticmethod
    def values_nbytes(parts: Mapping[str, torch.Tensor]) -> int:
        return parts["bf16"].numel() * 4

    @staticmethod
    def bound(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return difference(trained, base).abs() * 2.0**-8 + _rounding(trained, base)


class Int8(Encoding):
    """The difference in steps of a 127th of its row's largest entry: within half a step."""

    @staticmethod
    def part_shapes(shape: Shape) -> dict[str, tuple[int, ...] | None]:
        return {"int8": tuple(shape), "int8_scale": (*shape[:-1], 1)}

    @staticmethod
    def encode(trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        delta = difference(trained, base)
        scale = (delta.abs().amax(-1, keepdim=True) / 127).float()
        return {"int8": _steps(delta, scale, 127).to(torch.int8), "int8_scale": scale}

    @staticmethod
    def decode(parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        return _add(base, parts["int8"].float() * parts["int8_scale"])

    @staticmethod
    def values_nbytes(parts: Mapping[str, torch.Tensor]) -> int:
        return parts["int8"].numel() * 4

    @staticmethod
    def bound(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        step = difference(trained, base).abs().amax(-1, keepdim=True) / 127
        return (step * 0.501).expand(trained.shape) + _rounding(trained, base)


class Int4(Encoding):
    """The difference in steps of a 7th of the largest entry in its group of 64: within half a step.

    Groups run over the tensor's entries in order; the step sizes are kept in bfloat16.
    """

    @staticmethod
    def part_shapes(shape: Shape) -> dict[str, tuple[int, ...] | None]:
        size = math.prod(shape)
        return {"int4": (math.ceil(size / 2),), "int4_scale": (math.ceil(size / GROUP), 1)}

    @staticmethod
    def encode(trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        delta = _grouped(difference(trained, base))
        scale = (delta.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16)
        codes = (_steps(delta, scale.to(delta.dtype), 7) + 8).to(torch.uint8).reshape(-1)
        packed = codes[0::2] | (codes[1::2] << 4)
        return {"int4": packed[: math.ceil(trained.numel() / 2)].clone(), "int4_scale": scale}

    @staticmethod
    def decode(parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        packed = parts["int4"]
        codes = torch.stack([packed & 15, packed >> 4], -1).reshape(-1)[: base.numel()]
        steps = _grouped(codes.float() - 8) * parts["int4_scale"].float()
        return _add(base, steps.reshape(-1)[: base.numel()].reshape(base.shape))

    @staticmethod
    def values_nbytes(parts: Mapping[str, torch.Tensor]) -> int:
        return parts["int4"].numel() * 2 * 4  # an odd size is rounded up

    @staticmethod
    def bound(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        step = _grouped(difference(trained, base)).abs().amax(-1, keepdim=True) / 7
        half = (step * (0.5 * (1 + 2.0**-7))).expand(-1, GROUP).reshape(-1)[: trained.numel()]
        return half.reshape(trained.shape) + _rounding(trained, base)


class Sign(Encoding):
    """Whether each entry went up or down, and one step size per row, the mean absolute difference (BitDelta, eq. 2-3).

    An entry is off by at most its difference or its row's mean, whichever is larger. `distil_scales` finds better step
    sizes from a few batches.
    """

    @staticmethod
    def part_shapes(shape: Shape) -> dict[str, tuple[int, ...] | None]:
        return {"sign": (math.ceil(math.prod(shape) / 8),), "sign_scale": (*shape[:-1], 1)}

    @staticmethod
    def encode(trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        delta = difference(trained, base)
        up = torch.nn.functional.pad((delta > 0).reshape(-1).to(torch.uint8), (0, -delta.numel() % 8))
        packed = (up.reshape(-1, 8) << _bit_places(up.device)).sum(-1).to(torch.uint8)
        return {"sign": packed, "sign_scale": delta.abs().mean(-1, keepdim=True).float()}

    @staticmethod
    def decode(parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        packed = parts["sign"]
        up = ((packed[:, None] >> _bit_places(packed.device)) & 1).reshape(-1)[: base.numel()].reshape(base.shape)
        return _add(base, torch.where(up.bool(), parts["sign_scale"], -parts["sign_scale"]))

    @staticmethod
    def values_nbytes(parts: Mapping[str, torch.Tensor]) -> int:
        return parts["sign"].numel() * 8 * 4  # rounded up to a whole byte

    @staticmethod
    def bound(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        size = difference(trained, base).abs()
        return torch.maximum(size, size.mean(-1, keepdim=True)) * (1 + 2.0**-20) + _rounding(trained, base)


def _add(base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(base.dtype, torch.float32)
    return base.to(dtype) + delta.to(dtype)


def _rounding(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    # the difference, the decoded difference and the sum are each rounded to float32
    return (trained.abs().double() + base.abs().double()) * 2.0**-23 + 2.0**-126


def _steps(delta: torch.Tensor, scale: torch.Tensor, most: int) -> torch.Tensor:
    steps = torch.where(scale > 0, delta / torch.where(scale > 0, scale, 1), 0)
    return steps.round().clamp(-most, most)


def _grouped(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).reshape(-1, GROUP)


def _bit_places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
