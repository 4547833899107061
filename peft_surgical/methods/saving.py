"""From the adapter in a model to the tensors of its file, and back: PEFT's hooks for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from peft_surgical.copies.columns import ColumnTensors, input_dim
from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import original_tensor
from peft_surgical.distributed import engine_of, rank, whole_weights
from peft_surgical.files.adapter import decode_tensors, encode_tensor, is_encoded, touched_names
from peft_surgical.files.base import base_tensors, check_base, with_vocabulary
from peft_surgical.files.check import (
    StateOfFile,
    check_gathered,
    check_tensors,
    check_tied,
    decoded_shapes,
    differing,
    read_state,
    sharded,
)
from peft_surgical.files.encodings import check_encoding
from peft_surgical.files.safetensors_io import TensorFile
from peft_surgical.layers import unwrap
from peft_surgical.methods.heads import (
    TRAINED_TOKENS,
    check_own,
    embedding_tensors,
    head_shapes,
    take_out_own,
    trained_rows,
)
from peft_surgical.methods.wrappers import take_out_unfilled
from peft_surgical.names import (
    PREFIX,
    as_attribute,
    as_in_file,
    base_path,
    is_of_peft,
    own_names,
    without_engines,
    without_wrappers,
)


def prefix_of_peft_model(names: Iterable[str]) -> str:
    """What a `PeftModel` puts before the names of its base model's tensors; empty if these are not a `PeftModel`'s."""
    return PREFIX if any(name.startswith(PREFIX) for name in names) else ""


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


class SavedState(BaseTuner):
    """What `DeltaTuner` does when PEFT saves an adapter's state or loads one."""

    tuned_module_cls: type[TunedModule] = TunedModule
    _untied: set[int] = set()  # the base's tensors, by `id`, of which the adapter being made has unequal copies
    _labels_of_base: dict[str, Any] = {}

    @property
    def _container(self) -> str:
        return self.tuned_module_cls.adapter_layer_names[0]

    def _is_untied(self, module: nn.Module, names: Sequence[str]) -> bool:
        return bool(self._untied) and any(id(original_tensor(module, name)) in self._untied for name in names)

    def _touched_tensors(self, config: Any, model: nn.Module) -> dict[str, torch.Tensor]:
        """The base's original values of the tensors that the adapter changes, by name."""
        copies = config.resolution.copy_names(self._container)
        return {name.in_base: original_tensor(model.get_submodule(path), name.tensor) for path, name in copies}

    def _expected_tensors(self, config: Any, model: nn.Module) -> dict[str, torch.Size]:
        """The shapes of the copies and of the head in the adapter's file, by name."""
        copies = config.resolution.copy_names(self._container)
        shapes = {name.in_file: original_tensor(model.get_submodule(path), name.tensor).shape for path, name in copies}
        of_base = self._labels_of_base.get("num_labels", 0)
        labels = (config.labels or {}).get("num_labels", of_base), of_base
        for name, shape in head_shapes(model, config.modules_to_save or [], *labels).items():
            shapes[f"{PREFIX}{without_wrappers(name)}"] = shape
        rows, base = trained_rows(model, config), base_tensors(model)
        for name, tokens in rows.items() if len(rows) == 1 else ():  # of tied layers PEFT saves one
            key = f"{PREFIX}{name.removesuffix('.weight')}{TRAINED_TOKENS}"
            shapes[key] = torch.Size((len(tokens), base[name].shape[1]))
        return shapes

    def _is_known_tensor(self, config: Any, model: nn.Module) -> Callable[[str], bool]:
        """Tells which tensors an adapter's file may hold besides the expected ones."""
        return self._may_be_saved_along(config, model)

    def _hold_file(self, file: TensorFile, config: Any, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check the file of an adapter, decode its tensors and keep them for PEFT, which loads them next."""
        expected, is_known = self._expected_tensors(config, model), self._is_known_tensor(config, model)
        specs = {name: file.meta(name) for name in file}
        shapes = decoded_shapes(specs, expected, base_tensors(model), str(file.path))
        check_tensors(shapes, expected, source=str(file.path), is_known=is_known)
        copies = list(config.resolution.copy_names(self._container))
        bases = {name.in_file: tensors[name.in_base] for _, name in copies if name.in_base in tensors}
        state = read_state(file, bases)
        take_out_own(state, model, config)
        held = {config.present_name(name): tensor for name, tensor in state.items() if not tensor.is_meta}
        self._untied = {id(bases[n]) for n in differing(held, {n: id(b) for n, b in bases.items() if n in held})}
        config.hold(state)

    @classmethod
    def _may_be_saved_along(cls, config: Any, model: nn.Module) -> Callable[[str], bool]:
        """Tells which tensors of the base PEFT may save with an adapter."""
        along = embedding_tensors(model)
        has_tokens = getattr(config, "trainable_token_indices", None) is not None
        return lambda key: PREFIX + key.removeprefix(PREFIX) in along or (has_tokens and key.endswith(TRAINED_TOKENS))

    @classmethod
    def _get_adapter_state_dict(
        cls, model: Any, config: Any, adapter_name: str, state_dict: Any, unwanted_adapter_names: Any
    ) -> dict[str, torch.Tensor]:
        if config.record is not None:  # tokens may have been added since the adapter was made
            config.record = with_vocabulary(config.record, unwrap(model))
        found = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        expected = cls._wanted_shapes(config, adapter_name, state_dict)
        if not found:  # under FSDP1 the modules' paths are not the names of their tensors, and PEFT finds none
            found = {name: state_dict[name] for name in expected if name in state_dict and not is_of_peft(name)}
        heads = {name: tensor for name, tensor in state_dict.items() if name in expected}
        present = {name: tensor for name, tensor in {**found, **heads}.items() if name in expected}
        shapes = {name: torch.Size(tensor.shape) for name, tensor in present.items()}
        if rank() and (shapes != expected or sharded(present)):
            # the first process has the gathered weights and writes them; what stands for them here cannot be written
            live = live_tensors(model, adapter_name)
            wanted = cls._wanted_shapes(config, adapter_name, live)
            state_dict.update({name: torch.empty(wanted[name], device="meta") for name in live})
            return {name: state_dict[name] for name in live if not is_of_peft(name)}
        check_gathered(present, expected, source=f"The state of adapter {adapter_name!r}")
        check_tensors(shapes, expected, source=f"The state of adapter {adapter_name!r}")
        return encode_state(model, adapter_name, found, config, state_dict)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return as_in_file(super()._remove_adapter_name_from_key(key, adapter_name))

    @classmethod
    def _wanted_shapes(cls, config: Any, adapter_name: str, names: Iterable[str]) -> dict[str, torch.Size]:
        """The shapes of an adapter's tensors by the names that they have at present.

        Another adapter may have wrapped their modules since the adapter was made; the names in the file tell which is
        which.
        """
        prefix = prefix_of_peft_model(names)
        present = {cls._remove_adapter_name_from_key(name, adapter_name): name for name in names}
        return {present.get(prefix + name, prefix + name): shape for name, shape in config.resolution.shapes.items()}

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: Any, config: Any, adapter_name: str, state_dict: Any
    ) -> dict[str, torch.Tensor]:
        try:
            with config.naming_itself():
                return cls._remap_checked(model, config, adapter_name, state_dict)
        except ValueError:  # also of a state that a user puts into the model
            take_out_unfilled(getattr(model, "base_model", model), adapter_name)
            raise

    @classmethod
    def _remap_checked(cls, model: Any, config: Any, adapter_name: str, state_dict: Any) -> dict[str, torch.Tensor]:
        is_of_file = isinstance(state_dict, StateOfFile)
        if is_of_file and config.check_base and engine_of(model) is None:  # engines hold parts of a base
            base, touched = base_tensors(unwrap(model)), touched_names(state_dict)
            check_base(state_dict.header.base, unwrap(model), base, touched, config.present_name)
        state_dict = {config.present_name(name): state_dict[name] for name in own_names(state_dict)}
        whole = partial(whole_weights, model) if is_encoded(state_dict) else nullcontext
        with whole():
            decoded = decode_state(model, adapter_name, state_dict, cls._remove_adapter_name_from_key)
        remapped = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, decoded)
        live = live_tensors(model, adapter_name)
        # under FSDP1 the modules' paths are not the names of their tensors, and PEFT finds none
        by_saved_name = {cls._remove_adapter_name_from_key(name, adapter_name): name for name in live}
        remapped = {name if name in live else by_saved_name.get(name, name): t for name, t in remapped.items()}
        drawn = _drawn(model, adapter_name, config)
        with whole():
            for name in drawn.keys() & remapped.keys():
                if isinstance(entry := drawn[name].tuned[adapter_name], ColumnTensors):
                    remapped[name] = entry.take_from(remapped[name], name)
        # the base's own tensors may be in a file, but are never loaded; only LoRA's bias="all" means them, or a user
        # who puts a state with them into LoRA alone by hand
        may_hold_biases = config.peft_type == "STRATIFIED" and not config.is_stratified
        takes_biases = may_hold_biases and (config.bias != "none" or not is_of_file)
        biases = {name for name in remapped if takes_biases and name.endswith(".bias")}
        may_be_saved_along = cls._may_be_saved_along(config, model)
        check_tensors(
            {name: torch.Size(tensor.shape) for name, tensor in remapped.items()},
            cls._wanted_shapes(config, adapter_name, live),
            source=f"The state for adapter {adapter_name!r}",
            is_known=lambda name: name in biases or may_be_saved_along(name),
        )
        others = {name: tensor for name, tensor in remapped.items() if name not in live and name not in biases}
        check_own(others, model, config)
        remapped = {name: tensor for name, tensor in remapped.items() if name not in others}
        check_tied(remapped, live if engine_of(model) is None else {}, adapter_name)
        config.forget_saved_names()
        config._is_unfilled = False
        # PEFT may assign what it loads, which would bring the file's dtype and device into the model
        for name in remapped.keys() & live.keys():
            place = remapped[name] if live[name].is_meta else live[name]  # meta ones follow their base afterwards
            remapped[name] = remapped[name].to(place.device, live[name].dtype)
        prefix = prefix_of_peft_model(live)
        if prefix_of_peft_model(name for name, _ in model.named_parameters()) == prefix:
            return remapped
        # FSDP1 puts its own prefix first, so PEFT takes the model for one without a prefix and cuts the file's
        return {prefix + name: tensor for name, tensor in remapped.items()}


def encode_state(
    model: nn.Module,
    adapter_name: str,
    state: Mapping[str, torch.Tensor],
    config: Any,
    model_state: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Encode the tensors of an adapter that are copies of the base's own; others pass through.

    `model_state` has the whole tensors of the base where a sharded model has none.
    """
    check_encoding(config.encoding, config.max_error)  # they may have been set since
    whole = model_state if engine_of(model) else {}
    drawn = _drawn(model, adapter_name, config)
    bases = dict(_bases(model, adapter_name, whole)) if drawn or config.encoding != "values" else {}
    encoded: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        encoding = config.encoding
        if name in drawn:
            encoding = "rows" if input_dim(drawn[name].base_layer) == 0 else "columns"
            if isinstance(entry := drawn[name].tuned[adapter_name], ColumnTensors):
                tensor = entry.put_into(bases[name].to(tensor.device), tensor)
        encoded.update(encode_tensor(name, tensor, bases.get(name), encoding, config.max_error))
    return encoded


def _drawn(model: nn.Module, adapter_name: str, config: Any) -> dict[str, TunedModule]:
    """The modules of whose weights an adapter trains columns, by the names in the model of what it holds of them."""
    paths = {without_wrappers(path) for path in config.resolution.columns}
    return {
        f"{without_engines(path)}.{module.adapter_layer_names[0]}.{adapter_name}.weight": module
        for path, module in (model.named_modules() if paths else ())
        if isinstance(module, TunedModule) and adapter_name in module.tuned and base_path(path) in paths
    }


def decode_state(
    model: nn.Module,
    adapter_name: str,
    state: Mapping[str, torch.Tensor],
    name_in_file: Callable[[str, str], str],
) -> dict[str, torch.Tensor]:
    """Decode an adapter's tensors, by their names in its file; what is not encoded passes through."""
    if not is_encoded(state):
        return dict(state)
    bases: dict[str, torch.Tensor] = {}
    for name, base in _bases(model, adapter_name, {}):
        name = name_in_file(name, adapter_name)
        bases[name] = bases[PREFIX + name] = base  # a model without PeftModel around it has no prefix
    return decode_tensors(state, bases)


def _bases(
    model: nn.Module, adapter_name: str, state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The base's own tensors, by the names in the model of the adapter's copies."""
    for path, module in model.named_modules():
        if not isinstance(module, TunedModule) or adapter_name not in module.tuned:
            continue
        path = without_engines(path)
        owner = path.rpartition(".")[0] if module.is_in_place else f"{path}.base_layer"
        for name in module.tuned[adapter_name].names:
            base = module.original(name)
            if not module.merged:  # a gathered state has the whole tensor where the module holds a shard
                base = state.get(f"{owner}.{name}", base)
            yield f"{path}.{module.adapter_layer_names[0]}.{adapter_name}.{as_attribute(name)}", base
