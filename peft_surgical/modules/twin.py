"""A module that computes with other tensors than its own, without touching it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def twin(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A shallow copy of a module in which the named tensors are others; everything else is shared.

    Args:
        module: Any module; it is not changed.
        tensors: Replacements by name, as in `named_parameters()`.

    Example:

        >>> linear = nn.Linear(2, 2)
        >>> twin(linear, {"bias": torch.zeros(2)}).weight is linear.weight
        True
    """
    copy = object.__new__(type(module))
    copy.__dict__ = module.__dict__.copy()
    below: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        child, _, rest = name.partition(".")
        if rest:
            below.setdefault(child, {})[rest] = tensor
            continue
        table = "_buffers" if name in module._buffers else "_parameters"
        if copy.__dict__[table] is module.__dict__[table]:
            copy.__dict__[table] = dict(module.__dict__[table])  # ZeRO-3's table cannot copy itself
        copy.__dict__[table][name] = tensor
        if name in module.__dict__:  # FSDP1 shadows a parameter by an attribute of the instance
            copy.__dict__[name] = tensor
    if below:
        copy.__dict__["_modules"] = module._modules.copy()
        for child, replacements in below.items():
            copy._modules[child] = twin(module.get_submodule(child), replacements)
    return copy


class FunctionalModule:
    """A module that computes with other tensors where a twin will not do."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]):
        self.module, self.tensors = module, dict(tensors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.module, self.tensors, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else getattr(self.module, name)
