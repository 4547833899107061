"""Tasks: what is known of one before its values are read, its file, and the memory that it takes."""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from accelerate.utils import convert_file_size_to_int
from peft import PeftConfig

from peft_surgical.files.adapter import PACKED, AdapterTensors, Entry, method_of
from peft_surgical.files.check import read_header
from peft_surgical.files.encodings import find_encoding
from peft_surgical.files.packing import unpack
from peft_surgical.files.safetensors_io import READERS, Spec, checksum


ALIGNMENT = 256  # bytes; what matrix kernels like best
_WORTH_A_READER = 2**24  # bytes for which another thread that reads is worth its start

Key = TypeVar("Key")
Value = TypeVar("Value")


class Layout:
    """Where tensors lie in one buffer, one after the other and aligned; `same` are those that are another one."""

    def __init__(self, specs: Mapping[str, Spec], same: Mapping[str, str] | None = None):
        self.specs = dict(specs)
        self.offsets: dict[str, int] = {}
        self.nbytes = 0
        for name in (own := [name for name in self.specs if name not in (same or {})]):
            self.offsets[name] = self.nbytes
            self.nbytes += math.ceil(self.specs[name].nbytes / ALIGNMENT) * ALIGNMENT
        self.own = own
        self.offsets.update({name: self.offsets[other] for name, other in (same or {}).items()})

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in a buffer of bytes, by name."""
        bytes_of = {n: buffer[start : start + self.specs[n].nbytes] for n, start in self.offsets.items()}
        return {n: bytes_of[n].view(spec.dtype).view(spec.shape) for n, spec in self.specs.items()}


class TaskFile(AdapterTensors):
    """An adapter's file whose tensors are read straight into a buffer.

    A file that was changed since its header was read, be it while its values are read, is an error, not wrong values.
    """

    def __init__(self, path: str | os.PathLike, present_name: Callable[[str], str] = lambda name: name):
        self._stamp = _stamp(os.stat(path))
        self._checked: set[str] = set()  # checksums are looked at once, for the file may not change
        super().__init__(path, present_name)
        with open(path, "rb") as file:
            self._entries, self._start = read_header(file)
        self.nbytes = self._stamp[0] - self._start  # of its tensors

    @property
    def same(self) -> dict[str, str]:
        """By its name, a tensor that is another one."""
        stored = {key: name for name, key in self.names_in_file.items()}
        tied = {name: self.stored_as[key] for name, key in self.names_in_file.items() if key in self.stored_as}
        return {name: stored[key] for name, key in tied.items() if key in stored}

    def read(self, layout: Layout, buffer: torch.Tensor) -> None:
        """Read tensors into their places in a buffer on the CPU, packed ones unpacked, others without a copy."""
        data = buffer.numpy()
        names = layout.own
        readers = min(READERS, 1 + layout.nbytes // _WORTH_A_READER, len(names))
        try:
            if readers < 2:
                self._read_some(names, layout, data)
                return
            with ThreadPoolExecutor(readers) as pool:
                list(pool.map(lambda n: self._read_some(names[n::readers], layout, data), range(readers)))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} cannot be read ({error}). Copy it again and add the task anew.") from error

    def _read_some(self, names: Sequence[str], layout: Layout, data: np.ndarray) -> None:
        with open(self.path, "rb", buffering=0) as file:
            self._check_unchanged(file)
            for name in names:
                start, spec = layout.offsets[name], layout.specs[name]
                place = data[start : start + spec.nbytes]
                is_packed = name not in self
                key = self._key(name + PACKED * is_packed)
                entry = self._entries[key]
                begin, end = entry["data_offsets"]
                part = np.empty(end - begin, np.uint8) if is_packed else place
                read_all(file, self._start + begin, part.data)
                if self.header is not None and key not in self._checked:
                    found = checksum(entry["dtype"], entry["shape"], part)
                    self._check_unchanged(file)  # what was changed is not called damaged
                    self.header.check(key, found)
                    self._checked.add(key)
                if is_packed:
                    place[:] = (
                        unpack(torch.from_numpy(part), spec.shape, spec.dtype).view(-1).view(torch.uint8).numpy()
                    )
            self._check_unchanged(file)

    def _check_unchanged(self, file: FileIO) -> None:
        if _stamp(os.fstat(file.fileno())) != self._stamp:
            raise ValueError("it was changed after the bank read its header")


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_all(file: FileIO, start: int, target: memoryview) -> None:
    """Fill a buffer from a place in a file."""
    file.seek(start)
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise ValueError("it is cut off")
        done += count


@dataclass(eq=False)
class Task:
    """What the bank knows of one addition of a task. Another one under the same name is another `Task`."""

    name: str
    adapter: str  # what it is called in the model, which no two additions share
    config: PeftConfig
    file: TaskFile
    entries: dict[str, Entry]  # by their plain names in the file
    layout: Layout  # on the device, by their plain names in the file
    stored: Layout  # of the file's tensors in host memory, packed ones unpacked
    copies: Copies = field(default_factory=dict)  # for the SURGICAL method
    heads: list[str] = field(default_factory=list)  # likewise, the names in the base of its head's tensors
    labels: dict[str, Any] = field(default_factory=dict)  # number and names; empty for the base's own
    whole: set[str] = field(default_factory=set)  # the modules in whose place it has others, by path
    tuned: set[str] = field(default_factory=set)  # those that it tunes in any other way, and all around them
    projection: dict[str, Any] = field(default_factory=dict)  # what makes the random one that its method's tasks share
    is_removed: bool = False  # nothing of it is kept from then on

    @property
    def footprint(self) -> Footprint:
        """What it has in the model, as far as others must fit to it."""
        return frozenset(self.whole), frozenset(self.tuned), json.dumps(self.projection)

    @property
    def is_lossless(self) -> bool:
        """Whether decoding is work for the CPU, so that host memory holds decoded values."""
        return any(e.encoding != "values" and not find_encoding(e.encoding).lossy for e in self.entries.values())

    @property
    def is_surgical(self) -> bool:
        """Whether it has copies alone, beside a head."""
        return method_of(self.config) == "SURGICAL"

    def head_shapes(self, base: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
        """The shapes of what stands in the place of whole tensors of the base, by their names there."""
        shapes = {e.name: self.layout.specs[key].shape for key, e in self.entries.items() if not e.is_copy}
        return {name: shape for name, shape in shapes.items() if name in base}


Footprint = tuple[frozenset[str], frozenset[str], str]
"""The modules that a task has whole, and those it tunes, by path; and what makes its random projection, as JSON."""

Copies = dict[str, tuple[list[str], bool]]
"""By path: the names of the tensors that are copied, and whether the module is a layer that is tuned in place."""


@dataclass
class Resident:
    """A task's tensors on the device."""

    tensors: dict[str, torch.Tensor]  # by their plain names in the file; all of them lie in the buffer
    buffer: torch.Tensor
    is_ready: torch.cuda.Event | None = None  # on a GPU, after which they may be read

    def use(self) -> None:
        """Let the current stream read the tensors once they are there, and keep their memory until it has."""
        if self.is_ready is not None:
            stream = torch.cuda.current_stream(self.buffer.device)
            stream.wait_event(self.is_ready)
            self.buffer.record_stream(stream)


class NoRoomError(ValueError):
    """Something does not fit into a budget, even if all is given up that may be."""


class LruBudget(Generic[Key, Value]):
    """Values whose sizes never exceed a budget together; those that were used least recently are given up."""

    def __init__(self, name: str, budget: int | None, on_evict: Callable[[Key], None] = lambda key: None):
        self.name = name
        self.budget = budget
        self.peak = 0
        self.evictions = 0
        self._on_evict = on_evict
        self._held: OrderedDict[Key, tuple[int, Value | None]] = OrderedDict()  # None where room is but set aside

    @property
    def used(self) -> int:
        """The bytes of all values, and of the room set aside. A sum that is kept could be wrong after an interrupt."""
        return sum(nbytes for nbytes, _ in self._held.values())

    def __contains__(self, key: object) -> bool:
        return self._held.get(cast(Key, key), (0, None))[1] is not None

    def get(self, key: Key) -> Value | None:
        """A value, which is now the most recently used one; None if there is none."""
        if key not in self:
            return None
        self._held.move_to_end(key)
        return self._held[key][1]

    def check(self, nbytes: int) -> None:
        """Make sure that a value of so many bytes fits once all others are given up; else a `NoRoomError`."""
        if self.budget is not None and nbytes > self.budget:
            raise NoRoomError(
                f"It needs {nbytes:,} bytes and does not fit into the {self.name} budget of {self.budget:,}. Give a "
                "larger one."
            )

    def reserve(self, key: Key, nbytes: int, keep: Collection[Key] = ()) -> list[Value]:
        """Set room aside for a value; gives the values given up for it, the least recently used first, none in `keep`.

        Raises:
            NoRoomError: It does not fit. Nothing is given up then.
        """
        given_up: list[Key] = []
        if self.budget is not None:
            used = self.used
            free = self.budget - used
            for other, (size, value) in self._held.items():
                if free >= nbytes:
                    break
                if value is not None and other not in keep:
                    given_up.append(other)
                    free += size
            if free < nbytes:
                raise NoRoomError(
                    f"It needs {nbytes:,} bytes and does not fit into the {self.name} budget of {self.budget:,}, of "
                    f"which {used:,} are in use."
                )
        values = [self.evict(other) for other in given_up]
        self._held[key] = nbytes, None
        self.peak = max(self.peak, self.used)
        return values

    def put(self, key: Key, value: Value) -> None:
        self._held[key] = self._held[key][0], value

    def evict(self, key: Key) -> Value:
        """Give a value up, and return it."""
        self._on_evict(key)
        _, value = self._held.pop(key)
        self.evictions += 1
        return cast(Value, value)

    def drop_reservation(self, key: Key) -> None:
        """Free the room that was set aside for a value, unless the value is there, or there is no such room."""
        if key not in self:
            self._held.pop(key, None)


def parse_budget(budget: int | str | None) -> int | None:
    """A budget in bytes, e.g. of `"2GB"`; None stays None."""
    if budget is None or (isinstance(budget, int) and budget >= 0 and not isinstance(budget, bool)):
        return budget
    try:
        return convert_file_size_to_int(str(budget) if isinstance(budget, str) else "")
    except ValueError:
        raise ValueError(
            f"budget={budget!r} must be a number of bytes, or a text such as '2GB' or '512MiB'."
        ) from None
