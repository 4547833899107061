"""`peft-surgical evaluate`: measure what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from datasets import Dataset

from peft_surgical.cli import options
from peft_surgical.cli.console import make_console, metrics_table
from peft_surgical.training.evaluation import evaluate as evaluate_folder
from peft_surgical.training.processes import this_process


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder that `peft-surgical train` wrote.")],
    model: Annotated[str | None, typer.Option(help="The base model, if it lies elsewhere now.")] = None,
    data: Annotated[str | None, typer.Option(help="Other data to measure on, as in train.")] = None,
    subset: options.Subset = None,
    split: Annotated[str | None, typer.Option(help="The split to measure on.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per batch.")] = None,
    output: Annotated[Path | None, typer.Option(help="Save the metrics here (.json).")] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Save text, label and prediction of each row here (.csv, .jsonl, .parquet).")
    ] = None,
    quiet: options.Quiet = False,
) -> None:
    """Measure a trained model: on the evaluation rows of its training, or on other labelled text."""
    console = make_console(quiet=quiet)
    with options.errors_in_words(console):
        if predictions is not None and predictions.suffix not in _WRITERS:
            raise ValueError(f"--predictions {predictions}: allowed are files ending in {', '.join(_WRITERS)}.")
        result = evaluate_folder(folder, model=model, data=data, subset=subset, split=split, batch_size=batch_size)
        console.print(metrics_table(result.metrics, f"{len(result.data):,} rows: {result.rows}"))
        if not this_process().is_main_process:  # the first one writes
            return
        if output is not None:
            output.write_text(json.dumps(result.metrics, indent=2) + "\n", encoding="utf-8")
            console.print(f"Saved {output}")
        if predictions is not None:
            _WRITERS[predictions.suffix](result.table(), str(predictions))
            console.print(f"Saved {predictions}")


_WRITERS = {".csv": Dataset.to_csv, ".jsonl": Dataset.to_json, ".parquet": Dataset.to_parquet}
