"""One adapter's copies of a module's tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from peft_surgical.names import as_attribute


class TunedTensors(nn.Module):
    """One adapter's copies of some tensors of a module.

    Args:
        tensors: The copies by their name in the module, e.g. `weight` or `out_proj.weight`. Parameters stay
            parameters, other tensors become buffers.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        nn.Module.__init__(self)
        self.names = tuple(tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(as_attribute(name), tensor)
            else:
                self.register_buffer(as_attribute(name), tensor)
        # PEFT's FSDP policy shards each childless module with a trainable weight as a unit of its own, which is only
        # gathered when called; these tensors are read by the module around and belong to the unit of the layer
        self.in_unit_of_layer = nn.Identity()

    def __getitem__(self, name: str) -> torch.Tensor:
        # attribute access, not the dict of parameters: FSDP keeps the gathered tensor in an attribute of the instance
        return getattr(self, as_attribute(name))

    def __contains__(self, name: str) -> bool:
        return name in self.names


class TunedNormTensors(TunedTensors, nn.LayerNorm):
    """The copies of a LayerNorm's tensors; a LayerNorm by type, since Trainer exempts those from weight decay."""

    def extra_repr(self) -> str:
        return ""
