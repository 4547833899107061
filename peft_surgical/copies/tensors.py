"""One adapter's copies of a module's tensors, where they are while they rest, and what is kept of them cast for
inference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from typing_extensions import Self

from peft_surgical.copies import host
from peft_surgical.names import as_attribute


class RestingValues(dict[nn.Parameter, torch.Tensor]):
    """The values of copies that are not trained for a while, in host memory. On the accelerator these are rounded to
    the base's dtype meanwhile, in which they are computed with anyway."""

    def lay_down(self, copy: nn.Parameter, dtype: torch.dtype) -> None:
        """Let a copy rest."""
        if copy not in self and copy.dtype != dtype:
            self[copy] = host.to_host(copy.data)
            copy.data = copy.data.to(dtype)

    def wake(self, copy: nn.Parameter) -> None:
        """Give a copy its values back."""
        if copy in self:
            copy.data = host.to_device(self[copy], copy.device)
            del self[copy]  # only now: an interrupt before would lose the values


class TunedTensors(nn.Module):
    """One adapter's copies of some tensors of a module, by their name in it, e.g. `weight` or `out_proj.weight`.
    Parameters stay parameters, other tensors become buffers."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        nn.Module.__init__(self)
        self.names = tuple(tensors)
        self.resting = RestingValues()
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

    def put(self, name: str, value: torch.Tensor) -> None:
        """Give a copy other values."""
        self[name].data = value

    def __contains__(self, name: str) -> bool:
        return name in self.names

    # ---- copies at rest

    def wake(self) -> Self:
        """The same, with no copy at rest."""
        for copy in self.parameters():
            self.resting.wake(copy)
        return self

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        self.wake()
        return super()._apply(*args, **kwargs)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, copy in self.named_parameters(remove_duplicate=False):
            if copy in self.resting:
                destination[prefix + name] = self.resting[copy]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.wake()
        super()._load_from_state_dict(*args, **kwargs)


class TunedNormTensors(TunedTensors, nn.LayerNorm):
    """The copies of a LayerNorm's tensors; a LayerNorm by type, since Trainer exempts those from weight decay."""

    def extra_repr(self) -> str:
        return ""


class KeptTensors:
    """What was computed from copies outside training, a cast or a sum, so that inference pays for it once per switch.

    Nothing is kept of copies that may be trained: an optimizer, or an average of weights that is swapped in, may write
    to `.data`, which no version tells. Nor of those made in inference mode, which have no versions.
    """

    _kept: tuple[object, dict[str, torch.Tensor]]  # one tuple, so that threads see both halves of one answer

    def __init__(self) -> None:
        self.clear()

    def get(
        self,
        copies: Mapping[str, Sequence[torch.Tensor]],
        of_base: Sequence[torch.Tensor],
        compute: Callable[[Mapping[str, Sequence[torch.Tensor]]], dict[str, torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """What `compute` gives for these copies and the base's tensors of the same names; computed again if any of
        them has changed."""
        tensors = [tensor for of_name in copies.values() for tensor in of_name]
        if any(tensor.requires_grad or tensor.is_inference() for tensor in tensors):
            return compute(copies)
        read = tensors if len(tensors) == len(copies) else [*tensors, *of_base]  # a sum starts from the base
        made_of = [*copies, *(t.dtype for t in of_base), *map(_state, read)]
        kept = self._kept
        if kept[0] != made_of:
            with torch.inference_mode(False), torch.no_grad():
                kept = self._kept = (made_of, compute(copies))
        return kept[1]

    def clear(self) -> None:
        """Let go of what is kept."""
        self._kept = (None, {})

    def __reduce__(self) -> tuple:  # a copy of the model makes its own
        return KeptTensors, ()


def _state(tensor: torch.Tensor) -> tuple[int, int, StorageWeakRef]:
    """What differs once a tensor has other values. An address alone is soon given to the next tensor."""
    return tensor._version, tensor.data_ptr(), StorageWeakRef(tensor.untyped_storage())
