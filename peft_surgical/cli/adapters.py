"""The commands on saved adapters and checkpoints: from one to the other, what is in them, and how they are served."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from peft_surgical.cli.common import (
    Adapter,
    Base,
    Encoding,
    Html,
    MaxError,
    Output,
    check_plot,
    save_file,
    size,
)
from peft_surgical.training.options import check_writable


if TYPE_CHECKING:
    from torch.utils.data import DataLoader


def inspect(
    console: Console,
    adapters: Annotated[
        list[str], typer.Argument(help="One saved adapter to look at, or two to compare: folders or names on the hub.")
    ],
    base: Annotated[
        str | None,
        typer.Option(help="The base of two adapters, to show the cosine; for encoded ones it is found if not given."),
    ] = None,
    html: Html = None,
) -> None:
    """Show an adapter's layers, encodings, sizes and errors; or what two adapters have in common."""
    from peft_surgical.convert.inspect import compare_adapters, inspect_adapter

    if len(adapters) > 2:
        raise ValueError(f"{len(adapters)} adapters were given; allowed are one, or two to compare.")
    check_writable("--html", html, (".html",))
    alone = len(adapters) == 1
    found: Any = inspect_adapter(adapters[0]) if alone else compare_adapters(adapters[0], adapters[1], base)
    console.print(str(found), markup=False, soft_wrap=True)
    save_file(console, html, found.save_html)


def convert(
    console: Console,
    adapter: Adapter,
    output: Output,
    encoding: Encoding,
    max_error: MaxError = 0.0,
    base: Annotated[str | None, typer.Option(help="The base model, if not where the adapter's config says.")] = None,
    distil: Annotated[
        str | None,
        typer.Option(
            help="With --encoding sign: labelled text, as in train, on whose first rows better step sizes are found."
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="With --distil: how many rows.")] = 256,
    batch_size: Annotated[int, typer.Option(min=1, help="With --distil: rows per batch.")] = 16,
    text_columns: Annotated[
        list[str] | None,
        typer.Option("--text-column", help="With --distil: column with the text; twice for two texts, or found."),
    ] = None,
) -> None:
    """Write an adapter again with another encoding: smaller, or the plain values back."""
    from peft.utils import SAFETENSORS_WEIGHTS_NAME

    from peft_surgical.convert.convert import base_of, convert_adapter, distil_scales
    from peft_surgical.convert.inspect import inspect_adapter
    from peft_surgical.convert.merge import adapted_model
    from peft_surgical.files.safetensors_io import reset_mode
    from peft_surgical.methods.config import open_adapter

    check_writable("--output", output)
    progress = console.is_terminal and not console.quiet
    if distil is None:
        convert_adapter(adapter, output, encoding, max_error=max_error, base=base, progress=progress)
    elif encoding != "sign":
        raise ValueError(f"--distil finds step sizes for --encoding sign, not for {encoding}.")
    else:
        saved = open_adapter(adapter)
        before = base_of(saved, base)
        model = adapted_model(before, saved).eval()
        batches = _read_batches(before.source, distil, text_columns or (), rows, batch_size)
        found = distil_scales(model, batches, progress=progress)
        model.save_pretrained(str(output))
        reset_mode(output / SAFETENSORS_WEIGHTS_NAME)
        console.print(f"Mean squared error of the outputs: {found.before:.3g}, distilled {found.after:.3g}")
    written = inspect_adapter(output)
    console.print(str(written), markup=False, soft_wrap=True)
    console.print(f"\nSaved {output}: {size(written.nbytes)}, was {size(inspect_adapter(adapter).nbytes)}")


def export(
    console: Console,
    adapter: Adapter,
    output: Output,
    head: Annotated[bool, typer.Option("--head", help="Include the head: for PEFT itself, not for servers.")] = False,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Rank of the LoRA adapter that is made to be near a SURGICAL one.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="With --rank: the base, if not where the config says.")] = None,
) -> None:
    """Write a LoRA adapter for servers that take nothing else: a STRATIFIED adapter's own, or one near a SURGICAL."""
    from peft_surgical.convert.convert import export_lora
    from peft_surgical.convert.lora import approximate_lora

    check_writable("--output", output)
    if rank is None:
        left_out = export_lora(adapter, output, head=head)
    elif head:
        raise ValueError("--head goes with the LoRA part of a STRATIFIED adapter, without --rank.")
    else:
        found = approximate_lora(adapter, output, rank, base=base)
        console.print(str(found), markup=False, soft_wrap=True)
        left_out = found.left_out
    for name in left_out:
        console.print(f"left out: {name}", markup=False)
    console.print(f"Saved {output}; {len(left_out)} tensors are left out")


def _read_batches(model: str, data: str, text_columns: Sequence[str], rows: int, batch_size: int) -> DataLoader:
    """Batches of the first training rows of labelled text."""
    from torch.utils.data import DataLoader
    from transformers import DataCollatorWithPadding

    from peft_surgical.training.common import load_tokenizer
    from peft_surgical.training.data import find_split, read_splits
    from peft_surgical.training.tasks import encode, make_task

    tokenizer = load_tokenizer(model)
    task = make_task(read_splits(data), text_columns=text_columns)
    split = task.split(find_split(task.splits, "train") or next(iter(task.splits)))
    encoded: Any = encode(split.select(range(min(rows, len(split)))), tokenizer, 128)
    return DataLoader(encoded, batch_size=batch_size, collate_fn=DataCollatorWithPadding(tokenizer))


def serve_vllm(
    console: Console,
    server: Annotated[str, typer.Argument(help="The address of a vLLM server, started as docs/vllm.md says.")],
    tasks: Annotated[Path, typer.Option(help="A folder with a saved adapter per task, which the server reads too.")],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 8001,
    turn: Annotated[
        float, typer.Option(min=0.0, help="Seconds that a task keeps the server while others wait.")
    ] = 1.0,
) -> None:
    """Serve many tasks with one vLLM server: the model of a request is its task, whose weights the server takes."""
    import uvicorn

    from peft_surgical.vllm.client import ServedTasks
    from peft_surgical.vllm.router import create_router

    served = ServedTasks(server, tasks)
    base, names = served.base(), served.tasks()
    if not names:
        raise ValueError(f"--tasks {tasks} has no folder with a saved adapter.")
    served.switch(None)  # which shows whether the server was started as it should
    console.print(f"{len(names)} tasks on {base} at http://{host}:{port}/v1", markup=False)
    uvicorn.run(create_router(served, turn), host=host, port=port, log_level="warning")


def diff(
    console: Console,
    base: Base,
    tuned: Annotated[str, typer.Argument(help="The model that was fine-tuned from it.")],
    output: Output,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Keep only this many layers, the ones that moved the most.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0.0, help="Leave out layers that moved by no more than this, relative to their norm.")
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
    save_file(console, plot, found.movement.plot)
    save_file(console, html, lambda file: found.save_html(file, f"{base} → {tuned}"))


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
