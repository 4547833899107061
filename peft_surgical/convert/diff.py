"""Adapters from checkpoints of whole models: what a full fine-tune changed, layer by layer."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import nn
from tqdm import tqdm
from transformers import AutoConfig, GenerationConfig

from peft_surgical.convert.change import WeightChanges, measure_changes, relative_distance
from peft_surgical.convert.page import write_page
from peft_surgical.copies.select import token_embeddings
from peft_surgical.files.adapter import Entry, encode_tensor, entries, write_adapter
from peft_surgical.files.base import describe_base
from peft_surgical.files.checkpoint import Checkpoint, ModelTensors, empty_model, task_type_of, tied_names
from peft_surgical.layers import describe_stacks, find_stacks
from peft_surgical.methods.heads import head_names, label_settings
from peft_surgical.methods.surgical import SurgicalConfig


# settings that say nothing of what the weights compute in evaluation, or that the shapes of tensors say as well
NOT_COMPUTED = re.compile(
    "drop|init|loss|aux|jitter|spec_augment|^mask_|label|token_id|^_|dtype|version|architectures|auto_map|problem_type|"
    "finetuning_task|task_specific|tie_word|vocab_size|max_position|n_positions|n_ctx|quantization|checkpointing|^output_|"
    "return_dict|use_cache|torchscript|tokenizer|chunk_size"
)


@dataclass(frozen=True)
class Diff:
    """What `diff_checkpoints` found and wrote.

    Args:
        movement: How far every tensor moved.
        config: The adapter's config.
        left_out: The names of tensors that differ and are not in the adapter.
        nbytes: The size of the adapter's tensors.
        nbytes_tuned: The size of the tuned model's tensors.
    """

    movement: WeightChanges
    config: SurgicalConfig
    left_out: list[str]
    nbytes: int
    nbytes_tuned: int

    def save_html(self, path: str | os.PathLike, title: str = "What fine-tuning changed") -> None:
        """Write one page of HTML with what moved, by layers and by sub-layers, that sorts and is searched."""
        facts = [
            f"base: {self.config.base_model_name_or_path}",
            f"saved: layers {self.config.layers}, {self.nbytes:,} of {self.nbytes_tuned:,} bytes",
            f"left out: {len(self.left_out)} tensors that differ",
            "moved: the norm of the difference, over the norm of the base's values",
        ]
        tables = {"Layers": self.movement.layer_table(), "Sub-layers": self.movement.part_table()}
        write_page(path, title, facts, tables, bars=["moved"])


def diff_checkpoints(
    base: str | os.PathLike,
    tuned: str | os.PathLike,
    output: str | os.PathLike,
    *,
    threshold: float = 0.0,
    top_k: int | None = None,
    embeddings: bool | None = None,
    encoding: str = "values",
    max_error: float = 0.0,
    progress: bool = False,
) -> Diff:
    """Turn a fine-tuned checkpoint into a SURGICAL adapter for its base.

    The adapter holds the layers that differ, the task's head, and the modules outside the layers that differ
    (`extra_modules`). With the defaults it restores the tuned model bit for bit. The checkpoints are compared one
    tensor at a time; what is written is in memory, except for plain values, which stay mapped.

    Args:
        base: The base: a folder, or the name of a model on the hub.
        tuned: The fine-tuned model, of the same architecture. Its head may be another one.
        output: The folder to write the adapter to.
        threshold: Leave out layers that moved by no more than this, relative to their norm.
        top_k: Keep only this many layers, those that moved most.
        embeddings: Whether token embeddings (and output layers over the vocabulary) that differ are included. By
            default they are, except that resized ones are an error; with True they are included as they are, and the
            base must be resized before such an adapter is loaded.
        encoding: How the tensors are written, see `SurgicalConfig`.
        max_error: Likewise.
        progress: Whether to show progress bars.

    Raises:
        ValueError: The checkpoints are of different models, do not differ, or differ in what no adapter can hold. The
            message says in what.
    """
    before, after = Checkpoint(base), Checkpoint(tuned)
    model = empty_model(after)
    old, new = ModelTensors(before, model), ModelTensors(after, model)
    _check_alike(before, after, old, model)
    _check_settings(before, after)
    movement = measure_changes(old, new, model, progress=progress)
    config = SurgicalConfig(
        layers=_choose_layers(movement, old, threshold, top_k),
        task_type=task_type_of(model),
        encoding=encoding,
        max_error=max_error,
        inference_mode=True,
    )
    config.modules_to_save = head_names(model, config.task_type) or None
    config.extra_modules = _choose_outside(movement, old, model, config.modules_to_save or [], embeddings) or None
    config, written, nbytes = _write(Path(output), config, model, old, new, progress)
    return Diff(
        movement=movement,
        config=config,
        left_out=[change.name for change in movement if change.differs and change.name not in written],
        nbytes=nbytes,
        nbytes_tuned=sum(after.meta(name).nbytes for name in after),
    )


# ---- what to store


def _check_alike(before: Checkpoint, after: Checkpoint, old: ModelTensors, model: nn.Module) -> None:
    kinds = [checkpoint.config.get("model_type") for checkpoint in (before, after)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"{before.source} is a {kinds[0]} and {after.source} a {kinds[1]}. Both must be of one architecture."
        )
    around = tuple(f"{path.rpartition('.')[0]}." for path in _layer_paths(model))
    if deeper := [name for name in old.unknown if name.startswith(around)]:
        raise ValueError(
            f"{before.source} has {deeper[0]!r}, which {after.source} lacks: {describe_stacks(find_stacks(model))} An "
            "adapter cannot take layers away."
        )


def _check_settings(before: Checkpoint, after: Checkpoint) -> None:
    old, new = (_settings(AutoConfig.from_pretrained(checkpoint.folder)) for checkpoint in (before, after))
    for name in sorted(old.keys() & new.keys()):  # one that only one of them has is none of the model's own
        if old[name] != new[name]:
            raise ValueError(
                f"{after.source} has {name}={new[name]!r} in its config.json, {before.source} has {old[name]!r}. An "
                "adapter holds weights alone: on this base it would not compute what the tuned model does. Give a "
                "base with the same setting."
            )


def _settings(config: Any) -> dict[str, Any]:
    """What a model computes, but for its weights; of a model in a model under dotted names."""
    ignored = GenerationConfig().to_dict().keys()
    todo = [("", json.loads(config.to_json_string(use_diff=False)))]
    found = {}
    while todo:
        prefix, settings = todo.pop()
        for name, value in settings.items():
            if name in ignored or NOT_COMPUTED.search(name):
                continue
            if isinstance(value, dict) and "model_type" in value:
                todo.append((f"{prefix}{name}.", value))
            else:
                found[prefix + name] = value
    return found


def _choose_layers(
    movement: WeightChanges, old: ModelTensors, threshold: float, top_k: int | None
) -> dict[str, list[int]]:
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} must be a number of layers, 1 or more.")
    layers = movement.by_layer()
    if new := [change.name for changes in layers.values() for change in changes if change.is_new]:
        raise ValueError(
            f"{old.checkpoint.source} has no {new[0]!r} of the same shape: the checkpoints differ in depth or width."
        )
    distances = {key: relative_distance(found) for key, found in layers.items() if any(c.differs for c in found)}
    if not distances:
        raise ValueError("All layers of the two checkpoints are equal, so there is no layer to store.")
    moved = [key for key, distance in distances.items() if distance > threshold or not threshold]
    if not moved:
        raise ValueError(f"threshold={threshold}: no layer moved by more than {max(distances.values()):.3g}.")
    chosen: dict[str, list[int]] = {}
    for stack, layer in sorted(sorted(moved, key=distances.__getitem__, reverse=True)[:top_k]):
        chosen.setdefault(stack, []).append(layer)
    return chosen


def _choose_outside(
    movement: WeightChanges, old: ModelTensors, model: nn.Module, heads: Sequence[str], embeddings: bool | None
) -> list[str]:
    """The modules outside the layers that differ, without those that are left out."""
    vocabulary = set(_vocabulary_modules(model))
    layers = _layer_paths(model)
    buffers = dict(model.named_buffers())
    chosen: dict[str, None] = {}
    for change in movement:
        if change.layer is not None or not change.differs or any(_is_in(change.module, head) for head in heads):
            continue
        if any(_is_in(layer, change.module) for layer in layers):
            if change.name not in old and change.name in buffers:
                continue  # what a class sets up for itself, e.g. zeros for the logits
            raise ValueError(
                f"{change.name!r} differs, and the module that holds it also holds the layers: no adapter can tune it."
            )
        is_resized = change.is_new and change.name in old
        if is_resized and embeddings is None:
            raise ValueError(
                f"{change.name!r} was resized; its shape was {tuple(old.meta(change.name).shape)}. With "
                "embeddings=True (--embeddings) it is included as it is, and the base must be resized with "
                "model.resize_token_embeddings() before the adapter is loaded. With embeddings=False "
                "(--no-embeddings) it is left out."
            )
        if embeddings is not False or not (is_resized or change.module in vocabulary):
            chosen[change.module] = None
    return list(chosen)


def _vocabulary_modules(model: Any) -> Iterator[str]:
    """The paths of the modules with a row per token of the vocabulary."""
    modules = {id(module) for module in token_embeddings(model)}
    tied = tied_names(model)
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in modules:
            for name in [f"{path}.weight", *tied.get(f"{path}.weight", [])]:
                yield name.rpartition(".")[0]


def _layer_paths(model: nn.Module) -> list[str]:
    return [layer.path for stack in find_stacks(model).values() for layer in stack.layers]


def _is_in(path: str, module: str) -> bool:
    return not module or path == module or path.startswith(f"{module}.")


# ---- writing it


def _write(
    output: Path, config: SurgicalConfig, model: nn.Module, old: ModelTensors, new: ModelTensors, progress: bool
) -> tuple[SurgicalConfig, set[str], int]:
    """Write an adapter; gives its resolved config, the names of its tensors in the base, and their size in bytes."""
    labels = label_settings(model)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    same = (name for name in old if old.meta(name).shape == shapes[name])
    base = describe_base(model, ((name, old[name]) for name in same), config.modules_to_save or [])
    config, found = _resolve(model, config)
    known = {e.name for e in found if e.is_copy and e.name in old and old.meta(e.name).shape == new.meta(e.name).shape}
    config.record, config.labels = base, labels if config.modules_to_save else None
    config.base_model_name_or_path = old.checkpoint.source
    tensors: dict[str, torch.Tensor] = {}
    for entry in tqdm(found, disable=not progress, desc="Writing"):
        own = old[entry.name] if entry.name in known else None
        tensors.update(encode_tensor(entry.key, new[entry.name], own, config.encoding, config.max_error))
    mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    nbytes = write_adapter(output, config, tensors, None if config.task_type else mapping)
    return config, {entry.name for entry in found}, nbytes


def _resolve(model: nn.Module, config: SurgicalConfig) -> tuple[SurgicalConfig, list[Entry]]:
    """The config with its layers as they are saved, and what PEFT would save in the file of such an adapter."""
    kept = config.encoding, config.max_error
    config.record, config.encoding, config.max_error = {}, "values", 0.0  # there are no values to look at
    wrapped = PeftModel(model, config)
    found = entries(get_peft_model_state_dict(wrapped, save_embedding_layers=False))
    resolved: Any = wrapped.peft_config["default"]
    resolved.encoding, resolved.max_error = kept
    return resolved, found
