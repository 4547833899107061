"""What benchmarks run on, as tables and files of results name it, and where their results go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
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


def parse_options(parser: argparse.ArgumentParser, table: Callable[[dict], str]) -> argparse.Namespace:
    """The command line, with the options that benchmarks have in common; `--show` prints a result and ends.

    Args:
        parser: Knows the benchmark's own options.
        table: Makes the table of a result.
    """
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results", help="a folder")
    parser.add_argument("--show", type=Path, help="print the table of a result instead")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text())))
        parser.exit()
    return options


def result_file(folder: Path, benchmark: str) -> Path:
    """Where a benchmark's results on this device go."""
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "CPU"
    return folder / f"{benchmark}-{device}.json"
