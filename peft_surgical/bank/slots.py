"""Where the tensors of one adapter are in the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from peft_surgical.bank.memory import Spec
from peft_surgical.copies.module import TunedModule


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor of an adapter goes.

    Args:
        owner: The module that holds it.
        name: What it is called there.
    """

    owner: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """What is there."""
        if isinstance(self.owner, nn.ParameterDict):
            return self.owner[self.name]
        return getattr(self.owner, self.name)

    def fill(self, tensor: torch.Tensor | None) -> None:
        """Put a tensor there, or nothing."""
        parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
        if not isinstance(self.owner, nn.ParameterDict):
            is_buffer = self.name in self.owner._buffers
            table: Any = self.owner._buffers if is_buffer else self.owner._parameters
            table[self.name] = tensor if is_buffer else parameter
        elif parameter is None:
            if self.name in self.owner:
                del self.owner[self.name]
        else:
            self.owner[self.name] = parameter


class AdapterSlots:
    """All that the model has of one adapter. When made, the adapter is out of the model.

    Args:
        adapter: The adapter.
        tables: All tables by adapter that have an entry for it, with that entry.
        slots: Where its tensors go, by their plain names in the file.
        modules: The modules that may keep cast tensors of it.
    """

    def __init__(
        self,
        adapter: str,
        tables: Iterable[tuple[Any, Any]],
        slots: Mapping[str, TensorSlot],
        modules: Iterable[TunedModule] = (),
    ):
        self.adapter = adapter
        self.slots = dict(slots)
        self._tables = list(tables)
        self._modules = list(modules)
        self.leave()

    def enter(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the adapter into the model, with these tensors."""
        self.is_in_model = True  # from the first change on, in case of an interrupt
        for key, slot in self.slots.items():
            slot.fill(tensors[key])
        for table, entry in self._tables:
            if isinstance(table, set):
                table.add(self.adapter)
            else:
                table[self.adapter] = entry

    def leave(self) -> None:
        """Take the adapter out of the model, and let go of its tensors."""
        for table, _ in self._tables:
            if isinstance(table, set):
                table.discard(self.adapter)
            elif self.adapter in table:
                del table[self.adapter]
        for slot in self.slots.values():
            slot.fill(None)
        for module in self._modules:
            module._kept.clear()
        self.is_in_model = False


def slots_in(prefix: str, entry: Any) -> dict[str, TensorSlot]:
    """The slots of all tensors in a module that is one adapter's, by their names after a prefix."""
    if not isinstance(entry, nn.Module):
        return {}
    slots = {}
    for name in entry.state_dict():
        path, _, attribute = name.rpartition(".")
        slots[f"{prefix}.{name}"] = TensorSlot(entry.get_submodule(path), attribute)
    return slots


def resize(slots: Mapping[str, TensorSlot], specs: Mapping[str, Spec]) -> None:
    """Let linear modules know of the sizes that their tensors will have; heads differ in the number of labels."""
    for key, slot in slots.items():
        if slot.name == "weight" and isinstance(slot.owner, nn.Linear):
            slot.owner.out_features = specs[key].shape[0]


def nothing(is_parameter: bool) -> torch.Tensor:
    """What keeps a place for a tensor."""
    return nn.Parameter(torch.empty(0), requires_grad=False) if is_parameter else torch.empty(0)
