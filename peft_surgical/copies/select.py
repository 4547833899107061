"""The modules that can be tuned as a whole, and the base's own tensors behind the wrappers of adapters.

Some parameters the base uses in several places, of which an adapter may tune only some. Its copy stands in one place,
so it unties them: the embeddings may be tuned and the head that shares their weights not. Merging keeps to that, and
the merged model's config says so.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.variants import TunedInPlace
from peft_surgical.names import OWN_TENSORS


logger = logging.getLogger(__name__)


def tunable_modules(path: str, module: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """The outermost modules in a module that own tensors, with the names of all tensors in them.

    A module that owns parameters directly may use its children's weights without calling them (`nn.MultiheadAttention`
    does), so it is taken as a whole.
    """
    inner = bottom(module)
    lists = [child for child in inner.children() if isinstance(child, (nn.ParameterList, nn.ParameterDict))]
    if own_tensor_names(inner) or any(map(own_tensor_names, lists)):
        yield path, tensor_names(inner)
    else:
        for name, child in inner.named_children():
            if not isinstance(child, AuxiliaryTrainingWrapper):
                yield from tunable_modules(f"{path}.{name}", child)


@dataclass(frozen=True)
class Owner:
    """A module that holds tensors itself."""

    path: str  # in the base model
    module: nn.Module  # the base's, without the wrappers of adapters
    names: list[str]  # of the tensors, in the module
    has_parts: bool  # it also has modules in it that hold tensors, which must then keep their paths


def owners(path: str, module: nn.Module) -> Iterator[Owner]:
    """All modules in a module that hold tensors themselves.

    Unlike `tunable_modules`, none lies inside another's reach. What a module reads instead of calling it (parameter
    lists, parametrizations) is counted as the module's own.
    """
    for inner_path, inner in base_modules(path, module):
        read = [name for name, child in inner.named_children() if _is_read(name, child)]
        names = own_tensor_names(inner) + [f"{c}.{n}" for c in read for n in tensor_names(inner.get_submodule(c))]
        if names:
            called = [child for name, child in inner.named_children() if name not in read]
            has_parts = any(
                True for child in called if not isinstance(child, TunedInPlace) for _ in child.parameters()
            )
            yield Owner(inner_path, inner, names, has_parts)


def base_modules(path: str, module: nn.Module, seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """A module and all modules in it that can be called, as they are in the base model, each once."""
    seen = set() if seen is None else seen
    inner = bottom(module)
    if id(inner) in seen:
        return
    seen.add(id(inner))
    yield path, inner
    for name, child in inner.named_children():
        if not (_is_read(name, child) or isinstance(child, (TunedInPlace, AuxiliaryTrainingWrapper))):
            yield from base_modules(f"{path}.{name}" if path else name, child, seen)


def bottom(module: nn.Module) -> nn.Module:
    """The module inside the wrappers of adapters."""
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def innermost_tuned(module: Any) -> TunedModule | None:
    """The `TunedModule` among the wrappers of adapters around a module."""
    while not isinstance(module, TunedModule):
        if not isinstance(module, BaseTunerLayer):
            return None
        module = getattr(module, "base_layer")  # noqa: B009
    return module


def original_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """The base's own value of a module's tensor, whatever adapters are around it or merged into it.

    A bias that a linear module lacks is zero.
    """
    tuned = innermost_tuned(module) or module._modules.get(OWN_TENSORS)
    if isinstance(tuned, TunedModule):
        return tuned.original(name)
    inner = bottom(module)
    path, _, attribute = name.rpartition(".")
    tensor = getattr(inner.get_submodule(path), attribute)
    return zero_bias(inner) if tensor is None else tensor


def token_embeddings(model: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """A model's embeddings of tokens and its output embeddings; None for what it does not have."""
    found = []
    for get in ("get_input_embeddings", "get_output_embeddings"):
        try:
            embeddings = getattr(model, get, lambda: None)()
        except (NotImplementedError, AttributeError):  # transformers raises them for models of images and sounds
            embeddings = None
        found.append(embeddings if isinstance(embeddings, nn.Module) else None)  # Perceiver's are a parameter
    return found[0], found[1]


def zero_bias(linear: nn.Module) -> torch.Tensor:
    """The bias that a linear module without one could have: zeros, in the dtype that it computes in."""
    weight: Any = linear.weight
    dtype = weight.dtype if weight.is_floating_point() else getattr(linear, "compute_dtype", None)
    return torch.zeros(linear.out_features, dtype=dtype, device=weight.device)  # type: ignore[call-overload]


def tensor_names(module: nn.Module) -> list[str]:
    """The names of all parameters and persistent buffers of a module: what makes up its state."""
    persistent = module.state_dict(keep_vars=True)
    parameters = [name for name, _ in module.named_parameters()]
    return parameters + [name for name, _ in module.named_buffers() if name in persistent]


def own_tensor_names(module: nn.Module) -> list[str]:
    """The names of the parameters and persistent buffers that a module holds itself, not through its children."""
    buffers = [name for name in module._buffers if module._buffers[name] is not None]
    persistent = [name for name in buffers if name not in module._non_persistent_buffers_set]
    return [name for name, p in module._parameters.items() if p is not None] + persistent


def matches_any(path: str, names: Sequence[str] | None) -> bool:
    """Whether a module is, or lies in, one that PEFT's `modules_to_save` means by these names: ends of its path, so
    that `norm` also means an `input_layernorm`."""
    parts = path.split(".")
    return any(".".join(parts[: i + 1]).endswith(tuple(names or ())) for i in range(len(parts)))


def note_untied(model: nn.Module) -> None:
    """Tell each adapted module which of its base's parameters are used by others that are not tuned with it."""
    tuned = [module for module in model.modules() if isinstance(module, TunedModule)]
    places = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    entries = [(module, adapter, entry) for module in tuned for adapter, entry in module.tuned.items()]
    copies = Counter((module.identity(name), adapter) for module, adapter, entry in entries for name in entry.names)
    parted = {identity for (identity, _), count in copies.items() if count < places[identity]}
    for module in tuned:
        if not module.merged:
            shared = {name for name in module.names_of(module.tuned) if places[module.identity(name)] > 1}
            module.tied = {name for name in shared if module.identity(name) not in parted}
            module.untied = {name: cast(nn.Parameter, module.base_tensor(name)) for name in shared - module.tied}
    layers: list[Any] = [m for m in model.modules() if isinstance(m, LoraLayer) and hasattr(m, "untied")]
    for lora in layers:
        if not lora.merged:
            parameters = lora.get_base_layer().named_parameters(recurse=False)
            lora.untied = {name: p for name, p in parameters if places[id(p)] > 1}  # what LoRA adds is never tied


def forget_originals(model: nn.Module) -> None:
    """Let go of the values that were kept aside for undoing a merge."""
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.__dict__.pop("_original", None)


def admit_untied_embeddings(model: Any) -> None:
    """Make a merged model's config tell that its head has other weights than its embeddings, if that is so now."""
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        return
    config = model.config.get_text_config()
    embeddings, head = (getattr(module, "weight", None) for module in token_embeddings(model))
    if embeddings is None or head is None or not getattr(config, "tie_word_embeddings", False):
        return
    # the head may be tied to other embeddings than the model's first: those of its decoder
    is_tied = sum(p is head for _, p in model.named_parameters(remove_duplicate=False)) > 1
    if embeddings.data_ptr() != head.data_ptr() and not is_tied:
        logger.info("The head and the embeddings no longer share their weights: tie_word_embeddings is set to False.")
        config.tie_word_embeddings = model.config.tie_word_embeddings = False


def _is_read(name: str, module: nn.Module) -> bool:
    """Whether a module's parent reads its tensors instead of calling it."""
    return isinstance(module, (nn.ParameterList, nn.ParameterDict)) or name == "parametrizations"
