"""What an option of the command line is, the kinds of task, and the checks of options. Nothing heavy is imported."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from peft_surgical.training.methods import AUTO, METHODS, OF_A_RANKING


CAUSAL_LM = "causal-lm"
LABELLED = ("classification", "regression")

METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "f1", "matthews"),
    "regression": ("pearson", "spearman"),
    CAUSAL_LM: ("perplexity",),
}
"""The metrics of each kind of task, the default one first."""
LOWER_IS_BETTER = ("loss", "perplexity")


@dataclass(frozen=True)
class Option:
    """What a field of `TrainingJob` means, and which values it may have."""

    help: str
    panel: str | None = None  # the part of the command line's help that it stands in
    names: tuple[str, ...] = ()  # on the command line, if not that of the field
    choices: Iterable[str] = ()
    kinds: tuple[str, ...] = ()  # of task that it goes with, if not with all
    positive: bool = False
    not_negative: bool = False
    fraction: bool = False  # from 0 to below 1


def options_of(record: type[Any]) -> dict[str, tuple[Any, Option]]:
    """The type of each field of a dataclass and its option, by the field's name."""
    hints = get_type_hints(record, include_extras=True)
    return {field.name: get_args(hints[field.name]) for field in dataclasses.fields(record)}  # type: ignore[misc]


def flag(name: str) -> str:
    """A field's name as it is written on the command line: `top_k` is `--top-k`."""
    return "--" + name.replace("_", "-")


def check_writable(option: str, path: str | Path | None, endings: Collection[str] = ()) -> None:
    """Make sure that a folder, if any, can be written later; with endings, a file with one of them in a folder that is
    there."""
    if path is None:
        return
    path = Path(path).absolute()
    if endings and path.suffix.lower() not in endings:
        raise ValueError(f"{option} {path}: allowed are files ending in {', '.join(endings)}.")
    place = path.parent if endings else next(place for place in (path, *path.parents) if place.exists())
    if not place.is_dir():
        raise ValueError(f"{option} {path}: {place} is not a folder.")
    if not os.access(place, os.W_OK):
        raise ValueError(f"{option} {path}: {place} cannot be written to.")


def write_text(file: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(file)


def _check_value(name: str, value: Any, option: Option) -> None:
    if value is None:
        return
    if option.choices and value not in option.choices:
        raise ValueError(f"{flag(name)} {value}: allowed are {', '.join(option.choices)}.")
    if option.fraction and not 0 <= value < 1:
        raise ValueError(f"{flag(name)} {value}: allowed are fractions from 0 to below 1.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{flag(name)} {value}: allowed are finite numbers.")
    if option.positive and not value > 0:
        raise ValueError(f"{flag(name)} {value}: allowed are numbers above 0.")
    if option.not_negative and value < 0:
        raise ValueError(f"{flag(name)} {value}: allowed are 0 and numbers above.")


def check_options(job: Any) -> None:
    """Make sure that each option of a `TrainingJob` has a value that it may have, that they do not contradict each
    other, and that its method has them."""
    for name, (_, option) in options_of(type(job)).items():
        _check_value(name, getattr(job, name), option)
    if job.max_steps == 0 or job.max_steps < -1:
        raise ValueError(f"--max-steps {job.max_steps}: allowed are numbers above 0, and -1: as the epochs need.")
    check_metric(job.metric, METRICS if job.task is None else [job.task])
    if job.layers is not None:
        for name in ("top_k", "ranking", "score"):
            if getattr(job, name) is not None:
                raise ValueError(f"--layers {job.layers} and {flag(name)} both choose the layers. Drop one.")
    if job.layers == AUTO and job.select_on == "none":
        raise ValueError("--layers auto keeps what is best on the rows that --select-on none does not keep. Drop one.")
    if job.ranking is not None and job.score is not None:
        raise ValueError(f"--ranking {job.ranking} and --score {job.score} both rank the layers. Drop one.")
    if job.rotate_layers != 2 and job.rotate_every is None:
        raise ValueError(
            f"--rotate-layers {job.rotate_layers} is for layers in turns. Add --rotate-every, or drop it."
        )
    if job.method == "spafit":
        chosen = [name for name in ("preset", "n1", "n2", "ranking") if getattr(job, name) is not None]
        if len(chosen) > 1 and chosen != ["n1", "n2"]:
            options = " and ".join(f"{flag(name)} {getattr(job, name)}" for name in chosen)
            raise ValueError(f"{options} choose the groups of layers in different ways. Give one of them.")
    if job.load_in_4bit and job.method == "full":
        raise ValueError("--method full trains all weights, which --load-in-4bit freezes. Choose another method.")
    if job.bf16 and job.fp16:
        raise ValueError("--bf16 and --fp16 both choose a type to compute in. Drop one.")
    if job.early_stopping is not None and job.select_on == "none":
        raise ValueError("--early-stopping looks at the rows that --select-on none does not keep. Drop one.")
    for field in dataclasses.fields(job):
        users, is_given = methods_with(field.name), getattr(job, field.name) != field.default
        if users and job.method not in users and is_given:
            raise ValueError(
                f"{flag(field.name)} has no meaning with --method {job.method}; it goes with {', '.join(users)}."
            )
        if is_given and field.name in OF_A_RANKING and job.score is None:
            raise ValueError(f"{flag(field.name)} is for ranking layers. Add --score fisher, or drop it.")


def methods_with(option: str) -> list[str]:
    """The methods that understand a field of `TrainingJob`; none where all do."""
    return [name for name, method in METHODS.items() if option in method.options]


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
