"""What a run of training measured, as `metrics.json` has it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import TrainerState

from peft_surgical import __version__
from peft_surgical.training.data import Parts, Task
from peft_surgical.training.job import CAUSAL_LM, TrainingJob


_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "datasets")


def make_results(
    job: TrainingJob,
    task: Task,
    parts: Parts,
    state: TrainerState,
    metric: str,
    evaluation: dict[str, float],
    **measured: Any,
) -> dict[str, Any]:
    """The content of `metrics.json`; `measured` is more of it, as it is."""
    selection = None
    if parts.selection is not None:
        best = state.best_model_checkpoint
        selection = {
            "rows": parts.selection_name,
            "samples": len(parts.selection),
            "metric": metric,
            "best": state.best_metric,
            "best_step": int(best.rpartition("-")[2]) if best else None,
        }
    return {
        "method": job.method,
        "task": _describe_task(task),
        "metric": metric,
        "evaluation": {
            "rows": parts.evaluation_name,
            "samples": len(parts.evaluation),
            **_without_prefix(evaluation, "final_"),
        },
        "selection": selection,
        "training": {"rows": parts.train_name, "samples": len(parts.train), "steps": state.global_step},
        **measured,
        "files": {file.name: file.stat().st_size for file in sorted(Path(job.output).glob("*.safetensors"))},
        "history": _history(state.log_history),
        "versions": {"peft_surgical": __version__, **{name: version(name) for name in _libraries(task)}},
    }


def _libraries(task: Task) -> tuple[str, ...]:
    return (*_LIBRARIES, "trl") if task.kind == CAUSAL_LM else _LIBRARIES


def _describe_task(task: Task) -> dict[str, Any]:
    names = ("kind", "text_columns", "label_column", "labels", *(("form",) if task.form else ()))
    return {name: getattr(task, name) for name in names}


def _without_prefix(metrics: dict[str, float], prefix: str) -> dict[str, float]:
    skip = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
    names = {key.removeprefix(prefix): value for key, value in metrics.items() if key.startswith(prefix)}
    return {name: value for name, value in names.items() if name not in skip}


def _history(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per epoch: the training loss, and the metrics on the selection rows."""
    epochs: dict[int, dict[str, Any]] = {}
    for entry in log:
        if "loss" in entry or "eval_loss" in entry:
            row = epochs.setdefault(entry["step"], {"epoch": entry["epoch"], "step": entry["step"]})
            if "loss" in entry:
                row["train_loss"] = entry["loss"]
            row.update(_without_prefix(entry, "eval_"))
    return [*epochs.values()]
