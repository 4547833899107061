"""What is known of a task before its values are read, and its file, whose values are read straight into a buffer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from torch import nn

from peft_surgical.bank.memory import Layout, Spec, read_all, structure_of
from peft_surgical.files.adapter import PACKED, SEPARATOR, Entry, entries, method_of, touched_names
from peft_surgical.files.base import check_base, describe_base
from peft_surgical.files.check import check_tensors, decoded_shapes, read_header
from peft_surgical.files.encodings import find_encoding
from peft_surgical.files.packing import unpack
from peft_surgical.files.safetensors_io import DTYPES, READERS, Header, checksum, download
from peft_surgical.methods.config import DeltaConfig, naming_adapter, read_config
from peft_surgical.methods.heads import head_names, head_shapes, label_settings
from peft_surgical.methods.stratified.config import CHANGES_BASE
from peft_surgical.methods.surgical import SurgicalConfig, resolve_surgical
from peft_surgical.methods.wrappers import BASE
from peft_surgical.names import PREFIX, CopyName


_CHOICES = ("layers", "target_modules", "exclude_modules", "extra_modules", "dequantize")
"""The fields of a `SurgicalConfig` that say what is tuned."""

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
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} cannot be read as a safetensors file ({error}). Copy it again.") from error

    def read(self, layout: Layout, buffer: torch.Tensor) -> None:
        """Read tensors into their places in a buffer on the CPU, packed ones unpacked, others without a copy."""
        data = buffer.numpy()
        names = list(layout.specs)
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


class BaseIndex:
    """What the base was like before the bank put anything into it, for checking tasks quickly and in any thread."""

    def __init__(self, model: nn.Module):
        self.tensors = dict(model.state_dict(keep_vars=True))
        self.labels = label_settings(model)
        self._model: Any = structure_of(model, {})  # wrappers that come later do not show in it
        self._record = describe_base(self._model)
        self._known: set[str] = set()  # the records that were found to be of this base
        self._choose = lru_cache(maxsize=256)(self._choose_anew)

    def read_task(self, name: str, adapter: str, source: str | os.PathLike, labels: Mapping[str, Any]) -> Task:
        """Read the config and the header of a saved adapter, and check them; `labels` count if its config has none."""
        folder = Path(source) if os.path.isdir(source) else download(os.fspath(source), ["adapter_*"])
        config, present_name = read_config(folder)
        with naming_adapter(config):
            _refuse_what_no_swap_undoes(config)
        file = TaskFile(folder / SAFETENSORS_WEIGHTS_NAME, present_name)
        if isinstance(config, DeltaConfig):
            config.take_header(file.header, file.path)
            config.forget_saved_names()
        found = {entry.key: entry for entry in entries(dict.fromkeys(file.specs))}
        decoded_shapes(file.specs, {}, None, str(file.path))
        for key, entry in found.items():
            if entry.encoding != "values" and entry.name not in self.tensors:
                raise ValueError(
                    f"{file.path}: the tensor {key!r} is encoded, but the base has none to decode it with."
                )
        is_decoded = {key: e for key, e in found.items() if e.encoding != "values" and e.name in self.tensors}
        expected = {key: tuple(self.tensors[entry.name].shape) for key, entry in is_decoded.items()}
        shapes = decoded_shapes(file.specs, expected, self.tensors, str(file.path))
        specs = {key: Spec(self._device_dtype(entry, file), tuple(shapes[key])) for key, entry in found.items()}
        kept = {
            key: file.specs.get(key) or _unpacked_spec(entry, key, expected[entry.key])
            for entry in found.values()
            for key in entry.value_keys()
        }
        task = Task(name, adapter, config, file, found, Layout(specs), Layout(kept))
        task.labels = dict(labels or getattr(config, "labels", None) or self._labels_in(task))
        if isinstance(config, DeltaConfig):
            with config.naming_itself():
                if config.check_base:
                    self._check_base(config.record or {}, touched_names(file.specs))
                if task.is_surgical:
                    self._check(task)
        return task

    def check_heads(self, tasks: Iterable[Task], has_base: bool) -> None:
        """Check that the rows of a batch, some of which may be the base's, have heads of one size."""
        heads = {task.name: task.head_shapes(self.tensors) for task in tasks} | ({BASE: {}} if has_base else {})
        for name in {name for shapes in heads.values() for name in shapes}:
            sizes = {row: shapes.get(name, tuple(self.tensors[name].shape))[:1] for row, shapes in heads.items()}
            if len(set(sizes.values())) > 1:
                said = {row: size[0] if size else 1 for row, size in sizes.items()}
                raise ValueError(f"The heads of these tasks differ in size and cannot share a batch: {said}.")

    def _check(self, task: Task) -> None:
        """Check a SURGICAL task against the base; others are checked when PEFT puts them into the model."""
        config: Any = task.config
        names = *(config.modules_to_save or ()), *head_names(self._model, config.task_type)
        settings = {name: getattr(config, name) for name in _CHOICES}
        labels = (config.labels or {}).get("num_labels", self.labels.get("num_labels", 0))
        task.copies, heads = self._choose(json.dumps(settings, default=sorted), tuple(dict.fromkeys(names)), labels)
        expected = {f"{PREFIX}{name}": shape for name, shape in heads.items()}
        task.heads = list(heads)
        for path, (own_names, is_in_place) in task.copies.items():
            for name in own_names:
                copy = CopyName(path, name, in_place=is_in_place)
                expected[copy.in_file] = self.tensors[copy.in_base].shape
        shapes = {key: torch.Size(spec.shape) for key, spec in task.layout.specs.items()}
        check_tensors(shapes, expected, source=str(task.file.path))

    def _choose_anew(self, settings: str, heads: tuple[str, ...], labels: int) -> tuple[Copies, dict[str, torch.Size]]:
        """What settings of the SURGICAL method mean on this base: the copies, and the shapes of the head."""
        config = SurgicalConfig(**json.loads(settings), modules_to_save=list(heads) or None)
        chosen = resolve_surgical(config, self._model)
        copies = {path: (names, path in chosen.in_place) for path, names in chosen.copies.items()}
        return copies, head_shapes(self._model, heads, labels, self.labels.get("num_labels", 0))

    def _check_base(self, record: Mapping[str, Any], touched: Collection[str]) -> None:
        # much faster for the second adapter of a base, and where nothing differs, not even the dtype
        text = json.dumps([record, sorted(touched)], sort_keys=True)
        if text in self._known:
            return
        marks, own = record.get("tensors", {}), self._record["tensors"]
        is_alike = all(record.get(key) in (None, self._record[key]) for key in ("model_type", "layers", "vocab_size"))
        if not is_alike or any(own.get(name) != mark for name, mark in marks.items()):
            check_base(record, self._model, self.tensors, touched)
        self._known.add(text)

    def _device_dtype(self, entry: Entry, file: TaskFile) -> torch.dtype:
        """The dtype that a tensor is computed with: the base's, or else as PEFT has it, at least float32."""
        if entry.name in self.tensors:
            return self.tensors[entry.name].dtype
        dtype = file.specs[entry.key].dtype
        return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def _labels_in(self, task: Task) -> dict[str, Any]:
        """The number of labels by the shape of the task's head, where it is not the base's."""
        before = self.labels.get("num_labels")
        for name, shape in task.head_shapes(self.tensors).items():
            if shape and self.tensors[name].shape[:1] == (before,) != shape[:1]:
                return {"num_labels": shape[0], "id2label": {i: f"LABEL_{i}" for i in range(shape[0])}}
        return {}


def _unpacked_spec(entry: Entry, key: str, shape: Sequence[int]) -> Spec:
    """Dtype and shape of a part that the file has packed."""
    chosen, suffix = find_encoding(entry.encoding), key.rpartition(SEPARATOR)[2]
    return Spec(chosen.dtypes[suffix], chosen.part_shapes(shape)[suffix] or ())


def _refuse_what_no_swap_undoes(config: PeftConfig) -> None:
    if getattr(config, "trainable_token_indices", None):
        raise ValueError("A DeltaBank does not take trainable_token_indices. Load it with PeftModel, or merge it.")
    method = "kasa" if getattr(config, "kasa_config", None) else getattr(config, "init_lora_weights", None)
    if isinstance(method, str) and method.lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"With {method!r}, PEFT changes the base's own weights, which other tasks use. Save the adapter as a "
            "plain LoRA, by path_initial_model_for_weight_conversion of save_pretrained."
        )
