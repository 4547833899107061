"""The command line in several processes, of which the second is killed as if by `kill -9`: `dying.py WHEN train ...`.

WHEN is `training` (in the second epoch) or `saving` (at its end, in the middle of the second checkpoint: after the
adapter, before the optimizer).
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Trainer

from peft_surgical.cli import app


def wait_for(file: Path, seconds: float = 30) -> None:
    """Wait until another process has written a file."""
    end = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)


def dying_at(call: int, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that kills its process at a call, counted from 1."""
    calls = 0

    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            if method.__name__ == "_save_optimizer_and_scheduler":
                wait_for(Path(args[1]) / "adapter_model.safetensors")
            print("process 1 kills itself", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **kwargs)

    return counted


if __name__ == "__main__":
    when = sys.argv.pop(1)
    if os.environ["RANK"] == "1":
        name, call = {"training": ("training_step", 10), "saving": ("_save_optimizer_and_scheduler", 2)}[when]
        setattr(Trainer, name, dying_at(call, getattr(Trainer, name)))
    app()
