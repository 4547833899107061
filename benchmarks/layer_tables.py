"""The tables about layers: what is chosen, what helps, and how stable a ranking is; questions 2, 3 and 4."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import criteria
import numpy as np
import pandas as pd
import records
from findings import Results, agreement, samples_frame
from scipy.stats import kendalltau
from table_format import MISSING, number, points, table


def chosen_layers(results: Results) -> str:
    """The layers that each score chooses."""
    k, rows = results.k, []
    for score in ("fisher", "published_code", "grad_norm", "rgn", "snr", *criteria.COSTLY):
        cells = []
        for task in results.tasks:
            ranking = results.rankings.get((task, 0), {}).get(score)
            cells.append(" ".join(map(str, sorted(ranking["order"][:k]))) if ranking else MISSING)
        rows.append([score, *cells])
    return table(["score", *results.tasks], rows)


def layer_effects(results: Results) -> str:
    """Which layers help: a linear model of the metric, less the task's mean, over all runs that tune k layers."""
    rows = []
    for (task, tuning, _), run in results.runs.items():
        if (match := re.fullmatch(r"layers-([\d.]+)", tuning)) and match[1].count(".") == results.k - 1:
            inside = {int(n) for n in match[1].split(".")}
            rows.append(
                [task, 100 * run["validation"][run["metric"]], *(float(i in inside) for i in range(results.depth))]
            )
    if not rows:
        return ""
    frame = pd.DataFrame(rows, columns=["task", "value", *range(results.depth)])
    generator = np.random.default_rng(0)
    drawn = [_effects(frame, generator.choice(results.tasks, len(results.tasks)), results.depth) for _ in range(1000)]
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    return table(
        ["layer", *map(str, range(results.depth))],
        [
            [f"points, {len(rows)} runs", *(f"{e:+.1f}" for e in _effects(frame, results.tasks, results.depth))],
            ["95 % over tasks", *(f"{a:+.1f} to {b:+.1f}" for a, b in zip(low, high, strict=True))],
        ],
    )


def _effects(frame: pd.DataFrame, chosen: Sequence[str], depth: int) -> np.ndarray:
    """The effect of each layer, less their mean, on tasks that may be named several times."""
    parts = [frame[frame["task"] == task].drop(columns="task") for task in chosen]
    centred = pd.concat([part - part.mean() for part in parts])
    effect = np.linalg.pinv(centred[list(range(depth))].to_numpy()) @ centred["value"].to_numpy()
    return effect - effect.mean()


def published(results: Results) -> str:
    """The published code against the paper's formula."""
    rows = []
    for task in results.tasks:
        ranked = results.rankings.get((task, 0), {})
        if "published_code" in ranked and "fisher" in ranked:
            ours, theirs = (ranked[score] for score in ("fisher", "published_code"))
            overlap = len(set(ours["order"][: results.k]) & set(theirs["order"][: results.k]))
            cells = [number(kendalltau(ours["scores"], theirs["scores"]).statistic), f"{overlap} of {results.k}"]
            values = [points(results.mean(f"{score}:{results.k}", task)) for score in ("fisher", "published_code")]
            rows.append([task, *cells, *values])
    header = ["task", "Kendall's tau", "overlap of the top", "metric, formula", "metric, published code"]
    return table(header, rows)


def samples(results: Results) -> str:
    """How many samples are enough: agreement with the ranking on the most samples, mean over tasks and draws."""
    frame = samples_frame(results)
    if frame.empty:
        return ""
    grouped = frame.groupby(["kind", "n"])[["tau", "overlap", "reference"]].mean()
    sizes = sorted(frame["n"].unique())
    rows = []
    for kind in ("given", "sampled", "exact"):
        cells = [
            f"{grouped.loc[(kind, n), 'tau']:.2f}, {grouped.loc[(kind, n), 'overlap']:.1f}"
            if (kind, n) in grouped.index
            else MISSING
            for n in sizes
        ]
        rows.append([f"{kind} labels", *cells])
    return table([f"tau, overlap of top {results.k} with n =", *map(str, sizes)], rows)


def heads(results: Results) -> str:
    """How far the ranking depends on the random head: agreement between pairs of five heads, 100 samples."""
    rows = []
    for record in records.read(results.folder / "samples.jsonl"):
        found = record["rankings"]
        if not any(r["kind"] == "head" for r in found):
            continue
        cells = []
        for kind in ("head", "warm head"):
            scores = [r["scores"] for r in found if r["kind"] == kind]
            pairs = [agreement(a, b, results.k) for a, b in itertools.combinations(scores, 2)]
            cells += [number(float(np.mean([p[i] for p in pairs]))) for i in (0, 1)]
        rows.append([record["task"], *cells])
    header = ["task", "random heads: tau", f"overlap of {results.k}", "trained heads: tau", f"overlap of {results.k}"]
    return table(header, rows) if rows else ""


def tracked(results: Results) -> str:
    """Figures 2 to 5 of Lodha et al.: the ranking while the model is tuned, against the one before."""
    rows = []
    for record in records.read(results.folder / "track.jsonl"):
        measured = record["points"]
        first, epochs = measured[0]["scores"], [str(p["epoch"]) for p in measured]
        ranks = [np.argsort(np.argsort(-np.array(p["scores"]))) for p in measured]
        taus = [agreement(first, p["scores"], results.k) for p in measured[1:]]
        moved = [float(np.abs(r - ranks[0]).mean()) for r in ranks[1:]]
        cells = [f"{tau:.2f}, {overlap}, {m:.1f}" for (tau, overlap), m in zip(taus, moved, strict=True)]
        rows.append([record["task"], " ".join(epochs), *cells])
    header = ["task", "epochs", *(f"{n}: tau, overlap, ranks moved" for n in ("2nd", "3rd", "4th", "5th"))]
    return table(header, rows) if rows else ""
