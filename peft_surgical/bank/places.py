"""Adapters whose tensors come and go: PEFT puts each into the model once, the bank fills and empties it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from peft_surgical.bank.files import Spec
from peft_surgical.bank.place import Place, Slot
from peft_surgical.bank.store import Task
from peft_surgical.bank.structure import Units
from peft_surgical.copies.in_place import TunedInPlace
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.adapter import method_of
from peft_surgical.methods.stratified.layers import StratifiedModule
from peft_surgical.names import OWN_TENSORS, PREFIX


SURGICAL = TunedModule.adapter_layer_names[0]
STRATIFIED = StratifiedModule.adapter_layer_names[0]


class Places:
    """The base model with the wrappers of all PEFT methods that the bank has tasks of.

    Args:
        model: The base model. Wrappers are put into it; its own tensors are not touched.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.active: list[str] = []  # all wrappers hold this very list, so that a switch is one assignment
        self._peft_models: dict[str, PeftModel] = {}
        self._tuned: dict[str, TunedModule] = {}
        self._heads: dict[str, ModulesToSaveWrapper] = {}

    def tuner(self, method: str) -> Any:
        """The tuner of a PEFT method, if it has one yet."""
        peft_model = self._peft_models.get(method)
        return None if peft_model is None else peft_model.base_model

    @property
    def any_tuner(self) -> Any:
        """A tuner, whichever."""
        return next(iter(self._peft_models.values())).base_model

    def activate(self, adapters: Sequence[str]) -> None:
        """Let these adapters compute, and no other."""
        self.active[:] = adapters

    def has_room(self, units: Units, heads: Mapping[str, Any]) -> bool:
        """Whether all modules of a SURGICAL adapter are wrapped already, so that PEFT need not do it."""
        return all(path in self._tuned for path in units) and all(self._head_of(name) for name in heads)

    def copies_place(self, adapter: str, units: Units, heads: Mapping[str, Any], specs: Mapping[str, Spec]) -> Place:
        """Make a place for a SURGICAL adapter in modules that are wrapped already.

        Args:
            adapter: The adapter.
            units: The modules that it has copies for.
            heads: The names of the tensors of its head in the base.
            specs: Its tensors, by their plain names in the file.
        """
        tables: list[tuple[Any, Any]] = []
        slots: dict[str, Slot] = {}
        for path, (names, is_owner) in units.items():
            module = self._tuned[path]
            bases = {name: module.base_tensor(name) for name in names}
            module.put(adapter, {n: _nothing(isinstance(t, nn.Parameter)) for n, t in bases.items()})
            entry = module.tuned[adapter]
            tables.append((module.tuned, entry))
            own = f".{OWN_TENSORS}" if is_owner else ""
            for name in names:
                key = name.replace(".", "|")
                slots[f"{PREFIX}{path}{own}.{SURGICAL}.{key}"] = Slot(entry, key)
        for head in dict.fromkeys(filter(None, map(self._head_of, heads))):
            tables.extend(self._add_head(head, adapter))
            wrapper: Any = self._heads[head]
            slots.update(_module_slots(f"{PREFIX}{head}", wrapper.modules_to_save[adapter]))
        _resize(slots, specs)
        return Place(adapter, tables, slots, [self._tuned[path] for path in units])

    def alias(self, adapter: str, other: str, units: Units) -> None:
        """Let an adapter have the very copies of another one in these modules."""
        for path in units:
            self._tuned[path].tuned[adapter] = self._tuned[path].tuned[other]

    @torch.inference_mode(False)
    def peft_place(self, task: Task) -> Place:
        """Let PEFT make a place for an adapter of any method, on the meta device.

        Raises:
            ValueError: PEFT cannot, or the adapter's file holds other tensors than the place has.
        """
        method, before = method_of(task.config), list(self.active)
        self.activate([])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT warns of adapters of several methods in one model, which is meant
            self._inject(method, task)
        self._adopt()
        self.activate(before)
        return self._collect(method, task)

    @torch.inference_mode(False)
    def enter(self, place: Place, task: Task, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put an adapter into the model."""
        place.enter(tensors)
        self.any_tuner.peft_config[place.adapter] = task.config

    def withdraw(self, place: Place) -> None:
        """Take an adapter out of the model."""
        if place.is_in_model:
            place.leave()
            self.any_tuner.peft_config.pop(place.adapter, None)

    def _inject(self, method: str, task: Task) -> None:
        config: Any = copy.copy(task.config)
        config.inference_mode = True
        if hasattr(config, "labels"):  # heads are resized here, and the file was checked before
            config.labels, config.check_base = None, False
            vars(config).pop("_source", None)
        peft_model = self._peft_models.get(method)
        if peft_model is None:
            peft_model = PeftModel(self.model, config, task.adapter, low_cpu_mem_usage=True)
            self._peft_models[method] = peft_model.eval()
        else:
            peft_model.base_model.active_adapter = task.adapter  # type: ignore[assignment]
            peft_model.add_adapter(task.adapter, config, low_cpu_mem_usage=True)

    def _adopt(self) -> None:
        """Let all wrappers share one list of active adapters, and remember them by their paths in the base."""
        for path, module in self.model.named_modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                module._active_adapter = self.active  # type: ignore[assignment, union-attr]
            base_path = path.replace(".base_layer", "")
            if isinstance(module, TunedInPlace):
                self._tuned[base_path.rpartition(".")[0]] = module
            elif isinstance(module, TunedModule):
                self._tuned[base_path] = module
            elif isinstance(module, ModulesToSaveWrapper):
                self._heads[base_path] = module
        for peft_model in self._peft_models.values():
            peft_model.base_model.active_adapter = self.active  # type: ignore[assignment]

    def _collect(self, method: str, task: Task) -> Place:
        """Find all that PEFT has put into the model for an adapter."""
        adapter = task.adapter
        tuner_cls = PEFT_TYPE_TO_TUNER_MAPPING[method]  # type: ignore[index]
        tables: list[tuple[Any, Any]] = []
        slots: dict[str, Slot] = {}
        for path, module in self.model.named_modules():
            if isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
                entry: Any = module.modules_to_save[adapter]
                tables += [(module.modules_to_save, entry), (module._adapters, None)]
                slots.update(_module_slots(f"{PREFIX}{path}", entry))
            elif isinstance(module, BaseTunerLayer):
                for name, table, entry in _entries_of(module, adapter):
                    found = {f"{PREFIX}{path}.{name}.{adapter}": Slot(table, adapter)}
                    if not isinstance(table, nn.ParameterDict):
                        tables.append((table, entry))
                        found = _module_slots(f"{PREFIX}{path}.{name}.{adapter}", entry)
                    for key, slot in found.items():
                        plain = tuner_cls._remove_adapter_name_from_key(key, adapter).replace(".base_layer.", ".")
                        slots[_name_in_file(plain, task)] = slot
        tuned = [m for m in self.model.modules() if isinstance(m, TunedModule) and adapter in m.tuned]
        shapes = {key: tuple(slot.tensor.shape) for key, slot in slots.items()}
        place = Place(adapter, tables, slots, tuned)
        self.any_tuner.peft_config.pop(adapter)
        _check_shapes(shapes, place.slots, task)
        _resize(slots, task.layout.specs)
        return place

    def _head_of(self, name: str) -> str | None:
        """The path of the wrapped head that a tensor of the base lies in."""
        return next((path for path in self._heads if name.startswith(f"{path}.")), None)

    def _add_head(self, path: str, adapter: str) -> Iterator[tuple[Any, Any]]:
        wrapper: Any = self._heads[path]
        original = wrapper.original_module
        shared = {id(tensor): tensor for tensor in original.state_dict(keep_vars=True).values()}
        wrapper.modules_to_save[adapter] = copy.deepcopy(original, shared).requires_grad_(False)
        wrapper._adapters.add(adapter)
        yield wrapper.modules_to_save, wrapper.modules_to_save[adapter]
        yield wrapper._adapters, None


def _entries_of(module: Any, adapter: str) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*module.adapter_layer_names, *module.other_param_names)):
        table = attrgetter(name)(module)
        if adapter in table:
            yield name, table, table[adapter]


def _module_slots(prefix: str, entry: Any) -> dict[str, Slot]:
    if not isinstance(entry, nn.Module):
        return {}
    slots = {}
    for name in entry.state_dict():
        path, _, attribute = name.rpartition(".")
        slots[f"{prefix}.{name}"] = Slot(entry.get_submodule(path), attribute)
    return slots


def _name_in_file(key: str, task: Task) -> str:
    """What the file calls a tensor; usually what the model calls it."""
    others = (
        key.removesuffix(".weight"),  # PEFT writes DoRA's magnitudes without the end of their name
        # copies of a module that both methods tune are in the container of the one that came first
        key.replace(f".{SURGICAL}.", f".{STRATIFIED}."),
        key.replace(f".{STRATIFIED}.", f".{SURGICAL}."),
    )
    return next((other for other in (key, *others) if other in task.layout.specs), key)


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], slots: Mapping[str, Slot], task: Task) -> None:
    specs = task.layout.specs
    if missing := [key for key in slots if key not in specs]:
        raise ValueError(f"{task.file.path} lacks the tensor {missing[0]!r}, which its config asks for.")
    if unknown := [key for key in specs if key not in slots]:
        raise ValueError(
            f"{task.file.path} has a tensor {unknown[0]!r}, for which this base has no place under its config."
        )
    for key, wanted in shapes.items():
        found = specs[key].shape
        if wanted != found and not (isinstance(slots[key].owner, nn.Linear) and wanted[1:] == found[1:]):
            raise ValueError(f"{task.file.path}: the tensor {key!r} has shape {found}, this base needs {wanted}.")


def _resize(slots: Mapping[str, Slot], specs: Mapping[str, Spec]) -> None:
    """Let linear modules know of the sizes that their tensors will have; heads differ in the number of labels."""
    for key, slot in slots.items():
        if slot.name == "weight" and isinstance(slot.owner, nn.Linear):
            slot.owner.out_features = specs[key].shape[0]


def _nothing(is_parameter: bool) -> torch.Tensor:
    return nn.Parameter(torch.empty(0), requires_grad=False) if is_parameter else torch.empty(0)
