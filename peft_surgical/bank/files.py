"""The file of a task: its header, and its tensors read straight into a buffer."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from peft_surgical.files.safetensors_io import DTYPES


ALIGNMENT = 256  # bytes; what matrix kernels like best

_READERS, _WORTH_A_READER = 4, 2**24
"""Threads that read a file, at most, and the bytes for which another one is worth its start."""


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor.

    Args:
        dtype: Its dtype.
        shape: Its shape.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Layout:
    """Where tensors lie in one buffer, one after the other and aligned.

    Args:
        specs: The tensors, by name.

    Example:

        >>> layout = Layout({"a": Spec(torch.float32, (2, 3)), "b": Spec(torch.bfloat16, (5,))})
        >>> layout.nbytes
        512
        >>> layout.views(torch.zeros(512, dtype=torch.uint8))["a"].shape
        torch.Size([2, 3])
    """

    def __init__(self, specs: Mapping[str, Spec]):
        self.specs = dict(specs)
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for name, spec in self.specs.items():
            self.offsets[name] = self.nbytes
            self.nbytes += math.ceil(spec.nbytes / ALIGNMENT) * ALIGNMENT

    def slice(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The bytes of one tensor in a buffer."""
        return buffer[self.offsets[name] : self.offsets[name] + self.specs[name].nbytes]

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in a buffer of bytes, by name."""
        return {n: self.slice(buffer, n).view(spec.dtype).view(spec.shape) for n, spec in self.specs.items()}


class TaskFile:
    """A safetensors file of which only the header is read until its tensors are asked for.

    No handle stays open. A file that was changed since its header was read is an error, not wrong values.

    Args:
        path: The file.
        present_name: What a tensor is called here, by its name in the file.

    Raises:
        ValueError: It is missing, or not a whole safetensors file.
    """

    def __init__(self, path: str | os.PathLike, present_name: Callable[[str], str] = lambda name: name):
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._stamp = _stamp(file.fileno())
                if not 2 <= length <= self._stamp[0] - 8:
                    raise ValueError("its header is cut off")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            header = {present_name(name): entry for name, entry in header.items()}
            self.specs = {name: Spec(DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}
            self._starts = {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}
            end = max((self._starts[name] + spec.nbytes for name, spec in self.specs.items()), default=8 + length)
            if end != self._stamp[0]:
                raise ValueError(f"it has {self._stamp[0]} bytes and should have {end}")
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read as a safetensors file ({error}). Copy it again.") from error

    def read(self, layout: Layout, buffer: torch.Tensor) -> None:
        """Read tensors into their places in a buffer, without the GIL and without a copy in between.

        Args:
            layout: The tensors to read; a part of those in the file.
            buffer: The buffer: bytes, on the CPU.

        Raises:
            ValueError: The file is gone, cut off, or not the one whose header was read.
        """
        data = buffer.numpy()
        names = list(layout.specs)
        readers = min(_READERS, 1 + layout.nbytes // _WORTH_A_READER, len(names))
        try:
            if readers < 2:
                self._read_some(names, layout, data)
                return
            # from the page cache one thread reads at half of what the memory gives, or less
            with ThreadPoolExecutor(readers) as pool:
                list(pool.map(lambda n: self._read_some(names[n::readers], layout, data), range(readers)))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} cannot be read ({error}). Copy it again and add the task anew.") from error

    def _read_some(self, names: Sequence[str], layout: Layout, data: np.ndarray) -> None:
        with open(self.path, "rb", buffering=0) as file:
            if _stamp(file.fileno()) != self._stamp:
                raise ValueError("it was changed after the bank read its header")
            for name in names:
                start = layout.offsets[name]
                _read_all(file, self._starts[name], data[start : start + layout.specs[name].nbytes].data)


def _stamp(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read_all(file, start: int, target: memoryview) -> None:
    file.seek(start)
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise ValueError("it is cut off")
        done += count
