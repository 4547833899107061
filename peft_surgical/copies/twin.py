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
    here: dict[str, dict[str, torch.Tensor]] = {}
    below: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        child, _, rest = name.partition(".")
        if rest:
            below.setdefault(child, {})[rest] = tensor
            continue
        here.setdefault("_buffers" if name in module._buffers else "_parameters", {})[name] = tensor
        if name in module.__dict__:  # FSDP1 shadows a parameter by an attribute of the instance
            copy.__dict__[name] = tensor
    for table, replacements in here.items():
        own = module.__dict__[table]
        # one by one, for ZeRO-3 gathers a tensor that is read
        copy.__dict__[table] = {name: replacements[name] if name in replacements else own[name] for name in own}
    if "ds_id" in module.__dict__:
        _drop_hooks_of_zero3(copy)
    if below:
        copy.__dict__["_modules"] = module._modules.copy()
        for child, replacements in below.items():
            copy._modules[child] = twin(module.get_submodule(child), replacements)
    return copy


def _drop_hooks_of_zero3(copy: nn.Module) -> None:
    """ZeRO-3's hooks gather the tensors of the original, and count the original's calls."""
    for table in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = copy.__dict__[table].items()
        copy.__dict__[table] = {key: hook for key, hook in hooks if not hook.__module__.startswith("deepspeed")}


class FunctionalModule:
    """A module that computes with other tensors where a twin will not do."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]):
        self.module, self.tensors = module, dict(tensors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.module, self.tensors, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else getattr(self.module, name)
