"""The exact encoding: the difference of the bit patterns, packed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from peft_surgical.files.encoding import Encoding, Shape


class Lossless(Encoding):
    """The integer difference of the bit patterns, its byte planes packed by zstd; restores every bit.

    Bit patterns are mapped to integers in the order of the numbers, so a small step is a small integer also across
    zero, and the high planes of a fine-tuned tensor are nearly empty (cf. FM-Delta, ZipNN). A header of 20 bytes holds
    the trained tensor's dtype and a checksum of its bytes.
    """

    lossy = False

    @staticmethod
    def part_shapes(shape: Shape) -> dict[str, tuple[int, ...] | None]:
        return {"lossless": None}

    @staticmethod
    def encode(trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        bits = _bits(trained)
        steps = _ordered(bits) - _ordered(_bits(base.to(trained.dtype)))
        one, last = steps.dtype.type(1), steps.dtype.type(8 * steps.itemsize - 1)
        zigzag = (steps << one) ^ (0 - (steps >> last))
        planes = zigzag.view(np.uint8).reshape(-1, steps.itemsize).T
        packed = _zstd().ZstdCompressor(level=3).compress(np.ascontiguousarray(planes).data)
        name = str(trained.dtype).removeprefix("torch.").encode().ljust(16)
        header = name + zlib.crc32(bits.data).to_bytes(4, "little")
        return {"lossless": torch.frombuffer(bytearray(header + packed), dtype=torch.uint8)}

    @staticmethod
    def decode(parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        data = parts["lossless"].cpu().numpy()
        dtype = getattr(torch, bytes(data[:16]).decode().strip())
        crc = int.from_bytes(bytes(data[16:20]), "little")
        # of a copy, for memory that numpy has seen can no longer be resized, which FSDP1 does
        start = _ordered(_bits(base.to(dtype, copy=True)))
        try:
            planes = np.frombuffer(_zstd().ZstdDecompressor().decompress(data[20:].data), np.uint8)
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

    @staticmethod
    def values_nbytes(parts: Mapping[str, torch.Tensor]) -> int:
        return _zstd().frame_content_size(parts["lossless"].numpy()[20:].tobytes()[:32])

    @staticmethod
    def bound(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        return torch.zeros(trained.shape)


def _zstd() -> Any:
    import zstandard  # here, so that all else works where it cannot be installed

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
