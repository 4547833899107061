"""`TunedInPlace`: a `TunedModule` that the layer which it tunes holds as a child, instead of being wrapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from peft_surgical.copies.module import TunedModule
from peft_surgical.names import OWN_TENSORS


class TunedInPlace(TunedModule):
    """Tunes the parameters that a transformer layer owns itself, e.g. the layer scales of BEiT.

    The layer must keep its class and place, for gradient checkpointing and sharding rely on both. So it is not
    wrapped: this module becomes its child, and the layer's `forward` is called with the twin as `self`.
    """

    is_in_place = True

    def _set_base_layer(self, base_layer: nn.Module) -> None:
        if "forward" in base_layer.__dict__:
            raise ValueError(
                f"The forward of a {type(base_layer).__name__} was replaced on the instance (device_map hooks do so), "
                "so the parameters that the layer owns itself cannot be tuned. Load the model without device_map, or "
                "leave them out with exclude_modules."
            )
        object.__setattr__(self, "base_layer", base_layer)  # not a child: the layer is the parent

    @classmethod
    def attach(cls, layer: nn.Module, adapter_name: str, names: Sequence[str], **options: Any) -> TunedInPlace:
        """Make it a child of the layer and route the layer's forward through it."""
        owner = cls(layer, adapter_name, names, **options)
        layer.add_module(OWN_TENSORS, owner)
        layer.__dict__["forward"] = owner.forward
        return owner

    def detach(self) -> None:
        """Undo `attach`."""
        del self.base_layer.__dict__["forward"]
        delattr(self.base_layer, OWN_TENSORS)

    def forward(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        if self.disable_adapters and self.merged:
            self.unmerge()
        return type(self.base_layer).forward(self.module_in_use(), *args, **kwargs)

    def _needs_functional_call(self) -> bool:
        return False  # it would call the layer's forward, which comes here
