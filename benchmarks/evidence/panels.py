"""What the figures of docs/evidence.md have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

from benchmarks.evidence.findings import Results


matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402


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


def labelled(axis: Any, points: Sequence[tuple[float, float, str]], ratio: float) -> None:
    """Points with their names to the right, moved apart where they would overlap.

    Args:
        axis: Where they go.
        points: x, y and the name of each.
        ratio: Points whose x differ by no more than this factor have names side by side.
    """
    heights = [y for _, y, _ in points]
    gap = 0.035 * (max(heights, default=0.0) - min(heights, default=0.0))
    placed: list[tuple[float, float]] = []
    for x, y, label in sorted(points, key=lambda point: -point[1]):
        near = [b for a, b in placed if 1 / ratio < a / x < ratio]
        height = min([y, *(b - gap for b in near if b < y + gap)])
        placed.append((x, height))
        axis.scatter([x], [y], color=BLUE, s=20, zorder=3)
        axis.annotate(label, (x, height), xytext=(6, -3), textcoords="offset points", fontsize=8)
    axis.margins(x=0.25)
    axis.grid(alpha=0.3)
