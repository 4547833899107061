"""Memory for tasks: how tensors lie in one buffer, and budgets of bytes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from io import FileIO
from typing import Generic, TypeVar

import torch
from accelerate.utils import convert_file_size_to_int
from torch import nn


ALIGNMENT = 256  # bytes; what matrix kernels like best

Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Spec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


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

    def slice(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The bytes of one tensor in a buffer."""
        return buffer[self.offsets[name] : self.offsets[name] + self.specs[name].nbytes]

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors in a buffer of bytes, by name."""
        return {n: self.slice(buffer, n).view(spec.dtype).view(spec.shape) for n, spec in self.specs.items()}


class NoRoomError(ValueError):
    """Something does not fit into a budget, even if all is given up that may be."""


class LruBudget(Generic[Key, Value]):
    """Values whose sizes never exceed a budget together; those that were used least recently are given up."""

    def __init__(self, name: str, budget: int | None, on_evict: Callable[[Key], None] = lambda key: None):
        self.name = name
        self.budget = budget
        self.used = 0
        self.peak = 0
        self.evictions = 0
        self._on_evict = on_evict
        self._sizes: OrderedDict[Key, int] = OrderedDict()
        self._values: dict[Key, Value] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: Key) -> Value | None:
        """A value, which is now the most recently used one; None if there is none."""
        if key not in self._values:
            return None
        self._sizes.move_to_end(key)
        return self._values[key]

    def reserve(self, key: Key, nbytes: int, keep: Collection[Key] = ()) -> list[Value]:
        """Set room aside for a value; gives the values given up for it, the least recently used first, none in `keep`.

        Raises:
            NoRoomError: It does not fit. Nothing is given up then.
        """
        given_up: list[Key] = []
        if self.budget is not None:
            free = self.budget - self.used
            for other, size in self._sizes.items():
                if free >= nbytes:
                    break
                if other in self._values and other not in keep:
                    given_up.append(other)
                    free += size
            if free < nbytes:
                raise NoRoomError(
                    f"It needs {nbytes:,} bytes and does not fit into the {self.name} budget of {self.budget:,}, of "
                    f"which {self.used:,} are in use."
                )
        values = [self.evict(other) for other in given_up]
        self._sizes[key] = nbytes
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return values

    def put(self, key: Key, value: Value) -> None:
        """Store the value for which room was set aside."""
        self._values[key] = value

    def evict(self, key: Key) -> Value:
        """Give a value up, and return it."""
        value = self._values.pop(key)
        self.drop_reservation(key)
        self.evictions += 1
        self._on_evict(key)
        return value

    def drop_reservation(self, key: Key) -> None:
        """Free the room that was set aside for a value, unless the value is there, or there is no such room."""
        if key not in self._values:
            self.used -= self._sizes.pop(key, 0)


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


def read_all(file: FileIO, start: int, target: memoryview) -> None:
    """Fill a buffer from a place in a file."""
    file.seek(start)
    done = 0
    while done < len(target):
        count = file.readinto(target[done:])
        if not count:
            raise ValueError("it is cut off")
        done += count


def structure_of(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """The same tree of modules, with the same tensors, that does not change when modules of the model are wrapped."""
    if id(module) not in known:
        twin = known[id(module)] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__, _parameters=dict(module._parameters), _buffers=dict(module._buffers))
        children = module._modules.items()
        twin.__dict__["_modules"] = {n: None if c is None else structure_of(c, known) for n, c in children}
    return known[id(module)]
