"""What is in saved adapters: sizes, encodings and errors by layer, and what two of them have in common."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from peft_surgical.compat import natural_order
from peft_surgical.convert.change import table
from peft_surgical.convert.convert import base_of
from peft_surgical.convert.merge import tensors_of_base
from peft_surgical.convert.page import Table, write_page
from peft_surgical.files.adapter import ERROR, PACKED, AdapterFile, Entry, method_of
from peft_surgical.files.encodings import LOSSLESS_HEADER, Rows, difference, find_encoding
from peft_surgical.files.packing import unpacked_nbytes
from peft_surgical.files.safetensors_io import naming
from peft_surgical.methods.config import naming_adapter, open_adapter


@dataclass(frozen=True)
class Group:
    """The tensors of one layer, or of one module outside the layers, in an adapter's file."""

    name: str  # the path of the layer or module in the base
    tensors: int  # their number
    nbytes: int  # their size in the file
    values_nbytes: int  # the size that their plain values would have
    encodings: tuple[str, ...]  # plain tensors beside encoded ones are `values`
    error: float  # the norm of the encoding's error, relative to the difference to the base; 0 if exact


@dataclass(frozen=True)
class Inspection:
    """What a saved adapter holds."""

    source: str
    config: dict[str, Any]
    groups: list[Group]  # its tensors by layer

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def values_nbytes(self) -> int:
        """The size that plain values would have."""
        return sum(group.values_nbytes for group in self.groups)

    def _facts(self) -> list[str]:
        shown = ("peft_type", "task_type", "base_model_name_or_path", "layers", "encoding")
        return [f"{key}: {self.config[key]}" for key in shown if self.config.get(key) is not None]

    def _table(self) -> Table:
        rows = [
            (g.name, str(g.tensors), f"{g.nbytes:,}", f"{_ratio(g):.3f}", "+".join(g.encodings), f"{g.error:.1e}")
            for g in self.groups
        ]
        count = str(sum(g.tensors for g in self.groups))
        rows.append(("all", count, f"{self.nbytes:,}", f"{_ratio(self):.3f}", "", ""))
        return ("in", "tensors", "bytes", "of values", "encoding", "error"), rows

    def __str__(self) -> str:
        return "\n".join([self.source, *self._facts(), table(*self._table())])

    def save_html(self, path: str | os.PathLike) -> None:
        """Write one page of HTML with the same table, that sorts and is searched."""
        head, (*rows, total) = self._table()
        facts = [*self._facts(), f"{total[1]} tensors, {total[2]} bytes, {total[3]} of plain values"]
        write_page(path, self.source, facts, {"Layers": (head, rows)}, bars=["bytes", "error"])


@dataclass(frozen=True)
class Comparison:
    """What two adapters have in common."""

    sources: tuple[str, str]
    rows: list[tuple[str, int, int, bool, float]]
    """By layer or module: the bytes in each (0 if it has none), whether all common tensors are equal bit for bit, and
    the cosine between their differences to the base (NaN if the base was not given)."""

    def _table(self) -> Table:
        cells = [
            (
                name,
                *(f"{n:,}" if n else "-" for n in (a, b)),
                ("equal" if same else "differ") if a and b else "only one",
                f"{cosine:.3f}".replace("nan", "-"),
            )
            for name, a, b, same, cosine in self.rows
        ]
        return ("in", "bytes in the first", "in the second", "values", "cosine of differences"), cells

    def __str__(self) -> str:
        return "\n".join([*self.sources, table(*self._table())])

    def save_html(self, path: str | os.PathLike) -> None:
        """Write one page of HTML with the same table, that sorts and is searched."""
        bars = ["bytes in the first", "in the second"]
        write_page(path, " and ".join(self.sources), [], {"Layers": self._table()}, bars)


def inspect_adapter(source: str | os.PathLike) -> Inspection:
    """Look at a saved adapter, whose tensors are read once to see that they are whole.

    Args:
        source: Its folder, or its name on the hub.

    Raises:
        ValueError: A file of it is missing or damaged.
    """
    adapter = open_adapter(source)
    if adapter.file.header is not None:
        for name in adapter.file:
            adapter.file[name]
    with naming_adapter(adapter.config):
        groups = [_group(name, entries, adapter) for name, entries in _by_layer(adapter).items()]
    config = {**adapter.config.to_dict(), "peft_type": method_of(adapter.config)}
    return Inspection(adapter.source, config, groups)


def compare_adapters(
    first: str | os.PathLike, second: str | os.PathLike, base: str | os.PathLike | None = None
) -> Comparison:
    """Compare two saved adapters layer by layer, one tensor at a time.

    Args:
        first: An adapter's folder, or its name on the hub.
        second: Another one's.
        base: Their base, needed for the cosine between their differences to it, and for encoded adapters; for those
            it is by default the one that the config of the first encoded one names.

    Raises:
        ValueError: A file is missing or damaged, or the base of an encoded adapter cannot be had or is another one.
    """
    adapters = open_adapter(first), open_adapter(second)
    old: Mapping[str, torch.Tensor] = {}
    encoded = next((a for a in adapters if any(entry.encoding != "values" for entry in a.entries)), None)
    if base is not None or encoded is not None:
        before = base_of(encoded or adapters[0], base)
        old, _ = (tensors_of_base(before, adapter) for adapter in adapters)
    layers = [_by_layer(adapter) for adapter in adapters]
    rows = []
    for name in dict.fromkeys([*layers[0], *layers[1]]):
        found = [layer.get(name, []) for layer in layers]
        a, b = (sum(map(adapter.nbytes, entries)) for adapter, entries in zip(adapters, found, strict=True))
        rows.append((name, a, b, *_likeness(adapters, found, old)))
    return Comparison((adapters[0].source, adapters[1].source), rows)


def _by_layer(adapter: AdapterFile) -> dict[str, list[Entry]]:
    """The tensors by layer, as far as names tell: up to the first number in the path, else by module."""
    groups: dict[str, list[Entry]] = {}
    for entry in adapter.entries:
        path = entry.name.rpartition(".")[0]
        match = re.match(r"(.*?\.\d+)(\.|$)", path)
        groups.setdefault(match[1] if match else path, []).append(entry)
    return dict(sorted(groups.items(), key=lambda group: natural_order(group[0])))


def _group(name: str, entries: list[Entry], adapter: AdapterFile) -> Group:
    errors, differences, values = 0.0, 0.0, 0
    for entry in entries:
        keys = entry.keys()
        if ERROR in keys:
            error, moved = adapter.file[keys[ERROR]].tolist()
            errors, differences = math.hypot(errors, error), math.hypot(differences, moved)
        if entry.encoding == "values":
            values += adapter.nbytes(entry)
        elif adapter.nbytes(entry):
            with naming(f"{adapter.source}: the tensor {entry.key!r}"):
                values += _values_nbytes(entry.encoding, {suffix: adapter.file[key] for suffix, key in keys.items()})
    return Group(
        name=name,
        tensors=len(entries),
        nbytes=sum(map(adapter.nbytes, entries)),
        values_nbytes=values,
        encodings=tuple(dict.fromkeys(entry.encoding for entry in entries)),
        error=errors / differences if differences else 0.0,
    )


def _values_nbytes(encoding: str, parts: Mapping[str, torch.Tensor]) -> int:
    """The size in bytes of an encoded tensor's plain values, in float32 if rounded."""
    chosen = find_encoding(encoding)
    if chosen.lossy:
        packed = parts.get(encoding + PACKED)
        nbytes = parts[encoding].nbytes if packed is None else unpacked_nbytes(packed)
        return nbytes // chosen.dtypes[encoding].itemsize * chosen.entries_per_code * 4
    nbytes = unpacked_nbytes(parts[list(chosen.dtypes)[-1]][LOSSLESS_HEADER:])
    if isinstance(chosen, Rows):  # of which the size of one tells that of all
        index = parts[encoding]
        nbytes = nbytes // max(1, unpacked_nbytes(index[16:]) // 8) * int(index[:8].clone().view(torch.int64))
    return nbytes


def _likeness(
    adapters: tuple[AdapterFile, AdapterFile], found: list[list[Entry]], old: Mapping[str, torch.Tensor]
) -> tuple[bool, float]:
    """Whether common tensors are equal bit for bit, and the cosine between the differences to the base."""
    second = {entry.key: entry for entry in found[1]}
    common = [(entry, second[entry.key]) for entry in found[0] if entry.key in second]
    same = bool(common)
    dot = 0.0
    norms = [0.0, 0.0]
    for pair in common:
        base = old.get(pair[0].name)
        a, b = (adapter.decode(entry, base) for adapter, entry in zip(adapters, pair, strict=True))
        same = same and a.dtype == b.dtype and torch.equal(a, b)
        if base is not None and a.shape == b.shape == base.shape:
            steps = [difference(tensor, base).double().reshape(-1) for tensor in (a, b)]
            dot += float(steps[0] @ steps[1])
            norms = [math.hypot(norm, float(step.norm())) for norm, step in zip(norms, steps, strict=True)]
    return same, dot / math.prod(norms) if all(norms) else math.nan


def _ratio(of: Group | Inspection) -> float:
    return of.nbytes / of.values_nbytes if of.values_nbytes else 1.0
