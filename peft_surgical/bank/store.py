"""The tensors of tasks on their way between file, host memory and device."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from peft_surgical.bank.files import Layout, Spec, TaskFile
from peft_surgical.bank.tiers import NoRoomError, Tier
from peft_surgical.files.adapter import ERROR, Entry, decode_tensors, decoded_shapes, entries
from peft_surgical.files.safetensors_io import download
from peft_surgical.methods.config import read_config


@dataclass
class Task:
    """What the bank knows of a task before any of its values is read.

    Args:
        name: The task.
        adapter: The name of its adapter in the model.
        source: Where its adapter is saved.
        config: The adapter's config.
        file: The adapter's file.
        entries: The trained tensors in the file, by their plain names there.
        layout: Where the tensors lie on the device, by their plain names in the file.
        stored: Where the file's tensors lie in host memory.
    """

    name: str
    adapter: str
    source: str
    config: PeftConfig
    file: TaskFile
    entries: dict[str, Entry]
    layout: Layout
    stored: Layout

    @property
    def is_lossless(self) -> bool:
        """Whether decoding is work for the CPU, so that host memory holds decoded values."""
        return any(entry.encoding == "lossless" for entry in self.entries.values())


@dataclass
class Resident:
    """A task's tensors on the device.

    Args:
        tensors: The tensors, by their plain names in the file; all of them lie in `buffer`.
        buffer: The memory that they share.
        is_ready: On a GPU, the event after which they may be read.
    """

    tensors: dict[str, torch.Tensor]
    buffer: torch.Tensor
    is_ready: torch.cuda.Event | None = None

    def use(self) -> None:
        """Let the current stream read the tensors once they are there, and keep their memory until it has."""
        if self.is_ready is not None:
            stream = torch.cuda.current_stream(self.buffer.device)
            stream.wait_event(self.is_ready)
            self.buffer.record_stream(stream)


@dataclass
class Traffic:
    """What was moved so far: counts, bytes and seconds."""

    device_hits: int = 0
    host_hits: int = 0
    disk_hits: int = 0
    bytes_read: int = 0
    bytes_copied: int = 0
    seconds_reading: float = 0.0
    seconds_copying: float = field(default=0.0)


def read_task(name: str, adapter: str, source: str | os.PathLike, base: Mapping[str, torch.Tensor]) -> Task:
    """Read the config and the header of a saved adapter.

    Args:
        name: The task.
        adapter: What its adapter is to be called in the model.
        source: The adapter's folder, or its name on the hub.
        base: The base's own tensors, by name.

    Raises:
        ValueError: A file is missing or damaged, or does not fit the base.
    """
    folder = Path(source) if os.path.isdir(source) else download(os.fspath(source), ["adapter_*"])
    config, present_name = read_config(folder)
    file = TaskFile(folder / SAFETENSORS_WEIGHTS_NAME, present_name)
    found = {entry.key: entry for entry in entries(file.specs)}
    shapes = {key: spec.shape for key, spec in file.specs.items()}
    expected = {
        key: tuple(base[e.name].shape) for key, e in found.items() if e.encoding != "values" and e.name in base
    }
    shapes = {key: tuple(shape) for key, shape in decoded_shapes(shapes, expected, str(file.path)).items()}
    specs = {key: Spec(_device_dtype(entry, file, base), shapes[key]) for key, entry in found.items()}
    kept = {key: file.specs[key] for entry in found.values() for key in _stored_keys(entry)}
    return Task(name, adapter, os.fspath(source), config, file, found, Layout(specs), Layout(kept))


class Store:
    """Brings tasks to the device, by way of host memory, within two budgets.

    Args:
        base: The base's own tensors, by name.
        device: The device.
        device_budget: The most bytes of tasks on the device; None for no limit.
        host_budget: The most bytes of tasks in (on a GPU, pinned) host memory; None for no limit, 0 for no such tier.
        on_evict: Called with the name of a task that leaves the device.
    """

    def __init__(
        self,
        base: Mapping[str, torch.Tensor],
        device: torch.device,
        device_budget: int | None,
        host_budget: int | None,
        on_evict: Callable[[str], None],
    ):
        self.lock = threading.RLock()  # for all that is below, and for who is in the model
        self.device_tier: Tier[Resident] = Tier("device", device_budget, lambda name, _: on_evict(name))
        self.host_tier: Tier[torch.Tensor] = Tier("host", host_budget)
        self.protected: set[str] = set()  # tasks in use, which never leave the device
        self.wanted: Counter[str] = Counter()  # tasks that threads wait for
        self.traffic = Traffic()
        self.device = device
        self.is_on_gpu = device.type == "cuda"
        self._base = base
        self._loading = threading.Lock()
        self._stream = torch.cuda.Stream(device) if self.is_on_gpu else None

    def load(self, task: Task, *, gently: bool = False) -> Resident:
        """Bring a task to the device, if it is not there.

        Args:
            task: The task.
            gently: Whether to give up no other task that a thread waits for.

        Raises:
            NoRoomError: It does not fit.
            ValueError: Its file cannot be read or decoded.
        """
        if (resident := self._hit(task)) is not None:
            return resident
        with self._loading:
            if (resident := self._hit(task)) is not None:
                return resident
            with self.lock:
                keep = self.protected | (set(self.wanted) if gently else set())
                left = self.device_tier.reserve(task.name, task.layout.nbytes, keep)
            buffer = self._inherited(left, task.layout.nbytes)
            del left
            try:
                # tensors that are made in inference mode could not be told apart from one another later
                with torch.inference_mode(False), torch.no_grad():
                    resident = self._bring(task, buffer)
            except BaseException:
                with self.lock:
                    self.device_tier.drop_reservation(task.name)
                raise
            with self.lock:
                self.device_tier.put(task.name, resident)
            return resident

    def forget(self, task: Task) -> None:
        """Free all memory that a task takes."""
        with self._loading, self.lock:
            for tier in (self.device_tier, self.host_tier):
                if task.name in tier:
                    tier.evict(task.name)

    def _hit(self, task: Task) -> Resident | None:
        with self.lock:
            return self.device_tier.get(task.name)

    def _inherited(self, left: Sequence[Resident], nbytes: int) -> torch.Tensor | None:
        """On a CPU, the memory of a task that just left; new memory takes longer to be had than a file to be read."""
        buffers = [] if self.is_on_gpu else [resident.buffer for resident in left]
        return next((buffer for buffer in buffers if buffer.nbytes == nbytes), None)

    def _bring(self, task: Task, buffer: torch.Tensor | None) -> Resident:
        host = self._host_buffer(task)
        started = time.perf_counter()
        if self._stream is None:
            resident = self._copy(task, host, buffer)
        else:
            with torch.cuda.stream(self._stream):
                resident = self._copy(task, host, buffer)
                resident.is_ready = torch.cuda.Event()
                resident.is_ready.record()
        self.traffic.bytes_copied += task.layout.nbytes
        self.traffic.seconds_copying += time.perf_counter() - started
        return resident

    def _host_buffer(self, task: Task) -> torch.Tensor | None:
        """The task's bytes in host memory, read if need be; None if they have no room there."""
        with self.lock:
            buffer = self.host_tier.get(task.name)
            if buffer is not None:
                self.traffic.host_hits += 1
                return buffer
            self.traffic.disk_hits += 1
            try:
                nbytes = task.layout.nbytes if task.is_lossless else task.stored.nbytes
                self.host_tier.reserve(task.name, nbytes)
            except NoRoomError:
                return None
        started = time.perf_counter()
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_on_gpu)
            if task.is_lossless:
                for key, target in task.layout.views(buffer).items():
                    entry = task.entries[key]
                    target.copy_(self._decode(entry, self._read(task, entry), torch.device("cpu")))
            else:
                task.file.read(task.stored, buffer)
        except BaseException:
            with self.lock:
                self.host_tier.drop_reservation(task.name)
            raise
        self.traffic.bytes_read += task.stored.nbytes
        self.traffic.seconds_reading += time.perf_counter() - started
        with self.lock:
            self.host_tier.put(task.name, buffer)
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
                parts = self._read(task, entry) if host is None else {k: stored[k] for k in _stored_keys(entry)}
                tensors[key].copy_(self._decode(entry, parts, self.device), non_blocking=True)
        if host is None:
            self.traffic.bytes_read += task.stored.nbytes
        return Resident(task.layout.views(buffer), buffer)

    def _read(self, task: Task, entry: Entry) -> dict[str, torch.Tensor]:
        """The parts of one tensor, read from the file."""
        layout = Layout({key: task.stored.specs[key] for key in _stored_keys(entry)})
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        task.file.read(layout, buffer)
        return layout.views(buffer)

    def _decode(self, entry: Entry, parts: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
        if entry.key in parts:
            return parts[entry.key]
        parts = {key: tensor.to(device, non_blocking=True) for key, tensor in parts.items()}
        return decode_tensors(parts, {entry.key: self._base[entry.name].to(device)})[entry.key]


def _stored_keys(entry: Entry) -> list[str]:
    """The names of what is read of a tensor: all of its parts but the record of the error."""
    return [key for suffix, key in entry.keys().items() if suffix != ERROR]


def _device_dtype(entry: Entry, file: TaskFile, base: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The dtype that a tensor is computed with: the base's, or else as PEFT has it, at least float32."""
    if entry.name in base:
        return base[entry.name].dtype
    dtype = file.specs[entry.key].dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
