"""Where the layer-major engine keeps the inputs of the layers: on their device, in main memory, or on disk."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor


KEEP = ("device", "cpu", "disk")


@dataclass(frozen=True)
class Kept:
    """A tensor that is kept.

    Args:
        device: Where it is needed.
        value: It, or the file that it is in.
    """

    device: torch.device
    value: Tensor | Path


class InputStore:
    """Keeps tensors.

    Args:
        where: One of `KEEP`.
    """

    def __init__(self, where: str):
        self.where = where
        self._folder = tempfile.TemporaryDirectory(prefix="peft_surgical_") if where == "disk" else None
        self._files = count()

    def put(self, x: Tensor) -> Kept:
        """Keep a tensor."""
        if self.where == "device":
            return Kept(x.device, x)
        if self._folder is None:
            return Kept(x.device, x.cpu())
        path = Path(self._folder.name) / str(next(self._files))
        torch.save(x.cpu(), path)
        return Kept(x.device, path)

    def get(self, kept: Kept) -> Tensor:
        """Get it back."""
        value = torch.load(kept.value, weights_only=True) if isinstance(kept.value, Path) else kept.value
        return value.to(kept.device)
