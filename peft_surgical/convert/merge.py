"""Ordinary checkpoints from a base and an adapter."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import convert_file_size_to_int
from peft import PeftModel
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig

from peft_surgical.files.adapter import AdapterFile, Entry, touched_names
from peft_surgical.files.base import check_base
from peft_surgical.files.check import checked
from peft_surgical.files.checkpoint import TASKS, Checkpoint, ModelTensors, architecture_of, bare_class_of, empty_model
from peft_surgical.files.safetensors_io import reset_mode, write_checkpoint, written_aside
from peft_surgical.methods.config import DeltaConfig, open_adapter
from peft_surgical.methods.heads import apply_label_settings


def merge_checkpoint(
    base: str | os.PathLike,
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    progress: bool = False,
) -> nn.Module:
    """Write the model that a base and an adapter make together, as an ordinary checkpoint of transformers.

    A SURGICAL adapter is merged tensor by tensor, one file of the result at a time; any other is loaded with its base
    and merged by PEFT.

    Args:
        base: The base: a folder, or the name of a model on the hub.
        adapter: The adapter: a folder, or its name on the hub.
        output: The folder to write to. The base's tokenizer and other small files are copied along.
        dtype: The dtype of all floating tensors; by default that of the base's.
        max_shard_size: The size at which the weights are split into several files.
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
    model = merged_model(before, saved)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(folder) as aside:
        aside.mkdir()
        if saved.config.peft_type == "SURGICAL":
            _merge_by_tensor(model, before, saved, aside, dtype, convert_file_size_to_int(max_shard_size), progress)
        else:
            merged: Any = adapted_model(before, saved).merge_and_unload()
            merged = merged if dtype is None else merged.to(dtype)
            merged.save_pretrained(aside, max_shard_size=max_shard_size)
            for file in aside.glob("*.safetensors"):
                reset_mode(file)
        for path in before.side_files():
            shutil.copy(path, aside / path.name)
    return model


def merged_model(before: Checkpoint, saved: AdapterFile) -> nn.Module:
    """The model that a base and an adapter make together, on the meta device."""
    config = AutoConfig.from_pretrained(before.folder)
    record = getattr(saved.config, "base", None) or {}
    labels = getattr(saved.config, "labels", None) or {}
    sizes = {"num_labels": labels.get("num_labels"), "vocab_size": record.get("vocab_size")}
    known = {name: size for name, size in sizes.items() if size and hasattr(config, name)}
    model = empty_model(before, _architecture(config, saved, record), **known)
    apply_label_settings(model, labels)
    return model


def adapted_model(before: Checkpoint, saved: AdapterFile) -> PeftModel:
    """The model that a base and an adapter make together in memory, with the head's size that the adapter needs."""
    labels = getattr(saved.config, "labels", None) or {}
    cls: Any = type(merged_model(before, saved))
    sizes = {"num_labels": labels["num_labels"]} if labels else {}
    return PeftModel.from_pretrained(cls.from_pretrained(before.folder, dtype="auto", **sizes), str(saved.folder))


def _architecture(config: Any, saved: AdapterFile, record: Mapping[str, Any]) -> str | None:
    """The class of the model that an adapter was trained on, from whatever its config says of it."""
    known = record.get("architecture") or (saved.config.auto_mapping or {}).get("base_model_class")
    if known:
        return known
    own = architecture_of(config)
    endings = [ending for ending, task in TASKS.items() if task == saved.config.task_type]
    if not endings or (own and own.endswith(tuple(endings))):
        return own
    bare = (bare_class_of(config) or "").removesuffix("Model")
    return next((bare + ending for ending in endings if hasattr(transformers, bare + ending)), own)


def _merge_by_tensor(
    model: Any,
    before: Checkpoint,
    saved: AdapterFile,
    folder: Path,
    dtype: torch.dtype | None,
    max_shard_size: int,
    progress: bool,
) -> None:
    old = ModelTensors(before, model)
    check_adapter(saved, old)
    sources = _sources(model, old, saved)
    shapes = model.state_dict()
    plan: dict[str, torch.Tensor] = {}
    for name, entry in sources.items():
        stored = saved.file.meta(next(iter(entry.keys().values()))) if entry and name not in old else old.meta(name)
        kept = dtype if dtype and stored.is_floating_point() else stored.dtype
        plan[name] = shapes[name].to(kept)

    def read(name: str) -> torch.Tensor:
        bar.update()
        entry, base = sources[name], old.get(name)
        value = base if entry is None else saved.decode(entry, base)
        assert value is not None
        return value.to(plan[name].dtype)

    with tqdm(total=len(plan), disable=not progress, desc="Merging") as bar:
        write_checkpoint(folder, plan, read, max_shard_size)
    model.config.architectures = [type(model).__name__]
    if dtype is not None:
        model.config.dtype = dtype
    model.config.save_pretrained(folder)


def _sources(model: nn.Module, old: ModelTensors, saved: AdapterFile) -> dict[str, Entry | None]:
    """What the adapter has for each tensor of the merged model, None for the base's own; tied ones come once."""
    names = model.state_dict()
    replaced = {entry.name: entry for entry in saved.entries}
    if unknown := [name for name in replaced if name not in names]:
        raise ValueError(f"{saved.source} has {unknown[0]!r}, which a {type(model).__name__} does not have.")
    found: dict[str, Entry | None] = {}
    for name in names:
        aliases = old.aliases.get(name, [])
        if any(alias in found for alias in aliases):
            continue
        found[name] = next((replaced[n] for n in (name, *aliases) if n in replaced), None)
        if found[name] is None and name not in old:
            raise ValueError(
                f"Neither {old.checkpoint.source} nor {saved.source} has {name!r}, which a {type(model).__name__} "
                "needs. Name a base that has it."
            )
    return found


def check_adapter(saved: AdapterFile, old: ModelTensors) -> None:
    """Check a saved adapter as loading does: that it is whole, and for this base. Nothing is written before.

    Raises:
        ValueError: It is not. The message names the first difference.
    """
    config: Any = saved.config
    if not isinstance(config, DeltaConfig):
        return
    model = merged_model(old.checkpoint, saved)
    if config.check_base:
        touched = touched_names(saved.file)
        try:
            check_base(config.base or {}, model, old, touched)
        except ValueError as error:
            named = config.base_model_name_or_path
            raise ValueError(
                f"{saved.source} names the base {named!r}, not {old.checkpoint.source}: {error}"
            ) from error
    PeftModel(model, config)  # on the meta device: this checks the file
    checked.take(None, None)
