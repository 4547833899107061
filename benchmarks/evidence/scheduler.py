"""Jobs for several processes on one or more devices, until they are done or the time is up."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait

import torch
import transformers

from benchmarks.evidence.jobs import JOBS, Job, Place


OUT_OF_MEMORY = "out of memory"


@dataclass
class Worker:
    """A process that does one job after the other."""

    process: multiprocessing.process.BaseProcess
    pipe: Connection
    job: Job | None = None
    began: float = field(default=0.0)


def work(place: Place, pipe: Connection) -> None:
    """What a process does: take a job, do it, say how it went; None ends it, and so does an error.

    After an error, in the midst of a CUDA graph say, the state of the device is unknown.
    """
    quiet()
    torch.set_num_threads(1)
    while (job := pipe.recv()) is not None:
        try:
            do(place, job)
        except Exception as error:
            pipe.send(OUT_OF_MEMORY if is_out_of_memory(error) else traceback.format_exc())
            return
        pipe.send("")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the memory was full, be it in the midst of capturing a CUDA graph, which then fails in its own way."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__context__))


def do(place: Place, job: Job) -> None:
    """Do a job, and give back its memory."""
    JOBS[job.kind](place, job)
    gc.collect()
    if place.device == "cuda":
        torch.cuda.empty_cache()


def halves(job: Job) -> list[Job]:
    """A job as two, for which the memory may suffice; nothing if it cannot be split."""
    if job.kind != "train" or len(job.items) == 1:
        return []
    middle = len(job.items) // 2
    parts = (slice(middle), slice(middle, None))
    return [replace(job, items=job.items[p], rates=job.rates[p], weight=job.weight / 2) for p in parts]


class Pool:
    """Processes that share one or more GPUs evenly. A context manager: what still runs at its end is broken off.

    Args:
        place: Where everything is.
        processes: How many; 0 does the jobs in this process, whatever the time.
        until: When the time is up, by `time.monotonic`.
    """

    def __init__(self, place: Place, processes: int, until: float = float("inf")):
        self.place, self.processes, self.until = place, processes, until
        self.workers: list[Worker] = []
        self.paces: list[float] = []

    def __enter__(self) -> Pool:
        self.workers = [self._start(number) for number in range(self.processes)]
        return self

    def _start(self, number: int) -> Worker:
        """A new process; it sees one GPU."""
        gpus = torch.cuda.device_count() if self.place.device == "cuda" else 0
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        if gpus:
            every = shown.split(",") if shown else [str(gpu) for gpu in range(gpus)]
            os.environ["CUDA_VISIBLE_DEVICES"] = every[number % gpus]
        context = multiprocessing.get_context("spawn")
        pipe, other = context.Pipe()
        process = context.Process(target=work, args=(self.place, other), daemon=True)
        process.start()
        other.close()
        if shown is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = shown
        elif gpus:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        return Worker(process, pipe)

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            if worker.job is not None:
                worker.process.terminate()
            elif worker.process.is_alive():
                worker.pipe.send(None)
        for worker in self.workers:
            worker.process.join()

    def do(self, jobs: Sequence[Job] = (), more: Callable[[Sequence[Job]], list[Job]] = lambda _: []) -> int:
        """Do jobs in their order until they are done or the time is up.

        A job is not begun if, judging by those done so far, it would not be done in time.

        Args:
            jobs: The jobs.
            more: Asked for the jobs to do after those, given the ones that run or have failed, for each job anew.

        Returns:
            How many were done.
        """
        began, queue, done = time.monotonic(), list(jobs), 0
        failed: list[Job] = []
        while not self.processes:
            queue = queue or more(())
            if not queue:
                return done
            do(self.place, queue.pop(0))
            done += 1
        while True:
            left = self.until - time.monotonic()
            pace = sorted(self.paces)[len(self.paces) // 2] if self.paces else 0.0
            for worker in self.workers:
                if worker.job is None:
                    most = left / pace if pace else float("inf")
                    running = [other.job for other in self.workers if other.job is not None]
                    worker.job = next_job(queue, most) or next_job(more(running + failed), most)
                    if worker.job is None:
                        break
                    worker.began = time.monotonic()
                    worker.pipe.send(worker.job)
            busy = [worker for worker in self.workers if worker.job is not None]
            if not busy or left <= 0:
                break
            for pipe in wait([worker.pipe for worker in busy], timeout=min(left, 3600.0)):
                worker = next(w for w in busy if w.pipe is pipe)
                took = time.monotonic() - worker.began
                try:
                    error = worker.pipe.recv()
                except EOFError:
                    error = "the process ended"
                print(f"{time.monotonic() - began:6.0f} s  {took:6.1f} s  {worker.job} {error}", flush=True)
                if not error:
                    done += 1
                    self.paces.append(took / worker.job.weight)
                    worker.job = None
                    continue
                failed.append(worker.job)
                if error == OUT_OF_MEMORY:
                    queue += halves(worker.job)
                worker.process.join()
                number = self.workers.index(worker)
                self.workers[number] = self._start(number)
        print(f"{done} jobs done after {time.monotonic() - began:.0f} s, {len(failed)} failed", flush=True)
        return done


def next_job(queue: list[Job], most: float) -> Job | None:
    """Take the first job of a queue that is short enough."""
    for number, job in enumerate(queue):
        if job.weight <= most:
            return queue.pop(number)
    return None


def quiet() -> None:
    """Keep libraries from printing."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
