"""Places that stay in the model for good and whose tensors are written over, so that nothing is compiled twice."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from peft_surgical.bank.files import Layout, Spec
from peft_surgical.bank.place import Slot
from peft_surgical.bank.seats import Seats
from peft_surgical.bank.store import Task
from peft_surgical.bank.structure import Units
from peft_surgical.copies.module import TunedModule
from peft_surgical.files.adapter import entry_of, method_of


logger = logging.getLogger(__name__)

_COPIES = f".{TunedModule.adapter_layer_names[0]}."
_NOT_COMPUTED_WITH = {
    *("auto_mapping", "base", "base_model_name_or_path", "check_base", "encoding", "inference_mode", "labels"),
    *("init_lora_weights", "init_weights", "lora_dropout", "peft_version", "revision", "runtime_config", "task_type"),
}


class SharedSlots(Seats):
    """One place for all SURGICAL tasks together, and one for each kind of other tasks; a switch copies into it.

    The place of the SURGICAL tasks has all modules that any of them tunes, and a head for each size of heads. Places
    are made for all tasks that are known when one is first used; a task of another kind, or one that tunes further
    modules, makes the model be compiled anew.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._known: dict[str, Task] = {}
        self._units: Units = {}
        self._copies: dict[str, Slot] = {}
        self._changed: set[str] = set()  # the copies that are not the base's values at present
        self._slots: dict[Hashable, tuple[str, dict[str, Slot]]] = {}
        self._is_copied: torch.cuda.Event | None = None
        self._running: list[torch.cuda.Event] = []

    def check(self, task: Task) -> None:
        super().check(task)
        self._known[task.name] = task

    def bring_early(self, task: Task) -> None:
        self._load_early(task)

    def bring(self, task: Task) -> str:
        if self._kind(task) not in self._slots or self._lacks(task):
            if self._slots:
                logger.warning("Task %r is of a kind that no earlier one was; the model is compiled anew.", task.name)
            with self.store.lock:
                self._make_room()
        resident = self.store.load(task)
        resident.use()
        adapter, slots = self._slots[self._kind(task)]
        self._write({**slots, **self._copies} if _is_surgical(task) else slots, resident.tensors)
        return adapter

    def use(self, task: Task) -> None:
        if self._is_copied is not None:
            torch.cuda.current_stream().wait_event(self._is_copied)

    def done(self) -> None:
        if self.store.is_on_gpu:
            event = torch.cuda.Event()
            event.record()
            self._running.append(event)

    def forget(self, task: Task) -> None:
        super().forget(task)
        self._known.pop(task.name, None)

    # ---- making places

    def _kind(self, task: Task) -> Hashable:
        """What tasks have in common that can share a place."""
        if _is_surgical(task):
            return tuple((key, spec) for key, spec in task.layout.specs.items() if _COPIES not in key)
        config = task.config.to_dict()
        settings = {key: str(value) for key, value in config.items() if key not in _NOT_COMPUTED_WITH}
        return (*sorted(settings.items()), *sorted(task.layout.specs.items(), key=lambda item: item[0]))

    def _lacks(self, task: Task) -> bool:
        """Whether a task tunes modules that have no copies yet."""
        return _is_surgical(task) and not self._units_of(task).keys() <= self._units.keys()

    def _units_of(self, task: Task) -> Units:
        assert self._structure is not None
        return self._structure.units(task.config)  # type: ignore[arg-type]

    def _heads_of(self, task: Task) -> dict[str, torch.Size]:
        assert self._structure is not None
        return self._structure.heads(task.config)  # type: ignore[arg-type]

    @torch.inference_mode(False)
    def _make_room(self) -> None:
        """Make places for all tasks that are known."""
        new: Units = {}
        for task in filter(_is_surgical, self._known.values()):
            units = self._units_of(task)
            if not self.places.has_room(units, self._heads_of(task)):
                self.places.peft_place(task)  # wraps the modules
            new.update({path: what for path, what in units.items() if path not in self._units})
        self._add_copies(new)
        for task in self._known.values():
            if (kind := self._kind(task)) not in self._slots:
                self._slots[kind] = self._new_head(task) if _is_surgical(task) else self._new_slot(task)

    def _add_copies(self, units: Units) -> None:
        place = self.places.copies_place("slot", units, {}, {})
        values = {key: self._base[entry_of(key).name].detach().clone() for key in place.slots}
        self._reserve(f"copies of {len(units)} modules", {k: Spec(v.dtype, tuple(v.shape)) for k, v in values.items()})
        place.enter(values)
        for adapter, _ in self._slots.values():
            if adapter.startswith("slot"):
                self.places.alias(adapter, "slot", units)
        self._units.update(units)
        self._copies.update(place.slots)

    def _new_head(self, task: Task) -> tuple[str, dict[str, Slot]]:
        """A name for all copies together with a head of the task's size."""
        adapter = f"slot_{len(self._slots)}"
        place = self.places.copies_place(adapter, {}, self._heads_of(task), task.layout.specs)
        self.places.alias(adapter, "slot", self._units)
        place.enter(self._empty(adapter, {key: task.layout.specs[key] for key in place.slots}))
        return adapter, place.slots

    def _new_slot(self, task: Task) -> tuple[str, dict[str, Slot]]:
        place = self.places.peft_place(task)
        place.enter(self._empty(task.adapter, task.layout.specs))
        return task.adapter, place.slots

    def _empty(self, name: str, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
        self._reserve(name, specs)
        return {
            key: torch.zeros(spec.shape, dtype=spec.dtype, device=self.store.device) for key, spec in specs.items()
        }

    def _reserve(self, name: str, specs: Mapping[str, Spec]) -> None:
        with self.store.lock:
            self.store.device_tier.reserve(f"the place {name!r}", Layout(specs).nbytes, self.store.protected)

    # ---- filling them

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write(self, slots: Mapping[str, Slot], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a task's tensors into a place, and the base's where the last task had its own."""
        for event in self._running:
            torch.cuda.current_stream().wait_event(event)
        self._running.clear()
        sources = dict(tensors)
        if slots.keys() & self._copies.keys():
            for key in self._changed - tensors.keys():
                sources[key] = self._base[entry_of(key).name]
            self._changed = tensors.keys() & self._copies.keys()
        targets = [slots[key].tensor.data for key in sources]
        torch._foreach_copy_(targets, [source.detach() for source in sources.values()], non_blocking=True)
        if self.store.is_on_gpu:
            self._is_copied = torch.cuda.Event()
            self._is_copied.record()


def _is_surgical(task: Task) -> bool:
    return method_of(task.config) == "SURGICAL"
