"""The command `peft-surgical`. PyTorch and the like are imported when a command runs, not to show its help."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from peft_surgical.cli import adapters, demo, plan, train
from peft_surgical.cli.common import as_command
from peft_surgical.training.job import JOB_OPTIONS


app = typer.Typer(
    name="peft-surgical",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(version("peft-surgical"))
        raise typer.Exit


@app.callback()
def _command(
    version: Annotated[bool, typer.Option("--version", help="Show the version.", callback=_show_version)] = False,
) -> None:
    """Fine-tune a few layers of a transformer, and keep what changed in a small file."""


for name, command in {
    "rank": as_command(plan.rank, plan.RANK_FIELDS, plan.RANK_DEFAULTS),
    "plan": as_command(plan.plan, JOB_OPTIONS, {"output": ""}),
    "train": as_command(train.train, JOB_OPTIONS),
    "evaluate": as_command(train.evaluate),
    "predict": as_command(train.predict),
    "inspect": as_command(adapters.inspect),
    "diff": as_command(adapters.diff),
    "merge": as_command(adapters.merge),
    "pack": as_command(adapters.pack),
    "convert": as_command(adapters.convert),
    "export-lora": as_command(adapters.export),
    "serve-vllm": as_command(adapters.serve_vllm),
    "demo": as_command(demo.demo),
}.items():
    app.command(name)(command)
