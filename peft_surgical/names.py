"""What a tensor of an adapter is called: in its file, in a model, and in the base.

A file calls the copy of `dense.weight` in `bert.pooler` that a wrapper around `bert.pooler` holds

    base_model.model.bert.pooler.surgical_params.dense|weight
    PREFIX           path        container       tensor, dots as bars (a key of a module may not contain dots)

In a model the adapter's name follows the container's. The copies of tensors that a layer owns itself lie in a child of
the layer, `path.own_tensors.container`. What engines, compilation and other adapters wrap around modules
(`_fsdp_wrapped_module`, `_orig_mod`, `base_layer`) shows in the names of a model and never in those of a file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


PREFIX = "base_model.model."  # of all names in the file of an adapter of PEFT
SEPARATOR = ":"  # before what tells a part of an encoded tensor
OWN_TENSORS = "own_tensors"
SURGICAL, STRATIFIED = "surgical_params", "lora_tuned"  # the containers of copies, by method
CONTAINERS = (SURGICAL, STRATIFIED)

# what wrappers of adapters, engines and compilation put into names
RESERVED = {*CONTAINERS, OWN_TENSORS, *PREFIX.split("."), "base_layer", "_orig_mod", "modules_to_save"}
RESERVED |= {"original_module", "token_adapter", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"}
_HOLDERS = ("base_layer", OWN_TENSORS, "original_module", "modules_to_save", "token_adapter")
_BY_ENGINES = "_fsdp_wrapped_module|_checkpoint_wrapped_module"  # the state of a model is without these
_ENGINE = re.compile(rf"(?:(?<=\.)|^)(?:{_BY_ENGINES})(?:\.|$)")
_WRAPPER = re.compile(rf"(?:(?<=\.)|^)(?:{_BY_ENGINES}|_orig_mod)(?:\.|$)")
_WRAPPED = re.compile(r"(.+)\.(modules_to_save|original_module|base_layer)\.([^.]+)")
_WRAPPED_COPY = re.compile(rf"\.base_layer\.({'|'.join(CONTAINERS)})\.")
_COPY = re.compile(
    rf"(?P<path>.+?)(?P<in_place>\.{OWN_TENSORS})?\.(?P<container>{'|'.join(CONTAINERS)})\.(?P<tensor>[^.]+)"
)


@dataclass(frozen=True)
class CopyName:
    """The name of an adapter's copy of one tensor of the base."""

    path: str  # of the module that is tuned, in the base
    tensor: str  # its name in that module, e.g. `weight` or `dense.weight`
    container: str = SURGICAL  # what holds the copies, by method: one of `CONTAINERS`
    in_place: bool = False  # the module is a layer that keeps its place, and holds the copies in a child

    @property
    def in_base(self) -> str:
        """The name in the base of the tensor that this is a copy of."""
        return f"{self.path}.{self.tensor}"

    @property
    def in_file(self) -> str:
        """The key in the adapter's file, if the copy is written as it is."""
        own = f".{OWN_TENSORS}" if self.in_place else ""
        return f"{PREFIX}{self.path}{own}.{self.container}.{as_attribute(self.tensor)}"

    @classmethod
    def parse(cls, key: str) -> CopyName | None:
        """The name behind a key in an adapter's file; None if that is not the key of a copy (heads, LoRA)."""
        if (match := _COPY.fullmatch(key.removeprefix(PREFIX))) is None:
            return None
        tensor = match["tensor"].replace("|", ".")
        return cls(match["path"], tensor, match["container"], in_place=match["in_place"] is not None)


def as_attribute(tensor: str) -> str:
    """A tensor's name as a key of a module, which may not contain dots."""
    return tensor.replace(".", "|")


def renamed(name: str, key_mapping: Mapping[str, str] | None) -> str:
    """A saved tensor's name once its modules are renamed, by the first pattern that it has, as PEFT does it."""
    prefix = PREFIX if name.startswith(PREFIX) else ""
    for pattern, replacement in (key_mapping or {}).items():
        found, count = re.subn(pattern, replacement, name.removeprefix(prefix))
        if count:
            return prefix + found
    return name


def as_plain(key: str) -> str:
    """The plain name of the tensor that a key in a file is, or is a part of."""
    return key.partition(SEPARATOR)[0]


def own_names(names: Iterable[str]) -> list[str]:
    """The names in an adapter's file, without what PEFT repeats there when it saves the embeddings along.

    Of embeddings that are tuned it then saves all that lies in their wrappers: the trained values once more (of copies
    plain ones beside those that are encoded, which do not depend on the base), and the base's, which they replace.
    """
    present = dict.fromkeys(names)

    def is_repeated(name: str) -> bool:
        if SEPARATOR in name:
            return as_plain(name) in present
        if (match := _WRAPPED.fullmatch(name)) is None:
            return False
        path, wrapper, tensor = match.groups()
        if wrapper != "base_layer":
            return f"{path}.{tensor}" in present
        copies = (CopyName(path.removeprefix(PREFIX), tensor, container) for container in CONTAINERS)
        return any(copy.in_file in present for copy in copies)

    return [name for name in present if not is_repeated(name)]


def is_of_peft(name: str) -> bool:
    """Whether a tensor of an adapter is one that PEFT itself saves and loads: of a head, or of trained tokens."""
    return ".modules_to_save." in name or ".token_adapter." in name


def without_wrappers(name: str) -> str:
    """A name in a model without what engines and compilation wrap around modules."""
    return _WRAPPER.sub("", name).removesuffix(".")


def without_engines(name: str) -> str:
    """A path in a model as its state has it: without what engines wrap around modules, with what compilation does."""
    return _ENGINE.sub("", name).removesuffix(".")


def base_path(path: str) -> str:
    """The path in the base of what a wrapper of adapters wraps, or of the layer that a `TunedInPlace` tunes."""
    parts = without_wrappers(path).removeprefix(PREFIX).split(".")
    return ".".join(part for part in parts if part not in _HOLDERS)


def as_in_file(name: str) -> str:
    """A tensor's name in a model, the adapter's name already taken out, as a file has it.

    Whether another adapter's LoRA is around a module that has copies must not show.
    """
    return _WRAPPED_COPY.sub(r".\1.", without_wrappers(name))
