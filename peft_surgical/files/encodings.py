"""The ways to write a trained tensor as a difference to the base's, exact or rounded, by name.

The names stand in files and configs. `peft_surgical.files.adapter` applies the encodings to an adapter's tensors.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from peft_surgical.files.packing import Shape, as_bytes, bits_of, ordered, pack, unpack, unpacked_nbytes


GROUP = 64  # entries of an int4 tensor that share a step size
LOSSLESS_HEADER = 20  # bytes before the packed ones of a lossless tensor


class Encoding(ABC):
    """One way to write a trained tensor as a difference to the base's.

    It is called as its first part, and no suffix of a part appears in another encoding.
    """

    lossy = True
    dtypes: Mapping[str, torch.dtype]  # of its parts, by suffix
    entries_per_code = 1  # how many entries of the trained tensor one element of the first part stands for

    def part_shapes(self, shape: Shape) -> dict[str, tuple[int, ...] | None]:
        """The shapes of the parts by suffix; None where the data decide."""
        return dict.fromkeys(self.dtypes)

    @abstractmethod
    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        """Turn a trained tensor into its parts, by suffix."""

    @abstractmethod
    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        """Turn the parts into the trained tensor: exactly, or rounded and in float32 or better."""


class Lossless(Encoding):
    """The integer difference of the bit patterns, its byte planes packed by zstd; restores every bit.

    Bit patterns are mapped to integers in the order of the numbers, so a small step is a small integer also across
    zero, and the high planes of a fine-tuned tensor are nearly empty (cf. FM-Delta, ZipNN). A header of 20 bytes holds
    the trained tensor's dtype and a checksum of its bytes.
    """

    dtypes = {"lossless": torch.uint8}
    lossy = False

    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        bits = bits_of(trained)
        steps = ordered(bits) - ordered(bits_of(base.to(trained.dtype)))
        zigzag = (steps << 1) ^ (steps >> (8 * steps.itemsize - 1))
        name = str(trained.dtype).removeprefix("torch.").encode().ljust(16)
        header = bytearray(name + zlib.crc32(bits.data).to_bytes(4, "little"))
        packed = pack(torch.from_numpy(zigzag))
        return {"lossless": torch.cat([torch.frombuffer(header, dtype=torch.uint8), packed])}

    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        data = parts["lossless"].cpu()
        dtype = getattr(torch, bytes(data[:16].numpy()).decode("ascii", "replace").strip(), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError("its packed data are damaged (they begin with no dtype)")
        crc = int.from_bytes(bytes(data[16:LOSSLESS_HEADER].numpy()), "little")
        # of a copy, for memory that numpy has seen can no longer be resized, which FSDP1 does
        start = ordered(bits_of(base.to(dtype, copy=True)))
        zigzag = bits_of(unpack(data[LOSSLESS_HEADER:], start.shape, dtype.to_real()))
        bits = ordered(start + ((zigzag >> 1).view(start.dtype) ^ -(zigzag & 1).view(start.dtype)))
        if zlib.crc32(bits.data) != crc:
            raise ValueError(_OTHER_BASE.format(dtype=str(base.dtype).removeprefix("torch.")))
        return torch.from_numpy(bits.view(np.uint8)).view(dtype).reshape(base.shape).to(base.device)


class Rows(Lossless):
    """The rows that differ alone, as `Lossless` writes them, and which they are; restores every bit.

    `rows` holds the number of all rows and a checksum of the whole tensor, 8 bytes each, and, packed, the first row
    that differs (or 0) and how far each further one is from the one before.
    """

    dtypes = {"rows": torch.uint8, "rows_lossless": torch.uint8}
    dim = 0

    def encode(self, trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        which, changed = self.dtypes
        is_other = as_bytes(trained) != as_bytes(base.to(trained.dtype))  # where the tensors are: they may be large
        differs = is_other.transpose(0, self.dim).flatten(1).any(1).cpu()
        differs[0] |= not differs.any()
        places = differs.nonzero().flatten()
        header = torch.tensor([len(differs), self._checksum(trained)]).view(torch.uint8)
        index = torch.cat([header, pack(places.diff(prepend=torch.tensor([0])))])
        parts = super().encode(self._take(trained, places), self._take(base, places))
        return {which: index, changed: parts["lossless"]}

    def decode(self, parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        which, changed = self.dtypes
        size, header, packed = base.shape[self.dim], parts[which][:16].cpu(), parts[which][16:]
        total, crc = header.clone().view(torch.int64).tolist()
        places = unpack(packed, (min(unpacked_nbytes(packed) // 8, size),), torch.int64).cumsum(0)
        is_within = bool(((places >= 0) & (places < size)).all()) and bool((places.diff() > 0).all())
        if not len(places) or total != size or not is_within:
            raise ValueError(f"its numbers of {which} are damaged, or of a tensor with others than {size}")
        values = super().decode({"lossless": parts[changed]}, self._take(base, places))
        whole = as_bytes(base.to(values.dtype)).index_copy(self.dim, places.to(base.device), as_bytes(values))
        whole = whole.view(values.dtype).squeeze(-1)
        if self._checksum(whole) != crc:
            raise ValueError(_OTHER_BASE.format(dtype=str(base.dtype).removeprefix("torch.")))
        return whole

    def _take(self, tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        taken = as_bytes(tensor).index_select(self.dim, places.to(tensor.device))
        return taken.view(tensor.dtype).squeeze(-1)

    def _checksum(self, whole: torch.Tensor) -> int:
        return zlib.crc32(bits_of(whole).data)


class Columns(Rows):
    """The columns that differ alone (the second dimension), and the base's others, whatever these are."""

    dtypes = {"columns": torch.uint8, "columns_lossless": torch.uint8}
    dim = 1

    def _checksum(self, whole: torch.Tensor) -> int:
        return 0  # a stratum of columns has looked at no others


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


_KINDS: Sequence[type[Encoding]] = (Lossless, Rows, Columns, Bfloat16, Int8, Int4, Sign)
ENCODINGS: dict[str, Encoding] = {next(iter(kind.dtypes)): kind() for kind in _KINDS}


def find_encoding(name: str) -> Encoding:
    if name not in ENCODINGS:
        raise ValueError(f"encoding={name!r} is not known; allowed are {', '.join(['values', 'auto', *ENCODINGS])}.")
    return ENCODINGS[name]


def check_encoding(name: str, max_error: float) -> None:
    """Check what a user asks for: an encoding, `"values"`, or `"auto"`, which alone has an error to keep to."""
    if name not in ("values", "auto"):
        find_encoding(name)
    if not isinstance(max_error, (int, float)) or not 0 <= max_error < 1:
        raise ValueError(f"max_error={max_error!r} must be a part of a tensor's difference to the base, from 0 to 1.")
    if max_error and name != "auto":
        raise ValueError(f"max_error={max_error} is for encoding='auto'; {name!r} has its own.")


_OTHER_BASE = (
    "the checksum is wrong, so this base ({dtype} here) is not bit for bit the one that the delta was encoded "
    "against. Load the base in the dtype that it had then"
)


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
