"""What the configs of this package have in common, and saved adapters opened by their configs."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub import hf_hub_download
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from typing_extensions import Self

from peft_surgical.files.adapter import AdapterFile
from peft_surgical.files.encodings import find_encoding
from peft_surgical.files.safetensors_io import download
from peft_surgical.names import PREFIX


FORMAT_VERSION = 1
sources: set[str] = set()  # the folders and names on the hub that configs of this package were read from


@dataclass
class DeltaConfig(PeftConfig):
    """Base of `SurgicalConfig` and `StratifiedConfig`; not used by itself.

    Args:
        labels: Number and names of the task's labels, from the model's config. Set when the adapter is made.
        base: What the base model is like, see `describe_base`. Set when the adapter is made.
        encoding: How trained values are written: `"values"`, or as differences to the base `"lossless"`, `"bf16"`,
            `"int8"`, `"int4"` or `"sign"`. May be set at any time before saving; loading reads it from the file.
        check_base: Whether loading the adapter onto another base model than the one it was trained on is an error.
        key_mapping: For a base whose modules have been renamed since the adapter was saved: patterns in the names of
            the saved tensors and what to put in their place, as in PEFT's `load_adapter`. Only for loading.
        format_version: Version of this file's format.

    Raises:
        ValueError: An unknown encoding, or a file that a later version of this package has written.
    """

    labels: dict | None = field(default=None, metadata={"help": "Number and names of the task's labels."})
    base: dict | None = field(default=None, metadata={"help": "What the base model is like."})
    encoding: str = field(default="values", metadata={"help": "values, lossless, bf16, int8, int4 or sign."})
    check_base: bool = field(default=True, metadata={"help": "Whether another base model is an error."})
    key_mapping: dict[str, str] | None = field(default=None, metadata={"help": "New names of renamed modules."})
    format_version: int = field(default=FORMAT_VERSION, metadata={"help": "Version of this file's format."})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.encoding != "values":
            find_encoding(self.encoding)
        if not isinstance(self.format_version, int) or self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"The adapter has format_version={self.format_version!r}: it was written by a later version of "
                f"peft_surgical, and this one reads format {FORMAT_VERSION}. Update: pip install -U peft-surgical."
            )
        self.resolution: Any = None  # a `Resolution`, on the copy that a tuner holds

    def for_one_model(self) -> Self:
        """A copy for the tuner of one model, which resolves it; what a user holds can be used for another one."""
        own = copy.copy(self)
        own.resolution = None
        return own

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> Self:
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        # so that the weights can be checked before the model is changed
        config._source = (pretrained_model_name_or_path, subfolder, cls._split_kwargs(kwargs)[0])
        sources.add(os.fspath(pretrained_model_name_or_path))
        return config

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write `adapter_config.json`; the file appears whole or not at all."""
        target = os.path.join(save_directory, "adapter_config.json")
        aside = os.path.join(save_directory, f".adapter_config.{os.getpid()}")
        try:
            super().save_pretrained(aside, **kwargs)
            os.replace(os.path.join(aside, "adapter_config.json"), target)
        finally:
            if os.path.isdir(aside):
                for leftover in os.listdir(aside):
                    os.remove(os.path.join(aside, leftover))
                os.rmdir(aside)

    def present_name(self, name: str) -> str:
        """The name that a saved tensor has in the base at hand, see `key_mapping`."""
        prefix = PREFIX if name.startswith(PREFIX) else ""
        bare = name.removeprefix(prefix)
        for pattern, replacement in (self.key_mapping or {}).items():
            renamed, count = re.subn(pattern, replacement, bare)
            if count:
                return prefix + renamed
        return name

    def forget_saved_names(self) -> None:
        """Go over to the present names for good, once the tensors are in the model."""
        if self.key_mapping and self.base:
            names = {self.present_name(name): mark for name, mark in self.base["tensors"].items()}
            self.base, self.key_mapping = {**self.base, "tensors": names}, None

    def weights_file(self) -> str | None:
        """The safetensors file that belongs to this config, if it was read from a folder or the hub."""
        name, subfolder, options = getattr(self, "_source", (None, None, {}))
        if name is None:
            return None
        local = os.path.join(name, subfolder or "", SAFETENSORS_WEIGHTS_NAME)
        if os.path.exists(local):
            return local
        if os.path.isdir(name):
            return None
        try:
            options = {key: value for key, value in options.items() if key != "user_agent"}
            return hf_hub_download(name, SAFETENSORS_WEIGHTS_NAME, subfolder=subfolder, **options)
        except Exception:  # PEFT's own loading follows and says what is wrong
            return None


def open_adapter(source: str | os.PathLike) -> AdapterFile:
    """Open a saved adapter, to be read tensor by tensor.

    Args:
        source: Its folder, or its name on the hub.

    Raises:
        ValueError: A file is missing or damaged. The message names it.
    """
    folder = source if os.path.isdir(source) else download(os.fspath(source), ["adapter_*"])
    return AdapterFile(os.fspath(source), folder, *read_config(folder))


def read_config(folder: str | os.PathLike) -> tuple[PeftConfig, Callable[[str], str]]:
    """The config of a saved adapter, of whatever method, and what its file's tensors are called in the base at hand.

    Raises:
        ValueError: It is missing, damaged, of a method that is not known, or written by a later version.
    """
    try:
        cls = PEFT_TYPE_TO_CONFIG_MAPPING[PeftConfig._get_peft_type(os.fspath(folder))]
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} has no adapter_config.json that can be read ({type(error).__name__}: {error})."
        ) from error
    try:
        config: Any = cls.from_pretrained(os.fspath(folder))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"The adapter_config.json in {folder} cannot be used: {error}") from error
    if not isinstance(config, DeltaConfig):
        return config, lambda name: name
    names = copy.copy(config)  # remembers how the names are mapped
    config.forget_saved_names()
    return config, names.present_name
