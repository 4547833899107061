"""Jobs for several processes on one device, until they are done or the time is up."""

from __future__ import annotations

import gc
import multiprocessing
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait

import torch
import transformers
from jobs import JOBS, Job, Place


@dataclass
class Worker:
    """A process that does one job after the other."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    job: Job | None = None
    began: float = field(default=0.0)


def work(place: Place, pipe: Connection) -> None:
    """What a process does: take a job, do it, say how it went; None ends it."""
    quiet()
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        error = ""
        try:
            _do(place, job)
        except Exception:
            error = traceback.format_exc()
        pipe.send(error)


def _do(place: Place, job: Job) -> None:
    """Do a job; if the memory does not suffice, in two halves."""
    try:
        JOBS[job.kind](place, job)
        return
    except torch.OutOfMemoryError:
        if job.kind != "train" or len(job.items) == 1:
            raise
    finally:
        gc.collect()
        if place.device == "cuda":
            torch.cuda.empty_cache()
    half = len(job.items) // 2
    for part in (slice(half), slice(half, None)):
        _do(place, replace(job, items=job.items[part], rates=job.rates[part]))


def run_jobs(place: Place, jobs: Sequence[Job], processes: int, seconds: float) -> None:
    """Do jobs in their order, several at a time, until they are done or the time is up.

    A job is not begun if, judging by those done so far, it would not be done in time. What is not done when the time
    is up is broken off and will be run again another time.

    Args:
        place: Where everything is.
        jobs: The jobs.
        processes: How many at a time; 0 does them in this process, whatever the time.
        seconds: The time.
    """
    if processes == 0:
        for job in jobs:
            _do(place, job)
        return
    began, queue, rates = time.monotonic(), list(jobs), []
    context = multiprocessing.get_context("spawn")
    workers = []
    for _ in range(min(processes, len(queue))):
        pipe, other = context.Pipe()
        workers.append(Worker(context.Process(target=work, args=(place, other), daemon=True), pipe))
        workers[-1].process.start()
        other.close()
    done = 0
    while True:
        left = seconds - (time.monotonic() - began)
        pace = sorted(rates)[len(rates) // 2] if rates else 0.0
        for worker in workers:
            if worker.job is None and worker.process.is_alive():
                worker.job = _next(queue, left / pace if pace else float("inf"))
                if worker.job is not None:
                    worker.began = time.monotonic()
                    worker.pipe.send(worker.job)
        busy = [worker for worker in workers if worker.job is not None]
        if not busy or left <= 0:
            break
        for pipe in wait([worker.pipe for worker in busy], timeout=max(0.0, left)):
            worker = next(w for w in busy if w.pipe is pipe)
            took = time.monotonic() - worker.began
            try:
                error = worker.pipe.recv()
            except EOFError:
                error = "the process ended"
                worker.process.join()
            print(f"{time.monotonic() - began:6.0f} s  {took:6.1f} s  {worker.job} {error}", flush=True)
            if not error:
                done += 1
                rates.append(took / worker.job.weight)
            worker.job = None
    for worker in workers:
        if worker.job is not None:
            worker.process.terminate()
        elif worker.process.is_alive():
            worker.pipe.send(None)
    for worker in workers:
        worker.process.join()
    print(f"{done} jobs done, {len(queue) + sum(w.job is not None for w in workers)} left", flush=True)


def _next(queue: list[Job], most: float) -> Job | None:
    """Take the first job of a queue that is short enough."""
    for number, job in enumerate(queue):
        if job.weight <= most:
            return queue.pop(number)
    return None


def quiet() -> None:
    """Keep libraries from printing."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
