"""The table of cells: ways to choose layers and numbers of them, each at the rate that held-out rows chose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.table_format import INTERVALS, MISSING, number, points, table
from benchmarks.evidence import cells, few_rows, methods, records
from benchmarks.evidence.findings import TRIED, Difference, Results, held_out
from benchmarks.evidence.literature import LITERATURE
from benchmarks.evidence.place import Place
from benchmarks.evidence.plans import CHOOSE_ON, CONFIRM_ON, RATE_TASKS
from benchmarks.evidence.tasks import NOT_LEARNT, TASKS


WITH_OTHERS = f"with {', '.join(NOT_LEARNT)}"
"""The column of differences over all tasks."""
PARTS = ("full", "lora-II", "lora-16", "lora-64", "columns-32", "turns-2-50-shuffled", "mlp", "attention", "norms")
OTHERS = ("first", "lowest_fisher", "fisher_sampled", "lowest_fisher_sampled", "fisher_after_epoch")
OTHERS += ("grad_norm", "rgn", "snr")
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


def cells_table(results: Results, few: int = 0) -> str:
    """Ways to choose k layers, each at a rate of its own (of a decoder, at one for each k)."""
    measured = CellValues(results, few)
    has_others, rows = measured.learnt != measured.tasks, []
    tasks_for_rates = {few_rows.named(task, few) for task in RATE_TASKS}
    for name in measured.names():
        rate, of_cell = measured.cell(name)
        tasks = [task for task in measured.learnt if any(t == task for t, _ in of_cell)]
        if math.isnan(rate) or not tasks_for_rates <= set(tasks):
            continue
        against = measured.difference(name, "full")
        every = measured.difference(name, "full", measured.tasks)
        means = [np.mean([of_cell[t, s][0] for t, s in of_cell if t == task]) for task in tasks]
        rows.append(
            [
                *(name.split(":") + [""])[:2],
                f"{rate:g}",
                str(len(against.values)),
                points(float(np.mean(means)), 2),
                str(against),
                f"{against.better}:{against.worse}",
                *([str(every)] if has_others else []),
                *([number(_forgotten(of_cell, tasks), 3, sign=True)] if measured.is_decoder else []),
            ]
        )
    header = ["layers", "k", "rate", "tasks", "mean of these", f"minus full {INTERVALS}"]
    header += ["better:worse", *[WITH_OTHERS] * has_others]
    return table([*header, *(["loss on plain text"] if measured.is_decoder else [])], rows)


def _forgotten(of_cell: dict[tuple[str, int], tuple[float, list[list[float]]]], tasks: Sequence[str]) -> float:
    """How much higher the loss on plain text is after tuning, the mean over tasks."""
    by_task = [[np.diff(plain).mean() for (t, _), (_, plain) in of_cell.items() if t == task] for task in tasks]
    return float(np.mean([np.mean(costs) for costs in by_task]))


def few_rows_table(results: Results) -> str:
    """The same for each number of training rows that tasks were cut to."""
    named = [file.stem.partition("@")[2] for file in results.folder.glob("runs/*@*.jsonl")]
    return "\n\n".join(f"{n} training rows:\n\n{cells_table(results, n)}" for n in sorted(set(map(int, named))))


def tasks_table(results: Results) -> str:
    """The metric of each way to choose layers of a decoder on each task, means over seeds."""
    measured, rows = CellValues(results), []
    for name, label in CHOICES.items():
        rate, of_cell = measured.cell(measured.cell_name(name))
        by_task = [[v for (t, _), (v, _) in of_cell.items() if t == task] for task in measured.tasks]
        rows.append([label, f"{rate:g}", *(points(float(np.mean(v))) if v else MISSING for v in by_task)])
    seeds = [str(len({s for t, s in measured.cell("full")[1] if t == task})) for task in measured.tasks]
    return table(["layers", "rate", *measured.tasks], [*rows, ["seeds", "", *seeds]])


def choices(results: Results) -> dict[str, dict[str, Difference]]:
    """Each way to choose layers against full tuning, on each of the models beside one another."""
    measured = {model: CellValues(Results(results.folder.parent / folder)) for folder, model in MODELS.items()}
    return {
        label: {model: values.difference(values.cell_name(name), "full") for model, values in measured.items()}
        for name, label in CHOICES.items()
        if name != "full"
    }


def choices_table(results: Results) -> str:
    """Each way to choose layers against full tuning, on all models, ± over tasks."""
    rows = []
    for label, of_models in choices(results).items():
        shown = [(number(found.mean, 1, sign=True), number(found.over_tasks, 1)) for found in of_models.values()]
        rows.append([label, *(MISSING if mean == MISSING else f"{mean} ± {half}" for mean, half in shown)])
    return table(["minus all weights", *MODELS.values()], rows)


def pairs_table(results: Results) -> str:
    """Ways to choose layers, and methods, against one another, paired by task and seed."""
    measured, rows = CellValues(results), []
    lora = measured.cell_name("lora")
    loras = dict.fromkeys((lora, "lora-16"))
    kinds = ("alternate", "middle", "fisher", "last", "random")
    pairs = [(f"spread:{k}", f"{other}:{k}") for k in measured.counts for other in kinds]
    pairs += [(f"fisher:{k}", f"random:{k}") for k in measured.counts] + [("fisher", "fisher_after_epoch")]
    pairs += [*(("spread", other) for other in loras), ("best", "spread"), ("best", "full"), ("best", "best_seed")]
    pairs += [("spread:7@2e-05", "full"), *(("spread:7@5e-05", other) for other in ("full", lora, "spread:7@2e-05"))]
    pairs += [("attention", other) for other in ("full", *loras, "spread", "fisher")]
    pairs += [(name, other) for name in ("columns-32", "turns-2-50-shuffled") for other in (*loras, "full")]
    pairs += [(name, "alternate") for name in methods.HALVED]
    for name, other in pairs:
        found, every = (
            measured.difference(measured.cell_name(name), measured.cell_name(other), chosen)
            for chosen in (measured.learnt, measured.tasks)
        )
        label = f"{_label(name)} - {'in float32' if name in methods.HALVED else _label(other)}"
        if found.values:
            rows.append([label, str(found), f"{found.better}:{found.worse}", str(every)])
    return table(["difference", f"points {INTERVALS}", "better:worse", WITH_OTHERS], rows)


def halves_table(results: Results) -> str:
    """Each against full tuning on the half of the tasks that one is to be chosen on, and on the other half."""
    measured, rows = CellValues(results), []
    for name in list(CHOICES)[1:]:
        halves = [[task for task in half if task in measured.learnt] for half in (CHOOSE_ON, CONFIRM_ON)]
        found = [measured.difference(measured.cell_name(name), "full", half) for half in halves]
        rows.append([_label(name), *map(str, found)])
    return table(["minus all weights", f"choosing half, {INTERVALS}", "confirming half"], rows)


def _label(name: str) -> str:
    kind, _, count = name.partition(":")
    return (METHODS | CHOICES)[kind] + f" ({count.replace('@', ' at ')})" * bool(count)


METHODS = {
    "best": "the best of these, every other and the middle layers by held-out rows",
    "best_seed": "the best seed of all weights by held-out rows",
    "fisher_after_epoch": "most Fisher information after an epoch",
    "columns-32": "32 columns of all linear maps",
    "turns-2-50-shuffled": "all layers in turns of two",
    "lora-16": "LoRA of all linear maps, r = 16",
    "lora-II": "LoRA of the attention, r = 64",
    "bf16": "every other layer in bfloat16",
    "bf16-stochastic": "every other layer in bfloat16, stochastically rounded",
}
"""What methods that do not choose among layers are called."""
CHOICES = {
    "full": "all weights",
    "spread": "layers at equal distances",
    "alternate": "every other layer",
    "random": "random layers",
    "middle": "middle layers",
    "fisher": "most Fisher information",
    "last": "last layers",
    "attention": "the attention of all layers",
    "lora": "LoRA",
}
"""What cells are called."""
SEEDS = range(3)
"""The seeds of cells with all training rows. Some cells, not all, have more on small tasks: no fair comparison."""
MODELS = {
    "gemma3": "Gemma 3 270M, 6 of 18 layers",
    "mpnet": "MPNet, 5 of 12",
    "minilm": "MiniLM, 2 of 6",
}


class CellValues:
    """What the runs of a model give for each cell.

    Args:
        results: The results of the model.
        few: Those with so few training rows; 0 for those with all.
        every: Those of these tasks.
    """

    def __init__(self, results: Results, few: int = 0, every: Iterable[str] = TASKS):
        self._k = results.k
        files = {task: results.folder / f"runs/{task}.jsonl" for task in (few_rows.named(name, few) for name in every)}
        self.tasks = [task for task, file in files.items() if file.exists()]
        self.runs = [run for task in self.tasks for run in records.read(files[task])]
        self.is_decoder = any("plain" in run for run in self.runs)
        place = Finished("", Path(), results.folder, Path(), "cpu", results.depth, self.is_decoder)
        seeds = sorted({run["seed"] for run in self.runs if few or run["seed"] in SEEDS})
        self._cells = cells.Cells(place, [], self.tasks, seeds, shared=cells.SHARED if self.is_decoder else None)
        self._known: dict[str, tuple[float, dict[tuple[str, int], tuple[float, list[list[float]]]]]] = {}

    @property
    def counts(self) -> list[int]:
        """The numbers of layers of the tables."""
        depth = self._cells.place.depth
        if not self.is_decoder:
            return cells.default_counts(depth)
        named = {len(m.split(".")) for run in self.runs if (m := run["tuning"]).startswith("layers-")}
        return sorted(named & {depth // 6, depth // 3, depth // 2})

    def names(self) -> list[str]:
        """The cells of the tables, whether there are runs or not."""
        others = OTHERS if self.is_decoder else ()
        return cells.cell_names([*PARTS, *cells.KINDS, *LITERATURE, *others], self.counts)

    def rankings(self, task: str, seed: int) -> dict[str, dict[str, Any]]:
        """The rankings of a task as it is now, by score."""
        return self._cells.place.rankings(task, seed)

    def cell_name(self, name: str) -> str:
        """A way to choose layers as the cell of a third of them (of an encoder, of 5 in 12); `lora` as that of the
        papers on encoders or r = 16 on all linear maps; a method, or a cell, by its own name."""
        if name == "lora":
            return "lora-16" if self.is_decoder else "lora-II"
        count = self._cells.place.depth // 3 if self.is_decoder else self._k
        is_cell = ":" in name or name in (*TRIED, "best_seed") or methods.family(name) in methods.RATES
        return name if is_cell else f"{name}:{count}"

    def cell(self, name: str) -> tuple[float, dict[tuple[str, int], tuple[float, list[list[float]]]]]:
        """The rate of a cell, and for each task and seed its metric (the mean over draws) and what was forgotten."""
        if name not in self._known:
            rate, runs = self.runs_of(name)
            measured = {}
            for key, there in runs.items():
                metric = float(np.mean([run["validation"][run["metric"]] for run in there]))
                measured[key] = metric, [run["plain"] for run in there if "plain" in run]
            self._known[name] = rate, measured
        return self._known[name]

    def runs_of(self, name: str) -> tuple[float, dict[tuple[str, int], list[dict]]]:
        """The rate of a cell, and for each task and seed its runs at that rate; several where layers are random.

        `spread:7@2e-05` is at that rate, whatever held-out rows say.
        """
        if not self.runs:
            return math.nan, {}
        if name in TRIED:
            tried = [self.runs_of(self.cell_name(kind))[1] for kind in TRIED[name]]
            shared = set.intersection(*map(set, tried))
            return math.nan, {key: [max((runs[key][0] for runs in tried), key=held_out)] for key in shared}
        if name == "best_seed":
            rate, runs = self.runs_of("full")
            best = {task: max((runs[t, s][0] for t, s in runs if t == task), key=held_out) for task, _ in runs}
            return rate, {(task, seed): [best[task]] for task, seed in runs}
        name, _, rate = name.partition("@")
        found = cells.Cells(self._cells.place, [], self.tasks, self._cells.seeds, float(rate)) if rate else self._cells
        kind, _, count = name.partition(":")
        return runs_of_cell(found, name, f"alternate:{count}" if kind in methods.HALVED else name)

    @property
    def learnt(self) -> list[str]:
        """The tasks that means are over."""
        return [task for task in self.tasks if few_rows.whole(task) not in NOT_LEARNT]

    def runs_of_a_third(self) -> tuple[int, dict[tuple[str, str, int], dict[str, Any]]]:
        """How many layers of a decoder are tuned, and the runs at their rate, by task, method and seed."""
        name = self.cell_name("last")
        done = [run for task in self.learnt for run in self._cells.place.runs(task).values()]
        runs = {(run["task"], run["tuning"], run["seed"]): run for run in done if run["rate"] == self.cell(name)[0]}
        return int(name.partition(":")[2]), runs

    def difference(self, name: str, other: str, chosen: Sequence[str] | None = None) -> Difference:
        """One cell against another in points, paired by task and seed, on those tasks (the learnt ones) that both
        have."""
        one, two = self.cell(name)[1], self.cell(other)[1]
        paired = [
            [100 * (one[t, s][0] - two[t, s][0]) for t, s in one if t == task and (t, s) in two]
            for task in (self.learnt if chosen is None else chosen)
        ]
        return Difference([points_of for points_of in paired if points_of])


def runs_of_cell(
    found: cells.Cells, name: str, judged_by: str
) -> tuple[float, dict[tuple[str, int], list[dict[str, Any]]]]:
    """The rate of a cell, chosen with another one, and for each task and seed its runs."""
    tasks = list(found.every_task)
    orders = found.orders()
    done = {task: found.place.runs(task) for task in tasks}
    rate, untried = found.chosen_rate(judged_by, done, orders)
    measured: dict[tuple[str, int], list[dict[str, Any]]] = {}
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
            if there := [run for run in runs if run]:
                measured[task, seed] = there
    return rate, measured
