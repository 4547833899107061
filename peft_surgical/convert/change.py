"""How far fine-tuning moved each tensor, layer and sub-layer of a model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from peft_surgical.convert.page import Table
from peft_surgical.copies.select import own_tensor_names, tunable_modules
from peft_surgical.layers import find_stacks


CHUNK = 1 << 22  # entries compared at a time, so that differences take little memory


@dataclass(frozen=True)
class WeightChange:
    """How far one tensor moved."""

    name: str
    module: str  # the path of the module that holds it
    stack: str | None  # None outside all stacks
    layer: int | None
    part: str  # what the module is called inside its layer
    distance: float  # the norm of the difference; NaN for a tensor that the base lacks or has in another shape
    norm: float  # of the base's values
    differs: bool  # whether any bit does

    @property
    def is_new(self) -> bool:
        """Whether the base has no tensor of this name and shape."""
        return math.isnan(self.distance)


class WeightChanges(list[WeightChange]):
    """The changes of all tensors of a model."""

    def by_layer(self) -> dict[tuple[str, int], list[WeightChange]]:
        """The changes inside layers, by stack and layer."""
        return _grouped(self._in_layers(), lambda change: (change.stack, change.layer))

    def by_part(self) -> dict[tuple[str, int, str], float]:
        """How far each sub-layer moved, relative to its norm."""
        groups = _grouped(self._in_layers(), lambda change: (change.stack, change.layer, change.part))
        return {key: relative_distance(changes) for key, changes in groups.items()}

    def layer_table(self) -> Table:
        """How far each layer moved, and each module outside the layers that differs."""
        rows = []
        for (stack, layer), changes in self.by_layer().items():
            distance = f"{relative_distance(changes):.3e}"
            rows.append((f"{stack} {layer}", distance, _largest(changes), str(_count(changes))))
        outside = _grouped((c for c in self if c.layer is None and c.differs), lambda change: change.module)
        for module, changes in outside.items():
            distance = "new" if any(c.is_new for c in changes) else f"{relative_distance(changes):.3e}"
            rows.append((module or "the model itself", distance, "", str(_count(changes))))
        return ("layer", "moved", "most in", "tensors that differ"), rows

    def part_table(self) -> Table:
        rows = [(f"{stack} {layer}", part, f"{moved:.3e}") for (stack, layer, part), moved in self.by_part().items()]
        return ("layer", "sub-layer", "moved"), rows

    def __str__(self) -> str:
        return table(*self.layer_table())

    def _in_layers(self) -> Iterator[WeightChange]:
        return (change for change in self if change.layer is not None)

    def plot(self, path: str | os.PathLike) -> None:
        """Draw a heat map, a layer per column and a sub-layer per row. Needs matplotlib."""
        from matplotlib.figure import Figure

        distances = self.by_part()
        columns = list(self.by_layer())
        parts = list(dict.fromkeys(part for _, _, part in distances))
        grid = [[distances.get((*column, part), math.nan) for column in columns] for part in parts]
        figure = Figure(figsize=(2.5 + 0.35 * len(columns), 1.5 + 0.28 * len(parts)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(grid, aspect="auto", cmap="viridis")
        single = len({stack for stack, _ in columns}) == 1
        labels = [str(layer) if single else f"{stack} {layer}" for stack, layer in columns]
        axes.set_xticks(range(len(columns)), labels, rotation=0 if single else 90)
        axes.set_yticks(range(len(parts)), parts)
        axes.set_xlabel("layer")
        figure.colorbar(image, label="distance / norm")
        figure.savefig(path, dpi=150)


def measure_changes(
    base: Mapping[str, torch.Tensor], tuned: Mapping[str, torch.Tensor], model: nn.Module, *, progress: bool = False
) -> WeightChanges:
    """Compare two sets of a model's tensors, by the model's names, one tensor at a time."""
    places = locate_tensors(model)
    changes = WeightChanges()
    for name in tqdm(model.state_dict(), disable=not progress, desc="Comparing"):
        if name not in tuned:
            raise ValueError(f"The tuned checkpoint has no tensor {name!r}, which a {type(model).__name__} needs.")
        changes.append(WeightChange(name, *places[name], *_compare(base.get(name), tuned[name])))
    return changes


def locate_tensors(model: nn.Module) -> dict[str, tuple[str, str | None, int | None, str]]:
    """Where each tensor of a model is: the path of its module, the stack, the layer, and the part of the layer."""
    places: dict[str, tuple[str, str | None, int | None, str]] = {}
    layers = {layer.path: layer for stack in find_stacks(model).values() for layer in stack.layers}
    for path, layer in layers.items():
        for name in layer.module.state_dict():
            part = name.rpartition(".")[0]
            module = f"{path}.{part}" if part else path
            places[f"{path}.{name}"] = (module, layer.stack, layer.index, part or "the layer itself")
    for path, names in _outside_modules("", model, layers):
        for name in names:
            places.setdefault(f"{path}.{name}".removeprefix("."), (path, None, None, path))
    return places


def _outside_modules(path: str, module: nn.Module, layers: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """The modules outside the layers that can be tuned as a whole, and what modules around layers hold themselves."""
    if path in layers:
        return
    if not any(layer.startswith(f"{path}." if path else "") for layer in layers):
        yield from tunable_modules(path, module)
        return
    yield path, own_tensor_names(module)
    for name, child in module.named_children():
        yield from _outside_modules(f"{path}.{name}" if path else name, child, layers)


def relative_distance(changes: Iterable[WeightChange]) -> float:
    """The norm of all differences over the norm of the base's values."""
    known = [change for change in changes if not change.is_new]
    norm = math.hypot(*(change.norm for change in known))
    distance = math.hypot(*(change.distance for change in known))
    return distance / norm if norm else (math.inf if distance else 0.0)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns, the first one to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        right = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *right]).rstrip())
    return "\n".join(lines)


def _compare(base: torch.Tensor | None, tuned: torch.Tensor) -> tuple[float, float, bool]:
    """The norm of the difference, the norm of the base's values, and whether any bit differs."""
    if base is None or base.shape != tuned.shape:
        return math.nan, math.nan, True
    squares = norms = 0.0
    differs = False
    for before, after in zip(base.reshape(-1).split(CHUNK), tuned.reshape(-1).split(CHUNK), strict=True):
        differs = differs or not _same_bits(before, after)
        old, new = _wide(before), _wide(after)
        squares += float((new - old).square().sum())
        norms += float(old.square().sum())
    return math.sqrt(squares), math.sqrt(norms), differs


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype:  # a copy in a wider dtype is the same
        dtype = torch.promote_types(a.dtype, b.dtype)
        a, b = a.to(dtype), b.to(dtype)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _grouped(changes: Iterable[WeightChange], key: Callable[[WeightChange], Any]) -> dict[Any, list[WeightChange]]:
    groups: dict[Any, list[WeightChange]] = {}
    for change in changes:
        groups.setdefault(key(change), []).append(change)
    return groups


def _largest(changes: Sequence[WeightChange]) -> str:
    parts = _grouped(changes, lambda change: change.part)
    return max(parts, key=lambda part: relative_distance(parts[part])) if _count(changes) else ""


def _count(changes: Sequence[WeightChange]) -> int:
    return sum(change.differs for change in changes)
