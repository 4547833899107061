"""`peft-surgical evaluate` and `predict`: what was trained is measured, and asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from peft_surgical.cli.common import WRITERS, show_metrics, show_table
from peft_surgical.training.options import check_writable


SHOWN = 3
"""How many answers are shown where all are saved."""


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

    check_writable("--output", output, (".json",))
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


def predict(
    console: Console,
    folder: Annotated[Path, typer.Argument(help="The folder that `peft-surgical train` wrote.")],
    text: Annotated[
        list[str] | None,
        typer.Option(
            "--text", "--prompt", help="What to ask: a text to label, or a prompt; may be repeated. Of two texts both."
        ),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Read the texts or prompts from here, as in train.")] = None,
    split: Annotated[str | None, typer.Option(help="The split of the data. Default: test, else the first.")] = None,
    text_column: Annotated[
        list[str] | None,
        typer.Option(
            help="Column with the text or prompt, if the data call it otherwise than the training; twice for two."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The base model, if it lies elsewhere now.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens that a language model says.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="How much chance is in what it says; 0: the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of that chance.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the answers here (.csv, .jsonl, .parquet).")
    ] = None,
) -> None:
    """Ask a trained model: labels with their probabilities, amounts, or a language model's answers."""
    from peft_surgical.distributed import this_process
    from peft_surgical.training.prediction import predict

    check_writable("--output", output, WRITERS)
    rows: list[dict[str, Any]] = []
    for row in predict(
        folder,
        text or (),
        data=data,
        split=split,
        text_columns=text_column or (),
        model=model,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    ):
        rows.append(row)
        if output is None or len(rows) <= SHOWN:
            shown = [(name, f"{value:.4f}" if isinstance(value, float) else value) for name, value in row.items()]
            show_table(console, shown)
            console.print()
    if output is not None and this_process().is_main_process:
        from datasets import Dataset

        getattr(Dataset.from_list(rows), WRITERS[output.suffix])(str(output))
        console.print(f"Saved {len(rows):,} rows in {output}")
