"""What is known of a task before its values are read, and its file, whose values are read straight into a buffer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig

from peft_surgical.bank.memory import Layout, Spec, read_all
from peft_surgical.files.adapter import PACKED, Entry, method_of, tied_keys
from peft_surgical.files.check import read_header
from peft_surgical.files.encodings import find_encoding
from peft_surgical.files.packing import unpack
from peft_surgical.files.safetensors_io import DTYPES, READERS, Header, checksum
from peft_surgical.names import own_names


_WORTH_A_READER = 2**24
"""Bytes for which another thread that reads is worth its start."""


class TaskFile:
    """A safetensors file of which only the header is read until its tensors are asked for.

    No handle stays open. A file that was changed since its header was read, be it while its values are read, is an
    error, not wrong values.
    """

    def __init__(self, path: str | os.PathLike, present_name: Callable[[str], str] = lambda name: name):
        self.path = Path(path)
        self._checked: set[str] = set()  # checksums are looked at once, for the file may not change
        try:
            with open(self.path, "rb") as file:
                self._stamp = _stamp(file.fileno())
                entries, start = read_header(file)
            self.header = Header.parse(entries.pop("__metadata__", None) or {})
            self._entries = {present_name(name): {**entry, "name": name} for name, entry in entries.items()}
            self.specs = {n: Spec(DTYPES[e["dtype"]], tuple(e["shape"])) for n, e in self._entries.items()}
            self._starts = {name: start + entry["data_offsets"][0] for name, entry in self._entries.items()}
            end = start
            for name in sorted(self._starts, key=lambda name: (self._starts[name], self.specs[name].nbytes)):
                if self._starts[name] != end or min(self.specs[name].shape, default=0) < 0:
                    raise ValueError(f"the tensor {name!r} begins at byte {self._starts[name]} instead of {end}")
                end += self.specs[name].nbytes
            self.nbytes = end - start  # of its tensors
            if end != self._stamp[0]:
                raise ValueError(f"it has {self._stamp[0]} bytes and should have {end}")
            self.same: dict[str, str] = {}  # by its name, a tensor that is another one
            for name, other in tied_keys(self.header, [(name, e["name"]) for name, e in self._entries.items()]):
                self.also_as(name, present_name(other))
            self.specs = {name: self.specs[name] for name in own_names(self.specs)}
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as a safetensors file ({error}). Copy it again.") from error

    def also_as(self, name: str, other: str) -> None:
        """Let a tensor have another name as well."""
        self.specs[other], self._entries[other] = self.specs[name], self._entries[name]
        self._starts[other] = self._starts[name]
        self.same[other] = self.same.get(name, name)

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
                part = place = data[start : start + spec.nbytes]
                if is_packed := name not in self.specs:
                    name += PACKED
                    part = np.empty(self.specs[name].nbytes, np.uint8)
                read_all(file, self._starts[name], part.data)
                if self.header is not None and name not in self._checked:
                    entry = self._entries[name]
                    found = checksum(entry["dtype"], entry["shape"], part)
                    self._check_unchanged(file)  # what was changed is not called damaged
                    self.header.check(entry["name"], found)
                    self._checked.add(name)
                if is_packed:
                    place[:] = (
                        unpack(torch.from_numpy(part), spec.shape, spec.dtype).view(-1).view(torch.uint8).numpy()
                    )
            self._check_unchanged(file)

    def _check_unchanged(self, file: FileIO) -> None:
        if _stamp(file.fileno()) != self._stamp:
            raise ValueError("it was changed after the bank read its header")


def _stamp(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns, status.st_ino


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
    is_removed: bool = False  # nothing of it is kept from then on

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


Copies = dict[str, tuple[list[str], bool]]
"""By path: the names of the tensors that are copied, and whether the module is a layer that is tuned in place."""
