"""What the benchmarks of swapping run on, as tables and files of results name it."""

from __future__ import annotations

from pathlib import Path

import torch


def device_name() -> str:
    """The GPU, or else the CPU with the threads that are used."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    threads = torch.get_num_threads()
    return f"{model}, {threads} thread{'s' * (threads > 1)}"


def result_file(folder: Path, benchmark: str) -> Path:
    """Where a benchmark's results on this device go."""
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "CPU"
    return folder / f"{benchmark}-{device}.json"
