"""Time and memory of what `speed.py` measures."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch


class Clock:
    """Time and memory on one device: wall time on a GPU, processor time on a CPU, which others may share."""

    def __init__(self, device: str):
        self.gpu = device == "cuda"

    def measure(self, run: Callable[[], object]) -> tuple[float, float, object]:
        """Returns seconds, the peak of memory in MiB above that at the start, and what `run` returned."""
        gc.collect()
        before = self._start()
        start = self._now()
        result = run()
        if self.gpu:
            torch.cuda.synchronize()
        return self._now() - start, (self._peak() - before) / 2**20, result

    def _now(self) -> float:
        return time.perf_counter() if self.gpu else time.process_time()

    def _start(self) -> int:
        if self.gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        ctypes.CDLL(None).malloc_trim(0)  # give back what is free, or the next method gets it for nothing
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        return self._status("VmRSS")

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.gpu else self._status("VmHWM")

    def _status(self, key: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024
