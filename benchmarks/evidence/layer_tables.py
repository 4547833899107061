"""The tables about layers: what is chosen, what helps, and how stable a ranking is; questions 2, 3 and 4."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Sequence

import numpy as np
import pandas as pd

from benchmarks.common.table_format import INTERVALS, MISSING, number, points, table
from benchmarks.evidence import criteria, literature, methods, records
from benchmarks.evidence.cell_tables import CellValues
from benchmarks.evidence.findings import Results, agreement, code_agreement, samples_frame
from benchmarks.evidence.jobs import RANDOM_DRAWS, TRACKED
from benchmarks.evidence.tasks import TASKS


def chosen_layers(results: Results) -> str:
    """The layers that each score chooses with the first seed, and how many two seeds share, mean over tasks."""
    k, rows = results.k, []
    for score in ("fisher", "published_code", "grad_norm", "rgn", "snr", *criteria.COSTLY):
        cells, shared = [], []
        for task in results.tasks:
            by_seed = [results.rankings.get((task, seed), {}).get(score) for seed in results.seeds]
            first = by_seed[0]
            cells.append(" ".join(map(str, sorted(first["order"][:k]))) if first else MISSING)
            own = [
                set(r["order"][:k]) for r, seed in zip(by_seed, results.seeds, strict=True) if r and r["seed"] == seed
            ]
            shared += [len(a & b) for a, b in itertools.combinations(own, 2)]
        rows.append([score, *cells, number(float(np.mean(shared)), 1) if shared else MISSING])
    return table(["score", *results.tasks, f"shared by seeds, of {k}"], rows)


def literature_choices(results: Results) -> str:
    """The layers of published choices with the first seed, and how their rankings agree: mean over tasks."""
    measured, rows = CellValues(results), []
    k = int(measured.cell_name("fisher").partition(":")[2])
    ranked = {task: found for task in TASKS if (found := measured.rankings(task, 0))}
    for score in literature.LITERATURE:
        of_score = {task: found[score] for task, found in ranked.items() if score in found}
        if not of_score:
            continue
        chosen = {task: methods.best_layers(score, r["order"], k) for task, r in of_score.items()}
        both = [
            (r["scores"], ranked[task]["fisher"]["scores"]) for task, r in of_score.items() if "fisher" in ranked[task]
        ]
        pairs = itertools.combinations([r["scores"] for r in of_score.values()], 2)
        taus = [np.mean([agreement(a, b, k)[0] for a, b in some]) for some in (pairs, both)]
        cells = [" ".join(map(str, sorted(chosen[task]))) if task in chosen else MISSING for task in ranked]
        seconds = np.median([r["seconds"] for r in of_score.values()])
        rows.append([score, *cells, *(number(float(tau)) for tau in taus), number(float(seconds), 1)])
    header = ["score", *ranked, "tau between tasks", "tau with Fisher", "seconds to rank"]
    return table(header, rows)


def how_often(results: Results) -> str:
    """How often each layer is among the best k by a score, over all tasks and seeds that it was measured with."""
    rows = []
    for score in ("fisher", "published_code", "grad_norm", "fisher_warm", "kernel", "rewind", "probe"):
        measured = {(t, r[score]["seed"]): r[score]["order"] for (t, _), r in results.rankings.items() if score in r}
        counts = [sum(layer in order[: results.k] for order in measured.values()) for layer in range(results.depth)]
        if measured:
            rows.append([score, str(len(measured)), *map(str, counts)])
    return table(["score", "rankings", *map(str, range(results.depth))], rows)


def layer_effects(results: Results) -> str:
    """Which layers help: a linear model of the metric, less the mean of task and seed, over all runs of k layers."""
    frame, layers = _runs_of_k_layers(results), list(range(results.depth))
    if frame.empty:
        return ""
    effects, drawn = _effects(frame, _tasks_of(frame), layers)
    low, high = np.quantile(drawn - drawn.mean(1, keepdims=True), (0.025, 0.975), axis=0)
    return table(
        ["layer", *map(str, layers)],
        [
            [f"points, {len(frame)} runs", *(f"{e:+.1f}" for e in effects - effects.mean())],
            ["95 % over tasks", *(f"{a:+.1f} to {b:+.1f}" for a, b in zip(low, high, strict=True))],
        ],
    )


def neighbours(results: Results) -> str:
    """What each pair of neighbours among k layers adds to the metric, in the same model, with 95 % over tasks."""
    frame, layers = _runs_of_k_layers(results), list(range(results.depth))
    parts, rows = {"all tasks": _tasks_of(frame)}, []
    if results.runs:
        noisiest, rest = results.without_noisiest([f"random{draw}:{results.k}" for draw in range(RANDOM_DRAWS)])
        parts[f"without {noisiest}"] = rest
    for name, part, columns in (
        ("all runs", frame, ["pairs"]),
        ("all runs, beside the effects of the layers", frame, ["pairs", *layers]),
        ("random draws alone", frame[frame["random"]], ["pairs"]),
    ):
        cells = []
        for chosen in parts.values():
            effects, drawn = _effects(part, chosen, columns)
            low, high = np.quantile(drawn[:, 0], (0.025, 0.975))
            cells.append(f"{effects[0]:+.1f} ({low:+.1f} to {high:+.1f})")
        rows.append([f"{name}, {len(part)}", *cells])
    return table(["points for each pair of neighbours", *parts], rows)


def _runs_of_k_layers(results: Results) -> pd.DataFrame:
    """The runs that tune k layers: task, seed, metric in points, whether a random draw, neighbours, and each layer.

    Those of an encoder have one rate for any layers and the tasks of version 0.1.0, those of a decoder the rate of so
    many layers.
    """
    rows, k, runs, random = [], results.k, results.runs, {}
    if not runs:
        measured = CellValues(results)
        k, runs = measured.runs_of_a_third()
        random = measured.runs_of(f"random:{k}")[1]
    for (task, tuning, seed), run in runs.items():
        match = re.fullmatch(r"layers-([\d.]+)", tuning)
        if match and match[1].count(".") == k - 1:
            inside = [int(n) for n in match[1].split(".")]
            drawn = {results.tuning(f"random{draw}:{k}", task, seed) for draw in range(RANDOM_DRAWS)}
            drawn |= {run["tuning"] for run in random.get((task, seed), ())}
            pairs = sum(b - a == 1 for a, b in itertools.pairwise(inside))
            record = {"task": task, "seed": seed, "value": 100 * run["validation"][run["metric"]], "pairs": pairs}
            rows.append(record | {"random": tuning in drawn} | {i: float(i in inside) for i in range(results.depth)})
    return pd.DataFrame(rows)


def _tasks_of(frame: pd.DataFrame) -> list[str]:
    return [task for task in TASKS if task in {*frame["task"]}]


def _effects(frame: pd.DataFrame, tasks: Sequence[str], columns: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """The effect of each column on the metric, less the mean of task and seed, by least squares.

    Args:
        frame: The runs.
        tasks: Those of these tasks count.
        columns: The columns.

    Returns:
        The effects, (columns,), and those on 1,000 draws of as many tasks, (1000, columns).
    """
    squares, products = [], []
    for task in tasks:
        rows = frame[frame["task"] == task]
        numbers = rows[[*columns, "value"]].astype(float)
        centred = (numbers - numbers.groupby(rows["seed"]).transform("mean")).to_numpy()
        squares.append(centred[:, :-1].T @ centred[:, :-1])
        products.append(centred[:, :-1].T @ centred[:, -1])
    drawn = np.random.default_rng(0).integers(len(tasks), size=(1000, len(tasks)))
    samples = [np.arange(len(tasks)), *drawn]
    found = [np.linalg.pinv(sum(squares[i] for i in s)) @ sum(products[i] for i in s) for s in samples]
    return found[0], np.array(found[1:])


def published(results: Results) -> str:
    """The published code against the paper's formula, means over seeds."""
    k, rows = results.k, []
    for task in results.tasks:
        found = code_agreement(results, task)
        if not found:
            continue
        tau, overlap = np.mean(found, axis=0)
        values = [points(results.mean(f"{score}:{k}", task)) for score in ("fisher", "published_code")]
        ahead = number(results.task_difference(f"published_code:{k}", f"fisher:{k}", task), 1, sign=True)
        rows.append(
            [task, number(tau), number(overlap, 1), *values, ahead, results.seeds_of(f"published_code:{k}", [task])]
        )
    whole = results.difference(f"published_code:{k}", f"fisher:{k}", results.tasks)
    average = [points(results.average(f"{score}:{k}", results.tasks), 2) for score in ("fisher", "published_code")]
    rows.append(["all", "", "", *average, str(whole), results.seeds_of(f"published_code:{k}")])
    header = ["task", "Kendall's tau", f"layers shared, of {k}", "metric, formula", "metric, published code"]
    return table([*header, f"code - formula {INTERVALS}", "seeds"], rows)


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
    found: dict[str, list[float]] = {}
    for record in records.read(results.folder / "samples.jsonl"):
        for kind in ("head", "warm head"):
            scores = [r["scores"] for r in record["rankings"] if r["kind"] == kind]
            pairs = [agreement(a, b, results.k) for a, b in itertools.combinations(scores, 2)]
            if pairs:
                found.setdefault(record["task"], []).extend(np.mean(pairs, axis=0))
    if not found:
        return ""
    rows = {task: found[task] for task in results.tasks if task in found}
    rows["mean"] = list(np.mean(list(rows.values()), axis=0))
    header = ["task", "random heads: tau", f"overlap of {results.k}", "trained heads: tau", f"overlap of {results.k}"]
    return table(header, [[task, *(number(value) for value in values)] for task, values in rows.items()])


def tracked(results: Results) -> str:
    """Figures 2 to 5 of Lodha et al.: the ranking while the model is tuned, against the one before, and in itself."""
    rows = []
    for record in sorted(records.read(results.folder / "track.jsonl"), key=lambda r: results.tasks.index(r["task"])):
        scores = [point["scores"] for point in record["points"]]
        first = [agreement(scores[0], later, results.k) for later in scores[1:]]
        cells = [f"{tau:.2f}, {overlap}" for tau, overlap in first]
        cells += [MISSING] * (len(TRACKED) - len(scores))
        tau, overlap = agreement(scores[1], scores[-1], results.k)
        epochs = " ".join(str(point["epoch"]) for point in record["points"])
        rows.append([record["task"], epochs, *cells, f"{tau:.2f}, {overlap}"])
    header = ["task", "epochs", *(f"{n} against before" for n in ("2nd", "3rd", "4th", "5th")), "last against 2nd"]
    return table(header, rows) if rows else ""
