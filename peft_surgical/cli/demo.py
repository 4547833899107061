"""`peft-surgical demo`: the whole way on a real encoder and real text, without a network, checked at the end."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from peft_surgical.cli import demo_data
from peft_surgical.cli.common import size
from peft_surgical.training.options import check_writable


if TYPE_CHECKING:
    from peft_surgical.training.run import TrainingRun

SWAPPED = {"sentiment": demo_data.SENTIMENT, "opinion": demo_data.OPINION, "opinion-spafit": demo_data.OPINION}
"""The folders of the adapters that are swapped, and the classes of each."""

MARKER = "demo.json"
SWAPS = 100
TOP = 2
# rows per task, passes over them, rows to rank on, heads to average the ranking over
FULL = {"train": 900, "validation": 600, "epochs": 3, "samples": 100, "head_seeds": 3}
QUICK = {"train": 270, "validation": 120, "epochs": 2, "samples": 48, "head_seeds": 2}
LEARNING_RATES = {"head": 5e-2, "surgical": 1e-3, "spafit": 1e-3}
WAYS: dict[str, dict[str, Any]] = {
    "head alone": {"method": "head"},
    "equal distances": {"method": "surgical", "layers": f"spread:{TOP}"},
    "by Fisher": {"method": "surgical", "top_k": TOP, "score": "fisher"},
    "last layers": {"method": "surgical", "layers": f"last:{TOP}"},
    "middle layers": {"method": "surgical", "layers": f"middle:{TOP}"},
    "SPAFIT": {"method": "spafit"},
}
FOLDERS = {"head alone": "-head", "by Fisher": "-fisher", "last layers": "-last", "SPAFIT": "-spafit"}
SENTENCES = (
    "The crew was wonderful and we landed early, thank you!",
    "Three hours on hold and my bag is still missing.",
    "The new phone goes on sale on Friday.",
)


def demo(
    console: Console,
    quick: Annotated[bool, typer.Option("--quick", help="Less of everything, in one or two minutes.")] = False,
    output: Annotated[Path, typer.Option(help="The folder to write.")] = Path("peft-surgical-demo"),
    sentence: Annotated[
        list[str] | None, typer.Option("--sentence", "-s", help="A sentence to answer; may be repeated.")
    ] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Let me type sentences at the end.")] = False,
) -> None:
    """See the whole way: rank layers, tune two tasks, swap them on one model, and check that all of it holds.

    The model and the text come from two packages of PyPI (the extra `demo`); nothing is downloaded. Takes about five
    minutes on two cores. The exit code is 1 if a check fails.
    """
    started = time.perf_counter()
    check_writable("--output", output)
    if output.exists() and any(output.iterdir()):
        if not (output / MARKER).exists():
            raise ValueError(f"--output {output} holds files that were not written by the demo. Choose another one.")
        shutil.rmtree(output)  # of an earlier demo
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).write_text("{}\n")
    run = Demo(console, output, QUICK if quick else FULL)
    run.introduce()
    run.tune_sentiment()
    run.tune_opinion()
    run.show_costs()
    run.load()
    run.swap()
    run.answer([*SENTENCES, *(sentence or ())])
    while ask and (typed := typer.prompt("\n  Your sentence (empty to go on)", default="", show_default=False)):
        run.answer([typed])
    run.show_checks()
    run.say(f"All in {time.perf_counter() - started:.0f} s.")
    (output / MARKER).write_text(json.dumps(run.checks, indent=2) + "\n")
    if not all(run.checks.values()):
        raise typer.Exit(1)
    run.step("8. What next")
    run.say(f"[cyan]peft-surgical evaluate {output / 'sentiment'}[/] measures it again")
    run.say("[cyan]peft-surgical train --model MODEL --data DATA --output OUT[/] is the same on your model and text")


class Demo:
    """The steps of the demo, with the results of each run by task and method, and the checks and whether they hold."""

    def __init__(self, console: Console, folder: Path, scale: dict[str, int]):
        self.console, self.folder, self.scale = console, folder, scale
        self.results: dict[tuple[str, str], dict[str, Any]] = {}
        self.checks: dict[str, bool] = {}

    def say(self, text: str) -> None:
        self.console.print(Padding(text, (0, 0, 0, 2)))

    def step(self, title: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{title}", align="left", style="cyan")

    def introduce(self) -> None:
        train, validation = self.scale["train"], self.scale["validation"]
        self.console.rule("[bold]peft-surgical demo", style="cyan")
        self.say(
            "Fine-tune a few layers, keep one model in memory, and swap small files per task.\n\n"
            f"Encoder  MiniLM, a pretrained BERT with 6 layers, from the package {demo_data.ENCODER_PACKAGE}\n"
            f"Text     tweets labelled by people, from the package {demo_data.TWEETS_PACKAGE}\n"
            f"Task 1   [bold]sentiment[/]: {', '.join(demo_data.SENTIMENT)}\n"
            f"Task 2   [bold]opinion[/]: {', '.join(demo_data.OPINION)} (of other tweets)\n"
            f"Rows     per task {train} to train on and {validation} to measure on"
        )
        demo_data.write_tasks(self.folder / "data", train=train, validation=validation)

    def tune_sentiment(self) -> None:
        """Rank the layers, and tune the best beside those that no data choose."""
        self.step("1. Layers for sentiment")
        run = self.make_run("sentiment", "by Fisher")
        ranking: Any = run.rank(progress=False)
        self.say(
            f"By the diagonal of the Fisher information on {self.scale['samples']} training tweets (Lodha et al., "
            "2023): how much a layer's weights sway the prediction.\n"
        )
        self.console.print(str(ranking), markup=False, soft_wrap=True)
        ranking.plot(str(self.folder / "ranking.png"))
        self.say(f"\nTook {run.seconds['rank']:.1f} s. The same as a plot: {self.folder / 'ranking.png'}")
        self.checks["every layer has a score above zero"] = all(score > 0 for score in ranking.scores)
        self.step(f"2. Sentiment: which {TOP} layers to tune?")
        self.say(
            "No choice is the best everywhere. On ten tasks layers at equal distances did better on average than "
            "those with the most Fisher information, and than the last ones (docs/results.md). On this one:"
        )
        self.tune("sentiment", "head alone")
        self.tune("sentiment", "equal distances")
        self.tune("sentiment", "by Fisher", run)
        last = range(len(ranking.scores) - TOP, len(ranking.scores))
        if sorted(ranking.order[:TOP]) == [*last]:
            self.say("The layers by Fisher are the last ones here.")
        else:
            self.tune("sentiment", "last layers")

    def tune_opinion(self) -> None:
        self.step(f"3. Opinion: tune the middle {TOP} layers")
        self.say("This task has other layers, and another number of classes.")
        self.tune("opinion", "head alone")
        self.tune("opinion", "middle layers")
        self.step("4. Opinion again, by SPAFIT")
        self.say(
            "A little more from layer to layer (Arora & Wang, 2024): the lowest stays frozen, the next trains its "
            "bias terms, the others get LoRA."
        )
        self.tune("opinion", "SPAFIT")

    def make_run(self, task: str, way: str) -> TrainingRun:
        from peft_surgical.training.job import TrainingJob
        from peft_surgical.training.run import TrainingRun

        options = WAYS[way]
        if "score" in options:
            options = options | {name: self.scale[name] for name in ("samples", "head_seeds")}
        job = TrainingJob(
            model=str(demo_data.encoder_folder()),
            data=str(self.folder / "data" / task),
            output=str(self.folder / f"{task}{FOLDERS.get(way, '')}"),
            learning_rate=LEARNING_RATES[options["method"]],
            epochs=self.scale["epochs"],
            max_length=48,
            select_on="none",
            **options,
        )
        return TrainingRun(job)

    def tune(self, task: str, way: str, run: TrainingRun | None = None) -> None:
        """Train and measure a run, and check that it beats the head alone."""
        from peft_surgical.training.progress import StepBar

        run = run or self.make_run(task, way)
        run.callbacks = [StepBar()] if self.console.is_terminal and not self.console.quiet else []
        run.fit()
        self.results[task, way] = results = run.finish()
        accuracy, rows = results["evaluation"]["accuracy"], results["evaluation"]["samples"]
        self.say(
            f"{way[0].upper()}{way[1:]}, {_tuned(results)}: [bold]{accuracy:.1%}[/] of {rows} held-out tweets right."
        )
        if way != "head alone":
            gain = accuracy - self.results[task, "head alone"]["evaluation"]["accuracy"]
            self.checks[f"{task}: {way}, {100 * gain:+.1f} points over the head alone"] = gain > 0

    def show_costs(self) -> None:
        """Show what each run took, and check the sizes of the files."""
        self.step("5. What it took")
        table = Table("task", "way", "tuned")
        for name in ("right", "trained", "file", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        for (task, way), results in self.results.items():
            trained = results["parameters"]["trained"]
            nbytes = sum(results["files"].values())
            accuracy, seconds = results["evaluation"]["accuracy"], results["seconds"]["train"]
            cells = (f"{accuracy:.1%}", size(trained, ""), size(nbytes), f"{seconds:.0f} s")
            is_swapped = f"{task}{FOLDERS.get(way, '')}" in SWAPPED
            table.add_row(task, way, _tuned(results), *cells, style="bold" if is_swapped else None)
            extra = nbytes - 4 * trained  # the header, in which each tensor has its place and its checksum
            if is_swapped:
                text = f"{task}, {way}: the file is {size(extra)} larger than its tensors (at most 32 kB)"
                self.checks[text] = 0 <= extra <= 32_000
        self.console.print(table)
        whole = demo_data.encoder_folder() / "model.safetensors"
        total = next(iter(self.results.values()))["parameters"]["total"]
        self.say(f"The whole model, {size(total, '')} parameters, would be {size(whole.stat().st_size)} per task.")

    def load(self) -> None:
        """Load all adapters onto one encoder in memory."""
        from peft_surgical.bank import DeltaBank
        from peft_surgical.training.common import load_classifier, load_tokenizer

        self.step(f"6. One model in memory, three adapters, {SWAPS} swaps")
        self.tokenizer: Any = load_tokenizer(str(demo_data.encoder_folder()))
        model, _ = load_classifier(str(demo_data.encoder_folder()), demo_data.SENTIMENT, self.tokenizer)
        self.weights = dict(model.named_parameters())  # the encoder's own, which adapters move but leave as they are
        self.bank = DeltaBank(model)
        for task in SWAPPED:
            self.bank.add(task, self.folder / task)
            self.bank.activate(task)  # reads it into memory

    def swap(self) -> None:
        """Swap tasks at random, and compare the logits each time with those of the task loaded alone."""
        import torch

        from peft_surgical.training.common import load_classifier, load_trained

        encoder, alone = str(demo_data.encoder_folder()), {}
        for task, labels in SWAPPED.items():
            model = load_trained(str(self.folder / task), encoder, labels, self.tokenizer)
            alone[task] = self.logits(model, SENTENCES)
        draw, seconds, equal = random.Random(0), 0.0, 0
        for _ in range(SWAPS):
            task = draw.choice([*SWAPPED])
            started = time.perf_counter()
            self.bank.activate(task)
            seconds += time.perf_counter() - started
            with self.bank.task(task) as model:
                equal += torch.equal(self.logits(model, SENTENCES), alone[task])
        self.say(
            "All three files are loaded onto one encoder, SPAFIT's beside the surgical ones. A swap takes "
            f"{1000 * seconds / SWAPS:.1f} ms and writes nothing to the encoder's weights."
        )
        fresh = load_classifier(encoder, demo_data.SENTIMENT, self.tokenizer)[0].eval()
        with self.bank.task(None) as model:
            is_base = torch.equal(self.logits(model, SENTENCES), self.logits(fresh, SENTENCES))
        untouched = all(torch.equal(self.weights[name], tensor) for name, tensor in fresh.named_parameters())
        self.checks[f"{equal} of {SWAPS} swaps give the logits of the task loaded alone, bit for bit"] = equal == SWAPS
        self.checks["without a task the model gives the encoder's own logits, bit for bit"] = is_base
        self.checks["the encoder's weights are those of the package, bit for bit"] = untouched

    def logits(self, model: Any, texts: Sequence[str]) -> Any:
        return model(**self.tokenizer([*texts], padding=True, return_tensors="pt")).logits.detach()

    def answer(self, sentences: Sequence[str]) -> None:
        """Show what each task says of sentences: the class, and its probability."""
        table = Table("sentence", *SWAPPED)
        for text in sentences:
            answers = []
            for task, labels in SWAPPED.items():
                with self.bank.task(task) as model:
                    probabilities = self.logits(model, [text])[0].softmax(-1)
                answers.append(f"{labels[int(probabilities.argmax())]} ({float(probabilities.max()):.0%})")
            table.add_row(text, *answers)
        self.console.print(table)

    def show_checks(self) -> None:
        self.step("7. Checks")
        for what, holds in self.checks.items():
            self.console.print(f"  {'[green]✓[/]' if holds else '[bold red]✗ FAILED:[/]'} {what}")


def _tuned(results: dict[str, Any]) -> str:
    layers = results["layers"].get("encoder")
    return f"layers {', '.join(map(str, layers))}" if layers else "no layer"
