"""Saved adapters in another form: another encoding, or the LoRA part alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.constants import DUMMY_TARGET_MODULES
from tqdm import tqdm

from peft_surgical.convert.merge import check_base_of, merged_model
from peft_surgical.files.adapter import AdapterFile, encode_tensor, method_of
from peft_surgical.files.checkpoint import Checkpoint, ModelTensors
from peft_surgical.files.encodings import find_encoding
from peft_surgical.files.safetensors_io import write_tensors
from peft_surgical.methods.config import open_adapter


def convert_adapter(
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    encoding: str,
    *,
    base: str | os.PathLike | None = None,
    progress: bool = False,
) -> int:
    """Write an adapter again with another encoding.

    Args:
        adapter: Its folder, or its name on the hub.
        output: The folder to write to, another one.
        encoding: `"values"`, `"lossless"`, `"bf16"`, `"int8"`, `"int4"` or `"sign"`.
        base: The base that it was trained on; by default the one that its config names.
        progress: Whether to show a progress bar.

    Returns:
        The size of the tensors that were written, in bytes.

    Raises:
        ValueError: The encoding is not known, the adapter holds no copies of the base's tensors (LoRA alone), a file
            is missing or damaged, or the base is another one.
    """
    if encoding != "values":
        find_encoding(encoding)
    delta = open_adapter(adapter)
    if not any(entry.is_copy for entry in delta.entries):
        raise ValueError(f"{delta.source} holds no tuned copies of the base's tensors, so there is nothing to encode.")
    before = base_of(delta, base)
    model = merged_model(before, delta)
    old = ModelTensors(before, model)
    check_base_of(delta, old, model)
    config: Any = delta.config
    config.encoding = encoding
    tensors: dict[str, torch.Tensor] = {}
    for entry in tqdm(delta.entries, "Converting", disable=not progress):
        own = old.get(entry.name) if entry.is_copy else None
        trained = delta.decode(entry, own)
        if own is not None and own.shape == trained.shape:
            tensors.update(encode_tensor(entry.key, trained, own, encoding))
        else:
            tensors[entry.key] = trained
    return _write(delta, output, config, tensors)


def export_lora(adapter: str | os.PathLike, output: str | os.PathLike, *, head: bool = False) -> list[str]:
    """Write the LoRA part of a STRATIFIED adapter as a stock LoRA adapter, for servers that take only that.

    Args:
        adapter: Its folder, or its name on the hub.
        output: The folder to write to, another one.
        head: Whether the task's head goes along, in `modules_to_save`. Stock PEFT takes that, servers do not.

    Returns:
        The tensors that are left out, by their names in the base: tuned biases and norms, and the head. Without them
        the exported adapter computes something else, so this list should be looked at.

    Raises:
        ValueError: The adapter is not a STRATIFIED one, or has neither LoRA nor a head to go along.
    """
    delta = open_adapter(adapter)
    if delta.config.peft_type != "STRATIFIED":
        raise ValueError(
            f"{delta.source} is a {method_of(delta.config)} adapter; only STRATIFIED ones have a LoRA part to "
            "export. merge_checkpoint writes a whole checkpoint, which every server takes."
        )
    taken = [entry for entry in delta.entries if ".lora_" in entry.key and not entry.is_copy]
    others = [entry for entry in delta.entries if not entry.is_copy and entry not in taken] if head else []
    if not taken and not others:
        raise ValueError(f"{delta.source} has no LoRA, only tuned copies: there is nothing to export.")
    paths = sorted({entry.name.partition(".lora_")[0] for entry in taken})
    known = {field.name for field in fields(LoraConfig)}
    options = {name: value for name, value in delta.config.to_dict().items() if name in known}
    config = LoraConfig(**{**options, "peft_type": "LORA", "target_modules": paths or DUMMY_TARGET_MODULES})
    if not others:  # by the task type alone, PEFT would look for the head's tensors
        config.modules_to_save = config.task_type = None
    kept = [*taken, *others]
    _write(delta, output, config, {entry.key: delta.file[entry.key] for entry in kept})
    return [entry.name for entry in delta.entries if entry not in kept]


def base_of(delta: AdapterFile, base: str | os.PathLike | None = None) -> Checkpoint:
    """The checkpoint of an adapter's base.

    Args:
        delta: The adapter.
        base: The base; by default the one that the adapter's config names.

    Raises:
        ValueError: Neither names a base.
    """
    source = base or delta.config.base_model_name_or_path
    if not source:
        raise ValueError(f"{delta.source} does not name its base. Give base=... (--base).")
    return Checkpoint(source)


def _write(
    delta: AdapterFile, output: str | os.PathLike, config: PeftConfig, tensors: Mapping[str, torch.Tensor]
) -> int:
    """Write an adapter that is made from another; gives the size of its tensors in bytes."""
    folder = Path(output)
    if folder.resolve() == Path(delta.folder).resolve():
        raise ValueError(f"output={str(output)!r} is the adapter itself. Name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    nbytes = write_tensors(folder / SAFETENSORS_WEIGHTS_NAME, tensors)
    config.save_pretrained(str(folder), auto_mapping_dict=delta.config.auto_mapping)
    return nbytes
