"""The table of language modelling: the loss of a token of documents after tuning, and what was forgotten."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.common.table_format import MISSING, number, table
from benchmarks.evidence import texts
from benchmarks.evidence.cell_tables import CellValues
from benchmarks.evidence.findings import Results


DRAWS = 2000


def texts_table(results: Results) -> str:
    """The loss in nats a token of documents that no training saw, each cell at the rate that held-out ones chose."""
    measured = CellValues(results, every=texts.TASKS)
    if not measured.runs:
        return ""
    tokens = {task: np.array(results.sizes[task]["documents"]) for task in measured.tasks}
    untuned = {run["task"]: -run["untuned"]["log_likelihood"] * tokens[run["task"]] for run in measured.runs}
    others = {"full": "full", "equal distances": measured.cell_name("spread")}
    beside = [_losses(measured, name) for name in others.values()]
    rows = [["before tuning", "", "", "", *_cells(untuned, tokens), *[""] * 4]]
    for name in measured.names():
        rate, runs = measured.runs_of(name)
        if math.isnan(rate) or not runs:
            continue
        losses = _losses(measured, name)
        means = {task: np.mean([losses[t, s] for t, s in losses if t == task], 0) for task, _ in losses}
        of_task = [[run for (t, _), there in runs.items() if t == task for run in there] for task in tokens]
        forgot = [np.mean([np.diff(run["plain"]) for run in there]) for there in of_task if there]
        held_out = [-np.mean([run["held_out"]["log_likelihood"] for run in there]) for there in of_task if there]
        counts = [sum(t == task for t, _ in losses) for task in tokens]
        rows.append(
            [
                *(name.split(":") + [""])[:2],
                f"{rate:g}",
                f"{min(counts)}-{max(counts)}" if len(set(counts)) > 1 else str(counts[0]),
                *_cells(means, tokens),
                *(_interval(_behind(losses, other), tokens) for other in beside),
                number(float(np.mean(held_out)), 3),
                number(float(np.mean(forgot)), 3, sign=True),
            ]
        )
    header = ["layers", "k", "rate", "seeds", *tokens, "mean"]
    header += [f"minus {name}, 95 % over documents" for name in others]
    return table([*header, "mean, held-out documents", "plain text"], rows)


def _losses(measured: CellValues, name: str) -> dict[tuple[str, int], np.ndarray]:
    """The loss of each document by task and seed, the mean over random draws."""
    _, runs = measured.runs_of(name)
    return {key: np.mean([run["documents"] for run in there], 0) for key, there in runs.items()}


def _behind(
    losses: dict[tuple[str, int], np.ndarray], others: dict[tuple[str, int], np.ndarray]
) -> dict[str, np.ndarray]:
    """What each document's loss is above another's, by task: the mean over the seeds that both have."""
    shared = sorted(losses.keys() & others.keys())
    return {task: np.mean([losses[key] - others[key] for key in shared if key[0] == task], 0) for task, _ in shared}


def _cells(losses: dict[str, np.ndarray], tokens: dict[str, np.ndarray]) -> list[str]:
    each = [float(losses[task].sum() / n.sum()) if task in losses else math.nan for task, n in tokens.items()]
    return [number(loss, 3) for loss in (*each, float(np.mean(each)))]


def _interval(losses: dict[str, np.ndarray], tokens: dict[str, np.ndarray]) -> str:
    """The mean over the tasks, and what it would be with other documents of each."""
    if set(losses) != set(tokens):
        return MISSING
    generator, drawn = np.random.default_rng(0), []
    for task, n in tokens.items():
        index = generator.integers(len(n), size=(DRAWS, len(n)))
        drawn.append(losses[task][index].sum(1) / n[index].sum(1))
    low, high = np.quantile(np.mean(drawn, 0), (0.025, 0.975))
    mean = np.mean([losses[task].sum() / n.sum() for task, n in tokens.items()])
    return f"{mean:+.3f} ({low:+.3f} to {high:+.3f})"
