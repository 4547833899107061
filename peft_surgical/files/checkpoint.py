"""A saved model: its files, and its tensors by the names that they have in a model, whatever the files call them.

Names differ between the bare and the headed model, between versions of transformers, and where several tensors of a
checkpoint make up one of the model (experts). Tied tensors may be stored once or several times.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import TaskType
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from peft_surgical.files.safetensors_io import TensorFile, download, read_pickled


TASKS = {
    "ForSequenceClassification": TaskType.SEQ_CLS,
    "ForTokenClassification": TaskType.TOKEN_CLS,
    "ForQuestionAnswering": TaskType.QUESTION_ANS,
    "ForCausalLM": TaskType.CAUSAL_LM,
    "LMHeadModel": TaskType.CAUSAL_LM,
    "ForConditionalGeneration": TaskType.SEQ_2_SEQ_LM,
    "Model": TaskType.FEATURE_EXTRACTION,
}
_SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


class Checkpoint:
    """A model as `save_pretrained` writes it: `config.json` and one or several files of tensors.

    Args:
        source: A folder, or the name of a model on the hub. Safetensors files, sharded or not, and PyTorch's own are
            understood.

    Raises:
        ValueError: There is no such checkpoint, or a file of it is missing or damaged. The message names it.
    """

    def __init__(self, source: str | os.PathLike):
        self.source = os.fspath(source)
        self.folder = Path(source) if os.path.isdir(source) else _download_checkpoint(self.source)
        if (self.folder / "adapter_config.json").exists() and not (self.folder / "config.json").exists():
            raise ValueError(f"{self.source} is an adapter; a checkpoint of a whole model is needed here.")
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"{self.source} has no config.json, so it is not a checkpoint of a transformers model.")
        self.config = _read_json(self.folder / "config.json")
        self._where: dict[str, TensorFile | dict[str, torch.Tensor]] = {}
        for path in self._weight_files():
            file = TensorFile(path) if path.suffix == ".safetensors" else read_pickled(path)
            self._where.update(dict.fromkeys(file, file))

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._where[name][name]

    def meta(self, name: str) -> torch.Tensor:
        """A tensor on the meta device: shape, dtype and size in bytes, without reading it."""
        file = self._where[name]
        return file.meta(name) if isinstance(file, TensorFile) else file[name].to("meta")

    def side_files(self) -> list[Path]:
        """The tokenizer's and other small files beside config and weights."""
        found = [path for pattern in _SIDE_FILES for path in sorted(self.folder.glob(pattern))]
        return [path for path in found if path.name != "config.json" and not path.name.endswith(".index.json")]

    def _weight_files(self) -> list[Path]:
        for name in ("model.safetensors", "pytorch_model.bin"):
            index = self.folder / f"{name}.index.json"
            if index.is_file():
                names = sorted(set(_read_json(index).get("weight_map", {}).values()))
                if missing := [n for n in names if not (self.folder / n).is_file()]:
                    raise ValueError(f"{self.source} lacks {missing[0]}, which {index.name} lists. Copy it again.")
                return [self.folder / n for n in names]
            if (self.folder / name).is_file():
                return [self.folder / name]
        raise ValueError(f"{self.source} has no model.safetensors or pytorch_model.bin, whole or sharded.")


class ModelTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint that a model has, by the model's names, read when asked for.

    Args:
        checkpoint: The checkpoint.
        model: The model; it may be on the meta device.
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module):
        self.checkpoint = checkpoint
        self.aliases = tied_names(model)
        wanted = model.state_dict()
        self._model = model
        self._sources: dict[str, str | _Group] = {}
        self.unknown: list[str] = []
        for name, source, group in _translate(checkpoint, model, wanted):
            if name not in wanted:
                self.unknown.append(source)
            elif group is None or name not in self._sources:
                self._sources[name] = source if group is None else group
        for name in wanted:
            for alias in self.aliases.get(name, []):
                if alias in self._sources:
                    self._sources.setdefault(name, self._sources[alias])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources

    def __getitem__(self, name: str) -> torch.Tensor:
        source = self._sources[name]
        return self.checkpoint[source] if isinstance(source, str) else self._convert(source)[name]

    def meta(self, name: str) -> torch.Tensor:
        """A tensor on the meta device: shape, dtype and size in bytes, without reading it."""
        source = self._sources[name]
        return self.checkpoint.meta(source) if isinstance(source, str) else self._convert(source, meta=True)[name]

    def _convert(self, group: _Group, *, meta: bool = False) -> dict[str, torch.Tensor]:
        return _convert(group, self.checkpoint, self._model, meta=meta)


def empty_model(source: Checkpoint, architecture: str | None = None, **changes: Any) -> nn.Module:
    """A checkpoint's model on the meta device: all of its names and shapes, and no values.

    Args:
        source: The checkpoint.
        architecture: The model's class, if not the one in the checkpoint's config.
        **changes: Settings of the config that differ, e.g. `num_labels`.

    Raises:
        ValueError: The class is not part of transformers.
    """
    config = AutoConfig.from_pretrained(source.folder)
    for name, value in changes.items():
        setattr(config, name, value)
    architecture = architecture or architecture_of(config)
    cls: Any = getattr(transformers, architecture or "", None)
    if cls is None:
        raise ValueError(
            f"{source.source}: the class {architecture!r} is not part of transformers {transformers.__version__}, so "
            "the names of its layers are not known here."
        )
    with torch.device("meta"):
        model = cls(config)
        model.tie_weights()
    return model


def architecture_of(config: PretrainedConfig) -> str | None:
    """The class of the model that a config belongs to, the bare model's if it does not say."""
    return config.architectures[0] if config.architectures else bare_class_of(config)


def bare_class_of(config: PretrainedConfig) -> str | None:
    """The class of the model without a head that a config belongs to."""
    return getattr(transformers.AutoModel._model_mapping.get(type(config), None), "__name__", None)


def task_type_of(model: nn.Module) -> TaskType | None:
    """The task type that PEFT has for a class of transformers, if it has one."""
    return next((task for ending, task in TASKS.items() if type(model).__name__.endswith(ending)), None)


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """The other names of each tied parameter, by name."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return {name: [n for n in names if n != name] for names in groups.values() if len(names) > 1 for name in names}


def _translate(
    checkpoint: Checkpoint, model: nn.Module, wanted: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, str, Any]]:
    """For each tensor of a checkpoint: its name in the model, its own name, and how it is converted, if it is."""
    prefix = getattr(model, "base_model_prefix", "")
    rename, groups = _transformers_rules(model, prefix, wanted)
    for source in checkpoint:
        if source in wanted:
            yield source, source, None
            continue
        name, group = rename(source)
        if group is None:
            yield _with_prefix(name, prefix, wanted), source, None
    for group in groups():
        for name in _convert(group, checkpoint, model, meta=True):
            yield _with_prefix(name, prefix, wanted), next(iter(group.patterns)), group


def _with_prefix(name: str, prefix: str, wanted: Mapping[str, torch.Tensor]) -> str:
    """The name with the bare model's prefix put on or taken off, if the model has it so."""
    if name not in wanted:
        for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
            if prefix and other in wanted:
                return other
    return name


@dataclass
class _Group:
    """The tensors of a checkpoint that are converted together: each with the pattern that its name has."""

    name: str
    converter: Any
    patterns: dict[str, str] = field(default_factory=dict)


def _transformers_rules(model: nn.Module, prefix: str, wanted: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """How transformers renames and converts the tensors of this model's checkpoints while it loads them."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:  # before version 5 there was no more than this
        return lambda source: (re.sub("gamma$", "weight", re.sub("beta$", "bias", source)), None), lambda: []
    rules = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    found: dict[str, _Group] = {}

    def rename(source: str) -> tuple[str, _Group | None]:
        name, pattern = rename_source_key(source, renamings, converters, prefix, wanted)  # type: ignore[arg-type]
        if pattern is None:
            return name, None
        group = found.setdefault(name, _Group(name, by_pattern[pattern]))
        group.patterns[source] = pattern
        return name, group

    return rename, found.values


def _convert(group: _Group, checkpoint: Checkpoint, model: nn.Module, meta: bool = False) -> dict[str, torch.Tensor]:
    converter = copy.deepcopy(group.converter)
    for source in sorted(group.patterns, key=_natural_order):
        tensor = checkpoint.meta(source) if meta else checkpoint[source]
        converter.add_tensor(group.name, source, group.patterns[source], tensor)
    made = converter.convert(group.name, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}). Copy it again.") from error


def _download_checkpoint(name: str) -> Path:
    folder = download(name, [*_SIDE_FILES, "*.safetensors"])
    return folder if any(folder.glob("*.safetensors")) else download(name, [*_SIDE_FILES, "*.bin"])
