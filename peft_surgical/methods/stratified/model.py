"""SPAFIT and strata of any kind: layers that are frozen, or get trained biases, norms, LoRA or all weights.

Arora & Wang (2024), "SPAFIT: Stratified Progressive Adaptation Fine-tuning for Pre-trained Large Language Models".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.other import get_pattern_key
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_surgical.compat import ExcludedModule
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import base_modules, bottom, original_tensor
from peft_surgical.files.base import check_base
from peft_surgical.methods.combine import LoraCombination, add_weighted_adapter
from peft_surgical.methods.register import register_method
from peft_surgical.methods.resolve import Matching, Resolution, expand_all_linear
from peft_surgical.methods.stratified.config import StratifiedConfig
from peft_surgical.methods.stratified.layers import RestoresBase, StratifiedInPlace, StratifiedModule, make_restoring
from peft_surgical.methods.stratified.strata import plain_strata, resolve_strata, unite_strata
from peft_surgical.methods.stratified.tensors import check_choice, choose
from peft_surgical.methods.tuner import DeltaTuner
from peft_surgical.methods.wrappers import check_named, has_wrappers, live_tensors, whole_or_not_at_all
from peft_surgical.names import PREFIX, without_wrappers


class StratifiedModel(DeltaTuner, LoraModel):  # type: ignore[misc]
    """The tuner behind `StratifiedConfig`. Made by `get_peft_model` and `PeftModel.from_pretrained`."""

    prefix: str = "lora_"
    tuner_layer_cls = BaseTunerLayer  # type: ignore[assignment]
    tuned_module_cls = StratifiedModule
    tuned_in_place_cls = StratifiedInPlace

    # ---- before the model is changed

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        LoraModel._prepare_model(self, peft_config, model)
        peft_config.open_weights()  # which tells of the base
        if peft_config.record is not None and peft_config.check_base:
            # another depth is another base; the strata, which then do not fit either, are not at fault
            check_base({**peft_config.record, "tensors": {}}, model, {}, ())
        super()._prepare_model(peft_config, model)

    def _resolve(self, config: Any, model: nn.Module) -> Resolution:
        if not config.is_stratified:
            if config.target_modules is None and not config.target_parameters:
                raise ValueError(
                    "StratifiedConfig does not say what to tune. Give n1=... and n2=..., or strata=[...], or "
                    "target_modules=[...] for LoRA alone."
                )
            expand_all_linear(config, model)
            paths = (path for path, _ in base_modules("", model) if check_target_module_exists(config, path))
            return Resolution({}, lora=frozenset(paths))

        strata = resolve_strata(model, config)
        choice = choose(strata, config)
        check_choice(choice, model, use_dora=config.use_dora)
        config.strata = plain_strata(strata, model)
        config.n1 = config.n2 = config.variant = None
        if not choice.lora and not choice.copies:
            if not config.modules_to_save and not config.trainable_token_indices:
                raise ValueError(
                    f"strata={config.strata!r} leave all layers frozen, and nothing else is trained. Tune a stratum, "
                    "name modules in modules_to_save, or give a task_type whose head is trained, e.g. 'SEQ_CLS'."
                )
            config.target_modules = DUMMY_TARGET_MODULES  # PEFT's word for an adapter that adapts no module
        return choice

    def _touched_tensors(self, config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        touched = super()._touched_tensors(config, model)
        for path in config.resolution.lora:
            module = model.get_submodule(path)
            if isinstance(getattr(bottom(module), "weight", None), torch.Tensor):
                touched[f"{without_wrappers(path)}.weight"] = original_tensor(module, "weight")
        return touched

    def _expected_tensors(self, config: Any, model: nn.Module) -> dict[str, torch.Size]:
        shapes = super()._expected_tensors(config, model)
        if getattr(config, "use_bdlora", None):  # of other shapes, which are checked when the adapter is in place
            return shapes
        for path in config.resolution.lora:
            module = bottom(model.get_submodule(path))
            r = config.rank_pattern.get(get_pattern_key([*config.rank_pattern], path), config.r)
            if isinstance(module, Conv1D):
                inputs, outputs = module.weight.shape
            elif isinstance(module, nn.Linear):
                inputs, outputs = module.in_features, module.out_features
            else:
                continue
            key = f"{PREFIX}{without_wrappers(path)}"
            shapes[f"{key}.lora_A.weight"] = torch.Size((r, inputs))
            shapes[f"{key}.lora_B.weight"] = torch.Size((outputs, r))
        return shapes

    def _is_known_tensor(self, config: Any, model: nn.Module) -> Callable[[str], bool]:
        is_known = super()._is_known_tensor(config, model)
        # tensors of LoRA's variants and on other modules; checked when the adapter is in place
        return lambda name: is_known(name) or f".{self.prefix}" in name

    @classmethod
    def _may_be_saved_along(cls, config: Any, model: nn.Module) -> Callable[[str], bool]:
        is_known = super()._may_be_saved_along(config, model)
        # LoRA alone may have PEFT's own bias="all", which trains the base's biases and saves them
        return lambda name: is_known(name) or (name.endswith(".bias") and config.bias != "none")

    @classmethod
    def _convert_state_dict_for_initial_model(cls, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "path_initial_model_for_weight_conversion is not for adapters of StratifiedConfig: PEFT would keep LoRA's "
            "matrices alone, without copies and heads. Save the adapter without it, or merge it; for LoRA that is to "
            "be converted use peft's LoraConfig."
        )

    def _unite_choice(self, united: Any, configs: Sequence[Any]) -> None:
        stratified = [config.is_stratified for config in configs]
        if any(config.target_parameters for config in configs) or any(stratified) != all(stratified):
            raise ValueError(
                "Adapters with strata cannot be brought together with adapters without, and none that have "
                "target_parameters."
            )
        if all(stratified):
            united.strata = unite_strata(self.model, configs)
            united.target_modules = None  # each stratum has its own
        else:
            united.target_modules = set().union(*(config.resolution.lora for config in configs))
            united.exclude_modules = united.layers_to_transform = united.layers_pattern = None

    def add_weighted_adapter(  # type: ignore[override]
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str = "svd",
        svd_rank: int | None = None,
        svd_clamp: float | None = None,
        svd_full_matrices: bool = True,
        svd_driver: str | None = None,
        density: float | None = None,
        majority_sign_method: str = "total",
    ) -> None:
        """Add an adapter that combines others. It is not active at first.

        Copies of base tensors (biases, norms, whole weights) and heads are combined as in `SurgicalModel`. LoRA's
        matrices are combined as in PEFT: `"cat"` is exact, all others cut the combined difference to a rank.

        Args:
            adapters: The adapters to combine.
            weights: Their weights, which may be negative.
            adapter_name: The name of the new adapter.
            combination_type: `"cat"`, `"svd"`, `"linear"`, or one of PEFT's prunings with or without `_svd`.
            svd_rank: The rank to cut to; the highest of the ranks if None.
            svd_clamp: See PEFT.
            svd_full_matrices: See PEFT.
            svd_driver: See PEFT.
            density: The share of values that pruning keeps, above 0 and at most 1.
            majority_sign_method: For `"ties"`, `"total"` or `"frequency"`, see PEFT.

        Raises:
            ValueError: Unknown adapters or options, heads of different sizes, or strata or ranks that no one
                configuration can express together.
        """
        svd = {"clamp": svd_clamp, "full_matrices": svd_full_matrices, "driver": svd_driver}
        lora = LoraCombination(combination_type, svd_rank, svd, density, majority_sign_method)
        add_weighted_adapter(
            self, adapters, weights, adapter_name, lora.kind_of_copies, density, majority_sign_method, lora
        )

    # ---- changing the model

    @staticmethod
    def _check_target_module_exists(peft_config: Any, key: str) -> Any:
        if not peft_config.is_stratified:
            return check_target_module_exists(peft_config, key)
        if key in peft_config.resolution.copies or key in peft_config.resolution.lora:
            return True
        found = check_target_module_exists(Matching([], peft_config.exclude_modules, peft_config.modules_to_save), key)
        return found if isinstance(found, ExcludedModule) else False

    def _create_and_replace(  # type: ignore[override]
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **kwargs: Any,
    ) -> None:
        gets_lora = not peft_config.is_stratified or current_key in peft_config.resolution.lora
        if current_key in peft_config.resolution.copies or not gets_lora:
            super()._create_and_replace(peft_config, adapter_name, target, target_name, parent, current_key)
            target = getattr(parent, target_name)
        if gets_lora:
            if isinstance(bottom(target), (nn.Linear, Conv1D)):
                peft_config.fan_in_fan_out = isinstance(bottom(target), Conv1D)
            LoraModel._create_and_replace(
                self, peft_config, adapter_name, target, target_name, parent, current_key, **kwargs
            )

    @staticmethod
    def _create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> Any:
        return make_restoring(LoraModel._create_new_module(lora_config, adapter_name, target, **kwargs), adapter_name)

    def _check_target_module_compatiblity(self, peft_config: Any, model: nn.Module, target_name: str) -> None:
        LoraModel._check_target_module_compatiblity(self, peft_config, model, target_name)

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        if any(module.merged for module in self._tuner_layers()):
            warnings.warn("An adapter cannot be added while others are merged. Unmerging them first.", stacklevel=2)
            self.unmerge_adapter()
        with whole_or_not_at_all(self, self.peft_config.keys() - {adapter_name}, not has_wrappers(model)):
            super().inject_adapter(model, adapter_name, *args, **kwargs)
            config: Any = self.peft_config[adapter_name]
            is_meta = any(tensor.is_meta for tensor in live_tensors(model, adapter_name).values())
            if is_meta and getattr(config, "monteclora_config", None):  # PEFT makes no sampler there, nor loads it
                raise ValueError(
                    "An adapter with monteclora_config cannot be loaded by low_cpu_mem_usage=True. Drop it."
                )
            for module in self._tuner_layers() if config.resolution.copies else ():
                if isinstance(module, RestoresBase):
                    module.beside_copies = module.beside_copies | {adapter_name}

    def delete_adapter(self, adapter_name: str) -> None:
        super().delete_adapter(adapter_name)
        for module in self._tuner_layers():
            if isinstance(module, LoraLayer):
                module.lora_variant.pop(adapter_name, None)
            if isinstance(module, RestoresBase):
                module.beside_copies = module.beside_copies - {adapter_name}

    # ---- merging

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Put adapters into the base, whose own values are kept aside for `unmerge_adapter`.

        Args:
            adapter_names: The adapters; the active ones if None.
            safe_merge: Check that the merged values are finite first.
        """
        check_named(self, adapter_names)
        # copies stand for the base's weights, to which LoRA adds: they go first
        modules = sorted(self._tuner_layers(), key=lambda module: not isinstance(module, TunedModule))
        merged = list(dict.fromkeys(name for module in modules for name in module.merged_adapters))
        wanted = [list(adapter_names if adapter_names is not None else m.active_adapters) for m in modules]
        if merged and not set().union(*wanted) - set(merged):
            warnings.warn("All adapters are already merged, nothing to do.", stacklevel=2)
            return
        if merged:  # start afresh, so that the order of merging makes no difference
            self.unmerge_adapter()
        self._check_merge_allowed()
        for module, names in zip(modules, wanted, strict=True):
            module.merge(safe_merge=safe_merge, adapter_names=list(dict.fromkeys([*merged, *names])))

    def unmerge_adapter(self) -> None:
        """Give the base its own values back, bit for bit; quantised weights as nearly as PEFT can."""
        for module in self._tuner_layers():
            if module.merged:
                module.unmerge()

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        copies = [module for module in self._tuner_layers() if isinstance(module, StratifiedModule)]
        model = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        if any(module.has_added_bias for module in copies):
            warnings.warn(
                "The merged model has biases that its architecture does not have (add_bias=True). It computes with "
                "them, but from_pretrained would leave them out: keep the adapter's file.",
                stacklevel=3,
            )
        return model

    def _tuner_layers(self) -> list[Any]:
        """All adapted modules, an outer one before those inside it."""
        return [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]


_ALIKE_TO_SWAP = ("use_rslora", "lora_dropout", "alpha_pattern", "use_dora")
register_method("STRATIFIED", StratifiedConfig, StratifiedModel, _ALIKE_TO_SWAP)
