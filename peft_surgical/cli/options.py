"""Options that several commands share, and what they have in common when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from peft_surgical.cli.console import tidy_logging


_DATA, _RANKING, _MODEL = "Data", "Ranking", "Model"

Model = Annotated[str, typer.Option(help="Base model: a folder, or a name on the hub.", rich_help_panel=_MODEL)]
Data = Annotated[
    str,
    typer.Option(
        help="Labelled text: a .parquet, .csv, .tsv or .jsonl file, a folder with one such file per split, or the "
        "name of a data set on the hub.",
        rich_help_panel=_DATA,
    ),
]
Subset = Annotated[
    str | None, typer.Option(help="Which of the subsets of a data set on the hub.", rich_help_panel=_DATA)
]
Encoding = Annotated[str, typer.Option(help="How csv files are encoded.", rich_help_panel=_DATA)]
TextColumns = Annotated[
    list[str] | None,
    typer.Option(
        "--text-column", help="Column with the text; twice for two texts. Found if not given.", rich_help_panel=_DATA
    ),
]
LabelColumn = Annotated[
    str | None, typer.Option(help="Column with the label. Found if not given.", rich_help_panel=_DATA)
]
Task = Annotated[
    str | None,
    typer.Option(help="classification or regression. Told from the labels if not given.", rich_help_panel=_DATA),
]
MaxLength = Annotated[int, typer.Option(help="Texts are cut to this many tokens.", rich_help_panel=_DATA)]
Dtype = Annotated[
    str, typer.Option(help="Load the base in float32, bfloat16, float16, or auto.", rich_help_panel=_MODEL)
]
Stack = Annotated[
    str | None,
    typer.Option(help="Which stack of layers, for models with several (encoder, decoder).", rich_help_panel=_RANKING),
]
Samples = Annotated[int, typer.Option(help="Training rows to rank the layers on.", rich_help_panel=_RANKING)]
Score = Annotated[
    str,
    typer.Option(help="What the layers are ranked by: fisher, or another registered score.", rich_help_panel=_RANKING),
]
FisherLabels = Annotated[
    str,
    typer.Option(
        help="Labels the Fisher information is taken at: given, sampled (drawn from the model), or exact (all).",
        rich_help_panel=_RANKING,
    ),
]
Aggregation = Annotated[
    str,
    typer.Option(
        help="How a layer's Fisher information becomes one number: frobenius, frobenius_per_tensor, trace, mean.",
        rich_help_panel=_RANKING,
    ),
]
HeadSeeds = Annotated[
    int,
    typer.Option(
        help="Average the ranking over so many freshly drawn heads, and tell how far the order depends on the head; "
        "0: the head that training starts with.",
        rich_help_panel=_RANKING,
    ),
]
DeltaEncoding = Annotated[
    str, typer.Option(help="How tensors are written: values, lossless, bf16, int8, int4 or sign.")
]
Seed = Annotated[int, typer.Option(help="Seed of the new head and of all draws.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show errors only.")]


@contextmanager
def errors_in_words(console: Console) -> Iterator[None]:
    """Show what the user can mend as a message without a traceback, and end with exit code 2."""
    with tidy_logging(console):
        try:
            yield
        except (ValueError, ImportError) as error:
            problem = Console(stderr=True, highlight=False)
            problem.print(f"[bold red]Error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(2) from error


def parse_layers(text: str | None) -> str | tuple[int | str, ...] | None:
    """Read the layers written on a command line.

    Example:

        >>> parse_layers("3,5,-1"), parse_layers("last:25%"), parse_layers("0-2,5")
        ((3, 5, -1), 'last:25%', ('0-2', 5))
    """
    if text is None:
        return None
    items = tuple(_number_or_text(item.strip()) for item in text.split(","))
    return items[0] if len(items) == 1 and isinstance(items[0], str) else items


def parse_depth_mark(name: str, text: str | None) -> int | float | None:
    """Read a layer's index or a fraction of the depth written on a command line.

    Example:

        >>> parse_depth_mark("n1", "4"), parse_depth_mark("n1", "0.2")
        (4, 0.2)
    """
    if text is None:
        return None
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"--{name} {text}: allowed are a layer's index and a fraction such as 0.2.") from None


def _number_or_text(item: str) -> int | str:
    return int(item) if item.lstrip("-").isdigit() else item
