"""Saved adapters in another form: another encoding, or the LoRA part alone."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from tqdm import tqdm

from peft_surgical.deltas.adapter_files import AdapterFile, method_of
from peft_surgical.deltas.checkpoint_tensors import ModelTensors
from peft_surgical.deltas.encoded_tensors import encode_tensor
from peft_surgical.deltas.encodings import find_encoding
from peft_surgical.deltas.merging import check_base_tensors, merged_model
from peft_surgical.deltas.tensor_files import Checkpoint, TensorWriter


def convert_adapter(
    adapter: str | os.PathLike,
    output: str | os.PathLike,
    encoding: str,
    *,
    base: str | os.PathLike | None = None,
    progress: bool = False,
) -> int:
    """Write an adapter again with another encoding, one tensor at a time.

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
    delta, folder = AdapterFile(adapter), Path(output)
    if not any(entry.is_copy for entry in delta.entries):
        raise ValueError(f"{delta.source} holds no tuned copies of the base's tensors, so there is nothing to encode.")
    if folder.resolve() == Path(delta.folder).resolve():
        raise ValueError(f"output={str(output)!r} is the adapter itself. Name another folder.")
    old = base_tensors(delta, base)
    check_base_tensors(old, delta)
    folder.mkdir(parents=True, exist_ok=True)
    with TensorWriter(folder / SAFETENSORS_WEIGHTS_NAME) as writer:
        for entry in tqdm(delta.entries, disable=not progress, desc="Converting"):
            start = old.get(entry.name) if entry.is_copy else None
            trained = delta.decode(entry, start)
            parts = {entry.key: trained}
            if start is not None and start.shape == trained.shape:
                parts = encode_tensor(entry.key, trained, start, encoding)
            for key, part in parts.items():
                writer.write(key, part)
    config: Any = delta.config
    config.encoding = encoding
    config.save_pretrained(str(folder), auto_mapping_dict=config.auto_mapping)
    return writer.nbytes


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
        ValueError: The adapter is no STRATIFIED one, or has no LoRA.
    """
    delta, folder = AdapterFile(adapter), Path(output)
    if delta.config.peft_type != "STRATIFIED":
        raise ValueError(
            f"{delta.source} is a {method_of(delta.config)} adapter; only STRATIFIED ones have a LoRA part to "
            "export. merge_checkpoint writes a whole checkpoint, which every server takes."
        )
    if folder.resolve() == Path(delta.folder).resolve():
        raise ValueError(f"output={str(output)!r} is the adapter itself. Name another folder.")
    taken = [entry for entry in delta.entries if ".lora_" in entry.key and not entry.is_copy]
    if not taken:
        raise ValueError(f"{delta.source} has no LoRA, only tuned copies: there is nothing to export.")
    others = [entry for entry in delta.entries if not entry.is_copy and entry not in taken] if head else []
    paths = sorted({entry.name.partition(".lora_")[0] for entry in taken})
    known = {field.name for field in fields(LoraConfig)}
    options = {name: value for name, value in delta.config.to_dict().items() if name in known}
    config = LoraConfig(**{**options, "peft_type": "LORA", "target_modules": paths})
    if not others:  # by the task type alone, PEFT would look for the head's tensors
        config.modules_to_save = config.task_type = None
    folder.mkdir(parents=True, exist_ok=True)
    with TensorWriter(folder / SAFETENSORS_WEIGHTS_NAME) as writer:
        for entry in (*taken, *others):
            writer.write(entry.key, delta.file[entry.key])
    config.save_pretrained(str(folder), auto_mapping_dict=delta.config.auto_mapping)
    return [entry.name for entry in delta.entries if entry not in taken and entry not in others]


def load_with_base(delta: AdapterFile, base: str | os.PathLike | None = None) -> PeftModel:
    """The model of an adapter: its base, with the head's size that it needs, and the adapter on it.

    Args:
        delta: The adapter.
        base: The base; by default the one that the adapter's config names.

    Raises:
        ValueError: Neither names a base.
    """
    before = _base_of(delta, base)
    labels = getattr(delta.config, "labels", None) or {}
    cls: Any = type(merged_model(before, delta))
    options = {"num_labels": labels["num_labels"]} if labels else {}
    model = cls.from_pretrained(before.folder, dtype="auto", **options)
    return PeftModel.from_pretrained(model, str(delta.folder)).eval()


def base_tensors(delta: AdapterFile, base: str | os.PathLike | None = None) -> ModelTensors:
    """The tensors of an adapter's base, read when asked for.

    Args:
        delta: The adapter.
        base: The base; by default the one that the adapter's config names.

    Raises:
        ValueError: Neither names a base.
    """
    before = _base_of(delta, base)
    return ModelTensors(before, merged_model(before, delta))


def _base_of(delta: AdapterFile, base: str | os.PathLike | None) -> Checkpoint:
    source = base or delta.config.base_model_name_or_path
    if not source:
        raise ValueError(f"{delta.source} does not name its base. Give base=... (--base).")
    return Checkpoint(source)
