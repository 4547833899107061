"""Turn the results into the tables of docs/results.md.

    python benchmarks/tables.py mpnet                 # fills in the tables of docs/results.md
    python benchmarks/tables.py mpnet --print         # prints them

In the page a table stands between `<!-- table NAME -->` and `<!-- end -->`; what is between is replaced.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import criteria
import methods
import numpy as np
import pandas as pd
import plans
import records
import tasks
from jobs import RANDOM_DRAWS
from scipy.stats import kendalltau, t


RESULTS = Path(__file__).parent / "results" / "evidence"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
MISSING = "-"


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
        self.seeds = sorted({seed for _, _, seed in self.runs})
        self.rankings: dict[tuple[str, int], dict[str, dict]] = {}
        ranked = records.read(folder / "rankings.jsonl")
        for seed in self.seeds:
            for r in ranked:
                if r["seed"] == seed or (r["seed"] == 0 and r["score"] in criteria.COSTLY):
                    self.rankings.setdefault((r["task"], seed), {})[r["score"]] = r
        self.depth = max((len(r["order"]) for ranked in self.rankings.values() for r in ranked.values()), default=12)
        self.k = max(1, self.depth * 5 // 12)
        self.tasks = [task for task in tasks.TASKS if any(key[0] == task for key in self.runs)]

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
            The mean difference in points, half of its 95 % interval over tasks, and on how many tasks it is better and
            worse.
        """
        differences = []
        for task in chosen:
            a, b = self.values(plan, task), self.values(other, task)
            both = sorted(set(a) & set(b))
            if both:
                differences.append(100 * float(np.mean([a[s] - b[s] for s in both])))
        mean, half = interval(differences)
        return mean, half, sum(d > 0 for d in differences), sum(d < 0 for d in differences)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 95 % interval (Student's t); NaN where there are too few values."""
    if not values:
        return math.nan, math.nan
    n = len(values)
    half = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / n**0.5) if n > 1 else math.nan
    return float(np.mean(values)), half


def noise(task: str, rows: int) -> float:
    """Half of the 95 % interval, in points, that the size of the validation split alone gives an accuracy of 75 %."""
    return 100 * 1.96 * (0.75 * 0.25 / rows) ** 0.5


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, numbers on the right."""
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def points(value: float, digits: int = 1, sign: bool = False) -> str:
    """A share as points."""
    return MISSING if math.isnan(value) else f"{100 * value:{'+' if sign else ''}.{digits}f}"


def number(value: float, digits: int = 2, sign: bool = False) -> str:
    """A number."""
    return MISSING if math.isnan(value) else f"{value:{'+' if sign else ''}.{digits}f}"


def metrics_table(results: Results, named: dict[str, str], best: bool = True) -> str:
    """Metrics in points: a row for each plan, a column for each task, and the average over the tasks."""
    means = {plan: [results.mean(plan, task) for task in results.tasks] for plan in named}
    most = [np.nanmax([means[p][i] for p in named]) if best else None for i in range(len(results.tasks))]
    rows = []
    for plan, name in named.items():
        cells = [f"**{points(v)}**" if best and v == m else points(v) for v, m in zip(means[plan], most, strict=True)]
        rows.append([name, *cells, points(results.average(plan, results.tasks), 2)])
    return table(["method", *results.tasks, "average"], rows)


def relative_table(results: Results, named: dict[str, str], to: str = "full") -> str:
    """Differences in points to another plan."""
    rows = []
    for plan, name in named.items():
        cells = [points(results.mean(plan, task) - results.mean(to, task), sign=True) for task in results.tasks]
        mean, half, _, _ = results.difference(plan, to, results.tasks)
        rows.append([name, *cells, f"{number(mean, sign=True)} ± {number(half)}"])
    return table(["method", *results.tasks, "mean, 95 %"], rows)


# ---- the tables by name


def lodha(results: Results) -> str:
    """Tables 4 and 5 of Lodha et al., with the controls they lack."""
    return metrics_table(results, lodha_plans(results))


def lodha_relative(results: Results) -> str:
    """Figure 1 of Lodha et al.: points relative to full tuning."""
    return relative_table(results, {p: n for p, n in lodha_plans(results).items() if p != "full"})


def lodha_plans(results: Results) -> dict[str, str]:
    """The plans of question 1 and their names."""
    k = results.k
    return {
        "full": "full",
        **{f"fisher:{n}": f"Fisher, top {n}" for n in range(1, k + 1)},
        "fisher:-1": "Fisher, bottom 1",
        **{f"last:{n}": f"last {n}" for n in range(1, k + 1)},
        "random": f"random {k}, mean of {RANDOM_DRAWS} draws",
        f"grad_norm:{k}": f"gradient norm, top {k}",
        f"rgn:{k}": f"RGN, top {k}",
        f"snr:{k}": f"SNR, top {k}",
        "lora-II": "LoRA-II, r = 64",
        "head": "head alone",
    }


def fisher_against(results: Results) -> str:
    """Whether the Fisher's choice beats others."""
    k = results.k
    rows = []
    for other, name in (("full", "full"), (f"last:{k}", f"last {k}"), ("random", f"random {k}")) + tuple(
        (f"{score}:{k}", f"{name} {k}")
        for score, name in (("middle", "middle"), ("grad_norm", "gradient norm"), ("rgn", "RGN"), ("snr", "SNR"))
    ):
        mean, half, better, worse = results.difference(f"fisher:{k}", other, results.tasks)
        rows.append([f"Fisher {k} - {name}", f"{number(mean, sign=True)} ± {number(half)}", str(better), str(worse)])
    return table(["difference", "points, 95 % over tasks", "tasks better", "worse"], rows)


def spafit(results: Results) -> str:
    """Table 2 of Arora & Wang, scaled to this model."""
    return metrics_table(results, spafit_plans(results))


def spafit_plans(results: Results) -> dict[str, str]:
    """The plans of question 6 and their names, with the parameters they train beside the head."""
    named = {}
    for plan in plans.plans("6", results.depth):
        runs = [run for task in results.tasks for s in results.seeds if (run := results.run(plan, task, s))]
        size = f", {(runs[0]['trained_parameters'] - runs[0]['head_parameters']) / 1e6:.2f} M" if runs else ""
        named[plan] = plan.removeprefix("strata-").replace("/", " by ") + size
    return named


def criteria_table(results: Results) -> str:
    """Question 8: every way to choose k layers, on the tasks it may be chosen on and those that confirm it."""
    chosen_on = [task for task in plans.CHOOSE_ON if task in results.tasks]
    confirmed_on = [task for task in plans.CONFIRM_ON if task in results.tasks]
    rows = []
    for plan, name in criteria_plans(results).items():
        score = plan.partition(":")[0]
        seconds = [r[score]["seconds"] for r in results.rankings.values() if score in r]
        cells = [points(results.average(plan, group), 2) for group in (chosen_on, confirmed_on, results.tasks)]
        mean, half, better, worse = results.difference(plan, "full", results.tasks)
        versus = f"{number(mean, sign=True)} ± {number(half)}"
        rows.append(
            [name, *cells, versus, f"{better}:{worse}", number(float(np.median(seconds)), 1) if seconds else ""]
        )
    rows.sort(key=lambda row: -float(row[3]) if row[3] != MISSING else 0)
    header = ["layers", f"choosing half ({len(chosen_on)})", f"confirming half ({len(confirmed_on)})", "all tasks"]
    return table([*header, "minus full, 95 %", "better:worse than full", "seconds to rank"], rows)


def criteria_plans(results: Results) -> dict[str, str]:
    """All ways to choose k layers."""
    k = results.k
    scores = ("fisher", "last", "grad_norm", "rgn", "snr", "published_code", "middle", "alternate")
    named = {"full": "full", "random": "random"}
    named |= {f"{score}:{k}": score for score in (*scores, *criteria.COSTLY)}
    return {**named, f"fisher:{-k}": "lowest Fisher", "lora-II": "LoRA-II", "head": "head alone"}


def criteria_by_task(results: Results) -> str:
    """Question 8 by task."""
    return metrics_table(results, criteria_plans(results))


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
    centred = frame.drop(columns="task") - frame.groupby("task").transform("mean")
    a, y = centred[list(range(results.depth))].to_numpy(), centred["value"].to_numpy()
    effect = np.linalg.pinv(a) @ y
    return table(
        ["layer", *map(str, range(results.depth))],
        [[f"points, from {len(rows)} runs", *(f"{e - effect.mean():+.2f}" for e in effect)]],
    )


def elsa(results: Results) -> str:
    """Lee et al.: quality against the number of last layers."""
    named = {"head": "0 (head alone)", **{f"last:{n}": f"last {n}" for n in range(1, results.depth + 1)}}
    return metrics_table(results, {**named, "full": "full (embeddings too)"}, best=False)


def elsa_fraction(results: Results) -> str:
    """The fewest last layers that keep 90 % and 99 % of the full result."""
    rows = []
    for share in (0.9, 0.99):
        cells = [str(fewest_layers(results, task, share)) for task in results.tasks]
        rows.append([f"{share:.0%} of full", *cells])
    return table(["fewest last layers for", *results.tasks], rows)


def fewest_layers(results: Results, task: str, share: float) -> int | str:
    """The fewest last layers that keep a share of the full result."""
    full = results.mean("full", task)
    for n in range(results.depth + 1):
        value = results.mean(f"last:{n}" if n else "head", task)
        if value >= share * full:
            return n
    return MISSING


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


def heads(results: Results) -> str:
    """How far the ranking depends on the random head: agreement between pairs of five heads, 100 samples."""
    rows = []
    for record in records.read(results.folder / "samples.jsonl"):
        found = record["rankings"]
        cells = []
        for kind in ("head", "warm head"):
            scores = [r["scores"] for r in found if r["kind"] == kind]
            pairs = [agreement(a, b, results.k) for a, b in itertools.combinations(scores, 2)]
            cells += [number(float(np.mean([p[i] for p in pairs]))) for i in (0, 1)]
        rows.append([record["task"], *cells])
    header = ["task", "random heads: tau", f"overlap of {results.k}", "trained heads: tau", f"overlap of {results.k}"]
    return table(header, rows) if rows else ""


def agreement(a: Sequence[float], b: Sequence[float], k: int) -> tuple[float, int]:
    """Kendall's tau of two rankings, and how many layers their best k share."""
    tops = [set(np.argsort(scores)[::-1][:k].tolist()) for scores in (a, b)]
    return float(kendalltau(a, b).statistic), len(tops[0] & tops[1])


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


def costs(results: Results) -> str:
    """What each method costs."""
    file = results.folder / "cost.json"
    if not file.exists():
        return ""
    measured = json.loads(file.read_text())["methods"]
    full, rows = measured["full"], []
    for tuning, m in measured.items():
        memory = f"{m['peak_bytes'] / 2**30:.2f}" if m["peak_bytes"] else MISSING
        rows.append(
            [
                tuning,
                f"{m['trained_parameters'] / 1e6:.2f}",
                f"{m['delta_bytes'] / 1e6:.1f}",
                f"{1000 * m['step_seconds']:.1f}",
                f"{m['step_seconds'] / full['step_seconds']:.2f}",
                memory,
                points(results.average(tuning, results.tasks), 2) if not tuning.startswith("layers") else "",
            ]
        )
    header = ["method", "trained, M", "delta, MB", "step, ms", "of full", "peak memory, GiB", "average metric"]
    return table(header, rows)


def learning_rates(results: Results) -> str:
    """The held-out metric of each learning rate."""
    rows = []
    for family, means in results.held_out_by_rate.items():
        cells = [
            f"{'**' * (float(rate) == results.rates[family])}{rate}: {points(mean, 2)}"
            f"{'**' * (float(rate) == results.rates[family])}"
            for rate, mean in means.items()
        ]
        rows.append([f"{family} ({methods.REPRESENTATIVES[family]})", *cells])
    most = max((len(row) for row in rows), default=1)
    rows = [row + [""] * (most - len(row)) for row in rows]
    return table(["family", *[""] * (most - 1)], rows)


def coverage(results: Results) -> str:
    """How much of the plan was run: runs there and planned, for each question and number of seeds."""
    rows = []
    for question in ("1", "6", "8", "5", "3"):
        cells = []
        for seed in range(max(3, len(results.seeds))):
            wanted = [(task, plan) for task in tasks.TASKS for plan in plans.plans(question, results.depth)]
            there = sum(results.run(plan, task, seed) is not None for task, plan in wanted)
            cells.append(f"{there} of {len(wanted)}")
        rows.append([question, *cells])
    return table(["question", *(f"seed {seed}" for seed in range(max(3, len(results.seeds))))], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "coverage": coverage,
    "rates": learning_rates,
    "lodha": lodha,
    "lodha-relative": lodha_relative,
    "fisher-against": fisher_against,
    "spafit": spafit,
    "criteria": criteria_table,
    "criteria-by-task": criteria_by_task,
    "chosen-layers": chosen_layers,
    "layer-effects": layer_effects,
    "elsa": elsa,
    "elsa-fraction": elsa_fraction,
    "published": published,
    "samples": samples,
    "heads": heads,
    "tracked": tracked,
    "costs": costs,
}


def fill_in(page: str, made: Callable[[str], str]) -> str:
    """Replace what stands between the marks of a table.

    Args:
        page: Markdown with marks.
        made: Gives the table of a name.

    Returns:
        The page.
    """
    return re.sub(
        r"(<!-- table (\S+(?: \S+)?) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}\n{made(match[2])}\n\n{match[3]}",
        page,
        flags=re.DOTALL,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder below the results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--print", action="store_true", dest="only_print", help="print all tables instead")
    options = parser.parse_args(arguments)
    if options.only_print:
        results = Results(options.results / options.model)
        for name, make in TABLES.items():
            print(f"\n{name}: {make.__doc__}\n\n{make(results)}")
        return
    loaded: dict[str, Results] = {}

    def made(name: str) -> str:
        name, _, model = name.partition(" ")
        model = model or options.model
        if model not in loaded:
            loaded[model] = Results(options.results / model)
        return TABLES[name](loaded[model])

    options.page.write_text(fill_in(options.page.read_text(), made))


if __name__ == "__main__":
    main()
