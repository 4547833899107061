"""What an encoding of trained tensors has to offer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch


Shape = Sequence[int]


class Encoding(ABC):
    """One way to write a trained tensor as a difference to the base's.

    All methods are static: an encoding is a name in `ENCODINGS` and a few functions. The suffixes of its parts begin
    with that name and appear in no other encoding.
    """

    lossy = True

    @staticmethod
    @abstractmethod
    def part_shapes(shape: Shape) -> dict[str, tuple[int, ...] | None]:
        """The shapes of the tensors in the file by the suffix of their names; None where the data decide."""

    @staticmethod
    @abstractmethod
    def encode(trained: torch.Tensor, base: torch.Tensor) -> dict[str, torch.Tensor]:
        """Turn a trained tensor into the tensors in the file, by suffix."""

    @staticmethod
    @abstractmethod
    def decode(parts: Mapping[str, torch.Tensor], base: torch.Tensor) -> torch.Tensor:
        """Turn the tensors in the file into the trained one, up to `bound`, in `difference_dtype` if lossy."""

    @staticmethod
    @abstractmethod
    def bound(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """How far each entry may be off after decoding, the final rounding to float32 included."""

    @staticmethod
    @abstractmethod
    def values_nbytes(parts: Mapping[str, torch.Tensor]) -> int:
        """The size in bytes that the values would have: in float32 if lossy, else in their own dtype."""


def difference(trained: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """trained - base, in float32 or better whatever the dtypes are."""
    dtype = torch.promote_types(torch.promote_types(trained.dtype, base.dtype), torch.float32)
    return trained.to(dtype) - base.to(dtype)
