"""`peft-surgical evaluate`: measure what was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from peft_surgical.cli.common import WRITERS, show_metrics
from peft_surgical.training.options import check_writable


def evaluate(
    console: Console,
    folder: Annotated[Path, typer.Argument(help="The folder that `peft-surgical train` wrote.")],
    model: Annotated[str | None, typer.Option(help="The base model, if it lies elsewhere now.")] = None,
    data: Annotated[str | None, typer.Option(help="Other data to measure on, as in train.")] = None,
    subset: Annotated[str | None, typer.Option(help="Which of the subsets of a data set on the hub.")] = None,
    split: Annotated[str | None, typer.Option(help="The split to measure on.")] = None,
    text_column: Annotated[
        list[str] | None, typer.Option(help="Column with the text in other data; twice for two. Found if not given.")
    ] = None,
    label_column: Annotated[str | None, typer.Option(help="Column with the label. Found if not given.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per batch.")] = None,
    output: Annotated[Path | None, typer.Option(help="Save the metrics here (.json).")] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Save each row with its prediction here (.csv, .jsonl, .parquet).")
    ] = None,
) -> None:
    """Measure a trained model: on the evaluation rows of its training, or on other data."""
    from peft_surgical.distributed import this_process
    from peft_surgical.training.evaluation import evaluate, majority

    if output is not None:
        check_writable("--output", output, (".json",))
    if predictions is not None:
        check_writable("--predictions", predictions, WRITERS)
    result = evaluate(
        folder,
        model=model,
        data=data,
        subset=subset,
        split=split,
        batch_size=batch_size,
        text_columns=text_column or (),
        label_column=label_column,
    )
    show_metrics(console, result.metrics, len(result.data), result.rows, majority(result.data, result.labels))
    if not this_process().is_main_process:  # the first one writes
        return
    if output is not None:
        output.write_text(json.dumps(result.metrics, indent=2) + "\n", encoding="utf-8")
        console.print(f"Saved {output}")
    if predictions is not None:
        getattr(result.table(), WRITERS[predictions.suffix])(str(predictions))
        console.print(f"Saved {predictions}")
