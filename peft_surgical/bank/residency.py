"""How tasks that are on the device get into the model: each into slots of its own, or all into the same ones."""

from __future__ import annotations

import copy
import logging
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from peft_surgical.bank.adapters import AdapterSlots, InjectedAdapters, TensorSlot, slots_in
from peft_surgical.bank.cache import TaskCache
from peft_surgical.bank.memory import Copies, Layout, NoRoomError, Task
from peft_surgical.files.adapter import entry_of
from peft_surgical.files.safetensors_io import Spec
from peft_surgical.names import PREFIX, SURGICAL, CopyName, as_attribute


logger = logging.getLogger(__name__)

_COPIES = f".{SURGICAL}."
_NOT_COMPUTED_WITH = {
    *("auto_mapping", "base", "base_model_name_or_path", "check_base", "encoding", "inference_mode", "labels"),
    *("init_lora_weights", "init_weights", "lora_dropout", "max_error", "peft_version", "revision"),
    *("runtime_config", "task_type"),
}


class EagerResidency:
    """Each task has slots of its own: any number of tasks are in the model at once, and a switch only names one."""

    def __init__(self, adapters: InjectedAdapters, cache: TaskCache, tasks: Mapping[str, Task]):
        self._adapters = adapters
        self._cache = cache
        self._tasks = tasks
        self._made: dict[Task, AdapterSlots] = {}

    def bring(self, task: Task) -> str:
        """Bring a task to the device and into the model; gives its adapter. No forward runs meanwhile."""
        resident = self._cache.load(task)
        with self._cache.lock, torch.inference_mode(False):
            if task not in self._made:
                self._made[task] = self._make(task)
            if not self._made[task].is_in_model:
                self._adapters.configs[task.adapter] = task.config
                self._made[task].enter(resident.tensors)
        return task.adapter

    def withdraw(self, task: Task) -> None:
        """Take a task out of the model, if it is there."""
        if task in self._made:
            self._made[task].leave()
            self._adapters.configs.pop(task.adapter, None)

    def use(self, task: Task) -> None:
        """Called by a thread before its forwards: let its stream read the task's tensors."""
        self._cache.load(task).use()

    def done(self) -> None:
        """Called by a thread after its forwards, some of which may still run on a GPU."""

    def forget(self, task: Task) -> bool:
        """Free all memory that a task takes; gives whether the model keeps its wrappers. No forward runs meanwhile."""
        self._cache.forget(task)
        self.withdraw(task)
        self._adapters.forget(task.adapter)
        return self._made.pop(task, None) is not None

    def _make(self, task: Task) -> AdapterSlots:
        """Make slots for a task: with PEFT, or twenty times faster where all modules are wrapped already."""
        if task.is_surgical and self.has_room(task):
            return self.copies_slots(task.adapter, task.copies, task.heads, task.layout.specs)
        return self._adapters.inject(task)

    def has_room(self, task: Task) -> bool:
        """Whether all modules of a SURGICAL task are wrapped already."""
        return all(path in self._adapters.tuned for path in task.copies) and all(map(self._head_of, task.heads))

    def copies_slots(
        self, adapter: str, copies: Copies, heads: Iterable[str], specs: Mapping[str, Spec]
    ) -> AdapterSlots:
        """Make slots for the copies and the head of a SURGICAL adapter, in modules that are wrapped already."""
        tables: list[tuple[Any, Any]] = []
        slots: dict[str, TensorSlot] = {}
        modules = [self._adapters.tuned[path] for path in copies]
        for module, (path, (names, is_in_place)) in zip(modules, copies.items(), strict=True):
            empty: dict[str, torch.Tensor] = {name: torch.empty(0) for name in names}
            for name in names:
                if isinstance(module.base_tensor(name), nn.Parameter):
                    empty[name] = nn.Parameter(empty[name], requires_grad=False)
            module.put(adapter, empty)
            entry = module.tuned[adapter]
            tables.append((module.tuned, entry))
            for name in names:
                slots[CopyName(path, name, in_place=is_in_place).in_file] = TensorSlot(entry, as_attribute(name))
        for path in dict.fromkeys(filter(None, map(self._head_of, heads))):
            wrapper: Any = self._adapters.heads[path]
            shared = {id(t): t for t in wrapper.original_module.state_dict(keep_vars=True).values()}
            head = copy.deepcopy(wrapper.original_module, shared).requires_grad_(False)
            wrapper.modules_to_save[adapter] = head
            wrapper._adapters.add(adapter)
            tables.append((wrapper.modules_to_save, head))
            slots.update(slots_in(f"{PREFIX}{path}", head))
        made = AdapterSlots(adapter, tables, slots, modules)
        made.resize(specs)
        return made

    def _head_of(self, name: str) -> str | None:
        """The path of the wrapped head that a tensor of the base lies in."""
        return next((path for path in self._adapters.heads if name.startswith(f"{path}.")), None)


class CompiledResidency(EagerResidency):
    """Slots that stay in the model for good and are written over, so that nothing is compiled twice.

    All SURGICAL tasks share one set of copies, of all modules that any of them tunes, with a head for each size of
    heads; other tasks share slots by kind. Slots are made for all tasks that are known when one is first used; a task
    of another kind, or one that tunes further modules, makes the model be compiled anew.
    """

    def __init__(self, adapters: InjectedAdapters, cache: TaskCache, tasks: Mapping[str, Task]):
        super().__init__(adapters, cache, tasks)
        self._base = cache.base
        self._paths: set[str] = set()  # of the modules that have copies
        self._copies: dict[str, TensorSlot] = {}
        self._changed: set[str] = set()  # the copies that may have other values than the base's
        self._slots: dict[Hashable, tuple[str, dict[str, TensorSlot]]] = {}
        self._is_copied: torch.cuda.Event | None = None
        self._running: list[torch.cuda.Event] = []

    def bring(self, task: Task) -> str:
        if self._kind(task) not in self._slots or not task.copies.keys() <= self._paths:
            if self._slots:
                logger.warning("Task %r is of a kind that no earlier one was; the model is compiled anew.", task.name)
            with self._cache.lock:
                self._make_slots([*self._tasks.values(), task])
        resident = self._cache.load(task)
        resident.use()
        adapter, slots = self._slots[self._kind(task)]
        self._write({**slots, **self._copies} if task.is_surgical else slots, resident.tensors)
        return adapter

    def forget(self, task: Task) -> bool:
        return super().forget(task) or bool(self._slots)

    def use(self, task: Task) -> None:
        if self._is_copied is not None:
            torch.cuda.current_stream().wait_event(self._is_copied)

    def done(self) -> None:
        if self._cache.is_on_gpu:
            event = torch.cuda.Event()
            event.record()
            self._running.append(event)

    # ---- making slots

    def _kind(self, task: Task) -> Hashable:
        """What tasks have in common that can share slots."""
        if task.is_surgical:
            return tuple((key, spec) for key, spec in task.layout.specs.items() if _COPIES not in key)
        config = task.config.to_dict()
        settings = {key: str(value) for key, value in config.items() if key not in _NOT_COMPUTED_WITH}
        return (*sorted(settings.items()), *sorted(task.layout.specs.items(), key=lambda item: item[0]))

    @torch.inference_mode(False)
    def _make_slots(self, tasks: list[Task]) -> None:
        new: Copies = {}
        for task in tasks:
            if task.is_surgical and not self.has_room(task):
                self._adapters.inject(task)  # wraps the modules
            new.update({path: what for path, what in task.copies.items() if path not in self._paths})
        self._add_copies(new)
        for task in tasks:
            if (kind := self._kind(task)) not in self._slots:
                self._slots[kind] = self._add_head(task) if task.is_surgical else self._add_adapter(task)

    def _add_copies(self, copies: Copies) -> None:
        made = self.copies_slots("slot", copies, (), {})
        bases = {key: self._base[entry_of(key).name] for key in made.slots}
        specs = {key: Spec(base.dtype, tuple(base.shape)) for key, base in bases.items()}
        made.enter(self._empty(f"copies of {len(copies)} modules", specs))
        self._copies.update(made.slots)
        self._changed.update(specs)  # the first task to be written brings the base's values for all others
        for adapter, _ in self._slots.values():
            if adapter.startswith("slot"):
                self._alias(adapter, copies)
        self._paths.update(copies)

    def _alias(self, adapter: str, paths: Iterable[str]) -> None:
        """Let an adapter have the copies that all share."""
        for path in paths:
            tuned = self._adapters.tuned[path].tuned
            tuned[adapter] = tuned["slot"]

    def _add_head(self, task: Task) -> tuple[str, dict[str, TensorSlot]]:
        """A name for all copies together with a head of the task's size."""
        adapter = f"slot_{len(self._slots)}"
        made = self.copies_slots(adapter, {}, task.heads, task.layout.specs)
        self._alias(adapter, self._paths)
        made.enter(self._empty(adapter, {key: task.layout.specs[key] for key in made.slots}))
        return adapter, made.slots

    def _add_adapter(self, task: Task) -> tuple[str, dict[str, TensorSlot]]:
        made = self._adapters.inject(task)
        made.enter(self._empty(task.adapter, task.layout.specs))
        return task.adapter, made.slots

    def _empty(self, name: str, specs: Mapping[str, Spec]) -> dict[str, torch.Tensor]:
        try:
            self._cache.on_device.reserve(f"slots for {name}", Layout(specs).nbytes, self._cache.in_use)  # type: ignore[arg-type]
        except NoRoomError as error:
            raise NoRoomError(f"slots for {name}: {error}") from None
        return {k: torch.zeros(spec.shape, dtype=spec.dtype, device=self._cache.device) for k, spec in specs.items()}

    # ---- filling them

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write(self, slots: Mapping[str, TensorSlot], tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a task's tensors into slots, and the base's where the last task had its own."""
        for event in self._running:
            torch.cuda.current_stream().wait_event(event)
        self._running.clear()
        sources = dict(tensors)
        if slots.keys() & self._copies.keys():
            for key in self._changed - tensors.keys():
                sources[key] = self._base[entry_of(key).name]
            self._changed |= tensors.keys() & self._copies.keys()
        targets = [slots[key].tensor.data for key in sources]
        torch._foreach_copy_(targets, [source.detach() for source in sources.values()], non_blocking=True)
        if slots.keys() & self._copies.keys():  # only now, in case of an interrupt
            self._changed = tensors.keys() & self._copies.keys()
        if self._cache.is_on_gpu:
            self._is_copied = torch.cuda.Event()
            self._is_copied.record()
