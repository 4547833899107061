"""What the configs of this package have in common, and saved adapters opened by their configs."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from typing_extensions import Self

from peft_surgical.compat import install
from peft_surgical.copies.host import BASE_COPIES
from peft_surgical.files.adapter import AdapterFile, AdapterTensors, group_parts, weights_file
from peft_surgical.files.base import check_record
from peft_surgical.files.check import add_header, checked, decoded_shapes
from peft_surgical.files.encodings import check_encoding
from peft_surgical.files.safetensors_io import Header, TensorFile, download, written_aside
from peft_surgical.methods.resolve import check_patterns
from peft_surgical.names import PREFIX, renamed


FORMAT_VERSION = 1
LIBRARY = "peft_surgical>=0.2"  # what reads the format, as pip takes it; the name is that of the import, too
MOST_LABELS, MOST_RANK, MOST_BYTES = 2**20, 2**16, 2**24  # of what a config may say, and its size
sources: set[str] = set()  # the folders and names on the hub that configs of this package were read from


_FAULTS = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, ImportError, re.error)


class UnusableConfigError(ValueError, TypeError):
    """A saved config is damaged; a `TypeError` as well, for that is PEFT's where one names no method."""


@dataclass
class DeltaConfig(PeftConfig):
    """Base of `SurgicalConfig` and `StratifiedConfig`; not used by itself.

    Args:
        labels: Number and names of the task's labels, from the model's config. Set when the adapter is made.
        base: What the base model is like, see `describe_base`. Set when the adapter is made; saved in the header of
            the file of tensors.
        saved: What tells that the two files of an adapter were saved together. Set when it is saved.
        encoding: How trained values are written: `"values"`, or as differences to the base `"lossless"`, `"rows"`
            (those that changed), `"bf16"`, `"int8"`, `"int4"` or `"sign"`; `"auto"` takes for each tensor the smallest
            that keeps `max_error`. May be set at any time before saving; loading reads it from the file.
        max_error: With `"auto"`, the most that a tensor may be off: the norm of the error over the norm of the
            difference to the base (L2). 0 restores every bit.
        check_base: Whether loading the adapter onto another base model than the one it was trained on is an error.
        key_mapping: For a base whose modules have been renamed since the adapter was saved: patterns in the names of
            the saved tensors and what to put in their place, as in PEFT's `load_adapter`. Only for loading.
        base_copies: Where the base's own values of the tuned tensors lie while this adapter, the only one loaded,
            is trained on an accelerator: `"host"`, from where they are brought back when something needs them
            (disabling the adapter, a merge), or `"device"`. `"auto"` is `"host"` unless every step needs them, as with
            DPO's reference. Under FSDP2 see `shard_by_layer`.
        format_version: Version of this file's format.
        library: The package that has the method. Set by itself, for who opens the file.

    Raises:
        ValueError: An unknown encoding, an error that cannot be, or a file that a later version of this package has
            written.
    """

    labels: dict | None = None
    base: dict | None = None
    saved: str | None = None
    encoding: str = "values"
    max_error: float = 0.0
    check_base: bool = True
    key_mapping: dict[str, str] | None = None
    base_copies: str = "auto"
    format_version: int = FORMAT_VERSION
    library: str = LIBRARY

    def __post_init__(self) -> None:
        super().__post_init__()
        check_encoding(self.encoding, self.max_error)
        if self.base_copies not in BASE_COPIES:
            raise ValueError(f"base_copies={self.base_copies!r} must be one of {', '.join(map(repr, BASE_COPIES))}.")
        if not isinstance(self.format_version, int) or self.format_version > FORMAT_VERSION:
            raise ValueError(
                f"The adapter has format_version={self.format_version!r}: it was written by a later version of "
                f"peft_surgical, and this one reads format {FORMAT_VERSION}. Update it: {install()}."
            )
        self.resolution: Any = None  # a `Resolution`, on the copy that a tuner holds
        self.library = LIBRARY
        self.card: Any = None  # an `AdapterCard`, once the adapter is being saved
        self.record = self.base  # or else of the file's header; what a user has read stays as it was

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> Self:
        is_checked = kwargs.pop("check_base", None)
        try:
            config: Any = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
            if not hasattr(config, "check_loaded"):
                return config  # as PEFT does: the file's method counts, whatever class is asked
            config.check_loaded()
        except _FAULTS as error:
            folder = os.path.join(*filter(None, (pretrained_model_name_or_path, subfolder)))
            raise UnusableConfigError(f"The {CONFIG_NAME} in {folder} cannot be used: {error}") from error
        config.check_base = config.check_base if is_checked is None else is_checked
        # so that the weights can be checked before the model is changed
        config._source = (pretrained_model_name_or_path, subfolder, cls._split_kwargs(kwargs)[0])
        sources.add(os.fspath(pretrained_model_name_or_path))
        return config

    def check_loaded(self) -> None:
        """Check what a file of a stranger could say to take time or memory without end."""
        ranking = getattr(self, "ranking", None)
        if isinstance(ranking, str):
            raise ValueError(
                f"ranking={ranking!r} is a path; a saved adapter names its layers. Give the ranking itself: "
                "config.ranking = LayerRanking.load(path)."
            )
        labels = self.labels or {"num_labels": 1}
        number, texts = labels.get("num_labels"), labels.get("id2label") or {}
        if not isinstance(number, int) or not 0 < number <= MOST_LABELS or len(texts) not in (0, number):
            raise ValueError(f"num_labels={number!r} must be a number up to {MOST_LABELS:,} with as many names.")
        for name in ("key_mapping", "auto_mapping"):
            texts = getattr(self, name) or {}
            if not isinstance(texts, dict) or not all(isinstance(text, (str, type(None))) for text in texts.values()):
                raise ValueError(f"{name}={texts!r} must be an object of texts.")
        for option in fields(self):
            if isinstance(option.default, bool) and option.name != "init_lora_weights":
                if not isinstance(value := getattr(self, option.name), bool):
                    raise ValueError(f"{option.name}={value!r} must be true or false.")
        for name in ("modules_to_save", "extra_modules"):
            names = getattr(self, name, None)
            if names is not None and not (isinstance(names, list) and all(isinstance(n, str) for n in names)):
                raise ValueError(f"{name}={names!r} must be a list of names.")
        check_record(self.base or {})
        rules: list[Any] = [*(self.key_mapping or {})]
        for name in ("target_modules", "exclude_modules"):
            rules.append(getattr(self, name, None))
        for name in ("rank_pattern", "alpha_pattern"):
            rules += getattr(self, name, None) or {}
        pattern = getattr(self, "layers_pattern", None)
        rules += [pattern] if isinstance(pattern, str) else pattern or []
        strata = getattr(self, "strata", None) or []
        for items in strata.values() if isinstance(strata, dict) else [strata]:
            rules += [item.get("target_modules") for item in items]
        check_patterns(rule for rule in rules if isinstance(rule, str))
        ranks = [getattr(self, "r", 1), *(getattr(self, "rank_pattern", None) or {}).values()]
        if not all(isinstance(rank, int) and 0 < rank <= MOST_RANK for rank in ranks):
            raise ValueError(f"r and rank_pattern must be numbers from 1 to {MOST_RANK:,}.")

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write `adapter_config.json`, and the record of the base into the header of the tensors' file beside it.

        What a model saves has its part of the model card, too.

        Each file appears whole or not at all, and who reads one from before and one from after is told so.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        own = copy.copy(self)
        own.saved, own.base = None, self.record
        if self._is_in(folder / SAFETENSORS_WEIGHTS_NAME):
            own.saved = add_header(folder / SAFETENSORS_WEIGHTS_NAME, self.record or {})
            own.base = None
        with tempfile.TemporaryDirectory() as aside:
            super(DeltaConfig, own).save_pretrained(aside, **kwargs)
            text = Path(aside, CONFIG_NAME).read_text(encoding="utf-8")
        with written_aside(folder / CONFIG_NAME) as new:
            new.write_text(text, encoding="utf-8")
        if self.card is not None and folder == self.card.folder / self.card.subfolder:
            self.card.write(self)

    def _is_in(self, weights: Path) -> bool:
        """Whether a file is one of this adapter's tensors, by their names."""
        if not weights.is_file():
            return False
        if self.resolution is None:  # of a file that is made from another's
            names = set(group_parts(vars(self).get("_opened") or {"none": 0}))
        else:
            names = {f"{PREFIX}{name.replace('.modules_to_save.', '.')}" for name in self.resolution.shapes}
        return names <= set(group_parts(AdapterTensors(weights)))

    def open_weights(self) -> TensorFile | None:
        """The file of tensors that belongs to this config, if it was read from a folder or the hub."""
        if (opened := vars(self).get("_opened")) is not None:
            return opened
        source = getattr(self, "_source", None)
        path = weights_file(*source) if source else None
        if path is None:
            return None
        file = AdapterTensors(path, self.present_name)
        self.take_header(file.header, file.path)
        return file

    @contextmanager
    def naming_itself(self) -> Iterator[None]:
        """Within the block, whatever is wrong with a config that was read is one `ValueError` that names it."""
        source = getattr(self, "_source", None)
        try:
            yield
        except _FAULTS as error:
            if source is None or isinstance(error, torch.OutOfMemoryError):
                raise
            name = os.path.join(*filter(None, source[:2]))
            if not isinstance(error, ValueError):
                text = f"{type(error).__name__}: {error}"
                raise ValueError(f"The adapter {name} cannot be used, its files are damaged ({text}).") from error
            if name in str(error):
                raise
            raise ValueError(f"{name}: {error}") from error

    def hold(self, state: dict[str, torch.Tensor]) -> None:
        """Keep the tensors of the file, which were checked, until PEFT puts them into the model."""
        checked.source, checked.state = self._source[:2], state  # type: ignore[attr-defined]

    def take_header(self, header: Header | None, path: Path) -> None:
        """Take the record of the base from the header of the tensors' file, which was saved with this config."""
        if self.saved is not None and (header is None or header.saved != self.saved):
            raise ValueError(
                f"{path} was not saved together with the adapter_config.json beside it. If another process is saving "
                "the adapter, try again; else save it again. If a program has written the tensors anew on purpose, "
                'take the line "saved" out of adapter_config.json.'
            )
        if self.record is None and header is not None:
            try:
                check_record(header.base)
            except ValueError as error:
                raise ValueError(f"{path}: {error}. Copy it again.") from error
            self.record = header.base

    def present_name(self, name: str) -> str:
        """The name that a saved tensor has in the base at hand, see `key_mapping`."""
        return renamed(name, self.key_mapping)

    def forget_saved_names(self) -> None:
        """Go over to the present names for good, once the tensors are in the model."""
        if self.key_mapping:
            if self.record:
                marks = {self.present_name(name): mark for name, mark in self.record.get("tensors", {}).items()}
                self.record = {**self.record, "tensors": marks}
            self.key_mapping = None


def open_adapter(source: str | os.PathLike, kind: type[AdapterTensors] = AdapterTensors) -> AdapterFile:
    """Open a saved adapter, in a folder or on the hub, to be read tensor by tensor."""
    folder = source if os.path.isdir(source) else download(os.fspath(source), ["adapter_*"])
    config = _read_config(os.fspath(folder))
    present_name = copy.copy(config).present_name if isinstance(config, DeltaConfig) else str  # the copy's stays
    with naming_adapter(config):
        path = os.path.join(folder, SAFETENSORS_WEIGHTS_NAME)
        if not os.path.isfile(path):
            raise ValueError(f"{source} has no {SAFETENSORS_WEIGHTS_NAME}. Save the adapter again.")
        file = kind(path, present_name)
        decoded_shapes({name: file.spec(name) for name in file}, {}, None, path)
        if isinstance(config, DeltaConfig):
            config.take_header(file.header, file.path)
            config.forget_saved_names()
            vars(config)["_opened"] = file  # by the present names
    return AdapterFile(os.fspath(source), folder, config, file)


def naming_adapter(config: PeftConfig) -> AbstractContextManager[None]:
    """A context in which whatever is wrong with a saved adapter is one `ValueError` that names it."""
    return config.naming_itself() if isinstance(config, DeltaConfig) else nullcontext()


def _read_config(folder: str) -> PeftConfig:
    try:
        return PEFT_TYPE_TO_CONFIG_MAPPING[PeftConfig._get_peft_type(folder)].from_pretrained(folder)
    except (ValueError, KeyError, OSError, TypeError, AttributeError) as error:
        if isinstance(error, ValueError) and folder in str(error):
            raise
        raise ValueError(f"The {CONFIG_NAME} in {folder} cannot be used: {error}") from error
