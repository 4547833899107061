"""Pictures of rankings, of choices of layers that were tried, and of plans. matplotlib is imported to draw one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from peft_surgical.compat import install


Path_ = str | os.PathLike[str]


def plot_scores(
    path: Path_,
    scores: Sequence[float],
    intervals: Sequence[tuple[float, float]] | None,
    order: Sequence[int],
    *,
    title: str,
    label: str,
) -> None:
    """Draw a bar for each layer, with its interval and its rank; `label` stands at the axis of scores."""
    figure, axes = _figure(width=max(5.0, 0.45 * len(scores) + 2))
    rank = {layer: place for place, layer in enumerate(order)}
    best = max(1, round(len(scores) / 4))
    colors = ["tab:blue" if rank[i] < best else "lightsteelblue" for i in range(len(scores))]
    errors = None
    if intervals:
        low = [max(0.0, s - lo) for s, (lo, _) in zip(scores, intervals, strict=True)]
        high = [max(0.0, hi - s) for s, (_, hi) in zip(scores, intervals, strict=True)]
        errors = [low, high]
    axes.bar(range(len(scores)), scores, color=colors, yerr=errors, capsize=3, error_kw={"elinewidth": 1})
    tops = [hi for _, hi in intervals] if intervals else scores
    for layer, top in enumerate(tops):
        axes.annotate(
            f"{rank[layer] + 1}", (layer, max(top, scores[layer], 0)), (0, 3), textcoords="offset points", ha="center"
        )
    axes.set(xlabel="layer (above each bar: its rank)", ylabel=label, xticks=range(len(scores)))
    axes.set_title(fill(title, width=int(9 * figure.get_figwidth())), fontsize="medium")
    axes.margins(y=0.12)
    _save(figure, path)


def plot_ranks(path: Path_, ranks: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Draw the rank of each layer over several rankings, and how far each ranking is from the first."""
    figure, (left, right) = _figure(width=max(9.0, 1.2 * len(names) + 6), columns=2)
    places = range(len(names))
    for layer in range(len(ranks[0])):
        left.plot(places, [r[layer] for r in ranks], marker="o", markersize=4)
        left.annotate(str(layer), (len(names) - 1, ranks[-1][layer]), (6, 0), textcoords="offset points", va="center")
    left.invert_yaxis()
    left.set(title="Rank of each layer", ylabel="rank (1: best)", xticks=places)
    left.set_xticklabels(names)
    bottom = [0.0] * len(names)
    for layer in range(len(ranks[0])):
        moved = [abs(r[layer] - ranks[0][layer]) / len(ranks[0]) for r in ranks]
        right.bar(places, moved, bottom=bottom)
        bottom = [b + m for b, m in zip(bottom, moved, strict=True)]
    right.set(title=f"Mean change of rank since {names[0]}", ylabel="ranks", xticks=places)
    right.set_xticklabels(names)
    if not any(bottom):
        right.set_ylim(0, 1)
    _save(figure, path)


def plot_tried(path: Path_, tried: Mapping[str, Any]) -> None:
    """Draw how good each choice of layers was after each epoch, against the seconds that it had taken."""
    figure, axes = _figure(width=6.4)
    for choice, found in tried["choices"].items():
        pace = found["seconds"] / max(1, found["steps"])
        kept = choice == tried["kept"]
        label = f"{choice}: {', '.join(map(str, found['layers']))}{' (kept)' * kept}"
        line = {"linewidth": 2.2 if kept else 1.2, "alpha": 1 if kept else 0.7, "markersize": 3}
        seconds, values = [step * pace for step, _ in found["history"]], [value for _, value in found["history"]]
        (drawn,) = axes.plot(seconds, values, marker="o", label=label, **line)
        if found["value"] is not None:
            best = seconds[values.index(found["value"])]
            axes.plot([best], [found["value"]], marker="o", markersize=9, color=drawn.get_color())
    axes.set(xlabel="seconds of training", ylabel=f"{tried['metric']} on the held-out rows")
    axes.set_title("Layers tried (large dot: the checkpoint of each choice)", fontsize="medium")
    axes.legend(frameon=False, fontsize="small")
    _save(figure, path)


def plot_parts(
    path: Path_, bars: Mapping[str, Mapping[str, int]], peaks: Sequence[int], limit: int, *, title: str
) -> None:
    """Draw bars of bytes by their parts, with a line at the peak of each, and at a limit if that is near."""
    from matplotlib.ticker import EngFormatter

    figure, axes = _figure(width=9.0)
    ends = [0] * len(bars)
    for part in next(iter(bars.values())):
        sizes = [bar[part] for bar in bars.values()]
        axes.barh([*bars], sizes, left=ends, height=0.6, label=part)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    places = range(len(bars))
    axes.vlines(peaks, [y - 0.4 for y in places], [y + 0.4 for y in places], "black", label="most at one time")
    unit = EngFormatter("B", places=1)
    for y, peak, end in zip(places, peaks, ends, strict=True):
        axes.annotate(unit(peak), (max(peak, end), y), (6, 0), textcoords="offset points", va="center")
    if limit < 1.2 * max(*ends, *peaks):
        axes.axvline(limit, color="tab:red", linestyle="--", label="what the device has")
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.set_title(fill(title, width=90), fontsize="medium")
    axes.margins(x=0.12)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    _save(figure, path)


def _figure(width: float, columns: int = 1) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"A plot needs matplotlib, which is not installed: {install('plot')}") from error
    figure = Figure(figsize=(width, 3.8), layout="constrained")
    axes = figure.subplots(1, columns)
    for one in axes if columns > 1 else [axes]:
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path_) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
