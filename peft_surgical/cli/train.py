"""`peft-surgical train`: tune a model on a task and save what changed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from peft_surgical.cli.common import check_plot, show_metrics, show_ranking, show_start, show_table, show_tried, size
from peft_surgical.cli.plan import plan_lines
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.kinds import CAUSAL_LM
from peft_surgical.training.methods import AUTO


if TYPE_CHECKING:
    from peft_surgical.training.run import TrainingRun

SECONDS_BETWEEN_LINES = 30


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
    """Tune a model on a task: rank the layers, tune the chosen ones, keep the best checkpoint, save what changed.

    Layers are ranked on training rows, the checkpoint is chosen on rows held out of them, and the evaluation rows are
    looked at once, at the end. The output folder gets the adapter (with `--method full` the whole model), the ranking,
    `metrics.json`, a model card, and `run.yaml`, with which `--config` runs it again.
    """
    from tqdm import tqdm

    from peft_surgical.distributed import this_process
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
            console.print(f"Going on from {describe_checkpoint(part)}.")

    try:
        show_ranking(console, run)
        if not console.quiet:
            seconds = 0 if console.is_terminal else SECONDS_BETWEEN_LINES
            lines = ProgressLines(tqdm.write, run.metric, steps=job.log_every, seconds=seconds)
            run.callbacks = [lines, *([StepBar()] if console.is_terminal else [])]
        run.fit(begin)
        results = run.finish()
    except KeyboardInterrupt:
        place = describe_checkpoint(current)
        if current is not run:
            is_done = "seconds" in run.tried["choices"][choice := current.job.layers]
            place = f"the end of {choice}" if is_done else f"{choice}, {place}"
        console.print(
            f"\nInterrupted. To go on from {place}:\npeft-surgical train --output {shlex.quote(job.output)} --resume",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    _show_end(console, job, results, plot)


def describe_checkpoint(run: TrainingRun) -> str:
    """From where a run goes on if it is resumed now, in words."""
    from peft_surgical.training.card import CHECKPOINTS, newest_checkpoint

    checkpoint = newest_checkpoint(run.folder / CHECKPOINTS)
    if checkpoint is None:
        return "the start, for there is no checkpoint before the end of the first epoch"
    state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return f"step {state['global_step']:,}, epoch {state['epoch']:.3g} of {run.job.epochs:.3g}"


def _show_end(console: Console, job: TrainingJob, results: dict[str, Any], plot: Path | None) -> None:
    from peft_surgical.distributed import this_process
    from peft_surgical.ranking.plots import plot_tried
    from peft_surgical.training.card import describe_layers, describe_selection, share
    from peft_surgical.training.hub import push

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
        if plot is not None and this_process().is_main_process:
            plot_tried(str(plot), results["tried"])
            console.print(f"Plotted {plot}")
        console.print()
    trained, total = results["parameters"]["trained"], results["parameters"]["total"]
    rows = [
        ("Chosen", describe_selection(results)),
        ("Layers", describe_layers(results) or "none"),
        ("Trained", f"{size(trained, '')} of {size(total, '')} parameters ({share(trained, total)})"),
        ("Files", ", ".join(f"{name} {size(count)}" for name, count in results["files"].items())),
        ("Seconds", ", ".join(f"{name} {seconds:.1f}" for name, seconds in results["seconds"].items())),
        ("Saved in", f"{job.output}  (README.md is its card)"),
        ("Next", _next_command(job, results)),
    ]
    show_table(console, rows)
    if (address := push(job)) is not None:
        console.print(f"Pushed to {address}", soft_wrap=True)


def _next_command(job: TrainingJob, results: dict[str, Any]) -> str:
    if results["task"]["kind"] == CAUSAL_LM:
        return f"peft-surgical predict {job.output} --prompt 'A question'"
    return f"peft-surgical evaluate {job.output} --predictions predictions.csv"
