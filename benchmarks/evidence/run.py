"""Run the benchmarks: what is missing of a plan, several processes at a time, until the time is up.

    python -m benchmarks.evidence.run --model models/mpnet --data data check            # speed, and that it is right
    python -m benchmarks.evidence.run --model models/mpnet --data data all --seeds 0 1 2 --minutes 50

`all` does these in turn, and any of them may be called alone:

    rates       choose a learning rate for each family of methods, on RTE, MRPC and CoLA whatever the --tasks
    cells       train --methods with --k layers, each at a rate of its own that held-out rows choose, or at --rate;
                on few training rows with --rows
    rank        rank the layers of all tasks by all scores
    train       train and evaluate what some --questions compare
    samples     rank the layers from few samples (in `all` with the first seed)
    track       rank the layers while the model is tuned (in `all` with the first seed)
    cost        time and memory of a training step (not in `all`), of --methods with --k layers if they are given

Results are JSON below `--results`, runs and rankings one a line. What is there already is not run again: with
`--results benchmarks/results/evidence/MODEL` a run goes on where that of the documentation ended. All GPUs that are
found are used, each by an equal share of the processes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence import cells, criteria, few_rows, methods, records, tasks, texts
from benchmarks.evidence.jobs import Job, kinds_of_labels
from benchmarks.evidence.place import Place, is_current
from benchmarks.evidence.plans import (
    RANK_WEIGHT,
    RATE_TASKS,
    all_scores,
    alternate,
    choose_rates,
    plan_jobs,
    train_jobs,
    weight,
)
from benchmarks.evidence.scheduler import Pool, quiet
from benchmarks.evidence.speed import check, cost


RESULTS = Path("results")
"""Not those of the documentation, beside which nothing would be left to do."""
METHODS = (*cells.KINDS, "full", "lora-II")
"""Of the cells, where none are given."""
COMPARED = ("1", "6", "8")
"""The questions that compare methods; more seeds are for them first."""


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "command", choices=("check", "all", "rates", "cells", "rank", "train", "track", "samples", "cost")
    )
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--data", type=Path, required=True, help="the folder with glue/ and superglue/")
    parser.add_argument("--results", type=Path, help=f"a folder; default: {RESULTS}/MODEL")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "peft_surgical_tasks")
    parser.add_argument("--tasks", nargs="+", default=list(tasks.TASKS), choices=tasks.TASKS | texts.TASKS)
    parser.add_argument("--questions", nargs="+", default=["1", "6", "8", "5", "3"])
    parser.add_argument("--scores", nargs="+", help="for rank; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[4], help="in all; several numbers for check")
    parser.add_argument("--minutes", type=float, default=1e9, help="when to stop, from the start on")
    parser.add_argument("--methods", nargs="+", help="for cells and cost")
    parser.add_argument(
        "--share", nargs="+", help="for cells: ways to choose layers whose mean gives all of a k a rate"
    )
    parser.add_argument("--k", type=int, nargs="+", help="for cells; default: 1, 3 and 5 of 12 layers")
    parser.add_argument("--rate", type=float, help="for cells; default: the one that held-out rows choose")
    parser.add_argument("--rows", type=int, default=0, help="for cells: so few training rows, drawn by the seed")
    options = parser.parse_args(arguments)
    if options.rows and options.command != "cells":
        parser.error("--rows is for the command cells alone.")
    of_texts = [task in texts.TASKS for task in options.tasks]
    if any(of_texts) and not (all(of_texts) and options.command in ("cells", "rank")):
        parser.error(f"{', '.join(texts.TASKS)} go with the commands cells and rank, and with one another alone.")
    options.tasks = [few_rows.named(task, options.rows) for task in options.tasks]
    options.results = options.results or RESULTS / Path(options.model).name
    options.cache = options.cache / Path(options.model).name
    return options


def rate_jobs(place: Place) -> list[Job]:
    """Every learning rate of every family of methods, on a few tasks."""
    orders = {"alternate": alternate(place.depth)}
    chosen = {f: methods.resolve(plan, orders) for f, plan in methods.representatives(place.depth).items()}
    wanted = [(t, chosen[f], r) for t in RATE_TASKS for f in chosen for r in methods.RATES[f]]
    return train_jobs(place, wanted, 0)


def rank_jobs(place: Place, chosen: Sequence[str], scores: Sequence[str], seed: int) -> list[Job]:
    """The rankings that are missing, longest first; costly ones are jobs of their own."""
    jobs = []
    for task in chosen:
        known = place.rankings(task, seed)
        missing = [score for score in scores if score not in known]
        costly = [score for score in missing if score in criteria.COSTLY]
        groups = [tuple(s for s in missing if s not in costly), *((s,) for s in costly)]
        whole = weight(place, task, 1)
        jobs += [
            Job("rank", task, seed, group, weight=whole * RANK_WEIGHT.get(group[0], 1)) for group in groups if group
        ]
    return sorted(jobs, key=lambda job: -job.weight)


def other_jobs(place: Place, kind: str, chosen: Sequence[str], seed: int) -> list[Job]:
    """The jobs of `track` or `samples` that are missing."""
    jobs = []
    for task in chosen:
        whole = weight(place, task, 1)
        if kind == "samples":
            wanted = (*kinds_of_labels(task), "head")
            missing = [part for part in wanted if part not in place.sampled(task, seed)]
            jobs += [Job(kind, task, seed, (part,), weight=3 * whole) for part in missing]
        elif not place.is_tracked(task, seed):
            jobs.append(Job(kind, task, seed, ("full",), (place.rates()["full"],), weight=whole))
    return sorted(jobs, key=lambda job: -job.weight)


def phases(place: Place, options: argparse.Namespace) -> Iterator[list[Job]]:
    """The jobs of a command; those of a list need the results of the lists before it."""
    scores, (first, *later) = options.scores or all_scores(), options.seeds
    once = [score for score in scores if score not in criteria.COSTLY]
    ranking = rank_jobs(place, options.tasks, scores, first)
    more_ranking = [job for seed in later for job in rank_jobs(place, options.tasks, once, seed)]
    if options.command == "rank":
        yield ranking + more_ranking
    if options.command in ("rates", "all"):
        yield rate_jobs(place) + (ranking if options.command == "all" else [])
        choose_rates(place)
    if options.command == "all":
        training = plan_jobs(place, [(first, question) for question in options.questions], options.tasks)
        others = [job for kind in ("track", "samples") for job in other_jobs(place, kind, options.tasks, first)]
        yield training + more_ranking + others
        wanted = [(seed, question) for seed in later for question in options.questions]
        wanted.sort(key=lambda pair: pair[1] not in COMPARED)
        yield plan_jobs(place, wanted, options.tasks)
    if options.command == "train":
        yield plan_jobs(place, [(seed, q) for seed in options.seeds for q in options.questions], options.tasks)
    if options.command in ("track", "samples"):
        yield [job for seed in options.seeds for job in other_jobs(place, options.command, options.tasks, seed)]


def sizes(place: Place, task: str) -> dict[str, Any]:
    """How large a task is as it is run."""
    made, data = place.task(task), place.read(task)
    counts = None if made.regression else data.validation.labels.bincount()
    return {
        "revision": made.revision,
        **{name: len(getattr(data, name)) for name in ("train", "held_out", "validation")},
        "tokens": float(data.train.lengths.float().mean()),
        "epochs": made.epochs,
        "batch": made.batch,
        "most_frequent": None if counts is None else int(counts.max()) / len(data.validation),
        **({"documents": data.validation.labels[:, 0].tolist()} if data.validation.labels.dim() == 2 else {}),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    until = time.monotonic()
    quiet()
    options = _arguments(arguments)
    until += 60 * options.minutes
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(options.model, options.data, options.results, options.cache, device)
    if few_rows.whole(options.tasks[0]) in texts.TASKS and not place.is_decoder:
        raise SystemExit(f"{', '.join(options.tasks)} are for decoders; {options.model} is none.")
    rates = options.command == "cells" and not options.rate
    needed = dict.fromkeys((*cells.rate_tasks(options.tasks), *options.tasks) if rates else options.tasks)
    for task in needed:
        place.read(task)  # into the cache, before several processes want it
    known = place.sizes()
    if found := {
        task: sizes(place, task)
        for task in needed
        if not is_current({"task": task, **known.get(task, {"revision": 0})})
    }:
        records.write(place.results / "tasks.json", known | found)
    if options.command == "check":
        check(place, options.processes)
    elif options.command == "cost":
        depth, k = place.depth, methods.part(5, place.depth)
        plans = ["full", "head", "bitfit", "lora-I", "lora-II"]
        plans += [methods.spafit_name(2, 4, variant, depth) for variant in ("I", "II")]
        counts = dict.fromkeys((1, methods.part(3, depth), k, depth))
        plans += [f"alternate:{k}", f"middle:{k}", *(f"last:{n}" for n in counts)]
        if options.methods:
            plans = cells.cell_names(options.methods, options.k or [k])
        cost(place, [methods.resolve(plan, cells.fixed_orders(depth)) for plan in plans])
    else:
        with Pool(place, options.processes[0], until) as pool:
            if options.command == "cells":
                names = cells.cell_names(options.methods or METHODS, options.k or cells.default_counts(place.depth))
                wanted = cells.Cells(place, names, options.tasks, options.seeds, options.rate, options.share)
                begun = pool.do(more=wanted.jobs) + len(wanted.jobs())
            else:
                begun = 0
                for jobs in filter(None, phases(place, options)):
                    begun += len(jobs)
                    pool.do(jobs)
        if begun:
            print(f"results are in {place.results}")
        else:
            print(f"nothing to do: {place.results} has all of it. Name another folder with --results to run it anew.")


if __name__ == "__main__":
    main()
