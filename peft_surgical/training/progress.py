"""What a training tells: lines and a bar while it goes, and at the end what it measured, as `metrics.json` has it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from tqdm import tqdm
from transformers import ProgressCallback, TrainerCallback

from peft_surgical import __version__
from peft_surgical.convert.change import table
from peft_surgical.training.options import CAUSAL_LM


class ProgressLines(TrainerCallback):
    """A line after each epoch, with its training loss and how good the model is on the selection rows by a metric; and
    between epochs a line every so many steps, or else seconds."""

    trainer: Any  # a `JointCheckpoints`

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


def make_results(run: Any, evaluation: dict[str, float], beside: dict[str, Any]) -> dict[str, Any]:
    """The content of `metrics.json` of a `TrainingRun`, with what was measured beside the evaluation as it is."""
    task, parts, state = run.prepared.task, run.prepared.parts, run.trainer.state
    is_language = task.kind == CAUSAL_LM
    described = ("kind", "text_columns", "label_column", "labels", *(["form"] if is_language else []))
    libraries = ("torch", "transformers", "peft", "accelerate", "datasets", *(["trl"] if is_language else []))
    selection = None
    if parts.selection is not None:
        best = state.best_model_checkpoint
        selection = {
            "rows": parts.selection_name,
            "samples": len(parts.selection),
            "metric": run.metric,
            "best": state.best_metric,
            "best_step": int(best.rpartition("-")[2]) if best else None,
        }
    return {
        "method": run.job.method,
        "task": {name: getattr(task, name) for name in described},
        "metric": run.metric,
        "evaluation": {
            "rows": parts.evaluation_name,
            "samples": len(parts.evaluation),
            **_without_prefix(evaluation, "final_"),
        },
        "selection": selection,
        "training": {"rows": parts.train_name, "samples": len(parts.train), "steps": state.global_step},
        "majority": run.majority,
        "layers": run.tuned_layers,
        "parameters": {"total": run.total_parameters, "trained": run.report.parameters},
        "seconds": {name: round(value, 2) for name, value in run.seconds.items()},
        **beside,
        "files": {file.name: file.stat().st_size for file in sorted(run.folder.glob("*.safetensors"))},
        "history": _history(state.log_history),
        "versions": {"peft_surgical": __version__, **{name: version(name) for name in libraries}},
    }


def describe_tried(tried: dict[str, Any]) -> str:
    """A table of the choices of layers that `--layers auto` tries; of one that is not tried yet, what it may take."""
    rows: list[Sequence[str]] = []
    done = [found for found in tried["choices"].values() if "seconds" in found]
    pace = sum(found["seconds"] for found in done) / max(1, sum(found["steps"] for found in done))
    for choice, found in tried["choices"].items():
        value, seconds = "", f"about {pace * found['steps']:,.0f}" if done else ""
        if "seconds" in found:
            value = "diverged" if found["value"] is None else f"{found['value']:.4f}"
            seconds = f"{found['seconds']:,.0f}"
        kept = "kept" if choice == tried["kept"] else ""
        rows.append((choice, ", ".join(map(str, found["layers"])), value, f"{found['steps']:,}", seconds, kept))
    return table(("layers", "", tried["metric"], "steps", "seconds", ""), rows)


def _without_prefix(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    skip = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    names = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return {name: value for name, value in names.items() if name not in skip}


def _history(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per epoch: the training loss, and the metrics on the selection rows."""
    losses = loss_by_epoch(log)
    epochs: dict[int, dict[str, Any]] = {}
    for entry in log:
        if "loss" in entry or "eval_loss" in entry:
            number = _epoch_of(entry)
            row = epochs.setdefault(number, {})
            row |= {"epoch": entry["epoch"], "step": entry["step"]}
            if number in losses:
                row["train_loss"] = losses[number]
            row |= _without_prefix(entry, "eval_")
    return [*epochs.values()]


def loss_by_epoch(log: list[dict[str, Any]]) -> dict[int, float]:
    """The training loss of each epoch, from 1, out of a Trainer's log: the mean over its steps.

    Example:

        >>> loss_by_epoch([{"loss": 3.0, "step": 2, "epoch": 0.5}, {"loss": 1.0, "step": 4, "epoch": 1.0}])
        {1: 2.0}
    """
    means: dict[int, float] = {}
    steps: dict[int, int] = {}
    last = 0
    for entry in log:
        if "loss" in entry:
            number, new = _epoch_of(entry), entry["step"] - last
            steps[number] = steps.get(number, 0) + new
            means[number] = means.get(number, 0.0) + (entry["loss"] - means.get(number, 0.0)) * new / steps[number]
            last = entry["step"]
    return means


def _epoch_of(entry: dict[str, Any]) -> int:
    return math.ceil(entry["epoch"] - 1e-6)
