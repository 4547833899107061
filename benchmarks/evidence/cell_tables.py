"""The table of cells: ways to choose layers and numbers of them, each at the rate that held-out rows chose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common.table_format import INTERVALS, number, points, table
from benchmarks.evidence import cells, methods, records
from benchmarks.evidence.findings import Difference, Results
from benchmarks.evidence.jobs import Place
from benchmarks.evidence.plans import RATE_TASKS
from benchmarks.evidence.tasks import TASKS


PARTS = ("full", "lora-II", "lora-16", "lora-64", "mlp", "attention", "norms")
OTHERS = ("first", "lowest_fisher", "fisher_sampled", "lowest_fisher_sampled", "grad_norm", "rgn", "snr")
"""Ways to choose layers that decoders alone were tuned by."""


@dataclass(frozen=True)
class Finished(Place):
    """Results without the model."""

    layers: int = 12
    decoder: bool = False

    @property
    def depth(self) -> int:
        """How many layers the model had."""
        return self.layers

    @property
    def is_decoder(self) -> bool:
        """Whether it answered prompts."""
        return self.decoder


def cells_table(results: Results) -> str:
    """Ways to choose k layers, each at a rate of its own (of a decoder, at one for each k)."""
    every = [run for file in results.folder.glob("runs/*.jsonl") for run in records.read(file)]
    plain = any("plain" in run for run in every)
    place = Finished("", Path(), results.folder, Path(), "cpu", results.depth, plain)
    chosen = [task for task in TASKS if any(run["task"] == task for run in every)]
    seeds = sorted({run["seed"] for run in every})
    counts = sorted({len(m.split(".")) for run in every if (m := run["tuning"]).startswith("layers-")})
    kinds = [*cells.KINDS, *(OTHERS if plain else ())]
    counts = cells.default_counts(results.depth) if not plain else [k for k in counts if k in (3, 6, 9)]
    names = cells.cell_names([*PARTS, *kinds], counts)
    found = cells.Cells(place, names, chosen, seeds, shared=cells.SHARED if plain else None)
    by_cell = {name: values(found, name) for name in names}
    rows = []
    for name, (rate, measured) in by_cell.items():
        tasks = [task for task in chosen if any(t == task for t, _ in measured)]
        if math.isnan(rate) or len(tasks) < len(RATE_TASKS):
            continue
        full = by_cell["full"][1]
        paired = {
            task: [100 * (measured[t, s][0] - full[t, s][0]) for t, s in measured if t == task and (t, s) in full]
            for task in tasks
        }
        paired = {task: points_of for task, points_of in paired.items() if points_of}
        against = Difference(list(paired.values()))
        fewer = Difference([points_of for task, points_of in paired.items() if TASKS[task].revision == 1])
        means = [np.mean([measured[t, s][0] for t, s in measured if t == task]) for task in tasks]
        cost = [after - before for _, forgot in measured.values() for before, after in forgot]
        rows.append(
            [
                *(name.split(":") + [""])[:2],
                f"{rate:g}",
                str(len(paired)),
                points(float(np.mean(means)), 2),
                str(against),
                str(fewer),
                f"{against.better}:{against.worse}",
                *([number(float(np.mean(cost)), 3, sign=True)] if plain else []),
            ]
        )
    header = ["layers", "k", "rate", "tasks", "mean of these", f"minus full {INTERVALS}"]
    header += [f"without {', '.join(task for task in chosen if TASKS[task].revision > 1)}"]
    return table([*header, "better:worse", *(["loss on plain text"] if plain else [])], rows)


def values(found: cells.Cells, name: str) -> tuple[float, dict[tuple[str, int], tuple[float, list[list[float]]]]]:
    """The rate of a cell, and for each task and seed its metric and what was forgotten; means over random draws."""
    tasks = list(found.every_task)
    orders = found.orders()
    done = {task: found.place.runs(task) for task in tasks}
    rate, untried = found.chosen_rate(name, done, orders)
    measured: dict[tuple[str, int], tuple[float, list[list[float]]]] = {}
    if untried:
        return math.nan, measured
    for task in tasks:
        for seed in found.seeds:
            runs = []
            for plan in cells.draws(name):
                try:
                    runs.append(done[task].get((methods.resolve(plan, orders[task, seed]), rate, seed)))
                except KeyError:
                    continue
            there = [run for run in runs if run]
            if there:
                metric = float(np.mean([run["validation"][run["metric"]] for run in there]))
                measured[task, seed] = metric, [run["plain"] for run in there if "plain" in run]
    return rate, measured
