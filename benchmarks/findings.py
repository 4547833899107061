"""The results of a model, read from its JSON files, and what can be said of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import criteria
import methods
import numpy as np
import pandas as pd
import records
import tasks
from jobs import RANDOM_DRAWS
from scipy.stats import kendalltau, t


RESULTS = Path(__file__).parent / "results" / "evidence"


class Results:
    """All results of a model.

    Args:
        folder: The folder that `run.py` filled.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        chosen = json.loads((folder / "rates.json").read_text())
        self.rates, self.held_out_by_rate = chosen["chosen"], chosen["held_out"]
        rows = [run for file in sorted(folder.glob("runs/*.jsonl")) for run in records.read(file)]
        self.runs = {
            (r["task"], r["tuning"], r["seed"]): r
            for r in rows
            if r["rate"] == self.rates[methods.family(r["tuning"])]
        }
        sizes = folder / "tasks.json"
        self.sizes: dict[str, dict] = json.loads(sizes.read_text()) if sizes.exists() else {}
        self.seeds = sorted({seed for _, _, seed in self.runs})
        self.rankings: dict[tuple[str, int], dict[str, dict]] = {}
        ranked = records.read(folder / "rankings.jsonl")
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

    def tuning(self, plan: str, task: str, seed: int) -> str | None:
        """What a plan is on a task; None if its ranking is missing."""
        orders = {score: ranking["order"] for score, ranking in self.rankings.get((task, seed), {}).items()}
        try:
            return methods.resolve(plan, orders)
        except KeyError:
            return None

    def run(self, plan: str, task: str, seed: int) -> dict | None:
        """The run of a plan."""
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

    def mean(self, plan: str, task: str) -> float:
        """The mean over seeds; NaN if there is no run."""
        values = list(self.values(plan, task).values())
        return float(np.mean(values)) if values else math.nan

    def average(self, plan: str, chosen: Sequence[str]) -> float:
        """The mean over tasks; NaN if a task is missing."""
        return float(np.mean([self.mean(plan, task) for task in chosen])) if chosen else math.nan

    def difference(self, plan: str, other: str, chosen: Sequence[str]) -> tuple[float, float, int, int]:
        """A plan against another on the same tasks and seeds.

        Returns:
            The mean difference in points, half of its 95 % interval over tasks (both NaN if a task is missing), and on
            how many tasks it is better and worse.
        """
        differences = [self.task_difference(plan, other, task) for task in chosen]
        mean, half = interval(differences)
        return mean, half, sum(d > 0 for d in differences), sum(d < 0 for d in differences)

    def task_difference(self, plan: str, other: str, task: str) -> float:
        """A plan against another on a task, in points, mean over the seeds that both have; NaN if there are none."""
        a, b = self.values(plan, task), self.values(other, task)
        both = sorted(set(a) & set(b))
        return 100 * float(np.mean([a[s] - b[s] for s in both])) if both else math.nan

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


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 95 % interval (Student's t); NaN where there are too few values."""
    if not values:
        return math.nan, math.nan
    n = len(values)
    half = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5) if n > 1 else math.nan
    return float(np.mean(values)), half


def fewest_layers(results: Results, task: str, share: float) -> int | None:
    """The fewest last layers that keep a share of the full result; None if that was not found."""
    full = results.mean("full", task)
    for n in range(results.depth + 1):
        value = results.mean(f"last:{n}" if n else "head", task)
        if value >= share * full:
            return n
    return None


def agreement(a: Sequence[float], b: Sequence[float], k: int) -> tuple[float, int]:
    """Kendall's tau of two rankings, and how many layers their best k share."""
    tops = [set(np.argsort(scores)[::-1][:k].tolist()) for scores in (a, b)]
    return float(kendalltau(a, b).statistic), len(tops[0] & tops[1])


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
