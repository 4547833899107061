"""Models whose layers are trained in turns, and which optimizer a method has."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from benchmarks.evidence.training import Trainee
from peft_surgical import RotateLayers, round_stochastically


class TraineeInTurns(Trainee):
    """A model whose layers are trained in turns.

    Args:
        model: The model, with an adapter of all layers.
        rate: Peak learning rate.
        rotate: Trains them in turns.
    """

    def __init__(self, model: nn.Module, rate: float, rotate: RotateLayers):
        super().__init__(model, rate)
        self.rotate = rotate
        self.events: dict[str, Any] = {"args": None, "control": None, "model": model, "optimizer": self.optimizer}
        rotate.on_train_begin(state=TrainerState(), **self.events)

    def begin_step(self, number: int, share: float) -> bool:
        super().begin_step(number, share)
        self.rotate.on_step_begin(state=TrainerState(global_step=number), **self.events)
        return number % self.rotate.every == 0

    def restore(self) -> None:
        self.rotate.on_train_end(state=TrainerState(), **self.events)
        super().restore()


def make_trainee(model: nn.Module, rate: float, tuning: str, seed: int) -> Trainee:
    """A model that was made ready for a method, in training."""
    match = re.fullmatch(r"turns-(\d+)-(\d+)-(\w+)", tuning)
    if match is None:
        kind: type = torch.optim.AdamW
        return Trainee(model, rate, round_stochastically(kind, seed) if tuning.endswith("-stochastic") else kind)
    return TraineeInTurns(model, rate, RotateLayers(int(match[1]), int(match[2]), match[3], seed))
