"""Take the adapters out of a model again, with or without their weights merged into it."""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, _get_submodules
from tqdm import tqdm

from peft_surgical.modules.tied_weights import admit_untied_embeddings, forget_originals
from peft_surgical.modules.tuned_module import TunedOwner


def unload(tuner: Any, merge: bool, progressbar: bool, safe_merge: bool, adapter_names: list[str] | None) -> Any:
    """Put the base's modules back in the places of their wrappers; the arguments are PEFT's.

    Returns:
        The model without wrappers: with the weights of the adapters if merged, else the base as it was.
    """
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
        if isinstance(module, TunedOwner):
            module.detach()
        if isinstance(module, TunedOwner) or any(name.startswith(f"{outer}.") for outer in done):
            continue
        done.append(name)
        parent, _, child_name = _get_submodules(tuner.model, name)
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
    if merge:
        admit_untied_embeddings(tuner.model)
    if hasattr(tuner.model, "peft_config"):
        del tuner.model.peft_config
    return tuner.model
