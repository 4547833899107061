"""The tables that compare methods: questions 1, 5, 6, 7 and 8."""

from __future__ import annotations

import math

import numpy as np

from benchmarks.common.table_format import INTERVALS, MISSING, number, points, table
from benchmarks.evidence import criteria, methods, plans
from benchmarks.evidence.findings import TRIED, Difference, Results, fewest_layers
from benchmarks.evidence.jobs import RANDOM_DRAWS
from benchmarks.evidence.tasks import TASKS


def metrics_table(results: Results, named: dict[str, str]) -> str:
    """Metrics in points, means over seeds: a row for each plan, a column for each task, and the average over tasks."""
    means = {plan: [results.mean(plan, task) for task in results.tasks] for plan in named}
    most = [np.nanmax([means[p][i] for p in named]) for i in range(len(results.tasks))]
    rows = []
    for plan, name in named.items():
        cells = [f"**{points(v)}**" if v == m else points(v) for v, m in zip(means[plan], most, strict=True)]
        rows.append([name, points(results.average(plan, results.tasks), 2), results.seeds_of(plan), *cells])
    return table(["method", "average", "seeds", *results.tasks], rows)


def relative_table(results: Results, named: dict[str, str], to: str = "full") -> str:
    """Differences in points to another plan, paired by seed."""
    rows = []
    for plan, name in named.items():
        cells = [number(results.task_difference(plan, to, task), 1, sign=True) for task in results.tasks]
        rows.append([name, str(results.difference(plan, to, results.tasks)), *cells])
    return table(["method", f"mean {INTERVALS}", *results.tasks], rows)


def differences_table(results: Results, pairs: dict[str, tuple[str, str]]) -> str:
    """Differences between plans, on all tasks and without the one that scatters most."""
    noisiest, rest = results.without_noisiest(list(criteria_plans(results)))
    rows = []
    for name, (plan, other) in pairs.items():
        found = results.difference(plan, other, results.tasks)
        fewer = results.difference(plan, other, rest)
        rows.append([name, str(found), str(fewer), str(found.better), str(found.worse)])
    return table(["difference", f"points {INTERVALS}", f"without {noisiest}", "tasks better", "worse"], rows)


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
    others = {"full": "full", f"last:{k}": f"last {k}", "random": f"random {k}", f"middle:{k}": f"middle {k}"}
    others |= {f"grad_norm:{k}": f"gradient norm {k}", f"rgn:{k}": f"RGN {k}", f"snr:{k}": f"SNR {k}"}
    return differences_table(results, {f"Fisher {k} - {n}": (f"fisher:{k}", other) for other, n in others.items()})


def spafit_against(results: Results) -> str:
    """SPAFIT against LoRA of the same kind, and strata by a ranking against strata by depth."""
    one, two = (methods.spafit_name(2, 4, variant, results.depth) for variant in ("I", "II"))
    strata = [plan for plan in plans.plans("6", results.depth) if plan.startswith("strata")]
    pairs = [("bitfit", "full"), ("lora-I", "full"), ("lora-II", "full"), (one, "lora-I"), (two, "lora-II")]
    pairs += [*((plan, two) for plan in strata), (f"alternate:{results.k}", "lora-II")]
    return differences_table(
        results, {f"{a.removeprefix('strata-').replace('/', ' by ')} - {b}": (a, b) for a, b in pairs}
    )


def spafit(results: Results) -> str:
    """Table 2 of Arora & Wang, scaled to this model."""
    return metrics_table(results, spafit_plans(results))


def spafit_rates(results: Results) -> str:
    """SPAFIT and strata at each learning rate that all were run with, on the first seed."""
    seed, rows = results.seeds[0], []
    ran = {(r["task"], r["tuning"], r["rate"]): r for r in results.every_run if r["seed"] == seed}
    rates = [*methods.RATES["spafit"][:2]]
    for plan, name in spafit_plans(results).items():
        if not plan.startswith(("spafit", "strata")):
            continue
        found = [[ran.get((t, results.tuning(plan, t, seed), rate)) for t in results.tasks] for rate in rates]
        if not all(all(runs) for runs in found):
            continue
        small, large = ([100 * run["validation"][run["metric"]] for run in runs] for runs in found)
        lost = [t for t, a, b in zip(results.tasks, small, large, strict=True) if b < a - 10]
        means = [number(float(np.mean(values)), 2) for values in (small, large)]
        rows.append([name, *means, " ".join(lost)])
    header = ["method", *(f"average at {rate:g}" for rate in rates)]
    return table([*header, "tasks that lose over 10 points at the larger rate"], rows)


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
    noisiest, rest = results.without_noisiest(list(criteria_plans(results)))
    spread = f"spread:{results.k}"  # added later, without the tasks that are rated anew since
    with_spread = [task for task in results.tasks if results.values(spread, task)]
    has_spread, rows = len(with_spread) > len(plans.RATE_TASKS), []
    for plan, name in criteria_plans(results).items():
        score = plan.partition(":")[0]
        seconds = [r[score]["seconds"] for r in results.rankings.values() if score in r]
        cells = [points(results.average(plan, group), 2) for group in (chosen_on, confirmed_on, results.tasks)]
        found = results.difference(plan, "full", results.tasks)
        took = number(float(np.median(seconds)), 1) if seconds else ""
        fewer = results.difference(plan, "full", rest)
        cells += [str(found), str(fewer), f"{found.better}:{found.worse}"]
        cells += [str(results.difference(plan, spread, with_spread))] * has_spread
        rows.append([name, results.seeds_of(plan), *cells, took])
    rows.sort(key=lambda row: -float(row[4]) if row[4] != MISSING else 0)
    header = ["layers", "seeds", f"choosing half ({len(chosen_on)})", f"confirming half ({len(confirmed_on)})"]
    header += ["all tasks", f"minus full {INTERVALS}", f"without {noisiest}", "better:worse"]
    header += [f"minus equal distances, {len(with_spread)} tasks"] * has_spread
    return table([*header, "seconds to rank"], rows)


def criteria_rule(results: Results) -> str:
    """Question 8: what was asked of a criterion that wins."""
    k, rows = results.k, []
    rivals = {"random": "random", "last": f"last:{k}", "middle": f"middle:{k}", "fisher": f"fisher:{k}"}
    named = {p: n for p, n in criteria_plans(results).items() if p not in ("full", "head", "lora-II")}
    noise = {task: results.seed_noise(list(named), task) for task in results.tasks}
    for plan, name in named.items():
        behind = {task: results.task_difference(plan, "full", task) for task in results.tasks}
        if any(math.isnan(points) for points in behind.values()):
            continue
        kept = sum(behind[task] >= -noise[task] for task in results.tasks)
        can_fail = [task for task in results.tasks if TASKS[task].revision == 1]
        of_these = sum(behind[task] >= -noise[task] for task in can_fail)
        near = sum(behind[task] >= -results.noise(task) for task in results.tasks)
        found = {r: results.difference(plan, other, results.tasks) for r, other in rivals.items() if plan != other}
        wins = kept >= 8 and len(found) == len(rivals) and all(rival.mean > 0 for rival in found.values())
        cells = [str(found[rival]) if rival in found else "" for rival in rivals]
        rows.append([name, str(kept), str(of_these), str(near), *cells, "yes" if wins else "no"])
    rows.sort(key=lambda row: (-int(row[1]), -int(row[3])))
    hardest = sum(TASKS[task].revision == 1 for task in results.tasks)
    header = ["layers", f"within noise of seeds, of {len(results.tasks)}", f"of the {hardest} that can fail"]
    header += ["of validation"]
    return table([*header, *(f"minus {rival}" for rival in rivals), "all asked for"], rows)


def later_seeds(results: Results) -> str:
    """What the first seed suggested, on all seeds and on the others alone."""
    k, later = results.k, results.of_seeds(results.seeds[1:])
    noisiest, rest = results.without_noisiest(list(criteria_plans(results)))
    names = {"full": "full", "random": "random", "trial": "best of three", "trial_random": "best of 3 random"}
    names |= {f"{score}:{k}": score for score in ("alternate", "last", "middle", "fisher")}
    rivals = ("full", "random", f"last:{k}", f"middle:{k}", f"fisher:{k}")
    pairs = [(plan, rival) for plan in (f"alternate:{k}", "trial") for rival in rivals]
    rows = []
    for plan, other in [*pairs, ("trial", "trial_random"), ("trial_random", "random")]:
        found = [part.difference(plan, other, tasks) for part in (results, later) for tasks in (results.tasks, rest)]
        rows.append([f"{names[plan]} - {names[other]}", *map(str, found)])
    seeds = f"seeds {', '.join(map(str, later.seeds))} alone"
    return table(["difference", "all seeds", f"without {noisiest}", seeds, f"without {noisiest}"], rows)


def best_seed(results: Results) -> str:
    """The seed that is best on the held-out rows, against the mean over seeds of full tuning."""
    results = results.of_seeds(results.shared_seeds)
    noisiest, rest = results.without_noisiest(list(criteria_plans(results)))
    rows = []
    for plan in ("full", "lora-II", f"alternate:{results.k}"):
        found = []
        for tasks in (results.tasks, rest):
            kept = {task: results.best_seed(plan, task) for task in tasks}
            ahead = [[100 * (kept[task] - results.mean("full", task))] for task in tasks]
            found.append(f"{number(Difference(ahead).mean, sign=True)} ± {number(Difference(ahead).over_tasks)}")
        rows.append([plan, *found])
    return table([f"best of {len(results.seeds)} seeds of", "minus full ± over tasks", f"without {noisiest}"], rows)


def short_trials(results: Results) -> str:
    """The best of three, chosen after some epochs of each (of full-length schedules), against chosen at the end."""

    def tried(task: str, seed: int) -> list[dict]:
        return [run for score in TRIED["trial"] if (run := results.run(f"{score}:{results.k}", task, seed))]

    def chosen(runs: list[dict], epochs: int) -> dict:
        return max(runs, key=lambda run: max(row[run["metric"]] for row in run["history"][:epochs]))

    cells = {task: [runs for seed in results.seeds if len(runs := tried(task, seed)) == 3] for task in results.tasks}
    rows = []
    for name in ("1", "2", "3", "half", "all"):
        found: list[list[list[float]]] = [[], []]
        same, cost = [], []
        for task, seeds in cells.items():
            all_of_them = results.sizes[task]["epochs"]
            epochs = {"half": -(-all_of_them // 2), "all": all_of_them}.get(name) or int(name)
            pairs = [(chosen(runs, epochs), [chosen(runs, 99), runs[0]]) for runs in seeds]
            for against, other in zip(found, (0, 1), strict=True):
                against.append([100 * (_metric(kept) - _metric(others[other])) for kept, others in pairs])
            same += [kept is others[0] for kept, others in pairs]
            cost += [
                (sum(min(epochs, n) for n in lengths) + max(0, len(kept["history"]) - epochs)) / sum(lengths)
                for (kept, _), runs in zip(pairs, seeds, strict=True)
                for lengths in [[len(run["history"]) for run in runs]]
            ]
        shares = [f"{np.mean(cost):.0%}", f"{np.mean(same):.0%}"]
        rows.append([f"{name}", *shares, *(str(Difference(against)) for against in found)])
    header = ["epochs of each", "of the cost", "the same choice", f"minus chosen at the end {INTERVALS}"]
    return table([*header, "minus every other layer"], rows)


def _metric(run: dict) -> float:
    return run["validation"][run["metric"]]


def random_draws(results: Results) -> str:
    """The average of every other layer beside that of each random draw with the same seed."""
    rows = []
    for seed in results.shared_seeds:
        alone = results.of_seeds([seed])
        fixed, *draws = [
            alone.average(f"{score}:{results.k}", results.tasks)
            for score in ("alternate", *(f"random{draw}" for draw in range(RANDOM_DRAWS)))
        ]
        ahead = f"{sum(draw > fixed for draw in draws)} of {RANDOM_DRAWS}"
        rows.append([str(seed), points(fixed, 2), *(points(draw, 2) for draw in sorted(draws, reverse=True)), ahead])
    header = ["seed", "alternate", "best draw", *(f"draw {n}" for n in range(2, RANDOM_DRAWS + 1)), "draws ahead"]
    return table(header, rows)


def criteria_plans(results: Results) -> dict[str, str]:
    """All ways to choose k layers."""
    k = results.k
    scores = ("fisher", "last", "grad_norm", "rgn", "snr", "published_code", "middle", "alternate")
    named = {"full": "full", "random": "random"}
    named |= {f"{score}:{k}": score for score in (*scores, *criteria.COSTLY)}
    named |= {f"fisher:{-k}": "lowest Fisher", "trial": "best of three", "trial_random": "best of 3 random"}
    return {**named, "lora-II": "LoRA-II", "head": "head alone"}


def criteria_by_task(results: Results) -> str:
    """Question 8 by task."""
    return metrics_table(results, criteria_plans(results))


def elsa(results: Results) -> str:
    """Lee et al.: quality against the number of last layers."""
    named = {"head": "0 (head alone)", **{f"last:{n}": f"last {n}" for n in range(1, results.depth + 1)}}
    rows = []
    for plan, name in {**named, "full": "full (embeddings too)"}.items():
        cells = [points(results.mean(plan, task)) for task in results.tasks]
        rows.append([name, results.seeds_of(plan), *cells, str(results.difference(plan, "full", results.tasks))])
    return table(["method", "seeds", *results.tasks, f"minus full {INTERVALS}"], rows)


def elsa_fraction(results: Results) -> str:
    """The fewest last layers that keep 90 % and 99 % of the full result."""
    rows = []
    for share in (0.9, 0.99):
        counts = [fewest_layers(results, task, share) for task in results.tasks]
        cells = [MISSING if count is None else str(count) for count in counts]
        rows.append([f"{share:.0%} of full", *cells])
    return table(["fewest last layers for", *results.tasks], rows)
