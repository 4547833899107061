"""How a module computes with other tensors than its own, without touching it.

Three ways: as a function, where the module's kind is known (`direct_output`, the fastest: a call of a tuned module is
made thousands of times in a training step, and on a fast GPU the time that Python takes for it is not hidden); by a
`twin`, a shallow copy of the module; and by PyTorch's `functional_call`, where a twin will not do.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as for_all_modules
from transformers.pytorch_utils import Conv1D


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


def direct_output(base: Any, copies: Any, x: Tensor, kept: KeptTwin) -> Any:
    """The output of a module with the parameters of another put in; None if it takes more to compute it.

    This is the path of nearly all calls, and written for speed: it reads the tables of PyTorch's modules.
    """
    if copies is None:
        return None
    compute = DIRECT.get(type(base))
    if compute is None:
        found = None if torch.compiler.is_compiling() else kept.get(base, copies)
        return None if found is None else found(x)
    if has_hooks(base):
        return None
    own = base._parameters
    if own.get("weight") is None and copies._parameters.get("weight") is None:  # FSDP1 takes them out of the tables
        return None
    tensors = []
    for name in ("weight", "bias"):
        tensor = copies._parameters.get(name)
        if tensor is None:
            tensor = own[name] if name in own else getattr(base, name)
        else:
            like = own.get(name)
            if like is None:  # left out of the tables, or a bias that a linear module lacks
                like = getattr(base, name) if getattr(base, name) is not None else base.weight
            dtype = like.dtype
            if tensor.dtype is not dtype and not (compute is _linear and _is_in_autocast(tensor, x)):
                if not torch.is_grad_enabled():
                    return None  # the other path keeps the cast copy
                tensor = tensor.to(dtype)
        tensors.append(tensor)
    return compute(base, x, *tensors)


def _is_in_autocast(tensor: Tensor, x: Tensor) -> bool:
    """Whether autocast lets a linear module compute in the tensor's dtype, in which FSDP2 may have gathered a copy."""
    device = x.device.type
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is tensor.dtype


def twin(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """A shallow copy of a module in which the named tensors are others; everything else is shared."""
    copy = object.__new__(type(module))
    copy.__dict__ = module.__dict__.copy()
    here: dict[str, dict[str, torch.Tensor]] = {}
    below: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        child, _, rest = name.partition(".")
        if rest:
            below.setdefault(child, {})[rest] = tensor
            continue
        table = "_buffers" if name in module._buffers else "_parameters"
        here.setdefault(table, {})[name] = tensor
        if name in module.__dict__:  # FSDP1 shadows a parameter by an attribute of the instance
            copy.__dict__[name] = tensor
        elif name not in module.__dict__[table]:  # left out, the base's own would be computed with
            known = ", ".join([*module._parameters, *module._buffers]) or "none"
            raise AttributeError(f"A {type(module).__name__} has no tensor {name!r} to be replaced. It has: {known}.")
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


class KeptTwin:
    """The twin of a module without children, such as a norm, made anew once anything of the module has changed."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Let go of what is kept."""
        self._kept: tuple[list[Any], nn.Module | None] = ([], None)  # one tuple, for threads

    def get(self, module: Any, copies: Any) -> nn.Module | None:
        """The twin with these copies; None for a module of another kind, or if they have another dtype than it."""
        own = {**module.__dict__, **module._parameters, **module._buffers}
        tensors = {**copies._parameters, **copies._buffers}
        dtypes = [tensor.dtype for tensor in tensors.values() if tensor is not None]
        made_of = [*own.values(), *tensors.values(), *dtypes]
        before, kept = self._kept
        if kept is not None and len(before) == len(made_of) and all(map(operator.is_, before, made_of)):
            return kept
        if (
            module._modules
            or module.__dict__.keys() & {"forward", "ds_id"}
            or isinstance(module, nn.RNNBase)
            or not set(copies.names) == tensors.keys() <= own.keys()
            or any(own[name] is None or own[name].dtype is not tensors[name].dtype for name in tensors)
        ):
            return None
        kept = twin(module, tensors)
        self._kept = made_of, kept
        return kept

    def __reduce__(self) -> tuple:  # a copy of the model makes its own
        return KeptTwin, ()


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


def leave_fused_path(model: nn.Module, is_adapted: Callable[[nn.Module], bool]) -> None:
    """Keep PyTorch's transformer layers from computing past the wrappers of adapters inside them.

    In evaluation `nn.TransformerEncoderLayer` hands its weights to one fused kernel, without calling its modules.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(map(is_adapted, module.modules())):
            module.__dict__.setdefault("_was_fused", module.activation_relu_or_gelu)
            module.activation_relu_or_gelu = 0  # what the layer asks first; nothing else reads it


def return_to_fused_path(model: nn.Module) -> None:
    """Undo `leave_fused_path`."""
    for module in model.modules():
        if "_was_fused" in module.__dict__:
            module.activation_relu_or_gelu = module.__dict__.pop("_was_fused")  # type: ignore[assignment]


def run_by_rows(
    base: nn.Module,
    module_for: Callable[[str], Callable[..., Any]],
    adapter_names: Sequence[str],
    args: tuple,
    kwargs: Mapping[str, Any],
) -> Any:
    """Run a module on each adapter's rows with that adapter's tensors; a `TypeError` if it takes or gives something
    else than one tensor with the rows first."""
    if len(set(adapter_names)) == 1:
        return module_for(adapter_names[0])(*args, **kwargs)
    kind = type(base).__name__
    is_one_tensor = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
    if not is_one_tensor or any(True for _ in base.children()):
        raise rows_unknown(f"A {kind} takes more than one tensor")
    x = args[0]
    if len(x) != len(adapter_names):
        why = "experts see flattened tokens, position embeddings one row for all"
        raise rows_unknown(f"A {kind} sees {len(x)} rows where the batch has {len(adapter_names)} ({why})")
    out = None
    for name in dict.fromkeys(adapter_names):
        rows = torch.tensor([i for i, other in enumerate(adapter_names) if other == name], device=x.device)
        part = module_for(name)(x[rows])
        if not isinstance(part, torch.Tensor) or len(part) != len(rows):
            raise rows_unknown(f"A {kind} does not give one output per row")
        out = part.new_empty(len(x), *part.shape[1:]) if out is None else out
        out[rows] = part
    return out


def rows_unknown(why: str) -> TypeError:
    """What is raised where a module does not see the rows of a batch."""
    return TypeError(
        f"{why}, so the rows of different adapters cannot be told apart in it. Run a batch per adapter, or tune other "
        "modules."
    )


def unreadable(base: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A twin for a parent that reads a module's tensors in a batch of several adapters' rows: of these tensors it may
    ask what they are like, and not compute with them."""

    class Unreadable(Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                out = function(*args, **(kwargs or {}))
            if any(isinstance(part, Tensor) for part in (out if isinstance(out, tuple) else (out,))):
                raise rows_unknown(
                    f"The tensors of a {type(base).__name__} are read by its parent, which does not call it"
                )
            return out

    return twin(base, {name: tensor.detach().as_subclass(Unreadable) for name, tensor in tensors.items()})
