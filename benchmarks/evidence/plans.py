"""What is to be run for each question, and with which learning rates."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from benchmarks.evidence import criteria, methods, records
from benchmarks.evidence.jobs import RANDOM_DRAWS, Job, Place


RATE_TASKS = ("rte", "mrpc", "cola")
LIBRARY_SCORES = ("fisher", "grad_norm", "rgn", "snr", "last", "first")
CHOOSE_ON = ("multirc", "cola", "wic", "rte", "wsc", "cb")
CONFIRM_ON = ("sst2", "stsb", "mrpc", "wnli", "copa")
"""A criterion is chosen on the first half of the tasks and confirmed on the second. Tasks sorted by the number of
their training rows were dealt out in turn, before any run."""

RANK_WEIGHT = {"probe": 4.0, "probe_window": 6.0, "rewind": 1.5, "kernel": 1.5, "kernel_greedy": 1.5}
"""How long some rankings take, relative to training one model."""

TOKENS_IN_STEP, DECODER_TOKENS_IN_STEP, MOST_IN_STEP = 32_000, 12_000, 5
"""How many models are trained in step: as many as fit into so many tokens, and no more than this."""


def plans(question: str, depth: int) -> list[str]:
    """The methods that a question compares. Of 12 layers 5 are tuned, of others as large a part."""
    k = methods.part(5, depth)
    counts = range(1, k + 1)
    seven, two = methods.part(7, depth), methods.part(2, depth)
    groups = ((2, 4, "I"), (2, 4, "II"), (4, 6, "I"), (4, 6, "II"), (4, 8, "II"), (2, 7, "II"))
    return {
        "1": [
            *("full", "head", "lora-II"),
            *(f"fisher:{n}" for n in (*reversed(counts), -1)),
            *(f"last:{n}" for n in reversed(counts)),
            *(f"random{draw}:{k}" for draw in range(RANDOM_DRAWS)),
            *(f"{score}:{k}" for score in ("grad_norm", "rgn", "snr")),
        ],
        "6": [
            *("full", "bitfit", "lora-I", "lora-II"),
            *(methods.spafit_name(*group, depth) for group in groups),
            *(f"strata-II-lora:{seven}-bitfit:{two}/{score}" for score in ("fisher", "middle")),
        ],
        "8": [f"{score}:{k}" for score in ("middle", "alternate", *criteria.COSTLY)] + [f"fisher:{-k}"],
        "5": ["head", *(f"last:{n}" for n in range(1, depth + 1))],
        "3": [f"published_code:{n}" for n in (k, 1)],
    }[question]


def train_jobs(place: Place, wanted: Iterable[tuple[str, str, float]], seed: int) -> list[Job]:
    """Jobs for the runs whose result is missing: models of one task in step, longest first."""
    missing: dict[str, list[tuple[str, float]]] = {}
    wanted = list(dict.fromkeys(wanted))
    done = {task: place.runs(task) for task in {task for task, _, _ in wanted}}
    for task, tuning, rate in wanted:
        if (tuning, rate, seed) not in done[task]:
            missing.setdefault(task, []).append((tuning, rate))
    jobs = []
    for task, runs in missing.items():
        made = place.task(task)
        longest = int(place.lengths(task).max())
        tokens = made.batch * longest * (1 + made.choices)
        most = DECODER_TOKENS_IN_STEP if place.is_decoder else TOKENS_IN_STEP
        size = max(1, min(MOST_IN_STEP, most // tokens))
        count = -(-len(runs) // size)
        for start in range(count):  # groups of equal size
            group = runs[start::count]
            jobs.append(Job("train", task, seed, *zip(*group, strict=True), weight=weight(place, task, len(group))))
    return sorted(jobs, key=lambda job: -job.weight)


def weight(place: Place, task: str, models_in_step: int) -> float:
    """Seconds that training models of a task in step takes on an idle H100, roughly."""
    made, lengths = place.task(task), place.lengths(task)
    steps = made.epochs * len(lengths) / made.batch
    tokens = made.batch * float(lengths.float().mean()) * (1 + made.choices)
    return 4 + models_in_step * (1 + steps * (0.0025 + 1.2e-6 * tokens))


def plan_jobs(place: Place, wanted: Iterable[tuple[int, str]], chosen: Sequence[str]) -> list[Job]:
    """Jobs for (seed, question) in the order given, each run once.

    Args:
        place: Where everything is.
        wanted: Seeds and questions, the most urgent first.
        chosen: The tasks.

    Returns:
        The jobs of what is missing.
    """
    rates, jobs, planned, unranked = place.rates(), [], set(), set()
    for seed, question in wanted:
        runs = []
        for task in chosen:
            orders = {score: ranking["order"] for score, ranking in place.rankings(task, seed).items()}
            for plan in plans(question, place.depth):
                try:
                    tuning = methods.resolve(plan, orders)
                except KeyError:
                    unranked.add(plan)
                    continue
                key = (task, tuning, rates[methods.family(tuning)])
                if (*key, seed) not in planned:
                    planned.add((*key, seed))
                    runs.append(key)
        jobs += train_jobs(place, runs, seed)
    if unranked:
        print(f"left out, since `rank` has not ranked all of their tasks yet: {', '.join(sorted(unranked))}")
    return jobs


def choose_rates(place: Place) -> None:
    """Write the learning rate of each family, chosen by the held-out rows of some tasks; see `choose`."""
    orders = {"alternate": alternate(place.depth)}
    done = {task: place.runs(task) for task in RATE_TASKS}
    found: dict[str, dict[float, list[float]]] = {}
    for family, plan in methods.representatives(place.depth).items():
        tuning = methods.resolve(plan, orders)
        for rate in methods.RATES[family]:
            results = [done[task].get((tuning, rate, 0)) for task in RATE_TASKS]
            if all(results):
                held_out = [result["held_out"][result["metric"]] for result in results]
                found.setdefault(family, {})[rate] = held_out
    chosen = {family: choose(values) for family, values in found.items()}
    families = methods.representatives(place.depth)
    missing = [family for family in families if len(found.get(family, {})) < len(methods.RATES[family])]
    if missing:
        print(f"not all learning rates of {', '.join(missing)} were tried")
    for family in set(families) - set(chosen):
        chosen[family] = methods.RATES[family][1]
    table = {f: {f"{rate:g}": float(np.mean(v)) for rate, v in values.items()} for f, values in found.items()}
    records.write(
        place.results / "rates.json", {"chosen": chosen, "held_out": table, "tasks": RATE_TASKS, "missing": missing}
    )
    print(json.dumps(table, indent=1), chosen)


def choose(values: Mapping[float, Sequence[float]]) -> float:
    """The smallest learning rate that is no worse than the best by more than the standard error of their difference.

    The one-standard-error rule of Breiman et al. (1984), with the lower risk of divergence for simplicity.

    Args:
        values: The held-out metric on the same tasks in the same order, by rate.

    Returns:
        A rate.

    Example:

        >>> choose({1e-4: [0.60, 0.70], 2e-4: [0.72, 0.80], 4e-4: [0.70, 0.83]})
        0.0002
    """
    best = max(values, key=lambda rate: np.mean(values[rate]))
    count = len(values[best])
    for rate in sorted(rate for rate in values if rate < best and count > 1):
        behind = np.subtract(values[best], values[rate])
        if behind.mean() < behind.std(ddof=1) / count**0.5:
            return rate
    return best


def alternate(depth: int) -> list[int]:
    return [*range(1, depth, 2), *range(0, depth, 2)]


def all_scores() -> list[str]:
    """All scores that layers are ranked by."""
    random = [f"random{draw}" for draw in range(RANDOM_DRAWS)]
    return [*LIBRARY_SCORES, *random, *criteria.CRITERIA]
