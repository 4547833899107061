"""`peft-surgical train`: tune a model on a task and save what changed."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from peft_surgical.cli import options
from peft_surgical.cli.console import (
    RichProgress,
    key_value_table,
    make_console,
    metrics_table,
    ranking_table,
    share,
    size,
)
from peft_surgical.ranking.rank import LayerRanking
from peft_surgical.training.job import JOB_FILE, TrainingJob
from peft_surgical.training.methods import METHODS, default_top_k
from peft_surgical.training.model_card import describe_selection
from peft_surgical.training.run import TrainingRun
from peft_surgical.training.spafit import default_counts, describe_strata_by_rank


_METHOD, _TRAINING, _CHOICE = "Method", "Training", "Choosing and measuring"
_RATES = ", ".join(f"{name} {method.learning_rate:g}" for name, method in METHODS.items())
_METHODS = "; ".join(f"{name}: {method.about}" for name, method in METHODS.items())

_J = TrainingJob
_Option = typer.Option


def train(
    ctx: typer.Context,
    model: options.Model,
    data: options.Data,
    output: Annotated[Path, _Option(help="The folder to write.")],
    method: Annotated[str, _Option(help=f"What to train. {_METHODS}.", rich_help_panel=_METHOD)] = _J.method,
    top_k: Annotated[
        int | None,
        _Option(
            help="How many layers to tune. Default: 5 of 12 for surgical, in proportion; a fourth for last.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        _Option(help="The layers to tune in place of ranked ones: 3,5,-1 or last:2 or 4-9.", rich_help_panel=_METHOD),
    ] = None,
    preset: Annotated[
        str | None, _Option(help="A SPAFIT model of the paper, such as SPAFIT-4-9-II.", rich_help_panel=_METHOD)
    ] = None,
    n1: Annotated[
        str | None,
        _Option(
            help="SPAFIT: the last frozen layer, or the fraction of the depth up to it. Default: 0.2.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    n2: Annotated[
        str | None,
        _Option(
            help="SPAFIT: the last layer whose bias terms are trained, or a fraction. Default: 0.4.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    group_2: Annotated[
        str,
        _Option(
            "--group-2",
            help="SPAFIT: what is trained in the middle: bitfit, or norm for models without bias terms.",
            rich_help_panel=_METHOD,
        ),
    ] = _J.group_2,
    target_modules: Annotated[
        list[str] | None,
        _Option(
            "--target-module",
            help="SPAFIT: a module that gets LoRA, on models whose attention is not known by name; may be repeated.",
            rich_help_panel=_METHOD,
        ),
    ] = None,
    lora_r: Annotated[
        int | None, _Option(help="Rank of LoRA. Default: lora 8, spafit 64.", rich_help_panel=_METHOD)
    ] = None,
    lora_alpha: Annotated[
        int | None, _Option(help="Scale of LoRA. Default: lora 16, spafit 128.", rich_help_panel=_METHOD)
    ] = None,
    lora_dropout: Annotated[
        float | None, _Option(help="Dropout in LoRA. Default: lora 0.1, spafit 0.", rich_help_panel=_METHOD)
    ] = None,
    ranking: Annotated[
        str | None, _Option(help="A ranking saved before, in place of a new one.", rich_help_panel="Ranking")
    ] = None,
    samples: options.Samples = _J.samples,
    score: options.Score = _J.score,
    fisher_labels: options.FisherLabels = _J.fisher_labels,
    aggregation: options.Aggregation = _J.aggregation,
    head_seeds: options.HeadSeeds = _J.head_seeds,
    stack: options.Stack = None,
    subset: options.Subset = None,
    encoding: options.Encoding = _J.encoding,
    text_columns: options.TextColumns = None,
    label_column: options.LabelColumn = None,
    task: options.Task = None,
    max_length: options.MaxLength = _J.max_length,
    max_train_samples: Annotated[
        int | None, _Option(help="Train on this many rows, a random draw.", rich_help_panel="Data")
    ] = None,
    eval_split: Annotated[
        str | None,
        _Option(
            help="The split that the final numbers are measured on. Default: validation, else test, else a part cut "
            "off the training rows.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    select_on: Annotated[
        str,
        _Option(
            help="What the best checkpoint is chosen on: held-out (a part of the training rows), none (take the "
            "last checkpoint), or the name of a split.",
            rich_help_panel=_CHOICE,
        ),
    ] = _J.select_on,
    held_out: Annotated[
        float, _Option(help="The part of the training rows to hold out.", rich_help_panel=_CHOICE)
    ] = _J.held_out,
    metric: Annotated[
        str | None,
        _Option(
            help="The metric to choose by: accuracy, f1, matthews; pearson, spearman; or loss. Default: the first.",
            rich_help_panel=_CHOICE,
        ),
    ] = None,
    epochs: Annotated[float, _Option(help="Passes over the training rows.", rich_help_panel=_TRAINING)] = _J.epochs,
    max_steps: Annotated[
        int, _Option(help="The most optimizer steps; -1: as the epochs need.", rich_help_panel=_TRAINING)
    ] = _J.max_steps,
    batch_size: Annotated[int, _Option(help="Rows per batch and device.", rich_help_panel=_TRAINING)] = _J.batch_size,
    gradient_accumulation: Annotated[
        int, _Option(help="Batches per optimizer step.", rich_help_panel=_TRAINING)
    ] = _J.gradient_accumulation,
    learning_rate: Annotated[
        float | None,
        _Option("--learning-rate", "--lr", help=f"Default by method: {_RATES}.", rich_help_panel=_TRAINING),
    ] = None,
    weight_decay: Annotated[float, _Option(help="Of AdamW.", rich_help_panel=_TRAINING)] = _J.weight_decay,
    warmup: Annotated[
        float, _Option(help="The part of the steps that the learning rate rises in.", rich_help_panel=_TRAINING)
    ] = _J.warmup,
    max_grad_norm: Annotated[
        float, _Option(help="Gradients are scaled down to this norm.", rich_help_panel=_TRAINING)
    ] = _J.max_grad_norm,
    bf16: Annotated[
        bool, _Option("--bf16", help="Compute in bfloat16 where safe.", rich_help_panel=_TRAINING)
    ] = False,
    fp16: Annotated[bool, _Option("--fp16", help="Compute in float16 where safe.", rich_help_panel=_TRAINING)] = False,
    gradient_checkpointing: Annotated[
        bool, _Option("--gradient-checkpointing", help="Less memory, more time.", rich_help_panel=_TRAINING)
    ] = False,
    dtype: options.Dtype = _J.dtype,
    seed: options.Seed = _J.seed,
    resume: Annotated[
        bool, _Option("--resume", help="Go on from the newest checkpoint in the output folder, if there is one.")
    ] = False,
    overwrite: Annotated[bool, _Option("--overwrite", help="Empty the output folder first.")] = False,
    keep_checkpoints: Annotated[
        bool, _Option("--keep-checkpoints", help="Keep the checkpoints after the run.")
    ] = False,
    report_to: Annotated[str | None, _Option(help="A service that Trainer reports to, such as tensorboard.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Tune a model on a task: rank the layers, tune the chosen ones, keep the best checkpoint, save what changed.

    Layers are ranked on training rows, the checkpoint is chosen on rows held out of them, and the evaluation rows are
    looked at once, at the end. The output folder gets the adapter (with `--method full` the whole model), the ranking,
    `metrics.json` and a model card.
    """
    console = make_console(quiet=quiet)
    with options.errors_in_words(console):
        job = _job(ctx, resume)
        run = TrainingRun(job, resume=resume, overwrite=overwrite)
        _show_start(console, run)
        found = run.rank(progress=not quiet)
        if found is not None:
            console.print(ranking_table(found, _number_of_tuned(job, found)))
            if job.method == "spafit":
                console.print(describe_strata_by_rank(found, job.group_2), soft_wrap=True)
        with closing(RichProgress(console, job.method, run.metric)) as progress:
            run.callbacks = [progress]
            run.fit()
        _show_end(console, job, run.finish())


def _job(ctx: typer.Context, resume: bool) -> TrainingJob:
    """The job the options describe; when resuming, the one in the folder, with the options given over it."""
    fields = {field.name: ctx.params[field.name] for field in dataclasses.fields(TrainingJob)}
    fields["output"] = str(fields["output"])
    fields["text_columns"] = tuple(fields["text_columns"] or ())
    fields["target_modules"] = tuple(fields["target_modules"] or ())
    fields["layers"] = options.parse_layers(fields["layers"])
    fields["n1"], fields["n2"] = (options.parse_depth_mark(name, fields[name]) for name in ("n1", "n2"))
    if resume and (Path(fields["output"]) / JOB_FILE).exists():
        # by name: typer may carry its own copy of click
        given = {n: v for n, v in fields.items() if getattr(ctx.get_parameter_source(n), "name", "") == "COMMANDLINE"}
        fields = {**dataclasses.asdict(TrainingJob.load(fields["output"])), **given}
    return TrainingJob(**fields)


def _number_of_tuned(job: TrainingJob, ranking: LayerRanking) -> int:
    """How many of a ranking's layers a job tunes."""
    depth = len(ranking.scores)
    if job.method == "spafit":
        return sum(default_counts(depth).values())
    return job.top_k or default_top_k(depth)


def _show_start(console: Console, run: TrainingRun) -> None:
    job, prepared = run.job, run.prepared
    task, parts = prepared.task, prepared.parts
    text = " + ".join(task.text_columns)
    if task.unused_columns:
        text += f"  (not used: {', '.join(task.unused_columns)})"
    rows = [
        ("Model", f"{job.model}, {size(run.total_parameters, '')} parameters"),
        ("Text", text),
        ("Label", f"{task.label_column}: {', '.join(task.labels) if task.labels else 'a number'}"),
        ("Train on", f"{len(parts.train):,} {parts.train_name}"),
        ("Choose on", f"{len(parts.selection):,} rows: {parts.selection_name}" if parts.selection else "nothing"),
        ("Measure on", f"{len(parts.evaluation):,} rows: {parts.evaluation_name}"),
        ("Method", f"{job.method}, {METHODS[job.method].about}; learning rate {job.peak_learning_rate:g}"),
    ]
    console.print(key_value_table(rows))
    if parts.optimistic:
        console.print("The checkpoint is chosen on the rows it is measured on, which flatters it.", style="yellow")


def _show_end(console: Console, job: TrainingJob, results: dict[str, Any]) -> None:
    evaluation = dict(results["evaluation"])
    title = f"{evaluation.pop('samples'):,} rows: {evaluation.pop('rows')}"
    console.print(metrics_table(evaluation, title))
    parameters = results["parameters"]
    layers = "; ".join(f"{stack} {', '.join(map(str, chosen))}" for stack, chosen in results["layers"].items())
    rows = [
        ("Chosen", describe_selection(results)),
        ("Layers", layers or "none"),
        (
            "Trained",
            f"{size(parameters['trained'], '')} of {size(parameters['total'], '')} parameters "
            f"({share(parameters['trained'], parameters['total'])})",
        ),
        ("Files", ", ".join(f"{name} {size(count)}" for name, count in results["files"].items())),
        ("Seconds", ", ".join(f"{name} {seconds:.1f}" for name, seconds in results["seconds"].items())),
        ("Saved in", f"{job.output}  (README.md is its card)"),
        ("Next", f"peft-surgical evaluate {job.output} --predictions predictions.csv"),
    ]
    console.print(key_value_table(rows))
