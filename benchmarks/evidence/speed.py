"""How fast the benchmarks run, and what a training step of each method costs."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.evidence import methods, records, tasks, training
from benchmarks.evidence.jobs import Place, surroundings
from benchmarks.evidence.scheduler import quiet
from benchmarks.evidence.training import Trainee


def check(place: Place, processes: Sequence[int]) -> None:
    """Compare training by CUDA graphs with plain steps; count steps for several numbers of models and processes."""
    began = time.perf_counter()
    print(surroundings(place), flush=True)
    ways = (False, True) if place.device == "cuda" else (False,)
    losses = [_losses(place, graphs) for graphs in ways]
    print("losses by plain steps, and by CUDA graphs:", losses, flush=True)
    apart = max(abs(a / b - 1) for x, y in zip(losses[0], losses[-1], strict=True) for a, b in zip(x, y, strict=True))
    print(f"{'they agree' if apart < 0.02 else 'THEY DIFFER'}: {apart:.2%} apart at most", flush=True)
    tried = [(ways[-1], count) for count in (1, 3, 5, 8)]
    for task in ("cola", "rte"):
        for graphs, count in [(False, 1), *tried] if len(ways) > 1 else tried[:1]:
            found = _speed(place, task, count, graphs)
            way = "graphs" if graphs else "plain"
            print(f"{time.perf_counter() - began:4.0f} s  {task}, {way}, {count} models: {found}", flush=True)
    with multiprocessing.get_context("spawn").Pool(max(processes)) as pool:
        for count in processes:
            for task, together in (("cola", 5), ("rte", 5)):
                found = pool.starmap(_speed, [(place, task, together, ways[-1], 7)] * count, chunksize=1)
                rate = sum(f["steps_per_second"] for f in found)
                print(
                    f"{time.perf_counter() - began:4.0f} s  {task}, {count} processes of {together} models: "
                    f"{rate:.0f} steps/s, {found[0]}",
                    flush=True,
                )


def _losses(place: Place, graphs: bool) -> list[list[float]]:
    """The losses of two models in three epochs without dropout."""
    data, model = place.rows("rte"), place.load("rte", 0)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainees = [Trainee(methods.adapt(copy.deepcopy(model), name), 5e-5) for name in ("full", "layers-3.5")]
    rows = data.train.take(torch.arange(min(320, len(data.train)), device=place.device))
    found = []
    for _ in training.train(trainees, rows, batch=32, epochs=3, seed=0, graphs=graphs):
        found.append([round(float(trainee.loss_sum), 4) for trainee in trainees])
    return found


def _speed(place: Place, task: str, count: int, graphs: bool, epochs: int = 4) -> dict[str, float]:
    """How fast models are trained in step."""
    quiet()
    made, rows = tasks.TASKS[task], place.rows(task).train
    rows = rows.take(torch.arange(min(1024, len(rows)), device=place.device))
    base = place.load(task, 0)
    first = place.depth // 4
    tuning = methods.layers_name(range(first, first + max(1, place.depth * 5 // 12)))
    adapted = [methods.adapt(copy.deepcopy(base), tuning) for _ in range(count)]
    trainees = [Trainee(training.halve_frozen(model), 5e-5) for model in adapted]
    times, done = [time.perf_counter()], 0
    for steps in training.train(trainees, rows, batch=made.batch, epochs=epochs, seed=0, graphs=graphs):
        done = steps
        _wait()
        times.append(time.perf_counter())
    memory = torch.cuda.max_memory_reserved() / 2**30 if place.device == "cuda" else 0.0
    del trainees, adapted
    gc.collect()
    if place.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return {
        "steps_per_second": round((epochs - 1) * count * done / (times[-1] - times[1]), 1),
        "first_epoch_s": round(times[1] - times[0], 2),
        "memory_gib": round(memory, 2),
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cost(place: Place, tunings: Sequence[str], length: int = 128, batch: int = 32, steps: int = 12) -> None:
    """Time and memory of a training step of each method, one after the other on an idle device.

    A plain step, which on a GPU mostly waits for the CPU to launch kernels, and the replay of its CUDA graph, which is
    what the GPU itself needs. `full` is measured in each run, for the others to be compared with.
    """
    found = {}
    for tuning in dict.fromkeys(("full", *tunings)):
        adapted = methods.adapt(place.load("rte", 0), tuning)
        trainee = Trainee(training.halve_frozen(adapted), 1e-5)
        trainee.model.train()
        inputs = {
            "input_ids": torch.randint(1000, 20000, (batch, length), device=place.device),
            "attention_mask": torch.ones(batch, length, dtype=torch.long, device=place.device),
        }
        labels = torch.zeros(batch, dtype=torch.long, device=place.device)
        plain = _median_seconds(partial(trainee.step, inputs, labels), steps)
        memory, replayed = None, None
        if place.device == "cuda":
            memory = torch.cuda.max_memory_allocated()
            graph = training.Together([trainee], graphs=True)
            replayed = _median_seconds(partial(graph.step, inputs, labels), steps)
            graph.close()
        found[tuning] = {
            "step_seconds": plain,
            "graph_seconds": replayed,
            "peak_bytes": memory,
            **methods.size(trainee.model),
        }
        print(tuning, found[tuning], flush=True)
        del trainee, adapted
        gc.collect()
    records.append(
        place.results / "cost.jsonl",
        {"length": length, "batch": batch, "methods": found, **surroundings(place)},
    )


def _median_seconds(step: Callable[[], None], steps: int) -> float:
    """The median time of a step after three, and memory counted from then on."""
    times = []
    for number in range(steps + 3):
        _wait()
        if number == 3 and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        step()
        _wait()
        times.append(time.perf_counter() - began)
    return sorted(times[3:])[steps // 2]
