"""Run the benchmarks: what is missing of a plan, several processes at a time, until the time is up.

    python benchmarks/run.py --model models/mpnet --data ../shared/data check     # speed, and that it is right
    python benchmarks/run.py --model models/mpnet --data ../shared/data rates     # choose learning rates
    python benchmarks/run.py --model models/mpnet --data ../shared/data rank      # rank the layers of all tasks
    python benchmarks/run.py --model models/mpnet --data ../shared/data train --questions 1 6 8 --seconds 500
    python benchmarks/run.py --model models/mpnet --data ../shared/data track     # rankings while tuning
    python benchmarks/run.py --model models/mpnet --data ../shared/data samples   # rankings from few samples
    python benchmarks/run.py --model models/mpnet --data ../shared/data cost      # time and memory of a step

Each result is a JSON file below `--results`. What is there already is not run again.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import methods
import tasks
import torch
import transformers
from jobs import Job, Place
from plans import RATE_TASKS, all_scores, alternate, choose_rates, plan_jobs, plans, train_jobs, weight
from scheduler import quiet, run_jobs
from speed import check, cost


RESULTS = Path(__file__).parent / "results" / "evidence"


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "rates", "rank", "train", "track", "samples", "cost"))
    parser.add_argument("--model", required=True, help="a folder, or a name on the hub")
    parser.add_argument("--data", type=Path, required=True, help="the folder with glue/ and superglue/")
    parser.add_argument("--results", type=Path, help=f"default: {RESULTS}/MODEL")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/peft_surgical_tasks"), help="tokenised tasks")
    parser.add_argument("--tasks", nargs="+", default=list(tasks.TASKS), choices=tasks.TASKS)
    parser.add_argument("--questions", nargs="+", default=["1", "6", "8", "5", "3"])
    parser.add_argument("--scores", nargs="+", help="for rank; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[5], help="several numbers for check")
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args(arguments)
    options.results = options.results or RESULTS / Path(options.model).name
    options.cache = options.cache / Path(options.model).name
    return options


def jobs_of(place: Place, options: argparse.Namespace) -> Iterator[Job]:
    """The jobs of a command."""
    if options.command == "rates":
        orders = {"alternate": alternate(place.depth)}
        chosen = {f: methods.resolve(plan, orders) for f, plan in methods.REPRESENTATIVES.items()}
        wanted = [(t, chosen[f], r) for t in RATE_TASKS for f, tried in methods.RATES.items() for r in tried]
        yield from train_jobs(place, wanted, 0)
    elif options.command == "train":
        yield from plan_jobs(place, options.questions, options.tasks, options.seeds)
    elif options.command == "rank":
        for seed in options.seeds:
            for task in sorted(options.tasks, key=lambda task: -weight(place, task, 1)):
                known = place.rankings(task, seed)
                missing = tuple(s for s in options.scores or all_scores() if s not in known)
                if missing:
                    yield Job("rank", task, seed, missing, weight=weight(place, task, 1))
    else:
        for seed in options.seeds:
            for task in sorted(options.tasks, key=lambda task: -weight(place, task, 1)):
                if not (place.results / options.command / f"{task}_s{seed}.json").exists():
                    yield Job(options.command, task, seed, ("full",), (place.rates()["full"],), weight(place, task, 1))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    quiet()
    options = _arguments(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(options.model, options.data, options.results, options.cache, device)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    for task in options.tasks:
        tasks.load_cached(task, tokenizer, options.data, options.cache)
    if options.command == "check":
        check(place, options.processes)
    elif options.command == "cost":
        orders = {"last": range(place.depth)[::-1], "middle": [3, 4, 5, 6, 7]}
        wanted = [p for q in "16" for p in plans(q, place.depth) if ":" not in p]
        wanted += [
            methods.resolve(p, orders) for p in ("middle:5", "last:1", "last:3", "last:5", f"last:{place.depth}")
        ]
        cost(place, list(dict.fromkeys(wanted)))
    else:
        jobs = list(jobs_of(place, options))
        print(f"{len(jobs)} jobs after {time.monotonic() - began:.0f} s", flush=True)
        run_jobs(place, jobs, options.processes[0], options.seconds - (time.monotonic() - began))
        if options.command == "rates":
            choose_rates(place)


if __name__ == "__main__":
    main()
