"""Draw the figures of docs/results.md.

python benchmarks/plots.py mpnet                  # into docs/figures/
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import plans
import records
from comparison_tables import criteria_plans, lodha_plans, spafit_plans
from findings import RESULTS, Results, interval, samples_frame
from tables import PAGE


matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


FIGURES = PAGE.parent / "figures"
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#888888", "#d55e00"
TITLES = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "stsb": "STS-B",
    "rte": "RTE",
    "wnli": "WNLI",
    "cb": "CB",
    "copa": "COPA",
    "multirc": "MultiRC",
    "wic": "WiC",
    "wsc": "WSC",
}


def small_multiples(results: Results, each: Callable[[Any, str], None], x: str, y: str) -> Any:
    """A figure with a panel for each task."""
    columns = min(4, len(results.tasks) + 1)  # with room for the legend
    rows = -(-len(results.tasks) // columns)
    size = (3 * columns, 2.6 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis, task in zip(axes.flat, results.tasks, strict=False):
        axis.set_title(TITLES[task], fontsize=11)
        axis.grid(alpha=0.3)
        each(axis, task)
    for axis in axes.flat[len(results.tasks) :]:
        axis.set_axis_off()
    handles, labels = axes.flat[0].get_legend_handles_labels()
    if labels and len(results.tasks) < rows * columns:
        axes.flat[-1].legend(handles, labels, loc="center", fontsize=10)
    elif labels:
        figure.legend(handles, labels, loc="outside lower center", ncols=4)
    figure.supxlabel(x)
    figure.supylabel(y)
    return figure


def spread(results: Results, plan: str, task: str) -> tuple[float, float]:
    """The metric in points and half its interval over seeds, 0 for one seed."""
    mean, half = interval([100 * value for value in results.values(plan, task).values()])
    return mean, 0.0 if np.isnan(half) else half


def lodha(results: Results) -> Any:
    """Figures 6 and 7 of Lodha et al., with last-k and random beside."""
    k = results.k

    def each(axis: Any, task: str) -> None:
        for name, color in (("fisher", BLUE), ("last", ORANGE)):
            values = [spread(results, f"{name}:{n}", task) for n in range(1, k + 1)]
            label = "top k by Fisher" if name == "fisher" else "last k"
            axis.errorbar(range(1, k + 1), *zip(*values, strict=True), color=color, marker="o", ms=4, label=label)
        draws = [results.mean(f"random{d}:{k}", task) * 100 for d in range(5)]
        axis.scatter([k] * 5, draws, color=GREY, marker="x", label=f"random {k}", zorder=3)
        axis.scatter([1], [100 * results.mean("fisher:-1", task)], color=RED, marker="v", label="bottom 1 by Fisher")
        for plan, style in (("full", "-"), ("head", ":")):
            axis.axhline(100 * results.mean(plan, task), color="black", ls=style, lw=1, label=plan)
        axis.set_xticks(range(1, k + 1))

    return small_multiples(results, each, "layers tuned", "metric, points")


def lodha_relative(results: Results) -> Any:
    """Figure 1 of Lodha et al.: points relative to full tuning."""
    named = {p: n for p, n in lodha_plans(results).items() if p != "full"}
    values = np.array([[100 * (results.mean(p, t) - results.mean("full", t)) for t in results.tasks] for p in named])
    figure, axis = plt.subplots(figsize=(10, 7), layout="constrained")
    image = axis.imshow(values, cmap="RdBu", vmin=-15, vmax=15, aspect="auto")
    axis.set_xticks(range(len(results.tasks)), [TITLES[t] for t in results.tasks])
    axis.set_yticks(range(len(named)), list(named.values()))
    for i, j in np.ndindex(values.shape):
        if not np.isnan(values[i, j]):
            color = "white" if abs(values[i, j]) > 10 else "black"
            axis.text(j, i, f"{values[i, j]:+.1f}", ha="center", va="center", fontsize=8, color=color)
    figure.colorbar(image, label="points relative to full tuning")
    return figure


def criteria(results: Results) -> Any:
    """Question 8: the average of each way to choose k layers, in points relative to full tuning."""
    named = criteria_plans(results)
    groups = {"tasks to choose on": plans.CHOOSE_ON, "tasks to confirm on": plans.CONFIRM_ON}
    rows = []
    for plan, name in named.items():
        if plan == "full":
            continue
        found = [results.difference(plan, "full", [t for t in g if t in results.tasks])[0] for g in groups.values()]
        mean, half, _, _ = results.difference(plan, "full", results.tasks)
        rows.append((mean, half, name, found))
    rows = sorted((row for row in rows if not np.isnan(row[0])), key=lambda row: row[0])
    figure, axis = plt.subplots(figsize=(9, 0.34 * len(rows) + 1.4), layout="constrained")
    for y, (mean, half, _, found) in enumerate(rows):
        axis.errorbar([mean], [y], xerr=[0 if np.isnan(half) else half], color=BLUE, marker="o", capsize=3)
        for value, color, label in zip(found, (ORANGE, GREEN), groups, strict=True):
            axis.scatter([value], [y], color=color, marker="|", s=90, label=label if y == 0 else None, zorder=3)
    axis.axvline(0, color="black", lw=1)
    axis.set_yticks(range(len(rows)), [name for _, _, name, _ in rows])
    axis.set_xlabel(
        f"mean over tasks of the metric, points relative to full tuning ({results.k} of {results.depth} layers)"
    )
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="lower right")
    return figure


def elsa(results: Results) -> Any:
    """Lee et al.: quality against the number of last layers."""

    def each(axis: Any, task: str) -> None:
        found = [(n, *spread(results, f"last:{n}" if n else "head", task)) for n in range(results.depth + 1)]
        counts, means, halves = zip(*(f for f in found if not np.isnan(f[1])), strict=True)
        axis.errorbar(counts, means, halves, color=ORANGE, marker="o", ms=3, label="last k")
        axis.set_xticks(range(0, results.depth + 1, 3))
        full = 100 * results.mean("full", task)
        axis.axhline(full, color="black", lw=1, label="full")
        axis.axhline(0.9 * full, color="black", lw=1, ls=":", label="90 % of full")

    return small_multiples(results, each, "last layers tuned", "metric, points")


def spafit(results: Results) -> Any:
    """Table 2 of Arora & Wang: the average metric against the parameters trained beside the head."""
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    points = []
    for plan in spafit_plans(results):
        runs = [r for t in results.tasks for s in results.seeds if (r := results.run(plan, t, s))]
        value = 100 * results.average(plan, results.tasks)
        if runs and not np.isnan(value):
            beside = (runs[0]["trained_parameters"] - runs[0]["head_parameters"]) / 1e6
            points.append((beside, value, plan.removeprefix("strata-").replace("/", " by ")))
    _labelled(axis, points)
    axis.set_xscale("log")
    axis.set_xlabel("parameters trained beside the head, millions")
    axis.set_ylabel("mean metric over tasks, points")
    return figure


def cost(results: Results) -> Any:
    """The average metric against what is trained, stored and waited for."""
    file = results.folder / "cost.json"
    measured = json.loads(file.read_text())["methods"] if file.exists() else {}
    k = results.k
    panels: list[list[tuple[float, float, str]]] = [[], [], []]
    for plan in (
        *("full", "head", "lora-II", "lora-I", "bitfit", "spafit-2-4-I", f"last:{k}", "last:3"),
        *(f"middle:{k}", f"alternate:{k}", f"fisher:{k}"),
    ):
        value = 100 * results.average(plan, results.tasks)
        run = results.run(plan, results.tasks[0], results.seeds[0])
        if np.isnan(value) or run is None:
            continue
        if timed := measured.get(run["tuning"]):
            panels[2].append((1000 * (timed["graph_seconds"] or timed["step_seconds"]), value, plan))
        panels[0].append((run["trained_parameters"] / 1e6, value, plan))
        panels[1].append((run["delta_bytes"] / 1e6, value, plan))
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), sharey=True, layout="constrained")
    names = ("parameters trained, millions", "file of a task, MB", "training step as a CUDA graph, ms")
    for axis, points, name in zip(axes, panels, names, strict=True):
        _labelled(axis, points)
        axis.set_xlabel(name)
    axes[0].set_xscale("log")
    axes[1].set_xscale("log")
    axes[0].set_ylabel("mean metric over tasks, points")
    return figure


def _labelled(axis: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Points with their names to the right, or to the left where another point lies."""
    close = 0.04 * (max(y for _, y, _ in points) - min(y for _, y, _ in points))
    for x, y, label in points:
        blocked = any(x < x2 < 2.5 * x and abs(y2 - y) < close for x2, y2, _ in points)
        axis.scatter([x], [y], color=BLUE, s=20, zorder=3)
        axis.annotate(
            label,
            (x, y),
            xytext=(-6 if blocked else 6, -3),
            ha="right" if blocked else "left",
            textcoords="offset points",
            fontsize=8,
        )
    axis.margins(x=0.25)
    axis.grid(alpha=0.3)


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
        for record in [r for r in records.read(results.folder / "track.jsonl") if r["task"] == task][:1]:
            measured = record["points"]
            ranks = np.array([1 + np.argsort(np.argsort(-np.array(p["scores"]))) for p in measured])
            for layer in range(results.depth):
                axis.plot([p["epoch"] for p in measured], ranks[:, layer], color=colors[layer], label=f"layer {layer}")
        axis.set_yticks(range(1, results.depth + 1, 2))
        axis.invert_yaxis()

    return small_multiples(results, each, "epoch", "rank of the layer")


PLOTS: dict[str, Callable[[Results], Any]] = {
    "lodha": lodha,
    "lodha-relative": lodha_relative,
    "criteria": criteria,
    "elsa": elsa,
    "spafit": spafit,
    "cost": cost,
    "samples": samples,
    "tracked": tracked,
}
NEEDS = {"samples": "samples.jsonl", "tracked": "track.jsonl"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder below the results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--figures", type=Path, default=FIGURES)
    options = parser.parse_args(arguments)
    results = Results(options.results / options.model)
    options.figures.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        if any(results.folder.glob(NEEDS.get(name, "runs/*.jsonl"))):
            figure = plot(results)
            figure.savefig(options.figures / f"{options.model}-{name}.png", dpi=110)
            plt.close(figure)


if __name__ == "__main__":
    main()
