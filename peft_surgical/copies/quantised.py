"""Weights that are stored quantised, and what they stand for."""

from __future__ import annotations

from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import nn


_PACKED = ("Params4bit", "Int8Params")  # of bitsandbytes


def is_quantised(module: nn.Module) -> bool:
    """Whether a module itself holds quantised weights.

    Example:

        >>> is_quantised(nn.Linear(2, 2))
        False
    """
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
    """The weights that a quantised linear module stands for.

    Returns:
        Shape (out_features, in_features), in the dtype that they were quantised from as far as that is known.
    """
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
