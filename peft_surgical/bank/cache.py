"""The tensors of tasks on their way between file, host memory and device, within budgets."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch

from peft_surgical.bank.lock import keep_whole_in_forks
from peft_surgical.bank.memory import Layout, LruBudget, NoRoomError, Resident, Task
from peft_surgical.files.adapter import Entry, decode_tensors
from peft_surgical.files.safetensors_io import naming


Value = TypeVar("Value")


class RemovedError(ValueError):
    """The task was removed meanwhile."""


@dataclass(frozen=True)
class BankStats:
    """What a bank has done so far, and holds now.

    Args:
        device_hits: How often a task that was asked for was on the device already.
        host_hits: How often it was brought from host memory.
        disk_hits: How often it was read from its file.
        bytes_read: Bytes read from files.
        bytes_copied: Bytes brought to the device.
        seconds_reading: Time spent reading.
        seconds_copying: Time spent copying and decoding; on a GPU, asking for it.
        tasks: Tasks that the bank knows.
        switches: How often another task was made active.
        failures: How often a task could not be brought.
        seconds_waiting: Time that threads waited for others' forwards and switches, all together.
        device_evictions: How often a task had to leave the device.
        host_evictions: How often one had to leave host memory.
        device_bytes: Bytes of tasks on the device now.
        device_peak: The most that there ever were.
        host_bytes: Bytes of tasks in host memory now.
        host_peak: The most that there ever were.
    """

    device_hits: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    bytes_read: int = 0
    bytes_copied: int = 0
    seconds_reading: float = 0.0
    seconds_copying: float = 0.0
    tasks: int = 0
    switches: int = 0
    failures: int = 0
    seconds_waiting: float = 0.0
    device_evictions: int = 0
    host_evictions: int = 0
    device_bytes: int = 0
    device_peak: int = 0
    host_bytes: int = 0
    host_peak: int = 0


class TaskCache:
    """Brings tasks to the device, by way of host memory, within two budgets."""

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        device: torch.device,
        device_budget: int | None,  # in bytes; None for no limit
        host_budget: int | None,  # of (on a GPU, pinned) memory; 0 for none at all
        on_evict: Callable[[Task], None],  # called with a task that leaves the device
    ):
        self.lock = threading.RLock()  # for these fields, and for which tasks are in the model
        self.on_device: LruBudget[Task, Resident] = LruBudget("device", device_budget, on_evict)
        self.in_host: LruBudget[Task, torch.Tensor] = LruBudget("host", host_budget)
        self.in_use: set[Task] = set()  # these never leave the device
        self.base = base
        self.traffic: dict[str, Any] = defaultdict(int)  # counts, bytes and seconds, by the names of `BankStats`
        self.device = device
        self.is_on_gpu = device.type == "cuda"
        self._wanted: list[Sequence[Task]] = []  # what threads wait for
        self._loading = threading.Lock()
        self._fetching: Task | None = None
        self._prefetching = ThreadPoolExecutor(1, thread_name_prefix="bank-prefetch")
        self._stream = torch.cuda.Stream(device) if self.is_on_gpu else None
        keep_whole_in_forks(self, self.lock)

    def load(self, task: Task, *, gently: bool = False) -> Resident:
        """Bring a task to the device, if it is not there; `gently`: give up no task that a thread waits for."""
        if (resident := self._hit(task)) is not None:
            return resident
        with self._loading:
            if (resident := self._hit(task)) is not None:
                return resident
            with self.lock:
                self._drop_reservations()
                self._fetching = task
            # tensors that are made in inference mode could not be told apart from one another later
            with self._filling(self.on_device, task), torch.inference_mode(False), torch.no_grad():
                with self.lock:
                    keep = self.in_use | ({*chain(*self._wanted)} if gently else set())
                    left = self.on_device.reserve(task, task.layout.nbytes, keep)
                # on a CPU, the memory of a task that just left: new memory takes longer to get than a file to read
                buffers = [] if self.is_on_gpu else [resident.buffer for resident in left]
                buffer = next((b for b in buffers if b.nbytes == task.layout.nbytes), None)
                del left, buffers
                resident = self._fetch(task, buffer)
                self._put(self.on_device, task, resident)
            self._fetching = None
            return resident

    def load_early(self, task: Task) -> None:
        """Bring a task to the device if there is room for it that nobody else needs."""
        try:
            self.load(task, gently=True)
        except ValueError:
            pass  # whoever switches to it tries again, with all the room there is, and reports what is wrong

    def prefetch(self, task: Task) -> Future[None]:
        """Let another thread do `load_early`."""
        return self._prefetching.submit(self.load_early, task)

    def forget(self, task: Task) -> None:
        """Free all memory that a task takes. One who reads it meanwhile finds it removed at the end."""
        self.in_use.discard(task)
        for memory in (self.on_device, self.in_host):
            if task in memory:
                memory.evict(task)

    @contextmanager
    def wanting(self, tasks: Sequence[Task]) -> Iterator[None]:
        """Let no one who is not in need take the memory of these tasks within the block."""
        with self.lock:
            self.traffic["device_hits"] += sum(task in self.on_device for task in tasks)
        try:
            self._wanted.append(tasks)
            yield
        finally:
            if tasks in self._wanted:  # not behind the lock, where an interrupt would keep them for good
                self._wanted.remove(tasks)

    def forget_other_threads(self) -> None:
        """Called in a forked child, which has none of its parent's other threads."""
        self._loading = threading.Lock()
        self._prefetching = ThreadPoolExecutor(1, thread_name_prefix="bank-prefetch")
        self._wanted.clear()
        self._drop_reservations()

    # ---- fetching

    def _drop_reservations(self) -> None:
        """Free the room that the last fetch has set aside and could not free itself, after an interrupt."""
        if self._fetching is not None:
            self.on_device.drop_reservation(self._fetching)
            self.in_host.drop_reservation(self._fetching)

    def _hit(self, task: Task) -> Resident | None:
        with self.lock:
            if task.is_removed:
                raise RemovedError(f"The task {task.name!r} was removed.")
            return self.on_device.get(task)

    def _put(self, memory: LruBudget[Task, Value], task: Task, value: Value) -> None:
        with self.lock:
            if task.is_removed:
                raise RemovedError(f"The task {task.name!r} was removed.")
            memory.put(task, value)

    @contextmanager
    def _filling(self, memory: LruBudget, task: Task) -> Iterator[None]:
        """Free the room that was set aside for a task if it does not get there within the block."""
        try:
            yield
        finally:
            with self.lock:
                memory.drop_reservation(task)

    def _fetch(self, task: Task, buffer: torch.Tensor | None) -> Resident:
        host = self._host_buffer(task)
        started = time.perf_counter()
        if self._stream is None:
            resident = self._copy(task, host, buffer)
        else:
            with torch.cuda.stream(self._stream):
                resident = self._copy(task, host, buffer)
                resident.is_ready = torch.cuda.Event()
                resident.is_ready.record()
        self.traffic["bytes_copied"] += task.layout.nbytes
        self.traffic["seconds_copying"] += time.perf_counter() - started
        return resident

    def _host_buffer(self, task: Task) -> torch.Tensor | None:
        """The task's bytes in host memory, read if need be; None if they have no room there."""
        with self._filling(self.in_host, task):
            with self.lock:
                buffer = self.in_host.get(task)
                if buffer is not None:
                    self.traffic["host_hits"] += 1
                    return buffer
                self.traffic["disk_hits"] += 1
                try:
                    nbytes = task.layout.nbytes if task.is_lossless else task.stored.nbytes
                    self.in_host.reserve(task, nbytes)
                except NoRoomError:
                    return None
            started = time.perf_counter()
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_on_gpu)
            if task.is_lossless:
                for key, target in task.layout.views(buffer).items():
                    entry = task.entries[key]
                    target.copy_(self._decode(task, entry, self._read(task, entry), torch.device("cpu")))
            else:
                task.file.read(task.stored, buffer)
            self._put(self.in_host, task, buffer)
        self.traffic["bytes_read"] += task.file.nbytes
        self.traffic["seconds_reading"] += time.perf_counter() - started
        return buffer

    def _copy(self, task: Task, host: torch.Tensor | None, buffer: torch.Tensor | None) -> Resident:
        """Fill a buffer on the device: at once where the bytes are the same, else tensor by tensor."""
        if buffer is None:
            buffer = torch.empty(task.layout.nbytes, dtype=torch.uint8, device=self.device)
        is_same = task.is_lossless or task.stored.specs == task.layout.specs
        if host is not None and is_same:
            buffer.copy_(host, non_blocking=True)  # before all else, which is done meanwhile
        elif host is None and is_same and not task.is_lossless and self.device.type == "cpu":
            task.file.read(task.layout, buffer)
        else:
            stored, tensors = {} if host is None else task.stored.views(host), task.layout.views(buffer)
            for key, entry in task.entries.items():
                parts = self._read(task, entry) if host is None else {k: stored[k] for k in entry.value_keys()}
                tensors[key].copy_(self._decode(task, entry, parts, self.device), non_blocking=True)
        if host is None:
            self.traffic["bytes_read"] += task.file.nbytes
        return Resident(task.layout.views(buffer), buffer)

    def _read(self, task: Task, entry: Entry) -> dict[str, torch.Tensor]:
        """The parts of one tensor, read from the file."""
        layout = Layout({key: task.stored.specs[key] for key in entry.value_keys()})
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        task.file.read(layout, buffer)
        return layout.views(buffer)

    def _decode(
        self, task: Task, entry: Entry, parts: Mapping[str, torch.Tensor], device: torch.device
    ) -> torch.Tensor:
        if entry.key in parts:
            return parts[entry.key]
        parts = {key: tensor.to(device, non_blocking=True) for key, tensor in parts.items()}
        with naming(task.file.path):
            return decode_tensors(parts, {entry.key: self.base[entry.name].to(device)})[entry.key]
