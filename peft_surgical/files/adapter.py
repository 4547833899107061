"""A saved adapter, read tensor by tensor: what is in its file, by the names that the tensors have in the base.

An encoded tensor takes the place of the plain one: `...weight` becomes `...weight:int8` and `...weight:int8_scale`, or
`...weight:int8_zstd` where zstd makes such a part smaller. So the file says by itself how each tensor is encoded, and
tensors that an encoding does not suit (biases, norms, heads, values that are not finite) stay plain beside the encoded
ones. The suffix has no dot, so it survives PEFT's translation of names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME

from peft_surgical.files.encodings import ENCODINGS, difference, find_encoding
from peft_surgical.files.packing import Shape, pack, unpack
from peft_surgical.files.safetensors_io import Header, TensorFile, naming, write_tensors, written_aside
from peft_surgical.names import PREFIX, SEPARATOR, CopyName, as_plain, own_names


ERROR = "error"
PACKED = "_zstd"  # after the suffix of a part that zstd has made smaller


@dataclass(frozen=True)
class Entry:
    """One trained tensor in an adapter's file."""

    key: str  # its plain name in the file
    name: str  # in the base, of what it replaces or stands beside
    is_copy: bool  # of a tensor of the base, so that an encoding may be applied to it
    suffixes: list[str] = field(default_factory=list)  # of what the file has: "" if plain, or an encoding's parts

    @property
    def encoding(self) -> str:
        return encoding_of(self.suffixes)

    def keys(self) -> dict[str, str]:
        """The names of its parts in the file, by suffix."""
        return {suffix: f"{self.key}{SEPARATOR}{suffix}" if suffix else self.key for suffix in self.suffixes}

    def value_keys(self) -> list[str]:
        """The names, once unpacked, of the parts that its values are made of: all but the record of the error."""
        return [key.removesuffix(PACKED * bool(suffix)) for suffix, key in self.keys().items() if suffix != ERROR]


class AdapterTensors(TensorFile):
    """The tensors of an adapter's file by all of their names, without those that PEFT has repeated."""

    def __init__(self, path: str | os.PathLike, present_name: Callable[[str], str] = lambda name: name):
        super().__init__(path, present_name)
        for name, other in tied_keys(self.header, self.names_in_file.items()):
            self.also_as(name, other, present_name)
        self.names_in_file = {name: self.names_in_file[name] for name in own_names(self)}


@dataclass
class AdapterFile:
    """A saved adapter of any PEFT method, its tensors by the names that they have in the loaded base."""

    source: str
    folder: str | os.PathLike
    config: PeftConfig
    file: AdapterTensors

    @property
    def entries(self) -> list[Entry]:
        return entries(self.file)

    @property
    def whole(self) -> set[str]:
        """The names in the base of the tensors whose values do not depend on the base's."""
        return {entry.name for entry in self.entries if entry.encoding == "values"}

    @property
    def of_base(self) -> set[str]:
        """The names in the file of weights of the base that PEFT has saved beside what is tuned of them."""
        return {name for name in self.file if ".base_layer." in name and ".token_adapter." not in name}

    def decode(self, entry: Entry, base: torch.Tensor | None = None) -> torch.Tensor:
        """The trained values of one tensor, which need the base's own if it is encoded."""
        parts = {key: self.file[key] for key in entry.keys().values()}
        with naming(self.source):
            return decode_tensors(parts, {} if base is None else {entry.key: base})[entry.key]

    def is_equal(self, name: str, other: str) -> bool:
        """Whether two tensors of the base have the same values here, both being stored."""
        found = [entry for entry in self.entries if entry.name in (name, other)]
        keys = zip(*(entry.keys().values() for entry in found), strict=False)
        is_alike = len(found) == 2 and found[0].suffixes == found[1].suffixes
        return is_alike and all(torch.equal(self.file[one], self.file[two]) for one, two in keys)

    def nbytes(self, entry: Entry) -> int:
        """The size of a tensor in the file, all parts together, in bytes; 0 if it is stored under another name."""
        keys = [key for key in entry.keys().values() if self.file.names_in_file[key] not in self.file.stored_as]
        return sum(self.file.spec(key).nbytes for key in keys)


def entries(names: Iterable[str]) -> list[Entry]:
    """The trained tensors in an adapter's file, from the names in its header."""
    return [entry_of(key, list(parts)) for key, parts in group_parts(dict.fromkeys(names)).items()]


def tied_keys(header: Header | None, names: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The names under which a file's tensors are also meant, each after what a tensor is called here.

    `names` are what the tensors are called here and in the file.
    """
    tied = header.tied.items() if header is not None else ()
    found = [(name, key, as_plain(key)) for name, key in (names if tied else ())]
    return [(name, other + key[len(plain) :]) for other, one in tied for name, key, plain in found if plain == one]


def touched_names(names: Iterable[str]) -> set[str]:
    """The names in the base of the tensors that those of an adapter's file stand for or add to."""
    return touched_by(entries(names))


def touched_by(found: Collection[Entry]) -> set[str]:
    """The same, of an adapter's entries."""
    copies = {entry.name for entry in found if entry.is_copy}
    return copies | {f"{e.name.partition('.lora_')[0]}.weight" for e in found if not e.is_copy and ".lora_" in e.name}


def entry_of(key: str, suffixes: Sequence[str] = ("",)) -> Entry:
    """What a plain name in an adapter's file stands for."""
    copy = CopyName.parse(key)
    return Entry(key, copy.in_base if copy else key.removeprefix(PREFIX), copy is not None, list(suffixes))


def weights_file(source: str, subfolder: str | None, options: Mapping[str, Any]) -> str | None:
    """The safetensors file of an adapter in a folder, or on the hub with these options of its; None without one."""
    local = os.path.join(source, subfolder or "", SAFETENSORS_WEIGHTS_NAME)
    if os.path.exists(local):
        return local
    if os.path.isdir(source):
        return None
    try:
        return hf_hub_download(source, SAFETENSORS_WEIGHTS_NAME, subfolder=subfolder, **options)
    except Exception:  # PEFT's own loading follows and says what is wrong
        return None


def method_of(config: PeftConfig) -> str:
    """The name of a config's method, in capitals."""
    return getattr(config.peft_type, "value", None) or str(config.peft_type)


def write_adapter(
    folder: Path, config: PeftConfig, tensors: Mapping[str, torch.Tensor], auto_mapping: dict | None = None
) -> int:
    """Write the two files of an adapter, which appear together; gives the size of its tensors in bytes."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(folder) as aside:
        aside.mkdir()
        write_tensors(aside / SAFETENSORS_WEIGHTS_NAME, tensors)
        config.save_pretrained(str(aside), auto_mapping_dict=auto_mapping)
    file = TensorFile(folder / SAFETENSORS_WEIGHTS_NAME)
    return sum(file.spec(name).nbytes for name in file)


# ---- encoded tensors


def encode_tensor(
    name: str, trained: torch.Tensor, base: torch.Tensor | None, encoding: str, max_error: float = 0.0
) -> dict[str, torch.Tensor]:
    """One tensor as a file has it, by name: encoded as a difference to the base's own, of any dtype, or plain.

    Plain stay tensors of one dimension (biases, norms), those without a base of the same shape, those that would not
    get smaller, and, where the encoding is lossy, those with values that are not finite. Lossy encodings add
    `name:error`, a float32 tensor of shape (2,): the norm of the error and the norm of the difference. `"auto"` takes
    the smallest whose error, as decoded and rounded to the trained tensor's dtype, is at most `max_error` of the
    difference; 0 asks for every bit.
    """
    trained = trained.detach()
    smallest = {"": trained}
    if encoding == "values" or base is None or base.shape != trained.shape or trained.ndim < 2 or not trained.numel():
        return {name: trained}
    base = base.detach().to(trained.device)
    is_rounded = trained.is_floating_point() and base.is_floating_point()
    for chosen in ENCODINGS.values() if encoding == "auto" else [find_encoding(encoding)]:
        if chosen.lossy and (not is_rounded or (encoding == "auto" and not max_error)):
            continue
        parts = chosen.encode(trained, base)
        if chosen.lossy:
            decoded, moved = chosen.decode(parts, base), difference(trained, base)
            parts = dict(_pack_part(suffix, part) for suffix, part in parts.items())
            errors = [_norm(difference(trained, form)) for form in (decoded, decoded.to(trained.dtype))]
            parts[ERROR] = torch.tensor([errors[0], _norm(moved)], dtype=torch.float32)
            if not torch.isfinite(parts[ERROR]).all() or (
                encoding == "auto" and max(errors) > max_error * _norm(moved)
            ):
                continue
        if sum(part.nbytes for part in parts.values()) < sum(part.nbytes for part in smallest.values()):
            smallest = parts
    return {f"{name}{SEPARATOR * bool(suffix)}{suffix}": part for suffix, part in smallest.items()}


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _pack_part(suffix: str, part: torch.Tensor) -> tuple[str, torch.Tensor]:
    packed = pack(part.cpu())
    return (suffix + PACKED, packed) if packed.nbytes < part.nbytes else (suffix, part)


def part_specs(parts: Collection[str], shape: Shape | None) -> dict[str, tuple[torch.dtype, Shape | None]]:
    """By suffix, dtype and shape (where it is known) of the parts that an encoded tensor needs, as a file has them."""
    chosen = find_encoding(encoding_of(parts))
    shapes: Any = dict.fromkeys(chosen.dtypes) if shape is None else chosen.part_shapes(shape)
    specs = {}
    for suffix, dtype in chosen.dtypes.items():
        is_packed = chosen.lossy and suffix + PACKED in parts  # the exact ones are packed by themselves
        specs[suffix + PACKED * is_packed] = (torch.uint8, None) if is_packed else (dtype, shapes[suffix])
    return specs


def decode_tensors(tensors: Mapping[str, torch.Tensor], bases: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Turn encoded tensors into trained ones, with the base's own by their plain names; plain ones pass through."""
    decoded = {}
    for name, parts in group_parts(tensors).items():
        if "" in parts:
            decoded[name] = parts[""]
            continue
        if name not in bases:
            raise ValueError(
                f"The tensor {name!r} is encoded ({', '.join(parts)}), but the model has no such tensor to decode it "
                "against. Load the adapter onto the base it was trained on."
            )
        base = bases[name].detach()
        try:
            chosen = find_encoding(encoding_of(parts))
            for suffix, shape in chosen.part_shapes(base.shape).items():
                if shape is not None and suffix + PACKED in parts:
                    parts[suffix] = unpack(parts[suffix + PACKED], shape, chosen.dtypes[suffix])
            decoded[name] = chosen.decode({suffix: part.to(base.device) for suffix, part in parts.items()}, base)
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"The tensor {name!r} cannot be decoded: {error}.") from error
    return decoded


def group_parts(tensors: Mapping[str, object]) -> dict[str, dict]:
    """What a file holds for each plain name: by suffix, the suffix of a plain tensor being empty."""
    groups: dict[str, dict] = {}
    for key, value in tensors.items():
        name, _, suffix = key.partition(SEPARATOR)
        groups.setdefault(name, {})[suffix] = value
    return groups


def encoding_of(suffixes: Collection[str]) -> str:
    """The encoding that the parts of one tensor belong to."""
    if "" in suffixes:
        return "values"
    for name in ENCODINGS:
        if name in suffixes or name + PACKED in suffixes:
            return name
    raise ValueError(
        f"its parts {', '.join(suffixes)} are of no known encoding ({', '.join(ENCODINGS)}). Was the file written by "
        "a newer version of peft_surgical?"
    )


def is_encoded(names: Iterable[str]) -> bool:
    """Whether any of a file's tensors is encoded, by their names."""
    return any(SEPARATOR in name for name in names)
