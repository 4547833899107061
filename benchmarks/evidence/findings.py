"""The results of a model, read from its JSON files, and what can be said of them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import kendalltau, t

from benchmarks.common import device
from benchmarks.common.table_format import number
from benchmarks.evidence import criteria, methods, records, tasks
from benchmarks.evidence.jobs import RANDOM_DRAWS


RESULTS = device.RESULTS / "evidence"
EQUAL = 1e-9
"""Points that are no difference, but rounding of a sum."""
TRIED = {
    "trial": ("alternate", "middle", "last"),
    "trial_random": ("random0", "random1", "random2"),
    "best": ("spread", "alternate", "middle"),  # a cell, each at a rate of its own
}
"""Plans that tune three choices of k layers in turn and keep the best by the held-out rows."""


class Results:
    """All results of a model.

    Args:
        folder: The folder that `run.py` filled.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        rates = folder / "rates.json"
        chosen = json.loads(rates.read_text()) if rates.exists() else {"chosen": {}, "held_out": {}}
        self.rates, self.held_out_by_rate = chosen["chosen"], chosen["held_out"]
        self.every_run = [run for file in sorted(folder.glob("runs/*.jsonl")) for run in records.read(file)]
        of_0_1_0 = [run for run in self.every_run if run.get("revision", 1) == 1]  # `cells` has the others
        self.every_run = [run for run in of_0_1_0 if run["task"] in tasks.TASKS]  # and those with few rows
        self.runs = {
            (r["task"], r["tuning"], r["seed"]): r
            for r in self.every_run
            if r["rate"] == self.rates.get(methods.family(r["tuning"]))
        }
        sizes = folder / "tasks.json"
        self.sizes: dict[str, dict] = json.loads(sizes.read_text()) if sizes.exists() else {}
        self.seeds = sorted({seed for _, _, seed in self.runs})
        self.rankings: dict[tuple[str, int], dict[str, dict]] = {}
        ranked = [r for r in records.read(folder / "rankings.jsonl") if r.get("revision", 1) == 1]
        ranked = [r for r in ranked if r["task"] in tasks.TASKS]
        for seed in self.seeds:
            for r in ranked:
                if r["seed"] == seed or (r["seed"] == 0 and r["score"] in criteria.COSTLY):
                    self.rankings.setdefault((r["task"], seed), {})[r["score"]] = r
        tracked = records.read(folder / "track.jsonl")
        lengths = [len(point["scores"]) for record in tracked for point in record["points"]]
        self.depth = max([len(r["scores"]) for r in ranked] + lengths, default=12)
        self.k = max(1, self.depth * 5 // 12)
        named = {key[0] for key in self.runs} | {record["task"] for record in tracked}
        self.tasks = [task for task in tasks.TASKS if task in named]

    @property
    def shared_seeds(self) -> list[int]:
        """The seeds that every task was run with; small tasks have more."""
        tuned = {(task, seed) for task, tuning, seed in self.runs if tuning == "full"}
        return [seed for seed in self.seeds if all((task, seed) in tuned for task in self.tasks)]

    def of_seeds(self, seeds: Sequence[int]) -> Results:
        """The results of some seeds alone."""
        part = copy.copy(self)
        part.seeds = list(seeds)
        return part

    def tuning(self, plan: str, task: str, seed: int) -> str | None:
        """What a plan is on a task; None if its ranking is missing."""
        orders = {score: ranking["order"] for score, ranking in self.rankings.get((task, seed), {}).items()}
        try:
            return methods.resolve(plan, orders)
        except KeyError:
            return None

    def run(self, plan: str, task: str, seed: int) -> dict | None:
        """The run of a plan; of several that it tries, the one that is best on the held-out rows."""
        if plan in TRIED:
            tried = [self.run(f"{score}:{self.k}", task, seed) for score in TRIED[plan]]
            return max(tried, key=held_out) if all(tried) else None
        return self.runs.get((task, self.tuning(plan, task, seed), seed))

    def values(self, plan: str, task: str) -> dict[int, float]:
        """The metric of a plan on a task by seed; `random` is the mean of all random draws."""
        found = {}
        for seed in self.seeds:
            names = [f"random{d}:{self.k}" for d in range(RANDOM_DRAWS)] if plan == "random" else [plan]
            runs = [self.run(name, task, seed) for name in names]
            if all(run is not None for run in runs):
                found[seed] = float(np.mean([run["validation"][run["metric"]] for run in runs]))
        return found

    def best_seed(self, plan: str, task: str) -> float:
        """The metric of the seed that is best on the held-out rows; NaN if there is no run."""
        runs = [run for seed in self.seeds if (run := self.run(plan, task, seed))]
        best = max(runs, key=held_out, default=None)
        return best["validation"][best["metric"]] if best else math.nan

    def mean(self, plan: str, task: str) -> float:
        """The mean over seeds; NaN if there is no run."""
        values = list(self.values(plan, task).values())
        return float(np.mean(values)) if values else math.nan

    def average(self, plan: str, chosen: Sequence[str]) -> float:
        """The mean over tasks; NaN if a task is missing."""
        return float(np.mean([self.mean(plan, task) for task in chosen])) if chosen else math.nan

    def seeds_of(self, plan: str, chosen: Sequence[str] | None = None) -> str:
        """How many seeds a plan was run with: a number, or the fewest and the most over the tasks."""
        counts = [len(self.values(plan, task)) for task in chosen or self.tasks]
        fewest, most = min(counts, default=0), max(counts, default=0)
        return str(most) if fewest == most else f"{fewest}-{most}"

    def differences(self, plan: str, other: str, task: str) -> list[float]:
        """A plan against another on a task in points, for each seed that both have."""
        a, b = self.values(plan, task), self.values(other, task)
        return [100 * (a[seed] - b[seed]) for seed in sorted(set(a) & set(b))]

    def difference(self, plan: str, other: str, chosen: Sequence[str]) -> Difference:
        """A plan against another, paired by task and seed.

        Args:
            plan: The one.
            other: The other.
            chosen: The tasks.

        Returns:
            The difference; NaN if a task is missing.
        """
        return Difference([self.differences(plan, other, task) for task in chosen])

    def task_difference(self, plan: str, other: str, task: str) -> float:
        """A plan against another on a task, in points, mean over the seeds that both have; NaN if there are none."""
        found = self.differences(plan, other, task)
        return float(np.mean(found)) if found else math.nan

    def seed_noise(self, plans: Sequence[str], task: str) -> float:
        """Half of the 95 % interval over seeds of a mean difference to full tuning on a task, in points.

        The deviation between seeds is pooled over plans, since three seeds of one plan say little about it.
        """
        groups = [found for plan in plans if len(found := self.differences(plan, "full", task)) > 1]
        freedom = sum(len(group) - 1 for group in groups)
        if not freedom:
            return math.nan
        deviation = (sum((len(group) - 1) * np.var(group, ddof=1) for group in groups) / freedom) ** 0.5
        return float(t.ppf(0.975, freedom) * deviation / max(map(len, groups)) ** 0.5)

    def without_noisiest(self, plans: Sequence[str]) -> tuple[str, list[str]]:
        """The task whose results depend most on the seed, and the other tasks."""
        noise = {task: self.seed_noise(plans, task) for task in self.tasks}
        noisiest = max(self.tasks, key=lambda task: -math.inf if math.isnan(noise[task]) else noise[task])
        return noisiest, [task for task in self.tasks if task != noisiest]

    def noise(self, task: str) -> float:
        """Half of the 95 % interval, in points, that the size of the validation split alone gives one run, roughly.

        That of an accuracy as high as that of full tuning; for a correlation, Fisher's.
        """
        run, rows = self.run("full", task, self.seeds[0]), self.sizes[task]["validation"]
        if run is None:
            return math.nan
        if run["metric"] == "pearson":
            return 196 * (1 - run["validation"]["pearson"] ** 2) / rows**0.5
        share = run["validation"]["accuracy"]
        return 196 * (share * (1 - share) / rows) ** 0.5


def held_out(run: dict) -> tuple[float, float]:
    """How good a run is on the held-out rows."""
    return run["held_out"][run["metric"]], -run["held_out"]["loss"]


@dataclass(frozen=True)
class Difference:
    """How far a way of tuning is ahead of another.

    Args:
        values: Differences in points, for each task those of each seed.
    """

    values: list[list[float]]

    @property
    def by_task(self) -> list[float]:
        """The mean over the seeds of each task; NaN where there is none."""
        return [float(np.mean(seeds)) if seeds else math.nan for seeds in self.values]

    @property
    def mean(self) -> float:
        """The mean over tasks of the means over seeds."""
        return float(np.mean(self.by_task)) if self.values else math.nan

    @property
    def over_tasks(self) -> float:
        """Half of the 95 % interval of the mean for other tasks and seeds: Student's t on the tasks' means."""
        return interval(self.by_task)[1]

    @property
    def over_seeds(self) -> float:
        """Half of the 95 % interval of the mean for other seeds of the same tasks; NaN if one has a single seed.

        The tasks' variances differ, so the degrees of freedom are Welch's and Satterthwaite's.
        """
        if any(len(seeds) < 2 for seeds in self.values):
            return math.nan
        parts = np.array([np.var(seeds, ddof=1) / len(seeds) for seeds in self.values])
        if not parts.sum():
            return 0.0
        freedom = parts.sum() ** 2 / sum(p**2 / (len(s) - 1) for p, s in zip(parts, self.values, strict=True))
        return float(t.ppf(0.975, freedom) * parts.sum() ** 0.5 / len(parts))

    @property
    def better(self) -> int:
        """On how many tasks it is ahead."""
        return sum(d > EQUAL for d in self.by_task)

    @property
    def worse(self) -> int:
        """On how many tasks it is behind."""
        return sum(d < -EQUAL for d in self.by_task)

    def __str__(self) -> str:
        return f"{number(self.mean, sign=True)} ± {number(self.over_tasks)} ({number(self.over_seeds)})"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 95 % interval (Student's t); NaN where there are too few values."""
    if not values:
        return math.nan, math.nan
    n = len(values)
    half = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5) if n > 1 else math.nan
    return float(np.mean(values)), half


def fewest_layers(results: Results, task: str, share: float) -> int | None:
    """The fewest last layers that keep a share of the full result of the same seeds; None if that was not found."""
    full = results.values("full", task)
    for n in range(results.depth + 1):
        values = results.values(f"last:{n}" if n else "head", task)
        both = set(values) & set(full)
        if both and sum(values[seed] for seed in both) >= share * sum(full[seed] for seed in both):
            return n
    return None


def agreement(a: Sequence[float], b: Sequence[float], k: int) -> tuple[float, int]:
    """Kendall's tau of two rankings, and how many layers their best k share."""
    tops = [set(np.argsort(scores)[::-1][:k].tolist()) for scores in (a, b)]
    return float(kendalltau(a, b).statistic), len(tops[0] & tops[1])


def code_agreement(results: Results, task: str) -> list[tuple[float, int]]:
    """For each seed Kendall's tau of the formula's ranking and the published code's, and the top layers they share."""
    ranked = [results.rankings.get((task, seed), {}) for seed in results.seeds]
    return [
        agreement(by_score["fisher"]["scores"], by_score["published_code"]["scores"], results.k)
        for by_score in ranked
        if "fisher" in by_score and "published_code" in by_score
    ]


def samples_frame(results: Results) -> pd.DataFrame:
    """Each ranking from few samples, compared with that from the most."""
    rows = []
    for record in records.read(results.folder / "samples.jsonl"):
        found = record["rankings"]
        for kind in ("given", "sampled", "exact"):
            some = [r for r in found if r["kind"] == kind]
            if not some:
                continue
            most = max(some, key=lambda r: r["n"])
            for ranking in some:
                if ranking is not most:
                    tau, overlap = agreement(ranking["scores"], most["scores"], results.k)
                    rows.append([record["task"], kind, ranking["n"], tau, overlap, most["n"]])
    return pd.DataFrame(rows, columns=["task", "kind", "n", "tau", "overlap", "reference"])
