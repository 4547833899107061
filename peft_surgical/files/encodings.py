"""The ways to write a trained tensor as a difference to the base's, exact or rounded, by name.

The names stand in files and configs. `peft_surgical.files.adapter` applies the encodings to an adapter's tensors.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


Shape = Sequence[int]
GROUP = 64  # entries of an int4 tensor that share a step size
_HEADER = 20  # bytes before the packed ones of a lossless tensor


class Encoding(ABC):
    """One way to write a trained tensor as a difference to the base's.

    The suffixes of its parts begin with its name in `ENCODINGS` and appear in no other encoding.
    """

    lossy = True
    dtypes: Mapping[str, torch.dtype]  # of its parts, by suffix
    entries_per_code = 1  # how many entries of the trained tensor one element of the first part stands for

    @abstractmethod
    def part_shapes(self, shape: Shape) -> dict[str, tuple[int, ...] | None]:
        """The shapes of the tensors in the file by the suffix of their names; None where the data decide."""

    @abstractmethod
    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        """Turn a trained tensor into the tensors in the file, by suffix."""

    @abstractmethod
    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        """Turn the tensors in the file into the trained one: exactly, or rounded and in float32 or better."""


class Lossless(Encoding):
    """The integer difference of the bit patterns, its byte planes packed by zstd; restores every bit.

    Bit patterns are mapped to integers in the order of the numbers, so a small step is a small integer also across
    zero, and the high planes of a fine-tuned tensor are nearly empty (cf. FM-Delta, ZipNN). A header of 20 bytes holds
    the trained tensor's dtype and a checksum of its bytes.
    """

    dtypes = {"lossless": torch.uint8}

    lossy = False

    def part_shapes(self, shape: Shape) -> dict[str, tuple[int, ...] | None]:
        return {"lossless": None}

    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        bits = _bits(trained)
        steps = _ordered(bits) - _ordered(_bits(base.to(trained.dtype)))
        one, last = steps.dtype.type(1), steps.dtype.type(8 * steps.itemsize - 1)
        zigzag = (steps << one) ^ (0 - (steps >> last))
        planes = zigzag.view(np.uint8).reshape(-1, steps.itemsize).T
        packed = _zstd().ZstdCompressor(level=3).compress(np.ascontiguousarray(planes).data)
        name = str(trained.dtype).removeprefix("torch.").encode().ljust(16)
        header = name + zlib.crc32(bits.data).to_bytes(4, "little")
        return {"lossless": torch.frombuffer(bytearray(header + packed), dtype=torch.uint8)}

    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        data = parts["lossless"].cpu().numpy()
        dtype = getattr(torch, bytes(data[:16]).decode("ascii", "replace").strip(), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError("its packed data are damaged (they begin with no dtype)")
        crc = int.from_bytes(bytes(data[16:_HEADER]), "little")
        size = base.numel() * dtype.itemsize
        # of a copy, for memory that numpy has seen can no longer be resized, which FSDP1 does
        start = _ordered(_bits(base.to(dtype, copy=True)))
        try:
            packed = data[_HEADER:].tobytes()
            if (found := _zstd().frame_content_size(packed)) != size:  # before memory is taken for it
                raise ValueError(f"its packed data are damaged (they hold {found} bytes instead of {size})")
            planes = np.frombuffer(_zstd().ZstdDecompressor().decompress(packed), np.uint8)
        except _zstd().ZstdError as error:
            raise ValueError(f"its packed data are damaged ({error})") from error
        zigzag = np.ascontiguousarray(planes.reshape(start.itemsize, -1).T).view(start.dtype).reshape(-1)
        one = start.dtype.type(1)
        bits = _unordered(start + ((zigzag >> one) ^ (0 - (zigzag & one))))
        if zlib.crc32(bits.data) != crc:
            raise ValueError(
                f"the checksum is wrong, so this base ({str(base.dtype).removeprefix('torch.')} here) is not bit for "
                "bit the one that the delta was encoded against. Load the base in the dtype that it had then"
            )
        return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(base.shape).to(base.device)


class Bfloat16(Encoding):
    """The difference, rounded to bfloat16: within a 256th of each entry's difference."""

    dtypes = {"bf16": torch.bfloat16}

    def part_shapes(self, shape: Shape) -> dict[str, tuple[int, ...] | None]:
        return {"bf16": tuple(shape)}

    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"bf16": difference(trained, base).to(torch.bfloat16)}

    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        return _add(base, parts["bf16"])


class Int8(Encoding):
    """The difference in steps of a 127th of its row's largest entry: within half a step."""

    dtypes = {"int8": torch.int8, "int8_scale": torch.float32}

    def part_shapes(self, shape: Shape) -> dict[str, tuple[int, ...] | None]:
        return {"int8": tuple(shape), "int8_scale": (*shape[:-1], 1)}

    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        delta = difference(trained, base)
        scale = (delta.abs().amax(-1, keepdim=True) / 127).float()
        return {"int8": _steps(delta, scale, 127).to(torch.int8), "int8_scale": scale}

    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        return _add(base, parts["int8"].float() * parts["int8_scale"])


class Int4(Encoding):
    """The difference in steps of a 7th of the largest entry in its group of 64: within half a step.

    Groups run over the tensor's entries in order; the step sizes are kept in bfloat16.
    """

    dtypes = {"int4": torch.uint8, "int4_scale": torch.bfloat16}

    entries_per_code = 2

    def part_shapes(self, shape: Shape) -> dict[str, tuple[int, ...] | None]:
        size = math.prod(shape)
        return {"int4": (math.ceil(size / 2),), "int4_scale": (math.ceil(size / GROUP), 1)}

    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        delta = _grouped(difference(trained, base))
        scale = (delta.abs().amax(-1, keepdim=True) / 7).to(torch.bfloat16)
        codes = (_steps(delta, scale.to(delta.dtype), 7) + 8).to(torch.uint8).reshape(-1)
        packed = codes[0::2] | (codes[1::2] << 4)
        return {"int4": packed[: math.ceil(trained.numel() / 2)].clone(), "int4_scale": scale}

    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        packed = parts["int4"]
        codes = torch.stack([packed & 15, packed >> 4], -1).reshape(-1)[: base.numel()]
        steps = _grouped(codes.float() - 8) * parts["int4_scale"].float()
        return _add(base, steps.reshape(-1)[: base.numel()].reshape(base.shape))


class Sign(Encoding):
    """Whether each entry went up or down, and one step size per row, the mean absolute difference (BitDelta, eq. 2-3).

    An entry is off by at most its difference or its row's mean, whichever is larger. `distil_scales` finds better step
    sizes from a few batches.
    """

    dtypes = {"sign": torch.uint8, "sign_scale": torch.float32}

    entries_per_code = 8

    def part_shapes(self, shape: Shape) -> dict[str, tuple[int, ...] | None]:
        return {"sign": (math.ceil(math.prod(shape) / 8),), "sign_scale": (*shape[:-1], 1)}

    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        delta = difference(trained, base)
        up = torch.nn.functional.pad((delta > 0).reshape(-1).to(torch.uint8), (0, -delta.numel() % 8))
        packed = (up.reshape(-1, 8) << _bit_places(up.device)).sum(-1).to(torch.uint8)
        return {"sign": packed, "sign_scale": delta.abs().mean(-1, keepdim=True).float()}

    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        packed = parts["sign"]
        up = ((packed[:, None] >> _bit_places(packed.device)) & 1).reshape(-1)[: base.numel()].reshape(base.shape)
        return _add(base, torch.where(up.bool(), parts["sign_scale"], -parts["sign_scale"]))


ENCODINGS: dict[str, Encoding] = {
    "lossless": Lossless(),
    "bf16": Bfloat16(),
    "int8": Int8(),
    "int4": Int4(),
    "sign": Sign(),
}


def find_encoding(name: str) -> Encoding:
    """The encoding with a name."""
    if name not in ENCODINGS:
        raise ValueError(f"encoding={name!r} is not known; allowed are {', '.join(['values', *ENCODINGS])}.")
    return ENCODINGS[name]


def values_nbytes(encoding: str, codes: torch.Tensor) -> int:
    """The size in bytes of an encoded tensor's plain values, in float32 if rounded; `codes` is its first part."""
    chosen = find_encoding(encoding)
    if chosen.lossy:
        return codes.numel() * chosen.entries_per_code * 4
    try:
        return _zstd().frame_content_size(codes[_HEADER : _HEADER + 32].numpy().tobytes())
    except _zstd().ZstdError as error:
        raise ValueError(f"its packed data are damaged ({error})") from error


def difference(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """trained - base, in float32 or better whatever the dtypes are."""
    dtype = torch.promote_types(torch.promote_types(trained.dtype, base.dtype), torch.float32)
    return trained.to(dtype) - base.to(dtype)


def _add(base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(base.dtype, torch.float32)
    return base.to(dtype) + delta.to(dtype)


def _steps(delta: torch.Tensor, scale: torch.Tensor, most: int) -> torch.Tensor:
    steps = torch.where(scale > 0, delta / torch.where(scale > 0, scale, 1), 0)
    return steps.round().clamp(-most, most)


def _grouped(values: torch.Tensor) -> torch.Tensor:
    flat = values.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).reshape(-1, GROUP)


def _bit_places(device: torch.device) -> torch.Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def _zstd() -> Any:
    import zstandard  # here, so that everything else works where it is not installed

    return zstandard


def _bits(tensor: torch.Tensor) -> np.ndarray:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"u{tensor.itemsize}")


def _ordered(bits: np.ndarray) -> np.ndarray:
    """Bit patterns of floats as unsigned integers in the order of the numbers."""
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits & top, ~bits, bits | top)


def _unordered(ordered: np.ndarray) -> np.ndarray:
    top = ordered.dtype.type(1 << (8 * ordered.itemsize - 1))
    return np.where(ordered & top, ordered & ~top, ~ordered)
