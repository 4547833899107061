"""`peft-surgical train`, `evaluate` and `predict`: a model is tuned on a task, measured, and asked."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from peft_surgical.cli.common import (
    WRITERS,
    check_plot,
    save_file,
    save_rows,
    show_metrics,
    show_ranking,
    show_start,
    show_table,
    show_tried,
    size,
)
from peft_surgical.cli.plan import plan_lines
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import AUTO
from peft_surgical.training.options import CAUSAL_LM, check_writable, write_text


if TYPE_CHECKING:
    from peft_surgical.training.run import TrainingRun

SECONDS_BETWEEN_LINES = 30
SHOWN = 3
"""How many answers are shown where all are saved."""


def train(
    console: Console,
    job: TrainingJob,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on from the newest checkpoint in the output folder, if there is one. Its job is kept; with more "
            "--epochs or --max-steps it trains longer.",
            rich_help_panel="The run",
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Empty the output folder first.", rich_help_panel="The run")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="With --layers auto: draw what was tried against what it took, here (.png, .pdf, .svg).",
            rich_help_panel="The run",
        ),
    ] = None,
) -> None:
    """Tune some layers of a model on a task, keep the best checkpoint, save what changed.

    The layers lie at equal distances, unless `--layers` names others, or `--score` or `--ranking` ranks them. They are
    ranked on training rows, the checkpoint is chosen on rows held out of them, and the evaluation rows are looked at
    once, at the end. The output folder gets the adapter (with `--method full` the whole model), the ranking,
    `metrics.json`, a model card, and `run.yaml`, with which `--config` runs it again.
    """
    from tqdm import tqdm

    from peft_surgical.distributed import this_process
    from peft_surgical.training.checkpoints import CHECKPOINTS, newest_checkpoint
    from peft_surgical.training.planning import plan_before_steps
    from peft_surgical.training.progress import ProgressLines, StepBar
    from peft_surgical.training.run import TrainingRun

    check_plot("--plot", plot)
    if plot is not None and job.layers != AUTO:
        raise ValueError("--plot draws the choices that --layers auto tries. Drop it, or say --layers auto.")
    run = TrainingRun(job, resume=resume, overwrite=overwrite)
    if run.finished is not None:
        console.print(f"The run in {job.output} is finished; more --epochs would go on with it. Its results:")
        _show_end(console, job, run.finished, plot)
        return
    show_start(console, run)
    current = run

    def begin(part: TrainingRun) -> None:
        nonlocal current
        current = part
        if run.tried:
            show_tried(console, run.tried)
            console.print(f"\nNow {part.job.layers}:")
        part.adapt()
        if this_process().num_processes == 1:  # several may share what is counted here as one's
            show_table(console, plan_lines(plan_before_steps(part)))
        if part.checkpoint is not None:
            console.print(f"Going on from {describe_checkpoint(part, part.checkpoint)}.")

    try:
        show_ranking(console, run)
        if not console.quiet:
            seconds = 0 if console.is_terminal else SECONDS_BETWEEN_LINES
            lines = ProgressLines(tqdm.write, run.metric, steps=job.log_every, seconds=seconds)
            run.callbacks = [lines, *([StepBar()] if console.is_terminal else [])]
        run.fit(begin)
        results = run.finish()
    except KeyboardInterrupt:
        place = describe_checkpoint(current, newest_checkpoint(current.folder / CHECKPOINTS))
        if current is not run:
            is_done = "seconds" in run.tried["choices"][choice := current.job.layers]
            place = f"the end of {choice}" if is_done else f"{choice}, {place}"
        console.print(
            f"\nInterrupted. To go on from {place}:\npeft-surgical train --output {shlex.quote(job.output)} --resume",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    _show_end(console, job, results, plot)


def describe_checkpoint(run: TrainingRun, checkpoint: Path | None) -> str:
    """From where a run goes on with a checkpoint, in words."""
    if checkpoint is None:
        return "the start, for there is no checkpoint before the end of the first epoch"
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return f"step {state['global_step']:,}, epoch {state['epoch']:.3g} of {run.job.epochs:.3g}"


def _show_end(console: Console, job: TrainingJob, results: dict[str, Any], plot: Path | None) -> None:
    from peft_surgical.ranking.plots import plot_tried
    from peft_surgical.training.card import describe_layers, describe_selection, push, share

    evaluation = dict(results["evaluation"])
    show_metrics(
        console,
        count=evaluation.pop("samples"),
        rows=evaluation.pop("rows"),
        metrics=evaluation,
        majority=results["majority"],
        base=results.get("base"),
    )
    if results.get("answers"):
        console.print("\nAnswers to the first of these rows:")
        for row in results["answers"]:
            show_table(console, [("asked", row["prompt"]), ("answered", row["answer"]), ("data", row["reference"])])
            console.print()
    if results.get("tried"):
        show_tried(console, results["tried"])
        save_file(console, plot, lambda file: plot_tried(file, results["tried"]))
        console.print()
    trained, total = results["parameters"]["trained"], results["parameters"]["total"]
    is_language = results["task"]["kind"] == CAUSAL_LM
    ask = f"predict {job.output} --prompt 'A question'"
    measure = f"evaluate {job.output} --predictions predictions.csv"
    rows = [
        ("Chosen", describe_selection(results)),
        ("Layers", describe_layers(results["layers"])),
        ("Trained", f"{size(trained, '')} of {size(total, '')} parameters ({share(trained, total)})"),
        ("Files", ", ".join(f"{name} {size(count)}" for name, count in results["files"].items())),
        ("Seconds", ", ".join(f"{name} {seconds:.1f}" for name, seconds in results["seconds"].items())),
        ("Saved in", f"{job.output}  (README.md is its card)"),
        ("Next", f"peft-surgical {ask if is_language else measure}"),
    ]
    show_table(console, rows)
    if (address := push(job)) is not None:
        console.print(f"Pushed to {address}", soft_wrap=True)


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
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per batch.")] = None,
    output: Annotated[Path | None, typer.Option(help="Save the metrics here (.json).")] = None,
    predictions: Annotated[
        Path | None, typer.Option(help="Save each row with its prediction here (.csv, .jsonl, .parquet).")
    ] = None,
) -> None:
    """Measure a trained model: on the evaluation rows of its training, or on other data."""
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
    save_file(console, output, lambda file: write_text(Path(file), json.dumps(result.metrics, indent=2) + "\n"))
    save_file(console, predictions, lambda file: save_rows(result.table(), file))


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
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of a language model's answer.")] = 256,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="How random the answers of a language model are; 0: always the likeliest token."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of these random answers.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the answers here (.csv, .jsonl, .parquet).")
    ] = None,
) -> None:
    """Ask a trained model: labels with their probabilities, amounts, or a language model's answers."""
    from datasets import Dataset

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
    save_file(console, output, lambda file: save_rows(Dataset.from_list(rows), file), what=f"{len(rows):,} rows in ")
