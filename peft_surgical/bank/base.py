"""The base as it was before the bank put anything into it, against which tasks are read and checked."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
from peft import PeftConfig
from torch import nn

from peft_surgical.bank.memory import Copies, Footprint, Layout, Task, TaskFile
from peft_surgical.files.adapter import Entry, method_of, touched_by
from peft_surgical.files.base import check_base, describe_base
from peft_surgical.files.check import check_tensors, decoded_shapes
from peft_surgical.files.encodings import find_encoding
from peft_surgical.files.safetensors_io import Spec
from peft_surgical.methods.config import DeltaConfig, naming_adapter, open_adapter
from peft_surgical.methods.heads import (
    changed_embeddings,
    embedding_tensors,
    head_names,
    head_shapes,
    label_settings,
    take_out_own,
)
from peft_surgical.methods.rows import BASE
from peft_surgical.methods.stratified.config import CHANGES_BASE
from peft_surgical.methods.surgical import SurgicalConfig, resolve_surgical
from peft_surgical.names import PREFIX, SEPARATOR, CopyName, as_plain, base_path


_CHOICES = ("layers", "target_modules", "exclude_modules", "extra_modules", "dequantize")
"""The fields of a `SurgicalConfig` that say what is tuned."""
_NOT_TAKEN = {
    "trainable_token_indices": "changes what is around the model's embeddings",
    "layer_replication": "changes the layers that all tasks share",
    "alora_invocation_tokens": "needs PeftModel's own forward to look for these tokens",
    "arrow_config": "computes with all adapters in the model at once",
    "save_projection": "puts into each file what all tasks share (save the adapter with save_projection=False)",
}
"""Options of PEFT's methods, and why a switch cannot serve them."""
_TAKEN = (
    *("LORA", "SURGICAL", "STRATIFIED", "BEFT", "BOFT", "C3A", "DEFT", "FOURIERFT", "GLORA", "GRALORA", "HIRA"),
    *("HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "OSF", "PEANUT", "PSOFT", "PVERA"),
    *("RANDLORA", "ROAD", "TRAINABLE_TOKENS", "VERA", "WAVEFT"),
)
"""The methods that answer rightly in a bank; others need more than the modules that hold their tensors."""
PROJECTION = "projection_prng_key"
"""The option that only methods have whose adapters all share one random projection, which no file holds."""
_OF_PROJECTION = (PROJECTION, "r", "sparse", "very_sparse")


class BaseIndex:
    """What the base was like before the bank put anything into it, for checking tasks quickly and in any thread."""

    def __init__(self, model: nn.Module):
        self.tensors = dict(model.state_dict(keep_vars=True))
        self.labels = label_settings(model)
        self._model: Any = structure_of(model, {})  # wrappers that come later do not show in it
        self._record = describe_base(self._model)
        self._embeddings = embedding_tensors(self._model)
        self._known: set[str] = set()  # the records that were found to be of this base
        self._choose = lru_cache(maxsize=256)(self._choose_anew)

    def read_task(self, name: str, adapter: str, source: str | os.PathLike, labels: Mapping[str, Any]) -> Task:
        """Read the config and the header of a saved adapter, and check them; `labels` count if its config has none."""
        saved = open_adapter(source, TaskFile)
        file, config = cast(TaskFile, saved.file), saved.config
        with naming_adapter(config):
            _refuse_what_no_swap_undoes(config)
        self._take_embeddings(file, config)
        stored = {key: file.spec(key) for key in file}
        found = {entry.key: entry for entry in saved.entries}
        encoded = [entry for entry in found.values() if entry.encoding != "values"]
        for entry in encoded:
            if entry.name not in self.tensors:
                raise ValueError(
                    f"{file.path}: the tensor {entry.key!r} is encoded, but the base has none to decode it with."
                )
        expected = {entry.key: tuple(self.tensors[entry.name].shape) for entry in encoded}
        shapes = decoded_shapes(stored, expected, self.tensors, str(file.path))
        specs = {key: Spec(self._device_dtype(entry, file), tuple(shapes[key])) for key, entry in found.items()}
        kept = {
            key: stored.get(key) or _unpacked_spec(entry, key, expected[entry.key])
            for entry in found.values()
            for key in entry.value_keys()
        }
        same = {as_plain(key): as_plain(other) for key, other in file.same.items()}
        same = {key: other for key, other in same.items() if self._is_same(found.get(key), found.get(other), specs)}
        parts = {key: same[n] + key[len(n) :] for n in same for key in found[n].value_keys()}
        task = Task(name, adapter, config, file, found, Layout(specs, same), Layout(kept, parts))
        task.whole = {e.name.rpartition(".")[0] for e in found.values() if not e.is_copy and e.name in self.tensors}
        for entry in found.values():
            path = entry.name
            while path := path.rpartition(".")[0] if entry.is_copy or entry.name not in self.tensors else "":
                task.tuned.add(path)
        if method_of(config) == "TRAINABLE_TOKENS":  # which computes past what is inside its wrappers
            own = {id(self.tensors.get(f"{e.name.rpartition('.')[0]}.weight")) for e in found.values()}
            task.whole |= {name.rpartition(".")[0] for name, tensor in self.tensors.items() if id(tensor) in own}
            task.tuned -= task.whole
            if len(task.whole) > len(own):  # for a second task PEFT would put one wrapper into another
                raise ValueError("A DeltaBank takes no TRAINABLE_TOKENS that a head shares. Load it with PeftModel.")
        if hasattr(config, PROJECTION):
            task.projection = self._projection_of(config, found.values())
        task.labels = dict(labels or getattr(config, "labels", None) or self._labels_in(task))
        if isinstance(config, DeltaConfig):
            with config.naming_itself():
                if config.check_base:
                    self._check_base(config.record or {}, touched_by(found.values()))
                if task.is_surgical:
                    self._check(task)
        file.close()  # there may be hundreds of tasks
        return task

    def _take_embeddings(self, file: TaskFile, config: Any) -> None:
        """Make the embeddings that PEFT saved along the task's own, as its head is, if they are not the base's."""
        along = [key for key in file if key in self._embeddings]
        for key in along:
            own, spec = self.tensors.get(base_path(key)), file.spec(key)
            if own is not None and own.shape != spec.shape:
                tokens = spec.shape[0] if spec.shape else 0
                raise ValueError(
                    f"{file.path}: its vocabulary has {tokens} tokens, and the bank's base {len(own)}. All tasks of a "
                    f"bank share one: call model.resize_token_embeddings({tokens}) before the bank is made, or give "
                    "tasks of this size a bank of their own, or merge them."
                )
        if not along:
            return
        own = list(getattr(config, "modules_to_save", None) or [])
        heads = [*own, *head_names(self._model, config.task_type)]
        if changed := changed_embeddings(file, self._model, self.tensors, heads):
            config.modules_to_save = own + changed
        state = {key: file[key] for key in along}
        take_out_own(state, self._model, config, self.tensors)
        for key in set(along) - set(state):
            del file.names_in_file[key]

    def _is_same(self, entry: Entry | None, other: Entry | None, specs: Mapping[str, Spec]) -> bool:
        """Whether two tensors that are one in the file are one once decoded."""
        if entry is None or other is None or specs[entry.key] != specs[other.key]:
            return False
        return entry.encoding == "values" or self.tensors[entry.name] is self.tensors[other.name]

    def _projection_of(self, config: Any, entries: Iterable[Entry]) -> dict[str, Any]:
        """What makes the random projection of a task: settings, and the most rows and columns of what it tunes."""
        weights = [self.tensors.get(f"{entry.name.rpartition('.')[0]}.weight") for entry in entries]
        shapes = [weight.shape for weight in weights if weight is not None]
        settings = {name: getattr(config, name) for name in _OF_PROJECTION if hasattr(config, name)}
        return {"method": method_of(config), **settings, "shape": [*map(max, zip(*shapes, strict=True))]}

    def check_beside(self, task: Task, others: Iterable[tuple[str, Footprint]]) -> None:
        """Check that PEFT can put a task into one model with others, of which the names and footprints are given."""
        for name, (whole, tuned, projection) in others:
            if both := task.whole & tuned or whole & task.tuned:
                raise ValueError(
                    f"One of this and the task {name} has the module {min(both)!r} whole, and the "
                    "other tunes it or what is in it, which PEFT cannot have in one model. Put them into banks of "
                    "their own."
                )
            own, other = task.projection, json.loads(projection)  # PEFT compares less, and what is in the model now
            if own and other and own["method"] == other["method"] and own != other:
                differ = [key for key in own if own[key] != other[key]]
                said = [", ".join(f"{key}={of[key]}" for key in differ) for of in (own, other)]
                raise ValueError(
                    f"Its random projection has {said[0]}, and that of the task {name} has {said[1]}. All tasks of "
                    f"{own['method']} in a bank share one projection: put this one into a bank of its own."
                )

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
        dtype = file.spec(entry.key).dtype
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
    if method_of(config) not in _TAKEN:
        raise ValueError(
            f"A DeltaBank does not take {method_of(config)}, which needs more than the modules that it tunes. Load it "
            f"with PeftModel. A bank takes {', '.join(_TAKEN)}."
        )
    for option, why in _NOT_TAKEN.items():
        if getattr(config, option, None):
            raise ValueError(f"A DeltaBank does not take {option}, which {why}. Load it with PeftModel.")
    method = "kasa" if getattr(config, "kasa_config", None) else getattr(config, "init_lora_weights", None)
    if isinstance(method, str) and method.lower().startswith(CHANGES_BASE):
        raise ValueError(
            f"With {method!r}, PEFT changes the base's own weights, which other tasks use. Save the adapter as a "
            "plain LoRA, by path_initial_model_for_weight_conversion of save_pretrained."
        )


def structure_of(module: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
    """The same tree of modules, with the same tensors, that does not change when modules of the model are wrapped."""
    if id(module) not in known:
        twin = known[id(module)] = object.__new__(type(module))
        twin.__dict__.update(module.__dict__, _parameters=dict(module._parameters), _buffers=dict(module._buffers))
        children = module._modules.items()
        twin.__dict__["_modules"] = {n: None if c is None else structure_of(c, known) for n, c in children}
    return known[id(module)]
