"""Ordinary checkpoints from a base and an adapter."""

from __future__ import annotations

import copy
import functools
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import convert_file_size_to_int
from peft import PeftModel
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from peft_surgical.files.adapter import AdapterFile, method_of, touched_by
from peft_surgical.files.base import check_base, without_resized
from peft_surgical.files.check import checked
from peft_surgical.files.checkpoint import TASKS, Checkpoint, ModelTensors, architecture_of, bare_class_of, empty_model
from peft_surgical.files.safetensors_io import READERS, write_checkpoint, written_aside
from peft_surgical.methods.config import DeltaConfig, naming_adapter, open_adapter
from peft_surgical.methods.heads import apply_label_settings, check_own


def merge_checkpoint(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
    progress: bool = False,
) -> nn.Module:
    """Write the model that a base and an adapter make together, as an ordinary checkpoint of transformers.

    It has the names, dtypes and files of the base's checkpoint, so that whatever loads that one loads it too. A
    SURGICAL adapter is merged tensor by tensor, one file of the result at a time; any other is loaded with its base
    and merged by PEFT.

    Args:
        base: The base: a folder, or the name of a model on the hub.
        adapter: The adapter: a folder, or its name on the hub.
        output: The folder to write to. The base's tokenizer and other small files are copied along.
        dtype: The dtype of all floating tensors; by default that of the base's.
        max_shard_size: The size at which the weights are split into several files; by default they are divided as the
            base's are.
        progress: Whether to show a progress bar.

    Returns:
        The merged model on the meta device: its class, config, names and shapes.

    Raises:
        ValueError: The adapter belongs to another base, or the base and the adapter together lack a tensor.
    """
    before, saved = Checkpoint(base), open_adapter(adapter)
    folder = Path(output)
    if folder.resolve() == before.folder.resolve():
        raise ValueError(f"output={str(output)!r} is the base itself, which a merge never writes to.")
    with naming_adapter(saved.config):
        model = merged_model(before, saved)
        old = ModelTensors(before, model)
        if saved.config.peft_type == "SURGICAL" and not _needs_whole_model(saved, old):
            merge = _Merge(old, _from_file(saved))
            check_adapter(saved, old)
        else:
            merged: Any = adapted_model(before, saved).merge_and_unload()
            merge = _Merge(ModelTensors(before, merged), _from_memory(merged.state_dict()))
    size = None if max_shard_size is None else convert_file_size_to_int(max_shard_size)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(folder) as aside:
        aside.mkdir()
        merge.write(aside, dtype, size, progress)
        for path in before.side_files():
            shutil.copy(path, aside / path.name)
        if Path(saved.folder, "tokenizer_config.json").is_file():  # of the run, with its chat template and its tokens
            AutoTokenizer.from_pretrained(saved.folder).save_pretrained(aside)
    return model


def merged_changes(old: ModelTensors, saved: AdapterFile) -> dict[str, torch.Tensor]:
    """The tensors of the merged checkpoint that differ from the base's, by their names in both.

    `old` is what `tensors_of_base` gives for this adapter or a like one; no more of it is read than changes.
    """
    with naming_adapter(saved.config):
        if not isinstance(saved.config, DeltaConfig):
            raise ValueError(f"{saved.source} is a {method_of(saved.config)}; allowed are SURGICAL and STRATIFIED.")
        if _needs_whole_model(saved, old):
            raise ValueError(f"{saved.source} tunes rows of embeddings, or one of two tied tensors. Merge it.")
        has_all = saved.config.peft_type == "SURGICAL"
        replaced = _from_file(saved) if has_all else _from_memory(_merged_part(saved, old))
        return _Merge(old, replaced).changes()


def _needs_whole_model(saved: AdapterFile, old: ModelTensors) -> bool:
    """Whether an adapter has parts of a tensor, or unties some, which only PEFT merges rightly."""
    modules = dict(old.model.named_modules(remove_duplicate=False))  # one may be held twice, and is one place
    place = {n: (id(modules[n.rpartition(".")[0]]), n.rpartition(".")[2]) for n in old.aliases}
    tied = _touched(saved) & place.keys()
    own = {place[name] for name in tied}
    pairs = [(n, alias) for n in tied for alias in old.aliases[n] if place[alias] != place[n]]
    unties = any(place[alias] not in own or alias in tied and not saved.is_equal(n, alias) for n, alias in pairs)
    return unties or bool(getattr(saved.config, "trainable_token_indices", None))


def _merged_part(saved: AdapterFile, old: ModelTensors) -> dict[str, torch.Tensor]:
    """What PEFT makes of the tensors that an adapter touches, all others being on the meta device."""
    model: Any = copy.deepcopy(old.model)
    for name in _touched(saved) & set(old):
        path, _, own_name = name.rpartition(".")
        model.get_submodule(path).register_parameter(own_name, nn.Parameter(old[name].clone(), requires_grad=False))
    merged: Any = PeftModel.from_pretrained(model, str(saved.folder), torch_device="cpu").merge_and_unload()
    return {name: tensor for name, tensor in merged.state_dict().items() if name in _touched(saved)}


def _touched(saved: AdapterFile) -> set[str]:
    return touched_by(saved.entries) | {entry.name for entry in saved.entries}


def merged_model(before: Checkpoint, saved: AdapterFile) -> nn.Module:
    """The model that a base and an adapter make together, on the meta device."""
    config = AutoConfig.from_pretrained(before.folder)
    record, labels = (getattr(saved.config, name, None) or {} for name in ("record", "labels"))
    sizes = {"num_labels": labels.get("num_labels"), "vocab_size": record.get("vocab_size")}
    known = {name: size for name, size in sizes.items() if size and hasattr(config, name)}
    model = empty_model(before, _architecture(config, saved, record), **known)
    apply_label_settings(model, labels)
    return model


def tensors_of_base(before: Checkpoint, saved: AdapterFile) -> ModelTensors:
    """The base's tensors by the names in `merged_model`, once the adapter is checked."""
    old = ModelTensors(before, merged_model(before, saved))
    check_adapter(saved, old)
    return old


def check_adapter(saved: AdapterFile, old: ModelTensors) -> None:
    """Check a saved adapter as loading does: that it is whole, and for this base. Nothing is written before."""
    config: Any = saved.config
    if not isinstance(config, DeltaConfig):
        return
    if config.check_base:
        try:
            record = without_resized(config.record or {}, {n: old.meta(n) for n in old}, old.model, saved.whole)
            check_base(record, old.model, old, touched_by(saved.entries))
        except ValueError as error:
            bases = f"{config.base_model_name_or_path!r}, not {old.checkpoint.source}"
            raise ValueError(f"{saved.source} names the base {bases}: {error}") from error
    check_own({name: saved.file[name] for name in saved.of_base}, old.model, config, old)
    PeftModel(copy.deepcopy(old.model), config)  # on the meta device: this checks the file
    checked.take(None, None)


def adapted_model(before: Checkpoint, saved: AdapterFile) -> PeftModel:
    """The model that a base and an adapter make together in memory, with the head's size that the adapter needs."""
    labels = getattr(saved.config, "labels", None) or {}
    cls: Any = type(merged_model(before, saved))
    sizes = {"num_labels": labels["num_labels"]} if labels else {}
    return PeftModel.from_pretrained(cls.from_pretrained(before.folder, dtype="auto", **sizes), str(saved.folder))


def _architecture(config: Any, saved: AdapterFile, record: Mapping[str, Any]) -> str | None:
    """The class of the model that an adapter was trained on, from whatever its config says of it."""
    if record.get("model_type", config.model_type) != config.model_type:
        return architecture_of(config)  # for another base, as the check will say
    if known := record.get("architecture") or (saved.config.auto_mapping or {}).get("base_model_class"):
        return known
    own = architecture_of(config)
    endings = [ending for ending, task in TASKS.items() if task == saved.config.task_type]
    if not endings or (own and own.endswith(tuple(endings))):
        return own
    bare = (bare_class_of(config) or "").removesuffix("Model")
    return next((bare + ending for ending in endings if hasattr(transformers, bare + ending)), own)


_Replacement = Callable[[torch.Tensor | None], torch.Tensor]
"""What an adapter has for a tensor of the model, from the base's value, which it may not need."""


def _from_file(saved: AdapterFile) -> dict[str, _Replacement]:
    return {e.name: functools.partial(saved.decode, e) for e in saved.entries if e.key not in saved.of_base}


def _from_memory(merged: Mapping[str, torch.Tensor]) -> dict[str, _Replacement]:
    return {name: lambda base, own=tensor: own for name, tensor in merged.items()}  # type: ignore[misc]


class _Merge:
    """A merged checkpoint, with the names that the base's checkpoint has; `replaced` is by the model's names."""

    def __init__(self, old: ModelTensors, replaced: Mapping[str, _Replacement]):
        self.before, self.old, self.replaced = old.checkpoint, old, replaced
        self.model: Any = old.model
        self.shapes = self.model.state_dict()
        if unknown := [name for name in replaced if name not in self.shapes]:
            raise ValueError(f"The adapter has {unknown[0]!r}, which a {type(self.model).__name__} does not have.")
        self._converted: dict[str, torch.Tensor] = {}  # what was made together with a tensor and is not yet written
        self.names = self._names()

    def _names(self) -> dict[str, str]:
        """The merged checkpoint's names, and the base checkpoint's or the model's that they come from."""
        is_same_class = architecture_of(AutoConfig.from_pretrained(self.before.folder)) == type(self.model).__name__
        prefix = getattr(self.model, "base_model_prefix", "")
        names: dict[str, str] = {}
        for source in self.before:
            if is_same_class:
                names[source] = source
            elif source in self.old.names:  # of a bare model and one with a head, one has a prefix
                whole = self.old.names[source][0].startswith(f"{prefix}.") or not prefix
                bare = source.removeprefix(f"{prefix}.")
                names[f"{prefix}.{bare}" if prefix and whole else bare] = source
        for name in self.shapes:
            if name not in self.old:
                if any(alias in names for alias in self.old.aliases.get(name, [])):
                    continue
                if self._replacement(name) is None:
                    raise ValueError(
                        f"Neither {self.before.source} nor the adapter has {name!r}, which a "
                        f"{type(self.model).__name__} needs. Name a base that has it."
                    )
                names[name] = name
        return names

    def _replacement(self, name: str) -> _Replacement | None:
        """What the adapter has for a tensor of the model, under whichever of its names if it is tied."""
        return next((self.replaced[n] for n in (name, *self.old.aliases.get(name, [])) if n in self.replaced), None)

    def changes(self) -> dict[str, torch.Tensor]:
        """The tensors that are not the base's own, which must be of its names and shapes."""

        def read(name: str) -> torch.Tensor:
            if name not in self.before or self._meta(self.names[name]).shape != self.before.meta(name).shape:
                raise ValueError(f"The adapter has another {name!r} than {self.before.source}. Merge it.")
            return self._value(self.names[name]).to(self.before.meta(name).dtype)

        changed = [n for n, s in self.names.items() if any(map(self._replacement, self.old.names.get(s, [s])))]
        with ThreadPoolExecutor(READERS) as pool:  # reading is mostly to look at checksums
            return dict(zip(changed, pool.map(read, changed), strict=True))

    def write(self, folder: Path, dtype: torch.dtype | None, max_shard_size: int | None, progress: bool) -> None:
        stored = {name: self._meta(source) for name, source in self.names.items()}
        plan = {n: meta.to(dtype) if dtype and meta.is_floating_point() else meta for n, meta in stored.items()}
        place = None if max_shard_size else self._place()
        folder.mkdir(parents=True, exist_ok=True)
        with tqdm(total=len(plan), disable=not progress, desc="Merging") as bar:

            def read(name: str) -> torch.Tensor:
                bar.update()
                return self._value(self.names[name]).to(plan[name].dtype)

            write_checkpoint(folder, plan, read, max_shard_size or convert_file_size_to_int("5GB"), place)
        self.model.config.architectures = [type(self.model).__name__]
        if dtype is not None:
            self.model.config.dtype = dtype
        self.model.config.save_pretrained(folder)

    def _place(self) -> dict[str, str] | None:
        """The files of the base's checkpoint; what it lacks goes into the last. None for PyTorch's own files."""
        files = {name: self.before.file_of(source) for name, source in self.names.items() if source in self.before}
        if not files or None in files.values():
            return None
        last = max(filter(None, files.values()))
        return {name: files.get(name) or last for name in self.names}

    def _meta(self, source: str) -> torch.Tensor:
        """Shape and dtype of a tensor of the merged checkpoint."""
        if source not in self.before:
            replacement = self._replacement(source)
            assert replacement is not None
            return self.shapes[source].to("meta", replacement(None).dtype)
        stored = self.before.meta(source)
        names = self.old.names.get(source, [])
        is_itself = names and self.old.group_of(source) == [source] and len(names) == 1
        return self.shapes[names[0]].to("meta", stored.dtype) if is_itself else stored

    def _value(self, source: str) -> torch.Tensor:
        if source in self._converted:
            return self._converted.pop(source)
        names = self.old.names.get(source, [])
        if source in self.before and not any(self._replacement(name) for name in names):
            return self.before[source]
        values = {}
        for name in names or [source]:
            base, replacement = self.old.get(name), self._replacement(name)
            value = base if replacement is None else replacement(base)
            assert value is not None
            values[name] = value.detach()
        self._converted.update(self.old.in_checkpoint(source, values) if names else values)
        return self._converted.pop(source)
