"""`peft-surgical inspect`: what is in saved adapters."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def inspect(
    console: Console,
    adapters: Annotated[
        list[str], typer.Argument(help="One saved adapter to look at, or two to compare: folders or names on the hub.")
    ],
    base: Annotated[
        str | None,
        typer.Option(help="The base of two adapters, to show the cosine; for encoded ones it is found if not given."),
    ] = None,
) -> None:
    """Show an adapter's layers, encodings, sizes and errors; or what two adapters have in common."""
    from peft_surgical.convert.inspect import compare_adapters, inspect_adapter

    if len(adapters) > 2:
        raise ValueError(f"{len(adapters)} adapters were given; allowed are one, or two to compare.")
    alone = len(adapters) == 1
    found = inspect_adapter(adapters[0]) if alone else compare_adapters(adapters[0], adapters[1], base)
    console.print(str(found), markup=False, soft_wrap=True)
