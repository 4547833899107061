"""Saved adapters of all of PEFT's methods, opened by their config."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

from peft_surgical.files.adapter import AdapterFile
from peft_surgical.files.safetensors_io import download
from peft_surgical.methods.config import DeltaConfig


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
