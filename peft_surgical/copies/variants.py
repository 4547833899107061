"""Two other kinds of `TunedModule`: for a layer that keeps its place, and for weights that are stored quantised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import nn

from peft_surgical.copies.compute import FunctionalModule, twin
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

    def attach(self) -> None:
        """Make it a child of the layer and route the layer's forward through it."""
        try:
            self.base_layer.add_module(OWN_TENSORS, self)
            self.base_layer.__dict__["forward"] = self.forward
        except BaseException:  # an interrupt: a child without the forward would never be asked
            self.detach()
            raise

    def detach(self) -> None:
        """Undo `attach`."""
        self.base_layer.__dict__.pop("forward", None)
        self.base_layer._modules.pop(OWN_TENSORS, None)

    def forward(self, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Any:
        if self.disable_adapters and self.merged:
            self.unmerge()
        return type(self.base_layer).forward(self.module_in_use(), *args, **kwargs)

    def _needs_functional_call(self) -> bool:
        return False  # it would call the layer's forward, which comes here


_PACKED = ("Params4bit", "Int8Params")  # of bitsandbytes


def is_quantised(module: nn.Module) -> bool:
    """Whether a module itself holds quantised weights."""
    return any(hasattr(module, name) for name in ("qweight", "W_q")) or any(
        _is_packed(parameter) for parameter in module.parameters(recurse=False)
    )


def can_be_dequantised(module: nn.Module) -> bool:
    """Whether a quantised module is linear and its weights can be computed: bitsandbytes, HQQ, torchao, and any module
    with a method `dequantize` that returns them."""
    weight: Any = getattr(module, "weight", None)
    is_linear = all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))
    known = type(weight).__name__ in _PACKED or type(weight).__module__.startswith("torchao.")
    return is_linear and (known or callable(getattr(module, "dequantize", None)))


@torch.no_grad()
def dequantised_weight(module: Any) -> torch.Tensor:
    """The weights that a quantised linear module stands for, in the dtype that they were quantised from as far as that
    is known."""
    if callable(getattr(module, "dequantize", None)):
        weight = module.dequantize()
    elif type(module.weight).__name__ == "Int8Params":
        # PEFT's own function exchanges the weight on CPU, after which the module cannot compute any more
        scale = module.weight.SCB if module.state.SCB is None else module.state.SCB
        weight = module.weight * (scale.to(module.weight.device) / 127).unsqueeze(1)
    else:
        weight = dequantize_module_weight(module)
    return weight.detach().reshape(module.out_features, module.in_features)


def _is_packed(parameter: torch.Tensor) -> bool:
    kind = type(parameter)
    is_integer = not (parameter.is_floating_point() or parameter.is_complex())
    return is_integer or kind.__name__ in _PACKED or kind.__module__.startswith(("torchao.", "optimum.quanto"))


class DequantisedModule(TunedModule):
    """Wraps a quantised linear module and gives each adapter its own weights in the dtype that it computes in.

    Without an adapter the quantised module computes, as before.
    """

    def _set_base_layer(self, base_layer: Any) -> None:
        super()._set_base_layer(base_layer)
        self._quantised: Any = (base_layer,)  # stays here while a merged module stands in; a tuple is no child
        self._dtype = dequantised_weight(base_layer).dtype
        has_bias = getattr(base_layer, "bias", None) is not None
        self._skeleton = (_Linear(base_layer.in_features, base_layer.out_features, has_bias),)

    def module_for(self, adapters: Iterable[str]) -> Any:
        present = [name for name in adapters if name in self.tuned]
        if not present:
            return self.base_layer
        make = FunctionalModule if torch.compiler.is_compiling() else twin
        return make(self._skeleton[0], self.tensors_of(present))

    def base_tensor(self, name: str) -> torch.Tensor:
        quantised = self._quantised[0]
        return nn.Parameter(dequantised_weight(quantised)) if name == "weight" else getattr(quantised, name)

    def identity(self, name: str) -> int:
        return id(getattr(self._quantised[0], name, self))

    def _dtype_of(self, name: str) -> torch.dtype:
        return self._dtype if name == "weight" else super()._dtype_of(name)

    def _put_into_base(self, merged: Mapping[str, torch.Tensor]) -> None:
        bias = merged.get("bias", self._quantised[0].bias)
        out_features, in_features = merged["weight"].shape
        linear = nn.Linear(in_features, out_features, bias is not None, device="meta")
        linear.weight = nn.Parameter(merged["weight"], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.base_layer = linear.train(self.training)

    def unmerge(self) -> None:
        self.base_layer = self._quantised[0]
        self.merged_adapters = []


class _Linear(nn.Linear):
    """Computes in the dtype of its weights, whatever that of its input; made without weights of its own."""

    def __init__(self, in_features: int, out_features: int, bias: bool):
        super().__init__(in_features, out_features, bias, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(self.weight.dtype)
        return nn.functional.linear(x.to(self.weight.dtype), self.weight, bias).to(x.dtype)
