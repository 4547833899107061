"""What the tuners of this package have in common: checks, injection of `TunedModule`, switching, unloading."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_target_module_exists
from peft.utils.integrations import gather_params_ctx
from torch import nn
from typing_extensions import Self

from peft_surgical.copies.compute import leave_fused_path
from peft_surgical.copies.host import BaseOnHost, leave_base_out
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import innermost_tuned, note_untied
from peft_surgical.copies.variants import TunedInPlace
from peft_surgical.distributed import check_not_prepared
from peft_surgical.files.adapter import touched_names
from peft_surgical.files.base import base_tensors, check_base, check_class, describe_base
from peft_surgical.fisher.model_state import uninterrupted
from peft_surgical.methods import heads, rows, wrappers
from peft_surgical.methods.before_training import adapter_parameters, before_training
from peft_surgical.methods.combine import add_weighted_adapter
from peft_surgical.methods.held_buffers import keep_statistics
from peft_surgical.methods.report import TuningReport, tuning_report
from peft_surgical.methods.resolve import Matching, Resolution, check_adapter_name, shared_once, untrained_parameters
from peft_surgical.methods.saving import SavedState
from peft_surgical.names import OWN_TENSORS, without_wrappers


class DeltaTuner(SavedState, BaseTuner):
    """Base of `SurgicalModel` and `StratifiedModel`: tuners that give modules copies of their own tensors."""

    tuned_in_place_cls: type[TunedInPlace] = TunedInPlace
    target_module_mapping: dict[str, list[str]] = {}
    _frozen_on_purpose: frozenset[str] = frozenset()
    _copied: dict[int, nn.Parameter] = {}  # of the adapter being made, by id of the base's tensor
    _autocast: Mapping[str, bool] = {}  # by adapter: whether it is in float32 on a base in half precision
    _is_trained_set_checked = False
    _base_on_host: BaseOnHost | None = None
    leave_base_out = leave_base_out  # for `leave_base_out_of_units`
    resting: Sequence[nn.Parameter] = ()  # what `RotateLayers` does not train now; nothing else makes it trainable
    _flags: list[tuple[nn.Parameter, bool]] | None = None  # which were trainable, while adapters are disabled

    def __init__(self, model: nn.Module, peft_config: Any, adapter_name: str, *args: Any, **kwargs: Any):
        wrappers.check_alone(model, peft_config, adapter_name)
        super().__init__(model, peft_config, adapter_name, *args, **kwargs)
        if not isinstance(peft_config, dict):  # by `inject_adapter_in_model`, after which no tuner is around the model
            model.register_forward_pre_hook(keep_statistics)

    # ---- before the model is changed

    @abstractmethod
    def _resolve(self, config: Any, model: nn.Module) -> Resolution:
        """What a config means on a model. Layers and strata in the config become plain layer numbers."""

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict) -> Any:
        return peft_config  # no method here has default modules by model type

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Resolve what the config means on this model, and check what is loaded. Nothing is changed before this."""
        check_not_prepared(model, "get_peft_model, PeftModel.from_pretrained or load_adapter")
        if "_labels_of_base" not in self.__dict__:
            self._labels_of_base = heads.label_settings(model)
        file, base = peft_config.open_weights(), base_tensors(model)
        check_class(peft_config.record or {}, model, peft_config.present_name)
        names = [*(peft_config.modules_to_save or []), *heads.head_names(model, peft_config.task_type)]
        names += heads.changed_embeddings(file, model, base, names) if file is not None else []
        peft_config.modules_to_save = list(dict.fromkeys(names)) or None
        heads.check_trained_rows(model, peft_config, base)
        peft_config.resolution = shared_once(self._resolve(peft_config, model), model)
        tensors = self._touched_tensors(peft_config, model)
        saved = heads.saved_modules(model, peft_config.modules_to_save)
        parameters: Any = [*tensors.values(), *(p for module in saved for p in module.parameters())]
        self._gathered.enter_context(gather_params_ctx([p for p in parameters if hasattr(p, "ds_id")], None))
        if peft_config.record is None:
            peft_config.base = peft_config.record = describe_base(model, left_out=peft_config.modules_to_save or [])
            if peft_config.labels is None and heads.head_names(model, peft_config.task_type):
                peft_config.labels = heads.label_settings(model)
        elif peft_config.check_base:
            touched = {*tensors, *touched_names(file or ())}
            check_base(peft_config.record, model, {**base, **tensors}, touched, peft_config.present_name)
        if file is not None:
            self._hold_file(file, peft_config, model, tensors)

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """In here the weights that adapters are made of stay whole; under ZeRO-3 a model may be born sharded."""
        with ExitStack() as self._gathered:
            try:
                yield
            finally:
                del self._gathered  # it can be neither copied nor pickled with the model

    # ---- changing the model

    @staticmethod
    def _check_target_module_exists(peft_config: Any, key: str) -> Any:
        if key in peft_config.resolution.copies:
            return True
        if peft_config.target_modules is None and not peft_config.exclude_modules:
            return False
        found = check_target_module_exists(Matching.of(peft_config), key)
        return found if found is not True and not found else False  # keeps PEFT's marker of an excluded module

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
        if (names := peft_config.resolution.copies.get(current_key)) is None:
            raise ValueError(f"The weights have tensors for {current_key!r}, which their config does not choose.")
        options = {
            "init_weights": getattr(peft_config, "init_weights", True) is not False,
            "inference_mode": peft_config.inference_mode,
            "shared": {} if self._is_untied(target, names) else self._copied,
            # for inference an adapter of columns is like any other
            "columns": None if peft_config.inference_mode else peft_config.resolution.columns.get(current_key),
            "untrained": {n for n in names if f"{without_wrappers(current_key)}.{n}" in self._untrained},
        }
        in_place = current_key in peft_config.resolution.in_place
        tuned: Any = target._modules.get(OWN_TENSORS) if in_place else innermost_tuned(target)
        if tuned is not None:
            tuned.update_layer(adapter_name, names, **options)
        elif in_place:
            tuned = self.tuned_in_place_cls(target, adapter_name, names, **options)
            tuned.attach()
        else:
            while isinstance(target, BaseTunerLayer):  # other kinds of adapters are outside, and stay there
                parent, target_name, target = target, "base_layer", target.base_layer  # type: ignore[assignment]
            tuned = self._tuned_module_cls_for(target)(target, adapter_name, names, **options)
            setattr(parent, target_name, tuned)
        # a module that was wrapped just now has the new adapter active, which the tuner may not
        is_trained = adapter_name in self.active_adapters and not peft_config.inference_mode
        tuned.tuned[adapter_name].requires_grad_(is_trained)
        tuned._active_adapter = list(self.active_adapters)

    def _tuned_module_cls_for(self, module: nn.Module) -> type[TunedModule]:
        return self.tuned_module_cls

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        kept, is_bare = self.peft_config.keys() - {adapter_name}, not wrappers.has_wrappers(model)
        with wrappers.whole_or_not_at_all(self, kept, is_bare):
            check_adapter_name(adapter_name, model)
            self._autocast = {name: cast for name, cast in self._autocast.items() if name != adapter_name}
            frozen, present = self._frozen_on_purpose, {id(module) for module in model.modules()}
            given: Any = self.peft_config[adapter_name]
            if not given.inference_mode:  # what is loaded is resolved already, and PEFT expects that very config
                own = self.peft_config[adapter_name] = copy.copy(given)  # a user's may serve another model too
                own.resolution = None
            self._copied, self._untied = {}, set()
            if "_untrained" not in self.__dict__:
                self._untrained = untrained_parameters(model)
            with self._gathering(), given.naming_itself():
                super().inject_adapter(model, adapter_name, *args, **kwargs)
            # new modules take the mode of their model, so that an eval() model stays one with dropout in an adapter
            for module in [self, *(module for module in model.modules() if id(module) not in present)]:
                module.training = model.training
            note_untied(model)
            self._base_on_host = None
            leave_fused_path(model, lambda module: isinstance(module, BaseTunerLayer))
            config: Any = self.peft_config[adapter_name]
            config._is_unfilled = hasattr(config, "_source")
            self._frozen_on_purpose = frozen  # PEFT gives back the flags that it set meanwhile
            self._copied, self._untied = {}, set()
            if (labels := config.labels) and (of_base := self._labels_of_base):
                heads.resize_heads(model, adapter_name, labels["num_labels"], of_base["num_labels"])
            live, plain = wrappers.live_tensors(model, adapter_name).items(), self._remove_adapter_name_from_key
            shapes = {plain(name, adapter_name): tensor.shape for name, tensor in live}
            config.resolution = replace(config.resolution, shapes=shapes)
            self._sync_labels()

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        # an adapter that is loaded anew keeps its dtype: Trainer does so, without the option, to resume
        self._autocast = {adapter_name: autocast_adapter_dtype, **self._autocast}
        super()._cast_adapter_dtype(adapter_name, self._autocast[adapter_name])

    def _check_target_module_compatiblity(self, peft_config: Any, model: nn.Module, target_name: str) -> None:
        """PEFT's warning is about LoRA on Mamba's projections; copies of whole tensors have no such limit."""

    # ---- switching, disabling, deleting

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        with uninterrupted():  # with another adapter in some of its modules the model would answer as neither
            super().set_adapter(adapter_name, inference_mode=inference_mode)
            self._note_frozen(self.active_adapters, inference_mode)
            self._sync_labels()

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        super().set_requires_grad(adapter_names, requires_grad)
        self._note_frozen([adapter_names] if isinstance(adapter_names, str) else adapter_names, not requires_grad)

    def _note_frozen(self, adapter_names: Sequence[str], frozen: bool) -> None:
        self._flags = None  # what is set now holds, also if the adapters are disabled
        change = self._frozen_on_purpose.union if frozen else self._frozen_on_purpose.difference
        self._frozen_on_purpose = change(adapter_names)
        for parameter in self.resting:
            parameter.requires_grad_(False)
        self._is_trained_set_checked = False

    def _enable_adapter_layers(self, enabled: bool = True) -> None:
        with uninterrupted():  # likewise
            # PEFT makes the active adapters trainable when it enables them, whether or not they were before
            is_on = not any(m.disable_adapters for m in self.model.modules() if isinstance(m, BaseTunerLayer))
            if is_on and self._flags is None:
                self._flags = [(p, p.requires_grad) for _, p in adapter_parameters(self.model, list(self.peft_config))]
            super()._enable_adapter_layers(enabled)
            if enabled and self._flags is not None:
                for parameter, flag in self._flags:
                    parameter.requires_grad_(flag)
                self._flags = None
            self._sync_labels(enabled)

    def _sync_labels(self, enabled: bool = True) -> None:
        """Let the model's config tell of the labels of the active adapter, or of the base's own."""
        settings = self._labels_of_base
        if enabled:
            for name in self.active_adapters:
                settings = getattr(self.peft_config.get(name), "labels", None) or settings
        heads.apply_label_settings(self.model, settings)

    delete_adapter = wrappers.delete_adapter

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        wrappers.check_named(self, adapter_names)
        super().merge_adapter(adapter_names, safe_merge)

    def train(self, mode: bool = True) -> Self:
        """As in `nn.Module`, except that running statistics of frozen modules do not move in training."""
        super().train(mode)
        if mode:
            BaseOnHost.of(self).on_train_mode(self.model)
            keep_statistics(self.model)
        return self

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Called by PEFT around forward and generate; serves batches whose rows belong to different adapters."""
        names = kwargs.get("adapter_names")
        if torch.compiler.is_compiling() and names is None:
            yield
            return
        with ExitStack() as stack:
            if names is not None:
                beams = kwargs.get("num_beams") or 1
                stack.enter_context(rows.adapter_names_in_forward(self, names, [*args, *kwargs.values()], beams))
            elif self.training and torch.is_grad_enabled():
                before_training(self)
                stack.enter_context(self._held_buffers.during_forward(self.model))
            elif "_held_buffers" in self.__dict__:
                self._held_buffers.give_back()
            yield

    def add_weighted_adapter(
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: str = "linear",
        density: float | None = None,
        majority_sign_method: str = "total",
    ) -> None:
        """Add an adapter that combines others. It is not active at first.

        Args:
            adapters: The adapters to combine.
            weights: Their weights, which may be negative. Weights 1 and 0 give the first adapter's values.
            adapter_name: The name of the new adapter.
            combination_type: `"linear"` is the base plus the sum of weight times difference to the base. `"ties"`,
                `"dare_linear"`, `"dare_ties"` and `"magnitude_prune"` prune the differences of each tensor first, as
                PEFT does.
            density: The share of values that pruning keeps, above 0 and at most 1.
            majority_sign_method: For `"ties"`, `"total"` or `"frequency"`, see PEFT.

        Raises:
            ValueError: Unknown adapters or options, heads of different sizes, or choices of modules that no one
                configuration can express together.
        """
        add_weighted_adapter(self, adapters, weights, adapter_name, combination_type, density, majority_sign_method)

    @abstractmethod
    def _unite_choice(self, united: Any, configs: Sequence[Any]) -> None:
        """Make a config choose what any of several configs chooses."""

    def tuning_report(self) -> TuningReport:
        """What is trained at present, layer by layer, and how far down the backward pass goes."""
        return tuning_report(self.model)

    _unload_and_optionally_merge = wrappers.unload
