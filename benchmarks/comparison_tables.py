"""The tables that compare methods: questions 1, 5, 6, 7 and 8."""

from __future__ import annotations

import json
import math

import criteria
import numpy as np
import plans
from findings import Results, fewest_layers
from jobs import RANDOM_DRAWS
from table_format import MISSING, number, points, table


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
    rows = [row if row[3] != MISSING else [*row[:4], MISSING, MISSING, row[6]] for row in rows]
    header = ["layers", f"choosing half ({len(chosen_on)})", f"confirming half ({len(confirmed_on)})", "all tasks"]
    return table([*header, "minus full, 95 %", "better:worse than full", "seconds to rank"], rows)


def criteria_rule(results: Results) -> str:
    """Question 8: what was asked of a criterion that wins."""
    k, rows = results.k, []
    rivals = {"random": "random", "last": f"last:{k}", "middle": f"middle:{k}", "fisher": f"fisher:{k}"}
    for plan, name in criteria_plans(results).items():
        if plan in ("full", "head", "lora-II") or math.isnan(results.average(plan, results.tasks)):
            continue
        kept = sum(results.task_difference(plan, "full", task) >= -results.noise(task) for task in results.tasks)
        cells = []
        for rival in rivals.values():
            mean, half, _, _ = results.difference(plan, rival, results.tasks)
            cells.append("" if plan == rival else f"{number(mean, sign=True)} ± {number(half)}")
        rows.append([name, f"{kept} of {len(results.tasks)}", *cells])
    rows.sort(key=lambda row: -int(row[1].split()[0]))
    return table(["layers", "tasks within noise of full", *(f"minus {rival}" for rival in rivals)], rows)


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


def elsa(results: Results) -> str:
    """Lee et al.: quality against the number of last layers."""
    named = {"head": "0 (head alone)", **{f"last:{n}": f"last {n}" for n in range(1, results.depth + 1)}}
    return metrics_table(results, {**named, "full": "full (embeddings too)"}, best=False)


def elsa_fraction(results: Results) -> str:
    """The fewest last layers that keep 90 % and 99 % of the full result."""
    rows = []
    for share in (0.9, 0.99):
        counts = [fewest_layers(results, task, share) for task in results.tasks]
        cells = [MISSING if count is None else str(count) for count in counts]
        rows.append([f"{share:.0%} of full", *cells])
    return table(["fewest last layers for", *results.tasks], rows)


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
                f"{1000 * m['graph_seconds']:.1f}" if m["graph_seconds"] else MISSING,
                f"{m['graph_seconds'] / full['graph_seconds']:.2f}" if m["graph_seconds"] else MISSING,
                memory,
                points(results.average(tuning, results.tasks), 2),
            ]
        )
    header = ["method", "trained, M", "delta, MB", "step, ms", "its graph, ms", "of full", "peak memory, GiB"]
    header.append("average metric")
    return table(header, rows)
