"""What the command line shows: tables and progress, on the first process only."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import transformers
from accelerate import PartialState
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy


def make_console(*, quiet: bool = False) -> Console:
    """A console that is silent on all processes but the first.

    Args:
        quiet: Be silent here too.
    """
    silent = quiet or not PartialState().is_main_process
    return Console(quiet=silent, highlight=False)


@contextmanager
def tidy_logging(console: Console) -> Iterator[None]:
    """Show this package's warnings in the console, and keep other libraries' chatter out of it, for a while."""
    package = logging.getLogger("peft_surgical")
    handler = RichHandler(console=console, show_time=False, show_path=False)
    package.addHandler(handler)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # libraries to one another
            yield
    finally:
        package.removeHandler(handler)
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
        datasets.enable_progress_bars()


class RichProgress(TrainerCallback):
    """A progress bar for the Trainer, with a line per epoch.

    Args:
        console: Where to show it.
        title: What is being trained, in a few words.
        metric: The metric to show after each epoch.
        lines: Whether to leave a line per epoch.
    """

    def __init__(self, console: Console, title: str, metric: str | None = None, lines: bool = True):
        self.console = console
        self.title = title
        self.metric = metric
        self.lines = lines
        self.line = ""

    def on_train_begin(self, args, state, control, **kwargs):
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(bar_width=28),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, transient=True)
        self.bar = self.progress.add_task(self.title, total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_step_end(self, args, state, control, **kwargs):
        self.progress.update(self.bar, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.line = f"  epoch {state.epoch:g}: training loss {float(logs['loss']):.4f}"
            if args.eval_strategy == IntervalStrategy.NO:
                self._leave_line()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        value = (metrics or {}).get(f"eval_{self.metric}")
        if value is not None:
            self.line += f", {self.metric} {value:.4f} on the selection rows"
            self._leave_line()

    def on_train_end(self, args, state, control, **kwargs):
        self.progress.stop()

    def _leave_line(self):
        if self.lines:
            self.console.print(self.line, style="dim")


def key_value_table(rows: Sequence[tuple[str, str]]) -> Table:
    """A table of names and values without a head."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def metrics_table(metrics: dict[str, Any], title: str) -> Table:
    """A table with one column per metric."""
    table = Table(title=title, title_justify="left")
    for name in metrics:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.4f}" for value in metrics.values()))
    return table


def share(part: float, whole: float) -> str:
    """A share in percent, with two digits that count.

    Example:

        >>> share(770, 22_713_986), share(1, 3)
        ('0.0034%', '33%')
    """
    return f"{100 * part / whole:.2g}%"


def size(count: float, unit: str = "B") -> str:
    """A number of bytes or parameters, as people write it.

    Example:

        >>> size(14_200_000), size(3_548_931, unit="")
        ('14.2 MB', '3.5 M')
    """
    for prefix in ("", "k", "M"):
        if count < 1000:
            return f"{count:.1f} {prefix}{unit}".strip() if prefix else f"{count:.0f} {unit}".strip()
        count /= 1000
    return f"{count:.1f} G{unit}".strip()
