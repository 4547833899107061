"""`peft-surgical rank`: which layers matter for a task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peft_surgical.cli import options
from peft_surgical.cli.console import make_console
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.prepare import prepare
from peft_surgical.training.prepare import rank as rank_job
from peft_surgical.training.processes import this_process
from peft_surgical.training.spafit import describe_strata_by_rank


def rank(
    model: options.Model,
    data: options.Data,
    subset: options.Subset = None,
    encoding: options.Encoding = TrainingJob.encoding,
    text_columns: options.TextColumns = None,
    label_column: options.LabelColumn = None,
    task: options.Task = None,
    max_length: options.MaxLength = TrainingJob.max_length,
    samples: options.Samples = TrainingJob.samples,
    score: options.Score = TrainingJob.score,
    fisher_labels: options.FisherLabels = TrainingJob.fisher_labels,
    aggregation: options.Aggregation = TrainingJob.aggregation,
    head_seeds: options.HeadSeeds = TrainingJob.head_seeds,
    stack: options.Stack = None,
    batch_size: Annotated[int, typer.Option(help="Rows per batch.")] = TrainingJob.batch_size,
    dtype: options.Dtype = TrainingJob.dtype,
    seed: options.Seed = TrainingJob.seed,
    output: Annotated[Path | None, typer.Option(help="Save the ranking here (.json).")] = None,
    plot: Annotated[Path | None, typer.Option(help="Save a plot here (.png, .pdf, .svg).")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Rank a model's layers by how much they matter for a task, on some of its training rows.

    The ranking can be used by `peft-surgical train --ranking FILE`, and in Python by `SurgicalConfig(ranking=...)` and
    `StratifiedConfig.by_ranking(...)`.
    """
    console = make_console(quiet=quiet)
    with options.errors_in_words(console):
        job = TrainingJob(
            model=model,
            data=data,
            output="",
            subset=subset,
            encoding=encoding,
            text_columns=tuple(text_columns or ()),
            label_column=label_column,
            task=task,  # type: ignore[arg-type]
            select_on="none",
            samples=samples,
            score=score,
            fisher_labels=fisher_labels,
            aggregation=aggregation,
            head_seeds=head_seeds,
            stack=stack,
            max_length=max_length,
            batch_size=batch_size,
            dtype=dtype,
            seed=seed,
        )
        ranking = rank_job(prepare(job), job, progress=not quiet)
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
