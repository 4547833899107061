"""The command `peft-surgical`: rank, train, evaluate, inspect, diff, merge, convert, export-lora, demo."""

from __future__ import annotations

import typer

from peft_surgical.cli import convert, demo, diff, evaluate, inspect, merge, rank, train


app = typer.Typer(
    name="peft-surgical",
    help="Fine-tune only the layers that matter, and keep what changed in a small file.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(rank.rank)
app.command()(train.train)
app.command()(evaluate.evaluate)
app.command()(inspect.inspect)
app.command()(diff.diff)
app.command()(merge.merge)
app.command()(convert.convert)
app.command("export-lora")(convert.export)
app.command()(demo.demo)


if __name__ == "__main__":
    app()
