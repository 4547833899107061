"""The figures about layers: how stable a ranking is, and how it is made; questions 2, 3 and 4."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.evidence import records
from benchmarks.evidence.findings import Results, code_agreement, samples_frame
from benchmarks.evidence.panels import BLUE, GREEN, ORANGE, TITLES, plt, small_multiples


def published(results: Results) -> Any:
    """The published code against the formula: how far both rank alike, and what their choices score."""
    k = results.k
    panels = {
        f"Kendall's tau of both rankings of {results.depth} layers": lambda task: [
            tau for tau, _ in code_agreement(results, task)
        ],
        f"metric of the top {k}, code - formula, points": lambda task: results.differences(
            f"published_code:{k}", f"fisher:{k}", task
        ),
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for axis, (label, values_of) in zip(axes, panels.items(), strict=True):
        for place, task in enumerate(results.tasks):
            values = values_of(task)
            axis.plot(values, [place] * len(values), ls="", marker="o", ms=4, mfc="none", color=BLUE, label="a seed")
            if values:
                axis.plot([np.mean(values)], [place], ls="", marker="|", ms=14, mew=2, color=ORANGE, label="mean")
        axis.axvline(0, color="black", lw=1)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_yticks(range(len(results.tasks)), [TITLES[task] for task in results.tasks])
    axes[0].invert_yaxis()
    handles, labels = axes[0].get_legend_handles_labels()
    axes[0].legend(handles[:2], labels[:2], loc="upper left")
    return figure


def samples(results: Results) -> Any:
    """How many samples are enough."""
    frame = samples_frame(results)
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for axis, column, label in zip(
        axes, ("tau", "overlap"), ("Kendall's tau", f"layers shared by the top {results.k}"), strict=True
    ):
        for kind, color in (("given", BLUE), ("sampled", ORANGE), ("exact", GREEN)):
            found = frame[frame["kind"] == kind].groupby("n")[column]
            axis.plot(found.mean().index, found.mean(), color=color, marker="o", label=f"{kind} labels")
            axis.fill_between(found.mean().index, found.quantile(0.1), found.quantile(0.9), color=color, alpha=0.12)
        axis.set_xscale("log")
        axis.set_xlabel("samples")
        axis.set_ylabel(f"{label}, against the most samples", fontsize=9)
        axis.set_ylim(-0.05, 1.05 * (1 if column == "tau" else results.k))
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure


def tracked(results: Results) -> Any:
    """Figures 2 and 3 of Lodha et al.: the rank of each layer while the whole model is tuned."""
    colors = plt.get_cmap("viridis")(np.linspace(0, 1, results.depth))

    def each(axis: Any, task: str) -> None:
        epochs, ranks = ranks_while_tuning(results, task)
        for layer in range(results.depth if epochs else 0):
            axis.plot(epochs, ranks[:, layer], color=colors[layer], marker=".", label=f"layer {layer}")
        axis.set_xticks(epochs)
        axis.set_yticks(range(1, results.depth + 1, 2))
        axis.invert_yaxis()

    return small_multiples(results, each, "epoch", "rank of the layer")


def tracked_deviation(results: Results) -> Any:
    """Figures 4 and 5 of Lodha et al.: how far the rank of each layer moves while the whole model is tuned."""

    def each(axis: Any, task: str) -> None:
        epochs, ranks = ranks_while_tuning(results, task)
        if epochs:
            axis.bar(range(results.depth), ranks.std(0), color=BLUE, label="observed")
            chance = (results.depth**2 - 1) ** 0.5 / 12**0.5
            axis.axhline(chance, color="black", lw=1, ls=":", label="orders at random")
        axis.set_xticks(range(0, results.depth, 2))

    return small_multiples(results, each, "layer", "deviation of its rank")


def ranks_while_tuning(results: Results, task: str) -> tuple[list[int], np.ndarray]:
    """The epochs at which the layers of a task were ranked, and their ranks from 1, (epochs, layers)."""
    for record in records.read(results.folder / "track.jsonl"):
        if record["task"] == task:
            measured = record["points"]
            ranks = [1 + np.argsort(np.argsort(-np.array(point["scores"]))) for point in measured]
            return [point["epoch"] for point in measured], np.array(ranks)
    return [], np.empty((0, results.depth))
