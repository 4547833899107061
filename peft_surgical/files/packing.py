"""Tensors of any dtype as bytes and bit patterns, and packed by zstd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import zstandard


Shape = Sequence[int]


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """A tensor packed by zstd as bytes, the first ones of all entries first, then the second ones, and so on."""
    planes = np.stack(
        [*bits_of(numbers).view(np.uint8).reshape(-1, numbers.itemsize).T]
    )  # faster than a transposed copy
    packed = zstandard.ZstdCompressor(level=3).compress(planes.data)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def unpack(packed: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """The tensor again, on the CPU."""
    nbytes = math.prod(shape) * dtype.itemsize
    if (found := unpacked_nbytes(packed)) != nbytes:  # before memory is taken for it
        raise ValueError(f"its packed data are damaged (they hold {found} bytes instead of {nbytes})")
    try:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(packed.cpu().numpy().tobytes()), np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"its packed data are damaged ({error})") from error
    whole = torch.from_numpy(np.stack([*planes.reshape(dtype.itemsize, -1)], axis=1))
    return whole.reshape(-1).view(dtype).reshape(tuple(shape))


def unpacked_nbytes(packed: torch.Tensor) -> int:
    """How many bytes a tensor has that was packed."""
    try:
        return zstandard.frame_content_size(packed[:32].cpu().numpy().tobytes())
    except zstandard.ZstdError as error:
        raise ValueError(f"its packed data are damaged ({error})") from error


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each entry, in a last dimension; PyTorch before 2.7 has no index for some dtypes."""
    tensor = tensor.detach().contiguous()
    return tensor.view(torch.uint8).reshape(*tensor.shape, tensor.itemsize)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """The bit patterns of the entries, as whole numbers."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.view(f"u{tensor.itemsize}")


def ordered(bits: np.ndarray) -> np.ndarray:
    """Bit patterns of floats as integers in the order of the numbers; and those as bit patterns again."""
    signed = bits.view(f"i{bits.itemsize}")
    return signed ^ ((signed >> (8 * bits.itemsize - 1)) & np.iinfo(signed.dtype).max)
