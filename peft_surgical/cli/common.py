"""What all commands have in common: how they are declared, what they show, and how they end."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from peft_surgical.training.job import TrainingJob, job_options
from peft_surgical.training.options import check_writable, flag


_QUIET = Annotated[bool, typer.Option("--quiet", "-q", help="Show errors only.")]
Adapter = Annotated[str, typer.Argument(help="The adapter: a folder, or its name on the hub.")]
Base = Annotated[str, typer.Argument(help="The base model: a folder, or a name on the hub.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="The folder to write to.")]
Encoding = Annotated[
    str, typer.Option(help="How tensors are written: values, auto, lossless, rows, bf16, int8, int4 or sign.")
]
MaxError = Annotated[
    float,
    typer.Option(help="With --encoding auto: the most a tensor may be off, as a part of its difference. 0: exact."),
]


def as_command(function: Callable[..., None], of_job: Collection[str] = ()) -> Callable[..., None]:
    """A function as Typer takes it, with the library loaded and errors shown as messages when it is called.

    Args:
        function: Takes a console first. Its other parameters are the command's options.
        of_job: The fields of `TrainingJob` that are options too; the function takes them as keywords.

    Returns:
        The function with `--quiet` in place of the console.
    """

    def run(*, quiet: bool, **options: Any) -> None:
        with _report_errors():
            _load_library()
            console = _open_console(quiet)
            with _tidy_logging(console), _ending_processes():
                function(console, **options)

    own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    quiet = inspect.Parameter("quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_QUIET)
    parameters = [*_job_parameters(of_job), *own[1:], quiet]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    run.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
    run.__doc__ = function.__doc__
    return run


def _job_parameters(names: Collection[str]) -> Iterator[inspect.Parameter]:
    """Fields of `TrainingJob` as parameters that Typer makes options of."""
    for field in dataclasses.fields(TrainingJob):
        if field.name not in names:
            continue
        kind, option = job_options()[field.name]
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if field.name in READERS:
            kind = str | None
        elif get_origin(kind) is tuple:
            kind, default = list[str] | None, None
        shown = typer.Option(*(option.names or (flag(field.name),)), help=option.help, rich_help_panel=option.panel)
        yield inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, shown]
        )


def read_job_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `TrainingJob` from a command's options, read from text where the option holds some.

    Raises:
        ValueError: A text cannot be read; the message names the option.
    """
    fields = {}
    for name, value in options.items():
        if name in READERS and value is not None:
            try:
                value = READERS[name](value)
            except ValueError as error:
                raise ValueError(f"{flag(name)} {value}: {error}") from None
        elif get_origin(job_options()[name][0]) is tuple:
            value = tuple(value or ())
        fields[name] = value
    return fields


def read_layers(text: str) -> str | tuple[int | str, ...]:
    """Read layers as they are written on a command line.

    Example:

        >>> read_layers("3,5,-1"), read_layers("last:25%"), read_layers("0-2,5")
        ((3, 5, -1), 'last:25%', ('0-2', 5))
    """
    parts = [part.strip() for part in text.split(",")]
    items = tuple(int(part) if part.lstrip("-").isdigit() else part for part in parts)
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


def read_depth(text: str) -> int | float:
    """Read a layer's index, or a fraction of the depth.

    Raises:
        ValueError: The text is neither.

    Example:

        >>> read_depth("4"), read_depth("0.2")
        (4, 0.2)
    """
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ValueError("allowed are a layer's index and a fraction such as 0.2.") from None


READERS: dict[str, Callable[[str], Any]] = {"layers": read_layers, "n1": read_depth, "n2": read_depth}
"""How the fields that are written as text on the command line are read."""
WRITERS = {".csv": "to_csv", ".jsonl": "to_json", ".parquet": "to_parquet"}
"""How rows are written to a file, by its ending."""


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


def show_metrics(
    console: Console,
    metrics: Mapping[str, float],
    count: int,
    rows: str,
    majority: Mapping[str, Any] | None,
    base: Mapping[str, float] | None = None,
) -> None:
    """Show metrics, the number and the name of the rows they are of, and beside them what is reached for nothing.

    Args:
        console: Where.
        metrics: The metrics by name.
        count: The number of rows.
        rows: What the rows are, in words.
        majority: The metrics of the most frequent class.
        base: The metrics of the base model.
    """
    console.print(f"\n{count:,} rows: {rows}")
    named = f"always {majority['label']!r}" if majority else "base model"
    beside = majority or base or {}
    reached = {name: f"   ({named}: {beside[name]:.4f})" for name in metrics if name in beside}
    show_table(console, [(name, f"{value:.4f}{reached.get(name, '')}") for name, value in metrics.items()])


def check_plot(option: str, path: Path | None) -> None:
    """Make sure that a plot can be drawn and written, before anything takes time."""
    if path is not None:
        check_writable(option, path, (".png", ".pdf", ".svg"))
        if find_spec("matplotlib") is None:
            raise ImportError(f"{option} needs matplotlib, which is not installed: pip install matplotlib")


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
