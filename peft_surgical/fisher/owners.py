"""The parameters of layers, and the modules that own them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from peft_surgical.layers import Layer


class Owner(NamedTuple):
    """A module, and some parameters that it owns itself.

    Args:
        path: The module's path in the model.
        module: The module.
        parameters: The parameters, by their name in the module.
    """

    path: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]


def layer_parameters(layers: Sequence[Layer]) -> list[dict[str, nn.Parameter]]:
    """The base's parameters of each layer, by name. One that several layers share counts for the first of them."""
    seen: set[int] = set()
    found = []
    for layer in layers:
        own = {}
        for name, p in _base_parameters(layer.module, "", []):
            if id(p) not in seen:
                seen.add(id(p))
                own[name] = p
        found.append(own)
    return found


def find_owners(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[Owner]:
    """The modules that own some of these parameters, in the order of the model.

    To be called before the model runs: offloaded modules have other parameter objects after each call.
    """
    wanted = {id(p) for p in parameters}
    owners = []
    for path, module in model.named_modules():
        if not module._parameters and not module._buffers:
            continue
        own = {name: p for name, p in own_parameters(module) if id(p) in wanted}
        if own:
            owners.append(Owner(path, module, own))
    return owners


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that a module owns itself. The packed weight of a quantised linear map counts as one."""
    for name, p in module._parameters.items():  # named_parameters takes ten times as long
        if p is not None:
            yield name, p
    if is_packed_linear(module):
        if module not in _packed:
            shape = (module.out_features, module.in_features)
            _packed[module] = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)  # type: ignore
        yield "weight", _packed[module]


def is_packed_linear(module: nn.Module) -> bool:
    """Whether a module is a linear map whose weight is no parameter, but packed into integer buffers (GPTQ, AWQ)."""
    if "weight" in module._parameters or not module._buffers:
        return False
    sizes = (getattr(module, "in_features", None), getattr(module, "out_features", None))
    return all(isinstance(size, int) for size in sizes) and any(
        b is not None and not b.is_floating_point() for b in module._buffers.values()
    )


_packed: WeakKeyDictionary[nn.Module, nn.Parameter] = WeakKeyDictionary()
"""What stands for the packed weight of a module: an empty parameter with the weight's shape."""


def _base_parameters(
    module: nn.Module, prefix: str, found: list[tuple[str, nn.Parameter]]
) -> list[tuple[str, nn.Parameter]]:
    """Append the parameters of a module, without those of adapters."""
    found += [(prefix + name, p) for name, p in own_parameters(module)]
    for name, child in module._modules.items():
        if isinstance(child, BaseTunerLayer):
            if "base_layer" not in child._modules:
                continue  # it tunes the module that it is a child of
            child = child.get_base_layer()
        elif isinstance(child, AuxiliaryTrainingWrapper):
            child = child.original_module
        if child is not None:
            _base_parameters(child, f"{prefix}{name}.", found)
    return found
