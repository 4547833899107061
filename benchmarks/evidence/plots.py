"""Draw the figures of docs/evidence.md.

python -m benchmarks.evidence.plots mpnet                  # into docs/figures/
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.evidence import cell_tables, layer_plots, plans
from benchmarks.evidence.comparison_tables import criteria_plans, lodha_plans, spafit_plans
from benchmarks.evidence.findings import RESULTS, Results
from benchmarks.evidence.jobs import RANDOM_DRAWS
from benchmarks.evidence.panels import BLUE, GREEN, GREY, ORANGE, RED, TITLES, labelled, plt, small_multiples
from benchmarks.evidence.size_tables import encoded_megabytes, measured_costs
from benchmarks.evidence.tables import PAGES


FIGURES = PAGES[0].parent / "figures"


def bars(axis: Any, results: Results, named: dict[int, str], task: str, **style: Any) -> None:
    """The metric in points by the number of layers, means over seeds, with bars from the worst to the best seed."""
    values = {x: [100 * v for v in results.values(plan, task).values()] for x, plan in named.items()}
    values = {x: some for x, some in values.items() if some}
    means = [float(np.mean(some)) for some in values.values()]
    below = [mean - min(some) for mean, some in zip(means, values.values(), strict=True)]
    above = [max(some) - mean for mean, some in zip(means, values.values(), strict=True)]
    axis.errorbar(list(values), means, (below, above), elinewidth=1, marker="o", **style)


def lodha(results: Results) -> Any:
    """Figures 6 and 7 of Lodha et al., with last-k and random beside."""
    k = results.k

    def each(axis: Any, task: str) -> None:
        for name, color in (("fisher", BLUE), ("last", ORANGE)):
            label = "top k by Fisher" if name == "fisher" else "last k"
            bars(axis, results, {n: f"{name}:{n}" for n in range(1, k + 1)}, task, color=color, ms=4, label=label)
        draws = [100 * v for d in range(RANDOM_DRAWS) for v in results.values(f"random{d}:{k}", task).values()]
        axis.scatter([k + 0.2] * len(draws), draws, color=GREY, marker="_", label=f"random {k}, each draw", zorder=3)
        axis.scatter([1], [100 * results.mean("fisher:-1", task)], color=RED, marker="v", label="bottom 1 by Fisher")
        for plan, style in (("full", "-"), ("head", ":")):
            axis.axhline(100 * results.mean(plan, task), color="black", ls=style, lw=1, label=plan)
        axis.set_xticks(range(1, k + 1))

    return small_multiples(results, each, "layers tuned", "metric, points")


def lodha_relative(results: Results) -> Any:
    """Figure 1 of Lodha et al.: points relative to full tuning."""
    named = {p: n for p, n in lodha_plans(results).items() if p != "full"}
    values = np.array([[results.task_difference(p, "full", t) for t in results.tasks] for p in named])
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
        found = [results.difference(plan, "full", [t for t in g if t in results.tasks]).mean for g in groups.values()]
        whole = results.difference(plan, "full", results.tasks)
        rows.append((whole.mean, (whole.over_tasks, whole.over_seeds), name, found))
    rows = sorted((row for row in rows if not np.isnan(row[0])), key=lambda row: row[0])
    figure, axis = plt.subplots(figsize=(9, 0.34 * len(rows) + 1.4), layout="constrained")
    for y, (mean, halves, _, found) in enumerate(rows):
        for half, width, label in zip(halves, (1, 4), ("95 % over tasks", "95 % over seeds"), strict=True):
            if not np.isnan(half):
                reach = (mean - half, mean + half)
                axis.plot(reach, (y, y), color=BLUE, lw=width, alpha=0.6, label=label if y == 0 else None)
        axis.plot([mean], [y], color=BLUE, marker="o")
        for value, color, label in zip(found, (ORANGE, GREEN), groups, strict=True):
            axis.scatter([value], [y], color=color, marker="|", s=90, label=label if y == 0 else None, zorder=3)
    axis.axvline(0, color="black", lw=1)
    axis.set_yticks(range(len(rows)), [name for _, _, name, _ in rows])
    axis.set_xlabel(
        f"mean over tasks of the metric, points relative to full tuning ({results.k} of {results.depth} layers)"
    )
    axis.grid(alpha=0.3, axis="x")
    axis.legend(loc="upper left")
    return figure


def elsa(results: Results) -> Any:
    """Lee et al.: quality against the number of last layers."""

    def each(axis: Any, task: str) -> None:
        named = {n: f"last:{n}" if n else "head" for n in range(results.depth + 1)}
        bars(axis, results, named, task, color=ORANGE, ms=3, label="last k")
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
    labelled(axis, points, 2.5)
    axis.set_xscale("log")
    axis.set_xlabel("parameters trained beside the head, millions")
    axis.set_ylabel("mean metric over tasks, points")
    return figure


def cost(results: Results) -> Any:
    """The average metric against what is trained, stored and waited for."""
    measured, k = measured_costs(results), results.k
    panels: list[list[tuple[float, float, str]]] = [[], [], []]
    encoded: list[tuple[float, float, str]] = []
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
        if plan == f"alternate:{k}":
            encoded = [(x, value, encoding) for encoding, x in encoded_megabytes(results, run).items()]
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.6), sharey=True, layout="constrained")
    names = ("parameters trained, millions", "file of a task, MB", "training step as a CUDA graph, ms")
    for axis, points, name, ratio in zip(axes, panels, names, (3, 3, 1.25), strict=True):
        labelled(axis, points, ratio)
        axis.set_xlabel(name)
    for x, y, encoding in encoded:
        axes[1].plot([x], [y], marker="o", ms=5, mfc="white", color=ORANGE)
        axes[1].annotate(encoding, (x, y), xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7)
    axes[0].set_xscale("log")
    axes[1].set_xscale("log")
    axes[0].set_ylabel("mean metric over tasks, points")
    return figure


def choices(results: Results) -> Any:
    """Ways to choose layers against full tuning, on all models."""
    found = cell_tables.choices(results)
    figure, axis = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for i, (model, color) in enumerate(zip(cell_tables.MODELS.values(), (BLUE, ORANGE, GREEN), strict=True)):
        rows = [(y + (i - 1) / 5, of_models[model]) for y, of_models in enumerate(found.values())]
        rows = [(y, difference) for y, difference in rows if not np.isnan(difference.mean)]
        means, halves = [d.mean for _, d in rows], [d.over_tasks for _, d in rows]
        axis.errorbar(means, [y for y, _ in rows], xerr=halves, fmt="o", ms=5, elinewidth=1, color=color, label=model)
    axis.axvline(0, color="black", lw=1)
    axis.set_yticks(range(len(found)), found)
    axis.invert_yaxis()
    axis.set_xlabel("points relative to tuning all weights, mean over tasks; 95 % over tasks")
    figure.legend(loc="outside upper center", ncols=3, fontsize=9)
    return figure


PLOTS: dict[str, Callable[[Results], Any]] = {
    "lodha": lodha,
    "lodha-relative": lodha_relative,
    "criteria": criteria,
    "elsa": elsa,
    "spafit": spafit,
    "cost": cost,
    "published": layer_plots.published,
    "samples": layer_plots.samples,
    "tracked": layer_plots.tracked,
    "tracked-deviation": layer_plots.tracked_deviation,
}
NEEDS = {"samples": "samples.jsonl", "tracked": "track.jsonl", "tracked-deviation": "track.jsonl"}


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
    choices(results).savefig(options.figures / "choices.png", dpi=110)


if __name__ == "__main__":
    main()
