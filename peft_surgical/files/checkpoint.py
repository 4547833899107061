"""A saved model: its files, and its tensors by the names that they have in a model, whatever the files call them.

Names differ between the bare and the headed model, between versions of transformers, and where several tensors of a
checkpoint make up one of the model (experts). Tied tensors may be stored once or several times.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import TaskType
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from peft_surgical.compat import ConvertedTensors, loading_rules, with_prefix
from peft_surgical.files.safetensors_io import TensorFile, download


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
    """A model as `save_pretrained` writes it, in a folder or on the hub: `config.json` and files of tensors."""

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
            file = TensorFile(path) if path.suffix == ".safetensors" else _read_pickled(path)
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

    def file_of(self, name: str) -> str | None:
        """The safetensors file that holds a tensor; None if it is one of PyTorch's own."""
        file = self._where[name]
        return file.path.name if isinstance(file, TensorFile) else None

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
    """The tensors of a checkpoint that a model, maybe a meta one, has, by the model's names, read when asked for."""

    def __init__(self, checkpoint: Checkpoint, model: nn.Module):
        self.checkpoint = checkpoint
        self.aliases = tied_names(model)
        wanted = model.state_dict()
        self._model = model
        self._sources: dict[str, str | ConvertedTensors] = {}
        self._groups: dict[str, ConvertedTensors] = {}  # by the names in the checkpoint
        self.names: dict[str, list[str]] = {}
        """The names in the model of what each tensor of the checkpoint becomes, or is a part of."""
        for name, source, group in _translate(checkpoint, model, wanted):
            sources = [source] if group is None else list(group.patterns)
            if name in wanted:
                if group is None or name not in self._sources:
                    self._sources[name] = source if group is None else group
                for part in sources:
                    self.names.setdefault(part, []).append(name)
            if group is not None:
                self._groups.update(dict.fromkeys(sources, group))
        for name in wanted:
            for alias in self.aliases.get(name, []):
                if alias in self._sources:
                    self._sources.setdefault(name, self._sources[alias])

    @property
    def unknown(self) -> list[str]:
        """The tensors of the checkpoint that the model does not have."""
        return [source for source in self.checkpoint if source not in self.names]

    def group_of(self, source: str) -> list[str]:
        """All tensors of the checkpoint that make up one of the model together with this one, itself among them."""
        group = self._groups.get(source)
        return [source] if group is None else list(group.patterns)

    def in_checkpoint(self, source: str, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """New values of a model's tensors as the checkpoint has them: what is converted in loading, converted back.

        `values` are, by the model's names, those of all in `names[source]`; the result has all in `group_of(source)`.
        """
        group = self._groups.get(source)
        return {source: next(iter(values.values()))} if group is None else group.revert(values, self._model)

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

    def _convert(self, group: ConvertedTensors, *, meta: bool = False) -> dict[str, torch.Tensor]:
        read = self.checkpoint.meta if meta else self.checkpoint.__getitem__
        return group.convert(read, self._model)


def empty_model(source: Checkpoint, architecture: str | None = None, **changes: Any) -> nn.Module:
    """A checkpoint's model, or another class of it, on the meta device. `changes` are settings of its config."""
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
    rename, groups = loading_rules(model, prefix, wanted)
    for source in checkpoint:
        if source in wanted:
            yield source, source, None
            continue
        name, group = rename(source)
        if group is None:
            yield with_prefix(name, prefix, wanted), source, None
    for group in groups():
        for name in group.convert(checkpoint.meta, model):
            in_model = with_prefix(name, prefix, wanted)
            group.names[in_model] = name
            yield in_model, next(iter(group.patterns)), group


def _read_pickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file that `torch.save` wrote, such as a `pytorch_model.bin`; mapped where its format allows."""
    try:
        # before PyTorch 1.6 such files were not zip archives, and cannot be mapped
        found: Any = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=True)
    except Exception as error:  # pickle, zip and torch have many kinds
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(f"{path} cannot be read as a PyTorch file of tensors ({reason}). Copy it again.") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise ValueError(f"{path} holds something else than tensors by name. Save the model's state_dict() alone.")
    return dict(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON ({error}). Copy it again.") from error


def _download_checkpoint(name: str) -> Path:
    folder = download(name, [*_SIDE_FILES, "*.safetensors"])
    return folder if any(folder.glob("*.safetensors")) else download(name, [*_SIDE_FILES, "*.bin"])
