"""How long a GPU itself is busy with the Fisher, however long Python takes to tell it what to do.

    python -m benchmarks.fisher.kernels bert-base bert-large llama-7b

Adds up the time of all kernels, by torch's profiler, for a plain forward and backward pass and for ours; of each the
second run. Writes `results/fisher_kernels-<device>.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks.common.device import device_name, result_file
from benchmarks.fisher import ours
from benchmarks.fisher.cases import MODELS, SETTINGS, build_case
from benchmarks.fisher.other_ways import Case, floor_sorted


METHODS: dict[str, Callable[[Case], object]] = {
    "forward + backward, sorted": floor_sorted,
    "ours: hooks": partial(ours.engine, name="hooks"),
    "ours: hooks, with each sample's share": partial(ours.engine, name="hooks", contributions=True),
    "ours: a pass for each layer": partial(ours.engine, name="layer_major"),
}


def kernels(run: Callable[[], object], most: int = 5) -> dict[str, object]:
    """Milliseconds of all kernels that something starts, their number, and those that take longest."""
    run()
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = [(event.self_device_time_total / 1e3, event.count, event.key) for event in profiler.key_averages()]
    events = sorted((event for event in events if event[0]), reverse=True)
    return {
        "ms": sum(ms for ms, _, _ in events),
        "kernels": sum(count for _, count, _ in events),
        "longest": [{"ms": ms, "count": count, "kernel": key[:60]} for ms, count, key in events[:most]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device, found = "cuda" if torch.cuda.is_available() else "cpu", {}
    for setting in SETTINGS:
        if setting.model not in options.models or setting.device != device or setting.mixed:
            continue
        torch.set_float32_matmul_precision(setting.precision)
        case = build_case(setting)
        found[setting.name] = {name: kernels(partial(run, case)) for name, run in METHODS.items()}
        for name, times in found[setting.name].items():
            print(f"{setting.name}: {name}: {times['ms']:.1f} ms in {times['kernels']} kernels", flush=True)
    record = {"device": device_name(), "torch": torch.__version__, "settings": found}
    result_file(options.output, "fisher_kernels").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
