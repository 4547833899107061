"""What is known of a task before its values are read, and its file, whose values are read straight into a buffer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from io import FileIO
from typing import Any

import numpy as np
import torch
from peft import PeftConfig

from peft_surgical.bank.memory import Layout, Spec, read_all
from peft_surgical.files.adapter import PACKED, AdapterTensors, Entry, method_of
from peft_surgical.files.encodings import find_encoding
from peft_surgical.files.packing import unpack
from peft_surgical.files.safetensors_io import DTYPES, READERS, checksum


_WORTH_A_READER = 2**24
"""Bytes for which another thread that reads is worth its start."""


class TaskFile(AdapterTensors):
    """An adapter's file whose tensors are read straight into a buffer.

    A file that was changed since its header was read, be it while its values are read, is an error, not wrong values.
    """

    def __init__(self, path: str | os.PathLike, present_name: Callable[[str], str] = lambda name: name):
        self._stamp = _stamp(os.stat(path))
        self._checked: set[str] = set()  # checksums are looked at once, for the file may not change
        super().__init__(path, present_name)
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._entries = json.loads(file.read(length))
        self._start = 8 + length  # of the tensors
        self.nbytes = self._stamp[0] - self._start  # of its tensors

    def spec(self, name: str) -> Spec:
        """Dtype and shape of a tensor."""
        entry = self._entries[self._key(name)]
        return Spec(DTYPES[entry["dtype"]], tuple(entry["shape"]))

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
                part = place = data[start : start + spec.nbytes]
                if is_packed := name not in self:
                    name += PACKED
                    part = np.empty(self.spec(name).nbytes, np.uint8)
                key = self._key(name)
                entry = self._entries[key]
                read_all(file, self._start + entry["data_offsets"][0], part.data)
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
