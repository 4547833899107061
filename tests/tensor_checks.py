"""What tests of files and checkpoints ask of tensors: equality bit for bit, and how many are in memory."""

from __future__ import annotations

import weakref
from collections import UserDict

import torch


def assert_same_bits(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


class Counted(UserDict[str, torch.Tensor]):
    """Tensors, copied when they are asked for; knows how many and how many bytes of them were alive at once."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.alive: dict[int, int] = {}
        self.most = self.most_bytes = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = super().__getitem__(name).clone()
        self.alive[id(tensor)] = tensor.nbytes
        weakref.finalize(tensor, self.alive.pop, id(tensor), None)
        self.most = max(self.most, len(self.alive))
        self.most_bytes = max(self.most_bytes, sum(self.alive.values()))
        return tensor
