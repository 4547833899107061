"""`peft-surgical rank` and `plan`: the ranking of a model's layers for a task, and what a training would cost."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from peft_surgical.cli.common import check_plot, save_file, show_ranking, show_start, show_table, size
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import describe_strata_by_rank
from peft_surgical.training.options import check_writable


if TYPE_CHECKING:
    from peft_surgical.training.planning import Memory, Plan


RANK_FIELDS = frozenset(
    {"model", "data", "subset", "encoding", "text_columns", "label_column", "task", "max_length", "samples", "score"}
    | {"fisher_labels", "aggregation", "head_seeds", "stack", "batch_size", "dtype", "seed"}
    | {"chat_template", "assistant_only_loss", "load_in_4bit"}
)
RANK_DEFAULTS = {"output": "", "select_on": "none", "score": "fisher"}


def rank(
    console: Console,
    job: TrainingJob,
    output: Annotated[Path | None, typer.Option(help="Save the ranking here (.json).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a plot here (.png, .pdf, .svg).")] = None,
) -> None:
    """Rank a model's layers for a task by a score, on some of its training rows.

    The ranking can be used by `peft-surgical train --ranking FILE`, and in Python by `SurgicalConfig(ranking=...)` and
    `StratifiedConfig.by_ranking(...)`.
    """
    from peft_surgical.training.prepare import prepare, rank

    check_writable("--output", output, (".json",))
    check_plot("--plot", plot)
    ranking = rank(prepare(job), job, progress=not console.quiet)
    console.print(str(ranking), markup=False, soft_wrap=True)
    console.print(describe_strata_by_rank(ranking), markup=False, soft_wrap=True)
    save_file(console, output, ranking.save)
    save_file(console, plot, ranking.plot)


def plan(
    console: Console,
    job: TrainingJob,
    plot: Annotated[
        Path | None,
        typer.Option(help="Save a picture of the memory here (.png, .pdf, .svg).", rich_help_panel="The run"),
    ] = None,
) -> None:
    """Tell what `train` with the same options would cost: parameters, file, memory, time, and what would need less.

    A few real training steps are taken, on the longest rows and on some at random. Nothing is kept of them.
    """
    from peft_surgical.training.planning import TrainingRun, plan

    def begin(run: TrainingRun) -> None:
        show_start(console, run)
        show_ranking(console, run)

    check_plot("--plot", plot)
    found = plan(job, begin)
    lines = plan_lines(found)
    if found.seconds is not None and found.choices and job.max_steps < 1:
        lines.append(("In all", f"{_describe_time(found.seconds * job.epochs)}: {job.epochs:g} epochs of each choice"))
    show_table(console, lines)
    save_file(console, plot, found.plot)
    if found.needs is None:
        raise ValueError("No batch of this job fits the device, not even one row. Tune fewer layers, or take LoRA.")


def plan_lines(plan: Plan) -> list[tuple[str, str]]:
    """A plan in names and values; before steps, what is known then."""
    from peft_surgical.training.card import describe_layers, share

    memory, part = plan.memory, share(plan.trained, plan.parameters)
    rows = [
        ("Trained", f"{size(plan.trained, '')} of {size(plan.parameters, '')} parameters ({part})"),
        ("Layers", describe_layers(plan.layers)),
        ("Saved file", _describe_files(plan.files)),
    ]
    if plan.batch is None:
        rest = "" if plan.needs is None else "; and activations, which `peft-surgical plan` measures"
        return [*rows, ("Memory", f"{size(memory.total)}: {_describe_memory(memory)}{rest}")]
    rows_by_tokens = f"{plan.batch[0]} rows of {plan.batch[1]} tokens"
    rows.append(
        ("Memory", f"{size(memory.total)} at the peak, of {size(plan.limit)} ({plan.device}); {rows_by_tokens}")
    )
    rows.append(("", _describe_memory(memory)))
    if plan.needs:
        rows.append(("Needs", f"{plan.needs}: without, it does not fit"))
    rows += [("Or", f"{size(other.total)} with {option}") for option, other in plan.smaller.items()]
    if plan.layer is not None:
        held = (plan.layer if memory.copies else 0) + plan.layer * (1 + memory.optimizer / memory.gradients)
        rows.append(("Or", f"{size(held)} less for each layer that is left out"))
    for choice, one in plan.choices.items():
        took = "" if one.seconds is None else f", an epoch {_describe_time(one.seconds)}"
        rows.append((choice, f"{describe_layers(one.layers)}: {size(one.memory.total)}{took}"))
    if plan.seconds is not None:
        of_all = f", of the {len(plan.choices)} choices together" if plan.choices else ""
        rows.append(("An epoch", f"{_describe_time(plan.seconds)} of training steps{of_all}"))
    return rows


def _describe_memory(memory: Memory) -> str:
    parts = {name: value for name, value in vars(memory).items() if value and name != "peak"}
    return ", ".join(f"{name} {size(parts[name])}" for name in sorted(parts, key=lambda name: -parts[name]))


def _describe_files(files: dict[str, int]) -> str:
    others = ", ".join(f"{name} {size(count)}" for name, count in files.items() if name != "values")
    return size(files["values"]) + (f"; encoded, at most {others}" if others else "")


def _describe_time(seconds: float) -> str:
    """Seconds, as people say them.

    Example:

        >>> _describe_time(0.34), _describe_time(75), _describe_time(7300)
        ('0.3 s', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 59.5:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
