"""What the demo has done so far, and how it trains and tells."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding

from peft_surgical.cli import demo_data as source
from peft_surgical.cli.console import RichProgress
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.run import TrainingRun


@dataclass(frozen=True)
class Scale:
    """How much the demo does.

    Args:
        train: Training tweets per task.
        validation: Validation tweets per task.
        epochs: Passes over the training tweets.
        samples: Tweets that the layers are ranked on.
        head_seeds: Freshly drawn heads that the ranking is averaged over.
    """

    train: int
    validation: int
    epochs: int
    samples: int
    head_seeds: int


FULL = Scale(train=900, validation=600, epochs=3, samples=100, head_seeds=3)
QUICK = Scale(train=270, validation=120, epochs=2, samples=48, head_seeds=2)
TOP = 2
LEARNING_RATES = {"head": 5e-2, "surgical": 1e-3, "last": 1e-3, "spafit": 1e-3}


@dataclass
class Demo:
    """What the demo has done so far.

    Args:
        console: Where it tells about it.
        folder: Where it writes.
        scale: How much it does.
        results: What `metrics.json` holds, by task and method.
        checks: What was checked, and whether it holds.
    """

    console: Console
    folder: Path
    scale: Scale
    results: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    checks: list[tuple[str, bool]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Tell something in a paragraph."""
        self.console.print(Padding(text, (0, 0, 0, 2)))

    def step(self, number: int, title: str) -> None:
        """Begin a step."""
        self.console.print()
        self.console.rule(f"[bold]{number}. {title}", align="left", style="cyan")

    def check(self, what: str, holds: bool) -> None:
        """Remember a check."""
        self.checks.append((what, holds))

    def run(self, task: str, method: str) -> TrainingRun:
        """A run of training on a task; the data lie in the demo's folder."""
        surgical: dict[str, Any] = {
            "top_k": TOP,
            "samples": self.scale.samples,
            "head_seeds": self.scale.head_seeds,
        }
        more = {"surgical": surgical, "last": {"top_k": TOP}, "head": {}, "spafit": {}}
        job = TrainingJob(
            model=str(source.encoder_folder()),
            data=str(self.folder / "data" / task),
            output=str(self.folder / (f"{task}-{method}" if method in ("head", "spafit") else task)),
            method=method,
            learning_rate=LEARNING_RATES[method],
            epochs=self.scale.epochs,
            max_length=48,
            select_on="none",
            **more[method],
        )
        return TrainingRun(job)

    def train(self, run: TrainingRun) -> dict[str, Any]:
        """Train and measure a run, and tell how good it became."""
        task = Path(run.job.data).name
        with closing(RichProgress(self.console, f"{task}, {run.job.method}", lines=False)) as progress:
            run.callbacks = [progress]
            run.fit()
        results = run.finish()
        self.results[task, run.job.method] = results
        accuracy, rows = results["evaluation"]["accuracy"], results["evaluation"]["samples"]
        layers = results["layers"].get("encoder")
        what = f"layers {' and '.join(map(str, layers))} and the head" if layers else "the head alone"
        self.say(f"Tuned {what}: [bold]{accuracy:.1%}[/] of {rows} held-out tweets right.")
        return results
