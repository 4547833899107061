"""One adapter's copies of a module's tensors, where they are while they rest, and what is kept of them cast for
inference."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from peft_surgical.copies import host
from peft_surgical.names import as_attribute


_numbers = itertools.count()


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
        self.number = next(_numbers)  # that no two entries share
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

    def __init__(self) -> None:
        # one tuple, so that threads see both halves of one answer
        self._kept: tuple[object, dict[str, torch.Tensor]] = (None, {})

    def get(
        self,
        entries: Sequence[TunedTensors],
        copies: Mapping[str, Sequence[torch.Tensor]],
        compute: Callable[[Mapping[str, Sequence[torch.Tensor]]], dict[str, torch.Tensor]],
    ) -> dict[str, torch.Tensor]:
        """What `compute` gives for these copies, which are the entries'; computed again if they have changed."""
        tensors = [tensor for of_name in copies.values() for tensor in of_name]
        if any(tensor.requires_grad or tensor.is_inference() for tensor in tensors):
            return compute(copies)
        made_of = (*(entry.number for entry in entries), *((t._version, t.data_ptr()) for t in tensors))
        kept = self._kept
        if kept[0] != made_of:
            with torch.inference_mode(False), torch.no_grad():
                kept = self._kept = (made_of, compute(copies))
        return kept[1]

    def clear(self) -> None:
        """Let go of what is kept."""
        self._kept = (None, {})
