"""Tasks with few training rows: `rte@200` is RTE with 200 of them, which the seed draws; to all else another task.

Its held-out rows are those of the whole task. So the best epoch and the rate are chosen with as little noise as there,
and what is compared is how methods learn from few rows, not how well as many could be spared to choose by.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from benchmarks.evidence.tasks import Rows, Task, TaskData


EPOCH, EPOCHS, BATCH = 600, 10, 16
"""Few rows are gone through several times before the held-out rows are looked at, until there were so many; batches
and epochs are as for the small tasks. That gives about 380 steps."""


def named(task: str, rows: int) -> str:
    """The name of a task with so many training rows; 0 for all."""
    return f"{task}@{rows}" if rows else task


def whole(name: str) -> str:
    """The task of which a task has some rows."""
    return name.partition("@")[0]


def made(task: Task, name: str) -> Task:
    """What a task is with as many rows as its name says."""
    return replace(task, batch=BATCH, epochs=EPOCHS) if "@" in name else task


def draw(data: TaskData, name: str, seed: int) -> TaskData:
    """The rows of a task with as many training rows as its name says.

    Raises:
        ValueError: The task has fewer.
    """
    if "@" not in name:
        return data
    task, _, count = name.partition("@")
    if not 0 < int(count) <= len(data.train):
        raise ValueError(f"{count} training rows of {task} were asked for; allowed are 1 to {len(data.train)}.")
    index = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))[: int(count)]
    return replace(data, train=data.train.take(index.to(data.train.labels.device)))


def epoch(rows: Rows, name: str) -> Rows:
    """The training rows of an epoch, several times over if they are few."""
    if "@" not in name:
        return rows
    times = math.ceil(EPOCH / len(rows))
    return rows.take(torch.arange(len(rows), device=rows.labels.device).repeat(times))
