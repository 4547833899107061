"""Training many layers a few at a time: `RotateLayers`, a callback for transformers' Trainer."""

from __future__ import annotations

import random
from typing import Any

from torch import nn
from transformers import TrainerCallback

from peft_surgical.layers import find_stacks
from peft_surgical.methods.before_training import adapter_parameters


ORDERS = ("random", "shuffled", "ascending", "descending")


class RotateLayers(TrainerCallback):
    """Trains the layers of an adapter in turns, a few at a time, with optimizer state for these alone."""

    def __init__(self, layers: int = 2, every: int = 50, order: str = "random", seed: int = 0) -> None:
        self.layers, self.every, self.order, self.seed = layers, every, order, seed
        self._step = -1

    def turn(self, number: int, depth: int) -> list[int]:
        """Which of `depth` layers are trained in a turn, counted from 0."""
        if self.order == "random":
            return sorted(random.Random(f"{self.seed} {number}").sample(range(depth), self.layers))
        blocks = [list(range(i, min(i + self.layers, depth))) for i in range(0, depth, self.layers)]
        if self.order == "shuffled":
            random.Random(f"{self.seed} {number // len(blocks)}").shuffle(blocks)
        elif self.order == "descending":
            blocks.reverse()
        return blocks[number % len(blocks)]

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        trained = {id(p): p for _, p in adapter_parameters(model, model.active_adapters)}
        layers = [layer.module for stack in find_stacks(model).values() for layer in stack.layers]
        self._layers = [[p for p in layer.parameters() if id(p) in trained] for layer in layers]
        self._layers = [layer for layer in self._layers if layer]

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        turn = self.turn(state.global_step // self.every, len(self._layers))
        for index, layer in enumerate(self._layers):
            for parameter in layer:
                parameter.requires_grad_(index in turn)
                if state.global_step % self.every == 0:
                    parameter.grad = None
                    optimizer.state.pop(parameter, None)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for layer in self._layers:
            nn.ParameterList(layer).requires_grad_(True)
        self._layers = []  # else the model's memory would stay with the callback
