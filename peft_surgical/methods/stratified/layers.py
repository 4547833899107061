"""The layers that `StratifiedModel` puts into a model: copies of chosen tensors, and LoRA that can be undone exactly.

Where a module has both, LoRA is outside: `lora.Linear(base_layer=StratifiedModule(base_layer=nn.Linear))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import zero_bias
from peft_surgical.copies.variants import TunedInPlace
from peft_surgical.names import STRATIFIED


class StratifiedModule(TunedModule):
    """A `TunedModule` that PEFT takes for a part of LoRA, and that may add a bias to a linear module without one."""

    adapter_layer_names: tuple[str, ...] = (STRATIFIED,)

    def base_tensor(self, name: str) -> torch.Tensor:
        tensor = super().base_tensor(name)
        if tensor is not None:
            return tensor
        # the same object each time: it becomes the module's bias while an adapter is merged
        if "_absent" not in self.__dict__:
            self.__dict__["_absent"] = nn.Parameter(zero_bias(self.base_layer), requires_grad=False)
        return self.__dict__["_absent"]

    @property
    def has_added_bias(self) -> bool:
        """Whether the base has at present a bias that its architecture does not have."""
        return "_absent" in self.__dict__ and self.base_layer._parameters.get("bias") is self.__dict__["_absent"]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        super().merge(safe_merge, adapter_names)
        if "bias" in self._originals and "_absent" in self.__dict__:
            self.base_layer.register_parameter("bias", self.__dict__["_absent"])

    def unmerge(self) -> None:
        super().unmerge()
        if "_absent" in self.__dict__:
            self.base_layer.register_parameter("bias", None)


class StratifiedInPlace(StratifiedModule, TunedInPlace):
    """A `TunedInPlace` for `StratifiedModel`."""


class RestoresBase(lora.LoraLayer):
    """Adds to a LoRA layer of PEFT that `unmerge` gives the base back bit for bit, and `merge` rounds only once.

    The base's own values are kept aside while an adapter is merged. Merging computes in float32 if the base or the
    adapter has a lower precision. Loading with `low_cpu_mem_usage` keeps the values as they are in the file.
    """

    _originals: dict[str, torch.Tensor] | None = None
    _is_merging = False
    _scaling: dict[str, float] = {}
    beside_copies: frozenset[str] = frozenset()
    """The adapters that have copies of base tensors besides LoRA."""

    @property
    def scaling(self) -> dict[str, float]:
        """LoRA's scaling by adapter."""
        return self._scaling

    @scaling.setter
    def scaling(self, scaling: dict[str, float]) -> None:
        before = self._scaling
        if changed := [name for name in self.beside_copies if scaling.get(name, 0) != before.get(name, 0)]:
            raise ValueError(
                f"Adapter {changed[0]!r} has trained copies of biases or weights besides LoRA, which have no scale: "
                "rescaling LoRA alone would give a model that is neither the base nor the adapter. Combine the "
                "adapter with a weight instead: model.add_weighted_adapter([...], [...], adapter_name=...)."
            )
        self._scaling = scaling

    untied: dict[str, nn.Parameter] = {}
    """The base's own parameters that other modules use too, which merging must leave as they are."""
    _is_adding = False

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        if self._is_merging:  # DoRA takes merged adapters out for a moment
            super().merge(safe_merge, adapter_names)
            return
        present = self._all_available_adapter_names()
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in present]
        if not names:
            return
        base = self.get_base_layer()
        for name, shared in self.untied.items():
            if getattr(base, name) is shared:
                setattr(base, name, nn.Parameter(shared.data, requires_grad=False))
        own = dict(base.named_parameters(recurse=False))
        before = {name: parameter.data for name, parameter in own.items()}
        merged_before, originals = list(self.merged_adapters), self._originals
        self._is_merging, self._originals = True, originals or before
        try:
            with self._adapters_in_float32():
                for parameter in own.values():
                    parameter.data = parameter.data.to(_at_least_float32(parameter), copy=True)
                super().merge(safe_merge, names)
            for name, parameter in own.items():
                parameter.data = parameter.data.to(before[name].dtype)
        except BaseException:
            for name, parameter in own.items():
                parameter.data = before[name]
            self.merged_adapters[:], self._originals = merged_before, originals
            raise
        finally:
            self._is_merging = False

    def unmerge(self) -> None:
        """Give the base its own values back, bit for bit."""
        if self._is_merging:
            super().unmerge()
            return
        for name, value in (self._originals or {}).items():
            parameter = self.get_base_layer().get_parameter(name)
            parameter.data = value.to(parameter.device)
        for name, shared in self.untied.items():
            setattr(self.get_base_layer(), name, shared)
        for name in self.merged_adapters:
            self._caches.pop(f"{name}-weight_norm", None)  # DoRA's
        self._originals = None
        self.merged_adapters.clear()

    def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        self._is_adding = True
        try:
            super().update_layer(adapter_name, *args, **kwargs)
        finally:
            self._is_adding = False
        self.take_dtype_of_base(adapter_name)

    def take_dtype_of_base(self, adapter_name: str) -> None:
        """Give an adapter that has no values yet the base's dtype. PEFT does so only with those that have."""
        _, dtype = self._get_base_layer_device_and_dtype(self.get_base_layer())
        for parameter in self._parameters_of(adapter_name):
            if parameter.device.type == "meta" and dtype is not None and dtype.is_floating_point:
                parameter.data = parameter.data.to(dtype)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        if self._is_adding:
            super()._move_adapter_to_device_of_base_layer(adapter_name, device)
            return
        # PEFT would cast a loaded adapter to the base's dtype as well, and later back
        target = device or self._get_base_layer_device_and_dtype(self.get_base_layer())[0]
        for parameter in self._parameters_of(adapter_name):
            if parameter.device.type != "meta" and target is not None:
                parameter.data = parameter.data.to(target)

    def _parameters_of(self, adapter_name: str) -> Iterator[nn.Parameter]:
        for name in self.adapter_layer_names:
            table = getattr(self, name)
            if adapter_name in table:
                entry = table[adapter_name]
                yield from entry.parameters() if isinstance(entry, nn.Module) else [entry]

    @contextmanager
    def _adapters_in_float32(self) -> Iterator[None]:
        tables: list[Any] = [getattr(self, name) for name in self.adapter_layer_names]
        kept = [(p, p.data) for table in tables for p in table.parameters()]
        try:
            for parameter, value in kept:
                parameter.data = value.to(_at_least_float32(parameter))
            yield
        finally:
            for parameter, value in kept:
                parameter.data = value


class LoraLinear(RestoresBase, lora.Linear):
    """LoRA on a linear module (or GPT-2's `Conv1D`)."""


class LoraEmbedding(RestoresBase, lora.Embedding):
    """LoRA on an embedding."""


class LoraConv1d(RestoresBase, lora.Conv1d):
    """LoRA on a convolution."""


class LoraConv2d(RestoresBase, lora.Conv2d):
    """LoRA on a convolution."""


class LoraConv3d(RestoresBase, lora.Conv3d):
    """LoRA on a convolution."""


_RESTORING: dict[type[nn.Module], type[RestoresBase]] = {
    lora.Linear: LoraLinear,
    lora.Embedding: LoraEmbedding,
    lora.Conv1d: LoraConv1d,
    lora.Conv2d: LoraConv2d,
    lora.Conv3d: LoraConv3d,
}


def make_restoring(layer: nn.Module, adapter_name: str) -> nn.Module:
    """The counterpart here of a LoRA layer of PEFT; quantised and other special ones stay as they are."""
    if type(layer) not in _RESTORING:
        return layer
    counterpart: Any = object.__new__(_RESTORING[type(layer)])
    counterpart.__dict__ = layer.__dict__
    counterpart._scaling = layer.__dict__.pop("scaling")
    counterpart.take_dtype_of_base(adapter_name)
    return counterpart


def _at_least_float32(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.is_floating_point() and tensor.element_size() < 4 else tensor.dtype
