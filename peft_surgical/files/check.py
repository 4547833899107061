"""What a file of an adapter must be: its header, and the names, shapes, dtypes and values of its tensors."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from peft_surgical.files.adapter import ERROR, decode_tensors, encoding_of, entry_of, group_parts, part_specs
from peft_surgical.files.packing import Shape
from peft_surgical.files.safetensors_io import HEADER, Header, TensorFile, checksum, naming, written_aside
from peft_surgical.names import SEPARATOR, CopyName, as_plain, own_names


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and where its data begin."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= os.fstat(file.fileno()).st_size - 8:
        raise ValueError("its header is cut off")
    return json.loads(file.read(length)), 8 + length


def add_header(path: Path, base: Mapping[str, Any]) -> str:
    """Put the record of the base and checksums into a safetensors file that has none; gives `Header.saved`.

    Weights that are in it several times are kept once. It is replaced at once, by one with the permissions of any new
    file.
    """
    with open(path, "rb") as old:  # not by safetensors, which writes metadata in an order of chance
        entries, start = read_header(old)
        metadata = entries.pop("__metadata__", {})
        if (header := Header.parse(metadata)) is not None:
            return header.saved
        data = np.frombuffer(mmap.mmap(old.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[start:]
        entries = {name: entries[name] for name in sorted(own_names(entries), reverse=True)}  # embeddings before heads
        values = {name: data[slice(*entry["data_offsets"])] for name, entry in entries.items()}
        sums = {name: checksum(entries[name]["dtype"], entries[name]["shape"], values[name]) for name in entries}
        tied = _tied(entries, sums, values)
        kept = sorted((n for n in entries if as_plain(n) not in tied), key=lambda n: entries[n]["data_offsets"])
        header = Header(dict(base), {name: sums[name] for name in kept}, tied)
        fields = asdict(header) if tied else {"base": header.base, "checksums": header.checksums}
        metadata[HEADER] = json.dumps(fields, separators=(",", ":"))
        ends = list(itertools.accumulate(len(values[name]) for name in kept))
        for name, begin, end in zip(kept, [0, *ends], ends, strict=False):
            entries[name]["data_offsets"] = [begin, end]
        text = json.dumps({"__metadata__": metadata, **{n: entries[n] for n in kept}}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with written_aside(path) as aside, open(aside, "wb") as new:
            new.write(len(text).to_bytes(8, "little") + text)
            for name in kept:
                new.write(values[name].data)
    return header.saved


def _tied(entries: Mapping[str, Any], sums: Mapping[str, int], values: Mapping[str, np.ndarray]) -> dict[str, str]:
    """The weights that are in a file more than once, by their plain names: embeddings, and a head that shares them."""
    first: dict[Any, dict[str, str]] = {}
    tied: dict[str, str] = {}
    for name, parts in group_parts({key: key for key in entries}).items():
        is_whole = ".lora_" not in name or CopyName.parse(name) is not None
        if is_whole and ("" not in parts or len(entries[name]["shape"]) > 1):
            mark = tuple((suffix, sums[key], str(entries[key]["shape"])) for suffix, key in sorted(parts.items()))
            others = first.setdefault(mark, parts)
            if others is not parts and all(np.array_equal(values[key], values[others[s]]) for s, key in parts.items()):
                tied[name] = as_plain(next(iter(others.values())))
    return tied


def decoded_shapes(
    specs: Mapping[str, Any], expected: Mapping[str, Shape], base: Mapping[str, torch.Tensor] | None, source: str
) -> dict[str, torch.Size]:
    """The shapes that a file's tensors will have once decoded, from its header alone, which is checked.

    The parts of an encoded tensor must be just those of an encoding, with the dtypes and shapes that it needs.
    `specs` have a shape and a dtype each, as meta tensors. `expected` has the shapes of the trained tensors by plain
    name; `base`, where it is known, the base's own tensors.
    """
    decoded: dict[str, torch.Size] = {}
    for name, parts in group_parts(specs).items():
        with naming(f"{source}: the tensor {name!r}"):
            chosen = encoding_of(parts)
        if chosen == "values":
            dtype = parts[""].dtype
            if base is not None and not dtype.is_floating_point:
                dtype = getattr(base.get(entry_of(name).name), "dtype", torch.float32)
            needed: dict[str, Any] = {"": (dtype, None)}
            decoded[name] = torch.Size(parts[""].shape)
        else:
            needed = part_specs(parts, expected.get(name))
            decoded[name] = torch.Size(expected.get(name, ()))
        known = {ERROR: (torch.float32, None), **needed} if chosen != "values" else needed
        for suffix in [*needed, *parts]:
            key = f"{name}{SEPARATOR}{suffix}" if suffix else name
            if suffix not in parts:
                raise ValueError(f"{source} lacks the tensor {key!r}. Save the adapter again.")
            if suffix not in known:
                raise ValueError(f"{source} has a tensor {key!r}, which is no part of {chosen!r}. Save it again.")
            dtype, shape = known[suffix]
            if parts[suffix].dtype != dtype:
                raise ValueError(
                    f"{source}: the tensor {key!r} has the dtype {_name(parts[suffix].dtype)}, which must be "
                    f"{_name(dtype)}. Copy the file again, or save the adapter again."
                )
            if shape is not None and tuple(parts[suffix].shape) != shape:
                raise ValueError(
                    f"{source}: the tensor {key!r} has shape {tuple(parts[suffix].shape)}, this model needs {shape}. "
                    "Load the adapter onto the base it was trained on."
                )
    return decoded


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def read_state(file: TensorFile, bases: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors of a file by their names there, decoded where their base is known and has values."""
    named = {file.names_in_file[name]: name for name in file}
    known = {as_plain(key): bases[as_plain(name)] for key, name in named.items() if as_plain(name) in bases}
    known = {key: base for key, base in known.items() if not base.is_meta}
    state = {key: file[name] for key, name in named.items()}
    ready = {key: tensor for key, tensor in state.items() if as_plain(key) in known}
    with naming(file.path):
        decoded = decode_tensors(ready, known)
    return {**{key: tensor for key, tensor in state.items() if key not in ready}, **decoded}


def check_tensors(
    shapes: Mapping[str, torch.Size],
    expected: Mapping[str, torch.Size],
    *,
    source: str,
    is_known: Callable[[str], bool] = lambda name: False,
) -> None:
    """Check that tensors are just the expected ones, and beside them only such as `is_known` tells of."""
    for name in expected:
        if name not in shapes:
            raise ValueError(
                f"{source} lacks the tensor {name!r}, which this adapter trains. It is of an adapter with another "
                "configuration, as of other layers, or was not saved whole."
            )
    for name, shape in shapes.items():
        if name in expected:
            if shape.numel() == 0 and expected[name].numel() != 0:
                raise ValueError(f"{source}: the tensor {name!r} is empty. {_GATHER}")
            if shape != expected[name]:
                raise ValueError(
                    f"{source}: the tensor {name!r} has shape {tuple(shape)}, this model needs "
                    f"{tuple(expected[name])}. Load the adapter onto the base it was trained on."
                )
        elif not is_known(name):
            raise ValueError(
                f"{source} has a tensor {name!r} that this adapter's configuration does not account for. Were the two "
                "files of the adapter saved together?"
            )


def differing(tensors: Mapping[str, torch.Tensor], places: Mapping[str, Hashable]) -> list[str]:
    """The names of tensors that go to one place with another one before them, and have other values than that."""
    first: dict[Hashable, torch.Tensor] = {}
    return [
        name
        for name, place in places.items()
        if (other := first.setdefault(place, tensors[name])) is not tensors[name]
        and not torch.equal(other, tensors[name])
    ]


def check_tied(state: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], adapter_name: str) -> None:
    """Check that what goes into an adapter has the same values wherever the adapter has one tensor in two places."""
    present = {name: live[name] for name in state if name in live and live[name].numel()}
    # with its strides, for LoRA on embeddings and a head that are tied holds each matrix in one transposed as well
    places = {name: (t.data_ptr(), t.shape, t.stride()) for name, t in present.items() if t.data_ptr()}
    if names := differing(state, places):
        raise ValueError(
            f"{names[0]!r} shares its weights in adapter {adapter_name!r} with another tensor, which has other values "
            "in what is loaded. Load that beside it instead: load_adapter, then set_adapter."
        )


def check_gathered(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Size], *, source: str) -> None:
    """Check that tensors which are to be saved are whole, not a process's share of them."""
    partial = [name for name, tensor in tensors.items() if 0 < tensor.numel() < expected[name].numel()]
    for name in sharded(tensors) + partial:
        raise ValueError(f"{source}: the tensor {name!r} is one process's share of it. {_GATHER}")


def sharded(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that are spread over processes and say so, as those of FSDP2 do."""
    return [name for name, t in tensors.items() if hasattr(t, "full_tensor") or hasattr(t, "local_shards")]


_GATHER = (
    "Sharded weights must be gathered before they are saved: "
    "model.save_pretrained(path, state_dict=accelerator.get_state_dict(model), "
    "is_main_process=accelerator.is_main_process). Trainer does so with fsdp_state_dict_type: FULL_STATE_DICT."
)


class StateOfFile(dict[str, torch.Tensor]):
    """The tensors of an adapter's file and its header; PEFT hands on copies of such a dictionary."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], header: Header) -> None:
        super().__init__(tensors)
        self.header = header

    def copy(self) -> StateOfFile:
        return StateOfFile(self, self.header)


class Checked(threading.local):
    """The tensors that a thread has checked, and decoded, before it puts them into a model: those and no others."""

    source: tuple[Any, Any] | None = None  # the folder or name on the hub, and the subfolder
    state: dict[str, torch.Tensor] | None = None

    def take(self, source: Any, subfolder: Any) -> dict[str, torch.Tensor] | None:
        """The tensors from a source, if they are these; they are given once."""
        state = self.state if self.source == (source, subfolder) else None
        self.source = self.state = None
        return state


checked = Checked()
