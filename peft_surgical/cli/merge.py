"""`peft-surgical merge`: an ordinary checkpoint from a base and an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def merge(
    console: Console,
    base: Annotated[str, typer.Argument(help="The base model: a folder, or a name on the hub.")],
    adapter: Annotated[str, typer.Argument(help="The adapter: a folder, or its name on the hub.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write the checkpoint to.")],
    dtype: Annotated[
        str | None, typer.Option(help="Write float32, bfloat16 or float16; by default what the base has.")
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Split the weights into files of this size.")] = "5GB",
) -> None:
    """Write a checkpoint that plain transformers, and every server, loads. The base is not changed."""
    import torch

    from peft_surgical.convert.merge import merge_checkpoint

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype}: allowed are float32, bfloat16 and float16.")
    model = merge_checkpoint(
        base,
        adapter,
        output,
        dtype=None if dtype is None else getattr(torch, dtype),
        max_shard_size=max_shard_size,
        progress=console.is_terminal and not console.quiet,
    )
    console.print(f"Saved a {type(model).__name__} in {output}")
