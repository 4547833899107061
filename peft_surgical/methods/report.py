"""What an adapter trains, layer by layer, how far down the backward pass has to go, and what it does not reach."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils.hooks import RemovableHandle

from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.select import owners
from peft_surgical.layers import Layer, find_stacks
from peft_surgical.names import base_path


@dataclass(frozen=True)
class ReportRow:
    """One layer, or a module outside the layers."""

    stack: str  # or the name of the module outside the stacks
    index: int | None  # None outside the stacks
    tensors: tuple[str, ...]  # names of the trained ones inside, as in the base; LoRA's end in `lora_A.weight` ...
    frozen: tuple[str, ...]  # names of a layer's others: those neither trained nor adapted by LoRA
    parameters: int  # how many numbers are trained
    bytes: int  # what they take in memory


@dataclass(frozen=True)
class TuningReport:
    """What is trained at present. Made by `tuning_report`; print it for a table."""

    rows: tuple[ReportRow, ...]
    depths: dict[str, int]
    below: frozenset[str] = frozenset()
    """The stacks with trained parameters below them, as embeddings are."""

    @property
    def parameters(self) -> int:
        """How many numbers are trained in all; the sum over all trainable parameters of the model."""
        return sum(row.parameters for row in self.rows)

    @property
    def bytes(self) -> int:
        """What the trained numbers take in memory, in bytes; about the size of the saved adapter."""
        return sum(row.bytes for row in self.rows)

    def lowest_layer(self, stack: str) -> int | None:
        """The layer of a stack that the backward pass stops at. None if it does not reach the stack.

        That is the lowest trained one; or 0, where something below the stack is trained (embeddings, or an encoder
        below a decoder), which the pass reaches through the whole stack.
        """
        if stack in self.below:
            return 0
        trained = [row.index for row in self.rows if row.stack == stack and row.index is not None]
        return min(trained) if trained else None

    def __str__(self) -> str:
        lines = [f"{'layer':<24}{'parameters':>14}{'MB':>10}  trained tensors"]
        for row in self.rows:
            name = row.stack if row.index is None else f"{row.stack} {row.index}"
            rest = f", ... ({len(row.tensors)} in all)" if len(row.tensors) > 4 else ""
            tensors = ", ".join(row.tensors[:4]) + rest
            lines.append(f"{name:<24}{row.parameters:>14,}{row.bytes / 1e6:>10.2f}  {tensors}")
        lines.append(f"{'total':<24}{self.parameters:>14,}{self.bytes / 1e6:>10.2f}")
        for stack, depth in self.depths.items():
            lowest = self.lowest_layer(stack)
            if lowest is None:
                lines.append(f"{stack}: no layer is trained")
            else:
                lines.append(
                    f"{stack}: the backward pass goes through {depth - lowest} of {depth} layers, down to {lowest}"
                )
        return "\n".join(lines)


def tuning_report(model: nn.Module) -> TuningReport:
    """List what is trained in a model with adapters: a row per layer, then one per module outside the layers."""
    stacks = find_stacks(model)
    layers = {f"{layer.path}.": layer for stack in stacks.values() for layer in stack.layers}
    containers = {
        name: isinstance(module, TunedModule)
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
        for name in module.adapter_layer_names
    }
    found: dict[str, list[tuple[str, nn.Parameter]]] = {path: [] for path in layers}  # in their order, others after
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            path = next((path for path in layers if name.startswith(path)), f"{name.partition('.')[0]}.")
            found.setdefault(path, []).append((_readable(name.removeprefix(path), containers), parameter))
    rows = []
    for path, trained in found.items():
        if trained:
            layer = layers.get(path)
            stack, index = (layer.stack, layer.index) if layer else (path[:-1], None)
            names = tuple(dict.fromkeys(name for name, _ in trained))
            parameters = sum(p.numel() for _, p in trained)
            nbytes = sum(p.numel() * p.element_size() for _, p in trained)
            rows.append(ReportRow(stack, index, names, _frozen(layer, names), parameters, nbytes))
    below = [name for name, stack in stacks.items() if is_anything_trained_before(stack.layers[0].module, model)]
    return TuningReport(tuple(rows), {name: len(stack) for name, stack in stacks.items()}, frozenset(below))


def _frozen(layer: Layer | None, trained: Sequence[str]) -> tuple[str, ...]:
    """The names of a layer's tensors that are neither trained nor adapted by LoRA."""
    if layer is None:
        return ()
    adapted = {name.partition(".lora_")[0] + ".weight" for name in trained if ".lora_" in name}
    names = [f"{owner.path}.{name}" for owner in owners(layer.path, layer.module) for name in owner.names]
    inside = (name[len(layer.path) + 1 :] for name in names)
    return tuple(name for name in inside if name not in adapted and name not in trained)


def _readable(name: str, containers: Mapping[str, bool]) -> str:
    """A parameter's name without what adapters put in it; `containers` tells which of theirs hold copies."""
    parts = iter(base_path(name).replace("|", ".").split("."))
    kept = []
    for part in parts:
        if part in containers or part == "modules_to_save":
            next(parts, None)  # the adapter's name
            if containers.get(part, True):
                continue
        kept.append(part)
    return ".".join(kept)


def is_anything_trained_before(layer: nn.Module, model: nn.Module) -> bool:
    """Whether a trained parameter comes before a layer in the module tree, as embeddings and encoders do."""
    first = next(layer.parameters(), None)
    for parameter in model.parameters():
        if parameter is first:
            return False
        if parameter.requires_grad:
            return True
    return False


class GradientWatch:
    """Warns once of trained tensors that have had no gradient after some backward passes; costs nothing afterwards.

    Not of an expert that no token has reached: others of its name, but for the number, have a gradient.
    """

    passes = 8  # layers may be left out at random, as wav2vec 2.0 does

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]] = ()) -> None:
        self._waiting: dict[str, RemovableHandle] = {}
        self._reached: set[str] = set()
        self._count = 0
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return  # engines put other tensors in the parameters' places
        for name, parameter in parameters:
            if parameter.requires_grad:
                note = functools.partial(self._note, name)
                self._waiting[name] = parameter.register_post_accumulate_grad_hook(note)

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        self._reached.add(name)
        if name in self._waiting:
            self._waiting.pop(name).remove()

    def update(self) -> None:
        """Called before each forward pass."""
        if not self._waiting or not self._reached:
            return
        self._count += 1
        if self._count == self.passes:
            for handle in self._waiting.values():
                handle.remove()
            kinds = {_without_last_number(name) for name in self._reached} - {None}
            missed = [name for name in self._waiting if _without_last_number(name) not in kinds]
            if missed:
                warnings.warn(
                    f"{len(missed)} trained tensors have had no gradient in {self.passes} steps, e.g. {missed[0]}: "
                    "nothing that the loss depends on computes with them. Leave them out with exclude_modules.",
                    stacklevel=2,
                )
            self._waiting = {}

    def __reduce__(self) -> tuple:
        return GradientWatch, ()


def _without_last_number(name: str) -> str | None:
    """The name without the number of an expert in a layer; None if it has no number besides the layer's."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1]] + parts[numbers[-1] + 1 :]) if len(numbers) > 1 else None
