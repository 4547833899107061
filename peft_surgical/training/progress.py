"""How a training tells how it goes: lines after epochs and between them, and a bar."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerCallback

from peft_surgical.training.common import JointCheckpoints
from peft_surgical.training.results import loss_by_epoch


class ProgressLines(TrainerCallback):
    """A line after each epoch, with its training loss and how good the model is on the selection rows by a metric; and
    between epochs a line every so many steps, or else seconds."""

    trainer: JointCheckpoints

    def __init__(self, show: Callable[[str], object], metric: str, steps: int | None = None, seconds: float = 0):
        self.show, self.metric, self.steps, self.seconds = show, metric, steps, seconds

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.monotonic(), state.global_step
        self._last = self._start

    def on_step_end(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        step, now = state.global_step, time.monotonic()
        due = step % self.steps == 0 if self.steps else 0 < self.seconds <= now - self._last[0]
        if not due:
            return
        loss = float(self.trainer.sum_of_losses) / (step - self._last[1])
        self.trainer.sum_of_losses, self._last = 0.0, (now, step)
        pace = (step - self._start[1]) / max(now - self._start[0], 1e-9)
        left = tqdm.format_interval((state.max_steps - step) / pace)
        rate = lr_scheduler.get_last_lr()[0]
        self.show(
            f"  step {step:,} of {state.max_steps:,}: loss {loss:.4f}, learning rate {rate:.3g}, "
            f"{pace:.3g} steps a second, {left} left"
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if args.eval_strategy == "no" and "loss" in (logs or {}) and _is_at_end_of_epoch(state):
            self.show(_epoch_line(state))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        value = (metrics or {}).get(f"eval_{self.metric}")
        if value is not None:
            self.show(f"{_epoch_line(state)}, {self.metric} {value:.4f} on the selection rows")


class LossOfEpochs(TrainerCallback):
    """Logs at the end of each epoch, also where the loss is logged every so many steps."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = True


class StepBar(ProgressCallback):
    """The progress bar of transformers, without its lines of raw numbers."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        pass


def _epoch_line(state: Any) -> str:
    losses = loss_by_epoch(state.log_history)
    return f"  epoch {state.epoch:.3g}: training loss {losses[max(losses)]:.4f}"


def _is_at_end_of_epoch(state: Any) -> bool:
    return abs(state.epoch - round(state.epoch)) < 1e-6 or state.global_step >= state.max_steps
