"""What one process of the benchmarks does at a time, and where its results go."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence import criteria, decoders, few_rows, methods, records, tasks, texts, training, warm_start
from benchmarks.evidence.place import Place
from benchmarks.evidence.training import Trainee
from benchmarks.evidence.turns import make_trainee
from peft_surgical.ranking.rank import rank_layers


RANDOM_DRAWS = 5
SAMPLE_SIZES = (1, 10, 30, 100, 300, 1000)
REFERENCE_SIZE = 2000
SAMPLE_DRAWS = 3
LEFT_OUT = ("samples", "model", "versions")
"""What a ranking's record repeats, or what is long."""
AFTER_EPOCH = "_after_epoch"
"""Behind a score: the layers are ranked after the first epoch of tuning all weights, which are then put back."""
TRACKED = (0.0, 0.2, 0.5, 0.8, 1.0)
"""Fractions of the training at which the paper ranks the layers: epochs 0, 2, 5, 8 and 10 of 10."""


@dataclass(frozen=True)
class Job:
    """Some work on one task.

    Args:
        kind: One of `JOBS`.
        task: The task.
        seed: The seed.
        items: Methods or scores.
        rates: The learning rate of each method; of ranking, that of tuning all weights before.
        weight: How long it takes, in any unit.
    """

    kind: str
    task: str
    seed: int
    items: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind} {self.task} s{self.seed} {' '.join(self.items)}"


def train_job(place: Place, job: Job) -> None:
    """Train several models of a task in step, and write a result for each."""
    task, data = place.task(job.task), place.rows(job.task, job.seed)
    plain = decoders.plain_text(place.model).to(place.device) if place.is_decoder else None
    base = place.load(job.task, job.seed)
    before = decoders.plain_loss(base, plain) if plain is not None else None
    of_documents = data.train.labels.dim() == 2
    untuned = tasks.score(task, training.predict(base, data.validation), data.validation) if of_documents else None
    began = time.perf_counter()
    trainees = []
    for tuning, rate in zip(job.items, job.rates, strict=True):
        torch.manual_seed(job.seed)
        adapted = methods.adapt(copy.deepcopy(base), tuning)
        trainees.append(make_trainee(training.halve_frozen(adapted), rate, tuning, job.seed))
    graphs = False if any(tuning.endswith("-stochastic") for tuning in job.items) else None  # it would draw the same
    seen = few_rows.epoch(data.train, job.task)
    training.fit(trainees, task, seen, data.held_out, seed=job.seed, graphs=graphs)
    for tuning, trainee in zip(job.items, trainees, strict=True):
        assert trainee.best is not None
        said = training.predict(trainee.model, data.validation)
        result = {
            "model": Path(place.model).name,
            "task": job.task,
            "tuning": tuning,
            "rate": trainee.peak,
            "seed": job.seed,
            "revision": task.revision,
            "metric": task.metric,
            "validation": tasks.score(task, said, data.validation),
            "held_out": {task.metric: trainee.best.rank[0], "loss": -trainee.best.rank[1]},
            **({"plain": [before, decoders.plain_loss(trainee.model, plain)]} if plain is not None else {}),
            **({"untuned": untuned, "documents": [round(v, 2) for v in said[:, 0].tolist()]} if untuned else {}),
            "best_epoch": trainee.best.epoch,
            "history": trainee.history,
            **methods.size(trainee.model),
            "rows": len(data.train),
            "batch": task.batch,
            "epochs": task.epochs,
            "group": {"tunings": job.items, "seconds": time.perf_counter() - began},
            **surroundings(place),
        }
        records.append(place.runs_file(job.task), result)


def rank_job(place: Place, job: Job) -> None:
    """Rank the layers of a task by several scores."""
    rows = place.read(job.task, job.seed).train
    if place.is_decoder:
        whole = few_rows.whole(job.task)
        features = texts.features(rows) if whole in texts.TASKS else decoders.features(place.model, whole, rows)
        model = decoders.plain_model(place.model).to(place.device)
    else:
        features, model = rows.features(), place.load(job.task, job.seed)
    errors = []
    for score in job.items:
        name, seed = (score, job.seed)
        name = name.removesuffix("_sampled").removesuffix(AFTER_EPOCH)
        if score.startswith("random"):
            name, seed = "random", job.seed * RANDOM_DRAWS + int(score.removeprefix("random"))
        labels = {"labels": "sampled"} if score.endswith("_sampled") else {}
        options = labels | {"num_samples": criteria.SAMPLES.get(score, 100), "seed": seed, "progress": False}
        began = time.perf_counter()
        try:
            ranked = tuned_for_an_epoch(place, job, model) if score.endswith(AFTER_EPOCH) else model
            ranking = rank_layers(ranked, features, score=name, **options)
        except Exception as error:  # the other scores do not depend on it
            errors.append(f"{score}: {type(error).__name__}: {error}")
            continue
        result = {
            "model": Path(place.model).name,
            "task": job.task,
            "seed": job.seed,
            "revision": place.task(job.task).revision,
            "score": score,
            "order": ranking.order,
            "scores": ranking.scores,
            "split_half_tau": ranking.split_half_tau,
            "seconds": time.perf_counter() - began,
            "record": {key: value for key, value in ranking.record.items() if key not in LEFT_OUT},
            **surroundings(place),
        }
        records.append(place.results / "rankings.jsonl", result)
    if errors:
        raise RuntimeError("; ".join(errors))


def tuned_for_an_epoch(place: Place, job: Job, model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model with all weights as they are after the first epoch of a job's task."""
    task, data = place.task(job.task), place.rows(job.task, job.seed)
    trainee = Trainee(methods.adapt(place.load(job.task, job.seed), "full"), job.rates[0])
    next(iter(training.train([trainee], data.train, batch=task.batch, epochs=task.epochs, seed=job.seed)))
    tuned = copy.deepcopy(model)
    tuned.load_state_dict(trainee.model.state_dict())
    return tuned


def track_job(place: Place, job: Job) -> None:
    """Rank the layers while the whole model is tuned (figures 2 to 5 of Lodha et al.)."""
    task, data = tasks.TASKS[job.task], place.rows(job.task)
    features = data.train.to("cpu").features()
    trainee = Trainee(methods.adapt(place.load(job.task, job.seed), "full"), job.rates[0])
    wanted = {round(part * task.epochs) for part in TRACKED}
    points = []

    def rank(epoch: int) -> None:
        if epoch in wanted:
            ranking = rank_layers(trainee.model, features, seed=job.seed, progress=False)
            measured = tasks.score(task, training.predict(trainee.model, data.held_out), data.held_out)
            points.append({"epoch": epoch, "scores": ranking.scores, "held_out": measured[task.metric]})

    rank(0)
    epochs = training.train([trainee], data.train, batch=task.batch, epochs=task.epochs, seed=job.seed)
    for epoch, _ in enumerate(epochs, 1):
        rank(epoch)
    result = {"task": job.task, "seed": job.seed, "points": points, **surroundings(place)}
    records.append(place.results / "track.jsonl", result)


def samples_job(place: Place, job: Job) -> None:
    """Rank the layers by the Fisher from few and many samples with one kind of labels, or with several heads."""
    rows = place.rows(job.task).train
    features = rows.to("cpu").features()
    found = []

    def rank(model: torch.nn.Module, kind: str, n: int, seed: int, labels: str = "given", **more: int) -> None:
        options = {"num_samples": n, "labels": labels, "seed": seed, "batch_size": 64}  # large, for speed alone
        ranking = rank_layers(model, features, progress=False, **options)
        found.append({"kind": kind, "n": n, "draw": seed, "scores": ranking.scores, **more})

    for kind in job.items:
        if kind == "head":
            index = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:1000]
            seen = rows.take(index.to(rows.labels.device))
            for head in range(5):
                fresh = place.load(job.task, head)
                rank(fresh, "head", 100, 0, head=head)
                rank(warm_start.warm_head(fresh, seen, head), "warm head", 100, 0, head=head)
            continue
        model = place.load(job.task, job.seed)
        for n in (size for size in SAMPLE_SIZES if size < len(rows)):
            for draw in range(1, 1 + (SAMPLE_DRAWS if n <= 300 else 1)):
                rank(model, kind, n, draw, kind)
        rank(model, kind, min(REFERENCE_SIZE, len(rows)), 0, kind)
    result = {"task": job.task, "seed": job.seed, "rankings": found, **surroundings(place)}
    records.append(place.results / "samples.jsonl", result)


def kinds_of_labels(task: str) -> tuple[str, ...]:
    """The labels that a Fisher of a task can be measured with."""
    return ("given", "sampled") if tasks.TASKS[task].regression else ("given", "sampled", "exact")


JOBS = {"train": train_job, "rank": rank_job, "track": track_job, "samples": samples_job}


def surroundings(place: Place) -> dict[str, Any]:
    """What a result was measured with."""
    device = torch.cuda.get_device_name() if place.device == "cuda" else "cpu"
    return {"device": device, "versions": {name: version(name) for name in ("torch", "transformers", "peft")}}
