"""The kinds of task: how each is measured, and what of a job goes with it. Nothing heavy is imported."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from peft_surgical.training.methods import METHODS
from peft_surgical.training.options import flag, options_of


CAUSAL_LM = "causal-lm"
LABELLED = ("classification", "regression")

METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
    CAUSAL_LM: ("perplexity",),
}
"""The metrics of each kind of task, the default one first."""
LOWER_IS_BETTER = ("loss", "perplexity")


def check_metric(metric: str | None, kinds: Iterable[str], of: str = "") -> None:
    """Make sure that tasks of one of the kinds can be measured by a metric; else a `ValueError` that names those."""
    allowed = [*(name for kind in kinds for name in METRICS[kind]), "loss"]
    if metric is not None and metric not in allowed:
        raise ValueError(f"--metric {metric}: {of}allowed are {', '.join(allowed)}.")


def check_kind(job: Any, kind: str) -> None:
    """Check the options of a `TrainingJob` that only some kinds of task understand, once the data tell the kind."""
    options = options_of(type(job))
    for field in dataclasses.fields(job):
        kinds = options[field.name][1].kinds
        if kinds and kind not in kinds and getattr(job, field.name) != field.default:
            raise ValueError(
                f"{flag(field.name)} has no meaning for {kind}, which the data are for; it goes with "
                f"{', '.join(kinds)}."
            )
    if kind == CAUSAL_LM and job.method == "head":
        allowed = ", ".join(name for name in METHODS if name != "head")
        raise ValueError(f"--method head: a language model has no head of a task; allowed are {allowed}.")
    job.metric_for(kind)
