"""The wrappers that adapters put into a model, and take out again, one or all."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from tqdm import tqdm

from peft_surgical.compat import check_adapters_not_merged, get_submodules
from peft_surgical.copies.compute import return_to_fused_path
from peft_surgical.copies.host import HostedBase
from peft_surgical.copies.select import admit_untied_embeddings, forget_originals
from peft_surgical.copies.variants import TunedInPlace
from peft_surgical.files.check import checked
from peft_surgical.fisher.model_state import uninterrupted
from peft_surgical.names import without_engines


def has_wrappers(model: nn.Module) -> bool:
    """Whether any adapter has put something into the model."""
    return any(isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for module in model.modules())


def live_tensors(model: nn.Module, adapter_name: str) -> dict[str, torch.Tensor]:
    """All tensors of an adapter in a model, head included, by their names in the model."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)) or getattr(module, "tied_adapter", None):
            continue
        for name in (*module.adapter_layer_names, *module.other_param_names):
            table: Any = getattr(module, name, ())
            is_saved = name in module.adapter_layer_names or getattr(table, "persistent", False)
            if not is_saved or adapter_name not in table:
                continue
            prefix = without_engines(f"{path}.{name}.{adapter_name}")
            if isinstance(entry := table[adapter_name], nn.Module):
                found.update({f"{prefix}.{key}": value for key, value in entry.state_dict().items()})
            else:
                found[prefix] = entry
    return found


# ---- put in


def check_alone(model: nn.Module, config: Any, name: str) -> None:
    """Refuse a model in which another `PeftModel` has an adapter of this name, or of another kind."""
    present = getattr(model, "peft_config", None) or {}  # also what was unloaded
    if not has_wrappers(model):
        return
    kind = (config[name] if isinstance(config, dict) else config).peft_type
    if name in present or any(other.peft_type != kind for other in present.values()):
        raise ValueError(
            f"The model has the adapters {[*present]} from another call of get_peft_model or "
            f"PeftModel.from_pretrained, so {name!r} ({kind.value}) cannot be put into it. Take them out first, with "
            "unload() of that PeftModel; or add one of the same kind and another name, with its add_adapter or "
            "load_adapter."
        )


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Let what is put into the model in the block see the base's own modules; it goes outside of their wrappers."""
    places = list(_outer_wrappers(model))
    try:
        for parent, name, wrapper in places:
            setattr(parent, name, wrapper.get_base_layer())
        yield
    finally:
        for parent, name, wrapper in places:
            if (now := getattr(parent, name)) is wrapper.get_base_layer():
                setattr(parent, name, wrapper)
            else:
                now.base_layer = wrapper


def _outer_wrappers(module: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    for name, child in module.named_children():
        if isinstance(child, BaseTunerLayer) and not isinstance(child, TunedInPlace):
            yield module, name, child
        else:
            yield from _outer_wrappers(child)


# ---- taken out


def unload(
    tuner: Any,
    merge: bool = True,
    progressbar: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> Any:
    """Put the base's modules, merged or not, back in the places of their wrappers; the arguments are PEFT's."""
    wrapped = [
        (name, module)
        for name, module in tuner.model.named_modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    ]
    if merge:
        _merge_with_heads(tuner, adapter_names, safe_merge)
    else:
        tuner.unmerge_adapter()
    for _, module in wrapped:
        if isinstance(module, HostedBase):
            module.take_in()
    done: list[str] = []
    with uninterrupted():  # with some of its wrappers the model would answer as neither
        for name, module in tqdm(wrapped, disable=not progressbar, desc="Unloading"):
            if isinstance(module, TunedInPlace):
                module.detach()
            if isinstance(module, TunedInPlace) or any(name.startswith(f"{outer}.") for outer in done):
                continue
            done.append(name)
            parent, _, child_name = get_submodules(tuner.model, name)
            if isinstance(module, AuxiliaryTrainingWrapper) and not merge:
                plain = module.original_module  # PEFT itself would leave the trained head in the base
            elif hasattr(module, "unload_and_optionally_merge_module"):
                plain = module.unload_and_optionally_merge_module(
                    merge=merge, safe_merge=safe_merge, adapter_names=adapter_names
                )
            else:
                plain = module.get_base_layer()
            setattr(parent, child_name, plain)
    tuner._sync_labels(enabled=merge)
    forget_originals(tuner.model)
    return_to_fused_path(tuner.model)
    if merge:
        admit_untied_embeddings(tuner.model)
    if hasattr(tuner.model, "peft_config"):
        del tuner.model.peft_config
    return tuner.model


def _merge_with_heads(tuner: Any, adapter_names: list[str] | None, safe_merge: bool) -> None:
    """Merge adapters, of which the head and the labels are those that are active."""
    check_named(tuner, adapter_names)
    layers = [module for module in tuner.model.modules() if isinstance(module, BaseTunerLayer)]
    active, merged = tuner.active_adapters, [name for layer in layers for name in layer.merged_adapters]
    if adapter_names is not None:
        tuner.set_adapter(list(dict.fromkeys([*merged, *adapter_names])))
    try:
        tuner.merge_adapter(safe_merge=safe_merge)
    except BaseException:
        tuner.set_adapter(active)
        raise


def check_named(tuner: Any, adapter_names: Sequence[str] | None) -> None:
    """Refuse to merge adapters that there are not; PEFT would merge nothing, and give the base."""
    if adapter_names is not None and (not adapter_names or set(adapter_names) - tuner.peft_config.keys()):
        raise ValueError(f"adapter_names={adapter_names!r}: the adapters to merge are of {[*tuner.peft_config]}.")


def delete_adapter(tuner: Any, adapter_name: str) -> None:
    """Delete an adapter. If it was the active one, the oldest remaining one becomes active on all modules."""
    if adapter_name not in tuner.peft_config:
        raise ValueError(f"Adapter {adapter_name} does not exist. Adapters: {', '.join(tuner.peft_config)}.")
    check_adapters_not_merged(tuner.model, adapter_name)
    remaining = [name for name in tuner.active_adapters if name != adapter_name]
    with uninterrupted():  # what is left of it would keep its name from being used again
        if adapter_name in tuner.active_adapters:  # PEFT would choose another one module by module
            if not remaining and len(tuner.peft_config) > 1:
                remaining = [name for name in tuner.peft_config if name != adapter_name][:1]
                text = f"Adapter {adapter_name} was active which is now deleted. Setting active adapter to"
                warnings.warn(f"{text} {remaining[0]}.", stacklevel=2)
            if remaining:
                tuner.set_adapter(remaining)
        BaseTuner.delete_adapter(tuner, adapter_name)
        tuner.active_adapter = remaining  # PEFT asks the first module, which may have no adapter left
        tuner._sync_labels()
        tuner._base_on_host = None
        if "_backward_start" in tuner.__dict__:
            tuner._backward_start.look_again()  # it would hold on to the deleted tensors


def take_out_unfilled(tuner: Any, adapter_name: str) -> None:
    """Take out an adapter whose tensors could not be loaded, unless it had some before."""
    if isinstance(tuner, BaseTuner) and getattr(tuner.peft_config[adapter_name], "_is_unfilled", False):
        _take_out(tuner, adapter_name, is_first=len(tuner.peft_config) == 1)  # else it had some, or is of transformers


def _take_out(tuner: Any, adapter_name: str, is_first: bool) -> None:
    if is_first:  # with all wrappers
        unload(tuner, merge=False)
        del tuner.peft_config[adapter_name]
    else:
        delete_adapter(tuner, adapter_name)


@contextmanager
def whole_or_not_at_all(tuner: Any, kept: Collection[str], is_first: bool = False) -> Iterator[None]:
    """Take out all adapters but those `kept` if the block is not run to its end, by an interrupt too: those that are
    made or loaded in it would answer with a part of their tensors. Of the first adapter its wrappers go too; those of
    a `DeltaBank`, which knows of more adapters than the tuner does, stay."""
    flags, frozen = [(p, p.requires_grad) for p in tuner.model.parameters()], tuner._frozen_on_purpose
    try:
        yield
    except BaseException:
        checked.take(None, None)  # what was read for it
        for name in [name for name in tuner.peft_config if name not in kept]:
            _take_out(tuner, name, is_first)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        tuner._frozen_on_purpose = frozen
        raise
