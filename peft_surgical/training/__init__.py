"""The job behind `peft-surgical train`, `evaluate` and `predict`: data in, a measured adapter out, and its answers.

On transformers' Trainer, and for language models on TRL's `SFTTrainer`.

The names are imported when they are first asked for: the help of the command line needs the job alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from peft_surgical.training.evaluation import Evaluation, evaluate
    from peft_surgical.training.job import TrainingJob
    from peft_surgical.training.methods import METHODS, Method
    from peft_surgical.training.planning import Plan, plan
    from peft_surgical.training.prediction import predict
    from peft_surgical.training.run import TrainingRun, train

__all__ = [
    "METHODS",
    "Evaluation",
    "Method",
    "Plan",
    "TrainingJob",
    "TrainingRun",
    "evaluate",
    "plan",
    "predict",
    "train",
]

_HOMES = {
    "evaluation": "Evaluation evaluate",
    "job": "TrainingJob",
    "methods": "METHODS Method",
    "planning": "Plan plan",
    "prediction": "predict",
    "run": "TrainingRun train",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
