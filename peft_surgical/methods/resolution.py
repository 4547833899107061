"""What a config means on one model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from peft_surgical.names import CopyName, without_wrappers


@dataclass(frozen=True)
class Resolution:
    """The modules and tensors of one model that a config chooses.

    Args:
        copies: The names of the tensors that get a copy per adapter, by the path of the module that owns them.
        in_place: The paths of those owners that keep their place in the model (`TunedInPlace`).
        lora: The paths of the modules that get LoRA.
        shapes: The shapes of all tensors of the adapter, head included, by their names in its file. Known once the
            adapter is in the model; sharding, which comes later, hides them.
    """

    copies: Mapping[str, list[str]]
    in_place: frozenset[str] = frozenset()
    lora: frozenset[str] = frozenset()
    shapes: Mapping[str, torch.Size] = field(default_factory=dict)

    def copy_names(self, container: str) -> Iterator[tuple[str, CopyName]]:
        """The copies: the path of their module in the model, and their names.

        Args:
            container: What holds the copies, by method; one of `names.CONTAINERS`.
        """
        for path, tensors in self.copies.items():
            for tensor in tensors:
                yield path, CopyName(without_wrappers(path), tensor, container, path in self.in_place)

    def tensors(self) -> set[str]:
        """The names in the base of all that is copied, and the paths of all modules with LoRA."""
        return {f"{path}.{name}" for path, names in self.copies.items() for name in names} | self.lora
