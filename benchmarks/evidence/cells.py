"""Cells: a method, how many layers it tunes, and a learning rate of its own, chosen on held-out rows.

Rates are tried on a ladder (1, 2, 5, 10, ...; for LoRA 1, 3, 10, ...) with the first seed on `RATE_TASKS`, until the
one with the best held-out mean has a worse one on either side: the edge is never the answer. The other tasks and seeds
are run with that rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.evidence import criteria, few_rows, methods, texts
from benchmarks.evidence.jobs import AFTER_EPOCH, RANDOM_DRAWS, Job, Place
from benchmarks.evidence.plans import RATE_TASKS, alternate, train_jobs, weight


KINDS = ("last", "fisher", "alternate", "middle", "spread", "random")
"""Ways to choose layers that every model is tuned by; `lowest_fisher` and the like begin at the other end."""
LADDERS = dict.fromkeys(("layers", "turns", "full", "mlp", "attention"), (1, 2, 5))
LADDER = (1, 3)
FEW_LAYERS = (1e-4, 2e-4, 5e-4)
"""Where the search begins for a single layer."""

SHARED = ("last", "spread", "fisher", "random")
"""Ways to choose layers of a decoder whose mean gives all ways a rate, for each k."""

Run = tuple[str, str, float]
"""A task, a method with its layers, and a rate."""


def cell_names(chosen: Sequence[str], counts: Sequence[int]) -> list[str]:
    """The cells of some methods: `last` with 1 and 3 layers is `last:1` and `last:3`."""
    found = [[name] if methods.family(name) in methods.RATES else [f"{name}:{k}" for k in counts] for name in chosen]
    return [cell for cells in found for cell in cells]


def default_counts(depth: int) -> list[int]:
    """1, 3 and 5 layers of 12, of other depths as large a part."""
    return sorted({methods.part(k, depth) for k in (1, 3, 5)})


def rate_tasks(chosen: Sequence[str]) -> list[str]:
    """The tasks that rates are chosen on: those of language modelling for these, and with as many training rows."""
    name, _, rows = next(iter(chosen), "").partition("@")
    of_kind = texts.TASKS if name in texts.TASKS else RATE_TASKS
    return [few_rows.named(task, int(rows or 0)) for task in of_kind]


def fixed_orders(depth: int) -> dict[str, Sequence[int]]:
    """The choices that look at nothing."""
    middle = sorted(range(depth), key=criteria.nearness_to_middle(depth).__getitem__, reverse=True)
    every_other = dict.fromkeys(("alternate", *methods.HALVED), alternate(depth))
    return {"last": range(depth)[::-1], "first": range(depth), "middle": middle, **every_other}


def draws(cell: str) -> list[str]:
    """The plans of a cell: several for random layers."""
    if not cell.startswith("random:"):
        return [cell]
    return [cell.replace("random", f"random{draw}") for draw in range(RANDOM_DRAWS)]


def neighbour(rate: float, up: bool, ladder: Sequence[int]) -> float:
    """The next rate on a ladder.

    Example:

        >>> neighbour(2e-4, True, (1, 2, 5)), neighbour(1e-4, False, (1, 3))
        (0.0005, 3e-05)
    """
    power = math.floor(math.log10(rate) + 1e-9)
    rungs = [float(f"{rung}e{power + shift}") for shift in (-1, 0, 1) for rung in ladder]
    beyond = [r for r in rungs if (r > 1.01 * rate if up else r < 0.99 * rate)]
    return min(beyond) if up else max(beyond)


def search(values: Mapping[float, float], start: Sequence[float], ladder: Sequence[int]) -> tuple[float, list[float]]:
    """The best rate so far, and those still to be tried before it counts as chosen.

    Args:
        values: The held-out mean of each rate tried.
        start: Where to begin.
        ladder: The first digits of the rates.

    Returns:
        A rate (the smallest of equal ones; NaN before all of `start` are tried), and the rates to try; none if it has
        a worse one on either side.
    """
    if missing := [rate for rate in start if rate not in values]:
        return math.nan, missing
    best = max(sorted(values), key=values.__getitem__)
    beside = [neighbour(best, up, ladder) for up in (False, True)]
    return best, [rate for rate in beside if rate not in values]


class Cells:
    """What the cells need next.

    Args:
        place: Where everything is.
        names: The cells.
        chosen: The tasks, beside those for choosing rates.
        seeds: The seeds; rates are chosen with the first.
        rate: The rate of all; None to choose one for each.
        shared: Ways to choose layers; all ways have the rate with the best mean over these, for each k. None for a
            rate of its own for each way.
    """

    def __init__(
        self,
        place: Place,
        names: Sequence[str],
        chosen: Sequence[str],
        seeds: Sequence[int],
        rate: float | None = None,
        shared: Sequence[str] | None = None,
    ):
        self.place, self.names, self.chosen, self.seeds, self.rate = place, names, chosen, seeds, rate
        self.shared = shared
        self.fixed = fixed_orders(place.depth)
        self.rate_tasks = rate_tasks(chosen)
        self.every_task = dict.fromkeys(chosen if rate else (*self.rate_tasks, *chosen))

    def missing_rankings(self, busy: Iterable[Job], rate_of_full: float) -> list[Job]:
        """Rankings without which some cells have no layers."""
        plans = [plan.split(":")[0] for cell in self.names for plan in draws(cell) if ":" in plan]
        plans += [draws(f"{kind}:1")[0].split(":")[0] for kind in self.shared or ()]
        scores = [
            name
            for name in dict.fromkeys(plan.removeprefix("lowest_") for plan in plans)
            if name not in self.fixed and name != "spread"
        ]
        ranked = {(job.task, job.seed) for job in busy if job.kind == "rank"}
        jobs = []
        for seed in self.seeds:
            for task in self.every_task:
                missing = tuple(s for s in scores if s not in self.place.rankings(task, seed))
                if math.isnan(rate_of_full):
                    missing = tuple(s for s in missing if not s.endswith(AFTER_EPOCH))
                if missing and (task, seed) not in ranked:
                    jobs.append(Job("rank", task, seed, missing, (rate_of_full,), weight(self.place, task, 1)))
        return jobs

    def jobs(self, busy: Sequence[Job] = ()) -> list[Job]:
        """The jobs that can be begun now, the most urgent first.

        Args:
            busy: Jobs that run or have failed, which are left out.
        """
        seed, *_ = self.seeds
        orders = self.orders()
        done = {task: self.place.runs(task) for task in self.every_task}
        rate_of_full, untried = self.chosen_rate("full", done, orders)
        ranking = self.missing_rankings(busy, math.nan if untried else rate_of_full)
        urgent: list[Run] = []
        later: dict[tuple[int, int], list[Run]] = {}
        for cell in self.names:
            rate, untried = self.chosen_rate(cell, done, orders)
            for other in untried:
                urgent += self._runs(self._judged_by(cell), self.rate_tasks, other, orders, seed)
            if untried or math.isnan(rate):
                continue
            for number, s in enumerate(self.seeds):
                for draw, plan in enumerate(draws(cell)):
                    runs = self._runs([plan], self.chosen, rate, orders, s)
                    later.setdefault((number, draw > 0), []).extend(runs)
        found = self._train(urgent, seed, busy)
        for (number, _), runs in sorted(later.items()):
            found += self._train(runs, self.seeds[number], busy)[::-1]  # short ones first: the time may run out
        return ranking + found

    def orders(self) -> dict[tuple[str, int], dict[str, Sequence[int]]]:
        """The layers of each task and seed by all scores, best first."""
        return {(t, s): self.fixed | self._ranked(t, s) for s in self.seeds for t in self.every_task}

    def _ranked(self, task: str, seed: int) -> dict[str, Sequence[int]]:
        found = {score: ranking["order"] for score, ranking in self.place.rankings(task, seed).items()}
        return found | {f"lowest_{score}": order[::-1] for score, order in found.items()}

    def _judged_by(self, cell: str) -> list[str]:
        """The plans whose held-out mean gives a cell its rate."""
        if self.shared and ":" in cell:
            return [draws(f"{kind}:{cell.split(':')[1]}")[0] for kind in self.shared]
        return draws(cell)[:1]

    def chosen_rate(self, cell: str, done: Mapping[str, Mapping], orders: Any) -> tuple[float, list[float]]:
        """The rate of a cell, and those still to be tried; see `search`."""
        if self.rate:
            return self.rate, []
        plans, seed = self._judged_by(cell), self.seeds[0]
        try:
            tunings = [(task, methods.resolve(plan, orders[task, seed])) for task in self.rate_tasks for plan in plans]
        except KeyError:
            return math.nan, []
        values = {}
        for rate in {rate for task in self.rate_tasks for _, rate, _ in done[task]}:
            runs = [done[task].get((tuning, rate, seed)) for task, tuning in tunings]
            if all(runs):
                values[rate] = float(np.mean([run["held_out"][run["metric"]] for run in runs]))
        family = methods.family(tunings[0][1])
        start = FEW_LAYERS if cell.endswith(":1") else methods.RATES[family]
        return search(values, start, LADDERS.get(family, LADDER))

    def _runs(self, plans: Sequence[str], chosen: Sequence[str], rate: float, orders: Any, seed: int) -> list[Run]:
        found = []
        for task in chosen:
            for plan in plans:
                try:
                    found.append((task, methods.resolve(plan, orders[task, seed]), rate))
                except KeyError:  # not ranked yet
                    continue
        return found

    def _train(self, runs: Sequence[Run], seed: int, busy: Sequence[Job]) -> list[Job]:
        taken = {
            (job.task, tuning, rate)
            for job in busy
            if (job.kind, job.seed) == ("train", seed)
            for tuning, rate in zip(job.items, job.rates, strict=True)
        }
        return train_jobs(self.place, [run for run in dict.fromkeys(runs) if run not in taken], seed)
