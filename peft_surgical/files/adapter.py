"""A saved adapter, read tensor by tensor: what is in its two files, by the names that the tensors have in the base."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from peft_surgical.copies.module import TunedModule
from peft_surgical.files.encoded_state import decode_tensors, encoding_of, group_parts
from peft_surgical.files.tensor_files import TensorFile, download
from peft_surgical.methods.config import DeltaConfig
from peft_surgical.methods.stratified.layers import StratifiedModule
from peft_surgical.names import OWN_TENSORS


PREFIX = "base_model.model."
_CONTAINERS = "|".join((*TunedModule.adapter_layer_names, *StratifiedModule.adapter_layer_names))
_COPY = re.compile(rf"(?P<path>.+?)(\.{OWN_TENSORS})?\.({_CONTAINERS})\.(?P<name>[^.]+)")


@dataclass(frozen=True)
class Entry:
    """One trained tensor in an adapter's file.

    Args:
        key: Its plain name in the file.
        name: The name in the base model of what it replaces, or stands beside.
        is_copy: Whether it is a tuned copy of a tensor of the base, which an encoding may be applied to.
        suffixes: What the file has of it: `""` for the plain tensor, else the parts of its encoding.
    """

    key: str
    name: str
    is_copy: bool
    suffixes: list[str] = field(default_factory=list)

    @property
    def encoding(self) -> str:
        """How it is written."""
        return encoding_of(dict.fromkeys(self.suffixes))

    def keys(self) -> dict[str, str]:
        """The names of its parts in the file, by suffix."""
        return {suffix: f"{self.key}:{suffix}" if suffix else self.key for suffix in self.suffixes}


class AdapterFile:
    """A saved adapter of any PEFT method, with the names that its tensors have in the base at hand.

    Args:
        source: Its folder, or its name on the hub.

    Raises:
        ValueError: A file is missing or damaged. The message names it.
    """

    def __init__(self, source: str | os.PathLike):
        self.source = os.fspath(source)
        self.folder = source if os.path.isdir(source) else download(self.source, ["adapter_*"])
        self.config, present_name = read_config(self.folder)
        self.path = os.path.join(self.folder, SAFETENSORS_WEIGHTS_NAME)
        if not os.path.isfile(self.path):
            raise ValueError(f"{self.source} has no {SAFETENSORS_WEIGHTS_NAME}. Save the adapter again.")
        self.file = TensorFile(self.path, present_name)
        self.entries = entries(self.file)

    def decode(self, entry: Entry, base: torch.Tensor | None = None) -> torch.Tensor:
        """The trained values of one tensor.

        Args:
            entry: The tensor.
            base: The base's own, which an encoded tensor needs.

        Raises:
            ValueError: The tensor is encoded, and `base` is missing or another one.
        """
        parts = {key: self.file[key] for key in entry.keys().values()}
        return decode_tensors(parts, {} if base is None else {entry.key: base})[entry.key]

    def nbytes(self, entry: Entry) -> int:
        """The size of a tensor in the file, all parts together, in bytes."""
        return sum(self.file.nbytes(key) for key in entry.keys().values())


def entries(names: Mapping[str, Any] | TensorFile) -> list[Entry]:
    """The trained tensors in an adapter's file, from the names in its header.

    Example:

        >>> entries({"base_model.model.pooler.surgical_params.dense|weight": None})[0].name
        'pooler.dense.weight'
    """
    return [entry_of(key, list(parts)) for key, parts in group_parts(dict.fromkeys(names)).items()]


def read_config(folder: str | os.PathLike) -> tuple[PeftConfig, Callable[[str], str]]:
    """The config of a saved adapter, of whatever method, and what its file's tensors are called in the base at hand.

    Raises:
        ValueError: It is missing, damaged, or of a method that is not known.
    """
    try:
        method = PeftConfig._get_peft_type(os.fspath(folder))
        config: Any = PEFT_TYPE_TO_CONFIG_MAPPING[method].from_pretrained(os.fspath(folder))
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} has no adapter_config.json that can be read ({type(error).__name__}: {error})."
        ) from error
    if not isinstance(config, DeltaConfig):
        return config, lambda name: name
    names = copy.copy(config)  # remembers how the names are mapped
    config.forget_saved_names()
    return config, names.present_name


def entry_of(key: str, suffixes: Sequence[str] = ("",)) -> Entry:
    """What a plain name in an adapter's file stands for."""
    plain = key.removeprefix(PREFIX)
    if match := _COPY.fullmatch(plain):
        return Entry(key, f"{match['path']}.{match['name'].replace('|', '.')}", True, list(suffixes))
    return Entry(key, plain, False, list(suffixes))


def method_of(config: PeftConfig) -> str:
    """The name of a config's method, in capitals."""
    return getattr(config.peft_type, "value", None) or str(config.peft_type)
