"""Add up and exchange between the processes of a distributed run. With a single process all of it does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor


T = TypeVar("T")


def count_processes() -> int:
    """The number of processes."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def process_number() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather(value: T) -> list[T]:
    """What each process has, in their order. For small things."""
    if count_processes() == 1:
        return [value]
    values: list[Any] = [None] * count_processes()
    dist.all_gather_object(values, value)
    return values


def add_up(tensor: Tensor) -> Tensor:
    """The sum over processes, written to the tensor itself."""
    if count_processes() > 1:
        if dist.get_backend() == "nccl" and not tensor.is_cuda:
            tensor.copy_(add_up(tensor.to(torch.device("cuda", torch.cuda.current_device()))))
        else:
            dist.all_reduce(tensor)
    return tensor


def do_everywhere(action: Callable[[], object]) -> None:
    """Do something; what it raises in one process is raised on all of them, see `raise_everywhere`."""
    error = None
    try:
        action()
    except Exception as caught:  # noqa: BLE001  the other processes must hear of it
        error = caught
    raise_everywhere(error)


def raise_everywhere(error: Exception | None) -> None:
    """Raise the error of any process on all of them, so that none waits for one that has given up.

    Args:
        error: What went wrong in this process, or None.

    Raises:
        Exception: The error of this process; in the others a `RuntimeError` that says what it was.
    """
    messages = gather(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for number, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"Process {number} failed. {message}")
