"""Take adapters out of a model again, one or all, with or without their weights merged into it."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from tqdm import tqdm

from peft_surgical.compat import check_adapters_not_merged, get_submodules
from peft_surgical.copies.compute import return_to_fused_path
from peft_surgical.copies.in_place import TunedInPlace
from peft_surgical.copies.select import admit_untied_embeddings, forget_originals


def unload(tuner: Any, merge: bool, progressbar: bool, safe_merge: bool, adapter_names: list[str] | None) -> Any:
    """Put the base's modules, merged or not, back in the places of their wrappers; the arguments are PEFT's."""
    wrapped = [
        (name, module)
        for name, module in tuner.model.named_modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
    ]
    if merge:
        tuner.merge_adapter(adapter_names, safe_merge)
    else:
        tuner.unmerge_adapter()
    done: list[str] = []
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


def delete_adapter(tuner: Any, adapter_name: str) -> None:
    """Delete one adapter; see `DeltaTuner.delete_adapter`."""
    if adapter_name not in tuner.peft_config:
        raise ValueError(f"Adapter {adapter_name} does not exist. Adapters: {', '.join(tuner.peft_config)}.")
    check_adapters_not_merged(tuner.model, adapter_name)
    was_active = adapter_name in tuner.active_adapters
    remaining = [name for name in tuner.active_adapters if name != adapter_name]
    del tuner.peft_config[adapter_name]
    if was_active and not remaining:
        remaining = list(tuner.peft_config)[:1]
        if remaining:
            warnings.warn(
                f"Adapter {adapter_name} was active which is now deleted. Setting active adapter to {remaining[0]}.",
                stacklevel=2,
            )
    if was_active and remaining:
        tuner.set_adapter(remaining)
    elif was_active:
        tuner.active_adapter = []
        tuner._sync_labels()
    for module in list(tuner.model.modules()):
        if isinstance(module, BaseTunerLayer):
            for attribute in module.adapter_layer_names + module.other_param_names:
                table = getattr(module, attribute)
                if adapter_name in table:
                    del table[adapter_name]
            if was_active and not remaining:
                module.set_adapter([])
        elif isinstance(module, AuxiliaryTrainingWrapper):
            module.delete_adapter(adapter_name, new_active_adapters=list(tuner.active_adapters))
    if "_backward_start" in tuner.__dict__:
        tuner._backward_start.look_again()  # it would hold on to the deleted tensors


def take_out_unfilled(tuner: Any, adapter_name: str) -> None:
    """Take out an adapter whose tensors could not be loaded, unless it had some before."""
    config: Any = tuner.peft_config[adapter_name]
    if not vars(config).pop("_is_unfilled", False):
        return
    if len(tuner.peft_config) == 1:
        unload(tuner, False, False, False, None)
    else:
        delete_adapter(tuner, adapter_name)


@contextmanager
def whole_or_not_at_all(tuner: Any, adapter_name: str, present: Collection[int]) -> Iterator[None]:
    """Take out what there is of an adapter if it cannot be made within the block; `present`: the modules before it."""
    try:
        yield
    except Exception:
        modules = [m for m in tuner.model.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
        if modules and not any(id(module) in present for module in modules):
            unload(tuner, False, False, False, None)
        for module in modules:
            for table in (getattr(module, name) for name in module.adapter_layer_names):
                if adapter_name in table:
                    del table[adapter_name]
        raise
