"""A `TunedModule` whose base is quantised: the adapters' copies of its weights are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.quantised import dequantised_weight
from peft_surgical.copies.twin import FunctionalModule, twin


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
