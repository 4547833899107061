"""Turn the results into the tables of docs/results.md and docs/evidence.md.

    python -m benchmarks.evidence.tables mpnet                 # fills in the tables of both pages
    python -m benchmarks.evidence.tables mpnet --print         # prints them

In the page a table stands between `<!-- table NAME -->` and `<!-- end -->`; what is between is replaced.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common.table_format import number, points, table
from benchmarks.evidence import cell_tables, methods, plans, tasks, text_tables
from benchmarks.evidence import comparison_tables as comparisons
from benchmarks.evidence import layer_tables as layers
from benchmarks.evidence import size_tables as sizes
from benchmarks.evidence.findings import RESULTS, Results


PAGES = [Path(__file__).parents[2] / "docs" / name for name in ("results.md", "evidence.md")]


def learning_rates(results: Results) -> str:
    """The held-out metric of each learning rate."""
    rows = []
    for family, means in results.held_out_by_rate.items():
        cells = [
            f"{'**' * (float(rate) == results.rates[family])}{rate}: {points(mean, 2)}"
            f"{'**' * (float(rate) == results.rates[family])}"
            for rate, mean in means.items()
        ]
        rows.append([f"{family} ({methods.representatives(results.depth)[family]})", *cells])
    most = max((len(row) for row in rows), default=1)
    rows = [row + [""] * (most - len(row)) for row in rows]
    return table(["family", *[""] * (most - 1)], rows)


def coverage(results: Results) -> str:
    """How much of the plan was run: runs there and planned, for each question and seed."""
    rows = []
    for question in ("1", "6", "8", "5", "3"):
        cells = []
        for seed in results.seeds:
            begun = [task for task in results.tasks if results.run("full", task, seed)]
            wanted = [(task, plan) for task in begun for plan in plans.plans(question, results.depth)]
            there = sum(results.run(plan, task, seed) is not None for task, plan in wanted)
            cells.append(f"{there} of {len(wanted)}")
        rows.append([question, *cells])
    return table(["question", *(f"seed {seed}" for seed in results.seeds)], rows)


def tasks_as_run(results: Results) -> str:
    """The tasks as they were run, and how far results scatter."""
    rows, k = [], results.k
    compared = [plan for plan in comparisons.criteria_plans(results) if plan.endswith(f":{k}")]
    for task in (task for task in results.tasks if task in results.sizes):
        size, made = results.sizes[task], tasks.TASKS[task]
        counts = [str(size[name]) for name in ("train", "held_out", "validation")]
        most = f"{100 * size['most_frequent']:.1f}" if size["most_frequent"] else ""
        noise = [number(results.noise(task), 1), number(results.seed_noise(compared, task), 1)]
        rows.append([task, *counts, str(size["epochs"]), str(size["batch"]), made.metric, most, *noise])
    header = ["task", "training rows", "held out", "validation", "epochs", "batch", "metric", "most frequent label"]
    return table([*header, "noise of validation, ±", "noise of seeds, ±"], rows)


TABLES: dict[str, Callable[[Results], str]] = {
    "tasks": tasks_as_run,
    "coverage": coverage,
    "cells": cell_tables.cells_table,
    "texts": text_tables.texts_table,
    "few-rows": cell_tables.few_rows_table,
    "choices": cell_tables.choices_table,
    "pairs": cell_tables.pairs_table,
    "metrics": cell_tables.tasks_table,
    "halves": cell_tables.halves_table,
    "rates": learning_rates,
    "lodha": comparisons.lodha,
    "lodha-relative": comparisons.lodha_relative,
    "fisher-against": comparisons.fisher_against,
    "spafit": comparisons.spafit,
    "spafit-against": comparisons.spafit_against,
    "spafit-rates": comparisons.spafit_rates,
    "criteria": comparisons.criteria_table,
    "criteria-rule": comparisons.criteria_rule,
    "later-seeds": comparisons.later_seeds,
    "short-trials": comparisons.short_trials,
    "best-seed": comparisons.best_seed,
    "random-draws": comparisons.random_draws,
    "criteria-by-task": comparisons.criteria_by_task,
    "chosen-layers": layers.chosen_layers,
    "literature": layers.literature_choices,
    "how-often": layers.how_often,
    "layer-effects": layers.layer_effects,
    "neighbours": layers.neighbours,
    "elsa": comparisons.elsa,
    "elsa-fraction": comparisons.elsa_fraction,
    "published": layers.published,
    "samples": layers.samples,
    "heads": layers.heads,
    "tracked": layers.tracked,
    "costs": sizes.costs,
    "file-sizes": sizes.file_sizes,
    "encoded": sizes.encoded,
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
    parser.add_argument("--page", type=Path, nargs="+", default=PAGES)
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

    for page in options.page:
        page.write_text(fill_in(page.read_text(), made))


if __name__ == "__main__":
    main()
