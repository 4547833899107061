"""How PEFT's wrappers and this package's own hold the tensors of an adapter, which the bank fills and empties."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.overrides import TorchFunctionMode

from peft_surgical.bank.base import PROJECTION
from peft_surgical.bank.memory import Task
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.adapter import method_of
from peft_surgical.files.check import check_tensors
from peft_surgical.files.safetensors_io import Spec
from peft_surgical.methods.config import DeltaConfig
from peft_surgical.methods.rows import BASE, KNOW_ROWS, hook_rows
from peft_surgical.methods.wrappers import unwrapped
from peft_surgical.names import PREFIX, STRATIFIED, SURGICAL, base_path


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor of an adapter goes."""

    owner: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        return getattr(self.owner, self.name)

    def fill(self, tensor: torch.Tensor | None) -> None:
        """Put a tensor there, or nothing."""
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        if not isinstance(self.owner, nn.ParameterDict):
            is_buffer = self.name in self.owner._buffers
            table: Any = self.owner._buffers if is_buffer else self.owner._parameters
            table[self.name] = tensor if is_buffer else parameter
        elif parameter is None:
            if self.name in self.owner:
                del self.owner[self.name]
        else:
            self.owner[self.name] = parameter


class AdapterSlots:
    """All that the model has of one adapter. When made, the adapter is out of the model."""

    def __init__(
        self,
        adapter: str,
        tables: Iterable[tuple[Any, Any]],  # all tables by adapter that have an entry for it, with that entry
        slots: Mapping[str, TensorSlot],  # where its tensors go, by their plain names in the file
        modules: Iterable[TunedModule] = (),  # those that may keep cast tensors of it
    ):
        self.adapter = adapter
        self.slots = dict(slots)
        self.shapes = {key: slot.tensor.shape for key, slot in self.slots.items()}
        self._tables = list(tables)
        self._modules = list(modules)
        self.leave()

    def resize(self, specs: Mapping[str, Spec]) -> None:
        """Let linear modules know of the sizes that their tensors will have; heads differ in the number of labels."""
        for key, slot in self.slots.items():
            if slot.name == "weight" and isinstance(slot.owner, nn.Linear):
                slot.owner.out_features = specs[key].shape[0]

    def enter(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the adapter into the model, with these tensors."""
        for key, slot in self.slots.items():
            slot.fill(tensors[key])
        for table, entry in self._tables:
            table[self.adapter] = entry
        self.is_in_model = True  # last, for what an interrupt has cut short is done again

    def leave(self) -> None:
        """Take the adapter out of the model, and let go of its tensors, also if only some of it is there."""
        self.is_in_model = False  # first, likewise
        for table, _ in self._tables:
            if self.adapter in table:
                del table[self.adapter]
        for slot in self.slots.values():
            slot.fill(None)
        for module in self._modules:
            module._kept.clear()
            module._kept_twin.clear()


def slots_in(prefix: str, entry: Any) -> dict[str, TensorSlot]:
    """The slots of all tensors in a module that is one adapter's, by their names after a prefix."""
    if not isinstance(entry, nn.Module):
        return {}
    names = {name: name.rpartition(".") for name in entry.state_dict()}
    return {f"{prefix}.{n}": TensorSlot(entry.get_submodule(path), last) for n, (path, _, last) in names.items()}


class InjectedAdapters:
    """The base model with the wrappers of all PEFT methods that the bank has tasks of; its own tensors stay."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.active: list[str] = []  # all wrappers hold this very list, so that a switch is one assignment
        self.configs: dict[str, Any] = {}  # all tuners hold this very dict
        self.tuned: dict[str, TunedModule] = {}
        self.heads: dict[str, ModulesToSaveWrapper] = {}
        self._others: list[Any] = []  # the wrappers of other methods than LoRA's and this package's
        self._peft_models: dict[str, PeftModel] = {}
        self._is_adopted = True  # whether all wrappers are known and hold what they share
        self._by_rows: list[bool] = []  # what is in it lets the hooks of a batch of several tasks do something
        self._row_hooks: list[Any] = []  # their handles

    def activate(self, adapters: Sequence[str]) -> None:
        """Let these adapters compute, and no other."""
        self._end_rows()
        if not self._is_adopted:
            self._adopt()
        for layer in self._others:  # some compute past the wrappers inside them unless they are disabled
            layer._disable_adapters = not any(True for name in adapters for _ in _entries_of(layer, name))
        self.active[:] = adapters

    def _end_rows(self) -> None:
        """End a batch that an interrupt has cut short, or, in a forked child, that of a thread that is not there."""
        self._by_rows.clear()  # first, for the end of a batch itself may have been cut short
        while self._row_hooks:
            self._row_hooks[-1].remove()
            self._row_hooks.pop()

    @contextmanager
    def by_rows(self, adapters: Sequence[str], lock: Any) -> Iterator[None]:
        """Let each row of a batch be computed with an adapter of its own, or with the base."""
        is_on = [True]

        def check_rows(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
            rows = next((len(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), len(adapters))
            if is_on and rows != len(adapters):
                raise ValueError(f"The batch has {rows} rows, but a task was named for each of {len(adapters)} rows.")

        try:
            with lock:
                self._end_rows()
                self._by_rows = is_on
                if set(adapters) - {BASE}:
                    tuner: Any = next(iter(self._peft_models.values())).base_model
                    hook_rows(tuner, adapters, (), self._row_hooks, is_on)
                self._row_hooks.append(self.model.register_forward_pre_hook(check_rows, with_kwargs=True))
            yield
        finally:
            self._end_rows()

    def forget(self, adapter: str) -> None:
        """Drop what PEFT's wrappers note of an adapter beside its tensors."""
        for module in self.model.modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                for table in vars(module).values():
                    if isinstance(table, dict):
                        table.pop(adapter, None)
                    elif isinstance(table, set):
                        table.discard(adapter)

    @torch.inference_mode(False)
    def inject(self, task: Task) -> AdapterSlots:
        """Let PEFT make slots for an adapter of any method. No forward runs meanwhile."""
        before = list(self.active)
        self.activate([])
        self._is_adopted = False
        try:
            with task.config.naming_itself() if isinstance(task.config, DeltaConfig) else nullcontext():
                self._add(task)
            made = self._collect(task)
            _check_file(task, made)
        except BaseException:
            self._collect(task)  # what is made is taken out again
            self.forget(task.adapter)
            raise
        finally:
            self.configs.pop(task.adapter, None)
            self.activate(before)
        made.resize(task.layout.specs)
        return made

    def _add(self, task: Task) -> None:
        method = method_of(task.config)
        config: Any = copy.copy(task.config)
        config.inference_mode = True
        if hasattr(config, "labels"):  # heads are resized here, and the file was checked before
            config.labels, config.check_base, config.record = None, False, {}
            config.__dict__ = {k: v for k, v in vars(config).items() if k not in ("_source", "_opened")}
        with _ValuesLeftOut() if method in _MADE_OF_WEIGHTS else nullcontext():
            if method not in self._peft_models:
                vars(self.model).pop("peft_config", None)  # PEFT warns of a second method, which is meant here
                with unwrapped(self.model) if hasattr(config, PROJECTION) else nullcontext():
                    self._peft_models[method] = PeftModel(self.model, config, task.adapter)
            else:
                tuner: Any = self._peft_models[method].base_model
                tuner.active_adapter = task.adapter  # and PEFT looks for the method's options in all of these configs:
                tuner.peft_config = {n: c for n, c in self.configs.items() if method_of(c) == method}
                self._peft_models[method].add_adapter(task.adapter, config)
        self._peft_models[method].eval()  # dropout too that PEFT has made for this adapter

    def _adopt(self) -> None:
        """Let all wrappers share one list of active adapters, and remember them by their paths in the base."""
        self._others = []
        for path, module in self.model.named_modules():
            if isinstance(module, BaseTunerLayer) and not isinstance(module, KNOW_ROWS):
                self._others.append(module)
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                module._active_adapter = self.active  # type: ignore[assignment, union-attr]
            if isinstance(module, TunedModule):
                self.tuned[base_path(path)] = module
            elif isinstance(module, ModulesToSaveWrapper):
                self.heads[base_path(path)] = module
        for peft_model in self._peft_models.values():
            tuner: Any = peft_model.base_model
            tuner.active_adapter, tuner.peft_config = self.active, self.configs
            self.model.peft_config = self.configs  # type: ignore[assignment]
        self._is_adopted = True

    def _collect(self, task: Task) -> AdapterSlots:
        """Find all that PEFT has put into the model for an adapter."""
        adapter = task.adapter
        tuner_cls = PEFT_TYPE_TO_TUNER_MAPPING[method_of(task.config)]  # type: ignore[index]
        tables: list[tuple[Any, Any]] = []
        slots: dict[str, TensorSlot] = {}
        for path, module in self.model.named_modules():
            if isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
                entry: Any = module.modules_to_save[adapter]
                tables.append((module.modules_to_save, entry))
                slots.update(slots_in(f"{PREFIX}{path}", entry))
            elif isinstance(module, BaseTunerLayer):
                for name, table, entry in _entries_of(module, adapter):
                    if isinstance(entry, BaseTunerLayer):  # LN tuning copies the wrappers in its own along
                        entry = table[adapter] = entry.get_base_layer()
                    found = {f"{PREFIX}{path}.{name}.{adapter}": TensorSlot(table, adapter)}
                    if not isinstance(table, nn.ParameterDict):
                        if isinstance(entry, nn.Module) or not hasattr(task.config, PROJECTION):  # which is all tasks'
                            tables.append((table, entry))
                        found = slots_in(f"{PREFIX}{path}.{name}.{adapter}", entry)
                    for key, slot in found.items():
                        plain = tuner_cls._remove_adapter_name_from_key(key, adapter).replace(".base_layer.", ".")
                        slots[_name_in_file(plain, task)] = slot
        tuned = [m for m in self.model.modules() if isinstance(m, TunedModule) and adapter in m.tuned]
        return AdapterSlots(adapter, tables, slots, tuned)


_MADE_OF_WEIGHTS = ("LORA", "SURGICAL", "STRATIFIED")
"""The methods whose empty tensors and clones are all filled from the file; others may compute constants with them."""


class _ValuesLeftOut(TorchFunctionMode):
    """Makes empty tensors and clones without memory, on the meta device.

    It holds for one thread, unlike PEFT's `low_cpu_mem_usage`, which changes `nn.Module` for the whole process.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.clone:
            return torch.empty_like(args[0], device="meta")
        kwargs = dict(kwargs or {})
        if function is torch.empty:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


def _entries_of(module: Any, adapter: str) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*module.adapter_layer_names, *module.other_param_names)):
        table = attrgetter(name)(module)
        if adapter in table:
            yield name, table, table[adapter]


def _name_in_file(key: str, task: Task) -> str:
    """What the file calls a tensor; usually what the model calls it."""
    others = (
        key.removesuffix(".weight"),  # PEFT writes DoRA's magnitudes without the end of their name
        # copies of a module that both methods tune are in the container of the one that came first
        key.replace(f".{SURGICAL}.", f".{STRATIFIED}."),
        key.replace(f".{STRATIFIED}.", f".{SURGICAL}."),
    )
    return next((other for other in (key, *others) if other in task.layout.specs), key)


def _check_file(task: Task, made: AdapterSlots) -> None:
    found = {key: torch.Size(spec.shape) for key, spec in task.layout.specs.items()}
    expected = dict(made.shapes)
    for key, slot in made.slots.items():  # heads differ in the number of labels
        if isinstance(slot.owner, nn.Linear) and key in found and found[key][1:] == expected[key][1:]:
            expected[key] = found[key]
    check_tensors(found, expected, source=str(task.file.path))
