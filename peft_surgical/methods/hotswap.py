"""Put another adapter's values into the tensors of one that is in the model, so that nothing recompiles.

PEFT's own `peft.utils.hotswap.hotswap_adapter(model, path, adapter_name)` comes here for the methods of this package.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import hotswap
from peft.utils.other import ModulesToSaveWrapper, set_additional_trainable_modules
from torch import nn

from peft_surgical.compat import get_submodules, insert_adapter_name
from peft_surgical.copies.columns import ColumnTensors
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import innermost_tuned
from peft_surgical.files.check import check_tied
from peft_surgical.fisher.model_state import uninterrupted
from peft_surgical.layers import LayerSpec
from peft_surgical.methods.combine import united_config
from peft_surgical.methods.heads import take_out_own
from peft_surgical.methods.saving import decode_state
from peft_surgical.methods.tuner import DeltaTuner
from peft_surgical.methods.wrappers import live_tensors
from peft_surgical.names import OWN_TENSORS, PREFIX, CopyName, as_in_file, own_names, without_wrappers


def prepare_model_for_hotswap(
    model: nn.Module,
    *,
    layers: LayerSpec | None = None,
    adapters: Iterable[str | os.PathLike] = (),
    adapter_name: str = "default",
) -> None:
    """Give an adapter room for adapters that tune other modules, which are to be swapped in later.

    The adapter computes the same as before. Call this before `torch.compile` and before the optimizer is made.

    Args:
        model: The `PeftModel` with the adapter.
        layers: The layers that later adapters may tune, e.g. `"all"`; for `SurgicalConfig` only.
        adapters: Saved adapters that are to be swapped in: their modules are made room for.
        adapter_name: The adapter in the model.

    Raises:
        ValueError: No one configuration can express what is to be made room for.
        TypeError: The model is not a `PeftModel` with an adapter of this package.

    Example:

        >>> from peft import get_peft_model
        >>> from peft_surgical import SurgicalConfig
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(num_hidden_layers=3, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> model = get_peft_model(BertModel(config), SurgicalConfig(layers=[2]))
        >>> prepare_model_for_hotswap(model, layers="last:2")
        >>> model.peft_config["default"].layers
        [1, 2]
    """
    tuner = _tuner(model, adapter_name)
    configs = {adapter_name: tuner.peft_config[adapter_name]}
    if layers is not None:
        if not hasattr(configs[adapter_name], "layers"):
            raise ValueError(
                f"layers={layers!r} says nothing about strata. Name the saved adapters that are to be swapped in: "
                "adapters=[...]."
            )
        wider = configs["layers"] = copy.copy(configs[adapter_name])
        wider.layers, wider.base = layers, None
        vars(wider).pop("_source", None)
    for path in adapters:
        configs[str(path)] = PeftConfig.from_pretrained(str(path))
    with tuner._gathering():
        for name, config in configs.items():
            if name != adapter_name:
                tuner._prepare_model(config, tuner.model)
        united = united_config(tuner, configs)
        united.inference_mode = configs[adapter_name].inference_mode
        tuner._prepare_model(united, tuner.model)
        _make_room(tuner, adapter_name, united)
    tuner.peft_config[adapter_name] = united


def swap_in(model: nn.Module, state: Mapping[str, torch.Tensor], adapter_name: str, config: Any) -> None:
    """Put a saved adapter's values into an adapter of the model. Modules that it does not tune get the base's values.

    Nothing is changed if it does not fit: another base, modules that have no room here, another shape. Ctrl-C waits
    for the values to be in place.
    """
    tuner = _tuner(model, adapter_name)
    if any(adapter_name in m.merged_adapters for m in tuner.model.modules() if isinstance(m, BaseTunerLayer)):
        raise ValueError(f"Adapter {adapter_name!r} is merged into the base. Call unmerge_adapter() first.")
    tuned = [m.tuned[adapter_name] for m in model.modules() if isinstance(m, TunedModule) and adapter_name in m.tuned]
    if any(isinstance(entry, ColumnTensors) for entry in tuned):
        raise ValueError(
            f"Adapter {adapter_name!r} trains columns of weights, and has room for no others. Save it and load it for "
            "inference, then swap others in."
        )
    own = tuner.peft_config[adapter_name]
    if type(own) is not type(config):
        raise ValueError(
            f"Adapter {adapter_name!r} is of type {own.peft_type.value}, the one to swap in {config.peft_type.value}."
        )
    if isinstance(config, LoraConfig) and (config.rank_pattern or config.alpha_pattern):
        raise ValueError(
            "The adapter to swap in has rank_pattern or alpha_pattern, which PEFT's hot swap passes over. Load it "
            f"beside {adapter_name!r} instead: load_adapter, then set_adapter."
        )
    with config.naming_itself():
        with tuner._gathering():
            tuner._prepare_model(config, tuner.model)
        state = {config.present_name(name): state[name] for name in own_names(state)}
        state = decode_state(_peft_model(model), adapter_name, state, tuner._remove_adapter_name_from_key)
        lora = {name: tensor for name, tensor in state.items() if ".lora_" in name and CopyName.parse(name) is None}
        copies = {name: tensor for name, tensor in state.items() if name not in lora}
        pairs = list(_pairs(tuner, adapter_name, copies))
        take_out_own(copies, tuner.model, config)
        _check_pairs(pairs, copies, adapter_name)
        check_tied({key: value for key, _, value in pairs}, {key: target for key, target, _ in pairs}, adapter_name)
    with uninterrupted(), torch.no_grad():
        if isinstance(config, LoraConfig):  # PEFT swaps its matrices and scalings; those that are not there become 0
            named = insert_adapter_name(lora, adapter_name, "lora_")
            inspect.unwrap(hotswap.hotswap_adapter_from_state_dict)(model, named, adapter_name, config)
        for _, target, value in pairs:
            target.copy_(value)
        own.labels, own.ranking_record = config.labels, config.ranking_record
        tuner._sync_labels()


Pair = tuple[str, torch.Tensor, torch.Tensor]
"""A tensor's name in the file, the tensor in the model, and what is to be put into it."""


def _pairs(tuner: Any, adapter_name: str, state: Mapping[str, torch.Tensor]) -> Iterator[Pair]:
    for path, module in tuner.model.named_modules():
        if isinstance(module, TunedModule) and adapter_name in module.tuned:
            entry = module.tuned[adapter_name].wake()
            for name in entry.names:
                key = module.copy_name(path, name).in_file
                yield key, entry[name], state.get(key, module.original(name))
        elif isinstance(module, ModulesToSaveWrapper) and adapter_name in module.modules_to_save:
            base = module.original_module.state_dict()
            for name, target in module.modules_to_save[adapter_name].state_dict().items():  # type: ignore[operator]
                key = f"{PREFIX}{without_wrappers(path)}.{name}"
                yield key, target, state.get(key, base[name])


def _check_pairs(pairs: Sequence[Pair], state: Mapping[str, torch.Tensor], adapter_name: str) -> None:
    for key, target, value in pairs:
        if target.shape != value.shape:
            raise ValueError(
                f"{key} has shape {tuple(value.shape)} in the adapter to swap in and {tuple(target.shape)} in adapter "
                f"{adapter_name!r}. Load it beside that one instead: load_adapter, then set_adapter."
            )
    if unknown := sorted(set(state) - {key for key, _, _ in pairs}):
        raise ValueError(
            f"The adapter to swap in tunes {unknown[0]}, for which adapter {adapter_name!r} has no room. Call "
            'prepare_model_for_hotswap(model, layers="all"), or adapters=[...] with the folders of all adapters to '
            "come, before the model is compiled."
        )


def _make_room(tuner: Any, adapter_name: str, united: Any) -> None:
    before = {as_in_file(name): tensor.clone() for name, tensor in live_tensors(tuner.model, adapter_name).items()}
    for path in dict.fromkeys([*united.resolution.copies, *united.resolution.lora]):
        parent, target, target_name = get_submodules(tuner.model, path)
        if not _has_room(target, path, adapter_name, united):
            tuner._create_and_replace(united, adapter_name, target, target_name, parent, current_key=path)
    further = copy.copy(united)
    present = tuner.peft_config[adapter_name].modules_to_save or []
    further.modules_to_save = [name for name in united.modules_to_save or [] if name not in present]
    further.trainable_token_indices = None
    set_additional_trainable_modules(tuner.model, further, {}, adapter_name, adapter_name in tuner.active_adapters)
    with torch.no_grad():
        for name, tensor in live_tensors(tuner.model, adapter_name).items():
            if as_in_file(name) in before:
                tensor.copy_(before[as_in_file(name)])
    tuner._cast_adapter_dtype(adapter_name, torch.float32 in {tensor.dtype for tensor in before.values()})
    tuner.set_adapter(tuner.active_adapters, inference_mode=united.inference_mode)


def _has_room(target: nn.Module, path: str, adapter_name: str, united: Any) -> bool:
    tuned = target._modules.get(OWN_TENSORS) if path in united.resolution.in_place else innermost_tuned(target)
    names = tuned.tuned[adapter_name].names if isinstance(tuned, TunedModule) and adapter_name in tuned.tuned else ()
    has_lora = isinstance(target, LoraLayer) and adapter_name in target.r
    wanted = united.resolution.copies.get(path, ())
    return set(wanted) <= set(names) and (has_lora or path not in united.resolution.lora)


def _peft_model(model: nn.Module) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _tuner(model: nn.Module, adapter_name: str) -> Any:
    peft_model = _peft_model(model)
    tuner = peft_model.base_model if isinstance(peft_model, PeftModel) else None
    if not isinstance(tuner, DeltaTuner):
        raise TypeError(
            f"Hot-swapping needs the PeftModel with the adapter, of type SURGICAL or STRATIFIED; this is a "
            f"{type(peft_model).__name__}."
        )
    if adapter_name not in tuner.peft_config:
        raise ValueError(f"There is no adapter {adapter_name!r}. Adapters: {', '.join(tuner.peft_config)}.")
    return tuner
