"""`DeltaBank`: many tasks on one resident model, most of them in host memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_surgical.bank.locks import SwitchLock
from peft_surgical.bank.seats import Seats
from peft_surgical.bank.slots import SharedSlots
from peft_surgical.bank.stats import BankStats
from peft_surgical.bank.store import Task, read_task
from peft_surgical.bank.tiers import parse_budget
from peft_surgical.layers import unwrap
from peft_surgical.methods.heads import apply_label_settings, label_settings
from peft_surgical.methods.mixed_batch import BASE, adapter_names_in_forward


class DeltaBank:
    """Hundreds of saved adapters on one resident base model.

    Adding a task reads only its header. What is used lives on the device; within the budgets, what was used least
    recently goes back to (on a GPU, pinned) host memory, and from there to its file. Tasks may be of different PEFT
    methods, tune different layers and have heads of different sizes; the model's labels follow the active task.

    Any number of threads may use the bank: forwards of one task run side by side, a switch waits for those that run.

    Args:
        model: The base model, without adapters, on its device. The bank puts PEFT's wrappers into it, in place, and
            sets it to evaluation mode; call it as before.
        device_budget: The most bytes of tasks on the device, as a number or a text such as `"2GB"`; None for no limit.
        host_budget: The most bytes of tasks in host memory. None is no limit on a GPU; on a CPU, where host and device
            are the same memory, it is none at all.
        compiled: Whether the model will be compiled. A switch then copies into tensors that stay where they are, so
            that `torch.compile` and CUDA graphs go on with what they have. They compile once for each size of heads.

    Raises:
        ValueError: The model has adapters already, or a budget is not understood.

    Example:

        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, intermediate_size=8)
        >>> bank = DeltaBank(BertModel(config), device_budget="10MB")
        >>> bank.stats().tasks
        0
    """

    def __init__(
        self,
        model: nn.Module,
        device_budget: int | str | None = None,
        host_budget: int | str | None = None,
        *,
        compiled: bool = False,
    ):
        model = unwrap(model)
        if hasattr(model, "peft_config") or any(isinstance(m, BaseTunerLayer) for m in model.modules()):
            raise ValueError("The model has adapters already. Give the bank a base model, e.g. peft_model.unload().")
        self.model = model.eval().requires_grad_(False)
        self._base = dict(model.state_dict(keep_vars=True))
        self._base_labels = label_settings(model)
        self._lock = SwitchLock(self._switch)
        host = parse_budget(host_budget)
        if host is None and not any(parameter.is_cuda for parameter in model.parameters()):
            host = 0
        make = SharedSlots if compiled else Seats
        self._seats = make(model, self._base, parse_budget(device_budget), host, self._lock.exclusively)
        self._store = self._seats.store
        self._is_compiled = compiled
        self._tasks: dict[str, Task] = {}
        self._labels: dict[str, dict[str, Any]] = {}
        self._count = self._switches = self._failures = 0
        self._prefetching = ThreadPoolExecutor(1, thread_name_prefix="prefetch")

    # ---- tasks

    def add(self, name: str, source: str | os.PathLike, *, labels: Mapping[str, Any] | None = None) -> None:
        """Make a task known. Only the config and the header of its file are read.

        Args:
            name: What to call it, any text.
            source: Its saved adapter, of any PEFT method that puts modules into the model: a folder, or its name on
                the hub.
            labels: `num_labels`, `id2label` and `label2id`, where the adapter's config does not tell them, as stock
                PEFT's do not.

        Raises:
            ValueError: There is such a task already, or the adapter is damaged or not for this base. Other tasks are
                not concerned.
        """
        with self._store.lock:
            self._refuse_known(name)
            self._count += 1
            adapter = f"task_{self._count}"
        with _naming(name):
            task = read_task(name, adapter, source, self._base)
            self._seats.check(task)
        known = labels or getattr(task.config, "labels", None) or _labels_in(task, self._base, self._base_labels)
        with self._store.lock:
            self._refuse_known(name)  # another thread may have been faster
            self._labels[name] = dict(known)
            self._tasks[name] = task

    def remove(self, name: str) -> None:
        """Forget a task and free its memory, once no forward uses it."""
        task = self._known(name)
        with self._lock.exclusively():
            self._lock.forget()
            self._seats.places.activate([])
            self._store.protected = set()
            self._seats.forget(task)
            del self._tasks[name], self._labels[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._tasks))

    # ---- using them

    @contextmanager
    def task(self, name: str | None) -> Iterator[nn.Module]:
        """Use a task for a while: within, the model computes as the task's own model does.

        The task's tensors are the bank's: one that is kept beyond the block may be written over.

        Args:
            name: The task, or None for the base itself.

        Raises:
            ValueError: There is no such task, its file cannot be read, or it does not fit into the budget.
            RuntimeError: This thread is within another task.

        Example: `with bank.task("rte") as model: model(**batch)`
        """
        with self._held(_Use(() if name is None else (name,))):
            yield self.model

    @contextmanager
    def batch(self, names: Sequence[str]) -> Iterator[nn.Module]:
        """Use several tasks in one batch: within, row `i` of a batch is computed with the task `names[i]`.

        Such forwards run one at a time. What cannot be told apart by rows is an error, as it is for `adapter_names` of
        a `PeftModel`.

        Args:
            names: A task for each row, or `"__base__"`.

        Raises:
            ValueError: As for `task`; or the tasks' heads differ in size, or the bank is a compiled one.
        """
        if self._is_compiled:
            raise ValueError("A compiled bank has one task in the model at a time. Run a batch per task.")
        tasks = tuple(dict.fromkeys(name for name in names if name != BASE))
        sizes = {name: self._labels_of(name).get("num_labels") for name in tasks}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"The heads of these tasks differ in size and cannot share a batch: {sizes}.")
        with self._held(_Use(tasks, is_batch=True)):
            adapters = [name if name == BASE else self._tasks[name].adapter for name in names]
            tuner = self._seats.places.any_tuner
            with adapter_names_in_forward(tuner, adapters, ()) if tasks else nullcontext():
                yield self.model

    def activate(self, name: str | None) -> None:
        """Make a task the active one until another is asked for; None for the base itself."""
        with self.task(name):
            pass

    def prefetch(self, name: str) -> Future[None]:
        """Bring a task to the device in the background, on a GPU on a stream of its own.

        Nothing that another thread waits for has to leave for it; if there is no other room, nothing is done.
        """
        return self._prefetching.submit(self._seats.bring_early, self._known(name))

    def stats(self) -> BankStats:
        """What the bank has done so far, and holds now."""
        return BankStats.of(
            self._store,
            tasks=len(self._tasks),
            switches=self._switches,
            seconds_waiting=self._lock.seconds_waited,
            failures=self._failures,
        )

    # ---- behind it

    @contextmanager
    def _held(self, use: _Use) -> Iterator[None]:
        """Hold the model for a use of it, with all that it needs in place."""
        tasks = [self._known(name) for name in use.names]
        with self._want(use.names):
            for task in tasks:
                self._seats.bring_early(task)
            self._lock.acquire(use, alone=use.is_batch)
        try:
            for task in tasks:
                self._seats.use(task)
            yield
        finally:
            self._seats.done()
            self._lock.release()

    @contextmanager
    def _want(self, names: Sequence[str]) -> Iterator[None]:
        """Let no one who is not in need take the memory of these tasks."""
        wanted = self._store.wanted
        with self._store.lock:
            wanted.update(names)
            self._store.traffic.device_hits += sum(name in self._store.device_tier for name in names)
        try:
            yield
        finally:
            with self._store.lock:
                wanted.subtract(names)
                for name in names:
                    if not wanted[name]:
                        del wanted[name]

    def _switch(self, use: Any) -> None:
        """Make a task the active one. No forward runs meanwhile."""
        places = self._seats.places
        with self._store.lock:
            places.activate([])
            self._store.protected = set(use.names)
        apply_label_settings(self.model, self._base_labels)
        adapters = []
        try:
            for name in use.names:
                with _naming(name):
                    adapters.append(self._seats.bring(self._known(name)))  # it may have been removed meanwhile
        except BaseException:
            self._store.protected = set()
            self._failures += 1
            raise
        if use.names:
            apply_label_settings(self.model, self._labels_of(use.names[0]))
        if not use.is_batch:
            places.activate(adapters)
        self._switches += 1

    def _known(self, name: str) -> Task:
        try:
            return self._tasks[name]
        except KeyError:
            known = ", ".join(sorted(self._tasks)[:20]) or "none"
            raise ValueError(f"There is no task {name!r}. Tasks: {known}.") from None

    def _refuse_known(self, name: str) -> None:
        if name in self._tasks:
            raise ValueError(f"There is a task {name!r} already. Remove it first, or choose another name.")

    def _labels_of(self, name: str) -> dict[str, Any]:
        self._known(name)
        return self._labels[name] or self._base_labels


@dataclass(frozen=True)
class _Use:
    """What a thread holds the model for: a task, the base (no task), or a batch of several tasks."""

    names: tuple[str, ...]
    is_batch: bool = False


@contextmanager
def _naming(task: str) -> Iterator[None]:
    """Put the task's name before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"Task {task!r}: {error}") from error


def _labels_in(task: Task, base: Mapping[str, torch.Tensor], of_base: Mapping[str, Any]) -> dict[str, Any]:
    """The number of labels by the shape of the task's head, where it is not the base's."""
    before = of_base.get("num_labels")
    for key, entry in task.entries.items():
        shape = task.layout.specs[key].shape
        if not entry.is_copy and entry.name in base and shape and base[entry.name].shape[0] == before != shape[0]:
            return {"num_labels": shape[0], "id2label": {i: f"LABEL_{i}" for i in range(shape[0])}}
    return {}
