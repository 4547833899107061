"""How tasks that are on the device get into the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from peft_surgical.bank.place import Place
from peft_surgical.bank.places import Places
from peft_surgical.bank.store import Store, Task
from peft_surgical.bank.structure import Structure
from peft_surgical.bank.tiers import NoRoomError
from peft_surgical.files.adapter import method_of


class Seats:
    """A place in the model for each task: any number of tasks are in the model at once, and a switch only names one.

    Args:
        model: The base model.
        base: The base's own tensors, by name.
        device_budget: The most bytes of tasks on the device; None for no limit.
        host_budget: The most bytes of tasks in host memory; None for no limit.
        exclusively: Gives a context in which no forward runs.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Mapping[str, torch.Tensor],
        device_budget: int | None,
        host_budget: int | None,
        exclusively: Callable[[], AbstractContextManager],
    ):
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self.places = Places(model)
        self.store = Store(base, device, device_budget, host_budget, on_evict=self._withdraw)
        self._base = base
        self._exclusively = exclusively
        self._structure: Structure | None = None
        self._place: dict[str, Place] = {}

    def check(self, task: Task) -> None:
        """Check a task against the base, as far as its method lets be known by header and config.

        Raises:
            ValueError: It does not fit. The message names the first difference.
        """
        if method_of(task.config) != "SURGICAL":
            return
        if self._structure is None:
            # PEFT changes how all of PyTorch registers parameters while it works on the meta device
            with self._exclusively(), self.store.lock:
                if self._structure is None:
                    self.places.peft_place(task)  # PEFT sets up the method's tuner along with it
                    self._structure = Structure(self.places.tuner("SURGICAL"), self._base)
        config: Any = task.config
        self._structure.check(config, task.layout.specs, str(task.file.path))

    def bring(self, task: Task) -> str:
        """Bring a task to the device and into the model; gives its adapter. No forward runs meanwhile.

        Raises:
            NoRoomError: It does not fit into the budget.
            ValueError: Its file cannot be read, or does not fit the base.
        """
        self.store.load(task)
        with self.store.lock:
            if not self._enter(task):
                self._place[task.name] = self.places.peft_place(task)
                self._enter(task)
        return task.adapter

    def bring_early(self, task: Task) -> None:
        """Bring a task to the device, and into the model if that takes no work of PEFT, while forwards run."""
        if self._load_early(task):
            self._enter(task)

    def use(self, task: Task) -> None:
        """Called by a thread before its forwards: let its stream read the task's tensors."""
        self.store.load(task).use()

    def done(self) -> None:
        """Called by a thread after its forwards, some of which may still run on a GPU."""

    def forget(self, task: Task) -> None:
        """Free all memory that a task takes. No forward runs meanwhile."""
        self.store.forget(task)
        self._place.pop(task.name, None)

    def _load_early(self, task: Task) -> bool:
        try:
            self.store.load(task, gently=True)
        except (NoRoomError, ValueError):
            return False  # whoever switches to it tries again, with all the room there is, and reports what is wrong
        return True

    def _enter(self, task: Task) -> bool:
        """Put a task that is on the device into the model; False if PEFT has to make a place for it first."""
        with self.store.lock:
            resident = self.store.device_tier.get(task.name)
            if task.name not in self._place and not self._make_place(task):
                return False
            place = self._place[task.name]
            if resident is not None and not place.is_in_model:
                self.places.enter(place, task, resident.tensors)
            return True

    def _make_place(self, task: Task) -> bool:
        """Make a place for a task if all modules that it needs are wrapped already."""
        if method_of(task.config) != "SURGICAL" or self._structure is None:
            return False
        config: Any = task.config
        units, heads = self._structure.units(config), self._structure.heads(config)
        if not self.places.has_room(units, heads):
            return False
        self._place[task.name] = self.places.copies_place(task.adapter, units, heads, task.layout.specs)
        return True

    def _withdraw(self, name: str) -> None:
        if name in self._place:
            self.places.withdraw(self._place[name])
