"""`DeltaBank`: many tasks on one resident model, most of them in host memory or on disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_surgical.bank.adapters import InjectedAdapters
from peft_surgical.bank.base import BaseIndex
from peft_surgical.bank.cache import BankStats, RemovedError, TaskCache
from peft_surgical.bank.lock import SwitchLock
from peft_surgical.bank.memory import Footprint, NoRoomError, Task, parse_budget
from peft_surgical.bank.residency import CompiledResidency, EagerResidency
from peft_surgical.layers import unwrap
from peft_surgical.methods.heads import apply_label_settings
from peft_surgical.methods.rows import BASE


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
        device_bytes, host_bytes = parse_budget(device_budget), parse_budget(host_budget)
        if host_bytes is None and not any(parameter.is_cuda for parameter in model.parameters()):
            host_bytes = 0
        self.model = model.eval().requires_grad_(False)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._base = BaseIndex(model)
        self._adapters = InjectedAdapters(model)
        self._cache = TaskCache(
            self._base.tensors, device, device_bytes, host_bytes, lambda task: self._residency.withdraw(task)
        )
        self._tasks: dict[str, Task] = {}
        self._removed: dict[Footprint, str] = {}  # see `BaseIndex.check_beside`
        make = CompiledResidency if compiled else EagerResidency
        self._residency = make(self._adapters, self._cache, self._tasks)
        self._lock = SwitchLock(self._switch)
        self._numbers = count(1)
        self._switches = self._failures = 0

    # ---- tasks

    def add(self, name: str, source: str | os.PathLike, *, labels: Mapping[str, Any] | None = None) -> None:
        """Make a task known. Only the config and the header of its file are read.

        Args:
            name: What to call it, any text but `"__base__"`.
            source: Its saved adapter, of this package or a PEFT method that only puts modules in: folder or hub name.
            labels: `num_labels`, `id2label` and `label2id`, where the adapter's config does not tell them, as stock
                PEFT's do not.

        Raises:
            ValueError: There is such a task already, or the adapter is damaged, not for this base, or larger than the
                device budget. Other tasks are not concerned.
        """
        if name == BASE:
            raise ValueError(f"A task cannot be called {name!r}, which means the base itself. Choose another name.")
        self._refuse_known(name)
        with _naming(name):
            task = self._base.read_task(name, f"task_{next(self._numbers)}", source, labels or {})
            self._cache.on_device.check(task.layout.nbytes)
        with self._cache.lock:
            self._refuse_known(name)  # another thread may have been faster
            with _naming(name):
                there = [(repr(other.name), other.footprint) for other in self._tasks.values()]
                self._base.check_beside(task, there + [(said, left) for left, said in self._removed.items()])
            self._tasks[name] = task

    def remove(self, name: str) -> None:
        """Forget a task and free its memory, once no forward uses it.

        Whoever waits for the task then is told that it is gone, or gets the new one, if one was added by its name.
        """
        task = self._known(name)
        with self._lock.exclusively(), self._cache.lock:
            if self._tasks.get(name) is not task:
                self._known(name)  # another thread was faster
                return
            if task in self._cache.in_use:
                self._clear()
                self._lock.forget_key()
            if self._residency.forget(task):
                self._removed[task.footprint] = f"{name!r} (removed, but its wrappers stay in the model)"
            del self._tasks[name]  # only now, so that an interrupted removal may be tried again
            task.is_removed = True

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

        The task's tensors are the bank's: one that is kept beyond the block may be written over. A generator that
        yields within the block may be stepped and closed by any thread; others wait for it.

        Args:
            name: The task, or None for the base itself.

        Raises:
            ValueError: There is no such task, its file cannot be read, or it does not fit into the budget.
            RuntimeError: This is within the block of another task.

        Example: `with bank.task("rte") as model: model(**batch)`
        """
        with self._held([] if name is None else [name]):
            yield self.model

    @contextmanager
    def batch(self, names: Iterable[str]) -> Iterator[nn.Module]:
        """Use several tasks in one batch: within, row `i` of a batch is computed with the task `names[i]`.

        Such forwards run one at a time. What cannot be told apart by rows is an error, as it is for `adapter_names` of
        a `PeftModel`; so are tasks of other methods than this package's and LoRA.

        Args:
            names: A task for each row, or `"__base__"`.

        Raises:
            ValueError: As for `task`; or the tasks' heads differ in size, or the bank is a compiled one, or a batch
                has not as many rows as there are names.
        """
        if isinstance(self._residency, CompiledResidency):
            raise ValueError("A compiled bank has one task in the model at a time. Run a batch per task.")
        if isinstance(names, str):
            raise ValueError(f"names={names!r} must be a list with a task for each row.")
        rows = list(names)
        with self._held([name for name in dict.fromkeys(rows) if name != BASE], rows) as tasks:
            adapters = {task.name: task.adapter for task in tasks}
            # threads that wait may take tasks out of the model meanwhile
            with self._adapters.by_rows([adapters.get(name, BASE) for name in rows], self._cache.lock):
                yield self.model

    def activate(self, name: str | None) -> None:
        """Make a task the active one until another is asked for; None for the base itself."""
        with self.task(name):
            pass

    def prefetch(self, name: str) -> Future[None]:
        """Bring a task to the device in the background, on a GPU on a stream of its own.

        Nothing that another thread waits for has to leave for it; if there is no other room, nothing is done.
        """
        return self._cache.prefetch(self._known(name))

    def stats(self) -> BankStats:
        """What the bank has done so far, and holds now."""
        cache = self._cache
        with cache.lock:
            return BankStats(
                **cache.traffic,
                tasks=len(self._tasks),
                switches=self._switches,
                failures=self._failures,
                seconds_waiting=self._lock.seconds_waited,
                device_evictions=cache.on_device.evictions,
                host_evictions=cache.in_host.evictions,
                device_bytes=cache.on_device.used,
                device_peak=cache.on_device.peak,
                host_bytes=cache.in_host.used,
                host_peak=cache.in_host.peak,
            )

    # ---- behind it

    @contextmanager
    def _held(self, names: Sequence[str], rows: Sequence[str] = ()) -> Iterator[tuple[Task, ...]]:
        """Hold the model for tasks, or for a batch whose rows belong to several, with all that they need in place."""
        is_held = False
        while not is_held:
            use = _Use(tuple(map(self._known, names)), tuple(rows))
            if len(set(rows)) > 1:
                self._base.check_heads(use.tasks, has_base=BASE in rows)
            try:
                with self._cache.wanting(use.tasks):
                    for task in use.tasks:
                        self._cache.load_early(task)
                    with self._lock.held(use, alone=bool(rows)):
                        is_held = True
                        try:
                            for task in use.tasks:
                                self._residency.use(task)
                            yield use.tasks
                        finally:
                            self._residency.done()
            except RemovedError:
                if is_held:
                    raise  # else there may be another task by the name now

    def _switch(self, use: Any) -> None:
        """Make a task the active one. No forward runs meanwhile."""
        self._clear()
        self._cache.in_use = set(use.tasks)
        adapters = []
        try:
            for task in use.tasks:
                with _naming(task.name):
                    adapters.append(self._residency.bring(task))
        except BaseException as error:
            self._clear()
            self._failures += not isinstance(error, RemovedError)
            raise
        if use.tasks:
            apply_label_settings(self.model, use.tasks[0].labels or self._base.labels)
        if not use.rows:
            self._adapters.activate(adapters)
        self._switches += 1

    def _clear(self) -> None:
        """Let the model be the base."""
        self._adapters.activate([])
        self._cache.in_use = set()
        apply_label_settings(self.model, self._base.labels)

    def _known(self, name: str) -> Task:
        try:
            return self._tasks[name]
        except KeyError:
            known = ", ".join(sorted(self._tasks)[:20]) or "none"
            raise ValueError(f"There is no task {name!r}. Tasks: {known}.") from None

    def _refuse_known(self, name: str) -> None:
        if name in self._tasks:
            raise ValueError(f"There is a task {name!r} already. Remove it first, or choose another name.")


@dataclass(frozen=True)
class _Use:
    """What the model is held for: a task, the base (no task), or a batch whose rows belong to several tasks."""

    tasks: tuple[Task, ...]
    rows: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "a batch" if self.rows else f"the task {self.tasks[0].name!r}" if self.tasks else "the base"


@contextmanager
def _naming(task: str) -> Iterator[None]:
    """Put the task's name before what is wrong with it."""
    try:
        yield
    except ValueError as error:
        kind = type(error) if isinstance(error, (NoRoomError, RemovedError)) else ValueError
        raise kind(f"Task {task!r}: {error}") from error
