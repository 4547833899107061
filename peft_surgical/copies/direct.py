"""What common modules compute, as functions: the fastest way to run a module with other tensors than its own.

A call of a `TunedModule` is made thousands of times in a training step's forward pass, and on a fast GPU the time that
Python takes for it is not hidden. For the modules that most weights are in, this is as fast as the module itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as for_all_modules
from transformers.pytorch_utils import Conv1D


if TYPE_CHECKING:
    from peft_surgical.copies.module import TunedModule


def _linear(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _layer_norm(module: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)


def _conv1d(module: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    out = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return out.view(*x.shape[:-1], module.nf)


DIRECT: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Linear: _linear,
    nn.LayerNorm: _layer_norm,
    Conv1D: _conv1d,
}
"""How these modules compute with a given weight and bias. Subclasses may do otherwise, so they are not meant."""


def has_hooks(module: nn.Module) -> bool:
    """Whether anything else happens in a call of the module than its class's own forward."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or for_all_modules._global_forward_hooks
        or for_all_modules._global_forward_pre_hooks
        or for_all_modules._global_backward_hooks
        or for_all_modules._global_backward_pre_hooks
    )


def direct_output(module: TunedModule, x: Tensor) -> Tensor | None:
    """The output of a module with the copies of the one active adapter, if that is all there is to its call.

    This is the path of nearly all calls, and written for speed: it reads the tables of PyTorch's modules.
    """
    base: Any = module._modules.get("base_layer")
    compute = DIRECT.get(type(base))
    active = module._active_adapter
    if compute is None or module._disable_adapters or module.merged_adapters or len(active) != 1 or has_hooks(base):
        return None
    copies: Any = module._modules[module.adapter_layer_names[0]]._modules.get(active[0])  # type: ignore[union-attr]
    own = base._parameters
    if copies is None or own.get("weight") is None:  # FSDP1 takes parameters out of the tables
        return None
    tensors = []
    for name in ("weight", "bias"):
        tensor = copies._parameters.get(name)
        if tensor is None:
            tensor = own[name]
        else:
            dtype = (own["weight"] if own[name] is None else own[name]).dtype
            if tensor.dtype is not dtype:
                if not torch.is_grad_enabled():
                    return None  # the other path keeps the cast copy
                tensor = tensor.to(dtype)
        tensors.append(tensor)
    return compute(base, x, *tensors)
