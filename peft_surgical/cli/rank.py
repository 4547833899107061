"""`peft-surgical rank`: which layers matter for a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from peft_surgical.cli.common import check_plot
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import describe_strata_by_rank
from peft_surgical.training.options import check_writable


JOB_FIELDS = frozenset(
    {"model", "data", "subset", "encoding", "text_columns", "label_column", "task", "max_length", "samples", "score"}
    | {"fisher_labels", "aggregation", "head_seeds", "stack", "batch_size", "dtype", "seed"}
    | {"chat_template", "assistant_only_loss", "load_in_4bit"}
)
DEFAULTS = {"output": "", "select_on": "none", "score": "fisher"}


def rank(
    console: Console,
    job: TrainingJob,
    output: Annotated[Path | None, typer.Option(help="Save the ranking here (.json).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a plot here (.png, .pdf, .svg).")] = None,
) -> None:
    """Rank a model's layers by how much they matter for a task, on some of its training rows.

    The ranking can be used by `peft-surgical train --ranking FILE`, and in Python by `SurgicalConfig(ranking=...)` and
    `StratifiedConfig.by_ranking(...)`.
    """
    from peft_surgical.distributed import this_process
    from peft_surgical.training.prepare import prepare, rank

    if output is not None:
        check_writable("--output", output, (".json",))
    check_plot("--plot", plot)
    ranking = rank(prepare(job), job, progress=not console.quiet)
    console.print(str(ranking), markup=False, soft_wrap=True)
    console.print(describe_strata_by_rank(ranking), markup=False, soft_wrap=True)
    if not this_process().is_main_process:  # the first one writes
        return
    if output is not None:
        ranking.save(str(output))
        console.print(f"Saved {output}")
    if plot is not None:
        ranking.plot(str(plot))
        console.print(f"Plotted {plot}")
