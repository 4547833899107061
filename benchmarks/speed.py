"""How fast the benchmarks run, and what a training step of each method costs."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import time
from collections.abc import Sequence

import methods
import tasks
import torch
import training
from jobs import Place, surroundings, write
from scheduler import quiet
from training import Trainee


def check(place: Place, processes: Sequence[int]) -> None:
    """Compare training by CUDA graphs with plain steps, and count steps for several numbers of processes."""
    task, data = "rte", place.rows("rte")
    losses = {}
    for graphs in (False, True):
        model = place.load(task, 0)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        trainees = [Trainee(methods.adapt(copy.deepcopy(model), name), 5e-5) for name in ("full", "layers-3.5")]
        rows = data.train.take(torch.arange(640, device=place.device))
        history = []
        for _ in training.train(trainees, rows, batch=32, epochs=3, seed=0, graphs=graphs):
            history.append([float(t.loss_sum) for t in trainees])
        losses[graphs] = torch.tensor(history)
    print("loss sums without graphs", losses[False].tolist(), "and with", losses[True].tolist(), flush=True)
    for task in ("cola", "rte"):
        for graphs, count in ((False, 1), (True, 1), (True, 3), (True, 5)):
            print(
                task, "graphs" if graphs else "plain", count, "models:", _speed(place, task, count, graphs), flush=True
            )
    context = multiprocessing.get_context("spawn")
    for task in ("cola", "rte"):
        for count in processes:
            with context.Pool(count) as pool:
                found = pool.starmap(_speed, [(place, task, 4 if task == "cola" else 2, True)] * count)
            print(
                task,
                count,
                "processes:",
                f"{sum(f['steps_per_second'] for f in found):.0f} steps/s",
                found[0],
                flush=True,
            )


def _speed(place: Place, task: str, count: int, graphs: bool, epochs: int = 2) -> dict[str, float]:
    """How fast models are trained in step."""
    quiet()
    made, rows = tasks.TASKS[task], place.rows(task).train
    rows = rows.take(torch.arange(min(2048, len(rows)), device=place.device))
    base = place.load(task, 0)
    trainees = [Trainee(methods.adapt(copy.deepcopy(base), "layers-3.4.5.6.7"), 5e-5) for _ in range(count)]
    times = [time.perf_counter()]
    steps = 0
    for steps in training.train(trainees, rows, batch=made.batch, epochs=epochs, seed=0, graphs=graphs):  # noqa: B007
        torch.cuda.synchronize()
        times.append(time.perf_counter())
    memory = torch.cuda.max_memory_allocated() / 2**30
    return {
        "steps_per_second": round(count * steps / (times[-1] - times[-2]), 1),
        "first_epoch_s": round(times[1] - times[0], 2),
        "memory_gib": round(memory, 2),
    }


def cost(place: Place, tunings: Sequence[str], length: int = 128, batch: int = 32, steps: int = 30) -> None:
    """Time and memory of a training step of each method, one after the other on an idle device."""
    found = {}
    for tuning in tunings:
        base = place.load("rte", 0)
        trainee = Trainee(methods.adapt(base, tuning), 1e-5)
        trainee.model.train()
        inputs = {
            "input_ids": torch.randint(1000, 20000, (batch, length), device=place.device),
            "attention_mask": torch.ones(batch, length, dtype=torch.long, device=place.device),
        }
        labels = torch.zeros(batch, dtype=torch.long, device=place.device)
        times = []
        for step in range(steps + 5):
            if place.device == "cuda":
                torch.cuda.synchronize()
                if step == 5:
                    torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            trainee.step(inputs, labels)
            if place.device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        memory = torch.cuda.max_memory_allocated() if place.device == "cuda" else None
        middle = sorted(times[5:])[steps // 2]
        found[tuning] = {"step_seconds": middle, "peak_bytes": memory, **methods.size(trainee.model)}
        print(tuning, found[tuning], flush=True)
        del trainee, base
        gc.collect()
    write(place.results / "cost.json", {"length": length, "batch": batch, "methods": found, **surroundings(place)})
