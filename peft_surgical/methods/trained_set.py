"""What is trained, compared with what the active adapters say is trained."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from peft_surgical.copies.module import TunedModule


def adapter_parameters(model: nn.Module, adapters: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of some adapters in a model, heads included, by their names in the model."""
    for path, module in model.named_modules():
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            for attribute in module.adapter_layer_names:
                table: Any = getattr(module, attribute)
                for name, parameter in table.named_parameters():
                    if name.partition(".")[0] in adapters:
                        yield f"{path}.{attribute}.{name}", parameter


def warn_of_surprises(tuner: Any, frozen_on_purpose: Collection[str] = ()) -> None:
    """Warn if something else is trained than the active adapters say.

    Frameworks and helpers (`prepare_model_for_kbit_training`) freeze or unfreeze parameters by their own rules.
    Without this, training would do nothing, or would change weights that are not saved, in silence.

    Args:
        tuner: The tuner.
        frozen_on_purpose: Adapters that were frozen by PEFT's own functions.
    """
    for_inference = [name for name in tuner.active_adapters if tuner.peft_config[name].inference_mode]
    active = [name for name in tuner.active_adapters if name not in {*frozen_on_purpose, *for_inference}]
    declared = dict(adapter_parameters(tuner.model, active))
    if for_inference and not any(parameter.requires_grad for parameter in tuner.model.parameters()):
        warnings.warn(
            f"The model is in training mode, but adapter {for_inference[0]!r} was loaded for inference, so that "
            "nothing is trained. Load it with is_trainable=True, or call model.eval().",
            stacklevel=2,
        )
    if frozen := [name for name, parameter in declared.items() if not parameter.requires_grad]:
        warnings.warn(
            f"{len(frozen)} of the {len(declared)} tensors that the adapters {active} train are frozen, e.g. "
            f"{frozen[0]}: something froze them after the adapter was made, as prepare_model_for_kbit_training does. "
            f"Call it before, or model.set_requires_grad({active}) after it.",
            stacklevel=2,
        )
    own = {id(parameter) for _, parameter in adapter_parameters(tuner.model, list(tuner.peft_config))}
    if loose := [name for name, p in tuner.model.named_parameters() if p.requires_grad and id(p) not in own]:
        warnings.warn(
            f"{len(loose)} tensors of the base model are trained, e.g. {loose[0]}, which no adapter holds: they are "
            "not saved with the adapter and stay changed when it is disabled. Freeze them with requires_grad_(False), "
            "or name their modules in modules_to_save.",
            stacklevel=2,
        )


def frozen_statistics(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with running statistics that no active adapter tunes; the base's statistics must not move."""
    tuned: set[int] = set()
    for module in model.modules():
        if isinstance(module, TunedModule):
            names = {name for a in module.active_adapters if a in module.tuned for name in module.tuned[a].names}
            for path, inner in module.base_layer.named_modules():
                if f"{path}.running_mean".lstrip(".") in names:
                    tuned.add(id(inner))
        elif isinstance(module, ModulesToSaveWrapper):
            tuned.update(id(m) for m in module.modules_to_save.modules())
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None and id(module) not in tuned:
            if not isinstance(module, (TunedModule, AuxiliaryTrainingWrapper)):
                yield module
