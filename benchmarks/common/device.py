"""What benchmarks run on, as tables and files of results name it, and where their results go."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


RESULTS = Path(__file__).parents[1] / "results"
"""The results that the documentation shows."""


def parse_options(parser: argparse.ArgumentParser, table: Callable[[Any], str]) -> argparse.Namespace:
    """The command line, with the options that benchmarks have in common; `--show` prints a result and ends.

    Args:
        parser: Knows the benchmark's own options.
        table: Makes the table of a result.
    """
    parser.add_argument("--output", type=Path, default=RESULTS, help="the folder that the results go to")
    parser.add_argument("--show", type=Path, help="print the table of a result instead")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text())))
        parser.exit()
    return options


def result_file(folder: Path, benchmark: str, what: str = "", cards: int = 1) -> Path:
    """Where a benchmark's results on this device go: `<family>_<file>-<card>.json`.

    Args:
        folder: The folder; it is made.
        benchmark: The benchmark's module, with `_` for the dot: `delta_size` is `benchmarks.delta.size`.
        what: What tells these results from others of the same benchmark and card; it comes last.
        cards: How many GPUs were used; more than one stand before the card's name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name().replace(" ", "-") if torch.cuda.is_available() else "CPU"
    parts = [benchmark, *([str(cards)] if cards > 1 else []), device, *([what] if what else [])]
    return folder / f"{'-'.join(parts)}.json"
