"""Adapters whose tensors come and go: each is put into the model once, the bank fills and empties it.

This is where the bank knows how PEFT's wrappers and this package's own hold what belongs to an adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from peft import PeftModel
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn
from torch.overrides import TorchFunctionMode

from peft_surgical.bank.file import Copies, Task
from peft_surgical.bank.memory import Spec
from peft_surgical.bank.slots import AdapterSlots, TensorSlot, nothing, resize, slots_in
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.adapter import method_of
from peft_surgical.methods.mixed_batch import BASE, adapter_names_in_forward
from peft_surgical.names import (
    PREFIX,
    STRATIFIED,
    SURGICAL,
    CopyName,
    as_attribute,
    base_path,
)


class InjectedAdapters:
    """The base model with the wrappers of all PEFT methods that the bank has tasks of.

    Args:
        model: The base model. Wrappers are put into it; its own tensors are not touched.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.active: list[str] = []  # all wrappers hold this very list, so that a switch is one assignment
        self._configs: dict[str, Any] = {}  # all tuners hold this very dict
        self._peft_models: dict[str, PeftModel] = {}
        self._tuned: dict[str, TunedModule] = {}
        self._heads: dict[str, ModulesToSaveWrapper] = {}
        self._slots: dict[Task, AdapterSlots] = {}

    def activate(self, adapters: Sequence[str]) -> None:
        """Let these adapters compute, and no other."""
        self.active[:] = adapters

    @contextmanager
    def by_rows(self, adapters: Sequence[str]) -> Iterator[None]:
        """Let each row of a batch be computed with an adapter of its own, or with the base."""

        def check_rows(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
            rows = next((len(x) for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), len(adapters))
            if rows != len(adapters):
                raise ValueError(f"The batch has {rows} rows, but a task was named for each of {len(adapters)} rows.")

        with ExitStack() as stack:
            if set(adapters) - {BASE}:
                tuner: Any = next(iter(self._peft_models.values())).base_model
                stack.enter_context(adapter_names_in_forward(tuner, adapters, ()))
            stack.callback(self.model.register_forward_pre_hook(check_rows, with_kwargs=True).remove)
            yield

    # ---- tasks that come and go

    @torch.inference_mode(False)
    def enter(self, task: Task, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put a task into the model, if it is not there. No forward runs meanwhile."""
        if task not in self._slots:
            self._slots[task] = self.make_slots(task)
        slots = self._slots[task]
        if not slots.is_in_model:
            slots.enter(tensors)
            self._configs[task.adapter] = task.config

    def withdraw(self, task: Task) -> None:
        """Take a task out of the model, if it is there."""
        if task in self._slots and self._slots[task].is_in_model:
            self._slots[task].leave()
            self._configs.pop(task.adapter, None)

    def forget(self, task: Task) -> None:
        """Take a task out of the model for good."""
        self.withdraw(task)
        if self._slots.pop(task, None) is None:
            return
        for module in self.model.modules():
            if isinstance(module, BaseTunerLayer):  # PEFT's flags by adapter
                for table in vars(module).values():
                    if isinstance(table, dict):
                        table.pop(task.adapter, None)

    # ---- making room for them

    def make_slots(self, task: Task) -> AdapterSlots:
        """Make slots for a task: with PEFT, or twenty times faster where all modules are wrapped already."""
        if task.is_surgical and self.has_room(task):
            return self.copies_slots(task.adapter, task.copies, task.heads, task.layout.specs)
        return self.peft_slots(task)

    def has_room(self, task: Task) -> bool:
        """Whether all modules of a SURGICAL task are wrapped already."""
        return all(path in self._tuned for path in task.copies) and all(map(self._head_of, task.heads))

    def copies_slots(
        self, adapter: str, copies: Copies, heads: Iterable[str], specs: Mapping[str, Spec]
    ) -> AdapterSlots:
        """Make slots for a SURGICAL adapter in modules that are wrapped already.

        Args:
            adapter: The adapter.
            copies: The tensors that it has copies of.
            heads: The names of the tensors of its head in the base.
            specs: Its tensors, by their plain names in the file.
        """
        tables: list[tuple[Any, Any]] = []
        slots: dict[str, TensorSlot] = {}
        for path, (names, is_in_place) in copies.items():
            module = self._tuned[path]
            bases = {name: module.base_tensor(name) for name in names}
            module.put(adapter, {n: nothing(isinstance(t, nn.Parameter)) for n, t in bases.items()})
            entry = module.tuned[adapter]
            tables.append((module.tuned, entry))
            for name in names:
                slots[CopyName(path, name, in_place=is_in_place).in_file] = TensorSlot(entry, as_attribute(name))
        for head in dict.fromkeys(filter(None, map(self._head_of, heads))):
            tables.extend(self._add_head(head, adapter))
            wrapper: Any = self._heads[head]
            slots.update(slots_in(f"{PREFIX}{head}", wrapper.modules_to_save[adapter]))
        resize(slots, specs)
        return AdapterSlots(adapter, tables, slots, [self._tuned[path] for path in copies])

    def alias(self, adapter: str, other: str, paths: Iterable[str]) -> None:
        """Let an adapter have the very copies of another one in these modules."""
        for path in paths:
            self._tuned[path].tuned[adapter] = self._tuned[path].tuned[other]

    @torch.inference_mode(False)
    def peft_slots(self, task: Task) -> AdapterSlots:
        """Let PEFT make slots for an adapter of any method. No forward runs meanwhile.

        Raises:
            ValueError: PEFT cannot, or the adapter's file holds other tensors than there are slots for.
        """
        before = list(self.active)
        self.activate([])
        try:
            self._inject(task)
            slots, shapes = self._collect(task)
        except BaseException:
            self._collect(task)  # what is made is taken out again
            raise
        finally:
            self._adopt()
            self._configs.pop(task.adapter, None)
            self.activate(before)
        _check_shapes(shapes, slots.slots, task)
        resize(slots.slots, task.layout.specs)
        return slots

    def _inject(self, task: Task) -> None:
        method = method_of(task.config)
        config: Any = copy.copy(task.config)
        config.inference_mode = True
        if hasattr(config, "labels"):  # heads are resized here, and the file was checked before
            config.labels, config.check_base, config.base = None, False, {}
            vars(config).pop("_source", None)
        peft_model = self._peft_models.get(method)
        with _ValuesLeftOut() if method in _MADE_OF_WEIGHTS else nullcontext():
            if peft_model is None:
                vars(self.model).pop("peft_config", None)  # PEFT warns of a second method, which is meant here
                peft_model = PeftModel(self.model, config, task.adapter).eval()
                self._peft_models[method] = peft_model
                peft_model.base_model.peft_config = self.model.peft_config = self._configs  # type: ignore[assignment]
            else:
                peft_model.base_model.active_adapter = task.adapter  # type: ignore[assignment]
                peft_model.add_adapter(task.adapter, config)

    def _adopt(self) -> None:
        """Let all wrappers share one list of active adapters, and remember them by their paths in the base."""
        for path, module in self.model.named_modules():
            if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
                module._active_adapter = self.active  # type: ignore[assignment, union-attr]
            if isinstance(module, TunedModule):
                self._tuned[base_path(path)] = module
            elif isinstance(module, ModulesToSaveWrapper):
                self._heads[base_path(path)] = module
        for peft_model in self._peft_models.values():
            peft_model.base_model.active_adapter = self.active  # type: ignore[assignment]

    def _collect(self, task: Task) -> tuple[AdapterSlots, dict[str, tuple[int, ...]]]:
        """Find all that PEFT has put into the model for an adapter, with the shapes that it made."""
        adapter = task.adapter
        tuner_cls = PEFT_TYPE_TO_TUNER_MAPPING[method_of(task.config)]  # type: ignore[index]
        tables: list[tuple[Any, Any]] = []
        slots: dict[str, TensorSlot] = {}
        for path, module in self.model.named_modules():
            if isinstance(module, ModulesToSaveWrapper) and adapter in module.modules_to_save:
                entry: Any = module.modules_to_save[adapter]
                tables += [(module.modules_to_save, entry), (module._adapters, None)]
                slots.update(slots_in(f"{PREFIX}{path}", entry))
            elif isinstance(module, BaseTunerLayer):
                for name, table, entry in _entries_of(module, adapter):
                    found = {f"{PREFIX}{path}.{name}.{adapter}": TensorSlot(table, adapter)}
                    if not isinstance(table, nn.ParameterDict):
                        tables.append((table, entry))
                        found = slots_in(f"{PREFIX}{path}.{name}.{adapter}", entry)
                    for key, slot in found.items():
                        plain = tuner_cls._remove_adapter_name_from_key(key, adapter).replace(".base_layer.", ".")
                        slots[_name_in_file(plain, task)] = slot
        tuned = [m for m in self.model.modules() if isinstance(m, TunedModule) and adapter in m.tuned]
        shapes = {key: tuple(slot.tensor.shape) for key, slot in slots.items()}
        return AdapterSlots(adapter, tables, slots, tuned), shapes

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


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], slots: Mapping[str, TensorSlot], task: Task) -> None:
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
