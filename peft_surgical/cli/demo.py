"""`peft-surgical demo`: the whole way on a real encoder and real text, without a network, checked at the end."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from peft_surgical.cli import demo_data as source
from peft_surgical.cli import options
from peft_surgical.cli.console import make_console, ranking_table, share, size
from peft_surgical.cli.demo_run import FULL, QUICK, TOP, Demo
from peft_surgical.cli.demo_swap import Resident, answer, load_resident, peak_memory, swap


MARKER = "demo.json"
SWAPS = 100
SENTENCES = (
    "The crew was wonderful and we landed early, thank you!",
    "Three hours on hold and my bag is still missing.",
    "The new phone goes on sale on Friday.",
)


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything, in less than a minute.")] = False,
    output: Annotated[Path, typer.Option(help="The folder to write.")] = Path("peft-surgical-demo"),
    sentence: Annotated[
        list[str] | None, typer.Option("--sentence", "-s", help="A sentence to answer; may be repeated.")
    ] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Let me type sentences at the end.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """See the whole way: rank the layers, tune two tasks, swap them on one model, and check that all of it holds.

    The model and the text come from two packages of PyPI (the extra `demo`); nothing is downloaded. Takes about four
    minutes on two cores. The exit code is 1 if a check fails.
    """
    console = make_console(quiet=quiet)
    started = time.perf_counter()
    with options.errors_in_words(console):
        _open(output)
        run = Demo(console, output, QUICK if quick else FULL)
        _introduce(run)
        _rank_and_tune(run)
        _tune_second_task(run)
        _tune_by_spafit(run)
        _show_costs(run)
        resident = _swap(run)
        _answer(run, resident, [*SENTENCES, *(sentence or ())])
        while ask and (typed := typer.prompt("\n  Your sentence (empty to go on)", default="", show_default=False)):
            _answer(run, resident, [typed])
    _show_checks(run, time.perf_counter() - started)
    (output / MARKER).write_text(json.dumps({what: holds for what, holds in run.checks}, indent=2) + "\n")
    if not all(holds for _, holds in run.checks):
        raise typer.Exit(1)
    _say_what_next(run)


def _open(folder: Path) -> None:
    """Empty the folder of an earlier demo."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise ValueError(f"--output {folder} holds files that no demo wrote. Choose another folder.")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).write_text("{}\n")


def _introduce(run: Demo) -> None:
    scale = run.scale
    run.console.rule("[bold]peft-surgical demo", style="cyan")
    run.say("Fine-tune only the layers that matter, keep one model in memory, and swap small files per task.\n")
    run.say(f"Encoder  MiniLM, a pretrained BERT with 6 layers, from the package {source.ENCODER_PACKAGE}")
    run.say(f"Text     tweets labelled by people, from the package {source.TWEETS_PACKAGE}")
    run.say(f"Task 1   [bold]sentiment[/]: {', '.join(source.SENTIMENT)}")
    run.say(f"Task 2   [bold]opinion[/]: {', '.join(source.OPINION)} (of other tweets)")
    run.say(f"Rows     per task {scale.train} to train on and {scale.validation} to measure on")
    source.write_tasks(run.folder / "data", train=scale.train, validation=scale.validation)


def _rank_and_tune(run: Demo) -> None:
    run.step(1, "Which layers matter for sentiment?")
    surgical = run.run("sentiment", "surgical")
    ranking = surgical.rank(progress=False)
    assert ranking is not None
    run.say(
        f"By the diagonal of the Fisher information on {run.scale.samples} training tweets (Lodha et al., 2023): "
        "how much a layer's weights sway the prediction."
    )
    run.console.print(ranking_table(ranking, TOP))
    ranking.plot(str(run.folder / "ranking.png"))
    run.say(f"Took {surgical.seconds['rank']:.1f} s. The same as a plot: {run.folder / 'ranking.png'}")
    run.check("every layer has a score above zero", all(score > 0 for score in ranking.scores))

    run.step(2, f"Sentiment: tune the top {TOP} layers")
    head = run.train(run.run("sentiment", "head"))
    tuned = run.train(surgical)
    _check_gain(run, "sentiment", head, tuned)


def _tune_second_task(run: Demo) -> None:
    run.step(3, f"Opinion: tune the last {TOP} layers")
    run.say("The simplest choice (Lee et al., 2019), which needs no ranking; and another number of classes.")
    head = run.train(run.run("opinion", "head"))
    tuned = run.train(run.run("opinion", "last"))
    _check_gain(run, "opinion", head, tuned)


def _tune_by_spafit(run: Demo) -> None:
    run.step(4, "Opinion again, by SPAFIT")
    run.say(
        "A little more from layer to layer (Arora & Wang, 2024): the lowest stays frozen, the next trains its bias "
        "terms, the others get LoRA."
    )
    tuned = run.train(run.run("opinion", "spafit"))
    _check_gain(run, "opinion", run.results["opinion", "head"], tuned, "SPAFIT beats")


def _check_gain(
    run: Demo, task: str, head: dict[str, Any], tuned: dict[str, Any], who: str = "two tuned layers beat"
) -> None:
    gain = tuned["evaluation"]["accuracy"] - head["evaluation"]["accuracy"]
    run.check(f"{task}: {who} the head alone (by {100 * gain:+.1f} points)", gain > 0)


def _show_costs(run: Demo) -> None:
    run.step(5, "What it took")
    table = Table()
    table.add_column("task")
    table.add_column("tuned")
    for name in ("accuracy", "parameters", "of all", "file", "seconds"):
        table.add_column(name, justify="right")
    for (task, method), results in run.results.items():
        parameters = results["parameters"]
        layers = results["layers"].get("encoder")
        table.add_row(
            task,
            f"{'SPAFIT, ' if method == 'spafit' else ''}layers {', '.join(map(str, layers))} + head"
            if layers
            else "head alone",
            f"{results['evaluation']['accuracy']:.1%}",
            size(parameters["trained"], ""),
            share(parameters["trained"], parameters["total"]),
            size(sum(results["files"].values())),
            f"{results['seconds']['train']:.0f}",
            style=None if method == "head" else "bold",
            end_section=method in ("surgical", "spafit"),
        )
    run.console.print(table)
    whole = source.encoder_folder() / "model.safetensors"
    run.say(f"The whole model would be {size(whole.stat().st_size)} per task.")
    for task, method in (("sentiment", "surgical"), ("opinion", "last"), ("opinion", "spafit")):
        results = run.results[task, method]
        tensors = 4 * results["parameters"]["trained"]
        extra = sum(results["files"].values()) / tensors - 1
        name = f"{task}, SPAFIT" if method == "spafit" else task
        run.check(f"{name}: the file is {extra:.2%} larger than its tensors (at most 1%)", 0 <= extra <= 0.01)


def _swap(run: Demo) -> Resident:
    run.step(6, f"One model in memory, three adapters, {SWAPS} swaps")
    folders = {name: run.folder / name for name in ("sentiment", "opinion", "opinion-spafit")}
    resident = load_resident(str(source.encoder_folder()), folders)
    swapped = swap(resident, [*SENTENCES], SWAPS)
    run.say(
        f"All three files are loaded onto one encoder, SPAFIT's beside the surgical ones. A swap takes "
        f"{1000 * swapped.seconds:.1f} ms "
        "and writes nothing to the encoder's weights."
    )
    run.check(
        f"{swapped.equal} of {SWAPS} swaps give the logits of the task loaded alone, bit for bit",
        swapped.equal == SWAPS,
    )
    run.check("without a task the model gives the encoder's own logits, bit for bit", swapped.base_equal)
    run.check("the encoder's weights are those of the package, bit for bit", swapped.weights_equal)
    return resident


def _answer(run: Demo, resident: Resident, sentences: Sequence[str]) -> None:
    table = Table()
    table.add_column("sentence", overflow="fold")
    for task in resident.labels:
        table.add_column(task)
    for text in sentences:
        answers = (answer(resident, task, text) for task in resident.labels)
        table.add_row(text, *(f"{label} ({probability:.0%})" for label, probability in answers))
    run.console.print(table)


def _show_checks(run: Demo, seconds: float) -> None:
    run.step(7, "Checks")
    for what, holds in run.checks:
        run.console.print(f"  {'[green]✓[/]' if holds else '[bold red]✗ FAILED:[/]'} {what}")
    memory = peak_memory()
    run.say(f"All in {seconds:.0f} s" + (f", with {size(memory)} of memory at most." if memory else "."))


def _say_what_next(run: Demo) -> None:
    folder = run.folder
    lines = [
        (
            f"less {folder / 'sentiment' / 'README.md'}",
            "the model card: ranking, exact settings, results, use in Python",
        ),
        (f"peft-surgical evaluate {folder / 'sentiment'}", "measure it again"),
        (
            "peft-surgical train --model MODEL --data DATA --output OUT",
            "the same on your model and text; see train --help",
        ),
        ("peft-surgical rank --model MODEL --data DATA --plot ranking.png", "which layers matter for your task"),
    ]
    run.step(8, "What next")
    for command, about in lines:
        run.console.print(f"  [cyan]{command}[/]\n      {about}", soft_wrap=True)
