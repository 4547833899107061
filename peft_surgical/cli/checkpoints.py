"""`peft-surgical diff`, `pack` and `merge`: adapters from checkpoints, and a checkpoint from base and adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from peft_surgical.cli.common import Adapter, Base, Encoding, Html, MaxError, Output, check_plot, size
from peft_surgical.training.options import check_writable


def diff(
    console: Console,
    base: Base,
    tuned: Annotated[str, typer.Argument(help="The model that was fine-tuned from it.")],
    output: Output,
    top_k: Annotated[
        int | None, typer.Option(help="Keep only this many layers, the ones that moved the most.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Leave out layers that moved by no more than this, relative to their norm.")
    ] = 0.0,
    embeddings: Annotated[
        bool | None,
        typer.Option(
            "--embeddings/--no-embeddings",
            help="Include token embeddings that differ. By default they are, except that resized ones are an error.",
        ),
    ] = None,
    encoding: Encoding = "values",
    max_error: MaxError = 0.0,
    plot: Annotated[Path | None, typer.Option(help="Save a heat map of what moved here (.png, .pdf, .svg).")] = None,
    html: Html = None,
) -> None:
    """Turn a fine-tuned checkpoint into an adapter that holds only the layers that differ, and the head.

    With the defaults the adapter restores the tuned model bit for bit. The checkpoints are compared one tensor at a
    time.
    """
    from peft_surgical.convert.diff import diff_checkpoints
    from peft_surgical.training.card import share

    check_writable("--output", output)
    check_plot("--plot", plot)
    check_writable("--html", html, (".html",))
    found = diff_checkpoints(
        base,
        tuned,
        output,
        threshold=threshold,
        top_k=top_k,
        embeddings=embeddings,
        encoding=encoding,
        max_error=max_error,
        progress=console.is_terminal and not console.quiet,
    )
    console.print(str(found.movement), markup=False, soft_wrap=True)
    if found.left_out:
        console.print(f"\n{len(found.left_out)} tensors that differ are left out, such as {found.left_out[0]}.")
    part = share(found.nbytes, found.nbytes_tuned)
    console.print(f"\nSaved layers {found.config.layers} in {output}: {size(found.nbytes)}, {part} of the model")
    if plot is not None:
        found.movement.plot(plot)
        console.print(f"Plotted {plot}")
    if html is not None:
        found.save_html(html, f"{base} → {tuned}")
        console.print(f"Saved {html}")


def merge(
    console: Console,
    base: Base,
    adapter: Adapter,
    output: Output,
    dtype: Annotated[
        str | None, typer.Option(help="Write float32, bfloat16 or float16; by default what the base has.")
    ] = None,
    max_shard_size: Annotated[
        str | None, typer.Option(help="Split the weights into files of this size; by default as the base's are.")
    ] = None,
) -> None:
    """Write a checkpoint that plain transformers, and every server, loads. The base is not changed."""
    import torch

    from peft_surgical.convert.merge import merge_checkpoint

    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype {dtype}: allowed are float32, bfloat16 and float16.")
    check_writable("--output", output)
    model = merge_checkpoint(
        base,
        adapter,
        output,
        dtype=None if dtype is None else getattr(torch, dtype),
        max_shard_size=max_shard_size,
        progress=console.is_terminal and not console.quiet,
    )
    console.print(f"Saved a {type(model).__name__} in {output}")


def pack(
    console: Console,
    base: Base,
    tuned: Annotated[
        list[str], typer.Argument(help="Models that were fine-tuned from it, or folders that hold such models.")
    ],
    output: Output,
    encoding: Encoding = "auto",
    max_error: MaxError = 0.0,
    text: Annotated[
        list[str] | None,
        typer.Option(help="What the models are asked, as often as wanted; by default texts are made up."),
    ] = None,
) -> None:
    """Turn full fine-tunes of one base into adapters, each checked by its answers, for a bank to serve.

    With the defaults the adapters restore the fine-tunes bit for bit. One that cannot be packed leaves the others.
    """
    from peft_surgical.convert.pack import pack_checkpoints
    from peft_surgical.training.common import load_tokenizer

    check_writable("--output", output)
    inputs = dict(load_tokenizer(base)(text, padding=True, return_tensors="pt")) if text else None
    progress = console.is_terminal and not console.quiet
    found = pack_checkpoints(
        base, tuned, output, encoding=encoding, max_error=max_error, inputs=inputs, progress=progress
    )
    console.print(str(found), markup=False, soft_wrap=True)
    if found.failed:
        reasons = "\n".join(f"{packed.name}: {packed.error}" for packed in found.failed)
        raise ValueError(f"{len(found.failed)} of {len(found)} were not packed:\n{reasons}")
