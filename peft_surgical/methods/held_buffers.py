"""What of the base would move while adapters are trained, though nothing trains it, and must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from peft_surgical.copies.module import TunedModule
from peft_surgical.copies.variants import is_quantised


def frozen_statistics(model: nn.Module) -> Iterator[nn.Module]:
    """The modules with running statistics that no active adapter tunes; the base's statistics must not move."""
    tuned: set[int] = set()
    for module in model.modules():
        if isinstance(module, TunedModule):
            names = {name for a in module.active_adapters if a in module.tuned for name in module.tuned[a].names}
            for path, inner in module.base_layer.named_modules():
                if f"{path}.running_mean".lstrip(".") in names:
                    tuned.add(id(inner))
        elif isinstance(module, ModulesToSaveWrapper):
            tuned.update(id(m) for m in module.modules_to_save.modules())
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None and id(module) not in tuned:
            if not isinstance(module, (TunedModule, AuxiliaryTrainingWrapper)):
                yield module


@torch.compiler.disable  # where a compiled model is in several pieces, this would be compiled by itself
def keep_statistics(model: nn.Module, *_: Any) -> None:
    """Let running statistics that no active adapter tunes stay as they are in training; a hook of forward, too."""
    if model.training:
        for module in frozen_statistics(model):
            module.eval()


@dataclass
class _Held:
    """A buffer of the base, as it was when somebody else than the model last changed it."""

    owner: nn.Module
    name: str
    seen: tuple[torch.Tensor | None, int] = (None, 0)  # the buffer and its version
    values: torch.Tensor | None = None
    moves: bool = False  # in training

    def look(self) -> bool:
        """Whether it has changed since this was last called."""
        before, buffer = self.seen, self.owner._buffers.get(self.name)
        self.seen = buffer, 0 if buffer is None else buffer._version
        return self.seen[0] is not before[0] or self.seen[1] != before[1]

    def before_forward(self) -> None:
        if not self.moves and self.look() and self.seen[0] is not None:
            self.values = self.seen[0].detach().clone()

    def after_forward(self) -> None:
        self.moves = self.moves or self.look()

    @torch.no_grad()
    def give_back(self) -> None:
        buffer = self.owner._buffers.get(self.name)
        if self.moves and buffer is not None and self.values is not None and buffer.shape == self.values.shape:
            buffer.copy_(self.values)


class HeldBuffers:
    """Gives the base's buffers their values back after each forward pass in training, e.g. `spectral_norm`'s vectors.

    Not those that are not saved with a model (`persistent=False`), which it derives from what nobody holds, as dynamic
    RoPE does its frequencies from the longest sequence so far; nor packed weights, which are large and never move.
    """

    def __init__(self) -> None:
        self._held: list[_Held] | None = None

    @contextmanager
    def during_forward(self, model: nn.Module) -> Iterator[None]:
        """Hold the buffers of a model for the time of a forward pass."""
        self.give_back()  # gradient checkpointing computes again in the backward pass
        if self._held is None:
            self._held = list(_buffers_of_base(model))
        for held in self._held:
            held.before_forward()
        try:
            yield
        finally:
            for held in self._held:
                held.after_forward()
            self.give_back()

    def give_back(self) -> None:
        """Give the buffers that move their values back."""
        for held in self._held or ():
            held.give_back()


def _buffers_of_base(model: nn.Module) -> Iterator[_Held]:
    of_adapters = {
        id(buffer)
        for module in model.modules()
        if isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper))
        for name, part in module.named_children()
        if name not in ("base_layer", "original_module", "token_adapter")
        for buffer in part.buffers()
    }
    for module in model.modules():
        for name, buffer in module._buffers.items():
            is_saved = name not in module._non_persistent_buffers_set
            if buffer is not None and is_saved and id(buffer) not in of_adapters and not is_quantised(module):
                yield _Held(module, name)
