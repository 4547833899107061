"""What the command line shows: tables and progress, on the first process only."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import transformers
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy

from peft_surgical.ranking.rank import LayerRanking
from peft_surgical.training.processes import this_process


def make_console(*, quiet: bool = False) -> Console:
    """A console that is silent on all processes but the first.

    Args:
        quiet: Be silent here too.
    """
    silent = quiet or not this_process().is_main_process
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
        self.progress: Progress | None = None

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
        hidden = not self.console.is_terminal
        self.progress = Progress(*columns, console=self.console, transient=True, disable=hidden)
        self.bar = self.progress.add_task(self.title, total=state.max_steps, completed=state.global_step)
        self.progress.start()

    def on_step_end(self, args, state, control, **kwargs):
        if self.progress is not None:
            self.progress.update(self.bar, completed=state.global_step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.line = f"  epoch {state.epoch:.3g}: training loss {float(logs['loss']):.4f}"
            if args.eval_strategy == IntervalStrategy.NO:
                self._leave_line()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        value = (metrics or {}).get(f"eval_{self.metric}")
        if value is not None:
            self.line += f", {self.metric} {value:.4f} on the selection rows"
            self._leave_line()

    def on_train_end(self, args, state, control, **kwargs):
        self.close()

    def close(self) -> None:
        """Take the bar away; also when training ends with an error, as it hides the cursor."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

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


def ranking_table(ranking: LayerRanking, k: int) -> Table:
    """A ranking as a table, with the layers that are tuned marked.

    Args:
        ranking: The ranking.
        k: How many layers are tuned.
    """
    table = Table(caption=_stability(ranking), caption_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("layer", justify="right")
    table.add_column("score", justify="right")
    table.add_column("", width=20)
    sure = ranking.intervals is not None
    if sure:
        table.add_column("95 % interval", justify="right")
        table.add_column(f"in top {k}", justify="right")
    table.add_column("")
    highest = max(ranking.scores)
    for place, layer in enumerate(ranking.order, 1):
        score = ranking.scores[layer]
        cells = [
            str(place),
            str(layer),
            f"{score:.3g}",
            "█" * round(20 * max(score, 0) / highest) if highest > 0 else "",
        ]
        if ranking.intervals is not None:
            low, high = ranking.intervals[layer]
            cells += [f"{low:.3g} to {high:.3g}", f"{ranking.probability(layer, k) or 0:.0%}"]
        tuned = place <= k
        table.add_row(*cells, "tuned" if tuned else "", style="bold green" if tuned else None)
    return table


def _stability(ranking: LayerRanking) -> str:
    lines = []
    if ranking.split_half_tau is not None:
        lines.append(f"Two halves of the samples agree on the order with Kendall's tau {ranking.split_half_tau:.2f}.")
    if ranking.head_tau is not None:
        heads = ranking.record.get("head_seeds")
        lines.append(f"{heads} freshly drawn heads agree on the order with Kendall's tau {ranking.head_tau:.2f}.")
    return "\n".join(lines)


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
