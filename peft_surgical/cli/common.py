"""What all commands have in common: how they are declared, what they show, and how they end."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from peft_surgical.cli.job import job_of_options, job_parameters
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import describe_strata_by_rank
from peft_surgical.training.options import check_writable


if TYPE_CHECKING:
    from datasets import Dataset

    from peft_surgical.training.data import Task
    from peft_surgical.training.run import TrainingRun


_QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Show errors only.", rich_help_panel="The run")]
Adapter = Annotated[str, typer.Argument(help="The adapter: a folder, or its name on the hub.")]
Base = Annotated[str, typer.Argument(help="The base model: a folder, or a name on the hub.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder to write to.")]
Html = Annotated[Path | None, typer.Option(help="Save one page with tables to sort and search here (.html).")]
Encoding = Annotated[
    str, typer.Option(help="How tensors are written: values, auto, lossless, rows, columns, bf16, int8, int4 or sign.")
]
MaxError = Annotated[
    float,
    typer.Option(
        min=0.0, help="With --encoding auto: the most a tensor may be off, as a part of its difference. 0: exact."
    ),
]


def as_command(
    function: Callable[..., None], of_job: Collection[str] = (), defaults: Mapping[str, Any] | None = None
) -> Callable[..., None]:
    """A function as Typer takes it, with the library loaded and errors shown as messages when it is called.

    It takes a console, which becomes `--quiet`, a job if there are fields of it that are options, with the command's
    own defaults, and the command's other options.
    """

    def run(*, quiet: bool, **options: Any) -> None:
        with _report_errors():
            if of_job:  # before anything is loaded
                options["job"] = job_of_options(options, of_job, defaults or {})
            _load_library()
            console = _open_console(quiet)
            with _tidy_logging(console), _ending_processes():
                function(console, **options)

    own = [
        p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name not in ("console", "job")
    ]
    quiet = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_QUIET)
    parameters = [*(job_parameters(of_job) if of_job else ()), *own, quiet]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    run.__doc__ = function.__doc__
    return run


FEW_ROWS = 100  # too few to choose a checkpoint by


def _load_library() -> None:
    """Run the package's `__init__`, which registers the methods with PEFT, if the console script has put that off."""
    package = sys.modules["peft_surgical"]
    if not hasattr(package, "__all__"):
        importlib.reload(package)


def _open_console(quiet: bool) -> Console:
    """A console that is silent on all processes but the first."""
    from peft_surgical.distributed import this_process

    return Console(quiet=quiet or not this_process().is_main_process, highlight=False)


@contextmanager
def _report_errors() -> Iterator[None]:
    """Show what the user can put right as a message without a traceback, and end with exit code 2."""
    try:
        yield
    except (ValueError, ImportError, OSError) as error:
        Console(stderr=True, highlight=False).print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(2) from error


@contextmanager
def _tidy_logging(console: Console) -> Iterator[None]:
    """Show this package's warnings in the console, and keep the chatter of other libraries out of it."""
    import datasets
    import transformers

    package = logging.getLogger("peft_surgical")
    handler = RichHandler(console=console, show_time=False, show_path=False)
    package.addHandler(handler)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # meant for the libraries' authors
            yield
    finally:
        package.removeHandler(handler)
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
        datasets.enable_progress_bars()


@contextmanager
def _ending_processes() -> Iterator[None]:
    """End the process group that a command has started: its threads may crash a process that ends before them."""
    from peft_surgical.distributed import this_process

    done = False
    try:
        yield
        this_process().wait_for_everyone()  # none may end while another still needs it
        done = True
    finally:
        # a process that failed alone would wait here for the others under NCCL, and they for it
        if done or "nccl" not in str(this_process().backend):
            # PyTorch before 2.8 waits for its threads without giving Python's lock to those that still want it
            time.sleep(0.1)
            this_process().destroy_process_group()


def show_table(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Show a table of names and values."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    console.print(table)


def show_start(console: Console, run: TrainingRun) -> None:
    """Show what a run is about to do, and what its numbers are worth."""
    from peft_surgical.training.card import describe_majority

    job, task, parts = run.job, run.prepared.task, run.prepared.parts
    text = " + ".join(task.text_columns)
    if task.unused_columns:
        text += f"  (not used: {', '.join(task.unused_columns)})"
    rows = [
        ("Model", f"{job.model}, {size(run.total_parameters, '')} parameters"),
        ("Text", text),
        *([("Label", f"{task.label_column}: {_count_classes(task, parts.train)}")] if task.label_column else []),
        *([("Learns", _what_is_learnt(job, task))] if task.form else []),
        ("Train on", f"{len(parts.train):,} {parts.train_name}"),
        ("Choose on", f"{len(parts.selection):,} rows: {parts.selection_name}" if parts.selection else "nothing"),
        ("Measure on", f"{len(parts.evaluation):,} rows: {parts.evaluation_name}"),
        *([("Baseline", describe_majority(run.majority))] if run.majority else []),
        ("Method", f"{job.method}, {job.about}; learning rate {run.learning_rate:g}"),
    ]
    show_table(console, rows)
    if parts.optimistic:
        console.print(
            "The checkpoint is chosen on the same rows that it is measured on, so the numbers will be too good.",
            style="yellow",
        )
    elif parts.selection and len(parts.selection) < FEW_ROWS:
        console.print(
            f"The best epoch is chosen on {len(parts.selection)} rows only, which is little better than chance. Hold "
            "out more with --held-out, or take the last epoch with --select-on none.",
            style="yellow",
            soft_wrap=True,
        )


def _what_is_learnt(job: TrainingJob, task: Task) -> str:
    """Which tokens of a language model's rows have a loss."""
    if job.assistant_only_loss:
        return "what the assistant says"
    if len(task.text_columns) > 1:
        return "the answers"
    return "all of the text" if task.form == "text" else "all of each chat; with --assistant-only-loss, the answers"


def _count_classes(task: Task, rows: Dataset) -> str:
    """The classes, each with its number of training rows, the most frequent first."""
    if not task.labels:
        return "a number"
    shown = [f"{task.labels[i]} {count:,}" for i, count in Counter(rows["labels"][:]).most_common(20)]
    left = len(task.labels) - len(shown)
    return ", ".join(shown) + (f" and {left} more classes" if left else "")


def show_ranking(console: Console, run: TrainingRun) -> None:
    """Rank the layers, if the job chooses them so, and show the ranking."""
    ranking = run.rank(progress=not console.quiet)
    if ranking is not None:
        console.print(str(ranking), markup=False, soft_wrap=True)
        if run.job.method == "spafit":
            console.print(describe_strata_by_rank(ranking, run.job.group_2), soft_wrap=True)


def show_tried(console: Console, tried: dict[str, Any]) -> None:
    """Show the choices of layers that are tried in turn, and what came of them so far."""
    from peft_surgical.training.progress import describe_tried

    console.print(f"\nChoices of layers, and the best {tried['metric']} of each on the rows that choose:")
    console.print(describe_tried(tried), markup=False, soft_wrap=True)


def show_metrics(
    console: Console,
    metrics: Mapping[str, float],
    count: int,
    rows: str,
    majority: Mapping[str, Any] | None,
    base: Mapping[str, float] | None = None,
) -> None:
    """Show metrics, the number of the rows that they are of and what these are in words, and beside them what is
    reached for nothing: by the most frequent class, or the base model."""
    console.print(f"\n{count:,} rows: {rows}")
    named = f"always {majority['label']!r}" if majority else "base model"
    beside = majority or base or {}
    reached = {name: f"   ({named}: {beside[name]:.4f})" for name in metrics if name in beside}
    show_table(console, [(name, f"{value:.4f}{reached.get(name, '')}") for name, value in metrics.items()])


def save_file(console: Console, path: Path | None, save: Callable[[str], object], what: str = "") -> None:
    """Have a file written by the first process, if its path is given, and say so."""
    from peft_surgical.distributed import this_process

    if path is not None and this_process().is_main_process:
        save(str(path))
        console.print(f"Saved {what}{path}")


WRITERS = {".csv": "to_csv", ".jsonl": "to_json", ".parquet": "to_parquet"}
"""How rows are written to a file, by its ending."""


def save_rows(rows: Dataset, path: str) -> None:
    """Write rows to a file in the format that its ending says."""
    getattr(rows, WRITERS[Path(path).suffix])(path)


def check_plot(option: str, path: Path | None) -> None:
    """Make sure that a plot can be drawn and written, before anything takes time."""
    if path is not None:
        check_writable(option, path, (".png", ".pdf", ".svg"))
        if find_spec("matplotlib") is None:
            from peft_surgical.compat import install

            raise ImportError(f"{option} needs matplotlib, which is not installed: {install('plot')}")


def size(count: float, unit: str = "B") -> str:
    """A number of bytes or parameters, as people write it.

    Example:

        >>> size(14_200_000), size(3_548_931, unit=""), size(999_999)
        ('14.2 MB', '3.5 M', '1.0 MB')
    """
    for prefix in ("", "k", "M"):
        if count < (999.95 if prefix else 999.5):
            return f"{count:.1f} {prefix}{unit}".strip() if prefix else f"{count:.0f} {unit}".strip()
        count /= 1000
    return f"{count:.1f} G{unit}".strip()
